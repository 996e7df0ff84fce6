"""Forests by rule: the same graph and answers as with lists, memory that grows as the nodes."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from table import randn
from torch import Tensor

import structmax as sx
import structmax.structures.projective  # registers its family
from structmax.cache import Cache
from structmax.forest import topology
from structmax.forest.topology import Forest, ForestBuilder, RuledForest, lookup, name_of

inf, nan = math.inf, math.nan


def dependency(scores: Tensor, **kwargs: Any) -> sx.DependencyTree:
    return sx.DependencyTree(scores, projective=True, **kwargs)


SMOOTHINGS = [sx.Shannon(0.7), sx.Gini(2.0), sx.Tsallis(1.3, 1.5), sx.Hard()]
FAMILIES = [("binary_tree", (0,)), ("binary_tree", (3,))] + [
    ("projective_tree", (labels, single, siblings))
    for labels in (0, 2)
    for single in (0, 1)
    for siblings in (0, 1)
]
LISTS = ("ptr", "head", "tail1", "tail2", "edge_part", "node_part", "derivation_size", "used_parts")
STRUCTURES: dict[str, Callable[..., Any]] = {
    "binary": lambda n, *b: sx.BinaryTree(randn(*b, n, n), labelled=False),
    "binary labelled": lambda n, *b: sx.BinaryTree(randn(*b, n, n, 3), labelled=True),
    "multi": lambda n, *b: dependency(randn(*b, n + 1, n + 1), root="multi", labelled=False),
    "single": lambda n, *b: dependency(randn(*b, n + 1, n + 1), root="single", labelled=False),
    "single labelled": lambda n, *b: dependency(
        randn(*b, n + 1, n + 1, 2), root="single", labelled=True
    ),
    "multi siblings": lambda n, *b: dependency(
        randn(*b, n + 1, n + 1),
        root="multi",
        labelled=False,
        siblings=randn(*b, n + 1, n + 1, n + 1),
    ),
}


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    topology._cache.clear()  # no forest drawn under another limit stays behind


def by_rule(monkeypatch: Any, rule: bool) -> None:
    """Lets forests be drawn by rule from the first edge on, or never."""
    topology._cache.clear()
    monkeypatch.setattr(topology, "MAX_LISTED_EDGES", 0 if rule else 1 << 40)


def both(monkeypatch: Any, compute: Callable[[], Any]) -> tuple[Any, Any]:
    by_rule(monkeypatch, False)
    listed = compute()
    by_rule(monkeypatch, True)
    return listed, compute()


def drawn(name: str, *sizes: int) -> Forest:
    return lookup(name_of(name, sizes))


# -- the same graph ------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "sizes"), FAMILIES)
def test_rules_are_the_lists(name: str, sizes: tuple[int, ...], monkeypatch) -> None:
    for n in (1, 2, 3, 4, 7, 18):
        listed, ruled = both(monkeypatch, lambda n=n: drawn(name, n, *sizes))
        assert isinstance(ruled, RuledForest) and not isinstance(listed, RuledForest)
        assert (ruled.num_edges, ruled.max_degree) == (listed.num_edges, listed.max_degree)
        assert ruled.longest == listed.longest
        for before in (ruled.levels, ruled.part_counts, ruled.used_parts):
            assert before is not None
        assert "head" not in ruled.__dict__  # none of this needs the lists
        for one, other in zip(ruled.levels, listed.levels, strict=True):
            assert np.array_equal(one, other)
        assert np.array_equal(ruled.part_counts, listed.part_counts)
        for attribute in LISTS:
            assert np.array_equal(getattr(ruled, attribute), getattr(listed, attribute))
        assert ruled.same_as(listed) and listed.same_as(ruled) and ruled.same_as(ruled)


def test_lists_of_binary_trees_are_the_definition() -> None:
    """Every edge into [i, j] comes from [i, k] and [k+1, j], each once."""
    n = 9
    forest = drawn("binary_tree", n, 0)
    spans = [(i, j) for j in range(n) for i in range(j, -1, -1)]
    for v, (i, j) in enumerate(spans):
        e = slice(forest.ptr[v], forest.ptr[v + 1])
        tails = zip(forest.tail1[e].tolist(), forest.tail2[e].tolist(), strict=True)
        if i == j:
            assert list(tails) == [(forest.num_nodes, forest.num_nodes)]
        else:
            expected = [((i, k), (k + 1, j)) for k in range(i, j)]
            assert [(spans[a], spans[b]) for a, b in tails] == expected


def test_large_sentences_are_kept_by_rule() -> None:
    for name, sizes in (("binary_tree", (256, 0)), ("binary_tree", (320, 0))):
        forest = drawn(name, *sizes)
        assert isinstance(forest, RuledForest) == (sizes[0] > 256)
    assert forest.num_edges == math.comb(321, 3) + 320
    assert len(forest.runs) == forest.num_nodes == 320 * 321 // 2
    assert repr(forest) == (
        "RuledForest(nodes=51360, edges=5461600, parts=51360, levels=320, runs=51360)"
    )


# -- the same answers ----------------------------------------------------------------------------


def answers(s: Any) -> dict[str, Tensor]:
    """Every query that the kernels on the CPU answer."""
    scores = s.scores.clone().requires_grad_()
    live = s._rebuild(**{**{k: t for k, (t, _) in s._tensors().items()}, "scores": scores})
    value = live.log_partition()
    (gradient,) = torch.autograd.grad(value.sum(), scores)
    mu = live.marginals()
    (second,) = torch.autograd.grad((mu * mu).sum(), scores)
    best = s.topk(3)
    out = {
        "value": value, "gradient": gradient, "marginals": mu, "second": second,
        "argmax": s.argmax(), "max_marginals": s.max_marginals(),
        "topk": best.structures, "topk scores": best.scores,
        "sample": s.sample((4,), generator=torch.Generator().manual_seed(1)),
        "entropy": s.entropy(), "log_prob": s.log_prob(s.argmax()),
    }  # fmt: skip
    return {name: tensor.detach() for name, tensor in out.items()}


@pytest.mark.parametrize("omega", SMOOTHINGS, ids=str)
@pytest.mark.parametrize("kind", STRUCTURES)
def test_answers_have_the_same_bits(kind: str, omega: Any, monkeypatch) -> None:
    s = STRUCTURES[kind](6, 3)
    lengths = torch.tensor([6, 1, 4])
    tensors = {k: t for k, (t, _) in s._tensors().items()} | {"lengths": lengths}
    s = s._rebuild(**tensors, smoothing=omega)
    listed, ruled = both(monkeypatch, lambda: answers(s.expand(s.batch_shape)))
    assert isinstance(lookup(s._forest_key()), RuledForest)
    for name, expected in listed.items():
        assert torch.equal(ruled[name], expected), name


@pytest.mark.parametrize("kind", ["binary", "single"])
def test_extreme_scores_have_the_same_bits(kind: str, monkeypatch) -> None:
    s = STRUCTURES[kind](7, 4)
    scores = s.scores * torch.tensor([1.0, 1e3, 1.0, 1.0], dtype=torch.float64)[:, None, None]
    scores[2] += 1e4
    scores[3][torch.rand(scores.shape[1:]) < 0.3] = -inf
    scores[3, 0] = 0.0
    scores[3].diagonal().zero_()
    scores[:, 1, 0] = nan  # no part
    s = s._rebuild(scores=scores)
    listed, ruled = both(monkeypatch, lambda: answers(s.expand(s.batch_shape)))
    for name, expected in listed.items():
        assert torch.equal(ruled[name], expected), name


def test_naive_engine_and_derivatives_beyond_write_the_lists_out(monkeypatch) -> None:
    by_rule(monkeypatch, True)
    s = STRUCTURES["single"](5, 2)
    fast = s.log_partition(), s.marginals(), s.max_marginals()
    with sx.backend("naive"):
        t = s.expand(s.batch_shape)
        slow = t.log_partition(), t.marginals(), t.max_marginals()
    for one, other in zip(fast, slow, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)
    assert "head" in lookup(s._forest_key()).__dict__
    assert torch.autograd.gradgradcheck(
        lambda x: s._rebuild(scores=x).log_partition(), s.scores.clone().requires_grad_()
    )
    gini = s._rebuild(scores=s.scores, smoothing=sx.Gini(2.0))
    z = gini.argmax()
    assert bool((gini.log_prob(z) <= 1e-9).all())
    assert next(iter(gini.ranked_support())).structure.shape == z.shape
    assert bool((gini.entropy() >= 0).all())


# -- a long sentence ------------------------------------------------------------------------------


def inside(scores: np.ndarray) -> float:
    """log Z of binary trees, column by column: Σ over splits with all starts at once."""
    n = len(scores)
    by_start, by_end = np.full((n, n + 1), -inf), np.full((n + 1, n), -inf)  # [i, k], [k, j]
    for j in range(n):
        by_start[j, j] = by_end[j, j] = scores[j, j]
        for i in range(j - 1, -1, -1):
            x = by_start[i, i:j] + by_end[i + 1 : j + 1, j]
            peak = x.max()
            value = scores[i, j] + peak + math.log(np.exp(x - peak).sum())
            by_start[i, j] = by_end[i, j] = value
    return float(by_start[0, n - 1])


def test_long_binary_tree_against_a_plain_recursion() -> None:
    n = 300
    scores = randn(2, n, n)
    s = sx.BinaryTree(scores, lengths=torch.tensor([n, 131]))
    assert isinstance(lookup(s._forest_key()), RuledForest)
    expected = [inside(scores[0].numpy()), inside(scores[1, :131, :131].numpy())]
    assert s.log_partition().tolist() == pytest.approx(expected, abs=1e-8)
    mu = s.marginals()
    assert mu.sum((-2, -1)).tolist() == pytest.approx([2 * n - 1, 261])
    z = s.argmax()
    assert s.score(z).tolist() == pytest.approx(s.topk(1).scores[:, 0].tolist())
    assert bool((s.max_marginals() <= s.score(z)[:, None, None] + 1e-8).all())
    assert bool((s.log_prob(s.sample((2,))) < 0).all())
    assert "head" not in lookup(s._forest_key()).__dict__


@pytest.mark.parametrize("root", ["single", "multi"])
def test_long_dependency_tree_counts_and_heads(root: str) -> None:
    n = 220
    s = dependency(torch.zeros(n + 1, n + 1, dtype=torch.float64), root=root)
    assert isinstance(lookup(s._forest_key()), RuledForest)
    multi = math.comb(3 * n, n) // (2 * n + 1)
    count = multi if root == "multi" else math.comb(3 * n - 2, n - 1) // n
    assert s.log_partition().item() == pytest.approx(math.log(count), abs=1e-8)
    heads = s.marginals().sum(0)
    assert heads[1:].tolist() == pytest.approx([1.0] * n)


# -- drawing, keeping, errors ----------------------------------------------------------------------


def test_runs_and_edges_mix_in_the_order_in_which_they_come(monkeypatch) -> None:
    def draw() -> Forest:
        draw = ForestBuilder()
        v = draw.nodes(6, [0, 1, 2, 3, -1, -1])
        draw.edge(4, 1, 2, part=9)
        draw.runs([4, 5, 5], [3, 0, 2], lambda d: (v[:3] * 0 + d, -1, 4 + d * d))
        draw.edge(5, 4, 3)
        return draw.build()

    for forest in both(monkeypatch, draw):
        assert (forest.num_edges, forest.num_parts) == (11, 10)
        into_4 = [(1, 2, 9), (0, 6, 4), (1, 6, 5), (2, 6, 8)]
        into_5 = [(0, 6, 4), (1, 6, 5), (4, 3, 10)]
        columns = forest.tail1.tolist(), forest.tail2.tolist(), forest.edge_part.tolist()
        assert list(zip(*columns, strict=True))[4:] == into_4 + into_5
        scores = randn(10)
        walks = sx.Hyperpath(forest, scores, goal=torch.tensor(5))
        every = walks.enumerate_support()
        assert len(every) == 2 + 4
        assert walks.log_partition().item() == pytest.approx((every @ scores).logsumexp(0).item())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda draw: draw.runs([9], 2, lambda k: (0,)), "head 9 is no node yet"),
        (lambda draw: draw.runs([3], -1, lambda k: (0,)), "a count must be at least 0, got -1"),
        (lambda draw: draw.runs([3], 2, lambda k: (0.5,)), "must be integers, got float64"),
        (lambda draw: draw.runs([3], 4, lambda k: (k**3,)), "node 3 must be polynomials in d of"),
        (
            lambda draw: draw.runs([3], 4, lambda k: (k,)),
            r"edge 3 of a run of node 3 has the tails",
        ),
        (lambda draw: draw.runs([3], 2, lambda k: (k - 1,)), r"tails \(-1, -1\) and part -1"),
        (lambda draw: draw.runs([3], 5, lambda k: (k * (4 - k),)), r"tails \(3, -1\)"),
        (lambda draw: draw.runs([3], 2, lambda k: (0, 1, -2)), "part -2"),
        (lambda draw: draw.runs([3], 2, lambda k: (0, 1, 4 + k)), "part 5 is used, but num_parts"),
    ],
)
def test_bad_runs_are_refused(call: Callable[..., None], message: str) -> None:
    def attempt() -> None:
        draw = ForestBuilder()
        draw.nodes(4)
        call(draw)
        draw.build(5)

    with pytest.raises(ValueError, match=message):
        attempt()


def test_pickle(monkeypatch) -> None:
    by_rule(monkeypatch, True)
    forest = drawn("projective_tree", 9, 0, 1, 0)
    again = pickle.loads(pickle.dumps(forest))
    assert isinstance(again, RuledForest) and again.key != forest.key
    assert again.same_as(forest)
    scores = randn(forest.num_parts)
    one, other = (sx.Hyperpath(f, scores).log_partition() for f in (forest, again))
    assert torch.equal(one, other)


def test_forests_differ(monkeypatch) -> None:
    by_rule(monkeypatch, True)
    one = drawn("projective_tree", 5, 0, 1, 0)
    assert not one.same_as(drawn("projective_tree", 5, 0, 0, 0))
    assert not one.same_as(drawn("projective_tree", 6, 0, 1, 0))
    p = sx.Hyperpath(one, randn(one.num_parts))
    q = sx.Hyperpath(pickle.loads(pickle.dumps(one)), randn(one.num_parts))
    assert p.cross_entropy(q) >= p.entropy()


def test_the_cache_counts_what_is_stored(monkeypatch) -> None:
    by_rule(monkeypatch, True)
    cache: Cache = Cache(most=400_000)
    monkeypatch.setattr(topology, "_cache", cache)
    first, second = drawn("binary_tree", 40, 0), drawn("binary_tree", 41, 0)
    assert 16 * first.num_edges > 100_000 and len(cache) == 2 and cache.bytes < 200_000
    assert len(second.tail1) == second.num_edges  # written out, so it counts in full
    for forest in (first, second):
        assert cache.bytes > 16 * forest.num_edges
    cache.most = 100_000
    third = drawn("binary_tree", 3, 0)
    assert drawn("binary_tree", 3, 0) is third and len(cache) == 1


def test_lists_too_long_are_refused_with_the_way_out(monkeypatch) -> None:
    by_rule(monkeypatch, True)
    monkeypatch.setattr(topology, "MAX_WRITTEN_EDGES", 100)
    s = STRUCTURES["binary"](20)
    assert s.log_partition().isfinite() and s.topk(2).exists.all()
    with sx.backend("naive"), pytest.raises(ValueError, match=r"edges=1350.*more than 100.* CPU"):
        s.expand(s.batch_shape).log_partition()
    s = s._rebuild(scores=s.scores, smoothing=sx.Gini())
    with pytest.raises(ValueError, match=r"edges=1350.*more than 100"):
        s.entropy()
    with pytest.raises(AttributeError, match="no attribute 'tails'"):
        lookup(s._forest_key()).tails  # noqa: B018


GROWTH = """
import resource, torch, structmax as sx
from structmax.forest.topology import lookup
n = {n}
def answer(n):
    s = sx.BinaryTree(torch.zeros(n, n, requires_grad=True))
    s.log_partition().backward()
    s.argmax(), s.sample(), s.max_marginals(), s.topk(2), s.entropy()
    return s
answer(6)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
s = answer(n)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) >> 10)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("n", "most"), [(512, 120), (1024, 400)])
def test_memory_grows_as_the_chart(n: int, most: int) -> None:
    """In MB: 22 and 179 million edges would take 0.4 and 2.9 GB as lists."""
    run = subprocess.run(
        [sys.executable, "-c", GROWTH.format(n=n)], capture_output=True, text=True, check=True
    )
    assert int(run.stdout) < most
