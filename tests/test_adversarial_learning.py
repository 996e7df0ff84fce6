"""Every structure × every attack × every estimator and every loss: right, or a clear error.

An estimator is held against itself at the same scores in clean memory: one storage for each tensor,
zeros in the padding, the same noise; and on the naive backend where it is the numbers that are
attacked. A loss is held against its definition, by enumeration.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attacks import ATTACKS, Case, Truth, case_of, construct, scores, truths
from estimators_table import ESTIMATORS
from queries import Tolerance, close, items
from test_adversarial import is_clear
from test_fenchel_young import LOSSES, SIGMA, epsilon, event_sum
from torch import Tensor

import structmax as sx
from structmax import losses
from structmax.smoothing import SHANNON

inf, f64 = math.inf, torch.float64
STRUCTURES = {
    "chain-shared/shannon", "choice/shannon", "binary-tree/shannon", "nonprojective/shannon",
    "projective-siblings/shannon", "dtw-moves/shannon", "subset-between/shannon", "ctc/shannon",
    "assignment-padded/shannon", "spanning-tree/shannon", "hyperpath/shannon", "pcfg/shannon",
    "semi-markov-transition/shannon", "grid-8/shannon", "path/shannon", "edit/shannon",
}  # fmt: skip
FAST = {"chain-shared/shannon"}
NAIVE = ("shift+1e4", "spread-1e6", "forbidden-at-random", "inference-mode")
# memory concerns an estimator through the queries it asks, so one attack stands for the others
ON_ESTIMATORS = (
    "shift+1e4", "shift-1e4-float32", "spread-1e-6", "spread-1e6", "one-structure", "no-structure",
    "no-structure-in-the-last-item", "forbidden-at-random", "ties-at-0", "mixed-lengths",
    "empty-batch", "float16", "every-other-element", "only-the-last-requires-grad",
    "inference-mode",
)  # fmt: skip
ON_LOSSES = tuple(name for name, attack in ATTACKS.items() if not attack.refused)


def pairs(attacks: tuple[str, ...]) -> pytest.MarkDecorator:
    out = []
    for row in sorted(STRUCTURES):
        for attack in attacks:
            marks = [] if row in FAST else [pytest.mark.slow]
            out.append(pytest.param(row, attack, marks=marks))
    return pytest.mark.parametrize(("row", "name"), out)


def struck(row: str, name: str) -> tuple[Case, Any, list[Truth]]:
    case = case_of(row, ATTACKS[name].sizes)
    s = None if case is None else ATTACKS[name].strike(case)
    if case is None or s is None:
        pytest.skip("says nothing here")
    return case, s, truths(case, s)


class Tally:
    """Cases, counted; what is wrong is told at the end."""

    def __init__(self, feasible: bool) -> None:
        self.right, self.refused, self.feasible = 0, 0, feasible
        self.wrong: list[str] = []

    def run(self, name: str, check: Callable[[], None]) -> None:
        try:
            check()
        except AssertionError as error:
            self.wrong.append(f"{name}: {error}")
        except Exception as error:
            if not self.feasible and "allows no structure" in str(error) and is_clear(error):
                self.refused += 1
            else:
                self.wrong.append(f"{name}: {type(error).__name__}: {error}")
        else:
            self.right += 1

    def tell(self, record: Callable[[str, Any], None]) -> None:
        assert not self.wrong, "\n".join(self.wrong)
        record("right", self.right)
        record("refused", self.refused)


# -- estimators ----------------------------------------------------------------------------------


def cost_of(s: sx.Structure) -> Callable[[Tensor], Tensor]:
    """A cost that is not linear in z, in [−1, 1], so that scores of any size matter alike."""
    w = torch.randn(s.event_shape, generator=torch.Generator().manual_seed(1), dtype=f64)
    return lambda z: event_sum(s, z * w.to(z.dtype)).sin()


def clean(s: Any) -> Any:
    """The same scores in memory of their own, 0 where they are NaN."""
    return construct(s, {k: t.detach().nan_to_num(0.0, inf, -inf) for k, t in scores(s).items()})


def learn(make: Callable[[], Any], s: Any, watch: bool) -> list[Tensor]:
    """The loss, and its gradients in the scores."""
    torch.manual_seed(0)
    leaves = {k: t.detach().clone().requires_grad_(watch) for k, t in scores(s).items()}
    loss = make().loss(construct(s, leaves) if watch else s, cost_of(s))
    if not watch or not loss.requires_grad:
        return [loss]
    grads = torch.autograd.grad(loss.sum(), list(leaves.values()), materialize_grads=True)
    return [loss.detach(), *grads]


@pairs(ON_ESTIMATORS)
def test_estimators(row: str, name: str, record_property: Callable[[str, Any], None]) -> None:
    case, s, T = struck(row, name)
    attack, tally = ATTACKS[name], Tally(all(t.feasible for t in T))
    twin = clean(s)

    def check(estimator: str, make: Callable[[], Any]) -> None:
        watch = not attack.inference and "requires" not in name
        with torch.inference_mode(attack.inference):
            found = learn(make, s, watch)
            assert found[0].shape == s.batch_shape, f"loss {tuple(found[0].shape)}"
            assert all(bool(t.isfinite().all()) for t in found), "not finite"
            assert tally.feasible, "it learns from an item without a structure"
            if "ties" in name or s.dtype.itemsize < 4 or estimator == "sparse-expectation":
                return  # which of the best, how halves are rounded, which of the distributions with
                # SparseMAP's mean: up to the backend
            # backends may draw other samples from the same seed
            naive = name in NAIVE and "sample" not in make().needs
            with sx.backend("naive" if naive else "cpu"):
                expected = learn(make, twin, watch)
        if "spigot" in estimator:  # projections are unique in the primary parts only
            found, expected = found[:2], expected[:2]
        tolerance = 1e-6 if s.dtype == f64 else 2e-3
        for a, b in zip(found, expected, strict=True):
            close(a, b, tolerance * (1 + float(b.abs().sum())), "loss or gradient")

    for estimator, make in ESTIMATORS.items():
        local = estimator == "straight-through-softmax" and s._local_groups is None
        if make().applies_to(s) and not local:
            tally.run(estimator, functools.partial(check, estimator, make))
    tally.tell(record_property)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_empty_batch_leaves_nothing_behind(name: str) -> None:
    """Running means of costs and of differences stay numbers."""
    estimator, case = ESTIMATORS[name](), case_of("chain-shared/shannon")
    if "gumbel-straight" in name:
        case = case_of("choice/shannon")
    cost = cost_of(case.base)
    for s in (case.base, case.base[:0], case.base):
        leaves = {k: t.detach().clone().requires_grad_() for k, t in scores(s).items()}
        loss = estimator.loss(construct(s, leaves), cost)
        assert loss.shape == s.batch_shape and bool(loss.isfinite().all())
        grads = torch.autograd.grad(loss.sum(), list(leaves.values()), materialize_grads=True)
        assert all(bool(g.isfinite().all()) for g in grads)


# -- losses --------------------------------------------------------------------------------------


def target_of(t: Truth) -> int:
    """The number of an allowed structure that is not the best, if there is one."""
    order = t.scores.argsort(descending=True)
    return int(order[int((t.scores > -inf).sum()) // 2])


def definition(loss: str, s: Any, t: Truth, j: int, eps: Tensor) -> Tensor:
    """The loss of structure j of one item ``s``."""
    y, own = t.every[j], t.scores[j]
    dims = tuple(range(1, t.every.dim()))
    hamming = (t.every - y).abs().sum(dims)
    if loss == "perceptron":
        return t.scores.max() - own
    if loss == "hinge":
        return (t.scores + hamming).max() - own
    if loss in ("crf", "smoothed"):
        return t.value - own
    if loss == "perturbed":
        noisy = t.scores + SIGMA * (eps[:, None] * t.every).flatten(2).sum(-1)  # (samples, N)
        return noisy.amax(1).mean() - own
    moved = s if loss == "sparsemap" else s.perturb(1 - 2 * y)
    gains = t.scores if loss == "sparsemap" else t.scores + hamming
    found = moved.sparsemap()  # whose optimality is a case of its own
    on = found.probs > 0
    p, mu = found.probs[on].double(), found.marginals.double()
    value = (p * gains[t.index(found.structures[on])]).sum() - mu.square().sum() / 2
    return value + y.square().sum() / 2 - own


@pairs(ON_LOSSES)
def test_losses(row: str, name: str, record_property: Callable[[str, Any], None]) -> None:
    case, s, T = struck(row, name)
    attack, tally = ATTACKS[name], Tally(all(t.feasible for t in T))
    tol = Tolerance(s.dtype, max((t.scale for t in T), default=0.0), attack.exact)
    index = [target_of(t) if t.feasible else 0 for t in T]
    y = torch.zeros(s.batch_shape + s.event_shape, dtype=f64)
    for i, (t, j) in enumerate(zip(T, index, strict=True)):
        (y[i] if s.batch_shape else y).copy_(t.every[j])
    eps = epsilon(s)
    watch = not attack.inference
    live = {k: t.detach().clone().requires_grad_(watch) for k, t in scores(s).items()}

    def check(loss: str) -> None:
        with torch.inference_mode(attack.inference):
            given = construct(s, live) if watch else s
            found = LOSSES[loss](given, y, reduction="none")
        assert found.shape == s.batch_shape and not bool(found.isnan().any()), f"{found}"
        for i, (t, j, own) in enumerate(zip(T, index, items(s, found), strict=True)):
            if not t.feasible:
                assert own == inf, "a forbidden target has a finite loss"
            elif loss != "perturbed" or s.dtype == f64:  # the noise of another dtype is another
                noise = items(s, eps, 1)[i]
                expected = definition(loss, case.pick(clean(s), i), t, j, noise)
                tolerance = 1e-6 + 2 * tol.score + 20 * tol.marginal
                close(own, expected, tolerance, "loss")
                assert loss == "perturbed" or own >= 0
        if watch and found.requires_grad:
            leaves = list(live.values())
            grads = torch.autograd.grad(found.sum(), leaves, materialize_grads=True)
            assert all(bool(g.isfinite().all()) for g in grads), "gradient"

    kind = s.smoothing.code[0]
    for loss in LOSSES:
        if loss != "hinge-cost" and (loss != "crf" or kind == SHANNON):
            if "hyperpath" in row and ("hinge" in loss or "margin" in loss):
                continue  # costs are of parts that occur once
            tally.run(loss, functools.partial(check, loss))
    if kind == SHANNON:
        tally.run("partial_crf", lambda: check_partial(s, T, tol, attack.inference))
    tally.tell(record_property)


def check_partial(s: Any, T: list[Truth], tol: Tolerance, inference: bool) -> None:
    """The loss of the set of structures without the first part of the first of them."""
    part = torch.zeros(s.event_shape, dtype=torch.bool)
    if T and bool(T[0].every[0].any()):
        part[tuple((T[0].every[0] > 0).nonzero()[0].tolist())] = True
    with torch.inference_mode(inference):
        found = losses.partial_crf(s, ~part, reduction="none")
    for t, own in zip(T, items(s, found), strict=True):
        cut = torch.where((t.every * part).flatten(1).any(1), -inf, t.scores)
        inside = s.temperature * (cut / s.temperature).logsumexp(0)
        expected = torch.full((), inf, dtype=f64) if inside == -inf else t.value - inside
        rounding = torch.finfo(s.dtype).eps * tol.scale
        close(own, expected, 1e-6 + 2 * tol.score + rounding, "partial_crf")
