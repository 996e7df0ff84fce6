"""The cost ρ of a structure in place of a target, part by part."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from structmax import checks
from structmax.losses.target import Target


def part_costs(target: Target, cost: Tensor | float | None) -> tuple[Tensor, Tensor]:
    """ρ(z, y) = Σ cost·|z − y| as what it adds to the score of each part, and a rest free of z.

    |z − y| = z + y − 2zy for 0 and 1, so ρ = ⟨cost·(1 − 2y), z⟩ + ⟨cost, y⟩. For a soft target y
    this is the expected cost, if its structures are drawn whatever z is. Returns ``(*batch,
    *parts)`` and ``(*batch)``.
    """
    y, structure = target.primary(), target.structure
    costs = torch.as_tensor(1.0 if cost is None else cost, dtype=y.dtype, device=y.device)
    try:
        costs = costs.expand(y.shape)
    except RuntimeError:
        raise ValueError(
            f"{target.owner}: cost must broadcast to {tuple(y.shape)}, one for each part, got "
            f"{tuple(costs.shape)}."
        ) from None
    costs = torch.where(structure._usable_parts(), costs, torch.zeros_like(costs))
    if structure._validate_args and checks.can_look(structure._first):
        _check(target.owner, costs, y)
    return costs * (1 - 2 * y), (costs * y).flatten(len(structure.batch_shape)).sum(-1)


def _check(owner: str, costs: Tensor, y: Tensor) -> None:
    bad, twice = ~((costs >= 0) & (costs < math.inf)), y > 1 + 1e-3
    if not bool((bad | twice).any()):
        return
    if bool(bad.any()):
        where = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"{owner}: cost{list(where)} is {costs[where].item()}; a cost must be finite and at "
            "least 0."
        )
    where = tuple(twice.nonzero()[0].tolist())
    raise ValueError(
        f"{owner}: target has part {list(where)} {y[where].item():g} times, and costs are defined "
        "for parts that a structure has at most once."
    )
