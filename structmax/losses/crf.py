"""The negative log-likelihood of a conditional random field."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from structmax.losses.fenchel_young import check_reduction, fenchel_young, finish
from structmax.losses.target import Target
from structmax.smoothing import SHANNON
from structmax.structures.base import Structure


def crf(structure: Structure, target: Any, *, reduction: str = "mean") -> Tensor:
    """L(θ, y) = A(θ) − ⟨θ, y⟩ = −γ log p(y): the log loss of a Gibbs distribution.

    (Lafferty, McCallum & Pereira, "Conditional random fields", ICML 2001.) The Fenchel-Young loss
    of Ω = −γ·entropy. Its gradient is the expected structure minus y; it is above 0 at all finite
    scores. For a ``LinearChain`` and integer tags, value and gradient come from one kernel.

    Targets, here and in the other losses:

    - hard: z ``(*batch, *parts)`` of 0 and 1, the integer form (tags, heads, …) or the human form;
    - soft: another structure p over the same parts, a ``SparseMAPResult``, or expected counts: a
      tensor of means ``(*batch, *parts)``, and where additional parts have scores (transitions,
      moves, rules) a tuple ``(parts, additional)``, as in ``(p.marginals(), p.edge_marginals())``.
      A tensor of means alone is an error there, since it does not determine the others. That counts
      are those of some distribution is not checked.

    The loss of a structure p is γ·KL(p ‖ structure), 0 where both agree. Of other soft targets the
    entropy is not known and left out: their loss is A(θ) − ⟨θ, μ̄⟩, the Fenchel-Young loss up to a
    constant free of θ, and their gradient is exact. A target with a forbidden part (−inf) has loss
    +inf and no gradient.

    For every structure with a ``log_partition``, under Shannon; other smoothings: :func:`smoothed`.

    Args:
        reduction: ``"mean"`` or ``"sum"`` over the batch, or ``"none"``: ``(*batch)``

    >>> import structmax as sx, torch
    >>> unary = torch.tensor([[2.0, 0.0], [0.0, 0.5]], requires_grad=True)
    >>> chain = sx.LinearChain(unary, torch.tensor([[0.0, -1.0], [0.0, 0.0]]))
    >>> loss = sx.losses.crf(chain, torch.tensor([0, 1]))
    >>> loss
    tensor(1.1755, grad_fn=...)
    >>> loss.backward()
    >>> torch.allclose(unary.grad, chain.marginals() - chain.encode([0, 1]))
    True

    The same target as z and as tags, and a softer one:

    >>> chain = sx.LinearChain(unary.detach(), torch.zeros(2, 2))
    >>> sx.losses.crf(chain, [0, 1]), sx.losses.crf(chain, torch.eye(2))
    (tensor(0.6010), tensor(0.6010))
    >>> teacher = sx.LinearChain(torch.zeros(2, 2), torch.zeros(2, 2))
    >>> sx.losses.crf(chain, teacher), torch.distributions.kl_divergence(teacher, chain)
    (tensor(0.4647), tensor(0.4647))
    >>> sx.losses.crf(chain, (teacher.marginals(), teacher.edge_marginals()))  # without −log 4
    tensor(1.8510)
    """
    check_reduction("crf", reduction)
    goal = Target("crf", structure, target)
    check_shannon("crf", structure)
    if not goal.is_hard:
        value = goal.structure.log_partition()
        return fenchel_young(goal, value, goal.omega(structure.smoothing), reduction)
    loss = -structure.smoothing.gamma * goal.log_prob()
    return finish(loss, loss == math.inf, reduction)


def check_shannon(owner: str, structure: Structure) -> None:
    if structure.smoothing.code[0] != SHANNON:
        raise ValueError(
            f"{owner}: the structure's smoothing must be sx.Shannon, got {structure.smoothing}. "
            "sx.losses.smoothed takes any."
        )
