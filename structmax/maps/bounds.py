"""What csparsemax and csoftmax share: p = clip(v(x − τ), lower, upper) with Σ p = 1.

v is the identity (csparsemax) or exp (csoftmax, ``soft``). Both see the parameters ``[upper, lower,
x]``, where x are the scores once more, without gradient: where both bounds are equal, or no entry
is strictly between its bounds, the backward pass cannot do without them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from structmax.checks import can_look
from structmax.maps.recipe import (
    Map,
    check_scores,
    keep,
    refuse,
    solve_again,
    spread,
    sums_to,
)


def naive(x: Tensor, parameters: list[Tensor], options: list[float], soft: bool) -> Tensor:
    """τ by bisection; the last step, exact on the entries between their bounds, is taken by p."""
    (tolerance,) = options
    upper, lower, _ = parameters
    absent = x == -math.inf
    peak = x.amax(-1, keepdim=True)
    z = torch.where(absent, 0.0, x - peak)
    a = torch.where(absent, 0.0, lower)
    b = torch.where(absent, 0.0, upper.clamp(max=1))

    def unbounded(tau: Tensor) -> Tensor:
        return (z - tau).clamp(max=0).exp() if soft else z - tau

    least, most = a.sum(-1, keepdim=True), b.sum(-1, keepdim=True)
    low = z - (b.log() if soft else b)  # every entry is at its upper bound here,
    high = z - (0 if soft else a)  # and at its lower bound there; if soft, nearly
    low = torch.where(absent, math.inf, low).amin(-1, keepdim=True)
    high = torch.where(absent, -math.inf, high).amax(-1, keepdim=True)
    if soft:
        high = high + (x.shape[-1] / (1 - least)).log()
    for _ in range(100):
        tau = (low + high) / 2
        mass = torch.minimum(torch.maximum(unbounded(tau), a), b).sum(-1, keepdim=True)
        low, high = torch.where(mass > 1, tau, low), torch.where(mass > 1, high, tau)
    v = unbounded(tau)
    inside = (a < v) & (v < b)
    free = torch.where(inside, v, 0.0).sum(-1, keepdim=True)
    rest = 1 - torch.where(inside, 0.0, torch.minimum(torch.maximum(v, a), b)).sum(-1, keepdim=True)
    if soft:
        v = torch.where((free > 0) & (rest > 0), v * rest / free, v)
    else:
        v = v - (free - rest) / inside.sum(-1, keepdim=True).clamp(min=1)
    p = torch.minimum(torch.maximum(v, a), b)
    p = torch.where(most <= 1, b, torch.where(least >= 1, a, p))
    feasible = (most >= 1 - tolerance) & (least <= 1 + tolerance) & (x < math.inf)
    feasible = feasible & torch.where(absent, lower == 0, (lower >= 0) & (lower <= upper))
    p = torch.where(feasible.all(-1, keepdim=True), p, math.nan)
    return torch.where(absent, 0.0, p)


def naive_backward(p: Tensor, g: Tensor, parameters: list[Tensor], soft: bool) -> list[Tensor]:
    """What a bound takes, the free entries F pay for, those strictly between their bounds.

    With m the mean of g over F (weighted by p if soft), the gradient is g − m (times p if soft) in
    the scores of F, and g − m in the bound that holds any other entry.

    If no entry is free, p has a kink. F is then the entry that is freed first as upper bounds fall,
    which gives the derivative from that side.
    """
    upper, lower, x = (t.detach() for t in parameters)
    fixed = p.detach()
    present, movable = x > -math.inf, (lower < upper) & (x > -math.inf)

    def position(p: Tensor) -> Tensor:
        return x - (p.log() if soft else p)  # the τ at which an entry would be p without bounds

    # p = 1 is where it is because the others are 0, not by its bound
    free = movable & (fixed > lower) & ((fixed < upper) | (upper >= 1))
    some = free.any(-1, keepdim=True)
    at_lower = movable & (fixed <= lower)
    first = torch.where(at_lower, position(fixed), -math.inf).argmax(-1, keepdim=True)
    last = torch.where(movable, position(fixed), math.inf).argmin(-1, keepdim=True)
    pivot = torch.where(at_lower.any(-1, keepdim=True), first, last)
    pivot = torch.where(some, free.to(p.dtype).argmax(-1, keepdim=True), pivot)
    place = torch.arange(p.shape[-1], device=p.device)
    free = torch.where(some, free, movable & (place == pivot))
    tau = position(fixed).gather(-1, pivot)

    weight = torch.where(free, torch.where(some, p, 1.0) if soft else 1.0, 0.0)
    total = weight.sum(-1, keepdim=True)
    mean = (weight * torch.where(free, g, 0.0)).sum(-1, keepdim=True)
    mean = mean / torch.where(total > 0, total, 1.0)
    held = present & ~free
    at_upper = held & (fixed >= upper) & (movable | (position(upper) > tau))
    out = [
        weight * torch.where(free, g - mean, 0.0),
        torch.where(at_upper, g - mean, 0.0),
        torch.where(held & ~at_upper, g - mean, 0.0),
    ]
    return [*(torch.where(p.isnan(), math.nan, t) for t in out), torch.zeros_like(p)]


def answer(
    op: Map,
    x: Tensor,
    upper: Tensor | float,
    lower: Tensor | float | None,
    dim: int,
    mask: Tensor | None,
) -> Tensor:
    """p, after a look at whether every row has one."""
    check_scores(op.name, x, dim)
    scores = x.detach() if x.dtype.itemsize >= 4 else x.detach().float()
    scores = scores if mask is None else keep(op.name, scores, mask)
    lower = 0.0 if lower is None else lower
    dtypes = [scores.dtype] + [t.dtype for t in (upper, lower) if isinstance(t, Tensor)]
    tolerance = max(_rounding(t) for t in dtypes if t.is_floating_point)
    upper = spread(op.name, "upper", upper, scores, dim, "element")
    lower = spread(op.name, "lower", lower, scores, dim, "element")
    if mask is not None:
        upper, lower = torch.where(mask, upper, 0.0), torch.where(mask, lower, 0.0)

    def solve(x: Tensor, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        return op(x, upper, lower, scores, options=[tolerance], dim=dim, mask=mask)

    p = solve(x, scores, mask)
    if not can_look(p) or bool(sums_to(p, 1.0, dim, tolerance).all()):
        return p
    if bool(p.detach().sum().isnan()):
        rows = [t.detach().movedim(dim, -1).cpu().double() for t in (p, scores, upper, lower)]
        _explain(op.name, *rows)
    x = x if mask is None else keep(op.name, x, mask)
    bounds = lower.detach(), upper.detach().clamp(max=1)
    return solve_again(lambda x: solve(x, x.detach()), p, x, *bounds, 1.0, dim, tolerance)


def _rounding(dtype: torch.dtype) -> float:
    """How far the sum of tight bounds may be from 1: they are rounded, maybe in several steps."""
    return (16 if dtype.itemsize >= 4 else 2) * torch.finfo(dtype).eps


def _explain(owner: str, p: Tensor, x: Tensor, upper: Tensor, lower: Tensor) -> None:
    """Raises if a row is NaN though its scores are fine."""
    absent = x == -math.inf
    most = torch.where(absent, 0.0, upper.clamp(max=1)).sum(-1)
    least = torch.where(absent, 0.0, lower).sum(-1)
    wrong = torch.where(absent, lower != 0, ~((lower >= 0) & (lower <= upper)))

    def why(row: tuple[int, ...]) -> str:
        if bool(wrong[row].any()):
            i = int(wrong[row].nonzero()[0])
            a, b = lower[row][i].item(), upper[row][i].item()
            if bool(absent[row][i]):
                return (
                    f"has a score of -inf at entry {i}, which forbids it, and a lower bound of "
                    f"{a:.6g} there. Lower it to 0, or mask the entry."
                )
            return f"has the bounds {a:.6g} ≤ p ≤ {b:.6g} at entry {i}. Use 0 ≤ lower ≤ upper."
        if most[row] < 1:
            return (
                f"allows no distribution: its upper bounds sum to {most[row].item():.9g}, less "
                "than 1. Raise them, or allow more entries (those masked or -inf do not count)."
            )
        return (
            f"allows no distribution: its lower bounds sum to {least[row].item():.9g}, more than "
            "1. Lower them."
        )

    refuse(owner, p.isnan().any(-1) & (x < math.inf).all(-1), why)
