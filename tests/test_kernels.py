"""The compiled CPU kernels against the definition, on random forests and random chains.

Every property runs on a few examples in the normal suite and on ten thousand in the slow one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from properties import for_all
from torch import Tensor

import structmax as sx
from structmax.forest import naive, ops
from structmax.forest.chain import ops as dense
from structmax.structures.dynamic import DynamicStructure

f32, f64 = torch.float32, torch.float64
SMOOTHINGS = [
    sx.Hard(),
    sx.Shannon(),
    sx.Shannon(0.3),
    sx.Gini(),
    sx.Gini(4.0),
    sx.Tsallis(1.5),
    sx.Tsallis(1.3, 2.0),
]
CASES = pytest.mark.parametrize("cases", [50, pytest.param(10_000, marks=pytest.mark.slow)])


@dataclass
class Scores:
    """How to draw scores: their scale, ties, a shift, forbidden parts, the dtype."""

    seed: int
    spread: float
    ties: bool
    shift: float
    forbidden: float
    dtype: torch.dtype

    def draw(self, *shape: int, shifted: bool = True) -> Tensor:
        random = torch.Generator().manual_seed(self.seed)
        self.seed += 1
        x = torch.randn(shape, generator=random, dtype=f64) * self.spread
        if self.ties:
            x = (x / self.spread).round() * self.spread
        if self.dtype == f32:
            x = (x * 64).round() / 64  # exact in float32 after the shift
            x = x + self.shift * shifted
        x = torch.where(torch.rand(shape, generator=random) < self.forbidden, -math.inf, x)
        return x.to(self.dtype)


scores_like = st.builds(
    Scores,
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([1e-3, 1.0, 30.0, 1e3]),
    ties=st.booleans(),
    shift=st.sampled_from([0.0, 1e4, -1e4]),
    forbidden=st.sampled_from([0.0, 0.1, 0.4]),
    dtype=st.sampled_from([f64, f32]),
)
omegas = st.sampled_from(SMOOTHINGS)


def close(actual: Tensor, expected: Tensor, what: str) -> None:
    """Within rounding of the largest entry; −inf and NaN at the same places."""
    limit = 1e-7 if expected.dtype == f64 else 4e-5
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, what
    for special in (torch.isnan, torch.isneginf, torch.isposinf):
        assert torch.equal(special(actual), special(expected)), f"{what}: {actual} for {expected}"
    finite = expected.isfinite()
    if not bool(finite.any()):
        return
    a, b = actual[finite].double(), expected[finite].double()
    gap, scale = (a - b).abs().max().item(), 1 + b.abs().max().item()
    assert gap <= limit * scale, f"{what}: off by {gap} at scale {scale}"


def naively(call: Callable[[], object]):
    with sx.backend("naive"):
        return call()


# -- forests -------------------------------------------------------------------------------------


def random_forest(seed: int, nodes: int) -> sx.Forest:
    """Leaves, edges of 0, 1 or 2 tails (sometimes one node twice), shared and idle parts."""
    random = np.random.default_rng(seed)
    parts = int(random.integers(1, 9))
    draw = sx.ForestBuilder()
    for v in range(nodes):
        draw.node(int(random.integers(-1, parts)))
        for _ in range(int(random.integers(0, 5))):
            tails = random.integers(max(0, v - 5), v, int(random.integers(0, 3))) if v else []
            draw.edge(v, *[int(t) for t in tails], part=int(random.integers(-1, parts)))
    return draw.build(parts + int(random.integers(0, 3)))


forests = st.builds(random_forest, st.integers(0, 2**31), st.integers(1, 10))


def forest_batch(forest: sx.Forest, like: Scores, items: int = 5) -> tuple[Tensor, Tensor]:
    goal = torch.from_numpy(np.random.default_rng(like.seed).integers(forest.num_nodes, size=items))
    return like.draw(items, forest.num_parts), goal


def check_forest(forest: sx.Forest, like: Scores, omega: sx.Smoothing) -> None:
    theta, goal = forest_batch(forest, like)
    direction = torch.randn(theta.shape, dtype=theta.dtype, generator=torch.Generator())
    args = [goal], forest.key, list(omega.code)

    def run():
        a, mu = ops.forest.gradient_op([theta], *args)
        return (
            ops.forest.value_op([theta], *args),
            a,
            mu,
            ops.forest.hvp_op([theta], [direction], *args)[0],
        )

    (a, again, mu, w), (a0, _, mu0, w0) = run(), naively(run)
    close(a, a0, "value")
    assert torch.equal(a, again), "value and gradient ops disagree about the value"
    if isinstance(omega, sx.Hard):  # ties are legal: compare by score
        assert bool((mu == mu.round()).all())
        total = torch.where(mu != 0, theta, 0.0).double() * mu
        reached = a > -math.inf
        close(total.sum(-1)[reached].to(a.dtype), a[reached], "score of the hard gradient")
        assert not bool(w.any()), "hard max has curvature"
    else:
        close(mu, mu0, "gradient")
    # integer scores stand on the kinks of sparse smoothings, where the curvature jumps
    if isinstance(omega, sx.Shannon) or not (like.ties or like.dtype == f32):
        close(w, w0, "Hessian-vector product")
    assert not bool(mu[a == -math.inf].any()) and not bool(w[a == -math.inf].any())


@CASES
def test_forest_smooth(cases: int) -> None:
    for_all(cases, check_forest, forest=forests, like=scores_like, omega=omegas)


def check_forest_discrete(forest: sx.Forest, like: Scores, k: int) -> None:
    theta, goal = forest_batch(forest, like)
    width = forest.num_parts

    def run():
        return (
            *ops.argmax(theta, goal, forest.key, width),
            *ops.kbest(theta, goal, forest.key, k, width),
            ops.max_marginals(theta, goal, forest.key, width),
        )

    def score(z: Tensor) -> Tensor:
        return torch.where(z > 0, theta if z.dim() == 2 else theta[:, None], 0.0).double() * z

    (a, z, best, zs, m), (a0, z0, best0, _, m0) = run(), naively(run)
    close(a, a0, "best score")
    reached = a > -math.inf
    assert bool(z[~reached].isnan().all()) and bool(z0[~reached].isnan().all())
    close(score(z).sum(-1)[reached].to(a.dtype), a[reached], "score of argmax")
    close(score(z0).sum(-1)[reached].to(a.dtype), a[reached], "score of the naive argmax")
    close(best, best0, "scores of the k best")
    close(best[:, 0], a, "the best of the k best")
    exists = best > -math.inf
    close(score(zs).sum(-1)[exists].to(a.dtype), best[exists], "k best by their parts")
    close(m, m0, "max-marginals")
    used = torch.where(reached[:, None] & (z > 0), m, a[:, None])
    close(used, a[:, None].expand_as(used), "max-marginals of the parts of argmax")


@CASES
def test_forest_discrete(cases: int) -> None:
    for_all(cases, check_forest_discrete, forest=forests, like=scores_like, k=st.integers(1, 7))


def check_forest_sample(forest: sx.Forest, like: Scores, omega: sx.Smoothing) -> None:
    if int(forest.derivation_size.max()) > 200:
        return
    like.ties = False
    theta, goal = forest_batch(forest, like)
    longest = int(forest.derivation_size.max())
    uniform = torch.rand(3, len(theta), longest, dtype=f64, generator=torch.Generator())

    def run():
        code = list(omega.code)
        return ops.sample(theta, goal, uniform, forest.key, code, forest.num_parts)

    z, z0 = run(), naively(run)
    if not isinstance(omega, sx.Hard):  # ties among equal sums may be broken either way
        torch.testing.assert_close(z, z0, equal_nan=True, rtol=0, atol=0)
    args = [theta], [goal], forest.key, list(omega.code)
    a, mu = ops.forest.gradient_op(*args)
    assert bool(z[:, a == -math.inf].isnan().all())
    good = a > -math.inf
    assert not bool((z[:, good] > 0)[(mu[good] == 0).expand(3, -1, -1)].any()), "outside support"


def check_backpointers(forest: sx.Forest, like: Scores, omega: sx.Smoothing, bad: bool) -> None:
    theta, _ = forest_batch(forest, like)
    if bad:
        theta[0, 0] = math.nan
    found = ops.backpointers(forest, theta, omega)
    exact = naive.backpointers(forest, theta.double(), omega)
    if isinstance(omega, sx.Hard):  # ties are legal: one edge of each node
        assert bool(((found == 0) | (found == 1) | found.isnan()).all())
        head = torch.from_numpy(forest.head).long()
        nodes = found.new_zeros(len(found), forest.num_nodes)
        found, exact = (nodes.index_add(1, head, q) for q in (found, exact))
    close(found, exact, "backpointers")


@CASES
def test_forest_backpointers(cases: int) -> None:
    for_all(
        cases, check_backpointers, forest=forests, like=scores_like, omega=omegas, bad=st.booleans()
    )


def test_backpointers_of_what_is_watched() -> None:
    """A derivative needs the definition; its numbers are the same."""
    theta = torch.randn(2, 5, 5, dtype=f64).requires_grad_()
    tree = sx.BinaryTree(theta, smoothing=sx.Gini())
    z = tree.argmax()
    watched = tree.entropy(), tree.log_prob(z)
    torch.autograd.grad(sum(x.sum() for x in watched), theta)
    with torch.no_grad():
        torch.testing.assert_close((tree.entropy(), tree.log_prob(z)), watched)
    other = sx.BinaryTree(theta.detach().clone(), smoothing=sx.Gini())
    torch.testing.assert_close(other.cross_entropy(tree), watched[0])


@CASES
def test_forest_sample(cases: int) -> None:
    for_all(cases, check_forest_sample, forest=forests, like=scores_like, omega=omegas)


def check_forest_nan(forest: sx.Forest, like: Scores, omega: sx.Smoothing) -> None:
    """A NaN that a derivation can meet shows in every answer about that item, and only there."""
    like.forbidden = 0.0
    theta, goal = forest_batch(forest, like)
    key, width, code = forest.key, forest.num_parts, list(omega.code)
    clean = ops.forest.gradient_op([theta], [goal], key, code)
    reachable = ops.max_marginals(torch.zeros_like(theta), goal, key, width) > -math.inf
    bad = theta.clone()
    part = np.random.default_rng(like.seed).integers(width)
    bad[1, part] = bad[3, part] = math.nan
    hit = reachable[:, part] & torch.tensor([False, True, False, True, False])
    direction = torch.ones_like(theta)
    uniform = torch.rand(2, len(theta), int(forest.derivation_size.max()), dtype=f64)
    a, mu = ops.forest.gradient_op([bad], [goal], key, code)
    (w,) = ops.forest.hvp_op([bad], [direction], [goal], key, code)
    best, z = ops.argmax(bad, goal, key, width)
    scores, zs = ops.kbest(bad, goal, key, 3, width)
    m = ops.max_marginals(bad, goal, key, width)
    draws = ops.sample(bad, goal, uniform, key, code, width)
    for name in ("cpu", "naive"):
        with sx.backend(name):
            value = ops.forest.value_op([bad], [goal], key, code)
            assert torch.equal(value.isnan(), hit), f"{name} value"
    assert torch.equal(a.isnan(), hit) and torch.equal(best.isnan(), hit)
    assert bool(mu[hit][reachable[hit]].isnan().all()), "gradient"
    assert bool(z[hit].isnan().all()) and bool(draws[:, hit].isnan().all())
    assert bool(scores[hit][:, 0].isnan().all()), "k-best gives a plausible score"
    assert not bool((scores[hit] > -math.inf).any()), "k-best gives a plausible score"
    assert bool(m[hit, part].isnan().all()), "max-marginal of the NaN part"
    same = ~bad.isnan().any(-1)
    assert torch.equal(a[same], clean[0][same]) and torch.equal(mu[same], clean[1][same])
    # Shannon's shift is the mean of an item's scores, out of reach or not: the last bits may differ
    near = {"rtol": 0.0, "atol": 0.0}
    if isinstance(omega, sx.Shannon):
        size, peak = int(forest.derivation_size[goal].max()), float(theta.abs().max())
        slack = 4 * torch.finfo(f64).eps * size * (1 + peak / omega.gamma)
        near = {"rtol": slack + 2 * torch.finfo(theta.dtype).eps, "atol": slack}
    for new, old in ((a, clean[0]), (mu, clean[1])):
        torch.testing.assert_close(new[~hit], old[~hit], **near)
    assert not bool(w[~hit].isnan().any()) and not bool(z[~hit].isnan().any())
    assert not bool(scores[~hit].isnan().any()) and not bool(m[~hit].isnan().any())


@CASES
def test_forest_nan(cases: int) -> None:
    for_all(cases, check_forest_nan, forest=forests, like=scores_like, omega=omegas)


def test_nan_out_of_reach() -> None:
    """An item's part is NaN that its goal cannot reach: its own answer moves by rounding only."""
    like = Scores(seed=6, spread=1e-3, ties=False, shift=0.0, forbidden=0.0, dtype=f64)
    check_forest_nan(random_forest(5, 2), like, sx.Shannon())


# -- chains --------------------------------------------------------------------------------------


def random_chain(
    like: Scores, n: int, c: int, items: int, form: str, ragged: bool, ends: bool = False
) -> dict[str, Tensor | None]:
    """Arguments of a LinearChain; where ragged, no item is as long as the batch, padding is NaN."""
    shape = {
        "shared": (c, c),
        "item": (items, c, c),
        "step": (items, n - 1, c, c),
        "expanded": (1, n - 1, c, c),
    }[form]
    unary, transition = like.draw(items, n, c), like.draw(*shape, shifted=False)
    start = like.draw(c, shifted=False) if ends else None
    end = like.draw(items, c, shifted=False) if ends else None
    lengths = None
    if ragged:
        random = torch.Generator().manual_seed(like.seed)
        lengths = torch.randint(1, max(2, n), (items,), generator=random)
        outside = torch.arange(n) >= lengths[:, None]
        unary = torch.where(outside[..., None], math.nan, unary)
        if form == "step":
            transition = torch.where(outside[:, 1:, None, None], math.nan, transition)
    return {
        "unary": unary,
        "transition": transition,
        "start": start,
        "end": end,
        "lengths": lengths,
    }


chains = {
    "like": scores_like,
    "n": st.integers(1, 7),
    "c": st.integers(1, 5),
    "items": st.integers(0, 4),
    "form": st.sampled_from(["shared", "item", "step", "expanded"]),
    "ragged": st.booleans(),
}


def check_chain(omega: sx.Smoothing, **how) -> None:
    like = how["like"]
    arguments = random_chain(**how, ends=like.seed % 2 == 0)
    if like.dtype == f64 and like.spread == 1.0:
        arguments["transition"] = arguments["transition"] * 50  # the fall-back to log space

    def run():
        chain = sx.LinearChain(**arguments, smoothing=omega, validate_args=False)
        if not chain._is_gibbs:
            return chain.log_partition(), *chain._value_and_gradient()[1]
        parts = list(chain._dense_parts())
        random = torch.Generator().manual_seed(0)
        v = [torch.randn(t.shape, generator=random, dtype=f64).to(t.dtype) for t in parts]
        lengths, rest = chain._lengths(), ("", list(omega.code))
        value, *mu = dense.chain.gradient_op(parts, [lengths], *rest)
        close(dense.chain.value_op(parts, [lengths], *rest), value, "value alone")
        w = dense.chain.hvp_op(parts, v, [lengths], *rest)
        n, c = chain.event_shape
        tags = torch.randint(c, (*chain.batch_shape, n), generator=random)
        loss, *difference = dense.chain_loss.gradient_op(parts, [lengths, tags], *rest)
        close(dense.chain_loss.value_op(parts, [lengths, tags], *rest), loss, "loss alone")
        return value, *mu, *w, loss, *difference

    ours, reference = run(), naively(run)
    parts = ["unary", "transition", "start", "end"]
    names = ["value", *[f"marginals of {p}" for p in parts], *[f"product of {p}" for p in parts]]
    names += ["loss", *[f"loss in {p}" for p in parts]]
    hard = isinstance(omega, sx.Hard) and (like.ties or like.dtype == f32)  # any of the best
    for name, a, b in list(zip(names, ours, reference, strict=False))[: 1 if hard else None]:
        close(a, b, name)
    infeasible = ours[0] == -math.inf
    assert not any(bool(t[infeasible].any()) for t in ours[1:9])


@CASES
def test_chain_smooth(cases: int) -> None:
    for_all(cases, check_chain, omega=omegas, **chains)


def test_loss_of_scores_far_from_zero() -> None:
    """The loss is a small difference of large numbers, which float32 cannot hold."""
    like = Scores(seed=0, spread=1e-3, ties=False, shift=1e4, forbidden=0.0, dtype=f32)
    check_chain(sx.Shannon(), like=like, n=1, c=2, items=1, form="shared", ragged=False)


def check_chain_discrete(k: int, **how) -> None:
    arguments = random_chain(**how, ends=how["like"].seed % 2 == 0)

    def run():
        chain = sx.LinearChain(**arguments, validate_args=False)
        return chain, chain.argmax(), chain.topk(k), chain.max_marginals()

    chain, z, best, m = run()
    _, z0, best0, m0 = naively(run)
    good = chain.log_partition() > -math.inf
    assert bool(z[~good].isnan().all()) and bool(z0[~good].isnan().all())
    assert not bool(z[good].isnan().any())
    score = chain.score(torch.where(good[:, None, None], z, chain.encode(0 * chain_tags(chain))))
    close(score[good], best.scores[good, 0], "score of argmax")
    close(best.scores, best0.scores, "scores of the k best")
    assert torch.equal(best.exists, best0.exists)
    close(m, m0, "max-marginals")
    again = chain.score(z0[good]) if bool(good.all()) else best.scores[good, 0]
    close(again, best.scores[good, 0], "score of the naive argmax")


def chain_tags(chain: sx.LinearChain) -> Tensor:
    return torch.zeros(*chain.batch_shape, chain.event_shape[0], dtype=torch.long)


@CASES
def test_chain_discrete(cases: int) -> None:
    for_all(cases, check_chain_discrete, k=st.integers(1, 6), **chains)


def test_only_path_through_a_weight_that_underflows() -> None:
    """The tag of the largest weight is out of reach, the other's weight is less than e^−700."""
    like = Scores(seed=0, spread=1e3, ties=False, shift=0.0, forbidden=0.1, dtype=f64)
    check_chain_discrete(k=1, like=like, n=5, c=2, items=2, form="expanded", ragged=False)


def check_dense_against_forest(gamma: float, **how) -> None:
    """The dense kernels and the forest engine answer for the same graph."""
    arguments = random_chain(**how, ends=True)
    chain = sx.LinearChain(**arguments, smoothing=sx.Shannon(gamma), validate_args=False)
    value, mu = chain._value_and_gradient()
    value0, mu0 = DynamicStructure._value_and_gradient(chain)
    close(value, value0, "value")
    close(chain._value(), DynamicStructure._value(chain), "value alone")
    for a, b in zip(mu, mu0, strict=True):
        close(a, b, "gradient")
    if bool((value > -math.inf).all()):
        z = DynamicStructure.argmax(chain)
        close(chain.score(chain.argmax()), chain.score(z), "argmax")


@CASES
def test_dense_against_forest(cases: int) -> None:
    gammas = st.sampled_from([0.1, 1.0, 3.0])
    for_all(cases, check_dense_against_forest, gamma=gammas, **chains)


@pytest.mark.parametrize("c", [2, 3])
def test_two_tiny_sums_at_one_step(c: int) -> None:
    """Each is in range, their product is not."""
    like = Scores(seed=1, spread=30.0, ties=False, shift=0.0, forbidden=0.0, dtype=f64)
    check_dense_against_forest(0.1, like=like, n=3, c=c, items=2, form="step", ragged=False)


def check_chain_nan(where: int, omega: sx.Smoothing, **how) -> None:
    """A NaN inside the length shows in every answer about that item, and in no other."""
    how["items"], how["like"].forbidden = 3, 0.0
    arguments = random_chain(**how)
    clean = sx.LinearChain(**arguments, smoothing=omega, validate_args=False)
    length = int(clean._lengths()[1])
    unary = arguments["unary"].clone()
    unary[1, where % length, where % how["c"]] = math.nan
    arguments["unary"] = unary
    chain = sx.LinearChain(**arguments, smoothing=omega, validate_args=False)
    hit = torch.tensor([False, True, False])
    inside = chain._inside()
    assert torch.equal(chain.log_partition().isnan(), hit)
    for query in ("marginals", "argmax", "sample"):
        answer = getattr(chain, query)()
        assert bool(answer[hit][inside[hit]].isnan().all()), query
        assert not bool(answer[~hit].isnan().any()), query
    assert torch.equal(chain.marginals()[~hit], clean.marginals()[~hit])
    assert bool(chain.entropy()[hit].isnan().all()), "entropy"
    assert not bool(chain.topk(2).exists[hit].any()), "topk"
    assert bool(chain.topk(2).scores[hit, 0].isnan().all()), "topk"
    assert bool(chain.max_marginals()[1, where % length, where % how["c"]].isnan()), "max_marginals"


@pytest.mark.parametrize("cases", [50, pytest.param(1_000, marks=pytest.mark.slow)])
def test_chain_nan(cases: int) -> None:
    for_all(cases, check_chain_nan, where=st.integers(0, 100), omega=omegas, **chains)


# -- bits ----------------------------------------------------------------------------------------


def queries(s: sx.Structure) -> list[Tensor]:
    scores = next(iter(s._tensors().values()))[0].detach().requires_grad_()
    live = s._rebuild(**{**{k: t for k, (t, _) in s._tensors().items()}, "unary": scores})
    mu = live.marginals()
    random = torch.Generator().manual_seed(0)
    best = s.topk(3)
    return [
        s.log_partition(),
        mu.detach(),
        torch.autograd.grad((mu**2).sum(), scores)[0],
        s.argmax(),
        best.scores,
        best.structures,
        s.max_marginals(),
        s.sample((2,), generator=random),
    ]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize("omega", SMOOTHINGS, ids=str)
def test_same_bits(omega: sx.Smoothing, dtype: torch.dtype, threads) -> None:
    """Two runs, one thread or several, one item or the batch: the same bits."""
    torch.manual_seed(0)
    unary, transition = torch.randn(37, 17, 9, dtype=dtype), torch.randn(9, 9, dtype=dtype)
    lengths = torch.randint(1, 18, (37,))

    def make() -> sx.LinearChain:
        return sx.LinearChain(unary, transition, lengths=lengths, smoothing=omega)

    runs = []
    for count in (2, 2, 1, 3):
        threads(count)
        runs.append(queries(make()))
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            assert torch.equal(a, b)
    for i in (0, 21, 36):
        assert torch.equal(make()[i].marginals(), runs[0][1][i])


@pytest.mark.parametrize("omega", SMOOTHINGS, ids=str)
def test_same_bits_beside_other_items(omega: sx.Smoothing) -> None:
    """Items lie side by side in the forest kernels: how many there are must not show."""
    random = torch.Generator().manual_seed(0)
    for seed in range(10):
        forest = random_forest(seed, 10)
        theta, v = torch.randn(2, 37, forest.num_parts, dtype=f64, generator=random)
        goal = torch.randint(forest.num_nodes, (37,), generator=random)
        args = forest.key, list(omega.code)

        def run(low: int, high: int, theta=theta, v=v, goal=goal, args=args) -> list[Tensor]:
            part = [theta[low:high]], [goal[low:high]], *args
            return ops.forest.gradient_op(*part) + ops.forest.hvp_op(
                part[0], [v[low:high]], *part[1:]
            )

        whole = run(0, 37)
        for low, high in ((0, 1), (1, 4), (4, 11), (11, 20), (20, 37)):
            for a, b in zip(whole, run(low, high), strict=True):
                assert torch.equal(a[low:high], b)


# -- sums of products and their range ------------------------------------------------------------


def spans(n: int) -> sx.Forest:
    """Binary trees over n leaves; part ``i·n + j`` sits on the node of span i..j."""
    draw, node = sx.ForestBuilder(), np.full((n, n), -1)
    for width in range(n):
        i = np.arange(n - width)
        node[i, i + width] = draw.nodes(n - width, i * n + i + width)
        for k in range(width):
            draw.edges(node[i, i + width], node[i, i + k], node[i + k + 1, i + width])
    return draw.build(n * n)


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
def test_out_of_range_items_are_computed_in_logs(shift: float, dtype: torch.dtype) -> None:
    """Narrow, wide, forbidden, infeasible, shorter and NaN items side by side."""
    from structmax.forest.products import ProductBlock

    forest = spans(9)
    theta = torch.randn(7, 81, dtype=f64, generator=torch.Generator().manual_seed(0))
    theta = theta * torch.tensor([1.0, 100.0, 1.0, 1.0, 1.0, 1.0, 1e5])[:, None]
    theta[2, 9 + 3] = -math.inf
    theta[3, 8] = -math.inf  # the whole span
    theta[5, 2] = math.nan
    theta = ((theta * 64).round() / 64 + shift).to(dtype)
    goal = torch.full((7,), forest.num_nodes - 1, dtype=torch.int32)
    goal[4] = 20
    block = ProductBlock(forest, theta.numpy(), goal.numpy(), 1.0)
    assert block.left.tolist() == [False, True, False, False, False, True, True]

    def run():
        return ops.forest.gradient_op([theta], [goal], forest.key, [1.0, 1.0, 1.0])

    assert run()[0][5].isnan()
    for a, b in zip(run(), naively(run), strict=True):
        a[5] = b[5] = 0
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    for i in range(7):
        alone = ops.forest.gradient_op(
            [theta[i : i + 1]], [goal[i : i + 1]], forest.key, [1.0, 1.0, 1.0]
        )
        for a, b in zip(run(), alone, strict=True):
            assert torch.equal(a[i : i + 1].nan_to_num(9), b.nan_to_num(9))


def test_long_derivations_are_shifted_into_range() -> None:
    """Without a shift the value of the goal would overflow long before the top."""
    from structmax.forest.products import ProductBlock

    forest = spans(40)
    theta = 10 + 3 * torch.randn(3, 1600, dtype=f64, generator=torch.Generator().manual_seed(0))
    goal = torch.full((3,), forest.num_nodes - 1, dtype=torch.int32)
    block = ProductBlock(forest, theta.numpy(), goal.numpy(), 0.7)
    assert not block.left.any()

    def run():
        return ops.forest.gradient_op([theta], [goal], forest.key, [1.0, 0.7, 1.0])

    for a, b in zip(run(), naively(run), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_a_chain_whose_weights_underflow() -> None:
    """float32, float64 and log space hand over to each other, item by item."""
    torch.manual_seed(0)
    unary, transition = torch.randn(4, 6, 5), torch.randn(5, 5)
    unary[1] *= 60  # too wide for float32
    unary[2] *= 2000  # and for float64
    transition[:, 2] = -1e4  # forbidden in all but name
    chain = sx.LinearChain(unary, transition, start=torch.randn(5), end=torch.randn(5))
    exact = chain.to(torch.float64)
    with sx.backend("naive"):
        value, mu, edges = (
            exact.log_partition(),
            exact.marginals(),
            exact.edge_marginals(),
        )
    torch.testing.assert_close(chain.log_partition().double(), value, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(chain.marginals().double(), mu, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(chain.edge_marginals().double(), edges, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["f32", "f64"])
@pytest.mark.parametrize("shared", [False, True])
def test_chain_sums_at_the_ends_of_the_range(shared: bool, dtype: type) -> None:
    """Exponentials and their products that just do or do not underflow, against log space."""
    from structmax.forest.chain import cpu

    random, B = np.random.default_rng(0), 200
    if dtype == np.float32:
        units, limit = [5, 10, 18, 22, 30, 43, 60, 85, 88], 2e-5
    else:
        units, limit = [18, 22, 100, 150, 300, 340, 350, 600, 690, 710], 1e-9

    def draw(*shape: int) -> np.ndarray:
        some = random.choice(units, shape) if random.random() < 0.3 else random.choice(units)
        x = some * random.integers(-2, 3, shape) + random.integers(-1, 2, shape) * random.random()
        forbidden = random.random(shape) < random.choice([0.0, 0.1, 0.4])
        return np.where(forbidden, -math.inf, x).astype(dtype)

    for _ in range(60):
        n, c = random.integers(2, 7), random.integers(2, 6)
        u, T = draw(B, n, c), draw(B, 1 if shared else n - 1, c, c)
        lengths, none = random.integers(1, n + 1, B), np.zeros((1, c))
        ends = [torch.zeros(B, 0)] * 2
        inputs = [torch.from_numpy(u), torch.from_numpy(T), *ends, torch.from_numpy(lengths)]
        a, mu, edges, *_ = cpu.gradient(*inputs)
        exact = np.empty(B), np.zeros(u.shape), np.zeros(T.shape)
        wide = u.astype(np.float64), T.astype(np.float64), none, none, lengths
        cpu.gradients_in_logs(np.arange(B), *wide, *exact)
        for ours, theirs in zip((cpu.value(*inputs), a, mu, edges), exact[:1] + exact, strict=True):
            torch.testing.assert_close(
                ours.double(), torch.from_numpy(theirs), rtol=limit, atol=limit
            )


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("bound", [19.9, 20.1])
def test_chain_scores_at_the_bound(bound: float, shared: bool, dtype: torch.dtype) -> None:
    """Exponentials are taken of scores as they are up to some size, and of differences beyond."""
    random = torch.Generator().manual_seed(0)
    shapes = (3, 30, 5), (5, 5) if shared else (3, 29, 5, 5)
    scores = [torch.rand(shape, generator=random, dtype=f64) for shape in shapes]
    unary, transition = (torch.where(x < 0.5, -bound, bound - x).to(dtype) for x in scores)
    unary[1], unary[2] = bound, -bound  # all at one end
    transition[..., 0, 1] = -math.inf
    chain = sx.LinearChain(unary, transition)
    exact = chain.to(f64)
    with sx.backend("naive"):
        reference = exact.log_partition(), exact.marginals(), exact.edge_marginals()
    tolerance = 1e-5 if dtype == f32 else 1e-12
    ours = chain.log_partition(), chain.marginals(), chain.edge_marginals()
    for a, b in zip(ours, reference, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)
    assert not chain.edge_marginals()[..., 0, 1].any()
