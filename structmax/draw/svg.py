"""SVG by hand: a canvas that grows with what is drawn on it, and the drawing it becomes.

Text and lines have the colour of the page around them, so a drawing is readable on light and dark
alike; as a file of its own it follows the reader's preference. Sizes are in pixels and nothing is
scaled to fit: a long sentence makes a wide drawing, to scroll.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from html import escape
from math import cos, radians, sin
from pathlib import Path

FONT = 13.0  # the size of text
# readable on white and on near-black
BLUE, ORANGE, GREEN, PURPLE = "#3178c6", "#cf5c17", "#1f8a5b", "#9b5fc0"
FAINT = 0.005  # what weighs less is not drawn
THEME = (  # of a file of its own; inside a page there is another root
    "<style>svg:root{color:#222;background:#fff}"
    "@media (prefers-color-scheme:dark){svg:root{color:#ddd;background:#131416}}</style>"
)


class Drawing(str):
    """SVG text that a notebook shows as a picture.

    >>> picture = Canvas().rect(0, 0, 30, 20).drawing(margin=5)
    >>> picture
    Drawing(40 × 30 pixels)
    >>> str(picture).startswith("<svg")
    True
    """

    def __repr__(self) -> str:
        wide, high = self.size
        return f"Drawing({wide:g} × {high:g} pixels)"

    def _repr_svg_(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f'<div style="overflow-x:auto">{self}</div>'

    def save(self, path: str | Path) -> None:
        """Writes an SVG file; a browser prints it, or ``rsvg-convert`` makes a PNG of it.

        >>> Canvas().drawing().save("tree.png")
        Traceback (most recent call last):
        ValueError: Drawing.save: a drawing is SVG, got 'tree.png'. Name it tree.svg.
        """
        path = Path(path)
        if path.suffix.lower() != ".svg":
            named = path.with_suffix(".svg").name
            raise ValueError(f"Drawing.save: a drawing is SVG, got {path.name!r}. Name it {named}.")
        path.write_text(self, encoding="utf-8")

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in pixels.

        >>> Canvas().rect(0, 0, 30, 20).drawing(margin=5).size
        (40.0, 30.0)
        """
        words = self.split(">", 1)[0].replace('"', " ").split()
        return float(words[words.index("width=") + 1]), float(words[words.index("height=") + 1])


class Canvas:
    """Collects shapes; the drawing is as large as they are."""

    def __init__(self) -> None:
        self.shapes: list[str] = []
        self.left = self.top = float("inf")
        self.right = self.bottom = float("-inf")

    def reach(self, *points: tuple[float, float]) -> Canvas:
        """Makes the drawing contain these points."""
        for x, y in points:
            self.left, self.right = min(self.left, x), max(self.right, x)
            self.top, self.bottom = min(self.top, y), max(self.bottom, y)
        return self

    def path(self, points: Iterable[tuple[float, float]], d: str = "", **style: object) -> Canvas:
        """A path through these points, or ``d``, of which they are the corners of a frame."""
        points = list(points)
        steps = " ".join(f"{'L' if i else 'M'}{x:.1f},{y:.1f}" for i, (x, y) in enumerate(points))
        return self.reach(*points)._add("path", {"d": d or steps, "fill": "none"} | style)

    def rect(self, x: float, y: float, width: float, height: float, **style: object) -> Canvas:
        place = {"x": _n(x), "y": _n(y), "width": _n(width), "height": _n(height)}
        return self.reach((x, y), (x + width, y + height))._add("rect", place | style)

    def circle(self, x: float, y: float, r: float, **style: object) -> Canvas:
        place = {"cx": _n(x), "cy": _n(y), "r": _n(r)}
        return self.reach((x - r, y - r), (x + r, y + r))._add("circle", place | style)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        anchor: str = "middle",
        size: float = FONT,
        turn: float = 0.0,
        **style: object,
    ) -> Canvas:
        """One line; y is the baseline, ``anchor`` is left, middle or right of it, whatever its
        direction; ``turn`` is in degrees."""
        wide = width(text, size)
        start = x - wide * {"left": 0.0, "middle": 0.5, "right": 1.0}[anchor]
        corners = [(start, y - size), (start + wide, y + 0.3 * size)]
        place: dict[str, object] = {"x": _n(x), "y": _n(y)}
        if turn:
            c, s = cos(radians(turn)), sin(radians(turn))
            corners = [(a, b) for a in (corners[0][0], corners[1][0]) for b in (y - size, y + 4)]
            corners = [(x + c * (a - x) - s * (b - y), y + s * (a - x) + c * (b - y))
                       for a, b in corners]  # fmt: skip
            place["transform"] = f"rotate({turn:g} {x:.1f} {y:.1f})"
        backwards = is_rtl([text])
        side = {"left": "end", "middle": "middle", "right": "start"} if backwards else {
            "left": "start", "middle": "middle", "right": "end"}  # fmt: skip
        place["text-anchor"] = side[anchor]
        if backwards:
            place["direction"] = "rtl"
        if size != FONT:
            place["font-size"] = f"{size:g}"
        shown = {"fill": "currentColor"} | style
        return self.reach(*corners)._add("text", place | shown, escape(clean(text)))

    def inside(self, element: str) -> Canvas:
        """Puts an element into the shape drawn last, which has a title, and so an end."""
        head, end, tag = self.shapes[-1].rpartition("</")
        self.shapes[-1] = f"{head}{element}{end}{tag}"
        return self

    def put(self, x: float, y: float, drawing: Drawing) -> Canvas:
        """Another drawing, with its corner here."""
        wide, high = drawing.size
        self.shapes.append(f'<g transform="translate({x:.1f} {y:.1f})">{drawing}</g>')
        return self.reach((x, y), (x + wide, y + high))

    def _add(self, tag: str, attributes: dict[str, object], inside: str = "") -> Canvas:
        title = attributes.pop("title", None)
        if title is not None:
            inside = f"<title>{escape(clean(str(title)))}</title>{inside}"
        written = " ".join(
            f'{name.replace("_", "-")}="{escape(str(value))}"' for name, value in attributes.items()
        )
        end = f">{inside}</{tag}>" if inside else "/>"
        self.shapes.append(f"<{tag} {written}{end}")
        return self

    def drawing(self, margin: float = 8.0) -> Drawing:
        if not self.shapes:
            self.reach((0, 0), (1, 1))
        x, y = self.left - margin, self.top - margin
        wide, high = self.right - self.left + 2 * margin, self.bottom - self.top + 2 * margin
        body = "\n".join(self.shapes)
        return Drawing(
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide:.0f}" height="{high:.0f}" '
            f'viewBox="{x:.1f} {y:.1f} {wide:.1f} {high:.1f}" font-size="{FONT:g}" '
            'font-family="ui-monospace, monospace" style="max-width:none" role="img">\n'
            f"{THEME}\n{body}\n</svg>\n"
        )


def _n(x: float) -> str:
    return f"{x:.1f}"


def opacity(weight: float) -> str:
    """That of a part with this weight: never so small that the part cannot be seen."""
    return f"{min(max(weight, 0.06), 1.0):.2f}"


def clean(text: str) -> str:
    """Text that XML can hold: control characters as their pictures, halves of characters as �.

    >>> clean("a\\tb")
    'a␉b'
    """
    if text.isprintable():
        return text
    out = []
    for c in text:
        code = ord(c)
        if code < 32:
            out.append(chr(0x2400 + code))
        elif 0x7F <= code < 0xA0 or 0xD800 <= code < 0xE000 or code & 0xFFFE == 0xFFFE:
            out.append("�")
        else:
            out.append(c)
    return "".join(out)


def width(text: str, size: float = FONT) -> float:
    """An estimate of how wide text is: a wide character (CJK) takes an em, another 0.62 of it.

    >>> width("ab", 10), width("木", 10), width("e\\u0301", 10)  # an accent takes no room
    (12.4, 10.0, 6.2)
    """
    ems = 0.0
    for c in text:
        if unicodedata.category(c) not in ("Mn", "Me", "Cf"):
            ems += 1.0 if unicodedata.east_asian_width(c) in "WF" else 0.62
    return ems * size


def is_rtl(texts: Iterable[str]) -> bool:
    """Whether most letters are of a script written from right to left.

    >>> is_rtl(["שלום", "a"]), is_rtl(["hello"])
    (True, False)
    """
    kinds = [unicodedata.bidirectional(c) for text in texts for c in text]
    return sum(kind in ("R", "AL") for kind in kinds) > kinds.count("L")


def columns(words: Sequence[str], least: float = 18.0, gap: float = 14.0) -> list[float]:
    """The borders of columns that hold the words, one more than there are words.

    From right to left, and then decreasing, if the words are written so.

    >>> columns(["a", "b"], least=20, gap=10)
    [0.0, 30.0, 60.0]
    """
    borders = [0.0]
    for word in words:
        borders.append(borders[-1] + max(width(clean(word)), least) + gap)
    return [borders[-1] - x for x in borders] if is_rtl(words) else borders


def beside(pictures: Iterable[tuple[str, Drawing]], widest: float = 720.0) -> Drawing:
    """Pictures below their captions, side by side while a row is not too wide, on one ground line.

    >>> one = Canvas().rect(0, 0, 10, 10).drawing()
    >>> beside([("p = 0.6", one), ("p = 0.4", one)]).count("<rect")
    2
    """
    rows: list[list[tuple[str, Drawing, float, float]]] = []  # with where it begins, and its room
    x = 0.0
    for caption, picture in pictures:
        room = max(picture.size[0], width(caption) + 4)
        if not rows or x + room > widest:
            rows.append([])
            x = 0.0
        rows[-1].append((caption, picture, x, room))
        x += room + 28
    canvas, y = Canvas(), 0.0
    for row in rows:
        tallest = max(picture.size[1] for _, picture, _, _ in row)
        for caption, picture, x, room in row:
            wide, high = picture.size
            canvas.text(x + room / 2, y + FONT, caption, font_weight="bold")
            canvas.put(x + (room - wide) / 2, y + FONT + 6 + tallest - high, picture)
        y += tallest + 44
    return canvas.drawing()
