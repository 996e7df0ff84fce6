"""What users put around a structure: checkpoints, autocast, compilation, changes of its scores."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import structmax as sx
from structmax.compat import torch_struct
from structmax.testing import check_structure

TRANSITION = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
TAGS = torch.tensor([[0, 1, 2, 0, 1], [2, 2, 1, 0, 0]])
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "value": lambda x: sx.LinearChain(x, TRANSITION).log_partition(),
    "marginals": lambda x: sx.LinearChain(x, TRANSITION).marginals().pow(2),
    "crf": lambda x: sx.losses.crf(sx.LinearChain(x, TRANSITION), TAGS),
    "binary": lambda x: sx.BinaryTree(x @ x.mT).entropy(),
    "tree": lambda x: sx.DependencyTree(x @ x.mT).entropy(),
    "sparsemap": lambda x: sx.DependencyTree(x @ x.mT).sparsemap().marginals.pow(2),
    "soft-dtw": lambda x: sx.losses.SoftDTW()(x, 2 * x.detach()),
    "entmax": lambda x: sx.entmax(x, 1.5).pow(2),
    "ctc": lambda x: sx.CTC(x.log_softmax(-1), torch.tensor([[1, 2], [2, 1]])).log_partition(),
}


def inputs() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 5, 3).requires_grad_()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_checkpoints(name: str) -> None:
    """Activations that are computed again; the recommended kind gives them out once."""
    x, f = inputs(), FUNCTIONS[name]
    (expected,) = torch.autograd.grad(f(x).sum(), x)
    (found,) = torch.autograd.grad(checkpoint(f, x, use_reentrant=False).sum(), x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_an_omega_from_outside_is_annealed_in_compiled_code() -> None:
    class Model(nn.Module):
        omega: sx.Smoothing = sx.Shannon()

        def forward(self, x: Tensor) -> Tensor:
            return sx.LinearChain(x, TRANSITION, smoothing=self.omega).entropy()

    model = Model()
    compiled = torch.compile(model, backend="aot_eager")
    for gamma in (1.0, 0.5, 0.25):
        model.omega = sx.Shannon(gamma)
        x = inputs()
        (expected,) = torch.autograd.grad(model(x).sum(), x)
        (found,) = torch.autograd.grad(compiled(x).sum(), x)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("shape", [(3, 3), (2, 4)], ids=str)
def test_relaxed_matchings_in_forward_mode_and_twice(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x, v = torch.randn(2, *shape, dtype=torch.float64)

    def sinkhorn(x: Tensor) -> Tensor:
        return sx.Assignment(x).sinkhorn(0.5)

    (expected,) = torch.autograd.functional.jvp(sinkhorn, x, v)[1:]
    torch.testing.assert_close(torch.func.jvp(sinkhorn, (x,), (v,))[1], expected)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(sinkhorn(forward_ad.make_dual(x, v))).tangent
    torch.testing.assert_close(tangent, expected)
    for answer in range(2):
        leaf = x.clone().requires_grad_()
        assert torch.autograd.gradgradcheck(lambda x: sx.Assignment(x).bethe()[answer], leaf)  # noqa: B023


def test_counts_of_transitions_under_autocast() -> None:
    """Above 256 bfloat16 does not know them."""
    torch.manual_seed(0)
    chain = sx.LinearChain(torch.randn(3000, 2), torch.randn(2, 2))
    tags = torch.randint(2, (3000,))
    for loss in (sx.losses.perceptron, sx.losses.hinge):
        expected = loss(chain, tags)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(loss(chain, tags), expected)


def test_scores_changed_before_a_second_derivative() -> None:
    x = torch.randn(2, 5, requires_grad=True)
    target = torch.tensor([[1.0, 1, 0, 0, 0], [0, 0, 1, 1, 0]])
    loss = sx.losses.sparsemap(sx.KSubset(x, 2), target)
    with torch.no_grad():
        x.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("name", ["DependencyCRF", "NonProjectiveDependencyCRF", "TreeCRF"])
def test_potentials_that_change(name: str) -> None:
    """In place, or by being watched later: a distribution of the peer's face follows them."""
    torch.manual_seed(0)
    make: Any = getattr(torch_struct, name)
    p = torch.randn(2, 4, 4, *[1] * (name == "TreeCRF"))
    law = make(p)
    z = law.argmax
    p.mul_(2)
    torch.testing.assert_close(law.log_prob(z), make(p.clone()).log_prob(z))
    leaf = p.clone().requires_grad_()
    (expected,) = torch.autograd.grad(make(leaf).log_prob(z).sum(), leaf)
    p.requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(law.log_prob(z).sum(), p)[0], expected)


class Annealed(nn.Module):
    """A policy of fixed scores over a temperature that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([0.0, 1.0]))
        self.register_buffer("temperature", torch.tensor(1.0))

    def start(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        return torch.zeros(len(inputs))

    def scores(self, state: Tensor) -> Tensor:
        return (self.weights / self.temperature).expand(len(state), 2)

    def advance(self, state: Tensor, action: Tensor) -> Tensor:
        return state


def test_a_rollout_is_forgotten_when_a_buffer_changes() -> None:
    policy = Annealed()
    structure = sx.ShiftReduce(policy, torch.zeros(1, 4, 1))
    z = structure.sample()
    policy.temperature.fill_(0.1)
    expected = sx.ShiftReduce(policy, structure.inputs).log_prob(z)
    torch.testing.assert_close(structure.log_prob(z), expected)


def test_derivations_that_share_a_z_without_shannon() -> None:
    draw = sx.ForestBuilder()
    x = draw.node()
    draw.edge(x, part=0)
    y = draw.node()
    draw.edge(y, part=0)
    draw.edge(y, part=1)
    goal = draw.node()
    draw.edge(goal, x)
    draw.edge(goal, y)
    forest, scores = draw.build(), torch.tensor([0.2, 0.0])
    exact = sx.estimators.ExactExpectation()
    exact.loss(sx.Hyperpath(forest, scores), lambda z: z[..., 1])
    with pytest.raises(ValueError, match=r"sum to 1\.07.*same z"):
        exact.loss(sx.Hyperpath(forest, scores, smoothing=sx.Gini()), lambda z: z[..., 1])


def test_the_contract_sees_wrong_values_and_perturbations() -> None:
    def contract(kind: type[sx.Choice]) -> None:
        check_structure(
            lambda: kind(torch.randn(3, dtype=torch.float64), smoothing=sx.Gini()),
            skip=("compile",),
        )

    class Steep(sx.Choice):
        def log_partition(self) -> Tensor:
            return super().log_partition() + 0.3 * (self.scores[0] - self.scores[1]) ** 2

        def _replace_primary(self, scores: Tensor) -> Steep:
            return Steep(scores, smoothing=self.smoothing)

    class Twice(sx.Choice):
        def perturb(self, delta: Tensor) -> Any:
            return super().perturb(2 * delta)

    class Detached(sx.Choice):
        def log_prob(self, z: Tensor) -> Tensor:
            return super().log_prob(z).detach()

    for kind in (Steep, Twice, Detached):
        with pytest.raises(AssertionError, match="contract check"):
            contract(kind)


@pytest.mark.parametrize("size", [1e6, 1e9, 1e12, 1e16, 1e20])
@pytest.mark.parametrize("steps", [(), (4,)])
def test_edges_of_a_chain_at_any_scale(size: float, steps: tuple[int, ...]) -> None:
    """They sum to 1 at each step, and to the marginals of the position before."""
    torch.manual_seed(1)
    unary = torch.randn(20, 5, 3, dtype=torch.float64) * size
    transition = torch.randn(20, *steps, 3, 3, dtype=torch.float64) * size
    transition[:, ..., 0, 1] = -torch.inf
    chain = sx.LinearChain(unary, transition)
    edges, mu = chain.edge_marginals(), chain.marginals()
    torch.testing.assert_close(edges.sum(-1), mu[:, :-1], rtol=0, atol=1e-12)
    assert (edges[..., 0, 1] == 0).all()
    assert (chain.entropy().abs() <= 1e-9 * size).all()


def test_a_structure_is_true() -> None:
    assert sx.Choice(torch.zeros(3)) and sx.Choice(torch.zeros(0, 3))
    with pytest.raises(ValueError, match=r"must not be negative, got \(-1,\)"):
        sx.Choice(torch.zeros(3)).sample((-1,))


def test_pairs_are_compared_with_each_other() -> None:
    """Where an estimator or a beam gives sentences several trees, that is an error."""
    torch.manual_seed(0)
    words = torch.tensor([[3, 4, 5, 6], [7, 8, 0, 0], [5, 8, 0, 0], [3, 3, 3, 4]])
    lengths, labels = torch.tensor([4, 2, 2, 4]), torch.tensor([0, 0, 1, 1])
    options = {"input_size": 6, "hidden_size": 8}
    for kind in ("cky", "easy-first"):
        model = sx.nn.PairByTree(9, 3, kind, **options).eval()
        assert torch.equal(*model(words, lengths)[:2])
        with pytest.raises(ValueError, match="both sentences of a pair"):
            model(words, lengths, beam=2)
    model = sx.nn.PairByTree(9, 3, "cky", **options)
    with pytest.raises(ValueError, match="both sentences of a pair"):
        model(words, lengths, labels, estimator=sx.estimators.ExactExpectation())
    assert model(words, lengths, labels, estimator=sx.estimators.Reinforce(3)).isfinite().all()


def test_a_beam_wider_than_there_are_trees() -> None:
    words, lengths = (
        torch.tensor([[3, 4, 5, 6], [7, 0, 0, 0], [5, 8, 0, 0]]),
        torch.tensor([4, 1, 2]),
    )
    model = sx.nn.TreeClassifier(9, 3, "cky", hidden_size=4).eval()
    several = model(words, lengths, beam=3)
    torch.testing.assert_close(several[1:].softmax(-1), model(words, lengths)[1:].softmax(-1))


def test_padding_of_structured_attention_has_no_gradient() -> None:
    x, lengths = torch.randn(2, 4, 8), torch.tensor([4, 2])
    x[1, 2:] = torch.nan
    for kind in ("chain", "projective", "nonprojective"):
        layer = sx.nn.StructuredAttention(kind, 8)
        layer.structure(x, lengths).log_partition().sum().backward()
        assert torch.equal(layer(x, [4, 2]), layer(x, lengths))
        assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


def test_charts_under_autocast() -> None:
    model = sx.nn.PairByTree(9, 3, "chart", input_size=6, hidden_size=8)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(torch.tensor([[3, 4, 5], [6, 7, 0]]), torch.tensor([3, 2]))
    assert out.isfinite().all()


def test_soft_targets_compile() -> None:
    unary, other, T = torch.randn(2, 3, 2), torch.randn(2, 3, 2), torch.randn(2, 2)

    def loss(u: torch.Tensor) -> torch.Tensor:
        return sx.losses.crf(sx.LinearChain(u, T), sx.LinearChain(other, T))

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(unary), loss(unary))


def test_costs_that_are_no_floats() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    for estimator in (sx.estimators.Reinforce(4), sx.estimators.PPO(4)):
        found = []
        for cost in (lambda z: z[..., 0] > 0.5, lambda z: (z[..., 0] > 0.5).to(z)):
            torch.manual_seed(0)
            loss = estimator.loss(sx.Choice(x), cost).sum()
            found.append(torch.autograd.grad(loss, x)[0])
        assert torch.equal(*found)


def test_ratios_that_overflow() -> None:
    ppo = sx.estimators.PPO()
    ppo.loss(sx.KSubset(torch.zeros(300), 150), lambda z: -z.sum(-1))
    scores = (50 * ppo._draws.z[0]).requires_grad_()
    ppo.replay(sx.KSubset(scores, 150)).backward()
    assert scores.grad.isfinite().all()


def test_estimators_of_one_name_are_all_diagnosed() -> None:
    both = [sx.estimators.PPO(clip=0.1), sx.estimators.PPO(clip=0.3)]
    found = sx.diagnose(sx.Choice(torch.zeros(3)), lambda z: z[..., 0], both, samples=2)
    assert len({record["estimator"] for record in found.records}) == 2


def test_a_temperature_without_a_gradient() -> None:
    warm = torch.tensor(0.5, requires_grad=True)
    with pytest.raises(ValueError, match="temperature is a tensor that asks for a gradient"):
        sx.Assignment(torch.randn(3, 3)).sinkhorn(warm)


def test_a_variable_twice_in_a_factor() -> None:
    for twice in (True, False):
        graph = sx.FactorGraph()
        ids = graph.variables(torch.tensor([1.0, 0.5]))
        graph.at_most_one(torch.stack([ids[0], ids[0] if twice else ids[1]]))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            graph.marginals()
        assert len(seen) == twice
        assert all("variable 0 occurs twice" in str(w.message) for w in seen)


@pytest.mark.filterwarnings("ignore:FactorGraph")
def test_an_impossible_factor_is_nan() -> None:
    graph = sx.FactorGraph()
    ids = graph.variables(torch.randn(4))
    graph.factor(sx.Choice(torch.full((4,), -torch.inf), validate_args=False), ids)
    assert graph.marginals().values.isnan().all()


def test_costs_that_torch_has_wrapped() -> None:
    class Net(nn.Module):
        def forward(self, z: Tensor, items: Tensor) -> Tensor:
            return z[:, 0] + items

    x, exact = torch.randn(3, 4), sx.estimators.ExactExpectation()
    wanted = exact.loss(sx.Choice(x), Net())
    for wrapped in (torch.compile(Net(), backend="eager"), nn.DataParallel(Net())):
        torch.testing.assert_close(exact.loss(sx.Choice(x), wrapped), wanted)


def test_small_things_that_are_said() -> None:
    with pytest.raises(ValueError, match="divergence=True"):
        sx.losses.SoftDTW(1.0, True)
    imle = sx.estimators.IMLE(lam="adaptive").eval()
    imle.look.update(torch.tensor([4.0]))
    assert imle.look.alpha == 1
    crf = torch_struct.DependencyCRF(torch.randn(2, 3, 3, 2))
    assert crf.from_event(crf.argmax)[0].shape == (2, 3)
