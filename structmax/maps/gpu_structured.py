"""Kernels on the GPU, in Triton, for fusedmax, oscarmax, csparsemax and csoftmax.

csparsemax and csoftmax: one program per row, which is read once and stays on chip while a bracketed
Newton search looks for the threshold. Rows beyond ``LONGEST`` run the naive definition, on the
device.

fusedmax and oscarmax: their linear-time algorithms are sequential in the row, so a *thread* works
on each row, and a warp on 32 of them side by side. Tables are ``(places, R)``, so that the loads of
a warp coalesce; they are float64 and take some 70 n bytes per row (oscarmax: 30 n). Time goes with
the length of rows, and hardly with their number. The projection onto the simplex that follows is
csparsemax without bounds; the backward passes are segmented sums, one program per row.

Nothing runs on the host, and nothing is added up by atomics: the same input gives the same bits.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from structmax.launch import quick
from structmax.maps import bounds
from structmax.maps import fusedmax as _fusedmax

LONGEST = 32768  # a row that fits on chip
WARP = tl.constexpr(32)  # rows side by side
STEPS = tl.constexpr(100)

# ------------------------------------------------------------------------ csparsemax and csoftmax


@triton.jit
def _unbounded(z, SOFT: tl.constexpr):
    """v(z): e^z only up to 1, which no upper bound exceeds."""
    if SOFT:
        return tl.exp(tl.minimum(z, 0.0))
    else:
        return z


@triton.jit
def _inverse(p, SOFT: tl.constexpr):
    """The z at which p is reached without bounds."""
    if SOFT:
        return tl.log(p)
    else:
        return p


@triton.jit
def _measure(x, a, b, tau, SOFT: tl.constexpr):
    """Σ p of entries at a bound, and Σ v and the count of those between, for v = v(x − τ)."""
    v = _unbounded(x - tau, SOFT)
    inside = (a < v) & (v < b)
    held = tl.sum(tl.where(inside, 0.0, tl.minimum(tl.maximum(v, a), b)), 0)
    return held, tl.sum(tl.where(inside, v, 0.0), 0), tl.sum(inside.to(x.dtype), 0)


@quick
@triton.jit
def _bounded(
    X, U, L, P, u0, u1, l0, l1, n, tolerance: tl.float64, SOFT: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """A row of p = clip(v(x − τ), lower, upper); see ``cpu_structured.bounded_rows``.

    x is not shifted: τ is near the free entries, where x − τ is exact, and the step that is taken
    by p instead of τ makes up for the rounding of τ.
    """
    r = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, N)
    x = tl.load(X + r * n + i, mask=i < n, other=-float("inf"))
    upper = tl.load(U + r * u0 + i * u1, mask=i < n, other=0.0)
    lower = tl.load(L + r * l0 + i * l1, mask=i < n, other=0.0)
    absent = x == -float("inf")
    sound = tl.where(absent, lower == 0.0, (lower >= 0.0) & (lower <= upper) & (x < float("inf")))
    a = tl.where(absent, 0.0, lower)
    b = tl.where(absent, 0.0, tl.minimum(upper, 1.0))
    least, most = tl.sum(a.to(tl.float64), 0), tl.sum(b.to(tl.float64), 0)
    feasible = (tl.min(sound.to(tl.int32), 0) > 0) & (most >= 1.0 - tolerance)
    feasible = feasible & (least <= 1.0 + tolerance)

    z = tl.where(absent, 0.0, x)
    peak = tl.max(tl.where(absent, -float("inf"), x), 0)
    low = tl.min(tl.where(absent, float("inf"), z - _inverse(b, SOFT)), 0)
    if SOFT:
        high = peak + tl.log(n / tl.maximum(1.0 - least, 1e-300)).to(x.dtype)
        tau = peak
    else:
        high = tl.max(tl.where(absent, -float("inf"), z - a), 0)
        tau = peak - 1.0
    tau = tl.minimum(tl.maximum(tau, low), high)
    length = high - low
    held, free, count = _measure(z, a, b, tau, SOFT)
    step = 0
    active = (feasible & (most > 1.0) & (least < 1.0)).to(tl.int32)
    while (step < STEPS) & (active > 0):
        low = tl.where(held + free > 1.0, tau, low)
        high = tl.where(held + free > 1.0, high, tau)
        some = (count > 0.0) & (held < 1.0)
        if SOFT:
            move = tl.log(tl.where(some, free, 1.0) / tl.where(some, 1.0 - held, 1.0))
        else:
            move = (held + free - 1.0) / tl.maximum(count, 1.0)
        new = tau + move
        newton = some & (new >= low) & (new <= high) & (2.0 * tl.abs(move) <= length)
        new = tl.where(newton, new, 0.5 * low + 0.5 * high)
        length = tl.abs(new - tau)
        active = (new != tau).to(tl.int32)
        tau = new
        held, free, count = _measure(z, a, b, tau, SOFT)
        active = active & (held + free != 1.0).to(tl.int32)
        step += 1
    v = _unbounded(z - tau, SOFT)
    if SOFT:
        some = (count > 0.0) & (held < 1.0)
        v = v * tl.where(some, (1.0 - held) / tl.where(some, free, 1.0), 1.0)
    else:
        v = v - (held + free - 1.0) / tl.maximum(count, 1.0) * (count > 0.0).to(x.dtype)
    p = tl.minimum(tl.maximum(v, a), b)
    p = tl.where(most <= 1.0, b, tl.where(least >= 1.0, a, p))
    p = tl.where(absent, 0.0, tl.where(feasible, p, float("nan")))
    tl.store(P + r * n + i, p, mask=i < n)


@quick
@triton.jit
def _bounded_backward(
    P, G, U, L, X, GX, GU, GL, u0, u1, l0, l1, n, SOFT: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """The formulas of ``bounds.naive_backward`` on one row."""
    r = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, N)
    at, row = r * n + i, i < n
    x = tl.load(X + at, mask=row, other=-float("inf"))
    p = tl.load(P + at, mask=row, other=0.0)
    g = tl.load(G + at, mask=row, other=0.0)
    upper = tl.load(U + r * u0 + i * u1, mask=row, other=0.0)
    lower = tl.load(L + r * l0 + i * l1, mask=row, other=0.0)
    present = x > -float("inf")
    movable = (lower < upper) & present
    place = tl.where(present, x, 0.0) - _inverse(p, SOFT)
    free = movable & (p > lower) & ((p < upper) | (upper >= 1.0))
    some = tl.max(free.to(tl.int32), 0) > 0
    at_lower = movable & (p <= lower)
    first = tl.argmax(tl.where(at_lower, place, -float("inf")), 0)
    last = tl.argmin(tl.where(movable, place, float("inf")), 0)
    pivot = tl.where(tl.max(at_lower.to(tl.int32), 0) > 0, first, last)
    pivot = tl.where(some, tl.argmax(free.to(tl.int32), 0), pivot)
    free = tl.where(some, free, movable & (i == pivot))
    tau = tl.sum(tl.where(i == pivot, place, 0.0), 0)
    weight = tl.where(free, 1.0, 0.0).to(p.dtype)
    if SOFT:
        weight = tl.where(some & free, p, weight)
    total = tl.sum(weight, 0)
    mean = tl.sum(tl.where(free, weight * g, 0.0), 0) / tl.where(total > 0.0, total, 1.0)
    held = present & (free == 0)
    fixed = movable | (tl.where(present, x, 0.0) - _inverse(upper, SOFT) > tau)
    at_upper = held & (p >= upper) & fixed
    bad = p != p
    rest = tl.where(bad, float("nan"), g - mean)
    tl.store(GX + at, tl.where(free | bad, weight * rest, 0.0), mask=row)
    tl.store(GU + at, tl.where(at_upper | bad, rest, 0.0), mask=row)
    tl.store(GL + at, tl.where((held & (at_upper == 0)) | bad, rest, 0.0), mask=row)


def _warps(n: int) -> int:
    return min(max(triton.next_power_of_2(n) // 512, 1), 16)


def _run_bounded(x: Tensor, upper: Tensor, lower: Tensor, tolerance: float, soft: bool) -> Tensor:
    x = x.contiguous()
    rows, n = x.shape
    if n > LONGEST:
        return bounds.naive(x, [upper, lower, x], [tolerance], soft)
    p = torch.empty_like(x)
    with torch.cuda.device_of(x):
        _bounded[(rows,)](
            x, upper, lower, p, *upper.stride(), *lower.stride(), n, tolerance,
            SOFT=soft, N=triton.next_power_of_2(n), num_warps=_warps(n),
        )  # fmt: skip
    return p


def _run_bounded_backward(
    p: Tensor, g: Tensor, parameters: list[Tensor], soft: bool
) -> list[Tensor]:
    rows, n = p.shape
    if n > LONGEST:
        return bounds.naive_backward(p, g, parameters, soft)
    upper, lower, x = parameters
    p, g, x = p.contiguous(), g.contiguous(), x.contiguous()
    out = [torch.empty_like(p) for _ in range(3)]
    with torch.cuda.device_of(p):
        _bounded_backward[(rows,)](
            p, g, upper, lower, x, *out, *upper.stride(), *lower.stride(), n,
            SOFT=soft, N=triton.next_power_of_2(n), num_warps=_warps(n),
        )  # fmt: skip
    return [*out, torch.zeros_like(p)]


def csparsemax(x: Tensor, parameters: list[Tensor], options: list[float]) -> Tensor:
    return _run_bounded(x, parameters[0], parameters[1], options[0], False)


def csparsemax_backward(
    p: Tensor, g: Tensor, parameters: list[Tensor], options: list[float]
) -> list[Tensor]:
    return _run_bounded_backward(p, g, parameters, False)


def csoftmax(x: Tensor, parameters: list[Tensor], options: list[float]) -> Tensor:
    return _run_bounded(x, parameters[0], parameters[1], options[0], True)


def csoftmax_backward(
    p: Tensor, g: Tensor, parameters: list[Tensor], options: list[float]
) -> list[Tensor]:
    return _run_bounded_backward(p, g, parameters, True)


def _project(y: Tensor) -> Tensor:
    """Sparsemax of rows: no bound but 0 and 1."""
    one = y.new_ones(1, 1).expand_as(y)
    return _run_bounded(y, one, y.new_zeros(1, 1).expand_as(y), 1e-6, False)


# --------------------------------------------------------------------------- fusedmax and oscarmax


@triton.jit
def _any(x):
    return tl.max(x.to(tl.int32), 0) > 0


@quick
@triton.jit
def _denoise(Y, LEAST, MOST, KNOT, SLOPE, SHIFT, STRENGTH, n, R):
    """Y ``(n, R)`` ← its total-variation denoising; see ``cpu_structured.denoise``.

    A chain ends at the end of the row and before an entry of −inf. There the walk from the left
    goes on to where the derivative is 0: the answer, and the only value allowed.
    """
    r = tl.program_id(0).to(tl.int64) * WARP + tl.arange(0, WARP)
    live = r < R
    strength = tl.load(STRENGTH)  # a tensor, since numbers are handed over in float32
    first = tl.zeros((WARP,), tl.int64) + n
    last = first - 1
    bound = tl.zeros((WARP,), tl.float64)  # of the clipped derivative: 0 at the start of a chain
    y = tl.load(Y + r, mask=live, other=-float("inf"))
    for i in range(n):
        after = tl.load(Y + (i + 1) * R + r, mask=live & (i + 1 < n), other=-float("inf"))
        here = y > -float("inf")
        end = after == -float("inf")
        x = tl.where(here, y, 0.0)
        target = tl.where(end, 0.0, -strength)

        a, c = tl.full((WARP,), 1.0, tl.float64), -bound - x
        knot = tl.load(KNOT + first * R + r, mask=here & (first <= last), other=float("inf"))
        walk = here & (a * knot + c < target)
        while _any(walk):
            a += tl.load(SLOPE + first * R + r, mask=walk, other=0.0)
            c += tl.load(SHIFT + first * R + r, mask=walk, other=0.0)
            first += walk.to(tl.int64)
            knot = tl.load(KNOT + first * R + r, mask=walk & (first <= last), other=float("inf"))
            walk = walk & (a * knot + c < target)
        left = (target - c) / a

        d, e = tl.full((WARP,), 1.0, tl.float64), bound - x
        knot = tl.load(KNOT + last * R + r, mask=here & (first <= last), other=-float("inf"))
        walk = here & (d * knot + e > strength)
        while _any(walk):
            d -= tl.load(SLOPE + last * R + r, mask=walk, other=0.0)
            e -= tl.load(SHIFT + last * R + r, mask=walk, other=0.0)
            last -= walk.to(tl.int64)
            knot = tl.load(KNOT + last * R + r, mask=walk & (first <= last), other=-float("inf"))
            walk = walk & (d * knot + e > strength)
        right = tl.where(end, left, tl.maximum(left, (strength - e) / d))

        goes_on = here & (end == 0)
        first = tl.where(goes_on, first - 1, n)
        last = tl.where(goes_on, last + 1, n - 1)
        bound = tl.where(goes_on, strength, 0.0)
        tl.store(KNOT + first * R + r, left, mask=goes_on)
        tl.store(SLOPE + first * R + r, a, mask=goes_on)
        tl.store(SHIFT + first * R + r, c + strength, mask=goes_on)
        tl.store(KNOT + last * R + r, right, mask=goes_on)
        tl.store(SLOPE + last * R + r, -d, mask=goes_on)
        tl.store(SHIFT + last * R + r, strength - e, mask=goes_on)
        tl.store(LEAST + i * R + r, left, mask=here)
        tl.store(MOST + i * R + r, right, mask=here)
        tl.debug_barrier()  # stores are read again, maybe by another thread of the warp
        y = after
    z = tl.zeros((WARP,), tl.float64)
    for j in range(n):
        i = n - 1 - j
        here = tl.load(Y + i * R + r, mask=live, other=-float("inf")) > -float("inf")
        left = tl.load(LEAST + i * R + r, mask=here, other=0.0)
        right = tl.load(MOST + i * R + r, mask=here, other=0.0)
        z = tl.minimum(tl.maximum(z, left), right)
        tl.store(Y + i * R + r, z, mask=here)


@quick
@triton.jit
def _pool(Z, SUM, COUNT, n, R):
    """Z ``(n, R)`` ← the nearest falling columns; −inf, which comes last, stays.

    A stack of blocks, merged while their means do not fall (pool adjacent violators).
    """
    r = tl.program_id(0).to(tl.int64) * WARP + tl.arange(0, WARP)
    live = r < R
    top = tl.zeros((WARP,), tl.int64) - 1
    for i in range(n):
        z = tl.load(Z + i * R + r, mask=live, other=-float("inf"))
        here = z > -float("inf")
        total, count = tl.where(here, z, 0.0), tl.full((WARP,), 1.0, tl.float64)
        merge = here & (top >= 0)
        while _any(merge):
            sums = tl.load(SUM + top * R + r, mask=merge, other=0.0)
            counts = tl.load(COUNT + top * R + r, mask=merge, other=0.0)
            merge = merge & (sums * count <= total * counts)
            total += tl.where(merge, sums, 0.0)
            count += tl.where(merge, counts, 0.0)
            top -= merge.to(tl.int64)
            merge = merge & (top >= 0)
        top += here.to(tl.int64)
        tl.store(SUM + top * R + r, total, mask=here)
        tl.store(COUNT + top * R + r, count, mask=here)
        tl.debug_barrier()  # stores are read again, maybe by another thread of the warp
    left = tl.zeros((WARP,), tl.float64)
    mean = tl.zeros((WARP,), tl.float64)
    for j in range(n):
        i = n - 1 - j
        here = tl.load(Z + i * R + r, mask=live, other=-float("inf")) > -float("inf")
        fresh = here & (left == 0.0)
        sums = tl.load(SUM + top * R + r, mask=fresh, other=0.0)
        counts = tl.load(COUNT + top * R + r, mask=fresh, other=1.0)
        mean = tl.where(fresh, sums / counts, mean)
        left = tl.where(fresh, counts, left) - here.to(tl.float64)
        top -= fresh.to(tl.int64)
        tl.store(Z + i * R + r, mean, mask=here)


@triton.jit
def _add(v, start, w, begin):
    """Sums that begin afresh at every start of a run."""
    return tl.where(begin > 0, w, v + w), start | begin


@triton.jit
def _keep(v, set, w, reset):
    """The last value that was set."""
    return tl.where(reset > 0, w, v), set | reset


@quick
@triton.jit
def _average(P, G, OUT, n, TIED: tl.constexpr, N: tl.constexpr):
    """g averaged within runs of equal p > 0, minus its mean over the support, for one row."""
    r = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, N)
    row = i < n
    p = tl.load(P + r * n + i, mask=row, other=0.0)
    before = tl.load(P + r * n + i - 1, mask=row & (i > 0), other=-1.0)
    after = tl.load(P + r * n + i + 1, mask=i + 1 < n, other=-1.0)
    support = p > 0.0
    g = tl.load(G + r * n + i, mask=row & support, other=0.0)
    mean = tl.sum(g, 0) / tl.maximum(tl.sum(support.to(p.dtype), 0), 1.0)
    out = g
    if TIED:
        start, end = (p != before).to(tl.int32), (p != after).to(tl.int32)
        sums, _ = tl.associative_scan((g, start), 0, _add)
        counts, _ = tl.associative_scan((support.to(p.dtype), start), 0, _add)
        out, _ = tl.associative_scan((sums / tl.maximum(counts, 1.0), end), 0, _keep, reverse=True)
    out = tl.where(support, out - mean, tl.where(p == p, 0.0, float("nan")))
    tl.store(OUT + r * n + i, out, mask=row)


def _side_by_side(x: Tensor) -> Tensor:
    """``(R, n)`` to a new ``(n, R)`` in float64."""
    return torch.empty(x.shape[::-1], dtype=torch.float64, device=x.device).copy_(x.t())


def _relative(x: Tensor) -> tuple[Tensor, Tensor]:
    """x − its largest entry, with 0 instead of NaN and +inf, and where those were."""
    bad = ~(x < math.inf)
    x = torch.where(bad, 0.0, x)
    peak = x.amax(-1, keepdim=True)
    return x - torch.where(peak == -math.inf, 0.0, peak), bad.any(-1, keepdim=True)


def _finish(y: Tensor, x: Tensor, bad: Tensor) -> Tensor:
    """The projection of y ``(n, R)`` in the dtype of x ``(R, n)``, NaN in bad rows."""
    y = (y - y.amax(0)).t().to(x.dtype)  # rows without entries turn NaN here, and 0 below
    p = _project(torch.where(x == -math.inf, x, y))
    return torch.where(bad & (x != -math.inf), math.nan, p)


def fusedmax(x: Tensor, parameters: list[Tensor], options: list[float]) -> Tensor:
    rows, n = x.shape
    z, bad = _relative(x)
    y = _side_by_side(z)
    least, most = torch.empty_like(y), torch.empty_like(y)
    knot, slope, shift = (y.new_empty(2 * n, rows) for _ in range(3))
    strength = y.new_full((), options[0])
    with torch.cuda.device_of(x):
        _denoise[(triton.cdiv(rows, 32),)](
            y, least, most, knot, slope, shift, strength, n, rows, num_warps=1
        )
    return _finish(y, x, bad)


def oscarmax(x: Tensor, parameters: list[Tensor], options: list[float]) -> Tensor:
    rows, n = x.shape
    z, bad = _relative(x)
    z, order = z.sort(-1, descending=True)
    y = _side_by_side(z)
    y += options[0] * torch.arange(n, dtype=y.dtype, device=y.device)[:, None]
    sums, counts = torch.empty_like(y), torch.empty_like(y)
    with torch.cuda.device_of(x):
        _pool[(triton.cdiv(rows, 32),)](y, sums, counts, n, rows, num_warps=1)
    p = _finish(y, x.gather(-1, order), bad)
    return torch.empty_like(p).scatter(-1, order, p)


def _run_average(p: Tensor, g: Tensor, strength: float) -> Tensor:
    rows, n = p.shape
    if n > LONGEST:
        return _fusedmax.naive_backward(p, g, [], [strength])[0]
    p, g = p.contiguous(), g.contiguous()
    out = torch.empty_like(p)
    with torch.cuda.device_of(p):
        _average[(rows,)](
            p, g, out, n, TIED=strength > 0, N=triton.next_power_of_2(n), num_warps=_warps(n)
        )
    return out


def fusedmax_backward(
    p: Tensor, g: Tensor, parameters: list[Tensor], options: list[float]
) -> list[Tensor]:
    return [_run_average(p, g, options[0])]


def oscarmax_backward(
    p: Tensor, g: Tensor, parameters: list[Tensor], options: list[float]
) -> list[Tensor]:
    """Sorting p makes its clusters runs."""
    ordered, order = p.sort(-1, descending=True)
    out = _run_average(ordered, g.gather(-1, order), options[0])
    return [torch.empty_like(out).scatter(-1, order, out)]
