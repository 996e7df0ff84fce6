"""Factor graphs against enumeration, a quadratic solver, and the structures they are made of."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.optimize import linprog, minimize

import structmax as sx

f64 = torch.float64


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


@pytest.mark.parametrize("name", LOGIC)
def test_gradients(name: str) -> None:
    theta = randn(4, grad=True)

    def solve(x: torch.Tensor) -> torch.Tensor:
        graph, ids = graph_of(name, x)
        return graph.sparsemap(tol=1e-11)[ids]

    assert torch.autograd.gradcheck(solve, theta, atol=1e-4)
    assert torch.autograd.gradcheck(lambda x: graph_of(name, x)[0].marginals().values, theta)


def test_no_second_derivative() -> None:
    theta = randn(3, grad=True)
    graph, ids = graph_of("xor", theta)
    (g,) = torch.autograd.grad(graph.sparsemap()[ids].square().sum(), theta, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()


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


def test_rounding_decides_what_is_nearest_to_a_decision(monkeypatch) -> None:
    answers = [[0.45, 0.8, 0.3, 1.0], [0.1, 1.0, 0.3, 1.0], [0.0, 1.0, 0.0, 1.0]]
    asked = []

    def solved(decided, max_iter, tol) -> sx.sparse.factor_graph.GraphResult:
        asked.append({name: mask.tolist() for name, mask in decided.items()})
        values = torch.tensor(answers[len(asked) - 1], dtype=f64)
        return sx.sparse.factor_graph.GraphResult(values, torch.tensor(0.0), 1)

    graph = sx.FactorGraph()
    graph.variables(torch.zeros(4))
    monkeypatch.setattr(graph, "_lp_map", solved)
    best = graph.argmax()
    assert asked == [
        {},
        {"on": [0, 1, 0, 1], "off": [0, 0, 0, 0]},
        {"on": [0, 1, 0, 1], "off": [1, 0, 0, 0]},
    ]
    assert best.values.tolist() == answers[-1] and not best.exact and best.feasible


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
        (lambda g, v: g.pairwise(v[0], v[1], torch.zeros(3)), "must broadcast"),
        (lambda g, v: g.pairwise(0, v[1], torch.zeros(())), "pairwise: the ids that variables"),
        (lambda g, v: g.implication(v[0], 1), "implication: the ids that variables"),
        (lambda g, v: g.or_([0, 1]), "or_: the ids that variables"),
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
