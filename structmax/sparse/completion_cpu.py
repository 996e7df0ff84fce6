"""Steps of one item, compiled: those of the active set, then those that complete its face.

See ``completion.py`` for what is looked for, and why. Here a structure that is found joins the
support with weight 0: the factor that the support has goes on to be that of the whole face, with
that of the active structures as its first rows and columns. The directions of the hull so far are
those of MQMᵀ, so x − MQMᵀx is at right angles to it for any x, which here is uniform in a cube.
"""

from __future__ import annotations

import math
from typing import Any

from structmax.jit import kernel
from structmax.sparse.active_set_cpu import (
    ACTIVE,
    EPSILON,
    GAP,
    LAST,
    MISSES,
    RANDOM,
    SHIFT,
    SINGULAR,
    SIZE,
    SLACK,
    STEPS,
    P,
    Q,
    _distance,
    _excess,
    _is_active,
    _join,
    _products,
    _settle,
    _slide,
    _spread,
    _tolerance,
    _write,
    refine,
    times_face,
)
from structmax.sparse.completion import OUTSIDE, SMALL
from structmax.sparse.completion import SLACK as WORSE
from structmax.sparse.completion import STEP as MOVE

ENOUGH = 4  # times in a row that nothing is found: by both signs of two directions
FACTOR, LAST_BITS = 1103515245, 2**31 - 1  # random numbers: x becomes FACTOR·x + 12345 mod 2³¹


@kernel(inner=True)
def absorb(s: Any, found: Any, length: int, limits: Any) -> bool:
    """One step, given the best structure under s.g; whether to go on."""
    if s.counts[ACTIVE] > 0:
        return _widen(s, found, length)
    max_iter, tol, _ = limits
    s.counts[STEPS] += 1
    score = _write(s, found, length)
    k = s.counts[SIZE]
    if k == 0:
        s.levels[SHIFT] = score
    score -= s.levels[SHIFT]
    s.levels[LAST] = score
    if k > 0:
        s.levels[GAP] = _excess(s, s.slot[k], score)
        if s.levels[GAP] <= _tolerance(s, score, tol) or s.counts[STEPS] >= max_iter:
            return False
        reached = _products(s) > s.sizes[s.slot[k], 2]
        if reached and _is_active(s):  # all that is left is rounding
            return False
    weight = 0.0
    distance, least = _distance(s), SINGULAR * (s.sizes[s.slot[k], 2] + 1.0)
    if distance <= least:
        at = s.slot[k]
        weight = _slide(s, score)
        if weight < 0.0:
            return False
        k = s.counts[SIZE]
        last = k  # leaving has moved the free row back
        while s.slot[last] != at:
            last += 1
        s.slot[last], s.slot[k] = s.slot[k], at
        distance = max(_distance(s), least)
    _join(s, score, weight if k > 0 else 1.0, distance)
    moved = _settle(s)
    _spread(s)
    return moved or weight > 0.0


@kernel(inner=True)
def goes_on(s: Any, limits: Any) -> bool:
    """The active set is done, or the face: refines the weights; whether the face is to be looked
    at. The gap is that of the structure found last, still in the free row."""
    if s.counts[ACTIVE] > 0:
        return False
    refine(s)
    s.levels[GAP] = max(_excess(s, s.slot[s.counts[SIZE]], s.levels[LAST]), 0.0)
    s.counts[ACTIVE] = s.counts[SIZE]
    if limits[2]:
        _start(s)
    return limits[2]


@kernel(inner=True)
def _is_suspect(s: Any) -> bool:
    least = 1.0
    for i in range(s.counts[SIZE]):
        least = min(least, s.vectors[P, i])
    return least < SMALL


@kernel(inner=True)
def _start(s: Any) -> None:
    size = 0.0  # of the gradient: what no active structure has may hold anything
    for v in range(s.counts[SIZE]):
        row = s.rows[s.slot[v]]
        for i in range(s.sizes[s.slot[v], 0]):
            size = max(size, abs(s.g[row[i]]))
    s.levels[EPSILON], s.levels[SLACK] = MOVE + 1e-9 * size, WORSE + 1e-10 * size
    # one direction will do, but for rounding, unless something is found
    s.counts[MISSES], s.counts[RANDOM] = 0 if _is_suspect(s) else ENOUGH - 2, FACTOR
    _turn(s)
    _look_along(s, s.levels[EPSILON])


@kernel(inner=True)
def _widen(s: Any, found: Any, length: int) -> bool:
    """A structure of the face joins, if it lies outside the hull."""
    score = _write(s, found, length) - s.levels[SHIFT]
    at = s.slot[s.counts[SIZE]]
    s.counts[MISSES] += 1
    if abs(_excess(s, at, score)) <= s.levels[SLACK]:
        _products(s)
        distance = _distance(s)
        if distance > OUTSIDE * (1.0 + s.sizes[at, 2]):
            _join(s, score, 0.0, distance)
            s.counts[MISSES] = 0
    if s.counts[MISSES] == ENOUGH:
        return False
    again = s.counts[MISSES] % 2 == 1
    if not again:
        _turn(s)
    _look_along(s, -s.levels[EPSILON] if again else s.levels[EPSILON])
    return True


@kernel(inner=True)
def _turn(s: Any) -> None:
    """r becomes a new direction at right angles to the hull, 0 for what is forbidden."""
    k, r, x, b = s.counts[SIZE], s.r, s.counts[RANDOM], s.vectors[Q]
    for i in range(len(r)):
        x = (x * FACTOR + 12345) & LAST_BITS
        r[i] = x * 2.0**-30 - 1.0 if abs(s.theta[i]) < math.inf else 0.0
    s.counts[RANDOM] = x
    for v in range(k):
        row, total = s.rows[s.slot[v]], 0.0
        for i in range(s.sizes[s.slot[v], 1]):
            total += r[row[i]]
        b[v] = total
    times_face(s, b[:k])
    for v in range(k):
        row = s.rows[s.slot[v]]
        for i in range(s.sizes[s.slot[v], 1]):
            r[row[i]] -= b[v]


@kernel(inner=True)
def _look_along(s: Any, epsilon: float) -> None:
    for i in range(len(s.r)):
        s.g[i] = s.theta[i] - s.mu[i] + epsilon * s.r[i]
