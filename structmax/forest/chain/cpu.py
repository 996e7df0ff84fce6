"""The dense chain on the CPU, compiled by numba: forward-backward with matrix-vector steps.

A step works in exp space: with p = exp(α − max α) and E = exp(T − max T), the new sums are pᵀE, so
the exponential of a transition is taken once and serves both directions. α and β stay in log space
and float64, whatever the scores. A sum so small that underflow may have bitten it (``TINY``) is
computed again in log space, term by term, so no spread of scores is too large.

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


@kernel(fast=True, inner=True)
def exponentials(T, E, column):
    """E = exp(T − m) and m, the largest entry of T (0 if all are −inf)."""
    c = T.shape[0]
    for j in range(c):
        column[j] = -INF
    for i in range(c):
        for j in range(c):
            column[j] = T[i, j] if T[i, j] > column[j] else column[j]
    m = column[0]
    for j in range(1, c):
        m = column[j] if column[j] > m else m
    m = m if m > -INF else column.dtype.type(0)
    for i in range(c):
        for j in range(c):
            E[i, j] = exp(T[i, j] - m)
    return np.float64(m)


@kernel(inner=True)
def relative(x, out):
    """out = exp(x − m) in the dtype of out, and m, the largest of x (0 if all are −inf)."""
    m = -INF
    for i in range(x.shape[0]):
        m = x[i] if x[i] > m else m
    m = m if m > -INF else 0.0
    for i in range(x.shape[0]):
        out[i] = x[i] - m
    for i in range(x.shape[0]):
        out[i] = exp(out[i])
    return m


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
def fill(x, value):
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[i, j] = value


@kernel(inner=True)
def all_safe(total):
    """Whether every sum is a number that underflow cannot have changed."""
    safe = True
    for j in range(total.shape[0]):
        safe &= total[j] >= TINY
    return safe


@kernel(inner=True)
def logs(total, shift, add, out):
    """out = add + shift + log total, for safe totals."""
    for j in range(total.shape[0]):
        out[j] = add[j] + (shift + log(np.float64(total[j])))


@kernel(inner=True)
def forward(u, T, length, alpha, P, E, peaks, total, scratch, keep):
    """α of one item, P = exp(α − max α); every E is kept for the way back if asked."""
    c, shared = u.shape[1], T.shape[0] == 1
    for j in range(c):
        alpha[0, j] = u[0, j]
    for t in range(1, length):
        step = 0 if shared else t - 1
        slot = step if keep else 0
        if t == 1 or not shared:
            peaks[slot] = exponentials(T[step], E[slot], total)
        m = relative(alpha[t - 1], P[t - 1])
        sums_into(P[t - 1], E[slot], total)
        if all_safe(total):
            logs(total, m + peaks[slot], u[t], alpha[t])
        else:
            for j in range(c):
                for i in range(c):
                    scratch[i] = alpha[t - 1, i] + T[step, i, j]
                alpha[t, j] = u[t, j] + log_sum_exp(scratch)
    relative(alpha[length - 1], P[length - 1])
    return log_sum_exp(alpha[length - 1])


@kernel
def values(low, high, U, TT, lengths, out):
    """A of the items low..high."""
    n, c = U.shape[1:]
    alpha, scratch, peaks = np.empty((n, c)), np.empty(c), np.empty(1)
    P, E, total = np.empty((n, c), U.dtype), np.empty((1, c, c), U.dtype), np.empty(c, U.dtype)
    for b in range(low, high):
        T = TT[b if TT.shape[0] > 1 else 0]
        out[b] = forward(U[b], T, lengths[b], alpha, P, E, peaks, total, scratch, False)


@kernel(fast=True, inner=True)
def weigh(p, total, mu):
    """μ_i = p_i total_i / S; p becomes p / S. Nothing is written unless S is safe; returns S."""
    mass = p[0] * total[0]
    for i in range(1, p.shape[0]):
        mass += p[i] * total[i]
    if mass >= TINY:
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
def sum_of_outer(P, R, steps, block, out):
    """out_ij = Σ_t P_ti R_tj, four steps at a time, in blocks that are short enough for float32."""
    c = out.shape[0]
    fill(out, 0)
    for start in range(0, steps, 64):
        fill(block, 0)
        stop = min(start + 64, steps)
        whole = start + (stop - start) // 4 * 4
        for t in range(start, whole, 4):
            for i in range(c):
                p0, p1, p2, p3 = P[t, i], P[t + 1, i], P[t + 2, i], P[t + 3, i]
                for j in range(c):
                    block[i, j] += (p0 * R[t, j] + p1 * R[t + 1, j]) + (
                        p2 * R[t + 2, j] + p3 * R[t + 3, j]
                    )
        for t in range(whole, stop):
            for i in range(c):
                for j in range(c):
                    block[i, j] += P[t, i] * R[t, j]
        for i in range(c):
            for j in range(c):
                out[i, j] += block[i, j]


@kernel(inner=True)
def step_in_logs(alpha, T, after, beta, scratch, mu, edges):
    """One step back in log space: β, then μ of the position and, added to edges, of its edges."""
    c = T.shape[0]
    for i in range(c):
        for j in range(c):
            scratch[j] = T[i, j] + after[j]
        beta[i] = log_sum_exp(scratch)
    for i in range(c):
        scratch[i] = alpha[i] + beta[i]
    a = log_sum_exp(scratch)
    for i in range(c):
        mu[i] = math.exp(alpha[i] + beta[i] - a)
        for j in range(c):
            edges[i, j] += math.exp(alpha[i] + T[i, j] + after[j] - a)


@kernel
def gradients(low, high, U, TT, lengths, out, MU, MT):
    """A and its gradient for the items low..high.

    Marginals are normalised at every position, so that rounding does not pile up along a chain.
    """
    n, c = U.shape[1:]
    steps = MT.shape[1]
    alpha, beta, after = np.empty((n, c)), np.empty(c), np.empty(c)
    scratch, zero = np.empty(c), np.empty(c)
    E, peaks = np.empty((max(1, steps), c, c), U.dtype), np.empty(max(1, steps))
    P, R, total = np.empty((n, c), U.dtype), np.empty((n, c), U.dtype), np.empty(c, U.dtype)
    block, summed, steep = np.empty((c, c), U.dtype), np.empty((c, c)), np.empty((c, c))
    for b in range(low, high):
        u, T, length = U[b], TT[b if TT.shape[0] > 1 else 0], lengths[b]
        out[b] = forward(u, T, length, alpha, P, E, peaks, total, scratch, True)
        if out[b] == -INF:
            length = 0
        fill(MU[b, length:], 0)
        for t in range(max(0, length - 1) if steps > 1 else 0, steps):
            fill(MT[b, t], 0)
        if length == 0:
            continue
        fill(steep, 0)
        for j in range(c):
            beta[j] = zero[j] = 0.0
            total[j] = 1
        weigh(P[length - 1], total, MU[b, length - 1])
        for t in range(length - 2, -1, -1):
            step = 0 if T.shape[0] == 1 else t
            for j in range(c):
                after[j] = u[t + 1, j] + beta[j]
            m = relative(after, R[t])
            sums_from(E[step], R[t], total)
            if all_safe(total) and weigh(P[t], total, MU[b, t]) >= TINY:
                logs(total, m + peaks[step], zero, beta)
                if steps > 1:
                    outer(P[t], E[t], R[t], MT[b, t])
            else:
                fill(P[t : t + 1], 0)
                if steps > 1:
                    fill(MT[b, t], 0)
                    step_in_logs(alpha[t], T[step], after, beta, scratch, MU[b, t], MT[b, t])
                else:
                    step_in_logs(alpha[t], T[step], after, beta, scratch, MU[b, t], steep)
        if out[b] != out[b]:
            fill(MU[b, :length], np.nan)
        if steps == 1 and length > 1:
            sum_of_outer(P, R, length - 1, block, summed)
            for i in range(c):
                for j in range(c):
                    MT[b, 0, i, j] = summed[i, j] * E[0, i, j] + steep[i, j]


@kernel
def products(low, high, U, TT, lengths, VU, VT, WU, WT):
    """Hessian-vector products: the derivative of the marginals in direction (VU, VT).

    α̇ₜ(j) = u̇ₜ(j) + Σᵢ P(i | j)(α̇ₜ₋₁(i) + Ṫ(i, j)) and likewise β̇;
    μ̇ = μ·(α̇ + β̇ − Ȧ), and for an edge μ·(α̇(i) + Ṫ(i, j) + u̇(j) + β̇(j) − Ȧ).
    """
    n, c = U.shape[1:]
    steps = WT.shape[1]
    alpha, d_alpha = np.empty((n, c)), np.empty((n, c))
    beta, d_beta, d_after = np.empty(c), np.empty(c), np.empty(c)
    scratch, after, mu = np.empty(c), np.empty(c), np.empty(c)
    E, peaks = np.empty((max(1, steps), c, c), U.dtype), np.empty(max(1, steps))
    P, p, total = np.empty((n, c), U.dtype), np.empty(c, U.dtype), np.empty(c, U.dtype)
    q = np.empty((c, c), U.dtype)
    for b in range(low, high):
        u, T, length = U[b], TT[b if TT.shape[0] > 1 else 0], lengths[b]
        du, dT = VU[b], VT[b if VT.shape[0] > 1 else 0]
        a = forward(u, T, length, alpha, P, E, peaks, total, scratch, True)
        if a == -INF:
            continue
        d_alpha[0] = du[0]
        for t in range(1, length):
            step = 0 if T.shape[0] == 1 else t - 1
            incoming(alpha[t - 1], P[t - 1], T[step], E[step], total, scratch, q)
            d_alpha[t] = du[t]
            for i in range(c):
                for j in range(c):
                    d_alpha[t, j] += q[i, j] * (d_alpha[t - 1, i] + dT[step, i, j])
        beta[:] = 0.0
        d_beta[:] = 0.0
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
                target = WT[b, t if steps > 1 else 0]
                for i in range(c):
                    for j in range(c):
                        change = d_alpha[t, i] + dT[step, i, j] + d_after[j] - mean
                        target[i, j] += mu[i] * q[i, j] * change


@kernel(inner=True)
def incoming(alpha, p, T, E, total, scratch, q):
    """q_ij = P(i | j) ∝ exp(α_i + T_ij); zeros if j cannot be reached."""
    c = E.shape[0]
    sums_into(p, E, total)
    for i in range(c):
        for j in range(c):
            q[i, j] = p[i] * E[i, j] / total[j]
    for j in range(c):
        if not total[j] >= TINY:
            for i in range(c):
                scratch[i] = alpha[i] + T[i, j]
            a = log_sum_exp(scratch)
            for i in range(c):
                q[i, j] = math.exp(scratch[i] - a) if a != -INF else 0.0


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


def value(unary: Tensor, transition: Tensor, lengths: Tensor) -> Tensor:
    """A ``(B)``."""
    out = unary.new_empty(len(unary))
    inputs, a = _inputs(unary, transition, lengths), out.numpy()
    run_chunks(lambda i, j: values(i, j, *inputs, a), len(unary), _work(unary))
    return out


def gradient(unary: Tensor, transition: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A and its gradient in the unary and the transition scores (per item)."""
    out, mu = unary.new_empty(len(unary)), unary.new_empty(unary.shape)
    edges = unary.new_empty(transition.shape)
    inputs = _inputs(unary, transition, lengths)
    outputs = (out.numpy(), mu.numpy(), edges.numpy())
    run_chunks(lambda i, j: gradients(i, j, *inputs, *outputs), len(unary), 2 * _work(unary))
    return out, mu, edges


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
