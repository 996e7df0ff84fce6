"""Forests: the shape of a dynamic program, apart from its scores.

A forest is a directed acyclic hypergraph. Its *nodes* stand in topological order; each is derived
by one of its incoming *hyperedges* from that edge's *tails* (none, one or two earlier nodes). Nodes
and edges may carry a *part*: an index into a vector of scores θ. A *derivation* of a goal node
picks one incoming edge for it, then one for each of that edge's tails, and so on down. Its score is
the sum of the scores of the parts it meets. All dynamic programs of this library are questions
about the derivations of a goal:

    V[v] = θ[part(v)] + maxΩ over e ∈ in(v) of ( θ[part(e)] + V[tail₁(e)] + V[tail₂(e)] ).

A forest holds no scores and no batch: one forest serves every item of its size, each item naming
its own goal node.

Large regular forests (the spans of a long sentence) are kept *by rule*: runs of edges instead of
lists of them (see ``forest.runs``), which takes O(nodes) memory instead of O(edges).

Glossary: B batch, v nodes, e edges, r runs, P parts.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from structmax import checks
from structmax.cache import Cache

Ints = NDArray[np.int32]
NO_RUNS: Ints = np.empty((0, 10), np.int32)
MAX_LISTED_EDGES = 1 << 22  # a forest drawn in runs and larger than that is kept by rule
MAX_WRITTEN_EDGES = 200_000_000  # no list of all its edges is longer


class Forest:
    """A static topology. Make one with :class:`ForestBuilder`.

    Attributes (int32): edges are sorted by head, ``ptr (v+1)`` delimits the edges into each node;
    ``head, tail1, tail2, edge_part (e)``; ``node_part (v)``. An absent tail is node ``num_nodes``
    (value 0); an absent part is part ``num_parts`` (score 0). A node built without edges is a leaf:
    it gets one edge without tails, so every node has an edge. ``derivation_size (v)`` is the most
    nodes in a derivation of each node, ``longest`` the largest of them.

    >>> draw = ForestBuilder()
    >>> leaf, goal = draw.node(part=0), draw.node(part=1)
    >>> draw.edge(goal, leaf)
    >>> forest = draw.build()
    >>> forest, forest.ptr.tolist(), forest.tail1.tolist()
    (Forest(nodes=2, edges=2, parts=2, levels=2), [0, 1, 2], [2, 0])
    """

    def __init__(
        self, head: Ints, tail1: Ints, tail2: Ints, edge_part: Ints, node_part: Ints, num_parts: int
    ) -> None:
        v = len(node_part)
        degree = np.bincount(head, minlength=v)
        leaves = np.flatnonzero(degree == 0).astype(np.int32)
        nil = np.full(len(leaves), v, np.int32)
        head = np.concatenate([head, leaves])
        order = np.argsort(head, kind="stable")

        def sort(edges: Ints, added: Ints) -> Ints:
            return np.ascontiguousarray(np.concatenate([edges, added])[order], dtype=np.int32)

        self.num_nodes, self.num_parts = v, num_parts
        self.head = np.ascontiguousarray(head[order], dtype=np.int32)
        self.tail1 = sort(np.where(tail1 < 0, v, tail1), nil)
        self.tail2 = sort(np.where(tail2 < 0, v, tail2), nil)
        self.edge_part = sort(
            np.where(edge_part < 0, num_parts, edge_part), np.full_like(nil, num_parts)
        )
        self.node_part = np.where(node_part < 0, num_parts, node_part).astype(np.int32)
        degree[leaves] = 1
        self.ptr = np.concatenate([[0], np.cumsum(degree)]).astype(np.int32)
        self._measure()
        self._register()

    def _measure(self) -> None:
        size = _derivation_size(*self.incoming())
        self.longest = int(size.max())
        if self.longest > np.iinfo(np.int32).max:
            raise ValueError(
                "Forest: a derivation may visit more than 2**31 nodes (a node reused as both tails "
                "doubles at every level); derivations of such a forest cannot be walked."
            )
        self.derivation_size = size.astype(np.int32)

    def _register(self) -> None:
        self.key = f"user:{next(_numbers)}"
        self._device_views: dict[torch.device, DeviceForest] = {}
        _user_forests[self.key] = self

    @property
    def num_edges(self) -> int:
        return len(self.head)

    def incoming(self) -> tuple[Ints, ...]:
        """``ptr, tail1, tail2, edge_part, node_part, runs`` as kernels read them (``forest.runs``).

        The lists of a forest by rule are room for the edges of one node, so one thread's own.
        """
        return self.ptr, self.tail1, self.tail2, self.edge_part, self.node_part, NO_RUNS

    def __repr__(self) -> str:
        return (
            f"Forest(nodes={self.num_nodes}, edges={self.num_edges}, parts={self.num_parts}, "
            f"levels={len(self.levels.ptr) - 1})"
        )

    name = ""  # of a member of a library family: an engine may know a faster way for some
    _lists: ClassVar[tuple[str, ...]] = ("ptr", "head", "tail1", "tail2", "edge_part")
    _sizes: ClassVar[tuple[str, ...]] = ("longest", "derivation_size")

    def __getstate__(self) -> dict[str, Any]:
        names = ("num_nodes", "num_parts", "node_part", *self._lists, *self._sizes)
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._register()

    def same_as(self, other: Forest) -> bool:
        """Whether both have the same edges in the same order."""
        sizes = ("num_nodes", "num_edges", "num_parts")
        if any(getattr(self, name) != getattr(other, name) for name in sizes):
            return False
        lists = self._lists if self._lists == other._lists else Forest._lists
        return all(
            np.array_equal(getattr(self, name), getattr(other, name))
            for name in ("node_part", *lists)
        )

    @cached_property
    def levels(self) -> Levels:
        """Nodes grouped so that every tail lies in an earlier group."""
        level = _levels(*self.incoming())
        order = np.argsort(level, kind="stable").astype(np.int32)
        count = np.bincount(level, minlength=1)
        return Levels(order, np.concatenate([[0], np.cumsum(count)]).astype(np.int32))

    @cached_property
    def part_counts(self) -> Ints:
        """``(v)``: the number of parts in a derivation of each node, −1 where it varies."""
        from structmax.forest.products import count_parts

        return count_parts(self.num_parts, *self.incoming())

    @cached_property
    def used_parts(self) -> Ints:
        """The parts that some node or edge carries, in order."""
        return _distinct(self.num_parts, self.node_part, self.edge_part)

    @cached_property
    def max_degree(self) -> int:
        """D: the most incoming edges of a node."""
        return int(np.diff(self.ptr).max(initial=1))

    @cached_property
    def reversed(self) -> Reversed:
        """For each node, the edges that use it as a tail, with the other tail of each."""
        e = np.arange(self.num_edges, dtype=np.int32)
        used = np.concatenate([self.tail1, self.tail2])
        other = np.concatenate([self.tail2, self.tail1])
        order = np.argsort(used, kind="stable")
        ptr = np.searchsorted(used[order], np.arange(self.num_nodes + 1)).astype(np.int32)
        keep = order[: ptr[-1]]
        return Reversed(ptr, np.concatenate([e, e])[keep], other[keep])

    @cached_property
    def by_part(self) -> ByPart:
        """For each part, the nodes and the edges that carry it."""
        return ByPart(*self._group(self.node_part), *self._group(self.edge_part))

    def _group(self, parts: Ints) -> tuple[Ints, Ints]:
        """Where each part begins in the list of those that carry it, and the list."""
        order = np.argsort(parts, kind="stable").astype(np.int32)
        ptr = np.searchsorted(parts[order], np.arange(self.num_parts + 1)).astype(np.int32)
        return ptr, order[: ptr[-1]]

    def on(self, device: torch.device) -> DeviceForest:
        """The same lists as int32 tensors on a device, copied there once."""
        if device not in self._device_views:
            self._device_views[device] = DeviceForest(self, device)
        return self._device_views[device]


class RuledForest(Forest):
    """A forest kept by rule: ``runs (r, 10)``, sorted by head; ``run_ptr (v+1)`` delimits those
    into each node.

    Kernels on the CPU read the runs. Whatever else looks at a list (``head``, ``tail1``, …: the
    naive engine, the GPU) has all of them written out, once, if they are not too long.
    """

    def __init__(self, heads: Ints, runs: Ints, node_part: Ints, num_parts: int) -> None:
        self.num_nodes, self.num_parts, self.node_part = len(node_part), num_parts, node_part
        self.runs = runs
        self.run_ptr = np.searchsorted(heads, np.arange(self.num_nodes + 1)).astype(np.int32)
        self._register()

    _lists, _sizes = ("run_ptr", "runs"), ()

    def __getattr__(self, name: str) -> Any:
        """What takes a pass over all edges is made when somebody asks for it."""
        if name in Forest._sizes:
            self._measure()
            return self.__dict__[name]
        if name not in Forest._lists:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        if self.num_edges > MAX_WRITTEN_EDGES:
            raise ValueError(
                f"{self!r}: this needs lists of all edges, more than {MAX_WRITTEN_EDGES:,}. On the "
                "CPU, log_partition, marginals, argmax, sample, topk and max_marginals do without."
            )
        heads = np.repeat(np.arange(self.num_nodes, dtype=np.int32), np.diff(self.run_ptr))
        ptr = np.concatenate([[0], np.cumsum(self._degree)]).astype(np.int32)
        lists = (ptr, *_write_out(heads, self.runs))
        self.__dict__.update(zip(Forest._lists, lists, strict=True))
        return self.__dict__[name]

    @cached_property
    def _degree(self) -> NDArray[np.int64]:
        return np.add.reduceat(self.runs[:, 0], self.run_ptr[:-1], dtype=np.int64)

    @property
    def num_edges(self) -> int:
        return int(self._degree.sum())

    @cached_property
    def max_degree(self) -> int:
        return int(self._degree.max())

    def incoming(self) -> tuple[Ints, ...]:
        room = [np.empty(self.max_degree, np.int32) for _ in range(3)]
        return self.run_ptr, *room, self.node_part, self.runs

    @cached_property
    def used_parts(self) -> Ints:
        runs = self.runs[self.runs[:, 7] < self.num_parts]
        *_, edge_part = _write_out(np.zeros(len(runs), np.int32), runs)
        return _distinct(self.num_parts, self.node_part, edge_part)

    @cached_property
    def uses(self) -> Uses:
        """For each node, runs of the edges that use it as a tail."""
        from structmax.forest.runs import reverse

        runs = reverse(*self.incoming())
        runs = runs[np.argsort(runs[:, 0], kind="stable")]
        ptr = np.searchsorted(runs[:, 0], np.arange(self.num_nodes + 1)).astype(np.int32)
        return Uses(ptr, np.ascontiguousarray(runs[:, 1:]))

    @cached_property
    def by_part(self) -> ByPart:
        """As in lists, but an edge is its number among its head's; ``carriers`` spells it out."""
        return ByPart(*self._group(self.node_part), *self.carriers[:2])

    @cached_property
    def carriers(self) -> Carriers:
        """The edges that carry a part, sorted by part."""
        heads = np.repeat(np.arange(self.num_nodes, dtype=np.int32), np.diff(self.run_ptr))
        count = self.runs[:, 0]
        start = np.cumsum(count, dtype=np.int64) - count
        start -= start[self.run_ptr[heads]]  # number of a run's first edge among its head's
        carry = self.runs[:, 7] < self.num_parts
        head, tail1, tail2, part = _write_out(heads[carry], self.runs[carry])
        count = count[carry]
        number = np.arange(len(head)) + np.repeat(start[carry] - np.cumsum(count) + count, count)
        ptr, order = self._group(part)
        lists = (x[order].astype(np.int32) for x in (number, head, tail1, tail2, part))
        return Carriers(ptr, *lists)

    def __repr__(self) -> str:
        return f"Ruled{super().__repr__()[:-1]}, runs={len(self.runs)})"


def _distinct(num_parts: int, *parts: Ints) -> Ints:
    count = np.bincount(np.concatenate(parts), minlength=num_parts + 1)
    return np.flatnonzero(count[:num_parts]).astype(np.int32)


def _write_out(heads: Ints, runs: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """``head, tail1, tail2, edge_part`` of every edge."""
    from structmax.forest.runs import write_all

    count = int(runs[:, 0].sum(dtype=np.int64))
    head, tail1, tail2, edge_part = (np.empty(count, np.int32) for _ in range(4))
    write_all(heads, runs, head, tail1, tail2, edge_part)
    return head, tail1, tail2, edge_part


class Levels(NamedTuple):
    order: Ints  # (v) nodes by level
    ptr: Ints  # (levels+1)


class Reversed(NamedTuple):
    ptr: Ints  # (v+1)
    edge: Ints  # (uses)
    other: Ints  # (uses)


class ByPart(NamedTuple):
    node_ptr: Ints  # (P+1)
    node: Ints
    edge_ptr: Ints  # (P+1)
    edge: Ints


class Uses(NamedTuple):
    ptr: Ints  # (v+1)
    row: Ints  # (runs, 13): count, head, other tail, part, number among the head's edges


class Carriers(NamedTuple):
    ptr: Ints  # (P+1)
    number: Ints  # among the head's edges
    head: Ints
    tail1: Ints
    tail2: Ints
    part: Ints


class DeviceForest:
    """A forest's lists as tensors, made on first use."""

    def __init__(self, forest: Forest, device: torch.device) -> None:
        self._forest, self.device = weakref.ref(forest), device
        self._tensors: dict[str, Tensor] = {}
        self.tables: Any = None  # the naive engine's level tables
        self.items: Any = None  # the lists of the GPU's programs for one item

    def __getattr__(self, path: str) -> Tensor:
        """``view.head``, or ``view.levels_order`` for ``forest.levels.order``."""
        if path.startswith("__"):
            raise AttributeError(path)
        if path not in self._tensors:
            forest = self._forest()
            assert forest is not None
            group, _, name = path.partition("_")
            if group in ("levels", "reversed", "uses", "carriers") and name:
                array = getattr(getattr(forest, group), name)
            elif path.startswith("by_part_"):
                array = getattr(forest.by_part, path.removeprefix("by_part_"))
            else:
                array = getattr(forest, path)
            with torch._C._DisableFuncTorch():  # a kept tensor must not belong to a transform
                self._tensors[path] = torch.from_numpy(array).to(self.device)
        return self._tensors[path]


class ForestBuilder:
    """Draws a forest, node by node or in bulk.

    Two ways to derive a goal, one of them through an inner node:

    >>> import structmax as sx, torch
    >>> draw = sx.ForestBuilder()
    >>> a, b = draw.node(part=0), draw.node(part=1)
    >>> ab = draw.node(part=2)
    >>> draw.edge(ab, a, b)
    >>> goal = draw.node()
    >>> draw.edge(goal, ab)
    >>> draw.edge(goal, a, part=3)
    >>> forest = draw.build()
    >>> forest
    Forest(nodes=4, edges=5, parts=4, levels=3)
    >>> sx.Hyperpath(forest, torch.tensor([0.0, 1.0, 1.0, 1.5])).argmax()
    tensor([1., 1., 1., 0.])
    """

    def __init__(self) -> None:
        self._num_nodes = 0
        self._node_parts: list[Ints] = []
        self._edges: list[tuple[Ints, ...]] = []  # of (head, tail1, tail2, part), or (head, run)

    def node(self, part: int = -1) -> int:
        """Adds a node and returns its number. ``part`` −1 means none."""
        return int(self.nodes(1, part)[0])

    def nodes(self, count: int, parts: ArrayLike = -1) -> Ints:
        """Adds ``count`` nodes and returns their numbers, in order."""
        if count < 0:
            raise ValueError(f"ForestBuilder.nodes: count must be at least 0, got {count}.")
        (part,) = _integers("ForestBuilder.nodes: parts", parts)
        if len(part) and part.min() < -1:
            raise ValueError(
                f"ForestBuilder.nodes: a part must be at least 0, or -1 for none, got {part.min()}."
            )
        if part.shape not in ((1,), (count,)):
            raise ValueError(
                f"ForestBuilder.nodes: parts must be one for each of the {count} nodes, or one "
                f"for all, got {len(part)}."
            )
        _check_size("nodes", self._num_nodes + count, 32)
        first = self._num_nodes
        self._num_nodes += count
        self._node_parts.append(np.broadcast_to(part, (count,)))
        return np.arange(first, self._num_nodes, dtype=np.int32)

    def edge(self, head: int, *tails: int, part: int = -1) -> None:
        """Lets ``head`` be derived from zero, one or two earlier nodes."""
        if len(tails) > 2:
            raise ValueError(
                f"ForestBuilder.edge: at most 2 tails, got {len(tails)}. "
                "Chain longer rules through inner nodes."
            )
        pair = (*tails, -1, -1)[:2]
        self.edges(head, pair[0], pair[1], part)

    def edges(
        self, heads: ArrayLike, tails1: ArrayLike, tails2: ArrayLike = -1, parts: ArrayLike = -1
    ) -> None:
        """Adds edges in bulk; the arguments broadcast. −1 means no tail, no part."""
        what = "ForestBuilder.edges: heads, tails and parts"
        _check_size("edges", np.broadcast(heads, tails1, tails2, parts).size, 64)
        head, t1, t2, part = _integers(what, heads, tails1, tails2, parts)
        self._check_heads("edges", head)
        late = (t1 >= head) | (t2 >= head) | (t1 < -1) | (t2 < -1)
        if late.any():
            i = int(np.flatnonzero(late)[0])
            raise ValueError(
                f"ForestBuilder.edges: the tails of node {head[i]} must be earlier nodes, got "
                f"({t1[i]}, {t2[i]}). Add nodes in topological order."
            )
        if len(part) and part.min() < -1:
            raise ValueError(
                f"ForestBuilder.edges: a part must be at least 0, or -1 for none, got {part.min()}."
            )
        self._edges.append((head, t1, t2, part))

    def runs(
        self, heads: ArrayLike, counts: ArrayLike, edge: Callable[[Any], tuple[ArrayLike, ...]]
    ) -> None:
        """Adds runs of edges: ``counts`` edges to each head, the d-th of them ``edge(d)``, a tuple
        ``tails1[, tails2[, parts]]`` as ``edges`` takes them.

        Each must be a polynomial in d of degree 2 at most, or −1 for the whole run. Then a forest
        too large for lists of its edges is kept by rule, in memory that grows as the runs.

        A sum of n numbers, each 0 or 1 (parts 2t and 2t + 1), as runs of two edges:

        >>> draw = ForestBuilder()
        >>> after = draw.nodes(3)  # after t + 1 numbers
        >>> draw.runs(after, 2, lambda d: (after - 1, -1, 2 * after + d))
        >>> draw.build()
        Forest(nodes=3, edges=6, parts=6, levels=3)
        """
        what = "ForestBuilder.runs: heads, counts, tails and parts"
        _check_size("runs of edges", np.broadcast(heads, counts).size, 200)
        head, count = _integers(what, heads, counts)
        self._check_heads("runs", head)
        if len(count) and count.min() < 0:
            raise ValueError(f"ForestBuilder.runs: a count must be at least 0, got {count.min()}.")

        def at(d: ArrayLike) -> NDArray[np.int64]:
            """Tails and part of the d-th edge of each run, ``(3, r)``."""
            given = _integers(what, head, *(*edge(d), -1, -1)[:3])[1:]
            return np.stack(given).astype(np.int64)

        (zeroth, first, second), last = (at(d) for d in range(3)), np.maximum(count - 1, 0)
        step = np.where(count > 1, first - zeroth, 0)
        bend = np.where(count > 2, second - 2 * first + zeroth, 0)
        wrong = (zeroth + step * last + bend * (last * (last - 1) // 2) != at(last)) & (count > 0)
        if wrong.any():
            r = int(np.flatnonzero(wrong.any(0))[0])
            raise ValueError(
                f"ForestBuilder.runs: the tails and the part of node {head[r]} must be polynomials "
                "in d of degree 2 at most. Cut the run where they are not."
            )
        _check_range(f"{what}: second differences", bend.min(initial=0), bend.max(initial=0))
        rows = np.concatenate([count[None], np.stack([zeroth, step, bend], 1).reshape(9, -1)])
        rows = np.ascontiguousarray(rows.T[count > 0], dtype=np.int32)
        self._edges.append((head[count > 0], rows))

    def _check_heads(self, method: str, head: Ints) -> None:
        if len(head) and (head.min() < 0 or head.max() >= self._num_nodes):
            bad = int(head[(head < 0) | (head >= self._num_nodes)][0])
            raise ValueError(f"ForestBuilder.{method}: head {bad} is no node yet.")

    def build(self, num_parts: int | None = None) -> Forest:
        """The forest. ``num_parts`` is the length of the scores (default: the largest part + 1)."""
        if self._num_nodes == 0:
            raise ValueError("ForestBuilder.build: a forest needs at least one node.")
        node_part = np.concatenate(self._node_parts)
        if any(len(given) == 2 for given in self._edges):
            return self._build_runs(node_part, num_parts)
        empty = np.empty(0, np.int32)
        columns = zip(*self._edges, strict=True) if self._edges else [(empty,)] * 4
        head, t1, t2, part = (np.concatenate(column) for column in columns)
        num_parts = _number_of_parts(num_parts, node_part, part.max(initial=-1))
        return Forest(head, t1, t2, part, node_part, num_parts)

    def _build_runs(self, node_part: Ints, num_parts: int | None) -> Forest:
        from structmax.forest.runs import survey

        given = [pair if len(pair) == 2 else _single_runs(*pair) for pair in self._edges]
        heads, runs = (np.concatenate(column) for column in zip(*given, strict=True))
        r, d, largest = survey(heads, runs)
        if r >= 0:
            a, b, c = np.moveaxis(runs[r, 1:].reshape(3, 3), 1, 0)
            tail1, tail2, part = (a + b * d + c * (d * (d - 1) // 2)).tolist()
            raise ValueError(
                f"ForestBuilder.runs: edge {d} of a run of node {heads[r]} has the tails "
                f"({tail1}, {tail2}) and part {part}. Tails must be earlier nodes and parts at "
                "least 0, or -1 for the whole run."
            )
        num_parts = _number_of_parts(num_parts, node_part, largest)
        v = self._num_nodes
        leaves = np.flatnonzero(np.bincount(heads, minlength=v) == 0).astype(np.int32)
        none = np.full(len(leaves), -1, np.int32)
        added = _single_runs(leaves, none, none, none)
        heads, runs = np.concatenate([heads, added[0]]), np.concatenate([runs, added[1]])
        order = np.argsort(heads, kind="stable")
        heads, runs = heads[order], runs[order]
        if runs[:, 0].sum(dtype=np.int64) <= MAX_LISTED_EDGES:
            return Forest(*_write_out(heads, runs), node_part, num_parts)
        for column, absent in ((1, v), (4, v), (7, num_parts)):
            runs[runs[:, column] == -1, column] = absent
        node_part = np.where(node_part < 0, num_parts, node_part).astype(np.int32)
        return RuledForest(heads, runs, node_part, num_parts)


def _single_runs(head: Ints, tail1: Ints, tail2: Ints, part: Ints) -> tuple[Ints, Ints]:
    """Edges as runs of one each."""
    runs = np.zeros((len(head), 10), np.int32)
    runs[:, 0], runs[:, 1], runs[:, 4], runs[:, 7] = 1, tail1, tail2, part
    return head, runs


def _number_of_parts(num_parts: int | None, node_part: Ints, largest_of_edges: int) -> int:
    largest = int(max(node_part.max(initial=-1), largest_of_edges))
    if num_parts is None:
        return largest + 1
    _check_range("ForestBuilder.build: num_parts", 0, num_parts)
    if largest >= num_parts:
        raise ValueError(
            f"ForestBuilder.build: part {largest} is used, but num_parts is {num_parts}."
        )
    return num_parts


def _check_size(what: str, count: int, each: int) -> None:
    """Numbers of nodes and edges are int32, and drawing takes some bytes for each."""
    if count > np.iinfo(np.int32).max:
        raise ValueError(
            f"Forest: {count:,} {what} are too many to be numbered, which goes up to 2**31 − 1. "
            "Shorten the items."
        )
    checks.room("Forest", f"{count:,} {what}", count * each)


def _check_range(what: str, least: Any, largest: Any) -> None:
    """Numbers of nodes and of parts are int32, and one more than the last stands for none."""
    limit = np.iinfo(np.int32).max - 1
    for number in (least, largest):
        if not -limit <= number <= limit:
            raise ValueError(
                f"{what} must lie between −(2**31 − 2) and 2**31 − 2, which int32 holds, got "
                f"{number}. Number nodes and parts from 0, without gaps."
            )


def _integers(what: str, *given: ArrayLike) -> list[Ints]:
    """Integers of any shape, broadcast together, as flat int32 arrays."""
    arrays = [np.asarray(a) for a in given]
    for array in arrays:
        if not array.size:
            continue
        whole = np.issubdtype(array.dtype, np.integer)
        # Python's integers beyond 64 bits are objects
        if not whole and not all(isinstance(x, int) for x in array.flat):
            raise ValueError(f"{what} must be integers, got {array.dtype}.")
        _check_range(what, array.min(), array.max())
    return [np.ravel(a).astype(np.int32) for a in np.broadcast_arrays(*arrays)]


# Forests travel to custom ops by name. A library family is rebuilt from its name when it is no
# longer cached; a user's forest lives as long as somebody holds it.

_numbers = itertools.count()
_user_forests: weakref.WeakValueDictionary[str, Forest] = weakref.WeakValueDictionary()
_families: dict[str, Callable[..., Forest]] = {}
_cache: Cache[str, Forest] = Cache(most=1 << 29)


def family(draw: Callable[..., Forest]) -> Callable[..., Forest]:
    """Registers a function of sizes that draws a forest, so that ``name_of`` can refer to it."""
    _families[draw.__name__] = draw
    return draw


def name_of(family_name: str, sizes: Sequence[int]) -> str:
    """The name under which ``lookup`` finds a member of a family."""
    # index: a size that torch.compile has made symbolic becomes a number again
    return family_name + ":" + ",".join([str(operator.index(size)) for size in sizes])


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Tells ``torch.compile`` to call this and keep what it returns: Dynamo cannot trace drawing.

    For functions of constants only. ``torch.compiler.assume_constant_result`` does the same, but
    also loads the compiler where nobody compiles.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@untraced
def lookup(key: str) -> Forest:
    """The forest of that name, built if it is not cached."""
    kind, _, rest = key.partition(":")
    if kind == "user":
        try:
            return _user_forests[key]
        except KeyError:
            raise RuntimeError(
                f"the forest {key!r} no longer exists; keep a reference to it while it is in use."
            ) from None

    def build() -> Forest:
        forest = _families[kind](*[int(size) for size in rest.split(",") if size])
        forest.name = key
        return forest

    return _cache.get(key, build)


def bucket(n: int) -> int:
    """``n`` rounded up to one of ~8 sizes per octave, so few forests serve a ragged corpus.

    >>> [bucket(n) for n in (1, 9, 17, 100)]
    [1, 9, 18, 104]
    """
    n = operator.index(n)  # sizes may be symbols or, under torch.jit.trace, tensors
    step = 1 << max(0, n.bit_length() - 4)
    return -(-n // step) * step


def _levels(*incoming: Ints) -> Ints:
    from structmax.forest.cpu import level_of_nodes

    return level_of_nodes(*incoming)


def _derivation_size(*incoming: Ints) -> NDArray[np.int64]:
    from structmax.forest.cpu import size_of_derivations

    return size_of_derivations(*incoming)
