"""The definitions of Ω: known values, bounds, limits, convexity, and what they do to a chain."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import structmax as sx
from structmax.forest.topology import lookup
from structmax.smoothing import from_code

f64 = torch.float64
inf = math.inf
KINDS = {
    "shannon": sx.Shannon,
    "gini": sx.Gini,
    "tsallis-1.2": lambda gamma: sx.Tsallis(1.2, gamma),
    "tsallis-1.5": lambda gamma: sx.Tsallis(1.5, gamma),
    "tsallis-3": lambda gamma: sx.Tsallis(3.0, gamma),
}
options = st.lists(st.floats(-50, 50), min_size=1, max_size=7)
gammas = st.sampled_from([0.1, 1.0, 5.0])
fast = settings(max_examples=40, deadline=None, database=None, derandomize=True)


def vector(x: list[float]) -> Tensor:
    return torch.tensor(x, dtype=f64)


def omega_of(omega: sx.Smoothing, p: Tensor) -> Tensor:
    """Ω(p) as written in the docstrings."""
    kind, gamma, alpha = omega.code
    if kind == 0:
        return torch.zeros(p.shape[:-1], dtype=p.dtype)
    if kind == 1:
        return gamma * torch.special.xlogy(p, p).sum(-1)
    return gamma / (alpha * (alpha - 1)) * (p**alpha - p).sum(-1)


def close(actual: Tensor, expected: Tensor | float, tolerance: float = 1e-9) -> None:
    expected = torch.as_tensor(expected, dtype=actual.dtype).expand_as(actual)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# -- values --------------------------------------------------------------------------------------


def test_known_values() -> None:
    x = vector([1.0, 0.0, -1.0])
    close(sx.Hard().max(x), 1.0, 0)
    close(sx.Hard().argmax(x), vector([1.0, 0.0, 0.0]), 0)
    close(sx.Shannon().max(x), x.logsumexp(0))
    close(sx.Shannon(0.5).max(x), 0.5 * (2 * x).logsumexp(0))
    close(sx.Shannon(2.0).argmax(x), (x / 2).softmax(0))
    close(sx.Gini().argmax(x), vector([1.0, 0.0, 0.0]))  # a gap of γ is just enough
    close(sx.Gini().max(x), 1.0)
    close(sx.Gini().argmax(vector([0.0, 0.5])), vector([0.25, 0.75]))
    close(sx.Gini().max(vector([0.0, 0.5])), 0.75 * 0.5 - 0.5 * (0.25**2 + 0.75**2 - 1))
    close(sx.Gini(4.0).argmax(vector([1.0, 0.0])), vector([0.625, 0.375]))
    # α = 1.5: p = ((x − τ)/2)², and for two equal options τ = x − √2
    close(sx.Tsallis(1.5).argmax(vector([3.0, 3.0, -9.0])), vector([0.5, 0.5, 0.0]))
    close(sx.Tsallis(1.5).max(vector([3.0, 3.0])), 3 + 4 / 3 * (1 - 2**-0.5))


@pytest.mark.parametrize("kind", KINDS)
@given(x=options, gamma=gammas)
@fast
def test_is_the_conjugate(kind: str, x: list[float], gamma: float) -> None:
    """maxΩ = ⟨p, x⟩ − Ω(p) at p = argmaxΩ, and no other p gives more."""
    omega, x = KINDS[kind](gamma), vector(x)
    p, value = omega.argmax(x), omega.max(x)
    close(p.sum(), 1.0)
    assert bool((p >= 0).all())
    close(value, (p * x).sum() - omega_of(omega, p), 1e-8)
    others = torch.rand(200, len(x), dtype=f64, generator=torch.Generator().manual_seed(0))
    others = torch.cat([(8 * others).softmax(-1), torch.eye(len(x), dtype=f64)])
    others = torch.cat([others, 0.99 * p + 0.01 * others])
    assert bool((value >= (others * x).sum(-1) - omega_of(omega, others) - 1e-9).all())
    leaf = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(omega.max(leaf), leaf)
    close(g, p, 1e-8)


@pytest.mark.parametrize("kind", KINDS)
@given(x=options, gamma=gammas)
@fast
def test_bound(kind: str, x: list[float], gamma: float) -> None:
    """0 ≤ maxΩ − max ≤ γ h(D), with equality above when all options are equal."""
    omega, x = KINDS[kind](gamma), vector(x)
    gap = omega.max(x) - x.max()
    assert -1e-10 <= gap <= omega.bound(len(x)) + 1e-10
    close(omega.max(torch.zeros_like(x)), omega.bound(len(x)))
    h = {
        "shannon": math.log(len(x)),
        "gini": (1 - 1 / len(x)) / 2,
    }.get(kind)
    if h is not None:
        assert math.isclose(omega.bound(len(x)), gamma * h, abs_tol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@given(x=options)
@fast
def test_small_gamma(kind: str, x: list[float]) -> None:
    """γ → 0 is the maximum; a unique best option gets everything."""
    omega, x = KINDS[kind](1e-6), vector(x)
    close(omega.max(x), x.max(), 1e-5)
    best = x == x.max()
    if best.sum() == 1 and bool(((x.max() - x)[~best] > 1e-3).all()):
        close(omega.argmax(x), best.to(f64))


@pytest.mark.parametrize("kind", [*KINDS, "hard"])
@given(x=options, gamma=gammas, shift=st.floats(-100, 100))
@fast
def test_shift_order_and_absent_options(
    kind: str, x: list[float], gamma: float, shift: float
) -> None:
    omega, x = sx.Hard() if kind == "hard" else KINDS[kind](gamma), vector(x)
    close(omega.max(x + shift), omega.max(x) + shift)
    close(omega.max(x.flip(0)), omega.max(x))
    padded = torch.cat([vector([-inf]), x, vector([-inf])])
    close(omega.max(padded), omega.max(x), 1e-8)
    close(omega.argmax(padded)[1:-1], omega.argmax(x), 1e-7)
    assert omega.argmax(padded)[0] == omega.argmax(padded)[-1] == 0
    close(omega.max(x[:1]), x[0])  # with one option it is that option


@pytest.mark.parametrize("kind", KINDS)
@given(x=options, gamma=gammas, seed=st.integers(0, 1000), t=st.floats(0, 1))
@fast
def test_convex(kind: str, x: list[float], gamma: float, seed: int, t: float) -> None:
    omega, x = KINDS[kind](gamma), vector(x)
    y = x + 5 * torch.randn(len(x), dtype=f64, generator=torch.Generator().manual_seed(seed))
    between = omega.max(t * x + (1 - t) * y)
    assert between <= t * omega.max(x) + (1 - t) * omega.max(y) + 1e-9
    assert omega.max(y) >= omega.max(x) + (omega.argmax(x) * (y - x)).sum() - 1e-9


@given(x=options, gamma=gammas)
@fast
def test_gini_is_tsallis_2(x: list[float], gamma: float) -> None:
    x = vector(x)
    close(sx.Gini(gamma).max(x), sx.Tsallis(2.0, gamma).max(x), 0)
    close(sx.Gini(gamma).argmax(x), sx.Tsallis(2.0, gamma).argmax(x), 0)
    assert sx.Gini(gamma).code == sx.Tsallis(2.0, gamma).code
    gap = (x[:, None] - x).abs().max()
    if gap > gamma:
        assert bool((sx.Gini(gamma).argmax(x) == 0).any()), "sparse"


@given(x=st.lists(st.floats(-5, 5), min_size=1, max_size=7), gamma=gammas)
@fast
def test_alpha_to_one_is_shannon(x: list[float], gamma: float) -> None:
    x = vector(x)
    for alpha, tolerance in ((1.01, 0.3), (1.001, 0.03), (1.0001, 0.003)):
        near = sx.Tsallis(alpha, gamma)
        close(near.max(x), sx.Shannon(gamma).max(x), tolerance)
        close(near.argmax(x), sx.Shannon(gamma).argmax(x), tolerance)
    close(sx.Tsallis(1.0, gamma).max(x), sx.Shannon(gamma).max(x), 0)


@pytest.mark.parametrize("kind", [*KINDS, "hard"])
def test_nothing_and_nan(kind: str) -> None:
    omega = sx.Hard() if kind == "hard" else KINDS[kind](1.0)
    none = vector([-inf, -inf])
    assert omega.max(none) == -inf and not bool(omega.argmax(none).any())
    bad = vector([1.0, math.nan, 0.0])
    assert bool(omega.max(bad).isnan()) and bool(omega.argmax(bad).isnan().all())
    leaf = vector([-inf, 0.3, -inf]).requires_grad_()
    (g,) = torch.autograd.grad(omega.max(leaf), leaf)
    close(g, vector([0.0, 1.0, 0.0]), 1e-8)


@pytest.mark.parametrize("kind", ["shannon", "gini", "tsallis-1.2", "tsallis-1.5"])
def test_derivatives(kind: str) -> None:
    """Two derivatives of argmaxΩ, with an absent option."""
    omega = KINDS[kind](1.5)
    x = vector([0.3, -0.4, 0.9, -7.0]).requires_grad_()

    def padded(x: Tensor) -> Tensor:
        return omega.argmax(torch.cat([x, x.new_full((1,), -inf)]))[:-1]

    assert torch.autograd.gradcheck(padded, x) and torch.autograd.gradgradcheck(padded, x)


def test_alpha_one_is_shannon() -> None:
    x = vector([1.0, 0.0, -1.0])
    one, shannon = sx.Tsallis(1.0, 0.5), sx.Shannon(0.5)
    assert one.code == shannon.code and one.bound(7) == shannon.bound(7)
    close(one.max(x), shannon.max(x), 0)
    close(one.argmax(x), shannon.argmax(x), 0)
    assert sx.Hard().bound(7) == 0


def test_the_base_class_is_no_smoothing() -> None:
    omega, x = sx.Smoothing(), vector([1.0, 0.0])
    for use in (lambda: omega.code, lambda: omega.max(x), lambda: omega.argmax(x),
                lambda: omega.bound(2)):  # fmt: skip
        with pytest.raises(TypeError, match=r"use one of sx\.Hard, sx\.Shannon"):
            use()


def test_codes_and_equality() -> None:
    for omega in (sx.Hard(), sx.Shannon(2.0), sx.Gini(0.5), sx.Tsallis(1.3, 2.0)):
        assert from_code(omega.code).code == omega.code
        again = eval(repr(omega), vars(sx))
        assert again == omega and hash(again) == hash(omega)
        assert pickle.loads(pickle.dumps(omega)) == omega == copy.deepcopy(omega)
    assert sx.Shannon() == sx.Shannon(1.0) != sx.Shannon(2.0)


# -- on a graph ----------------------------------------------------------------------------------


def random_chain(omega: sx.Smoothing, seed: int, scale: float) -> sx.LinearChain:
    random = torch.Generator().manual_seed(seed)
    n, c = int(torch.randint(1, 6, (), generator=random)), 3
    return sx.LinearChain(
        torch.randn(2, n, c, dtype=f64, generator=random) * scale,
        torch.randn(c, c, dtype=f64, generator=random) * scale,
        smoothing=omega,
    )


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 10_000), gamma=gammas, scale=st.sampled_from([0.0, 0.1, 1.0, 20.0]))
@fast
def test_bound_on_chains(kind: str, seed: int, gamma: float, scale: float) -> None:
    """0 ≤ DP_Ω − DP ≤ m·γ·h(D)."""
    omega = KINDS[kind](gamma)
    s = random_chain(omega, seed, scale)
    forest = lookup(s._forest_key())
    m = int(forest.derivation_size[s._goal()[0]])
    gap = s.log_partition() - s.score(s.argmax())
    assert bool((gap >= -1e-9).all())
    assert bool((gap <= m * omega.bound(forest.max_degree) + 1e-9).all())


@pytest.mark.parametrize("kind", KINDS)
def test_small_gamma_on_chains(kind: str) -> None:
    s = random_chain(KINDS[kind](1e-7), 3, 1.0)
    close(s.log_partition(), s.score(s.argmax()), 1e-5)
    close(s.marginals(), s.argmax(), 1e-6)


def drawn_twice() -> tuple[sx.Forest, sx.Forest]:
    """One of three parts: at one node, or the last two behind an inner node."""
    flat = sx.ForestBuilder()
    flat.edges(flat.node(), -1, -1, range(3))
    nested = sx.ForestBuilder()
    inner = nested.node()
    nested.edges(inner, -1, -1, [1, 2])
    goal = nested.node()
    nested.edge(goal, part=0)
    nested.edge(goal, inner)
    return flat.build(), nested.build()


def test_only_shannon_ignores_the_drawing() -> None:
    scores = vector([0.1, 0.0, -0.2])
    flat, nested = drawn_twice()

    def both(omega: sx.Smoothing, query: str) -> tuple[Tensor, Tensor]:
        return tuple(
            getattr(sx.Hyperpath(forest, scores, smoothing=omega), query)()
            for forest in (flat, nested)
        )

    for omega in (sx.Shannon(), sx.Shannon(0.3), sx.Hard()):
        for query in ("log_partition", "marginals", "entropy"):
            close(*both(omega, query))
    for omega in (sx.Gini(), sx.Tsallis(1.5)):
        for query in ("log_partition", "marginals"):
            one, other = both(omega, query)
            assert bool(((one - other).abs() > 1e-2).any())
    # Gini by hand: the inner node is worth x̄ + γ(1 − 1/2)/2 + gap²/4γ, more than its options
    inner = -0.1 + 0.25 + 0.2**2 / 4
    value = (0.1 + inner) / 2 + 0.25 + (inner - 0.1) ** 2 / 4
    close(both(sx.Gini(), "log_partition")[1], value)


# -- in a dynamic program -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alpha", "digits"), [(1.001, 1e-12), (1.01, 1e-13), (1.5, 1e-14), (3.0, 2e-8), (4.0, 1e-5)]
)
@pytest.mark.parametrize("name", ["cpu", "naive"])
def test_every_alpha_against_entmax(name: str, alpha: float, digits: float) -> None:
    """Of 20,000 rows of 8 and of 3 options: some have one at the edge of the support."""
    torch.manual_seed(0)
    omega = sx.Tsallis(alpha)
    for x in (torch.randn(20000, 8, dtype=f64), torch.randn(20000, 3, dtype=f64) / 3):
        with sx.backend(name):
            one = sx.Choice(x, smoothing=omega)
            mu, value = one.marginals(), one.log_partition()
        close(mu, sx.entmax(x, alpha), digits)
        close(value, sx.smoothed_max(x, omega), 10 * digits)
        close(mu.sum(-1), 1.0, digits)


def test_an_option_at_the_edge_of_the_support() -> None:
    """Newton's steps went to and fro between both ends of the bracket."""
    x = vector([0.0, -0.5 + 2.9e-13])
    p = sx.Choice(x, smoothing=sx.Tsallis(3.0)).marginals()
    close(p, sx.entmax(x, 3.0), 2e-8)  # √ε


@pytest.mark.parametrize("alpha", [1 + 1e-9, 1.0001, 1.01])
def test_no_digits_are_lost_near_shannon(alpha: float) -> None:
    x = torch.tensor([0.0, 0.1, 0.2])
    exact = sx.smoothed_max(x.double(), sx.Tsallis(alpha))
    close(sx.Tsallis(alpha).max(x).double(), exact, 2e-7)
    close(sx.Tsallis(alpha).max(x.double()), exact, 1e-15 / (alpha - 1) + 1e-15)


def test_some_probability_is_left() -> None:
    """In float32, where the threshold has too few digits."""
    x = torch.tensor([0.24052053689956665, -0.13891330361366272, -0.09118553251028061])
    for alpha in (4.0, 8.0, 20.0):
        p = sx.Tsallis(alpha).argmax(x)
        close(p.sum(), 1.0, 1e-6)
        assert p[0] > 0.5


@pytest.mark.parametrize("alpha", [1.0005, 4.1, 20.0])
def test_alphas_without_digits_are_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match=r"Choice: alpha of Tsallis must be 1, or between"):
        sx.Choice(torch.zeros(3), smoothing=sx.Tsallis(alpha))
