"""Long chains on the GPU: pieces of ``SIZE`` steps, which many programs walk at once.

The kernels of ``gpu`` take n steps one after the other, which a few long items leave most of a GPU
idle for. Here a piece of steps first becomes one step: the matrix of the log-sums over all tags
between its first and its last position. These few are walked as a chain is; then α and β are known
where pieces meet, and all pieces fill in their marginals at the same time::

    _shorten    |──────|──────|──────|──────|      a matrix for each piece
    _walk       α ────►α ────►α ────►α ────►  A    and β from the other side
    _fill       |◄────►|◄────►|◄────►|◄────►|      marginals

Numbers. A matrix is the product of its steps, c³ multiplications each, of numbers between 0 and 1
whose rows are scaled by powers of two. The smallest of them that are not 0 are watched: where one
is so small that a product could be lost, that piece is computed again by log-sums, more slowly. So
−inf costs nothing, and no term that matters underflows. Scores are float32, transitions may be of
half precision; products are of TF32 parts, three for each, as accurate as float32.

Letters as in ``gpu``; K pieces.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from structmax.forest.chain.gpu import (
    LN2,
    _bits_row,
    _bits_tile,
    _finite,
    _log2,
    _log_sum,
    _options,
    _row,
    _scores,
    _scratch_row,
    _softmax,
    _store_row,
    _store_tile,
    _tile,
    argmax,
    hvp,
    less_tags,
)
from structmax.launch import quick

__all__ = ["argmax", "gradient", "hvp", "less_tags", "suits", "value"]

SIZE = 64  # steps in a piece
LONG = 512  # positions from which on pieces pay, measured on an H200 as the next two are
MAX_TAGS = 32  # a matrix costs c times as much as a step,
MOST = 4096  # so batch · c of what leaves a GPU idle otherwise
LEAST = tl.constexpr(2.0**-50)  # two factors above it have a product with all its digits


def suits(unary: Tensor) -> bool:
    """Whether the chains are long, few and of few tags."""
    batch, n, c = unary.shape[:-2].numel(), *unary.shape[-2:]
    few = c <= MAX_TAGS and batch * c <= MOST
    return n >= LONG and few and unary.dtype == torch.float32


# ------------------------------------------------------------------------------------- kernels


@triton.jit
def _exponent(x):
    """⌊log₂ x⌋ of a positive float32, as one; anything for 0."""
    return ((x.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.float32)


@triton.jit
def _step(
    U, us, T, ts, b, t, c, shared, peak, C: tl.constexpr, EVEN: tl.constexpr, SHARED: tl.constexpr
):
    """Step t with the unary scores of its end, in units of log 2, ≤ 0; and what was subtracted."""
    if SHARED:
        tile = shared
    else:
        tile, peak = _bits_tile(_tile(T, ts, b, t, c, C, EVEN))
    u, unary_peak = _bits_row(_row(U, us, b, t + 1, c, C))
    return tile + tl.expand_dims(u, 0), peak.to(tl.float64) + unary_peak


@triton.jit
def _by_log_sums(
    U, us, T, ts, b, first, end, c, shared, peak,
    C: tl.constexpr, EVEN: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """The matrix of the steps from ``first`` to ``end`` by log-sums; rows lack what comes with it,
    whole numbers."""
    j = tl.arange(0, C)[None, :]
    x, _ = _step(U, us, T, ts, b, first, c, shared, peak, C, EVEN, SHARED)
    scale = tl.zeros((C,), tl.float32)
    for k in range(1, (end - first).to(tl.int32)):
        step, _ = _step(U, us, T, ts, b, first + k, c, shared, peak, C, EVEN, SHARED)
        after = tl.full((C, C), float("-inf"), tl.float32)
        for i in range(c):
            left = tl.max(tl.where(j == i, x, float("-inf")), 1)
            right = tl.max(tl.where(tl.trans(j) == i, step, float("-inf")), 0)
            y = tl.expand_dims(left, 1) + tl.expand_dims(right, 0)
            top = _finite(tl.maximum(after, y))
            after = top + _log2(tl.exp2(after - top) + tl.exp2(y - top))
        top = tl.floor(_finite(tl.max(after, 1)))
        x = after - tl.expand_dims(top, 1)
        scale += top
    return x, scale


@quick
@triton.jit
def _shorten(
    U, us, T, ts, L, ls, G, P, c, size, pieces,
    C: tl.constexpr, EVEN: tl.constexpr, SHARED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """G ``(B, K, c, c)``, the matrix of a piece in units of log 2, and P ``(B, K)``, what has to be
    added to it; nothing where an item has no such piece."""
    b = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1).to(tl.int64)
    last = tl.load(L + b * ls).to(tl.int64) - 1
    first = piece * size
    end = tl.minimum(first + size, last)
    shared, peak = tl.zeros((C, C), tl.float32), 0.0
    if SHARED:
        shared, peak = _bits_tile(_tile(T, ts, b, 0, c, C, EVEN))
    if first < last:
        step, offset = _step(U, us, T, ts, b, first, c, shared, peak, C, EVEN, SHARED)
        x = tl.exp2(step)
        scale = tl.zeros((C,), tl.float32)
        least = tl.min(tl.min(tl.where(step > float("-inf"), x, 1.0), 1), 0)
        for k in tl.range(1, (end - first).to(tl.int32), num_stages=STAGES):
            step, more = _step(U, us, T, ts, b, first + k, c, shared, peak, C, EVEN, SHARED)
            offset += more
            w = tl.exp2(step)
            x = tl.dot(x, w, input_precision="tf32x3")
            top = tl.max(x, 1)
            power = tl.where(top > 0, _exponent(top), 0.0)
            x *= tl.expand_dims(tl.exp2(-power), 1)
            scale += power
            smallest = tl.minimum(tl.where(step > float("-inf"), w, 1.0), tl.where(x > 0, x, 1.0))
            least = tl.minimum(least, tl.min(tl.min(smallest, 1), 0))
        x = _log2(x)
        if least < LEAST:
            x, scale = _by_log_sums(U, us, T, ts, b, first, end, c, shared, peak, C, EVEN, SHARED)
        alive = tl.max(x, 1) != float("-inf")  # NaN too
        highest = _finite(tl.max(tl.where(alive, scale, float("-inf")), 0))
        x += tl.expand_dims(tl.where(alive, scale - highest, 0.0), 1)
        _store_tile(G, b, piece, pieces, c, x, C)
        tl.store(P + b * pieces + piece, offset + highest.to(tl.float64) * LN2)


@quick
@triton.jit
def _walk(
    U, us, L, ls, G, P, A, F, c, size, pieces,
    C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A, and F ``(2, B, K, c)``: α where pieces begin, by one program, and β where they end."""
    b = tl.program_id(0).to(tl.int64)
    last = tl.load(L + b * ls).to(tl.int64) - 1
    mine = ((last + size - 1) // size).to(tl.int32)
    tile = pieces * c * c
    strides = (tile, c * c, c, 1)
    if tl.program_id(1) == 0:
        alpha, peak = _bits_row(_row(U, us, b, 0, c, C))
        offset = peak.to(tl.float64)
        _store_row(F, b, 0, pieces, c, alpha, C)
        for k in tl.range(0, mine, num_stages=2):
            lag = _finite(tl.max(alpha, 0))
            g = _tile(G, strides, b, k, c, C, EVEN)
            alpha = _log_sum(tl.expand_dims(alpha - lag, 1) + g, 0)[0]
            offset += tl.load(P + b * pieces + k) + lag.to(tl.float64) * LN2
            if k + 1 < mine:
                _store_row(F, b, k + 1, pieces, c, alpha, C)
        total = offset + _log_sum(alpha, 0)[0].to(tl.float64) * LN2
        tl.store(A + b, total.to(A.dtype.element_ty))
    else:
        F += tl.num_programs(0) * pieces * c
        beta = tl.zeros((C,), tl.float32)
        for k in tl.range(0, mine, num_stages=2):
            at = mine - 1 - k
            _store_row(F, b, at, pieces, c, beta, C)
            g = _tile(G, strides, b, at, c, C, EVEN)
            beta = _log_sum(g + tl.expand_dims(beta, 0), 1)[0]
            beta -= _finite(tl.max(beta, 0))
        if mine == 0:
            _store_row(F, b, 0, pieces, c, beta, C)


@quick
@triton.jit
def _fill(
    U, us, T, ts, L, ls, F, MU, MT, S, n, steps, c, size, pieces,
    C: tl.constexpr, EVEN: tl.constexpr, SHARED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The marginals of a piece: those of its steps, and of all its positions but the last, which is
    the next one's. S ``(B, n, c)`` keeps α. With SHARED, MT is ``(B, K, c, c)``: the sums."""
    b = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1).to(tl.int64)
    last = tl.load(L + b * ls).to(tl.int64) - 1
    first = piece * size
    end = tl.minimum(first + size, last)
    zeros = tl.zeros((C,), tl.float32)
    edges = tl.zeros((C, C), tl.float32)
    if (first < last) | (piece == 0):
        if SHARED:
            tile, _ = _bits_tile(_tile(T, ts, b, 0, c, C, EVEN))
        rounds = (end - first).to(tl.int32)
        alpha = _scratch_row(F, b, piece, pieces, c, C)
        for k in tl.range(0, rounds, num_stages=STAGES):
            t = first + k
            _store_row(S, b, t, n, c, alpha, C)
            if not SHARED:
                tile, _ = _bits_tile(_tile(T, ts, b, t, c, C, EVEN))
            u, _ = _bits_row(_row(U, us, b, t + 1, c, C))
            lag = _finite(tl.max(alpha, 0))
            alpha = _log_sum(tl.expand_dims(alpha, 1) + tile, 0)[0] + u - lag

        tl.debug_barrier()
        beta = _scratch_row(F + tl.num_programs(0) * pieces * c, b, piece, pieces, c, C)
        if end == last:
            _store_row(MU, b, last, n, c, _softmax(alpha + beta)[0], C)
        for k in tl.range(0, rounds, num_stages=STAGES):
            t = end - 1 - k
            if not SHARED:
                tile, _ = _bits_tile(_tile(T, ts, b, t, c, C, EVEN))
            u, _ = _bits_row(_row(U, us, b, t + 1, c, C))
            y = beta + u
            after, e, s = _log_sum(tile + tl.expand_dims(y, 0), 1)
            beta = after - _finite(tl.max(y, 0))
            mu, _ = _softmax(_scratch_row(S, b, t, n, c, C) + beta)
            _store_row(MU, b, t, n, c, mu, C)
            edge = e * tl.expand_dims(mu / tl.maximum(s, 1.0), 1)
            if SHARED:
                edges += edge
            else:
                _store_tile(MT, b, t, steps, c, edge, C)

    for t in range(tl.maximum(first, last) + 1, tl.minimum(first + size, n - 1) + 1):
        _store_row(MU, b, t, n, c, zeros, C)
    if SHARED:
        _store_tile(MT, b, piece, pieces, c, edges, C)
    else:
        for t in range(tl.maximum(first, last), tl.minimum(first + size, steps)):
            _store_tile(MT, b, t, steps, c, edges, C)


# ------------------------------------------------------------------------------- torch functions


def value(unary: Tensor, transition: Tensor, lengths: Tensor, wide: bool = False) -> Tensor:
    """A ``(B)``; in float64 if ``wide``."""
    with torch.cuda.device_of(unary):
        return _ends(unary, transition, lengths, wide)[0]


def gradient(
    unary: Tensor, transition: Tensor, lengths: Tensor, wide: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """A ``(B)``, in float64 if ``wide``, μ_unary ``(B, n, c)``, μ_transition ``(B, s, c, c)``."""
    batch, n, c = unary.shape
    steps, shared = transition.shape[1], transition.shape[1] == 1
    mu, alpha = (unary.new_empty(unary.shape) for _ in range(2))
    with torch.cuda.device_of(unary):
        a, ends = _ends(unary, transition, lengths, wide)
        pieces = ends.shape[2]
        edges = mu.new_empty((batch, pieces if shared else steps, c, c))
        _fill[(batch, pieces)](
            *_scores(unary, transition, lengths), ends, mu, edges, alpha,
            n, steps, c, SIZE, pieces, **_options(unary, transition),
        )  # fmt: skip
    return a, mu, edges.sum(1, keepdim=True) if shared else edges


def _ends(unary: Tensor, transition: Tensor, lengths: Tensor, wide: bool) -> tuple[Tensor, Tensor]:
    """A, and α and β at the ends of the pieces, ``(2, B, K, c)``."""
    batch, n, c = unary.shape
    pieces = triton.cdiv(n - 1, SIZE)
    options = _options(unary, transition)
    scores = _scores(unary, transition, lengths)
    matrices = unary.new_empty((batch, pieces, c, c))
    peaks = matrices.new_empty((batch, pieces), dtype=torch.float64)
    a = matrices.new_empty(batch, dtype=torch.float64 if wide else None)
    ends = matrices.new_empty((2, batch, pieces, c))
    dot = {**options, "C": max(16, options["C"])}  # the least that products take
    dot["EVEN"] = dot["C"] == c
    _shorten[(batch, pieces)](*scores, matrices, peaks, c, SIZE, pieces, **dot)
    _walk[(batch, 2)](
        scores[0], scores[1], *scores[4:], matrices, peaks, a, ends, c, SIZE, pieces,
        C=options["C"], EVEN=options["EVEN"], num_warps=1,
    )  # fmt: skip
    return a, ends
