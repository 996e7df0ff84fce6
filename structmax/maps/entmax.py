"""Entmax: from softmax (α = 1) over sparsemax (α = 2) towards argmax (α → ∞)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from structmax.checks import can_look, number
from structmax.maps.recipe import Map


def naive(x: Tensor, parameters: list[Tensor], options: list[float]) -> Tensor:
    """p = [1 + (α−1)(x − λ)]₊^{1/(α−1)}, its limit exp(x − λ) at α = 1, with λ by bisection.

    For α > 2, p leaves 0 so steeply that λ needs more digits than a number has: the rest of λ is
    found again and again, with what is left of the scores.
    """
    alpha = (parameters[0] if parameters else torch.full_like(x[:, :1], options[0])).double()
    rate = torch.where((alpha >= 1) & (alpha < math.inf), alpha - 1, 1.0)
    peak = x.amax(-1, keepdim=True)
    d = (x.double() - torch.where(peak == -math.inf, 0.0, peak)).clamp(min=-1e300)  # x − λ
    u, one = rate * d, 1.0

    def power(level: Tensor) -> Tensor:
        rest, base = d - level, u + (one - rate * level)
        y = (rate * rest).clamp(min=-0.9)
        near = rest * torch.where(y == 0, 1.0, y.log1p() / torch.where(y == 0, 1.0, y))
        logarithm = torch.where(y > -0.9, near, base.clamp(min=1e-300).log() / rate)
        return torch.where(base > 0, logarithm.exp(), 0.0)

    low = torch.zeros_like(rate)  # relative to the peak: p(peak) = 1 here, and 1/n at the other end
    size = math.log(x.shape[-1])
    high = torch.where(rate == 0, size, -torch.expm1(-rate * size) / rate)
    for _ in range(8 if bool((rate > 1).any()) else 1):
        for _ in range(60):
            middle = (low + high) / 2
            above = power(middle).sum(-1, keepdim=True) >= 1
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        d, u, one = d - low, u + (one - rate * low), 0.0
        low, high = -1e-15 * low.abs(), 1e-15 * low.abs()
    p = power(torch.zeros_like(rate))
    total = p.sum(-1, keepdim=True)
    p = torch.where(x == -math.inf, 0.0, p / torch.where(total == 0, 1.0, total))
    good = (x < math.inf).all(-1, keepdim=True) & (alpha >= 1) & (alpha < math.inf)
    return torch.where(good | (x == -math.inf), p, math.nan).to(x.dtype)


def naive_backward(
    p: Tensor, g: Tensor, parameters: list[Tensor], options: list[float]
) -> list[Tensor]:
    """g_x = s(g − ḡ) with s = p^{2−α} and ḡ the mean of g under s (Peters et al. 2019, prop. 2).

    g_α = −Σ r(g − ḡ), r = p(e^y − 1 − y)/(α−1)² with y = −(α−1) log p: what prop. 1 of Correia et
    al. (2019) becomes after taking out of it what cancels as α → 1; there r = p(log p)²/2.

    For α > 2 one s can dwarf the others: g is taken relative to that entry, whose own gradient is
    read off Σg_x = 0, and −Σ r(g − ḡ) = Σ p(1 + y)(g − ḡ)/(α−1)² because Σ s(g − ḡ) = 0. Second
    derivatives have terms of order s², so float32 is computed in float64; what is beyond the range
    of the dtype is its last number.
    """
    if p.dtype == torch.float32 and (parameters or options[0] > 2):
        wide = naive_backward(p.double(), g.double(), [a.double() for a in parameters], options)
        last = torch.finfo(p.dtype).max
        return [t.clamp(-last, last).to(p.dtype) for t in wide]
    alpha = parameters[0] if parameters else torch.full_like(p[..., :1], options[0])
    support = p > 0
    level = torch.where(support, p, 1.0).log()
    exponent = (2 - alpha) * level
    top = torch.where(support, exponent, -math.inf).argmax(-1, keepdim=True)
    weight = torch.where(support, (exponent - exponent.gather(-1, top)).exp(), 0.0)
    total = weight.sum(-1, keepdim=True)
    relative = g - g.gather(-1, top)
    mean = (weight * relative).sum(-1, keepdim=True) / torch.where(total == 0, 1.0, total)
    centered = relative - mean

    at_top = torch.arange(p.shape[-1], device=p.device) == top
    s = exponent.clamp(max=690.77 if p.dtype == torch.float64 else 69.077).exp()  # no overflow
    others = torch.where(support & ~at_top, s * centered, 0.0)
    g_x = torch.where(at_top, -others.sum(-1, keepdim=True), others)
    out = [torch.where(p.isnan(), math.nan, g_x)]
    if parameters:
        r = _second_order(p, level, alpha - 1)
        steep = p * (1 - (alpha - 1) * level) / (alpha - 1).clamp(min=1) ** 2
        terms = torch.where(alpha > 2, steep, -r) * centered
        g_alpha = torch.where(support, terms, 0.0).sum(-1, keepdim=True)
        out.append(torch.where(p.isnan().any(-1, keepdim=True), math.nan, g_alpha))
    return out


def _second_order(p: Tensor, level: Tensor, rate: Tensor) -> Tensor:
    """p(e^y − 1 − y)/ε² with y = −ε log p ≥ 0: by its series for small y; for ε ≤ 1 only."""
    y = -rate.clamp(max=1) * level
    near = y < 1
    small, total = torch.where(near, y, 0.0), torch.zeros_like(y)
    for k in range(19, 2, -1):
        total = (total + 1) * small / k
    series = p * level**2 * (total + 1) / 2
    far = (torch.where(near, 0.0, y + level).exp() - p * (1 + y)) / torch.where(near, 1.0, rate**2)
    return torch.where(near, series, far)


_map = Map("entmax", naive, naive_backward, {"alpha": "row"})


def entmax(
    x: Tensor, alpha: float | Tensor = 1.5, dim: int = -1, mask: Tensor | None = None
) -> Tensor:
    """α-entmax: Ω(p) = Σ (p^α − p)/(α(α−1)), softmax at α = 1, sparsemax at α = 2.

        p = [1 + (α−1)(x − λ)]₊^{1/(α−1)}, with the λ that makes Σ p = 1

    (Peters, Niculae & Martins, "Sparse sequence-to-sequence models", ACL 2019). Any α ≥ 1; p is
    smooth in α through α = 1. For α = ∞ see ``structmax.maps.argmax``.

    ``alpha`` is a number, or a tensor that broadcasts to x with ``dim`` reduced to size 1: one for
    each row, or for each head; it receives a gradient (Correia, Niculae & Martins, "Adaptively
    sparse transformers", EMNLP 2019).

    ``mask`` broadcasts to x and is True at the entries to keep. The others, and scores of −inf, get
    exactly 0 and no gradient; a row without any entry gets zeros.

    >>> entmax(torch.tensor([-2.0, 0.0, 0.5]))
    tensor([0.0000, 0.3260, 0.6740])

    A learnable α for each of two rows:

    >>> alpha = torch.tensor([[1.0], [2.0]], requires_grad=True)
    >>> p = entmax(torch.tensor([[-2.0, 0.0, 0.5], [-2.0, 0.0, 0.5]]), alpha)
    >>> p
    tensor([[0.0486, 0.3592, 0.5922],
            [0.0000, 0.2500, 0.7500]], grad_fn=...)
    >>> p[:, -1].sum().backward()
    >>> alpha.grad
    tensor([[0.2100],
            [0.1846]])
    """
    check_alpha("entmax", alpha)
    if isinstance(alpha, Tensor):
        return _map(x, alpha, dim=dim, mask=mask)
    return _map(x, options=(float(alpha),), dim=dim, mask=mask)


def check_alpha(owner: str, alpha: float | Tensor) -> None:
    """1 ≤ α < ∞. On a GPU, looking at a tensor would wait for it; there a bad α gives NaN."""
    if not isinstance(alpha, Tensor):
        if not 1 <= number(owner, "alpha", alpha) < math.inf:
            raise ValueError(f"{owner}: alpha must be a finite number of at least 1, got {alpha}.")
    elif alpha.device.type == "cpu" and can_look(alpha):
        bad = ~((alpha >= 1) & (alpha < math.inf))
        if bool(bad.any()):
            where = bad.nonzero()[0].tolist()
            raise ValueError(
                f"{owner}: alpha must be finite and at least 1, got {alpha[tuple(where)].item()}"
                f"{f' at {where}' if where else ''}. A learnable alpha can be 1 + softplus(a)."
            )
