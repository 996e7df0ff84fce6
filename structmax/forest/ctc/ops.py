"""Connectionist temporal classification as a differentiable torch function, under Shannon.

Score: ``theta (*batch, T, V)``; constants: ``targets (*batch, S)``, ``frames, count (*batch)``, as
in ``naive``. They may hold anything: an item with an impossible length or symbol becomes NaN. The
key is the blank, or nothing for 0. The kernels of the GPU know ``fits`` only.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

from torch import Tensor

from structmax.forest.ctc import naive
from structmax.primitive import Omega, Primitive, Tensors, backend_for, flatten_batch

MOST_ON_GPU = 1023  # symbols of a target; of more, states do not fit into a program's registers


def fits(scores: Tensor, targets: Tensor) -> bool:
    """Whether there is a kernel for these."""
    name = backend_for(scores)
    return name == "cpu" or (name == "gpu" and targets.shape[-1] <= MOST_ON_GPU)


def _engine(theta: Tensor) -> ModuleType:
    return _module(backend_for(theta))


@cache
def _module(backend: str) -> ModuleType:  # on first use: importing numba takes a while
    return importlib.import_module(f"structmax.forest.ctc.{backend}")


def _blank(key: str) -> int:
    return int(key) if key else 0


def _naive(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> Tensor:
    targets, frames, count = constants
    return naive.value(scores[0], targets, frames, count, _blank(key), omega[1])


def _value(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> Tensor:
    return _engine(scores[0]).value(scores[0], constants, _blank(key), omega[1])


def _gradient(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> list[Tensor]:
    return _engine(scores[0]).gradient(scores[0], constants, _blank(key), omega[1])


def _hvp(
    scores: Tensors, directions: Tensors, constants: Tensors, key: str, omega: Omega
) -> list[Tensor]:
    args = directions[0], constants, _blank(key), omega[1]
    return [_engine(scores[0]).hvp(scores[0], *args)]


def _terms(scores: Tensors, constants: Tensors, key: str) -> Tensor:
    """A score for each frame."""
    return constants[1]


ctc = Primitive(
    "ctc",
    (2,),
    (1, 0, 0),
    _value,
    _gradient,
    _hvp,
    _naive,
    lambda scores, key: [None, None, None],  # kernels validate them all
    terms=_terms,
)


def possible(theta: Tensor, constants: Tensors, blank: int) -> Tensor:
    """Which items have no impossible length or symbol, ``(B)``, on the GPU."""
    flat = [flatten_batch(t, d) for t, d in zip(constants, ctc.constant_dims, strict=True)]
    return _module("gpu").possible(flatten_batch(theta, 2), flat, blank)
