"""Projective dependency trees on the forest engine."""

from __future__ import annotations

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
    high, down = ragged(np.arange(n + 1))
    low = high - 1 - down
    if single:
        low, high = low[low > 0], high[low > 0]
    i, j = low[low > 0], high[low > 0]  # the root symbol is no modifier
    words = np.arange(1, n + 1, dtype=np.int32)

    def node(low: Any, high: Any, kind: int) -> Any:
        return first_node(high, inner, single) + (left + 1) * (high - 1 - low) + kind

    def unless_alone(low: Any, high: Any, kind: int) -> Any:
        return np.where(low == high, -1, node(low, high, kind))  # one word alone has no node

    def sibling_part(head: Any, sibling: Any, modifier: Any) -> Any:
        return n * n * max(labels, 1) + (head * (n + 1) + sibling) * (n + 1) + modifier

    def below_arc(low: Any, high: Any, kind: int) -> Any:
        return node(low, high, kind - inner) if siblings else node(low, high, gap)

    arcs = [  # number, node, node below
        (arc_number(low, high, 0), node(low, high, right - 1), below_arc(low, high, right - 1)),
        (arc_number(i, j, 1), node(i, j, left - 1), below_arc(i, j, left - 1)),
    ]
    if single:
        below = unless_alone(1, words, left)
        arcs.append((arc_number(0, words, 0), node(0, words, 0), below))
    node_part = np.full(first_node(n + 1, inner, single), -1)
    for number, arc, _ in arcs if not labels else ():
        node_part[arc] = number
    draw = ForestBuilder()
    draw.nodes(len(node_part), node_part)

    def draw_arcs(number: Any, arc: Any, below: Any) -> None:
        """Arcs on the nodes below; their scores are of nodes, or of one edge for each label."""
        if labels:
            draw.runs(arc, labels, lambda label: (below, -1, number * labels + label))
        elif not np.array_equal(arc, below):
            draw.edges(arc, below)

    def draw_gap(i: Any, j: Any) -> None:
        head, wide = node(i, j, gap), j - i > 1
        draw.edges(head, -1, unless_alone(i + 1, j, left))
        inside = np.maximum(j - i - 2, 0)
        draw.runs(head, inside, lambda k: (node(i, i + 1 + k, right), node(i + 2 + k, j, left)))
        draw.edges(head[wide], node(i, j - 1, right)[wide])

    def draw_siblings(i: Any, j: Any, kind: int, leftward: bool) -> None:
        head, modifier = (j, i) if leftward else (i, j)
        arc = node(i, j, kind - inner)
        first = unless_alone(i, j - 1, right) if leftward else unless_alone(i + 1, j, left)
        draw.edges(arc, first, -1, sibling_part(head, head, modifier))

        def with_sibling(k: Any) -> tuple[Any, ...]:
            k = i + 1 + k
            near = node(k, j, kind) if leftward else node(i, k, kind)
            rest = node(i, k, gap) if leftward else node(k, j, gap)
            return near, rest, sibling_part(head, k, modifier)

        draw.runs(arc, j - i - 1, with_sibling)

    def from_left(k: Any) -> tuple[Any, Any]:
        return node(low, low + 1 + k, right - 1), node(low + 1 + k, high, right)

    draw.runs(node(low, high, right), high - low - 1, from_left)
    draw.edges(node(low, high, right), node(low, high, right - 1))
    draw.edges(node(i, j, left), -1, node(i, j, left - 1))
    draw.runs(
        node(i, j, left),
        j - i - 1,
        lambda k: (node(i, i + 1 + k, left), node(i + 1 + k, j, left - 1)),
    )
    draw_gap(*((i, j) if siblings else (low, high)))
    for given in arcs:
        draw_arcs(*given)
    if siblings:
        draw_siblings(low, high, right - 1, leftward=False)
        draw_siblings(i, j, left - 1, leftward=True)
    if single:
        of_root = sibling_part(0, 0, words) if siblings else -1

        def with_root(r: Any) -> tuple[Any, ...]:
            part = sibling_part(0, 0, 1 + r) if siblings else -1
            return node(0, 1 + r, 0), node(1 + r, words, right), part

        draw.runs(node(0, words, 1), words - 1, with_root)
        draw.edges(node(0, words, 1), node(0, words, 0), -1, of_root)
    return draw.build(n * n * max(labels, 1) + siblings * (n + 1) ** 3)


class ProjectiveTree(DependencyTree, PackedSquare):
    """Dependency trees without crossing arcs, on the graph in the docstring of ``DependencyTree``.

    In a single root's graph with ``siblings``, [0,0,r] is on the edges of the goal. On a GPU, the
    first query finds NaN and +inf in the scores.
    """

    # -- the graph --------------------------------------------------------------------------------

    _drawing = 700

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

    def _unvalidated_parts(self) -> tuple[Tensor, ...]:
        parts = super()._unvalidated_parts()
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
        value, mu = self._value_and_gradient()
        return self._refuse_infeasible("edge_marginals", value, mu[1]).to(self.dtype)
