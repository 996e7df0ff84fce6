"""Batches of known trees: every subtree once, level by level.

Beams and samples of a sentence share most of their subtrees, and once the trees are known nothing
but the height of a tree forces one composition to wait for another. A plan lists each different
subtree of each sentence once, those of a level together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from structmax.fence import require
from structmax.nn.levels import on
from structmax.nn.pool import Pool
from structmax.tracing import refuse_trace


class MergePlan(NamedTuple):
    """Rows of a table that begins with the leaves, ``b·n`` of them, and goes on with subtrees.

    A candidate is a pair of neighbours at some step: it is there from its ``birth`` on, before
    ``death``. Rows of N sequences of merges, of which the candidates' rows are −1 in the padding.
    """

    pairs: list[Tensor]  # the children (m, 2) of the subtrees of each level
    candidates: Tensor  # (N, e)
    birth: Tensor  # (N, e)
    death: Tensor  # (N, e)
    taken: Tensor  # (N, T), −1 past the last merge
    root: Tensor  # (N)


class TransitionPlan(NamedTuple):
    """As :class:`MergePlan`, after one row 0 for what is not there."""

    pairs: list[Tensor]
    seen: Tensor  # (N, T, 3): the first of the buffer, the two topmost of the stack
    root: Tensor  # (N)


def plan_merges(actions: Tensor, items: Tensor, lengths: Tensor, n: int) -> MergePlan:
    """The plan of merge positions ``(N, T)``, of sentences ``items`` ``(N)`` of b with lengths
    ``(b)`` of at most n leaves."""
    from structmax.nn.known_trees_cpu import merges

    device, b = actions.device, len(lengths)
    taking, of, sizes = _host(actions, items, lengths)
    _require_lengths(sizes, min(n, taking.shape[1] + 1))
    steps = np.maximum(sizes[of] - 1, 0)
    most = 3 * int(steps.max(initial=0))
    shape = len(taking), most
    candidates = np.full(shape, -1)
    birth, death = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    taken, root = np.full(taking.shape, -1), np.zeros(len(taking), np.int64)
    pairs = _Pairs(int(3 * steps.sum()), most, of)
    filled = candidates, birth, death, taken, root
    merges(taking, of, sizes, n, pairs.order, *pairs.arrays, *filled)
    rename, children = pairs.by_level(b * n)
    rest = [rename(candidates), birth, death, rename(taken), rename(root)]
    return MergePlan(*_send(device, children, rest))


def plan_transitions(actions: Tensor, items: Tensor, lengths: Tensor, n: int) -> TransitionPlan:
    """The plan of transitions ``(N, T)``; the rest as for :func:`plan_merges`."""
    from structmax.nn.known_trees_cpu import transitions

    device, b = actions.device, len(lengths)
    taking, of, sizes = _host(actions, items, lengths)
    _require_lengths(sizes, min(n, (taking.shape[1] + 1) // 2))
    steps = np.maximum(sizes[of] - 1, 0)
    seen = np.zeros((*taking.shape, 3), np.int64)
    root = np.zeros(len(taking), np.int64)
    pairs = _Pairs(int(steps.sum()), int(steps.max(initial=0)), of)
    transitions(taking, of, sizes, n, pairs.order, *pairs.arrays, seen, root)
    rename, children = pairs.by_level(1 + b * n)
    return TransitionPlan(*_send(device, children, [rename(seen), rename(root)]))


class Rows:
    """A table of states that is complete, to be read as a :class:`structmax.nn.pool.Pool` is.

    Not a tuple: those who pick items from a state pick row numbers, and leave the table alone.
    """

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def read(self, index: Tensor) -> Tensor:
        """Rows ``(*m, s)`` of numbers ``(*m)``."""
        return self.table.index_select(0, index.reshape(-1)).view(*index.shape, -1)


def compose(cell: Any, leaves: Tensor, pairs: list[Tensor]) -> Rows:
    """The leaves ``(count, s)`` and after them the subtrees of a plan, level by level.

    A cell that ``can_compose_levels`` itself is let do so.
    """
    if not pairs:
        return Rows(leaves)
    if getattr(cell, "can_compose_levels", False):
        return Rows(cell.compose_levels(leaves, pairs))
    pool, made = Pool(leaves), [leaves]
    for rows in pairs:
        made.append(cell(*pool.read(rows.T)))
        pool.write(made[-1])
    return Rows(torch.cat(made))


class _Pairs:
    """Room for the different subtrees of a batch, and the table in which they are looked up."""

    def __init__(self, count: int, of_row: int, items: np.ndarray) -> None:
        self.order = np.argsort(items, kind="stable")
        rows = int(np.bincount(items).max(initial=0)) if len(items) else 0
        size = 1 << max(2 * of_row * rows, 1).bit_length()
        self.children, self.level = np.empty((count, 2), np.int64), np.empty(count, np.int16)
        self.made = np.zeros(1, np.int64)
        slots = np.zeros((size, 4), np.int64)  # left, right, number, and whose it is
        self.arrays = slots, self.children, self.level, self.made

    def by_level(self, leaves: int) -> tuple[Callable[[np.ndarray], np.ndarray], list[np.ndarray]]:
        """What renames rows, and the children ``(m, 2)`` of the m subtrees of each level."""
        level = self.level[: self.made[0]]
        order = np.argsort(level, kind="stable")
        number = np.empty(len(order) + leaves, np.int64)
        number[:leaves] = np.arange(leaves)
        number[leaves + order] = np.arange(leaves, leaves + len(order))
        children = number[self.children[order]]
        cuts = np.flatnonzero(np.diff(level[order])) + 1

        def rename(rows: np.ndarray) -> np.ndarray:
            return np.where(rows < 0, -1, number[rows])

        return rename, np.split(children, cuts) if len(order) else []


def _require_lengths(sizes: np.ndarray, most: int) -> None:
    require("replay", "lengths", torch.from_numpy(sizes), 1, most)


def _host(*tensors: Tensor) -> list[np.ndarray]:
    refuse_trace("an encoder of given trees", "Trace the rest of the model.")
    sizes = [t.numel() for t in tensors]
    whole = torch.cat([t.reshape(-1).long() for t in tensors]).cpu().numpy()
    parts = np.split(whole, np.cumsum(sizes)[:-1])
    return [part.reshape(t.shape) for part, t in zip(parts, tensors)]


def _send(device: torch.device, children: list[np.ndarray], rest: list[np.ndarray]) -> list[Any]:
    """The children of each level and the rest on the device, by one transfer."""
    arrays = [*children, *rest]
    sent = on(device, [a.ravel() for a in arrays])
    shaped = [t.view(a.shape) for t, a in zip(sent, arrays)]
    return [shaped[: len(children)], *shaped[len(children) :]]
