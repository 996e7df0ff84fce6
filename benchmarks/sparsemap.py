"""SparseMAP, forward and backward: the compiled solver, checked against the one in torch.

On a CUDA device: its solver, checked against the compiled one on the processor and timed beside it.

The spread σ of the scores decides how many structures are active: a handful at 3, about 40 at 1,
some 200 at 0.1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import structmax as sx
from benchmarks.harness import Case, Trial, cases, ours, require_close


def chain(device: torch.device, batch: int, n: int, c: int, spread: float = 1.0) -> Trial:
    """Tags of n words."""
    unary = spread * torch.randn(batch, n, c, device=device)
    return _trial(sx.LinearChain, unary, spread * torch.randn(c, c, device=device))


def tree(device: torch.device, batch: int, n: int, spread: float = 1.0) -> Trial:
    """Non-projective dependency trees of n words."""
    return _trial(sx.DependencyTree, spread * torch.randn(batch, n + 1, n + 1, device=device))


def _trial(make: Callable[..., Any], first: Tensor, *others: Tensor) -> Trial:
    leaves = [t.requires_grad_() for t in (first, *others)]
    direction = torch.randn_like(first)

    @torch.no_grad()
    def forward() -> Tensor:
        marginals: Tensor = make(*leaves).sparsemap().marginals
        return marginals

    def both(some: slice = slice(None)) -> tuple[Tensor, ...]:
        marginals = make(first[some], *others).sparsemap().marginals
        return marginals.detach(), *torch.autograd.grad(marginals, leaves, direction[some])

    def in_torch(some: slice = slice(None)) -> tuple[Tensor, ...]:
        with mock.patch("structmax.sparse.cpu.solve", return_value=None):
            return both(some)

    names = "marginals", "gradient in the first scores", "gradient in the second"

    def agree_with_torch() -> None:
        some = slice(0, 2)
        for name, a, b in zip(names, both(some), in_torch(some), strict=False):
            require_close(f"{name}, by the solver in torch", a, b, 1e-4)

    contenders = [ours("", both), ours("forward only", forward)]
    agree = agree_with_torch
    if first.is_cuda:
        home = [t.detach().cpu().requires_grad_() for t in leaves]
        home_direction = direction.cpu()

        def on_cpu() -> tuple[Tensor, ...]:
            marginals = make(*home).sparsemap().marginals
            return marginals.detach(), *torch.autograd.grad(marginals, home, home_direction)

        def agree_with_cpu() -> None:
            # some of the flattest items are not done when the solver stops
            done = make(*home).sparsemap().iterations < STOP
            for name, a, b in zip(names, both(), on_cpu(), strict=False):
                if len(a) == len(done):
                    require_close(f"{name}, by the CPU path", a.cpu()[done], b[done], 1e-3)
                elif bool(done.all()):
                    require_close(f"{name}, by the CPU path", a.cpu(), b, 1e-3)

        contenders.append(ours("CPU path", on_cpu))
        agree = agree_with_cpu
    return Trial(contenders, agree)


STOP = 1000  # the default of max_iter
WHAT = "SparseMAP, forward and backward, of"
CASES: dict[str, Case] = {}
for suffix, spread in (("", 1.0), ("-flat", 0.1), ("-sharp", 3.0)):
    of_tags, of_trees = partial(chain, spread=spread), partial(tree, spread=spread)
    tags = {"medium 32x40x10": "cpu", "large 256x64x16": "cuda"}
    arcs = {"medium 32x20": "cpu", "large 256x40": "cuda"}
    CASES |= cases(f"sparsemap-chain{suffix}", f"{WHAT} tags, σ = {spread},", of_tags, tags)
    title = f"{WHAT} non-projective trees, σ = {spread},"
    CASES |= cases(f"sparsemap-tree{suffix}", title, of_trees, arcs)
