"""The bias and the standard deviation of gradients, a row for each estimator."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from structmax.draw.svg import BLUE, ORANGE, Canvas, Drawing, width

ROW, DECADE, LEAST, MOST = 22.0, 75.0, 1e-3, 1e3


def diagnosis_svg(records: Sequence[Mapping[str, Any]]) -> Drawing:
    """What :func:`structmax.diagnose` found, relative to the size of the true gradient.

    A diamond is the bias, hollow where it is within twice its standard error, so that there may be
    none; a square is the standard deviation of one estimate. The axis is logarithmic, and ends at
    0.001: what is smaller stands there. Rows are grouped by what is compared with.

    Args:
        records: of a :class:`structmax.Diagnosis`

    >>> row = {"estimator": "spigot", "objective": "L(argmax)", "against": "E[L(z)]",
    ...        "bias": 0.5, "error": 0.0, "variance": 0.04}
    >>> diagnosis_svg([row]).count("<rect")  # one in the row, one in the legend
    2
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault(_group(record), []).append(record)
    names = [str(record["estimator"]) for record in records]
    left = max((width(name) for name in [*names, "standard deviation"]), default=0.0) + 14
    values = [v for r in records for v in (r["bias"], r["variance"] ** 0.5) if math.isfinite(v)]
    first = math.floor(math.log10(LEAST))
    last = math.ceil(math.log10(min(max([1.0, *values]), MOST)))

    def at(value: float) -> float:
        bounded = min(max(value, LEAST), 10.0**last)
        return left + DECADE * (math.log10(bounded) - first)

    canvas, y = Canvas(), 0.0
    ticks = [at(10.0**power) for power in range(first, last + 1)]
    for title, rows in groups.items():
        canvas.text(0, y + 4, title, "left", font_weight="bold")
        y += ROW
        for x in ticks:
            ends = [(x, y - 10), (x, y + ROW * len(rows) - 12)]
            canvas.path(ends, stroke="currentColor", stroke_opacity="0.12")
        for record in rows:
            bias, deviation = float(record["bias"]), float(record["variance"]) ** 0.5
            canvas.path([(left, y), (ticks[-1], y)], stroke="currentColor", stroke_opacity="0.12")
            canvas.text(left - 12, y + 4, str(record["estimator"]), "right")
            _square(canvas, at(deviation), y, f"standard deviation {_digits(deviation)}")
            sure = bias > 2 * float(record["error"]) and bias > LEAST
            _diamond(
                canvas, at(bias), y, sure, f"bias {_digits(bias)} ± {_digits(record['error'])}"
            )
            y += ROW
        y += 6
    for power, x in enumerate(ticks, first):
        canvas.text(x, y + 8, f"{10.0**power:g}" if power > first else f"≤ {LEAST:g}", size=11)
    y += 34
    _diamond(canvas, left, y, True, "bias")
    canvas.text(left + 14, y + 4, "bias", "left")
    _diamond(canvas, left + 70, y, False, "within twice its error")
    canvas.text(left + 84, y + 4, "within twice its error", "left")
    _square(canvas, left, y + ROW, "standard deviation")
    canvas.text(left + 14, y + ROW + 4, "standard deviation", "left")
    return canvas.drawing()


def _group(record: Mapping[str, Any]) -> str:
    if record["objective"] == record["against"]:
        return f"gradient of {record['objective']}"
    return f"of {record['objective']}, compared with {record['against']}"


def _digits(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "∞"  # where the true gradient is 0


def _square(canvas: Canvas, x: float, y: float, title: str) -> None:
    canvas.rect(x - 4.5, y - 4.5, 9, 9, fill=BLUE, title=title)


def _diamond(canvas: Canvas, x: float, y: float, full: bool, title: str) -> None:
    corners = [(x, y - 6.5), (x + 6.5, y), (x, y + 6.5), (x - 6.5, y), (x, y - 6.5)]
    fill = ORANGE if full else "none"
    canvas.path(corners, fill=fill, stroke=ORANGE, stroke_width=1.6, title=title)
