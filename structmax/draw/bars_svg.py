"""Choices, subsets, and structures as text: a bar for each probability."""

from __future__ import annotations

from collections.abc import Sequence

from structmax.draw.svg import BLUE, Canvas, Drawing, width

ROW, LONGEST = 24.0, 200.0


def bars_svg(
    names: Sequence[str], weights: Sequence[float], numbers: Sequence[str] | None = None
) -> Drawing:
    """A row for each name: a bar as long as its weight, between 0 and 1, and the number, or text in
    its place.

    >>> bars_svg(["yes", "no"], [0.75, 0.25]).count("<rect")
    4
    """
    canvas = Canvas()
    start = max((width(name) for name in names), default=0.0) + 10
    for i, (name, weight) in enumerate(zip(names, weights, strict=True)):
        y = i * ROW
        canvas.text(start - 10, y + 13, name, "right")
        canvas.rect(start, y + 2, LONGEST, 14, rx=3, fill="currentColor", fill_opacity="0.08")
        canvas.rect(start, y + 2, LONGEST * min(max(weight, 0.0), 1.0), 14, rx=3, fill=BLUE)
        number = f"{weight:.3f}" if numbers is None else numbers[i]
        canvas.text(start + LONGEST + 8, y + 13, number, "left")
    return canvas.drawing()
