"""Batches on their way: cut into the workers' shares, moved to a device, written to a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structmax.data.batching import Batches
from structmax.train.config import TrainConfig


def batches_of(
    sizes: Sequence[int], config: TrainConfig, workers: int = 1, shuffle: bool = True
) -> Callable[[int], list[np.ndarray]]:
    """From an epoch to its batches of example numbers, for all workers together.

    Their order depends on the seed and the epoch alone, so a run resumes anywhere from two numbers.

    >>> epoch = batches_of([3, 1, 2, 9], TrainConfig(batch_size=4, batch_tokens=9), shuffle=False)
    >>> [batch.tolist() for batch in epoch(0)]
    [[1, 2, 0], [3]]
    """
    plan = Batches(
        sizes,
        batch_size=config.batch_size * workers,
        max_tokens=config.batch_tokens * workers or None,
        seed=config.seed,
        shuffle=shuffle,
    )
    # a batch that would leave a worker without examples is skipped
    return lambda epoch: [batch for batch in plan.epoch(epoch) if len(batch) >= workers]


def move(batch: Any, device: torch.device) -> Any:
    """The batch on a device: tensors in any nesting of dicts, lists, tuples and dataclasses.

    >>> move({"x": (torch.zeros(1), "kept")}, torch.device("meta"))
    {'x': (tensor(..., device='meta', size=(1,)), 'kept')}
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(move(value, device) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **move(fields, device))
    return batch


def tensors(batch: Any, name: str = "batch") -> dict[str, Tensor]:
    """The tensors of a batch by their place in it.

    >>> sorted(tensors({"x": (torch.zeros(2), torch.ones(2))}))
    ['batch.x.0', 'batch.x.1']
    """
    if isinstance(batch, Tensor):
        return {name: batch}
    inside: dict[Any, Any] = {}
    if isinstance(batch, dict):
        inside = batch
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        inside = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    elif isinstance(batch, (list, tuple)):
        inside = dict(zip(getattr(batch, "_fields", range(len(batch))), batch))
    found: dict[str, Tensor] = {}
    for key, value in inside.items():
        found.update(tensors(value, f"{name}.{key}"))
    return found
