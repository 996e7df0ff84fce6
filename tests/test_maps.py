"""Every map of the table: against solvers, conditions of optimality, transforms and other backends.

Without a GPU the Triton kernels run under Triton's interpreter.
"""

from __future__ import annotations

import math
import os

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, jacfwd, jacrev, jvp, vmap

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from maps_table import MAPS, Row, residual_tsallis

import structmax as sx
from structmax.maps import gpu
from structmax.maps.argmax import argmax

nan, inf, f32, f64 = math.nan, math.inf, torch.float32, torch.float64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = f64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.fixture(params=MAPS)
def row(request: pytest.FixtureRequest) -> Row:
    return MAPS[request.param]


def fails(call, *words: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


# -- values --------------------------------------------------------------------------------------

KNOWN = {
    "sparsemax": (sx.sparsemax, [-2, 0, 0.5], [0, 0.25, 0.75]),
    "entmax-1.5": (sx.entmax, [-2, 0, 0.5], [0, 0.3260, 0.6740]),
    "entmax-1.33": (
        lambda x: sx.entmax(x, 1.33),
        [[-1, 0, 0.5], [1, 2, 3.5]],
        [[0.0460, 0.3276, 0.6264], [0.0026, 0.1012, 0.8963]],
    ),
    "normmax-2": (
        lambda x: sx.normmax(x, 2),
        [0, 0.25, 0.5, 0.75, 1],
        [0, 0.0239, 0.1746, 0.3254, 0.4761],
    ),
    "budgetmax-2": (
        lambda x: sx.budgetmax(x, 2),
        [0, 0.25, 0.5, 0.75, 1],
        [0, 0.125, 0.375, 0.625, 0.875],
    ),
    "argmax": (argmax, [1, 3, 3], [0, 1, 0]),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_values(name: str) -> None:
    function, x, expected = KNOWN[name]
    p = function(torch.tensor(x, dtype=f64))
    torch.testing.assert_close(p, torch.tensor(expected, dtype=f64), atol=6e-5, rtol=0)


def awkward(n: int = 7, dtype: torch.dtype = f64) -> dict[str, Tensor]:
    x = randn(n, dtype=f64)
    rows = {
        "random": x,
        "wide": 3 * x,
        "ties": (2 * x).round() / 2,
        "equal": torch.full((n,), 0.3, dtype=f64),
        "two": torch.cat([torch.zeros(2, dtype=f64), torch.full((n - 2,), -5.0, dtype=f64)]),
        "spread 1e-6": 1e-6 * x,
        "spread 1e6": 1e6 * x,
    }
    return {name: value.to(dtype) for name, value in rows.items()}


@pytest.mark.parametrize("case", awkward())
def test_scipy(row: Row, case: str) -> None:
    x = awkward()[case]
    if case == "spread 1e6" and row.total != 1:
        x = 1e-4 * x  # the solver's limit; further spreads are left to the conditions
    p = row.map(x)
    np.testing.assert_allclose(p, row.solve(x.numpy()), atol=row.solver_error)


def test_single_entry(row: Row) -> None:
    x = torch.tensor([[-3.0], [1e6]], dtype=f64)
    if row.total > 1:
        fails(lambda: row.map(x), "k = 2", "1 entries", "(2, 1)")
    else:
        assert torch.equal(row.map(x), torch.ones(2, 1, dtype=f64))


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
def test_optimal(row: Row, dtype: torch.dtype) -> None:
    """Σp and the conditions of optimality within a few ulp, up to 10⁵ entries."""
    ulp = torch.finfo(dtype).eps
    sizes = [awkward(n, dtype) for n in (2, 7, 500)]
    cases = [x for rows in sizes for x in rows.values()]
    cases += [scale * randn(100_000, dtype=dtype) for scale in (1.0, 1e-4, 1e4)]
    for x in cases:
        p = row.map(x)
        assert (p >= 0).all() and (p <= 1).all()
        p = p.double()
        z = x.double() - x.max().double()
        # each p is rounded once, and their number bounds what that does to the sum
        assert abs(p.sum() - row.total) <= 4 * ulp * row.total * max(1, len(x) ** 0.5 / 64)
        assert row.residual(z, p) <= 8 * ulp


@pytest.mark.parametrize("alpha", [1 + 1e-12, 1 + 1e-8, 1.0001, 1.05, 1.9, 2.1, 10.0, 100.0])
@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
def test_any_alpha_is_optimal(alpha: float, dtype: torch.dtype) -> None:
    ulp = torch.finfo(dtype).eps
    alpha = torch.tensor(alpha, dtype=dtype).item()
    x = torch.stack(
        [scale * randn(300, seed=i, dtype=dtype) for i, scale in enumerate([1, 0.1, 9])]
    )
    p = sx.entmax(x / max(1, alpha - 1), alpha).double()
    z = (x / max(1, alpha - 1)).double()
    z = z - z.amax(-1, keepdim=True)
    assert (p.sum(-1) - 1).abs().max() <= 4 * ulp
    assert residual_tsallis(z, p, alpha).max() <= 8 * ulp * max(1, alpha - 1)


@pytest.mark.parametrize("name", ["cpu", "gpu"])
@pytest.mark.parametrize("alpha", [1.3, 10.0])
def test_monotone(alpha: float, name: str) -> None:
    """p grows with its score, over 10⁴ steps."""
    steps = 10_000 if name == "cpu" or DEVICE.type == "cuda" else 500  # the interpreter is slow
    t = torch.linspace(-1.2, 1.2, steps + 1) / (alpha - 1)
    x = torch.stack([t, torch.zeros_like(t)], -1).to(DEVICE if name == "gpu" else "cpu")
    with sx.backend(name):
        p = sx.entmax(x, alpha)[:, 0]
    assert (p.diff() >= 0).all()
    assert p[0] == 0 and p[-1] == 1


def exact(x: list[float], alpha: mpmath.mpf) -> list[mpmath.mpf]:
    """Entmax in many digits."""
    rate, z = alpha - 1, [mpmath.mpf(v) - max(x) for v in x]

    def power(level: mpmath.mpf) -> list[mpmath.mpf]:
        if rate == 0:
            return [mpmath.exp(v - level) for v in z]
        u = [1 + rate * (v - level) for v in z]
        return [v ** (1 / rate) if v > 0 else mpmath.mpf(0) for v in u]

    low, high = mpmath.mpf(0), mpmath.log(len(x)) + 1
    for _ in range(400):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(power(middle)) >= 1 else (low, middle)
    return power(low)


@pytest.mark.parametrize("name", ["cpu", "naive", "gpu"])
def test_alpha_through_one(name: str) -> None:
    """Value, ∂p/∂α and ∂²p/∂α² have their limits at α = 1."""
    values = [0.3, -0.7, 1.1, 0.2, 0.0]
    x = torch.tensor(values, dtype=f64, device=DEVICE if name == "gpu" else "cpu")
    with mpmath.workdps(120), sx.backend(name):
        for a in (1.0, 1 + 1e-12, 1 + 1e-8, 1 + 1e-4, 1.01, 1.4, 1.8):
            h = mpmath.mpf("1e-20")
            below, here, above = (exact(values, mpmath.mpf(a) + k * h) for k in (0, 1, 2))
            slope = [(q - p) / h for p, q in zip(below, here)]
            bend = [(p - 2 * q + r) / h**2 for p, q, r in zip(below, here, above)]

            alpha = torch.tensor(a, dtype=f64, device=x.device)
            first = jacrev(lambda alpha: sx.entmax(x, alpha))
            for ours, expected, tolerance in [
                (sx.entmax(x, alpha), below, 1e-15),
                (sx.entmax(x, a), below, 1e-15),
                (first(alpha), slope, 1e-14),
                (jacrev(first)(alpha), bend, 1e-12),
            ]:
                error = max(abs(mpmath.mpf(u) - v) for u, v in zip(ours.tolist(), expected))
                assert error <= tolerance, (a, error)


@pytest.mark.parametrize("name", ["cpu", "naive", "gpu"])
def test_steep_gradient(name: str) -> None:
    """At a large α one curvature dwarfs the others: J₁₁ = 1/(1/s₁ + 1/s₂), s = p^{2−α}."""
    alpha = 60.0
    p1 = torch.tensor([0.9, 0.7, 0.6, 0.5001], dtype=f64)
    u = torch.stack([p1, 1 - p1], -1) ** (alpha - 1)
    x = (u / (alpha - 1)).to(DEVICE if name == "gpu" else "cpu").requires_grad_()
    with sx.backend(name):
        p = sx.entmax(x, alpha)
        (g,) = torch.autograd.grad(p[:, 0].sum(), x)
    s = torch.stack([p1, 1 - p1], -1) ** (2 - alpha)
    expected = 1 / (1 / s).sum(-1)
    torch.testing.assert_close(g[:, 0].cpu(), expected, rtol=1e-8, atol=0)
    torch.testing.assert_close(g.sum(-1), torch.zeros_like(g[:, 0]))


# -- masks, −inf, NaN ------------------------------------------------------------------------------


def check_masked(row: Row, x: Tensor, kept: Tensor, mask: Tensor | None = None) -> None:
    """p on what is kept is p of it alone; the rest is zero, and so is every gradient there."""
    x = x.clone().requires_grad_()
    p = row.map(x, mask=mask)
    g = randn(*x.shape, seed=5).to(x)
    (g_x,) = torch.autograd.grad(p, x, g, create_graph=True)
    assert (p[~kept] == 0).all() and (g_x[~kept] == 0).all()
    if g_x.requires_grad:  # sparsemax and budgetmax are piecewise linear
        (g_again,) = torch.autograd.grad(g_x.square().sum(), x)
        assert (g_again[~kept] == 0).all() and not g_again.isnan().any()
    for i in range(len(x)):
        if kept[i].any():
            alone = x[i, kept[i]].detach().requires_grad_()
            q = row.map(alone)
            torch.testing.assert_close(p[i, kept[i]], q, rtol=1e-9, atol=1e-12)
            (g_alone,) = torch.autograd.grad(q, alone, g[i, kept[i]])
            torch.testing.assert_close(g_x[i, kept[i]], g_alone, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["cpu", "naive"])
def test_masks(row: Row, name: str) -> None:
    mask = randn(12, 9, seed=1) > -0.3
    mask[3] = False
    mask[:, :2] |= mask.any(-1, keepdim=True)  # two entries at least, or none
    x = randn(12, 9)
    with sx.backend(name):
        check_masked(row, torch.where(mask, x, -inf), mask)
        for garbage in (nan, inf, 1e30, -inf) if name == "cpu" else (nan,):
            check_masked(row, torch.where(mask, x, garbage), mask, mask)


def test_mask_broadcasts(row: Row) -> None:
    x, mask = randn(4, 3, 5), torch.tensor([True, True, False, True, True])
    assert (row.map(x, mask=mask)[..., 2] == 0).all()
    per_row = torch.tensor([True, False, True]).view(3, 1)
    p = row.map(x, mask=per_row)
    torch.testing.assert_close(p.sum(-1), row.total * per_row.view(3).double().expand(4, 3))


@pytest.mark.parametrize("name", ["cpu", "naive", "gpu"])
def test_bad_rows_are_nan(row: Row, name: str) -> None:
    """NaN and +inf come out as NaN, in their row alone, where they are not masked."""
    x = randn(5, 6).to(DEVICE if name == "gpu" else "cpu")
    x[1, 2], x[1, 3], x[3, 0], x[3, 4] = nan, -inf, inf, -inf
    x.requires_grad_()
    with sx.backend(name):
        p = row.map(x)
        (g,) = torch.autograd.grad(p, x, randn(5, 6).to(x.device))
    bad = torch.zeros(5, 6, dtype=torch.bool)
    bad[1], bad[3] = True, True
    bad[1, 3] = bad[3, 4] = False
    assert torch.equal(p.isnan().cpu(), bad)
    assert torch.equal(g.isnan().cpu(), bad)


# -- shapes and dtypes -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(row: Row, dtype: torch.dtype) -> None:
    x = randn(5, 40, dtype=f32).to(dtype).requires_grad_()
    p = row.map(x)
    full = x.detach().float().requires_grad_()
    q = row.map(full)
    assert p.dtype == dtype and torch.equal(p, q.to(dtype))
    g = randn(5, 40, dtype=f32).to(dtype)
    (ours,), (other,) = torch.autograd.grad(p, x, g), torch.autograd.grad(q, full, g.float())
    assert ours.dtype == dtype and torch.equal(ours, other.to(dtype))


def test_autocast_changes_nothing(row: Row) -> None:
    x = randn(5, 8, dtype=f32).requires_grad_()
    weights = randn(5, 8, dtype=f32)
    plain = torch.autograd.grad((row.map(x) * weights).sum(), x, create_graph=True)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = torch.autograd.grad((row.map(x) * weights).sum(), x, create_graph=True)[0]
        assert row.map(x).dtype == f32
    assert torch.equal(plain, cast)


def test_dim(row: Row) -> None:
    x = randn(3, 4, 5)
    for dim in (0, 1, -2, 2):
        expected = row.map(x.movedim(dim, -1).contiguous()).movedim(-1, dim)
        assert torch.equal(row.map(x, dim=dim), expected)
        mask = torch.ones(3, 4, 5, dtype=torch.bool)
        mask.select(dim, 1).copy_(randn(3, 4, 5, seed=2).select(dim, 1) > 0)
        assert (row.map(x, dim=dim, mask=mask)[~mask] == 0).all()
    assert torch.equal(row.map(x[0, 0], dim=0), row.map(x[0, 0]))


def test_empty_batches(row: Row) -> None:
    x = torch.empty(0, 3, 4, requires_grad=True)
    p = row.map(x)
    assert p.shape == (0, 3, 4)
    p.sum().backward()
    assert x.grad.shape == x.shape


def test_layouts_and_inputs(row: Row) -> None:
    """Strided, expanded and leaf inputs give the same; nothing is written to them."""
    x = randn(6, 8)
    expected = row.map(x)
    strided = x.t().contiguous().t()
    wide = torch.empty(6, 16, dtype=f64)
    wide[:, ::2] = x
    for other in (strided, wide[:, ::2], torch.nn.Parameter(x)):
        before = other.detach().clone()
        assert torch.equal(row.map(other), expected)
        assert torch.equal(other, before)
    assert torch.equal(row.map(x[:1].expand(3, 8)), expected[:1].expand(3, 8))


def test_rows_do_not_depend_on_each_other(row: Row) -> None:
    """Many rows, over many threads, are the same bits as each alone."""
    x = randn(300, 200, dtype=f32)
    p = row.map(x)
    for i in (0, 17, 299):
        assert torch.equal(row.map(x[i]), p[i])


# -- derivatives -----------------------------------------------------------------------------------


def test_gradcheck(row: Row) -> None:
    x = (2 * randn(6, 5)).requires_grad_()
    assert gradcheck(row.map, x, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(row.map, x)


def test_gradcheck_alpha() -> None:
    x = (2 * randn(7, 4)).requires_grad_()
    alpha = torch.tensor([1.02, 1.2, 1.5, 1.7, 2.2, 2.9, 4.0], dtype=f64).view(7, 1)
    alpha.requires_grad_()
    assert gradcheck(sx.entmax, (x, alpha), check_forward_ad=True)
    assert gradgradcheck(sx.entmax, (x, alpha))


def test_fast_backward_is_the_formula(row: Row) -> None:
    """First-order gradients use a kernel, those to be differentiated the formula."""
    x = torch.cat([randn(9, 30), 1e3 * randn(3, 30, seed=1), 1e-3 * randn(3, 30, seed=2)])
    x.requires_grad_()
    g = randn(15, 30, seed=3)
    (fast,) = torch.autograd.grad(row.map(x), x, g)
    (formula,) = torch.autograd.grad(row.map(x), x, g, create_graph=True)
    torch.testing.assert_close(fast, formula, rtol=1e-9, atol=1e-10)


def test_transforms(row: Row) -> None:
    x, weights = randn(4, 6), randn(6, seed=1)

    def loss(x: Tensor) -> Tensor:
        return (row.map(x) * weights).sum()

    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(grad(loss)(x), expected)
    torch.testing.assert_close(vmap(grad(loss))(x), expected)
    torch.testing.assert_close(vmap(row.map, in_dims=1, out_dims=1)(x.t()), row.map(x).t())
    jacobian = jacrev(row.map)(x[0])
    torch.testing.assert_close(jacfwd(row.map)(x[0]), jacobian)
    p, tangent = jvp(row.map, (x[0],), (weights,))
    torch.testing.assert_close(tangent, jacobian @ weights)
    second = jacrev(jacrev(loss))(x[0])
    torch.testing.assert_close(jacfwd(jacrev(loss))(x[0]), second)
    torch.testing.assert_close(second, second.T)


def test_transforms_of_alpha() -> None:
    x, alpha = randn(3, 5), torch.tensor([1.3, 1.5, 2.5], dtype=f64)

    def weight(x: Tensor, alpha: Tensor) -> Tensor:
        return sx.entmax(x, alpha)[0]

    pairs = vmap(grad(weight, argnums=(0, 1)))(x, alpha)
    for i in range(3):
        each = grad(weight, argnums=(0, 1))(x[i], alpha[i])
        for ours, other in zip(pairs, each):
            torch.testing.assert_close(ours[i], other)
    shared = vmap(grad(weight, argnums=1), in_dims=(0, None))(x, alpha[0])
    torch.testing.assert_close(shared[0], pairs[1][0])


@pytest.mark.parametrize("masked", [False, True])
def test_compile(row: Row, masked: bool) -> None:
    mask = randn(4, 6, seed=3) > -2 if masked else None

    def loss(x: Tensor) -> Tensor:
        return (row.map(x, dim=0, mask=mask) ** 2).sum()

    torch._dynamo.reset()
    x = randn(4, 6).requires_grad_()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    ours, plain = compiled(x), loss(x)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(torch.autograd.grad(ours, x)[0], torch.autograd.grad(plain, x)[0])


@pytest.mark.parametrize("layout", ["plain", "strided", "empty", "nested"])
def test_opcheck(row: Row, layout: str) -> None:
    x, g = randn(4, 6), randn(4, 6, seed=1)
    change = {
        "plain": lambda t: t,
        "strided": lambda t: t.t().contiguous().t(),
        "empty": lambda t: t[:0],
        "nested": lambda t: t.view(2, 2, 6),
    }[layout]
    x, g = change(x), change(g)
    torch.library.opcheck(row.op.op, (x, [], row.options))
    torch.library.opcheck(row.op.backward_op, (row.map(x), g, [], row.options))


def test_opcheck_alpha() -> None:
    op, x, alpha = MAPS["entmax-3"].op, randn(4, 6), torch.rand(4, 1, dtype=f64) + 1
    torch.library.opcheck(op.op, (x, [alpha], []))
    torch.library.opcheck(op.backward_op, (sx.entmax(x, alpha), x, [alpha], []))


# -- invariances -----------------------------------------------------------------------------------


def test_invariances(row: Row) -> None:
    x = (randn(8, 12) * 64).round() / 64  # shifts are then exact
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    p = row.map(x)
    torch.testing.assert_close(row.map(x[:, order]), p[:, order], rtol=1e-12, atol=1e-14)
    for shift in (1e4, -1e4):
        torch.testing.assert_close(row.map(x + shift), p, rtol=1e-9, atol=1e-9)
        exactly = (x + shift).float().double() == x + shift
        assert exactly.all()
        torch.testing.assert_close(row.map((x + shift).float()), p.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shift", [2.0**16, 2.0**20, -(2.0**20)])
def test_large_offsets(row: Row, shift: float) -> None:
    """Which entries can have weight is decided after the largest is subtracted."""
    x = (randn(64, 40) * 8).round() / 4
    for dtype, tolerance in ((f64, 1e-9), (f32, 1e-5)):
        moved = (x + shift).to(dtype)
        assert (moved.double() == x + shift).all()
        expected = row.map(x).to(dtype)
        torch.testing.assert_close(row.map(moved), expected, rtol=tolerance, atol=tolerance)


# -- backends --------------------------------------------------------------------------------------


def extreme(dtype: torch.dtype) -> Tensor:
    x = randn(16, 37)
    x[1], x[4] = -inf, 0.0
    x[5], x[6], x[11], x[12] = 1e-6 * x[5], 1e6 * x[6], 30 * x[11], 0.1 * x[12]
    x[7, 5:], x[9, 2:] = -inf, -inf
    x[8] += 1e4
    x[10] = x[10].round()
    x[13], x[14] = 1e3 * x[13], x[14] - 1e4
    return x.to(dtype)


def values_and_gradients(row: Row, x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    x = x.detach().clone().requires_grad_()
    with sx.backend(name):
        p = row.map(x)
        (g,) = torch.autograd.grad(p, x, randn(*x.shape, seed=9).to(x))
    return p.detach().cpu(), g.cpu()


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
def test_naive_and_cpu(row: Row, dtype: torch.dtype) -> None:
    x = extreme(dtype)
    compare(values_and_gradients(row, x, "cpu"), values_and_gradients(row, x, "naive"), dtype)


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
def test_gpu(row: Row, dtype: torch.dtype) -> None:
    x = extreme(dtype)
    ours = values_and_gradients(row, x.to(DEVICE), "gpu")
    compare(ours, values_and_gradients(row, x, "cpu"), dtype)


@pytest.fixture
def short_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """No row fits on chip."""
    monkeypatch.setattr(gpu, "LARGEST", 8)
    monkeypatch.setattr(gpu, "TILE", 16)


def test_gpu_in_tiles(row: Row, short_tiles: None) -> None:
    x = extreme(f32)[[0, 1, 4, 6, 7, 8]]
    ours = values_and_gradients(row, x.to(DEVICE), "gpu")
    compare(ours, values_and_gradients(row, x, "cpu"), f32)


@pytest.mark.parametrize("alpha", [2.5, 3.0, 10.0])
def test_gpu_search_among_few(alpha: float) -> None:
    x = randn(6, 1500, seed=3).to(f32)
    x[1] = 0.0  # these two have more candidates than fit
    x[2, :300] = 5 + 1e-4 * x[2, :300]
    x[3], x[4, 1:] = -torch.inf, -torch.inf
    x[5] = x[5] / 100
    with sx.backend("gpu"):
        p = sx.entmax(x.to(DEVICE), alpha).cpu()
    torch.testing.assert_close(p, sx.entmax(x, alpha), atol=2e-7, rtol=1e-5)


def test_alpha_of_each_row_in_tiles(short_tiles: None) -> None:
    check_alphas("gpu", extreme(f32)[[0, 1, 6, 7, 8]], [1.0, 1.3, 2.0, 3.0, 1.05])


@pytest.mark.parametrize("name", ["naive", "gpu"])
@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
def test_alpha_of_each_row(name: str, dtype: torch.dtype) -> None:
    alphas = [1, 1 + 1e-7, 1.05, 1.25, 1.5, 1.7, 2, 2.5, 4, 1.3, 3, 1.2, 1.9, 1.01, 2, 6]
    check_alphas(name, extreme(dtype), alphas)


def check_alphas(name: str, x: Tensor, alphas: list[float]) -> None:
    results = []
    for backend in ("cpu", name):
        place = DEVICE if backend == "gpu" else "cpu"
        scores = x.to(place).requires_grad_()
        alpha = torch.tensor(alphas, dtype=x.dtype, device=place).view(-1, 1).requires_grad_()
        with sx.backend(backend):
            p = sx.entmax(scores, alpha)
            g = torch.autograd.grad(p, [scores, alpha], randn(*x.shape, seed=9).to(scores))
        results.append([t.detach().cpu() for t in (p, *g)])
    compare(*results, x.dtype)


def compare(ours, other, dtype: torch.dtype) -> None:
    """Values, and gradients relative to the largest of their row (curvatures grow as 1/p)."""
    tolerance = 1e-9 if dtype == f64 else 1e-5
    p, *gradients = ours
    q, *expected = other
    # a normmax of degree 3 takes the root of an error at the edge
    torch.testing.assert_close(p, q, rtol=0, atol=max(tolerance, 1e-7))
    for g, h in zip(gradients, expected):
        inner = ((p > 0) == (q > 0)).all(-1, keepdim=True)  # at a kink, rounding chooses the side
        scale = h.abs().amax(-1, keepdim=True).clamp(min=1)
        error = torch.where(inner, (g - h).abs() / scale, 0.0)
        assert error.max() <= 100 * tolerance, error.amax(-1)


# -- entmax meets its relatives; smoothed_max ------------------------------------------------------


@pytest.mark.parametrize("name", ["naive", "cpu", "gpu"])
def test_second_derivatives_of_large_alpha_are_numbers(name: str) -> None:
    g, u = randn(8), randn(8)

    def second(scores: Tensor) -> Tensor:
        x = scores.requires_grad_()
        (slope,) = torch.autograd.grad((sx.entmax(x, 30.0) * g.to(x)).sum(), x, create_graph=True)
        return torch.autograd.grad((slope * u.to(x)).sum(), x)[0]

    with sx.backend(name):
        wide = second(torch.zeros(8, dtype=f64))
        assert wide.isfinite().all() and (wide.abs() > 1e50).any()
        last = torch.finfo(torch.float32).max  # what is beyond float32 is its last number
        assert torch.equal(second(torch.zeros(8)), wide.clamp(-last, last).float())
        x = 0.01 * g
        torch.testing.assert_close(second(x.float()), second(x).float(), rtol=1e-2, atol=1e-3)


def test_special_alphas() -> None:
    x = randn(5, 9)
    torch.testing.assert_close(sx.entmax(x, 1.0), torch.softmax(x, -1))
    torch.testing.assert_close(sx.entmax(x, 2.0), sx.sparsemax(x))
    torch.testing.assert_close(sx.budgetmax(x, 1), sx.sparsemax(x))
    torch.testing.assert_close(sx.entmax(x, 1e5), argmax(x))
    heads = torch.tensor([1.0, 2.0, 1.5], dtype=f64).view(3, 1, 1)
    p = sx.entmax(x.expand(2, 3, 5, 9), heads)
    torch.testing.assert_close(p[1, 1], sx.sparsemax(x))
    torch.testing.assert_close(p[0, 2], sx.entmax(x))
    first = sx.entmax(x, torch.full((1, 9), 1.5, dtype=f64), dim=0)
    torch.testing.assert_close(first, sx.entmax(x, dim=0))


OMEGAS = [sx.Hard(), sx.Shannon(0.7), sx.Gini(2.0), sx.Tsallis(1.5, 1.3), sx.Tsallis(3.0)]


@pytest.mark.parametrize("omega", OMEGAS, ids=str)
def test_smoothed_max(omega: sx.Smoothing) -> None:
    """The value of the definition; its gradient is the map, at second order the map's."""
    x = randn(6, 5).requires_grad_()
    value = sx.smoothed_max(x, omega)
    torch.testing.assert_close(value, omega.max(x))
    (p,) = torch.autograd.grad(value.sum(), x)
    torch.testing.assert_close(p, omega.argmax(x))
    assert gradcheck(lambda x: sx.smoothed_max(x, omega), x)
    assert gradgradcheck(lambda x: sx.smoothed_max(x, omega), x)
    hessian = jacrev(jacrev(lambda x: sx.smoothed_max(x, omega)))(x[0].detach())
    torch.testing.assert_close(hessian, jacrev(omega.argmax)(x[0].detach()), atol=1e-6, rtol=0)
    each = vmap(grad(lambda x: sx.smoothed_max(x, omega)))(x.detach())
    torch.testing.assert_close(each, p)


@pytest.mark.parametrize("omega", OMEGAS, ids=str)
def test_smoothed_max_masks_shifts_and_types(omega: sx.Smoothing) -> None:
    x = randn(3, 4, 5)
    mask = randn(3, 4, 5, seed=1) > 0
    mask[0, :, 0] = False
    garbage = torch.where(mask, x, nan).requires_grad_()
    value = sx.smoothed_max(garbage, omega, dim=1, mask=mask)
    expected = omega.max(torch.where(mask, x, -inf).movedim(1, -1))
    torch.testing.assert_close(value, expected)
    assert value[0, 0] == -inf
    (g,) = torch.autograd.grad(value[value > -inf].sum(), garbage)
    assert (g[~mask] == 0).all() and not g.isnan().any()
    y = (x * 64).round() / 64
    moved = sx.smoothed_max((y + 1e4).float(), omega) - 1e4
    torch.testing.assert_close(moved, sx.smoothed_max(y, omega).float(), atol=1e-3, rtol=0)
    assert sx.smoothed_max(x.half(), omega).dtype == f32
    compiled = torch.compile(
        lambda x: sx.smoothed_max(x, omega).sum(), fullgraph=True, backend="aot_eager"
    )
    torch._dynamo.reset()
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(compiled(leaf), leaf)[0], omega.argmax(x))


# -- errors ----------------------------------------------------------------------------------------


def test_errors(row: Row) -> None:
    fails(lambda: row.map(torch.tensor(1.0)), "0-d", "x.view(1)")
    fails(lambda: row.map(torch.tensor([1, 2])), "floating", "int64", "x.float()")
    fails(lambda: row.map([1.0]), "tensor", "list")
    fails(lambda: row.map(torch.ones(2, 0)), "(2, 0)")
    fails(lambda: row.map(torch.ones(2, 3), dim=2), "dim", "(2, 3)", "got 2")
    fails(lambda: row.map(torch.ones(2, 3), mask=torch.ones(2, 3)), "mask", "float32")
    wide = torch.ones(4, 2, 3, dtype=torch.bool)
    fails(lambda: row.map(torch.ones(2, 3), mask=wide), "mask", "(2, 3)", "(4, 2, 3)")


def test_errors_of_parameters() -> None:
    x = randn(3, 4)
    fails(lambda: sx.entmax(x, 0.5), "entmax", "alpha", "0.5")
    fails(lambda: sx.entmax(x, nan), "alpha", "nan")
    fails(lambda: sx.entmax(x, inf), "alpha", "inf")
    bad = torch.tensor([[1.5], [0.9], [2.0]], dtype=f64)
    fails(lambda: sx.entmax(x, bad), "alpha", "0.9", "[1, 0]", "softplus")
    fails(lambda: sx.entmax(x, torch.full((3, 4), 1.5)), "alpha", "(3, 1)", "(3, 4)")
    fails(lambda: sx.normmax(x, 1.0), "normmax", "alpha", "1.0")
    fails(lambda: sx.budgetmax(x, 5), "budgetmax", "k = 5", "4 entries")
    fails(lambda: sx.budgetmax(x, -1), "k", "-1")
    x[1, :2] = -inf
    fails(lambda: sx.budgetmax(x, 3), "row 1", "2 entries", "k = 3")
    mask = torch.ones(2, 3, 4, dtype=torch.bool)
    mask[1, 2, 1:] = False
    fails(lambda: sx.budgetmax(randn(2, 3, 4), 2, mask=mask), "row (1, 2)", "1 entries")
    fails(lambda: sx.smoothed_max(x, 0.5), "omega", "0.5", "sx.Gini")


def test_parameters_on_another_device() -> None:
    alpha = torch.full((3, 1), 1.5, device="meta")
    fails(lambda: sx.entmax(randn(3, 4), alpha), "alpha is on meta", "alpha.to(x.device)")


def test_rows_that_lose_a_level_at_a_time() -> None:
    """Each round of dropping what is below the threshold takes no more than the lowest level."""
    levels = [(-(0.9**j), 2**16 >> j) for j in range(16)]
    x = torch.cat([torch.full((count,), value, dtype=f64) for value, count in levels])
    p = sx.sparsemax(x)
    with sx.backend("naive"):
        torch.testing.assert_close(p, sx.sparsemax(x))
    assert abs(float(p.sum()) - 1) < 1e-12


def test_gradient_of_alpha_in_bad_rows() -> None:
    x = randn(2, 4)
    x[1, 2] = nan
    alpha = torch.full((2, 1), 1.5, dtype=f64, requires_grad=True)
    (g,) = torch.autograd.grad(sx.entmax(x, alpha)[:, 0].sum(), alpha)
    assert g[1].isnan() and g[0].isfinite()


def test_bad_alpha_is_nan_where_nobody_looks() -> None:
    x, alpha = randn(3, 4), torch.tensor([1.5, 0.5, nan], dtype=f64)
    for name in ("cpu", "naive", "gpu"):
        with sx.backend(name):
            p = vmap(sx.entmax)(x.to(DEVICE if name == "gpu" else "cpu"), alpha)
        assert p[1:].isnan().all() and not p[0].isnan().any()
