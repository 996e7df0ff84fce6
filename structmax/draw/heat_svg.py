"""Alignments, attention and paths on a grid: cells as opaque as they are heavy."""

from __future__ import annotations

from collections.abc import Sequence

from structmax.draw.svg import BLUE, FAINT, ORANGE, Canvas, Drawing, opacity, width

CELL = 30.0


def heat_svg(
    weights: Sequence[Sequence[float]],
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    path: Sequence[tuple[int, int]] = (),
    numbers: bool = False,
) -> Drawing:
    """A matrix of weights between 0 and 1, such as an alignment, or attention from rows to columns.

    Args:
        weights: ``(n, m)``, a tensor or lists
        rows: their names
        columns: their names, turned where they are too long for a cell
        path: cells ``(row, column)`` to draw a line through
        numbers: write the weights into the cells

    >>> heat_svg([[1.0, 0.0], [0.2, 0.8]], ["a", "b"], ["x", "y"]).count("<rect")
    4
    """
    weights = [[float(p) for p in row] for row in weights]
    canvas = Canvas()
    for i, row in enumerate(weights):
        for j, p in enumerate(row):
            names = [rows[i] if rows else str(i), columns[j] if columns else str(j)]
            canvas.rect(
                j * CELL, i * CELL, CELL, CELL, fill=BLUE, stroke="currentColor",
                fill_opacity=opacity(0.85 * p) if p >= FAINT else "0", stroke_opacity="0.25",
                title=f"{names[0]}, {names[1]}: {p:.3f}",
            )  # fmt: skip
            if numbers and p >= FAINT:
                text = f"{p:.2f}".removeprefix("0")
                canvas.text((j + 0.5) * CELL, (i + 0.5) * CELL + 4, text, size=10)
    if path:
        middles = [((j + 0.5) * CELL, (i + 0.5) * CELL) for i, j in path]
        if len(middles) > 1:
            canvas.path(middles, stroke=ORANGE, stroke_width=3, stroke_linejoin="round")
        for x, y in middles:
            canvas.circle(x, y, 4, fill=ORANGE)
    for i, name in enumerate(rows or ()):
        canvas.text(-8, (i + 0.5) * CELL + 4, name, "right")
    long = max((width(name) for name in columns or ()), default=0.0) > CELL - 2
    for j, name in enumerate(columns or ()):
        x = (j + 0.5) * CELL
        canvas.text(x + 4, -8, name, "left", turn=-50) if long else canvas.text(x, -8, name)
    return canvas.drawing()
