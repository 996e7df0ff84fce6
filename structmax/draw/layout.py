"""Where the nodes of a binary tree are, from its spans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Node(NamedTuple):
    """An inner node: its span, both ends inclusive, and the numbers of its children."""

    first: int
    last: int
    left: int
    right: int


def nodes(length: int, spans: Iterable[Sequence[int]]) -> list[Node]:
    """The inner nodes of a binary tree, children first; leaves are 0..length−1, nodes follow.

    ``spans`` may hold those of the leaves too.

    >>> nodes(3, [(0, 2), (1, 2)])
    [Node(first=1, last=2, left=1, right=2), Node(first=0, last=2, left=0, right=3)]
    """
    starting, ending = list(range(length)), list(range(length))  # the largest subtrees so far
    ends = [(i, i) for i in range(length)]
    found: list[Node] = []
    inner = {(int(i), int(j)) for i, j in spans if i < j}
    for i, j in sorted(inner, key=lambda span: span[1] - span[0]):
        if not 0 <= i < j < length:
            raise ValueError(f"nodes: span {(i, j)} is outside a sentence of {length} words.")
        left, right = starting[i], ending[j]
        if ends[left][1] + 1 != ends[right][0]:
            raise ValueError(f"nodes: span {(i, j)} is not made of two others: no binary tree.")
        starting[i] = ending[j] = length + len(found)
        ends.append((i, j))
        found.append(Node(i, j, left, right))
    if len(found) != max(length - 1, 0):
        raise ValueError(f"nodes: {length} words need {length - 1} inner spans, got {len(found)}.")
    return found
