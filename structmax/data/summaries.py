"""Texts and their summaries, as the headline corpora have them: an object per line.

Such as Gigaword (Rush, Chopra & Weston, "A neural attention model for abstractive sentence
summarization", EMNLP 2015) and XSum.
"""

from __future__ import annotations

import re
from pathlib import Path

from structmax.data.folder import fault, read_objects
from structmax.data.parallel import Pair


def read(path: str | Path, most: int = 0) -> list[Pair]:
    """The pairs of a file of JSON lines, possibly compressed (``.xz``): ``document``, ``summary``.

    Words are separated by spaces. A malformed line raises ``ValueError`` with the file, the line's
    number and what is wrong.

    Args:
        most: take only so many words of a document; 0: all
    """
    found = []
    for number, row in read_objects(path, "document", "summary"):
        texts = []
        for name in ("document", "summary"):
            text = row[name]  # white space but for these is part of a word
            words = re.findall(r"[^ \t\r\n]+", text) if isinstance(text, str) else None
            if not words:
                what = "an empty" if words == [] else "no text as"
                raise fault(path, number, f"{what} {name}")
            texts.append(words)
        found.append(Pair(texts[0][: most or None], texts[1]))
    return found
