"""Projective dependency trees on the forest engine."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structmax.forest.topology import Forest, ForestBuilder, bucket, family, name_of
from structmax.structures.dependency_tree import DependencyTree
from structmax.structures.square import PackedSquare, ragged


def arc_number(low: Any, high: Any, leftward: Any) -> Any:
    """Arcs by their right end, then from short to long, then → before ←.

    Those of a shorter sentence come first; nothing points at the root symbol, word 0.
    """
    return (high - 1) ** 2 + 2 * (high - 1 - low) + leftward


def first_node(high: Any, inner: int, single: int) -> Any:
    """The number of the first node whose span ends in word ``high``; the one before is a goal."""
    with_root = 2 if single else 3 + inner
    return (5 + 2 * inner) * ((high - 1) * (high - 2) // 2) + with_root * (high - 1)


@family
def projective_tree(n: int, labels: int, single: int, siblings: int) -> Forest:
    """The graph of ``ProjectiveTree``. Nodes are numbered by the right end of their span, then
    from short spans to long, so that those of a shorter sentence come first.

    Parts: arcs by ``arc_number`` (times labels, plus label), then ``[head, sibling, modifier]``.
    """
    inner = int(siblings and labels > 0)  # an arc's sibling and its label are chosen in two steps
    gap, right, left = 0, 2 + inner, 4 + 2 * inner  # nodes of a span; each arc's comes just before
    node_part = np.full(first_node(n + 1, inner, single), -1)
    edges: list[tuple[Any, ...]] = []

    def node(low: Any, high: Any, kind: int) -> Any:
        number = first_node(high, inner, single) + (left + 1) * (high - 1 - low) + kind
        return np.where(low == high, -1, number)  # one word alone has no node

    def sibling_part(head: Any, sibling: Any, modifier: Any) -> Any:
        return n * n * max(labels, 1) + (head * (n + 1) + sibling) * (n + 1) + modifier

    def draw_arcs(low: Any, high: Any, leftward: int, arc: Any, below: Any) -> None:
        """Arcs on the nodes below; their scores are of nodes, or of one edge for each label."""
        number = arc_number(low, high, leftward)
        if labels:
            part = number[:, None] * labels + np.arange(labels)
            edges.append((arc[:, None], below[:, None], -1, part))
        else:
            node_part[arc] = number
            if not np.array_equal(arc, below):
                edges.append((arc, below))

    high, down = ragged(np.arange(n + 1))
    low = high - 1 - down
    if single:
        low, high = low[low > 0], high[low > 0]
    span, k = ragged(high - low)
    i, j, k = low[span], high[span], low[span] + k
    word = i > 0  # the root symbol is no modifier
    of_left = node(i, j, left), node(i, k, left), node(k, j, left - 1)
    of_gap = node(i, j, gap), node(i, k, right), node(k + 1, j, left)
    edges.append((node(i, j, right), node(i, k + 1, right - 1), node(k + 1, j, right)))
    edges.append(tuple(x[word] for x in of_left))
    edges.append(tuple(x[word] for x in of_gap) if siblings else of_gap)

    for leftward, kind in ((0, right - 1), (1, left - 1)):
        i, j = (low[low > 0], high[low > 0]) if leftward else (low, high)
        below = node(i, j, kind - inner) if siblings else node(i, j, gap)
        draw_arcs(i, j, leftward, node(i, j, kind), below)
        if siblings:
            head, modifier = (j, i) if leftward else (i, j)
            first = node(i, j - 1, right) if leftward else node(i + 1, j, left)
            edges.append((below, first, -1, sibling_part(head, head, modifier)))
            span, k = ragged(j - i - 1)
            i, j, k = i[span], j[span], i[span] + k + 1
            near = node(k, j, kind) if leftward else node(i, k, kind)
            rest = node(i, k, gap) if leftward else node(k, j, gap)
            edges.append((below[span], near, rest, sibling_part(head[span], k, modifier[span])))
    if single:
        words = np.arange(1, n + 1, dtype=np.int32)
        draw_arcs(0, words, 0, node(0, words, 0), node(1, words, left))
        span, r = ragged(words)
        last, r = span + 1, r + 1
        part = sibling_part(0, 0, r) if siblings else -1
        edges.append((node(0, last, 1), node(0, r, 0), node(r, last, right), part))

    draw = ForestBuilder()
    draw.nodes(len(node_part), node_part)
    for given in edges:
        draw.edges(*given)
    return draw.build(n * n * max(labels, 1) + siblings * (n + 1) ** 3)


class ProjectiveTree(DependencyTree, PackedSquare):
    """Dependency trees without crossing arcs; made by ``DependencyTree(..., projective=True)``.

    The graph is that of Eisner (1996, "Three new probabilistic models for dependency parsing"). For
    words i < j: right[i,j] stands for i with modifiers up to j and all below them, left[i,j] for
    the mirror image below j, gap[i,j] for what lies between an arc's ends, and each arc has a node
    with its score (its labels are edges into that node)::

        right[i,k] ─┐             gap[i,j] ──► arc[i→j]    arc[i→k] ─┐
                    ├► gap[i,j]                                      ├► right[i,j]
        left[k+1,j]─┘             gap[i,j] ──► arc[j→i]    right[k,j]┘   (left: mirrored)

    What a word alone would be is left out: right[i,i] and left[i,i] are nothing. With several roots
    the root symbol is word 0 and the goal right[0,n]. With a single one the graph is over words
    1..n, and left[1,r] ──► arc[0→r], then arc[0→r] + right[r,n] ──► goal for every word r.

    With ``siblings`` (McDonald and Pereira 2006, "Online learning of approximate dependency parsing
    algorithms"), an arc is reached by an edge for each adjacent sibling, which carries its score::

        left[i+1,j] ─[i,i,j]─► arc[i→j] ◄─[i,k,j]─ arc[i→k] + gap[k,j]      (←: mirrored)

    and labels, if any, by edges into a second node of the arc. In a single root's graph [0,0,r] is
    on the edges of the goal. Time is O(n³), memory for each item O(n²), with siblings O(n³).
    """

    # -- the graph --------------------------------------------------------------------------------

    @staticmethod
    def _order(i: Tensor, j: Tensor) -> Tensor:
        number = arc_number(torch.minimum(i, j), torch.maximum(i, j), i > j)
        return torch.where((j > 0) & (i != j), number, -1)

    @staticmethod
    def _count(n: Any) -> Any:
        return n * n

    @property
    def _inner(self) -> int:
        return int(self.labelled and self.siblings is not None)

    def _forest_key(self) -> str:
        kind = int(self.root == "single"), int(self.siblings is not None)
        return name_of("projective_tree", (bucket(self._longest), self._labels, *kind))

    def _goal_node(self, n: Any) -> Any:
        return first_node(n + 1, self._inner, self.root == "single") - 1

    def _derivation_size(self) -> int:
        n = self._longest
        if self.siblings is None:
            return 3 * n - (self.root == "single")
        return 2 * n + (n - (self.root == "single")) * self._inner

    def _parts(self) -> tuple[Tensor, ...]:
        parts = super()._parts()
        return parts if self.siblings is None else (*parts, self._in_dtype(self.siblings, 3))

    def _pack(self, parts: Any) -> Tensor:
        flat = super()._pack(parts)
        if self.siblings is None:
            return flat
        grow = bucket(self._longest) - self._longest
        cube = torch.where(self._used_siblings(), parts[1], 0.0)
        cube = torch.nn.functional.pad(cube, (0, grow) * 3)
        return torch.cat([flat, cube.flatten(-3)], -1)

    def _unpack(self, flat: Tensor) -> tuple[Tensor, ...]:
        parts = super()._unpack(flat)
        if self.siblings is None:
            return parts
        s, side = self.event_shape[0], bucket(self._longest) + 1
        cube = flat[..., -(side**3) :].unflatten(-1, (side, side, side))
        return (*parts, cube[..., :s, :s, :s])

    def _with_marginal_scores(self, mu: Tensor) -> Any:
        new: Any = super()._with_marginal_scores(mu)
        if self.siblings is not None:
            new.siblings = torch.where(self.siblings == -math.inf, -math.inf, 0.0).to(mu.dtype)
        return new

    def _excluded_by(self, include: Tensor) -> Tensor:
        # a word without any other head, or label, has this one
        across = (-3, -1) if self.labelled else (-2,)
        return include.sum(across, keepdim=True) - include.long() > 0

    def edge_marginals(self) -> Tensor:
        """The probability of each ``[head, sibling, modifier]``, as ``siblings``. Differentiable.

        >>> import structmax as sx
        >>> siblings = torch.zeros(3, 3, 3)
        >>> tree = sx.DependencyTree(torch.zeros(3, 3), projective=True, siblings=siblings)
        >>> tree.edge_marginals()[1, 1, 2]  # of two trees, one has the arc 1 → 2
        tensor(0.5000)
        """
        if self.siblings is None:
            raise ValueError(
                f"{self._name}.edge_marginals: there are no siblings= scores. Use marginals()."
            )
        value, mu = self._cached()
        return self._refuse_infeasible("edge_marginals", value, mu[1]).to(self.dtype)
