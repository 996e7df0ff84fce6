"""Subsets of a bounded size on the CPU: the recursion over (position, count) in log space.

Rows of V are indexed by the count plus one, so that "count − 1" always exists; entry 0 stands for
no count and holds −inf. Everything is computed in float64. The scores of taking are shifted by
about the least one that an optimal subset takes, since then V stays small; a subset of j elements
gets the shift back at the end. What then scores above ``FAR`` is in every subset whose probability
is a number above 0, and what scores below −``FAR`` is in none. They are forced and forbidden, so
that a large score costs no digits of the others.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structmax.jit import array, exp, kernel, log, run_chunks

INF = math.inf
FAR = 800.0  # exp(−FAR) is 0


@kernel(inner=True)
def _relative(take: Any, skip: Any, n: int, least: int, most: int, near: Any, leave: Any) -> Any:
    """Scores of taking and of leaving by which subsets are compared, in ``near`` and ``leave``.

    Returns what A gains by it, the shift, and the best count: a subset of another count gets the
    shift so many times more or fewer. What A gains is NaN if a score is NaN or +inf.
    """
    free, forced, above, base = 0, 0, 0, 0.0
    for i in range(n):
        if not take[i] < INF:
            return math.nan, 0.0, 0
        if skip[i] == -INF:
            forced += 1
            base += take[i]
        elif take[i] > -INF:
            near[free] = take[i]
            free += 1
            above += 1 if take[i] > 0.0 else 0
    taken = min(max(above, least - forced), max(most - forced, 0), free)
    shift = 0.0
    if taken > 0 and taken != above:
        shift = np.sort(near[:free])[free - taken]
    count = taken
    for i in range(n):
        x = take[i] - shift
        near[i], leave[i] = x, skip[i]
        if skip[i] == -INF:
            near[i] = 0.0 if x > -INF else -INF
        elif x > FAR and taken > 0:
            near[i], leave[i] = 0.0, -INF
            base += take[i]
            count -= 1
        elif x < -FAR:
            near[i] = -INF
    return base + count * shift, shift, forced + taken


@kernel(inner=True)
def _bounds(i: int, n: int, least: int, most: int) -> Any:
    """The counts after position i from which a count between least and most can be reached."""
    return max(0, least - (n - 1 - i)), min(i + 1, most)


@kernel(inner=True)
def _row(take: float, skip: float, old: Any, new: Any, low: int, high: int, Q: Any) -> None:
    """new = V after one more position, and Q = P(taken | the count after it)."""
    for j in range(low, high + 1):
        with_it, without = take + old[j], skip + old[j + 1]
        larger = with_it if with_it > without else without
        less = without if with_it > without else with_it
        e = exp(less - (larger if larger > -INF else 0.0))
        new[j + 1] = larger + log(1.0 + e)
        Q[j] = (1.0 if with_it > without else e) / (1.0 + e)


@kernel(inner=True)
def _forward(take: Any, skip: Any, n: int, least: int, most: int, V: Any, Q: Any, P: Any) -> float:
    """A of one item; Q (n or 1, most+1), and P (most+1) = P(count) at the end."""
    near, leave = np.empty(n), np.empty(n)
    gain, shift, best = _relative(take, skip, n, least, most, near, leave)
    if gain != gain:
        return math.nan
    V[:] = -INF
    V[0, 1] = 0.0
    for i in range(n):
        low, high = _bounds(i, n, least, most)
        _row(near[i], leave[i], V[i % 2], V[(i + 1) % 2], low, high, Q[i % len(Q)])
    last = V[n % 2]
    P[:] = 0.0
    top = -INF
    for j in range(least, min(n, most) + 1):
        last[j + 1] += (j - best) * shift
        top = max(top, last[j + 1])
    if not top > -INF:
        return top
    total = 0.0
    for j in range(least, min(n, most) + 1):
        P[j] = math.exp(last[j + 1] - top)
        total += P[j]
    for j in range(least, min(n, most) + 1):
        P[j] /= total
    return gain + top + math.log(total)


@kernel
def _values(low: int, high: int, take: Any, skip: Any, sizes: Any, k: Any, out: Any) -> None:
    least, most = k
    V, Q, P = np.empty((2, most + 2)), np.empty((1, most + 1)), np.empty(most + 1)
    for b in range(low, high):
        out[b] = _forward(take[b], skip[b], sizes[b], least, most, V, Q, P)


@kernel
def _gradients(
    low: int, high: int, take: Any, skip: Any, sizes: Any, k: Any, out: Any, taken: Any, left: Any
) -> None:
    """A and, walking back from the end, the probability that each position is taken or left."""
    least, most = k
    V, Q, P = np.empty((2, most + 2)), np.empty((take.shape[1], most + 1)), np.empty(most + 1)
    for b in range(low, high):
        n = sizes[b]
        out[b] = _forward(take[b], skip[b], n, least, most, V, Q, P)
        taken[b] = left[b] = 0.0
        if out[b] != out[b]:
            taken[b, :n] = left[b, :n] = math.nan
        if not out[b] > -INF:
            continue
        for i in range(n - 1, -1, -1):
            first, last = _bounds(i, n, least, most)
            p, q = 0.0, 0.0
            for j in range(first, last + 1):
                with_it = P[j] * Q[i, j]
                P[j] *= 1.0 - Q[i, j]
                p += with_it
                q += P[j]
                if j > 0:
                    P[j - 1] += with_it
            taken[b, i], left[b, i] = p, q


@kernel
def _hvps(
    low: int, high: int, take: Any, skip: Any, dtake: Any, dskip: Any, sizes: Any, k: Any,
    taken: Any, left: Any,
) -> None:  # fmt: skip
    """The derivative of the gradient along (dtake, dskip): dX is the derivative of X."""
    least, most = k
    V, D, P = np.empty((2, most + 2)), np.zeros((2, most + 2)), np.empty(most + 1)
    Q = np.empty((take.shape[1], most + 1))
    dQ, dP = np.empty_like(Q), np.empty_like(P)
    for b in range(low, high):
        n = sizes[b]
        taken[b] = left[b] = 0.0
        value = _forward(take[b], skip[b], n, least, most, V, Q, P)
        if value != value:
            taken[b, :n] = left[b, :n] = math.nan
        if not value > -INF:
            continue
        D[:] = 0.0
        for i in range(n):
            old, new = D[i % 2], D[(i + 1) % 2]
            first, last = _bounds(i, n, least, most)
            for j in range(first, last + 1):
                gap = (old[j] + dtake[b, i]) - (old[j + 1] + dskip[b, i])
                new[j + 1] = old[j + 1] + dskip[b, i] + Q[i, j] * gap
                dQ[i, j] = Q[i, j] * (1.0 - Q[i, j]) * gap
        slope = 0.0
        for j in range(least, min(n, most) + 1):
            slope += P[j] * D[n % 2, j + 1]
        dP[:] = 0.0
        for j in range(least, min(n, most) + 1):
            dP[j] = P[j] * (D[n % 2, j + 1] - slope)
        for i in range(n - 1, -1, -1):
            first, last = _bounds(i, n, least, most)
            p, q = 0.0, 0.0
            for j in range(first, last + 1):
                with_it = P[j] * Q[i, j]
                dwith = dP[j] * Q[i, j] + P[j] * dQ[i, j]
                dP[j] = dP[j] * (1.0 - Q[i, j]) - P[j] * dQ[i, j]
                P[j] *= 1.0 - Q[i, j]
                p += dwith
                q += dP[j]
                if j > 0:
                    P[j - 1] += with_it
                    dP[j - 1] += dwith
            taken[b, i], left[b, i] = p, q


@kernel
def _draws(
    low: int, high: int, take: Any, skip: Any, sizes: Any, k: Any, uniform: Any, z: Any
) -> None:
    """z (S, B, n): a count by its probability, then back through the positions."""
    least, most = k
    V, Q, P = np.empty((2, most + 2)), np.empty((take.shape[1], most + 1)), np.empty(most + 1)
    for b in range(low, high):
        n = sizes[b]
        value = _forward(take[b], skip[b], n, least, most, V, Q, P)
        for s in range(len(z)):
            z[s, b] = 0.0
            if not value > -INF:
                z[s, b] = math.nan
                continue
            j, target = most, uniform[s, b, n]
            for count in range(most + 1):
                target -= P[count]
                if target < 0:
                    j = count
                    break
            while P[j] == 0.0:  # what rounding left over belongs to the last possible count
                j -= 1
            for i in range(n - 1, -1, -1):
                if uniform[s, b, i] < Q[i, j]:
                    z[s, b, i] = 1.0
                    j -= 1


@kernel(inner=True)
def _sum(scores: Any, ranks: Any, size: int) -> float:
    total = 0.0
    for t in range(size):
        total += scores[ranks[t]]
    return total


@kernel(inner=True)
def _subsets(scores: Any, low: int, high: int, k: int, ranks: Any, sizes: Any, best: Any) -> int:
    """The k best subsets of low..high of the scores, which are sorted, largest first.

    Those of one size form a tree: its root holds the largest scores, and a child moves the first
    member that was moved, or else the one before it, to the next rank. So every subset has one
    parent, which scores no less. The roots of all sizes are chained, outwards from the best of
    them, since the sums of the largest scores are concave in the size.
    """
    states = np.empty((4 * k + 4, max(high, 1)), np.int32)
    of_size = np.empty(4 * k + 4, np.int64)
    moved, chain = np.empty_like(of_size), np.empty_like(of_size)
    size = low
    while size < high and scores[size] > 0:
        size += 1
    states[0, :size] = np.arange(size)
    of_size[0], moved[0], chain[0] = size, size, 0
    heap = [(-_sum(scores, states[0], size), 0)]
    made, count = 1, 0
    while len(heap) and count < k:
        cost, at = heapq.heappop(heap)
        size, first = of_size[at], moved[at]
        best[count], sizes[count] = -cost, size
        ranks[count, :size] = states[at, :size]
        count += 1
        for place in range(max(first - 1, 0), min(first + 1, size)):
            limit = states[at, place + 1] if place + 1 < size else len(scores)
            if states[at, place] + 1 < limit:
                states[made, :size] = states[at, :size]
                states[made, place] += 1
                of_size[made], moved[made] = size, place
                heapq.heappush(heap, (-_sum(scores, states[made], size), made))
                made += 1
        if first == size:
            for step in (-1, 1):
                if chain[at] * step >= 0 and low <= size + step <= high:
                    of_size[made], moved[made], chain[made] = size + step, size + step, step
                    states[made, : size + step] = np.arange(size + step)
                    heapq.heappush(heap, (-_sum(scores, states[made], size + step), made))
                    made += 1
    return count


@kernel
def _kbest(
    first: int, last: int, take: Any, skip: Any, sizes: Any, limits: Any, out: Any, z: Any
) -> None:
    """The k best of some items: what must be taken is set apart, what may not be left out."""
    least, most = limits
    k = out.shape[1]
    ranks, counts = np.empty((k, max(most, 1)), np.int32), np.empty(k, np.int64)
    for b in range(first, last):
        out[b], z[b] = -INF, 0.0
        pool = np.empty(sizes[b], np.int64)
        free, forced, fixed = 0, 0, 0.0
        for i in range(sizes[b]):
            if not take[b, i] < INF:
                fixed = math.nan
            elif skip[b, i] == -INF:
                fixed += take[b, i]
                forced += 1
            elif take[b, i] > -INF:
                pool[free] = i
                free += 1
        low, high = max(least - forced, 0), min(most - forced, free)
        if fixed != fixed:
            out[b], z[b] = math.nan, math.nan
        if low > high or not fixed > -INF:
            continue
        scores = take[b][pool[:free]]
        order = np.argsort(-scores, kind="mergesort")
        found = _subsets(scores[order], low, high, k, ranks, counts, out[b])
        for place in range(found):
            out[b, place] += fixed
            for t in range(counts[place]):
                z[b, place, pool[order[ranks[place, t]]]] = 1.0
            for i in range(sizes[b]):
                if skip[b, i] == -INF:
                    z[b, place, i] = 1.0


def _run(task: Callable[..., None], take: Tensor, skip: Tensor, sizes: Tensor, *rest: Any) -> None:
    """Runs a kernel over the items; ``rest`` follows the sizes, of which k = rest[0]."""
    most = rest[0][1]
    given = [array(x, np.float64) for x in (take, skip)]
    arrays = [x.numpy() if isinstance(x, Tensor) else x for x in rest]
    lengths = array(sizes, np.int64)
    work = 10 * take.shape[1] * (most + 1)
    run_chunks(lambda i, j: task(i, j, *given, lengths, *arrays), len(take), work)


def value(take: Tensor, skip: Tensor, sizes: Tensor, k: tuple[int, int]) -> Tensor:
    """A ``(B)`` of scores ``(B, n)``, in float64."""
    out = torch.empty(len(take), dtype=torch.float64, device="cpu")
    _run(_values, take, skip, sizes, k, out)
    return out


def gradient(take: Tensor, skip: Tensor, sizes: Tensor, k: tuple[int, int]) -> list[Tensor]:
    """A and the probabilities of taking and of leaving each position."""
    out = torch.empty(len(take), dtype=torch.float64, device="cpu")
    taken, left = (torch.empty(take.shape, dtype=torch.float64, device="cpu") for _ in range(2))
    _run(_gradients, take, skip, sizes, k, out, taken, left)
    return [out, taken, left]


def hvp(
    take: Tensor, skip: Tensor, directions: Sequence[Tensor], sizes: Tensor, k: tuple[int, int]
) -> list[Tensor]:
    """The Hessian of A times the directions."""
    along = [array(d, np.float64) for d in directions]
    taken, left = (torch.empty(take.shape, dtype=torch.float64, device="cpu") for _ in range(2))

    def task(i: int, j: int, a: Any, b: Any, lengths: Any, *rest: Any) -> None:
        _hvps(i, j, a, b, *along, lengths, *rest)

    _run(task, take, skip, sizes, k, taken, left)
    return [taken, left]


def sample(
    take: Tensor, skip: Tensor, sizes: Tensor, uniform: Tensor, k: tuple[int, int]
) -> Tensor:
    """z ``(S, B, n)`` of uniform numbers ``(S, B, n+1)``."""
    z = torch.empty(len(uniform), *take.shape, dtype=torch.float64, device="cpu")
    _run(_draws, take, skip, sizes, k, uniform.contiguous(), z)
    return z


def kbest(
    take: Tensor, skip: Tensor, sizes: Tensor, k: tuple[int, int], count: int
) -> tuple[Tensor, Tensor]:
    """Scores ``(B, count)``, −inf where there is no such subset, and z ``(B, count, n)``."""
    out = torch.empty(len(take), count, dtype=torch.float64, device="cpu")
    z = torch.empty(len(take), count, take.shape[1], dtype=torch.float64, device="cpu")
    _run(_kbest, take, skip, sizes, k, out, z)
    return out, z
