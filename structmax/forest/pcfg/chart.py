"""Charts and grammars as kernels see them: numbers with a derivative, laid out for slicing.

Letters: B batch, n words, N nonterminals, P preterminals, S = N + P symbols; w the width of a span.
Words are preterminals and longer spans are nonterminals, so rules fall into four *kinds* by their
children: ``nn``, ``np``, ``pn``, ``pp``. The last is for spans of two words, and only that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALL = slice(None)


class Dual(NamedTuple):
    """A tensor and, where a direction of change of the scores is given, its derivative along it."""

    x: Tensor
    d: Tensor | None = None

    def by(self, other: Dual, product: Callable[[Tensor, Tensor], Tensor] = torch.mul) -> Dual:
        """A product, by any bilinear function."""
        x = product(self.x, other.x)
        if self.d is None or other.d is None:
            return Dual(x)
        return Dual(x, product(self.d, other.x) + product(self.x, other.d))

    def plus(self, other: Dual) -> Dual:
        d = None if self.d is None or other.d is None else self.d + other.d
        return Dual(self.x + other.x, d)

    def map(self, linear: Callable[[Tensor], Tensor]) -> Dual:
        """A linear function of both."""
        return Dual(linear(self.x), None if self.d is None else linear(self.d))

    def at(self, *index: Any) -> Dual:
        return self.map(lambda x: x[index])

    def sum(self, dim: int) -> Dual:
        return self.map(lambda x: x.sum(dim))

    def unflatten(self, sizes: tuple[int, ...]) -> Dual:
        return self.map(lambda x: x.unflatten(-1, sizes))

    @property
    def mT(self) -> Dual:
        return self.map(lambda x: x.mT)

    def write(self, other: Dual) -> None:
        self.x.copy_(other.x)
        if self.d is not None and other.d is not None:
            self.d.copy_(other.d)

    def add(self, other: Dual) -> None:
        self.x.add_(other.x)
        if self.d is not None and other.d is not None:
            self.d.add_(other.d)


class Grammar:
    """Scores in float64: ``spans (B, n, n, S)``, ``root (B, N)``, and the ``weights`` of the rules:
    the rules ``(B, N, S, S)``, or the three factors of low rank. What all items share is kept once.

    ``outside`` is the score of spans beyond an item's length. A direction of change has the same
    form, with zeros there.
    """

    def __init__(
        self, scores: Sequence[Tensor], lengths: Tensor, gamma: float, outside: float = -math.inf
    ) -> None:
        spans, root, *weights = scores
        self.n, self.S, self.N = spans.shape[1], spans.shape[3], root.shape[1]
        self.P = self.S - self.N
        self.lengths, self.outside = lengths.long(), outside
        self.spans, self.root = spans.double() / gamma, root.double() / gamma
        self.weights = [
            (w[:1] if len(w) > 1 and w.stride(0) == 0 else w).double() / gamma for w in weights
        ]

    @property
    def rules(self) -> Tensor:
        return self.weights[0]

    def _within(self, x: Tensor, w: int) -> Tensor:
        last = torch.arange(w - 1, self.n, device=x.device)
        return torch.where((last < self.lengths[:, None])[..., None], x, self.outside)

    def leaf(self) -> Tensor:
        """Scores of the preterminals over the words, ``(B, n, P)``."""
        return self._within(self.spans.diagonal(0, 1, 2)[:, self.N :].mT, 1)

    def cells(self, w: int) -> Tensor:
        """Scores of the nonterminals over the spans of width w, ``(B, n−w+1, N)``."""
        return self._within(self.spans.diagonal(w - 1, 1, 2)[:, : self.N].mT, w)

    def take(self, items: Tensor) -> Grammar:
        """The grammar of some items."""
        weights = [w if len(w) == 1 else w[items] for w in self.weights]
        scores = [self.spans[items], self.root[items], *weights]
        return Grammar(scores, self.lengths[items], 1.0, self.outside)

    def kinds(self, rules: Tensor) -> dict[str, Tensor]:
        """Rules ``(·, N, S, S)`` by kind: ``(N, b·c)`` if shared, else ``(B, N, b·c)``."""
        rules = rules[0] if len(rules) == 1 else rules
        n, p = slice(None, self.N), slice(self.N, None)
        cuts = {"nn": (n, n), "np": (n, p), "pn": (p, n), "pp": (p, p)}
        return {kind: rules[(..., *cut)].flatten(-2) for kind, cut in cuts.items()}

    def whole(self, kinds: dict[str, Tensor]) -> Tensor:
        """The inverse of ``kinds``, ``(B, N, S, S)``; zeros for a kind that is not there."""
        N = self.N
        out = self.spans.new_zeros(len(self.spans), N, self.S, self.S)
        n, p = slice(None, N), slice(N, None)
        cuts = {"nn": (n, n), "np": (n, p), "pn": (p, n), "pp": (p, p)}
        for kind, x in kinds.items():
            part = out[(..., *cuts[kind])]
            part.copy_(x.unflatten(-1, part.shape[-2:]))
        return out


class Chart:
    """A vector for each span, kept by start and by end, so that the children of all spans of one
    width are slices: ``by_start (B, n, n, c)`` as ``[first, w − 1]``, ``by_end`` as
    ``[last, n − w]`` and, for words, ``leaf (B, n, d)``.
    """

    def __init__(self, g: Grammar, c: int, d: int, fill: float = 0.0, dual: bool = False) -> None:
        def new(*shape: int) -> Dual:
            change = g.spans.new_zeros(shape) if dual else None
            return Dual(g.spans.new_full(shape, fill), change)

        B, self.n = len(g.spans), g.n
        self.by_start, self.by_end = new(B, g.n, g.n, c), new(B, g.n, g.n, c)
        self.leaf = new(B, g.n, d)

    def own(self, w: int) -> tuple[Dual, Dual]:
        """The two views ``(B, n−w+1, c)`` of the spans of width w."""
        n = self.n
        left = self.by_start.at(ALL, slice(n - w + 1), w - 1)
        return left, self.by_end.at(ALL, slice(w - 1, None), n - w)

    def put(self, w: int, x: Dual) -> None:
        for view in self.own(w):
            view.write(x)

    def goal(self, lengths: Tensor) -> Dual:
        """The vector of each item's whole sentence, ``(B, c)``."""
        items = torch.arange(len(lengths), device=lengths.device)
        return self.by_start.at(items, 0, lengths - 1)

    def children(self, w: int) -> dict[str, tuple[Dual, Dual]]:
        """For each kind, the left and right children of the spans of width w, as views
        ``(B, n−w+1, splits, ·)``."""
        n, starts, ends = self.n, slice(self.n - w + 1), slice(w - 1, None)
        first, last = self.leaf.at(ALL, starts, None), self.leaf.at(ALL, ends, None)
        if w == 2:
            return {"pp": (first, last)}
        left = self.by_start.at(ALL, starts, slice(1, w - 1))  # widths 2 to w − 1
        right = self.by_end.at(ALL, ends, slice(n - w + 1, n - 1))  # widths w − 1 to 2
        pairs = {
            "np": (left.at(ALL, ALL, slice(-1, None)), last),
            "pn": (first, right.at(ALL, ALL, slice(1))),
        }
        if w > 3:
            pairs["nn"] = left.at(ALL, ALL, slice(-1)), right.at(ALL, ALL, slice(1, None))
        return pairs


def to_square(leaf: Tensor, cells: Sequence[Tensor], fill: float = 0.0) -> Tensor:
    """``(B, n, n, S)`` from the vectors of the words ``(B, n, P)`` and those of widths 2, 3, …"""
    B, n, P = leaf.shape
    N = cells[0].shape[-1]
    square = leaf.new_full((B, n, n, N + P), fill)
    square.diagonal(0, 1, 2)[:, N:] = leaf.mT
    for w, x in enumerate(cells, 2):
        if x.shape[1]:
            square.diagonal(w - 1, 1, 2)[:, :N] = x.mT
    return square
