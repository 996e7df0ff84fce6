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

Glossary: B batch, v nodes, e edges, P parts.
"""

from __future__ import annotations

import itertools
import operator
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

Ints = NDArray[np.int32]


class Forest:
    """A static topology. Make one with :class:`ForestBuilder`.

    Attributes (int32): edges are sorted by head, ``ptr (v+1)`` delimits the edges into each node;
    ``head, tail1, tail2, edge_part (e)``; ``node_part (v)``. An absent tail is node ``num_nodes``
    (value 0); an absent part is part ``num_parts`` (score 0). A node built without edges is a leaf:
    it gets one edge without tails, so every node has an edge. ``derivation_size (v)`` is the most
    nodes in a derivation of each node, ``longest`` the largest of them.
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
        size = _derivation_size(self.ptr, self.tail1, self.tail2)
        self.longest = int(size.max())
        if self.longest > np.iinfo(np.int32).max:
            raise ValueError(
                "Forest: a derivation may visit more than 2**31 nodes (a node reused as both tails "
                "doubles at every level); derivations of such a forest cannot be walked."
            )
        self.derivation_size = size.astype(np.int32)
        self._register()

    def _register(self) -> None:
        self.key = f"user:{next(_numbers)}"
        self._device_views: dict[torch.device, DeviceForest] = {}
        _user_forests[self.key] = self

    @property
    def num_edges(self) -> int:
        return len(self.head)

    def __repr__(self) -> str:
        return (
            f"Forest(nodes={self.num_nodes}, edges={self.num_edges}, parts={self.num_parts}, "
            f"levels={len(self.levels.ptr) - 1})"
        )

    def __getstate__(self) -> dict[str, Any]:
        fixed = "head tail1 tail2 edge_part node_part ptr derivation_size"
        names = ["num_nodes", "num_parts", "longest", *fixed.split()]
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._register()

    @cached_property
    def levels(self) -> Levels:
        """Nodes grouped so that every tail lies in an earlier group."""
        level = _levels(self.ptr, self.tail1, self.tail2)
        order = np.argsort(level, kind="stable").astype(np.int32)
        count = np.bincount(level, minlength=1)
        return Levels(order, np.concatenate([[0], np.cumsum(count)]).astype(np.int32))

    @cached_property
    def part_counts(self) -> Ints:
        """``(v)``: the number of parts in a derivation of each node, −1 where it varies."""
        from structmax.forest.products import count_parts

        lists = (self.ptr, self.tail1, self.tail2, self.edge_part, self.node_part)
        return count_parts(self.num_parts, *lists)

    @cached_property
    def used_parts(self) -> Ints:
        """The parts that some node or edge carries, in order."""
        both = np.concatenate([self.node_part, self.edge_part])
        return np.flatnonzero(np.bincount(both, minlength=self.num_parts + 1)[:-1]).astype(np.int32)

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

        def group(parts: Ints) -> tuple[Ints, Ints]:
            order = np.argsort(parts, kind="stable").astype(np.int32)
            ptr = np.searchsorted(parts[order], np.arange(self.num_parts + 1)).astype(np.int32)
            return ptr, order[: ptr[-1]]

        return ByPart(*group(self.node_part), *group(self.edge_part))

    def on(self, device: torch.device) -> DeviceForest:
        """The same lists as int32 tensors on a device, copied there once."""
        if device not in self._device_views:
            self._device_views[device] = DeviceForest(self, device)
        return self._device_views[device]


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
            if group in ("levels", "reversed") and name:
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
        self._edges: list[tuple[Ints, Ints, Ints, Ints]] = []

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
        head, t1, t2, part = _integers(what, heads, tails1, tails2, parts)
        if len(head) and (head.min() < 0 or head.max() >= self._num_nodes):
            bad = int(head[(head < 0) | (head >= self._num_nodes)][0])
            raise ValueError(f"ForestBuilder.edges: head {bad} is no node yet.")
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

    def build(self, num_parts: int | None = None) -> Forest:
        """The forest. ``num_parts`` is the length of the scores (default: the largest part + 1)."""
        if self._num_nodes == 0:
            raise ValueError("ForestBuilder.build: a forest needs at least one node.")
        empty = np.empty(0, np.int32)
        node_part = np.concatenate(self._node_parts)
        columns = zip(*self._edges, strict=True) if self._edges else [(empty,)] * 4
        head, t1, t2, part = (np.concatenate(column) for column in columns)
        largest = max(node_part.max(initial=-1), part.max(initial=-1))
        if num_parts is None:
            num_parts = int(largest) + 1
        if largest >= num_parts:
            raise ValueError(
                f"ForestBuilder.build: part {largest} is used, but num_parts is {num_parts}."
            )
        return Forest(head, t1, t2, part, node_part, num_parts)


def _integers(what: str, *given: ArrayLike) -> list[Ints]:
    """Integers of any shape, broadcast together, as flat int32 arrays."""
    arrays = [np.asarray(a) for a in given]
    for array in arrays:
        if array.size and not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"{what} must be integers, got {array.dtype}.")
    return [np.ravel(a).astype(np.int32) for a in np.broadcast_arrays(*arrays)]


# Forests travel to custom ops by name. A library family is rebuilt from its name when it is no
# longer cached; a user's forest lives as long as somebody holds it.

_numbers = itertools.count()
_user_forests: weakref.WeakValueDictionary[str, Forest] = weakref.WeakValueDictionary()
_families: dict[str, Callable[..., Forest]] = {}
_cache: OrderedDict[str, Forest] = OrderedDict()
_cache_lock = threading.RLock()
MAX_CACHED_EDGES = 50_000_000


def family(draw: Callable[..., Forest]) -> Callable[..., Forest]:
    """Registers a function of sizes that draws a forest, so that ``name_of`` can refer to it."""
    _families[draw.__name__] = draw
    return draw


def name_of(family_name: str, sizes: Sequence[int]) -> str:
    """The name under which ``lookup`` finds a member of a family."""
    # index: a size that torch.compile has made symbolic becomes a number again
    return family_name + ":" + ",".join([str(operator.index(size)) for size in sizes])


def lookup(key: str) -> Forest:
    """The forest of that name, drawn if need be. The cache is bounded by its number of edges."""
    kind, _, rest = key.partition(":")
    if kind == "user":
        try:
            return _user_forests[key]
        except KeyError:
            raise RuntimeError(
                f"the forest {key!r} no longer exists; keep a reference to it while it is in use."
            ) from None
    with _cache_lock:
        if key not in _cache:
            _cache[key] = _families[kind](*[int(size) for size in rest.split(",")])
        _cache.move_to_end(key)
        while len(_cache) > 1 and sum(f.num_edges for f in _cache.values()) > MAX_CACHED_EDGES:
            _cache.popitem(last=False)
        return _cache[key]


def bucket(n: int) -> int:
    """``n`` rounded up to one of ~8 sizes per octave, so few forests serve a ragged corpus.

    >>> [bucket(n) for n in (1, 9, 17, 100)]
    [1, 9, 18, 104]
    """
    step = 1 << max(0, n.bit_length() - 4)
    return -(-n // step) * step


def _levels(ptr: Ints, tail1: Ints, tail2: Ints) -> Ints:
    from structmax.forest.cpu import level_of_nodes

    return level_of_nodes(ptr, tail1, tail2)


def _derivation_size(ptr: Ints, tail1: Ints, tail2: Ints) -> NDArray[np.int64]:
    from structmax.forest.cpu import size_of_derivations

    return size_of_derivations(ptr, tail1, tail2)
