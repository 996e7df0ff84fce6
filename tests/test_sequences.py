"""LinearChain and HMM: ragged batches, integer tags, edges, long chains, known numbers."""

from __future__ import annotations

import itertools
import math
import tracemalloc

import pytest
import torch
from torch import Tensor
from torch.distributions import kl_divergence

import structmax as sx
from structmax.structures.dynamic import DynamicStructure

f64 = torch.float64
SMOOTHINGS = [sx.Shannon(0.8), sx.Gini(), sx.Tsallis(1.5), sx.Hard()]
LENGTHS = torch.tensor([3, 1, 4, 2, 5])  # of 6: nobody has the maximal length
FORMS = ["shared", "item", "step"]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def ragged(
    form: str, smoothing: sx.Smoothing | None = None, n: int = 6, lengths: Tensor = LENGTHS
) -> sx.LinearChain:
    """Sentences with NaN in the padding of the unary scores and of the steps."""
    items, c = len(lengths), 3
    unary = torch.randn(items, n, c, dtype=f64)
    shape = {"shared": (c, c), "item": (items, c, c), "step": (items, n - 1, c, c)}[form]
    transition = torch.randn(shape, dtype=f64)
    outside = torch.arange(n) >= lengths[:, None]
    unary[outside] = math.nan
    if form == "step":
        transition[outside[:, 1:]] = math.nan
    start, end = torch.randn(c, dtype=f64), torch.randn(items, c, dtype=f64)
    return sx.LinearChain(unary, transition, start, end, lengths, smoothing)


def alone(s: sx.LinearChain, i: int) -> sx.LinearChain:
    """Item i as a chain of its own, without padding and without lengths."""
    size = int(s.lengths[i])
    transition = s.transition if s.transition.dim() == 2 else s.transition[i]
    if transition.dim() == 3:
        transition = transition[: size - 1]
    return sx.LinearChain(
        s.unary[i, :size], transition, start=s.start, end=s.end[i], smoothing=s.smoothing
    )


# -- ragged batches ------------------------------------------------------------------------------


@pytest.mark.parametrize("omega", SMOOTHINGS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_items_as_if_alone(form: str, omega: sx.Smoothing) -> None:
    s, q = ragged(form, omega), ragged(form, omega)
    best, edges, kl = s.topk(3), s.edge_marginals(), kl_divergence(s, q)
    z, mu, mm, mbr = s.argmax(), s.marginals(), s.max_marginals(), s.mbr()
    tags = torch.randint(3, (5, 6))
    costs = torch.randn(5, 6, 3, dtype=f64)
    ranked = list(itertools.islice(s.ranked_support(), 4))
    for i, size in enumerate(LENGTHS.tolist()):
        one, other = alone(s, i), alone(q, i)
        close(s.log_partition()[i], one.log_partition())
        close(mu[i, :size], one.marginals())
        close(edges[i, : size - 1], one.edge_marginals())
        close(mm[i, :size], one.max_marginals())
        close(one.score(z[i, :size]), one.score(one.argmax()))
        close((mbr[i, :size] * mu[i, :size]).sum(), (one.mbr() * mu[i, :size]).sum())
        close(s.entropy()[i], one.entropy())
        close(kl[i], kl_divergence(one, other))
        close(s.cross_entropy(q)[i], one.cross_entropy(other))
        close(s.score(tags)[i], one.score(tags[i, :size]))
        close(s.log_prob(tags)[i], one.log_prob(tags[i, :size]))
        close(s.expected_cost(costs)[i], one.expected_cost(costs[i, :size]))
        mine = one.topk(3)
        close(best.scores[i], mine.scores)
        assert torch.equal(best.exists[i], mine.exists)
        for rank, found in enumerate(itertools.islice(one.ranked_support(), 4)):
            close(ranked[rank].log_prob[i], found.log_prob)
        for answer in (z, mu, mbr):
            assert not bool(answer[i, size:].any())
        assert not bool(edges[i, size - 1 :].any())
        assert bool((mm[i, size:] == -math.inf).all())
    draws = s.sample((50,))
    outside = torch.arange(6) >= LENGTHS[:, None]
    assert not bool(draws[:, outside].any()) and bool((draws[:, ~outside].sum(-1) == 1).all())


@pytest.mark.parametrize("omega", SMOOTHINGS[:3], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [2, 6])
def test_padding_stays_out_of_derivatives(form: str, omega: sx.Smoothing, n: int) -> None:
    """First and second order of what holds derivatives itself: finite, and zero in the padding."""
    lengths = LENGTHS if n == 6 else torch.tensor([1, 1])
    s = ragged(form, omega, n, lengths)
    leaves = [t.clone().requires_grad_() for t in (s.unary, s.transition, s.start, s.end)]
    live = sx.LinearChain(*leaves, lengths=lengths, smoothing=omega)
    out = live.log_partition().sum() + (live.marginals() ** 2).sum() + live.entropy().sum()
    first = torch.autograd.grad(out, leaves, create_graph=True, materialize_grads=True)
    squares = torch.stack([(g**2).sum() for g in first]).sum()
    second = torch.autograd.grad(squares, leaves, materialize_grads=True)
    outside = torch.arange(n) >= lengths[:, None]
    for grads in (first, second):
        assert all(bool(g.isfinite().all()) for g in grads)
        assert not bool(grads[0][outside].any())
        if form == "step":
            assert not bool(grads[1][outside[:, 1:]].any())


def test_one_step_with_padding() -> None:
    """Two positions with a transition for the one step, which is padding for one item."""
    unary = torch.randn(2, 2, 3, dtype=f64)
    transition = torch.randn(2, 1, 3, 3, dtype=f64)
    unary[0, 1], transition[0] = math.nan, math.nan
    lengths = torch.tensor([1, 2])
    for name in ("cpu", "naive"):
        with sx.backend(name):
            leaves = [unary.clone().requires_grad_(), transition.clone().requires_grad_()]
            s = sx.LinearChain(*leaves, lengths=lengths)
            out = s.log_partition().sum() + (s.marginals() ** 2).sum()
            first = torch.autograd.grad(out, leaves, create_graph=True)
            second = torch.autograd.grad(sum((g**2).sum() for g in first), leaves)
            for g in (*first, *second):
                assert bool(g.isfinite().all()), name
            assert not bool(first[1][0].any()) and not bool(second[1][0].any())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8], ids=str)
def test_integer_dtypes(dtype: torch.dtype) -> None:
    s = ragged("shared")
    low = sx.LinearChain(s.unary, s.transition, start=s.start, end=s.end, lengths=LENGTHS.to(dtype))
    tags = torch.randint(3, (5, 6))
    close(low.log_partition(), s.log_partition())
    close(low.score(tags.to(dtype)), s.score(tags))
    close(low.entropy(), s.entropy())
    assert torch.equal(low.topk(2).structures, s.topk(2).structures)
    assert torch.equal(low.encode(tags.to(dtype)), s.encode(tags))


def test_lengths_as_a_list() -> None:
    unary, transition = torch.randn(2, 4, 3), torch.randn(3, 3)
    a = sx.LinearChain(unary, transition, lengths=[3, 2])
    b = sx.LinearChain(unary, transition, lengths=torch.tensor([3, 2]))
    assert torch.equal(a.marginals(), b.marginals())


def test_garbage_in_the_padding_of_z() -> None:
    """Targets may hold anything where the sentence has ended, as indicator or as tags."""
    for omega in SMOOTHINGS:
        s = ragged("shared", omega)
        z = s.argmax()
        bad = z.clone()
        bad[torch.arange(6) >= LENGTHS[:, None]] = 7.0
        close(s.score(bad), s.score(z))
        close(s.log_prob(bad), s.log_prob(z))
        tags = z.argmax(-1)
        tags[torch.arange(6) >= LENGTHS[:, None]] = -100
        close(s.log_prob(tags), s.log_prob(z))


def test_broadcasting() -> None:
    """One sentence against several transition tables, lengths or ends."""
    unary = torch.randn(1, 4, 3, dtype=f64)
    tables = torch.randn(5, 3, 3, dtype=f64)
    many = sx.LinearChain(unary, tables)
    for i in range(5):
        close(many.marginals()[i], sx.LinearChain(unary[0], tables[i]).marginals())
    lengths = torch.tensor([1, 4, 2])
    sizes = sx.LinearChain(unary[0], tables[0], lengths=lengths)
    for i in range(3):
        one = sx.LinearChain(unary[0, : lengths[i]], tables[0])
        close(sizes.log_partition()[i], one.log_partition())
    grid = sx.LinearChain(torch.randn(2, 1, 4, 3, dtype=f64), tables.expand(2, 5, 3, 3))
    assert grid.batch_shape == (2, 5) and grid.marginals().shape == (2, 5, 4, 3)
    close(grid[1, 3].marginals(), grid.marginals()[1, 3])
    end = torch.randn(5, 3, dtype=f64)
    ends = sx.LinearChain(unary[0], tables[0], end=end)
    close(ends[2].entropy(), sx.LinearChain(unary[0], tables[0], end=end[2]).entropy())


# -- tags ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("omega", SMOOTHINGS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_tags_equal_one_hots(form: str, omega: sx.Smoothing) -> None:
    s = ragged(form, omega)
    tags = torch.randint(3, (7, 5, 6))  # with a sample dimension
    z = s.encode(tags)
    assert z.shape == (7, 5, 6, 3)
    close(s.score(tags), s.score(z))
    close(s.score(tags), s.score(z.bool()))
    close(s.log_prob(tags), s.log_prob(z))
    assert torch.equal(s.encode(s.decode(z)), z)
    leaves = [s.unary.clone().requires_grad_() for _ in range(2)]
    grads = []
    for leaf, target in zip(leaves, (tags, z), strict=True):
        live = sx.LinearChain(leaf, s.transition, s.start, s.end, LENGTHS, omega)
        grads.append(torch.autograd.grad(live.score(target).sum(), leaf)[0])
    close(*grads)


def test_argmax_tags() -> None:
    s = ragged("step")
    tags = s.argmax_tags()
    assert tags.dtype == torch.int64
    assert torch.equal(s.encode(tags), s.argmax())
    assert bool((tags == -1)[torch.arange(6) >= LENGTHS[:, None]].all())


def test_decode_of_samples_and_topk() -> None:
    """Sample dimensions stand before the batch, ranks behind it."""
    for lengths in (None, torch.tensor([2, 4, 1])):
        s = sx.LinearChain(torch.randn(3, 4, 2, dtype=f64), torch.randn(2, 2), lengths=lengths)
        sizes = [4, 4, 4] if lengths is None else lengths.tolist()
        draws = s.decode(s.sample((5,)))
        assert len(draws) == 5 and [len(row) for row in draws[3]] == sizes
        for k in (2, 3):  # 3 is also the batch size
            best = s.topk(k)
            rows = s.decode(best.structures)
            assert len(rows) == 3
            for i in range(3):
                lens = [sizes[i] if there else 0 for there in best.exists[i].tolist()]
                assert [len(row) for row in rows[i]] == lens
                assert rows[i][0] == s.decode(s.argmax())[i]
    two = sx.LinearChain(
        torch.randn(2, 3, 4, 2), torch.randn(2, 2), lengths=torch.tensor([[1, 2, 3], [4, 1, 2]])
    )
    z = two.sample()
    assert [[len(row) for row in rows] for rows in two.decode(z)] == [[1, 2, 3], [4, 1, 2]]
    assert torch.equal(two.encode(two.decode(z)), z)


# -- edges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("omega", SMOOTHINGS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_edge_marginals(form: str, omega: sx.Smoothing) -> None:
    s = ragged(form, omega)
    edges, mu = s.edge_marginals(), s.marginals()
    assert edges.shape == (5, 5, 3, 3)
    step = torch.arange(5) < LENGTHS[:, None] - 1
    close(edges.sum(-1)[step], mu[:, :-1][step])
    close(edges.sum(-2)[step], mu[:, 1:][step])
    transition = s.transition.clone().requires_grad_()
    live = sx.LinearChain(s.unary, transition, s.start, s.end, LENGTHS, omega)
    (g,) = torch.autograd.grad(live.log_partition().sum(), transition)
    expected = {"shared": edges.sum((0, 1)), "item": edges.sum(1), "step": edges}[form]
    close(g, expected)


def test_edge_marginals_by_enumeration() -> None:
    s = sx.LinearChain(torch.randn(3, 2, dtype=f64), torch.randn(2, 2, dtype=f64))
    every = s.enumerate_support()
    p = s.log_prob(every).exp()
    pairs = every[:, :-1, :, None] * every[:, 1:, None, :]
    close(s.edge_marginals(), (p[:, None, None, None] * pairs).sum(0))


def test_edge_marginals_are_differentiable() -> None:
    unary = torch.randn(2, 3, 2, dtype=f64, requires_grad=True)
    transition = torch.randn(2, 2, dtype=f64, requires_grad=True)

    def edges(u: Tensor, t: Tensor) -> Tensor:
        return sx.LinearChain(u, t, lengths=torch.tensor([2, 3])).edge_marginals()

    assert torch.autograd.gradcheck(edges, (unary, transition))


# -- hidden Markov models ------------------------------------------------------------------------


def test_hmm_likelihood() -> None:
    """Against the sum over all state sequences, and summing to one over all observations."""
    initial = torch.randn(3, dtype=f64).log_softmax(-1)
    transition = torch.randn(3, 3, dtype=f64).log_softmax(-1)
    emission = torch.randn(3, 4, dtype=f64).log_softmax(-1)
    words = torch.tensor(list(itertools.product(range(4), repeat=3)))
    hmm = sx.HMM(initial, transition, emission, words)
    close(hmm.log_partition().logsumexp(0), torch.zeros((), dtype=f64))
    for row in (0, 17, 63):
        total = torch.zeros((), dtype=f64)
        for y in itertools.product(range(3), repeat=3):
            p = initial[y[0]] + emission[y[0], words[row, 0]]
            for t in (1, 2):
                p = p + transition[y[t - 1], y[t]] + emission[y[t], words[row, t]]
            total = total + p.exp()
        close(hmm.log_partition()[row].exp(), total)


def test_hmm_with_its_own_transitions() -> None:
    initial, emission = torch.randn(3, dtype=f64), torch.randn(3, 4, dtype=f64)
    transition, words = torch.randn(2, 3, 3, dtype=f64), torch.tensor([[0, 3, 2], [1, 1, 0]])
    both = sx.HMM(initial, transition, emission, words).log_partition()
    for i in range(2):
        close(sx.HMM(initial, transition[i], emission, words[i]).log_partition(), both[i])


def test_tags_in_a_list() -> None:
    s = sx.LinearChain(torch.randn(2, 3, 4, dtype=f64), torch.randn(4, 4, dtype=f64))
    tags = [[0, 3, 2], [1, 1, 0]]
    assert torch.equal(s.score(tags), s.score(torch.tensor(tags)))
    assert torch.equal(s.log_prob(tags), s.log_prob(torch.tensor(tags)))


def test_hmm_of_ragged_observations() -> None:
    """Padding may hold anything, and every parameter gets its gradient."""
    parameters = [
        torch.randn(*shape, dtype=f64).log_softmax(-1).requires_grad_()
        for shape in ((3,), (3, 3), (3, 4))
    ]
    words = torch.tensor([[0, 3, -7], [1, 99, 5]])
    lengths = torch.tensor([2, 1])
    hmm = sx.HMM(*parameters, words, lengths=lengths)
    for i, size in enumerate(lengths.tolist()):
        one = sx.HMM(*parameters, words[i, :size])
        close(hmm.log_partition()[i], one.log_partition())
        close(hmm.marginals()[i, :size], one.marginals())
    grads = torch.autograd.grad(hmm.log_partition().sum(), parameters)
    initial, transition, emission = grads
    close(initial.sum(), torch.tensor(2.0, dtype=f64))
    close(transition.sum(), torch.tensor(1.0, dtype=f64))
    close(emission.sum(0), torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=f64))
    assert torch.equal(hmm[1].argmax(), hmm.argmax()[1])


@pytest.mark.parametrize("wrong", [5, -7])
def test_impossible_observations_are_nan_where_they_are_not_validated(wrong: int) -> None:
    """Under vmap, in a compiled function and with validate_args=False; those in the padding may be
    anything."""
    initial, transition, emission = torch.randn(2), torch.randn(2, 2), torch.randn(2, 3)
    seen = torch.tensor([[0, 1, wrong], [0, 1, 2]])

    def posterior(observations: torch.Tensor) -> torch.Tensor:
        return sx.HMM(initial, transition, emission, observations).marginals()

    right = posterior(seen[1])
    compiled = torch.compile(posterior, fullgraph=True, backend="aot_eager")
    unchecked = sx.HMM(initial, transition, emission, seen, validate_args=False)
    for found in (torch.func.vmap(posterior)(seen), compiled(seen), unchecked.marginals()):
        assert found[0].isnan().all()
        close(found[1], right)
    assert unchecked.log_partition().isnan().tolist() == [True, False]
    short = sx.HMM(initial, transition, emission, seen, lengths=torch.tensor([2, 3]))
    close(short.marginals()[0, :2], posterior(seen[0, :2]))


# -- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("omega", SMOOTHINGS, ids=str)
@pytest.mark.parametrize(("n", "c"), [(1, 1), (1, 4), (5, 1)])
def test_smallest(n: int, c: int, omega: sx.Smoothing) -> None:
    unary = torch.randn(2, n, c, dtype=f64)
    for transition in (torch.randn(c, c, dtype=f64), torch.randn(2, n - 1, c, c, dtype=f64)):
        s = sx.LinearChain(unary, transition, smoothing=omega)
        assert s.edge_marginals().shape == (2, n - 1, c, c)
        if n == 1:
            close(s.log_partition(), omega.max(unary[:, 0]))
            close(s.marginals()[:, 0], omega.argmax(unary[:, 0]))
        else:
            steps = transition.sum((-1, -2, -3)) if transition.dim() == 4 else 4 * transition[0, 0]
            close(s.log_partition(), unary.sum((1, 2)) + steps)
            close(s.entropy(), torch.zeros(2, dtype=f64))
            close(s.marginals(), torch.ones(2, n, c, dtype=f64))
        assert s.topk(2).exists.sum(-1).tolist() == [min(2, c**n)] * 2
        assert s.sample((3,)).shape == (3, 2, n, c)


@pytest.mark.parametrize(("n", "c"), [(1, 7), (9, 4), (33, 5), (200, 2)])
def test_counts(n: int, c: int) -> None:
    """Zero scores: c^n sequences, all equally likely."""
    s = sx.LinearChain(torch.zeros(n, c, dtype=f64), torch.zeros(c, c, dtype=f64))
    close(s.log_partition(), torch.tensor(n * math.log(c), dtype=f64), 1e-13)
    close(s.entropy(), torch.tensor(n * math.log(c), dtype=f64), 1e-13)
    close(s.marginals(), torch.full((n, c), 1 / c, dtype=f64), 1e-13)
    assert not bool(s.max_marginals().any())


@pytest.mark.parametrize("dtype", [torch.float32, f64], ids=str)
def test_long(dtype: torch.dtype) -> None:
    """A hundred thousand positions in linear memory, with gradients."""
    n, c = 100_000, 8
    unary = torch.randn(1, n, c, dtype=dtype, requires_grad=True)
    transition = torch.randn(c, c, dtype=dtype, requires_grad=True)
    tags = torch.randint(c, (1, n))
    tracemalloc.start()
    s = sx.LinearChain(unary, transition)
    value = s.log_partition()
    loss = value - s.score(tags)
    loss.sum().backward()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 * n * c * 8, "more than a few copies of the scores"
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    sums = unary.grad.sum(-1)  # marginals − one-hots
    close(sums, torch.zeros_like(sums), tolerance)
    flow = transition.grad.sum()
    close(flow, torch.zeros_like(flow), 0.2 if dtype == torch.float32 else 1e-6)
    with torch.no_grad():
        mu = s.marginals()
        close(mu.sum(-1), torch.ones(1, n, dtype=dtype), tolerance)
        best = s.argmax()
        assert bool((s.score(best) <= value).all()) and bool((s.score(best) > s.score(tags)).all())
    exact = sx.LinearChain(unary.detach().double(), transition.detach().double())
    close(mu.double(), exact.marginals(), 1e-5 if dtype == torch.float32 else 1e-12)
    close(value.double(), exact.log_partition(), 1e-6)
    close(exact.entropy()[0], s.entropy().double()[0], 1e-4)


def test_long_curvature() -> None:
    """Hessian-vector products keep their digits in float32, the shared transition's included."""
    n, c = 20_000, 4
    unary, transition = torch.randn(1, n, c), torch.randn(c, c)
    weights = torch.randn(1, n, c)
    grads = []
    for dtype in (torch.float32, f64):
        leaves = [t.to(dtype).requires_grad_() for t in (unary, transition)]
        s = sx.LinearChain(*leaves)
        grads.append(torch.autograd.grad((s.marginals() * weights.to(dtype)).sum(), leaves))
    for low, high in zip(*grads, strict=True):
        scale = high.abs().max().item()
        assert (low.double() - high).abs().max().item() <= 1e-5 * scale


@pytest.mark.parametrize("omega", [sx.Gini(), sx.Hard()], ids=str)
def test_long_on_the_forest(omega: sx.Smoothing) -> None:
    n, c = 3000, 4
    unary = torch.randn(n, c, dtype=f64, requires_grad=True)
    s = sx.LinearChain(unary, torch.randn(c, c, dtype=f64), smoothing=omega)
    (mu,) = torch.autograd.grad(s.log_partition(), unary)
    close(mu.sum(-1), torch.ones(n, dtype=f64))
    assert s.sample((2,)).sum() == 2 * n
    best = s.topk(3)
    close(best.scores[0], s.score(s.argmax()))
    close(s.max_marginals().amax(-1), best.scores[0].expand(n))


def test_dense_kernels_at_large_spreads() -> None:
    """Steps whose scores lie thousands apart, up and down, next to ordinary ones."""
    n, c = 40, 6
    scale = torch.tensor([1e-3, 1.0, 1e2, 3e3])[torch.arange(n) % 4]
    for dtype in (torch.float32, f64):
        unary = (torch.randn(2, n, c) * scale[:, None]).to(dtype)
        transition = (torch.randn(2, n - 1, c, c) * scale.flip(0)[1:, None, None]).to(dtype)
        transition[torch.rand(transition.shape) < 0.2] = -math.inf
        s = sx.LinearChain(unary, transition)
        value, mu = s._value_and_gradient()
        value0, mu0 = DynamicStructure._value_and_gradient(s)
        tolerance = 1e-9 if dtype == f64 else 1e-4
        close(value, value0, tolerance)
        for a, b in zip(mu, mu0, strict=True):
            close(a, b, tolerance)


@pytest.mark.parametrize("backend", ["cpu", "naive"])
@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_large_offsets_of_the_ends(backend: str, shift: float) -> None:
    """Two large offsets at one position are not added in float32."""
    generator = torch.Generator().manual_seed(0)
    sizes = (64, 6, 3), (3, 3), (3,), (3,)
    parts = [torch.randint(-3000, 3000, s, generator=generator) / 1024 for s in sizes]
    with sx.backend(backend):
        plain, moved = sx.LinearChain(*parts), sx.LinearChain(*[p + shift for p in parts])
        torch.testing.assert_close(moved.marginals(), plain.marginals(), rtol=0, atol=1e-5)
        gain = moved.log_partition().double() - plain.log_partition().double()
        torch.testing.assert_close(gain, torch.full_like(gain, 13 * shift), rtol=1e-6, atol=0)
        assert (moved.argmax() == plain.argmax()).all()


MASK = -1e9
NEVER = -math.inf
WITH_MASKS = {  # unary, transition or None for zeros, start, end
    "start": ([[NEVER, 1.12, 0.0], [0.0, 0.5, 0.3]], None, [0.0, MASK, MASK], None),
    "both": ([[1.0, 0.0, MASK], [0.0, 0.5, 0.3]], None, [MASK, MASK, 0.0], None),
    "row": ([[MASK] * 3, [0.0, 0.5, 0.3]], None, [1.0, 0.0, 0.3], [0.3, 0.0, 0.0]),
    "end": ([[0.0, 0.5, 0.3], [MASK] * 3], None, [1.0, 0.0, 0.3], [0.3, 0.1, 2.0]),
    "transition": (
        [[0.0, 1.0, 0.0], [0.0, 0.5, 0.3]],
        [[NEVER] * 3, [0.0] * 3, [0.0] * 3],
        [0.0, MASK, MASK],
        None,
    ),
    "alone": ([[MASK, MASK, NEVER]], None, [1.0, 0.3, 0.0], [0.25, 0.0, 0.0]),
}


def with_mask(
    name: str, dtype: torch.dtype, smoothing: sx.Smoothing | None = None
) -> tuple[sx.LinearChain, Tensor]:
    """A chain whose ends meet a mask, and its unary scores, which have a gradient."""
    scores = [None if s is None else torch.tensor(s).to(dtype) for s in WITH_MASKS[name]]
    unary, transition, start, end = scores
    assert unary is not None
    leaf = unary.requires_grad_()
    transition = torch.zeros(3, 3, dtype=dtype) if transition is None else transition
    return sx.LinearChain(leaf, transition, start, end, smoothing=smoothing), leaf


@pytest.mark.parametrize("backend", ["cpu", "naive"])
@pytest.mark.parametrize("name", WITH_MASKS)
def test_a_mask_beside_start_and_end_keeps_their_digits(name: str, backend: str) -> None:
    """Answers in float32 are those of the same scores in float64, at first and second order."""
    answers = {}
    for dtype in (torch.float32, f64):
        with sx.backend(backend if dtype == torch.float32 else "naive"):
            chain, leaf = with_mask(name, dtype)
            mu = chain.marginals()
            weights = torch.arange(mu.numel(), dtype=dtype).reshape(mu.shape) / 4
            (slope,) = torch.autograd.grad((weights * mu).sum(), leaf)
            best = chain.topk(2).structures
            gini, _ = with_mask(name, dtype, sx.Gini())
            found = [mu, slope, gini.marginals(), chain.sparsemap().marginals]
            moved = chain.perturb(torch.eye(3)[:1]).marginals()  # rounds where unary is a mask
            discrete = (
                chain.argmax(),
                best,
                chain.mbr(),
                chain.condition(exclude=best[0] > 0).argmax(),
            )
            edges = [chain.edge_marginals(), gini.edge_marginals()]
        for answer in (*found, moved, *discrete):
            assert answer.dtype == dtype
        answers[dtype] = [t.detach().to(f64) for t in (*found, *edges, *discrete)]
    for ours, expected in zip(answers[torch.float32], answers[f64], strict=True):
        close(ours, expected, 1e-6)
    (ours, *_), (expected, *_) = answers[torch.float32], answers[f64]
    exact, _ = with_mask(name, f64)
    every = exact.enumerate_support()
    p = exact.score(every).softmax(0)
    close(ours, torch.tensordot(p, every, 1), 1e-6)


@pytest.mark.parametrize("smoothing", [sx.Shannon(), sx.Gini()])
def test_draws_of_a_chain_whose_ends_meet_a_mask(smoothing: sx.Smoothing) -> None:
    chain, _ = with_mask("both", torch.float32, smoothing)
    exact, _ = with_mask("both", f64, smoothing)
    draws = chain.sample((4000,), generator=torch.Generator().manual_seed(0))
    close(draws.double().mean(0), exact.marginals().detach(), 0.03)


@pytest.mark.parametrize("name", ["both", "end"])
def test_probabilities_of_a_chain_whose_ends_meet_a_mask(name: str) -> None:
    tags, values = torch.tensor([1, 2]), []
    for dtype in (torch.float32, f64):
        chain, _ = with_mask(name, dtype)
        values.append([chain.log_prob(tags), sx.losses.crf(chain, tags, reduction="none")])
    for ours, expected in zip(*values, strict=True):
        assert ours.dtype == torch.float32
        close(ours.double(), expected, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, f64])
@pytest.mark.parametrize("backend", ["cpu", "naive"])
@pytest.mark.parametrize("size", [-1e30, 1e18])
def test_probabilities_of_a_chain_all_of_whose_tags_have_a_huge_score(
    size: float, backend: str, dtype: torch.dtype
) -> None:
    """What all tags share costs no digits, and tags with a mask that others avoid are lost."""
    torch.manual_seed(0)
    plain = torch.randn(2, 4, 3, dtype=dtype)
    plain[:, 2] = 0.0
    plain[1, 3, 1] = -1e30
    unary = plain.clone()
    unary[:, 2] = size
    edges, start, end = (
        torch.randn(3, 3, dtype=dtype),
        torch.randn(3, dtype=dtype),
        torch.randn(2, 3, dtype=dtype),
    )
    tags = torch.tensor([[0, 1, 2, 1], [2, 1, 0, 0]])
    with sx.backend(backend):
        huge, moderate = (
            sx.LinearChain(x, edges, start, end).log_prob(tags) for x in (unary, plain)
        )
        close(huge, moderate, 1e-5)
        tags[1, 3] = 1
        lost = sx.LinearChain(unary, edges, start, end).log_prob(tags)
    close(lost[0], moderate[0], 1e-5)
    close(lost[1], torch.tensor(-1e30, dtype=dtype), 1e-5)
