"""The forest engine as torch functions: one differentiable primitive, four discrete queries, and
backpointers.

Scores are ``(*batch, P)``, goals ``(*batch)``; ``key`` names the forest (``Forest.key`` or
``topology.name_of``); ``width`` says how many of the leading parts a discrete query reports, since
a structure's own parts come first and the rest can be many. Kernels are imported on first use.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from structmax import magnitude
from structmax.fence import Limits, fenced
from structmax.forest import naive
from structmax.forest.topology import Forest, lookup
from structmax.primitive import (
    Omega,
    Primitive,
    Tensors,
    backend_for,
    direct,
    is_plain,
    is_transforming,
    register,
    to_front,
)
from structmax.smoothing import Smoothing, from_code


def _engine(scores: Tensor) -> ModuleType:
    return importlib.import_module(f"structmax.forest.{backend_for(scores)}")


def _omega(scores: Tensor, code: Omega) -> object:
    return from_code(code) if backend_for(scores) == "naive" else tuple(code)


def _naive(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> Tensor:
    return naive.value(lookup(key), scores[0], constants[0], from_code(omega))


def _value(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> Tensor:
    return _engine(scores[0]).value(lookup(key), scores[0], constants[0], tuple(omega))


def _gradient(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> list[Tensor]:
    return list(_engine(scores[0]).gradient(lookup(key), scores[0], constants[0], tuple(omega)))


def _hvp(
    scores: Tensors, directions: Tensors, constants: Tensors, key: str, omega: Omega
) -> list[Tensor]:
    engine = _engine(scores[0])
    return [engine.hvp(lookup(key), scores[0], directions[0], constants[0], tuple(omega))]


def _terms(forest: Forest, goal: Tensor) -> Tensor:
    """The most parts in a derivation of each item, from its nodes where the number varies."""
    at = goal.long().numpy()
    uniform = forest.part_counts[at]
    return torch.from_numpy(np.where(uniform > 0, uniform, 2 * forest.derivation_size[at]))


def goals(key: str) -> Limits:
    """Goals are nodes of the forest."""
    return [(0, lookup(key).num_nodes - 1)]


forest = Primitive(
    "forest",
    (1,),
    (0,),
    _value,
    _gradient,
    _hvp,
    _naive,
    lambda scores, key: goals(key),
    hold=lookup,
    terms=lambda scores, constants, key: _terms(lookup(key), constants[0]),
)


def _flat(scores: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    items = goal.numel()
    return scores.reshape(items, scores.shape[-1]), goal.reshape(items)


@fenced([1], lambda scores, goal, key, width: goals(key))
def _run_argmax(scores: Tensor, goal: Tensor, key: str, width: int) -> list[Tensor]:
    a, z = _engine(scores).argmax(lookup(key), *_flat(scores, goal), width)
    batch = scores.shape[:-1]
    return [a.reshape(batch), z.reshape(*batch, width)]


@fenced([1], lambda scores, goal, uniform, key, omega, width: goals(key), lead=1)
def _run_sample(
    scores: Tensor, goal: Tensor, uniform: Tensor, key: str, omega: Omega, width: int
) -> Tensor:
    batch, draws = scores.shape[:-1], len(uniform)
    flat = uniform.reshape(draws, batch.numel(), uniform.shape[-1])
    engine, code, forest = _engine(scores), _omega(scores, omega), lookup(key)
    theta, ends = _flat(scores, goal)
    smaller = magnitude.moderate([theta], lambda: _terms(forest, ends), omega)
    z = engine.sample(forest, smaller[0] if smaller else theta, ends, flat, code, width)
    return z.reshape(draws, *batch, width)


@fenced([1], lambda scores, goal, key, k, width: goals(key))
def _run_kbest(scores: Tensor, goal: Tensor, key: str, k: int, width: int) -> list[Tensor]:
    a, z = _engine(scores).kbest(lookup(key), *_flat(scores, goal), k, width)
    batch = scores.shape[:-1]
    return [a.reshape(*batch, k), z.reshape(*batch, k, width)]


@fenced([1], lambda scores, goal, key, width: goals(key))
def _run_max_marginals(scores: Tensor, goal: Tensor, key: str, width: int) -> Tensor:
    m = _engine(scores).max_marginals(lookup(key), *_flat(scores, goal), width)
    return m.reshape(*scores.shape[:-1], width)


def backpointers(forest: Forest, scores: Tensor, omega: Smoothing) -> Tensor:
    """q ``(B, e)`` of scores ``(B, P)``: at every node, the distribution argmaxΩ over its incoming
    edges. Differentiable, and compiled where no derivative is asked for."""
    plain = is_plain((scores,)) and not is_transforming((scores,))
    if plain and backend_for(scores) == "cpu":
        most = 2 * int(forest.derivation_size.max())
        smaller = magnitude.moderate(
            [scores], lambda: torch.full((len(scores),), most, device="cpu"), omega.code
        )
        return _engine(scores).backpointers(forest, smaller[0] if smaller else scores, omega.code)
    return naive.backpointers(forest, scores, omega)


argmax = register(
    "forest_argmax",
    "(Tensor scores, Tensor goal, str key, int width) -> Tensor[]",
    _run_argmax,
    lambda scores, goal, key, width: [
        scores.new_empty(scores.shape[:-1]),
        scores.new_empty(*scores.shape[:-1], width),
    ],
)
sample = register(
    "forest_sample",
    "(Tensor scores, Tensor goal, Tensor uniform, str key, float[] omega, int width) -> Tensor",
    _run_sample,
    lambda scores, goal, uniform, key, omega, width: scores.new_empty(
        uniform.shape[0], *scores.shape[:-1], width
    ),
)
kbest = register(
    "forest_kbest",
    "(Tensor scores, Tensor goal, str key, int k, int width) -> Tensor[]",
    _run_kbest,
    lambda scores, goal, key, k, width: [
        scores.new_empty(*scores.shape[:-1], k),
        scores.new_empty(*scores.shape[:-1], k, width),
    ],
)
max_marginals = register(
    "forest_max_marginals",
    "(Tensor scores, Tensor goal, str key, int width) -> Tensor",
    _run_max_marginals,
    lambda scores, goal, key, width: scores.new_empty(*scores.shape[:-1], width),
)


def _register_vmap() -> None:
    def mapped(op):  # type: ignore[no-untyped-def]
        def rule(info, in_dims, scores, goal, *rest):  # type: ignore[no-untyped-def]
            tensors = to_front([scores, goal], in_dims[:2], info.batch_size)
            out = op(*tensors, *rest)
            return out, [0] * len(out) if isinstance(out, list) else 0

        return rule

    for op in (argmax, kbest, max_marginals):
        torch.library.register_vmap(op, mapped(op))

    def sample_rule(info, in_dims, scores, goal, uniform, *rest):  # type: ignore[no-untyped-def]
        scores, goal = to_front([scores, goal], in_dims[:2], info.batch_size)
        if in_dims[2] is None:
            uniform = uniform.unsqueeze(1).expand(-1, info.batch_size, *uniform.shape[1:])
        else:
            uniform = uniform.movedim(in_dims[2], 1)
        return sample(scores, goal, uniform, *rest), 1

    torch.library.register_vmap(sample, sample_rule)


_register_vmap()
best = direct(argmax, _run_argmax)
