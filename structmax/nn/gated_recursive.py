"""The gated recursive cell."""

from __future__ import annotations

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

    def hidden(self, state: Tensor) -> Tensor:
        """The hidden vector of a state, ``(..., d)``."""
        return state
