"""Oscarmax: sparse, and equal on clusters anywhere in the row."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from structmax.maps import sparsemax
from structmax.maps.fusedmax import average, check_strength
from structmax.maps.recipe import Map


def naive(x: Tensor, parameters: list[Tensor], options: list[float]) -> Tensor:
    """Sparsemax of y, where y is the nearest falling row to the sorted scores + strength · rank.

    Each yᵢ is the min over j ≤ i of the max over k ≥ i of the mean over j…k (isotonic regression),
    here by looking at all n² means.
    """
    (strength,) = options
    n = x.shape[-1]
    ordered, order = x.sort(-1, descending=True)
    absent = ordered == -math.inf
    place = torch.arange(n, device=x.device)
    peak = torch.where(absent[:, :1], 0.0, ordered[:, :1])
    z = torch.where(absent, 0.0, ordered - peak + strength * place.to(x.dtype))
    sums = torch.nn.functional.pad(z.cumsum(-1), (1, 0))
    j, k = place[:, None], place[None, :]
    means = (sums[:, None, 1:] - sums[:, :-1, None]) / (k - j + 1).clamp(min=1)  # (R, j, k)
    means = torch.where((k >= j) & ~absent[:, None, :], means, -math.inf)
    best = means.flip(-1).cummax(-1).values.flip(-1)  # over k ≥ i
    y = torch.where(j <= k, best, math.inf).amin(-2)
    bad = ~(x < math.inf).all(-1, keepdim=True)
    y = torch.where(absent, -math.inf, torch.where(bad, math.nan, y))
    return torch.empty_like(x).scatter(-1, order, sparsemax.naive(y, [], []))


def naive_backward(
    p: Tensor, g: Tensor, parameters: list[Tensor], options: list[float]
) -> list[Tensor]:
    """The Jacobian averages within clusters of equal p and projects as sparsemax does.

    Without a penalty, equal entries are not tied.
    """
    ordered, order = p.detach().sort(-1)
    differ = ordered[..., 1:] != ordered[..., :-1]
    if options[0] == 0:
        differ = torch.ones_like(differ)
    start = torch.cat([torch.zeros_like(ordered[..., :1], dtype=torch.bool), differ], -1)
    cluster = start.long().cumsum(-1)
    return [average(p, g, torch.empty_like(order).scatter(-1, order, cluster))]


_map = Map("oscarmax", naive, naive_backward, kernels="structmax.maps.{}_structured")


def oscarmax(x: Tensor, strength: float, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """Sparsemax with a pairwise ℓ∞ penalty: entries tend to share their weight, wherever they are.

        p = argmin over p in the simplex of ½‖p − x‖² + strength Σ_{i<j} max(|pᵢ|, |pⱼ|)
          = sparsemax(prox(x))

    (Niculae & Blondel, "A regularized framework for sparse and structured neural attention",
    NeurIPS 2017). On the simplex |p| = p, so the penalty is the sum of p sorted downwards times
    strength · (n − 1, …, 1, 0), and its prox sorts x, subtracts those weights and pools what does
    not fall (Zhong & Kwok 2012). Written without signs, it lets a number be added to all scores
    without changing p. The backward pass averages the gradient within clusters of equal p > 0.

    ``mask`` broadcasts to x and is True at the entries to keep. The others, and scores of −inf, get
    exactly 0 and no gradient, as if they were not there. A row without any entry gets zeros.

    >>> x = torch.tensor([0.5, 0.2, 0.45, 0.1])
    >>> oscarmax(x, strength=0.05)
    tensor([0.3625, 0.1625, 0.3625, 0.1125])

    Without a penalty it is sparsemax; a large one gives every entry the same weight.

    >>> oscarmax(x, strength=0.0)
    tensor([0.4375, 0.1375, 0.3875, 0.0375])
    >>> oscarmax(x, strength=10.0)
    tensor([0.2500, 0.2500, 0.2500, 0.2500])

    Without the first entry:

    >>> oscarmax(x, 0.05, mask=torch.tensor([False, True, True, True]))
    tensor([0.0000, 0.2833, 0.4833, 0.2333])
    """
    return _map(x, options=[check_strength("oscarmax", strength)], dim=dim, mask=mask)
