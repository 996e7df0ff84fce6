"""Budgetmax: the projection onto the simplex with room for k."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from structmax.checks import can_look, number
from structmax.maps.recipe import Map, keep, refuse, solve_again, sums_to


def naive(x: Tensor, parameters: list[Tensor], options: list[float]) -> Tensor:
    """p = x − τ clipped to [0, 1], with τ by bisection and a last step in closed form."""
    k = options[0]
    there = x != -math.inf
    count = there.sum(-1, keepdim=True)
    peak = x.amax(-1, keepdim=True)
    z = x.double() - torch.where(peak == -math.inf, 0.0, peak)

    low = torch.where(there, z, math.inf).amin(-1, keepdim=True) - 1  # every entry is 1 here
    low = torch.where(count > 0, low, -1.0)
    high = torch.zeros_like(low)
    for _ in range(200):
        middle = (low + high) / 2
        above = (z - middle).clamp(0, 1).sum(-1, keepdim=True) >= k
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    z = z - low
    inside = (z > 0) & (z < 1)
    rest = (k - z.clamp(0, 1).sum(-1, keepdim=True)) / inside.sum(-1, keepdim=True).clamp(min=1)
    p = (z + rest).clamp(0, 1)
    p = torch.where(count == k, there.double(), p)
    good = (x < math.inf).all(-1, keepdim=True) & ((count >= k) | (count == 0))
    return torch.where(good | ~there, torch.where(there, p, 0.0), math.nan).to(x.dtype)


def naive_backward(
    p: Tensor, g: Tensor, parameters: list[Tensor], options: list[float]
) -> list[Tensor]:
    """g − its mean where 0 < p < 1, 0 elsewhere."""
    inside = (p > 0) & (p < 1)
    count = inside.sum(-1, keepdim=True).clamp(min=1)
    mean = torch.where(inside, g, 0.0).sum(-1, keepdim=True) / count
    return [torch.where(p.isnan(), math.nan, torch.where(inside, g - mean, 0.0))]


_map = Map("budgetmax", naive, naive_backward)


def budgetmax(x: Tensor, k: float, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """The point nearest to the scores with 0 ≤ p ≤ 1 and Σ p = k: a relaxed choice of k entries.

        p = x − τ clipped to [0, 1], with the τ that makes Σ p = k

    ``mask`` broadcasts to x and is True at the entries to keep. The others, and scores of −inf, get
    exactly 0 and no gradient. A row with fewer than k entries is an error (NaN while compiling),
    but a row without any gets zeros.

    >>> budgetmax(torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]), k=2)
    tensor([0.0000, 0.1250, 0.3750, 0.6250, 0.8750])

    With k = 1 it is sparsemax:

    >>> budgetmax(torch.tensor([-2.0, 0.0, 0.5]), k=1)
    tensor([0.0000, 0.2500, 0.7500])
    """
    k = check_k("budgetmax", k)
    if isinstance(x, Tensor) and x.dim() > 0 and -x.dim() <= dim < x.dim() and k > x.shape[dim] > 0:
        raise ValueError(
            f"budgetmax: k = {k:g} is more than the {x.shape[dim]} entries along dim {dim} of "
            f"scores of shape {tuple(x.shape)}, each of which takes at most 1."
        )
    p = _map(x, options=(k,), dim=dim, mask=mask)
    if not can_look(p) or bool(sums_to(p, k, dim).all()):
        return p
    _refuse_short_rows(x, k, dim, mask)
    x = x if mask is None else keep("budgetmax", x, mask)
    bounds = torch.zeros_like(x.detach()), torch.ones_like(x.detach())
    return solve_again(lambda x: _map(x, options=(k,), dim=dim), p, x, *bounds, k, dim)


def check_k(owner: str, k: float) -> float:
    """0 ≤ k < ∞."""
    k = number(owner, "k", k)
    if not 0 <= k < math.inf:
        raise ValueError(f"{owner}: k must be a number of at least 0, got {k}.")
    return k


def _refuse_short_rows(x: Tensor, k: float, dim: int, mask: Tensor | None) -> None:
    """Raises if a row has some entries, but fewer than k."""
    there = x.detach() != -math.inf if mask is None else mask & (x.detach() != -math.inf)
    count = there.movedim(dim, -1).sum(-1)
    refuse(
        "budgetmax",
        (count < k) & (count > 0),
        lambda row: f"has {int(count[row])} entries that are not masked, fewer than k = {k:g}.",
    )
