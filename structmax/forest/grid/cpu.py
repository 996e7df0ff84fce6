"""Paths through a grid on the CPU, compiled by numba: one anti-diagonal at a time, vectorised.

The cells of a diagonal i + j = d do not depend on each other and lie side by side, by their row i.
Of the values V only three diagonals are kept, in float64. What the way back needs is kept for every
cell, that of (i, j) at [(i + j) mod m, i]: so a diagonal is contiguous and nothing is wasted.
Moves: 0 is ↘, 1 is ↓, 2 is →.

Diagonals kept for their neighbours start at index 1. The entries before the first cell and after
the last hold nothing (−inf, or no flow), so that the border needs no test: from one diagonal to the
next, the first and the last row grow by at most one. Rows are counted by unsigned integers, since
numba tests signed ones for being negative, which would keep loops from being vectorised. Such loops
run on to a multiple of BLOCK, so that nothing is left to be done one by one; what they write there
belongs to nobody, or to a diagonal that is written later.

Where scores come from (``source``) and where their gradient goes (``target``) is either one matrix,
θ and μ of the cells, or two vectors: series x and y of numbers, with θ(i, j) = −(xᵢ − yⱼ)², and the
gradient in them. Of y and its gradient the order is turned round, so that on a diagonal they lie
side by side as well: entry j of m is at [n + m − 1 − j], that of row i at [n + m − 1 − d + i].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from structmax.forest.grid.naive import theta_of, to_series
from structmax.jit import array, exp, kernel, log, run_chunks
from structmax.smoothing import HARD, SHANNON

INF = math.inf
Row = np.uint64
ONE, TWO = Row(1), Row(2)
BLOCK = Row(8)
Code = tuple[float, float, float]
FAR = 300.0  # scores of more are not exponentiated
LEAST, MOST = 1e-200, 1e200  # of a diagonal's exponentials, so that their products are numbers
LARGE, TINY = 2.0**100, 1e-290
EVERY = 8  # diagonals, after which derivatives are moved back to around 0


@kernel(inner=True)
def reach(d, rows, columns, band):
    """The cells of diagonal d within the band: their first row, and that after their last."""
    low, high = max(0, d - columns + 1), min(rows - 1, d)
    length = rows + columns - 2
    if band >= 0 and length > 0:
        width = min(band, rows + columns) * (max(rows, columns) - 1)
        low = max(low, (d * (rows - 1) - width + length - 1) // length)
        high = min(high, (d * (rows - 1) + width) // length)
    return Row(low), Row(high + 1)


@kernel(inner=True)
def of_item(b, arrays):
    """Item b of one or two arrays."""
    if len(arrays) == 1:
        return (arrays[0][b],)
    return arrays[0][b], arrays[1][b]


@kernel(inner=True)
def read(source, d, low, high, out):
    """The scores of one diagonal."""
    if len(source) == 1:
        for i in range(low, high):
            out[i] = source[0][i, Row(d) - i]
    else:
        first = Row(len(source[1]) - 1 - d) - BLOCK
        for i in range(low, high):
            apart = np.float64(source[0][i]) - source[1][first + i]
            out[i] = -apart * apart


@kernel(inner=True)
def write(source, target, d, low, high, mu):
    """Adds what μ of one diagonal makes to the gradient."""
    if len(source) == 1:
        for i in range(low, high):
            target[0][i, Row(d) - i] = mu[i]
    else:
        first = Row(len(source[1]) - 1 - d) - BLOCK
        for i in range(low, high):
            flow = 2 * mu[i] * (np.float64(source[0][i]) - source[1][first + i])
            target[0][i] -= flow
            target[1][first + i] += flow


@kernel(inner=True)
def rounded(low, high):
    """The first row at or after ``high`` that lies whole blocks after ``low``."""
    return low + (high - low + BLOCK - ONE) // BLOCK * BLOCK


@kernel(fused=True, inner=True)
def choose(kind, gamma, V, before, last, low, high, peak, W, Q, r):
    """W = maxΩ(x) and Q = argmaxΩ(x) of x = V(↘), V(↓), V(→), on one diagonal.

    Many short loops, because one with more arrays is not vectorised.
    """
    inverse = 1.0 / gamma
    for i in range(low, high):
        top = V[before, i]
        top = V[last, i] if V[last, i] > top else top
        top = V[last, i + ONE] if V[last, i + ONE] > top else top
        peak[i] = top if top > -INF else 0.0  # something that can be subtracted
    for i in range(low, high):
        Q[0, r, i] = (V[before, i] - peak[i]) * inverse
    for i in range(low, high):
        Q[1, r, i] = (V[last, i] - peak[i]) * inverse
    for i in range(low, high):
        Q[2, r, i] = (V[last, i + ONE] - peak[i]) * inverse
    if kind == SHANNON:
        for k in range(3):
            for i in range(low, high):
                Q[k, r, i] = exp(Q[k, r, i])
        for i in range(low, high):
            total = Q[0, r, i] + Q[1, r, i] + Q[2, r, i]
            W[i] = total
            scale = 1 / (total if total != 0 else total + 1)
            Q[0, r, i] *= scale
            Q[1, r, i] *= scale
            Q[2, r, i] *= scale
        for i in range(low, high):
            total = W[i]  # 0, NaN, or at least 1
            x = peak[i] + gamma * log(total)
            W[i] = x if total >= 1 else (-INF if total == 0 else total)
    elif kind == HARD:
        for i in range(low, high):
            x0, x1, x2 = Q[0, r, i], Q[1, r, i], Q[2, r, i]
            first, second = x0 == 0, (x1 == 0) & (x0 != 0)
            Q[0, r, i] = 1 if first else 0
            Q[1, r, i] = 1 if second else 0
            Q[2, r, i] = 0 if first | second | (x2 != 0) else 1
            x = x0 + x1 + x2
            W[i] = x if x != x else (peak[i] if (x0 == 0) | (x1 == 0) | (x2 == 0) else -INF)
    else:  # Gini: τ = max over k of (the k largest − 1)/k, and the largest is 0
        for i in range(low, high):
            x0, x1, x2 = Q[0, r, i], Q[1, r, i], Q[2, r, i]
            none = (x0 == -INF) & (x1 == -INF) & (x2 == -INF)
            x0, x1, x2 = not_far(x0), not_far(x1), not_far(x2)
            small, large = (x0, x1) if x0 < x1 else (x1, x0)
            middle = small if small > x2 else (x2 if x2 < large else large)
            tau, three = (middle - 1) / 2, (x0 + x1 + x2 - 1) / 3
            tau = tau if tau > -1 else -1.0
            tau = three if not three <= tau else tau
            p0, p1, p2 = x0 - tau, x1 - tau, x2 - tau
            p0, p1, p2 = positive(p0), positive(p1), positive(p2)
            gain = p0 * x0 + p1 * x1 + p2 * x2 - 0.5 * (p0 * p0 + p1 * p1 + p2 * p2 - 1.0)
            Q[0, r, i], Q[1, r, i], Q[2, r, i] = p0, p1, p2
            W[i] = -INF if none else peak[i] + gamma * gain


@kernel(inner=True)
def not_far(x):
    """Options far below the largest have no weight, and −4 is far; NaN stays."""
    return -4.0 if x < -4 else np.float64(x)


@kernel(inner=True)
def positive(x):
    return 0.0 if x < 0 else x


@kernel(fused=True, inner=True)
def up_scaled(gamma, source, rows, columns, band, E, X, W, Q):
    """As ``up`` under Shannon with E = e^(V/γ) in the place of V: one exp a cell, and no log.

    Diagonals that become large or small are multiplied by a power of two. NaN if float64 does not
    reach from the least to the largest of a diagonal, or if a score is NaN.
    """
    E[:] = 0.0
    inverse, exponent = 1.0 / gamma, 0
    for d in range(rows + columns - 1):
        low, high = reach(d, rows, columns, band)
        now, before, last, r = d % 3, (d + 1) % 3, (d + 2) % 3, d % Q.shape[1]
        wide = rounded(low, high)
        read(source, d, low, high, X)
        far = 0
        for i in range(low, high):
            x = X[i] * inverse
            X[i] = x
            far += 0 if (abs(x) <= FAR) | (x == -INF) else 1
        if far > 0:
            return np.nan
        for i in range(low, wide):
            X[i] = exp(X[i])
        for i in range(low, wide):
            W[i] = E[before, i] + E[last, i] + E[last, i + ONE]
        if d == 0:
            W[0] = 1.0
        for i in range(low, wide):
            scale = 1 / (W[i] if W[i] != 0 else 1.0)
            Q[0, r, i] = E[before, i] * scale
            Q[1, r, i] = E[last, i] * scale
            Q[2, r, i] = E[last, i + ONE] * scale
        for i in range(low, wide):
            E[now, i + ONE] = W[i] * X[i]
        E[now, low] = E[now, high + ONE] = 0.0
        large, seen = 0, 0
        for i in range(low, high):
            e = W[i] * X[i]
            large += 1 if e > LARGE else 0
            seen += 1 if e > 1 / LARGE else 0
            far += 0 if ((e >= LEAST) & (e <= MOST)) | (W[i] == 0) | (X[i] == 0) else 1
        if far > 0:
            return np.nan
        if large > 0 or seen == 0:
            k = leading(E[now], low, high)
            exponent += k
            factor = math.ldexp(1.0, -k)
            lost = multiplied(E[now], low, high, factor)
            lost += multiplied(E[last], *reach(d - 1, rows, columns, band), factor) if d > 0 else 0
            if lost > 0:
                return np.nan
    e = E[(rows + columns - 2) % 3, rows]
    return gamma * (math.log(e) + exponent * math.log(2.0)) if e > 0 else -INF


@kernel(inner=True)
def leading(row, low, high):
    """The exponent of the largest number of a diagonal, 0 if there is none."""
    top = 0.0
    for i in range(low, high):
        top = max(top, row[i + ONE])
    return math.frexp(top)[1]


@kernel(inner=True)
def multiplied(row, low, high, factor):
    """Multiplies a diagonal by a power of two; how many numbers of it become too small."""
    lost = 0
    for i in range(low, high):
        e = row[i + ONE] * factor
        lost += 1 if (e < TINY) & (row[i + ONE] > 0) else 0
        row[i + ONE] = e
    return lost


@kernel(fused=True, inner=True)
def up(kind, gamma, source, rows, columns, band, V, peak, W, Q):
    """A of one item, and its backpointers in Q as far as there is room."""
    if kind == SHANNON:
        a = up_scaled(gamma, source, rows, columns, band, V, peak, W, Q)
        if a == a:
            return a
    V[:] = -INF
    for d in range(rows + columns - 1):
        low, high = reach(d, rows, columns, band)
        now, r = d % 3, d % Q.shape[1]
        wide = rounded(low, high)
        choose(kind, gamma, V, (d + 1) % 3, (d + 2) % 3, low, wide, peak, W, Q, r)
        if d == 0:
            W[0] = 0.0
        read(source, d, low, high, peak)
        for i in range(low, wide):
            V[now, i + ONE] = peak[i] + W[i]
        V[now, low] = V[now, high + ONE] = -INF
    return V[(rows + columns - 2) % 3, rows]


@kernel(fused=True, inner=True)
def down(rows, columns, band, seed, Q, F, G, source, target):
    """The gradient, from the expected visits of the cells. F holds, for three diagonals, what flows
    into each move."""
    F[:] = 0.0
    for d in range(rows + columns - 2, -1, -1):
        low, high = reach(d, rows, columns, band)
        now, one, two, r = d % 3, (d + 1) % 3, (d + 2) % 3, d % Q.shape[1]
        wide = rounded(low, high)
        for i in range(low, wide):
            G[i] = F[two, 0, i + TWO] + F[one, 1, i + TWO] + F[one, 2, i + ONE]
        if d == rows + columns - 2:
            G[rows - 1] = seed
        for k in range(3):
            for i in range(low, wide):
                F[now, k, i + ONE] = G[i] * Q[k, r, i]
            F[now, k, low] = F[now, k, high + ONE] = 0.0
        write(source, target, d, low, high, G)


@kernel(fused=True, inner=True)
def tangent_up(kind, gamma, v, rows, columns, band, Q, X, V, D):
    """D: the derivative of the backpointers in direction v.

    V̇ = v + Σ q ẋ with ẋ = V̇ of the tails, and q̇ = s(ẋ − x̄)/γ with x̄ the mean of ẋ under s: q
    itself for Shannon, the indicator of its support for Gini. Only differences of V̇ matter, but it
    grows with the sum of v along the paths: means are divided by Σ q, which rounding keeps from 1,
    and V̇ is centred every few diagonals.
    """
    V[:] = 0.0
    inverse = 1.0 / gamma
    for d in range(rows + columns - 1):
        low, high = reach(d, rows, columns, band)
        now, before, last, r, along = d % 3, (d + 1) % 3, (d + 2) % 3, d % Q.shape[1], Row(d)
        wide = rounded(low, high)
        for i in range(low, wide):
            X[0, i], X[1, i], X[2, i] = V[before, i], V[last, i], V[last, i + ONE]
        for i in range(low, wide):
            dot, whole, top, mass = 0.0, 0.0, 0.0, 0.0
            for k in range(3):
                q = np.float64(Q[k, r, i])
                s = q if kind == SHANNON else (1.0 if q > 0 else 0.0)
                dot += q * X[k, i] if q != 0 else 0.0
                whole += q
                top += s * X[k, i] if q != 0 else 0.0
                mass += s
            dot /= whole if whole != 0 else 1.0
            mean = top / (mass if mass != 0 else 1.0)
            for k in range(3):
                q = Q[k, r, i]
                s = q if kind == SHANNON else 1.0
                D[k, r, i] = s * (X[k, i] - mean) * inverse if q != 0 else 0.0
            X[0, i] = dot
        for i in range(low, high):
            V[now, i + ONE] = v[i, along - i] + X[0, i]
        if d % EVERY == EVERY - 1 and high > low:
            middle = V[now, (low + high) // TWO + ONE]
            middle = middle if -INF < middle < INF else 0.0
            for i in range(low, high):
                V[now, i + ONE] -= middle
            for i in range(len(V[last])):
                V[last, i] -= middle
        V[now, low] = V[now, high + ONE] = 0.0


@kernel(fused=True, inner=True)
def tangent_down(rows, columns, band, seed, Q, D, F, dF, G, dG, w):
    """The derivative of μ in the direction that D belongs to."""
    F[:] = 0.0
    dF[:] = 0.0
    for d in range(rows + columns - 2, -1, -1):
        low, high = reach(d, rows, columns, band)
        now, one, two, r, along = d % 3, (d + 1) % 3, (d + 2) % 3, d % Q.shape[1], Row(d)
        wide = rounded(low, high)
        for i in range(low, wide):
            G[i] = F[two, 0, i + TWO] + F[one, 1, i + TWO] + F[one, 2, i + ONE]
        for i in range(low, wide):
            dG[i] = dF[two, 0, i + TWO] + dF[one, 1, i + TWO] + dF[one, 2, i + ONE]
        if d == rows + columns - 2:
            G[rows - 1] = seed
        for k in range(3):
            for i in range(low, wide):
                F[now, k, i + ONE] = G[i] * Q[k, r, i]
            for i in range(low, wide):
                dF[now, k, i + ONE] = dG[i] * Q[k, r, i] + G[i] * D[k, r, i]
            F[now, k, low] = F[now, k, high + ONE] = 0.0
            dF[now, k, low] = dF[now, k, high + ONE] = 0.0
        for i in range(low, high):
            w[i, along - i] = dG[i]


@kernel(inner=True)
def seed_of(a):
    """How often the goal is visited: once, never if it cannot be reached, or NaN."""
    return a if a != a else (0.0 if a == -INF else 1.0)


@kernel
def values(low, high, kind, gamma, source, rows, columns, band, a, V, peak, W, Q):
    """A of the items low..high."""
    for b in range(low, high):
        a[b] = up(kind, gamma, of_item(b, source), rows[b], columns[b], band, V, peak, W, Q)


@kernel
def gradients(low, high, kind, gamma, source, rows, columns, band, a, target, V, peak, W, Q, F, G):
    """A and its gradient, of the items low..high; padding is not written."""
    for b in range(low, high):
        given, wanted = of_item(b, source), of_item(b, target)
        a[b] = up(kind, gamma, given, rows[b], columns[b], band, V, peak, W, Q)
        down(rows[b], columns[b], band, seed_of(a[b]), Q, F, G, given, wanted)


@kernel
def products(
    low, high, kind, gamma, source, rows, columns, band, v, w,
    V, peak, W, Q, F, G, X, D, dF, dG,
):  # fmt: skip
    """Hessian-vector products of the items low..high; padding is not written."""
    for b in range(low, high):
        a = up(kind, gamma, of_item(b, source), rows[b], columns[b], band, V, peak, W, Q)
        tangent_up(kind, gamma, v[b], rows[b], columns[b], band, Q, X, V, D)
        tangent_down(rows[b], columns[b], band, seed_of(a), Q, D, F, dF, G, dG, w[b])


class Batch:
    """The arguments of a kernel that are the same for every chunk, and room for one item."""

    def __init__(
        self, scores: Sequence[Tensor], rows: Tensor, columns: Tensor, band: int, code: Code
    ) -> None:
        """``scores``: θ ``(B, n, m)``, or x ``(B, n, 1)`` and y ``(B, m, 1)``."""
        given = [array(t) for t in scores]
        sizes = [array(t, np.int64) for t in (rows, columns)]
        self.items, self.dtype = len(given[0]), given[0].dtype
        self.is_cells, more = len(given) == 1, int(BLOCK)
        self.n, self.m = given[0].shape[1], given[-1].shape[2 if self.is_cells else 1]
        if not self.is_cells:
            x, y = given
            given = [
                np.zeros((self.items, size + more), self.dtype)
                for size in (self.n, self.n + self.m)
            ]
            given[0][:, : self.n], given[1][:, self.n : -more] = x[..., 0], y[:, ::-1, 0]
        self.source = tuple(given)
        self.arguments = int(code[0]), code[1], self.source, *sizes, band
        self.whole = band < 0 and bool((sizes[0] == self.n).all() and (sizes[1] == self.m).all())
        self.row = self.n + 2 + more

    def rows(self, *shape: int) -> NDArray:
        return np.empty((*shape, self.row))

    def up_space(self, keep: bool) -> tuple[NDArray, ...]:
        """V, peak, W and Q; Q for all cells if they are kept."""
        Q = np.empty((3, self.m if keep else 1, self.row), self.dtype)
        return self.rows(3), self.rows(), self.rows(), Q

    def output(self) -> tuple[NDArray, ...]:
        """Room for what is like the source, 0 where kernels write none."""
        if self.is_cells:
            return ((np.empty if self.whole else np.zeros)(self.source[0].shape, self.dtype),)
        return tuple(np.zeros(t.shape) for t in self.source)

    def plain(self, output: tuple[NDArray, ...]) -> list[Tensor]:
        """Such an output as tensors like the scores."""
        if not self.is_cells:
            left, right = output
            right = right[:, self.n : self.n + self.m][:, ::-1]
            output = left[:, : self.n, None].astype(self.dtype), right[..., None].astype(self.dtype)
        return [torch.from_numpy(t) for t in output]

    def run(self, task: Callable[[int, int], None], work: int) -> None:
        run_chunks(task, self.items, work * self.n * self.m)


def of_vectors(scores: Sequence[Tensor]) -> bool:
    """Whether they are two series whose distances the kernels do not know. SoftDTW gives those as
    scores of cells, unless the backend changes between the two directions."""
    return len(scores) == 2 and scores[0].shape[-1] != 1


def value(scores: Sequence[Tensor], rows: Tensor, columns: Tensor, band: int, code: Code) -> Tensor:
    """A ``(B)`` for scores ``(B, n, m)`` of cells, or those of series ``(B, n, d), (B, m, d)``."""
    if of_vectors(scores):
        scores = [theta_of(scores).to(scores[0].dtype)]
    batch = Batch(scores, rows, columns, band, code)
    a = np.empty(batch.items)

    def task(low: int, high: int) -> None:
        values(low, high, *batch.arguments, a, *batch.up_space(keep=False))

    batch.run(task, 6)
    return torch.from_numpy(a).to(scores[0].dtype)


def gradient(
    scores: Sequence[Tensor], rows: Tensor, columns: Tensor, band: int, code: Code
) -> list[Tensor]:
    """A ``(B)`` and its gradient in the scores."""
    if of_vectors(scores):
        theta = theta_of(scores).to(scores[0].dtype)
        value, mu = gradient([theta], rows, columns, band, code)
        return [value, *to_series(mu, *scores)]
    batch = Batch(scores, rows, columns, band, code)
    a, out = np.empty(batch.items), batch.output()

    def task(low: int, high: int) -> None:
        space = (*batch.up_space(keep=True), batch.rows(3, 3), batch.rows())
        gradients(low, high, *batch.arguments, a, out, *space)

    batch.run(task, 8)
    return [torch.from_numpy(a).to(scores[0].dtype), *batch.plain(out)]


def hvp(
    theta: Tensor, direction: Tensor, rows: Tensor, columns: Tensor, band: int, code: Code
) -> Tensor:
    """The Hessian of A times a direction ``(B, n, m)``; zero under hard max."""
    if code[0] == HARD:
        a = value([theta], rows, columns, band, code)
        return torch.where(a.isnan(), a, 0.0)[:, None, None].expand(theta.shape).contiguous()
    batch, v = Batch([theta], rows, columns, band, code), array(direction)
    (w,) = batch.output()

    def task(low: int, high: int) -> None:
        space = (*batch.up_space(keep=True), batch.rows(3, 3), batch.rows(), batch.rows(3))
        D = np.empty_like(space[3])
        products(low, high, *batch.arguments, v, w, *space, D, batch.rows(3, 3), batch.rows())

    batch.run(task, 16)
    return torch.from_numpy(w)
