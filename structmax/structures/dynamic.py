"""Structures answered by the forest engine.

A subclass draws its graph: it names a forest, packs its scores into the forest's vector of parts,
and says which node is each item's goal. Every query follows from that.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structmax.forest import naive, ops
from structmax.forest.topology import Forest, lookup
from structmax.primitive import backend_for, is_transforming
from structmax.smoothing import SHANNON, Hard
from structmax.structures import checks
from structmax.structures.base import Ranked, Structure, TopK, dot


class DynamicStructure(Structure):
    """A structure whose derivations are those of a forest, one to one."""

    # -- what a subclass says ---------------------------------------------------------------------

    @abstractmethod
    def _parts(self) -> tuple[Tensor, ...]:
        """Scores of all parts, primary first, each ``(*batch, *event)``, float32 or float64."""

    @abstractmethod
    def _forest_key(self) -> str:
        """The name of the forest (see ``forest.topology``)."""

    @abstractmethod
    def _goal(self) -> Tensor:
        """Each item's goal node, ``(*batch)``."""

    @abstractmethod
    def _replace_primary(self, scores: Tensor) -> DynamicStructure:
        """The same structure with other primary scores, ``(*batch, *parts)``."""

    def _incompatible(self, include: Tensor) -> Tensor:
        """The primary parts that cannot stand beside those included, as a mask."""
        raise ValueError(
            f"{self._name}.condition: include= is not defined here, because the parts that exclude "
            "each other are not known. Use exclude=."
        )

    def _pack(self, parts: Sequence[Tensor]) -> Tensor:
        """The forest's vector of scores ``(*batch, P)``. Padding becomes 0."""
        batch = len(self.batch_shape)
        return torch.cat([p.flatten(batch) for p in parts], -1)

    def _unpack(self, flat: Tensor) -> tuple[Tensor, ...]:
        """The inverse of ``_pack``."""
        out, start = [], 0
        for part in self._parts():
            event = part.shape[len(self.batch_shape) :]
            out.append(flat[..., start : start + event.numel()].unflatten(-1, event))
            start += event.numel()
        return tuple(out)

    def _width(self) -> int:
        """How many of the forest's leading parts are primary."""
        return self.event_shape.numel()

    def _to_event(self, flat: Tensor, fill: float = 0.0) -> Tensor:
        """Primary parts ``(..., *batch, width)`` as ``(..., *batch, *parts)``."""
        return flat.unflatten(-1, self.event_shape)

    def _derivation_size(self) -> int:
        """The most nodes in a derivation."""
        return lookup(self._forest_key()).longest

    def _aligned(self, q: Structure) -> tuple[DynamicStructure, DynamicStructure]:
        """This structure and q with the same parts and forest."""
        self._same_kind(q)
        if not isinstance(q, DynamicStructure) or not same_forest(
            self._forest_key(), q._forest_key()
        ):
            raise ValueError(
                f"{self._name}: both distributions must be over the derivations of one forest, "
                f"got {type(q).__name__} over another."
            )
        return self, q

    # -- value and gradient -----------------------------------------------------------------------

    def _value(self) -> Tensor:
        args = (self._goal(),), self._forest_key(), self.smoothing.code
        return ops.forest.value((self._pack(self._parts()),), *args)

    def _value_and_gradient(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        args = (self._goal(),), self._forest_key(), self.smoothing.code
        value, mu = ops.forest.value_and_gradient((self._pack(self._parts()),), *args)
        return value, self._unpack(mu)

    def _cached(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Value and gradient; kept for the next query where nothing watches the computation."""
        tensors = [t for t, _ in self._tensors().values()]
        if (
            torch.compiler.is_compiling()
            or is_transforming(tensors)
            or torch.is_inference_mode_enabled()
            or any(t.is_inference() for t in tensors)
        ):
            return self._value_and_gradient()
        kept = self.__dict__.get("_kept")
        if kept is None or kept[0] != _state(tensors, *kept[1:]):
            value, mu = self._value_and_gradient()
            kept = _state(tensors, value, mu), value, mu
            self.__dict__["_kept"] = kept
        _, value, mu = kept
        return value.detach(), tuple(m.detach() for m in mu)  # ours stay without a gradient

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_kept"}

    @property
    def _is_gibbs(self) -> bool:
        """Whether log_prob is (score − A)/γ; otherwise it is that of the walk."""
        return self.smoothing.code[0] == SHANNON

    def log_partition(self) -> Tensor:
        kept = self.__dict__.get("_kept")
        return self._value() if kept is None else self._cached()[0]

    def _refuse_infeasible(self, query: str, value: Tensor, answer: Tensor) -> Tensor:
        """The answer; an item without a structure is an error, or NaN where one cannot look."""
        value = value.detach()
        if self._validate_args and checks.can_look():
            checks.feasible(self._name, query, value)
            return answer
        good = value.abs() < math.inf  # no −inf, nor the NaN or +inf of scores not looked at
        if value.device.type == "cpu" and checks.can_look() and bool(good.all()):
            return answer
        return torch.where(good[(..., *[None] * (answer.dim() - good.dim()))], answer, math.nan)

    def marginals(self) -> Tensor:
        value, mu = self._cached()
        return self._refuse_infeasible("marginals", value, mu[0]).to(self.dtype)

    # -- discrete queries -------------------------------------------------------------------------

    def argmax(self) -> Tensor:
        theta = self._pack(self._parts()).detach()
        value, z = ops.argmax(theta, self._goal(), self._forest_key(), self._width())
        z = self._refuse_infeasible("argmax", value, self._to_event(z))
        return z.to(self.dtype)

    def sample(
        self, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None
    ) -> Tensor:
        shape = torch.Size(sample_shape)
        theta = self._pack(self._parts()).detach()
        if self._validate_args:
            with torch.no_grad():
                checks.feasible(self._name, "sample", self.log_partition())
        numbers = torch.rand(
            (shape.numel(), *self.batch_shape, self._derivation_size()),
            dtype=torch.float64,
            device=theta.device,
            generator=generator,
        )
        key, code = self._forest_key(), list(self.smoothing.code)
        z = self._to_event(ops.sample(theta, self._goal(), numbers, key, code, self._width()))
        return z.reshape(*shape, *self.batch_shape, *self.event_shape).to(self.dtype)

    def topk(self, k: int) -> TopK:
        if not isinstance(k, int) or k < 1:
            raise ValueError(f"{self._name}.topk: k must be at least 1, an integer, got {k!r}.")
        theta = self._pack(self._parts())
        scores, z = ops.kbest(theta.detach(), self._goal(), self._forest_key(), k, self._width())
        at = len(self.batch_shape)
        z = self._to_event(z.movedim(at, 0)).movedim(0, at).to(self.dtype)
        exists = scores > -math.inf
        if is_transforming([theta]):  # the same numbers, with a gradient
            real = exists[(..., *[None] * len(self.event_shape))]
            safe = torch.where(real, z, z.narrow(at, 0, 1))
            again = self._score(safe.movedim(at, 0)).movedim(0, -1)
            scores = torch.where(exists, again, -math.inf)
        return TopK(z, scores, exists)

    def max_marginals(self) -> Tensor:
        theta = self._pack(self._parts()).detach()
        best = ops.max_marginals(theta, self._goal(), self._forest_key(), self._width())
        return self._to_event(best, -math.inf)

    def mbr(self) -> Tensor:
        """The structure of least expected Hamming cost: argmax of ⟨μ, z⟩ over what is allowed.

        >>> import structmax as sx
        >>> sx.Choice(torch.tensor([0.0, 1.0])).mbr()
        tensor([0., 1.])
        """
        mu = self.marginals().detach()
        return self._with_marginal_scores(mu).argmax()

    def _with_marginal_scores(self, mu: Tensor) -> DynamicStructure:
        """A structure scored by its marginals alone; what is forbidden stays forbidden."""
        allowed = self._parts()[0].detach() > -math.inf
        return self._replace_primary(torch.where(allowed, mu, -math.inf))

    # -- scores and probabilities -----------------------------------------------------------------

    def _edge_use(self, z: Tensor) -> Tensor:
        """Which edges derive each z, ``(items, e)``: the unique best path through its parts."""
        forest = lookup(self._forest_key())
        batch = z.shape[: z.dim() - len(self.event_shape)]
        wide = self.expand(batch)
        parts = [torch.zeros_like(p, dtype=torch.float64) for p in wide._parts()]
        parts[0] = torch.where(z > 0, 1.0, -math.inf).to(torch.float64)
        theta = wide._pack(parts)
        theta = theta.reshape(batch.numel(), theta.shape[-1])
        goal = wide._goal().reshape(-1)
        use = naive.edge_visits(forest, naive.backpointers(forest, theta, Hard()), goal)
        counts = counts_of_edges(forest, use)[:, : self._width()].reshape(*batch, self._width())
        wrong = (wide._to_event(counts) != z).reshape(len(use), self.event_shape.numel()).any(-1)
        if self._validate_args and checks.can_look() and bool(wrong.any()):
            item = int(wrong.nonzero()[0])
            raise ValueError(f"{self._name}: z is not a structure (flattened item {item}).")
        return use

    def _score(self, z: Tensor) -> Tensor:
        """⟨θ, parts of z⟩ for an indicator ``(*sample, *batch, *parts)``."""
        batch = z.shape[: z.dim() - len(self.event_shape)]
        forest = lookup(self._forest_key())
        with torch.no_grad():
            counts = counts_of_edges(forest, self._edge_use(z))
            counts = counts.reshape(*batch, forest.num_parts)
        wide = self.expand(batch)
        theta = wide._pack(wide._parts())
        return dot(theta, counts[..., : theta.shape[-1]].to(theta.dtype), 1)

    def score(self, z: Tensor) -> Tensor:
        return self._score(self._indicator(z))

    def log_prob(self, z: Tensor) -> Tensor:
        if self._is_gibbs:
            return (self.score(z) - self.log_partition()) / self.smoothing.gamma
        z = self._indicator(z)
        batch = z.shape[: z.dim() - len(self.event_shape)]
        with torch.no_grad():
            use = self._edge_use(z)
        q = self._backpointers()
        q = q.expand(*batch, q.shape[-1]).reshape(use.shape)
        return _sum_log(q, use).reshape(batch).to(self._parts()[0].dtype)

    def _backpointers(self) -> Tensor:
        """q ``(*batch, e)`` at every node of the forest, by the naive engine, differentiable."""
        theta = self._pack(self._parts())
        forest = lookup(self._forest_key())
        flat = theta.reshape(self.batch_shape.numel(), theta.shape[-1])
        q = naive.backpointers(forest, flat, self.smoothing)
        return q.reshape(*self.batch_shape, forest.num_edges)

    def cross_entropy(self, q: Structure) -> Tensor:
        p, q = self._aligned(q)
        if q._is_gibbs:
            own, mu = p._cached()
            value = own if q is p else q._value()
            pairs = zip(q._parts(), mu, strict=True)
            total = sum(dot(theta, m, m.dim() - len(p.batch_shape)) for theta, m in pairs)
            total = (value - total) / q.smoothing.gamma
            return p._refuse_infeasible("cross_entropy", own.expand(total.shape), total)
        forest = lookup(p._forest_key())
        batch_shape = torch.broadcast_shapes(p.batch_shape, q.batch_shape)
        p, q = p.expand(batch_shape), q.expand(batch_shape)
        local_p, local_q = (
            s._backpointers().reshape(batch_shape.numel(), forest.num_edges) for s in (p, q)
        )
        use = naive.edge_visits(forest, local_p, p._goal().reshape(-1))
        total = 0.0 - _sum_log(local_q, use)  # no −0 where p is certain
        total = total.reshape(batch_shape).to(self._parts()[0].dtype)
        return p._refuse_infeasible("cross_entropy", p.log_partition(), total)

    def condition(
        self, include: Tensor | None = None, exclude: Tensor | None = None
    ) -> DynamicStructure:
        shape = (*self.batch_shape, *self.event_shape)
        forbidden = torch.zeros(shape, dtype=torch.bool, device=self._parts()[0].device)
        for name, mask in (("include", include), ("exclude", exclude)):
            if mask is None:
                continue
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
                got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
                raise ValueError(
                    f"{self._name}.condition: {name} must be a boolean mask, got {got}."
                )
            try:
                mask = mask.expand(shape)
            except RuntimeError:
                raise ValueError(
                    f"{self._name}.condition: {name} must broadcast to {shape}, "
                    f"got {tuple(mask.shape)}."
                ) from None
            forbidden = forbidden | (self._incompatible(mask) if name == "include" else mask)
        primary = self._parts()[0].to(self.dtype)
        return self._replace_primary(torch.where(forbidden, -math.inf, primary))

    @torch.no_grad()
    def ranked_support(self) -> Iterator[Ranked]:
        k, rank = 4, 0
        while True:
            z, log_prob = self._best_by_score(k) if self._is_gibbs else self._best_by_probability(k)
            while rank < k:
                if not bool((log_prob[..., rank] > -math.inf).any()):
                    return
                yield Ranked(z.select(len(self.batch_shape), rank), log_prob[..., rank])
                rank += 1
            k *= 2

    def _best_by_score(self, k: int) -> tuple[Tensor, Tensor]:
        best = self.topk(k)
        value = self.log_partition()[..., None]
        log_prob = (best.scores - value) / self.smoothing.gamma
        return best.structures, torch.where(best.exists, log_prob, -math.inf)

    def _best_by_probability(self, k: int) -> tuple[Tensor, Tensor]:
        """The k likeliest walks: k best derivations when every edge scores log q."""
        forest = lookup(self._forest_key())
        edges = forest_of_edges(forest)
        log_q = self._backpointers().log()
        log_prob, use = ops.kbest(log_q, self._goal(), edges.key, k, forest.num_edges)
        at = len(self.batch_shape)
        z = counts_of_edges(forest, use)[..., : self._width()].movedim(at, 0)
        z = self._to_event(z).movedim(0, at)
        return z.to(self.dtype), log_prob.to(self._parts()[0].dtype)


def same_forest(one: str, other: str) -> bool:
    """Whether two names stand for the same topology."""
    if one == other:
        return True
    a, b = lookup(one), lookup(other)
    names = ("head", "tail1", "tail2", "edge_part", "node_part")
    return a.num_parts == b.num_parts and all(
        np.array_equal(getattr(a, name), getattr(b, name)) for name in names
    )


def counts_of_edges(forest: Forest, use: Tensor) -> Tensor:
    """Uses of parts ``(..., P)`` from uses of edges ``(..., e)``: each visit uses one edge."""
    lists = forest.on(use.device)
    counts = use.new_zeros(*use.shape[:-1], forest.num_parts + 1)
    counts = counts.index_add(-1, lists.edge_part.long(), use)
    own = lists.node_part[lists.head.long()].long()
    return counts.index_add(-1, own, use)[..., :-1]


def forest_of_edges(forest: Forest) -> Forest:
    """The same forest with each edge its own part."""
    tail1, tail2 = (
        np.where(t == forest.num_nodes, -1, t).astype(np.int32)
        for t in (forest.tail1, forest.tail2)
    )
    parts = np.arange(forest.num_edges, dtype=np.int32)
    none = np.full(forest.num_nodes, -1, np.int32)
    return Forest(forest.head, tail1, tail2, parts, none, forest.num_edges)


def _state(tensors: Sequence[Tensor], value: Tensor, mu: Sequence[Tensor]) -> list[Any]:
    """What a kept answer depends on: the backend, and that nobody wrote into scores or answer."""
    return [backend_for(tensors[0]), *[t._version for t in (*tensors, value, *mu)]]


def _sum_log(q: Tensor, use: Tensor) -> Tensor:
    """Σ use·log q over the last dimension, with 0·log 0 = 0."""
    used = use > 0
    terms = use * torch.where(used & (q != 0), q, 1.0).log()
    impossible = torch.where(used & (q == 0), -math.inf, 0.0)
    return (terms + impossible).sum(-1)
