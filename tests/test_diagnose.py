"""The diagnosis of gradients: what it measures, what it prints, what it counts."""

from __future__ import annotations

import copy
import math
import sys
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from table import f64, randn
from torch import Tensor, nn

import structmax as sx
from structmax.estimators.exact_expectation import every_structure
from structmax.estimators.objectives import Objectives, _mean, gradient


def chain() -> sx.LinearChain:
    torch.manual_seed(0)
    return sx.LinearChain(randn(2, 3, 2), randn(2, 2), lengths=torch.tensor([3, 2]))


def cost(z: Tensor) -> Tensor:
    w = torch.tensor([[1.0, -1.0], [0.5, 2.0], [0.0, 1.0]], dtype=f64)
    return (z * w).sum((-1, -2)).square()


def seed(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


@pytest.fixture(scope="module")
def every() -> sx.Diagnosis:
    return sx.diagnose(chain(), cost, samples=40, generator=seed())


def records(diagnosis: sx.Diagnosis) -> dict[tuple[str, str], dict]:
    return {(r["estimator"], r["against"]): r for r in diagnosis.records}


def test_every_estimator(every: sx.Diagnosis) -> None:
    found = records(every)
    names = {name for name, _ in found}
    assert names == set(sx.estimators.NAMES) - {"gumbel-straight-through"}
    assert every.skipped == {"gumbel-straight-through": "not this structure"}
    for record in every.records:
        assert record["variance"] >= 0 and record["milliseconds"] > 0 and record["calls"] > 0
        if record["objective"] != "L(argmax)":
            assert record["against"] == record["objective"]
            monte_carlo = record["distribution"] in ("perturbed", "noisy")
            assert record["reference"].startswith("Monte Carlo ±" if monte_carlo else "exact")
        else:
            assert record["distribution"] == "own" and record["reference"] == "none of its own"
    for name in ("straight-through", "spigot", "black-box"):
        assert (name, "E[L(z)]") in found and (name, "L(E[z])") in found


def test_exact_ones_are_exact(every: sx.Diagnosis) -> None:
    """Each against its own objective, whatever its distribution."""
    found = records(every)
    for key in (
        ("marginals", "L(E[z])"),
        ("sparsemap", "L(E[z])"),
        ("exact-expectation", "E[L(z)]"),
        ("sparse-expectation", "E[L(z)]"),
        ("top-k-expectation", "E[L(z)]"),
    ):
        assert found[key]["bias"] < 1e-9 and found[key]["variance"] < 1e-9
        assert found[key]["cosine"] == pytest.approx(1.0)


def test_unbiased_and_biased_ones(every: sx.Diagnosis) -> None:
    found = records(every)
    for name in ("reinforce", "ppo", "sum-and-sample"):
        record = found[name, "E[L(z)]"]
        assert record["bias"] < 4 * record["error"] and record["variance"] > 0
    relaxed = found["perturb-and-parse", "L(E[z])"]
    assert relaxed["bias"] < 4 * relaxed["error"]
    for name in ("imle", "perturb-and-map"):
        assert found[name, "E[L(z)]"]["bias"] > 4 * found[name, "E[L(z)]"]["error"]
    biased = found["straight-through", "E[L(z)]"]
    assert biased["bias"] > 0.1 and biased["variance"] < 1e-9


def objectives(structure: sx.Structure, cost: Any) -> Objectives:
    tensors = {k: t.detach().clone() for k, (t, _) in structure._tensors().items()}
    leaves = [t.requires_grad_() for t in tensors.values() if t.is_floating_point()]
    return Objectives(structure._rebuild(**tensors), leaves, cost)


def differences(own: Objectives, loss: Any, step: float = 1e-5) -> Tensor:
    """Central differences of a loss in every leaf, flat."""
    found = []
    for leaf in own.leaves:
        for i in range(leaf.numel()):
            sides = []
            for sign in (1, -1):
                with torch.no_grad():
                    leaf.view(-1)[i] += sign * step
                    sides.append(float(loss(own.structure).sum()))
                    leaf.view(-1)[i] -= sign * step
            found.append((sides[0] - sides[1]) / (2 * step))
    return torch.tensor(found, dtype=f64)


def solved(structure: sx.Structure) -> Tensor:
    """SparseMAP's mean as its definition reads: a quadratic program over all structures."""
    means = []
    for i in range(len(structure.unary)):
        z = structure[i].enumerate_support().flatten(1).numpy()
        s = structure[i].score(structure[i].enumerate_support()).numpy()
        result = scipy.optimize.minimize(
            lambda p, z=z, s=s: ((p @ z) ** 2).sum() / 2 - p @ s,
            np.full(len(z), 1 / len(z)),
            jac=lambda p, z=z, s=s: z @ (p @ z) - s,
            bounds=[(0, 1)] * len(z),
            constraints={"type": "eq", "fun": lambda p: p.sum() - 1},
            method="SLSQP",
            options={"ftol": 1e-15, "maxiter": 500},
        )
        means.append(torch.from_numpy(result.x @ z).reshape(structure.event_shape))
    return torch.stack(means)


def test_the_objective_of_sparsemap() -> None:
    """Its gradient is that of L at the solution of the quadratic program, by differences."""
    torch.manual_seed(3)
    chain = sx.LinearChain(randn(2, 3, 2), randn(2, 2))
    own = objectives(chain, cost)
    found = own.of(sx.estimators.SparseMAP())
    assert found.error is None and bool(found.gradient.any())
    wanted = differences(own, lambda s: cost(solved(s.to(f64))), 1e-3)
    torch.testing.assert_close(found.gradient, wanted, atol=2e-3, rtol=2e-3)


def test_a_sparsemap_that_did_not_converge_is_no_reference() -> None:
    """A structure outside its support would gain: the item is named, and what to do."""
    own = objectives(sx.Choice(torch.tensor([[9.0, 0.0, 0.0], [0.3, 0.2, 0.1]], dtype=f64)), cost)
    with pytest.raises(RuntimeError, match=r"did not converge on item 1.*Raise max_iter"):
        own.of(sx.estimators.SparseExpectation(max_iter=1))


def test_the_objective_of_sparse_expectation() -> None:
    """Differences of Σ pᵢ L(zᵢ), with the probabilities of the solver at moved scores."""
    own = objectives(chain(), cost)

    def loss(s: sx.Structure) -> Tensor:
        sparse = s.sparsemap()
        return (sparse.probs * cost(sparse.structures.movedim(1, 0)).mT).sum(-1)

    for options in ({}, {"penalize": "all"}):
        found = own.of(sx.estimators.SparseExpectation(**options)).gradient
        if not options:
            torch.testing.assert_close(found, differences(own, loss), atol=1e-6, rtol=1e-6)
        exact = sx.diagnose(chain(), cost, [sx.estimators.SparseExpectation(**options)], samples=1)
        assert exact.records[0]["bias"] < 1e-9


def test_the_objective_of_the_k_best() -> None:
    own = objectives(chain(), cost)

    def loss(s: sx.Structure) -> Tensor:
        z, exists = every_structure(s)
        scores = torch.where(exists, s.score(z), -torch.inf)
        order = scores.argsort(0, descending=True)[:3]
        costs = torch.where(exists, cost(z), 0.0)
        return (scores.gather(0, order).softmax(0) * costs.gather(0, order)).sum(0)

    found = own.of(sx.estimators.TopKExpectation(k=3)).gradient
    torch.testing.assert_close(found, differences(own, loss), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("objective", ["E[L(z)]", "L(E[z])"])
def test_the_objective_at_noisy_scores(objective: str) -> None:
    """On a choice Gumbel noise gives a softmax: what is drawn there is compared with it."""
    torch.manual_seed(1)
    weight = randn(5)
    own = objectives(sx.Choice(randn(2, 5)), lambda z: (z * weight).sum(-1) ** 2 + 3)
    exact = own.of(sx.estimators.GumbelStraightThrough(), objective)
    drawn = _mean(own._perturbed(objective, "gumbel", 1.0))
    assert exact.error is None and drawn.error is not None
    assert float((drawn.gradient - exact.gradient).norm()) < 3 * drawn.error
    assert drawn.error < 0.03 * float(exact.gradient.norm())


def test_the_objective_of_normal_noise() -> None:
    """Two tags of one position: P(first) is Φ of the difference, and a transition plays no part;
    with two positions it does, as differences of frequencies at the same noise tell."""
    one = sx.LinearChain(torch.tensor([[0.3, -0.2]], dtype=f64), torch.zeros(2, 2, dtype=f64))
    own = objectives(one, lambda z: 2 * z[..., 0, 0])
    found = own.of(sx.estimators.PerturbAndMAP(noise="normal"))
    density = 2 * math.exp(-((0.5 / 2**0.5) ** 2) / 2) / math.sqrt(2 * math.pi) / 2**0.5
    wanted = torch.tensor([density, -density, 0, 0, 0, 0], dtype=f64)
    assert found.error is not None and float((found.gradient - wanted).norm()) < 3 * found.error
    two = sx.LinearChain(randn(2, 2), randn(2, 2))
    own = objectives(two, cost_of_two)
    found = own.of(sx.estimators.IMLE(noise="normal"))
    every = two.enumerate_support()
    epsilon = torch.randn(100_000, 2, 2, dtype=f64, generator=seed(5))
    noisy = torch.einsum("sij,nij->sn", epsilon, every)

    def loss(s: sx.Structure) -> Tensor:
        best = (s.score(every) + noisy).argmax(-1)
        return cost_of_two(every)[best].mean()

    assert float((differences(own, loss, 0.2) - found.gradient).norm()) < 0.05


def cost_of_two(z: Tensor) -> Tensor:
    w = torch.tensor([[1.0, -1.0], [0.5, 2.0]], dtype=f64)
    return (z * w).sum((-1, -2)).square()


def test_perturbed_estimators_and_their_own_objective() -> None:
    """With many draws Perturbed is near L(E[z]) of its noise; on a choice I-MLE's is exact."""
    options = {"many": sx.estimators.Perturbed(samples=400)}
    (record,) = sx.diagnose(chain(), cost, options, samples=40, generator=seed()).records
    assert record["bias"] < 4 * record["error"] + 0.02
    choice = sx.Choice(torch.tensor([0.0, 0.5, 1.0]))
    names = ["imle", "gumbel-straight-through", "perturb-and-map", "perturbed"]
    found = records(sx.diagnose(choice, lambda z: z[..., 0], names, samples=3, generator=seed()))
    quality = [found[name, found_against(name)]["reference"][:5] for name in names]
    assert quality == ["exact", "exact", "exact", "Monte"]
    plain = sx.estimators.IMLE(noise=None)  # which is BlackBox
    result = sx.diagnose(choice, lambda z: z[..., 0], [plain], samples=1)
    assert [r["reference"] for r in result.records] == ["none of its own"] * 2


def test_paths_whose_noise_is_cut_off_have_no_reference() -> None:
    free = sx.GridPath(-torch.ones(2, 2), moves="all", smoothing=sx.Hard())
    with pytest.raises(sx.IntractableError, match="cuts noise off"):
        sx.diagnose(free, lambda z: z.sum((-1, -2)), ["imle"], samples=1)


def found_against(name: str) -> str:
    return sx.estimators.by_name(name).objective


def test_calls(every: sx.Diagnosis) -> None:
    found = records(every)
    assert found["marginals", "L(E[z])"]["oracles"] == "1 marginals"
    assert found["spigot", "E[L(z)]"]["oracles"] == "1 argmax, 1 sparsemap"
    assert found["black-box", "E[L(z)]"]["oracles"] == "2 argmax"
    options = {"four": sx.estimators.Reinforce(samples=4, baseline="self-critic")}
    (record,) = sx.diagnose(chain(), cost, options, samples=2).records
    assert record["estimator"] == "four"
    assert record["oracles"] == "4 sample, 1 log_partition, 1 argmax" and record["calls"] == 6


def test_the_table(every: sx.Diagnosis) -> None:
    text = str(every)
    for word in ("estimator", "bias", "variance", "cosine", "E[L(z)]", "sum-and-sample", "ms"):
        assert word in text
    assert "no gradient of its own" in text
    assert "not applicable: gumbel-straight-through" in text
    assert max(map(len, text.splitlines())) <= 200


def test_the_table_without_rich(every: sx.Diagnosis, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    lines = str(every).splitlines()
    assert lines[0].split()[:3] == ["estimator", "objective", "against"]
    assert len(lines) == 1 + len(every.records) + len(every.notes())


def test_the_plot(every: sx.Diagnosis) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    axes = every.plot()
    assert axes.get_xlabel() == "standard deviation"
    assert every.plot(axes) is axes and len(axes.texts) == 2 * len(every.records)


def test_notes_are_those_of_the_records(every: sx.Diagnosis) -> None:
    assert any("L(argmax) is piecewise constant" in note for note in every.notes())
    assert len(sx.Diagnosis([]).notes()) == 1


def test_a_cost_without_a_gradient_has_one_of_zeros() -> None:
    leaf = torch.zeros(3, requires_grad=True)
    assert gradient(torch.ones(2), [leaf, leaf]).tolist() == [0.0] * 6


def test_same_seed_same_numbers() -> None:
    first, again, other = (
        sx.diagnose(chain(), cost, ["reinforce"], samples=3, generator=seed(n)).records[0]["bias"]
        for n in (1, 1, 2)
    )
    assert first == again != other


def test_estimators_are_left_alone() -> None:
    """In the middle of training: λ, baselines, draws and generators."""
    torch.manual_seed(0)
    seeds = [torch.Generator().manual_seed(i) for i in range(3)]
    e = sx.estimators
    ppo = e.PPO(samples=4, baseline="ema", normalize=True, generator=seeds[0])
    imle = e.IMLE("adaptive", generator=seeds[1])
    learned = e.Reinforce(baseline="ema", generator=seeds[2]).train()
    choice = sx.Choice(torch.tensor([0.0, 0.5, 1.0], requires_grad=True))
    cost = lambda z: z @ torch.tensor([1.0, 20.0, 4.0])  # noqa: E731
    for estimator in (ppo, imle, learned):
        estimator.loss(choice, cost).backward()
    before = [copy.deepcopy(one.state_dict()) for one in (ppo, imle, learned)]
    states = [seed.get_state() for seed in seeds]
    wanted = copy.deepcopy(ppo).replay(choice)
    found = sx.diagnose(choice, cost, [ppo, imle, learned], samples=3)
    assert len(found.records) == 3
    for one, known in zip((ppo, imle, learned), before, strict=True):
        assert all(torch.equal(t, known[name]) for name, t in one.state_dict().items())
    assert all(torch.equal(a.get_state(), b) for a, b in zip(seeds, states, strict=True))
    assert torch.equal(ppo.replay(choice), wanted)
    learned.loss(choice, cost)  # they still learn
    assert not torch.equal(learned.baseline.costs.total, before[2]["baseline.costs.total"])


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    sx.diagnose(sx.Choice(torch.zeros(3)), lambda z: z[..., 0], ["reinforce"], samples=2)
    assert torch.equal(before, torch.get_rng_state())


def test_a_cost_with_two_arguments() -> None:
    structure = chain()
    flat = sx.diagnose(structure, lambda z, items: cost(z) * (1 + items), ["marginals"], samples=2)
    factor = torch.tensor([1.0, 2.0], dtype=f64)
    wide = sx.diagnose(structure, lambda z: cost(z) * factor, ["marginals"], samples=2)
    assert flat.records[0]["bias"] < 1e-9 > wide.records[0]["bias"]


class Constant(nn.Module):
    """A policy with one weight for each action."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.3, -0.2], dtype=f64))

    def start(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        return inputs[:, 0, :2]

    def scores(self, state: Tensor) -> Tensor:
        return state + self.weight

    def advance(self, state: Tensor, action: Tensor) -> Tensor:
        return 0.5 * state + action


def test_incremental_structures() -> None:
    torch.manual_seed(0)
    structure = sx.ShiftReduce(Constant(), randn(1, 4, 2))
    names = ["exact-expectation", "reinforce", "top-k-expectation", "sum-and-sample"]
    names += ["gumbel-straight-through", "straight-through"]
    worth = randn(7, 2)
    result = sx.diagnose(
        structure, lambda z: (z * worth).sum((-1, -2)) ** 2, names, 30, generator=seed()
    )
    found = records(result)
    assert found["exact-expectation", "E[L(z)]"]["bias"] < 1e-9
    assert found["top-k-expectation", "E[L(z)]"]["bias"] < 1e-9  # there are five trees
    record = found["reinforce", "E[L(z)]"]
    assert record["bias"] < 4 * record["error"] > 0
    assert found["gumbel-straight-through", "E[L(z)]"]["distribution"] == "own"
    assert found["straight-through", "L(E[z])"]["reference"] == "none of its own"


def test_a_gradient_of_zero_has_no_bias() -> None:
    """At a vertex SparseMAP does not change; what rounding leaves of its gradient is nothing."""
    scores = torch.tensor([-1.6, 0.2, 2.2, 0.8], dtype=f64)
    price = torch.linspace(-1, 1, 4, dtype=f64).sin()
    found = sx.diagnose(
        sx.Choice(scores), lambda z: (z @ price - 1) ** 2, ["sparsemap", "marginals"], samples=2
    )
    (sparse, soft) = found.records
    assert sparse["bias"] == sparse["variance"] == sparse["error"] == 0
    assert math.isnan(sparse["cosine"])
    assert soft["bias"] < 1e-9 and soft["cosine"] == pytest.approx(1.0)


def test_the_reference_of_the_k_best_is_of_the_same_k() -> None:
    """With ties at rank k; and of different trees."""
    scores = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    cost = torch.tensor([0.0, 1.0, 3.0, 9.0], dtype=torch.float64)
    found = Objectives(sx.Choice(scores), [scores], lambda z: z @ cost)
    estimator = sx.estimators.TopKExpectation(2)
    (mine,) = torch.autograd.grad(estimator.loss(sx.Choice(scores), lambda z: z @ cost), scores)
    torch.testing.assert_close(found.of(estimator).gradient, mine)
