"""Trees as SVG, and a page of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from structmax.draw.layout import nodes

STYLE = """
svg { font: 14px ui-monospace, monospace; color-scheme: light dark; }
svg text { fill: #222; text-anchor: middle; }
svg path { fill: none; stroke: #4269d0; stroke-width: 1.5; }
svg path.other { stroke: #d9480f; stroke-dasharray: 4 3; }
@media (prefers-color-scheme: dark) {
  svg text { fill: #ddd; }
  svg path { stroke: #8fb0ff; }
  svg path.other { stroke: #ff9a6b; }
}
""".strip()

LETTER, GAP, RISE, MARGIN = 8.5, 14, 20, 12  # in pixels


def tree_svg(
    words: Sequence[str],
    spans: Iterable[Sequence[int]],
    gold: Iterable[Sequence[int]] | None = None,
) -> str:
    """A binary tree above its words, on its own or inside a page.

    Args:
        words: the leaves
        spans: the inner nodes, each the first and the last of its words
        gold: spans to compare with; a node that is not among them is dashed, in another colour

    >>> tree_svg(["a", "b"], [(0, 1)]).count("<path")
    1
    """
    wanted = None if gold is None else {(int(i), int(j)) for i, j in gold}
    x, height, at = [], [0] * len(words), float(MARGIN)
    for word in words:
        width = max(len(word), 1) * LETTER
        x.append(at + width / 2)
        at += width + GAP
    inner = nodes(len(words), spans)
    for node in inner:
        x.append((x[node.left] + x[node.right]) / 2)
        height.append(max(height[node.left], height[node.right]) + 1)
    base = MARGIN + max(height, default=0) * RISE
    y = [base - h * RISE for h in height]
    drawn = []
    for number, node in enumerate(inner, len(words)):
        other = wanted is not None and (node.first, node.last) not in wanted
        kind = ' class="other"' if other else ""
        path = f"M{x[node.left]:.1f},{y[node.left]} V{y[number]} H{x[node.right]:.1f}"
        drawn.append(f'<path{kind} d="{path} V{y[node.right]}"/>')
    for i, word in enumerate(words):
        drawn.append(f'<text x="{x[i]:.1f}" y="{base + 18}">{escape(word)}</text>')
    size = f'width="{at - GAP + MARGIN:.0f}" height="{base + 30}"'
    body = "\n".join(drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n{body}\n</svg>\n'
    )


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
        "<style>body { font: 15px system-ui, sans-serif; margin: 2em; color-scheme: light dark; }\n"
        "figure { overflow-x: auto; margin: 2em 0; }</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{figures}\n</body></html>\n"
    )
