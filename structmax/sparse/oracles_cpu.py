"""The active-set method over items of a batch, with each of the library's oracles.

Each kernel asks its oracle for the best structure under the gradient, as a list of its parts, and
hands it to ``completion_cpu.absorb`` until that has enough. Parts are numbered as in the rows of
``theta (B, D)``: all parts of the structure, flattened one after the other.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from structmax.forest.pcfg.best_cpu import best_parts, fill_chart
from structmax.forest.runs import edges_of
from structmax.jit import kernel
from structmax.oracles.arborescence_cpu import _read, grow_tree, new_gain
from structmax.oracles.assignment_cpu import _cost, _solve
from structmax.oracles.lanes_cpu import LANES
from structmax.sparse.active_set_cpu import (
    ACTIVE,
    ALIGNED,
    GAP,
    SHIFT,
    SIZE,
    STEPS,
    TAU,
    P,
    Y,
    begin,
    grown,
    is_full,
    new_state,
    seed,
    settle_seeds,
)
from structmax.sparse.completion_cpu import absorb, goes_on
from structmax.sparse.viterbi_cpu import best_tags

INF = math.inf
ROOM = 32


class Problem(NamedTuple):
    """What every oracle's kernel is given."""

    theta: Any  # (B, D) scores of parts
    penalised: int  # how many of them, the first ones
    width: int  # the most parts of a structure
    start: Any  # (B, K, D) structures to start from
    weights: Any  # (B, K)
    limits: Any  # max_iter, tol, and whether the whole face is looked for


class Found(NamedTuple):
    """The structures of some items, one after the other: the active ones of an item, then others
    of weight 0 with which they span its face."""

    count: Any  # (items) how many are of each
    active: Any  # (items) how many of these are active
    value: Any  # (items) the objective
    gap: Any  # (items) NaN where there is no structure
    steps: Any  # (items)
    place: Any  # (N) which slot of the result each has: 0 is that of the largest weight
    rows: Any  # (N, W) parts
    sizes: Any  # (N) how many
    probs: Any  # (N)
    ones: Any  # (N) U⁻ᵀ1
    factor: Any  # U of each item, row by row, one after the other


@kernel(inner=True)
def _start(problem: Any, aligned: bool) -> Any:
    s = new_state(problem.theta.shape[1], problem.penalised, problem.width, ROOM)
    # the parts of a structure to start from are in order, whatever the oracle's
    s.counts[ALIGNED] = 1 if aligned and problem.start.shape[1] == 0 else 0
    return s


@kernel(inner=True)
def _nothing(problem: Any, items: int) -> Any:
    room = items * ROOM
    rows = np.empty((room, problem.width), np.uint32)
    place, sizes = np.empty(room, np.int64), np.empty(room, np.int64)
    probs, ones, factor = np.empty(room), np.empty(room), np.empty(room * ROOM // 2)
    zeros = np.zeros(items, np.int64)
    none = np.full(items, np.nan)
    counts = zeros, zeros.copy(), none, none.copy(), zeros.copy()
    return Found(*counts, place, rows, sizes, probs, ones, factor)


@kernel(inner=True)
def _open(s: Any, problem: Any, b: int, found: Any) -> Any:
    """A state for item b, with the structures it starts from."""
    begin(s, problem.theta[b])
    for v in range(problem.start.shape[1]):
        if not problem.weights[b, v] > 0.0:
            continue
        length = 0
        for i in range(problem.start.shape[2]):
            for _ in range(int(problem.start[b, v, i])):
                if length < len(found):
                    found[length] = i
                length += 1
        if length > len(found):  # no structure of this kind
            continue
        s = seed(s, found, length, problem.weights[b, v])
    settle_seeds(s)
    return s


@kernel(inner=True)
def _longer(x: Any, needed: int) -> Any:
    """x with room for at least ``needed`` entries."""
    while len(x) < needed:
        x = np.concatenate((x, np.empty_like(x)))
    return x


@kernel(inner=True)
def _close(s: Any, out: Any, item: int, at: Any) -> Any:
    """Copies the support of an item into ``out``; returns it and where the next one goes."""
    k, (row, entry) = s.counts[SIZE], at
    out = Found(
        out.count,
        out.active,
        out.value,
        out.gap,
        out.steps,
        _longer(out.place, row + k),
        _longer(out.rows, row + k),
        _longer(out.sizes, row + k),
        _longer(out.probs, row + k),
        _longer(out.ones, row + k),
        _longer(out.factor, entry + k * (k + 1) // 2),
    )
    order = np.argsort(-s.vectors[P, :k])
    for v in range(k):
        out.place[row + order[v]] = v
        size = s.sizes[s.slot[v], 0]
        out.rows[row + v, :size], out.sizes[row + v] = s.rows[s.slot[v], :size], size
        out.probs[row + v], out.ones[row + v] = s.vectors[P, v], s.vectors[Y, v]
        out.factor[entry : entry + k - v] = s.U[v, v:k]
        entry += k - v
    out.count[item], out.active[item] = k, s.counts[ACTIVE]
    out.value[item] = s.levels[TAU] + s.levels[SHIFT] + (s.mu * s.mu).sum() / 2
    out.gap[item], out.steps[item] = s.levels[GAP], s.counts[STEPS]
    return out, (row + k, entry)


@kernel(inner=True)
def _trimmed(out: Any, at: Any) -> Any:
    """What ``Found`` holds, without the room that is left.

    As a plain tuple: where a signal comes during a kernel, such as Ctrl-C, numba crashes the
    process when it makes a named one for Python.
    """
    row, entry = at
    return (
        out.count,
        out.active,
        out.value,
        out.gap,
        out.steps,
        out.place[:row],
        out.rows[:row],
        out.sizes[:row],
        out.probs[:row],
        out.ones[:row],
        out.factor[:entry],
    )


@kernel(inner=True)
def _good(x: Any, low: int, high: int) -> bool:
    """Whether no number is NaN or +inf."""
    good = True
    for i in range(low, high):
        good &= x[i] < INF
    return good


@kernel(inner=True)
def _transitions(scores: Any, T: Any, back: Any) -> None:
    """Scores of steps, from and to, written into T and, the other way round, into ``back``."""
    c, at = T.shape[1], 0
    for step in range(len(scores) // (c * c)):
        for i in range(c):
            for j in range(c):
                T[step, i, j] = back[step, j, i] = scores[at]
                at += 1


@kernel
def chains(low: int, high: int, problem: Any, lengths: Any, shape: Any) -> Any:
    """Tag sequences: parts (n, c), then transitions (steps, c, c)."""
    longest, c, steps = shape
    aligned = steps > 1 or problem.penalised <= longest * c
    s, out, at = _start(problem, aligned), _nothing(problem, high - low), (0, 0)
    limits = problem.limits
    wide = -(-c // LANES) * LANES
    T, A = np.full((steps, c, wide), -INF), np.full((longest, wide), -INF)
    back, M = T.copy(), A.copy()
    for j in range(c):
        M[0, j] = 0.0
    found, first = np.empty(problem.width, np.int64), longest * c
    for b in range(low, high):
        n = lengths[b]
        s = _open(s, problem, b, found)
        used = min(steps, n - 1)
        if not (_good(s.theta, 0, n * c) and _good(s.theta, first, first + used * c * c)):
            continue
        _transitions(s.theta[first : first + used * c * c], T, back)
        go_on = True
        while go_on:
            if problem.penalised > first:
                _transitions(s.g[first : first + used * c * c], T, back)
            if not best_tags(s.g, n, c, first, T, back, A, M, found) > -INF:
                break
            if is_full(s):
                s = grown(s)
            go_on = absorb(s, found, 2 * n - 1, limits) or goes_on(s, limits)
        if not go_on:
            out, at = _close(s, out, b - low, at)
    return _trimmed(out, at)


@kernel(inner=True)
def _arcs(g: Any, n: int, both: bool, S: Any) -> bool:
    """As ``_read`` without labels; ``both``: the two ways round are added up."""
    worst, size = 0.0, len(S)
    for i in range(1, n + 1):
        for j in range(n + 1):
            x = g[j * size + i] + g[i * size + j] if both else g[j * size + i]
            S[i, j] = x
            worst += 0.0 if x < INF or i == j else 1.0
    return worst == 0.0


@kernel
def arborescences(
    low: int, high: int, problem: Any, lengths: Any, shape: Any, single: bool, both: bool
) -> Any:
    """Trees below node 0: parts (s, s, labels), [head, modifier]; ``both``: each arc either way."""
    size, _, labels = shape
    s, out, at = _start(problem, not both), _nothing(problem, high - low), (0, 0)
    limits = problem.limits
    S, label = new_gain(size), np.zeros((size, size), np.int64)
    ints = np.empty((size, size), np.int64)
    big, heads = np.empty((8, 2 * size), np.int64), np.zeros(size, np.int64)
    found = np.empty(problem.width, np.int64)
    for b in range(low, high):
        n = lengths[b]
        s = _open(s, problem, b, found)
        S[:, n + 1 :] = -INF
        go_on = True
        while go_on:
            if labels == 1:
                good = _arcs(s.g, n, both, S)
            else:
                good = _read(s.g.reshape(size, size, labels), n, S, label)
            if not good or not grow_tree(S, n, single, ints, big, heads):
                break
            length = 0
            for i in range(1, n + 1):
                h = heads[i]
                found[length] = (h * size + i) * labels + label[i, h]
                length += 1
                if both:
                    found[length] = i * size + h
                    length += 1
            if is_full(s):
                s = grown(s)
            go_on = absorb(s, found, length, limits) or goes_on(s, limits)
        if not go_on:
            out, at = _close(s, out, b - low, at)
    return _trimmed(out, at)


@kernel
def assignments(low: int, high: int, problem: Any, rows: Any, columns: Any, shape: Any) -> Any:
    """Matchings: parts (n, m)."""
    most, width = shape
    s, out, at = _start(problem, True), _nothing(problem, high - low), (0, 0)
    limits = problem.limits
    found, none = np.empty(problem.width, np.int64), np.zeros(max(most, width), np.bool_)
    for b in range(low, high):
        n, m = rows[b], columns[b]
        s = _open(s, problem, b, found)
        column, go_on = np.empty(min(n, m), np.int64), True
        while go_on:
            cost = _cost(s.g.reshape(most, width), n, m)
            if len(cost) == 0 or not _solve(cost, 0, none[: cost.shape[1]], column):
                break
            for i in range(len(column)):
                found[i] = i * width + column[i] if n <= m else column[i] * width + i
            if is_full(s):
                s = grown(s)
            go_on = absorb(s, found, len(column), limits) or goes_on(s, limits)
        if not go_on:
            out, at = _close(s, out, b - low, at)
    return _trimmed(out, at)


@kernel
def subsets(low: int, high: int, problem: Any, lengths: Any, most_of_all: int, k: Any) -> Any:
    """Subsets of bounded size: parts are taking each element, then leaving each."""
    least, most = k
    s, out, at = _start(problem, False), _nothing(problem, high - low), (0, 0)
    limits = problem.limits
    found, gain = np.empty(problem.width, np.int64), np.empty(most_of_all)
    for b in range(low, high):
        n = lengths[b]
        s = _open(s, problem, b, found)
        if n < least or not _good(s.theta, 0, n):
            continue
        go_on = True
        while go_on:
            forced, allowed = 0, 0
            for i in range(n):
                take, leave = s.g[i], s.g[most_of_all + i]
                gain[i] = leave - take  # the least are taken
                forced += leave == -INF
                allowed += take > -INF
                if take == -INF and leave == -INF:
                    allowed = -n
            if forced > most or allowed < least:
                break
            order = np.argsort(gain[:n])
            for r in range(n):
                i = order[r]
                taken = r < least or (r < most and gain[i] < 0.0)
                found[r] = i if taken else most_of_all + i
            if is_full(s):
                s = grown(s)
            go_on = absorb(s, found, n, limits) or goes_on(s, limits)
        if not go_on:
            out, at = _close(s, out, b - low, at)
    return _trimmed(out, at)


@kernel
def grammars(low: int, high: int, problem: Any, lengths: Any, shape: Any) -> Any:
    """Labelled trees: parts (n, n, S), then root symbols (N), then rules (N, S, S)."""
    n, S, N = shape
    s, out, at = _start(problem, False), _nothing(problem, high - low), (0, 0)
    limits = problem.limits
    found, todo = np.empty(problem.width, np.int64), np.empty((n + 1, 3), np.int64)
    chart, leaf = np.empty((n, n, N)), np.empty((n, S - N))
    room = np.empty((N, S * S)), np.empty(S * S)
    for b in range(low, high):
        s = _open(s, problem, b, found)
        go_on = True
        while go_on:
            spans = s.g[: n * n * S].reshape(n, n, S)
            root = s.g[n * n * S : n * n * S + N]
            rules = s.g[n * n * S + N :].reshape(N, S, S)
            if not abs(fill_chart(spans, root, rules, lengths[b], chart, leaf, *room)) < INF:
                break
            length = best_parts(chart, leaf, root, rules, lengths[b], todo, found)
            if is_full(s):
                s = grown(s)
            go_on = absorb(s, found, length, limits) or goes_on(s, limits)
        if not go_on:
            out, at = _close(s, out, b - low, at)
    return _trimmed(out, at)


@kernel(inner=True)
def _best_derivation(
    S: Any, goal: int, ptr: Any, tail1: Any, tail2: Any, edge_part: Any, node_part: Any, runs: Any,
    V: Any, back: Any,
) -> float:  # fmt: skip
    """Values of the nodes up to the goal, and which of its edges is best for each; NaN stays."""
    V[-1] = 0.0
    for v in range(goal + 1):
        e0, e1 = edges_of(v, ptr, tail1, tail2, edge_part, runs)
        top, chosen = -INF, e0
        for e in range(e0, e1):
            y = S[edge_part[e]] + V[tail1[e]] + V[tail2[e]]
            if y > top or y != y:
                top, chosen = y, e
        V[v], back[v] = top + S[node_part[v]], chosen - e0
    return V[goal]


@kernel
def forests(
    low: int,
    high: int,
    problem: Any,
    packed: Any,
    source: Any,
    goals: Any,
    lists: Any,
    longest: int,
) -> Any:
    """Derivations of a forest with scores ``packed (B, P)``; ``source (B, P)`` says which part of
    the structure each part of the forest stands for, −1 if none."""
    ptr, tail1, tail2, edge_part, node_part, runs = lists
    s, out, at = _start(problem, False), _nothing(problem, high - low), (0, 0)
    limits = problem.limits
    nodes, parts = len(node_part), packed.shape[1]
    V, back = np.empty(nodes + 1), np.empty(nodes, np.int64)
    S, stack = np.zeros(parts + 1), np.empty(longest + 2, np.int64)
    found = np.empty(problem.width, np.int64)
    for b in range(low, high):
        s = _open(s, problem, b, found)
        S[:parts] = packed[b]
        go_on = True
        while go_on:
            for j in range(parts):
                if 0 <= source[b, j] < problem.penalised:
                    x = s.g[source[b, j]]
                    S[j] = x if x == x else packed[b, j]  # what is not used may be NaN
            value = _best_derivation(S, goals[b], *lists, V, back)
            if not abs(value) < INF:
                break
            length, top = 0, 1
            stack[0] = goals[b]
            while top > 0:
                top -= 1
                v = stack[top]
                e0, _ = edges_of(v, ptr, tail1, tail2, edge_part, runs)
                e = e0 + back[v]
                for part in (node_part[v], edge_part[e]):
                    if part < parts and source[b, part] >= 0:
                        found[length] = source[b, part]
                        length += 1
                for tail in (tail2[e], tail1[e]):
                    if tail < nodes:
                        stack[top] = tail
                        top += 1
            if is_full(s):
                s = grown(s)
            go_on = absorb(s, found, length, limits) or goes_on(s, limits)
        if not go_on:
            out, at = _close(s, out, b - low, at)
    return _trimmed(out, at)
