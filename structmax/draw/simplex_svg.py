"""Maps on the simplex of three options: a point that moves as the scores do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from structmax.draw.svg import BLUE, FONT, GREEN, ORANGE, PURPLE, Canvas, Drawing

SIZE, SECONDS = 340.0, 4.0  # pixels of a side; how long points move
COLOURS = (BLUE, ORANGE, GREEN, PURPLE)
DASHES = ("", "7 4", "2 4", "9 3 2 3")  # colour is not all that tells them apart


def simplex_svg(
    paths: Mapping[str, Any], names: Sequence[str] = ("1", "2", "3"), move: bool = True
) -> Drawing:
    """Where maps send three scores, in the triangle of distributions over three options.

    A corner is certainty, the middle is not knowing. A path has a distribution for each moment, at
    falling temperatures, say; a point goes along it once, from the first to the last, and again
    when it is clicked.

    Args:
        paths: by name, a tensor or lists ``(moments, 3)``; one moment is a point
        names: of the three options
        move: False draws the points at the end of their paths

    >>> import structmax as sx
    >>> x, heat = torch.tensor([1.0, 0.6, 0.0]), torch.linspace(3, 0.1, 30)[:, None]
    >>> maps = {"softmax": sx.softmax(x / heat), "sparsemax": sx.sparsemax(x / heat)}
    >>> picture = simplex_svg(maps)
    >>> picture.count("<animateMotion"), picture.count("<circle")
    (2, 4)
    """
    corners = [(0.0, 0.0), (SIZE, 0.0), (SIZE / 2, -SIZE * math.sqrt(3) / 2)]
    if len(names) != 3:
        raise ValueError(f"simplex_svg: names must be three, got {len(names)}.")
    canvas = Canvas()
    canvas.path([*corners, corners[0]], fill=BLUE, fill_opacity="0.06", stroke="currentColor",
                stroke_opacity="0.5", stroke_linejoin="round")  # fmt: skip
    sides = [("right", -11, 5), ("left", 11, 5), ("middle", 0, -13)]
    for name, (x, y), (side, across, down) in zip(names, corners, sides):
        canvas.text(x + across, y + down, str(name), side)
    for i, (name, path) in enumerate(paths.items()):
        places = _places(name, path, corners)
        colour, dashes = COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]
        line: dict[str, Any] = {"stroke": colour, "stroke_width": 2, "title": name}
        line |= {"stroke_dasharray": dashes} if dashes else {}
        if len(places) > 1:
            canvas.path(places, **line, stroke_linejoin="round")
        moving = places if move and len(places) > 1 else places[-1:]
        _point(canvas, name, moving, colour)
        y = corners[2][1] + 10 + 24 * i
        left = SIZE / 2 + 14 * len(paths) + 40  # beside the slope
        canvas.path([(left, y), (left + 26, y)], **line)
        canvas.circle(left + 13, y, 5, fill=colour, stroke="currentColor")
        canvas.text(left + 36, y + FONT / 3, name, "left")
    return canvas.drawing()


def _places(name: str, path: Any, corners: list[tuple[float, float]]) -> list[tuple[float, float]]:
    p = torch.as_tensor(path).detach().double().cpu()
    p = p[None] if p.dim() == 1 else p
    good = p.dim() == 2 and p.shape[1] == 3 and len(p) > 0
    if not good or not bool(((p >= -1e-4).all(1) & ((p.sum(1) - 1).abs() < 1e-3)).all()):
        got = f"shape {tuple(p.shape)}" if not good else "others"
        raise ValueError(
            f"simplex_svg: {name} must have distributions over three options, (moments, 3), got "
            f"{got}. Take the softmax of scores first."
        )
    return [tuple(xy) for xy in (p @ torch.tensor(corners).double()).tolist()]


def _point(canvas: Canvas, name: str, places: list[tuple[float, float]], colour: str) -> None:
    """A disc at the last place, or one that goes there along all of them."""
    style = {"fill": colour, "stroke": "currentColor", "title": name}
    x, y = places[-1]
    canvas.circle(x, y, 6.5, **style)
    if len(places) > 1:
        # relative to where it ends, which is where it stands if nothing moves
        steps = " ".join(f"{'L' if i else 'M'}{a - x:.1f},{b - y:.1f}"
                         for i, (a, b) in enumerate(places))  # fmt: skip
        canvas.inside(
            f'<animateMotion dur="{SECONDS:g}s" begin="0s;click" fill="freeze" path="{steps}"/>'
        )
