"""The GPU's kernels on forests by rule, against those on the CPU and the lists.

Without a GPU they run under Triton's interpreter, slowly, on a few words.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")


from structmax.forest import ops, topology
from structmax.forest.topology import Forest, ForestBuilder, RuledForest, lookup
from structmax.primitive import backend
from structmax.smoothing import Hard, Shannon, Tsallis
from structmax.structures import binary_tree, projective

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = [Hard(), Shannon(0.7), Tsallis(1.5, 0.8)]
KEYS = [
    "binary_tree:7,0",
    "binary_tree:4,2",
    "projective_tree:6,0,0,0",
    "projective_tree:5,2,1,0",
    "projective_tree:5,2,1,1",
]
assert binary_tree and projective  # which register their families
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy


@pytest.fixture(autouse=True)
def _by_rule(monkeypatch):
    from structmax.forest import gpu

    topology._cache.clear()
    monkeypatch.setattr(topology, "MAX_LISTED_EDGES", 0)
    monkeypatch.setattr(gpu, "TILE", 16)  # several tiles for a run, several items in each
    monkeypatch.setattr(gpu, "ITEMS", 4)
    yield
    topology._cache.clear()


def any_forest() -> RuledForest:
    """Long and short runs and single edges into one node, a node used twice by an edge."""
    draw = ForestBuilder()
    v = draw.nodes(9, [*range(7), -1, -1])
    draw.runs([6, 7], [6, 5], lambda d: (v[:2] * 0 + d, -1, 7 + d))
    draw.edge(6, 3, 4)
    draw.runs([7, 8], [3, 5], lambda d: (d, d + 1, [12, -1]))
    draw.edge(7, 6, 6)
    draw.runs([8], 2, lambda d: (6 + d, 1, 3 - d))
    forest = draw.build(13)
    assert isinstance(forest, RuledForest)
    return forest


def batch(forest, items: int = 5):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(items, forest.num_parts, generator=generator, dtype=torch.float64)
    scores[1, torch.rand(forest.num_parts, generator=generator) < 0.1] = -torch.inf
    goal = torch.full((items,), forest.num_nodes - 1)
    goal[-1] = forest.num_nodes // 2
    return scores, goal


def agree(gpu, cpu) -> None:
    for one, other in zip(gpu, cpu, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-9, atol=1e-9, equal_nan=True)


def on(name: str, compute, *tensors):
    with backend(name):
        return compute(*(t.to(DEVICE if name == "gpu" else "cpu") for t in tensors))


def uses_of(forest, v: int) -> list[list[int]]:
    """Head, other tail, part and number of every edge that uses a node, by rule."""
    ptr, rows = forest.uses
    found = []
    for row in rows[ptr[v] : ptr[v + 1]].tolist():
        d = np.arange(row[0])
        columns = [a + b * d + c * (d * (d - 1) // 2) for a, b, c in np.reshape(row[1:], (4, 3))]
        found += np.stack(columns, 1).tolist()
    return sorted(found)


@pytest.mark.parametrize("key", [*KEYS, "any"])
def test_uses_and_parts_are_those_of_the_lists(key: str) -> None:
    forest = any_forest() if key == "any" else lookup(key)
    ptr, edges, others = forest.reversed
    number = np.arange(forest.num_edges) - forest.ptr[forest.head]
    for v in range(forest.num_nodes):
        edge, other = edges[ptr[v] : ptr[v + 1]], others[ptr[v] : ptr[v + 1]]
        expected = [forest.head[edge], other, forest.edge_part[edge], number[edge]]
        assert uses_of(forest, v) == sorted(np.stack(expected, 1).tolist())
    ruled, listed = forest.by_part, Forest.by_part.func(forest)
    for one, other in zip(ruled[:3], listed[:3], strict=True):
        assert np.array_equal(one, other)
    lists = number, forest.head, forest.tail1, forest.tail2, forest.edge_part
    for one, other in zip(forest.carriers[1:], lists, strict=True):
        assert np.array_equal(one, other[listed.edge])


def test_uses_grow_as_the_nodes() -> None:
    for name, most in (("binary_tree:{},0", 2), ("projective_tree:{},0,1,0", 4)):
        for n in (20, 60):
            forest = lookup(name.format(n))
            assert len(forest.uses.row) <= most * forest.num_nodes


@pytest.mark.parametrize(
    "omega", [*KINDS[:2], pytest.param(KINDS[2], marks=pytest.mark.slow)], ids=str
)
def test_every_query(omega) -> None:
    forest = any_forest()
    scores, goal = batch(forest)
    direction = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1)).double()
    uniform = torch.rand(2, 5, forest.longest, generator=torch.Generator().manual_seed(2)).double()
    key, code, width = forest.key, omega.code, forest.num_parts

    def queries(scores, goal, direction, uniform):
        yield from ops.forest.value_and_gradient([scores], [goal], key, code)
        yield ops.forest.hvp_op([scores], [direction], [goal], key, list(code))[0]
        yield ops.sample(scores, goal, uniform, key, list(code), width)
        if omega == Hard():
            yield from ops.argmax(scores, goal, key, width)
            yield ops.max_marginals(scores, goal, key, width)

    given = scores, goal, direction, uniform
    fast, slow = (on(name, lambda *t: list(queries(*t)), *given) for name in ("gpu", "cpu"))
    agree(fast, slow)
    assert "head" not in forest.__dict__  # no list was written


@pytest.mark.parametrize("key", ["binary_tree:4,0", "projective_tree:3,2,1,0"])
def test_gradient_of_trees(key: str) -> None:
    forest = lookup(key)

    def gradient(scores, goal):
        return ops.forest.value_and_gradient([scores], [goal], forest.key, Shannon(0.7).code)

    given = batch(forest)
    agree(on("gpu", gradient, *given), on("cpu", gradient, *given))
    assert "head" not in forest.__dict__


def test_kbest_writes_the_lists_out() -> None:
    forest = any_forest()

    def kbest(scores, goal):
        return ops.kbest(scores, goal, forest.key, 3, forest.num_parts)[:1]

    given = batch(forest)
    agree(on("gpu", kbest, *given), on("cpu", kbest, *given))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("key", ["binary_tree:512,0", "projective_tree:256,0,1,0"])
def test_long_sentences(key: str, monkeypatch) -> None:
    from structmax.forest import gpu

    monkeypatch.setattr(gpu, "TILE", 512)
    monkeypatch.setattr(gpu, "ITEMS", 16)
    forest = lookup(key)
    goal = torch.tensor([forest.num_nodes - 1, forest.num_nodes // 2])
    scores = torch.randn(2, forest.num_parts, generator=torch.Generator().manual_seed(0)).double()

    def queries(scores, goal):
        yield from ops.forest.value_and_gradient([scores], [goal], forest.key, Shannon().code)
        yield from ops.argmax(scores, goal, forest.key, forest.num_parts)
        yield ops.max_marginals(scores, goal, forest.key, forest.num_parts)

    fast, slow = (on(name, lambda *t: list(queries(*t)), scores, goal) for name in ("gpu", "cpu"))
    agree(fast, slow)
    assert "head" not in forest.__dict__
