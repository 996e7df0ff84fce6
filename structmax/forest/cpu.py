"""The forest engine on the CPU, compiled by numba.

Items of a batch lie side by side in the innermost dimension of a block (``LANES`` of them), so that
one load of an index serves all of them and the arithmetic vectorises. Blocks are float64 whatever
the input: the sums of a long derivation keep their digits, and one compilation serves all dtypes.
Memory per item is O(nodes + parts): the weight of an edge is recomputed from the node values.
Value and gradient under Shannon are computed by ``products`` where these stay in range, and without
lists where the forest is a chart (``cpu_charts``).

The recurrence: with x[e] = V[tail₁(e)] + V[tail₂(e)] + θ[part(e)] for the edges e into v,

    V[v] = θ[part(v)] + maxΩ(x),    q = argmaxΩ(x),    G[tail] += G[v]·q[e] from the goal down.

Range: q is computed from x − max x and divided by its own sum, never from a difference to V[v],
which has lost the logarithm of the sum where scores are of order 1e16·γ. So the visits that leave a
node are those that reach it, whatever the scores; differences below the rounding of V (1e-16 of the
largest score on the way) are lost.

``V (v+1, L)`` node values, the last row 0 for the absent tail; ``S (P+1, L)`` scores, the last row
0 for the absent part; ``T (v, L)`` what a node needs to give back its backpointers besides its
options: the largest of them (Shannon, Hard) or the threshold τ less the largest (Tsallis).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from structmax.forest.cpu_charts import block_of, work_of
from structmax.forest.runs import edges_of
from structmax.forest.topology import Forest, Ints
from structmax.jit import array, exp, kernel, run_chunks
from structmax.smoothing import HARD, SHANNON

LANES = 16
INF = math.inf


@kernel
def level_of_nodes(ptr, tail1, tail2, edge_part, node_part, runs):
    """Longest distance of each node from the leaves."""
    v = len(ptr) - 1
    level = np.zeros(v + 1, np.int32)
    level[v] = -1
    for u in range(v):
        top = -1
        e0, e1 = edges_of(u, ptr, tail1, tail2, edge_part, runs)
        for e in range(e0, e1):
            top = max(top, level[tail1[e]], level[tail2[e]])
        level[u] = top + 1
    return level[:v]


@kernel
def size_of_derivations(ptr, tail1, tail2, edge_part, node_part, runs):
    """The most nodes in a derivation of each node, capped at 2**40."""
    v = len(ptr) - 1
    size = np.zeros(v + 1, np.int64)
    for u in range(v):
        top = 0
        e0, e1 = edges_of(u, ptr, tail1, tail2, edge_part, runs)
        for e in range(e0, e1):
            top = max(top, size[tail1[e]] + size[tail2[e]])
        size[u] = min(top + 1, 1 << 40)
    return size[:v]


@kernel
def threshold(x, degree, lane, peak, gamma, alpha):
    """τ − peak of Tsallis: Σ [(α−1)(x − τ)/γ]₊^{1/(α−1)} = 1, by Newton kept inside a bracket.

    A step that leaves the bracket, or is no step, halves the bracket: for α > 2 an option at the
    edge of the support has an endless slope.
    """
    rate, power = (alpha - 1.0) / gamma, 1.0 / (alpha - 1.0)
    low, high = -1.0 / rate, -(degree ** (1.0 - alpha)) / rate
    tau = low
    for _ in range(200):
        mass, slope = 0.0, 0.0
        for d in range(degree):
            base = rate * (x[d, lane] - peak - tau)
            if base > 0:
                if alpha == 2.0:
                    mass += base
                    slope += 1.0
                else:
                    p = base**power
                    mass += p
                    slope += p / base
            elif base != base:
                return base
        if mass >= 1.0:
            low = max(low, tau)
        else:
            high = min(high, tau)
        least = 2e-16 * abs(tau)
        if abs(mass - 1.0) <= 1e-15 or high - low <= least:
            break
        new = tau + (mass - 1.0) * gamma / slope if slope > 0 else high
        if not (low < new < high) or abs(new - tau) <= least:
            new = 0.5 * (low + high)
        tau = new
    return tau


@kernel  # not fast: the same sums must come out whenever they are recomputed
def options(x, V, S, e0, e1, tail1, tail2, edge_part, peak):
    """x[d] = θ[part(e)] + V[tail₁] + V[tail₂] of the edges e0..e1, and their largest."""
    L = peak.shape[0]
    for lane in range(L):
        peak[lane] = -INF
    for e in range(e0, e1):
        a, b, c, d = tail1[e], tail2[e], edge_part[e], e - e0
        for lane in range(L):
            y = V[a, lane] + V[b, lane] + S[c, lane]
            x[d, lane] = y
            peak[lane] = y if y > peak[lane] else peak[lane]


@kernel(fused=True)
def up(kind, gamma, alpha, S, V, T, x, last, ptr, tail1, tail2, edge_part, node_part, runs):
    """Values of nodes 0..last, and T."""
    L = S.shape[1]
    peak, total = np.empty(L), np.empty(L)
    inverse = 1.0 / gamma
    for v in range(last + 1):
        e0, e1 = edges_of(v, ptr, tail1, tail2, edge_part, runs)
        own = node_part[v]
        options(x, V, S, e0, e1, tail1, tail2, edge_part, peak)
        if kind == SHANNON:
            if e1 - e0 > 1:
                for lane in range(L):
                    total[lane] = 0.0
                    peak[lane] = peak[lane] if peak[lane] > -INF else 0.0
                for d in range(e1 - e0):
                    for lane in range(L):
                        total[lane] += exp((x[d, lane] - peak[lane]) * inverse)
                for lane in range(L):
                    V[v, lane] = peak[lane] + gamma * math.log(total[lane]) + S[own, lane]
            else:
                for lane in range(L):
                    V[v, lane] = x[0, lane] + S[own, lane]
            for lane in range(L):
                T[v, lane] = peak[lane]
        elif kind == HARD:
            for lane in range(L):
                for d in range(e1 - e0):
                    if x[d, lane] != x[d, lane]:
                        peak[lane] = x[d, lane]
                T[v, lane] = peak[lane]
                V[v, lane] = peak[lane] + S[own, lane]
        else:
            for lane in range(L):
                value = peak[lane]
                T[v, lane] = 0.0
                feasible = value > -INF
                for d in range(e1 - e0):
                    if x[d, lane] != x[d, lane]:
                        feasible, value = False, x[d, lane]
                if feasible:
                    tau = threshold(x, e1 - e0, lane, value, gamma, alpha)
                    rate, power = (alpha - 1.0) / gamma, 1.0 / (alpha - 1.0)
                    mass, gain = 0.0, 0.0
                    for d in range(e1 - e0):
                        base = rate * (x[d, lane] - peak[lane] - tau)
                        if base > 0:
                            p = base**power
                            mass += p
                            gain += p * (x[d, lane] - peak[lane])
                            gain -= p * (base - 1.0) * gamma / (alpha * (alpha - 1.0))  # p^α − p
                    value += gain / mass
                    T[v, lane] = tau
                V[v, lane] = value + S[own, lane]


@kernel(fused=True)
def weights(kind, gamma, alpha, x, count, peak, T, v, share):
    """Replaces the options x of node v by weights, and ``share`` by the inverse of their sum: the
    backpointers are q = x·share. Nothing where the node is infeasible."""
    L = x.shape[1]
    inverse = 1.0 / gamma
    if kind == SHANNON:
        if count == 1:
            for lane in range(L):
                x[0, lane] = 1.0 if x[0, lane] > -INF else x[0, lane] - x[0, lane]
                share[lane] = 1.0
            return
        for lane in range(L):
            share[lane] = 0.0
        for d in range(count):
            for lane in range(L):
                w = exp((x[d, lane] - peak[lane]) * inverse)
                x[d, lane] = w
                share[lane] += w
        for lane in range(L):
            share[lane] = 1.0 / share[lane]
    elif kind == HARD:
        for lane in range(L):
            chosen, share[lane] = -1, 1.0
            for d in range(count):
                if chosen < 0 and x[d, lane] == T[v, lane]:
                    chosen = d
            for d in range(count):
                x[d, lane] = 1.0 if d == chosen else 0.0
    else:
        rate, power = (alpha - 1.0) / gamma, 1.0 / (alpha - 1.0)
        for lane in range(L):
            total = 0.0
            for d in range(count):
                base = rate * (x[d, lane] - peak[lane] - T[v, lane])
                x[d, lane] = base**power if base > 0 else 0.0
                total += x[d, lane]
            share[lane] = 1.0 / total


@kernel(fused=True)
def down(
    kind, gamma, alpha, S, V, T, x, last, goal, ptr, tail1, tail2, edge_part, node_part, runs, G, M
):
    """Expected visits G of nodes and M of parts, from each lane's goal down."""
    L = S.shape[1]
    peak, share = np.empty(L), np.empty(L)
    for lane in range(L):
        G[goal[lane], lane] = 1.0 if V[goal[lane], lane] > -INF else 0.0
        if not V[goal[lane], lane] < INF:
            G[goal[lane], lane] = np.nan
    for v in range(last, -1, -1):
        visited = False
        for lane in range(L):
            visited |= G[v, lane] != 0
        if not visited:
            continue
        e0, e1 = edges_of(v, ptr, tail1, tail2, edge_part, runs)
        own = node_part[v]
        options(x, V, S, e0, e1, tail1, tail2, edge_part, peak)
        weights(kind, gamma, alpha, x, e1 - e0, peak, T, v, share)
        for lane in range(L):
            M[own, lane] += G[v, lane]
            # a node that is not visited may be infeasible, with weights that are NaN
            share[lane] = G[v, lane] * share[lane] if G[v, lane] != 0 else 0.0
        for e in range(e0, e1):
            a, b, c, d = tail1[e], tail2[e], edge_part[e], e - e0
            for lane in range(L):
                flow = share[lane] * x[d, lane] if share[lane] != 0 else 0.0
                G[a, lane] += flow
                G[b, lane] += flow
                M[c, lane] += flow


@kernel(fused=True)
def pointers(kind, gamma, alpha, S, V, T, x, ptr, tail1, tail2, edge_part, node_part, runs, q):
    """Backpointers q ``(L, e)`` of all nodes: zeros where one is infeasible, NaN where an option of
    it is."""
    L, first = S.shape[1], 0
    peak, share, bad = np.empty(L), np.empty(L), np.empty(L, np.bool_)
    for v in range(len(ptr) - 1):
        e0, e1 = edges_of(v, ptr, tail1, tail2, edge_part, runs)
        options(x, V, S, e0, e1, tail1, tail2, edge_part, peak)
        for lane in range(L):
            bad[lane] = False
            for d in range(e1 - e0):
                bad[lane] |= x[d, lane] != x[d, lane]
        weights(kind, gamma, alpha, x, e1 - e0, peak, T, v, share)
        for d in range(e1 - e0):
            for lane in range(L):
                weight = x[d, lane] * share[lane] if peak[lane] > -INF else 0.0
                q[lane, first + d] = math.nan if bad[lane] else weight
        first += e1 - e0


@kernel(fused=True)
def tangent(
    kind, gamma, alpha, S, V, T, x, last, goal, ptr, tail1, tail2, edge_part, node_part, runs,
    dS, dV, mean, G, dG, dM,
):  # fmt: skip
    """The derivative dM of the expected parts in direction dS (the Hessian-vector product).

    Up: ẋ = dS[part] + V̇[tails], V̇ = dS[part(v)] + Σ q ẋ.  Down: q̇ = s(ẋ − x̄)/γ with s = q^{2−α}
    and x̄ the mean of ẋ under s (s = q for Shannon; q̇ = 0 for Hard), Ġ[tail] += Ġ q + G q̇.
    """
    L = S.shape[1]
    peak, share, top, bottom = np.empty(L), np.empty(L), np.empty(L), np.empty(L)
    for v in range(last + 1):
        e0, e1 = edges_of(v, ptr, tail1, tail2, edge_part, runs)
        own = node_part[v]
        options(x, V, S, e0, e1, tail1, tail2, edge_part, peak)
        weights(kind, gamma, alpha, x, e1 - e0, peak, T, v, share)
        for lane in range(L):
            dV[v, lane], top[lane], bottom[lane] = dS[own, lane], 0.0, 0.0
        for e in range(e0, e1):
            a, b, c, d = tail1[e], tail2[e], edge_part[e], e - e0
            for lane in range(L):
                dx = dS[c, lane] + dV[a, lane] + dV[b, lane]
                q = x[d, lane] * share[lane] if V[v, lane] != -INF else 0.0
                dV[v, lane] += q * dx if q != 0 else 0.0
                if kind > SHANNON:
                    s = q ** (2.0 - alpha) if q > 0 else 0.0
                    top[lane] += s * dx if s > 0 else 0.0
                    bottom[lane] += s
        for lane in range(L):
            if kind > SHANNON:
                mean[v, lane] = top[lane] / bottom[lane] if bottom[lane] > 0 else 0.0
            else:
                mean[v, lane] = dV[v, lane] - dS[own, lane]
    inverse = 0.0 if kind == HARD else 1.0 / gamma
    for lane in range(L):
        G[goal[lane], lane] = 1.0 if V[goal[lane], lane] > -INF else 0.0
        if not V[goal[lane], lane] < INF:
            G[goal[lane], lane] = np.nan
    for v in range(last, -1, -1):
        visited = False
        for lane in range(L):
            visited |= G[v, lane] != 0
        if not visited:
            continue
        e0, e1 = edges_of(v, ptr, tail1, tail2, edge_part, runs)
        own = node_part[v]
        options(x, V, S, e0, e1, tail1, tail2, edge_part, peak)
        weights(kind, gamma, alpha, x, e1 - e0, peak, T, v, share)
        for lane in range(L):
            dM[own, lane] += dG[v, lane]
        for e in range(e0, e1):
            a, b, c, d = tail1[e], tail2[e], edge_part[e], e - e0
            for lane in range(L):
                q, flow, dflow = x[d, lane] * share[lane], 0.0, 0.0
                if G[v, lane] != 0 and q != 0:
                    dx = dS[c, lane] + dV[a, lane] + dV[b, lane]
                    s = q ** (2.0 - alpha) if kind > SHANNON else q
                    flow = G[v, lane] * q
                    dflow = dG[v, lane] * q + G[v, lane] * s * (dx - mean[v, lane]) * inverse
                G[a, lane] += flow
                G[b, lane] += flow
                dG[a, lane] += dflow
                dG[b, lane] += dflow
                dM[c, lane] += dflow


@kernel
def walk(
    kind, gamma, alpha, S, V, T, x, lane, goal, uniform, ptr, tail1, tail2, edge_part, node_part,
    runs, stack, z,
):  # fmt: skip
    """Counts in z the parts of one derivation: the best (Hard), or a draw, one number per visit.

    x needs room for the options of a node in its first column.
    """
    width, used, top = z.shape[0], 0, 1
    stack[0] = goal
    rate = (alpha - 1.0) / gamma
    while top > 0:
        top -= 1
        v = stack[top]
        if node_part[v] < width:
            z[node_part[v]] += 1
        e0, e1 = edges_of(v, ptr, tail1, tail2, edge_part, runs)
        chosen, total = e0, 0.0
        for e in range(e0, e1):
            y = V[tail1[e], lane] + V[tail2[e], lane] + S[edge_part[e], lane]
            if kind == SHANNON:
                total += math.exp((y - T[v, lane]) / gamma)
                x[e - e0, 0] = total
            elif kind > SHANNON:
                x[e - e0, 0] = y
            elif y == T[v, lane] and total == 0.0:
                chosen, total = e, 1.0
        if kind > SHANNON:
            peak = -INF
            for d in range(e1 - e0):
                peak = max(peak, x[d, 0])
            for d in range(e1 - e0):
                base = rate * (x[d, 0] - peak - T[v, lane])
                total += base ** (1.0 / (alpha - 1.0)) if base > 0 else 0.0
                x[d, 0] = total
        if kind != HARD:
            target = uniform[used] * total
            used += 1
            chosen = e0
            while chosen < e1 - 1 and not (x[chosen - e0, 0] > target):
                chosen += 1
        if edge_part[chosen] < width:
            z[edge_part[chosen]] += 1
        for tail in (tail2[chosen], tail1[chosen]):
            if tail < ptr.shape[0] - 1:
                stack[top] = tail
                top += 1


@kernel
def walks(
    kind, gamma, alpha, S, V, T, x, goal, uniform, ptr, tail1, tail2, edge_part, node_part, runs,
    stack, z,
):  # fmt: skip
    """``walk`` for every lane and every draw; NaN counts where there is no derivation."""
    for lane in range(S.shape[1]):
        for s in range(z.shape[0]):
            if -INF < V[goal[lane], lane] < INF:
                walk(
                    kind, gamma, alpha, S, V, T, x, lane, goal[lane], uniform[s, lane],
                    ptr, tail1, tail2, edge_part, node_part, runs, stack, z[s, lane],
                )  # fmt: skip
            else:
                z[s, lane] = np.nan


@kernel
def kbest_item(
    S, goal, k, ptr, tail1, tail2, edge_part, node_part, runs, V, back, heap, keys, stack, scores, z
):
    """The k best derivations of one item, by a heap at each node (Huang & Chiang, 2005, alg. 2).

    ``V (v+1, k)``; ``back (v, k, 3)``: edge and ranks of its tails; ``heap (cap, 3)``, ``keys``.
    From the candidate (e, i, j) come (e, i, j+1) and, if j = 0, (e, i+1, 0): each is pushed once.
    """
    v_count, width = ptr.shape[0] - 1, z.shape[1]
    V[v_count, 0] = 0.0
    for r in range(1, k):
        V[v_count, r] = -INF
    for v in range(goal + 1):
        own = S[node_part[v]]
        size = 0
        bad = own
        e0, e1 = edges_of(v, ptr, tail1, tail2, edge_part, runs)
        for e in range(e0, e1):
            y = S[edge_part[e]] + V[tail1[e], 0] + V[tail2[e], 0]
            if y > -INF:
                size = push(heap, keys, size, y, e, 0, 0)
            elif y != y:
                bad = y
        if bad != bad:  # has no order: every rank is NaN, and so are those that build on them
            V[v] = bad
            continue
        for r in range(k):
            if size == 0 or own == -INF:
                V[v, r] = -INF
                continue
            V[v, r] = keys[0] + own
            e, i, j = heap[0, 0], heap[0, 1], heap[0, 2]
            back[v, r, 0], back[v, r, 1], back[v, r, 2] = e, i, j
            size = pop(heap, keys, size)
            if j + 1 < k:
                y = S[edge_part[e]] + V[tail1[e], i] + V[tail2[e], j + 1]
                if y > -INF:
                    size = push(heap, keys, size, y, e, i, j + 1)
            if j == 0 and i + 1 < k:
                y = S[edge_part[e]] + V[tail1[e], i + 1] + V[tail2[e], 0]
                if y > -INF:
                    size = push(heap, keys, size, y, e, i + 1, 0)
    for r in range(k):
        scores[r] = V[goal, r]
        if not scores[r] > -INF:
            z[r] = 0.0 if scores[r] == -INF else scores[r]
            continue
        top = 1
        stack[0, 0], stack[0, 1] = goal, r
        while top > 0:
            top -= 1
            v, rank = stack[top, 0], stack[top, 1]
            if node_part[v] < width:
                z[r, node_part[v]] += 1
            edges_of(v, ptr, tail1, tail2, edge_part, runs)
            e = back[v, rank, 0]
            if edge_part[e] < width:
                z[r, edge_part[e]] += 1
            i, j = back[v, rank, 1], back[v, rank, 2]
            for tail, tail_rank in ((tail1[e], i), (tail2[e], j)):
                if tail < v_count:
                    stack[top, 0], stack[top, 1] = tail, tail_rank
                    top += 1


@kernel
def push(heap, keys, size, key, e, i, j):
    """Adds a candidate to a binary max-heap; returns the new size."""
    at = size
    while at > 0 and keys[(at - 1) // 2] < key:
        up_at = (at - 1) // 2
        keys[at] = keys[up_at]
        heap[at] = heap[up_at]
        at = up_at
    keys[at] = key
    heap[at, 0], heap[at, 1], heap[at, 2] = e, i, j
    return size + 1


@kernel
def pop(heap, keys, size):
    """Removes the largest; returns the new size."""
    size -= 1
    key = keys[size]
    e, i, j = heap[size, 0], heap[size, 1], heap[size, 2]
    at = 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and keys[child + 1] > keys[child]:
            child += 1
        if keys[child] <= key:
            break
        keys[at] = keys[child]
        heap[at] = heap[child]
        at = child
    keys[at] = key
    heap[at, 0], heap[at, 1], heap[at, 2] = e, i, j
    return size


@kernel(inner=True)
def larger(x, y):
    """The larger of two; NaN wins and stays."""
    return y if y > x or y != y else x


@kernel
def outside(S, V, last, goal, ptr, tail1, tail2, edge_part, node_part, runs, O, M):
    """M: the best score of a derivation through each part (hard inside V, hard outside O)."""
    L = S.shape[1]
    O[:] = -INF
    M[:] = -INF
    for lane in range(L):
        O[goal[lane], lane] = 0.0
    for v in range(last, -1, -1):
        own = node_part[v]
        for lane in range(L):
            if O[v, lane] != -INF:
                M[own, lane] = larger(M[own, lane], O[v, lane] + V[v, lane])
        e0, e1 = edges_of(v, ptr, tail1, tail2, edge_part, runs)
        for e in range(e0, e1):
            a, b, c = tail1[e], tail2[e], edge_part[e]
            for lane in range(L):
                if O[v, lane] == -INF:  # out of reach, so a NaN here is nobody's
                    continue
                above = O[v, lane] + S[own, lane] + S[c, lane]
                O[a, lane] = larger(O[a, lane], above + V[b, lane])
                O[b, lane] = larger(O[b, lane], above + V[a, lane])
                M[c, lane] = larger(M[c, lane], above + V[a, lane] + V[b, lane])


class Block:
    """The arrays of one chunk of items, with the bottom-up pass done."""

    def __init__(
        self, forest: Forest, scores: NDArray, goal: Ints, code: tuple[float, float, float]
    ) -> None:
        self.forest, self.goal, self.last = forest, goal, int(goal.max())
        self.code = (int(code[0]), code[1], code[2])
        self.lists = forest.incoming()
        L = len(scores)
        self.S = self.side_by_side(scores)
        self.V = np.empty((forest.num_nodes + 1, L))
        self.V[-1] = 0.0
        self.T = np.empty((forest.num_nodes, L))
        self.x = np.empty((forest.max_degree, L))
        up(*self.code, self.S, self.V, self.T, self.x, self.last, *self.lists)

    def side_by_side(self, rows: NDArray) -> NDArray:
        """``(L, P)`` to ``(P+1, L)`` in float64, a zero row last."""
        block = np.zeros((self.forest.num_parts + 1, len(rows)))
        block[:-1] = rows.T
        return block

    def values(self) -> NDArray:
        return self.V[self.goal, np.arange(len(self.goal))]

    def gradient(self) -> NDArray:
        G, M = np.zeros_like(self.V), np.zeros_like(self.S)
        down(*self.code, self.S, self.V, self.T, self.x, self.last, self.goal, *self.lists, G, M)
        return M[:-1].T

    def hvp(self, direction: NDArray) -> NDArray:
        dS, dV = self.side_by_side(direction), np.zeros_like(self.V)
        mean, G, dG = np.zeros_like(self.T), np.zeros_like(self.V), np.zeros_like(self.V)
        dM = np.zeros_like(self.S)
        tangent(
            *self.code, self.S, self.V, self.T, self.x, self.last, self.goal, *self.lists,
            dS, dV, mean, G, dG, dM,
        )  # fmt: skip
        return dM[:-1].T

    def backpointers(self, q: NDArray) -> None:
        """Writes those of all nodes, ``(L, e)``; the goals must be the last node."""
        pointers(*self.code, self.S, self.V, self.T, self.x, *self.lists, q)

    def walks(self, uniform: NDArray, width: int) -> NDArray:
        """``(S, L, width)``, a row of uniform numbers ``(S, L, ·)`` for each."""
        z = np.zeros((*uniform.shape[:2], width))
        stack = np.empty(int(self.forest.derivation_size[self.goal].max()) + 2, np.int32)
        walks(
            *self.code, self.S, self.V, self.T, self.x, self.goal, uniform, *self.lists, stack, z
        )  # fmt: skip
        return z

    def max_marginals(self, width: int) -> NDArray:
        O, M = np.empty_like(self.V), np.empty_like(self.S)
        outside(self.S, self.V, self.last, self.goal, *self.lists, O, M)
        return M[:width].T


Code = tuple[float, float, float]
_HARD: Code = (HARD, 1.0, 1.0)


def value(forest: Forest, scores: Tensor, goal: Tensor, code: Code) -> Tensor:
    """A ``(B)`` for scores ``(B, P)``."""
    out = torch.empty(len(scores), dtype=scores.dtype, device="cpu")
    theta, goals, a = array(scores), array(goal.int()), out.numpy()

    def task(items: slice | NDArray) -> None:
        a[items] = Block(forest, theta[items], goals[items], code).values()

    def task_by_products(items: slice) -> NDArray:
        block = block_of(forest, theta[items], goals[items], code[1], down=False)
        with np.errstate(over="ignore"):  # of an item that is left
            a[items] = block.values()
        return block.left

    _run(forest, len(scores), code, task, task_by_products)
    return out


def _run(
    forest: Forest,
    items: int,
    code: Code,
    task: Callable[[slice | NDArray], None],
    task_by_products: Callable[[slice], NDArray],
) -> None:
    """Runs a task over chunks of items; under Shannon by products, where they stay in range."""

    def run(low: int, high: int) -> None:
        if code[0] != SHANNON:
            return task(slice(low, high))
        left = task_by_products(slice(low, high))
        if left.any():
            task(low + np.flatnonzero(left))

    work = work_of(forest) if code[0] == SHANNON else forest.num_edges
    run_chunks(run, items, work, LANES)


def gradient(forest: Forest, scores: Tensor, goal: Tensor, code: Code) -> tuple[Tensor, Tensor]:
    """A ``(B)`` and its gradient ``(B, P)``."""
    value = torch.empty(len(scores), dtype=scores.dtype, device="cpu")
    mu = torch.empty_like(scores, memory_format=torch.contiguous_format)
    theta, goals, a, m = array(scores), array(goal.int()), value.numpy(), mu.numpy()

    def task(items: slice | NDArray) -> None:
        block = Block(forest, theta[items], goals[items], code)
        a[items], m[items] = block.values(), block.gradient()

    def task_by_products(items: slice) -> NDArray:
        block = block_of(forest, theta[items], goals[items], code[1], down=True)
        with np.errstate(over="ignore"):  # of an item that is left
            a[items], m[items] = block.values(), block.gradient()
        return block.left

    _run(forest, len(scores), code, task, task_by_products)
    return value, mu


def hvp(forest: Forest, scores: Tensor, direction: Tensor, goal: Tensor, code: Code) -> Tensor:
    """The Hessian of A times a direction ``(B, P)``."""
    out = torch.empty_like(scores, memory_format=torch.contiguous_format)
    theta, v, goals, w = array(scores), array(direction), array(goal.int()), out.numpy()

    def task(low: int, high: int) -> None:
        w[low:high] = Block(forest, theta[low:high], goals[low:high], code).hvp(v[low:high])

    run_chunks(task, len(scores), forest.num_edges, LANES)
    return out


def backpointers(forest: Forest, scores: Tensor, code: Code) -> Tensor:
    """q ``(B, e)``, float64: at every node, the distribution over its incoming edges."""
    # of a forest by rule that is too large for lists, ``head`` is refused
    out = torch.empty(len(scores), len(forest.head), dtype=torch.float64, device="cpu")
    theta, q = array(scores), out.numpy()
    last = np.full(len(scores), forest.num_nodes - 1, np.int32)

    def task(low: int, high: int) -> None:
        Block(forest, theta[low:high], last[low:high], code).backpointers(q[low:high])

    run_chunks(task, len(scores), forest.num_edges, LANES)
    return out


def sample(
    forest: Forest, scores: Tensor, goal: Tensor, uniform: Tensor, code: Code, width: int
) -> Tensor:
    """Part counts ``(S, B, width)`` of draws; ``uniform (S, B, ·)`` holds a number per visit."""
    out = torch.empty(*uniform.shape[:2], width, dtype=scores.dtype, device="cpu")
    theta, goals, u, z = array(scores), array(goal.int()), array(uniform), out.numpy()

    def task(low: int, high: int) -> None:
        block = Block(forest, theta[low:high], goals[low:high], code)
        z[:, low:high] = block.walks(u[:, low:high], width)

    run_chunks(task, len(scores), forest.num_edges, LANES)
    return out


def argmax(forest: Forest, scores: Tensor, goal: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The value under hard max and the part counts ``(B, width)`` of one best derivation."""
    value = torch.empty(len(scores), dtype=scores.dtype, device="cpu")
    out = torch.empty(len(scores), width, dtype=scores.dtype, device="cpu")
    theta, goals, a, z = array(scores), array(goal.int()), value.numpy(), out.numpy()

    def task(low: int, high: int) -> None:
        block = Block(forest, theta[low:high], goals[low:high], _HARD)
        a[low:high] = block.values()
        z[low:high] = block.walks(np.empty((1, high - low, 0)), width)[0]

    run_chunks(task, len(scores), forest.num_edges, LANES)
    return value, out


def max_marginals(forest: Forest, scores: Tensor, goal: Tensor, width: int) -> Tensor:
    """``(B, width)``: the best score of a derivation that uses each part."""
    out = torch.empty(len(scores), width, dtype=scores.dtype, device="cpu")
    theta, goals, m = array(scores), array(goal.int()), out.numpy()

    def task(low: int, high: int) -> None:
        m[low:high] = Block(forest, theta[low:high], goals[low:high], _HARD).max_marginals(width)

    run_chunks(task, len(scores), forest.num_edges, LANES)
    return out


def kbest(
    forest: Forest, scores: Tensor, goal: Tensor, k: int, width: int
) -> tuple[Tensor, Tensor]:
    """Scores ``(B, k)``, −inf past the last derivation, and part counts ``(B, k, width)``."""
    best = torch.empty(len(scores), k, dtype=scores.dtype, device="cpu")
    out = torch.empty(len(scores), k, width, dtype=scores.dtype, device="cpu")
    theta, goals, a, z = array(scores.double()), array(goal.int()), best.numpy(), out.numpy()

    def task(low: int, high: int) -> None:
        lists = forest.incoming()
        V = np.empty((forest.num_nodes + 1, k))
        back = np.empty((forest.num_nodes, k, 3), np.int32)
        room = forest.max_degree + 2 * k + 2
        heap, keys = np.empty((room, 3), np.int32), np.empty(room)
        stack = np.empty((int(forest.derivation_size[goals[low:high]].max()) + 2, 2), np.int32)
        value, counts = np.empty(k), np.empty((k, width))
        for b in range(low, high):
            counts[:] = 0.0
            kbest_item(
                np.append(theta[b], 0.0), goals[b], k, *lists,
                V, back, heap, keys, stack, value, counts,
            )  # fmt: skip
            a[b], z[b] = value, counts

    run_chunks(task, len(scores), forest.num_edges * max(1, k.bit_length()))
    return best, out
