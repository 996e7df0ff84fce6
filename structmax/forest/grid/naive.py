"""Paths through a grid in plain torch: the recursion, one anti-diagonal i + j = d at a time.

    V(i, j) = θ(i, j) + maxΩ( V(i−1, j−1), V(i−1, j), V(i, j−1) ),   V(0, 0) = θ(0, 0),
    A = V(rows − 1, columns − 1)

Letters: B batch, n rows, m columns. ``theta (B, n, m)``; ``rows, columns (B)``, at least 1. Scores
may also be those of two series of numbers, ``x (B, n)`` and ``y (B, m)``: θ(i, j) = −(xᵢ − yⱼ)².
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from structmax.smoothing import Smoothing


def value(
    theta: Tensor, rows: Tensor, columns: Tensor, band: int | None, omega: Smoothing
) -> Tensor:
    """A ``(B)``. What no path visits is replaced by −inf first, so nothing of it reaches A."""
    batch, n, m = theta.shape
    i, d = (torch.arange(size, device=theta.device) for size in (n, n + m - 1))
    j = d[:, None] - i  # (diagonals, n)
    there = (j >= 0) & (j < m)
    allowed = in_band(n, m, rows, columns, band)[:, i, j.clamp(0, m - 1)] & there
    cells = torch.where(allowed, theta.double()[:, i, j.clamp(0, m - 1)], -math.inf)
    nothing = cells.new_full((batch, 1), -math.inf)

    def from_above(v: Tensor) -> Tensor:
        return torch.cat([nothing, v[:, :-1]], -1)

    before, last = torch.full_like(cells[:, 0], -math.inf), cells[:, 0]
    ends = [last]
    for row in cells.unbind(1)[1:]:
        x = torch.stack([from_above(before), from_above(last), last], -1)
        before, last = last, row + omega.max(x)
        ends.append(last)
    at = (rows + columns - 2) * n + rows - 1
    a = torch.stack(ends, 1).flatten(1).gather(1, at.long()[:, None]).squeeze(1)
    return a.to(theta.dtype)


def theta_of(scores: Sequence[Tensor]) -> Tensor:
    """θ ``(B, n, m)``, or that of two series."""
    return scores[0] if len(scores) == 1 else -apart(*scores).square()


def apart(x: Tensor, y: Tensor) -> Tensor:
    return x[:, :, None] - y[:, None]


def to_series(flow: Tensor) -> list[Tensor]:
    """Σ over cells of flow (B, n, m) times the derivative of xᵢ − yⱼ in x and in y."""
    return [flow.sum(2), -flow.sum(1)]


def in_band(n: int, m: int, rows: Tensor, columns: Tensor, band: int | None) -> Tensor:
    """Which of n × m cells an item of that size has within a band, ``(*rows.shape, n, m)``.

    |i(columns − 1) − j(rows − 1)| ≤ band·(max(rows, columns) − 1): the distance from the straight
    line between the corners, counted along the shorter side.
    """
    rows, columns = rows[..., None, None].long(), columns[..., None, None].long()
    i, j = torch.arange(n, device=rows.device)[:, None], torch.arange(m, device=rows.device)
    inside = (i < rows) & (j < columns)
    if band is None:
        return inside
    off = (i * (columns - 1) - j * (rows - 1)).abs()
    return inside & (off <= band * (torch.maximum(rows, columns) - 1))
