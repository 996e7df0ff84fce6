"""Chains and segments against torch-struct, pytorch-crf and a compiled JAX recursion."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor

import structmax as sx
from benchmarks import jax_chain
from benchmarks.common import Answer, graphed, torch_struct
from benchmarks.harness import (
    Case,
    Contender,
    Disagreement,
    Trial,
    cases,
    installed,
    ours,
    peer,
    require_close,
)

# -- log-partition and marginals -----------------------------------------------------------------

IN_A_ROW = 20  # calls; a host that is ahead of its GPU


def chain(device: torch.device, batch: int, n: int, c: int, backward: bool = True) -> Trial:
    """A, or A and μ, with a transition matrix for each step."""
    unary = torch.randn(batch, n, c, device=device)
    transition = torch.randn(batch, n - 1, c, c, device=device)

    scores = [unary, transition]

    def run(validate_args: bool | None = None, scores: list[Tensor] = scores) -> Answer:
        structure = sx.LinearChain(*scores, validate_args=validate_args)
        mu = structure.marginals() if backward else None
        return structure.log_partition(), mu

    contenders = [ours("", run), ours("validate_args=False", partial(run, False))]
    if device.type == "cuda":
        half = [unary.bfloat16(), transition.bfloat16()]
        contenders.append(ours("in a CUDA graph", graphed(run)))
        contenders.append(ours("bfloat16, validate_args=False", partial(run, False, half)))
        contenders.append(ours("bfloat16, in a CUDA graph", graphed(partial(run, None, half))))
        room = torch.empty_like(transition)
        copy = partial(room.copy_, transition)
        contenders.append(Contender("copy of the potentials", copy, "yardstick"))
        for name, work, kind in (
            ("structmax, validate_args=False", partial(run, False), "ours"),
            ("copy of the potentials", copy, "yardstick"),
        ):
            contenders.append(
                Contender(f"{name}, one of {IN_A_ROW} in a row", work, kind, calls=IN_A_ROW)
            )
    potentials = _for_torch_struct(unary, transition)
    theirs = partial(torch_struct, "LinearChainCRF", potentials, backward=backward)
    contenders += _by_torch_struct(theirs, backward)
    compiled = None
    if device.type == "cpu":
        if installed("jax"):
            compiled = jax_chain.compiled(unary, transition, backward)
        contenders.append(Contender("JAX, jit of the recursion", compiled))

    @torch.no_grad()
    def agree() -> None:
        structure = sx.LinearChain(unary, transition)
        value, edges = structure.log_partition(), structure.edge_marginals()
        mu = structure.marginals()
        require_close("marginals and edge marginals", mu[:, :-1], edges.sum(-1), 1e-4)
        require_close("marginals and edge marginals", mu[:, 1:], edges.sum(-2), 1e-4)
        if compiled is not None:
            for name, a, b in zip(
                ["log-partition", "marginals", "edge marginals"],
                [value, mu, edges],
                jax_chain.answer(compiled),
                strict=False,
            ):
                require_close(f"{name} of JAX", a, b, 1e-3)
        if installed("torch_struct"):
            some = slice(0, 8)  # the peer cannot hold every batch that is timed
            their_value, their_edges = theirs(some=some, backward=True)
            require_close("log-partition of torch-struct", value[some], their_value, 1e-4)
            require_close("marginals of torch-struct", edges[some], their_edges.mT, 1e-3)

    return Trial(contenders, agree)


def _by_torch_struct(run: Any, backward: bool) -> list[Contender]:
    if not backward:
        return [peer("torch-struct, .partition", "torch_struct", run)]
    both = partial(run, properties=True)
    return [
        peer("torch-struct, .marginals and .partition", "torch_struct", both),
        peer("torch-struct, .partition and autograd.grad", "torch_struct", run),
    ]


def _for_torch_struct(unary: Tensor, transition: Tensor) -> Tensor:
    """Its potentials ``(B, n−1, to, from)``: everything is a score of a transition."""
    e = transition.transpose(-1, -2) + unary[:, 1:, :, None]
    e[:, 0] += unary[:, 0, None, :]
    return e


def segments(
    device: torch.device, batch: int, n: int, k: int, c: int, backward: bool = True
) -> Trial:
    """A, or A and μ, of labelled segments of at most k of n positions, with transitions."""
    scores = torch.randn(batch, n, k, c, device=device)
    transition = torch.randn(c, c, device=device)
    # the peer's segments have a label at both ends, and the one at the start of all is free
    joint = scores[..., None] + transition.mT
    joint[:, 0] = scores[:, 0, ..., None].expand_as(joint[:, 0]) - math.log(c)
    joint = torch.nn.functional.pad(joint, (0, 0, 0, 0, 1, 0))  # width 0

    @torch.no_grad()
    def run(validate_args: bool | None = None) -> Answer:
        structure = sx.SemiMarkov(scores, transition, validate_args=validate_args)
        mu = structure.marginals() if backward else None
        return structure.log_partition(), mu

    theirs = partial(torch_struct, "SemiMarkovCRF", joint, backward=backward)
    contenders = [ours("", run), ours("validate_args=False", partial(run, False))]
    contenders += _by_torch_struct(theirs, backward)

    def agree() -> None:
        some = sx.SemiMarkov(scores, transition)[:2]
        if installed("torch_struct"):
            value, mu = theirs(some=slice(0, 2), backward=True)
            require_close("log-partition of torch-struct", some.log_partition(), value, 1e-4)
            mu = mu[:, :, 1:].sum(-1)  # the label at the end
            require_close("marginals of torch-struct", some.marginals(), mu, 1e-3)

    return Trial(contenders, agree)


# -- a tagger's output layer ---------------------------------------------------------------------


def _layers(device: torch.device, c: int) -> tuple[sx.nn.CRF, Any]:
    """Our layer and torchcrf's with the same parameters, or None."""
    layer = sx.nn.CRF(c, batch_first=True).to(device)
    if not installed("torchcrf"):
        return layer, None
    import torchcrf

    warnings.filterwarnings("ignore", "where received a uint8", UserWarning)
    other = torchcrf.CRF(c, batch_first=True).to(device)
    other.load_state_dict(layer.state_dict())
    return layer, other


def crf_loss(device: torch.device, batch: int, n: int, c: int) -> Trial:
    """The log-likelihood and its gradient in emissions and parameters."""
    layer, other = _layers(device, c)
    emissions = torch.randn(batch, n, c, device=device, requires_grad=True)
    tags = torch.randint(c, (batch, n), device=device)

    def step(layer: Any) -> list[Tensor]:
        value = layer(emissions, tags)
        return [value.detach(), *torch.autograd.grad(value, [emissions, *layer.parameters()])]

    def agree() -> None:
        if other is None:
            return
        names = ["loss", "gradient of emissions", *dict(layer.named_parameters())]
        for name, a, b in zip(names, step(layer), step(other), strict=True):
            require_close(name, a, b, 1e-3)

    contenders = [
        ours("", partial(step, layer)),
        peer("pytorch-crf", "torchcrf", partial(step, other)),
    ]
    return Trial(contenders, agree)


def crf_decode(device: torch.device, batch: int, n: int, c: int) -> Trial:
    """The best tags as lists."""
    layer, other = _layers(device, c)
    emissions = torch.randn(batch, n, c, device=device)

    def decode(layer: Any) -> list[list[int]]:
        with torch.no_grad():
            return layer.decode(emissions)

    def agree() -> None:
        if other is None:
            return
        chain = layer.structure(emissions)
        with torch.no_grad():  # by score: ties are legal
            best, theirs = (
                chain.score(torch.tensor(decode(x), device=device)) for x in (layer, other)
            )
        require_close("score of the best tags", best, theirs, 1e-5)
        if [len(tags) for tags in decode(layer)] != [n] * batch:
            raise Disagreement("the best tags have another length than the emissions")

    contenders = [
        ours("", partial(decode, layer)),
        peer("pytorch-crf", "torchcrf", partial(decode, other)),
    ]
    return Trial(contenders, agree)


CHAINS = {
    "small 8x16x8": "cpu cuda",
    "medium 32x64x32": "cpu cuda",
    "large 16x256x32": "cpu",
    "large 256x128x32": "cuda",
    "large 256x128x64": "cuda",
    "large 64x4096x32": "cuda",
}
TAGGERS = {
    "small 8x16x8": "cpu cuda",
    "medium 32x128x32": "cpu cuda",
    "large 64x256x32": "cpu cuda",
}
SEGMENTS = {
    "small 4x10x4x4": "cpu cuda",
    "medium 8x24x6x6": "cpu cuda",
    "large 8x36x6x6": "cpu cuda",
}
CASES: dict[str, Case] = {
    **cases("chain", "log-partition and marginals, a matrix for each step,", chain, CHAINS),
    **cases(
        "chain-value",
        "log-partition, a matrix for each step,",
        partial(chain, backward=False),
        CHAINS,
        "forward",
    ),
    **cases("crf-loss", "a tagger's loss and gradients", crf_loss, TAGGERS),
    **cases("crf-decode", "a tagger's best tags", crf_decode, TAGGERS, "forward"),
    **cases("segments", "log-partition and marginals of segments", segments, SEGMENTS),
    **cases(
        "segments-value",
        "log-partition of segments",
        partial(segments, backward=False),
        SEGMENTS,
        "forward",
    ),
}
