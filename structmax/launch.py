"""Launching Triton kernels without looking at every argument again.

At each launch Triton binds, types and hashes all arguments to find what it compiled for them, which
takes longer than a small kernel runs. Here that is kept under what decides it: the numbers and, of
a tensor, its dtype and whether its address is a multiple of 16. ``Repeated`` keeps all launches of
a function under a key that its caller knows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
import triton
from torch import Tensor

MOST = 1024  # launches a kernel keeps; numbers that always change would fill the memory
SINCE = (3, 6)  # older versions of Triton want compiled kernels launched in other ways
ALIGNED = 16  # bytes


class _Notes(threading.local):
    """The launches of this thread, while they are written down: what was compiled, grid, arguments
    in the order of the parameters."""

    launches: list[tuple[Any, tuple[int, ...], list[Any]]] | None = None


_notes = _Notes()


def quick(kernel: Any) -> Any:
    """A kernel that ``kernel[grid](…)`` launches sooner; one that is interpreted stays as it is.

    Every parameter has to be given: there are no defaults.
    """
    return Quick(kernel) if isinstance(kernel, triton.JITFunction) and _can_keep() else kernel


def repeated(function: Callable[..., None]) -> Callable[..., None]:
    """A function of tensors that does nothing but launch ``quick`` kernels on them, to be called as
    ``function(key, *tensors)``.

    The key has to decide the grids and numbers of the launches, and all dtypes. Under a key that
    was seen before, the launches of that time are repeated with these tensors.
    """
    if _can_keep() and not triton.knobs.runtime.interpret:
        return Repeated(function)
    return lambda key, *tensors: function(*tensors)


def _can_keep() -> bool:
    version = tuple(int(n) for n in triton.__version__.split(".")[:2])
    return torch.version.hip is None and version >= SINCE  # on AMD a tensor's size decides too


class Quick:
    """A kernel, with what Triton compiled for each kind of arguments that it was launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = self.__wrapped__ = kernel
        self.kept: dict[tuple[Any, ...], tuple[Any, list[int]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> partial[None]:
        return partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        device = torch.cuda.current_device()
        given = (*args, *named.values())
        key = [device, *named, *map(type, given)]  # types, since 1 == 1.0 == True
        values: list[Any] = []
        for value in given:
            if isinstance(value, Tensor):
                address = value.data_ptr()
                values.append(address)
                key.append(value.dtype)
                key.append(address % ALIGNED == 0)
            else:
                values.append(value)
                key.append(value)
        whole, found = (*grid, 1, 1)[:3], self.kept.get(tuple(key))
        if found is not None:
            compiled, order = found
            stream = torch._C._cuda_getCurrentRawStream(device)
            compiled[whole](*[values[i] for i in order], stream=stream)
        else:
            compiled = self.kernel[grid](*args, **named)
            place = {name: i for i, name in enumerate(named, len(args))}
            order = [*range(len(args)), *[place[n] for n in self.kernel.arg_names[len(args) :]]]
            _keep(self.kept, tuple(key), (compiled, order))
        if _notes.launches is not None:
            _notes.launches.append((compiled, whole, [given[i] for i in order]))


class Repeated:
    """A function that launches kernels, with its launches under each key."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = self.__wrapped__ = function
        self.kept: dict[Hashable, list[tuple[Any, list[Any], list[tuple[int, int]]]]] = {}

    def __call__(self, key: Hashable, *tensors: Tensor) -> None:
        device, addresses = torch.cuda.current_device(), [t.data_ptr() for t in tensors]
        if reduce(or_, addresses) % ALIGNED:  # which is rare, and compiled otherwise
            self.function(*tensors)
            return
        found = self.kept.get((device, key))
        if found is None:
            self._note((device, key), tensors)
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        for run, template, places in found:
            values = template.copy()
            for i, which in places:
                values[i] = addresses[which]
            run(*values, stream=stream)

    def _note(self, key: Hashable, tensors: Sequence[Tensor]) -> None:
        """The first time."""
        _notes.launches = []
        try:
            self.function(*tensors)
            seen = _notes.launches
        finally:
            _notes.launches = None
        launches = []
        for compiled, grid, args in seen:
            places = [(i, _place(arg, tensors)) for i, arg in enumerate(args) if _is_tensor(arg)]
            template = [None if _is_tensor(arg) else arg for arg in args]  # keep no tensor alive
            launches.append((compiled[grid], template, places))
        _keep(self.kept, key, launches)


def _is_tensor(arg: Any) -> bool:
    return isinstance(arg, Tensor)


def _place(arg: Tensor, tensors: Sequence[Tensor]) -> int:
    return next(k for k, tensor in enumerate(tensors) if tensor is arg)


def _keep(kept: dict[Any, Any], key: Hashable, value: Any) -> None:
    if len(kept) >= MOST:
        kept.clear()
    kept[key] = value
