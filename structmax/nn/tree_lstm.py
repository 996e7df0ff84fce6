"""Recursive networks over binary trees."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from structmax.data.trees import Trees
from structmax.nn.gated_recursive import GatedRecursiveCell
from structmax.nn.levels import Levels, on


class Cell(Protocol):
    """What composes two states ``(..., state_size)`` into their parent's."""

    hidden_size: int
    state_size: int

    def __call__(self, left: Tensor, right: Tensor) -> Tensor: ...

    def hidden(self, state: Tensor) -> Tensor: ...


class TreeLSTMCell(nn.Module):
    """The binary Tree-LSTM cell (Tai, Socher & Manning, ACL 2015, section 3.2).

    A state is [h; c], twice ``hidden_size`` wide. Of the children l and r::

        i, f_l, f_r, o, u = W [h_l; h_r] + b
        c = σ(i) ⊙ tanh(u) + σ(f_l + 1) ⊙ c_l + σ(f_r + 1) ⊙ c_r
        h = σ(o) ⊙ tanh(c)

    >>> cell = TreeLSTMCell(8)
    >>> state = cell(torch.randn(5, 16), torch.randn(5, 16))
    >>> cell.hidden(state).shape
    torch.Size([5, 8])
    """

    def __init__(self, hidden_size: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.hidden_size, self.state_size = hidden_size, 2 * hidden_size
        self.gates = nn.Linear(2 * hidden_size, 5 * hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """The parent's state ``(..., 2d)``."""
        (h_left, c_left), (h_right, c_right) = left.chunk(2, -1), right.chunk(2, -1)
        gates = self.gates(torch.cat([h_left, h_right], -1))
        i, f_left, f_right, o, u = gates.chunk(5, -1)
        c = torch.sigmoid(i) * self.dropout(torch.tanh(u))
        c = c + torch.sigmoid(f_left + 1) * c_left + torch.sigmoid(f_right + 1) * c_right
        return torch.cat([torch.sigmoid(o) * torch.tanh(c), c], -1)

    def hidden(self, state: Tensor) -> Tensor:
        """The hidden vector h of a state, ``(..., d)``."""
        return state[..., : self.hidden_size]


CELLS: dict[str, Any] = {"tree-lstm": TreeLSTMCell, "gated": GatedRecursiveCell}


def make_cell(kind: str, hidden_size: int, dropout: float = 0.0) -> Any:
    """A cell by name: ``"tree-lstm"`` or ``"gated"``."""
    if kind not in CELLS:
        raise ValueError(f"cell must be one of {', '.join(CELLS)}, got {kind!r}.")
    return CELLS[kind](hidden_size, dropout)


class TreeLSTM(nn.Module):
    """Encodes sentences along given binary trees: one call of the cell per level of the batch.

    Args:
        hidden_size: d
        cell: ``"tree-lstm"``, ``"gated"``, or a module with ``state_size`` and ``hidden`` that
            composes two states
        dropout: of the cell, while training

    >>> from structmax.data import Trees
    >>> encoder = TreeLSTM(8)
    >>> trees = Trees.from_transitions([[0, 0, 1, 0, 1], [0, 0, 1]])
    >>> leaves = torch.randn(2, 3, encoder.state_size)
    >>> encoder.hidden(encoder(leaves, trees)).shape  # one vector for each sentence
    torch.Size([2, 8])
    >>> encoder(leaves, trees, nodes=True).shape  # leaves, then the inner nodes of ``trees``
    torch.Size([2, 5, 16])
    """

    def __init__(
        self, hidden_size: int, cell: str | nn.Module = "tree-lstm", dropout: float = 0.0
    ) -> None:
        super().__init__()
        made: Any = make_cell(cell, hidden_size, dropout) if isinstance(cell, str) else cell
        self.cell, self.hidden_size, self.state_size = made, hidden_size, made.state_size

    def hidden(self, state: Tensor) -> Tensor:
        """The hidden vectors of states, ``(..., d)``."""
        return self.cell.hidden(state)

    def forward(
        self, leaves: Tensor, trees: Trees, weights: Tensor | None = None, nodes: bool = False
    ) -> Tensor:
        """The states of the roots ``(B, s)``, or with ``nodes`` of all nodes ``(B, 2n−1, s)``.

        ``leaves`` is ``(B, n, s)``; its padding may hold anything. ``weights`` ``(B, n−1)``
        multiplies the states of inner nodes: ones that carry the gradient of a relaxed tree.
        """
        if len(trees) != len(leaves) or trees.longest > leaves.shape[1]:
            raise ValueError(
                f"TreeLSTM: leaves are {tuple(leaves.shape[:2])} but there are {len(trees)} trees "
                f"over up to {trees.longest} leaves."
            )
        b, n, every = len(trees), trees.longest, []
        if not b:
            return leaves.new_zeros(0, *[2 * n - 1] * nodes, self.state_size)
        levels, children, made, roots, at = _plan(trees, leaves.device)
        flat = leaves[:, :n].reshape(b * n, -1)
        inner = None if weights is None else weights[:, : n - 1].reshape(-1, 1)

        def step(level: int, inputs: Tensor | None) -> Tensor:
            if inputs is None:
                state = flat.index_select(0, made[0])
            else:
                state = self.cell(*inputs.index_select(0, children[level - 1]).chunk(2))
                if inner is not None:
                    state = state * inner.index_select(0, made[level])
            every.append(state)
            return state

        root = levels.run(step).index_select(0, roots)
        if not nodes:
            return root
        table = root.new_zeros(b * (2 * n - 1), root.shape[1])
        return table.index_copy(0, at, torch.cat(every)).view(b, 2 * n - 1, -1)


@torch._disable_dynamo  # a plan depends on the trees themselves
def _plan(
    trees: Trees, device: torch.device
) -> tuple[Levels, list[Tensor], list[Tensor], Tensor, Tensor]:
    """The levels, and what :class:`BinaryPlan` says of them on a device: the children, the nodes,
    the roots, and the nodes of all levels in a table of all nodes."""
    plan = BinaryPlan(trees)
    at = np.concatenate([plan.table[nodes] for nodes in plan.levels.nodes])
    *rows, roots, table = on(device, [*plan.children, *plan.nodes, plan.roots, at])
    depth = len(plan.children)
    return plan.levels, rows[:depth], rows[depth:], roots, table


class BinaryPlan:
    """Which rows of which tensors each level of a batch of binary trees reads."""

    def __init__(self, trees: Trees) -> None:
        b, n = len(trees), trees.longest
        at = np.arange(2 * n - 1)
        real = np.where(at < n, at < trees.lengths[:, None], at - n < trees.lengths[:, None] - 1)
        item, node = np.nonzero(real)
        number = np.cumsum(real).reshape(b, -1) - 1  # of each real node among all
        level = np.concatenate([np.zeros((b, n), np.int64), trees.heights], 1)[item, node]
        inside = node >= n
        pairs = np.full((len(item), 2), -1)
        below = trees.children[item[inside], node[inside] - n]
        pairs[inside] = number[item[inside, None], below]
        parent = np.full(len(item), -1)
        parent[pairs[inside]] = np.nonzero(inside)[0][:, None]
        self.levels = levels = Levels(level, parent)
        self.table = item * (2 * n - 1) + node
        """The row of each node in a table of all nodes, ``(B·(2n−1))``."""
        place = levels.place
        self.children = [place[pairs[nodes]].T.reshape(-1) for nodes in levels.nodes[1:]]
        """Of each level above the leaves, the rows of left and then of right children."""
        row = np.where(inside, item * (n - 1) + node - n, item * n + node)
        self.nodes = [row[nodes] for nodes in levels.nodes]
        """Of each level, the rows in a table of leaves ``(B·n)`` or of inner nodes."""
        roots = np.nonzero(parent < 0)[0]
        self.roots = place[roots[np.argsort(item[roots], kind="stable")]]
