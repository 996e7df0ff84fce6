"""The recursion over frames on the GPU: Triton kernels, two programs per item, two launches.

The states of a target come in pairs: symbol k, and the blank before it. A thread has its pairs in
registers, and of the pair beside it needs one number per frame, the value of the symbol:

    blank k  ◄─  blank k, symbol k−1
    symbol k ◄─  symbol k, blank k, and symbol k−1 if that is another one

Read from its end, a target is a target again. So one kernel (``recursion``) goes through all frames
from the first in one program and from the last in another, and ``collect``, with one program for
each frame, takes μ(t, s) ∝ exp of what both found for a state, which they kept. Constants cancel
there, and μ sums to 1 in every frame, however large the scores are. Derivatives along a direction
go the same way: w = μ·(α̇ + β̇ − Ȧ)/γ, with Ȧ = Σ μ(α̇ + β̇) in any frame.

In a row of μ the numbers of many states may belong to one symbol. They are added by comparing all
symbols of the target with some of them at a time, so that nothing depends on the order in which
threads arrive. Values are float64; what enters exp and log is in the dtype of the scores.

Targets and lengths may hold anything: an item in which something is wrong becomes NaN.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from structmax.launch import quick

LOG2_E, MOST = tl.constexpr(math.log2(math.e)), tl.constexpr(sys.float_info.max)
AHEAD = tl.constexpr(3)  # frames of which scores are asked for before their turn
TOGETHER = 8  # symbols that are compared with all others at a time


@triton.jit
def load_item(TARGETS, ts, FRAMES, fs, COUNT, cs, b, T, S):
    """Frames and symbols of item b, where its targets are, and whether a length is impossible."""
    frames, count = tl.load(FRAMES + b * fs).to(tl.int64), tl.load(COUNT + b * cs).to(tl.int64)
    bad = (frames < 1) | (frames > T) | (count < 0) | (count > S)
    frames = tl.minimum(tl.maximum(frames, 1), T).to(tl.int32)
    count = tl.minimum(tl.maximum(count, 0), S).to(tl.int32)
    return frames, count, TARGETS + b * ts, bad


@triton.jit
def load_symbols(targets, ts, k, count, V, blank):
    """Symbols k of a target, blank where there is none, and which of them are wrong."""
    inside = (k >= 0) & (k < count)
    symbol = tl.load(targets + k * ts, mask=inside, other=0).to(tl.int64)
    known = inside & (symbol >= 0) & (symbol < V)
    return tl.where(known, symbol, blank), inside & (~known | (symbol == blank))


@triton.jit
def choose(x0, x1, x2, gamma, DTYPE: tl.constexpr):
    """γ log Σ exp of two or three options, the weights of all but the first, and the sum of all
    weights, which is 0 or at least 1."""
    peak = tl.maximum(x0, x1)
    if x2 is not None:
        peak = tl.maximum(peak, x2)
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    rate = tl.minimum(1.0 / gamma * LOG2_E, MOST)  # in powers of two, which are what a GPU has
    q1 = tl.exp2(((x1 - peak) * rate).to(DTYPE))
    total = tl.exp2(((x0 - peak) * rate).to(DTYPE)) + q1
    q2 = tl.zeros_like(q1)
    if x2 is not None:
        q2 = tl.exp2(((x2 - peak) * rate).to(DTYPE))
        total += q2
    return peak + tl.log2(total).to(tl.float64) * (gamma / LOG2_E), q1, q2, total


@triton.jit
def mean(x0, x1, x2, q1, q2, total):
    """Σ q x, in which no rounding of Σ q meets a large x."""
    scale = 1.0 / tl.where(total == 0.0, 1.0, total)
    return x0 + (q1 * scale) * (x1 - x0) + (q2 * scale) * (x2 - x0)


@triton.jit
def load_scores(theta, stride, blank, symbol, t, frames, backward, live):
    """Scores of the blank and of the symbols in the t-th frame of a program; 0 after its last."""
    frame = tl.where(backward, frames - 1 - t, t)
    theta += frame.to(tl.int64) * stride
    some = t < frames
    at_blank = tl.load(theta + blank, mask=some, other=0.0)
    return at_blank, tl.load(theta + symbol, mask=some & live, other=0.0)


@quick
@triton.jit
def recursion(
    theta, sb, st, sv, direction, db, dt, dv, TARGETS, tb, tk, FRAMES, fs, COUNT, cs, A, X, D,
    T, S, V, blank, gamma: tl.float64,
    BLOCK: tl.constexpr, KEEP: tl.constexpr, TANGENT: tl.constexpr,
):  # fmt: skip
    """A ``(B)``; kept in X ``(B, 2, T, 2, S + 1)``, the values of blanks and of symbols on the way
    from the first frame and, without their own scores, from the last. D is the same of their
    derivatives if ``TANGENT``; then A is not written.
    """
    b, backward = tl.program_id(0).to(tl.int64), tl.program_id(1) == 1
    gamma = tl.cast(gamma, tl.float64)
    k = tl.arange(0, BLOCK)
    frames, count, targets, bad = load_item(TARGETS, tb, FRAMES, fs, COUNT, cs, b, T, S)
    at, step = tl.where(backward, count - 1 - k, k), tl.where(backward, -1, 1)
    symbol, wrong = load_symbols(targets, tk, at, count, V, blank)
    before, _ = load_symbols(targets, tk, at - step, count, V, blank)
    live = k < count
    repeated = live & (k > 0) & (symbol == before)

    # the frames in which paths meet each state; a repeated symbol takes a blank before it
    first = k + tl.cumsum(repeated.to(tl.int32), 0)
    spare = frames - 1 - tl.sum(tl.where(k == count - 1, first, 0), 0)
    last = tl.where(live, first + spare, -1)
    first_blank = first - repeated.to(tl.int32)
    last_blank = tl.where(k == count, frames - 1, last - 1)

    width = b * 0 + S + 1  # 64 bits, as all that offsets are made of
    here = (b * 2 + tl.program_id(1)) * T * 2 * width
    # blank k counts from the other end as blank count − k
    to_blank, to_symbol = here + tl.where(backward, count - k, k), here + width + at
    from_blank, from_symbol = (b * 0 + blank) * sv, symbol * sv
    theta += b * sb
    own_x, own_y = load_scores(theta, st, from_blank, from_symbol, 0, frames, backward, live)
    next_x, next_y = load_scores(theta, st, from_blank, from_symbol, 1, frames, backward, live)
    far_x, far_y = load_scores(theta, st, from_blank, from_symbol, 2, frames, backward, live)
    y = tl.full((BLOCK,), -float("inf"), tl.float64)
    x = tl.where(k == 0, 0.0, y)  # as if the first blank were entered from itself
    dx, dy = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    direction += b * db
    along_blank, along_symbol = (b * 0 + blank) * dv, symbol * dv
    beside = tl.maximum(k - 1, 0)
    for t in tl.range(0, frames, loop_unroll_factor=AHEAD):
        new_x, new_y = load_scores(
            theta, st, from_blank, from_symbol, t + AHEAD, frames, backward, live
        )
        z = tl.where(k == 0, -float("inf"), tl.gather(y, beside, 0))
        over = tl.where(repeated, -float("inf"), z)
        best_x, p1, p2, sum_x = choose(x, z, None, gamma, theta.dtype.element_ty)
        best_y, q1, q2, sum_y = choose(y, x, over, gamma, theta.dtype.element_ty)
        in_x, in_y = (t >= first_blank) & (t <= last_blank), (t >= first) & (t <= last)
        x = tl.where(in_x, own_x.to(tl.float64) + best_x, -float("inf"))
        y = tl.where(in_y, own_y.to(tl.float64) + best_y, -float("inf"))
        row = tl.where(backward, frames - 1 - t, t) * 2 * width
        if KEEP:
            kept_x = tl.where(backward & in_x, best_x, x)
            kept_y = tl.where(backward & in_y, best_y, y)
            tl.store(X + to_blank + row, kept_x, mask=k <= count)
            tl.store(X + to_symbol + row, kept_y, mask=live)
        if TANGENT:
            v_x, v_y = load_scores(
                direction, dt, along_blank, along_symbol, t, frames, backward, live
            )
            dz = tl.where(k == 0, 0.0, tl.gather(dy, beside, 0))
            # a blank has two options: p2 is 0
            mean_x = tl.where(in_x, mean(dx, dz, dz, p1, p2, sum_x), 0.0)
            mean_y = tl.where(in_y, mean(dy, dx, dz, q1, q2, sum_y), 0.0)
            dx = tl.where(in_x, v_x.to(tl.float64) + mean_x, 0.0)
            dy = tl.where(in_y, v_y.to(tl.float64) + mean_y, 0.0)
            tl.store(D + to_blank + row, tl.where(backward, mean_x, dx), mask=k <= count)
            tl.store(D + to_symbol + row, tl.where(backward, mean_y, dy), mask=live)
        own_x, own_y, next_x, next_y, far_x, far_y = next_x, next_y, far_x, far_y, new_x, new_y
    if not TANGENT:
        end_x = tl.sum(tl.where(k == count, x, 0.0), 0)
        end_y = tl.sum(tl.where(k == count - 1, y, 0.0), 0)
        end_y = tl.where(count == 0, -float("inf"), end_y)
        a, _, _, _ = choose(end_x, end_y, None, gamma, tl.float64)
        bad |= tl.max(wrong.to(tl.int32), 0) > 0
        a = tl.where(bad, float("nan"), a).to(A.dtype.element_ty)
        tl.store(A + b, a, mask=tl.program_id(1) == 0)


@triton.jit
def load_both(X, b, t, T, width, k, inside):
    """What both programs kept for some states of a frame, added."""
    X += (b * 2 * T + t) * 2 * width + k
    return tl.load(X, mask=inside, other=0.0) + tl.load(X + 2 * width * T, mask=inside, other=0.0)


@quick
@triton.jit
def collect(
    TARGETS, tb, tk, FRAMES, fs, COUNT, cs, X, D, M, T, S, V, blank, gamma: tl.float64,
    BLOCK: tl.constexpr, TOGETHER: tl.constexpr, TANGENT: tl.constexpr,
):  # fmt: skip
    """M ``(B, T, V)``: expected visits μ of symbols, or their derivative if ``TANGENT``."""
    at = tl.program_id(0).to(tl.int64)
    b, t = at // T, at % T
    gamma = tl.cast(gamma, tl.float64)
    k = tl.arange(0, BLOCK)
    frames, count, targets, bad = load_item(TARGETS, tb, FRAMES, fs, COUNT, cs, b, T, S)
    M += at * V
    for start in range(0, V, BLOCK):
        tl.store(M + start + k, tl.zeros((BLOCK,), M.dtype.element_ty), mask=start + k < V)
    if t < frames:
        symbol, wrong = load_symbols(targets, tk, k, count, V, blank)
        bad |= tl.max(wrong.to(tl.int32), 0) > 0
        width = b * 0 + S + 1
        in_x, in_y = k <= count, k < count
        x = tl.where(in_x, load_both(X, b, t, T, width, k, in_x), -float("inf"))
        y = tl.where(in_y, load_both(X + width, b, t, T, width, k, in_y), -float("inf"))
        peak = tl.max(tl.maximum(x, y), 0)
        peak = tl.where(peak == -float("inf"), 0.0, peak)
        rate = tl.minimum(1.0 / gamma * LOG2_E, MOST)
        p = tl.exp2(((x - peak) * rate).to(M.dtype.element_ty)).to(tl.float64)
        q = tl.exp2(((y - peak) * rate).to(M.dtype.element_ty)).to(tl.float64)
        total = tl.sum(p + q, 0)
        scale = tl.where(bad, float("nan"), 1.0 / tl.where(total == 0.0, 1.0, total))
        p, q = p * scale, q * scale
        if TANGENT:
            dx = load_both(D, b, t, T, width, k, in_x)
            dy = load_both(D + width, b, t, T, width, k, in_y)
            da = tl.sum(p * dx + q * dy, 0)
            p, q = p * (dx - da) / gamma, q * (dy - da) / gamma
        p, q = tl.where(in_x, p, 0.0), tl.where(in_y, q, 0.0).to(M.dtype.element_ty)
        tl.debug_barrier()  # the zeros are there
        for start in range(0, count, TOGETHER):
            some, _ = load_symbols(targets, tk, start + tl.arange(0, TOGETHER), count, V, blank)
            same = symbol[:, None] == some[None, :]
            mass = tl.sum(tl.where(same, q[:, None], 0.0), 0)
            tl.store(M + some, mass, mask=some != blank)
        blanks = tl.sum(p, 0) + tl.sum(tl.where(symbol == blank, q, 0.0), 0).to(tl.float64)
        tl.store(M + blank, blanks.to(M.dtype.element_ty))


@quick
@triton.jit
def inspect(
    TARGETS, tb, tk, FRAMES, fs, COUNT, cs, GOOD, T, S, V, blank, BLOCK: tl.constexpr
):  # fmt: skip
    """Which items have no impossible length or symbol, ``(B)``."""
    b = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    _, count, targets, bad = load_item(TARGETS, tb, FRAMES, fs, COUNT, cs, b, T, S)
    _, wrong = load_symbols(targets, tk, k, count, V, blank)
    tl.store(GOOD + b, ~(bad | (tl.max(wrong.to(tl.int32), 0) > 0)))


class Batch:
    """What every kernel is told of a batch: its targets and lengths."""

    def __init__(
        self, theta: Tensor, constants: Sequence[Tensor], blank: int, gamma: float
    ) -> None:
        targets, frames, count = constants
        (self.items, self.T, self.V), self.S = theta.shape, targets.shape[1]
        self.theta, self.gamma = theta, gamma
        self.item = targets, *targets.stride(), frames, frames.stride(0), count, count.stride(0)
        self.sizes = self.T, self.S, self.V, blank
        block = max(32, triton.next_power_of_2(self.S + 1))
        self.how = {"BLOCK": block, "num_warps": min(16, block // 32), "num_stages": 1}

    def table(self) -> Tensor:
        """Room for a number for every state of every frame, from either end."""
        shape = self.items, 2, self.T, 2, self.S + 1
        return self.theta.new_empty(shape, dtype=torch.float64)

    def up(self, X: Tensor | None = None) -> Tensor:
        """A; with a table, values are kept in it."""
        a, theta = self.theta.new_empty(self.items), self.theta
        keep, unused = X is not None, a
        no_direction = theta, *theta.stride()
        recursion[(self.items, 2 if keep else 1)](
            theta, *theta.stride(), *no_direction, *self.item, a, X if keep else unused, unused,
            *self.sizes, self.gamma, KEEP=keep, TANGENT=False, **self.how,
        )  # fmt: skip
        return a

    def tangent(self, direction: Tensor, X: Tensor, D: Tensor) -> None:
        """Fills X with values and D with their derivatives along a direction."""
        unused = X
        recursion[(self.items, 2)](
            self.theta, *self.theta.stride(), direction, *direction.stride(),
            *self.item, unused, X, D,
            *self.sizes, self.gamma, KEEP=True, TANGENT=True, **self.how,
        )  # fmt: skip

    def down(self, X: Tensor, D: Tensor | None = None) -> Tensor:
        """μ, or its derivative given those of the values."""
        mu = self.theta.new_empty(self.theta.shape)
        collect[(self.items * self.T,)](
            *self.item, X, X if D is None else D, mu, *self.sizes, self.gamma,
            TOGETHER=TOGETHER, TANGENT=D is not None, **self.how,
        )  # fmt: skip
        return mu


def value(theta: Tensor, constants: Sequence[Tensor], blank: int, gamma: float) -> Tensor:
    """A ``(B)`` for scores ``(B, T, V)``; constants are targets, frames and count of ``naive``."""
    with torch.cuda.device_of(theta):
        return Batch(theta, constants, blank, gamma).up()


def gradient(theta: Tensor, constants: Sequence[Tensor], blank: int, gamma: float) -> list[Tensor]:
    """A ``(B)`` and its gradient ``(B, T, V)``."""
    with torch.cuda.device_of(theta):
        batch = Batch(theta, constants, blank, gamma)
        X = batch.table()
        return [batch.up(X), batch.down(X)]


def hvp(
    theta: Tensor, direction: Tensor, constants: Sequence[Tensor], blank: int, gamma: float
) -> Tensor:
    """The Hessian of A times a direction ``(B, T, V)``."""
    with torch.cuda.device_of(theta):
        batch = Batch(theta, constants, blank, gamma)
        X, D = batch.table(), batch.table()
        batch.tangent(direction, X, D)
        return batch.down(X, D)


def possible(theta: Tensor, constants: Sequence[Tensor], blank: int) -> Tensor:
    """Which items have no impossible length or symbol, ``(B)``."""
    with torch.cuda.device_of(theta):
        batch = Batch(theta, constants, blank, 1.0)
        good = theta.new_empty(batch.items, dtype=torch.bool)
        inspect[(batch.items,)](*batch.item, good, *batch.sizes, **batch.how)
    return good
