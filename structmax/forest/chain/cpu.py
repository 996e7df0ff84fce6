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

from structmax.jit import exp, kernel, run_chunks

INF = math.inf
TINY = 1e-25  # far above the smallest float32, far below any sum that matters
STEEP = 40.0  # log of the largest factor by which an underflown product may be scaled up


@kernel(fast=True)
def exponentials(T, E, column):
    """E = exp(T − m) and m, the largest entry of T (0 if all are −inf)."""
    c = T.shape[0]
    column[:] = -INF
    for i in range(c):
        for j in range(c):
            column[j] = T[i, j] if T[i, j] > column[j] else column[j]
    m = column[0]
    for j in range(1, c):
        m = column[j] if column[j] > m else m
    m = m if m > -INF else m - m if m != m else column.dtype.type(0)
    for i in range(c):
        for j in range(c):
            E[i, j] = exp(T[i, j] - m)
    return float(m)


@kernel
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


@kernel
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


@kernel(fast=True)
def sums_into(p, E, total):
    """total_j = Σ_i p_i E_ij."""
    total[:] = 0
    for i in range(E.shape[0]):
        for j in range(E.shape[1]):
            total[j] += p[i] * E[i, j]


@kernel(fast=True)
def sum_along(E, i, p):
    """Σ_j E_ij p_j."""
    total = E[i, 0] * p[0]
    for j in range(1, E.shape[1]):
        total += E[i, j] * p[j]
    return total


@kernel
def forward(u, T, length, alpha, E, peaks, p, total, scratch, keep):
    """α of one item; E and the largest entries of T are kept for the way back if asked."""
    c, shared = u.shape[1], T.shape[0] == 1
    alpha[0] = u[0]
    for t in range(1, length):
        step = 0 if shared else t - 1
        slot = step if keep else 0
        if t == 1 or not shared:
            peaks[slot] = exponentials(T[step], E[slot], total)
        m = relative(alpha[t - 1], p)
        sums_into(p, E[slot], total)
        for j in range(c):
            if total[j] < TINY:
                for i in range(c):
                    scratch[i] = alpha[t - 1, i] + T[step, i, j]
                alpha[t, j] = u[t, j] + log_sum_exp(scratch)
            else:
                alpha[t, j] = u[t, j] + (m + peaks[slot] + math.log(total[j]))
    return log_sum_exp(alpha[length - 1])


@kernel
def position_marginals(alpha, beta, scratch, mu):
    """μ = softmax(α + β) in the dtype of mu, and its log-normaliser.

    Normalising at every position keeps rounding from piling up along a long chain.
    """
    c = alpha.shape[0]
    for i in range(c):
        scratch[i] = alpha[i] + beta[i]
    m = relative(scratch, scratch)
    total = 0.0
    for i in range(c):
        total += scratch[i]
    for i in range(c):
        mu[i] = scratch[i] / total
    return m + math.log(total)


@kernel
def step_back(u, T, t, beta, E, peak, p, scratch, after):
    """β at t from β at t + 1, in place; after = u + β at t + 1, p = exp(after − m). Returns m."""
    c = u.shape[1]
    for j in range(c):
        after[j] = u[t + 1, j] + beta[j]
    m = relative(after, p)
    for i in range(c):
        total = sum_along(E, i, p)
        if total < TINY:
            for j in range(c):
                scratch[j] = T[i, j] + after[j]
            beta[i] = log_sum_exp(scratch)
        else:
            beta[i] = m + peak + math.log(total)
    return m


@kernel(fast=True)
def outer(p, E, r, factor, out):
    """out = factor · p_i E_ij r_j."""
    for i in range(E.shape[0]):
        left = p[i] * factor
        for j in range(E.shape[1]):
            out[i, j] = left * E[i, j] * r[j]


@kernel
def values(low, high, U, TT, lengths, out):
    """A of the items low..high."""
    n, c = U.shape[1:]
    alpha, scratch, peaks = np.empty((n, c)), np.empty(c), np.empty(1)
    E, p, total = np.empty((1, c, c), U.dtype), np.empty(c, U.dtype), np.empty(c, U.dtype)
    for b in range(low, high):
        T = TT[b if TT.shape[0] > 1 else 0]
        out[b] = forward(U[b], T, lengths[b], alpha, E, peaks, p, total, scratch, False)


@kernel(fast=True)
def add_outer(p, r, factor, out):
    """out += factor · p_i r_j."""
    for i in range(out.shape[0]):
        left = p[i] * factor
        for j in range(out.shape[1]):
            out[i, j] += left * r[j]


@kernel
def gradients(low, high, U, TT, lengths, out, MU, MT):
    """A and its gradient for the items low..high."""
    n, c = U.shape[1:]
    steps = MT.shape[1]
    alpha, beta, scratch, after = np.empty((n, c)), np.empty(c), np.empty(c), np.empty(c)
    E, peaks = np.empty((max(1, steps), c, c), U.dtype), np.empty(max(1, steps))
    p, r, total = np.empty(c, U.dtype), np.empty(c, U.dtype), np.empty(c, U.dtype)
    summed, steep = np.empty((c, c)), np.empty((c, c))
    for b in range(low, high):
        u, T, length = U[b], TT[b if TT.shape[0] > 1 else 0], lengths[b]
        a = forward(u, T, length, alpha, E, peaks, p, total, scratch, True)
        out[b] = a
        if a == -INF:
            length = 0
        MU[b, length:] = 0
        MT[b, max(0, length - 1) if steps > 1 else 0 :] = 0
        if length == 0:
            continue
        beta[:] = 0.0
        summed[:] = 0.0
        steep[:] = 0.0
        position_marginals(alpha[length - 1], beta, scratch, MU[b, length - 1])
        for t in range(length - 2, -1, -1):
            step = 0 if T.shape[0] == 1 else t
            above = step_back(u, T[step], t, beta, E[step], peaks[step], r, scratch, after)
            a = position_marginals(alpha[t], beta, scratch, MU[b, t])
            below = relative(alpha[t], p)
            factor = below + peaks[step] + above - a
            if factor >= STEEP:
                for i in range(c):
                    for j in range(c):
                        mu = math.exp(alpha[t, i] + T[step, i, j] + after[j] - a)
                        if steps == 1:
                            steep[i, j] += mu
                        else:
                            MT[b, t, i, j] = mu
            elif steps == 1:
                add_outer(p, r, math.exp(factor), summed)
            else:
                outer(p, E[t], r, U.dtype.type(math.exp(factor)), MT[b, t])
        if steps == 1 and length > 1:
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
    p, total = np.empty(c, U.dtype), np.empty(c, U.dtype)
    q = np.empty((c, c), U.dtype)
    for b in range(low, high):
        u, T, length = U[b], TT[b if TT.shape[0] > 1 else 0], lengths[b]
        du, dT = VU[b], VT[b if VT.shape[0] > 1 else 0]
        a = forward(u, T, length, alpha, E, peaks, p, total, scratch, True)
        if a == -INF:
            continue
        d_alpha[0] = du[0]
        for t in range(1, length):
            step = 0 if T.shape[0] == 1 else t - 1
            relative(alpha[t - 1], p)
            incoming(alpha[t - 1], p, T[step], E[step], total, scratch, q)
            d_alpha[t] = du[t]
            for i in range(c):
                for j in range(c):
                    d_alpha[t, j] += q[i, j] * (d_alpha[t - 1, i] + dT[step, i, j])
        beta[:] = 0.0
        d_beta[:] = 0.0
        for t in range(length - 1, -1, -1):
            if t < length - 1:
                step = 0 if T.shape[0] == 1 else t
                step_back(u, T[step], t, beta, E[step], peaks[step], p, scratch, after)
                outgoing(after, p, T[step], E[step], scratch, q)
                for j in range(c):
                    d_after[j] = du[t + 1, j] + d_beta[j]
                for i in range(c):
                    d_beta[i] = mean_change(q[i], dT[step, i], d_after)
            position_marginals(alpha[t], beta, scratch, mu)
            mean = 0.0
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


@kernel
def incoming(alpha, p, T, E, total, scratch, q):
    """q_ij = P(i | j) ∝ exp(α_i + T_ij); zeros if j cannot be reached."""
    c = E.shape[0]
    sums_into(p, E, total)
    for i in range(c):
        for j in range(c):
            q[i, j] = p[i] * E[i, j] / total[j]
    for j in range(c):
        if total[j] < TINY:
            for i in range(c):
                scratch[i] = alpha[i] + T[i, j]
            a = log_sum_exp(scratch)
            for i in range(c):
                q[i, j] = math.exp(scratch[i] - a) if a != -INF else 0.0


@kernel
def outgoing(after, p, T, E, scratch, q):
    """q_ij = P(j | i) ∝ exp(T_ij + after_j); zeros if nothing can follow i."""
    c = E.shape[0]
    for i in range(c):
        total = sum_along(E, i, p)
        if total < TINY:
            for j in range(c):
                scratch[j] = T[i, j] + after[j]
            a = log_sum_exp(scratch)
            for j in range(c):
                q[i, j] = math.exp(scratch[j] - a) if a != -INF else 0.0
        else:
            for j in range(c):
                q[i, j] = E[i, j] * p[j] / total


@kernel(fast=True)
def mean_change(q, d_edge, d_after):
    """Σ_j q_j (Ṫ_j + u̇_j + β̇_j)."""
    total = 0.0
    for j in range(q.shape[0]):
        total += q[j] * (d_edge[j] + d_after[j])
    return total


@kernel
def viterbi(low, high, U, TT, lengths, best, tags):
    """Best scores and tags of the items low..high; ties go to the first tag. NaN shows in best."""
    n, c = U.shape[1:]
    a, new, back = np.empty(c), np.empty(c), np.empty((n, c), np.int32)
    for b in range(low, high):
        u, T, length = U[b], TT[b if TT.shape[0] > 1 else 0], lengths[b]
        for j in range(c):
            a[j] = u[0, j]
        for t in range(1, length):
            step = 0 if T.shape[0] == 1 else t - 1
            best_of(a, T[step], new, back[t])
            for j in range(c):
                a[j] = u[t, j] + new[j]
        top, tag = -INF, 0
        for j in range(c):
            if a[j] > top or a[j] != a[j]:
                top, tag = a[j], j
        best[b] = top
        for t in range(n - 1, -1, -1):
            tags[b, t] = tag if t < length else -1
            if 0 < t < length:
                tag = back[t, tag]


@kernel
def best_of(a, T, best, back):
    """max_i a_i + T_ij and the first i that attains it; NaN wins and stays."""
    c = T.shape[0]
    for j in range(c):
        best[j] = -INF
        back[j] = 0
    for i in range(c):
        for j in range(c):
            x = a[i] + T[i, j]
            better = (x > best[j]) | (x != x)
            best[j] = x if better else best[j]
            back[j] = i if better else back[j]


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
