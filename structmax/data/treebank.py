"""Treebanks: sentences whose heads form a tree with one root, in three splits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from structmax.data import conllu
from structmax.data.folder import read_splits


class Parsed(NamedTuple):
    """Words, their heads (words count from 1; 0 is the root symbol) and the labels of the arcs."""

    words: list[str]
    heads: list[int]
    labels: list[str]


def read(corpus: str | Path, given: str | Path | None = None) -> list[list[Parsed]]:
    """The sentences of the splits of a folder of CoNLL-U files, see
    ``structmax.data.folder.find_splits``."""
    return read_splits(corpus, given, ".conllu", read_file)


def read_file(path: str | Path) -> list[Parsed]:
    """The sentences of a CoNLL-U file.

    Heads that form no tree with one root raise ``ValueError`` with the file and the sentence.
    """
    return [
        _checked(found, f"{path}: sentence {i}") for i, found in enumerate(conllu.read(path), 1)
    ]


def _checked(found: conllu.Sentence, place: str) -> Parsed:
    heads = [-1 if head is None else head for head in found.heads]
    if min(heads) < 0 or not is_tree(heads):
        raise ValueError(f"{place}: the heads {found.heads} form no tree with one root.")
    return Parsed(found.words, heads, found.deprels)


def is_tree(heads: Sequence[int]) -> bool:
    """Whether heads form a tree with one root.

    >>> is_tree([2, 0, 2]), is_tree([0, 0]), is_tree([0, 3, 2])
    (True, False, False)
    """
    return list(heads).count(0) == 1 and not has_cycle(heads)


def has_cycle(heads: Sequence[int]) -> bool:
    """Whether some words are not below the root.

    >>> has_cycle([0, 0]), has_cycle([0, 3, 2])
    (False, True)
    """
    above = np.array([0, *heads])
    for _ in range(len(heads).bit_length()):  # ancestors, twice as far each time
        above = above[above]
    return bool(above.any())


def is_projective(heads: Sequence[int]) -> bool:
    """Whether no two arcs cross.

    >>> is_projective([2, 0, 2]), is_projective([3, 4, 0, 3])
    (True, False)
    """
    head, word = np.array(heads), np.arange(1, len(heads) + 1)
    low, high = np.minimum(head, word), np.maximum(head, word)
    starts_inside = (low[:, None] < low) & (low < high[:, None])
    return not bool((starts_inside & (high[:, None] < high)).any())


def generate(sizes: Sequence[int], seed: int = 0) -> list[list[Parsed]]:
    """Sentences of made-up words, in splits of these sizes.

    Around a verb there are phrases of a determiner, adjectives and a noun. After the object, a
    phrase hangs from the noun before it if it begins with "of", and from the verb if with "by".

    >>> ((sentence,),) = generate([1])
    >>> is_tree(sentence.heads) and is_projective(sentence.heads)
    True
    """
    rng = np.random.default_rng(seed)
    stems = ["".join(rng.choice(list("bdgklmnprst"), 3)) + "aeiou"[i % 5] for i in range(30)]

    def phrase(rows: list[tuple[str, int, str]], head: int, label: str, mark: str = "") -> int:
        """Add a phrase; the number of its noun."""
        adjectives = int(rng.integers(0, 3))
        noun = len(rows) + bool(mark) + 1 + adjectives + 1
        if mark:
            rows.append((mark, noun, "case"))
        rows.append((str(rng.choice(["the", "a"])), noun, "det"))
        rows += [(stems[rng.integers(20, 30)] + "ish", noun, "amod") for _ in range(adjectives)]
        rows.append((stems[rng.integers(0, 15)], head, label))
        return noun

    def sentence() -> Parsed:
        rows: list[tuple[str, int, str]] = []
        verb = phrase(rows, 0, "nsubj") + 1
        rows[-1] = (rows[-1][0], verb, "nsubj")
        rows.append((stems[rng.integers(8, 20)] + "s", 0, "root"))
        nearest = phrase(rows, verb, "obj")
        for mark in rng.choice(["of", "by"], rng.integers(0, 3)):
            at_verb = mark == "by"
            nearest = phrase(
                rows, verb if at_verb else nearest, "obl" if at_verb else "nmod", str(mark)
            )
        return Parsed(*map(list, zip(*rows)))

    return [[sentence() for _ in range(size)] for size in sizes]
