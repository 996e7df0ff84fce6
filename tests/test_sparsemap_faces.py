"""Derivatives of SparseMAP on faces of many dimensions, most of whose weights are below any
tolerance: they are those of finite differences all the same."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import structmax as sx
from structmax.sparse import completion, cpu
from structmax.sparse.linear_cpu import Face
from structmax.sparse.solve import _StructureOracle

Make = Callable[..., Any]
nan, inf = math.nan, math.inf


def ragged(scores: Tensor) -> Any:
    inside = torch.arange(scores.shape[-1]) <= torch.tensor([[18], [14]])
    padding = ~(inside[:, None] & inside[:, :, None])
    return sx.DependencyTree(torch.where(padding, nan, scores), torch.tensor([18, 14]))


def forbidden(scores: Tensor) -> Any:
    some = torch.arange(scores[0].numel()).reshape(scores.shape[1:]) % 7 == 3
    return sx.DependencyTree(torch.where(some, -inf, scores))


def best_twenty(scores: Tensor) -> Tensor:
    return torch.zeros_like(scores).scatter(-1, scores.topk(20).indices, 1.0)


CASES: dict[str, tuple[Make, tuple[int, ...], tuple[int, ...], float]] = {
    "trees": (sx.DependencyTree, (2, 19, 19), (), 0.2),
    "ragged trees": (ragged, (2, 19, 19), (), 0.2),
    "trees without some arcs": (forbidden, (2, 19, 19), (), 0.2),
    "spanning trees": (sx.SpanningTree, (2, 18, 18), (), 0.2),
    "matchings": (sx.Assignment, (2, 16, 16), (), 0.1),
    "subsets": (lambda x: sx.KSubset(x, 20), (2, 70), (), 0.2),
    "tags": (sx.LinearChain, (2, 40, 10), (10, 10), 0.15),
    "one item": (lambda x: sx.KSubset(x, 20), (70,), (), 0.2),
}


def gap(f: Callable[[Tensor], Tensor], theta: Tensor) -> float:
    """How far the derivative along a random direction is from a finite difference, relatively."""
    v, step = torch.randn_like(theta), 1e-5
    slope = torch.autograd.functional.jvp(f, theta, v)[1]
    change = (f(theta + step * v) - f(theta - step * v)) / (2 * step)
    return float((slope - change).norm() / change.norm())


def flat(shape: tuple[int, ...], spread: float, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return spread * torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "penalize"), [("tags", "all"), *((name, "primary") for name in CASES)]
)
def test_derivatives_of_large_faces(name: str, penalize: str) -> None:
    make, shape, other, spread = CASES[name]
    theta, more = flat(shape, spread), [flat(other, spread, 1)] if other else []
    assert gap(lambda x: make(x, *more).sparsemap(penalize=penalize).marginals, theta) < 1e-3
    if other:  # in the scores of transitions, and of their expected counts
        solve = lambda t: make(theta, t).sparsemap(penalize=penalize)  # noqa: E731
        assert gap(lambda t: solve(t).marginals, more[0]) < 1e-3
        assert gap(lambda t: solve(t).additional[0], more[0]) < 1e-3


def test_it_is_the_completion_that_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the cases above are too easy."""
    solve = cpu.solve
    monkeypatch.setattr(completion, "complete", lambda *_: None)
    monkeypatch.setattr(cpu, "solve", lambda *given: solve(*given[:-1], complete=False))
    wrong = set()
    for name, (make, shape, other, spread) in CASES.items():
        more = [flat(other, spread, 1)] if other else []
        found = gap(lambda x, m=make, o=more: m(x, *o).sparsemap().marginals, flat(shape, spread))
        wrong |= {name} if found > 1e-2 else set()
    assert wrong == set(CASES)


def tied(scores: Tensor) -> Any:
    return sx.DependencyTree((8 * scores).round() / 8)


def without_tags(scores: Tensor, transition: Tensor) -> Any:
    some = torch.arange(scores[0].numel()).reshape(scores.shape[1:]) % 11 == 3
    return sx.LinearChain(torch.where(some, -inf, scores), transition, lengths=[25, 30])


COMPILED: dict[str, tuple[Make, tuple[int, ...], tuple[int, ...], float]] = {
    **CASES,
    "tied trees": (tied, (3, 19, 19), (), 0.5),
    "labelled trees": (sx.DependencyTree, (2, 10, 10, 3), (), 0.2),
    "projective trees": (lambda x: sx.DependencyTree(x, projective=True), (2, 22, 22), (), 0.02),
    "ragged tags without some": (without_tags, (2, 30, 8), (8, 8), 0.05),
    "matchings, not square": (sx.Assignment, (2, 10, 14), (), 0.1),
    "subsets of any size": (lambda x: sx.KSubset(x, (10, 30)), (2, 60), (), 0.2),
    "binary trees": (sx.BinaryTree, (2, 22, 22), (), 0.02),
    "grammars": (lambda x, y: sx.PCFG(y[0, 0, :3], y, x), (2, 9, 3), (3, 6, 6), 0.1),
}


@pytest.mark.parametrize("penalize", ["primary", "all"])
@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name: str, penalize: str) -> None:
    """The compiled completion spans the face that the one in torch does."""
    make, shape, other, spread = COMPILED[name]
    structure = make(flat(shape, spread), *([flat(other, spread, 1)] if other else []))
    penalize = "primary" if structure._silent else penalize
    found = cpu.solve(structure, penalize, 1000, 1e-10, None, True)
    assert found is not None and isinstance(found.face, Face)
    parts, items = structure._parts(), structure.batch_shape.numel()
    theta = torch.cat([p.reshape(items, -1) for p in parts], -1)
    width = theta.shape[1] if penalize == "all" else structure.event_shape.numel()
    by_torch = completion.complete(_StructureOracle(structure), theta, found, width, True)
    ours = found.face.more()
    if ours is None or by_torch is None:  # all is shown already
        assert ours is by_torch and (name, penalize) == ("grammars", "primary")
        return
    assert ours[0].tolist() == by_torch[0].tolist()
    hulls = [(rows.mT @ rows)[:, :width, :width] for _, rows in (ours, by_torch)]
    torch.testing.assert_close(*hulls, rtol=0, atol=1e-8)
    x = torch.randn_like(theta)
    product = (ours[1].mT @ (ours[1] @ x[ours[0], :, None])).squeeze(-1)
    torch.testing.assert_close(found.face.times("hull", x)[ours[0]], product, rtol=0, atol=1e-8)


def test_a_users_oracle() -> None:
    seen = []

    def oracle(scores: Tensor) -> Tensor:
        seen.append(len(scores))
        return best_twenty(scores)

    solve = lambda x: sx.sparsemap_oracle(oracle, x).marginals  # noqa: E731
    assert gap(solve, flat((2, 70), 0.2)) < 1e-3
    assert max(seen) == 2  # never more items than there are


def test_second_derivatives_and_the_value() -> None:
    """The gradient of the value is μ, and so is its derivative that of μ."""
    make, shape, _, spread = CASES["subsets"]
    theta = flat(shape, spread).requires_grad_()
    result = make(theta).sparsemap()
    (slope,) = torch.autograd.grad(result.value.sum(), theta, create_graph=True)
    torch.testing.assert_close(slope, result.marginals, atol=1e-6, rtol=0)
    v = torch.randn_like(theta)
    (by_value,) = torch.autograd.grad((slope * v).sum(), theta)
    (by_mean,) = torch.autograd.grad((make(theta).sparsemap().marginals * v).sum(), theta)
    torch.testing.assert_close(by_value, by_mean, atol=1e-6, rtol=0)
    # the Jacobian is a projection
    (again,) = torch.autograd.grad((make(theta).sparsemap().marginals * by_mean).sum(), theta)
    torch.testing.assert_close(again, by_mean, atol=1e-9, rtol=0)


def test_items_alone_and_in_transforms() -> None:
    make, shape, _, spread = CASES["subsets"]
    theta, v = flat(shape, spread), flat(shape, 1.0, 1)

    def slope(x: Tensor, v: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad((make(x).sparsemap().marginals * v).sum(), x)[0]

    together = slope(theta, v)
    alone = torch.stack([slope(*pair) for pair in zip(theta, v, strict=True)])
    torch.testing.assert_close(together, alone)
    both = torch.func.grad(lambda x: (make(x).sparsemap().marginals * v).sum())(theta)
    torch.testing.assert_close(together, both)


EQUAL: dict[str, tuple[Make, tuple[int, ...]]] = {
    "pairs": (lambda x: sx.KSubset(x, 2), (4,)),
    "trees": (sx.DependencyTree, (5, 5)),
    "matchings": (sx.Assignment, (4, 4)),
    "tags": (lambda x: sx.LinearChain(x, x.new_zeros(3, 3)), (4, 3)),
}


@pytest.mark.parametrize("backend", ["cpu", "naive", "gpu"])
@pytest.mark.parametrize("name", EQUAL)
def test_equal_scores(name: str, backend: str) -> None:
    """A few structures, of large weights, make the mean; the face is of many more directions."""
    if backend == "gpu":
        pytest.importorskip("triton")
        if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("needs a CUDA device, or Triton's interpreter")
    make, shape = EQUAL[name]
    device = "cuda" if backend == "gpu" and torch.cuda.is_available() else "cpu"
    at = torch.zeros(shape, dtype=torch.float64, device=device)
    mu = lambda t: make(t).sparsemap().marginals  # noqa: E731
    with sx.backend(backend):
        slope = torch.autograd.functional.jacobian(mu, at).reshape(at.numel(), -1)
    step = 1e-3 * torch.eye(at.numel(), dtype=at.dtype, device=device)
    moves = [  # by compiled code: interpreted, they would take minutes
        (mu(at + h.reshape(shape)) - mu(at - h.reshape(shape))).flatten() / 2e-3 for h in step
    ]
    torch.testing.assert_close(slope, torch.stack(moves, 1), rtol=0, atol=1e-8)


def test_equal_scores_of_a_users_oracle() -> None:
    pairs = lambda x: torch.zeros_like(x).scatter(-1, x.topk(2).indices, 1.0)  # noqa: E731
    mu = lambda t: sx.sparsemap_oracle(pairs, t[None]).marginals[0]  # noqa: E731
    slope = torch.autograd.functional.jacobian(mu, torch.zeros(4, dtype=torch.float64))
    expected = torch.eye(4, dtype=torch.float64) - 0.25
    torch.testing.assert_close(slope, expected, rtol=0, atol=1e-10)


def test_losses_look_for_no_face(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their gradient is μ; second derivatives need the face, and have it."""
    solve, asked = cpu.solve, []

    def watched(*given: Any) -> Any:
        asked.append(given[-1])
        return solve(*given)

    monkeypatch.setattr(cpu, "solve", watched)
    scores = flat((2, 12, 12), 0.05).requires_grad_()
    heads = torch.arange(11).expand(2, 11)
    loss = sx.losses.sparsemap(sx.DependencyTree(scores), heads)
    (slope,) = torch.autograd.grad(loss, scores, retain_graph=True)
    assert asked == [False]
    (again,) = torch.autograd.grad(loss, scores, create_graph=True)
    assert asked == [False, True] and torch.allclose(slope, again, atol=1e-10)
    v = torch.randn_like(scores)
    (curve,) = torch.autograd.grad((again * v).sum(), scores)

    def slope_at(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(sx.losses.sparsemap(sx.DependencyTree(x), heads), x)[0]

    change = (slope_at(scores + 1e-5 * v) - slope_at(scores - 1e-5 * v)) / 2e-5
    assert (curve - change).norm() < 1e-3 * change.norm()


@pytest.mark.parametrize("backend", ["cpu", "naive"])
def test_a_solver_that_was_stopped_has_no_face(backend: str) -> None:
    """What is better than the active structures is not looked for: it is not on their face."""
    scores = flat((3, 12, 12), 1.0).requires_grad_()
    with sx.backend(backend):
        for most in (1, 2, 5):
            result = sx.DependencyTree(scores).sparsemap(max_iter=most)
            (slope,) = torch.autograd.grad(result.marginals[:, :, 1:].square().sum(), scores)
            z, p = result.structures.detach(), result.probs.detach()
            M = z.flatten(2)
            centre = torch.where(p[..., None] > 0, M - M[:, :1], 0.0)
            along = torch.linalg.pinv(centre) @ centre  # the projection onto their hull
            mu = result.marginals.detach().flatten(1)
            expected = (along @ (2 * mu)[..., None]).reshape(scores.shape)
            torch.testing.assert_close(slope, expected, rtol=0, atol=1e-9)


def forbidding(backend: str, seed: int, where: str, how: float) -> Tensor:
    """The derivative of tags or trees in their first scores, with a number where nothing is."""
    torch.manual_seed(seed)
    unary, transition = torch.randn(1, 6, 3).double(), torch.randn(3, 3).double()
    scores, direction = torch.randn(1, 6, 6).double(), torch.randn(1, 6, 6).double()
    lengths = None
    if where == "transition":
        transition[0, 1] = how
    elif where == "padding":
        unary[:, 4:], lengths = how, torch.tensor([4])
    else:
        scores[:, :, 0] = scores[:, range(6), range(6)] = how
    leaf = (scores if where == "diagonal" else unary).requires_grad_()
    with sx.backend(backend):
        if where == "diagonal":
            structure: Any = sx.DependencyTree(leaf)
        else:
            structure = sx.LinearChain(leaf, transition, lengths=lengths)
        mu = structure.sparsemap().marginals
        return torch.autograd.grad(mu, leaf, direction[..., : mu.shape[-1]])[0]


@pytest.mark.parametrize("where", ["transition", "padding", "diagonal"])
@pytest.mark.parametrize("backend", ["cpu", "naive"])
def test_minus_a_billion_where_nothing_is(backend: str, where: str) -> None:
    """As others write what is forbidden. It says nothing of how exact the other scores are."""
    for seed in range(40 if backend == "cpu" else 12):
        found, expected = (
            forbidding(backend, seed, where, how)
            for how in (-1e9, -inf if where == "transition" else 0.0)
        )
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
