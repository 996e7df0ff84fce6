"""Edges by rule: runs of edges into a node whose tails and parts are quadratic in their number.

A row (count, a₁, b₁, c₁, a₂, b₂, c₂, a₃, b₃, c₃) stands for count edges. The d-th of them has

    tail₁ = a₁ + b₁·d + c₁·d(d−1)/2,    tail₂ and part likewise,

which is what the splits of a span give when spans are numbered column by column. A node then needs
a few rows instead of a list of all its edges, and the forest O(nodes) memory instead of O(edges).
"""

from __future__ import annotations

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
