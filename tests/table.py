"""The table of structures: a row here is checked by every test of the contract."""

from __future__ import annotations

from collections.abc import Callable

import torch

import structmax as sx

f64 = torch.float64


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=f64)


def diamond() -> sx.Forest:
    """A forest with leaves, binary edges, shared nodes and parts on nodes and edges."""
    draw = sx.ForestBuilder()
    a, b, c = draw.node(0), draw.node(1), draw.node(2)
    ab, bc = draw.node(3), draw.node(4)
    draw.edge(ab, a, b)
    draw.edge(ab, a, part=5)
    draw.edge(bc, b, c, part=6)
    draw.edge(bc, part=7)
    goal = draw.node(8)
    draw.edge(goal, ab, bc)
    draw.edge(goal, ab, c, part=9)
    draw.edge(goal, bc, part=10)
    return draw.build(12)  # part 11 belongs to nothing


def hmm() -> sx.HMM:
    return sx.HMM(
        randn(3).log_softmax(-1),
        randn(3, 3).log_softmax(-1),
        randn(3, 4).log_softmax(-1),
        torch.tensor([[0, 3, 2, -1], [1, 1, 0, 99]]),
        lengths=torch.tensor([3, 3]),
    )


def chain(
    transition: tuple[int, ...], n: int = 4, c: int = 3, ends: bool = True, length: int | None = 3
) -> Callable[..., sx.LinearChain]:
    def make(smoothing: sx.Smoothing) -> sx.LinearChain:
        return sx.LinearChain(
            randn(2, n, c),
            randn(*transition),
            start=randn(c) if ends else None,
            end=randn(2, c) if ends else None,
            lengths=None if length is None else torch.full((2,), length),
            smoothing=smoothing,
        )

    return make


STRUCTURES: dict[str, Callable[..., sx.Structure]] = {
    "choice": lambda omega: sx.Choice(randn(2, 5), smoothing=omega),
    "choice-one": lambda omega: sx.Choice(randn(1), smoothing=omega),
    "chain-shared": chain((3, 3)),
    "chain-item": chain((2, 3, 3), ends=False),
    "chain-step": chain((2, 3, 3, 3), length=None),
    "chain-single": chain((2, 0, 3, 3), n=1, length=None),
    "chain-one-tag": chain((1, 1), c=1),
    "hyperpath": lambda omega: sx.Hyperpath(diamond(), randn(2, 12), smoothing=omega),
}

SMOOTHINGS: dict[str, sx.Smoothing] = {
    "shannon": sx.Shannon(),
    "shannon-0.5": sx.Shannon(0.5),
    "gini": sx.Gini(2.0),
    "tsallis-1.3": sx.Tsallis(1.3, 1.5),
    "hard": sx.Hard(),
}

ROWS: dict[str, Callable[[], sx.Structure]] = {
    f"{name}/{kind}": (lambda make=make, omega=omega: make(omega))
    for name, make in STRUCTURES.items()
    for kind, omega in SMOOTHINGS.items()
}
ROWS["hmm/shannon"] = hmm
