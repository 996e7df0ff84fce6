"""The compiled SparseMAP against the one in torch, on every structure that it covers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from table import ROWS, f64, randn
from torch import Tensor

import structmax as sx
from structmax.sparse import cpu
from structmax.sparse.result import Solution
from structmax.sparse.solve import _solve as solve_by_any

# the smoothing plays no part: one row of each kind
KINDS = {name.split("/")[0]: make for name, make in reversed(ROWS.items())}
NOT_COVERED = {"grid-all"}
COVERED = sorted(set(KINDS) - NOT_COVERED)
TOL = 1e-10


def change(structure: Any, edit: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with other scores."""
    tensors = {name: t for name, (t, _) in structure._tensors().items()}
    edited = {name: edit(t) if t.is_floating_point() else t for name, t in tensors.items()}
    return structure._rebuild(**edited)


def compiled(structure: Any, penalize: str = "primary", init: Any = None, max_iter: int = 1000):
    solution = cpu.solve(structure, penalize, max_iter, TOL, init)
    assert solution is not None
    return solution


def by_torch(monkeypatch: Any, structure: Any, penalize: str = "primary") -> Solution:
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "solve", lambda *args: None)
        return solve_by_any(structure, "active-set", 1000, TOL, None, penalize)


def mean(solution: Solution) -> Tensor:
    counts = torch.cat([solution.vertices, solution.edges], -1).double()
    return torch.einsum("bk,bkd->bd", solution.probs, counts)


def scores_of(structure: Any) -> Tensor:
    items = structure.batch_shape.numel()
    return torch.cat([p.reshape(items, -1).double() for p in structure._parts()], -1)


def objective(structure: Any, mu: Tensor, width: int) -> Tensor:
    linear = torch.where(mu != 0, scores_of(structure) * mu, 0.0).sum(-1)
    return linear - mu[:, :width].square().sum(-1) / 2


def check(monkeypatch: Any, structure: Any, penalize: str = "primary", scale: float = 1.0) -> None:
    """Both solvers give the same answer, which meets the conditions of an optimum."""
    if structure._silent:
        penalize = "primary"
    ours, other = compiled(structure, penalize), by_torch(monkeypatch, structure, penalize)
    assert torch.equal(ours.gap.isnan(), other.gap.isnan())
    good = ~ours.gap.isnan()
    assert torch.equal(good, ~ours.probs.isnan().any(-1))
    d = structure.event_shape.numel()
    width = d if penalize == "primary" else scores_of(structure).shape[1]
    mu, nu = mean(ours), mean(other)
    torch.testing.assert_close(mu[good, :width], nu[good, :width], rtol=0, atol=1e-8)
    values = (objective(structure, m, width)[good] for m in (mu, nu))
    torch.testing.assert_close(*values, rtol=1e-9, atol=1e-9 * scale)
    if bool(good.all()):
        check_optimal(structure, ours, width, 1e-8 * (d + scale))


def check_optimal(structure: Any, solution: Solution, width: int, atol: float) -> None:
    p, counts = solution.probs, torch.cat([solution.vertices, solution.edges], -1).double()
    assert bool((p >= 0).all()) and bool((p[:, :-1] >= p[:, 1:]).all())
    torch.testing.assert_close(p.sum(-1), torch.ones(len(p), dtype=f64))
    unused = p == 0
    assert torch.equal(counts[unused], counts[:, :1].expand_as(counts)[unused])
    mu = mean(solution)
    gradient = scores_of(structure)
    gradient[:, :width] -= mu[:, :width]
    each = torch.where(counts != 0, gradient[:, None] * counts, 0.0).sum(-1)
    average = (each * p).sum(-1, keepdim=True)
    assert bool(((each - average).abs() * (p > 0) <= atol).all())  # all active are equally good
    sizes = [q.shape[len(structure.batch_shape) :] for q in structure._parts()]
    parts = gradient.split([size.numel() for size in sizes], -1)
    best, _ = structure._argmax_parts(
        [g.reshape(*structure.batch_shape, *size) for g, size in zip(parts, sizes, strict=True)]
    )
    assert bool((best.reshape(-1, 1) - average <= atol).all())  # and nothing is better
    assert bool((solution.gap <= atol).all())
    z = solution.vertices.reshape(*structure.batch_shape, -1, *structure.event_shape)
    z = z.movedim(len(structure.batch_shape), 0)
    assert bool((structure.score(z.to(structure.dtype)) > -math.inf).all())  # they are structures


@pytest.mark.parametrize("penalize", ["primary", "all"])
@pytest.mark.parametrize("kind", COVERED)
def test_random(kind: str, penalize: str, monkeypatch: Any) -> None:
    torch.manual_seed(0)
    check(monkeypatch, KINDS[kind](), penalize)


@pytest.mark.parametrize("kind", COVERED)
def test_ties(kind: str, monkeypatch: Any) -> None:
    torch.manual_seed(1)
    check(monkeypatch, change(KINDS[kind](), torch.round))
    check(monkeypatch, change(KINDS[kind](), torch.zeros_like), "all")


@pytest.mark.parametrize("kind", COVERED)
def test_forbidden(kind: str, monkeypatch: Any) -> None:
    """Parts of score −inf; an item may be left with no structure, which both say by NaN."""
    for seed in range(3):
        torch.manual_seed(seed)
        forbid = change(
            KINDS[kind](), lambda t: torch.where(torch.rand_like(t) < 0.1, -math.inf, t)
        )
        check(monkeypatch, forbid, ("primary", "all")[seed % 2])


@pytest.mark.parametrize("scale", [1e-3, 30.0, 1e3])
@pytest.mark.parametrize("kind", COVERED)
def test_scales(kind: str, scale: float, monkeypatch: Any) -> None:
    torch.manual_seed(2)
    check(monkeypatch, change(KINDS[kind](), lambda t: t * scale), scale=scale)


def test_not_covered() -> None:
    for kind in sorted(NOT_COVERED):
        assert cpu.solve(KINDS[kind](), "primary", 1000, TOL, None) is None


def padded(*shape: int) -> Tensor:
    return torch.full(shape, math.nan, dtype=f64)


def ragged_chain() -> sx.LinearChain:
    unary, lengths = padded(4, 5, 3), torch.tensor([5, 1, 3, 2])
    for row, n in zip(unary, lengths.tolist(), strict=True):
        row[:n] = randn(n, 3)
    return sx.LinearChain(unary, randn(3, 3), randn(3), randn(4, 3), lengths)


def ragged_chain_by_step() -> sx.LinearChain:
    unary, transition, lengths = randn(3, 4, 3), padded(3, 3, 3, 3), torch.tensor([4, 1, 2])
    for row, n in zip(transition, lengths.tolist(), strict=True):
        row[: n - 1] = randn(n - 1, 3, 3)
    return sx.LinearChain(unary, transition, lengths=lengths)


def square(border: int = 0) -> tuple[Tensor, Tensor]:
    scores, lengths = padded(3, 5 + border, 5 + border), torch.tensor([5, 1, 4])
    for square, n in zip(scores, (lengths + border).tolist(), strict=True):
        square[:n, :n] = randn(n, n)
    return scores, lengths


def ragged_pair() -> tuple[Tensor, tuple[Tensor, Tensor]]:
    scores, rows, columns = padded(4, 4, 5), torch.tensor([4, 1, 2, 4]), torch.tensor([5, 1, 4, 2])
    for cells, n, m in zip(scores, rows.tolist(), columns.tolist(), strict=True):
        cells[:n, :m] = randn(n, m)
    return scores, (rows, columns)


def ragged_segments() -> sx.SemiMarkov:
    scores, lengths = padded(3, 4, 2, 2), torch.tensor([4, 1, 3])
    for row, n in zip(scores, lengths.tolist(), strict=True):
        for start in range(n):
            row[start, : n - start] = randn(min(2, n - start), 2)
    return sx.SemiMarkov(scores, randn(2, 2), lengths)


def ragged_subset() -> sx.KSubset:
    scores, lengths = padded(3, 6), torch.tensor([6, 2, 4])
    for row, n in zip(scores, lengths.tolist(), strict=True):
        row[:n] = randn(n)
    return sx.KSubset(scores, (1, 3), lengths)


def ragged_grammar() -> sx.PCFG:
    """An item of one word has no tree."""
    emission, lengths = padded(4, 5, 2), torch.tensor([5, 1, 3, 2])
    for row, n in zip(emission, lengths.tolist(), strict=True):
        row[:n] = randn(n, 2)
    return sx.PCFG(randn(4, 2), randn(2, 4, 4), emission, lengths)


RAGGED: dict[str, Callable[[], sx.Structure]] = {
    "chain": ragged_chain,
    "chain-step": ragged_chain_by_step,
    "binary-tree": lambda: sx.BinaryTree(*square()),
    "spanning-tree": lambda: sx.SpanningTree(*square()),
    "projective": lambda: sx.DependencyTree(*square(1), projective=True),  # type: ignore[abstract]
    "nonprojective": lambda: sx.DependencyTree(*square(1)),  # type: ignore[abstract]
    "multi": lambda: sx.DependencyTree(*square(1), root="multi"),  # type: ignore[abstract]
    "assignment": lambda: sx.Assignment(*ragged_pair()),
    "dtw": lambda: sx.Alignment(*ragged_pair()),
    "semi-markov": ragged_segments,
    "subset": ragged_subset,
    "pcfg": ragged_grammar,
}


@pytest.mark.parametrize("penalize", ["primary", "all"])
@pytest.mark.parametrize("kind", RAGGED)
def test_ragged(kind: str, penalize: str, monkeypatch: Any) -> None:
    """Padding holds NaN."""
    torch.manual_seed(3)
    check(monkeypatch, RAGGED[kind](), penalize)


def test_conditioned_subset(monkeypatch: Any) -> None:
    torch.manual_seed(0)
    subset = sx.KSubset(randn(2, 6), (1, 3))
    include = torch.tensor([False, True, False, False, True, False])
    check(monkeypatch, subset.condition(include=include))


LARGE: dict[str, Callable[[float], sx.Structure]] = {
    "chain": lambda s: sx.LinearChain(s * randn(3, 20, 6), s * randn(6, 6)),
    "tree": lambda s: sx.DependencyTree(s * randn(3, 15, 15)),  # type: ignore[abstract]
    "binary-tree": lambda s: sx.BinaryTree(s * randn(3, 14, 14)),
    "assignment": lambda s: sx.Assignment(s * randn(3, 10, 12)),
    "subset": lambda s: sx.KSubset(s * randn(3, 60), 9),
    "pcfg": lambda s: sx.PCFG(s * randn(3), s * randn(3, 6, 6), s * randn(3, 9, 3)),
}


@pytest.mark.parametrize("spread", [0.05, 1.0, 100.0])
@pytest.mark.parametrize("kind", LARGE)
def test_large(kind: str, spread: float, monkeypatch: Any) -> None:
    """Many active structures, some of which come and go."""
    torch.manual_seed(4)
    structure = LARGE[kind](spread)
    if spread >= 1:
        return check(monkeypatch, structure, scale=spread)
    found = compiled(structure)  # that is much for torch
    assert int((found.probs > 0).sum(-1).max()) > 32
    check_optimal(structure, found, structure.event_shape.numel(), 1e-7)


@pytest.mark.parametrize("kind", ["chain-shared", "nonprojective", "subset", "binary-tree", "pcfg"])
def test_warm_start(kind: str) -> None:
    torch.manual_seed(5)
    structure = KINDS[kind]()
    cold = structure.sparsemap()
    again = compiled(structure, init=cold)
    assert bool((again.iterations <= 2).all())
    torch.testing.assert_close(mean(again)[:, : structure.event_shape.numel()],
                               cold.marginals.flatten(1), rtol=0, atol=1e-9)  # fmt: skip
    other = change(structure, lambda t: t + 0.1 * torch.randn_like(t))
    start = compiled(other, init=cold)
    torch.testing.assert_close(
        objective(other, mean(start), structure.event_shape.numel()),
        objective(other, mean(compiled(other)), structure.event_shape.numel()),
    )
    check_optimal(other, start, structure.event_shape.numel(), 1e-8)
    forbid = change(structure, lambda t: torch.where(torch.rand_like(t) < 0.1, -math.inf, t))
    cold_gap, warm_gap = (compiled(forbid, init=i).gap for i in (None, cold))
    assert torch.equal(cold_gap.isnan(), warm_gap.isnan())


def test_few_steps() -> None:
    torch.manual_seed(6)
    chain = sx.LinearChain(randn(4, 10, 4), randn(4, 4))
    short, whole = compiled(chain, max_iter=5), compiled(chain)
    assert bool((short.iterations <= 5).all()) and bool((short.gap > 0.01).any())
    lost = objective(chain, mean(whole), 40) - objective(chain, mean(short), 40)
    assert bool((lost >= -1e-12).all()) and bool((lost <= short.gap + 1e-12).all())


SMALL_SCORES = {
    "choice": lambda: sx.Choice(0.1 * randn(30, 5)),
    "chain": lambda: sx.LinearChain(0.1 * randn(100, 3, 2), 0.1 * randn(2, 2)),
    "tree": lambda: sx.BinaryTree(1e-3 * randn(20, 5, 5)),
    "subset": lambda: sx.KSubset(0.1 * randn(30, 10), 4),
    "at most one": lambda: sx.KSubset(0.1 * randn(100, 4), (0, 1)),
    "path": lambda: sx.Path(
        torch.tensor([(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)]), 1e-3 * randn(30, 5), 0, 3
    ),
}


@pytest.mark.parametrize("kind", SMALL_SCORES)
def test_a_tolerance_below_rounding(kind: str) -> None:
    """What is left then is rounding: the best structure is in the support, or in its hull."""
    torch.manual_seed(8)
    structure = SMALL_SCORES[kind]()
    usual, exact = structure.sparsemap(), structure.sparsemap(tol=1e-300)
    torch.testing.assert_close(exact.marginals, usual.marginals, atol=1e-6, rtol=0)
    assert bool((exact.gap < 1e-12).all()) and bool((exact.iterations < 100).all())


def test_starts_of_other_kinds() -> None:
    """What an item starts from may be dependent, many, or no structure at all."""
    torch.manual_seed(9)
    scores, square = 0.01 * randn(2, 40), randn(2, 4, 4)
    subset, choice = sx.KSubset(scores, 3), sx.Choice(scores)
    for structure, init in (
        (subset, subset.sparsemap(method="frank-wolfe", max_iter=100, tol=1e-14)),
        (choice, choice.sparsemap()),
        (sx.Assignment(square), sx.BinaryTree(square).sparsemap()),
    ):
        cold, warm = structure.sparsemap(), structure.sparsemap(init=init)
        torch.testing.assert_close(warm.marginals, cold.marginals, atol=1e-6, rtol=0)


def test_no_structure() -> None:
    unary = randn(3, 4, 2)
    unary[1, 2] = -math.inf
    with pytest.raises(ValueError, match=r"sparsemap.*item|item.*sparsemap|no structure"):
        sx.LinearChain(unary, randn(2, 2)).sparsemap()
    unary[1, 2] = math.nan
    found = sx.LinearChain(unary, randn(2, 2), validate_args=False).sparsemap()
    assert bool(found.marginals[1].isnan().all()) and not bool(found.marginals[0].isnan().any())
    scores = randn(2, 3, 3)
    scores[1, 0] = -math.inf
    for bad in (scores, scores.nan_to_num(neginf=math.nan)):
        found = sx.Assignment(bad, validate_args=False).sparsemap()
        assert found.marginals.isnan().flatten(1).all(1).tolist() == [False, True]
    subsets = torch.zeros(3, 4, dtype=f64)
    subsets[1, :3], subsets[2, 1] = -math.inf, math.nan
    found = sx.KSubset(subsets, 2, torch.tensor([4, 4, 4]), validate_args=False).sparsemap()
    assert found.marginals.isnan().all(1).tolist() == [False, True, True]


def test_an_interrupt_is_what_it_was(monkeypatch: Any) -> None:
    """Numba gives a SystemError where Ctrl-C came while a kernel ran."""

    def run(*_: Any) -> None:
        try:
            try:
                raise KeyboardInterrupt
            except KeyboardInterrupt as first:
                raise ValueError from first
        except ValueError as second:
            raise SystemError("a result besides") from second

    monkeypatch.setattr(cpu, "_oracle", lambda *_: (run, 1, 1))
    with pytest.raises(KeyboardInterrupt):
        sx.Choice(randn(1, 3)).sparsemap()


def test_threads() -> None:
    """The bits of an item depend neither on threads nor on the items beside it."""
    torch.manual_seed(7)
    unary, transition, threads = randn(24, 15, 5), randn(5, 5), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        parallel = sx.LinearChain(unary, transition).sparsemap().marginals
        torch.set_num_threads(1)
        serial = sx.LinearChain(unary, transition).sparsemap().marginals
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(parallel, serial)
    assert torch.equal(sx.LinearChain(unary[5], transition).sparsemap().marginals, serial[5])


@pytest.mark.parametrize("penalize", ["primary", "all"])
@pytest.mark.parametrize(
    "kind", ["chain-shared", "nonprojective", "dtw-moves", "edit", "subset", "pcfg"]
)
def test_derivatives(kind: str, penalize: str, monkeypatch: Any) -> None:
    """Those by lists of parts and a factor are those of the dense formula."""
    torch.manual_seed(8)
    structure = KINDS[kind]()
    names = [name for name, (t, _) in structure._tensors().items() if t.is_floating_point()]
    given = {name: t for name, (t, _) in structure._tensors().items()}
    leaves = [given[name].detach().clone().requires_grad_() for name in names]
    weights: dict[torch.Size, Tensor] = {}

    def run() -> list[Tensor]:
        same = structure._rebuild(**{**given, **dict(zip(names, leaves, strict=True))})
        found = same.sparsemap(penalize=penalize)
        total = found.value.sum()
        for part in (found.marginals, *found.additional):
            total = total + (weights.setdefault(part.shape, torch.randn_like(part)) * part).sum()
        return [found.value, found.marginals, *torch.autograd.grad(total, leaves)]

    ours = run()
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "solve", lambda *args: None)
        for one, two in zip(ours, run(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-8)


def test_gradgradcheck() -> None:
    torch.manual_seed(0)

    def run(unary: Tensor, transition: Tensor) -> tuple[Tensor, ...]:
        found = sx.LinearChain(unary, transition).sparsemap()
        return found.marginals, found.value, found.additional[0]

    inputs = randn(2, 4, 3).requires_grad_(), randn(3, 3).requires_grad_()
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    torch.manual_seed(9)
    unary, transition = torch.randn(2, 4, 3).to(dtype), torch.randn(3, 3).to(dtype)
    found = sx.LinearChain(unary, transition).sparsemap()
    exact = sx.LinearChain(unary.double(), transition.double()).sparsemap()
    assert found.marginals.dtype == found.structures.dtype == dtype
    torch.testing.assert_close(found.structures.double(), exact.structures)
    torch.testing.assert_close(found.value.double(), exact.value, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chain-shared", "nonprojective", "projective", "assignment"])
def test_many(kind: str, monkeypatch: Any) -> None:
    for seed in range(500):
        torch.manual_seed(seed)
        structure = KINDS[kind]()
        if seed % 3 == 0:
            structure = change(structure, lambda t: (3 * t).round())
        check(monkeypatch, structure, ("primary", "all")[seed % 2])
