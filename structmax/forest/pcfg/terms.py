"""Charts term by term in log space, in plain torch for any device: slower than ``products``, but
right for any spread of scores. And the charts of the maximum, which is no matrix product.

For all spans of a width at once, X joins the splits, and the rules follow parent by parent:

    X[B, C] = ⊕_k (β[i, k, B] + β[k+1, j, C]),    ⊕_{B, C} (rules[A, B, C] + X[B, C]),

where ⊕ is log Σ exp or max. Top-down, the share exp(term − sum) of each term is divided by the sum
of the shares, which is 1 but where the scores are so large that the sum has lost its logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from structmax.forest.pcfg.chart import ALL, Chart, Dual, Grammar, to_square
from structmax.forest.pcfg.kernel import Kernel, divide

BLOCK = 1 << 22  # how many terms are looked at together, if it is not less than one parent's


class Terms(Kernel):
    """The kernel for a tensor of rules, in log space."""

    def __init__(self, g: Grammar, v: Grammar | None = None) -> None:
        super().__init__(g, v)
        self.rules = [g.kinds(g.rules)] if v is None else [g.kinds(g.rules), v.kinds(v.rules)]
        self.flow = Chart(g, g.N, g.P, dual=self.dual)
        self.inner: dict[int, Dual] = {}  # by width
        self.used: dict[str, Dual] = {}

    def splits(self, w: int) -> dict[str, Dual]:
        """β + β' of each kind, ``(B, starts, splits, b, c)``."""
        return {
            kind: left.at(..., None).plus(right.at(..., None, ALL))
            for kind, (left, right) in self.log.children(w).items()
        }

    def blocks(self, kind: str, x: Dual) -> Iterator[tuple[slice, Dual]]:
        """rules + X for some parents at a time, ``(B, starts, ·, b·c)``."""
        step = max(1, BLOCK // max(1, x.x.numel()))
        for a in range(0, self.g.N, step):
            at = slice(a, a + step)
            r = Dual(*(rules[kind][..., None, at, :] for rules in self.rules))
            yield at, r.plus(x.map(lambda t: t.flatten(-2)[:, :, None]))

    def up(self, w: int) -> Dual:
        by_kind = []
        for kind, t in self.splits(w).items():
            x = log_sum(t, 2)
            parents = [log_sum(block, -1) for _, block in self.blocks(kind, x)]
            by_kind.append(stack(torch.cat, parents, -1))
        self.inner[w] = log_sum(stack(torch.stack, by_kind, 0), 0)
        return self.inner[w]

    def visits(self, w: int) -> Dual:
        left, right = self.flow.own(w)
        return left.plus(right)

    def leaf_visits(self) -> Dual:
        return self.flow.leaf

    def down(self, w: int, visits: Dual) -> None:
        flows, pairs = self.flow.children(w), self.splits(w)
        of_parents = self.mass(w, pairs)
        visits = visits.map(lambda v: divide(v, of_parents))
        for kind, t in pairs.items():
            x = log_sum(t, 2)
            through, used = [], []
            for at, block in self.blocks(kind, x):
                q = share(block, self.inner[w].at(..., at, None))
                flow = visits.at(..., at, None).by(q)
                through.append(flow.sum(2))
                used.append(flow.sum(1))
            count = stack(torch.cat, used, 1)
            self.used[kind] = self.used[kind].plus(count) if kind in self.used else count
            total = stack(torch.stack, through, 0).sum(0).unflatten(x.x.shape[-2:])
            q = share(t, x.at(ALL, ALL, None))
            d = None if total.d is None else divide(total.d, q.x.sum(2))
            total = Dual(divide(total.x, q.x.sum(2)), d)
            flow = total.at(ALL, ALL, None).by(q)
            flows[kind][0].add(flow.sum(-1))
            flows[kind][1].add(flow.sum(-2))

    def mass(self, w: int, pairs: dict[str, Dual]) -> Tensor:
        """The sum of the shares of all terms of each parent, ``(B, starts, N)``."""
        total = torch.zeros_like(self.inner[w].x)
        for kind, t in pairs.items():
            for at, block in self.blocks(kind, Dual(t.x.logsumexp(2))):
                norm = Dual(self.inner[w].x[..., at, None])
                total[..., at] += share(Dual(block.x), norm).x.sum(-1)
        return total

    def counts(self) -> list[Dual]:
        x = self.g.whole({kind: c.x for kind, c in self.used.items()})
        if not self.dual:
            return [Dual(x)]
        return [Dual(x, self.g.whole({k: c.d for k, c in self.used.items() if c.d is not None}))]


def share(t: Dual, norm: Dual) -> Dual:
    """exp(t − norm): the probability of a term of the sum norm."""
    q = (t.x - torch.where(norm.x == -math.inf, 0.0, norm.x)).exp()
    return Dual(q, None if t.d is None or norm.d is None else q * (t.d - norm.d))


def log_sum(t: Dual, dim: int) -> Dual:
    x = t.x.logsumexp(dim)
    if t.d is None:
        return Dual(x)
    q = share(Dual(t.x), Dual(x.unsqueeze(dim))).x
    return Dual(x, divide((q * t.d).sum(dim), q.sum(dim)))


def stack(how: Callable[..., Tensor], parts: list[Dual], dim: int) -> Dual:
    d = [p.d for p in parts if p.d is not None]
    return Dual(how([p.x for p in parts], dim), how(d, dim) if d else None)


class Best(Terms):
    """The chart of the maximum."""

    def up(self, w: int) -> Dual:
        rows = []
        for kind, t in self.splits(w).items():
            blocks = self.blocks(kind, Dual(t.x.amax(2)))
            rows.append(torch.cat([block.x.amax(-1) for _, block in blocks], -1))
        return Dual(torch.stack(rows).amax(0))

    def rise(self) -> Tensor:
        """The best score ``(B)``."""
        for w in range(2, self.g.n + 1):
            self.keep(w, Dual(self.g.cells(w)).plus(self.up(w)))
        return (self.g.root + self.log.goal(self.g.lengths).x).amax(-1)

    def max_marginals(self) -> Tensor:
        """The best score with each labelled span, ``(B, n, n, S)``, after ``rise``: top-down, the
        best score of all that is not below a span, as it is below its parents'."""
        g, cells = self.g, []
        above = Chart(g, g.N, g.P, -math.inf)
        for w in range(g.n, 1, -1):
            around = torch.maximum(*(view.x for view in above.own(w)))
            here = torch.where((g.lengths == w)[:, None], g.root, -math.inf)
            around[:, 0] = torch.maximum(around[:, 0], here)
            cells.append(around + self.log.own(w)[0].x)
            top = (around + g.cells(w))[..., None]
            into, pairs = above.children(w), self.log.children(w)
            for kind, (left, right) in pairs.items():
                b, c = left.x.shape[-1], right.x.shape[-1]
                nothing = Dual(top.new_zeros(1, 1, b, c))
                rules = [(top[:, :, at] + r.x).amax(2) for at, r in self.blocks(kind, nothing)]
                x = torch.stack(rules).amax(0).unflatten(-1, (b, c))[:, :, None]
                for target, other, dim in (
                    (0, right.x[..., None, :], -1),
                    (1, left.x[..., None], -2),
                ):
                    view = into[kind][target].x
                    view.copy_(torch.maximum(view, (x + other).amax(dim)))
        leaf = above.leaf.x + self.log.leaf.x
        return to_square(
            leaf, cells[::-1] or [leaf[:, :0, :0].new_empty(len(leaf), 0, g.N)], -math.inf
        )
