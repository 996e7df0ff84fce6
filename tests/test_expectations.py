"""Estimators of expected costs: unbiased where they say so, exact where they say so."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from table import ROWS, randn
from test_errors import fails
from torch import Tensor, nn

import structmax as sx
from structmax.estimators import (
    PPO,
    ExactExpectation,
    Reinforce,
    SparseExpectation,
    SumAndSample,
    TopKExpectation,
)
from structmax.estimators.running import RunningMoments

COPIES = 4000
LOSS_ONLY = (
    Reinforce(),
    PPO(),
    SparseExpectation(),
    TopKExpectation(),
    SumAndSample(),
    ExactExpectation(),
)


def chain() -> sx.LinearChain:
    return sx.LinearChain(randn(3, 2), randn(2, 2))


def tree() -> sx.DependencyTree:
    return sx.DependencyTree(randn(4, 4))  # type: ignore[abstract]


def projective() -> sx.DependencyTree:
    return sx.DependencyTree(randn(4, 4), projective=True)  # type: ignore[abstract]


def subset() -> sx.KSubset:
    return sx.KSubset(randn(4), 2)


class Table(nn.Module):
    """A policy that reads its scores from the inputs, and remembers what it did."""

    def __init__(self, choices: int) -> None:
        super().__init__()
        self.choices = choices

    def start(self, inputs: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        table = inputs.flatten(1).unflatten(1, (-1, self.choices))
        return table, torch.zeros_like(lengths), torch.zeros_like(table[:, 0])

    def scores(self, state: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        table, t, memory = state
        now = t.clamp(max=table.shape[1] - 1)
        return table[torch.arange(len(table)), now] + memory * table[:, -1]

    def advance(self, state: tuple[Tensor, Tensor, Tensor], action: Tensor) -> tuple[Tensor, ...]:
        table, t, memory = state
        return table, t + 1, (memory + action).tanh()


def shift_reduce() -> sx.ShiftReduce:
    return sx.ShiftReduce(Table(2), randn(1, 4, 4))


def easy_first() -> sx.EasyFirst:
    return sx.EasyFirst(Table(3), randn(1, 4, 3))


STRUCTURES: dict[str, Callable[[], sx.Structure]] = {
    "chain": chain,
    "tree": tree,
    "projective": projective,
    "subset": subset,
    "shift-reduce": shift_reduce,
    "easy-first": easy_first,
}
WITH_PARTS = [name for name in STRUCTURES if name not in ("shift-reduce", "easy-first")]


def with_leaves(structure: sx.Structure, copies: int | None = None) -> tuple[sx.Structure, list]:
    """The structure with scores as leaves, each copied along a new batch dimension if asked."""
    leaves = {}
    for name, (t, d) in structure._tensors().items():
        t = t.detach() if copies is None else t.detach().expand(copies, *t.shape[t.dim() - d :])
        leaves[name] = t.clone().requires_grad_(t.is_floating_point())
    if isinstance(structure, sx.ShiftReduce | sx.EasyFirst):
        return type(structure)(structure.policy, **leaves), [*leaves.values()]
    return structure._rebuild(**leaves), [t for t in leaves.values() if t.requires_grad]


def square_cost(structure: sx.Structure) -> Callable[[Tensor], Tensor]:
    """⟨w, z⟩² + 1: not linear in z, and far from zero mean."""
    w, event = randn(*structure.event_shape), len(structure.event_shape)
    return lambda z: (z * w).flatten(z.dim() - event).sum(-1).square() + 1


def enumerated(structure: sx.Structure, cost: Callable[[Tensor], Tensor]) -> Tensor:
    """E[L(z)] as its definition reads, ``(*batch)``."""
    every = structure.enumerate_support()
    return (structure.log_prob(every).exp() * cost(every)).sum(0)


def assert_unbiased(draws: list[Tensor], exact: list[Tensor], what: str) -> None:
    """The mean of the copies is within four standard errors, in every coordinate."""
    for drawn, true in zip(draws, exact, strict=True):
        error = drawn.std(0) / len(drawn) ** 0.5
        distance = (drawn.mean(0) - true).abs()
        assert bool((distance <= 4 * error + 1e-9).all()), f"{what}: {distance / error}"


class Line(nn.Module):
    """A baseline on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).squeeze(-1)


UNBIASED: dict[str, Callable[[], sx.estimators.Estimator]] = {
    "reinforce": lambda: Reinforce(),
    "reinforce-3": lambda: Reinforce(samples=3),
    "ema": lambda: Reinforce(baseline="ema"),
    "self-critic": lambda: Reinforce(baseline="self-critic"),
    "leave-one-out": lambda: Reinforce(samples=3, baseline="leave-one-out"),
    "module": lambda: Reinforce(samples=2, baseline=Line()),
    "ppo": lambda: PPO(samples=2, baseline="leave-one-out"),
    "sum-and-sample": lambda: SumAndSample(k=2),
    "sum-and-sample-one-try": lambda: SumAndSample(k=3, samples=2, tries=1),
    "sum-and-sample-two-tries": lambda: SumAndSample(k=1, tries=2),
}


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("kind", UNBIASED)
def test_unbiased(name: str, kind: str) -> None:
    torch.manual_seed(1)
    structure = STRUCTURES[name]()
    cost, estimator = square_cost(structure), UNBIASED[kind]()
    one, exact = with_leaves(structure)
    expected = enumerated(one, cost).sum()
    expected.backward()
    many, leaves = with_leaves(structure, COPIES)
    options = {"inputs": randn(COPIES, 2)} if kind == "module" else {}
    for _ in range(2 if kind == "ema" else 1):  # the first call has no running mean yet
        loss = estimator.loss(many, cost, **options)
    loss.sum().backward()
    assert_unbiased([loss.detach()], [expected.detach()], "value")
    assert_unbiased([leaf.grad for leaf in leaves], [leaf.grad for leaf in exact], "gradient")


@pytest.mark.parametrize("kind", ["reinforce", "leave-one-out", "ppo", "sum-and-sample"])
def test_the_gradient_of_the_cost_itself(kind: str) -> None:
    torch.manual_seed(1)
    structure, estimator = chain(), UNBIASED[kind]()
    weight = randn(3, 2)
    many, _ = with_leaves(structure, COPIES)
    w = weight.expand(COPIES, 3, 2).clone().requires_grad_()
    estimator.loss(many, lambda z: (z * w).sum((-1, -2)).square()).sum().backward()
    exact = weight.clone().requires_grad_()
    enumerated(structure, lambda z: (z * exact).sum((-1, -2)).square()).backward()
    assert_unbiased([w.grad], [exact.grad], "gradient in the cost's weights")


def test_baselines_reduce_the_variance() -> None:
    torch.manual_seed(0)
    structure = chain()
    cost = square_cost(structure)

    def variance(estimator: sx.estimators.Estimator) -> float:
        many, (unary, _) = with_leaves(structure, COPIES)
        estimator.loss(many, lambda z: cost(z) + 10).sum().backward()
        return float(unary.grad.var(0).sum())

    plain = variance(Reinforce(samples=2))
    assert variance(Reinforce(samples=2, baseline="leave-one-out")) < plain / 10
    assert variance(Reinforce(samples=2, baseline="self-critic")) < plain / 10
    assert variance(SumAndSample(k=4, samples=2)) < plain / 4


@pytest.mark.parametrize("name", STRUCTURES)
def test_exact_expectation(name: str) -> None:
    torch.manual_seed(0)
    structure = STRUCTURES[name]()
    cost = square_cost(structure)
    (one, found), (two, exact) = with_leaves(structure), with_leaves(structure)
    loss, expected = ExactExpectation().loss(one, cost), enumerated(two, cost)
    torch.testing.assert_close(loss, expected)
    loss.sum().backward()
    expected.sum().backward()
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_structure_in_the_top_k(name: str) -> None:
    """With k at least the number of structures nothing is truncated and nothing is drawn."""
    torch.manual_seed(0)
    structure = STRUCTURES[name]()
    cost, k = square_cost(structure), len(structure.enumerate_support()) + 2
    two, exact = with_leaves(structure)
    expected = enumerated(two, cost)
    expected.sum().backward()
    for estimator in (TopKExpectation(k), SumAndSample(k)):
        one, found = with_leaves(structure)
        loss = estimator.loss(one, cost)
        torch.testing.assert_close(loss, expected)
        loss.sum().backward()
        for a, b in zip(found, exact, strict=True):
            torch.testing.assert_close(a.grad, b.grad)


def test_top_k_expectation_is_the_truncated_one() -> None:
    torch.manual_seed(0)
    one, (unary, transition) = with_leaves(sx.LinearChain(randn(2, 3, 2), randn(2, 2)))
    cost = square_cost(one)
    best = one.topk(3)
    z = best.structures.movedim(1, 0)
    p = (one.score(z)).softmax(0)
    expected = torch.autograd.grad((p * cost(z)).sum(), (unary, transition))
    found = torch.autograd.grad(TopKExpectation(3).loss(one, cost).sum(), (unary, transition))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", WITH_PARTS)
def test_sparse_expectation(name: str) -> None:
    """The gradient is that of Σ pᵢ L(zᵢ), through the probabilities of SparseMAP."""
    torch.manual_seed(0)
    structure = STRUCTURES[name]()
    cost = square_cost(structure)
    (one, found), (two, exact) = with_leaves(structure), with_leaves(structure)
    loss = SparseExpectation().loss(one, cost)
    sparse = two.sparsemap()
    at = len(structure.batch_shape)
    expected = (sparse.probs * cost(sparse.structures.movedim(at, 0)).movedim(0, at)).sum(-1)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_sparse_expectation_on_the_simplex() -> None:
    torch.manual_seed(0)
    scores, costs = randn(4, 6).requires_grad_(), randn(4, 6)
    loss = SparseExpectation().loss(sx.Choice(scores), lambda z: (z * costs).sum(-1))
    expected = (sx.sparsemax(scores) * costs).sum(-1)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), scores)[0] for x in (loss, expected)))


def ragged() -> sx.LinearChain:
    unary = randn(3, 4, 2)
    unary[0, 1:], unary[1, 3:] = torch.nan, torch.nan
    unary[2, 1, 0] = -torch.inf
    return sx.LinearChain(unary, randn(2, 2), lengths=torch.tensor([1, 3, 4]))


@pytest.mark.parametrize("estimator", LOSS_ONLY, ids=lambda e: type(e).__name__)
def test_items_stay_apart(estimator: sx.estimators.Estimator) -> None:
    """Lengths, NaN padding and −inf: finite gradients, zero at what no structure uses."""
    torch.manual_seed(0)
    structure, (unary, transition) = with_leaves(ragged())
    w = randn(4, 2)
    loss = estimator.loss(structure, lambda z: (z * w).sum((-1, -2)).square())
    assert loss.shape == (3,)
    loss.sum().backward()
    assert bool(unary.grad.isfinite().all()) and bool(transition.grad.isfinite().all())
    assert not unary.grad[0, 1:].any() and not unary.grad[1, 3:].any()
    assert unary.grad[2, 1, 0] == 0


def test_exact_expectation_of_a_ragged_batch() -> None:
    torch.manual_seed(0)
    structure, w = ragged(), randn(4, 2)
    cost = lambda z: (z * w).sum((-1, -2)).square()  # noqa: E731
    loss = ExactExpectation().loss(structure, cost)
    for i in range(3):
        torch.testing.assert_close(loss[i], ExactExpectation().loss(structure[i], cost))


def test_exact_expectation_of_too_many() -> None:
    with pytest.raises(ValueError, match="too many"):
        sx.estimators.ExactExpectation().loss(
            sx.BinaryTree(torch.zeros(20, 20)), lambda z: z.sum((-1, -2))
        )


def test_exact_expectation_of_an_empty_batch() -> None:
    """Also where an item says what its structures are, and there is none to say so."""
    edges = torch.tensor([[0, 1], [1, 2], [0, 2]])
    structures = [
        sx.CTC(randn(2, 3, 3), torch.tensor([[1, 2], [1, 1]])),
        sx.Path(edges, randn(2, 3), 0, torch.tensor([1, 2])),
        ROWS["hyperpath/shannon"](),
        sx.PCFG(randn(1), randn(1, 2, 2), randn(2, 1, 1)),
    ]
    for structure in structures:
        none = structure[:0]
        support = none.enumerate_support()
        assert support.shape[1:] == none.batch_shape + none.event_shape
        assert ExactExpectation().loss(none, square_cost(none)).shape == (0,)


def test_exact_expectation_where_there_is_nothing() -> None:
    """A grammar derives no single word."""
    root, rules, cost = randn(1), randn(1, 2, 2), lambda z: z.flatten(-3).sum(-1)
    for emission, lengths in ((randn(2, 1, 1), None), (randn(2, 3, 1), torch.tensor([3, 1]))):
        s = sx.PCFG(root, rules, emission, lengths)
        item = "item 0" if lengths is None else "item 1"
        fails(functools.partial(ExactExpectation().loss, s, cost), item, "allows no structure")


@pytest.mark.parametrize("estimator", LOSS_ONLY, ids=lambda e: type(e).__name__)
def test_a_cost_with_two_arguments(estimator: sx.estimators.Estimator) -> None:
    """Flattened structures, each with the index of its item: the same loss and gradient."""
    torch.manual_seed(0)
    original, w, seen = ragged(), randn(3, 4, 2), []

    def flat(z: Tensor, items: Tensor) -> Tensor:
        seen.append(items)
        return torch.stack([(z[i] * w[items[i]]).sum().square() for i in range(len(z))])

    grads = []
    for cost in (lambda z: (z * w).sum((-1, -2)).square(), flat):
        structure, leaves = with_leaves(original)
        torch.manual_seed(0)
        loss = copy.deepcopy(estimator).loss(structure, cost)
        grads.append((loss.detach(), *torch.autograd.grad(loss.sum(), leaves)))
    torch.testing.assert_close(grads[0], grads[1])
    assert set(seen[0].tolist()) == {0, 1, 2}


@pytest.mark.parametrize("estimator", LOSS_ONLY, ids=lambda e: type(e).__name__)
def test_only_a_loss(estimator: sx.estimators.Estimator) -> None:
    with pytest.raises(TypeError, match=r"\.loss"):
        estimator(sx.Choice(torch.zeros(3)))


def test_ema_excludes_the_current_draw() -> None:
    estimator = Reinforce(baseline="ema")
    choice = sx.Choice(torch.zeros(1, requires_grad=True))
    spy = lambda z: z.sum(-1) * 5  # noqa: E731
    for expected in (0.0, 5.0, 5.0):
        assert estimator.baseline.costs.mean() == pytest.approx(expected)
        estimator.loss(choice, spy)
    estimator.eval()
    estimator.loss(choice, lambda z: z.sum(-1) * 100)
    assert estimator.baseline.costs.mean() == pytest.approx(5.0)


def test_state_travels() -> None:
    torch.manual_seed(0)
    first = Reinforce(samples=4, baseline="ema", normalize=True)
    first.loss(sx.Choice(torch.zeros(2, 3)), lambda z: 30 * z[..., 0])
    second = Reinforce(samples=4, baseline="ema", normalize=True)
    second.load_state_dict(first.state_dict())
    assert second.baseline.costs.mean() == first.baseline.costs.mean() != 0
    assert second.advantages.variance() == first.advantages.variance() > 1


def test_normalize_divides_by_the_deviation_of_earlier_calls() -> None:
    scores = torch.zeros(3, requires_grad=True)
    costs = torch.tensor([0.0, 10.0, 50.0])
    gradients = []
    for normalize in (False, True):
        torch.manual_seed(0)
        estimator = Reinforce(samples=8, normalize=normalize)
        estimator.loss(sx.Choice(scores), lambda z: z @ costs)  # the first: nothing to divide by
        deviation = estimator.advantages.variance().sqrt()
        loss = estimator.loss(sx.Choice(scores), lambda z: z @ costs)
        gradients.append(torch.autograd.grad(loss, scores)[0])
    torch.testing.assert_close(gradients[0] / deviation, gradients[1])


@pytest.mark.parametrize("kind", [Reinforce, PPO])
@pytest.mark.parametrize(("items", "samples"), [(1, 1), (2, 1), (1, 2), (5, 4)])
def test_normalize_knows_the_variance_between_calls(kind: Any, items: int, samples: int) -> None:
    """Of one draw in a call there is no variance within it, and of two half."""
    torch.manual_seed(0)
    estimator = kind(samples=samples, normalize=True)
    moments, wanted = estimator.advantages, []
    choice = sx.Choice(torch.zeros(items, 3))
    for _ in range(400):
        estimator.loss(choice, lambda z: 100 * torch.randn(z.shape[:-1]))
        wanted.append(moments.variance().item())
    assert 0.85 < sum(wanted[50:]) / 350 / 1e4 < 1.1
    assert sorted(estimator.state_dict()) == sorted(kind(normalize=True).state_dict())


def test_running_moments_are_those_of_all_values() -> None:
    torch.manual_seed(0)
    calls = [torch.randn(n, dtype=torch.float64) * n + 1e3 * n for n in (1, 2, 5, 1, 3)]
    moments = RunningMoments(decay=0.8)
    for values in calls:
        moments.update(values)
    weights = [0.8 ** (4 - i) for i in range(5)]
    mean = sum(w * v.mean() for w, v in zip(weights, calls, strict=True)) / sum(weights)
    pairs = zip(weights, calls, strict=True)
    variance = sum(w * (v - mean).square().mean() for w, v in pairs) / sum(weights)
    torch.testing.assert_close(moments.mean(), mean)
    torch.testing.assert_close(moments.variance(), variance)


def test_a_module_as_the_baseline_learns_the_cost() -> None:
    torch.manual_seed(0)
    estimator = Reinforce(baseline=Line())
    x = randn(64, 2).requires_grad_()
    choice = sx.Choice(torch.zeros(64, 3, dtype=torch.float64))
    optimizer = torch.optim.Adam(estimator.parameters(), lr=0.05)
    target = 2 * x.detach()[:, 0] - x.detach()[:, 1] + 3
    for _ in range(300):
        optimizer.zero_grad()
        loss = estimator.loss(choice, lambda z: target.expand(z.shape[:-1]), inputs=x)
        torch.testing.assert_close(loss, target)  # the baseline does not change the value
        loss.sum().backward()
        optimizer.step()
    torch.testing.assert_close(estimator.baseline.kind(x), target, atol=1e-2, rtol=0)
    assert x.grad is None


@pytest.mark.parametrize("known", [True, False])
def test_entropy_weight(known: bool) -> None:
    """−weight · H, by the structure's own entropy or from the draws."""

    class Shy(sx.Choice):
        queries = sx.Choice.queries - {"entropy"}

    torch.manual_seed(0)
    scores = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    leaf = scores.clone().requires_grad_()
    (-0.5 * sx.Choice(leaf).entropy()).backward()
    many = scores.expand(COPIES, 3).clone().requires_grad_()
    structure = (sx.Choice if known else Shy)(many)
    loss = Reinforce(entropy_weight=0.5).loss(structure, lambda z: 0 * z.sum(-1))
    loss.sum().backward()
    if known:
        torch.testing.assert_close(many.grad, leaf.grad.expand(COPIES, 3))
    assert_unbiased([many.grad], [leaf.grad], "gradient of the entropy")
    assert_unbiased([loss.detach()], [-0.5 * sx.Choice(scores).entropy()], "entropy")


def test_ppo() -> None:
    """The first update is REINFORCE; later ones go by the clipped ratio at the stored draws."""
    scores = torch.tensor([[0.0, 1.0, -1.0], [0.5, 0.0, 0.0]], dtype=torch.float64)
    costs = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64)
    cost = lambda z: z @ costs  # noqa: E731
    results = []
    for make in (Reinforce, PPO):
        torch.manual_seed(0)
        leaf = scores.clone().requires_grad_()
        estimator = make(samples=4, baseline="leave-one-out")
        loss = estimator.loss(sx.Choice(leaf), cost)
        results.append((loss, *torch.autograd.grad(loss.sum(), leaf)))
    torch.testing.assert_close(*results)
    again = scores.clone().requires_grad_()
    loss = estimator.replay(sx.Choice(again))
    torch.testing.assert_close((loss, *torch.autograd.grad(loss.sum(), again)), results[1])

    moved = (scores + torch.tensor([0.0, 0.5, -0.5])).requires_grad_()
    loss = estimator.replay(sx.Choice(moved))
    torch.manual_seed(0)
    z = sx.Choice(scores).sample((4,))
    L = cost(z)
    A = L - (L.sum(0) - L) / 3
    r = (sx.Choice(moved).log_prob(z) - sx.Choice(scores).log_prob(z)).exp()
    expected = (L - A + torch.maximum(r * A, r.clamp(0.8, 1.2) * A)).mean(0)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), moved)[0] for x in (loss, expected)))
    estimator.replay(sx.Choice(moved))
    with pytest.raises(RuntimeError, match="serve 4 updates"):
        estimator.replay(sx.Choice(moved))


@pytest.mark.parametrize("estimator", LOSS_ONLY, ids=lambda e: type(e).__name__)
def test_same_seed_same_bits(estimator: sx.estimators.Estimator) -> None:
    torch.manual_seed(0)
    scores, results = randn(5, 6), []
    for _ in range(2):
        torch.manual_seed(3)
        leaf = scores.clone().requires_grad_()
        loss = estimator.loss(sx.KSubset(leaf, 2), lambda z: z[..., :2].sum(-1) ** 2)
        results.append((loss.detach(), *torch.autograd.grad(loss.sum(), leaf)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_sum_and_sample_where_the_best_have_all_the_mass() -> None:
    scores = torch.tensor([0.0, -200.0, -300.0], requires_grad=True)
    loss = SumAndSample(k=1).loss(sx.Choice(scores), lambda z: z @ torch.tensor([2.0, 1e6, 1e6]))
    loss.backward()
    assert loss == 2 and not scores.grad.any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Reinforce(baseline="mean"), "baseline must be None, \"ema\".*got 'mean'"),
        (lambda: Reinforce(samples=0), "samples must be an integer, at least 1.*got 0"),
        (lambda: Reinforce(baseline="leave-one-out"), "at least 2 with baseline='leave-one-out'"),
        (lambda: PPO(clip=0.0), "clip must be a number above 0"),
        (lambda: PPO(updates=0), "updates must be an integer of at least 1"),
        (lambda: SumAndSample(k=0), "k must be an integer of at least 1"),
        (lambda: TopKExpectation(0), "k must be an integer of at least 1"),
        (
            lambda: Reinforce(baseline=Line()).loss(sx.Choice(torch.zeros(3)), lambda z: z[..., 0]),
            r"needs its inputs. Use loss\(structure, cost, inputs=x\)",
        ),
        (
            lambda: Reinforce(baseline=Line()).loss(
                sx.Choice(torch.zeros(3)), lambda z: z[..., 0], inputs=randn(5, 2)
            ),
            r"one number for each item, \(\), got \(5,\)",
        ),
        (
            lambda: Reinforce().loss(sx.Choice(torch.zeros(2, 3)), lambda z: z.sum()),
            "one number for each structure",
        ),
    ],
)
def test_errors(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_replay_of_another_batch() -> None:
    estimator = PPO()
    with pytest.raises(RuntimeError, match=r"no draws yet\. Call loss\(\) first"):
        estimator.replay(sx.Choice(torch.zeros(3)))
    estimator.loss(sx.Choice(torch.zeros(2, 3)), lambda z: z[..., 0])
    with pytest.raises(ValueError, match=r"a batch \(2,\), got \(\)"):
        estimator.replay(sx.Choice(torch.zeros(3)))
