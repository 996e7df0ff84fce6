"""Fusedmax: sparse, and equal on runs of neighbours."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from structmax.maps import sparsemax
from structmax.maps.recipe import Map


def naive(x: Tensor, parameters: list[Tensor], options: list[float]) -> Tensor:
    """Sparsemax of y, the total-variation denoising of x.

    Let δᵢ(t) be the least cost of a chain up to place i if yᵢ = t. Its derivative grows and obeys

        δ'ᵢ(t) = t − xᵢ + clip(δ'ᵢ₋₁(t), ±strength),

    without the last term at the start of a chain. The end of a chain has δ'(y) = 0; before it, yᵢ
    is the value nearest to yᵢ₊₁ with |δ'ᵢ(yᵢ)| ≤ strength (Johnson 2013). The three roots of every
    place are found by bisection, all at once.
    """
    (strength,) = options
    n = x.shape[-1]
    absent = x == -math.inf
    z = torch.where(absent, 0.0, x)
    target = strength * torch.tensor([-1.0, 0.0, 1.0], dtype=x.dtype, device=x.device).view(3, 1, 1)
    low, high = z + target - strength, z + target + strength  # (3, R, n)
    for _ in range(4 - round(math.log2(torch.finfo(x.dtype).eps))):
        middle = (low + high) / 2
        slope, carry = torch.zeros_like(middle), torch.zeros_like(middle)
        for i in range(n):
            here = middle - z[:, i, None] + carry
            slope[..., i] = here[..., i]
            carry = torch.where(absent[:, i, None], 0.0, here.clamp(-strength, strength))
        above = slope > target
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    least, root, most = (low + high) / 2
    y = root.clone()
    for i in range(n - 2, -1, -1):
        inside = torch.minimum(torch.maximum(y[:, i + 1], least[:, i]), most[:, i])
        y[:, i] = torch.where(absent[:, i + 1], root[:, i], inside)
    bad = ~(x < math.inf)
    y = torch.where(absent, -math.inf, torch.where(bad, math.nan, y))
    return sparsemax.naive(y, [], [])


def average(p: Tensor, g: Tensor, group: Tensor) -> Tensor:
    """g averaged within groups of the support, minus its mean over the support; 0 elsewhere."""
    support = p > 0
    g = torch.where(support, g, 0.0)
    sums = torch.zeros_like(g).scatter_add(-1, group, g)
    counts = torch.zeros_like(p).scatter_add(-1, group, support.to(p.dtype)).clamp(min=1)
    mean = g.sum(-1, keepdim=True) / support.sum(-1, keepdim=True).clamp(min=1)
    out = torch.where(support, (sums / counts).gather(-1, group) - mean, 0.0)
    return torch.where(p.isnan(), math.nan, out)


def naive_backward(
    p: Tensor, g: Tensor, parameters: list[Tensor], options: list[float]
) -> list[Tensor]:
    """The Jacobian averages within runs of equal p and projects as sparsemax does.

    Without a penalty, equal neighbours are not tied.
    """
    differ = p[..., 1:] != p[..., :-1]
    if options[0] == 0:
        differ = torch.ones_like(differ)
    start = torch.cat([torch.zeros_like(p[..., :1], dtype=torch.bool), differ], -1)
    return [average(p, g, start.long().cumsum(-1))]


_map = Map("fusedmax", naive, naive_backward, kernels="structmax.maps.{}_structured")


def check_strength(owner: str, strength: float) -> float:
    """A finite number ≥ 0."""
    try:
        good = not isinstance(strength, Tensor) and 0 <= strength < math.inf
    except TypeError:  # no number at all
        good = False
    if not good:
        raise ValueError(
            f"{owner}: strength must be a finite number, 0 (sparsemax) or more, got {strength}."
        )
    return float(strength)


def fusedmax(x: Tensor, strength: float, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """Sparsemax with a total-variation penalty: neighbours tend to get the same weight.

        p = argmin over p in the simplex of ½‖p − x‖² + strength Σ |pᵢ₊₁ − pᵢ|
          = sparsemax(prox(x)),  prox(x) = argmin over y of ½‖y − x‖² + strength Σ |yᵢ₊₁ − yᵢ|

    (Niculae & Blondel, "A regularized framework for sparse and structured neural attention",
    NeurIPS 2017). The prox is computed in linear time by a dynamic program (Johnson 2013), on a GPU
    with one thread per row. The backward pass averages the gradient within runs of equal p > 0.

    ``mask`` broadcasts to x and is True at the entries to keep. The others, and scores of −inf, get
    exactly 0 and no gradient, and they break the chain: only neighbours that are both kept are
    compared. So padding does not matter, and the entries on both sides of a hole are not fused. A
    row without any entry gets zeros.

    >>> x = torch.tensor([1.0, 2.1, 1.9])
    >>> fusedmax(x, strength=0.05)
    tensor([0.0000, 0.5250, 0.4750])
    >>> fusedmax(x, strength=0.1)
    tensor([0.0000, 0.5000, 0.5000])

    Without a penalty it is sparsemax; a large one gives every entry the same weight.

    >>> fusedmax(x, strength=0.0)
    tensor([0.0000, 0.6000, 0.4000])
    >>> fusedmax(x, strength=10.0)
    tensor([0.3333, 0.3333, 0.3333])

    Rows of several lengths:

    >>> lengths = torch.tensor([3, 2])
    >>> fusedmax(x.expand(2, 3), 0.1, mask=torch.arange(3) < lengths[:, None])
    tensor([[0.0000, 0.5000, 0.5000],
            [0.0500, 0.9500, 0.0000]])
    """
    return _map(x, options=[check_strength("fusedmax", strength)], dim=dim, mask=mask)
