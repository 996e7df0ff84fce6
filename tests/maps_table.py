"""The table of maps: every row goes through the whole suite of ``test_maps.py``.

A row has the map itself, an independent solver of its definition, and its optimality conditions.
The problem is convex, so these conditions prove a point to be the answer, whatever the size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.optimize
import torch
from numpy.typing import NDArray
from torch import Tensor

import structmax as sx
from structmax.maps.recipe import Map

inf = math.inf


def tsallis(p: NDArray, alpha: float) -> tuple[float, NDArray]:
    """Ω(p) and its gradient, for the solver."""
    safe = np.maximum(p, 1e-300)
    if alpha == 1:
        return float((p * np.log(safe)).sum()), np.log(safe) + 1
    value = (p**alpha - p).sum() / (alpha * (alpha - 1))
    return float(value), (p ** (alpha - 1) - 1 / alpha) / (alpha - 1)


def norm(p: NDArray, alpha: float) -> tuple[float, NDArray]:
    size = (p**alpha).sum() ** (1 / alpha)
    return float(size - 1), (p / size) ** (alpha - 1)


def solve(x: NDArray, omega: Callable[[NDArray], tuple[float, NDArray]], total: float) -> NDArray:
    """argmax of ⟨p, x⟩ − Ω(p) with Σp = total and 0 ≤ p ≤ 1, by sequential quadratic programs."""
    n = len(x)
    z = np.maximum(x - x.max(), -60.0) if total == 1 else x - x.mean()

    def cost(p: NDArray) -> tuple[float, NDArray]:
        value, slope = omega(np.maximum(p, 0))
        return value - p @ z, slope - z

    start = np.full(n, total / n)
    found = scipy.optimize.minimize(
        cost,
        start,
        jac=True,
        bounds=[(0.0, 1.0)] * n,
        constraints={"type": "eq", "fun": lambda p: p.sum() - total, "jac": lambda p: np.ones(n)},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 2000},
    )
    return found.x


def residual_tsallis(z: Tensor, p: Tensor, alpha: float) -> Tensor:
    """How far p^{α−1} is from [(α−1)z + T]₊ with the T of the peak z = 0, row by row."""
    if alpha == 1:
        level = torch.where(p > 0, p, 1.0).log() - p.amax(-1, keepdim=True).log()
        gap = torch.where(p > 0, (level - z).abs(), (z + 700).clamp(min=0))
        return (gap / (1 + z.abs().clamp(max=700))).amax(-1)
    T = p.amax(-1, keepdim=True) ** (alpha - 1)
    u = ((alpha - 1) * z + T).clamp(min=0)
    tiny = u < 1e-37 ** (alpha - 1)  # such a p is less than a float32 holds
    return torch.where(tiny & (p < 1e-37), 0.0, (u - p ** (alpha - 1)).abs()).amax(-1)


def residual_norm(z: Tensor, p: Tensor, alpha: float) -> Tensor:
    size = (p**alpha).sum(-1, keepdim=True) ** (1 / alpha)
    u = (p / size) ** (alpha - 1)
    return ((z + u.amax(-1, keepdim=True)).clamp(min=0) - u).abs().amax(-1)


def residual_budget(z: Tensor, p: Tensor, k: float) -> Tensor:
    """x − p is τ inside, at most τ where p = 0 and at least τ where p = 1."""
    d = z - p
    low = torch.where(p < 1, d, -inf).amax(-1)
    high = torch.where(p > 0, d, inf).amin(-1)
    return (low - high).clamp(min=0) / (1 + high.abs())


@dataclass(frozen=True)
class Row:
    """``residual(z, p)`` is 0 at the answer; z is x minus its peak. ``total`` is Σp."""

    map: Callable[..., Tensor]  # (x, dim=-1, mask=None)
    op: Map
    options: list[float]
    omega: Callable[[NDArray], tuple[float, NDArray]]
    residual: Callable[[Tensor, Tensor], Tensor]
    total: float = 1.0
    solver_error: float = 1e-6

    def solve(self, x: NDArray) -> NDArray:
        return solve(x, self.omega, self.total)


def _ops() -> dict[str, Map]:
    return Map.by_name


def entmax_row(alpha: float, **settings: float) -> Row:
    return Row(
        lambda x, **kw: sx.entmax(x, alpha, **kw),
        _ops()["entmax"],
        [alpha],
        lambda p: tsallis(p, alpha),
        lambda z, p: residual_tsallis(z, p, alpha),
        **settings,
    )


MAPS: dict[str, Row] = {
    "softmax": Row(
        sx.softmax,
        _ops()["softmax"],
        [],
        lambda p: tsallis(p, 1.0),
        lambda z, p: residual_tsallis(z, p, 1.0),
    ),
    "sparsemax": Row(
        sx.sparsemax,
        _ops()["sparsemax"],
        [],
        lambda p: tsallis(p, 2.0),
        lambda z, p: residual_tsallis(z, p, 2.0),
    ),
    "entmax-1.2": entmax_row(1.2),
    "entmax-1.5": entmax_row(1.5),
    "entmax-3": entmax_row(3.0),
    "normmax-2": Row(
        lambda x, **kw: sx.normmax(x, 2.0, **kw),
        _ops()["normmax"],
        [2.0],
        lambda p: norm(p, 2.0),
        lambda z, p: residual_norm(z, p, 2.0),
    ),
    "normmax-3": Row(
        lambda x, **kw: sx.normmax(x, 3.0, **kw),
        _ops()["normmax"],
        [3.0],
        lambda p: norm(p, 3.0),
        lambda z, p: residual_norm(z, p, 3.0),
        solver_error=1e-4,  # a power of 1/2 of the error at the edge of the support
    ),
    "budgetmax-2": Row(
        lambda x, **kw: sx.budgetmax(x, 2, **kw),
        _ops()["budgetmax"],
        [2.0],
        lambda p: tsallis(p, 2.0),
        lambda z, p: residual_budget(z, p, 2.0),
        total=2.0,
    ),
}
