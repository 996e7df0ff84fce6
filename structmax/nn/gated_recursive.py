"""The gated recursive cell."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class GatedRecursiveCell(nn.Module):
    """Composes two states into one by a gated feed-forward network.

    With l and r the two children (Shen et al., "Ordered Memory", NeurIPS 2019)::

        g_l, g_r, g_u, u = W₂ relu(W₁ [l; r] + b₁) + b₂
        parent = LayerNorm(σ(g_l) ⊙ l + σ(g_r) ⊙ r + σ(g_u) ⊙ u)

    It takes the place of :class:`structmax.nn.TreeLSTMCell` anywhere. The state is the hidden
    vector itself.

    Args:
        hidden_size: d
        dropout: of the inner layer, while training

    >>> cell = GatedRecursiveCell(8)
    >>> cell(torch.randn(5, 8), torch.randn(5, 8)).shape
    torch.Size([5, 8])
    """

    def __init__(self, hidden_size: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.hidden_size = self.state_size = hidden_size
        self.inner = nn.Linear(2 * hidden_size, 4 * hidden_size)
        self.outer = nn.Linear(4 * hidden_size, 4 * hidden_size)
        self.norm = nn.LayerNorm(hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """The parent's state ``(..., d)``."""
        inner = self.dropout(torch.relu(self.inner(torch.cat([left, right], -1))))
        outer = self.outer(inner)
        gates, update = outer.split([3 * self.hidden_size, self.hidden_size], -1)
        keep_left, keep_right, write = torch.sigmoid(gates).chunk(3, -1)
        return self.norm(keep_left * left + keep_right * right + write * update)

    def compose_levels(self, leaves: Tensor, pairs: list[Tensor]) -> Tensor:
        """The leaves ``(count, d)`` and after them the subtrees of each level, whose children are
        rows ``(m, 2)`` of what is above them. The same as one call for each level, at a fraction
        of the overhead; it has no second derivative, and no dropout."""
        weights = (self.inner.weight, self.inner.bias, self.outer.weight, self.outer.bias)
        leaves = leaves.to(self.inner.weight.dtype)  # autocast may have made them narrower
        return _Levels.apply(leaves, pairs, self.norm.eps, *weights, *self.norm.parameters())

    @property
    def can_compose_levels(self) -> bool:
        """Whether ``compose_levels`` is what this module computes: not if a subclass, a hook or
        another part has changed it, nor under the transformations of ``torch.func``."""
        if type(self).forward is not GatedRecursiveCell.forward or "forward" in vars(self):
            return False
        kinds = {
            "inner": nn.Linear,
            "outer": nn.Linear,
            "norm": nn.LayerNorm,
            "dropout": nn.Dropout,
        }
        if any(type(getattr(self, name)) is not kind for name, kind in kinds.items()):
            return False
        parts = self.inner, self.outer, self.norm
        if any(part.weight is None or part.bias is None for part in parts):
            return False
        if any(_is_hooked(module) for module in (self, *parts)):
            return False
        return not torch._C._are_functorch_transforms_active()

    def hidden(self, state: Tensor) -> Tensor:
        """The hidden vector of a state, ``(..., d)``."""
        return state


def _is_hooked(module: nn.Module) -> bool:
    hooks = module._forward_hooks, module._forward_pre_hooks
    return any(hooks) or bool(module._backward_hooks or module._backward_pre_hooks)


class _Levels(torch.autograd.Function):
    """Every level of :meth:`GatedRecursiveCell.compose_levels`, its gradient written out.

    What a level needs for its gradient stands in one table for all levels, so that the gradients of
    the weights are one product each.
    """

    @staticmethod
    def forward(
        ctx: Any, leaves: Tensor, pairs: list[Tensor], eps: float, w1: Tensor, b1: Tensor,
        w2: Tensor, b2: Tensor, gain: Tensor, shift: Tensor,
    ) -> Tensor:  # fmt: skip
        count, d = leaves.shape
        total = sum(map(len, pairs))
        table = torch.cat([leaves, leaves.new_empty(total, d)])
        x, h, o = (leaves.new_empty(total, k * d) for k in (2, 4, 4))  # children, inner, outer
        z = leaves.new_empty(total, d)  # before the norm
        norms, last = [], 0
        for rows in pairs:
            first, last = last, last + len(rows)
            both, inner, outer = x[first:last], h[first:last], o[first:last]
            torch.index_select(table, 0, rows.view(-1), out=both.view(-1, d))
            torch.addmm(b1, both, w1.T, out=inner).relu_()
            torch.addmm(b2, inner, w2.T, out=outer)
            gates = outer[:, : 3 * d].sigmoid_()
            mixed = torch.mul(gates[:, :d], both[:, :d], out=z[first:last])
            mixed.addcmul_(gates[:, d : 2 * d], both[:, d:])
            mixed.addcmul_(gates[:, 2 * d :], outer[:, 3 * d :])
            state, *moments = torch.native_layer_norm(mixed, [d], gain, shift, eps)
            table[count + first : count + last] = state
            norms.append(moments)
        ctx.save_for_backward(x, h, o, z, w1, w2, gain, shift)
        ctx.pairs, ctx.norms, ctx.count = pairs, norms, count
        return table

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        with torch.autocast(grad.device.type, enabled=False):  # the forward pass has none either
            return _Levels._gradients(ctx, grad)

    @staticmethod
    def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, h, o, z, w1, w2, gain, shift = ctx.saved_tensors
        grad, count, d = grad.clone(), ctx.count, z.shape[1]
        g_outer, g_inner = torch.empty_like(o), torch.empty_like(h)
        g_gain, g_shift = torch.zeros_like(gain), torch.zeros_like(shift)
        last = len(z)
        for rows, (mean, scale) in zip(reversed(ctx.pairs), reversed(ctx.norms)):
            here = slice(last - len(rows), last)
            last = here.start
            both, gates, update = x[here], o[here, : 3 * d], o[here, 3 * d :]
            g_z, g_g, g_s = torch.ops.aten.native_layer_norm_backward(
                grad[count + here.start : count + here.stop], z[here], [d], mean, scale,
                gain, shift, [True, True, True],
            )  # fmt: skip
            g_gain, g_shift = g_gain.add_(g_g), g_shift.add_(g_s)
            outer = g_outer[here]
            torch.mul(g_z, both[:, :d], out=outer[:, :d])
            torch.mul(g_z, both[:, d:], out=outer[:, d : 2 * d])
            torch.mul(g_z, update, out=outer[:, 2 * d : 3 * d])
            torch.mul(g_z, gates[:, 2 * d :], out=outer[:, 3 * d :])
            outer[:, : 3 * d].mul_(gates).mul_(1 - gates)
            inner = torch.mm(outer, w2, out=g_inner[here])
            inner.mul_(h[here] > 0)
            below = inner @ w1
            below[:, :d].addcmul_(g_z, gates[:, :d])
            below[:, d:].addcmul_(g_z, gates[:, d : 2 * d])
            grad.index_add_(0, rows.view(-1), below.view(-1, d))
        sums = g_inner.T @ x, g_inner.sum(0), g_outer.T @ h, g_outer.sum(0)
        return grad[:count], None, None, *sums, g_gain, g_shift
