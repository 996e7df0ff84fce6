"""Charts by matrix products in exp space, in plain torch for any device.

Every span keeps p = exp(β − m), m the largest of its β. With weights e^{m + m' − M} for the splits
of a span, M the largest exponent among them, and E = exp(rules − the largest of each parent),

    X[B, C] = Σ_k weight_k p[i, k, B] p[k+1, j, C],     total[A] = Σ_{B, C} E[A, B, C] X[B, C],

so the splits cost one small product for each span, and the rules one product for all spans of a
width. The top-down pass is the reverse of that; X is computed again rather than kept, so memory is
that of the chart. Underflow can only falsify a total that is tiny: ``wrong`` says which items have
such, to be computed again by ``terms``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from structmax.forest.pcfg.chart import Chart, Dual, Grammar
from structmax.forest.pcfg.kernel import Kernel, divide, peak, relative
from structmax.forest.pcfg.scaled import Reachable

TINY = 1e-200  # far above the smallest float64, far below any sum that matters


class ExpSpace(Kernel):
    """p and m of the chart, and the totals."""

    def __init__(self, g: Grammar, v: Grammar | None = None) -> None:
        super().__init__(g, v)
        self.p, self.m = Chart(g, g.N, g.P), Chart(g, 1, 1, -math.inf)
        p, m = relative(self.log.leaf.x)
        self.p.leaf, self.m.leaf = Dual(p), Dual(m)
        self.totals: dict[int, Dual] = {}  # by width

    def keep(self, w: int, beta: Dual) -> None:
        super().keep(w, beta)
        p, m = relative(beta.x)
        self.p.put(w, Dual(p))
        self.m.put(w, Dual(m))

    def logs(self, w: int, total: Dual, taken_out: Tensor) -> Dual:
        """log total + what was taken out; the total is kept."""
        self.totals[w] = total
        d = None if total.d is None else divide(total.d, total.x)
        return Dual(taken_out + total.x.log(), d)

    def over_total(self, w: int, visits: Dual) -> Dual:
        """visits / total, 0 where nothing is visited."""
        total = self.totals[w]
        x = divide(visits.x, total.x)
        if visits.d is None or total.d is None:
            return Dual(x)
        return Dual(x, divide(visits.d - x * total.d, total.x))

    def small(self) -> list[Tensor]:
        """For each width, where a total is too small to trust, or 0."""
        totals = self.totals.items()
        return [(t.x < TINY) & (self.g.cells(w) > -math.inf) for w, t in totals]


class Products(ExpSpace):
    """The kernel for a tensor of rules."""

    def __init__(self, g: Grammar, v: Grammar | None = None) -> None:
        super().__init__(g, v)
        top = peak(g.rules, (-2, -1))
        e = (g.rules - top).exp()
        self.taken_out = top.flatten(1)[:, None]  # (·, 1, N)
        self.E = {kind: Dual(x) for kind, x in g.kinds(e).items()}
        if v is not None:  # a direction for each item, whether or not they share their rules
            changes = g.kinds(torch.where(e == 0, 0.0, e * v.rules))
            self.E = {kind: Dual(x.x, changes[kind]) for kind, x in self.E.items()}
        self.flow = Chart(g, g.N, g.P, dual=self.dual)
        self.used: dict[str, Dual] = {}

    def children(self, w: int) -> tuple[dict[str, tuple[Dual, Dual]], Tensor]:
        """The left children, weighted, and the right children of each kind, and M."""
        sums = {kind: left.x + right.x for kind, (left, right) in self.m.children(w).items()}
        top = peak(torch.cat(list(sums.values()), 2), (2,))
        p, change = self.p.children(w), self.log.children(w)
        pairs = {}
        for kind, (left, right) in p.items():
            weighted, (d_left, d_right) = left.x * (sums[kind] - top).exp(), change[kind]
            pairs[kind] = exponential(weighted, d_left), exponential(right.x, d_right)
        return pairs, top.squeeze(2)

    def up(self, w: int) -> Dual:
        pairs, top = self.children(w)
        total = Dual(torch.zeros_like(top), torch.zeros_like(top))
        for kind, pair in pairs.items():
            total = total.plus(joined(*pair).by(self.E[kind].mT, torch.matmul))
        return self.logs(w, total, self.taken_out + top)

    def visits(self, w: int) -> Dual:
        left, right = self.flow.own(w)
        return left.plus(right)

    def leaf_visits(self) -> Dual:
        return self.flow.leaf

    def down(self, w: int, visits: Dual) -> None:
        y = self.over_total(w, visits)
        flows = self.flow.children(w)
        for kind, (left, right) in self.children(w)[0].items():
            sizes = left.x.shape[-1], right.x.shape[-1]
            up = y.by(self.E[kind], torch.matmul).unflatten(sizes)
            flows[kind][0].add(left.by(right.by(up.mT, torch.matmul)))
            flows[kind][1].add(right.by(left.by(up, torch.matmul)))
            used = y.mT.by(joined(left, right), torch.matmul)
            if kind in self.used:
                self.used[kind].add(used)
            else:
                self.used[kind] = used

    def counts(self) -> list[Dual]:
        kinds = {kind: used.by(self.E[kind]) for kind, used in self.used.items()}
        x = self.g.whole({kind: c.x for kind, c in kinds.items()})
        if not self.dual:
            return [Dual(x)]
        return [Dual(x, self.g.whole({k: c.d for k, c in kinds.items() if c.d is not None}))]


def exponential(x: Tensor, log: Dual) -> Dual:
    """x is the exponential of a number whose derivative is known."""
    return Dual(x, None if log.d is None else x * log.d)


def joined(left: Dual, right: Dual) -> Dual:
    """X of one kind, ``(B, starts, b·c)``."""
    return left.mT.by(right, torch.matmul).map(lambda x: x.flatten(-2))


def items_with(found: list[Tensor], lengths: Tensor) -> Tensor:
    """Items ``(B)`` that have something in one of the widths."""
    none = torch.zeros_like(lengths, dtype=torch.bool)
    return torch.stack([none, *[f.flatten(1).any(1) for f in found]]).any(0)


def wrong(kernel: Products) -> Tensor:
    """Which items ``(B)`` have a sum that is too small to trust."""
    small, lengths = kernel.small(), kernel.g.lengths
    items = items_with(small, lengths)
    capturing = items.is_cuda and torch.cuda.is_current_stream_capturing()
    if not capturing and not bool(items.any()):
        return items
    there = Reachable(kernel.g)  # a sum that is 0 because nothing derives its symbol is right
    there.rise()
    found = [s & there.by_item(there.own(there.q, w) > 0) for w, s in enumerate(small, 2)]
    return items_with(found, lengths)
