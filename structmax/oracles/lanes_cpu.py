"""Vector operations of compiled code that loops in Python's syntax do not become.

Rows are contiguous and hold whole vectors: a multiple of ``LANES`` numbers, none of them NaN.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from structmax.jit import in_python

LANES = 8
intrinsic: Any = extending.intrinsic  # its functions are called without their first argument
_vector = ir.VectorType(ir.DoubleType(), LANES)
_int32 = ir.IntType(32)


def _max_plus(x: Any, T: Any, out: Any) -> None:
    out[:] = (x[: len(T), None] + T).max(0)


def _where_first(condition: Any) -> int:
    return int(condition.argmax()) if condition.any() else len(condition)


def _fill(builder: Any, x: Any) -> Any:
    one = builder.insert_element(ir.Constant(_vector, ir.Undefined), x, ir.Constant(_int32, 0))
    return _shuffled(builder, one, [0] * LANES)


def _shuffled(builder: Any, x: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(x, x, ir.Constant(ir.VectorType(_int32, LANES), order))


def _larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def _at(builder: Any, row: Any, index: Any) -> Any:
    return builder.bitcast(builder.gep(row.data, [index]), _vector.as_pointer())


def _load(builder: Any, row: Any, index: Any) -> Any:
    return builder.load(_at(builder, row, index), align=8)


def _blocks(builder: Any, width: Any) -> Any:
    zero, step = ir.Constant(width.type, 0), ir.Constant(width.type, LANES)
    return cgutils.for_range_slice(builder, zero, width, step)


def _first(builder: Any, width: Any, equal_at: Any) -> Any:
    """The first index where a block of conditions holds; the width if there is none."""
    found = cgutils.alloca_once_value(builder, width)
    with _blocks(builder, width) as (j, _):
        bits = builder.bitcast(equal_at(j), ir.IntType(LANES))
        lane = builder.cttz(bits, ir.Constant(ir.IntType(1), 0))
        here = builder.add(j, builder.zext(lane, width.type))
        known = builder.load(found)
        new = builder.and_(
            builder.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0)),
            builder.icmp_signed("==", known, width),
        )
        builder.store(builder.select(new, here, known), found)
    return builder.load(found)


@in_python(_max_plus)
@intrinsic
def max_plus(_context, x, T, out):
    """out[j] = max over i of x[i] + T[i, j]"""

    def generate(context, builder, signature, args):
        pairs = zip(signature.args, args, strict=True)
        x, T, out = (context.make_array(kind)(context, builder, a) for kind, a in pairs)
        rows, width = cgutils.unpack_tuple(builder, T.shape)
        best = cgutils.alloca_once(builder, _vector)
        with _blocks(builder, width) as (j, _):
            builder.store(ir.Constant(_vector, [-math.inf] * LANES), best)
            with cgutils.for_range(builder, rows) as loop:
                here = _fill(builder, builder.load(builder.gep(x.data, [loop.index])))
                at = builder.add(builder.mul(loop.index, width), j)
                y = builder.fadd(here, _load(builder, T, at))
                builder.store(_larger(builder, y, builder.load(best)), best)
            builder.store(builder.load(best), _at(builder, out, j), align=8)
        return context.get_dummy_value()

    return types.void(x, T, out), generate


@in_python(lambda x, y, value: _where_first(x + y == value))
@intrinsic
def first_sum(_context, x, y, value):
    """The first i where x[i] + y[i] is the value; their length if there is none."""

    def generate(context, builder, signature, args):
        x, y = (context.make_array(signature.args[i])(context, builder, args[i]) for i in (0, 1))
        (width,) = cgutils.unpack_tuple(builder, x.shape)
        target = _fill(builder, args[2])

        def equal_at(j: Any) -> Any:
            total = builder.fadd(_load(builder, x, j), _load(builder, y, j))
            return builder.fcmp_ordered("==", total, target)

        return _first(builder, width, equal_at)

    return types.intp(x, y, value), generate


@in_python(lambda x, y, length: np.count_nonzero(x[:length] == y[:length]))
@intrinsic
def count_equal(_context, x, y, length):
    """How many of the first so many of x and y, both uint32, are equal; rows are whole vectors."""

    def generate(context, builder, signature, args):
        x, y = (context.make_array(signature.args[i])(context, builder, args[i]) for i in (0, 1))
        length = args[2]
        whole = ir.VectorType(_int32, LANES)
        total = cgutils.alloca_once_value(builder, ir.Constant(length.type, 0))
        with _blocks(builder, length) as (j, _):
            a, b = (
                builder.load(builder.bitcast(builder.gep(t.data, [j]), whole.as_pointer()), align=4)
                for t in (x, y)
            )
            bits = builder.bitcast(builder.icmp_unsigned("==", a, b), ir.IntType(LANES))
            bits = builder.zext(bits, length.type)
            left = builder.sub(length, j)  # of the last vector only some count
            most = ir.Constant(length.type, LANES)
            left = builder.select(builder.icmp_signed("<", left, most), left, most)
            one = ir.Constant(length.type, 1)
            bits = builder.and_(bits, builder.sub(builder.shl(one, left), one))
            builder.store(builder.add(builder.load(total), builder.ctpop(bits)), total)
        return builder.load(total)

    return types.intp(x, y, types.intp), generate


@in_python(lambda x: _where_first((x == x.max()) & (x > -math.inf)))
@intrinsic
def largest(_context, x):
    """The first i where x[i] is largest; their length if all are −inf."""

    def generate(context, builder, signature, args):
        x = context.make_array(signature.args[0])(context, builder, args[0])
        (width,) = cgutils.unpack_tuple(builder, x.shape)
        lowest = ir.Constant(_vector, [-math.inf] * LANES)
        best = cgutils.alloca_once_value(builder, lowest)
        with _blocks(builder, width) as (j, _):
            builder.store(_larger(builder, _load(builder, x, j), builder.load(best)), best)
        top = builder.load(best)
        for shift in (4, 2, 1):
            order = [(lane + shift) % LANES for lane in range(LANES)]
            top = _larger(builder, top, _shuffled(builder, top, order))
        # where nothing is above −inf, nothing is equal to NaN
        none = builder.fcmp_ordered("==", top, lowest)
        top = builder.select(none, ir.Constant(_vector, [math.nan] * LANES), top)

        def equal_at(j: Any) -> Any:
            return builder.fcmp_ordered("==", _load(builder, x, j), top)

        return _first(builder, width, equal_at)

    return types.intp(x), generate
