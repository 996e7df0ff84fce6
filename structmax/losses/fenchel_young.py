"""The core of all losses of structures: L(θ, y) = max_μ {⟨θ, μ⟩ − Ω(μ)} + Ω(y) − ⟨θ, y⟩.

With the prediction μ*, at which the maximum is attained, the gradient in θ is μ* − y, over all
parts. L is convex in θ, at least 0, and 0 where the target y is itself a maximum (Blondel, Martins
& Niculae, "Learning with Fenchel-Young losses", JMLR 2020, §3). A loss says what the maximum and Ω
are; targets are read in one place, ``losses/target.py``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from structmax.losses.target import Target
from structmax.structures.base import dot
from structmax.structures.parts import PartStructure


def fenchel_young(
    target: Target,
    value: Tensor,
    omega: Tensor | float,
    reduction: str,
    constant_known: bool = True,
) -> Tensor:
    """value + Ω(target) − ⟨θ, target⟩, reduced.

    Args:
        value: max_μ {⟨θ, μ⟩ − Ω(μ)}, ``(*batch)``, whose gradient is the prediction
        omega: Ω(target), ``(*batch)``
        constant_known: whether the loss is exact, so that less than 0 is rounding
    """
    score = target.score()
    return finish(value + omega - score, score == -math.inf, reduction, constant_known)


def finish(loss: Tensor, forbidden: Tensor, reduction: str, constant_known: bool = True) -> Tensor:
    """A loss ``(*batch)`` without rounding below 0, +inf without a gradient where the target has a
    forbidden part, reduced."""
    if constant_known:
        loss = loss + torch.where(loss < 0, -loss, 0.0).detach()  # its gradient stays
    loss = torch.where(forbidden, math.inf, loss)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.mean()


def check_reduction(owner: str, reduction: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'{owner}: reduction must be "mean", "sum" or "none", got {reduction!r}.')


def best_score(structure: PartStructure) -> Tensor:
    """max_z ⟨θ, z⟩, ``(*batch)``, whose gradient is the best structure, in all its parts."""
    parts, dims = structure._exact_parts(), len(structure.batch_shape)
    value, counts = structure._argmax_parts([p.detach() for p in parts])
    terms = [dot(part, z, part.dim() - dims) for part, z in zip(parts, counts, strict=True)]
    total = sum(terms[1:], terms[0]).to(structure._parts()[0].dtype)
    return structure._refuse_infeasible("argmax", value, total)
