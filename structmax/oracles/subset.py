"""Subsets of a bounded size as torch functions: one differentiable primitive (Shannon), draws and
the k best.

For each position there is a score of taking it and one of leaving it (``skip``: 0, or −inf where it
must be taken). With V(i, j) over the subsets of the first i positions that have j elements,

    V(i, j) = maxΩ(skipᵢ + V(i−1, j), takeᵢ + V(i−1, j−1)),   A = maxΩ over j of V(n, j),

which with exponentials instead of scores is the recursion of elementary symmetric polynomials. The
backward pass walks down through P(i is taken | j so far); nothing is ever divided out again.

``take, skip (*B, n)``, ``lengths (*B)``; the key is ``"least,most"``. The kernels know γ = 1 only:
γ·A(θ/γ) has gradient μ(θ/γ) and Hessian ∇²A(θ/γ)/γ.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from structmax.fence import fenced
from structmax.primitive import Omega, Primitive, Tensors, register, to_front
from structmax.smoothing import from_code


def key_of(least: int, most: int) -> str:
    return f"{least},{most}"


def _pair(key: str) -> tuple[int, int]:
    least, most = key.split(",")
    return int(least), int(most)


def naive(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> Tensor:
    """A ``(B)``: the definition, one position after the other."""
    least, most = _pair(key)
    (lengths,), smooth = constants, from_code(omega)
    n = scores[0].shape[-1]
    inside = torch.arange(n, device=lengths.device) < lengths[:, None]
    take, skip = (torch.where(inside, s, 0.0).double() for s in scores)
    none = torch.full_like(take[:, :1], -math.inf)
    values = torch.cat([torch.zeros_like(none), none.expand(-1, most)], -1)  # (B, most + 1)
    for i in range(n):
        shifted = torch.cat([none, values[:, :-1]], -1)
        options = torch.stack([skip[:, i, None] + values, take[:, i, None] + shifted], -1)
        values = torch.where(inside[:, i, None], smooth.max(options), values)
    return smooth.max(values[:, least:]).to(scores[0].dtype)


def _scaled(scores: Tensors, omega: Omega) -> tuple[Tensor, Tensor, float]:
    """θ/γ and γ."""
    take, skip = (s.double() / omega[1] for s in scores)
    return take, skip, omega[1]


def _value(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> Tensor:
    from structmax.oracles import subset_cpu

    take, skip, gamma = _scaled(scores, omega)
    value = subset_cpu.value(take, skip, constants[0], _pair(key))
    return (gamma * value).to(scores[0].dtype)


def _gradient(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> list[Tensor]:
    from structmax.oracles import subset_cpu

    take, skip, gamma = _scaled(scores, omega)
    value, *mu = subset_cpu.gradient(take, skip, constants[0], _pair(key))
    return [t.to(scores[0].dtype) for t in (gamma * value, *mu)]


def _hvp(
    scores: Tensors, directions: Tensors, constants: Tensors, key: str, omega: Omega
) -> list[Tensor]:
    from structmax.oracles import subset_cpu

    take, skip, gamma = _scaled(scores, omega)
    w = subset_cpu.hvp(take, skip, directions, constants[0], _pair(key))
    return [(t / gamma).to(scores[0].dtype) for t in w]


def _terms(scores: Tensors, constants: Tensors, key: str) -> Tensor:
    """A score for each position, of taking or of leaving it."""
    return constants[0]


subset = Primitive(
    "subset",
    (1, 1),
    (0,),
    _value,
    _gradient,
    _hvp,
    naive,
    lambda scores, key: [(1, scores[0].shape[-1])],
    terms=_terms,
)


def _flat(*tensors: Tensor) -> list[Tensor]:
    items = tensors[-1].numel()
    return [t.reshape(items, *t.shape[tensors[-1].dim() :]).cpu() for t in tensors]


@fenced([2], lambda take, *others: [(1, take.shape[-1])], lead=1)
def _run_sample(
    take: Tensor, skip: Tensor, lengths: Tensor, uniform: Tensor, key: str, gamma: float
) -> Tensor:
    from structmax.oracles import subset_cpu

    theta, other, sizes = _flat(take.double() / gamma, skip.double(), lengths)
    numbers = uniform.reshape(len(uniform), len(sizes), uniform.shape[-1])
    z = subset_cpu.sample(theta, other, sizes, numbers, _pair(key))
    return z.reshape(len(uniform), *take.shape).to(take.dtype)


@fenced([2], lambda take, *others: [(1, take.shape[-1])])
def _run_kbest(take: Tensor, skip: Tensor, lengths: Tensor, key: str, k: int) -> list[Tensor]:
    from structmax.oracles import subset_cpu

    theta, other, sizes = _flat(take, skip, lengths)
    best, z = subset_cpu.kbest(theta, other, sizes, _pair(key), k)
    *batch, n = take.shape
    return [best.reshape(*batch, k).to(take), z.reshape(*batch, k, n).to(take)]


sample = register(
    "subset_sample",
    "(Tensor take, Tensor skip, Tensor lengths, Tensor uniform, str key, float gamma) -> Tensor",
    _run_sample,
    lambda take, skip, lengths, uniform, key, gamma: take.new_empty(uniform.shape[0], *take.shape),
)
kbest = register(
    "subset_kbest",
    "(Tensor take, Tensor skip, Tensor lengths, str key, int k) -> Tensor[]",
    _run_kbest,
    lambda take, skip, lengths, key, k: [
        take.new_empty(*take.shape[:-1], k),
        take.new_empty(*take.shape[:-1], k, take.shape[-1]),
    ],
)


def _sample_rule(info, in_dims, take, skip, lengths, uniform, *rest):  # type: ignore[no-untyped-def]
    tensors = to_front([take, skip, lengths], in_dims[:3], info.batch_size)
    numbers = to_front([uniform], in_dims[3:4], info.batch_size)[0].movedim(0, 1)
    return sample(*tensors, numbers, *rest), 1


def _kbest_rule(info, in_dims, take, skip, lengths, *rest):  # type: ignore[no-untyped-def]
    return kbest(*to_front([take, skip, lengths], in_dims[:3], info.batch_size), *rest), [0, 0]


torch.library.register_vmap(sample, _sample_rule)
torch.library.register_vmap(kbest, _kbest_rule)
