"""The children of binary trees, from transitions, merges or spans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structmax.primitive import on_host

SHIFT, REDUCE = 0, 1

Forms = tuple[np.ndarray, np.ndarray]
"""Children ``(B, n−1, 2)`` and lengths ``(B)``, as :class:`structmax.data.Trees` has them."""


def from_transitions(actions: Any, lengths: Any = None) -> Forms:
    """See :meth:`structmax.data.Trees.from_transitions`."""
    actions, lengths = _integers(actions, lengths, lambda steps: (steps + 1) // 2)
    b, n, at = len(actions), max((actions.shape[1] + 1) // 2, 1), np.arange(len(actions))
    _check_lengths(lengths, n)
    actions = np.pad(
        actions, ((0, 0), (0, max(2 * n - 1 - actions.shape[1], 0))), constant_values=-1
    )
    stack, top = np.zeros((b, n + 2), np.int64), np.zeros(b, np.int64)
    children, read, done = np.full((b, n, 2), -1), np.zeros(b, np.int64), np.zeros(b, np.int64)
    for t in range(2 * n - 1):
        shift = (live := t < 2 * lengths - 1) & (actions[:, t] == SHIFT)
        reduce = live & (actions[:, t] == REDUCE)
        bad = live & ~((shift & (read < lengths)) | (reduce & (top >= 2)))
        _refuse("transitions", bad, actions[:, t], t, "with {} on the stack", top)
        left, right = stack[at, np.maximum(top - 2, 0)], stack[at, np.maximum(top - 1, 0)]
        children[at[reduce], done[reduce]] = np.stack([left, right], -1)[reduce]
        top += shift.astype(np.int64) - reduce
        stack[at[shift], top[shift] - 1] = read[shift]
        stack[at[reduce], top[reduce] - 1] = n + done[reduce]
        read, done = read + shift, done + reduce
    return children[:, : n - 1], lengths


def from_merges(positions: Any, lengths: Any = None) -> Forms:
    """See :meth:`structmax.data.Trees.from_merges`."""
    positions, lengths = _integers(positions, lengths, lambda steps: steps + 1)
    b, n, at = len(positions), positions.shape[1] + 1, np.arange(len(positions))
    _check_lengths(lengths, n)
    row = np.tile(np.arange(n + 1), (b, 1))  # what is left, the last entry a guard
    children = np.full((b, n - 1, 2), -1)
    for t in range(n - 1):
        live, j = t < lengths - 1, positions[:, t]
        bad = live & ((j < 0) | (j > lengths - t - 2))
        _refuse("merges", bad, j, t, "with {} subtrees left", lengths - t)
        j = np.where(live, j, n)
        children[live, t] = np.stack([row[at, j], row[at, np.minimum(j + 1, n)]], -1)[live]
        later = np.roll(row, -1, 1)
        row = np.where(np.arange(n + 1) <= j[:, None], row, later)
        row[at[live], j[live]] = n + t
    return children, lengths


def from_spans(spans: Any, lengths: Any) -> Forms:
    """See :meth:`structmax.data.Trees.from_spans`."""
    spans, lengths = array(spans) > 0.5, array(lengths).astype(np.int64)
    b, n, inner = len(spans), spans.shape[1], np.triu(spans, 1)
    _check_lengths(lengths, n)
    at = np.arange(n)
    inner = inner & (at < lengths[:, None, None])
    # children before parents: by right end, then from the narrowest
    item, j, back = np.nonzero(inner.transpose(0, 2, 1)[:, :, ::-1])
    i = n - 1 - back
    first = np.concatenate([[0], np.cumsum(np.bincount(item, minlength=b))])
    rank = np.arange(len(item)) - first[item]
    name = np.full((b, n, n), -1)
    name[:, at, at] = at
    name[item, i, j] = n + rank
    # [i, j] splits after the longest of its prefixes that is a span
    ends = np.maximum.accumulate(np.where(name >= 0, at, -1), 2)
    k = ends[item, i, j - 1]
    left, right = name[item, i, k], name[item, k + 1, j]
    bad = first[1:] - first[:-1] != lengths - 1
    bad[item[right < 0]] = True
    bad |= (lengths > 1) & ~inner[np.arange(b), 0, lengths - 1]
    if bad.any():
        which = int(bad.nonzero()[0][0])
        found = list(zip(i[item == which].tolist(), j[item == which].tolist()))
        raise ValueError(
            f"Trees: the spans of item {which} are no binary tree over {lengths[which]} "
            f"leaves, which has {lengths[which] - 1} inner spans that do not cross; got {found}."
        )
    children = np.full((b, max(n - 1, 0), 2), -1)
    children[item, rank] = np.stack([left, right], -1)
    return children, lengths


def array(given: Any) -> np.ndarray:
    """Tensors, lists and arrays as arrays."""
    if isinstance(given, Tensor):
        return on_host(given.float() if given.dtype == torch.bfloat16 else given)  # numpy has none
    return np.asarray(given)


def _integers(given: Any, lengths: Any, length_of: Callable[[Any], Any]) -> Forms:
    """Steps ``(B, steps)`` padded with −1, and lengths, from integers, lists or one-hot rows."""
    if isinstance(given, list | tuple) and len({len(row) for row in given}) > 1:
        given = [
            row.tolist() if isinstance(row, Tensor) and row.dim() == 1 else row for row in given
        ]
    if isinstance(given, list | tuple) and not any(isinstance(row, Tensor) for row in given):
        sizes = np.array([len(row) for row in given], np.int64)
        steps = np.full((len(given), int(sizes.max(initial=0))), -1)
        for row, values in zip(steps, given):
            row[: len(values)] = values
        return steps, length_of(sizes) if lengths is None else array(lengths).astype(np.int64)
    steps = array(given)
    if steps.ndim == 3:
        found = steps.max(2, initial=0) > 0
        steps = np.where(found, steps.argmax(2) if steps.size else 0, -1)
    elif not np.issubdtype(steps.dtype, np.integer) and steps.size:
        raise ValueError(f"Trees: steps must be integers or one-hot rows, got {steps.dtype}.")
    if lengths is None:
        lengths = length_of((steps >= 0).sum(1))
    return steps.astype(np.int64), array(lengths).astype(np.int64)


def _check_lengths(lengths: np.ndarray, n: int) -> None:
    bad = (lengths < 1) | (lengths > n)
    if bad.any():
        item = int(bad.nonzero()[0][0])
        raise ValueError(
            f"Trees: lengths must be between 1 and {n}, got {lengths[item]} for item {item}."
        )


def _refuse(
    form: str, bad: np.ndarray, steps: np.ndarray, t: int, where: str, left: np.ndarray
) -> None:
    if bad.any():
        item = int(bad.nonzero()[0][0])
        raise ValueError(
            f"Trees: step {t} of the {form} of item {item} cannot be {steps[item]}, "
            f"{where.format(left[item])}."
        )
