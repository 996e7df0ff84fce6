"""The dense chain on the CPU, compiled by numba: forward-backward with matrix-vector steps.

A step works in exp space: with p = exp(α − max α) and E = exp(T − max T), the new sums are pᵀE, so
the exponential of a transition is taken once and serves both directions. α and β stay in log space
and float64, whatever the scores. Underflow can falsify a sum only if it is tiny and the scores of
the step spread widely; an item where that happens is computed again in log space, term by term, so
no spread of scores is too large.

Letters as in ``naive``: n positions, c tags, s steps of transitions (n − 1, or 1 if shared).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from structmax.jit import exp, kernel, log, run_chunks

INF = math.inf
TINY = 1e-25  # far above the smallest float32, far below any sum that matters
DEEP = math.log(TINY)


@kernel(fast=True, inner=True)
def exponentials(T, E, top, low):
    """E = exp(T − m), m the largest entry of T (0 if all are −inf), and the least finite T − m."""
    c = T.shape[0]
    for j in range(c):
        top[j] = -INF
        low[j] = INF
    for i in range(c):
        for j in range(c):
            x = T[i, j]
            top[j] = x if x > top[j] else top[j]
            low[j] = x if (x < low[j]) & (x > -INF) else low[j]
    m, least = top[0], low[0]
    for j in range(1, c):
        m = top[j] if top[j] > m else m
        least = low[j] if low[j] < least else least
    m = m if m > -INF else top.dtype.type(0)
    for i in range(c):
        for j in range(c):
            E[i, j] = exp(T[i, j] - m)
    return np.float64(m), np.float64(least) - np.float64(m)


@kernel(inner=True)
def relative(x, out):
    """out = exp(x − m) in its dtype, and m, the largest of x (0 if all are −inf)."""
    c = x.shape[0]
    whole = c - c % 4
    m0, m1, m2, m3 = -INF, -INF, -INF, -INF  # four at a time, since each waits for the one before
    for i in range(0, whole, 4):
        m0 = x[i] if x[i] > m0 else m0
        m1 = x[i + 1] if x[i + 1] > m1 else m1
        m2 = x[i + 2] if x[i + 2] > m2 else m2
        m3 = x[i + 3] if x[i + 3] > m3 else m3
    m = max(max(m0, m1), max(m2, m3))
    for i in range(whole, c):
        m = x[i] if x[i] > m else m
    m = m if m > -INF else 0.0
    for i in range(c):
        out[i] = x[i] - m
    for i in range(c):
        out[i] = exp(out[i])
    return m


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


@kernel(fast=True, inner=True)
def sums_from(E, p, total):
    """total_i = Σ_j E_ij p_j."""
    for i in range(E.shape[0]):
        x = E[i, 0] * p[0]
        for j in range(1, E.shape[1]):
            x += E[i, j] * p[j]
        total[i] = x


@kernel(inner=True)
def logs(total, x, least, shift, add, out):
    """out = add + shift + log total, and whether that is right: no sum can have underflown.

    The sums were of exp(x − max x) times numbers of at least exp(least), or 0.
    """
    safe = True
    for j in range(total.shape[0]):
        safe &= total[j] >= TINY
        out[j] = add[j] + (shift + log(total[j]))
    if safe:
        return True
    top, low = -INF, INF
    for i in range(total.shape[0]):
        top = max(top, x[i])
        low = x[i] if low > x[i] > -INF else low
    safe = low - top + least > DEEP or top == -INF  # then a 0 is 0, not too small a number
    for j in range(total.shape[0]):
        safe &= total[j] >= TINY or total[j] == 0
        out[j] = out[j] if total[j] > 0 else -INF
    return safe


@kernel(inner=True)
def forward(u, T, length, alpha, P, E, peaks, total, spare, keep):
    """P = exp(α − max α) at every position of one item; every E is kept too if asked.

    Of α itself, only the rows of the current and the last position are kept.

    Returns A, NaN if the item must be computed in log space.
    """
    c, shared = u.shape[1], T.shape[0] == 1
    for j in range(c):
        alpha[0, j] = u[0, j]
    for t in range(1, length):
        slot = t - 1 if keep and not shared else 0
        if t == 1 or not shared:
            peaks[slot, 0], peaks[slot, 1] = exponentials(
                T[0 if shared else t - 1], E[slot], total, spare
            )
        old, new = (t - 1) & 1, t & 1
        shift = relative(alpha[old], P[t - 1]) + peaks[slot, 0]
        sums_into(P[t - 1], E[slot], total)
        if not logs(total, alpha[old], peaks[slot, 1], shift, u[t], alpha[new]):
            return np.nan
    m = relative(alpha[(length - 1) & 1], P[length - 1])
    mass = 0.0
    for j in range(c):
        mass += P[length - 1, j]
    return m + math.log(mass)


@kernel
def values(low, high, U, TT, lengths, out, alpha, P, E, peaks, total, spare):
    """A of the items low..high; NaN where log space is needed."""
    for b in range(low, high):
        T = TT[b if TT.shape[0] > 1 else 0]
        out[b] = forward(U[b], T, lengths[b], alpha, P, E, peaks, total, spare, False)


@kernel(fast=True, inner=True)
def weigh(p, total, mu):
    """μ_i = p_i total_i / S and p becomes p / S, with S their sum, which is returned."""
    mass = p[0] * total[0]
    for i in range(1, p.shape[0]):
        mass += p[i] * total[i]
    for i in range(p.shape[0]):
        p[i] /= mass
        mu[i] = p[i] * total[i]
    return mass


@kernel(fast=True, inner=True)
def outer(p, E, r, out):
    """out_ij = p_i E_ij r_j."""
    for i in range(E.shape[0]):
        for j in range(E.shape[1]):
            out[i, j] = p[i] * E[i, j] * r[j]


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
        for t in range(start, min(start + 64, steps), 8):
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
def gradients(
    low, high, U, TT, lengths, out, MU, MT,
    alpha, P, E, peaks, total, spare, R, block, beta, after,
):  # fmt: skip
    """A and its gradient for the items low..high; A is NaN where log space is needed.

    MU and MT come in as zeros. Marginals are normalised at every position, so that rounding does
    not pile up along a chain.
    """
    c, steps = U.shape[2], MT.shape[1]
    for b in range(low, high):
        u, T, length = U[b], TT[b if TT.shape[0] > 1 else 0], lengths[b]
        out[b] = forward(u, T, length, alpha, P, E, peaks, total, spare, True)
        if not out[b] > -INF:
            continue
        for i in range(c):
            beta[i] = 0.0
            total[i] = 1
            if steps == 1 and length > 1:  # rows of the transpose are summed without reductions
                for j in range(c):
                    block[j, i] = E[0, i, j]
        weigh(P[length - 1], total, MU[b, length - 1])
        for t in range(length - 2, -1, -1):
            for j in range(c):
                after[j] = u[t + 1, j] + beta[j]
                spare[j] = 0
            m = relative(after, R[t])
            if steps == 1:
                sums_into(R[t], block, total)
            else:
                sums_from(E[t], R[t], total)
            slot = t if steps > 1 else 0
            right = logs(total, after, peaks[slot, 1], m + peaks[slot, 0], spare, beta)
            if not (right and weigh(P[t], total, MU[b, t]) >= TINY):
                out[b] = np.nan
                break
            if steps > 1:
                outer(P[t], E[t], R[t], MT[b, t])
        if steps == 1 and length > 1:
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


@kernel
def gradients_in_logs(items, U, TT, lengths, out, MU, MT):
    """The same for some items, term by term in log space: for any spread, and NaN stays NaN."""
    n, c = U.shape[1:]
    alpha, beta, after, scratch = np.empty((n, c)), np.empty(c), np.empty(c), np.empty(c)
    for b in items:
        u, T, length = U[b], TT[b if TT.shape[0] > 1 else 0], lengths[b]
        MU[b] = 0
        MT[b] = 0
        alpha[0] = u[0]
        for t in range(1, length):
            for j in range(c):
                for i in range(c):
                    scratch[i] = alpha[t - 1, i] + T[0 if T.shape[0] == 1 else t - 1, i, j]
                alpha[t, j] = u[t, j] + log_sum_exp(scratch)
        out[b] = log_sum_exp(alpha[length - 1])
        if out[b] == -INF:
            continue
        beta[:] = 0.0
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
                MU[b, t, i] = math.exp(alpha[t, i] + beta[i] - a)
                for j in range(c if t < length - 1 else 0):
                    edge = math.exp(alpha[t, i] + T[step, i, j] + after[j] - a)
                    MT[b, t if MT.shape[1] > 1 else 0, i, j] += edge


@kernel
def products(low, high, U, TT, lengths, VU, VT, WU, WT):
    """Hessian-vector products: the derivative of the marginals in direction (VU, VT).

    α̇ₜ(j) = u̇ₜ(j) + Σᵢ P(i | j)(α̇ₜ₋₁(i) + Ṫ(i, j)) and likewise β̇;
    μ̇ = μ·(α̇ + β̇ − Ȧ), and for an edge μ·(α̇(i) + Ṫ(i, j) + u̇(j) + β̇(j) − Ȧ). Only differences
    between tags matter, so α̇ and β̇ are centred at every step and stay small on long chains.
    """
    n, c = U.shape[1:]
    steps = WT.shape[1]
    alpha, d_alpha = np.empty((n, c)), np.empty((n, c))
    beta, d_beta, d_after = np.empty(c), np.empty(c), np.empty(c)
    scratch, after, mu = np.empty(c), np.empty(c), np.empty(c)
    E = np.empty((max(1, steps), c, c), U.dtype)
    p, total, spare = np.empty(c, U.dtype), np.empty(c, U.dtype), np.empty(c, U.dtype)
    q, peaks = np.empty((c, c), U.dtype), np.empty(max(1, steps))
    edge, summed = np.empty((c, c)), np.empty((c, c))
    for b in range(low, high):
        u, T, length = U[b], TT[b if TT.shape[0] > 1 else 0], lengths[b]
        du, dT = VU[b], VT[b if VT.shape[0] > 1 else 0]
        alpha[0] = u[0]
        d_alpha[0] = du[0]
        for t in range(1, length):
            step = 0 if T.shape[0] == 1 else t - 1
            if t == 1 or step > 0:
                peaks[step], _ = exponentials(T[step], E[step], total, spare)
            m = relative(alpha[t - 1], p)
            incoming(
                alpha[t - 1], p, m + peaks[step], T[step], E[step], total, scratch, alpha[t], q
            )
            alpha[t] += u[t]
            d_alpha[t] = du[t]
            for i in range(c):
                for j in range(c):
                    d_alpha[t, j] += q[i, j] * (d_alpha[t - 1, i] + dT[step, i, j])
            center(d_alpha[t])
        if log_sum_exp(alpha[length - 1]) == -INF:
            continue
        beta[:] = 0.0
        d_beta[:] = 0.0
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
def mean_change(q, d_edge, d_after):
    """Σ_j q_j (Ṫ_j + u̇_j + β̇_j)."""
    total = 0.0
    for j in range(q.shape[0]):
        total += q[j] * (d_edge[j] + d_after[j])
    return total


@kernel
def viterbi(low, high, U, TT, lengths, best, tags):
    """Best scores and tags of the items low..high; ties go to the first tag, NaN shows in best.

    Scores are kept relative to the best of each position; backpointers are found again on the way
    back, for the tags of the best path only.
    """
    n, c = U.shape[1:]
    a, new = np.empty((n, c), U.dtype), np.empty(c, U.dtype)
    for b in range(low, high):
        u, T, length = U[b], TT[b if TT.shape[0] > 1 else 0], lengths[b]
        used = 1 if T.shape[0] == 1 and length > 1 else length - 1
        shift = 0.0
        for t in range(length):
            if t == 0:
                new[:] = 0
            else:
                best_into(a[t - 1], T[0 if T.shape[0] == 1 else t - 1], new)
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
        if has_nan(u[:length]) or has_nan(T[:used].reshape(used * c, c)):
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
def has_nan(x):
    found = False
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            found |= x[i, j] != x[i, j]
    return found


def _array(tensor: Tensor) -> NDArray:
    """A contiguous array; a tensor that is one item expanded over the batch gives that item."""
    tensor = tensor.detach()
    if len(tensor) > 1 and tensor.stride(0) == 0:
        tensor = tensor[:1]
    return tensor.contiguous().numpy()


def _work(unary: Tensor) -> int:
    return unary.shape[1] * unary.shape[2] * unary.shape[2]


def _inputs(unary: Tensor, transition: Tensor, lengths: Tensor) -> tuple[NDArray, ...]:
    u = unary.detach().contiguous().numpy()
    T = _array(transition.to(unary.dtype))
    if T.shape[1] == 0:  # a single position has no steps
        T = np.zeros((1, 1, u.shape[2], u.shape[2]), u.dtype)
    return u, T, lengths.detach().to(torch.int64).contiguous().numpy()


def _forward_space(u: NDArray, steps: int) -> tuple[NDArray, ...]:
    """Room for α, P, E, peaks and two rows; kernels that allocate nothing compile sooner."""
    n, c = u.shape[1:]
    slots = max(1, steps)
    alpha, P, E = np.empty((2, c)), np.empty((n + 7, c), u.dtype), np.empty((slots, c, c), u.dtype)
    return alpha, P, E, np.empty((slots, 2)), np.empty(c, u.dtype), np.empty(c, u.dtype)


def value(unary: Tensor, transition: Tensor, lengths: Tensor) -> Tensor:
    """A ``(B)``."""
    out = unary.new_empty(len(unary))
    inputs, a = _inputs(unary, transition, lengths), out.numpy()

    def task(low: int, high: int) -> None:
        values(low, high, *inputs, a, *_forward_space(inputs[0], 1))

    run_chunks(task, len(unary), _work(unary))
    if np.isnan(a).any():
        mu, edges = (unary.new_empty(t.shape).numpy() for t in (unary, transition))
        _finish_in_logs(np.flatnonzero(np.isnan(a)), inputs, (a, mu, edges))
    return out


def gradient(unary: Tensor, transition: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A and its gradient in the unary and the transition scores (per item)."""
    inputs = _inputs(unary, transition, lengths)
    u, _, sizes = inputs
    # the kernel writes no padding; numpy's zeros, unlike torch's, wake no other threads
    new = np.empty if transition.shape[1] > 1 and (sizes == u.shape[1]).all() else np.zeros
    outputs = (np.empty(len(u), u.dtype), new(u.shape, u.dtype), new(transition.shape, u.dtype))

    def task(low: int, high: int) -> None:
        c, forward_space = u.shape[2], _forward_space(u, transition.shape[1])
        R, block = np.empty_like(forward_space[1]), np.empty((c, c), u.dtype)
        space = (*forward_space, R, block, np.empty(c), np.empty(c))
        gradients(low, high, *inputs, *outputs, *space)

    run_chunks(task, len(unary), 2 * _work(unary))
    left = ~(outputs[0] > -np.inf)
    if left.any():
        _finish_in_logs(np.flatnonzero(left), inputs, outputs)
    a, mu, edges = (torch.from_numpy(x) for x in outputs)
    return a, mu, edges


def _finish_in_logs(
    items: NDArray, inputs: tuple[NDArray, ...], outputs: tuple[NDArray, ...]
) -> None:
    def task(low: int, high: int) -> None:
        gradients_in_logs(items[low:high], *inputs, *outputs)

    n, c = inputs[0].shape[1:]
    run_chunks(task, len(items), 10 * n * c * c)


def hvp(
    unary: Tensor, transition: Tensor, v_unary: Tensor, v_transition: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """The Hessian of A times the direction (v_unary, v_transition)."""
    w, w_edges = unary.new_zeros(unary.shape), unary.new_zeros(transition.shape)
    u, T, sizes = _inputs(unary, transition, lengths)
    _, dT, _ = _inputs(unary, v_transition, lengths)
    du = v_unary.detach().contiguous().numpy()
    outputs = (w.numpy(), w_edges.numpy())

    def task(low: int, high: int) -> None:
        products(low, high, u, T, sizes, du, dT, *outputs)

    run_chunks(task, len(unary), 4 * _work(unary))
    return w, w_edges


def argmax(unary: Tensor, transition: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The best score ``(B)`` and its tags ``(B, n)``, −1 in the padding."""
    best = unary.new_empty(len(unary))
    tags = torch.empty(unary.shape[:2], dtype=torch.int64)
    inputs, outputs = _inputs(unary, transition, lengths), (best.numpy(), tags.numpy())
    run_chunks(lambda i, j: viterbi(i, j, *inputs, *outputs), len(unary), _work(unary))
    return best, tags
