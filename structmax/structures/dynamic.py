"""Structures answered by the forest engine.

A subclass draws its graph: it names a forest, packs its scores into the forest's vector of parts,
and says which node is each item's goal. Every query follows from that.
"""

from __future__ import annotations

import bisect
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structmax import checks
from structmax.forest import naive, ops
from structmax.forest.topology import Forest, lookup, untraced
from structmax.primitive import Omega, recordable, recording, register
from structmax.smoothing import Hard, Smoothing, from_code
from structmax.structures.base import Structure, dot, uniform
from structmax.structures.parts import PartStructure

MOST = 1_000_000  # structures in a list of all
MOST_VISITS = 1 << 28  # nodes that they visit
LISTS = ("ptr", "head", "tail1", "tail2", "edge_part")


class DynamicStructure(PartStructure):
    """A structure whose derivations are those of a forest, one to one."""

    # -- what a subclass says ---------------------------------------------------------------------

    @abstractmethod
    def _forest_key(self) -> str:
        """The name of the forest (see ``forest.topology``)."""

    @abstractmethod
    def _goal(self) -> Tensor:
        """Each item's goal node, ``(*batch)``."""

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
        return longest(self._forest_key())

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

    def _same_goals(self, q: DynamicStructure, what: str) -> None:
        """An error where both have other goals, which follow from ``what``."""
        if (
            q is not self
            and checks.can_look(self._first)
            and bool((self._goal() != q._goal()).any())
        ):
            raise ValueError(f"{self._name}: both distributions must have the same {what}.")

    # -- value and gradient -----------------------------------------------------------------------

    def _theta(self) -> Tensor:
        """The forest's scores ``(*batch, P)`` for A, its gradient and draws: a structure may take
        out what all of its derivations share."""
        return self._packed()

    def _packed(self) -> Tensor:
        """The forest's scores ``(*batch, P)``."""
        return self._pack(self._parts())

    def _value(self) -> Tensor:
        args = (self._goal(),), self._forest_key(), self.smoothing.code
        return self._restored(ops.forest.value((self._theta(),), *args))

    def _restored(self, value: Tensor) -> Tensor:
        """A of the scores, given that of ``_theta``."""
        return value

    def _value_and_gradient(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        args = (self._goal(),), self._forest_key(), self.smoothing.code
        value, mu = ops.forest.value_and_gradient((self._theta(),), *args)
        return self._restored(value), self._unpack(mu)

    # -- discrete queries -------------------------------------------------------------------------

    def argmax(self) -> Tensor:
        theta = self._packed().detach()
        value, z = ops.best(theta, self._goal(), self._forest_key(), self._width())
        z = self._refuse_infeasible("argmax", value, self._to_event(z))
        return z.to(self.dtype)

    def _argmax_parts(self, parts: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        theta = self._pack(parts)
        value, counts = ops.best(theta, self._goal(), self._forest_key(), theta.shape[-1])
        return value, self._unpack(counts)

    def sample(
        self, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None
    ) -> Tensor:
        shape = checks.sample_shape(self._name, sample_shape)
        theta = self._theta().detach()
        if self._validate_args:
            with torch.no_grad():
                self._check_feasible("sample", self.log_partition())
        size = shape.numel(), *self.batch_shape, self._derivation_size()
        numbers = uniform(size, theta.device, generator)
        key, code = self._forest_key(), list(self.smoothing.code)
        z = self._to_event(ops.sample(theta, self._goal(), numbers, key, code, self._width()))
        return z.reshape(*shape, *self.batch_shape, *self.event_shape).to(self.dtype)

    def _kbest(self, k: int) -> tuple[Tensor, Tensor]:
        theta = self._packed().detach()
        scores, z = ops.kbest(theta, self._goal(), self._forest_key(), k, self._width())
        at = len(self.batch_shape)
        return scores, self._to_event(z.movedim(at, 0)).movedim(0, at)

    def max_marginals(self) -> Tensor:
        theta = self._packed().detach()
        best = ops.max_marginals(theta, self._goal(), self._forest_key(), self._width())
        return self._to_event(best, -math.inf)

    # -- scores and probabilities -----------------------------------------------------------------

    def _edge_use(self, z: Tensor) -> Tensor:
        """Which edges derive each z, ``(items, e)``: the unique best path through its parts."""
        key = self._forest_key()
        batch = z.shape[: z.dim() - len(self.event_shape)]
        wide = self.expand(batch)
        theta = wide._within(z)
        theta = theta.reshape(batch.numel(), theta.shape[-1])
        goal = wide._goal().reshape(-1)
        use = edge_visits(key, backpointers(key, theta, Hard()), goal)
        if checks.can_look(self._first):
            forest = lookup(key)
            counts = counts_of_edges(forest, use).reshape(*batch, forest.num_parts)
            wide._refuse_no_structure(z, counts)
        return use

    def _within(self, z: Tensor) -> Tensor:
        """Packed scores at which the best derivation is that of z."""
        parts = [torch.zeros_like(p, dtype=torch.float64) for p in self._parts()]
        parts[0] = torch.where(z > 0, 1.0, -math.inf).to(torch.float64)
        return self._pack(parts)

    def _refuse_no_structure(self, z: Tensor, counts: Tensor) -> None:
        """z must have the parts of its derivation, given by counts ``(*batch, P)``."""
        if self._validate_args and checks.can_look(self._first):
            wrong = self._to_event(counts[..., : self._width()]) != z
            wrong = wrong.reshape(self.batch_shape.numel(), self.event_shape.numel()).any(-1)
            if bool(wrong.any()):
                item = int(wrong.nonzero()[0])
                raise ValueError(f"{self._name}: z is not a structure (flattened item {item}).")

    def _score(self, z: Tensor) -> Tensor:
        """⟨θ, parts of z⟩ for an indicator ``(*sample, *batch, *parts)``."""
        wide = self.expand(z.shape[: z.dim() - len(self.event_shape)])
        theta = wide._packed()
        with torch.no_grad():
            goal, key = wide._goal(), self._forest_key()
            _, counts = ops.argmax(wide._within(z), goal, key, theta.shape[-1])
            wide._refuse_no_structure(z, counts)
        return dot(theta, counts.to(theta.dtype), 1)

    def log_prob(self, z: Tensor) -> Tensor:
        if self._is_gibbs:
            return super().log_prob(z)
        z = self._indicator(z)
        batch = z.shape[: z.dim() - len(self.event_shape)]
        with torch.no_grad():
            use = self._edge_use(z)
        q = self._backpointers()
        q = q.expand(*batch, q.shape[-1]).reshape(use.shape)
        log_prob = _sum_log(q, use).reshape(batch).to(self._parts()[0].dtype)
        with torch.no_grad():
            value = self.log_partition()
        # an item without a structure, and one that is bad and that nobody looked at
        return torch.where(
            value.abs() < math.inf, log_prob, torch.where(value < 0, value, math.nan)
        )

    def _backpointers(self) -> Tensor:
        """q ``(*batch, e)`` at every node of the forest, differentiable."""
        theta = self._theta()
        flat = theta.reshape(self.batch_shape.numel(), theta.shape[-1])
        q = backpointers(self._forest_key(), flat, self.smoothing)
        return q.reshape(*self.batch_shape, q.shape[-1])

    def cross_entropy(self, q: Structure) -> Tensor:
        p, q = self._aligned(q)
        if q._is_gibbs:
            return p._gibbs_cross_entropy(q, *p._value_and_gradient())
        key = p._forest_key()
        batch_shape = torch.broadcast_shapes(p.batch_shape, q.batch_shape)
        same, shape = q is p, (batch_shape.numel(), num_edges(key))
        p, q = p.expand(batch_shape), q.expand(batch_shape)
        local_p = p._backpointers().reshape(shape)
        local_q = local_p if same else q._backpointers().reshape(shape)
        use = edge_visits(key, local_p, p._goal().reshape(-1))
        total = 0.0 - _sum_log(local_q, use)  # no −0 where p is certain
        total = total.reshape(batch_shape).to(self._parts()[0].dtype)
        own = p.log_partition()
        other = own if same else q.log_partition().detach()
        return p._cross_entropy(own, other, total == math.inf, total)

    def _likeliest(self, k: int) -> tuple[Tensor, Tensor]:
        if self._is_gibbs:
            return super()._likeliest(k)
        if torch.compiler.is_compiling():
            return _uncompiled(self, k)
        return self._best_by_probability(k)

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


# draws forests and keeps them; see sparse.solve for the choice of word
_uncompiled = torch._disable_dynamo(lambda structure, k: structure._best_by_probability(k))


@untraced
def same_forest(one: str, other: str) -> bool:
    """Whether two names stand for the same topology."""
    if one == other:
        return True
    return lookup(one).same_as(lookup(other))


@untraced
def longest(key: str) -> int:
    """The most nodes in a derivation."""
    return lookup(key).longest


@untraced
def num_edges(key: str) -> int:
    """How many edges the forest of that name has."""
    return lookup(key).num_edges


def backpointers(key: str, scores: Tensor, omega: Smoothing) -> Tensor:
    """``ops.backpointers`` of the forest of that name; an op where Dynamo traces."""
    if torch.compiler.is_compiling():
        return _walk(scores, None, key, list(omega.code), num_edges(key))
    return ops.backpointers(lookup(key), scores, omega)


def edge_visits(key: str, q: Tensor, goal: Tensor) -> Tensor:
    """``naive.edge_visits`` of the forest of that name; an op where Dynamo traces."""
    if torch.compiler.is_compiling():
        return _walk(q, goal, key, [], num_edges(key))
    return naive.edge_visits(lookup(key), q, goal)


def _run_walk(x: Tensor, goal: Tensor | None, key: str, omega: Omega, edges: int) -> Tensor:
    """Backpointers at the scores x; given goals, the uses of edges through the backpointers x."""
    if goal is None:
        return ops.backpointers(lookup(key), x, from_code(omega)).contiguous()
    return naive.edge_visits(lookup(key), x, goal).contiguous()


def _run_walk_back(g: Tensor, x: Tensor, goal: Tensor | None, key: str, omega: Omega) -> Tensor:
    """The derivative of that in x, towards g."""
    with recording():
        leaf = recordable(x).requires_grad_()
        y = _run_walk(leaf, goal, key, omega, 0)
        if not y.requires_grad:
            return x.new_zeros(x.shape)
        return torch.autograd.grad(y, leaf, g)[0].contiguous()


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, goal, ctx.key, ctx.omega, _ = inputs
    ctx.save_for_backward(x, goal)


_walk = register(
    "forest_walk",
    "(Tensor x, Tensor? goal, str key, float[] omega, int edges) -> Tensor",
    _run_walk,
    lambda x, goal, key, omega, edges: x.new_empty(len(x), edges, dtype=torch.float64),
)
_walk_back = register(
    "forest_walk_back",
    "(Tensor g, Tensor x, Tensor? goal, str key, float[] omega) -> Tensor",
    _run_walk_back,
    lambda g, x, goal, key, omega: x.new_empty(x.shape),
)
torch.library.register_autograd(
    _walk,
    lambda ctx, g: (_walk_back(g, *ctx.saved_tensors, ctx.key, ctx.omega), *[None] * 4),
    setup_context=_keep,
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


def derivations(owner: str, forest: Forest, goal: int) -> Tensor:
    """How often each derivation of a node uses each part, ``(N, P)``.

    The number of a derivation is that of the edge into the goal, then those of its tails: each is
    found from its number alone, in the order of the edges, without recursion.
    """
    ptr, head, tail1, tail2, part = (getattr(forest, name).tolist() for name in LISTS)
    ways, first = [0] * forest.num_nodes + [1], [0] * len(head)
    for v in range(goal + 1):
        for e in range(ptr[v], ptr[v + 1]):
            first[e] = ways[v]
            ways[v] = min(ways[v] + ways[tail1[e]] * ways[tail2[e]], MOST + 1)
    total, size = ways[goal], int(forest.derivation_size[goal])
    if total > MOST or total * size > MOST_VISITS:
        count = f"more than {MOST:,}" if total > MOST else f"{total:,}"
        raise ValueError(
            f"{owner}.enumerate_support: {count} structures of up to {size:,} nodes are too many."
        )
    checks.room(owner, f"a list of {total:,} structures", 4 * total * (forest.num_parts + 1))
    counts = np.zeros((total, forest.num_parts + 1), np.int32)
    own = forest.node_part.tolist()
    for number, row in enumerate(counts):
        stack = [(goal, number)]
        while stack:
            v, left = stack.pop()
            if v == forest.num_nodes:
                continue
            e = bisect.bisect_right(first, left, ptr[v], ptr[v + 1]) - 1
            row[own[v]] += 1
            row[part[e]] += 1
            most = ways[tail2[e]]
            stack += [(tail1[e], (left - first[e]) // most), (tail2[e], (left - first[e]) % most)]
    return torch.from_numpy(counts[:, :-1])


def _sum_log(q: Tensor, use: Tensor) -> Tensor:
    """Σ use·log q over the last dimension, with 0·log 0 = 0."""
    used = use > 0
    terms = use * torch.where(used & (q != 0), q, 1.0).log()
    impossible = torch.where(used & (q == 0), -math.inf, 0.0)
    return (terms + impossible).sum(-1)
