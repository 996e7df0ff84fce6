"""Segmentations, paths in a graph and paths through a grid, beyond the contract."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import tracemalloc
from collections.abc import Callable

import pytest
import torch
from table import ROWS, dag, randn

import structmax as sx
from structmax.oracles import shortest_path
from structmax.structures.path import _graph
from structmax.testing import CHECKS

nan, inf = math.nan, math.inf
OMEGAS = [sx.Shannon(), sx.Gini(), sx.Hard()]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def fails(call: Callable[[], object], *words: str, kind: type[Exception] = ValueError) -> None:
    with pytest.raises(kind) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in the message: {caught.value}"


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


# -- counts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k", "c"), [(1, 1, 1), (5, 2, 1), (4, 4, 2), (6, 3, 2), (3, 7, 3)])
@pytest.mark.parametrize("transition", [False, True])
def test_labelled_compositions(n: int, k: int, c: int, transition: bool) -> None:
    count = [1]
    for _ in range(n):
        count.append(c * sum(count[-k:]))
    zero = torch.zeros(c, c, dtype=torch.float64) if transition else None
    s = sx.SemiMarkov(torch.zeros(n, k, c, dtype=torch.float64), zero)
    close(s.log_partition().exp(), torch.tensor(float(count[-1]), dtype=torch.float64))
    every = s.enumerate_support()
    assert len(every) == count[-1] == len(torch.unique(every.flatten(1), dim=0))


@pytest.mark.parametrize(("h", "w"), [(1, 1), (1, 6), (5, 1), (3, 4), (5, 5)])
def test_grid_counts(h: int, w: int) -> None:
    zero = torch.zeros(h, w, dtype=torch.float64)
    four = sx.GridPath(zero, neighbours=4).log_partition().exp()
    assert round(four.item()) == math.comb(h + w - 2, h - 1)
    delannoy = sum(math.comb(h - 1, i) * math.comb(w - 1, i) * 2**i for i in range(min(h, w)))
    s = sx.GridPath(zero)
    assert round(s.log_partition().exp().item()) == delannoy
    every = s.enumerate_support()
    assert len(every) == delannoy == len(torch.unique(every.flatten(1), dim=0))


def test_path_counts() -> None:
    for v in range(2, 8):  # the complete graph on v nodes: any set of inner nodes
        edges = torch.tensor([(i, j) for i in range(v) for j in range(i + 1, v)])
        s = sx.Path(edges, torch.zeros(len(edges), dtype=torch.float64), 0, v - 1)
        assert round(s.log_partition().exp().item()) == 2 ** (v - 2) == len(s.enumerate_support())


# -- degenerate sizes, checked by the contract ---------------------------------------------------

SMALL = {
    "one position": lambda: sx.SemiMarkov(randn(2, 1, 1, 3), randn(3, 3)),
    "one label": lambda: sx.SemiMarkov(randn(2, 3, 2, 1), randn(1, 1)),
    "one row": lambda: sx.GridPath(randn(2, 1, 4)),
    "one column": lambda: sx.GridPath(randn(2, 4, 1), neighbours=4),
    "one cell": lambda: sx.GridPath(randn(2, 1, 1)),
    "one edge": lambda: sx.Path(torch.tensor([[1, 0]]), randn(2, 1), 1, 0),
}


@pytest.mark.parametrize("name", SMALL)
def test_small(name: str) -> None:
    for check in set(CHECKS) - {"compile", "transforms", "gradients", "sample"}:
        CHECKS[check](SMALL[name])


@pytest.mark.parametrize("s", ["semi-markov-transition", "path", "grid-8"])
def test_compiles(s: str) -> None:
    CHECKS["compile"](ROWS[f"{s}/shannon"])


# -- segments ------------------------------------------------------------------------------------


def by_hand(s: sx.SemiMarkov, segments: list[tuple[int, int, int]]) -> torch.Tensor:
    total = sum(s.segments[i, j - i, label] for i, j, label in segments)
    if s.transition is not None:
        for (_, _, one), (_, _, other) in itertools.pairwise(segments):
            total = total + s.transition[one, other]
    return total


@pytest.mark.parametrize("transition", [False, True])
def test_segment_scores(transition: bool) -> None:
    s = sx.SemiMarkov(randn(5, 3, 2), randn(2, 2) if transition else None)
    every = s.enumerate_support()
    forms = s.decode(every)
    close(s.score(every), torch.stack([by_hand(s, form) for form in forms]))
    close(s.score(forms[7]), by_hand(s, forms[7]))
    assert torch.equal(s.encode(forms), every)
    assert s.decode(torch.zeros(2, 5, 3, 2)) == [[], []]
    wide = s.expand((3,))
    close(wide.score(forms[7]), by_hand(s, forms[7]).expand(3))
    assert not bool(wide.encode([[], [], []]).any()) and wide[:0].encode([]).shape[0] == 0


def test_segments_of_one_position_are_a_chain() -> None:
    unary, transition = randn(2, 6, 3), randn(3, 3)
    lengths = torch.tensor([6, 4])
    chain = sx.LinearChain(unary, transition, lengths=lengths)
    s = sx.SemiMarkov(unary[:, :, None], transition, lengths)
    close(s.log_partition(), chain.log_partition())
    close(s.marginals().squeeze(-2), chain.marginals())
    close(s.edge_marginals(), chain.edge_marginals())
    close(s.entropy(), chain.entropy())


@pytest.mark.parametrize("omega", OMEGAS, ids=str)
def test_edge_marginals(omega: sx.Smoothing) -> None:
    s = sx.SemiMarkov(randn(4, 3, 2), randn(2, 2).requires_grad_(), smoothing=omega)
    expected = torch.zeros(3, 2, 2, dtype=torch.float64)
    every = s.enumerate_support()
    for p, form in zip(s.log_prob(every).exp(), s.decode(every), strict=True):
        for (_, last, one), (_, _, other) in itertools.pairwise(form):
            expected[last, one, other] += p.detach()
    close(s.edge_marginals().detach(), expected)
    (grad,) = torch.autograd.grad(s.log_partition(), s.transition)
    close(grad, expected.sum(0))
    ragged = sx.SemiMarkov(randn(2, 4, 3, 2), randn(2, 2), torch.tensor([4, 2]), omega)
    close(ragged.edge_marginals()[1, :1], ragged[1].edge_marginals()[:1])
    assert not bool(ragged.edge_marginals()[1, 1:].any())
    single = sx.SemiMarkov(randn(2, 1, 1, 2), randn(2, 2))
    assert single.edge_marginals().shape == (2, 0, 2, 2)
    fails(lambda: sx.SemiMarkov(randn(2, 1, 1)).edge_marginals(), "no transitions", "torch.zeros")


QUERIES = ("log_partition", "marginals", "argmax", "entropy", "max_marginals", "mbr")


@pytest.mark.parametrize("omega", OMEGAS, ids=str)
@pytest.mark.parametrize("transition", [False, True])
def test_ragged_segments(omega: sx.Smoothing, transition: bool) -> None:
    """A ragged batch with NaN wherever a segment runs past the length, item by item."""
    n, k, c = 6, 3, 2
    lengths = torch.tensor([6, 1, 4, 2])
    segments, between = randn(4, n, k, c), randn(4, c, c) if transition else None
    past = torch.arange(n)[:, None] + torch.arange(k) >= lengths[:, None, None]
    leaf = torch.where(past[..., None], nan, segments).requires_grad_()
    s = sx.SemiMarkov(leaf, between, lengths, omega)
    with sx.backend("naive"):
        other = [getattr(s, query)() for query in QUERIES[:2]]
    close(s.log_partition(), other[0])
    close(s.marginals(), other[1])
    z = s.argmax()
    total = s.log_partition().sum() + s.log_prob(z).sum() + (s.marginals() ** 2).sum()
    (grad,) = torch.autograd.grad(total, leaf)
    assert bool(grad.isfinite().all()) and not bool(grad[past].any())
    for i, length in enumerate(lengths.tolist()):
        one = sx.SemiMarkov(
            segments[i, :length], None if between is None else between[i], smoothing=omega
        )
        for query in QUERIES:
            whole = getattr(s, query)()[i].detach()
            part = whole[:length] if whole.dim() else whole
            close(part, getattr(one, query)())
        for draw in s.sample((3,))[:, i]:
            assert s[i].decode(draw)[-1][1] == length - 1
        best, alone = s.topk(3), one.topk(3)
        close(best.scores[i].detach(), alone.scores)


def test_condition_on_segments() -> None:
    s = sx.SemiMarkov(randn(5, 3, 2), randn(2, 2))
    every, p = s.enumerate_support(), s.log_prob(s.enumerate_support()).exp()
    parts = (s.max_marginals() > -inf).nonzero().tolist()
    for one, other in itertools.product(parts, parts[::3]):
        mask = torch.zeros(5, 3, 2, dtype=torch.bool)
        mask[tuple(one)] = mask[tuple(other)] = True
        both = p[(every[:, mask] > 0).all(-1)].sum()
        kept = s.condition(include=mask)
        close((kept.log_partition() - s.log_partition()).exp(), both)
    past = torch.zeros(5, 3, 2, dtype=torch.bool)
    past[4, 1, 0] = True  # it runs past the end
    assert s.condition(include=past).log_partition() == -inf


# -- segments scored by their positions ----------------------------------------------------------


def test_from_positions() -> None:
    n, k, c = 5, 3, 2
    unary, duration, transition = randn(2, n, c), randn(k, c), randn(2, c, c)
    s = sx.SemiMarkov.from_positions(unary, k, transition, duration)
    for start in range(n):
        for less in range(min(k, n - start)):
            expected = unary[:, start : start + less + 1].sum(1) + duration[less]
            close(s.segments[:, start, less], expected)
    per_item = sx.SemiMarkov.from_positions(unary, k, transition, duration.expand(2, k, c))
    close(s.log_partition(), per_item.log_partition())
    longer = sx.SemiMarkov.from_positions(unary, n + 3)  # longer than the input is harmless
    close(longer.log_partition(), sx.SemiMarkov.from_positions(unary, n).log_partition())
    half = sx.SemiMarkov.from_positions(unary.bfloat16(), k)
    assert half.segments.dtype == torch.float32


def test_from_positions_is_exact_at_infinity() -> None:
    n, k = 6, 3
    unary = randn(2, n, 2)
    unary[0, 2, 1] = unary[1, :, 0] = -inf
    lengths = torch.tensor([5, 4])
    unary[0, 5:] = unary[1, 4:] = nan
    leaf = unary.requires_grad_()
    s = sx.SemiMarkov.from_positions(leaf, k, lengths=lengths)
    mu = s.marginals()
    for start, less in itertools.product(range(3), range(k)):
        if start <= 2 <= start + less:
            assert mu[0, start, less, 1] == 0
    assert not bool(mu[1, ..., 0].any()) and bool(mu.isfinite().all())
    (first,) = torch.autograd.grad(s.log_partition().sum(), leaf, create_graph=True)
    # each position inside is in one segment
    close(first.detach().sum(-1), (torch.arange(n) < lengths[:, None]).double())
    (second,) = torch.autograd.grad((first**2).sum(), leaf)
    assert bool(second.isfinite().all()) and not bool(second[0, 5:].any())


def test_from_positions_gradients() -> None:
    arguments = [randn(2, 4, 2), randn(2, 2), randn(3, 2)]
    leaves = [t.requires_grad_() for t in arguments]

    def value(unary, transition, duration):
        return sx.SemiMarkov.from_positions(unary, 3, transition, duration).log_partition()

    assert torch.autograd.gradcheck(value, leaves)
    assert torch.autograd.gradgradcheck(value, leaves, fast_mode=True, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_from_positions_shifted(dtype: torch.dtype, shift: float) -> None:
    """Every segmentation covers the n positions, so a constant moves A by n times it, no more."""
    unary, transition = ((randn(*shape) * 64).round() / 64 for shape in ((2, 9, 3), (3, 3)))
    plain, moved = (
        sx.SemiMarkov.from_positions((unary + c).to(dtype), 5, transition.to(dtype))
        for c in (0.0, shift)
    )
    close(moved.marginals(), plain.marginals(), 1e-9 if dtype == torch.float64 else 1e-4)
    gap = moved.log_partition().double() - plain.log_partition().double()
    close(gap, torch.full((2,), 9 * shift).double(), 1e-9 if dtype == torch.float64 else 1e-6)


def test_from_positions_long() -> None:
    """n = 5,000: nothing of size n K c² per item, and no digits lost to long sums."""
    n, k, c = 5000, 8, 4
    unary = torch.randn(2, n, c, requires_grad=True)
    s = sx.SemiMarkov.from_positions(unary + 100.0, k, torch.randn(c, c), torch.randn(k, c))
    assert s.segments.shape == (2, n, k, c)
    (mu,) = torch.autograd.grad(s.log_partition().sum(), unary)
    close(mu.sum(-1), torch.ones(2, n), 1e-4)
    exact = s.to(torch.float64)
    close(s.marginals().double(), exact.marginals(), 1e-4)
    assert s.decode(s.argmax()[0])[-1][1] == n - 1
    assert s.sample((2,)).shape == (2, 2, n, k, c)
    z = s.argmax()
    close(s.score(z).double(), exact.score(z), 1e-6)


# -- paths ---------------------------------------------------------------------------------------


def test_cycles_are_named() -> None:
    def path(*edges: tuple[int, int]) -> Callable[[], sx.Path]:
        return lambda: sx.Path(torch.tensor(edges), torch.zeros(len(edges)), 0, 1)

    fails(path((0, 1), (3, 5), (5, 3)), "Path", "cycle", "3 → 5 → 3")
    fails(path((0, 1), (2, 2)), "2 → 2")
    fails(path((0, 1), (1, 4), (4, 2), (2, 1), (2, 6)), "cycle: ", "1 → 4 → 2 → 1")
    ring = [(i, (i + 1) % 100) for i in range(100)]
    fails(path(*ring), "…")


def test_numbering_does_not_matter() -> None:
    edges, scores = dag(), randn(3, 10)
    s = sx.Path(edges, scores, 5, 1)
    new = torch.randperm(7)
    other = sx.Path(new[edges], scores, int(new[5]), int(new[1]))
    close(s.log_partition(), other.log_partition())
    close(s.marginals(), other.marginals())
    order = torch.randperm(10)
    shuffled = sx.Path(edges[order], scores[:, order], 5, 1)
    close(s.marginals()[:, order], shuffled.marginals())


@pytest.mark.parametrize("omega", OMEGAS, ids=str)
def test_target_of_each_item(omega: sx.Smoothing) -> None:
    """Items with their own targets, NaN on what leads elsewhere, item by item."""
    edges, targets = dag(), torch.tensor([1, 2, 3, 5, 6])
    scores = randn(5, 10)
    for i, target in enumerate(targets.tolist()):
        idle = sx.Path(edges, scores[i], 5, target).max_marginals() == -inf
        scores[i, idle] = nan
    leaf = scores.requires_grad_()
    s = sx.Path(edges, leaf, 5, targets, smoothing=omega)
    total = s.log_partition().sum() + (s.marginals() ** 2).sum() + s.entropy().sum()
    (grad,) = torch.autograd.grad(total, leaf)
    assert bool(grad.isfinite().all())
    for i, target in enumerate(targets.tolist()):
        one = sx.Path(edges, scores[i].detach(), 5, target, smoothing=omega)
        for query in QUERIES:
            close(getattr(s, query)()[i].detach(), getattr(one, query)())
        assert len(s[i].enumerate_support()) == len(one.enumerate_support())
        assert s[i].decode(s.argmax()[i]) == one.decode(one.argmax()) or target == 5
    fails(s.enumerate_support, "different targets", "structure[i]")


def test_empty_path() -> None:
    s = sx.Path(dag(), randn(2, 10), 5, 5)
    assert s.log_partition().tolist() == [0.0, 0.0] and not bool(s.argmax().any())
    assert s.decode(s.argmax()) == [[5], [5]] and not bool(s.encode([[5], [5]]).any())
    assert s.log_prob(s.argmax()).tolist() == [0.0, 0.0]
    assert s.entropy().tolist() == [0.0, 0.0]
    assert s.topk(2).exists.tolist() == [[True, False]] * 2


def test_condition_on_edges() -> None:
    s = sx.Path(dag(parallel=True), randn(11), 5, 1)
    every, p = s.enumerate_support(), s.log_prob(s.enumerate_support()).exp()
    parts = (s.max_marginals() > -inf).nonzero().flatten().tolist()
    for one, other in itertools.product(parts, parts):
        mask = torch.zeros(11, dtype=torch.bool)
        mask[[one, other]] = True
        kept = s.condition(include=mask)
        close(
            (kept.log_partition() - s.log_partition()).exp(),
            p[(every[:, mask] > 0).all(-1)].sum(),
        )
    fails(
        lambda: s.condition(include=torch.arange(11) == 8),
        "condition",
        "edge 8",
        "2 → 6",
        "no path",
    )


def test_topology_is_worked_out_once() -> None:
    edges, scores = dag(), randn(2, 10)
    s = sx.Path(edges, scores, 5, 1)
    again = sx.Path(edges.clone(), randn(2, 10), 5, 2)
    assert s._graph is again._graph is s[0]._graph is s.expand((3, 2))._graph
    assert s.condition(exclude=torch.arange(10) == 0)._graph is s._graph
    for other in (pickle.loads(pickle.dumps(s)), copy.deepcopy(s)):
        close(other.log_partition(), s.log_partition())
        close(torch.distributions.kl_divergence(other, s), torch.zeros(2).double())
    assert torch.equal(s.edges, edges)


def test_large_graph() -> None:
    n = 50_000  # a ladder of parallel edges, numbered at random
    node = torch.randperm(n + 1)
    edges = torch.stack([node[:-1], node[1:]], -1).repeat(2, 1)
    s = sx.Path(edges, torch.zeros(2 * n, dtype=torch.float64), int(node[0]), int(node[-1]))
    close(s.log_partition(), torch.tensor(n * math.log(2), dtype=torch.float64))
    assert int(s.argmax().sum()) == n == len(s.decode(s.sample()))


PATH_ERRORS = {
    "float edges": (lambda: sx.Path(randn(3, 2), randn(3), 0, 1), ["edges", "integers", "float64"]),
    "edge list": (lambda: sx.Path([[0, 1]], randn(1), 0, 1), ["edges", "tensor", "list"]),
    "edge shape": (lambda: sx.Path(torch.ones(2, 3).long(), randn(2), 0, 1), ["(E, 2)", "(2, 3)"]),
    "scores": (lambda: sx.Path(dag(), randn(2, 9), 5, 1), ["scores", "(..., 10)", "(2, 9)"]),
    "negative": (lambda: sx.Path(dag() - 1, randn(10), 4, 0), ["from 0", "edge 9", "[-1, 2]"]),
    "source": (lambda: sx.Path(dag(), randn(10), -1, 0), ["source", "-1"]),
    "target": (lambda: sx.Path(dag(), randn(10), 5, 1.5), ["target", "1.5"]),
    "float target": (lambda: sx.Path(dag(), randn(10), 5, randn(3)), ["target", "float64"]),
    "unreachable": (lambda: sx.Path(dag(), randn(10), 1, 5), ["no path", "node 1", "node 5"]),
    "outside": (lambda: sx.Path(dag(), randn(10), 5, 99), ["no path", "node 99"]),
    "item": (
        lambda: sx.Path(dag(), randn(10), 5, torch.tensor([1, 0])),
        ["no path", "node 0", "item [1]"],
    ),
    "nan": (lambda: sx.Path(dag(), torch.full((10,), nan), 5, 1), ["scores[0]", "nan"]),
    "no edge": (lambda: sx.Path(dag(), randn(10), 5, 1).score([5, 2, 1]), ["no edge 5 → 2"]),
    "no path": (lambda: sx.Path(dag(), randn(10), 5, 1).score([5, 4, 2]), ["z must", "node 5"]),
    "other target": (
        lambda: sx.Path(dag(), randn(10), 5, 1).cross_entropy(sx.Path(dag(), randn(10), 5, 2)),
        ["targets"],
    ),
}


@pytest.mark.parametrize("name", PATH_ERRORS)
def test_path_errors(name: str) -> None:
    call, words = PATH_ERRORS[name]
    fails(call, "Path", *words)


def test_unreachable_unlooked() -> None:
    for target in (0, torch.tensor([1, 0]), torch.tensor([1, 99]), torch.tensor([1, -7])):
        s = sx.Path(dag(), randn(2, 10), 5, target, validate_args=False)
        assert s.log_partition()[1] == -inf
        assert bool(s.argmax()[1].isnan().all()) and bool(s.marginals()[1].isnan().all())


def test_path_compiled() -> None:
    """Edges are looked at outside of the graph, in each call."""
    scores, others = randn(2, 5), torch.tensor([[0, 1], [0, 2], [2, 1], [1, 3], [2, 3]])
    edges = torch.tensor([[0, 1], [0, 2], [1, 2], [1, 3], [2, 3]])

    def value(edges: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return sx.Path(edges, scores, 0, 3).log_partition()

    torch.compiler.reset()
    _graph.cache.clear()
    compiled = torch.compile(value, backend="aot_eager")
    for given in (edges, others, edges):
        torch.testing.assert_close(compiled(given, scores), value(given, scores))
    path = sx.Path(edges, torch.zeros(5), 0, 3, smoothing=sx.Gini())
    step = torch.compile(lambda x: path.perturb(x).entropy(), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(step(scores), path.perturb(scores).entropy())


# -- grids ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("neighbours", [4, 8])
def test_condition_on_cells(neighbours: int) -> None:
    s = sx.GridPath(randn(4, 3), neighbours=neighbours)
    every, p = s.enumerate_support(), s.log_prob(s.enumerate_support()).exp()
    cells = list(itertools.product(range(4), range(3)))
    for one, other in itertools.product(cells, cells):
        mask = torch.zeros(4, 3, dtype=torch.bool)
        mask[one] = True
        kept = s.condition(include=mask)
        mask[other] = True
        at_once = s.condition(include=mask)
        step_by_step = kept.condition(include=mask)
        both = p[(every[:, mask] > 0).all(-1)].sum()
        for structure in (at_once, step_by_step):
            close((structure.log_partition() - s.log_partition()).exp(), both)
        if both > 0:
            inside = (every[:, mask] > 0).all(-1)
            scores = torch.where(inside, s.score(every), -inf)
            assert torch.equal(at_once.score(every), scores)  # jumps are forbidden in scores too
            close(at_once.expand((2,))[1].log_partition(), at_once.log_partition())
            copied = pickle.loads(pickle.dumps(at_once))
            close(copied.marginals(), at_once.marginals())
            assert bool((at_once.mbr()[mask] == 1).all())


def test_only_paths_are_scored() -> None:
    s = sx.GridPath(torch.zeros(3, 3))
    every = {tuple(z.flatten().tolist()) for z in s.enumerate_support()}
    four = sx.GridPath(torch.zeros(3, 3), neighbours=4)
    every_four = {tuple(z.flatten().tolist()) for z in four.enumerate_support()}
    for bits in itertools.product((0.0, 1.0), repeat=9):
        z = torch.tensor(bits).reshape(3, 3)
        for grid, legal in ((s, every), (four, every_four)):
            if bits in legal:
                assert grid.score(z) == 0
            else:
                fails(lambda grid=grid, z=z: grid.score(z), "GridPath", "cells of a path")


def grids(kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    scores = -torch.rand(shape, dtype=torch.float64)
    if kind == "ties":
        return (scores * 3).round()
    return torch.where(torch.rand(shape) < 0.3, -inf, scores) if kind == "walls" else scores


@pytest.mark.parametrize("kind", ["plain", "ties", "walls"])
@pytest.mark.parametrize("neighbours", [4, 8])
@pytest.mark.parametrize("size", [(1, 1), (1, 5), (4, 1), (3, 4), (6, 5)])
def test_shortest_paths(kind: str, neighbours: int, size: tuple[int, int]) -> None:
    """Dijkstra's algorithm against the walks of the naive definition."""
    scores = grids(kind, (10, *size))
    value, z = shortest_path.grid_path(scores, neighbours)
    expected, other = shortest_path.naive(scores, neighbours)
    close(value, expected)
    close(z.sum((1, 2)), other.sum((1, 2))) if bool(z.isfinite().all()) else None
    for i in (value > -inf).nonzero().flatten().tolist():
        s = sx.GridPath(scores[i], moves="all", neighbours=neighbours)
        close(s.score(z[i]), value[i])
        cells = s.decode(z[i])
        assert cells[0] == (0, 0) and cells[-1] == (size[0] - 1, size[1] - 1)
        far = [max(abs(r - y), abs(c - x)) for (r, c), (y, x) in itertools.pairwise(cells)]
        assert set(far) <= {1} and torch.equal(s.encode(cells), z[i])
    assert bool(z[value == -inf].isnan().all())


@pytest.mark.parametrize("neighbours", [4, 8])
def test_free_grid(neighbours: int) -> None:
    s = sx.GridPath(-torch.rand(2, 3, 3, dtype=torch.float64), "all", neighbours)
    every = s.enumerate_support()
    assert len(torch.unique(every.flatten(1), dim=0)) == len(every)
    close(s.score(s.argmax()), s.score(every).amax(0))
    with sx.backend("naive"):
        close(s.score(s.argmax()), s.score(every).amax(0))
    cut = s.condition(exclude=torch.eye(3, dtype=torch.bool).flip(0) & (torch.arange(3) == 1))
    assert cut.argmax()[:, 1, 1].tolist() == [0.0, 0.0]
    assert s[0].argmax().shape == (3, 3) and s.expand((4, 2)).argmax().shape == (4, 2, 3, 3)
    assert s[:0].argmax().shape == (0, 3, 3) and s.to(torch.float16).argmax().dtype == torch.float16
    assert torch.equal(pickle.loads(pickle.dumps(s)).argmax(), s.argmax())
    assert torch.equal(copy.deepcopy(s).argmax(), s.argmax())
    step = torch.compile(
        lambda x: sx.GridPath(x, moves="all", neighbours=neighbours).argmax(),
        fullgraph=True,
        backend="aot_eager",
    )
    assert torch.equal(step(s.scores), s.argmax())
    mapped = torch.vmap(lambda x: sx.GridPath(x, moves="all", neighbours=neighbours).argmax())
    assert torch.equal(mapped(s.scores), s.argmax())


def test_projection_on_free_paths() -> None:
    torch.manual_seed(0)
    point, scores = -torch.rand(3, 3), -torch.rand(3, 3)
    found = sx.project(sx.GridPath(scores, moves="all"), point)
    free = sx.project(sx.GridPath(scores, moves="all", validate_args=False), point)
    torch.testing.assert_close(free, found)


def test_free_grid_refuses() -> None:
    s = sx.GridPath(-torch.rand(3, 3), moves="all")
    assert isinstance(s, sx.GridPath) and s.supports("argmax") and not s.supports("marginals")
    assert sx.GridPath.supports("marginals")
    z = s.argmax()
    calls = {
        "log_partition": (), "marginals": (), "sample": ((2,),), "topk": (2,), "log_prob": (z,),
        "max_marginals": (), "entropy": (), "cross_entropy": (s,), "expected_cost": (z,),
        "mbr": (), "ranked_support": (),
    }  # fmt: skip
    assert set(calls) == sx.Structure.queries - type(s).queries
    for query, arguments in calls.items():
        call = getattr(s, query)
        fails(
            lambda call=call, arguments=arguments: call(*arguments),
            f"GridPath.{query}",
            'moves="monotone"',
            kind=sx.IntractableError,
        )
    fails(lambda: s.condition(include=z > 0), "GridPath", "include", "exclude=")


GRID_ERRORS = {
    "moves": (lambda: sx.GridPath(randn(3, 3), moves="any"), ["moves", "'any'", "monotone"]),
    "neighbours": (lambda: sx.GridPath(randn(3, 3), neighbours=6), ["neighbours", "6"]),
    "shape": (lambda: sx.GridPath(randn(3)), ["scores", "(..., h, w)", "(3,)"]),
    "empty": (lambda: sx.GridPath(randn(3, 0)), ["scores", "(3, 0)"]),
    "nan": (lambda: sx.GridPath(torch.full((2, 2), nan)), ["scores[0, 0]", "nan"]),
    "positive": (
        lambda: sx.GridPath(torch.tensor([[[-1.0, 0.0], [2.5, -1.0]]]), moves="all"),
        ["scores[0, 1, 0]", "2.5", "costs", "softplus"],
    ),
    "no path": (
        lambda: sx.GridPath(torch.tensor([[[-1.0, -inf], [-inf, 0.0]]]), "all", 4).argmax(),
        ["argmax", "item 0", "no structure"],
    ),
    "cell": (lambda: sx.GridPath(randn(2, 2)).score([(0, 0), (2, 1)]), ["cell", "(2, 1)"]),
    "depth": (lambda: sx.GridPath(randn(2, 2)).encode([[(0, 0)], (1, 1)]), ["encode", "nested 2"]),
    "batch": (lambda: sx.GridPath(randn(2, 2)).encode([[[(0, 0)]], []]), ["encode", "[0, 1]"]),
}


@pytest.mark.parametrize("name", GRID_ERRORS)
def test_grid_errors(name: str) -> None:
    call, words = GRID_ERRORS[name]
    fails(call, "GridPath", *words)


def test_free_grid_unlooked() -> None:
    scores = torch.tensor(
        [[[-1.0, 0.5], [0.0, -1.0]], [[-1.0, nan], [0.0, -1.0]], [[-1.0] * 2] * 2]
    )
    z = sx.GridPath(scores, moves="all", validate_args=False).argmax()
    assert bool(z[:2].isnan().all()) and bool(z[2].isfinite().all())


SEGMENT_ERRORS = {
    "shape": (lambda: sx.SemiMarkov(randn(3, 2)), ["segments", "(..., n, K, c)", "(3, 2)"]),
    "transition": (
        lambda: sx.SemiMarkov(randn(3, 2, 2), randn(3, 3)),
        ["transition", "(..., 2, 2)", "(3, 3)"],
    ),
    "transition batch": (
        lambda: sx.SemiMarkov(randn(2, 3, 2, 2), randn(3, 2, 2)),
        ["batch", "segments (2,)", "transition (3,)"],
    ),
    "lengths": (
        lambda: sx.SemiMarkov(randn(2, 3, 2, 2), lengths=torch.tensor([3, 4])),
        ["lengths", "between 1 and 3", "4", "item 1"],
    ),
    "nan": (
        lambda: sx.SemiMarkov(torch.full((2, 3, 2, 2), nan)),
        ["segments[0, 0, 0, 0]", "nan"],
    ),
    "transition nan": (
        lambda: sx.SemiMarkov(randn(3, 2, 2), torch.full((2, 2), nan)),
        ["transition[0, 0]", "nan"],
    ),
    "max_length": (
        lambda: sx.SemiMarkov.from_positions(randn(3, 2), 0),
        ["from_positions", "max_length", "0"],
    ),
    "duration": (
        lambda: sx.SemiMarkov.from_positions(randn(3, 2), 2, duration=randn(3, 2)),
        ["duration", "(..., 2, 2)", "(3, 2)"],
    ),
    "unary nan": (
        lambda: sx.SemiMarkov.from_positions(torch.full((3, 2), nan), 2),
        ["from_positions", "unary[0, 0]", "nan"],
    ),
    "segment": (
        lambda: sx.SemiMarkov(randn(3, 2, 2)).score([(0, 2, 0)]),
        ["segment", "at most 2", "(0, 2, 0)"],
    ),
    "gap": (
        lambda: sx.SemiMarkov(randn(3, 2, 2)).score([(0, 0, 0), (2, 2, 0)]),
        ["cover", "position 1"],
    ),
    "overlap": (
        lambda: sx.SemiMarkov(randn(3, 2, 2)).score([(0, 1, 0), (1, 2, 0)]),
        ["cover", "position 1"],
    ),
    "too many": (lambda: sx.SemiMarkov(randn(40, 3, 2)).enumerate_support(), ["too many"]),
    "other lengths": (
        lambda: sx.SemiMarkov(randn(2, 3, 2, 2)).cross_entropy(
            sx.SemiMarkov(randn(2, 3, 2, 2), lengths=torch.tensor([3, 2]))
        ),
        ["same lengths"],
    ),
}


@pytest.mark.parametrize("name", SEGMENT_ERRORS)
def test_segment_errors(name: str) -> None:
    call, words = SEGMENT_ERRORS[name]
    fails(call, "SemiMarkov", *words)


@pytest.mark.parametrize("bad", [0, -3, 5])
def test_bad_lengths_unlooked(bad: int) -> None:
    lengths = torch.tensor([3, bad])
    s = sx.SemiMarkov(randn(2, 4, 2, 2), randn(2, 2), lengths, validate_args=False)
    for query in ("log_partition", "marginals", "argmax", "sample", "entropy", "edge_marginals"):
        answer = getattr(s, query)()
        assert bool(answer[1].isnan().all()) and bool(answer[0].isfinite().all()), query


# -- all structures ------------------------------------------------------------------------------


def _ladder(steps: int, ways: int, parts: int = 1) -> sx.Forest:
    """A node after another, each reached in so many ways from the one before."""
    draw = sx.ForestBuilder()
    draw.nodes(steps + 1)
    for v in range(steps):
        for k in range(ways):
            draw.edge(v + 1, v, part=k % parts)
    return draw.build(parts)


def _steps(n: int, ways: int = 1) -> torch.Tensor:
    return torch.stack([torch.arange(n), torch.arange(1, n + 1)], -1).repeat(ways, 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: sx.Path(_steps(n), torch.zeros(n), 0, n),
        lambda n: sx.Hyperpath(_ladder(n, 1), torch.zeros(1)),
        lambda n: sx.SemiMarkov(torch.zeros(n, 1, 1)),
        lambda n: sx.Alignment(torch.zeros(1, n)),
        lambda n: sx.GridPath(torch.zeros(1, n)),
        lambda n: sx.LinearChain(torch.zeros(n, 1), torch.zeros(1, 1)),
    ],
    ids=["path", "hyperpath", "segments", "alignment", "grid", "chain"],
)
def test_the_only_structure_of_a_long_item(make: Callable[[int], sx.Structure]) -> None:
    """There is no recursion whose depth grows with it."""
    s = make(1500)
    assert torch.equal(s.enumerate_support(), s.argmax()[None])


@pytest.mark.parametrize(
    "make",
    [
        lambda: sx.Path(_steps(30, 2), torch.zeros(60), 0, 30),
        lambda: sx.Hyperpath(_ladder(30, 2), torch.zeros(1)),
        lambda: sx.Hyperpath(_ladder(18, 2, 2_000_000), torch.zeros(2_000_000)),
    ],
    ids=["path", "hyperpath", "memory"],
)
def test_too_many_structures_for_a_list(make: Callable[[], sx.Structure]) -> None:
    with pytest.raises((ValueError, MemoryError), match=r"too many|a list of 262,144 structures"):
        make().enumerate_support()


def test_every_derivation_of_nodes_with_two_tails() -> None:
    draw = sx.ForestBuilder()
    leaf = draw.node(part=0)
    pair = draw.node()
    for k in (1, 2, 3):
        draw.edge(pair, leaf, leaf, part=k)
    goal = draw.node(part=4)
    draw.edge(goal, pair, pair)
    draw.edge(goal, leaf)
    every = sx.Hyperpath(draw.build(), torch.zeros(5)).enumerate_support().tolist()
    both = [[4, *[(k == i) + (k == j) for k in (1, 2, 3)], 1] for i in (1, 2, 3) for j in (1, 2, 3)]
    assert every == [*both, [1, 0, 0, 0, 1]]


def test_included_edges_of_a_path_take_little_memory() -> None:
    """The edges that clash with some included one, without a matrix of both."""
    n = 3000
    path = sx.Path(_steps(n, 2), torch.zeros(2 * n), 0, n)
    include = torch.arange(2 * n) < n
    tracemalloc.start()
    found = path.condition(include=include)
    assert tracemalloc.get_traced_memory()[1] < 30 << 20
    tracemalloc.stop()
    assert torch.equal(found.marginals(), include.float())
