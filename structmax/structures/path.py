"""Paths in a directed acyclic graph."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from structmax import checks
from structmax.cache import cached
from structmax.forest import ops
from structmax.forest.topology import ForestBuilder
from structmax.primitive import on_host, untransformed
from structmax.smoothing import Smoothing
from structmax.structures.base import Structure, dot
from structmax.structures.dynamic import DynamicStructure, derivations
from structmax.structures.nesting import nest, unnest


class Graph:
    """Edges of a directed acyclic graph and the forest of its paths from one source.

    The forest has the nodes that the source reaches, in topological order, and a last node, the
    goal of items whose target is none of them: it carries part E, which scores −inf.
    """

    def __init__(self, edges: NDArray[np.int64], source: int) -> None:
        from structmax.oracles import graph_cpu

        self.edges, self.num_nodes = edges, int(max(edges.max(), source)) + 1
        self.tails, self.heads = np.ascontiguousarray(edges.T)
        self.out, self.into = (
            self._sorted(self.tails, self.heads),
            self._sorted(self.heads, self.tails),
        )
        degree = np.bincount(self.heads, minlength=self.num_nodes)
        self.order = graph_cpu.topological_order(*self.out, degree)
        if len(self.order) < self.num_nodes:
            raise ValueError(f"Path: the edges have a cycle: {self._cycle()}.")
        keys = np.sort(self.tails * self.num_nodes + self.heads)
        self.has_parallel = bool((keys[1:] == keys[:-1]).any())
        reached = self.after(source)
        nodes = self.order[reached[self.order]]
        place = np.full(self.num_nodes + 1, len(nodes))
        place[nodes] = np.arange(len(nodes))
        self.place = torch.from_numpy(place)  # a node's number in the forest
        draw = ForestBuilder()
        draw.nodes(len(nodes))
        draw.node(part=len(edges))
        (used,) = np.nonzero(reached[self.tails])
        draw.edges(place[self.heads[used]], place[self.tails[used]], -1, used)
        self.forest = draw.build(len(edges) + 1)

    def _sorted(self, by: NDArray[np.int64], other: NDArray[np.int64]) -> tuple[Any, Any]:
        """For each node of ``by`` the nodes at the other end of its edges: starts, nodes."""
        count = np.bincount(by, minlength=self.num_nodes)
        return np.concatenate([[0], np.cumsum(count)]), other[np.argsort(by, kind="stable")]

    def _cycle(self) -> str:
        rest = np.ones(self.num_nodes, bool)
        rest[self.order] = False
        ptr, tail = self.into
        seen: list[int] = [int(rest.argmax())]
        while seen[-1] not in seen[:-1]:  # each node that is left has one before it that is left
            tails = tail[ptr[seen[-1]] : ptr[seen[-1] + 1]]
            seen.append(int(tails[rest[tails]][0]))
        cycle = seen[seen.index(seen[-1]) :][::-1]
        names = [str(v) for v in cycle]
        return " → ".join(names if len(names) < 12 else [*names[:10], "…", names[-1]])

    def after(self, node: int) -> NDArray[np.bool_]:
        """Which nodes this one leads to, itself included."""
        from structmax.oracles import graph_cpu

        return graph_cpu.descendants(self.order, *self.out, node)


@cached(most=1 << 28)
def _graph(edges: bytes, source: int) -> Graph:
    return Graph(np.frombuffer(edges, np.int64).reshape(-1, 2).copy(), source)


class Path(DynamicStructure):
    """A path from a source to a target in a directed acyclic graph.

    z marks the edges of the path. The graph of the dynamic program is the graph itself: a node for
    each node that the source reaches, with its incoming edges. Nodes may be numbered in any order;
    parallel edges make different paths. If the source is the target, the only path is empty, with
    score 0. The topology is worked out once for each set of edges, so it pays to pass the same
    ones; edges on the GPU are copied to the CPU for it. ``torch.compile`` cannot trace that: with
    ``fullgraph=True``, make the structure outside and give it scores with ``perturb``.

    Integer form: the nodes along the path; in a graph with parallel edges, where nodes do not tell
    paths apart, the numbers of the edges along it.

    Args:
        edges: ``(E, 2)``, ``[from, to]``
        scores: ``(*B, E)``; edges on no path from the source to the target may hold anything
        source: a node
        target: a node, or one for each item ``(*B)``
        smoothing: Ω, by default ``sx.Shannon(1.0)``

    >>> import structmax as sx
    >>> edges = torch.tensor([[0, 1], [0, 2], [1, 3], [2, 3], [1, 2]])
    >>> path = sx.Path(edges, torch.tensor([1.0, 0.0, 0.0, 0.0, 0.5]), source=0, target=3)
    >>> path.decode(path.argmax())
    [0, 1, 2, 3]
    >>> path.marginals()
    tensor([0.8780, 0.1220, 0.3315, 0.6685, 0.5465])
    >>> path.log_prob([0, 2, 3]).exp()
    tensor(0.1220)
    >>> sx.Path(torch.tensor([[3, 5], [5, 3]]), torch.zeros(2), 3, 5)
    Traceback (most recent call last):
    ValueError: Path: the edges have a cycle: 3 → 5 → 3.
    """

    def __init__(
        self,
        edges: Tensor | Graph,
        scores: Tensor,
        source: int,
        target: int | Tensor,
        smoothing: Smoothing | None = None,
        validate_args: bool | None = None,
    ) -> None:
        checks.scores("Path", "scores", scores, 1, "(..., E) with at least one edge")
        e = scores.shape[-1]
        if not isinstance(edges, Graph):
            make = _uncompiled if torch.compiler.is_compiling() else _checked_graph
            edges = make(edges, scores, source)
        self._graph, self.scores, self.source, self.target = edges, scores, source, target
        end = target if isinstance(target, Tensor) else None
        if end is not None and (end.is_floating_point() or end.dtype == torch.bool):
            raise ValueError(f"Path: target must be integers, got {end.dtype}.")
        if end is None and not isinstance(target, int):
            raise ValueError(f"Path: target must be a node or a tensor of nodes, got {target!r}.")
        checks.same_device("Path", scores=scores, target=end)
        batch = checks.batch_shape("Path", scores=(scores, 1), target=(end, 0))
        self._usable = checks.Derived()
        super().__init__(batch, (e,), smoothing, validate_args)
        if (
            end is None
            and self._validate_args
            and checks.can_look(self._first)
            and bool(self._is_lost())
        ):
            raise ValueError(f"Path: {_NO_PATH}".format(source=source, got=target, item=""))

    @property
    def edges(self) -> Tensor:
        """The edges ``(E, 2)``, on the CPU."""
        return torch.from_numpy(self._graph.edges.copy())

    def _is_lost(self) -> Tensor:
        """Whether no path leads to the target, shaped as ``_target_node``."""
        return self._target_node() == self._graph.forest.num_nodes - 1

    def _given_integers(self) -> dict[str, checks.Integers]:
        if not isinstance(self.target, Tensor):
            return {}
        lost, item = self._is_lost().expand(self.batch_shape), " (item {where})"
        error = _NO_PATH.format(source=self.source, got="{got}", item=item)
        return {"target": checks.Integers(self.target, lost, error=error)}

    def _given_scores(self) -> dict[str, tuple[Tensor, checks.Mask]]:
        return {"scores": (self.scores, self._usable_parts)}

    def _usable_parts(self) -> Tensor:
        """Which edges lie on a path to the target, ``(E)``, or ``(*B, E)`` for targets ``(*B)``."""
        return self._usable.get(self._integer_tensors, self._find_usable)

    def _find_usable(self) -> Tensor:
        goal = self._target_node()
        zero = torch.zeros(*goal.shape, self.event_shape[0], device=self.scores.device)
        theta = torch.nn.functional.pad(zero, (0, 1), value=-math.inf)
        best = ops.max_marginals(theta, goal, self._forest_key(), self.event_shape[0])
        return best > -math.inf

    def _tensors(self) -> dict[str, tuple[Tensor, int]]:
        given = {"scores": (self.scores, 1)}
        if isinstance(self.target, Tensor):
            given["target"] = (self.target, 0)
        return given

    def _options(self) -> dict[str, Any]:
        return {"edges": self._graph, "source": self.source, "target": self.target}

    def _unvalidated_parts(self) -> tuple[Tensor, ...]:
        scores = self.scores.float() if self.scores.dtype.itemsize < 4 else self.scores
        return (scores.expand(*self.batch_shape, scores.shape[-1]),)

    def _pack(self, parts: Any) -> Tensor:
        scores = torch.where(self._usable_parts(), parts[0], 0.0)
        return torch.nn.functional.pad(scores, (0, 1), value=-math.inf)

    def _forest_key(self) -> str:
        return self._graph.forest.key

    def _goal(self) -> Tensor:
        self._validate_integers()
        return self._target_node().expand(self.batch_shape)

    def _target_node(self) -> Tensor:
        """The target's number in the forest, ``()``, or ``(*B)`` where each item has its own."""
        place, last, device = self._graph.place, self._graph.num_nodes, self.scores.device
        if not isinstance(self.target, Tensor):
            return place[self.target if 0 <= self.target < last else last].int().to(device)
        target = self.target.long()
        outside = (target < 0) | (target > last)
        node = torch.where(outside, last, target)
        return place.to(device).index_select(0, node.reshape(-1)).reshape(node.shape).int()

    def _derivation_size(self) -> int:
        return self._graph.forest.longest

    def _replace_primary(self, scores: Tensor, **others: Tensor) -> Path:
        tensors = {name: t for name, (t, _) in self._tensors().items()}
        return self._rebuild(**{**tensors, "scores": scores})

    def _incompatible(self, include: Tensor) -> Tensor:
        """Edges on no path that has all those included: the best path through each counts them."""
        graph = self._graph
        lost = include & ~self._usable_parts()
        if bool(lost.any()):
            edge = int(lost.nonzero()[0, -1])
            raise ValueError(
                f"Path.condition: edge {edge} ({graph.tails[edge]} → {graph.heads[edge]}) lies on "
                "no path from the source to the target, so it cannot be included."
            )
        theta = torch.nn.functional.pad(include.double(), (0, 1), value=-math.inf)
        best = ops.max_marginals(theta, self._goal(), self._forest_key(), self.event_shape[0])
        return best < include.sum(-1, keepdim=True)

    # -- paths ------------------------------------------------------------------------------------

    def _checked(self, z: Tensor) -> Tensor:
        """A unit of flow that leaves the source and enters the target: in a DAG, one path."""
        batch, v = z.shape[:-1], self._graph.num_nodes
        tails, heads = (
            torch.from_numpy(x).to(z.device) for x in (self._graph.tails, self._graph.heads)
        )
        flow = torch.zeros(*batch, v, dtype=torch.float64, device=z.device)
        flow = flow.index_add(-1, heads, z.double()).index_add(-1, tails, -z.double())
        target = torch.as_tensor(self.target, device=z.device).expand(batch)[..., None]
        flow = flow.scatter_add(-1, target, torch.full_like(target, -1, dtype=flow.dtype))
        flow[..., self.source] += 1
        wrong = (flow != 0).any(-1) | ((z != 0) & (z != 1)).any(-1)
        if bool(wrong.any()):
            item = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"Path: z must mark the edges of one path from node {self.source} to the target; "
                f"it does not for item {item}."
            )
        return z

    def _score(self, z: Tensor) -> Tensor:
        return dot(self._parts()[0], z.to(self._parts()[0].dtype), 1)

    def _aligned(self, q: Structure) -> tuple[DynamicStructure, DynamicStructure]:
        p, q = super()._aligned(q)
        p._same_goals(q, "targets")
        return p, q

    def enumerate_support(self, expand: bool = True) -> Tensor:
        self._validate_integers()
        targets = torch.as_tensor(self.target, device="cpu").unique().tolist()
        if len(targets) > 1:
            raise ValueError(
                "Path.enumerate_support: items with different targets have different supports. "
                "Index one item: structure[i].enumerate_support()."
            )
        target = targets[0] if targets else self.source  # of no items at all: the empty path
        graph = self._graph
        every = derivations("Path", graph.forest, int(graph.place[target]))
        every = every[:, : self.event_shape[0]].to(self.scores)
        every = every.reshape(-1, *[1] * len(self.batch_shape), *self.event_shape)
        return every.expand(-1, *self.batch_shape, *self.event_shape) if expand else every

    def _z_of(self, paths: list[list[int]]) -> Tensor:
        z = torch.zeros(len(paths), *self.event_shape, dtype=self.dtype, device="cpu")
        for row, path in zip(z, paths, strict=True):
            row[path] = 1
        return z.to(self.scores.device)

    def decode(self, z: Tensor) -> Any:
        """The nodes along each path (with parallel edges: its edges), nested as the batch of z."""
        graph, batch = self._graph, z.shape[:-1]
        rank = np.empty(graph.num_nodes, np.int64)
        rank[graph.order] = np.arange(graph.num_nodes)
        empty = not isinstance(self.target, Tensor) and self.target == self.source
        items = []
        for item in z.reshape(batch.numel(), z.shape[-1]).cpu():
            path = np.array(item.nonzero().flatten().tolist(), np.int64)
            path = path[np.argsort(rank[graph.tails[path]])]
            if graph.has_parallel:
                items.append(path.tolist())
            elif len(path):
                items.append([int(graph.tails[path[0]]), *graph.heads[path].tolist()])
            else:
                items.append([self.source] if empty else [])
        return nest(items, batch)

    def encode(self, obj: Any) -> Tensor:
        """z of the nodes along a path (with parallel edges: its edges), or of a batch of them."""
        items, batch = unnest("Path", obj, 1, len(self.batch_shape))
        if self._graph.has_parallel:
            for e in itertools.chain.from_iterable(items):
                if not 0 <= e < self.event_shape[0]:
                    raise ValueError(
                        f"Path: an edge is between 0 and {self.event_shape[0] - 1}, got {e}."
                    )
            return self._z_of(items).reshape(*batch, *self.event_shape)
        number = {(a, b): e for e, (a, b) in enumerate(self._graph.edges.tolist())}
        paths = []
        for item in items:
            for step in itertools.pairwise(item):
                if step not in number:
                    raise ValueError(f"Path: there is no edge {step[0]} → {step[1]}.")
            paths.append([number[step] for step in itertools.pairwise(item)])
        return self._z_of(paths).reshape(*batch, *self.event_shape)


_NO_PATH = (
    "no path leads from node {source} to node {got}{item}. Edges are [from, to]; are they the "
    "wrong way round?"
)


def _checked_graph(edges: Tensor, scores: Tensor, source: int) -> Graph:
    if not isinstance(edges, Tensor) or edges.is_floating_point() or edges.dtype == torch.bool:
        got = edges.dtype if isinstance(edges, Tensor) else type(edges).__name__
        raise ValueError(f"Path: edges must be a tensor of integers (E, 2), got {got}.")
    if edges.dim() != 2 or edges.shape[-1] != 2:
        raise ValueError(f"Path: edges must be (E, 2), got {tuple(edges.shape)}.")
    if scores.shape[-1] != len(edges):
        raise ValueError(
            f"Path: scores must be (..., {len(edges)}), one for each edge, got "
            f"{tuple(scores.shape)}."
        )
    if not isinstance(source, int) or source < 0:
        raise ValueError(f"Path: source must be an integer at least 0, got {source!r}.")
    table = on_host(edges, "Path: edges").astype(np.int64)
    if (table < 0).any():
        edge = int((table < 0).any(-1).argmax())
        raise ValueError(
            f"Path: nodes are numbered from 0, got edge {edge} = {table[edge].tolist()}."
        )
    with untransformed():  # the graph is kept
        return _graph(table.tobytes(), source)


# numbers of nodes are no constants of a compiled function; see sparse.solve for the choice of word
_uncompiled = torch._disable_dynamo(_checked_graph)
