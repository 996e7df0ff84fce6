"""The kernels of the maps on the GPU, written in Triton.

A program answers for ``BR`` rows. A row of up to ``LARGEST`` entries is read once, stays in
registers while the threshold is searched, and is written once; a longer one is read tile by tile in
every round, in the same code: ``tile`` gives the entries from ``start`` on, from either place. The
search is that of the CPU kernels, in the dtype of the scores. A last step, linear in what is
missing to Σ p = 1, is taken on p itself: the rounding of the threshold does not matter then.

Glossary: z = x − peak ≤ 0; ``rate`` = α − 1; ``level`` is the λ of p = [1 + rate(z − λ)]₊^{1/rate}.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from structmax.launch import quick

LARGEST = 16384  # the longest row that is kept on chip
TILE = 4096  # of a longer one
FEW = 32  # entries that a warp searches among by itself
INF = tl.constexpr(float("inf"))
PTX = tl.constexpr(torch.version.hip is None and not triton.knobs.runtime.interpret)
SOFTMAX, HALF, SPARSEMAX = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
GENERAL, NEAR, STEEP = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)  # by the size of α
NEAR_ONE = 1.1  # below, 1 + rate(z − λ) would lose digits of z − λ to its 1


@triton.jit
def load(X, row, start, n, R, BR: tl.constexpr, BN: tl.constexpr):
    """Entries ``(BR, BN)`` of some rows from ``start`` on, −inf outside; float32 at least."""
    column = start + tl.arange(0, BN)
    inside = (row < R)[:, None] & (column < n)[None, :]
    x = tl.load(X + row.to(tl.int64)[:, None] * n + column[None, :], mask=inside, other=-INF)
    if x.dtype == tl.float64:
        return x
    else:
        return x.to(tl.float32)


@triton.jit
def store(X, value, row, start, n, R, BR: tl.constexpr, BN: tl.constexpr):
    column = start + tl.arange(0, BN)
    inside = (row < R)[:, None] & (column < n)[None, :]
    tl.store(X + row.to(tl.int64)[:, None] * n + column[None, :], value, mask=inside)


@triton.jit
def tile(kept, X, row, start, n, R, center, scale, ON_CHIP: tl.constexpr,
         BR: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """(x − center)·scale, from registers or from memory."""
    if ON_CHIP:
        return kept
    else:
        return (load(X, row, start, n, R, BR, BN) - center) * scale


@triton.jit
def peak_of(x, X, row, n, R, ON_CHIP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr):
    """The largest score ``(BR, 1)``, +inf if one is NaN. x is the first tile."""
    peak = tl.max(tl.where(x < INF, x, INF), 1)
    if not ON_CHIP:
        for start in range(BN, n, BN):
            x = load(X, row, start, n, R, BR, BN)
            peak = tl.maximum(peak, tl.max(tl.where(x < INF, x, INF), 1))
    return peak[:, None]


@triton.jit
def log_of_sum(u, d):
    """log(1 + y)·d/y with u = 1 + y rounded: the logarithm without the loss of y."""
    y = u - 1.0
    return d * tl.where(y == 0.0, 1.0, tl.log(u) / tl.where(y == 0.0, 1.0, y))


@triton.jit
def quick_log(x):
    """log x to about 1e-6, in one instruction where there is one."""
    if PTX and x.dtype == tl.float32:
        return 0.6931471805599453 * tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log(x)


@triton.jit
def power(z, level, rate, KIND: tl.constexpr, ROUGH: tl.constexpr = False):
    """p = [1 + rate(z − level)]₊^{1/rate} and s = p^{1−rate}, the loss of p as level grows.

    ROUGH is good enough for the search of level.
    """
    if KIND == SOFTMAX:
        p = tl.exp(z)
        s = p
    elif KIND == SPARSEMAX:
        p = tl.maximum(1.0 + (z - level), 0.0)
        s = (p > 0.0).to(p.dtype)
    elif KIND == HALF:
        s = tl.maximum(1.0 + 0.5 * (z - level), 0.0)
        p = s * s
    else:
        d = tl.maximum(z, -1e30) - level  # 0·inf would be NaN
        u = 1.0 + rate * d
        live = u > 0.0
        u = tl.where(live, u, 1.0)
        if KIND == NEAR:
            logarithm = log_of_sum(u, d)
        elif ROUGH:
            logarithm = quick_log(u) / rate
        else:
            logarithm = tl.log(u) / rate
        p = tl.where(live, tl.exp(logarithm), 0.0)
        s = p / u
    return p, s


@triton.jit
def newton(mass, slope, rate, KIND: tl.constexpr):
    """The step of level: Newton on mass^rate = 1."""
    if KIND == SPARSEMAX:
        move = mass - 1.0
    elif KIND == HALF:
        move = 2.0 * (mass - tl.sqrt(mass))
    else:
        level = tl.log(tl.where(mass > 0.0, mass, 1.0))
        kept = tl.exp(-rate * level)  # (1 − kept)/rate, without a loss where kept is close to 1
        move = (
            mass
            * level
            * tl.where(kept == 1.0, 1.0, (kept - 1.0) / tl.where(kept == 1.0, 1.0, tl.log(kept)))
        )
    return move / tl.where(slope > 0.0, slope, 1.0)


@triton.jit
def find_level(
    kept, X, row, n, R, center, scale, peak, rate,
    KIND: tl.constexpr, ON_CHIP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """λ to a few digits by Newton's method, Σ p there, and the step of λ that is left."""
    dtype = kept.dtype
    stop = BN if ON_CHIP else n
    # rounding leaves more than these of Σ p = 1; a step past them leaves their squares
    tolerance = 1e-6 if KIND == SPARSEMAX else 1e-2
    if dtype == tl.float64:
        tolerance = 1e-14 if KIND == SPARSEMAX else 1e-4
    level = tl.zeros((BR, 1), dtype)
    turn, active = 0, 1 if KIND != SOFTMAX else 0
    while (turn < 100) & (active > 0):
        mass, slope = tl.zeros((BR, 1), dtype), tl.zeros((BR, 1), dtype)
        for start in range(0, stop, BN):
            z = tile(kept, X, row, start, n, R, center, scale, ON_CHIP, BR, BN)
            p, s = power(z, level, rate, KIND, True)
            mass += tl.sum(p, 1)[:, None]
            slope += tl.sum(s, 1)[:, None]
        step = newton(mass, slope, rate, KIND)
        old = level
        level = tl.where((peak < INF) & (step > 0.0), level + step, level)
        moving = (level > old) & (mass - 1.0 > tolerance)
        active = tl.max(tl.max(moving.to(tl.int32), 1), 0)
        turn += 1

    mass, slope = tl.zeros((BR, 1), dtype), tl.zeros((BR, 1), dtype)
    for start in range(0, stop, BN):
        z = tile(kept, X, row, start, n, R, center, scale, ON_CHIP, BR, BN)
        p, s = power(z, level, rate, KIND)
        mass += tl.sum(p, 1)[:, None]
        slope += tl.sum(s, 1)[:, None]
    step = (mass - 1.0) / tl.where(slope > 0.0, slope, 1.0)
    return level, mass, step


@quick
@triton.jit
def entmax_kernel(
    X, P, A, R, n,
    ALPHA: tl.constexpr, NORM: tl.constexpr, KIND: tl.constexpr, ON_CHIP: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Entmax for 1 ≤ α ≤ 2; α is ALPHA, or if that is 0 one for each row in A.

    With NORM, scores are divided by rate and p^{1/NORM} is made to sum to one: normmax.
    """
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    x = load(X, row, 0, n, R, BR, BN)
    dtype = x.dtype
    stop = BN if ON_CHIP else n
    if ALPHA == 0.0:
        alpha = tl.load(A + row, mask=row < R, other=1.5)[:, None]
        rate = tl.where((alpha >= 1.0) & (alpha <= 2.0), alpha - 1.0, 0.5)
    else:
        rate = tl.full((BR, 1), ALPHA - 1.0, dtype)
    peak = peak_of(x, X, row, n, R, ON_CHIP, BR, BN)
    center = tl.where((peak < INF) & (peak > -INF), peak, 0.0)
    scale = 1.0 / rate if NORM > 0.0 else tl.full((BR, 1), 1.0, dtype)
    kept = (x - center) * scale
    level, mass, step = find_level(
        kept, X, row, n, R, center, scale, peak, rate, KIND, ON_CHIP, BR, BN
    )
    total = tl.where(mass > 0.0, mass, 1.0)
    if NORM > 0.0:
        total = tl.zeros((BR, 1), dtype)
        for start in range(0, stop, BN):
            z = tile(kept, X, row, start, n, R, center, scale, ON_CHIP, BR, BN)
            p, s = power(z, level, rate, KIND)
            total += tl.sum(root(tl.maximum(p - step * s, 0.0), NORM), 1)[:, None]
        total = tl.where(total > 0.0, total, 1.0)
    for start in range(0, stop, BN):
        z = tile(kept, X, row, start, n, R, center, scale, ON_CHIP, BR, BN)
        p, s = power(z, level, rate, KIND)
        if KIND == SOFTMAX:
            p = p / total
        else:
            p = tl.maximum(p - step * s, 0.0)
        if NORM > 0.0:
            p = root(p, NORM) / total
        good = peak < INF
        if ALPHA == 0.0:
            good = good & (alpha >= 1.0) & ((alpha <= 2.0) | (peak == -INF))
        p = tl.where(good, p, float("nan"))
        p = tl.where(z == -INF, 0.0, p)
        store(P, p, row, start, n, R, BR, BN)


@triton.jit
def root(p, degree: tl.constexpr):
    """p^{1/degree}."""
    return tl.where(p > 0.0, tl.exp(tl.log(tl.where(p > 0.0, p, 1.0)) / degree), 0.0)


@triton.jit
def steep_search(
    kept, X, row, n, R, center, rate, ours,
    ON_CHIP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The last entry of the support as ``rate·z``, its p, and Σ p: each ``(BR, 1)``.

    First the support: the T of p = [w + T]₊^{1/rate}, w = rate·z, lies between two entries of −w.
    Then r, the p of the last entry, in which every p is convex, by Newton from above.
    """
    dtype = kept.dtype
    stop = BN if ON_CHIP else n
    low = tl.exp(-rate * tl.log(tl.full((BR, 1), n, dtype)))
    high = tl.full((BR, 1), 1.0, dtype)
    turn, active = 0, 1
    while (turn < 200) & (active > 0):
        inside, total = tl.zeros((BR, 1), dtype), tl.zeros((BR, 1), dtype)
        first, last = tl.full((BR, 1), INF, dtype), tl.full((BR, 1), -INF, dtype)
        for start in range(0, stop, BN):
            t = -tile(kept, X, row, start, n, R, center, rate, ON_CHIP, BR, BN)
            between = (t > low) & (t < high) & ours
            inside += tl.sum(between.to(dtype), 1)[:, None]
            total += tl.sum(tl.where(between, t, 0.0), 1)[:, None]
            first = tl.minimum(first, tl.min(tl.where(between, t, INF), 1)[:, None])
            last = tl.maximum(last, tl.max(tl.where(between, t, -INF), 1)[:, None])
        middle = tl.where(turn % 2 == 0, total / tl.maximum(inside, 1.0), 0.5 * (low + high))
        T = tl.minimum(tl.maximum(middle, first), last)
        mass = tl.zeros((BR, 1), dtype)
        for start in range(0, stop, BN):
            w = tile(kept, X, row, start, n, R, center, rate, ON_CHIP, BR, BN)
            u = w + T
            p = tl.where(u > 0.0, tl.exp(tl.log(tl.where(u > 0.0, u, 1.0)) / rate), 0.0)
            mass += tl.sum(p, 1)[:, None]
        moving = inside > 0.0
        low = tl.where(moving & (mass < 1.0), T, low)
        high = tl.where(moving & (mass >= 1.0), T, high)
        active = tl.max(tl.max(moving.to(tl.int32), 1), 0)
        turn += 1

    edge, count = tl.full((BR, 1), INF, dtype), tl.zeros((BR, 1), dtype)
    for start in range(0, stop, BN):
        w = tile(kept, X, row, start, n, R, center, rate, ON_CHIP, BR, BN)
        edge = tl.minimum(edge, tl.min(tl.where(w >= -low, w, INF), 1)[:, None])
        count += tl.sum((w >= -low).to(dtype), 1)[:, None]
    r = 1.0 / tl.maximum(count, 1.0)
    edge = tl.where(ours, edge, 0.0)
    sum_of_p = tl.full((BR, 1), 1.0, dtype)
    # new names: Triton 3.6 fails if what is idle after a loop is older than what is not
    tried, going = 0, 1
    while (tried < 100) & (going > 0):
        mass, slope = tl.zeros((BR, 1), dtype), tl.zeros((BR, 1), dtype)
        for start in range(0, stop, BN):
            w = tile(kept, X, row, start, n, R, center, rate, ON_CHIP, BR, BN)
            p, s = above_edge(w - edge, r, rate)
            mass += tl.sum(p, 1)[:, None]
            slope += tl.sum(s, 1)[:, None]
        step = (mass - 1.0) / tl.maximum(slope, 1.0)
        moving = ours & (step > r * (1e-16 if dtype == tl.float64 else 3e-8))
        sum_of_p = tl.where(ours & (mass > 0.0), mass, 1.0)
        r = tl.where(moving, tl.maximum(r - step, 0.0), r)
        going = tl.max(tl.max(moving.to(tl.int32), 1), 0)
        tried += 1
    return edge, r, sum_of_p


@quick
@triton.jit
def steep_kernel(
    X, P, A, DONE, R, n,
    ALPHA: tl.constexpr, ON_CHIP: tl.constexpr, FEW: tl.constexpr, CHECK: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Entmax for α > 2. With ALPHA = 0, rows of other α in A are left alone.

    p is 0 where rate·z ≤ −1. With FEW, only programs whose rows have at most FEW entries above
    that do their work, searching among those alone, and say so in DONE; the entries wait for the
    search in P. With CHECK, those that have done it rest, and others search among all.
    """
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    todo = True
    if CHECK:
        todo = tl.load(DONE + tl.program_id(0)) == 0
    if todo:
        x = load(X, row, 0, n, R, BR, BN)
        dtype = x.dtype
        if ALPHA == 0.0:
            alpha = tl.load(A + row, mask=row < R, other=1.5)[:, None]
            ours = (alpha > 2.0) & (alpha < INF)
            rate = tl.where(ours, alpha - 1.0, 2.0)
        else:
            rate = tl.full((BR, 1), ALPHA - 1.0, dtype)
            ours = rate > 0.0
        peak = peak_of(x, X, row, n, R, ON_CHIP, BR, BN)
        center = tl.where((peak < INF) & (peak > -INF), peak, 0.0)
        ours = ours & (peak < INF) & (peak > -INF)
        kept = (x - center) * rate
        able = True
        if FEW > 0:
            above = ours & (kept > -1.0)
            number = tl.sum(above.to(tl.int32), 1)
            able = tl.max(number, 0) <= FEW
            tl.store(DONE + tl.program_id(0), able.to(tl.int32))
        if able:
            if FEW > 0:
                place = row.to(tl.int64)[:, None] * n
                tl.store(P + place + tl.cumsum(above.to(tl.int32), 1) - 1, kept, mask=above)
                tl.debug_barrier()
                at = tl.arange(0, FEW)[None, :]
                few = tl.load(P + place + at, mask=at < number[:, None], other=-INF)
                tl.debug_barrier()
                edge, r, total = steep_search(few, X, row, n, R, center, rate, ours, True, BR, FEW)
            else:
                edge, r, total = steep_search(
                    kept, X, row, n, R, center, rate, ours, ON_CHIP, BR, BN
                )
            for start in range(0, BN if ON_CHIP else n, BN):
                w = tile(kept, X, row, start, n, R, center, rate, ON_CHIP, BR, BN)
                p = above_edge(w - edge, r, rate)[0]
                p = tl.where(peak < INF, tl.where(peak > -INF, p / total, 0.0), float("nan"))
                p = tl.where(w == -INF, 0.0, p)
                if ALPHA == 0.0:
                    other = load(P, row, start, n, R, BR, BN)
                    p = tl.where((alpha > 2.0) & (alpha < INF), p, other)
                store(P, p, row, start, n, R, BR, BN)


@triton.jit
def above_edge(c, r, rate):
    """p = (c + r^rate)^{1/rate} for c > 0, r at the edge c = 0, and its derivative in r."""
    log_r = tl.log(tl.maximum(r, 1e-37))
    u = tl.where(c > 0.0, c + tl.exp(rate * log_r), 1.0)
    log_p = tl.log(u) / rate
    p = tl.where(c > 0.0, tl.exp(log_p), tl.where(c == 0.0, r, 0.0))
    s = tl.where(c > 0.0, tl.exp((rate - 1.0) * (log_r - log_p)), (c == 0.0).to(c.dtype))
    return p, s


@quick
@triton.jit
def budget_kernel(
    X, P, R, n, K: tl.constexpr, ON_CHIP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr
):
    """p = x − τ clipped to [0, 1] with sum K, by Newton inside a bracket, then from the new origin
    again: what is left is then small, and so is its rounding."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    x = load(X, row, 0, n, R, BR, BN)
    dtype = x.dtype
    one = tl.full((BR, 1), 1.0, dtype)
    stop = BN if ON_CHIP else n
    peak = peak_of(x, X, row, n, R, ON_CHIP, BR, BN)
    feasible = (peak < INF) & (peak > -INF)
    center = tl.where(feasible, peak, 0.0)
    least, count = tl.full((BR, 1), INF, dtype), tl.zeros((BR, 1), dtype)
    kept = x - center
    for start in range(0, stop, BN):
        z = tile(kept, X, row, start, n, R, center, one, ON_CHIP, BR, BN)
        least = tl.minimum(least, tl.min(tl.where(z > -INF, z, INF), 1)[:, None])
        count += tl.sum((z > -INF).to(dtype), 1)[:, None]
    ours = feasible & (count > K)
    low, high = tl.where(ours, least - 1.0, 0.0), tl.zeros((BR, 1), dtype)

    first, second, third = tl.zeros_like(low), tl.zeros_like(low), tl.zeros_like(low)
    for round in tl.static_range(3):
        tau, before = 0.5 * (low + high), high - low
        turn, active = 0, 1
        while (turn < 300) & (active > 0):
            mass, inside = tl.zeros((BR, 1), dtype), tl.zeros((BR, 1), dtype)
            for start in range(0, stop, BN):
                z = tile(kept, X, row, start, n, R, center, one, ON_CHIP, BR, BN)
                v = ((z - first) - second) - tau
                mass += tl.sum(tl.minimum(tl.maximum(v, 0.0), 1.0), 1)[:, None]
                inside += tl.sum(((v > 0.0) & (v < 1.0)).to(dtype), 1)[:, None]
            low = tl.where(mass >= K, tl.maximum(low, tau), low)
            high = tl.where(mass < K, tl.minimum(high, tau), high)
            new = tau + (mass - K) / tl.maximum(inside, 1.0)
            sound = (inside > 0.0) & (new >= low) & (new <= high)
            sound = sound & (tl.abs(new - tau) <= 0.5 * before)
            new = tl.where(sound, new, 0.5 * (low + high))
            moving = ours & (new != tau) & (mass != K)
            before = tl.abs(new - tau)
            tau = tl.where(moving, new, tau)
            active = tl.max(tl.max(moving.to(tl.int32), 1), 0)
            turn += 1
        tau = tl.minimum(tl.maximum(tau, low), high)  # as it is; see the loop with ``going``
        if round == 0:
            first = tau
        elif round == 1:
            second = tau
        else:
            third = tau
        width = 1e-6 * (1.0 + tl.abs(tau))  # more than the rounding of τ
        low, high = tl.where(ours, -width, 0.0), tl.where(ours, width, 0.0)

    for start in range(0, stop, BN):
        z = tile(kept, X, row, start, n, R, center, one, ON_CHIP, BR, BN)
        v = ((z - first) - second) - third
        p = tl.minimum(tl.maximum(v, 0.0), 1.0)
        p = tl.where(count == K, 1.0, p)
        p = tl.where((peak < INF) & ((count >= K) | (count == 0.0)), p, float("nan"))
        p = tl.where(z == -INF, 0.0, p)
        store(P, p, row, start, n, R, BR, BN)


@triton.jit
def curvature(p, two_minus_alpha, KIND: tl.constexpr):
    """log p on the support (0 elsewhere) and s = p^{2−α}, 0 off the support.

    Where s would overflow, it is a large number.
    """
    limit = 690.77 if p.dtype == tl.float64 else 69.077
    live = p > 0.0
    level = tl.zeros_like(p)
    if KIND == SOFTMAX:
        s = p
    elif KIND == HALF:
        s = tl.sqrt(tl.where(live, p, 0.0))
    elif KIND == SPARSEMAX:
        s = live.to(p.dtype)
    else:
        level = tl.log(tl.where(live, p, 1.0))
        s = tl.where(live, tl.exp(tl.minimum(two_minus_alpha * level, limit)), 0.0)
    return level, s


@triton.jit
def second_order(p, level, s, rate):
    """r = (s − p(1 + y))/rate², y = −rate·log p, by its series where y is small; rate ≤ 1."""
    y = -rate * level
    small = tl.where(y < 1.0, y, 0.0)
    total = tl.zeros_like(y)
    for k in tl.static_range(17):
        total = (total + 1.0) * small / (19 - k)
    series = p * level * level * (total + 1.0) * 0.5
    far = (s - p * (1.0 + y)) / tl.where(y < 1.0, 1.0, rate * rate)
    return tl.where(y < 1.0, series, far)


@triton.jit
def within(y):
    """y, or the last number of its dtype where it is beyond; NaN stays NaN."""
    last = 3.4028234663852886e38 if y.dtype == tl.float32 else 1.7976931348623157e308
    return tl.where(y > last, last, tl.where(y < -last, -last, y))


@quick
@triton.jit
def entmax_backward_kernel(
    P, G, A, OUT, SLOPE, R, n,
    ALPHA: tl.constexpr, KIND: tl.constexpr, UPPER: tl.constexpr, ON_CHIP: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """g_x = s(g − ḡ), ḡ the mean of g under s = p^{2−α}; with ALPHA = 0 also the gradient in α.

    With STEEP (α > 2 may occur), the entry of the largest s is read off Σ g_x = 0, and what is
    beyond the range of the dtype is its last number. With UPPER, entries at p = UPPER are outside,
    as in budgetmax.
    """
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    stop = BN if ON_CHIP else n
    p0 = load(P, row, 0, n, R, BR, BN)
    p0 = tl.where(p0 == -INF, 0.0, p0)
    g0 = load(G, row, 0, n, R, BR, BN)
    dtype = p0.dtype
    if ALPHA == 0.0:
        alpha = tl.load(A + row, mask=row < R, other=1.5)[:, None]
    else:
        alpha = tl.full((BR, 1), ALPHA, dtype)
    steep = alpha > 2.0

    top, base = tl.full((BR, 1), 2147483647, tl.int32), tl.zeros((BR, 1), dtype)
    least = tl.full((BR, 1), 3.0, dtype)
    if KIND == STEEP:
        for start in range(0, stop, BN):
            p = pick(p0, P, row, start, n, R, ON_CHIP, BR, BN)
            p = tl.where(p > 0.0, p, 2.0)
            here = tl.min(p, 1)[:, None]
            column = start + tl.arange(0, BN)[None, :]
            place = tl.min(tl.where(p == here, column, 2147483647), 1)[:, None]
            top = tl.where(here < least, place, top)
            least = tl.minimum(least, here)
        for start in range(0, stop, BN):
            g = pick(g0, G, row, start, n, R, ON_CHIP, BR, BN)
            column = start + tl.arange(0, BN)[None, :]
            base += tl.sum(tl.where(column == top, g, 0.0), 1)[:, None]
        base = tl.where(steep, base, 0.0)
    lift = (alpha - 2.0) * tl.log(least)  # the largest s becomes 1 in the mean
    lift = tl.where(steep, lift, 0.0)

    total, mean, bad = (tl.zeros((BR, 1), dtype), tl.zeros((BR, 1), dtype),
                        tl.zeros((BR, 1), dtype))  # fmt: skip
    for start in range(0, stop, BN):
        p = pick(p0, P, row, start, n, R, ON_CHIP, BR, BN)
        g = pick(g0, G, row, start, n, R, ON_CHIP, BR, BN)
        bad += tl.sum(tl.where(p == p, 0.0, 1.0), 1)[:, None]
        level, s = curvature(p, 2.0 - alpha, KIND)
        if UPPER > 0.0:
            s = tl.where(p < UPPER, s, 0.0)
        if KIND == STEEP:
            s = tl.where(p > 0.0, tl.exp((2.0 - alpha) * level + lift), 0.0)
        total += tl.sum(s, 1)[:, None]
        mean += tl.sum(tl.where(s > 0.0, s * (g - base), 0.0), 1)[:, None]
    mean = mean / tl.where(total > 0.0, total, 1.0)

    rest = tl.zeros((BR, 1), dtype)
    if KIND == STEEP:
        for start in range(0, stop, BN):
            p = pick(p0, P, row, start, n, R, ON_CHIP, BR, BN)
            g = pick(g0, G, row, start, n, R, ON_CHIP, BR, BN)
            column = start + tl.arange(0, BN)[None, :]
            level, s = curvature(p, 2.0 - alpha, KIND)
            change = within(s * ((g - base) - mean))
            rest += tl.sum(tl.where((p > 0.0) & (column != top), change, 0.0), 1)[:, None]

    slope = tl.zeros((BR, 1), dtype)
    for start in range(0, stop, BN):
        p = pick(p0, P, row, start, n, R, ON_CHIP, BR, BN)
        g = pick(g0, G, row, start, n, R, ON_CHIP, BR, BN)
        column = start + tl.arange(0, BN)[None, :]
        level, s = curvature(p, 2.0 - alpha, KIND)
        if UPPER > 0.0:
            s = tl.where(p < UPPER, s, 0.0)
        centered = (g - base) - mean
        out = tl.where(s > 0.0, s * centered, 0.0)
        if KIND == STEEP:
            out = within(tl.where(steep & (column == top), -rest, out))
        store(OUT, tl.where(p == p, out, p), row, start, n, R, BR, BN)
        if ALPHA == 0.0:
            rate = alpha - 1.0
            low = -second_order(p, level, s, tl.minimum(rate, 1.0))
            high = p * (1.0 - rate * level) / tl.maximum(rate * rate, 1.0)
            term = tl.where(steep, high, low) * centered
            slope += tl.sum(tl.where(p > 0.0, term, 0.0), 1)[:, None]
    if ALPHA == 0.0:
        slope = tl.where(bad > 0.0, float("nan"), slope)
        tl.store(SLOPE + row[:, None], slope, mask=(row < R)[:, None])


@triton.jit
def pick(kept, X, row, start, n, R, ON_CHIP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr):
    """Entries from ``start`` on, 0 outside the row."""
    if ON_CHIP:
        x = kept
    else:
        x = load(X, row, start, n, R, BR, BN)
    return tl.where(x == -INF, 0.0, x)


@quick
@triton.jit
def normmax_backward_kernel(
    P, G, OUT, R, n, ALPHA: tl.constexpr, ON_CHIP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr
):
    """(N/(α−1)) (t − pΣt), t = (p/N)^{2−α}(g − ⟨p, g⟩), N = ‖p‖_α."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    stop = BN if ON_CHIP else n
    p0 = load(P, row, 0, n, R, BR, BN)
    g0 = load(G, row, 0, n, R, BR, BN)
    dtype = p0.dtype
    mass, mean = tl.zeros((BR, 1), dtype), tl.zeros((BR, 1), dtype)
    for start in range(0, stop, BN):
        p = pick(p0, P, row, start, n, R, ON_CHIP, BR, BN)
        g = pick(g0, G, row, start, n, R, ON_CHIP, BR, BN)
        level = tl.log(tl.where(p > 0.0, p, 1.0))
        mass += tl.sum(tl.where(p > 0.0, tl.exp(ALPHA * level), 0.0), 1)[:, None]
        mean += tl.sum(tl.where(p > 0.0, p * g, 0.0), 1)[:, None]
    log_norm = tl.log(tl.where(mass > 0.0, mass, 1.0)) / ALPHA
    scale = tl.exp(log_norm) / (ALPHA - 1.0)
    total = tl.zeros((BR, 1), dtype)
    for start in range(0, stop, BN):
        p = pick(p0, P, row, start, n, R, ON_CHIP, BR, BN)
        g = pick(g0, G, row, start, n, R, ON_CHIP, BR, BN)
        level = tl.log(tl.where(p > 0.0, p, 1.0)) - log_norm
        t = tl.where(p > 0.0, tl.exp((2.0 - ALPHA) * level) * (g - mean), 0.0)
        total += tl.sum(t, 1)[:, None]
    for start in range(0, stop, BN):
        p = pick(p0, P, row, start, n, R, ON_CHIP, BR, BN)
        g = pick(g0, G, row, start, n, R, ON_CHIP, BR, BN)
        level = tl.log(tl.where(p > 0.0, p, 1.0)) - log_norm
        t = tl.where(p > 0.0, tl.exp((2.0 - ALPHA) * level) * (g - mean), 0.0)
        out = tl.where(p == p, scale * (t - p * total), p)
        store(OUT, out, row, start, n, R, BR, BN)


def _shape(x: Tensor) -> dict[str, int | bool]:
    """How rows are shared out: several short ones to a program, or one and its warps."""
    n = x.shape[1]
    on_chip = n <= LARGEST
    block = triton.next_power_of_2(n) if on_chip else TILE
    rows = max(1, min(1024 // block, 16)) if on_chip else 1
    warps = max(1, min(16, rows * block // 512))
    return {"ON_CHIP": on_chip, "BR": rows, "BN": block, "num_warps": warps}


def _kind(alpha: float) -> int:
    special = {1.0: SOFTMAX, 1.5: HALF, 2.0: SPARSEMAX}
    other = NEAR if alpha < NEAR_ONE else GENERAL if alpha < 2 else STEEP
    return special.get(alpha, other).value


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def entmax(x: Tensor, parameters: list[Tensor], options: list[float]) -> Tensor:
    return _entmax(x, parameters, options[0] if options else 0.0)


def _entmax(x: Tensor, parameters: list[Tensor], alpha: float, norm: float = 0.0) -> Tensor:
    x, p = x.contiguous(), _empty(x)
    shape = _shape(x)
    grid = (triton.cdiv(len(x), shape["BR"]),)
    each = parameters[0].contiguous() if parameters else x
    kind = NEAR.value if parameters else _kind(alpha)
    with torch.cuda.device_of(x):
        if kind != STEEP.value:
            entmax_kernel[grid](x, p, each, *x.shape, ALPHA=alpha, NORM=norm, KIND=kind, **shape)
        if kind == STEEP.value or parameters:
            few = shape["ON_CHIP"] and shape["BN"] >= 1024 and not parameters
            done = torch.empty(grid, dtype=torch.int32, device=x.device) if few else x
            for size in (FEW, 0) if few else (0,):
                steep_kernel[grid](
                    x, p, each, done, *x.shape, ALPHA=alpha, FEW=size, CHECK=few and not size,
                    **shape,
                )  # fmt: skip
    return p


def entmax_backward(
    p: Tensor, g: Tensor, parameters: list[Tensor], options: list[float]
) -> list[Tensor]:
    return _backward(p, g, parameters, options[0] if options else 0.0)


def _backward(
    p: Tensor, g: Tensor, parameters: list[Tensor], alpha: float, upper: float = 0.0
) -> list[Tensor]:
    p, g, out = p.contiguous(), g.contiguous(), _empty(p)
    shape = _shape(p)
    each = parameters[0].contiguous() if parameters else p
    slope = [torch.empty_like(each)] if parameters else []
    kind = STEEP.value if parameters else _kind(alpha)
    rest = {"ALPHA": alpha, "KIND": kind, "UPPER": upper, **shape}
    with torch.cuda.device_of(p):
        entmax_backward_kernel[(triton.cdiv(len(p), shape["BR"]),)](
            p, g, each, out, *(slope or [p]), *p.shape, **rest
        )
    return [out, *slope]


def softmax(x: Tensor, parameters: list[Tensor], options: list[float]) -> Tensor:
    return _entmax(x, [], 1.0)


def softmax_backward(
    p: Tensor, g: Tensor, parameters: list[Tensor], options: list[float]
) -> list[Tensor]:
    return _backward(p, g, [], 1.0)


def sparsemax(x: Tensor, parameters: list[Tensor], options: list[float]) -> Tensor:
    return _entmax(x, [], 2.0)


def sparsemax_backward(
    p: Tensor, g: Tensor, parameters: list[Tensor], options: list[float]
) -> list[Tensor]:
    return _backward(p, g, [], 2.0)


def budgetmax(x: Tensor, parameters: list[Tensor], options: list[float]) -> Tensor:
    x, p = x.contiguous(), _empty(x)
    shape = _shape(x)
    grid = (triton.cdiv(len(x), shape["BR"]),)
    with torch.cuda.device_of(x):
        budget_kernel[grid](x, p, *x.shape, K=options[0], **shape)
    return p


def budgetmax_backward(
    p: Tensor, g: Tensor, parameters: list[Tensor], options: list[float]
) -> list[Tensor]:
    return _backward(p, g, [], 2.0, upper=1.0)


def normmax(x: Tensor, parameters: list[Tensor], options: list[float]) -> Tensor:
    return _entmax(x, [], 2 - 1 / options[0], norm=options[0])


def normmax_backward(
    p: Tensor, g: Tensor, parameters: list[Tensor], options: list[float]
) -> list[Tensor]:
    p, g, out = p.contiguous(), g.contiguous(), _empty(p)
    shape = _shape(p)
    grid = (triton.cdiv(len(p), shape["BR"]),)
    with torch.cuda.device_of(p):
        normmax_backward_kernel[grid](p, g, out, *p.shape, ALPHA=options[0], **shape)
    return [out]
