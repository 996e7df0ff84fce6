"""The contract suite: what every structure must satisfy, checked against enumeration.

Each check takes a *factory*: a function without arguments that returns a small structure with
float64 scores drawn from torch's global generator. Small means that ``enumerate_support`` lists at
most a few thousand structures. A batch, if any, is of items of one length.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import torch
from scipy import stats
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.distributions import kl_divergence

from structmax.smoothing import SHANNON
from structmax.sparse.result import SparseMAPResult
from structmax.structures.base import IntractableError, Structure

Factory = Callable[[], Structure]
CHECKS: dict[str, Callable[[Factory], None]] = {}
_needs: dict[str, tuple[str, ...]] = {}


def check_structure(structure_factory: Factory, skip: tuple[str, ...] = ()) -> None:
    """Runs the whole contract on a structure; raises ``AssertionError`` naming what failed.

    Args:
        structure_factory: makes a small structure with random float64 scores (see above)
        skip: names of checks that do not apply

    >>> import structmax as sx
    >>> check_structure(lambda: sx.Choice(torch.randn(3, dtype=torch.float64)), skip=("compile",))
    """
    unknown = set(skip) - set(CHECKS)
    if unknown:
        raise ValueError(
            f"check_structure: unknown checks {sorted(unknown)}; there are {[*CHECKS]}"
        )
    for name, check in CHECKS.items():
        if name not in skip:
            try:
                check(structure_factory)
            except Exception as error:  # gradcheck and queries have errors of their own
                raise AssertionError(f"contract check {name!r} failed: {error}") from error


def applies(check: str, structure: Structure) -> bool:
    """Whether a structure has the queries that a check needs, and answers them exactly.

    ``refusals`` sees to the others.

    >>> import structmax as sx
    >>> applies("marginals", sx.GridPath(torch.zeros(2, 2), moves="all"))
    False
    """
    needs = _needs[check]
    return all(structure.supports(q) and q not in structure.approximate for q in needs)


def _check(*queries: str) -> Callable[[Callable[[Factory], None]], Callable[[Factory], None]]:
    """Registers a check that needs these queries, besides scores and an enumeration."""

    def add(function: Callable[[Factory], None]) -> Callable[[Factory], None]:
        name = function.__name__

        @functools.wraps(function)
        def run(factory: Factory) -> None:
            if applies(name, _make(factory)):
                function(factory)

        CHECKS[name] = run
        _needs[name] = ("score", "enumerate_support", *queries)
        return run

    return add


def _make(factory: Factory, seed: int = 0) -> Structure:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return factory()


def _close(actual: Tensor, expected: Tensor, what: str, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(
        actual.double(),
        expected.double(),
        atol=tolerance,
        rtol=tolerance,
        msg=lambda text: f"{what}: {text}",
    )


def _event(s: Structure, x: Tensor) -> Tensor:
    """x ``(..., *batch)`` made to broadcast against z ``(..., *batch, *parts)``."""
    return x[(..., *[None] * len(s.event_shape))]


def _is_gibbs(s: Structure) -> bool:
    return s.smoothing.code[0] == SHANNON


def _score_names(s: Structure) -> list[str]:
    return [name for name, (t, _) in s._tensors().items() if t.is_floating_point()]


def _scores(s: Structure) -> list[Tensor]:
    tensors = s._tensors()
    return [tensors[name][0].detach().clone() for name in _score_names(s)]


def _with_scores(s: Structure, scores: Any) -> Structure:
    """The same structure with other score tensors."""
    tensors = {name: t for name, (t, _) in s._tensors().items()}
    return s._rebuild(**{**tensors, **dict(zip(_score_names(s), scores, strict=True))})


# -- answers -------------------------------------------------------------------------------------


@_check("log_prob")
def log_prob(factory: Factory) -> None:
    """Probabilities sum to one; under Shannon they are those of Gibbs."""
    s = _make(factory)
    every = s.enumerate_support()
    assert len(torch.unique(every.flatten(1), dim=0)) == len(every), "ambiguous: a z occurs twice"
    p = s.log_prob(every)
    _close(p.exp().sum(0), torch.ones(s.batch_shape), "sum of probabilities")
    if _is_gibbs(s):
        _close(p, (s.score(every) / s.temperature).log_softmax(0), "Gibbs probabilities")


@_check("log_partition")
def log_partition(factory: Factory) -> None:
    """A is the smoothed maximum over structures: equal for Shannon, within bounds otherwise."""
    s = _make(factory)
    scores = s.score(s.enumerate_support())
    value, best = s.log_partition(), scores.amax(0)
    if _is_gibbs(s):
        _close(value, s.temperature * (scores / s.temperature).logsumexp(0), "log_partition")
    else:
        over = s.smoothing.max(scores.movedim(0, -1))
        assert bool((value >= best - 1e-9).all()), "below the hard maximum"
        assert bool((value >= over - 1e-9).all()), "below maxΩ over structures"


@_check("marginals", "log_prob", "expected_cost")
def marginals(factory: Factory) -> None:
    """The expectation of z, and the gradient of A."""
    s = _make(factory)
    every = s.enumerate_support()
    p = _event(s, s.log_prob(every).exp())
    _close(s.marginals(), (p * every).sum(0), "marginals")
    _close(s.mean, s.marginals(), "mean")
    delta = torch.zeros_like(s.marginals(), requires_grad=True)
    (grad,) = torch.autograd.grad(s.perturb(delta).log_partition().sum(), delta)
    _close(grad, s.marginals(), "gradient of log_partition")
    p = s.log_prob(every).exp()
    costs = torch.randn(*s.batch_shape, *s.event_shape, dtype=torch.float64)
    expected = (p * (every * costs).flatten(p.dim()).sum(-1)).sum(0)
    _close(s.expected_cost(costs), expected, "expected_cost")


@_check("argmax")
def argmax(factory: Factory) -> None:
    """A structure, of the highest score (ties are legal)."""
    s = _make(factory)
    every = s.enumerate_support()
    z = s.argmax()
    assert z.shape == s.batch_shape + s.event_shape
    assert bool((z == every).flatten(len(s.batch_shape) + 1).all(-1).any(0).all()), "no structure"
    _close(s.score(z), s.score(every).amax(0), "score of argmax", 1e-12)
    _close(s.mode, z, "mode", 0)
    delta = -torch.rand_like(z)
    gain = (every * delta).flatten(every.dim() - len(s.event_shape)).sum(-1)
    _close(s.perturb(delta).score(every), s.score(every) + gain, "score after perturb")


@_check("mbr", "marginals")
def mbr(factory: Factory) -> None:
    """A structure of the least expected Hamming cost, Σμ − ⟨2μ − 1, z⟩."""
    s = _make(factory)
    every, gains = s.enumerate_support(), 2 * s.marginals() - 1
    gain = (every * gains).flatten(len(s.batch_shape) + 1).sum(-1)
    decoded = (s.mbr() * gains).flatten(len(s.batch_shape)).sum(-1)
    _close(decoded, gain.amax(0), "minimum risk")


@_check("topk")
def topk(factory: Factory) -> None:
    """The best scores in order, distinct structures, and a flag past the last one."""
    s = _make(factory)
    every = s.enumerate_support()
    scores = s.score(every).movedim(0, -1).sort(-1, descending=True).values
    for k in (1, 3, len(every) + 2):
        best = s.topk(k)
        count = min(k, len(every))
        assert best.structures.shape == (*s.batch_shape, k, *s.event_shape)
        assert bool(best.exists[..., :count].all()) and not bool(best.exists[..., count:].any())
        _close(best.scores[..., :count], scores[..., :count], "scores of topk")
        again = s.score(best.structures[_head(s, count)].movedim(len(s.batch_shape), 0))
        _close(again.movedim(0, -1), best.scores[..., :count], "scores of its structures")
        flat = best.structures[_head(s, count)].flatten(len(s.batch_shape) + 1)
        for row in flat.reshape(-1, count, flat.shape[-1]):
            assert len(torch.unique(row, dim=0)) == count, "topk repeats a structure"


def _head(s: Structure, count: int) -> tuple[slice, ...]:
    return (*[slice(None)] * len(s.batch_shape), slice(count))


@_check("max_marginals")
def max_marginals(factory: Factory) -> None:
    """The best score among the structures that have each part."""
    s = _make(factory)
    every = s.enumerate_support()
    scores = _event(s, s.score(every))
    expected = torch.where(every > 0, scores, -math.inf).amax(0)
    _close(s.max_marginals(), expected, "max_marginals")


@_check("entropy", "cross_entropy", "log_prob")
def entropy(factory: Factory) -> None:
    """H, cross-entropy and KL, by enumeration."""
    p, q = _make(factory, 0), _make(factory, 1)
    every = p.enumerate_support()
    lp, lq = p.log_prob(every), q.log_prob(every)

    def expect(x: Tensor) -> Tensor:
        return torch.where(lp > -math.inf, lp.exp() * x, 0.0).sum(0)

    _close(p.entropy(), -expect(lp), "entropy")
    _close(p.cross_entropy(q), -expect(lq), "cross_entropy")
    _close(kl_divergence(p, q), expect(lp) - expect(lq), "KL")
    _close(kl_divergence(p, p), torch.zeros(p.batch_shape), "KL with itself")


@_check("sample", "log_prob")
def sample(factory: Factory) -> None:
    """Frequencies by a χ² test at the level 1e-4, and the same draws from the same seed."""
    s = _make(factory)
    every = s.enumerate_support().flatten(len(s.batch_shape) + 1).double()
    draws = 4000
    generator = torch.Generator().manual_seed(0)
    z = s.sample((draws,), generator=generator)
    assert z.shape == (draws, *s.batch_shape, *s.event_shape)
    again = s.sample((draws,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(z, again), "the same seed gave other draws"
    z = z.flatten(len(s.batch_shape) + 1).double()
    probability = s.log_prob(s.enumerate_support()).exp()
    for item in itertools.product(*[range(n) for n in s.batch_shape]):
        at: Any = (slice(None), *item)
        match = (z[at][:, None] == every[at]).all(-1).double()
        assert bool((match.sum(1) == 1).all()), "a draw is no structure"
        _chi_square(match.sum(0), probability[at] * draws)


def _chi_square(counts: Tensor, expected: Tensor) -> None:
    assert not bool(counts[expected <= 0].any()), "a draw of probability zero"
    rare = expected < 5  # pooled, as the test asks for at least five a cell
    cells = [(counts[~rare], expected[~rare])]
    if expected[rare].sum() > 5:
        cells.append((counts[rare].sum()[None], expected[rare].sum()[None]))
    observed, theory = (torch.cat(column) for column in zip(*cells, strict=True))
    if len(theory) < 2:
        return
    statistic = ((observed - theory) ** 2 / theory).sum().item()
    assert stats.chi2.sf(statistic, len(theory) - 1) > 1e-4, f"χ² = {statistic:.1f}"


@_check("ranked_support", "log_prob")
def ranked_support(factory: Factory) -> None:
    """Every structure of non-zero probability, most likely first."""
    s = _make(factory)
    expected = s.log_prob(s.enumerate_support()).movedim(0, -1).sort(-1, descending=True).values
    for rank, found in enumerate(itertools.islice(s.ranked_support(), 30)):
        _close(found.log_prob, expected[..., rank], f"log_prob at rank {rank}")
        live = found.log_prob > -math.inf
        again = s.log_prob(torch.where(_event(s, live), found.structure, s.argmax()))
        _close(again[live], found.log_prob[live], f"structure at rank {rank}")
    if rank < 29:
        assert bool((expected[..., rank + 1 :] == -math.inf).all()), "stopped early"


@_check("condition", "marginals", "log_partition")
def condition(factory: Factory) -> None:
    """P(part) = exp((A with the part − A)/γ) under Shannon; excluded parts have no mass."""
    s = _make(factory)
    mu = s.marginals()
    flat: list[Any] = list(itertools.product(*[range(n) for n in s.event_shape]))
    for index in flat[:: max(1, len(flat) // 4)]:
        part = torch.zeros(s.event_shape, dtype=torch.bool)
        part[index] = True
        value = mu[(..., *index)]
        if not bool(((value > 0) & (value < 1 - 1e-9)).all()):  # certain, up to rounding
            continue
        out = s.condition(exclude=part)
        assert bool((out.marginals()[(..., *index)] == 0).all()), "an excluded part has mass"
        if not _is_gibbs(s):
            continue
        gone = ((out.log_partition() - s.log_partition()) / s.temperature).exp()
        _close(1 - gone, value, "probability of the part by exclusion")
        try:
            kept = s.condition(include=part)
        except ValueError:
            continue  # this structure declares no incompatible parts
        kept_value = ((kept.log_partition() - s.log_partition()) / s.temperature).exp()
        _close(kept_value, value, "probability of the part by inclusion")
        _close(kept.marginals()[(..., *index)], torch.ones(s.batch_shape), "included part")


@_check("sparsemap")
def sparsemap(factory: Factory) -> None:
    """A distribution over structures that no other one improves; and its derivatives.

    By the conditions of Karush, Kuhn and Tucker: under the gradient, score − ⟨μ, z⟩, no structure
    is better than the mean of the active ones.
    """
    s = _make(factory)
    for scores in (_scores(s), [t.round() for t in _scores(s)]):  # the latter has ties
        check_sparsemap(_with_scores(s, scores))
    if s.smoothing.code[0] != SHANNON and s.supports("marginals"):
        return  # the smoothing plays no role: once is enough

    first = s.sparsemap()

    def answers(*scores: Tensor) -> tuple[Tensor, ...]:
        found = _with_scores(s, scores).sparsemap()
        same = _with_scores(s, scores).sparsemap(init=first)  # probs are for given structures
        return found.marginals, found.value, *found.additional, same.probs

    leaves = tuple(t.requires_grad_() for t in _scores(s))
    assert gradcheck(answers, leaves, fast_mode=True, atol=1e-4), "derivatives of sparsemap"


def check_sparsemap(s: Structure, tolerance: float = 1e-8, **options: Any) -> SparseMAPResult:
    """The result of ``s.sparsemap(**options)``, checked against enumeration."""
    at, result = len(s.batch_shape), s.sparsemap(**options)
    mu, every = result.marginals.double(), s.enumerate_support().double()
    p, active = result.probs.double().movedim(-1, 0), result.structures.double().movedim(at, 0)
    found = (active[:, None] == every).flatten(at + 2).all(-1)
    assert bool(found.any(1).all()), "no structure"
    assert bool((p >= 0).all()), "a negative probability"
    _close(p.sum(0), torch.ones(s.batch_shape), "sum of probabilities")
    _close((p > 0).sum(0), result.num_active, "num_active")
    _close((_event(s, p) * active).sum(0), mu, "mean of the distribution")
    own, others = s.score(active).double(), s.score(every).double()
    value = (p * own).sum(0) - mu.square().flatten(at).sum(-1) / 2
    _close(result.value, value, "value")
    slope = own - (active * mu).flatten(at + 1).sum(-1)
    best = (others - (every * mu).flatten(at + 1).sum(-1)).amax(0)
    scale = 1 + every[0].square().flatten(at).sum(-1) + own.abs().amax(0)
    gap = (best - (p * slope).sum(0)) / scale
    assert bool((gap <= tolerance).all()), f"not optimal: the relative gap is {gap.max():.1e}"
    assert bool((result.gap / scale <= tolerance).all()), "the reported gap is large"
    return result


@_check()
def refusals(factory: Factory) -> None:
    """A query without an efficient algorithm raises an error that names what to use instead."""
    s = _make(factory)
    given = {"sample": ((2,),), "topk": (2,), "cross_entropy": (s,)}
    for query in ("log_prob", "expected_cost"):
        given[query] = (s.enumerate_support()[0],)
    for query in sorted(Structure.queries - type(s).queries):
        message = "it answers"
        try:
            getattr(s, query)(*given.get(query, ()))
        except IntractableError as error:
            message = str(error)
        advice = s.instead.get(query)
        assert advice and advice in message, f"{query} is not among the queries, but: {message}"


# -- numbers -------------------------------------------------------------------------------------


@_check("condition", "argmax", "marginals", "log_partition", "log_prob", "entropy")
def forbidden(factory: Factory) -> None:
    """−inf in the scores is exact: no mass, no NaN, at first and second order."""
    s = _make(factory)
    best, mask = s.argmax() > 0, torch.zeros(s.event_shape, dtype=torch.bool)
    never_best = (~best).flatten(0, len(s.batch_shape) - 1).all(0) if s.batch_shape else ~best
    usable = s.marginals() > 0
    usable = usable.flatten(0, len(s.batch_shape) - 1).any(0) if s.batch_shape else usable
    candidates = (never_best & usable).nonzero()
    if not len(candidates):
        return
    mask[tuple(candidates[0].tolist())] = True
    cut = s.condition(exclude=mask)
    every = cut.enumerate_support()
    without = ~(every * mask).flatten(len(s.batch_shape) + 1).any(-1)
    scores = torch.where(without, s.score(every), -math.inf)
    _close(cut.score(every), scores, "scores with a forbidden part")
    probability = cut.log_prob(every).exp()
    _close(probability.sum(0), torch.ones(s.batch_shape), "sum of probabilities")
    assert not bool(probability[~without].any())
    _close(cut.marginals(), (_event(s, probability) * every).sum(0), "marginals")
    assert bool((cut.marginals()[mask.expand_as(cut.marginals())] == 0).all())
    assert bool(cut.entropy().isfinite().all()), "entropy is not finite"
    leaves = [t.requires_grad_() for t in _scores(cut)]
    live = _with_scores(cut, leaves)
    first = torch.autograd.grad(
        live.log_partition().sum(), leaves, create_graph=True, materialize_grads=True
    )
    assert all(bool(g.isfinite().all()) for g in first), "gradient is not finite"
    squares = torch.stack([(g**2).sum() for g in first]).sum()
    second = torch.autograd.grad(squares, leaves, materialize_grads=True)
    assert all(bool(g.isfinite().all()) for g in second), "second derivative is not finite"


@_check("condition", "argmax", "marginals", "log_partition", "sample")
def infeasible(factory: Factory) -> None:
    """With every part forbidden: value −inf, zero gradient, and errors that say so."""
    s = _make(factory)
    if bool((s.enumerate_support().flatten(len(s.batch_shape) + 1).sum(-1) == 0).any()):
        return  # a structure without parts is always there
    nothing = s.condition(exclude=torch.ones(s.event_shape, dtype=torch.bool))
    assert bool((nothing.log_partition() == -math.inf).all())
    leaves = [t.requires_grad_() for t in _scores(nothing)]
    value = _with_scores(nothing, leaves).log_partition()
    grads = torch.autograd.grad(value.sum(), leaves, materialize_grads=True)
    assert all(not bool(g.any()) for g in grads), "an infeasible item has a gradient"
    for query in (nothing.argmax, nothing.sample, nothing.marginals):
        message = "nothing raised"
        try:
            query()
        except ValueError as error:
            message = str(error)
        assert "allows no structure" in message, (
            f"{query.__name__} of an infeasible item: {message}"
        )


@_check("marginals", "log_partition")
def shifts(factory: Factory) -> None:
    """Adding c to the primary scores moves A by r·c and nothing else."""
    s = _make(factory)
    counts = s.enumerate_support().flatten(len(s.batch_shape) + 1).sum(-1)
    if bool((counts != counts[0]).any()):
        return  # structures of different sizes
    name, *_ = _score_names(s)
    tensor = s._tensors()[name][0]
    if tensor.shape[tensor.dim() - len(s.event_shape) :] != s.event_shape:
        return
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        exact = [(t * 64).round() / 64 for t in _scores(s)]  # representable after the shift
        plain = _with_scores(s, [t.to(dtype) for t in exact])
        for c in (1e4, -1e4):
            moved = _with_scores(s, [(exact[0] + c).to(dtype), *[t.to(dtype) for t in exact[1:]]])
            _close(moved.marginals(), plain.marginals(), f"marginals at shift {c}", tolerance)
            gap = moved.log_partition().double() - plain.log_partition().double()
            _close(gap, counts[0] * c, f"value at shift {c}", 1e-9 if tolerance < 1e-5 else 1e-6)


@_check("marginals", "log_prob")
def extremes(factory: Factory) -> None:
    """Scores × 1e3 and × 1e-3 agree with enumeration."""
    for scale in (1e3, 1e-3):
        base = _make(factory)
        s = _with_scores(base, [t * scale for t in _scores(base)])
        every = s.enumerate_support()
        p = s.log_prob(every).exp()
        _close(p.sum(0), torch.ones(s.batch_shape), f"probabilities at scale {scale}", 1e-8)
        _close(s.marginals(), (_event(s, p) * every).sum(0), f"marginals at scale {scale}", 1e-8)


@_check("argmax", "marginals", "log_partition", "sample")
def dtypes(factory: Factory) -> None:
    """float32 agrees with float64; half precision computes in float32."""
    s = _make(factory)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 4e-3), (torch.float16, 1e-3)):
        low = s.to(dtype)
        high = low.to(torch.float64)
        assert low.marginals().dtype == low.argmax().dtype == low.sample().dtype == dtype
        assert low.log_partition().dtype == torch.float32
        _close(low.log_partition(), high.log_partition(), f"value in {dtype}", 1e-5)
        _close(low.marginals(), high.marginals(), f"marginals in {dtype}", tolerance)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(s.marginals(), _make(factory).marginals()), "autocast changed a result"


@_check("argmax", "marginals", "log_partition", "max_marginals", "entropy")
def unused(factory: Factory) -> None:
    """What no structure uses may hold anything, NaN included."""
    s = _make(factory)
    name, *_ = _score_names(s)
    tensor = s._tensors()[name][0]
    if tensor.shape != (*s.batch_shape, *s.event_shape):
        return
    idle = s.max_marginals() == -math.inf
    poisoned = torch.where(idle, math.nan, tensor)
    leaf = poisoned.clone().requires_grad_()
    bad = s._rebuild(**{**{k: t for k, (t, _) in s._tensors().items()}, name: leaf})
    for query in ("log_partition", "marginals", "argmax", "entropy", "max_marginals"):
        _close(getattr(bad, query)(), getattr(s, query)(), f"{query} with poisoned padding")
    (grad,) = torch.autograd.grad((bad.marginals() ** 2).sum() + bad.log_partition().sum(), leaf)
    assert not bool(grad.isnan().any()), "padding leaks into the gradient"
    assert not bool(grad[idle].any()), "padding has a gradient"


# -- shape and place -----------------------------------------------------------------------------


@_check("argmax", "marginals", "log_partition", "max_marginals", "entropy", "sample", "topk")
def batches(factory: Factory) -> None:
    """Indexing, expanding and iterating the batch; an empty batch."""
    s = _make(factory)
    wide = s.expand((3, *s.batch_shape))
    assert wide.batch_shape == (3, *s.batch_shape)
    for query in ("log_partition", "marginals", "argmax", "entropy", "max_marginals"):
        whole = getattr(wide, query)()
        _close(whole[1], getattr(s, query)(), f"{query} of an expanded batch", 1e-12)
        _close(getattr(wide[1], query)(), whole[1], f"{query} of an indexed batch", 1e-12)
    for i in range(s.batch_shape[0] if s.batch_shape else 0):
        _close(s[i].log_partition(), s.log_partition()[i], "log_partition of an item", 1e-12)
    assert wide[1:].batch_shape == (2, *s.batch_shape) and len(list(wide)) == 3
    none = wide[:0]
    assert none.argmax().shape == none.marginals().shape == (0, *s.batch_shape, *s.event_shape)
    assert none.log_partition().shape == none.entropy().shape == (0, *s.batch_shape)
    assert none.sample((2,)).shape == (2, 0, *s.batch_shape, *s.event_shape)
    assert none.topk(2).scores.shape == (0, *s.batch_shape, 2)


@_check("marginals", "sample", "topk", "entropy", "max_marginals")
def copies(factory: Factory) -> None:
    """repr, pickle, deepcopy; decode and encode are inverse; inputs stay as they were."""
    s = _make(factory)
    before = _scores(s)
    assert repr(s).partition("(")[0] in {kind.__name__ for kind in type(s).__mro__}
    for other in (pickle.loads(pickle.dumps(s)), copy.deepcopy(s), s.to("cpu")):
        _close(other.marginals(), s.marginals(), "marginals of a copy", 0)
    z = s.sample((2,))
    assert torch.equal(s.encode(s.decode(z[0])), z[0]), "encode(decode(z)) differs from z"
    assert len(s.decode(z)) == 2
    s.topk(2), s.entropy(), s.max_marginals()
    for old, new in zip(before, _scores(s), strict=True):
        assert torch.equal(old, new), "an input was modified"
    assert not any(t.requires_grad for t, _ in s._tensors().values())


# -- derivatives ---------------------------------------------------------------------------------


def _functions(s: Structure) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    def value(*scores: Tensor) -> Tensor:
        return _with_scores(s, scores).log_partition()

    def mu(*scores: Tensor) -> Tensor:
        return _with_scores(s, scores).marginals()

    return value, mu


@_check("argmax", "marginals", "log_partition", "log_prob", "entropy", "topk")
def gradients(factory: Factory) -> None:
    """gradcheck and gradgradcheck of value and marginals, entropy and log_prob."""
    s = _make(factory)
    value, mu = _functions(s)
    leaves = tuple(t.requires_grad_() for t in _scores(s))
    fast: dict[str, Any] = {"fast_mode": True, "atol": 1e-4}
    assert gradcheck(value, leaves, check_forward_ad=True) and gradcheck(mu, leaves, **fast)
    z = s.argmax()
    assert gradcheck(lambda *t: _with_scores(s, t).log_prob(z), leaves, **fast)
    if s.smoothing.code[0] == 0:
        return  # hard max is piecewise linear: nothing further to differentiate
    assert gradgradcheck(value, leaves, **fast) and gradgradcheck(mu, leaves, **fast)
    assert gradcheck(lambda *t: _with_scores(s, t).entropy(), leaves, **fast)
    best = s.topk(2).exists.all()
    if bool(best):
        assert gradcheck(lambda *t: _with_scores(s, t).topk(2).scores, leaves, **fast)


@_check("marginals", "log_partition")
def transforms(factory: Factory) -> None:
    """torch.func: grad, vmap of grad, jacrev twice, and forward mode."""
    s = _make(factory)
    value, mu = _functions(s)
    scores = _scores(s)
    arguments = tuple(range(len(scores)))
    total = lambda *t: value(*t).sum()  # noqa: E731
    leaves = [t.clone().requires_grad_() for t in scores]
    expected = torch.autograd.grad(total(*leaves), leaves, materialize_grads=True)
    for a, b in zip(torch.func.grad(total, arguments)(*scores), expected, strict=True):
        _close(a, b, "func.grad")
    stacked = [torch.stack([t, t + 1]) for t in scores]
    mapped = torch.func.vmap(torch.func.grad(total, arguments))(*stacked)
    for a, b in zip(mapped, expected, strict=True):
        _close(a[0], b, "vmap(grad)")
    _close(torch.func.vmap(mu)(*stacked)[0], mu(*scores), "vmap of marginals")
    hessian = torch.func.jacrev(torch.func.jacrev(total))(*scores)
    direction = torch.randn_like(scores[0])
    tangents = (direction, *[torch.zeros_like(t) for t in scores[1:]])
    flat = hessian.reshape(direction.numel(), -1) @ direction.flatten()
    along = torch.func.jvp(torch.func.grad(total), tuple(scores), tangents)[1]
    _close(along.flatten(), flat, "jvp of grad against jacrev of jacrev")
    slope = torch.func.jvp(total, tuple(scores), tangents)[1]
    _close(slope, (expected[0] * direction).sum(), "jvp")


@_check("argmax", "marginals", "log_partition", "sample", "entropy", "log_prob")
def compile(factory: Factory) -> None:
    """torch.compile without a graph break, value and gradient."""
    s = _make(factory)
    scores, z = _scores(s), s.argmax()

    def step(*scores: Tensor) -> Tensor:
        t = _with_scores(s, scores)
        return (
            t.log_partition().sum()
            + (t.marginals() ** 2).sum()
            + t.argmax().sum()
            + t.sample((2,)).mean() * 0
            + t.entropy().sum()
            + t.log_prob(z).sum()
        )

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=False)
    grads = []
    for function in (step, compiled):
        leaves = [t.clone().requires_grad_() for t in scores]
        value = function(*leaves)
        grads.append([value, *torch.autograd.grad(value, leaves, materialize_grads=True)])
    for a, b in zip(*grads, strict=True):
        _close(a, b, "compiled")
