"""Batches of items of like length, the same for the same seed and epoch, resumable anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from structmax.data.trees import Trees


class Example(Protocol):
    """What can be put in a batch."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def label(self) -> int: ...
    @property
    def transitions(self) -> Sequence[int]: ...


class Batch(NamedTuple):
    """Items padded to the longest: tokens ``(B, n)``, lengths ``(B)``, labels ``(B)``, trees.

    >>> from structmax.data import listops
    >>> batch = collate([listops.parse("[MAX 2 9 ]"), listops.parse("7")])
    >>> batch.to("cpu").lengths, batch.tokens.shape
    (tensor([4, 1]), torch.Size([2, 4]))
    """

    tokens: Tensor
    lengths: Tensor
    labels: Tensor
    trees: Trees

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with its tensors on a device; trees stay where they are planned."""
        tokens, lengths, labels = (t.to(device, non_blocking=True) for t in self[:3])
        return Batch(tokens, lengths, labels, self.trees)


def collate(examples: Sequence[Example], pad: int = 0) -> Batch:
    """A batch of examples that have ``tokens``, a ``label`` and ``transitions``.

    >>> from structmax.data import listops
    >>> batch = collate([listops.parse("[MAX 2 9 ]"), listops.parse("7")])
    >>> batch.tokens
    tensor([[ 2,  8, 15,  5],
            [13,  0,  0,  0]])
    >>> batch.lengths, batch.labels, batch.trees.brackets(0)
    (tensor([4, 1]), tensor([9, 7]), '(((0 1) 2) 3)')
    """
    lengths = [len(e.tokens) for e in examples]
    tokens = np.full((len(examples), max(lengths, default=0)), pad, np.int64)
    for row, e in zip(tokens, examples):
        row[: len(e.tokens)] = e.tokens
    return Batch(
        torch.from_numpy(tokens),
        torch.tensor(lengths, dtype=torch.int64),
        torch.tensor([e.label for e in examples], dtype=torch.int64),
        Trees.from_transitions([e.transitions for e in examples], lengths),
    )


class Batches:
    """Indices of items in batches, epoch after epoch, from where ``state_dict`` left off.

    Each epoch visits every item once. Items are shuffled, sorted by length (up to ``jitter``) and
    cut into batches, whose order is shuffled again. All of it depends on ``seed`` and the epoch
    alone, so a stopped run that restores ``(epoch, position)`` sees the same batches.

    Args:
        lengths: the length of each item
        batch_size: the most items in a batch
        max_tokens: the most tokens in a batch, padding included; a single longer item is alone
        shuffle: off, batches go from short to long, in the same order every epoch
        jitter: how far lengths are blurred before sorting, so that batches vary
        shard: ``(rank, world)``: of each batch, this worker's share. The first of a batch goes to
            rank 0, the next to rank 1, …; a batch with fewer items than workers leaves some empty

    >>> batches = Batches([3, 9, 4, 8, 3], batch_size=2)
    >>> [batch.tolist() for batch in batches.epoch(0)] == [b.tolist() for b in batches.epoch(0)]
    True
    >>> it = iter(batches)
    >>> first = next(it)
    >>> resumed = Batches([3, 9, 4, 8, 3], batch_size=2)
    >>> resumed.load_state_dict(batches.state_dict())
    >>> next(it).tolist() == next(iter(resumed)).tolist()
    True
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int = 64,
        max_tokens: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        jitter: int = 2,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        if batch_size < 1 or (max_tokens is not None and max_tokens < 1):
            raise ValueError(
                "Batches: batch_size and max_tokens must be positive, got "
                f"{batch_size} and {max_tokens}."
            )
        if not 0 <= shard[0] < shard[1]:
            raise ValueError(f"Batches: shard must be (rank, world), rank < world, got {shard}.")
        self.lengths = np.asarray(lengths, np.int64)
        self.batch_size, self.max_tokens, self.seed = batch_size, max_tokens, seed
        self.shuffle, self.jitter, self.shard = shuffle, jitter, shard
        self.current, self.position = 0, 0  # the epoch, and how many of its batches are done

    def epoch(self, epoch: int) -> list[np.ndarray]:
        """The batches of one epoch: indices of items, whole (not sharded)."""
        keys = self.lengths.astype(np.float64)
        rng = np.random.default_rng([self.seed, epoch])
        order = np.arange(len(keys))
        if self.shuffle:
            order = rng.permutation(order)
            keys = keys + rng.uniform(0, self.jitter, len(keys))
        order = order[np.argsort(keys[order], kind="stable")]
        batches, start = [], 0
        while start < len(order):
            stop = start + self._fit(self.lengths[order[start : start + self.batch_size]])
            batches.append(order[start:stop])
            start = stop
        if self.shuffle:
            batches = [batches[i] for i in rng.permutation(len(batches))]
        return batches

    def _fit(self, lengths: np.ndarray) -> int:
        """How many of the next items one batch takes."""
        if self.max_tokens is None:
            return len(lengths)
        padded = np.maximum.accumulate(lengths) * np.arange(1, len(lengths) + 1)
        return max(int((padded <= self.max_tokens).sum()), 1)

    def __iter__(self) -> Iterator[np.ndarray]:
        """The rest of the current epoch, this worker's share of each batch; then the next's turn.

        The position counts a batch as soon as it is handed out.
        """
        rank, world = self.shard
        batches = self.epoch(self.current)
        while self.position < len(batches):
            self.position += 1
            yield batches[self.position - 1][rank::world]
        self.current, self.position = self.current + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Where the iteration stands."""
        return {"epoch": self.current, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from where ``state_dict`` was taken."""
        self.current, self.position = state["epoch"], state["position"]
