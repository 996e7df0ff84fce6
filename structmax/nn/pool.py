"""Rows that are written once and read often, without copies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Pool:
    """Vectors in one growing table, of which a step writes a few and reads a few.

    A search over trees keeps many vectors and touches few at a time. Here its state can hold row
    numbers, which are cheap to shift, pick and repeat, while the vectors stay in place: a step
    costs what it touches, forwards and backwards. Gradients flow through ``write`` and ``read``
    (once: there is no second derivative), and are gathered in a table of the same kind, since every
    read comes after the writes before it. Under the transformations of ``torch.func``, which allow
    no such table, every write copies. A pool belongs inside a checkpoint
    (``torch.utils.checkpoint``) as a whole: reads that are repeated there find a later token, and
    gradients would be wrong.

    Args:
        rows: ``(count, s)``, the first ones

    >>> x = torch.ones(2, 3, requires_grad=True)
    >>> pool = Pool(x)
    >>> new = pool.write(2 * pool.read(torch.tensor([1])))  # row 2
    >>> pool.read(torch.stack([new, new])).sum().backward()
    >>> x.grad
    tensor([[0., 0., 0.],
            [4., 4., 4.]])
    """

    def __init__(self, rows: Tensor) -> None:
        self.size = 0
        self._copy = rows[:0] if torch._C._are_functorch_transforms_active() else None
        self._table = _Table(torch.empty_like(rows, requires_grad=False))
        # each write makes a new token from the one before, and each read asks for the last: so
        # autograd knows that a write's gradient is complete when all later reads have sent theirs
        self._token = rows.new_zeros(())
        self.write(rows)

    def write(self, rows: Tensor) -> Tensor:
        """Add rows ``(*m, s)``; their numbers ``(*m)``."""
        first, count = self.size, rows.shape[:-1].numel()
        self.size += count
        flat = rows.reshape(count, rows.shape[-1])
        if self._copy is not None:
            self._copy = torch.cat([self._copy, flat.to(self._copy.dtype)])
        else:
            self._table.reserve(first, count)
            if torch.is_grad_enabled():
                self._token = _Write.apply(self._table, first, self._token, flat)
            else:
                self._table.data[first : self.size] = flat
        return torch.arange(first, self.size, device=rows.device).view(rows.shape[:-1])

    def read(self, index: Tensor) -> Tensor:
        """Rows ``(*m, s)`` of numbers ``(*m)``."""
        if self._copy is not None:
            flat = self._copy.index_select(0, index.reshape(-1))
        elif torch.is_grad_enabled():
            flat = _Read.apply(self._table, index.reshape(-1), self._token)
        else:
            flat = self._table.data.index_select(0, index.reshape(-1))
        return flat.view(*index.shape, flat.shape[-1])


class _Table:
    """The rows, and their gradients during a backward pass.

    What the nodes of the autograd graph hold on to: a pool itself would close a circle through its
    token, and so would never be freed.
    """

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self._grads: dict[int, Tensor] = {}  # by backward pass

    def reserve(self, used: int, more: int) -> None:
        if used + more > len(self.data):
            grown = self.data.new_empty(2 * (used + more), self.data.shape[1])
            grown[:used] = self.data[:used]
            self.data = grown

    def gradients(self) -> Tensor:
        """The gradient of the rows in this backward pass; forgotten at its end. One that raised
        leaves its own behind, and others may run at the same time."""
        now = torch._C._current_graph_task_id()
        if now not in self._grads:
            self._grads[now] = torch.zeros_like(self.data)

            def forget() -> None:
                self._grads.pop(now, None)

            torch.autograd.Variable._execution_engine.queue_callback(forget)
        return self._grads[now]


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: _Table, first: int, token: Tensor, rows: Tensor) -> Tensor:
        ctx.table, ctx.place, ctx.dtype = table, slice(first, first + len(rows)), rows.dtype
        table.data[ctx.place] = rows
        return token.new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return None, None, g, ctx.table.gradients()[ctx.place].to(ctx.dtype)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: _Table, index: Tensor, token: Tensor) -> Tensor:
        ctx.table = table
        ctx.save_for_backward(index)
        return table.data.index_select(0, index)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        grads = ctx.table.gradients()
        grads.index_add_(0, ctx.saved_tensors[0], g.to(grads.dtype))
        return None, None, g.new_zeros(())
