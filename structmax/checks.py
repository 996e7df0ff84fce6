"""Validation: every error says what is wrong, which item, and how to fix it.

Values are read with one reduction per tensor and one synchronisation in all; only if that finds
something is the offending item searched for. Nothing is read while compiling or capturing a CUDA
graph. What a structure has validated it remembers in a ``Record``.
"""

from __future__ import annotations

import math
import operator
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structmax.tracing import has_values, is_recorded

Mask = Tensor | Callable[[], Tensor] | None


def can_look(*tensors: Tensor) -> bool:
    """Whether values, those of these tensors, may be read on the host now."""
    if is_repeated() or torch._C._are_functorch_transforms_active():
        return False
    return has_values(*tensors) and not any(is_transformed(t) for t in tensors)


def is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor belongs to a transform of ``torch.func``, which may have ended since."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_repeated() -> bool:
    """Whether what is computed now may be computed again, from other values: it is recorded, by a
    CUDA graph perhaps."""
    if is_recorded():
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Record:
    """The tensors whose values were validated, each with its version at that time.

    torch counts the writes into a tensor, so that a tensor of another version has to be validated
    again. It counts none of those into an inference tensor, which is therefore never recorded, and
    none that go round it (``.data``, numpy): integers on the CPU, which are few, are compared with
    those that were validated. Copies and pickles are empty.

    >>> scores, record = torch.zeros(2), Record()
    >>> record.add([scores])
    >>> record.covers([scores])
    True
    >>> record.covers([scores.add_(1)])
    False
    >>> lengths = torch.tensor([3])
    >>> record.add([lengths])
    >>> lengths.data.add_(1)
    tensor([4])
    >>> record.covers([lengths])
    False
    """

    def __init__(self) -> None:
        self._states: dict[int, tuple[Tensor, int, bytes | None]] = {}

    def covers(self, tensors: Iterable[Tensor]) -> bool:
        """Whether all of these tensors were validated and none was written into since."""
        for tensor in tensors:
            known, version, numbers = self._states.get(id(tensor), (None, 0, None))
            if known is not tensor or tensor._version != version:
                return False
            if numbers is not None and _numbers(tensor) not in (numbers, None):
                return False
        return True

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Records that these tensors were validated."""
        for tensor in tensors:
            if not tensor.is_inference():
                self._states[id(tensor)] = tensor, tensor._version, _numbers(tensor)

    def is_stale(self) -> bool:
        """Whether somebody wrote into one of the tensors since."""
        return not self.covers([tensor for tensor, _, _ in self._states.values()])

    def __reduce__(self) -> Any:
        return Record, ()


def _numbers(tensor: Tensor) -> bytes | None:
    """The numbers of an integer tensor; None if it is none, or would have to be waited for."""
    if tensor.device.type != "cpu" or tensor.is_floating_point() or type(tensor) is not Tensor:
        return None
    if is_transformed(tensor) or torch._C._len_torch_dispatch_stack():
        return None
    try:
        return tensor.numpy().tobytes()
    except RuntimeError:  # it has no memory of its own: a transform that made it has ended
        return None


class Derived:
    """A value that is derived from tensors, again once somebody wrote into them.

    >>> sizes, largest = torch.tensor([2, 3]), Derived()
    >>> largest.get([sizes], lambda: int(sizes.amax()))
    3
    >>> largest.get([sizes.add_(1)], lambda: int(sizes.amax()))
    4
    """

    def __init__(self) -> None:
        self._found: tuple[Record, Any] | None = None

    def get(self, tensors: Sequence[Tensor], derive: Callable[[], Any]) -> Any:
        """The value, which ``derive`` finds."""
        if is_repeated():
            return derive()
        if self._found is not None and self._found[0].covers(tensors):
            return self._found[1]
        record = Record()
        record.add(tensors)
        with torch.inference_mode(False):  # what is stored may be wanted outside of it
            value = derive()
        if not torch._C._are_functorch_transforms_active():
            self._found = record, value
        return value

    def __reduce__(self) -> Any:
        return Derived, ()


class Integers(NamedTuple):
    """An integer tensor of a structure, and which of its entries are impossible."""

    tensor: Tensor
    wrong: Tensor
    """Bool, of at least as many dimensions as the tensor, which broadcasts to it."""
    limits: tuple[int, int] = (0, 0)
    """The least and the largest of them that are possible: written out in the error only, since
    text would make sizes that torch.export keeps as symbols constants."""
    dims: int = 0
    """How many of the last dimensions are none of the batch."""
    but: str = ""
    """What else they must be, after the range."""
    error: str = ""
    """Another error, in which ``{got}`` stands for the entry and ``{where}`` for its place."""


def between(tensor: Tensor, low: int, high: int) -> Integers:
    """Integers ``(*B)`` of which none may be less than ``low`` or more than ``high``."""
    return Integers(tensor, (tensor < low) | (tensor > high), (low, high))


def number(owner: str, name: str, value: object, hint: str = "") -> float:
    """A Python number. A tensor that asks for a gradient is refused: there would be none."""
    if isinstance(value, Tensor) and value.requires_grad:
        raise ValueError(
            f"{owner}: {name} is a tensor that asks for a gradient, but there is none with respect "
            f"to {name}.{hint} Without a gradient: float({name})."
        )
    try:
        found = math.nan if isinstance(value, str) else float(value)  # type: ignore[arg-type]
        if found == found:
            return found
    except (TypeError, ValueError, RuntimeError):
        pass
    raise ValueError(f"{owner}: {name} must be a number, got {value!r}.")


def index(owner: str, name: str, value: object) -> int:
    """A whole number, also one of numpy or a tensor of one; no bool."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise ValueError(f"{owner}: {name} must be a whole number, got {value!r}.")


def holds_integers(given: object) -> bool:
    """Whether it is a tensor of integers; bool is none."""
    if not isinstance(given, Tensor) or given.dtype == torch.bool:
        return False
    return not given.is_floating_point() and not given.is_complex()


def as_tensor(owner: str, name: str, given: object, device: torch.device) -> Tensor:
    """A tensor of what is one, or of numbers in lists."""
    try:
        return torch.as_tensor(given, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"{owner}: {name} must be a tensor or lists of numbers, got {reprlib.repr(given)}."
        ) from None


def sample_shape(owner: str, shape: Sequence[int]) -> torch.Size:
    """The shape of samples."""
    if isinstance(shape, int):
        raise ValueError(
            f"{owner}.sample: the shape must be a tuple, got {shape}. For {shape} samples: "
            f"sample(({shape},))."
        )
    if any(n < 0 for n in shape):
        raise ValueError(f"{owner}.sample: the shape must not be negative, got {tuple(shape)}.")
    return torch.Size(shape)


def scores(owner: str, name: str, tensor: Tensor, dims: int, shape: str) -> None:
    """A floating-point tensor with at least ``dims`` dimensions, none of its last ones empty."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{owner}: {name} must be a tensor, got {type(tensor).__name__}.")
    if not tensor.is_floating_point():
        raise ValueError(
            f"{owner}: {name} must be floating point, got {tensor.dtype}. Use {name}.float()."
        )
    if tensor.dim() < dims or 0 in tensor.shape[tensor.dim() - dims :]:
        raise ValueError(f"{owner}: {name} must be {shape}, got {tuple(tensor.shape)}.")


def same_device(owner: str, **tensors: Tensor | None) -> None:
    """All tensors on the device of the first."""
    (first, anchor), *rest = ((k, t) for k, t in tensors.items() if t is not None)
    for name, tensor in rest:
        if tensor.device != anchor.device:
            raise ValueError(
                f"{owner}: {name} is on {tensor.device} but {first} is on {anchor.device}. "
                f"Use {name}.to({first}.device)."
            )


def batch_shape(owner: str, **tensors: tuple[Tensor | None, int]) -> torch.Size:
    """The broadcast batch shape of tensors given with their event dimensions."""
    shapes = {k: t.shape[: t.dim() - d] for k, (t, d) in tensors.items() if t is not None}
    longest = torch.Size(())
    for shape in shapes.values():  # max with a key is more than torch.compile traces
        longest = shape if len(shape) > len(longest) else longest
    if all(len(shape) == 0 or shape == longest for shape in shapes.values()):
        return longest  # by far the most common case, and broadcast_shapes is slow
    try:
        return torch.broadcast_shapes(*shapes.values())
    except RuntimeError:
        listed = ", ".join(f"{k} {tuple(s)}" for k, s in shapes.items())
        raise ValueError(f"{owner}: batch shapes do not broadcast: {listed}.") from None


def lengths(owner: str, given: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """Lengths as an integer tensor."""
    # as_tensor would move a tensor to torch's default device
    tensor = given if isinstance(given, Tensor) else torch.as_tensor(given, device=device)
    if not holds_integers(tensor):
        raise ValueError(f"{owner}: lengths must be integers, got {tensor.dtype}.")
    return tensor


def values(
    owner: str,
    scores: Mapping[str, tuple[Tensor, Mask]],
    integers: Mapping[str, Integers] | None = None,
) -> None:
    """No impossible integers, and no NaN or +inf among the scores.

    Each score comes with a boolean mask, which broadcasts to it, of what is validated, or with what
    makes one if need be (None: all of it): padding may hold anything.
    """
    integers = integers or {}
    scores = {name: (t.detach(), mask) for name, (t, mask) in scores.items() if t.numel()}
    flags = [_may_be_bad(tensor) for tensor, _ in scores.values()]
    flags += [given.wrong.any() for given in integers.values()]
    tensors = [f for f in flags if isinstance(f, Tensor) and f.device.type != "cpu"]
    if not (bool(torch.stack(tensors).any()) if len(tensors) > 1 else any(flags)):
        return
    for name, given in integers.items():
        if bool(given.wrong.any()):
            _refuse_integer(owner, name, given)
    for name, (tensor, mask) in scores.items():
        bad = ~(tensor < torch.inf)
        mask = mask() if callable(mask) else mask
        if mask is not None:
            bad = (bad & mask).long().sum_to_size(tensor.shape) > 0
        if bool(bad.any()):
            where = tuple(bad.nonzero()[0].tolist())
            raise ValueError(
                f"{owner}: {name}{list(where)} is {tensor[where].item()}. Scores must be finite, "
                "or -inf to forbid a part; look for an overflow or a NaN in what computes them."
            )


def _refuse_integer(owner: str, name: str, given: Integers) -> None:
    """An error for the first impossible integer of those by this name."""
    where = tuple(given.wrong.nonzero()[0].tolist())
    got = int(given.tensor.expand(given.wrong.shape)[where])
    if given.error:
        raise ValueError(f"{owner}: {given.error.format(got=got, where=list(where))}")
    place = f" for item {_show(where)}" if where else ""
    if given.dims:
        place = f" at {name}{list(where)}"
    low, high = given.limits
    raise ValueError(
        f"{owner}: {name} must be between {low} and {high}{given.but}, got {got}{place}."
    )


def _may_be_bad(tensor: Tensor) -> Tensor | bool:
    """Whether there is a NaN or +inf anywhere, padding included."""
    if tensor.device.type != "cpu":
        return ~(tensor.amax() < torch.inf)
    if tensor.numel() >= 1 << 15 and tensor.dtype.itemsize >= 4:
        # torch would use its own threads, which then spin for a while in the way of our kernels
        from structmax.jit import all_below_infinity

        return not all_below_infinity(tensor)
    return not tensor.amax().item() < math.inf


def feasible(
    owner: str, query: str, value: Tensor, why: Callable[[tuple[int, ...]], str] | None = None
) -> None:
    """Every item has a structure, of which scores are numbers: no value is −inf or NaN.

    ``why`` knows of an item without one what is wrong and how to fix it, or says "".
    """
    if not value.numel() or not can_look(value) or value.amin().item() > -torch.inf:
        return
    none = value == -torch.inf
    if bool(none.any()):
        item = tuple(none.nonzero()[0].tolist())
        where = f"item {_show(item)}" if item else "the item"
        usual = "every one has a part that is forbidden (-inf). Forbid less, or drop the item."
        reason = (why(item) if why else "") or usual
        raise ValueError(f"{owner}.{query}: {where} allows no structure: {reason}")
    item = tuple(value.isnan().nonzero()[0].tolist())
    where = f"item {_show(item)} has" if item else "there is"
    raise ValueError(
        f"{owner}.{query}: {where} a score that is NaN or +inf. Look for an overflow or a NaN in "
        "what computes the scores, or what is added to them."
    )


def room(owner: str, what: str, size: int, device: torch.device | None = None) -> None:
    """So many bytes are not more than the device has, CPU by default: else an error that says so,
    before the machine is brought to its knees."""
    if size <= SMALL:
        return
    there = memory_of(device or torch.device("cpu"))
    if size > there:
        raise MemoryError(
            f"{owner}: {what} would need at least {_gib(size)}, and {device or 'this machine'} has "
            f"{_gib(there)}. Shorten the items, split the batch, or use a dtype of fewer bytes."
        )


SMALL = 1 << 28  # bytes that need no thought


@lru_cache
def memory_of(device: torch.device) -> int:
    """All memory of a device, in bytes, or what this process may have of it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    try:
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # as on Windows
        return 1 << 62
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return whole
    return min(whole, int(limit)) if limit.isdigit() else whole


def _gib(size: int) -> str:
    return f"{size / (1 << 30):,.1f} GiB"


def _show(item: tuple[int, ...]) -> str:
    return str(item[0]) if len(item) == 1 else str(item)
