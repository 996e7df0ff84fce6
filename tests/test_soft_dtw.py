"""The soft-DTW loss and the averages under it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import structmax as sx
from structmax.losses import SoftDTW

f64 = torch.float64
LOSSES = {
    "shannon": SoftDTW(0.7),
    "divergence": SoftDTW(divergence=True),
    "gini": SoftDTW(omega=sx.Gini(2.0)),
    "tsallis": SoftDTW(omega=sx.Tsallis(1.5, 2.0)),
    "band": SoftDTW(band=1),
    "band-divergence": SoftDTW(0.5, divergence=True, band=1),
}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=f64)


def test_published_constants() -> None:
    """Those of Cuturi & Blondel's implementation at γ = 1."""
    zeros, ones = torch.zeros(1, 10, 8, dtype=f64), torch.ones(1, 12, 8, dtype=f64)
    loss = SoftDTW()
    assert abs(loss(zeros, ones).item() - 91.98061035) < 5e-9
    assert abs(loss(zeros, zeros).item() + 14.19570093) < 5e-9
    assert abs(SoftDTW(divergence=True)(zeros, ones).item() - 107.89006617) < 5e-9


@pytest.mark.parametrize("omega", [sx.Shannon(0.5), sx.Gini(), sx.Tsallis(1.5), sx.Hard()], ids=str)
def test_definition(omega: sx.Smoothing) -> None:
    x, y = randn(3, 5, 2), randn(3, 4, 2, seed=1)
    cost = (x[:, :, None] - y[:, None]).square().sum(-1)
    expected = -sx.Alignment(-cost, smoothing=omega).log_partition()
    actual = SoftDTW(omega=omega)(x, y)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    if isinstance(omega, sx.Hard):
        paths = sx.Alignment(cost).enumerate_support()
        least = (paths * cost).sum((-2, -1)).amin(0)
        torch.testing.assert_close(actual, least)


@pytest.mark.parametrize("name", LOSSES)
def test_derivatives(name: str) -> None:
    x, y = randn(2, 3, 2).requires_grad_(), randn(2, 4, 2, seed=1).requires_grad_()
    lengths = torch.tensor([3, 2]), torch.tensor([2, 4])

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return LOSSES[name](x, y, lengths)

    assert gradcheck(loss, (x, y)) and gradgradcheck(loss, (x, y), fast_mode=True, atol=1e-4)


def test_derivatives_of_numbers_in_every_mode() -> None:
    """Series of numbers have a backward pass of their own."""
    x, y, loss = randn(3, 4, 1), randn(1, 5, 1, seed=1), SoftDTW()  # y is shared by the batch
    leaves = x.requires_grad_(), y.requires_grad_()
    assert gradcheck(loss, leaves, check_forward_ad=True) and gradgradcheck(loss, leaves)
    x, y = x.detach(), y.detach().repeat(3, 1, 1)

    def total(x: Tensor, y: Tensor) -> Tensor:
        return loss(x, y).sum()

    for which in (0, 1):
        exact = torch.func.grad(total, which)(x, y)
        torch.testing.assert_close(torch.func.jacfwd(total, which)(x, y), exact)
        torch.testing.assert_close(torch.func.vmap(torch.func.grad(total, which))(x, y), exact)


@pytest.mark.parametrize("name", LOSSES)
def test_ragged_is_item_by_item(name: str) -> None:
    x, y = randn(3, 6, 2), randn(3, 5, 2, seed=1)
    rows, columns = torch.tensor([6, 2, 1]), torch.tensor([3, 5, 1])
    for i in range(3):
        x[i, rows[i] :] = math.nan
        y[i, columns[i] :] = math.nan
    x.requires_grad_()
    whole = LOSSES[name](x, y, (rows, columns))
    for i in range(3):
        alone = LOSSES[name](x[i : i + 1, : rows[i]], y[i : i + 1, : columns[i]])
        torch.testing.assert_close(whole[i], alone[0], rtol=1e-10, atol=1e-10)
    (slope,) = torch.autograd.grad(whole.sum(), x)
    assert bool(slope.isfinite().all()) and not bool(slope[1, 2:].any())


def test_lengths_under_vmap() -> None:
    x, y = randn(3, 2, 4, 2), randn(3, 2, 5, 2, seed=1)
    lengths = torch.tensor([[4, 2], [3, 1], [1, 4]]), torch.tensor([[5, 2], [3, 3], [1, 4]])
    mapped = torch.vmap(lambda *one: SoftDTW()(one[0], one[1], one[2:]))(x, y, *lengths)
    torch.testing.assert_close(mapped, SoftDTW()(x, y, lengths))


def test_two_dimensions_with_two_meanings_are_refused() -> None:
    """A batch of series of numbers was taken for one series of many features."""
    x, loss = randn(8, 20), SoftDTW()
    one = loss(x[None], x[None])
    sizes = torch.tensor(8), torch.tensor(8)
    torch.testing.assert_close(loss(x, x, sizes), one[0])
    torch.testing.assert_close(torch.vmap(loss)(x[None], x[None]), one)
    gradients = torch.func.vmap(torch.func.grad(loss))(x[None], x[None])
    assert gradients.shape == (1, 8, 20)
    assert loss(x, x[None]).shape == (1,) and loss(x[:, :1], x[:, :1]).dim() == 0
    assert loss(x[..., None], x[..., None]).shape == (8,)
    for call in (
        lambda: loss(x, x),
        lambda: torch.func.grad(loss)(x, x),
        lambda: loss(x, x, (torch.full((8,), 5), torch.full((8,), 6))),
    ):
        with pytest.raises(ValueError, match=r"\(8, 20\).*x\[\.\.\., None\].*x\[None\]"):
            call()


def test_divergence() -> None:
    """Zero on equal series, not negative elsewhere, and with a zero gradient where it is zero."""
    loss = SoftDTW(0.3, divergence=True)
    for seed in range(20):
        x, y = randn(4, 7, 3, seed=seed), randn(4, 5, 3, seed=seed + 100)
        assert bool((loss(x, y) >= -1e-12).all())
        assert not bool(loss(x, x.clone()).any())
    x = randn(4, 7, 3).requires_grad_()
    (slope,) = torch.autograd.grad(loss(x, x.detach().clone()).sum(), x)
    assert slope.abs().max() < 1e-12


def test_far_from_the_origin() -> None:
    """A common shift of both series changes nothing, in either dtype."""
    x, y = randn(2, 8, 3), randn(2, 9, 3, seed=1)
    x, y = (x * 64).round() / 64, (y * 64).round() / 64
    expected = SoftDTW()(x, y)
    torch.testing.assert_close(SoftDTW()(x + 1e4, y + 1e4), expected, rtol=1e-11, atol=1e-11)
    single = SoftDTW()((x + 1e4).float(), (y + 1e4).float())
    torch.testing.assert_close(single, expected.float(), rtol=1e-5, atol=1e-5)
    near = SoftDTW(omega=sx.Hard())(x.float() * 100, x.float() * 100 + 1e-2)
    assert near.dtype == torch.float32 and bool((near - 8 * 3e-4).abs().max() < 1e-4)
    lengths = torch.tensor([3, 5]), torch.tensor([4, 9])  # nor does it to shorter ones
    expected = SoftDTW()(x, y, lengths)
    ragged = SoftDTW()(x + 1e6, y + 1e6, lengths)
    torch.testing.assert_close(ragged, expected, rtol=1e-11, atol=1e-11)


def test_dtypes_and_batches() -> None:
    x, y = randn(2, 3, 4, 2), randn(3, 5, 2, seed=1)
    loss = SoftDTW()
    assert loss(x, y).shape == (2, 3) and loss(x[0, :1], y[:1]).shape == (1,)
    torch.testing.assert_close(loss(x, y)[1, 2], loss(x[1, 2:], y[2:])[0])
    half = loss(x.bfloat16(), y.bfloat16())
    assert half.dtype == torch.float32
    torch.testing.assert_close(half.double(), loss(x.bfloat16().double(), y.bfloat16().double()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(loss(x.float(), y.float()), loss(x.float(), y.float()).float())
    assert "Shannon(gamma=1.0)" in repr(loss)


def test_small_gamma_is_hard() -> None:
    x, y = randn(3, 6, 2), randn(3, 5, 2, seed=1)
    torch.testing.assert_close(SoftDTW(1e-6)(x, y), SoftDTW(omega=sx.Hard())(x, y))


# -- averages ------------------------------------------------------------------------------------


def test_barycenter_is_stationary() -> None:
    series = [randn(n, 2, seed=n) for n in (5, 7, 6)]
    weights = torch.tensor([0.5, 0.2, 0.3], dtype=f64)
    z = sx.barycenter(series, weights, length=6, max_iter=500, tol=1e-12)
    assert z.shape == (6, 2) and z.dtype == f64
    z.requires_grad_()
    total = sum(w * SoftDTW()(z[None], x[None])[0] for w, x in zip(weights, series, strict=True))
    (slope,) = torch.autograd.grad(total, z)
    assert slope.abs().max() < 1e-4
    again = sx.barycenter(series, weights, length=6, max_iter=500, tol=1e-12)
    assert torch.equal(z.detach(), again)


def test_barycenter_of_equal_series() -> None:
    x = randn(6, 2).float()
    loss = SoftDTW(0.1, divergence=True)
    z = sx.barycenter(x.expand(3, 6, 2), loss=loss)
    assert z.dtype == torch.float32
    torch.testing.assert_close(z, x, rtol=1e-3, atol=1e-3)
    padded = torch.cat([x.expand(3, 6, 2), torch.full((3, 2, 2), math.nan)], 1)
    short = sx.barycenter(padded, loss=loss, lengths=torch.tensor([6, 6, 6]))
    torch.testing.assert_close(short, z)


def test_barycenter_takes_weights_of_a_list() -> None:
    series = [torch.tensor([[0.0], [1.0]]), torch.tensor([[2.0], [3.0]])]
    z = sx.barycenter(series, [1, 3])
    torch.testing.assert_close(z, sx.barycenter(series, torch.tensor([1.0, 3.0])))


@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize("omega", [sx.Shannon(), sx.Gini(), sx.Hard()], ids=str)
def test_a_band_without_a_path(omega: sx.Smoothing, d: int) -> None:
    """+inf and a gradient of zero, for that item alone."""
    x, y = torch.randn(2, 7, d, requires_grad=True), torch.randn(2, 5, d)
    lengths = torch.tensor([7, 5]), torch.tensor([5, 5])
    loss = SoftDTW(omega=omega, band=0)(x, y, lengths)
    assert loss[0] == math.inf and bool(loss[1].isfinite())
    loss.sum().backward()
    assert not bool(x.grad[0].any()) and bool(x.grad[1].any())


# -- errors --------------------------------------------------------------------------------------

x, y = torch.zeros(2, 3, 4), torch.zeros(2, 5, 4)
ERRORS: dict[str, tuple[Callable[[], object], list[str]]] = {
    "features": (lambda: SoftDTW()(x, y[..., :3]), ["SoftDTW", "(2, 3, 4)", "(2, 5, 3)", "(n, 1)"]),
    "numbers": (lambda: SoftDTW()(x[0, 0], y), ["SoftDTW", "x", "(..., n, d)", "(4,)"]),
    "integers": (lambda: SoftDTW()(x, y.long()), ["y", "floating point"]),
    "gamma": (lambda: SoftDTW(0.0), ["gamma", "positive"]),
    "both": (lambda: SoftDTW(0.1, omega=sx.Gini()), ["gamma=0.1", "Gini", "omega"]),
    "lengths": (lambda: SoftDTW()(x, y, torch.ones(2).long()), ["lengths", "pair"]),
    "length of y": (
        lambda: SoftDTW()(x, y, (torch.tensor([3, 3]), torch.tensor([5, 6]))),
        ["lengths of y", "between 1 and 5", "got 6", "item 1"],
    ),
    "band": (lambda: SoftDTW(band=-1)(x, y), ["band", "-1"]),
    "weights": (lambda: sx.barycenter(x, torch.ones(3)), ["weights", "(2,)", "(3,)"]),
    "negative": (lambda: sx.barycenter(x, torch.tensor([1.0, -1.0])), ["weights", "-1"]),
    "init": (lambda: sx.barycenter(x, init=y), ["init", "(length, 4)", "(2, 5, 4)"]),
    "length": (lambda: sx.barycenter(x, init=x[0], length=4), ["init", "(4, 4)", "(3, 4)"]),
    "series": (lambda: sx.barycenter(x[0]), ["series", "(k, n, d)", "(3, 4)"]),
    "4-d": (lambda: sx.barycenter(x[None]), ["series", "(k, n, d)", "(1, 2, 3, 4)"]),
    "one length": (
        lambda: sx.barycenter(x, lengths=torch.tensor([3])),
        ["lengths must be (2,)", "(1,)"],
    ),
    "a bad y": (
        lambda: SoftDTW()(x, torch.full((2, 5, 4), math.nan)),
        ["y[0, 0, 0] is nan", "finite"],
    ),
    "lists": (lambda: sx.barycenter([x]), ["series", "(n, d)", "(2, 3, 4)"]),
    "sizes": (lambda: sx.barycenter(x, lengths=torch.tensor([3, 4])), ["lengths", "got 4"]),
    "weights of words": (lambda: sx.barycenter(x, "ab"), ["weights", "tensor or lists", "'ab'"]),
    "few weights": (lambda: sx.barycenter(x, [1.0]), ["weights must be (2,)", "got (1,)"]),
    "nan weight": (lambda: sx.barycenter(x, [1.0, math.nan]), ["weights", "nan"]),
    "no length": (lambda: sx.barycenter(x, length=0), ["length must be at least 1", "got 0"]),
    "half a length": (lambda: sx.barycenter(x, length=1.5), ["length", "whole number", "1.5"]),
    "empty init": (lambda: sx.barycenter(x, init=x[0, :0]), ["init", "(length, 4)", "(0, 4)"]),
    "other features": (
        lambda: sx.barycenter([x[0], x[0, :, :3]]),
        ["series", "one d", "[(3, 4), (3, 3)]"],
    ),
    "lists of numbers": (lambda: sx.barycenter([[1.0, 2.0]]), ["series", "(n, d)", "list"]),
    "a number": (lambda: sx.barycenter(3), ["series", "tensor", "int"]),
    "no path": (
        lambda: sx.barycenter([x[0], y[0]], length=3, loss=SoftDTW(band=0)),
        ["band=0 leaves no path", "series 1", "at least 1"],
    ),
    "no path, half": (
        lambda: sx.barycenter([x[0], y[0]], [0.5, 0.5], loss=SoftDTW(band=0, divergence=True)),
        ["band=0 leaves no path", "series 0"],
    ),
    "overflow": (
        lambda: sx.barycenter(torch.tensor([[[0.0]], [[1e200]]], dtype=torch.float64)),
        ["objective is inf", "finite"],
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, words = ERRORS[name]
    with pytest.raises(ValueError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
