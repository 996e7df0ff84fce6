"""Paths through a grid on the GPU: Triton kernels, one program per item.

A program goes through the anti-diagonals i + j = d one after the other. A diagonal needs the two
before it, so a launch takes rows + columns steps, however many items there are; all the work of a
step is a few instructions for each cell, and what counts is how long it waits for memory.

Up to ``ROWS`` rows a thread has its rows in registers (``up_rows``, ``down_rows``). It gets one
number from the row beside it, by a ring of two in global memory, which the cache holds, with a
barrier of the program between diagonals; what else a diagonal reads is asked for ``AHEAD`` of its
turn, and is moved to where a diagonal is contiguous before (``skew``) or after. More rows are taken
in blocks, with all of the last diagonals in a ring of three (``up``, ``down``), so neither side has
a largest length; so are directions.

What the way back needs is kept for every cell, that of (i, j) at [(i + j) mod m, i]: so a diagonal
is contiguous and nothing is wasted. Values are float64; what enters exp and log is in the dtype of
the scores. Moves, guards at the ends of a diagonal and recursions are as in ``cpu``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from structmax import smoothing
from structmax.forest.grid.naive import apart, theta_of, to_series
from structmax.launch import quick

HARD, SHANNON = tl.constexpr(smoothing.HARD), tl.constexpr(smoothing.SHANNON)
Code = tuple[float, float, float]
ROWS = 1024  # of a diagonal that a program takes at a time, at most
AHEAD = tl.constexpr(2)  # diagonals
SIDE = 32  # of a square that is moved at a time


@triton.jit
def reach(d, rows, columns, band):
    """The cells of diagonal d within the band: their first row, and that after their last."""
    low, high = tl.maximum(d - columns + 1, 0), tl.minimum(rows - 1, d)
    length = tl.maximum(rows + columns - 2, 1)
    width = tl.where(band >= 0, band, length) * (tl.maximum(rows, columns) - 1)
    low = tl.maximum(low, (d * (rows - 1) - width + length - 1) // length)
    high = tl.minimum(high, (d * (rows - 1) + width) // length)
    return low, high + 1


@triton.jit
def choose(x0, x1, x2, gamma, DTYPE: tl.constexpr, KIND: tl.constexpr):
    """maxΩ and argmaxΩ of three options."""
    top = tl.maximum(tl.maximum(x0, x1), x2)
    nan = x0 * 0.0 + x1 * 0.0 + x2 * 0.0  # NaN where x is −inf as well
    nan = tl.where((x0 == x0) & (x1 == x1) & (x2 == x2), 0.0, nan)
    none = top == -float("inf")
    peak = tl.where(none, 0.0, top)
    rate = 1.0 / tl.cast(gamma, tl.float64)
    y0 = tl.where(x0 == peak, 0.0, (x0 - peak) * rate)  # the rate may be ∞
    y1 = tl.where(x1 == peak, 0.0, (x1 - peak) * rate)
    y2 = tl.where(x2 == peak, 0.0, (x2 - peak) * rate)
    if KIND == HARD:
        q0 = ((y0 == 0.0) & (nan == 0.0)).to(DTYPE)
        q1 = ((y1 == 0.0) & (y0 != 0.0)).to(DTYPE)
        q2 = ((y2 == 0.0) & (y0 != 0.0) & (y1 != 0.0)).to(DTYPE)
        value = top
    elif KIND == SHANNON:
        q0, q1, q2 = tl.exp(y0.to(DTYPE)), tl.exp(y1.to(DTYPE)), tl.exp(y2.to(DTYPE))
        total = q0 + q1 + q2
        safe = tl.where(none, 1.0, total)
        q0, q1, q2 = q0 / safe, q1 / safe, q2 / safe
        value = tl.where(none, top, peak + gamma * tl.log(safe))
    else:  # Gini: τ = max over k of (the k largest − 1)/k; the largest is 0, and −4 is far below
        y0, y1, y2 = tl.maximum(y0, -4.0), tl.maximum(y1, -4.0), tl.maximum(y2, -4.0)
        small, large = tl.minimum(y0, y1), tl.maximum(y0, y1)
        middle = tl.maximum(small, tl.minimum(large, y2))
        tau = tl.maximum((middle - 1.0) / 2.0, (y0 + y1 + y2 - 1.0) / 3.0)
        tau = tl.maximum(tau, -1.0)
        p0, p1, p2 = tl.maximum(y0 - tau, 0.0), tl.maximum(y1 - tau, 0.0), tl.maximum(y2 - tau, 0.0)
        gain = p0 * y0 + p1 * y1 + p2 * y2 - 0.5 * (p0 * p0 + p1 * p1 + p2 * p2 - 1.0)
        value = tl.where(none, top, peak + gamma * gain)
        q0, q1, q2 = p0.to(DTYPE), p1.to(DTYPE), p2.to(DTYPE)
    loud = nan.to(DTYPE)
    return value + nan, q0 + loud, q1 + loud, q2 + loud


@quick
@triton.jit
def up(
    theta, sb, si, sj, R, C, V, Q, A, n, m, depth, band, gamma: tl.float64,
    BLOCK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """A ``(B)``, and backpointers in Q ``(B, 3, depth, n)``; V ``(B, 3, n + 2)`` comes as −inf."""
    b = tl.program_id(0).to(tl.int64)
    rows, columns = tl.load(R + b).to(tl.int64), tl.load(C + b).to(tl.int64)
    theta += b * sb
    V += b * 3 * (n + 2)
    plane = (rows * 0 + depth) * n  # 64 bits, as all that offsets are made of
    Q += b * 3 * plane
    for k in range(0, (rows + columns - 1).to(tl.int32)):
        d = k + rows * 0
        low, high = reach(d, rows, columns, band)
        before, last = V + (d + 1) % 3 * (n + 2), V + (d + 2) % 3 * (n + 2)
        for start in range((low - 1).to(tl.int32), (high + 1).to(tl.int32), BLOCK):
            i = start + tl.arange(0, BLOCK) + rows * 0
            inside = (i >= low) & (i < high)
            x0 = tl.load(before + i, mask=inside, other=0.0)
            x1 = tl.load(last + i, mask=inside, other=0.0)
            x2 = tl.load(last + i + 1, mask=inside, other=0.0)
            best, q0, q1, q2 = choose(x0, x1, x2, gamma, Q.dtype.element_ty, KIND)
            own = tl.load(theta + i * si + (d - i) * sj, mask=inside, other=0.0).to(tl.float64)
            value = tl.where(inside, own + tl.where(d == 0, 0.0, best), -float("inf"))
            tl.store(V + d % 3 * (n + 2) + i + 1, value, mask=(i >= low - 1) & (i <= high))
            at = Q + d % depth * n + i
            tl.store(at, q0, mask=inside)
            tl.store(at + plane, q1, mask=inside)
            tl.store(at + 2 * plane, q2, mask=inside)
        tl.debug_barrier()
    tl.store(A + b, tl.load(V + (rows + columns - 2) % 3 * (n + 2) + rows))


@triton.jit
def cells(d, i, rows, columns, band):
    """Which of rows i have a cell on diagonal d, which may lie outside the grid."""
    inside = (i <= d) & (i < rows) & (d - i < columns)
    if band >= 0:
        wide = rows.to(tl.int64)
        low, high = reach(wide * 0 + d, wide, columns.to(tl.int64), band)
        inside &= (i >= low) & (i < high)
    return inside


@triton.jit
def on_diagonal(X, d, i, n, m, rows, columns, band):
    """What skewed X holds for the cells of diagonal d, 0 where it has none."""
    inside = cells(d, i, rows, columns, band)
    return tl.load(X + d % m * (rows.to(tl.int64) * 0 + n) + i, mask=inside, other=0.0)


@quick
@triton.jit
def skew(X, xb, xi, xj, R, C, Y, yb, n, m, band, BACK: tl.constexpr, SIDE: tl.constexpr):
    """Y[(i + j) mod m, i] = X[i, j] for all cells; if ``BACK``, X is written, 0 outside of an item.

    Reading and writing are along memory, each in its own direction.
    """
    b = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * SIDE + tl.arange(0, SIDE)[:, None]
    d = tl.program_id(2) * SIDE + tl.arange(0, SIDE)[None, :]
    live = (i < n) & (i <= d) & (d - i < m)
    x = X + b * xb + i * (b * 0 + xi) + (d - i) * (b * 0 + xj)
    y = Y + b * yb + d % m * (b * 0 + n) + i
    if BACK:
        rows, columns = tl.load(R + b).to(tl.int32), tl.load(C + b).to(tl.int32)
        inside = cells(d, i, rows, columns, band)
        tl.store(x, tl.load(y, mask=live & inside, other=0.0), mask=live)
    else:
        tl.store(y, tl.load(x, mask=live), mask=live)


@quick
@triton.jit
def up_rows(
    theta, sb, R, C, V, Q, A, n, m, depth, band, gamma: tl.float64,
    BLOCK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """As ``up``, for n ≤ BLOCK; V ``(B, 2, BLOCK + 1)`` comes with anything in it. The scores are
    skewed, and may lie where the last backpointers go: a cell's are written when its score was
    read.
    """
    b = tl.program_id(0).to(tl.int64)
    rows, columns = tl.load(R + b).to(tl.int32), tl.load(C + b).to(tl.int32)
    theta += b * sb
    V += b * 2 * (BLOCK + 1)
    plane = (b * 0 + depth) * n
    Q += b * 3 * plane
    i = tl.arange(0, BLOCK)
    tl.store(V + i, -float("inf"))
    tl.store(V + BLOCK + 1 + i, -float("inf"))
    tl.debug_barrier()
    own = on_diagonal(theta, 0, i, n, m, rows, columns, band)
    after = on_diagonal(theta, 1, i, n, m, rows, columns, band)
    x0 = tl.full((BLOCK,), -float("inf"), tl.float64)
    value = x0
    for d in range(0, rows + columns - 1):
        inside = cells(d, i, rows, columns, band)
        ring = V + d % 2 * (BLOCK + 1)
        x1 = tl.load(V + (d + 1) % 2 * (BLOCK + 1) + i)
        coming = on_diagonal(theta, d + AHEAD, i, n, m, rows, columns, band)
        best, q0, q1, q2 = choose(x0, x1, value, gamma, Q.dtype.element_ty, KIND)
        best = own.to(tl.float64) + tl.where(d == 0, 0.0, best)
        value = tl.where(inside, best, -float("inf"))
        tl.store(ring + i + 1, value)
        kept = Q + d % depth * (b * 0 + n) + i
        tl.store(kept, q0, mask=inside)
        tl.store(kept + plane, q1, mask=inside)
        tl.store(kept + 2 * plane, q2, mask=inside)
        x0, own, after = x1, after, coming
        tl.debug_barrier()
    tl.store(A + b, tl.sum(tl.where(i == rows - 1, value, 0.0)))


@quick
@triton.jit
def tangent_up(
    direction, sb, si, sj, R, C, V, Q, D, n, m, band, gamma: tl.float64,
    BLOCK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """D: the derivative of the backpointers along a direction; V ``(B, 3, n + 2)`` comes as 0."""
    b = tl.program_id(0).to(tl.int64)
    rows, columns = tl.load(R + b).to(tl.int64), tl.load(C + b).to(tl.int64)
    direction += b * sb
    plane = (rows * 0 + m) * n
    V += b * 3 * (n + 2)
    Q += b * 3 * plane
    D += b * 3 * plane
    for k in range(0, (rows + columns - 1).to(tl.int32)):
        d = k + rows * 0
        low, high = reach(d, rows, columns, band)
        before, last = V + (d + 1) % 3 * (n + 2), V + (d + 2) % 3 * (n + 2)
        for start in range((low - 1).to(tl.int32), (high + 1).to(tl.int32), BLOCK):
            i = start + tl.arange(0, BLOCK) + rows * 0
            inside = (i >= low) & (i < high)
            at = d % m * n + i
            q0 = tl.load(Q + at, mask=inside, other=0.0)
            q1 = tl.load(Q + at + plane, mask=inside, other=0.0)
            q2 = tl.load(Q + at + 2 * plane, mask=inside, other=0.0)
            x0 = tl.where(q0 == 0.0, 0.0, tl.load(before + i, mask=inside, other=0.0))
            x1 = tl.where(q1 == 0.0, 0.0, tl.load(last + i, mask=inside, other=0.0))
            x2 = tl.where(q2 == 0.0, 0.0, tl.load(last + i + 1, mask=inside, other=0.0))
            dot = q0 * x0 + q1 * x1 + q2 * x2
            if KIND == SHANNON:
                s0, s1, s2, mean = q0, q1, q2, dot
            else:
                s0, s1, s2 = (q0 > 0).to(q0.dtype), (q1 > 0).to(q0.dtype), (q2 > 0).to(q0.dtype)
                mean = (s0 * x0 + s1 * x1 + s2 * x2) / tl.maximum(s0 + s1 + s2, 1.0)
            tl.store(D + at, s0 * (x0 - mean) / gamma, mask=inside)
            tl.store(D + at + plane, s1 * (x1 - mean) / gamma, mask=inside)
            tl.store(D + at + 2 * plane, s2 * (x2 - mean) / gamma, mask=inside)
            own = tl.load(direction + i * si + (d - i) * sj, mask=inside, other=0.0)
            live = (i >= low - 1) & (i <= high)
            value = tl.where(inside, own.to(tl.float64) + dot, 0.0)
            tl.store(V + d % 3 * (n + 2) + i + 1, value, mask=live)
        tl.debug_barrier()


@triton.jit
def into(F, d, i, n, inside):
    """What flows into cells i of diagonal d from the two after it."""
    one, two = F + (d + 1) % 3 * 3 * (n + 2), F + (d + 2) % 3 * 3 * (n + 2)
    total = tl.load(two + i + 2, mask=inside, other=0.0)
    total += tl.load(one + (n + 2) + i + 2, mask=inside, other=0.0)
    return total + tl.load(one + 2 * (n + 2) + i + 1, mask=inside, other=0.0)


@quick
@triton.jit
def down(
    R, C, A, Q, D, F, dF, M, n, m, band, BLOCK: tl.constexpr, TANGENT: tl.constexpr
):  # fmt: skip
    """M ``(B, n, m)``: expected visits of the cells, or their derivative if ``TANGENT``.

    F ``(B, 3, 3, n + 2)``, and dF for the derivative, hold for three diagonals what flows into each
    of the three moves; they come as 0.
    """
    b = tl.program_id(0).to(tl.int64)
    rows, columns = tl.load(R + b).to(tl.int64), tl.load(C + b).to(tl.int64)
    a = tl.load(A + b)
    seed = tl.where(a != a, a, tl.where(a == -float("inf"), 0.0, 1.0))
    plane = (rows * 0 + m) * n
    Q += b * 3 * plane
    D += b * 3 * plane
    F += b * 9 * (n + 2)
    dF += b * 9 * (n + 2)
    M += b * plane
    for k in range(0, (rows + columns - 1).to(tl.int32)):
        d = rows + columns - 2 - k
        low, high = reach(d, rows, columns, band)
        for start in range((low - 1).to(tl.int32), (high + 1).to(tl.int32), BLOCK):
            i = start + tl.arange(0, BLOCK) + rows * 0
            inside = (i >= low) & (i < high)
            live = (i >= low - 1) & (i <= high)
            g = tl.where(inside & (k == 0), seed, into(F, d, i, n, inside))
            dg = g
            if TANGENT:
                dg = into(dF, d, i, n, inside)
            for move in tl.static_range(3):
                at = move * plane + d % m * n + i
                q = tl.load(Q + at, mask=inside, other=0.0)
                slot = (d % 3 * 3 + move) * (n + 2) + i + 1
                tl.store(F + slot, tl.where(inside, g * q, 0.0), mask=live)
                if TANGENT:
                    dq = tl.load(D + at, mask=inside, other=0.0)
                    tl.store(dF + slot, tl.where(inside, dg * q + g * dq, 0.0), mask=live)
            tl.store(M + i * m + d - i, dg.to(M.dtype.element_ty), mask=inside)
        tl.debug_barrier()


@triton.jit
def backpointers(Q, d, i, n, m, plane, rows, columns, band):
    """Those of the cells of diagonal d, which may be negative: it has none."""
    d, columns = tl.maximum(d, 0), tl.where(d < 0, 0, columns)
    q0 = on_diagonal(Q, d, i, n, m, rows, columns, band)
    q1 = on_diagonal(Q + plane, d, i, n, m, rows, columns, band)
    return q0, q1, on_diagonal(Q + 2 * plane, d, i, n, m, rows, columns, band)


@quick
@triton.jit
def down_rows(R, C, A, Q, F, n, m, band, BLOCK: tl.constexpr):
    """As ``down``, for n ≤ BLOCK; F ``(B, 2, BLOCK + 1)`` comes with anything in it. The visits,
    skewed, take the place of the first backpointers.

    What flows into row i comes from row i itself and from the row after it: by one move from the
    diagonal after this, by the other from the second after this. F holds the sum of these two.
    """
    b = tl.program_id(0).to(tl.int64)
    rows, columns = tl.load(R + b).to(tl.int32), tl.load(C + b).to(tl.int32)
    a = tl.load(A + b)
    seed = tl.where(a != a, a, tl.where(a == -float("inf"), 0.0, 1.0))
    plane = (b * 0 + m) * n
    Q += b * 3 * plane
    F += b * 2 * (BLOCK + 1)
    i = tl.arange(0, BLOCK)
    for ring in tl.static_range(2):
        tl.store(F + ring * (BLOCK + 1) + i, 0.0)
        tl.store(F + ring * (BLOCK + 1) + BLOCK, 0.0)
    tl.debug_barrier()
    last = rows + columns - 2
    q0, q1, q2 = backpointers(Q, last, i, n, m, plane, rows, columns, band)
    r0, r1, r2 = backpointers(Q, last - 1, i, n, m, plane, rows, columns, band)
    beside = tl.where(i == rows - 1, seed, 0.0)  # from the row itself
    across = tl.zeros((BLOCK,), tl.float64)  # to the row before, two diagonals on
    for k in range(0, last + 1):
        d = last - k
        inside = cells(d, i, rows, columns, band)
        g = tl.load(F + (k + 1) % 2 * (BLOCK + 1) + i + 1) + beside
        s0, s1, s2 = backpointers(Q, d - AHEAD, i, n, m, plane, rows, columns, band)
        tl.store(F + k % 2 * (BLOCK + 1) + i, across + tl.where(inside, g * q1, 0.0))
        across, beside = tl.where(inside, g * q0, 0.0), tl.where(inside, g * q2, 0.0)
        tl.store(Q + d % m * (b * 0 + n) + i, g.to(Q.dtype.element_ty), mask=inside)
        q0, q1, q2, r0, r1, r2 = r0, r1, r2, s0, s1, s2
        tl.debug_barrier()


class Block:
    """A batch with the way up done."""

    def __init__(
        self, theta: Tensor, rows: Tensor, columns: Tensor, band: int, code: Code, keep: bool
    ) -> None:
        self.theta, (self.B, self.n, self.m) = theta, theta.shape
        self.kind, self.gamma, self.band = int(code[0]), code[1], band
        self.sizes = rows.contiguous(), columns.contiguous()
        block = min(ROWS, triton.next_power_of_2(self.n + 2))
        # a launch has at most 65,535 programs along any but the first direction
        self.in_rows = self.n <= block and self.n + self.m <= 65535 * SIDE
        warps = block // 32 if self.in_rows else min(8, block // 128)
        # one stage: a load must not move before the barrier that it waits for
        self.how = {"BLOCK": block, "num_warps": max(1, warps), "num_stages": 1}
        depth = self.m if keep else 1
        self.Q = self.room(theta.dtype, 3, depth, self.n)
        self.A = self.room(torch.float64)
        if self.in_rows:
            skewed = self.Q[:, 2] if keep else self.room(theta.dtype, self.m, self.n)
            self.skew(theta, skewed, BACK=False)
            way, V = up_rows, self.room(torch.float64, 2, block + 1)
            theta, strides = skewed, skewed.stride()[:1]
        else:
            way, V = up, self.room(torch.float64, 3, self.n + 2).fill_(-torch.inf)
            strides = theta.stride()
        way[(self.B,)](
            theta, *strides, *self.sizes, V, self.Q, self.A,
            self.n, self.m, depth, band, self.gamma, KIND=self.kind, **self.how,
        )  # fmt: skip

    def skew(self, cells: Tensor, skewed: Tensor, BACK: bool) -> None:
        grid = self.B, triton.cdiv(self.n, SIDE), triton.cdiv(self.n + self.m - 1, SIDE)
        skew[grid](
            cells, *cells.stride(), *self.sizes, skewed, skewed.stride(0),
            self.n, self.m, self.band, BACK=BACK, SIDE=SIDE, num_warps=4,
        )  # fmt: skip

    def room(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(self.B, *shape, dtype=dtype, device=self.theta.device)

    def flows(self) -> Tensor:
        return self.room(torch.float64, 3, 3, self.n + 2).zero_()

    def visits(self, D: Tensor | None = None) -> Tensor:
        """``(B, n, m)``, or its derivative given that of the backpointers."""
        if D is None and self.in_rows:
            F = self.room(torch.float64, 2, self.how["BLOCK"] + 1)
            sizes = self.n, self.m, self.band
            down_rows[(self.B,)](*self.sizes, self.A, self.Q, F, *sizes, **self.how)
            out = self.room(self.theta.dtype, self.n, self.m)
            self.skew(out, self.Q, BACK=True)
            return out
        out = torch.zeros_like(self.theta, memory_format=torch.contiguous_format)
        F = self.flows()
        dF = F if D is None else self.flows()
        down[(self.B,)](
            *self.sizes, self.A, self.Q, self.Q if D is None else D, F, dF, out,
            self.n, self.m, self.band, TANGENT=D is not None, **self.how,
        )  # fmt: skip
        return out

    def hvp(self, direction: Tensor) -> Tensor:
        D, V = torch.empty_like(self.Q), self.room(torch.float64, 3, self.n + 2).zero_()
        tangent_up[(self.B,)](
            direction, *direction.stride(), *self.sizes, V, self.Q, D,
            self.n, self.m, self.band, self.gamma, KIND=self.kind, **self.how,
        )  # fmt: skip
        return self.visits(D)


def value(scores: Sequence[Tensor], rows: Tensor, columns: Tensor, band: int, code: Code) -> Tensor:
    """A ``(B)`` for scores ``(B, n, m)`` of cells, or for series ``(B, n)`` and ``(B, m)``."""
    theta = theta_of(scores)
    with torch.cuda.device_of(theta):
        return Block(theta, rows, columns, band, code, keep=False).A.to(theta.dtype)


def gradient(
    scores: Sequence[Tensor], rows: Tensor, columns: Tensor, band: int, code: Code
) -> list[Tensor]:
    """A ``(B)`` and its gradient in the scores."""
    theta = theta_of(scores)
    with torch.cuda.device_of(theta):
        block = Block(theta, rows, columns, band, code, keep=True)
        a, mu = block.A.to(theta.dtype), block.visits()
    return [a, mu] if len(scores) == 1 else [a, *to_series(-2 * apart(*scores) * mu)]


def hvp(
    theta: Tensor, direction: Tensor, rows: Tensor, columns: Tensor, band: int, code: Code
) -> Tensor:
    """The Hessian of A times a direction ``(B, n, m)``; zero under hard max."""
    if code[0] == smoothing.HARD:
        a = value([theta], rows, columns, band, code)
        return torch.where(a.isnan(), a, 0.0)[:, None, None].expand(theta.shape).contiguous()
    with torch.cuda.device_of(theta):
        return Block(theta, rows, columns, band, code, keep=True).hvp(direction)
