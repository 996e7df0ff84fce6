"""The factors of a factor graph: structures, and constraints in the form of structures.

A factor knows the polytope of its own variables: the point of it nearest to another (for
LP-SparseMAP), the marginals of its Gibbs distribution (for belief propagation) and its best vertex.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from structmax import checks
from structmax.forest.topology import Forest, ForestBuilder, family, name_of
from structmax.maps.budgetmax import budgetmax
from structmax.maps.sparsemax import sparsemax
from structmax.smoothing import Smoothing
from structmax.structures.choice import Choice
from structmax.structures.dynamic import DynamicStructure
from structmax.structures.ksubset import KSubset


class Factor:
    """Any structure over some of the variables, many at a time.

    ``ids`` is flat, one for each part of each of the factors, ``~i`` for the negation of variable
    i. The structure has batch shape ``(*batch, *factors)``; only its additional scores and its
    forbidden parts matter here.
    """

    def __init__(self, structure: Any, ids: Tensor) -> None:
        self.structure, self.ids = structure, ids
        self._last: Any = None

    def _at(self, points: Tensor) -> Any:
        """The structure with other scores of its parts, ``(*batch, T)``."""
        structure = self.structure
        shape = (*structure.batch_shape, *structure.event_shape)
        allowed = structure.primary.detach() != -math.inf
        return structure._replace_primary(torch.where(allowed, points.reshape(shape), -math.inf))

    def nearest(self, points: Tensor) -> Tensor:
        """argmax over u in the polytope of ⟨point, u⟩ + additional scores − ½‖u‖²."""
        solved = self._at(points).sparsemap(tol=1e-9, init=self._last)
        self._last = solved if not torch.is_grad_enabled() else self._last
        return solved.marginals.reshape(points.shape)

    def marginals(self, scores: Tensor) -> Tensor:
        """P(part) under the Gibbs distribution."""
        return self._at(scores).marginals().reshape(scores.shape)

    def allows(self, z: Tensor) -> Tensor:
        """Whether 0/1 values of the parts ``(*batch, T)`` are structures, ``(*batch)``."""
        gains = (2 * z - 1).reshape(*self.structure.batch_shape, *self.structure.event_shape)
        best = self.structure._with_gains(gains).argmax()  # z itself if it is a structure
        return (best.reshape(z.shape) == z).all(-1)

    def scores(self, shape: torch.Size) -> Tensor | None:
        """The structure's own scores of its parts, ``(*batch, T)``; what it forbids counts 0."""
        primary = self.structure.primary
        return torch.where(primary.abs() < math.inf, primary, 0.0).reshape(shape)

    def scaled(self, by: float) -> Factor:
        """The same factor with every score multiplied."""
        tensors = {k: t for k, (t, _) in self.structure._tensors().items()}
        scaled = {k: t.detach() * by if t.is_floating_point() else t for k, t in tensors.items()}
        return Factor(self.structure._rebuild(**scaled), self.ids)


class Logic(Factor):
    """A constraint on how many of n variables are on, whose nearest point has a closed form."""

    def __init__(self, least: int, most: int, scores: Tensor, ids: Tensor) -> None:
        n = scores.shape[-1]
        exactly_one = least == most == 1
        super().__init__(Choice(scores) if exactly_one else KSubset(scores, (least, most)), ids)
        self._least, self._most = least, min(most, n)

    def scores(self, shape: torch.Size) -> Tensor | None:
        return None

    def scaled(self, by: float) -> Logic:
        return self

    def nearest(self, points: Tensor) -> Tensor:
        x = points.reshape(*self.structure.batch_shape, *self.structure.event_shape)
        x = torch.where(self.structure.primary != -math.inf, x, -math.inf)
        inside = torch.where(x == -math.inf, 0.0, x).clamp(0, 1)
        total = inside.sum(-1, keepdim=True)
        for bound, wrong in ((self._most, total > self._most), (self._least, total < self._least)):
            if bool(wrong.any()):
                bounded = sparsemax(x) if bound == 1 else budgetmax(x, bound)
                inside = torch.where(wrong, bounded, inside)
        return inside.reshape(points.shape)


@family
def pair() -> Forest:
    """Parts: the first, the second, both. The goal has one edge for each of the four cases."""
    draw = ForestBuilder()
    first, second, goal = draw.node(0), draw.node(1), draw.node()
    draw.edge(goal)
    draw.edge(goal, first)
    draw.edge(goal, second)
    draw.edge(goal, first, second, part=2)
    return draw.build(3)


class Pair(DynamicStructure):
    """Two binary variables, with a score that counts if both are on.

    Args:
        scores: of each, ``(*B, 2)``
        both: of both together, ``(*B)``
    """

    def __init__(
        self,
        scores: Tensor,
        both: Tensor,
        smoothing: Smoothing | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.scores, self.both = scores, both
        batch = checks.batch_shape("Pair", **self._tensors())
        super().__init__(batch, (2,), smoothing, validate_args)
        if self._validate_args and checks.can_look():
            checks.values("Pair", {"scores": (scores, None), "both": (both, None)})

    def _tensors(self) -> dict[str, tuple[Tensor, int]]:
        return {"scores": (self.scores, 1), "both": (self.both, 0)}

    def _options(self) -> dict[str, Any]:
        return {}

    def _parts(self) -> tuple[Tensor, ...]:
        dtype = torch.promote_types(self.scores.dtype, torch.float32)
        both = self.both.to(dtype)[..., None]
        return self.scores.to(dtype).expand(*self.batch_shape, 2), both.expand(*self.batch_shape, 1)

    def _forest_key(self) -> str:
        return name_of("pair", ())

    def _goal(self) -> Tensor:
        return torch.full(self.batch_shape, 2, dtype=torch.int32, device=self.scores.device)

    def _replace_primary(self, scores: Tensor) -> Pair:
        return self._rebuild(scores=scores, both=self.both)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        every = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]], device=self.scores.device)
        every = every.to(self.dtype).reshape(4, *[1] * len(self.batch_shape), 2)
        return every.expand(4, *self.batch_shape, 2) if expand else every

    def decode(self, z: Tensor) -> Any:
        return z.long().tolist()

    def encode(self, obj: Any) -> Tensor:
        return torch.as_tensor(obj, device=self.scores.device).to(self.dtype)


def knapsack_forest(weights: Sequence[int], capacity: int) -> Forest:
    """Subsets of weight at most ``capacity``: node (i, w) is weight w among the first i."""
    draw = ForestBuilder()
    reached = {0: draw.node()}
    draw.edge(reached[0])
    for i, weight in enumerate(weights):
        after: dict[int, int] = {}
        for total in sorted({*reached, *(w + weight for w in reached)}):
            if total > capacity:
                continue
            after[total] = draw.node()
            if total in reached:
                draw.edge(after[total], reached[total])
            if total - weight in reached:
                draw.edge(after[total], reached[total - weight], part=i)
        reached = after
    goal = draw.node()
    for node in reached.values():
        draw.edge(goal, node)
    return draw.build(len(weights))
