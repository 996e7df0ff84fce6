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
        dropout: of what they give

    >>> Biaffine(8, 4)(torch.randn(2, 5, 8)).shape  # [from, to]
    torch.Size([2, 5, 5])
    """

    def __init__(self, input_size: int, hidden_size: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.source = _network(input_size, hidden_size, dropout)
        self.target = _network(input_size, hidden_size, dropout)
        self.weight = nn.Parameter(torch.empty(hidden_size + 1, hidden_size))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, n, input_size)`` to ``(B, n, n)``"""
        source = nn.functional.pad(self.source(x), (0, 1), value=1.0)
        return source @ self.weight @ self.target(x).mT


class LabelledBiaffine(nn.Module):
    """Scores of the labels of given pairs, by the same formula for each label.

    Args:
        input_size: of the positions
        hidden_size: of the two networks
        labels: c
        dropout: of what they give

    >>> source, target = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    >>> LabelledBiaffine(8, 4, labels=3)(source, target).shape
    torch.Size([2, 5, 3])
    """

    def __init__(
        self, input_size: int, hidden_size: int, labels: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.source = _network(input_size, hidden_size, dropout)
        self.target = _network(input_size, hidden_size, dropout)
        self.weight = nn.Parameter(torch.zeros(hidden_size + 1, labels, hidden_size + 1))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """``(..., input_size)`` and the same to ``(..., labels)``"""
        source = nn.functional.pad(self.source(source), (0, 1), value=1.0)
        target = nn.functional.pad(self.target(target), (0, 1), value=1.0)
        by_label = (source @ self.weight.flatten(1)).unflatten(-1, self.weight.shape[1:])
        return (by_label @ target[..., None]).squeeze(-1)


def _network(input_size: int, hidden_size: int, dropout: float) -> nn.Module:
    return nn.Sequential(nn.Linear(input_size, hidden_size), nn.GELU(), nn.Dropout(dropout))
