"""Charts of the maximum and the best tree, compiled by numba: item by item, span by span.

The numbers are those of ``terms.Best``, bit by bit: X joins the splits of a span, and the rules
follow parent by parent. Rounding keeps order, so it does not matter that the largest sum is found
before a rule is added to it. A tie goes to the edge of the smallest number, as everywhere in
``cpu``. NaN stays NaN.

Rules and X are laid out by the kind of the children (see ``chart``), nn, np, pn, pp, so that those
of a span lie side by side: the last kind for two words, the middle ones for three, the first three
for more.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structmax.forest.pcfg.chart import Grammar
from structmax.forest.pcfg.cpu import best_edge, best_root, span
from structmax.forest.pcfg.products_cpu import larger
from structmax.jit import array, from_ordinal, kernel, ordinal, run_chunks

INF = math.inf


@kernel(inner=True)
def sort_rules(rules: Any, out: Any) -> None:
    """Rules ``(N, S, S)`` by kind, ``(N, S²)``."""
    N, S, _ = rules.shape
    for a in range(N):
        at = 0
        for low, high in ((0, N), (N, S)):
            for start, end in ((0, N), (N, S)):
                for b in range(low, high):
                    out[a, at : at + end - start] = rules[a, b, start:end]
                    at += end - start


@kernel(inner=True)
def raise_sums(x: float, row: Any, out: Any) -> None:
    """out = max(out, x + row)"""
    for c in range(len(out)):
        out[c] = larger(out[c], x + row[c])


@kernel(inner=True)
def largest_sum(x: Any, y: Any) -> float:
    """max(x + y), NaN if one is; of integers, which makes it vector instructions."""
    top, bad = ordinal(x[0] + y[0]), False
    for i in range(len(x)):
        total = x[i] + y[i]
        top = max(top, ordinal(total))
        bad |= total != total
    return math.nan if bad else from_ordinal(top)


@kernel(inner=True)
def fill_chart(
    spans: Any, root: Any, rules: Any, length: int, chart: Any, leaf: Any, sorted_rules: Any, X: Any
) -> float:
    """The best score of a tree, −inf if there is none.

    Written are ``chart (n, n, N)``, as ``[first, width − 1]``, and ``leaf (n, P)``; ``sorted_rules
    (N, S²)`` and ``X (S²)`` are room.
    """
    N, S, _ = rules.shape
    two_words = S * S - (S - N) * (S - N)
    sort_rules(rules, sorted_rules)
    chart[0, 0] = -INF  # no nonterminal derives a single word
    for i in range(length):
        leaf[i] = spans[i, i, N:]
    for w in range(2, length + 1):
        low, high = (two_words, S * S) if w == 2 else (N * N if w == 3 else 0, two_words)
        for i in range(length - w + 1):
            j = i + w - 1
            X[low:high] = -INF
            for k in range(i, j):
                left, first = span(chart, leaf, i, k)
                right, second = span(chart, leaf, k + 1, j)
                at = first * S + second * len(left)
                for b in range(len(left)):
                    raise_sums(left[b], right, X[at : at + len(right)])
                    at += len(right)
            for a in range(N):
                best = largest_sum(sorted_rules[a, low:high], X[low:high])
                chart[i, w - 1, a] = spans[i, j, a] + best
    best = -INF
    for a in range(N):
        best = larger(best, root[a] + chart[0, length - 1, a])
    return best


@kernel(inner=True)
def best_parts(
    chart: Any, leaf: Any, root: Any, rules: Any, length: int, todo: Any, found: Any
) -> int:
    """Writes the parts of the best tree of a finished chart, and returns how many they are: span
    (i·n + j)·S + A, then root symbols, then rules (A·S + B)·S + C. ``todo (n + 1, 3)`` is room."""
    n, (N, S) = len(chart), rules.shape[:2]
    _, symbol = best_root(root, chart[0, length - 1], INF, -1)
    first, size, count = n * n * S, 1, 1
    found[0] = first + symbol
    todo[0] = (0, length - 1, symbol)
    while size > 0:
        size -= 1
        i, j, a = todo[size]
        found[count] = (i * n + j) * S + a
        count += 1
        if i == j:
            continue
        _, edge = best_edge(chart, leaf, rules[a], i, j, INF, -1)
        k, pair = edge // (S * S), edge % (S * S)
        found[count] = first + N + a * S * S + pair
        count += 1
        todo[size] = (k + 1, j, pair % S)
        todo[size + 1] = (i, k, pair // S)
        size += 2
    return count


@kernel
def fill_charts(
    low: int, high: int, spans: Any, root: Any, rules: Any, lengths: Any, best: Any, chart: Any,
    leaf: Any,
) -> None:  # fmt: skip
    """The charts of the items low..high, and their best scores."""
    N, S = rules.shape[1:3]
    sorted_rules, X = np.empty((N, S * S)), np.empty(S * S)
    for b in range(low, high):
        given = spans[b], root[b], rules[b % len(rules)], lengths[b]
        best[b] = fill_chart(*given, chart[b], leaf[b], sorted_rules, X)


def charts(g: Grammar) -> tuple[Tensor, Tensor, Tensor]:
    """The best score ``(B)`` and the charts of the maximum, ``(B, n, n, N)`` and ``(B, n, P)``; set
    within an item's length only."""
    B, n, _, S = g.spans.shape
    shapes = (B,), (B, n, n, g.N), (B, n, g.P)
    out = [torch.empty(shape, dtype=torch.float64, device="cpu") for shape in shapes]
    tensors = (g.spans, g.root, g.rules, g.lengths, *out)
    arrays = [array(t) for t in tensors]
    run_chunks(lambda low, high: fill_charts(low, high, *arrays), B, n * n // 2 * g.N * S * S)
    return out[0], out[1], out[2]
