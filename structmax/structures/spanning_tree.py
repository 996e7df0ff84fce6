"""Spanning trees of an undirected graph."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from structmax import checks
from structmax.oracles import arborescence
from structmax.smoothing import Smoothing
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
    ``smoothing`` is ``sx.Shannon``. To force an edge in is not a matter of forbidding others:
    ``condition`` takes ``exclude`` only.

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
    """

    def __init__(
        self,
        scores: Tensor,
        lengths: Tensor | None = None,
        smoothing: Smoothing | None = None,
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(scores, lengths, False, smoothing, validate_args)
        self._refuse_smoothing()
        if self._validate_args and checks.can_look():
            self._check_values()

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

    def _arcs(self) -> Tensor:
        scores = torch.where(self._used(), self._primary(), 0.0).double()
        return scores + scores.transpose(-1, -2)

    def _choices(self) -> Tensor:
        return self._arcs()[..., None]

    def _from_arcs(self, mu: Tensor) -> Tensor:
        return mu + mu.transpose(-1, -2)

    def _z_of(self, heads: Tensor, labels: Tensor | None) -> Tensor:
        at = torch.arange(self._longest, device=heads.device)
        arcs = (heads[..., None, :] == at[:, None]) & self._inside()[..., None, 1:]
        arcs = torch.nn.functional.pad(arcs, (1, 0))
        return (arcs | arcs.transpose(-1, -2)).to(self.dtype)

    def _kbest(self, k: int) -> tuple[Tensor, Tensor]:
        scores, z = super()._kbest(k)
        return scores.to(self._parts()[0].dtype), z

    def max_marginals(self) -> Tensor:
        arcs = self._arcs().detach()
        best = arborescence.best_rest(arcs, self._words(), False) + arcs
        best = torch.maximum(best, best.transpose(-1, -2))  # either way round
        best = torch.where(self._used(), best, -math.inf)
        return best.to(self._parts()[0].dtype)

    def _excluded_by(self, include: Tensor) -> Tensor:
        raise ValueError(
            "SpanningTree.condition: include= is not possible, because no set of other edges rules "
            "out the trees without one. Use exclude=; marginals() and max_marginals() tell of the "
            "trees with an edge."
        )

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
        scores = self._primary()
        return dot(scores.expand(z.shape), self._masked(z).to(scores.dtype), 2)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Every tree, for at most 7 nodes."""
        length = self._one_length()
        if length > 7:
            raise ValueError(
                f"SpanningTree.enumerate_support: trees of {length} nodes are too many."
            )
        n = self._longest
        heads = torch.tensor(list(itertools.product(range(length), repeat=length - 1))).long()
        above = torch.nn.functional.pad(heads, (1, 0))
        for _ in range(length.bit_length()):
            above = above.gather(-1, above)
        heads = torch.nn.functional.pad(heads[(above == 0).all(-1)], (0, n - length))
        one = type(self)(torch.zeros(n, n), torch.tensor(length))
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
        z = torch.zeros(len(items), *self.event_shape, dtype=self.dtype)
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
