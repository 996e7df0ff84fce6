"""A task's measures over a split, by all workers together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import nn

from structmax.train import batches
from structmax.train.config import TrainConfig
from structmax.train.distributed import Workers
from structmax.train.metrics import Ratio
from structmax.train.task import Measures, Task


def measure(
    task: Task, model: nn.Module, examples: Sequence[Any], config: TrainConfig, workers: Workers
) -> dict[str, float]:
    """``task.evaluate`` over some examples; the random numbers of training are not touched."""
    sizes = [task.size(example) for example in examples]
    mine = batches.batches_of(sizes, config, shuffle=False)(0)[workers.rank :: workers.count]
    device = workers.device
    model.eval()
    with (
        torch.no_grad(),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.autocast(device.type, torch.bfloat16, enabled=config.amp),
    ):
        torch.manual_seed(config.seed)
        found = task.evaluate(
            model, (batches.move(task.collate([examples[i] for i in b]), device) for b in mine)
        )
    return together(found, sum(map(len, mine)), workers)


def together(found: Measures, count: int, workers: Workers) -> dict[str, float]:
    """The measures of all workers, each of which looked at ``count`` examples.

    >>> together({"accuracy": Ratio(3, 4), "depth": 2.0}, 4, Workers(torch.device("cpu")))
    {'accuracy': 0.75, 'depth': 2.0}
    """
    sums = {
        k: Ratio(v * count, count) if isinstance(v, float | int) else v for k, v in found.items()
    }
    everyone = workers.gather(sums)
    names = dict.fromkeys(name for one in everyone for name in one)
    return {
        name: reduce(add, (one[name] for one in everyone if name in one)).value for name in names
    }
