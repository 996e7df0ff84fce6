"""Best trees of a directed graph, as torch functions.

Scores ``(*B, s, s)`` are of arcs ``[head, modifier]``; node 0 is the root, and an item has words
1..length. A tree gives every word one head; ``single`` allows the root one modifier only. Answers
are heads ``(*B, s−1)``, 0 in the padding. Where there is no tree the score is −inf, where a score
is NaN it is NaN. ``best_tree`` of up to 127 words runs on a GPU; everything else runs on the CPU,
and other tensors are copied there and back.
"""

from __future__ import annotations

import heapq
import importlib
import math
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from structmax.fence import fenced
from structmax.primitive import backend_for, direct, register, to_front

Weight = tuple[float, float]  # −root arcs, score: compared in this order
Arcs = dict[int, dict[int, Weight]]  # by modifier, by head


def _best_heads(arcs: Arcs) -> dict[int, int] | None:
    """The heads of the best tree below node 0 (Chu and Liu, 1965; Edmonds, 1967)."""
    if any(not row for row in arcs.values()):
        return None
    heads = {m: max(row, key=lambda h: row[h]) for m, row in arcs.items()}
    cycle = _find_cycle(heads)
    if not cycle:
        return heads
    new = max(arcs) + 1
    outside = {m: dict(row) for m, row in arcs.items() if m not in cycle}
    outside[new], entered = {}, {}
    for m in sorted(cycle):
        roots, score = arcs[m][heads[m]]
        for h, (r, x) in arcs[m].items():
            gain = (r - roots, x - score)
            if h not in cycle and gain > outside[new].get(h, (-math.inf, 0.0)):
                outside[new][h], entered[h] = gain, m
    left: dict[tuple[int, int], int] = {}
    for m in outside.keys() - {new}:
        within = [h for h in sorted(cycle) if h in outside[m]]
        if within:
            left[m, new] = max(within, key=lambda h: outside[m][h])
            outside[m][new] = outside[m][left[m, new]]
            for h in within:
                del outside[m][h]
    found = _best_heads(outside)
    if found is None:
        return None
    broken = entered[found[new]]
    unfolded = {m: left[m, h] if h == new else h for m, h in found.items() if m != new}
    return {**unfolded, **{m: heads[m] for m in cycle if m != broken}, broken: found[new]}


def _find_cycle(heads: dict[int, int]) -> set[int]:
    for m in heads:
        seen: list[int] = []
        while m and m not in seen:
            seen.append(m)
            m = heads[m]
        if m:
            return set(seen[seen.index(m) :])
    return set()


def _arcs(theta: Any, n: int, single: bool) -> Arcs:
    return {
        m: {
            h: (-float(single and h == 0), theta[h][m])
            for h in range(n + 1)
            if h != m and theta[h][m] > -math.inf
        }
        for m in range(1, n + 1)
    }


def _solve(theta: Any, n: int, single: bool) -> tuple[float, list[int]]:
    """One item: the score and the heads of the best tree."""
    used = [theta[h][m] for m in range(1, n + 1) for h in range(n + 1) if h != m]
    if not all(x < math.inf for x in used):
        return math.nan, [0] * n
    found = _best_heads(_arcs(theta, n, single))
    heads = [] if found is None else [found[m] for m in range(1, n + 1)]
    if found is None or (single and heads.count(0) != 1):
        return -math.inf, [0] * n
    return sum(theta[h][m] for m, h in enumerate(heads, 1)), heads


def argmax(theta: Tensor, lengths: Tensor, single: bool) -> tuple[Tensor, Tensor]:
    """The naive twin of ``arborescence_cpu.argmax``."""
    s = theta.shape[-1]
    found = [
        _solve(item, n, single) for item, n in zip(theta.tolist(), lengths.tolist(), strict=True)
    ]
    rows = [[*heads, *[0] * (s - 1 - len(heads))] for _, heads in found]
    values = torch.tensor([value for value, _ in found], dtype=torch.float64, device="cpu")
    return values, torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(len(found), s - 1)


def rest(theta: Tensor, lengths: Tensor, single: bool) -> Tensor:
    """The naive twin of ``arborescence_cpu.rest``: the best tree with only one head for a word."""
    s = theta.shape[-1]
    out = torch.full(theta.shape, -math.inf, dtype=torch.float64, device="cpu")
    for m in range(1, s):
        for h in range(s):
            forced = theta.double().clone()
            forced[:, :, m] = -math.inf
            forced[:, h, m] = 0.0
            value, _ = argmax(forced, lengths, single)
            within = (
                torch.maximum(torch.tensor(h, device="cpu"), torch.tensor(m, device="cpu"))
                <= lengths
            ) & (h != m)
            out[:, h, m] = torch.where(within, value, -math.inf)
    return out


def kbest(theta: Tensor, lengths: Tensor, single: bool, k: int) -> tuple[Tensor, Tensor]:
    """The naive twin of ``arborescence_cpu.kbest``: pieces of the set of trees, on a heap."""
    items, s, _, c = theta.shape
    values = torch.full((items, k), -math.inf, dtype=torch.float64, device="cpu")
    choices = torch.zeros(items, k, s - 1, dtype=torch.int64, device="cpu")

    def piece(allowed: Tensor, n: int) -> tuple[float, list[int]]:
        best, label = allowed.max(-1)
        value, heads = _solve(best.tolist(), n, single)
        return value, [h * c + int(label[h, m]) for m, h in enumerate(heads, 1)]

    for item, n in enumerate(lengths.tolist()):
        allowed = theta[item].double()
        value, choice = piece(allowed, n)
        values[item, 0] = value if value != value else -math.inf
        heap = [(-value, 0, choice, allowed)] if value > -math.inf else []
        pieces, rank = 1, 0
        while heap and rank < k:
            minus, _, choice, allowed = heapq.heappop(heap)
            values[item, rank] = -minus
            choices[item, rank, :n] = torch.tensor(choice, dtype=torch.int64, device="cpu")
            rank += 1
            allowed = allowed.clone()
            for m, own in enumerate(choice, 1):
                without, kept = allowed.clone(), allowed[own // c, m, own % c].item()
                without[own // c, m, own % c] = -math.inf
                value, other = piece(without, n)
                if value > -math.inf:
                    heapq.heappush(heap, (-value, pieces, other, without))
                    pieces += 1
                allowed[:, m] = -math.inf
                allowed[own // c, m, own % c] = kept
    return values, choices


def _engine(scores: Tensor) -> ModuleType:
    if backend_for(scores) == "naive":
        return sys.modules[__name__]
    return importlib.import_module("structmax.oracles.arborescence_cpu")


def _flat(scores: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    items = lengths.numel()
    return scores.reshape(items, *scores.shape[lengths.dim() :]).cpu(), lengths.reshape(-1).cpu()


MAX_SIDE_ON_GPU = 128  # rows of a square of float64 that one program's registers hold


# an item has no more words than the square has sides; heads of 0 are as good as none beside NaN
_words_are_possible = fenced([1], lambda scores, *others: [(0, scores.shape[-2] - 1)], fill=0)


@_words_are_possible
def _run_argmax(scores: Tensor, lengths: Tensor, single: bool) -> list[Tensor]:
    batch, s = lengths.shape, scores.shape[-1]
    if backend_for(scores) == "gpu" and s <= MAX_SIDE_ON_GPU:
        from structmax.oracles import arborescence_gpu

        flat = scores.reshape(batch.numel(), s, s), lengths.reshape(-1)
        value, heads = arborescence_gpu.argmax(*flat, single)
    else:
        value, heads = _engine(scores).argmax(*_flat(scores, lengths), single)
    return [value.to(scores).reshape(batch), heads.to(scores.device).reshape(*batch, s - 1)]


@_words_are_possible
def _run_rest(scores: Tensor, lengths: Tensor, single: bool) -> Tensor:
    return _engine(scores).rest(*_flat(scores, lengths), single).to(scores).reshape(scores.shape)


@_words_are_possible
def _run_kbest(scores: Tensor, lengths: Tensor, single: bool, k: int) -> list[Tensor]:
    value, choice = _engine(scores).kbest(*_flat(scores, lengths), single, k)
    batch, s = lengths.shape, scores.shape[-2]
    choice = choice.to(scores.device).reshape(*batch, k, s - 1)
    return [value.to(scores).reshape(*batch, k), choice]


tree_argmax = register(
    "tree_argmax",
    "(Tensor scores, Tensor lengths, bool single) -> Tensor[]",
    _run_argmax,
    lambda scores, lengths, single: [
        scores.new_empty(lengths.shape),
        lengths.new_empty((*lengths.shape, scores.shape[-1] - 1), dtype=torch.int64),
    ],
)
best_rest = register(
    "tree_rest",
    "(Tensor scores, Tensor lengths, bool single) -> Tensor",
    _run_rest,
    lambda scores, lengths, single: torch.empty_like(scores),
)
best_trees = register(
    "tree_kbest",
    "(Tensor scores, Tensor lengths, bool single, int k) -> Tensor[]",
    _run_kbest,
    lambda scores, lengths, single, k: [
        scores.new_empty((*lengths.shape, k)),
        lengths.new_empty((*lengths.shape, k, scores.shape[-2] - 1), dtype=torch.int64),
    ],
)


def _register_vmap() -> None:
    def mapped(op):  # type: ignore[no-untyped-def]
        def rule(info, in_dims, scores, lengths, *rest):  # type: ignore[no-untyped-def]
            out = op(*to_front([scores, lengths], in_dims[:2], info.batch_size), *rest)
            return out, [0] * len(out) if isinstance(out, list) else 0

        return rule

    for op in (tree_argmax, best_rest, best_trees):
        torch.library.register_vmap(op, mapped(op))


_register_vmap()
best_tree = direct(tree_argmax, _run_argmax)
