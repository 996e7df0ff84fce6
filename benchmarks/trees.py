"""Trees against torch-struct: log-partition and marginals."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import structmax as sx
from benchmarks.cases import _case, _graphed
from benchmarks.harness import Contender, Trial, installed, require_close

Answer = tuple[Tensor, Tensor]


def binary_tree(device: torch.device, batch: int, n: int) -> Trial:
    """A and μ of all spans."""
    scores = torch.randn(batch, n, n, device=device)
    peer = partial(_torch_struct, "TreeCRF", scores[..., None])
    return _trial(partial(sx.BinaryTree, scores), peer, lambda mu: mu.squeeze(-1), device)


def projective(device: torch.device, batch: int, n: int) -> Trial:
    """A and μ of all arcs of trees with one or more roots, as the peer has them."""
    scores = torch.randn(batch, n + 1, n + 1, device=device)
    potentials = scores[:, 1:, 1:].clone()
    potentials.diagonal(dim1=-2, dim2=-1).copy_(scores[:, 0, 1:])  # the peer's root scores
    ours = partial(sx.DependencyTree, scores, projective=True, root="multi")
    return _trial(ours, partial(_torch_struct, "DependencyCRF", potentials), _with_root, device)


def nonprojective(device: torch.device, batch: int, n: int) -> Trial:
    """A and μ of all arcs of trees that may cross, with one root."""
    scores = torch.randn(batch, n + 1, n + 1, device=device)
    potentials = scores[:, 1:, 1:].clone()
    potentials.diagonal(dim1=-2, dim2=-1).copy_(scores[:, 0, 1:])
    peer = partial(_torch_struct, "NonProjectiveDependencyCRF", potentials)
    return _trial(partial(sx.DependencyTree, scores), peer, _with_root, device)


def _with_root(mu: Tensor) -> Tensor:
    """The peer's marginals with the root scores in a row of their own."""
    root = mu.diagonal(dim1=-2, dim2=-1)
    arcs = torch.nn.functional.pad(mu - torch.diag_embed(root), (1, 0, 1, 0))
    arcs[:, 0, 1:] = root
    return arcs


def _torch_struct(
    name: str, potentials: Tensor, some: slice = slice(None), properties: bool = False
) -> Answer:
    """Its value and marginals; a new distribution each time, since it keeps its answers."""
    import torch_struct

    warnings.filterwarnings("ignore", ".*does not define `arg_constraints`", UserWarning)
    given = potentials[some].detach().clone().requires_grad_()
    with torch.enable_grad():
        distribution = getattr(torch_struct, name)(given)
        if properties:
            return distribution.partition.detach(), distribution.marginals.detach()
        value = distribution.partition
        return value.detach(), torch.autograd.grad(value.sum(), given)[0]


def _trial(
    make: Callable[..., sx.Structure],
    peer: Callable[..., Answer],
    convert: Callable[[Tensor], Tensor],
    device: torch.device,
) -> Trial:
    @torch.no_grad()
    def ours(validate_args: bool | None = None) -> Answer:
        structure = make(validate_args=validate_args)
        mu = structure.marginals()
        return structure.log_partition(), mu

    contenders = [
        Contender("structmax", ours),
        Contender("structmax, validate_args=False", partial(ours, False)),
    ]
    if device.type == "cuda":
        contenders.append(Contender("structmax, in a CUDA graph", _graphed(ours)))
    peers = {
        "torch-struct, .marginals and .partition": partial(peer, properties=True),
        "torch-struct, .partition and autograd.grad": peer,
    }
    for name, run in peers.items():
        contenders.append(Contender(name, run if installed("torch_struct") else None))

    def agree() -> None:
        value, mu = ours()
        with sx.backend("naive"):
            exact = make()[:2]
            require_close("log-partition of naive", value[:2], exact.log_partition(), 1e-4)
            require_close("marginals of naive", mu[:2], exact.marginals(), 1e-3)
        for name, run in peers.items() if installed("torch_struct") else ():
            some = slice(0, 8)
            their_value, their_mu = run(some=some)
            require_close(f"log-partition of {name}", value[some], their_value, 1e-4)
            require_close(f"marginals of {name}", mu[some], convert(their_mu), 1e-3)

    return Trial(contenders, agree)


WHAT = "log-partition and marginals"
CASES: dict[str, Any] = dict(
    [
        _case("binary-tree-16x40", f"{WHAT} of spans", "cpu", binary_tree, 16, 40),
        _case("binary-tree-64x40", f"{WHAT} of spans", "cuda", binary_tree, 64, 40),
        _case("binary-tree-32x100", f"{WHAT} of spans", "cuda", binary_tree, 32, 100),
        _case("projective-16x40", f"{WHAT} of arcs", "cpu", projective, 16, 40),
        _case("projective-64x40", f"{WHAT} of arcs", "cuda", projective, 64, 40),
        _case("projective-32x100", f"{WHAT} of arcs", "cuda", projective, 32, 100),
        _case("nonprojective-16x40", f"{WHAT} of arcs", "cpu", nonprojective, 16, 40),
        _case("nonprojective-32x100", f"{WHAT} of arcs", "cuda", nonprojective, 32, 100),
    ]
)
