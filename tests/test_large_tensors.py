"""Tensors of more than 2³¹ elements on the GPU: their last items get what they get alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import structmax as sx

pytestmark = pytest.mark.gpu
ROOM = 120 << 30  # bytes of the largest case, roughly
if not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < ROOM:
    pytest.skip("needs a CUDA device of 120 GiB", allow_module_level=True)


def chain_by_step(some: slice, unary: Tensor, transition: Tensor) -> Any:
    s = sx.LinearChain(unary[some], transition[some], validate_args=False)
    value, mu = s._value_and_gradient()
    return value, mu[0][-3:], mu[1][-3:], s.argmax_tags()[-3:]


def chain_shared(some: slice, unary: Tensor) -> Any:
    torch.manual_seed(1)
    transition = torch.randn(unary.shape[-1], unary.shape[-1], device="cuda")
    s = sx.LinearChain(unary[some], transition, validate_args=False)
    return s.marginals()[-3:], s.argmax_tags()[-3:]


def binary_tree(some: slice, scores: Tensor) -> Any:
    s = sx.BinaryTree(scores[some], validate_args=False)
    return s.marginals()[-3:]


def binary_tree_gini(some: slice, scores: Tensor) -> Any:
    s = sx.BinaryTree(scores[some], smoothing=sx.Gini(), validate_args=False)
    return s.marginals()[-3:]


def projective(some: slice, scores: Tensor) -> Any:
    return sx.DependencyTree(scores[some], projective=True, validate_args=False).marginals()[-3:]


def best_tree(some: slice, scores: Tensor) -> Any:
    return sx.DependencyTree(scores[some], validate_args=False).argmax()[-3:]


def best_matching(some: slice, scores: Tensor) -> Any:
    return sx.Assignment(scores[some], validate_args=False).argmax()[-3:]


def soft_dtw(some: slice, x: Tensor, y: Tensor) -> Any:
    left = x[some].clone().requires_grad_()
    value = sx.losses.SoftDTW()(left, y[some])
    return value[-3:].detach(), torch.autograd.grad(value.sum(), left)[0][-3:]


def simplex(map: Callable[..., Tensor], *options: Any) -> Callable[..., Any]:
    def run(some: slice, x: Tensor) -> Any:
        leaf = x[some].detach().requires_grad_()
        p = map(leaf, *options)
        return p[-3:].detach(), torch.autograd.grad(p, leaf, p.detach())[0][-3:]

    return run


CASES = {
    "chain by step": (chain_by_step, (4200, 128, 64), (4200, 127, 64, 64)),
    "chain, shared": (chain_shared, (131_080, 512, 32)),
    "binary trees": (binary_tree, (215_000, 100, 100)),
    "binary trees, Gini": (binary_tree_gini, (215_000, 100, 100)),
    "projective trees": (projective, (1_280_000, 41, 41)),
    "best trees": (best_tree, (580_000, 61, 61)),
    "best matchings": (best_matching, (600_000, 60, 60)),
    "soft-DTW": (soft_dtw, (2060, 1024, 2), (2060, 1024, 2)),
    "sparsemax": (simplex(sx.sparsemax), (131_080, 16_384)),
    "entmax": (simplex(sx.entmax, 1.5), (131_080, 16_384)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_last_items(name: str) -> None:
    run, *shapes = CASES[name]
    torch.manual_seed(0)
    tensors = [torch.randn(shape, device="cuda") for shape in shapes]
    try:
        whole = run(slice(None), *tensors)
        alone = run(slice(-3, None), *tensors)
    except torch.cuda.OutOfMemoryError as error:
        pytest.skip(f"{error}"[:90])
    finally:
        torch.cuda.empty_cache()
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (whole, alone)), strict=True):
        torch.testing.assert_close(a[-3:], b[-3:], atol=1e-5, rtol=1e-5)
