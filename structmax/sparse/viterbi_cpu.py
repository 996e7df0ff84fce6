"""Viterbi's algorithm for one item, compiled.

Instead of keeping pointers back, the way back looks for the tag that gives exactly the number that
was best. Rows are padded by −inf to whole vectors of ``LANES`` numbers.
"""

from __future__ import annotations

import math
from typing import Any

from structmax.jit import kernel
from structmax.oracles.lanes_cpu import first_sum, max_plus

INF = math.inf


@kernel(inner=True)
def best_tags(
    g: Any, n: int, c: int, first: int, T: Any, back: Any, A: Any, M: Any, found: Any
) -> float:
    """The score of the best tags under scores g; their parts go to ``found``.

    ``T (1 or n − 1, c, C)`` holds the transitions, ``back`` their transposes. ``A (n, C)`` and
    ``M (n, C)`` are room for the best score up to each tag, with and without its own score; M[0]
    is 0. All are −inf past c.
    """
    for t in range(n):
        row, before = A[t], M[t]
        if t > 0:
            max_plus(A[t - 1], T[0 if T.shape[0] == 1 else t - 1], before)
        for j in range(c):
            row[j] = before[j] + g[t * c + j]
    top, tag = -INF, 0
    for j in range(c):
        if A[n - 1, j] > top:
            top, tag = A[n - 1, j], j
    if top == -INF:
        return top
    for t in range(n - 1, 0, -1):
        found[t] = t * c + tag
        step = 0 if T.shape[0] == 1 else t - 1
        before_it = first_sum(A[t - 1], back[step, tag], M[t, tag])
        found[n + t - 1] = first + (step * c + before_it) * c + tag
        tag = before_it
    found[0] = tag
    return top
