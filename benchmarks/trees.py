"""Trees and grammars against torch-struct."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import structmax as sx
from benchmarks.chains import _by_torch_struct
from benchmarks.common import Answer, graphed, torch_struct
from benchmarks.harness import Case, Trial, cases, installed, ours, require_close


def binary_tree(device: torch.device, batch: int, n: int, backward: bool = True) -> Trial:
    """A, or A and μ, of all spans."""
    scores = torch.randn(batch, n, n, device=device)
    theirs = partial(torch_struct, "TreeCRF", scores[..., None], backward=backward)
    return _trial(partial(sx.BinaryTree, scores), theirs, lambda mu: mu.squeeze(-1), backward)


def projective(device: torch.device, batch: int, n: int, backward: bool = True) -> Trial:
    """A, or A and μ, of all arcs of trees with one or more roots, as the peer has them."""
    scores = torch.randn(batch, n + 1, n + 1, device=device)
    theirs = partial(torch_struct, "DependencyCRF", _as_peer(scores), backward=backward)
    make = partial(sx.DependencyTree, scores, projective=True, root="multi")
    return _trial(make, theirs, _with_root, backward)


def nonprojective(device: torch.device, batch: int, n: int, backward: bool = True) -> Trial:
    """A, or A and μ, of all arcs of trees that may cross, with one root."""
    scores = torch.randn(batch, n + 1, n + 1, device=device)
    theirs = partial(
        torch_struct, "NonProjectiveDependencyCRF", _as_peer(scores), backward=backward
    )
    return _trial(partial(sx.DependencyTree, scores), theirs, _with_root, backward)


def _as_peer(scores: Tensor) -> Tensor:
    """The peer has the scores of the root on the diagonal."""
    potentials = scores[:, 1:, 1:].clone()
    potentials.diagonal(dim1=-2, dim2=-1).copy_(scores[:, 0, 1:])
    return potentials


def _with_root(mu: Tensor) -> Tensor:
    """The peer's marginals with the root scores in a row of their own."""
    root = mu.diagonal(dim1=-2, dim2=-1)
    arcs = torch.nn.functional.pad(mu - torch.diag_embed(root), (1, 0, 1, 0))
    arcs[:, 0, 1:] = root
    return arcs


def _trial(
    make: Callable[..., sx.Structure],
    theirs: Callable[..., Any],
    convert: Callable[[Tensor], Tensor],
    backward: bool,
) -> Trial:
    @torch.no_grad()
    def run(validate_args: bool | None = None) -> Answer:
        structure = make(validate_args=validate_args)
        mu = structure.marginals() if backward else None
        return structure.log_partition(), mu

    contenders = [ours("", run), ours("validate_args=False", partial(run, False))]
    if next(iter(make()._tensors().values()))[0].is_cuda:
        contenders.append(ours("in a CUDA graph", graphed(run)))
    contenders += _by_torch_struct(theirs, backward)

    def agree() -> None:
        value, mu = make().log_partition(), make().marginals()
        with sx.backend("naive"):
            exact = make()[:2]
            require_close("log-partition of naive", value[:2], exact.log_partition(), 1e-4)
            require_close("marginals of naive", mu[:2], exact.marginals(), 1e-3)
        if installed("torch_struct"):
            some = slice(0, 8)
            their_value, their_mu = theirs(some=some, backward=True)
            require_close("log-partition of torch-struct", value[some], their_value, 1e-4)
            require_close("marginals of torch-struct", mu[some], convert(their_mu), 1e-3)

    return Trial(contenders, agree)


def grammar(
    device: torch.device, batch: int, n: int, N: int, P: int, backward: bool = True
) -> Trial:
    """A of sentences of n words, or A and the expected uses of words' symbols, rules and root."""
    given = (
        torch.randn(batch, n, P, device=device),
        torch.randn(batch, N, N + P, N + P, device=device),
        torch.randn(batch, N, device=device),
    )
    theirs = partial(torch_struct, "SentCFG", given, backward=backward)

    def run(validate_args: bool | None = None) -> Any:
        with torch.set_grad_enabled(backward):
            terms, rules, roots = (t.detach().requires_grad_(backward) for t in given)
            value = sx.PCFG(roots, rules, terms, validate_args=validate_args).log_partition()
            if not backward:
                return value, None
            return value.detach(), torch.autograd.grad(value.sum(), (terms, rules, roots))

    def agree() -> None:
        if not installed("torch_struct"):
            return
        value, slopes = run()
        their_value, their_slopes = theirs()
        require_close("log-partition of torch-struct", value, their_value, 1e-4)
        for a, b in zip(slopes or (), their_slopes or (), strict=True):
            require_close("gradient of torch-struct", a, b, 1e-3)

    contenders = [ours("", run), ours("validate_args=False", partial(run, False))]
    return Trial([*contenders, *_by_torch_struct(theirs, backward)], agree)


SIZES = {
    "small 4x10": "cpu cuda",
    "medium 16x40": "cpu",
    "medium 64x40": "cuda",
    "large 8x80": "cpu",
    "large 32x100": "cuda",
}
GRAMMARS = {
    "small 4x8x4x8": "cpu cuda",
    "medium 8x16x10x20": "cpu cuda",
    "large 8x24x16x32": "cpu",
    "large 16x40x30x60": "cuda",
}
CASES: dict[str, Case] = {}
for _name, _build, _parts in (
    ("binary-tree", binary_tree, "spans"),
    ("projective", projective, "arcs"),
    ("nonprojective", nonprojective, "arcs that may cross"),
):
    CASES |= cases(_name, f"log-partition and marginals of {_parts}", _build, SIZES)
    _value = partial(_build, backward=False)
    CASES |= cases(f"{_name}-value", f"log-partition of {_parts}", _value, SIZES, "forward")
CASES |= cases("grammar", "a sentence's log-likelihood and gradients (n, N, P)", grammar, GRAMMARS)
CASES |= cases(
    "grammar-value",
    "a sentence's log-likelihood (n, N, P)",
    partial(grammar, backward=False),
    GRAMMARS,
    "forward",
)
