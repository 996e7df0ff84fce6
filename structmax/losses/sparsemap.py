"""The SparseMAP loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from structmax.losses.fenchel_young import check_reduction, fenchel_young
from structmax.losses.target import Target
from structmax.sparse.solve import sparsemap_value
from structmax.structures.base import Structure


def sparsemap(
    structure: Structure, target: Any, *, reduction: str = "mean", **options: Any
) -> Tensor:
    """L(θ, μ̄) = max_μ {⟨θ, μ⟩ − ½‖μ‖²} − ⟨θ, μ̄⟩ + ½‖μ̄‖², with μ in the polytope of structures.

    (Niculae, Martins, Blondel & Cardie, "SparseMAP: differentiable sparse structured inference",
    ICML 2018, §5.) The norms are of the primary parts; additional ones only score. Its gradient is
    the SparseMAP solution minus μ̄. It is 0 exactly where the target is that solution, which for a
    structure happens at finite scores. Soft targets are exact too: Ω is known at any point.
    Targets: see :func:`crf`.

    For every structure that has an ``argmax``. The structure's smoothing plays no part.

    Args:
        options: of ``structure.sparsemap``, such as ``max_iter`` and ``tol``

    >>> import structmax as sx, torch
    >>> scores = torch.tensor([0.0, 1.0, 1.5], requires_grad=True)
    >>> loss = sx.losses.sparsemap(sx.Choice(scores), torch.tensor(2))
    >>> loss
    tensor(0.0625, grad_fn=...)
    >>> loss.backward()
    >>> scores.grad
    tensor([ 0.0000,  0.2500, -0.2500])
    >>> sx.losses.sparsemap(sx.Choice(2 * scores.detach()), torch.tensor(2))
    tensor(0.)

    A tree of three words, and a target between two of them:

    >>> tree = sx.DependencyTree(torch.zeros(4, 4))
    >>> mean = (tree.encode([0, 1, 2]) + tree.encode([0, 1, 1])) / 2
    >>> round(sx.losses.sparsemap(tree, mean).item(), 4)
    0.75
    >>> round(sx.losses.sparsemap(tree, tree.sparsemap()).item(), 6)
    0.0
    """
    check_reduction("sparsemap", reduction)
    check_options("sparsemap", options)
    goal = Target("sparsemap", structure, target)
    value = sparsemap_value(goal.structure, **options)
    return fenchel_young(goal, value, half_norm(goal), reduction)


def half_norm(target: Target) -> Tensor:
    """½‖μ̄‖² of the primary parts, ``(*batch)``."""
    return target.primary().square().flatten(len(target.structure.batch_shape)).sum(-1) / 2


def check_options(owner: str, options: dict[str, Any]) -> None:
    if options.get("penalize", "primary") != "primary":
        raise ValueError(
            f'{owner}: penalize must be "primary", got {options["penalize"]!r}: the norm of a '
            "target is that of its primary parts."
        )
