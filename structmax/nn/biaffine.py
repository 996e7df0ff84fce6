"""Scores of pairs."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Biaffine(nn.Module):
    """Scores of pairs of positions (Dozat & Manning, "Deep biaffine attention for neural
    dependency parsing", ICLR 2017): for each direction a small network, then xᵢᵀ U yⱼ + uᵀ xᵢ.

    Args:
        input_size: of the positions
        hidden_size: of the two networks

    >>> Biaffine(8, 4)(torch.randn(2, 5, 8)).shape  # [from, to]
    torch.Size([2, 5, 5])
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.source = nn.Sequential(nn.Linear(input_size, hidden_size), nn.GELU())
        self.target = nn.Sequential(nn.Linear(input_size, hidden_size), nn.GELU())
        self.weight = nn.Parameter(torch.empty(hidden_size + 1, hidden_size))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, n, input_size)`` to ``(B, n, n)``"""
        source = nn.functional.pad(self.source(x), (0, 1), value=1.0)
        return source @ self.weight @ self.target(x).mT
