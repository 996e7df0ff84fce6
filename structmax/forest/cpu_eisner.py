"""Projective dependency trees on the CPU without lists: Shannon's value and gradient.

The recursion of ``ProjectiveTree`` for spans of width w that begin at place i, with the tables of
``rows`` and e = exp((θ − shift)/γ)::

    gap[w, i] = Σ R[s, i]·L[w−1−s, i+s+1]   over s = 0..w−1,    R[0, ·] = L[0, ·] = 1
    a[w, i] = gap[w, i]·e(i → i+w)      R[w, i] = Σ a[s, i]·R[w−s, i+s]   over s = 1..w
    b[w, i] = gap[w, i]·e(i+w → i)      L[w, i] = Σ L[s, i]·b[w−s, i+s]   over s = 0..w−1

With several roots the root symbol is place 0, and Z = R[n, 0]. With a single one word 1 is place 0,
and Z = Σ L[r, 0]·e(root → r)·R[n−1−r, r] over the places r. On the way down G, Q and O are the
derivatives of log Z by gap, R and L, which are those of the spans that each is a part of. They are
0 where R or L is, so that none is larger than range allows. N is the number of places.
"""

from __future__ import annotations

import math

import numpy as np

from structmax.forest.rows import (
    LANES,
    LARGEST,
    SMALLEST,
    TRIES,
    correction,
    exponentiate,
    first_out_of_range,
    lanewise,
    pitch_of,
    typical,
)
from structmax.jit import kernel

SHARE, GROWTH = 1.0, math.log(6.75)  # there are about 6.75ⁿ trees


@lanewise
def join(v, count, down, up, first, of_gap, to_gap, of_R, to_R, of_L, to_L, a, R, b, L, e, f):
    """a, R, b, L of spans next to each other; e and f are the places of their arcs → and ←."""
    gap, right, left = v.sums(
        count, down, up, (v.load(first), of_gap, to_gap), (v.zero, of_R, to_R), (v.zero, of_L, to_L)
    )
    rightward, leftward = v.times(gap, v.load(e)), v.times(gap, v.load(f))
    v.store(a, rightward)
    v.store(b, leftward)
    v.store(R, v.plus(right, rightward))
    v.store(L, v.plus(left, leftward))


@lanewise
def part(
    v, wider, column, before, diagonal, seed_R, seed_L, a, R, b, L, e, f, G, Q, O,
    G1, L1, O1, b1, Q1, R1, Q2, a2, G2, R2, O2, L2,
):  # fmt: skip
    """G, Q, O of spans next to each other and, in the places of e and f, the visits of arcs."""
    right, left, rightward = v.sums(
        wider, column, column, (v.load(seed_R), G1, L1), (v.load(seed_L), O1, b1), (v.zero, Q1, R1)
    )
    right, left, leftward = v.sums(
        before, diagonal, diagonal, (right, Q2, a2), (left, G2, R2), (v.zero, O2, L2)
    )
    right, left = v.where(v.load(R), right), v.where(v.load(L), left)
    v.store(Q, right)
    v.store(O, left)
    to_right, to_left = v.load(a), v.load(b)
    rightward = v.where(to_right, v.plus(rightward, right))
    leftward = v.where(to_left, v.plus(leftward, left))
    v.store(G, v.plus(v.times(rightward, v.load(e)), v.times(leftward, v.load(f))))
    v.store(e, v.times(rightward, to_right))
    v.store(f, v.times(leftward, to_left))


@kernel(inner=True)
def inside(N, pitch, size, V):
    a, R, b, L, e, f = 0, size, 2 * size, 3 * size, 4 * size, 5 * size
    V[R + LANES : R + LANES + N] = 1.0
    V[L + LANES : L + LANES + N] = 1.0
    for w in range(1, N):
        for i in range(0, N - w, LANES):
            here, near = LANES + w * pitch + i, LANES + pitch + i
            far = here - pitch + 1
            numbers = (
                w - 1, pitch, 1 - pitch, L + far, R + near, L + far - pitch + 1, a + near, R + far,
                L + near, b + far, a + here, R + here, b + here, L + here, e + here, f + here,
            )  # fmt: skip
            join(V, numbers)


@kernel(inner=True)
def outside(roots, N, pitch, size, z, V, M):
    a, R, b, L, e, f = 0, size, 2 * size, 3 * size, 4 * size, 5 * size
    G, Q, O, seed_R, seed_L = 6 * size, 7 * size, 8 * size, 9 * size, 9 * size + pitch + LANES
    single = roots.shape[0] > 0
    V[seed_R : seed_L + pitch + LANES] = 0.0
    for r in range(roots.shape[0]):
        before, after = LANES + r * pitch, LANES + (N - 1 - r) * pitch + r
        M[r * (r + 2)] = V[L + before] * roots[r] * V[R + after] / z
    for w in range(N - 1, 0, -1):
        m = N - w
        if single:
            V[seed_R + m - 1] = V[L + LANES + (m - 1) * pitch] * roots[m - 1] / z
            V[seed_L] = V[R + LANES + (m - 1) * pitch + w] * roots[w] / z
        else:
            V[seed_R] = 1.0 / z if m == 1 else 0.0
        for i in range(0, m, LANES):
            here = LANES + w * pitch + i
            below, right, left = here + pitch, LANES + pitch + w + i, LANES + pitch - 1 + i
            numbers = (
                m - 1 - i, pitch, min(i + LANES - 1, m - 1), pitch - 1, seed_R + i, seed_L + i,
                a + here, R + here, b + here, L + here, e + here, f + here, G + here, Q + here,
                O + here, G + below, L + right - pitch + 1, O + below, b + right, Q + below,
                R + right, Q + below - 1, a + left, G + below - 1, R + left - pitch,
                O + below - 1, L + left,
            )  # fmt: skip
            part(V, numbers)
        V[seed_R + m - 1] = 0.0


@kernel(inner=True)
def spread(scores, n, single, pitch, E, F, roots):
    """Parts in the order of ``arc_number`` to their tables, → and ←, and those of a single root."""
    p = 0
    for high in range(1, n + 1):
        for w in range(1, high):
            place = LANES + w * (pitch - 1) + high - single
            E[place], F[place] = scores[p], scores[p + 1]
            p += 2
        if single:
            roots[high - 1] = scores[p]
        else:
            E[LANES + high * pitch] = scores[p]
        p += 1


@kernel(inner=True)
def collect(E, F, n, single, pitch, M):
    """The inverse of ``spread``, but for a single root."""
    p = 0
    for high in range(1, n + 1):
        for w in range(1, high):
            place = LANES + w * (pitch - 1) + high - single
            M[p], M[p + 1] = E[place], F[place]
            p += 2
        if not single:
            M[p] = E[LANES + high * pitch]
        p += 1


@kernel(inner=True)
def sum_over_trees(roots, N, pitch, size, V):
    R, L = size + LANES, 3 * size + LANES
    if roots.shape[0] == 0:
        return V[R + (N - 1) * pitch]
    z = 0.0
    for r in range(N):
        z += V[L + r * pitch] * roots[r] * V[R + (N - 1 - r) * pitch + r]
    return z


@kernel
def trees(theta, lengths, single, gamma, down, values, M, left):
    """Values ``(B)`` and, with ``down``, the gradient M ``(B, P)`` of items of these lengths.

    ``left (B)`` says which items are out of range or have no length: their results mean nothing.
    """
    most, tables = lengths.max() + 1 - single, 9 if down else 6
    V = np.empty(tables * (most * pitch_of(most) + 2 * LANES) + 2 * (pitch_of(most) + LANES))
    e, all_roots = np.empty(theta.shape[1]), np.empty(most if single else 0)
    zeros_for = 0
    for item in range(theta.shape[0]):
        n = lengths[item]
        N = n + 1 - single
        pitch, scores, roots = pitch_of(N), theta[item, : n * n], all_roots[:N]
        size = N * pitch + 2 * LANES
        E, F = V[4 * size : 5 * size], V[5 * size : 6 * size]
        shift = typical(scores, gamma, SHARE, GROWTH)
        left[item], z = True, 0.0
        for _ in range(TRIES if n > 0 else 0):
            if zeros_for != n:
                V[: tables * size] = 0.0
                zeros_for = n
            exponentiate(scores, shift, 1.0 / gamma, e)
            spread(e, n, single, pitch, E, F, roots)
            inside(N, pitch, size, V)
            z = sum_over_trees(roots, N, pitch, size, V)
            place = first_out_of_range(V[: 4 * size])
            if place < 4 * size:
                x, arcs = V[place], (place % size - LANES) // pitch
            else:
                x, arcs = z, n
                left[item] = not (SMALLEST <= z <= LARGEST or z == 0.0)
            if not left[item]:
                break
            zeros_for = 0  # NaN may have come there
            if not 0.0 < x < math.inf:
                break
            shift += gamma * correction(x, arcs)
        feasible = not left[item] and z > 0.0
        values[item] = gamma * math.log(z) + shift * n if feasible else -math.inf
        if down:
            M[item, n * n if feasible else 0 :] = 0.0
            if feasible:
                outside(roots, N, pitch, size, z, V, M[item])
                collect(E, F, n, single, pitch, M[item])
