"""What is timed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import structmax as sx
from benchmarks.harness import Case, Contender, Disagreement, Trial, installed, require_close

# -- log-partition and marginals of a chain ------------------------------------------------------


def chain(device: torch.device, batch: int, n: int, c: int) -> Trial:
    """A and μ with a transition matrix for each step, against torch-struct."""
    unary = torch.randn(batch, n, c, device=device)
    transition = torch.randn(batch, n - 1, c, c, device=device)

    @torch.no_grad()
    def ours(validate_args: bool | None = None) -> tuple[Tensor, Tensor]:
        structure = sx.LinearChain(unary, transition, validate_args=validate_args)
        mu = structure.marginals()
        return structure.log_partition(), mu

    contenders = [
        Contender("structmax", ours),
        Contender("structmax, validate_args=False", partial(ours, False)),
    ]
    if device.type == "cuda":
        contenders.append(Contender("structmax, in a CUDA graph", _graphed(ours)))
        room = torch.empty_like(transition)
        contenders.append(Contender("copy of the potentials", partial(room.copy_, transition)))

    peers: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
        "torch-struct, .marginals and .partition": _torch_struct_properties,
        "torch-struct, .partition and autograd.grad": _torch_struct_grad,
    }
    potentials = _for_torch_struct(unary, transition)
    for name, peer in peers.items():
        run = partial(peer, potentials) if installed("torch_struct") else None
        contenders.append(Contender(name, run))

    @torch.no_grad()
    def agree() -> None:
        structure = sx.LinearChain(unary, transition)
        value, edges, mu = structure.log_partition(), structure.edge_marginals(), ours()[1]
        require_close("marginals and edge marginals", mu[:, :-1], edges.sum(-1), 1e-4)
        require_close("marginals and edge marginals", mu[:, 1:], edges.sum(-2), 1e-4)
        if not installed("torch_struct"):
            return
        some = slice(0, 8)  # the peer cannot hold every batch that is timed
        for name, peer in peers.items():
            with torch.enable_grad():
                their_value, their_edges = peer(potentials[some].clone())
            require_close(f"log-partition of {name}", value[some], their_value, 1e-4)
            require_close(f"marginals of {name}", edges[some], their_edges.transpose(-1, -2), 1e-3)

    return Trial(contenders, agree)


def _for_torch_struct(unary: Tensor, transition: Tensor) -> Tensor:
    """Its potentials ``(B, n−1, to, from)``: everything is a score of a transition."""
    e = transition.transpose(-1, -2) + unary[:, 1:, :, None]
    e[:, 0] += unary[:, 0, None, :]
    return e


def _torch_struct(potentials: Tensor) -> tuple[Any, Tensor]:
    """A new distribution, since it keeps its answers; it sets requires_grad on what it is given."""
    from torch_struct import LinearChainCRF

    warnings.filterwarnings("ignore", ".*does not define `arg_constraints`", UserWarning)
    given = potentials.detach().view_as(potentials)
    return LinearChainCRF(given), given


def _torch_struct_properties(potentials: Tensor) -> tuple[Tensor, Tensor]:
    distribution, _ = _torch_struct(potentials)
    mu = distribution.marginals
    return distribution.partition.detach(), mu.detach()


def _torch_struct_grad(potentials: Tensor) -> tuple[Tensor, Tensor]:
    distribution, given = _torch_struct(potentials)
    given.requires_grad_()
    value = distribution.partition
    return value.detach(), torch.autograd.grad(value.sum(), given)[0]


def _graphed(run: Callable[[], Any]) -> Callable[[], None]:
    """``run`` captured once, on first use, and replayed."""
    graph: list[torch.cuda.CUDAGraph] = []

    def replay() -> None:
        if not graph:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                run()
            torch.cuda.current_stream().wait_stream(stream)
            graph.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graph[0]):
                run()
        graph[0].replay()

    return replay


# -- a tagger's output layer ---------------------------------------------------------------------


def _layers(device: torch.device, c: int) -> tuple[sx.nn.CRF, Any]:
    """Our layer and torchcrf's with the same parameters, or None."""
    ours = sx.nn.CRF(c, batch_first=True).to(device)
    if not installed("torchcrf"):
        return ours, None
    import torchcrf

    warnings.filterwarnings("ignore", "where received a uint8", UserWarning)
    peer = torchcrf.CRF(c, batch_first=True).to(device)
    peer.load_state_dict(ours.state_dict())
    return ours, peer


def crf_loss(device: torch.device, batch: int, n: int, c: int) -> Trial:
    """The log-likelihood and its gradient in emissions and parameters, against pytorch-crf."""
    ours, peer = _layers(device, c)
    emissions = torch.randn(batch, n, c, device=device, requires_grad=True)
    tags = torch.randint(c, (batch, n), device=device)

    def step(layer: Any) -> list[Tensor]:
        value = layer(emissions, tags)
        return [value.detach(), *torch.autograd.grad(value, [emissions, *layer.parameters()])]

    def agree() -> None:
        if peer is None:
            return
        names = ["loss", "gradient of emissions", *dict(ours.named_parameters())]
        for name, a, b in zip(names, step(ours), step(peer), strict=True):
            require_close(name, a, b, 1e-3)

    contenders = [
        Contender("structmax", partial(step, ours)),
        Contender("pytorch-crf", partial(step, peer) if peer is not None else None),
    ]
    return Trial(contenders, agree)


def crf_decode(device: torch.device, batch: int, n: int, c: int) -> Trial:
    """The best tags as lists, against pytorch-crf."""
    ours, peer = _layers(device, c)
    emissions = torch.randn(batch, n, c, device=device)

    def decode(layer: Any) -> list[list[int]]:
        with torch.no_grad():
            return layer.decode(emissions)

    def agree() -> None:
        if peer is None:
            return
        chain = ours.structure(emissions)
        with torch.no_grad():  # by score: ties are legal
            best, theirs = (
                chain.score(torch.tensor(decode(layer), device=device)) for layer in (ours, peer)
            )
        require_close("score of the best tags", best, theirs, 1e-5)
        if [len(tags) for tags in decode(ours)] != [n] * batch:
            raise Disagreement("the best tags have another length than the emissions")

    contenders = [
        Contender("structmax", partial(decode, ours)),
        Contender("pytorch-crf", partial(decode, peer) if peer is not None else None),
    ]
    return Trial(contenders, agree)


def _case(
    name: str, what: str, devices: str, build: Callable[..., Trial], *size: int
) -> tuple[str, Case]:
    return name, Case(
        name, f"{what} at {size}", tuple(devices.split()), lambda device: build(device, *size)
    )


A_AND_MU = "log-partition and marginals, a transition matrix for each step,"
CASES = dict(
    [
        _case("chain-32x64x32", A_AND_MU, "cpu cuda", chain, 32, 64, 32),
        _case("chain-256x128x32", A_AND_MU, "cuda", chain, 256, 128, 32),
        _case("chain-256x128x64", A_AND_MU, "cuda", chain, 256, 128, 64),
        _case("crf-loss", "loss and gradients", "cpu cuda", crf_loss, 32, 128, 32),
        _case("crf-decode", "best tags", "cpu cuda", crf_decode, 32, 128, 32),
    ]
)
