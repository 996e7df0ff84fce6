"""The dense chain as torch functions: two differentiable primitives (Shannon) and Viterbi.

``chain`` is A(θ); ``chain_loss`` is A(θ) − ⟨θ, z⟩ for the z of some tags, which is convex too, with
gradient μ − z and the same Hessian. Scores: ``unary (*batch, n, c)``, ``transition (*batch, s, c,
c)`` with s ∈ {1, n − 1}, ``start`` and ``end (*batch, c)``, or ``(*batch, 0)`` for none; constants:
``lengths (*batch)`` and ``tags (*batch, n)``. ``plain_chain`` is A without start and end, for which
not even empty tensors have to be made. The kernels know γ = 1 only: γ·A(θ/γ) has gradient
μ(θ/γ) and Hessian ∇²A(θ/γ)/γ.
"""

from __future__ import annotations

import importlib
import math
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from structmax import magnitude
from structmax.fence import Limits, fenced
from structmax.forest.chain import naive
from structmax.primitive import (
    Omega,
    Primitive,
    Tensors,
    backend_for,
    direct,
    flatten_batch,
    is_plain,
    is_transforming,
    register,
    to_front,
)
from structmax.smoothing import Shannon, from_code

MAX_TAGS_ON_GPU = 128  # a tile of more does not fit into the registers of a program


def _backend(unary: Tensor) -> str:
    name = backend_for(unary)
    return "naive" if name == "gpu" and unary.shape[-1] > MAX_TAGS_ON_GPU else name


def reads_half(unary: Tensor, transition: Tensor, omega: Omega) -> bool:
    """Whether A and its gradient can be had of transitions in half precision as they are: on a GPU,
    if all else is float32, no derivative is asked for and nothing has to be divided by γ. A copy of
    a matrix for each step in float32 takes half as long as the answer."""
    if transition.dtype not in (torch.bfloat16, torch.float16) or unary.dtype == torch.float64:
        return False
    given = unary, transition
    alone = is_plain(given) and not is_transforming(given)
    return alone and omega == Shannon().code and _backend(unary) == "gpu"


def _engine(unary: Tensor) -> ModuleType:
    name = _backend(unary)
    if name == "gpu" and _module("gpu_long").suits(unary):
        name = "gpu_long"
    return _module(name)


@cache
def _module(backend: str) -> ModuleType:
    return importlib.import_module(f"structmax.forest.chain.{backend}")


def _scaled(tensors: Tensors, gamma: float) -> list[Tensor]:
    """θ/γ; in float64 where the division rounds, which would blur scores that lie far from 0."""
    if gamma == 1.0:
        return list(tensors)
    exact = math.frexp(gamma)[0] == 0.5  # a power of two
    return [(t if exact else t.double()) / gamma for t in tensors]


def _naive(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> Tensor:
    # in float64 throughout: a loss is a small difference of what may be large
    (unary, transition), lost = _folded([t.double() for t in scores], constants[0])
    value = naive.value(unary, transition, constants[0], from_code(omega))
    if len(constants) > 1:
        score = naive.score(unary, transition, *constants)
        # a product, so that the derivatives of an item with a tag that is none are NaN as well
        value = (value - score) * torch.where(score.isnan(), math.nan, 1.0)
        return value.to(scores[0].dtype)
    return (value + lost).to(scores[0].dtype)


def _folded(scores: Tensors, lengths: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor | float]:
    """Unary scores with the ends, transitions; and what A loses by it."""
    unary, transition, *ends = scores
    if not ends:
        return (unary, transition), 0.0
    start, end = ends
    unary, lost = naive.fold(unary, start, end, lengths)
    return (unary, transition), lost


def _spread(folded: Tensors, ends: Tensors, lengths: Tensor) -> list[Tensor]:
    """What all scores receive, given what the folded ones do; ``ends`` are start and end."""
    if not ends:
        return list(folded)
    (unary, transition), (start, end) = folded, ends
    first, final = torch.empty_like(start), torch.empty_like(end)
    if start.shape[-1]:
        first = unary[:, 0].clone()
    if end.shape[-1]:
        last = (lengths.long() - 1)[:, None, None].expand(-1, 1, unary.shape[-1])
        final = unary.gather(1, last).squeeze(1)
    return [unary, transition, first, final]


def _four(scores: list[Tensor]) -> list[Tensor]:
    none = [] if len(scores) == 4 else [scores[0].new_empty(1, 0)] * 2
    return [*scores, *none]


def _value(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> Tensor:
    gamma, theta = omega[1], _scaled(scores, omega[1])
    if _backend(scores[0]) == "cpu":
        value = _engine(scores[0]).value(*_four(theta), *constants)
    else:
        folded, lost = _folded(theta, constants[0])
        value = _engine(folded[0]).value(*folded, constants[0], len(constants) > 1)
        value = _finished(value, [], folded, lost, constants)
    return value if gamma == 1.0 else (gamma * value).to(scores[0].dtype)


def _gradient(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> list[Tensor]:
    gamma, theta = omega[1], _scaled(scores, omega[1])
    if _backend(scores[0]) == "cpu":
        value, *mu = _engine(scores[0]).gradient(*_four(theta), *constants)
        mu = mu[: len(scores)]
    else:
        folded, lost = _folded(theta, constants[0])
        value, *mu = _engine(folded[0]).gradient(*folded, constants[0], len(constants) > 1)
        value = _finished(value, mu, folded, lost, constants)
        mu = _spread(mu, theta[2:], constants[0])
    if gamma == 1.0:
        return [value, *mu]
    return [t.to(scores[0].dtype) for t in (gamma * value, *mu)]


def _finished(
    value: Tensor,
    mu: list[Tensor],
    folded: tuple[Tensor, Tensor],
    lost: Tensor | float,
    constants: Tensors,
) -> Tensor:
    """A with what it lost; or less the score of tags, which lost as much, and μ less their z."""
    if len(constants) > 1:
        _engine(folded[0]).less_tags(value, mu, *folded, *constants)
        return value.to(folded[0].dtype)
    return (value + lost).to(value.dtype) if isinstance(lost, Tensor) else value


def _hvp(
    scores: Tensors, directions: Tensors, constants: Tensors, key: str, omega: Omega
) -> list[Tensor]:
    gamma, lengths = omega[1], constants[0]
    theta = _scaled(scores, gamma)
    along = [t.to(theta[0].dtype) for t in directions]
    if _backend(scores[0]) == "cpu":
        w = _engine(theta[0]).hvp(_four(theta), _four(along), lengths)[: len(scores)]
    else:
        folded, _ = _folded(theta, lengths)
        # a direction loses nothing by its peaks either: along a whole position A is linear
        v, _ = _folded(along, lengths)
        w = _spread(_engine(folded[0]).hvp(*folded, *v, lengths), scores[2:], lengths)
    return w if gamma == 1.0 else [(t / gamma).to(scores[0].dtype) for t in w]


def _terms(scores: Tensors, constants: Tensors, key: str) -> Tensor:
    """n tags, n − 1 transitions, start and end."""
    return 2 * constants[0] + 1


def _restored_loss(
    loss: Tensor, mu: Tensors, scores: Tensors, smaller: Tensors, constants: Tensors
) -> Tensor:
    """The loss of huge scores, given that of smaller ones: more by what the best tags lose less
    than the given ones. Both lists are sorted, so that equal ones cancel to the last digit."""
    lengths, tags = constants
    change = [
        torch.where(t == s, 0.0, t.double() - s.double())
        for t, s in zip(scores, smaller, strict=True)
    ]
    theta, sizes = _four([t.double() for t in smaller]), lengths.long()
    best = _module("cpu").argmax(*theta, lengths)[1]
    lost = [_along(change, sizes, y).sort(-1).values for y in (best, tags.long())]
    return magnitude.finite(loss.double() + (lost[0] - lost[1]).sum(-1), loss)


def _along(scores: Tensors, lengths: Tensor, tags: Tensor) -> Tensor:
    """Every score that tags use, ``(B, 2n + 1)``; 0 in the padding."""
    unary, transition, *ends = scores
    own, between, _ = naive.along(unary, transition, lengths, tags)
    tags = tags.clamp(0, unary.shape[-1] - 1)
    at = tags[:, :1], tags.gather(1, lengths[:, None] - 1)
    used = [e.gather(1, i) for e, i in zip(ends, at, strict=True) if e.shape[-1]]
    return torch.cat([own, between, *used], 1)


def _limits(scores: Tensors, key: str) -> Limits:
    return [(1, scores[0].shape[-2])]


def _limits_of_loss(scores: Tensors, key: str) -> Limits:
    return [*_limits(scores, key), None]  # kernels validate the tags: their padding may be anything


_functions = (_value, _gradient, _hvp, _naive)
chain = Primitive("chain", (2, 3, 1, 1), (0,), *_functions, _limits, _backend, terms=_terms)
plain_chain = Primitive("plain_chain", (2, 3), (0,), *_functions, _limits, _backend, terms=_terms)
chain_loss = Primitive(
    "chain_loss",
    (2, 3, 1, 1),
    (0, 1),
    *_functions,
    _limits_of_loss,
    _backend,
    terms=_terms,
    restore=_restored_loss,
)


@fenced([4], lambda unary, *others: [(1, unary.shape[-2])])
def _run_argmax(
    unary: Tensor, transition: Tensor, start: Tensor, end: Tensor, lengths: Tensor
) -> list[Tensor]:
    batch, n = unary.shape[:-2], unary.shape[-2]
    given = ((unary, 2), (transition, 3), (start, 1), (end, 1), (lengths, 0))
    *theta, sizes = [flatten_batch(t, d) for t, d in given]
    backend = _backend(unary)
    lost: Tensor | float = 0.0
    if backend == "naive":
        theta = [t.double() for t in theta]
    if backend != "cpu":
        folded, lost = _folded(theta, sizes)
        theta = list(folded)
    best, tags = _engine(unary).argmax(*theta, sizes)
    best = (best + lost).to(unary.dtype)
    return [best.reshape(batch), tags.reshape(*batch, n)]


argmax = register(
    "chain_argmax",
    "(Tensor unary, Tensor transition, Tensor start, Tensor end, Tensor lengths) -> Tensor[]",
    _run_argmax,
    lambda unary, transition, start, end, lengths: [
        unary.new_empty(unary.shape[:-2]),
        lengths.new_empty(unary.shape[:-1], dtype=torch.int64),
    ],
)


def _argmax_rule(info, in_dims, *tensors):  # type: ignore[no-untyped-def]
    return argmax(*to_front(tensors, in_dims, info.batch_size)), [0, 0]


torch.library.register_vmap(argmax, _argmax_rule)
best_tags = direct(argmax, _run_argmax)
