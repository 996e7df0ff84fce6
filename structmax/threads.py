"""Threads for the CPU kernels, which are serial and release the GIL.

The threads are torch's own where it uses GNU OpenMP: after each of torch's parallel operations its
workers stay awake for milliseconds, and threads of ours would share the processors with them (a
kernel took 1.7 times as long). There is a pool of ours for elsewhere; for a forked process, where
OpenMP hangs; and for a crowded machine, where OpenMP waits at the end of a call for a worker that
was never given a processor. (Numba's ``prange`` changes torch's thread count and aborts after a
fork.)
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from time import perf_counter
from typing import Any

import torch

_Region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_pool: ThreadPoolExecutor | None = None
_pool_size = 0
_lock = threading.Lock()
_forked = False
_crowded_until = 0.0  # in seconds of perf_counter


def _after_fork() -> None:
    """In the child the pool's threads are gone and the lock may be held: start afresh."""
    global _pool, _lock, _forked
    _pool, _lock, _forked = None, threading.Lock(), True


os.register_at_fork(after_in_child=_after_fork)


@cache
def _openmp() -> Any:
    """``GOMP_parallel(function, data, threads, flags)`` of the OpenMP that torch uses, or None."""
    try:
        with open("/proc/self/maps") as maps:
            loaded = {line.split(maxsplit=5)[-1].strip() for line in maps if "libgomp" in line}
    except OSError:
        return None
    own = {path for path in loaded if path.startswith(os.path.dirname(torch.__file__))}
    found = own or loaded
    if len(found) != 1:
        return None
    try:
        parallel = ctypes.CDLL(found.pop()).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [_Region, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


CROWDED_WAIT = 5e-4  # a call that ends so much later than its last chunk means a crowded machine
CROWDED_TIME = 1.0

# Below this many elementary steps a call runs in the calling thread: waking another costs more.
SERIAL_WORK = 30_000


def run_chunks(task: Callable[[int, int], None], items: int, work: int, grain: int = 1) -> None:
    """Runs ``task(low, high)`` over chunks of ``range(items)``, in parallel where it pays.

    ``work`` is the cost of one item in elementary steps; chunks hold at most ``grain`` items if
    that is above 1 (kernels that lay items out side by side), and no task may wait for another.
    """
    global _crowded_until
    threads = 1 if items * work < SERIAL_WORK else torch.get_num_threads()
    size = max(1, -(-items // threads))
    size = min(size, grain) if grain > 1 else min(size, max(1, items // (4 * threads)))
    chunks = [(low, min(low + size, items)) for low in range(0, items, size)]
    if threads == 1 or len(chunks) <= 1:
        for low, high in chunks:
            task(low, high)
        return
    turns, errors, ended = itertools.count(), [], 0.0

    def take_turns(_: Any = None) -> None:
        nonlocal ended
        try:
            while (turn := next(turns)) < len(chunks):
                task(*chunks[turn])
                ended = perf_counter()
        except BaseException as error:  # nothing may be raised through OpenMP's frames
            errors.append(error)

    parallel = None if _forked or perf_counter() < _crowded_until else _openmp()
    if parallel is None:
        _run_on_pool(take_turns, threads, len(chunks))
    else:
        parallel(_Region(take_turns), None, min(threads, len(chunks)), 0)
        if perf_counter() - ended > CROWDED_WAIT:
            _crowded_until = perf_counter() + CROWDED_TIME
    if errors:
        raise errors[0]


def _run_on_pool(take_turns: Callable[[], None], threads: int, chunks: int) -> None:
    global _pool, _pool_size
    with _lock:
        if _pool is None or _pool_size != threads:
            _pool = ThreadPoolExecutor(threads, thread_name_prefix="structmax")
            _pool_size = threads
        helpers = [_pool.submit(take_turns) for _ in range(min(threads, chunks) - 1)]
    take_turns()
    for helper in helpers:
        if not helper.cancel():  # one that never started is not waited for
            helper.result()
