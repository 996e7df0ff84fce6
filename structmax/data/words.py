"""Words as numbers: their own, those of given vectors, and those of their letters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NONE, UNKNOWN = 0, 1
"""Numbers of what is not there, and of words and letters that training did not see."""

T = TypeVar("T")
MOST_CHARS = 30
MOST_FORMS = 1 << 20  # remembered


def words_between_spaces(line: str) -> list[str]:
    """The words of a line, at least one. Other white space is part of a word, as in some numbers.

    >>> words_between_spaces("a  2\u00a01/2 star film\\n")
    ['a', '2\\xa01/2', 'star', 'film']
    """
    words = re.findall(r"[^ \t\r\n]+", line)
    if not words:
        raise ValueError("expected words between spaces, got an empty line.")
    return words


def in_batches(
    items: Iterable[T], length: Callable[[Any], int] = len, size: int = 64, most: int = 1 << 12
) -> Iterator[list[T]]:
    """Cut items into batches, in order. If reading an item raises a ValueError, the items before it
    come first.

    Args:
        items: sentences, or anything else that has a length
        length: of an item
        size: the most items in a batch
        most: the most words in a batch, padding included; a single longer item is alone

    >>> list(in_batches(map(words_between_spaces, ["a b", "c", "d"]), size=2))
    [[['a', 'b'], ['c']], [['d']]]
    >>> list(in_batches(["a", "abcd", "b"], most=4))
    [['a'], ['abcd'], ['b']]
    """
    rows: list[T] = []
    longest = 0
    try:
        for item in items:
            longest = max(longest, length(item))
            if rows and (len(rows) == size or (len(rows) + 1) * longest > most):
                yield rows
                rows, longest = [], length(item)
            rows.append(item)
    except ValueError:
        if rows:
            yield rows
        raise
    if rows:
        yield rows


class Words(NamedTuple):
    """Sentences of words, padded with 0.

    ``words`` and ``given`` ``(B, n)`` are numbers of words and of given vectors; ``spelt`` ``(B,
    n)`` says which row of ``chars`` ``(u, m)`` spells a word. ``lengths`` ``(B)`` counts words.
    The arrays stay on the host, where recurrent networks want them: numbers of letters ``(u)`` and
    of words ``(B)``.

    >>> batch = Vocabulary(facts([["a", "cat"]], least_count=1)).collate([["a", "cat"], ["cat"]])
    >>> batch.words, batch.lengths, batch.letters  # of "a" and "cat"
    (tensor([[2, 3],
            [3, 0]]), tensor([2, 1]), array([1, 3]))
    """

    words: Tensor
    given: Tensor
    spelt: Tensor
    chars: Tensor
    lengths: Tensor
    letters: NDArray[np.int64]
    counts: NDArray[np.int64]


def facts(
    sentences: Iterable[Sequence[str]], least_count: int, given: Sequence[str] = ()
) -> dict[str, list[str]]:
    """What a :class:`Vocabulary` is made of: words, in lower case, and letters of a corpus.

    Args:
        sentences: of the training split
        least_count: words seen less often have no number of their own
        given: words that have vectors already
    """
    counts = Counter(word for sentence in sentences for word in sentence)
    lower: Counter[str] = Counter()
    for word, count in counts.items():
        lower[word.lower()] += count
    return {
        "words": sorted(word for word, count in lower.items() if count >= least_count),
        "chars": sorted({char for word in counts for char in word}),
        "given": list(given),
    }


class Vocabulary:
    """From sentences to their numbers, a batch at once. Every form is looked up once.

    >>> names = facts([["The", "cat"], ["the", "dog"]], least_count=2, given=["dog"])
    >>> batch = Vocabulary(names).collate([["the", "dog"], ["The"]])
    >>> batch.words, batch.given
    (tensor([[2, 1],
            [2, 0]]), tensor([[0, 1],
            [0, 0]]))
    >>> batch.chars[batch.spelt[1, 0]], batch.lengths  # T, h, e
    (tensor([2, 8, 6]), tensor([2, 1]))
    """

    def __init__(self, facts: dict[str, Any]) -> None:
        first = {"words": UNKNOWN + 1, "chars": UNKNOWN + 1, "given": NONE + 1}
        self.index = {
            kind: {name: i for i, name in enumerate(facts[kind], start)}
            for kind, start in first.items()
        }
        self._forms: dict[str, int] = {}
        self._table = np.zeros((0, 3 + MOST_CHARS), np.int64)  # word, given, letters: how many, all

    def collate(self, sentences: Sequence[Sequence[str]]) -> Words:
        """The numbers of some sentences."""
        forms = self._numbers([word for sentence in sentences for word in sentence])
        counts = np.array([len(sentence) for sentence in sentences])
        # rows in the order of the words, not of what was seen before this batch: a run that goes on
        # after an interruption then draws the same dropout
        used, first, spelt = np.unique(forms, return_index=True, return_inverse=True)
        order = np.argsort(first)
        used, spelt = used[order], np.argsort(order)[spelt]
        letters = self._table[used, 2]
        return Words(
            pad(self._table[forms, 0], counts),
            pad(self._table[forms, 1], counts),
            pad(spelt, counts),
            torch.from_numpy(self._table[used, 3 : 3 + letters.max(initial=1)]),
            torch.from_numpy(counts),
            letters,
            counts,
        )

    def _numbers(self, words: list[str]) -> NDArray[np.int64]:
        if len(self._forms) > MOST_FORMS:
            self._forms, self._table = {}, self._table[:0]
        new = [word for word in dict.fromkeys(words) if word not in self._forms]
        if new:
            self._forms.update(zip(new, range(len(self._forms), len(self._forms) + len(new))))
            self._table = np.concatenate([self._table, [self._row(word) for word in new]])
        return np.fromiter(map(self._forms.__getitem__, words), np.int64, len(words))

    def _row(self, word: str) -> list[int]:
        lower, chars = word.lower(), self.index["chars"]
        spelt = [chars.get(char, UNKNOWN) for char in word[:MOST_CHARS]]
        numbers = self.index["words"].get(lower, UNKNOWN), self.index["given"].get(lower, NONE)
        return [*numbers, len(spelt), *spelt, *[NONE] * (MOST_CHARS - len(spelt))]


def pad(flat: Sequence[int] | NDArray[np.int64], counts: NDArray[np.int64]) -> Tensor:
    """Numbers of all words one after another as ``(B, n)``, 0 after the end of each item.

    >>> pad([1, 2, 3], np.array([1, 2]))
    tensor([[1, 0],
            [2, 3]])
    """
    inside = np.arange(counts.max(initial=0)) < counts[:, None]
    out = np.zeros(inside.shape, np.int64)
    out[inside] = flat
    return torch.from_numpy(out)
