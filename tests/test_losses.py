"""The entmax loss: against its definition, cross-entropy, and at the edges.

Without a GPU the Triton kernels run under Triton's interpreter.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterator

import mpmath
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import cross_entropy, one_hot

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import structmax as sx
from structmax.losses import entmax_loss

module = importlib.import_module("structmax.losses.entmax_loss")  # the name is the function's too
DEVICES = {"cpu": "cpu", "gpu": "cuda" if torch.cuda.is_available() else "cpu"}
nan, inf, f64 = math.nan, math.inf, torch.float64
ALPHAS = [1.0, 1.0 + 1e-9, 1.3, 1.5, 2.0, 3.0]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=f64)


def omega(p: Tensor, alpha: float) -> Tensor:
    if alpha < 1.001:
        return torch.special.xlogy(p, p).sum(-1)
    return (p**alpha - p).sum(-1) / (alpha * (alpha - 1))


def definition(scores: Tensor, y: Tensor, alpha: float) -> Tensor:
    p = sx.entmax(scores, alpha)
    best = (p * scores).sum(-1) - omega(p, alpha)
    return best + omega(y, alpha) - (scores * y).sum(-1)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_definition(alpha: float) -> None:
    scores, target = randn(6, 5).requires_grad_(), torch.tensor([0, 1, 2, 3, 4, 0])
    y = one_hot(target, 5).to(f64)
    loss = entmax_loss(scores, target, alpha, reduction="none")
    torch.testing.assert_close(loss, definition(scores, y, alpha), atol=1e-7, rtol=0)
    (g,) = torch.autograd.grad(loss.sum(), scores)
    torch.testing.assert_close(g, sx.entmax(scores, alpha).detach() - y)

    soft = torch.softmax(randn(6, 5, seed=1), -1)
    loss = entmax_loss(scores, soft, alpha, reduction="none")
    torch.testing.assert_close(loss, definition(scores, soft, alpha), atol=1e-7, rtol=0)
    (g,) = torch.autograd.grad(loss.sum(), scores)
    torch.testing.assert_close(g, sx.entmax(scores, alpha).detach() - soft)
    assert (loss >= 0).all()


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_zero_at_its_own_answer(alpha: float) -> None:
    scores = 3 * randn(8, 6)
    loss = entmax_loss(scores, sx.entmax(scores, alpha), alpha, reduction="none")
    torch.testing.assert_close(loss, torch.zeros_like(loss), atol=1e-14, rtol=0)
    margin = torch.tensor([[1 / (alpha - 1), 0.0]], dtype=f64)
    assert entmax_loss(margin, torch.tensor([0]), alpha) == 0


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(reduction: str) -> None:
    scores = randn(2, 3, 5).requires_grad_()
    target = torch.tensor([[0, -100, 2], [4, 4, -100]])
    ours = entmax_loss(scores, target, 1.0, reduction=reduction)
    other = cross_entropy(scores.transpose(1, 2), target, reduction=reduction)
    torch.testing.assert_close(ours, other)
    g = [torch.autograd.grad(loss.sum(), scores)[0] for loss in (ours, other)]
    torch.testing.assert_close(*g)
    spread = 1e4 * randn(4, 5)
    torch.testing.assert_close(
        entmax_loss(spread, target[0, :1].expand(4), 1.0),
        cross_entropy(spread, target[0, :1].expand(4)),
    )


@pytest.mark.parametrize("alpha", ALPHAS)
def test_ignored_rows(alpha: float) -> None:
    """They count nowhere, whatever they hold."""
    scores, target = randn(4, 5), torch.tensor([1, 7, 3, 7])
    scores[1], scores[3, 0] = nan, -inf
    scores.requires_grad_()
    loss = entmax_loss(scores, target, alpha, ignore_index=7)
    kept = scores.detach()[[0, 2]]
    torch.testing.assert_close(loss, entmax_loss(kept, target[[0, 2]], alpha))
    (g,) = torch.autograd.grad(loss, scores)
    assert (g[[1, 3]] == 0).all() and not g.isnan().any()

    nothing = torch.full((4,), 7)
    assert entmax_loss(scores, nothing, alpha, ignore_index=7).isnan()
    total = entmax_loss(scores, nothing, alpha, ignore_index=7, reduction="sum")
    (g,) = torch.autograd.grad(total, scores)
    assert total == 0 and (g == 0).all()


@pytest.mark.parametrize("alpha", ALPHAS)
def test_masks(alpha: float) -> None:
    """Forbidden entries may hold anything; forbidden targets cost +inf."""
    scores, target = randn(4, 5), torch.tensor([1, 0, 3, 2])
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[0, 0] = mask[1, 3] = mask[3, 2] = False
    forbidden = torch.where(mask, scores, -inf)
    garbage = torch.where(mask, scores, nan).requires_grad_()
    loss = entmax_loss(garbage, target, alpha, reduction="none", mask=mask)
    assert torch.equal(loss, entmax_loss(forbidden, target, alpha, reduction="none"))
    assert loss[3] == inf and loss[:3].isfinite().all()
    alone = entmax_loss(scores[0, 1:], torch.tensor(0), alpha)
    torch.testing.assert_close(loss[0], alone)
    (g,) = torch.autograd.grad(loss.sum(), garbage)
    assert (g[~mask] == 0).all() and not g.isnan().any()

    soft = torch.softmax(forbidden, -1)
    soft[3] = torch.tensor([0.5, 0, 0.5, 0, 0])
    loss = entmax_loss(forbidden, soft, alpha, reduction="none")
    assert loss[3] == inf and loss[:3].isfinite().all()
    nothing = entmax_loss(torch.full((1, 5), -inf, dtype=f64), target[:1], alpha)
    assert nothing == inf


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0, 3.0])
def test_derivatives(alpha: float) -> None:
    scores = randn(5, 4).requires_grad_()
    target = torch.tensor([0, 3, 1, 2, -100])
    assert gradcheck(lambda s: entmax_loss(s, target, alpha), scores)
    assert gradgradcheck(lambda s: entmax_loss(s, target, alpha), scores)


@pytest.mark.parametrize("soft", [False, True])
def test_derivatives_of_alpha(soft: bool) -> None:
    y = torch.softmax(randn(4, 5, seed=1), -1) if soft else torch.tensor([0, 3, 1, 4])
    scores = randn(4, 5).requires_grad_()
    alpha = torch.tensor([[1.1], [1.5], [1.9], [2.6]], dtype=f64, requires_grad=True)
    assert gradcheck(lambda s, a: entmax_loss(s, y, a), (scores, alpha))
    assert gradgradcheck(lambda s, a: entmax_loss(s, y, a), (scores, alpha))
    at_one = torch.ones((), dtype=f64, requires_grad=True)
    (g,) = torch.autograd.grad(entmax_loss(scores, y, at_one), at_one)
    h = 1e-5
    above, below = (
        entmax_loss(scores.detach(), y, torch.tensor(1 + k * h, dtype=f64)) for k in (2, 0)
    )
    middle = entmax_loss(scores.detach(), y, torch.tensor(1 + h, dtype=f64))
    one_sided = (4 * middle - 3 * below - above) / (2 * h)
    torch.testing.assert_close(g, one_sided, atol=1e-8, rtol=1e-6)


def test_transforms_and_compile() -> None:
    scores, target = randn(3, 5), torch.tensor([0, 3, 1])

    def loss(scores: Tensor, target: Tensor) -> Tensor:
        return entmax_loss(scores, target)

    leaf = scores.clone().requires_grad_()
    (expected,) = torch.autograd.grad(entmax_loss(leaf, target, reduction="sum"), leaf)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(scores, target), expected)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda s: entmax_loss(s, target, reduction="sum"), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(torch.autograd.grad(compiled(leaf), leaf)[0], expected)
    hessian = torch.func.jacrev(torch.func.jacrev(loss))(scores[0], target[0])
    torch.testing.assert_close(hessian, torch.func.jacrev(sx.entmax)(scores[0]))


@pytest.mark.parametrize("compiled", [False, True], ids=["vmap", "compile"])
def test_a_class_that_is_none_gives_nan_where_it_cannot_be_read(compiled: bool) -> None:
    scores, target = randn(4, 5).requires_grad_(), torch.tensor([0, 7, -3, -100])

    def loss(scores: Tensor, target: Tensor) -> Tensor:
        return entmax_loss(scores, target, torch.tensor(1.5, dtype=f64), reduction="none")

    torch._dynamo.reset()
    run = torch.compile(loss, backend="aot_eager") if compiled else torch.func.vmap(loss)
    found = run(scores, target)
    assert found.isnan().tolist() == [False, True, True, False] and found[3] == 0
    (g,) = torch.autograd.grad(found.sum(), scores)
    assert g.isnan().all(-1).tolist() == [False, True, True, False]


def test_dtypes_and_shifts() -> None:
    scores, target = randn(4, 6).float(), torch.tensor([0, 1, 2, 3])
    half = scores.half().requires_grad_()
    loss = entmax_loss(half, target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, entmax_loss(half.detach().float(), target))
    assert torch.autograd.grad(loss, half)[0].dtype == torch.float16
    grid = (scores * 64).round() / 64
    torch.testing.assert_close(entmax_loss(grid + 1e4, target), entmax_loss(grid, target))
    assert entmax_loss(scores, target.to(torch.int32)).isfinite()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_bad_row_has_a_bad_gradient(bad: float) -> None:
    """Whichever way it is computed, and no other row has."""
    values = torch.tensor([[1.0, bad, 2.0], [0.0, 1.0, 0.5]])
    target = torch.tensor([0, 2])
    ways = {
        "kernel": lambda x: entmax_loss(x, target, reduction="none"),
        "alpha": lambda x: entmax_loss(x, target, torch.tensor(1.5), reduction="none"),
        "soft": lambda x: entmax_loss(x, torch.eye(3)[target], reduction="none"),
    }
    for name, way in ways.items():
        x = values.clone().requires_grad_()
        loss = way(x)
        (slope,) = torch.autograd.grad(loss.sum(), x)
        assert not loss[0].isfinite() and slope[0].isnan().all(), name
        assert loss[1].isfinite() and slope[1].isfinite().all(), name


def test_errors() -> None:
    scores, target = randn(4, 6), torch.tensor([0, 1, 2, 3])
    for call, words in [
        (lambda: entmax_loss(scores, target[:3]), ["target", "(4,)", "(3,)"]),
        (
            lambda: entmax_loss(scores, target.double()),
            ["distributions", "(4, 6)", "target.long()"],
        ),
        (lambda: entmax_loss(scores, target, reduction="max"), ["reduction", "'max'"]),
        (lambda: entmax_loss(scores, torch.tensor([0, 6, 1, 1])), ["target[1]", "6", "5"]),
        (lambda: entmax_loss(scores, target, alpha=0.3), ["alpha", "0.3"]),
        (lambda: entmax_loss(torch.ones(4, 0), target), ["(4, 0)"]),
        (lambda: entmax_loss(scores, target.bool()), ["target", "torch.bool"]),
        (lambda: entmax_loss(scores, target.to(torch.complex64)), ["target", "complex64"]),
        (lambda: entmax_loss(scores, [0, 1, 2, 3]), ["target", "list"]),
        (lambda: entmax_loss(scores, target, ignore_index=None), ["ignore_index", "None"]),
    ]:
        with pytest.raises(ValueError, match="entmax_loss") as caught:
            call()
        assert all(word in str(caught.value) for word in words), str(caught.value)


# -- one kernel for the loss and its gradient ------------------------------------------------------

KERNELS = [("cpu", a) for a in ALPHAS] + [("gpu", a) for a in [1.0, 1.05, 1.3, 1.5, 2.0]]
interpreted = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy


@pytest.fixture
def device(name: str) -> Iterator[str]:
    if name == "gpu":
        pytest.importorskip("triton")
    with sx.backend(name):
        yield DEVICES[name]


def composed(monkeypatch: pytest.MonkeyPatch, *args: object, **options: object) -> Tensor:
    """The loss in differentiable torch around the map alone."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "_has_kernel", lambda *_: False)
        return entmax_loss(*args, **options)


def both(
    patch: pytest.MonkeyPatch, scores: Tensor, *args: object, **options: object
) -> Iterator[tuple[Tensor, Tensor]]:
    """(fused, composed) of the loss and of its gradient, which rows weigh differently."""
    leaf = scores.detach().requires_grad_()
    losses = entmax_loss(leaf, *args, **options), composed(patch, leaf, *args, **options)
    assert "Fused" in losses[0].grad_fn.name() and "Fused" not in losses[1].grad_fn.name()
    yield losses
    weights = torch.linspace(0.5, 2, losses[0].numel()).to(losses[0]).view(losses[0].shape)
    yield tuple(torch.autograd.grad(loss, leaf, weights)[0] for loss in losses)


@interpreted
@pytest.mark.parametrize(("name", "alpha"), KERNELS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_fused(
    name: str, alpha: float, reduction: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = 1.5 * randn(2, 3, 9)
    scores[0, 0, :4], scores[0, 1], scores[1, 0, 1:] = -inf, nan, -inf
    target = torch.tensor([[5, -100, 0], [0, 3, 8]])
    mask = torch.ones(9, dtype=torch.bool)
    mask[2] = False
    wide = torch.full((2, 3, 18), nan, dtype=f64)
    wide[..., ::2] = scores
    for given, dtype, tolerance in [
        ((scores, target), torch.float32, 2e-6),
        ((wide[..., ::2], target, mask), f64, 1e-14),
        ((scores.mT.contiguous().mT, target), torch.float16, 2e-3),
        ((scores[1, 1], target[1, 1]), f64, 1e-14),
    ]:
        rows, classes, *masks = (t.to(device) for t in given)
        options = {"reduction": reduction, "mask": masks[0] if masks else None}
        for fused, other in both(monkeypatch, rows.to(dtype), classes, alpha, **options):
            assert fused.dtype == other.dtype and fused.shape == other.shape
            torch.testing.assert_close(fused, other, atol=tolerance, rtol=tolerance)


@interpreted
@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_fused_bfloat16(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scores, target = randn(7, 33).to(device, torch.bfloat16), torch.arange(7, device=device)
    (loss, other), (g, expected) = both(monkeypatch, scores, target, 1.5)
    torch.testing.assert_close(loss, other)
    assert g.dtype == torch.bfloat16
    torch.testing.assert_close(g, expected, atol=0, rtol=2 * 2**-7)  # rounded twice


@interpreted
@pytest.mark.parametrize(("name", "alpha"), KERNELS)
def test_fused_edges(name: str, alpha: float, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbidden targets, rows of −inf, NaN and +inf; where all rows are ignored."""
    scores, target = randn(9, 5), torch.tensor([0, 1, 2, 3, 4, 0, 1, 1, 2])
    scores[0, 0], scores[1] = -inf, -inf
    scores[2, 0], scores[3, 1], scores[4, 4] = nan, inf, inf
    scores[5, 2], scores[5, 0], scores[6, 0], scores[6, 1] = nan, -inf, inf, -inf
    scores, target = scores.to(device).requires_grad_(), target.to(device)
    loss = entmax_loss(scores, target, alpha, reduction="none")
    expected = composed(monkeypatch, scores, target, alpha, reduction="none")
    torch.testing.assert_close(loss, expected, equal_nan=True)
    assert torch.equal(loss[:7].isnan().cpu(), torch.tensor([0, 0, 1, 0, 1, 1, 0]).bool())
    (g,) = torch.autograd.grad(loss.sum(), scores)
    assert (g[scores == -inf] == 0).all() and (g[:2] == 0).all()
    bad = torch.zeros_like(g, dtype=torch.bool)
    bad[2:7] = True
    assert torch.equal(g.isnan(), bad & (scores != -inf))

    loss = entmax_loss(scores, target, alpha, ignore_index=2, reduction="none")
    (g,) = torch.autograd.grad(loss, scores, torch.full_like(loss, nan))
    assert (g[[0, 1, 2, 8]] == 0).all() and g[7].isnan().any()  # whatever their gradient is
    nothing = torch.full_like(target, 3)
    loss = entmax_loss(scores, nothing, alpha, ignore_index=3)
    (g,) = torch.autograd.grad(loss, scores)
    assert loss.isnan() and (g == 0).all()
    beyond = torch.tensor([0, 5, -1], device=device)
    kernel = module._kernels(scores).entmax_loss
    d, rows, _ = kernel(scores.detach()[[7, 8, 8]], beyond, alpha, -100)  # where nobody may look
    assert rows[0].isnan().tolist() == [False, True, True] and d[1:].isnan().all()


@interpreted
@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0])
@pytest.mark.parametrize("name", ["gpu"])
def test_fused_long_rows(
    name: str, alpha: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = importlib.import_module("structmax.maps.gpu")
    monkeypatch.setattr(gpu, "LARGEST", 32)
    monkeypatch.setattr(gpu, "TILE", 16)
    scores, target = randn(4, 50).to(device), torch.tensor([0, 49, -100, 17], device=device)
    scores[1, 20:40], scores[2] = -inf, nan
    for fused, other in both(monkeypatch, scores, target, alpha):
        torch.testing.assert_close(fused, other, atol=1e-14, rtol=1e-14)


@interpreted
@pytest.mark.parametrize(("name", "alpha"), [k for k in KERNELS if k[1] not in (1.0, 1 + 1e-9)])
def test_fused_second_order(
    name: str, alpha: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = (2 * randn(2, 2, 3)).to(device).requires_grad_()
    target = torch.tensor([[0, 2], [1, -100]], device=device)
    assert gradcheck(lambda s: entmax_loss(s, target, alpha), scores, check_batched_grad=True)
    assert gradgradcheck(lambda s: entmax_loss(s, target, alpha), scores)

    # p at the target is about 1e-16; of p − 1 nothing of it would be left
    edge = torch.tensor([0.0, 1e-8 - 1], dtype=f64) / (alpha - 1)
    edge = edge.to(device).requires_grad_()
    seconds = []
    for loss in (entmax_loss, lambda *args: composed(monkeypatch, *args)):
        one = torch.tensor(1, device=device)
        (g,) = torch.autograd.grad(loss(edge, one, alpha), edge, create_graph=True)
        seconds += torch.autograd.grad(g[1], edge)
    torch.testing.assert_close(*seconds, rtol=1e-9, atol=0)


@interpreted
@pytest.mark.parametrize(("name", "alpha"), KERNELS)
def test_fused_digits(name: str, alpha: float, device: str) -> None:
    """Against many digits, also where the scores are far apart or almost decided."""
    rows = [[0.3, -0.7, 1.1, 0.2, 0.0], [40.0, -1e4, 39.0, 7.0, 39.9], [6.0, 0.5, -1.0, 0.0, 0.1]]
    scores, target = torch.tensor(rows, dtype=f64), torch.tensor([1, 1, 0])
    loss = entmax_loss(scores.to(device), target.to(device), alpha, reduction="none")
    with mpmath.workdps(60):
        a = mpmath.mpf(alpha)
        for row, y, found in zip(rows, target.tolist(), loss.tolist()):
            z = [mpmath.mpf(v) - max(row) for v in row]
            low, high = mpmath.mpf(0), mpmath.log(5) + 1
            for _ in range(180):
                level = (low + high) / 2
                u = [1 + (a - 1) * (v - level) for v in z]
                if a == 1:
                    p = [mpmath.exp(v - level) for v in z]
                else:
                    p = [v ** (1 / (a - 1)) if v > 0 else mpmath.mpf(0) for v in u]
                low, high = (level, high) if sum(p) >= 1 else (low, level)
            powers = [q * mpmath.log(q) if a == 1 else (q**a - q) / (a * (a - 1)) for q in p]
            exact = sum(q * v for q, v in zip(p, z)) - sum(powers) - z[y]
            assert abs(mpmath.mpf(found) - exact) <= 4e-16 * max(1, exact), (row, found)


def test_where_the_kernel_is_used() -> None:
    scores, target = randn(3, 5).requires_grad_(), torch.tensor([0, 3, 1])
    loss = entmax_loss(scores, target, reduction="none")
    assert "Fused" in loss.grad_fn.name()
    loss *= 2  # as any other tensor
    assert torch.equal(loss.detach(), 2 * entmax_loss(scores, target, reduction="none").detach())
    for other in (
        entmax_loss(scores, target, torch.tensor(1.5)),
        entmax_loss(scores, one_hot(target, 5).double()),
    ):
        assert "Fused" not in other.grad_fn.name()
    target_before = target.clone()
    loss = entmax_loss(scores, target)
    target.zero_()  # nothing of the inputs is needed later
    (g,) = torch.autograd.grad(loss, scores, create_graph=True)
    (second,) = torch.autograd.grad(g.square().sum(), scores)
    (g,) = torch.autograd.grad(entmax_loss(scores, target_before), scores, create_graph=True)
    assert torch.equal(second, torch.autograd.grad(g.square().sum(), scores)[0])
    with pytest.raises(NotImplementedError, match="jvp"):  # and no zeros
        torch.func.jvp(lambda s: entmax_loss(s, target), (scores.detach(),), (scores.detach(),))
