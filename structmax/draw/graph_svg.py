"""Paths and spanning trees: edges between places, as opaque as they are heavy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from structmax.draw.svg import BLUE, FAINT, Canvas, Drawing, opacity, width

Point = tuple[float, float]


def graph_svg(
    names: Sequence[str],
    edges: Iterable[tuple[int, int, float]],
    order: Sequence[int] | None = None,
) -> Drawing:
    """Nodes on a circle, or with ``order`` in that order from left to right, and weighted edges.

    In order, edges are arcs with arrow heads, above the nodes if they go over an even number of
    them and below otherwise, so that few cross; on a circle they are straight, without direction.

    >>> graph_svg(["a", "b", "c"], [(0, 1, 1.0), (1, 2, 0.5)]).count("<path")
    2
    """
    half = [max(width(name) / 2 + 5, 11.0) for name in names]  # of each node's width
    apart = 2 * max(half, default=0.0) + 34
    if order is None:
        r = max(60.0, len(names) * apart / 6.3)
        turn = [2 * math.pi * i / len(names) - math.pi / 2 for i in range(len(names))]
        place = {i: (r * math.cos(a), 0.75 * r * math.sin(a)) for i, a in enumerate(turn)}
    else:
        place = {node: (i * apart, 0.0) for i, node in enumerate(order)}
    canvas = Canvas()
    again: dict[tuple[int, int], int] = {}  # edges between the same two
    for a, b, weight in sorted(edges, key=lambda edge: edge[2]):
        seen = again[a, b] = again.get((a, b), -1) + 1
        used = weight >= FAINT
        ink, shade = (BLUE, opacity(weight)) if used else ("currentColor", "0.15")
        title = f"{names[a]} – {names[b]}: {weight:.3f}"
        style: dict[str, Any] = {
            "stroke": ink,
            "stroke_width": 2,
            "stroke_opacity": shade,
            "title": title,
        }
        (x, _), (to, _) = place[a], place[b]
        steps = round((to - x) / apart)
        if order is None:
            canvas.path([_rim(place[a], place[b], half[a]), _rim(place[b], place[a], half[b])],
                        **style)  # fmt: skip
            continue
        if steps == 1 and not seen:
            start, end, back = (x + half[a] + 2, 0.0), (to - half[b] - 2, 0.0), math.pi
            canvas.path([start, end], **style)
        else:
            up = -1 if steps % 2 else 1
            far = up * (13 + 26 * abs(steps) + 14 * seen)
            start, end = (x + 4, up * 13.0), (to - 4, up * 13.0)
            lean = 0.3 * (end[0] - start[0])
            d = (
                f"M{start[0]:.1f},{start[1]:.1f} C{start[0] + lean:.1f},{far:.1f} "
                f"{end[0] - lean:.1f},{far:.1f} {end[0]:.1f},{end[1]:.1f}"
            )
            canvas.path([start, end, (x, start[1] + 0.75 * (far - start[1]))], d, **style)
            back = math.atan2(far - end[1], -lean)
        tip = [
            (end[0] + 9 * math.cos(back + t), end[1] + 9 * math.sin(back + t)) for t in (0.4, -0.4)
        ]
        canvas.path([end, *tip], fill=ink, fill_opacity=shade)
    for i, (x, y) in place.items():
        canvas.rect(x - half[i], y - 11, 2 * half[i], 22, rx=10, fill="none", stroke="currentColor")
        canvas.text(x, y + 4.5, names[i])
    return canvas.drawing()


def _rim(centre: Point, other: Point, half: float) -> Point:
    """Where the line to another node leaves this one."""
    dx, dy = other[0] - centre[0], other[1] - centre[1]
    t = min(half / abs(dx) if dx else math.inf, 11 / abs(dy) if dy else math.inf)
    return centre[0] + t * dx, centre[1] + t * dy
