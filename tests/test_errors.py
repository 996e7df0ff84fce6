"""Bad input: the error names the structure, the argument, the item and the fix.

Where values are not looked at (``validate_args=False``), a bad item gives NaN, never a plausible
number.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from table import diamond

import structmax as sx
from structmax.forest.topology import lookup

nan, inf = math.nan, math.inf
SMOOTHINGS = [sx.Shannon(), sx.Gini(), sx.Tsallis(1.5), sx.Hard()]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def put(tensor: torch.Tensor, index: tuple[int, ...], value: float) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


def fails(call: Callable[[], object], *words: str, kind: type[Exception] = ValueError) -> None:
    """The call raises and the message has all the words."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    for word in words:
        assert word in message, f"{word!r} is not in the message: {message}"


def chain(unary=None, transition=None, **kwargs) -> sx.LinearChain:
    unary = randn(2, 4, 3) if unary is None else unary
    return sx.LinearChain(unary, randn(3, 3) if transition is None else transition, **kwargs)


# -- shapes and dtypes ---------------------------------------------------------------------------

SHAPES = {
    "unary 1-d": (lambda: chain(randn(3)), ["LinearChain", "unary", "(..., n, c)", "(3,)"]),
    "unary without positions": (lambda: chain(randn(2, 0, 3)), ["unary", "(2, 0, 3)"]),
    "unary without tags": (lambda: chain(randn(2, 4, 0)), ["unary", "(2, 4, 0)"]),
    "unary list": (lambda: chain([[1.0]]), ["LinearChain", "unary", "tensor", "list"]),
    "transition size": (
        lambda: chain(transition=randn(4, 4)),
        ["LinearChain", "transition", "(..., 3, 3)", "(2, 4, 3)", "(4, 4)"],
    ),
    "transition 1-d": (lambda: chain(transition=randn(3)), ["transition", "(3,)"]),
    "transition steps": (
        lambda: chain(transition=randn(2, 4, 3, 3)),
        ["transition", "(*B, 3, 3, 3)", "4 positions", "(2, 4, 3, 3)"],
    ),
    "transition batch": (
        lambda: chain(transition=randn(5, 3, 3)),
        ["LinearChain", "batch", "unary (2,)", "transition (5,)"],
    ),
    "transition dims": (
        lambda: chain(transition=randn(1, 2, 3, 3, 3)),
        ["transition", "(*B, n-1, c, c)", "(1, 2, 3, 3, 3)"],
    ),
    "start size": (lambda: chain(start=randn(4)), ["start", "(..., 3)", "(4,)"]),
    "end size": (lambda: chain(end=randn(2, 2)), ["end", "(..., 3)", "(2, 2)"]),
    "start scalar": (lambda: chain(start=torch.tensor(1.0)), ["start", "()"]),
    "end batch": (lambda: chain(end=randn(3, 3)), ["batch", "end (3,)", "unary (2,)"]),
    "lengths batch": (
        lambda: chain(lengths=torch.tensor([1, 2, 3])),
        ["LinearChain", "batch", "lengths (3,)"],
    ),
    "choice scalar": (lambda: sx.Choice(torch.tensor(1.0)), ["Choice", "scores", "(..., n)", "()"]),
    "choice empty": (lambda: sx.Choice(randn(2, 0)), ["Choice", "scores", "(2, 0)"]),
    "hyperpath parts": (
        lambda: sx.Hyperpath(diamond(), randn(2, 11)),
        ["Hyperpath", "scores", "(..., 12)", "(2, 11)"],
    ),
    "hyperpath goal batch": (
        lambda: sx.Hyperpath(diamond(), randn(2, 12), goal=torch.tensor([1, 2, 3])),
        ["Hyperpath", "goal (3,)"],
    ),
    "hyperpath unbuilt": (
        lambda: sx.Hyperpath(sx.ForestBuilder(), randn(2, 12)),
        ["Hyperpath", "forest", "build()"],
    ),
    "hmm initial": (
        lambda: sx.HMM(randn(2), randn(3, 3), randn(3, 5), torch.tensor([1])),
        ["HMM", "initial", "(..., 3)", "(2,)"],
    ),
    "hmm transition": (
        lambda: sx.HMM(randn(3), randn(2, 2), randn(3, 5), torch.tensor([1])),
        ["HMM", "transition", "3, 3", "(2, 2)"],
    ),
    "hmm transition batch": (
        lambda: sx.HMM(randn(3), randn(4, 2, 2), randn(3, 5), torch.ones(4, 6).long()),
        ["HMM", "transition", "3, 3", "(4, 2, 2)"],
    ),
    "hmm observations": (
        lambda: sx.HMM(randn(3), randn(3, 3), randn(3, 5), randn(6)),
        ["HMM", "observations", "integers", "float32"],
    ),
    "hmm emission": (
        lambda: sx.HMM(randn(3), randn(3, 3), randn(3), torch.tensor([1])),
        ["HMM", "emission", "(..., c, V)"],
    ),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("validate", [None, False])
def test_shapes(name: str, validate: bool | None) -> None:
    call, words = SHAPES[name]
    fails(call, *words)


DTYPES = {
    "unary": lambda t: chain(t(2, 4, 3)),
    "transition": lambda t: chain(transition=t(3, 3)),
    "start": lambda t: chain(start=t(3)),
    "end": lambda t: chain(end=t(3)),
    "scores": lambda t: sx.Choice(t(2, 3)),
    "initial": lambda t: sx.HMM(t(3), randn(3, 3), randn(3, 5), torch.tensor([1])),
    "emission": lambda t: sx.HMM(randn(3), randn(3, 3), t(3, 5), torch.tensor([1])),
}


@pytest.mark.parametrize("argument", DTYPES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_scores_must_be_floating(argument: str, dtype: torch.dtype) -> None:
    fails(
        lambda: DTYPES[argument](lambda *shape: torch.ones(shape, dtype=dtype)),
        argument,
        "floating point",
        str(dtype),
        f"{argument}.float()",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
def test_lengths_must_be_integers(dtype: torch.dtype) -> None:
    fails(lambda: chain(lengths=torch.ones(2, dtype=dtype)), "LinearChain", "lengths", "integers")


def test_goal_must_be_integers() -> None:
    goal = torch.tensor([1.0, 2.0])
    fails(lambda: sx.Hyperpath(diamond(), randn(2, 12), goal=goal), "goal", "integers", "float32")


DEVICES = {
    "transition": lambda: chain(transition=torch.ones(3, 3, device="meta")),
    "start": lambda: chain(start=torch.ones(3, device="meta")),
    "end": lambda: chain(end=torch.ones(3, device="meta")),
    "lengths": lambda: chain(lengths=torch.ones(2, dtype=torch.long, device="meta")),
    "goal": lambda: sx.Hyperpath(
        diamond(), randn(2, 12), goal=torch.ones(2, dtype=torch.long, device="meta")
    ),
    "observations": lambda: sx.HMM(
        randn(3), randn(3, 3), randn(3, 5), torch.ones(4, dtype=torch.long, device="meta")
    ),
    "emission": lambda: sx.HMM(
        randn(3), randn(3, 3), torch.ones(3, 5, device="meta"), torch.ones(4, dtype=torch.long)
    ),
}


@pytest.mark.parametrize("argument", DEVICES)
def test_devices(argument: str) -> None:
    fails(DEVICES[argument], argument, "meta", "cpu", f"{argument}.to(")


# -- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, -1, 5])
def test_lengths_out_of_range(bad: int) -> None:
    words = "LinearChain", "lengths", "between 1 and 4", str(bad), "item 1"
    fails(lambda: chain(lengths=torch.tensor([2, bad])), *words)
    lengths = torch.tensor([[2, 1], [bad, 4]])
    fails(lambda: chain(randn(2, 2, 4, 3), lengths=lengths), "item (1, 0)", str(bad))
    observed = torch.zeros(2, 4, dtype=torch.long)
    hmm = [randn(3), randn(3, 3), randn(3, 5), observed]
    fails(lambda: sx.HMM(*hmm, lengths=torch.tensor([bad, 4])), "HMM", "lengths", "item 0")


@pytest.mark.parametrize("value", [nan, inf])
def test_scores_must_be_finite(value: float) -> None:
    shown = str(value)
    calls = {
        "unary[1, 2, 0]": lambda: chain(put(randn(2, 4, 3), (1, 2, 0), value)),
        "transition[2, 1]": lambda: chain(transition=put(randn(3, 3), (2, 1), value)),
        "transition[1, 0, 2, 1]": lambda: chain(
            transition=put(randn(2, 3, 3, 3), (1, 0, 2, 1), value)
        ),
        "start[2]": lambda: chain(start=put(randn(3), (2,), value)),
        "end[1, 2]": lambda: chain(end=put(randn(2, 3), (1, 2), value)),
        "scores[1, 3]": lambda: sx.Choice(put(randn(2, 4), (1, 3), value)),
    }
    for where, call in calls.items():
        fails(call, where, shown, "-inf to forbid")
    fails(
        lambda: sx.Hyperpath(diamond(), put(randn(2, 12), (1, 3), value)),
        "Hyperpath", "scores[1, 3]", shown,
    )  # fmt: skip
    fails(
        lambda: sx.HMM(
            randn(3), randn(3, 3), put(randn(3, 5), (1, 2), value), torch.tensor([0, 2])
        ),
        "HMM", "emission", shown,
    )  # fmt: skip


@pytest.mark.parametrize("value", [nan, inf])
def test_one_bad_score_of_many(value: float) -> None:
    scores = put(torch.zeros(3, 50_000), (1, 49_000), value)
    fails(lambda: sx.Choice(scores), "Choice", "scores[1, 49000]", str(value))
    assert sx.Choice(torch.zeros(3, 50_000)).log_partition().shape == (3,)


@pytest.mark.parametrize("value", [nan, inf])
def test_values_of_broadcast_scores(value: float) -> None:
    """One sentence with the lengths of several: the mask has more dimensions than the scores."""
    lengths = torch.tensor([4, 3])
    fails(lambda: chain(put(randn(4, 3), (1, 2), value), lengths=lengths), "unary", str(value))
    fails(
        lambda: chain(
            randn(4, 3), transition=put(randn(3, 3, 3), (0, 1, 2), value), lengths=lengths
        ),
        "transition",
        str(value),
    )
    fine = put(randn(4, 3), (3, 2), value)
    assert bool(chain(fine, lengths=torch.tensor([3, 2])).log_partition().isfinite().all())


def test_what_nothing_uses_may_be_anything() -> None:
    scores = put(randn(2, 12), (slice(None), 11), nan)  # part 11 belongs to no node and no edge
    assert bool(sx.Hyperpath(diamond(), scores).log_partition().isfinite().all())
    hmm = sx.HMM(
        randn(3), randn(3, 3), put(randn(3, 5), (1, 2), nan), torch.tensor([0, 1])
    )  # symbol 2 is never seen
    assert bool(hmm.marginals().isfinite().all())


def test_bad_observations() -> None:
    for bad in (-1, 5):
        fails(
            lambda bad=bad: sx.HMM(
                randn(3), randn(3, 3), randn(3, 5), torch.tensor([[0, 1], [2, bad]])
            ),
            "HMM", "observations[1, 1]", "between 0 and 4",
        )  # fmt: skip


def test_bad_goal() -> None:
    for bad in (-1, 6):
        goal = torch.tensor([0, bad])
        fails(lambda goal=goal: sx.Hyperpath(diamond(), randn(2, 12), goal=goal), "goal", "5")


def test_empty_batch_is_no_error() -> None:
    for s in (
        chain(randn(0, 4, 3)),
        chain(randn(0, 4, 3), lengths=torch.zeros(0, dtype=torch.long)),
        chain(randn(2, 0, 4, 3), smoothing=sx.Gini()),
        chain(randn(0, 4, 3), transition=randn(0, 3, 3, 3)),
        sx.Choice(randn(0, 3)),
        sx.Hyperpath(diamond(), randn(0, 12)),
        sx.HMM(randn(3), randn(3, 3), randn(3, 5), torch.zeros(0, 4, dtype=torch.long)),
    ):
        batch, event = s.batch_shape, s.event_shape
        assert 0 in batch
        for query in ("argmax", "marginals", "mbr", "max_marginals"):
            assert getattr(s, query)().shape == batch + event, query
        for query in ("log_partition", "entropy"):
            assert getattr(s, query)().shape == batch, query
        assert s.sample((2,)).shape == (2, *batch, *event)
        best = s.topk(3)
        assert best.structures.shape == (*batch, 3, *event) and best.exists.shape == (*batch, 3)
        assert s.log_prob(s.argmax()).shape == s.score(s.sample()).shape == batch
        assert torch.distributions.kl_divergence(s, s).shape == batch
        assert list(s.ranked_support()) == []
        assert len(s.decode(s.argmax())) == batch[0]
        scores = [
            t.clone().requires_grad_() for t, _ in s._tensors().values() if t.is_floating_point()
        ]
        names = [k for k, (t, _) in s._tensors().items() if t.is_floating_point()]
        rest = {k: t for k, (t, _) in s._tensors().items()}
        live = s._rebuild(**{**rest, **dict(zip(names, scores, strict=True))})
        loss = live.log_partition().sum() + (live.marginals() ** 2).sum()
        torch.autograd.grad(loss, scores)


# -- queries -------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, -1, 1.5, "2", None])
def test_bad_k(k) -> None:
    for s in (chain(), sx.Choice(randn(3)), sx.Hyperpath(diamond(), randn(12))):
        fails(
            lambda s=s: s.topk(k), type(s).__name__, "topk", "k must be", str(k),
            kind=(ValueError, TypeError),
        )  # fmt: skip


@pytest.mark.parametrize("omega", SMOOTHINGS, ids=str)
def test_bad_z(omega: sx.Smoothing) -> None:
    s = chain(smoothing=omega)
    z = s.argmax()
    for query in (s.score, s.log_prob):
        fails(
            lambda query=query: query(z[..., :2]), "LinearChain", "z must be", "4, 3", "(2, 4, 2)"
        )
        fails(lambda query=query: query(z[:, :3]), "LinearChain", "(2, 3, 3)")
        fails(lambda query=query: query(torch.ones(5, 4, 3)), "batch", "(5,)", "(2,)")
        two = put(z, (1, 2), 1.0)
        fails(lambda query=query, two=two: query(two), "LinearChain", "exactly one 1", "[1, 2]")
        fails(lambda query=query: query(0 * z), "exactly one 1", "[0, 0]")
        fails(lambda query=query: query(0.5 * z), "exactly one 1", "[0, 0]")
        fails(lambda query=query: query(s.marginals() * 0.9), "exactly one 1")
        fails(lambda query=query: query(put(z, (1, 2, 0), nan)), "exactly one 1", "[1, 2]")
        fails(lambda query=query: query(-z), "exactly one 1")
    c = sx.Choice(randn(2, 4), smoothing=omega)
    for query in (c.score, c.log_prob):
        fails(lambda query=query: query(torch.ones(2, 4)), "Choice", "exactly one 1", "[0]")
        fails(lambda query=query: query(torch.ones(2, 3)), "Choice", "z must be", "(2, 3)")


@pytest.mark.parametrize("omega", SMOOTHINGS, ids=str)
def test_bad_tags(omega: sx.Smoothing) -> None:
    s = chain(smoothing=omega, lengths=torch.tensor([4, 3]))
    tags = torch.tensor([[0, 1, 2, 0], [0, 1, 2, 99]])  # 99 stands in the padding
    assert s.score(tags).shape == s.log_prob(tags).shape == (2,)
    for query in (s.score, s.log_prob, s.encode):
        for bad in (3, -1):
            wrong = put(tags, (1, 2), bad)
            words = "LinearChain", "tag must be between 0 and 2", str(bad), "[1, 2]"
            fails(lambda query=query, wrong=wrong: query(wrong), *words)
        fails(
            lambda query=query: query(tags[:, :3]), "LinearChain", "tags must be (..., 4)", "(2, 3)"
        )
        fails(lambda query=query: query(tags[:1].expand(3, 4)), "tags", "(2,)", "(3, 4)")
    c = sx.Choice(randn(2, 4), smoothing=omega)
    for bad in (4, -1):
        fails(
            lambda bad=bad: c.log_prob(torch.tensor([0, bad])),
            "Choice",
            "between 0 and 3",
            str(bad),
        )


def test_bad_masks() -> None:
    s = chain()
    mask = torch.zeros(4, 3, dtype=torch.bool)
    for name in ("include", "exclude"):
        fails(
            lambda name=name: s.condition(**{name: mask.float()}),
            "condition",
            name,
            "boolean",
            "float32",
        )
        fails(lambda name=name: s.condition(**{name: mask.long()}), name, "boolean", "int64")
        fails(lambda name=name: s.condition(**{name: mask[:3]}), name, "(2, 4, 3)", "(3, 3)")
        fails(
            lambda name=name: s.condition(**{name: mask.expand(5, 2, 4, 3)}), name, "(5, 2, 4, 3)"
        )
        fails(
            lambda name=name: s.condition(**{name: [[True]]}),
            "LinearChain",
            "condition",
            name,
            "mask",
        )
    h = sx.Hyperpath(diamond(), randn(2, 12))
    include = torch.zeros(12, dtype=torch.bool)
    fails(lambda: h.condition(include=include), "Hyperpath", "include", "exclude=")


def test_bad_smoothing() -> None:
    for kind in (sx.Shannon, sx.Gini, sx.Tsallis):
        for gamma in (0.0, -1.0, nan, inf):
            fails(
                lambda kind=kind, gamma=gamma: kind(gamma=gamma), kind.__name__, "gamma", str(gamma)
            )
    for alpha in (0.5, 0.0, -1.0, nan, inf):
        fails(lambda alpha=alpha: sx.Tsallis(alpha), "Tsallis", "alpha", str(alpha))
    for smoothing in ("shannon", 1.0, sx.Shannon):
        fails(
            lambda smoothing=smoothing: chain(smoothing=smoothing),
            "LinearChain",
            "smoothing",
            "sx.Shannon",
        )
    fails(lambda: sx.Shannon(0.0), "sx.Hard()")


def test_other_structures() -> None:
    p = chain()
    fails(lambda: p.cross_entropy(chain(randn(2, 5, 3))), "LinearChain", "(4, 3)", "(5, 3)")
    fails(lambda: p.cross_entropy(sx.Choice(randn(3))), "LinearChain", "same parts", "(3,)")
    two, three = (sx.Choice(randn(n, 3)) for n in (2, 3))
    fails(
        lambda: torch.distributions.kl_divergence(two, three),
        "Choice",
        "must broadcast",
        "(2,) and (3,)",
    )
    fails(lambda: p.cross_entropy(randn(3)), "LinearChain", "Tensor")
    ragged = chain(lengths=torch.tensor([2, 4]))
    fails(lambda: p.cross_entropy(ragged), "LinearChain", "lengths")
    same = sx.Hyperpath(diamond(), randn(2, 12))
    other = sx.ForestBuilder()
    other.edges(other.node(), -1, -1, range(12))
    fails(
        lambda: same.cross_entropy(sx.Hyperpath(other.build(), randn(2, 12))), "Hyperpath", "forest"
    )
    fails(lambda: sx.Choice(randn(12)).cross_entropy(same), "Choice", "Hyperpath")
    fails(lambda: p.cross_entropy(sx.Assignment(randn(2, 4, 3))), "LinearChain", "Assignment")
    one, two = torch.tensor([1, 2]), torch.tensor([2, 1])
    match = [sx.Assignment(randn(2, 3, 3), (lengths, one)) for lengths in (one, two)]
    fails(lambda: match[0].cross_entropy(match[1]), "Assignment", "same lengths")
    fails(lambda: sx.CTC(randn(4, 3), one).cross_entropy(chain(randn(4, 3))), "CTC", "LinearChain")


RAGGED = {
    "chain": lambda sizes: chain(lengths=sizes),
    "alignment": lambda sizes: sx.Alignment(randn(2, 4, 4), (sizes, sizes)),
    "assignment": lambda sizes: sx.Assignment(randn(2, 4, 4), (sizes, sizes)),
    "ctc": lambda sizes: sx.CTC(
        randn(2, 6, 3), torch.tensor([[1, 2, 1, 2]] * 2), target_lengths=sizes
    ),
    "segments": lambda sizes: sx.SemiMarkov(randn(2, 4, 2, 2), lengths=sizes),
    "grammar": lambda sizes: sx.PCFG(randn(2), randn(2, 4, 4), randn(2, 4, 2), sizes),
    "path": lambda sizes: sx.Path(
        torch.tensor([(0, 1), (1, 2), (2, 3), (3, 4)]), randn(2, 4), 0, sizes
    ),
    "hyperpath": lambda sizes: sx.Hyperpath(diamond(), randn(2, 12), goal=sizes),
}


@pytest.mark.parametrize("kind", RAGGED)
def test_items_with_different_supports(kind: str) -> None:
    s = RAGGED[kind](torch.tensor([2, 4]))
    fails(s.enumerate_support, "different" if kind != "ctc" else "other", "structure[i]")
    assert len(s[0].enumerate_support()) > 0


def test_enumerating_too_much() -> None:
    fails(lambda: chain(randn(40, 3)).enumerate_support(), "3^40", "too many")
    fails(sx.BinaryTree(randn(20, 20)).enumerate_support, "20 leaves", "too many")
    fails(sx.CTC(randn(20, 3), torch.tensor([1, 2])).enumerate_support, "3^20", "too many")
    grammar = sx.PCFG(randn(3), randn(3, 6, 6), randn(9, 3))
    fails(grammar.enumerate_support, "PCFG", "too many")


def test_bad_forms() -> None:
    """What ``encode`` refuses."""
    tree = sx.BinaryTree(randn(3, 3))
    fails(lambda: tree.encode(randn(5, 2)), "BinaryTree", "integers (i, j)", "torch.float32")
    labelled = sx.BinaryTree(randn(3, 3, 2))
    fails(lambda: labelled.encode(torch.zeros(5, 2).long()), "(i, j, label)", "(5, 2)")
    edges = torch.tensor([(0, 1), (0, 1), (1, 2)])
    path = sx.Path(edges, randn(3), 0, 2)
    assert path.decode(path.encode([1, 2])) == [1, 2]
    fails(lambda: path.encode([0, 3]), "Path", "edge", "between 0 and 2", "got 3")
    subset = sx.KSubset(randn(4), (1, 2))
    fails(lambda: subset.score(torch.ones(4)), "KSubset", "between 1 and 2")
    derived = sx.Hyperpath(diamond(), randn(12), smoothing=sx.Gini())
    fails(lambda: derived.log_prob(torch.ones(12)), "Hyperpath: z is not a derivation", "1.0, 1.0")


def test_padding_of_spans() -> None:
    grammar = sx.PCFG(randn(2), randn(2, 4, 4), randn(3, 2))
    spans = [(0, 2, 0), (0, 1, 1), (0, 0, 2), (1, 1, 3), (2, 2, 2)]
    z = grammar.encode(spans)
    assert torch.equal(grammar.encode([*spans, (-1, -1, -1)]), z) and z.sum() == 5


def test_bad_noise() -> None:
    for delta in (randn(4), randn(2, 4), randn(5, 1, 2, 3)):
        fails(lambda delta=delta: chain(randn(2, 4, 3)).perturb(delta), "perturb", "(2, 4, 3)")


def test_indexing() -> None:
    fails(lambda: chain(randn(4, 3))[0], "LinearChain", "batch_shape is ()", kind=IndexError)
    fails(lambda: chain()[5], "5", kind=IndexError)
    fails(lambda: len(chain(randn(4, 3))), "LinearChain", kind=TypeError)


def test_backend_name() -> None:
    with pytest.raises(ValueError, match=r"backend must be .*got 'tpu'"), sx.backend("tpu"):
        pass


# -- forests -------------------------------------------------------------------------------------


def test_forest_builder() -> None:
    draw = sx.ForestBuilder()
    fails(draw.build, "ForestBuilder.build", "at least one node")
    a, b = draw.node(0), draw.node(1)
    fails(
        lambda: draw.edge(b, a, a, a), "ForestBuilder.edge", "at most 2 tails", "3", "inner nodes"
    )
    fails(lambda: draw.edge(a, b), "ForestBuilder", "node 0", "earlier", "topological order")
    fails(lambda: draw.edge(a, a), "earlier")
    fails(lambda: draw.edge(7, a), "head 7", "no node yet")
    fails(lambda: draw.edge(2, a), "head 2", "no node yet")
    fails(lambda: draw.edges([0, 7], -1), "head 7", "no node yet")
    fails(lambda: draw.edge(-1, a), "head -1")
    fails(lambda: draw.edge(b, -2), "earlier", "-2")
    fails(lambda: draw.edge(b, a, part=-2), "ForestBuilder", "part", "-2")
    fails(lambda: draw.node(part=-5), "ForestBuilder", "part", "-5")
    fails(lambda: draw.node(part=0.5), "ForestBuilder", "part", "integer")
    fails(lambda: draw.edges(1.5, 0), "ForestBuilder", "integer")
    fails(lambda: draw.nodes(3, [0, 1]), "ForestBuilder.nodes", "3", "2")
    fails(lambda: draw.nodes(-1), "ForestBuilder.nodes", "-1")
    fails(lambda: draw.build(2**32), "ForestBuilder.build", "num_parts", "2**31")
    draw.edge(b, a)
    fails(lambda: draw.build(1), "ForestBuilder.build", "part 1", "num_parts is 1")
    forest = draw.build()  # the refused calls left no trace
    assert (forest.num_nodes, forest.num_edges, forest.num_parts) == (2, 2, 2)


@pytest.mark.parametrize("much", [2**31 - 1, 2**32, 2**32 + 1, 2**63, 2**70, -(2**32)])
def test_numbers_of_a_forest_that_int32_does_not_hold(much: int) -> None:
    """They were wrapped: 2^32 was taken for 0."""
    draw = sx.ForestBuilder()
    a, b = draw.nodes(2)
    for call in (
        lambda: draw.edge(much, a),
        lambda: draw.edge(b, much),
        lambda: draw.edge(b, a, much),
        lambda: draw.edge(b, a, part=much),
        lambda: draw.node(part=much),
        lambda: draw.runs([b], 1, lambda d: (much + d,)),
        lambda: draw.runs([b], much, lambda d: (d,)),
    ):
        fails(call, "ForestBuilder", "2**31", str(much))


def test_a_forest_that_nobody_keeps() -> None:
    key = diamond().key
    gc.collect()
    fails(lambda: lookup(key), key, "no longer exists", "keep a reference", kind=RuntimeError)


def test_derivations_without_end() -> None:
    """A node used as both tails doubles at every level: 2^40 visits cannot be walked."""
    draw = sx.ForestBuilder()
    v = draw.node(0)
    for _ in range(40):
        w = draw.node()
        draw.edge(w, v, v)
        v = w
    fails(draw.build, "Forest", "2**31")


# -- infeasible and NaN --------------------------------------------------------------------------


def blocked(omega: sx.Smoothing, **kwargs) -> sx.LinearChain:
    """Item 1 allows nothing at position 2."""
    return chain(put(randn(3, 4, 3), (1, 2), -inf), smoothing=omega, **kwargs)


@pytest.mark.parametrize("omega", SMOOTHINGS, ids=str)
def test_infeasible(omega: sx.Smoothing) -> None:
    s = blocked(omega)
    assert s.log_partition().tolist()[1] == -inf and bool(
        s.log_partition()[[0, 2]].isfinite().all()
    )
    for query in (
        "argmax",
        "sample",
        "marginals",
        "edge_marginals",
        "entropy",
        "mbr",
        "argmax_tags",
    ):
        fails(getattr(s, query), "LinearChain", "item 1", "no structure", "-inf", "Forbid less")
    assert not bool(s.topk(2).exists[1].any()) and bool(s.topk(2).exists[0].all())
    assert bool((s.max_marginals()[1] == -inf).all())
    for ranked in s.ranked_support():
        assert ranked.log_prob[1] == -inf or bool(ranked.log_prob[1].isnan())
        break
    assert bool(s[0].marginals().isfinite().all())


@pytest.mark.parametrize("omega", SMOOTHINGS, ids=str)
def test_infeasible_unlooked(omega: sx.Smoothing) -> None:
    s = blocked(omega, validate_args=False)
    good = torch.tensor([True, False, True])
    for query in ("argmax", "sample", "marginals", "edge_marginals", "entropy"):
        answer = getattr(s, query)()
        assert bool(answer[1].isnan().all()), query
        assert not bool(answer[good].isnan().any()), query
    assert s.argmax_tags()[1].tolist() == [-1] * 4
    assert bool(s.sample((5,))[:, 1].isnan().all())
    q = chain(randn(3, 4, 3), smoothing=omega)
    assert bool(s.cross_entropy(q)[1].isnan()) and bool(s.cross_entropy(q)[good].isfinite().all())
    h = sx.Hyperpath(
        diamond(), put(randn(2, 12), (1, slice(None)), -inf), smoothing=omega, validate_args=False
    )
    c = sx.Choice(put(randn(2, 12), (1, slice(None)), -inf), smoothing=omega, validate_args=False)
    for other in (h, c):
        assert other.log_partition()[1] == -inf
        for query in ("argmax", "sample", "marginals", "entropy"):
            answer = getattr(other, query)()
            assert bool(answer[1].isnan().all()) and not bool(answer[0].isnan().any()), query


@pytest.mark.parametrize("omega", SMOOTHINGS, ids=str)
def test_nan_unlooked(omega: sx.Smoothing) -> None:
    structures = {
        "chain": chain(put(randn(2, 4, 3), (1, 2, 0), nan), smoothing=omega, validate_args=False),
        "start": chain(
            randn(2, 4, 3),
            start=put(randn(2, 3), (1, 0), nan),
            smoothing=omega,
            validate_args=False,
        ),
        "steps": chain(
            transition=put(randn(2, 3, 3, 3), (1, 0, 2, 1), nan),
            smoothing=omega,
            validate_args=False,
        ),
        "choice": sx.Choice(put(randn(2, 4), (1, 3), nan), smoothing=omega, validate_args=False),
        "hyperpath": sx.Hyperpath(
            diamond(), put(randn(2, 12), (1, 3), nan), smoothing=omega, validate_args=False
        ),
    }
    for name, s in structures.items():
        assert s.log_partition().isnan().tolist() == [False, True], name
        for query in ("argmax", "sample", "entropy"):
            answer = getattr(s, query)()
            assert bool(answer[1].isnan().all()), f"{name} {query}"
            assert not bool(answer[0].isnan().any()), f"{name} {query}"
        mu = s.marginals()
        used = torch.arange(12) < 11 if name == "hyperpath" else torch.ones(mu.shape[1:]).bool()
        assert bool(mu[1][used].isnan().all()) and not bool(mu[0].isnan().any()), name
        assert not bool(s.topk(2).exists[1].any()), name
        z = s[0].argmax()
        assert bool(s.log_prob(torch.stack([z, z]))[1].isnan()), f"{name} log_prob"


@pytest.mark.parametrize("omega", SMOOTHINGS, ids=str)
def test_plus_infinity_unlooked(omega: sx.Smoothing) -> None:
    s = chain(put(randn(2, 4, 3), (1, 2, 0), inf), smoothing=omega, validate_args=False)
    assert not bool(s.log_partition()[1].isfinite())
    mu = s.marginals()[1]
    assert bool(mu.isnan().any()) or torch.equal(mu, s.argmax()[1])


def test_bad_tags_unlooked() -> None:
    unary = randn(2, 4, 3).requires_grad_()
    tags = torch.tensor([[0, 1, 2, 0], [0, 9, 1, 2]])
    loss = sx.losses.crf(chain(unary, validate_args=False), tags, reduction="none")
    assert loss.isnan().tolist() == [False, True]
    (g,) = torch.autograd.grad(loss[0], unary)
    assert bool(g.isfinite().all()) and not bool(g[1].any())


@pytest.mark.parametrize("backend", ["cpu", "naive"])
def test_wrong_items_that_a_loss_leaves_out(backend: str) -> None:
    """They do not reach the gradient of shared scores; where they count, it is NaN."""
    unary, shared = randn(2, 4, 3).requires_grad_(), randn(3, 3).requires_grad_()
    wrong = {"tags": torch.tensor([[0, 1, 2, 0], [0, 9, 1, 2]]), "lengths": torch.tensor([4, 9])}
    with sx.backend(backend):
        for name, given in wrong.items():
            lengths = given if name == "lengths" else None
            s = chain(unary, shared, lengths=lengths, validate_args=False)
            tags = given if name == "tags" else torch.zeros(2, 4, dtype=torch.int64)
            loss = sx.losses.crf(s, tags, reduction="none")
            assert loss.isnan().tolist() == [False, True]
            for g in torch.autograd.grad(loss[0], (unary, shared), retain_graph=True):
                assert bool(g.isfinite().all()), name
            g, both = torch.autograd.grad(loss.sum(), (unary, shared))
            assert bool(g[0].isfinite().all() & g[1].isnan().all() & both.isnan().all()), name


@pytest.mark.parametrize("bad", [0, -3, 5, 1000])
@pytest.mark.parametrize("omega", SMOOTHINGS, ids=str)
def test_bad_lengths_unlooked(omega: sx.Smoothing, bad: int) -> None:
    """Never a plausible number, a read past the end, or a crash."""
    for ends in ({}, {"start": randn(3), "end": randn(3)}):
        s = chain(lengths=torch.tensor([3, bad]), smoothing=omega, validate_args=False, **ends)
        good = chain(lengths=torch.tensor([3, 3]), smoothing=omega, **ends)
        for query in ("log_partition", "marginals", "argmax", "sample", "entropy", "max_marginals"):
            try:
                answer = getattr(s, query)()
            except (ValueError, RuntimeError, IndexError):
                continue
            assert bool(answer[1].isnan().all()), f"{query} gives {answer[1]}"
            if query != "sample":
                torch.testing.assert_close(answer[0], getattr(good, query)()[0])


# -- constrained decoding ------------------------------------------------------------------------


def bio() -> tuple[torch.Tensor, torch.Tensor]:
    """Tags O, B, I: I follows B or I only, and does not start a sentence."""
    transition = torch.zeros(3, 3)
    transition[0, 2] = -inf
    return transition, torch.tensor([0.0, 0.0, -inf])


@pytest.mark.parametrize("omega", SMOOTHINGS, ids=str)
def test_bio(omega: sx.Smoothing) -> None:
    transition, start = bio()
    unary = randn(6, 7, 3) * 3
    unary[..., 2] += 3  # I is tempting
    lengths = torch.tensor([7, 1, 4, 6, 2, 3])
    s = sx.LinearChain(unary, transition, start=start, lengths=lengths, smoothing=omega)

    def legal(rows: list[list[int]]) -> bool:
        return all(
            tag != 2 or (t > 0 and row[t - 1] in (1, 2))
            for row in rows
            for t, tag in enumerate(row)
        )

    free = sx.LinearChain(unary, torch.zeros(3, 3), lengths=lengths)
    assert not legal(free.decode(free.argmax()))
    assert legal(s.decode(s.argmax())) and legal(s.decode(s.mbr()))
    for draw in s.sample((20,)):
        assert legal(s.decode(draw))
    best = s.topk(4)
    for rank in range(4):
        rows = s.decode(best.structures[:, rank])
        assert legal([r for r, there in zip(rows, best.exists[:, rank], strict=True) if there])
    assert not bool(s.edge_marginals()[:, :, 0, 2].any()) and not bool(s.marginals()[:, 0, 2].any())
    illegal = torch.zeros(6, 7, dtype=torch.long)
    illegal[:, 1] = 2  # O I
    assert s.log_prob(illegal).tolist()[0] == -inf == s.score(illegal).tolist()[0]
    assert bool(s.score(illegal)[lengths == 1].isfinite().all())  # it stands in the padding there
    assert bool(s.entropy().isfinite().all())
    scores = unary.clone().requires_grad_()
    live = sx.LinearChain(scores, transition, start=start, lengths=lengths, smoothing=omega)
    tags = torch.zeros(6, 7, dtype=torch.long)
    (g,) = torch.autograd.grad(-live.score(tags).sum() + live.log_partition().sum(), scores)
    assert bool(g.isfinite().all())


def test_bio_trains() -> None:
    """A loss through forbidden transitions stays finite and falls."""
    transition, start = bio()
    unary = torch.zeros(2, 5, 3, requires_grad=True)
    soft = torch.zeros(3, 3, requires_grad=True)
    tags = torch.tensor([[0, 1, 2, 2, 0], [1, 2, 0, 0, 1]])
    optimizer = torch.optim.SGD([unary, soft], lr=0.5)
    losses = []
    for _ in range(20):
        s = sx.LinearChain(unary, soft + transition, start=start)
        loss = -s.log_prob(tags).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2 and bool(soft.isfinite().all())


def test_intractable_query_names_what_to_use_instead() -> None:
    class Hardly(sx.Choice):
        queries = sx.Choice.queries - {"marginals"}
        instead = {"marginals": "Use .topk(k)."}

        def marginals(self) -> torch.Tensor:
            raise self._intractable("marginals")

    assert sx.Choice.supports("marginals") and not Hardly.supports("marginals")
    with pytest.raises(sx.IntractableError, match=r"Hardly.marginals is intractable. Use .topk"):
        Hardly(torch.zeros(3)).marginals()


def test_what_is_added_must_be_finite() -> None:
    """Noise is not looked at before, but what comes of it is."""
    noise = torch.zeros(2, 4, 4)
    noise[1, 0, 1] = nan
    for tree in (sx.DependencyTree(torch.zeros(2, 4, 4)), sx.SpanningTree(torch.zeros(2, 4, 4))):
        perturbed = tree.perturb(noise)
        for query in (perturbed.argmax, perturbed.marginals, perturbed.sample):
            fails(query, tree._name, "item 1", "NaN or +inf", "what is added")
        best = perturbed.topk(2)
        assert best.scores[1].isnan().tolist() == [True, False] and not best.exists[1].any()
        assert best.exists[0].all()


# -- arguments of another kind --------------------------------------------------------------------


def test_a_temperature_without_a_gradient() -> None:
    """It would be lost, silently."""
    learnt = torch.tensor(0.5, requires_grad=True)
    for omega in (sx.Shannon, sx.Gini, lambda g: sx.Tsallis(1.5, g), lambda a: sx.Tsallis(a + 1)):
        fails(lambda omega=omega: omega(learnt), "asks for a gradient", "float(")  # type: ignore[misc]
    assert sx.Shannon(learnt.detach()) == sx.Shannon(0.5)
    fails(lambda: sx.Shannon("1"), "Shannon: gamma must be a number")  # type: ignore[arg-type]
    fails(lambda: sx.Gini(torch.ones(2)), "Gini: gamma must be a number")  # type: ignore[arg-type]
    x = randn(3)
    fails(lambda: sx.normmax(x, learnt + 1), "normmax: alpha", "gradient")  # type: ignore[arg-type]
    fails(lambda: sx.budgetmax(x, learnt + 1), "budgetmax: k", "gradient")  # type: ignore[arg-type]
    fails(lambda: sx.entmax(x, "1.5"), "entmax: alpha must be a number")  # type: ignore[arg-type]


def test_a_tensor_is_no_structure() -> None:
    x = randn(3).requires_grad_()
    fails(lambda: sx.project(x, x), "must be a structure", "Tensor")  # type: ignore[arg-type]
    fails(lambda: sx.estimators.SPIGOT()(x), "takes a structure", "Tensor")  # type: ignore[arg-type]


def test_structures_of_another_kind() -> None:
    chain = sx.LinearChain(randn(3, 2), randn(2, 2))
    for z in (None, "abc", [None]):
        fails(lambda z=z: chain.log_prob(z), "LinearChain: z must be a tensor")  # type: ignore[misc]
    fails(lambda: sx.Choice(randn(3)).log_prob(None), "Choice: an index must be")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["chain", "tree", "subset"])
def test_the_shape_of_samples_is_a_tuple(kind: str) -> None:
    s: sx.Structure = {
        "chain": lambda: sx.LinearChain(randn(3, 2), randn(2, 2)),
        "tree": lambda: sx.DependencyTree(randn(3, 3)),
        "subset": lambda: sx.KSubset(randn(3), 2),
    }[kind]()
    fails(lambda: s.sample(5), "sample((5,))")  # type: ignore[arg-type]
    assert s.topk(np.int64(2)).scores.shape[-1] == 2  # type: ignore[arg-type]


def test_costs_of_another_shape() -> None:
    s = sx.Choice(randn(2, 3))
    assert s.expected_cost(torch.ones(5, 2, 3)).shape == (5, 2)
    torch.testing.assert_close(sx.Choice(randn(3)).expected_cost(torch.eye(3)), randn(3).softmax(0))
    fails(lambda: s.expected_cost(torch.ones(2, 4)), "part_costs must broadcast to (2, 3)")
    fails(lambda: s.expected_cost(1.0), "part_costs must be a tensor")  # type: ignore[arg-type]


@pytest.mark.parametrize("omega", SMOOTHINGS, ids=str)
@pytest.mark.parametrize("counts", [[1, 1, 1], [1, 0, 0], [0.5, 0.5, 0.5], [-1, 0, 0], [0, 0, 0]])
def test_counts_of_no_derivation(omega: sx.Smoothing, counts: list[float]) -> None:
    draw = sx.ForestBuilder()
    a, b, c = draw.node(), draw.node(), draw.node()
    draw.edge(b, a, part=0)
    draw.edge(c, b, part=1)
    draw.edge(c, a, part=2)
    s = sx.Hyperpath(draw.build(), torch.tensor([1.0, 1.0, 0.5]), smoothing=omega)
    good = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    assert s.log_prob(good).exp().sum() == pytest.approx(1.0)
    bad = torch.stack([good[0], torch.tensor(counts)])
    fails(lambda: s.log_prob(bad), "z[1] is not a derivation")
    fails(lambda: s.score(bad[1]), "z is not a derivation")


def test_a_part_in_the_padding_cannot_be_included() -> None:
    include = torch.zeros(4, 3, dtype=torch.bool)
    include[3, 0] = True
    chain = sx.LinearChain(randn(4, 3), randn(3, 3), lengths=torch.tensor(3))
    ctc = sx.CTC(randn(4, 3), torch.tensor([1]), torch.tensor(3), torch.tensor(1))
    for s in (chain, ctc):
        assert s.condition(include=include).log_partition() == -inf
