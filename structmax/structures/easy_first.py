"""Binary trees built by merging neighbours, in any order."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from structmax.structures.incremental import Incremental
from structmax.structures.nesting import unnest


class EasyFirst(Incremental):
    """A binary tree over n leaves with the order of its n − 1 merges, the easiest first.

    At each step two neighbours are replaced by their parent; the action is the position of the left
    one among those that remain (Goldberg & Elhadad, 2010; as a latent variable Choi et al., 2018).
    A tree may be built in many orders, all different structures here: **log_prob is that of the
    merge sequence, not of the tree**. There are (n−1)! sequences and Catalan(n−1) trees, so a beam
    may hold one tree many times; ``beam(k, distinct=True)`` holds each once.

    z is one-hot, ``(*batch, n−1, n−1)`` ``[step, position]``, with rows of zeros past the last
    merge of a shorter item. Human form: the spans ``(first, last)`` in the order they are made;
    lists hold a batch. Integer form: the positions ``(*batch, n−1)``, −1 in the padding.

    ``log_prob``, ``rollout``, ``greedy``, ``beam``, ``straight_through`` and ``sample`` answer;
    ``topk`` is a beam search and approximate; ``argmax``, ``marginals``, ``max_marginals``,
    ``entropy``, ``cross_entropy``, ``expected_cost``, ``mbr``, ``condition``,
    ``ranked_support`` and ``sparsemap`` raise, since a policy may look at everything done so far.

    Args:
        policy: a module with ``start(inputs, lengths) → state``, ``scores(state) → (B, choices)``
            and ``advance(state, action) → state``, the action one-hot ``(B, choices)``. Before step
            t choices may be anything from n−1−t, the positions that remain, to n−1, so a state can
            shrink by a column at each step
        inputs: what the policy reads, ``(B, n, …)``
        lengths: ``(B)``

    >>> import structmax as sx
    >>> class Even(torch.nn.Module):  # each position is as good as another
    ...     def start(self, inputs, lengths):
    ...         return torch.zeros(len(inputs), inputs.shape[1] - 1)
    ...     def scores(self, state):
    ...         return state
    ...     def advance(self, state, action):
    ...         return state[:, 1:]  # one position less
    >>> trees = sx.EasyFirst(Even(), torch.zeros(2, 4, 8), lengths=torch.tensor([4, 2]))
    >>> trees.log_prob([[(2, 3), (0, 1), (0, 3)], [(0, 1)]]).exp()
    tensor([0.1667, 1.0000])
    >>> len(trees[0].enumerate_support())
    6
    >>> z = trees[0].from_spans([(0, 0), (0, 1), (0, 3), (1, 1), (2, 2), (2, 3), (3, 3)])
    >>> trees[0].decode(z)  # the leftmost merge first: one order of two
    [(0, 1), (2, 3), (0, 3)]
    """

    @staticmethod
    def _shape(n: int) -> tuple[int, int]:
        return n - 1, n - 1

    @staticmethod
    def _steps(length: Any) -> Any:
        return length - 1

    @staticmethod
    def _least_choices(left: int) -> int:
        return left

    @staticmethod
    def _begin(lengths: Tensor) -> Tensor:
        return lengths - 1  # positions that remain

    @staticmethod
    def _legal(counts: Any, choices: int) -> Tensor:
        return torch.arange(choices, device=counts.device) < counts[:, None]

    @staticmethod
    def _count(counts: Any, action: Tensor) -> Tensor:
        return counts - 1

    @staticmethod
    def _wrong(actions: Tensor, lengths: Tensor) -> Tensor:
        left = lengths[:, None] - 1 - torch.arange(actions.shape[-1], device=actions.device)
        return ((left > 0) & ((actions < 0) | (actions >= left))).any(-1)

    @staticmethod
    def _every(length: int) -> Tensor:
        if math.factorial(length - 1) > 1_000_000:
            raise ValueError(
                f"EasyFirst.enumerate_support: merge sequences over {length} leaves are too many."
            )
        if length == 1:
            return torch.zeros(1, 0, dtype=torch.int64, device="cpu")
        positions = [torch.arange(left, device="cpu") for left in range(length - 1, 0, -1)]
        return torch.cartesian_prod(*positions).reshape(-1, length - 1)

    # -- what a sequence has built ----------------------------------------------------------------

    def _made(self) -> tuple[Tensor, Tensor]:
        """Where the subtrees start ``(B, n+1)``, and the sum of the hashes of all spans made."""
        (size, n), device = self.inputs.shape[:2], self.inputs.device
        starts = torch.arange(n + 1, device=device).expand(size, n + 1)
        return starts, torch.zeros(size, dtype=torch.int64, device=device)

    def _keys(self, made: tuple[Tensor, Tensor], choices: int) -> Tensor:
        starts, key = made
        span = starts[:, :choices] * starts.shape[1] + starts[:, 2 : choices + 2]
        return key[:, None] + _hash(span)

    def _make(self, made: tuple[Tensor, Tensor], action: Tensor) -> tuple[Tensor, Tensor]:
        starts, key = made
        at = action[:, None]
        new = self._keys(made, starts.shape[1] - 2).gather(1, at.clamp(min=0)).squeeze(1)
        column = torch.arange(starts.shape[1], device=starts.device)
        merged = starts.gather(1, (column + (column > at)).clamp(max=starts.shape[1] - 1))
        return torch.where(at < 0, starts, merged), torch.where(action < 0, key, new)

    # -- trees ------------------------------------------------------------------------------------

    def _spans(self, actions: Tensor) -> Tensor:
        n, device = self.inputs.shape[1], actions.device
        leaf = torch.arange(n, device=device)
        length = (actions >= 0).sum(-1, keepdim=True) + 1
        spans = [torch.where(leaf < length, leaf * n + leaf, n * n)]
        start = torch.arange(n + 1, device=device).expand(len(actions), n + 1)
        for action in actions.split(1, 1):
            at = action.clamp(min=0)
            span = start.gather(1, at) * n + start.gather(1, at + 2) - 1
            spans.append(torch.where(action < 0, n * n, span))
            column = torch.arange(start.shape[1] - 1, device=device)
            merged = start.gather(1, column + (column > at))  # the right one starts no more
            start = torch.where(action < 0, start[:, :-1], merged)
        return torch.cat(spans, 1)

    def from_spans(self, spans: Any) -> Tensor:
        """z of the spans of a tree, in the order that merges the leftmost pair of siblings first;
        spans are an indicator ``(*batch, n, n)`` or another form that ``BinaryTree.encode`` takes.

        Other orders build the same tree, so this is one of its sequences, and its ``log_prob`` is
        not that of the tree.
        """
        reduces, lengths = self._reduces(spans)
        step = torch.arange(self.event_shape[0], device=reduces.device)
        step = step.expand(*lengths.shape, len(step)).contiguous()
        # merge q ends at leaf j, before which all but q merges are open: its parent is at j − q − 1
        last = torch.searchsorted(reduces.cumsum(-1), step, right=True)
        return self.encode(torch.where(step < lengths[..., None] - 1, last - step - 1, -1))

    def _show(self, actions: list[int]) -> list[tuple[int, int]]:
        start, spans = list(range(len(actions) + 2)), []
        for action in actions:
            spans.append((start[action], start[action + 2] - 1))
            del start[action + 1]
        return spans

    def _parse(self, obj: Any) -> Tensor:
        items, shape = unnest("EasyFirst", obj, 2, len(self.batch_shape))
        steps = self.event_shape[0]
        rows = [_positions(spans) for spans in items]
        if max(map(len, rows), default=0) > steps:
            raise ValueError(
                f"EasyFirst.encode: more merges than {self.inputs.shape[1]} leaves allow."
            )
        padded = [row + [-1] * (steps - len(row)) for row in rows]
        actions = torch.tensor(padded, dtype=torch.int64, device=self.inputs.device)
        return self.encode(actions.reshape(*shape, steps))


def _hash(number: Tensor) -> Tensor:
    """64 bits that look random (the finalizer of splitmix64: Steele, Lea & Flood, 2014)."""
    x = number * -7046029254386353131
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -4658895280553007687
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -7723592293110705685
    return x ^ (x >> 31 & (1 << 33) - 1)


def _positions(spans: list[list[int]]) -> list[int]:
    """Where the merges that make these spans happen."""
    start, positions = list(range(len(spans) + 2)), []
    for first, last in (span if len(span) == 2 else (-1, -1) for span in spans):
        at = start.index(first) if first in start else len(start)
        if start[at + 2 : at + 3] != [last + 1]:
            raise ValueError(
                "EasyFirst.encode: spans must come in the order they are made, each of two "
                f"neighbours that are there; ({first}, {last}) is not, in {spans}."
            )
        positions.append(at)
        del start[at + 1]
    return positions
