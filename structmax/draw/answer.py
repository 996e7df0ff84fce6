"""Pictures of what a trained model answers: the dictionaries of ``structmax predict``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from structmax.draw.arcs_svg import arcs_svg
from structmax.draw.bars_svg import bars_svg
from structmax.draw.heat_svg import heat_svg
from structmax.draw.lattice_svg import lattice_svg
from structmax.draw.svg import Drawing, beside
from structmax.draw.tree_svg import tree_svg


def answer_svg(answer: Mapping[str, Any]) -> Drawing | None:
    """Trees, arcs, tags, attention or a path, whichever the answer has; None if it has nothing.

    >>> answer_svg({"words": ["a", "b"], "heads": [2, 0]})
    Drawing(56 × 83 pixels)
    >>> answer_svg({"class": "walk", "text": "walk"}) is None
    True
    """
    words = answer.get("words", [])
    if "spans" in answer:
        return tree_svg(words, answer["spans"], answer.get("gold"))
    if "trees" in answer:
        few = answer["trees"][:4]
        return beside((f"p = {t['probability']:.3f}", _tree(words, t["heads"])) for t in few)
    if "arcs" in answer:
        return arcs_svg(words, [(h, m, 1.0) for h, m in answer["arcs"]])
    if "heads" in answer:
        return _tree(words, answer["heads"], answer.get("labels"))
    if "choices" in answer:
        rows = answer["choices"]
        tags = sorted({tag for row in rows for tag in row})
        return lattice_svg(words, tags, [[row.get(tag, 0.0) for tag in tags] for row in rows])
    if "attention" in answer:
        source = [*answer["source"], "∎"]  # the end of the sentence may be looked at, too
        rows = [[row.get(str(i), 0.0) for i in range(len(source))] for row in answer["attention"]]
        return heat_svg(rows, words, source)
    if "weights" in answer:
        return heat_svg(answer["weights"], answer["hypothesis"], answer["premise"])
    if "cells" in answer:
        cells = {(i, j) for i, j in answer["cells"]}
        height, width = (1 + max(side) for side in zip(*cells))
        grid = [[float((i, j) in cells) for j in range(width)] for i in range(height)]
        return heat_svg(grid)
    if "chosen" in answer:
        return bars_svg(words, [float(i in answer["chosen"]) for i in range(len(words))])
    return None


def _tree(words: list[str], heads: list[int], labels: list[str] | None = None) -> Drawing:
    arcs = list(zip(heads, range(1, len(heads) + 1)))
    written = dict(zip(arcs, labels)) if labels else None
    return arcs_svg(words, [(head, word, 1.0) for head, word in arcs], written)
