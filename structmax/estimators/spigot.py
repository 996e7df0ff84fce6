"""Structured projection of intermediate gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from structmax.estimators.base import Estimator, at_least, call_cost, one_of, surrogate
from structmax.sparse import projection
from structmax.structures.base import IntractableError, Structure
from structmax.structures.grid_path import FreeGridPath
from structmax.structures.parts import PartStructure


@dataclass
class SPIGOT(Estimator):
    """z = argmax(θ), with the gradient z − Proj(z − η ∂L/∂z) onto each item's marginal polytope.

    Peng, Thomson & Smith 2018, "Backpropagating through structured argmax using a SPIGOT". It is
    that of a perceptron loss whose target is pulled back from the cost by a projected gradient
    step (Mihaylova, Niculae & Martins 2020, "Understanding the mechanics of SPIGOT"); their other
    losses, and their further steps m ← Proj(m − η ∂L(m)/∂m), are here too:

    - ``variant="euclidean"``: the above. Needs sparsemap.
    - ``"cross-entropy"``: z = μ(θ), the marginals, and the gradient μ − Proj(μ − η ∂L/∂μ). Needs
      sparsemap, log_partition and marginals.
    - ``"exponentiated"``: z = μ(θ), and the gradient μ(θ) − μ(θ − η ∂L/∂μ): the step in the
      geometry of the smoothing, exponentiated gradient under ``sx.Shannon()``. Needs log_partition
      and marginals.

    Not divided by η. Biased. Additional parts get the difference of their expected counts.

    Args:
        step: η; what reaches z is ∂L/∂z of the whole loss, so 1/batch with a mean over the batch
        pullback_steps: how many steps pull the target back; more than one call the cost again
            between structures, so they need ``.loss``
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
    needs = frozenset(["argmax", "score", "sparsemap"])

    def __post_init__(self) -> None:
        at_least(self, "step", 0.0, strict=True)
        at_least(self, "pullback_steps", 1)
        one_of(self, "variant", ("euclidean", "cross-entropy", "exponentiated"))
        if self.variant != "euclidean":
            more = {"sparsemap", "score"} if self.variant == "cross-entropy" else set()
            self.objective = "L(E[z])"
            self.needs = frozenset({"log_partition", "marginals", *more})

    def __call__(self, structure: Structure) -> Tensor:
        if self.pullback_steps > 1:
            raise TypeError(
                f"SPIGOT: pullback_steps={self.pullback_steps} call the cost again. "
                "Use .loss(structure, cost)."
            )
        return surrogate(structure, self._z(structure), self._pullback)

    def loss(self, structure: Structure, cost: Callable[..., Tensor]) -> Tensor:
        outer: dict[str, Tensor] = {}  # the gradient of the whole loss in each item's cost

        def slope(point: Tensor) -> Tensor:
            with torch.enable_grad():
                leaf = point.requires_grad_()
                costs = call_cost(cost, leaf, structure)
                return torch.autograd.grad(costs, leaf, outer["costs"])[0]

        def pullback(live: PartStructure, z: Tensor, g: Tensor) -> Tensor:
            return self._pullback(live, z, g, slope)

        costs = call_cost(cost, surrogate(structure, self._z(structure), pullback), structure)
        if costs.requires_grad:
            costs.register_hook(lambda g: outer.update(costs=g))
        return costs

    def applies_to(self, structure: Structure) -> bool:
        # projections would ask for the best path at scores of any sign
        return super().applies_to(structure) and not isinstance(structure, FreeGridPath)

    @torch.no_grad()
    def _z(self, structure: Structure) -> Tensor:
        if isinstance(structure, FreeGridPath):
            raise IntractableError(
                'SPIGOT: projections onto the paths of GridPath(moves="all") are intractable. '
                'Use BlackBox or IMLE, or moves="monotone".'
            )
        return structure.argmax() if self.variant == "euclidean" else structure.marginals()

    def _pullback(
        self,
        structure: PartStructure,
        z: Tensor,
        g: Tensor,
        slope: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """What has the gradient z − target in all scores; ``slope`` is ∂L/∂z at further points."""
        point, moved = z, torch.zeros_like(g)
        with torch.no_grad():
            for t in range(self.pullback_steps):
                g = g if t == 0 or slope is None else slope(point)
                moved = moved - self.step * g
                if self.variant == "exponentiated":
                    point = structure.perturb(moved).marginals()
                else:
                    target = projection(structure, point - self.step * g)
                    point = target.marginals
        if self.variant == "exponentiated":
            return structure.log_partition() - structure.perturb(moved).log_partition()
        every = structure.score(target.structures.movedim(len(structure.batch_shape), 0))
        own = structure.score(z) if self.variant == "euclidean" else structure.log_partition()
        return own - (target.probs.movedim(-1, 0) * every).sum(0)
