"""Edges of relaxations, maps, factor graphs, hidden Markov models and estimators."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import structmax as sx
from structmax import estimators as est
from structmax.compat import torch_struct

INF = math.inf
COSTS = torch.tensor([0.0, 1.0, 5.0])
MAPS: dict[str, Callable[..., Tensor]] = {
    "csparsemax": lambda x, dim=-1: sx.csparsemax(x, 0.6, dim=dim),
    "csoftmax": lambda x, dim=-1: sx.csoftmax(x, 0.6, dim=dim),
    "budgetmax": lambda x, dim=-1: sx.budgetmax(x, 1.5, dim=dim) / 1.5,
}


def cost(z: Tensor) -> Tensor:
    return z @ COSTS


# -- relaxed matchings ----------------------------------------------------------------------------

RELAXED: dict[str, tuple[Tensor, tuple[Tensor, Tensor] | None]] = {
    "forbidden": (torch.tensor([[1, 0, 0, 1], [1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]]), None),
    "wide": (torch.tensor([[1, 0, 0, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 0, 1]]), None),
    "row": (torch.ones(1, 3), None),
    "column": (torch.ones(3, 1), None),
    "ragged": (torch.ones(2, 3, 4), (torch.tensor([2, 3]), torch.tensor([4, 2]))),
}


@pytest.mark.parametrize("name", RELAXED)
def test_second_derivatives_of_bethe(name: str) -> None:
    allowed, lengths = RELAXED[name]
    torch.manual_seed(0)
    x = torch.randn(allowed.shape, dtype=torch.float64, requires_grad=True)
    for answer in range(2):

        def bethe(x: Tensor, answer: int = answer) -> Tensor:
            return sx.Assignment(torch.where(allowed > 0, x, -INF), lengths).bethe(10)[answer]

        assert torch.autograd.gradcheck(bethe, x)
        assert torch.autograd.gradgradcheck(bethe, x)


def test_relaxations_want_iterations() -> None:
    pairs = sx.Assignment(torch.zeros(2, 2))
    wrong: list[tuple[str, Any]] = [("iterations", 0), ("iterations", 2.5), ("tol", math.nan)]
    for option, given in wrong:
        with pytest.raises(ValueError, match=rf"Assignment\.sinkhorn: {option} must be"):
            pairs.sinkhorn(**{option: given})
    with pytest.raises(ValueError, match=r"Assignment\.bethe: iterations must be at least 1"):
        pairs.bethe(0)


# -- hidden Markov models -------------------------------------------------------------------------


def test_an_hmm_follows_its_emissions() -> None:
    torch.manual_seed(0)
    initial, transition, emission = torch.randn(3), torch.randn(3, 3), torch.randn(3, 5)
    emission.requires_grad_()
    observations = torch.randint(5, (2, 4))
    states = sx.HMM(initial, transition, emission, observations)
    optimizer = torch.optim.SGD([emission], lr=0.5)
    for _ in range(2):  # each query has a graph of its own
        optimizer.zero_grad()
        states.log_partition().sum().backward()
        optimizer.step()
    found = sx.HMM(initial, transition, emission, observations)
    torch.testing.assert_close(states.log_partition(), found.log_partition(), rtol=0, atol=0)
    torch.testing.assert_close(states.marginals(), found.marginals(), rtol=0, atol=0)


def test_observations_that_change() -> None:
    torch.manual_seed(0)
    given = torch.randn(3, 3), torch.randn(5, 3), torch.randn(3)
    observations = torch.randint(4, (2, 4))
    states = torch_struct.HMM(*given, observations)
    before = states.partition
    observations += 1
    expected = torch_struct.HMM(*given, observations).partition
    torch.testing.assert_close(states.partition, expected, rtol=0, atol=0)
    assert not torch.equal(before, expected)
    observations.fill_(9)
    with pytest.raises(ValueError, match="observations must be between 0 and 4"):
        _ = states.partition


# -- factor graphs --------------------------------------------------------------------------------


def test_what_a_factor_forbids_is_exactly_zero() -> None:
    torch.manual_seed(0)
    scores, unary = torch.randn(2, 60, 4, 5)
    off = torch.rand(60, 4, 5) < 0.25
    off[..., 0] = False
    graph = sx.FactorGraph()
    tags = graph.variables(scores, 1)
    graph.factor(sx.LinearChain(unary.masked_fill(off, -INF), torch.randn(5, 5)), tags)
    graph.at_most_one(tags.T)
    graph.xor(tags)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of items whose factors contradict each other
        found = graph.sparsemap(max_iter=50)[tags]
    assert bool((found[off] == 0).all()) and bool((found[~off] > 0).any())


def test_a_negated_variable_that_one_item_switches_off() -> None:
    scores = torch.zeros(3, 2)
    scores[1, 0] = -INF
    graph = sx.FactorGraph()
    v = graph.variables(scores, 1)
    graph.xor(torch.stack([~v[0], v[1]]))
    with pytest.raises(ValueError, match=r"item 1: variable 0 is switched off .* Leave it out"):
        graph.sparsemap()


# -- maps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("backend", ["naive", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_scores_that_are_far_apart(name: str, backend: str, dtype: torch.dtype) -> None:
    x = torch.tensor(
        [[1e16, 0, 1, -INF], [0, -1e30, -1e30, -INF], [-INF] * 4, [0, 0.1, 0.2, 0.3]], dtype=dtype
    ).requires_grad_()
    with sx.backend(backend):
        p = MAPS[name](x)
        (g,) = torch.autograd.grad(p[:, 1].sum(), x)
    torch.testing.assert_close(p.sum(-1), torch.tensor([1.0, 1, 0, 1], dtype=dtype))
    assert p[0, 0] == p[1, 0] == max(p[0]) and p[1, 1] == p[1, 2] > 0
    assert bool(g.isfinite().all()) and g[1, 1] > 0
    if name != "csoftmax":
        assert p[0, 1] == 0


@pytest.mark.parametrize("name", MAPS)
def test_forward_mode_along_another_dimension(name: str) -> None:
    torch.manual_seed(0)
    x, v = torch.randn(2, 4, 3)

    def p(x: Tensor) -> Tensor:
        return MAPS[name](x, 0)

    (expected,) = torch.autograd.functional.jvp(p, x, v)[1:]
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(p(forward_ad.make_dual(x, v))).tangent
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.func.jvp(p, (x,), (v,))[1], expected)


@pytest.mark.parametrize(
    ("name", "option"),
    [("fusedmax", "strength"), ("oscarmax", "strength"), ("csoftmax", "upper")],
)
def test_options_that_are_no_numbers(name: str, option: str) -> None:
    f: Any = getattr(sx, name)
    for given in (None, "0.5"):
        with pytest.raises(ValueError, match=f"{name}: {option} must be a .*number.*, got"):
            f(torch.zeros(3), given)


# -- estimators -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"baseline": "ema"}, {"normalize": True}], ids=str)
def test_moments_of_mapped_costs(options: dict[str, Any]) -> None:
    """Under vmap they are those of all items, as of a batch."""
    scores = torch.tensor([[0.0, -INF, -INF], [-INF, 0.0, -INF], [-INF, -INF, 0.0]])
    mapped, batch = est.Reinforce(**options), est.Reinforce(**options)

    def loss(x: Tensor) -> Tensor:
        return mapped.loss(sx.Choice(x, validate_args=False), cost)

    torch.vmap(torch.func.grad(loss), randomness="different")(scores)
    batch.loss(sx.Choice(scores), cost)
    for found, expected in zip(mapped.buffers(), batch.buffers(), strict=True):
        torch.testing.assert_close(found, expected)


def test_mapped_draws_are_not_replayed() -> None:
    ppo = est.PPO()
    scores = torch.zeros(4, 3)
    torch.vmap(lambda x: ppo.loss(sx.Choice(x), cost), randomness="different")(scores)
    with pytest.raises(RuntimeError, match=r"no draws yet.*not in vmap"):
        ppo.replay(sx.Choice(scores))


def test_sum_and_sample_under_vmap() -> None:
    torch.manual_seed(0)
    estimator, x = est.SumAndSample(k=1), torch.tensor([0.3, 0.0, -0.4])
    gradient = torch.func.grad(lambda x: estimator.loss(sx.Choice(x), cost))
    found = torch.vmap(gradient, randomness="different")(x.expand(20_000, 3)).mean(0)
    p = x.softmax(-1)
    torch.testing.assert_close(found, p * (COSTS - p @ COSTS), rtol=0, atol=0.03)


def test_true_is_no_count_of_samples() -> None:
    with pytest.raises(ValueError, match=r"samples must be an integer, .* got True"):
        est.Reinforce(samples=True)


def test_draws_of_inference_mode_are_replayed() -> None:
    ppo, x = est.PPO(samples=2), torch.zeros(2, 3, requires_grad=True)
    with torch.inference_mode():
        ppo.loss(sx.Choice(x), cost)
    ppo.replay(sx.Choice(x)).sum().backward()
    assert x.grad is not None and bool(x.grad.isfinite().all())


def test_only_rows_beyond_a_bound_are_projected() -> None:
    graph = sx.FactorGraph()
    scores = torch.tensor([[2.0, 2.0, 2.0], [1.0, -math.inf, -math.inf]])
    ids = graph.variables(scores)
    graph.budget(ids, 2)
    mu = graph.sparsemap()[ids]
    torch.testing.assert_close(mu[0].sum(), torch.tensor(2.0))
    assert mu[1].tolist() == [1.0, 0.0, 0.0]


def test_a_perturbation_is_a_tensor() -> None:
    with pytest.raises(ValueError, match=r"perturb: delta must be a tensor, got \[1.0, 2.0\]"):
        sx.Choice(torch.zeros(2)).perturb([1.0, 2.0])


@pytest.mark.parametrize("bounded", [sx.csparsemax, sx.csoftmax])
def test_tight_bounds_of_half_precision_beside_an_absent_entry(
    bounded: Callable[..., Tensor],
) -> None:
    """Their sum is a little less than 1, which is no reason to solve again."""
    x = torch.tensor([3.0, 1.0, 2.0, -INF])
    upper = torch.tensor([0.333, 0.333, 0.333, 0.5], dtype=torch.bfloat16).requires_grad_()
    p = bounded(x, upper)
    (g,) = torch.autograd.grad((p * torch.tensor([1.0, 10.0, 100.0, 7.0])).sum(), upper)
    assert g.tolist() == [-9.0, 0.0, 90.0, 0.0]  # a looser bound takes from the lowest score


@pytest.mark.parametrize(
    "transform",
    [torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f), randomness="different")],
)
def test_what_estimators_keep_outlives_a_transform(transform: Callable[..., Any]) -> None:
    for estimator in (est.Reinforce(samples=2, baseline="ema"), est.PPO(samples=2, baseline="ema")):
        loss = lambda s, e=estimator: e.loss(sx.Choice(s), lambda z: z[..., 0]).sum()  # noqa: E731
        transform(loss)(torch.randn(4, 5))
        again = pickle.loads(pickle.dumps(copy.deepcopy(estimator)))
        assert all(bool(b.isfinite().all()) for b in again.state_dict().values())


def test_unary_scores_of_an_hmm_are_not_assigned() -> None:
    tables = torch.zeros(2), torch.zeros(2, 2), torch.zeros(2, 3)
    model = sx.HMM(*tables, torch.tensor([0, 1]))
    with pytest.raises(AttributeError, match="HMM: unary cannot be set"):
        model.unary = torch.zeros(2, 2)


# -- forms and transforms -------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[2, 3], [2, 2]])
@pytest.mark.parametrize("smoothing", [sx.Shannon(), sx.Gini()])
def test_decoded_tags_are_scored(lengths: list[int], smoothing: sx.Smoothing) -> None:
    args = torch.randn(2, 3, 2), torch.randn(2, 2)
    chain = sx.LinearChain(*args, lengths=torch.tensor(lengths), smoothing=smoothing)
    z = chain.argmax()
    for query in (chain.score, chain.log_prob):
        assert torch.allclose(query(chain.decode(z)), query(z))
    for wrong in ("nouns", [[0, 1, 0], 5], [None]):
        with pytest.raises(ValueError, match="z must be a tensor or lists of numbers"):
            chain.log_prob(wrong)
    with pytest.raises(ValueError, match=r"tags must be \(..., 3\) .* got \(2,\)"):
        sx.LinearChain(*args).score([0, 1])


def test_one_item_of_a_chain_with_steps() -> None:
    chain = sx.LinearChain(
        torch.zeros(2, 3, 2), torch.zeros(2, 2, 2, 2), lengths=torch.tensor([2, 3]),
        smoothing=sx.Gini(),
    )  # fmt: skip
    assert torch.allclose(chain[0].entropy(), chain.entropy()[0])
    assert chain[0].expand(()).batch_shape == ()


@pytest.mark.parametrize("fresh", [False, True])
def test_paths_are_made_inside_transforms(fresh: bool) -> None:
    """A graph that a transform drew first is as good as any other later."""
    edges = [[0, 1], [0, 2], [1, 2], [2, 3 + fresh]]  # not yet kept

    def value(x: Tensor) -> Tensor:
        path = sx.Path(torch.tensor(edges), x, 0, 2)
        assert path.decode(path.argmax()) in ([0, 2], [0, 1, 2]) or not fresh
        return path.log_partition()

    x = torch.tensor([0.5, 0.0, 1.0, 0.0])
    slope = torch.func.grad(value)(x)
    out, tangent = torch.func.jvp(value, (x,), (torch.ones(4),))
    path = sx.Path(torch.tensor(edges), x, 0, 2)
    assert torch.allclose(path.marginals(), slope)
    assert torch.allclose(path.log_partition(), out)
    assert torch.allclose(tangent, slope.sum())
    assert torch.allclose(torch.func.jacrev(torch.func.jacrev(value))(x), hessian(value, x))


def test_edges_are_not_mapped() -> None:
    edges = torch.tensor([[0, 1], [0, 2], [1, 2]]).expand(2, 3, 2)
    with pytest.raises(ValueError, match="Path: edges cannot be mapped"):
        torch.vmap(lambda e, x: sx.Path(e, x, 0, 2).log_partition())(edges, torch.zeros(2, 3))


def hessian(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.autograd.functional.hessian(function, x)  # type: ignore[return-value]


def test_free_paths_are_decoded_inside_transforms() -> None:
    def total(x: Tensor) -> Tensor:
        grid = sx.GridPath(x, moves="all")
        assert grid.decode(grid.argmax()) == [(0, 0), (1, 1)]
        return x.sum()

    assert torch.equal(torch.func.grad(total)(-torch.ones(2, 2)), torch.ones(2, 2))


def test_bad_items_that_nobody_looked_at_are_nan() -> None:
    """Never a plausible number."""
    lengths, unlooked = torch.tensor([9, 3]), {"validate_args": False}
    chain = sx.LinearChain(torch.ones(2, 3, 2), torch.zeros(2, 2), lengths=lengths, **unlooked)
    assert chain.score(torch.zeros(2, 3).long()).isnan().tolist() == [True, False]
    z = torch.nn.functional.one_hot(torch.tensor([[0, 0, 1]] * 2), 2).float()
    for smoothing in (sx.Gini(), sx.Hard()):
        ctc = sx.CTC(
            torch.zeros(2, 3, 2), torch.tensor([[1], [1]]), torch.tensor([0, 3]),
            torch.tensor([1, 1]), smoothing=smoothing, **unlooked,
        )  # fmt: skip
        assert ctc.log_prob(z).isnan().tolist() == [True, False]
    scores = torch.zeros(2, 2, 2)
    scores[0, 1, 1] = math.nan
    best = sx.Assignment(scores, **unlooked).max_marginals()
    assert best[0].isnan().all() and (best[1] == 0).all()
    grammar = sx.PCFG(
        torch.zeros(1), torch.zeros(1, 2, 2), torch.zeros(2, 3, 1), lengths=lengths,
        smoothing=sx.Hard(), **unlooked,
    )  # fmt: skip
    assert grammar.entropy().isnan().tolist() == [True, False]
    assert grammar.log_prob(torch.zeros(2, 3, 3, 2)).isnan().tolist() == [True, False]


# -- estimators -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"baseline": "ema"}, {"normalize": True}])
@pytest.mark.parametrize("bad", [INF, math.nan])
def test_a_cost_that_is_not_finite_is_forgotten(options: dict[str, Any], bad: float) -> None:
    estimator = est.Reinforce(4, **options)
    for step in range(3):
        scores = torch.zeros(2, 3, requires_grad=True)
        odd = torch.tensor([bad if step == 1 else 0.0, 0.0])
        estimator.loss(sx.Choice(scores), lambda z, odd=odd: cost(z) + odd).sum().backward()
    assert scores.grad is not None and scores.grad.isfinite().all()
    assert all(t.isfinite() for t in estimator.state_dict().values())
    kept = copy.deepcopy(estimator.state_dict())
    scores = torch.zeros(2, 3)
    estimator.loss(sx.Choice(scores), lambda z: cost(z) + bad)  # not one is finite
    assert all(torch.equal(t, kept[name]) for name, t in estimator.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_estimators_keep_is_wide_in_a_narrow_model(dtype: torch.dtype) -> None:
    estimator = est.Reinforce(64, "ema", normalize=True).to(dtype)
    for _ in range(3):
        scores = torch.zeros(3, requires_grad=True)
        estimator.loss(sx.Choice(scores), lambda z: 1e5 * cost(z)).backward()
        assert scores.grad is not None and scores.grad.isfinite().all()
        assert bool(scores.grad.any())
    look = est.IMLE("adaptive").to(dtype).look
    look.update(torch.tensor([4.0]))
    assert look.alpha.item() == pytest.approx(0.999, abs=1e-6)
    assert est.Reinforce(1, "ema").to("meta").baseline.costs.total.is_meta
    moments = est.Reinforce(1, "ema").baseline.costs
    moments.load_state_dict({k: t.to(dtype) for k, t in moments.state_dict().items()}, assign=True)
    moments.update(torch.tensor([1e5]))
    assert moments.mean() == 1e5


def test_an_adaptive_look_does_not_see_masks() -> None:
    def slope(mask: float, dtype: torch.dtype) -> Tensor:
        scores = torch.tensor([[1.0, 2.0, mask]], dtype=dtype, requires_grad=True)
        estimator = est.IMLE("adaptive", noise=None)
        estimator.loss(sx.Choice(scores), lambda z: z @ COSTS.to(dtype) ** 2).sum().backward()
        assert scores.grad is not None
        return scores.grad

    for dtype in (torch.float32, torch.float64):
        found = slope(torch.finfo(dtype).min, dtype)
        assert bool(found.any()) and torch.equal(found, slope(-INF, dtype))


def test_local_softmax_has_the_temperature_of_the_structure() -> None:
    grads = []
    for backward in ("softmax", "marginals"):
        scores = torch.tensor([0.0, 1.0, 2.0], requires_grad=True)
        choice = sx.Choice(scores, smoothing=sx.Shannon(0.25))
        cost(est.StraightThrough(backward)(choice)).backward()
        grads.append(scores.grad)
    assert torch.allclose(*grads)


def test_estimators_without_a_reference_are_left_out_or_told() -> None:
    grid = sx.GridPath(-torch.rand(2, 2), moves="all")
    result = sx.diagnose(grid, lambda z: z.sum((-1, -2)), samples=2)
    assert {r["estimator"] for r in result.records} == {"sparsemap", "sparse-expectation"}
    assert result.skipped["imle"] == "nothing to compare with"
    with pytest.raises(sx.structures.base.IntractableError, match="no gradient under"):
        sx.diagnose(grid, lambda z: z.sum((-1, -2)), "straight-through", samples=2)


# -- what is said ---------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0.25, 0.8, 1.0, 2.0])
def test_smoothed_maxima_near_the_end_of_the_range(gamma: float) -> None:
    for omega in (sx.Shannon(gamma), sx.Gini(gamma), sx.Tsallis(1.5, gamma)):
        for x in ([0.0, 3e38], [-3e38, -3e38], [torch.finfo(torch.float32).min, 1.0]):
            found = sx.smoothed_max(torch.tensor(x), omega)
            assert torch.isclose(found, torch.tensor(max(x)), rtol=1e-6, atol=2.0)
    assert sx.smoothed_max(torch.full((2,), -INF), sx.Gini(gamma)) == -INF


def test_infinite_series_are_refused_whatever_the_features() -> None:
    for d in (1, 2):
        x = torch.zeros(1, 2, d)
        x[0, 0, 0] = INF
        with pytest.raises(ValueError, match=r"x\[0, 0, 0\] is inf. Series must be finite"):
            sx.losses.SoftDTW()(x, torch.zeros(1, 2, d))
    no_path = sx.losses.SoftDTW(band=0)(torch.zeros(1, 2, 1), torch.zeros(1, 3, 1))
    assert no_path.tolist() == [INF]


def test_targets_that_are_no_integers() -> None:
    chain = sx.LinearChain(torch.zeros(2, 3, 2), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="Tags, heads and the like must be integers"):
        sx.losses.crf(chain, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="emissions must be a tensor, got list"):
        sx.nn.CRF(2).decode([[0.0, 1.0]])  # type: ignore[arg-type]


def test_events_of_grammars_go_to_and_fro() -> None:
    potentials = torch.randn(2, 4, 2), torch.randn(2, 1, 3, 3), torch.randn(2, 1)
    grammar = torch_struct.SentCFG(potentials, lengths=torch.tensor([4, 3]))
    event = grammar.argmax
    again = grammar.to_event(*grammar.from_event(event))
    assert all(torch.equal(a.to(b), b) for a, b in zip(again, event))
