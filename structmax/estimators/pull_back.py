"""Targets that a cost pulls back from z by gradient steps: what SPIGOT learns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from structmax.estimators.base import call_cost, straight
from structmax.sparse import projection
from structmax.structures.base import IntractableError, Structure
from structmax.structures.grid_path import FreeGridPath
from structmax.structures.parts import PartStructure

VARIANTS = {  # and the queries that each needs
    "euclidean": frozenset(["argmax", "score", "sparsemap"]),
    "cross-entropy": frozenset(["log_partition", "marginals", "sparsemap"]),
    "exponentiated": frozenset(["log_partition", "marginals"]),
}


class Slope:
    """∂L/∂m at points m between structures, of the whole loss: what further steps go down."""

    def __init__(self, structure: Structure, cost: Callable[..., Tensor]) -> None:
        self.structure, self.cost, self.outer = structure, cost, None

    def watched(self, costs: Tensor) -> Tensor:
        """The same costs; the gradient of the whole loss in each will be known."""
        if costs.requires_grad and not torch._C._are_functorch_transforms_active():
            costs.register_hook(lambda g: setattr(self, "outer", g))
        return costs

    @torch.enable_grad()
    def __call__(self, point: Tensor) -> Tensor:
        if self.outer is None:
            raise TypeError(
                "SPIGOT: more than one of pullback_steps call the cost again in the backward pass, "
                "which torch.func does not see. Use .backward(), or pullback_steps=1."
            )
        leaf = point.requires_grad_()
        costs = call_cost(self.cost, leaf, self.structure)
        return torch.autograd.grad(costs, leaf, self.outer)[0]


@torch.no_grad()
def start(structure: Structure, variant: str) -> Tensor:
    """z, from which the target is pulled back: the argmax, or the marginals."""
    if isinstance(structure, FreeGridPath):  # a projection asks at scores of any sign
        raise IntractableError(
            'SPIGOT: projections onto the paths of GridPath(moves="all") are intractable. '
            'Use BlackBox or IMLE, or moves="monotone".'
        )
    return structure.argmax() if variant == "euclidean" else structure.marginals()


def towards_target(
    structure: PartStructure,
    z: Tensor,
    g: Tensor,
    slope: Slope | None,
    variant: str,
    step: float,
    steps: int,
) -> Tensor:
    """What has the gradient z − target in all scores ``(*batch)``.

    Args:
        z, g: where the cost was taken, and ∂L/∂z there
        slope: gives ∂L/∂m at the points m of further steps
        variant, step, steps: see :class:`SPIGOT`
    """
    point, moved = z, torch.zeros_like(g)
    with torch.no_grad():
        for t in range(steps):
            g = g if t == 0 or slope is None else slope(point)
            moved = moved - step * g
            if variant == "exponentiated":
                point = structure.perturb(moved).marginals()
            else:
                target = projection(structure, point - step * g)
                point = target.marginals
    if variant == "exponentiated":
        return structure.log_partition() - structure.perturb(moved).log_partition()
    if variant == "cross-entropy":
        # Many distributions have the target's mean; additional parts would go to those of any. So
        # they go where the step in the scores takes them.
        primary = straight(structure, z - point).flatten(len(structure.batch_shape)).sum(-1)
        held = structure._replace_primary(structure.primary.detach())
        return primary + held.log_partition() - held.perturb(moved).log_partition()
    every = structure.score(target.structures.movedim(len(structure.batch_shape), 0))
    return structure.score(z) - (target.probs.movedim(-1, 0) * every).sum(0)
