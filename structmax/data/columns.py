"""CoNLL-2002/2003 columns: a word and its tag on each line; and the schemes of tagged spans."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from structmax.data.folder import DataWarning, fault, quoted, read_lines

Span = tuple[int, int, str]
_TAG = re.compile("O|[BIES]-.+")


class Tagged(NamedTuple):
    """A sentence of n words and their tags."""

    words: list[str]
    tags: list[str]


class SpanCounts(NamedTuple):
    """How many spans two taggings share, and have.

    >>> SpanCounts(shared=1, found=2, gold=2).f1
    0.5
    """

    shared: int
    found: int
    gold: int

    @property
    def f1(self) -> float:
        return 2 * self.shared / max(self.found + self.gold, 1)


def read(path: str | Path, encoding: str = "utf-8") -> list[Tagged]:
    """The sentences of a file, possibly compressed (``.xz``): words first, chunk tags last.

    Columns are separated by spaces or tabs, sentences by empty lines; ``-DOCSTART-`` lines are
    skipped. A malformed line raises ``ValueError`` with the file, the line's number and what is
    wrong with it. CoNLL-2002 needs ``encoding="latin-1"``. If a word has several tags between
    commas, as in WNUT-17, the first one counts, and a warning says how many words have.
    """
    sentences = [Tagged([], [])]
    width = several = 0
    for number, line in read_lines(path, encoding):
        columns = re.findall(r"[^ \t]+", line)  # other white space is part of a word
        if not columns or columns[0] == "-DOCSTART-":
            if sentences[-1].words:
                sentences.append(Tagged([], []))
            continue
        width = width or len(columns)
        if len(columns) < 2 or len(columns) != width:
            raise fault(path, number, f"expected {max(width, 2)} columns, got {len(columns)}")
        tag, *others = columns[-1].split(",")
        if others and all(_TAG.fullmatch(other) for other in others):  # else a comma in a label
            several += 1
        else:
            tag = columns[-1]
        try:
            spans([tag])
        except ValueError:
            raise fault(
                path, number, f"expected O, or B-, I-, E- or S-…, got {quoted(columns[-1])}"
            ) from None
        sentences[-1].words.append(columns[0])
        sentences[-1].tags.append(tag)
    if several:
        told = f"{path}: words with several tags: {several}. The first tag of each counts."
        warnings.warn(told, DataWarning, stacklevel=2)
    return sentences if sentences[-1].words else sentences[:-1]


def spans(tags: Sequence[str]) -> list[Span]:
    """The spans ``(first, last, label)`` of tags in any of the schemes, as conlleval reads them.

    A span begins at B and S, and at I and E that follow nothing, another label, or an end; so
    illegal sequences mean something too.

    >>> spans(["I-LOC", "I-LOC", "B-LOC", "O", "I-PER"])
    [(0, 1, 'LOC'), (2, 2, 'LOC'), (4, 4, 'PER')]
    >>> spans(["B-LOC", "E-LOC", "S-LOC", "O", "S-PER"])
    [(0, 1, 'LOC'), (2, 2, 'LOC'), (4, 4, 'PER')]
    """
    found: list[Span] = []
    open_label = ""  # of a span that may go on
    for at, tag in enumerate(tags):
        if tag == "O":
            open_label = ""
            continue
        mark, dash, label = tag.partition("-")
        if not dash or not label or mark not in ("B", "I", "E", "S"):
            raise ValueError(f"tag {at} is {tag!r}, not O or one of B-, I-, E- and S- with a label")
        if mark in "IE" and label == open_label:
            found[-1] = (found[-1][0], at, label)
        else:
            found.append((at, at, label))
        open_label = "" if mark in "ES" else label
    return found


def convert(tags: Sequence[str], scheme: Literal["iob1", "iob2", "iobes"]) -> list[str]:
    """The same spans in another scheme.

    IOB1 marks a beginning only where a span of the same label ends, IOB2 always, IOBES also ends
    and single words.

    >>> convert(["I-LOC", "I-LOC", "B-LOC", "O", "I-PER"], "iobes")
    ['B-LOC', 'E-LOC', 'S-LOC', 'O', 'S-PER']
    >>> convert(["B-LOC", "E-LOC", "S-LOC", "O", "S-PER"], "iob1")
    ['I-LOC', 'I-LOC', 'B-LOC', 'O', 'I-PER']
    """
    if scheme not in ("iob1", "iob2", "iobes"):
        raise ValueError(f'convert: scheme must be "iob1", "iob2" or "iobes", got {scheme!r}.')
    result = ["O"] * len(tags)
    end, before = -1, ""  # of the span before
    for first, last, label in spans(tags):
        result[first : last + 1] = [f"I-{label}"] * (last + 1 - first)
        touches = first == end + 1 and label == before
        if scheme != "iob1" or touches:
            result[first] = f"B-{label}"
        if scheme == "iobes":
            result[last] = f"S-{label}" if first == last else f"E-{label}"
        end, before = last, label
    return result


def span_counts(found: Sequence[Sequence[str]], gold: Sequence[Sequence[str]]) -> SpanCounts:
    """The spans of two lists of taggings: those that agree in place and label are shared.

    >>> span_counts([["B-LOC", "O", "B-PER"]], [["B-LOC", "I-LOC", "B-PER"]])
    SpanCounts(shared=1, found=2, gold=2)
    """
    pairs = [(set(spans(a)), set(spans(b))) for a, b in zip(found, gold, strict=True)]
    return SpanCounts(
        sum(len(a & b) for a, b in pairs),
        sum(len(a) for a, _ in pairs),
        sum(len(b) for _, b in pairs),
    )
