"""The diagnosis of gradients: what it measures, what it prints, what it counts."""

from __future__ import annotations

import sys

import pytest
import torch
from table import f64, randn
from torch import Tensor, nn

import structmax as sx


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
    for name in ("straight-through", "spigot", "black-box"):
        assert (name, "E[L(z)]") in found and (name, "L(E[z])") in found


def test_exact_ones_are_exact(every: sx.Diagnosis) -> None:
    found = records(every)
    for key in (("marginals", "L(E[z])"), ("exact-expectation", "E[L(z)]")):
        assert found[key]["bias"] < 1e-9 and found[key]["variance"] < 1e-9
        assert found[key]["cosine"] == pytest.approx(1.0)


def test_unbiased_and_biased_ones(every: sx.Diagnosis) -> None:
    found = records(every)
    for name in ("reinforce", "ppo", "sum-and-sample"):
        record = found[name, "E[L(z)]"]
        assert record["bias"] < 4 * record["error"] and record["variance"] > 0
    biased = found["straight-through", "E[L(z)]"]
    assert biased["bias"] > 0.1 and biased["variance"] < 1e-9


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
    assert every.plot().get_xlabel() == "standard deviation"


def test_same_seed_same_numbers() -> None:
    first, again, other = (
        sx.diagnose(chain(), cost, ["reinforce"], samples=3, generator=seed(n)).records[0]["bias"]
        for n in (1, 1, 2)
    )
    assert first == again != other


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
    worth = randn(7, 2)
    result = sx.diagnose(
        structure, lambda z: (z * worth).sum((-1, -2)) ** 2, names, 30, generator=seed()
    )
    found = records(result)
    assert found["exact-expectation", "E[L(z)]"]["bias"] < 1e-9
    assert found["top-k-expectation", "E[L(z)]"]["bias"] < 1e-9  # there are five trees
    record = found["reinforce", "E[L(z)]"]
    assert record["bias"] < 4 * record["error"] > 0
