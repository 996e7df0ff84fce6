"""Batched stacks, for policies that build trees from left to right."""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor


class Stack(NamedTuple):
    """B stacks of vectors, each of its own height: a memory ``(B, room, d)`` and a size ``(B)``.

    Nothing is written in place, so a stack may be a state of ``sx.ShiftReduce``; a tree over n
    leaves needs room for n. Reading below the bottom gives zeros.

    >>> stack = Stack.empty(torch.zeros(2, 3), room=4)  # two stacks of vectors of 3 numbers
    >>> stack = stack.push(torch.ones(2, 3)).push(torch.full((2, 3), 2.0))
    >>> left, right, rest = stack.pop2()
    >>> left[0], right[0], rest.size
    (tensor([1., 1., 1.]), tensor([2., 2., 2.]), tensor([0, 0]))
    >>> stack.top()[0], stack.top(1)[0], stack.top(2)[0]  # the third is not there
    (tensor([2., 2., 2.]), tensor([1., 1., 1.]), tensor([0., 0., 0.]))

    A step of shift-reduce differs from item to item: the first shifts a leaf, the second reduces.

    >>> action = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    >>> after = stack.shift_reduce(action, leaf=torch.full((2, 3), 7.0), parent=left + right)
    >>> after.size, after.top()[:, 0].detach()
    (tensor([3, 1]), tensor([7., 3.]))
    >>> after.top().sum().backward()
    >>> action.grad  # how much more there would be of a leaf or a parent
    tensor([[21.,  9.],
            [21.,  9.]])
    """

    memory: Tensor
    size: Tensor

    @classmethod
    def empty(cls, like: Tensor, room: int) -> Self:
        """Empty stacks for vectors like these, ``(B, d)``, with room for so many."""
        size = torch.zeros(len(like), dtype=torch.int64, device=like.device)
        return cls(like.new_zeros(len(like), room, like.shape[1]), size)

    def top(self, below: int = 0) -> Tensor:
        """The vector so many places below the top, ``(B, d)``."""
        at = self.size - 1 - below
        found = self.memory.gather(1, self._at(at)).squeeze(1)
        return torch.where((at >= 0)[:, None], found, 0.0)

    def push(self, vector: Tensor) -> Self:
        """With a vector ``(B, d)`` on top."""
        return self._write(vector, self.size + 1)

    def pop2(self) -> tuple[Tensor, Tensor, Self]:
        """The second from the top, the top, and the stack without both."""
        rest = type(self)(self.memory, (self.size - 2).clamp(min=0))
        return self.top(1), self.top(), rest

    def shift_reduce(self, action: Tensor, leaf: Tensor, parent: Tensor) -> Self:
        """Puts a leaf on top, or a parent in place of the top two, as the action says.

        ``action`` is one-hot ``(B, 2)`` ``[SHIFT, REDUCE]``; what is written is
        action₀·leaf + action₁·parent, through which a straight-through gradient reaches the action.
        Where the row is zero, of a finished item, a stack stays as it is.
        """
        shift, reduce = (action.detach() > 0.5).long().unbind(-1)
        vector = action[:, :1] * leaf + action[:, 1:] * parent
        vector = torch.where((shift + reduce > 0)[:, None], vector, self.top())
        return self._write(vector, self.size + shift - reduce)

    def _write(self, vector: Tensor, size: Tensor) -> Self:
        vector = vector.to(self.memory.dtype)[:, None]
        return type(self)(self.memory.scatter(1, self._at(size - 1), vector), size)

    def _at(self, place: Tensor) -> Tensor:
        _, room, d = self.memory.shape
        return place.clamp(0, room - 1)[:, None, None].expand(-1, 1, d)
