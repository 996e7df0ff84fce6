"""The two passes over a chart that all kernels share.

    bottom-up:  β[i, j, A] = log Σ exp-scores of the trees of A over i..j,
                A(θ) = log Σ_A exp(root[A] + β[0, len − 1, A]);
    top-down:   expected uses of every labelled span and of every weight: the gradient of A(θ).

With a direction v of change of the scores, both carry derivatives along it (``Dual``), and those of
the top-down pass are the Hessian-vector product.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from structmax.forest.pcfg.chart import ALL, Chart, Dual, Grammar, to_square


class Kernel(ABC):
    """Passes over the chart of a grammar; ``log`` is β with its derivative."""

    def __init__(self, g: Grammar, v: Grammar | None = None) -> None:
        self.g, self.v, self.dual = g, v, v is not None
        self.log = Chart(g, g.N, g.P, -math.inf, self.dual)
        self.log.leaf = Dual(g.leaf(), None if v is None else v.leaf())

    @abstractmethod
    def up(self, w: int) -> Dual:
        """log Σ over rules and splits, for all spans of width w: β without their own scores."""

    def keep(self, w: int, beta: Dual) -> None:
        """Stores β of width w."""
        self.log.put(w, beta)

    @abstractmethod
    def visits(self, w: int) -> Dual:
        """Expected uses of the nonterminals over the spans of width w, by those above them."""

    @abstractmethod
    def leaf_visits(self) -> Dual:
        """Expected uses of the preterminals, ``(B, n, P)``."""

    @abstractmethod
    def down(self, w: int, visits: Dual) -> None:
        """Hands the uses of the spans of width w down to their children."""

    @abstractmethod
    def counts(self) -> list[Dual]:
        """Expected uses of the weights, once all spans are done."""

    def rise(self) -> Tensor:
        """A ``(B)``."""
        g, v = self.g, self.v
        for w in range(2, g.n + 1):
            own = Dual(g.cells(w), None if v is None else v.cells(w))
            self.keep(w, own.plus(self.up(w)))
        top = Dual(g.root, None if v is None else v.root).plus(self.log.goal(g.lengths))
        weight, m = relative(top.x)
        mass = weight.sum(-1, keepdim=True)
        q = divide(weight, mass)
        self.goal = Dual(q)  # probabilities of the root's symbol
        if top.d is not None:
            self.goal = Dual(q, q * (top.d - (q * top.d).sum(-1, keepdim=True)))
        return (m + mass.log()).squeeze(-1)

    def fall(self) -> list[Dual]:
        """Expected uses of spans ``(B, n, n, S)``, root symbols and weights, after ``rise``."""
        g, cells = self.g, []
        for w in range(g.n, 1, -1):
            visits = self.visits(w)
            here = (g.lengths == w).to(g.spans.dtype)[:, None]
            visits.at(ALL, 0).add(self.goal.map(here.mul))
            cells.append(visits)
            self.down(w, visits)
        leaf = self.leaf_visits()
        cells = cells[::-1] or [self.goal.at(ALL, None).at(ALL, slice(0))]
        spans = Dual(to_square(leaf.x, [c.x for c in cells]))
        if leaf.d is not None:
            spans = Dual(spans.x, to_square(leaf.d, [c.d for c in cells if c.d is not None]))
        return [spans, self.goal, *self.counts()]


def peak(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The largest along some dimensions, kept; 0 instead of −inf."""
    top = x.amax(dims, keepdim=True)
    return torch.where(top == -math.inf, 0.0, top)


def relative(x: Tensor) -> tuple[Tensor, Tensor]:
    """exp(x − m) and m, the largest of the last dimension."""
    m = x.amax(-1, keepdim=True)
    return (x - torch.where(m == -math.inf, 0.0, m)).exp(), m


def divide(x: Tensor, y: Tensor) -> Tensor:
    """x / y, 0 where y is 0."""
    return torch.where(y == 0, 0.0, x / torch.where(y == 0, 1.0, y))
