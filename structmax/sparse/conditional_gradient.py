"""Conditional-gradient (Frank-Wolfe) methods: no linear systems, but only in the limit exact.

Each step goes along a line from p, to where the objective cᵀp − ½‖Mp‖² is greatest on it, with z
the best and a the worst active structure at the gradient (Lacoste-Julien & Jaggi, 2015, "On the
global linear convergence of Frank-Wolfe optimization variants"):

- ``frank-wolfe``: towards z. The gap falls as 1/steps.
- ``away``: towards z, or away from a if that is steeper. Linear convergence.
- ``pairwise``: weight moves from a to z. Linear convergence, often faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

from structmax.sparse.result import Solution
from structmax.sparse.support import Oracle, Support


def solve(
    method: str,
    oracle: Oracle,
    theta: Tensor,
    primary: int,
    width: int,
    max_iter: int,
    tol: float,
    start: tuple[Tensor, Tensor] | None = None,
) -> Solution:
    """As ``active_set.solve``, by ``"away"``, ``"pairwise"`` or ``"frank-wolfe"``."""
    support = Support(oracle, theta, width, tol, max_iter)
    if start is not None:
        support.take_over(*start)
    while support.tidy():
        z, score, mu = support.ask()
        _step(support, method, z, score, mu)
    return support.solution(primary)


def _step(s: Support, method: str, z: Tensor, score: Tensor, mu: Tensor) -> None:
    same = s.same(z)
    known = same.any(-1)
    slot = torch.where(known, same.to(torch.uint8).argmax(-1), s.free_slot())
    s.write(slot, z, score)
    at = torch.arange(s.slots, device=slot.device)
    new = at == slot[:, None]
    slope = s.scores - torch.einsum("bkd,bd->bk", s.counts[..., : s.width], mu)
    mean = (s.p * slope).sum(-1)  # ⟨gradient, μ⟩
    least, worst = torch.where(s.active, slope, torch.inf).min(-1)
    worst_p = s.p.gather(1, worst[:, None]).squeeze(1)
    target, source = new.to(s.p), (at == worst[:, None]).to(s.p)
    along, limit = target - s.p, torch.ones_like(mean)
    if method == "away":
        away = mean - least > slope.gather(1, slot[:, None]).squeeze(1) - mean
        along = torch.where(away[:, None], s.p - source, along)
        limit = torch.where(away, worst_p / (1 - worst_p), limit)
    elif method == "pairwise":
        along, limit = target - source, worst_p
    direction = torch.einsum("bk,bkd->bd", along, s.counts[..., : s.width])
    curvature = (direction * direction).sum(-1)
    length = ((along * slope).sum(-1) / curvature).nan_to_num(0.0, torch.inf, 0.0)
    length = torch.where(s.done, 0.0, torch.minimum(length.clamp(min=0), limit))
    s.p = s.p + length[:, None] * along
    gone = (length == limit)[:, None] & (source > 0) if method != "frank-wolfe" else target < 0
    if method == "away":
        gone = gone & away[:, None]
    s.p = torch.where(gone, 0.0, s.p).clamp(min=0)
    s.active = s.p > 0
