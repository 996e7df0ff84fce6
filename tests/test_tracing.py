"""What records computations: a trace is right on other inputs, or refused by name."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from estimators_table import ESTIMATORS
from maps_table import MAPS
from table import ROWS
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import structmax as sx

f64 = torch.float64
REFUSED = "cannot be traced by torch.jit.trace"

pytestmark = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit")


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=f64)


def tensors_in(answer: Any) -> tuple[Tensor, ...]:
    if isinstance(answer, Tensor):
        return (answer,)
    return tuple(t for part in answer for t in tensors_in(part))


def loaded(module: Any) -> Any:
    """A traced function, saved and loaded."""
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def leaves(given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.detach().clone().requires_grad_(t.is_floating_point()) for t in given)


def check_trace(
    function: Callable[..., Any],
    example: tuple[Tensor, ...],
    other: tuple[Tensor, ...],
    differentiate: bool = False,
) -> None:
    """Traced at the example, a function answers for other inputs as it does itself; so does its
    gradient."""

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        return tensors_in(function(*given))

    with torch.set_grad_enabled(differentiate):
        traced = loaded(torch.jit.trace(run, leaves(example), check_trace=False))
        one, two = leaves(other), leaves(other)
        torch.manual_seed(3)
        answers = tensors_in(traced(*one))
        torch.manual_seed(3)
        expected = run(*two)
    assert len(answers) == len(expected)
    for a, b in zip(answers, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)
    if differentiate:
        weights = [torch.randn_like(b) for b in expected]
        slopes = []
        for given, found in ((one, answers), (two, expected)):
            total = sum(
                (torch.where(a.isfinite(), a, 0.0) * w).sum() for a, w in zip(found, weights)
            )
            live = [t for t in given if t.requires_grad]
            slopes.append(torch.autograd.grad(total, live, materialize_grads=True))
        for a, b in zip(*slopes, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


# -- maps ----------------------------------------------------------------------------------------

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: row.map for name, row in MAPS.items()},
    "csparsemax": lambda x: sx.csparsemax(x, 0.5),
    "csoftmax": lambda x: sx.csoftmax(x, 0.5),
    "fusedmax": lambda x: sx.fusedmax(x, 0.3),
    "oscarmax": lambda x: sx.oscarmax(x, 0.3),
    "learned-alpha": lambda x: sx.entmax(x, 1 + x[:, :1].exp()),
    "other-dim": lambda x: sx.sparsemax(x, dim=0, mask=x < 1.5),
    **{
        f"smoothed-max-{omega}": lambda x, omega=omega: sx.smoothed_max(x, omega)
        for omega in (sx.Hard(), sx.Shannon(0.5), sx.Gini(), sx.Tsallis(1.3, 2.0))
    },
}


@pytest.mark.parametrize("differentiate", [False, True], ids=["values", "gradients"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_traced_maps(name: str, differentiate: bool) -> None:
    """Of rows of another length and number, too."""
    torch.manual_seed(0)
    check_trace(FUNCTIONS[name], (randn(3, 5),), (randn(4, 7),), differentiate)


@pytest.mark.parametrize("differentiate", [False, True], ids=["values", "gradients"])
def test_traced_entmax_loss(differentiate: bool) -> None:
    torch.manual_seed(0)
    check_trace(
        lambda x, y: sx.losses.entmax_loss(x, y, 1.5),
        (randn(3, 5), torch.tensor([0, 1, 2])),
        (randn(3, 5), torch.tensor([4, -100, 3])),
        differentiate,
    )


# -- structures ----------------------------------------------------------------------------------


def queries(s: sx.Structure) -> dict[str, Callable[[Any], Any]]:
    """Every query, as a function of a structure of these sizes."""
    z = s.argmax().detach()
    part = torch.zeros(s.event_shape, dtype=torch.bool)
    used = (z.reshape(-1, *s.event_shape)[0] > 0).nonzero()
    part[tuple(used[len(used) // 2].tolist()) if len(used) else (0,) * part.dim()] = True
    return {
        "argmax": lambda t: t.argmax(),
        "log_partition": lambda t: t.log_partition(),
        "marginals": lambda t: t.marginals(),
        "sample": lambda t: t.sample((3,)),
        "topk": lambda t: t.topk(2),
        "max_marginals": lambda t: t.max_marginals(),
        "log_prob": lambda t: t.log_prob(z),
        "score": lambda t: t.score(z),
        "entropy": lambda t: t.entropy(),
        "cross_entropy": lambda t: t.cross_entropy(s),
        "expected_cost": lambda t: t.expected_cost(torch.ones(s.event_shape, dtype=s.dtype)),
        "mbr": lambda t: t.mbr(),
        "condition": lambda t: t.condition(exclude=part).log_partition(),
        "edge_marginals": lambda t: t.edge_marginals(),
        "argmax_tags": lambda t: t.argmax_tags(),
        "items": lambda t: t[0].log_partition(),
        "ranked_support": lambda t: next(iter(t.ranked_support())),
        "enumerate_support": lambda t: t.enumerate_support(),
        "sparsemap": lambda t: t.sparsemap().marginals,
        "decode": lambda t: (t.decode(t.argmax()), t.argmax())[1],
        "draw": lambda t: (t.draw(), t.argmax())[1],
    }


READ = {"ranked_support", "enumerate_support", "sparsemap", "decode", "draw"}
SMOOTH = ["log_partition", "marginals", "log_prob", "entropy", "expected_cost"]


def pair(name: str) -> tuple[sx.Structure, list[str], tuple[Tensor, ...], tuple[Tensor, ...]]:
    """A row, the names of its tensors, these, and others of their shapes."""
    torch.manual_seed(0)
    s = ROWS[name]()
    torch.manual_seed(1)
    other = ROWS[name]()
    names = list(s._tensors())
    return s, names, *(tuple(t for t, _ in x._tensors().values()) for x in (s, other))


def known(s: sx.Structure, query: str) -> bool:
    if query in sx.structures.base.Structure.queries:
        return s.supports(query)
    return query in READ or query == "items" or hasattr(s, query)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name.endswith("/shannon") else pytest.mark.slow)
        for name in ROWS
    ],
)
def test_traced_queries(name: str) -> None:
    s, names, example, other = pair(name)
    for query, ask in queries(s).items():
        if not known(s, query):
            continue

        def function(*given: Tensor, ask: Callable[[Any], Any] = ask) -> Any:
            return ask(s._rebuild(**dict(zip(names, given, strict=True))))

        try:
            function(*example), function(*other)
        except (IndexError, ValueError, NotImplementedError):
            continue  # what this structure refuses anyway
        if query in READ:
            with pytest.raises(RuntimeError, match=rf"{s._name}\.{query} {REFUSED}"):
                torch.jit.trace(lambda *t: tensors_in(function(*t)), example, check_trace=False)
        else:
            check_trace(function, example, other)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name.endswith("-shared/shannon") else pytest.mark.slow)
        for name in ROWS
        if not name.endswith("/hard")
    ]
    + ["nonprojective/shannon", "grid-8/gini", "subset/shannon"],
)
def test_gradients_of_traced_queries(name: str) -> None:
    s, names, example, other = pair(name)
    every = queries(s)
    for query in SMOOTH:
        if s.supports(query):

            def function(*given: Tensor, ask: Callable[[Any], Any] = every[query]) -> Any:
                return ask(s._rebuild(**dict(zip(names, given, strict=True))))

            check_trace(function, example, other, differentiate=True)


def test_traced_structures_read_lengths_anew() -> None:
    """Lengths are inputs like others; an impossible one gives NaN for its item."""

    def function(x: Tensor, lengths: Tensor) -> Tensor:
        return sx.LinearChain(x, torch.zeros(3, 3, dtype=f64), lengths=lengths).marginals()

    example = randn(3, 5, 3), torch.tensor([5, 5, 5])
    check_trace(function, example, (randn(3, 5, 3), torch.tensor([1, 3, 4])))
    traced = torch.jit.trace(function, example)
    found = traced(randn(3, 5, 3), torch.tensor([2, 99, -1]))
    assert found[0].isfinite().all() and found[1:].isnan().all()


@pytest.mark.parametrize("shape", [(3, 5, 4), (2, 6, 4), (2, 4, 4)])
def test_traced_structures_refuse_other_sizes(shape: tuple[int, ...]) -> None:
    traced = torch.jit.trace(
        lambda x: sx.BinaryTree(
            x.new_zeros(*x.shape[:2], x.shape[1]) + x.sum(-1)[..., None]
        ).marginals(),
        randn(2, 5, 4),
    )
    with pytest.raises(RuntimeError, match=r"BinaryTree: traced by torch\.jit\.trace with scores"):
        traced(randn(*shape))


def test_traced_structures_refuse_other_dtypes() -> None:
    traced = torch.jit.trace(lambda x: sx.Choice(x).argmax(), randn(2, 5))
    with pytest.raises(RuntimeError, match=r"of torch\.float64, got .* of torch\.float32"):
        traced(torch.zeros(2, 5))


# -- tensors without values, and another default device ---

SHANNON = [
    pytest.param(name, marks=() if name.endswith("/shannon") else pytest.mark.slow) for name in ROWS
]


def moved(function: Callable[[Any], Any], to: Callable[[Tensor], Tensor]) -> Any:
    """A query with what it has taken from outside made by ``to``."""
    for cell in function.__closure__ or ():
        if isinstance(cell.cell_contents, Tensor):
            cell.cell_contents = to(cell.cell_contents)
    return function


def answers_without_values(s: sx.Structure, to: Callable[[Tensor], Tensor]) -> None:
    """Every query of a structure whose tensors have no values: an answer of the right shape, dtype
    and kind, or an error that names it."""
    expected = {}
    for query, ask in queries(s).items():
        if known(s, query) and query not in ("cross_entropy", "expected_cost"):
            try:
                expected[query] = tensors_in(ask(s))
            except (IndexError, ValueError, NotImplementedError):
                continue  # what this structure refuses anyway
    every = {name: moved(ask, to) for name, ask in queries(s).items()}
    bare = s._rebuild(**{name: to(t) for name, (t, _) in s._tensors().items()})
    example = to(torch.zeros(1))
    for query, wanted in expected.items():
        if query in READ:
            with pytest.raises(RuntimeError, match=rf"{s._name}\.{query} reads values"):
                every[query](bare)
            continue
        found = tensors_in(every[query](bare))
        assert [t.shape for t in found] == [t.shape for t in wanted], query
        assert [t.dtype for t in found] == [t.dtype for t in wanted], query
        assert all(t.device == example.device and type(t) is type(example) for t in found), query


@pytest.mark.parametrize("name", SHANNON)
def test_meta_tensors(name: str) -> None:
    answers_without_values(pair(name)[0], lambda t: t.to("meta"))


@pytest.mark.parametrize("name", SHANNON)
def test_fake_tensors(name: str) -> None:
    """Outside of their mode, too."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    answers_without_values(pair(name)[0], mode.from_tensor)


@pytest.mark.parametrize("name", SHANNON)
def test_another_default_device(name: str) -> None:
    """Tensors on the CPU are answered as ever, wherever new tensors would be made."""
    s = pair(name)[0]
    for query, ask in queries(s).items():
        if not known(s, query) or query in ("sample", "draw", "expected_cost"):
            continue
        try:
            expected = tensors_in(ask(s))
        except (IndexError, ValueError, NotImplementedError):
            continue  # what this structure refuses anyway
        again = s._rebuild(**{name: t for name, (t, _) in s._tensors().items()})
        with torch.device("meta"):
            found = tensors_in(ask(again))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize("name", MAPS)
def test_maps_of_meta_tensors(name: str) -> None:
    for x in (torch.zeros(2, 5, device="meta"), FakeTensorMode().from_tensor(torch.zeros(2, 5))):
        p = MAPS[name].map(x)
        assert p.shape == (2, 5) and p.device == x.device and type(p) is type(x)


# -- torch.export ---------------------------------------------------------------------------------


def chain_of(x: Tensor) -> sx.LinearChain:
    return sx.LinearChain(x, torch.eye(4, dtype=f64), lengths=(x[:, :, 0] > -9).sum(1))


def tree_of(x: Tensor) -> sx.DependencyTree:
    return sx.DependencyTree(x @ x.mT)  # type: ignore[abstract]


def alignment_of(x: Tensor) -> sx.Alignment:
    return sx.Alignment(x @ x.mT, band=2)


EXPORTED: dict[str, Callable[[Tensor], Any]] = {
    "chain-log_partition": lambda x: chain_of(x).log_partition(),
    "chain-marginals": lambda x: chain_of(x).marginals(),
    "chain-edge_marginals": lambda x: chain_of(x).edge_marginals(),
    "chain-entropy": lambda x: chain_of(x).entropy(),
    "chain-argmax": lambda x: chain_of(x).argmax(),
    "chain-argmax_tags": lambda x: chain_of(x).argmax_tags(),
    "chain-log_prob": lambda x: chain_of(x).log_prob(x.argmax(-1)),
    "chain-mbr": lambda x: chain_of(x).mbr(),
    "tree-log_partition": lambda x: tree_of(x).log_partition(),
    "tree-marginals": lambda x: tree_of(x).marginals(),
    "tree-entropy": lambda x: tree_of(x).entropy(),
    "tree-argmax": lambda x: tree_of(x).argmax(),
    "tree-topk": lambda x: tree_of(x).topk(2),
    "tree-max_marginals": lambda x: tree_of(x).max_marginals(),
    "alignment-log_partition": lambda x: alignment_of(x).log_partition(),
    "alignment-marginals": lambda x: alignment_of(x).marginals(),
    "alignment-argmax": lambda x: alignment_of(x).argmax(),
    "alignment-entropy": lambda x: alignment_of(x).entropy(),
}


@pytest.mark.parametrize(
    "strict",
    [pytest.param(False, id="default"), pytest.param(True, id="strict", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", EXPORTED)
def test_export_with_a_dynamic_batch_and_length(name: str, strict: bool) -> None:
    """Saved, loaded, and right at other sizes."""

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return tensors_in(EXPORTED[name](x))

    batch, length = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("n", min=3, max=64)
    sizes = {"x": {0: batch, 1: length}}
    torch.manual_seed(0)
    program = torch.export.export(Model(), (randn(3, 5, 4),), dynamic_shapes=sizes, strict=strict)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    module = torch.export.load(buffer).module()
    for shape in ((3, 5, 4), (2, 9, 4), (7, 3, 4)):
        x = randn(*shape)
        x[0, -1] = -10.0  # a shorter chain
        for a, b in zip(module(x), Model()(x), strict=True):
            torch.testing.assert_close(a, b)


# -- the layer, and what runs Python --------------------------------------------------------------


class Tagger(torch.nn.Module):
    """A layer on a CRF, one of whose queries is its answer."""

    def __init__(self, ask: Callable[..., Tensor]) -> None:
        super().__init__()
        self.crf, self.ask = sx.nn.CRF(3, batch_first=True).double(), ask

    def forward(self, *given: Tensor) -> Tensor:
        return self.ask(self.crf, *given)


CRF: dict[str, Callable[..., Tensor]] = {
    "loss": lambda crf, x, tags, mask: -crf(x, tags, mask, reduction="token_mean"),
    "loss-without-mask": lambda crf, x, tags, mask: -crf(x, tags),
    "marginals": lambda crf, x, tags, mask: crf.marginals(x, mask),
    "tags": lambda crf, x, tags, mask: crf.structure(x, mask).argmax_tags(),
}


@pytest.mark.parametrize("name", CRF)
def test_traced_crf(name: str) -> None:
    """With other scores, tags and masks, with holes in them; saved with its parameters."""
    torch.manual_seed(0)
    model = Tagger(CRF[name])
    one = torch.tensor([[True] * 4, [True, True, False, False]])
    two = torch.tensor([[True, False, True, True], [True, True, True, False]])
    example = randn(2, 4, 3), torch.randint(3, (2, 4)), one
    other = randn(2, 4, 3), torch.randint(3, (2, 4)), two
    traced = loaded(torch.jit.trace(model, example))
    torch.testing.assert_close(traced(*other), model(*other))
    if name != "tags":
        for network in (traced, model):
            network(*other).square().sum().backward()
        pairs = zip(traced.parameters(), model.parameters(), strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a.grad, b.grad)


def test_decode_of_a_traced_crf_is_refused() -> None:
    model = Tagger(lambda crf, x: torch.tensor(crf.decode(x)))
    with pytest.raises(RuntimeError, match=f"CRF.decode {REFUSED}"):
        torch.jit.trace(model, randn(2, 4, 3))


WITH_GRADIENT = {"marginals", "perturb-and-parse", "straight-through-beam"}  # by autograd alone


@pytest.mark.parametrize("name", ESTIMATORS)
def test_traced_estimators(name: str) -> None:
    """Without a gradient the answer is recorded; one that is made up is refused."""
    torch.manual_seed(0)
    example, other = randn(3, 5), randn(3, 5)

    def function(x: Tensor) -> Tensor:
        return ESTIMATORS[name]()(sx.Choice(x))

    try:
        function(example)
    except TypeError:
        pytest.skip("an estimator of a loss")
    if name == "sparsemap":
        with pytest.raises(RuntimeError, match=f"Choice.sparsemap {REFUSED}"):
            check_trace(function, (example,), (other,))
        return
    check_trace(function, (example,), (other,))
    if name in WITH_GRADIENT:
        check_trace(function, (example,), (other,), differentiate=True)
    else:
        with pytest.raises(RuntimeError, match=f"the gradient of an estimator {REFUSED}"):
            check_trace(function, (example,), (other,), differentiate=True)


class Even(torch.nn.Module):
    """A policy that finds all merges as good."""

    def start(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        return inputs.flatten(1).sum(1)

    def scores(self, state: Tensor) -> Tensor:
        return torch.stack([state, -state], 1)

    def advance(self, state: Tensor, action: Tensor) -> Tensor:
        return state + 1


def of_a_graph(x: Tensor) -> Tensor:
    graph = sx.FactorGraph()
    graph.xor(graph.variables(x))
    return graph.marginals().values


REFUSING: dict[str, Callable[[Tensor], Tensor]] = {
    "EasyFirst": lambda x: sx.EasyFirst(Even(), x[..., None]).greedy().log_prob,
    "Assignment.sinkhorn": lambda x: sx.Assignment(x).sinkhorn(),
    "FactorGraph.marginals": of_a_graph,
    "sparsemap": lambda x: sx.sparsemap_oracle(lambda s: torch.eye(4)[s.argmax(-1)], x).marginals,
}


@pytest.mark.parametrize("name", REFUSING)
def test_what_reads_values_is_refused_by_name(name: str) -> None:
    with pytest.raises(RuntimeError, match=f"{name} {REFUSED}"):
        torch.jit.trace(REFUSING[name], randn(4, 4), check_trace=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["sparsemax", "tags"])
def test_onnx_without_dynamo_names_the_op(name: str) -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return sx.sparsemax(x)

    model = Layer() if name == "sparsemax" else Tagger(CRF["tags"])
    x = randn(2, 4, 3)
    given = (x,) if name == "sparsemax" else (x, torch.zeros(2, 4), torch.ones(2, 4).bool())
    with pytest.raises(torch.onnx.OnnxExporterError, match="structmax::"):
        torch.onnx.export(model, given, io.BytesIO(), dynamo=False)
