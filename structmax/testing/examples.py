"""Small examples of every structure: the one table behind the tests and the printed matrix.

A row makes a structure with random float64 scores, small enough to enumerate; every check of the
contract runs on it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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


def binary_tree(*shape: int, length: int | None = None) -> Callable[..., sx.BinaryTree]:
    def make(smoothing: sx.Smoothing) -> sx.BinaryTree:
        lengths = None if length is None else torch.full((2,), length)
        labelled = len(shape) == 4
        return sx.BinaryTree(randn(*shape), lengths, labelled=labelled, smoothing=smoothing)

    return make


def projective(
    *shape: int, root: str = "single", length: int | None = None, siblings: bool = False
) -> Callable[..., sx.DependencyTree]:
    def make(smoothing: sx.Smoothing) -> sx.DependencyTree:
        return sx.DependencyTree(  # type: ignore[abstract]
            randn(*shape),
            None if length is None else torch.full((2,), length),
            projective=True,
            root=root,
            siblings=randn(2, *[shape[1]] * 3) if siblings else None,
            labelled=len(shape) == 4,
            smoothing=smoothing,
        )

    return make


def nonprojective(
    *shape: int, root: str = "single", length: int | None = None
) -> Callable[..., sx.DependencyTree]:
    def make(gamma: float = 1.0) -> sx.DependencyTree:
        return sx.DependencyTree(  # type: ignore[abstract]
            randn(*shape),
            None if length is None else torch.full((2,), length),
            root=root,
            labelled=len(shape) == 4,
            smoothing=sx.Shannon(gamma),
        )

    return make


def segments(
    *shape: int, transition: tuple[int, ...] | None = None, length: int | None = None
) -> Callable[..., sx.SemiMarkov]:
    def make(smoothing: sx.Smoothing) -> sx.SemiMarkov:
        return sx.SemiMarkov(
            randn(*shape),
            None if transition is None else randn(*transition),
            None if length is None else torch.full((2,), length),
            smoothing=smoothing,
        )

    return make


def positions(smoothing: sx.Smoothing) -> sx.SemiMarkov:
    return sx.SemiMarkov.from_positions(
        randn(2, 4, 2), 2, randn(2, 2), randn(2, 2), torch.tensor([3, 3]), smoothing
    )


def grammar(smoothing: sx.Smoothing) -> sx.PCFG:
    lengths = torch.tensor([3, 3])
    return sx.PCFG(randn(2, 2), randn(2, 4, 4), randn(2, 4, 2), lengths, smoothing)


def low_rank_grammar() -> sx.PCFG:
    factors = (randn(4, 2), randn(2, 4, 2), randn(2, 2))
    return sx.PCFG.low_rank(randn(2), *factors, randn(2, 4, 2), torch.tensor([3, 3]))


def dag(parallel: bool = False) -> torch.Tensor:
    """Numbered against the topological order; node 6 leads nowhere and 0 is not reached."""
    edges = [(5, 4), (5, 3), (4, 3), (4, 2), (3, 2), (3, 1), (2, 1), (5, 1), (2, 6), (0, 3)]
    return torch.tensor([*edges, (4, 2)] if parallel else edges)


def alignment(
    kind: str = "dtw", moves: bool = False, band: int | None = None, short: bool = True
) -> Callable[..., sx.Alignment]:
    def make(smoothing: sx.Smoothing) -> sx.Alignment:
        return sx.Alignment(
            randn(2, 4, 5),
            (torch.tensor([3, 3]), torch.tensor([4, 4])) if short else None,
            kind=kind,
            moves=randn(2, 4, 5, 3) if moves else None,
            gap=(randn(2, 4), randn(1)) if kind == "edit" else None,
            band=band,
            smoothing=smoothing,
        )

    return make


def ctc(smoothing: sx.Smoothing) -> sx.CTC:
    lengths = torch.tensor([4, 4]), torch.tensor([2, 2])
    return sx.CTC(
        randn(2, 5, 4), torch.tensor([[3, 3, -1]] * 2), *lengths, blank=1, smoothing=smoothing
    )


def subset(k: int | tuple[int, int], length: int | None = None) -> Callable[..., sx.KSubset]:
    def make(smoothing: sx.Smoothing) -> sx.KSubset:
        lengths = None if length is None else torch.full((2,), length)
        return sx.KSubset(randn(2, 5), k, lengths, smoothing)

    return make


STRUCTURES: dict[str, Callable[..., sx.Structure]] = {
    "choice": lambda omega: sx.Choice(randn(2, 5), smoothing=omega),
    "choice-one": lambda omega: sx.Choice(randn(1), smoothing=omega),
    "chain-shared": chain((3, 3)),
    "chain-item": chain((2, 3, 3), ends=False),
    "chain-step": chain((2, 3, 3, 3), length=None),
    "chain-single": chain((2, 0, 3, 3), n=1, length=None),
    "chain-one-tag": chain((1, 1), c=1),
    "binary-tree": binary_tree(2, 5, 5, length=4),
    "binary-tree-labelled": binary_tree(2, 3, 3, 2),
    "binary-tree-leaf": binary_tree(2, 1, 1),
    "projective": projective(2, 5, 5, length=3),
    "projective-multi": projective(2, 5, 5, root="multi", length=3),
    "projective-labelled": projective(2, 4, 4, 2, length=2),
    "projective-siblings": projective(2, 4, 4, siblings=True),
    "projective-word": projective(2, 2, 2),
    "semi-markov": segments(2, 4, 2, 2, length=3),
    "semi-markov-transition": segments(2, 4, 3, 2, transition=(2, 2), length=3),
    "semi-markov-item": segments(2, 3, 4, 2, transition=(2, 2, 2)),
    "semi-markov-positions": positions,
    "pcfg": grammar,
    "path": lambda omega: sx.Path(dag(), randn(2, 10), 5, 1, smoothing=omega),
    "path-parallel": lambda omega: sx.Path(
        dag(parallel=True), randn(2, 11), 5, torch.tensor([2, 2]), smoothing=omega
    ),
    "grid-4": lambda omega: sx.GridPath(randn(2, 3, 4), neighbours=4, smoothing=omega),
    "grid-8": lambda omega: sx.GridPath(randn(2, 3, 3), smoothing=omega),
    "dtw": alignment(),
    "dtw-moves": alignment(moves=True),
    "dtw-band": alignment(band=1, short=False),
    "dtw-cell": lambda omega: sx.Alignment(randn(2, 1, 1), smoothing=omega),
    "edit": alignment("edit"),
    "monotone": alignment("monotone"),
    "ctc": ctc,
    "hyperpath": lambda omega: sx.Hyperpath(diamond(), randn(2, 12), smoothing=omega),
    "subset": subset(2),
    "subset-at-most": subset((0, 2)),
    "subset-between": subset((1, 3), length=4),
}

SMOOTHINGS: dict[str, sx.Smoothing] = {
    "shannon": sx.Shannon(),
    "shannon-0.5": sx.Shannon(0.5),
    "gini": sx.Gini(2.0),
    "tsallis-1.3": sx.Tsallis(1.3, 1.5),
    "hard": sx.Hard(),
}

ROWS: dict[str, Callable[[], sx.Structure]] = {
    f"{name}/{kind}": partial(make, omega)
    for name, make in STRUCTURES.items()
    for kind, omega in SMOOTHINGS.items()
}
ROWS["hmm/shannon"] = hmm
ROWS["grid-all/hard"] = lambda: sx.GridPath(-randn(2, 3, 3).abs(), moves="all", smoothing=sx.Hard())
ROWS["pcfg-low-rank/shannon"] = low_rank_grammar
ROWS["subset-padded/shannon"] = lambda: subset(2, length=3)(sx.Shannon())
ROWS["assignment/shannon"] = lambda: sx.Assignment(randn(2, 3, 3))
ROWS["assignment-wide/shannon-0.5"] = lambda: sx.Assignment(randn(2, 2, 4), None, sx.Shannon(0.5))
ROWS["assignment-tall/shannon"] = lambda: sx.Assignment(randn(2, 4, 2))
ROWS["assignment-padded/shannon"] = lambda: sx.Assignment(
    randn(2, 4, 4), (torch.tensor([4, 4]), torch.tensor([3, 3]))
)
ROWS["nonprojective/shannon"] = nonprojective(2, 5, 5, length=3)
ROWS["nonprojective/shannon-0.5"] = partial(nonprojective(2, 4, 4), 0.5)
ROWS["nonprojective-multi/shannon"] = nonprojective(2, 5, 5, root="multi", length=3)
ROWS["nonprojective-labelled/shannon-0.5"] = partial(nonprojective(2, 4, 4, 2, length=2), 0.5)
ROWS["nonprojective-word/shannon"] = nonprojective(2, 2, 2)
ROWS["spanning-tree/shannon"] = lambda: sx.SpanningTree(randn(2, 5, 5), torch.tensor([4, 4]))
ROWS["spanning-tree/shannon-0.5"] = lambda: sx.SpanningTree(
    randn(2, 3, 3), smoothing=sx.Shannon(0.5)
)
ROWS["spanning-tree-node/shannon"] = lambda: sx.SpanningTree(randn(2, 1, 1))
