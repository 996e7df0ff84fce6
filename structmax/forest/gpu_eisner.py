"""Projective dependency trees on the GPU, one program per item: Shannon's value and gradient.

The forest of ``structures.projective`` without labels and siblings is Eisner's chart. Its edges
follow from two numbers, the width of a span and where it is split, so that no lists are read here
and a program has fewer levels to walk than ``gpu_items`` would. The recursion is that of
``ProjectiveTree``, for spans of width w that start at word i, with R right, L left, and the arcs
a (rightward), b (leftward) on what lies below them, gap::

    gap[w, i] = log Σ exp( R[s, i] + L[w−1−s, i+s+1] )   over s = 0..w−1,   R[0, ·] = L[0, ·] = 0
    a[w, i] = gap[w, i] + θ(i → i+w)      R[w, i] = log Σ exp( a[s, i] + R[w−s, i+s] )   s = 1..w
    b[w, i] = gap[w, i] + θ(i+w → i)      L[w, i] = log Σ exp( L[s, i] + b[w−s, i+s] )   s = 0..w−1

Tables are ``[w, i]``: threads next to each other have spans next to each other and read what they
need next to each other. The only terms of R and L that are of width w themselves belong to the same
i, so they are added last, by the thread that has just found gap: one barrier per width.

On the way down, a span of width w that starts at i is used to its left by wider spans that start at
i − 1, i − 2, …, and to its right by wider ones that start at i as well. To the left there are i, to
the right m − 1 − i, with m the number of spans of width w. So row r of the tile, r = 1..m−1, holds
for i ≥ r the spans r words wider to the left, for i < r those m − r words wider to the right.

Sums flow to a span from those that use it, never through atomics, and no item sees another: the
same input gives the same bits, whatever the batch. Values are float64 and in units of γ, what
enters exp and log in the dtype of the scores.

Range: a value V = peak + log Σ loses the logarithm where scores are huge. exp(x − V) is therefore
multiplied by exp(V − peak)/Σ, which is 1 but for that rounding, so that the visits which leave a
span are those that reach it.

As in every forest an item may name any node as its goal. An item's chart ends at the last word of
its goal.

Glossary: n words up to that one, N places in the chart (1 more if there are several roots: the root
symbol has one), θ scores, V (5, side, side) the tables gap, a, R, b, L, which is the order of a
span's nodes, G (3, side, side) for gap, R, L: first that factor, then its product with the expected
visits; and a row for those of roots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from structmax.forest.topology import Forest
from structmax.launch import quick

LONGEST = 256  # words at most; beyond, many programs that share an item are faster
ROWS = 4  # splits that a program reads at a time, of narrow spans; of wide ones 2 and 4 times more
EACH = 2  # of which one thread takes so many


@triton.jit
def add(x, peaks, sums):
    """Running ``peak, Σ exp(x − peak)`` with one more x. A NaN stays in the sum."""
    gap = tl.where(x == -float("inf"), -float("inf"), -tl.abs(x - peaks))
    other = tl.exp(gap.to(sums.dtype))
    higher = x > peaks
    return tl.where(higher, x, peaks), tl.where(higher, sums * other + 1.0, sums + other)


@triton.jit
def joined(a, b, c, d):
    """Four tables ``(BE, BN)`` as one, whose rows are reduced in one go instead of four."""
    return tl.join(tl.join(a, b), tl.join(c, d))


@triton.jit
def apart(x):
    """The four vectors ``(BN)`` of what was ``joined`` and reduced."""
    first, second = tl.split(x)
    a, b = tl.split(first)
    c, d = tl.split(second)
    return a, b, c, d


@triton.jit
def relative(sums, peaks, peak):
    """Sums that are relative to ``peaks (BE, BN)``, relative to ``peak (BN)``."""
    shift = tl.where(peak == -float("inf"), 0.0, peak)
    return sums * tl.exp((peaks - shift[None, :]).to(sums.dtype))


@triton.jit
def log_of(peak, total):
    """peak + log total, −inf where nothing is feasible."""
    return peak + tl.log(total).to(tl.float64)


@triton.jit
def factor(value, peak, total):
    """exp(value − peak)/total, which makes up for the rounding of value = peak + log total."""
    nothing = peak == -float("inf")
    gap = tl.where(nothing, 0.0, value - peak).to(total.dtype)
    return tl.where(nothing, 0.0, tl.exp(gap) / total)


@triton.jit
def flow(x, t, g):
    """G[head]·q. A span that is not visited may hold anything."""
    return tl.where(g == 0.0, 0.0, g * tl.exp((x - t).to(g.dtype)))


@triton.jit
def arc_number(w, i, SINGLE: tl.constexpr):
    """The part i → i + w; i ← i + w is the next one."""
    high = i + w - 1 + SINGLE
    return high * high + 2 * (w - 1)


@triton.jit
def nodes_before(words, SINGLE: tl.constexpr):
    """How many nodes come before those of spans that end in the word after so many words."""
    return 5 * (words * (words - 1) // 2) + (3 - SINGLE) * words


@triton.jit
def find(goal, SINGLE: tl.constexpr):
    """``n, w, kind`` of a node: its last word, its span's width and its place among the span's."""
    before = tl.sqrt(0.4 * goal.to(tl.float32)).to(tl.int32)  # may be one off
    before -= (nodes_before(before, SINGLE) > goal).to(tl.int32)
    before += (nodes_before(before + 1, SINGLE) <= goal).to(tl.int32)
    place = goal - nodes_before(before, SINGLE)
    return before + 1, place // 5 + 1, place % 5


@triton.jit
def up_widths(
    scores, sp, V, G, low, high, N, side, rate,
    BE: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr, SINGLE: tl.constexpr,
    DOWN: tl.constexpr,
):  # fmt: skip
    """V of the widths low..high−1, of which there are at most BN spans each; with ``DOWN`` also the
    factors in G."""
    size = side * side
    Gap, Right, R, Left, L = V, V + size, V + 2 * size, V + 3 * size, V + 4 * size
    i = tl.arange(0, BN)
    for w in range(low, high):
        live = i < N - w
        part = scores + arc_number(w, i, SINGLE).to(tl.int64) * sp
        rightward = tl.load(part, mask=live, other=0.0).to(tl.float64) * rate
        modifier = live & (i + SINGLE > 0)  # the root symbol is none
        leftward = tl.load(part + sp, mask=modifier, other=-float("inf")).to(tl.float64) * rate
        gap_peaks = tl.full((BE, BN), -float("inf"), tl.float64)
        right_peaks = tl.full((BE, BN), -float("inf"), tl.float64)
        left_peaks = tl.full((BE, BN), -float("inf"), tl.float64)
        gap_sums = tl.zeros((BE, BN), DTYPE)
        right_sums = tl.zeros((BE, BN), DTYPE)
        left_sums = tl.zeros((BE, BN), DTYPE)
        for start in range(0, w, BE):
            s = (start + tl.arange(0, BE))[:, None]
            inside = (s < w) & live[None, :]
            split = inside & (s > 0)
            near, far = s * side + i[None, :], (w - s) * side + i[None, :] + s
            x = tl.load(R + near, mask=inside, other=-float("inf"))
            x += tl.load(L + far - side + 1, mask=inside, other=0.0)
            gap_peaks, gap_sums = add(x, gap_peaks, gap_sums)
            x = tl.load(Right + near, mask=split, other=-float("inf"))
            x += tl.load(R + far, mask=split, other=0.0)
            right_peaks, right_sums = add(x, right_peaks, right_sums)
            x = tl.load(L + near, mask=split, other=-float("inf"))
            x += tl.load(Left + far, mask=split, other=0.0)
            left_peaks, left_sums = add(x, left_peaks, left_sums)
        peak = tl.max(joined(gap_peaks, right_peaks, left_peaks, left_peaks), 0)
        gap_peak, right_peak, left_peak, _ = apart(peak)
        gap_sums = relative(gap_sums, gap_peaks, gap_peak)
        right_sums = relative(right_sums, right_peaks, right_peak)
        left_sums = relative(left_sums, left_peaks, left_peak)
        total = tl.sum(joined(gap_sums, right_sums, left_sums, left_sums), 0)
        gap_sum, right_sum, left_sum, _ = apart(total)
        gap = log_of(gap_peak, gap_sum)
        rightward, leftward = gap + rightward, gap + leftward
        right_peak, right_sum = add(rightward, right_peak, right_sum)
        left_peak, left_sum = add(leftward, left_peak, left_sum)
        at = w * side + i
        right, left = log_of(right_peak, right_sum), log_of(left_peak, left_sum)
        tl.store(Gap + at, gap, mask=live)
        tl.store(Right + at, rightward, mask=live)
        tl.store(R + at, right, mask=live)
        tl.store(Left + at, leftward, mask=live)
        tl.store(L + at, left, mask=live)
        if DOWN:
            tl.store(G + at, factor(gap, gap_peak, gap_sum), mask=live)
            tl.store(G + size + at, factor(right, right_peak, right_sum), mask=live)
            tl.store(G + 2 * size + at, factor(left, left_peak, left_sum), mask=live)
        tl.debug_barrier()


@triton.jit
def down_widths(
    M, V, G, low, high, N, side, goal_w, goal_kind, seed,
    BE: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """G and M of the widths high−1..low."""
    size = side * side
    Gap, Right, R, Left, L = V, V + size, V + 2 * size, V + 3 * size, V + 4 * size
    roots = G + 3 * size
    i = tl.arange(0, BN)
    for step in range(0, high - low):
        w = high - 1 - step
        m = N - w
        live, at = i < m, w * side + i
        right = tl.load(R + at, mask=live, other=0.0)
        left = tl.load(L + at, mask=live, other=0.0)
        rightward = tl.load(Right + at, mask=live, other=0.0)
        leftward = tl.load(Left + at, mask=live, other=0.0)
        of_right, of_left = tl.zeros((BE, BN), DTYPE), tl.zeros((BE, BN), DTYPE)
        of_rightward, of_leftward = tl.zeros((BE, BN), DTYPE), tl.zeros((BE, BN), DTYPE)
        for start in range(1, m, BE):
            r = (start + tl.arange(0, BE))[:, None]
            inside = (r < m) & live[None, :]
            before = i[None, :] >= r  # wider to the left
            # as a number: from tl.where, Triton 3.6 gathers that threads should go down the rows
            back = before.to(tl.int32)
            more = m - r + back * (2 * r - m)
            first = i[None, :] - back * r
            head = (w + more) * side + first
            t_gap = tl.load(Gap + head, mask=inside, other=0.0)
            t_right = tl.load(R + head, mask=inside, other=0.0)
            t_left = tl.load(L + head, mask=inside, other=0.0)
            g_gap = tl.load(G + head, mask=inside, other=0.0)
            g_right = tl.load(G + size + head, mask=inside, other=0.0)
            g_left = tl.load(G + 2 * size + head, mask=inside, other=0.0)
            # the other tail of a head, before this span or after it
            tail = more * side + first + (1 - back) * w
            other = tl.where(before, size, 4 * size - side + 1)  # a or L
            x = right[None, :] + tl.load(V + (tail + other), mask=inside, other=0.0)
            of_right += flow(x, tl.where(before, t_right, t_gap), tl.where(before, g_right, g_gap))
            other = tl.where(before, 2 * size - side, 3 * size)  # R or b
            x = left[None, :] + tl.load(V + (tail + other), mask=inside, other=0.0)
            of_left += flow(x, tl.where(before, t_gap, t_left), tl.where(before, g_gap, g_left))
            other = tl.where(before, 4 * size, 2 * size)  # L or R
            x = tl.where(before, leftward[None, :], rightward[None, :])
            x += tl.load(V + (tail + other), mask=inside, other=0.0)
            uses = flow(x, tl.where(before, t_left, t_right), tl.where(before, g_left, g_right))
            of_rightward += tl.where(before, 0.0, uses)
            of_leftward += tl.where(before, uses, 0.0)
        total = tl.sum(joined(of_right, of_left, of_rightward, of_leftward), 0)
        g_right, g_left, g_rightward, g_leftward = apart(total)
        if SINGLE:
            g_right += tl.load(roots + i, mask=i == m - 1, other=0.0)
            g_left += tl.load(roots + w + i, mask=i == 0, other=0.0)
        goal = tl.where((i == m - 1) & (w == goal_w), goal_kind, -1)
        g_right = tl.where(goal == 2, seed, g_right)
        g_left = tl.where(goal == 4, seed, g_left)
        g_right *= tl.load(G + size + at, mask=live, other=0.0)
        g_left *= tl.load(G + 2 * size + at, mask=live, other=0.0)
        g_rightward = tl.where(goal == 1, seed, g_rightward + flow(rightward, right, g_right))
        g_leftward = tl.where(goal == 3, seed, g_leftward + flow(leftward, left, g_left))
        g_gap = tl.where(goal == 0, seed, g_rightward + g_leftward)
        tl.store(G + at, g_gap * tl.load(G + at, mask=live, other=0.0), mask=live)
        tl.store(G + size + at, g_right, mask=live)
        tl.store(G + 2 * size + at, g_left, mask=live)
        part = M + arc_number(w, i, SINGLE)
        tl.store(part, g_rightward.to(M.dtype.element_ty), mask=live)
        modifier = live & (i + SINGLE > 0)
        tl.store(part + 1, g_leftward.to(M.dtype.element_ty), mask=modifier)
        tl.debug_barrier()


@quick
@triton.jit(do_not_specialize=["sb", "sg", "P", "side"])
def walk_chart(
    scores, sb, sp, goals, sg, A, M, V, G, P, side, gamma: tl.float64,
    TILE: tl.constexpr, WIDE: tl.constexpr, SINGLE: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """A of one item, and with ``DOWN`` its gradient M. WIDE ≥ N; wide spans are fewer."""
    DTYPE: tl.constexpr = G.dtype.element_ty
    HALF: tl.constexpr = WIDE // 2
    QUARTER: tl.constexpr = WIDE // 4
    b = tl.program_id(0).to(tl.int64)
    size = side * side
    scores += b * sb
    V += b * 5 * size
    G += b * (3 * size + side)
    M += b * P
    R, L = V + 2 * size, V + 4 * size
    n, goal_w, kind = find(tl.load(goals + b * sg).to(tl.int32), SINGLE)
    N = n + 1 - SINGLE
    half, quarter = tl.maximum(N - HALF, 1), tl.maximum(N - QUARTER, 1)
    rate = tl.full((), 1.0, tl.float64) / gamma
    i = tl.arange(0, WIDE)
    tl.store(R + i, 0.0, mask=i < N)
    tl.store(L + i, 0.0, mask=i < N)
    tl.debug_barrier()
    up_widths(scores, sp, V, G, 1, half, N, side, rate, TILE // WIDE, WIDE, DTYPE, SINGLE, DOWN)
    up_widths(
        scores, sp, V, G, half, quarter, N, side, rate, TILE // HALF, HALF, DTYPE, SINGLE, DOWN
    )
    up_widths(
        scores, sp, V, G, quarter, N, N, side, rate, TILE // QUARTER, QUARTER, DTYPE, SINGLE, DOWN
    )
    # the goal is a node of a span, or of a single root, which is word 0 and in no chart: either
    # left[1, r] + θ(0 → r) + right[r, n] for any r, or the former two for r = n
    x = tl.load(
        V + (kind * side + goal_w) * side + i, mask=i == N - 1 - goal_w, other=-float("inf")
    )
    number = arc_number(i + 1, 0, 0)
    if SINGLE:
        ways = (goal_w == n) & (i < N) & ((kind == 1) | (i == N - 1))
        x = tl.load(R + (N - 1 - i) * side + i, mask=ways, other=0.0) + tl.where(ways, 0.0, x)
        x += tl.load(L + i * side, mask=ways, other=0.0)
        root = tl.load(scores + number.to(tl.int64) * sp, mask=ways, other=0.0)
        x += root.to(tl.float64) * rate
    peak = tl.max(tl.where(x > -float("inf"), x, -float("inf")), 0)
    shift = tl.where(peak == -float("inf"), 0.0, peak)
    weight = tl.exp((x - shift).to(DTYPE))
    total = tl.sum(weight, 0)
    value = log_of(shift, total)
    tl.store(A + b, (value * gamma).to(A.dtype.element_ty))
    if DOWN:
        seed = tl.where(value != value, value, tl.where(value == -float("inf"), 0.0, 1.0))
        seed = seed.to(DTYPE)
        if SINGLE:
            g = tl.where(ways, seed * (weight / tl.where(total == 0.0, 1.0, total)), 0.0)
            tl.store(G + 3 * size + i, g, mask=i < N)
            tl.store(M + number, g.to(M.dtype.element_ty), mask=i < N)
        for start in range(n * n, P, WIDE):  # parts of longer items
            tl.store(M + start + i, 0.0, mask=start + i < P)
        tl.debug_barrier()
        down_widths(
            M, V, G, quarter, N, N, side, goal_w, kind, seed,
            TILE // QUARTER, QUARTER, DTYPE, SINGLE,
        )  # fmt: skip
        down_widths(
            M, V, G, half, quarter, N, side, goal_w, kind, seed,
            TILE // HALF, HALF, DTYPE, SINGLE,
        )  # fmt: skip
        down_widths(
            M, V, G, 1, half, N, side, goal_w, kind, seed, TILE // WIDE, WIDE, DTYPE, SINGLE
        )


class Plan(NamedTuple):
    """Eisner's chart of items of up to n words."""

    n: int
    single: int

    def run(self, scores: Tensor, goal: Tensor, gamma: float, down: bool) -> tuple[Tensor, Tensor]:
        """A ``(B)`` and, with ``down``, the gradient ``(B, P)``."""
        B, P, device = len(scores), self.n**2, scores.device
        side = self.n + 1 - self.single
        wide = max(16, triton.next_power_of_2(side))
        tile = ROWS * wide
        dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
        V = torch.empty(B, 5, side, side, dtype=torch.float64, device=device)
        G = torch.empty(B, 3 * side + 1 if down else 0, side, dtype=dtype, device=device)
        A, M = scores.new_empty(B), scores.new_empty(B, P if down else 0)
        walk_chart[(B,)](
            scores, scores.stride(0), scores.stride(1), goal, goal.stride(0), A, M, V, G, P, side,
            gamma, tile, wide, SINGLE=self.single, DOWN=down, num_warps=tile // (32 * EACH),
        )  # fmt: skip
        return A, M


def plan(forest: Forest) -> Plan | None:
    """How to go about it if the forest is such a chart, and not too long."""
    kind, _, sizes = forest.name.partition(":")
    if kind != "projective_tree":
        return None
    n, labels, single, siblings = map(int, sizes.split(","))
    return Plan(n, single) if not labels and not siblings and n <= LONGEST else None
