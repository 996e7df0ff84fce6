"""Paths through a grid as a differentiable torch function, for Hard, Shannon and Gini.

``grid`` has one score, ``theta (*batch, n, m)``; ``series`` has two series, ``x (*batch, n, d)``
and ``y (*batch, m, d)``, for θ(i, j) = −‖xᵢ − yⱼ‖², which on the CPU is never stored if d = 1.
Constants: ``rows, columns (*batch)``. The key is the band, or nothing.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from torch import Tensor

from structmax.forest.grid import naive
from structmax.forest.grid.naive import in_band as in_band
from structmax.forest.grid.naive import theta_of as theta_of
from structmax.primitive import Omega, Primitive, Tensors, backend_for
from structmax.smoothing import TSALLIS, from_code


def knows(code: Omega) -> bool:
    """Whether the kernels know this Ω: not Tsallis, unless it is Gini."""
    return code[0] != TSALLIS or code[2] == 2.0


def key_of(band: int | None) -> str:
    return "" if band is None else str(band)


def _band(key: str) -> int:
    """The band as kernels take it: −1 for none."""
    return int(key) if key else -1


def _engine(theta: Tensor) -> ModuleType:
    return importlib.import_module(f"structmax.forest.grid.{backend_for(theta)}")


def _naive(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> Tensor:
    rows, columns = constants
    band = int(key) if key else None
    theta = naive.theta_of(scores).to(scores[0].dtype)
    return naive.value(theta, rows, columns, band, from_code(omega))


def _value(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> Tensor:
    return _engine(scores[0]).value(scores, *constants, _band(key), tuple(omega))


def _gradient(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> list[Tensor]:
    return _engine(scores[0]).gradient(scores, *constants, _band(key), tuple(omega))


def _hvp(
    scores: Tensors, directions: Tensors, constants: Tensors, key: str, omega: Omega
) -> list[Tensor]:
    args = (*constants, _band(key), tuple(omega))
    return [_engine(scores[0]).hvp(scores[0], directions[0], *args)]


def _series_hvp(
    scores: Tensors, directions: Tensors, constants: Tensors, key: str, omega: Omega
) -> list[Tensor]:
    """The derivative of −2 Σ μ·(x − y), of which both factors change."""
    dtype = scores[0].dtype
    theta = naive.theta_of(scores).to(dtype)
    along = naive.along_series(*scores, *directions).to(dtype)
    _, mu = _gradient([theta], constants, key, omega)
    (change,) = _hvp([theta], [along], constants, key, omega)
    terms = naive.to_series(change, *scores), naive.to_series(mu, *directions)
    return [a + b for a, b in zip(*terms, strict=True)]


def _terms(scores: Tensors, constants: Tensors, key: str) -> Tensor:
    """The most cells of a path."""
    return constants[0] + constants[1]


grid = Primitive(
    "grid",
    (2,),
    (0, 0),
    _value,
    _gradient,
    _hvp,
    _naive,
    lambda scores, key: [(1, side) for side in scores[0].shape[-2:]],
    terms=_terms,
)
series = Primitive(
    "series",
    (2, 2),
    (0, 0),
    _value,
    _gradient,
    _series_hvp,
    _naive,
    lambda scores, key: [(1, given.shape[-2]) for given in scores],
)
