"""The Triton kernels of non-projective trees against those of the CPU.

With a CUDA device they run on it; without one, under Triton's interpreter on the CPU.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
pytest.importorskip("triton")

import structmax as sx
from structmax.oracles import (
    arborescence_cpu,
    arborescence_gpu,
    matrix_tree_cpu,
    matrix_tree_gpu,
)

# The interpreter computes with numpy, which warns of log 0.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
nan, inf = math.nan, math.inf
KINDS = [
    "random", "ties", "equal", "forbidden", "sparse", "spread", "shifted", "cycles", "spread gaps",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def make(kind: str, n: int, items: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    """Scores ``(B, n+1, n+1)``."""
    scores = torch.randn(items, n + 1, n + 1, dtype=dtype)
    at = torch.arange(n + 1)
    if kind == "ties":
        return scores.round()
    if kind == "equal":
        return torch.full_like(scores, 7.0)
    if kind in ("forbidden", "sparse"):
        return torch.where(
            torch.rand_like(scores) < {"forbidden": 0.3, "sparse": 0.7}[kind], -inf, scores
        )
    if kind == "spread":
        return scores * 1e3
    if kind == "spread gaps":
        return torch.where(torch.rand_like(scores) < 0.3, -inf, scores * 1e3 + 1e4)
    if kind == "shifted":
        return scores - 1e4
    if kind == "cycles":  # of cycles, of cycles
        for width in (2, 4, 8, 16):
            near = ((at - 1) // width)[:, None] == ((at - 1) // width)
            scores = scores + 10 * near * (torch.rand_like(scores) < 0.7)
        scores[:, 0] -= 100
    return scores


def ragged(n: int) -> Tensor:
    return torch.tensor([n, n - 1])


def poisoned(scores: Tensor, lengths: Tensor) -> Tensor:
    """NaN where no tree looks."""
    at = torch.arange(scores.shape[-1])
    inside = at <= lengths[:, None]
    used = (at[:, None] != at) & (at > 0) & inside[:, :, None] & inside[:, None, :]
    return torch.where(used, scores, nan)


def require_trees(heads: Tensor, lengths: Tensor, single: bool) -> None:
    above = torch.nn.functional.pad(heads, (1, 0))
    for _ in range(heads.shape[-1].bit_length()):
        above = above.gather(-1, above)
    assert not bool(above.any())
    inside = torch.arange(1, heads.shape[-1] + 1) <= lengths[:, None]
    assert not bool(heads[~inside].any())
    if single:
        assert ((heads == 0) & inside).sum(-1).tolist() == lengths.clamp(max=1).tolist()


def check_best_tree(scores: Tensor, lengths: Tensor, single: bool) -> None:
    value, heads = (
        t.cpu() for t in arborescence_gpu.argmax(scores.to(DEVICE), lengths.to(DEVICE), single)
    )
    expected, _ = arborescence_cpu.argmax(scores, lengths, single)
    torch.testing.assert_close(value, expected.to(value.dtype), rtol=1e-6, atol=1e-6)
    exists = value > -inf
    require_trees(heads[exists], lengths[exists], single)
    assert not bool(heads[~exists].any())
    word = torch.arange(1, scores.shape[-1])
    own = scores.gather(1, torch.nn.functional.pad(heads, (1, 0))[:, None])[:, 0, 1:]
    total = torch.where(word <= lengths[:, None], own, 0.0).sum(-1)
    torch.testing.assert_close(value[exists], total[exists], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_best_tree(kind: str, single: bool) -> None:
    for n in (1, 6):
        lengths = ragged(n)
        check_best_tree(poisoned(make(kind, n), lengths), lengths, single)


def test_best_tree_in_float32_and_of_other_strides() -> None:
    scores = make("random", 9, dtype=torch.float32)
    for given in (scores.mT, scores[:1].expand(2, 10, 10)):
        check_best_tree(given, torch.tensor([9, 3]), True)


def test_best_tree_of_a_chain_of_cycles() -> None:
    """Each round closes one cycle only, so that there are as many as words."""
    n = 7
    scores = torch.full((1, n + 1, n + 1), -1e3, dtype=torch.float64)
    for i in range(1, n):
        scores[0, i + 1, i] = -float(i)  # to the next
        scores[0, i, i + 1] = 0.0  # and back
    scores[0, 0, n] = -500.0
    check_best_tree(scores, torch.tensor([n]), True)
    check_best_tree(scores, torch.tensor([n]), False)


def check_sums(scores: Tensor, lengths: Tensor, single: bool, tolerance: float) -> None:
    on_device = scores.to(DEVICE), lengths.to(DEVICE), single, 0.8
    value, mu = (t.cpu() for t in matrix_tree_gpu.run(True, *on_device))
    (alone,) = (t.cpu() for t in matrix_tree_gpu.run(False, *on_device))
    expected, marginals = matrix_tree_cpu.gradient(scores, lengths, single, 0.8)
    torch.testing.assert_close(value, alone)
    torch.testing.assert_close(value, expected.to(value), rtol=tolerance, atol=tolerance)
    marginals[expected == -inf] = 0.0
    torch.testing.assert_close(mu, marginals.to(mu), rtol=0, atol=tolerance)


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_sums(kind: str, single: bool) -> None:
    for n in (1, 4):
        lengths = ragged(n)
        check_sums(poisoned(make(kind, n), lengths), lengths, single, 1e-11)


@pytest.mark.parametrize("single", [True, False])
def test_sums_of_one_tree_only(single: bool) -> None:
    """A path, in which every other head is forbidden."""
    scores = torch.full((1, 7, 7), -inf, dtype=torch.float64)
    for i, h in enumerate([3, 6, 0, 3, 4, 1], 1):
        scores[0, h, i] = 1e3 * i
    check_sums(scores, torch.tensor([6]), single, 1e-12)
    check_best_tree(scores, torch.tensor([6]), single)


def test_sums_in_float32_and_of_other_strides() -> None:
    scores = make("random", 5, dtype=torch.float32)
    for given in (scores.mT, scores[:1].expand(2, 6, 6)):
        check_sums(given, torch.tensor([4, 3]), True, 1e-5)


def test_bad_scores_give_nan() -> None:
    for bad in (nan, inf):
        scores = make("random", 3)
        scores[1, 0, 2] = bad
        lengths = torch.full((2,), 3)
        on_device = scores.to(DEVICE), lengths.to(DEVICE), True
        value, heads = arborescence_gpu.argmax(*on_device)
        assert value.isnan().tolist() == [False, True] and not bool(heads[1].any())
        value, mu = matrix_tree_gpu.run(True, *on_device, 1.0)
        assert value.isnan().tolist() == [False, True]
        assert not bool(mu[0].isnan().any()) and bool(mu[1, 0, 1:].isnan().all())


FIRST = {
    "log_partition": lambda tree, heads: tree.log_partition(),
    "marginals": lambda tree, heads: tree.marginals(),
    "argmax": lambda tree, heads: tree.argmax(),
    "max_marginals": lambda tree, heads: tree.max_marginals(),
    "log_prob": lambda tree, heads: tree.log_prob(heads),
    "score": lambda tree, heads: tree.score(heads),
    "topk": lambda tree, heads: tree.topk(2),
    "sample": lambda tree, heads: tree.sample(),
    "entropy": lambda tree, heads: tree.entropy(),
    "sparsemap": lambda tree, heads: tree.sparsemap(),
    "one item": lambda tree, heads: tree[1],
}


@pytest.mark.parametrize("bad", [nan, inf])
@pytest.mark.parametrize("query", FIRST)
def test_the_first_query_looks_at_the_scores(query: str, bad: float) -> None:
    """Whichever it is, and the second too, with labels or not; bad lengths are found at once."""
    for labels in ((), (2,)):
        scores = torch.randn(2, 4, 4, *labels).to(DEVICE)
        heads = torch.tensor([0, 1, 2], device=DEVICE)
        heads = torch.stack([heads, torch.zeros_like(heads)], -1) if labels else heads
        scores[(1, 0, 2, *(0,) * len(labels))] = bad
        name = "scores[1, 0, 2, 0]" if labels else "scores[1, 0, 2]"
        with sx.backend("gpu"):
            tree = sx.DependencyTree(scores)
            for _ in range(2):
                with pytest.raises(ValueError) as caught:
                    FIRST[query](tree, heads)
                assert f"{name} is {bad}" in str(caught.value)
            with pytest.raises(ValueError, match="lengths must be between 1 and 3"):
                sx.DependencyTree(scores, torch.tensor([1, 4], device=DEVICE))


def with_projective(root: str, siblings: bool = False) -> Callable[[Tensor], sx.Structure]:
    def make(scores: Tensor) -> sx.Structure:
        extra = scores.new_zeros(*scores.shape[:3], 4) if siblings else None
        return sx.DependencyTree(scores, projective=True, root=root, siblings=extra)

    return make


TREES = {  # how to make it of (2, 4, 4) or (2, 4, 4, 2), a structure, where it has parts
    "binary": (sx.BinaryTree, [(0, 0), (0, 1), (0, 3), (1, 1), (2, 2), (2, 3), (3, 3)], "upper"),
    "single": (with_projective("single"), [0, 1, 2], "arcs"),
    "multi": (with_projective("multi"), [0, 1, 2], "arcs"),
    "siblings": (with_projective("single", siblings=True), [0, 1, 2], "arcs"),
}


@pytest.mark.parametrize("query", FIRST)
@pytest.mark.parametrize("kind", TREES)
def test_the_first_query_of_a_chart_looks(kind: str, query: str) -> None:
    make_tree, human, where = TREES[kind]
    for labels, bad in (((), nan), ((2,), inf)):
        scores = torch.randn(2, 4, 4, *labels).to(DEVICE)
        z: Any = [(*part, 0) if where == "upper" else (part, 0) for part in human]
        scores[(1, 0, 2, *(0,) * len(labels))] = bad
        name = "scores[1, 0, 2, 0]" if labels else "scores[1, 0, 2]"
        with sx.backend("gpu"):
            tree = make_tree(scores)
            for _ in range(2):
                with pytest.raises(ValueError) as caught:
                    FIRST[query](tree, [z, z] if labels else [human, human])
                assert f"{name} is {bad}" in str(caught.value)


@pytest.mark.parametrize("kind", TREES)
def test_a_bad_score_anywhere_shows_in_the_value(kind: str) -> None:
    """Which is what the first query relies on; beside forbidden parts, too."""
    make_tree, _, where = TREES[kind]
    at = torch.arange(4)
    parts = at[:, None] <= at if where == "upper" else (at > 0) & (at[:, None] != at)
    for labels in ((), (2,)):
        cells = parts[..., None].expand(4, 4, *labels) if labels else parts
        scores = torch.randn(2 * int(cells.sum()), 4, 4, *labels)
        scores[torch.rand_like(scores) < 0.2] = -inf
        for bad, half in zip((nan, inf), scores.chunk(2), strict=True):
            for item, cell in zip(half, cells.nonzero().tolist(), strict=True):
                item[tuple(cell)] = bad
        with sx.backend("gpu"):
            tree = make_tree(scores.to(DEVICE))._trusted()
            assert not bool(tree.log_partition().isfinite().any())


def test_a_maximum_does_not_show_a_bad_score() -> None:
    scores = torch.zeros(4, 4, device=DEVICE)
    scores[0, 2] = nan
    with sx.backend("gpu"):
        for smoothing in (sx.Hard(), sx.Gini(), sx.Tsallis(alpha=1.5)):
            with pytest.raises(ValueError, match=r"scores\[0, 2\] is nan"):
                sx.BinaryTree(scores, smoothing=smoothing).log_partition()


def test_looking_at_values_only() -> None:
    """An item without a tree is told from one with a bad score, which may lie in the padding."""
    scores = make("random", 3, dtype=torch.float32).to(DEVICE)
    scores[1, :, 2] = -inf
    with sx.backend("gpu"):
        for _ in range(2):
            with pytest.raises(ValueError, match="item 1 allows no structure"):
                sx.DependencyTree(scores).argmax()
        scores[1, :, 2] = 0.0
        scores[1, :, 3] = scores[1, 3] = scores[:, :, 0] = nan
        tree = sx.DependencyTree(scores, torch.tensor([3, 2], device=DEVICE))
        assert tree.argmax().sum((-1, -2)).tolist() == [3, 2]


def test_queries_of_an_empty_batch() -> None:
    scores = torch.zeros(0, 4, 4, device=DEVICE)
    with sx.backend("gpu"):
        tree = sx.DependencyTree(scores)
        assert tree.argmax().shape == tree.marginals().shape == (0, 4, 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("root", ["single", "multi"])
def test_sizes_on_the_device(root: str) -> None:
    """Every power of two of a side, and one beyond what a program takes, against the CPU."""
    for n in (1, 15, 16, 31, 40, 60, 100, 127, 140, 270):
        for kind in KINDS if n < 128 else ["random", "spread"]:
            scores = make(kind, n, 3)
            lengths = torch.tensor([n, (n + 1) // 2, 1])
            on_cpu = sx.DependencyTree(scores, lengths, root=root, validate_args=False)
            on_gpu = on_cpu.to("cuda")
            value = on_cpu.log_partition()
            exists = value > -inf
            torch.testing.assert_close(on_gpu.log_partition().cpu(), value, rtol=1e-11, atol=1e-9)
            z, best = on_gpu.argmax().cpu(), on_cpu.argmax()
            assert torch.equal(z[~exists].isnan(), best[~exists].isnan())
            expected, found = (
                torch.where(t > 0, scores, 0.0).sum((-1, -2))[exists] for t in (best, z)
            )
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-8)
            mu, marginals = on_gpu.marginals().cpu(), on_cpu.marginals()
            torch.testing.assert_close(mu, marginals, rtol=0, atol=1e-9, equal_nan=True)
