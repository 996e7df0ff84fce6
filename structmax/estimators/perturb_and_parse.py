"""Marginals at noisy scores."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from structmax.estimators import noise
from structmax.estimators.base import Estimator, surrogate
from structmax.structures.base import Structure


@dataclass
class PerturbAndParse(Estimator):
    """z = μ(θ + ε) with a fresh ε, a relaxed draw; ``hard=True``: z = argmax(θ + ε), with the
    gradient of μ(θ + ε) at the same ε.

    Corro & Titov 2019, "Differentiable Perturb-and-Parse". The temperature is the structure's.
    Biased: θ + ε maximises under another distribution than that of Gibbs (see ``PerturbAndMAP``),
    and marginals stand for argmax. Scores of additional parts get a gradient, but no noise. Needs
    marginals, and argmax if hard.

    Args:
        hard: whether z is a structure
        noise: ``"gumbel"``, ``"sum-of-gamma"`` or ``"normal"``
        samples: how many z; ``(samples, *batch, *parts)`` if more than one
        generator: of the noise

    >>> import torch, structmax as sx
    >>> scores = torch.tensor([0.0, 0.0, 1.0], requires_grad=True)
    >>> def parse(hard):
    ...     generator = torch.Generator().manual_seed(0)
    ...     return sx.estimators.PerturbAndParse(hard, generator=generator)(sx.Choice(scores))
    >>> parse(hard=False).detach(), parse(hard=True).detach()
    (tensor([0.0517, 0.1473, 0.8010]), tensor([0., 0., 1.]))
    >>> parse(hard=True)[2].backward()
    >>> scores.grad
    tensor([-0.0414, -0.1180,  0.1594])
    """

    hard: bool = False
    noise: str = "gumbel"
    samples: int = 1
    generator: torch.Generator | None = field(default=None, repr=False)

    objective = "L(E[z])"
    distribution = "noisy"
    needs = frozenset(["marginals"])

    def __post_init__(self) -> None:
        noise.check(self)
        if self.hard:
            self.objective, self.distribution = "E[L(z)]", "perturbed"
            self.needs = frozenset(["argmax", "marginals"])
        elif self.noise == "sum-of-gamma":  # which counts the parts of the best structure
            self.needs = frozenset(["argmax", "marginals"])

    def __call__(self, structure: Structure) -> Tensor:
        with torch.no_grad():
            epsilon = noise.draw(self.noise, structure, self.samples, self.generator)
        if not self.hard:
            return structure.perturb(epsilon).marginals().to(structure.dtype)
        with torch.no_grad():
            z = structure.perturb(epsilon).argmax().to(structure.dtype)
        return surrogate(structure, z, _pullback, epsilon)


def _pullback(live: Structure, z: Tensor, g: Tensor, epsilon: Tensor) -> Tensor:
    return live.perturb(epsilon).marginals() * g
