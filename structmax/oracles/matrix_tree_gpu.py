"""The Matrix-Tree theorem on the GPU: value and gradient, one program per item, one launch.

Words are removed from the last to the first, as ``matrix_tree_cpu`` says, without a subtraction:
``W[u, i]`` is the weight of head u for word i, in a buffer that caches hold. Going back,
``G[u, i] = ∂ log Z / ∂W[u, i]`` follows by reverse differentiation,

    forwards    P[u] = W[u, k] / S,    S = Σ W[u, k],    W[u, i] += P[u]·W[k, i]
    backwards   G[k, i] = Σ P[u]·G[u, i],    g[u] = Σ W[k, i]·G[u, i],
                G[u, k] = (g[u] + 1 − Σ g[v]·P[v]) / S.

This subtracts once, from 1, so marginals W·G have an absolute accuracy of some 1e-15 at any spread;
small ones are not relatively as exact as on the CPU. Numbers are kept as they are while their range
is safe, else as logarithms (``LOGS``); each item decides for itself, and nothing waits for the
host. For a single root, W[0, i] is of order ``late[i]`` in ε, and only leading terms are kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from structmax.launch import quick

NOTHING = tl.constexpr(-float("inf"))


@triton.jit
def _plus(x, y, LOGS: tl.constexpr):
    if LOGS:
        high = tl.maximum(x, y)
        safe = tl.where(high == NOTHING, 0.0, high)
        return high + tl.log(1.0 + tl.exp(tl.minimum(x, y) - safe))
    return x + y


@triton.jit
def _plus_number(x, y, LOGS: tl.constexpr):
    """The sum with a number that is no logarithm, and may be negative; at least 0."""
    if LOGS:
        size = tl.abs(y)
        high = tl.maximum(x, tl.log(size))
        safe = tl.where(high == NOTHING, 0.0, high)
        mass = tl.exp(x - safe) + tl.where(y < 0, -1.0, 1.0) * tl.exp(tl.log(size) - safe)
        return safe + tl.log(tl.maximum(mass, 0.0))
    return tl.maximum(x + y, 0.0)


@triton.jit
def _sum(x, axis: tl.constexpr, LOGS: tl.constexpr):
    if LOGS:
        high = tl.max(x, axis, keep_dims=True)
        safe = tl.where(high == NOTHING, 0.0, high)
        total = tl.log(tl.sum(tl.exp(x - safe), axis, keep_dims=True))
        return tl.max(safe + total, axis)
    return tl.sum(x, axis)


@triton.jit
def _times(x, y, LOGS: tl.constexpr):
    return x + y if LOGS else x * y


@triton.jit
def _over(x, y, LOGS: tl.constexpr):
    return x - y if LOGS else x / y


@triton.jit
def _remove(
    W, notes, n, SINGLE: tl.constexpr, N: tl.constexpr, R: tl.constexpr, LOGS: tl.constexpr
):
    """log Z of scaled weights, −inf if there is no tree. Row and column k stay as they were used.

    ``notes[k]`` holds S and whether the root's arc waits (is of order 1 in ε), and then for each
    word which root arc was kept: 1 the one it had, 2 the one it got from k, 3 both.
    """
    zero = NOTHING if LOGS else 0.0
    one = 0.0 if LOGS else 1.0
    word = tl.arange(0, N)
    late = (word < N).to(tl.int32) if SINGLE else (word < 0).to(tl.int32)
    total = tl.full((), 0.0, tl.float64)
    roots = 0
    for back in range(0, n):
        k = n - back
        of = tl.load(W + word * N + k, mask=word < k, other=zero)
        by = tl.load(W + k * N + word, mask=(word > 0) & (word < k), other=zero)
        root = tl.load(W + k)
        pivot = _sum(tl.where(word > 0, of, zero), 0, LOGS)
        waits = tl.max(tl.where(word == k, late, 0), 0)
        forced = ((waits > 0) & (pivot == zero)).to(tl.int32)
        waits -= forced
        pivot = tl.where(waits > 0, pivot, _plus(pivot, root, LOGS))
        roots += forced
        total += pivot if LOGS else tl.log(pivot)
        pivot = tl.where(pivot == zero, one, pivot)
        kept = tl.full((N,), 3, tl.int32)
        if SINGLE:
            had = tl.load(W + word)
            later = tl.where(had == zero, waits, tl.minimum(late, waits))
            nothing = _times(by, root, LOGS) == zero
            later = tl.where(nothing, late, later)
            kept = (late == later).to(tl.int32) + 2 * (waits == later).to(tl.int32)
            late = later
            tl.debug_barrier()
        for start in range(0, k, R):
            row = start + tl.arange(0, R)
            u, i = row[:, None], word[None, :]
            inside = (u < k) & (i > 0) & (i < k) & (u != i)
            share = _over(tl.load(W + row * N + k, mask=row < k, other=zero), pivot, LOGS)
            old = tl.load(W + u * N + i, mask=inside, other=zero)
            new = _times(share[:, None], by[None, :], LOGS)
            if SINGLE:
                old = tl.where((u == 0) & ((kept & 1) == 0)[None, :], zero, old)
                new = tl.where((u == 0) & (kept < 2)[None, :], zero, new)
            tl.store(W + u * N + i, _plus(old, new, LOGS), mask=inside)
        tl.store(notes + k * 2 * N + word, tl.where(word == 0, pivot, waits.to(tl.float64)))
        tl.store(notes + k * 2 * N + N + word, kept.to(tl.float64))
        tl.debug_barrier()
    if SINGLE:
        total = tl.where(roots > 1, NOTHING, total)
    return total


@triton.jit
def _restore(
    W, G, notes, n, SINGLE: tl.constexpr, N: tl.constexpr, R: tl.constexpr, LOGS: tl.constexpr
):
    """G, word by word in the order opposite to their removal."""
    zero = NOTHING if LOGS else 0.0
    word = tl.arange(0, N)
    for k in range(1, n + 1):
        pivot = tl.load(notes + k * 2 * N)
        waits = tl.load(notes + k * 2 * N + 1).to(tl.int32)
        kept = tl.load(notes + k * 2 * N + N + word).to(tl.int32)
        by = tl.load(W + k * N + word, mask=(word > 0) & (word < k), other=zero)
        up = tl.full((N,), zero, tl.float64)
        for start in range(0, k, R):
            row = start + tl.arange(0, R)
            u, i = row[:, None], word[None, :]
            share = _over(tl.load(W + row * N + k, mask=row < k, other=zero), pivot, LOGS)
            inside = (u < k) & (i > 0) & (i < k) & (u != i)
            through = tl.load(G + u * N + i, mask=inside, other=zero)
            if SINGLE:
                through = tl.where((u == 0) & (kept < 2)[None, :], zero, through)
            up = _plus(up, _sum(_times(through, share[:, None], LOGS), 0, LOGS), LOGS)
            g = _sum(_times(through, by[None, :], LOGS), 1, LOGS)
            tl.store(G + row * N + k, g, mask=row < k)
        tl.debug_barrier()
        g = tl.load(G + word * N + k, mask=word < k, other=zero)
        share = _over(tl.load(W + word * N + k, mask=word < k, other=zero), pivot, LOGS)
        used = _times(g, share, LOGS)
        rest = 1.0 - tl.sum(tl.exp(used) if LOGS else used, 0)
        rest = tl.where((word == 0) & (waits > 0), 0.0, rest)  # S is without the root's then
        g = _over(_plus_number(g, rest, LOGS), pivot, LOGS)
        tl.debug_barrier()
        tl.store(G + word * N + k, g, mask=word < k)
        tl.store(G + k * N + word, up, mask=(word > 0) & (word < k))
        if SINGLE:
            gone = (word > 0) & (word < k) & ((kept & 1) == 0)
            tl.store(G + word, tl.full((N,), zero, tl.float64), mask=gone)
        tl.debug_barrier()


@triton.jit
def _arcs(scores, sh, sm, row, word, n, gamma):
    """Scores of some heads, ``(R, N)``, −inf where there is no arc."""
    u, i = row[:, None], word[None, :]
    used = (i > 0) & (i <= n) & (u <= n) & (i != u)
    return tl.load(scores + u * sh + i * sm, mask=used, other=NOTHING).to(tl.float64) / gamma, used


@quick
@triton.jit(do_not_specialize=["sb", "sh", "sm", "sl", "s"])
def tree_sums(
    scores, sb, sh, sm, lengths, sl, gamma: tl.float64, A, mu, room, s,
    SINGLE: tl.constexpr, DOWN: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """A of an item and, with ``DOWN``, the probabilities of its arcs."""
    b = tl.program_id(0).to(tl.int64)
    scores += b * sb
    W = room + b * 4 * N * N
    G = W + N * N
    notes = G + N * N
    n = tl.maximum(tl.minimum(tl.load(lengths + b * sl), s - 1), 0).to(tl.int32)
    word = tl.arange(0, N)
    inside = (word > 0) & (word <= n)
    # scaled as on the CPU: by what all heads of a word share, and all arcs of a single root
    root = tl.load(scores + word * sm, mask=inside, other=NOTHING).to(tl.float64) / gamma
    top = tl.full((N,), NOTHING, tl.float64)
    low = tl.full((N,), float("inf"), tl.float64)
    wrong = (~(root < float("inf"))).to(tl.int32)
    gaps = (inside & (root == NOTHING)).to(tl.int32)
    for start in range(1, n + 1, R):
        x, used = _arcs(scores, sh, sm, start + tl.arange(0, R), word, n, gamma)
        wrong = tl.maximum(wrong, tl.max((~(x < float("inf"))).to(tl.int32), 0))
        gaps = tl.maximum(gaps, tl.max((used & (x == NOTHING)).to(tl.int32), 0))
        top = tl.maximum(top, tl.max(x, 0))
        low = tl.minimum(low, tl.min(tl.where(x == NOTHING, float("inf"), x), 0))
    scale = tl.full((), 0.0, tl.float64)
    if SINGLE:
        scale = tl.max(root, 0)
        scale = tl.where(tl.abs(scale) < float("inf"), scale, 0.0)
        root -= scale
        top = tl.where(top == NOTHING, root, top)
    else:
        top = tl.maximum(top, root)
    missing = tl.max((inside & (top == NOTHING)).to(tl.int32), 0)
    top = tl.where(inside & (top > NOTHING), top, 0.0)
    scale += tl.sum(top, 0)
    root -= top
    if SINGLE:
        best = tl.max(root, 0)
        best = tl.where(best == NOTHING, 0.0, best)
        root -= best
        scale += best
    least = tl.minimum(low - top, tl.where(root == NOTHING, 0.0, root))
    least = tl.min(tl.where(inside, least, 0.0), 0)
    many = tl.maximum(n, 1).to(tl.float64)
    limit = tl.where(tl.max(gaps, 0) > 0, 300.0 / many - tl.log(many), 150.0)
    logs = (-least > limit).to(tl.int32)
    total = tl.full((), float("nan"), tl.float64)
    bad = tl.max(wrong, 0)
    if bad == 0:
        for start in range(0, n + 1, R):
            row = start + tl.arange(0, R)
            x, used = _arcs(scores, sh, sm, row, word, n, gamma)
            x = tl.where((row == 0)[:, None], root[None, :], x - top[None, :])
            if logs == 0:
                x = tl.exp(x)
            tl.store(W + row[:, None] * N + word[None, :], x, mask=(row < N)[:, None])
        tl.debug_barrier()
        if logs > 0:
            total = _remove(W, notes, n, SINGLE, N, R, True)
            if DOWN:
                _restore(W, G, notes, n, SINGLE, N, R, True)
        else:
            total = _remove(W, notes, n, SINGLE, N, R, False)
            if DOWN:
                _restore(W, G, notes, n, SINGLE, N, R, False)
        total = tl.where(missing > 0, NOTHING, total + scale)
    tl.store(A + b, (gamma * total).to(A.dtype.element_ty))
    if DOWN:
        exists = (total != NOTHING).to(tl.int32)
        for start in range(0, s, R):
            row = start + tl.arange(0, R)
            u, i = row[:, None], word[None, :]
            x, used = _arcs(scores, sh, sm, row, word, n, gamma)
            x = tl.where(u == 0, root[None, :], x - top[None, :])
            there = used & (x != NOTHING) & (exists > 0)
            slope = tl.load(G + u * N + i, mask=there, other=0.0)
            if logs == 0:
                slope = tl.log(slope)
            chance = tl.where(there, tl.exp(x + slope), 0.0)
            chance = tl.where(used & (bad > 0), float("nan"), chance)
            at = mu + b * s * s + u * s + i
            tl.store(at, chance.to(mu.dtype.element_ty), mask=(u < s) & (i < s))


def run(down: bool, theta: Tensor, lengths: Tensor, single: bool, gamma: float) -> list[Tensor]:
    """A ``(B)`` and, with ``down``, the probabilities of arcs ``(B, s, s)``."""
    items, s, _ = theta.shape
    N = max(triton.next_power_of_2(s), 16)
    warps = min(N * N // 256, 16)
    A, mu = theta.new_empty(items), theta.new_empty(items if down else 0, s, s)
    room = torch.empty(items, 4, N, N, dtype=torch.float64, device=theta.device)
    if items:
        tree_sums[(items,)](
            theta, *theta.stride(), lengths, lengths.stride(0), gamma, A, mu, room, s,
            SINGLE=single, DOWN=down, N=N, R=min(N, 256 * warps // N),
            num_warps=warps,
        )  # fmt: skip
    return [A, mu] if down else [A]
