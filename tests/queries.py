"""Every query of a structure, held against the truth about its items (see ``attacks``).

A check takes the attacked structure, the truth of each item and the tolerances, and fails with an
``AssertionError`` where an answer is wrong. ``REFUSES`` names those that must refuse a batch with
an item that allows no structure; the others answer for it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from attacks import Case, Truth, construct, scores, truths
from torch import Tensor
from torch.distributions import kl_divergence

from structmax.smoothing import SHANNON, TSALLIS

inf, f64 = math.inf, torch.float64


@dataclass(frozen=True)
class Tolerance:
    """``scale`` is that of the scores of whole structures, ``exact`` whether their sums are."""

    dtype: torch.dtype
    scale: float
    exact: bool

    @property
    def base(self) -> float:
        return 1e-9 if self.dtype == f64 else 1e-4

    @property
    def score(self) -> float:
        """Of scores, and of differences between them."""
        eps = torch.finfo(torch.promote_types(self.dtype, torch.float32)).eps
        return self.base + 8 * eps * self.scale

    @property
    def probability(self) -> float:
        return self.base if self.exact else min(self.score, 0.1)

    @property
    def entropy(self) -> float:
        """A − ⟨θ, μ⟩ multiplies the error of μ, 1e-12 or so in float64, by the scores."""
        return 2 * self.score + 1e-11 * self.scale

    @property
    def marginal(self) -> float:
        """With the rounding of the dtype that marginals come in."""
        return self.probability + torch.finfo(self.dtype).eps


Check = Callable[[Any, list[Truth], Tolerance, Case], None]
QUERIES: dict[str, Check] = {}
REFUSES: set[str] = set()


def query(refuses: bool = False) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        QUERIES[check.__name__] = check
        if refuses:
            REFUSES.add(check.__name__)
        return check

    return add


def close(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    assert actual.shape == expected.shape, f"{what}: {actual.shape} for {expected.shape}"
    actual, expected = actual.detach().double(), expected.double()
    same = (actual == expected) | ((actual - expected).abs() <= tolerance)  # NaN is not the same
    assert bool(same.all()), f"{what}: {actual[~same]} for {expected[~same]}"


def items(s: Any, x: Tensor, lead: int = 0) -> list[Tensor]:
    """x ``(*lead, *batch, ...)`` item by item; the batch has one dimension or none."""
    return list(x.unbind(lead)) if s.batch_shape else [x]


def stacked(s: Any, T: list[Truth]) -> tuple[Tensor, list[Tensor]]:
    """Structures ``(k, *batch, *parts)`` among which are all of each item, and their numbers."""
    k = max((len(t.every) for t in T), default=1)
    if not T:
        return torch.zeros(k, *s.batch_shape, *s.event_shape, dtype=f64), []
    index = [torch.arange(k) % len(t.every) for t in T]
    z = [t.every[i] for t, i in zip(T, index, strict=True)]
    return torch.stack(z, 1) if s.batch_shape else z[0], index


@query()
def score(s: Any, T: list[Truth], tol: Tolerance, case: Case) -> None:
    z, index = stacked(s, T)
    found = s.score(z)
    assert found.shape == z.shape[: z.dim() - len(s.event_shape)]
    for t, i, own in zip(T, index, items(s, found, 1)):
        close(own, t.scores[i], tol.score, "score")


@query()
def log_partition(s: Any, T: list[Truth], tol: Tolerance, case: Case) -> None:
    value = s.log_partition()
    assert value.shape == s.batch_shape and value.dtype == torch.promote_types(s.dtype, torch.float)
    for t, own in zip(T, items(s, value)):
        close(own, t.value, tol.score, "log_partition")


@query()
def log_prob(s: Any, T: list[Truth], tol: Tolerance, case: Case) -> None:
    z, index = stacked(s, T)
    found = s.log_prob(z)
    assert not bool((found > 0).any()), "a log-probability above 0"
    for t, i, own in zip(T, index, items(s, found, 1)):
        if not t.feasible:
            close(own, torch.full_like(own, -inf, dtype=f64), 0, "log_prob of nothing")
        elif t.log_prob is not None:
            expected = t.log_prob[i]
            rare = expected < -30 - tol.score  # a probability that rounding may lose
            own, expected, others = own[~rare], expected[~rare], own[rare]
            # of Tsallis' p = (x − τ)^(1/(α−1)) up to scale, log p moves by dx/p^(α−1)
            kind, _, alpha = s.smoothing.code
            weight = ((alpha - 1) * expected).exp() if kind == TSALLIS else torch.ones(())
            close(own * weight, expected * weight, tol.score / s.temperature, "log_prob")
            assert not bool((others > -20).any()), "log_prob of what hardly exists"
        else:
            assert not bool((own.exp() > 0)[t.scores[i] < t.scores.max()].any())


@query(refuses=True)
def argmax(s: Any, T: list[Truth], tol: Tolerance, case: Case) -> None:
    z = s.argmax()
    assert z.shape == s.batch_shape + s.event_shape and z.dtype == s.dtype
    for t, own in zip(T, items(s, z)):
        close(t.scores[t.index(own[None])[0]], t.scores.max(), tol.score, "score of argmax")


@query(refuses=True)
def marginals(s: Any, T: list[Truth], tol: Tolerance, case: Case) -> None:
    mu = s.marginals()
    assert mu.shape == s.batch_shape + s.event_shape and mu.dtype == s.dtype
    for t, own in zip(T, items(s, mu)):
        assert not bool(own.isnan().any())
        if t.log_prob is not None:
            close(own, t.expect(t.every), tol.marginal * float(t.every.max()), "marginals")


@query(refuses=True)
def sample(s: Any, T: list[Truth], tol: Tolerance, case: Case) -> None:
    z = s.sample((5,), generator=torch.Generator().manual_seed(0))
    assert z.shape == (5, *s.batch_shape, *s.event_shape) and z.dtype == s.dtype
    for t, own in zip(T, items(s, z, 1)):
        index = t.index(own)
        assert bool((t.scores[index] > -inf).all()), "a draw that is forbidden"
        if t.log_prob is not None:
            assert bool((t.log_prob[index] > -60 - tol.score).all()), "a draw without probability"


@query()
def topk(s: Any, T: list[Truth], tol: Tolerance, case: Case) -> None:
    for k in (1, max((len(t.every) for t in T), default=1) + 3):
        best = s.topk(k)
        assert best.structures.shape == (*s.batch_shape, k, *s.event_shape)
        triples = zip(*(items(s, x) for x in best))
        for t, (z, own, exists) in zip(T, triples):
            expected = t.scores[t.scores > -inf].sort(descending=True).values[:k]
            assert exists.tolist() == [True] * len(expected) + [False] * (k - len(expected))
            close(own[exists], expected, tol.score, "scores of topk")
            close(t.scores[t.index(z[exists])], expected, tol.score, "structures of topk")
            assert bool((own[~exists] == -inf).all())


@query()
def topk_with_gradient(s: Any, T: list[Truth], tol: Tolerance, case: Case) -> None:
    """The same scores, and the gradient of the best: how often it uses each score."""
    live = {k: t.detach().clone().requires_grad_() for k, t in scores(s).items()}
    best = construct(s, live).topk(2)
    for t, own in zip(T, items(s, best.scores)):
        close(own[0], t.scores.max(), tol.score, "best score")
    exists = torch.where(best.exists, best.scores, 0.0).sum()
    if exists.requires_grad:  # where there is a structure
        for g in torch.autograd.grad(exists, list(live.values()), materialize_grads=True):
            assert bool(g.isfinite().all()), "gradient of the scores of topk"


@query()
def max_marginals(s: Any, T: list[Truth], tol: Tolerance, case: Case) -> None:
    best = s.max_marginals()
    for t, own in zip(T, items(s, best)):
        having = t.scores[(..., *[None] * len(s.event_shape))]
        expected = torch.where(t.every > 0, having, -inf).amax(0)
        close(own, expected, tol.score, "max_marginals")


@query(refuses=True)
def entropy(s: Any, T: list[Truth], tol: Tolerance, case: Case) -> None:
    found = s.entropy()
    assert found.shape == s.batch_shape and not bool(found.isnan().any())
    for t, own in zip(T, items(s, found)):
        if t.log_prob is not None:
            close(own, t.expect(-t.log_prob), tol.entropy / s.temperature, "entropy")


@query(refuses=True)
def cross_entropy(s: Any, T: list[Truth], tol: Tolerance, case: Case) -> None:
    """KL from the structure at harmless scores: the cross-entropy less the entropy."""
    q, known = harmless(case, s.dtype)
    found = kl_divergence(s, q)
    for t, u, own in zip(T, known, items(s, found)):
        if t.log_prob is not None and u.log_prob is not None:
            expected = t.expect(-u.log_prob) - t.expect(-t.log_prob)
            tolerance = (tol.entropy + 4 * tol.probability * (1 + u.scale)) / s.temperature
            likely = bool((u.log_prob[t.log_prob > -inf] > -inf).all())
            if likely or float(t.expect((u.log_prob == -inf).double())) > 1e-6:
                close(own, expected, 2 * tolerance, "KL")


@lru_cache(maxsize=8)
def harmless(case: Case, dtype: torch.dtype) -> tuple[Any, list[Truth]]:
    s = construct(case.base, {k: t.detach().to(dtype) for k, t in scores(case.base).items()})
    return s, truths(case, s)


@query(refuses=True)
def expected_cost(s: Any, T: list[Truth], tol: Tolerance, case: Case) -> None:
    seed = torch.Generator().manual_seed(4)
    costs = torch.randn(s.batch_shape + s.event_shape, generator=seed, dtype=f64)
    found = s.expected_cost(costs.to(s.dtype))
    for t, own, c in zip(T, items(s, found), items(s, costs)):
        if t.log_prob is not None:
            expected = t.expect((t.every * c.to(s.dtype).double()).flatten(1).sum(1))
            close(own, expected, 40 * tol.marginal, "expected_cost")


@query(refuses=True)
def mbr(s: Any, T: list[Truth], tol: Tolerance, case: Case) -> None:
    z = s.mbr()
    for t, own in zip(T, items(s, z)):
        index = t.index(own[None])[0]
        assert t.scores[index] > -inf, "a forbidden structure"
        if t.log_prob is not None:
            gain = (t.every * (2 * t.expect(t.every) - 1)).flatten(1).sum(1)
            best = gain[t.scores > -inf].max()
            close(gain[index], best, 40 * tol.marginal, "minimum risk")


@query()
def condition(s: Any, T: list[Truth], tol: Tolerance, case: Case) -> None:
    """Without one part of the first structure: value and best structures."""
    part = torch.zeros(s.event_shape, dtype=torch.bool)
    if T:
        used = (T[0].every[0] > 0).nonzero()
        part[tuple(used[len(used) // 2].tolist()) if len(used) else (0,) * part.dim()] = True
    without = s.condition(exclude=part)
    value, best = without.log_partition(), without.topk(1)
    rounding = tol.score
    if s.dtype.itemsize < 4:  # scores that were added, as of tags and ends, come in that dtype
        rounding += torch.finfo(s.dtype).eps * tol.scale
    for t, own, top in zip(T, items(s, value), items(s, best.scores)):
        cut = torch.where((t.every * part).flatten(1).any(1), -inf, t.scores)
        close(top[0], cut.max(), rounding, "best without a part")
        if s.smoothing.code[0] == SHANNON:
            gamma = s.temperature
            close(own, gamma * (cut / gamma).logsumexp(0), rounding, "value without a part")
        else:
            assert bool(own >= cut.max() - rounding), "below the best"


@query()
def ranked_support(s: Any, T: list[Truth], tol: Tolerance, case: Case) -> None:
    ranked = list(itertools.islice(s.ranked_support(), 4))
    for rank, found in enumerate(ranked):
        for t, own in zip(T, items(s, found.log_prob)):
            assert not bool(own.isnan())
            if t.feasible and t.log_prob is not None and rank < len(t.log_prob):
                expected = t.log_prob.sort(descending=True).values[rank]
                if expected > -30 - tol.score:
                    close(own, expected, tol.score / s.temperature, f"log_prob of rank {rank}")


@query(refuses=True)
def sparsemap(s: Any, T: list[Truth], tol: Tolerance, case: Case) -> None:
    """By its optimality conditions: no structure has a better slope than the mean of the active."""
    found = s.sparsemap()
    mu, p = items(s, found.marginals), items(s, found.probs)
    for t, mean, weight, z in zip(T, mu, p, items(s, found.structures)):
        on = weight > 0
        index, weight = t.index(z[on]), weight[on].double()
        assert bool((t.scores[index] > -inf).all()), "a forbidden structure is active"
        close(weight.sum(), torch.ones((), dtype=f64), 1e-3, "sum of probabilities")
        own = torch.einsum("k,k...->...", weight, t.every[index])
        close(mean, own, max(1e-6, 4 * tol.marginal), "mean of the distribution")
        slope = t.scores - (t.every * own).flatten(1).sum(1)
        gap = slope.max() - (weight * slope[index]).sum()
        assert bool(gap <= 1e-6 * (1 + len(own)) + 4 * tol.score + 40 * tol.marginal), f"gap {gap}"


@query(refuses=True)
def decode(s: Any, T: list[Truth], tol: Tolerance, case: Case) -> None:
    z = s.argmax()
    assert torch.equal(s.encode(s.decode(z)).to(z.dtype), z) or not T


@query()
def gradient(s: Any, T: list[Truth], tol: Tolerance, case: Case) -> None:
    """Of the value, in all scores: expected counts; the second derivative is finite."""
    given = scores(s)
    live = {k: t for k, t in given.items() if t.requires_grad}
    if not live:
        live = {k: t.detach().clone().requires_grad_() for k, t in given.items()}
    value = construct(s, live).log_partition()
    options: dict[str, Any] = {"materialize_grads": True}
    first = torch.autograd.grad(value.sum(), list(live.values()), create_graph=True, **options)
    known = all(not t.feasible or t.log_prob is not None for t in T)
    for (name, leaf), g in zip(live.items(), first, strict=True):
        assert g.shape == leaf.shape and not bool(g.isnan().any()), f"gradient in {name}"
        if not known or not all(item.linear for item in case.items):
            continue
        expected = torch.zeros(leaf.shape, dtype=f64)
        dims = s._tensors()[name][1]
        for i, t in enumerate(T):
            if t.feasible:
                at = expected[i] if leaf.dim() > dims and s.batch_shape else expected
                at += t.expect(t.counts[name])
        close(g, expected, 20 * tol.marginal, f"gradient in {name}")
    square = sum((g.double() ** 2).sum() for g in first)
    if isinstance(square, Tensor) and square.requires_grad:
        second = torch.autograd.grad(square, list(live.values()), **options)
        assert all(bool(h.isfinite().all()) for h in second), "second derivative"


@query(refuses=True)
def freed_graph(s: Any, T: list[Truth], tol: Tolerance, case: Case) -> None:
    """Backward twice through one graph is torch's error; afterwards all is well."""
    live = {k: t.detach().clone().requires_grad_() for k, t in scores(s).items()}
    again = construct(s, live)
    loss = again.log_partition().sum() + again.marginals().square().sum()
    loss.backward()
    message = "nothing raised"
    try:
        loss.backward()
    except RuntimeError as error:
        message = str(error)
    assert "a second time" in message, message
    log_partition(again, T, tol, case)


NEEDS = {
    "condition": "log_partition",
    "decode": "argmax",
    "freed_graph": "marginals",
    "gradient": "log_partition",
    "topk_with_gradient": "topk",
}
WITH_GRAPH = {
    "gradient",
    "freed_graph",
    "topk_with_gradient",
}  # what inference mode has nothing to do with
