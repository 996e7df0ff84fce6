"""Trees as SVG, the chart of their spans, and a page of pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise

from structmax.draw.layout import nodes
from structmax.draw.svg import BLUE, FAINT, ORANGE, Canvas, Drawing, columns, opacity

RISE, STEP = 24.0, 13.0  # of a tree's levels and of a chart's


def tree_svg(
    words: Sequence[str],
    spans: Iterable[Sequence[int]],
    gold: Iterable[Sequence[int]] | None = None,
    labels: Mapping[tuple[int, int], str] | None = None,
) -> Drawing:
    """A binary tree above its words, on its own or inside a page.

    Args:
        words: the leaves
        spans: the inner nodes, each the first and the last of its words
        gold: spans to compare with; a node that is not among them is dashed, in another colour
        labels: what to write at a span, leaves included

    >>> tree_svg(["a", "b"], [(0, 1)]).count("<path")
    1
    """
    wanted = None if gold is None else {(int(i), int(j)) for i, j in gold}
    labels = labels or {}
    wide = [max(word, labels.get((i, i), ""), key=len) for i, word in enumerate(words)]
    borders = columns(wide)
    x = [(a + b) / 2 for a, b in pairwise(borders)]
    inner = nodes(len(words), spans)
    height = [0] * len(words)
    for node in inner:
        x.append((x[node.left] + x[node.right]) / 2)
        height.append(max(height[node.left], height[node.right]) + 1)
    foot = 18.0 if any(i == j for i, j in labels) else 0.0
    y = [-h * RISE for h in height]
    canvas = Canvas()
    for number, node in enumerate(inner, len(words)):
        other = wanted is not None and (node.first, node.last) not in wanted
        corners = [(x[node.left], y[node.left]), (x[node.left], y[number]),
                   (x[node.right], y[number]), (x[node.right], y[node.right])]  # fmt: skip
        dashes = {"class": "other", "stroke_dasharray": "4 3"} if other else {}
        ink = ORANGE if other else BLUE
        canvas.path(corners, stroke=ink, stroke_width=1.5, stroke_linejoin="round", **dashes)
        if label := labels.get((node.first, node.last)):
            canvas.text(x[number], y[number] + 13, label, size=11)  # no line passes below
    for i, word in enumerate(words):
        canvas.text(x[i], 17 + foot, word)
        if label := labels.get((i, i)):
            canvas.text(x[i], 15, label, size=11, fill_opacity="0.75")
    return canvas.drawing()


def chart_svg(words: Sequence[str], weights: Mapping[tuple[int, int], float]) -> Drawing:
    """All spans as the cells of a triangle above the words, as opaque as they are heavy.

    The cell of a span is where the diagonals from its first and its last word meet; the whole
    sentence is at the top.

    >>> chart_svg(["a", "b"], {(0, 0): 1.0, (1, 1): 1.0, (0, 1): 0.5}).count("<path")
    3
    """
    borders = columns(words)
    canvas = Canvas()

    def corner(a: int, b: int) -> tuple[float, float]:
        return (borders[a] + borders[b]) / 2, (a - b) * STEP

    n = len(words)
    for i in range(n):
        for j in range(i, n):
            weight = float(weights.get((i, j), 0.0))
            corners = [corner(i, j), corner(i, j + 1), corner(i + 1, j + 1)]
            corners += [corner(i + 1, j)] if i < j else []
            shade = opacity(weight) if weight >= FAINT else "0"
            canvas.path(
                [*corners, corners[0]], fill=BLUE, fill_opacity=shade, stroke="currentColor",
                stroke_opacity="0.25", title=f"{' '.join(words[i : j + 1])}: {weight:.3f}",
            )  # fmt: skip
    for a, b, word in zip(borders, borders[1:], words):
        canvas.text((a + b) / 2, 17, word)
    return canvas.drawing()


def page(title: str, pictures: Iterable[tuple[str, str]]) -> str:
    """An HTML page of pictures, each a caption and an SVG.

    >>> "<figcaption>1 &lt; 2</figcaption>" in page("trees", [("1 < 2", "<svg></svg>")])
    True
    """
    figures = "\n".join(
        f"<figure><figcaption>{escape(caption)}</figcaption>\n{svg}</figure>"
        for caption, svg in pictures
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title>\n"
        "<style>:root { color-scheme: light dark; }\n"
        "body { font: 15px system-ui, sans-serif; margin: 2em; }\n"
        "figure { overflow-x: auto; margin: 2em 0; }</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{figures}\n</body></html>\n"
    )
