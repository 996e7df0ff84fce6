"""What records computations instead of only running them, and what that forbids.

``torch.compile``, ``torch.export``, ``torch.jit.trace`` and ``make_fx`` record operations;
``FakeTensorMode`` and meta tensors stand in for results. Every op must then go through torch's
dispatcher, and no value may be read.

``torch.jit.trace``, on which ``torch.onnx.export(dynamo=False)`` builds, runs the code with real
values. It records operations, but nothing of a computation in numpy, and a Python function (one of
autograd too) only for this process. Sizes that Python reads become constants: a trace that met a
structure refuses tensors of other shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_library = torch.library.Library("structmax", "FRAGMENT")


def is_tracing() -> bool:
    """Whether ``torch.jit.trace`` records."""
    return not torch.compiler.is_compiling() and torch._C._is_tracing()


def is_recorded() -> bool:
    """Whether anything of the above records or stands in for operations now."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return True
    if not torch._C._len_torch_dispatch_stack():
        return False
    mode, key = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey
    return mode(key.FAKE) is not None or mode(key.PROXY) is not None


def has_values(*tensors: Tensor) -> bool:
    """Whether these tensors have values, which meta tensors and fake ones have not."""
    return not any(t.is_meta or isinstance(t, FakeTensor) for t in tensors)


def refuse_trace(
    what: str, instead: str = "Trace what computes the scores, and call this on the result."
) -> None:
    """An error under ``torch.jit.trace``, for what runs Python code that depends on values."""
    if is_tracing():
        raise RuntimeError(
            f"{what} cannot be traced by torch.jit.trace (or by torch.onnx.export with "
            "dynamo=False): it reads values or runs Python code, of which a trace keeps only the "
            f"results. {instead}"
        )


def refuse_without_values(what: str, *tensors: Tensor) -> None:
    """An error under ``torch.jit.trace``, and on meta and fake tensors, for what reads values."""
    refuse_trace(what)
    if not has_values(*tensors):
        raise RuntimeError(
            f"{what} reads values, which meta tensors and fake tensors have not. Give it real ones."
        )


@contextmanager
def paused() -> Iterator[None]:
    """Sizes are plain numbers in here: ``torch.jit.trace`` makes them tensors."""
    set_state: Any = torch._C._set_tracing_state  # type: ignore[attr-defined]
    state = torch._C._get_tracing_state()
    set_state(None)
    try:
        yield
    finally:
        set_state(state)


def fix_sizes(owner: str, tensors: Mapping[str, Tensor]) -> None:
    """Under ``torch.jit.trace``: records that these tensors have the shapes and dtypes they have
    now, so that the trace refuses others instead of answering with constants of these."""
    for name, tensor in tensors.items():
        with paused():
            shape = list(tensor.shape)
        _fixed(tensor, shape, str(tensor.dtype), owner, name)


def _run_fixed(tensor: Tensor, shape: Sequence[int], dtype: str, owner: str, name: str) -> None:
    if list(tensor.shape) != list(shape) or str(tensor.dtype) != dtype:
        raise ValueError(
            f"{owner}: traced by torch.jit.trace with {name} {tuple(shape)} of {dtype}, got "
            f"{tuple(tensor.shape)} of {tensor.dtype}. A trace keeps sizes as constants: trace "
            "again, or use torch.export, where sizes can be dynamic."
        )


_library.define(
    "fixed_sizes(Tensor tensor, int[] shape, str dtype, str owner, str name) -> ()", "CONSERVATIVE"
)
_library.impl("fixed_sizes", _run_fixed, "CompositeExplicitAutograd")
torch.library.register_fake("structmax::fixed_sizes", lambda *args: None, lib=_library)
_fixed = torch.ops.structmax.fixed_sizes.default
