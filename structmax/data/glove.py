"""Word vectors as text, such as GloVe's (Pennington, Socher & Manning, EMNLP 2014)."""

from __future__ import annotations

import re
from collections.abc import Container
from pathlib import Path

import numpy as np

from structmax.data.folder import fault, quoted, read_lines


def read(path: str | Path, words: Container[str] | None = None) -> tuple[list[str], np.ndarray]:
    """The words of a file, possibly compressed (``.xz``), and their vectors ``(k, d)`` in float32.

    A line has a word and its numbers, separated by spaces. A first line of two whole numbers, as in
    files of word2vec and fastText, is a header and left out. A malformed line raises ``ValueError``
    with the file, the line's number and what is wrong with it.

    Args:
        words: take only these
    """
    found: list[str] = []
    vectors: list[np.ndarray] = []
    size = 0
    for number, line in read_lines(path):
        if number == 1 and re.fullmatch(r"[0-9]+ [0-9]+ ?", line):  # a header: how many, and d
            continue
        word, _, rest = line.partition(" ")
        if not size:
            size = len(rest.split())
        elif line.count(" ") > size and (parts := line.rstrip(" ").rsplit(" ", size))[0] != word:
            word, rest = parts[0], " ".join(parts[1:])  # a word with spaces in it
        if words is not None and word not in words:
            continue
        try:
            if "_" in rest:  # which numpy reads as 10 in 1_0
                raise ValueError(f"expected numbers, got {quoted(rest)}")
            with np.errstate(over="ignore"):  # which is told below
                vector = np.array(rest.split(), np.float32)
        except ValueError as error:
            raise fault(path, number, str(error)) from None
        if not size or len(vector) != size:
            raise fault(path, number, f"expected {size or 'some'} numbers, got {len(vector)}")
        if not np.isfinite(vector).all():
            raise fault(path, number, f"the numbers of {quoted(word)} must be finite")
        found.append(word)
        vectors.append(vector)
    return found, np.stack(vectors) if vectors else np.zeros((0, size), np.float32)
