"""Trees in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from structmax.draw.layout import nodes


def tree_text(words: Sequence[str], spans: Iterable[Sequence[int]]) -> str:
    """A binary tree that grows to the right, one line for each word.

    Args:
        words: the leaves
        spans: the inner nodes, each the first and the last of its words

    >>> print(tree_text(["[MAX", "2", "9", "]"], [(0, 1), (0, 2), (0, 3)]))
    ┬┬┬─ [MAX
    ││└─ 2
    │└─ 9
    └─ ]
    """
    lines = [[f"─ {word}"] for word in words]
    for node in nodes(len(words), spans):
        left, right = lines[node.left], lines[node.right]
        above = [("│" if i else "┬") + line for i, line in enumerate(left)]
        below = [(" " if i else "└") + line for i, line in enumerate(right)]
        lines.append(above + below)
    return "\n".join(lines[-1]) if lines else ""
