"""What estimators must be equal to: each other, closed forms, and enumeration."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from table import ROWS, f64, randn
from test_errors import fails
from test_incremental import MergePolicy, StackPolicy
from torch import Tensor

import structmax as sx
from structmax import estimators as est
from structmax.estimators import noise
from structmax.estimators.base import call_cost
from structmax.testing.contract import _make, _scores, _with_scores

EULER = 0.5772156649015329


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradient(estimator: est.Estimator, s: sx.Structure, cost: Any) -> list[Tensor]:
    leaves = [t.requires_grad_() for t in _scores(s)]
    loss = estimator.loss(_with_scores(s, leaves), cost).sum()
    return list(torch.autograd.grad(loss, leaves, materialize_grads=True))


def linear(s: sx.Structure, scale: float = 2.0) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A linear cost, and its slope g = ∂L/∂z."""
    g = scale * torch.randn(*s.batch_shape, *s.event_shape, dtype=f64, generator=seeded(1))
    return g, lambda z: (z * g).flatten(z.dim() - len(s.event_shape)).sum(-1)


def close(a: Any, b: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def tree(batch: int = 3, n: int = 4, **options: Any) -> sx.DependencyTree:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return sx.DependencyTree(randn(batch, n + 1, n + 1), **options)


SEVERAL = ["choice/shannon", "chain-shared/shannon", "nonprojective/shannon", "subset/shannon"]


# -- argmax and its surrogates -------------------------------------------------------------------


@pytest.mark.parametrize("name", [*SEVERAL, "dtw-moves/shannon", "grid-all/hard"])
def test_imle_without_noise_is_black_box(name: str) -> None:
    s = _make(ROWS[name])
    _, cost = linear(s)
    for lam in (0.5, 3.0):
        one = gradient(est.IMLE(lam=lam, noise=None), s, cost)
        close(one, gradient(est.BlackBox(lam), s, cost), 0)
        three = gradient(est.IMLE(lam=lam, samples=3, noise=None), s, cost)
        close(three, one)
        unscaled = gradient(est.IMLE(lam=lam, noise=None, scale=False), s, cost)
        close(unscaled, [lam * g for g in one])
    assert any(bool(g.any()) for g in one)


def test_imle_by_hand() -> None:
    """(1/λS) Σᵢ [MAP(θ + εᵢ) − MAP(θ + εᵢ − λ ∂L/∂zᵢ)] with the slope of each sample's cost."""
    scores = randn(2, 5).requires_grad_()
    s, target = sx.KSubset(scores, 2), randn(2, 5)
    estimator = est.IMLE(lam=2.0, samples=4, noise="sum-of-gamma", generator=seeded())
    loss = estimator.loss(s, lambda z: ((z - target) ** 2).sum(-1)).sum()
    (found,) = torch.autograd.grad(loss, scores)
    epsilon = noise.draw("sum-of-gamma", s, 4, seeded())
    z = torch.stack([sx.KSubset(scores + e, 2).argmax() for e in epsilon])
    moved = scores + epsilon - 2.0 * 2 * (z - target)
    other = torch.stack([sx.KSubset(m, 2).argmax() for m in moved])
    close(found, ((z - other) / 2.0).mean(0))
    assert bool(found.any())


def test_adaptive_imle() -> None:
    """λ is that of each item's own norms, and what divides; α follows the number of changes."""
    s = sx.LinearChain(randn(3, 4, 3), randn(3, 3), lengths=torch.tensor([4, 2, 3]))
    w, _ = linear(s)
    scale = torch.tensor([1.0, 1e-3, 1e3], dtype=f64)[:, None, None]  # items of different slopes
    estimator = est.IMLE(lam="adaptive", noise=None)
    found = gradient(estimator, s, lambda z: (z * w * scale).sum((-1, -2)))
    inside = torch.arange(4)[:, None] < torch.tensor([4, 2, 3])[:, None, None]
    for i in range(3):
        theta, g = (torch.where(inside[i], t[i], 0.0) for t in (s.unary, w * scale))
        lam = float(theta.norm() / g.norm())
        alone = gradient(est.BlackBox(lam), s[i], lambda z, g=g: (z * g).sum((-1, -2)))
        close(found[0][i], alone[0])
    assert bool(found[0].any())
    nonzeros = sum(int((g != 0).sum()) for g in found[:1]) / 3
    assert (estimator.look.alpha < 1) == (nonzeros > 1)
    still = est.IMLE(lam="adaptive", noise=None)
    gradient(still, s, lambda z: 0.0 * z.sum((-1, -2)))
    assert still.look.alpha > 1
    with pytest.raises(ValueError, match=r'lam="adaptive" .* needs oracle="argmax"'):
        est.IMLE(lam="adaptive", oracle="marginals")  # whose λ would never change


@pytest.mark.parametrize(
    "make",
    [
        lambda: est.IMLE(lam="adaptive"),
        lambda: est.Reinforce(baseline="ema"),
        lambda: est.PPO(samples=2, baseline="ema", normalize=True),
    ],
)
def test_what_an_estimator_learned_is_resumed(make: Callable[[], Any]) -> None:
    """A model that holds it has it in its state: training goes on with the same losses."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = torch.nn.Parameter(torch.zeros(8, 6, dtype=f64))
            self.estimator = make()

    target = 5 * torch.rand(8, 6, dtype=f64, generator=seeded(1))

    def train(model: Model, steps: int) -> list[Tensor]:
        losses = []
        for _ in range(steps):
            choose = sx.KSubset(model.scores, 2)
            loss = model.estimator.loss(choose, lambda z: ((z - target) ** 2).sum(-1)).sum()
            (g,) = torch.autograd.grad(loss, model.scores)
            model.scores.data -= 0.01 * g
            losses += [loss.detach(), g]
        return losses

    model = Model()
    train(model, 20)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    assert len(state) > 1
    torch.manual_seed(1)
    wanted = train(model, 5)
    for forgets in (False, True):
        again = Model()
        again.load_state_dict(state)
        if forgets:
            again.estimator = make()
        torch.manual_seed(1)
        found = train(again, 5)
        same = all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert same != forgets


def test_imle_marginals_tends_to_marginals() -> None:
    for name in ("chain-shared/shannon", "nonprojective/shannon-0.5", "binary-tree/shannon"):
        s = _make(ROWS[name])
        _, cost = linear(s)
        exact = gradient(est.Marginals(), s, cost)
        errors = []
        for lam in (1e-2, 1e-3, 1e-4):
            near = gradient(est.IMLE(lam=lam, noise=None, oracle="marginals"), s, cost)
            pairs = zip(near, exact, strict=True)
            errors.append(max(float((a - b).abs().max()) for a, b in pairs))
        assert errors[-1] < 1e-3 and errors[0] / errors[1] > 8 and errors[1] / errors[2] > 8


def test_black_box_by_hand() -> None:
    s = tree()
    g, cost = linear(s)
    (found,) = gradient(est.BlackBox(0.7), s, cost)
    other = sx.DependencyTree(s.scores - 0.7 * g).argmax()
    close(found, (s.argmax() - other) / 0.7)
    chain = sx.LinearChain(randn(2, 4, 3), randn(3, 3))  # whose transitions count those of both
    g, cost = linear(chain, 10.0)
    z, other = chain.argmax(), sx.LinearChain(chain.unary - 0.7 * g, chain.transition).argmax()
    pairs = [torch.einsum("bis,bit->st", y[:, :-1], y[:, 1:]) for y in (z, other)]
    close(
        gradient(est.BlackBox(0.7), chain, cost), [(z - other) / 0.7, (pairs[0] - pairs[1]) / 0.7]
    )
    assert bool((pairs[0] != pairs[1]).any())


def test_straight_through_by_marginals_and_softmax() -> None:
    """For a linear cost the Hessian-vector product is that of the marginals."""
    for name in ("chain-shared/shannon", "dtw-moves/shannon", "nonprojective/shannon"):
        s = _make(ROWS[name])
        _, cost = linear(s)
        exact = gradient(est.Marginals(), s, cost)
        close(gradient(est.StraightThrough("marginals"), s, cost), exact)
    free = sx.LinearChain(randn(2, 4, 3), torch.zeros(3, 3, dtype=f64))  # then tags are independent
    _, cost = linear(free)
    soft = gradient(est.StraightThrough("softmax"), free, cost)
    close(soft[0], gradient(est.Marginals(), free, cost)[0])
    assert not bool(soft[1].any())
    choice = sx.Choice(randn(2, 4))
    g, cost = linear(choice)
    close(
        gradient(est.StraightThrough("softmax"), choice, cost),
        gradient(est.Marginals(), choice, cost),
    )
    arcs = tree(lengths=torch.tensor([4, 2, 3]))
    p = arcs.local_softmax()
    heads = torch.tensor([4, 2, 3])
    for i in range(3):
        close(p[i, :, 1 : heads[i] + 1].sum(0), torch.ones(int(heads[i]), dtype=f64))
        assert not bool(p[i, heads[i] + 1 :].any()) and not bool(p[i].diagonal().any())
    labelled = sx.DependencyTree(randn(4, 4, 2), labelled=True).local_softmax()
    close(labelled.sum((0, 2)), torch.tensor([0, 1, 1, 1], dtype=f64))
    forest = sx.BinaryTree(randn(3, 3))
    fails(forest.local_softmax, "BinaryTree.local_softmax", "no groups", "marginals")


def test_straight_through_over_the_beam() -> None:
    """With a beam over everything the gradient is that of the marginals."""
    s = sx.DependencyTree(randn(2, 4, 4), smoothing=sx.Shannon(0.5))
    _, cost = linear(s)
    whole = gradient(est.StraightThrough("beam", k=12), s, cost)
    close(whole, gradient(est.Marginals(), s, cost))
    close(est.StraightThrough("beam", k=2)(s), s.argmax(), 0)


# -- SPIGOT --------------------------------------------------------------------------------------


def test_spigot_on_the_simplex() -> None:
    s = sx.Choice(randn(4, 6))
    g, cost = linear(s, 1.0)
    z, p = s.argmax(), s.marginals()
    for step in (0.3, 1.0, 5.0):
        (found,) = gradient(est.SPIGOT(step), s, cost)
        close(found, z - sx.sparsemax(z - step * g))
        (found,) = gradient(est.SPIGOT(step, variant="cross-entropy"), s, cost)
        close(found, p - sx.sparsemax(p - step * g))
        (found,) = gradient(est.SPIGOT(step, variant="exponentiated"), s, cost)
        close(found, p - sx.softmax(s.scores - step * g))


def test_spigot_steps_on_the_simplex() -> None:
    """m ← Proj(m − η ∂L(m)/∂m), with the slope of the whole loss."""
    s, target = sx.Choice(randn(4, 6)), randn(4, 6)
    weights = torch.tensor([1.0, 2.0, 0.5, 0.0], dtype=f64)

    def cost(z: Tensor) -> Tensor:
        return ((z - target) ** 2).sum(-1)

    for variant, start in (("euclidean", s.argmax()), ("cross-entropy", s.marginals())):
        scores = s.scores.clone().requires_grad_()
        estimator = est.SPIGOT(0.2, pullback_steps=3, variant=variant)
        (weights * estimator.loss(sx.Choice(scores), cost)).sum().backward()
        m = start
        for _ in range(3):
            m = sx.sparsemax(m - 0.2 * weights[:, None] * 2 * (m - target))
        close(scores.grad, start - m)
    scores = s.scores.clone().requires_grad_()
    estimator = est.SPIGOT(0.2, pullback_steps=3, variant="exponentiated")
    (weights * estimator.loss(sx.Choice(scores), cost)).sum().backward()
    theta = s.scores
    for _ in range(3):
        theta = theta - 0.2 * weights[:, None] * 2 * (theta.softmax(-1) - target)
    close(scores.grad, s.marginals() - theta.softmax(-1))


@pytest.mark.parametrize("variant", ["euclidean", "cross-entropy", "exponentiated"])
def test_spigot_of_a_batch_is_item_by_item(variant: str) -> None:
    chain = sx.LinearChain(randn(3, 4, 3), randn(3, 3, 3), lengths=torch.tensor([4, 1, 3]))
    for s in (chain, tree(lengths=torch.tensor([4, 2, 3]))):
        g, cost = linear(s)
        whole = gradient(est.SPIGOT(1.5, variant=variant), s, cost)
        for i in range(3):
            own = lambda z, w=g[i]: (z * w).sum((-1, -2))  # noqa: E731
            alone = gradient(est.SPIGOT(1.5, variant=variant), s[i], own)
            close([t[i] for t in whole], alone, 1e-7)
        steps = est.SPIGOT(1.5, pullback_steps=2, variant=variant)
        assert steps.loss(s, cost).shape == (3,)
        leaves = [t.requires_grad_() for t in _scores(s)]
        plain = cost(est.SPIGOT(1.5, variant=variant)(_with_scores(s, leaves))).sum()
        plain = torch.autograd.grad(plain, leaves, materialize_grads=True)
        close(list(plain), whole)


def test_induced_targets() -> None:
    """Straight-through and SPIGOT are perceptrons, whose targets are pulled back from the cost."""
    s = tree()
    g, cost = linear(s)
    usable = s.primary != 0
    g = torch.where(usable, g, 0.0)
    scores = s.scores.clone().requires_grad_()
    live = sx.DependencyTree(scores, validate_args=False)  # z − g is no mean of structures
    loss = sx.losses.perceptron(live, s.argmax() - g, reduction="sum")
    (found,) = torch.autograd.grad(loss, scores)
    close(found, g)
    close(gradient(est.StraightThrough(), s, cost), [g])
    for step in (0.5, 2.0):
        goal = sx.project(s, s.argmax() - step * g)
        loss = sx.losses.perceptron(live, goal, reduction="sum")
        (found,) = torch.autograd.grad(loss, scores)
        close(gradient(est.SPIGOT(step), s, cost), [found], 1e-7)
    chain = _make(ROWS["chain-shared/shannon"])  # here the target has transitions too
    g, cost = linear(chain)
    goal = sx.sparse.projection(chain, chain.argmax() - 0.7 * g)
    leaves = [t.requires_grad_() for t in _scores(chain)]
    loss = sx.losses.perceptron(_with_scores(chain, leaves), goal, reduction="sum")
    found = torch.autograd.grad(loss, leaves)
    close(gradient(est.SPIGOT(0.7), chain, cost), list(found), 1e-7)
    assert bool(found[1].any())


# -- noise ---------------------------------------------------------------------------------------


def total_variation(s: sx.Structure, draws: Tensor) -> float:
    """Of the draws' frequencies from the probabilities."""
    every = s.enumerate_support().flatten(1)
    p = s.log_prob(s.enumerate_support()).exp()
    q = (draws.flatten(1)[:, None] == every).all(-1).double().mean(0)
    return float((p - q).abs().sum() / 2)


def test_perturb_and_map_is_not_gibbs_on_trees() -> None:
    """Its distance from the distribution: none on a choice, some on trees of four words."""
    count = 10000
    for gamma in (1.0, 0.5):
        choice = sx.Choice(randn(5), smoothing=sx.Shannon(gamma))
        draws = est.PerturbAndMAP(samples=count, generator=seeded())(choice)
        assert total_variation(choice, draws) < 0.015
    words = sx.DependencyTree(torch.randn(5, 5, dtype=f64, generator=seeded(3)))
    exact = words.sample((count,), generator=seeded())
    near = est.PerturbAndMAP(samples=count, generator=seeded())(words)
    assert total_variation(words, exact) < 0.03  # what sampling alone gives
    assert 0.07 < total_variation(words, near) < 0.12


def test_gumbel_noise_on_a_choice_is_softmax() -> None:
    scores = randn(4)
    mean = est.Perturbed(samples=100_000, noise="gumbel", generator=seeded())
    assert float((mean(sx.Choice(scores)) - scores.softmax(-1)).abs().max()) < 0.006
    half = est.Perturbed(0.5, 100_000, "gumbel", generator=seeded())
    assert float((half(sx.Choice(scores)) - (2 * scores).softmax(-1)).abs().max()) < 0.006
    draw = est.GumbelStraightThrough(samples=100_000, generator=seeded())
    z = draw(sx.Choice(scores))
    assert float((z.mean(0) - scores.softmax(-1)).abs().max()) < 0.006


def moments(k: int, count: int) -> tuple[float, float, float, float]:
    """Mean and variance of k coordinates, as parts of Gumbel's, and their standard errors."""
    like = torch.empty(count, k, dtype=f64)
    total = noise.sum_of_gamma(like, k, generator=seeded()).sum(-1)
    mean, variance = float(total.mean()) / EULER, float(total.var()) / (math.pi**2 / 6)
    spread = math.pi / math.sqrt(6 * count) / EULER
    return mean, variance, spread, math.sqrt(4.4 / count)  # Gumbel's kurtosis is 5.4


def test_sum_of_gamma() -> None:
    for k in (1, 3):
        mean, variance, mean_error, variance_error = moments(k, 3000)
        assert abs(mean - 1) < 4 * mean_error and abs(variance - 1) < 4 * variance_error
    s = sx.KSubset(randn(2, 5), 2)
    assert noise.unit("sum-of-gamma", s, 3, seeded()).shape == (3, 2, 5)


@pytest.mark.slow
def test_sum_of_gamma_within_one_percent() -> None:
    mean, variance, *_ = moments(3, 400_000)
    assert abs(mean - 1) < 0.01 and abs(variance - 1) < 0.01


def test_perturbed_gradient() -> None:
    """Unbiased: softmax's derivative on a choice, and differences of means on a chain."""
    scores = randn(4).requires_grad_()
    g = randn(4)
    (exact,) = torch.autograd.grad((scores.softmax(-1) * g).sum(), scores)
    z = est.Perturbed(samples=200_000, noise="gumbel", generator=seeded())(sx.Choice(scores))
    (found,) = torch.autograd.grad((z * g).sum(), scores)
    close(found, exact, 0.02)
    unary, transition, g = randn(2, 2), randn(2, 2), randn(2, 2)

    def mean(transition: Tensor, unary: Tensor = unary) -> Tensor:
        estimator = est.Perturbed(samples=100_000, generator=seeded())
        return (estimator(sx.LinearChain(unary, transition)) * g).sum()

    leaf = transition.clone().requires_grad_()
    (found,) = torch.autograd.grad(mean(leaf), leaf)
    for i in range(4):
        delta = 0.2 * torch.eye(4, dtype=f64)[i].reshape(2, 2)
        difference = (mean(transition + delta) - mean(transition - delta)) / 0.4
        assert abs(float(difference - found.flatten()[i])) < 0.02


@pytest.mark.parametrize("samples", [1, 3])
def test_perturbed_gradient_of_few_samples(samples: int) -> None:
    """Unbiased too, with the control variate: 20000 of them at once."""
    scores, g = randn(4), randn(4)
    leaf = scores.expand(20000, 4).clone().requires_grad_()
    estimator = est.Perturbed(samples=samples, noise="gumbel", generator=seeded())
    (found,) = torch.autograd.grad((estimator(sx.Choice(leaf)) * g).sum(), leaf)
    p = scores.softmax(-1)
    exact = p * (g - (p * g).sum())
    error = found.std(0) / math.sqrt(len(found))
    assert bool(((found.mean(0) - exact).abs() < 4 * error).all())


def test_noise_is_the_same_forward_and_backward() -> None:
    s = _make(ROWS["nonprojective/shannon"])
    _, cost = linear(s)
    soft = gradient(est.PerturbAndParse(generator=seeded()), s, cost)
    hard = gradient(est.PerturbAndParse(hard=True, generator=seeded()), s, cost)
    close(soft, hard)
    moved = s.perturb(noise.draw("gumbel", s, generator=seeded()))
    close(est.PerturbAndParse(generator=seeded())(s), moved.marginals())
    close(est.PerturbAndParse(hard=True, generator=seeded())(s), moved.argmax(), 0)
    choice = sx.Choice(randn(3, 4))
    g, cost = linear(choice)
    found = gradient(est.GumbelStraightThrough(0.5, generator=seeded()), choice, cost)
    scores = choice.scores.clone().requires_grad_()
    p = ((scores + noise.unit("gumbel", choice, generator=seeded())) / 0.5).softmax(-1)
    close(found, list(torch.autograd.grad((p * g).sum(), scores)))


# -- structures by a policy ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [sx.ShiftReduce, sx.EasyFirst])
@pytest.mark.parametrize(
    "estimator",
    [
        est.StraightThrough(),
        est.StraightThrough("softmax"),
        est.StraightThrough("beam", k=3),
        est.GumbelStraightThrough(0.5, generator=seeded()),
        est.GumbelStraightThrough(samples=2, generator=seeded()),
    ],
    ids=str,
)
def test_incremental(kind: Any, estimator: est.Estimator) -> None:
    torch.manual_seed(0)
    policy = StackPolicy() if kind is sx.ShiftReduce else MergePolicy()
    inputs, lengths = randn(3, 4, 3), torch.tensor([4, 1, 3])
    s = kind(policy, inputs, lengths)
    assert estimator.applies_to(s)
    z = estimator(s)
    lead = (2,) if getattr(estimator, "samples", 1) == 2 else ()
    assert z.shape == (*lead, *s.batch_shape, *s.event_shape)
    assert bool(s.log_prob(z.detach()).isfinite().all())
    _, cost = linear(s)
    estimator.loss(s, cost).sum().backward()
    grads = [p.grad for p in policy.parameters() if p.grad is not None]
    assert grads and all(bool(g.isfinite().all()) for g in grads)
    assert any(bool(g.any()) for g in grads)
    assert not est.StraightThrough("marginals").applies_to(s)
    assert not est.SPIGOT().applies_to(s) and not est.IMLE().applies_to(s)


# -- parts, costs, names -------------------------------------------------------------------------


def test_perturb() -> None:
    chain = sx.LinearChain(
        randn(2, 4, 3), randn(3, 3), start=randn(3), lengths=torch.tensor([4, 2])
    )
    for s in (chain, tree(2), _make(ROWS["pcfg/shannon"]), _make(ROWS["ctc/shannon"])):
        delta = randn(*s.batch_shape, *s.event_shape)
        z = s.argmax()
        dims = tuple(range(-len(s.event_shape), 0))
        close(s.perturb(delta).score(z), s.score(z) + (z * delta).sum(dims))
        several = s.perturb(torch.stack([delta, 0 * delta, -delta]))
        assert several.batch_shape == (3, 2)
        close(several.argmax()[1], z, 0)
        close(several.marginals()[0], s.perturb(delta).marginals())
        close(s.perturb(torch.zeros(())).marginals(), s.marginals())
        fails(lambda s=s: s.perturb(torch.zeros(7, 5, 1, 1)), "perturb", "(7, 5, 1, 1)")
    assert bool((chain.primary[1, 2:] == 0).all())
    close(chain.primary[:, 0], (chain.unary + chain.start)[:, 0])
    free = sx.GridPath(-randn(3, 3).abs(), moves="all", smoothing=sx.Hard())
    assert bool((free.perturb(torch.full((3, 3), 9.0)).scores == 0).all())
    wall = sx.Choice(torch.tensor([0.0, -math.inf]))
    assert wall.perturb(torch.full((2,), 1e9)).argmax().tolist() == [1, 0]
    low = sx.Choice(torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True))
    for estimator in (est.StraightThrough(), est.IMLE(), est.PerturbAndMAP(), est.SPIGOT()):
        z = estimator(low)
        (g,) = torch.autograd.grad(z[:, 0].sum(), low.scores)
        assert z.dtype == g.dtype == torch.bfloat16 and bool(g.isfinite().all())


def test_costs_with_items() -> None:
    s = tree(3)
    g, cost = linear(s)

    def by_item(z: Tensor, items: Tensor) -> Tensor:
        assert z.shape == (len(items), 5, 5)
        return (z * g[items]).sum((-1, -2))

    class Module(torch.nn.Module):
        def forward(self, z: Tensor, items: Tensor, more: float = 0.0) -> Tensor:
            return by_item(z, items) + more

    for estimator in (est.BlackBox, lambda: est.PerturbAndMAP(samples=2, generator=seeded())):
        wanted = gradient(estimator(), s, cost)
        close(gradient(estimator(), s, by_item), wanted)
        close(gradient(estimator(), s, Module()), wanted)
    z = s.topk(2).structures.movedim(1, 0)
    where = torch.tensor([[True, True, True], [True, False, False]])
    for function in (cost, by_item):
        close(call_cost(function, z, s, where), torch.where(where, cost(z), 0.0))
    fails(lambda: est.BlackBox().loss(s, lambda z: z.sum()), "cost", "(3,)", "got ()")
    fails(lambda: est.BlackBox().loss(s, lambda z, items: z.sum(-1)), "cost", "(3, 5, 5)")


def test_an_estimator_is_short() -> None:
    for name, kind in est.NAMES.items():
        lines = inspect.getsource(inspect.getmodule(kind)).splitlines()  # type: ignore[arg-type]
        assert len(lines) <= 80, f"{name} has {len(lines)} lines"
        assert kind.objective in ("E[L(z)]", "L(argmax)", "L(E[z])") and kind.__doc__


def test_names_and_options() -> None:
    for name, kind in est.NAMES.items():
        assert type(est.by_name(name)) is kind
        assert est.by_name(name).objective in ("E[L(z)]", "L(argmax)", "L(E[z])")
    assert est.by_name("spigot", step=2.0).step == 2.0
    fails(lambda: est.by_name("spigott"), "spigott", "'spigot'")
    fails(lambda: est.by_name("black_box"), "'black-box'")
    fails(lambda: est.by_name("?!"), "'exact-expectation'")
    fails(lambda: est.StraightThrough("soft"), "backward", "'softmax'", "'soft'")
    fails(lambda: est.SPIGOT(step=0.0), "SPIGOT", "step", "above 0", "0.0")
    fails(lambda: est.SPIGOT(variant="kl"), "SPIGOT", "variant", "'exponentiated'")
    fails(lambda: est.IMLE(lam=-1.0), "IMLE", "lam", "-1.0")
    fails(lambda: est.IMLE(noise="cauchy"), "IMLE", "noise", "'sum-of-gamma'", "'cauchy'")
    fails(lambda: est.PerturbAndMAP(samples=1.5), "samples", "integer", "1.5")
    fails(lambda: est.GumbelStraightThrough()(tree()), "sx.Choice", "PerturbAndParse")
    several = est.SPIGOT(pullback_steps=2)
    fails(lambda: several(tree()), "pullback_steps=2", ".loss(structure, cost)", kind=TypeError)
    free = sx.GridPath(-randn(3, 3).abs(), moves="all", smoothing=sx.Hard())
    fails(lambda: est.SPIGOT()(free), "moves", "BlackBox", kind=sx.IntractableError)
    scores = randn(4).requires_grad_()
    with torch.no_grad():
        assert not est.StraightThrough()(sx.Choice(scores)).requires_grad
    z = est.StraightThrough()(sx.Choice(scores))
    (g,) = torch.autograd.grad((z**2).sum(), scores, create_graph=True)
    with pytest.raises(RuntimeError):
        g.sum().backward()
