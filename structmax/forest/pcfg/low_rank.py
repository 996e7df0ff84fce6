"""Charts of a grammar of low rank in exp space, without its tensor of rules, for any device.

With rules[A, B, C] = log Σ_r exp(parent[A, r] + left[B, r] + right[C, r]) the sums of a span factor
through the ranks (Cohen, Satta & Collins, 2013; Yang, Zhao & Tu, 2021):

    l[i, k, r] = Σ_B exp(left[B, r]) p[i, k, B],    and right likewise,
    Z[r] = Σ_k weight_k l[i, k, r] r[k+1, j, r],    total[A] = Σ_r exp(parent[A, r]) Z[r],

in time O(n³ R + n² S R). p, weights and totals are as in ``products``. A Gibbs distribution over
trees with a rank at each of their rules: gradients are the expected uses of the factors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from structmax.forest.pcfg.chart import ALL, Dual, Grammar
from structmax.forest.pcfg.kernel import peak
from structmax.forest.pcfg.products import ExpSpace, exponential


class LowRank(ExpSpace):
    """The kernel for ``weights``: left and right ``(B, S, R)`` and parent ``(B, N, R)``."""

    def __init__(self, g: Grammar, v: Grammar | None = None) -> None:
        super().__init__(g, v)
        left, right, parent = g.weights
        tops = [peak(left, (1,)), peak(right, (1,))]
        parent = parent + tops[0] + tops[1]
        top = peak(parent, (2,))
        self.taken_out = top.mT  # (·, 1, N)
        logs = [left - tops[0], right - tops[1], parent - top]
        self.factors = [Dual(x.exp()) for x in logs]
        if v is not None:
            pairs = zip(self.factors, v.weights, strict=True)
            self.factors = [Dual(f.x, torch.where(f.x == 0, 0.0, f.x * d)) for f, d in pairs]
        B, n, R = len(g.spans), g.n, left.shape[-1]
        self.sides = [self._new(B, n, n, R) for _ in range(2)]  # l by start, r by end, as in Chart
        self.flows = [self._new(B, n, n, R) for _ in range(2)]
        self.used = [self._new(B, *f.x.shape[1:]) for f in self.factors]
        self._spread(1)

    def _new(self, *shape: int) -> Dual:
        zeros = self.g.spans.new_zeros
        return Dual(zeros(shape), zeros(shape) if self.dual else None)

    def _views(self, sides: list[Dual], w: int) -> list[Dual]:
        """The two views ``(B, n−w+1, R)`` of the spans of width w."""
        n = self.g.n
        left = sides[0].at(ALL, slice(n - w + 1), w - 1)
        return [left, sides[1].at(ALL, slice(w - 1, None), n - w)]

    def _children(self, sides: list[Dual], w: int) -> list[Dual]:
        """Left and right children ``(B, n−w+1, splits, R)`` of the spans of width w, as views."""
        n = self.g.n
        left = sides[0].at(ALL, slice(n - w + 1), slice(w - 1))
        return [left, sides[1].at(ALL, slice(w - 1, None), slice(n - w + 1, None))]

    def _symbols(self, w: int) -> tuple[Dual, list[Dual]]:
        """p of the spans of width w, and the rows of both factors for their symbols."""
        N = self.g.N
        rows = slice(N, None) if w == 1 else slice(None, N)
        p, log = (c.leaf if w == 1 else c.own(w)[0] for c in (self.p, self.log))
        return exponential(p.x, log), [f.at(ALL, rows) for f in self.factors[:2]]

    def _spread(self, w: int) -> None:
        """l and r of the spans of width w."""
        p, rows = self._symbols(w)
        for view, factor in zip(self._views(self.sides, w), rows, strict=True):
            view.write(p.by(factor, torch.matmul))

    def _weights(self, w: int) -> tuple[Tensor, Tensor]:
        """e^{m + m' − M} ``(B, starts, splits, 1)`` and M."""
        n, m = self.g.n, self.m
        starts = slice(None, n - w + 1)
        left = torch.cat([m.leaf.x[:, starts, None], m.by_start.x[:, starts, 1 : w - 1]], 2)
        right = torch.cat(
            [m.by_end.x[:, w - 1 :, n - w + 1 : n - 1], m.leaf.x[:, w - 1 :, None]], 2
        )
        top = peak(left + right, (2,))
        return (left + right - top).exp(), top.squeeze(2)

    def _through(self, w: int) -> tuple[Dual, Tensor]:
        """Z ``(B, starts, R)`` and M."""
        weight, top = self._weights(w)
        left, right = self._children(self.sides, w)
        return left.map(weight.mul).by(right).sum(2), top

    def up(self, w: int) -> Dual:
        z, top = self._through(w)
        return self.logs(w, z.by(self.factors[2].mT, torch.matmul), self.taken_out + top)

    def keep(self, w: int, beta: Dual) -> None:
        super().keep(w, beta)
        self._spread(w)

    def visits(self, w: int) -> Dual:
        """Also counts the uses of left and right by these spans."""
        p, rows = self._symbols(w)
        out, N = None, self.g.N
        flows = self._views(self.flows, w)
        for side, (flow, factor) in enumerate(zip(flows, rows, strict=True)):
            x = p.by(flow.by(factor.mT, torch.matmul))
            out = x if out is None else out.plus(x)
            count = factor.by(p.mT.by(flow, torch.matmul))
            at = slice(N, None) if w == 1 else slice(None, N)
            self.used[side].at(ALL, at).add(count)
        assert out is not None
        return out

    def leaf_visits(self) -> Dual:
        return self.visits(1)

    def down(self, w: int, visits: Dual) -> None:
        y = self.over_total(w, visits)
        z, _ = self._through(w)
        self.used[2].add(self.factors[2].by(y.mT.by(z, torch.matmul)))
        weight, _ = self._weights(w)
        up = y.by(self.factors[2], torch.matmul).at(ALL, ALL, None).map(weight.mul)
        left, right = self._children(self.sides, w)
        into = self._children(self.flows, w)
        into[0].add(up.by(right))
        into[1].add(up.by(left))

    def counts(self) -> list[Dual]:
        return self.used
