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

from structmax.fence import require
from structmax.forest.chain.gpu import best_tags
from structmax.forest.chain.ops import MAX_TAGS_ON_GPU
from structmax.launch import quick
from structmax.oracles.arborescence import MAX_SIDE_ON_GPU
from structmax.oracles.arborescence_gpu import find_tree, warps
from structmax.sparse import active_set, completion, completion_cpu
from structmax.sparse.active_set_gpu import DEPENDENT, ROUNDING, enter, join, settle, times
from structmax.sparse.active_set_gpu import solve as solve_active
from structmax.sparse.result import Solution, SparseMAPResult
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
def _magnitude(
    THETA, G, CODES, active, L, R, sl, sr,
    TREE: tl.constexpr, SHARED: tl.constexpr, K: tl.constexpr, LK: tl.constexpr,
):  # fmt: skip
    """The largest absolute value of the gradient among the parts of active structures."""
    i = tl.arange(0, K)
    top = tl.zeros((K,), tl.float64)
    for first in range(0, L, LK):
        l = first + tl.arange(0, LK)[None, :]
        at = CODES + i[:, None] * L + l
        code = tl.load(at, mask=active[:, None] & (l < L), other=-1).to(tl.int32)
        g = tl.load(G + l * sl + code * sr, mask=code >= 0, other=0.0)
        top = tl.maximum(top, tl.max(tl.abs(g), 1))
        if not TREE:
            after = tl.load(at + 1, mask=active[:, None] & (l + 1 < L), other=-1).to(tl.int32)
            edge = L * R + code * R + after
            if not SHARED:
                edge += l * R * R
            g = tl.load(THETA + edge, mask=(code >= 0) & (after >= 0), other=0.0)
            top = tl.maximum(top, tl.max(tl.abs(g), 1))
    return tl.max(top, 0)


@quick
@triton.jit(do_not_specialize=["given"])
def _seed(
    THETA, CODES, P, C, ACTIVE, A, W, ROOM, LEVELS, COUNTS, L, R, sl, sr, parts, given,
    TREE: tl.constexpr, SHARED: tl.constexpr, K: tl.constexpr, LK: tl.constexpr,
):  # fmt: skip
    """To the best structure, in slot 0, come those that are given to start from, in the slots after
    it, as far as they are allowed and affinely independent. C holds their weights."""
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, K)
    THETA += b * parts
    CODES += b * K * L
    C += b * K
    A += b * K * K
    W += b * K * K
    ROOM += b * K
    if tl.load(COUNTS + b * 4) == SOLVE:
        shift = tl.load(LEVELS + b * 3 + 1)
        weights = tl.load(C + i, mask=(i > 0) & (i <= given), other=0.0)
        p = weights
        active = i == 0
        used = tl.minimum(given + 2, K)
        for k in range(1, given + 1):
            agree, size, score = _measure(
                THETA, CODES, k, active, L, R, sl, sr, TREE, SHARED, K, LK
            )
            weight = tl.sum(tl.where(i == k, weights, 0.0), 0)
            right = tl.where(active, agree + 1.0, 0.0)
            size += 1.0
            best = tl.sum(tl.where(i == 0, right, 0.0), 0) == size  # it is the one in slot 0
            p = tl.where(i == 0, p + tl.where(best, weight, 0.0), p)
            u = solve_active(A, W, right, ROOM, used, K)
            distance = size - tl.sum(right * u, 0)
            allowed = tl.where(score > -float("inf"), weight, 0.0)
            if tl.where(allowed > 0.0, distance, 0.0) > size * DEPENDENT:
                total = score - shift
                active = join(active, right, size, u, distance, total, k, A, W, C, ROOM, used, K)
        p = tl.where(active, p, 0.0)
        total = tl.sum(p, 0)
        p = tl.where(total > 0.0, p / total, tl.where(i == 0, 1.0, 0.0))
        tl.debug_barrier()
        c = tl.where(active, tl.load(C + i), 0.0)
        p, active, _ = settle(p, c, active, given * 0 - 1, A, W, ROOM, used, K)
        tl.store(P + b * K + i, p)
        tl.store(ACTIVE + b * K + i, active.to(tl.uint8))


@triton.jit
def _begin(P, ACTIVE, A, W, LEVELS, value, size, score, K: tl.constexpr):
    """The best structure, in slot 0, alone. Returns 1, or 0 if nothing is allowed or a score is
    NaN."""
    i = tl.arange(0, K)
    good = (tl.abs(value) < float("inf")).to(tl.int32)
    alone = tl.where(i == 0, 1.0, 0.0).to(tl.float64)
    tl.store(P + i, alone + tl.where(good > 0, 0.0, float("nan")))
    tl.store(ACTIVE + i, ((i == 0) & (good > 0)).to(tl.uint8))
    tl.store(A, size + 1.0)
    tl.store(W, 1.0 / (size + 1.0))
    tl.store(LEVELS, tl.where(good > 0, float("inf"), float("nan")))
    tl.store(LEVELS + 1, score)
    return good


@triton.jit
def _improve(
    P, C, ACTIVE, A, W, ROOM, LEVELS, p, c, active, agree, size, total, shift, gap, slot, used,
    stop, tol, K: tl.constexpr,
):  # fmt: skip
    """The best structure at the gradient joins the face; returns 1 if the item is done, else 0, and
    the weights and what is active."""
    i = tl.arange(0, K)
    spread = tl.max(tl.where(active, tl.abs(total - c), 0.0), 0)
    known = tl.max(tl.where(active, tl.abs(c + shift), 0.0), 0)
    magnitude = tl.maximum(tl.abs(total + shift), known)
    least = tol * (tl.maximum(size, 1.0) + spread) + magnitude * ROUNDING
    same = tl.max((active & (agree == size)).to(tl.int32), 0)
    done = tl.maximum(((gap <= least) | stop).to(tl.int32), same)
    tl.store(LEVELS, tl.maximum(gap, 0.0))
    if done == 0:
        p, active, done = enter(p, c, active, agree, size, total, slot, A, W, C, ROOM, used, K)
        tl.store(P + i, p)
        tl.store(ACTIVE + i, active.to(tl.uint8))
    return done, p, active


@triton.jit
def _widen(
    ACTIVE, C, A, W, ROOM, active, agree, size, total, gap, slack, slot, used, K: tl.constexpr
):
    """A structure of the face joins with weight 0, if it lies outside the hull; returns 1 then."""
    i = tl.arange(0, K)
    joins = slot * 0
    if tl.abs(gap) <= slack:
        right = tl.where(active, agree + 1.0, 0.0)
        size += 1.0
        u = solve_active(A, W, right, ROOM, used, K)
        distance = size - tl.sum(right * u, 0)
        if distance > size * OUTSIDE:
            active = join(active, right, size, u, distance, total, slot, A, W, C, ROOM, used, K)
            tl.store(ACTIVE + i, active.to(tl.uint8))
            joins = slot * 0 + 1
    return joins


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

    OWN becomes the W of the active structures alone, before others of their face join them. What
    changes in a loop must keep its type, so a number is set by ``x * 0 + …``.
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
    left = tl.where(phase == DONE, 0, steps)
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
            g = G + b * L * R
            _gradient(THETA, CODES, ROOM, g, used, epsilon, turn, L, R, sl, sr, LB, RB)
            tl.debug_barrier()
            # -- what is best there
            z = CODES + slot * L
            if TREE:
                word = tl.arange(0, RB)
                trail = BACK + b * 2 * RB * RB
                value, head = find_tree(g, sr, sl, length.to(tl.int32), trail, SINGLE, RB, LOG)
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
                good = _begin(P, ACTIVE, A, W, LEVELS, value, size, score, K)
                phase = tl.where(good > 0, SOLVE, DONE)
                left = tl.where(good > 0, left, 0)
                if good == 0:
                    for t in range(0, L):
                        tl.store(z + t, tl.full((), -1, tl.int16))
            else:
                total = score - shift
                here = tl.sum(p * c, 0) - (tl.sum(p * times(A, p, ROOM, used, K), 0) - 1.0)
                gap = total - tl.sum(p * agree, 0) - here
                if phase == SOLVE:
                    calls += 1
                    done, p, active = _improve(
                        P, C, ACTIVE, A, W, ROOM, LEVELS, p, c, active, agree, size, total, shift,
                        gap, slot, used, calls >= max_iter, tol, K,
                    )  # fmt: skip
                    if done > 0:
                        phase = phase * 0 + DONE
                        if COMPLETE:
                            phase = phase * 0 + WIDEN
                            top = _magnitude(
                                THETA, g, CODES, active, L, R, sl, sr, TREE, SHARED, K, LK
                            )
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
                    slack = (tl.abs(epsilon) - STEP) * 0.1 + SLACK
                    joins = _widen(
                        ACTIVE, C, A, W, ROOM, active, agree, size, total, gap, slack, slot, used, K
                    )
                    misses = tl.where(joins > 0, 0, misses + 1)
                    turn = tl.where(misses % 2 == 0, turn + 1, turn)
                    if misses == ENOUGH:
                        phase = phase * 0 + DONE
                        left = left * 0
    tl.store(COUNTS, phase)
    tl.store(COUNTS + 1, calls)
    tl.store(COUNTS + 2, misses)
    tl.store(COUNTS + 3, turn)


# ---------------------------------------------------------------------------------- torch functions


def solve(
    structure: PartStructure,
    penalize: str,
    max_iter: int,
    tol: float,
    init: SparseMAPResult | None,
    complete: bool,
) -> Solution | None:
    """The active-set solution; with ``complete``, with the rest of its faces. None for structures
    that have no such kernel, and where a face has more structures than it has slots for."""
    kind = _kind(structure, penalize)
    if kind is None or (init is not None and init.probs.shape[-1] + 2 > MOST_SLOTS):
        return None
    batch = structure.batch_shape.numel()
    flat = [p.detach().reshape(batch, -1).double() for p in structure._exact_parts()]
    state = _State(torch.cat(flat, 1), kind, init, complete)
    if init is not None:
        state.walk(max_iter, tol, steps=1)
        state.seed()
    while state.walk(max_iter, tol):
        if not state.go_on():
            return state.solution()
    return None


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

    def codes(self, structures: Tensor) -> Tensor:
        """Of indicators ``(b, K, *event)``, ``(b, K, L)``."""
        most, code = (structures.mT if self.tree else structures).max(-1)
        return torch.where(most > 0, code, -1).to(torch.int16)

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
    name = f"{structure._name}.sparsemap"
    if isinstance(structure, LinearChain):
        (L, R), steps = structure.event_shape, structure._parts()[1].shape[-3]
        if penalize == "all" or R > MAX_TAGS_ON_GPU:
            return None
        lengths = require(name, "lengths", structure._lengths(), 1, L)
        return _Kind(False, False, lengths.reshape(-1), L, R, steps)
    if isinstance(structure, NonprojectiveTree):
        L = R = structure.event_shape[0]
        if structure.labelled or L > MAX_SIDE_ON_GPU:
            return None
        words = require(name, "lengths", structure._words(), 0, L - 1)
        return _Kind(True, structure._single, words.reshape(-1), L, R, 0)
    return None


class _State:
    """Faces of all items, in the order of the batch."""

    def __init__(
        self, theta: Tensor, kind: _Kind, init: SparseMAPResult | None, complete: bool
    ) -> None:
        self.theta, self.kind, self.complete = theta, kind, complete
        self.given = 0 if init is None else init.probs.shape[-1]
        b, device = len(theta), theta.device
        K = max(FIRST_SLOTS, triton.next_power_of_2(self.given + 2))
        self.codes = torch.zeros(b, K, kind.L, dtype=torch.int16, device=device)
        self.p, self.scores, self.room = (theta.new_zeros(b, K) for _ in range(3))
        if init is not None:
            given = init.structures.detach().reshape(b, self.given, kind.L, kind.R)
            self.codes[:, 1 : self.given + 1] = kind.codes(given.to(device))
            self.scores[:, 1 : self.given + 1] = init.probs.detach().reshape(b, -1).to(theta)
        self.active = torch.zeros(b, K, dtype=torch.uint8, device=device)
        self.gram, self.inverse = (theta.new_zeros(b, K, K) for _ in range(2))
        self.own = torch.zeros_like(self.gram) if complete else self.inverse
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

    def seed(self) -> None:
        """After the first step: what is given to start from joins the best structure."""
        kind, options = self.kind, _options(self.kind, self.slots, self.side)
        with torch.cuda.device_of(self.theta):
            _seed[(len(self.theta),)](
                self.theta, self.codes, self.p, self.scores, self.active, self.gram, self.inverse,
                self.room, self.levels, self.counts, kind.L, kind.R, *kind.strides,
                self.theta.shape[1], self.given, TREE=kind.tree, SHARED=kind.steps == 1,
                K=self.slots, LK=options["LK"], num_warps=options["num_warps"],
            )  # fmt: skip

    def walk(self, max_iter: int, tol: float, steps: int = STEPS) -> bool:
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
                steps, tol, max_iter, TREE=kind.tree, SINGLE=kind.single,
                SHARED=kind.steps == 1, COMPLETE=self.complete, K=K, RB=RB, EVEN=RB == kind.R,
                **options,
            )  # fmt: skip
        self.inverse = _refreshed(self.gram, self.inverse)
        return True

    def _grow(self) -> None:
        """Twice as many slots."""
        K, pad = self.slots, torch.nn.functional.pad
        for name in ("p", "scores", "room", "active"):
            setattr(self, name, pad(getattr(self, name), (0, K)))
        self.codes = pad(self.codes, (0, 0, 0, K))
        self.gram, self.inverse, own = (
            pad(t, (0, K, 0, K)) for t in (self.gram, self.inverse, self.own)
        )
        self.own = own if self.complete else self.inverse

    def solution(self) -> Solution:
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
        inverse = _refreshed(self.gram, self.own) if self.complete else self.inverse
        inverse = _block(inverse, order, used)
        found = Solution(vertices, edges, probs, gap, calls, inverse, whole=self.complete)
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
        "num_warps": warps(RB) if kind.tree else min(16, max(2, RB * RB // 512)),
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
