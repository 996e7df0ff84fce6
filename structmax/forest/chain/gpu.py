"""The dense chain on the GPU: Triton kernels, two programs per item, two launches.

The forward recursion α runs over the left half of an item while the backward recursion β runs over
its right half, in another program. They meet in the middle, which gives A; then each continues
through the other's half and meets the stored values there, which gives the marginals:

    phase 1, _inward     α ───► │ ◄─── β        stores αₜ (left) and βₜ (right)
    phase 2, _outward    ◄─── β │ α ───►        writes μₜ(i) ∝ exp(αₜ(i) + βₜ(i)) and the edges

So the sequential depth is n instead of 2n, the transitions are read twice and written once, and
what phase 1 read last phase 2 reads first, partly from the cache. A step is a chain of dependent
reductions, so time goes with their number and with the instructions per tile entry: marginals and
conditionals reuse the weights of the log-sums, and recursions are in units of log 2, where an
exponential is one instruction.

Numbers. Every tile and every unary row has its largest entry subtracted before it meets the
recursion, and α, β are kept relative to a running maximum; these offsets go to one float64 number,
so large common shifts of the scores cost no precision. Each log-sum subtracts its own maximum: no
term that matters underflows. Marginals are normalised at every position, where the offsets cancel;
an edge is the marginal of one end times the conditional probability of the other.

Letters as in ``naive``: B batch, n positions, c tags; *step* t goes from position t to t + 1. Tiles
are padded to C ≥ c, a power of two, by −inf. More than ``ops.MAX_TAGS_ON_GPU`` tags do not fit
into the registers of one program; there a step is enough work for a torch call of its own, and the
naive definition runs on the device. γ = 1. float32 or float64; for A and its gradient, transitions
may be of half precision where all else is float32, which they become as they are read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from structmax.launch import quick, repeated

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
PTX = tl.constexpr(torch.version.hip is None and not triton.knobs.runtime.interpret)

# ------------------------------------------------------------------------------------- kernels


@triton.jit
def _finite(x):
    """A maximum that can be subtracted: 0 where there was nothing to take it of."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def _wide(x):
    """Transitions as numbers to compute with: half precision as float32."""
    if x.dtype.primitive_bitwidth == 16:
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def _row(U, strides, b, t, c, C: tl.constexpr):
    """Row t of item b, ``(C)``."""
    j = tl.arange(0, C)
    at = U + b * strides[0] + t * strides[1] + j * strides[2]
    return tl.load(at, mask=j < c, other=float("-inf"))


@triton.jit
def _scratch_row(S, b, t, n, c, C: tl.constexpr):
    """Row t of item b of a contiguous ``(B, n, c)``."""
    j = tl.arange(0, C)
    return tl.load(S + (b * n + t) * c + j, mask=j < c, other=float("-inf"))


@triton.jit
def _direction(V, strides, b, t, c, score, C: tl.constexpr):
    """Row t of a direction, zero at the tags that the score forbids."""
    return tl.where(score > float("-inf"), _row(V, strides, b, t, c, C), 0.0)


@triton.jit
def _tile(T, strides, b, t, c, C: tl.constexpr, EVEN: tl.constexpr):
    """The scores of step t of item b, ``(C, C)`` as [from, to].

    A thread reads four neighbours, as many as it writes in float32: if it read eight of half
    precision, every tile would go through shared memory once more.
    """
    i = tl.arange(0, C)[:, None]
    j = tl.max_contiguous(tl.arange(0, C), 4)[None, :]
    at = T + b * strides[0] + t * strides[1] + i * strides[2] + j * strides[3]
    if EVEN:
        return _wide(tl.load(at))
    return _wide(tl.load(at, mask=(i < c) & (j < c), other=float("-inf")))


@triton.jit
def _store_row(M, b, t, n, c, row, C: tl.constexpr):
    """Writes row t of item b of a contiguous ``(B, n, c)``."""
    j = tl.arange(0, C)
    tl.store(M + (b * n + t) * c + j, row, mask=j < c)


@triton.jit
def _store_tile(M, b, t, steps, c, tile, C: tl.constexpr):
    """Writes tile t of item b of a contiguous ``(B, steps, c, c)``."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    at = M + (b * steps + t) * c * c + i * c + j
    # Nothing here reads it again: leave the cache to the transitions.
    tl.store(at, tile, mask=(i < c) & (j < c), cache_modifier=".cs")


@triton.jit
def _centered_row(x):
    """x − max x, and max x."""
    peak = _finite(tl.max(x, 0))
    return x - peak, peak


@triton.jit
def _centered_tile(x):
    """Likewise, over both axes."""
    peak = _finite(tl.max(x))
    return x - peak, peak


@triton.jit
def _bits_row(x):
    """A centered row in units of log 2."""
    x, peak = _centered_row(x)
    return x * LOG2E, peak


@triton.jit
def _bits_tile(x):
    """A centered tile in units of log 2."""
    x, peak = _centered_tile(x)
    return x * LOG2E, peak


@triton.jit
def _log2(x):
    """log₂ x. One instruction where there is one: the library's polynomial costs twenty."""
    if PTX and x.dtype == tl.float32:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def _log_sum(x, axis: tl.constexpr):
    """log₂ Σ 2ˣ along one axis, and the softmax as weights e over their sum s (0 or at least 1)."""
    peak = _finite(tl.max(x, axis))
    e = tl.exp2(x - tl.expand_dims(peak, axis))
    s = tl.sum(e, axis)
    return peak + _log2(s), e, s


@triton.jit
def _softmax(x):
    """2ˣ / Σ 2ˣ, zeros where every entry is −inf; and max x."""
    peak = _finite(tl.max(x, 0))
    e = tl.exp2(x - peak)
    s = tl.sum(e, 0)
    return e / tl.where(s == 0, 1.0, s), peak


@triton.jit
def _loud(x):
    """NaN as +inf: a maximum may pass over the one, not over the other."""
    return tl.where(x != x, float("inf"), x)


@quick
@triton.jit
def _inward(
    U, us, T, ts, L, ls, S, K, n, c,
    C: tl.constexpr, EVEN: tl.constexpr, SHARED: tl.constexpr, GRADIENT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Phase 1: α from position 0 to the middle in one program, β from the last in another.

    S ``(B, n + 1, c)`` keeps αₜ in row t and βₜ in row t + 1, so that the middle has both. K
    ``(B, 2, n + 1)`` keeps the maxima of the steps and of the unary rows for phase 2, and at index
    n the offsets of α and of β.
    """
    b = tl.program_id(0).to(tl.int64)
    last = tl.load(L + b * ls).to(tl.int64) - 1
    middle = (last + 1) // 2
    step_peaks = K + b * 2 * (n + 1)
    unary_peaks = step_peaks + n + 1
    if SHARED:
        tile, tile_peak = _bits_tile(_tile(T, ts, b, 0, c, C, EVEN))
    if tl.program_id(1) == 0:
        alpha, peak = _bits_row(_row(U, us, b, 0, c, C))
        offset = peak.to(tl.float64)
        for k in tl.range(0, middle.to(tl.int32), num_stages=STAGES):
            t = k + middle * 0  # 64 bits, as all that strides multiply
            if not SHARED:
                tile, tile_peak = _bits_tile(_tile(T, ts, b, t, c, C, EVEN))
            u, peak = _bits_row(_row(U, us, b, t + 1, c, C))
            if GRADIENT:
                _store_row(S, b, t, n + 1, c, alpha, C)
                tl.store(step_peaks + t, tile_peak.to(tl.float64))
                tl.store(unary_peaks + t + 1, peak.to(tl.float64))
            lag = _finite(tl.max(alpha, 0))
            alpha = _log_sum(tl.expand_dims(alpha, 1) + tile, 0)[0] + u - lag
            offset += peak.to(tl.float64) + tile_peak + lag.to(tl.float64) * LN2
        _store_row(S, b, middle, n + 1, c, alpha, C)
        tl.store(step_peaks + n, offset)
    else:
        beta = tl.zeros((C,), S.dtype.element_ty)
        offset = tl.zeros((), tl.float64)
        for k in tl.range(0, (last - middle).to(tl.int32), num_stages=STAGES):
            t = last - 1 - k
            if not SHARED:
                tile, tile_peak = _bits_tile(_tile(T, ts, b, t, c, C, EVEN))
            u, peak = _bits_row(_row(U, us, b, t + 1, c, C))
            if GRADIENT:
                _store_row(S, b, t + 2, n + 1, c, beta, C)
                tl.store(step_peaks + t, tile_peak.to(tl.float64))
                tl.store(unary_peaks + t + 1, peak.to(tl.float64))
            y = beta + u
            lag = _finite(tl.max(y, 0))
            beta = _log_sum(tile + tl.expand_dims(y, 0), 1)[0] - lag
            offset += peak.to(tl.float64) + tile_peak + lag.to(tl.float64) * LN2
        _store_row(S, b, middle + 1, n + 1, c, beta, C)
        tl.store(unary_peaks + n, offset)


@triton.jit
def _meet(S, K, b, middle, n, c, C: tl.constexpr):
    """α and β in the middle, and A."""
    alpha = _scratch_row(S, b, middle, n + 1, c, C)
    beta = _scratch_row(S, b, middle + 1, n + 1, c, C)
    offset = tl.load(K + b * 2 * (n + 1) + n) + tl.load(K + (b * 2 + 1) * (n + 1) + n)
    return alpha, beta, offset + _log_sum(alpha + beta, 0)[0].to(tl.float64) * LN2


@quick
@triton.jit
def _total(L, ls, A, S, K, n, c, C: tl.constexpr):
    """A alone, after phase 1."""
    b = tl.program_id(0).to(tl.int64)
    middle = tl.load(L + b * ls).to(tl.int64) // 2
    _, _, total = _meet(S, K, b, middle, n, c, C)
    tl.store(A + b, total.to(A.dtype.element_ty))


@quick
@triton.jit
def _outward(
    U, us, T, ts, L, ls, A, MU, MT, S, K, n, steps, c,
    C: tl.constexpr, EVEN: tl.constexpr, SHARED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Phase 2: A and the marginals; β over the left half in one program, α over the right.

    Each recursion is kept relative to the largest α + β of the position before. With SHARED, MT is
    ``(2, B, c, c)``: the sums over either half.
    """
    b = tl.program_id(0).to(tl.int64)
    last = tl.load(L + b * ls).to(tl.int64) - 1
    middle = (last + 1) // 2
    step_peaks = K + b * 2 * (n + 1)
    unary_peaks = step_peaks + n + 1
    alpha, beta, total = _meet(S, K, b, middle, n, c, C)
    mu, lag = _softmax(alpha + beta)
    if SHARED:
        scores = _tile(T, ts, b, 0, c, C, EVEN)
        edges = tl.zeros_like(scores)
    # The maxima of the next step are loaded a round ahead, as the compiler does for the tiles.
    if tl.program_id(1) == 0:
        tl.store(A + b, total.to(A.dtype.element_ty))
        _store_row(MU, b, middle, n, c, mu, C)
        tile_peak = tl.load(step_peaks + tl.maximum(middle - 1, 0))
        peak = tl.load(unary_peaks + middle)
        for k in tl.range(0, middle.to(tl.int32), num_stages=STAGES):
            t = middle - 1 - k
            if not SHARED:
                scores = _tile(T, ts, b, t, c, C, EVEN)
            u = _row(U, us, b, t + 1, c, C)
            alpha = _scratch_row(S, b, t, n + 1, c, C)
            tile = (scores - tile_peak.to(u.dtype)) * LOG2E
            y = beta + (u - peak.to(u.dtype)) * LOG2E
            tile_peak = tl.load(step_peaks + tl.maximum(t - 1, 0))
            peak = tl.load(unary_peaks + t)
            after, e, s = _log_sum(tile + tl.expand_dims(y, 0), 1)
            beta = after - lag
            mu, lag = _softmax(alpha + beta)
            _store_row(MU, b, t, n, c, mu, C)
            edge = e * tl.expand_dims(mu / tl.maximum(s, 1.0), 1)
            if SHARED:
                edges += edge
            else:
                _store_tile(MT, b, t, steps, c, edge, C)
    else:
        tile_peak = tl.load(step_peaks + middle)
        peak = tl.load(unary_peaks + middle + 1)
        for k in tl.range(0, (last - middle).to(tl.int32), num_stages=STAGES):
            t = middle + k
            if not SHARED:
                scores = _tile(T, ts, b, t, c, C, EVEN)
            u = _row(U, us, b, t + 1, c, C)
            beta = _scratch_row(S, b, t + 2, n + 1, c, C)
            tile = (scores - tile_peak.to(u.dtype)) * LOG2E
            u = (u - peak.to(u.dtype)) * LOG2E
            tile_peak = tl.load(step_peaks + t + 1)
            peak = tl.load(unary_peaks + t + 2)
            before, e, s = _log_sum(tl.expand_dims(alpha, 1) + tile, 0)
            alpha = before + u - lag
            mu, lag = _softmax(alpha + beta)
            _store_row(MU, b, t + 1, n, c, mu, C)
            edge = e * tl.expand_dims(mu / tl.maximum(s, 1.0), 0)
            if SHARED:
                edges += edge
            else:
                _store_tile(MT, b, t, steps, c, edge, C)
        for t in range(last + 1, n):
            _store_row(MU, b, t, n, c, tl.zeros_like(alpha), C)
        if not SHARED:
            for t in range(last, steps):
                _store_tile(MT, b, t, steps, c, tl.zeros((C, C), alpha.dtype), C)
    if SHARED:
        _store_tile(MT, tl.program_id(1).to(tl.int64), b, tl.num_programs(0), c, edges, C)


@quick
@triton.jit
def _hessian_product(
    U, us, T, ts, L, ls, VU, vus, VT, vts, WU, WT, S, D, n, steps, c,
    C: tl.constexpr, EVEN: tl.constexpr, SHARED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """w = ∇²A·v: the recursions together with their derivatives α̇, β̇ along v.

        α̇ₜ(j) = v_u(j) + Σᵢ P(i | j)(α̇ₜ₋₁(i) + v_T(i, j)),    w_u = μ·(α̇ + β̇ − Ȧ),

    P the softmax of the step, Ȧ = Σ μ(α̇ + β̇) at any position. S keeps α, D keeps α̇. Constants
    added to α̇ or β̇ cancel against Ȧ, so both are kept around zero.
    """
    b = tl.program_id(0).to(tl.int64)
    last = tl.load(L + b * ls).to(tl.int64) - 1
    rounds = last.to(tl.int32)
    if SHARED:
        tile = _bits_tile(_tile(T, ts, b, 0, c, C, EVEN))[0]
        v = _tile(VT, vts, b, 0, c, C, EVEN)

    alpha = _bits_row(_row(U, us, b, 0, c, C))[0]
    rate = _direction(VU, vus, b, 0, c, alpha, C)
    for k in tl.range(0, rounds, num_stages=STAGES):
        t = k + last * 0
        _store_row(S, b, t, n, c, alpha, C)
        _store_row(D, b, t, n, c, rate, C)
        if not SHARED:
            tile = _bits_tile(_tile(T, ts, b, t, c, C, EVEN))[0]
            v = _tile(VT, vts, b, t, c, C, EVEN)
        u = _bits_row(_row(U, us, b, t + 1, c, C))[0]
        total, e, s = _log_sum(tl.expand_dims(alpha, 1) + tile, 0)
        alpha = total + u - _finite(tl.max(alpha, 0))
        moved = tl.sum(tl.where(e > 0, e * (tl.expand_dims(rate, 1) + v), 0.0), 0) / tl.maximum(
            s, 1.0
        )
        rate = moved + _direction(VU, vus, b, t + 1, c, alpha, C)
        rate = tl.where(alpha > float("-inf"), rate - tl.sum(rate, 0) / c, 0.0)

    tl.debug_barrier()
    beta = tl.zeros_like(alpha)
    beta_rate = tl.zeros_like(alpha)
    mu = _softmax(alpha)[0]
    _store_row(WU, b, last, n, c, mu * (rate - tl.sum(mu * rate, 0)), C)
    if SHARED:
        edges = tl.zeros_like(tile)
    for k in tl.range(0, rounds, num_stages=STAGES):
        t = last - 1 - k
        if not SHARED:
            tile = _bits_tile(_tile(T, ts, b, t, c, C, EVEN))[0]
            v = _tile(VT, vts, b, t, c, C, EVEN)
        u = _bits_row(_row(U, us, b, t + 1, c, C))[0]
        y = beta + u
        y_rate = beta_rate + _direction(VU, vus, b, t + 1, c, y, C)
        total, e, s = _log_sum(tile + tl.expand_dims(y, 0), 1)
        beta = total - _finite(tl.max(y, 0))
        p = e * tl.expand_dims((1.0 / tl.maximum(s, 1.0)), 1)
        along = tl.where(e > 0, v + tl.expand_dims(y_rate, 0), 0.0)  # (i, j)
        beta_rate = tl.sum(p * along, 1)
        alpha = _scratch_row(S, b, t, n, c, C)
        rate = _scratch_row(D, b, t, n, c, C)
        rate = tl.where(alpha > float("-inf"), rate, 0.0)
        mu = _softmax(alpha + beta)[0]
        mean = tl.sum(mu * (rate + beta_rate), 0)
        _store_row(WU, b, t, n, c, mu * (rate + beta_rate - mean), C)
        w = p * tl.expand_dims(mu, 1) * (along + tl.expand_dims(rate - mean, 1))
        if SHARED:
            edges += w
        else:
            _store_tile(WT, b, t, steps, c, w, C)
        beta_rate = tl.where(beta > float("-inf"), beta_rate - tl.sum(beta_rate, 0) / c, 0.0)

    zeros = tl.zeros_like(beta)
    for t in range(last + 1, n):
        _store_row(WU, b, t, n, c, zeros, C)
    if SHARED:
        _store_tile(WT, b, 0, 1, c, edges, C)
    else:
        for t in range(last, steps):
            _store_tile(WT, b, t, steps, c, tl.zeros((C, C), zeros.dtype), C)


@triton.jit
def best_tags(
    U, us, T, ts, b, last, TAGS, P, n, c,
    C: tl.constexpr, EVEN: tl.constexpr, SHARED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The best score of item b, whose tags up to position ``last`` go to its row TAGS.
    P ``(B, n, c)`` int16 keeps the best predecessors.

    NaN travels as +inf, which wins every comparison, and is NaN again in the result.
    """
    j = tl.arange(0, C)
    rounds = last.to(tl.int32)
    if SHARED:
        tile, tile_peak = _centered_tile(_tile(T, ts, b, 0, c, C, EVEN))

    alpha, peak = _centered_row(_row(U, us, b, 0, c, C))
    alpha = _loud(alpha)
    offset = peak.to(tl.float64)
    for k in tl.range(0, rounds, num_stages=STAGES):
        t = k + last * 0
        if not SHARED:
            tile, tile_peak = _centered_tile(_tile(T, ts, b, t, c, C, EVEN))
        u, peak = _centered_row(_row(U, us, b, t + 1, c, C))
        x = _loud(tl.expand_dims(alpha, 1) + tile)
        top, at = tl.max(x, 0, return_indices=True)
        lag = _finite(tl.max(alpha, 0))
        alpha = _loud(top + u - lag)
        offset += peak.to(tl.float64) + tile_peak + lag
        _store_row(P, b, t + 1, n, c, at.to(tl.int16), C)
    top, tag = tl.max(alpha, 0, return_indices=True)

    tl.debug_barrier()
    tag = tag.to(tl.int32)
    for k in tl.range(0, rounds, num_stages=STAGES):
        t = last - k
        tl.store(TAGS + t, tag.to(TAGS.dtype.element_ty))
        row = tl.load(P + (b * n + t) * c + j, mask=j < c, other=0).to(tl.int32)
        tag = tl.sum(tl.where(j == tag, row, 0), 0)
    tl.store(TAGS, tag.to(TAGS.dtype.element_ty))
    return tl.where(top == float("inf"), float("nan"), offset + top)


@quick
@triton.jit
def _viterbi(
    U, us, T, ts, L, ls, BEST, TAGS, P, n, c,
    C: tl.constexpr, EVEN: tl.constexpr, SHARED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The best score and its tags, −1 in the padding."""
    b = tl.program_id(0).to(tl.int64)
    TAGS += b * n
    last = tl.load(L + b * ls).to(tl.int64) - 1
    best = best_tags(U, us, T, ts, b, last, TAGS, P, n, c, C, EVEN, SHARED, STAGES)
    tl.store(BEST + b, best.to(BEST.dtype.element_ty))
    for t in range(last + 1, n):
        tl.store(TAGS + t, tl.full((), -1, tl.int64))


@quick
@triton.jit
def _less_tags(
    U, us, T, ts, L, ls, TAGS, gs, A, MU, MT, n, steps, c,
    BLOCK: tl.constexpr, SHARED: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """A less the score of the given tags, and the marginals less their indicator, all in place.

    A tag that there is not makes A and the marginals NaN. With SHARED, MT are counts, which start
    at 0: whole numbers, whose sum has no order.
    """
    b = tl.program_id(0).to(tl.int64)
    length = tl.load(L + b * ls).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float64)
    unknown = tl.zeros((BLOCK,), tl.int32)
    for k in range(0, length.to(tl.int32), BLOCK):
        t = k + tl.arange(0, BLOCK) + length * 0
        here, both = t < length, t + 1 < length
        tag = tl.load(TAGS + b * gs[0] + t * gs[1], mask=here, other=0)
        after = tl.load(TAGS + b * gs[0] + (t + 1) * gs[1], mask=both, other=0)
        known = (tag >= 0) & (tag < c)
        unknown += (~known).to(tl.int32)
        here, both = here & known, both & known & (after >= 0) & (after < c)
        own = U + b * us[0] + t * us[1] + tag * us[2]
        total += tl.load(own, mask=here, other=0.0).to(tl.float64)
        step = T + b * ts[0] + tag * ts[2] + after * ts[3]
        if not SHARED:
            step += t * ts[1]
        total += tl.load(step, mask=both, other=0.0).to(tl.float64)
        if GRADIENT:
            own = MU + (b * n + t) * c + tag
            tl.store(own, tl.load(own, mask=here) - 1, mask=here)
            if SHARED:
                tl.atomic_add(MT + b * c * c + tag * c + after, -1.0, mask=both)
            else:
                step = MT + ((b * steps + t) * c + tag) * c + after
                tl.store(step, tl.load(step, mask=both) - 1, mask=both)
    wrong = tl.sum(unknown, 0) > 0
    tl.store(A + b, tl.load(A + b) - tl.where(wrong, float("nan"), tl.sum(total, 0)))
    if GRADIENT and wrong:
        tl.debug_barrier()  # what other threads have stored comes first
        block, nothing = tl.arange(0, BLOCK), tl.full((BLOCK,), float("nan"), tl.float32)
        for k in range(0, n * c, BLOCK):
            tl.store(MU + b * n * c + k + block, nothing, mask=k + block < n * c)
        for k in range(0, steps * c * c, BLOCK):
            here = k + block < steps * c * c
            tl.store(MT + b * steps * c * c + k + block, nothing, mask=here)


# ------------------------------------------------------------------------------- torch functions


def value(unary: Tensor, transition: Tensor, lengths: Tensor, wide: bool = False) -> Tensor:
    """A ``(B)``; in float64 if ``wide``."""
    unary, transition = _near(unary, 1), _near(transition, 2)
    a, scratch, peaks = _outputs(unary, wide)
    with torch.cuda.device_of(unary):
        _launch_value(
            _kind(unary, transition, lengths, wide), unary, transition, lengths, a, scratch, peaks
        )
    return a


def gradient(
    unary: Tensor, transition: Tensor, lengths: Tensor, wide: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """A ``(B)``, in float64 if ``wide``, μ_unary ``(B, n, c)``, μ_transition ``(B, s, c, c)``."""
    unary, transition = _near(unary, 1), _near(transition, 2)
    shared = transition.shape[1] == 1
    a, scratch, peaks = _outputs(unary, wide)
    mu = unary.new_empty(unary.shape)
    edges = unary.new_empty((2, *transition.shape) if shared else transition.shape)
    with torch.cuda.device_of(unary):
        _launch_gradient(
            _kind(unary, transition, lengths, wide),
            unary, transition, lengths, a, scratch, peaks, mu, edges,
        )  # fmt: skip
    return a, mu, edges[0].add_(edges[1]) if shared else edges


def _outputs(unary: Tensor, wide: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Room for A and for S and K of phase 1."""
    batch, n, c = unary.shape
    a = unary.new_empty(batch, dtype=torch.float64 if wide else None)
    scratch = unary.new_empty((batch, n + 1, c))
    return a, scratch, unary.new_empty((batch, 2, n + 1), dtype=torch.float64)


def _kind(unary: Tensor, transition: Tensor, lengths: Tensor, wide: bool) -> tuple[object, ...]:
    """What decides how the next two launch their kernels."""
    return (
        unary.shape, unary.stride(), unary.dtype,
        transition.shape, transition.stride(), transition.dtype,
        lengths.stride(), lengths.dtype, wide,
    )  # fmt: skip


@repeated
def _launch_value(
    unary: Tensor, transition: Tensor, lengths: Tensor, a: Tensor, scratch: Tensor, peaks: Tensor
) -> None:
    batch, n, c = unary.shape
    options = _options(unary, transition, both=True)
    scores = _scores(unary, transition, lengths)
    _inward[(batch, 2)](*scores, scratch, peaks, n, c, GRADIENT=False, **options)
    _total[(batch,)](
        lengths, lengths.stride(0), a, scratch, peaks, n, c, C=options["C"], num_warps=1
    )


@repeated
def _launch_gradient(
    unary: Tensor, transition: Tensor, lengths: Tensor,
    a: Tensor, scratch: Tensor, peaks: Tensor, mu: Tensor, edges: Tensor,
) -> None:  # fmt: skip
    batch, n, c = unary.shape
    options = _options(unary, transition, both=True)
    scores = _scores(unary, transition, lengths)
    _inward[(batch, 2)](*scores, scratch, peaks, n, c, GRADIENT=True, **options)
    _outward[(batch, 2)](
        *scores, a, mu, edges, scratch, peaks, n, transition.shape[1], c, **options
    )


def less_tags(
    value: Tensor,
    mu: list[Tensor],
    unary: Tensor,
    transition: Tensor,
    lengths: Tensor,
    tags: Tensor,
) -> None:
    """Takes the score of tags ``(B, n)`` from A, float64, and their indicator from μ, if it is not
    empty. What stands in the padding is not looked at."""
    batch, n, c = unary.shape
    steps = transition.shape[1]
    shared = steps == 1
    own, between = mu or (unary, transition)  # which a kernel without gradients leaves alone
    counts = torch.zeros_like(between) if mu and shared else between
    with torch.cuda.device_of(unary):
        _less_tags[(batch,)](
            *_scores(unary, transition, lengths), tags, tags.stride(), value, own, counts,
            n, steps, c, BLOCK=128, SHARED=shared, GRADIENT=bool(mu), num_warps=4,
        )  # fmt: skip
    if mu and shared:
        between += counts


def hvp(
    unary: Tensor, transition: Tensor, v_unary: Tensor, v_transition: Tensor, lengths: Tensor
) -> list[Tensor]:
    """∇²A·v for both scores."""
    batch, n, c = unary.shape
    w, edges = unary.new_empty(unary.shape), unary.new_empty(transition.shape)
    alpha, rate = unary.new_empty((2, *unary.shape))
    with torch.cuda.device_of(unary):
        _hessian_product[(batch,)](
            *_scores(unary, transition, lengths), *_scores(v_unary, v_transition, lengths)[:4],
            w, edges, alpha, rate,
            n, transition.shape[1], c, **_options(unary, transition),
        )  # fmt: skip
    return [w, edges]


def argmax(unary: Tensor, transition: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The best score ``(B)`` and its tags ``(B, n)``, −1 in the padding."""
    batch, n, c = unary.shape
    best = unary.new_empty(batch)
    tags = unary.new_empty((batch, n), dtype=torch.int64)
    back = unary.new_empty((batch, n, c), dtype=torch.int16)
    with torch.cuda.device_of(unary):
        _viterbi[(batch,)](
            *_scores(unary, transition, lengths), best, tags, back, n, c,
            **_options(unary, transition),
        )  # fmt: skip
    return best, tags


def _scores(unary: Tensor, transition: Tensor, lengths: Tensor) -> tuple[object, ...]:
    """The leading arguments of every kernel."""
    unary, transition = _near(unary, 1), _near(transition, 2)
    return unary, unary.stride(), transition, transition.stride(), lengths, lengths.stride(0)


def _near(scores: Tensor, dims: int) -> Tensor:
    """Scores whose offsets within a row or a tile fit into 32 bits, as the kernels assume."""
    if scores.is_contiguous() or max(scores.stride()[-dims:]) * scores.shape[-1] < 2**30:
        return scores
    return scores.contiguous()


def _options(unary: Tensor, transition: Tensor, both: bool = False) -> dict[str, int]:
    """How to compile for these scores; ``both``: phases 1 and 2. Warps and stages were measured on
    an H200."""
    c, size, shared = unary.shape[-1], unary.dtype.itemsize, transition.shape[1] == 1
    padded = max(8, triton.next_power_of_2(c))
    tile = padded * padded * size  # bytes
    warps = min(2 * size, max(1, tile // 4096))
    if both and padded == 64 and not shared and size == 4:
        warps = 2
    return {
        "C": padded,
        "EVEN": padded == c,
        "SHARED": shared,
        "STAGES": 3 if tile <= 32768 else 1,  # two tiles on their way
        "num_warps": warps,
    }
