"""The forest engine on the GPU, written in Triton.

Tables are ``(rows, B)``, items of the batch side by side, so that the loads of a row coalesce. A
program answers for one node and ``BB`` items: it reads the node's edges in tiles of ``BE`` and
reduces them, so memory per item is O(nodes + parts) and an edge's weight is recomputed wherever it
is needed. Sums flow to a node or part through lists of the edges that touch it (``reversed``,
``by_part``), never through atomics: the same input gives the same bits. Of a forest by rule the
programs read runs of edges, and of uses, and compute what the lists would say (``RULED``).

The nodes of a level are independent. A launch takes some 20–40 µs of the host, longer than most
levels take the device, so all levels run in one cooperative launch with a barrier between them,
unless they are very wide; then (and under the interpreter) each level is a launch. Nothing waits
for the device, and of all passes only the top-down seeds depend on the goals. Shannon's value and
gradient leave forests of many small levels to ``gpu_items``, projective trees to ``gpu_eisner``.

Node values stay float64, so that long sums keep their digits under large offsets; the differences
that enter exp and pow are cast to the dtype of the scores first.

The recurrence and its range are those of ``cpu``: q = exp((x − max x)/γ)/Σ, of which the largest
option and the sum are kept apart. In their logarithm, the sum is lost where scores are huge, and
more visits would leave a node than reach it.

Glossary: ``S (P+1, B)`` scores, the last row 0 for the absent part; ``V (v+1, B)`` values, the last
row 0 for the absent tail; ``T (2v, B)`` what gives back the weights q of node v, in rows 2v and
2v + 1: the chosen edge, −1 if none, and nothing (Hard), the largest option and 1/Σ (Shannon), the
largest option and τ less that (Tsallis); ``G (v, B)`` expected visits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from structmax import smoothing
from structmax.forest import gpu_eisner, gpu_items, naive
from structmax.forest.topology import ByPart, Forest, RuledForest
from structmax.launch import quick

HARD, SHANNON = tl.constexpr(smoothing.HARD), tl.constexpr(smoothing.SHANNON)
GINI = tl.constexpr(3)  # Tsallis with α = 2, whose powers need no logarithm
NONE = tl.constexpr(2**31 - 1)  # greater than any edge
RUN, USES = tl.constexpr(10), tl.constexpr(13)  # numbers of a run, and of a run of uses

Code = tuple[float, float, float]


@triton.jit
def rows(table, row, b, B):
    """Pointers ``(R, BB)`` to some rows ``(R)`` of a table ``(·, B)``, for items b ``(BB)``."""
    return table + row.to(tl.int64)[:, None] * B + b[None, :]


@triton.jit
def row(table, index, b, B):
    """Pointers ``(BB)`` to one row."""
    return table + index.to(tl.int64) * B + b


@triton.jit
def along(rule, d):
    """a + b·d + c·d(d−1)/2 for the three numbers at ``rule`` (see ``runs``)."""
    a, b, c = tl.load(rule), tl.load(rule + 1), tl.load(rule + 2)
    return a + b * d + c * (d * (d - 1) // 2)


@triton.jit
def ends(tail1, tail2, edge_part, run, e, live, RULED: tl.constexpr):
    """Tails and part of edges e; if ``RULED``, of those of a run, whose table stands at tail1."""
    if RULED:
        rule = tail1 + run * RUN
        return along(rule + 1, e), along(rule + 4, e), along(rule + 7, e)
    else:
        first = tl.load(tail1 + e, mask=live, other=0)
        second = tl.load(tail2 + e, mask=live, other=0)
        return first, second, tl.load(edge_part + e, mask=live, other=0)


@triton.jit
def bounds(ptr, tail1, v, run, RULED: tl.constexpr):
    """The edges into v, or those of one of its runs, which are numbered from 0."""
    if RULED:
        return 0, tl.load(tail1 + run * RUN)
    else:
        return tl.load(ptr + v), tl.load(ptr + v + 1)


@triton.jit
def options(V, S, first, second, part, live, b, items, B):
    """x = V[tail₁] + V[tail₂] + θ[part] of some edges ``(BE, BB)``, −inf outside live × items."""
    inside = live[:, None] & items[None, :]
    x = tl.load(rows(V, first, b, B), mask=inside, other=0.0)
    x += tl.load(rows(V, second, b, B), mask=inside, other=0.0)
    x += tl.load(rows(S, part, b, B), mask=inside, other=0.0)
    return tl.where(inside, x, -float("inf"))


@triton.jit
def nan_in(x):
    """NaN where x is, else 0. Added up on the side, because maxima would lose it."""
    return tl.where(x != x, x, 0.0)


@triton.jit
def power(base, exponent, KIND: tl.constexpr):
    """base^exponent, 0 where base ≤ 0, NaN where base is."""
    if KIND == GINI:
        return tl.where(base <= 0.0, 0.0, base)
    else:
        y = tl.log(tl.where(base <= 0.0, 1.0, base)) * tl.full((), exponent, base.dtype)
        return tl.where(base <= 0.0, 0.0, tl.exp(y))


@triton.jit
def weights(x, e, t, w, gamma, alpha, DTYPE: tl.constexpr, KIND: tl.constexpr):
    """q ``(BE, BB)`` of edges e with options x, given both rows of T of their heads; NaN where one
    of them is NaN."""
    if KIND == HARD:
        q = tl.where(t != t, t, (e[:, None] == t).to(t.dtype)).to(DTYPE)
    elif KIND == SHANNON:
        q = tl.exp(((x - t) / gamma).to(DTYPE)) * w.to(DTYPE)
    else:
        q = power(((x - t - w) * ((alpha - 1.0) / gamma)).to(DTYPE), 1.0 / (alpha - 1.0), KIND)
    return q


@triton.jit
def curvature(q, alpha, KIND: tl.constexpr):
    """s = q^{2−α}: the derivative of q in direction ẋ is s(ẋ − Σsẋ/Σs)/γ."""
    if KIND == SHANNON:
        return q
    elif KIND == GINI:
        return tl.where(q <= 0.0, 0.0, tl.where(q > 0.0, 1.0, q))
    else:
        return power(q, 2.0 - alpha, KIND)


@triton.jit
def wait_for_all(arrived, count):
    """A barrier among the programs of a cooperative launch, passed once ``count`` have arrived."""
    tl.debug_barrier()
    tl.atomic_add(arrived, 1, sem="release")
    while tl.atomic_add(arrived, 0, sem="acquire") < count:
        pass
    tl.debug_barrier()


@triton.jit
def threshold(
    V, S, ptr, tail1, tail2, edge_part, v, r0, r1, degree, peak, b, items, B, gamma, alpha,
    BE: tl.constexpr, BB: tl.constexpr, DTYPE: tl.constexpr, KIND: tl.constexpr,
    RULED: tl.constexpr,
):  # fmt: skip
    """τ − peak ``(BB)``: Σ [(α−1)(x − τ)/γ]₊^{1/(α−1)} = 1, by Newton kept inside a bracket.

    A step that leaves the bracket, is not half as long as the one before, or is no step, halves the
    bracket: for α > 2 an option at the edge of the support has an endless slope.
    """
    rate, exponent = (alpha - 1.0) / gamma, 1.0 / (alpha - 1.0)
    tolerance = 1e-14 if DTYPE.primitive_bitwidth == 64 else 1e-6
    zero = tl.zeros((BB,), tl.float64)
    low = zero - 1.0 / rate
    high = zero - tl.exp((1.0 - alpha) * tl.log(zero + degree)) / rate
    tau, length = low, high - low
    step, active = 0, 1
    while (step < 100) & (active > 0):
        masses, slopes = tl.zeros((BE, BB), DTYPE), tl.zeros((BE, BB), DTYPE)
        for run in range(r0, r1):
            e0, e1 = bounds(ptr, tail1, v, run, RULED)
            for start in range(e0, e1, BE):
                e = start + tl.arange(0, BE)
                first, second, part = ends(tail1, tail2, edge_part, run, e, e < e1, RULED)
                x = options(V, S, first, second, part, e < e1, b, items, B)
                base = (rate * (x - peak[None, :] - tau[None, :])).to(DTYPE)
                p = power(base, exponent, KIND)
                masses += p
                slopes += tl.where(base > 0.0, p / tl.where(base > 0.0, base, 1.0), 0.0)
        mass, slope = tl.sum(masses, 0).to(tl.float64), tl.sum(slopes, 0).to(tl.float64)
        move = (mass - 1.0) * gamma / tl.where(slope > 0.0, slope, 1.0)
        low = tl.where(mass >= 1.0, tl.maximum(low, tau), low)
        high = tl.where(mass < 1.0, tl.minimum(high, tau), high)
        least = -4e-16 * tau
        moving = (tl.abs(mass - 1.0) > tolerance) & (high - low > least)
        moving = moving & (mass > 0.0)  # mass is 0 where no option is feasible
        new = tau + move
        sound = (new >= low) & (new <= high) & (2.0 * tl.abs(move) <= length)
        sound = sound & (tl.abs(move) > least)
        new = tl.where(sound, new, 0.5 * (low + high))
        length = tl.abs(new - tau)
        tau = tl.where(moving, new, tau)
        active = tl.max(moving.to(tl.int32), 0)
        step += 1
    return tau


@triton.jit
def up_node(
    v, S, V, T, ptr, tail1, tail2, edge_part, node_part, b, items, B, gamma, alpha,
    BE: tl.constexpr, BB: tl.constexpr, DTYPE: tl.constexpr, KIND: tl.constexpr,
    RULED: tl.constexpr,
):  # fmt: skip
    """V and T of one node. Each of the BE rows of a tile keeps its own running maximum and sum, and
    they are joined at the end: joining is what costs time, since it crosses warps."""
    r0, r1, before = 0, 1, 0
    if RULED:
        r0, r1 = tl.load(ptr + v), tl.load(ptr + v + 1)
    peaks = tl.full((BE, BB), -float("inf"), tl.float64)
    sums = tl.zeros((BE, BB), DTYPE)  # Shannon: Σ exp((x − peak)/γ)
    firsts = tl.full((BE, BB), NONE, tl.int32)  # Hard: the first edge that attains the peak
    nans = tl.zeros((BE, BB), tl.float64)
    for run in range(r0, r1):
        e0, e1 = bounds(ptr, tail1, v, run, RULED)
        for start in range(e0, e1, BE):
            e = start + tl.arange(0, BE)
            one, two, part = ends(tail1, tail2, edge_part, run, e, e < e1, RULED)
            x = options(V, S, one, two, part, e < e1, b, items, B)
            nans += nan_in(x)
            higher = x > peaks
            if KIND == HARD:
                firsts = tl.where(higher, before + e[:, None], firsts)
            if KIND == SHANNON:
                gap = tl.where(x == -float("inf"), -float("inf"), -tl.abs(x - peaks))
                other = tl.exp((gap / gamma).to(DTYPE))
                sums = tl.where(higher, sums * other + 1.0, sums + other)
            peaks = tl.where(higher, x, peaks)
        before += e1 - e0
    peak, nan = tl.max(peaks, 0), tl.sum(nans, 0)
    feasible = peak > -float("inf")
    offset = tl.where(feasible, peak, 0.0)
    if KIND == HARD:
        first = tl.min(tl.where(peaks == peak[None, :], firsts, NONE), 0)
        t, value = tl.where(feasible, first, -1).to(tl.float64), peak
        w = offset
    elif KIND == SHANNON:
        sums *= tl.exp(((peaks - offset[None, :]) / gamma).to(DTYPE))
        total = tl.where(feasible, tl.sum(sums, 0), 1.0)
        value = peak + gamma * tl.log(total)
        t, w = offset, 1.0 / total.to(tl.float64)
    else:
        tau = threshold(
            V, S, ptr, tail1, tail2, edge_part, v, r0, r1, before, offset, b, items, B,
            gamma, alpha, BE, BB, DTYPE, KIND, RULED,
        )  # fmt: skip
        t, w = offset, tau
        gains = tl.zeros((BE, BB), tl.float64)  # p(x − peak) − γ/(α(α−1)) (p^α − p)
        total = tl.zeros((BE, BB), tl.float64)
        for run in range(r0, r1):
            e0, e1 = bounds(ptr, tail1, v, run, RULED)
            for start in range(e0, e1, BE):
                e = start + tl.arange(0, BE)
                one, two, part = ends(tail1, tail2, edge_part, run, e, e < e1, RULED)
                x = options(V, S, one, two, part, e < e1, b, items, B) - offset[None, :]
                base = (x - tau[None, :]) * ((alpha - 1.0) / gamma)
                p = power(base.to(DTYPE), 1.0 / (alpha - 1.0), KIND).to(tl.float64)
                gain = p * (x - (base - 1.0) * (gamma / (alpha * (alpha - 1.0))))
                gains += tl.where(p > 0.0, gain, 0.0)
                total += p
        value = offset + tl.sum(gains, 0) / tl.maximum(tl.sum(total, 0), 1e-30)
        value = tl.where(feasible, value, -float("inf"))
    own = tl.load(row(S, tl.load(node_part + v), b, B), mask=items)
    tl.store(row(T, 2 * v, b, B), t + nan, mask=items)
    tl.store(row(T, 2 * v + 1, b, B), w + nan, mask=items)
    tl.store(row(V, v, b, B), value + nan + own, mask=items)


@quick
@triton.jit(do_not_specialize=["first", "last"])
def up(
    S, V, T, ptr, tail1, tail2, edge_part, node_part, gamma: tl.float64, alpha: tl.float64,
    order, levels, arrived, first, last, B,
    BE: tl.constexpr, BB: tl.constexpr, KIND: tl.constexpr, TOGETHER: tl.constexpr,
    RULED: tl.constexpr,
):  # fmt: skip
    """Bottom up over the levels first..last−1: V and T of every node."""
    tiles = tl.cdiv(B, BB)
    for level in range(first, last):
        start, stop = tl.load(levels + level), tl.load(levels + level + 1)
        for tile in range(tl.program_id(0), (stop - start) * tiles, tl.num_programs(0)):
            v = tl.load(order + start + tile // tiles)
            b = (tile % tiles) * BB + tl.arange(0, BB)
            up_node(
                v, S, V, T, ptr, tail1, tail2, edge_part, node_part, b, b < B, B, gamma, alpha,
                BE, BB, S.dtype.element_ty, KIND, RULED,
            )  # fmt: skip
        if TOGETHER:
            wait_for_all(arrived, (level - first + 1) * tl.num_programs(0))


@quick
@triton.jit(do_not_specialize=["first", "last"])
def tangent_up(
    S, V, T, dS, dV, mean, ptr, tail1, tail2, edge_part, node_part,
    gamma: tl.float64, alpha: tl.float64, order, levels, arrived, first, last, B,
    BE: tl.constexpr, BB: tl.constexpr, KIND: tl.constexpr, TOGETHER: tl.constexpr,
    RULED: tl.constexpr,
):  # fmt: skip
    """V̇ = dS[part(v)] + Σ q ẋ with ẋ = dS[part] + V̇[tails], and x̄, the mean of ẋ under q^{2−α}."""
    tiles = tl.cdiv(B, BB)
    for level in range(first, last):
        start, stop = tl.load(levels + level), tl.load(levels + level + 1)
        for tile in range(tl.program_id(0), (stop - start) * tiles, tl.num_programs(0)):
            v = tl.load(order + start + tile // tiles)
            b = (tile % tiles) * BB + tl.arange(0, BB)
            items = b < B
            t = tl.load(row(T, 2 * v, b, B), mask=items, other=0.0)[None, :]
            w = tl.load(row(T, 2 * v + 1, b, B), mask=items, other=0.0)[None, :]
            feasible = tl.load(row(V, v, b, B), mask=items) != -float("inf")
            r0, r1, before = 0, 1, 0
            if RULED:
                r0, r1 = tl.load(ptr + v), tl.load(ptr + v + 1)
            dot, top = tl.zeros((BE, BB), tl.float64), tl.zeros((BE, BB), tl.float64)
            bottom = tl.zeros((BE, BB), tl.float64)
            for run in range(r0, r1):
                e0, e1 = bounds(ptr, tail1, v, run, RULED)
                for begin in range(e0, e1, BE):
                    e = begin + tl.arange(0, BE)
                    one, two, part = ends(tail1, tail2, edge_part, run, e, e < e1, RULED)
                    x = options(V, S, one, two, part, e < e1, b, items, B)
                    dx = options(dV, dS, one, two, part, e < e1, b, items, B)
                    q = weights(x, before + e, t, w, gamma, alpha, S.dtype.element_ty, KIND)
                    used = (q != 0.0) & feasible[None, :]
                    s = tl.where(used, curvature(q, alpha, KIND), 0.0)
                    dot += tl.where(used, q * dx, 0.0)
                    top += tl.where(used, s * dx, 0.0)
                    bottom += s
                before += e1 - e0
            own = tl.load(row(dS, tl.load(node_part + v), b, B), mask=items)
            tl.store(row(dV, v, b, B), own + tl.sum(dot, 0), mask=items)
            mass = tl.sum(bottom, 0)
            average = tl.sum(top, 0) / tl.where(mass == 0.0, 1.0, mass)
            tl.store(row(mean, v, b, B), average, mask=items)
        if TOGETHER:
            wait_for_all(arrived, (level - first + 1) * tl.num_programs(0))


@triton.jit
def flows(
    S, V, T, G, dS, dV, mean, dG, h, first, second, part, e, live, b, items, B,
    gamma, alpha, KIND: tl.constexpr, TANGENT: tl.constexpr,
):  # fmt: skip
    """Expected uses G[h]·q of edges ``(BE, BB)`` given their heads h, tails, parts and numbers e,
    and their derivative if ``TANGENT``."""
    DTYPE: tl.constexpr = S.dtype.element_ty
    inside = live[:, None] & items[None, :]
    x = options(V, S, first, second, part, live, b, items, B)
    t = tl.load(rows(T, 2 * h, b, B), mask=inside, other=0.0)
    w = t
    if KIND != HARD:
        w = tl.load(rows(T, 2 * h + 1, b, B), mask=inside, other=0.0)
    q = weights(x, e, t, w, gamma, alpha, DTYPE, KIND)
    g = tl.load(rows(G, h, b, B), mask=inside, other=0.0)
    # A node that is not visited may be infeasible, with weights that are NaN.
    flow = tl.where(g == 0.0, 0.0, g * q)
    dflow = flow
    if TANGENT:
        dx = options(dV, dS, first, second, part, live, b, items, B)
        dg = tl.load(rows(dG, h, b, B), mask=inside, other=0.0)
        average = tl.load(rows(mean, h, b, B), mask=inside, other=0.0)
        dflow = dg * q + g * curvature(q, alpha, KIND) * (dx - average) / gamma
        dflow = tl.where(flow == 0.0, 0.0, dflow)
    return flow, dflow


@triton.jit
def use_bounds(use_ptr, use_edge, v, run, RULED: tl.constexpr):
    """The uses of v, or those of one run of them, which are numbered from 0."""
    if RULED:
        return 0, tl.load(use_edge + run * USES)
    else:
        return tl.load(use_ptr + v), tl.load(use_ptr + v + 1)


@quick
@triton.jit(do_not_specialize=["first", "last"])
def down(
    S, V, T, G, dS, dV, mean, dG, goal, head, tail1, tail2, edge_part, use_ptr, use_edge,
    gamma: tl.float64, alpha: tl.float64, order, levels, arrived, first, last, B,
    BE: tl.constexpr, BB: tl.constexpr, KIND: tl.constexpr, TANGENT: tl.constexpr,
    TOGETHER: tl.constexpr, RULED: tl.constexpr,
):  # fmt: skip
    """Top down over the levels last−1..first: expected visits G, and dG if ``TANGENT``."""
    tiles = tl.cdiv(B, BB)
    for back in range(first, last):
        level = first + last - 1 - back
        start, stop = tl.load(levels + level), tl.load(levels + level + 1)
        for tile in range(tl.program_id(0), (stop - start) * tiles, tl.num_programs(0)):
            v = tl.load(order + start + tile // tiles)
            b = (tile % tiles) * BB + tl.arange(0, BB)
            items = b < B
            value = tl.load(row(V, v, b, B), mask=items)
            is_goal = tl.load(goal + b, mask=items, other=-1) == v
            seed = tl.where(value > -float("inf"), 1.0, 0.0)
            seed = tl.where(value < float("inf"), seed, float("nan"))
            total = tl.zeros((BE, BB), S.dtype.element_ty)
            dtotal = tl.zeros((BE, BB), tl.float64)
            r0, r1 = 0, 1
            if RULED:
                r0, r1 = tl.load(use_ptr + v), tl.load(use_ptr + v + 1)
            for run in range(r0, r1):
                u0, u1 = use_bounds(use_ptr, use_edge, v, run, RULED)
                for begin in range(u0, u1, BE):
                    use = begin + tl.arange(0, BE)
                    live = use < u1
                    if RULED:
                        rule = use_edge + run * USES
                        h, other = along(rule + 1, use), along(rule + 4, use)
                        part, e = along(rule + 7, use), along(rule + 10, use)
                        own = v + tl.zeros((BE,), tl.int32)
                    else:
                        e = tl.load(use_edge + use, mask=live, other=0)
                        h = tl.load(head + e, mask=live, other=0)
                        own, other, part = ends(tail1, tail2, edge_part, 0, e, live, False)
                    flow, dflow = flows(
                        S, V, T, G, dS, dV, mean, dG, h, own, other, part, e, live,
                        b, items, B, gamma, alpha, KIND, TANGENT,
                    )  # fmt: skip
                    total += flow
                    if TANGENT:
                        dtotal += dflow
            tl.store(row(G, v, b, B), tl.where(is_goal, seed, tl.sum(total, 0)), mask=items)
            if TANGENT:
                dg = tl.where(is_goal, seed * 0.0, tl.sum(dtotal, 0))
                tl.store(row(dG, v, b, B), dg, mask=items)
        if TOGETHER:
            wait_for_all(arrived, (back - first + 1) * tl.num_programs(0))


@quick
@triton.jit
def count_parts(
    M, S, V, T, G, dS, dV, mean, dG, head, tail1, tail2, edge_part, node_ptr, node, edge_ptr, edge,
    gamma: tl.float64, alpha: tl.float64, P, B,
    BE: tl.constexpr, BB: tl.constexpr, SHARE: tl.constexpr,
    KIND: tl.constexpr, TANGENT: tl.constexpr, RULED: tl.constexpr,
):  # fmt: skip
    """M ``(P, B)``: expected uses of each part, or their derivative if ``TANGENT``.

    A tile of BE rows serves BE/SHARE parts, SHARE of the nodes or edges of each at a time. If
    ``RULED``, only edges with parts are listed, in the order of their parts, numbered by ``edge``.
    """
    PARTS: tl.constexpr = BE // SHARE
    slot = tl.arange(0, BE)
    own = tl.program_id(0) * PARTS + slot // SHARE
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    items = b < B
    total = tl.zeros((BE, BB), M.dtype.element_ty)
    start = tl.load(node_ptr + own, mask=own < P, other=0)
    stop = tl.load(node_ptr + own + 1, mask=own < P, other=0)
    for skip in range(0, tl.max(stop - start, 0), SHARE):
        at = start + skip + slot % SHARE
        live = at < stop
        v = tl.load(node + at, mask=live, other=0)
        total += tl.load(
            rows(dG if TANGENT else G, v, b, B), mask=live[:, None] & items[None, :], other=0.0
        )
    start = tl.load(edge_ptr + own, mask=own < P, other=0)
    stop = tl.load(edge_ptr + own + 1, mask=own < P, other=0)
    for skip in range(0, tl.max(stop - start, 0), SHARE):
        at = start + skip + slot % SHARE
        live = at < stop
        e = tl.load(edge + at, mask=live, other=0)
        place = at if RULED else e
        h = tl.load(head + place, mask=live, other=0)
        one, two, part = ends(tail1, tail2, edge_part, 0, place, live, False)
        _, flow = flows(
            S, V, T, G, dS, dV, mean, dG, h, one, two, part, e, live, b, items, B,
            gamma, alpha, KIND, TANGENT,
        )  # fmt: skip
        total += flow
    count = tl.sum(tl.reshape(total, (PARTS, SHARE, BB)), 1)
    p = tl.program_id(0) * PARTS + tl.arange(0, PARTS)
    tl.store(rows(M, p, b, B), count, mask=(p < P)[:, None] & items[None, :])


@quick
@triton.jit(do_not_specialize=["first", "last"])
def outside(
    S, V, O, goal, head, edge_part, node_part, use_ptr, use_edge, use_other,
    order, levels, arrived, first, last, B,
    BE: tl.constexpr, BB: tl.constexpr, TOGETHER: tl.constexpr, RULED: tl.constexpr,
):  # fmt: skip
    """O: the best score of what surrounds each node in a derivation of the goal."""
    tiles = tl.cdiv(B, BB)
    for back in range(first, last):
        level = first + last - 1 - back
        start, stop = tl.load(levels + level), tl.load(levels + level + 1)
        for tile in range(tl.program_id(0), (stop - start) * tiles, tl.num_programs(0)):
            v = tl.load(order + start + tile // tiles)
            b = (tile % tiles) * BB + tl.arange(0, BB)
            items = b < B
            value = tl.load(row(V, v, b, B), mask=items)
            is_goal = tl.load(goal + b, mask=items, other=-1) == v
            best = tl.full((BE, BB), -float("inf"), tl.float64)
            nan = tl.zeros((BE, BB), tl.float64)
            r0, r1 = 0, 1
            if RULED:
                r0, r1 = tl.load(use_ptr + v), tl.load(use_ptr + v + 1)
            for run in range(r0, r1):
                u0, u1 = use_bounds(use_ptr, use_edge, v, run, RULED)
                for begin in range(u0, u1, BE):
                    use = begin + tl.arange(0, BE)
                    live = use < u1
                    inside = live[:, None] & items[None, :]
                    if RULED:
                        rule = use_edge + run * USES
                        h, other = along(rule + 1, use), along(rule + 4, use)
                        part = along(rule + 7, use)
                    else:
                        e = tl.load(use_edge + use, mask=live, other=0)
                        h = tl.load(head + e, mask=live, other=0)
                        part = tl.load(edge_part + e, mask=live, other=0)
                        other = tl.load(use_other + use, mask=live, other=0)
                    x = above(S, O, node_part, h, part, live, b, items, B)
                    y = x + tl.load(rows(V, other, b, B), mask=inside, other=0.0)
                    y = tl.where(x == -float("inf"), x, y)
                    nan += nan_in(y)
                    best = tl.maximum(best, y)
            around = tl.where(is_goal, nan_in(value), tl.max(best, 0) + tl.sum(nan, 0))
            tl.store(row(O, v, b, B), around, mask=items)
        if TOGETHER:
            wait_for_all(arrived, (back - first + 1) * tl.num_programs(0))


@triton.jit
def above(S, O, node_part, h, part, live, b, items, B):
    """O[h] + θ[part(h)] + θ[part] of edges ``(BE, BB)``, −inf where the head h is never used."""
    inside = live[:, None] & items[None, :]
    x = tl.load(rows(O, h, b, B), mask=inside, other=-float("inf"))
    unused = x == -float("inf")
    x += tl.load(rows(S, tl.load(node_part + h, mask=live, other=0), b, B), mask=inside, other=0.0)
    x += tl.load(rows(S, part, b, B), mask=inside, other=0.0)
    return tl.where(unused, -float("inf"), x)


@quick
@triton.jit
def best_with_parts(
    M, S, V, O, head, tail1, tail2, edge_part, node_part, node_ptr, node, edge_ptr, edge, P, B,
    BE: tl.constexpr, BB: tl.constexpr, SHARE: tl.constexpr, RULED: tl.constexpr,
):  # fmt: skip
    """M ``(P, B)``: the best score of a derivation through each part. Tiles as in count_parts."""
    PARTS: tl.constexpr = BE // SHARE
    slot = tl.arange(0, BE)
    own = tl.program_id(0) * PARTS + slot // SHARE
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    items = b < B
    best = tl.full((BE, BB), -float("inf"), tl.float64)
    nan = tl.zeros((BE, BB), tl.float64)
    start = tl.load(node_ptr + own, mask=own < P, other=0)
    stop = tl.load(node_ptr + own + 1, mask=own < P, other=0)
    for skip in range(0, tl.max(stop - start, 0), SHARE):
        at = start + skip + slot % SHARE
        inside = (at < stop)[:, None] & items[None, :]
        v = tl.load(node + at, mask=at < stop, other=0)
        x = tl.load(rows(O, v, b, B), mask=inside, other=-float("inf"))
        y = x + tl.load(rows(V, v, b, B), mask=inside, other=0.0)
        y = tl.where(x == -float("inf"), x, y)
        nan += nan_in(y)
        best = tl.maximum(best, y)
    start = tl.load(edge_ptr + own, mask=own < P, other=0)
    stop = tl.load(edge_ptr + own + 1, mask=own < P, other=0)
    for skip in range(0, tl.max(stop - start, 0), SHARE):
        at = start + skip + slot % SHARE
        live = at < stop
        inside = live[:, None] & items[None, :]
        e = at if RULED else tl.load(edge + at, mask=live, other=0)
        first, second, part = ends(tail1, tail2, edge_part, 0, e, live, False)
        x = above(
            S, O, node_part, tl.load(head + e, mask=live, other=0), part, live, b, items, B
        )  # fmt: skip
        y = x + tl.load(rows(V, first, b, B), mask=inside, other=0.0)
        y += tl.load(rows(V, second, b, B), mask=inside, other=0.0)
        y = tl.where(x == -float("inf"), x, y)
        nan += nan_in(y)
        best = tl.maximum(best, y)
    through = tl.max(tl.reshape(best, (PARTS, SHARE, BB)), 1)
    through += tl.sum(tl.reshape(nan, (PARTS, SHARE, BB)), 1)
    p = tl.program_id(0) * PARTS + tl.arange(0, PARTS)
    tl.store(rows(M, p, b, B), through, mask=(p < P)[:, None] & items[None, :])


@quick
@triton.jit
def walk(
    S, V, T, goal, uniform, stack, z, ptr, tail1, tail2, edge_part, node_part,
    gamma: tl.float64, alpha: tl.float64, B, num_nodes, depth, visits, width,
    BE: tl.constexpr, KIND: tl.constexpr, RULED: tl.constexpr,
):  # fmt: skip
    """Counts in z ``(S, B, width)`` the parts of one derivation per program (draw and item):
    the best (Hard), or a draw that uses one number of ``uniform (S, B, visits)`` per visit."""
    which = tl.program_id(0).to(tl.int64)
    b = (which % B).to(tl.int32)
    stack += which * depth
    uniform += which * visits
    z += which * width
    v = tl.load(goal + b).to(tl.int32)
    item = b + tl.zeros((1,), tl.int32)
    everywhere = item >= 0
    tl.store(stack, v)
    feasible = tl.load(V + v.to(tl.int64) * B + b) > -float("inf")
    used, top = 0, feasible.to(tl.int32)
    while top > 0:
        tl.debug_barrier()  # what one thread pushed, all threads see
        top -= 1
        v = tl.load(stack + top)
        part = tl.load(node_part + v)
        tl.atomic_add(z + part, 1.0, mask=part < width, sem="relaxed")
        t = tl.load(T + 2 * v.to(tl.int64) * B + b)
        w = tl.load(T + (2 * v.to(tl.int64) + 1) * B + b)
        r0, r1 = 0, 1
        if RULED:
            r0, r1 = tl.load(ptr + v), tl.load(ptr + v + 1)
        if KIND == HARD:
            chosen = t.to(tl.int32)
        else:
            total = tl.zeros((1,), tl.float64)
            before, chosen = 0, 0 if RULED else tl.load(ptr + v)
            for run in range(r0, r1):
                e0, e1 = bounds(ptr, tail1, v, run, RULED)
                for start in range(e0, e1, BE):
                    e = start + tl.arange(0, BE)
                    one, two, own = ends(tail1, tail2, edge_part, run, e, e < e1, RULED)
                    x = options(V, S, one, two, own, e < e1, item, everywhere, B)
                    q = weights(x, e, t, w, gamma, alpha, tl.float64, KIND)
                    total += tl.sum(q, 0)
                    # The last edge of any weight, should rounding leave the target beyond the sum.
                    last = tl.max(tl.max(tl.where(q > 0, before + e[:, None], 0), 0), 0)
                    chosen = tl.maximum(chosen, last)
                before += e1 - e0
            target = tl.load(uniform + used).to(tl.float64) * total
            used += 1
            passed = tl.zeros((1,), tl.float64)
            before = 0
            for run in range(r0, r1):
                e0, e1 = bounds(ptr, tail1, v, run, RULED)
                for start in range(e0, e1, BE):
                    e = start + tl.arange(0, BE)
                    one, two, own = ends(tail1, tail2, edge_part, run, e, e < e1, RULED)
                    x = options(V, S, one, two, own, e < e1, item, everywhere, B)
                    q = weights(x, e, t, w, gamma, alpha, tl.float64, KIND)
                    reached = passed[None, :] + tl.cumsum(q, 0) > target[None, :]
                    place = tl.where(reached, before + e[:, None], NONE)
                    chosen = tl.minimum(chosen, tl.min(tl.min(place, 0), 0))
                    passed += tl.sum(q, 0)
                before += e1 - e0
        if RULED:
            first, second, part, before = num_nodes, num_nodes, width, 0
            for run in range(r0, r1):
                count = tl.load(tail1 + run * RUN)
                d = chosen - before
                here = (d >= 0) & (d < count)
                its1, its2, its3 = ends(tail1, tail2, edge_part, run, d, here, True)
                first = tl.where(here, its1, first)
                second = tl.where(here, its2, second)
                part = tl.where(here, its3, part)
                before += count
        else:
            first, second = tl.load(tail1 + chosen), tl.load(tail2 + chosen)
            part = tl.load(edge_part + chosen)
        tl.atomic_add(z + part, 1.0, mask=part < width, sem="relaxed")
        tl.store(stack + top, second, mask=second < num_nodes)
        top += (second < num_nodes).to(tl.int32)
        tl.store(stack + top, first, mask=first < num_nodes)
        top += (first < num_nodes).to(tl.int32)


TILE = 512  # edges × items of one program
ITEMS = 16  # of which items, at most
WARPS = 4
TOGETHER = 4  # programs on each multiprocessor that run at once in a cooperative launch
NARROW = 16  # such a launch takes forests of at most so many tiles per level and program


class Block:
    """The tables of a batch, with the bottom-up pass done."""

    def __init__(self, forest: Forest, scores: Tensor, goal: Tensor, code: Code) -> None:
        kind, self.gamma, self.alpha = code
        self.kind = GINI.value if kind == smoothing.TSALLIS and self.alpha == 2 else int(kind)
        self.forest, self.lists = forest, forest.on(scores.device)
        self.ruled = isinstance(forest, RuledForest)
        self.goal, self.B, self.P = goal.contiguous(), len(scores), forest.num_parts
        self.out, self.device = scores.dtype, scores.device
        self.dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
        self.BB = min(ITEMS, triton.next_power_of_2(max(self.B, 1)))
        self.tiles = triton.cdiv(self.B, self.BB)
        self.S = self.side_by_side(scores)
        self.V, self.T = self.zeros(forest.num_nodes + 1), self.table(2 * forest.num_nodes)
        self.by_level(
            up, forest.max_degree, self.S, self.V, self.T, *self.incoming(),
            self.gamma, self.alpha, KIND=self.kind,
        )  # fmt: skip

    def table(self, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.empty(size, self.B, dtype=dtype, device=self.device)

    def zeros(self, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.zeros(size, self.B, dtype=dtype, device=self.device)

    def side_by_side(self, scores: Tensor) -> Tensor:
        """``(B, P)`` to ``(P+1, B)``, a zero row last."""
        table = self.zeros(self.P + 1, self.dtype)
        table[:-1] = scores.t()
        return table

    def incoming(self) -> tuple[Tensor, ...]:
        l = self.lists
        if self.ruled:
            return l.run_ptr, l.runs, l.runs, l.runs, l.node_part
        return l.ptr, l.tail1, l.tail2, l.edge_part, l.node_part

    def uses(self) -> tuple[int, tuple[Tensor, Tensor, Tensor]]:
        """The longest list of uses of a node, and the lists."""
        l = self.lists
        if isinstance(self.forest, RuledForest):
            most = int(self.forest.uses.row[:, 0].max(initial=1))
            return most, (l.uses_ptr, l.uses_row, l.uses_row)
        most = int(np.diff(self.forest.reversed.ptr).max())
        return most, (l.reversed_ptr, l.reversed_edge, l.reversed_other)

    def edges(self) -> tuple[Tensor, ...]:
        """``head, tail1, tail2, edge_part``; by rule only of edges with parts, in their order."""
        l = self.lists
        if self.ruled:
            return l.carriers_head, l.carriers_tail1, l.carriers_tail2, l.carriers_part
        return l.head, l.tail1, l.tail2, l.edge_part

    def edge_tile(self, most: int) -> int:
        """How many of at most ``most`` edges a program takes at a time."""
        return min(triton.next_power_of_2(max(most, 1)), TILE // self.BB)

    def by_level(self, kernel: Any, most: int, *arguments: Any, **constants: Any) -> None:
        """Runs a kernel over all levels; ``most`` is the longest list of edges it meets."""
        ptr = self.forest.levels.ptr
        last, widest = len(ptr) - 1, int(np.diff(ptr).max()) * self.tiles
        constants.update(order=self.lists.levels_order, levels=self.lists.levels_ptr, B=self.B)
        constants.update(BE=self.edge_tile(most), BB=self.BB, RULED=self.ruled)
        if self.device.type == "cuda":
            processors = torch.cuda.get_device_properties(self.device).multi_processor_count
            programs = min(widest, TOGETHER * processors)
            if widest <= NARROW * programs:
                arrived = torch.zeros(1, dtype=torch.int32, device=self.device)
                kernel[(programs,)](
                    *arguments, arrived=arrived, first=0, last=last, **constants,
                    TOGETHER=True, launch_cooperative_grid=True, num_warps=WARPS,
                    maxnreg=min(255, 65536 // (32 * WARPS * TOGETHER)),  # so that they all fit
                )  # fmt: skip
                return
        levels = range(last) if kernel in BOTTOM_UP else reversed(range(last))
        for level in levels:
            kernel[(int(ptr[level + 1] - ptr[level]) * self.tiles,)](
                *arguments, arrived=self.lists.levels_ptr, first=level, last=level + 1, **constants,
                TOGETHER=False, num_warps=WARPS,
            )  # fmt: skip

    def by_part(self, kernel: Any, M: Tensor, *arguments: Any, **constants: Any) -> Tensor:
        """Runs a kernel over all parts of M ``(·, B)``, and returns M as ``(B, ·)``."""
        node_ptr, node, edge_ptr, edge = (
            getattr(self.lists, f"by_part_{name}") for name in ByPart._fields
        )
        uses = triton.cdiv(max(len(node), len(edge)), max(self.P, 1))
        BE = TILE // self.BB
        share = min(triton.next_power_of_2(max(uses, 1)), BE)
        kernel[(triton.cdiv(len(M), BE // share), self.tiles)](
            M, *arguments, node_ptr=node_ptr, node=node, edge_ptr=edge_ptr, edge=edge,
            P=len(M), B=self.B, BE=BE, BB=self.BB, SHARE=share, RULED=self.ruled, **constants,
        )  # fmt: skip
        return M.t().contiguous().to(self.out)

    def values(self) -> Tensor:
        """A ``(B)``."""
        return self.V.gather(0, self.goal.long()[None]).squeeze(0)

    def expected_parts(self, tangent: tuple[Tensor, ...] = ()) -> Tensor:
        """The top-down pass: ``(B, P)``, or its derivative given ``(dS, dV, mean)``."""
        v = self.forest.num_nodes
        G = self.table(v, self.dtype)
        dG = self.table(v) if tangent else G
        state = (self.S, self.V, self.T, G, *(tangent or (G, G, G)), dG)
        edges = self.edges()
        kind = {"KIND": self.kind, "TANGENT": bool(tangent)}
        omega = {"gamma": self.gamma, "alpha": self.alpha}
        most, (ptr, edge, _) = self.uses()
        self.by_level(down, most, *state, self.goal, *edges, ptr, edge, **omega, **kind)
        M = self.table(self.P, dG.dtype)
        return self.by_part(count_parts, M, *state, *edges, **omega, **kind)

    def hvp(self, direction: Tensor) -> Tensor:
        dS, dV = self.side_by_side(direction), torch.zeros_like(self.V)
        mean = self.table(self.forest.num_nodes)
        self.by_level(
            tangent_up, self.forest.max_degree, self.S, self.V, self.T, dS, dV, mean,
            *self.incoming(), self.gamma, self.alpha, KIND=self.kind,
        )  # fmt: skip
        return self.expected_parts((dS, dV, mean))

    def walks(self, uniform: Tensor, width: int) -> Tensor:
        """``(S, B, width)``, a row of uniform numbers ``(S, B, ·)`` for each."""
        draws, _, visits = uniform.shape
        z = torch.zeros(draws, self.B, width, dtype=self.dtype, device=self.device)
        depth = int(self.forest.derivation_size.max()) + 2
        stack = torch.empty(draws * self.B, depth, dtype=torch.int32, device=self.device)
        walk[(draws * self.B,)](
            self.S, self.V, self.T, self.goal, uniform.contiguous(), stack, z, *self.incoming(),
            self.gamma, self.alpha, self.B, self.forest.num_nodes, depth, visits, width,
            BE=min(triton.next_power_of_2(self.forest.max_degree), TILE), KIND=self.kind,
            RULED=self.ruled, num_warps=1,
        )  # fmt: skip
        feasible = self.values()[:, None].abs() < math.inf
        return torch.where(feasible, z, math.nan).to(self.out)

    def max_marginals(self, width: int) -> Tensor:
        O, node_part = self.table(self.forest.num_nodes), self.lists.node_part
        (most, uses), edges = self.uses(), self.edges()
        self.by_level(
            outside, most, self.S, self.V, O, self.goal, edges[0], edges[3], node_part, *uses
        )
        table = self.table(width)
        return self.by_part(best_with_parts, table, self.S, self.V, O, *edges, node_part)


BOTTOM_UP = (up, tangent_up)
_HARD: Code = (smoothing.HARD, 1.0, 1.0)


def plan_of(forest: Forest, scores: Tensor, code: Code) -> gpu_eisner.Plan | gpu_items.Plan | None:
    """How one program per item goes about it; None where the programs here are to share levels."""
    if code[0] != smoothing.SHANNON:
        return None
    chart = gpu_eisner.plan(forest)
    if chart is not None or isinstance(forest, RuledForest):
        return chart
    return gpu_items.plan(forest, scores.device)


def value(forest: Forest, scores: Tensor, goal: Tensor, code: Code) -> Tensor:
    """A ``(B)`` for scores ``(B, P)``."""
    with torch.cuda.device_of(scores):
        plan = plan_of(forest, scores, code)
        if plan is not None:
            return plan.run(scores, goal, code[1], down=False)[0]
        return Block(forest, scores, goal, code).values().to(scores.dtype)


def gradient(forest: Forest, scores: Tensor, goal: Tensor, code: Code) -> tuple[Tensor, Tensor]:
    """A ``(B)`` and its gradient ``(B, P)``."""
    with torch.cuda.device_of(scores):
        plan = plan_of(forest, scores, code)
        if plan is not None:
            return plan.run(scores, goal, code[1], down=True)
        block = Block(forest, scores, goal, code)
        return block.values().to(scores.dtype), block.expected_parts()


def hvp(forest: Forest, scores: Tensor, direction: Tensor, goal: Tensor, code: Code) -> Tensor:
    """The Hessian of A times a direction ``(B, P)``; zero under hard max."""
    if code[0] == smoothing.HARD:
        a = value(forest, scores, goal, code)
        return torch.where(a.isnan(), a, 0.0)[:, None].expand(scores.shape).contiguous()
    with torch.cuda.device_of(scores):
        return Block(forest, scores, goal, code).hvp(direction)


def sample(
    forest: Forest, scores: Tensor, goal: Tensor, uniform: Tensor, code: Code, width: int
) -> Tensor:
    """Part counts ``(S, B, width)`` of draws; ``uniform (S, B, ·)`` holds a number per visit."""
    with torch.cuda.device_of(scores):
        return Block(forest, scores, goal, code).walks(uniform, width)


def argmax(forest: Forest, scores: Tensor, goal: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The value under hard max and the part counts ``(B, width)`` of one best derivation."""
    with torch.cuda.device_of(scores):
        block = Block(forest, scores, goal, _HARD)
        no_draws = scores.new_empty(1, len(scores), 0)
        return block.values().to(scores.dtype), block.walks(no_draws, width)[0]


def max_marginals(forest: Forest, scores: Tensor, goal: Tensor, width: int) -> Tensor:
    """``(B, width)``: the best score of a derivation that uses each part."""
    with torch.cuda.device_of(scores):
        return Block(forest, scores, goal, _HARD).max_marginals(width)


def kbest(
    forest: Forest, scores: Tensor, goal: Tensor, k: int, width: int
) -> tuple[Tensor, Tensor]:
    """Scores ``(B, k)``, −inf past the last derivation, and part counts ``(B, k, width)``.

    The level-wise definition: each level is already one wide ``topk`` on the device. It works from
    lists, which are written out for a forest by rule.
    """
    return naive.kbest(forest, scores, goal, k, width)
