"""The Triton kernel of projective trees against the definition and the CPU kernels.

With a CUDA device it runs on it; without one, under Triton's interpreter on a few words.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

import structmax as sx
from structmax.forest import gpu, gpu_eisner, gpu_items, ops
from structmax.forest.topology import lookup, name_of
from structmax.smoothing import Gini, Shannon
from structmax.structures import projective  # noqa: F401  draws these forests

# The interpreter computes with numpy, which warns of log 0.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
ROOTS = ("single", "multi")
inf, nan = math.inf, math.nan


@pytest.fixture(autouse=True)
def _only_this_kernel(monkeypatch):
    """Value and gradient are to come from here."""
    torch.manual_seed(0)

    def other(*args):
        raise AssertionError("this is left to other kernels")

    monkeypatch.setattr(gpu_items, "plan", other)


def key_of(n: int, root: str) -> str:
    return name_of("projective_tree", (n, 0, int(root == "single"), 0))


def gradient(name: str, key: str, scores: Tensor, goal: Tensor, gamma: float = 1.0):
    with sx.backend(name):
        return ops.forest.value_and_gradient([scores], [goal], key, Shannon(gamma).code)


def check(key: str, scores: Tensor, goal: Tensor, gamma: float = 1.0) -> tuple[Tensor, Tensor]:
    """The value and gradient ``(B, P)``, after a comparison with both other backends."""
    found = gradient("gpu", key, scores.to(DEVICE), goal.to(DEVICE), gamma)
    tolerance = TOLERANCE[scores.dtype]
    for name in ("naive", "cpu"):
        for a, b in zip(found, gradient(name, key, scores, goal, gamma), strict=True):
            assert a.dtype == scores.dtype
            torch.testing.assert_close(a.cpu(), b, rtol=tolerance, atol=tolerance, equal_nan=True)
    return found[0].cpu(), found[1].cpu()


def goals(key: str, items: int) -> Tensor:
    return torch.full((items,), lookup(key).num_nodes - 1)


def tree(scores: Tensor, root: str, lengths: Tensor | None = None, **options):
    return sx.DependencyTree(scores, lengths=lengths, root=root, projective=True, **options)


@pytest.mark.parametrize("root", ROOTS)
def test_visits_are_conserved_under_huge_scores(root: str) -> None:
    """Where every tree has huge scores, as many visits leave a span as reach it."""
    key = key_of(4, root)
    scores = torch.full((3, 16), torch.finfo(torch.float32).min)
    scores[1:] = torch.tensor([[-1e9], [-1e18]])
    mu = gradient("gpu", key, scores.to(DEVICE), goals(key, 3).to(DEVICE))[1]
    assert bool((mu <= 1 + 1e-6).all())
    torch.testing.assert_close(mu.sum(-1).cpu(), torch.full((3,), 4.0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 9])
def test_ragged_trees(n: int, root: str) -> None:
    """As structures ask for them, with lengths and γ ≠ 1."""
    lengths = torch.tensor([n, max(1, n - 1), (n + 1) // 2])
    for dtype in (torch.float64, torch.float32):
        scores = torch.randn(3, n + 1, n + 1, dtype=dtype)
        options = {"smoothing": Shannon(0.6)}
        reference = tree(scores, root, lengths, **options)
        with sx.backend("gpu"):
            found = tree(scores.to(DEVICE), root, lengths.to(DEVICE), **options)
            value, mu = found.log_partition().cpu(), found.marginals().cpu()
        close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
        torch.testing.assert_close(value, reference.log_partition(), **close)
        torch.testing.assert_close(mu, reference.marginals(), **close)


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_more_splits_than_a_tile(dtype: torch.dtype, root: str, monkeypatch) -> None:
    monkeypatch.setattr(gpu_eisner, "ROWS", 2)  # 2 × 16, 4 × 8 and 8 × 4 of splits and spans
    monkeypatch.setattr(gpu_eisner, "EACH", 1)
    key = key_of(11, root)
    check(key, torch.randn(1, 121, dtype=dtype), goals(key, 1), 1.7)


@pytest.mark.parametrize("root", ROOTS)
def test_every_node_may_be_the_goal(root: str) -> None:
    key = key_of(4 if DEVICE.type == "cpu" else 40, root)
    forest = lookup(key)
    count = forest.num_nodes
    check(key, torch.randn(count, forest.num_parts).double(), torch.arange(count), 0.8)


@pytest.mark.parametrize("root", ROOTS)
def test_forbidden_arcs(root: str) -> None:
    """With −inf among the scores, up to items without any tree: value −inf and no gradient."""
    key = key_of(5, root)
    for dtype in (torch.float64, torch.float32):
        scores = torch.randn(6, 25, dtype=dtype)
        rate = torch.tensor([0.2, 0.3, 0.4, 0.5, 0.6, 1.0])[:, None]
        scores = torch.where(torch.rand(6, 25) < rate, -inf, scores)
        value, mu = check(key, scores, goals(key, 6))
        assert value[0] > -inf and value[-1] == -inf and not mu[-1].any()


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_large_scores(dtype: torch.dtype, root: str) -> None:
    """Spread by 1e4, shifted by ±1e4, and a γ that makes them larger still."""
    key = key_of(5, root)
    scores = (torch.randn(3, 25) * 64).round().to(dtype) / 64
    given = torch.stack([scores[0] * 1e4, scores[1] + 1e4, scores[2] - 1e4])
    value, mu = check(key, given, goals(key, 3))
    expected, _ = check(key, scores[1:], goals(key, 2))
    shift = torch.tensor([5e4, -5e4], dtype=dtype)  # a tree has five arcs
    torch.testing.assert_close(value[1:], expected + shift, rtol=1e-6, atol=1e-6)
    assert mu.isfinite().all()
    check(key, given[1:], goals(key, 2), 0.05)


@pytest.mark.parametrize("root", ROOTS)
def test_nan(root: str) -> None:
    """A NaN never becomes a number; what the goal does not reach may hold anything."""
    n, long = 3, 5
    key = key_of(long, root)
    last = lookup(key_of(n, root)).num_nodes - 1
    clean = torch.randn(1, long * long).double()
    rows = clean.expand(n * n + 1, -1).clone()
    rows[:, n * n :] = nan  # of words after the goal's last
    at = torch.arange(n * n)
    rows[at, at] = nan
    forbidden = clean.clone()
    forbidden[0, 0], forbidden[0, 1] = -inf, nan
    rows = torch.cat([rows, forbidden])
    goal = torch.full((len(rows),), last)
    value, mu = gradient("gpu", key, rows.to(DEVICE), goal.to(DEVICE))
    for item in (*range(n * n), n * n + 1):
        assert value[item].isnan() and mu[item, : n * n].isnan().all()
        assert not mu[item, n * n :].any()
    expected = gradient("cpu", key, clean, torch.tensor([last]))
    torch.testing.assert_close(value[n * n].cpu(), expected[0][0])
    torch.testing.assert_close(mu[n * n].cpu(), expected[1][0])


def test_bits_do_not_depend_on_the_batch() -> None:
    for root in ROOTS:
        key = key_of(5, root)
        scores, goal = torch.randn(3, 25, device=DEVICE), goals(key, 3).to(DEVICE)
        whole = gradient("gpu", key, scores, goal)
        for some in (slice(0, 1), slice(1, 3)):
            part = gradient("gpu", key, scores[some], goal[some])
            assert torch.equal(part[0], whole[0][some]) and torch.equal(part[1], whole[1][some])
        with sx.backend("gpu"):
            value = ops.forest.value([scores], [goal], key, Shannon().code)
        assert torch.equal(value, whole[0])


def test_strides_half_precision_and_no_items() -> None:
    key = key_of(3, "single")
    scores, goal = torch.randn(2, 9, dtype=torch.float64), goals(key, 2)
    check(key, scores.t().contiguous().t(), goal)
    check(key, scores[:1].expand(2, -1), goal[:1].expand(2))
    check(key, scores, goal.int())
    low = scores.bfloat16().to(DEVICE)
    found = gradient("gpu", key, low, goal.to(DEVICE))
    expected = gradient("cpu", key, low.cpu().double(), goal)
    assert found[0].dtype == found[1].dtype == torch.bfloat16
    torch.testing.assert_close(found[1].cpu().double(), expected[1], rtol=1e-2, atol=1e-2)
    value, mu = gradient("gpu", key, low[:0], goal[:0].to(DEVICE))
    assert value.shape == (0,) and mu.shape == (0, 9)


@pytest.mark.parametrize("root", ROOTS)
def test_second_derivatives(root: str) -> None:
    """Those of the shared kernels, behind this one's marginals."""
    scores, direction = torch.randn(2, 5, 5).double(), torch.randn(2, 5, 5).double()
    found = []
    for name, device in (("gpu", DEVICE), ("cpu", "cpu")):
        theta = scores.to(device).requires_grad_()
        with sx.backend(name):
            structure = tree(theta, root, smoothing=Shannon(1.5))
            total = (structure.marginals() * direction.to(device)).sum()
            total = total + structure.log_partition().square().sum()
            found.append(torch.autograd.grad(total, theta)[0].cpu())
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_only_plain_charts(monkeypatch) -> None:
    """Labels, siblings, long sentences and other smoothings are left to the shared kernels."""
    forest = lookup("projective_tree:3,0,1,0")
    assert gpu_eisner.plan(forest) == (3, 1)
    assert gpu.plan_of(forest, torch.zeros(1, 9), Gini().code) is None
    for key in ("projective_tree:3,2,1,0", "projective_tree:3,0,1,1", "binary_tree:3,0"):
        assert gpu_eisner.plan(lookup(key)) is None
    monkeypatch.setattr(gpu_eisner, "LONGEST", 2)
    assert gpu_eisner.plan(forest) is None


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a CUDA device")
class TestOnTheDevice:
    """What the interpreter cannot show: barriers, capture, no synchronisation."""

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    @pytest.mark.parametrize("root", ROOTS)
    @pytest.mark.parametrize("n", [15, 16, 17, 31, 33, 64, 104, 127, 128, 256])
    def test_sizes(self, n: int, root: str, dtype: torch.dtype, monkeypatch) -> None:
        monkeypatch.setattr(gpu_eisner, "LONGEST", 256)
        key = key_of(n, root)
        scores = torch.randn(5, n * n, dtype=dtype)
        goal = goals(key, 5)
        goal[1:] = torch.randint(lookup(key).num_nodes, (4,))
        here = scores.to(DEVICE), goal.to(DEVICE)
        first, expected = gradient("gpu", key, *here), gradient("cpu", key, scores, goal)
        for a, b in zip(first, expected, strict=True):
            close = 10 * TOLERANCE[dtype]
            torch.testing.assert_close(a.cpu(), b, rtol=close, atol=close)
        for _ in range(10):
            again = gradient("gpu", key, *here)
            assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])

    def test_capture(self) -> None:
        key = key_of(20, "single")
        scores, goal = torch.randn(8, 400, device=DEVICE), goals(key, 8).to(DEVICE)
        expected = gradient("gpu", key, scores, goal)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = gradient("gpu", key, scores, goal)
        for _ in range(2):
            graph.replay()
            assert torch.equal(captured[0], expected[0])
            assert torch.equal(captured[1], expected[1])

    def test_no_synchronisation(self) -> None:
        key = key_of(10, "multi")
        scores, goal = torch.randn(4, 100, device=DEVICE), goals(key, 4).to(DEVICE)
        gradient("gpu", key, scores, goal)
        torch.cuda.set_sync_debug_mode("error")
        try:
            gradient("gpu", key, scores, goal)
        finally:
            torch.cuda.set_sync_debug_mode("default")
