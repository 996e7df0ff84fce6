"""The dense chain as torch functions: a differentiable primitive (Shannon) and Viterbi.

Scores: ``unary (*batch, n, c)`` and ``transition (*batch, s, c, c)``, s ∈ {1, n − 1}; constant:
``lengths (*batch)``. The kernels know γ = 1 only: γ·A(θ/γ) has gradient μ(θ/γ) and Hessian
∇²A(θ/γ)/γ.
"""

from __future__ import annotations

import importlib
import math
from types import ModuleType

import torch
from torch import Tensor

from structmax.forest.chain import naive
from structmax.primitive import (
    Omega,
    Primitive,
    Tensors,
    backend_for,
    flatten_batch,
    register,
    to_front,
)
from structmax.smoothing import from_code

MAX_TAGS_ON_GPU = 128  # a tile of more does not fit into the registers of a program


def _backend(unary: Tensor) -> str:
    name = backend_for(unary)
    return "naive" if name == "gpu" and unary.shape[-1] > MAX_TAGS_ON_GPU else name


def _engine(unary: Tensor) -> ModuleType:
    return importlib.import_module(f"structmax.forest.chain.{_backend(unary)}")


def _scaled(tensors: Tensors, gamma: float) -> list[Tensor]:
    """θ/γ; in float64 where the division rounds, which would blur scores that lie far from 0."""
    if gamma == 1.0:
        return list(tensors)
    exact = math.frexp(gamma)[0] == 0.5  # a power of two
    return [(t if exact else t.double()) / gamma for t in tensors]


def _naive(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> Tensor:
    return naive.value(scores[0], scores[1], constants[0], from_code(omega))


def _value(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> Tensor:
    gamma = omega[1]
    value = _engine(scores[0]).value(*_scaled(scores, gamma), constants[0])
    return value if gamma == 1.0 else (gamma * value).to(scores[0].dtype)


def _gradient(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> list[Tensor]:
    gamma = omega[1]
    value, *mu = _engine(scores[0]).gradient(*_scaled(scores, gamma), constants[0])
    if gamma == 1.0:
        return [value, *mu]
    return [t.to(scores[0].dtype) for t in (gamma * value, *mu)]


def _hvp(
    scores: Tensors, directions: Tensors, constants: Tensors, key: str, omega: Omega
) -> list[Tensor]:
    gamma = omega[1]
    theta = _scaled(scores, gamma)
    v = [t.to(theta[0].dtype) for t in directions]
    w = _engine(scores[0]).hvp(*theta, *v, constants[0])
    return list(w) if gamma == 1.0 else [(t / gamma).to(scores[0].dtype) for t in w]


chain = Primitive("chain", (2, 3), (0,), _value, _gradient, _hvp, _naive, _backend)


def _run_argmax(unary: Tensor, transition: Tensor, lengths: Tensor) -> list[Tensor]:
    batch, n = unary.shape[:-2], unary.shape[-2]
    flat = [flatten_batch(t, d) for t, d in ((unary, 2), (transition, 3), (lengths, 0))]
    best, tags = _engine(unary).argmax(*flat)
    return [best.reshape(batch), tags.reshape(*batch, n)]


argmax = register(
    "chain_argmax",
    "(Tensor unary, Tensor transition, Tensor lengths) -> Tensor[]",
    _run_argmax,
    lambda unary, transition, lengths: [
        unary.new_empty(unary.shape[:-2]),
        lengths.new_empty(unary.shape[:-1], dtype=torch.int64),
    ],
)


def _argmax_rule(info, in_dims, *tensors):  # type: ignore[no-untyped-def]
    return argmax(*to_front(tensors, in_dims, info.batch_size)), [0, 0]


torch.library.register_vmap(argmax, _argmax_rule)
