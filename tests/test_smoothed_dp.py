"""The theory of smoothed dynamic programs (Mensch & Blondel, 2018), as properties of structures."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls
from table import STRUCTURES, randn

import structmax as sx
from structmax.forest.topology import lookup
from structmax.testing.contract import _scores, _with_scores

NAMES = [
    "choice",
    "chain-step",
    "semi-markov",
    "semi-markov-transition",
    "path-parallel",
    "grid-8",
    "binary-tree",
    "projective",
    "hyperpath",
]
SMOOTH = [sx.Shannon(), sx.Shannon(0.3), sx.Gini(), sx.Gini(3.0), sx.Tsallis(1.3), sx.Tsallis(3.0)]
SEEDS = range(3)
names = pytest.mark.parametrize("name", NAMES)
omegas = pytest.mark.parametrize("omega", SMOOTH, ids=str)


def make(name: str, omega: sx.Smoothing, seed: int) -> sx.Structure:
    torch.manual_seed(seed)
    return STRUCTURES[name](omega)


def scaled(s: sx.Structure, factor: float) -> sx.Structure:
    return _with_scores(s, [t * factor for t in _scores(s)])


@names
@omegas
def test_convex(name: str, omega: sx.Smoothing) -> None:
    for seed, scale in itertools.product(SEEDS, (0.3, 3.0)):
        a = scaled(make(name, omega, seed), scale)
        b = scaled(make(name, omega, seed + 100), scale)
        for t in (0.1, 0.5, 0.8):
            between = [t * x + (1 - t) * y for x, y in zip(_scores(a), _scores(b), strict=True)]
            value = _with_scores(a, between).log_partition()
            chord = t * a.log_partition() + (1 - t) * b.log_partition()
            assert bool((value <= chord + 1e-9).all())


@names
@omegas
def test_bounds(name: str, omega: sx.Smoothing) -> None:
    """0 ≤ DP_Ω − DP ≤ m·γ·h(D): m the most nodes in a derivation, D the largest in-degree."""
    for seed, scale in itertools.product(SEEDS, (0.0, 0.3, 3.0)):
        s = scaled(make(name, omega, seed), scale)
        forest = lookup(s._forest_key())
        nodes = torch.from_numpy(forest.derivation_size)[s._goal().long()].double()
        gap = s.log_partition() - make_hard(s).log_partition()
        assert bool((gap >= -1e-9).all())
        assert bool((gap <= nodes * omega.bound(forest.max_degree) + 1e-9).all())


def make_hard(s: sx.Structure) -> sx.Structure:
    return with_smoothing(s, sx.Hard())


def with_smoothing(s: sx.Structure, omega: sx.Smoothing) -> sx.Structure:
    return s._rebuild(**{name: t for name, (t, _) in s._tensors().items()}, smoothing=omega)


@names
@omegas
def test_gradient_lies_in_the_polytope(name: str, omega: sx.Smoothing) -> None:
    """∇A, over the scores of all parts, is a convex combination of structures."""
    s = make(name, omega, 0)
    s = s[0] if s.batch_shape else s
    leaves = [t.requires_grad_() for t in _scores(s)]
    live = _with_scores(s, leaves)

    def gradient(value: torch.Tensor) -> np.ndarray:
        grads = torch.autograd.grad(value, leaves, retain_graph=True, materialize_grads=True)
        return torch.cat([g.flatten() for g in grads]).numpy()

    scores = live.score(s.enumerate_support())
    vertices = np.stack([gradient(score) for score in scores])
    ones = np.ones((1, len(vertices)))
    point = np.append(gradient(live.log_partition()), 1.0)
    weights, distance = nnls(np.concatenate([vertices.T, ones]), point)
    assert distance < 1e-8
    assert (weights >= 0).all() and abs(weights.sum() - 1) < 1e-8


@names
@omegas
def test_against_the_maximum_over_structures(name: str, omega: sx.Smoothing) -> None:
    """DP_Ω = maxΩ over the structures for Shannon, at least that for the others."""
    for seed in SEEDS:
        s = make(name, omega, seed)
        over = omega.max(s.score(s.enumerate_support()).movedim(0, -1))
        value = s.log_partition()
        if isinstance(omega, sx.Shannon):
            torch.testing.assert_close(value, over, atol=1e-9, rtol=1e-9)
        elif isinstance(omega, sx.Gini):
            assert bool((value >= over - 1e-9).all())


# -- the graph matters, except under Shannon -----------------------------------------------------


def flat(n: int) -> sx.Forest:
    draw = sx.ForestBuilder()
    draw.edges(draw.node(), -1, -1, range(n))
    return draw.build()


def grouped(n: int, choices: list[int]) -> sx.Forest:
    """The same n options, two of them (or of their groups) put together at a time."""
    draw = sx.ForestBuilder()
    groups = [draw.node(part) for part in range(n)]
    for choice in choices:
        one = groups.pop(choice % len(groups))
        other = groups.pop(choice // 7 % len(groups))
        both = draw.node()
        draw.edge(both, one)
        draw.edge(both, other)
        groups.append(both)
    return draw.build()


@st.composite
def groupings(draw: st.DrawFn) -> tuple[list[float], list[int]]:
    n = draw(st.integers(3, 6))
    scores = draw(st.lists(st.floats(-1, 1), min_size=n, max_size=n))
    return scores, draw(st.lists(st.integers(0, 99), min_size=n - 1, max_size=n - 1))


@given(groupings())
@settings(max_examples=25, deadline=None)
def test_shannon_is_associative(case: tuple[list[float], list[int]]) -> None:
    scores, choices = case
    theta = torch.tensor(scores, dtype=torch.float64)
    one = sx.Hyperpath(flat(len(scores)), theta)
    other = sx.Hyperpath(grouped(len(scores), choices), theta)
    torch.testing.assert_close(one.log_partition(), other.log_partition())
    torch.testing.assert_close(one.marginals(), other.marginals())
    torch.testing.assert_close(one.entropy(), other.entropy())


@pytest.mark.parametrize("omega", [sx.Gini(), sx.Tsallis(1.3), sx.Tsallis(3.0)], ids=str)
def test_the_others_are_not_associative(omega: sx.Smoothing) -> None:
    theta = torch.tensor([0.1, 0.0, 0.2], dtype=torch.float64)
    one = sx.Hyperpath(flat(3), theta, smoothing=omega)
    other = sx.Hyperpath(grouped(3, [0, 0]), theta, smoothing=omega)
    assert abs(one.log_partition() - other.log_partition()) > 1e-2
    assert bool(((one.marginals() - other.marginals()).abs() > 1e-2).any())
    # so it is with the library's own graphs: transitions of zero draw another one
    torch.manual_seed(0)
    segments, zero = randn(4, 2, 2) / 10, torch.zeros(2, 2, dtype=torch.float64)
    for smoothing, same in ((omega, False), (sx.Shannon(), True), (sx.Hard(), True)):
        without = sx.SemiMarkov(segments, smoothing=smoothing).log_partition()
        with_zero = sx.SemiMarkov(segments, zero, smoothing=smoothing).log_partition()
        assert (abs(without - with_zero).item() < 1e-9) is same


# -- γ → 0 ---------------------------------------------------------------------------------------


@names
@pytest.mark.parametrize("kind", [sx.Shannon, sx.Gini, lambda g: sx.Tsallis(1.3, g)])
def test_less_smoothing_gives_the_hard_solution(name: str, kind) -> None:
    """Values fall towards the maximum, marginals towards the best structure, as γ → 0."""
    s = make(name, sx.Shannon(), 0)
    best = s.topk(2)
    rival = torch.where(best.exists[..., 1], best.scores[..., 1], -math.inf)
    gap = (best.scores[..., 0] - rival).amin().clamp(max=1.0).item()
    previous = None
    for gamma in (1.0, 0.3, gap / 10, gap / 100):
        soft = with_smoothing(s, kind(gamma))
        value = soft.log_partition()
        assert previous is None or bool((value <= previous + 1e-9).all())
        previous = value
    torch.testing.assert_close(value, best.scores[..., 0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(soft.marginals(), s.argmax(), atol=1e-6, rtol=0)
