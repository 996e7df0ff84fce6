"""The structured hinge loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from structmax.losses.fenchel_young import best_score, check_reduction, fenchel_young
from structmax.losses.part_costs import part_costs
from structmax.losses.target import Target
from structmax.structures.base import Structure


def hinge(
    structure: Structure,
    target: Any,
    *,
    cost: Tensor | float | None = None,
    reduction: str = "mean",
) -> Tensor:
    """L(θ, y) = max_z {⟨θ, z⟩ + ρ(z, y)} − ⟨θ, y⟩: each other structure must lose by its cost.

    ρ(z, y) = Σ cost·|z − y| over the primary parts, the Hamming cost if all costs are 1: a wrong
    tag then costs 2, for the part that is missing and for the one too many. The loss of max-margin
    Markov networks (Taskar, Guestrin & Koller, NeurIPS 2003; Tsochantaridis et al., JMLR 2005, with
    margin rescaling). Its gradient is the cost-augmented argmax minus y. It is 0 exactly where the
    target leads every z by ρ(z, y), and else at least the cost of the best structure. A soft target
    has expected costs; its loss is at least 0 but seldom reaches it.

    For every structure that has an ``argmax`` and whose parts occur at most once; in
    ``GridPath(moves="all")``, whose scores cannot exceed 0, costs are cut off there. Targets: see
    :func:`crf`.

    Args:
        cost: of each part, at least 0; broadcasts to ``(*batch, *parts)``

    >>> import structmax as sx, torch
    >>> scores = torch.tensor([3.0, 2.0, -1.0], requires_grad=True)
    >>> loss = sx.losses.hinge(sx.Choice(scores), torch.tensor(0))
    >>> loss  # option 1 is behind by 1, and should be by 2
    tensor(1., grad_fn=...)
    >>> loss.backward()
    >>> scores.grad
    tensor([-1.,  1.,  0.])
    >>> sx.losses.hinge(sx.Choice(scores.detach()), torch.tensor(0), cost=0.5)
    tensor(0.)

    To confuse the tags 1 and 2 is cheap, to miss tag 0 is not:

    >>> unary = torch.tensor([[0.0, 1.0, 1.0], [2.0, 0.0, 0.0]])
    >>> confusion = torch.tensor([[5.0, 5.0, 5.0], [3.0, 0.1, 0.1], [3.0, 0.1, 0.1]])
    >>> tags = torch.tensor([1, 0])
    >>> chain = sx.LinearChain(unary, torch.zeros(3, 3))
    >>> sx.losses.hinge(chain, tags, cost=confusion[tags])
    tensor(10.1000)
    """
    check_reduction("hinge", reduction)
    goal = Target("hinge", structure, target)
    added, rest = part_costs(goal, cost)
    return fenchel_young(goal, best_score(goal.structure.perturb(added)) + rest, 0.0, reduction)
