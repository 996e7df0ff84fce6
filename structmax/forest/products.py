"""Shannon smoothing on the CPU as sums of products: one exponential a part, none an edge.

With X[v] = exp((V[v] − m·r(v))/γ) and E[p] = exp((θ[p] − m)/γ) the recursion of a forest reads

    X[v] = E[part(v)] · Σ over e ∈ in(v) of E[part(e)]·X[tail₁(e)]·X[tail₂(e)],

where r(v) counts the parts in a derivation of v. The shift m, chosen for each item, keeps X in
range; it needs every derivation of a node to have the same number of parts, and is 0 otherwise. As
long as every factor lies within ``RANGE`` of 1, no product under- or overflows, and a zero is a
node that cannot be derived. An item where one does not is left to the log-space kernels of ``cpu``.

Items lie side by side as there: ``X (v+1, L)`` and ``E (P+1, L)``, their last rows 1.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from structmax.forest.runs import edges_of
from structmax.forest.topology import Forest, Ints
from structmax.jit import exp, kernel

PART_RANGE = 100.0  # of log E, and of log X: E·E·X·X stays within float64's e^±708
NODE_RANGE = 240.0
TRIES = 4  # shifts before an item is given up


@kernel
def count_parts(num_parts, ptr, tail1, tail2, edge_part, node_part, runs):
    """The number of parts in a derivation of each node, −1 where it varies."""
    v = len(ptr) - 1
    counts = np.zeros(v + 1, np.int32)
    for u in range(v):
        e0, e1 = edges_of(u, ptr, tail1, tail2, edge_part, runs)
        for e in range(e0, e1):
            a, b = counts[tail1[e]], counts[tail2[e]]
            count = a + b + (edge_part[e] < num_parts) + (node_part[u] < num_parts)
            count = -1 if a < 0 or b < 0 else count
            if e == e0:
                counts[u] = count
            elif count != counts[u]:
                counts[u] = -1
    return counts[:v]


@kernel(inner=True)
def exponentiate(S, m, inverse, E):
    """E of every part; what lies out of range becomes NaN and is noticed where it is used."""
    for p in range(S.shape[0] - 1):
        for lane in range(S.shape[1]):
            x = (S[p, lane] - m[lane]) * inverse
            inside = (abs(x) <= PART_RANGE) | (x == -math.inf)
            E[p, lane] = exp(x) if inside else math.nan


@kernel(fused=True)
def inside(
    S, gamma, last, goal, counts, ptr, tail1, tail2, edge_part, node_part, runs, m, E, X, left
):
    """X of nodes 0..last, and each lane's ``left``: whether it must be computed in log space.

    A lane that leaves the range at a node is shifted so that this node comes to 1, and the pass
    begins again.
    """
    L, parts = S.shape[1], S.shape[0] - 1
    total, bad, size = np.empty(L), np.empty(L, np.int64), np.empty(L)
    largest, smallest = math.exp(NODE_RANGE), math.exp(-NODE_RANGE)
    for lane in range(L):
        left[lane] = False
    for attempt in range(TRIES + 1):
        exponentiate(S, m, 1.0 / gamma, E)
        for lane in range(L):
            bad[lane] = -1
        for v in range(last + 1):
            for lane in range(L):
                total[lane] = 0.0
            e0, e1 = edges_of(v, ptr, tail1, tail2, edge_part, runs)
            for e in range(e0, e1):
                a, b, c = tail1[e], tail2[e], edge_part[e]
                if c == parts:
                    for lane in range(L):
                        total[lane] += X[a, lane] * X[b, lane]
                else:
                    for lane in range(L):
                        total[lane] += X[a, lane] * X[b, lane] * E[c, lane]
            own, out = node_part[v], 0
            for lane in range(L):
                x = total[lane] * E[own, lane]
                X[v, lane] = x
                out |= 0 if ((x <= largest) & (x >= smallest)) | (x == 0) else 1
            for lane in range(L if out else 0):
                x = X[v, lane]
                if not (smallest <= x <= largest or x == 0):
                    X[v, lane] = 0.0  # nothing further of this lane counts
                    if v <= goal[lane] and bad[lane] < 0:
                        bad[lane], size[lane] = v, x
        again = False
        for lane in range(L):
            v = bad[lane]
            if v < 0 or left[lane]:
                continue
            uniform = counts[goal[lane]] > 0 and counts[v] > 0
            if attempt < TRIES and uniform and 0 < size[lane] < math.inf:
                m[lane] += gamma * math.log(size[lane]) / counts[v]
                again = True
            else:
                left[lane] = True
        if not again:
            break


@kernel(fused=True)
def outside(last, goal, ptr, tail1, tail2, edge_part, node_part, runs, E, X, O, M):
    """O = ∂ log X[goal]/∂X, from each lane's goal down, and M, the expected parts."""
    L, parts = E.shape[1], E.shape[0] - 1
    above, flow = np.empty(L), np.empty(L)
    for lane in range(L):
        x = X[goal[lane], lane]
        O[goal[lane], lane] = 1.0 / x if x > 0 else 0.0
    for v in range(last, -1, -1):
        own = node_part[v]
        for lane in range(L):
            M[own, lane] += O[v, lane] * X[v, lane]
            above[lane] = O[v, lane] * E[own, lane] if O[v, lane] > 0 else 0.0
        e0, e1 = edges_of(v, ptr, tail1, tail2, edge_part, runs)
        for e in range(e0, e1):
            a, b, c = tail1[e], tail2[e], edge_part[e]
            if c == parts:
                # one array is written a loop: with two, each loop would begin by comparing rows
                for lane in range(L):
                    O[a, lane] += above[lane] * X[b, lane]
                for lane in range(L):
                    O[b, lane] += above[lane] * X[a, lane]
            else:
                for lane in range(L):  # E is NaN only at nodes that the lane does not visit
                    flow[lane] = above[lane] * E[c, lane] if above[lane] > 0 else 0.0
                for lane in range(L):
                    O[a, lane] += flow[lane] * X[b, lane]
                for lane in range(L):
                    O[b, lane] += flow[lane] * X[a, lane]
                for lane in range(L):
                    M[c, lane] += flow[lane] * X[a, lane] * X[b, lane]


@kernel
def typical(S, used, counts, goal, m):
    """The mean m of each lane's finite scores; 0 where no shift is allowed."""
    L = S.shape[1]
    number = np.zeros(L)
    for lane in range(L):
        m[lane] = 0.0
    for p in used:
        for lane in range(L):
            finite = abs(S[p, lane]) < math.inf
            m[lane] += S[p, lane] if finite else 0.0
            number[lane] += 1.0 if finite else 0.0
    for lane in range(L):
        m[lane] = m[lane] / max(number[lane], 1.0) if counts[goal[lane]] > 0 else 0.0


class ProductBlock:
    """The arrays of one chunk of items, with the bottom-up pass done.

    ``left (L)`` says which items are out of range: their results mean nothing.
    """

    def __init__(self, forest: Forest, scores: NDArray, goal: Ints, gamma: float) -> None:
        self.forest, self.goal, self.gamma, self.last = forest, goal, gamma, int(goal.max())
        self.lists = forest.incoming()
        L = len(scores)
        S = np.empty((forest.num_parts + 1, L))
        S[:-1] = scores.T
        self.E, self.X = np.ones_like(S), np.ones((forest.num_nodes + 1, L))
        self.counts = forest.part_counts
        self.m, self.left = np.empty(L), np.empty(L, np.bool_)
        typical(S, forest.used_parts, self.counts, goal, self.m)
        inside(
            S, gamma, self.last, goal, self.counts, *self.lists, self.m, self.E, self.X, self.left
        )  # fmt: skip

    def values(self) -> NDArray:
        with np.errstate(divide="ignore"):
            x = np.log(self.X[self.goal, np.arange(len(self.goal))])
        return self.gamma * x + self.m * self.counts[self.goal]

    def gradient(self) -> NDArray:
        O, M = np.zeros_like(self.X), np.zeros_like(self.E)
        outside(self.last, self.goal, *self.lists, self.E, self.X, O, M)
        return M[:-1].T
