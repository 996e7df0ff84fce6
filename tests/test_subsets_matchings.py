"""Subsets and matchings: by enumeration, against naive twins, at the extremes, and bad input."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import structmax as sx
from structmax.oracles import assignment as matching
from structmax.oracles import subset

nan, inf = math.nan, math.inf
f64 = torch.float64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=f64, generator=generator(seed))


def randint(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=generator(seed))


def with_holes(scores: Tensor, share: float, seed: int = 1) -> Tensor:
    """The scores with a share of them forbidden."""
    drawn = torch.rand(scores.shape, generator=generator(seed))
    return torch.where(drawn < share, -inf, scores)


def fails(call: Callable[[], object], *words: str, kind: type[Exception] = ValueError) -> None:
    with pytest.raises(kind) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in the message: {caught.value}"


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def check_by_enumeration(s: sx.Structure) -> None:
    """Every item alone, against the list of its structures; infeasible items have value −inf."""
    value, tops = s.log_partition(), s.max_marginals()
    for b in range(len(s)):
        item = s[b]
        every = item.enumerate_support()
        scores = item.score(every)
        close(value[b], scores.logsumexp(0))
        if not len(every):  # fewer elements than k
            assert bool((tops[b] == -inf).all()) and not bool(item.topk(1).exists.any())
            fails(item.argmax, "allows no structure")
            continue
        event = (..., *[None] * len(item.event_shape))
        expected = torch.where(every > 0, scores[event], -inf)
        close(tops[b], expected.amax(0))
        if value[b] == -inf:
            fails(item.argmax, "allows no structure")
            continue
        p = scores.softmax(0)
        close(item.score(item.argmax()), scores.amax())
        close(item.marginals(), (p[event] * every).sum(0))
        close(item.entropy(), -torch.where(p > 0, p * p.log(), 0.0).sum())
        best = item.topk(4)
        count = min(4, int((scores > -inf).sum()))
        assert best.exists.tolist() == [True] * count + [False] * (4 - count)
        close(best.scores[:count], scores.sort(descending=True).values[:count])


# -- subsets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 13))
def test_all_subsets(n: int) -> None:
    scores, lengths = randn(3, n, seed=n), torch.tensor([n, max(1, n - 1), max(1, n // 2)])
    scores = with_holes(scores, 0.1)
    for k in [*range(n + 1), (0, n), (n // 3, n // 2 + 1), (n // 2, n + 5)]:
        check_by_enumeration(sx.KSubset(scores, k, lengths))


def test_counts_of_subsets() -> None:
    for n in range(1, 30):
        for k in range(n + 1):
            count = sx.KSubset(torch.zeros(n, dtype=f64), k).log_partition().exp()
            close(count, torch.tensor(float(math.comb(n, k)), dtype=f64))
    close(
        sx.KSubset(torch.zeros(20, dtype=f64), (0, 20)).log_partition().exp() / 2**20,
        torch.ones((), dtype=f64),
    )


CASES = {
    "random": lambda: (randn(5, 9), None),
    "ragged": lambda: (randn(5, 9), torch.tensor([9, 4, 7, 3, 1])),
    "forbidden": lambda: (with_holes(randn(5, 9), 0.3), torch.tensor([9, 4, 7, 3, 1])),
    "up": lambda: ((randn(5, 9) * 64).round() / 64 + 1e4, None),
    "down": lambda: ((randn(5, 9) * 64).round() / 64 - 1e4, None),
    "spread": lambda: (randn(5, 9) * 1e3, torch.tensor([9, 4, 7, 3, 1])),
    "equal": lambda: (torch.zeros(5, 9, dtype=f64), None),
    "one large": lambda: (torch.eye(9, dtype=f64)[:5] * 1e4, None),
}


@pytest.mark.parametrize("k", [(0, 0), (3, 3), (9, 9), (0, 4), (2, 7), (0, 9)])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("gamma", [1.0, 0.7])
def test_subset_kernels_match_the_definition(case: str, k: tuple[int, int], gamma: float) -> None:
    take, lengths = CASES[case]()
    lengths = torch.full((5,), 9) if lengths is None else lengths
    inside = torch.arange(9) < lengths[:, None]
    take = torch.where(inside, take, nan)
    leave = torch.where(torch.rand(5, 9, generator=generator(3)) < 0.1, -inf, 0.0).to(f64)
    answers = []
    for name in ("cpu", "naive"):
        leaves = [t.clone().requires_grad_() for t in (take, leave)]
        with sx.backend(name):
            args = (lengths,), subset.key_of(*k), (1.0, gamma, 1.0)
            value, *mu = subset.subset.value_and_gradient(leaves, *args)
            close(subset.subset.value([take, leave], *args), value.detach())
            slope = sum((m * randn(5, 9, seed=4 + i)).sum() for i, m in enumerate(mu))
            answers.append([value, *mu, *torch.autograd.grad(slope, leaves)])
    for fast, slow in zip(*answers, strict=True):
        close(fast, slow)
        assert not bool(fast[1:].isnan().any())


def test_subset_dense_matches_the_engine() -> None:
    """The forest, which other smoothings and devices use, gives the same under Shannon."""
    scores, lengths = with_holes(randn(4, 20), 0.2), torch.tensor([20, 13, 9, 6])
    for k in (5, (2, 8)):
        dense = sx.KSubset(scores, k, lengths, sx.Shannon(0.5))
        mask = torch.zeros(4, 20, dtype=torch.bool)
        mask[:, 2] = scores[:, 2] > -inf
        for s in (dense, dense.condition(include=mask)):
            with sx.backend("naive"):
                value, mu = sx.structures.dynamic.DynamicStructure._value_and_gradient(s)
            close(s.log_partition(), value)
            for a, b in zip(s._value_and_gradient()[1], mu, strict=True):
                close(a, b)
            fast = s.topk(30)
            with sx.backend("naive"):
                slow = s.topk(30)
            close(fast.scores, slow.scores)
            assert torch.equal(fast.exists, slow.exists)


@pytest.mark.parametrize("k", [0, 2, 3, (0, 3), (2, 4), (0, 7)])
def test_best_subsets_with_ties(k: int | tuple[int, int]) -> None:
    scores = with_holes(randint(4, 100, 7).double() - 2, 0.25)
    s = sx.KSubset(scores, k, 1 + randint(7, 100, seed=2))
    every = [item.enumerate_support() for item in s]
    most = max(map(len, every)) + 1
    best = s.topk(most)
    for b, z in enumerate(every):
        total = s[b].score(z).sort(descending=True).values
        count = int((total > -inf).sum())
        assert int(best.exists[b].sum()) == count and bool(best.exists[b, :count].all())
        close(best.scores[b, :count], total[:count])
        found = best.structures[b, :count]
        assert len(torch.unique(found, dim=0)) == count
        close(s[b].score(found), best.scores[b, :count])
        assert not bool(best.structures[b, count:].any())


def test_included_elements_reduce_k() -> None:
    scores, part = randn(6), torch.tensor([True, False, False, False, True, False])
    whole = sx.KSubset(scores, 3)
    two_in = whole.condition(include=part)
    rest = sx.KSubset(scores[[1, 2, 3, 5]], 1)
    close(two_in.log_partition(), rest.log_partition() + scores[0] + scores[4])
    close(two_in.marginals()[[1, 2, 3, 5]], rest.marginals())
    assert two_in.marginals()[[0, 4]].tolist() == [1.0, 1.0]
    close(two_in.entropy(), rest.entropy())
    assert bool((two_in.sample((50,), generator())[:, part] == 1).all())
    assert two_in.topk(9).exists.sum() == 4
    close(two_in.max_marginals()[1], scores[[0, 1, 4]].sum())
    again = two_in.condition(include=torch.tensor([False, True, *[False] * 4]))
    assert again.decode(again.argmax()) == [0, 1, 4]
    assert torch.distributions.kl_divergence(whole, two_in) == inf
    four = torch.tensor([True] * 4 + [False] * 2)
    for nothing in (whole.condition(include=four), two_in.condition(exclude=part)):
        assert nothing.log_partition() == -inf and not bool(nothing.topk(1).exists.any())
        fails(nothing.argmax, "KSubset.argmax", "allows no structure")
    padded = sx.KSubset(randn(2, 6), (0, 3), torch.tensor([4, 6]))
    outside = padded.condition(include=torch.tensor([False] * 5 + [True]))
    assert outside.log_partition()[0] == -inf and outside.log_partition()[1] > -inf
    fails(outside.argmax, "item 0")


def test_draws_at_the_end_of_the_unit_interval() -> None:
    """What rounding leaves over of the probabilities belongs to the last possible count."""
    take = torch.tensor([[0.0, -inf, -inf, -inf]], dtype=torch.float64)
    numbers = torch.zeros(2, 1, 5, dtype=torch.float64)
    numbers[1, 0, 4] = 1.0  # the second draw's count: no sum of probabilities is more
    key = subset.key_of(0, 3)
    z = subset.sample(take, torch.zeros_like(take), torch.tensor([4]), numbers, key, 1.0)
    assert z[:, 0].tolist() == [[0, 0, 0, 0], [1, 0, 0, 0]]


def test_small_subsets() -> None:
    one = sx.KSubset(torch.tensor([0.5]), 1)
    assert one.marginals().tolist() == [1.0] and one.entropy() == 0
    none = sx.KSubset(torch.tensor([0.5, nan]), 0, torch.tensor(1))
    assert none.log_partition() == 0 and none.decode(none.argmax()) == []
    assert none.sample((2,)).tolist() == [[0.0, 0.0]] * 2 and none.topk(2).exists.tolist() == [1, 0]
    assert none.max_marginals().tolist() == [-inf, -inf]
    full = sx.KSubset(randn(2, 4), 4)
    assert bool((full.marginals() == 1).all()) and bool((full.entropy().abs() < 1e-14).all())
    tied = sx.KSubset(torch.zeros(6), (2, 4))
    close(tied.marginals(), torch.full((6,), 0.5), 1e-6)
    short = sx.KSubset(randn(3, 5), 3, torch.tensor([5, 2, 3]))
    assert short.log_partition().isinf().tolist() == [False, True, False]
    for query in (short.argmax, short.marginals, short.sample, short.entropy):
        fails(query, "item 1", "allows no structure", "has 2 elements", "exactly 3", "Lower k")
    assert short.topk(2).exists.tolist() == [[True, True], [False, False], [True, False]]


def test_why_a_subset_is_impossible() -> None:
    """Too few elements, too few that are allowed, or a condition that includes too many."""
    x = torch.zeros(2, 4)
    x[1, 1:] = -math.inf
    include = torch.tensor([[True, True, True, False], [True, False, False, False]])
    beyond = torch.tensor([False, False, False, True])
    free, short = torch.zeros(2, 4), torch.tensor([4, 2])
    for structure, *said in (
        (sx.KSubset(free, 3, short), "item 1", "2 elements", "exactly 3", "k=(0, 3)"),
        (sx.KSubset(x, (2, 3)), "item 1", "1 of its 4 elements are not", "between 2 and 3"),
        (sx.KSubset(free, (0, 2)).condition(include), "item 0", "includes 3", "between 0 and 2"),
        (sx.KSubset(free, 2, short).condition(beyond), "item 1", "not one of its 2"),
    ):
        for query in (structure.argmax, structure.marginals, structure.sample):
            fails(query, "allows no structure", *said)


def test_large_subset() -> None:
    scores = randn(1500)
    s = sx.KSubset(scores, 40)
    mu = s.marginals()
    close(mu.sum(), torch.tensor(40.0, dtype=f64))
    nudge = torch.zeros(1500, dtype=f64)
    nudge[7] = 1e-5
    ends = [sx.KSubset(scores + d, 40).log_partition() for d in (nudge, -nudge)]
    close((ends[0] - ends[1]) / 2e-5, mu[7], 1e-6)
    free = sx.KSubset(scores, (0, 1500))  # every element for itself
    close(free.log_partition(), torch.nn.functional.softplus(scores).sum())
    close(free.marginals(), scores.sigmoid())


@pytest.mark.slow
def test_hundred_of_ten_thousand() -> None:
    start = time.perf_counter()
    scores = randn(10_000).requires_grad_()
    s = sx.KSubset(scores, 100)
    mu = s.marginals()
    close(mu.sum(), torch.tensor(100.0, dtype=f64))
    (w,) = torch.autograd.grad((mu * scores.detach()).sum(), scores)
    close(w.sum(), torch.zeros((), dtype=f64), 1e-7)  # the size cannot change
    fixed = sx.KSubset(scores.detach(), 100)
    assert fixed.entropy() > 0
    z = fixed.sample((200,), generator())
    assert bool((z.sum(-1) == 100).all())
    close(z.mean(0), mu.detach(), 0.2)
    best = fixed.topk(50)
    close(best.scores[0], scores.detach().topk(100).values.sum())
    assert bool((best.scores.diff() <= 0).all())
    raised = (scores.detach() * 64).round() / 64
    close(sx.KSubset(raised + 1e4, 100).marginals(), sx.KSubset(raised, 100).marginals())
    assert time.perf_counter() - start < 60


# -- matchings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 7))
@pytest.mark.parametrize("m", range(1, 7))
def test_all_matchings(n: int, m: int) -> None:
    scores = with_holes(randn(2, n, m, seed=n), 0.1)
    check_by_enumeration(sx.Assignment(scores))
    sizes = torch.tensor([n, max(1, n - 1)]), torch.tensor([max(1, m - 2), m])
    check_by_enumeration(sx.Assignment(scores, sizes))


def test_counts_of_matchings() -> None:
    for n, m in [(8, 8), (12, 12), (3, 9), (9, 3), (2, 40), (20, 1)]:
        value = sx.Assignment(torch.zeros(n, m, dtype=f64)).log_partition()
        close(value, torch.tensor(math.log(math.perm(max(n, m), min(n, m))), dtype=f64))
    sizes = torch.tensor([3, 7, 12, 1]), torch.tensor([12, 5, 12, 1])
    value = sx.Assignment(torch.zeros(4, 12, 12, dtype=f64), sizes).log_partition()
    counts = [math.perm(12, 3), math.perm(7, 5), math.factorial(12), 1]
    close(value, torch.tensor(counts, dtype=f64).log())


ITEMS = {
    "random": lambda: randn(40, 7, 9),
    "tall": lambda: randn(40, 9, 6),
    "ties": lambda: randint(3, 40, 7, 7).double(),
    "forbidden": lambda: with_holes(randn(40, 6, 6), 0.5),
    "ties and forbidden": lambda: with_holes(randint(3, 40, 6, 8).double(), 0.6),
    "up": lambda: randn(40, 7, 7) + 1e4,
    "spread": lambda: randn(40, 8, 7) * 1e3,
    "equal": lambda: torch.zeros(40, 7, 7, dtype=f64),
}


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("case", ITEMS)
def test_best_matching_is_that_of_scipy(case: str, ragged: bool) -> None:
    scores = ITEMS[case]()
    _, n, m = scores.shape
    rows, columns = torch.full((40,), n), torch.full((40,), m)
    if ragged:
        rows, columns = 1 + randint(n, 40, seed=2), 1 + randint(m, 40, seed=3)
        inside = (torch.arange(n) < rows[:, None])[:, :, None]
        scores = torch.where(inside & (torch.arange(m) < columns[:, None])[:, None], scores, nan)
    best, z = matching.argmax(scores, rows, columns)
    expected, _ = matching.naive(scores, rows, columns)
    close(best, expected, 1e-12)
    for b in range(40):
        pairs = [(i, j) for i, j in enumerate(z[b].tolist()) if j >= 0]
        full = min(int(rows[b]), int(columns[b]))
        assert len(pairs) == len({j for _, j in pairs}) == (full if best[b] > -inf else 0)
        if pairs:
            close(sum(scores[b, i, j] for i, j in pairs), best[b], 1e-12)


@pytest.mark.parametrize("shape", [(4, 4), (3, 5), (5, 3), (1, 4)])
def test_best_matchings_with_ties(shape: tuple[int, int]) -> None:
    scores = with_holes(randint(4, 125, *shape).double(), 0.25)
    sizes = [1 + randint(side, 125, seed=2) for side in shape]
    s = sx.Assignment(scores, (sizes[0], sizes[1]))
    most = math.perm(max(shape), min(shape)) + 2
    best = s.topk(most)
    with sx.backend("naive"):
        slow = s.topk(most)
    assert torch.equal(best.exists, slow.exists)
    close(best.scores, slow.scores)
    for b in range(125):
        found = best.structures[b][best.exists[b]]
        assert len(torch.unique(found, dim=0)) == len(found)
        close(s[b].score(found), best.scores[b][best.exists[b]])
        assert not bool(best.structures[b][~best.exists[b]].any())


def test_large_matchings() -> None:
    """What is polynomial has no limit on the size; what is not says what to use instead."""
    scores = with_holes(randn(3, 20, 25), 0.5)
    s = sx.Assignment(scores, (torch.tensor([20, 13, 18]), torch.tensor([25, 25, 14])))
    best = s.topk(20)
    assert bool(best.exists.all()) and bool((best.scores.diff() <= 0).all())
    close(s.score(s.argmax()), best.scores[:, 0])
    tops = s.max_marginals()
    for i, j in ((0, 3), (12, 13), (7, 1)):
        part = torch.zeros(20, 25, dtype=torch.bool)
        part[i, j] = True
        with_it = s.condition(include=part)
        value = matching.argmax(with_it.scores, with_it.rows, with_it.columns)[0]
        close(tops[:, i, j], value)
    queries = {
        "log_partition": s.log_partition,
        "marginals": s.marginals,
        "sample": s.sample,
        "entropy": s.entropy,
        "cross_entropy": lambda: s.cross_entropy(s),
        "expected_cost": lambda: s.expected_cost(torch.zeros_like(scores)),
        "mbr": s.mbr,
        "log_prob": lambda: s.log_prob(s.argmax()),
        "ranked_support": lambda: next(s.ranked_support()),
    }
    for query in queries.values():
        fails(query, "sinkhorn", "bethe", "argmax", "topk", kind=sx.IntractableError)
    assert {q for q in s.queries if not s.supports(q)} == set(queries)
    assert all(sx.Assignment.supports(q) for q in queries)
    assert not sx.estimators.Marginals().applies_to(s) and sx.estimators.IMLE().applies_to(s)
    small = torch.tensor([3, 5, 4]), torch.tensor([6, 4, 4])  # in a large frame
    few = sx.Assignment(torch.where(scores > -inf, scores, 0.0), small)
    tight = sx.Assignment(few.scores[:, :5, :6], small)
    assert few.supports("marginals")
    close(few.log_partition(), tight.log_partition())
    close(few.marginals()[:, :5, :6], tight.marginals())
    assert few.sample((3,)).shape == (3, 3, 20, 25)


def test_single_matchings() -> None:
    cell = sx.Assignment(torch.tensor([[2.0]]))
    assert cell.marginals().tolist() == cell.sinkhorn().tolist() == [[1.0]]
    assert cell.log_partition() == 2 and cell.entropy() == 0
    assert cell.bethe().log_partition == 2 and cell.bethe().marginals.tolist() == [[1.0]]
    only = torch.full((4, 4), -inf, dtype=f64)
    only[torch.arange(4), torch.tensor([2, 0, 3, 1])] = randn(4)
    only[3, 2] = 1.0  # on no matching
    s = sx.Assignment(only)
    z = s.encode(torch.tensor([2, 0, 3, 1]))
    for answer in (s.argmax(), s.marginals(), s.sinkhorn(), s.bethe().marginals, s.sample()):
        close(answer, z, 1e-14)
    assert s.topk(2).exists.tolist() == [True, False]
    close(s.bethe().log_partition, s.score(z))
    only[0, 2] = -inf
    none = sx.Assignment(torch.stack([torch.zeros(4, 4, dtype=f64), only]))
    assert none.log_partition().isinf().tolist() == [False, True]
    for query in (none.argmax, none.marginals, none.sample, none.sinkhorn, none.bethe):
        fails(query, "item 1", "allows no structure")
    assert bool((none.max_marginals()[1] == -inf).all())


# -- relaxations ---------------------------------------------------------------------------------

SIZES = {
    "square": ((4, 4), None),
    "wide": ((3, 5), None),
    "tall": ((5, 2), None),
    "ragged": ((4, 5), (torch.tensor([4, 2, 3]), torch.tensor([3, 5, 3]))),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("temperature", [1.0, 0.2])
def test_sinkhorn_solves_the_relaxed_problem(size: str, temperature: float) -> None:
    shape, lengths = SIZES[size]
    scores = with_holes(randn(3, *shape), 0.1)
    s = sx.Assignment(scores, lengths)
    p = s.sinkhorn(temperature, tol=1e-12)
    possible = s.max_marginals() > -inf
    assert torch.equal(p > 0, possible)
    for b in range(3):
        n, m = (int(side[b]) for side in s._sizes())
        own = p[b, :n, :m]
        assert not bool(p[b, n:].any()) and not bool(p[b, :, m:].any())
        free = [1 - own.sum(0), 1 - own.sum(1)]  # columns, rows
        assert float((free[1] if n <= m else free[0]).abs().max()) < 1e-10
        assert float(torch.cat(free).min()) > -1e-10
        # stationary: along a feasible direction, which is a difference of two matchings, the slope
        # of ⟨θ, P⟩ + γ·H is 0
        every = s[b].enumerate_support()[:, :n, :m]
        every = every[s[b].score(s[b].enumerate_support()) > -inf]
        theta = torch.where(possible[b, :n, :m], scores[b, :n, :m], 0.0)
        slope = theta - temperature * torch.where(own > 0, own, 1.0).log()
        gain = (every * slope).sum((-2, -1))
        if n != m:
            unmatched = free[0] if n < m else free[1]
            left = 1 - (every.sum(-2) if n < m else every.sum(-1))
            used = unmatched.clamp(min=1e-12).log() * left
            gain = gain - temperature * used.sum(-1)
        close(gain, gain[:1].expand_as(gain), 1e-6)


def test_sinkhorn_of_a_batch_of_large_problems_returns() -> None:
    """Batches of LU factorizations of this size never return with two threads of torch 2.13."""
    scores = torch.randn(2, 170, 170, requires_grad=True)
    p = sx.Assignment(scores).sinkhorn(0.5)
    (p**2).sum().backward()
    for sums in (p.sum(-1), p.sum(-2)):
        close(sums, torch.ones(2, 170), 1e-6)
    close(scores.grad.sum(-1), torch.zeros(2, 170), 1e-6)  # a shift of a row changes nothing


@pytest.mark.parametrize(("rows", "columns"), [(5, 3), (3, 5), (2, 4), (4, 4), (1, 6)])
def test_relaxations_do_not_see_the_padding(rows: int, columns: int) -> None:
    """In value and gradient; in a frame of 6 × 7."""
    whole = randn(6, 7).requires_grad_()
    part = whole.detach()[:rows, :columns].clone().requires_grad_()
    weights = randn(rows, columns)
    answers = []
    for scores, lengths in ((whole, (torch.tensor(rows), torch.tensor(columns))), (part, None)):
        p = sx.Assignment(scores, lengths).sinkhorn()[:rows, :columns]
        b = sx.Assignment(scores, lengths).bethe().marginals[:rows, :columns]
        g = [torch.autograd.grad((q * weights).sum(), scores)[0] for q in (p, b)]
        answers.append([p, b, *(t[:rows, :columns] for t in g)])
    for padded, alone in zip(*answers, strict=True):
        close(padded, alone, 1e-6)


def test_sinkhorn_tends_to_the_best_matching() -> None:
    for shape in ((5, 5), (4, 6), (6, 3)):
        s = sx.Assignment(randn(8, *shape, seed=5))
        gaps = [(s.sinkhorn(t) - s.argmax()).abs().amax() for t in (1.0, 0.1, 0.01)]
        assert gaps[0] > gaps[1] > gaps[2]
        gap = s.topk(2).scores.diff().abs().amin()
        close(s.sinkhorn(float(gap) / 40), s.argmax(), 1e-5)
    close(sx.Assignment(torch.zeros(3, 3)).sinkhorn(), torch.full((3, 3), 1 / 3), 1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_relaxations_are_differentiable(size: str) -> None:
    shape, lengths = SIZES[size]
    scores = with_holes(randn(3, *shape), 0.15)

    def p(x: Tensor) -> Tensor:
        return sx.Assignment(torch.where(scores > -inf, x, -inf), lengths).sinkhorn(0.5, tol=1e-13)

    def beliefs(x: Tensor) -> tuple[Tensor, Tensor]:
        return sx.Assignment(torch.where(scores > -inf, x, -inf), lengths).bethe(20)

    leaf = torch.where(scores > -inf, scores, 0.0).requires_grad_()
    fast = size != "ragged"
    assert gradcheck(p, leaf, atol=1e-6, fast_mode=fast)
    assert gradgradcheck(p, leaf, atol=1e-4, fast_mode=True)
    assert gradcheck(beliefs, leaf, atol=1e-6, fast_mode=fast)
    padded = sx.Assignment(scores, lengths)._inside()
    poisoned = torch.where(padded, scores, nan).requires_grad_()
    s = sx.Assignment(poisoned, lengths)
    total = (s.sinkhorn() ** 2).sum() + (s.bethe().marginals ** 2).sum() + s.bethe()[1].sum()
    (grad,) = torch.autograd.grad(total, poisoned)
    assert bool(grad.isfinite().all()) and not bool(grad[~padded].any())


def test_relaxations_under_transforms() -> None:
    scores = randn(3, 4, 4)
    for relax in (
        lambda x: sx.Assignment(x).sinkhorn(iterations=200),
        lambda x: sx.Assignment(x).bethe()[0],
    ):

        def total(x: Tensor, relax: Callable[[Tensor], Tensor] = relax) -> Tensor:
            return (relax(x) ** 2).sum()

        leaf = scores.clone().requires_grad_()
        (expected,) = torch.autograd.grad(total(leaf), leaf)
        close(torch.func.grad(total)(scores), expected, 1e-7)
        close(torch.func.vmap(torch.func.grad(total))(scores), expected, 1e-7)
    assert sx.Assignment(scores.float()).sinkhorn().dtype == torch.float32
    assert sx.Assignment(scores[:0]).sinkhorn().shape == (0, 4, 4)
    assert sx.Assignment(scores[:0]).bethe().marginals.shape == (0, 4, 4)


def test_bethe() -> None:
    square = sx.Assignment(randn(6, 5, 5), smoothing=sx.Shannon(0.8))
    marginals, value = square.bethe(200)
    close(marginals.sum(-1), torch.ones(6, 5, dtype=f64), 1e-7)
    close(marginals.sum(-2), torch.ones(6, 5, dtype=f64), 1e-7)
    assert bool((value <= square.log_partition() + 1e-9).all())
    assert bool(
        (value >= square.log_partition() - 0.8 * 2.5 * math.log(2)).all()
    )  # Gurvits & Samorodnitsky
    leaf = randn(6, 5, 5).requires_grad_()
    marginals, value = sx.Assignment(leaf).bethe(200)
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    close(slope, marginals.detach(), 1e-6)  # stationary
    for shape in ((1, 4), (4, 1)):  # where cells form no cycle, beliefs are exact
        s = sx.Assignment(randn(3, *shape))
        close(s.bethe().marginals, s.marginals())
        close(s.bethe().log_partition, s.log_partition())
    path = torch.full((3, 4), -inf, dtype=f64)
    for i in range(3):
        path[i, i], path[i, i + 1] = randn(2, seed=i)
    for s in (sx.Assignment(path), sx.Assignment(path.mT)):
        close(s.bethe().marginals, s.marginals())
        close(s.bethe().log_partition, s.log_partition())


# -- forms and errors ----------------------------------------------------------------------------


def test_forms() -> None:
    s = sx.KSubset(randn(2, 5), (0, 3))
    z = s.encode([[4, 1], []])
    assert s.decode(z) == [[1, 4], []]
    assert torch.equal(s.encode(torch.tensor([[1, 4, -1], [-1, -1, -1]])), z)
    close(s.log_prob(torch.tensor([[4, 1], [0, 2]])), s.log_prob(s.encode([[1, 4], [0, 2]])))
    a = sx.Assignment(randn(2, 3, 2))
    z = a.encode([[(0, 1), (2, 0)], [(1, 0), (0, 1)]])
    assert a.decode(z) == [[(0, 1), (2, 0)], [(0, 1), (1, 0)]]
    assert torch.equal(a.encode(torch.tensor([[1, -1, 0], [1, 0, -1]])), z)
    close(a.log_prob(torch.tensor([[1, -1, 0], [1, 0, -1]])), a.log_prob(z))


ERRORS = {
    "no element": (lambda: sx.KSubset(randn(2, 0), 1), ["KSubset", "scores", "(2, 0)"]),
    "integers": (lambda: sx.KSubset(torch.zeros(3).long(), 1), ["KSubset", "floating", "int64"]),
    "k negative": (lambda: sx.KSubset(randn(3), -1), ["KSubset", "k must be", "-1"]),
    "k float": (lambda: sx.KSubset(randn(3), 1.5), ["KSubset", "k must be", "1.5"]),
    "k turned": (lambda: sx.KSubset(randn(3), (2, 1)), ["at least, at most", "(2, 1)"]),
    "k triple": (lambda: sx.KSubset(randn(3), (0, 1, 2)), ["pair", "(0, 1, 2)"]),
    "k too large": (lambda: sx.KSubset(randn(3), 4), ["only n = 3", "k = 4"]),
    "subset nan": (lambda: sx.KSubset(torch.tensor([0, nan]), 1), ["KSubset: scores[1]", "nan"]),
    "subset lengths": (
        lambda: sx.KSubset(randn(2, 3), 1, torch.tensor([3, 4])),
        ["lengths", "4", "item 1"],
    ),
    "subset size of z": (
        lambda: sx.KSubset(randn(2, 3), 1).score(torch.tensor([[1.0, 0, 0], [1, 1, 0]])),
        ["z[1]", "exactly 1", "[1.0, 1.0, 0.0]"],
    ),
    "subset fraction": (
        lambda: sx.KSubset(randn(2), 1).score(torch.tensor([0.5, 0.5])),
        ["KSubset", "zeros"],
    ),
    "subset index": (lambda: sx.KSubset(randn(3), 1).encode([3]), ["between 0 and 2", "[3]"]),
    "subset twice": (lambda: sx.KSubset(randn(3), 2).encode([1, 1]), ["different", "[1, 1]"]),
    "subset kinds": (
        lambda: sx.KSubset(randn(3), 2).cross_entropy(sx.KSubset(randn(3), 1)),
        ["KSubset", "k = 2", "k = 1"],
    ),
    "subset other lengths": (
        lambda: sx.KSubset(randn(1, 3), 1).cross_entropy(
            sx.KSubset(randn(1, 3), 1, torch.tensor([2]))
        ),
        ["same lengths"],
    ),
    "subset ragged support": (
        lambda: sx.KSubset(randn(2, 3), 1, torch.tensor([2, 3])).enumerate_support(),
        ["different lengths"],
    ),
    "subset support": (lambda: sx.KSubset(randn(60), 20).enumerate_support(), ["too many"]),
    "matching 1-d": (lambda: sx.Assignment(randn(3)), ["Assignment", "(..., n, m)", "(3,)"]),
    "matching lengths": (
        lambda: sx.Assignment(randn(2, 3, 3), torch.tensor([1, 2])),
        ["pair", "lengths=(rows, columns)"],
    ),
    "matching rows": (
        lambda: sx.Assignment(randn(2, 3, 4), (torch.tensor([1, 4]), torch.tensor([4, 4]))),
        ["rows", "between 1 and 3", "got 4", "item 1"],
    ),
    "matching nan": (lambda: sx.Assignment(torch.full((1, 2), nan)), ["Assignment: scores[0, 0]"]),
    "matching smoothing": (
        lambda: sx.Assignment(randn(2, 2), smoothing=sx.Gini()),
        ["Assignment", "Shannon", "Gini"],
    ),
    "matching z": (
        lambda: sx.Assignment(randn(2, 2)).log_prob(torch.tensor([[1.0, 0], [1, 0]])),
        ["2 cells", "[(0, 0), (1, 0)]"],
    ),
    "matching pair": (lambda: sx.Assignment(randn(2, 2)).encode([(0, 2)]), ["(2, 2)", "(0, 2)"]),
    "matching columns": (
        lambda: sx.Assignment(randn(2, 2)).encode(torch.tensor([0, 2])),
        ["below 2", "[0, 2]"],
    ),
    "matching other": (
        lambda: sx.Assignment(randn(2, 2)).cross_entropy(sx.BinaryTree(randn(2, 2))),
        ["Assignment", "BinaryTree"],
    ),
    "temperature": (lambda: sx.Assignment(randn(2, 2)).sinkhorn(0.0), ["positive", "argmax"]),
    "support": (lambda: sx.Assignment(randn(12, 12)).enumerate_support(), ["12 × 12"]),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    call, words = ERRORS[case]
    fails(call, *words)


def test_bad_items_that_nobody_looks_at_give_nan() -> None:
    for bad in (nan, inf):
        scores = randn(2, 4)
        scores[1, 2] = bad
        for omega in (sx.Shannon(), sx.Gini()):
            s = sx.KSubset(scores, 2, smoothing=omega, validate_args=False)
            assert s.log_partition().isfinite().tolist() == [True, False]
            for answer in (s.marginals(), s.argmax()):
                assert bool(answer[0].isfinite().all()) and bool(answer[1].isnan().all())
        s = sx.KSubset(scores.requires_grad_(), 2, validate_args=False)
        (g,) = torch.autograd.grad(s.marginals()[:, 0].sum(), scores)
        for answer in (g, s.sample((3,)).movedim(1, 0), s.max_marginals()):
            assert bool(answer[0].isfinite().all()) and not bool(answer[1].isfinite().any())
        assert s.topk(2).exists.tolist() == [[True, True], [False, False]]
        a = sx.Assignment(scores.detach().reshape(2, 2, 2), validate_args=False)
        for answer in (a.marginals(), a.argmax()):
            assert bool(answer[0].isfinite().all()) and bool(answer[1].isnan().all())
        for name in ("cpu", "naive"):
            with sx.backend(name):
                assert a.argmax()[1].isnan().all() and not a.argmax()[0].isnan().any()
                assert a.topk(2).exists.tolist() == [[True, True], [False, False]]
    few = sx.KSubset(torch.full((2, 3), -inf), 2, validate_args=False)  # which has none
    assert bool(few.sample((3,)).isnan().all()) and bool((few.log_partition() == -inf).all())
    lost = sx.KSubset(randn(2, 4), 2, torch.tensor([3, 9]), validate_args=False)
    assert lost.log_partition().isnan().tolist() == [False, True]
    sizes = torch.tensor([2, 9]), torch.tensor([2, 2])
    lost = sx.Assignment(randn(2, 2, 2), sizes, validate_args=False)
    assert lost.log_partition().isnan().tolist() == [False, True]
    assert lost.argmax()[1].isnan().all()


@pytest.mark.bench
def test_best_matchings_are_no_slower_than_a_loop_over_scipy() -> None:
    scores = torch.randn(32, 32, 32)

    def ours() -> None:
        sx.Assignment(scores).argmax()

    def theirs() -> None:
        for item in scores.numpy():
            linear_sum_assignment(item, maximize=True)

    def least(run: Callable[[], None]) -> float:
        times = []
        for _ in range(50):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return min(times)

    ours()
    assert least(ours) <= least(theirs)


@pytest.mark.parametrize("mask", [-1e9, -1e12, -1e30, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("k", [2, (0, 3), (1, 2), (0, 4)], ids=str)
def test_finite_masks(mask: float, k: int | tuple[int, int]) -> None:
    """A mask that is a large number costs no digits of the others."""
    scores = torch.tensor([0.5, -0.3, mask, 2.0, mask], dtype=torch.float64)
    masked = sx.KSubset(scores, k)
    forbidden = sx.KSubset(torch.where(scores < -100, -torch.inf, scores), k)
    for query in ("log_partition", "marginals", "entropy", "argmax"):
        torch.testing.assert_close(getattr(masked, query)(), getattr(forbidden, query)())


def test_assignments_compiled_at_other_sizes() -> None:
    def answers(scores: Tensor) -> tuple[Tensor, ...]:
        s = sx.Assignment(scores)
        return s.log_partition(), s.marginals(), s.entropy(), s.sample((2,)).sum((-1, -2))

    torch.compiler.reset()
    compiled = torch.compile(answers, fullgraph=True, backend="aot_eager")
    for shape in ((2, 3, 4), (3, 3, 5), (2, 5, 4)):
        scores = torch.randn(shape)
        for a, b in zip(compiled(scores), answers(scores), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, f64])
@pytest.mark.parametrize("mask", [-1e9, -1e14, -1e30, -3e38])
@pytest.mark.parametrize("k", [3, (3, 5)], ids=str)
def test_ties_below_zero_have_no_order(
    k: int | tuple[int, int], mask: float, dtype: torch.dtype
) -> None:
    """Of four equal elements one must be taken: each has the same probability, wherever it is."""
    s = sx.KSubset(torch.tensor([0.0, mask, mask, 0.25, mask, mask], dtype=dtype), k)
    expected = torch.tensor([1.0, 0.25, 0.25, 1.0, 0.25, 0.25], dtype=dtype)
    torch.testing.assert_close(s.marginals(), expected)
    draws = s.sample((4000,), generator=generator())
    torch.testing.assert_close(draws.mean(0), expected, atol=0.03, rtol=0)


@pytest.mark.parametrize("large", [1e9, 1e30])
def test_ties_beside_large_scores_of_either_sign(large: float) -> None:
    """An element that is forced, and others far above and far below those that tie."""
    scores = torch.tensor([large, 0.5, -large, 1.0, -large, 0.5], dtype=f64)
    s = sx.KSubset(scores, 4).condition(include=torch.arange(6) == 4)
    expected = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0], dtype=f64)
    pairs = torch.tensor([1.5, 1.0, 1.5], dtype=f64).softmax(0)  # {1, 3}, {1, 5}, {3, 5}
    expected[[1, 3, 5]] = torch.stack([1 - pairs[2], 1 - pairs[1], 1 - pairs[0]])
    close(s.marginals(), expected)


def test_entropy_and_divergence_are_never_negative() -> None:
    """Both are differences of sums of large scores."""
    scores = torch.tensor([0.0, -1e14, -1e14, -1e14], dtype=f64)
    for s in (sx.KSubset(scores, 2), sx.KSubset(torch.tensor([0.1, 0.3, 1e9]), 3)):
        assert s.entropy() >= 0
    some = randn(200, 6).float() * 1e3
    p, q = (sx.KSubset(x, 2) for x in (some, some + 0.125))
    assert bool((torch.distributions.kl_divergence(p, q) >= 0).all())
    assert bool((p.entropy() >= 0).all())


@pytest.mark.parametrize("smoothing", [sx.Shannon(0.5), sx.Gini(), sx.Tsallis(1.5)], ids=str)
def test_ties_far_below_others_in_the_graph(smoothing: sx.Smoothing) -> None:
    """The graph, which other smoothings and devices use, gives what it does at a milder mask."""
    answers = []
    for mask in (-1e3, -1e14, -1e30):
        scores = torch.tensor([0.5, mask, mask, 1.0, mask, nan], dtype=f64).requires_grad_()
        with sx.backend("naive" if isinstance(smoothing, sx.Shannon) else "cpu"):
            s = sx.KSubset(scores, 3, torch.tensor(5), smoothing)
            mu = s.marginals()
            z = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0], dtype=f64)
            slope = torch.autograd.grad((mu[:5] * torch.arange(5)).sum(), scores)[0]
            close(s.log_partition() / mask, torch.ones((), dtype=f64), 2e-3)
            answers.append([mu, slope, s.sample((50,), generator=generator()), s.entropy()])
            if not isinstance(smoothing, sx.Shannon):
                answers[-1].append(s.log_prob(z))
            (gain,) = torch.autograd.grad(s.log_partition(), scores)
            close(gain, mu.detach())
    for other in answers[1:]:
        for a, b in list(zip(answers[0], other, strict=True))[: 3 if s._is_gibbs else 5]:
            close(b, a)
