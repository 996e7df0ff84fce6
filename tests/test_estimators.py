"""Every estimator × every structure, and the identities between estimators."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from estimators_table import ESTIMATORS, WITHOUT_ADDITIONAL
from table import ROWS, f64
from test_incremental import MergePolicy, StackPolicy
from torch import Tensor, nn

import structmax as sx
from structmax import estimators as est
from structmax.testing.contract import _make, _scores, _with_scores

MAIN = (
    "choice/shannon", "chain-shared/shannon", "binary-tree/shannon", "projective-siblings/shannon",
    "semi-markov-transition/shannon", "pcfg/shannon", "path/gini", "grid-8/shannon",
    "grid-all/hard", "dtw-moves/shannon", "ctc/shannon", "hyperpath/shannon",
    "subset-between/shannon", "assignment-padded/shannon", "nonprojective/shannon-0.5",
    "spanning-tree/shannon", "hmm/shannon",
)  # fmt: skip
KINDS = "shannon", "gini", "hard"
OTHERS = [name for name in ROWS if name not in MAIN and name.split("/")[1] in KINDS]
STRUCTURES = [*MAIN, *[pytest.param(name, marks=pytest.mark.slow) for name in OTHERS]]
PADDED = (
    "choice/shannon", "chain-shared/shannon", "binary-tree/shannon", "dtw-moves/shannon",
    "ctc/shannon", "subset-between/shannon", "assignment-padded/shannon",
    "nonprojective/shannon-0.5",
)  # fmt: skip
REST = [name for name in (*MAIN, *OTHERS) if name not in PADDED]


def applicable(row: str, structure: sx.Structure) -> est.Estimator:
    estimator = ESTIMATORS[row]()
    if not estimator.applies_to(structure):
        pytest.skip(f"{row} does not apply to {structure!r}")
    return estimator


def cost_of(structure: sx.Structure, seed: int = 1) -> Any:
    """A cost that is not linear in z, and looks at every entry, padding included."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*structure.batch_shape, *structure.event_shape)
    w = 3 * torch.randn(shape, dtype=f64, generator=generator)
    dims = tuple(range(-len(structure.event_shape), 0))
    return lambda z: (z * w).sum(dims) + 0.1 * (z * w).sum(dims) ** 2


def gradients(estimator: est.Estimator, structure: sx.Structure, cost: Any) -> list[Tensor]:
    """The loss, and its gradient in each of the scores."""
    leaves = [t.requires_grad_() for t in _scores(structure)]
    loss = estimator.loss(_with_scores(structure, leaves), cost)
    assert loss.shape == structure.batch_shape
    if not loss.requires_grad:  # a hard distribution does not move with the scores
        assert isinstance(structure.smoothing, sx.Hard)
        return [loss, *(torch.zeros_like(leaf) for leaf in leaves)]
    found = torch.autograd.grad(loss.sum(), leaves, materialize_grads=True)
    return [loss.detach(), *found]


def is_loss_only(estimator: est.Estimator) -> bool:
    return type(estimator).__call__ is est.Estimator.__call__


def close(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


# -- every estimator × every structure -----------------------------------------------------------


@pytest.mark.parametrize("row", ESTIMATORS)
@pytest.mark.parametrize("name", STRUCTURES)
def test_every_pair(name: str, row: str) -> None:
    """Shapes, finite gradients, the same bits from the same seed, double use in one graph."""
    s = _make(ROWS[name])
    estimator, cost = applicable(row, s), cost_of(s)
    torch.manual_seed(0)
    first = gradients(estimator, s, cost)
    assert all(bool(t.isfinite().all()) for t in first)
    torch.manual_seed(0)
    again = gradients(ESTIMATORS[row](), s, cost)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), "another seed"
    leaves = [t.requires_grad_() for t in _scores(s)]
    if is_loss_only(estimator) or row == "spigot-steps":
        with pytest.raises(TypeError, match=r"\.loss\(structure, cost\)"):
            estimator(s)
        live, losses = _with_scores(s, leaves), []
        for _ in range(2):  # of one structure, in one graph
            torch.manual_seed(0)
            losses.append(ESTIMATORS[row]().loss(live, cost).sum())
        if losses[0].requires_grad:
            both = torch.autograd.grad(sum(losses), leaves, materialize_grads=True)
            for a, b in zip(both, first[1:], strict=True):
                close(a, 2 * b)
        return

    def make() -> Tensor:
        return ESTIMATORS[row]()(_with_scores(s, leaves))

    z = make()
    samples = getattr(estimator, "samples", 1)
    lead = (samples,) if samples > 1 and not isinstance(estimator, est.Perturbed) else ()
    assert z.shape == (*lead, *s.batch_shape, *s.event_shape) and z.dtype == s.dtype
    assert z.requires_grad
    if estimator.objective != "L(E[z])":
        scores = s.score(z.detach())  # which raises if one is no structure
        assert bool(scores.isfinite().all())
    nothing: Any = {"materialize_grads": True}
    once = torch.autograd.grad(2 * cost(z).sum(), leaves, retain_graph=True, **nothing)
    twice = torch.autograd.grad(cost(z).sum() + cost(z).sum(), leaves, **nothing)
    for a, b in zip(once, twice, strict=True):
        if row != "imle-adaptive":  # whose λ has moved on
            close(a, b)
    again = make()
    both = torch.autograd.grad(cost(make()).sum() + cost(again).sum(), leaves, **nothing)
    single = torch.autograd.grad(cost(make()).sum(), leaves, **nothing)
    for a, b in zip(both, single, strict=True):
        close(a, 2 * b)


class Forbidding(nn.Module):
    """A policy with −inf: it shifts the third word at once, or merges at the left end last."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy, self.start, self.advance = policy, policy.start, policy.advance

    def scores(self, state: Any) -> Tensor:
        scores = self.policy.scores(state)
        first = torch.arange(scores.shape[1]) == 0
        if isinstance(self.policy, MergePolicy):
            return scores.masked_fill(first & (scores.shape[1] > 1), -math.inf)
        return scores.masked_fill(~first & (state["next"] == 2)[:, None], -math.inf)


@pytest.mark.parametrize("row", ESTIMATORS)
@pytest.mark.parametrize("lengths", [[4, 1, 3], None])
@pytest.mark.parametrize("kind", [sx.ShiftReduce, sx.EasyFirst])
def test_every_pair_of_a_policy(kind: Any, lengths: list[int] | None, row: str) -> None:
    """The same for structures that are built step by step; without lengths some steps are −inf."""
    torch.manual_seed(0)
    policy: nn.Module = StackPolicy() if kind is sx.ShiftReduce else MergePolicy()
    if lengths is None:
        policy = Forbidding(policy)
    inputs = torch.randn(3, 4, 3, dtype=f64).requires_grad_()
    s = kind(policy, inputs, lengths and torch.tensor(lengths))
    estimator, cost = applicable(row, s), cost_of(s)
    leaves = [inputs, *policy.parameters()]

    def loss() -> Tensor:
        torch.manual_seed(0)
        found = ESTIMATORS[row]().loss(s, cost)
        assert found.shape == (3,)
        return found.sum()

    once, again = (torch.autograd.grad(loss(), leaves, materialize_grads=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True)), "another seed"
    assert all(bool(g.isfinite().all()) for g in once)
    if row != "reinforce-self-critic":  # whose draws may all be the greedy one
        assert any(bool(g.any()) for g in once)
    if lengths:
        assert not bool(once[0][1, 1:].any()) and not bool(once[0][2, 3:].any())
    both = torch.autograd.grad(loss() + loss(), leaves, materialize_grads=True)
    for a, b in zip(both, once, strict=True):
        close(a, 2 * b)
    if not is_loss_only(estimator):
        z = estimator(s)
        lead = (2,) if getattr(estimator, "samples", 1) == 2 else ()
        assert z.shape == (*lead, 3, *s.event_shape) and z.requires_grad
        assert bool(s.log_prob(z.detach()).isfinite().all())


@pytest.mark.parametrize("row", ESTIMATORS)
@pytest.mark.parametrize(
    "name", [*PADDED, *[pytest.param(name, marks=pytest.mark.slow) for name in REST]]
)
def test_padding_and_forbidden_parts(name: str, row: str) -> None:
    """NaN where no structure has a part, −inf elsewhere: neither reaches a loss or a gradient."""
    s = _make(ROWS[name])
    estimator, cost = applicable(row, s), cost_of(s)
    tensors = {k: t for k, (t, _) in s._tensors().items()}
    name_of_first = next(iter(tensors))
    shape = (*s.batch_shape, *s.event_shape)
    if tensors[name_of_first].shape != shape:
        pytest.skip("the primary scores are made of others")
    used = s._usable_parts().expand(shape)
    torch.manual_seed(0)
    value, grad, *_ = gradients(estimator, s, cost)
    assert not bool(grad[~used].any()), "padding has a gradient"
    poisoned = torch.where(used, tensors[name_of_first], math.nan)
    torch.manual_seed(0)
    again, grad_again, *_ = gradients(
        ESTIMATORS[row](), s._rebuild(**{**tensors, name_of_first: poisoned}), cost
    )
    close(again, value)
    close(grad_again, grad)
    if not s.supports("condition"):
        return
    best = s.argmax() > 0
    mask = used & ~(best.flatten(0, len(s.batch_shape) - 1).any(0) if s.batch_shape else best)
    mask = mask & (torch.rand(s.event_shape, generator=torch.Generator().manual_seed(2)) < 0.3)
    cut = s.condition(exclude=mask)
    scores = next(t for t in _scores(cut) if t.shape == shape)
    assert bool((scores == -math.inf).any()) or not bool(mask.any())
    value, grad, *rest = gradients(ESTIMATORS[row](), cut, cost)
    assert bool(value.isfinite().all()) and all(bool(g.isfinite().all()) for g in (grad, *rest))
    assert not bool(grad[mask].any()), "a forbidden part has a gradient"
    if not is_loss_only(estimator) and row != "spigot-steps":
        z = ESTIMATORS[row]()(cut)
        assert not bool((z * mask).any()), "a forbidden part is in z"


ADDITIONAL = {
    "chain-shared/shannon": ["transition", "start", "end"],
    "semi-markov-transition/shannon": ["transition"],
    "pcfg/shannon": ["root", "rules"],
    "projective-siblings/shannon": ["siblings"],
    "dtw-moves/shannon": ["moves"],
    "edit/shannon": ["deletion", "insertion"],
}


@pytest.mark.parametrize("row", ESTIMATORS)
@pytest.mark.parametrize("name", ADDITIONAL)
def test_gradient_reaches_additional_scores(name: str, row: str) -> None:
    s = _make(ROWS[name])
    estimator = applicable(row, s)
    names = [k for k, (t, _) in s._tensors().items() if t.is_floating_point()]
    total = dict.fromkeys(names, 0.0)
    for seed in range(8):
        if all(total[k] for k in ADDITIONAL[name]):
            break
        for k, g in zip(names, gradients(estimator, s, cost_of(s, seed))[1:], strict=True):
            total[k] += float(g.abs().sum())
    for k in ADDITIONAL[name]:
        if k in ("start", "end"):  # parts of the first and last tags, so primary
            assert total[k] > 0, k
        else:
            assert (total[k] > 0) == (row not in WITHOUT_ADDITIONAL), (k, total)


# -- transforms ----------------------------------------------------------------------------------

MADE_UP = [
    "perturbed", "perturb-and-parse-hard", "straight-through", "straight-through-marginals",
    "spigot", "spigot-cross-entropy", "black-box", "perturb-and-map", "imle", "imle-adaptive",
]  # fmt: skip


@pytest.mark.parametrize("row", MADE_UP)
def test_torch_func(row: str) -> None:
    """Gradients that are made up are the same by autograd, by grad, and item by item in vmap."""
    torch.manual_seed(0)
    price = torch.randn(4, 3, dtype=f64)
    transition, x = torch.randn(3, 3, dtype=f64), torch.randn(3, 2, 4, 3, dtype=f64)

    def loss(x: Tensor) -> Tensor:  # the transitions are mapped too, and have no batch
        s = sx.LinearChain(x, transition * x.mean(), lengths=torch.tensor([4, 3]))
        return ESTIMATORS[row]().loss(s, lambda z: (z * price).sum((-1, -2))).sum()

    leaf = x.clone().requires_grad_()
    each = [loss(item) for item in leaf]
    (expected,) = torch.autograd.grad(sum(each), leaf)
    assert bool(expected.any())
    close(torch.func.grad(loss)(x[0]), expected[0])
    mapped = torch.func.vmap(torch.func.grad(loss), randomness="same")(x[:1])
    close(mapped, expected[:1])
    if row != "imle-adaptive":  # whose λ moves on from item to item
        total = lambda x: torch.func.vmap(loss, randomness="same")(x).sum()  # noqa: E731
        close(torch.func.vmap(torch.func.grad(loss), randomness="same")(x), expected)
        close(torch.func.grad(total)(x), expected)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.func.grad(lambda x: torch.func.grad(loss)(x).square().sum())(x[0])


def test_further_steps_refuse_torch_func() -> None:
    spigot, x = est.SPIGOT(pullback_steps=2), torch.randn(5)
    with pytest.raises(TypeError, match=r"pullback_steps.*torch\.func"):
        torch.func.grad(lambda x: spigot.loss(sx.KSubset(x, 2), lambda z: z[..., 0]))(x)


def test_made_inside_compile() -> None:
    """Pullbacks break the graph, and the numbers stay."""
    torch.manual_seed(0)
    x, price = torch.randn(2, 5, dtype=f64), torch.randn(5, dtype=f64)

    def loss(x: Tensor) -> Tensor:
        return est.IMLE(2.0, noise=None).loss(sx.KSubset(x, 2), lambda z: z @ price).sum()

    torch.compiler.reset()
    found = []
    for function in (loss, torch.compile(loss, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        found += torch.autograd.grad(function(leaf), leaf)
    assert bool(found[0].any())
    close(*found)


@pytest.mark.parametrize("name", ["subset-between", "binary-tree", "assignment-padded", "edit"])
def test_softmax_needs_groups(name: str) -> None:
    s, estimator = _make(ROWS[f"{name}/shannon"]), est.StraightThrough("softmax")
    assert not estimator.applies_to(s) and est.StraightThrough().applies_to(s)
    with pytest.raises(ValueError, match=r'has no groups.*Use backward="marginals"'):
        estimator(s)
    assert estimator.applies_to(sx.Choice(torch.zeros(3)))
