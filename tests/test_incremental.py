"""Shift-reduce and easy-first against enumeration, item by item, and by hand."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from test_errors import fails
from torch import Tensor, nn
from torch.autograd import gradcheck

import structmax as sx
from structmax.nn.stacks import Stack
from structmax.structures import captured
from structmax.structures.incremental import Incremental
from structmax.structures.rollout import Built
from structmax.testing import CHECKS
from structmax.testing.contract import _chi_square, applies

nan, inf = math.nan, math.inf


class StackPolicy(nn.Module):
    """Scores from the top two of the stack and the front of the buffer; composes by an MLP."""

    def __init__(self, d: int = 3) -> None:
        super().__init__()
        self.score, self.compose = nn.Linear(3 * d, 2), nn.Linear(2 * d, d)
        self.double()
        self.steps = 0

    def start(self, inputs: Tensor, lengths: Tensor) -> Any:
        stack = Stack.empty(inputs[:, 0], inputs.shape[1])
        return {"stack": stack, "buffer": inputs, "next": torch.zeros_like(lengths)}

    def _front(self, state: Any) -> Tensor:
        at = state["next"].clamp(max=state["buffer"].shape[1] - 1)
        return state["buffer"][torch.arange(len(at)), at]

    def scores(self, state: Any) -> Tensor:
        self.steps += 1
        left, right, _ = state["stack"].pop2()
        return self.score(torch.cat([left, right, self._front(state)], -1)) * 3

    def advance(self, state: Any, action: Tensor) -> Any:
        left, right, _ = state["stack"].pop2()
        parent = torch.tanh(self.compose(torch.cat([left, right], -1)))
        stack = state["stack"].shift_reduce(action, self._front(state), parent)
        shifted = state["next"] + (action[:, 0] > 0.5).long()
        return {"stack": stack, "buffer": state["buffer"], "next": shifted}


class MergePolicy(nn.Module):
    """Scores the parents of neighbours; the state loses a column at each step, or keeps all."""

    def __init__(self, d: int = 3, shrink: bool = True) -> None:
        super().__init__()
        self.score, self.compose = nn.Linear(d, 1), nn.Linear(2 * d, d)
        self.double()
        self.shrink, self.steps = shrink, 0

    def start(self, inputs: Tensor, lengths: Tensor) -> Any:
        return (inputs,)

    def _parents(self, vectors: Tensor) -> Tensor:
        return torch.tanh(self.compose(torch.cat([vectors[:, :-1], vectors[:, 1:]], -1)))

    def scores(self, state: Any) -> Tensor:
        self.steps += 1
        return self.score(self._parents(state[0])).squeeze(-1) * 3

    def advance(self, state: Any, action: Tensor) -> Any:
        (vectors,) = state
        taken = action.cumsum(-1)[..., None]  # 1 from the merge on
        kept, moved = vectors[:, :-1] * (1 - taken), vectors[:, 1:] * taken
        merged = kept + moved + action[..., None] * (self._parents(vectors) - vectors[:, 1:])
        if not self.shrink:
            merged = torch.cat([merged, torch.zeros_like(merged[:, :1])], 1)
        return (merged,)


KINDS: dict[str, Callable[[], tuple[type[Incremental], nn.Module]]] = {
    "shift-reduce": lambda: (sx.ShiftReduce, StackPolicy()),
    "easy-first": lambda: (sx.EasyFirst, MergePolicy()),
    "easy-first-wide": lambda: (sx.EasyFirst, MergePolicy(shrink=False)),
}
LENGTHS = [4, 1, 3, 5, 2]
COUNTS = {sx.ShiftReduce: [0, 1, 1, 2, 5, 14], sx.EasyFirst: [0, 1, 1, 2, 6, 24]}  # by length


def make(kind: str, lengths: list[int] | None = LENGTHS, n: int = 5, size: int = 5) -> Any:
    torch.manual_seed(0)
    cls, policy = KINDS[kind]()
    inputs = torch.randn(size, n, 3, dtype=torch.float64)
    return cls(policy, inputs, None if lengths is None else torch.tensor(lengths))


each_kind = pytest.mark.parametrize("kind", KINDS)


# -- the contract --------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("length", [4, 3])
def test_contract(kind: str, length: int) -> None:
    def factory() -> sx.Structure:
        cls, policy = KINDS[kind]()
        inputs = torch.randn(2, 4, 3, dtype=torch.float64)
        return cls(policy, inputs, torch.tensor([length, length]))

    for check in CHECKS.values():
        check(factory)


def test_which_checks_apply() -> None:
    s = make("shift-reduce")
    found = {check for check in CHECKS if applies(check, s)}
    assert {"log_prob", "log_partition", "sample", "refusals"} <= found
    assert "topk" not in found and s.supports("topk") and "topk" in s.approximate


@each_kind
def test_probabilities_sum_to_one(kind: str) -> None:
    s = make(kind)
    for item, length in zip(s, LENGTHS, strict=True):
        every = item.enumerate_support()
        assert len(every) == COUNTS[type(s)][length]
        assert len(torch.unique(every.flatten(1), dim=0)) == len(every)
        assert abs(item.log_prob(every).exp().sum() - 1) < 1e-12
        assert all(torch.equal(item.encode(item.decode(z)), z) for z in every)


@each_kind
def test_counts(kind: str) -> None:
    for length in range(1, 6):
        s = make(kind, None, n=length, size=2)
        assert s.enumerate_support().shape == (COUNTS[type(s)][length], 2, *s.event_shape)
        assert s.enumerate_support(expand=False).shape[1] == 1


@each_kind
@torch.no_grad()
def test_sample_frequencies(kind: str) -> None:
    """Of ragged items: χ² at the level 1e-4."""
    s = make(kind)
    draws = s.sample((1500,), generator=torch.Generator().manual_seed(0))
    assert draws.shape == (1500, 5, *s.event_shape)
    for i, item in enumerate(s):
        every = item.enumerate_support()
        match = (draws[:, i, None] == every).flatten(2).all(-1).double()
        assert bool((match.sum(1) == 1).all())
        _chi_square(match.sum(0), item.log_prob(every).exp().detach() * 1500)
    few = [s.sample((9,), generator=torch.Generator().manual_seed(7)) for _ in range(2)]
    assert torch.equal(*few)


# -- searches ------------------------------------------------------------------------------------


@each_kind
def test_a_wide_beam_is_exact(kind: str) -> None:
    s = make(kind)
    for k in (30, 200):
        best = s.topk(k)
        assert best.structures.shape == (5, k, *s.event_shape)
        for i, item in enumerate(s):
            every = item.log_prob(item.enumerate_support()).sort(descending=True).values
            count = len(every)
            assert bool(best.exists[i, :count].all()) and not bool(best.exists[i, count:].any())
            torch.testing.assert_close(best.scores[i, :count], every)
            assert bool((best.scores[i, count:] == -inf).all())
            found = best.structures[i, :count]
            assert len(torch.unique(found.flatten(1), dim=0)) == count
            torch.testing.assert_close(item.log_prob(found), best.scores[i, :count])
            assert bool((best.structures[i, count:] == best.structures[i, 0]).all())


@each_kind
def test_a_narrow_beam(kind: str) -> None:
    """Sorted, with true scores; of width one it is the greedy derivation."""
    s = make(kind)
    best = s.topk(3)
    assert bool((best.scores[:, :-1] >= best.scores[:, 1:]).all())
    for i, item in enumerate(s):
        live = best.exists[i]
        torch.testing.assert_close(item.log_prob(best.structures[i][live]), best.scores[i][live])
    one, greedy = s.beam(1), s.greedy()
    assert torch.equal(one.z[:, 0], greedy.z)
    torch.testing.assert_close(one.log_prob[:, 0], greedy.log_prob)
    torch.testing.assert_close(leaves(one.state), leaves(greedy.state))


@each_kind
def test_a_beam_of_different_trees(kind: str) -> None:
    """A wide one holds the best sequence of every tree; a narrow one holds no tree twice."""
    s = make(kind)
    wide, narrow = s.topk(200, distinct=True), s.topk(4, distinct=True)
    for i, item in enumerate(s):
        every = item.enumerate_support()
        trees, which = item.to_spans(every).flatten(1).unique(dim=0, return_inverse=True)
        scores = torch.full((len(trees),), -inf, dtype=torch.float64)
        scores = scores.scatter_reduce(0, which, item.log_prob(every).detach(), "amax")
        found = wide.exists[i]
        torch.testing.assert_close(wide.scores[i][found], scores.sort(descending=True).values)
        live = narrow.structures[i][narrow.exists[i]]
        assert len(live) == min(4, len(trees))
        assert len(item.to_spans(live).flatten(1).unique(dim=0)) == len(live)
        torch.testing.assert_close(item.log_prob(live), narrow.scores[i][narrow.exists[i]])


@each_kind
def test_greedy_is_the_argmax_of_each_step(kind: str) -> None:
    s = make(kind)
    z = s.greedy().z
    for i, item in enumerate(s):
        every = item.enumerate_support()
        p = item.log_prob(every).exp()
        alive = torch.ones(len(every), dtype=torch.bool)
        for t in range(every.shape[1]):
            mass = (every[alive, t] * p[alive, None]).sum(0)  # of each action, given the prefix
            if not bool(every[alive, t].any()):
                assert not bool(z[i, t].any())
                continue
            assert mass.argmax() == z[i, t].argmax()
            alive = alive & (every[:, t] == z[i, t]).all(-1)


def leaves(state: Any) -> list[Tensor]:
    return [t.detach() for t in torch.utils._pytree.tree_leaves(state)]


@each_kind
def test_a_batch_is_its_items(kind: str) -> None:
    """Rollouts, states and gradients of a ragged batch, against each item alone."""
    s = make(kind)
    s.inputs.requires_grad_()
    z = s.sample()
    whole = s.rollout(z)
    root = root_of(s, whole.state)
    (grad,) = torch.autograd.grad((whole.log_prob + root.sum(-1)).sum(), s.inputs)
    for i, length in enumerate(LENGTHS):
        inputs = s.inputs[i : i + 1, :length].detach().requires_grad_()
        alone = type(s)(s.policy, inputs)
        given = alone.encode(s.decode(z[i : i + 1]))
        one = alone.rollout(given)
        torch.testing.assert_close(one.log_prob, whole.log_prob[i : i + 1])
        torch.testing.assert_close(root_of(alone, one.state)[0], root[i])
        total = one.log_prob.sum() + root_of(alone, one.state).sum()
        (expected,) = torch.autograd.grad(total, inputs)
        torch.testing.assert_close(grad[i, :length], expected[0])
        assert not bool(grad[i, length:].any())
        assert torch.equal(
            alone.greedy().z, alone.encode(s[i : i + 1].decode(s.greedy().z[i : i + 1]))
        )


def root_of(s: Incremental, state: Any) -> Tensor:
    return state["stack"].top() if isinstance(s, sx.ShiftReduce) else state[0][:, 0]


# -- derivatives ---------------------------------------------------------------------------------


@each_kind
def test_gradients(kind: str) -> None:
    """log_prob, beam scores and final states in the inputs and the parameters."""
    s = make(kind, [3, 1, 2], n=4, size=3)
    z, names = s.sample(), list(dict(s.policy.named_parameters()))

    def run(query: Callable[[Any], Tensor]) -> Callable[..., Tensor]:
        def function(inputs: Tensor, *parameters: Tensor) -> Tensor:
            policy = copy.deepcopy(s.policy)
            for name, value in zip(names, parameters, strict=True):
                module, _, leaf = name.rpartition(".")
                owner = policy.get_submodule(module)
                delattr(owner, leaf)
                setattr(owner, leaf, value)
            return query(type(s)(policy, inputs, s.lengths))

        return function

    given = (s.inputs, *[p.detach() for p in s.policy.parameters()])
    given = tuple(t.clone().requires_grad_() for t in given)
    assert gradcheck(run(lambda s: s.log_prob(z)), given, fast_mode=True)
    assert gradcheck(run(lambda s: root_of(s, s.rollout(z).state)), given, fast_mode=True)
    two = run(lambda s: s.topk(2).scores[:1])  # both exist in the first item
    assert gradcheck(two, given, fast_mode=True)


class Table(nn.Module):
    """Merges of three vectors: scores are read off, the state is what was merged."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.tensor([0.3, 0.7], dtype=torch.float64))

    def start(self, inputs: Tensor, lengths: Tensor) -> Any:
        return inputs.squeeze(-1), torch.zeros(len(inputs), dtype=torch.float64)

    def scores(self, state: Any) -> Tensor:
        return self.first + state[1][:, None]  # what came before moves both

    def advance(self, state: Any, action: Tensor) -> Any:
        weights = torch.tensor([2.0, 5.0], dtype=torch.float64)
        return state[0], state[1] + action @ weights


def test_straight_through_by_hand() -> None:
    """One choice between two: state = 2 a₀ + 5 a₁ + 2 (the last merge has one position)."""
    s = sx.EasyFirst(Table(), torch.zeros(1, 3, 1, dtype=torch.float64))
    p = s.policy.first.detach().softmax(0)
    weights = torch.tensor([2.0, 5.0], dtype=torch.float64)
    rollout = s.straight_through()
    assert rollout.z.tolist() == [[[0.0, 1.0], [1.0, 0.0]]]
    assert rollout.state[1].tolist() == [7.0]
    (grad,) = torch.autograd.grad(rollout.state[1].sum(), s.policy.first)
    torch.testing.assert_close(grad, p * (weights - p @ weights))  # the softmax's
    half = s.straight_through(temperature=0.5)
    sharp = (s.policy.first.detach() / 0.5).softmax(0)
    (grad,) = torch.autograd.grad(half.state[1].sum(), s.policy.first)
    torch.testing.assert_close(grad, 2 * sharp * (weights - sharp @ weights))
    plain = s.straight_through(backward="identity")
    # the second step's only action passes its gradient on to its score, 2, and from there to the
    # state before it, by which the first step's rows are worth 2 more each
    (grad,) = torch.autograd.grad(plain.state[1].sum(), s.policy.first)
    torch.testing.assert_close(grad, weights + torch.tensor([2.0, 0.0]) + 2 * weights)
    cost = torch.tensor([[[1.0, -1.0], [0.0, 0.0]]], dtype=torch.float64)
    z = s.straight_through(backward="identity").z
    (grad,) = torch.autograd.grad((z * cost).sum(), s.policy.first)
    torch.testing.assert_close(grad, cost[0, 0])


@each_kind
@pytest.mark.parametrize("straight", ["argmax", "gumbel"])
@pytest.mark.parametrize("backward", ["softmax", "identity"])
def test_straight_through(kind: str, straight: str, backward: str) -> None:
    """0/1 forward, finite backward; the same as replaying its z, and as a beam of one or a draw."""
    s = make(kind)
    generator = torch.Generator().manual_seed(1)
    rollout = s.straight_through(straight, 0.7, backward, generator=generator)
    hard = rollout.z.detach()
    assert bool(((hard == 0) | (hard == 1)).all()) and rollout.z.requires_grad
    if straight == "argmax":
        assert torch.equal(hard, s.greedy().z)
    parameters = list(s.policy.parameters())
    cost = torch.randn(5, 3, dtype=torch.float64)
    grads = torch.autograd.grad(
        (root_of(s, rollout.state) * cost).sum(), parameters, retain_graph=True
    )
    assert all(bool(g.isfinite().all()) for g in grads)
    assert bool(grads[0].any()), "the scores get no gradient"
    replayed = type(s)(s.policy, s.inputs, s.lengths).rollout(rollout.z)
    again = torch.autograd.grad((root_of(s, replayed.state) * cost).sum(), parameters)
    for a, b in zip(grads, again, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(rollout.log_prob, s.log_prob(hard))


def test_gumbel_straight_through_samples() -> None:
    s = make("easy-first", [4], n=4, size=1)
    generator = torch.Generator().manual_seed(0)
    z = s.straight_through("gumbel", sample_shape=(1500,), generator=generator).z.detach()
    every = s.enumerate_support()
    match = (z[:, None, 0] == every[:, 0]).flatten(2).all(-1).double()
    _chi_square(match.sum(0), s.log_prob(every)[:, 0].exp().detach() * 1500)


@pytest.mark.parametrize("kind", ["shift-reduce", "easy-first"])
def test_forbidden_actions(kind: str) -> None:
    """−inf from the policy: no mass, no gradient, no NaN."""
    s = make(kind, [4, 4], n=4, size=2)
    base = type(s.policy)

    class Forbids(base):  # type: ignore[misc, valid-type]
        def scores(self, state: Any) -> Tensor:
            scores = super().scores(state)
            hopeless = torch.arange(scores.shape[1]) == scores.shape[1] - 1
            counts = scores.shape[1] > 1 and (base is MergePolicy or self.steps == 3)
            return torch.where(hopeless & counts, -inf, scores)

    policy = Forbids()
    s = type(s)(policy, s.inputs)
    every = s.enumerate_support()
    totals = []
    for z in every:
        policy.steps = 0
        totals.append(s.log_prob(z))
    p = torch.stack(totals)
    torch.testing.assert_close(p.exp().sum(0), torch.ones(2, dtype=torch.float64))
    assert bool((p == -inf).any())
    grads = torch.autograd.grad(p.exp().sum() + p[p > -inf].sum(), list(policy.parameters()))
    assert all(bool(g.isfinite().all()) for g in grads)
    forbidden = int((p[:, 0] == -inf).nonzero()[0])
    policy.steps = 0
    worst = s.log_prob(every[forbidden])
    grads = torch.autograd.grad(worst.sum(), list(policy.parameters()))
    assert not any(bool(g.any()) for g in grads)
    policy.steps = 0
    best = s.topk(len(every))
    assert torch.equal(best.exists.sum(-1), (p > -inf).sum(0))


@each_kind
def test_padding_may_hold_anything(kind: str) -> None:
    s = make(kind)
    outside = torch.arange(5) >= torch.tensor(LENGTHS)[:, None]
    poisoned = torch.where(outside[..., None], nan, s.inputs).requires_grad_()
    bad = type(s)(s.policy, poisoned, s.lengths)
    z = s.sample()
    torch.testing.assert_close(bad.log_prob(z), s.log_prob(z))
    torch.testing.assert_close(bad.topk(3).scores, s.topk(3).scores)
    dirty = torch.where((z.sum(-1, keepdim=True) == 0), nan, z)
    torch.testing.assert_close(s.log_prob(dirty), s.log_prob(z))
    for total in (bad.log_prob(z).sum(), root_of(s, bad.straight_through().state).sum()):
        grads = torch.autograd.grad(total, [poisoned, *s.policy.parameters()], allow_unused=True)
        assert all(g is None or bool(g.isfinite().all()) for g in grads)


# -- rollouts ------------------------------------------------------------------------------------


@each_kind
def test_rollout_of_some_items(kind: str) -> None:
    s = make(kind)
    z = s.sample((3,))
    whole = s.rollout(z)
    assert whole.log_prob.shape == (3, 5) and len(root_of(s, whole.state)) == 15
    items = torch.tensor([3, 0, 3, 4])
    picked = z[torch.tensor([0, 2, 1, 1]), items]
    fresh = type(s)(s.policy, s.inputs, s.lengths)
    some = fresh.rollout(picked, items)
    expected = whole.log_prob[torch.tensor([0, 2, 1, 1]), items]
    torch.testing.assert_close(some.log_prob, expected)
    rows = torch.tensor([0, 2, 1, 1]) * 5 + items
    torch.testing.assert_close(root_of(s, some.state), root_of(s, whole.state)[rows])
    for form in (s.decode(z), z.bool(), torch.where(z.any(-1), z.argmax(-1), -1)):
        again = type(s)(s.policy, s.inputs, s.lengths).rollout(form)
        torch.testing.assert_close(again.log_prob, whole.log_prob)
        assert torch.equal(again.z, z)


@each_kind
def test_rollouts_are_remembered(kind: str) -> None:
    """What was just drawn or searched costs no further step, in whatever order it is asked for."""
    s = make(kind)
    items = torch.arange(5)
    for draw in (lambda: s.sample((3,)), lambda: s.topk(3).structures.movedim(1, 0)):
        z = draw()
        before = s.policy.steps
        s.log_prob(z), s.rollout(z.reshape(15, *s.event_shape), items.repeat(3))
        s.log_prob(z.flip(0)), s.rollout(z[1, 2:], items[2:])
        assert s.policy.steps == before
    best = s.topk(3)
    torch.testing.assert_close(s.log_prob(best.structures[:, 0]), best.scores[:, 0])
    rollout = s.straight_through()
    before = s.policy.steps
    assert s.rollout(rollout.z).state is rollout.state
    assert s.rollout(rollout.z.reshape(rollout.z.shape), items).state is rollout.state
    assert s.policy.steps == before


def test_what_is_remembered_is_right() -> None:
    """After a backward pass, a step of training or without a graph, it is computed again."""
    s = make("shift-reduce")
    z = s.sample((2,))
    s.log_prob(z).sum().backward()
    first = [p.grad.clone() for p in s.policy.parameters() if p.grad is not None]
    s.log_prob(z).sum().backward()  # the graph was freed
    second = [p.grad for p in s.policy.parameters() if p.grad is not None]
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(2 * a, b)
    old = s.log_prob(z).detach()
    with torch.no_grad():
        for p in s.policy.parameters():
            p.add_(0.1)
    new = s.log_prob(z)
    assert bool((new != old).any())
    torch.testing.assert_close(new, type(s)(s.policy, s.inputs, s.lengths).log_prob(z))
    with torch.no_grad():
        z = s.sample()
    assert s.log_prob(z).requires_grad
    others = s.sample((2,))  # not remembered: other structures
    torch.testing.assert_close(s.log_prob(z), make_again(s).log_prob(z))
    torch.testing.assert_close(s.log_prob(others), make_again(s).log_prob(others))
    square = make("shift-reduce", [4, 4, 4], size=3)
    best = square.topk(3).structures  # (batch, k): as if (samples, batch)
    torch.testing.assert_close(square.log_prob(best), make_again(square).log_prob(best))


def make_again(s: Incremental) -> Incremental:
    return type(s)(s.policy, s.inputs, s.lengths)


def test_a_structure_is_freed() -> None:
    s = make("shift-reduce")
    s.sample()
    gone = weakref.ref(s._memory._kept[2].log_prob)
    gc.disable()
    try:
        del s
        assert gone() is None, "a cycle keeps the graph alive"
    finally:
        gc.enable()


# -- trees ---------------------------------------------------------------------------------------


@each_kind
def test_spans(kind: str) -> None:
    """Every tree, there and back, against BinaryTree."""
    s = make(kind)
    for item, length in zip(s, LENGTHS, strict=True):
        trees = sx.BinaryTree(torch.zeros(5, 5, dtype=torch.float64), torch.tensor(length))
        every = trees.enumerate_support()
        z = item.from_spans(every)
        assert torch.equal(item.to_spans(z), every)
        assert torch.equal(item.from_spans(trees.decode(every)), z)
        built = item.to_spans(item.enumerate_support())
        distinct = torch.unique(built.flatten(1), dim=0)
        assert torch.equal(distinct, torch.unique(every.flatten(1), dim=0))
    batch = s.to_spans(s.sample((2,)))
    assert torch.equal(s.to_spans(s.from_spans(batch)), batch)
    sx.BinaryTree(torch.zeros(5, 5, 5), s.lengths).log_prob(batch)  # looks whether it is a tree


def test_human_forms() -> None:
    trees = make("shift-reduce")
    tree = ((0, 1), (2, (3, 4)))
    z = trees[3].encode(tree)
    assert trees[3].decode(z) == tree
    assert z.argmax(-1).tolist() == [0, 0, 1, 0, 0, 0, 1, 1, 1]
    deep: Any = 0
    for leaf in range(1, 1500):
        deep = (deep, leaf)
    long = sx.ShiftReduce(StackPolicy(), torch.zeros(1, 1500, 3))
    assert long.encode([deep])[0, :, 0].tolist() == [1.0] + [1.0, 0.0] * 1499
    assert type(long.decode(long.encode([deep]))[0]) is tuple  # to compare them takes recursion
    merges = make("easy-first")
    z = merges[3].encode([(2, 3), (0, 1), (2, 4), (0, 4)])
    assert z.argmax(-1).tolist() == [2, 0, 1, 0]
    assert merges[3].decode(z) == [(2, 3), (0, 1), (2, 4), (0, 4)]
    assert merges[3].decode(merges[3].from_spans(merges[3].to_spans(z))) == [
        (0, 1), (2, 3), (2, 4), (0, 4),
    ]  # fmt: skip
    assert merges.decode(merges.greedy().z)[1] == []


def test_easy_first_is_of_sequences() -> None:
    """A tree's probability is spread over its orders."""
    s = make("easy-first", [4], n=4, size=1)[0]
    every = s.enumerate_support()
    spans = s.to_spans(every).flatten(1)
    balanced = s.to_spans(s.encode([(0, 1), (2, 3), (0, 3)])).flatten()
    same = (spans == balanced).all(-1)
    assert int(same.sum()) == 2 and len(torch.unique(spans, dim=0)) == 5
    assert s.log_prob(every)[same].logsumexp(0) > s.log_prob(s.from_spans(balanced.reshape(4, 4)))


# -- shapes, dtypes, errors ----------------------------------------------------------------------


@each_kind
def test_shapes(kind: str) -> None:
    s = make(kind)
    assert s.batch_shape == (5,) and s[0].batch_shape == () and s[1:3].batch_shape == (2,)
    wide = s.expand((2, 5))
    z = wide.sample((3,))
    assert z.shape == (3, 2, 5, *s.event_shape) and wide.log_prob(z).shape == (3, 2, 5)
    torch.testing.assert_close(wide[1].log_prob(z[0, 1]), wide.log_prob(z)[0, 1])
    assert wide.topk(2).scores.shape == (2, 5, 2) and wide.greedy().z.shape == z.shape[1:]
    assert torch.equal(s.log_partition(), torch.zeros(5)) and s.log_partition().dtype == z.dtype
    none = s[:0]
    assert none.sample((2,)).shape == (2, 0, *s.event_shape)
    assert none.topk(2).scores.shape == (0, 2) and none.log_prob(none.sample()).shape == (0,)
    s.sample()
    for other in (copy.deepcopy(s), pickle.loads(pickle.dumps(s)), s.to("cpu")):
        assert torch.equal(other.greedy().z, s.greedy().z)
    assert type(s.policy).__name__ in repr(s)


@each_kind
def test_a_leaf(kind: str) -> None:
    s = make(kind, None, n=1, size=2)
    assert s.event_shape == ((1, 2) if kind == "shift-reduce" else (0, 0))
    for z in (s.sample(), s.greedy().z, s.topk(3).structures[:, 0], s.straight_through().z):
        assert torch.equal(s.log_prob(z), torch.zeros(2, dtype=torch.float64))
        assert s.to_spans(z).tolist() == [[[1.0]], [[1.0]]]
        assert torch.equal(s.encode(s.decode(z)), z)
    assert s.topk(3).exists.tolist() == [[True, False, False]] * 2


@each_kind
def test_precision(kind: str) -> None:
    s = make(kind)
    z = s.sample()
    low = copy.deepcopy(s.policy).bfloat16()
    half = type(s)(low, s.inputs.bfloat16(), s.lengths)
    assert half.sample().dtype == torch.bfloat16 and half.log_prob(z).dtype == torch.float32
    single = type(s)(copy.deepcopy(s.policy).float(), s.inputs.float(), s.lengths)
    torch.testing.assert_close(single.log_prob(z), s.log_prob(z).float(), atol=1e-4, rtol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert single.log_prob(single.sample()).dtype == torch.float32


class Words(nn.Module):
    """Integer inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3, dtype=torch.float64)
        self.inner = StackPolicy()
        self.scores, self.advance = self.inner.scores, self.inner.advance

    def start(self, inputs: Tensor, lengths: Tensor) -> Any:
        return self.inner.start(self.table(inputs), lengths)


def test_words() -> None:
    words = torch.tensor([[1, 2, 3], [3, -100, -100]])  # any padding
    s = sx.ShiftReduce(Words(), words, torch.tensor([3, 1]))
    assert s.dtype == torch.float64
    s.log_prob(s.sample()).sum().backward()
    assert bool(s.policy.table.weight.grad.isfinite().all())


@pytest.mark.parametrize("ragged", [False, True])
def test_a_policy_may_write_into_its_inputs(ragged: bool) -> None:
    class Careless(StackPolicy):
        def start(self, inputs: Tensor, lengths: Tensor) -> Any:
            state = super().start(inputs.mul_(2.0), lengths)
            lengths.fill_(1)
            return state

    torch.manual_seed(0)
    careful, careless, x = StackPolicy(), Careless(), torch.randn(2, 3, 3, dtype=torch.float64)
    careless.load_state_dict(careful.state_dict())
    given, lengths = x.clone(), torch.tensor([3, 2]) if ragged else None
    s = sx.ShiftReduce(careless, given, lengths)
    wanted = sx.ShiftReduce(careful, 2 * x, None if lengths is None else lengths.clone())
    for _ in range(2):
        assert torch.equal(s.greedy().z, wanted.greedy().z)
        torch.testing.assert_close(s.topk(2).scores, wanted.topk(2).scores)
    assert torch.equal(given, x) and (lengths is None or lengths.tolist() == [3, 2])


def test_errors() -> None:
    x, policy = torch.zeros(2, 3, 3, dtype=torch.float64), StackPolicy()
    fails(lambda: sx.ShiftReduce(nn.Linear(1, 1), x), "ShiftReduce", "start", "Linear", "advance")
    fails(lambda: sx.ShiftReduce(policy, x[0, 0]), "inputs", "(B, n, ...)", "(3,)")
    fails(lambda: sx.ShiftReduce(policy, x[:, :0]), "inputs", "at least 1", "(2, 0, 3)")
    fails(lambda: sx.ShiftReduce(policy, [1]), "inputs", "tensor", "list")
    fails(lambda: sx.ShiftReduce(policy, x, torch.tensor([3])), "lengths", "(2,)", "(1,)")
    fails(lambda: sx.ShiftReduce(policy, x, torch.tensor([3, 4])), "between 1 and 3", "4", "item 1")
    fails(lambda: sx.ShiftReduce(policy, x, torch.tensor([0, 3])), "between 1 and 3", "0", "item 0")
    s = sx.ShiftReduce(policy, x, torch.tensor([3, 2]))
    fails(lambda: s.log_prob(torch.zeros(2, 4, 2)), "z must be (..., 5, 2)", "(2, 4, 2)")
    fails(lambda: s.log_prob(torch.zeros(3, 5, 2)), "broadcast", "(3,)", "(2,)")
    fails(lambda: s.log_prob(torch.zeros(2, 5, 2)), "z[0]", "3 leaves", "-1")
    wrong = torch.tensor([[0, 0, 1, 0, 1], [0, 1, 0, -1, -1]])
    fails(lambda: s.log_prob(wrong), "z[1]", "2 leaves", "[0, 1, 0, -1, -1]")
    fails(lambda: s.log_prob(s.sample() * 2), "z[0]", "no tree")
    fails(lambda: s.log_prob(wrong + 1), "z[0]")
    fails(lambda: s.encode(wrong + 2), "between 0 and 1", "3")
    fails(lambda: s.encode(torch.zeros(2, 5)), "integers", "float32")
    fails(lambda: s.encode([(0, 2), 0]), "leaf 1", "got 2")
    fails(lambda: s.encode([(0, 1), [0]]), "nest")
    fails(lambda: s.encode((((0, 1), 2), 3)), "more than the 3 leaves")
    fails(lambda: s.rollout(s.sample(), torch.tensor([0])), "items", "(2,)", "(1,)")
    fails(lambda: s.rollout(s.sample(), torch.tensor([0, 2])), "items", "between 0 and 1", "got 2")
    fails(lambda: s.from_spans(torch.ones(2, 3, 3)), "BinaryTree", "no binary tree")
    fails(s.enumerate_support, "different lengths", "structure[i]")
    fails(lambda: sx.ShiftReduce(policy, torch.zeros(1, 40, 3)).enumerate_support(), "too many")
    fails(lambda: sx.EasyFirst(policy, torch.zeros(1, 40, 3)).enumerate_support(), "too many")
    fails(lambda: s.topk(0), "k must be", "0")
    fails(lambda: s.straight_through("soft"), "argmax", "gumbel", "'soft'")
    fails(lambda: s.straight_through(temperature=0.0), "temperature", "above 0")
    fails(lambda: sx.EasyFirst(policy, x).log_prob(s.sample()), "EasyFirst", "(..., 2, 2)")
    fails(lambda: sx.EasyFirst(MergePolicy(), x).encode([[(1, 1)]] * 2), "(1, 1)", "in the order")
    merges = [(0, 1), (0, 2), (0, 3)]
    fails(lambda: sx.EasyFirst(MergePolicy(), x).encode([merges] * 2), "merges", "3 leaves")
    for query in (lambda: s.primary, s.local_softmax, lambda: s.perturb(x)):
        fails(query, "ShiftReduce", "not given by the scores of its parts", kind=TypeError)
    fails(lambda: s[0][0], "no batch", kind=IndexError)
    fails(lambda: s.mode, "argmax is intractable", "greedy()", "topk(k)", kind=sx.IntractableError)


def test_what_nobody_looks_at() -> None:
    """Without validation, answers to what is good are the same."""
    x = torch.randn(2, 3, 3, dtype=torch.float64)
    policy, lengths = StackPolicy(), torch.tensor([3, 2])
    s = sx.ShiftReduce(policy, x, lengths)
    free = sx.ShiftReduce(policy, x, lengths, validate_args=False)
    z = s.greedy().z
    torch.testing.assert_close(free.log_prob(z), s.log_prob(z))
    items = torch.tensor([1, 0])
    torch.testing.assert_close(
        free.rollout(z[items], items).log_prob, s.rollout(z[items], items).log_prob
    )


class OnCuda(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


class Graph:
    """In the place of a CUDA graph: it runs the recorded search again, into the same memory."""

    def replay(self) -> None:
        fresh = self.search(self.twin)
        self.built.actions.copy_(fresh.actions)
        self.built.log_prob.copy_(fresh.log_prob)


def test_recorded_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time that a size comes a search is recorded, from then on it is replayed."""
    recorded: list[Graph] = []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)

    @contextmanager
    def graph(made: Graph, pool: None) -> Iterator[None]:
        recorded.append(made)
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    policy = StackPolicy()

    def ask(b: int, n: int, lead: int = 1) -> Built | None:
        x = torch.randn(b, n, 3, dtype=torch.float64).as_subclass(OnCuda)
        s = sx.ShiftReduce(policy, x, torch.randint(1, n + 1, (b,)))

        def search(s: Any) -> Built:
            z, log_prob, _ = s.greedy()
            actions = torch.where(z.any(-1), z.argmax(-1), -1)
            if lead > 0:  # the results of an item one after another, or those of all items
                built = Built(actions.repeat_interleave(lead, 0), log_prob.repeat(lead), None)
            else:
                built = Built(actions.repeat(-lead, 1), log_prob.repeat(-lead), None)
            if recorded and not hasattr(recorded[-1], "twin"):
                recorded[-1].search, recorded[-1].twin, recorded[-1].built = search, s, built
            return built

        found = captured.replayed(s, ("greedy", lead), search, lead)
        if found is not None:
            assert torch.equal(found.actions, search(s).actions)
        return found

    assert ask(2, 5) is None  # it may not be recorded
    policy.can_capture = True
    assert ask(2, 5) is None and not recorded
    for _ in range(3):
        assert ask(2, 5) is not None
    assert ask(3, 4) is not None and len(recorded) == 1  # sizes are rounded up
    assert ask(2, 9) is None and ask(2, 9) is not None and len(recorded) == 2
    for lead in (3, -3):
        assert ask(2, 5, lead) is None and ask(2, 5, lead) is not None
    policy.score.weight = nn.Parameter(policy.score.weight.detach().clone())
    assert ask(2, 5) is not None and len(recorded) == 5  # again, with what is elsewhere now
    monkeypatch.setattr(captured, "MOST", 1)
    assert ask(2, 9) is not None and len(captured._of_policies[policy].made) == 1
    assert ask(1, captured.LONGEST + 1) is None and ask(0, 5) is None


def test_a_bad_policy() -> None:
    x = torch.zeros(2, 3, 3, dtype=torch.float64)

    def policy(start: Any = None, scores: Any = None) -> nn.Module:
        module = StackPolicy()
        module.start = start or module.start
        module.scores = scores or module.scores
        return module

    short = policy(start=lambda inputs, lengths: inputs[:1])
    fails(lambda: sx.ShiftReduce(short, x).greedy(), "a row for each of the 2 items", "(1, 3, 3)")
    wide = policy(scores=lambda state: torch.zeros(2, 3))
    fails(lambda: sx.ShiftReduce(wide, x).greedy(), "step 0", "(2, 2)", "(2, 3)")
    for value in (nan, inf, -inf):

        def scores(state: Any, value: float = value) -> Tensor:
            bad = state["buffer"][:, :1, 0] > 0
            return torch.where(bad, value, torch.zeros(len(bad), 2))

        bad = sx.ShiftReduce(policy(scores=scores), torch.stack([x[0], x[1] + 1]))
        for query in ("greedy", "sample", "straight_through"):
            fails(getattr(bad, query), "policy's scores", "item 1", "NaN")
        fails(partial(bad.topk, 2), "policy's scores", "item 1", "NaN")
    narrow = sx.EasyFirst(MergePolicy(), x)
    narrow.policy.scores = lambda state: torch.zeros(2, 1)
    fails(narrow.greedy, "EasyFirst", "step 0", "(2, 2)", "(2, 1)")


def test_lengths_that_nobody_looked_at() -> None:
    x = torch.zeros(3, 3, 3, dtype=torch.float64)
    s = sx.ShiftReduce(StackPolicy(), x, torch.tensor([3, 9, 0]), validate_args=False)
    assert s.topk(2).scores.isnan().tolist() == [[False] * 2, [True] * 2, [True] * 2]


def test_compiled() -> None:
    """A step of training, traced whole."""
    s = make("shift-reduce", None, n=2, size=2)
    z = s.sample()

    def step(inputs: Tensor) -> Tensor:
        trees = sx.ShiftReduce(s.policy, inputs)
        return trees.log_prob(z) + trees.topk(2).scores.sum(-1)

    torch.compiler.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    grads = []
    for function in (step, compiled):
        x = s.inputs.clone().requires_grad_()
        value = function(x)
        grads.append([value.detach(), *torch.autograd.grad(value.sum(), x)])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_stacks() -> None:
    """Random pushes and pops against lists."""
    torch.manual_seed(0)
    stack = Stack.empty(torch.zeros(4, 2), room=8)
    lists: list[list[Tensor]] = [[] for _ in range(4)]
    for _ in range(40):
        leaf, parent = torch.randn(4, 2), torch.randn(4, 2)
        action = torch.zeros(4, 2)
        for row, values in enumerate(lists):
            if len(values) < 8 and (len(values) < 2 or torch.rand(()) < 0.5):
                action[row, 0] = 1
                values.append(leaf[row])
            elif torch.rand(()) < 0.8:
                action[row, 1] = 1
                values[-2:] = [parent[row]]
        stack = stack.shift_reduce(action, leaf, parent)
        assert stack.size.tolist() == [len(values) for values in lists]
        for below, (row, values) in itertools.product(range(3), enumerate(lists)):
            expected = values[-1 - below] if below < len(values) else torch.zeros(2)
            assert torch.equal(stack.top(below)[row], expected)
