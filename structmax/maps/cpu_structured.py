"""Kernels on the CPU for the maps with ties or bounds: fusedmax, oscarmax, csparsemax, csoftmax.

A row is worked on in float64, relative to its largest score, whatever its dtype. Scores of −inf are
absent. Functions named ``_rows`` are serial; those at the end have the names and signatures of the
recipe, and cut the batch into chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from structmax.jit import array, exp, kernel, run_chunks

INF = math.inf
LANES = 16  # rows that are sorted side by side
LONG = 8192  # rows of more entries are sorted one by one
STEPS = 200  # of a root search; seven or eight are usual


@kernel(inner=True)
def peak_of(x):
    """The largest entry (−inf if all are), or NaN if one is NaN or +inf."""
    n = x.shape[0]
    whole = n - n % 4
    a, b, c, d = x[0], x[0], x[0], x[0]  # four at a time, since each waits for the one before
    good = True
    for i in range(0, whole, 4):
        a = x[i] if x[i] > a else a
        b = x[i + 1] if x[i + 1] > b else b
        c = x[i + 2] if x[i + 2] > c else c
        d = x[i + 3] if x[i + 3] > d else d
        good &= (x[i] < INF) & (x[i + 1] < INF) & (x[i + 2] < INF) & (x[i + 3] < INF)
    for i in range(whole, n):
        a = x[i] if x[i] > a else a
        good &= x[i] < INF
    return np.float64(max(max(a, b), max(c, d))) if good else math.nan


@kernel(inner=True)
def give_up(x, p):
    """The answer to a row without entries, or with a NaN or +inf or no solution."""
    for i in range(x.shape[0]):
        p[i] = 0.0 if x[i] == -INF else math.nan


# -------------------------------------------------------------------------------------- fusedmax


@kernel(inner=True)
def denoise(y, start, stop, strength, least, most, knot, slope, shift):
    """y ← argmin over z of ½‖z − y‖² + strength Σ|zᵢ₊₁ − zᵢ| on one chain, in linear time.

    (Johnson, "A dynamic programming algorithm for the fused lasso", 2013.) Let δᵢ(z) be the least
    cost of the places up to i if place i has the value z. Its derivative grows piecewise linearly:

        δ'ᵢ₊₁(z) = z − yᵢ₊₁ + clip(δ'ᵢ(z), ±strength).

    Its knots stand in a queue, each with the change of slope and of shift that it brings. Clipping
    takes knots off both ends, up to the points ``least`` and ``most`` where δ'ᵢ is ∓strength, which
    become knots. Going back, zᵢ is the value in [leastᵢ, mostᵢ] nearest to zᵢ₊₁.
    """
    first, last = knot.shape[0] // 2, knot.shape[0] // 2 - 1  # one is added at each end per place
    low, high = 0.0, 0.0  # the clipped derivative at −inf and at +inf
    for i in range(start, stop - 1):
        a, c = 1.0, low - y[i]
        while first <= last and a * knot[first] + c < -strength:
            a += slope[first]
            c += shift[first]
            first += 1
        left = (-strength - c) / a
        d, e = 1.0, high - y[i]
        while first <= last and d * knot[last] + e > strength:
            d -= slope[last]
            e -= shift[last]
            last -= 1
        right = max(left, (strength - e) / d)
        first -= 1
        knot[first], slope[first], shift[first] = left, a, c + strength
        last += 1
        knot[last], slope[last], shift[last] = right, -d, strength - e
        least[i], most[i] = left, right
        low, high = -strength, strength
    a, c = 1.0, low - y[stop - 1]
    while first <= last and a * knot[first] + c < 0.0:
        a += slope[first]
        c += shift[first]
        first += 1
    y[stop - 1] = -c / a
    for i in range(stop - 2, start - 1, -1):
        y[i] = min(max(y[i + 1], least[i]), most[i])


@kernel(fast=True, inner=True)
def sum_above(z, count, tau):
    """Σ z and the number of z > τ, among the first ``count``."""
    total, above = 0.0, 0.0
    for k in range(count):
        total += z[k] if z[k] > tau else 0.0
        above += 1.0 if z[k] > tau else 0.0
    return total, above


@kernel(inner=True)
def project(z, kept, count, p):
    """p = [z − τ]₊ with sum 1 at the places kept, by Newton's method, which only drops places."""
    peak = -INF
    for k in range(count):
        peak = max(peak, z[k])
    for k in range(count):
        z[k] -= peak
    tau, before = -1.0, INF
    while True:
        total, above = sum_above(z, count, tau)
        if above >= before:  # where z = τ up to rounding, it might come back
            break
        tau, before = (total - 1.0) / above, above
    for k in range(count):
        p[kept[k]] = max(0.0, z[k] - tau)


@kernel
def fusedmax_rows(x, strength, p):
    """Only what can be above τ is denoised.

    The largest y is at least the largest x − 2·strength, so τ is at least ``floor``, that − 1. An
    entry below floor − 2·strength is worth less than the two steps around it, so it is below τ, and
    a neighbour above τ is pulled down by exactly ``strength``: it cuts the chain. A chain has no y
    above its largest x.
    """
    n = x.shape[1]
    y, least, most = np.empty(n), np.empty(n), np.empty(n)
    knot, slope, shift = np.empty(2 * n), np.empty(2 * n), np.empty(2 * n)
    z, kept = np.empty(n), np.empty(n, np.int64)
    floor = -2.0 * strength - 1.0
    for r in range(x.shape[0]):
        peak = peak_of(x[r])
        if not peak > -INF:
            give_up(x[r], p[r])
            continue
        count, start, top = 0, 0, -INF
        for i in range(n + 1):
            y_i = x[r, i] - peak if i < n else -INF
            if i < n and y_i >= floor - 2.0 * strength:
                y[i], top = y_i, max(top, y_i)
                p[r, i] = 0.0
                continue
            if top > floor:
                if start > 0 and x[r, start - 1] > -INF:
                    y[start] -= strength
                if y_i > -INF:
                    y[i - 1] -= strength
                denoise(y, start, i, strength, least, most, knot, slope, shift)
                for k in range(start, i):  # without a branch: which ones is hard to foresee
                    z[count], kept[count] = y[k], k
                    count += 1 if y[k] > floor else 0
            if i < n:
                p[r, i] = 0.0
            start, top = i + 1, -INF
        project(z, kept, count, p[r])


@kernel
def fusedmax_backward_rows(p, g, strength, out):
    """g averaged within runs of equal p > 0, minus its mean over the support."""
    n = p.shape[1]
    for r in range(p.shape[0]):
        total, count = 0.0, 0
        for i in range(n):
            total += g[r, i] if p[r, i] > 0.0 else 0.0
            count += 1 if p[r, i] > 0.0 else 0
        mean = total / max(count, 1)
        i = 0
        while i < n:
            if not p[r, i] > 0.0:
                out[r, i] = 0.0 if p[r, i] == 0.0 else math.nan
                i += 1
                continue
            start, total = i, 0.0
            while i < n and p[r, i] == p[r, start] and (strength > 0.0 or i == start):
                total += g[r, i]
                i += 1
            for k in range(start, i):
                out[r, k] = total / (i - start) - mean


# -------------------------------------------------------------------------------------- oscarmax


@kernel(inner=True)
def exchange(x, low, high, count):
    """The larger of each pair goes to the front."""
    if low < 0 or high < 0:  # never; but so the compiler knows, and vectorises
        return
    for t in range(count):
        a, b = x[low + t], x[high + t]
        x[low + t] = a if a > b else b
        x[high + t] = b if a > b else a


@kernel(inner=True)
def sort_lanes(x, n):
    """Sorts the columns of x ``(n · LANES)`` downwards by Batcher's odd-even merge network.

    A network does the same to every row, so rows side by side are sorted by vector instructions.
    """
    width = 1
    while width < n:
        k = width
        while k > 0:
            for j in range(k % width, n - k, 2 * k):
                if (j ^ (j + k)) < 2 * width:  # both in one piece of 2 · width
                    exchange(x, j * LANES, (j + k) * LANES, min(k, n - j - k) * LANES)
            k //= 2
        width *= 2


@kernel(inner=True)
def sort_rows(x, start, ordered):
    """Rows start … start + LANES of x, sorted downwards, as the columns of ``ordered``."""
    rows, n = min(LANES, x.shape[0] - start), x.shape[1]
    for lane in range(rows):
        if n > LONG:
            line = np.sort(x[start + lane])
            for i in range(n):
                ordered[i * LANES + lane] = line[n - 1 - i]
        else:
            for i in range(n):
                ordered[i * LANES + lane] = x[start + lane, i]
    if n <= LONG:
        sort_lanes(ordered, n)


@kernel
def oscarmax_rows(x, strength, p):
    """Sorts, pools and projects; each score then finds the block of the sorted row it is in."""
    n = x.shape[1]
    ordered = np.zeros(n * LANES, x.dtype)
    before = x.dtype.type(0)
    sums, counts, low = np.empty(n), np.empty(n), np.empty(n, x.dtype)
    for r in range(x.shape[0]):
        if r % LANES == 0:
            sort_rows(x, r, ordered)
        peak = peak_of(x[r])
        if not peak > -INF:
            give_up(x[r], p[r])
            continue
        last, total, count = -1, 0.0, 0.0  # blocks on the stack; the open one
        for i in range(n):  # pool adjacent violators: block means have to fall
            x_i = ordered[i * LANES + r % LANES]
            if x_i == -INF:
                break
            z = x_i - peak + strength * i
            if total <= z * count:
                total += z
                count += 1.0
                while last >= 0 and sums[last] * count <= total * counts[last]:
                    total += sums[last]
                    count += counts[last]
                    last -= 1
            else:
                last += 1
                sums[last], counts[last], low[last] = total, count, before
                total, count = z, 1.0
            before = x_i
        last += 1
        sums[last], counts[last], low[last] = total, count, before
        top = sums[0] / counts[0]
        total, count, blocks = 0.0, 0.0, 0
        while blocks <= last:  # blocks fall: the support is a head of them
            mean = sums[blocks] / counts[blocks] - top
            if blocks > 0 and count * mean <= total - 1.0:
                break
            total += mean * counts[blocks]
            count += counts[blocks]
            sums[blocks] = mean
            blocks += 1
        tau = (total - 1.0) / count
        for i in range(n):
            at, size = 0, blocks
            while size > 0:  # the first block whose lowest score is not above this one
                half = size // 2
                if low[at + half] > x[r, i]:
                    at += half + 1
                    size -= half + 1
                else:
                    size = half
            p[r, i] = max(0.0, sums[at] - tau) if at < blocks else 0.0


@kernel
def oscarmax_backward_rows(p, bits, g, strength, out):
    """g averaged within entries of equal p > 0, minus its mean over the support.

    Entries of equal p meet in a hash table; ``owner`` says for which row a slot was filled.
    """
    n = p.shape[1]
    size = 4
    while size < 2 * n:
        size *= 2
    owner, key = np.full(size, -1), np.empty(size, bits.dtype)
    sums, counts = np.empty(size), np.empty(size)
    slot = np.empty(n, np.int64)
    for r in range(p.shape[0]):
        total, count = 0.0, 0
        for i in range(n):
            if not p[r, i] > 0.0:
                continue
            total += g[r, i]
            count += 1
            b = np.uint64(bits[r, i])
            at = np.int64((b * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)) & (size - 1)
            while owner[at] == r and (key[at] != bits[r, i] or not strength > 0.0):
                at = (at + 1) & (size - 1)
            if owner[at] != r:
                owner[at], key[at], sums[at], counts[at] = r, bits[r, i], 0.0, 0.0
            sums[at] += g[r, i]
            counts[at] += 1.0
            slot[i] = at
        mean = total / max(count, 1)
        for i in range(n):
            if p[r, i] > 0.0:
                out[r, i] = sums[slot[i]] / counts[slot[i]] - mean
            else:
                out[r, i] = 0.0 if p[r, i] == 0.0 else math.nan


# ------------------------------------------------------------------------ csparsemax and csoftmax


@kernel(inner=True)
def inverse(p, soft):
    """The z at which p is reached without bounds."""
    return math.log(p) if soft else p


@kernel(fast=True, inner=True)
def measure(z, a, b, tau, soft):
    """Σ p of entries at a bound, and Σ v and the count of those between, for v = v(z − τ)."""
    held, free, count = 0.0, 0.0, 0.0
    for i in range(z.shape[0]):
        v = exp(min(z[i] - tau, 0.0)) if soft else z[i] - tau  # no upper bound exceeds 1
        v = min(max(v, a[i]), b[i])
        inside = (a[i] < v) & (v < b[i])
        held += 0.0 if inside else v
        free += v if inside else 0.0
        count += 1.0 if inside else 0.0
    return held, free, count


@kernel
def bounded_rows(x, upper, lower, tolerance, soft, p):
    """p = clip(v(x − τ), lower, upper) with v the identity or exp: finds τ by a bracketed Newton.

    A Newton step solves for τ on the entries that are now between their bounds. One that leaves the
    bracket, or is not half as long as the one before, is replaced by halving the bracket.
    """
    n = x.shape[1]
    z, a, b = np.empty(n), np.empty(n), np.empty(n)
    for r in range(x.shape[0]):
        peak = peak_of(x[r])
        least, most, tau_low, tau_high = 0.0, 0.0, INF, -INF
        good = peak > -INF
        for i in range(n):
            z[i], a[i], b[i] = 0.0, 0.0, 0.0
            if x[r, i] == -INF:
                good &= lower[r, i] == 0.0
                continue
            z[i], a[i], b[i] = x[r, i] - peak, lower[r, i], min(upper[r, i], 1.0)
            good &= (a[i] >= 0.0) & (a[i] <= b[i])
            least += a[i]
            most += b[i]
            tau_low = min(tau_low, z[i] - inverse(b[i], soft))
            tau_high = max(tau_high, z[i] if soft else z[i] - a[i])
        if not (good and most >= 1.0 - tolerance and least <= 1.0 + tolerance):
            give_up(x[r], p[r])
            continue
        if most <= 1.0 or least >= 1.0:
            for i in range(n):
                p[r, i] = b[i] if most <= 1.0 else a[i]
            continue
        if soft:  # beyond this the free entries together are below 1 − least
            tau_high += math.log(n / (1.0 - least))
        tau = min(max(0.0 if soft else -1.0, tau_low), tau_high)
        length = tau_high - tau_low
        held, free, count = 0.0, 0.0, 0.0
        for step in range(STEPS):
            held, free, count = measure(z, a, b, tau, soft)
            if held + free > 1.0:
                tau_low = tau
            else:
                tau_high = tau
            move = INF
            if count > 0.0 and held < 1.0:
                move = math.log(free / (1.0 - held)) if soft else (held + free - 1.0) / count
            new = tau + move
            if not (tau_low <= new <= tau_high and 2.0 * abs(move) <= length):
                new = 0.5 * (tau_low + tau_high)
            length = abs(new - tau)
            if abs(held + free - 1.0) <= 4e-16 or length <= 4e-16 * abs(tau) or step == STEPS - 1:
                break
            tau = new
        # The last step is not taken by τ, which would round it, but by p.
        move = 0.0 if soft or count == 0.0 else (held + free - 1.0) / count
        scale = (1.0 - held) / free if soft and count > 0.0 and held < 1.0 else 1.0
        for i in range(n):
            v = scale * exp(min(z[i] - tau, 0.0)) if soft else z[i] - tau - move
            p[r, i] = min(max(v, a[i]), b[i])


@kernel(inner=True)
def is_free(p, upper, lower):
    """Between the bounds; p = 1 is where it is because the others are 0, not by its bound."""
    return p > lower and (p < upper or upper >= 1.0) and lower < upper


@kernel(inner=True)
def find_pivot(p, upper, lower, x, soft):
    """The entry that is freed first if bounds shrink, or -1: at its lower bound, or else upper."""
    pivot, best = -1, INF
    for at_lower in (True, False):
        for i in range(p.shape[0]):
            if x[i] > -INF and lower[i] < upper[i] and (p[i] <= lower[i]) == at_lower:
                z = x[i] - inverse(np.float64(p[i]), soft)
                z = -z if at_lower else z
                if pivot < 0 or z < best:
                    pivot, best = i, z
        if pivot >= 0:
            break
    return pivot


@kernel
def bounded_backward_rows(p, g, upper, lower, x, soft, g_x, g_upper, g_lower):
    """The formulas of ``bounds.naive_backward``."""
    n = p.shape[1]
    for r in range(p.shape[0]):
        weight, total, pivot, lonely = 0.0, 0.0, -1, False
        for i in range(n):
            g_x[r, i], g_upper[r, i], g_lower[r, i] = 0.0, 0.0, 0.0
            if is_free(p[r, i], upper[r, i], lower[r, i]):
                w = np.float64(p[r, i]) if soft else 1.0
                weight, total, pivot = weight + w, total + w * g[r, i], i
        if pivot < 0:
            pivot, lonely = find_pivot(p[r], upper[r], lower[r], x[r], soft), True
            if pivot >= 0:
                weight, total = 1.0, np.float64(g[r, pivot])
        mean = total / weight if weight > 0.0 else 0.0
        tau = x[r, pivot] - inverse(np.float64(p[r, pivot]), soft) if pivot >= 0 else 0.0
        for i in range(n):
            a, b, q = lower[r, i], upper[r, i], p[r, i]
            if q != q:
                g_x[r, i], g_upper[r, i], g_lower[r, i] = math.nan, math.nan, math.nan
            elif x[r, i] == -INF or (lonely and i == pivot):
                continue
            elif is_free(q, b, a):
                g_x[r, i] = (g[r, i] - mean) * (np.float64(q) if soft else 1.0)
            elif q >= b and (a < b or x[r, i] - inverse(np.float64(b), soft) > tau):
                g_upper[r, i] = g[r, i] - mean
            else:
                g_lower[r, i] = g[r, i] - mean


# ------------------------------------------------------------------------------------------- ops


def _run(rows: Callable[..., None], arrays: list[NDArray], rest: tuple, outs: int) -> list[Tensor]:
    """``rows(*arrays, *rest, *outs)`` over chunks of rows, into new arrays like the first."""
    out = [torch.from_numpy(np.empty_like(arrays[0])) for _ in range(outs)]
    all_of_them = [*arrays, *(t.numpy() for t in out)]
    items, n = arrays[0].shape

    def task(low: int, high: int) -> None:
        chunk = [a[low:high] for a in all_of_them]
        rows(*chunk[: len(arrays)], *rest, *chunk[len(arrays) :])

    run_chunks(task, items, 8 * n)
    return out


def fusedmax(x: Tensor, parameters: list[Tensor], options: list[float]) -> Tensor:
    return _run(fusedmax_rows, [array(x)], (options[0],), 1)[0]


def fusedmax_backward(
    p: Tensor, g: Tensor, parameters: list[Tensor], options: list[float]
) -> list[Tensor]:
    return _run(fusedmax_backward_rows, [array(p), array(g)], (options[0],), 1)


def oscarmax(x: Tensor, parameters: list[Tensor], options: list[float]) -> Tensor:
    return _run(oscarmax_rows, [array(x)], (options[0],), 1)[0]


def oscarmax_backward(
    p: Tensor, g: Tensor, parameters: list[Tensor], options: list[float]
) -> list[Tensor]:
    probs = array(p)
    bits = probs.view(np.uint32 if probs.dtype == np.float32 else np.uint64)
    return _run(oscarmax_backward_rows, [probs, bits, array(g)], (options[0],), 1)


def _bounded(x: Tensor, parameters: list[Tensor], options: list[float], soft: bool) -> Tensor:
    upper, lower, _ = parameters
    arrays = [array(t) for t in (x, upper, lower)]
    return _run(bounded_rows, arrays, (options[0], soft), 1)[0]


def _bounded_backward(p: Tensor, g: Tensor, parameters: list[Tensor], soft: bool) -> list[Tensor]:
    arrays = [array(t) for t in (p, g, *parameters)]
    out = _run(bounded_backward_rows, [arrays[0], arrays[1], *arrays[2:]], (soft,), 3)
    return [*out, torch.zeros_like(p)]


def csparsemax(x: Tensor, parameters: list[Tensor], options: list[float]) -> Tensor:
    return _bounded(x, parameters, options, False)


def csparsemax_backward(
    p: Tensor, g: Tensor, parameters: list[Tensor], options: list[float]
) -> list[Tensor]:
    return _bounded_backward(p, g, parameters, False)


def csoftmax(x: Tensor, parameters: list[Tensor], options: list[float]) -> Tensor:
    return _bounded(x, parameters, options, True)


def csoftmax_backward(
    p: Tensor, g: Tensor, parameters: list[Tensor], options: list[float]
) -> list[Tensor]:
    return _bounded_backward(p, g, parameters, True)
