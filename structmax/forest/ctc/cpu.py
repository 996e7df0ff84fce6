"""The recursion over frames on the CPU, compiled by numba: one frame at a time, vectorised.

The states of a frame do not depend on each other. What the way back needs is kept for every state
of every frame: how likely it was entered by staying, from the state before and from the one before
that. Rows of V start at index 2; the two entries before hold nothing. γ is taken out of scores and
put back into A by the caller. V is kept near 0 by an offset, so that large sums cost no precision.
An item with an impossible length or symbol becomes NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from structmax.jit import array, exp, kernel, log, run_chunks

INF = math.inf
State = np.uint64  # numba tests signed indices for being negative, which keeps loops from vectors
ONE, TWO = State(1), State(2)
EVERY = 8  # frames, after which V and its derivative are moved back to around 0


@kernel(inner=True)
def look(targets, frames, count, blank, theta, symbols):
    """How many frames and states an item has, made possible, and whether they and its targets were;
    ``symbols`` receives the symbol of each state."""
    good = 1 <= frames <= theta.shape[0] and 0 <= count <= len(targets)
    frames, count = min(max(frames, 1), theta.shape[0]), min(max(count, 0), len(targets))
    symbols[: 2 * count + 1] = blank
    for k in range(count):
        if 0 <= targets[k] < theta.shape[1] and targets[k] != blank:
            symbols[2 * k + 1] = targets[k]
        else:
            good = False
    return frames, 2 * count + 1, good


@kernel(inner=True)
def prepare(symbols, frames, states, over, first, reach):
    """What an item's paths can meet.

    ``over``: 0 for states that can be entered from the one before the one before, else −inf;
    ``reach (frames, 2)``: the states of each frame that lie on a path, from one to before another.
    Scores of others are not looked at. ``first`` is room for the earliest frame of each state.
    """
    for s in range(states):
        other = s % 2 == 1 and s > 1 and symbols[s] != symbols[s - 2]
        over[s] = 0.0 if other else -INF
        if s % 2 == 0:
            first[s] = first[s - 1] + 1 if s > 0 else 0
        else:
            first[s] = 0 if s == 1 else first[s - 2] + (1 if other else 2)
    spare = frames - 1 - (first[states - 2] if states > 1 else 0)
    low, high = 0, 0
    for t in range(frames):
        while high < states and first[high] <= t:
            high += 1
        # a symbol may be as late as its earliest frame and what is spare, a blank before the next
        while low < states - 1 and (first[low] if low % 2 else first[low + 1] - 1) + spare < t:
            low += 1
        reach[t, 0], reach[t, 1] = low, high


@kernel(fused=True, inner=True)
def up(inverse, theta, symbols, frames, states, V, W, over, first, reach, Q, keep):
    """log Σ exp of the last two states as a number of the size of theirs, and what all of V lacks;
    with ``keep``, Q (3, frames, states) is written."""
    V[:] = -INF
    offset = 0.0
    prepare(symbols, frames, states, over, first, reach)
    for t in range(frames):
        now, last, r = t % 2, (t + 1) % 2, t if keep else 0
        low, high = State(reach[t, 0]), State(reach[t, 1])
        if t == 0:
            for s in range(low, high):
                W[s] = Q[0, r, s] = Q[1, r, s] = Q[2, r, s] = 0.0
        else:
            for s in range(low, high):
                x, y, z = V[last, s + TWO], V[last, s + ONE], V[last, s] + over[s]
                top = y if y > x else x
                top = z if z > top else top
                W[s] = top if top > -INF else 0.0  # something that can be subtracted
            for s in range(low, high):
                Q[0, r, s] = exp(V[last, s + TWO] - W[s])
            for s in range(low, high):
                Q[1, r, s] = exp(V[last, s + ONE] - W[s])
            for s in range(low, high):
                Q[2, r, s] = exp(V[last, s] + over[s] - W[s])
            for s in range(low, high):
                total = np.float64(Q[0, r, s]) + Q[1, r, s] + Q[2, r, s]
                scale = 1.0 / (total if total != 0 else 1.0)
                Q[0, r, s] *= scale
                Q[1, r, s] *= scale
                Q[2, r, s] *= scale
                V[now, s + TWO] = total
            for s in range(low, high):
                total = V[now, s + TWO]  # 0, NaN, or at least 1
                x = W[s] + log(total)
                W[s] = x if total >= 1 else (-INF if total == 0 else total)
        for s in range(low, high):
            V[now, s + TWO] = theta[t, symbols[s]] * inverse + W[s]
        V[now, low] = V[now, low + ONE] = -INF
        if t % EVERY == EVERY - 1:
            top = -INF
            for s in range(low, high):
                top = max(top, V[now, s + TWO])
            if -INF < top < INF:
                offset += top
                for s in range(low, high):
                    V[now, s + TWO] -= top
    end = V[(frames - 1) % 2]
    x, y = end[states + 1], end[states]
    top = max(x, y)
    if not top > -INF:
        return x + y, 0.0  # −inf, or NaN
    return top + math.log(math.exp(x - top) + math.exp(y - top)), offset


@kernel(inner=True)
def seed_ends(a, states, end, G):
    """How likely a path ends in each state, in the last blank or in the symbol before it: ``a`` is
    log Σ exp of these."""
    G[:] = 0.0
    for s in range(max(states - 2, 0), states):
        if a != a:
            G[s] = a
        elif a > -INF:
            G[s] = math.exp(end[s + 2] - a)


@kernel(inner=True)
def to_symbols(G, low, high, symbols, row):
    """Adds numbers of states to those of their symbols. Blanks are many: they are summed first."""
    blanks = 0.0
    for s in range(low + low % 2, high, 2):
        blanks += G[s]
    row[symbols[0]] += blanks
    for s in range(low + 1 - low % 2, high, 2):
        row[symbols[s]] += G[s]


@kernel(fused=True, inner=True)
def flow(G, Q, t, low, high, F):
    """F, what flows into each move of a frame; the frame after it may have had two states more."""
    for k in range(3):
        for s in range(low, high):
            F[k, s] = G[s] * Q[k, t, s]
        F[k, high] = F[k, high + ONE] = 0.0


@kernel(fused=True, inner=True)
def gather(F, low, high, G):
    """G, what flows into the states of a frame."""
    for s in range(low, high):
        G[s] = F[0, s] + F[1, s + ONE] + F[2, s + TWO]


@kernel(fused=True, inner=True)
def down(a, symbols, frames, states, reach, V, Q, F, G, mu):
    """Expected visits μ of symbols. V holds the last frame."""
    seed_ends(a, states, V[(frames - 1) % 2], G)
    F[:] = 0.0
    for t in range(frames - 1, -1, -1):
        low, high = State(reach[t, 0]), State(reach[t, 1])
        if t < frames - 1:
            gather(F, low, high, G)
        flow(G, Q, t, low, high, F)
        to_symbols(G, reach[t, 0], reach[t, 1], symbols, mu[t])


@kernel(fused=True, inner=True)
def tangent(a, inverse, v, symbols, frames, states, reach, V, dV, W, Q, D, F, dF, G, dG, w):
    """w: the derivative of μ in direction v, given what ``up`` left in V and Q.

    With V̇ that of V, a state has V̇ = v + Σ q ẋ over its moves, and q̇ = q(ẋ − Σ q ẋ). Only
    differences of V̇ matter, but it grows with the sum of v along the paths: means are divided by
    Σ q, which rounding keeps from 1, and V̇ is centred every few frames.
    """
    dV[:] = 0.0
    for t in range(frames):
        now, last = t % 2, (t + 1) % 2
        low, high = State(reach[t, 0]), State(reach[t, 1])
        for s in range(low, high):
            x, y, z = dV[last, s + TWO], dV[last, s + ONE], dV[last, s]
            mass = np.float64(Q[0, t, s]) + Q[1, t, s] + Q[2, t, s]
            mean = Q[0, t, s] * x + Q[1, t, s] * y + Q[2, t, s] * z
            mean /= mass if mass != 0 else 1.0
            D[0, t, s] = Q[0, t, s] * (x - mean)
            D[1, t, s] = Q[1, t, s] * (y - mean)
            D[2, t, s] = Q[2, t, s] * (z - mean)
            W[s] = mean
        for s in range(low, high):
            dV[now, s + TWO] = v[t, symbols[s]] * inverse + W[s]
        if t % EVERY == EVERY - 1:
            middle = dV[now, (low + high) // TWO + TWO]
            middle = middle if -INF < middle < INF and low < high else 0.0
            for s in range(low, high):
                dV[now, s + TWO] -= middle
    seed_ends(a, states, V[(frames - 1) % 2], G)
    end, mean = dV[(frames - 1) % 2], 0.0
    dG[:] = 0.0
    for s in range(max(states - 2, 0), states):
        mean += G[s] * end[s + 2]
    for s in range(max(states - 2, 0), states):
        dG[s] = G[s] * (end[s + 2] - mean)
    F[:] = 0.0
    dF[:] = 0.0
    for t in range(frames - 1, -1, -1):
        low, high = State(reach[t, 0]), State(reach[t, 1])
        if t < frames - 1:
            gather(F, low, high, G)
            gather(dF, low, high, dG)
        flow(G, Q, t, low, high, F)
        flow(dG, Q, t, low, high, dF)
        for k in range(3):
            for s in range(low, high):
                dF[k, s] += G[s] * D[k, t, s]
        to_symbols(dG, reach[t, 0], reach[t, 1], symbols, w[t])


@kernel
def values(
    low, high, inverse, theta, targets, frames, count, blank, a,
    symbols, V, W, over, first, reach, Q,
):  # fmt: skip
    """A/γ of the items low..high."""
    for b in range(low, high):
        n, states, good = look(targets[b], frames[b], count[b], blank, theta[b], symbols)
        item = (symbols, n, states)
        end, offset = up(inverse, theta[b], *item, V, W, over, first, reach, Q, False)
        a[b] = offset + end if good else math.nan


@kernel
def gradients(
    low, high, inverse, theta, targets, frames, count, blank, a, mu,
    symbols, V, W, over, first, reach, Q, F, G,
):  # fmt: skip
    """A/γ and μ of the items low..high, which is 0 where nothing is written."""
    for b in range(low, high):
        n, states, good = look(targets[b], frames[b], count[b], blank, theta[b], symbols)
        item = (symbols, n, states)
        end, offset = up(inverse, theta[b], *item, V, W, over, first, reach, Q, True)
        if not good:
            end = math.nan
        a[b] = offset + end
        down(end, *item, reach, V, Q, F, G, mu[b])


@kernel
def products(
    low, high, inverse, theta, targets, frames, count, blank, v, w,
    symbols, V, W, over, first, reach, Q, F, G, dV, D, dF, dG,
):  # fmt: skip
    """Hessian-vector products of the items low..high."""
    for b in range(low, high):
        n, states, good = look(targets[b], frames[b], count[b], blank, theta[b], symbols)
        item = (symbols, n, states)
        end, _ = up(inverse, theta[b], *item, V, W, over, first, reach, Q, True)
        if not good:
            end = math.nan
        tangent(end, inverse, v[b], *item, reach, V, dV, W, Q, D, F, dF, G, dG, w[b])


class Batch:
    """The arguments of a kernel that are the same for every chunk, and room for one item."""

    def __init__(
        self, theta: Tensor, constants: Sequence[Tensor], blank: int, gamma: float
    ) -> None:
        self.theta = array(theta)
        rest = [array(t, np.int64) for t in constants]
        self.arguments = 1.0 / gamma, self.theta, *rest, blank
        self.states = 2 * rest[0].shape[1] + 1

    def rows(self, *shape: int) -> NDArray:
        return np.empty((*shape, self.states + 2))

    def moves(self, keep: bool) -> NDArray:
        """Three numbers for each state of each frame, or of one frame."""
        return np.empty((3, self.theta.shape[1] if keep else 1, self.states), self.theta.dtype)

    def up_space(self, keep: bool) -> tuple[NDArray, ...]:
        """symbols, V, W, over, first, reach and Q."""
        symbols, first = np.empty((2, self.states), np.int64)
        reach = np.empty((self.theta.shape[1], 2), np.int64)
        return symbols, self.rows(2), self.rows(), self.rows(), first, reach, self.moves(keep)

    def run(self, task: Callable[[int, int], None], work: int) -> None:
        run_chunks(task, len(self.theta), work * self.theta.shape[1] * self.states)


def value(theta: Tensor, constants: Sequence[Tensor], blank: int, gamma: float) -> Tensor:
    """A ``(B)`` for scores ``(B, T, V)``; constants are targets, frames and count of ``naive``."""
    batch, a = Batch(theta, constants, blank, gamma), np.empty(len(theta))

    def task(low: int, high: int) -> None:
        values(low, high, *batch.arguments, a, *batch.up_space(keep=False))

    batch.run(task, 20)
    return torch.from_numpy(gamma * a).to(theta.dtype)


def gradient(theta: Tensor, constants: Sequence[Tensor], blank: int, gamma: float) -> list[Tensor]:
    """A ``(B)`` and its gradient ``(B, T, V)``."""
    batch, a = Batch(theta, constants, blank, gamma), np.empty(len(theta))
    mu = np.zeros_like(batch.theta)

    def task(low: int, high: int) -> None:
        space = (*batch.up_space(keep=True), batch.rows(3), batch.rows())
        gradients(low, high, *batch.arguments, a, mu, *space)

    batch.run(task, 30)
    return [torch.from_numpy(gamma * a).to(theta.dtype), torch.from_numpy(mu)]


def hvp(
    theta: Tensor, direction: Tensor, constants: Sequence[Tensor], blank: int, gamma: float
) -> Tensor:
    """The Hessian of A times a direction ``(B, T, V)``."""
    batch, v = Batch(theta, constants, blank, gamma), array(direction)
    w = np.zeros_like(batch.theta)

    def task(low: int, high: int) -> None:
        space = (*batch.up_space(keep=True), batch.rows(3), batch.rows(), batch.rows(2))
        more = batch.moves(keep=True), batch.rows(3), batch.rows()
        products(low, high, *batch.arguments, v, w, *space, *more)

    batch.run(task, 60)
    return torch.from_numpy(w)
