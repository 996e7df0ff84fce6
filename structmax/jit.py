"""Numba set-up shared by all CPU kernels: the decorator, and exp and log that vectorise.

Kernels are serial and release the GIL; ``run_chunks`` cuts a batch into chunks for threads.
Imported on first use only, because importing numba takes a while.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core.sigutils import normalize_signature
from numba.extending import intrinsic, overload
from numpy.typing import NDArray

from structmax.threads import run_chunks as run_chunks

# −inf and NaN carry meaning, so the fast-math flags that assume them away stay off.
FAST = {"reassoc", "contract", "arcp", "nsz"}
IMPORTED = re.compile(r"^from (structmax[.\w]*) import ([\w, ]*)", re.MULTILINE)


def kernel(
    function: Callable[..., Any] | None = None,
    *,
    fast: bool = False,
    fused: bool = False,
    inner: bool = False,
) -> Any:
    """Compiles a function on first call, cached on disk where a folder is writable.

    ``fast`` lets sums be reordered, which vectorises them. ``fused`` only lets a product and a sum
    become one operation, so that the bits of an item do not depend on the items beside it.
    ``inner`` functions are called by other kernels only, and compile sooner for it.
    """

    def compile_it(function: Callable[..., Any]) -> Any:
        flags = FAST if fast else {"contract"} if fused else False
        # nobody takes the address of a kernel: less to compile
        options: dict[str, Any] = {"nogil": True, "fastmath": flags, "no_cfunc_wrapper": True}
        if inner:
            options.update(no_cpython_wrapper=True)
        try:
            made = numba.njit(cache=True, error_model="numpy", **options)(function)
        except RuntimeError:  # numba found no folder to cache in
            return numba.njit(cache=False, error_model="numpy", **options)(function)
        return _with_safe_cache(made)

    return compile_it if function is None else compile_it(function)


def _with_safe_cache(made: Any) -> Any:
    """A kernel for which damaged files in the cache, or a full disk, are as if there was no cache.

    Numba raises what happens to be raised when a file was cut off. Where processes that start
    together compile a kernel for other types at once, both may give their file one name; a kernel
    for other types would then be called. And it looks for changes in the kernel's own file alone:
    after an update of the package it would go on to use what was compiled from others.
    """
    cache = getattr(made, "_cache", None)
    if cache is None:  # the JIT is off
        return made
    if hasattr(cache, "_cache_file"):
        path = Path(made.py_func.__code__.co_filename)
        cache._cache_file._source_stamp = source_stamp(path)
    load, save = cache.load_overload, cache.save_overload

    def load_overload(signature: Any, context: Any) -> Any:
        try:
            found = load(signature, context)
        except Exception:
            with suppress(OSError):
                cache.flush()
            return None
        types_of_arguments, _ = normalize_signature(signature)
        return found if found is None or found.signature.args == types_of_arguments else None

    def save_overload(signature: Any, data: Any) -> None:
        with suppress(Exception):
            save(signature, data)

    cache.load_overload, cache.save_overload = load_overload, save_overload
    return made


@functools.cache
def source_stamp(path: Path, root: Path = Path(__file__).parent) -> str:
    """A hash of a file and of all that it imports, directly or not, of the package at ``root``."""
    digest, todo, seen = hashlib.sha256(), [path], set()
    while todo:
        file = todo.pop()
        if file not in seen:
            seen.add(file)
            text, imported = _source(file, root)
            digest.update(text)
            todo += imported
    return digest.hexdigest()


@functools.cache
def _source(file: Path, root: Path) -> tuple[bytes, list[Path]]:
    """A file, if it is one, and what it may import."""
    if not file.is_file():
        return b"", []
    text, files = file.read_text(encoding="utf-8"), []
    for module, names in IMPORTED.findall(text):
        folder = root.joinpath(*module.split(".")[1:])
        inside = [folder / f"{name.strip()}.py" for name in names.split(",")]
        files += [folder.with_suffix(".py"), folder / "__init__.py", *inside]
    return text.encode(), files


def in_python(plain: Callable[..., Any]) -> Callable[..., Any]:
    """With the JIT off (``NUMBA_DISABLE_JIT=1``), where kernels run as Python, ``plain`` runs in
    the place of an intrinsic, which is nothing but instructions for the compiler."""
    return lambda compiled: plain if numba.config.DISABLE_JIT else compiled  # type: ignore[attr-defined]


@intrinsic
def _float_of_bits32(_context, bits):
    def generate(_ctx, builder, _signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def _float_of_bits64(_context, bits):
    def generate(_ctx, builder, _signature, args):
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), generate


@intrinsic
def _bits_of_float64(_context, x):
    def generate(_ctx, builder, _signature, args):
        return builder.bitcast(args[0], ir.IntType(64))

    return types.int64(types.float64), generate


@intrinsic
def _bits_of_float32(_context, x):
    def generate(_ctx, builder, _signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), generate


def exp(x: float) -> float:
    """e**x for x ≤ 88 (709 in float64) in compiled code, vectorisable, within 1 ulp; underflows to
    0; keeps NaN.

    x = k·ln 2 + f with |f| ≤ ½ ln 2 (ln 2 in two pieces, so f is exact). Adding 1.5·2²³ (1.5·2⁵²)
    rounds to an integer; with the bias of the exponent added, its bits are those of 2^k but for a
    shift. e^f is its Taylor series in float64, and in float32 the polynomial through Chebyshev's
    nodes, which is off by a tenth of an ulp.
    """
    return math.exp(x)


@overload(exp, jit_options={"fastmath": {"contract"}}, inline="never")
def _exp(x):
    if x == types.float32:
        low, log2e = np.float32(-87.0), np.float32(1.4426950408889634)
        ln2_high, ln2_low = np.float32(0.693359375), np.float32(-2.12194440054690583e-4)
        round32, zero, one, half = (np.float32(a) for a in (1.5 * 2**23 + 127, 0.0, 1.0, 0.5))
        coefficients = 0.166665768, 0.0416665544, 0.00836320297, 0.00139262135
        c3, c4, c5, c6 = (np.float32(a) for a in coefficients)

        def exp32(x):
            y = low if x < low else x
            biased = y * log2e + round32
            k = biased - round32
            f = (y - k * ln2_high) - k * ln2_low
            p = c6
            p = p * f + c5
            p = p * f + c4
            p = p * f + c3
            p = p * f + half
            p = p * f + one
            p = p * f + one
            scale = _float_of_bits32(_bits_of_float32(biased) << np.int32(23))
            return zero if x < low else p * scale

        return exp32
    if x == types.float64:
        low64, log2e64, round64 = -708.0, 1.4426950408889634, 1.5 * 2**52 + 1023
        ln2_high64, ln2_low64 = 6.93147180369123816490e-01, 1.90821492927058770002e-10
        d = tuple(1 / math.factorial(i) for i in range(14))
        d2, d3, d4, d5, d6, d7, d8, d9, d10, d11, d12, d13 = d[2:]

        def exp64(x):
            y = low64 if x < low64 else x
            biased = y * log2e64 + round64
            k = biased - round64
            f = (y - k * ln2_high64) - k * ln2_low64
            p = d13
            p = p * f + d12
            p = p * f + d11
            p = p * f + d10
            p = p * f + d9
            p = p * f + d8
            p = p * f + d7
            p = p * f + d6
            p = p * f + d5
            p = p * f + d4
            p = p * f + d3
            p = p * f + d2
            p = p * f + 1.0
            p = p * f + 1.0
            scale = _float_of_bits64(_bits_of_float64(biased) << np.int64(52))
            return 0.0 if x < low64 else p * scale

        return exp64
    return None


def _flipped(bits: Any) -> Any:
    return bits ^ (bits >> (8 * bits.itemsize - 1) & np.iinfo(bits.dtype).max)


@in_python(lambda x: _flipped(x.view(f"i{x.itemsize}")))
@intrinsic
def ordinal(_context, x):
    """An integer that is ordered as x; NaN lies beyond ±inf. A largest integer, unlike a largest
    float, is found by vector instructions."""

    def generate(_ctx, builder, _signature, args):
        integer = ir.IntType(x.bitwidth)
        return _flip(builder, builder.bitcast(args[0], integer), integer)

    return types.Integer.from_bitwidth(x.bitwidth)(x), generate


@in_python(lambda k: _flipped(k).view(f"f{k.itemsize}"))
@intrinsic
def from_ordinal(_context, k):
    """The float of an ordinal."""
    result = types.float32 if k.bitwidth == 32 else types.float64

    def generate(_ctx, builder, _signature, args):
        bits = _flip(builder, args[0], ir.IntType(k.bitwidth))
        return builder.bitcast(bits, ir.FloatType() if k.bitwidth == 32 else ir.DoubleType())

    return result(k), generate


def _flip(builder: Any, bits: Any, integer: Any) -> Any:
    """The bits of a negative number flipped, but for its sign."""
    sign = builder.ashr(bits, ir.Constant(integer, integer.width - 1))
    return builder.xor(bits, builder.lshr(sign, ir.Constant(integer, 1)))


def log(x: float) -> float:
    """log x of a positive normal number in compiled code, vectorisable, as a float64.

    x = 2^k·m with m in [√½, √2). float64: log m = 2 artanh s with s = (m − 1)/(m + 1), by its
    series, within 2 ulp. float32: a polynomial in f = m − 1 (the coefficients of Cephes' logf),
    with an absolute error below 1e-7 whatever k.
    """
    return math.log(x)


@overload(log, jit_options={"fastmath": {"contract"}}, inline="never")
def _log(x):
    if x == types.float32:
        root = np.int32(0x3F3504F3)  # the bits of √½
        one, half = np.float32(1), np.float32(0.5)
        coefficients = (
            7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
            -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
        )  # fmt: skip
        a0, a1, a2, a3, a4, a5, a6, a7, a8 = (np.float32(a) for a in coefficients)
        ln2_32 = math.log(2.0)

        def log32(x):
            bits = _bits_of_float32(x)
            k = (bits - root) >> np.int32(23)
            f = _float_of_bits32(bits - (k << np.int32(23))) - one
            p = a0
            p = p * f + a1
            p = p * f + a2
            p = p * f + a3
            p = p * f + a4
            p = p * f + a5
            p = p * f + a6
            p = p * f + a7
            p = p * f + a8
            z = f * f
            return k * ln2_32 + np.float64(f + (p * f * z - half * z))

        return log32
    if x != types.float64:
        return None
    half_sqrt = np.int64(0x3FE6A09E667F3BCD)  # the bits of √½
    e3, e5, e7, e9, e11, e13, e15, e17, e19, e21 = (2.0 / i for i in range(3, 23, 2))
    ln2 = math.log(2.0)

    def log64(x):
        bits = _bits_of_float64(x)
        k = (bits - half_sqrt) >> np.int64(52)
        m = _float_of_bits64(bits - (k << np.int64(52)))
        s = (m - 1.0) / (m + 1.0)
        z = s * s
        p = e21
        p = p * z + e19
        p = p * z + e17
        p = p * z + e15
        p = p * z + e13
        p = p * z + e11
        p = p * z + e9
        p = p * z + e7
        p = p * z + e5
        p = p * z + e3
        return k * ln2 + (2.0 * s + s * z * p)

    return log64


@kernel
def _below_infinity(x: Any) -> bool:
    bad = False
    for i in range(x.shape[0]):
        bad |= not x[i] < math.inf
    return not bad


def array(tensor: torch.Tensor, dtype: Any = None) -> NDArray[Any]:
    """The numbers of a tensor as a contiguous array, of a numpy ``dtype`` if one is given.

    A tensor that is contiguous already gives its own memory. Others are copied by numpy: torch
    would use all its threads, which then spin for a while in the way of our kernels.
    """
    return np.require(tensor.detach().numpy(), dtype, "C")


def all_below_infinity(tensor: torch.Tensor) -> bool:
    """Whether no entry is NaN or +inf."""
    flat, size = array(tensor).reshape(-1), 1 << 14
    bad = []

    def task(low: int, high: int) -> None:
        if not _below_infinity(flat[low * size : high * size]):
            bad.append(low)

    run_chunks(task, -(-len(flat) // size), size // 8)
    return not bad


@kernel
def all_between(x: Any, low: int, high: int) -> bool:
    """Whether no number of x lies outside."""
    bad = False
    for i in range(x.shape[0]):
        bad |= x[i] < low or x[i] > high
    return not bad
