"""Draws of a category, with the gradient of a softmax at the same noise."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from structmax.estimators import noise
from structmax.estimators.base import Estimator, at_least, surrogate
from structmax.structures.base import Structure
from structmax.structures.choice import Choice
from structmax.structures.incremental import Incremental


@dataclass
class GumbelStraightThrough(Estimator):
    """z = argmax(s + ε), a draw of softmax(s), with the gradient of softmax((s + ε)/τ).

    Jang, Gu & Poole 2017, "Categorical reparameterization with Gumbel-softmax"; Maddison, Mnih &
    Teh 2017, "The concrete distribution". For ``sx.Choice`` and, a choice at each step, for
    structures built by a policy. Biased, less so and with more variance as τ → 0. Needs argmax.

    Args:
        temperature: τ
        samples: how many z; ``(samples, *batch, *parts)`` if more than one
        generator: of the noise

    >>> import torch, structmax as sx
    >>> scores = torch.tensor([0.0, 0.0, 1.0], requires_grad=True)
    >>> generator = torch.Generator().manual_seed(0)
    >>> draw = sx.estimators.GumbelStraightThrough(temperature=2.0, generator=generator)
    >>> z = draw(sx.Choice(scores))
    >>> z[2].backward()
    >>> z.detach(), scores.grad
    (tensor([0., 0., 1.]), tensor([-0.0448, -0.0757,  0.1206]))
    """

    temperature: float = 1.0
    samples: int = 1
    generator: torch.Generator | None = field(default=None, repr=False)

    objective = "E[L(z)]"
    distribution = "perturbed"
    noise = "gumbel"
    needs = frozenset(["argmax"])

    def __post_init__(self) -> None:
        at_least(self, "temperature", 0.0, strict=True)
        at_least(self, "samples", 1)

    def applies_to(self, structure: Structure) -> bool:
        return isinstance(structure, Choice | Incremental)

    def __call__(self, structure: Structure) -> Tensor:
        if not isinstance(structure, Choice | Incremental):
            raise ValueError(
                "GumbelStraightThrough: works on sx.Choice and on structures built by a policy, "
                f"got {type(structure).__name__}. Use PerturbAndParse(hard=True)."
            )
        if isinstance(structure, Incremental):
            several = () if self.samples == 1 else (self.samples,)
            return structure.straight_through(
                "gumbel", self.temperature, sample_shape=several, generator=self.generator
            ).z
        with torch.no_grad():
            epsilon = noise.draw("gumbel", structure, self.samples, self.generator)
            z = structure.perturb(epsilon).argmax().to(structure.dtype)

        def pullback(live: Structure, z: Tensor, g: Tensor, epsilon: Tensor) -> Tensor:
            return live.perturb(epsilon).local_softmax(self.temperature) * g

        return surrogate(structure, z, pullback, epsilon)
