"""Alignments and CTC: counts, conditions, ragged batches, the dense kernels, errors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st
from properties import for_all
from torch import Tensor

import structmax as sx
from structmax.forest.ctc import ops as ctc_ops
from structmax.forest.grid import ops
from structmax.structures.dynamic import DynamicStructure

f32, f64 = torch.float32, torch.float64
KINDS = ["dtw", "edit", "monotone"]
OMEGAS = [sx.Shannon(), sx.Shannon(0.3), sx.Gini(), sx.Gini(4.0), sx.Hard()]
CASES = pytest.mark.parametrize("cases", [40, pytest.param(10_000, marks=pytest.mark.slow)])


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=f64)


def pair(n: int, m: int) -> tuple[Tensor, Tensor]:
    return torch.tensor(n), torch.tensor(m)


# -- counts --------------------------------------------------------------------------------------


def delannoy(n: int, m: int) -> int:
    return sum(math.comb(n, k) * math.comb(m, k) * 2**k for k in range(min(n, m) + 1))


COUNTS: dict[str, Callable[[int, int], int]] = {
    "dtw": lambda n, m: delannoy(n - 1, m - 1),
    "edit": lambda n, m: math.comb(n + m, n),
    "monotone": lambda n, m: math.comb(n + m - 1, n),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 4), (4, 1), (2, 3), (4, 3)])
def test_counts(kind: str, n: int, m: int) -> None:
    """With zero scores A is the log of the number of structures; no two of them are the same."""
    count = COUNTS[kind](n, m)
    s = sx.Alignment(torch.zeros(n + 1, m + 2, dtype=f64), pair(n, m), kind=kind)
    assert math.isclose(s.log_partition().exp().item(), count, rel_tol=1e-9)
    best = s.topk(count + 1)
    assert best.exists.sum() == count
    assert len(torch.unique(best.structures[:count].flatten(1), dim=0)) == count
    assert len(s.enumerate_support()) == count


@pytest.mark.parametrize("kind", KINDS)
def test_counts_of_long_sequences(kind: str) -> None:
    s = sx.Alignment(torch.zeros(40, 31, dtype=f64), kind=kind)
    assert math.isclose(s.log_partition().item(), math.log(COUNTS[kind](40, 31)), rel_tol=1e-12)


def test_counts_of_a_band() -> None:
    """|i − j| ≤ band in a square; a band of 1 always leaves a path, one of 0 only in a square."""
    for n, m, band in itertools.product((1, 2, 4), (1, 3, 4), (0, 1, 2)):
        s = sx.Alignment(torch.zeros(5, 6, dtype=f64), pair(n, m), band=band)
        count = round(s.log_partition().exp().item())
        assert count == len(s.enumerate_support())
        assert (count > 0) == (band > 0 or n == m or min(n, m) == 1)
    square = sx.Alignment(torch.zeros(4, 4, dtype=f64), band=0)
    assert torch.equal(square.argmax(), torch.eye(4, dtype=f64))
    near = (torch.arange(4)[:, None] - torch.arange(4)).abs() <= 1
    mu = sx.Alignment(randn(4, 4), band=1).marginals()
    assert torch.equal(mu > 0, near)


# -- meaning -------------------------------------------------------------------------------------


def random_alignment(kind: str, seed: int = 0, **options: object) -> sx.Alignment:
    """Five items of different sizes, the padding full of NaN."""
    rows, columns = torch.tensor([4, 1, 3, 2, 4]), torch.tensor([5, 3, 1, 5, 4])
    inside = (torch.arange(4)[:, None] < rows[:, None, None]) & (
        torch.arange(5) < columns[:, None, None]
    )
    scores = torch.where(inside, randn(5, 4, 5, seed=seed), math.nan)
    if kind == "edit":
        options.setdefault("gap", (randn(5, 4, seed=seed + 1), randn(5, seed=seed + 2)))
    return sx.Alignment(scores, (rows, columns), kind=kind, **options)  # type: ignore[arg-type]


MADE = {
    "dtw": lambda omega: random_alignment("dtw", smoothing=omega),
    "dtw-moves": lambda omega: random_alignment(
        "dtw", moves=randn(5, 4, 5, 3, seed=7), smoothing=omega
    ),
    "dtw-band": lambda omega: random_alignment("dtw", band=1, smoothing=omega),
    "edit": lambda omega: random_alignment("edit", smoothing=omega),
    "edit-band": lambda omega: random_alignment("edit", band=1, smoothing=omega),
    "monotone": lambda omega: random_alignment("monotone", smoothing=omega),
    "monotone-band": lambda omega: random_alignment("monotone", band=1, smoothing=omega),
}


@pytest.mark.parametrize("omega", [sx.Shannon(), sx.Tsallis(1.5)], ids=str)
@pytest.mark.parametrize("name", MADE)
def test_ragged_is_item_by_item(name: str, omega: sx.Smoothing) -> None:
    s = MADE[name](omega)
    tensors = {key: t for key, (t, _) in s._tensors().items()}
    for i, (n, m) in enumerate(zip(s.rows.tolist(), s.columns.tolist(), strict=True)):
        cut = {"scores": tensors["scores"][i, :n, :m]}
        if s.moves is not None:
            cut["moves"] = tensors["moves"][i, :n, :m]
        if s.kind == "edit":
            cut["deletion"], cut["insertion"] = tensors["deletion"][i, :n], s.insertion[:m]
        alone = s._rebuild(**cut)
        for query in ("log_partition", "marginals", "max_marginals"):
            whole = getattr(s, query)()[i]
            whole = whole[:n, :m] if whole.dim() else whole
            torch.testing.assert_close(whole, getattr(alone, query)(), rtol=1e-9, atol=1e-9)
        assert not bool(s.marginals()[i, n:].any()) and not bool(s.marginals()[i, :, m:].any())
        every = alone.enumerate_support()
        values = alone.score(every)
        torch.testing.assert_close(s.score(s.argmax())[i], values.max())
        if isinstance(omega, sx.Shannon):
            torch.testing.assert_close(s.log_partition()[i], values.logsumexp(0))


@pytest.mark.parametrize("name", MADE)
def test_conditions_on_every_cell(name: str) -> None:
    """P(cells) = exp(A with them − A), for one cell and for two; no mass beside them."""
    s = MADE[name](sx.Shannon())[0]
    every = s.enumerate_support()
    p = s.log_prob(every).exp()
    cells = list(itertools.product(range(4), range(5)))
    pairs = [(a, b) for a, b in itertools.combinations(cells, 2) if (sum(a) + 3 * sum(b)) % 5 == 0]
    for chosen in [*[(cell,) for cell in cells], *pairs]:
        include = torch.zeros(4, 5, dtype=torch.bool)
        for cell in chosen:
            include[cell] = True
        expected = p[every[:, include].all(-1)].sum()
        kept = s.condition(include=include)
        actual = (kept.log_partition() - s.log_partition()).exp()
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
        if expected > 0:
            assert bool((kept.marginals()[include] - 1).abs().max() < 1e-9)
            kl = torch.distributions.kl_divergence(kept, s)  # −log P of the condition
            torch.testing.assert_close(kl, -expected.log(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_including_padding_leaves_nothing(kind: str) -> None:
    s = random_alignment(kind)
    include = torch.zeros(4, 5, dtype=torch.bool)
    include[3, 3] = True
    kept = s.condition(include=include)
    has = (s.rows > 3) & (s.columns > 3)
    assert torch.equal(kept.log_partition() > -math.inf, has)


def test_moves() -> None:
    """Move marginals are the gradient of the moves, and sum to those of the cells."""
    s = random_alignment("dtw", moves=randn(5, 4, 5, 3, seed=3))
    moves = s.moves.clone().requires_grad_()
    value = s._with(moves=moves).log_partition().sum()
    (slope,) = torch.autograd.grad(value, moves)
    torch.testing.assert_close(s.edge_marginals(), slope)
    plain = random_alignment("dtw")
    entered = plain.edge_marginals().sum(-1)
    entered[:, 0, 0] += 1
    torch.testing.assert_close(entered, plain.marginals())
    assert not bool(plain.edge_marginals()[:, 0, :, :2].any())  # nothing comes from above
    first = torch.zeros(1, 2, 2, 3)
    first[..., 0] = 5.0  # ↘ is worth more than its two neighbours
    diagonal = sx.Alignment(torch.ones(1, 2, 2), moves=first)
    assert diagonal.decode(diagonal.argmax()) == [[(0, 0), (1, 1)]]


def test_edit_distance() -> None:
    """−1 for each difference: the Levenshtein distance."""
    for one, other, distance in (("kitten", "sitting", 3), ("flaw", "lawn", 2), ("a", "b", 1)):
        same = torch.tensor([[x == y for y in other] for x in one])
        s = sx.Alignment(torch.where(same, 0.0, -1.0), kind="edit", gap=-1.0)
        assert s.score(s.argmax()).item() == -distance


def test_gap_forms() -> None:
    scores = randn(2, 3, 4)
    number = sx.Alignment(scores, kind="edit", gap=-0.5)
    full = sx.Alignment(scores, kind="edit", gap=(torch.full((3,), -0.5), torch.full((4,), -0.5)))
    scalar = torch.tensor(-0.5, dtype=f64, requires_grad=True)
    learnt = sx.Alignment(scores, kind="edit", gap=(scalar, -0.5))
    for other in (full, learnt):
        torch.testing.assert_close(number.log_partition(), other.log_partition().detach())
    (slope,) = torch.autograd.grad(learnt.log_partition().sum(), scalar)
    torch.testing.assert_close(slope, (1 - number.marginals().sum(-1)).sum())  # deletions
    none = sx.Alignment(scores, kind="edit")
    zero = sx.Alignment(scores, kind="edit", gap=0.0)
    assert torch.equal(none.log_partition(), zero.log_partition())


def test_pairs() -> None:
    s = random_alignment("edit")
    z = s.sample((3,))
    assert torch.equal(s.encode(s.decode(z)), z)
    assert torch.equal(s.score(s.decode(z[0])), s.score(z[0]))
    alone = s[1]
    assert alone.decode(alone.encode([])) == [] and alone.encode([(0, 2)])[0, 2] == 1
    path = sx.Alignment(torch.zeros(2, 2))
    assert path.decode(path.topk(3).structures)[0][0] == (0, 0)
    assert path.score([(0, 0), (1, 1)]) == 0
    with pytest.raises(ValueError, match="not a structure"):
        path.score([(0, 0), (0, 1), (1, 0), (1, 1)])
    with pytest.raises(ValueError, match="not a structure"):
        sx.Alignment(torch.zeros(3, 3), band=0).score([(0, 0), (0, 1), (1, 1), (2, 2)])


# -- dense kernels -------------------------------------------------------------------------------


@dataclass
class Grid:
    seed: int
    n: int
    m: int
    spread: float
    ties: bool
    shift: float
    forbidden: float
    dtype: torch.dtype

    def draw(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        """theta, a direction and the sizes of four items; the padding is NaN."""
        random = torch.Generator().manual_seed(self.seed)
        shape = (4, self.n, self.m)
        theta = torch.randn(shape, generator=random, dtype=f64) * self.spread
        theta = (theta / self.spread).round() * self.spread if self.ties else theta
        theta = (theta * 64).round() / 64 + self.shift  # exact in float32 after the shift
        barred = torch.rand(shape, generator=random) < self.forbidden
        theta = torch.where(barred, -math.inf, theta).to(self.dtype)
        sizes = [torch.randint(1, k + 1, (4,), generator=random) for k in (self.n, self.m)]
        inside = ops.in_band(self.n, self.m, *sizes, None)
        v = torch.randn(shape, generator=random, dtype=f64).to(self.dtype)
        return torch.where(inside, theta, math.nan), v, sizes


grids = st.builds(
    Grid,
    seed=st.integers(0, 2**31),
    n=st.integers(1, 9),
    m=st.integers(1, 9),
    spread=st.sampled_from([1e-3, 1.0, 30.0, 1e3]),
    ties=st.booleans(),
    shift=st.sampled_from([0.0, 1e4, -1e4]),
    forbidden=st.sampled_from([0.0, 0.1, 0.4]),
    dtype=st.sampled_from([f64, f32]),
)


def close(actual: Tensor, expected: Tensor, what: str, scale: float = 1.0) -> None:
    """Within rounding of the largest entry; −inf at the same places and NaN nowhere."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, what
    assert torch.equal(actual == -math.inf, expected == -math.inf), what
    finite = expected != -math.inf
    a, b = actual[finite].double(), expected[finite].double()
    limit = (1e-7 if expected.dtype == f64 else 4e-5) * scale
    gap, size = (a - b).abs().amax() if len(a) else 0.0, 1 + (b.abs().amax() if len(b) else 0.0)
    assert gap <= limit * size, f"{what}: off by {gap} at scale {size}"


def check_grid(grid: Grid, omega: sx.Smoothing, band: int | None) -> None:
    theta, v, sizes = grid.draw()
    args = sizes, ops.key_of(band), list(omega.code)

    def run() -> list[Tensor]:
        a, mu = ops.grid.gradient_op([theta], *args)
        assert torch.equal(a, ops.grid.value_op([theta], *args))
        return [a, mu, *ops.grid.hvp_op([theta], [v], *args)]

    ours = run()
    with sx.backend("naive"):
        reference = run()
    ambiguous = isinstance(omega, sx.Hard) and (grid.ties or grid.dtype == f32)
    kinked = isinstance(omega, sx.Gini) and (grid.ties or grid.dtype == f32)
    names = ["value"] if ambiguous else ["value", "gradient", "product"][: 2 if kinked else 3]
    for name, a, b in zip(names, ours, reference, strict=False):
        scale = 1 / min(1.0, omega.gamma) if name == "product" else 1.0
        close(a, b, name, scale)
    infeasible = ours[0] == -math.inf
    assert not any(bool(t[infeasible].any()) for t in ours[1:])
    inside = ops.in_band(grid.n, grid.m, *sizes, band)
    assert not bool(ours[1][~inside].any()) and not bool(ours[2][~inside].any())


@CASES
def test_grid_kernels(cases: int) -> None:
    for_all(
        cases,
        check_grid,
        grid=grids,
        omega=st.sampled_from(OMEGAS),
        band=st.sampled_from([None, 0, 1, 2]),
    )


def check_series(grid: Grid, omega: sx.Smoothing, band: int | None) -> None:
    """Series of numbers, whose distances are never stored, and of vectors, against the definition
    in float64."""
    random = torch.Generator().manual_seed(grid.seed)
    d = 1 + grid.seed % 2
    scores, along = (
        [torch.randn(4, k, d, generator=random, dtype=f64) for k in (grid.n, grid.m)] for _ in "ab"
    )
    scores = [(s * grid.spread + grid.shift).to(grid.dtype) for s in scores]
    sizes = [torch.randint(1, k + 1, (4,), generator=random) for k in (grid.n, grid.m)]
    args = sizes, ops.key_of(band), list(omega.code)

    def run(dtype: torch.dtype) -> list[Tensor]:
        x, v = ([t.to(dtype) for t in pair] for pair in (scores, along))
        found = ops.series.gradient_op(x, *args)
        assert torch.equal(found[0], ops.series.value_op(x, *args))
        return [*found, *ops.series.hvp_op(x, v, *args)]

    ours = run(grid.dtype)
    with sx.backend("naive"):
        reference = [t.to(grid.dtype) for t in run(f64)]
    scales = [1.0] * 3 + [1 / min(1.0, omega.gamma)] * 2
    if grid.dtype == f32 and d > 1:
        # distances of vectors are stored, rounded by 6e-8 of their size: a probability is off by
        # 1/γ times that, which float32 series of numbers do not suffer
        largest = float(torch.cdist(*[s.double() for s in scores]).square().max())
        scales[1:3] = [max(1.0, 6e-8 * largest / omega.gamma / 4e-5)] * 2
    count = 3 if grid.dtype == f32 else 5  # products store distances, in the dtype of the series
    for name, a, b, scale in zip(("value", "x", "y", "xx", "yy")[:count], ours, reference, scales):
        close(a, b, name, scale)
    for t, size in zip(ours[1:], sizes * 2, strict=True):
        assert not bool(t[torch.arange(t.shape[1]) >= size[:, None]].any()), "padding"


@CASES
def test_series_kernels(cases: int) -> None:
    for_all(
        cases,
        check_series,
        grid=grids.filter(lambda g: g.spread <= 30 and g.forbidden == 0 and not g.ties),
        omega=st.sampled_from(OMEGAS),
        band=st.sampled_from([None, 0, 1, 2]),
    )


@pytest.mark.parametrize("omega", OMEGAS, ids=str)
@pytest.mark.parametrize("band", [None, 3])
def test_dense_against_forest(omega: sx.Smoothing, band: int | None) -> None:
    """Both answer for the same graph, ties included: value, gradient, second derivative."""
    scores = randn(3, 20, 33) * 3
    scores[1, 4, 7:12] = -math.inf
    sizes = torch.tensor([20, 18, 1]), torch.tensor([33, 30, 9])
    s = sx.Alignment(scores, sizes, band=band, smoothing=omega)
    assert s._is_dense
    value, (mu,) = s._value_and_gradient()
    expected, (mu0,) = DynamicStructure._value_and_gradient(s)
    torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-9)
    torch.testing.assert_close(s._value(), expected, rtol=1e-11, atol=1e-9)
    torch.testing.assert_close(mu, mu0, rtol=1e-9, atol=1e-9)
    if isinstance(omega, sx.Hard):
        tied = sx.Alignment(torch.zeros(4, 5), smoothing=omega)
        assert torch.equal(tied.marginals(), DynamicStructure._value_and_gradient(tied)[1][0])
        return
    leaf, weight = scores.clone().requires_grad_(), randn(3, 20, 33, seed=1)
    live = s._with(scores=leaf)
    products = [
        torch.autograd.grad((weight * run(live)[1][0]).sum(), leaf)[0]
        for run in (sx.Alignment._value_and_gradient, DynamicStructure._value_and_gradient)
    ]
    torch.testing.assert_close(*products, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("band", [None, 3])
@pytest.mark.parametrize("dtype", [f64, f32], ids=str)
def test_best_path_by_both_engines(dtype: torch.dtype, band: int | None) -> None:
    """The same path, ties included, that of float32 scores too."""
    scores = (randn(6, 20, 33) * 3).to(dtype)
    scores[1, 4, 7:12], scores[2], scores[3] = -math.inf, 0.0, scores[3].round()
    sizes = torch.tensor([20, 18, 20, 20, 1, 7]), torch.tensor([33, 30, 33, 20, 9, 1])
    s = sx.Alignment(scores, sizes, band=band)
    assert torch.equal(s.argmax(), DynamicStructure.argmax(s))
    with sx.backend("naive"):
        assert torch.equal(s.score(s.argmax()), s.score(DynamicStructure.argmax(s)))


@pytest.mark.parametrize("backend", ["cpu", "naive"])
@pytest.mark.parametrize("omega", OMEGAS, ids=str)
def test_nan_is_loud_and_stays_alone(omega: sx.Smoothing, backend: str) -> None:
    theta = randn(4, 5, 6)
    clean = theta.clone()
    theta[1, 0, 3] = theta[2, 4, 5] = theta[3, 2, 2] = math.nan
    args = [torch.full((4,), 5), torch.full((4,), 6)], "", list(omega.code)
    with sx.backend(backend):
        a, mu = ops.grid.gradient_op([theta], *args)
        b, nu = ops.grid.gradient_op([clean], *args)
    assert a.isnan().tolist() == [False, True, True, True]
    assert torch.equal(a[0], b[0]) and torch.equal(mu[0], nu[0])
    assert backend == "naive" or bool(mu[1:].isnan().all())


def test_same_bits() -> None:
    """One thread or several, one item or the batch: the same bits."""
    theta, v = randn(9, 30, 40), randn(9, 30, 40, seed=1)
    sizes = [torch.arange(9) * 3 + 1, torch.arange(9) + 30]
    before = torch.get_num_threads()
    runs = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        args = sizes, "", [1.0, 1.0, 1.0]
        runs.append([*ops.grid.gradient_op([theta], *args), *ops.grid.hvp_op([theta], [v], *args)])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    alone = ops.grid.gradient_op([theta[4:5]], [t[4:5] for t in sizes], "", [1.0, 1.0, 1.0])
    assert torch.equal(alone[1], runs[0][1][4:5])


# -- CTC -----------------------------------------------------------------------------------------


def check_ctc(
    seed: int, spread: float, shift: float, forbidden: float, gamma: float, dtype: torch.dtype
) -> None:
    """Value, gradient and product of the kernels against the definition, and the forest's."""
    random = torch.Generator().manual_seed(seed)
    T, V, S = (int(torch.randint(low, 8, (), generator=random)) for low in (1, 2, 0))
    theta, v = (torch.randn(4, T, V, generator=random, dtype=f64) for _ in range(2))
    theta = theta * spread + shift
    theta[torch.rand(theta.shape, generator=random) < forbidden] = -math.inf
    targets = torch.randint(1, V, (4, S), generator=random)
    frames, count = (
        torch.randint(low, k + 1, (4,), generator=random) for low, k in ((1, T), (0, S))
    )
    make = lambda x: sx.CTC(x, targets, frames, count, smoothing=sx.Shannon(gamma))  # noqa: E731
    s = make(theta.to(dtype))
    unused = ~s._usable_parts()
    s = make(torch.where(unused, math.nan, theta).to(dtype))
    args = [t.contiguous() for t in s._constants()], "", list(s.smoothing.code)

    def run(x: Tensor) -> list[Tensor]:
        a, mu = ctc_ops.ctc.gradient_op([x], *args)
        assert torch.equal(a, ctc_ops.ctc.value_op([x], *args))
        return [a, mu, *ctc_ops.ctc.hvp_op([x], [v.to(x.dtype)], *args)]

    ours = run(s.log_probs)
    with sx.backend("naive"):
        reference = [t.to(dtype) for t in run(torch.where(unused, 0.0, s.log_probs).double())]
    for name, a, b in zip(("value", "gradient", "product"), ours, reference, strict=True):
        close(a, b, name, 1 / min(1.0, gamma) if name == "product" else 1.0)
    infeasible = ours[0] == -math.inf
    for t in ours[1:]:
        assert not bool(t[infeasible].any()) and not bool(t[unused].any())
    value, (mu,) = DynamicStructure._value_and_gradient(s)
    close(ours[0], value, "value of the forest")
    close(ours[1], mu, "gradient of the forest")


@CASES
def test_ctc_kernels(cases: int) -> None:
    for_all(
        cases,
        check_ctc,
        seed=st.integers(0, 2**31),
        spread=st.sampled_from([1e-3, 1.0, 30.0, 1e3]),
        shift=st.sampled_from([0.0, 1e4, -1e4]),
        forbidden=st.sampled_from([0.0, 0.1, 0.4]),
        gamma=st.sampled_from([1.0, 0.3, 4.0]),
        dtype=st.sampled_from([f64, f32]),
    )


def test_ctc_alone_and_beside_nan() -> None:
    """One thread or several, one item or the batch: the same bits; NaN stays in its item."""
    theta, targets = randn(5, 30, 7), torch.randint(1, 7, (5, 9))
    theta[3, 4, 0] = math.nan
    before, runs = torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        s = sx.CTC(theta, targets, validate_args=False)
        runs.append((s.log_partition(), s.marginals()))
    torch.set_num_threads(before)
    (a, mu), (b, nu) = runs
    assert a.isnan().tolist() == [False, False, False, True, False]
    good = ~a.isnan()
    assert torch.equal(a[good], b[good]) and torch.equal(mu[good], nu[good])
    alone = sx.CTC(theta[1], targets[1])
    assert torch.equal(alone.log_partition(), a[1]) and torch.equal(alone.marginals(), mu[1])


def test_concatenated_targets_of_ctc_are_split() -> None:
    """As torch has them, with empty ones; lengths may be of any batch shape."""
    log_probs = randn(4, 9, 5).log_softmax(-1).requires_grad_()
    frames, counts = torch.tensor([9, 7, 8, 3]), torch.tensor([3, 0, 4, 1])
    targets = torch.tensor([1, 2, 2, 4, 3, 1, 1, 2])
    loss = torch.nn.functional.ctc_loss(
        log_probs.transpose(0, 1), targets, frames, counts, reduction="none"
    )
    ctc = sx.CTC(log_probs, targets, frames, counts)
    torch.testing.assert_close(-ctc.log_partition(), loss)
    (ours,) = torch.autograd.grad(-ctc.log_partition().sum(), log_probs)
    torch.testing.assert_close(ctc.marginals(), -ours)
    best = ctc[2].argmax().argmax(-1)[:8].unique_consecutive()
    assert best[best > 0].tolist() == [4, 3, 1, 1][: int((best > 0).sum())]
    square = sx.CTC(
        log_probs.view(2, 2, 9, 5), targets, frames.view(2, 2), counts.view(2, 2)
    ).log_partition()
    torch.testing.assert_close(square.flatten(), -loss)
    compiled = torch.compile(
        lambda x, y, n: sx.CTC(x, y, frames, n).log_partition(), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(log_probs.detach(), targets, counts), -loss.detach())
    for wrong in (torch.tensor([3, 0, 4, 2]), torch.tensor([4, -1, 4, 1])):
        with pytest.raises(ValueError, match=r"CTC: targets \(8\) .* must sum to 8 .* got"):
            sx.CTC(log_probs, targets, frames, wrong)
        unchecked = sx.CTC(log_probs, targets, frames, wrong, validate_args=False)
        assert unchecked.log_partition()[wrong != 0].isnan().all()
        assert compiled(log_probs.detach(), targets, wrong)[wrong != 0].isnan().all()
    shared = sx.CTC(log_probs, targets[:3])  # without lengths it is the target of every item
    torch.testing.assert_close(
        shared.log_partition()[1], sx.CTC(log_probs[1], targets[:3]).log_partition()
    )


@pytest.mark.parametrize("blank", [0, 4])
def test_ctc_loss(blank: int) -> None:
    """Value, and gradient in the logits, with repeats, empty targets and ragged lengths."""
    T, V = 12, 5
    targets = torch.randint(1, 4, (7, 5), generator=torch.Generator().manual_seed(0))
    targets[0] = torch.tensor([1, 1, 1, 2, 2])
    targets[4, :2] = 3
    frames, symbols = torch.tensor([12, 9, 7, 12, 3, 1, 2]), torch.tensor([5, 4, 0, 1, 2, 0, 2])
    targets[6, :2] = torch.tensor([1, 2])
    logits = randn(7, T, V).requires_grad_()
    log_probs = logits.log_softmax(-1)
    ours = -sx.CTC(log_probs, targets, frames, symbols, blank=blank).log_partition()
    theirs = torch.nn.functional.ctc_loss(
        log_probs.transpose(0, 1), targets, frames, symbols, blank=blank, reduction="none"
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    one, other = (
        torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (ours, theirs)
    )
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_ctc_against_enumeration() -> None:
    """Ragged items and padding of NaN; targets with and without repeats."""
    targets = torch.tensor([[1, 1, 99], [2, 1, 2], [3, -1, 0], [7, 7, 7]])
    frames, symbols = torch.tensor([4, 5, 3, 2]), torch.tensor([2, 3, 1, 0])
    scores = randn(4, 5, 4)
    scores[torch.arange(5) >= frames[:, None]] = math.nan
    scores[0, :, 3] = math.nan  # a symbol that the target does not have
    s = sx.CTC(scores, targets, frames, symbols)
    for i, item in enumerate(s):
        every = item.enumerate_support()
        value = item.score(every)
        torch.testing.assert_close(s.log_partition()[i], value.logsumexp(0))
        p = value.softmax(0)[:, None, None]
        torch.testing.assert_close(s.marginals()[i], (p * every).sum(0))
    assert s[2].decode(s[2].argmax()) in [[3, 0, 0], [0, 3, 0], [0, 0, 3], [3, 3, 0], [0, 3, 3],
                                          [3, 3, 3]]  # fmt: skip
    assert s[3].decode(s[3].argmax()) == [0, 0]
    z = s.sample((2,))
    assert torch.equal(s.encode(s.decode(z)), z)


def test_conditions_without_lengths() -> None:
    s = sx.Alignment(randn(3, 3))
    for i, j in itertools.product(range(3), repeat=2):
        include = torch.zeros(3, 3, dtype=torch.bool)
        include[i, j] = True
        p = (s.condition(include=include).log_partition() - s.log_partition()).exp()
        torch.testing.assert_close(p, s.marginals()[i, j])


def test_ctc_third_derivative_beside_nan() -> None:
    """What no path meets, in the padding or before it, reaches no derivative, the third neither."""
    targets = torch.tensor([[1, 2], [1, 1], [2, 1]])
    frames, symbols = torch.tensor([3, 4, 5]), torch.tensor([2, 2, 1])
    clean = randn(3, 5, 4)
    usable = sx.CTC(clean, targets, frames, symbols)._usable_parts()
    weights = randn(2, 3, 5, 4)
    found = []
    for x in (clean, clean.masked_fill(~usable, math.nan)):
        x = x.clone().requires_grad_()
        mu = sx.CTC(x, targets, frames, symbols).marginals()
        (second,) = torch.autograd.grad((mu * weights[0]).sum(), x, create_graph=True)
        found.append((mu, second, *torch.autograd.grad((second * weights[1]).sum(), x)))
    torch.testing.assert_close(found[1], found[0])
    assert found[0][2].abs().max() > 1e-3


@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_ctc_of_many_frames_far_from_zero(shift: float) -> None:
    """Sums of a thousand large scores, of which only the differences count."""
    theta = (randn(2, 1000, 4) * 4).round() / 4
    targets = torch.randint(1, 4, (2, 200), generator=torch.Generator().manual_seed(0))
    near, far = (sx.CTC(x, targets) for x in (theta, theta + shift))
    torch.testing.assert_close(far.marginals(), near.marginals(), atol=1e-10, rtol=0)
    value = far.log_partition() - 1000 * shift
    torch.testing.assert_close(value, near.log_partition(), atol=1e-8, rtol=0)


def curvature(s: sx.Structure, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the entropy, and H·𝟏, which is 0 where all structures have as many parts."""
    (slope,) = torch.autograd.grad(s.entropy().sum(), x)
    (flat,) = torch.autograd.grad(s.marginals().sum(), x)
    return slope, flat


@pytest.mark.parametrize("shift", [0.0, -1e4])
@pytest.mark.parametrize(("frames", "backend"), [(100, "cpu"), (2000, "cpu"), (100, "naive")])
def test_ctc_curvature_does_not_drift(frames: int, backend: str, shift: float) -> None:
    """In float32, at scores whose sums along the paths are large."""
    g = torch.Generator().manual_seed(0)
    theta = torch.randint(-3000, 3000, (1, frames, 20), generator=g) / 1024 + shift
    targets = torch.randint(1, 20, (1, frames // 10), generator=g)
    found = []
    for x in (theta.requires_grad_(), theta.detach().double().requires_grad_()):
        with sx.backend(backend if x is theta else "cpu"):
            found.append(curvature(sx.CTC(x, targets), x))
    (slope, flat), (exact, _) = found
    assert flat.abs().max() < 1e-6
    torch.testing.assert_close(slope.double(), exact, atol=5e-6, rtol=0)


@pytest.mark.parametrize("backend", ["cpu", "naive"])
@pytest.mark.parametrize("omega", [sx.Shannon(), sx.Gini()], ids=str)
def test_dtw_curvature_does_not_drift(omega: sx.Smoothing, backend: str) -> None:
    """In float32, at an offset of 1e4, at which every path has as many cells as it can."""
    n, g = (100, torch.Generator().manual_seed(0))
    theta = torch.randint(-3000, 3000, (1, n, n), generator=g) / 1024 + 1e4
    found = []
    for x in (theta.requires_grad_(), theta.detach().double().requires_grad_()):
        with sx.backend(backend if x is theta else "cpu"):
            mu = sx.Alignment(x, smoothing=omega).marginals()
            weights = theta.detach().to(x), torch.ones_like(x)
            found.append(
                [torch.autograd.grad((w * mu).sum(), x, retain_graph=True) for w in weights]
            )
    ((slope,), (flat,)), ((exact,), _) = found
    assert flat.abs().max() < 1e-6
    torch.testing.assert_close(slope.double(), exact, atol=1e-5, rtol=0)


def test_a_direction_without_a_number_stays_where_it_is_forbidden() -> None:
    """Centring takes no number from a cell that no path visits."""
    x = randn(1, 12, 12)
    x[:, 3:5, 3:5] = -math.inf
    s = sx.Alignment(x.requires_grad_())
    v = torch.where(x == -math.inf, math.nan, x.detach())
    (w,) = torch.autograd.grad(s.marginals(), x, v)
    (plain,) = torch.autograd.grad(s.marginals(), x, v.nan_to_num())
    torch.testing.assert_close(w, plain)


@pytest.mark.parametrize("smoothing", [sx.Shannon(), sx.Gini()], ids=str)
def test_monotone_offsets_of_rows_cost_no_digits(smoothing: sx.Smoothing) -> None:
    """Every structure has one cell of each row, so what its scores share moves A only."""
    theta = (randn(2, 60, 50) * 64).round() / 64
    offset = torch.full((60, 1), 1e4, dtype=theta.dtype)
    offset[7] = -(2.0**40)
    sizes = torch.tensor([60, 41]), torch.tensor([50, 44])
    near, far = (
        sx.Alignment(x, kind="monotone", lengths=sizes, smoothing=smoothing)
        for x in (theta, theta + offset)
    )
    torch.testing.assert_close(far.marginals(), near.marginals(), atol=1e-12, rtol=0)
    gain = torch.stack([offset[:n].sum() for n in sizes[0].tolist()])
    torch.testing.assert_close(far.log_partition(), near.log_partition() + gain, rtol=1e-15, atol=0)
    single, moved = (sx.Alignment(x.float(), kind="monotone") for x in (theta, theta + 2.0**13))
    torch.testing.assert_close(moved.marginals(), single.marginals(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("force", [1e4, 1e7, 1e12])
def test_monotone_rows_keep_their_digits_beside_a_force_none_can_use(force: float) -> None:
    theta = randn(4, 5).float()
    theta[0, 4], theta[1, 4] = force, -math.inf
    without = theta.double()
    without[0, 4] = -math.inf
    mu, expected = (sx.Alignment(x, kind="monotone").marginals() for x in (theta, without))
    torch.testing.assert_close(mu.double(), expected, atol=1e-6, rtol=0)


def test_ctc_condition() -> None:
    s = sx.CTC(randn(5, 3), torch.tensor([1, 1]))
    for t, v in itertools.product(range(5), range(2)):
        include = torch.zeros(5, 3, dtype=torch.bool)
        include[t, v] = True
        p = (s.condition(include=include).log_partition() - s.log_partition()).exp()
        torch.testing.assert_close(p, s.marginals()[t, v])


def test_ctc_names_the_bad_score() -> None:
    """One that a path meets; what none meets may be anything."""
    scores, targets = randn(2, 4, 3), torch.tensor([1, 1])
    scores[0, 3, 2] = math.nan  # no symbol of the target
    assert bool(sx.CTC(scores, targets).log_partition().isfinite().all())
    scores[1, 0, 1] = math.nan
    with pytest.raises(ValueError, match=r"log_probs\[1, 0, 1\] is nan"):
        sx.CTC(scores, targets)


def test_ctc_without_room() -> None:
    """Three frames do not hold a repeat of three; a blank has to stand between."""
    s = sx.CTC(randn(2, 3, 3), torch.tensor([[1, 1, 1], [1, 2, 1]]))
    assert s.log_partition().isinf().tolist() == [True, False]
    for query in (s.argmax, s.marginals, s.entropy, s.sample):
        with pytest.raises(ValueError, match=r"item 0 allows no structure: .* 5 frames.* has 3\."):
            query()
    padded = sx.CTC(randn(4, 3), torch.tensor([1, 1, 0, 0]), target_lengths=torch.tensor(2))
    assert padded.argmax().shape == (4, 3)
    short = torch.tensor(2)
    with pytest.raises(ValueError, match=r"the item allows .* needs 3 frames.* it has 2\."):
        sx.CTC(padded.log_probs, padded.targets, short, short).argmax()
    forbidden = torch.full((4, 3), -math.inf)
    with pytest.raises(ValueError, match="forbidden"):
        sx.CTC(forbidden, torch.tensor([1])).argmax()


@pytest.mark.parametrize("kind", ["dtw", "edit", "monotone"])
def test_a_band_without_a_path(kind: str) -> None:
    """An error that says so, and only where the band is the reason."""
    for n, m in itertools.product(range(1, 8), repeat=2):
        s = sx.Alignment(torch.zeros(7, 7), pair(n, m), kind, band=0)
        if s.log_partition() > -math.inf:
            s.argmax()
            continue
        for query in (s.argmax, s.sample):
            with pytest.raises(ValueError, match=rf"band=0 leaves no path.*{n} x {m} .*at least 1"):
                query()
    gap = -math.inf if kind == "edit" else None
    s = sx.Alignment(torch.full((2, 3, 3), -math.inf), kind=kind, gap=gap, band=0)
    with pytest.raises(ValueError, match="forbidden"):
        s.marginals()


# -- errors --------------------------------------------------------------------------------------

x = torch.zeros(2, 3, 4)
ok = torch.tensor([3, 3]), torch.tensor([4, 4])
targets = torch.tensor([[1, 2]])
ERRORS: dict[str, tuple[Callable[[], object], list[str]]] = {
    "kind": (lambda: sx.Alignment(x, kind="dwt"), ["kind", "'dwt'", '"dtw"']),
    "scores": (lambda: sx.Alignment(x[0, 0]), ["scores", "(..., n, m)", "(4,)"]),
    "integers": (lambda: sx.Alignment(x.long()), ["scores", "floating point", "int64"]),
    "moves": (lambda: sx.Alignment(x, moves=x), ["moves", "(..., 3, 4, 3)", "(2, 3, 4)"]),
    "moves of edit": (
        lambda: sx.Alignment(x, kind="edit", moves=torch.zeros(3, 4, 3)),
        ["moves", '"dtw"', "'edit'"],
    ),
    "gap of dtw": (lambda: sx.Alignment(x, gap=1.0), ["gap", '"edit"', "'dtw'"]),
    "gap size": (
        lambda: sx.Alignment(x, kind="edit", gap=(torch.zeros(4), 0.0)),
        ["gap", "(..., 3)", "(4,)"],
    ),
    "gap triple": (lambda: sx.Alignment(x, kind="edit", gap=(1.0, 2.0, 3.0)), ["gap", "pair", "3"]),
    "band": (lambda: sx.Alignment(x, band=-1), ["band", "at least 0", "-1"]),
    "band of half": (lambda: sx.Alignment(x, band=0.5), ["band", "integer", "0.5"]),
    "lengths": (lambda: sx.Alignment(x, ok[0]), ["lengths", "pair", "(rows, columns)"]),
    "rows": (
        lambda: sx.Alignment(x, (torch.tensor([3, 5]), ok[1])),
        ["lengths of rows", "between 1 and 3", "got 5", "item 1"],
    ),
    "columns": (
        lambda: sx.Alignment(x, (ok[0], torch.tensor([0, 4]))),
        ["lengths of columns", "between 1 and 4", "got 0", "item 0"],
    ),
    "batch": (lambda: sx.Alignment(x, (torch.ones(3).long(), ok[1])), ["batch", "rows (3,)"]),
    "nan": (
        lambda: sx.Alignment(torch.where(torch.arange(4) == 2, math.nan, x)),
        ["Alignment", "scores[0, 0, 2]", "nan"],
    ),
    "gap nan": (lambda: sx.Alignment(x, kind="edit", gap=math.nan), ["gap of rows", "nan"]),
    "infeasible": (lambda: sx.Alignment(x, band=0).argmax(), ["Alignment.argmax", "item 0"]),
    "edges": (
        lambda: sx.Alignment(x, kind="edit").edge_marginals(),
        ["edge_marginals", '"dtw"', "marginals()"],
    ),
    "pair": (lambda: sx.Alignment(x).encode([[(0, 4)], []]), ["below (3, 4)", "(0, 4)"]),
    "kinds": (
        lambda: sx.Alignment(x).cross_entropy(sx.Alignment(x, kind="edit")),
        ["'dtw'", "'edit'"],
    ),
    "other lengths": (
        lambda: sx.Alignment(x, ok).cross_entropy(sx.Alignment(x, (ok[0] - 1, ok[1]))),
        ["same lengths"],
    ),
    "large": (lambda: sx.Alignment(torch.zeros(30, 30)).enumerate_support(), ["30 × 30", "many"]),
    "ctc targets": (lambda: sx.CTC(x, x), ["targets", "integers", "float32"]),
    "ctc bool": (lambda: sx.CTC(x, targets.bool()), ["targets", "integers", "torch.bool"]),
    "ctc complex": (lambda: sx.CTC(x, targets * 1j), ["targets", "integers", "complex"]),
    "ctc blank is none": (lambda: sx.CTC(x, targets, blank=0.5), ["blank", "whole number", "0.5"]),
    "ctc blank": (lambda: sx.CTC(x, targets, blank=4), ["blank", "between 0 and 3", "4"]),
    "ctc symbol": (
        lambda: sx.CTC(x, targets + 2),
        ["targets", "between 0 and 3", "got 4", "[0, 1]"],
    ),
    "ctc blank in target": (lambda: sx.CTC(x, targets - 1), ["targets", "not blank (0)", "got 0"]),
    "ctc frames": (
        lambda: sx.CTC(x, targets, torch.tensor([3, 4])),
        ["input_lengths", "between 1 and 3", "got 4", "item 1"],
    ),
    "ctc symbols": (
        lambda: sx.CTC(x, targets, None, torch.tensor([-1, 2])),
        ["target_lengths", "between 0 and 2", "got -1"],
    ),
    "ctc z": (
        lambda: sx.CTC(x, targets).score(torch.tensor([1, 1, 1])),
        ["CTC", "not a structure"],
    ),
    "ctc encode": (lambda: sx.CTC(x, targets).encode(torch.tensor([1, 2])), ["(..., 3)", "(2,)"]),
    "ctc range": (lambda: sx.CTC(x, targets).encode(torch.tensor([1, 2, 4])), ["between", "got 4"]),
    "ctc other targets": (
        lambda: sx.CTC(x, targets).cross_entropy(sx.CTC(x, targets.flip(-1))),
        ["same lengths and targets"],
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, words = ERRORS[name]
    with pytest.raises(ValueError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


@pytest.mark.parametrize("kind", KINDS)
def test_what_nobody_looked_at_gives_nan(kind: str) -> None:
    rows, columns = torch.tensor([3, 0, 2]), torch.tensor([4, 4, 9])
    s = sx.Alignment(randn(3, 3, 4), (rows, columns), kind=kind, validate_args=False)
    assert s.log_partition().isnan().tolist() == [False, True, True]
    ctc = sx.CTC(
        randn(4, 3, 4),
        torch.tensor([[1, 2], [0, 1], [1, 9], [1, 2]]),
        torch.tensor([3, 3, 3, 9]),
        validate_args=False,
    )
    assert ctc.log_partition().isnan().tolist() == [False, True, True, True]
    bad = ctc.encode(torch.tensor([[1, 2, 0], [0, 0, 1], [1, 1, 1], [1, 7, 2]]))
    assert bad.shape == (4, 3, 4) and bad[0].sum() == 3


@pytest.mark.parametrize("scale", [1.0, 30.0, 100.0, 299.0, 301.0, 800.0, 1e4])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_exponentials_and_logarithms_agree(scale: float, sign: float) -> None:
    """Kernels compute in exp space where float64 reaches, and in log space beyond."""
    torch.manual_seed(0)
    for n, m, band in ((9, 7, None), (3, 40, None), (30, 30, 3), (1, 5, None), (60, 60, None)):
        theta = sign * scale * torch.rand(3, n, m, dtype=torch.float64) ** 3
        theta[1] = theta[1].masked_fill(torch.rand(n, m) < 0.2, -math.inf)
        theta[2] = theta[2] + 1e3 * sign
        theta.requires_grad_()
        found = []
        for backend in ("cpu", "naive"):
            with sx.backend(backend):
                paths = sx.Alignment(theta, band=band, validate_args=False)
                value = paths.log_partition()
                exists = value > -math.inf
                (mu,) = torch.autograd.grad(value[exists].sum(), theta)
            found.append((value.detach(), mu))
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-11)
