"""Texts and their summaries, as the headline corpora have them: an object per line.

Such as Gigaword (Rush, Chopra & Weston, "A neural attention model for abstractive sentence
summarization", EMNLP 2015) and XSum.
"""

from __future__ import annotations

import json
from pathlib import Path

from structmax.data.folder import fault, read_lines
from structmax.data.parallel import Pair


def read(path: str | Path, most: int = 0) -> list[Pair]:
    """The pairs of a file of JSON lines, possibly compressed (``.xz``): ``document``, ``summary``.

    Words are separated by spaces. A malformed line raises ``ValueError`` with the file, the line's
    number and what is wrong.

    Args:
        most: take only so many words of a document; 0: all
    """
    found = []
    for number, line in read_lines(path):
        try:
            row = json.loads(line)
            texts = [row["document"].split(), row["summary"].split()]
        except json.JSONDecodeError as error:
            raise fault(path, number, f"not JSON: {error}") from None
        except (KeyError, TypeError, AttributeError):
            raise fault(path, number, "expected an object with document and summary") from None
        for name, words in zip(("document", "summary"), texts):
            if not words:
                raise fault(path, number, f"an empty {name}")
        found.append(Pair(texts[0][: most or None], texts[1]))
    return found
