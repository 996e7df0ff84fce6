"""The active-set method on the GPU: two launches and the oracle for a step of all items.

For any oracle; chains and trees have a kernel that holds theirs too (``fused_gpu``).

The same method as in ``active_set.py``, whose state it works on, with one program for an item (its
walk to the best point of its face is as long as it needs) and no word to the host: it looks at who
is done every few steps only.

K is the number of slots, a power of two. Of the matrices A and W, both symmetric, a program holds a
piece of ``PIECE`` rows at a time; a vector that is multiplied by one goes through memory (``ROOM``)
to change its layout.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from structmax.launch import quick
from structmax.sparse import active_set
from structmax.sparse.support import Oracle

CHECK = 8  # steps between two looks at who is done
INF = tl.constexpr(float("inf"))
TINY = tl.constexpr(active_set.TINY)
DEPENDENT = tl.constexpr(active_set.DEPENDENT)
ROUNDING = tl.constexpr(16 * 2.0**-52)
PIECE = tl.constexpr(16)  # rows of a matrix
BLOCK = tl.constexpr(64)  # parts


class Face(active_set.Face):
    first_slots = 32  # each size is a compilation

    def __init__(self, oracle: Oracle, theta: Tensor, width: int, tol: float, max_iter: int):
        self.used = 1  # no active slot is past the first so many
        super().__init__(oracle, theta.contiguous(), width, tol, max_iter)

    def start(self, counts: Tensor, weights: Tensor) -> None:
        super().start(counts, weights)
        self.settle()  # as after every step
        self.used = self.slots

    def tidy(self) -> bool:
        if self.used < self.slots and self.rounds % CHECK:
            return True
        slot = torch.arange(1, self.slots + 1, device=self.p.device)
        used = torch.where(self.active & ~self.done[:, None], slot, 0).amax()
        self.used, left = torch.stack([used, (~self.done).sum()]).tolist()
        if left == 0 or (2 * left <= len(self.items) and len(self.items) > self.oracle.few):
            self.drop_finished()  # some thirty launches, and the host waits
        if left and self.used == self.slots:
            self.grow()
        return left > 0

    def step(self) -> None:
        b, K, parts = self.counts.shape
        active, done = self.active.view(torch.uint8), self.done.view(torch.uint8)
        mu, gradient = self.theta.new_empty(b, self.width), torch.empty_like(self.theta)
        with torch.cuda.device_of(self.theta):
            _look[(b, triton.cdiv(parts, BLOCK.value))](
                self.p, self.counts, self.theta, mu, gradient, self.used, parts, self.width, K=K
            )
        _, z = self.oracle(gradient)
        self.used = min(self.used + 1, self.slots)
        with torch.cuda.device_of(self.theta):
            _absorb[(b,)](
                self.p, self.scores, active, done, self.gram, self.inverse,
                torch.empty_like(self.p), self.used, self.counts, self.theta, self.shift, mu,
                z.contiguous(), self.gap, self.calls, parts, self.width, self.tol, self.max_iter,
                K=K, D=max(16, min(64, 2048 // K)), num_warps=4 if K <= 32 else 8,
            )  # fmt: skip


# ------------------------------------------------------------------------------------- matrices


@triton.jit
def times(A, x, ROOM, used, K: tl.constexpr):
    """Ax"""
    i = tl.arange(0, K)
    tl.debug_barrier()
    tl.store(ROOM + i, x)
    tl.debug_barrier()
    total = tl.zeros((K,), tl.float64)
    for first in range(0, used, PIECE):
        j = first + tl.arange(0, PIECE)
        piece = tl.load(A + j[:, None] * K + i[None, :])
        total += tl.sum(piece * tl.load(ROOM + j)[:, None], 0)
    return total


@triton.jit
def solve(A, W, right, ROOM, used, K: tl.constexpr):
    """A⁻¹ on the active slots, with one step of refinement since W has drifted."""
    x = times(W, right, ROOM, used, K)
    return x + times(W, right - times(A, x, ROOM, used, K), ROOM, used, K)


@triton.jit
def _add_square(W, x, scale, inside, ROOM, used, K: tl.constexpr):
    """W += scale·xxᵀ, and 0 where one of both slots is not inside."""
    i = tl.arange(0, K)
    tl.debug_barrier()
    tl.store(ROOM + i, tl.where(inside, x, INF))
    tl.debug_barrier()
    for first in range(0, used, PIECE):
        j = first + tl.arange(0, PIECE)
        at = W + j[:, None] * K + i[None, :]
        y = tl.load(ROOM + j)
        both = inside[None, :] & (y < INF)[:, None]
        update = tl.where(y < INF, y * scale, 0.0)[:, None] * tl.where(inside, x, 0.0)[None, :]
        tl.store(at, tl.where(both, tl.load(at) + update, 0.0))
    tl.debug_barrier()


@triton.jit
def _leave(W, slot, active, ROOM, used, K: tl.constexpr):
    """W after a slot has left the face; returns what is active."""
    i = tl.arange(0, K)
    tl.debug_barrier()
    column = tl.load(W + slot * K + i)
    pivot = tl.load(W + slot * K + slot)
    active = active & (i != slot)
    _add_square(W, column, -1.0 / pivot, active, ROOM, used, K)
    return active


# ---------------------------------------------------------------------------------------- steps


@triton.jit
def settle(p, c, active, newest, A, W, ROOM, used, K: tl.constexpr):
    """Walks to the best point of the face; structures whose weight reaches 0 leave it.

    Returns the weights, what is active, and whether that shows that the item is done.
    """
    i = tl.arange(0, K)
    done = newest * 0
    go_on = done == 0
    while go_on:
        x = solve(A, W, tl.where(active, c, 0.0), ROOM, used, K)
        y = solve(A, W, active.to(tl.float64), ROOM, used, K)
        best = x + (1.0 - tl.sum(x, 0)) / tl.sum(y, 0) * y
        low = active & (best <= TINY)
        go_on = tl.max(low.to(tl.int32), 0) > 0
        if go_on:
            down = tl.maximum(p - best, 1e-300)
            reach, slot = tl.min(tl.where(low, p / down, INF), 0, return_indices=True)
            p = tl.maximum(p + tl.minimum(reach, 1.0) * (best - p), 0.0)
            p = tl.where(i == slot, 0.0, p)
            active = _leave(W, slot, active, ROOM, used, K)
            # what has just come and goes at once was no improvement beyond rounding
            done = ((slot == newest) & (reach == 0.0)).to(tl.int32)
            go_on = done == 0
        else:
            p = tl.where(active, best, 0.0)
    return p, active, done


@triton.jit
def join(active, right, size, u, distance, total, slot, A, W, C, ROOM, used, K: tl.constexpr):
    """A structure becomes active: its row of A, W, its score; returns what is active then. ``u``
    and ``distance`` are those of its products ``right`` with the others (see ``enter``)."""
    i = tl.arange(0, K)
    new = i == slot
    right = tl.where(new, size, tl.where(active, right, 0.0))
    tl.store(A + slot * K + i, right)
    tl.store(A + i * K + slot, right)
    tl.store(C + slot, total)
    active = active | new
    _add_square(W, tl.where(new, -1.0, u), 1.0 / distance, active, ROOM, used, K)
    return active


@triton.jit
def enter(p, c, active, products, size, total, slot, A, W, C, ROOM, used, K: tl.constexpr):
    """A better structure joins the face in a free slot, and the weights walk to the best point of
    it. Given its products with the others, with itself, and its score.

    Returns the weights, what is active, and 1 if that shows that the item is done, else 0.
    """
    i = tl.arange(0, K)
    right = tl.where(active, products + 1.0, 0.0)
    size += 1.0
    u = solve(A, W, right, ROOM, used, K)
    distance = size - tl.sum(right * u, 0)
    weight = total * 0.0
    newest = slot
    done = slot * 0
    if distance <= size * DEPENDENT:
        # weight moves to it at no penalty, until that of another reaches 0
        done = (total - tl.sum(u * c, 0) <= 0.0).to(tl.int32)
        reach, leaves = tl.min(tl.where(active & (u > TINY), p / u, INF), 0, return_indices=True)
        if done == 0:
            weight = reach
            p = tl.where(i == leaves, 0.0, tl.maximum(p - weight * u, 0.0))
            active = _leave(W, leaves, active, ROOM, used, K)
            right = tl.where(active, right, 0.0)
            u = solve(A, W, right, ROOM, used, K)
            distance = tl.maximum(size - tl.sum(right * u, 0), size * DEPENDENT)
        newest = slot * 0 - 1
    if done == 0:
        active = join(active, right, size, u, distance, total, slot, A, W, C, ROOM, used, K)
        c = tl.where(i == slot, total, tl.where(active, c, 0.0))
        p = tl.where(i == slot, weight, p)
        p, active, done = settle(p, c, active, newest, A, W, ROOM, used, K)
    return p, active, done


@quick
@triton.jit(do_not_specialize=["used"])
def _look(P, COUNTS, THETA, MU, G, used, parts, width, K: tl.constexpr):
    """μ = Mp, and the gradient θ − μ."""
    b = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = d < width
    mu = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, used, PIECE):
        k = first + tl.arange(0, PIECE)
        p = tl.load(P + b * K + k)
        at = COUNTS + (b * K + k[:, None]) * parts + d[None, :]
        counts = tl.load(at, mask=own[None, :] & (p != 0.0)[:, None], other=0.0)
        mu += tl.sum(counts * p[:, None], 0)
    tl.store(MU + b * width + d, mu, mask=own)
    theta = tl.load(THETA + b * parts + d, mask=d < parts, other=0.0)
    tl.store(G + b * parts + d, tl.where(own, theta - mu, theta), mask=d < parts)


@quick
@triton.jit(do_not_specialize=["used"])
def _absorb(
    P, C, ACTIVE, DONE, A, W, ROOM, used, COUNTS, THETA, SHIFT, MU, Z, GAP, CALLS,
    parts, width, tol, max_iter, K: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Notes the gap to the structure z that was found; unless that shows that the item is done, z
    joins the face, and the weights walk to the best point of it."""
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, K)
    A += b * K * K
    W += b * K * K
    ROOM += b * K
    COUNTS += b * K * parts
    THETA += b * parts
    MU += b * width
    Z += b * parts
    if tl.load(DONE + b) == 0:
        p = tl.load(P + b * K + i)
        active = tl.load(ACTIVE + b * K + i) != 0
        c = tl.where(active, tl.load(C + b * K + i), 0.0)
        # products of z with the active structures, over the penalised and over the other parts,
        # and of each with itself
        penalised = tl.zeros((K,), tl.float64)
        other = tl.zeros((K,), tl.float64)
        own_size = tl.zeros((K,), tl.float64)
        lanes = tl.zeros((D,), tl.float64)
        score, at_mu, mu_mu, z_z, z_size = lanes, lanes, lanes, lanes, lanes
        for first in range(0, parts, D):
            d = first + tl.arange(0, D)
            z = tl.load(Z + d, mask=d < parts, other=0.0)
            theta = tl.load(THETA + d, mask=(d < parts) & (z != 0.0), other=0.0)
            mu = tl.load(MU + d, mask=d < width, other=0.0)
            score += theta * z
            at_mu += mu * z
            mu_mu += mu * mu
            z_z += tl.where(d < width, z * z, 0.0)
            z_size += z * z
            at = COUNTS + i[:, None] * parts + d[None, :]
            counts = tl.load(at, mask=active[:, None] & (d < parts)[None, :], other=0.0)
            product = counts * z[None, :]
            penalised += tl.sum(tl.where((d < width)[None, :], product, 0.0), 1)
            other += tl.sum(tl.where((d < width)[None, :], 0.0, product), 1)
            own_size += tl.sum(counts * counts, 1)
        shift = tl.load(SHIFT + b)
        total, size, whole = tl.sum(score, 0) - shift, tl.sum(z_z, 0), tl.sum(z_size, 0)
        gap = total - tl.sum(at_mu, 0) - (tl.sum(p * c, 0) - tl.sum(mu_mu, 0))
        spread = tl.max(tl.where(active, tl.abs(total - c), 0.0), 0)
        known = tl.where(active, c + shift, 0.0)
        magnitude = tl.maximum(tl.abs(total + shift), tl.max(tl.abs(known), 0))
        least = tol * (tl.maximum(size, 1.0) + spread) + magnitude * ROUNDING
        same = active & (penalised + other == whole) & (own_size == whole)
        calls = tl.load(CALLS + b) + 1
        done = (gap <= least) | (calls >= max_iter) | (tl.max(same.to(tl.int32), 0) > 0)
        tl.store(GAP + b, tl.maximum(gap, 0.0))
        tl.store(CALLS + b, calls)
        if done == 0:
            slot = tl.min(tl.where(active, K, i), 0)
            for first in range(0, parts, D):
                d = first + tl.arange(0, D)
                z = tl.load(Z + d, mask=d < parts)
                tl.store(COUNTS + slot * parts + d, z, mask=d < parts)
            p, active, left = enter(
                p, c, active, penalised, size, total, slot, A, W, C + b * K, ROOM, used, K
            )
            tl.store(P + b * K + i, p)
            tl.store(ACTIVE + b * K + i, active.to(tl.uint8))
            done = left > 0
        tl.store(DONE + b, done.to(tl.uint8))
