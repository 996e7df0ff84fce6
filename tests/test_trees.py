"""Binary trees and projective dependency trees beyond the contract."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from table import ROWS, f64, projective, randn
from torch import Tensor

import structmax as sx
from structmax.forest.topology import bucket, lookup
from structmax.structures.binary_tree import crossing
from structmax.testing import CHECKS

nan, inf = math.nan, math.inf
ROOTS = ["single", "multi"]
OMEGAS = [sx.Shannon(), sx.Gini(2.0), sx.Tsallis(1.3, 1.5), sx.Hard()]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def dependency(scores: Tensor, **kwargs: Any) -> sx.DependencyTree:
    return sx.DependencyTree(scores, projective=True, **kwargs)


def catalan(n: int) -> int:
    return math.comb(2 * n, n) // (n + 1)


def projective_count(n: int, root: str) -> int:
    if root == "single":
        return math.comb(3 * n - 2, n - 1) // n
    return math.comb(3 * n, n) // (2 * n + 1)


KINDS: dict[str, Callable[[int], Any]] = {
    "binary": lambda n: sx.BinaryTree(randn(n, n)),
    "binary labelled": lambda n: sx.BinaryTree(randn(n, n, 2), labelled=True),
    **{
        f"{root}{' labelled' * labelled}{' siblings' * siblings}": (
            lambda n, root=root, labelled=labelled, siblings=siblings: dependency(
                randn(n + 1, n + 1, *[2] * labelled),
                root=root,
                labelled=labelled,
                siblings=randn(n + 1, n + 1, n + 1) if siblings else None,
            )
        )
        for root in ROOTS
        for labelled in (False, True)
        for siblings in (False, True)
    },
}


def with_zeros(s: Any) -> Any:
    return s._rebuild(**{name: torch.zeros_like(t) for name, (t, _) in s._tensors().items()})


# -- how many ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_counts(kind: str) -> None:
    for n in range(1, 13):
        s = with_zeros(KINDS[kind](n))
        if kind.startswith("binary"):
            count, parts = catalan(n - 1), 2 * n - 1
        else:
            count, parts = projective_count(n, kind.split()[0]), n
        expected = math.log(count) + parts * math.log(max(s._labels, 1))
        assert s.log_partition().item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_derivations_are_trees_one_to_one(kind: str) -> None:
    for n in range(1, 4):
        s = KINDS[kind](n)
        forest = lookup(s._forest_key())
        walks = sx.Hyperpath(forest, torch.zeros(forest.num_parts), goal=s._goal())
        derived = s._to_event(walks.enumerate_support()[:, : s._width()])
        every = s.enumerate_support()
        assert len(derived) == len(every) == len(derived.unique(dim=0))
        assert torch.equal(derived.unique(dim=0), every.float().unique(dim=0))


@pytest.mark.parametrize("kind", KINDS)
def test_derivation_size_and_goals(kind: str) -> None:
    for n in (1, 2, 5, 17, 21):
        s = KINDS[kind](n)
        forest, goal = lookup(s._forest_key()), int(s._goal())
        assert forest.derivation_size[goal] == s._derivation_size()
        assert s._goal().shape == ()
        if bucket(n) == n:
            assert goal == forest.num_nodes - 1


def test_size_of_the_graph() -> None:
    """A hyperedge for each split, three for each in Eisner's; nodes grow as n²."""
    n = 64
    splits = math.comb(n + 1, 3)
    assert lookup(f"binary_tree:{n},0").num_edges == splits + n
    forest = lookup(f"projective_tree:{n},0,0,0")
    assert forest.num_edges < 3 * math.comb(n + 2, 3) + n * n
    assert forest.num_nodes < 5 * n * n / 2 + n


# -- against other algorithms ---------------------------------------------------------------------


def inside_binary(w: list[list[float]], n: int) -> float:
    """Σ over trees of the product of weights, from the definition."""
    table: dict[tuple[int, int], float] = {}
    for width in range(n):
        for i in range(n - width):
            j = i + width
            splits = sum(table[i, k] * table[k + 1, j] for k in range(i, j)) if width else 1.0
            table[i, j] = w[i][j] * splits
    return table[0, n - 1]


def inside_dependency(arcs: Any, siblings: Any, n: int, root: str) -> float:
    """Σ over projective trees, by head words of whole spans: O(n⁶), unlike Eisner's."""
    memo: dict[tuple[Any, ...], float] = {}

    def side(h: int, end: int, last: int) -> float:
        """h with modifiers up to ``end`` on that side, the outermost being ``last``."""
        if end == h:
            return float(last == h)
        key = (h, end, last)
        if last == h or key in memo:
            return memo.get(key, 0.0)
        step = 1 if end > h else -1
        total = 0.0
        for start in range(h + step, last + step, step):  # the last subtree reaches from start
            below = tree(min(start, end), max(start, end), last)
            for sibling in range(h, start, step):
                weight = arcs[h][last] * siblings[h][sibling][last]
                total += side(h, start - step, sibling) * weight * below
        memo[key] = total
        return total

    def whole(h: int, end: int) -> float:
        step = 1 if end >= h else -1
        return sum(side(h, end, last) for last in range(h, end + step, step))

    def tree(i: int, j: int, h: int) -> float:
        return whole(h, i) * whole(h, j)

    if root == "multi":
        return whole(0, n)
    return sum(arcs[0][r] * siblings[0][0][r] * tree(1, n, r) for r in range(1, n + 1))


@pytest.mark.parametrize("n", [1, 2, 7, 10])
def test_binary_against_recursion(n: int) -> None:
    scores = randn(n, n)
    value = sx.BinaryTree(scores).log_partition().item()
    assert value == pytest.approx(math.log(inside_binary(scores.exp().tolist(), n)))
    labelled = randn(n, n, 3)
    value = sx.BinaryTree(labelled, labelled=True).log_partition().item()
    weights = labelled.exp().sum(-1).tolist()
    assert value == pytest.approx(math.log(inside_binary(weights, n)))


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_dependency_against_recursion(n: int, root: str) -> None:
    scores, siblings = randn(n + 1, n + 1, 2), randn(n + 1, n + 1, n + 1)
    none = torch.ones(n + 1, n + 1, n + 1).tolist()
    one, two = scores[..., 0].exp().tolist(), scores.exp().sum(-1).tolist()
    second = siblings.exp().tolist()
    for given, arcs in ((scores[..., 0], one), (scores, two)):
        for extra, more in ((None, none), (siblings, second)):
            labelled = given.dim() == 3
            s = dependency(given, root=root, siblings=extra, labelled=labelled)
            expected = inside_dependency(arcs, more, n, root)
            assert s.log_partition().item() == pytest.approx(math.log(expected))


@pytest.mark.parametrize("length", [9, 14])
def test_against_torch_struct(length: int) -> None:
    peer = pytest.importorskip("torch_struct")
    lengths = torch.tensor([14, length])
    scores = randn(2, 14, 14)
    theirs = peer.TreeCRF(scores[..., None].clone(), lengths)
    ours = sx.BinaryTree(scores, lengths)
    torch.testing.assert_close(ours.log_partition(), theirs.partition.detach())
    torch.testing.assert_close(ours.marginals(), theirs.marginals.detach()[..., 0])
    arcs = torch.nn.functional.pad(scores, (1, 0, 1, 0))
    arcs[:, 0, 1:] = scores.diagonal(dim1=-2, dim2=-1)
    for root in ROOTS:
        given = scores.clone().requires_grad_()  # it writes into what has no history
        theirs = peer.DependencyCRF(given, lengths, multiroot=root == "multi")
        value, mu = theirs.partition.detach(), theirs.marginals.detach()
        ours = dependency(arcs, lengths=lengths, root=root)
        torch.testing.assert_close(ours.log_partition(), value)
        own = ours.marginals()
        diagonal = torch.diag_embed(own[:, 0, 1:])
        torch.testing.assert_close(own[:, 1:, 1:] + diagonal, mu)


# -- numbers -------------------------------------------------------------------------------------


def ragged_case(kind: str, lengths: list[int], n: int) -> tuple[Any, list[Any]]:
    """A batch with NaN wherever no tree looks, and its items alone, cut to their size."""
    items = [KINDS[kind](length) for length in lengths]
    names = list(items[0]._tensors())
    border = n - items[0]._longest + items[0].event_shape[0]
    whole: dict[str, Tensor] = {}
    for name in names:
        rows = []
        for item in items:
            tensor, dims = item._tensors()[name]
            sides = 3 if name == "siblings" else 2
            used = item._used_siblings() if name == "siblings" else item._used()
            used = used[..., None] if dims > sides else used
            full = tensor.new_full((*[border] * sides, *tensor.shape[sides:]), nan)
            full[tuple(slice(s) for s in tensor.shape[:sides])] = torch.where(used, tensor, nan)
            rows.append(full)
        whole[name] = torch.stack(rows)
    return items[0]._rebuild(**whole, lengths=torch.tensor(lengths)), items


@pytest.mark.parametrize(
    ("kind", "omega"),
    [
        *[(kind, sx.Shannon()) for kind in KINDS],
        *[(kind, sx.Gini()) for kind in ("binary", "single", "multi labelled siblings")],
    ],
    ids=str,
)
def test_ragged_batch_is_item_by_item(kind: str, omega: sx.Smoothing) -> None:
    batch, items = ragged_case(kind, [3, 1, 6, 4], 9)  # no item has the maximal length
    tensors = {name: t for name, (t, _) in batch._tensors().items()}
    names = [name for name, t in tensors.items() if t.is_floating_point()]
    leaves = {name: tensors[name].clone().requires_grad_() for name in names}
    batch = type(batch)(**{**batch._options(), **tensors, **leaves}, smoothing=omega)  # validated
    value, mu = batch.log_partition(), batch.marginals()
    grads = torch.autograd.grad(value.sum() + (mu**2).sum(), list(leaves.values()))
    assert not any(bool(g.isnan().any()) for g in grads)
    z, best = batch.argmax(), batch.max_marginals()
    draws, entropy = batch.sample((3,)), batch.entropy()
    assert bool(batch.log_prob(draws).isfinite().all())
    for b, item in enumerate(items):
        item = type(item)(
            **{
                **item._options(),
                **{name: t.clone().requires_grad_() for name, (t, _) in item._tensors().items()},
            },
            smoothing=omega,
        )
        cut = tuple(slice(s) for s in item.event_shape)
        torch.testing.assert_close(value[b], item.log_partition())
        torch.testing.assert_close(mu[b][cut], item.marginals())
        torch.testing.assert_close(entropy[b], item.entropy())
        torch.testing.assert_close(best[b][cut], item.max_marginals())
        assert torch.equal(z[b][cut], item.argmax()) and z[b].sum() == z[b][cut].sum()
        own = [item._tensors()[name][0] for name in names]
        loss = item.log_partition() + (item.marginals() ** 2).sum()
        for g, expected in zip(grads, torch.autograd.grad(loss, own), strict=True):
            inside = tuple(slice(s) for s in expected.shape)
            torch.testing.assert_close(g[b][inside], expected)
            assert g[b].abs().sum().item() == pytest.approx(expected.abs().sum().item())


@pytest.mark.parametrize("kind", ["binary", "single", "multi siblings", "single labelled"])
@pytest.mark.parametrize("omega", OMEGAS, ids=str)
def test_kernels_against_naive(kind: str, omega: sx.Smoothing) -> None:
    """Value, gradient and its derivative: random, with −inf, shifted by 1e4, spread over 1e3."""
    base = KINDS[kind](6)
    tensors = {name: t for name, (t, _) in base._tensors().items()}
    scores = tensors["scores"]
    forbidden = torch.where(torch.rand_like(scores) < 0.15, -inf, scores)
    forbidden = torch.where(base.argmax() > 0, scores, forbidden)  # one tree stays
    for given in (scores, forbidden, scores + 1e4, scores - 1e4, scores * 1e3):
        answers = []
        for backend in ("naive", "cpu"):
            leaf = given.clone().requires_grad_()
            with sx.backend(backend):
                s = type(base)(**{**base._options(), **tensors, "scores": leaf}, smoothing=omega)
                value, mu = s.log_partition(), s.marginals()
                (g,) = torch.autograd.grad((mu * scores.nan_to_num()).sum(), leaf)
                answers.append((value.detach(), mu.detach(), g))
        for a, b in zip(*answers, strict=True):
            assert not bool(a.isnan().any())
            torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-8)


COMBINATIONS = {
    "multi siblings": (projective(2, 5, 5, root="multi", length=3, siblings=True), sx.Gini(2.0)),
    "multi labelled siblings": (
        projective(2, 4, 4, 2, root="multi", length=2, siblings=True),
        sx.Shannon(0.5),
    ),
    "single labelled siblings": (projective(2, 4, 4, 2, length=2, siblings=True), sx.Gini(2.0)),
    "multi one word": (projective(2, 2, 2, root="multi"), sx.Shannon()),
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_contract_of_combinations(name: str) -> None:
    make, omega = COMBINATIONS[name]
    for check in CHECKS.keys() - {"transforms", "compile", "gradients", "sample", "dtypes"}:
        CHECKS[check](lambda: make(omega))


def test_transformations() -> None:
    CHECKS["transforms"](ROWS["binary-tree-labelled/shannon"])
    CHECKS["transforms"](ROWS["projective-siblings/gini"])
    CHECKS["compile"](ROWS["projective-siblings/gini"])


def test_first_use_in_inference_mode() -> None:
    with torch.inference_mode():
        sx.BinaryTree(randn(23, 23)).marginals()
        dependency(randn(23, 23)).marginals()
    for s in (sx.BinaryTree, dependency):
        leaf = randn(23, 23).requires_grad_()
        (g,) = torch.autograd.grad((s(leaf).marginals() ** 2).sum(), leaf)
        assert bool(g.isfinite().all())


@pytest.mark.parametrize("root", ROOTS)
def test_sibling_marginals(root: str) -> None:
    """Expected siblings by enumeration, and as the gradient of the value."""
    n = 4
    scores, siblings = randn(n + 1, n + 1), randn(n + 1, n + 1, n + 1).requires_grad_()
    s = dependency(scores, root=root, siblings=siblings)
    every = s.enumerate_support()
    expected = torch.zeros(n + 1, n + 1, n + 1, dtype=f64)
    for z, p in zip(every, s.log_prob(every).exp().detach(), strict=True):
        heads = s.decode(z)
        for m, h in enumerate(heads, 1):
            step = 1 if m > h else -1
            others = [k for k in range(m - step, h, -step) if heads[k - 1] == h]
            expected[h, others[0] if others else h, m] += p
    torch.testing.assert_close(s.edge_marginals(), expected)
    (g,) = torch.autograd.grad(s.log_partition(), siblings)
    torch.testing.assert_close(g, expected)
    with pytest.raises(ValueError, match="no siblings= scores"):
        dependency(scores).edge_marginals()


# -- conditions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_include(kind: str) -> None:
    """P(part) = exp(A with it − A), for every part; 0 for what is no part."""
    s = KINDS[kind](3)
    s = s._rebuild(**{name: t for name, (t, _) in s._tensors().items()})
    mu, value = s.marginals(), s.log_partition()
    for index in itertools.product(*[range(size) for size in s.event_shape]):
        part = torch.zeros(s.event_shape, dtype=torch.bool)
        part[index] = True
        kept = s.condition(include=part)
        torch.testing.assert_close((kept.log_partition() - value).exp(), mu[index])
        if mu[index] > 0:
            torch.testing.assert_close(kept.marginals()[index], torch.ones((), dtype=f64))


@pytest.mark.parametrize("kind", KINDS)
def test_include_whole_structure(kind: str) -> None:
    s = KINDS[kind](4)
    z = s.sample()
    kept = s.condition(include=z > 0)
    assert torch.equal(kept.argmax(), z)
    torch.testing.assert_close(kept.marginals(), z)
    torch.testing.assert_close(kept.log_partition(), s.score(z))


def test_crossing() -> None:
    n = 6
    inside = [(i, j) for i in range(n) for j in range(i, n)]
    for i, j in inside:
        one = torch.zeros(n, n, dtype=torch.bool)
        one[i, j] = True
        expected = {(a, b) for a, b in inside if a < i <= b < j or i < a <= j < b}
        assert {tuple(cell) for cell in crossing(one).triu().nonzero().tolist()} == expected


# -- human and integer forms ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("omega", [sx.Shannon(), sx.Gini()], ids=str)
def test_forms_agree(kind: str, omega: sx.Smoothing) -> None:
    batch, _ = ragged_case(kind, [3, 1, 5], 5)
    tensors = {name: t for name, (t, _) in batch._tensors().items()}
    batch = type(batch)(**{**batch._options(), **tensors, "smoothing": omega})
    z = batch.sample((2,))
    for draw in z:
        human = batch.decode(draw)
        assert torch.equal(batch.encode(human), draw)
        torch.testing.assert_close(batch.score(human), batch.score(draw))
        torch.testing.assert_close(batch.log_prob(human), batch.log_prob(draw))
    assert torch.equal(batch.encode(batch.decode(z)), z)
    if not kind.startswith("binary"):
        junk = [[(77, 9)] * 2 if batch.labelled else [77] * 2, [], []]  # in the padding: ignored
        junk[1] = junk[0] * 2
        rows = [human + more for human, more in zip(batch.decode(z[0]), junk, strict=True)]
        heads = torch.tensor(rows)
        torch.testing.assert_close(batch.score(heads), batch.score(z[0]))
        assert torch.equal(batch.encode(heads), z[0])
        torch.testing.assert_close(batch.score(heads.expand(4, *heads.shape))[3], batch.score(z[0]))


def test_decode() -> None:
    s = sx.BinaryTree(torch.zeros(2, 3, 3), lengths=torch.tensor([3, 2]))
    first = [(0, 0), (0, 1), (0, 2), (1, 1), (2, 2)]
    second = [(0, 0), (0, 1), (1, 1)]
    z = s.encode([first, second])
    assert s.decode(z) == [first, second]
    best = s.topk(3)
    assert s.decode(best.structures)[1] == [second, [], []]
    tensor = torch.tensor([first, [*second, (-1, -1), (-1, -1)]])
    assert torch.equal(s.encode(tensor), z)
    assert s.score(tensor).tolist() == [0.0, 0.0]
    trees = dependency(torch.zeros(2, 4, 4), lengths=torch.tensor([3, 2]))
    best = trees.topk(3)
    assert [len(heads) for heads in trees.decode(best.structures)[1]] == [2, 2, 0]


# -- shapes and places ---------------------------------------------------------------------------


def test_labels_are_read_off_the_shape() -> None:
    assert not sx.BinaryTree(randn(4, 4)).labelled
    assert not sx.BinaryTree(randn(4, 4, 4)).labelled  # a batch of four
    assert sx.BinaryTree(randn(4, 4, 3)).labelled
    assert sx.BinaryTree(randn(2, 4, 4, 3)).labelled
    assert sx.BinaryTree(randn(4, 4, 4), labelled=True).batch_shape == ()
    assert sx.BinaryTree(randn(2, 4, 4, 4), labelled=False).batch_shape == (2, 4)
    assert dependency(randn(2, 4, 4, 5)).labelled
    wide = sx.BinaryTree(randn(3, 3, 3, 3, 3), labelled=True)
    assert wide.batch_shape == (3, 3) and wide[0].batch_shape == (3,) and wide[0, 0].labelled
    assert wide.expand((2, 3, 3)).event_shape == (3, 3, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_copies(kind: str) -> None:
    s = KINDS[kind](3).expand((2,))
    for other in (pickle.loads(pickle.dumps(s)), copy.deepcopy(s), s[0], s.to(torch.float32)):
        assert type(other) is type(s)
        expected = s[0].marginals().expand(other.batch_shape + other.event_shape)
        torch.testing.assert_close(other.marginals().double(), expected, atol=1e-5, rtol=1e-5)
    if not kind.startswith("binary"):
        assert isinstance(s, sx.DependencyTree) and s[1].root == kind.split()[0]


def test_shared_siblings() -> None:
    """Siblings without a batch serve every item, in the wider of the two dtypes."""
    scores, siblings = randn(3, 4, 4), randn(4, 4, 4)
    s = dependency(scores.float(), siblings=siblings)
    assert s.batch_shape == (3,) and s[1].siblings.dim() == 3
    assert s.log_partition().dtype == f64 and s.marginals().dtype == torch.float32
    one = dependency(scores[1].float(), siblings=siblings)
    torch.testing.assert_close(s.log_partition()[1], one.log_partition())


# -- errors --------------------------------------------------------------------------------------

LEFT = [(0, 0), (0, 1), (0, 2), (1, 1), (2, 2)]


def spans(*pairs: tuple[int, ...]) -> Tensor:
    z = torch.zeros(3, 3)
    for i, j in pairs:
        z[i, j] = 1
    return z


def put(tensor: Tensor, index: tuple[int, ...], value: float) -> Tensor:
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


ERRORS: dict[str, tuple[Callable[[], object], list[str]]] = {
    "not square": (
        lambda: dependency(randn(8, 20, 21)),
        ["DependencyTree: scores must be (..., n+1, n+1)", "(8, 20, 21)", "forget the root column"],
    ),
    "no words": (lambda: dependency(randn(2, 1, 1)), ["scores", "(2, 1, 1)", "root column"]),
    "spans not square": (
        lambda: sx.BinaryTree(randn(8, 20, 21)),
        ["BinaryTree: scores must be (..., n, n)", "(8, 20, 21)"],
    ),
    "no leaves": (lambda: sx.BinaryTree(randn(2, 0, 0)), ["scores", "(2, 0, 0)"]),
    "labels missing": (
        lambda: sx.BinaryTree(randn(4, 4), labelled=True),
        ["(..., n, n, labels)", "(4, 4)"],
    ),
    "ambiguous": (
        lambda: sx.BinaryTree(randn(2, 4, 4, 4)),
        ["BinaryTree", "(2, 4, 4, 4)", "labelled=False or labelled=True"],
    ),
    "scores list": (lambda: sx.BinaryTree([[1.0]]), ["scores must be a tensor", "list"]),  # type: ignore[arg-type]
    "scores integer": (lambda: dependency(torch.zeros(3, 3).long()), ["floating point", "int64"]),
    "nan": (
        lambda: sx.BinaryTree(put(randn(2, 3, 3), (1, 0, 2), nan)),
        ["BinaryTree: scores[1, 0, 2] is nan"],
    ),
    "infinite arc": (
        lambda: dependency(put(randn(2, 3, 3), (1, 0, 2), inf)),
        ["DependencyTree: scores[1, 0, 2] is inf"],
    ),
    "nan sibling": (
        lambda: dependency(randn(3, 3), siblings=put(randn(3, 3, 3), (1, 1, 2), nan)),
        ["siblings[1, 1, 2] is nan"],
    ),
    "length": (
        lambda: dependency(randn(2, 4, 4), lengths=torch.tensor([3, 4])),
        ["lengths must be between 1 and 3", "got 4 for item 1"],
    ),
    "lengths batch": (
        lambda: sx.BinaryTree(randn(2, 4, 4), lengths=torch.tensor([1, 2, 3])),
        ["batch", "lengths (3,)"],
    ),
    "root": (lambda: dependency(randn(3, 3), root="one"), ['"single" or "multi"', "'one'"]),
    "siblings shape": (
        lambda: dependency(randn(4, 4), siblings=randn(3, 3, 3)),
        ["siblings must be (..., 4, 4, 4)", "(3, 3, 3)"],
    ),
    "crossing spans": (
        lambda: sx.BinaryTree(randn(2, 3, 3)).score(
            torch.stack([spans(*LEFT), spans((0, 1), (1, 2), (0, 0), (1, 1), (2, 2))])
        ),
        ["z[1]", "no binary tree over 3 leaves", "5 spans", "(1, 2)"],
    ),
    "missing span": (
        lambda: sx.BinaryTree(randn(3, 3)).score(LEFT[1:]),
        ["no binary tree over 3 leaves"],
    ),
    "half a span": (lambda: sx.BinaryTree(randn(3, 3)).score(spans(*LEFT) / 2), ["binary tree"]),
    "two labels": (
        lambda: sx.BinaryTree(randn(1, 1, 2), labelled=True).score(torch.ones(1, 1, 2)),
        ["each with one label"],
    ),
    "no span": (
        lambda: sx.BinaryTree(randn(3, 3)).encode([(2, 1)]),
        ["(2, 1)", "no span of 3 leaves"],
    ),
    "no such label": (
        lambda: sx.BinaryTree(randn(3, 3, 2)).encode([(0, 1, 2)]),
        ["(0, 1, 2)", "with 2 labels"],
    ),
    "cycle": (
        lambda: dependency(randn(2, 4, 4)).score(torch.tensor([[0, 1, 1], [2, 1, 0]])),
        ["heads[1] = [2, 1, 0]", "no projective tree with one root"],
    ),
    "own head": (lambda: dependency(randn(4, 4)).score([0, 2, 1]), ["no projective tree"]),
    "two roots": (lambda: dependency(randn(4, 4)).score([0, 0, 1]), ["with one root"]),
    "crossing arcs": (
        lambda: dependency(randn(5, 5), root="multi").log_prob([3, 4, 0, 0]),
        ["[3, 4, 0, 0]", "projective"],
    ),
    "head too large": (
        lambda: dependency(randn(5, 5), lengths=torch.tensor(2)).score([3, 0]),
        ["a head must be between 0 and the length", "got 3", "[0]"],
    ),
    "label too large": (
        lambda: dependency(randn(3, 3, 2)).score([(0, 2), (1, 0)]),
        ["a label must be between 0 and 1", "got 2"],
    ),
    "too many heads": (
        lambda: dependency(randn(3, 3)).score(torch.tensor([0, 1, 1])),
        ["heads must be (..., 2)", "(3,)"],
    ),
    "two heads": (
        lambda: dependency(randn(3, 3)).score(torch.ones(3, 3)),
        ["exactly one 1 for each word"],
    ),
    "other lengths": (
        lambda: sx.BinaryTree(randn(2, 3, 3)).cross_entropy(
            sx.BinaryTree(randn(2, 3, 3), torch.tensor([3, 2]))
        ),
        ["same lengths"],
    ),
    "other root": (
        lambda: dependency(randn(3, 3)).cross_entropy(dependency(randn(3, 3), root="multi")),
        ["one forest"],
    ),
    "ragged support": (
        lambda: sx.BinaryTree(randn(2, 3, 3), torch.tensor([3, 2])).enumerate_support(),
        ["different lengths", "[i]"],
    ),
    "large support": (lambda: dependency(randn(40, 40)).enumerate_support(), ["too many"]),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, words = ERRORS[name]
    with pytest.raises(ValueError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


@pytest.mark.parametrize("kind", KINDS)
def test_bad_lengths_unlooked(kind: str) -> None:
    """Never a plausible number."""
    s, _ = ragged_case(kind, [2, 3], 4)
    for bad in (0, -2, 5, 1000):
        tensors = {name: t.nan_to_num(0) for name, (t, _) in s._tensors().items()}
        given = {**s._options(), **tensors, "lengths": torch.tensor([2, bad])}
        t = type(s)(**given, smoothing=s.smoothing, validate_args=False)
        assert bool(t.log_partition()[1].isnan()) and not bool(t.log_partition()[0].isnan())
        assert bool(t.marginals()[1].isnan().all()) and not bool(t.marginals()[0].isnan().any())
