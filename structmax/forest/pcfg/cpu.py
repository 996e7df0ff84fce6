"""Walks down finished charts, compiled by numba: exact draws and the k best trees.

A walk chooses an edge (k, B, C), a split and the labels of both children, for each span from the
whole sentence down. Charts are ``chart (B, n, n, N)`` as ``[first, width − 1]`` and ``leaf
(B, n, P)``; everything is float64 and γ = 1. An edge has the number (k·S + B)·S + C.
"""

from __future__ import annotations

import heapq
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from structmax.forest.pcfg.low_rank import LowRank
from structmax.jit import array, exp, kernel, run_chunks

INF = math.inf
LARGE = 1e6  # beyond it, the rounding of a value is no longer far below the terms it is a sum of


@kernel(inner=True)
def span(chart, leaf, i, j):
    """The values of span i..j, and the first of its symbols."""
    if i == j:
        return leaf[i], chart.shape[2]
    return chart[i, j - i], 0


@kernel(fast=True, inner=True)
def row_sum(base, right, rules):
    """Σ_C exp(base + right_C + rule_C)."""
    total = 0.0
    for c in range(right.shape[0]):
        total += exp(base + (right[c] + rules[c]))
    return total


@kernel(inner=True)
def draw_edge(chart, leaf, rules, i, j, norm, u):
    """An edge of probability exp(term − norm), for one parent's rules; u is uniform.

    Rounding may leave u beyond the last edge; then it is one of the last.
    """
    S = rules.shape[0]
    chosen = -1
    for k in range(i, j):
        left, first = span(chart, leaf, i, k)
        right, second = span(chart, leaf, k + 1, j)
        for b in range(left.shape[0]):
            base, row = left[b] - norm, rules[first + b, second : second + right.shape[0]]
            mass = row_sum(base, right, row)
            if not mass > 0:
                continue
            if u < mass:
                for c in range(right.shape[0]):
                    p = exp(base + (right[c] + row[c]))
                    if p > 0:
                        chosen = (k * S + first + b) * S + second + c
                        if u < p:
                            break
                    u -= p
                return chosen
            u -= mass
            chosen = (k * S + first + b) * S + second + heaviest(right, row)
    return chosen


@kernel(inner=True)
def heaviest(right, row):
    """Where right + row is largest."""
    best = 0
    for c in range(right.shape[0]):
        if right[c] + row[c] > right[best] + row[best]:
            best = c
    return best


@kernel(inner=True)
def draw_edge_by_maximum(chart, leaf, rules, i, j, u):
    """The same with the largest term taken out instead of norm: for scores of any size. −1 where
    a sum overflows."""
    top, best = best_edge(chart, leaf, rules, i, j, INF, -1)
    total, _ = edge_beyond(chart, leaf, rules, i, j, top, INF)
    if not (-INF < top < INF and total > 0):
        return -1
    _, edge = edge_beyond(chart, leaf, rules, i, j, top, u * total)
    return edge if edge >= 0 else best


@kernel(inner=True)
def edge_beyond(chart, leaf, rules, i, j, top, limit):
    """Σ exp(term − top) up to the first edge where it is above the limit, and that edge or −1."""
    S = rules.shape[0]
    total = 0.0
    for k in range(i, j):
        left, first = span(chart, leaf, i, k)
        right, second = span(chart, leaf, k + 1, j)
        for b in range(left.shape[0]):
            row = rules[first + b]
            for c in range(right.shape[0]):
                total += math.exp((left[b] + right[c]) + row[second + c] - top)
                if total > limit:
                    return total, (k * S + first + b) * S + second + c
    return total, -1


@kernel
def draws(low, high, chart, leaf, spans, root, rules, lengths, uniform, z):
    """Indicators z ``(D, B, n, n, S)``, zeros before, of one tree for each row of ``uniform``;
    still zeros if an item's best is −inf, or +inf or NaN of scores that were not looked at; NaN if
    sums overflow on the way down."""
    n, N, S = chart.shape[1], chart.shape[3], spans.shape[3]
    todo = np.empty((n + 1, 3), np.int64)
    for b in range(low, high):
        r = rules[b if rules.shape[0] > 1 else 0]
        last = lengths[b] - 1
        top = -INF
        for a in range(N):
            top = max(top, root[b, a] + chart[b, 0, last, a])
        for d in range(uniform.shape[0] if -INF < top < INF else 0):
            mass = 0.0
            for a in range(N):
                mass += math.exp(root[b, a] + chart[b, 0, last, a] - top)
            u, symbol = uniform[d, b, 0] * mass, 0
            for a in range(N):
                p = math.exp(root[b, a] + chart[b, 0, last, a] - top)
                if p > 0:
                    symbol = a
                    if u < p:
                        break
                u -= p
            todo[0] = (0, last, symbol)
            size, used = 1, 1
            while size > 0:
                size -= 1
                i, j, a = todo[size]
                z[d, b, i, j, a] = 1
                if i == j:
                    continue
                value, own, u = chart[b, i, j - i, a], spans[b, i, j, a], uniform[d, b, used]
                used += 1
                edge = -1
                if abs(value) < LARGE and abs(own) < LARGE:
                    edge = draw_edge(chart[b], leaf[b], r[a], i, j, value - own, u)
                if edge < 0:
                    edge = draw_edge_by_maximum(chart[b], leaf[b], r[a], i, j, u)
                if edge < 0:
                    z[d, b] = math.nan
                    break
                k = edge // (S * S)
                todo[size] = (k + 1, j, edge % S)
                todo[size + 1] = (i, k, edge // S % S)
                size += 2


@kernel(inner=True)
def pick(weights, u):
    """An index with probability proportional to its weight; u is uniform."""
    total = 0.0
    for i in range(weights.shape[0]):
        total += weights[i]
    u *= total
    chosen = 0
    for i in range(weights.shape[0]):
        if weights[i] > 0:
            chosen = i
            if u < weights[i]:
                break
        u -= weights[i]
    return chosen


@kernel(inner=True)
def scaled(p, m, leaf_p, leaf_m, i, j):
    """exp(β − m) of span i..j, its m, and the first of its symbols."""
    if i == j:
        return leaf_p[i], leaf_m[i, 0], p.shape[2]
    return p[i, j - i], m[i, j - i, 0], 0


@kernel
def low_rank_draws(
    low, high, p, m, leaf_p, leaf_m, lefts, rights, by_left, by_right, by_parent, goal, lengths,
    uniform, z,
):  # fmt: skip
    """The same from the chart of a grammar of low rank, in exp space. Each rule takes four uniform
    numbers: for its split, its rank, and the labels of both children."""
    n, R = p.shape[1], by_parent.shape[2]
    todo = np.empty((n + 1, 3), np.int64)
    weight, rank = np.empty(n), np.empty(R)
    for b in range(low, high):
        F, G = (
            by_left[b if by_left.shape[0] > 1 else 0],
            by_right[b if by_right.shape[0] > 1 else 0],
        )
        H = by_parent[b if by_parent.shape[0] > 1 else 0]
        chart = (p[b], m[b], leaf_p[b], leaf_m[b])
        for d in range(uniform.shape[0]):
            todo[0] = (0, lengths[b] - 1, pick(goal[b], uniform[d, b, 0]))
            size, used = 1, 1
            while size > 0:
                size -= 1
                i, j, a = todo[size]
                z[d, b, i, j, a] = 1
                if i == j:
                    continue
                top = -INF
                for k in range(i, j):
                    weight[k - i] = scaled(*chart, i, k)[1] + scaled(*chart, k + 1, j)[1]
                    top = max(top, weight[k - i])
                for k in range(i, j):
                    total = 0.0
                    left, right = lefts[b, i, k - i], rights[b, j, n - j + k]
                    for r in range(R):
                        total += H[a, r] * left[r] * right[r]
                    weight[k - i] = math.exp(weight[k - i] - top) * total
                k = i + pick(weight[: j - i], uniform[d, b, used])
                left, right = lefts[b, i, k - i], rights[b, j, n - j + k]
                for r in range(R):
                    rank[r] = H[a, r] * left[r] * right[r]
                r = pick(rank, uniform[d, b, used + 1])
                values, _, first = scaled(*chart, i, k)
                factor = F[first : first + values.shape[0], r]
                todo[size + 1] = (i, k, first + pick(values * factor, uniform[d, b, used + 2]))
                values, _, first = scaled(*chart, k + 1, j)
                factor = G[first : first + values.shape[0], r]
                todo[size] = (k + 1, j, first + pick(values * factor, uniform[d, b, used + 3]))
                used += 4
                size += 2


@kernel(inner=True)
def best_edge(chart, leaf, rules, i, j, below, after):
    """The best edge and its score among those that come after (below, after) in the order of
    falling scores and, within a score, rising numbers. −inf if there is none."""
    S = rules.shape[0]
    best, chosen = -INF, -1
    for k in range(i, j):
        left, first = span(chart, leaf, i, k)
        right, second = span(chart, leaf, k + 1, j)
        for b in range(left.shape[0]):
            row = rules[first + b]
            number = (k * S + first + b) * S + second
            for c in range(right.shape[0]):
                x = (left[b] + right[c]) + row[second + c]
                if x > best and (x < below or (x == below and number + c > after)):
                    best, chosen = x, number + c
    return best, chosen


@kernel(inner=True)
def best_root(root, values, below, after):
    best, chosen = -INF, -1
    for a in range(root.shape[0]):
        x = root[a] + values[a]
        if x > best and (x < below or (x == below and a > after)):
            best, chosen = x, a
    return best, chosen


@kernel
def k_best(low, high, chart, leaf, spans, root, rules, lengths, scores, z):
    """Scores ``(B, k)``, −inf before, and indicators ``(B, k, n, n, S)``, zeros before.

    A tree is the list of its choices in preorder, the root's symbol first. The trees that agree
    with a found one before choice t, and differ there, are searched by letting choice t be the next
    best edge and all later ones the best, whose score the chart of the maximum tells (Lawler, 1972;
    the order of edges is found lazily, as by Huang & Chiang, 2005).
    """
    n, S = chart.shape[1], spans.shape[3]
    k = scores.shape[1]
    choice, value = np.empty((k, n), np.int64), np.empty((k, n))
    place, todo = np.empty((n, 3), np.int64), np.empty((n + 1, 3), np.int64)
    for b in range(low, high):
        r = rules[b if rules.shape[0] > 1 else 0]
        last = lengths[b] - 1
        whole = chart[b, 0, last]
        x, edge = best_root(root[b], whole, INF, -1)
        # minus the score; the tree before, where to differ from it, by which edge of what score
        queue = [(-x, -1, 0, edge, x)]
        found = 0
        while found < k and len(queue) > 0:
            total, parent, t, edge, x = heapq.heappop(queue)
            if edge < 0:
                continue
            for s in range(t):
                choice[found, s] = choice[parent, s]
            choice[found, t], value[found, t] = edge, x
            score = 0.0
            if t > 0:
                todo[0] = (0, last, choice[found, 0])
            else:
                todo[0] = (0, last, edge)
            score += root[b, todo[0, 2]]
            size, s = 1, 0
            while size > 0:
                size -= 1
                i, j, a = todo[size]
                z[b, found, i, j, a] = 1
                score += spans[b, i, j, a]
                if i == j:
                    continue
                s += 1
                place[s] = (i, j, a)
                if s > t:
                    value[found, s], choice[found, s] = best_edge(
                        chart[b], leaf[b], r[a], i, j, INF, -1
                    )
                e = choice[found, s]
                split, left, right = e // (S * S), e // S % S, e % S
                score += r[a, left, right]
                todo[size] = (split + 1, j, right)
                todo[size + 1] = (i, split, left)
                size += 2
            scores[b, found] = score
            found += 1
            if found == k:
                break
            for s in range(t, last + 1):
                old, number = value[found - 1, s], choice[found - 1, s]
                if s == 0:
                    x, edge = best_root(root[b], whole, old, number)
                else:
                    i, j, a = place[s]
                    x, edge = best_edge(chart[b], leaf[b], r[a], i, j, old, number)
                if edge >= 0:
                    heapq.heappush(queue, (total + old - x, found - 1, s, edge, x))


def _arrays(*tensors: Tensor) -> list[NDArray]:
    return [array(t.cpu()) for t in tensors]


def sample(
    chart: Tensor, leaf: Tensor, spans: Tensor, root: Tensor, rules: Tensor, lengths: Tensor,
    uniform: Tensor,
) -> Tensor:  # fmt: skip
    """Indicators ``(D, B, n, n, S)`` of exact draws from the chart of sums."""
    z = torch.zeros((len(uniform), *spans.shape), dtype=torch.float64, device="cpu")
    inputs = _arrays(chart, leaf, spans, root, rules, lengths, uniform)
    work = len(uniform) * spans.shape[1] ** 2 * spans.shape[3] * 10
    run_chunks(lambda i, j: draws(i, j, *inputs, z.numpy()), len(spans), work)
    return z


def sample_low_rank(state: LowRank, uniform: Tensor) -> Tensor:
    """The same after ``state.rise()``; an item without a tree gives no tree."""
    g, p, m = state.g, state.p, state.m
    z = torch.zeros((len(uniform), *g.spans.shape), dtype=torch.float64, device="cpu")
    charts = (p.by_start.x, m.by_start.x, p.leaf.x, m.leaf.x, *(side.x for side in state.sides))
    rest = (*(f.x for f in state.factors), state.goal.x, g.lengths, uniform)
    inputs = _arrays(*charts, *rest)
    work = len(uniform) * g.n**2 * state.factors[2].x.shape[-1] * 10
    run_chunks(lambda i, j: low_rank_draws(i, j, *inputs, z.numpy()), len(g.spans), work)
    return z


def kbest(
    chart: Tensor, leaf: Tensor, spans: Tensor, root: Tensor, rules: Tensor, lengths: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Scores ``(B, k)``, −inf where there is no such tree, and indicators ``(B, k, n, n, S)``."""
    B = len(spans)
    scores = torch.full((B, k), -INF, dtype=torch.float64, device="cpu")
    z = torch.zeros((B, k, *spans.shape[1:]), dtype=torch.float64, device="cpu")
    inputs = _arrays(chart, leaf, spans, root, rules, lengths)
    work = k * spans.shape[1] ** 2 * spans.shape[3] * 10
    run_chunks(lambda i, j: k_best(i, j, *inputs, scores.numpy(), z.numpy()), B, work)
    return scores, z
