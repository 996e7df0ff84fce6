"""fusedmax, oscarmax, csparsemax, csoftmax: against scipy, optimality conditions, each other.

The Triton kernels run on a CUDA device, or under Triton's interpreter on the CPU.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import numpy as np
import pytest
import scipy.optimize
import torch
from numpy.typing import NDArray
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
pytest.importorskip("triton")

from structmax import backend, csoftmax, csparsemax, fusedmax, oscarmax, sparsemax
from structmax.maps import gpu_structured
from structmax.maps.recipe import Map

# The interpreter computes with numpy, which warns of log 0 and of NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
nan, inf = math.nan, math.inf
TIED = {"fusedmax": fusedmax, "oscarmax": oscarmax}
BOUNDED = {"csparsemax": csparsemax, "csoftmax": csoftmax}

CASES: dict[str, Callable[..., Tensor]] = {  # every map as a function of x alone
    "fusedmax": lambda x, **kw: fusedmax(x, 0.3, **kw),
    "oscarmax": lambda x, **kw: oscarmax(x, 0.1, **kw),
    "csparsemax": lambda x, **kw: csparsemax(x, 0.45, 0.02, **kw),
    "csoftmax": lambda x, **kw: csoftmax(x, 0.45, 0.02, **kw),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    return CASES[request.param]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def bounds_for(x: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Upper and lower bounds, some of them tight, that allow a distribution in every row."""
    count = (x > -inf).sum(-1, keepdim=True).clamp(min=1)
    upper = ((0.2 + 2.0 * rand(*x.shape, seed=seed).to(x)) / count).clamp(max=1)
    total = torch.where(x > -inf, upper, 0.0).sum(-1, keepdim=True)
    upper = torch.where(total < 1.05, upper * 1.1 / total, upper)
    lower = torch.where(x > -inf, 0.5 * rand(*x.shape, seed=seed + 1).to(x) / count, 0.0)
    lower = torch.minimum(lower, upper)
    same = (rand(*x.shape, seed=seed + 2).to(x) < 0.1) & (x > -inf)
    return upper, torch.where(same & (upper < 0.4 / count), upper, lower)


# -- known values ----------------------------------------------------------------------------------


def test_known_values() -> None:
    x = torch.tensor([1.0, 2.1, 1.9], dtype=torch.float64)
    y = torch.tensor([0.5, 0.2, 0.45, 0.1], dtype=torch.float64)
    z, upper = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 0.5, 0.4])
    for name in ("naive", "cpu", "gpu"):
        with backend(name):
            pairs = [
                (fusedmax(x, 0.1), [0, 0.5, 0.5], 1e-12),
                (fusedmax(x, 0.05), [0, 0.525, 0.475], 1e-12),
                (oscarmax(y, 0.05), [0.3625, 0.1625, 0.3625, 0.1125], 1e-12),
                (csparsemax(z, upper), [0.1, 0.5, 0.4], 1e-6),
                (csoftmax(z, upper), [0.1614, 0.4386, 0.4], 1e-4),
            ]
        for p, expected, tolerance in pairs:
            np.testing.assert_allclose(p, expected, atol=tolerance)


# -- scipy -----------------------------------------------------------------------------------------


def solve(
    cost: Callable[[NDArray], float],
    slope: Callable[[NDArray], NDArray],
    start: NDArray,
    box: list[tuple[float, float | None]],
    n: int,
    above: NDArray | None = None,
) -> NDArray:
    """The first n variables of the minimum with Σ of them 1 and ``above @ v ≥ 0``, by SLSQP."""
    ones = np.concatenate([np.ones(n), np.zeros(len(start) - n)])
    rules = [{"type": "eq", "fun": lambda v: ones @ v - 1, "jac": lambda v: ones}]
    if above is not None:
        rules.append({"type": "ineq", "fun": lambda v: above @ v, "jac": lambda v: above})
    found = scipy.optimize.minimize(
        cost, start, jac=slope, bounds=box, constraints=rules, method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    )  # fmt: skip
    return found.x[:n]


def solve_tied(name: str, x: NDArray, strength: float) -> NDArray:
    """Each penalty is a variable s, above pᵢ₊₁ − pᵢ and pᵢ − pᵢ₊₁, or above pᵢ and pⱼ."""
    n, rows = len(x), []
    if name == "fusedmax":
        pairs = [(i, i + 1) for i in range(n - 1)]
    else:
        pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
    for s, (i, j) in enumerate(pairs):
        for first, second in ((i, j), (j, i)):
            row = np.zeros(n + len(pairs))
            row[n + s], row[first] = 1, -1
            row[second] = 1 if name == "fusedmax" else 0
            rows.append(row)
    start = np.concatenate([np.full(n, 1 / n), np.ones(len(pairs))])
    tail = np.full(len(pairs), strength)
    return solve(
        lambda v: 0.5 * ((v[:n] - x) ** 2).sum() + strength * v[n:].sum(),
        lambda v: np.concatenate([v[:n] - x, tail]),
        start, [(0, None)] * len(start), n, np.array(rows) if rows else None,
    )  # fmt: skip


def solve_bounded(name: str, x: NDArray, upper: NDArray, lower: NDArray) -> NDArray:
    start = lower + (upper - lower) * (1 - lower.sum()) / (upper - lower).sum()
    if name == "csparsemax":
        return solve(
            lambda p: 0.5 * ((p - x) ** 2).sum(), lambda p: p - x, start,
            list(zip(lower, upper)), len(x),
        )  # fmt: skip
    box = list(zip(np.maximum(lower, 1e-14), np.maximum(upper, 1e-14)))
    return solve(
        lambda p: (p * np.log(p) - p * x).sum(), lambda p: np.log(p) + 1 - x, start, box, len(x)
    )


ROWS = {
    "random": randn(8, 5),
    "ties": torch.tensor([[1.0, 1.0, 0.5, 0.5, 0.0], [0.0, 1.0, 0.0, 1.0, 1.0]]).double(),
    "equal": torch.full((1, 5), 3.0, dtype=torch.float64),
    "one": torch.tensor([[-7.0]], dtype=torch.float64),
    "close": 1e-6 * randn(4, 5),
    "far": torch.tensor([[1e6, 1e6 - 0.3, 0.0, -1e6, 1e6 - 0.5]], dtype=torch.float64),
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", TIED)
def test_tied_maps_agree_with_scipy(name: str, rows: str) -> None:
    for x in ROWS[rows]:
        for strength in (0.0, 0.05, 0.4, 3.0):
            p = TIED[name](x, strength).numpy()
            centred = (x - x.amax()).clamp(min=-20).numpy()  # what SLSQP can bear
            np.testing.assert_allclose(p, solve_tied(name, centred, strength), atol=2e-6)


@pytest.mark.parametrize("rows", [r for r in ROWS if r != "one"])
@pytest.mark.parametrize("name", BOUNDED)
def test_bounded_maps_agree_with_scipy(name: str, rows: str) -> None:
    x = ROWS[rows]
    upper, lower = bounds_for(x)
    for bound in (torch.zeros_like(lower), lower):
        p = BOUNDED[name](x, upper, bound)
        for r in range(len(x)):
            centred = (x[r] - x[r].amax()).clamp(min=-20).numpy()
            q = solve_bounded(name, centred, upper[r].numpy(), bound[r].numpy())
            np.testing.assert_allclose(p[r], q, atol=5e-6)


# -- the conditions of optimality, for long rows ---------------------------------------------------


def runs_of(p: NDArray) -> tuple[NDArray, NDArray]:
    """Where runs of equal p start, and of which run every place is."""
    starts = np.concatenate([[0], np.flatnonzero(np.diff(p)) + 1])
    return starts, np.repeat(np.arange(len(starts)), np.diff([*starts, len(p)]))


def sums_within(x: NDArray, starts: NDArray, run: NDArray) -> NDArray:
    """Cumulative sums that begin afresh with every run."""
    total = np.cumsum(x)
    return total - (total - x)[starts][run]


def check_fusedmax(x: NDArray, p: NDArray, strength: float, slack: float) -> None:
    """pᵢ − xᵢ + τ = wᵢ − wᵢ₋₁ + νᵢ with |w| ≤ strength, w = ±strength where p steps, ν ≥ 0 = pν.

    In runs of p > 0 this determines τ and w; in runs of zeros the largest w is followed.
    """
    starts, run = runs_of(p)
    steps = strength * np.sign(p[starts[1:]] - p[starts[1:] - 1])
    left, right = np.concatenate([[0], steps]), np.concatenate([steps, [0]])
    size, positive = np.bincount(run), p[starts] > 0
    taus = ((right - left - np.add.reduceat(p - x, starts)) / size)[positive]
    tau = np.mean(taus)
    np.testing.assert_allclose(taus, tau, atol=slack)
    place = np.arange(len(p)) - starts[run] + 1
    w = left[run] + sums_within(p - x + tau, starts, run)
    assert (np.abs(w) <= strength + slack * place)[positive[run]].all()
    for k in np.flatnonzero(~positive):
        w = left[k]
        for step in (tau - x[starts[k] : starts[k] + size[k]]).tolist():
            w = min(w + step, strength)
            assert w >= -strength - slack
        assert w >= right[k] - slack


def check_oscarmax(x: NDArray, p: NDArray, strength: float, slack: float) -> None:
    """x − p − τ is a subgradient: on a cluster, a mean of permutations of strength · (n − rank)."""
    order = np.lexsort((-x, -p))
    x, p = x[order], p[order]
    weight = strength * np.arange(len(x) - 1, -1, -1.0)
    starts, run = runs_of(p)
    tau = (x - p - weight)[run == 0].mean()
    excess = sums_within(x - p - tau - weight, starts, run)
    room = slack * (np.arange(len(p)) - starts[run] + 1)
    assert (excess <= room).all()
    last = np.append(starts[1:], len(p)) - 1
    last = last[p[last] > 0]
    assert (np.abs(excess[last]) <= room[last]).all()


def check_bounded(
    name: str, x: NDArray, p: NDArray, upper: NDArray, lower: NDArray, slack: float
) -> None:
    z = x - (np.log(p) if name == "csoftmax" else p)
    free = (lower < p) & (p < upper)
    tau = np.median(z[free])
    np.testing.assert_allclose(z[free], tau, atol=slack)
    moves = lower < upper
    assert (z[(p >= upper) & moves] >= tau - slack).all()
    assert (z[(p <= lower) & moves] <= tau + slack).all()


def check_simplex(p: Tensor, slack: float) -> None:
    assert bool((p >= 0).all())
    np.testing.assert_allclose(p.sum(-1), 1.0, atol=slack)


@pytest.mark.parametrize("spread", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("n", [1, 300, 100_000])
def test_long_rows_are_optimal(n: int, spread: float) -> None:
    x = spread * randn(n)
    for strength in (spread * 0.1, spread * 100, 1e-3 / n):
        p = fusedmax(x, strength)
        check_simplex(p, 1e-9)
        check_fusedmax(x.numpy(), p.numpy(), strength, 1e-9 * max(spread, 1))
        p = oscarmax(x, strength / n)
        check_simplex(p, 1e-9)
        check_oscarmax(x.numpy(), p.numpy(), strength / n, 1e-9 * max(spread, 1))
    if n > 1:
        upper, lower = bounds_for(x)
        for name, call in BOUNDED.items():
            p = call(x, upper, lower)
            check_simplex(p, 1e-9)
            check_bounded(
                name, x.numpy(), p.numpy(), upper.numpy(), lower.numpy(), 1e-9 * max(spread, 1)
            )


def check_ties(rows: int, seed: int) -> None:
    """Ties among scores, and of scores with the threshold, up to rounding."""
    for grid in (3, 4):
        x = (randn(rows, 12, seed=seed) * grid).round() / grid
        for strength in (0.01, 0.25, 1.0):
            for row, p in zip(x.numpy(), fusedmax(x, strength).numpy()):
                check_fusedmax(row, p, strength, 1e-12)
            for row, p in zip(x.numpy(), oscarmax(x, strength / 4).numpy()):
                check_oscarmax(row, p, strength / 4, 1e-12)


def test_rows_with_ties_are_optimal() -> None:
    check_ties(100, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_many_rows_with_ties_are_optimal(seed: int) -> None:
    check_ties(500, seed)


# -- the backends agree ----------------------------------------------------------------------------


def everything(
    call: Callable[..., Tensor], name: str, tensors: list[Tensor], g: Tensor
) -> list[Tensor]:
    """p and the gradient of ⟨p, g⟩ in every tensor, by one backend."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    with backend(name):
        p = call(*leaves)
        return [p.detach(), *torch.autograd.grad(p, leaves, g)]


def agree(name: str, call: Callable[..., Tensor], tensors: list[Tensor], scale: float = 1) -> None:
    """One backend against the definition in float64."""
    g = randn(*tensors[0].shape, seed=9).to(tensors[0])
    ours = everything(call, name, tensors, g)
    theirs = everything(call, "naive", [t.double() for t in tensors], g.double())
    tolerance = scale * (1e-9 if g.dtype == torch.float64 else 2e-5)
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.dtype == g.dtype
        torch.testing.assert_close(mine.double(), reference, rtol=0, atol=tolerance, equal_nan=True)


def scores(kind: str, rows: int, n: int, dtype: torch.dtype) -> Tensor:
    x = (randn(rows, n, seed=n) * 64).round() / 64
    if kind == "-inf":
        x[rand(rows, n, seed=1) < 0.3] = -inf
        x[0] = -inf
    scale = {"far": 1e3, "shifted": 1.0, "close": 2.0**-20}.get(kind, 1.0)
    x = scale * x + (1e4 if kind == "shifted" else 0.0)
    return x.to(DEVICE, dtype)


KINDS = ["random", "-inf", "far", "close", "shifted"]
DTYPES = [torch.float64, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*TIED, *BOUNDED])
def test_cpu_agrees_with_the_definition(name: str, kind: str, dtype: torch.dtype) -> None:
    for rows, n in ((3, 1), (20, 2), (17, 9), (4, 40)):
        x = scores(kind, rows, n, dtype).cpu()
        if name in TIED:
            for strength in (0.0, 1 / 128, 0.3, 5.0):
                agree("cpu", lambda y, s=strength: TIED[name](y, s), [x])
        else:
            agree("cpu", BOUNDED[name], [x, *bounds_for(x)], scale=10)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*TIED, *BOUNDED])
def test_gpu_agrees_with_the_definition(name: str, kind: str, dtype: torch.dtype) -> None:
    for rows, n in ((2, 1), (3, 7)):
        x = scores(kind, rows, n, dtype)
        if name in TIED:
            for strength in (0.0, 0.3):
                agree("gpu", lambda y, s=strength: TIED[name](y, s), [x])
        else:
            agree("gpu", BOUNDED[name], [x, *bounds_for(x)], scale=10)


@pytest.mark.parametrize("name", [*BOUNDED, "fusedmax"])
def test_rows_too_long_for_a_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are left to the definition."""
    monkeypatch.setattr(gpu_structured, "LONGEST", 4)
    x = randn(3, 6)
    if name in BOUNDED:
        agree("gpu", BOUNDED[name], [x, *bounds_for(x)], scale=10)
    else:
        agree("gpu", lambda y: TIED[name](y, 0.5), [x])


def test_gpu_bounds_of_any_strides() -> None:
    x = randn(3, 5).to(DEVICE)
    upper, lower = rand(5, 3).to(DEVICE).t() + 0.3, torch.tensor(0.01, device=DEVICE).double()
    for call in BOUNDED.values():
        agree("gpu", call, [x, upper, lower.expand(3, 5)])
        with backend("gpu"):
            p = call(x, 0.5)
        torch.testing.assert_close(p.cpu(), call(x.cpu(), 0.5))


def test_nan_is_loud_and_stays_alone(case: Callable[..., Tensor]) -> None:
    x = randn(4, 5)
    x[1, 2], x[2, 0], x[2, 3] = nan, inf, -inf
    for name in ("naive", "cpu", "gpu"):
        y = x.to(DEVICE if name == "gpu" else "cpu").clone().requires_grad_()
        with backend(name):
            p = case(y, mask=(x != -inf).to(y.device))
            (g,) = torch.autograd.grad(p, y, torch.randn_like(p))
        for t in (p.detach().cpu(), g.cpu()):
            assert t[[0, 3]].isfinite().all() and t[1].isnan().all()
            assert t[2, [0, 1, 2, 4]].isnan().all() and t[2, 3] == 0


# -- derivatives -----------------------------------------------------------------------------------


def test_gradcheck(case: Callable[..., Tensor]) -> None:
    x = randn(3, 6).requires_grad_()
    for mask in (None, rand(3, 6, seed=5) > 0.2):
        call = lambda y, m=mask: case(y, mask=m)  # noqa: E731
        assert torch.autograd.gradcheck(call, x, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(call, x)


@pytest.mark.parametrize("name", BOUNDED)
def test_gradcheck_in_the_bounds(name: str) -> None:
    x = randn(4, 6)
    upper, lower = 0.15 + 0.3 * rand(4, 6, seed=3), 0.1 * rand(4, 6, seed=4)
    leaves = [t.requires_grad_() for t in (x, upper, lower)]
    p = BOUNDED[name](*leaves).detach()
    assert bool((p == upper).any()) and bool((p == lower).any())
    assert torch.autograd.gradcheck(BOUNDED[name], leaves)
    assert torch.autograd.gradgradcheck(BOUNDED[name], leaves)


def test_gradient_where_both_bounds_are_equal() -> None:
    """Above τ an entry follows its upper bound as that rises; below τ it follows nothing."""
    x = torch.tensor([2.0, 1.9, 1.8, -5.0], dtype=torch.float64)
    upper = torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64, requires_grad=True)
    g = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
    (ours,) = torch.autograd.grad(csparsemax(x, upper), upper, g)
    assert ours.tolist() == [1.0 - 3.0, 0.0, 0.0, 0.0]
    raised = upper.detach() + torch.tensor([1e-6, 0.0, 0.0, 1e-6])
    change = (csparsemax(x, raised) - csparsemax(x, upper.detach())) @ g / 1e-6
    assert abs(change.item() - ours.sum().item()) < 1e-6


def test_gradient_where_no_entry_is_free() -> None:
    """Uppers of ½ on the two best: what a lower bound takes away goes to the third."""
    x = torch.tensor([3.0, 2.0, 1.0, 0.0], dtype=torch.float64)
    upper = torch.full((4,), 0.5, dtype=torch.float64, requires_grad=True)
    p = csparsemax(x, upper)
    assert p.tolist() == [0.5, 0.5, 0.0, 0.0]
    g = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
    (ours,) = torch.autograd.grad(p, upper, g)
    shrunk = upper.detach() - torch.tensor([1e-6, 0.0, 0.0, 0.0])
    change = (p.detach() - csparsemax(x, shrunk)) @ g / 1e-6
    assert ours.tolist() == [-3.0, -2.0, 0.0, 0.0] and abs(change.item() + 3.0) < 1e-6


@pytest.mark.parametrize("name", TIED)
def test_without_a_penalty_ties_are_no_clusters(name: str) -> None:
    x = torch.tensor([[1.0, 1.0, 0.7, 1.0]], dtype=torch.float64)
    call = lambda y: TIED[name](y, 0.0)  # noqa: E731
    g = randn(1, 4)
    for engine in ("naive", "cpu", "gpu"):
        p, ours = everything(call, engine, [x], g)
        reference, theirs = everything(sparsemax, "cpu", [x], g)
        torch.testing.assert_close(p, reference)
        torch.testing.assert_close(ours, theirs)


# -- masks, shapes, dtypes, transforms -------------------------------------------------------------


def test_masked_entries_hold_anything(case: Callable[..., Tensor]) -> None:
    x, mask = randn(5, 7), rand(5, 7, seed=2) > 0.4
    mask[:, :4] |= torch.tensor([True, False, True, True])  # enough for the upper bounds
    mask[3] = False
    dirty = x.masked_fill(~mask, nan).requires_grad_()
    p = case(dirty, mask=mask)
    (g,) = torch.autograd.grad(p, dirty, randn(5, 7, seed=8))
    assert bool((p[~mask] == 0).all()) and bool((g[~mask] == 0).all())
    assert bool(g.isfinite().all()) and p.sum(-1)[[0, 1, 2, 4]].allclose(torch.ones(4).double())
    if case is not CASES["fusedmax"]:  # there a hole breaks the chain
        for r in (0, 1, 2, 4):
            torch.testing.assert_close(p[r][mask[r]], case(x[r][mask[r]]))


def test_a_hole_breaks_the_chain() -> None:
    x = torch.tensor([1.0, 0.8, 0.0, 1.1, 0.9], dtype=torch.float64)
    mask = torch.tensor([True, True, False, True, True])
    p = fusedmax(x, 0.1, mask=mask)
    pieces = torch.tensor([0.9, 0.9, -inf, 1.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(p, sparsemax(pieces))
    torch.testing.assert_close(fusedmax(torch.where(mask, x, -inf), 0.1), p)
    # equal on both sides of the hole, and yet two runs: a gradient stays on its side
    y = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(fusedmax(y, 0.1, mask=mask)[0], y)
    torch.testing.assert_close(g, torch.tensor([0.25, 0.25, 0.0, -0.25, -0.25]).double())


def test_masked_bounds_hold_anything() -> None:
    x, mask = randn(3, 5), torch.tensor([True, False, True, True, True])
    upper, lower = rand(3, 5) + 0.3, 0.1 * rand(3, 5, seed=1)
    for call in BOUNDED.values():
        leaves = [t.masked_fill(~mask, nan).requires_grad_() for t in (x, upper, lower)]
        p = call(*leaves, mask=mask)
        grads = torch.autograd.grad(p, leaves, randn(3, 5, seed=8))
        short = call(x[:, mask], upper[:, mask], lower[:, mask])
        torch.testing.assert_close(p[:, mask], short)
        assert all(bool(t[:, 1].eq(0).all()) and bool(t.isfinite().all()) for t in (p, *grads))


def test_rows_of_several_lengths(case: Callable[..., Tensor]) -> None:
    x, lengths = randn(5, 9), torch.tensor([9, 3, 5, 4, 6])
    p = case(x, mask=torch.arange(9) < lengths[:, None])
    for row, q, length in zip(x, p, lengths.tolist(), strict=True):
        torch.testing.assert_close(q[:length], case(row[:length]))
        assert bool((q[length:] == 0).all())


def test_along_another_dimension(case: Callable[..., Tensor]) -> None:
    x = randn(2, 6, 3)
    torch.testing.assert_close(case(x, dim=1), case(x.mT).mT)
    torch.testing.assert_close(case(x, dim=-2), case(x.mT).mT)


def test_half_precision(case: Callable[..., Tensor]) -> None:
    x = randn(8, 12).clamp(-1, 1)
    for dtype in (torch.float16, torch.bfloat16):
        half = x.to(dtype).requires_grad_()
        p = case(half)
        (g,) = torch.autograd.grad(p.sum(), half)
        assert p.dtype == g.dtype == dtype
        torch.testing.assert_close(p.float(), case(half.detach().float()), atol=4e-3, rtol=1e-2)


def test_half_precision_keeps_clusters() -> None:
    """Weights that differ in float32 but not in bfloat16 are not one cluster."""
    x = torch.tensor([1.0, 1.0 + 2**-7], dtype=torch.bfloat16, requires_grad=True)
    p = fusedmax(x, 2**-10)
    (g,) = torch.autograd.grad(p[0], x)
    assert g.tolist() == [0.5, -0.5]


def test_transforms(case: Callable[..., Tensor]) -> None:
    x, g = randn(4, 6), randn(4, 6, seed=1)
    y = x.clone().requires_grad_()
    p = case(y)
    (grad,) = torch.autograd.grad(p, y, g)
    torch.testing.assert_close(torch.vmap(case)(x), p.detach())
    torch.testing.assert_close(torch.vmap(case, in_dims=1)(x.t()), p.detach())
    loss = lambda row, weight: (case(row) * weight).sum()  # noqa: E731
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(x, g), grad)
    jacobian = torch.func.jacrev(case)(x[0])
    torch.testing.assert_close(torch.func.jacfwd(case)(x[0]), jacobian)


def test_compile(case: Callable[..., Tensor]) -> None:
    mask = torch.ones(6, 4, dtype=torch.bool)
    mask[2, 1] = False
    for kwargs in ({"dim": 0}, {"dim": 0, "mask": mask}):
        call = lambda x, kw=kwargs: case(x, **kw).square().sum()  # noqa: E731
        torch._dynamo.reset()
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        x = randn(6, 4).requires_grad_()
        ours, plain = compiled(x), call(x)
        torch.testing.assert_close(ours, plain)
        (g,), (h,) = torch.autograd.grad(ours, x), torch.autograd.grad(plain, x)
        torch.testing.assert_close(g, h)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(3, 4), (2, 2, 4), (0, 4)])
def test_opcheck(name: str, shape: tuple[int, ...]) -> None:
    x, g = randn(*shape), randn(*shape, seed=1)
    rest = ([torch.ones_like(x), torch.zeros_like(x), x] if name in BOUNDED else [], [0.1])
    op = Map.by_name[name]
    torch.library.opcheck(op.op, (x, *rest))
    torch.library.opcheck(op.backward_op, (CASES[name](x), g, *rest))


def test_layouts_threads_and_empty_batches(case: Callable[..., Tensor]) -> None:
    x = randn(300, 50, dtype=torch.float32)
    p = case(x)
    for same in (x.t().contiguous().t(), torch.nn.Parameter(x), x.repeat(1, 2)[:, :50]):
        assert torch.equal(case(same), p)
    for i in (0, 17, 299):
        assert torch.equal(case(x[i]), p[i])
        assert torch.equal(case(x[i : i + 1].expand(3, 50))[2], p[i])
    empty = torch.empty(0, 3, 4, requires_grad=True)
    case(empty).sum().backward()
    assert empty.grad is not None and empty.grad.shape == (0, 3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(case(x), p)


# -- bounds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOUNDED)
def test_tight_bounds(name: str) -> None:
    """Bounds that leave one point, up to their rounding."""
    for n in (1, 3, 10, 7001):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            tight = torch.softmax(randn(n).to(dtype), -1)
            x = randn(n, seed=1).to(dtype)
            for p in (BOUNDED[name](x, tight), BOUNDED[name](x, 1.0, tight)):
                # the sum is not quite 1, and not quite the same in another order
                room = abs(tight.double().sum().item() - 1) + 2 * torch.finfo(dtype).eps + 1e-14
                torch.testing.assert_close(p, tight, atol=room, rtol=0)
    equal = torch.full((10,), 0.1)
    for x in (torch.zeros(10), torch.arange(10.0)):
        torch.testing.assert_close(BOUNDED[name](x, equal), equal)
        torch.testing.assert_close(BOUNDED[name](x, equal, equal), equal)


def test_no_bounds_are_no_bounds() -> None:
    x = randn(5, 8) * 3
    for upper in (1.0, inf, 7.0):
        torch.testing.assert_close(csparsemax(x, upper), sparsemax(x))
        torch.testing.assert_close(csoftmax(x, upper), torch.softmax(x, -1))
    y = torch.tensor([9.0, 0.0, 0.0], dtype=torch.float64, requires_grad=True)
    upper = torch.ones(3, dtype=torch.float64, requires_grad=True)
    grads = torch.autograd.grad(csparsemax(y, upper), (y, upper), randn(3))
    assert all(bool((g == 0).all()) for g in grads)  # p = (1, 0, 0), but not by its bound


def test_free_entries_far_below_the_peak() -> None:
    for dtype in DTYPES:
        x = torch.tensor([1e6, 0.5, 0.25, -1e6], dtype=dtype)
        upper = torch.tensor([0.5, 1.0, 1.0, 1.0], dtype=dtype)
        soft = torch.softmax(torch.tensor([0.5, 0.25]), -1) / 2
        for name in ("naive", "cpu", "gpu"):
            with backend(name):
                p, q = csparsemax(x, upper), csoftmax(x, upper)
            np.testing.assert_allclose(p, [0.5, 0.375, 0.125, 0.0], atol=1e-6)
            np.testing.assert_allclose(q, [0.5, *soft, 0.0], atol=1e-6)


def test_bounds_of_other_dtypes() -> None:
    x = randn(4, dtype=torch.float32)
    upper = torch.tensor([0.3, 0.5, 0.2, 0.1], dtype=torch.float64)
    for call in BOUNDED.values():
        assert call(x, upper).dtype == torch.float32
        torch.testing.assert_close(call(x, torch.ones(4, dtype=torch.int64)), call(x, 1.0))


@pytest.mark.parametrize("name", BOUNDED)
def test_infeasible_bounds(name: str) -> None:
    call, x = BOUNDED[name], randn(2, 3, 4)
    good, zero = torch.full_like(x, 0.3), torch.zeros_like(x)

    def put(tensor: Tensor, value: float, *index: int) -> Tensor:
        tensor = tensor.clone()
        tensor[index] = value
        return tensor

    cases = [
        (x, put(good, 0.1, 1, 2, 0), zero, ["row (1, 2)", "upper", "sum to 1,", "than 1"]),
        (x, put(good, 0.05, 1, 2, 0), zero, ["row (1, 2)", "upper bounds sum to 0.95"]),
        (x, good, put(zero, 0.4, 0, 1, 3), ["row (0, 1)", "0.4 ≤ p ≤ 0.3", "entry 3"]),
        (x, good, put(zero, -0.1, 0, 1, 3), ["row (0, 1)", "-0.1 ≤ p", "entry 3"]),
        (x, put(good, nan, 0, 0, 0), zero, ["row (0, 0)", "nan", "entry 0"]),
        (x, zero + 1, zero + 0.26, ["row (0, 0)", "lower bounds sum to 1.04"]),
        (put(x, -inf, 1, 0, 2), good, zero, ["row (1, 0)", "sum to 0.9", "-inf do not count"]),
        (put(x, -inf, 1, 0, 2), zero + 1, zero + 0.1, ["row (1, 0)", "-inf at entry 2", "0.1"]),
    ]
    for scores, upper, lower, words in cases[1:]:
        with pytest.raises(ValueError) as caught:
            call(scores, upper, lower)
        assert str(caught.value).startswith(f"{name}: ")
        for word in words:
            assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
        p = torch.vmap(call)(scores, upper, lower)  # nobody looks: NaN, and only in that row
        bad = p.isnan().any(-1)
        assert bool(bad.any()) and bool(p[~bad].isfinite().all())
    torch.testing.assert_close(call(*cases[0][:3])[1, 2], cases[0][1][1, 2])  # exactly tight
    with pytest.raises(ValueError, match="the only row"):
        call(x[0, 0], 0.2)
    with pytest.raises(ValueError, match="row 2 "):
        call(x[0], torch.tensor([[0.5], [0.5], [0.1]]))
    with pytest.raises(ValueError, match=r"upper must broadcast.*\(2, 3, 4\), got \(5,\)"):
        call(x, torch.ones(5))
    empty = call(x, 0.1, mask=torch.zeros(4, dtype=torch.bool))
    assert bool((empty == 0).all())  # a row without entries wants no bounds


@pytest.mark.parametrize("name", TIED)
@pytest.mark.parametrize("strength", [-0.1, inf, nan, torch.tensor(0.1)])
def test_strength_must_be_a_number(name: str, strength: float) -> None:
    with pytest.raises(ValueError, match=rf"{name}: strength must be a finite number"):
        TIED[name](randn(3), strength)


def test_shifts_change_nothing(case: Callable[..., Tensor]) -> None:
    x = (randn(6, 10) * 256).round() / 256
    for shift in (1e4, -1e4):
        for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
            p, q = case(x.to(dtype)), case((x + shift).to(dtype))
            torch.testing.assert_close(p, q, atol=tolerance, rtol=0)
