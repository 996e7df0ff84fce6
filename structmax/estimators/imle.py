"""Implicit maximum likelihood."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from structmax.estimators import noise
from structmax.estimators.base import Estimator, at_least, one_of, surrogate
from structmax.structures.base import Structure


@dataclass
class IMLE(Estimator):
    """zᵢ = MAP(θ + εᵢ), with the gradient (1/λS) Σᵢ [MAP(θ + εᵢ) − MAP(θ′ᵢ + εᵢ)] at the same εᵢ,
    where θ′ᵢ = θ − λ ∂L/∂zᵢ is the target distribution, towards less cost.

    Niepert, Minervini & Franceschi 2021, "Implicit MLE: backpropagating through discrete
    exponential family distributions". L is the cost of one sample, so the cost is to be averaged
    over them, as ``loss`` does. Biased by perturb-and-MAP and by the finite difference; without
    noise it is ``BlackBox``. ``oracle="marginals", noise=None`` is (µ(θ) − µ(θ′))/λ of Domke 2010,
    "Implicit differentiation by perturbation", which tends to ``Marginals`` as λ → 0. Additional
    parts get the same difference. Needs argmax, twice a sample, or log_partition and marginals.

    Args:
        lam: λ, or ``"adaptive"``: λ = α ‖θ‖/‖∂L/∂z‖ for each item and sample, where α follows the
            number of non-zero differences of an item, so that there is one on average (Minervini,
            Franceschi & Niepert 2023, "Adaptive perturbation-based gradient estimation")
        samples: S; z is ``(S, *batch, *parts)`` if there are several
        noise: ``"gumbel"``, ``"sum-of-gamma"``, ``"normal"`` or None
        scale: False drops 1/λ
        oracle: ``"argmax"`` or ``"marginals"``
        generator: of the noise

    >>> import torch, structmax as sx
    >>> scores = torch.tensor([0.0, 0.0, 1.0], requires_grad=True)
    >>> generator = torch.Generator().manual_seed(0)
    >>> imle = sx.estimators.IMLE(lam=2.0, samples=100, noise="gumbel", generator=generator)
    >>> imle.loss(sx.Choice(scores), lambda z: z @ torch.tensor([1.0, 2.0, 3.0])).backward()
    >>> scores.grad
    tensor([-0.3400,  0.0350,  0.3050])
    """

    lam: float | str = 10.0
    samples: int = 1
    noise: str | None = "gumbel"
    scale: bool = True
    oracle: str = "argmax"
    generator: torch.Generator | None = field(default=None, repr=False)
    alpha: float = field(default=1.0, init=False)
    nonzeros: float = field(default=1.0, init=False)

    objective = "E[L(z)]"
    needs = frozenset(["argmax", "score"])

    def __post_init__(self) -> None:
        if self.lam != "adaptive":
            at_least(self, "lam", 0.0, strict=True)
        at_least(self, "samples", 1)
        one_of(self, "noise", (*noise.KINDS, None))
        one_of(self, "oracle", ("argmax", "marginals"))
        if self.oracle == "marginals":
            self.needs = frozenset(["log_partition", "marginals"])
            self.objective = "E[L(z)]" if self.noise else "L(E[z])"

    def __call__(self, structure: Structure) -> Tensor:
        with torch.no_grad():
            several = () if self.samples == 1 else (self.samples,)
            epsilon = structure.primary.new_zeros(*several, *[1] * structure.primary.dim())
            if self.noise:
                epsilon = noise.draw(self.noise, structure, self.samples, self.generator)
            noisy = structure.perturb(epsilon)
            z = noisy.argmax() if self.oracle == "argmax" else noisy.marginals()

        def pullback(live: Structure, z: Tensor, g: Tensor) -> Tensor:
            g = g * self.samples
            lam = self._lam(live, g)
            weight = self.samples * (lam if self.scale else torch.ones_like(lam))
            target = epsilon - lam[(..., *[None] * len(live.event_shape))] * g
            if self.oracle == "marginals":  # whose gradient is that of log_partition
                moved = live.perturb(target).log_partition()
                return (live.perturb(epsilon).log_partition() - moved) / weight
            with torch.no_grad():
                other = live.perturb(target).argmax()
            self._adapt((z != other).flatten(lam.dim()).sum(-1).double())
            return (live.score(z) - live.score(other)) / weight

        return surrogate(structure, z.to(structure.dtype), pullback)

    def _lam(self, structure: Structure, g: Tensor) -> Tensor:
        """λ of each item and sample, ``(*samples, *batch)``; anything where the gradient is 0."""
        batch = g.dim() - len(structure.event_shape)
        if self.lam != "adaptive":
            return g.new_full(g.shape[:batch], float(self.lam))
        scores = structure.primary.detach()
        scores = torch.where(scores == -math.inf, 0.0, scores)
        theta = scores.flatten(len(structure.batch_shape)).norm(dim=-1)
        slope = g.flatten(batch).norm(dim=-1)
        return torch.where((slope > 0) & (theta > 0), self.alpha * theta / slope, 1.0)

    def _adapt(self, nonzeros: Tensor) -> None:
        """One step of α towards one non-zero difference for each item, on a running mean."""
        if self.lam == "adaptive" and nonzeros.numel():
            self.nonzeros = 0.9 * self.nonzeros + 0.1 * float(nonzeros.mean())
            self.alpha = max(self.alpha + math.copysign(STEP, 1.0 - self.nonzeros), STEP)


STEP = 1e-3
