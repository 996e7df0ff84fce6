"""Attention over structures: shapes, weights, padding, gradients, any estimator."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from table import f64, randn
from torch.autograd import gradcheck

import structmax as sx
from structmax.nn import StructuredAttention
from structmax.nn.structured_attention import KINDS

TREES = ("projective", "nonprojective")


def attention(kind: str, estimator: str = "marginals", **options: object) -> StructuredAttention:
    torch.manual_seed(0)
    return StructuredAttention(kind, 4, estimator, **options).to(f64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("estimator", "options", "lead"),
    [
        ("marginals", {}, ()),
        ("sparsemap", {}, ()),
        ("straight-through", {}, ()),
        ("spigot", {"step": 0.5}, ()),
        ("perturbed", {"samples": 3}, ()),
        ("perturb-and-map", {"samples": 3}, (3,)),
        ("imle", {}, ()),
    ],
)
def test_shapes(kind: str, estimator: str, options: dict, lead: tuple[int, ...]) -> None:
    module = attention(kind, estimator, **options)
    x = randn(2, 5, 4).requires_grad_()
    output, weights = module(x, lengths=torch.tensor([5, 3]), need_weights=True)
    assert output.shape == (*lead, *((2, 4) if kind == "chain" else (2, 5, 4)))
    assert weights.shape == (*lead, *((2, 5) if kind == "chain" else (2, 6, 6)))
    assert output.dtype == f64
    output.square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in module.parameters() if p.grad is not None)
    assert module.modifier.weight.grad.any() and x.grad.any() and not x.grad[1, 3:].any()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_the_marginals_of_the_structure(kind: str) -> None:
    module, x = attention(kind), randn(2, 4, 4)
    output, weights = module(x, need_weights=True)
    mu = module.structure(x).marginals()
    torch.testing.assert_close(weights, mu[..., 1] if kind == "chain" else mu)
    if kind == "chain":
        torch.testing.assert_close(output, torch.einsum("bi,bid->bd", weights, x))
        return
    heads = torch.einsum("bhm,bhd->bmd", mu[:, 1:, 1:], x)
    modifiers = torch.einsum("bhm,bmd->bhd", mu[:, 1:, 1:], x)
    parts = torch.cat([x, heads, modifiers, mu[:, 0, 1:, None]], -1)
    torch.testing.assert_close(output, module.combine(parts).tanh())


def test_a_chain_without_transitions_is_a_sigmoid() -> None:
    """Independent tags: P(select) = σ(score), as Kim et al. start from."""
    module, x, query = attention("chain"), randn(2, 4, 4), randn(2, 4)
    _, weights = module(x, query=query, need_weights=True)
    score = torch.einsum("bid,bd->bi", module.modifier(x), module.head(query)) / 2
    torch.testing.assert_close(weights, (score + module.root(x).squeeze(-1)).sigmoid())


@pytest.mark.parametrize("kind", TREES)
def test_scores_of_arcs(kind: str) -> None:
    module, x = attention(kind), randn(2, 3, 4)
    scores = module.structure(x).scores
    arcs = torch.einsum("bhd,bmd->bhm", module.head(x), module.modifier(x)) / 2
    torch.testing.assert_close(scores[:, 1:, 1:], arcs)
    torch.testing.assert_close(scores[:, 0, 1:], module.root(x).squeeze(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_has_no_effect(kind: str) -> None:
    module, x = attention(kind), randn(2, 5, 4)
    lengths = torch.tensor([5, 2])
    x[1, 2:] = torch.nan
    output, weights = module(x, lengths, need_weights=True)
    alone, own = module(x[1:, :2], need_weights=True)
    if kind == "chain":
        torch.testing.assert_close(output[1:], alone)
        torch.testing.assert_close(weights[1:, :2], own)
        assert not weights[1, 2:].any()
    else:
        torch.testing.assert_close(output[1:, :2], alone)
        assert not output[1, 2:].any()
        torch.testing.assert_close(weights[1:, :3, :3], own)
    output.sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in module.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind: str) -> None:
    module = attention(kind)
    x, lengths = randn(2, 3, 4).requires_grad_(), torch.tensor([3, 2])
    assert gradcheck(lambda x: module(x, lengths), x)
    leaves = tuple(p.detach().clone().requires_grad_() for p in module.parameters())
    names = [name for name, _ in module.named_parameters()]

    def call(*parameters: torch.Tensor) -> torch.Tensor:
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(module, given, (x.detach(), lengths))

    assert gradcheck(call, leaves)


def test_state_travels() -> None:
    module, x = attention("projective"), randn(1, 3, 4)
    other = StructuredAttention("projective", 4).to(f64)
    other.load_state_dict(copy.deepcopy(module.state_dict()))
    torch.testing.assert_close(module(x), other(x))
    assert repr(attention("chain")).startswith("StructuredAttention(\n  'chain', 4, estimator=Marg")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: StructuredAttention("chian", 4),
            r"one of \('chain', 'projective', 'nonprojective'\), got 'chian'",
        ),
        (lambda: StructuredAttention("chain", 4, "marginal"), "Did you mean 'marginals'"),
        (lambda: StructuredAttention("chain", 4, "reinforce"), "Reinforce estimates a loss"),
        (
            lambda: StructuredAttention("chain", 4, sx.estimators.SPIGOT(), step=1.0),
            "step must be given to the estimator itself",
        ),
        (lambda: attention("chain")(randn(2, 3, 5)), r"x must be \(B, n, 4\), got \(2, 3, 5\)"),
        (
            lambda: attention("chain")(randn(2, 3, 4), query=randn(3, 4)),
            r"must be \(2, 4\), got \(3, 4\)",
        ),
        (
            lambda: attention("projective")(randn(2, 3, 4), query=randn(2, 4)),
            'query is for "chain"',
        ),
    ],
)
def test_errors(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
