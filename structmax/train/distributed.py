"""Workers that ``torchrun`` starts: who they are, what they tell each other.

On the CPU they speak gloo, on GPUs NCCL. One process without ``torchrun`` is one worker.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from structmax.train.errors import UserError


def choose_device(name: str) -> torch.device:
    """The device of a name: cpu, cuda, cuda:1, or auto.

    >>> choose_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device must be cpu, cuda or auto, got {name!r}.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"device {name} was asked for, but torch {torch.__version__} finds no CUDA device. "
            "Use --device cpu."
        )
    return device


@dataclass(frozen=True)
class Workers:
    """This worker among all: its number, how many there are, and its device."""

    device: torch.device
    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the worker that writes."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a tensor over the workers, in place."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value of something small, in the order of the workers."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    def wrap(self, module: nn.Module, unused: bool) -> nn.Module:
        """The module, with gradients that are averaged over the workers.

        ``unused``: some parameters may get no gradient from a batch, and have to be found each
        time.
        """
        if self.count == 1:
            return module
        return nn.parallel.DistributedDataParallel(module, find_unused_parameters=unused)


@contextmanager
def workers(device: str) -> Iterator[Workers]:
    """Join the other workers that ``torchrun`` started, if it did."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    chosen = choose_device(device)
    if count == 1:
        yield Workers(chosen)
        return
    if chosen.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise UserError(
                f"worker {local} of this machine has no GPU of its own: there are "
                f"{torch.cuda.device_count()}. Start torchrun with fewer --nproc-per-node."
            )
        chosen = torch.device("cuda", local)
        torch.cuda.set_device(chosen)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    store, rank, count = next(dist.rendezvous("env://"))
    # torchrun may keep its store when it starts workers again: addresses of the dead stay there
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count)
    try:
        yield Workers(chosen, rank, count)
    finally:
        dist.destroy_process_group()


def restarted() -> bool:
    """Whether ``torchrun`` started this worker again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
