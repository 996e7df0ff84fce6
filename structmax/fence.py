"""The last validation of integers from outside, in the bodies of ops.

Lengths, goal nodes and the like may be written into after somebody validated them, in ways that
torch does not count; and under ``vmap``, ``torch.compile`` or ``validate_args=False`` they were
never validated. Only the body of an op sees the numbers that a kernel is about to index by.
Here they are clamped to what is possible, and the results of an item with an impossible one become
NaN (−1 where they are integers, or what the op says).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

Limits = Sequence[tuple[int, int] | None]
"""The least and the largest possible number of each tensor; None for one that kernels validate."""

trusted: set[int] = set()
"""The ids of tensors of the library's own, which live as long as the process."""


def clamped(integers: Sequence[Tensor], limits: Limits) -> tuple[list[Tensor], Tensor | None]:
    """Integers ``(*batch)`` within their limits, and the items that had one outside of them; None
    if there is no such item.

    >>> clamped([torch.tensor([3, 4])], [(1, 4)])
    ([tensor([3, 4])], None)
    >>> clamped([torch.tensor([3, 9, -2])], [(1, 4)])
    ([tensor([3, 4, 1])], tensor([False,  True,  True]))
    """
    safe, wrong = list(integers), None
    for i, (tensor, limit) in enumerate(zip(integers, limits, strict=True)):
        if limit is None or id(tensor) in trusted or _is_within(tensor, *limit):
            continue
        safe[i] = tensor.long().clamp(*limit).to(tensor.dtype)
        outside = safe[i] != tensor
        wrong = outside if wrong is None else wrong | outside
    return safe, wrong


def require(owner: str, name: str, integers: Tensor, low: int, high: int) -> Tensor:
    """Integers ``(*batch)`` that all lie between two numbers: else an error that names the item.
    For computations on the host, whose kernels know no NaN."""
    _, wrong = clamped([integers], [(low, high)])
    if wrong is not None and bool(wrong.any()):
        item = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"{owner}: {name} must be between {low} and {high}, got {int(integers[item])} for item "
            f"{item[0] if len(item) == 1 else item}."
        )
    return integers


def _is_within(tensor: Tensor, low: int, high: int) -> bool:
    """Whether it is known, without waiting for a device, that no number lies outside."""
    if tensor.device.type != "cpu" or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return not tensor.numel()
    flat = tensor if tensor.dim() == 1 else tensor.reshape(-1)
    return _kernel()(flat.numpy(), low, high)


@cache
def _kernel() -> Callable[..., bool]:  # on first use: importing numba takes a while
    from structmax.jit import all_between

    return all_between


def mark(result: Tensor, wrong: Tensor | None, lead: int = 0, fill: int = -1) -> Tensor:
    """A result ``(lead dimensions, *batch, ...)``, NaN for the wrong items ``(*batch)``; integers
    become ``fill``."""
    if wrong is None:
        return result
    wrong = wrong.to(result.device)[(..., *[None] * (result.dim() - lead - wrong.dim()))]
    if result.is_cuda and not lead and _may_be_overwritten(result):
        from structmax.fence_gpu import mark as mark_on_gpu

        return mark_on_gpu(result, wrong)
    return torch.where(wrong, math.nan if result.is_floating_point() else fill, result)


def _may_be_overwritten(result: Tensor) -> bool:
    """Whether it is a kernel's own output, which is not differentiated."""
    known = result.is_contiguous() and result.is_floating_point() and not result.requires_grad
    return known and not torch._C._functorch.is_functorch_wrapped_tensor(result)


def fenced(
    at: Sequence[int], limits: Callable[..., Limits], lead: int = 0, fill: int = -1
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates the body of an op, whose arguments ``at`` are integers ``(*batch)``.

    ``limits`` takes the body's arguments; results have ``lead`` dimensions before those of the
    batch.
    """

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*given: Any) -> Any:
            args = list(given)
            safe, wrong = clamped([args[i] for i in at], limits(*given))
            for i, tensor in zip(at, safe, strict=True):
                args[i] = tensor
            out = run(*args)
            if wrong is None:
                return out
            if isinstance(out, Tensor):
                return mark(out, wrong, lead, fill)
            return [mark(x, wrong, lead, fill) for x in out]

        return guarded

    return decorate
