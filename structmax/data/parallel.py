"""Parallel text: two files, whose lines translate each other."""

from __future__ import annotations

import re
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from structmax.data.folder import fault, read_lines


class Pair(NamedTuple):
    """The words of a sentence and of its translation."""

    source: list[str]
    target: list[str]


def read(source: str | Path, target: str | Path) -> list[Pair]:
    """The pairs of two files of tokenized text, possibly compressed (``.xz``).

    Words are separated by spaces. A line that is empty, or has no partner, raises ``ValueError``
    with the file, the line's number and what is wrong.
    """
    found = []
    for left, right in zip_longest(read_lines(source), read_lines(target)):
        if left is None or right is None:
            number, path, other = (
                (right[0], target, source) if left is None else (left[0], source, target)
            )
            raise fault(path, number, f"{other} ends before this line")
        pair = Pair(*(re.findall(r"[^ \t]+", line) for _, line in (left, right)))
        for (number, _), words, path in ((left, pair.source, source), (right, pair.target, target)):
            if not words:
                raise fault(path, number, "an empty line")
        found.append(pair)
    return found
