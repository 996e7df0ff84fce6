"""The mean of argmaxes at noisy scores."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from structmax.estimators import noise
from structmax.estimators.base import Estimator, at_least, surrogate
from structmax.structures.base import Structure


@dataclass
class Perturbed(Estimator):
    """z = (1/S) Σₛ zₛ with zₛ = argmax(θ + σ εₛ): a draw of the perturbed maximiser E[argmax].

    Berthet, Blondel, Teboul, Cuturi, Vert & Bach 2020, "Learning with differentiable perturbed
    optimizers". The temperature is σ, whatever the structure's. With noise of density ∝ exp(−ν(ε))
    the derivative of E[z] is J = E[z ∇ν(ε)ᵀ]/σ (their section 3); ∇ν(ε) = ε for the normal and
    1 − exp(−ε) for the Gumbel distribution. J is symmetric, as the second derivative of E[max]. So
    with g = ∂L/∂z the gradient J·g is that of Σₛ (aₛ − ā) score(zₛ)/(S − 1), aₛ = ⟨g, ∇ν(εₛ)⟩/σ,
    which has a gradient in the scores of additional parts too. Taking away ā, the mean, is the
    leave-one-out control variate; with one sample there is none.

    J·g is unbiased for E[z]; the cost is taken at the mean of S draws, and at a vertex if S = 1.
    Needs argmax, S times forward.

    Args:
        sigma: σ
        samples: S
        noise: ``"normal"`` or ``"gumbel"``
        generator: of the noise

    >>> import torch, structmax as sx
    >>> scores = torch.tensor([0.0, 0.0, 1.0], requires_grad=True)
    >>> generator = torch.Generator().manual_seed(0)
    >>> mean = sx.estimators.Perturbed(samples=20000, noise="gumbel", generator=generator)
    >>> z = mean(sx.Choice(scores))  # softmax is 0.2119, 0.2119, 0.5761
    >>> z.detach()
    tensor([0.2074, 0.2160, 0.5767])
    """

    sigma: float = 1.0
    samples: int = 10
    noise: str = "normal"
    generator: torch.Generator | None = field(default=None, repr=False)

    objective = "L(E[z])"
    distribution = "perturbed"
    needs = frozenset(["argmax", "score"])

    def __post_init__(self) -> None:
        at_least(self, "sigma", 0.0, strict=True)
        noise.check(self, ("normal", "gumbel"))

    def __call__(self, structure: Structure) -> Tensor:
        with torch.no_grad():
            epsilon = noise.unit(self.noise, structure, self.samples, self.generator)
            epsilon = epsilon[None] if self.samples == 1 else epsilon
            every = structure.perturb(self.sigma * epsilon).argmax()  # (S, *batch, *parts)
            mean = every.mean(0).to(structure.dtype)
            slope = epsilon if self.noise == "normal" else 1 - (-epsilon).exp()

        def pullback(live: Structure, z: Tensor, g: Tensor, every: Tensor, slope: Tensor) -> Tensor:
            along = (slope * g).flatten(1 + len(live.batch_shape)).sum(-1) / self.sigma
            if self.samples > 1:
                along = along - along.mean(0)
            return along * live.score(every) / max(self.samples - 1, 1)

        return surrogate(structure, mean, pullback, every, slope)
