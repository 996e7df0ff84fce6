"""The dense chain on the CPU, compiled by numba: forward-backward with matrix-vector steps.

A step works in exp space: with p = P(yₜ₋₁ | the scores so far), E = exp(T − m) and w = exp(u − m′),
the new p is (pᵀE)·w over its sum, and A adds up m, m′ and the logarithms of those sums in float64.
So the exponential of a score is taken once and serves both directions. What underflows can
falsify a result only through a sum that is tiny; an item where a sum of float32 numbers is tiny is
computed again in float64, and if that is not enough in log space, term by term, so no spread of
scores is too large.

Letters as in ``naive``: n positions, c tags, s steps of transitions (n − 1, or 1 if shared).
Transitions, start and end have a batch dimension of 1 where all items share them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from structmax.jit import array, exp, from_ordinal, kernel, ordinal, run_chunks
from structmax.primitive import as_dtype

INF = math.inf
TINY = 1e-25  # far above the smallest float32, far below any sum that matters
# In float32 and float64: a sum above TINIES is right, since the terms lost to it are far smaller,
# if what they were made of lost no more than underflow takes; what is below UNDERFLOW may be lost;
# products of a number above SMALL and of exp(x) for x above LEAST are never lost.
TINIES = (1e-30, 1e-290)
UNDERFLOW = (1e-37, 1e-307)
SMALL = (1e-19, 1e-150)
LEAST = (-43.0, -340.0)
FARTHEST = -1e38  # what is finite in float64 stays so in float32
FAR = 2.0**14  # beside a score of more, float32 has no digits for others
NEAR = 20.0  # scores up to ±this need no maximum subtracted: their products are in range


@kernel(inner=True)
def extent(x):
    """The largest x (0 if all are −inf) and the least finite one."""
    bottom, highest = ordinal(x.dtype.type(-INF)), ordinal(x.dtype.type(INF))
    top, least = bottom, highest
    for k in range(x.shape[0]):
        y = ordinal(x[k])
        top = y if y > top else top
        y = y if y > bottom else highest
        least = y if y < least else least
    return from_ordinal(top) if top > bottom else x.dtype.type(0), from_ordinal(least)


@kernel(fast=True, inner=True)
def exponentials(x, e):
    """e = exp(x − m), and m and the least finite x − m, or less.

    m is 0 where no x is far from 0, which is soon found out; else it is the largest x.
    """
    near = x.dtype.type(NEAR)
    bound = ordinal(near)
    largest = bound
    for k in range(x.shape[0]):
        y = ordinal(abs(x[k]))
        largest = y if y > largest else largest
    m, least = x.dtype.type(0), -near
    if largest > bound:
        m, least = extent(x)
    for k in range(x.shape[0]):
        e[k] = exp(x[k] - m)
    return np.float64(m), np.float64(least) - np.float64(m)


@kernel(fast=True, inner=True)
def sums_into(p, E, total):
    """total_j = Σ_i p_i E_ij, four rows at a time so that the sums stay in registers."""
    c = E.shape[0]
    whole = c - c % 4
    for j in range(c):
        total[j] = 0
    for i in range(0, whole, 4):
        p0, p1, p2, p3 = p[i], p[i + 1], p[i + 2], p[i + 3]
        for j in range(c):
            total[j] += (p0 * E[i, j] + p1 * E[i + 1, j]) + (p2 * E[i + 2, j] + p3 * E[i + 3, j])
    for i in range(whole, c):
        for j in range(c):
            total[j] += p[i] * E[i, j]


@kernel(inner=True)
def most(peak):
    """The most that an ``exponential`` can be, given the m it returned."""
    return math.exp(NEAR) if peak == 0 else 1.0


@kernel(fast=True, inner=True)
def normalise(x, w, out, clean, whole, floor, bound):
    """out = x·w / S with S = Σ x·w, and S, which is NaN if x or S may have lost what counts.

    A sum x may if it is below the ``floor``, but for a zero where its terms are ``clean``: none is
    too small to be told from 0. Where weights w are not ``whole``, a 0 may stand for a tiny one. No
    x is above the ``bound``. Also returns whether ``out`` is clean, and its losses: the least sum
    that ``out`` makes right with weights up to 1. They grow as S falls: what underflows in x·w may
    be as large as 1e-18 in ``out``, where S is 1e-290.
    """
    tiny = x.dtype.type(TINIES[1] if x.itemsize == 8 else TINIES[0])
    small = x.dtype.type(SMALL[1] if x.itemsize == 8 else SMALL[0])
    nothing = x.dtype.type(UNDERFLOW[1] if x.itemsize == 8 else UNDERFLOW[0])
    least, zero = x.dtype.type(floor), x.dtype.type(0)
    mass, lost, dirty, some, gone = zero, False, False, False, False
    for j in range(x.shape[0]):
        lost |= not (x[j] >= least) | (clean & (x[j] == zero))
        allowed = (x[j] > zero) & ((w[j] > zero) | (not whole))
        out[j] = x[j] * w[j]
        some |= allowed
        gone |= allowed & (out[j] < nothing)
        mass += out[j]
    lost |= some & (mass < tiny * x.dtype.type(bound))  # too little is left of what was allowed
    scale = x.dtype.type(1) / mass
    for j in range(x.shape[0]):
        out[j] *= scale
        dirty |= (out[j] < small) & (x[j] > zero) & (w[j] > zero)
    loss = np.float64(tiny)
    if gone and mass < bound:
        loss *= bound / np.float64(mass)
    return np.nan if lost else np.float64(mass), not dirty, loss


@kernel(inner=True)
def largest(x):
    """The largest entry where it is a number, else 0."""
    m = -INF
    for j in range(x.shape[0]):
        m = x[j] if x[j] > m else m
    return np.float64(m) if -INF < m < INF else 0.0


@kernel(inner=True)
def end_row(u, start, end, first, last, row):
    """row = u, with ``start`` at the first position and ``end`` at the last, less its largest
    entry, which is returned.

    The sums are taken in float64, each of what is left of its terms without their own largest
    entries: neither a mask nor an offset in one of them costs the digits of the others.
    """
    a, b, c, top = largest(u), 0.0, 0.0, -INF
    b = largest(start) if first else b
    c = largest(end) if last else c
    for j in range(row.shape[0]):
        x = np.float64(u[j]) - a
        x += np.float64(start[j]) - b if first else 0.0
        x += np.float64(end[j]) - c if last else 0.0
        top = x if x > top else top
    top = top if -INF < top < INF else 0.0
    least = FARTHEST if row.itemsize == 4 else -INF
    for j in range(row.shape[0]):
        x = np.float64(u[j]) - a
        x += np.float64(start[j]) - b if first else 0.0
        x += np.float64(end[j]) - c if last else 0.0
        x -= top
        row[j] = least if -INF < x < least else x
    return a + b + c + top


@kernel(inner=True)
def forward(u, T, length, start, end, W, P, E, flat, peaks, marks, row, total, fresh, keep):
    """P = P(yₜ | the scores up to t) and W = exp(scores − m) at every position of one item.

    E ``(s, c, c)``, also seen as ``flat (s, c·c)``, is made anew if it is ``fresh``, and every one
    is kept if asked; ``peaks (s, 2)`` has what ``exponentials`` returned for it. ``marks (n, 3)``
    keeps the sums by which P was divided, whether every weight W of a position that is 0 stands
    for −inf, and the losses of P. Returns A, NaN if the item must be computed in another way.
    """
    c, shared = u.shape[1], T.shape[0] == 1
    lost_weight, lost_product = -86.0, LEAST[0]
    if u.itemsize == 8:
        lost_weight, lost_product = -700.0, LEAST[1]
    offset, mass, kept, sure, floor, bound = 0.0, 1.0, True, True, 0.0, 1.0
    for j in range(c):
        total[j] = 1
    for t in range(length):
        if t == 0 or t == length - 1:
            offset += end_row(u[t], start, end, t == 0, t == length - 1, row)
        else:
            for j in range(c):
                row[j] = u[t, j]
        top, least = exponentials(row, W[t])
        offset += top
        marks[t, 1] = 1.0 if least > lost_weight else 0.0
        if t > 0:
            slot = t - 1 if keep and not shared else 0
            if fresh or not shared:
                peaks[slot, 0], peaks[slot, 1] = exponentials(T[0 if shared else t - 1], flat[slot])
                fresh = False
            if not mass > 0:
                break
            sums_into(P[t - 1], E[slot], total)
            offset += peaks[slot, 0]
            sure = kept & (marks[t - 1, 1] > 0) & (peaks[slot, 1] > lost_product)
            bound = most(peaks[slot, 0])
            floor = marks[t - 1, 2] * bound
        marks[t, 0], kept, marks[t, 2] = normalise(
            total, W[t], P[t], sure, marks[t, 1] > 0, floor, bound
        )
        if not marks[t, 0] > 1e-90:  # the product might be too small
            offset += math.log(mass)
            mass = 1.0
        mass *= marks[t, 0]
        if not 1e-200 < mass < 1e200:
            offset += math.log(mass) if mass > 0 else 0.0
            mass = 1.0 if mass > 0 else mass
    return offset + (math.log(mass) if mass > 0 else mass - INF)


@kernel
def values(low, high, U, TT, starts, ends, lengths, out, W, P, E, flat, peaks, marks, row, total):
    """A of the items low..high; NaN where it must be computed in another way."""
    fresh = low < high  # whether E is still to be made
    for b in range(low, high):
        out[b] = forward(
            U[b], TT[b % TT.shape[0]], lengths[b], starts[b % starts.shape[0]],
            ends[b % ends.shape[0]], W, P, E, flat, peaks, marks, row, total, fresh, False,
        )  # fmt: skip
        fresh = fresh & ((TT.shape[0] > 1) | (lengths[b] == 1))


@kernel
def subtract_scores(U, TT, starts, ends, lengths, tags, out):
    """A becomes A − ⟨θ, z⟩; NaN where a tag is none."""
    for b in range(U.shape[0]):
        u, T, length = U[b], TT[b % TT.shape[0]], lengths[b]
        total = 0.0
        for t in range(length):
            if not 0 <= tags[b, t] < U.shape[2]:
                total = np.nan
                break
            total += u[t, tags[b, t]]
            if t > 0:
                total += T[0 if T.shape[0] == 1 else t - 1, tags[b, t - 1], tags[b, t]]
            else:
                total += starts[b % starts.shape[0], tags[b, t]]
            if t == length - 1:
                total += ends[b % ends.shape[0], tags[b, t]]
        out[b] -= total


@kernel
def subtract_tags(lengths, tags, MU, MT):
    """μ becomes μ − z; NaN for an item with a tag that is none."""
    for b in range(len(lengths)):
        for t in range(lengths[b]):
            if not 0 <= tags[b, t] < MU.shape[2]:
                MU[b] = np.nan
                MT[b] = np.nan
                break
            MU[b, t, tags[b, t]] -= 1
            if t > 0:
                MT[b, 0 if MT.shape[1] == 1 else t - 1, tags[b, t - 1], tags[b, t]] -= 1


@kernel(fast=True, inner=True)
def weigh(p, total, mu, clean, floor, least):
    """μ_i = p_i total_i / S with S their sum, which is returned.

    NaN if S is below the ``least``, or a total may have lost a term, see ``normalise``.
    """
    bottom, zero = total.dtype.type(floor), total.dtype.type(0)
    mass, lost = zero, False
    for i in range(p.shape[0]):
        lost |= not (total[i] >= bottom) | (clean & (total[i] == zero))
        mu[i] = p[i] * total[i]
        mass += mu[i]
    scale = total.dtype.type(1) / mass
    for i in range(p.shape[0]):
        mu[i] *= scale
    return np.nan if lost or not mass >= least else np.float64(mass)


@kernel(fast=True, inner=True)
def edges(p, E, r, scale, out, total):
    """out_ij = p_i E_ij r_j·scale, and total_i = Σ_j E_ij r_j."""
    for i in range(E.shape[0]):
        weight, x = p[i] * scale, p.dtype.type(0)
        for j in range(E.shape[1]):
            y = E[i, j] * r[j]
            x += y
            out[i, j] = weight * y
        total[i] = x


@kernel
def gradients(
    low, high, U, TT, starts, ends, lengths, out, MU, MT, W, P, E, flat, peaks, marks, row, total
):  # fmt: skip
    """A and its gradient for the items low..high; A is NaN where another way is needed.

    MU and MT come in as zeros. Marginals are normalised at every position, so that rounding does
    not pile up along a chain. The sum S that normalises those of step t is known before: with S′ of
    the position after, P(yₜ₊₁) = x·w/m and r = total·w/z it is Σ_j x_j r_j = m·S′/z.
    """
    lost_product = LEAST[1] if U.itemsize == 8 else LEAST[0]
    for b in range(low, high):
        length = lengths[b]
        sure = length > 0  # which it always is; a literal would make numba compile things once more
        out[b] = forward(
            U[b], TT[b % TT.shape[0]], length, starts[b % starts.shape[0]], ends[b % ends.shape[0]],
            W, P, E, flat, peaks, marks, row, total, sure, sure,
        )  # fmt: skip
        if not out[b] > -INF:
            continue
        for i in range(total.shape[0]):
            total[i] = 1
        floor, bound = 0.0, 1.0
        mass = weigh(P[length - 1], total, MU[b, length - 1], sure, floor, marks[length - 1, 2])
        for t in range(length - 2, -1, -1):
            whole = marks[t + 1, 1] > 0
            scale, kept, loss = normalise(total, W[t + 1], row, sure, whole, floor, bound)
            scale = scale / marks[t + 1, 0] / mass  # the product of both may underflow
            edges(P[t], E[t], row, total.dtype.type(scale), MT[b, t], total)
            sure = kept & whole & (peaks[t, 1] > lost_product)
            bound = most(peaks[t, 0])
            floor = loss * bound
            mass = weigh(P[t], total, MU[b, t], sure, floor, marks[t, 2] * bound)
            if not (mass > 0 and scale < INF):
                out[b] = np.nan
                break


@kernel(fast=True, inner=True)
def sum_of_outer(P, R, steps, E, block, out):
    """out_ij = E_ij Σ_t P_ti R_tj, in blocks of steps short enough for float32.

    P and R hold zeros for the seven steps after the last: they are taken eight at a time.
    """
    c = out.shape[0]
    for start in range(0, steps, 64):
        for i in range(c):
            for j in range(c):
                block[i, j] = 0
        for t in range(start, start + 64 if start + 64 < steps else steps, 8):
            for i in range(c):
                p0, p1, p2, p3 = P[t, i], P[t + 1, i], P[t + 2, i], P[t + 3, i]
                p4, p5, p6, p7 = P[t + 4, i], P[t + 5, i], P[t + 6, i], P[t + 7, i]
                for j in range(c):
                    x = p0 * R[t, j] + p1 * R[t + 1, j] + p2 * R[t + 2, j] + p3 * R[t + 3, j]
                    y = p4 * R[t + 4, j] + p5 * R[t + 5, j] + p6 * R[t + 6, j] + p7 * R[t + 7, j]
                    block[i, j] += x + y
        for i in range(c):
            for j in range(c):
                out[i, j] += block[i, j] * E[i, j]


@kernel
def shared_gradients(
    low, high, U, TT, starts, ends, lengths, out, MU, MT, W, P, E, flat, peaks, marks, row, total,
    R, block, transposed,
):  # fmt: skip
    """The same with one matrix of transitions for all steps, whose gradients are summed."""
    c = U.shape[2]
    lost_product = LEAST[1] if U.itemsize == 8 else LEAST[0]
    fresh = low < high  # whether E is still to be made
    for b in range(low, high):
        length = lengths[b]
        sure = length > 0
        out[b] = forward(
            U[b], TT[b % TT.shape[0]], length, starts[b % starts.shape[0]], ends[b % ends.shape[0]],
            W, P, E, flat, peaks, marks, row, total, fresh, sure,
        )  # fmt: skip
        if fresh and length > 1:  # rows of the transpose are summed in registers
            for i in range(c):
                for j in range(c):
                    transposed[j, i] = E[0, i, j]
        fresh = fresh & ((TT.shape[0] > 1) | (length == 1))
        if not out[b] > -INF:
            continue
        for i in range(c):
            total[i] = 1
        floor, bound = 0.0, 1.0
        mass = weigh(P[length - 1], total, MU[b, length - 1], sure, floor, marks[length - 1, 2])
        for t in range(length - 2, -1, -1):
            whole = marks[t + 1, 1] > 0
            left, kept, loss = normalise(total, W[t + 1], R[t], sure, whole, floor, bound)
            sums_into(R[t], transposed, total)
            sure = kept & whole & (peaks[0, 1] > lost_product)
            bound = most(peaks[0, 0])
            floor = loss * bound
            mass = weigh(P[t], total, MU[b, t], sure, floor, marks[t, 2] * bound)
            if not (mass > 0 and left > 0):
                out[b] = np.nan
                break
            scale = total.dtype.type(1 / mass)
            for i in range(c):
                P[t, i] *= scale
        if length > 1 and out[b] == out[b]:
            for t in range(length - 1, length + 6):
                for j in range(c):
                    P[t, j] = R[t, j] = 0
            sum_of_outer(P, R, length - 1, E[0], block, MT[b, 0])


@kernel(inner=True)
def log_sum_exp(x):
    """log Σ exp x, exact with −inf and NaN."""
    m = -INF
    for i in range(x.shape[0]):
        m = x[i] if x[i] > m else m
    m = m if m > -INF else 0.0
    total = 0.0
    for i in range(x.shape[0]):
        total += math.exp(x[i] - m)
    return m + math.log(total)


@kernel(inner=True)
def lower(x):
    """Takes the largest entry out of all, where it is a number; returns it."""
    m = largest(x)
    for j in range(x.shape[0]):
        x[j] -= m
    return m


@kernel
def gradients_in_logs(items, U, TT, starts, ends, lengths, out, MU, MT):
    """The same for some items, term by term in log space: for any spread, and NaN stays NaN."""
    n, c = U.shape[1:]
    alpha, beta, after, scratch = np.empty((n, c)), np.empty(c), np.empty(c), np.empty(c)
    for b in items:
        u, T, length = U[b], TT[b % TT.shape[0]], lengths[b]
        start, end = starts[b % starts.shape[0]], ends[b % ends.shape[0]]
        MU[b] = 0
        MT[b] = 0
        offset = end_row(u[0], start, end, True, False, alpha[0])
        for t in range(1, length):
            for j in range(c):
                for i in range(c):
                    scratch[i] = alpha[t - 1, i] + T[0 if T.shape[0] == 1 else t - 1, i, j]
                alpha[t, j] = u[t, j] + log_sum_exp(scratch)
            offset += lower(alpha[t])
        for j in range(c):
            beta[j] = end[j]
        offset += lower(beta)
        for j in range(c):
            scratch[j] = alpha[length - 1, j] + beta[j]
        out[b] = offset + log_sum_exp(scratch)
        if out[b] == -INF:
            continue
        for t in range(length - 1, -1, -1):
            step = 0 if T.shape[0] == 1 else t
            if t < length - 1:
                for j in range(c):
                    after[j] = u[t + 1, j] + beta[j]
                for i in range(c):
                    for j in range(c):
                        scratch[j] = T[step, i, j] + after[j]
                    beta[i] = log_sum_exp(scratch)
            for i in range(c):
                scratch[i] = alpha[t, i] + beta[i]
            a = log_sum_exp(scratch)
            for i in range(c):
                mu = math.exp(alpha[t, i] + beta[i] - a)
                MU[b, t, i] = mu
                if t == length - 1 or mu == 0:
                    continue
                for j in range(c):  # β is the log-sum of these, so the edges sum to μ at any scale
                    edge = mu * math.exp(T[step, i, j] + after[j] - beta[i])
                    MT[b, t if MT.shape[1] > 1 else 0, i, j] += edge
            lower(beta)


@kernel(inner=True)
def relative(x, out):
    """out = exp(x − m) in its dtype, and m, the largest of x (0 if all are −inf)."""
    c = x.shape[0]
    whole = c - c % 4
    m0, m1, m2, m3 = x[0], x[0], x[0], x[0]  # four at a time, since each waits for the one before
    for i in range(0, whole, 4):
        m0 = x[i] if x[i] > m0 else m0
        m1 = x[i + 1] if x[i + 1] > m1 else m1
        m2 = x[i + 2] if x[i + 2] > m2 else m2
        m3 = x[i + 3] if x[i + 3] > m3 else m3
    m = max(max(m0, m1), max(m2, m3))
    for i in range(whole, c):
        m = x[i] if x[i] > m else m
    m = m if m > -INF else x.dtype.type(0)
    for i in range(c):
        out[i] = x[i] - m
    for i in range(c):
        out[i] = exp(out[i])
    return np.float64(m)


@kernel
def products(
    low, high, U, TT, starts, ends, lengths, VU, VT, VS, VE, WU, WT
):  # fmt: skip
    """Hessian-vector products: the derivative of the marginals in direction (VU, VT, VS, VE).

    α̇ₜ(j) = u̇ₜ(j) + Σᵢ P(i | j)(α̇ₜ₋₁(i) + Ṫ(i, j)) and likewise β̇;
    μ̇ = μ·(α̇ + β̇ − Ȧ), and for an edge μ·(α̇(i) + Ṫ(i, j) + u̇(j) + β̇(j) − Ȧ). Only differences
    between tags matter, so α̇ and β̇ are centred at every step and stay small on long chains, and so
    are α and β. The ends are part of the first α and of the last β.
    """
    n, c = U.shape[1:]
    steps = WT.shape[1]
    alpha, d_alpha = np.empty((n, c)), np.empty((n, c))
    beta, d_beta, d_after = np.empty(c), np.empty(c), np.empty(c)
    scratch, after, mu = np.empty(c), np.empty(c), np.empty(c)
    E = np.empty((max(1, steps), c, c), U.dtype)
    p, total = np.empty(c, U.dtype), np.empty(c, U.dtype)
    q, peaks = np.empty((c, c), U.dtype), np.empty(max(1, steps))
    edge, summed = np.empty((c, c)), np.empty((c, c))
    for b in range(low, high):
        u, T, length = U[b], TT[b % TT.shape[0]], lengths[b]
        du, dT = VU[b], VT[b % VT.shape[0]]
        start, end = starts[b % starts.shape[0]], ends[b % ends.shape[0]]
        end_row(u[0], start, end, True, False, alpha[0])
        for j in range(c):
            d_alpha[0, j] = du[0, j] + np.float64(VS[b % VS.shape[0], j])
        for t in range(1, length):
            step = 0 if T.shape[0] == 1 else t - 1
            if t == 1 or step > 0:
                peaks[step], _ = exponentials(T[step].reshape(c * c), E[step].reshape(c * c))
            m = relative(alpha[t - 1], p)
            incoming(
                alpha[t - 1], p, m + peaks[step], T[step], E[step], total, scratch, alpha[t], q
            )
            alpha[t] += u[t]
            lower(alpha[t])
            d_alpha[t] = du[t]
            for i in range(c):
                for j in range(c):
                    d_alpha[t, j] += q[i, j] * (d_alpha[t - 1, i] + dT[step, i, j])
            center(d_alpha[t])
        for j in range(c):
            beta[j], d_beta[j] = end[j], VE[b % VE.shape[0], j]
            scratch[j] = alpha[length - 1, j] + beta[j]
        if log_sum_exp(scratch) == -INF:
            continue
        summed[:] = 0.0
        for t in range(length - 1, -1, -1):
            if t < length - 1:
                step = 0 if T.shape[0] == 1 else t
                for j in range(c):
                    after[j] = u[t + 1, j] + beta[j]
                m = relative(after, p)
                outgoing(after, p, m + peaks[step], T[step], E[step], total, scratch, beta, q)
                for j in range(c):
                    d_after[j] = du[t + 1, j] + d_beta[j]
                for i in range(c):
                    d_beta[i] = mean_change(q[i], dT[step, i], d_after)
            for i in range(c):
                scratch[i] = alpha[t, i] + beta[i]
            relative(scratch, mu)
            mass, mean = 0.0, 0.0
            for i in range(c):
                mass += mu[i]
            for i in range(c):
                mu[i] /= mass
            for i in range(c):
                mean += mu[i] * (d_alpha[t, i] + d_beta[i])
            for i in range(c):
                WU[b, t, i] = mu[i] * (d_alpha[t, i] + d_beta[i] - mean)
            if t < length - 1:
                for i in range(c):
                    for j in range(c):
                        change = d_alpha[t, i] + dT[step, i, j] + d_after[j] - mean
                        edge[i, j] = mu[i] * q[i, j] * change
                if steps == 1:
                    summed += edge
                else:
                    WT[b, t] = edge
            center(d_beta)
            lower(beta)
        if steps == 1:
            WT[b, 0] = summed


@kernel(inner=True)
def center(x):
    """Subtracts the mean."""
    mean = 0.0
    for i in range(x.shape[0]):
        mean += x[i]
    for i in range(x.shape[0]):
        x[i] -= mean / x.shape[0]


@kernel(inner=True)
def incoming(alpha, p, shift, T, E, total, scratch, new, q):
    """new_j = log Σ_i exp(α_i + T_ij) and q_ij = P(i | j); zeros if j cannot be reached."""
    c = E.shape[0]
    sums_into(p, E, total)
    for i in range(c):
        for j in range(c):
            q[i, j] = p[i] * E[i, j] / total[j]
    for j in range(c):
        if total[j] >= TINY:
            new[j] = shift + math.log(total[j])
        else:
            for i in range(c):
                scratch[i] = alpha[i] + T[i, j]
            new[j] = log_sum_exp(scratch)
            for i in range(c):
                q[i, j] = math.exp(scratch[i] - new[j]) if new[j] != -INF else 0.0


@kernel(inner=True)
def outgoing(after, p, shift, T, E, total, scratch, beta, q):
    """β_i = log Σ_j exp(T_ij + after_j) and q_ij = P(j | i); zeros if nothing can follow i."""
    c = E.shape[0]
    sums_from(E, p, total)
    for i in range(c):
        if total[i] >= TINY:
            beta[i] = shift + math.log(total[i])
            for j in range(c):
                q[i, j] = E[i, j] * p[j] / total[i]
        else:
            for j in range(c):
                scratch[j] = T[i, j] + after[j]
            beta[i] = log_sum_exp(scratch)
            for j in range(c):
                q[i, j] = math.exp(scratch[j] - beta[i]) if beta[i] != -INF else 0.0


@kernel(fast=True, inner=True)
def sums_from(E, p, total):
    """total_i = Σ_j E_ij p_j."""
    for i in range(E.shape[0]):
        x = E[i, 0] * p[0]
        for j in range(1, E.shape[1]):
            x += E[i, j] * p[j]
        total[i] = x


@kernel(fast=True, inner=True)
def mean_change(q, d_edge, d_after):
    """Σ_j q_j (Ṫ_j + u̇_j + β̇_j)."""
    total = 0.0
    for j in range(q.shape[0]):
        total += q[j] * (d_edge[j] + d_after[j])
    return total


@kernel
def viterbi(low, high, U, TT, starts, ends, lengths, best, tags, far):
    """Best scores and tags of the items low..high; ties go to the first tag, NaN shows in best.

    Scores are kept relative to the best of each position; backpointers are found again on the way
    back, for the tags of the best path only. ``far``: whether a finite score of an item is so large
    that others lose their digits beside it in float32.
    """
    n, c = U.shape[1:]
    a, new = np.empty((n, c), U.dtype), np.empty(c, U.dtype)
    for b in range(low, high):
        u, T, length = U[b], TT[b % TT.shape[0]], lengths[b]
        start, end = starts[b % starts.shape[0]], ends[b % ends.shape[0]]
        used = 1 if T.shape[0] == 1 and length > 1 else length - 1
        shift = 0.0
        for t in range(length):
            if t == 0:
                new[:] = start
            else:
                best_into(a[t - 1], T[0 if T.shape[0] == 1 else t - 1], new)
            if t == length - 1:
                new += end
            top = new.dtype.type(-INF)
            for j in range(c):
                a[t, j] = u[t, j] + new[j]
                top = a[t, j] if a[t, j] > top else top
            if top > -INF:
                shift += top
                for j in range(c):
                    a[t, j] -= top
        top, tag = a.dtype.type(-INF), 0
        for j in range(c):
            if a[length - 1, j] > top:
                top, tag = a[length - 1, j], j
        best[b] = top + shift
        nan, far[b] = False, False
        for rows in (
            u[:length],
            T[:used].reshape(used * c, c),
            start.reshape(1, c),
            end.reshape(1, c),
        ):
            bad, large = extremes(rows)
            nan |= bad
            far[b] |= large
        if nan:
            best[b] = np.nan
        for t in range(n - 1, -1, -1):
            tags[b, t] = tag if t < length else -1
            if 0 < t < length:
                step = 0 if T.shape[0] == 1 else t - 1
                top, chosen = a.dtype.type(-INF), 0
                for i in range(c):
                    x = a[t - 1, i] + T[step, i, tag]
                    if x > top:
                        top, chosen = x, i
                tag = chosen


@kernel(inner=True)
def best_into(a, T, best):
    """best_j = max_i a_i + T_ij, four rows at a time so that the best stay in registers."""
    c = T.shape[0]
    whole = c - c % 4
    best[:] = -INF
    for i in range(0, whole, 4):
        a0, a1, a2, a3 = a[i], a[i + 1], a[i + 2], a[i + 3]
        for j in range(c):
            x0, x1, x2, x3 = a0 + T[i, j], a1 + T[i + 1, j], a2 + T[i + 2, j], a3 + T[i + 3, j]
            x0 = x1 if x1 > x0 else x0
            x2 = x3 if x3 > x2 else x2
            x0 = x2 if x2 > x0 else x0
            best[j] = x0 if x0 > best[j] else best[j]
    for i in range(whole, c):
        for j in range(c):
            x = a[i] + T[i, j]
            best[j] = x if x > best[j] else best[j]


@kernel(inner=True)
def extremes(x):
    """Whether an entry is NaN, and whether one is finite and far from 0."""
    bad, large = False, False
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            y = abs(x[i, j])
            bad |= y != y
            large |= (y > FAR) & (y < INF)
    return bad, large


def _array(tensor: Tensor, dtype: torch.dtype) -> NDArray:
    """A contiguous array; a tensor that is one item expanded over the batch gives that item."""
    if tensor.shape[0] > 1 and tensor.stride(0) == 0:
        tensor = tensor[:1]
    return array(as_dtype(tensor.detach(), dtype))


def _work(unary: Tensor) -> int:
    return unary.shape[1] * unary.shape[2] * unary.shape[2]


def _inputs(
    unary: Tensor, transition: Tensor, start: Tensor, end: Tensor, lengths: Tensor
) -> tuple[NDArray, ...]:
    u = array(unary)
    c = u.shape[2]
    none = np.zeros((1, 1, c, c), u.dtype)  # for no start, no end, or the steps of one position
    T = _array(transition, unary.dtype) if transition.shape[1] else none
    first, last = (_array(t, unary.dtype) if t.shape[1] else none[0, 0, :1] for t in (start, end))
    return u, T, first, last, _integers(lengths)


def _apart(*shape: int, dtype: Any = np.float64) -> NDArray:
    """An uninitialised array that no other is near.

    A compiled loop first asks whether its arrays lie within a vector of each other, and if so adds
    up in another order: the last bit must not depend on who is a neighbour on the heap.
    """
    gap, size = 512, math.prod(shape) * np.dtype(dtype).itemsize
    return np.ndarray(shape, dtype, np.empty(size + 2 * gap, np.uint8), gap)


def _forward_space(u: NDArray, steps: int) -> tuple[NDArray, ...]:
    """Room for all that ``forward`` makes; kernels that allocate nothing compile sooner."""
    n, c = u.shape[1:]
    slots = max(1, steps)
    shapes = (n, c), (n + 7, c), (slots, c, c), (c,), (c,)
    W, P, E, row, total = (_apart(*shape, dtype=u.dtype) for shape in shapes)
    return W, P, E, E.reshape(slots, c * c), _apart(slots, 2), _apart(n, 3), row, total


def _flat(T: NDArray) -> NDArray:
    """``(B, s, c, c)`` as ``(B, s, c·c)``."""
    return T.reshape(*T.shape[:2], T.shape[2] ** 2)


def value(
    unary: Tensor,
    transition: Tensor,
    start: Tensor,
    end: Tensor,
    lengths: Tensor,
    tags: Tensor | None = None,
) -> Tensor:
    """A ``(B)``, or A − ⟨θ, z⟩ of tags ``(B, n)``."""
    inputs = _inputs(unary, transition, start, end, lengths)
    u, T, *others = inputs
    a, flat = np.empty(len(unary)), _flat(T)

    def task(low: int, high: int) -> None:
        values(low, high, u, flat, *others, a, *_forward_space(u, 1))

    run_chunks(task, len(unary), _work(unary))
    left = np.isnan(a)
    if left.any():
        a[left] = _again(_of_items(left, inputs), transition.shape[1])[0]
    if tags is not None:
        subtract_scores(*inputs, _integers(tags), a)
    return torch.from_numpy(a.astype(u.dtype))


def gradient(
    unary: Tensor,
    transition: Tensor,
    start: Tensor,
    end: Tensor,
    lengths: Tensor,
    tags: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The same, and its gradient in unary, transition (per item), start and end scores."""
    inputs = _inputs(unary, transition, start, end, lengths)
    a, mu, edges = _gradient(inputs, transition.shape[1])
    sizes = inputs[-1]
    if tags is not None:
        subtract_scores(*inputs, _integers(tags), a)
        subtract_tags(sizes, _integers(tags), mu, edges)
    first = mu[:, 0, : start.shape[1]].copy()
    last = mu[np.arange(len(mu)), sizes - 1, : end.shape[1]]
    return tuple(torch.from_numpy(x) for x in (a.astype(mu.dtype), mu, edges, first, last))


def _gradient(inputs: tuple[NDArray, ...], steps: int) -> tuple[NDArray, ...]:
    """A in float64 and its gradient in the dtype of the scores."""
    u, T, *others = inputs
    (B, n, c), dtype = u.shape, u.dtype
    # the kernel writes no padding; numpy's zeros, unlike torch's, wake no other threads
    new = np.empty if steps > 1 and (others[-1] == n).all() else np.zeros
    outputs = np.empty(B), new((B, n, c), dtype), new((B, steps, c, c), dtype)
    given = u, _flat(T), *others, *outputs

    def task(low: int, high: int) -> None:
        space = _forward_space(u, steps)
        if steps > 1:
            gradients(low, high, *given, *space)
        else:
            more = (_apart(*shape, dtype=dtype) for shape in ((n + 7, c), (c, c), (c, c)))
            shared_gradients(low, high, *given, *space, *more)

    run_chunks(task, B, 2 * n * c * c)
    left = ~(outputs[0] > -np.inf)
    if left.any():
        again = _again(_of_items(left, inputs), steps)
        for x, y in zip(outputs, again, strict=True):
            x[left] = y
    return outputs


def _again(inputs: tuple[NDArray, ...], steps: int) -> tuple[NDArray, ...]:
    """The same where it did not work: in float64, or if it was in float64, in log space."""
    u = inputs[0]
    if u.dtype == np.float32:
        return _gradient(_wide(inputs), steps)
    (B, n, c), items = u.shape, np.arange(len(u))
    outputs = np.empty(B), np.empty((B, n, c)), np.empty((B, steps, c, c))

    def task(low: int, high: int) -> None:
        gradients_in_logs(items[low:high], *inputs, *outputs)

    run_chunks(task, B, 10 * n * c * c)
    return outputs


def _of_items(chosen: NDArray, inputs: tuple[NDArray, ...]) -> tuple[NDArray, ...]:
    return tuple(x[chosen] if len(x) == len(chosen) else x for x in inputs)


def _integers(tensor: Tensor) -> NDArray:
    return array(tensor, np.int64)


def hvp(scores: Sequence[Tensor], directions: Sequence[Tensor], lengths: Tensor) -> list[Tensor]:
    """The Hessian of A times a direction in unary, transition, start and end scores."""
    unary, transition, start, end = scores
    w, w_edges = unary.new_zeros(unary.shape), unary.new_zeros(transition.shape)
    inputs = _inputs(unary, transition, start, end, lengths)
    along, moves, first, last = directions
    v = _inputs(along, moves, first, last, lengths)[:4]
    outputs = (w.numpy(), w_edges.numpy())

    def task(low: int, high: int) -> None:
        products(low, high, *inputs, *v, *outputs)

    run_chunks(task, len(unary), 4 * _work(unary))
    at_start = w[:, 0, : start.shape[1]].clone()
    at_end = w[torch.arange(len(w), device="cpu"), torch.from_numpy(inputs[-1]) - 1, : end.shape[1]]
    return [w, w_edges, at_start, at_end]


def argmax(
    unary: Tensor, transition: Tensor, start: Tensor, end: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """The best score ``(B)`` and its tags ``(B, n)``, −1 in the padding."""
    inputs = _inputs(unary, transition, start, end, lengths)
    best, tags, far = _viterbi(inputs)
    if far.any() and unary.dtype == torch.float32:
        best[far], tags[far], _ = _viterbi(_wide(_of_items(far, inputs)))
    return torch.from_numpy(best), torch.from_numpy(tags)


def _viterbi(inputs: tuple[NDArray, ...]) -> tuple[NDArray, ...]:
    u = inputs[0]
    best, far = np.empty(len(u), u.dtype), np.empty(len(u), np.bool_)
    outputs = best, np.empty(u.shape[:2], np.int64), far
    run_chunks(
        lambda i, j: viterbi(i, j, *inputs, *outputs), len(u), math.prod(u.shape) * u.shape[2]
    )
    return outputs


def _wide(inputs: tuple[NDArray, ...]) -> tuple[NDArray, ...]:
    """The same with scores in float64."""
    return tuple(x.astype(np.float64) if x.dtype == np.float32 else x for x in inputs)
