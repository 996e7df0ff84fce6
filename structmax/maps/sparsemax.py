"""Sparsemax: the Euclidean projection onto the simplex."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from structmax.maps.recipe import Map


def naive(x: Tensor, parameters: list[Tensor], options: list[float]) -> Tensor:
    """p = [x − τ]₊. The support is the longest head of the sorted row with 1 + r·x₍ᵣ₎ > Σ head."""
    absent, bad = x == -math.inf, ~(x < math.inf).all(-1, keepdim=True)
    peak = x.amax(-1, keepdim=True)
    x = x - torch.where(peak == -math.inf, 0.0, peak)
    ordered = x.clamp(min=-1).sort(-1, descending=True).values  # −1 is never in the support
    rank = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
    sums = ordered.cumsum(-1)
    count = (1 + rank * ordered > sums).sum(-1, keepdim=True).clamp(min=1)
    tau = (sums.gather(-1, count - 1) - 1) / count
    p = (x - tau).clamp(min=0)
    return torch.where(absent, 0.0, torch.where(bad, math.nan, p))


def naive_backward(
    p: Tensor, g: Tensor, parameters: list[Tensor], options: list[float]
) -> list[Tensor]:
    """g − its mean on the support, 0 elsewhere (Martins & Astudillo 2016, eq. 9 and 10)."""
    support = p > 0
    count = support.sum(-1, keepdim=True).clamp(min=1)
    mean = torch.where(support, g, 0.0).sum(-1, keepdim=True) / count
    g_x = torch.where(support, g - mean, 0.0)
    return [torch.where(p.isnan(), math.nan, g_x)]


_map = Map("sparsemax", naive, naive_backward)


def sparsemax(x: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """The point of the simplex nearest to the scores; many entries are exactly zero.

        p = argmin over p in the simplex of ‖p − x‖² = [x − τ]₊, with the τ that makes Σ p = 1

    (Martins & Astudillo, "From softmax to sparsemax", ICML 2016). It is entmax with α = 2.

    ``mask`` broadcasts to x and is True at the entries to keep. The others, and scores of −inf, get
    exactly 0 and no gradient; a row without any entry gets zeros.

    >>> sparsemax(torch.tensor([-2.0, 0.0, 0.5]))
    tensor([0.0000, 0.2500, 0.7500])

    Along another dimension, without the last row:

    >>> x = torch.tensor([[0.0, 1.0], [0.5, 3.0], [9.0, 9.0]])
    >>> sparsemax(x, dim=0, mask=torch.tensor([[True], [True], [False]]))
    tensor([[0.2500, 0.0000],
            [0.7500, 1.0000],
            [0.0000, 0.0000]])
    """
    return _map(x, dim=dim, mask=mask)
