"""Ops clamp the integers that kernels index by; an impossible one makes its item NaN."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from table import diamond, randn
from torch import Tensor

import structmax as sx
from structmax.fence import clamped, mark
from structmax.forest import ops as forest
from structmax.forest.chain import ops as chain
from structmax.forest.ctc import ops as ctc
from structmax.forest.grid import ops as grid
from structmax.forest.pcfg import ops as pcfg
from structmax.oracles import arborescence, assignment, matrix_tree, subset
from structmax.structures.dynamic import edge_visits

SHANNON = sx.Shannon().code
BAD = (10**6, -5, 2**40, -(2**40))
Scores = tuple[Tensor, ...]
NUMBERS = torch.rand(2, 5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def chain_scores(b: int) -> Scores:
    return randn(b, 4, 3), randn(b, 1, 3, 3), randn(b, 3), randn(b, 3)


def grammar(b: int) -> Scores:
    return randn(b, 4, 4, 3), randn(b, 1), randn(b, 1, 3, 3)


def low_rank(b: int) -> Scores:
    return randn(b, 4, 4, 3), randn(b, 1), randn(b, 3, 2), randn(b, 3, 2), randn(b, 1, 2)


TAGS = torch.tensor([0, 2, 1, 99])
PRIMITIVES: dict[str, tuple[Any, Callable[[int], Scores], str, int]] = {
    "chain": (chain.chain, chain_scores, "", 1),
    "plain_chain": (chain.plain_chain, lambda b: chain_scores(b)[:2], "", 1),
    "grid": (grid.grid, lambda b: (randn(b, 4, 5),), "", 2),
    "series": (grid.series, lambda b: (randn(b, 4, 1), randn(b, 5, 1)), "", 2),
    "ctc": (ctc.ctc, lambda b: (randn(b, 5, 4),), "", 2),
    "subset": (subset.subset, lambda b: (randn(b, 4), randn(b, 4)), "1,2", 1),
    "matrix_tree": (matrix_tree.matrix_tree, lambda b: (randn(b, 4, 4),), "single", 1),
    "pcfg": (pcfg.pcfg, grammar, "", 1),
    "low_rank": (pcfg.low_rank, low_rank, "", 1),
    "chain_loss": (chain.chain_loss, chain_scores, "", 1),
    "forest": (forest.forest, lambda b: (randn(b, diamond().num_parts),), "diamond", 1),
}


def nan_where_wrong(found: Tensor, lead: int = 0, everywhere: bool = True) -> None:
    """The first item is a number, all others are NaN, or −1 or 0 where there are integers."""
    good, *bad = found.unbind(lead)
    assert not bool(good.isnan().any())
    for item in bad:
        if found.is_floating_point():
            assert bool(item.isnan().all() if everywhere else item.isnan().any()), found
        else:
            assert bool(((item == -1) | (item == 0)).all()), found


@pytest.mark.parametrize("backend", ["cpu", "naive"])
@pytest.mark.parametrize("name", PRIMITIVES)
def test_an_impossible_number_makes_its_item_nan_in_every_primitive(name: str, backend: str):
    primitive, scores_of, key, count = PRIMITIVES[name]
    held = diamond()
    key = held.key if key == "diamond" else key
    b = 1 + len(BAD)
    scores = scores_of(b)
    sizes = torch.tensor([3, *BAD])
    constants = [sizes.clone() for _ in range(count)]
    if name == "chain_loss":
        constants.append(TAGS.expand(b, -1))
    if name == "ctc":
        constants.insert(0, torch.tensor([1, 2, 1]).expand(b, -1))
        constants[2][0] = 2
    with sx.backend(backend):
        value = primitive.value(scores, constants, key, SHANNON)
        again, *mu = primitive.value_and_gradient(scores, constants, key, SHANNON)
        w = primitive.hvp_op(list(scores), list(scores), constants, key, list(SHANNON))
        leaves = [s.clone().requires_grad_() for s in scores]
        twice = torch.autograd.grad(
            primitive.value_and_gradient(leaves, constants, key, SHANNON)[1].square().sum(), leaves
        )
        alone = primitive.value([s[:1] for s in scores], [c[:1] for c in constants], key, SHANNON)
    torch.testing.assert_close(value[:1], alone)
    for found in (value, again, *mu, *w, *twice):
        nan_where_wrong(found, everywhere=name != "ctc")  # there, in the cells of its target


@pytest.mark.parametrize("backend", ["cpu", "naive"])
def test_a_tag_that_is_none_makes_the_loss_and_its_gradient_nan(backend: str) -> None:
    scores = chain_scores(4)
    tags = torch.tensor([[0, 2, 1, 99], [0, 99, 1, 0], [0, -(10**9), 1, 0], [2**40, 0, 1, 0]])
    constants = [torch.tensor([3, 4, 3, 2]), tags]
    with sx.backend(backend):
        for found in chain.chain_loss.value_and_gradient(scores, constants, "", SHANNON):
            nan_where_wrong(found, everywhere=backend == "cpu")  # else within the length


@pytest.mark.parametrize("backend", ["cpu", "naive"])
def test_an_impossible_number_makes_its_item_nan_in_every_discrete_query(backend: str) -> None:
    b = 1 + len(BAD)
    sizes, goal = torch.tensor([3, *BAD]), torch.tensor([diamond().num_nodes - 1, *BAD])
    square, held = randn(b, 4, 4), diamond()
    parts = randn(b, held.num_parts)
    key, width = held.key, held.num_parts
    subsets = randn(b, 4), randn(b, 4), sizes
    with sx.backend(backend):
        answers = [
            *chain.best_tags(*chain_scores(b), sizes),
            *forest.best(parts, goal, key, width),
            *forest.kbest(parts, goal, key, 1, width),
            forest.max_marginals(parts, goal, key, width),
            edge_visits(key, randn(b, held.num_edges).exp(), goal),
            *subset.kbest(*subsets, "1,2", 2),
            *pcfg.kbest(*grammar(b), sizes, 2),
            pcfg.max_marginals(*grammar(b), sizes),
            *arborescence.best_tree(square, sizes, True),
            *arborescence.best_trees(square[..., None], sizes, True, 2),
            arborescence.best_rest(square, sizes, True),
            *assignment.argmax(square, sizes, sizes),
            *assignment.kbest(square, sizes, sizes, 2),
        ]
        draws = [
            forest.sample(parts, goal, NUMBERS, key, SHANNON, width),
            subset.sample(*subsets, NUMBERS, "1,2", 1.0),
            pcfg.sample(*grammar(b), sizes, NUMBERS, 1.0),
            pcfg.sample_low_rank(*low_rank(b), sizes, NUMBERS),
            matrix_tree.sample(square, sizes, NUMBERS[..., :3], True, 1.0),
        ]
    for found in answers:
        nan_where_wrong(found)
    for found in draws:
        nan_where_wrong(found, lead=1)


def test_possible_numbers_are_left_alone() -> None:
    for sizes in (
        torch.tensor([1, 4]),
        torch.tensor(2, dtype=torch.int32),
        torch.tensor([]).long(),
    ):
        safe, wrong = clamped([sizes], [(1, 4)])
        assert safe[0] is sizes and wrong is None
    (safe,), wrong = clamped([torch.tensor([[5, 1]], dtype=torch.uint8)], [(2, 1000)])
    assert safe.tolist() == [[5, 2]] and wrong.tolist() == [[False, True]]
    assert mark(torch.zeros(3, 1, 2, 2), wrong, lead=1).isnan().tolist() == [[[[0, 0], [1, 1]]]] * 3


def test_numbers_changed_after_they_were_validated_corrupt_nothing() -> None:
    """By ways that torch does not count, in a process of its own."""
    code = """
import torch, structmax as sx
for write in (lambda t: t.data.add_(10**6), lambda t: t.numpy().fill(-7)):
    for make in (
        lambda L: sx.LinearChain(torch.zeros(2, 4, 3), torch.zeros(3, 3), lengths=L),
        lambda L: sx.LinearChain(
            torch.zeros(2, 4, 3), torch.zeros(3, 3), lengths=L, smoothing=sx.Gini()),
        lambda L: sx.BinaryTree(torch.zeros(2, 4, 4), L),
        lambda L: sx.DependencyTree(torch.zeros(2, 5, 5), L, projective=True),
        lambda L: sx.DependencyTree(torch.zeros(2, 5, 5), L),
        lambda L: sx.SemiMarkov(torch.zeros(2, 4, 2, 2), lengths=L),
        lambda L: sx.Assignment(torch.zeros(2, 4, 4), (L, L)),
        lambda L: sx.KSubset(torch.zeros(2, 4), 2, lengths=L),
        lambda L: sx.Alignment(torch.zeros(2, 4, 4), (L, L)),
        lambda L: sx.Hyperpath(forest, torch.zeros(2, forest.num_parts), goal=L - 3),
    ):
        for query in ("log_partition", "marginals", "argmax", "max_marginals", "topk", "sample"):
            for validate in (True, False):
                L = torch.tensor([3, 4])
                s = make(L) if validate else make(L)._trusted()
                write(L)
                print(type(s).__name__, query, flush=True)
                try:
                    s.topk(2) if query == "topk" else getattr(s, query)()
                except (ValueError, IndexError, RuntimeError) as error:
                    print(type(error).__name__)
"""
    prelude = (
        "import sys; sys.path.insert(0, 'tests')\nfrom table import diamond\nforest = diamond()"
    )
    found = subprocess.run(
        [sys.executable, "-c", prelude + code], capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, (found.stdout[-500:], found.stderr[-2000:])


@pytest.mark.parametrize("backend", ["cpu", "naive"])
@pytest.mark.parametrize("omega", [sx.Shannon(), sx.Gini(), sx.Hard()], ids=str)
def test_an_infinite_score_makes_draws_and_gradient_nan(omega: sx.Smoothing, backend: str) -> None:
    held = diamond()
    parts, goal = randn(2, held.num_parts), torch.full((2,), held.num_nodes - 1)
    parts[1, 8] = torch.inf  # of the goal itself
    key, width = held.key, held.num_parts
    with sx.backend(backend):
        answers = [forest.best(parts, goal, key, width)[1]]
        if backend == "cpu":  # the naive gradient is that of a finite score
            answers.append(forest.forest.value_and_gradient((parts,), (goal,), key, omega.code)[1])
        draws = forest.sample(parts, goal, NUMBERS[:, :2], key, omega.code, width)
    for found in answers:
        nan_where_wrong(found, everywhere=False)  # part 11 belongs to nothing
    nan_where_wrong(draws, lead=1)
