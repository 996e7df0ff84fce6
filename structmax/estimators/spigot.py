"""Structured projection of intermediate gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from structmax.estimators.base import Estimator, at_least, call_cost, one_of, surrogate
from structmax.estimators.pull_back import VARIANTS, Slope, start, towards_target
from structmax.structures.base import Structure
from structmax.structures.grid_path import FreeGridPath


@dataclass
class SPIGOT(Estimator):
    """z = argmax(θ), with the gradient z − Proj(z − η ∂L/∂z) onto each item's marginal polytope.

    Peng, Thomson & Smith 2018, "Backpropagating through structured argmax using a SPIGOT". It is
    that of a perceptron loss whose target is pulled back from the cost (Mihaylova, Niculae &
    Martins 2020, "Understanding the mechanics of SPIGOT"); their other losses, and their further
    steps m ← Proj(m − η ∂L(m)/∂m), are here too:

    - ``variant="euclidean"``: the above. Needs sparsemap.
    - ``"cross-entropy"``: z = μ(θ), and the gradient μ − Proj(μ − η ∂L/∂μ). Needs marginals too.
    - ``"exponentiated"``: z = μ(θ), and the gradient μ(θ) − μ(θ − η ∂L/∂μ): the step in the
      geometry of the smoothing, exponentiated gradient under ``sx.Shannon()``. Needs marginals.

    Not divided by η. Biased. Additional parts (transitions, …) get the difference of their expected
    counts; those of the target are not determined by it under ``"cross-entropy"``, where the step
    of ``"exponentiated"`` takes its place.

    Args:
        step: η; what reaches z is ∂L/∂z of the whole loss, so 1/batch with a mean over the batch
        pullback_steps: how many; more than one call the cost again, so they need ``.loss``
        variant: see above

    >>> import torch, structmax as sx
    >>> scores = torch.tensor([0.0, 0.0, 1.0], requires_grad=True)
    >>> z = sx.estimators.SPIGOT(step=0.5)(sx.Choice(scores))
    >>> (z * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    >>> scores.grad  # z − sparsemax(z − η ∂L/∂z)
    tensor([-0.5000,  0.0000,  0.5000])
    """

    step: float = 1.0
    pullback_steps: int = 1
    variant: str = "euclidean"

    objective = "L(argmax)"
    needs = VARIANTS["euclidean"]

    def __post_init__(self) -> None:
        at_least(self, "step", 0.0, strict=True)
        at_least(self, "pullback_steps", 1)
        one_of(self, "variant", tuple(VARIANTS))
        self.needs = VARIANTS[self.variant]
        self.objective = "L(argmax)" if self.variant == "euclidean" else "L(E[z])"

    def __call__(self, structure: Structure) -> Tensor:
        if self.pullback_steps > 1:
            raise TypeError(
                f"SPIGOT: pullback_steps={self.pullback_steps} call the cost again. "
                "Use .loss(structure, cost)."
            )
        return self._z(structure, None)

    def loss(self, structure: Structure, cost: Callable[..., Tensor]) -> Tensor:
        slope = Slope(structure, cost)
        return slope.watched(call_cost(cost, self._z(structure, slope), structure))

    def applies_to(self, structure: Structure) -> bool:
        return super().applies_to(structure) and not isinstance(structure, FreeGridPath)

    def _z(self, structure: Structure, slope: Slope | None) -> Tensor:
        how = self.variant, self.step, self.pullback_steps
        z = start(structure, self.variant)
        return surrogate(structure, z, lambda live, z, g: towards_target(live, z, g, slope, *how))
