"""Grammars: matrix products against the forest, low rank against its rules, and the edges of both.

``sx.backend("naive")`` answers by the written-out forest and the textbook recursion, which is what
the dense charts are compared with.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from test_errors import fails
from torch import Tensor
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import structmax as sx
from structmax.forest.pcfg import ops, products, products_cpu, scaled, terms
from structmax.forest.pcfg.naive import collapse

f64, inf, nan = torch.float64, math.inf, math.nan


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=f64) * scale


def grammar(
    n: int = 5, N: int = 2, P: int = 3, batch: tuple[int, ...] = (3,), scale: float = 1.0, **kwargs
) -> sx.PCFG:
    """Root shared by the batch, rules not."""
    S = N + P
    scores = (randn(N, scale=scale), randn(*batch, N, S, S, seed=1, scale=scale))
    return sx.PCFG(*scores, randn(*batch, n, P, seed=2, scale=scale), **kwargs)


def factors(
    n: int = 5, N: int = 2, P: int = 3, R: int = 4, scale: float = 1.0, **kwargs
) -> sx.PCFG:
    S = N + P
    given = [randn(N), randn(S, R, seed=1), randn(3, S, R, seed=2), randn(N, R, seed=3)]
    emission = randn(3, n, P, seed=4)
    return sx.PCFG.low_rank(*[t * scale for t in (*given, emission)], **kwargs)


def dense_twin(low: sx.PCFG) -> sx.PCFG:
    """The grammar with the rules of a grammar of low rank."""
    rules = collapse(low.left, low.right, low.parent)
    return sx.PCFG(low.root, rules, low.emission, low.lengths, low.smoothing, spans=low.spans)


def derivatives(make: Callable[..., sx.PCFG], scores: list[Tensor]) -> list[Tensor]:
    """Value, gradient and Hessian-vector product in all scores, along a fixed direction."""
    leaves = [t.clone().requires_grad_() for t in scores]
    value = make(*leaves).log_partition()
    total = torch.where(value == -inf, 0.0, value).sum()
    first = torch.autograd.grad(total, leaves, create_graph=True)
    slope = sum((g * randn(*g.shape, seed=i)).sum() for i, g in enumerate(first))
    second = torch.autograd.grad(slope, leaves)
    return [value.detach(), *(g.detach() for g in (*first, *second))]


def assert_all_close(actual: list[Tensor], expected: list[Tensor], tolerance: float = 1e-9) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def forbid(tensor: Tensor, share: float, seed: int) -> Tensor:
    dice = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(dice < share, -inf, tensor)


LENGTHS = torch.tensor([5, 2, 4])
CASES: dict[str, tuple[list[Tensor], Tensor | None]] = {
    "random": ([randn(2), randn(2, 5, 5), randn(3, 5, 3)], None),
    "ragged": ([randn(2), randn(3, 2, 5, 5), randn(3, 5, 3)], LENGTHS),
    "one-word": ([randn(2), randn(2, 5, 5), randn(3, 5, 3)], torch.tensor([1, 5, 2])),
    "forbidden": (
        [randn(2), forbid(randn(3, 2, 5, 5), 0.4, 0), forbid(randn(3, 5, 3), 0.2, 1)],
        LENGTHS,
    ),
    "spread": ([randn(2, scale=1e3), randn(2, 5, 5, scale=1e3), randn(3, 5, 3)], LENGTHS),
    "wide and forbidden": (
        [randn(2), forbid(randn(3, 2, 5, 5, scale=1e3), 0.4, 0), randn(3, 5, 3, scale=1e3)],
        LENGTHS,
    ),
    "shift up": ([randn(2), randn(2, 5, 5) + 1e4, randn(3, 5, 3) + 1e4], LENGTHS),
    "shift down": ([randn(2) - 1e4, randn(2, 5, 5) - 1e4, randn(3, 5, 3)], LENGTHS),
}


def refuse_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """No number is in the range of the fastest charts."""
    everything = lambda chart: torch.ones_like(chart.g.lengths, dtype=torch.bool)  # noqa: E731
    monkeypatch.setattr(scaled.Scaled, "wrong", everything)


@pytest.mark.parametrize("gamma", [1.0, 0.7])
@pytest.mark.parametrize("name", CASES)
def test_products_against_the_definition(
    name: str, gamma: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores, lengths = CASES[name]
    make = functools.partial(sx.PCFG, lengths=lengths, smoothing=sx.Shannon(gamma))
    with sx.backend("naive"):
        expected = derivatives(make, scores)
    tolerance = 1e-9 if "shift" not in name else 1e-7  # the definition itself rounds at 1e4
    assert_all_close(derivatives(make, scores), expected, tolerance)
    with sx.backend("gpu"):  # in torch, the same code for any device
        assert_all_close(derivatives(make, scores), expected, tolerance)
        refuse_scaled(monkeypatch)
        assert_all_close(derivatives(make, scores), expected, tolerance)


@pytest.mark.parametrize("name", CASES)
def test_terms_against_the_definition(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What wide spreads fall back on, asked for everything."""
    refuse_scaled(monkeypatch)
    monkeypatch.setattr(products, "TINY", inf)
    scores, lengths = CASES[name]
    make = functools.partial(sx.PCFG, lengths=lengths)
    with sx.backend("naive"):
        expected = derivatives(make, scores)
    with sx.backend("gpu"):  # in torch
        answers = derivatives(make, scores)
    assert_all_close(answers, expected, 1e-9 if "shift" not in name else 1e-7)


@pytest.mark.parametrize("block", [1, 100])
def test_terms_of_a_few_parents_at_a_time(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_scaled(monkeypatch)
    monkeypatch.setattr(products, "TINY", inf)
    scores, lengths = CASES["ragged"]
    make = functools.partial(sx.PCFG, lengths=lengths)

    def answers() -> list[Tensor]:
        s = make(*scores)
        with sx.backend("gpu"):  # in torch
            return [*derivatives(make, scores), s.max_marginals(), s.topk(1).scores]

    whole = answers()
    monkeypatch.setattr(terms, "BLOCK", block)
    assert_all_close(answers(), whole, 1e-12)


def test_spread_falls_back() -> None:
    """A wide spread is noticed; sums that are 0 by right are not mistaken for it."""
    for name, falls in (("spread", True), ("forbidden", False), ("random", False)):
        scores, lengths = CASES[name]
        s = sx.PCFG(*scores, lengths=lengths)
        kernel = products.Products(ops.Grammar(s._parts(), s._lengths(), 1.0))
        kernel.rise()
        assert bool(products.wrong(kernel).any()) == falls
        chart = scaled.Scaled(kernel.g)
        chart.rise()
        bad = chart.wrong()
        assert (bad is not None and bool(bad.any())) == falls
        assert bool(products_cpu.solve(kernel.g, slopes=False)[0].isnan().any()) == falls


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(
    ("B", "n", "N", "P"),
    [(0, 5, 2, 3), (1, 1, 2, 2), (1, 2, 1, 1), (2, 3, 4, 2), (1, 9, 3, 4), (5, 18, 3, 2)],
)
def test_scaled_of_many_sizes(
    B: int, n: int, N: int, P: int, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against products; rules of each item or shared, and growth that is found on the way: the
    score of a rule is −40 on the average."""
    rules = randn(B, N, N + P, N + P, seed=1) if own else randn(N, N + P, N + P, seed=1)
    lengths = torch.randint(1, n + 1, (B,), generator=torch.Generator().manual_seed(0))
    given = randn(N), 2 * rules - 40, randn(B, n, P, seed=2, scale=3.0)
    s = sx.PCFG(*given, lengths, spans=randn(B, n, n, N + P, seed=3))
    g = ops.Grammar(s._parts(), s._lengths(), 1.0)
    chart = scaled.Scaled(g)
    chart.rise()
    bad = chart.wrong()
    assert bad is None or not bool(bad.any())
    monkeypatch.setattr(products_cpu, "LARGEST", 0)
    expected = ops._solve_any_range(g)
    for backend in ("cpu", "gpu"):
        with sx.backend(backend):
            assert_all_close(ops._solve(g), expected, 1e-11)
            assert_all_close([ops._values(g)], expected[:1], 1e-11)


@pytest.mark.parametrize("what", ["bonus", "penalty", "rules", "nan"])
def test_scaled_gives_way(what: str) -> None:
    """One item of three has numbers out of range, though some of the layers below hold them."""
    spans, rules = torch.zeros(3, 6, 6, 5, dtype=f64), randn(3, 2, 5, 5)
    if what == "rules":
        rules[1, 1] -= 500.0
    else:
        spans[1, 1, 3, 0] = {"bonus": 900.0, "penalty": -900.0, "nan": nan}[what]
    s = sx.PCFG(randn(2), rules, randn(3, 6, 3), spans=spans, validate_args=False)
    chart = scaled.Scaled(ops.Grammar(s._parts(), s._lengths(), 1.0))
    chart.rise()
    bad = chart.wrong()
    assert bad is not None and bad.tolist() == [False, True, False]
    answers = []
    for backend in ("naive", "gpu"):
        with sx.backend(backend):
            t = s[:]
            answers.append([t.log_partition(), t.marginals(), t.rule_marginals()])
    for a, b in zip(*answers, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9, equal_nan=True)


class Launches(TorchDispatchMode):
    """Counts operations that compute, and looks at their results."""

    VIEWS = ("select", "slice", "view", "transpose", "unsqueeze", "as_strided", "expand", "alias")
    VIEWS += ("empty", "new_empty", "diagonal", "permute", "detach", "squeeze")

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.looks = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
            with self:
                return op.decompose(*args, **(kwargs or {}))
        name = op._schema.name.removeprefix("aten::")
        self.looks += name in ("_local_scalar_dense", "nonzero")
        self.launches += name not in self.VIEWS
        return op(*args, **(kwargs or {}))


def test_launches_of_a_width() -> None:
    """What a GPU waits for at these sizes: five to a width on the way up, ten on the way down."""

    def count(n: int, solve: Callable[[ops.Grammar], object]) -> tuple[int, int]:
        s = grammar(n)
        g = ops.Grammar(s._parts(), s._lengths(), 1.0)
        with sx.backend("gpu"), Launches() as log:
            solve(g)
        return log.launches, log.looks

    for solve, most in ((ops._values, 5), (ops._solve, 15)):
        (few, looks), (many, more_looks) = count(9, solve), count(15, solve)
        assert many - few <= 6 * most and looks == more_looks == 1


@pytest.mark.parametrize("name", ["random", "ragged", "forbidden", "spread", "shift up"])
def test_forest_against_the_definition(name: str) -> None:
    """The forest that is drawn says the same as the recursion, for every smoothing."""
    scores, lengths = CASES[name]
    for omega in (sx.Shannon(0.7), sx.Gini(2.0), sx.Tsallis(1.5), sx.Hard()):
        s = sx.PCFG(*scores, lengths=lengths, smoothing=omega)
        drawn = super(sx.PCFG, s)._value() if s._is_dense else s.log_partition()
        written = ops._naive(s._parts(), (s._lengths(),), "", omega.code)
        torch.testing.assert_close(drawn, written, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", [n for n in CASES if n != "one-word"])
def test_walks_against_the_forest(name: str) -> None:
    scores, lengths = CASES[name]
    if "forbidden" in name:  # every item must have a tree
        scores = [scores[0], torch.where(scores[1] == -inf, -1e3, scores[1]), scores[2]]
        scores[1][:, 0, 3] = -inf
    for omega in (sx.Shannon(), sx.Hard()):
        s = sx.PCFG(*scores, lengths=lengths, smoothing=omega)
        with sx.backend("naive"):
            best, most, value = s.topk(8), s.max_marginals(), s.score(s.argmax())
            mean, top = s.marginals(), s.log_partition()
        torch.testing.assert_close(s.score(s.argmax()), value, atol=1e-9, rtol=1e-12)
        torch.testing.assert_close(s.log_partition(), top, atol=1e-9, rtol=1e-12)
        torch.testing.assert_close(s.marginals(), mean, atol=1e-7, rtol=1e-7)
        torch.testing.assert_close(s.max_marginals(), most, atol=1e-9, rtol=1e-12)
        found = s.topk(8)
        torch.testing.assert_close(found.scores, best.scores, atol=1e-9, rtol=1e-12)
        assert torch.equal(found.exists, best.exists)
        again = s.score(found.structures[:, :4].movedim(1, 0)).movedim(0, 1)
        torch.testing.assert_close(again, found.scores[:, :4], atol=1e-9, rtol=1e-12)


CORNER = torch.zeros(5, 5, dtype=torch.bool)  # of rules whose children are both nonterminals
CORNER[:2, :2] = True
BEST: dict[str, tuple[list[Tensor], Tensor | None]] = {
    **CASES,
    "ties": ([randn(2).round(), randn(3, 2, 5, 5).round(), randn(3, 5, 3).round()], LENGTHS),
    "all tied": ([torch.zeros(2), torch.zeros(2, 5, 5), torch.zeros(3, 5, 3)], LENGTHS),
    "enormous": ([randn(2), randn(2, 5, 5, scale=1e300), randn(3, 5, 3, scale=1e300)], LENGTHS),
    "no tree": ([randn(2), forbid(randn(3, 2, 5, 5), 0.9, 0), randn(3, 5, 3)], LENGTHS),
    "overflow": (
        [randn(2), forbid(randn(2, 5, 5, scale=5e307), 0.3, 0), randn(3, 5, 3, scale=5e307)],
        None,
    ),
    "infinite": ([randn(2), forbid(randn(2, 5, 5), 0.3, 0), -forbid(randn(3, 5, 3), 0.1, 1)], None),
    "nan": (
        [randn(2), torch.where(randn(3, 2, 5, 5) > 2, nan, 0.0), forbid(randn(3, 5, 3), 0.2, 2)],
        LENGTHS,
    ),
    "nan, for four words": (
        [randn(2), torch.where(CORNER, nan, randn(2, 5, 5)), randn(3, 5, 3)],
        torch.tensor([4, 2, 3]),
    ),
    "one word each": ([randn(2), randn(2, 5, 5), randn(3, 1, 3)], None),
    "no items": ([randn(2), randn(2, 5, 5), randn(0, 5, 3)], None),
}


@pytest.mark.parametrize("dtype", [f64, torch.float32])
@pytest.mark.parametrize("name", BEST)
def test_compiled_best_trees_are_those_in_torch(name: str, dtype: torch.dtype) -> None:
    """Bit by bit, and the same tree where several are best."""
    scores, lengths = BEST[name]
    given = [t.to(dtype) for t in scores]
    for omega in (sx.Shannon(), sx.Hard()):
        s = sx.PCFG(*given, lengths=lengths, smoothing=omega, validate_args=False)

        def answers(s: sx.PCFG = s) -> list[Tensor]:
            value, counts = s._argmax_parts(s._parts())
            hard = [s.log_partition(), s.marginals(), s.rule_marginals()] if s._is_hard else []
            return [value, *counts, s.argmax(), *s.topk(5), *hard]

        compiled = answers()
        with sx.backend("gpu"):  # in torch, the same code for any device
            for one, two in zip(compiled, answers(), strict=True):
                torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)


def test_compiled_best_trees_of_many_sizes() -> None:
    """Shared rules and rules of each item, in parallel chunks."""
    for n, N, P in [(2, 1, 1), (3, 1, 2), (4, 3, 1), (7, 4, 4), (9, 5, 11)]:
        for own in (True, False):
            s = grammar(n, N, P, (6,), lengths=torch.randint(2, n + 1, (6,)))
            s = s if own else sx.PCFG(s.root, s.rules[0], s.emission, s.lengths)
            found = s.argmax(), s.topk(2).scores
            with sx.backend("gpu"):
                assert torch.equal(found[0], s.argmax()) and torch.equal(found[1], s.topk(2).scores)
            assert torch.equal(torch.stack([item.argmax() for item in s]), found[0])


def inside(root: Tensor, rules: Tensor, emission: Tensor) -> float:
    """The sum over trees in plain Python, for weights instead of their logs."""
    root, rules, emission = (t.exp().tolist() for t in (root, rules, emission))
    n, P, N = len(emission), len(emission[0]), len(root)
    beta = {(i, i, N + p): emission[i][p] for i in range(n) for p in range(P)}
    for w in range(2, n + 1):
        for i, a in itertools.product(range(n - w + 1), range(N)):
            beta[i, i + w - 1, a] = sum(
                rules[a][b][c] * beta.get((i, k, b), 0) * beta.get((k + 1, i + w - 1, c), 0)
                for k in range(i, i + w - 1)
                for b, c in itertools.product(range(N + P), repeat=2)
            )
    return math.log(sum(root[a] * beta[0, n - 1, a] for a in range(N)))


def test_plain_inside() -> None:
    root, rules, emission = randn(3), randn(3, 5, 5), randn(8, 2)
    value = sx.PCFG(root, rules, emission).log_partition().item()
    assert abs(value - inside(root, rules, emission)) < 1e-10


@pytest.mark.parametrize(("n", "N", "P"), [(2, 1, 1), (4, 1, 2), (5, 3, 2), (6, 2, 1)])
def test_counts(n: int, N: int, P: int) -> None:
    """Zero scores: the number of trees is Catalan(n−1)·N^(n−1)·Pⁿ."""
    S = N + P
    zeros = torch.zeros(N, dtype=f64), torch.zeros(N, S, S), torch.zeros(n, P)
    s = sx.PCFG(*zeros)
    trees = math.comb(2 * n - 2, n - 1) // n * N ** (n - 1) * P**n
    assert math.isclose(s.log_partition().exp().item(), trees, rel_tol=1e-9)
    if trees <= 5000:
        assert len(torch.unique(s.enumerate_support().flatten(1), dim=0)) == trees
    assert math.isclose(s.rule_marginals().sum().item(), n - 1, rel_tol=1e-5)


def test_torch_struct() -> None:
    torch_struct = pytest.importorskip("torch_struct")
    s = grammar(n=6, batch=(2,))
    root = s.root.expand(2, -1)
    peer = torch_struct.SentCFG((s.emission, s.rules, root), lengths=torch.tensor([6, 6]))
    torch.testing.assert_close(peer.partition, s.log_partition(), atol=1e-6, rtol=1e-6)
    terms, rules, roots, _ = peer.marginals
    torch.testing.assert_close(roots, s.root_marginals(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(rules, s.rule_marginals(), atol=1e-6, rtol=1e-6)
    diagonal = s.marginals().diagonal(0, 1, 2).mT[..., s.N :]
    torch.testing.assert_close(terms, diagonal, atol=1e-6, rtol=1e-6)


def test_shared_weights_receive_the_sum() -> None:
    emission = randn(3, 4, 3)
    root, rules = randn(2).requires_grad_(), randn(2, 5, 5).requires_grad_()
    s = sx.PCFG(root, rules, emission)
    got = torch.autograd.grad(s.log_partition().sum(), (root, rules))
    torch.testing.assert_close(got[0], s.root_marginals().sum(0))
    torch.testing.assert_close(got[1], s.rule_marginals().sum(0))
    single = torch.stack([item.rule_marginals() for item in s]).sum(0)
    torch.testing.assert_close(got[1], single)


def test_padding_and_unused_entries() -> None:
    """They may hold anything: no result and no gradient sees them."""
    emission, spans = randn(3, 5, 3), randn(3, 5, 5, 5)
    root, rules = randn(2), randn(2, 5, 5)
    clean = sx.PCFG(root, rules, emission, LENGTHS, spans=spans)
    usable = clean._usable(LENGTHS)
    words = usable.diagonal(0, 1, 2).mT[..., 2:]
    leaves = [
        torch.where(words, emission, nan).requires_grad_(),
        torch.where(usable, spans, nan).requires_grad_(),
    ]
    s = sx.PCFG(root, rules, leaves[0], LENGTHS, spans=leaves[1])
    for query in ("log_partition", "marginals", "argmax", "entropy", "max_marginals", "mbr"):
        torch.testing.assert_close(getattr(s, query)(), getattr(clean, query)())
    total = s.log_partition().sum() + (s.marginals() ** 2).sum()
    for grad, mask in zip(torch.autograd.grad(total, leaves), (words, usable), strict=True):
        assert bool(grad.isfinite().all()) and not bool(grad[~mask].any())
    word = torch.arange(5)
    inside = torch.maximum(word[:, None], word) < LENGTHS[:, None, None]
    z = torch.where(inside[..., None], s.argmax(), nan)
    torch.testing.assert_close(s.score(z), clean.score(clean.argmax()))


def test_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that is cut gives the same answers."""
    whole, low = grammar(lengths=LENGTHS), factors(lengths=LENGTHS)
    queries = [
        lambda s: s.log_partition(),
        lambda s: s.marginals(),
        lambda s: s.topk(3).scores,
        lambda s: s.max_marginals(),
        lambda s: s.sample((4,), generator=torch.Generator().manual_seed(0)),
    ]
    expected = [[query(s) for query in queries] for s in (whole, low)]
    monkeypatch.setattr(ops, "PIECE", 1)
    for backend in ("cpu", "gpu"):
        with sx.backend(backend):
            for i, query in enumerate(queries):
                one, two = query(grammar(lengths=LENGTHS)), query(factors(lengths=LENGTHS))
                torch.testing.assert_close(one, expected[0][i])
                torch.testing.assert_close(two, expected[1][i])


# -- low rank ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_low_rank_against_its_rules(scale: float, lengths: Tensor | None) -> None:
    """Value, gradient and Hessian-vector product, through the factors; also at wide spreads."""
    low = factors(scale=scale, lengths=lengths)
    scores = [low.root, low.left, low.right, low.parent, low.emission]

    def twin(
        root: Tensor, left: Tensor, right: Tensor, parent: Tensor, emission: Tensor
    ) -> sx.PCFG:
        return sx.PCFG(root, collapse(left, right, parent), emission, lengths)

    make = functools.partial(sx.PCFG.low_rank, lengths=lengths)
    assert_all_close(derivatives(make, scores), derivatives(twin, scores), 1e-8)
    with sx.backend("naive"):
        assert_all_close(derivatives(make, scores), derivatives(twin, scores), 1e-8)


def test_low_rank_forbidden() -> None:
    root, left, right = randn(2), forbid(randn(5, 4), 0.3, 1), forbid(randn(5, 4), 0.3, 2)
    scores = [root, left, right, forbid(randn(2, 4), 0.3, 3), randn(3, 5, 3)]
    make = functools.partial(sx.PCFG.low_rank, lengths=LENGTHS)
    with sx.backend("naive"):
        expected = derivatives(make, scores)
    assert_all_close(derivatives(make, scores), expected)
    assert all(bool(t.isfinite().all()) for t in expected)


@pytest.mark.parametrize("omega", [sx.Shannon(), sx.Shannon(0.5), sx.Hard(), sx.Gini()])
def test_low_rank_queries(omega: sx.Smoothing) -> None:
    low = factors(n=4, lengths=torch.tensor([4, 3, 2]), smoothing=omega)
    twin = dense_twin(low)
    for query in (
        "log_partition", "marginals", "root_marginals", "rule_marginals", "entropy", "argmax",
        "max_marginals", "mbr",
    ):  # fmt: skip
        torch.testing.assert_close(getattr(low, query)(), getattr(twin, query)(), msg=query)
    torch.testing.assert_close(low.topk(4).scores, twin.topk(4).scores)
    z = low.sample()
    torch.testing.assert_close(low.log_prob(z), twin.log_prob(z))


def test_low_rank_samples() -> None:
    """Frequencies of whole trees; those of an item of wide spread come from its rules."""
    low = factors(n=3, N=2, P=1, lengths=torch.tensor([3, 2, 3]))
    low = low._rebuild(
        **{name: t for name, (t, _) in low._tensors().items()},
        spans=torch.stack([torch.zeros(3, 3, 3), torch.zeros(3, 3, 3), randn(3, 3, 3) * 1e3]),
    )
    draws = low.sample((4000,), generator=torch.Generator().manual_seed(0))
    for item in range(3):
        every = low[item].enumerate_support()
        p = low[item].log_prob(every).exp()
        seen = (draws[:, item, None] == every).flatten(2).all(-1).double()
        assert bool((seen.sum(1) == 1).all())
        error = (seen.mean(0) - p).abs() / (p * (1 - p) / 4000 + 1e-9).sqrt()
        assert error.amax() < 4.5


@pytest.mark.parametrize("scale", [1e3, 1e6])
def test_low_rank_samples_where_products_underflow(scale: float) -> None:
    """An item whose sums are 0 in exp space has trees all the same."""
    low = factors(scale=scale, lengths=LENGTHS)
    z = low.sample((5,), generator=torch.Generator().manual_seed(0))
    assert bool((low.log_prob(z) > -30).all())  # which refuses what is no tree


def test_weights_are_no_padding() -> None:
    """No sentence of two words has a nonterminal below another, yet NaN there is refused."""
    lengths = torch.tensor([2, 2, 2])
    low, s = factors(lengths=lengths), grammar(lengths=lengths)
    low.right[0, 1], s.rules[2, 0, 1, 1] = nan, nan
    given = {name: t for name, (t, _) in low._tensors().items()}
    fails(lambda: sx.PCFG.low_rank(**given), "LowRankPCFG", "right[0, 1, 0] is nan")
    given = {name: t for name, (t, _) in s._tensors().items()}
    fails(lambda: sx.PCFG(**given), "PCFG", "rules[2, 0, 1, 1] is nan")


# -- larger sizes, one word, conditions ----------------------------------------------------------


def test_larger() -> None:
    """A size whose forest is too large to write out: answers that agree with each other."""
    s = grammar(n=12, N=12, P=20, batch=(2,), lengths=torch.tensor([12, 9]))
    best = s.topk(20)
    assert bool(best.exists.all()) and bool((best.scores.diff() <= 1e-9).all())
    torch.testing.assert_close(best.structures[:, 0], s.argmax())
    torch.testing.assert_close(s.score(best.structures.movedim(1, 0)).mT, best.scores)
    for item in best.structures:
        assert len(torch.unique(item.flatten(1), dim=0)) == 20
    top = s.max_marginals()
    torch.testing.assert_close(top.flatten(1).amax(1), best.scores[:, 0])
    draws = s.sample((400,), generator=torch.Generator().manual_seed(0))
    assert bool((draws.flatten(2).sum(-1) == torch.tensor([23, 17])).all())
    error = (draws.mean(0) - s.marginals()).abs().amax()
    assert error < 5 * 0.5 / math.sqrt(400), f"frequencies are off by {error}"
    mean = -s.log_prob(draws).mean(0)
    torch.testing.assert_close(mean, s.entropy(), atol=1.0, rtol=0)
    with pytest.raises(ValueError, match="hyperedges"):
        grammar(n=40, N=12, P=20, smoothing=sx.Gini()).log_partition()


def test_one_word() -> None:
    s = grammar(lengths=torch.tensor([3, 1, 5]))
    assert s.log_partition().isfinite().tolist() == [True, False, True]
    assert s.log_partition()[1] == -inf
    for query in (s.argmax, s.sample, s.marginals, s.rule_marginals, s.entropy):
        fails(query, "PCFG", "item 1", "allows no structure", "one word")
    fails(grammar(n=1, batch=()).argmax, "the sentence", "one word")
    for omega in (sx.Gini(), sx.Hard()):
        assert grammar(lengths=torch.tensor([3, 1, 5]), smoothing=omega).log_partition()[1] == -inf
    quiet = grammar(lengths=torch.tensor([3, 1, 5]), validate_args=False)
    assert quiet.argmax()[1].isnan().all() and quiet.marginals()[1].isnan().all()
    assert quiet.sample()[1].isnan().all() and not quiet.sample()[0].isnan().any()
    assert not quiet.topk(2).exists[1].any()


@pytest.mark.parametrize("backend", ["cpu", "naive"])
def test_hard_without_a_structure(backend: str) -> None:
    """Nothing has a probability there, and the other item is as it was."""
    both = grammar(n=3, N=1, P=2, batch=(2,), smoothing=sx.Hard())
    emission = both.emission.clone()
    emission[0, 1] = -inf
    cut = sx.PCFG(both.root, both.rules, emission, smoothing=sx.Hard())
    every = both.enumerate_support()
    with sx.backend(backend):
        found = cut.log_prob(every)
        assert bool((found[:, 0] == -inf).all())
        assert torch.equal(found[:, 1], both.log_prob(every)[:, 1])
        (first,) = cut.ranked_support()
        assert first.log_prob.tolist() == [-inf, 0.0]
        assert torch.equal(first.structure[1], both.argmax()[1])
        assert list(cut[:1].ranked_support()) == []
        assert both.cross_entropy(cut).tolist() == [inf, 0.0]
        fails(cut.argmax, "PCFG.argmax", "item 0", "allows no structure")


@pytest.mark.parametrize("top", [0.0, 1e20, -1e20])
def test_samples_of_large_scores(top: float) -> None:
    """A score of the whole sentence so large that the rest is lost in its rounding."""
    spans = torch.zeros(3, 3, 3, dtype=f64)
    spans[0, 2, 0] = top
    emission = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]], dtype=f64)
    s = sx.PCFG(torch.zeros(1), torch.full((1, 3, 3), -1000.0), emission, spans=spans)
    z = s.sample((4000,), generator=torch.Generator().manual_seed(0))
    expected = torch.tensor([0.0, 1.0], dtype=f64).softmax(0)
    assert (z[:, 0, 0, 1:].mean(0) - expected).abs().amax() < 0.035
    assert (z[:, 0, 1, 0].mean() - 0.5).abs() < 0.035
    assert bool((z.flatten(1).sum(1) == 5).all())


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("low_rank", [False, True])
def test_no_draw_where_sums_overflow(sign: float, low_rank: bool) -> None:
    """Scores of a tree that cancel, but not in the order in which they are added; beside it, a
    sentence that is well."""
    rules, emission = torch.full((1, 3, 3), sign * 1e308, dtype=f64), torch.zeros(2, 2, 2)
    emission, spans = emission.double(), torch.zeros(2, 2, 2, 3, dtype=f64)
    spans[:, 0, 1, 0] = -sign * 1e308
    emission[1] = sign * 0.85e308
    make = functools.partial(sx.PCFG, torch.zeros(1), rules)
    if low_rank:
        factor = torch.zeros(3, 1, dtype=f64)
        make = functools.partial(sx.PCFG.low_rank, torch.zeros(1), factor, factor, rules[:, :1, 0])
    s = make(emission, spans=spans)
    fails(s.sample, "sample", "item 1")
    if not low_rank:  # whose charts overflow as well: −inf allows no structure
        fails(s.sample, "PCFG.sample", "item 1", "overflow", "smaller")
        fails(s[1].sample, "the sentence", "overflow")
    quiet = make(emission, spans=spans, validate_args=False).sample((20,))
    assert bool(quiet[:, 1].isnan().all())
    assert bool((quiet[:, 0].flatten(1).sum(-1) == 3).all())


def test_condition() -> None:
    """Included spans rule out what crosses them, other labels, and impossible parts everything."""
    s = grammar(n=5, batch=())
    mu = s.marginals()
    for i, j, symbol in itertools.product(range(5), range(5), range(5)):
        part = torch.zeros(5, 5, 5, dtype=torch.bool)
        part[i, j, symbol] = True
        gap = s.condition(include=part).log_partition() - s.log_partition()
        torch.testing.assert_close(gap.exp(), mu[i, j, symbol], atol=1e-12, rtol=1e-9)
    pair = s.encode([(0, 1, 0), (3, 4, 1)]).bool()
    both = s.condition(include=pair).marginals()
    torch.testing.assert_close(both[pair], torch.ones(2, dtype=f64))
    crossing = s.condition(include=s.encode([(0, 2, 0), (1, 3, 0)]).bool())
    assert crossing.log_partition() == -inf


def test_human_form() -> None:
    s = grammar(n=3, batch=(2,), lengths=torch.tensor([2, 3]))
    trees = s.decode(s.argmax())
    assert [len(tree) for tree in trees] == [3, 5]
    assert torch.equal(s.encode(trees), s.argmax())
    torch.testing.assert_close(s.score(trees), s.score(s.argmax()))
    assert s.decode(s.topk(2).structures)[1][0] == trees[1]
    fails(lambda: s.encode([[(0, 3, 1)], []]), "encode", "(0, 3, 1)")
    fails(lambda: s.score([[(0, 1, 0), (0, 0, 2), (1, 1, 2)]] * 2), "z[1]", "binary tree")
    fails(lambda: s.score(s.argmax() * 2), "z[0]", "binary tree")
    fails(lambda: s.score(torch.zeros(2, 3, 3, 4)), "z must be", "(2, 3, 3, 4)")


ERRORS: dict[str, tuple[Callable[[], object], list[str]]] = {
    "root": (
        lambda: sx.PCFG(torch.tensor(1.0), randn(2, 5, 5), randn(4, 3)),
        ["PCFG", "root", "(..., N)"],
    ),
    "rules": (
        lambda: sx.PCFG(randn(2), randn(2, 4, 5), randn(4, 3)),
        ["PCFG", "rules", "(..., 2, 5, 5)", "(2, 4, 5)", "preterminals"],
    ),
    "emission": (lambda: sx.PCFG(randn(2), randn(2, 5, 5), randn(3)), ["emission", "(..., n, P)"]),
    "spans": (lambda: grammar(spans=randn(5, 5, 4)), ["spans", "(..., 5, 5, 5)", "(5, 5, 4)"]),
    "batch": (lambda: grammar(spans=randn(4, 5, 5, 5)), ["batch", "spans (4,)", "rules (3,)"]),
    "lengths": (lambda: grammar(lengths=torch.tensor([1, 2, 6])), ["lengths", "1 and 5", "item 2"]),
    "nan": (
        lambda: sx.PCFG(randn(2), randn(2, 5, 5), torch.full((4, 3), nan)),
        ["emission[0, 0]", "nan"],
    ),
    "left": (
        lambda: sx.PCFG.low_rank(randn(2), randn(4, 3), randn(5, 3), randn(2, 3), randn(4, 3)),
        ["LowRankPCFG", "left", "(..., 5, 3)", "(4, 3)"],
    ),
    "rank": (
        lambda: sx.PCFG.low_rank(randn(2), randn(5, 3), randn(5, 3), randn(2, 4), randn(4, 3)),
        ["LowRankPCFG", "parent", "(..., 2, 3)", "(2, 4)"],
    ),
    "kl": (lambda: grammar().cross_entropy(grammar(N=3, P=2)), ["PCFG", "same symbols"]),
    "kl lengths": (lambda: grammar().cross_entropy(grammar(lengths=LENGTHS)), ["same lengths"]),
    "topk": (lambda: grammar().topk(0), ["topk", "at least 1"]),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, words = ERRORS[name]
    fails(call, *words)


@pytest.mark.parametrize("which", ["emission", "rules", "root", "lengths"])
def test_nothing_plausible_from_bad_values(which: str) -> None:
    """Without validation a bad item gives NaN, and the others are as they were."""
    given = {"root": randn(3, 2), "rules": randn(3, 2, 5, 5), "emission": randn(3, 5, 3)}
    lengths = torch.tensor([5, 5, 4])
    good = sx.PCFG(**{k: t.clone() for k, t in given.items()}, lengths=lengths)
    if which == "lengths":
        lengths = torch.tensor([5, 9, 4])
    else:
        given[which][1, 0] = nan
    for omega in (sx.Shannon(), sx.Hard()):
        bad = sx.PCFG(**given, lengths=lengths, smoothing=omega, validate_args=False)
        assert bad.log_partition().isnan().tolist() == [False, True, False]
        for z in (bad.marginals(), bad.argmax(), bad.sample(), bad.topk(2).structures):
            assert bool(z[1].isnan().all()) and not bool(z[[0, 2]].isnan().any())
        assert torch.equal(bad.argmax()[[0, 2]], good.argmax()[[0, 2]])


@pytest.mark.parametrize("which", ["emission", "rules", "root"])
def test_no_draw_from_an_infinite_score(which: str) -> None:
    given = {"root": randn(3, 2), "rules": randn(3, 2, 5, 5), "emission": randn(3, 5, 3)}
    given[which][1].view(-1)[0] = inf
    z = sx.PCFG(**given, validate_args=False).sample((5,))
    assert bool(z[:, 1].isnan().all()) and not bool(z[:, [0, 2]].isnan().any())


# -- operators -----------------------------------------------------------------------------------


def test_opcheck() -> None:
    s, low = grammar(n=3, batch=(2,)), factors(n=3)
    lengths, code = [s._lengths()], list(sx.Shannon().code)
    parts = [p.contiguous() for p in s._parts()]
    for primitive, scores, sizes in (
        (ops.pcfg, parts, lengths),
        (ops.low_rank, [f.contiguous() for f in low._factors()], [low._lengths()]),
    ):
        opcheck(primitive.value_op, (scores, sizes, "", code))
        opcheck(primitive.gradient_op, (scores, sizes, "", code))
        opcheck(primitive.hvp_op, (scores, scores, sizes, "", code))
    opcheck(ops.kbest, (*parts, *lengths, 2))
    opcheck(ops.max_marginals, (*parts, *lengths))
    opcheck(ops.sample, (*parts, *lengths, torch.rand(2, 2, 3, dtype=f64), 1.0))
    weights = [f.contiguous() for f in low._factors()]
    opcheck(ops.sample_low_rank, (*weights, low._lengths(), torch.rand(2, 3, 12, dtype=f64)))


def test_vmap_of_walks() -> None:
    root, rules, emission = randn(3, 2), randn(2, 5, 5), randn(3, 4, 3)
    for query in ("argmax", "max_marginals"):
        mapped = torch.func.vmap(lambda r, e, q=query: getattr(sx.PCFG(r, rules, e), q)())
        whole = getattr(sx.PCFG(root, rules, emission), query)()
        torch.testing.assert_close(mapped(root, emission), whole)
    factors = (randn(5, 2), randn(5, 2), randn(2, 2))
    for make in (
        lambda r, e: sx.PCFG(r, rules, e, validate_args=False),
        lambda r, e: sx.PCFG.low_rank(r, *factors, e, validate_args=False),
    ):
        draw = torch.func.vmap(
            lambda r, e, make=make: make(r, e).sample((2,)), randomness="different"
        )
        z = draw(root, emission)
        assert z.shape == (3, 2, 4, 4, 5) and bool((z.flatten(2).sum(-1) == 7).all())


# -- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(f64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("make", [grammar, factors])
def test_shifts(make: Callable[..., sx.PCFG], dtype: torch.dtype, tolerance: float) -> None:
    """Adding c to all emissions moves A by n·c and nothing else."""
    base = make(lengths=LENGTHS)
    exact = {k: (t * 64).round() / 64 for k, (t, _) in base._tensors().items() if k != "lengths"}
    for c in (1e4, -1e4):
        moved = {**exact, "emission": exact["emission"] + c}
        one, two = (
            base._rebuild(**{k: t.to(dtype) for k, t in scores.items()}, lengths=LENGTHS)
            for scores in (exact, moved)
        )
        for query in ("marginals", "rule_marginals"):
            a, b = getattr(one, query)(), getattr(two, query)()
            torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
        gap = two.log_partition().double() - one.log_partition().double()
        torch.testing.assert_close(gap, c * LENGTHS.double(), atol=0, rtol=1e-6)


def test_ties() -> None:
    """All trees are best: under Hard, one of them is drawn, is the mean and has probability 1."""
    s = sx.PCFG(torch.zeros(2), torch.zeros(2, 4, 4), torch.zeros(3, 2), smoothing=sx.Hard())
    assert s.log_prob(s.sample()) == 0 and torch.equal(s.marginals(), s.sample())
    assert s.entropy() == 0 and len(list(s.ranked_support())) == 1
    assert bool(s.topk(64).exists.all()) and not bool(s.topk(65).exists[-1])
    other = sx.PCFG(torch.tensor([-1.0, 0.0]), torch.zeros(2, 4, 4), torch.zeros(3, 2))
    assert s.cross_entropy(other) > 0
    assert other.cross_entropy(s) == inf


def test_one_word_by_the_definition() -> None:
    """A sentence of one word has no tree: A is −inf, and its gradient 0."""
    root, rules = torch.randn(2, dtype=torch.float64), torch.randn(2, 4, 4, dtype=torch.float64)
    emission = torch.randn(1, 1, 2, dtype=torch.float64, requires_grad=True)
    with sx.backend("naive"):
        a = sx.PCFG(root, rules, emission, validate_args=False).log_partition()
    (slope,) = torch.autograd.grad(a.sum(), emission)
    assert a.item() == -math.inf and not slope.any()
