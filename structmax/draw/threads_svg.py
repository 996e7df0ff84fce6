"""Matchings: threads between two columns of names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from structmax.draw.svg import BLUE, FAINT, Canvas, Drawing, opacity

ROW, ACROSS = 28.0, 150.0


def threads_svg(
    left: Sequence[str], right: Sequence[str], pairs: Iterable[tuple[int, int, float]]
) -> Drawing:
    """A thread for each pair (of the left, of the right, weight), as opaque as it is heavy.

    >>> threads_svg(["a", "b"], ["x", "y"], [(0, 1, 1.0), (1, 0, 0.3)]).count("<path")
    2
    """
    tall = max(len(left), len(right))
    ends = [
        [(i + (tall - len(side)) / 2) * ROW for i in range(len(side))] for side in (left, right)
    ]
    canvas = Canvas()
    for i, j, weight in sorted(pairs, key=lambda pair: pair[2]):
        if weight >= FAINT:
            a, b = ends[0][i], ends[1][j]
            half = ACROSS / 2
            d = f"M6,{a:.1f} C{half:.1f},{a:.1f} {half:.1f},{b:.1f} {ACROSS - 6:.1f},{b:.1f}"
            canvas.path(
                [(0, a), (ACROSS, b)], d, stroke=BLUE, stroke_width=2.5,
                stroke_opacity=opacity(weight), title=f"{left[i]} – {right[j]}: {weight:.3f}",
            )  # fmt: skip
    for names, x, side, ys in ((left, 0.0, "right", ends[0]), (right, ACROSS, "left", ends[1])):
        for name, y in zip(names, ys):
            canvas.circle(x, y, 4, fill="currentColor")
            canvas.text(x + (10 if side == "left" else -10), y + 4, name, side)
    return canvas.drawing()
