"""Human forms of a batch: one list for each item, nested as the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def nest(items: list[Any], shape: Sequence[int]) -> Any:
    """The items as nested lists of this shape; the item itself if the shape is ().

    >>> nest(["a", "b", "c", "d"], (2, 2))
    [['a', 'b'], ['c', 'd']]
    """
    if not shape:
        return items[0]
    size = torch.Size(shape[1:]).numel()
    return [nest(items[i * size : (i + 1) * size], shape[1:]) for i in range(shape[0])]


def unnest(owner: str, obj: Any, depth: int, batch_dims: int) -> tuple[list[Any], torch.Size]:
    """The items of nested lists and the shape of the nesting: the inverse of ``nest``.

    An item is itself a list, nested ``depth`` times. An empty list does not tell how deep it would
    be: where there is one, there are at least ``batch_dims`` dimensions.

    >>> unnest("Path", [[0, 1], [0, 2, 1]], 1, 0)
    ([[0, 1], [0, 2, 1]], torch.Size([2]))
    """
    obj = _plain(obj)
    items: list[Any] = [obj]
    shape: list[int] = []
    for _ in range(max(_depth(obj) - depth, batch_dims if _has_empty(obj) else 0)):
        sizes = {len(item) if isinstance(item, list) else -1 for item in items}
        if len(sizes) != 1 or sizes == {-1}:
            raise ValueError(
                f"{owner}.encode: the lists do not nest as a batch: at depth {len(shape)} there "
                f"are lists of sizes {sorted(sizes)}."
            )
        shape.append(sizes.pop())
        items = [part for item in items for part in item]
    for item in items:
        if not _fits(item, depth):
            raise ValueError(f"{owner}.encode: expected a list nested {depth} deep, got {item!r}.")
    return items, torch.Size(shape)


def _plain(obj: Any) -> Any:
    """Lists throughout, where tensors and arrays may have been."""
    if hasattr(obj, "tolist"):
        return obj.tolist()
    return [_plain(part) for part in obj] if isinstance(obj, list | tuple) else obj


def _fits(obj: Any, depth: int) -> bool:
    if depth == 0:
        return not isinstance(obj, list)
    return isinstance(obj, list) and all(_fits(part, depth - 1) for part in obj)


def _has_empty(obj: Any) -> bool:
    return isinstance(obj, list) and (not obj or any(_has_empty(part) for part in obj))


def _depth(obj: Any) -> int:
    if not isinstance(obj, list):
        return 0
    return 1 + max((_depth(part) for part in obj), default=0)
