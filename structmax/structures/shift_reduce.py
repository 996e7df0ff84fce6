"""Binary trees built from left to right on a stack."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from structmax.structures.incremental import Incremental

SHIFT, REDUCE = 0, 1


class ShiftReduce(Incremental):
    """A binary tree over n leaves, as the 2n − 1 actions that build it on a stack.

    SHIFT moves the next leaf from the buffer to the stack and is legal while the buffer holds one;
    REDUCE replaces the two top trees of the stack by their parent and is legal while there are two
    (Aho & Ullman, 1972). Each tree has exactly one sequence, so ``log_prob`` is that of the tree.
    A ``policy`` scores the two actions at each step, as in SPINN (Bowman et al., 2016).

    z is one-hot, ``(*batch, 2n−1, 2)`` ``[SHIFT, REDUCE]``, with rows of zeros past the last action
    of a shorter item. Human form: nested pairs, ``((0, 1), 2)``; lists hold a batch. Integer form:
    the actions ``(*batch, 2n−1)``, 0 and 1, −1 in the padding.

    ``log_prob``, ``rollout``, ``greedy``, ``beam``, ``straight_through`` and ``sample`` answer;
    ``topk`` is a beam search and approximate; ``argmax``, ``marginals``, ``max_marginals``,
    ``entropy``, ``cross_entropy``, ``expected_cost``, ``mbr``, ``condition``,
    ``ranked_support`` and ``sparsemap`` raise, since a policy may look at everything done so far.

    Args:
        policy: a module with ``start(inputs, lengths) → state``, ``scores(state) → (B, 2)`` and
            ``advance(state, action) → state``, the action one-hot ``(B, 2)``
        inputs: what the policy reads, ``(B, n, …)``
        lengths: ``(B)``

    >>> import structmax as sx
    >>> class Prefer(torch.nn.Module):  # the same scores at each step
    ...     def start(self, inputs, lengths):
    ...         return torch.tensor([[0.0, 1.0]]).expand(len(inputs), 2)
    ...     def scores(self, state):
    ...         return state
    ...     def advance(self, state, action):
    ...         return state
    >>> trees = sx.ShiftReduce(Prefer(), torch.zeros(2, 3, 8), lengths=torch.tensor([3, 2]))
    >>> trees.decode(trees.greedy().z)
    [((0, 1), 2), (0, 1)]
    >>> trees[0].log_prob((0, (1, 2))).exp()  # one choice: the softmax of 0 against 1
    tensor(0.2689)
    >>> trees[0].topk(3).exists  # there are only two
    tensor([ True,  True, False])
    >>> trees[0].to_spans((0, (1, 2)))
    tensor([[1., 0., 1.],
            [0., 1., 1.],
            [0., 0., 1.]])
    """

    @staticmethod
    def _shape(n: int) -> tuple[int, int]:
        return 2 * n - 1, 2

    @staticmethod
    def _steps(length: Any) -> Any:
        return 2 * length - 1

    @staticmethod
    def _least_choices(left: int) -> int:
        return 2

    @staticmethod
    def _begin(lengths: Tensor) -> tuple[Tensor, Tensor]:
        return lengths, torch.zeros_like(lengths)  # trees in the buffer and on the stack

    @staticmethod
    def _legal(counts: Any, choices: int) -> Tensor:
        buffer, stack = counts
        return torch.stack([buffer > 0, stack > 1], -1)

    @staticmethod
    def _count(counts: Any, action: Tensor) -> tuple[Tensor, Tensor]:
        buffer, stack = counts
        return buffer - (action == SHIFT).long(), stack + (1 - 2 * action)

    @staticmethod
    def _wrong(actions: Tensor, lengths: Tensor) -> Tensor:
        shift, last = actions == SHIFT, 2 * lengths - 1
        stack = torch.where(shift, 1, -1).cumsum(-1)
        inside = torch.arange(actions.shape[-1], device=actions.device) < last[:, None]
        bad = inside & ((stack < 1) | (actions < SHIFT) | (actions > REDUCE))
        return bad.any(-1) | (shift.sum(-1) != lengths)

    @staticmethod
    def _every(length: int) -> Tensor:
        if math.comb(2 * length - 2, length - 1) // length > 1_000_000:
            raise ValueError(
                f"ShiftReduce.enumerate_support: trees over {length} leaves are too many."
            )
        return torch.tensor(_sequences(length, 0, {}), device="cpu")

    # -- trees ------------------------------------------------------------------------------------

    def _spans(self, actions: Tensor) -> Tensor:
        # each action makes a tree: from the leaf that opened its place on the stack to the last
        n = self.inputs.shape[1]
        last = torch.full_like(actions[:, :1], -1)
        stack = torch.zeros_like(last)
        opened = torch.zeros(len(actions), n + 1, dtype=torch.int64, device=actions.device)
        spans = []
        for action in actions.split(1, 1):
            shift = action == SHIFT
            last = last + shift.long()
            stack = torch.where(action < 0, stack, stack + (1 - 2 * action)).clamp(0, n)
            first = torch.where(shift, last, opened.gather(1, stack))
            opened.scatter_(1, stack, first)
            spans.append(torch.where(action < 0, n * n, first * n + last))
        return torch.cat(spans, 1)

    def from_spans(self, spans: Any) -> Tensor:
        """z of the spans of a tree: an indicator ``(*batch, n, n)`` or another form that
        ``BinaryTree.encode`` takes."""
        reduces, lengths = self._reduces(spans)
        n, steps = self.inputs.shape[1], self.event_shape[0]
        leaf = torch.arange(n, device=reduces.device)
        # a leaf is shifted after those before it and after the trees that they end
        when = leaf + reduces.cumsum(-1) - reduces
        when = torch.where(leaf < lengths[..., None], when, steps)
        actions = torch.full((*lengths.shape, steps + 1), REDUCE, device=reduces.device)
        actions = actions.scatter(-1, when, SHIFT)[..., :-1]
        at = torch.arange(steps, device=reduces.device)
        return self.encode(torch.where(at < 2 * lengths[..., None] - 1, actions, -1))

    def _show(self, actions: list[int]) -> Any:
        stack: list[Any] = []
        leaf = 0
        for action in actions:
            if action == SHIFT:
                stack.append(leaf)
                leaf += 1
            else:
                right = stack.pop()
                stack.append((stack.pop(), right))
        return stack[0]

    def _parse(self, obj: Any) -> Tensor:
        items, shape = [obj], []
        while items and isinstance(items[0], list):
            sizes = {len(item) if isinstance(item, list) else -1 for item in items}
            if len(sizes) > 1:
                raise ValueError("ShiftReduce.encode: the lists do not nest as a batch.")
            shape.append(sizes.pop())
            items = [part for item in items for part in item]
        steps = self.event_shape[0]
        rows = [_actions(tree) for tree in items]
        if max(map(len, rows), default=0) > steps:
            raise ValueError(
                f"ShiftReduce.encode: a tree has more than the {self.inputs.shape[1]} leaves of "
                "the inputs."
            )
        padded = [row + [-1] * (steps - len(row)) for row in rows]
        actions = torch.tensor(padded, dtype=torch.int64, device=self.inputs.device)
        return self.encode(actions.reshape(*shape, steps))


def _actions(tree: Any) -> list[int]:
    """The actions that build nested pairs of leaves, in post-order."""
    todo, actions, leaf = [tree], [], 0
    while todo:
        node = todo.pop()
        if node is None:
            actions.append(REDUCE)
        elif isinstance(node, tuple) and len(node) == 2:
            todo += [None, node[1], node[0]]
        elif node == leaf and not isinstance(node, tuple):
            actions.append(SHIFT)
            leaf += 1
        else:
            raise ValueError(
                "ShiftReduce.encode: a tree is nested pairs of the leaves 0, 1, 2, ... in order, "
                f"as ((0, 1), 2); expected leaf {leaf} or a pair, got {node!r}."
            )
    return actions


def _sequences(
    buffer: int, stack: int, known: dict[tuple[int, int], list[list[int]]]
) -> list[list[int]]:
    """Every way to one tree from so many leaves in the buffer and trees on the stack."""
    if buffer == 0 and stack == 1:
        return [[]]
    if (buffer, stack) not in known:
        after_shift = _sequences(buffer - 1, stack + 1, known) if buffer else []
        after_reduce = _sequences(buffer, stack - 1, known) if stack > 1 else []
        shift = [[SHIFT, *rest] for rest in after_shift]
        known[buffer, stack] = shift + [[REDUCE, *rest] for rest in after_reduce]
    return known[buffer, stack]
