"""Connectionist temporal classification as a differentiable torch function, under Shannon.

Score: ``theta (*batch, T, V)``; constants: ``symbols (*batch, 2S+1)``, ``frames, count (*batch)``,
as in ``naive``. There is no key. The kernels are those of the CPU.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from structmax.forest.ctc import naive
from structmax.primitive import Omega, Primitive, Tensors


def _kernels() -> Any:
    from structmax.forest.ctc import cpu  # on first use: importing numba takes a while

    return cpu


def _naive(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> Tensor:
    symbols, frames, count = constants
    return naive.value(scores[0], symbols, frames, count, omega[1])


def _value(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> Tensor:
    return _kernels().value(scores[0], constants, omega[1])


def _gradient(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> list[Tensor]:
    return _kernels().gradient(scores[0], constants, omega[1])


def _hvp(
    scores: Tensors, directions: Tensors, constants: Tensors, key: str, omega: Omega
) -> list[Tensor]:
    return [_kernels().hvp(scores[0], directions[0], constants, omega[1])]


ctc = Primitive("ctc", (2,), (1, 0, 0), _value, _gradient, _hvp, _naive)
