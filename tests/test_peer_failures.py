"""Ways in which libraries for structured inference are known to fail, each a test by its name."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import structmax as sx
from structmax.estimators import IMLE, SPIGOT

inf, f32, f64 = math.inf, torch.float32, torch.float64
SIZES = ("lengths", "rows", "columns")


def randn(*shape: int, dtype: torch.dtype = f64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(a.double(), b.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shift", [-20.0, 90.0])
@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
def test_matrix_tree_at_shifted_scores(shift: float, dtype: torch.dtype) -> None:
    """Guards against exponentiating scores as they are: a determinant that underflows at −20 a word
    and overflows at +90, with NaN or clipped marginals."""
    scores = (randn(2, 13, 13) * 64).round() / 64
    plain = sx.DependencyTree(scores)
    moved = sx.DependencyTree((scores + shift).to(dtype))
    close(moved.marginals(), plain.marginals(), 1e-4 if dtype == f32 else 1e-9)
    close(moved.log_partition(), plain.log_partition() + 12 * shift, 1e-6)
    close(moved.marginals()[:, :, 1:].sum(1), torch.ones(2, 12), 1e-5)


def test_matrix_tree_of_a_long_sentence() -> None:
    """Guards against a determinant that overflows by its size alone."""
    n = 120
    tree = sx.DependencyTree(torch.zeros(n + 1, n + 1))
    close(tree.log_partition(), torch.tensor(math.log(n) * (n - 1), dtype=f64), 1e-4)
    close(tree.marginals()[0, 1:], torch.full((n,), 1 / n), 1e-5)


def test_forbidden_arcs_keep_no_mass() -> None:
    """Guards against −inf replaced by a large number, which leaves mass and gradients behind."""
    for projective in (False, True):
        scores = randn(2, 5, 5)
        scores[:, 1, 2] = scores[0, 0, 3] = -inf
        leaf = scores.clone().requires_grad_()
        tree = sx.DependencyTree(leaf, projective=projective)
        mu = tree.marginals()
        assert bool((mu[scores == -inf] == 0).all())
        mu.square().sum().backward()
        assert bool((leaf.grad[scores == -inf] == 0).all())
        assert bool(leaf.grad.isfinite().all())
        draws = tree.sample((500,))
        assert not bool(draws[:, scores == -inf].any())


def test_two_root_modes_in_one_process() -> None:
    """Guards against an option kept in a class or a cache, so that the second object gets the mode
    of the first."""
    scores = randn(4, 4)
    for projective in (False, True):
        single, multi = (
            sx.DependencyTree(scores, projective=projective, root=root)
            for root in ("single", "multi")
        )
        for _ in range(2):  # in turns
            close(single.marginals()[0].sum(), torch.ones(()))
            assert multi.marginals()[0].sum() > 1 + 1e-3
            assert single.log_partition() < multi.log_partition()
        assert len(single.enumerate_support()) < len(multi.enumerate_support())


def test_identical_chains_draw_different_samples() -> None:
    """Guards against one draw shared by equal items of a batch, or by samples."""
    chain = sx.LinearChain(torch.zeros(64, 10, 4), torch.zeros(4, 4))
    z = chain.sample((3,), generator=torch.Generator().manual_seed(0))
    rows = z.flatten(0, 1).flatten(1)
    assert len(torch.unique(rows, dim=0)) == len(rows)


@pytest.mark.parametrize("alpha", [1.0, 1.0 + 1e-9, 1.5, 2.0, 3.0])
def test_entmax_on_masked_rows(alpha: float) -> None:
    """Guards against −inf − (−inf) in a bisection or a sort, and against a division by α − 1."""
    x = randn(3, 6)
    x[0, 2:] = -inf
    x[1, 1:] = -inf
    leaf = x.clone().requires_grad_()
    p = sx.entmax(leaf, alpha)
    close(p.sum(-1), torch.ones(3))
    assert bool((p[x == -inf] == 0).all())
    close(p[0, :2], sx.entmax(x[0, :2], alpha))
    close(p[1, 0], torch.ones(()))
    (p**2).sum().backward()
    assert bool((leaf.grad[x == -inf] == 0).all()) and bool(leaf.grad.isfinite().all())
    if alpha < 1.1:
        close(p, x.softmax(-1), 1e-6)


def test_second_derivatives_of_soft_dtw() -> None:
    """Guards against a backward pass that is no function of the scores: second derivatives that are
    zero or an error."""
    x, y = randn(2, 4, 2).requires_grad_(), randn(2, 5, 2, seed=1).requires_grad_()
    for loss in (sx.losses.SoftDTW(gamma=0.7), sx.losses.SoftDTW(divergence=True)):
        assert gradcheck(loss, (x, y)) and gradgradcheck(loss, (x, y))
    total = sx.losses.SoftDTW()(x, y).sum()
    (g,) = torch.autograd.grad(total, x, create_graph=True)
    (h,) = torch.autograd.grad(g.square().sum(), x)
    assert bool((h.abs() > 1e-6).any())


@pytest.mark.parametrize("variant", ["euclidean", "cross-entropy", "exponentiated"])
def test_spigot_of_a_batch_is_item_by_item(variant: str) -> None:
    """Guards against a projection, or a step size, shared by the items of a batch."""
    scores, w = randn(3, 5, 5), randn(3, 5, 5, seed=1)
    lengths = torch.tensor([4, 2, 3])

    def gradient(items: slice) -> Tensor:
        leaf = scores[items].clone().requires_grad_()
        z = SPIGOT(step=2.0, variant=variant)(sx.DependencyTree(leaf, lengths[items]))
        (z * w[items]).sum().backward()
        return leaf.grad

    whole = gradient(slice(None))
    assert bool(whole.any())
    for i in range(3):
        close(gradient(slice(i, i + 1))[0], whole[i])


def test_adaptive_imle_scale() -> None:
    """Guards against a λ from the norms of the whole batch: it must be α‖θ‖/‖g‖ of each item, and α
    must move by the differences it finds."""
    scores, g = randn(2, 6) * torch.tensor([[1.0], [100.0]]), randn(2, 6, seed=1)
    estimator = IMLE(lam="adaptive", noise=None)
    lam = estimator.look(sx.Choice(scores), g)
    close(lam, scores.norm(dim=-1) / g.norm(dim=-1))
    before = float(estimator.look.alpha)
    leaf = scores.clone().requires_grad_()
    estimator.loss(sx.Choice(leaf), lambda z: (z * g).sum(-1)).sum().backward()
    assert float(estimator.look.alpha) != before
    # the same answer whatever the unit of the cost
    twins = []
    for unit in (1.0, 1e6):
        leaf = scores.clone().requires_grad_()
        cost = lambda z, unit=unit: unit * (z * g).sum(-1)  # noqa: E731
        IMLE(lam="adaptive", noise=None, scale=False).loss(sx.Choice(leaf), cost).sum().backward()
        twins.append(leaf.grad)
    close(*twins)


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e2, 1e4, 1e6])
def test_log_prob_is_never_positive(scale: float, dtype: torch.dtype) -> None:
    """Guards against log p = score − A with rounding that makes a probability larger than 1."""
    for seed in range(5):
        structures = [
            sx.LinearChain(randn(4, 20, 5, seed=seed).to(dtype) * scale, randn(5, 5).to(dtype)),
            sx.BinaryTree(randn(4, 12, 12, seed=seed).to(dtype) * scale),
            sx.DependencyTree(randn(4, 9, 9, seed=seed).to(dtype) * scale),
            sx.Alignment(randn(4, 9, 9, seed=seed).to(dtype) * scale),
        ]
        for s in structures:
            p = s.log_prob(s.argmax())
            assert bool((p <= 0).all()) and bool(p.isfinite().all())
            assert bool((s.log_prob(s.sample((4,))) <= 0).all())
        tags = structures[0].argmax().argmax(-1)
        assert bool((structures[0].log_prob(tags) <= 0).all())


def test_chains_of_a_single_position() -> None:
    """Guards against loops that start at the second position, and reshapes of nothing."""
    unary = randn(3, 1, 4).requires_grad_()
    for transition in (randn(4, 4), randn(3, 0, 4, 4)):
        chain = sx.LinearChain(unary, transition)
        close(chain.marginals()[:, 0], unary[:, 0].softmax(-1))
        close(chain.log_partition(), unary[:, 0].logsumexp(-1))
        close(chain.entropy(), torch.distributions.Categorical(logits=unary[:, 0]).entropy())
        assert chain.edge_marginals().shape == (3, 0, 4, 4)
        assert torch.equal(chain.argmax()[:, 0].argmax(-1), unary[:, 0].argmax(-1))
        assert chain.sample((2,)).shape == (2, 3, 1, 4)
        assert sx.losses.crf(chain, torch.tensor([[0], [1], [2]])).isfinite()


def test_no_item_of_maximal_length() -> None:
    """Guards against an answer read off at the last position of the padded batch."""
    lengths = torch.tensor([2, 3])
    pairs = [
        (sx.LinearChain(randn(2, 6, 3), randn(3, 3), lengths=lengths), lambda x, n: x[:n]),
        (sx.BinaryTree(randn(2, 6, 6), lengths), lambda x, n: x[:n, :n]),
        (sx.DependencyTree(randn(2, 7, 7), lengths), lambda x, n: x[: n + 1, : n + 1]),
        (
            sx.DependencyTree(randn(2, 7, 7), lengths, projective=True),
            lambda x, n: x[: n + 1, : n + 1],
        ),
        (sx.Alignment(randn(2, 6, 6), (lengths, lengths)), lambda x, n: x[:n, :n]),
        (sx.KSubset(randn(2, 6), 1, lengths), lambda x, n: x[:n]),
    ]
    for batch, cut in pairs:
        mu = batch.marginals()
        for i, n in enumerate(lengths.tolist()):
            tensors = {k: t for k, (t, _) in batch[i]._tensors().items() if k not in SIZES}
            first = next(iter(tensors))
            tensors[first] = cut(tensors[first], n)
            alone = batch[i]._rebuild(**tensors)
            close(batch.log_partition()[i], alone.log_partition())
            close(cut(mu[i], n), alone.marginals())
            close(mu[i].sum(), alone.marginals().sum())
