"""Tags and segments of a sequence: a lattice above the words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from structmax.draw.svg import BLUE, FAINT, Canvas, Drawing, columns, is_rtl, opacity

ROW, LANE = 34.0, 17.0  # of a tag, of segments one above the other


def lattice_svg(
    words: Sequence[str],
    labels: Sequence[str],
    tags: Sequence[Sequence[float]],
    steps: Iterable[tuple[int, int, int, float]] = (),
) -> Drawing:
    """A node for each tag of each word and an edge for each step, as opaque as they are heavy.

    Args:
        words: the sequence
        labels: the names of the tags
        tags: the weight of each tag at each word, ``(n, c)``
        steps: (position, tag, next tag, weight)

    >>> picture = lattice_svg(["a", "b"], ["X", "Y"], [[1, 0], [0.5, 0.5]], [(0, 0, 1, 0.5)])
    >>> picture.count("<circle"), picture.count("<path")
    (7, 1)
    """
    borders = columns(words, least=40)
    x = [(a + b) / 2 for a, b in pairwise(borders)]
    canvas = Canvas()
    for at, i, j, weight in sorted(steps, key=lambda step: step[3]):
        if weight >= FAINT:
            canvas.path(
                [(x[at], i * ROW), (x[at + 1], j * ROW)], stroke=BLUE, stroke_width=2,
                stroke_opacity=opacity(weight), title=f"{labels[i]} → {labels[j]}: {weight:.3f}",
            )  # fmt: skip
    for at, row in enumerate(tags):
        for i, weight in enumerate(row):
            y = i * ROW
            # a disc in the colour of the page would hide the edges below; a ring need not
            canvas.circle(x[at], y, 8, fill="none", stroke="currentColor", stroke_opacity="0.35")
            if weight >= FAINT:
                title = f"{words[at]} / {labels[i]}: {weight:.3f}"
                canvas.circle(x[at], y, 8, fill=BLUE, fill_opacity=opacity(weight), title=title)
    _names(canvas, words, borders, labels, [(i * ROW + 4) for i in range(len(labels))])
    _words(canvas, words, x, (len(labels) - 1) * ROW + 30)
    return canvas.drawing()


def segments_svg(
    words: Sequence[str],
    labels: Sequence[str],
    segments: Iterable[tuple[int, int, int, float]],
) -> Drawing:
    """Segments (first, last, label, weight) as bars, in the row of their label.

    Those that overlap are one above the other.

    >>> segments_svg(["a", "b"], ["X"], [(0, 1, 0, 0.6), (0, 0, 0, 0.4)]).count("<rect")
    2
    """
    borders = columns(words, least=40)
    x = [(a + b) / 2 for a, b in pairwise(borders)]
    rows: list[list[list[tuple[int, int, float]]]] = [[] for _ in labels]
    for first, last, label, weight in sorted(segments, key=lambda s: -s[3]):
        if weight >= FAINT:
            lanes = rows[label]
            free = [lane for lane in lanes if all(last < a or b < first for a, b, _ in lane)]
            lane = free[0] if free else []
            if not free:
                lanes.append(lane)
            lane.append((first, last, weight))
    canvas, y, middles = Canvas(), 0.0, []
    for name, lanes in zip(labels, rows):
        top = y
        for lane in lanes or [[]]:
            for first, last, weight in lane:
                left, right = sorted((borders[first], borders[last + 1]))
                canvas.rect(
                    left + 3, y, right - left - 6, LANE - 4, rx=4, fill=BLUE,
                    fill_opacity=opacity(weight), stroke=BLUE, stroke_opacity="0.6",
                    title=f"{name} {' '.join(words[first : last + 1])}: {weight:.3f}",
                )  # fmt: skip
            y += LANE
        middles.append((top + y) / 2 + 2)
        y += 8
        ends = [(min(borders), y - 6), (max(borders), y - 6)]
        canvas.path(ends, stroke="currentColor", stroke_opacity="0.2")
    _names(canvas, words, borders, labels, middles)
    _words(canvas, words, x, y + 14)
    return canvas.drawing()


def _names(
    canvas: Canvas,
    words: Sequence[str],
    borders: Sequence[float],
    labels: Sequence[str],
    middles: Sequence[float],
) -> None:
    """The names of the rows, where the sequence begins."""
    side, at = ("left", max(borders) + 6) if is_rtl(words) else ("right", min(borders) - 6)
    for label, y in zip(labels, middles):
        canvas.text(at, y, label, side)


def _words(canvas: Canvas, words: Sequence[str], x: Sequence[float], y: float) -> None:
    for at, word in zip(x, words):
        canvas.text(at, y, word)
