"""Paths through a grid in plain torch: the recursion, one anti-diagonal i + j = d at a time.

    V(i, j) = θ(i, j) + maxΩ( V(i−1, j−1), V(i−1, j), V(i, j−1) ),   V(0, 0) = θ(0, 0),
    A = V(rows − 1, columns − 1)

Letters: B batch, n rows, m columns, d features. ``theta (B, n, m)``; ``rows, columns (B)``, at
least 1. Scores may also be those of two series, ``x (B, n, d)`` and ``y (B, m, d)``, with numbers
in the padding: θ(i, j) = −‖xᵢ − yⱼ‖².
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
    """θ ``(B, n, m)``, or that of two series: in float64 if they are not of numbers."""
    if len(scores) == 1:
        return scores[0]
    x, y = scores
    if x.shape[-1] == 1:
        return -(x - y.mT).square()
    x, y = centred(x, y)
    square_x, square_y = (torch.linalg.vecdot(t, t)[..., None] for t in (x, y))
    left = torch.cat([2 * x, square_x, torch.ones_like(square_x)], -1)
    right = torch.cat([y, -torch.ones_like(square_y), -square_y], -1)
    return left @ right.mT


def along_series(x: Tensor, y: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """The derivative of θ along (u, v), −2⟨xᵢ − yⱼ, uᵢ − vⱼ⟩, in float64."""
    (x, y), (u, v) = centred(x, y), centred(u, v)
    own_x, own_y = torch.linalg.vecdot(x, u), torch.linalg.vecdot(y, v)
    return 2 * (x @ v.mT + u @ y.mT - own_x[..., None] - own_y[..., None, :])


def to_series(flow: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
    """The derivative of Σ flow·θ in x and in y, for flow ``(B, n, m)``: −2 Σⱼ flow·(xᵢ − yⱼ), and
    2 Σᵢ of the same."""
    if x.shape[-1] == 1:
        flow = -2 * (x - y.mT) * flow
        return [flow.sum(2, keepdim=True), -flow.sum(1)[..., None]]
    dtype, flow, (x, y) = x.dtype, flow.double(), centred(x, y)

    def towards(flow: Tensor, own: Tensor, other: Tensor) -> Tensor:
        sums = flow @ torch.cat([other, torch.ones_like(other[..., :1])], -1)
        return (2 * (sums[..., :-1] - own * sums[..., -1:])).to(dtype)

    return [towards(flow, x, y), towards(flow.mT, y, x)]


def centred(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float64, less the first of x: what cancels in products then leaves an error of 1e-16
    of the squared spread of the series, wherever they lie, and whatever the padding holds."""
    x, y = x.double(), y.double()
    centre = x.detach()[..., :1, :]
    return x - centre, y - centre


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
