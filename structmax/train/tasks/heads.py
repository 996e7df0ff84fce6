"""Dependency trees that nobody learned: by simple rules, at random, or from a file."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from structmax.data import conllu, treebank
from structmax.data.folder import fault, read_objects
from structmax.structures.dependency_tree import DependencyTree

CYCLE = "heads must form no cycle"


def flat(n: int) -> list[int]:
    """The heads of n words: every word below the root symbol.

    >>> flat(3)
    [0, 0, 0]
    """
    return [0] * n


def left(n: int) -> list[int]:
    """Every word below the next one, as an LSTM reads them.

    >>> left(3)
    [2, 3, 0]
    """
    return [*range(2, n + 1), 0]


def right(n: int) -> list[int]:
    """Every word below the one before.

    >>> right(3)
    [0, 1, 2]
    """
    return [*range(n)]


@cache
def balanced(n: int) -> list[int]:
    """The middle word above the middle words of both halves.

    >>> balanced(5)
    [2, 3, 0, 5, 3]
    """
    heads = [0] * n

    def hang(first: int, last: int, head: int) -> None:
        if first <= last:
            middle = (first + last + 1) // 2
            heads[middle - 1] = head
            hang(first, middle - 1, middle)
            hang(middle + 1, last, middle)

    hang(1, n, 0)
    return heads


RULES: dict[str, Callable[[int], list[int]]] = {
    "flat": flat,
    "left": left,
    "right": right,
    "balanced": balanced,
}


def random(lengths: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Heads ``(B, n)`` of a tree with one root for each of lengths ``(B)``, all trees alike.

    >>> random(torch.tensor([1, 1])).tolist()
    [[0], [0]]
    """
    n = int(lengths.max()) + 1
    tree = DependencyTree(  # type: ignore[abstract]
        torch.zeros(len(lengths), n, n), lengths, labelled=False, validate_args=False
    )
    return tree.sample(generator=generator)[:, :, 1:].argmax(1)


def read(path: Path) -> list[tuple[list[str], list[int | None]]]:
    """Words and heads, from CoNLL-U or from what ``structmax predict --format json`` writes.

    A malformed line raises ``ValueError`` with the file, the line's number and what is wrong.
    """
    if ".jsonl" not in path.suffixes:
        found = [(sentence.words, sentence.heads) for sentence in conllu.read(path)]
        for number, (_, given) in enumerate(found, 1):
            if _has_cycle(given):
                raise ValueError(f"{path}: sentence {number}: {CYCLE}, got {given}.")
        return found
    found = []
    for number, row in read_objects(path, "words", "heads"):
        words, given = row["words"], row["heads"]
        good = isinstance(words, list) and isinstance(given, list) and len(words) == len(given)
        if not good or not all(isinstance(word, str) for word in words):
            raise fault(path, number, "words and heads must be lists, and as long as each other")
        for head in given:
            if head is not None and not (type(head) is int and 0 <= head <= len(words)):
                raise fault(path, number, f"a head must be one of 0 to {len(words)}, got {head!r}")
        if _has_cycle(given):
            raise fault(path, number, f"{CYCLE}, got {given}")
        found.append((words, given))
    return found


def _has_cycle(heads: list[int | None]) -> bool:
    known = [head for head in heads if head is not None]
    return len(known) == len(heads) and treebank.has_cycle(known)
