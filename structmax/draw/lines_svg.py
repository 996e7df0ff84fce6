"""Curves: learning, maps along a line, values that change with a temperature."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from structmax.draw.svg import BLUE, GREEN, ORANGE, Canvas, Drawing, width

WIDE, HIGH = 360.0, 200.0
COLOURS = (BLUE, ORANGE, GREEN, "currentColor")
DASHES = ("none", "7 4", "2 3")
STYLES = [  # twelve, told apart by dashes as well as by colour
    {"stroke": COLOURS[i % 4], "stroke_dasharray": DASHES[i % 3]} for i in range(12)
]


def lines_svg(
    x: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    x_name: str = "",
    y_name: str = "",
    log: bool = False,
) -> Drawing:
    """Curves over the same x, each with its name on the right.

    Args:
        x: ``(n)``, increasing
        curves: by name, ``(n)`` each, at most twelve; what is not finite is left out
        x_name, y_name: of the axes
        log: a logarithmic y axis, on which what is not positive is left out

    >>> lines_svg([0, 1, 2], {"square": [0, 1, 4], "double": [0, 2, 4]}).count("<path")
    5
    """
    if not 1 <= len(curves) <= len(STYLES):
        raise ValueError(f"lines_svg: draws 1 to {len(STYLES)} curves, got {len(curves)}.")
    places = [float(at) for at in x]
    heights: dict[str, list[float]] = {}
    for name, curve in curves.items():
        if len(curve) != len(places):
            raise ValueError(
                f"lines_svg: {name!r} must have one value for each of the {len(places)} of x, got "
                f"{len(curve)}."
            )
        given = [float(y) for y in curve]
        heights[name] = [math.log10(y) if y > 0 else math.nan for y in given] if log else given
    shown = [y for curve in heights.values() for y in curve if math.isfinite(y)]
    if not shown or not min(places) < max(places):
        raise ValueError("lines_svg: needs two places and a finite value, or there is no curve.")
    left, right = min(places), max(places)
    low, high = min(shown), max(shown)
    if high - low < 1e-12 * max(abs(high), 1.0):
        low, high = low - 0.5, high + 0.5

    def across(at: float) -> float:
        return (at - left) / (right - left) * WIDE

    def down(at: float) -> float:
        return (high - at) / (high - low) * HIGH

    canvas = Canvas()
    canvas.path([(0, 0), (0, HIGH), (WIDE, HIGH)], stroke="currentColor", stroke_opacity="0.5")
    for at in _ticks(left, right):
        canvas.text(across(at), HIGH + 17, f"{at:g}", size=11)
    marks = [(at, f"{at:g}") for at in _ticks(low, high)]
    if log:
        marks = [(at, f"{10**at:.2g}") for at in _ticks(low, high)]
    for at, text in marks:
        canvas.rect(0, down(at), WIDE, 0.5, fill="currentColor", fill_opacity="0.2")
        canvas.text(-7, down(at) + 4, text, "right", size=11)
    canvas.text(WIDE / 2, HIGH + 36, x_name)
    canvas.text(0, -12, y_name, "middle" if width(y_name) < 80 else "left")
    for i, (name, curve) in enumerate(heights.items()):
        for piece in _pieces(places, curve):
            points = [(across(at), down(y)) for at, y in piece]
            canvas.path(points, stroke_width=2, stroke_linejoin="round", title=name, **STYLES[i])
        y = 12 + 20 * i
        canvas.path([(WIDE + 18, y), (WIDE + 44, y)], stroke_width=2, **STYLES[i])
        canvas.text(WIDE + 51, y + 4.5, name, "left")
    return canvas.drawing()


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers, some five of them, between two."""
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * s for s in (1, 2, 5, 10) if unit * s >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _pieces(x: Sequence[float], curve: Sequence[float]) -> list[list[tuple[float, float]]]:
    """The stretches where a curve is finite."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for at, y in zip(x, curve):
        if math.isfinite(y):
            pieces[-1].append((at, y))
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]
