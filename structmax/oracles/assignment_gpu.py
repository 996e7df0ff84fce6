"""The best assignment, on the GPU: one program per item, one launch.

Shortest augmenting paths (Kuhn, 1955; Munkres, 1957; as in Jonker & Volgenant, 1987). The elements
of the shorter side come one after another; each looks for the cheapest way to a free element of the
longer side, over which those on the way move on. What an item knows of its longer side, a number
for each element, stays in registers: who owns it, its potential, that of its owner, how far it is
and over which one. O(s² l) work for s on the shorter and l on the longer side, in O(s²) steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from structmax.launch import quick


@triton.jit
def _at(j, where, x):
    """x[where], with j the places of x."""
    return tl.sum(tl.where(j == where, x, tl.zeros_like(x)))


@quick
@triton.jit(do_not_specialize=["sb", "sr", "sc", "n", "m"])
def best_assignment(
    scores, sb, sr, sc, rows, columns, value, z, n, m, L: tl.constexpr
):  # fmt: skip
    """The value of the best assignment of an item, and the column of each row."""
    b = tl.program_id(0).to(tl.int64)
    scores += b * sb
    height = tl.minimum(tl.load(rows + b), n).to(tl.int32)
    width = tl.minimum(tl.load(columns + b), m).to(tl.int32)
    tall = height > width
    short, long = tl.minimum(height, width), tl.maximum(height, width)
    step, across = tl.where(tall, sc, sr), tl.where(tall, sr, sc)
    j = tl.arange(0, L)
    inside = j < long
    far = float("inf")

    good = 1
    for i in range(0, short):
        row = tl.load(scores + i * step + j * across, mask=inside, other=0.0)
        good = tl.minimum(good, tl.min((row < far).to(tl.int32)))  # 0: NaN or +inf
    feasible = good
    owner = tl.full([L], -1, tl.int32)
    potential = tl.zeros([L], tl.float64)
    of_owner = tl.zeros([L], tl.float64)
    for i in range(0, short):
        distance = tl.full([L], far, tl.float64)
        before = tl.full([L], -1, tl.int32)  # −1: where the way starts, at i itself
        reached = ~inside
        mine = tl.zeros([], tl.float64)  # the potential of i
        at = tl.full([], -1, tl.int32)
        who, base = i, mine
        looking = feasible
        while looking > 0:
            row = tl.load(scores + who * step + j * across, mask=inside, other=-far)
            cost = -row.to(tl.float64) - base - potential
            nearer = (cost < distance) & ~reached
            distance = tl.where(nearer, cost, distance)
            before = tl.where(nearer, at, before)
            left = tl.where(reached, far, distance)
            step_on, at = tl.min(left, 0, return_indices=True)
            feasible = (step_on < far).to(tl.int32)
            gain = tl.where(step_on < far, step_on, 0.0)
            mine += gain
            of_owner = tl.where(reached & inside, of_owner + gain, of_owner)
            potential = tl.where(reached & inside, potential - gain, potential)
            distance = tl.where(reached, distance, distance - gain)
            reached = reached | (j == at)
            who, base = _at(j, at, owner), _at(j, at, of_owner)
            looking = tl.where(who < 0, 0, feasible)
        moving = tl.where(feasible > 0, at, -1)
        while moving >= 0:  # each on the way takes what the next one had
            source = _at(j, moving, before)
            from_i = source < 0
            heir = tl.where(from_i, i, _at(j, source, owner))
            theirs = tl.where(from_i, mine, _at(j, source, of_owner))
            owner = tl.where(j == moving, heir, owner)
            of_owner = tl.where(j == moving, theirs, of_owner)
            moving = source

    taken = (owner >= 0) & (feasible > 0)
    cell = scores + owner * step + j * across
    total = tl.sum(tl.load(cell, mask=taken, other=0.0).to(tl.float64))
    total = tl.where(feasible > 0, total, -far)
    tl.store(value + b, tl.where(good > 0, total, float("nan")))
    tl.store(z + b * n + tl.where(tall, j, owner), tl.where(tall, owner, j), mask=taken)


def argmax(scores: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """The value ``(B)`` of scores ``(B, n, m)`` and the column of each row ``(B, n)``, −1 for none.

    The value is −inf where there is no assignment and NaN where a score is NaN or +inf.
    """
    size, n, m = scores.shape
    value = scores.new_empty(size, dtype=torch.float64)
    z = torch.full((size, n), -1, device=scores.device)
    if size:
        longest = triton.next_power_of_2(max(n, m))
        sizes = rows.contiguous(), columns.contiguous()
        best_assignment[(size,)](
            scores, *scores.stride(), *sizes, value, z, n, m,
            L=max(longest, 16), num_warps=max(1, min(8, longest // 128)),
        )  # fmt: skip
    return value.to(scores.dtype), z
