"""Sums of products along the rows of a chart, for the CPU kernels of trees over a sentence.

A table has a row for each width w of a span and a column for each place i where it begins. The
parts of a span, and the wider spans that it is a part of, lie on straight lines through the tables,
and those of the next span lie next to them: no lists of edges are read, and vectors run along the
rows. Tables are flat, ``[LANES + w·pitch + i]``, one after the other in one array V. A row ends in
zeros, at least ``LANES`` of them, which are also what lies before the next row: sums may run past
either end, and what they find for places past the end of a row is zero again.

As in ``products``, Shannon's recursion is one of products of exponentials, which a shift of all
scores keeps in range; an item that leaves the range is left to the log-space kernels of ``cpu``.
Items are computed one after the other: each has the same bits whatever the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from structmax.jit import exp, in_python, kernel
from structmax.oracles.lanes_cpu import intrinsic

LANES = 8  # numbers in a vector: a line of the cache
PART_RANGE = 100.0  # of the logarithm of an exponential, and of that of a sum: a product of two
NODE_RANGE = 280.0  # sums and an exponential stays within float64's e^±708
TRIES = 8  # shifts before an item is given up: log space takes far longer
LARGEST, SMALLEST = math.exp(NODE_RANGE), math.exp(-NODE_RANGE)
FUSED = ("contract",)
_vector = ir.VectorType(ir.DoubleType(), LANES)


class _Compiled:
    """Arithmetic with vectors of V, as instructions."""

    zero = ir.Constant(_vector, [0.0] * LANES)

    def __init__(self, context: Any, builder: Any, kind: Any, V: Any) -> None:
        self.builder, self.V = builder, context.make_array(kind)(context, builder, V)

    def _at(self, place: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(self.V.data, [place]), _vector.as_pointer())

    def load(self, place: Any) -> Any:
        return self.builder.load(self._at(place), align=8)

    def store(self, place: Any, x: Any) -> None:
        self.builder.store(x, self._at(place), align=8)

    def times(self, x: Any, y: Any) -> Any:
        return self.builder.fmul(x, y, flags=FUSED)

    def plus(self, x: Any, y: Any) -> Any:
        return self.builder.fadd(x, y, flags=FUSED)

    def where(self, condition: Any, x: Any) -> Any:
        positive = self.builder.fcmp_ordered(">", condition, self.zero)
        return self.builder.select(positive, x, self.zero)

    def sums(self, count: Any, da: Any, db: Any, *lines: tuple[Any, Any, Any]) -> list[Any]:
        builder = self.builder
        totals = [cgutils.alloca_once_value(builder, start) for start, _, _ in lines]
        a, b = (cgutils.alloca_once_value(builder, ir.Constant(da.type, 0)) for _ in range(2))
        with cgutils.for_range(builder, count):
            down_a, down_b = builder.load(a), builder.load(b)
            for total, (_, x, y) in zip(totals, lines, strict=True):
                left, right = builder.add(x, down_a), builder.add(y, down_b)
                product = self.times(self.load(left), self.load(right))
                builder.store(self.plus(builder.load(total), product), total)
            builder.store(builder.add(down_a, da), a)
            builder.store(builder.add(down_b, db), b)
        return [builder.load(total) for total in totals]


class _Plain:
    """The same in Python."""

    zero = np.zeros(LANES)

    def __init__(self, V: Any) -> None:
        self.V = V

    def load(self, place: int) -> Any:
        return self.V[place : place + LANES].copy()

    def store(self, place: int, x: Any) -> None:
        self.V[place : place + LANES] = x

    def times(self, x: Any, y: Any) -> Any:
        return x * y

    def plus(self, x: Any, y: Any) -> Any:
        return x + y

    def where(self, condition: Any, x: Any) -> Any:
        """x where the condition is positive, else 0."""
        return np.where(condition > 0, x, 0.0)

    def sums(self, count: int, da: int, db: int, *lines: tuple[Any, int, int]) -> list[Any]:
        """start + Σ over s < count of V[x + s·da]·V[y + s·db] for each line (start, x, y)."""
        totals = []
        for total, x, y in lines:
            for s in range(count):
                total = total + self.load(x + s * da) * self.load(y + s * db)
            totals.append(total)
        return totals


def lanewise(step: Callable[..., None]) -> Any:
    """Makes ``f(V, numbers)`` for kernels of a ``step(v, *numbers)`` written in v's verbs."""

    @in_python(lambda V, numbers: step(_Plain(V), *numbers))
    @intrinsic
    def run(_context, V, numbers):
        def generate(context, builder, signature, args):
            v = _Compiled(context, builder, signature.args[0], args[0])
            step(v, *cgutils.unpack_tuple(builder, args[1]))
            return context.get_dummy_value()

        return types.void(V, numbers), generate

    return run


@kernel(inner=True)
def pitch_of(side):
    """The length of a row with its zeros: an odd number of cache lines, so that the numbers of a
    column do not compete for the same place in the cache."""
    lines = -(-side // LANES) + 1
    return LANES * (lines + 1 - lines % 2)


@kernel(fast=True, inner=True)
def typical(theta, gamma, share, growth):
    """A shift that brings sums over trees near 1. Of a tree's parts this share is free, with
    exp(growth) trees for each of them.

    They are as if scores of trees were independent (Derrida, 1981, "Random-energy model"): growth
    + s²/2 a part at a standard deviation of s, and the best of them from s = √(2 growth) on. Where
    this would put a part out of range, all of them are kept in range, if that can be.
    """
    number, total, squares, out = 0.0, 0.0, 0.0, 0
    for p in range(theta.shape[0]):
        finite = abs(theta[p]) < math.inf
        number += 1.0 if finite else 0.0
        total += theta[p] if finite else 0.0
    mean = total / max(number, 1.0)
    for p in range(theta.shape[0]):
        x = theta[p] - mean
        squares += x * x if abs(x) < math.inf else 0.0
    s = math.sqrt(squares / max(number, 1.0)) / gamma
    most, reach = math.sqrt(2.0 * growth), 0.999 * PART_RANGE * gamma
    shift = mean + share * gamma * (growth + 0.5 * s * s if s < most else s * most)
    for p in range(theta.shape[0]):
        x = abs(theta[p] - shift)
        out |= 1 if (x > reach) & (x < math.inf) else 0
    return within_reach(theta, shift, reach) if out else shift


@kernel(inner=True)
def within_reach(theta, shift, reach):
    """The shift nearest to one given, so far as possible, that no finite score is farther from."""
    least, largest = math.inf, -math.inf
    for p in range(theta.shape[0]):
        if abs(theta[p]) < math.inf:
            least, largest = min(least, theta[p]), max(largest, theta[p])
    return min(max(shift, largest - reach), least + reach)


@kernel(inner=True)
def correction(x, parts):
    """What to add to the shift, in units of γ, for a sum x of so many parts that is out of range.

    It is brought inside, but to the same side: there may be others on the other one.
    """
    return (math.log(x) - math.copysign(0.7 * NODE_RANGE, math.log(x))) / parts


@kernel(inner=True)
def exponentiate(theta, shift, inverse, e):
    """e of each part; what lies out of range becomes NaN, and so does what it is used in."""
    for p in range(theta.shape[0]):
        x = (theta[p] - shift) * inverse
        inside = (abs(x) <= PART_RANGE) | (theta[p] == -math.inf)
        e[p] = exp(x) if inside else math.nan


@kernel(inner=True)
def first_out_of_range(V):
    """The first place that is; the length if none is."""
    bad = 0
    for k in range(V.shape[0]):
        bad |= 0 if ((V[k] <= LARGEST) & (V[k] >= SMALLEST)) | (V[k] == 0.0) else 1
    for k in range(V.shape[0] if bad else 0):
        if not (SMALLEST <= V[k] <= LARGEST or V[k] == 0.0):
            return k
    return V.shape[0]
