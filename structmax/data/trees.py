"""Binary trees over ragged sentences, in each of the forms that a model may want."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from structmax.cache import cached
from structmax.data import tree_forms
from structmax.data.tree_forms import REDUCE, SHIFT, array


class Trees:
    """A batch of binary trees, one over the leaves 0..length−1 of each item.

    The nodes of a tree are its leaves 0..n−1 and, for n the most leaves of an item, the inner
    nodes n, n+1, … in an order where children come before their parent. The same tree is also

    - its transitions ``(B, 2n−1)``: 0 shifts the next leaf, 1 reduces the two topmost subtrees;
    - a merge order ``(B, n−1)``: each step merges the neighbours at positions j and j + 1 of what
      is left. A tree has several; ``merges`` gives the one that merges as early as a parser that
      reads from left to right could;
    - its spans ``(B, n, n)``: ``[i, j]`` with both ends inclusive, leaves counted, as the z of
      :class:`structmax.BinaryTree`.

    Args:
        children: ``(B, n−1, 2)``, the left and right child of each inner node; −1 in the padding
        lengths: ``(B)``, the number of leaves of each item

    >>> trees = Trees.from_transitions([[0, 0, 1, 0, 0, 1, 1], [0, 0, 1]])
    >>> trees.brackets(0), trees.brackets(1, ["red", "fox"])
    ('((0 1) (2 3))', '(red fox)')
    >>> trees.merges()
    tensor([[ 0,  1,  0],
            [ 0, -1, -1]])
    >>> trees.spans()[1].int()
    tensor([[1, 1, 0, 0],
            [0, 1, 0, 0],
            [0, 0, 0, 0],
            [0, 0, 0, 0]], dtype=torch.int32)
    >>> Trees.from_merges([[2, 0, 0]]).brackets(0)
    '((0 1) (2 3))'

    How much of one tree is in another, F1 over the spans of two or more leaves:

    >>> Trees.left([4, 2]).f1(trees)
    tensor([0.6667, 1.0000])
    """

    def __init__(self, children: np.ndarray, lengths: np.ndarray) -> None:
        self.children = np.asarray(children, np.int64)
        self.lengths = np.asarray(lengths, np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, items: Any) -> Self:
        """Some items: a slice, a mask or indices (padding stays)."""
        items = array(items) if isinstance(items, Tensor) else items
        keep = np.atleast_1d(np.arange(len(self))[items])
        return type(self)(self.children[keep], self.lengths[keep])

    @property
    def longest(self) -> int:
        """n, the most leaves of an item."""
        return self.children.shape[1] + 1

    # -- from other forms -------------------------------------------------------------------------

    @classmethod
    def from_transitions(cls, actions: Any, lengths: Any = None) -> Self:
        """Of transitions ``(B, 2n−1)``, lists of them, or one-hot rows ``(B, 2n−1, 2)``."""
        return cls(*tree_forms.from_transitions(actions, lengths))

    @classmethod
    def from_merges(cls, positions: Any, lengths: Any = None) -> Self:
        """Of merge positions ``(B, n−1)``, lists of them, or one-hot rows ``(B, n−1, n−1)``."""
        return cls(*tree_forms.from_merges(positions, lengths))

    @classmethod
    def from_spans(cls, spans: Any, lengths: Any) -> Self:
        """Of the indicator of spans ``(B, n, n)``, as the z of :class:`structmax.BinaryTree`.

        Leaves may be left out.
        """
        return cls(*tree_forms.from_spans(spans, lengths))

    # -- simple trees -----------------------------------------------------------------------------

    @classmethod
    def left(cls, lengths: Any) -> Self:
        """Left-branching: (((0 1) 2) 3)."""
        return cls._each(lengths, lambda n: (SHIFT,) + (SHIFT, REDUCE) * (n - 1))

    @classmethod
    def right(cls, lengths: Any) -> Self:
        """Right-branching: (0 (1 (2 3)))."""
        return cls._each(lengths, lambda n: (SHIFT,) * n + (REDUCE,) * (n - 1))

    @classmethod
    def balanced(cls, lengths: Any) -> Self:
        """Each span split in the middle, the left half the larger one: ((0 1) 2)."""
        return cls._each(lengths, _balanced)

    @classmethod
    def random(cls, lengths: Any, seed: int = 0) -> Self:
        """Of merges drawn evenly from the neighbours that are left. Same seed, same trees."""
        sizes = array(lengths).astype(np.int64)
        steps = np.arange(max(int(sizes.max(initial=1)) - 1, 0))
        draws = np.random.default_rng(seed).random((len(sizes), len(steps)))
        choices = np.maximum(sizes[:, None] - 1 - steps, 1)
        return cls.from_merges((draws * choices).astype(np.int64), sizes)

    @classmethod
    def _each(cls, lengths: Any, transitions: Callable[[int], Sequence[int]]) -> Self:
        return cls.from_transitions([transitions(int(n)) for n in array(lengths)], lengths)

    # -- to other forms ---------------------------------------------------------------------------

    @cached_property
    def bounds(self) -> np.ndarray:
        """The first and last leaf of each inner node, ``(B, n−1, 2)``; −1 in the padding."""
        b, n, at = len(self), self.longest, np.arange(len(self))
        ends = np.full((b, 2 * n, 2), -1)  # the last row is that of the padding's child −1
        ends[:, :n] = np.arange(n)[:, None]
        for t in range(n - 1):
            child = self.children[:, t]
            ends[:, n + t] = np.stack([ends[at, child[:, 0], 0], ends[at, child[:, 1], 1]], -1)
        return ends[:, n:-1]

    @cached_property
    def heights(self) -> np.ndarray:
        """The height of each inner node above its deepest leaf, ``(B, n−1)``; 0 in the padding."""
        b, n, at = len(self), self.longest, np.arange(len(self))[:, None]
        height = np.zeros((b, 2 * n), np.int64)
        for t in range(n - 1):
            child = self.children[:, t]
            height[:, n + t] = np.where(child[:, 0] >= 0, height[at, child].max(1) + 1, 0)
        return height[:, n:-1]

    def transitions(self) -> Tensor:
        """``(B, 2n−1)``, 0 to shift and 1 to reduce, −1 in the padding."""
        n, b = self.longest, len(self)
        item, node = np.nonzero(self.children[:, :, 0] >= 0)
        closed = np.zeros((b, n), np.int64)  # how many spans end at each leaf
        np.add.at(closed, (item, self.bounds[item, node, 1]), 1)
        shifts = np.arange(n) + np.cumsum(closed, 1) - closed
        steps = np.arange(2 * n - 1)
        actions = np.where(steps < 2 * self.lengths[:, None] - 1, REDUCE, -1)
        item, leaf = np.nonzero(np.arange(n) < self.lengths[:, None])
        actions[item, shifts[item, leaf]] = SHIFT
        return torch.from_numpy(actions)

    def merges(self) -> Tensor:
        """``(B, n−1)``, −1 in the padding: the merge order of the transitions."""
        actions = self.transitions().numpy()
        # what lies left of the next leaf is on the stack, so a reduction merges its two topmost
        size = np.cumsum(np.where(actions == SHIFT, 1, -1), 1)
        item, step = np.nonzero(actions == REDUCE)
        rank = np.cumsum(actions == REDUCE, 1) - 1
        positions = np.full((len(self), self.longest - 1), -1)
        positions[item, rank[item, step]] = size[item, step] - 1
        return torch.from_numpy(positions)

    def spans(self) -> Tensor:
        """``(B, n, n)``, whether the tree has the span [i, j]; leaves count."""
        n = self.longest
        out = np.zeros((len(self), n, n), bool)
        item, leaf = np.nonzero(np.arange(n) < self.lengths[:, None])
        out[item, leaf, leaf] = True
        item, node = np.nonzero(self.children[:, :, 0] >= 0)
        out[item, self.bounds[item, node, 0], self.bounds[item, node, 1]] = True
        return torch.from_numpy(out)

    def brackets(self, item: int, words: Sequence[str] | None = None) -> str:
        """One tree in words, by default the numbers of its leaves."""
        n, length = self.longest, int(self.lengths[item])
        if words is not None and len(words) != length:
            raise ValueError(
                f"Trees.brackets: item {item} has {length} leaves, and there are {len(words)} "
                "words."
            )
        text = [str(i) for i in range(n)] if words is None else [*words, *[""] * (n - len(words))]
        for left, right in self.children[item, : length - 1].tolist():
            text.append(f"({text[left]} {text[right]})")
        return text[0] if length == 1 else text[-1]

    def f1(self, gold: Trees) -> Tensor:
        """Unlabelled F1 of each item ``(B)``, over spans of two or more leaves, the whole included.

        Both trees have as many, so precision, recall and F1 are one number; 1 for a single leaf.
        """
        if not np.array_equal(self.lengths, gold.lengths):
            raise ValueError(
                f"Trees.f1: both must be over the same lengths, got {self.lengths.tolist()} and "
                f"{gold.lengths.tolist()}."
            )
        mine, theirs = self._codes(), gold._codes()
        item = mine[np.isin(mine, theirs)] >> 40
        shared = np.bincount(item, minlength=len(self))
        inner = self.lengths - 1
        return torch.from_numpy(np.where(inner > 0, shared / np.maximum(inner, 1), 1.0)).float()

    def _codes(self) -> np.ndarray:
        """A number for each inner span and its item."""
        item, node = np.nonzero(self.children[:, :, 0] >= 0)
        i, j = self.bounds[item, node].T
        return (item << 40) + (i << 20) + j


@cached(most=1 << 24)
def _balanced(n: int) -> tuple[int, ...]:
    return (SHIFT,) if n <= 1 else (*_balanced((n + 1) // 2), *_balanced(n // 2), REDUCE)
