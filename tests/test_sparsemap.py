"""SparseMAP: optimality on every structure, other solvers, derivatives, and the fast path."""

from __future__ import annotations

import doctest
import math
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from table import ROWS, f64, randn
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import structmax as sx
from structmax.sparse import cpu, projection
from structmax.testing.contract import _scores, _with_scores, check_sparsemap

inf, nan = math.inf, math.nan
# the smoothing plays no role
KINDS = [name for name in ROWS if name.split("/")[1] == "shannon"]
KINDS += ["grid-all/hard", "assignment-wide/shannon-0.5", "nonprojective-labelled/shannon-0.5"]


@pytest.fixture(params=["compiled", "torch"])
def _solver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(cpu, "solve", lambda *args: None)


def make(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return ROWS[kind]()


def changed(s: sx.Structure, case: str) -> Any:
    """The structure with scores that are special in some way."""
    if case == "tied":
        return _with_scores(s, [t.round() for t in _scores(s)])
    if case == "constant":
        return _with_scores(s, [torch.full_like(t, -1.0) for t in _scores(s)])
    if case == "forbidden":
        used = (s.argmax() > 0).reshape(-1, *s.event_shape).any(0)
        mask = torch.rand(s.event_shape, dtype=f64) < 0.4
        return s.condition(exclude=mask & ~used)
    if case.startswith("×"):
        return _with_scores(s, [t * float(case[1:]) for t in _scores(s)])
    return s


CASES = ["random", "tied", "constant", "forbidden", "×0.001", "×0.1", "×1000"]


# -- optimality ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("_solver")
@pytest.mark.parametrize("kind", KINDS)
def test_conditions_of_optimality(kind: str) -> None:
    for seed, case in enumerate(CASES):
        s = changed(make(kind, seed), case)
        result = check_sparsemap(s)
        # what the docstring promises, far from the bound: it ends by itself
        assert bool((result.iterations <= 2 * result.num_active + 10).all()), case
        assert bool((result.marginals[s._parts()[0] == -inf] == 0).all())


def case_of(data: st.DataObject) -> None:
    kind, case = data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from(CASES))
    s = changed(make(kind, data.draw(st.integers(0, 10**6))), case)
    s = changed(s, data.draw(st.sampled_from(["×1", "×0.03", "×30", "tied"])))
    check_sparsemap(s, 1e-6)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_random_cases(data: st.DataObject) -> None:
    case_of(data)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [True, False])
def test_many_random_cases(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(cpu, "solve", lambda *args: None)
    settings(max_examples=10_000, deadline=None)(given(st.data())(case_of))()


def by_quadratic_program(scores: Tensor, counts: Tensor) -> Tensor:
    """argmax over the simplex of cᵀp − ½‖Mp‖², M the rows of ``counts``; returns Mp."""
    c, m = scores.numpy(), counts.flatten(1).numpy()
    size = len(c)
    found = minimize(
        lambda p: (0.5 * (p @ m) @ (p @ m) - c @ p, m @ (p @ m) - c),
        np.full(size, 1 / size),
        jac=True,
        bounds=[(0, 1)] * size,
        constraints={"type": "eq", "fun": lambda p: p.sum() - 1, "jac": np.ones_like},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    return torch.from_numpy(found.x @ m).reshape(counts.shape[1:])


@pytest.mark.usefixtures("_solver")
@pytest.mark.parametrize(
    "kind",
    ["chain-shared", "binary-tree", "pcfg", "edit", "subset-at-most", "nonprojective", "hyperpath"],
)
def test_equals_a_quadratic_program(kind: str) -> None:
    s = make(f"{kind}/shannon")[0]
    every = s.enumerate_support()
    expected = by_quadratic_program(s.score(every), every)
    torch.testing.assert_close(s.sparsemap().marginals, expected, atol=1e-6, rtol=0)


@pytest.mark.usefixtures("_solver")
def test_choice_is_sparsemax() -> None:
    for scale in (1e-3, 1.0, 1e3):
        x = scale * randn(20, 7)
        torch.testing.assert_close(sx.Choice(x).sparsemap().marginals, sx.sparsemax(x))


@pytest.mark.usefixtures("_solver")
def test_subset_is_budgetmax() -> None:
    x = randn(20, 7)
    torch.testing.assert_close(sx.KSubset(x, 3).sparsemap().marginals, sx.budgetmax(x, 3))


def dykstra(point: Tensor, rounds: int = 3000) -> Tensor:
    """The projection onto matrices whose rows and columns sum to one (Boyle & Dykstra, 1986)."""
    x, correction = point, torch.zeros_like(point)
    for _ in range(rounds):
        x = x + (1 - x.sum(-1, keepdim=True)) / x.shape[-1]  # affine: no correction is needed
        x = x + (1 - x.sum(-2, keepdim=True)) / x.shape[-2]
        positive = (x + correction).clamp(min=0)
        x, correction = positive, x + correction - positive
    return x


@pytest.mark.usefixtures("_solver")
def test_assignment_is_the_projection_onto_birkhoffs_polytope() -> None:
    torch.manual_seed(0)
    point = randn(3, 5, 5)
    for found in (
        sx.Assignment(point).sparsemap().marginals,
        sx.project(sx.Assignment(point), point),
    ):
        torch.testing.assert_close(found, dykstra(point), atol=1e-7, rtol=0)


@pytest.mark.usefixtures("_solver")
@pytest.mark.parametrize("steps", [True, False])
def test_all_parts_penalised(steps: bool) -> None:
    torch.manual_seed(0)
    unary, transition = randn(4, 3), randn(*[3] * steps, 3, 3)
    s = sx.LinearChain(unary, transition)
    every = s.enumerate_support()
    pairs = every[:, :-1, :, None] * every[:, 1:, None, :]
    counts = torch.cat([every.flatten(1), (pairs if steps else pairs.sum(1)).flatten(1)], -1)
    result = s.sparsemap(penalize="all")
    found = torch.cat([result.marginals.flatten(), result.additional[0].flatten()])
    expected = by_quadratic_program(s.score(every), counts)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    value = (result.probs * s.score(result.structures)).sum() - found.square().sum() / 2
    torch.testing.assert_close(result.value, value)


@pytest.mark.usefixtures("_solver")
@pytest.mark.parametrize("make", [lambda x: sx.KSubset(x, (1, 3)), lambda x: sx.GridPath(x)])
def test_parts_without_scores_are_never_penalised(make: Any) -> None:
    x = randn(5) if make(torch.zeros(3, 3)).event_shape == (3,) else randn(3, 3)
    primary, every = (make(x).sparsemap(penalize=p).marginals for p in ("primary", "all"))
    torch.testing.assert_close(primary, every)


@pytest.mark.parametrize("spread", [0.05, 1.0, 20.0])
def test_larger_sizes(spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both solvers end far below the bound, and agree."""
    torch.manual_seed(0)
    several = [
        sx.LinearChain(spread * randn(2, 9, 4), spread * randn(4, 4)),
        sx.DependencyTree(spread * randn(2, 8, 8)),
        sx.Assignment(spread * randn(2, 6, 6)),
        sx.LinearChain(torch.zeros(2, 12, 5), randn(5, 5).sign()),  # full of ties
    ]
    found = [s.sparsemap() for s in several]
    monkeypatch.setattr(cpu, "solve", lambda *args: None)
    for result, s in zip(found, several, strict=True):
        again = s.sparsemap()
        for r in (result, again):
            assert bool((r.gap <= 1e-8 * (1 + spread)).all())
            assert bool((r.iterations < 200).all())
        torch.testing.assert_close(again.marginals, result.marginals, atol=1e-6, rtol=0)


@pytest.mark.parametrize("method", ["away", "pairwise", "frank-wolfe"])
@pytest.mark.parametrize("kind", ["chain-step", "subset-between", "nonprojective", "grid-all"])
def test_methods_agree(method: str, kind: str) -> None:
    s = make(f"{kind}/{'hard' if kind == 'grid-all' else 'shannon'}")
    exact, tol = s.sparsemap(), 1e-4 if method == "frank-wolfe" else 1e-9
    result = check_sparsemap(s, tol, method=method, tol=tol)
    bound = math.sqrt(20 * tol)
    torch.testing.assert_close(result.marginals, exact.marginals, atol=bound, rtol=0)


def test_a_bound_on_the_iterations() -> None:
    torch.manual_seed(0)
    s = sx.LinearChain(0.1 * randn(2, 10, 4), 0.1 * randn(4, 4))
    for method in ("active-set", "away", "pairwise", "frank-wolfe"):
        few = s.sparsemap(method=method, max_iter=5)
        assert bool((few.iterations == 5).all()) and bool((few.gap > 1e-6).all())
        assert bool((few.value <= s.sparsemap().value).all())
        bound = few.value + few.gap
        assert bool((s.sparsemap().value <= bound).all())


# -- starting from an earlier result -------------------------------------------------------------


@pytest.mark.usefixtures("_solver")
def test_a_warm_start_takes_fewer_iterations() -> None:
    torch.manual_seed(0)
    x, transition = randn(4, 8, 4), randn(4, 4)
    before = sx.LinearChain(x, transition).sparsemap()
    after = sx.LinearChain(x + 0.01 * randn(4, 8, 4), transition)
    cold, warm = (after.sparsemap(init=init) for init in (None, before))
    torch.testing.assert_close(cold.marginals, warm.marginals)
    assert bool((warm.iterations < cold.iterations).all())
    assert bool((after.sparsemap(init=warm).iterations <= 3).all())
    cold, warm = (
        after.sparsemap(method="away", tol=1e-4, init=init, max_iter=200) for init in (None, before)
    )
    assert warm.iterations.sum() < cold.iterations.sum()


@pytest.mark.usefixtures("_solver")
def test_a_warm_start_from_something_else_entirely() -> None:
    torch.manual_seed(0)
    s = sx.KSubset(randn(3, 6), 2)
    # dependent structures, from another method; parts that are forbidden by now
    for before in (
        sx.KSubset(torch.zeros(3, 6), 2).sparsemap(method="frank-wolfe", max_iter=30),
        sx.KSubset(torch.full((3, 6), -9.0), 2).sparsemap(),
    ):
        check_sparsemap(s, init=before)
    cut = s.condition(exclude=s.argmax().bool())
    check_sparsemap(cut, init=s.sparsemap())
    single = sx.Choice(torch.tensor([5.0, 0.0, 0.0])).sparsemap()
    other = sx.Choice(torch.tensor([-inf, 0.0, 3.0]))
    assert other.sparsemap(init=single).marginals.tolist() == [0, 0, 1]


def between(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high + 1, shape)


PATHS = torch.tensor([(0, 1), (0, 2), (1, 2), (1, 3), (2, 3), (3, 4), (2, 4)])
# minibatches of four items that differ in lengths, sizes, targets and whatever else is no score
RAGGED = {
    "chain": lambda: sx.LinearChain(randn(4, 4, 3), randn(3, 3), lengths=between(1, 4, 4)),
    "nonprojective": lambda: sx.DependencyTree(randn(4, 4, 4), between(1, 3, 4)),
    "projective": lambda: sx.DependencyTree(randn(4, 4, 4), between(1, 3, 4), projective=True),
    "spanning": lambda: sx.SpanningTree(randn(4, 4, 4), between(1, 4, 4)),
    "subset": lambda: sx.KSubset(randn(4, 5), int(between(1, 3)), lengths=between(3, 5, 4)),
    "subset of a range": lambda: sx.KSubset(
        randn(4, 5), (int(between(0, 1)), int(between(1, 3))), lengths=between(3, 5, 4)
    ),
    "assignment": lambda: sx.Assignment(
        randn(4, 3, 4), lengths=(between(1, 3, 4), between(3, 4, 4))
    ),
    "binary tree": lambda: sx.BinaryTree(randn(4, 4, 4), lengths=between(1, 4, 4)),
    "segments": lambda: sx.SemiMarkov(randn(4, 4, 3, 2), randn(2, 2), lengths=between(1, 4, 4)),
    "dtw": lambda: sx.Alignment(
        randn(4, 3, 4), lengths=(between(1, 3, 4), between(1, 4, 4)), band=int(between(2, 4))
    ),
    "edits": lambda: sx.Alignment(
        randn(4, 3, 4), lengths=(between(1, 3, 4), between(1, 4, 4)), kind="edit"
    ),
    "path": lambda: sx.Path(PATHS, randn(4, 7), 0, between(1, 4, 4)),
    "ctc": lambda: sx.CTC(
        randn(4, 5, 3), between(1, 2, 4, 2), torch.full((4,), 5), between(1, 2, 4)
    ),
    "grammar": lambda: sx.PCFG(
        randn(4, 2), randn(4, 2, 4, 4), randn(4, 4, 2), lengths=between(2, 4, 4)
    ),
}


def check_warm_starts(kind: str, batches: int, seed: int) -> None:
    torch.manual_seed(seed)
    last = None
    for number in range(batches):
        s = RAGGED[kind]()
        if number % 3 == 2:  # what the start uses may be forbidden, or forced
            allowed = s.argmax() > 0
            s = s.condition(exclude=(torch.rand_like(allowed, dtype=f64) < 0.3) & ~allowed)
        options = {"method": "pairwise", "tol": 1e-12} if number % 10 == 9 else {}
        cold, warm = (s.sparsemap(init=init, **options) for init in (None, last))
        atol = 1e-4 if options else 1e-9
        torch.testing.assert_close(warm.marginals, cold.marginals, atol=atol, rtol=0)
        torch.testing.assert_close(warm.value, cold.value, atol=atol, rtol=0)
        for ours, theirs in zip(warm.additional, cold.additional, strict=True):
            assert ours.shape == theirs.shape  # they are those of a distribution, not the only ones
        s.log_prob(warm.structures.movedim(-1 - len(s.event_shape), 0))  # which validates them
        last = warm


@pytest.mark.usefixtures("_solver")
@pytest.mark.parametrize("kind", RAGGED)
def test_a_warm_start_from_the_minibatch_before(kind: str) -> None:
    check_warm_starts(kind, 8, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", RAGGED)
def test_warm_starts_of_a_thousand_minibatches(kind: str) -> None:
    check_warm_starts(kind, 1000 // len(RAGGED) + 1, seed=1)


def test_losses_start_from_the_minibatch_before() -> None:
    x, before = randn(2, 4), sx.KSubset(torch.zeros(2, 4, dtype=f64), 1).sparsemap()
    subset = sx.KSubset(x, 2)
    target = subset.argmax()
    for loss in (sx.losses.sparsemap, sx.losses.margin_sparsemap):
        torch.testing.assert_close(loss(subset, target, init=before), loss(subset, target))


def test_a_start_whose_lengths_were_written_into() -> None:
    x, lengths = randn(2, 4, 3), torch.tensor([4, 2])
    before = sx.LinearChain(x, randn(3, 3), lengths=lengths).sparsemap()
    lengths[:] = torch.tensor([2, 4])
    after = sx.LinearChain(x, randn(3, 3), lengths=lengths)
    warm, cold = after.sparsemap(init=before), after.sparsemap()
    torch.testing.assert_close(warm.marginals, cold.marginals)


def test_a_start_in_other_processes_and_transforms() -> None:
    s = sx.KSubset(0.1 * randn(2, 4), 2, lengths=torch.tensor([4, 3]))
    found = []

    def value(x: Tensor) -> Tensor:
        found.append(sx.KSubset(x, 2, lengths=torch.tensor([4, 3])).sparsemap())
        return found[-1].value.sum()

    torch.func.grad(value)(s.scores)
    copied = pickle.loads(pickle.dumps(s.sparsemap()))
    for init in (copied, found[0]):
        assert bool((s.sparsemap(init=init).iterations <= 2).all())


# -- numbers -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_solver")
def test_ragged_items_with_nan_in_the_padding() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([4, 1, 3])
    unary, step, transition = randn(3, 4, 3), randn(3, 3, 3, 3), randn(3, 3)
    for i, n in enumerate(lengths):
        unary[i, n:] = nan
        step[i, n - 1 :] = nan
    for scores in (transition, step):
        unary.requires_grad_(), scores.requires_grad_()
        result = sx.LinearChain(unary, scores, lengths=lengths).sparsemap()
        loss = (result.marginals * torch.arange(3)).sum() + result.value.sum()
        grads = torch.autograd.grad(loss, (unary, scores))
        assert all(bool(g.isfinite().all()) for g in grads)
        for i, n in enumerate(lengths):
            alone = scores[i, : n - 1] if scores is step else scores
            one = sx.LinearChain(unary[i, :n], alone).sparsemap()
            torch.testing.assert_close(result.marginals[i, :n], one.marginals)
            assert not bool(result.marginals[i, n:].any()) and not bool(grads[0][i, n:].any())


@pytest.mark.usefixtures("_solver")
@pytest.mark.parametrize("mask", [-1e30, torch.finfo(torch.float32).min])
def test_the_gap_knows_what_rounding_takes(mask: float) -> None:
    """All options of a position are masked, so that no digit is left for the others."""
    x = torch.zeros(2, 3, 3)
    x[1, 0] = mask
    result = sx.LinearChain(x, torch.zeros(3, 3)).sparsemap()
    assert result.gap[0] < 1e-10 < 1.0 < result.gap[1]
    assert sx.LinearChain(x.clamp(min=-1e6), torch.zeros(3, 3)).sparsemap().gap.max() < 1e-6


@pytest.mark.usefixtures("_solver")
def test_unused_scores_may_be_nan() -> None:
    torch.manual_seed(0)
    x = randn(2, 6, 6)
    x.diagonal(0, -2, -1).fill_(nan)
    x[..., 0] = nan
    x[0, 5:], x[0, :, 5:] = nan, nan
    for projective in (False, True):
        tree = sx.DependencyTree(
            x.requires_grad_(), torch.tensor([4, 5]), projective=projective
        ).sparsemap()
        (grad,) = torch.autograd.grad(tree.marginals.square().sum(), x)
        assert bool(grad.isfinite().all()) and bool(tree.marginals.isfinite().all())
        torch.testing.assert_close(
            tree.marginals.sum((-2, -1)), torch.tensor([4.0, 5.0], dtype=f64)
        )


@pytest.mark.usefixtures("_solver")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    unary, transition = randn(2, 5, 3).to(dtype), randn(3, 3).to(dtype)
    result = sx.LinearChain(unary, transition).sparsemap()
    exact = sx.LinearChain(unary.double(), transition.double()).sparsemap()
    assert result.marginals.dtype == result.structures.dtype == dtype
    assert result.probs.dtype == result.value.dtype == result.gap.dtype == torch.float32
    eps = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(result.marginals.double(), exact.marginals, atol=eps, rtol=0)
    torch.testing.assert_close(result.probs.double(), exact.probs, atol=1e-6, rtol=0)


@pytest.mark.usefixtures("_solver")
def test_a_shift_of_all_scores_moves_nothing() -> None:
    torch.manual_seed(0)
    x = torch.randint(-64, 64, (4, 8, 4)).double() / 64
    transition = torch.randint(-64, 64, (4, 4)).double() / 64
    here = sx.LinearChain(x, transition).sparsemap()
    for shift in (1e4, -1e4):
        there = sx.LinearChain(x + shift, transition).sparsemap()
        torch.testing.assert_close(there.marginals, here.marginals, atol=1e-9, rtol=0)


@pytest.mark.usefixtures("_solver")
def test_batches_of_any_shape() -> None:
    torch.manual_seed(0)
    x, transition = randn(2, 3, 5, 3), randn(3, 3)
    whole = sx.LinearChain(x, transition).sparsemap()
    assert whole.structures.shape == (2, 3, int(whole.num_active.max()), 5, 3)
    one = sx.LinearChain(x[1, 2], transition).sparsemap()
    assert one.num_active.shape == () and one.structures.shape[1:] == (5, 3)
    torch.testing.assert_close(whole.marginals[1, 2], one.marginals)
    none = sx.LinearChain(x[:0], transition).sparsemap()
    assert none.marginals.shape == (0, 3, 5, 3) and none.probs.shape[:2] == (0, 3)
    slots = torch.arange(whole.probs.shape[-1])
    unused = slots >= whole.num_active[..., None]
    assert bool((whole.probs[unused] == 0).all())
    first = whole.structures[:, :, :1].expand_as(whole.structures)
    torch.testing.assert_close(whole.structures[unused], first[unused])


# -- derivatives ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("_solver")
@pytest.mark.parametrize("penalize", ["primary", "all"])
@pytest.mark.parametrize("kind", ["chain-shared", "edit", "subset-at-most", "hyperpath"])
def test_derivatives(kind: str, penalize: str) -> None:
    s = make(f"{kind}/shannon", 1)
    result = s.sparsemap(penalize=penalize)

    def answers(*scores: Tensor) -> tuple[Tensor, ...]:
        found = _with_scores(s, scores).sparsemap(penalize=penalize)
        return found.marginals, found.value, *found.additional

    def probs(*scores: Tensor) -> Tensor:  # defined for given structures
        return _with_scores(s, scores).sparsemap(penalize=penalize, init=result).probs

    leaves = tuple(t.requires_grad_() for t in _scores(s))
    for function in (answers, probs):
        assert gradcheck(function, leaves, fast_mode=True, atol=1e-5)
        assert gradgradcheck(function, leaves, fast_mode=True, atol=1e-4)
    _, direct = _gradient_of_value(s, penalize)
    torch.testing.assert_close(direct, result.marginals)


def _gradient_of_value(s: Any, penalize: str) -> tuple[Tensor, Tensor]:
    """The value, and its gradient in the primary parts."""
    delta = torch.zeros(*s.batch_shape, *s.event_shape, dtype=f64, requires_grad=True)
    moved = s._replace_primary(s._parts()[0] + delta)
    value = moved.sparsemap(penalize=penalize).value.sum()
    return value, torch.autograd.grad(value, delta)[0]


@pytest.mark.parametrize("method", ["away", "pairwise"])
def test_derivatives_of_conditional_gradients(method: str) -> None:
    """Also where the structures that are met depend on each other."""
    torch.manual_seed(1)
    x = randn(2, 6).requires_grad_()
    weights = randn(2, 6)
    found = [
        torch.autograd.grad((result.marginals * weights).sum(), x)[0]
        for result in (
            sx.KSubset(x, 3).sparsemap(),
            sx.KSubset(x, 3).sparsemap(method=method, tol=1e-13, max_iter=5000),
        )
    ]
    torch.testing.assert_close(*found, atol=1e-6, rtol=0)


@pytest.mark.usefixtures("_solver")
def test_forbidden_parts_have_no_gradient() -> None:
    torch.manual_seed(0)
    x = randn(3, 5, 3)
    x[0, 1, 2] = x[1, :, 0] = -inf
    transition = randn(3, 3)
    transition[1, 2] = -inf
    x.requires_grad_(), transition.requires_grad_()
    result = sx.LinearChain(x, transition).sparsemap()
    assert bool((result.marginals[x == -inf] == 0).all())
    loss = (result.marginals**3).sum() + result.probs.square().sum() + result.value.sum()
    first = torch.autograd.grad(loss, (x, transition), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), (x, transition))
    for grads in (first, second):
        assert all(bool(g.isfinite().all()) for g in grads)
        assert not bool(grads[0][x == -inf].any()) and not bool(grads[1][transition == -inf].any())


@pytest.mark.usefixtures("_solver")
def test_transforms() -> None:
    torch.manual_seed(0)
    x, transition = randn(4, 3), randn(3, 3)

    def loss(x: Tensor) -> Tensor:
        return sx.LinearChain(x, transition).sparsemap().marginals.square().sum()

    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(x), expected)
    leaf = x.clone().requires_grad_()
    hessian = torch.autograd.functional.hessian(loss, leaf)
    torch.testing.assert_close(torch.func.jacrev(torch.func.grad(loss))(x), hessian)
    torch.testing.assert_close(torch.func.hessian(loss)(x), hessian)
    torch.testing.assert_close(torch.func.jacfwd(loss)(x), expected)
    to = randn(4, 3)
    along = (expected * to).sum()
    torch.testing.assert_close(torch.func.jvp(loss, (x,), (to,))[1], along)
    with forward_ad.dual_level():
        dual = loss(forward_ad.make_dual(x, to))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, along)
    with pytest.raises(RuntimeError, match=r"no rule for torch\.vmap.*one of the batch"):
        torch.func.vmap(loss)(torch.stack([x, x]))
    torch.compiler.reset()
    leaf = x.clone().requires_grad_()
    (compiled,) = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(leaf), leaf)
    torch.testing.assert_close(compiled, expected)


def test_inputs_are_left_alone() -> None:
    x, transition = randn(4, 3), randn(3, 3)
    kept = x.clone(), transition.clone()
    result = sx.LinearChain(x, transition).sparsemap()
    assert torch.equal(x, kept[0]) and torch.equal(transition, kept[1])
    assert not result.marginals.requires_grad and not x.requires_grad


# -- projections ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("_solver")
def test_projections() -> None:
    torch.manual_seed(0)
    s = sx.LinearChain(randn(2, 4, 3), randn(3, 3), lengths=torch.tensor([4, 3]))
    point = randn(2, 4, 3)
    point[1, 3] = nan  # padding
    mu = sx.project(s, point)
    torch.testing.assert_close(sx.project(s, mu), mu)  # it is there already
    torch.testing.assert_close(sx.project(s, s.argmax()), s.argmax())
    inside = torch.softmax(randn(2, 4, 3), -1)
    inside[1, 3] = 0
    torch.testing.assert_close(sx.project(s, inside), inside)  # any rows on the simplex
    many = torch.stack([point, mu, mu * 2])
    assert sx.project(s, many).shape == (3, 2, 4, 3)
    torch.testing.assert_close(sx.project(s, many)[1], mu)
    result = projection(s, point)
    torch.testing.assert_close(result.marginals, mu)
    assert result.structures.shape[0] == 2


@pytest.mark.usefixtures("_solver")
def test_projections_keep_out_what_is_forbidden() -> None:
    torch.manual_seed(0)
    transition = randn(3, 3)
    transition[0, 1] = -inf
    unary = randn(4, 3)
    unary[2, 2] = -inf
    s = sx.LinearChain(unary, transition)
    point = randn(4, 3).requires_grad_()
    result = projection(s, point)
    assert result.marginals[2, 2] == 0 and result.additional[0][..., 0, 1] == 0
    every = s.enumerate_support()
    every = every[s.score(every) > -inf]
    expected = by_quadratic_program((every * point.detach()).sum((-2, -1)), every)
    torch.testing.assert_close(result.marginals.detach(), expected, atol=1e-6, rtol=0)
    assert gradcheck(lambda p: sx.project(s, p), point)


def test_a_free_path_has_no_projection() -> None:
    s = sx.GridPath(-torch.ones(3, 3), moves="all")
    assert bool((s.sparsemap().marginals.sum() >= 3).all())
    with pytest.raises(ValueError, match="positive"):
        sx.project(s, torch.ones(3, 3))


# -- a user's oracle -----------------------------------------------------------------------------


def best_of_each_row(scores: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1])


@pytest.mark.parametrize("method", ["active-set", "pairwise"])
def test_users_oracle(method: str) -> None:
    torch.manual_seed(0)
    x = randn(5, 4, 3).requires_grad_()
    result = sx.sparsemap_oracle(best_of_each_row, x, method=method, tol=1e-10)
    torch.testing.assert_close(result.marginals, sx.sparsemax(x), atol=1e-4, rtol=0)
    assert result.additional == () and result.edges.shape[-1] == 0
    if method == "active-set":
        assert gradcheck(lambda x: sx.sparsemap_oracle(best_of_each_row, x).marginals, x)
        warm = sx.sparsemap_oracle(best_of_each_row, x, init=result)
        assert bool((warm.iterations <= 2).all())


def test_users_oracle_confirms_what_it_starts_from() -> None:
    """Of other sizes, it would start from points outside the polytope."""

    def best(k: int) -> Any:
        return lambda s: torch.zeros_like(s).scatter(-1, s.topk(k).indices, 1.0)

    x, last = 0.3 * randn(3, 5), None
    for k in (1, 2, 3, 2, 2):
        for method in ("active-set", "pairwise"):
            cold, warm = (
                sx.sparsemap_oracle(best(k), x, method=method, tol=1e-10, init=init)
                for init in (None, last)
            )
            torch.testing.assert_close(warm.marginals, cold.marginals, atol=1e-5, rtol=0)
            torch.testing.assert_close(warm.marginals.sum(-1), torch.full((3,), k, dtype=f64))
        last = warm
    assert bool((warm.iterations <= 4).all())


@pytest.mark.parametrize("reused", [False, True])
def test_users_oracle_may_write_into_its_arguments(reused: bool) -> None:
    x = 0.1 * randn(4, 3, 3)
    given, room = x.clone(), torch.zeros(4, 3, 3, dtype=f64)

    def careless(scores: Tensor, items: Tensor) -> Tensor:
        best = scores.argmax(-1, keepdim=True)
        items.fill_(-1)
        out = room[: len(scores)] if reused else scores  # one buffer for all answers, or its input
        return out.zero_().scatter_(-1, best, 1.0)

    given.requires_grad_()
    result = sx.sparsemap_oracle(careless, given)
    torch.testing.assert_close(result.marginals, sx.sparsemax(x))
    assert torch.equal(given.detach(), x)
    (ours,) = torch.autograd.grad(result.marginals.square().sum(), given)
    again = x.requires_grad_()
    (wanted,) = torch.autograd.grad(sx.sparsemax(again).square().sum(), again)
    torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("method", ["active-set", "away"])
@pytest.mark.parametrize("most", [1, 2, 5, 9, 13, 20])
def test_users_oracle_is_called_at_most_max_iter_times(method: str, most: int) -> None:
    calls = []

    def best(scores: Tensor) -> Tensor:
        calls.append(len(scores))
        return best_of_each_row(scores)

    x = (0.1 * randn(2, 4, 3)).requires_grad_()
    first = sx.sparsemap_oracle(best_of_each_row, x)
    for init in (None, first):
        calls.clear()
        found = sx.sparsemap_oracle(best, x, method=method, max_iter=most, init=init)
        confirming = 0 if init is None else init.probs.shape[-1]
        assert len(calls) <= max(most, 2) + confirming  # the second finds the gap
        assert bool((found.iterations <= max(most, 2)).all())


def test_users_oracle_of_an_empty_batch() -> None:
    result = sx.sparsemap_oracle(lambda s: s.softmax(-1).round(), torch.zeros(0, 4))
    assert result.marginals.shape == (0, 4) and result.probs.shape[0] == 0


def test_users_oracle_that_wants_items() -> None:
    x, sizes, seen = 0.1 * randn(3, 2, 5), torch.tensor([1, 1, 5, 1, 4, 5]), []

    def best(scores: Tensor, items: Tensor) -> Tensor:
        seen.append(len(items))
        inside = torch.arange(5) < sizes[items][:, None]
        return torch.nn.functional.one_hot(torch.where(inside, scores, -inf).argmax(-1), 5)

    result = sx.sparsemap_oracle(best, x, batch_dims=2)
    expected = sx.sparsemax(x, mask=torch.arange(5) < sizes.reshape(3, 2, 1))
    torch.testing.assert_close(result.marginals, expected)
    assert min(seen) < 6, "items that are done are still asked for"
    alone = sx.sparsemap_oracle(lambda s: best_of_each_row(s), x[0, 0], batch_dims=0)
    torch.testing.assert_close(alone.marginals, sx.sparsemax(x[0, 0]))


# -- errors --------------------------------------------------------------------------------------


def fails(call: Any, *words: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


def test_errors() -> None:
    s = sx.Choice(torch.zeros(2, 3))
    fails(lambda: s.sparsemap(method="newton"), "Choice", "active-set", "'newton'")
    fails(lambda: s.sparsemap(penalize="none"), "penalize", "primary", "'none'")
    fails(lambda: s.sparsemap(max_iter=0), "max_iter", "0")
    fails(lambda: s.sparsemap(tol=0.0), "tol", "0.0")
    fails(lambda: s.sparsemap(init=s.argmax()), "init", "Tensor")
    fails(lambda: s.sparsemap(init=s[0].sparsemap()), "init", "(2, 3)", "(3,)")
    chain = sx.LinearChain(torch.zeros(2, 3), torch.zeros(3, 3))
    steps = sx.LinearChain(torch.zeros(2, 3), torch.zeros(1, 3, 3)).sparsemap()
    assert chain.sparsemap(init=steps).marginals.shape == (2, 3)
    longer = sx.LinearChain(torch.zeros(3, 3), torch.zeros(3, 3))
    other = sx.LinearChain(torch.zeros(3, 3), torch.zeros(2, 3, 3)).sparsemap()
    fails(lambda: longer.sparsemap(init=other), "init", "additional parts")
    fails(lambda: sx.project(s, torch.zeros(3, 2)), "project", "(2, 3)", "(3, 2)")
    fails(lambda: sx.project(s, torch.zeros(2, 3, dtype=torch.int64)), "project", "int64")
    fails(lambda: sx.sparsemap_oracle(lambda x: x[0], torch.zeros(2, 3)), "(2, 3)", "(3,)")
    fails(lambda: sx.sparsemap_oracle(lambda x: 1, torch.zeros(2, 3)), "argmax_fn", "int")
    fails(lambda: sx.sparsemap_oracle(abs, torch.full((2, 3), nan)), "scores", "nan")


@pytest.mark.parametrize("wrong", [nan, inf])
def test_an_oracle_that_returns_no_number(wrong: float) -> None:
    """It is named, not the scores: nothing is forbidden here."""

    def lost(x: Tensor) -> Tensor:
        return (x == x.amax(-1, True)) * torch.where(x > 1, wrong, 1.0)

    x = torch.tensor([[0.0, 1.0], [1.0, 2.0]])
    fails(lambda: sx.sparsemap_oracle(lost, x), "argmax_fn returned", "item 1", str(wrong))


@pytest.mark.usefixtures("_solver")
def test_an_item_without_a_structure() -> None:
    x = torch.zeros(3, 4)
    x[1] = -inf
    fails(lambda: sx.Choice(x).sparsemap(), "Choice.sparsemap", "item 1", "-inf")
    fails(lambda: sx.sparsemap_oracle(best_of_each_row, x), "sparsemap_oracle", "item 1")
    result = sx.Choice(x, validate_args=False).sparsemap()
    assert bool(result.marginals[1].isnan().all()) and bool(result.value[1].isnan())
    torch.testing.assert_close(result.marginals[[0, 2]], torch.full((2, 4), 0.25))


def test_examples_of_the_page() -> None:
    text = (Path(__file__).parent.parent / "docs" / "sparsemap.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    name = "sparsemap.md"
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, name, name, 0)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    result = doctest.DocTestRunner(optionflags=flags).run(test)
    assert result.attempted > 10 and not result.failed


@pytest.mark.parametrize("method", ["active-set", "pairwise"])
@pytest.mark.parametrize("backend", ["cpu", "naive"])
def test_what_all_scores_share_costs_no_digits(backend: str, method: str) -> None:
    torch.manual_seed(0)
    grid = 2.0**20  # so that sums with it are exact
    scores = (grid * 0.3 * torch.randn(2, 6, 6, dtype=torch.float64)).round() / grid
    with sx.backend(backend):
        one, other = (
            sx.DependencyTree(scores + shift).sparsemap(method=method) for shift in (0.0, 2.0**24)
        )
    tolerance = 1e-12 if method == "active-set" else 1e-3
    torch.testing.assert_close(other.marginals, one.marginals, rtol=0, atol=tolerance)
    if method == "active-set":
        assert other.num_active.tolist() == one.num_active.tolist()
