"""The CPU kernels of charts against the definition and the kernels that read lists."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import structmax as sx
from structmax.forest import cpu, cpu_charts, ops
from structmax.forest.products import ProductBlock
from structmax.forest.topology import bucket, lookup, name_of
from structmax.smoothing import Shannon

inf, nan = math.inf, math.nan
KINDS = ("binary", "single", "multi")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def log_space(monkeypatch):
    """The items that were computed term by term."""
    items: list[int] = []

    class Counted(cpu.Block):
        def __init__(self, forest, scores, goal, code):
            items.append(len(scores))
            super().__init__(forest, scores, goal, code)

    monkeypatch.setattr(cpu, "Block", Counted)
    return items


def key_of(kind: str, n: int) -> str:
    if kind == "binary":
        return name_of("binary_tree", (n, 0))
    return name_of("projective_tree", (n, 0, int(kind == "single"), 0))


def tree(kind: str, scores: Tensor, lengths: Tensor | None = None, **options):
    """Of n words: for dependencies, scores are of n + 1."""
    if kind == "binary":
        return sx.BinaryTree(scores, lengths, **options)
    return sx.DependencyTree(scores, lengths=lengths, root=kind, projective=True, **options)


def draw(kind: str, items: int, n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    side = n if kind == "binary" else n + 1
    return torch.randn(items, side, side, dtype=dtype)


def parts_of(kind: str, items: int, n: int, dtype: torch.dtype = torch.float64):
    """Scores ``(B, P)`` of a forest and the goals of whole sentences."""
    forest = lookup(key_of(kind, n))
    goal = torch.full((items,), forest.num_nodes - 1, dtype=torch.int32)
    return forest, torch.randn(items, forest.num_parts, dtype=dtype), goal


def run(forest, scores: Tensor, goal: Tensor, gamma: float = 1.0):
    return cpu.gradient(forest, scores, goal, Shannon(gamma).code)


def run_lists(monkeypatch, *args):
    with monkeypatch.context() as patch:
        patch.setattr(cpu_charts, "chart_of", lambda name: None)
        return run(*args)


def answers(structure) -> tuple[Tensor, Tensor]:
    return structure.marginals(), structure.log_partition()


def compare(found, wanted, tolerance: float) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 9, 16, 17, 20, 33])
def test_trees(kind: str, n: int, monkeypatch, log_space) -> None:
    """Ragged and not, against the definition and the kernels that read lists."""
    some = torch.tensor([n, 1, (n + 1) // 2, max(1, n - 1)])
    for dtype, lengths, gamma in (
        (torch.float64, None, 1.0),
        (torch.float64, some, 0.6),
        (torch.float32, some, 2.0),
    ):
        given = draw(kind, 4, n, dtype), lengths
        structure = tree(kind, *given, smoothing=Shannon(gamma))
        found = answers(structure)
        assert found[0].dtype == dtype and not log_space
        with monkeypatch.context() as patch:
            patch.setattr(cpu_charts, "chart_of", lambda name: None)
            compare(found, answers(tree(kind, *given, smoothing=Shannon(gamma))), TOLERANCE[dtype])
        with sx.backend("naive"):
            compare(found, answers(tree(kind, *given, smoothing=Shannon(gamma))), TOLERANCE[dtype])
        torch.testing.assert_close(
            found[1], tree(kind, *given, smoothing=Shannon(gamma)).log_partition()
        )


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_and_strides(kind: str) -> None:
    scores = draw(kind, 3, 9)
    turned = scores.mT.contiguous().mT
    compare(answers(tree(kind, turned)), answers(tree(kind, scores)), 0.0)
    half = scores.bfloat16()
    mu, value = answers(tree(kind, half.float()))
    compare(answers(tree(kind, half)), (mu.bfloat16(), value), 0.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
def test_items_out_of_range(kind: str, shift: float, monkeypatch, log_space) -> None:
    """Narrow, wide, forbidden, infeasible, shorter and NaN items side by side."""
    n = 9
    forest, theta, goal = parts_of(kind, 10, n)
    shorter = int(cpu_charts.chart_of(forest.name).goals[5])
    theta[1] *= 1000.0
    theta[2, ::7] = -inf
    theta[3] = -inf
    theta[4, 3] = inf
    theta[5, 2] = nan
    theta[6] *= 1e30
    goal[7], goal[8] = shorter, shorter - 1  # the latter is no whole sentence
    theta[7, -1] = nan  # beyond its length
    theta = theta + shift
    log_space.clear()
    found = run(forest, theta, goal)
    assert log_space == [5]
    wanted = run_lists(monkeypatch, forest, theta, goal)
    for item in (0, 1, 2, 3, 6, 7, 8, 9):
        compare([x[item] for x in found], [x[item] for x in wanted], 1e-8)
    for item in (4, 5):
        compare([x[item] for x in found], [x[item] for x in wanted], 0.0)
    theta[7, -1] = 0.0  # the definition would look at it
    with sx.backend("naive"):
        exact = ops.forest.value_and_gradient([theta], [goal], forest.name, Shannon(1.0).code)
    for item in (0, 1, 2, 6, 7, 8, 9):
        compare([x[item] for x in found], [x[item] for x in exact], 1e-8)
    assert found[0][3] == -inf and (found[1][3] == 0).all()
    value = cpu.value(forest, theta, goal, Shannon(1.0).code)  # the same pass
    assert torch.equal(value.nan_to_num(7.0), found[0].nan_to_num(7.0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.8])
def test_forbidden_parts(kind: str, share: float, monkeypatch, log_space) -> None:
    """A zero is exact: no other kernel is asked."""
    forest, theta, goal = parts_of(kind, 40, 7)
    theta[torch.rand(theta.shape) < share] = -inf
    found = run(forest, theta, goal)
    assert not log_space
    compare(found, run_lists(monkeypatch, forest, theta, goal), 1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
def test_long_sentences_are_shifted_into_range(kind: str, scale: float, monkeypatch, log_space):
    """Without a shift the sums would overflow long before the top."""
    forest, theta, goal = parts_of(kind, 2, 120)
    theta = 10 + scale * theta
    found = run(forest, theta, goal, 0.7)
    assert not log_space
    compare(found, run_lists(monkeypatch, forest, theta, goal, 0.7), 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_poor_shift_is_mended(kind: str, monkeypatch, log_space) -> None:
    """Half of the scores are no sample of what trees are made of."""
    n = 64
    forest, theta, goal = parts_of(kind, 3, n)
    theta[:, ::2] -= 40.0
    theta[1] = -theta[1]
    found = run(forest, theta, goal)
    compare(found, run_lists(monkeypatch, forest, theta, goal), 1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("far", [40.0, 90.0, 180.0])
def test_soft_masks_stay_in_range(kind: str, far: float, monkeypatch, log_space) -> None:
    """Half of the parts are hardly possible, and some are needed all the same."""
    forest, theta, goal = parts_of(kind, 20, 5)
    theta -= far * (torch.rand_like(theta) < 0.5)
    found = run(forest, theta, goal)
    assert far > 40.0 or not log_space
    compare(found, run_lists(monkeypatch, forest, theta, goal), 1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1e200, 1e306])
def test_shifts_that_overflow(kind: str, scale: float, log_space) -> None:
    forest, theta, goal = parts_of(kind, 3, 6)
    theta = scale * theta.abs()
    theta[1] *= -1.0
    theta[2, 0] = -inf
    found = run(forest, theta, goal)
    assert log_space == [3] and found[0].isfinite()[:2].all()
    wanted = cpu.Block(forest, theta.numpy(), goal.numpy(), Shannon(1.0).code)
    compare(found, [torch.tensor(x) for x in (wanted.values(), wanted.gradient())], 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_items_stay_finite(kind: str, monkeypatch) -> None:
    """Scores near the ends of the range, some forbidden."""
    forest, theta, goal = parts_of(kind, 60, 6)
    theta = 60.0 * theta.sign() * torch.rand_like(theta)
    theta[torch.rand(theta.shape) < 0.3] = -inf
    found = run(forest, theta, goal)
    assert found[1].isfinite().all()
    compare(found, run_lists(monkeypatch, forest, theta, goal), 1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_bits_do_not_depend_on_the_batch(kind: str, dtype: torch.dtype) -> None:
    n = 21
    scores = draw(kind, 37, n, dtype)
    scores[::5] *= 100.0  # some are computed in log space
    lengths = torch.randint(1, n + 1, (37,))
    mu, value = answers(tree(kind, scores, lengths))
    for some in (slice(0, 1), slice(3, 20), slice(10, 37, 4)):
        part = answers(tree(kind, scores[some], lengths[some]))
        assert torch.equal(part[0], mu[some]) and torch.equal(part[1], value[some])
    longer = torch.nn.functional.pad(scores, (0, 9, 0, 9))
    assert bucket(n) != bucket(n + 9)
    part = answers(tree(kind, longer, lengths))
    side = scores.shape[-1]
    assert torch.equal(part[0][:, :side, :side], mu) and torch.equal(part[1], value)


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_nothing(kind: str) -> None:
    scores = draw(kind, 20, 24)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = answers(tree(kind, scores))
        torch.set_num_threads(3)
        compare(answers(tree(kind, scores)), one, 0.0)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", KINDS)
def test_empty_batch(kind: str) -> None:
    mu, value = answers(tree(kind, draw(kind, 0, 5)))
    assert value.shape == (0,) and mu.shape[0] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives(kind: str) -> None:
    scores = draw(kind, 2, 4).requires_grad_()
    lengths = torch.tensor([4, 3])

    def value(scores):
        return tree(kind, scores, lengths, smoothing=Shannon(0.8)).log_partition()

    assert torch.autograd.gradcheck(value, scores)
    assert torch.autograd.gradgradcheck(value, scores)


def test_which_forests_are_charts() -> None:
    assert cpu_charts.chart_of(name_of("binary_tree", (5, 0))) is not None
    assert cpu_charts.chart_of(name_of("binary_tree", (5, 3))) is None
    assert cpu_charts.chart_of(name_of("projective_tree", (5, 0, 1, 0))) is not None
    assert cpu_charts.chart_of(name_of("projective_tree", (5, 2, 1, 0))) is None
    assert cpu_charts.chart_of(name_of("projective_tree", (5, 0, 1, 1))) is None
    assert cpu_charts.chart_of("") is None
    for kind in KINDS:
        forest = lookup(key_of(kind, 6))
        assert cpu_charts.chart_of(forest.name).goals[-1] == forest.num_nodes - 1
        block = cpu_charts.block_of(
            forest, np.zeros((1, forest.num_parts)), np.array([forest.num_nodes - 1]), 1.0, False
        )
        assert not isinstance(block, ProductBlock) and not block.left.any()
