"""The active-set method of one item, compiled: what is kept of its support, and what a step is
made of (``completion_cpu.absorb``).

The problem, over distributions p on structures whose parts are the columns of M (penalised) and N
(not), with scores c = Mᵀθ + Nᵀη, is

    max cᵀp − ½‖Mp‖²    subject to  1ᵀp = 1, p ≥ 0.

A structure is a list of its parts, with repetitions, so inner products count common parts and Mp is
a scatter. Lists are *aligned* if a part of one can only be at the same place of another. The
support S is kept affinely independent, so H = M_SᵀM_S + 11ᵀ = UᵀU has a factor, and the maximum
over the affine hull of S is p = U⁻¹(x + λy) with Uᵀx = c, Uᵀy = 1 and λ = (1 − xᵀy)/yᵀy. A
structure that joins appends a column to U and a number to x and y; one that leaves takes its column
with it and rotations (Givens) restore the triangle, acting on x and y too. See ``active_set.py``
for the method and its references.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from structmax.jit import kernel
from structmax.oracles.lanes_cpu import LANES, count_equal

SINGULAR = 1e-9  # a structure whose distance² to the affine hull is less, relatively, lies in it
ZERO = 1e-12  # a weight below this is none
EPS = 2.0**-52

STEPS, SIZE, ALIGNED, ACTIVE, MISSES, RANDOM = range(6)  # of State.counts
GAP, TAU, SHIFT, LAST, SLACK, EPSILON = range(6)  # of State.levels


class State(NamedTuple):
    """The support of one item. K is room, of which ``counts[SIZE]`` is in use."""

    counts: Any  # how often the oracle was asked, how many structures are in the support, whether
    # aligned; the others are of ``completion_cpu``: how many are active, 0 until this is settled
    levels: Any  # gap; mean score under ∇; score of the first structure, to which all others are
    # relative; score of the structure that was last found; two of ``completion_cpu``
    theta: Any  # (D) scores of all parts
    mu: Any  # (penalised) Mp
    g: Any  # (D) the gradient: θ − μ where penalised, else θ
    used: Any  # (D) of the structure that joins, how often it has each part; else 0
    r: Any  # (penalised) of ``completion_cpu``: a direction at right angles to the support
    slot: Any  # (K) the row of each active structure, then the free rows
    rows: Any  # (K, W) parts of structures, the penalised ones first
    sizes: Any  # (K, 3) how many parts; of them penalised; squared norm of those
    U: Any  # (K, K)
    vectors: Any  # (8, K)


# rows of State.vectors: weights, scores, x and y of the module's docstring; a right-hand side or
# solution; inner products; one over the diagonal of U; room
P, C, X, Y, Q, H, ONE_OVER, ROOM = range(8)


@kernel(inner=True)
def new_state(parts: int, penalised: int, width: int, room: int) -> Any:
    width = -(-width // LANES) * LANES
    return State(
        np.zeros(6, np.int64),
        np.zeros(6),
        np.empty(parts),
        np.empty(penalised),
        np.empty(parts),
        np.zeros(parts),
        np.empty(penalised),
        np.arange(room),
        np.zeros((room, width), np.uint32),
        np.empty((room, 3), np.int32),
        np.empty((room, room)),
        np.empty((8, room)),
    )


@kernel(inner=True)
def is_full(s: Any) -> bool:
    """Whether no row is free, which every step needs.

    (A step does not make room itself: to give back a state, with all its arrays, takes its time.)
    """
    return bool(s.counts[SIZE] == s.rows.shape[0])


@kernel(inner=True)
def grown(s: Any) -> Any:
    """The same state with twice the room."""
    room, width = s.rows.shape
    new = new_state(s.theta.shape[0], s.mu.shape[0], width, 2 * room)
    new.counts[:], new.levels[:] = s.counts, s.levels
    new.theta[:], new.mu[:], new.g[:], new.r[:] = s.theta, s.mu, s.g, s.r
    new.slot[:room], new.rows[:room], new.sizes[:room] = s.slot, s.rows, s.sizes
    for i in range(room):
        new.U[i, i:room] = s.U[i, i:]
    new.vectors[:, :room] = s.vectors
    return new


@kernel(inner=True)
def begin(s: Any, theta: Any) -> None:
    """An empty support for scores θ."""
    s.counts[STEPS] = s.counts[SIZE] = s.counts[ACTIVE] = 0
    s.levels[:] = 0.0
    s.theta[:], s.g[:] = theta, theta
    s.mu[:] = 0.0


# Loops over slices from their first element on are those that vectorise.


@kernel(fast=True, inner=True)
def _dot(a: Any, b: Any) -> float:
    total = 0.0
    for i in range(len(a)):
        total += a[i] * b[i]
    return total


@kernel(fused=True, inner=True)
def _subtract(x: float, a: Any, b: Any) -> None:
    """b −= xa"""
    for i in range(len(a)):
        b[i] -= x * a[i]


@kernel(fast=True, inner=True)
def _two_dots(a: Any, b: Any, x: Any) -> Any:
    one, two = 0.0, 0.0
    for i in range(len(a)):
        one += a[i] * x[i]
        two += b[i] * x[i]
    return one, two


@kernel(inner=True)
def _solve_transposed(s: Any, b: Any) -> None:
    """b becomes U⁻ᵀb."""
    k, U, one_over = len(b), s.U, s.vectors[ONE_OVER]
    for i in range(k):
        b[i] *= one_over[i]
        _subtract(b[i], U[i, i + 1 : k], b[i + 1 :])


@kernel(inner=True)
def _solve(s: Any, b: Any) -> None:
    """b becomes U⁻¹b, two rows at a time: half as often does one wait for the one before."""
    k, U, one_over = len(b), s.U, s.vectors[ONE_OVER]
    if k % 2:
        b[k - 1] *= one_over[k - 1]
    for i in range(k - k % 2 - 1, 0, -2):
        below, above = _two_dots(U[i, i + 1 : k], U[i - 1, i + 1 : k], b[i + 1 :])
        b[i] = (b[i] - below) * one_over[i]
        b[i - 1] = (b[i - 1] - above - U[i - 1, i] * b[i]) * one_over[i - 1]


@kernel(fused=True, inner=True)
def _move_left(row: Any, low: int, high: int) -> None:
    """row[low − 1 : high − 1] = row[low : high]"""
    for i in range(np.uint64(low), np.uint64(high)):  # unsigned: no negative index to think of
        row[i - np.uint64(1)] = row[i]


@kernel(fused=True, inner=True)
def _rotate(carried: Any, row: Any, to: Any, cosine: float, sine: float) -> None:
    """Rotates two rows into one that is written and one that is carried on."""
    for i in range(len(row)):
        a, b = carried[i], row[i]
        to[i] = cosine * a + sine * b
        carried[i] = cosine * b - sine * a


@kernel(inner=True)
def _leave(s: Any, j: int) -> None:
    """The j-th active structure leaves the support."""
    k, U, v = s.counts[SIZE], s.U, s.vectors
    for i in range(j):
        _move_left(U[i], j + 1, k)
    carried = v[ROOM]
    carried[j + 1 : k] = U[j, j + 1 : k]
    for i in range(j, k - 1):
        a, b = carried[i + 1], U[i + 1, i + 1]
        length = math.sqrt(a * a + b * b)
        v[ONE_OVER, i] = 1.0 / length
        cosine, sine = a * v[ONE_OVER, i], b * v[ONE_OVER, i]
        _rotate(carried[i + 1 : k], U[i + 1, i + 1 : k], U[i, i : k - 1], cosine, sine)
        for r in (X, Y):
            a, b = v[r, i], v[r, i + 1]
            v[r, i], v[r, i + 1] = cosine * a + sine * b, cosine * b - sine * a
    row_of_j = s.slot[j]
    for i in range(j, k - 1):
        s.slot[i] = s.slot[i + 1]
        v[P, i], v[C, i], v[H, i] = v[P, i + 1], v[C, i + 1], v[H, i + 1]
    s.slot[k - 1] = row_of_j
    s.counts[SIZE] = k - 1


@kernel(fast=True, inner=True)
def _copy(found: Any, theta: Any, penalised: int, row: Any) -> Any:
    """Copies a list of parts; returns its score, and how many are penalised."""
    score, kept = 0.0, 0
    for i in range(len(found)):
        part = np.uint32(found[i])  # unsigned: no negative index to think of
        row[i] = part
        score += theta[part]
        kept += found[i] < penalised
    return score, kept


@kernel(inner=True)
def _write(s: Any, found: Any, length: int) -> float:
    """Writes a structure into the first free row; returns its score."""
    k, penalised = s.counts[SIZE], s.mu.shape[0]
    row, sizes = s.rows[s.slot[k]], s.sizes[s.slot[k]]
    kept, score = 0, 0.0
    if s.counts[ALIGNED]:
        score, kept = _copy(found[:length], s.theta, penalised, row)
        sizes[0], sizes[1], sizes[2] = length, kept, kept
        return score
    for i in range(length):
        if found[i] < penalised:
            row[kept] = found[i]
            s.used[found[i]] += 1
            kept += 1
    at, norm = kept, 0.0
    for i in range(length):
        score += s.theta[found[i]]
        if found[i] >= penalised:
            row[at] = found[i]
            at += 1
        else:
            norm += s.used[found[i]]
    sizes[0], sizes[1], sizes[2] = length, kept, norm
    for i in range(kept):
        s.used[row[i]] = 0
    return score


@kernel(inner=True)
def _products(s: Any) -> float:
    """H: one more than the inner product of each active structure with the one in the free row;
    returns the largest."""
    k, used = s.counts[SIZE], s.used
    new = s.rows[s.slot[k]]
    kept, largest = s.sizes[s.slot[k], 1], 0.0
    if s.counts[ALIGNED]:
        for v in range(k):
            common = 1.0 + count_equal(s.rows[s.slot[v]], new, kept)
            s.vectors[H, v] = common
            largest = max(largest, common)
        return largest
    for i in range(kept):
        used[new[i]] += 1
    for v in range(k):
        row, common = s.rows[s.slot[v]], 1.0
        for i in range(s.sizes[s.slot[v], 1]):
            common += used[row[i]]
        s.vectors[H, v] = common
        largest = max(largest, common)
    for i in range(kept):
        used[new[i]] = 0
    return largest


@kernel(inner=True)
def _is_active(s: Any) -> bool:
    """Whether the structure in the free row is in the support already; needs ``_products``."""
    k = s.counts[SIZE]
    new, size = s.rows[s.slot[k]], s.sizes[s.slot[k]]
    for v in range(k):
        other = s.sizes[s.slot[v]]
        if s.vectors[H, v] != size[2] + 1 or other[2] != size[2] or other[0] != size[0]:
            continue
        for i in range(size[1], size[0]):
            s.used[new[i]] += 1
        row = s.rows[s.slot[v]]
        for i in range(size[1], size[0]):
            s.used[row[i]] -= 1
        same = True
        for i in range(size[1], size[0]):
            same &= s.used[row[i]] == 0 and s.used[new[i]] == 0
        for i in range(size[1], size[0]):
            s.used[row[i]] = s.used[new[i]] = 0
        if same:
            return True
    return False


@kernel(inner=True)
def _distance(s: Any) -> float:
    """Q = U⁻ᵀH, the new column of U; returns the square of what stands below it."""
    k, v = s.counts[SIZE], s.vectors
    v[Q, :k] = v[H, :k]
    _solve_transposed(s, v[Q, :k])
    return s.sizes[s.slot[k], 2] + 1.0 - _dot(v[Q, :k], v[Q, :k])


@kernel(inner=True)
def _join(s: Any, score: float, weight: float, distance: float) -> None:
    """The structure in the free row joins the support, with a weight."""
    k, U, v = s.counts[SIZE], s.U, s.vectors
    for i in range(k):
        U[i, k] = v[Q, i]
    U[k, k] = math.sqrt(distance)
    v[ONE_OVER, k] = 1.0 / U[k, k]
    v[P, k], v[C, k] = weight, score
    v[X, k] = (score - _dot(v[Q, :k], v[X, :k])) * v[ONE_OVER, k]
    v[Y, k] = (1.0 - _dot(v[Q, :k], v[Y, :k])) * v[ONE_OVER, k]
    s.counts[SIZE] = k + 1


@kernel(inner=True)
def _drop_zeros(s: Any) -> None:
    for i in range(s.counts[SIZE] - 1, -1, -1):
        if s.vectors[P, i] <= ZERO:
            _leave(s, i)


@kernel(inner=True)
def _settle(s: Any) -> bool:
    """Weights of the maximum over a face: of the support, less what leaves on the way there.

    Returns whether the first step was one: it is not, where the structure that has just joined
    leaves at once, because what it promised was rounding.
    """
    v, moved, first = s.vectors, False, True
    while True:
        k = s.counts[SIZE]
        shift = (1.0 - _dot(v[X, :k], v[Y, :k])) / _dot(v[Y, :k], v[Y, :k])
        for i in range(k):
            v[Q, i] = v[X, i] + shift * v[Y, i]
        _solve(s, v[Q, :k])
        step, out = 1.0, -1
        for i in range(k):
            if v[Q, i] <= ZERO:
                t = v[P, i] / (v[P, i] - v[Q, i]) if v[P, i] > v[Q, i] else 0.0
                if out < 0 or t < step:
                    step, out = min(t, 1.0), i
        moved, first = step > 0.0 if first else moved, False
        if out < 0:
            v[P, :k] = v[Q, :k]
            return moved
        for i in range(k):
            v[P, i] += step * (v[Q, i] - v[P, i])
        v[P, out] = 0.0
        _drop_zeros(s)


@kernel(inner=True)
def _slide(s: Any, score: float) -> float:
    """The free row lies in the affine hull of the support: weight moves to it at no penalty.

    Q holds U⁻ᵀH. Along p − tα, α = U⁻¹Q, the mean of the penalised parts stays where it is while
    the score rises; a structure whose weight reaches 0 leaves. Returns t, or −1 if nothing is won.
    """
    k, v = s.counts[SIZE], s.vectors
    _solve(s, v[Q, :k])
    step, out = math.inf, -1
    for i in range(k):
        if v[Q, i] > ZERO and v[P, i] < step * v[Q, i]:
            step, out = v[P, i] / v[Q, i], i
    if out < 0 or not score - _dot(v[Q, :k], v[C, :k]) > 0.0:
        return -1.0
    for i in range(k):
        v[P, i] -= step * v[Q, i]
    v[P, out] = 0.0
    _drop_zeros(s)
    return step


@kernel(fused=True, inner=True)
def _spread(s: Any) -> None:
    """μ = Mp, the gradient, and the mean score under it."""
    k, mu = s.counts[SIZE], s.mu
    mu[:] = 0.0
    for v in range(k):
        row, weight = s.rows[s.slot[v]], s.vectors[P, v]
        for i in range(s.sizes[s.slot[v], 1]):
            mu[row[i]] += weight
    for i in range(mu.shape[0]):
        s.g[i] = s.theta[i] - mu[i]
    s.levels[TAU] = _dot(s.vectors[C, :k], s.vectors[P, :k]) - _dot(mu, mu)


@kernel(inner=True)
def _excess(s: Any, at: int, score: float) -> float:
    """By how much the structure in a row is better than the mean, under the gradient."""
    total, row = 0.0, s.rows[at]
    for i in range(s.sizes[at, 1]):
        total += s.mu[row[i]]
    return score - total - s.levels[TAU]


@kernel(inner=True)
def _tolerance(s: Any, score: float, tol: float) -> float:
    """tol times how much structures differ, and what rounding does to their scores."""
    k, shift = s.counts[SIZE], s.levels[SHIFT]
    spread, magnitude = 0.0, abs(score + shift)
    for i in range(k):
        spread = max(spread, abs(score - s.vectors[C, i]))
        magnitude = max(magnitude, abs(s.vectors[C, i] + shift))
    return tol * (max(s.sizes[s.slot[k], 2], 1) + spread) + 16 * EPS * magnitude


@kernel(inner=True)
def times_face(s: Any, b: Any) -> None:
    """b becomes Qb, where Q = A⁻¹ − A⁻¹11ᵀA⁻¹/1ᵀA⁻¹1 and A = UᵀU."""
    ones = s.vectors[Y, : len(b)]
    _solve_transposed(s, b)
    _subtract(_dot(b, ones) / _dot(ones, ones), ones, b)
    _solve(s, b)


@kernel(inner=True)
def refine(s: Any) -> None:
    """One step of iterative refinement: what rounding left of the conditions is solved for."""
    k, v = s.counts[SIZE], s.vectors
    for i in range(k):
        v[Q, i] = _excess(s, s.slot[i], v[C, i])
    times_face(s, v[Q, :k])
    for i in range(k):
        if not v[P, i] + v[Q, i] > 0.0:
            return
    for i in range(k):
        v[P, i] += v[Q, i]
    _spread(s)


@kernel(inner=True)
def seed(s: Any, found: Any, length: int, weight: float) -> Any:
    """A structure of an earlier solution joins, if it is allowed and no combination of others."""
    if is_full(s):
        s = grown(s)
    score = _write(s, found, length)
    if not abs(score) < math.inf:
        return s
    if s.counts[SIZE] == 0:
        s.levels[SHIFT] = score
    _products(s)
    distance = _distance(s)
    if distance > SINGULAR * (s.sizes[s.slot[s.counts[SIZE]], 2] + 1.0):
        _join(s, score - s.levels[SHIFT], weight, distance)
    return s


@kernel(inner=True)
def settle_seeds(s: Any) -> None:
    k, v = s.counts[SIZE], s.vectors
    if k == 0:
        return
    total = 0.0
    for i in range(k):
        total += v[P, i]
    for i in range(k):
        v[P, i] /= total
    _settle(s)
    _spread(s)
