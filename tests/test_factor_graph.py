"""Factor graphs against enumeration, a quadratic solver, and the structures they are made of."""

from __future__ import annotations

import itertools
import math
import random
import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import linprog, minimize
from table import ROWS
from torch.autograd import forward_ad

import structmax as sx
from structmax.sparse.consensus import Consensus

f64 = torch.float64


@pytest.fixture(autouse=True)
def same_scores() -> None:
    torch.manual_seed(0)  # derivatives are checked away from kinks


def randn(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, dtype=f64, requires_grad=grad)


def assignments(n: int) -> torch.Tensor:
    return torch.tensor(list(itertools.product([0, 1], repeat=n)), dtype=f64)


def negated(v: torch.Tensor) -> torch.Tensor:
    return torch.stack([~v[0], v[1], ~v[2]])


def count(z: torch.Tensor) -> torch.Tensor:
    return z.sum(-1)


LOGIC = {
    "xor": (lambda g, v: g.xor(v), lambda z: count(z) == 1),
    "at_most_one": (lambda g, v: g.at_most_one(v), lambda z: count(z) <= 1),
    "or_": (lambda g, v: g.or_(v), lambda z: count(z) >= 1),
    "budget": (lambda g, v: g.budget(v, 2), lambda z: count(z) <= 2),
    "between": (
        lambda g, v: g.budget(v, 3, least=2),
        lambda z: (count(z) >= 2) & (count(z) <= 3),
    ),
    "knapsack": (
        lambda g, v: g.knapsack(v, [3, 1, 2, 2], 4),
        lambda z: count(z * torch.tensor([3.0, 1, 2, 2])) <= 4,
    ),
    "implication": (
        lambda g, v: g.implication(v[0], v[1], v[2]),
        lambda z: z[..., 0] * z[..., 1] <= z[..., 2],
    ),
    "negation": (
        lambda g, v: g.xor(negated(v)),
        lambda z: 2 - z[..., 0] + z[..., 1] - z[..., 2] == 1,
    ),
}


def graph_of(name: str, scores: torch.Tensor) -> tuple[sx.FactorGraph, torch.Tensor]:
    graph = sx.FactorGraph()
    ids = graph.variables(scores)
    LOGIC[name][0](graph, ids)
    return graph, ids


def nearest_in_hull(vertices: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
    """The projection onto a convex hull, by a general solver over its weights."""
    z, x = vertices.numpy(), point.detach().numpy()
    start = np.full(len(z), 1 / len(z))
    found = minimize(
        lambda p: 0.5 * ((p @ z - x) ** 2).sum(),
        start,
        jac=lambda p: z @ (p @ z - x),
        bounds=[(0, 1)] * len(z),
        constraints={"type": "eq", "fun": lambda p: p.sum() - 1, "jac": lambda p: np.ones(len(z))},
        method="SLSQP",
        options={"maxiter": 500, "ftol": 1e-14},
    )
    return torch.from_numpy(found.x @ z)


@pytest.mark.parametrize("name", LOGIC)
def test_logic_against_enumeration(name: str) -> None:
    theta = randn(4) * 1.5
    graph, ids = graph_of(name, theta)
    z = assignments(4)
    z = z[LOGIC[name][1](z)]
    gibbs = (z @ theta).softmax(0) @ z
    torch.testing.assert_close(graph.marginals()[ids], gibbs, atol=1e-10, rtol=0)
    torch.testing.assert_close(graph.sparsemap()[ids], nearest_in_hull(z, theta), atol=1e-5, rtol=0)
    best = graph.argmax()
    assert best.exact and best.feasible
    assert math.isclose(float(best[ids] @ theta), float((z @ theta).max()), abs_tol=1e-9)


def random_factor(graph: sx.FactorGraph, ids: torch.Tensor, rng: random.Random):  # type: ignore[no-untyped-def]
    """Adds one, some of its ids negated. Returns its log-weight of all assignments of them."""
    n = len(ids)
    turned = torch.tensor([rng.random() < 0.3 for _ in range(n)])
    turned &= graph._scores[0][ids] > -math.inf  # what is switched off cannot be negated
    parts = torch.where(turned, ~ids, ids)
    own = torch.tensor([rng.choice([0.0, rng.gauss(0, 1), -math.inf]) for _ in range(n)], dtype=f64)
    kind = rng.choice(["count", "subset", "knapsack", "chain", "pairwise", "choice"])
    score = lambda z: z.new_zeros(len(z))  # noqa: E731
    if kind == "chain" and n in (2, 4, 6):
        step = randn(2, 2).masked_fill(torch.rand(2, 2) < 0.2, -math.inf)
        graph.factor(sx.LinearChain(torch.zeros(n // 2, 2, dtype=f64), step), parts.view(-1, 2))

        def fits(z: torch.Tensor) -> torch.Tensor:
            return (z.view(-1, n // 2, 2).sum(-1) == 1).all(-1)

        def score(z: torch.Tensor) -> torch.Tensor:
            tag = z.view(-1, n // 2, 2).argmax(-1)
            return step[tag[:, :-1], tag[:, 1:]].sum(-1)
    elif kind == "pairwise" and n > 1:
        size = rng.choice([rng.gauss(0, 2), rng.gauss(0, 100), -math.inf])
        both = torch.tensor(size, dtype=f64)
        graph.pairwise(parts[0], parts[1], both)
        fits = lambda z: count(z) >= 0  # noqa: E731
        score = lambda z: torch.where(z[:, 0] * z[:, 1] > 0, both, 0.0)  # noqa: E731
    elif kind == "choice":
        graph.factor(sx.Choice(own), parts)
        fits, score = lambda z: count(z) == 1, lambda z: torch.where(z > 0, own, 0.0).sum(-1)
    elif kind == "knapsack":
        weights, capacity = [rng.randint(0, 3) for _ in range(n)], rng.randint(0, 4)
        graph.knapsack(parts, weights, capacity)
        fits = lambda z: count(z * torch.tensor(weights)) <= capacity  # noqa: E731
    else:
        least = rng.choice([0, 1, rng.randint(0, n), n])
        most = rng.choice([least, rng.randint(least, n)])
        if kind == "subset":
            graph.factor(sx.KSubset(torch.zeros(n, dtype=f64), (least, most)), parts)
        else:
            graph.budget(parts, most, least)
        fits = lambda z: (count(z) >= least) & (count(z) <= most)  # noqa: E731

    def log_weight(z: torch.Tensor) -> torch.Tensor:
        z = (z[:, ids] - turned.to(f64)).abs()
        return torch.where(fits(z), score(z), -math.inf)

    return log_weight


def random_graph(seed: int, loops: bool):  # type: ignore[no-untyped-def]
    """A graph of up to nine variables in a tree, or with loops: all assignments, and the score of
    each, −inf where it is impossible."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    n = rng.randint(2, 9)
    theta = rng.choice([1.0, 10.0, 300.0]) * randn(n)
    theta[torch.rand(n) < 0.05] = rng.choice([-math.inf, -1e4, 1e4])
    graph, joined, parts = sx.FactorGraph(), [], list(range(n))
    ids, z = graph.variables(theta), assignments(n)
    rng.shuffle(parts)
    total = torch.where(z > 0, theta, 0.0).sum(-1)
    for _ in range(rng.randint(2, 5 if loops else 7)):
        if loops:
            some = rng.sample(range(n), rng.randint(1, min(n, 4)))
        else:  # one variable of those before at most
            fresh = [parts.pop() for _ in range(min(rng.randint(0, 4), len(parts)))]
            some = fresh + ([rng.choice(joined)] if joined else [])
            joined += fresh
        if some:
            total = total + random_factor(graph, ids[torch.tensor(some)], rng)(z)
    return graph, z, total


@pytest.mark.parametrize(
    "seeds", [range(500), pytest.param(range(500, 10_000), marks=pytest.mark.slow)], ids=str
)
def test_belief_propagation_on_trees_that_force_and_forbid(seeds: range) -> None:
    """Factors that agree on what is forced, that contradict each other, and all between."""
    impossible = 0
    for seed in seeds:
        graph, z, total = random_graph(seed, loops=False)
        if total.max() == -math.inf:
            impossible += 1
            with pytest.raises(ValueError, match=r"contradict|allows no structure|needs"):
                graph.marginals()
            continue
        wanted = total.softmax(0) @ z
        found = graph.marginals().values
        assert (found - wanted).abs().max() < 1e-8, (seed, found, wanted)
    assert len(seeds) / 20 < impossible < len(seeds) / 2


def test_what_two_factors_force_is_forced() -> None:
    graph = sx.FactorGraph()
    ids = graph.variables(torch.zeros(3))
    graph.budget(ids[:2], 2, least=2)
    graph.budget(ids[1:], 2, least=2)
    assert graph.marginals()[ids].tolist() == [1, 1, 1]
    graph.budget(ids[1:2], 0)
    with pytest.raises(ValueError, match=r"marginals: the graph allows no .* variable [012] for"):
        graph.marginals()


def chain_graph(x: torch.Tensor, transition: torch.Tensor) -> torch.Tensor:
    graph = sx.FactorGraph()
    tags = graph.variables(x)
    graph.factor(sx.LinearChain(torch.zeros_like(x), transition), tags)
    graph.budget(tags[:, 1], 1)
    return graph.sparsemap(tol=1e-9)[tags]


def ragged_graph(x: torch.Tensor, transition: torch.Tensor) -> torch.Tensor:
    """Chains of 4, 2 and 1 words; what is beyond the length holds NaN in the factor."""
    graph = sx.FactorGraph()
    tags = graph.variables(x, batch_dims=1)
    lengths = torch.tensor([4, 2, 1])
    own = torch.zeros_like(x).detach()
    own[1, 2:] = math.nan
    graph.factor(sx.LinearChain(own, transition, lengths=lengths), tags)
    graph.budget(tags[:, 1], 1)
    return graph.sparsemap(tol=1e-9)[tags]


def tree_graph(x: torch.Tensor) -> torch.Tensor:
    graph = sx.FactorGraph()
    arcs = graph.variables(x)
    graph.factor(sx.DependencyTree(torch.zeros_like(x)), arcs)
    graph.budget(arcs[1:, 1:], 1)
    return graph.sparsemap(tol=1e-9)[arcs]


def matching_graph(x: torch.Tensor) -> torch.Tensor:
    graph = sx.FactorGraph()
    cells = graph.variables(x, batch_dims=1)
    graph.xor(cells)
    graph.at_most_one(cells.T)
    return graph.sparsemap(tol=1e-9)[cells]


def pairs_graph(x: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    """A loop of pairs with one variable that is negated, one in no factor and one switched off."""
    off = torch.full_like(x[..., :1], -math.inf)
    graph = sx.FactorGraph()
    ids = graph.variables(torch.cat([x, off], -1), batch_dims=1)
    graph.pairwise(ids[:3], torch.stack([ids[1], ids[2], ~ids[0]]), both)
    graph.at_most_one(ids[torch.tensor([0, 1, 4])])
    return graph.sparsemap(tol=1e-9).values


GRAPHS = {
    "chain": (chain_graph, (4, 2), (2, 2)),
    "ragged": (ragged_graph, (3, 4, 2), (2, 2)),
    "tree": (tree_graph, (5, 5)),
    "matching": (matching_graph, (2, 3, 4)),
    "pairs": (pairs_graph, (2, 4), (2, 3)),
}


@pytest.mark.parametrize("name", [*LOGIC, *GRAPHS])
def test_derivatives(name: str) -> None:
    """Of both orders, and of a loss of which the second derivative is not zero."""
    shapes = GRAPHS[name][1:] if name in GRAPHS else [(4,)]
    leaves = [(0.3 * randn(*shape)).requires_grad_() for shape in shapes]

    def solve(*x: torch.Tensor) -> torch.Tensor:
        if name in GRAPHS:
            return GRAPHS[name][0](*x)
        graph, ids = graph_of(name, x[0])
        return graph.sparsemap(tol=1e-9)[ids]

    weights = randn(*solve(*leaves).shape)

    def loss(*x: torch.Tensor) -> torch.Tensor:
        return (solve(*x).square() * weights).sum()

    fast = {"eps": 1e-4, "atol": 1e-4, "fast_mode": True}
    assert torch.autograd.gradcheck(solve, leaves, **fast)
    assert torch.autograd.gradgradcheck(loss, leaves, **fast)


@pytest.mark.parametrize("name", LOGIC)
def test_derivatives_of_belief_propagation(name: str) -> None:
    theta = randn(4, grad=True)
    assert torch.autograd.gradcheck(lambda x: graph_of(name, x)[0].marginals().values, theta)
    assert torch.autograd.gradgradcheck(lambda x: graph_of(name, x)[0].marginals().values, theta)


def test_transforms() -> None:
    """Forward and reverse derivatives, by torch.func as by autograd."""
    x, transition = 0.3 * randn(4, 2), 0.3 * randn(2, 2)
    to = randn(4, 2), randn(2, 2)
    weights = randn(4, 2)

    def loss(x: torch.Tensor, transition: torch.Tensor) -> torch.Tensor:
        return (chain_graph(x, transition).square() * weights).sum()

    leaves = x.requires_grad_(), transition.requires_grad_()
    slopes = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    assert max(s.abs().max() for s in slopes) > 1e-3
    plain = x.detach(), transition.detach()
    torch.testing.assert_close(torch.func.grad(loss, (0, 1))(*plain), slopes)
    along = sum((s * d).sum() for s, d in zip(slopes, to, strict=True))
    torch.testing.assert_close(torch.func.jvp(loss, plain, to)[1], along)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, d) for t, d in zip(plain, to, strict=True)]
        torch.testing.assert_close(forward_ad.unpack_dual(loss(*duals)).tangent, along)
    twice = torch.stack(
        [torch.autograd.grad(s, x, retain_graph=True)[0] for s in slopes[0].flatten()]
    )
    found = torch.func.jacrev(torch.func.grad(loss))(*plain)
    torch.testing.assert_close(found.reshape(8, 4, 2), twice)


def test_one_structure_is_its_sparsemap() -> None:
    unary, transition = randn(4, 3, grad=True), randn(3, 3, grad=True)
    weights = randn(4, 3)
    graph = sx.FactorGraph()
    tags = graph.variables(unary)
    graph.factor(sx.LinearChain(torch.zeros(4, 3, dtype=f64), transition), tags)
    chain = sx.LinearChain(unary, transition)
    ours, theirs = graph.sparsemap(tol=1e-10)[tags], chain.sparsemap().marginals
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    got = torch.autograd.grad((ours * weights).sum(), [unary, transition])
    expected = torch.autograd.grad((theirs * weights).sum(), [unary, transition])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(graph.marginals()[tags], chain.marginals())
    torch.testing.assert_close(graph.argmax()[tags], chain.argmax())


ALONE = [
    *("choice", "chain-step", "chain-single", "binary-tree-labelled", "projective-siblings"),
    *("semi-markov-transition", "pcfg", "pcfg-low-rank", "path", "grid-4", "edit", "ctc"),
    *("subset-padded", "assignment-wide", "nonprojective", "spanning-tree"),
]


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_one_structure_of_every_kind(name: str, scale: float) -> None:
    structure = ROWS.get(f"{name}/shannon", ROWS.get(f"{name}/shannon-0.5"))()
    tensors = {k: t for k, (t, _) in structure._tensors().items()}
    structure = structure._rebuild(**tensors, smoothing=sx.Shannon())
    x = scale * randn(*structure.batch_shape, *structure.event_shape)
    graph = sx.FactorGraph()
    ids = graph.variables(x.requires_grad_(), batch_dims=len(structure.batch_shape))
    graph.factor(structure, ids)
    whole = structure.perturb(x)
    best = graph.argmax()
    assert best.exact.all() and best.feasible.all()
    torch.testing.assert_close(whole.score(best[ids]), whole.score(whole.argmax()))
    torch.testing.assert_close(graph.marginals()[ids], whole.marginals(), atol=1e-9, rtol=0)
    found, wanted = graph.sparsemap(tol=1e-9)[ids], whole.sparsemap().marginals
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
    weights = randn(*x.shape)
    slopes = [torch.autograd.grad((mu * weights).sum(), x)[0] for mu in (found, wanted)]
    torch.testing.assert_close(slopes[0], slopes[1], atol=1e-7, rtol=0)


def test_scores_of_a_factor_add_to_those_of_its_variables() -> None:
    own, more, transition = randn(4, 3), randn(4, 3), randn(3, 3)
    own[1, 2] = -math.inf  # what a factor forbids
    graph = sx.FactorGraph()
    tags = graph.variables(more)
    graph.factor(sx.LinearChain(own, transition), tags)
    chain = sx.LinearChain(own + more, transition)
    mu = graph.sparsemap(tol=1e-10)[tags]
    torch.testing.assert_close(mu, chain.sparsemap().marginals, atol=1e-6, rtol=0)
    torch.testing.assert_close(graph.marginals()[tags], chain.marginals())
    torch.testing.assert_close(graph.argmax()[tags], chain.argmax())


def test_scores_of_a_factor_are_those_of_the_negation() -> None:
    theta, own = randn(3), randn(3)
    graph = sx.FactorGraph()
    ids = graph.variables(theta)
    graph.factor(sx.Choice(own), negated(ids))
    other, _ = graph_of("negation", theta + own * torch.tensor([-1.0, 1.0, -1.0]))
    torch.testing.assert_close(graph.marginals().values, other.marginals().values)
    found, wanted = graph.sparsemap(tol=1e-10), other.sparsemap(tol=1e-10)
    torch.testing.assert_close(found.values, wanted.values, atol=1e-6, rtol=0)


def test_matching_is_assignment() -> None:
    scores = randn(2, 3, 4, grad=True)
    graph = sx.FactorGraph()
    cells = graph.variables(scores, batch_dims=1)
    graph.xor(cells)
    graph.at_most_one(cells.T)
    matching = sx.Assignment(scores)
    ours, theirs = graph.sparsemap(tol=1e-10)[cells], matching.sparsemap().marginals
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    weights = randn(2, 3, 4)
    got = torch.autograd.grad((ours * weights).sum(), scores)
    expected = torch.autograd.grad((theirs * weights).sum(), scores)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(graph.argmax()[cells], matching.argmax())


def local_polytope(
    graph_parts: list[tuple[torch.Tensor, torch.Tensor]], theta: np.ndarray
) -> float:
    """The best score over what each factor allows, by linear programming over its vertices."""
    n = len(theta)
    sizes = [len(z) for z, _ in graph_parts]
    columns = n + sum(sizes)
    rows, right, start = [], [], n
    for (z, ids), size in zip(graph_parts, sizes, strict=True):
        total = np.zeros(columns)
        total[start : start + size] = 1
        rows.append(total)
        right.append(1.0)
        for part, i in enumerate(ids.tolist()):
            row = np.zeros(columns)
            row[i], row[start : start + size] = 1, -z[:, part].numpy()
            rows.append(row)
            right.append(0.0)
        start += size
    cost = np.concatenate([-theta, np.zeros(sum(sizes))])
    bounds = [(0, 1)] * n + [(0, None)] * sum(sizes)
    return -linprog(cost, A_eq=np.array(rows), b_eq=np.array(right), bounds=bounds).fun


def test_sequence_with_budget() -> None:
    for _ in range(3):
        unary, transition = randn(4, 2), randn(2, 2)
        graph = sx.FactorGraph()
        tags = graph.variables(unary)
        graph.factor(sx.LinearChain(torch.zeros(4, 2, dtype=f64), transition), tags)
        graph.budget(tags[:, 1], 2)
        chain = sx.LinearChain(unary, transition)
        every = chain.enumerate_support()
        every = every[every[..., 1].sum(-1) <= 2]
        best = graph.argmax()
        assert best.feasible and best[tags][:, 1].sum() <= 2
        if best.exact:
            assert torch.isclose(chain.score(best[tags]), chain.score(every).max())
        expected = chain_with_budget(chain, 2)
        torch.testing.assert_close(graph.sparsemap()[tags], expected, atol=1e-5, rtol=0)


def chain_with_budget(chain: sx.LinearChain, most: int) -> torch.Tensor:
    """argmax of ⟨c, p⟩ − ½‖Mp‖² such that tag 1 is used at most so often on average."""
    vertices = chain.enumerate_support()
    z, c = vertices.flatten(1).numpy(), chain.score(vertices).numpy()
    used = vertices[..., 1].sum(-1).numpy()
    found = minimize(
        lambda p: 0.5 * ((p @ z) ** 2).sum() - c @ p,
        np.full(len(z), 1 / len(z)),
        jac=lambda p: z @ (p @ z) - c,
        bounds=[(0, 1)] * len(z),
        constraints=[
            {"type": "eq", "fun": lambda p: p.sum() - 1},
            {"type": "ineq", "fun": lambda p: most - p @ used},
        ],
        method="SLSQP",
        options={"maxiter": 500, "ftol": 1e-14},
    )
    return torch.from_numpy(found.x @ z).reshape(vertices.shape[1:])


def test_tree_with_valency() -> None:
    scores = randn(5, 5)
    graph = sx.FactorGraph()
    arcs = graph.variables(torch.where(torch.eye(5, dtype=torch.bool), 0.0, scores))
    graph.factor(sx.DependencyTree(torch.zeros(5, 5, dtype=f64)), arcs)
    graph.budget(arcs[1:, 1:], 1)  # no word has more than one modifier
    tree = sx.DependencyTree(scores)
    every = tree.enumerate_support()
    allowed = every[(every[:, 1:, 1:].sum(-1) <= 1).all(-1)]
    best = graph.argmax()
    assert best.feasible
    if best.exact:
        assert torch.isclose(tree.score(best[arcs]), tree.score(allowed).max())
    mu = graph.sparsemap()[arcs]
    assert (mu[1:, 1:].sum(-1) <= 1 + 1e-6).all()
    torch.testing.assert_close(mu[:, 1:].sum(0), torch.ones(4, dtype=f64), atol=1e-5, rtol=0)


def test_lp_map_is_the_linear_program() -> None:
    # three pairs that want to differ, around a loop: the relaxation is not tight
    theta = np.array([0.1, 0.2, 0.0])
    graph = sx.FactorGraph()
    ids = graph.variables(torch.from_numpy(theta))
    pairs = torch.tensor([[0, 1], [1, 2], [0, 2]])
    for a, b in pairs:
        graph.xor(torch.stack([ids[a], ids[b]]))
    z = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    expected = local_polytope([(z, pair) for pair in pairs], theta)
    assert abs(float(graph.lp_map().values @ torch.from_numpy(theta)) - expected) < 1e-4
    best = graph.argmax()
    assert not best.exact and not best.feasible  # an odd cycle has no such assignment


def test_exact_is_a_certificate() -> None:
    """It holds for one of several best assignments, and does not wait for the last digit."""
    graph, ids = graph_of("xor", torch.tensor([1.0, 1.0, 0.2, 0.0], dtype=f64))
    best = graph.argmax()
    assert best.exact and best[ids].sum() == 1 and best[ids][:2].sum() == 1
    # a loop of pairs: which assignments are said to be the best are the best
    theta, both = randn(20, 4), 2 * randn(20, 4)
    graph = sx.FactorGraph()
    ids = graph.variables(theta, batch_dims=1)
    graph.pairwise(ids, ids.roll(-1), both)
    graph.budget(ids, 3)
    z = assignments(4)
    z = z[z.sum(-1) <= 3]
    top = (theta @ z.T + both @ (z * z.roll(-1, -1)).T).amax(-1)
    best = graph.argmax()
    found = best[ids]
    score = (theta * found + both * found * found.roll(-1, -1)).sum(-1)
    assert best.feasible.all() and int(best.exact.sum()) >= 10
    torch.testing.assert_close(score[best.exact], top[best.exact])


def test_pairs_do_not_forbid() -> None:
    graph = sx.FactorGraph()
    ids = graph.variables(torch.tensor([5.0, 5.0]))
    graph.pairwise(ids[0], ids[1], torch.tensor(-3.0))
    best = graph.argmax()
    assert best[ids].tolist() == [1, 1] and best.feasible and best.exact


def test_items_of_any_size() -> None:
    """Scores of an item do not hide those of another, nor are they too small or too large."""
    theta = randn(5, 3, 3) * torch.tensor([1e-9, 1e-3, 1.0, 1e3, 1e9], dtype=f64)[:, None, None]
    graph = sx.FactorGraph()
    cells = graph.variables(theta, batch_dims=1)
    graph.xor(cells)
    graph.xor(cells.T)
    best = graph.argmax()
    assert best.exact.all()
    torch.testing.assert_close(best[cells], sx.Assignment(theta).argmax())
    found = graph.sparsemap()
    assert found.residual.max() <= 1e-7 and found.iterations < 1000
    torch.testing.assert_close(
        found[cells], sx.Assignment(theta).sparsemap().marginals, atol=1e-6, rtol=0
    )


def test_empty() -> None:
    for shape, dims in (((3,), 0), ((0, 3), 1)):
        graph = sx.FactorGraph()
        ids = graph.variables(torch.ones(shape, requires_grad=True), batch_dims=dims)
        graph.at_most_one(ids[:0, None].expand(0, 2))  # no factors at all
        if dims:
            graph.at_most_one(ids)
            graph.pairwise(ids[0], ids[1], torch.zeros(()))
        for query in (graph.sparsemap, graph.lp_map, graph.argmax, graph.marginals):
            assert query()[ids].shape == shape


def test_rounding_decides_what_is_nearest_to_a_decision(monkeypatch) -> None:
    answers = [[0.45, 0.8, 0.3, 1.0], [0.1, 1.0, 0.3, 1.0], [0.0, 1.0, 0.0, 1.0]]
    asked = []

    def solved(problem, max_iter, tol):  # type: ignore[no-untyped-def]
        on, off = problem.held or (torch.zeros(4, dtype=torch.bool),) * 2
        asked.append((on.long() - off.long()).flatten().tolist())
        values = torch.tensor(answers[len(asked) - 1], dtype=f64).expand(problem.theta.shape)
        residual = torch.zeros(problem.theta.shape[:-1])
        return sx.sparse.factor_graph.GraphResult(values, residual, 1), problem.theta[:0]

    graph = sx.FactorGraph()
    graph.variables(torch.zeros(4))
    monkeypatch.setattr(graph, "_lp_map", solved)
    best = graph.argmax()
    assert asked == [[0, 0, 0, 0], [0, 1, 0, 1], [-1, 1, 0, 1]]
    assert best.values.tolist() == answers[-1] and best.exact and best.feasible


@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 1000), marks=pytest.mark.slow)], ids=str
)
def test_argmax_is_feasible_where_something_is(seeds: range) -> None:
    """In graphs with loops; else it warns, and says which items have been shown to have none."""
    impossible = 0
    for seed in seeds:
        graph, z, total = random_graph(seed, loops=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                best = graph.argmax(max_iter=300)
            except ValueError:  # a single factor allows nothing of what is not switched off
                assert total.max() == -math.inf, seed
                continue
        (row,) = (z == best.values).all(-1).nonzero().flatten()
        assert best.feasible == (total[row] > -math.inf) == (len(caught) == 0), seed
        assert best.feasible == (total.max() > -math.inf), seed
        if best.exact:
            torch.testing.assert_close(total[row], total.max(), atol=1e-4, rtol=1e-4)
        if not best.feasible:
            impossible += 1
            assert "there is none" in str(caught[0].message), seed
    assert len(seeds) / 50 < impossible < len(seeds) / 2


def test_argmax_does_not_solve_what_has_failed_again(monkeypatch) -> None:
    """No two neighbours in an odd circle are equal: every relaxation is undecided throughout."""
    calls, solve = [], Consensus.solve
    monkeypatch.setattr(Consensus, "solve", lambda *args: calls.append(1) or solve(*args))
    graph = sx.FactorGraph()
    ids = graph.variables(torch.zeros(2, 15, dtype=f64), batch_dims=1)
    graph.xor(torch.stack([ids, ids.roll(1)], -1))
    with pytest.warns(RuntimeWarning, match="item 0 that every factor allows, there is none"):
        best = graph.argmax(max_iter=300)
    assert len(calls) <= 3 and not best.feasible.any()


def test_argmax_turns_back_from_a_decision() -> None:
    """Equal pairs in a circle may all be on or off; the last factor forbids the cheaper way."""
    graph = sx.FactorGraph()
    ids = graph.variables(torch.tensor([0.5, 0.4, 0.5, 0.4, -3.0], dtype=f64))
    graph.implication(ids[:4], ids[:4].roll(1))
    graph.budget(ids[:3], 2)
    graph.or_(ids[[0, 4]])
    best = graph.argmax()
    assert best.values.tolist() == [0, 0, 0, 0, 1] and best.feasible


def test_argmax_of_some_items_that_are_impossible() -> None:
    graph = sx.FactorGraph()
    ids = graph.variables(torch.tensor([[1.0, 2.0, -math.inf], [1.0, 2.0, 3.0]]), batch_dims=1)
    graph.budget(ids[1:], 2, least=1)
    graph.factor(sx.KSubset(torch.zeros(3), (3, 3)).expand((2,)), ids)
    with pytest.raises(ValueError, match="item 0 allows no structure"):
        graph.argmax()


@pytest.mark.parametrize("score", [-1e6, -1e3, -50.0, 50.0, 1e3, 1e6])
def test_belief_propagation_of_large_scores(score: float) -> None:
    """Messages do not depend on the certainty of their receiver, nor saturate."""
    theta = torch.tensor([[score, 0.3, -0.2, 0.9 * score]], dtype=f64, requires_grad=True)
    graph = sx.FactorGraph()
    ids = graph.variables(theta, batch_dims=1)
    graph.pairwise(ids[0], ids[1:3], torch.tensor([0.0, 0.5], dtype=f64))
    graph.at_most_one(ids[torch.tensor([0, 3])])
    z = assignments(4)
    z = z[z[:, 0] + z[:, 3] <= 1]
    exact = (z @ theta[0] + 0.5 * z[:, 0] * z[:, 2]).softmax(0) @ z
    found = graph.marginals()
    torch.testing.assert_close(found[ids][0], exact, atol=1e-10, rtol=0)
    weights = randn(4)
    slopes = [torch.autograd.grad((mu * weights).sum(), theta)[0] for mu in (found[ids][0], exact)]
    torch.testing.assert_close(slopes[0], slopes[1], atol=1e-9, rtol=0)


def test_belief_propagation_on_a_loop_is_close() -> None:
    theta = torch.tensor([0.2, -0.1, 0.3], dtype=f64)
    w = torch.tensor([1.0, 1.0, -1.0], dtype=f64)
    graph = sx.FactorGraph()
    ids = graph.variables(theta)
    graph.pairwise(ids, ids.roll(-1), w)
    z = assignments(3)
    exact = (z @ theta + (z * z.roll(-1, -1)) @ w).softmax(0) @ z
    found = graph.marginals(damping=0.3)
    assert found.residual < 1e-8
    assert 1e-5 < (found[ids] - exact).abs().max() < 0.05  # an approximation, and a fair one


def test_batch_is_item_by_item() -> None:
    scores, w = randn(3, 4), randn(3)

    def solve(s: torch.Tensor, w: torch.Tensor, dims: int) -> list[torch.Tensor]:
        graph = sx.FactorGraph()
        ids = graph.variables(s, batch_dims=dims)
        graph.pairwise(ids[0], ids[1], w)
        graph.or_(ids[1:])
        return [graph.sparsemap().values, graph.marginals().values, graph.argmax().values]

    together = solve(scores, w, 1)
    alone = [solve(scores[i], w[i], 0) for i in range(3)]
    for whole, *items in zip(together, *alone, strict=True):
        torch.testing.assert_close(whole, torch.stack(items), atol=1e-6, rtol=0)


def test_answers_are_indexed_with_ids_or_a_mask_of_all_variables() -> None:
    graph = sx.FactorGraph()
    ids = graph.variables(torch.tensor([[1.0, -1.0, 2.0]] * 2), batch_dims=1)
    best = graph.argmax()
    assert best[ids < 2].tolist() == [[1, 0]] * 2
    assert best[torch.tensor([False, True, False])].tolist() == [[0]] * 2
    assert best[~ids[:2]].tolist() == [[0, 1]] * 2
    for wrong in (torch.tensor([True, False]), torch.zeros(2, 3) > 0, ids.float(), 1):
        with pytest.raises(ValueError, match="ids that variables"):
            best[wrong]


def test_switched_off_variables() -> None:
    theta = torch.tensor([1.0, -math.inf, 0.5], dtype=f64, requires_grad=True)
    graph, ids = sx.FactorGraph(), None
    ids = graph.variables(theta)
    graph.xor(ids)
    for answer in (graph.sparsemap(), graph.marginals()):
        assert answer[ids][1] == 0
        (g,) = torch.autograd.grad(answer[ids][0], theta)
        assert g.isfinite().all() and g[1] == 0
    assert graph.argmax()[ids].tolist() == [1, 0, 0]
    bad = sx.FactorGraph()
    off = bad.variables(theta)
    bad.or_(~off)
    with pytest.raises(ValueError, match="switched off"):
        bad.sparsemap()
    bad = sx.FactorGraph()
    off = bad.variables(torch.tensor([-math.inf, 1.0, -math.inf]))
    bad.xor(off[torch.tensor([0, 2])])
    for query in (bad.sparsemap, bad.lp_map, bad.argmax, bad.marginals):
        with pytest.raises(ValueError, match=r"needs 1 of its 2 variables .* only 0"):
            query()


def masked_tree(x: float) -> sx.FactorGraph:
    """A diagonal, of which no tree has anything."""
    graph = sx.FactorGraph()
    arcs = graph.variables(torch.zeros(4, 4, dtype=f64).fill_diagonal_(-x))
    graph.factor(sx.DependencyTree(randn(4, 4).fill_diagonal_(x)), arcs)
    graph.budget(arcs[1, 2:], 1)
    return graph


def masked_siblings(x: float) -> sx.FactorGraph:
    graph, n = sx.FactorGraph(), 4
    arcs = graph.variables(randn(n, n))
    i = torch.arange(n)
    unused = (i == 0) | (i[:, None, None] == i)  # the modifier is the root, or its own head
    siblings = torch.where(unused, x, randn(n, n, n))
    scores = torch.zeros(n, n, dtype=f64)
    graph.factor(sx.DependencyTree(scores, projective=True, siblings=siblings), arcs)
    graph.budget(arcs[1, 2:], 1)
    return graph


def masked_chain(x: float) -> sx.FactorGraph:
    """Of 4 and 2 words; the padding of everything is unused."""
    unary, own, transition = randn(2, 4, 3), randn(2, 4, 3), randn(2, 3, 3, 3)
    unary[1, 2:], own[1, 2:], transition[1, 1:] = -x, x, x
    graph = sx.FactorGraph()
    tags = graph.variables(unary, batch_dims=1)
    graph.factor(sx.LinearChain(own, transition, lengths=torch.tensor([4, 2])), tags)
    graph.budget(tags[:, 1], 1)
    return graph


def masked_choice(x: float) -> sx.FactorGraph:
    """What a factor forbids, of a variable and of the negation of one."""
    graph = sx.FactorGraph()
    ids = graph.variables(torch.tensor([0.2, x, -x, 0.4], dtype=f64))
    own = torch.tensor([0.1, -math.inf, -math.inf, 0.3], dtype=f64)
    graph.factor(sx.Choice(own), torch.stack([ids[0], ids[1], ~ids[2], ids[3]]))
    graph.budget(ids, 2)
    return graph


MASKED = (masked_tree, masked_siblings, masked_chain, masked_choice)


@pytest.mark.filterwarnings("ignore:FactorGraph.marginals")  # some have loops
@pytest.mark.parametrize("make", MASKED, ids=[make.__name__ for make in MASKED])
@pytest.mark.parametrize("score", [-1e9, 1e8])
def test_scores_that_nothing_uses_do_not_matter(make, score: float) -> None:  # type: ignore[no-untyped-def]
    graphs = []
    for x in (0.0, score):
        torch.manual_seed(1)
        graphs.append(make(x))
    for query in ("sparsemap", "lp_map", "argmax", "marginals"):
        plain, masked = (getattr(graph, query)() for graph in graphs)
        torch.testing.assert_close(masked.values, plain.values, atol=1e-9, rtol=0)
        assert masked.iterations == plain.iterations
        if query == "argmax":
            assert torch.equal(masked.exact, plain.exact) and masked.feasible.all()


@pytest.mark.parametrize("mask", [-50.0, -1e4, -1e6, -1e12])
def test_a_very_low_score_is_as_good_as_none(mask: float) -> None:
    found = []
    for m in (mask, -math.inf):
        theta = torch.tensor([[1, m, 0], [0.3, 0.9, 0.2]], dtype=f64, requires_grad=True)
        graph = sx.FactorGraph()
        cells = graph.variables(theta)
        graph.xor(cells)
        graph.at_most_one(cells.T)
        mu = graph.sparsemap(tol=1e-10)[cells]
        (slope,) = torch.autograd.grad((mu * torch.arange(6.0).view(2, 3)).sum(), theta)
        found.append((mu, slope, graph.lp_map()[cells], graph.argmax()[cells]))
        assert graph.argmax().exact
    assert math.isclose(found[0][0][0, 0].item(), 13 / 14, abs_tol=1e-6)
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=0)


@pytest.mark.parametrize("mask", [-1e4, -1e9, -1e30])
def test_most_scores_may_be_very_low(mask: float) -> None:
    """A ragged batch whose padding is switched off by a number, up to 18 of 20 variables."""
    torch.manual_seed(0)
    theta = torch.randn(3, 20, dtype=f64)
    padding = torch.arange(20) >= torch.tensor([20, 5, 2])[:, None]
    found = []
    for off in (mask, -math.inf):
        graph = sx.FactorGraph()
        ids = graph.variables(theta.masked_fill(padding, off), batch_dims=1)
        graph.xor(ids)
        best = graph.argmax()
        assert best.exact.all()
        found.append((graph.sparsemap()[ids], graph.lp_map()[ids], best[ids]))
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=0)


def test_sparse_means_zeros() -> None:
    """Values are between 0 and 1, and exactly 0 or 1 where every factor says so."""
    torch.manual_seed(1)
    graph = sx.FactorGraph()
    ids = graph.variables(3 * torch.randn(6, 8, 3, dtype=f64), batch_dims=1)
    graph.factor(sx.LinearChain(torch.zeros(8, 3, dtype=f64), torch.randn(3, 3, dtype=f64)), ids)
    graph.budget(ids[:, 1], 2)
    mu = graph.sparsemap()[ids]
    assert mu.min() == 0 and mu.max() == 1
    assert (mu[(mu < 1e-4) | (mu > 1 - 1e-4)].unique().tolist()) == [0, 1]


def test_a_very_high_score_is_as_good_as_a_fixed_variable() -> None:
    graph = sx.FactorGraph()
    ids = graph.variables(torch.tensor([1e6, 0.4, 0.3, 0.2], dtype=f64))
    graph.budget(ids, 2)
    expected = torch.tensor([1.0, 0.4, 0.3, 0.2], dtype=f64)
    torch.testing.assert_close(graph.sparsemap()[ids], expected, atol=1e-6, rtol=0)


def test_very_low_scores_that_decide() -> None:
    """In the first item one of two masked variables must be on: how low they are counts."""
    masks = torch.tensor([[-1e6, -2e6], [-1e6, 0.3]], dtype=f64)
    rest = torch.tensor([[0.6, 0.5, 0.2, 0.1]] * 2, dtype=f64)
    graph = sx.FactorGraph()
    ids = graph.variables(torch.cat([masks, rest], -1), batch_dims=1)
    graph.xor(ids[:2])
    graph.at_most_one(ids[2:])
    best = graph.argmax()
    assert best.feasible.all()
    assert best[ids[:2]].tolist() == [[1, 0], [0, 1]] and best[ids[2:]][1].tolist() == [1, 0, 0, 0]
    with pytest.warns(RuntimeWarning, match="item 0 are still apart.*hardly count"):
        mu = graph.sparsemap()[ids]
    wanted = torch.tensor([[1, 0], [0, 1]], dtype=f64)
    torch.testing.assert_close(mu[:, :2], wanted, atol=1e-5, rtol=0)
    alone = sx.sparsemax(rest[1])
    torch.testing.assert_close(mu[1, 2:], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("query", ["sparsemap", "lp_map"])
def test_warns_of_no_agreement(query: str) -> None:
    graph = sx.FactorGraph()
    ids = graph.variables(torch.zeros(2))
    graph.xor(ids)
    graph.budget(ids, 0)
    with pytest.warns(RuntimeWarning, match=r"factors are still .* 0\.25.*contradict") as caught:
        getattr(graph, query)()
    assert len(caught) == 1 and caught[0].filename == __file__
    graph = sx.FactorGraph()
    ids = graph.variables(torch.tensor([[0.0, -1.0], [9.0, 8.5]], dtype=f64), batch_dims=1)
    graph.at_most_one(ids)
    with pytest.warns(RuntimeWarning, match=r"after 1 steps the factors of item \d .*max_iter"):
        getattr(graph, query)(max_iter=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        getattr(graph, query)()
        getattr(graph, query)(max_iter=5, tol=10.0)  # as good as was asked for


@pytest.mark.parametrize("query", ["marginals", "argmax"])
def test_warns_of_contradictions(query: str) -> None:
    graph = sx.FactorGraph()
    ids = graph.variables(torch.zeros(2, 4), batch_dims=1)
    graph.budget(ids, 1)
    graph.budget(ids, 4, least=3)
    with pytest.warns(RuntimeWarning, match=f"{query}: after .* item 0 .*contradict") as caught:
        getattr(graph, query)()
    assert len(caught) == 1 and caught[0].filename == __file__


def test_names_the_item_without_a_way() -> None:
    scores = torch.zeros(3, 2, 4)
    scores[1, 1, :3] = -math.inf
    graph = sx.FactorGraph()
    ids = graph.variables(scores, batch_dims=1)
    graph.budget(ids, 3, least=2)
    with pytest.raises(ValueError, match=r"item 1: a constraint needs 2 .* only 1 are not"):
        graph.lp_map()


def _of_nothing() -> sx.FactorGraph:
    graph = sx.FactorGraph()
    graph.variables(torch.zeros(0))
    return graph


def test_warns_where_additional_scores_drown_the_rest() -> None:
    """A transition of −1e6 cannot be bounded: steps are too small for the others."""
    transition = torch.tensor([[0.0, -1e6], [0.0, 0.0]], dtype=f64)
    graph = sx.FactorGraph()
    ids = graph.variables(torch.tensor([[0.0, 0.3], [0.2, 0.0], [0.0, 0.4]], dtype=f64))
    graph.factor(sx.LinearChain(torch.zeros(3, 2, dtype=f64), transition), ids)
    graph.budget(ids[:, 1], 1)
    with pytest.warns(RuntimeWarning, match="others hardly count.*-inf"):
        graph.sparsemap()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda g, v: g.xor(torch.tensor([0, 9])), "only 4 variables, got ids up to 9"),
        (lambda g, v: g.xor(v.double()), "ids that variables"),
        (lambda g, v: g.factor(sx.Choice(torch.zeros(3)), v), "one for each part"),
        (lambda g, v: g.factor(sx.Choice(torch.zeros(4)), v + 1), "factor: .* ids up to 4"),
        (lambda g, v: g.factor(sx.Choice(torch.zeros(4)), v.tolist()), "ids that variables"),
        (lambda g, v: g.knapsack(v, [1, 2], 3), "4 whole numbers"),
        (lambda g, v: g.budget(v, 3, least=5), "at least 5"),
        (lambda g, v: g.variables(torch.zeros(2, 3), batch_dims=1), "the batch must be"),
        (lambda g, v: g.variables(torch.tensor([math.nan])), "nan"),
        (lambda g, v: sx.FactorGraph().sparsemap(), "no variables"),
        (lambda g, v: _of_nothing().sparsemap(), "no variables"),
        (lambda g, v: g.pairwise(v[0], v[1], torch.zeros(3)), "must broadcast"),
        (lambda g, v: g.pairwise(0, v[1], torch.zeros(())), "pairwise: the ids that variables"),
        (lambda g, v: g.implication(v[0], 1), "implication: the ids that variables"),
        (lambda g, v: g.or_([0, 1]), "or_: the ids that variables"),
        (lambda g, v: g.variables(torch.zeros(3), batch_dims=2), "batch_dims must be between 0"),
        (lambda g, v: g.knapsack(v, [1, 2.5, 1, 1], 3), "4 whole numbers"),
        (lambda g, v: g.knapsack(v, [1, 1, 1, 1], 2.5), "whole numbers.* and 2.5"),
        (lambda g, v: g.knapsack(v, [1, 1, 1, 1], math.nan), "whole numbers.* and nan"),
        (lambda g, v: g.knapsack(v, [1, 1, 1, math.inf], 1), "whole numbers"),
        (lambda g, v: sx.FactorGraph().xor(v), "xor: there are no variables yet"),
        (
            lambda g, v: g.factor(sx.GridPath(torch.zeros(2, 2), moves="all"), v.view(2, 2)),
            "no scores above 0",
        ),
        (lambda g, v: g.knapsack(v[0], [1], 3), "ids \\(..., n\\)"),
        (lambda g, v: g.pairwise(v[0], v[1], 0.5), "scores must be a tensor, got float"),
        (lambda g, v: g.pairwise(v[:2], v[:3], torch.zeros(())), r"one shape, got \(2,\), \(3,\)"),
        (lambda g, v: g.implication(), "implication: ids are needed"),
        (lambda g, v: g.implication(v[:2], v[:3]), "implication: the ids must be of one shape"),
        (lambda g, v: g.factor(torch.zeros(4), v), "a structure is needed, .* got Tensor"),
        (lambda g, v: g.budget(v, 1, 2), "bounds must be .* at least 2 and at most 1"),
        (lambda g, v: g.budget(v, -1), "bounds must be .* at least 0 and at most -1"),
        (lambda g, v: g.budget(v, 1.5), "bounds must be whole numbers, .* at most 1.5"),
        (lambda g, v: g.budget(v, 9, 5), "n at least 5"),
        (lambda g, v: g.marginals(damping=2.0), "damping must be .* got 2.0"),
        (lambda g, v: g.marginals(damping=1.0), "damping must be .* got 1.0"),
        (lambda g, v: g.marginals(damping=-0.1), "damping must be .* got -0.1"),
        (lambda g, v: g.marginals(rounds=0), "marginals: rounds must be at least 1, got 0"),
        (lambda g, v: g.marginals(tol=-1.0), "marginals: tol must not be negative, got -1.0"),
        (lambda g, v: g.sparsemap(max_iter=0), "sparsemap: max_iter must be at least 1, got 0"),
        (lambda g, v: g.lp_map(tol=-1.0), "lp_map: tol must not be negative, got -1.0"),
        (lambda g, v: g.argmax(tol=math.nan), "argmax: tol must not be negative, got nan"),
    ],
)
def test_errors(act, message: str) -> None:  # type: ignore[no-untyped-def]
    graph = sx.FactorGraph()
    ids = graph.variables(torch.zeros(4))
    with pytest.raises(ValueError, match=message):
        act(graph, ids)


def test_belief_propagation_needs_gibbs() -> None:
    graph = sx.FactorGraph()
    ids = graph.variables(torch.zeros(4))
    graph.factor(sx.Choice(torch.zeros(4), smoothing=sx.Gini()), ids)
    with pytest.raises(ValueError, match="belief propagation"):
        graph.marginals()
