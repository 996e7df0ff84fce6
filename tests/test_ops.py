"""The op recipe under every transformation, for each primitive by itself.

A primitive is called as its structure calls it, on scores that include a forbidden part.
"""

from __future__ import annotations

import gc
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from table import diamond
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

import structmax as sx
from structmax.forest import ops, topology
from structmax.forest.chain import ops as dense
from structmax.oracles import matrix_tree
from structmax.primitive import Primitive
from structmax.structures import dynamic

f64 = torch.float64
FOREST = diamond()
CODES = {
    "shannon": sx.Shannon(0.7).code,
    "gini": sx.Gini(3.0).code,
    "tsallis": sx.Tsallis(1.4, 2.0).code,
    "hard": sx.Hard().code,
}


@dataclass
class Case:
    """A primitive with arguments for a batch of three items."""

    primitive: Primitive
    scores: list[Tensor]
    constants: list[Tensor]
    key: str
    omega: tuple[float, float, float]

    def value(self, *scores: Tensor) -> Tensor:
        return self.primitive.value(scores, self.constants, self.key, self.omega)

    def marginals(self, *scores: Tensor) -> tuple[Tensor, ...]:
        return self.primitive.value_and_gradient(scores, self.constants, self.key, self.omega)[1:]

    def total(self, *scores: Tensor) -> Tensor:
        """A scalar that depends on the value and on the marginals, both non-linearly."""
        value, *mu = self.primitive.value_and_gradient(scores, self.constants, self.key, self.omega)
        squares = [(m**2).sum() for m in mu]
        return (value**2).sum() / 10 + torch.stack(squares).sum()

    def leaves(self) -> list[Tensor]:
        return [s.clone().requires_grad_() for s in self.scores]

    @property
    def all(self) -> tuple[int, ...]:
        return tuple(range(len(self.scores)))


def forest_case(kind: str = "shannon") -> Case:
    torch.manual_seed(0)
    theta = torch.randn(3, FOREST.num_parts, dtype=f64)
    theta[1, 5] = -math.inf
    goal = torch.tensor([5, 5, 4], dtype=torch.int32)
    return Case(ops.forest, [theta], [goal], FOREST.key, CODES[kind])


def chain_case(steps: bool, loss: bool = False, plain: bool = False) -> Case:
    torch.manual_seed(0)
    unary, transition = torch.randn(3, 4, 3, dtype=f64), torch.randn(3, 3, 3, 3, dtype=f64)
    unary[1, 1, 0] = transition[0, 0, 0, 1] = -math.inf
    lengths = torch.tensor([4, 2, 3])
    ends = torch.randn(2, 3, 3, dtype=f64)
    scores = [unary, transition if steps else transition[:, :1].contiguous(), *ends]
    if plain:
        return Case(dense.plain_chain, scores[:2], [lengths], "", CODES["shannon"])
    if not loss:
        return Case(dense.chain, scores, [lengths], "", CODES["shannon"])
    tags = torch.tensor([[1, 0, 0, 2], [2, 1, 99, -1], [0, 0, 1, 7]])
    return Case(dense.chain_loss, scores, [lengths, tags], "", CODES["shannon"])


def tree_case(key: str) -> Case:
    torch.manual_seed(0)
    scores = torch.randn(3, 4, 4, dtype=f64)
    scores[1, 1, 2] = -math.inf
    lengths = torch.tensor([3, 2, 3])
    return Case(matrix_tree.matrix_tree, [scores], [lengths], key, CODES["shannon"])


CASES: dict[str, Callable[[], Case]] = {
    "forest": forest_case,
    "forest-gini": lambda: forest_case("gini"),
    "forest-tsallis": lambda: forest_case("tsallis"),
    "forest-hard": lambda: forest_case("hard"),
    "chain-shared": lambda: chain_case(False),
    "chain-step": lambda: chain_case(True),
    "chain-plain": lambda: chain_case(True, plain=True),
    "chain-loss": lambda: chain_case(False, loss=True),
    "tree-single": lambda: tree_case("single"),
    "tree-multi": lambda: tree_case("multi"),
}
SMOOTH = [name for name in CASES if name != "forest-hard"]


@pytest.fixture(params=CASES)
def case(request) -> Case:
    return CASES[request.param]()


@pytest.fixture(params=SMOOTH)
def smooth(request) -> Case:
    return CASES[request.param]()


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def finite_leaves(case: Case) -> list[Tensor]:
    """Leaves without −inf, which finite differences cannot step from."""
    return [torch.where(s == -math.inf, 0.3, s).requires_grad_() for s in case.scores]


def reference(case: Case) -> tuple[Tensor, ...]:
    leaves = case.leaves()
    return torch.autograd.grad(case.total(*leaves), leaves)


# -- derivatives ---------------------------------------------------------------------------------


def test_gradcheck(case: Case) -> None:
    leaves = finite_leaves(case)
    assert gradcheck(case.value, leaves, check_batched_grad=True)
    assert gradcheck(case.value, leaves, check_forward_ad=True)
    assert gradcheck(case.marginals, leaves, check_forward_ad=True)


def test_gradgradcheck(smooth: Case) -> None:
    leaves = finite_leaves(smooth)
    assert gradgradcheck(smooth.value, leaves)
    assert gradgradcheck(smooth.marginals, leaves, atol=1e-4)


def test_hard_has_no_curvature() -> None:
    case = forest_case("hard")
    leaves = case.leaves()
    (first,) = torch.autograd.grad(case.value(*leaves).sum(), leaves, create_graph=True)
    assert torch.equal(first, first.round())
    (second,) = torch.autograd.grad((first * torch.randn_like(first)).sum(), leaves)
    assert not bool(second.any())


def test_forbidden_parts_stay_finite(case: Case) -> None:
    """Exact zeros at −inf, at first, second and third order."""
    leaves = case.leaves()
    inputs = leaves
    out = case.value(*leaves).sum()
    for order in (1, 2, 3):
        grads = torch.autograd.grad(out, inputs, create_graph=True, materialize_grads=True)
        for g, s in zip(grads, case.scores, strict=True):
            assert bool(g.isfinite().all()), f"order {order}"
            assert not bool(g[s == -math.inf].any()), f"order {order}"
        random = torch.Generator().manual_seed(order)
        weights = [torch.randn(g.shape, generator=random, dtype=f64) for g in grads]
        out = torch.stack([(g * w).sum() for g, w in zip(grads, weights, strict=True)]).sum()
        if not out.requires_grad:
            break


def test_func_grad(case: Case) -> None:
    for a, b in zip(torch.func.grad(case.total, case.all)(*case.scores), reference(case)):
        close(a, b)
    plain, value = torch.func.grad_and_value(lambda *s: case.value(*s).sum())(*case.scores)
    close(value, case.value(*case.scores).sum())
    close(plain, case.marginals(*case.scores)[0])


def test_vmap_of_grad(case: Case) -> None:
    stacked = [torch.stack([s, s + 1, s * 2]) for s in case.scores]
    mapped = torch.func.vmap(torch.func.grad(case.total, case.all))(*stacked)
    for i in range(3):
        one = torch.func.grad(case.total, case.all)(*[s[i] for s in stacked])
        for a, b in zip(mapped, one, strict=True):
            close(a[i], b)


def test_vmap_over_items(case: Case) -> None:
    """The batch of the op mapped away: constants are mapped too, scores in any dimension."""

    constants = len(case.constants)

    def one(*given: Tensor) -> Tensor:
        scores = given[constants:]
        return case.primitive.value(scores, given[:constants], case.key, case.omega)

    close(torch.func.vmap(one)(*case.constants, *case.scores), case.value(*case.scores))
    last = [s.movedim(0, -1) for s in case.scores]
    dims = (*[0] * constants, *[-1] * len(last))
    close(torch.func.vmap(one, dims)(*case.constants, *last), case.value(*case.scores))
    fixed = (*[None] * constants, 0, *[None] * (len(last) - 1))
    first, rest = [c[0] for c in case.constants], [s[0] for s in case.scores[1:]]
    expected = [one(*first, s, *rest) for s in case.scores[0]]
    mapped = torch.func.vmap(one, fixed)(*first, case.scores[0], *rest)
    close(mapped, torch.stack(expected))


def test_jacrev_twice(smooth: Case) -> None:
    def total(*scores: Tensor) -> Tensor:
        return smooth.value(*scores).sum()

    x = smooth.scores[0]
    hessian = torch.func.jacrev(torch.func.jacrev(total))(*smooth.scores)
    hessian = hessian.reshape(x.numel(), x.numel())
    close(hessian, hessian.mT)
    direction = torch.randn_like(x)
    _, along = torch.func.jvp(
        lambda s: torch.func.grad(total)(s, *smooth.scores[1:]), (x,), (direction,)
    )
    close(hessian @ direction.flatten(), along.flatten())
    by_class = torch.func.hessian(total)(*smooth.scores).reshape(x.numel(), x.numel())
    close(by_class, hessian)
    close(torch.func.jacfwd(total)(*smooth.scores), torch.func.jacrev(total)(*smooth.scores))


def test_jvp_against_differences(smooth: Case) -> None:
    scores = [s.detach() for s in finite_leaves(smooth)]
    torch.manual_seed(1)
    tangents = [torch.randn_like(s) for s in scores]
    step = 1e-6
    for function in (smooth.value, lambda *s: smooth.marginals(*s)[0]):
        _, slope = torch.func.jvp(function, tuple(scores), tuple(tangents))
        ahead, behind = (
            function(*[s + sign * step * t for s, t in zip(scores, tangents, strict=True)])
            for sign in (1, -1)
        )
        close(slope, (ahead - behind) / (2 * step), 1e-7)


def test_jvp_twice_works_or_raises(smooth: Case) -> None:
    x, rest = smooth.scores[0], smooth.scores[1:]
    direction = torch.randn_like(x)

    def slope(s: Tensor) -> Tensor:
        return torch.func.jvp(lambda t: smooth.value(t, *rest).sum(), (s,), (direction,))[1]

    expected = torch.func.grad(slope)(x)
    try:
        _, curvature = torch.func.jvp(slope, (x,), (direction,))
    except (RuntimeError, NotImplementedError):
        return
    close(curvature, (expected * direction).sum())


def test_dual_numbers(case: Case) -> None:
    import torch.autograd.forward_ad as fwd

    direction = [torch.ones_like(s) for s in case.scores]
    with fwd.dual_level():
        duals = [fwd.make_dual(s, d) for s, d in zip(case.scores, direction, strict=True)]
        tangent = fwd.unpack_dual(case.value(*duals)).tangent
    assert tangent is not None, "a silent zero"
    mu = case.marginals(*case.scores)
    close(tangent, sum(m.flatten(1).sum(-1) for m in mu))


# -- graphs --------------------------------------------------------------------------------------


def test_backward_twice(case: Case) -> None:
    leaves = case.leaves()
    value = case.total(*leaves)
    value.backward(retain_graph=True)
    first = [leaf.grad.clone() for leaf in leaves]
    value.backward()
    for leaf, g in zip(leaves, first, strict=True):
        close(leaf.grad, 2 * g, 0)
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()


def test_only_some_inputs_require_grad() -> None:
    case = chain_case(True)
    expected = reference(case)
    for i in range(2):
        scores = [s.clone().requires_grad_(j == i) for j, s in enumerate(case.scores)]
        (g,) = torch.autograd.grad(case.total(*scores), [scores[i]])
        close(g, expected[i])
        first, second, *_ = case.marginals(*scores)
        (g,) = torch.autograd.grad((first**2).sum() + (second**2).sum(), [scores[i]])
        assert bool(g.isfinite().all())


def test_unused_outputs(smooth: Case) -> None:
    """Marginals alone, the value alone, one of the marginals alone."""
    leaves = smooth.leaves()
    mu = smooth.marginals(*leaves)
    for m in mu:
        grads = torch.autograd.grad((m**2).sum(), leaves, retain_graph=True)
        assert all(bool(g.isfinite().all()) for g in grads) and bool(grads[0].any())


def test_no_grad_and_inference(case: Case) -> None:
    leaves = case.leaves()
    expected = case.value(*case.scores)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not case.value(*leaves).requires_grad
            assert torch.equal(case.value(*leaves), expected)
            mu = case.marginals(*leaves)
            assert not mu[0].requires_grad
    with torch.inference_mode():
        inside = [s.clone() for s in case.scores]
        assert torch.equal(case.value(*inside), expected)
    assert torch.equal(case.value(*inside), expected)  # inference tensors, used outside


def test_inputs_are_never_modified(case: Case) -> None:
    before = [s.clone() for s in (*case.scores, *case.constants)]
    versions = [s._version for s in (*case.scores, *case.constants)]
    case.value(*case.scores), case.marginals(*case.scores)
    leaves = case.leaves()
    torch.autograd.grad(case.total(*leaves), leaves)
    with sx.backend("naive"):
        case.value(*case.scores), case.marginals(*case.scores)
    for old, version, now in zip(before, versions, (*case.scores, *case.constants), strict=True):
        assert torch.equal(old, now) and now._version == version and not now.requires_grad


def test_autocast(case: Case) -> None:
    expected, grads = case.marginals(*case.scores), reference(case)
    single = [s.float() for s in case.scores]
    plain = case.marginals(*single)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(case.marginals(*case.scores), expected))
        assert all(torch.equal(a, b) for a, b in zip(case.marginals(*single), plain))
        leaves = case.leaves()
        out = case.total(*leaves)
    for a, b in zip(torch.autograd.grad(out, leaves), grads, strict=True):
        close(a, b)


def layouts(t: Tensor) -> dict[str, Tensor]:
    wide = t.new_full((*t.shape, 2), math.nan)
    wide[..., 1] = t
    return {
        "transposed": t.mT.contiguous().mT,
        "strided": wide[..., 1],
        "permuted": t.movedim(0, -1).contiguous().movedim(-1, 0),
        "offset": torch.cat([t.new_full((1, *t.shape[1:]), math.nan), t])[1:],
    }


@pytest.mark.parametrize("layout", ["transposed", "strided", "permuted", "offset"])
def test_layouts(case: Case, layout: str) -> None:
    expected, grads = case.marginals(*case.scores), reference(case)
    laid = [layouts(s)[layout] for s in case.scores]
    assert torch.equal(case.value(*laid), case.value(*case.scores))
    for a, b in zip(case.marginals(*laid), expected, strict=True):
        assert torch.equal(a, b)
    leaves = [s.detach().requires_grad_() for s in laid]
    for a, b in zip(torch.autograd.grad(case.total(*leaves), leaves), grads, strict=True):
        close(a, b)


def test_layouts_of_cotangents(smooth: Case) -> None:
    """Gradients that arrive expanded or transposed."""
    leaves = smooth.leaves()
    mu = smooth.marginals(*leaves)
    for g in (torch.ones(()).to(mu[0]).expand_as(mu[0]), torch.randn_like(mu[0]).mT.clone().mT):
        (a,) = torch.autograd.grad(mu[0], leaves[:1], g, retain_graph=True)
        (b,) = torch.autograd.grad(mu[0], leaves[:1], g.contiguous(), retain_graph=True)
        close(a, b, 1e-12)


def test_expanded_inputs(case: Case) -> None:
    """One item expanded over a batch of two dimensions, gradients summed back."""
    one = [s[:1] for s in case.scores]
    constants = [c[:1] for c in case.constants]
    wide = Case(
        case.primitive, one, [c.expand(4, 2, *c.shape[1:]) for c in constants], case.key, case.omega
    )
    leaves = [s.clone().requires_grad_() for s in one]
    expanded = [s.expand(4, 2, *s.shape[1:]) for s in leaves]
    grads = torch.autograd.grad(wide.value(*expanded).sum(), leaves)
    single = Case(case.primitive, one, constants, case.key, case.omega)
    for a, b in zip(grads, single.marginals(*one), strict=True):
        close(a, 8 * b)


def test_empty_batch(case: Case) -> None:
    none = Case(
        case.primitive, [s[:0] for s in case.scores], [c[:0] for c in case.constants], case.key,
        case.omega,
    )  # fmt: skip
    leaves = none.leaves()
    out = none.total(*leaves)
    grads = torch.autograd.grad(out, leaves)
    assert out == 0 and all(g.shape == s.shape for g, s in zip(grads, leaves, strict=True))


# -- compilers -----------------------------------------------------------------------------------

BACKENDS = ["aot_eager"] + (["inductor"] if shutil.which("g++") or shutil.which("clang++") else [])


@pytest.mark.parametrize("name", ["forest", "forest-gini", "chain-shared", "chain-step"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compile(name: str, backend: str) -> None:
    case = CASES[name]()
    torch.compiler.reset()
    compiled = torch.compile(case.total, fullgraph=True, backend=backend)
    leaves = case.leaves()
    value = compiled(*leaves)
    close(value, case.total(*case.scores))
    for a, b in zip(torch.autograd.grad(value, leaves), reference(case), strict=True):
        close(a, b)
    with torch.no_grad():
        close(compiled(*case.scores), case.total(*case.scores))


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("name", ["forest", "chain-shared"])
def test_compile_of_transforms(name: str, fullgraph: bool) -> None:
    """A transform inside a compiled function works or raises; a wrong number is out of the
    question (the op without its Function would be a constant to ``torch.func.grad``)."""
    case = CASES[name]()
    stacked = [torch.stack([s, 2 * s]) for s in case.scores]

    def gradient(*scores: Tensor) -> tuple[Tensor, ...]:
        return torch.func.grad(case.total, case.all)(*scores)

    def mapped(*scores: Tensor) -> tuple[Tensor, ...]:
        return (torch.func.vmap(lambda *s: case.value(*s))(*scores),)

    def slope(*scores: Tensor) -> tuple[Tensor, ...]:
        ones = tuple(torch.ones_like(s) for s in scores)
        return (torch.func.jvp(lambda *s: case.value(*s), scores, ones)[1],)

    for function, scores in ((gradient, case.scores), (mapped, stacked), (slope, case.scores)):
        torch.compiler.reset()
        compiled = torch.compile(function, fullgraph=fullgraph, backend="aot_eager")
        try:
            found = compiled(*scores)
        except (RuntimeError, NotImplementedError):  # Dynamo's errors are RuntimeErrors
            continue
        for a, b in zip(found, function(*scores), strict=True):
            close(a, b)


def test_compile_discrete() -> None:
    """Discrete queries of structures in one graph."""
    torch.manual_seed(0)
    unary, transition = torch.randn(2, 5, 3, dtype=f64), torch.randn(3, 3, dtype=f64)

    def queries(unary: Tensor, transition: Tensor) -> tuple[Tensor, ...]:
        chain = sx.LinearChain(unary, transition, lengths=torch.tensor([3, 4]))
        best = chain.topk(2)
        return chain.argmax(), best.structures, best.scores, chain.max_marginals(), chain.entropy()

    torch.compiler.reset()
    compiled = torch.compile(queries, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(unary, transition), queries(unary, transition), strict=True):
        close(a, b)
    for a, b in zip(
        compiled(unary[:, :4], transition), queries(unary[:, :4], transition), strict=True
    ):
        close(a, b)  # other sizes


@pytest.mark.parametrize("name", ["subset", "tree", "grammar"])
def test_compile_samples_of_other_batches(name: str) -> None:
    """The second batch makes its size symbolic."""
    make = {
        "subset": lambda x: sx.KSubset(x[..., 0], 2),
        "tree": lambda x: sx.DependencyTree(x),
        "grammar": lambda x: sx.PCFG(torch.zeros(2), torch.zeros(2, 7, 7), x),
    }[name]
    torch.compiler.reset()
    draw = torch.compile(lambda x: make(x).sample((4,)), fullgraph=True, backend="aot_eager")
    for batch in (2, 3, 5):
        x = torch.randn(batch, 5, 5)
        z = draw(x)
        assert z.shape[:2] == (4, batch) and make(x).log_prob(z).isfinite().all()


def test_compile_draws_no_forest() -> None:
    """Walks under other smoothings in one graph, of forests that nobody has drawn yet."""
    torch.manual_seed(0)
    x, transition = torch.randn(2, 7, 3, dtype=f64), torch.randn(3, 3, dtype=f64)
    z = sx.LinearChain(x, transition, smoothing=sx.Gini()).sample()

    def queries(x: Tensor) -> Tensor:
        chain = sx.LinearChain(x, transition, smoothing=sx.Gini(2.0))
        tree = sx.BinaryTree(x @ x.mT, smoothing=sx.Tsallis(1.5))
        other = sx.BinaryTree(x @ x.mT / 2, smoothing=sx.Tsallis(1.5))
        walks = chain.log_prob(z) + chain.entropy() + torch.distributions.kl_divergence(tree, other)
        return walks.sum() + tree.log_partition().sum()

    torch.compiler.reset()
    found = []
    for function in (torch.compile(queries, fullgraph=True, backend="aot_eager"), queries):
        topology._cache.clear()
        leaf = x.clone().requires_grad_()
        value = function(leaf)
        found.append([value.detach(), *torch.autograd.grad(value, leaf)])
    for a, b in zip(*found, strict=True):
        close(a, b)


def discrete_calls() -> dict[str, tuple]:
    case, chain = forest_case(), chain_case(True)
    theta, goal, key = case.scores[0], case.constants[0], FOREST.key
    uniform = torch.rand(2, 3, FOREST.longest, dtype=f64)
    directions = [torch.randn_like(s) for s in chain.scores]
    return {
        "argmax": (ops.argmax, (theta, goal, key, 12)),
        "argmax-narrow": (ops.argmax, (theta, goal, key, 4)),
        "sample": (ops.sample, (theta, goal, uniform, key, list(case.omega), 12)),
        "kbest": (ops.kbest, (theta, goal, key, 3, 12)),
        "max_marginals": (ops.max_marginals, (theta, goal, key, 12)),
        "chain_argmax": (dense.argmax, (*chain.scores, *chain.constants)),
        "forest_value": (
            case.primitive.value_op,
            ([theta], [goal], key, list(case.omega)),
        ),
        "forest_gradient": (
            case.primitive.gradient_op,
            ([theta], [goal], key, list(case.omega)),
        ),
        "forest_hvp": (
            case.primitive.hvp_op,
            ([theta], [torch.ones_like(theta)], [goal], key, list(case.omega)),
        ),
        "chain_value": (
            dense.chain.value_op,
            (chain.scores, chain.constants, "", list(chain.omega)),
        ),
        "chain_gradient": (
            dense.chain.gradient_op,
            (chain.scores, chain.constants, "", list(chain.omega)),
        ),
        "chain_hvp": (
            dense.chain.hvp_op,
            (chain.scores, directions, chain.constants, "", list(chain.omega)),
        ),
    }


def transposed(argument):
    """The same values in another layout."""
    if isinstance(argument, list) and argument and isinstance(argument[0], Tensor):
        return [transposed(t) for t in argument]
    if isinstance(argument, Tensor) and argument.dim() > 1:
        return argument.mT.contiguous().mT
    return argument


@pytest.mark.parametrize("layout", ["plain", "transposed", "float32", "empty", "nested"])
@pytest.mark.parametrize("name", discrete_calls())
def test_opcheck(name: str, layout: str) -> None:
    op, arguments = discrete_calls()[name]
    if layout == "transposed":
        arguments = tuple(transposed(a) for a in arguments)
    elif layout == "float32":
        arguments = tuple(map_tensors(a, lambda t: t.float()) for a in arguments)
    elif layout == "empty":
        at = 1 if name == "sample" else 0
        arguments = tuple(
            map_tensors(a, lambda t: t[:0], lambda t: t[:, :0] if at else t[:0]) for a in arguments
        )
    elif layout == "nested":
        arguments = tuple(
            map_tensors(a, lambda t: t[None].expand(2, *t.shape), lambda t: t) for a in arguments
        )
        if name == "sample":
            pytest.skip("uniform numbers carry the batch second")
    opcheck(op, arguments)


@pytest.mark.parametrize("items", [3, 0])
def test_opcheck_walks(items: int) -> None:
    case, code = forest_case(), list(CODES["gini"])
    theta, goal = case.scores[0][:items].clone(), case.constants[0][:items]
    q = dynamic._walk(theta, None, FOREST.key, code, FOREST.num_edges)
    for x, goals in ((theta, None), (q, goal)):
        leaf, g = x.clone().requires_grad_(), torch.randn_like(q)
        opcheck(dynamic._walk, (leaf, goals, FOREST.key, code, FOREST.num_edges))
        opcheck(dynamic._walk_back, (g, x, goals, FOREST.key, code))


def map_tensors(argument, scores, uniform=None):
    """Applies a function to scores and constants; ``uniform`` (3-d, sample first) by another."""
    if isinstance(argument, list) and argument and isinstance(argument[0], Tensor):
        return [map_tensors(t, scores) for t in argument]
    if not isinstance(argument, Tensor):
        return argument
    if uniform is not None and argument.shape[0] == 2 and argument.dim() == 3:
        return uniform(argument)
    if not argument.is_floating_point() and scores(torch.ones(1)).dtype == torch.float32:
        return scores(argument).to(argument.dtype)
    return scores(argument)


@pytest.mark.parametrize("name", ["argmax", "kbest", "max_marginals", "chain_argmax"])
def test_vmap_discrete(name: str) -> None:
    op, (theta, *rest) = discrete_calls()[name]
    tensors = [a for a in rest if isinstance(a, Tensor)]
    other = [a for a in rest if not isinstance(a, Tensor)]
    stacked = torch.stack([theta, 2 * theta, -theta])
    stacked = torch.where(stacked.abs() == math.inf, -math.inf, stacked)

    def listed(out) -> list[Tensor]:
        return list(out) if isinstance(out, list | tuple) else [out]

    for dim in (0, 1, -1):
        mapped = listed(
            torch.func.vmap(lambda t: op(t, *tensors, *other), dim)(stacked.movedim(0, dim))
        )
        for i in range(3):
            for a, b in zip(mapped, listed(op(stacked[i], *tensors, *other)), strict=True):
                torch.testing.assert_close(a[i], b, rtol=0, atol=0, equal_nan=True)
    everything = torch.func.vmap(lambda *t: op(*t, *other))(theta, *tensors)
    for a, b in zip(listed(everything), listed(op(theta, *tensors, *other)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_vmap_sample() -> None:
    op, (theta, goal, uniform, *rest) = discrete_calls()["sample"]
    expected = op(theta, goal, uniform, *rest)
    items = torch.func.vmap(lambda t, g, u: op(t, g, u, *rest), (0, 0, 1), 1)
    assert torch.equal(items(theta, goal, uniform), expected)
    stacked = torch.stack([theta, theta])
    for u, dim in ((uniform, None), (torch.stack([uniform, uniform], -1), -1)):
        mapped = torch.func.vmap(lambda t, v: op(t, goal, v, *rest), (0, dim))(stacked, u)
        assert torch.equal(mapped[0], expected) and torch.equal(mapped[1], expected)


def test_vmap_of_structures() -> None:
    torch.manual_seed(0)
    unary, transition = torch.randn(4, 5, 3, dtype=f64), torch.randn(3, 3, dtype=f64)
    lengths = torch.tensor([2, 5, 1, 4])
    chain = sx.LinearChain(unary, transition, lengths=lengths)

    def one(u: Tensor, length: Tensor):
        s = sx.LinearChain(u, transition, lengths=length)
        return s.log_partition(), s.marginals(), s.argmax(), s.topk(2).scores, s.entropy()

    both = torch.func.vmap(one)(unary, lengths)
    whole = (
        chain.log_partition(), chain.marginals(), chain.argmax(), chain.topk(2).scores,
        chain.entropy(),
    )  # fmt: skip
    for a, b in zip(both, whole, strict=True):
        close(a, b)


# -- structures ----------------------------------------------------------------------------------


def test_one_graph_for_value_and_marginals() -> None:
    torch.manual_seed(0)
    unary = torch.randn(2, 5, 3, dtype=f64, requires_grad=True)
    chain = sx.LinearChain(unary, torch.randn(3, 3, dtype=f64))
    loss = chain.log_partition().sum() + (chain.marginals() ** 2).sum() + chain.entropy().sum()
    loss.backward()
    copy = unary.detach().clone().requires_grad_()
    again = [sx.LinearChain(copy, chain.transition) for _ in range(3)]
    parts = [
        again[0].log_partition().sum(),
        (again[1].marginals() ** 2).sum(),
        again[2].entropy().sum(),
    ]
    for part in parts:
        part.backward()
    close(unary.grad, copy.grad)


def test_forest_may_be_collected_before_backward() -> None:
    def loss(scores: Tensor) -> Tensor:
        forest = diamond()
        s = sx.Hyperpath(forest, scores)
        return s.log_partition().sum() + (s.marginals() ** 2).sum() + s.entropy().sum()

    torch.manual_seed(0)
    scores = torch.randn(2, 12, dtype=f64, requires_grad=True)
    out = loss(scores)
    gc.collect()
    (first,) = torch.autograd.grad(out, scores, create_graph=True)
    gc.collect()
    (second,) = torch.autograd.grad((first**2).sum(), scores)
    assert bool(first.isfinite().all()) and bool(second.isfinite().all())
    hessian = torch.func.jacrev(torch.func.jacrev(loss))(scores.detach())
    assert bool(hessian.isfinite().all())


def test_answers_are_the_callers_to_change() -> None:
    """Changing an answer in place, or asking a gradient of it, changes no later answer."""
    torch.manual_seed(0)
    chain = sx.LinearChain(torch.randn(5, 3, dtype=f64), torch.randn(3, 3, dtype=f64))
    expected = chain.marginals().clone(), chain.log_partition().clone()
    chain.marginals().zero_()
    chain.log_partition().add_(1)
    assert torch.equal(chain.marginals(), expected[0])
    assert torch.equal(chain.log_partition(), expected[1])
    chain.marginals().requires_grad_()
    assert not chain.marginals().requires_grad and not chain.entropy().requires_grad


def test_answers_of_inference_mode_are_not_kept() -> None:
    chain = sx.LinearChain(torch.randn(5, 3), torch.randn(3, 3))
    with torch.inference_mode():
        chain.marginals(), chain.entropy()
    weight = torch.ones(5, 3, requires_grad=True)
    (weight * chain.marginals()).sum().backward()
    assert bool(weight.grad.isfinite().all())


def test_answers_follow_the_backend_and_the_scores() -> None:
    torch.manual_seed(0)
    unary = torch.randn(5, 3, dtype=f64)
    chain = sx.LinearChain(unary, torch.randn(3, 3, dtype=f64))
    first = chain.marginals().clone()
    seen = []
    original = dense._engine
    try:
        dense._engine = lambda scores: seen.append(1) or original(scores)
        with sx.backend("naive"):
            close(chain.marginals(), first)
        assert not seen
        unary.mul_(2)
        changed = chain.marginals()
        assert seen
    finally:
        dense._engine = original
    close(changed, sx.LinearChain(unary, chain.transition).marginals())
    unary_again = unary.clone().requires_grad_()
    live = sx.LinearChain(unary_again, chain.transition)
    with torch.no_grad():
        live.marginals()
    assert live.marginals().requires_grad and live.log_partition().requires_grad


@pytest.mark.parametrize("omega", [sx.Shannon(), sx.Gini()], ids=str)
def test_compile_over_sizes(omega: sx.Smoothing) -> None:
    """A ragged corpus: shapes that change from call to call turn symbolic, without a break."""
    torch.manual_seed(0)
    transition = torch.randn(3, 3, dtype=f64)

    def step(unary: Tensor, lengths: Tensor) -> Tensor:
        chain = sx.LinearChain(unary, transition, lengths=lengths, smoothing=omega)
        return chain.log_partition().sum() + (chain.marginals() ** 2).sum()

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for n, items in ((4, 2), (6, 2), (3, 3), (9, 5)):
        unary = torch.randn(items, n, 3, dtype=f64, requires_grad=True)
        lengths = torch.randint(1, n + 1, (items,))
        (a,) = torch.autograd.grad(compiled(unary, lengths), unary)
        (b,) = torch.autograd.grad(step(unary, lengths), unary)
        close(a, b)
        close(compiled(unary.detach(), lengths), step(unary.detach(), lengths))


def copies_by_torch(run: Callable[[], object]) -> int:
    """How many copies torch makes."""
    run()  # compiles
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        run()
    return sum(event.count for event in found.key_averages() if event.key == "aten::copy_")


STRIDED: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "sparsemax": ((6, 20), sx.sparsemax),
    "entmax": ((2, 3, 20), sx.entmax),
    "chain": ((2, 4, 3, 6), lambda t: sx.LinearChain(torch.zeros(2, 5, 3), t).marginals()),
    "batches": ((2, 3, 5, 8), lambda t: sx.Alignment(t).marginals()),
    "ctc": ((2, 5, 8), lambda t: sx.CTC(t, torch.tensor([[1, 2]] * 2)).marginals()),
    "matchings": ((2, 4, 8), lambda t: sx.Assignment(t).argmax()),
    "argmax": ((2, 4, 8), lambda t: sx.LinearChain(t, torch.zeros(4, 4)).argmax_tags()),
}


@pytest.mark.parametrize("name", STRIDED)
def test_scores_with_strides_are_not_copied_by_torch(name: str) -> None:
    """It would use all its threads, which takes many times as long as a small copy."""
    shape, run = STRIDED[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    sliced = x[..., ::2]
    whole = sliced.contiguous()
    torch.testing.assert_close(run(sliced), run(whole))
    assert copies_by_torch(lambda: run(sliced)) == copies_by_torch(lambda: run(whole))
