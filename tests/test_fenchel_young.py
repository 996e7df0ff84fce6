"""The losses of structures: every loss × every structure it applies to, against enumeration."""

from __future__ import annotations

import doctest
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from table import ROWS, STRUCTURES
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.distributions import kl_divergence

import structmax as sx
from structmax import losses
from structmax.structures.base import Structure

nan, inf, f64 = math.nan, math.inf, torch.float64
SIGMA, SAMPLES = 0.7, 4


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=f64)


def make(row: str, seed: int = 0) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ROWS[row]()


def close(actual: Any, expected: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(
        torch.as_tensor(actual).double(),
        torch.as_tensor(expected).double(),
        atol=tolerance,
        rtol=tolerance,
    )


def event_sum(s: Structure, x: Tensor) -> Tensor:
    return x.flatten(x.dim() - len(s.event_shape)).sum(-1)


def noise() -> dict[str, Any]:
    return {
        "sigma": SIGMA,
        "samples": SAMPLES,
        "generator": torch.Generator().manual_seed(3),
    }


def epsilon(s: Structure) -> Tensor:
    shape = (SAMPLES, *s.batch_shape, *s.event_shape)
    return torch.randn(shape, generator=noise()["generator"], dtype=f64)


def costs(s: Structure) -> Tensor:
    return randn(*s.event_shape, seed=5).abs()


LOSSES: dict[str, Callable[..., Tensor]] = {
    "perceptron": losses.perceptron,
    "hinge": losses.hinge,
    "hinge-cost": lambda s, y, **kw: losses.hinge(s, y, cost=costs(s), **kw),
    "crf": losses.crf,
    "smoothed": losses.smoothed,
    "sparsemap": losses.sparsemap,
    "margin_sparsemap": losses.margin_sparsemap,
    "perturbed": lambda s, y, **kw: losses.perturbed(s, y, **noise(), **kw),
}

# -- definitions, by enumeration -----------------------------------------------------------------


def hamming(s: Structure, every: Tensor, y: Tensor, cost: Tensor | float = 1.0) -> Tensor:
    return event_sum(s, cost * (every - y).abs())


def best(s: Structure, scores: Tensor, every: Tensor) -> tuple[Tensor, Tensor]:
    """max over structures of their scores ``(N, *batch)``, and the one that has it."""
    value, index = scores.max(0)
    index = index[(None, ..., *[None] * len(s.event_shape))].expand(1, *every.shape[1:])
    return value, every.gather(0, index).squeeze(0)


def quadratic(s: Structure, scores: Tensor, every: Tensor, found: Any) -> tuple[Tensor, Tensor]:
    """max of ⟨θ, μ⟩ − ½‖μ‖², by the conditions of an optimum at what ``found`` found."""
    mu = found.marginals
    k = found.structures.movedim(len(s.batch_shape), 0)
    match = (k[:, None] == every[None]).flatten(2 + len(s.batch_shape)).all(-1)  # (k, N, *batch)
    own = (match * scores).sum(1)
    weight = found.probs.movedim(-1, 0)
    linear = (weight * own).sum(0)
    slack = linear - event_sum(s, mu * mu) - (scores - event_sum(s, mu * every)).amax(0)
    close(slack, torch.zeros_like(slack), 1e-6)
    return linear - event_sum(s, mu * mu) / 2, mu


def definition(loss: str, s: Any, y: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of a structure y, and the prediction's primary parts."""
    every = s.enumerate_support()
    scores, own = s.score(every), s.score(y)
    if loss == "perceptron":
        value, mu = best(s, scores, every)
    elif loss.startswith("hinge"):
        cost = hamming(s, every, y, 1.0 if loss == "hinge" else costs(s))
        value, mu = best(s, scores + cost, every)
    elif loss == "crf":
        value = s.temperature * (scores / s.temperature).logsumexp(0)
        weight = (scores / s.temperature).softmax(0)[(..., *[None] * len(s.event_shape))]
        mu = (weight * every).sum(0)
    elif loss == "smoothed":
        value, mu = s.log_partition(), s.marginals()
    elif loss == "sparsemap":
        value, mu = quadratic(s, scores, every, s.sparsemap())
        value = value + event_sum(s, y * y) / 2
    elif loss == "margin_sparsemap":
        moved = s.perturb(1 - 2 * y).sparsemap()
        value, mu = quadratic(s, scores + hamming(s, every, y), every, moved)
        value = value + event_sum(s, y * y) / 2
    else:
        noisy = scores + SIGMA * event_sum(s, epsilon(s)[:, None] * every)  # (samples, N, *batch)
        pairs = [best(s, one, every) for one in noisy]
        value, mu = (torch.stack(column).mean(0) for column in zip(*pairs, strict=True))
    return value - own, mu


# -- which rows a loss applies to ----------------------------------------------------------------

# what stands for the others where a test says nothing new about them
MAIN = {
    "assignment-wide", "chain-shared", "choice", "ctc", "dtw-moves", "edit", "grid-8", "hmm",
    "hyperpath", "nonprojective-labelled", "pcfg", "projective-siblings", "semi-markov-item",
    "spanning-tree", "subset-between",
}  # fmt: skip


def rows(loss: str) -> list[str]:
    """The rows of a loss; those that do not depend on the smoothing take one for each structure."""
    out: list[str] = []
    for row in ROWS:
        name, kind = row.split("/")
        if loss == "crf":
            fits = kind in ("shannon", "shannon-0.5")
        elif loss == "smoothed":
            fits = name != "grid-all"
        else:
            fits = row == next(r for r in ROWS if r.startswith(name + "/"))
            if loss not in ("perceptron", "sparsemap"):
                fits = fits and name != "grid-all"  # its scores are at most 0
        if fits:
            out.append(row)
    return out


def parametrize(names: Any = LOSSES, main: bool = True) -> pytest.MarkDecorator:
    """Losses and their rows. In the slow suite only: the rows that are not ``main``, if they are
    asked for, and second temperatures and kinds of the others."""
    out = []
    for loss in names:
        for row in rows(loss):
            name, kind = row.split("/")
            second = kind in ("shannon-0.5", "tsallis-1.3", "hard") and name in STRUCTURES
            slow = name not in MAIN and (main or second or loss == "hinge-cost")
            out.append(pytest.param(loss, row, marks=[pytest.mark.slow] if slow else []))
    return pytest.mark.parametrize(("loss", "row"), out)


def pick(s: Structure, seed: int = 0) -> Tensor:
    """A structure for each item."""
    every = s.enumerate_support()
    index = torch.randint(
        len(every), s.batch_shape, generator=torch.Generator().manual_seed(seed + 1)
    )
    index = index[(None, ..., *[None] * len(s.event_shape))].expand(1, *every.shape[1:])
    return every.gather(0, index).squeeze(0)


def scores_of(s: Structure) -> dict[str, Tensor]:
    return {k: t for k, (t, _) in s._tensors().items() if t.is_floating_point()}


def with_scores(s: Structure, scores: dict[str, Tensor]) -> Any:
    return s._rebuild(**{**{k: t for k, (t, _) in s._tensors().items()}, **scores})


@parametrize(main=False)
def test_definition(loss: str, row: str) -> None:
    """Value and gradient of hard targets, in all their forms; at least 0."""
    s = make(row)
    y = pick(s)
    function = LOSSES[loss]
    expected, prediction = definition(loss, s, y)
    tolerance = 1e-6 if "sparsemap" in loss else 1e-9
    value = function(s, y, reduction="none")
    assert value.shape == s.batch_shape
    close(value, expected, tolerance)
    if loss != "perturbed":
        assert bool((value >= 0).all())
    if row.split("/")[0] in MAIN - {"hyperpath"}:  # counts have one form
        for form in (y > 0.5, s.decode(y)):
            close(function(s, form, reduction="none"), value, 1e-12)
    if "grid-all" in row:
        return
    delta = torch.zeros(*s.batch_shape, *s.event_shape, dtype=f64, requires_grad=True)
    moved = function(s.perturb(delta), y, reduction="sum")
    (g,) = torch.autograd.grad(moved, delta)
    close(g, prediction - y, 1e-5 if "sparsemap" in loss else 1e-9)


@parametrize()
def test_gradient(loss: str, row: str) -> None:
    """In every score, additional ones included, by finite differences."""
    s = make(row)
    y, names = pick(s), [*scores_of(s)]
    leaves = [t.detach().clone().requires_grad_() for t in scores_of(s).values()]

    def value(*scores: Tensor) -> Tensor:
        return LOSSES[loss](
            with_scores(s, dict(zip(names, scores, strict=True))), y, reduction="sum"
        )

    assert gradcheck(value, leaves, fast_mode=True, atol=1e-4)


@pytest.mark.parametrize("row", ["chain-shared/gini", "nonprojective/shannon", "dtw-moves/shannon"])
@pytest.mark.parametrize("loss", ["crf", "smoothed", "sparsemap", "margin_sparsemap"])
def test_second_derivatives(loss: str, row: str) -> None:
    s = make(row)
    if loss == "crf" and s.smoothing.code[0] != 1:
        return
    y, names = pick(s), [*scores_of(s)]
    leaves = [t.detach().clone().requires_grad_() for t in scores_of(s).values()]

    def value(*scores: Tensor) -> Tensor:
        moved = with_scores(s, dict(zip(names, scores, strict=True)))
        return LOSSES[loss](moved, y, reduction="sum")

    assert gradgradcheck(value, leaves, fast_mode=True, atol=1e-4)


@parametrize()
def test_convex(loss: str, row: str) -> None:
    """Along random segments between scores."""
    if "low-rank" in row:
        return  # its scores are no linear function of the factors
    a, b = make(row, 0), make(row, 7)
    y = pick(a)
    function = LOSSES[loss]
    ends = [function(s, y, reduction="none") for s in (a, b)]
    for t in (0.25, 0.5, 0.9):
        mixed = {k: torch.lerp(x, scores_of(b)[k], t) for k, x in scores_of(a).items()}
        middle = function(with_scores(a, mixed), y, reduction="none")
        assert bool((middle <= torch.lerp(*ends, t) + 1e-7).all())


# -- zero ----------------------------------------------------------------------------------------


@parametrize([name for name in LOSSES if name not in ("crf", "perturbed")])
def test_zero_at_an_optimum(loss: str, row: str) -> None:
    """And above 0 elsewhere; with Shannon, 0 at infinite scores only."""
    s = make(row)
    if loss == "smoothed" and s.smoothing.code[0] == 1:
        return
    s = with_scores(s, {k: 1e4 * t for k, t in scores_of(s).items()})  # leads above all margins
    y, other = s.argmax(), pick(s)
    value = LOSSES[loss](s, y, reduction="none")
    close(value, torch.zeros_like(value), 1e-6)
    differs = (y != other).flatten(len(s.batch_shape)).any(-1)
    assert bool((LOSSES[loss](s, other, reduction="none")[differs] > 1e-3).all())


@pytest.mark.parametrize("loss", LOSSES)
def test_reduction(loss: str) -> None:
    s = sx.BinaryTree(randn(3, 2, 4, 4))
    y = pick(s)
    function = LOSSES[loss]
    each = function(s, y, reduction="none")
    assert each.shape == (3, 2)
    close(function(s, y), each.mean())
    close(function(s, y, reduction="mean"), each.mean())
    close(function(s, y, reduction="sum"), each.sum())
    if "sparsemap" not in loss:
        assert function(s[:0], y[:0], reduction="none").shape == (0, 2)
        assert function(s[:0], y[:0], reduction="sum") == 0


# -- soft targets --------------------------------------------------------------------------------


@parametrize(["sparsemap"])
def test_mixtures(loss: str, row: str) -> None:
    """Expected counts: what is linear in the target is the expectation over its structures."""
    s, found = make(row), make(row, 11).sparsemap()
    z = found.structures.movedim(len(s.batch_shape), 0)
    p = found.probs.movedim(-1, 0)
    means = (found.marginals, *found.additional)
    forms = [found, means] if len(means) > 1 else [found, found.marginals]
    for loss, function in LOSSES.items():
        if loss == "hinge-cost" or ("grid-all" in row and loss not in ("perceptron", "sparsemap")):
            continue
        if "hyperpath" in row and ("hinge" in loss or "margin" in loss):
            continue  # mixtures of counts
        values = [function(s, form, reduction="none") for form in forms]
        close(values[1], values[0], 1e-12)
        if "margin" in loss or loss == "hinge":
            assert bool((values[0] >= 0).all())
            continue
        own = torch.stack([function(s, one, reduction="none") for one in z])
        expected = (p * own).sum(0)
        if loss == "sparsemap":
            mu = found.marginals
            expected = expected + (event_sum(s, mu * mu) - (p * event_sum(s, z * z)).sum(0)) / 2
        close(values[0], expected, 1e-6)
    value = losses.sparsemap(s, s.sparsemap(), reduction="none")
    close(value, torch.zeros_like(value), 1e-7)


@parametrize(["crf", "smoothed"])
def test_structures_as_targets(loss: str, row: str) -> None:
    """Exact: 0 for itself, else above; the gradient is the difference of expected structures."""
    p, q = make(row, 0), make(row, 5)
    function = LOSSES[loss]
    own = function(p, p, reduction="none")
    close(own, torch.zeros_like(own), 1e-9)
    value = function(q, p, reduction="none")
    assert bool((value >= 0).all())
    if q.smoothing.code[0] == 1:
        close(value, q.temperature * kl_divergence(p, q))
    delta = torch.zeros(*q.batch_shape, *q.event_shape, dtype=f64, requires_grad=True)
    (g,) = torch.autograd.grad(function(q.perturb(delta), p, reduction="sum"), delta)
    close(g, q.marginals() - p.marginals())


def test_another_temperature() -> None:
    """Targets may differ in γ, and must not in kind."""
    theta, phi = randn(2, 5), randn(2, 5, seed=1)
    for kind in (sx.Shannon, sx.Gini, lambda g: sx.Tsallis(1.4, g)):
        q, p = sx.Choice(theta, smoothing=kind(0.5)), sx.Choice(phi, smoothing=kind(2.0))
        alpha = p.smoothing.code[2]
        expected = losses.entmax_loss(theta / 0.5, p.marginals(), alpha, reduction="none") * 0.5
        close(losses.smoothed(q, p, reduction="none"), expected, 1e-8)
    certain = sx.Choice(phi, smoothing=sx.Hard())
    sparse = sx.Choice(theta, smoothing=sx.Gini())
    close(losses.smoothed(sparse, certain), losses.smoothed(sparse, certain.argmax()))
    with pytest.raises(ValueError, match="differ in gamma only"):
        losses.smoothed(sparse, sx.Choice(phi))


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_choice_is_entmax_loss(alpha: float) -> None:
    theta, y = randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    choice = sx.Choice(theta, smoothing=sx.Tsallis(alpha))
    close(losses.smoothed(choice, y), losses.entmax_loss(theta, y, alpha), 1e-8)
    close(losses.crf(sx.Choice(theta), y), torch.nn.functional.cross_entropy(theta, y))
    close(losses.sparsemap(choice, y), losses.entmax_loss(theta, y, 2.0), 1e-7)
    soft = theta.softmax(-1)
    close(losses.sparsemap(choice, soft), losses.entmax_loss(theta, soft, 2.0), 1e-7)


def test_steps_and_counts() -> None:
    """Edges step by step or summed, for shared transitions and for those of each step."""
    unary, lengths = randn(2, 4, 3), torch.tensor([4, 2])
    for transition in (randn(3, 3), randn(2, 3, 3), randn(2, 3, 3, 3)):
        q = sx.LinearChain(unary, transition, randn(3), randn(3), lengths)
        p = sx.LinearChain(randn(2, 4, 3, seed=2), randn(3, 3, seed=3), lengths=lengths)
        edges = p.edge_marginals()
        pair = losses.crf(q, (p.marginals(), edges), reduction="none")
        close(pair - p.entropy(), losses.crf(q, p, reduction="none"))
        noisy = edges.clone()
        noisy[1, 1:] = nan  # padding
        marginals = p.marginals().clone()
        marginals[1, 2:] = nan
        close(losses.crf(q, (marginals, noisy), reduction="none"), pair)
        if transition.dim() < 4:
            summed = (p.marginals(), edges.sum(-3, keepdim=True))
            close(losses.crf(q, summed, reduction="none"), pair)
    for lengths in (None, torch.tensor([3, 2])):
        q = sx.SemiMarkov(randn(2, 3, 2, 2), randn(2, 2), lengths)
        p = sx.SemiMarkov(randn(2, 3, 2, 2, seed=4), randn(2, 2, seed=5), lengths)
        pair = losses.crf(q, (p.marginals(), p.edge_marginals()), reduction="none")
        close(pair - p.entropy(), losses.crf(q, p, reduction="none"))
        close(losses.crf(q, (p.marginals(), p.edge_marginals().sum(-3)), reduction="none"), pair)


# -- perturbed -----------------------------------------------------------------------------------


def test_perturbed_choice_is_log_loss() -> None:
    """With Gumbel noise, up to Euler's constant."""
    theta, y = randn(3, 4), torch.tensor([0, 1, 3])
    generator = torch.Generator().manual_seed(0)
    for sigma in (1.0, 0.5):
        options: dict[str, Any] = {"noise": "gumbel", "sigma": sigma, "generator": generator}
        choice = sx.Choice(theta.clone().requires_grad_(), smoothing=sx.Shannon(sigma))
        value = losses.perturbed(choice, y, samples=40_000, reduction="none", **options)
        close(value - sigma * 0.5772156649, losses.crf(choice, y, reduction="none"), 0.02)
        grads = [
            torch.autograd.grad(loss.sum(), choice.scores)[0]
            for loss in (value, losses.crf(choice, y, reduction="none"))
        ]
        close(*grads, 0.02)
    same = [
        losses.perturbed(choice, y, generator=torch.Generator().manual_seed(1)) for _ in range(2)
    ]
    assert torch.equal(*same)


# -- partial_crf ---------------------------------------------------------------------------------


@parametrize(["crf"])
def test_partial(loss: str, row: str) -> None:
    """−γ log of the probability of what is allowed; 0 where that is everything."""
    s = make(row)
    y = pick(s)
    every = s.enumerate_support()
    allowed = (y > 0) | (randn(*s.batch_shape, *s.event_shape, seed=9) > 0)
    inside = ~(every * ~allowed).flatten(1 + len(s.batch_shape)).any(-1)
    scores = s.score(every) / s.temperature
    expected = scores.logsumexp(0) - torch.where(inside, scores, -inf).logsumexp(0)
    close(losses.partial_crf(s, allowed, reduction="none"), s.temperature * expected)
    close(losses.partial_crf(s, s.condition(exclude=~allowed)), s.temperature * expected.mean())
    close(losses.partial_crf(s, torch.ones_like(allowed)), 0.0)
    names = [*scores_of(s)]
    leaves = [t.detach().clone().requires_grad_() for t in scores_of(s).values()]

    def value(*given: Tensor) -> Tensor:
        moved = with_scores(s, dict(zip(names, given, strict=True)))
        return losses.partial_crf(moved, allowed, reduction="sum")

    assert gradcheck(value, leaves, fast_mode=True, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("model", ["chain", "HMM"])
def test_a_condition_in_half_precision_keeps_the_scores(model: str, dtype: torch.dtype) -> None:
    """Start and end are not rounded into the unary scores."""
    torch.manual_seed(4)
    unary, transition, start, end = (
        torch.randn(*size).mul(k).to(dtype)
        for size, k in (((6, 4), 1), ((4, 4), 1), ((4,), 5), ((4,), 5))
    )

    def make(*scores: Tensor) -> sx.LinearChain:
        if model == "HMM":
            return sx.HMM(scores[2], scores[1], scores[0].mT, torch.tensor([0, 3, 1, 5, 2]))
        return sx.LinearChain(*scores)

    half, exact = (
        make(unary, transition, start, end),
        make(*(t.double() for t in (unary, transition, start, end))),
    )
    allowed = torch.ones(half.event_shape, dtype=torch.bool)
    close(
        half.condition(exclude=~allowed).log_partition().double(),
        half.log_partition().double(),
        1e-6,
    )
    allowed[2, 0] = False
    found, expected = (s.condition(exclude=~allowed) for s in (half, exact))
    assert found.marginals().dtype == dtype
    close(found.log_partition().double(), expected.log_partition(), 1e-6)
    close(losses.partial_crf(half, allowed).double(), losses.partial_crf(exact, allowed), 1e-6)


@parametrize(["crf"])
def test_partial_crf_refuses_other_scores(loss: str, row: str) -> None:
    """They gave a loss of 0, or one that means nothing; NaN where scores cannot be read."""
    s = make(row)
    part = s.argmax() > 0
    if not bool(part.any()):
        pytest.skip("a single node has no parts")
    same = s.condition(exclude=~part)
    close(losses.partial_crf(s, same), losses.partial_crf(s, part))
    other = s.perturb(torch.ones(())).condition(exclude=~part)
    with pytest.raises(ValueError, match=r"must have the scores of the structure, .*condition"):
        losses.partial_crf(s, other)
    assert losses.partial_crf(s._trusted(), other, reduction="none").isnan().all()


def test_partial_crf_refuses_other_additional_scores_and_kinds() -> None:
    x, step = torch.zeros(2, 4, 3), torch.zeros(3, 3)
    chain = sx.LinearChain(x, step)
    with pytest.raises(ValueError, match=r"additional parts\[0, 0, 0, 0\] score 1 and 0"):
        losses.partial_crf(chain, sx.LinearChain(x, step + 1))
    forbids = step.clone().fill_diagonal_(-inf)  # a set of allowed structures as good as any
    found = losses.partial_crf(chain, sx.LinearChain(x, forbids), reduction="none")
    close(found, torch.full((2,), 4 * math.log(3) - math.log(3 * 8)), 1e-5)
    for structure in (chain, sx.HMM(x[0, 0], step, step, torch.tensor([0, 1]))):
        half = structure.to(torch.bfloat16)
        mask = half.argmax() > 0
        close(
            losses.partial_crf(half, half.condition(include=mask)), losses.partial_crf(half, mask)
        )


# -- ragged batches, forbidden parts, extremes ---------------------------------------------------


def ragged(n: int) -> dict[str, Callable[[Tensor, Tensor | None], Any]]:
    """Structures over n positions from ``(*B, n, n)`` scores and lengths."""
    transition = randn(n, n, seed=1)
    return {
        "chain": lambda x, k: sx.LinearChain(x, transition, lengths=k),
        "binary": lambda x, k: sx.BinaryTree(x, lengths=k),
        "spanning": lambda x, k: sx.SpanningTree(x, lengths=k),
        "dtw": lambda x, k: sx.Alignment(x, None if k is None else (k, k)),
        "assignment": lambda x, k: sx.Assignment(x, None if k is None else (k, k)),
    }


@pytest.mark.parametrize("name", ragged(2))
@pytest.mark.parametrize("loss", LOSSES)
def test_ragged(loss: str, name: str) -> None:
    """As item by item; nothing of the padding gets into the loss or its gradient."""
    n, lengths = 4, torch.tensor([4, 2, 3, 1])
    build = ragged(n)[name]
    s = build(randn(4, n, n), lengths)
    y = make_target(s)
    usable = s._usable_parts().expand(4, n, n)
    dirty = torch.where(usable, randn(4, n, n), nan).requires_grad_()
    target = torch.where(usable, y, nan)
    function = LOSSES[loss] if loss != "perturbed" else quiet
    whole = function(build(dirty, lengths), target, reduction="none")
    (g,) = torch.autograd.grad(whole.sum(), dirty)
    assert bool(g.isfinite().all()) and not bool(g[~usable].any())
    for i in range(4):
        item = function(s[i], y[i], reduction="none")
        close(whole[i], item, 1e-6 if "sparsemap" in loss else 1e-9)
    if loss == "hinge":
        dirty_costs = torch.where(usable, 1.0, nan)
        close(losses.hinge(s, target, cost=dirty_costs, reduction="none"), whole)


def quiet(s: Any, y: Any, **kw: Any) -> Tensor:
    return losses.perturbed(s, y, sigma=0.0, samples=1, **kw)


def make_target(s: Any) -> Tensor:
    return s.perturb(randn(*s.batch_shape, *s.event_shape, seed=8)).argmax()


@pytest.mark.parametrize("loss", [*LOSSES, "partial"])
def test_forbidden_targets(loss: str) -> None:
    """+inf for that item, without a gradient; the others as they were."""
    unary = randn(3, 3, 2)
    unary[1, 0, 1] = -inf
    leaf = unary.requires_grad_()
    s = sx.LinearChain(leaf, randn(2, 2))
    tags = torch.tensor([[0, 1, 1], [1, 0, 0], [1, 1, 0]])
    for y in (tags, s.encode(tags)):
        if loss == "partial":
            value = losses.partial_crf(s, s.encode(tags).bool(), reduction="none")
        else:
            value = LOSSES[loss](s, y, reduction="none")
        assert value[1] == inf and bool(value[[0, 2]].isfinite().all())
        (g,) = torch.autograd.grad(value.sum(), leaf, retain_graph=True)
        assert bool(g.isfinite().all()) and not bool(g[1].any()) and bool(g[0].any())
    tree = sx.DependencyTree(torch.where(torch.arange(9).reshape(3, 3) == 1, -inf, 0.0))
    if loss != "partial":
        assert LOSSES[loss](tree, [0, 1]) == inf
        assert LOSSES[loss](tree, [2, 0]).isfinite()


@pytest.mark.parametrize("loss", LOSSES)
def test_items_that_allow_nothing(loss: str) -> None:
    """+inf where only a sum is asked for; who needs a best structure names the item."""
    unary = torch.stack([randn(3, 2), torch.full((3, 2), -inf, dtype=f64)])
    s = sx.LinearChain(unary, randn(2, 2))
    for y in (torch.tensor([[0, 1, 1], [1, 0, 0]]), s[0].encode([0, 1, 1]).expand(2, 3, 2)):
        if loss in ("crf", "smoothed"):
            value = LOSSES[loss](s, y, reduction="none")
            assert value[0].isfinite() and value[1] == inf
        else:
            with pytest.raises(ValueError, match=r"item .*1\)? allows no structure"):
                LOSSES[loss](s, y)


@pytest.mark.parametrize("loss", ["crf", "smoothed", "perceptron", "hinge", "perturbed"])
def test_not_looked_at(loss: str) -> None:
    """With validate_args=False a NaN among the scores gives NaN, and only in its item."""
    unary = randn(2, 3, 2)
    unary[1, 1, 0] = nan
    s = sx.LinearChain(unary, randn(2, 2), validate_args=False)
    value = LOSSES[loss](s, torch.tensor([[0, 1, 1], [1, 0, 0]]), reduction="none")
    assert value[0].isfinite() and value[1].isnan()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(loss: str, dtype: torch.dtype) -> None:
    s = sx.LinearChain(randn(2, 4, 3), randn(3, 3)).to(dtype)
    tags = torch.tensor([[0, 1, 2, 0], [2, 2, 1, 0]])
    function = LOSSES[loss] if loss != "perturbed" else quiet
    value = function(s, tags, reduction="none")
    assert value.dtype == torch.float32
    close(value, function(s.to(f64), tags, reduction="none"), 1e-4)
    close(function(s, s.encode(tags), reduction="none"), value, 1e-4)


@pytest.mark.parametrize("loss", LOSSES)
def test_extremes(loss: str) -> None:
    """Shifts of ±1e4 change nothing; scores that spread over thousands stay exact."""
    unary, transition = (randn(2, 4, 3) * 64).round() / 64, (randn(3, 3) * 64).round() / 64
    tags = torch.tensor([[0, 1, 2, 0], [2, 2, 1, 0]])
    function = LOSSES[loss] if loss != "perturbed" else quiet
    plain = function(sx.LinearChain(unary, transition), tags, reduction="none")
    for c in (1e4, -1e4):
        moved = function(sx.LinearChain(unary + c, transition), tags, reduction="none")
        close(moved, plain, 1e-7)
    wide = sx.LinearChain(1e3 * unary, 1e3 * transition)
    value = function(wide, tags, reduction="none")
    expected, _ = definition(loss if loss != "perturbed" else "perceptron", wide, wide.encode(tags))
    close(value, expected, 1e-6)


# -- targets and transformations -----------------------------------------------------------------


def test_integer_forms() -> None:
    lengths = torch.tensor([3, 2])
    tree = sx.DependencyTree(randn(2, 4, 4), lengths)
    heads = torch.tensor([[0, 1, 1], [2, 0, -7]])
    for function in LOSSES.values():
        close(function(tree, heads), function(tree, [[0, 1, 1], [2, 0]]))
        close(function(tree, heads), function(tree, tree.encode(heads)))
    subset = sx.KSubset(randn(2, 5), 2)
    for function in LOSSES.values():
        close(function(subset, torch.tensor([[0, 3], [4, 1]])), function(subset, [[0, 3], [1, 4]]))


def test_one_target_for_the_batch() -> None:
    s = sx.LinearChain(randn(3, 4, 2), randn(2, 2))
    for target in (torch.tensor([0, 1, 1, 0]), s[0].encode([0, 1, 1, 0]), s[0]):
        for loss in ("crf", "perceptron", "sparsemap"):
            values = LOSSES[loss](s, target, reduction="none")
            close(values[2], LOSSES[loss](s[2], target, reduction="none"), 1e-7)


def test_means_of_silent_parts() -> None:
    """Of subsets and grids the parts alone say everything."""
    for s in (sx.KSubset(randn(2, 5), 2), sx.GridPath(randn(2, 3, 3))):
        p = s.perturb(randn(*s.event_shape, seed=2))
        value = losses.crf(s, p.marginals(), reduction="none")
        close(value - p.entropy(), losses.crf(s, p, reduction="none"))


@pytest.mark.parametrize("loss", LOSSES)
def test_transformations(loss: str) -> None:
    """torch.func.grad; torch.compile without a graph break, with a sum and with a best z."""
    tags, unary, transition = torch.tensor([0, 1, 1, 0]), randn(4, 2), randn(2, 2)

    def value(unary: Tensor) -> Tensor:
        chain = sx.LinearChain(unary, transition)
        return (quiet if loss == "perturbed" else LOSSES[loss])(chain, tags)

    leaf = unary.clone().requires_grad_()
    (expected,) = torch.autograd.grad(value(leaf), leaf)
    close(torch.func.grad(value)(unary), expected, 1e-6)
    if loss in ("crf", "hinge"):
        torch.compiler.reset()
        compiled = torch.compile(value, fullgraph=True, backend="aot_eager", dynamic=False)
        (g,) = torch.autograd.grad(compiled(leaf), leaf)
        close(g, expected, 1e-9)


def test_chain_loss_is_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tags of a chain never become one-hots, as in sx.nn.CRF, and give the same numbers."""
    module = sx.nn.CRF(3, batch_first=True).double()
    emissions = randn(2, 4, 3).requires_grad_()
    tags, mask = torch.tensor([[0, 1, 2, 0], [2, 2, 1, 0]]), torch.tensor([[1] * 4, [1, 1, 0, 0]])
    monkeypatch.setattr(sx.LinearChain, "encode", None)
    monkeypatch.setattr(sx.LinearChain, "_score_tags", None)
    value = losses.crf(module.structure(emissions, mask.bool()), tags)
    expected = -module(emissions, tags, mask.bool(), reduction="mean")
    close(value, expected, 1e-12)
    close(*[torch.autograd.grad(x, emissions)[0] for x in (value, expected)], 1e-12)


# -- errors --------------------------------------------------------------------------------------

chain = sx.LinearChain(torch.zeros(2, 4, 3), torch.zeros(3, 3))
half = torch.full((2, 4, 3), 1 / 3)
steps = torch.full((2, 3, 3, 3), 1 / 9)
choice = sx.Choice(torch.zeros(2, 3))
ERRORS: dict[str, tuple[Callable[[], object], list[str]]] = {
    "reduction": (lambda: losses.crf(choice, 0, reduction="avg"), ["crf", "mean", "'avg'"]),
    "no structure": (
        lambda: losses.crf(torch.zeros(3), 0),
        ["crf", "structure", "sx.LinearChain", "Tensor"],
    ),
    "bare mean": (
        lambda: losses.crf(chain, half),
        ["crf", "not 0/1", "LinearChain", "(1, 3, 3)", "sx.Structure", "sparsemap()"],
    ),
    "bare mean of rules": (
        lambda: losses.perceptron(
            sx.PCFG(torch.zeros(2), torch.zeros(2, 4, 4), torch.zeros(3, 2)),
            torch.full((3, 3, 4), 0.5),
        ),
        ["perceptron", "PCFG", "(parts, (2,), (2, 4, 4))"],
    ),
    "pair of nothing": (
        lambda: losses.crf(choice, (torch.ones(2, 3), torch.ones(2))),
        ["crf", "Choice", "the parts alone", "(2, 3), (2,)"],
    ),
    "edges": (
        lambda: losses.crf(chain, (half, torch.zeros(2, 2, 3, 3))),
        ["crf", "target[1]", "(..., 1, 3, 3)", "(2, 2, 3, 3)"],
    ),
    "negative edge": (
        lambda: losses.crf(chain, (half, -steps)),
        ["crf", "target[1][0, 0, 0, 0]", "-0.3333", "at least 0"],
    ),
    "nan mean": (
        lambda: losses.sparsemap(choice, torch.tensor([[0.5, 0.5, 0.0], [nan, 0.5, 0.5]])),
        ["sparsemap", "target[1, 0]", "nan"],
    ),
    "shape": (lambda: losses.hinge(choice, torch.zeros(2, 4)), ["hinge", "(..., 3)", "(2, 4)"]),
    "batch": (
        lambda: losses.crf(choice, torch.zeros(5, 3)),
        ["crf", "batch", "(5,)", "(2,)"],
    ),
    "larger batch": (
        lambda: losses.crf(chain, torch.zeros(5, 2, 4, dtype=torch.long)),
        ["crf", "batch", "(5, 2)", "(2,)"],
    ),
    "batch of a structure": (
        lambda: losses.crf(choice, sx.Choice(torch.zeros(5, 3))),
        ["crf", "batch", "(5,)", "(2,)"],
    ),
    "two ones": (lambda: losses.crf(choice, torch.ones(2, 3)), ["Choice", "z[0]", "one 1"]),
    "a tag": (
        lambda: losses.hinge(chain, torch.full((2, 4), 3)),
        ["LinearChain", "tag", "between 0 and 2", "[0, 0]"],
    ),
    "other parts": (
        lambda: losses.crf(choice, sx.Choice(torch.zeros(2, 4))),
        ["Choice", "same parts", "(4,)"],
    ),
    "other lengths": (
        lambda: losses.crf(
            chain,
            sx.LinearChain(torch.zeros(2, 4, 3), torch.zeros(3, 3), lengths=torch.tensor([4, 3])),
        ),
        ["LinearChain", "same lengths"],
    ),
    "a target that allows nothing": (
        lambda: losses.crf(choice, sx.Choice(torch.tensor([[0.0] * 3, [-inf] * 3]))),
        ["Choice", "target of crf", "item 1 allows no structure"],
    ),
    "smoothing": (
        lambda: losses.crf(sx.Choice(torch.zeros(3), smoothing=sx.Gini()), 0),
        ["crf", "sx.Shannon", "Gini", "smoothed"],
    ),
    "cost shape": (
        lambda: losses.hinge(choice, torch.tensor([0, 1]), cost=torch.ones(2)),
        ["hinge", "cost", "(2, 3)", "(2,)"],
    ),
    "cost sign": (
        lambda: losses.margin_sparsemap(choice, torch.tensor([0, 1]), cost=-1.0),
        ["margin_sparsemap", "cost[0, 0]", "-1", "at least 0"],
    ),
    "penalty": (
        lambda: losses.sparsemap(choice, torch.tensor([0, 1]), penalize="all"),
        ["sparsemap", "penalize", "primary", "all"],
    ),
    "noise": (
        lambda: losses.perturbed(choice, torch.tensor([0, 1]), noise="cauchy"),
        ["perturbed", "noise", "gumbel", "cauchy"],
    ),
    "sigma": (
        lambda: losses.perturbed(choice, torch.tensor([0, 1]), sigma=-1.0),
        ["perturbed", "sigma", "-1"],
    ),
    "samples": (
        lambda: losses.perturbed(choice, torch.tensor([0, 1]), samples=0),
        ["perturbed", "samples", "0"],
    ),
    "allowed": (
        lambda: losses.partial_crf(choice, torch.ones(2, 3)),
        ["partial_crf", "allowed", "boolean", "float32"],
    ),
    "allowed shape": (
        lambda: losses.partial_crf(choice, torch.ones(4, dtype=torch.bool)),
        ["Choice", "(2, 3)", "(4,)"],
    ),
    "allowed batch": (
        lambda: losses.partial_crf(choice, sx.Choice(torch.zeros(3))),
        ["partial_crf", "batch", "()", "(2,)"],
    ),
    "allowed smoothing": (
        lambda: losses.partial_crf(choice, sx.Choice(torch.zeros(2, 3), smoothing=sx.Hard())),
        ["partial_crf", "sx.Shannon", "Hard"],
    ),
    "marginals of free paths": (
        lambda: losses.perceptron(
            sx.GridPath(-torch.ones(2, 2), moves="all", smoothing=sx.Hard()),
            sx.GridPath(-torch.ones(2, 2), moves="all", smoothing=sx.Hard()),
        ),
        ["GridPath.marginals", "intractable"],
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    call, words = ERRORS[case]
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in the message: {caught.value}"


def test_part_used_twice() -> None:
    """Costs are for parts that occur at most once."""
    draw = sx.ForestBuilder()
    leaf = draw.node(0)
    draw.edge(draw.node(), leaf, leaf)
    twice = sx.Hyperpath(draw.build(1), torch.zeros(1))
    assert losses.perceptron(twice, torch.tensor([2.0])) == 0
    with pytest.raises(ValueError, match=r"hinge: target has part .* 2 times"):
        losses.hinge(twice, torch.tensor([2.0]))


# -- the page about losses -----------------------------------------------------------------------


def test_examples_of_the_page() -> None:
    text = (Path(__file__).parent.parent / "docs" / "losses.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "losses.md", "losses.md", 0)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    result = doctest.DocTestRunner(optionflags=flags).run(test)
    assert result.attempted > 15 and not result.failed
