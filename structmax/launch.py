"""Launching a Triton kernel without looking at every argument again.

At each launch Triton binds, types and hashes all arguments to find what it compiled for them, which
takes longer than a small kernel runs. Here that is kept under what decides it: the numbers and, of
a tensor, its dtype and whether its address is a multiple of 16.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

MOST = 1024  # launches a kernel keeps; numbers that always change would fill the memory
SINCE = (3, 6)  # older versions of Triton want compiled kernels launched in other ways


def quick(kernel: Any) -> Any:
    """A kernel that ``kernel[grid](…)`` launches sooner; one that is interpreted stays as it is.

    Every parameter has to be given: there are no defaults.
    """
    version = tuple(int(n) for n in triton.__version__.split(".")[:2])
    # on AMD a tensor's size decides too
    able = isinstance(kernel, triton.JITFunction) and torch.version.hip is None
    return Quick(kernel) if able and version >= SINCE else kernel


class Quick:
    """A kernel, with what Triton compiled for each kind of arguments that it was launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = self.__wrapped__ = kernel
        self.kept: dict[tuple[Any, ...], tuple[Any, list[int]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> partial[None]:
        return partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        key: list[Any] = [torch.cuda.current_device(), len(args), *named]
        values: list[Any] = []
        for value in (*args, *named.values()):
            if isinstance(value, Tensor):
                address = value.data_ptr()
                key += value.dtype, address % 16 == 0
                values.append(address)
            else:
                key += type(value), value  # since 1 == 1.0 == True
                values.append(value)
        found = self.kept.get(tuple(key))
        if found is not None:
            compiled, order = found
            compiled[(*grid, 1, 1)[:3]](*values[: len(args)], *[values[i] for i in order])
            return
        compiled = self.kernel[grid](*args, **named)
        place = {name: i for i, name in enumerate(named, len(args))}
        if len(self.kept) >= MOST:
            self.kept.clear()
        order = [place[name] for name in self.kernel.arg_names[len(args) :]]
        self.kept[tuple(key)] = compiled, order
