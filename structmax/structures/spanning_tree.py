"""Spanning trees of an undirected graph."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from structmax import magnitude
from structmax.oracles import arborescence
from structmax.smoothing import Shannon, Smoothing
from structmax.structures.base import dot
from structmax.structures.nesting import nest, unnest
from structmax.structures.nonprojective import ArcStructure


class SpanningTree(ArcStructure):
    """A set of n − 1 edges that connects n nodes.

    An edge {i, j} scores ``scores[i, j] + scores[j, i]``. z is symmetric: both its entries are 1
    for an edge of the tree, so a tree scores ⟨θ, z⟩, and ``marginals()`` (both entries of an edge
    hold its probability) is the gradient of A in the scores as they are given. −inf in either
    entry forbids the edge; the diagonal and what lies outside the length are not looked at.

    Such a tree is one below node 0 once its edges point away from it; the algorithms are those of
    ``NonprojectiveTree`` on symmetric scores (Kirchhoff, 1847, for A and the marginals).
    ``smoothing`` is ``sx.Shannon``. ``condition(include=…)`` makes one node of those that the
    included edges connect, of which a tree enters any: then queries take O(n³) memory.

    Integer form: pairs of nodes ``(*B, n − 1, 2)``, −1 in the padding; ``decode`` gives them as
    lists of (i, j) with i < j.

    Args:
        scores: ``(*B, n, n)``
        lengths: ``(*B)``, numbers of nodes
        smoothing: ``sx.Shannon(gamma)``, by default of temperature 1

    >>> import structmax as sx
    >>> scores = torch.tensor([[0.0, 2.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    >>> tree = sx.SpanningTree(scores)
    >>> tree.decode(tree.argmax())
    [(0, 1), (0, 2)]
    >>> tree.marginals()[0]
    tensor([0.0000, 0.9100, 0.7553])
    >>> round(sx.SpanningTree(torch.zeros(5, 5)).log_partition().exp().item())  # Cayley: n^(n−2)
    125
    >>> edge = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 0, 0]]).bool()
    >>> tree.condition(include=edge).marginals()[0]
    tensor([0.0000, 0.7311, 0.2689])
    """

    _trees = "SpanningTree"

    def __init__(
        self,
        scores: Tensor,
        lengths: Tensor | None = None,
        smoothing: Smoothing | None = None,
        validate_args: bool | None = None,
        _forced: Tensor | None = None,
    ) -> None:
        self._forced = _forced  # (*B, n, n): what a condition includes, symmetric
        super().__init__(scores, lengths, False, smoothing, validate_args, _forced=(_forced, 2))
        self._refuse_smoothing()

    def _tensors(self) -> dict[str, tuple[Tensor, int]]:
        given = super()._tensors()
        return given if self._forced is None else {**given, "_forced": (self._forced, 2)}

    def _options(self) -> dict[str, Any]:
        return {}

    def _used(self) -> Tensor:
        at = torch.arange(self._longest, device=self.scores.device)
        used = at[:, None] != at
        if self.lengths is None:
            return used
        inside = self._inside()
        return used & inside[..., :, None] & inside[..., None, :]

    def _inside(self) -> Tensor:
        """Which nodes lie within the length, ``(*B, n)``."""
        return torch.arange(self._longest, device=self.scores.device) < self._lengths()[..., None]

    # -- edges as arcs ----------------------------------------------------------------------------

    def _words(self) -> Tensor:
        return self._lengths() - 1

    def _edges(self) -> Tensor:
        """The score of each edge, in both its entries."""
        scores = torch.where(self._used(), self._primary(), 0.0).double()
        scores = magnitude.clamped(scores, torch.finfo(scores.dtype).max / 2)
        return scores + scores.transpose(-1, -2)

    def _arcs(self) -> Tensor:
        if not self._has_choices:
            return self._edges()
        return Shannon(self.smoothing.gamma).max(self._choices())

    def _choices(self) -> Tensor:
        """``(*B, s, s, 1)``, or ``(*B, s, s, s)``: [a, c, b] scores the edge {a, b} into b's class.

        A class is what included edges connect, and c its first node: the others hang from that.
        """
        edges = self._edges()
        if not self._has_choices:
            return edges[..., None]
        first, possible, _ = self._classes()
        node = torch.arange(self._longest, device=edges.device)
        enters = first[..., None, None, :] == node[:, None]  # [-, c, b]
        apart = first[..., :, None] != first[..., None, :]  # [a, b]
        hangs = (first[..., None, :, None] == node[:, None, None]) & (node[:, None] == node)
        hangs = hangs & (first != node)[..., None, :, None]
        entered = torch.where(enters & apart[..., :, None, :], edges[..., :, None, :], -math.inf)
        choices = torch.where(hangs, 0.0, entered)
        return torch.where(possible[..., None, None, None], choices, -math.inf)

    def _from_arcs(self, mu: Tensor) -> Tensor:
        if self._has_choices:
            first, _, _ = self._classes()
            apart = first[..., :, None] != first[..., None, :]
            mu = (mu[..., None] * self._label_chances()).sum(-2)  # [a, b]
            mu = torch.where(apart, mu, 0.0)
        return mu + mu.transpose(-1, -2)

    def _z_of(self, heads: Tensor, labels: Tensor | None) -> Tensor:
        at = torch.arange(self._longest, device=heads.device)
        if labels is None:
            arcs = (heads[..., None, :] == at[:, None]) & self._inside()[..., None, 1:]
            arcs = torch.nn.functional.pad(arcs, (1, 0))
        else:
            assert self._forced is not None
            first, _, _ = self._classes()
            enters = ((first == at) & self._inside())[..., 1:, None]
            a, b = ((ends[..., None] == at) & enters for ends in (heads, labels))
            arcs = (a.mT.to(self.dtype) @ b.to(self.dtype)) > 0
            arcs = arcs | (self._forced & self._used())
        return (arcs | arcs.transpose(-1, -2)).to(self.dtype)

    def _kbest(self, k: int) -> tuple[Tensor, Tensor]:
        scores, z = super()._kbest(k)
        return self._with_forced(scores, 1).to(self._parts()[0].dtype), z

    def max_marginals(self) -> Tensor:
        choices = self._choices().detach()
        best = arborescence.best_rest(choices.amax(-1), self._words(), False)
        best = (best[..., None] + choices).amax(-2) if self._has_choices else best + choices[..., 0]
        best = torch.maximum(best, best.transpose(-1, -2))  # either way round
        if self._forced is not None:
            first, _, _ = self._classes()
            best = torch.where(first[..., :, None] != first[..., None, :], best, -math.inf)
            best = self._with_forced(best, 2)
            best = torch.where(self._forced, self._best()[0][..., None, None], best)
        best = torch.where(self._used(), best, -math.inf)
        return best.to(self._parts()[0].dtype)

    # -- edges that are included ------------------------------------------------------------------

    def condition(self, include: Tensor | None = None, exclude: Tensor | None = None) -> Any:
        """The same structure with some edges forced in and some out; one entry of each will do."""
        new = super().condition(include, exclude)
        if include is None:
            return new
        forced = include.expand(*self.batch_shape, *self.event_shape)
        forced = forced | forced.mT
        forced = forced if self._forced is None else forced | self._forced
        return new._replace_primary(new.scores, _forced=forced)

    def _excluded_by(self, include: Tensor) -> Tensor:
        return torch.zeros_like(include)  # no set of other edges rules out the trees without one

    @property
    def _has_choices(self) -> bool:
        return self._forced is not None

    def _classes(self) -> tuple[Tensor, Tensor, Tensor]:
        """The first node of each node's class ``(*B, n)``, whether included edges can all be there
        and their score, 0 if not ``(*B)``."""
        assert self._forced is not None
        n, edges = self._longest, self._edges()
        forced = (self._forced & self._used()).expand(edges.shape)
        linked = forced | torch.eye(n, dtype=torch.bool, device=edges.device)
        for _ in range(n.bit_length()):  # by then over 2^k ≥ n edges
            linked = (linked.float() @ linked.float()) > 0
        first = linked.to(torch.uint8).argmax(-1)
        once = forced.triu(1)
        others = (first != torch.arange(n, device=edges.device)).sum(-1)
        total = torch.where(once, edges, 0.0).sum((-1, -2))
        possible = (once.sum((-1, -2)) == others) & (total != -math.inf)  # no cycle
        possible = possible & ~(self._forced & ~self._used()).flatten(-2).any(-1)
        return first, possible, torch.where(possible, total, 0.0)

    def _with_forced(self, value: Tensor, dims: int = 0) -> Tensor:
        """Values ``(*B, ...)`` and what the included edges score, where there is a tree."""
        if self._forced is None:
            return value
        _, possible, total = (t[(..., *[None] * dims)] for t in self._classes())
        moved = torch.where(value == -math.inf, value, value + total.to(value.dtype))
        return torch.where(possible, moved, -math.inf)  # an item of one node has no edge to forbid

    def _value(self) -> Tensor:
        return self._with_forced(super()._value())

    def _value_and_gradient(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        value, (mu,) = super()._value_and_gradient()
        if self._forced is not None:
            sure = self._forced & self._used() & (value != -math.inf)[..., None, None]
            mu = torch.where(sure, torch.ones_like(mu), mu)
        return self._with_forced(value), (mu,)

    def _best(self) -> tuple[Tensor, Tensor]:
        value, z = super()._best()
        return self._with_forced(value), z

    def _gibbs_cross_entropy(self, q: Any, own: Tensor, mu: tuple[Tensor, ...]) -> Tensor:
        total = super()._gibbs_cross_entropy(q, own, mu)
        if q._forced is None:
            return total
        # an edge that is no bridge of what is allowed is in a cycle, of n edges at most, and so
        # lacks in one of n trees at least where all are equally likely
        equal = self._with_gains(torch.zeros_like(self._parts()[0].detach()))
        chance = equal._value_and_gradient()[1][0]
        no_bridge = chance < 1 - 0.5 / self._longest
        lacks = (q._forced & q._used() & no_bridge).flatten(-2).any(-1)
        return torch.where(lacks & ~total.isnan(), math.inf, total)

    # -- scores and forms -------------------------------------------------------------------------

    def _checked(self, z: Tensor) -> Tensor:
        z = self._masked(z)
        wrong = (((z != 0) & (z != 1)) | (z != z.transpose(-1, -2))).flatten(-2).any(-1)
        wrong = wrong | (z.flatten(-2).sum(-1) != 2 * (self._lengths() - 1))
        n, inside = self._longest, self._inside()
        linked = (z != 0) | torch.eye(n, dtype=torch.bool, device=z.device)
        for _ in range(n.bit_length()):  # by then over 2^k ≥ n edges
            linked = (linked.float() @ linked.float()) > 0
        wrong = wrong | ~(linked[..., 0, :] | ~inside).all(-1)
        if bool(wrong.any()):
            item = tuple(wrong.nonzero()[0].tolist())
            length = int(self._lengths().expand(wrong.shape)[item])
            raise ValueError(
                f"SpanningTree: z{list(item)} is no spanning tree of {length} nodes: it must be "
                f"symmetric and have {length - 1} edges, which connect them."
            )
        return z

    def _score(self, z: Tensor) -> Tensor:
        scores, z = self._primary(), self._masked(z)
        total = dot(scores.expand(z.shape), z.to(scores.dtype), 2)
        if self._forced is None:
            return total
        lacks = (self._forced & self._used() & (z == 0)).flatten(-2).any(-1)
        return torch.where(lacks, -math.inf, total)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Every tree, for at most 7 nodes."""
        length = self._one_length()
        if length > 7:
            raise ValueError(
                f"SpanningTree.enumerate_support: trees of {length} nodes are too many."
            )
        n = self._longest
        heads = torch.tensor(
            list(itertools.product(range(length), repeat=length - 1)), device="cpu"
        ).long()
        above = torch.nn.functional.pad(heads, (1, 0))
        for _ in range(length.bit_length()):
            above = above.gather(-1, above)
        heads = torch.nn.functional.pad(heads[(above == 0).all(-1)], (0, n - length))
        one = type(self)(torch.zeros(n, n, device="cpu"), torch.tensor(length, device="cpu"))
        return self._with_labels(one._z_of(heads, None), expand)

    def decode(self, z: Tensor) -> Any:
        """Edges (i, j) with i < j, nested as the batch of z."""
        batch = z.shape[:-2]
        flat = z.reshape(batch.numel(), *z.shape[-2:])
        edges = [[(i, j) for i, j in (item != 0).triu(1).nonzero().tolist()] for item in flat]
        return nest(edges, batch)

    def encode(self, obj: Any) -> Tensor:
        """z of pairs of nodes: a tensor ``(*B, e, 2)``, −1 in the padding, or lists of pairs."""
        items, batch = unnest("SpanningTree", obj, 2, len(self.batch_shape))
        z = torch.zeros(len(items), *self.event_shape, dtype=self.dtype, device="cpu")
        for item, edges in enumerate(items):
            for edge in edges:
                if len(edge) != 2 or not all(-1 <= v < self._longest for v in edge):
                    raise ValueError(
                        f"SpanningTree: an edge is a pair of nodes below {self._longest}, got "
                        f"{tuple(edge)}."
                    )
                if min(edge) >= 0:
                    z[item, edge[0], edge[1]] = z[item, edge[1], edge[0]] = 1.0
        return z.reshape(*batch, *self.event_shape).to(self.scores.device)
