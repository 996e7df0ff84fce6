"""Graph algorithms for the CPU: topological order and shortest paths."""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structmax.jit import array, kernel, run_chunks


@kernel
def topological_order(ptr: Any, head: Any, degree: Any) -> Any:
    """Nodes so that every edge points forward; fewer than all if there is a cycle (Kahn, 1962).

    The edges out of node v lead to ``head[ptr[v]:ptr[v + 1]]``; ``degree`` counts the edges into
    each node and is used up.
    """
    order = np.empty(len(degree), np.int64)
    count = 0
    for v in range(len(degree)):
        if degree[v] == 0:
            order[count] = v
            count += 1
    done = 0
    while done < count:
        v = order[done]
        done += 1
        for e in range(ptr[v], ptr[v + 1]):
            degree[head[e]] -= 1
            if degree[head[e]] == 0:
                order[count] = head[e]
                count += 1
    return order[:count]


@kernel
def descendants(order: Any, ptr: Any, head: Any, start: int) -> Any:
    """Which nodes can be reached from ``start``, itself included; the graph as above."""
    found = np.zeros(len(order), np.bool_)
    found[start] = True
    for v in order:
        if found[v]:
            for e in range(ptr[v], ptr[v + 1]):
                found[head[e]] = True
    return found


@kernel
def _shortest(scores: Any, diagonal: bool, z: Any) -> float:
    """One grid: marks the cells of a best path in z and returns its score."""
    h, w = scores.shape
    for r in range(h):
        for c in range(w):
            if not scores[r, c] <= 0:
                z[:] = math.nan
                return math.nan
    cost = np.full((h, w), math.inf)
    count = np.zeros((h, w), np.int64)
    before = np.full((h, w), -1, np.int64)
    cost[0, 0], count[0, 0] = -np.float64(scores[0, 0]), 1
    heap = [(cost[0, 0], count[0, 0], 0)]
    while len(heap):
        far, cells, at = heapq.heappop(heap)
        r, c = at // w, at % w
        if far > cost[r, c] or (far == cost[r, c] and cells > count[r, c]):
            continue  # a better way was found since
        if at == h * w - 1:
            break
        for dr in range(-1, 2):
            for dc in range(-1, 2):
                y, x = r + dr, c + dc
                if (dr == 0) == (dc == 0) and not (diagonal and dr != 0):
                    continue
                if y < 0 or y >= h or x < 0 or x >= w:
                    continue
                new = far - np.float64(scores[y, x])
                # fewer cells among equals, so that no two cells of the path touch by a shortcut
                if new < cost[y, x] or (new == cost[y, x] < math.inf and cells + 1 < count[y, x]):
                    cost[y, x], count[y, x], before[y, x] = new, cells + 1, at
                    heapq.heappush(heap, (new, cells + 1, y * w + x))
    if cost[h - 1, w - 1] == math.inf:
        z[:] = math.nan
        return -math.inf
    z[:] = 0
    at = h * w - 1
    while at >= 0:
        z[at // w, at % w] = 1
        at = before[at // w, at % w]
    return -cost[h - 1, w - 1]


@kernel
def _shortest_items(low: int, high: int, scores: Any, diagonal: bool, best: Any, z: Any) -> None:
    for item in range(low, high):
        best[item] = _shortest(scores[item], diagonal, z[item])


def grid_path(scores: Tensor, diagonal: bool) -> tuple[Tensor, Tensor]:
    """Scores of the best paths ``(B)`` and their cells ``(B, h, w)``, by Dijkstra's algorithm."""
    items, h, w = scores.shape
    best, z = (
        torch.empty(items, dtype=torch.float64, device="cpu"),
        torch.empty(scores.shape, dtype=scores.dtype, device="cpu"),
    )
    arrays = array(scores), diagonal, best.numpy(), z.numpy()
    run_chunks(lambda low, high: _shortest_items(low, high, *arrays), items, 40 * h * w)
    return best.to(scores.dtype), z
