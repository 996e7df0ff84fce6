"""``products`` compiled by numba, for grammars small enough: item by item, span by span.

At a few symbols the many small products of torch cost more to call than to compute. The numbers are
the same: p = exp(β − m) of every span, X of a span, and totals; see ``products`` for the letters.
An item that has a total too small to trust comes back as NaN, to be computed there; a total that is
0 because nothing derives its symbol is right.

The symbols of a rule's children are nonterminals first, so by kind the entries of X that are used
are: preterminals with preterminals for a span of two words, all others for a longer one.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from structmax.forest.pcfg.chart import Grammar
from structmax.forest.pcfg.products import TINY
from structmax.jit import array, exp, kernel, run_chunks
from structmax.primitive import backend_for

LARGEST = 1 << 14  # entries N·S² of the rules; above, matrix products are quicker


@kernel(inner=True)
def larger(x, y):
    """Their maximum; NaN if one is."""
    return y if y > x or y != y else x


@kernel(fast=True, inner=True)
def join(i, j, p, m, first, X):
    """X of span i..j, and M, the largest m + m' of a split; ``first`` is N.

    p ``(n, n, S)`` and m ``(n, n)`` by first and last word; of a word the preterminals are set.
    """
    S = X.shape[0]
    top = -math.inf
    for k in range(i, j):
        top = larger(top, m[i, k] + m[k + 1, j])
    for b in range(S):
        for c in range(S):
            X[b, c] = 0.0
    if top == -math.inf:
        return 0.0
    for k in range(i, j):
        weight = exp(m[i, k] + m[k + 1, j] - top)
        low, high = (first, S) if k == i else (0, first)
        start, end = (first, S) if k + 1 == j else (0, first)
        for b in range(low, high):
            x = weight * p[i, k, b]
            for c in range(start, end):
                X[b, c] += x * p[k + 1, j, c]
    return top


@kernel(fast=True, inner=True)
def total_of(E, X, low, high, start, end):
    """Σ E·X over some rows and columns."""
    total = 0.0
    for b in range(low, high):
        for c in range(start, end):
            total += E[b, c] * X[b, c]
    return total


@kernel(fast=True, inner=True)
def spread(y, E, X, U, used):
    """U += y·E and used += y·X, for one parent."""
    for b in range(E.shape[0]):
        for c in range(E.shape[1]):
            U[b, c] += y * E[b, c]
            used[b, c] += y * X[b, c]


@kernel(fast=True, inner=True)
def hand_down(i, j, p, m, top, first, U, visits):
    """Adds to the visits of the children of span i..j what goes through each split."""
    S = U.shape[0]
    for k in range(i, j):
        weight = exp(m[i, k] + m[k + 1, j] - top)
        if weight == 0.0:
            continue
        low, high = (first, S) if k == i else (0, first)
        start, end = (first, S) if k + 1 == j else (0, first)
        for b in range(low, high):
            x, mass = weight * p[i, k, b], 0.0
            for c in range(start, end):
                mass += U[b, c] * p[k + 1, j, c]
                visits[k + 1, j, c] += x * U[b, c] * p[k + 1, j, c]
            visits[i, k, b] += x * mass


@kernel(inner=True)
def weigh_rules(rules, E, taken_out):
    """E = exp(rules − their largest), by parent."""
    N, S, _ = rules.shape
    for a in range(N):
        top = -math.inf
        for b in range(S):
            for c in range(S):
                top = larger(top, rules[a, b, c])
        taken_out[a] = 0.0 if top == -math.inf else top
        for b in range(S):
            for c in range(S):
                E[a, b, c] = exp(rules[a, b, c] - taken_out[a])


@kernel(inner=True)
def normalise(x, p):
    """p = exp(x − m), and m, their largest; zeros if that is −inf, NaN if an x is."""
    m = -math.inf
    for a in range(x.shape[0]):
        m = larger(m, x[a])
    for a in range(x.shape[0]):
        p[a] = 0.0 if m == -math.inf else exp(x[a] - m)
    return m


@kernel(inner=True)
def pairs_of(i, j, spans, totals, first, R):
    """Which pairs of symbols stand side by side in some split of span i..j."""
    S = R.shape[0]
    R[:] = False
    for k in range(i, j):
        low, high = (first, S) if k == i else (0, first)
        start, end = (first, S) if k + 1 == j else (0, first)
        for b in range(low, high):
            if not (spans[i, k, b] > -math.inf and (k == i or totals[i, k, b] > 0)):
                continue
            for c in range(start, end):
                R[b, c] |= spans[k + 1, j, c] > -math.inf and (
                    k + 1 == j or totals[k + 1, j, c] > 0
                )


@kernel(inner=True)
def is_derived(rules, R):
    """Whether some pair has a rule of this parent."""
    for b in range(rules.shape[0]):
        for c in range(rules.shape[1]):
            if R[b, c] and rules[b, c] > -math.inf:
                return True
    return False


@kernel(inner=True)
def rise(spans, root, rules, E, taken_out, length, p, m, totals, tops, X, R, q):
    """A of an item and the probabilities q of its root's symbol; NaN if a total is tiny."""
    N, S = E.shape[:2]
    for i in range(length):
        m[i, i] = normalise(spans[i, i, N:], p[i, i, N:])
    for w in range(2, length + 1):
        for i in range(length - w + 1):
            j = i + w - 1
            tops[i, j] = join(i, j, p, m, N, X)
            looked = False
            for a in range(N):
                if w == 2:
                    total = total_of(E[a], X, N, S, N, S)
                else:
                    total = total_of(E[a], X, 0, N, 0, S) + total_of(E[a], X, N, S, 0, N)
                if total < TINY and spans[i, j, a] > -math.inf:
                    if not looked:
                        pairs_of(i, j, spans, totals, N, R)
                        looked = True
                    if is_derived(rules[a], R):
                        return math.nan
                totals[i, j, a] = total
                log = math.log(total) if total != 0 else -math.inf
                p[i, j, a] = spans[i, j, a] + taken_out[a] + tops[i, j] + log
            m[i, j] = normalise(p[i, j, :N], p[i, j, :N])
    if length == 1:
        return -math.inf
    top = m[0, length - 1]
    for a in range(N):
        x = p[0, length - 1, a]
        q[a] = root[a] + (math.log(x) if x > 0 else -math.inf if x == 0 else math.nan)
    above = normalise(q, q)
    mass = 0.0
    for a in range(N):
        mass += q[a]
    for a in range(N):
        q[a] /= mass
    return top + above + math.log(mass) if above > -math.inf else top + above


@kernel
def values(low, high, spans, root, rules, lengths, out):
    """A of the items low..high."""
    n, (N, S) = spans.shape[1], rules.shape[1:3]
    E, taken_out, X, R = (
        np.empty((N, S, S)),
        np.empty(N),
        np.empty((S, S)),
        np.empty((S, S), np.bool_),
    )
    p, m, q = np.empty((n, n, S)), np.empty((n, n)), np.empty(N)
    totals, tops = np.empty((n, n, N)), np.empty((n, n))
    for b in range(low, high):
        own = rules[b % len(rules)]
        if b == low or len(rules) > 1:
            weigh_rules(own, E, taken_out)
        out[b] = rise(spans[b], root[b], own, E, taken_out, lengths[b], p, m, totals, tops, X, R, q)


@kernel
def gradients(low, high, spans, root, rules, lengths, out, of_spans, of_root, of_rules):
    """A of the items low..high, and expected uses of spans, root symbols and rules, which come in
    as zeros."""
    n, (N, S) = spans.shape[1], rules.shape[1:3]
    E, taken_out, X, R = (
        np.empty((N, S, S)),
        np.empty(N),
        np.empty((S, S)),
        np.empty((S, S), np.bool_),
    )
    U = np.empty((S, S))
    p, m, q = np.empty((n, n, S)), np.empty((n, n)), np.empty(N)
    totals, tops = np.empty((n, n, N)), np.empty((n, n))
    for b in range(low, high):
        own = rules[b % len(rules)]
        if b == low or len(rules) > 1:
            weigh_rules(own, E, taken_out)
        length, visits, used = lengths[b], of_spans[b], of_rules[b]
        out[b] = rise(spans[b], root[b], own, E, taken_out, length, p, m, totals, tops, X, R, q)
        if not out[b] > -math.inf:
            continue
        of_root[b] = q
        visits[0, length - 1, :N] = q
        for w in range(length, 1, -1):
            for i in range(length - w + 1):
                j = i + w - 1
                busy = False
                for a in range(N):
                    busy |= visits[i, j, a] != 0
                if not busy:
                    continue
                join(i, j, p, m, N, X)
                U[:] = 0.0
                for a in range(N):
                    if visits[i, j, a] != 0:
                        spread(visits[i, j, a] / totals[i, j, a], E[a], X, U, used[a])
                hand_down(i, j, p, m, tops[i, j], N, U, visits)
        for a in range(N):
            for left in range(S):
                for right in range(S):
                    used[a, left, right] *= E[a, left, right]


def fits(g: Grammar) -> bool:
    """Whether these kernels are the ones to use."""
    return backend_for(g.spans) == "cpu" and g.N * g.S * g.S <= LARGEST


def solve(g: Grammar, slopes: bool) -> list[Tensor]:
    """A ``(B)`` and, if asked, its gradient in spans, root and rules; NaN where A is not known."""
    tensors = (g.spans, g.root, g.rules, g.lengths)
    given = [array(t) for t in tensors]
    B, n, _, S = g.spans.shape
    outputs = [np.empty(B)]
    if slopes:
        outputs += [np.zeros(s) for s in ((B, n, n, S), (B, g.N), (B, g.N, S, S))]
    run = gradients if slopes else values
    work = n * n // 2 * g.N * S * S * (3 if slopes else 1)
    run_chunks(lambda low, high: run(low, high, *given, *outputs), B, work)
    return [torch.from_numpy(x) for x in outputs]
