"""Charts by few and large matrix products: exp space with a scale that adds up along words.

Every span of w words keeps

    q[i, j, A] = exp(β[i, j, A] − Σ_{k=i..j} (the largest score of word k) − (w − 1)·ρ − w·λ),

ρ the largest score of a rule and λ the growth of q per word that smaller widths showed. What is
taken out is the same for all splits of a span, so they need no weights. With E = exp(rules − ρ),
words are put into the rules before the chart is begun, and all spans of a width are four products:

    L[j, A, B] = Σ_p E[A, B, p] word[j, p],      R[i, A, C] = Σ_p E[A, p, C] word[i, p],
    X[B, C] = Σ_k q[i, k, B] q[k+1, j, C]        over splits into two longer spans,
    q[i, j] = exp(spans[i, j]) (L[j] q[i, j−1] + R[i] q[i+1, j] + E X).

The top-down pass is the reverse of that, with o = ∂A/∂q. The price is range: β must stay within a
few hundred of a line in w. ``wrong`` says for which items it does not, to be computed again by
``products``, which has a scale for each span.

Charts ``(n, B, n, N)`` are laid out by start, item and width: starts and items are one dimension of
a batch of matrices, and the left children of all spans of a width are one strided view, and so are
the right ones.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from structmax.forest.pcfg.chart import Grammar
from structmax.forest.pcfg.kernel import divide, peak
from structmax.primitive import backend_for

LARGE = 1e70  # numbers up to it and down to its inverse are trusted: products of four stay finite


class Scaled:
    """Both passes over the chart of a grammar with a tensor of rules."""

    def __init__(self, g: Grammar) -> None:
        B, n, N, S = len(g.spans), g.n, g.N, g.S
        self.g, self.shape = g, (B, n, N, S)
        leaf = g.leaf().transpose(0, 1)  # (n, B, P)
        self.word_tops, self.rule_top = peak(leaf, (-1,)), peak(g.rules, (1, 2, 3))
        self.word = (leaf - self.word_tops).exp().reshape(n * B, g.P).contiguous()
        self.E = (g.rules - self.rule_top).exp()
        inner, right, left = self.E[..., :N, :N], self.E[..., N:], self.E[..., N:, :N].mT
        self.inner = inner.flatten(2).expand(B, -1, -1)  # (B, N, N²)
        self.outer = [e.flatten(1, 2).expand(B, -1, -1) for e in (right, left)]  # (B, N·, P)
        self.L, self.R = leaf.new_empty(n * B, N, S), leaf.new_empty(n * B, N, N)
        for e, table in zip(self.outer, (self.L, self.R), strict=True):
            torch.bmm(self.by_item(self.word), e.mT, out=self.by_item(table))
        at = torch.arange(n, device=leaf.device)
        inside = (at > 0) & (at[:, None, None] + at < g.lengths[:, None])  # (n, B, n)
        spans = by_width(torch.nn.functional.pad(g.spans[..., :N], (0, 0, 0, 0, 0, 1)))
        self.cells = torch.where(inside[..., None], spans, -math.inf).contiguous()
        self.gain = self.cells.exp()
        self.q, self.growth = torch.zeros_like(self.gain), leaf.new_zeros(B)

    def own(self, x: Tensor, w: int) -> Tensor:
        """x of the spans of width w, a view ``(starts·B, N, 1)``."""
        return self.where_fit(x, w, w, 0)

    def beside_word(self, x: Tensor, w: int) -> tuple[Tensor, Tensor]:
        """The same of the children of the spans of width w that leave a word, the last or the
        first."""
        return self.where_fit(x, w, w - 1, 0), self.where_fit(x, w, w - 1, 1)

    def where_fit(self, x: Tensor, w: int, v: int, further: int) -> Tensor:
        """x of the spans of width v that begin where one of width w can, or so much further."""
        B, n, N, _ = self.shape
        shape, start = ((n - w + 1) * B, N, 1), B * n * N
        return x.as_strided(shape, (n * N, 1, 1), further * start + (v - 1) * N)

    def both_longer(self, x: Tensor, w: int) -> tuple[Tensor, Tensor]:
        """x of the left and the right children of the spans of width w where neither is a word, as
        views ``(starts·B, splits, N)``: at (i, v) and (i + v, w − v), for v from 2 to w − 2."""
        B, n, N, _ = self.shape
        shape, item, start = ((n - w + 1) * B, w - 3, N), n * N, max(B, 1) * n * N
        left = x.as_strided(shape, (item, N, 1), N)
        return left, x.as_strided(shape, (item, start - N, 1), 2 * start + (w - 3) * N)

    def by_item(self, x: Tensor) -> Tensor:
        """c numbers for each start and item, ``(starts·B, ...)`` without gaps, as a view
        ``(B, starts, c)``."""
        B, c = self.shape[0], math.prod(x.shape[1:])
        return x.as_strided((B, len(x) // max(B, 1), c), (c, B * c, 1))

    def joined(self, w: int) -> Tensor:
        """X of the spans of width w, ``(B, starts, N²)``."""
        left, right = self.both_longer(self.q, w)
        return self.by_item(torch.bmm(left.mT, right))

    # -- bottom-up --------------------------------------------------------------------------------

    def fill(self) -> None:
        """q of all spans, from short to long."""
        B, n, N, _ = self.shape
        L, inner = self.L[..., :N], self.inner.mT
        for w in range(2, n + 1):
            rows = (n - w + 1) * B
            if w == 2:
                total = torch.bmm(self.L[B:, :, N:], self.word[:rows, :, None])
            else:
                first, second = self.beside_word(self.q, w)
                total = torch.bmm(L[(w - 1) * B :], first)
                total.baddbmm_(self.R[:rows], second)
            if w > 3:
                add_product(self.by_item(total), self.joined(w), inner)
            self.keep(w, total)

    def rise(self) -> Tensor:
        """A ``(B)``."""
        self.fill()
        B, g = self.shape[0], self.g
        self.goal = 0, torch.arange(B, device=self.q.device), g.lengths - 1
        whole = self.q[self.goal]
        root = torch.where(whole == 0, -math.inf, g.root)
        root_top = peak(root, (1,))
        root = (root - root_top).exp()
        mass = (root * whole).sum(1, keepdim=True)
        self.above = divide(root, mass)  # o of the whole sentence
        taken_out = self.word_tops.sum((0, 2)) + (g.lengths - 1) * self.rule_top.flatten()
        self.a = (root_top + mass.log()).squeeze(1) + taken_out + g.lengths * self.growth
        return self.a

    def keep(self, w: int, total: Tensor) -> None:
        """Stores q of width w, of a total without the spans' own scores."""
        torch.mul(total, self.own(self.gain, w), out=self.own(self.q, w))
        if 2 < w < self.g.n and w & (w - 1) == 0:  # what is seen tells as much again
            self.rescale(w)

    def rescale(self, w: int) -> None:
        """Takes out the growth that the spans of width w show, if they hold a number at all."""
        top, most = self.q[:, :, w - 1].amax((0, 2)), math.log(LARGE)
        growth = torch.where(top == 0, 0.0, top.log().clamp(-most, most) / w)
        self.growth += growth
        widths = torch.arange(1, w + 1, device=growth.device)
        factor = (-growth[:, None] * widths).exp()[..., None]  # (B, w, 1)
        self.q[:, :, :w].mul_(factor)
        for x in (self.word, self.L, self.R):
            self.by_item(x).mul_(factor[:, :1])

    def wrong(self) -> Tensor | None:
        """After ``rise``, the items ``(B)`` that have a number out of range; None if a look says
        that none has."""
        small = (self.q < 1 / LARGE) & (self.cells > -math.inf)
        largest = torch.maximum(self.q.amax((0, 2, 3)), self.gain.amax((0, 2, 3)))
        bad = ~((largest <= LARGE) & (self.a < math.inf))
        capturing = small.is_cuda and torch.cuda.is_current_stream_capturing()
        if not capturing and not bool((small.any((0, 2, 3)) | bad).any()):
            return None
        chart = Reachable(self.g)  # what nothing derives is 0 by right
        chart.fill()
        return bad | (small & (chart.q > 0)).any((0, 2, 3))

    # -- top-down ---------------------------------------------------------------------------------

    def fall(self) -> list[Tensor]:
        """Expected uses of spans ``(B, n, n, S)``, root symbols and rules, after ``rise``."""
        B, n, N, _ = self.shape
        o, gain = torch.zeros_like(self.q), torch.where(self.q > 0, self.gain, 0.0)
        o[self.goal] = self.above
        d_word, d_L, d_R = (torch.zeros_like(x) for x in (self.word, self.L, self.R))
        d_inner = self.inner.new_zeros(self.inner.shape)
        sides = [(self.L[..., :N].mT, d_L[..., :N]), (self.R.mT, d_R)]
        for w in range(n, 2, -1):
            y, rows = self.own(o, w) * self.own(gain, w), (n - w + 1) * B
            children = zip(self.beside_word(self.q, w), self.beside_word(o, w), strict=True)
            words = slice((w - 1) * B, None), slice(rows)
            for (table, d_table), (q, into), at in zip(sides, children, words, strict=True):
                add_product(into, table[at], y)
                add_product(d_table[at], y, q.mT)
            if w > 3:
                of_item, (left, right) = self.by_item(y), self.both_longer(self.q, w)
                d_inner.baddbmm_(of_item.mT, self.joined(w))
                through, (to_left, to_right) = y.new_empty(rows, N, N), self.both_longer(o, w)
                torch.bmm(of_item, self.inner, out=self.by_item(through))
                add_product(to_left, right, through.mT)
                add_product(to_right, left, through)
        if n > 1:
            y, rows = self.own(o, 2) * self.own(gain, 2), (n - 1) * B
            add_product(d_word[:rows, :, None], self.L[B:, :, N:].mT, y)
            add_product(d_L[B:, :, N:], y, self.word[:rows, None])
        return [*self.uses(o, d_word, d_L, d_R), self.counts(d_inner, d_L, d_R)]

    def uses(self, o: Tensor, d_word: Tensor, d_L: Tensor, d_R: Tensor) -> tuple[Tensor, Tensor]:
        """Of spans and of root symbols."""
        B, n, N, S = self.shape
        for e, d in zip(self.outer, (d_L, d_R), strict=True):
            add_product(self.by_item(d_word), self.by_item(d), e)
        padded = o.new_zeros(B, n + 1, n, S)
        spans = by_width(padded)
        spans[..., :N].copy_(visits := o * self.q)
        spans[:, :, 0, N:].copy_((d_word * self.word).view(n, B, S - N))
        return padded[:, :n].contiguous(), visits[self.goal]

    def counts(self, d_inner: Tensor, d_L: Tensor, d_R: Tensor) -> Tensor:
        """Of rules ``(B, N, S, S)``."""
        B, _, N, S = self.shape
        out, word = d_inner.new_empty(B, N, S, S), self.by_item(self.word)
        right, left = (torch.bmm(self.by_item(d).mT, word) for d in (d_L, d_R))
        out[..., :N, :N] = d_inner.unflatten(-1, (N, N))
        out[..., N:] = right.unflatten(1, (N, S))
        out[..., N:, :N] = left.unflatten(1, (N, N)).mT
        return out.mul_(self.E)


class Reachable(Scaled):
    """A chart of ones and zeros: what is derived at all."""

    def __init__(self, g: Grammar) -> None:
        scores = (g.spans, g.root, *g.weights)
        allowed = [torch.where(t == -math.inf, -math.inf, 0.0) for t in scores]
        super().__init__(Grammar(allowed, g.lengths, 1.0))

    def keep(self, w: int, total: Tensor) -> None:
        self.own(self.q, w).copy_(total * self.own(self.gain, w) > 0)


def by_width(padded: Tensor) -> Tensor:
    """The view ``(n, B, n, c)`` by start and width of ``(B, n + 1, n, c)`` by first and last word;
    what is beyond the last word lies below the diagonal."""
    B, _, n, c = padded.shape
    return padded.as_strided((n, B, n, c), ((n + 1) * c, (n + 1) * n * c, c, 1))


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b, for any view; only a GPU does that in one launch, and not matrix by matrix."""
    if backend_for(out) == "gpu" or out.is_contiguous():
        out.baddbmm_(a, b)
    else:
        out.add_(torch.bmm(a, b))
