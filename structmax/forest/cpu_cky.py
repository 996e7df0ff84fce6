"""Binary trees on the CPU without lists: Shannon's value and gradient.

The recursion of ``BinaryTree`` for spans of width w (and w + 1 leaves) that begin at leaf i, with
e = exp((θ − shift)/γ) and the tables of ``rows``::

    X[w, i] = e[w, i] · Σ X[s, i]·X[w−1−s, i+s+1]    over s = 0..w−1,    X[0, i] = e[0, i]

and, with Z = X[n−1, 0], from the widest span down: U = ∂ log Z/∂X and G = U·e, which is 0 where
X is 0, so that no derivative is larger than range allows;

    U[w, i] = Σ G[v, i]·X[v−1−w, i+w+1]  over v > w  +  Σ G[w+r, i−r]·X[r−1, i−r]  over r = 1..i.
"""

from __future__ import annotations

import math

import numpy as np

from structmax.forest.rows import (
    LANES,
    TRIES,
    correction,
    exponentiate,
    first_out_of_range,
    lanewise,
    pitch_of,
    typical,
)
from structmax.jit import kernel

SHARE, GROWTH = 0.5, math.log(4.0)  # about 4ⁿ trees have the same n leaves


@lanewise
def join(v, count, down, up, x, e, a, b):
    """X of spans next to each other."""
    (total,) = v.sums(count, down, up, (v.zero, a, b))
    v.store(x, v.times(total, v.load(e)))


@lanewise
def part(v, seed, wider, column, before, diagonal, x, e, g, a, b, c, d):
    """G of spans next to each other and, in the place of e, the expected number of their visits."""
    sums = v.sums(wider, column, column, (v.load(seed), a, b))
    (total,) = v.sums(before, diagonal, diagonal, (sums[0], c, d))
    value = v.load(x)
    v.store(g, v.where(value, v.times(total, v.load(e))))
    v.store(e, v.times(total, value))


@kernel(inner=True)
def inside(n, pitch, size, V):
    for x in range(LANES, LANES + n):
        V[x] = V[size + x]
    for w in range(1, n):
        for i in range(0, n - w, LANES):
            x = LANES + w * pitch + i
            join(V, (w, pitch, 1 - pitch, x, size + x, LANES + i, x - pitch + 1))


@kernel(inner=True)
def outside(n, pitch, size, V):
    seed = 3 * size
    V[seed : seed + LANES] = 0.0
    V[seed] = 1.0 / V[LANES + (n - 1) * pitch]
    for w in range(n - 1, -1, -1):
        m = n - w
        for i in range(0, m, LANES):
            x, b, d = LANES + w * pitch + i, LANES + w + 1 + i, LANES - 1 + i
            e, g = x + size, x + 2 * size
            wider, before = m - 1 - i, min(i + LANES - 1, m - 1)
            a, c = g + pitch, g + pitch - 1
            part(V, (seed, wider, pitch, before, pitch - 1, x, e, g, a, b, c, d))
        V[seed] = 0.0


@kernel(inner=True)
def spread(e, n, pitch, E):
    """Parts in the order of ``span_number`` to their table."""
    p = 0
    for j in range(n):
        for w in range(j + 1):
            E[LANES + w * (pitch - 1) + j] = e[p]
            p += 1


@kernel(inner=True)
def collect(E, n, pitch, M):
    """The inverse of ``spread``."""
    p = 0
    for j in range(n):
        for w in range(j + 1):
            M[p] = E[LANES + w * (pitch - 1) + j]
            p += 1


@kernel
def trees(theta, lengths, gamma, down, values, M, left):
    """Values ``(B)`` and, with ``down``, the gradient M ``(B, P)`` of items of these lengths.

    ``left (B)`` says which items are out of range or have no length: their results mean nothing.
    """
    longest, tables = lengths.max(), 3 if down else 2
    V = np.empty(tables * (longest * pitch_of(longest) + 2 * LANES) + LANES)
    e = np.empty(theta.shape[1])
    zeros_for = 0
    for b in range(theta.shape[0]):
        n = lengths[b]
        parts, pitch = n * (n + 1) // 2, pitch_of(n)
        size, goal = n * pitch + 2 * LANES, LANES + (n - 1) * pitch
        X, E, scores = V[:size], V[size : 2 * size], theta[b, :parts]
        shift = typical(scores, gamma, SHARE, GROWTH)
        left[b] = True
        for _ in range(TRIES if n > 0 else 0):
            if zeros_for != n:
                V[: tables * size] = 0.0
                zeros_for = n
            exponentiate(scores, shift, 1.0 / gamma, e)
            spread(e, n, pitch, E)
            inside(n, pitch, size, V)
            place = first_out_of_range(X)
            left[b] = place < size
            if not left[b]:
                break
            zeros_for = 0  # NaN may have come there
            if not 0.0 < X[place] < math.inf:
                break
            width = (place - LANES) // pitch
            shift += gamma * correction(X[place], 2 * width + 1)
        feasible = not left[b] and X[goal] > 0.0
        values[b] = gamma * math.log(X[goal]) + shift * (2 * n - 1) if feasible else -math.inf
        if down:
            M[b, parts if feasible else 0 :] = 0.0
            if feasible:
                outside(n, pitch, size, V)
                collect(E, n, pitch, M[b])
