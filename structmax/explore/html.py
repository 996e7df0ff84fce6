"""What pages are put together from: figures, rows of them, tables of numbers. Text is escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from structmax.draw.svg import Drawing, clean


def figure(caption: str, picture: Drawing, fit: bool = False) -> str:
    """A picture below its caption; where it is wider than the page it scrolls, or shrinks to fit.

    >>> figure("a < b", Drawing("<svg></svg>"))
    '<figure><figcaption>a &lt; b</figcaption><div class="sx-wide"><svg></svg></div></figure>'
    """
    kind = "sx-fit" if fit else "sx-wide"
    above = f"<figcaption>{_text(caption)}</figcaption>" if caption else ""
    return f'<figure>{above}<div class="{kind}">{picture}</div></figure>'


def section(name: str, title: str, figures: Iterable[str], note: str = "") -> str:
    """Figures side by side, as many as there is room for, below a title."""
    said = f"<p>{_text(note)}</p>" if note else ""
    # a heading of HTML would make marimo add an outline of the page
    heading = f'<div class="sx-title" role="heading" aria-level="2">{_text(title)}</div>'
    return (
        f'<section id="{name}">{heading}{said}'
        f'<div class="sx-row">{"".join(figures)}</div></section>'
    )


def numbers(values: Mapping[str, float | int | str]) -> str:
    """A table of names and numbers.

    >>> numbers({"entropy": 0.5}).count("<td")
    1
    """
    rows = "".join(
        f'<tr><th scope="row">{_text(name)}</th>'
        f'<td data-name="{_text(name)}">{_text(show(value))}</td></tr>'
        for name, value in values.items()
    )
    return f'<div class="sx-wide"><table class="sx-numbers">{rows}</table></div>'


def table(
    header: Sequence[str], rows: Iterable[tuple[str, Sequence[float | str]]], name: str = ""
) -> str:
    """A table with a name and several numbers in each row.

    >>> table(["part", "argmax"], [("a", [1.0])]).count("<td")
    1
    """
    top = "".join(f'<th scope="col">{_text(title)}</th>' for title in header)
    body = "".join(
        f'<tr data-row="{_text(row)}"><th scope="row">{_text(row)}</th>'
        + "".join(
            f'<td data-column="{_text(title)}">{_text(show(value))}</td>'
            for title, value in zip(header[1:], values, strict=True)
        )
        + "</tr>"
        for row, values in rows
    )
    return (
        f'<div class="sx-wide"><table class="sx-table" data-name="{_text(name)}">'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def message(text: str) -> str:
    """Something to read instead of a picture."""
    return f'<p class="sx-message">{_text(text)}</p>'


def page(*blocks: str) -> str:
    """All of a page's answers."""
    return f'<div class="sx-page">{"".join(blocks)}</div>'


def show(value: float | int | str) -> str:
    """A number as tables have it: four decimals, or fewer of large ones.

    >>> show(0.25), show(3), show(12345.678), show(-0.00001), show(float("-inf")), show(math.nan)
    ('0.2500', '3', '12345.7', '0.0000', '−∞', '–')
    """
    if isinstance(value, str | int):
        return str(value)
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = f"{value:.4f}" if abs(value) < 1000 else f"{value:.1f}"
    return "0.0000" if text == "-0.0000" else text.replace("-", "−")


def _text(text: str) -> str:
    return escape(clean(text))
