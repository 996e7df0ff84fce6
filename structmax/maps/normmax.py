"""Normmax: the argmax of the norm entropy."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from structmax.checks import number
from structmax.maps import entmax as _entmax
from structmax.maps.recipe import Map


def naive(x: Tensor, parameters: list[Tensor], options: list[float]) -> Tensor:
    """p ∝ u^{1/(α−1)}, u = [x − τ]₊ with Σ u^{α/(α−1)} = 1: that sum's terms are an entmax."""
    alpha = options[0]
    powers = _entmax.naive(x.double() * (alpha / (alpha - 1)), [], [2 - 1 / alpha])
    p = powers ** (1 / alpha)
    total = p.sum(-1, keepdim=True)
    return torch.where(p == 0, 0.0, p / total).to(x.dtype)


def naive_backward(
    p: Tensor, g: Tensor, parameters: list[Tensor], options: list[float]
) -> list[Tensor]:
    """(N/(α−1)) (t − pΣt), t = (p/N)^{2−α} (g − ⟨p, g⟩), N = ‖p‖_α.

    From u = x − τ: dτ = ⟨p, dx⟩ because Σ u^{α/(α−1)} is fixed, and p/N = u^{1/(α−1)}.
    """
    alpha = options[0]
    support = p > 0
    some = support.any(-1, keepdim=True)
    safe = torch.where(support, p, 1.0)
    norm = torch.where(support, safe**alpha, 0.0).sum(-1, keepdim=True)
    norm = torch.where(some, norm, 1.0) ** (1 / alpha)
    centered = g - (torch.where(support, p * g, 0.0)).sum(-1, keepdim=True)
    t = torch.where(support, (safe / norm) ** (2 - alpha) * centered, 0.0)
    g_x = norm / (alpha - 1) * (t - p * t.sum(-1, keepdim=True))
    return [torch.where(p.isnan(), math.nan, g_x)]


_map = Map("normmax", naive, naive_backward)


def normmax(x: Tensor, alpha: float, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """The argmax with Ω(p) = ‖p‖_α − 1, for α > 1: sparse, and flatter on its support than entmax.

        p ∝ [x − τ]₊^{1/(α−1)}, with the τ that makes Σ [x − τ]₊^{α/(α−1)} = 1

    (Blondel, Martins & Niculae, "Learning with Fenchel-Young losses", JMLR 2020, section 4.3).

    ``mask`` broadcasts to x and is True at the entries to keep. The others, and scores of −inf, get
    exactly 0 and no gradient; a row without any entry gets zeros.

    >>> normmax(torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]), alpha=2)
    tensor([0.0000, 0.0239, 0.1746, 0.3254, 0.4761])
    """
    return _map(x, options=(check_alpha("normmax", alpha),), dim=dim, mask=mask)


def check_alpha(owner: str, alpha: float) -> float:
    """1 < α < ∞."""
    alpha = number(owner, "alpha", alpha)
    if not 1 < alpha < math.inf:
        raise ValueError(f"{owner}: alpha must be a number above 1, got {alpha}.")
    return alpha
