"""The loops of ``magnitude``, compiled by numba."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from structmax.jit import kernel


@kernel
def has_beyond(x: Any, limit: float) -> bool:
    """Whether a finite entry lies beyond ±limit."""
    found = False
    for i in range(x.shape[0]):
        size = abs(x[i])
        found |= (size > limit) & (size < math.inf)
    return found


@kernel
def collect(x: Any, limit: float, known: Any, low: float, top: float) -> tuple[Any, float, float]:
    """``known`` with the finite magnitudes of x above the limit, of which some may come twice, the
    largest of the others or ``low``, and the largest of all or ``top``."""
    found, used = np.empty(known.shape[0] + x.shape[0]), known.shape[0]
    found[:used] = known
    for i in range(x.shape[0]):
        size = abs(np.float64(x[i]))
        if not size < math.inf:
            continue
        top = max(top, size)
        if size <= limit:
            low = max(low, size)
            continue
        again = False
        for k in range(max(0, used - 4), used):
            again |= found[k] == size
        if not again:
            found[used] = size
            used += 1
    return found[:used].copy(), low, top


@kernel
def bring_down(old: Any, low: float, terms: float, sure: float, finest: float) -> Any:
    """Smaller magnitudes for the sorted ``old``, given the largest other one."""
    new, start = old.copy(), 0
    while start < old.shape[0] and old[start] <= 2 * terms * low + sure:
        low = old[start]  # as close as this it belongs to those that stay
        start += 1
    top = low
    while start < old.shape[0]:
        stop, gap = start + 1, math.inf
        while stop < old.shape[0] and old[stop] <= 2 * terms * old[stop - 1] + sure:
            gap = min(gap, old[stop] - old[stop - 1])
            stop += 1
        bound = 2.0 ** math.ceil(math.log2(2 * terms * top + sure))
        if gap == math.inf:
            new[start] = min(bound, old[start])
        else:
            fine = old[start] / gap
            if fine > finest:
                break
            # a power of two, so that sums that are equal stay equal
            factor = min(2.0 ** math.ceil(math.log2(bound * max(fine, 1.0) / old[start])), 1.0)
            for k in range(start, stop):
                new[k] = old[k] * factor
        top = new[stop - 1]
        start = stop
    return new


@kernel
def replace(x: Any, limit: float, old: Any, new: Any, out: Any) -> None:
    """Writes x with the magnitudes ``old``, sorted, replaced by ``new``."""
    for i in range(x.shape[0]):
        size = abs(np.float64(x[i]))
        if size > limit and size < math.inf:
            out[i] = math.copysign(new[np.searchsorted(old, size)], x[i])
