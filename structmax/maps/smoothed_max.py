"""The smoothed maximum, whose gradient is a map."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from structmax.maps.argmax import argmax
from structmax.maps.entmax import _map as entmax
from structmax.maps.recipe import check_scores, keep
from structmax.smoothing import HARD, Smoothing
from structmax.tracing import is_tracing


class Value(torch.autograd.Function):
    """⟨p, x⟩ − γ Σ (p^α − p)/(α(α−1)) of rows, where p is the best one: argmaxΩ(x).

    p being the best, moving it changes nothing (the envelope theorem): the gradient in x is p
    itself, that in α the derivative of −Ω(p), and none goes to p. Differentiating again goes
    through p as an entmax of x.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, p: Tensor, alpha: Tensor, gamma: float) -> Tensor:
        peak = x.amax(-1, keepdim=True)
        absent = peak == -math.inf
        peak = torch.where(absent, 0.0, peak)
        gains = torch.where(p == 0, 0.0, p * (x - peak))  # 0·(−inf) = 0, and NaN stays
        value = peak + (gains - gamma * _constant_tsallis(p, alpha)).sum(-1, keepdim=True)
        return torch.where(absent, -math.inf, value).squeeze(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, p, alpha, ctx.gamma = inputs
        ctx.save_for_backward(p, alpha)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        p, alpha = ctx.saved_tensors
        g = g.unsqueeze(-1)
        g_alpha = None
        if ctx.needs_input_grad[2]:
            slope = tsallis_slope(p, alpha).sum(-1, keepdim=True)
            g_alpha = -ctx.gamma * (g * slope).sum_to_size(alpha.shape)
        return g * p, None, g_alpha, None


def value(x: Tensor, p: Tensor, alpha: Tensor, gamma: float) -> Tensor:
    """``Value``. ``torch.jit.trace`` saves no function of autograd: its operations are recorded,
    which have the same derivatives, with more rounding."""
    return (Value.forward if is_tracing() else Value.apply)(x, p, alpha, gamma)


def tsallis(p: Tensor, alpha: Tensor) -> Tensor:
    """(p^α − p)/(α(α−1)) elementwise, its limit p log p at α = 1, 0 at p = 0."""
    level = torch.where(p == 0, 1.0, p).log()
    return p * level * relative_exp((alpha - 1) * level) / alpha


def _constant_tsallis(p: Tensor, alpha: Tensor) -> Tensor:
    """``tsallis`` where nobody differentiates: the series is for its slope, and thirty passes."""
    level = torch.where(p == 0, 1.0, p).log()
    y = (alpha - 1) * level
    flat = y.abs() < 1e-20  # there (e^y − 1)/y is 1 to the last bit
    return p * level * torch.where(flat, 1.0, y.expm1() / torch.where(flat, 1.0, y)) / alpha


def tsallis_slope(p: Tensor, alpha: Tensor) -> Tensor:
    """The derivative in α of ``tsallis`` = p l e((α−1)l)/α, l = log p, e(y) = (e^y − 1)/y."""
    level = torch.where(p == 0, 1.0, p).log()
    y = (alpha - 1) * level
    first = p * level**2 * relative_exp_slope(y) / alpha
    return first - p * level * relative_exp(y) / alpha**2


def relative_exp(y: Tensor) -> Tensor:
    """(e^y − 1)/y, 1 at 0; differentiable there."""
    near = y.abs() < 0.5
    return torch.where(near, _series(y, near, 0), y.expm1() / torch.where(near, 1.0, y))


def relative_exp_slope(y: Tensor) -> Tensor:
    """Its derivative ((y − 1)e^y + 1)/y², ½ at 0."""
    near = y.abs() < 0.5
    safe = torch.where(near, 1.0, y)
    return torch.where(near, _series(y, near, 1), ((safe - 1) * safe.exp() + 1) / safe**2)


def _series(y: Tensor, near: Tensor, order: int) -> Tensor:
    """Σ y^k/(k+1)!, or its derivative Σ (k+1) y^k/(k+2)!, where y is small."""
    small = torch.where(near, y, 0.0)
    total = torch.zeros_like(y)
    for k in range(14, -1, -1):
        coefficient = (k + 1) / math.factorial(k + 2) if order else 1 / math.factorial(k + 1)
        total = total * small + coefficient
    return total


def smoothed_max(x: Tensor, omega: Smoothing, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """maxΩ(x) = max over p in the simplex of ⟨p, x⟩ − Ω(p); its gradient is the map argmaxΩ(x).

    Ω is one of ``sx.Hard()`` (the maximum itself), ``sx.Shannon(γ)`` (γ·logsumexp(x/γ)),
    ``sx.Gini(γ)`` (sparsemax) and ``sx.Tsallis(α, γ)`` (entmax). ``dim`` is reduced. ``mask``
    broadcasts to x and is True at the entries to keep; without any, the maximum is −inf. Of half
    precision scores the value is float32.

    >>> import structmax as sx
    >>> x = torch.tensor([0.0, 0.0], requires_grad=True)
    >>> smoothed_max(x, sx.Shannon())  # log 2
    tensor(0.6931, grad_fn=...)
    >>> smoothed_max(x, sx.Gini())
    tensor(0.2500, grad_fn=...)
    >>> torch.autograd.grad(smoothed_max(x, sx.Gini()), x)
    (tensor([0.5000, 0.5000]),)
    """
    check_scores("smoothed_max", x, dim)
    if not isinstance(omega, Smoothing):
        raise ValueError(
            "smoothed_max: omega must be one of sx.Hard(), sx.Shannon(γ), sx.Gini(γ) and "
            f"sx.Tsallis(α, γ), got {omega!r}."
        )
    work = x if x.dtype.itemsize >= 4 else x.float()
    if mask is not None:
        work = keep("smoothed_max", work, mask)
    work = work.movedim(dim, -1)
    kind, gamma, alpha = omega.code
    if kind == HARD:
        p, alpha = argmax(work), 2.0
    else:
        centred = work
        if gamma < 1:  # else large scores would overflow
            peak = work.detach().amax(-1, keepdim=True)
            centred = work - torch.where(peak.isfinite(), peak, 0.0)
        p = entmax.rows(centred / gamma, [], [alpha])
    exponent = torch.full((1,), alpha, dtype=work.dtype, device=work.device)
    return value(work, p, exponent, gamma)
