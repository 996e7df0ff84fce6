"""SparseMAP of chains and trees on the GPU: one program walks an item from start to end.

The method is that of ``active_set.py``, and the search for the rest of a face that of
``completion.py``, as the compiled solver has them: a structure that is found there joins the face
with weight 0. In every step a program asks its own oracle, so nothing waits for the slowest item or
for the host, which looks in only when W has to be made exact again or a face is out of slots.

A structure is a row of *codes*, the tag of each position or the head of each word, −1 for what is
not there. Position l with code r is the part ``l·sl + r·sr``, and the product of two structures is
the number of positions at which they agree. So a step reads and writes few bytes, however many
parts there are; indicators are made once, at the end.

K is the number of slots, L that of positions, R that of codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from structmax.forest.chain.gpu import best_tags
from structmax.forest.chain.ops import MAX_TAGS_ON_GPU
from structmax.launch import quick
from structmax.oracles.arborescence import MAX_SIDE_ON_GPU
from structmax.oracles.arborescence_gpu import find_tree, warps
from structmax.sparse import active_set, completion, completion_cpu
from structmax.sparse.active_set_gpu import ROUNDING, enter, join, times
from structmax.sparse.active_set_gpu import solve as solve_active
from structmax.sparse.result import Solution
from structmax.structures.linear_chain import LinearChain
from structmax.structures.nonprojective import NonprojectiveTree
from structmax.structures.parts import PartStructure

FIRST_SLOTS, MOST_SLOTS = 32, 256
STEPS = active_set.REFRESH  # of an item in one launch
TILE = 2048  # numbers that a program works on at a time

BEGIN, SOLVE, WIDEN, DONE = (tl.constexpr(n) for n in range(4))
SMALL, STEP, SLACK = (
    tl.constexpr(x) for x in (completion.SMALL, completion.STEP, completion.SLACK)
)
OUTSIDE, ENOUGH = tl.constexpr(completion.OUTSIDE), tl.constexpr(completion_cpu.ENOUGH)
UNROLL = tl.constexpr(4)


# ---------------------------------------------------------------------------------------- kernels


@triton.jit
def _gradient(
    THETA, CODES, ROOM, G, used, epsilon, turn, L, R, sl, sr, LB: tl.constexpr, RB: tl.constexpr
):
    """G = θ − Mw + εx, for the weights w in ROOM and numbers x that are random in [−1, 1)."""
    r = tl.arange(0, RB)[None, :]
    for first in range(0, L, LB):
        l = first + tl.arange(0, LB)
        mean = tl.zeros((LB, RB), tl.float64)
        for start in range(0, used, UNROLL):
            for more in tl.static_range(UNROLL):
                k = start + more
                code = tl.load(CODES + k * L + l, mask=l < L, other=-1).to(tl.int32)
                mean += tl.where(code[:, None] == r, tl.load(ROOM + k), 0.0)
        at = l[:, None] * sl + r * sr
        inside = (l < L)[:, None] & (r < R)
        g = tl.load(THETA + at, mask=inside, other=0.0) - mean
        if turn > 0:
            g += epsilon * (2.0 * tl.rand(turn, at) - 1.0)
        tl.store(G + at, g, mask=inside)


@triton.jit
def _turned(A, W, CODES, active, turn, ROOM, used, L, sl, sr, K: tl.constexpr, LK: tl.constexpr):
    """y with which x − My is at right angles to the face: y = QMᵀx (see ``_gradient``)."""
    i = tl.arange(0, K)
    along = tl.zeros((K,), tl.float64)
    for first in range(0, L, LK):
        l = first + tl.arange(0, LK)
        inside = active[:, None] & (l < L)[None, :]
        code = tl.load(CODES + i[:, None] * L + l[None, :], mask=inside, other=-1).to(tl.int32)
        x = 2.0 * tl.rand(turn, l[None, :] * sl + code * sr) - 1.0
        along += tl.sum(tl.where(code >= 0, x, 0.0).to(tl.float64), 1)
    y = solve_active(A, W, along, ROOM, used, K)
    w = solve_active(A, W, active.to(tl.float64), ROOM, used, K)
    return y - w * (tl.sum(y, 0) / tl.sum(w, 0))


@triton.jit
def _measure(
    THETA, CODES, slot, active, L, R, sl, sr,
    TREE: tl.constexpr, SHARED: tl.constexpr, K: tl.constexpr, LK: tl.constexpr,
):  # fmt: skip
    """Of the structure in a slot: its products with the active ones, its size and its score."""
    i = tl.arange(0, K)
    agree = tl.zeros((K,), tl.int32)
    size = tl.zeros((LK,), tl.int32)
    score = tl.zeros((LK,), tl.float64)
    for first in range(0, L, LK):
        l = first + tl.arange(0, LK)
        z = tl.load(CODES + slot * L + l, mask=l < L, other=-1).to(tl.int32)
        there = z >= 0
        inside = active[:, None] & there[None, :]
        code = tl.load(CODES + i[:, None] * L + l[None, :], mask=inside, other=-1).to(tl.int32)
        agree += tl.sum((inside & (code == z[None, :])).to(tl.int32), 1)
        size += there.to(tl.int32)
        score += tl.load(THETA + l * sl + z * sr, mask=there, other=0.0)
        if not TREE:
            after = tl.load(CODES + slot * L + l + 1, mask=l + 1 < L, other=-1).to(tl.int32)
            at = L * R + z * R + after
            if not SHARED:
                at += l * R * R
            score += tl.load(THETA + at, mask=there & (after >= 0), other=0.0)
    return agree.to(tl.float64), tl.sum(size, 0).to(tl.float64), tl.sum(score, 0)


@triton.jit
def _largest(G, THETA, count, parts, BLOCK: tl.constexpr):
    """The largest finite absolute value of a gradient, of which the first ``count`` are in G."""
    top = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, parts, BLOCK):
        d = first + tl.arange(0, BLOCK)
        g = tl.load(G + d, mask=d < count, other=0.0)
        g += tl.load(THETA + d, mask=(d >= count) & (d < parts), other=0.0)
        top = tl.maximum(top, tl.where(tl.abs(g) < float("inf"), tl.abs(g), 0.0))
    return tl.max(top, 0)


@quick
@triton.jit(do_not_specialize=["steps", "max_iter"])
def _walk(
    THETA, LENGTHS, CODES, P, C, ACTIVE, A, W, OWN, ROOM, G, LEVELS, COUNTS, BACK,
    L, R, sl, sr, parts, steps, tol, max_iter,
    TREE: tl.constexpr, SINGLE: tl.constexpr, SHARED: tl.constexpr, COMPLETE: tl.constexpr,
    K: tl.constexpr, LB: tl.constexpr, RB: tl.constexpr, LK: tl.constexpr, EVEN: tl.constexpr,
    LOG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """At most so many steps of an item. LEVELS: gap, shift, ε; COUNTS: phase, calls, misses, turn.

    OWN becomes the W of the active structures alone, before others of their face join them.
    """
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, K)
    THETA += b * parts
    CODES += b * K * L
    P += b * K
    C += b * K
    ACTIVE += b * K
    A += b * K * K
    W += b * K * K
    OWN += b * K * K
    ROOM += b * K
    LEVELS += b * 3
    COUNTS += b * 4
    length = tl.load(LENGTHS + b)
    phase = tl.load(COUNTS)
    calls = tl.load(COUNTS + 1)
    misses = tl.load(COUNTS + 2)
    turn = tl.load(COUNTS + 3)
    left = steps
    if phase == DONE:
        left = left * 0
    while left > 0:
        left -= 1
        tl.debug_barrier()
        p = tl.load(P + i)
        active = tl.load(ACTIVE + i) != 0
        slot = tl.min(tl.where(active, K, i), 0)
        if slot == K:  # out of slots
            left = left * 0
        else:
            used = tl.minimum(tl.max(tl.where(active, i, -1), 0) + 2, K)
            shift = tl.load(LEVELS + 1)
            epsilon = tl.load(LEVELS + 2)
            # -- where to look
            w = p
            if phase == WIDEN:
                y = _turned(A, W, CODES, active, turn, ROOM, used, L, sl, sr, K, LK)
                epsilon = tl.where(misses % 2 == 1, -epsilon, epsilon)
                w += epsilon * y
            tl.debug_barrier()
            tl.store(ROOM + i, w)
            tl.debug_barrier()
            _gradient(THETA, CODES, ROOM, G + b * L * R, used, epsilon, turn, L, R, sl, sr, LB, RB)
            tl.debug_barrier()
            # -- what is best there
            z = CODES + slot * L
            if TREE:
                word = tl.arange(0, RB)
                trail = BACK + b * 2 * RB * RB
                value, head = find_tree(
                    G + b * L * R, sr, sl, length.to(tl.int32), trail, SINGLE, RB, LOG
                )
                tl.store(z + word, head.to(tl.int16), mask=word < L)
            else:
                value = best_tags(
                    G, (L * R, R, 1), THETA - b * parts + L * R, (parts, R * R, R, 1), b,
                    length.to(tl.int64) - 1, z, BACK, L, R, RB, EVEN, SHARED, 1,
                )  # fmt: skip
                for t in range(length.to(tl.int32), L):
                    tl.store(z + t, tl.full((), -1, tl.int16))
            tl.debug_barrier()
            # -- what it changes
            c = tl.where(active, tl.load(C + i), 0.0)
            agree, size, score = _measure(
                THETA, CODES, slot, active, L, R, sl, sr, TREE, SHARED, K, LK
            )
            if phase == BEGIN:
                calls = calls * 0 + 1
                good = tl.abs(value) < float("inf")
                p = tl.where(i == 0, 1.0, 0.0).to(tl.float64)
                if good:
                    tl.store(LEVELS, float("inf"))
                    tl.store(LEVELS + 1, score)
                    tl.store(ACTIVE, tl.full((), 1, tl.uint8))
                    tl.store(A, size + 1.0)
                    tl.store(W, 1.0 / (size + 1.0))
                    phase = phase * 0 + SOLVE
                else:  # nothing is allowed there, or a score is NaN
                    for t in range(0, L):
                        tl.store(z + t, tl.full((), -1, tl.int16))
                    tl.store(LEVELS, float("nan"))
                    p = tl.full((K,), float("nan"), tl.float64)
                    phase = phase * 0 + DONE
                    left = left * 0
                tl.store(P + i, p)
            else:
                total = score - shift
                here = tl.sum(p * c, 0) - (tl.sum(p * times(A, p, ROOM, used, K), 0) - 1.0)
                gap = total - tl.sum(p * agree, 0) - here
                if phase == SOLVE:
                    calls += 1
                    spread = tl.max(tl.where(active, tl.abs(total - c), 0.0), 0)
                    known = tl.max(tl.where(active, tl.abs(c + shift), 0.0), 0)
                    magnitude = tl.maximum(tl.abs(score), known)
                    least = tol * (tl.maximum(size, 1.0) + spread) + magnitude * ROUNDING
                    same = tl.max((active & (agree == size)).to(tl.int32), 0)
                    done = ((gap <= least) | (calls >= max_iter)).to(tl.int32)
                    done = tl.maximum(done, same)
                    tl.store(LEVELS, tl.maximum(gap, 0.0))
                    if done == 0:
                        p, active, done = enter(
                            p, c, active, agree, size, total, slot, A, W, C, ROOM, used, K
                        )
                        tl.store(P + i, p)
                        tl.store(ACTIVE + i, active.to(tl.uint8))
                    if done > 0:
                        phase = phase * 0 + DONE
                        if COMPLETE:
                            phase = phase * 0 + WIDEN
                            top = _largest(G + b * L * R, THETA, L * R, parts, BLOCK)
                            tl.store(LEVELS + 2, 1e-9 * top + STEP)
                            lowest = tl.min(tl.where(active, p, 1.0), 0)
                            # one direction will do, but for rounding, unless something is found
                            misses = tl.where(lowest < SMALL, 0, ENOUGH - 2)
                            turn = turn * 0 + 1
                            tl.debug_barrier()
                            for first in range(0, K * K, BLOCK):
                                d = first + tl.arange(0, BLOCK)
                                tl.store(OWN + d, tl.load(W + d, mask=d < K * K), mask=d < K * K)
                        else:
                            left = left * 0
                else:
                    misses += 1
                    slack = (tl.abs(epsilon) - STEP) * 0.1 + SLACK
                    if tl.abs(gap) <= slack:
                        right = tl.where(active, agree + 1.0, 0.0)
                        u = solve_active(A, W, right, ROOM, used, K)
                        distance = size + 1.0 - tl.sum(right * u, 0)
                        if distance > (size + 1.0) * OUTSIDE:
                            active = join(
                                active, right, size + 1.0, u, distance, total, slot,
                                A, W, C, ROOM, used, K,
                            )  # fmt: skip
                            tl.store(ACTIVE + i, active.to(tl.uint8))
                            misses = misses * 0
                    if misses % 2 == 0:
                        turn += 1
                    if misses == ENOUGH:
                        phase = phase * 0 + DONE
                        left = left * 0
    tl.store(COUNTS, phase)
    tl.store(COUNTS + 1, calls)
    tl.store(COUNTS + 2, misses)
    tl.store(COUNTS + 3, turn)


# ---------------------------------------------------------------------------------- torch functions


def solve(
    structure: PartStructure, penalize: str, max_iter: int, tol: float, complete: bool
) -> Solution | None:
    """The active-set solution; with ``complete``, with the rest of its faces. None for structures
    that have no such kernel, and where a face has more structures than it has slots for."""
    kind = _kind(structure, penalize)
    if kind is None:
        return None
    batch = structure.batch_shape.numel()
    flat = [p.detach().reshape(batch, -1).double() for p in structure._parts()]
    state = _State(torch.cat(flat, 1), kind)
    while state.go_on():
        if not state.walk(max_iter, tol, complete):
            return None
    return state.solution(complete)


@dataclass
class _Kind:
    """What the codes of a structure stand for."""

    tree: bool
    single: bool
    lengths: Tensor
    L: int
    R: int
    steps: int  # transitions, 0 of a tree

    @property
    def strides(self) -> tuple[int, int]:
        return (1, self.R) if self.tree else (self.R, 1)

    def counts(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Of structures ``(b, K, L)``: indicators ``(b, K, LR)`` of their primary parts, and counts
        ``(b, K, ·)`` of their transitions, both in float64."""
        b, K, L = codes.shape
        z = (codes[..., None] == torch.arange(self.R, device=codes.device)).double()
        if self.tree:
            return z.mT.reshape(b, K, L * self.R), z.new_zeros(b, K, 0)
        before, after = z[..., :-1, :], z[..., 1:, :]
        moves = before.mT @ after if self.steps == 1 else before[..., None] * after[..., None, :]
        return z.reshape(b, K, L * self.R), moves.reshape(b, K, -1)


def _kind(structure: PartStructure, penalize: str) -> _Kind | None:
    L, R = structure.event_shape[:2] if len(structure.event_shape) > 1 else (0, 0)
    if isinstance(structure, LinearChain):
        steps = structure._parts()[1].shape[-3]
        if penalize == "all" or R > MAX_TAGS_ON_GPU:
            return None
        return _Kind(False, False, structure._lengths().reshape(-1), L, R, steps)
    if isinstance(structure, NonprojectiveTree):
        if structure.labelled or structure._has_choices or L > MAX_SIDE_ON_GPU:
            return None
        return _Kind(True, structure._single, structure._words().reshape(-1), L, R, 0)
    return None


class _State:
    """Faces of all items, in the order of the batch."""

    def __init__(self, theta: Tensor, kind: _Kind) -> None:
        self.theta, self.kind = theta, kind
        b, K, device = len(theta), FIRST_SLOTS, theta.device
        self.codes = torch.zeros(b, K, kind.L, dtype=torch.int16, device=device)
        self.p, self.scores, self.room = (theta.new_zeros(b, K) for _ in range(3))
        self.active = torch.zeros(b, K, dtype=torch.uint8, device=device)
        self.gram, self.inverse, self.own = (theta.new_zeros(b, K, K) for _ in range(3))
        self.gradient = theta.new_empty(b, kind.L * kind.R)
        self.levels = theta.new_zeros(b, 3)
        self.counts = torch.zeros(b, 4, dtype=torch.int32, device=device)
        self.lengths = kind.lengths.to(torch.int32).contiguous()
        self.side = max(triton.next_power_of_2(kind.R), 16 if kind.tree else 8)
        if kind.tree:
            self.back = torch.empty(b, 2, self.side, self.side, dtype=torch.int32, device=device)
        else:
            self.back = torch.empty(b, kind.L, kind.R, dtype=torch.int16, device=device)
        self.full = False

    @property
    def slots(self) -> int:
        return self.p.shape[1]

    def go_on(self) -> bool:
        """Whether an item is not done; notes if one has no slot left."""
        left = self.counts[:, 0] != DONE.value
        full = (self.active != 0).all(-1) & left
        any_left, self.full = torch.stack([left.any(), full.any()]).tolist()
        return bool(any_left)

    def walk(self, max_iter: int, tol: float, complete: bool) -> bool:
        """Some steps of all items; False if there is no room for them."""
        if self.full:
            if self.slots == MOST_SLOTS:
                return False
            self._grow()
        kind, K, RB = self.kind, self.slots, self.side
        options = _options(kind, K, RB)
        with torch.cuda.device_of(self.theta):
            _walk[(len(self.theta),)](
                self.theta, self.lengths, self.codes, self.p, self.scores, self.active,
                self.gram, self.inverse, self.own, self.room, self.gradient, self.levels,
                self.counts, self.back, kind.L, kind.R, *kind.strides, self.theta.shape[1],
                STEPS, tol, max_iter, TREE=kind.tree, SINGLE=kind.single, SHARED=kind.steps == 1,
                COMPLETE=complete, K=K, RB=RB, EVEN=RB == kind.R, **options,
            )  # fmt: skip
        self.inverse = _refreshed(self.gram, self.inverse)
        return True

    def _grow(self) -> None:
        """Twice as many slots."""
        K, pad = self.slots, torch.nn.functional.pad
        for name in ("p", "scores", "room", "active"):
            setattr(self, name, pad(getattr(self, name), (0, K)))
        self.codes = pad(self.codes, (0, 0, 0, K))
        for name in ("gram", "inverse", "own"):
            setattr(self, name, pad(getattr(self, name), (0, K, 0, K)))

    def solution(self, complete: bool) -> Solution:
        p = self.p
        active, gap, calls = self.active != 0, self.levels[:, 0], self.counts[:, 1].long()
        used = active & (p > 0)
        wide = (active & ~used).any(-1)
        most, more = torch.stack([used.sum(-1).amax(), wide.sum()]).tolist()
        order = torch.where(used, p, -1.0).argsort(dim=-1, descending=True, stable=True)
        order = order[:, : max(most, 1)]
        used = used.gather(1, order)
        slot = torch.where(used, order, order[:, :1])
        vertices, edges = self.kind.counts(_pick(self.codes, slot))
        probs = torch.where(used, p.gather(1, order), 0.0)
        probs = torch.where(gap.isnan()[:, None], torch.nan, probs)
        inverse = _refreshed(self.gram, self.own) if complete else self.inverse
        inverse = _block(inverse, order, used)
        found = Solution(vertices, edges, probs, gap, calls, inverse, whole=complete)
        if not more:
            return found
        items = wide.nonzero().squeeze(-1)
        codes, W, inside = self.codes[items], self.inverse[items], active[items]
        K = int(inside.sum(-1).amax())
        order = inside.byte().argsort(dim=-1, descending=True, stable=True)[:, :K]
        inside = inside.gather(1, order)
        rows = torch.cat(self.kind.counts(_pick(codes, order)), -1) * inside[..., None]
        return found._replace(items=items, rows=rows, inner=_block(W, order, inside))


def _options(kind: _Kind, K: int, RB: int) -> dict[str, int]:
    """How to compile for these sizes."""
    return {
        "LB": max(1, min(triton.next_power_of_2(kind.L), TILE // RB)),
        "LK": max(16, min(triton.next_power_of_2(kind.L), TILE // K)),
        "LOG": RB.bit_length() - 1,
        "BLOCK": 256,
        "num_warps": warps(RB) if kind.tree else 2,
    }


def _pick(codes: Tensor, slots: Tensor) -> Tensor:
    """Rows ``(b, k, L)`` of codes ``(b, K, L)``."""
    return codes.gather(1, slots[..., None].expand(-1, -1, codes.shape[-1]))


def _block(W: Tensor, order: Tensor, used: Tensor) -> Tensor:
    """W of some slots ``(b, k)``, 0 for those not used."""
    k = order.shape[1]
    rows = W.gather(1, order[..., None].expand(-1, -1, W.shape[-1]))
    block = rows.gather(2, order[:, None].expand(-1, k, -1))
    return torch.where(used[:, :, None] & used[:, None], block, 0.0)


def _refreshed(A: Tensor, W: Tensor) -> Tensor:
    """W without what its updates have rounded; see ``active_set.Face.refresh``."""
    return 2 * W - W @ (A @ W)
