"""The kernels of the maps on the CPU, compiled by numba.

No row is sorted. A row keeps what can be in its support (scores within 1/(α−1) of the peak), as
float64 differences z ≤ 0 to the peak; a root search on the threshold shrinks that list and ends in
closed form or to the last bit; its answer is scattered over zeros. Sums are float64 whatever the
scores are. Rows run in chunks on the threads of ``jit.run_chunks``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from structmax.jit import array, exp, kernel, log, run_chunks

INF = math.inf


@kernel(inner=True)
def peak_of(x, bits, spot):
    """The largest score, −inf if there is none, NaN if one is NaN or +inf.

    Compares the bits as integers, which vectorises: of negative numbers all but the sign flips.
    """
    zero, one = bits.dtype.type(0), bits.dtype.type(1)
    flip = bits.dtype.type(~(one << bits.dtype.type(8 * bits.itemsize - 1)))
    top, bad = bits.dtype.type(~flip), zero
    for i in range(x.shape[0]):
        key = bits[i] if bits[i] >= zero else bits[i] ^ flip
        top = key if key > top else top
        bad |= zero if x[i] < INF else one
    if bad:
        return np.nan
    spot.view(bits.dtype)[0] = top if top >= zero else top ^ flip
    return np.float64(spot[0])


@kernel(inner=True)
def fill(p, x, value):
    """``value`` at every entry that is not −inf, 0 there."""
    for i in range(x.shape[0]):
        p[i] = 0.0 if x[i] == -INF else value


@kernel(inner=True)
def drop(z, index, count, limit):
    """Keeps the entries above the limit. Returns their count."""
    kept = 0
    for i in range(count):
        here = z[i]
        z[kept], index[kept] = here, index[i]
        kept += 1 if here > limit else 0
    return kept


@kernel(inner=True)
def gather(x, peak, radius, p, z, index):
    """z = x − peak of the entries above −radius with their places; zeros p. Returns the count."""
    n, count = x.shape[0], 0
    whole = n - n % 16
    limit = x.dtype.type(peak - radius)
    limit -= abs(limit) * x.dtype.type(1e-6)  # in doubt an entry stays, until z is known
    for i in range(n):
        p[i] = 0.0
    for start in range(0, whole, 16):
        hits = np.int32(0)
        for i in range(16):
            hits += np.int32(1) if x[start + i] > limit else np.int32(0)
        if hits > 3:  # a branch for each entry would be guessed wrong too often
            for i in range(start, start + 16):
                z[count], index[count] = np.float64(x[i]) - peak, i
                count += 1 if x[i] > limit else 0
        elif hits:
            for i in range(start, start + 16):
                if x[i] > limit:
                    z[count], index[count] = np.float64(x[i]) - peak, i
                    count += 1
    for i in range(whole, n):
        if x[i] > limit:
            z[count], index[count] = np.float64(x[i]) - peak, i
            count += 1
    return drop(z, index, count, -radius)


@kernel(inner=True, fast=True)
def total_of(z, count):
    s = 0.0
    for i in range(count):
        s += np.float64(z[i])
    return s


@kernel(inner=True, fast=True)
def mass_above(z, count, tau):
    s = 0.0
    for i in range(count):
        s += max(z[i] - tau, 0.0)
    return s


@kernel(inner=True)
def sparsemax_row(z, index, count):
    """z ← [z − τ]₊ (Michelot 1986): τ of all that is left is too low; drop what is below it.

    A long row may need many rounds; bisection then helps. Returns the size of the support.
    """
    high, rounds = 0.0, 0
    while True:
        tau = (total_of(z, count) - 1.0) / count
        if rounds > 10:
            middle = 0.5 * (tau + high)
            if mass_above(z, count, middle) >= 1.0:
                tau = middle
            else:
                high = middle
        kept = drop(z, index, count, tau)
        if kept == count:
            break
        count, rounds = kept, rounds + 1
    tau = (total_of(z, count) - 1.0) / count
    for i in range(count):
        z[i] -= tau
    rest = (total_of(z, count) - 1.0) / count  # what rounding left of τ
    for i in range(count):
        z[i] = max(z[i] - rest, 0.0)
    return count


@kernel(inner=True, fast=True)
def moments(z, count, shift):
    """Σu and Σu² of u = z + shift."""
    first, second = 0.0, 0.0
    for i in range(count):
        u = z[i] + shift
        first += u
        second += u * u
    return first, second


@kernel(inner=True)
def least_of(z, count):
    low = z[0]
    for i in range(1, count):
        low = z[i] if z[i] < low else low
    return low


@kernel(inner=True)
def entmax15_row(z, index, count):
    """z ← p = [z/2 + T]₊² by Newton on ‖u‖ = 1, u = z/2 + T, which stays above the root.

    On the right support the T of Σu² = 1 is a root of a quadratic. Returns the support's size.
    """
    for i in range(count):
        z[i] *= 0.5
    T = 1.0
    for _ in range(200):
        first, second = moments(z, count, T)
        square = first * first - count * (second - 1.0)
        if square >= 0.0:
            step = (1.0 - second) / (first + math.sqrt(square))
            if least_of(z, count) + T + step >= 0.0:
                T += step
                break
        norm = math.sqrt(second)
        step = norm * (1.0 - norm) / first
        if not step < 0.0:
            break
        T += step
        count = drop(z, index, count, -T)
    for i in range(count):
        z[i] += T
    first, second = moments(z, count, 0.0)
    rest = (1.0 - second) / (first + math.sqrt(max(first * first - count * (second - 1.0), 0.0)))
    for i in range(count):
        u = max(z[i] + rest, 0.0)
        z[i] = u * u
    return count


@kernel(inner=True)
def kept_mass(epsilon, level):
    """(1 − M^{−ε})/ε for level = log M."""
    return level if epsilon == 0.0 else -math.expm1(-epsilon * level) / epsilon


@kernel(inner=True, fused=True)
def powers(z, count, level, epsilon, u, p):
    """u = 1 + ε(z − λ) and p = u^{1/ε}. The logarithm is taken of 1 + y without losing y."""
    one, tiny = z.dtype.type(1), z.dtype.type(1e-30 if z.itemsize == 4 else 1e-300)
    level, epsilon = z.dtype.type(level), z.dtype.type(epsilon)
    for i in range(count):
        v = one + epsilon * (z[i] - level)
        u[i] = v if v > tiny else tiny
    whole = int(1.0 / epsilon + 0.5)
    if epsilon * whole == one and whole <= 8:  # a few products instead of exponentials
        for i in range(count):
            p[i] = u[i]
        for _ in range(whole - 1):
            for i in range(count):
                p[i] *= u[i]
        return
    for i in range(count):
        p[i] = log(u[i])
    for i in range(count):
        y = u[i] - one
        ratio = p[i] / y
        p[i] = (z[i] - level) * (ratio if y != 0 else one)
    for i in range(count):
        p[i] = exp(p[i])


@kernel(inner=True, fast=True)
def sums(u, p, count):
    """M = Σp and S = Σp/u, what M loses as λ grows."""
    mass, slope = 0.0, 0.0
    for i in range(count):
        mass += np.float64(p[i])
        slope += np.float64(p[i] / u[i])
    return mass, slope


@kernel(inner=True)
def entmax_row(z, index, count, epsilon, u, p):
    """z ← p = [1 + ε(z − λ)]₊^{1/ε} for 0 < ε < 1, in the dtype of z.

    Newton on M^ε = 1, M = Σp: the norm ‖u‖ of exponent 1/ε is convex in λ, so that λ grows to the
    root, and what it has passed is out for good. Returns the size of the support.
    """
    level = 0.0
    tolerance = 1e-4 if z.itemsize == 4 else 1e-9  # a last step of first order squares it
    for _ in range(200):
        powers(z, count, level, epsilon, u, p)
        mass, slope = sums(u, p, count)
        step = mass * kept_mass(epsilon, math.log(mass)) / slope
        if mass - 1.0 <= tolerance or not step > 0.0:
            break
        level += step
        count = drop(z, index, count, level - 1.0 / epsilon)
    linear = z.dtype.type(step)
    for i in range(count):
        here = p[i] - linear * (p[i] / u[i])
        p[i] = here if here > 0 else z.dtype.type(0)
    scale = z.dtype.type(1.0 / total_of(p, count))
    for i in range(count):
        z[i] = p[i] * scale
    return count


@kernel(inner=True, fused=True)
def root_mass(w, count, T, power, p):
    """Σ [w + T]₊^power."""
    kept = 0
    for i in range(count):
        p[kept] = w[i] + T
        kept += 1 if p[kept] > 0.0 else 0
    mass = 0.0
    for i in range(kept):
        mass += exp(log(p[i]) * power)
    return mass


@kernel(inner=True)
def steep_row(z, index, count, epsilon, u, p):
    """p = [w + T]₊^{1/ε}, w = εz, for ε > 1, where p leaves 0 with infinite slope.

    First the support: T lies between two entries of −w, found by evaluating M = Σp there. Then,
    with r the p of the last entry e, p = (w − w_e + r^ε)^{1/ε} is convex in r and Newton comes down
    to Σp = 1 from r = 1/count, precise however close to its edge e lies.
    """
    power = 1.0 / epsilon
    for i in range(count):
        z[i] *= epsilon
    low, high = math.exp(-epsilon * math.log(count)), 1.0  # M ≤ 1 and M ≥ 1
    for turn in range(400):
        inside, total, first, last = 0, 0.0, INF, -INF
        for i in range(count):
            t = -z[i]
            if low < t < high:
                inside += 1
                total += t
                first, last = min(first, t), max(last, t)
        if inside == 0:
            break
        T = total / inside if turn % 2 == 0 else 0.5 * (low + high)
        T = min(max(T, first), last)
        if root_mass(z, count, T, power, p) < 1.0:
            low = T
        else:
            high = T
            count = drop(z, index, count, -high)
    edge = INF
    kept = 0
    for i in range(count):
        if -z[i] <= low:
            z[kept], index[kept] = z[i], index[i]
            edge = min(edge, z[i])
            kept += 1
    count = kept
    r = 1.0 / count
    for _ in range(100):
        lift = math.exp(epsilon * math.log(r)) if r > 0.0 else 0.0
        lift = lift if lift > 1e-300 else 0.0
        for i in range(count):
            c = z[i] - edge
            p[i] = math.exp(power * math.log(c + lift)) if c > 0.0 else r
            u[i] = (r / p[i]) ** (epsilon - 1.0) if c > 0.0 else 1.0
        mass = total_of(p, count)
        step = (mass - 1.0) / total_of(u, count)
        if not step > 2e-16 * r:
            break
        r = max(r - step, 0.0)
    for i in range(count):
        z[i] = p[i] / mass
    return count


@kernel(inner=True, fast=True)
def softmax_row(x, peak, p):
    for i in range(x.shape[0]):
        p[i] = exp(x[i] - x.dtype.type(peak))
    total = 0.0
    for i in range(x.shape[0]):
        total += np.float64(p[i])
    scale = x.dtype.type(1.0 / total)
    for i in range(x.shape[0]):
        p[i] *= scale


@kernel(inner=True)
def solve_row(x, bits, a, p, z, index, work, spot):
    """p = entmax of one row. Returns its peak; z ``(3, n + 1)``, index, work and spot are room."""
    peak = peak_of(x, bits, spot)
    if peak == -INF or not peak < INF or not 1.0 <= a < INF:
        fill(p, x, 0.0 if peak == -INF else np.nan)
        return peak
    if a == 1.0:
        softmax_row(x, peak, p)
        return peak
    radius = 1.0 / (a - 1.0)
    if a < 2.0 and a != 1.5:
        count = gather(x, peak, radius, p, work[0], index)
        count = entmax_row(work[0], index, count, a - 1.0, work[1], work[2])
        for i in range(count):
            p[index[i]] = work[0, i]
        return peak
    count = gather(x, peak, radius, p, z[0], index)
    if a == 2.0:
        count = sparsemax_row(z[0], index, count)
    elif a == 1.5:
        count = entmax15_row(z[0], index, count)
    else:
        count = steep_row(z[0], index, count, a - 1.0, z[1], z[2])
    for i in range(count):
        p[index[i]] = z[0, i]
    return peak


@kernel
def entmax_rows(x, bits, alpha, p, low, high):
    """Rows low..high of entmax; alpha has one entry for each row, or one for all."""
    n = x.shape[1]
    z, index = np.empty((3, n + 1)), np.empty(n + 1, np.int32)
    work, spot = np.empty((3, n + 1), x.dtype), np.empty(1, x.dtype)
    for row in range(low, high):
        a = alpha[row if alpha.shape[0] > 1 else 0]
        solve_row(x[row], bits[row], a, p[row], z, index, work, spot)


@kernel
def normmax_rows(x, bits, alpha, p, low, high):
    """Rows low..high of normmax: u^{α/(α−1)} is the entmax of αx/(α−1) with 2 − 1/α."""
    n = x.shape[1]
    z, u, q = np.empty(n + 1), np.empty(n + 1), np.empty(n + 1)
    index = np.empty(n + 1, np.int32)
    epsilon = 1.0 - 1.0 / alpha
    spot = np.empty(1, x.dtype)
    for row in range(low, high):
        peak = peak_of(x[row], bits[row], spot)
        if peak == -INF or not peak < INF:
            fill(p[row], x[row], 0.0 if peak == -INF else np.nan)
            continue
        count = gather(x[row], peak, 1.0, p[row], z, index)
        for i in range(count):
            z[i] /= epsilon
        if epsilon == 0.5:
            count = entmax15_row(z, index, count)
        else:
            count = entmax_row(z, index, count, epsilon, u, q)
        for i in range(count):
            z[i] = z[i] ** (1.0 / alpha)
        total = total_of(z, count)
        for i in range(count):
            p[row, index[i]] = z[i] / total


@kernel(inner=True, fast=True)
def clipped(z, count, tau):
    """Σ of z − τ clipped to [0, 1], and how many are inside."""
    mass, inside = 0.0, 0
    for i in range(count):
        v = z[i] - tau
        inside += 1 if (v > 0.0) & (v < 1.0) else 0
        mass += min(max(v, 0.0), 1.0)
    return mass, inside


@kernel(inner=True)
def budget_row(z, count, k):
    """z ← z − τ clipped to [0, 1] with sum k: Newton on a piecewise linear function, in a bracket.

    A last step from the shifted row removes what rounding left of a large τ.
    """
    low, high = least_of(z, count) - 1.0, 0.0
    tau, before = 0.5 * (low + high), high - low
    for _ in range(2000):
        mass, inside = clipped(z, count, tau)
        if mass >= k:
            low = max(low, tau)
        else:
            high = min(high, tau)
        new = tau + (mass - k) / inside if inside > 0 else 0.5 * (low + high)
        if not low <= new <= high or abs(new - tau) > 0.5 * before:
            new = 0.5 * (low + high)
        before = abs(new - tau)
        if new == tau or mass == k:
            break
        tau = new
    for i in range(count):
        z[i] -= tau
    for _ in range(3):
        mass, inside = clipped(z, count, 0.0)
        step = (k - mass) / inside if inside > 0 else 0.0
        for i in range(count):
            z[i] += step
    for i in range(count):
        z[i] = min(max(z[i], 0.0), 1.0)


@kernel
def budgetmax_rows(x, bits, k, p, low, high):
    """Rows low..high of budgetmax; NaN where fewer than k entries are there."""
    n = x.shape[1]
    z, index = np.empty(n + 1), np.empty(n + 1, np.int32)
    spot = np.empty(1, x.dtype)
    for row in range(low, high):
        peak = peak_of(x[row], bits[row], spot)
        if peak == -INF or not peak < INF:
            fill(p[row], x[row], 0.0 if peak == -INF else np.nan)
            continue
        count = 0
        for i in range(n):
            z[count], index[count] = np.float64(x[row, i]) - peak, i
            count += 1 if x[row, i] > -INF else 0
            p[row, i] = 0.0
        if k >= count:
            fill(p[row], x[row], 1.0 if k == count else np.nan)
            continue
        budget_row(z, count, k)
        for i in range(count):
            p[row, index[i]] = z[i]


@kernel(inner=True)
def has_nan(p):
    bad = np.int32(0)
    for i in range(p.shape[0]):
        bad |= np.int32(0) if p[i] == p[i] else np.int32(1)
    return bad != 0


@kernel(inner=True, fast=True)
def center(p, g, upper, out):
    """out = g − its mean where 0 < p < upper, 0 elsewhere."""
    total, count = 0.0, 0
    for i in range(p.shape[0]):
        inside = (p[i] > 0) & (p[i] < upper)
        total += np.float64(g[i]) if inside else 0.0
        count += 1 if inside else 0
    mean = p.dtype.type(total / max(count, 1))
    for i in range(p.shape[0]):
        out[i] = g[i] - mean if (p[i] > 0) & (p[i] < upper) else p.dtype.type(0)


@kernel
def center_rows(p, g, upper, out, low, high):
    for row in range(low, high):
        if has_nan(p[row]):
            for i in range(p.shape[1]):
                out[row, i] = 0.0 if p[row, i] == 0 else np.nan
        else:
            center(p[row], g[row], upper, out[row])


@kernel(inner=True, fused=True)
def curvature(p, alpha, s):
    """s = p^{2−α} on the support, 0 elsewhere; where it would overflow, a large number."""
    limit = 1e30 if p.itemsize == 4 else 1e300
    if alpha == 1.0:
        for i in range(p.shape[0]):
            s[i] = p[i]
    elif alpha == 1.5:
        for i in range(p.shape[0]):
            s[i] = math.sqrt(p[i])
    elif alpha < 2.0:
        for i in range(p.shape[0]):
            here = p[i] > 0
            y = exp((2.0 - alpha) * log(p[i] if here else p.dtype.type(1)))
            s[i] = y if here else 0.0
    else:
        for i in range(p.shape[0]):
            s[i] = min(np.float64(p[i]) ** (2.0 - alpha), limit) if p[i] > 0 else 0.0


@kernel(inner=True)
def within(y, last):
    """y, or ±last if it is beyond; NaN stays NaN."""
    return last if y > last else -last if y < -last else y


@kernel(inner=True, fast=True)
def weighted(s, g, base, shift):
    """Σs and Σs(g − base), with s scaled by a common factor."""
    total, mean = 0.0, 0.0
    for i in range(g.shape[0]):
        total += s[i] * shift
        mean += (s[i] * shift) * (np.float64(g[i]) - base)
    return total, mean


@kernel(inner=True)
def second_order(p, epsilon):
    """r = p (e^y − 1 − y)/ε² with y = −ε log p ≥ 0, its limit p (log p)²/2 at ε = 0."""
    level = math.log(p)
    y = -epsilon * level
    if y > 1.0:
        return (math.exp(level + y) - p * (1.0 + y)) / (epsilon * epsilon)
    term, total = 0.5, 0.5
    for k in range(3, 20):
        term *= y / k
        total += term
    return p * level * level * total


@kernel
def entmax_backward_rows(p, g, alpha, out, slope, low, high):
    """g_x = s(g − ḡ) with ḡ the mean of g under s, and −Σ r(g − ḡ) into slope unless it is empty.

    For α > 2 an entry of small p has an s that dwarfs the others; its gradient is read off
    Σ g_x = 0. What is beyond the range of the dtype is its last number, in g as well: in a second
    derivative, the difference of two infinite terms would be NaN.
    """
    n = p.shape[1]
    s, h = np.empty(n), np.empty(n)
    last = 3.4028234663852886e38 if p.itemsize == 4 else 1.7976931348623157e308
    for row in range(low, high):
        a = alpha[row if alpha.shape[0] > 1 else 0]
        if has_nan(p[row]):
            for i in range(n):
                out[row, i] = 0.0 if p[row, i] == 0 else np.nan
            if slope.shape[0] > 0:
                slope[row] = np.nan
            continue
        curvature(p[row], a, s)
        base = 0.0
        if a > 2.0:
            top, rest = 0, 0.0
            for i in range(n):
                h[i] = within(np.float64(g[row, i]), last)
                top = i if s[i] > s[top] else top
            base = h[top]
            total, mean = weighted(s, h, base, 1.0 / s[top] if s[top] > 1.0 else 1.0)
            mean = mean / total if total > 0.0 else 0.0
            for i in range(n):
                y = within(s[i] * ((h[i] - base) - mean), last)
                out[row, i] = y
                rest += y if i != top else 0.0
            out[row, top] = within(-rest, last)
        else:
            total, mean = weighted(s, g[row], base, 1.0)
            mean = mean / total if total > 0.0 else 0.0
            for i in range(n):
                out[row, i] = s[i] * (np.float64(g[row, i]) - mean)
        if slope.shape[0] > 0:
            total = 0.0
            for i in range(n):
                if p[row, i] > 0:
                    centered = (np.float64(g[row, i]) - base) - mean
                    if a > 2.0:
                        y = (1.0 - a) * math.log(p[row, i])
                        total += p[row, i] * (1.0 + y) * centered / (a - 1.0) ** 2
                    else:
                        total -= second_order(np.float64(p[row, i]), a - 1.0) * centered
            slope[row] = total


@kernel
def normmax_backward_rows(p, g, alpha, out, low, high):
    """(N/(α−1)) (t − pΣt), t = (p/N)^{2−α}(g − ⟨p, g⟩), N = ‖p‖_α."""
    n = p.shape[1]
    for row in range(low, high):
        if has_nan(p[row]):
            for i in range(n):
                out[row, i] = 0.0 if p[row, i] == 0 else np.nan
            continue
        power, mean = 0.0, 0.0
        for i in range(n):
            if p[row, i] > 0:
                power += np.float64(p[row, i]) ** alpha
                mean += np.float64(p[row, i]) * np.float64(g[row, i])
        norm = power ** (1.0 / alpha)
        scale, total = norm / (alpha - 1.0), 0.0
        for i in range(n):
            t = 0.0
            if p[row, i] > 0:
                t = (np.float64(p[row, i]) / norm) ** (2.0 - alpha) * (g[row, i] - mean)
            out[row, i] = t * scale
            total += t * scale
        for i in range(n):
            out[row, i] -= p[row, i] * total


def _forward(x: Tensor, solve: Callable[..., None], argument: object) -> Tensor:
    """Runs ``solve(x, bits, argument, p, low, high)`` over chunks of rows."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, p = array(x), out.numpy()
    bits = rows.view(np.int32 if rows.itemsize == 4 else np.int64)

    def task(low: int, high: int) -> None:
        solve(rows, bits, argument, p, low, high)

    run_chunks(task, len(rows), rows.shape[1])
    return out


def _alpha(parameters: list[Tensor], options: list[float]) -> NDArray:
    return array(parameters[0].double()).reshape(-1) if parameters else np.array(options[:1])


def entmax(x: Tensor, parameters: list[Tensor], options: list[float]) -> Tensor:
    return _forward(x, entmax_rows, _alpha(parameters, options))


def entmax_backward(
    p: Tensor, g: Tensor, parameters: list[Tensor], options: list[float]
) -> list[Tensor]:
    out = torch.empty_like(p, memory_format=torch.contiguous_format)
    alpha = _alpha(parameters, options)
    slope = np.empty(len(p) if parameters else 0)
    rows, against, result = array(p), array(g), out.numpy()

    def task(low: int, high: int) -> None:
        entmax_backward_rows(rows, against, alpha, result, slope, low, high)

    run_chunks(task, len(rows), rows.shape[1])
    return [out, *(torch.from_numpy(slope).to(a.dtype).view(-1, 1) for a in parameters)]


def softmax(x: Tensor, parameters: list[Tensor], options: list[float]) -> Tensor:
    return entmax(x, [], [1.0])


def softmax_backward(
    p: Tensor, g: Tensor, parameters: list[Tensor], options: list[float]
) -> list[Tensor]:
    return entmax_backward(p, g, [], [1.0])


def sparsemax(x: Tensor, parameters: list[Tensor], options: list[float]) -> Tensor:
    return entmax(x, [], [2.0])


def _center(p: Tensor, g: Tensor, upper: float) -> list[Tensor]:
    out = torch.empty_like(p, memory_format=torch.contiguous_format)
    rows, against, result = array(p), array(g), out.numpy()

    def task(low: int, high: int) -> None:
        center_rows(rows, against, upper, result, low, high)

    run_chunks(task, len(rows), rows.shape[1])
    return [out]


def sparsemax_backward(
    p: Tensor, g: Tensor, parameters: list[Tensor], options: list[float]
) -> list[Tensor]:
    return _center(p, g, 2.0)


def budgetmax(x: Tensor, parameters: list[Tensor], options: list[float]) -> Tensor:
    return _forward(x, budgetmax_rows, options[0])


def budgetmax_backward(
    p: Tensor, g: Tensor, parameters: list[Tensor], options: list[float]
) -> list[Tensor]:
    return _center(p, g, 1.0)


def normmax(x: Tensor, parameters: list[Tensor], options: list[float]) -> Tensor:
    return _forward(x, normmax_rows, options[0])


def normmax_backward(
    p: Tensor, g: Tensor, parameters: list[Tensor], options: list[float]
) -> list[Tensor]:
    out = torch.empty_like(p, memory_format=torch.contiguous_format)
    rows, against, result = array(p), array(g), out.numpy()

    def task(low: int, high: int) -> None:
        normmax_backward_rows(rows, against, options[0], result, low, high)

    run_chunks(task, len(rows), 4 * rows.shape[1])
    return [out]
