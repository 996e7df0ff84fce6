"""The Stanford Sentiment Treebank: sentences and their parts with labels 0 (worst) to 4 (best).

Socher et al., "Recursive deep models for semantic compositionality over a sentiment treebank",
EMNLP 2013. *Sentence labels only* and *all subtree labels* are two settings, whose results are not
to be compared with each other.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

from structmax.data import folder
from structmax.data.folder import fault, quoted, read_lines
from structmax.data.trees import REDUCE, SHIFT

MOST_WORDS = 2000  # of a sentence: all subtrees of a deep tree are quadratically many words
_TOKEN = re.compile(r"\((\d+) ([^ ()]+)\)|\((\d+) |\)| ")
_ESCAPES = {"-LRB-": "(", "-RRB-": ")", "\\/": "/", "\\*": "*"}


class Phrase(NamedTuple):
    """The words, the label, and the binary tree as transitions ``(2n−1)``."""

    words: list[str]
    label: int
    transitions: list[int]


def read(path: str | Path, subtrees: bool = False, binary: bool = False) -> list[Phrase]:
    """The sentences of a file of s-expressions, possibly compressed (``.xz``).

    A malformed line raises ``ValueError`` with the file, the line's number and what is wrong.

    Args:
        subtrees: every subtree is an example of its own, the sentence being its sentence's last;
            otherwise only sentences are
        binary: labels 0 and 1 become 0, 3 and 4 become 1, and what is neutral (2) is left out
    """
    found: list[Phrase] = []
    for number, line in read_lines(path):
        try:
            phrases = parse(line)
        except ValueError as error:
            raise fault(path, number, str(error)) from None
        found += phrases if subtrees else phrases[-1:]
    if binary:
        found = [p._replace(label=int(p.label > 2)) for p in found if p.label != 2]
    return found


def read_splits(
    corpus: str, given: str | Path | None = None, binary: bool = False
) -> list[list[Phrase]]:
    """The sentences of ``train.txt``, ``dev.txt`` and ``test.txt`` of a folder, see
    ``structmax.data.folder.find_splits``."""
    return folder.read_splits(corpus, given, ".txt", partial(read, binary=binary))


def parse(text: str) -> list[Phrase]:
    """Every subtree of an s-expression, each after its parts; the whole is the last.

    >>> parts = parse("(3 (2 It) (4 (2 's) (4 lovely)))")
    >>> parts[-1]
    Phrase(words=['It', "'s", 'lovely'], label=3, transitions=[0, 0, 0, 1, 1])
    >>> [(" ".join(part.words), part.label) for part in parts[:-1]]
    [('It', 2), ("'s", 2), ('lovely', 4), ("'s lovely", 4)]
    """
    found: list[Phrase] = []
    open_: list[tuple[int, list[Phrase]]] = []  # labels and children
    done: Phrase | None = None
    at = leaves = 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None or done is not None:
            raise ValueError(
                f"expected {'the end' if done else '(LABEL …'}, got {quoted(text[at:])}"
            )
        at = token.end()
        if token[0] == " ":
            continue
        if token[3] is not None:
            open_.append((_label(token[3]), []))
            continue
        if token[1] is not None:
            node = Phrase([_word(token[2])], _label(token[1]), [SHIFT])
            leaves += 1
            if leaves > MOST_WORDS:
                raise ValueError(f"a sentence of more than {MOST_WORDS} words")
        else:
            if not open_ or len(open_[-1][1]) != 2:
                got = f"a node with {len(open_[-1][1])} children, not 2" if open_ else "nothing"
                raise ValueError(f"')' at character {at} closes {got}")
            label, (left, right) = open_.pop()
            actions = left.transitions + right.transitions + [REDUCE]
            node = Phrase(left.words + right.words, label, actions)
        found.append(node)
        if open_:
            open_[-1][1].append(node)
        else:
            done = node
    if done is None:
        raise ValueError(f"{len(open_)} '(' never closed" if open_ else "an empty line")
    return found


def _label(text: str) -> int:
    if text not in ("0", "1", "2", "3", "4"):
        raise ValueError(f"a label must be 0 to 4, got {quoted(text)}")
    return int(text)


def _word(text: str) -> str:
    for escaped, plain in _ESCAPES.items():
        text = text.replace(escaped, plain)
    return text
