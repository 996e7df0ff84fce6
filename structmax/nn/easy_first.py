"""The easy-first policy: merge the two neighbours whose parent looks best."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from structmax.nn.known_trees import compose, plan_merges
from structmax.nn.leaf_lstm import zero_padding
from structmax.nn.pool import Pool
from structmax.nn.tree_lstm import make_cell

Compose = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Subtrees:
    """Every subtree that a search has made, with its score; none is composed twice.

    Beams merge the same neighbours again and again, in other orders. On the CPU a pair of rows that
    was composed before is found again; on a GPU, where looking costs more than composing, it is
    not.
    """

    def __init__(self, leaves: Tensor, compose: Compose) -> None:
        self._compose = compose
        self.states = Pool(leaves)
        self.scores = Pool(leaves.new_zeros(len(leaves), 1))  # of the same rows
        none = torch.full((1,), -1, device=leaves.device)
        self._pairs, self._rows = none, none  # what was composed, sorted

    def read(self, rows: Tensor) -> Tensor:
        """The states ``(*m, s)`` of rows ``(*m)``."""
        return self.states.read(rows)

    def write(self, states: Tensor, scores: Tensor) -> Tensor:
        """Add states ``(*m, s)`` with scores ``(*m)``; their rows ``(*m)``."""
        self.scores.write(scores[..., None])
        return self.states.write(states)

    def merge(self, left: Tensor, right: Tensor) -> Tensor:
        """The rows of parents, of rows ``(m)``."""
        if left.is_cuda:
            return self._make(left, right)
        pairs, where = ((left << 31) + right).unique(return_inverse=True)
        at = torch.searchsorted(self._pairs, pairs).clamp(max=len(self._pairs) - 1)
        rows, new = self._rows[at], self._pairs[at] != pairs
        missing = pairs[new]
        if len(missing):
            rows[new] = self._make(missing >> 31, missing & ((1 << 31) - 1))
            self._pairs, order = torch.cat([self._pairs, missing]).sort()
            self._rows = torch.cat([self._rows, rows[new]])[order]
        return rows[where]

    def _make(self, left: Tensor, right: Tensor) -> Tensor:
        return self.write(*self._compose(*self.read(torch.stack([left, right]))))


class EasyFirstState(NamedTuple):
    """What is left of each sentence after some merges, with m the most subtrees of any item.

    nodes ``(B, m)`` and parents ``(B, m−1)``, the would-be parent of each pair of neighbours, are
    rows of ``made``. After a replay there is the root alone, and nothing to go on with.
    """

    made: Any
    nodes: Tensor
    parents: Tensor


class EasyFirstTreeLSTM(nn.Module):
    """A policy for :class:`structmax.EasyFirst`: the Gumbel Tree-LSTM (Choi, Yoo & Lee, AAAI 2018).

    Each step composes every pair of neighbours, scores the would-be parents, and replaces one pair
    by its parent. A merge changes two pairs only, so two compositions for each item and step are
    enough as long as actions are hard. Under a straight-through gradient the new row of subtrees is
    the mixture of equation 13 there, and all pairs are composed again.

    Args:
        hidden_size: d
        cell: as in :class:`structmax.nn.TreeLSTM`
        dropout: of the cell, while training

    >>> _ = torch.manual_seed(0)
    >>> policy = EasyFirstTreeLSTM(8, cell="gated")
    >>> state = policy.start(torch.randn(2, 3, 8), torch.tensor([3, 2]))
    >>> policy.scores(state).shape  # one for each pair of neighbours
    torch.Size([2, 2])
    >>> state = policy.advance(state, torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    >>> state = policy.advance(state, torch.tensor([[1.0], [0.0]]))  # the second is finished
    >>> policy.root(state).shape
    torch.Size([2, 8])
    """

    def __init__(
        self, hidden_size: int, cell: str | nn.Module = "tree-lstm", dropout: float = 0.0
    ) -> None:
        super().__init__()
        made: Any = make_cell(cell, hidden_size, dropout) if isinstance(cell, str) else cell
        self.cell, self.hidden_size, self.state_size = made, hidden_size, made.state_size
        self.scorer = nn.Sequential(
            nn.Linear(hidden_size, hidden_size), nn.GELU(), nn.Linear(hidden_size, 1)
        )

    def hidden(self, state: Tensor) -> Tensor:
        """The hidden vectors of states, ``(..., d)``."""
        return self.cell.hidden(state)

    def score(self, parents: Tensor) -> Tensor:
        """How good would-be parents ``(..., s)`` look, ``(...)``."""
        return self.scorer(self.cell.hidden(parents)).squeeze(-1)

    def start(self, inputs: Tensor, lengths: Tensor) -> EasyFirstState:
        """Leaves ``(B, n, s)``, whose padding may hold anything."""
        leaves = zero_padding(inputs, lengths)
        b, n, s = leaves.shape
        made = Subtrees(leaves.reshape(b * n, s), self._compose)
        nodes = torch.arange(b * n, device=leaves.device).view(b, n)
        parents = made.merge(nodes[:, :-1].reshape(-1), nodes[:, 1:].reshape(-1))
        return EasyFirstState(made, nodes, parents.view(b, n - 1))

    def scores(self, state: EasyFirstState) -> Tensor:
        """``(B, m−1)`` of the pairs (j, j + 1); only those inside an item's length count."""
        return state.made.scores.read(state.parents).squeeze(-1)

    def advance(self, state: EasyFirstState, action: Tensor) -> EasyFirstState:
        """Merge the pair of each one-hot row ``(B, m−1)``; a row of zeros merges none."""
        return self._mix(state, action) if action.requires_grad else self._shift(state, action)

    @property
    def can_replay(self) -> bool:
        """Whether ``replay`` meets the same network as a search did: not while it drops out."""
        return not (self.training and self.cell.dropout.p)

    can_capture = True  # nothing here waits for the device

    def replay(
        self, inputs: Tensor, lengths: Tensor, items: Tensor, actions: Tensor
    ) -> tuple[Tensor, EasyFirstState]:
        """The log-probabilities ``(N)`` and final state of known merges ``(N, T)`` of ``items``
        ``(N)``, in as many steps as trees are high."""
        leaves = zero_padding(inputs, lengths)
        b, n, s = leaves.shape
        plan = plan_merges(actions, items, lengths, n)
        rows = compose(self.cell, leaves.reshape(b * n, s), plan.pairs)
        end = EasyFirstState(rows, plan.root[:, None], plan.root.new_zeros(len(items), 0))
        if not plan.pairs:  # leaves are all there is
            return leaves.new_zeros(len(items)), end
        scores = self.score(rows.table[b * n :])
        scores = scores.float() if scores.dtype.itemsize < 4 else scores
        steps = torch.arange(actions.shape[1], device=leaves.device)[:, None]
        there = (plan.birth[:, None] <= steps) & (steps < plan.death[:, None])  # (N, T, e)
        done = plan.taken < 0
        each = scores[(plan.candidates - b * n).clamp(min=0)][:, None]
        total = torch.where(there, each, torch.where(done[..., None], 0.0, -torch.inf).to(each))
        taken = scores[(plan.taken - b * n).clamp(min=0)] - total.logsumexp(-1)
        return torch.where(done, 0.0, taken).sum(1), end

    def root(self, state: EasyFirstState) -> Tensor:
        """The states of whole sentences, once all merges are done, ``(B, s)``."""
        return state.made.read(state.nodes[:, 0])

    def _compose(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        parents = self.cell(left, right)
        return parents, self.score(parents)

    def _shift(self, state: EasyFirstState, action: Tensor) -> EasyFirstState:
        made, nodes, parents = state
        m = nodes.shape[1]
        at = torch.arange(m - 1, device=nodes.device)
        j = action.argmax(1, keepdim=True)
        j = torch.where(action.sum(1, keepdim=True) > 0, j, m)  # m: nothing moves
        nodes = torch.where(at == j, parents, nodes.gather(1, at + (at > j)))
        at = at[:-1]
        parents = parents.gather(1, at + (at > j))
        if m == 2:
            return EasyFirstState(made, nodes, parents)
        # the pairs in which the new node is the right and the left one, where they are there
        pair = torch.cat([j - 1, j], 1).clamp(0, m - 3)
        rows = nodes.gather(1, torch.cat([pair, pair + 1], 1)).T.reshape(2, -1)
        new = made.merge(*rows).view(2, -1).T
        return EasyFirstState(made, nodes, parents.scatter(1, pair, new))

    def _mix(self, state: EasyFirstState, action: Tensor) -> EasyFirstState:
        made, m = state.made, state.nodes.shape[1]
        nodes = made.read(state.nodes)
        after = action.cumsum(1) - action  # 1 right of the merge
        before = 1 - action - after  # 1 left of it, and throughout where there is no merge
        merged = action[..., None] * made.read(state.parents)
        nodes = before[..., None] * nodes[:, :-1] + merged + after[..., None] * nodes[:, 1:]
        parents, scores = self._compose(nodes[:, :-1], nodes[:, 1:])
        rows = made.write(torch.cat([nodes, parents], 1), nn.functional.pad(scores, (m - 1, 0)))
        return EasyFirstState(made, rows[:, : m - 1], rows[:, m - 1 :])
