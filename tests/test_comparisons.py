"""Cross-entropy and KL between structures whose sets differ, and what is no comparison at all."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from table import ROWS
from torch import Tensor
from torch.distributions import kl_divergence

import structmax as sx

INF = math.inf


def cells(n: int, m: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, m, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("smoothing", [sx.Shannon(), sx.Shannon(0.5), sx.Gini(5.0)])
@pytest.mark.parametrize("kind", ["dtw", "edit", "monotone"])
def test_a_band_forbids(kind: str, smoothing: sx.Smoothing) -> None:
    """A band is −inf in the scores of the cells beyond it."""
    scores = cells(3, 4)
    free, narrow = (
        sx.Alignment(scores, kind=kind, band=band, smoothing=smoothing) for band in (None, 1)
    )
    far = ~narrow._usable_parts()
    same = sx.Alignment(scores.masked_fill(far, -INF), kind=kind, smoothing=smoothing)
    assert kl_divergence(free, narrow) == INF
    assert torch.allclose(narrow.cross_entropy(free), same.cross_entropy(free))
    assert torch.allclose(kl_divergence(narrow, same), torch.zeros((), dtype=torch.float64))
    if smoothing == sx.Shannon():
        assert sx.losses.crf(narrow, free) == INF
        assert torch.isfinite(sx.losses.crf(free, narrow))


SQUARE = -torch.tensor([[1.0, 2.0, 3.0], [2.0, 1.0, 2.0], [3.0, 2.0, 1.0]])
FAMILIES: dict[str, Callable[[], sx.Structure]] = {
    "single": lambda: sx.DependencyTree(SQUARE),
    "multi": lambda: sx.DependencyTree(SQUARE, root="multi"),
    "projective": lambda: sx.DependencyTree(SQUARE, projective=True),
    "constituents": lambda: sx.BinaryTree(SQUARE),
    "spanning": lambda: sx.SpanningTree(SQUARE),
    "alignment": lambda: sx.Alignment(SQUARE),
    "assignment": lambda: sx.Assignment(SQUARE),
    "grid": lambda: sx.GridPath(SQUARE),
    "free": lambda: sx.GridPath(SQUARE, moves="all"),
    "chain": lambda: sx.LinearChain(SQUARE, torch.zeros(3, 3)),
}


@pytest.mark.parametrize("p", [name for name in FAMILIES if name != "free"])
@pytest.mark.parametrize("q", FAMILIES)
def test_only_distributions_over_one_set_are_compared(p: str, q: str) -> None:
    if p == q:
        assert kl_divergence(FAMILIES[p](), FAMILIES[q]()).abs() < 1e-5
    else:
        with pytest.raises(ValueError):
            kl_divergence(FAMILIES[p](), FAMILIES[q]())


def test_labelled_trees_of_two_kinds() -> None:
    scores = torch.zeros(3, 3, 2)
    with pytest.raises(ValueError, match="over the same trees"):
        kl_divergence(sx.DependencyTree(scores), sx.BinaryTree(scores))


@pytest.mark.parametrize("name", ROWS)
def test_nothing_allowed_is_infinitely_far(name: str) -> None:
    """Cross-entropy and KL are +inf, without a gradient, where q forbids all parts."""
    p = ROWS[name]()
    if not p.supports("cross_entropy"):
        pytest.skip("no cross-entropy")
    theta = p._parts()[0].detach().to(p.dtype)
    nothing = torch.full_like(theta, -math.inf).requires_grad_()
    q = p._replace_primary(nothing)
    if not bool((q.log_partition() == -math.inf).all()):
        pytest.skip("a structure may have no part")
    far = p.cross_entropy(q)
    assert bool((far == math.inf).all()) and bool((kl_divergence(p, q) == math.inf).all())
    if far.requires_grad:
        (slope,) = torch.autograd.grad(far.sum(), nothing, allow_unused=True)
        assert slope is None or not slope.any()
    with pytest.raises(ValueError, match="allows no structure"):
        q.cross_entropy(p)
    assert bool(q._trusted().cross_entropy(p).isnan().all())


def test_goals_of_one_forest() -> None:
    draw = sx.ForestBuilder()
    a, b = draw.node(), draw.node()
    draw.edge(b, a, part=0)
    draw.edge(b, a, part=1)
    forest = draw.build()
    first = sx.Hyperpath(forest, torch.zeros(2), goal=torch.tensor(0))
    last = sx.Hyperpath(forest, torch.zeros(2))
    for p, q in ((first, last), (last, first)):
        with pytest.raises(ValueError, match="the same goals"):
            kl_divergence(p, q)
    assert kl_divergence(last, last) == 0


@pytest.mark.parametrize("size", [0.0, 16.0, 40.0])
def test_an_edge_that_others_can_replace(size: float) -> None:
    """However likely an edge is: where a tree does without it, trees with it are not all."""
    scores = torch.zeros(4, 4, dtype=torch.float64)
    scores[0, 1] = size
    scores[3] = scores[:, 3] = -INF
    scores[3, 2] = scores[2, 3] = 0.0  # a bridge
    tree = sx.SpanningTree(scores)
    include = torch.zeros(4, 4, dtype=torch.bool)
    include[0, 1] = True
    assert kl_divergence(tree, tree.condition(include=include)) == INF
    include[0, 1], include[2, 3] = False, True
    assert kl_divergence(tree, tree.condition(include=include)).abs() < 1e-9
    exclude = torch.zeros(4, 4, dtype=torch.bool)
    exclude[0, 2] = exclude[2, 0] = True
    path, include[0, 1] = tree.condition(exclude=exclude), True
    assert kl_divergence(path, path.condition(include=include)).abs() < 1e-9


class OwnTree(sx.BinaryTree):
    pass


def test_a_subclass_is_over_the_same_trees() -> None:
    scores = torch.randn(4, 4)
    assert kl_divergence(sx.BinaryTree(scores), OwnTree(scores)).abs() < 1e-6


@pytest.mark.parametrize("name", ["constituents", "projective", "grid"])
def test_no_numbers_are_looked_at_without_lengths(name: str) -> None:
    """Neither on a device whose tensors hold none."""
    cls = type(FAMILIES[name]())
    p, q = (cls(torch.zeros(3, 4, 4, device="meta"), validate_args=False) for _ in range(2))
    assert kl_divergence(p, q).shape == (3,)
