"""Many rooted trees at once, one level at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


class Levels:
    """The order in which recursive networks visit the nodes of a batch of trees.

    A node's level is its height, so all nodes of a level can be computed together once the lower
    levels are. Each state is read once, at the level of its parent, and waits there from the
    moment it is made: nothing is copied from level to level, and work and memory are linear in the
    number of nodes whatever the shape of the trees.

    Args:
        level: ``(v)``, the height of each node of all trees
        parent: ``(v)``, −1 for roots

    >>> levels = Levels(np.array([0, 0, 1, 0]), np.array([2, 2, -1, -1]))  # a pair and a leaf
    >>> values = torch.tensor([1.0, 2.0, 0.0, 5.0])
    >>> def add(level, inputs):
    ...     nodes = levels.nodes[level]
    ...     return values[nodes] if level == 0 else inputs.sum(0, keepdim=True)
    >>> levels.run(add)[levels.place[[2, 3]]]  # of the roots 2 and 3
    tensor([3., 5.])
    """

    def __init__(self, level: np.ndarray, parent: np.ndarray) -> None:
        top = int(level.max(initial=-1)) + 1
        reader = np.where(parent >= 0, level[parent], top)  # the level that reads a node's state
        made, read = np.lexsort((reader, level)), np.lexsort((level, reader))
        self.nodes = np.split(made, np.cumsum(np.bincount(level, minlength=top))[:-1])
        """The nodes of each level, in the order of the states made there."""
        self.inputs = np.split(read, np.cumsum(np.bincount(reader, minlength=top + 1))[:-1])
        """The nodes that each level reads, in the order of ``inputs``; at the end the roots."""
        self.place = np.empty(len(level), np.int64)
        """Where each node's state stands among the inputs of its parent's level."""
        for nodes in self.inputs:
            self.place[nodes] = np.arange(len(nodes))
        chunks = [np.unique(reader[nodes], return_counts=True) for nodes in self.nodes]
        self._chunks = [(readers.tolist(), sizes.tolist()) for readers, sizes in chunks]

    def run(self, step: Callable[[int, Tensor | None], Tensor]) -> Tensor:
        """The states of the roots, for ``step(level, inputs)`` that makes those of a level.

        ``inputs`` is None at level 0.
        """
        waiting: list[list[Tensor]] = [[] for _ in range(len(self.nodes) + 1)]
        for level, (readers, sizes) in enumerate(self._chunks):
            states = step(level, torch.cat(waiting[level]) if level else None)
            for reader, chunk in zip(readers, states.split(sizes)):
                waiting[reader].append(chunk)
            waiting[level] = []
        return torch.cat(waiting[-1])


def on(device: torch.device, arrays: list[np.ndarray]) -> list[Tensor]:
    """Index arrays on a device, by one transfer."""
    whole = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *arrays]))
    return list(whole.to(device).split([len(a) for a in arrays]))
