"""Softmax that knows masks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from structmax.maps.recipe import Map


def naive(x: Tensor, parameters: list[Tensor], options: list[float]) -> Tensor:
    """p = exp x / Σ exp x, relative to the peak; a row of −inf gets zeros."""
    peak = x.amax(-1, keepdim=True)
    weights = (x - torch.where(peak == -math.inf, 0.0, peak)).exp()
    total = weights.sum(-1, keepdim=True)
    p = weights / torch.where(total == 0, 1.0, total)
    return torch.where(x == -math.inf, 0.0, p)


def naive_backward(
    p: Tensor, g: Tensor, parameters: list[Tensor], options: list[float]
) -> list[Tensor]:
    """p(g − ⟨p, g⟩)."""
    return [torch.where(p == 0, 0.0, p * (g - (p * g).sum(-1, keepdim=True)))]


_map = Map("softmax", naive, naive_backward)


def softmax(x: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """exp x / Σ exp x: Ω(p) = Σ p log p. Never zero but where an entry is masked.

    ``mask`` broadcasts to x and is True at the entries to keep. The others, and scores of −inf, get
    exactly 0 and no gradient; a row without any entry gets zeros, where ``torch.softmax`` has NaN.

    >>> softmax(torch.tensor([0.0, 0.0, 9.0]), mask=torch.tensor([True, True, False]))
    tensor([0.5000, 0.5000, 0.0000])
    """
    return _map(x, dim=dim, mask=mask)
