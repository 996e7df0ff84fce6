"""Structures too large to enumerate × spreads × −inf × dtypes, against the naive backend.

Long products of small numbers underflow at sizes that no small structure has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from queries import close
from torch import Tensor

import structmax as sx

inf, f32, f64 = math.inf, torch.float32, torch.float64

STRUCTURES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "chain": (sx.LinearChain, ((3, 60, 12), (12, 12))),
    "chain-steps": (sx.LinearChain, ((3, 40, 5), (3, 39, 5, 5))),
    "segments": (sx.SemiMarkov, ((3, 24, 5, 3), (3, 3))),
    "binary-tree": (sx.BinaryTree, ((3, 16, 16),)),
    "projective": (lambda x: sx.DependencyTree(x, projective=True), ((3, 13, 13),)),
    "nonprojective": (sx.DependencyTree, ((3, 21, 21),)),
    "nonprojective-multi": (lambda x: sx.DependencyTree(x, root="multi"), ((3, 21, 21),)),
    "spanning-tree": (sx.SpanningTree, ((3, 20, 20),)),
    "dtw": (sx.Alignment, ((3, 30, 26),)),
    "edit": (lambda x: sx.Alignment(x, kind="edit"), ((3, 20, 16),)),
    "monotone": (lambda x: sx.Alignment(x, kind="monotone"), ((3, 20, 16),)),
    "grid": (sx.GridPath, ((3, 24, 24),)),
    "pcfg": (sx.PCFG, ((3, 4), (3, 4, 8, 8), (3, 10, 4))),
    "subset": (lambda x: sx.KSubset(x, 15), ((3, 60),)),
    "subset-between": (lambda x: sx.KSubset(x, (5, 40)), ((3, 60),)),
}
SPREADS = (1.0, 30.0, 100.0, 300.0, 1e3, 1e5)


def answers(make: Callable[..., Any], scores: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The value, and its gradient in all scores, from separate kernels."""
    value = make(*scores).log_partition()
    leaves = [x.clone().requires_grad_() for x in scores]
    total = make(*leaves).log_partition()
    assert bool((total == value).logical_or((total - value).abs() <= 1e-5 * value.abs()).all())
    feasible = torch.where(total == -inf, 0.0, total).sum()
    grads = torch.autograd.grad(feasible, leaves, materialize_grads=True)
    return value, torch.cat([g.flatten() for g in grads])


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize("forbidden", [0.0, 0.3, 0.8])
@pytest.mark.slow
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("name", STRUCTURES)
def test_sizes(
    name: str,
    spread: float,
    forbidden: float,
    dtype: torch.dtype,
    record_property: Callable[[str, Any], None],
) -> None:
    make, shapes = STRUCTURES[name]
    random = torch.Generator().manual_seed(int(spread) + int(10 * forbidden))
    scores = [spread * torch.randn(shape, generator=random) for shape in shapes]
    cut = scores[0]
    cut[torch.rand(cut.shape, generator=random) < forbidden] = -inf
    found = answers(make, [x.to(dtype) for x in scores])
    with sx.backend("naive"):
        expected = answers(make, [x.double() for x in scores])
    eps = torch.finfo(dtype).eps
    scale = float(torch.where(expected[0] == -inf, 0.0, expected[0]).abs().max())
    close(found[0], expected[0], 1e-9 + 40 * eps * (1 + scale), "value")
    # ties within rounding of the scores are split as they come
    close(found[1], expected[1], 1e-7 + 400 * eps * (1 + scale), "gradient")
    record_property("right", 2)


def test_long_chain_of_small_sums() -> None:
    """A feasible item keeps its value where sums of one step are near 1e-200 of those before."""
    random = torch.Generator().manual_seed(0)
    scores = [100 * torch.randn(s, generator=random).double() for s in ((4, 64, 16), (16, 16))]
    with sx.backend("naive"):
        expected = sx.LinearChain(*scores).log_partition()
    close(sx.LinearChain(*scores).log_partition(), expected, 1e-8, "value")


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
def test_chain_of_products_that_underflow(dtype: torch.dtype) -> None:
    """The likely tag is forbidden, and what is left is less than any float: it is still allowed."""
    unary = torch.tensor([[0.0, -inf, -inf], [-660.0, 0.0, -660.0]], dtype=dtype)
    transition = torch.tensor([[-650.0, -inf, -650.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    chain = sx.LinearChain(unary, transition.to(dtype))
    expected = torch.tensor(-1310 + math.log(2), dtype=f64)
    close(chain.log_partition(), expected, 1e-3 if dtype == f32 else 1e-9, "value")
    close(chain.marginals()[1], torch.tensor([0.5, 0.0, 0.5], dtype=f64), 1e-6, "marginals")
