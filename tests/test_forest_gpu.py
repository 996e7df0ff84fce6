"""The Triton kernels against the definition and the CPU kernels.

Without a GPU they run under Triton's interpreter, slowly, on forests of a dozen nodes.
"""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

import structmax as sx
from structmax.forest import ops
from structmax.forest.topology import Forest, ForestBuilder
from structmax.primitive import backend
from structmax.smoothing import Gini, Hard, Shannon, Tsallis

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OMEGAS = [Hard(), Shannon(0.7), Gini(1.3), Tsallis(1.5, 0.8), Tsallis(3.0, 2.0)]
KINDS = [Hard(), Shannon(0.7), Gini(1.3), Tsallis(1.5, 0.8)]
SEEDS = range(2 if DEVICE.type == "cuda" else 1)  # the interpreter takes seconds for each
REFERENCES = ("naive", "cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def random_forest(seed: int, nodes: int = 10, parts: int = 9) -> Forest:
    """Nodes with 0 to 7 edges of 0, 1 or 2 tails; parts on nodes and edges, often shared."""
    random = np.random.default_rng(seed)
    draw = ForestBuilder()
    for v in range(nodes):
        draw.node(part=int(random.integers(-1, parts)))
        for _ in range(0 if v < 2 else int(random.integers(1, 8))):
            tails = random.integers(max(0, v - 6), v, size=random.integers(0, 3)).tolist()
            draw.edge(v, *tails, part=int(random.integers(-1, parts)))
    return draw.build(num_parts=parts)


def cky(n: int) -> Forest:
    """All binary trees over n words: node and part (i, j) per span, an edge per split."""
    i, j = np.triu_indices(n)
    order = np.argsort(j - i, kind="stable")
    i, j = i[order], j[order]
    place = np.full((n, n), -1)
    place[i, j] = np.arange(len(i))
    draw = ForestBuilder()
    draw.nodes(len(i), i * n + j)
    for width in range(1, n):
        start = np.arange(n - width)[:, None]
        split = start + np.arange(width)
        end = start + width
        draw.edges(place[start, end], place[start, split], place[split + 1, end])
    return draw.build(num_parts=n * n)


def batch(forest: Forest, seed: int, dtype: torch.dtype = torch.float64, items: int = 9):
    """Scores with some −inf, and a goal for each item among the last nodes."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(items, forest.num_parts, generator=generator, dtype=torch.float64)
    forbidden = torch.rand(scores.shape, generator=generator) < 0.08
    scores = torch.where(forbidden, -math.inf, scores).to(dtype)
    goal = forest.num_nodes - 1 - torch.randint(4, (items,), generator=generator)
    return scores, goal


def gradient(forest, scores, goal, omega, name):
    with backend(name):
        return ops.forest.value_and_gradient([scores], [goal], forest.key, omega.code)


def hvp(forest, scores, direction, goal, omega, name):
    with backend(name):
        return ops.forest.hvp_op([scores], [direction], [goal], forest.key, list(omega.code))[0]


def assert_close(gpu, reference, tolerance):
    torch.testing.assert_close(
        gpu.cpu(), reference.cpu(), rtol=tolerance, atol=tolerance, equal_nan=True
    )


def check_smooth_queries(forest, scores, goal, omega):
    """Value, gradient and Hessian-vector product against both other backends."""
    tolerance = TOLERANCE[scores.dtype]
    direction = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1))
    direction = direction.to(scores.dtype)
    here = scores.to(DEVICE), goal.to(DEVICE)
    a, mu = gradient(forest, *here, omega, "gpu")
    w = hvp(forest, here[0], direction.to(DEVICE), here[1], omega, "gpu")
    assert a.dtype == mu.dtype == w.dtype == scores.dtype
    for name in REFERENCES:
        expected = gradient(forest, scores, goal, omega, name)
        assert_close(a, expected[0], tolerance)
        assert_close(mu, expected[1], tolerance)
        if omega.code[2] <= 2 or name != "naive":  # whose second derivatives are poor beyond α = 2
            assert_close(w, hvp(forest, scores, direction, goal, omega, name), tolerance)


@pytest.mark.parametrize("omega", OMEGAS, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_gradient_hvp(seed, omega):
    forest = random_forest(seed)
    check_smooth_queries(forest, *batch(forest, seed), omega)


@pytest.mark.parametrize("omega", KINDS, ids=str)
def test_visits_are_conserved_under_huge_scores(omega):
    """Where every derivation has a huge score, as many visits leave a node as reach it."""
    forest = cky(4)
    scores = torch.full((3, forest.num_parts), torch.finfo(torch.float32).min)
    scores[1:] = torch.tensor([[-1e9], [-1e18]])
    goal = torch.full((3,), forest.num_nodes - 1)
    here = scores.to(DEVICE), goal.to(DEVICE)
    mu = gradient(forest, *here, omega, "gpu")[1]
    w = hvp(forest, here[0], torch.ones_like(here[0]), here[1], omega, "gpu")
    assert bool((mu <= 1 + 1e-5).all())
    assert_close(mu.sum(-1), torch.full((3,), 7.0), 1e-5)  # spans of a tree
    assert_close(w, torch.zeros_like(w), 1e-5)


def test_value_alone():
    forest = random_forest(0)
    scores, goal = (t.to(DEVICE) for t in batch(forest, 0))
    with backend("gpu"):
        value = ops.forest.value([scores], [goal], forest.key, Shannon().code)
    assert torch.equal(value, gradient(forest, scores, goal, Shannon(), "gpu")[0])


@pytest.mark.parametrize("omega", KINDS, ids=str)
def test_float32(omega):
    forest = random_forest(3, nodes=8)
    check_smooth_queries(forest, *batch(forest, 3, torch.float32), omega)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("alpha", [1.001, 1.01, 3.0, 4.0])
def test_every_alpha_against_entmax(alpha, dtype):
    """An error ε in the scores is one of ε/(α − 1) or ε^{1/(α−1)} in probabilities. With α = 3 the
    last row has options at the edge of the support."""
    torch.manual_seed(0)
    x = torch.randn(64, 4, dtype=torch.float64, device=DEVICE).to(dtype)
    x[-1] = torch.tensor([0.0, -0.5, -0.5, -2.0])
    x[-1, 1] += 2.9e-13
    with backend("gpu"):
        one = sx.Choice(x, smoothing=Tsallis(alpha))
        mu, value = one.marginals(), one.log_partition()
    error = torch.finfo(dtype).eps
    tolerance = 4 * max(error / (alpha - 1), error ** (1 / (alpha - 1)))
    assert_close(mu, sx.entmax(x.double(), alpha).to(dtype), tolerance)
    assert_close(value, sx.smoothed_max(x.double(), Tsallis(alpha)).to(dtype), tolerance)


@pytest.mark.parametrize("omega", [Shannon(0.7), Tsallis(1.5, 0.8)], ids=str)
def test_lists_longer_than_a_tile(omega, monkeypatch):
    """Several tiles of edges per node, of items per batch and of uses per part."""
    from structmax.forest import gpu, gpu_items

    monkeypatch.setattr(gpu, "TILE", 8)
    monkeypatch.setattr(gpu, "ITEMS", 4)
    monkeypatch.setattr(gpu_items, "STEPS", 0)  # programs share levels
    forest = random_forest(4, nodes=6, parts=3)
    check_smooth_queries(forest, *batch(forest, 4, items=5), omega)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 2 nodes × 16 edges, 8 × 4 and 32 × 1 where one program has an item to itself."""
    from structmax.forest import gpu_items

    for name, size in {"TILE": 32, "NARROW": 2, "PARTS": 4, "PADDING": 100}.items():
        monkeypatch.setattr(gpu_items, name, size)
    return gpu_items


def check_gradient(forest, scores, goal, omega):
    a, mu = gradient(forest, scores.to(DEVICE), goal.to(DEVICE), omega, "gpu")
    assert a.dtype == mu.dtype == scores.dtype
    for name in REFERENCES:
        expected = gradient(forest, scores, goal, omega, name)
        assert_close(a, expected[0], TOLERANCE[scores.dtype])
        assert_close(mu, expected[1], TOLERANCE[scores.dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_items(dtype, small_tiles):
    """One program per item: lists longer than a tile, all shapes of tiles, goals at all levels."""
    shapes = set()
    for seed in range(10, 13):
        forest = random_forest(seed, nodes=40 if seed == 10 else 14)
        scores, goal = batch(forest, seed, dtype, items=4)
        goal[0] = seed - 10
        check_gradient(forest, scores, goal, Shannon(0.7))
        shapes |= set(small_tiles.cut(forest)[0][:, 6].tolist())
        assert small_tiles.plan(forest, DEVICE) is not None
    draw = ForestBuilder()
    draw.nodes(40, np.arange(40))
    forest = draw.build()
    check_gradient(forest, torch.randn(2, 40, dtype=dtype), torch.tensor([3, 39]), Shannon())
    shapes |= set(small_tiles.cut(forest)[0][:, 6].tolist())
    assert shapes == {0, 1, 2}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_items_of_charts(dtype, small_tiles):
    """Where each part has one node, the gradient is written on the way down."""
    forest = cky(7)
    assert small_tiles.plan(forest, DEVICE).direct
    scores, goal = batch(forest, 0, dtype, items=4)
    goal = torch.tensor([forest.num_nodes - 1, forest.num_nodes - 3, 11, 2])
    check_gradient(forest, scores, goal, Shannon(1.3))
    check_gradient(forest, scores[:1].expand(4, -1), goal[:1].expand(4), Shannon())
    check_gradient(forest, scores.t().contiguous().t(), goal, Shannon())


def test_items_do_not_see_what_they_do_not_reach(small_tiles):
    """NaN outside the goal's derivations, in the padding of lists too, changes no bit."""
    random = np.random.default_rng(0)
    draw = ForestBuilder()
    for v in range(16):
        draw.node(part=v)
        for _ in range(0 if v < 3 else 1 + v % 3):
            draw.edge(v, *random.integers(v // 2, v, size=2).tolist(), part=16 + v)
    forest = draw.build()
    goal, reached = 13, {13}
    for v in range(13, -1, -1):
        if v in reached:
            reached |= {int(t) for e in range(forest.ptr[v], forest.ptr[v + 1])
                        for t in (forest.tail1[e], forest.tail2[e]) if t < 16}  # fmt: skip
    scores = torch.randn(1, 32, dtype=torch.float64)
    unused = (16, 17, 18)  # leaves have no edges with parts
    outside = torch.tensor([p % 16 not in reached or p in unused for p in range(32)])
    goal = torch.tensor([goal], device=DEVICE)
    clean, dirty = (torch.where(outside, fill, scores).to(DEVICE) for fill in (0.0, math.nan))
    expected = gradient(forest, clean, goal, Shannon(), "gpu")
    for got, wanted in zip(gradient(forest, dirty, goal, Shannon(), "gpu"), expected, strict=True):
        assert torch.equal(got, wanted)
    assert not expected[1][:, outside.to(DEVICE)].any()


def test_items_have_the_same_bits_in_every_batch():
    forest = random_forest(6, nodes=8)
    scores, goal = (t.to(DEVICE) for t in batch(forest, 6, torch.float32, items=4))
    whole = gradient(forest, scores, goal, Shannon(), "gpu")
    for some in (slice(0, 1), slice(2, 4)):
        part = gradient(forest, scores[some], goal[some], Shannon(), "gpu")
        assert torch.equal(part[0], whole[0][some]) and torch.equal(part[1], whole[1][some])


def test_items_are_left_to_many_programs():
    """A few levels of very many edges are no work for one program."""
    from structmax.forest import gpu_items

    draw = ForestBuilder()
    draw.nodes(2)
    draw.edges(1, [0] * 100_000)
    assert gpu_items.plan(draw.build(), DEVICE) is None
    assert gpu_items.plan(cky(104), DEVICE) is not None


def test_discrete_lists_longer_than_a_tile(monkeypatch):
    from structmax.forest import gpu

    monkeypatch.setattr(gpu, "TILE", 2)
    monkeypatch.setattr(gpu, "ITEMS", 1)
    forest = random_forest(4, nodes=6, parts=3)
    check_discrete_queries(forest, *batch(forest, 4, items=2))
    check_draws(forest, *batch(forest, 4, items=2), Shannon())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("omega", [Shannon(0.7), Gini(1.3)], ids=str)
def test_offset(omega, dtype):
    """Every tree has 2n−1 spans: a shift by c moves A by (2n−1)c and nothing else."""
    n, c = 4, 1e4
    forest = cky(n)
    scores = (torch.randn(2, n * n) * 64).round() / 64  # exact after the shift, too
    scores, goal = scores.to(DEVICE, dtype), torch.tensor([forest.num_nodes - 1] * 2).to(DEVICE)
    a, mu = gradient(forest, scores, goal, omega, "gpu")
    for shift in (c, -c):
        shifted_a, shifted_mu = gradient(forest, scores + shift, goal, omega, "gpu")
        assert_close(shifted_mu, mu, TOLERANCE[dtype])
        assert_close(shifted_a, a + (2 * n - 1) * shift, 1e-6)


@pytest.mark.parametrize("omega", KINDS, ids=str)
def test_infeasible_and_nan_items(omega):
    """An infeasible item has value −inf and zero derivatives; a NaN never becomes a number."""
    draw = ForestBuilder()
    a, b = draw.node(part=0), draw.node(part=1)
    either = draw.node()
    draw.edge(either, a)
    draw.edge(either, b)
    both = draw.node(part=2)
    draw.edge(both, either, b)
    unreached = draw.node(part=3)
    draw.edge(unreached, both, a)
    forest = draw.build()
    inf, nan = math.inf, math.nan
    rows = [
        [0.5, 1.0, 2.0, nan],  # what the goal does not reach may hold anything
        [0.5, -inf, 2.0, 0.0],  # no derivation
        [nan, 1.0, 2.0, 0.0],
        [-inf, 1.0, 2.0, -inf],
        [0.5, 1.0, nan, 0.0],
        [0.5, nan, 2.0, 0.0],  # NaN below, but not below this item's goal
    ]
    scores = torch.tensor(rows, dtype=torch.float64, device=DEVICE)
    goal = torch.tensor([both] * 5 + [a], device=DEVICE)
    value, mu = gradient(forest, scores, goal, omega, "gpu")
    direction = torch.ones_like(scores)
    direction[0, 3] = nan
    w = hvp(forest, scores, direction, goal, omega, "gpu")
    clean = torch.tensor([0, 3], device=DEVICE)
    reference = scores[clean].cpu().nan_to_num(nan=0.0, neginf=-inf)
    expected = gradient(forest, reference, goal[clean].cpu(), omega, "naive")
    assert_close(value[clean], expected[0], 1e-12)
    assert_close(mu[clean], expected[1], 1e-12)
    assert not w[clean].isnan().any()
    assert value[1] == -inf
    assert not mu[1].any() and not w[1].any()
    for item in (2, 4):
        assert value[item].isnan()
        assert mu[item, :3].isnan().all() and w[item, :3].isnan().all()
    assert value[5] == 0.5 and mu[5].tolist() == [1, 0, 0, 0] and not w[5].any()

    uniform = torch.rand(2, 6, 8, dtype=torch.float64, device=DEVICE)
    with backend("gpu"):
        best, z = ops.argmax(scores, goal, forest.key, 4)
        draws = ops.sample(scores, goal, uniform, forest.key, list(omega.code), 4)
        m = ops.max_marginals(scores, goal, forest.key, 4)
    for counts in (z, *draws):
        assert counts.isnan().all(-1).tolist() == [False, True, True, False, True, False]
    assert z[0].tolist() == [0, 2, 1, 0] and z[3].tolist() == [0, 2, 1, 0]
    assert best[0] == best[3] == 4.0
    assert m[0].tolist() == [3.5, 4.0, 4.0, -inf]
    assert m[1].tolist() == [-inf] * 4
    assert m[2, :3].isnan().all() and m[4, :3].isnan().all()
    assert m[5].tolist() == [0.5, -inf, -inf, -inf]


def check_discrete_queries(forest, scores, goal):
    tolerance = TOLERANCE[scores.dtype]
    here = scores.to(DEVICE), goal.to(DEVICE)
    width = forest.num_parts - 1  # fewer than all parts
    with backend("gpu"):
        best, z = ops.argmax(*here, forest.key, width)
        m = ops.max_marginals(*here, forest.key, width)
        top, _ = ops.kbest(*here, forest.key, 3, width)
    assert z.dtype == m.dtype == scores.dtype
    for name in REFERENCES:
        with backend(name):
            expected_best, expected_z = ops.argmax(scores, goal, forest.key, width)
            expected_m = ops.max_marginals(scores, goal, forest.key, width)
            expected_top, _ = ops.kbest(scores, goal, forest.key, 3, width)
        assert_close(best, expected_best, tolerance)
        assert_close(z, expected_z, 0.0)
        assert_close(m, expected_m, tolerance)
        assert_close(top, expected_top, tolerance)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_discrete_queries(seed, dtype):
    forest = random_forest(seed)
    check_discrete_queries(forest, *batch(forest, seed, dtype))


def test_first_of_equal_edges_wins():
    forest = cky(4)
    scores = torch.zeros(2, 16, dtype=torch.float64)
    check_discrete_queries(forest, scores, torch.tensor([forest.num_nodes - 1] * 2))


def check_draws(forest, scores, goal, omega):
    """The same numbers give the same derivations."""
    visits = int(forest.derivation_size.max())
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(2, len(scores), visits, generator=generator, dtype=torch.float64)
    rest = forest.key, list(omega.code), forest.num_parts
    with backend("gpu"):
        z = ops.sample(scores.to(DEVICE), goal.to(DEVICE), uniform.to(DEVICE), *rest)
    for name in REFERENCES:
        with backend(name):
            assert_close(z, ops.sample(scores, goal, uniform, *rest), 0.0)


@pytest.mark.parametrize("omega", KINDS, ids=str)
def test_draws(omega):
    forest = random_forest(5, nodes=8)
    check_draws(forest, *batch(forest, 5, items=3), omega)


@pytest.mark.parametrize("omega", [Shannon(0.7), Tsallis(1.5, 0.8)], ids=str)
def test_sample_frequencies(omega):
    """A choice of four, two of which lead to one more choice of three."""
    draw = ForestBuilder()
    inner, goal = draw.nodes(2)
    draw.edges([inner] * 3, -1, parts=[0, 1, 2])
    draw.edges([goal] * 4, [-1, -1, inner, inner], parts=[3, 4, 5, 6])
    forest = draw.build()
    draws = 20000 if DEVICE.type == "cuda" else 60
    scores = torch.tensor([[0.3, -0.5, 0.8, 0.1, 0.9, 0.0, -0.2]], device=DEVICE)
    goal = torch.tensor([goal], device=DEVICE)
    uniform = torch.rand(draws, 1, 2, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with backend("gpu"):
        z = ops.sample(scores, goal, uniform, forest.key, list(omega.code), 7)
    _, mu = gradient(forest, scores, goal, omega, "gpu")
    error = (mu * (1 - mu)).clamp(min=0).sqrt() / math.sqrt(draws)
    assert ((z.mean(0) - mu).abs() <= 4 * error + 1e-6).all()


def test_same_bits():
    forest = random_forest(6, nodes=6, parts=2)
    scores, goal = (t.to(DEVICE) for t in batch(forest, 6, torch.float32))
    first = gradient(forest, scores, goal, Shannon(), "gpu")
    again = gradient(forest, scores, goal, Shannon(), "gpu")
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_half_precision_and_empty_batch():
    forest = cky(3)
    goal = torch.tensor([forest.num_nodes - 1], device=DEVICE)
    scores = torch.tensor([[0.5, 1, -1, 0, 2, 0.25, 0, 0, 1]], device=DEVICE)
    _, mu = gradient(forest, scores.bfloat16(), goal, Shannon(), "gpu")
    assert mu.dtype == torch.bfloat16
    assert_close(mu.float(), gradient(forest, scores, goal, Shannon(), "gpu")[1], 1e-2)
    value, mu = gradient(forest, scores[:0], goal[:0], Shannon(), "gpu")
    assert value.shape == (0,) and mu.shape == (0, 9)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a CUDA device")
class TestOnTheDevice:
    """What the interpreter cannot show: barriers between levels, capture, no synchronisation."""

    @pytest.mark.parametrize("narrow", [0, 16], ids=["launch per level", "one launch"])
    @pytest.mark.parametrize("omega", [Shannon(0.7), Tsallis(1.5, 0.8)], ids=str)
    def test_launches(self, narrow, omega, monkeypatch):
        from structmax.forest import gpu, gpu_items

        monkeypatch.setattr(gpu, "NARROW", narrow)
        monkeypatch.setattr(gpu_items, "STEPS", 0)
        forest = cky(20)
        scores = torch.randn(37, 400, dtype=torch.float64)
        goal = forest.num_nodes - 1 - torch.arange(37)
        check_smooth_queries(forest, scores, goal, omega)
        check_discrete_queries(forest, scores[:3], goal[:3])

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    def test_items_of_many_levels(self, dtype):
        """One program per item walks hundreds of tiles; the bits are the same each time."""
        forest = cky(70)
        scores = torch.randn(40, 4900, dtype=dtype)
        goal = forest.num_nodes - 1 - torch.arange(40) * 50
        check_gradient(forest, scores, goal, Shannon(0.7))
        here = scores.to(DEVICE), goal.to(DEVICE)
        first = gradient(forest, *here, Shannon(), "gpu")
        for _ in range(20):
            again = gradient(forest, *here, Shannon(), "gpu")
            assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])

    def test_items_of_random_forests(self):
        forest = random_forest(7, nodes=60, parts=300)  # of more, derivations may be endless
        check_gradient(forest, *batch(forest, 7, torch.float64, items=200), Shannon())

    @pytest.mark.parametrize("steps", [0, 32], ids=["shared levels", "a program per item"])
    def test_capture(self, steps, monkeypatch):
        from structmax.forest import gpu_items

        monkeypatch.setattr(gpu_items, "STEPS", steps)
        forest = cky(20)
        scores = torch.randn(8, 400, device=DEVICE)
        goal = torch.full((8,), forest.num_nodes - 1, device=DEVICE)
        expected = gradient(forest, scores, goal, Shannon(), "gpu")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = gradient(forest, scores, goal, Shannon(), "gpu")
        for _ in range(2):
            graph.replay()
            assert torch.equal(captured[0], expected[0])
            assert torch.equal(captured[1], expected[1])

    def test_no_synchronisation(self):
        forest = cky(10)
        scores = torch.randn(4, 100, device=DEVICE)
        goal = torch.full((4,), forest.num_nodes - 1, device=DEVICE)
        for query in (gradient, lambda *a: hvp(a[0], a[1], a[1], *a[2:])):
            query(forest, scores, goal, Shannon(), "gpu")
            torch.cuda.set_sync_debug_mode("error")
            try:
                query(forest, scores, goal, Shannon(), "gpu")
            finally:
                torch.cuda.set_sync_debug_mode("default")
