"""Argmax at noisy scores."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from structmax.estimators import noise
from structmax.estimators.base import Estimator, straight, surrogate
from structmax.structures.base import Structure


@dataclass
class PerturbAndMAP(Estimator):
    """z = argmax(θ + ε) with a fresh ε, and the gradient of θ: ∂L/∂z itself.

    Papandreou & Yuille 2011, "Perturb-and-MAP random fields". On ``sx.Choice`` Gumbel noise gives
    exact draws of the Gibbs distribution; elsewhere those of another one, since noise is added to
    parts and not to structures. Biased for that reason and as ``StraightThrough`` is. Scores of
    additional parts get neither noise nor a gradient. Needs argmax.

    Args:
        noise: ``"gumbel"``, ``"sum-of-gamma"`` or ``"normal"``
        samples: how many z; ``(samples, *batch, *parts)`` if more than one
        generator: of the noise

    >>> import torch, structmax as sx
    >>> scores = torch.tensor([0.0, 0.0, 1.0], requires_grad=True)
    >>> draw = sx.estimators.PerturbAndMAP(generator=torch.Generator().manual_seed(0))
    >>> z = draw(sx.Choice(scores))
    >>> (z * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    >>> z.detach(), scores.grad
    (tensor([0., 0., 1.]), tensor([1., 2., 3.]))
    """

    noise: str = "gumbel"
    samples: int = 1
    generator: torch.Generator | None = field(default=None, repr=False)

    objective = "E[L(z)]"
    distribution = "perturbed"
    needs = frozenset(["argmax"])

    def __post_init__(self) -> None:
        noise.check(self)

    def __call__(self, structure: Structure) -> Tensor:
        with torch.no_grad():
            epsilon = noise.draw(self.noise, structure, self.samples, self.generator)
            z = structure.perturb(epsilon).argmax().to(structure.dtype)
        return surrogate(structure, z, lambda live, z, g: straight(live, g))
