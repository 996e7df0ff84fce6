"""Scores of any finite size: masks such as finfo.min and −1e30, and forces up to 1e18.

The answer is known exactly: every structure is listed, its score is summed in whole numbers, and
what all of the best have in common is taken out before an exponential is taken.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from table import ROWS
from torch import Tensor

import structmax as sx
from structmax.forest.pcfg.chart import Grammar
from structmax.forest.pcfg.terms import Terms
from structmax.testing.contract import _make, _score_names, _scores, _with_scores

MASKS = (-math.inf, -1e4, -1e9, -1e30, None)  # None: the least number of the dtype
FORCES = (1e4, 1e9, 1e18)
BITS = 1400  # of a score behind the point, as a whole number
# Scores of these do not add up along a structure, or must not be positive.
LEFT_OUT = ("pcfg-low-rank", "grid-all")
PICKED = [row for row in ROWS if not row.startswith(LEFT_OUT)]
# Scores of these are added up before they are those of arcs, and digits lost there are lost.
SUMMED = ("nonprojective-labelled", "spanning-tree")
EXACT = [row for row in PICKED if "/shannon" in row and not row.startswith(SUMMED)]


class Listed(NamedTuple):
    """All structures of a row: z ``(K, *batch, *parts)`` and, for each item, how often a structure
    uses each entry of the score tensors ``(K, P)``."""

    every: Tensor
    counts: list[Tensor]


def items_of(s: sx.Structure) -> list[tuple[int, ...]]:
    assert len(s.batch_shape) <= 1
    return [(b,) for b in range(len(s))] if s.batch_shape else [()]


@functools.cache
def listed(row: str) -> Listed:
    s = _make(ROWS[row])
    every = s.enumerate_support()
    leaves = [t.contiguous().requires_grad_() for t in _scores(s)]
    scores = _with_scores(s, leaves).score(every)
    counts = []
    for item in items_of(s):
        total = scores[(slice(None), *item)]
        rows = [torch.autograd.grad(x, leaves, retain_graph=True) for x in total]
        own = [[of_item(t, s, n, item) for t, n in zip(g, _score_names(s))] for g in rows]
        counts.append(torch.stack([torch.cat([t.flatten() for t in g]) for g in own]))
    return Listed(every, counts)


def of_item(t: Tensor, s: sx.Structure, name: str, item: tuple[int, ...]) -> Tensor:
    """The part of a score tensor that belongs to an item: all of it, if the batch shares it."""
    dims = t.dim() - s._tensors()[name][1]
    return t[item] if dims and len(t) > 1 else (t[0] if dims else t)


def exact(x: Tensor) -> np.ndarray:
    """Scores as whole numbers of 2^−BITS, in an array of Python's."""
    return np.array([int(Fraction(v) * (1 << BITS)) for v in x.double().tolist()], dtype=object)


def possible(scores: Tensor, counts: Tensor) -> Tensor:
    """Which structures of one item have no part that is forbidden, ``(K)``."""
    return ~((counts > 0) & (scores == -math.inf)).any(1)


def reference(scores: Tensor, counts: Tensor, gamma: float) -> Tensor | None:
    """The probability of each structure of one item; None if there is none."""
    allowed = possible(scores, counts)
    if not bool(allowed.any()):
        return None
    finite = torch.where(scores == -math.inf, 0.0, scores)
    totals = counts.long().numpy().astype(object) @ exact(finite)
    best = max(t for t, there in zip(totals, allowed.tolist(), strict=True) if there)
    unit = Fraction(1, 1 << BITS)
    gaps = [float(max((t - best) * unit, Fraction(-(10**6)))) for t in totals]
    x = torch.tensor(gaps, dtype=torch.float64) / gamma
    return torch.where(allowed, x, -math.inf).softmax(0)


def attacked(s: sx.Structure, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """The scores of a structure, some of which are made huge in one of several ways."""
    seeded = np.random.default_rng(seed)
    leaves = [t.to(dtype).contiguous() for t in _scores(s)]
    places = [(i, j) for i, t in enumerate(leaves) for j in range(t.numel())]
    masks = [torch.finfo(dtype).min if m is None else m for m in MASKS]
    kind = seed % 4
    values = list(seeded.choice(masks[1:] if kind == 3 else masks, 1 if kind < 2 else 3))
    values += list(seeded.choice(FORCES, int(kind == 2)))
    share = seeded.choice([0.1, 0.3, 0.6, 1.0])
    for i, j in places:
        if seeded.random() < share:
            leaves[i].view(-1)[j] = float(seeded.choice(values))
    return leaves


def scores_of(s: sx.Structure, leaves: list[Tensor], item: tuple[int, ...]) -> Tensor:
    own = [of_item(t.detach(), s, n, item).flatten() for t, n in zip(leaves, _score_names(s))]
    return torch.cat(own).double()


def spread(s: sx.Structure, of_items: list[Tensor]) -> list[Tensor]:
    """Vectors ``(P)`` of the items as tensors like the scores; shared ones get the sum."""
    out = []
    at = 0
    for name in _score_names(s):
        t = s._tensors()[name][0]
        size = of_item(t, s, name, items_of(s)[0]).numel()
        pieces = torch.stack([x[at : at + size] for x in of_items])
        at += size
        out.append((pieces if t.numel() > size else pieces.sum(0)).reshape(t.shape))
    return out


def assert_close(found: Tensor, expected: Tensor, what: str, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(
        found.double(), expected.double(), atol=tolerance, rtol=tolerance,
        msg=lambda text: f"{what}: {text}",
    )  # fmt: skip


def check(row: str, dtype: torch.dtype, seed: int) -> None:
    """Marginals, gradients and Hessian products are those of enumeration."""
    plain = _make(ROWS[row])
    leaves = [t.requires_grad_() for t in attacked(plain, dtype, seed)]
    every, counts = listed(row)
    s = _with_scores(plain, leaves)
    items, names, gamma = items_of(s), _score_names(s), s.temperature
    p = [reference(scores_of(s, leaves, b), c, gamma) for b, c in zip(items, counts, strict=True)]
    if any(q is None for q in p):
        return  # refused
    generator = torch.Generator().manual_seed(seed)
    along = [torch.randn(t.shape, generator=generator).to(t) for t in leaves]
    a = s.log_partition()
    assert bool(a.isfinite().all())
    first = torch.autograd.grad(a.sum(), leaves, create_graph=True)
    total = torch.stack([(g * v).sum() for g, v in zip(first, along, strict=True)]).sum()
    second = torch.autograd.grad(total, leaves, materialize_grads=True)
    means, slopes = [], []
    for b, c, q, m in zip(items, counts, p, s.marginals() if s.batch_shape else [s.marginals()]):
        assert q is not None
        z = every[(slice(None), *b)].double()
        assert_close(m, torch.einsum("k,k...->...", q, z), "marginals")
        mean, gain = q @ c, c @ scores_of(s, along, b)
        means.append(mean)
        slopes.append(((q * (gain - q @ gain))[:, None] * (c - mean)).sum(0) / gamma)
    expected = zip(names, first, second, spread(s, means), spread(s, slopes), strict=True)
    for name, g, w, mean, slope in expected:
        assert_close(g, mean, f"gradient in {name}")
        assert_close(w, slope, f"Hessian product in {name}")


def check_polytope(row: str, dtype: torch.dtype, seed: int) -> None:
    """Marginals in [0, 1] that sum to what they must: they are in the hull of all structures. The
    Hessian is 0 along what all structures have in common, and no neighbour changes an answer."""
    plain = _make(ROWS[row])
    every, counts = listed(row)
    leaves = [t.requires_grad_() for t in attacked(plain, dtype, seed)]
    s = _with_scores(plain, leaves)
    items = items_of(s)
    if any(not possible(scores_of(s, leaves, b), c).any() for b, c in zip(items, counts)):
        return  # refused
    mu = s.marginals()
    assert bool((mu >= 0).all()) and bool((mu <= 1 + 1e-6).all()), mu
    for b in items:
        assert_close(mu[b], in_hull(every[(slice(None), *b)], mu[b]), "sums of marginals")
    if all(bool((c.sum(1) == c[0].sum()).all()) for c in counts):
        first = torch.autograd.grad(s.log_partition().sum(), leaves, create_graph=True)
        total = torch.stack([g.sum() for g in first]).sum()
        if total.requires_grad:
            for w in torch.autograd.grad(total, leaves, materialize_grads=True):
                assert_close(w, torch.zeros_like(w), "H·1")
    if len(items) > 1:
        given = zip(_score_names(s), leaves, _scores(plain), strict=True)
        other = [beside(t.detach(), u.to(dtype), s._tensors()[name][1]) for name, t, u in given]
        again = _with_scores(plain, other).marginals()
        assert torch.equal(again[-1], mu[-1]), "a neighbour changes an answer"


def beside(t: Tensor, other: Tensor, dims: int) -> Tensor:
    """t with the last item's own scores only; of the others', those of ``other``."""
    if t.dim() == dims or len(t) == 1:
        return t
    return torch.cat([other[:-1], t[-1:]])


def in_hull(every: Tensor, mu: Tensor) -> Tensor:
    """The point nearest to μ in the affine hull of all structures."""
    z = every.flatten(1).double()
    centre = z.mean(0)
    basis = torch.linalg.svd(z - centre, full_matrices=False)
    v = basis.Vh[basis.S > 1e-9]
    x = mu.detach().double().flatten() - centre
    return (centre + v.T @ (v @ x)).reshape(mu.shape)


@pytest.mark.parametrize("row", PICKED)
def test_marginals_lie_in_the_polytope_under_huge_scores(row: str) -> None:
    for seed in range(4):
        for dtype in (torch.float32, torch.float64):
            check_polytope(row, dtype, seed)


@pytest.mark.parametrize("row", EXACT)
def test_answers_under_huge_scores_are_those_of_enumeration(row: str) -> None:
    for seed in range(4):
        for dtype in (torch.float32, torch.float64):
            check(row, dtype, seed)


@pytest.mark.slow
@pytest.mark.parametrize("row", EXACT)
def test_answers_under_huge_scores_are_those_of_enumeration_in_many_cases(row: str) -> None:
    for seed in range(4, 100):
        for dtype in (torch.float32, torch.float64):
            check(row, dtype, seed)


@pytest.mark.parametrize("smoothing", [sx.Shannon(), sx.Gini(), sx.Tsallis(1.5)], ids=str)
def test_draws_under_huge_scores_follow_the_marginals(smoothing: sx.Smoothing) -> None:
    """All leaves of all trees are masked, which says nothing about the trees."""
    torch.manual_seed(0)
    x, word = torch.randn(2, 5, 5), torch.arange(5)
    x[:, word, word] = torch.finfo(torch.float32).min
    s = sx.BinaryTree(x, smoothing=smoothing)
    z = s.sample((4000,), generator=torch.Generator().manual_seed(0))
    assert_close(z.mean(0), s.marginals(), "frequencies", 0.04)
    x[:, word, word] = 0.0
    assert_close(s.marginals(), sx.BinaryTree(x, smoothing=smoothing).marginals(), "marginals")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["monotone", "dtw", "spanning-tree", "chain"])
def test_a_log_partition_beyond_the_dtype_is_its_last_number(name: str, dtype: torch.dtype) -> None:
    """Items whose scores are all masked have structures, alike as if all scores were 0."""
    make: Any = {
        "monotone": lambda x: sx.Alignment(x, kind="monotone"),
        "dtw": sx.Alignment,
        "spanning-tree": sx.SpanningTree,
        "chain": lambda x: sx.LinearChain(x, torch.zeros(4, 4, dtype=dtype)),
    }[name]
    zeros = torch.zeros(2, 4, 4, dtype=dtype)
    s = make(zeros + torch.finfo(dtype).min)
    assert bool(s.log_partition().isfinite().all())
    best = zeros if name == "dtw" else make(zeros).marginals()
    best[:, range(4), range(4)] += float(name == "dtw")  # which has the fewest cells
    assert_close(s.marginals(), best, "marginals")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equal_sums_of_several_huge_scores_stay_equal(dtype: torch.dtype) -> None:
    masks = torch.tensor([[1192, 1678], [1206, 720]], dtype=dtype) * -(2.0**30)
    apart = torch.tensor([[0, -math.inf], [-math.inf, 0]], dtype=dtype)
    mu = sx.LinearChain(masks, apart).marginals()
    assert_close(mu, torch.full_like(mu, 0.5), "marginals", 1e-9)


def test_grammars_in_log_space_conserve_visits_under_huge_scores() -> None:
    """Where every tree has huge scores, as many visits leave a span as reach it."""
    for size in (-1e9, -1e18, -1e30):
        spans = torch.full((1, 5, 5, 4), size, dtype=torch.float64)
        scores = [spans, torch.zeros(1, 2).double(), torch.zeros(1, 2, 4, 4).double()]
        ones = [torch.ones_like(t) for t in scores]
        kernel = Terms(Grammar(scores, torch.tensor([5]), 1.0))
        kernel.rise()
        mu = kernel.fall()[0].x
        assert bool((mu <= 1 + 1e-9).all())
        assert_close(mu.sum(), torch.tensor(9.0), "spans of a tree", 1e-9)
        g = Grammar(scores, torch.tensor([5]), 1.0)
        both = Terms(g, Grammar(ones, torch.tensor([5]), 1.0, outside=0.0))
        both.rise()
        for w in both.fall():
            assert w.d is not None
            assert_close(w.d, torch.zeros_like(w.d), "H·1", 1e-9)


def test_masked_factors_of_a_grammar_of_low_rank_are_those_of_minus_infinity() -> None:
    torch.manual_seed(0)
    root, parent, left, right = (torch.randn(*s) for s in ((2,), (2, 3), (4, 3), (4, 3)))
    words = torch.randn(6, 2)
    answers = []
    for mask in (torch.finfo(torch.float32).min, -math.inf):
        factors = [t.clone() for t in (left, right, parent)]
        factors[0][1, 1] = factors[2][0, 2] = mask
        answers.append(sx.PCFG.low_rank(root, *factors, words).marginals())
    assert_close(*answers, "marginals")


class Long(NamedTuple):
    """A long structure of scores of a shape: ``some`` of them can be avoided, and every structure
    has as many of ``all``."""

    make: Callable[[Tensor], sx.Structure]
    shape: tuple[int, ...]
    some: Any
    all: Any


at: Any = np.s_
word = torch.arange(60)
symbols = torch.randint(1, 5, (2, 300), generator=torch.Generator().manual_seed(0))
LONG = {
    "choice": Long(sx.Choice, (2, 2000), at[:, ::2], at[:]),
    "chain": Long(
        lambda x: sx.LinearChain(x, x[0, :3, :3]), (2, 2000, 3), at[:, 5::2, 0], at[:, 9]
    ),
    "chain-ends": Long(
        lambda x: sx.LinearChain(x, x[0, :3, :3], start=x[0, 3], end=x[:, 4]),
        (2, 2000, 3), at[:, 5::2, 0], at[:, 9],
    ),
    "semi-markov": Long(sx.SemiMarkov, (2, 2000, 3, 2), at[:, :, :, 0], at[:, 0]),
    "subset": Long(lambda x: sx.KSubset(x, 50), (2, 2000), at[:, ::2], at[:]),
    "ctc": Long(lambda x: sx.CTC(x, symbols), (2, 2000, 5), at[:, 5:9, 1], at[:, 9]),
    "dtw": Long(sx.Alignment, (2, 2000, 20), at[:, 5, 1:3], at[:, 0, 0]),
    "monotone": Long(
        lambda x: sx.Alignment(x, kind="monotone"), (2, 2000, 20), at[:, 5, 1:3], at[:, 9]
    ),
    "grid": Long(sx.GridPath, (2, 300, 5), at[:, 5, 1:3], at[:, 0, 0]),
    "binary-tree": Long(sx.BinaryTree, (2, 60, 60), at[:, 3, 20:30], at[:, word, word]),
    "projective": Long(
        lambda x: sx.DependencyTree(x, projective=True), (2, 60, 60), at[:, 3, 20:30], at[:, 0]
    ),
    "nonprojective": Long(sx.DependencyTree, (2, 60, 60), at[:, 3, 20:30], at[:, 0]),
    "assignment": Long(sx.Assignment, (2, 5, 100), at[:, 3, 20:30], at[:, 3]),
}  # fmt: skip


@pytest.mark.parametrize("size", [-1e4, -1e9, -1e30, None, 1e9, 1e18])
@pytest.mark.parametrize("name", LONG)
def test_long_structures_under_huge_scores(name: str, size: float | None) -> None:
    """A mask is −inf where it can be avoided; what all structures have in common is nothing."""
    case, generator = LONG[name], torch.Generator().manual_seed(0)
    scores, v = (torch.randn(case.shape, generator=generator) for _ in range(2))
    huge = torch.finfo(torch.float32).min if size is None else size
    pairs = [(case.all, huge, 0.0)]
    if huge < 0:
        pairs.append((case.some, huge, -math.inf))
    for place, mine, other in pairs:
        answers = []
        for value in (mine, other):
            x = scores.clone()
            x[place] = value
            x.requires_grad_()
            s = case.make(x)
            mu, (g,) = (
                s.marginals(),
                torch.autograd.grad(s.log_partition().sum(), x, create_graph=True),
            )
            (w,) = torch.autograd.grad(g, x, v)
            assert bool((mu >= 0).all()) and bool((mu <= 1 + 1e-5).all())
            answers.append((mu, g, w))
        for what, found, expected in zip(("marginals", "gradient", "product"), *answers):
            assert_close(found, expected, what)
