"""Linear assignment on the CPU: shortest augmenting paths, and Murty's k best.

Every row of a cost matrix (at most as many rows as columns; +inf forbids) gets a column of its own
at the least total cost. Costs are −scores in float64.
"""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structmax.jit import array, kernel, run_chunks

INF = math.inf


@kernel(inner=True)
def _bid(cost: Any, first: int, u: Any, v: Any, row: Any, column: Any) -> bool:
    """Rows in turn take the column that is cheapest for them, from another row if need be.

    A column then costs more by what its row would lose with the next cheapest one, so that prices
    (−v) rise and the duals u and v stay feasible. After some turns rows may be left without a
    column. Returns whether every row has one to ask for (Jonker & Volgenant, 1987).
    """
    n, m = cost.shape
    waiting, count = np.empty(n, np.int64), 0
    for i in range(n - 1, first - 1, -1):
        waiting[count] = i
        count += 1
    for _ in range(4 * (n - first)):
        if count == 0:
            break
        count -= 1
        i = waiting[count]
        best, low, next_low = -1, INF, INF
        for j in range(m):
            x = cost[i, j] - v[j]
            if x < next_low:
                if x < low:
                    best, low, next_low = j, x, low
                else:
                    next_low = x
        if best < 0:
            return False
        owner = row[best]
        if owner >= 0 and not low < next_low < INF:
            u[i] = low  # nothing to bid with: this row waits for a path
            continue
        if next_low < INF:
            v[best] -= next_low - low
        row[best], column[i] = i, best
        if owner >= 0:
            column[owner] = -1
            waiting[count] = owner
            count += 1
    for i in range(first, n):
        if column[i] >= 0:
            u[i] = cost[i, column[i]] - v[column[i]]
    for t in range(count):
        i = waiting[t]
        u[i] = INF
        for j in range(m):
            u[i] = min(u[i], cost[i, j] - v[j])
    return True


@kernel(fused=True, inner=True)
def _relax(cost: Any, v: Any, base: float, at: int, dist: Any, back: Any) -> None:
    """Ways through row ``at`` that are shorter; a column that is done has dist −inf."""
    for j in range(len(v)):
        along = (cost[j] - v[j]) - base
        better = along < dist[j]
        dist[j] = along if better else dist[j]
        back[j] = at if better else back[j]


@kernel
def _solve(cost: Any, first: int, used: Any, column: Any) -> bool:
    """Writes the columns of the rows from ``first`` on, none of them among those ``used``.

    Rows that bidding leaves without a column enter by a shortest path of reassignments each, by
    Dijkstra's algorithm on costs reduced by the duals (Crouse, 2016). Returns whether there is an
    assignment.
    """
    n, m = cost.shape
    u, v, dist, when = np.empty(n), np.zeros(m), np.empty(m), np.empty(m)
    row, back, order = np.full(m, -1), np.empty(m, np.int64), np.empty(m, np.int64)
    column[first:] = -1
    for j in range(m):
        if used[j]:
            v[j] = -INF  # beyond any price
    if not _bid(cost, first, u, v, row, column):
        return False
    for i in range(first, n):
        if column[i] >= 0:
            continue
        dist[:] = INF
        at, far, count, end = i, 0.0, 0, -1
        while end < 0:
            _relax(cost[at], v, u[at] - far, at, dist, back)
            least, nearest = INF, -1
            for j in range(m):
                x = dist[j]
                # among equals a free column ends the search
                if x > -INF and (x < least or (x == least and x < INF and row[j] < 0)):
                    least, nearest = x, j
            if nearest < 0:
                return False
            far = least
            dist[nearest] = -INF  # done
            order[count], when[count] = nearest, far
            count += 1
            if row[nearest] < 0:
                end = nearest
            else:
                at = row[nearest]
        u[i] += far
        for t in range(count - 1):
            j = order[t]
            u[row[j]] += far - when[t]
            v[j] -= far - when[t]
        j = end
        while True:
            who = back[j]
            row[j] = who
            column[who], j = j, column[who]
            if who == i:
                break
    return True


@kernel
def _cost(scores: Any, n: int, m: int) -> Any:
    """−scores of an item's own n × m cells, the shorter side first; empty if one is NaN or +inf."""
    cost = np.empty((min(n, m), max(n, m)))
    for i in range(n):
        for j in range(m):
            if not scores[i, j] < INF:
                return np.empty((0, 0))
            if n <= m:
                cost[i, j] = -scores[i, j]
            else:
                cost[j, i] = -scores[i, j]
    return cost


@kernel
def _put(column: Any, swapped: bool, out: Any) -> None:
    """out = the column of each row, −1 for a row without one."""
    out[:] = -1
    for i in range(len(column)):
        if swapped:
            out[column[i]] = i
        else:
            out[i] = column[i]


@kernel
def _total(cost: Any, column: Any) -> float:
    total = 0.0
    for i in range(len(cost)):
        total -= cost[i, column[i]]
    return total


@kernel
def _argmax(low: int, high: int, scores: Any, rows: Any, columns: Any, best: Any, z: Any) -> None:
    for b in range(low, high):
        n, m = rows[b], columns[b]
        z[b] = -1
        cost = _cost(scores[b], n, m)
        best[b] = math.nan if len(cost) == 0 else -INF
        column = np.empty(len(cost), np.int64)
        if len(cost) and _solve(cost, 0, np.zeros(cost.shape[1], np.bool_), column):
            best[b] = _total(cost, column)
            _put(column, n > m, z[b])


@kernel
def _murty(cost: Any, k: int, scores: Any, found: Any) -> int:
    """The k best assignments, not yet quite in order (rounding), and how many there are.

    A node of the search stands for the assignments that give the rows before ``first`` the columns
    that its best one gives them, and row ``first`` none of those in ``barred``. Once its best one
    is reported, the others are split by the first row in which they differ from it (Murty, 1968).
    """
    n, m = cost.shape
    size = k * n + 1
    column, barred = np.empty((size, n), np.int64), np.zeros((size, m), np.bool_)
    first = np.zeros(size, np.int64)
    used, whole = np.zeros(m, np.bool_), np.empty(m)
    if not _solve(cost, 0, used, column[0]):
        return 0
    heap = [(-_total(cost, column[0]), 0)]
    made, count = 1, 0
    while len(heap) and count < k:
        score, at = heapq.heappop(heap)
        scores[count], found[count] = -score, column[at]
        count += 1
        if count == k:
            break
        used[:] = False
        for i in range(n):
            if i >= first[at]:
                if i == first[at]:
                    barred[made] = barred[at]
                else:
                    barred[made] = False
                barred[made, column[at, i]] = True
                column[made] = column[at]
                whole[:] = cost[i]
                for j in range(m):
                    if barred[made, j]:
                        cost[i, j] = INF
                if _solve(cost, i, used, column[made]):
                    first[made] = i
                    heapq.heappush(heap, (-_total(cost, column[made]), made))
                    made += 1
                cost[i] = whole
            used[column[at, i]] = True
    return count


@kernel
def _kbest(low: int, high: int, scores: Any, rows: Any, columns: Any, best: Any, z: Any) -> None:
    k = best.shape[1]
    for b in range(low, high):
        n, m = rows[b], columns[b]
        z[b] = -1
        cost = _cost(scores[b], n, m)
        best[b] = math.nan if len(cost) == 0 else -INF
        if len(cost) == 0:
            continue
        found = np.empty((k, len(cost)), np.int64)
        value = np.empty(k)
        count = _murty(cost, k, value, found)
        order = np.argsort(-value[:count], kind="mergesort")
        for t in range(count):
            best[b, t] = value[order[t]]
            _put(found[order[t]], n > m, z[b, t])


def _arrays(scores: Tensor, rows: Tensor, columns: Tensor) -> list[Any]:
    return [array(scores), *(array(t, np.int64) for t in (rows, columns))]


def argmax(scores: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """The best score ``(B)`` and the column of each row ``(B, n)``, −1 where there is none."""
    items, n, m = scores.shape
    best, z = (
        torch.empty(items, dtype=torch.float64, device="cpu"),
        torch.empty(items, n, dtype=torch.int64, device="cpu"),
    )
    given = *_arrays(scores, rows, columns), best.numpy(), z.numpy()
    run_chunks(lambda i, j: _argmax(i, j, *given), items, 10 * n * m)
    return best.to(scores.dtype), z


def kbest(scores: Tensor, rows: Tensor, columns: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Scores ``(B, k)``, −inf where there is no such assignment, and columns ``(B, k, n)``."""
    items, n, m = scores.shape
    best = torch.empty(items, k, dtype=torch.float64, device="cpu")
    z = torch.empty(items, k, n, dtype=torch.int64, device="cpu")
    given = *_arrays(scores, rows, columns), best.numpy(), z.numpy()
    run_chunks(lambda i, j: _kbest(i, j, *given), items, 10 * k * n * n * m)
    return best.to(scores.dtype), z
