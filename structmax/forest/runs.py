"""Edges by rule: runs of edges into a node whose tails and parts are quadratic in their number.

A row (count, a₁, b₁, c₁, a₂, b₂, c₂, a₃, b₃, c₃) stands for count edges. The d-th of them has

    tail₁ = a₁ + b₁·d + c₁·d(d−1)/2,    tail₂ and part likewise,

which is what the splits of a span give when spans are numbered column by column. A node then needs
a few rows instead of a list of all its edges, and the forest O(nodes) memory instead of O(edges).
"""

from __future__ import annotations

import numpy as np

from structmax.jit import kernel


@kernel(inner=True)
def edges_of(v, ptr, tail1, tail2, edge_part, runs):
    """Where in the lists the edges into v lie. Edges by rule are written there first.

    Without runs, ``ptr`` delimits the edges into each node. With runs it delimits those, and the
    lists are room for the edges of one node.
    """
    if runs.shape[0] == 0:
        return ptr[v], ptr[v + 1]
    e = 0
    for r in range(ptr[v], ptr[v + 1]):
        e = write(runs, r, e, tail1, tail2, edge_part)
    return 0, e


@kernel(inner=True)
def write(runs, r, e, tail1, tail2, edge_part):
    """Writes the edges of run r at e; returns where they end."""
    a1, b1, c1 = runs[r, 1], runs[r, 2], runs[r, 3]
    a2, b2, c2 = runs[r, 4], runs[r, 5], runs[r, 6]
    a3, b3, c3 = runs[r, 7], runs[r, 8], runs[r, 9]
    end = e + runs[r, 0]
    while e < end:
        tail1[e], tail2[e], edge_part[e] = a1, a2, a3
        a1, a2, a3 = a1 + b1, a2 + b2, a3 + b3
        b1, b2, b3 = b1 + c1, b2 + c2, b3 + c3
        e += 1
    return end


@kernel
def write_all(heads, runs, head, tail1, tail2, edge_part):
    """Lists of all edges, in the order of the runs."""
    e = 0
    for r in range(len(runs)):
        head[e : e + runs[r, 0]] = heads[r]
        e = write(runs, r, e, tail1, tail2, edge_part)


@kernel
def survey(heads, runs):
    """The first run with a bad edge (−1: none), that edge, and the largest part.

    A tail must lie before the head, a part must be at least 0, or all of a run must be −1.
    """
    largest = -1
    for r in range(len(runs)):
        for column in (1, 4, 7):
            count = runs[r, 0]
            a, b, c = runs[r, column], runs[r, column + 1], runs[r, column + 2]
            if a == -1 and b == 0 and c == 0:
                continue
            turns = (b < 0) != (b + c * (count - 2) < 0)  # if not, the ends are the extremes
            for d in range(0, count, 1 if turns else max(count - 1, 1)):
                x = a + b * d + c * (d * (d - 1) // 2)
                if x < 0 or (column < 7 and x >= heads[r]):
                    return r, d, largest
                if column == 7:
                    largest = max(largest, x)
    return -1, 0, largest


@kernel
def reverse(ptr, tail1, tail2, edge_part, node_part, runs):
    """The uses of each node as a tail, in runs as they come: node and (count, head, other tail,
    part, number among the head's edges), three coefficients each.

    A run goes on as long as it is quadratic. Heads come in order, and so do uses on either side.
    """
    v_count = len(ptr) - 1
    rows, used = np.empty((4 * v_count + 1, 14), np.int32), 0
    # of the last run of each node on each side: row, count, then last values, steps and bends
    state = np.zeros((2 * v_count, 16), np.int32)
    x = np.empty(4, np.int32)
    for v in range(v_count):
        e0, e1 = edges_of(v, ptr, tail1, tail2, edge_part, runs)
        for e in range(e0, e1):
            for side in range(2):
                u, x[1] = (tail2[e], tail1[e]) if side else (tail1[e], tail2[e])
                if u == v_count:
                    continue
                x[0], x[2], x[3] = v, edge_part[e], e - e0
                at = 2 * u + side
                r, count = state[at, 0], state[at, 1]
                goes_on = count > 0
                for k in range(4 if count > 2 else 0):
                    goes_on &= x[k] - state[at, 2 + k] == state[at, 6 + k] + state[at, 10 + k]
                if not goes_on:
                    if used == len(rows):
                        rows = np.concatenate((rows, np.empty_like(rows)))
                    if count > 0:
                        rows[r, 1] = count
                    r, used, count = used, used + 1, 0
                    state[at] = 0
                    state[at, 0] = r
                    rows[r] = 0
                    rows[r, 0] = u
                for k in range(4):
                    step = x[k] - state[at, 2 + k]
                    if count == 0:
                        rows[r, 2 + 3 * k] = x[k]
                        step = 0
                    elif count == 1:
                        rows[r, 3 + 3 * k] = step
                    elif count == 2:
                        state[at, 10 + k] = step - state[at, 6 + k]
                        rows[r, 4 + 3 * k] = state[at, 10 + k]
                    state[at, 2 + k], state[at, 6 + k] = x[k], step
                state[at, 1] = count + 1
    for at in range(2 * v_count):
        if state[at, 1] > 0:
            rows[state[at, 0], 1] = state[at, 1]
    return rows[:used]
