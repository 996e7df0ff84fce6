"""Dependency trees as pictures: arcs above the words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from structmax.draw.svg import BLUE, FAINT, Canvas, Drawing, columns, opacity

LEVEL, TALLEST, APART = 20.0, 320.0, 6.0  # of a level of arcs, of all, of arcs that leave a word


def arcs_svg(
    words: Sequence[str],
    arcs: Iterable[tuple[int, int, float]],
    labels: dict[tuple[int, int], str] | None = None,
) -> Drawing:
    """Arcs (head, word, weight) above the words, as opaque as they are heavy.

    Words count from 1, and 0 is the root symbol, drawn as a line from above. Weights are between 0
    and 1: marginals, say, or the probabilities of arcs over the few trees of SparseMAP.

    Args:
        words: the sentence
        arcs: head, word and weight of each
        labels: what to write on an arc (head, word)

    >>> picture = arcs_svg(["good", "movie"], [(2, 1, 1.0), (0, 2, 0.7), (0, 1, 0.3)])
    >>> picture.count("<title"), "good" in picture
    (3, True)
    """
    arcs = [(int(h), int(m), float(p)) for h, m, p in arcs if p >= FAINT]
    arcs.sort(key=lambda arc: arc[2])  # the heaviest on top
    borders = columns(words)
    x = [0.0, *[(a + b) / 2 for a, b in pairwise(borders)]]
    levels = _levels([(h, m) for h, m, _ in arcs if h])
    deepest = max(levels.values(), default=0)
    rise = min(LEVEL, TALLEST / max(deepest, 1))
    top = -(deepest * rise + 26)
    canvas = Canvas()
    for head, word, weight in arcs:
        ink = BLUE if head else "currentColor"
        style: dict[str, Any] = {
            "stroke": ink,
            "stroke_width": 1.6,
            "stroke_opacity": opacity(weight),
        }
        name = f"{words[head - 1] if head else 'root'} → {words[word - 1]}"
        title = f"{name}: {weight:.3f}"
        if head:
            side = APART if x[word] > x[head] else -APART
            y = -levels[min(head, word), max(head, word)] * rise - 6
            start, r = x[head] + side, min(10.0, -y)
            turn = r if x[word] > start else -r
            d = (
                f"M{start:.1f},0 V{y + r:.1f} q0,{-r:.1f} {turn:.1f},{-r:.1f} "
                f"H{x[word] - turn:.1f} q{turn:.1f},0 {turn:.1f},{r:.1f} V-3"
            )
            canvas.path([(start, 0), (x[word], y)], d, title=title, **style)
            if labels and (head, word) in labels:
                middle = (start + x[word]) / 2
                canvas.text(middle, y - 5, labels[head, word], size=11, fill_opacity=weight)
        else:
            canvas.path([(x[word], top), (x[word], -3)], title=title, **style)
        tip = [(x[word] - 3.5, -7), (x[word] + 3.5, -7), (x[word], 0)]
        canvas.path(tip, fill=ink, fill_opacity=opacity(weight))
    for at, word_ in zip(x[1:], words):
        canvas.text(at, 17, word_)
    return canvas.drawing()


def _levels(pairs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """How high each arc must be to pass above those within it."""
    level: dict[tuple[int, int], int] = {}
    spans = sorted({(min(p), max(p)) for p in pairs}, key=lambda span: span[1] - span[0])
    for low, high in spans:
        within = [n for (a, b), n in level.items() if low <= a and b <= high]
        level[low, high] = 1 + max(within, default=0)
    return level
