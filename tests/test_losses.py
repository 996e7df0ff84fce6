"""The entmax loss: against its definition, cross-entropy, and at the edges."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import cross_entropy, one_hot

import structmax as sx
from structmax.losses import entmax_loss

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

    soft = torch.where(mask, torch.softmax(scores, -1), 0.0)
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
    ]:
        with pytest.raises(ValueError, match="entmax_loss") as caught:
            call()
        assert all(word in str(caught.value) for word in words), str(caught.value)
