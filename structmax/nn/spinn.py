"""SPINN: a parser and a recursive network that share a stack."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from structmax.nn.known_trees import compose, plan_transitions
from structmax.nn.leaf_lstm import zero_padding
from structmax.nn.pool import Pool
from structmax.nn.tree_lstm import make_cell


class SPINNState(NamedTuple):
    """Stacks and buffers as rows of the pool, row 0 for what is not there.

    stack ``(B, n+2)``, whose two lowest places are always row 0, with ``depth`` ``(B)`` subtrees on
    it; buffer ``(B, n+1)``, of which ``shifted`` ``(B)`` leaves are gone; the tracker's state
    ``(B, 2d)``, or ``(B, 0)`` without one.
    """

    pool: Any  # a Pool; after a replay, when there is nothing to go on with, its rows
    stack: Tensor
    depth: Tensor
    buffer: Tensor
    shifted: Tensor
    tracker: Tensor


class SPINN(nn.Module):
    """A policy for :class:`structmax.ShiftReduce`: the stack-augmented parser-interpreter network
    (Bowman et al., "A fast unified model for parsing and sentence understanding", ACL 2016).

    The parser sees the two topmost subtrees on the stack and the first leaf of the buffer, and with
    ``tracking`` also the state of an LSTM that has seen these at every step so far. The cell sees
    the two subtrees alone, so the value of a tree does not depend on how it was found.

    Args:
        hidden_size: d
        cell: as in :class:`structmax.nn.TreeLSTM`
        tracking: whether the parser remembers
        dropout: of the cell, while training

    >>> _ = torch.manual_seed(0)
    >>> policy = SPINN(8, cell="gated")
    >>> state = policy.start(torch.randn(1, 2, 8), torch.tensor([2]))
    >>> shift, reduce = torch.eye(2).split(1)
    >>> for action in (shift, shift, reduce):
    ...     state = policy.advance(state, action)
    >>> policy.root(state).shape, policy.scores(state).shape
    (torch.Size([1, 8]), torch.Size([1, 2]))
    """

    def __init__(
        self,
        hidden_size: int,
        cell: str | nn.Module = "tree-lstm",
        tracking: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        made: Any = make_cell(cell, hidden_size, dropout) if isinstance(cell, str) else cell
        self.cell, self.hidden_size, self.state_size = made, hidden_size, made.state_size
        self.tracker = nn.LSTMCell(3 * hidden_size, hidden_size) if tracking else None
        seen = (4 if tracking else 3) * hidden_size
        self.scorer = nn.Sequential(
            nn.Linear(seen, hidden_size), nn.GELU(), nn.Linear(hidden_size, 2)
        )

    def hidden(self, state: Tensor) -> Tensor:
        """The hidden vectors of states, ``(..., d)``."""
        return self.cell.hidden(state)

    def start(self, inputs: Tensor, lengths: Tensor) -> SPINNState:
        """Leaves ``(B, n, s)``, whose padding may hold anything."""
        leaves = zero_padding(inputs, lengths)
        b, n, s = leaves.shape
        pool = Pool(torch.cat([leaves.new_zeros(1, s), leaves.reshape(b * n, s)]))
        row = torch.arange(1, b * n + 1, device=leaves.device).view(b, n)
        inside = torch.arange(n, device=leaves.device) < lengths[:, None]
        buffer = nn.functional.pad(torch.where(inside, row, 0), (0, 1))
        zero = torch.zeros_like(lengths, dtype=torch.int64)
        tracker = leaves.new_zeros(b, 2 * self.hidden_size if self.tracker is not None else 0)
        stack = buffer.new_zeros(b, n + 2)
        return self._track(SPINNState(pool, stack, zero, buffer, zero, tracker))

    def scores(self, state: SPINNState) -> Tensor:
        """``(B, 2)``: to shift, to reduce."""
        return self.scorer(torch.cat([self._seen(state), state.tracker[:, : self.hidden_size]], 1))

    def advance(self, state: SPINNState, action: Tensor) -> SPINNState:
        """Shift or reduce by one-hot rows ``(B, 2)``; a row of zeros does nothing."""
        pool, stack, depth, _, shifted, _ = state
        shift, reduce = (action.detach() > 0.5).unbind(1)
        first, top, second = self._rows(state)
        made = self.cell(*pool.read(torch.stack([second, top])))
        if action.requires_grad:  # what goes on the stack is a mixture, whose other side weighs 0
            made = action[:, :1] * pool.read(first) + action[:, 1:] * made
            new = pool.write(made)
        else:
            new = torch.where(shift, first, pool.write(made))
        depth = depth + shift.long() - reduce.long()
        # the place of the new top; an idle item keeps its own
        place = (depth + 1)[:, None]
        new = torch.where(shift | reduce, new, stack.gather(1, place).squeeze(1))
        stack = stack.scatter(1, place, new[:, None])
        return self._track(state._replace(stack=stack, depth=depth, shifted=shifted + shift.long()))

    @property
    def can_replay(self) -> bool:
        """Whether ``replay`` meets the same network as a search did: not while it drops out."""
        return not (self.training and self.cell.dropout.p)

    can_capture = True  # nothing here waits for the device

    def replay(
        self, inputs: Tensor, lengths: Tensor, items: Tensor, actions: Tensor
    ) -> tuple[Tensor, SPINNState]:
        """The log-probabilities ``(N)`` and final state of known transitions ``(N, T)`` of
        ``items`` ``(N)``; compositions take as many steps as trees are high."""
        leaves = zero_padding(inputs, lengths)
        b, n, s = leaves.shape
        plan = plan_transitions(actions, items, lengths, n)
        bottom = torch.cat([leaves.new_zeros(1, s), leaves.reshape(b * n, s)])
        rows = compose(self.cell, bottom, plan.pairs)
        seen = self.cell.hidden(rows.read(plan.seen)).flatten(2)  # (N, T, 3d)
        tracker = seen.new_zeros(len(items), 2 * self.hidden_size if self.tracker else 0)
        if self.tracker is not None:
            past = []
            for now in seen.unbind(1):
                tracker = torch.cat(self.tracker(now, tracker.chunk(2, 1)), 1)
                past.append(tracker[:, : self.hidden_size])
            seen = torch.cat([seen, torch.stack(past, 1)], 2)
        scores = self.scorer(seen)
        scores = scores.float() if scores.dtype.itemsize < 4 else scores
        done = torch.arange(actions.shape[1], device=leaves.device) >= 2 * lengths[items, None] - 1
        legal = (plan.seen[..., [0, 2]] > 0) | done[..., None]  # a leaf to shift, two to reduce
        logp = torch.where(legal, scores, -torch.inf).log_softmax(-1)
        taken = logp.gather(2, actions.clamp(min=0)[..., None]).squeeze(2)
        stack = nn.functional.pad(plan.root[:, None], (2, n - 1))
        ones = torch.ones_like(lengths[items])
        buffer = stack.new_zeros(len(items), n + 1)
        end = SPINNState(rows, stack, ones, buffer, lengths[items], tracker)
        return torch.where(done, 0.0, taken).sum(1), end

    def root(self, state: SPINNState) -> Tensor:
        """The states of whole sentences, once only they are on the stack, ``(B, s)``."""
        return state.pool.read(state.stack[:, 2])

    def _rows(self, state: SPINNState) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of the buffer's first leaf, of the stack's top and of what is below it."""
        first = state.buffer.gather(1, state.shifted[:, None]).squeeze(1)
        at = torch.stack([state.depth + 1, state.depth], 1)
        top, second = state.stack.gather(1, at).unbind(1)
        return first, top, second

    def _seen(self, state: SPINNState) -> Tensor:
        rows = torch.stack(self._rows(state), 1)
        return self.cell.hidden(state.pool.read(rows)).flatten(1)

    def _track(self, state: SPINNState) -> SPINNState:
        if self.tracker is None:
            return state
        h, c = self.tracker(self._seen(state), state.tracker.chunk(2, 1))
        return state._replace(tracker=torch.cat([h, c], 1))
