"""The Triton kernels for paths through a grid against the definition.

With a CUDA device they run on it; without one, under Triton's interpreter on the CPU.
"""

from __future__ import annotations

import itertools
import math
import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
pytest.importorskip("triton")

import structmax as sx
from structmax.forest.grid import ops
from structmax.primitive import backend

# The interpreter computes with numpy, which warns of −inf and of NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
OMEGAS = [sx.Shannon(0.5), sx.Gini(3.0), sx.Hard()]
INF, f32, f64 = math.inf, torch.float32, torch.float64


def scores(*shape: int, dtype: torch.dtype = f64, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=f64).to(DEVICE, dtype)


def sizes(*pairs: tuple[int, int]) -> list[Tensor]:
    return [torch.tensor(side, device=DEVICE) for side in zip(*pairs, strict=True)]


def agree(theta: Tensor, of: list[Tensor], omega: sx.Smoothing, band: str = "") -> list[Tensor]:
    """Compares A, μ and w with the definition, which runs in float64. Returns ours."""
    v = scores(*theta.shape, seed=1)
    args = of, band, list(omega.code)
    with backend("gpu"):
        ours = ops.grid.gradient_op([theta], *args)
        ours += ops.grid.hvp_op([theta], [v.to(theta.dtype)], *args)
    with backend("naive"):
        theirs = ops.grid.gradient_op([theta.double()], *args)
        theirs += ops.grid.hvp_op([theta.double()], [v], *args)
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.dtype == theta.dtype
        limit = TOLERANCE[mine.dtype]
        torch.testing.assert_close(mine.double(), reference, rtol=limit, atol=limit)
    return ours


@pytest.mark.parametrize("omega", OMEGAS, ids=str)
def test_agrees_with_the_definition(omega: sx.Smoothing) -> None:
    """Ragged items, a forbidden cell, and padding full of NaN."""
    of = sizes((4, 5), (3, 1), (1, 1))
    theta = scores(3, 4, 5)
    theta[0, 2, 3] = -INF
    ours = agree(torch.where(ops.in_band(4, 5, *of, None), theta, math.nan), of, omega)
    with backend("gpu"):
        assert torch.equal(ops.grid.value_op([theta], of, "", list(omega.code)), ours[0])


@pytest.mark.parametrize("omega", [sx.Shannon(), sx.Gini()], ids=str)
def test_float32_with_any_strides(omega: sx.Smoothing) -> None:
    agree(scores(2, 4, 3, dtype=f32).mT, sizes((3, 4), (2, 2)), omega)


@pytest.mark.parametrize("omega", [sx.Shannon(), sx.Gini()], ids=str)
def test_curvature_does_not_drift(omega: sx.Smoothing) -> None:
    """In float32, at an offset of 1e4 in scores and direction."""
    theta = (scores(1, 13, 12) * 8).round().float() / 8 + 1e4
    args = sizes((13, 12)), "", list(omega.code)
    found = []
    for name, x in (("gpu", theta), ("naive", theta.double())):
        with backend(name):
            found.append(
                [ops.grid.hvp_op([x], [v.to(x)], *args)[0] for v in (theta, theta * 0 + 1)]
            )
    (slope, flat), (exact, _) = found
    assert flat.abs().max() < 1e-6
    torch.testing.assert_close(slope.double(), exact, atol=1e-5, rtol=0)


@pytest.mark.parametrize("features", [1, 3])
@pytest.mark.parametrize("omega", OMEGAS, ids=str)
def test_series(omega: sx.Smoothing, features: int) -> None:
    x, v = ([scores(3, k, features, seed=seed + k) for k in (4, 5)] for seed in (0, 10))
    args = sizes((4, 5), (3, 1), (1, 1)), "", list(omega.code)
    runs = []
    for name in ("gpu", "naive"):
        with backend(name):
            runs.append([*ops.series.gradient_op(x, *args), *ops.series.hvp_op(x, v, *args)])
            assert torch.equal(ops.series.value_op(x, *args), runs[-1][0])
    for mine, reference in zip(*runs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [f64, f32], ids=str)
def test_from_both_corners(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items of every size to 4 × 5, whose halves are odd, even or empty; then from one corner."""
    from structmax.forest.grid import gpu

    of = sizes(*itertools.product(range(1, 5), range(1, 6)))
    theta = scores(20, 4, 5, dtype=dtype)
    args = of, "", list(sx.Shannon(0.5).code)
    ours = agree(theta, of, sx.Shannon(0.5))
    with backend("gpu"):
        alone = ops.grid.gradient_op([theta[11:12]], [t[11:12] for t in of], *args[1:])
        monkeypatch.setattr(gpu, "CORNERS", 1)
        others = ops.grid.gradient_op([theta], *args)
    assert all(torch.equal(t[11:12], one) for t, one in zip(ours, alone, strict=False))
    limit = 1e-12 if dtype == f64 else 1e-6
    for mine, other in zip(ours, others, strict=False):
        torch.testing.assert_close(mine, other, rtol=limit, atol=limit)


@pytest.mark.parametrize("band", ["0", "1"])
def test_bands(band: str) -> None:
    of = sizes((4, 4), (4, 2))
    inside = ops.in_band(4, 4, *of, int(band))
    ours = agree(torch.where(inside, scores(2, 4, 4), math.nan), of, sx.Shannon(), band)
    assert not bool(ours[1][~inside].any()) and not bool(ours[2][~inside].any())


def test_diagonals_longer_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks of two rows, a diagonal takes several."""
    from structmax.forest.grid import gpu

    if DEVICE == "cuda":
        pytest.skip("tested below, at real sizes")
    monkeypatch.setattr(gpu, "ROWS", 2)
    agree(scores(1, 5, 4), sizes((5, 4)), sx.Shannon())


@pytest.mark.parametrize("dtype", [f64, f32], ids=str)
def test_extreme_scores(dtype: torch.dtype) -> None:
    theta = (scores(3, 3, 4) * 64).round() / 64
    theta = torch.stack([theta[0] * 1e3, theta[1] + 1e4, theta[2] - 1e4]).to(dtype)
    agree(theta, sizes(*[(3, 4)] * 3), sx.Shannon())
    agree(theta * 1e30, sizes(*[(3, 4)] * 3), sx.Shannon())


@pytest.mark.parametrize("omega", OMEGAS, ids=str)
def test_nan_and_infeasible_items_stay_alone(omega: sx.Smoothing) -> None:
    theta = scores(3, 3, 3)
    of, args = sizes(*[(3, 3)] * 3), ("", list(omega.code))
    theta[1, 1, 2], theta[2, :, 1] = math.nan, -INF
    with backend("gpu"):
        a, mu = ops.grid.gradient_op([theta], of, *args)
        alone = ops.grid.gradient_op([theta[:1]], [t[:1] for t in of], *args)
    assert a.isnan().tolist() == [False, True, False]
    assert a[2] == -INF and (mu[2] == 0).all() and mu[1].isnan().all()
    assert torch.equal(a[:1], alone[0]) and torch.equal(mu[:1], alone[1])


def test_ties_go_to_the_first_move() -> None:
    agree(torch.zeros(1, 2, 4, dtype=f64, device=DEVICE), sizes((2, 4)), sx.Hard())


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize(("batch", "n", "m"), [(64, 100, 120), (4, 1500, 700), (2, 600, 2500)])
@pytest.mark.parametrize("dtype", [f64, f32], ids=str)
def test_real_sizes(batch: int, n: int, m: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    pairs = [torch.randint(k // 2, k + 1, (batch,), generator=random).tolist() for k in (n, m)]
    of = sizes(*zip(*pairs, strict=True))
    theta, v = scores(batch, n, m, dtype=dtype), scores(batch, n, m, dtype=dtype, seed=1)
    for omega, band in ((sx.Shannon(), ""), (sx.Gini(), "20")):
        args = of, band, list(omega.code)
        with backend("gpu"):
            ours = [*ops.grid.gradient_op([theta], *args), *ops.grid.hvp_op([theta], [v], *args)]
        args = [t.cpu() for t in of], band, list(omega.code)
        inputs = [theta.double().cpu()], [v.double().cpu()]
        with backend("cpu"):
            theirs = ops.grid.gradient_op(inputs[0], *args) + ops.grid.hvp_op(*inputs, *args)
        for mine, reference in zip(ours[: 2 if band else 3], theirs):
            limit = TOLERANCE[dtype] * (10 if dtype == f32 else 1)
            torch.testing.assert_close(mine.double().cpu(), reference, rtol=limit, atol=limit)
