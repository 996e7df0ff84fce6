"""Best trees of a directed graph, for the CPU: the best, the k best, and the best with each arc.

The algorithm is that of Chu and Liu (1965) and Edmonds (1967) on a dense matrix, in O(n²) as in
Tarjan (1977): follow best heads upwards from a node; where that closes a cycle, contract it to one
node, whose arcs are then scored by what they gain over the cycle's; unfold in the end.

A single root: arcs are compared by pairs (−number of root arcs, score), first entry first, so the
best tree has as few root arcs as there can be (Stanojević and Cohen, 2021, get the same O(n²)). A
cycle has none, so contracting leaves these numbers alone: a root arc is taken where there is no
other. No large constant is added to a score, so nothing is lost to rounding.

``S[i, j]`` is the score of head j for word i, −inf where there is no arc.
"""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structmax.jit import array, kernel, run_chunks
from structmax.oracles.lanes_cpu import LANES, largest


@kernel(fused=True, inner=True)
def _less(row: Any, x: float) -> None:
    for u in range(len(row)):
        row[u] -= x


@kernel(fused=True, inner=True)
def _take_better(row: Any, source: Any, into: Any, source_into: Any, won: float) -> None:
    """Arcs that gain more over ``won`` than those of ``into`` replace them."""
    for u in range(len(row)):
        x = row[u] - won
        better = x > into[u]
        into[u] = x if better else into[u]
        source_into[u] = source[u] if better else source_into[u]


@kernel(inner=True)
def _contract(members: Any, n: int, gain: Any, source: Any, best: Any) -> None:
    """Makes one node of a cycle: the first member's rows become those of all."""
    into = members[0]
    _less(gain[into, : n + 1], gain[into, best[into]])
    for c in members[1:]:
        _take_better(
            gain[c, : n + 1], source[c, : n + 1], gain[into], source[into], gain[c, best[c]]
        )


@kernel(inner=True)
def new_gain(s: int) -> Any:
    """Room for scores of heads, a row for each word: the root, then whole vectors of words."""
    return np.full((s, 1 + -(-(s - 1) // LANES) * LANES), -math.inf)


@kernel(inner=True)
def _best_arc(row: Any, single: bool) -> int:
    """The head of largest gain, −1 if there is none; a single root only where there is no other."""
    up = largest(row[1:]) + 1
    if up == len(row):
        return 0 if row[0] > -math.inf else -1
    return 0 if not single and row[0] > row[up] else up


@kernel(inner=True)
def _best_tree(S: Any, n: int, single: bool, gain: Any, ints: Any, big: Any, heads: Any) -> bool:
    """Writes the head of each word; False if there is no tree."""
    for i in range(1, n + 1):
        row = gain[i]
        for j in range(n + 1):
            row[j] = S[i, j]
        for j in range(n + 1, len(row)):
            row[j] = -math.inf
    return grow_tree(gain, n, single, ints, big, heads)


@kernel(inner=True)
def grow_tree(gain: Any, n: int, single: bool, ints: Any, big: Any, heads: Any) -> bool:
    """As ``_best_tree``, of scores in ``gain``, which are lost; −inf past n."""
    source = ints
    node, name, best, place, members = big[0], big[1], big[2], big[3], big[4]
    parent, arc_head, arc_word = big[5], big[6], big[7]
    # what all root arcs share, if one is used, is taken out first
    common = -math.inf
    for i in range(1, n + 1):
        gain[i, i] = -math.inf
        common = max(common, gain[i, 0])
    common = common if single and common > -math.inf else 0.0
    for i in range(1, n + 1):
        gain[i, 0] -= common
        best[i] = _best_arc(gain[i], single)
        if best[i] < 0:
            return False
    for v in range(2 * n + 1):
        parent[v] = -1
    for v in range(n + 1):
        node[v], name[v], place[v] = v, v, -1  # place: −1 new, −2 done, else where on the path
    place[0] = -2
    names = n + 1
    for start in range(1, n + 1):
        c, size = node[start], 0
        if place[c] == -2:
            continue
        while True:
            place[c], members[size] = size, c
            size += 1
            up = best[c]
            arc_head[name[c]], arc_word[name[c]] = up, source[c, up] if name[c] > n else c
            above = node[up]
            if place[above] == -2:
                break
            if place[above] == -1:
                c = above
                continue
            low = place[above]
            for at in range(low, size):
                if name[members[at]] <= n:  # a single word, until now
                    source[members[at], : n + 1] = members[at]
            _contract(members[low:size], n, gain, source, best)
            for at in range(low, size):
                place[members[at]] = -3  # gone
                parent[name[members[at]]] = names
            row = gain[above]
            for u in range(n + 1):  # no branch, which nobody could predict
                inside = place[node[u]] == -3
                node[u] = above if inside else node[u]
                row[u] = -math.inf if inside else row[u]
            c, size = above, low
            name[c] = names
            names += 1
            best[c] = _best_arc(gain[c], single)
            if best[c] < 0:
                return False
        for at in range(size):
            place[members[at]] = -2
    for v in range(names - 1, n, -1):  # an arc into a cycle replaces that of the word it enters
        child = arc_word[v]
        while parent[child] != v:
            child = parent[child]
        arc_head[child], arc_word[child] = arc_head[v], arc_word[v]
    count = 0
    for i in range(1, n + 1):
        heads[i] = arc_head[i]
        count += heads[i] == 0
    return count == 1 or not single or n == 0


@kernel(inner=True)
def _read(theta: Any, n: int, S: Any, label: Any) -> bool:
    """The best label of each arc and its score; False if a score is NaN or +inf."""
    for i in range(1, n + 1):
        for j in range(n + 1):
            S[i, j], label[i, j] = -math.inf, 0
            if i == j:
                continue
            for c in range(theta.shape[2]):
                x = theta[j, i, c]
                if not x < math.inf:
                    return False
                if x > S[i, j]:
                    S[i, j], label[i, j] = x, c
    return True


@kernel(inner=True)
def _total(S: Any, n: int, heads: Any) -> float:
    total = 0.0
    for i in range(1, n + 1):
        total += S[i, heads[i]]
    return total


@kernel
def _argmax_items(
    low: int, high: int, theta: Any, lengths: Any, single: bool, value: Any, out: Any
) -> None:
    s = theta.shape[1]
    S, gain = np.empty((s, s)), new_gain(s)
    label, ints = np.empty((s, s), np.int64), np.empty((s, s), np.int64)
    big, heads = np.empty((8, 2 * s), np.int64), np.zeros(s, np.int64)
    for item in range(low, high):
        n = lengths[item]
        if not _read(theta[item], n, S, label):
            value[item] = math.nan
        elif not _best_tree(S, n, single, gain, ints, big, heads):
            value[item] = -math.inf
        else:
            value[item] = _total(S, n, heads)
            for i in range(1, n + 1):
                out[item, i - 1] = heads[i] * theta.shape[3] + label[i, heads[i]]


@kernel
def _rest_items(low: int, high: int, theta: Any, lengths: Any, single: bool, rest: Any) -> None:
    s = theta.shape[1]
    S, gain = np.empty((s, s)), new_gain(s)
    label, ints = np.empty((s, s), np.int64), np.empty((s, s), np.int64)
    big, heads, row = np.empty((8, 2 * s), np.int64), np.zeros(s, np.int64), np.empty(s)
    for item in range(low, high):
        n = lengths[item]
        good = _read(theta[item], n, S, label)
        for m in range(1, n + 1):
            row[:] = S[m]
            for h in range(n + 1):
                if h == m:
                    continue
                S[m, :] = -math.inf
                S[m, h] = 0.0
                if not good:
                    rest[item, h, m] = math.nan
                elif _best_tree(S, n, single, gain, ints, big, heads):
                    rest[item, h, m] = _total(S, n, heads)
            S[m, :] = row


@kernel
def _kbest_items(
    low: int, high: int, theta: Any, lengths: Any, single: bool, value: Any, out: Any
) -> None:
    s, c, k = theta.shape[1], theta.shape[3], out.shape[1]
    best, S, gain = np.empty((s, s)), np.empty((s, s)), new_gain(s)
    label, ints = np.empty((s, s), np.int64), np.empty((s, s), np.int64)
    big, heads = np.empty((8, 2 * s), np.int64), np.zeros(s, np.int64)
    for item in range(low, high):
        n = lengths[item]
        if not _read(theta[item], n, best, label):
            value[item, 0] = math.nan
            continue
        space = 1 + k * n
        # a subset of trees: words below ``fixed`` have the choices of its best tree, and word
        # ``fixed`` none of those that are banned
        choice = np.zeros((space, s), np.int64)
        banned = np.zeros((space, s * c), np.bool_)
        fixed = np.ones(space, np.int64)
        if not _best_tree(best, n, single, gain, ints, big, heads):
            continue
        for i in range(1, n + 1):
            choice[0, i] = heads[i] * c + label[i, heads[i]]
        heap = [(-_total(best, n, heads), 0)]
        count, found = 1, 0
        while len(heap) > 0 and found < k:
            minus, at = heapq.heappop(heap)
            value[item, found] = -minus
            for i in range(1, n + 1):
                out[item, found, i - 1] = choice[at, i]
            found += 1
            if found == k:
                break
            S[1 : n + 1] = best[1 : n + 1]
            for i in range(1, fixed[at]):
                h = choice[at, i] // c
                S[i, :] = -math.inf
                S[i, h] = theta[item, h, i, choice[at, i] % c]
            for d in range(fixed[at], n + 1):
                own = choice[at, d]
                new = banned[count]
                new[:] = False
                if d == fixed[at]:
                    new[:] = banned[at]
                new[own] = True
                for h in range(n + 1):  # the best of what is left to word d
                    S[d, h], label[0, h] = -math.inf, 0
                    for j in range(c):
                        if h != d and not new[h * c + j] and theta[item, h, d, j] > S[d, h]:
                            S[d, h], label[0, h] = theta[item, h, d, j], j
                if _best_tree(S, n, single, gain, ints, big, heads):
                    fixed[count] = d
                    for i in range(1, n + 1):
                        if i < d:
                            choice[count, i] = choice[at, i]
                        else:
                            row = 0 if i == d else i
                            choice[count, i] = heads[i] * c + label[row, heads[i]]
                    heapq.heappush(heap, (-_total(S, n, heads), count))
                    count += 1
                S[d, :] = -math.inf  # for the next d this word is fixed
                S[d, own // c] = theta[item, own // c, d, own % c]
        order = np.argsort(-value[item, :found], kind="mergesort")  # rounding may swap equals
        value[item, :found] = value[item, :found][order]
        out[item, :found] = out[item, :found][order]


def _arrays(theta: Tensor, lengths: Tensor) -> tuple[Any, Any]:
    return array(theta, np.float64), array(lengths, np.int64)


def argmax(theta: Tensor, lengths: Tensor, single: bool) -> tuple[Tensor, Tensor]:
    """Scores ``(B)`` and heads ``(B, s−1)``; −inf where there is no tree."""
    items, s, _ = theta.shape
    value, heads = (
        torch.empty(items, dtype=torch.float64, device="cpu"),
        torch.zeros(items, s - 1, device="cpu").long(),
    )
    arrays = *_arrays(theta[..., None], lengths), single, value.numpy(), heads.numpy()
    run_chunks(lambda low, high: _argmax_items(low, high, *arrays), items, 20 * s * s)
    return value, heads


def rest(theta: Tensor, lengths: Tensor, single: bool) -> Tensor:
    """The score of the best tree with each arc, without that arc's own, ``(B, s, s)``: O(n⁴)."""
    items, s, _ = theta.shape
    out = torch.full(theta.shape, -math.inf, dtype=torch.float64, device="cpu")
    arrays = *_arrays(theta[..., None], lengths), single, out.numpy()
    run_chunks(lambda low, high: _rest_items(low, high, *arrays), items, 20 * s**4)
    return out


def kbest(theta: Tensor, lengths: Tensor, single: bool, k: int) -> tuple[Tensor, Tensor]:
    """Scores ``(B, k)`` and choices ``(B, k, s−1)`` of head·c + label, for ``(B, s, s, c)``.

    The set of trees is cut into pieces whose best trees are known (Lawler, 1972): the best of all
    comes next, and its piece is cut, word by word, by where a tree first differs from it. O(k n³).
    """
    items, s, _, c = theta.shape
    value = torch.full((items, k), -math.inf, dtype=torch.float64, device="cpu")
    choice = torch.zeros(items, k, s - 1, dtype=torch.int64, device="cpu")
    arrays = *_arrays(theta, lengths), single, value.numpy(), choice.numpy()
    work = (20 * s + c) * s * s * k
    run_chunks(lambda low, high: _kbest_items(low, high, *arrays), items, work)
    return value, choice
