"""The forest engine in plain torch: the definition that the kernels are tested against.

Every function takes scores ``(B, P)`` and works level by level, each level one dense ``maxΩ`` over
a padded table of incoming edges. The value is differentiable by autograd to any order that Ω
allows; gradient and Hessian-vector product are its derivatives. It works from lists of all edges,
so those of a forest by rule are written out first: this is the definition, not for long sentences.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from structmax.fence import clamped, mark
from structmax.forest.topology import Forest
from structmax.smoothing import Hard, Smoothing


class LevelTable(NamedTuple):
    """One level: its nodes and, padded to the largest in-degree, their incoming edges."""

    nodes: Tensor  # (nodes)
    edges: Tensor  # (nodes, D), −1 where padded


def level_tables(forest: Forest, device: torch.device) -> list[LevelTable]:
    """Every level of the forest, bottom up; made once for each device."""
    view = forest.on(device)
    if view.tables is None:
        with torch._C._DisableFuncTorch():
            view.tables = _make_tables(forest, device)
    return view.tables


def _make_tables(forest: Forest, device: torch.device) -> list[LevelTable]:
    order, ptr = forest.levels
    tables = []
    for low, high in itertools.pairwise(ptr):
        nodes = order[low:high]
        first, degree = forest.ptr[nodes], forest.ptr[nodes + 1] - forest.ptr[nodes]
        slot = np.arange(degree.max(initial=1))
        edges = np.where(slot < degree[:, None], first[:, None] + slot, -1)
        tables.append(
            LevelTable(
                torch.from_numpy(nodes).long().to(device), torch.from_numpy(edges).to(device)
            )
        )
    return tables


def _inside(
    forest: Forest, scores: Tensor, omega: Smoothing
) -> Iterator[tuple[LevelTable, Tensor, Tensor]]:
    """Yields, for each level, its table, the options x ``(B, nodes, D)`` and V so far ``(B, ·)``.

    V is kept in the order in which it is computed, after a leading 0 for the absent tail;
    ``place`` maps a node's number to that order.
    """
    device = scores.device
    lists = forest.on(device)
    scores = torch.cat([scores, scores.new_zeros(len(scores), 1)], -1)
    place = torch.zeros(forest.num_nodes + 1, dtype=torch.long, device=device)
    place[lists.levels_order.long()] = torch.arange(1, forest.num_nodes + 1, device=device)
    values = scores.new_zeros(len(scores), 1)
    for table in level_tables(forest, device):
        edges = table.edges.clamp(min=0)
        x = (
            scores[:, lists.edge_part[edges].long()]
            + values[:, place[lists.tail1[edges].long()]]
            + values[:, place[lists.tail2[edges].long()]]
        )
        x = torch.where(table.edges >= 0, x, -math.inf)
        own = scores[:, lists.node_part[table.nodes].long()]
        values = torch.cat([values, own + omega.max(x)], -1)
        yield table, x, values


def value(forest: Forest, scores: Tensor, goal: Tensor, omega: Smoothing) -> Tensor:
    """A = V[goal], ``(B)``. float32 scores are computed in float64, as the kernels do."""
    values = scores
    for _, _, values in _inside(forest, scores.double(), omega):  # noqa: B007 (the last one counts)
        pass
    place = torch.empty(forest.num_nodes, dtype=torch.long, device=scores.device)
    order = forest.on(scores.device).levels_order.long()
    place[order] = torch.arange(1, forest.num_nodes + 1, device=scores.device)
    return values.gather(-1, place[goal.long()][:, None]).squeeze(-1).to(scores.dtype)


def backpointers(forest: Forest, scores: Tensor, omega: Smoothing) -> Tensor:
    """q ``(B, e)``: at every node, the distribution argmaxΩ over its incoming edges."""
    columns, edges = [], []
    for table, x, _ in _inside(forest, scores.double(), omega):
        real = table.edges >= 0
        columns.append(omega.argmax(x)[:, real])
        edges.append(table.edges[real])
    return torch.cat(columns, -1)[:, torch.cat(edges).argsort()]


def visits(forest: Forest, q: Tensor, goal: Tensor) -> Tensor:
    """Expected visits of each node ``(B, v)`` on the walk from the goal down through q."""
    lists = forest.on(q.device)
    count = torch.nn.functional.one_hot(goal.long(), forest.num_nodes + 1).to(q.dtype)
    for table in reversed(level_tables(forest, q.device)):
        edges = table.edges[table.edges >= 0]
        flow = count[:, lists.head[edges].long()] * q[:, edges]
        for tail in (lists.tail1, lists.tail2):
            count = count.index_add(-1, tail[edges].long(), flow)
    return count[:, :-1]


def edge_visits(forest: Forest, q: Tensor, goal: Tensor) -> Tensor:
    """Expected uses of each edge ``(B, e)``; NaN for an item whose goal is no node."""
    (goal,), wrong = clamped([goal], [(0, forest.num_nodes - 1)])
    use = visits(forest, q, goal)[:, forest.on(q.device).head.long()] * q
    return mark(use, wrong)


def part_counts(forest: Forest, q: Tensor, goal: Tensor) -> Tensor:
    """Expected uses of each part ``(B, P)``: the gradient of the value, when q is argmaxΩ."""
    lists = forest.on(q.device)
    node = visits(forest, q, goal)
    edge = node[:, lists.head.long()] * q
    count = q.new_zeros(len(q), forest.num_parts + 1)
    count = count.index_add(-1, lists.node_part.long(), node)
    return count.index_add(-1, lists.edge_part.long(), edge)[:, :-1]


def argmax(forest: Forest, scores: Tensor, goal: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The value under hard max and the part counts of one best derivation, ``(B, width)``."""
    best = value(forest, scores, goal, Hard())
    z = part_counts(forest, backpointers(forest, scores, Hard()), goal)[:, :width]
    return best, torch.where(best[:, None].abs() < math.inf, z, math.nan).to(scores.dtype)


def sample(
    forest: Forest, scores: Tensor, goal: Tensor, uniform: Tensor, omega: Smoothing, width: int
) -> Tensor:
    """Part counts ``(S, B, width)`` of exact draws: one uniform number ``(S, B, ·)`` per visit."""
    q = backpointers(forest, scores, omega).cpu().numpy()
    z = np.zeros((*uniform.shape[:2], forest.num_parts + 1))
    feasible = value(forest, scores, goal, omega).abs() < math.inf
    for s, b in np.ndindex(*uniform.shape[:2]):
        if not feasible[b]:
            z[s, b] = math.nan
            continue
        draws = iter(uniform[s, b].tolist())
        stack = [int(goal[b])]
        while stack:
            v = stack.pop()
            z[s, b, forest.node_part[v]] += 1
            cumulative = np.cumsum(q[b, forest.ptr[v] : forest.ptr[v + 1]])
            target = next(draws) * cumulative[-1]
            e = forest.ptr[v] + int((cumulative > target).argmax())
            z[s, b, forest.edge_part[e]] += 1
            stack += [t for t in (forest.tail2[e], forest.tail1[e]) if t < forest.num_nodes]
    return torch.from_numpy(z[..., :width]).to(scores)


def kbest(
    forest: Forest, scores: Tensor, goal: Tensor, k: int, width: int
) -> tuple[Tensor, Tensor]:
    """Scores ``(B, k)``, −inf where there is no such derivation, and counts ``(B, k, width)``.

    Level by level: the k best of each node are among all pairs of the k best of the tails of its
    edges. Counts are carried along, which is simple and takes O(v·k·width) memory.
    """
    lists = forest.on(scores.device)
    batch = len(scores)
    theta = torch.cat([scores.double(), scores.new_zeros(batch, 1)], -1)
    values = theta.new_full((batch, forest.num_nodes + 1, k), -math.inf)
    counts = theta.new_zeros(batch, forest.num_nodes + 1, k, width)
    values[:, -1, 0] = 0.0  # the absent tail has one derivation
    unit = torch.eye(forest.num_parts + 1, dtype=theta.dtype, device=theta.device)[:, :width]
    for table in level_tables(forest, scores.device):
        edges = table.edges.clamp(min=0)
        first, second = lists.tail1[edges].long(), lists.tail2[edges].long()
        pairs = values[:, first, :, None] + values[:, second, None, :]  # (B, nodes, D, k, k)
        x = theta[:, lists.edge_part[edges].long()][..., None, None] + pairs
        x = torch.where((table.edges >= 0)[..., None, None], x, -math.inf).flatten(2)
        chosen = x.topk(min(k, x.shape[-1]), -1)
        slot, left, right = (
            chosen.indices // (k * k),
            chosen.indices // k % k,
            chosen.indices % k,
        )
        rows = torch.arange(batch, device=scores.device)[:, None, None]
        edge = edges.expand(batch, *edges.shape).gather(-1, slot)
        parts = lists.node_part[table.nodes].long()
        found = chosen.values.shape[-1]
        values[:, table.nodes, :found] = theta[:, parts][..., None] + chosen.values
        counts[:, table.nodes, :found] = (
            unit[parts][:, None]
            + unit[lists.edge_part[edge].long()]
            + counts[rows, lists.tail1[edge].long(), left]
            + counts[rows, lists.tail2[edge].long(), right]
        )
    rows = torch.arange(batch, device=scores.device)
    best = values[rows, goal.long()]
    best = torch.where(best.isnan().any(-1, keepdim=True), math.nan, best)
    z = torch.where((best == -math.inf)[..., None], 0.0, counts[rows, goal.long()])
    z = torch.where(best.isnan()[..., None], math.nan, z)
    return best.to(scores.dtype), z.to(scores.dtype)


def max_marginals(forest: Forest, scores: Tensor, goal: Tensor, width: int) -> Tensor:
    """``(B, width)``: the best score of a derivation that uses each part."""
    lists = forest.on(scores.device)
    batch = len(scores)
    theta = torch.cat([scores.double(), scores.new_zeros(batch, 1)], -1)
    inside = theta.new_zeros(batch, forest.num_nodes + 1)
    tables = level_tables(forest, scores.device)
    for table, _, values in _inside(forest, scores.double(), Hard()):
        inside[:, table.nodes] = values[:, -len(table.nodes) :]
    outside = torch.full_like(inside, -math.inf)
    outside.scatter_(1, goal.long()[:, None], 0.0)
    best = theta.new_full((batch, forest.num_parts + 1), -math.inf)

    def raise_to(target: Tensor, index: Tensor, x: Tensor) -> Tensor:
        return target.scatter_reduce(1, index.long().expand(batch, -1), x, "amax")

    for table in reversed(tables):
        edges = table.edges[table.edges >= 0]
        head = lists.head[edges].long()
        first, second = lists.tail1[edges].long(), lists.tail2[edges].long()
        above = outside[:, head] + theta[:, lists.node_part[head].long()]
        above = above + theta[:, lists.edge_part[edges].long()]
        above = torch.where(outside[:, head] == -math.inf, -math.inf, above)
        outside = raise_to(outside, first, above + inside[:, second])
        outside = raise_to(outside, second, above + inside[:, first])
        best = raise_to(best, lists.edge_part[edges], above + inside[:, first] + inside[:, second])
        total = outside[:, table.nodes] + inside[:, table.nodes]
        total = torch.where(outside[:, table.nodes] == -math.inf, -math.inf, total)
        best = raise_to(best, lists.node_part[table.nodes], total)
    return best[:, :width].to(scores.dtype)
