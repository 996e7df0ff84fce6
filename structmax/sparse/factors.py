"""The factors of a factor graph: structures, and constraints in the form of structures.

A factor knows the polytope of its own variables: the point of it nearest to another (for
LP-SparseMAP), the marginals of its Gibbs distribution (for belief propagation) and its best vertex.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, Self

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
from structmax.structures.lengths import full

CLEAR = 40.0  # in log-weight: e⁻⁴⁰ of a sum is below the rounding of float64


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

    def possible(self, on: Tensor, off: Tensor) -> tuple[Tensor, Tensor]:
        """Which parts may be on and which may be off, ``(*batch, T)`` each, given those that are:
        exactly, whatever the scores. Of a factor that has no such structure, none."""
        given, shape = on.shape, (*self.structure.batch_shape, *self.structure.event_shape)
        on, off = on.reshape(shape), off.reshape(shape)
        can_on, can_off = torch.zeros_like(on), torch.zeros_like(on)
        for side, sign in ((can_on, 1.0), (can_off, -1.0)):
            while True:  # the best structure has as many as can be of what has not been seen
                left = ~(on | off | side)
                z, fits = self._within(on, off, sign * left)
                can_on |= fits & z
                can_off |= fits & ~z
                if not bool((left & side).any()):
                    break
        return can_on.reshape(given), can_off.reshape(given)

    def _within(self, on: Tensor, off: Tensor, gains: Tensor) -> tuple[Tensor, Tensor]:
        """The best structure with some parts on and some off, at gains from −1 to 1, and whether
        there is one, bool ``(*batch, *factors, *parts)``."""
        event = len(self.structure.event_shape)
        forced = (self.structure.event_shape.numel() + 1.0) * on  # more than all gains together
        gains = torch.where(off, -math.inf, forced + gains).double()
        parts = self.structure._with_gains(gains)._parts()
        value, counts = self.structure._argmax_parts(parts)
        z = counts[0] > 0
        fits = (value > -math.inf) & (z | ~on).flatten(-event).all(-1)
        return z, fits[(..., *[None] * event)]

    def log_odds(self, scores: Tensor, on: Tensor, off: Tensor) -> Tensor:
        """log p/(1 − p) of the parts under the Gibbs distribution of the structures that have some
        parts ``on`` and some ``off``, in float64; 0 of these. The others must be undecided:
        ``possible`` either way."""
        shape = (*self.structure.batch_shape, *self.structure.event_shape)
        free = ~(on | off).reshape(shape)
        scores = torch.where(off, -math.inf, torch.where(on, self._lift(scores, on, off), scores))
        structure = self._at(scores)
        given = p = structure.marginals().double()
        # p is right in its relative error; of subsets, only in its absolute error
        least = 1e-6 if isinstance(self.structure, KSubset) else 1e-290
        sharp = free & ((p.detach() > 1 - 1e-6) | (p.detach() < least))
        p = torch.where(free & ~sharp, p, 0.5)
        odds = p.log() - (1 - p).log()
        if bool(sharp.any()):
            odds = odds.masked_scatter(sharp, _sharp_odds(structure, sharp))
        odds = torch.where(given.isnan(), given, odds)  # of an item without a structure
        return odds.reshape(scores.shape)

    @torch.no_grad()
    def _lift(self, scores: Tensor, on: Tensor, off: Tensor) -> Tensor:
        """The score, the same for all parts of a structure that are on, at which structures without
        one of them weigh nothing: their sum is at most A at score 0, that of the others at least
        the weight of any one of them."""
        if not bool(on.any()):
            return torch.zeros_like(scores)
        shape, event = self.structure.batch_shape, self.structure.event_shape
        scores = torch.where(on, 0.0, scores)
        base = self._at(torch.where(off, -math.inf, scores))
        size = scores.abs().amax(-1, keepdim=True).clamp(min=1e-300)
        whole = (*shape, *event)
        gains = (scores / size).reshape(whole)
        z, _ = self._within(on.reshape(whole), off.reshape(whole), gains)
        more = base.log_partition() - base.score(z.to(scores)) + CLEAR
        return more[(..., *[None] * len(event))].expand(whole).reshape(scores.shape)

    def judge(self, scores: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Whether 0/1 values of the parts ``(*batch, T)`` are structures, ``(*batch)``, and by how
        much their score is below that of the best."""
        structure, batch = self._at(scores), z.shape[:-1]
        best = structure.argmax()
        z = z.reshape(best.shape).to(best)
        nearest = self.structure._with_gains(2 * z - 1).argmax()  # z itself if it is a structure
        fits = (nearest == z).flatten(-len(structure.event_shape)).all(-1)
        lost = structure.score(best) - structure.score(torch.where(_like(fits, z), z, best))
        return _per_item(fits, batch).all(-1), _per_item(lost.double(), batch).sum(-1)

    def scores(self, shape: torch.Size) -> Tensor | None:
        """The structure's own scores of its parts, ``(*batch, T)``, 0 where they are not finite; of
        parts that it never has (``never``) they may be anything."""
        primary = self.structure.primary
        return torch.where(primary.abs() < math.inf, primary, 0.0).reshape(shape)

    def never(self, shape: torch.Size) -> Tensor:
        """Which parts no structure has, whatever the scores of the variables, ``(*batch, T)``."""
        primary = self.structure.primary.detach()
        return (~self.structure._usable_parts() | (primary == -math.inf)).reshape(shape)

    def largest(self, batch: torch.Size) -> Tensor:
        """The largest additional score by magnitude, ``(*batch)``; those that are not finite, and
        those in the padding, count 0."""
        largest = self.structure.primary.new_zeros(batch, dtype=torch.float64)
        parts = self.structure._parts()
        if len(parts) == 1:
            return largest
        for t in self.structure._unpack(self.structure._pack(parts))[1:]:
            t = torch.where(t.isfinite(), t.detach().abs().double(), 0.0)
            if t.numel():
                largest = torch.maximum(largest, _per_item(t, batch).amax(-1))
        return largest

    def scaled(self, by: Tensor) -> Self | None:
        """The same factor with every score of an item multiplied by ``(*batch)``; None if the
        scores of additional parts are no multiples of its tensors (as in grammars of low rank)."""
        factors, scaled = len(self.structure.batch_shape) - by.dim(), {}
        for name, (t, event) in self.structure._tensors().items():
            times = by[(..., *[None] * (factors + event))]
            scaled[name] = t * times if t.is_floating_point() else t
        new = self.rebuild(scaled)
        for old, found in zip(self.structure._parts()[1:], new.structure._parts()[1:], strict=True):
            wanted = old.detach().double() * by[(..., *[None] * (old.dim() - by.dim()))]
            off = torch.where(wanted.isfinite(), found.detach() - wanted, 0.0).abs()
            if bool((off > 1e-6 * (1 + wanted.abs())).any()):
                return None
        return new

    def pick(self, where: tuple[Tensor, ...], batch_dims: int) -> Self:
        """The factors of some items of the batch, indexed by ``where``."""
        new, structure = copy.copy(self), self.structure
        if not batch_dims:
            structure = structure.expand((1, *structure.batch_shape))
        new.structure, new._last = structure[where], None
        return new

    def tensors(self) -> dict[str, Tensor]:
        return {name: t for name, (t, _) in self.structure._tensors().items()}

    def rebuild(self, tensors: dict[str, Tensor]) -> Self:
        """The same factor with other tensors."""
        new = copy.copy(self)
        new.structure = self.structure._rebuild(**tensors)
        return new


class Logic(Factor):
    """A constraint on how many of n variables are on, whose nearest point has a closed form."""

    def __init__(self, least: int, most: int, scores: Tensor, ids: Tensor) -> None:
        n = scores.shape[-1]
        exactly_one = least == most == 1
        super().__init__(Choice(scores) if exactly_one else KSubset(scores, (least, most)), ids)
        self._least, self._most = least, min(most, n)

    def scores(self, shape: torch.Size) -> Tensor | None:
        return None

    def check_off(self, off: Tensor) -> None:
        """Raises if too many of the variables are switched off, a mask ``(*batch, T)``."""
        structure = self.structure
        left = (~off).reshape(*structure.batch_shape, *structure.event_shape).sum(-1)
        short = left < self._least
        if bool(short.any()):
            where = tuple(short.nonzero()[0].tolist())
            item = where[: off.dim() - 1]
            raise ValueError(
                f"FactorGraph: {f'item {item[0] if len(item) == 1 else item}: ' if item else ''}a "
                f"constraint needs {self._least} of its {structure.event_shape[0]} variables to be "
                f"on, but only {int(left[where])} are not switched off (-inf). Switch off fewer."
            )

    def possible(self, on: Tensor, off: Tensor) -> tuple[Tensor, Tensor]:
        n = self.structure.event_shape[0]
        chosen, left = (x.unflatten(-1, (-1, n)) for x in (on, ~off))
        least, most = chosen.sum(-1, keepdim=True), left.sum(-1, keepdim=True)
        fits = (
            (least <= self._most) & (most >= self._least) & ~(chosen & ~left).any(-1, keepdim=True)
        )
        can_on = fits & left & (chosen | (least < self._most))
        can_off = fits & ~chosen & (~left | (most > self._least))
        return can_on.reshape(on.shape), can_off.reshape(off.shape)

    def scaled(self, by: Tensor) -> Self | None:
        return self

    def nearest(self, points: Tensor) -> Tensor:
        x = points.reshape(*self.structure.batch_shape, *self.structure.event_shape)
        inside = torch.where(x == -math.inf, 0.0, x).clamp(0, 1)
        total = inside.sum(-1, keepdim=True)
        for bound, wrong in ((self._most, total > self._most), (self._least, total < self._least)):
            if bool(wrong.any()):
                given = torch.where(wrong, x, 0.0)  # the other rows may have too few for the bound
                bounded = sparsemax(given) if bound == 1 else budgetmax(given, bound)
                inside = torch.where(wrong, bounded, inside)
        return inside.reshape(points.shape)


def _per_item(t: Tensor, batch: torch.Size) -> Tensor:
    """``(*batch, ...)`` as ``(*batch, n)``."""
    return t.reshape(*batch, t.shape[len(batch) :].numel())


def _like(mask: Tensor, z: Tensor) -> Tensor:
    return mask[(..., *[None] * (z.dim() - mask.dim()))]


def _sharp_odds(structure: Any, sharp: Tensor) -> Tensor:
    """log p/(1 − p) of some parts, a mask ``(*batch, *parts)``, where p is 0 or 1 but for rounding.

    It is the log-partition of the structures with the part, less that of those without it. A score
    at which the others weigh nothing confines them to the first.
    """
    count = len(structure.batch_shape)
    where = sharp.nonzero(as_tuple=True)
    items = structure[where[:count]] if count else structure.expand(where[0].shape)
    primary = items.primary
    this = torch.zeros_like(primary, dtype=torch.bool)
    this[(torch.arange(len(this), device=this.device), *where[count:])] = True
    with torch.no_grad():
        high = items.log_partition() - structure.max_marginals()[sharp] + CLEAR  # (k)
    raised = torch.where(this, primary + high[(..., *[None] * (this.dim() - 1))], primary)
    with_it = items._replace_primary(raised).log_partition()
    without = items._replace_primary(torch.where(this, -math.inf, primary)).log_partition()
    return with_it.double() - high - without.double()


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

    _additional = ("both",)

    def _given_scores(self) -> dict[str, tuple[Tensor, checks.Mask]]:
        return {"scores": (self.scores, None), "both": (self.both, None)}

    def _tensors(self) -> dict[str, tuple[Tensor, int]]:
        return {"scores": (self.scores, 1), "both": (self.both, 0)}

    def _options(self) -> dict[str, Any]:
        return {}

    def _unvalidated_parts(self) -> tuple[Tensor, ...]:
        dtype = torch.promote_types(self.scores.dtype, torch.float32)
        both = self.both.to(dtype)[..., None]
        return self.scores.to(dtype).expand(*self.batch_shape, 2), both.expand(*self.batch_shape, 1)

    def _forest_key(self) -> str:
        return name_of("pair", ())

    def _goal(self) -> Tensor:
        return full(self.batch_shape, 2, self.scores.device, torch.int32)

    def _replace_primary(self, scores: Tensor, **others: Tensor) -> Pair:
        return self._rebuild(**{"both": self.both, **others, "scores": scores})

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
