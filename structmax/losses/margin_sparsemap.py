"""The SparseMAP loss with a margin."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from structmax.losses.fenchel_young import check_reduction, fenchel_young
from structmax.losses.part_costs import part_costs
from structmax.losses.sparsemap import check_options, half_norm
from structmax.losses.target import Target
from structmax.sparse.solve import sparsemap_value
from structmax.structures.base import Structure


def margin_sparsemap(
    structure: Structure,
    target: Any,
    *,
    cost: Tensor | float | None = None,
    reduction: str = "mean",
    **options: Any,
) -> Tensor:
    """L(θ, μ̄) = max_μ {⟨θ, μ⟩ − ½‖μ‖² + ρ(μ, μ̄)} − ⟨θ, μ̄⟩ + ½‖μ̄‖².

    The :func:`sparsemap` loss with the cost ρ of :func:`hinge` (Niculae et al., ICML 2018, §5): the
    prediction is the SparseMAP solution at cost-augmented scores, and the gradient is it minus μ̄.
    At a structure, 0 exactly where that solution is the target. A soft target has expected costs;
    its loss is at least 0 but seldom reaches it. Targets: see :func:`crf`.

    For every structure that has an ``argmax`` and whose parts occur at most once.

    Args:
        cost: of each part, at least 0; broadcasts to ``(*batch, *parts)``
        options: of ``structure.sparsemap``, such as ``max_iter`` and ``tol``

    >>> import structmax as sx, torch
    >>> scores = torch.tensor([0.0, 1.0, 3.0], requires_grad=True)
    >>> sx.losses.sparsemap(sx.Choice(scores), torch.tensor(2))
    tensor(0., grad_fn=...)
    >>> loss = sx.losses.margin_sparsemap(sx.Choice(scores), torch.tensor(2))
    >>> loss
    tensor(0.2500, grad_fn=...)
    >>> loss.backward()
    >>> scores.grad
    tensor([ 0.0000,  0.5000, -0.5000])
    >>> sx.losses.margin_sparsemap(sx.Choice(scores.detach()), torch.tensor(2), cost=0.5)
    tensor(0.)
    """
    check_reduction("margin_sparsemap", reduction)
    check_options("margin_sparsemap", options)
    goal = Target("margin_sparsemap", structure, target)
    added, rest = part_costs(goal, cost)
    value = sparsemap_value(goal.structure.perturb(added), **options) + rest
    return fenchel_young(goal, value, half_norm(goal), reduction)
