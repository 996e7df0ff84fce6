"""Words by number, and their vectors: what the recipes on sentences share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from structmax.data import find_data, glove

NONE, UNKNOWN = 0, 1  # numbers of padding and of unknown words

STAND_INS = {
    "n't": "not", "'s": "is", "'re": "are", "'m": "am", "'ve": "have", "'ll": "will", "'d": "would",
    "ca": "can", "wo": "will", "a": "an", "i": "me",
}  # fmt: skip
"""Words whose vectors may be missing from a file, and what to start from instead."""


class Vocabulary:
    """Numbers of words; those of a list have 2, 3, …

    >>> Vocabulary(["good", "movie"]).numbers(["a", "good", "movie"])
    [1, 2, 3]
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self._number = {word: i for i, word in enumerate(words, UNKNOWN + 1)}

    def __len__(self) -> int:
        return len(self.words) + UNKNOWN + 1

    def numbers(self, words: Iterable[str]) -> list[int]:
        return [self._number.get(word, UNKNOWN) for word in words]

    @classmethod
    def of(cls, sentences: Iterable[Iterable[str]], least_count: int = 1) -> Vocabulary:
        """The words of some sentences that are there so often, in alphabetical order."""
        counts = Counter(word for sentence in sentences for word in sentence)
        return cls(sorted(word for word, count in counts.items() if count >= least_count))


def read_vectors(
    name: str, folder: str, words: Iterable[str], notes: list[str]
) -> dict[str, np.ndarray]:
    """The vectors of those words that a file has, or of their stand-ins; none without a file. A
    note says how many."""
    if not name:
        return {}
    words = set(words)
    found = dict(zip(*glove.read(find_data(name, folder), {*words, *STAND_INS.values()})))
    source = {word: word if word in found else STAND_INS.get(word) for word in words}
    vectors = {word: found[other] for word, other in source.items() if other in found}
    notes.append(f"vectors: {name} has {len(vectors)} of the {len(words)} words of the corpus")
    return vectors


def all_vectors(
    name: str, folder: str, sentences: Iterable[Iterable[str]], notes: list[str]
) -> tuple[list[str], np.ndarray]:
    """All words of a file and their vectors ``(k, d)``, none without a file. A note says how many
    of the training words there are among them."""
    if not name:
        return [], np.zeros((0, 0), np.float32)
    given, vectors = glove.read(find_data(name, folder))
    words = {word.lower() for sentence in sentences for word in sentence}
    count = len(words.intersection(given))
    notes.append(f"vectors: {name} has {count} of the {len(words)} training words")
    return given, vectors


@torch.no_grad()
def fill(embedding: nn.Embedding, words: Vocabulary, vectors: dict[str, np.ndarray]) -> None:
    """Start the rows of an embedding from vectors, where there are any."""
    if not vectors:
        return
    given = torch.from_numpy(np.stack([*vectors.values()]))
    if given.shape[1] != embedding.embedding_dim:
        raise ValueError(
            f"the word vectors have {given.shape[1]} numbers, the model's have "
            f"{embedding.embedding_dim}. Add --word-size {given.shape[1]}."
        )
    embedding.weight[torch.tensor(words.numbers(vectors))] = given


def pad(rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows of numbers as ``(B, n)``, filled up with 0."""
    return pad_sequence([torch.tensor(row, dtype=torch.int64) for row in rows], batch_first=True)
