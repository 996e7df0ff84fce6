"""The regularizers Ω of a smoothed dynamic program.

A smoothed dynamic program (Mensch & Blondel, 2018) replaces every ``max`` by

    maxΩ(x) = max over p in the simplex of ⟨p, x⟩ − Ω(p),

whose gradient argmaxΩ(x) is a distribution over the options: a probabilistic backpointer. Every Ω
here is zero at the vertices of the simplex, so with a single option maxΩ is that option.

This module is the definition, in plain torch along the last dimension; compiled kernels are tested
against it. −inf marks an absent option. Every function is differentiable three times (away from the
kinks of Gini and Tsallis), with exact zeros at absent options.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from structmax import checks

HARD, SHANNON, TSALLIS = 0, 1, 2  # the codes that kernels switch on
ALPHAS = 1.001, 4.0  # between which dynamic programs have their digits


@dataclass(frozen=True)
class Smoothing:
    """Base class: γ Ω, with ``max`` and ``argmax`` along the last dimension.

    >>> import torch, structmax as sx
    >>> sx.Gini().argmax(torch.tensor([-2.0, 0.0, 0.5]))
    tensor([0.0000, 0.2500, 0.7500])
    """

    gamma: float = 1.0

    def __post_init__(self) -> None:
        name = type(self).__name__
        hint = " A learnable temperature divides the scores: A is then gamma times that of them."
        gamma = checks.number(name, "gamma", self.gamma, hint)
        if not (0 < gamma < math.inf):
            raise ValueError(
                f"{name}: gamma must be a positive number, got {gamma}. For gamma = 0 use "
                "sx.Hard()."
            )
        object.__setattr__(self, "gamma", gamma)

    @property
    def code(self) -> tuple[float, float, float]:
        """``(kind, γ, α)`` as kernels receive it."""
        raise TypeError("use one of sx.Hard, sx.Shannon, sx.Gini, sx.Tsallis")

    def max(self, x: Tensor) -> Tensor:
        """maxΩ(x) along the last dimension, −inf if every option is absent."""
        raise TypeError("use one of sx.Hard, sx.Shannon, sx.Gini, sx.Tsallis")

    def argmax(self, x: Tensor) -> Tensor:
        """argmaxΩ(x) = ∇maxΩ(x), zeros if every option is absent."""
        raise TypeError("use one of sx.Hard, sx.Shannon, sx.Gini, sx.Tsallis")

    def bound(self, options: int) -> float:
        """γ·h(D) with h(D) = max over the simplex of −Ω: by how much maxΩ can exceed max."""
        raise TypeError("use one of sx.Hard, sx.Shannon, sx.Gini, sx.Tsallis")


@dataclass(frozen=True)
class Hard(Smoothing):
    """Ω = 0: the plain maximum. Ties go to the first option.

    >>> Hard().argmax(torch.tensor([1.0, 3.0, 3.0]))
    tensor([0., 1., 0.])
    """

    def __init__(self) -> None:
        object.__setattr__(self, "gamma", 1.0)

    def __repr__(self) -> str:
        return "Hard()"

    @property
    def code(self) -> tuple[float, float, float]:
        return (HARD, 1.0, 1.0)

    def max(self, x: Tensor) -> Tensor:
        return x.gather(-1, x.argmax(-1, keepdim=True)).squeeze(-1)

    def argmax(self, x: Tensor) -> Tensor:
        first = torch.zeros_like(x).scatter(-1, x.argmax(-1, keepdim=True), 1.0)
        p = torch.where(x > -math.inf, first, 0.0)
        return torch.where(x.isnan().any(-1, keepdim=True), math.nan, p)

    def bound(self, options: int) -> float:
        return 0.0


@dataclass(frozen=True)
class Shannon(Smoothing):
    """Ω(p) = γ Σ p log p: maxΩ is γ·logsumexp(x/γ), argmaxΩ the softmax.

    >>> Shannon(gamma=2.0).max(torch.tensor([0.0, 0.0]))  # 2 log 2
    tensor(1.3863)
    """

    @property
    def code(self) -> tuple[float, float, float]:
        return (SHANNON, self.gamma, 1.0)

    def _weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
        peak = x.detach().amax(-1, keepdim=True)
        peak = torch.where(peak == -math.inf, 0.0, peak)
        return ((x - peak) / self.gamma).exp(), peak.squeeze(-1)

    def max(self, x: Tensor) -> Tensor:
        weights, peak = self._weights(x)
        total = weights.sum(-1)
        feasible = total != 0
        value = peak + self.gamma * torch.where(feasible, total, 1.0).log()
        return torch.where(feasible, value, -math.inf)

    def argmax(self, x: Tensor) -> Tensor:
        weights, _ = self._weights(x)
        total = weights.sum(-1, keepdim=True)
        return weights / torch.where(total != 0, total, 1.0)

    def bound(self, options: int) -> float:
        return self.gamma * math.log(options)


@dataclass(frozen=True)
class Tsallis(Smoothing):
    """Ω(p) = γ/(α(α−1)) Σ (p^α − p): between Shannon (α → 1) and Gini (α = 2), sparse for α > 1.

    p = [(α−1)(x − τ)/γ]₊^{1/(α−1)} with the threshold τ that makes p sum to one.

    Structures take α = 1, which is Shannon, and 1.001 ≤ α ≤ 4. A rounding error ε in the scores is
    one of ε/(α − 1) in p near α = 1, and up to ε^{1/(α−1)} where p is close to 0.

    >>> Tsallis(alpha=1.5).argmax(torch.tensor([-2.0, 0.0, 0.5]))
    tensor([0.0000, 0.3260, 0.6740])
    """

    alpha: float = 1.5

    def __init__(self, alpha: float = 1.5, gamma: float = 1.0) -> None:
        object.__setattr__(self, "alpha", checks.number("Tsallis", "alpha", alpha))
        object.__setattr__(self, "gamma", gamma)
        self.__post_init__()
        if not 1 <= self.alpha < math.inf:
            raise ValueError(f"Tsallis: alpha must be at least 1, got {self.alpha}.")

    @property
    def code(self) -> tuple[float, float, float]:
        if self.alpha == 1:
            return Shannon(self.gamma).code
        return (TSALLIS, self.gamma, self.alpha)

    def max(self, x: Tensor) -> Tensor:
        if self.alpha == 1:
            return Shannon(self.gamma).max(x)
        p, base, support, tau = self._solve(x)
        # p^α − p = p(base − 1): with Σ p^α − 1 all digits would be lost as α → 1
        scale = self.gamma / (self.alpha * (self.alpha - 1))
        gain = torch.where(support, x, 0.0) - scale * (base - 1)
        value = (_normalised(p) * gain).sum(-1).detach()
        # the derivatives are those of the dual, which is least at τ: its error does not matter
        dual = tau.squeeze(-1) + self.gamma / self.alpha * (p * base).sum(-1)
        value = (value + dual - dual.detach()).to(x.dtype)
        value = torch.where(x.isnan().any(-1), math.nan, value)
        return torch.where((x > -math.inf).any(-1) | x.isnan().any(-1), value, -math.inf)

    def argmax(self, x: Tensor) -> Tensor:
        if self.alpha == 1:
            return Shannon(self.gamma).argmax(x)
        p = _normalised(self._solve(x)[0]).to(x.dtype)
        return torch.where(x.isnan().any(-1, keepdim=True), math.nan, p)

    def _solve(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """p and p^(α−1) in float64, which is 1 outside the support, the support, and τ − max x.

        τ is found by bisection on constants; two Newton steps then attach it to x, without moving
        it, which makes its first three derivatives exact.
        """
        rate, power = (self.alpha - 1) / self.gamma, 1 / (self.alpha - 1)
        x = x.double()
        fixed = x.detach()
        peak = fixed.amax(-1, keepdim=True)
        peak = torch.where(peak > -math.inf, peak, 0.0)
        low = torch.full_like(peak, -1 / rate)  # relative to the peak: p(peak) = 1 here
        high = torch.full_like(peak, -(x.shape[-1] ** (1 - self.alpha)) / rate)
        for _ in range(64):
            middle = (low + high) / 2
            mass = (rate * (fixed - peak - middle)).clamp(min=0).pow(power).sum(-1, keepdim=True)
            low = torch.where(mass >= 1, middle, low)
            high = torch.where(mass >= 1, high, middle)
        support = fixed - peak > low
        shifted = torch.where(support, x - peak, 0.0)
        tau = low
        for _ in range(2):
            base = torch.where(support, rate * (shifted - tau), 1.0)
            p = torch.where(support, base.pow(power), 0.0)
            slope = torch.where(support, base.pow(power - 1), 0.0).sum(-1, keepdim=True)
            slope = torch.where(slope != 0, slope, 1.0) / self.gamma
            step = torch.where(
                support.any(-1, keepdim=True), (p.sum(-1, keepdim=True) - 1) / slope, 0.0
            )
            tau = tau + step - step.detach()
        base = torch.where(support, rate * (shifted - tau), 1.0)
        return torch.where(support, base.pow(power), 0.0), base, support, tau

    def bound(self, options: int) -> float:
        if self.alpha == 1:
            return Shannon(self.gamma).bound(options)
        return self.gamma * (1 - options ** (1 - self.alpha)) / (self.alpha * (self.alpha - 1))


@dataclass(frozen=True)
class Gini(Tsallis):
    """Ω(p) = γ/2 (‖p‖² − 1): argmaxΩ is sparsemax, Tsallis with α = 2.

    >>> Gini().argmax(torch.tensor([-2.0, 0.0, 0.5]))
    tensor([0.0000, 0.2500, 0.7500])
    """

    def __init__(self, gamma: float = 1.0) -> None:
        super().__init__(2.0, gamma)

    def __repr__(self) -> str:
        return f"Gini(gamma={self.gamma})"


def _normalised(p: Tensor) -> Tensor:
    total = p.sum(-1, keepdim=True)
    return p / torch.where(total != 0, total, 1.0)


def from_code(code: Sequence[float]) -> Smoothing:
    """The inverse of ``Smoothing.code``."""
    kind, gamma, alpha = code
    if kind == HARD:
        return Hard()
    return Shannon(gamma) if kind == SHANNON else Tsallis(alpha, gamma)
