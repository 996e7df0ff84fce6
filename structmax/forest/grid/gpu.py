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

Under Shannon two programs share an item that has its rows in registers. They start at opposite
corners, and each goes through half of the diagonals. A is maxΩ, over the steps from one half into
the other, of the sum of the values at both ends (``meet``), and argmaxΩ is what flows back to both
corners. Both programs are one kernel: the second counts rows and diagonals from the last corner.
Under other Ω, maxΩ of parts is not maxΩ of the whole, and one program starts at the first corner.

What the way back needs is kept for every cell, that of (i, j) at [(i + j) mod m, i]: so a diagonal
is contiguous and nothing is wasted. Values are float64; what enters exp and log is in the dtype of
the scores. Moves, guards at the ends of a diagonal and recursions are as in ``cpu``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from structmax import smoothing
from structmax.forest.grid.naive import theta_of, to_series
from structmax.launch import quick

HARD, SHANNON = tl.constexpr(smoothing.HARD), tl.constexpr(smoothing.SHANNON)
LOG2_E, MOST = tl.constexpr(math.log2(math.e)), tl.constexpr(sys.float_info.max)
Code = tuple[float, float, float]
ROWS = 1024  # of a diagonal that a program takes at a time, at most
AHEAD = tl.constexpr(2)  # diagonals
EVERY = tl.constexpr(8)  # diagonals, after which derivatives are moved back to around 0
SIDE = 32  # of a square that is moved at a time
CORNERS = 2  # from which programs start under Shannon


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
    none = top == -float("inf")
    peak = tl.where(none, 0.0, top)
    gamma = tl.cast(gamma, tl.float64)
    rate = 1.0 / gamma
    if KIND == SHANNON:  # in powers of two, which are what a GPU has
        rate = tl.minimum(rate * LOG2_E, MOST)  # it may be ∞
        q0 = tl.exp2(((x0 - peak) * rate).to(DTYPE))
        q1 = tl.exp2(((x1 - peak) * rate).to(DTYPE))
        q2 = tl.exp2(((x2 - peak) * rate).to(DTYPE))
        total = q0 + q1 + q2  # 0 if there is no option, NaN if one is
        value = peak + tl.log2(total).to(tl.float64) * (gamma / LOG2_E)
        scale = 1.0 / tl.where(total == 0.0, 1.0, total)
        q0, q1, q2 = q0 * scale, q1 * scale, q2 * scale
    else:
        nan = x0 * 0.0 + x1 * 0.0 + x2 * 0.0  # NaN where x is −inf as well
        nan = tl.where((x0 == x0) & (x1 == x1) & (x2 == x2), 0.0, nan)
        y0 = tl.where(x0 == peak, 0.0, (x0 - peak) * rate)
        y1 = tl.where(x1 == peak, 0.0, (x1 - peak) * rate)
        y2 = tl.where(x2 == peak, 0.0, (x2 - peak) * rate)
        if KIND == HARD:
            p0 = ((y0 == 0.0) & (nan == 0.0)).to(tl.float64)
            p1 = ((y1 == 0.0) & (y0 != 0.0)).to(tl.float64)
            p2 = ((y2 == 0.0) & (y0 != 0.0) & (y1 != 0.0)).to(tl.float64)
            value = top + nan
        else:  # Gini: τ = max over k of (the k largest − 1)/k; the largest is 0, −4 far below
            y0, y1, y2 = tl.maximum(y0, -4.0), tl.maximum(y1, -4.0), tl.maximum(y2, -4.0)
            small, large = tl.minimum(y0, y1), tl.maximum(y0, y1)
            middle = tl.maximum(small, tl.minimum(large, y2))
            tau = tl.maximum((middle - 1.0) / 2.0, (y0 + y1 + y2 - 1.0) / 3.0)
            tau = tl.maximum(tau, -1.0)
            p0, p1 = tl.maximum(y0 - tau, 0.0), tl.maximum(y1 - tau, 0.0)
            p2 = tl.maximum(y2 - tau, 0.0)
            gain = p0 * y0 + p1 * y1 + p2 * y2 - 0.5 * (p0 * p0 + p1 * p1 + p2 * p2 - 1.0)
            value = tl.where(none, top, peak + gamma * gain) + nan
        q0, q1, q2 = (p0 + nan).to(DTYPE), (p1 + nan).to(DTYPE), (p2 + nan).to(DTYPE)
    return value, q0, q1, q2


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
        length = rows.to(tl.int64) + columns - 2
        width = tl.minimum(band, length) * (tl.maximum(rows, columns) - 1)
        off = i * length - d * (rows.to(tl.int64) - 1)
        inside &= (off <= width) & (-off <= width)
    return inside


@triton.jit
def steps(corner, rows, columns, CORNERS: tl.constexpr):
    """How many diagonals the program that starts at a corner goes through."""
    return (rows + columns - 2 + CORNERS - corner) // CORNERS


@triton.jit
def place(corner, d, i, rows, columns, m):
    """Where in a skewed table cells lie that are in rows i of diagonal d, counted from a corner:
    the diagonal's slot, and the rows."""
    from_first = corner == 0
    slot = tl.where(from_first, d, rows + columns - 2 - d) % m
    return slot, tl.where(from_first, i, rows - 1 - i)


@triton.jit
def after(slot, step, m):
    """The slot ``step`` after this, both from 0 to m: a division takes longer."""
    slot += step
    return tl.where(slot >= m, slot - m, slot)


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
    x = X + b * xb + i * (b * 0 + xi - xj) + d * (b * 0 + xj)
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
    theta, sb, R, C, V, Q, A, n, m, band, gamma: tl.float64,
    BLOCK: tl.constexpr, KIND: tl.constexpr, KEEP: tl.constexpr, CORNERS: tl.constexpr,
):  # fmt: skip
    """As ``up``, for n ≤ BLOCK; V ``(B, CORNERS, 2, BLOCK + 1)`` comes with anything in it, and
    leaves with the values of the last two diagonals. The scores are skewed, and may lie where the
    last backpointers go: a cell's are written when its score was read. From two corners, A is left
    to ``meet``.
    """
    b, corner = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, columns = tl.load(R + b).to(tl.int32), tl.load(C + b).to(tl.int32)
    theta += b * sb
    V += (b * CORNERS + corner) * 2 * (BLOCK + 1)
    wide = b * 0 + n
    plane = wide * m
    Q += b * 3 * plane
    i = tl.arange(0, BLOCK)
    for ring in tl.static_range(2):
        tl.store(V + ring * (BLOCK + 1) + i, -float("inf"))
        tl.store(V + ring * (BLOCK + 1) + BLOCK, -float("inf"))
    tl.debug_barrier()
    slot, at = place(corner, 0, i, rows, columns, m)
    step = tl.where(corner == 0, 1, m - 1)
    ahead = after(slot, step, m)
    own = tl.load(theta + slot * wide + at, mask=cells(0, i, rows, columns, band), other=0.0)
    coming = tl.load(theta + ahead * wide + at, mask=cells(1, i, rows, columns, band), other=0.0)
    x0 = tl.full((BLOCK,), -float("inf"), tl.float64)
    value = tl.where(i == 0, 0.0, x0)  # as if the first cell were reached by →
    for d in range(0, steps(corner, rows, columns, CORNERS)):
        inside = cells(d, i, rows, columns, band)
        x1 = tl.load(V + (d + 1) % 2 * (BLOCK + 1) + i)
        ahead = after(ahead, step, m)
        far = cells(d + AHEAD, i, rows, columns, band)
        last = tl.load(theta + ahead * wide + at, mask=far, other=0.0)
        best, q0, q1, q2 = choose(x0, x1, value, gamma, theta.dtype.element_ty, KIND)
        value = tl.where(inside, own.to(tl.float64) + best, -float("inf"))
        tl.store(V + d % 2 * (BLOCK + 1) + i + 1, value)
        if KEEP:
            kept = Q + slot * wide + at
            tl.store(kept, q0, mask=inside)
            tl.store(kept + plane, q1, mask=inside)
            tl.store(kept + 2 * plane, q2, mask=inside)
        slot = after(slot, step, m)
        x0, own, coming = x1, coming, last
        tl.debug_barrier()
    if CORNERS == 1:
        tl.store(A + b, tl.sum(tl.where(i == rows - 1, value, 0.0)))


@quick
@triton.jit
def meet(R, C, V, S, A, gamma: tl.float64, BLOCK: tl.constexpr):
    """A, and in S ``(B, 2, 2, BLOCK)`` what flows into the last two diagonals of either program.

    A path goes from one half to the other in one of four ways: by → or ↓ from the last diagonal to
    the other's last, and by ↘ over one of them. In the second to last diagonal, flow and value are
    of the row before.
    """
    b, corner = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, columns = tl.load(R + b).to(tl.int32), tl.load(C + b).to(tl.int32)
    mine, theirs = steps(corner, rows, columns, 2), steps(1 - corner, rows, columns, 2)
    own = V + (b * 2 + corner) * 2 * (BLOCK + 1)
    other = V + (b * 2 + 1 - corner) * 2 * (BLOCK + 1)
    i = tl.arange(0, BLOCK)
    v = tl.load(own + (mine + 1) % 2 * (BLOCK + 1) + i + 1)
    before = tl.load(own + mine % 2 * (BLOCK + 1) + i)
    live, below_i = i < rows, rows - 1 - i  # they count rows from the other end
    last = other + (theirs + 1) % 2 * (BLOCK + 1) + below_i
    beside = tl.load(last + 1, mask=live, other=-float("inf"))
    beside = tl.where((theirs == 0) & (i == 0), 0.0, beside)  # the only cell is the last
    below = tl.load(last, mask=live, other=-float("inf"))
    across = tl.load(other + theirs % 2 * (BLOCK + 1) + below_i, mask=live, other=-float("inf"))
    x0, x1, x2, x3 = v + beside, v + below, v + across, before + beside
    peak = tl.max(tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)), 0)
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    gamma = tl.cast(gamma, tl.float64)
    rate = tl.minimum(1.0 / gamma, MOST)
    flow = tl.exp((x0 - peak) * rate) + tl.exp((x1 - peak) * rate) + tl.exp((x2 - peak) * rate)
    second = tl.exp((x3 - peak) * rate)
    total = tl.sum(flow + second, 0)
    tl.store(A + b, peak + gamma * tl.log(total), mask=corner == 0)
    scale = 1.0 / tl.where(total == 0.0, 1.0, total)
    S += (b * 2 + corner) * 2 * BLOCK + i
    tl.store(S, flow * scale)
    tl.store(S + BLOCK, second * scale)


@quick
@triton.jit
def tangent_up(
    direction, sb, si, sj, R, C, V, Q, D, n, m, band, gamma: tl.float64,
    BLOCK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """D: the derivative of the backpointers along a direction; V ``(B, 3, n + 2)`` comes as 0.

    As on the CPU, means are divided by Σ q, and V is centred every few diagonals: a number of the
    last diagonal is taken out of it and of the one before it, as they are read.
    """
    b = tl.program_id(0).to(tl.int64)
    rows, columns = tl.load(R + b).to(tl.int64), tl.load(C + b).to(tl.int64)
    direction += b * sb
    plane = (rows * 0 + m) * n
    V += b * 3 * (n + 2)
    Q += b * 3 * plane
    D += b * 3 * plane
    earlier = tl.zeros((), tl.float64)  # what was taken out a diagonal ago
    for k in range(0, (rows + columns - 1).to(tl.int32)):
        d = k + rows * 0
        low, high = reach(d, rows, columns, band)
        before, last = V + (d + 1) % 3 * (n + 2), V + (d + 2) % 3 * (n + 2)
        middle = tl.load(last + (low + high) // 2 + 1, mask=d % EVERY == 0, other=0.0)
        middle = tl.where(tl.abs(middle) < float("inf"), middle, 0.0)
        for start in range((low - 1).to(tl.int32), (high + 1).to(tl.int32), BLOCK):
            i = start + tl.arange(0, BLOCK) + rows * 0
            inside = (i >= low) & (i < high)
            at = d % m * n + i
            q0 = tl.load(Q + at, mask=inside, other=0.0)
            q1 = tl.load(Q + at + plane, mask=inside, other=0.0)
            q2 = tl.load(Q + at + 2 * plane, mask=inside, other=0.0)
            x0 = tl.load(before + i, mask=inside, other=0.0) - middle - earlier
            x1 = tl.load(last + i, mask=inside, other=0.0) - middle
            x2 = tl.load(last + i + 1, mask=inside, other=0.0) - middle
            x0, x1 = tl.where(q0 == 0.0, 0.0, x0), tl.where(q1 == 0.0, 0.0, x1)
            x2 = tl.where(q2 == 0.0, 0.0, x2)
            whole = q0.to(tl.float64) + q1 + q2
            dot = (q0 * x0 + q1 * x1 + q2 * x2) / tl.where(whole == 0.0, 1.0, whole)
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
        earlier = middle
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
def backpointers(Q, slot, at, inside, wide, plane):
    """Those of the cells in one slot."""
    Q += slot * wide + at
    q0 = tl.load(Q, mask=inside, other=0.0)
    q1 = tl.load(Q + plane, mask=inside, other=0.0)
    return q0, q1, tl.load(Q + 2 * plane, mask=inside, other=0.0)


@quick
@triton.jit
def down_rows(
    R, C, A, S, Q, F, n, m, band, BLOCK: tl.constexpr, CORNERS: tl.constexpr
):  # fmt: skip
    """As ``down``, for n ≤ BLOCK; F ``(B, CORNERS, 2, BLOCK + 1)`` comes with anything in it. The
    visits, skewed, take the place of the first backpointers. From two corners, S is that of
    ``meet``.

    What flows into row i comes from row i itself and from the row after it: by one move from the
    diagonal after this, by the other from the second after this. F holds the sum of these two.
    """
    b, corner = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, columns = tl.load(R + b).to(tl.int32), tl.load(C + b).to(tl.int32)
    wide = b * 0 + n
    plane = wide * m
    Q += b * 3 * plane
    F += (b * CORNERS + corner) * 2 * (BLOCK + 1)
    i = tl.arange(0, BLOCK)
    for ring in tl.static_range(2):
        tl.store(F + ring * (BLOCK + 1) + i, 0.0)
        tl.store(F + ring * (BLOCK + 1) + BLOCK, 0.0)
    tl.debug_barrier()
    if CORNERS == 1:
        a = tl.load(A + b)
        seed = tl.where(a != a, a, tl.where(a == -float("inf"), 0.0, 1.0))
        beside = tl.where(i == rows - 1, seed, 0.0)  # from the row itself
        across = tl.zeros((BLOCK,), tl.float64)  # to the row before, two diagonals on
    else:
        S += (b * 2 + corner) * 2 * BLOCK + i
        beside, across = tl.load(S), tl.load(S + BLOCK)
    last = steps(corner, rows, columns, CORNERS) - 1
    slot, at = place(corner, last, i, rows, columns, m)
    step = tl.where(corner == 0, m - 1, 1)
    ahead = after(slot, step, m)
    first, second = cells(last, i, rows, columns, band), cells(last - 1, i, rows, columns, band)
    q0, q1, q2 = backpointers(Q, slot, at, first, wide, plane)
    r0, r1, r2 = backpointers(Q, ahead, at, second, wide, plane)
    for k in range(0, last + 1):
        inside = cells(last - k, i, rows, columns, band)
        g = tl.load(F + (k + 1) % 2 * (BLOCK + 1) + i + 1) + beside
        ahead = after(ahead, step, m)
        far = cells(last - k - AHEAD, i, rows, columns, band)
        s0, s1, s2 = backpointers(Q, ahead, at, far, wide, plane)
        tl.store(F + k % 2 * (BLOCK + 1) + i, across + tl.where(inside, g * q1, 0.0))
        across, beside = tl.where(inside, g * q0, 0.0), tl.where(inside, g * q2, 0.0)
        tl.store(Q + slot * wide + at, g.to(Q.dtype.element_ty), mask=inside)
        slot = after(slot, step, m)
        q0, q1, q2, r0, r1, r2 = r0, r1, r2, s0, s1, s2
        tl.debug_barrier()


class Block:
    """A batch with the way up done; from the first corner only, unless the ``halves`` may meet.

    ``dtype`` is that of backpointers and exponentials.
    """

    def __init__(
        self, theta: Tensor, dtype: torch.dtype, rows: Tensor, columns: Tensor,
        band: int, code: Code, keep: bool, halves: bool = True,
    ) -> None:  # fmt: skip
        self.dtype, self.device, (self.B, self.n, self.m) = dtype, theta.device, theta.shape
        self.kind, self.gamma, self.band = int(code[0]), code[1], band
        self.sizes = rows.contiguous(), columns.contiguous()
        block = min(ROWS, triton.next_power_of_2(self.n + 2))
        # a launch has at most 65,535 programs along any but the first direction
        self.in_rows = self.n <= block and self.n + self.m <= 65535 * SIDE
        warps = min(32, block // 32) if self.in_rows else min(8, block // 128)
        # one stage: a load must not move before the barrier that it waits for
        self.how = {"BLOCK": block, "num_warps": max(1, warps), "num_stages": 1}
        self.A = self.room(torch.float64)
        if self.in_rows:
            self.corners = CORNERS if halves and self.kind == smoothing.SHANNON else 1
            self.up_rows(theta, keep)
        else:
            depth = self.m if keep else 1
            self.Q = self.room(dtype, 3, depth, self.n)
            V = self.room(torch.float64, 3, self.n + 2).fill_(-torch.inf)
            up[(self.B,)](
                theta, *theta.stride(), *self.sizes, V, self.Q, self.A,
                self.n, self.m, depth, band, self.gamma, KIND=self.kind, **self.how,
            )  # fmt: skip

    def up_rows(self, theta: Tensor, keep: bool) -> None:
        self.Q = self.room(self.dtype, 3 if keep else 1, self.m, self.n)
        skewed, V = self.Q[:, -1], self.ring()
        self.skew(theta, skewed, BACK=False)
        up_rows[(self.B, self.corners)](
            skewed, skewed.stride(0), *self.sizes, V, self.Q, self.A, self.n, self.m, self.band,
            self.gamma, KIND=self.kind, KEEP=keep, CORNERS=self.corners, **self.how,
        )  # fmt: skip
        self.S = V  # any pointer will do from one corner
        if self.corners == 2:
            self.S = self.room(torch.float64, 2, 2, self.how["BLOCK"])
            meet[(self.B, 2)](*self.sizes, V, self.S, self.A, self.gamma, **self.how)

    def skew(self, cells: Tensor, skewed: Tensor, BACK: bool) -> None:
        grid = self.B, triton.cdiv(self.n, SIDE), triton.cdiv(self.n + self.m - 1, SIDE)
        skew[grid](
            cells, *cells.stride(), *self.sizes, skewed, skewed.stride(0),
            self.n, self.m, self.band, BACK=BACK, SIDE=SIDE, num_warps=4,
        )  # fmt: skip

    def room(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(self.B, *shape, dtype=dtype, device=self.device)

    def ring(self) -> Tensor:
        return self.room(torch.float64, self.corners, 2, self.how["BLOCK"] + 1)

    def flows(self) -> Tensor:
        return self.room(torch.float64, 3, 3, self.n + 2).zero_()

    def visits(self, dtype: torch.dtype, D: Tensor | None = None) -> Tensor:
        """``(B, n, m)``, or its derivative given that of the backpointers."""
        out = self.room(dtype, self.n, self.m)
        if D is None and self.in_rows:
            down_rows[(self.B, self.corners)](
                *self.sizes, self.A, self.S, self.Q, self.ring(),
                self.n, self.m, self.band, CORNERS=self.corners, **self.how,
            )  # fmt: skip
            self.skew(out, self.Q, BACK=True)
            return out
        out.zero_()
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
        return self.visits(self.dtype, D)


def value(scores: Sequence[Tensor], rows: Tensor, columns: Tensor, band: int, code: Code) -> Tensor:
    """A ``(B)`` for scores ``(B, n, m)`` of cells, or those of series ``(B, n, d), (B, m, d)``."""
    dtype = scores[0].dtype
    with torch.cuda.device_of(scores[0]):
        block = Block(theta_of(scores), dtype, rows, columns, band, code, keep=False)
    return block.A.to(dtype)


def gradient(
    scores: Sequence[Tensor], rows: Tensor, columns: Tensor, band: int, code: Code
) -> list[Tensor]:
    """A ``(B)`` and its gradient in the scores."""
    dtype = scores[0].dtype
    with torch.cuda.device_of(scores[0]):
        theta = theta_of(scores)
        precise = theta.dtype  # products with series are taken in it as well
        block = Block(theta, dtype, rows, columns, band, code, keep=True)
        del theta  # as large as what is kept
        a, mu = block.A.to(dtype), block.visits(precise)
    return [a, mu] if len(scores) == 1 else [a, *to_series(mu, *scores)]


def hvp(
    theta: Tensor, direction: Tensor, rows: Tensor, columns: Tensor, band: int, code: Code
) -> Tensor:
    """The Hessian of A times a direction ``(B, n, m)``; zero under hard max."""
    if code[0] == smoothing.HARD:
        a = value([theta], rows, columns, band, code)
        return torch.where(a.isnan(), a, 0.0)[:, None, None].expand(theta.shape).contiguous()
    with torch.cuda.device_of(theta):
        block = Block(theta, theta.dtype, rows, columns, band, code, keep=True, halves=False)
        return block.hvp(direction)
