"""The forest engine on the GPU, one program per item: Shannon's value and gradient in one launch.

The kernels of ``gpu`` share a level among all programs and wait for each other after every level.
For trees over a sentence, levels are many and small, so waiting is most of the time. Here a program
walks all levels of its own item, up and down again, with nothing but its own barrier in between.

Nodes are renumbered by level, so the nodes of a level are neighbours in the item's tables. A level
is cut into tiles of nodes. The edges of a tile are stored slot by slot: the first edge of every
node, then the second of every node, and so on, padded to the longest list. So threads next to each
other read lists, and in charts also the values that the lists name, next to each other. Uses of a
node are listed upwards by head where it is a first tail, then downwards where it is a second tail:
then a slot holds spans at one distance for all nodes of a level, and lists are equally long.

Sums flow through lists, never through atomics, and no item sees another: the same input gives the
same bits, whatever the batch. Values are float64, what enters exp and log in the dtype of the
scores.

The recurrence and its range are those of ``cpu``: q = exp((x − T)/γ)/Σ with T the largest option.
The sum is never put back into a logarithm, where it would be lost if scores are huge.

Glossary, for one item: V value (nodes + 2: absent is 0, padding −inf), T the largest option, W the
sum Σ, and on the way down the visits for each unit of it, G/Σ, G expected visits; of W and G both
last are 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from structmax.forest.topology import Forest, Ints
from structmax.launch import quick

TILE = 1024  # slots that a program reads at a time
NARROW = 32  # nodes of a tile that has long lists; of others 4 and 16 times as many
WARPS = 16
START = 2  # how many steps of TILE slots the start of a tile costs, for choosing among the shapes
STEPS = 10  # per level at most, up and down together; beyond, many programs are faster
PADDING = 4  # times as many slots as edges and uses at most

PARTS = 512  # uses of parts that a program of count_parts reads at a time
FIELDS = tl.constexpr(8)


@triton.jit
def tile_at(tiles, t):
    """First node, nodes, longest list of edges, its place, longest of uses, its place, shape."""
    at = tiles + t * FIELDS
    a, b, c, d = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    return a, b, c, d, tl.load(at + 4), tl.load(at + 5), tl.load(at + 6)


@triton.jit
def score_of(scores, sp, part, P):
    """θ[part], 0 for the absent part."""
    at = scores + part.to(tl.int64) * sp
    return tl.load(at, mask=part < P, other=0.0).to(tl.float64)


@triton.jit
def up_tile(
    scores, sp, V, T, W, tail1, tail2, edge_part, first, count, longest, place,
    P, nodes, gamma, rate, BE: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr,
    EDGES: tl.constexpr,
):  # fmt: skip
    """V, T and W of some nodes. Each of the BE rows of slots has its own maximum and sum."""
    column = tl.arange(0, BN)
    live = column < count
    own = tl.load(V + first + column, mask=live, other=0.0)
    peaks = tl.full((BE, BN), -float("inf"), tl.float64)
    sums = tl.zeros((BE, BN), DTYPE)  # Σ exp((x − peak)/γ)
    for start in range(0, longest, BE):
        slot = start + tl.arange(0, BE)
        inside = (slot < longest)[:, None] & live[None, :]
        at = place + slot[:, None] * count + column[None, :]
        one = tl.load(tail1 + at, mask=inside, other=nodes + 1)
        two = tl.load(tail2 + at, mask=inside, other=nodes + 1)
        x = tl.load(V + one) + tl.load(V + two)
        if EDGES:
            x += score_of(scores, sp, tl.load(edge_part + at, mask=inside, other=P), P)
        gap = tl.where(x == -float("inf"), -float("inf"), -tl.abs(x - peaks))
        other = tl.exp((gap * rate).to(DTYPE))
        higher = x > peaks
        sums = tl.where(higher, sums * other + 1.0, sums + other)  # NaN if x is
        peaks = tl.where(higher, x, peaks)
    peak = tl.max(peaks, 0)
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    sums *= tl.exp(((peaks - peak[None, :]) * rate).to(DTYPE))
    total = tl.sum(sums, 0)
    value = peak + gamma * tl.log(total).to(tl.float64)  # −inf where nothing is feasible
    tl.store(T + first + column, peak, mask=live)
    tl.store(W + first + column, total.to(tl.float64), mask=live)
    tl.store(V + first + column, value + own, mask=live)


@triton.jit
def down_tile(
    scores, sp, V, T, W, G, M, node_part, head, other, use_part, first, count, longest, place,
    goal, P, nodes, rate, BE: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr,
    EDGES: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """G, Σ over uses of G[head]·q, and W; G of the goal is 1, or NaN, or 0 if infeasible."""
    column = tl.arange(0, BN)
    live = column < count
    value = tl.load(V + first + column, mask=live, other=0.0)
    part = tl.load(node_part + first + column, mask=live, other=P)
    total = tl.zeros((BE, BN), DTYPE)
    for start in range(0, longest, BE):
        slot = start + tl.arange(0, BE)
        inside = (slot < longest)[:, None] & live[None, :]
        at = place + slot[:, None] * count + column[None, :]
        h = tl.load(head + at, mask=inside, other=nodes + 1)
        x = value[None, :] + tl.load(V + tl.load(other + at, mask=inside, other=nodes + 1))
        if EDGES:
            x += score_of(scores, sp, tl.load(use_part + at, mask=inside, other=P), P)
        total += flow(x, tl.load(T + h), tl.load(W + h).to(DTYPE), rate, DTYPE)
    seed = tl.where(value != value, value, tl.where(value == -float("inf"), 0.0, 1.0))
    g = tl.where(first + column == goal, seed.to(DTYPE), tl.sum(total, 0))
    tl.store(G + first + column, g, mask=live)
    mass = tl.load(W + first + column, mask=live, other=1.0)
    share = tl.where(g == 0.0, 0.0, g.to(tl.float64) / mass)
    tl.store(W + first + column, share, mask=live)
    if DIRECT:
        tl.store(M + part, g.to(M.dtype.element_ty), mask=part < P)


@triton.jit
def flow(x, t, w, rate, DTYPE: tl.constexpr):
    """G[head]·q. A node that is not visited may hold anything."""
    return tl.where(w == 0.0, 0.0, w * tl.exp(((x - t) * rate).to(DTYPE)))


@quick
@triton.jit(do_not_specialize=["sb", "sg", "P", "nodes"])
def walk_item(
    scores, sb, sp, goals, sg, A, M, VT, G, tiles, rank, tile_of, node_part,
    tail1, tail2, edge_part, head, other, use_part, P, nodes, gamma: tl.float64,
    TILE: tl.constexpr, NARROW: tl.constexpr, EDGES: tl.constexpr, DOWN: tl.constexpr,
    DIRECT: tl.constexpr,
):  # fmt: skip
    """A, and with ``DOWN`` also G; with ``DIRECT`` the gradient M, where a part has one node."""
    DTYPE: tl.constexpr = G.dtype.element_ty
    MIDDLE: tl.constexpr = 4 * NARROW
    WIDE: tl.constexpr = 16 * NARROW
    b = tl.program_id(0).to(tl.int64)
    size = nodes + 2
    scores += b * sb
    V = VT + b * 3 * size
    T, W = V + size, V + 2 * size
    G += b * size
    M += b * P
    node = tl.load(goals + b * sg)
    goal, last = tl.load(rank + node), tl.load(tile_of + node)
    rate = tl.full((), 1.0, tl.float64) / gamma
    tl.store(V + nodes, 0.0)
    tl.store(V + nodes + 1, -float("inf"))
    cells = tl.arange(0, TILE)
    after = tl.load(tiles + last * FIELDS) + tl.load(tiles + last * FIELDS + 1)
    for start in range(0, after, TILE):  # V begins as the nodes' own scores
        live = start + cells < after
        part = tl.load(node_part + start + cells, mask=live, other=P)
        tl.store(V + start + cells, score_of(scores, sp, part, P), mask=live)
    if DOWN:  # nothing visits what comes after the goal
        for start in range(after, size, TILE):
            tl.store(G + start + cells, 0.0, mask=start + cells < size)
            tl.store(W + start + cells, 0.0, mask=start + cells < size)
        if DIRECT:
            for start in range(0, P, TILE):
                tl.store(M + start + cells, 0.0, mask=start + cells < P)
    first, count, edges, edges_at, uses, uses_at, shape = tile_at(tiles, 0)
    tl.debug_barrier()
    for t in range(0, last + 1):
        # the next tile is fetched while this one is at work
        n_first, n_count, n_edges, n_edges_at, n_uses, n_uses_at, n_shape = tile_at(
            tiles, tl.minimum(t + 1, last)
        )
        if shape == 0:
            up_tile(
                scores, sp, V, T, W, tail1, tail2, edge_part, first, count, edges, edges_at, P,
                nodes, gamma, rate, TILE // NARROW, NARROW, DTYPE, EDGES,
            )  # fmt: skip
        elif shape == 1:
            up_tile(
                scores, sp, V, T, W, tail1, tail2, edge_part, first, count, edges, edges_at, P,
                nodes, gamma, rate, TILE // MIDDLE, MIDDLE, DTYPE, EDGES,
            )  # fmt: skip
        else:
            up_tile(
                scores, sp, V, T, W, tail1, tail2, edge_part, first, count, edges, edges_at, P,
                nodes, gamma, rate, TILE // WIDE, WIDE, DTYPE, EDGES,
            )  # fmt: skip
        first, count, edges, edges_at = n_first, n_count, n_edges, n_edges_at
        uses, uses_at, shape = n_uses, n_uses_at, n_shape
        tl.debug_barrier()
    tl.store(A + b, tl.load(V + goal).to(A.dtype.element_ty))
    if DOWN:
        for back in range(0, last + 1):
            n_first, n_count, n_edges, n_edges_at, n_uses, n_uses_at, n_shape = tile_at(
                tiles, tl.maximum(last - back - 1, 0)
            )
            if shape == 0:
                down_tile(
                    scores, sp, V, T, W, G, M, node_part, head, other, use_part, first, count,
                    uses, uses_at, goal, P, nodes, rate, TILE // NARROW, NARROW, DTYPE, EDGES,
                    DIRECT,
                )  # fmt: skip
            elif shape == 1:
                down_tile(
                    scores, sp, V, T, W, G, M, node_part, head, other, use_part, first, count,
                    uses, uses_at, goal, P, nodes, rate, TILE // MIDDLE, MIDDLE, DTYPE, EDGES,
                    DIRECT,
                )  # fmt: skip
            else:
                down_tile(
                    scores, sp, V, T, W, G, M, node_part, head, other, use_part, first, count,
                    uses, uses_at, goal, P, nodes, rate, TILE // WIDE, WIDE, DTYPE, EDGES,
                    DIRECT,
                )  # fmt: skip
            first, count, edges, edges_at = n_first, n_count, n_edges, n_edges_at
            uses, uses_at, shape = n_uses, n_uses_at, n_shape
            tl.debug_barrier()


@quick
@triton.jit(do_not_specialize=["sb", "P", "nodes", "blocks"])
def count_parts(
    scores, sb, sp, M, VT, G, node_ptr, node, edge_ptr, head, tail1, tail2, P, nodes, blocks,
    gamma: tl.float64, BP: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """M: expected uses of BP parts of one item, SHARE of the nodes or edges of each at a time."""
    DTYPE: tl.constexpr = G.dtype.element_ty
    b = (tl.program_id(0) // blocks).to(tl.int64)
    part = (tl.program_id(0) % blocks) * BP + tl.arange(0, BP)
    size = nodes + 2
    V = VT + b * 3 * size
    T, W = V + size, V + 2 * size
    G += b * size
    own = score_of(scores + b * sb, sp, part, P)
    rate = tl.full((), 1.0, tl.float64) / gamma
    share = tl.arange(0, SHARE)[:, None]
    total = tl.zeros((SHARE, BP), DTYPE)
    start = tl.load(node_ptr + part, mask=part < P, other=0)
    stop = tl.load(node_ptr + part + 1, mask=part < P, other=0)
    for skip in range(0, tl.max(stop - start, 0), SHARE):
        at = start[None, :] + skip + share
        v = tl.load(node + at, mask=at < stop[None, :], other=nodes)
        total += tl.load(G + v)
    start = tl.load(edge_ptr + part, mask=part < P, other=0)
    stop = tl.load(edge_ptr + part + 1, mask=part < P, other=0)
    for skip in range(0, tl.max(stop - start, 0), SHARE):
        at = start[None, :] + skip + share
        inside = at < stop[None, :]
        h = tl.load(head + at, mask=inside, other=nodes)
        x = tl.load(V + tl.load(tail1 + at, mask=inside, other=nodes))
        x += tl.load(V + tl.load(tail2 + at, mask=inside, other=nodes))
        total += flow(x + own[None, :], tl.load(T + h), tl.load(W + h).to(DTYPE), rate, DTYPE)
    tl.store(M + b * P + part, tl.sum(total, 0).to(M.dtype.element_ty), mask=part < P)


class Plan:
    """The lists of a forest in the order in which a program reads them, on a device."""

    def __init__(self, forest: Forest, tiles: Ints, order: Ints, device: torch.device) -> None:
        v = forest.num_nodes
        rank = np.empty(v + 1, np.int32)  # the absent node stays number v
        rank[order], rank[v] = np.arange(v), v
        head, tail1, tail2 = rank[forest.head], rank[forest.tail1], rank[forest.tail2]
        first, count, longest, edges_at, most, uses_at, _, _ = tiles.astype(np.int64).T
        tile_of = np.repeat(np.arange(len(tiles), dtype=np.int32), count)

        def lay_out(row: Ints, place: Ints, longest: Ints, *lists: Ints) -> list[Ints]:
            """Two lists of nodes and one of parts, all sorted by row, into slots."""
            tile, begin = tile_of[row], np.searchsorted(row, np.arange(v))
            slot = (np.arange(len(row)) - begin[row]) * count[tile]
            slot += place[tile] + row - first[tile]
            out, absent = [], (v + 1, v + 1, self.P)
            for values, none in list(zip(lists, absent, strict=True))[: 2 + self.edges]:
                out.append(np.full(count @ longest, none, np.int32))
                out[-1][slot] = values
            return [*out, out[0]][:3]  # without parts on edges, nobody reads the third

        parts, nodes_of = forest.edge_part, np.bincount(forest.node_part, minlength=1)
        self.P, self.nodes, self.shape = forest.num_parts, v, (TILE, NARROW)
        self.edges = bool((parts < self.P).any())
        self.direct = bool(not self.edges and nodes_of[: self.P].max(initial=0) <= 1)
        into = np.argsort(head, kind="stable")
        used, other = np.concatenate([tail1, tail2]), np.concatenate([tail2, tail1])
        key = used * np.int64(2 * v + 1) + np.concatenate([head, 2 * v - head])
        use = np.argsort(key, kind="stable")[: np.count_nonzero(used < v)]
        edge = use % forest.num_edges
        lists = [
            tiles, rank[:-1], tile_of[rank[:-1]], forest.node_part[order],
            *lay_out(head[into], edges_at, longest, tail1[into], tail2[into], parts[into]),
            *lay_out(used[use], uses_at, most, head[edge], other[use], parts[edge]),
        ]  # fmt: skip
        self.lists = [on(device, array) for array in lists]
        self.by_part: list[Tensor] = []
        if not self.direct:
            by = forest.by_part
            uses = triton.cdiv(max(len(by.node), len(by.edge)), max(self.P, 1))
            self.share = min(triton.next_power_of_2(max(uses, 1)), PARTS)
            edges = head[by.edge], tail1[by.edge], tail2[by.edge]
            arrays = by.node_ptr, rank[by.node], by.edge_ptr, *edges
            self.by_part = [on(device, array) for array in arrays]

    def run(self, scores: Tensor, goal: Tensor, gamma: float, down: bool) -> tuple[Tensor, Tensor]:
        """A ``(B)`` and, with ``down``, the gradient ``(B, P)``."""
        B, size, device = len(scores), self.nodes + 2, scores.device
        dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
        VT = torch.empty(B, 3, size, dtype=torch.float64, device=device)
        G = torch.empty(B, size if down else 0, dtype=dtype, device=device)
        A, M = scores.new_empty(B), scores.new_empty(B, self.P if down else 0)
        place = scores, scores.stride(0), scores.stride(1)
        sizes = self.P, self.nodes
        walk_item[(B,)](
            *place, goal, goal.stride(0), A, M, VT, G, *self.lists, *sizes, gamma,
            *self.shape, EDGES=self.edges, DOWN=down, DIRECT=self.direct, num_warps=WARPS,
        )  # fmt: skip
        if down and not self.direct:
            parts = PARTS // self.share
            blocks = triton.cdiv(self.P, parts)
            count_parts[(B * blocks,)](
                *place, M, VT, G, *self.by_part, *sizes, blocks, gamma, parts, self.share
            )
        return A, M


def on(device: torch.device, array: NDArray[Any]) -> Tensor:
    with torch._C._DisableFuncTorch():  # a kept tensor must not belong to a transform
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)).to(device)


def plan(forest: Forest, device: torch.device) -> Plan | None:
    """The plan of a forest, kept with it; None where the programs of ``gpu`` are to share levels.

    This depends on the forest alone, so that an item's bits do not depend on its batch.
    """
    view = forest.on(device)
    if view.items is None:
        tiles, order, suits = cut(forest)
        view.items = (Plan(forest, tiles, order, device) if suits else None,)
    return view.items[0]


def cut(forest: Forest) -> tuple[Ints, Ints, bool]:
    """Tiles ``(tiles, 8)`` as ``tile_at`` reads them, the nodes in order, and whether this suits.

    The last column counts the steps: how often a program reads ``TILE`` slots.
    """
    order, ptr = forest.levels
    degree = np.diff(forest.ptr)
    used = np.concatenate([forest.tail1, forest.tail2])
    uses = np.bincount(used, minlength=forest.num_nodes + 1)[:-1]
    level = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
    order = order[np.lexsort((-degree[order], level))]  # alike nodes make short lists
    degree, uses = degree[order], uses[order]
    shapes, costs = [], []
    for shape, nodes in enumerate((NARROW, 4 * NARROW, 16 * NARROW)):
        number = -(-np.diff(ptr) // nodes)  # tiles of each level
        begin = np.concatenate([[0], np.cumsum(number)])
        within = np.arange(begin[-1]) - np.repeat(begin[:-1], number)
        first = np.repeat(ptr[:-1], number) + within * nodes
        count = np.minimum(np.repeat(ptr[1:], number) - first, nodes)
        longest, most = np.maximum.reduceat(degree, first), np.maximum.reduceat(uses, first)
        slots = TILE // nodes
        steps = -(-longest // slots) - (-most // slots)
        costs.append(np.add.reduceat(START + steps, begin[:-1]))
        zero = np.zeros_like(first)
        shapes.append(
            np.stack([first, count, longest, zero, most, zero, zero + shape, steps], axis=1)
        )
    best = np.argmin(costs, axis=0)  # (levels)
    tiles = np.concatenate([tiles[best[level[tiles[:, 0]]] == tiles[:, 6]] for tiles in shapes])
    tiles = tiles[np.argsort(tiles[:, 0])].astype(np.int64)
    count, longest, most, steps = tiles[:, 1], tiles[:, 2], tiles[:, 4], tiles[:, 7]
    for place, size in ((3, count * longest), (5, count * most)):
        tiles[:, place] = np.cumsum(size) - size
    slots = int((count * (longest + most)).sum())
    suits = (
        steps.sum() <= STEPS * (len(ptr) - 1)
        and slots <= PADDING * (forest.num_edges + int(uses.sum()))
        and slots < 2**31
    )
    return tiles.astype(np.int32), order, suits
