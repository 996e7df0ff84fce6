"""Paths that the tests of each part leave out: rare errors, and what other libraries call."""

from __future__ import annotations

import functools
import inspect
import math
from pathlib import Path
from types import SimpleNamespace

import numba
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as torch_attention

import structmax as sx
from structmax import estimators as est
from structmax import jit
from structmax.estimators import baselines, exact_expectation, noise
from structmax.nn import hf
from structmax.primitive import backend_for
from structmax.sparse.factors import Pair
from structmax.sparse.solve import _checked_options, _wants_items

# -- the command line ------------------------------------------------------------------------------


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]):
    """Run a command: exit code, standard output, standard error."""
    pytest.importorskip("typer")
    pytest.importorskip("safetensors")
    from structmax.cli import main

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


def test_show_of_a_file(command, tmp_path: Path) -> None:
    run, lines = tmp_path / "run", tmp_path / "lines"
    assert command("train", "toy", "--steps", 1, "--device", "cpu", "--out", run)[0] == 0
    lines.write_text("0 1 0\n")
    code, out, err = command("show", run, lines, "--device", "cpu")
    assert code == 0 and out, err
    code, _, err = command("show", run, lines, "--html", tmp_path / "p.html", "--device", "cpu")
    assert code == 0 and "<svg" in (tmp_path / "p.html").read_text(encoding="utf-8"), err
    lines.write_text("")
    code, _, err = command("show", run, lines, "--html", tmp_path / "p.html", "--device", "cpu")
    assert code == 2 and "nothing to draw" in err
    lines.write_bytes(b"\xff\xfe")
    code, _, err = command("predict", run, lines, "--device", "cpu")
    assert code == 2 and "line 1: this is not text in UTF-8" in err


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (BrokenPipeError, 1)])
def test_interrupted_commands(command, monkeypatch, error: type[BaseException], code: int) -> None:
    import io
    import sys

    from structmax import doctor

    def fail() -> None:
        raise error

    monkeypatch.setattr(doctor, "examine", fail)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert command("doctor")[0] == code


def test_a_doctor_who_finds_something(command, monkeypatch) -> None:
    from structmax import doctor

    def fail(*_: object) -> None:
        raise RuntimeError("no\ncompiler")

    monkeypatch.setattr(doctor, "_marginals", fail)
    code, out, _ = command("doctor")
    assert code == 1 and "fail: no compiler" in out


def test_a_doctor_who_finds_a_gpu(monkeypatch) -> None:
    from structmax import doctor

    card = SimpleNamespace(name="A card", total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: card)
    monkeypatch.setattr(doctor, "_kernels", lambda device: (f"fine on {device}", True))
    rows = doctor.examine()
    assert ("gpu 0", "A card, 80 GiB", True) in rows
    assert rows[-1] == ("gpu 0 kernels", "fine on cuda:0", True)


# -- transformers: what their models would call ----------------------------------------------------


class Layer(torch.nn.Module):
    is_causal = True


def heads(groups: int = 4) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    sizes = [(2, 4, 5, 8), (2, groups, 5, 8), (2, groups, 5, 8)]
    return [torch.randn(size, generator=draw) for size in sizes]


def attend(query, key, value, mask, **options) -> torch.Tensor:
    return hf._attend(Layer(), query, key, value, mask, map="softmax", options={}, **options)[0]


def test_transformers_attention() -> None:
    query, key, value = heads()
    found = attend(query, key, value, None)
    wanted = torch_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(found, wanted.transpose(1, 2))
    query, key, value = heads(groups=2)  # grouped keys
    mask = torch.ones(5, 5, dtype=torch.bool).tril(1).expand(2, 1, 5, 5)
    shared = [t.repeat_interleave(2, 1) for t in (key, value)]
    wanted = torch_attention(query, *shared, attn_mask=mask).transpose(1, 2)
    torch.testing.assert_close(attend(query, key, value, mask), wanted)
    # the same mask as numbers, which transformers add to the scores; and a bias beside it
    numbers = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    torch.testing.assert_close(attend(query, key, value, numbers), wanted)
    bias = torch.randn(1, 4, 5, 5)
    wanted = torch_attention(query, *shared, attn_mask=(bias + numbers)).transpose(1, 2)
    found = attend(query, key, value, numbers, position_bias=bias, is_causal=False)
    torch.testing.assert_close(found, wanted)


def test_transformers_options_that_are_refused() -> None:
    for name in hf.UNSUPPORTED:
        with pytest.raises(NotImplementedError, match='Use attn_implementation="eager"'):
            attend(*heads(), None, **{name: 1.0})


def test_transformers_is_named_where_it_is_missing(monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install structmax\[hf\]"):
        hf.register("sparsemax")


# -- estimators ------------------------------------------------------------------------------------

DEFAULTS = {
    "BlackBox": {"lam": 10.0},
    "GumbelStraightThrough": {"temperature": 1.0, "samples": 1},
    "IMLE": {"lam": 10.0, "samples": 1, "noise": "gumbel", "scale": True, "oracle": "argmax"},
    "PerturbAndMAP": {"noise": "gumbel", "samples": 1},
    "PerturbAndParse": {"hard": False, "noise": "gumbel", "samples": 1},
    "Perturbed": {"sigma": 1.0, "samples": 10, "noise": "normal"},
    "PPO": {"clip": 0.2, "updates": 4, "samples": 1, "baseline": None, "normalize": False},
    "Reinforce": {"samples": 1, "baseline": None, "normalize": False, "entropy_weight": 0.0},
    "SPIGOT": {"step": 1.0, "pullback_steps": 1, "variant": "euclidean"},
    "StraightThrough": {"backward": "identity", "k": 8},
    "SumAndSample": {"k": 1, "samples": 1, "tries": 8},
    "TopKExpectation": {"k": 8, "distinct": False},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_of_estimators(name: str) -> None:
    parameters = inspect.signature(getattr(est, name)).parameters
    assert {key: parameters[key].default for key in DEFAULTS[name]} == DEFAULTS[name]


def test_sum_of_gamma_counts_the_parts_of_the_best() -> None:
    assert "argmax" in est.PerturbAndParse(noise="sum-of-gamma").needs
    assert "argmax" not in est.PerturbAndParse().needs


def test_estimators_show_their_options() -> None:
    shown = repr(est.Reinforce(samples=2, baseline="leave-one-out", normalize=True))
    assert "samples=2" in shown and "'leave-one-out'" in shown and "on=True" in shown
    own = repr(est.Reinforce(baseline=torch.nn.Linear(2, 1)))
    assert "Linear(in_features=2" in own


@pytest.mark.parametrize("name", ["exact-expectation", "top-k-expectation"])
def test_items_without_a_structure_that_nobody_looks_at(name: str) -> None:
    scores = torch.tensor([[0.0, 1.0], [-torch.inf, -torch.inf]])
    estimator, cost = est.by_name(name), lambda z: z[..., 0]
    with pytest.raises(ValueError, match="item 1"):
        estimator.loss(sx.Choice(scores), cost)
    loss = estimator.loss(sx.Choice(scores, validate_args=False), cost)
    assert loss[0].isfinite() and not loss[1].isfinite()


def test_adaptive_scale_leaves_forbidden_parts_out() -> None:
    estimator = est.IMLE(lam="adaptive")
    structure = sx.Choice(torch.tensor([3.0, -torch.inf, 4.0]))
    # α ‖θ‖ / ‖g‖ with α = 1 at first
    assert estimator.look(structure, torch.tensor([0.0, 7.0, 2.0])).item() == pytest.approx(2.5)


def test_entropy_is_subtracted() -> None:
    structure = sx.Choice(torch.tensor([0.0, 1.0, 3.0]))
    loss = torch.tensor(2.0)
    found = baselines.regularized(loss, structure, 0.5)
    torch.testing.assert_close(found, 2.0 - 0.5 * structure.entropy())
    assert baselines.regularized(loss, structure, 0.0) is loss


def test_advantages_are_never_enlarged() -> None:
    scale = baselines.Scale(on=True)
    for deviation, wanted in [(0.5, 1.0), (4.0, 4.0)]:
        scale.spread, scale.weight = torch.tensor(deviation**2), torch.tensor(1.0)
        values = torch.tensor([-3.0, 3.0])
        torch.testing.assert_close(scale.eval()(values), values / wanted)


def test_every_structure_of_a_ragged_batch() -> None:
    trees = sx.BinaryTree(torch.randn(3, 4, 4), lengths=torch.tensor([4, 2, 3]))
    z, exists = exact_expectation.every_structure(trees)
    assert z.shape == (5, 3, 4, 4) and exists.sum(0).tolist() == [5, 1, 2]
    for item in range(3):
        distinct = {tuple(row.flatten().tolist()) for row in z[exists[:, item], item]}
        assert len(distinct) == exists[:, item].sum()


def test_what_imle_is_compared_with() -> None:
    marginals = est.IMLE(oracle="marginals")
    assert (marginals.objective, marginals.distribution) == ("L(E[z])", "noisy")
    assert est.IMLE(oracle="marginals", noise=None).distribution == "own"
    assert est.IMLE(noise=None).objective == "L(argmax)"


def test_noise_is_as_wide_as_the_distribution() -> None:
    scores = torch.zeros(3)
    assert noise.width(sx.Choice(scores, smoothing=sx.Shannon(0.25))) == 0.25
    assert noise.width(sx.Choice(scores, smoothing=sx.Gini(0.25))) == 1.0


@pytest.mark.parametrize("terms", [1, 2])
def test_sum_of_gamma_has_the_moments_of_gumbel(terms: int) -> None:
    draw = torch.Generator().manual_seed(0)
    k = 3
    total = noise.sum_of_gamma(torch.zeros(40_000, k), float(k), terms, draw).sum(1)
    assert total.mean().item() == pytest.approx(noise.EULER, abs=0.03)
    assert total.var().item() == pytest.approx(torch.pi**2 / 6, abs=0.06)


@pytest.mark.parametrize(("terms", "k"), [(1, 1), (1, 3), (10, 3)])
def test_sum_of_gamma_has_the_law_of_gumbel(terms: int, k: int) -> None:
    """Kolmogorov's distance, which is 0.001 to 0.004 for so many draws of Gumbel itself."""
    draw = torch.Generator().manual_seed(0)
    like = torch.zeros(100_000, k, dtype=torch.float64)
    total = noise.sum_of_gamma(like, float(k), terms, draw).sum(1).sort().values
    law = (-(-total).exp()).exp()
    at = torch.arange(len(total)) / len(total)
    assert (law - at).abs().max() < (0.008 if terms == 1 else 0.005)


def test_a_baseline_module_learns_by_half_its_squared_error() -> None:
    level = torch.nn.Parameter(torch.tensor([0.5, 2.0]))

    class Level(torch.nn.Module):
        def forward(self, _: torch.Tensor) -> torch.Tensor:
            return level

    estimator = est.Reinforce(samples=3, baseline=Level(), generator=torch.Generator())
    structure = sx.Choice(torch.zeros(2, 3))
    loss = estimator.loss(structure, lambda z: torch.full(z.shape[:-1], 4.0), inputs=level)
    loss.sum().backward()
    torch.testing.assert_close(level.grad, level.detach() - 4.0)


def test_sparse_expectation_over_two_batch_dimensions() -> None:
    scores, costs = torch.randn(2, 3, 4), torch.arange(4.0)
    found = est.SparseExpectation().loss(sx.Choice(scores), lambda z: z @ costs)
    torch.testing.assert_close(found, sx.sparsemax(scores) @ costs)


# -- SparseMAP -------------------------------------------------------------------------------------


def test_conditional_gradient_methods_are_those_of_their_names() -> None:
    """Plain Frank-Wolfe zigzags inside a face; the variants walk straight to its optimum."""
    scores = torch.tensor([[0.0, 0.3, -0.1, 0.2, 0.1, -3.0]], dtype=torch.float64)
    structure = sx.KSubset(scores, 3)
    gaps = {
        method: structure.sparsemap(method=method, max_iter=60, tol=1e-14).gap.item()
        for method in ("frank-wolfe", "away", "pairwise")
    }
    assert gaps["pairwise"] < 1e-10 and gaps["away"] < 1e-6 < gaps["frank-wolfe"], gaps


def test_a_start_that_is_forbidden_by_now() -> None:
    torch.manual_seed(0)
    scores = torch.randn(2, 4, 4, dtype=torch.float64)
    before = sx.Assignment(scores).sparsemap()
    scores[0] = torch.where(before.marginals[0] > 0, -torch.inf, scores[0])
    scores[0].fill_diagonal_(1.0)
    now = sx.Assignment(scores)
    for method in ("active-set", "pairwise", "away"):
        cold = now.sparsemap(method=method, max_iter=500, tol=1e-12)
        warm = now.sparsemap(method=method, max_iter=500, tol=1e-12, init=before)
        torch.testing.assert_close(warm.marginals, cold.marginals, atol=1e-5, rtol=0)
        torch.testing.assert_close(warm.probs.sum(-1), torch.ones(2, dtype=torch.float64))


def test_a_start_of_more_structures_than_parts() -> None:
    torch.manual_seed(0)
    scores = 0.1 * torch.randn(1, 6, dtype=torch.float64)

    def best_three(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x).scatter(-1, x.topk(3).indices, 1.0)

    solve = functools.partial(sx.sparsemap_oracle, best_three, scores)
    before = solve(method="frank-wolfe", max_iter=100, tol=1e-14)
    assert before.probs.shape[-1] > 8  # more than there is room for at first
    now = solve(method="pairwise", max_iter=1, init=before)
    torch.testing.assert_close(now.probs.sum(-1), torch.ones(1, dtype=torch.float64))
    torch.testing.assert_close(now.marginals, before.marginals, atol=1e-4, rtol=0)


def test_points_of_a_wrong_shape_are_named() -> None:
    with pytest.raises(ValueError, match=r"point must be \(2, 3\) for Choice.*got \(2, 4\)"):
        sx.project(sx.Choice(torch.zeros(2, 3)), torch.zeros(2, 4))


def test_pairs_are_validated() -> None:
    with pytest.raises(ValueError, match=r"Pair: .*nan"):
        Pair(torch.tensor([0.0, torch.nan]), torch.tensor(0.0))


def test_pairs_by_enumeration() -> None:
    torch.manual_seed(0)
    pairs = Pair(torch.randn(3, 2), torch.randn(3))
    z = pairs.enumerate_support()
    assert z.shape == (4, 3, 2)
    scores = (z * pairs.scores).sum(-1) + z.prod(-1) * pairs.both
    torch.testing.assert_close(pairs.score(z), scores)
    torch.testing.assert_close(pairs.log_partition(), scores.logsumexp(0))
    torch.testing.assert_close(pairs.marginals(), (scores.softmax(0)[..., None] * z).sum(0))
    assert pairs.enumerate_support(expand=False).shape == (4, 1, 2)


# -- dense chains ----------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0.5, 2.0, 3.0])
def test_chains_at_a_temperature(gamma: float) -> None:
    """Powers of two divide scores without rounding, and others in float64."""
    draw = torch.Generator().manual_seed(0)
    unary = torch.randn(4, 3, generator=draw, requires_grad=True)
    transition = torch.randn(3, 3, generator=draw)
    chain = sx.LinearChain(unary, transition, smoothing=sx.Shannon(gamma))
    z = chain.enumerate_support()
    scores = chain.score(z)
    found, wanted = chain.log_partition(), gamma * (scores / gamma).logsumexp(0)
    torch.testing.assert_close(found, wanted)
    slopes = [torch.autograd.grad(a, unary, create_graph=True)[0] for a in (found, wanted)]
    torch.testing.assert_close(*slopes)
    torch.testing.assert_close(chain.marginals(), slopes[1])
    torch.testing.assert_close(*(torch.autograd.grad(s.square().sum(), unary)[0] for s in slopes))


@pytest.mark.parametrize("per_step", [False, True])
def test_best_tags_by_the_definition(per_step: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    transition = torch.randn((2, 1, 4, 3, 3) if per_step else (3, 3), generator=draw)
    ends = {name: torch.randn(3, generator=draw) for name in ("start", "end")}
    lengths = torch.tensor([[5, 1, 3], [2, 4, 5]])
    if per_step:
        transition = transition.expand(2, 3, 4, 3, 3)
    chain = sx.LinearChain(
        torch.randn(2, 3, 5, 3, generator=draw), transition, **ends, lengths=lengths
    )
    with sx.backend("naive"):
        found = chain.argmax()
    torch.testing.assert_close(found, chain.argmax())
    for item in [(0, 0), (0, 1), (1, 1)]:
        one = chain[item]
        best = max(one.score(z).item() for z in one.enumerate_support())
        assert one.score(found[item]).item() == pytest.approx(best)


# -- what a start, a tolerance and an empty batch do ----------------------------------------------


def best_of_each_row(scores: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores)


def test_a_warm_start_asks_the_oracle_twice() -> None:
    scores = torch.tensor([[0.0, 0.3, -0.1, 0.2], [5.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    cold = sx.sparsemap_oracle(best_of_each_row, scores)
    warm = sx.sparsemap_oracle(best_of_each_row, scores, init=cold)
    # once to begin with, and once to see that nothing is better
    assert warm.iterations.tolist() == [2, 2] and cold.iterations[0] > 2
    torch.testing.assert_close(warm.probs.sort().values, cold.probs.sort().values)


def test_default_tolerances() -> None:
    wanted = {"active-set": 1e-10, "away": 1e-6, "pairwise": 1e-6, "frank-wolfe": 1e-6}
    assert {m: _checked_options("f", m, 1, None) for m in wanted} == wanted


@pytest.mark.parametrize("method", ["active-set", "away"])
def test_sparsemap_of_no_items(method: str) -> None:
    result = sx.Choice(torch.zeros(0, 3)).sparsemap(method=method)
    assert result.structures.shape == (0, 1, 3) and result.marginals.shape == (0, 3)


# -- grammars --------------------------------------------------------------------------------------


def grammar(scale: float, rank: int = 3, N: int = 2, P: int = 3, n: int = 4) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    sizes = [(2, N), (2, N + P, rank), (2, N + P, rank), (2, N, rank), (2, n, P)]
    return [scale * torch.randn(size, generator=draw, dtype=torch.float64) for size in sizes]


def dense(root, left, right, parent, emission, **options) -> sx.PCFG:
    terms = parent[:, :, None, None] + left[:, None, :, None] + right[:, None, None]
    return sx.PCFG(root, terms.logsumexp(-1), emission, **options)


@pytest.mark.parametrize("scale", [1.0, 500.0])  # far apart, exponentials of all but one are 0
def test_low_rank_grammars_are_grammars(scale: float) -> None:
    parts = grammar(scale)
    lengths = torch.tensor([4, 3])
    found = sx.PCFG.low_rank(*parts, lengths=lengths)
    wanted = dense(*parts, lengths=lengths)
    torch.testing.assert_close(found.log_partition(), wanted.log_partition())
    torch.testing.assert_close(found.marginals(), wanted.marginals())


@pytest.mark.parametrize("backend", ["cpu", "naive"])
def test_grammars_at_a_temperature(backend: str) -> None:
    root, left, right, parent, emission = grammar(1.0)
    hot = dense(root, left, right, parent, emission)
    rules = hot.rules
    with sx.backend(backend):
        found = sx.PCFG(root, rules, emission, smoothing=sx.Shannon(0.3)).log_partition()
        wanted = sx.PCFG(root / 0.3, rules / 0.3, emission / 0.3).log_partition()
    torch.testing.assert_close(found, 0.3 * wanted)


# -- factor graphs ---------------------------------------------------------------------------------


def test_rounds_of_messages_are_counted() -> None:
    graph = sx.FactorGraph()
    ids = graph.variables(torch.tensor([0.3, -0.2, 0.5]))
    for pair in ([0, 1], [1, 2], [2, 0]):
        graph.at_most_one(ids[torch.tensor(pair)])
    assert graph.marginals(rounds=3, tol=1e-300).iterations == 3


def test_a_factor_of_another_batch_is_refused() -> None:
    graph = sx.FactorGraph()
    ids = graph.variables(torch.zeros(2, 3), batch_dims=1)
    with pytest.raises(ValueError, match=r"must be \(2,\), got \(5,\)"):
        graph.factor(sx.Choice(torch.zeros(5, 3)), ids)


# -- structures as distributions -------------------------------------------------------------------


def test_every_part_is_a_bernoulli_variable() -> None:
    choice = sx.Choice(torch.tensor([0.0, 1.0, -2.0]))
    p = torch.tensor([0.0, 1.0, -2.0]).softmax(-1)
    torch.testing.assert_close(choice.variance, p * (1 - p))
    assert choice.support is None


def test_the_mode_of_torch_struct() -> None:
    from structmax.compat.torch_struct import LinearChainCRF

    crf = LinearChainCRF(torch.randn(2, 3, 4, 4))
    assert torch.equal(crf.mode, crf.argmax)


def test_other_devices_are_answered_by_the_definition() -> None:
    assert backend_for(torch.empty(0, device="meta")) == "naive"


def test_built_in_functions_as_oracles() -> None:
    assert not _wants_items(torch.sigmoid)


def test_a_law_without_marginals_is_no_target() -> None:
    policy = SimpleNamespace(start=None, scores=None, advance=None)
    law = sx.ShiftReduce(policy, torch.zeros(2, 3, 1))
    with pytest.raises(ValueError, match="ShiftReduce has no marginals to be a target"):
        sx.losses.crf(sx.Choice(torch.zeros(2, 3)), law)


# -- kernels ---------------------------------------------------------------------------------------


class Cache:
    """In the place of numba's cache of one kernel, damaged."""

    flushed = False

    def load_overload(self, signature: object, context: object) -> SimpleNamespace:
        if context == "damaged":
            raise EOFError
        return SimpleNamespace(signature=SimpleNamespace(args=(numba.float64,)))

    def save_overload(self, signature: object, data: object) -> None:
        raise OSError("no space left")

    def flush(self) -> None:
        self.flushed = True


def test_a_damaged_cache_is_as_none() -> None:
    made = SimpleNamespace(_cache=Cache())
    cache = jit._with_safe_cache(made)._cache
    assert cache.load_overload((numba.float64,), "damaged") is None and cache.flushed
    assert cache.load_overload((numba.float64,), None) is not None
    assert cache.load_overload((numba.float32,), None) is None  # of other types
    cache.save_overload((numba.float64,), None)


def test_kernels_where_nothing_can_be_cached(monkeypatch) -> None:
    asked = []

    def njit(cache: bool, **options: object):
        asked.append(cache)
        if cache:
            raise RuntimeError("no locator available")
        return lambda function: function

    monkeypatch.setattr(numba, "njit", njit)
    assert jit.kernel(lambda x: x + 1)(2) == 3 and asked == [True, False]


# -- transforms of queries -------------------------------------------------------------------------


MAPPED = {
    "binary tree": lambda x: sx.BinaryTree(x, validate_args=False),
    "arborescence": lambda x: sx.DependencyTree(x, validate_args=False),
    "matching": lambda x: sx.Assignment(x, validate_args=False),
    "subset": lambda x: sx.KSubset(x, 2, validate_args=False),
}


@pytest.mark.parametrize("kind", MAPPED)
def test_discrete_queries_under_vmap(kind: str) -> None:
    torch.manual_seed(0)
    make, scores = MAPPED[kind], torch.randn(3, 2, 4, 4)
    whole = make(scores)
    mapped = torch.vmap(lambda x: make(x).argmax())(scores)
    torch.testing.assert_close(mapped, whole.argmax())
    mapped = torch.vmap(lambda x: make(x).topk(3).scores)(scores)
    torch.testing.assert_close(mapped, whole.topk(3).scores)
    mapped = torch.vmap(lambda x: make(x).max_marginals())(scores)
    torch.testing.assert_close(mapped, whole.max_marginals())


@pytest.mark.parametrize("kind", sorted(set(MAPPED) - {"matching"}))
def test_samples_under_vmap(kind: str) -> None:
    torch.manual_seed(0)
    make, scores = MAPPED[kind], torch.randn(2, 4, 4).expand(3, 2, 4, 4)
    alike = torch.vmap(lambda x: make(x).sample((20,)), randomness="same")(scores)
    assert torch.equal(alike[0], alike[2])
    other = torch.vmap(lambda x: make(x).sample((20,)), randomness="different")(scores)
    assert not torch.equal(other[0], other[2])
    for z in (alike, other):
        assert bool(make(scores[0]).log_prob(z[1]).isfinite().all())  # of structures


# -- estimators, from outside ---------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["euclidean", "cross-entropy", "exponentiated"])
def test_spigot_goes_nowhere_without_a_slope(variant: str) -> None:
    """Of all scores: the mean of a target does not say how often additional parts are used."""
    generator = torch.Generator().manual_seed(0)
    unary, transition = (
        torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_()
        for s in ((2, 4, 3), (3, 3))
    )
    estimator = sx.estimators.SPIGOT(1e-3, variant=variant)
    for cost, most in ((lambda z: 0 * z, 1e-12), (lambda z: z**2, 1e-2)):
        z = estimator(sx.LinearChain(unary, transition))
        for slope in torch.autograd.grad(cost(z).sum(), (unary, transition)):
            assert slope.abs().max() < most


def test_costs_that_are_not_written_in_python() -> None:
    choice = sx.Choice(torch.zeros(3))
    for cost in (torch.sum, functools.partial(torch.sum, dim=-1)):
        assert sx.estimators.StraightThrough().loss(choice, cost) == 1.0


def test_dtypes_do_not_depend_on_the_default() -> None:
    chain = sx.LinearChain(torch.randn(3, 2), torch.randn(2, 2))
    torch.set_default_dtype(torch.float64)
    try:
        found = chain.entropy(), sx.losses.perceptron(chain, torch.tensor([0, 1, 0]))
    finally:
        torch.set_default_dtype(torch.float32)
    assert [t.dtype for t in found] == [torch.float32] * 2


def test_options_that_are_no_numbers() -> None:
    with pytest.raises(ValueError, match="entropy_weight must be a number, got nan"):
        sx.estimators.Reinforce(entropy_weight=math.nan)
    with pytest.raises(ValueError, match="entropy_weight must be a number"):
        sx.estimators.Reinforce(entropy_weight="a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lam must be a finite number"):
        sx.estimators.IMLE(lam=math.inf)
    assert repr(sx.estimators.SparseExpectation(max_iter=5)) == "SparseExpectation(max_iter=5)"
    with pytest.raises(ValueError, match="samples must be an integer of at least 1"):
        sx.diagnose(sx.Choice(torch.zeros(3)), lambda z: z.sum(-1), samples=0)
    with pytest.raises(ValueError, match=r"point\[1\] is NaN or \+inf"):
        sx.project(sx.Choice(torch.zeros(3)), torch.tensor([0.0, math.nan, 0.0]))
    with pytest.raises(ValueError, match="does not apply to a structure of kind 'chain'"):
        sx.nn.StructuredAttention("chain", 4, "gumbel-straight-through")
    with pytest.raises(ValueError, match="is no distribution"):
        sx.losses.entmax_loss(torch.zeros(1, 3), torch.tensor([[3.0, 1.0, 1.0]]))
