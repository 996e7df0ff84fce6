"""Pictures of what a trained model answers: the dictionaries of ``structmax predict``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from structmax.draw.arcs_svg import arcs_svg
from structmax.draw.bars_svg import bars_svg
from structmax.draw.heat_svg import heat_svg
from structmax.draw.lattice_svg import lattice_svg
from structmax.draw.svg import Drawing, beside
from structmax.draw.tree_svg import tree_svg


def answer_svg(answer: Mapping[str, Any]) -> Drawing | None:
    """Trees, arcs, tags, attention, a path or distances, whichever the answer has, or None.

    >>> answer_svg({"words": ["a", "b"], "heads": [2, 0]})
    Drawing(56 × 83 pixels)
    >>> answer_svg({"text": "walk"}) is None
    True
    """
    words = [str(word) for word in answer.get("words", [])]
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
    if "tags" in answer:
        path = [str(tag) for tag in answer["tags"]]
        tags = sorted(set(path))
        rows = [[float(tag == own) for tag in tags] for own in path]
        steps = [(t, tags.index(a), tags.index(b), 1.0) for t, (a, b) in enumerate(pairwise(path))]
        return lattice_svg(words, tags, rows, steps)
    if "attention" in answer:
        source = [*answer["source"], "∎"]  # the end of the sentence may be looked at, too
        rows = [[row.get(str(i), 0.0) for i in range(len(source))] for row in answer["attention"]]
        return heat_svg(rows, words, source)
    if "weights" in answer:
        return heat_svg(answer["weights"], answer["hypothesis"], answer["premise"])
    if "cells" in answer:
        cells = {(i, j) for i, j in answer["cells"]}
        least = [1 + max(side) for side in zip(*cells)] or [0, 0]
        height, width = answer.get("shape", least)
        grid = [[float((i, j) in cells) for j in range(width)] for i in range(height)]
        return heat_svg(grid)
    if "chosen" in answer:
        return bars_svg(words, [float(i in answer["chosen"]) for i in range(len(words))])
    if "distances" in answer:  # to each class
        far = [float(d) for d in answer["distances"]]
        most = max([abs(d) for d in far if math.isfinite(d)], default=0.0) or 1.0
        names = [f"class {i}" for i in range(len(far))]
        return bars_svg(names, [min(abs(d) / most, 1.0) for d in far], [f"{d:.4g}" for d in far])
    return None


def _tree(words: list[str], heads: list[int], labels: list[str] | None = None) -> Drawing:
    arcs = list(zip(heads, range(1, len(heads) + 1)))
    written = dict(zip(arcs, labels)) if labels else None
    return arcs_svg(words, [(head, word, 1.0) for head, word in arcs], written)
