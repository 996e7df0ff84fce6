"""The active-set method, for a batch of items at once.

An item keeps a *face*: affinely independent structures S with weights p. On it, the maximum of
cᵀp − ½‖Mp‖² under 1ᵀp = 1 is a linear system (Niculae, Martins, Blondel & Cardie, 2018, "SparseMAP:
differentiable sparse structured inference", appendix; for pure projections Wolfe, 1976, "Finding
the nearest point in a polytope"). p walks towards it:

- until a weight reaches 0: that structure leaves;
- or arrives: the oracle is asked for the best structure at the gradient θ − Mp. If it is no better
  than those of S, p is optimal; else it joins S. If Mz lies in the affine hull of S (then z differs
  in unpenalised parts), p first follows the null direction of M that exchanges z for others until a
  weight reaches 0, which gains cᵀp and costs nothing.

The objective grows each time the oracle is asked, so no face comes twice and the method ends. With
A = MᵀM + 11ᵀ, positive definite exactly on affinely independent sets, W = A⁻¹ is kept by rank-one
updates: a step takes O(K² + KD) for K active structures and D parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from structmax.primitive import backend_for
from structmax.sparse.result import Solution
from structmax.sparse.support import Oracle, Support, dot

TINY = 1e-12  # a weight below this is 0
DEPENDENT = 1e-9  # a squared distance to the affine hull, relative to the size, that is 0
REFRESH = 25  # rounds after which W is made exact again


def solve(
    oracle: Oracle,
    theta: Tensor,
    primary: int,
    width: int,
    max_iter: int,
    tol: float,
    start: tuple[Tensor, Tensor] | None = None,
) -> Solution:
    """SparseMAP of scores ``(B, D)``, of which ``primary`` come first and ``width`` are penalised.

    ``start`` is a distribution to start from: counts ``(B, K, D)`` and weights ``(B, K)``.
    """
    kind = Face
    if backend_for(theta) == "gpu":
        from structmax.sparse import active_set_gpu

        kind = active_set_gpu.Face
    face = kind(oracle, theta, width, tol, max_iter)
    if start is not None:
        face.start(*start)
    while face.tidy():
        face.rounds += 1
        if face.rounds % REFRESH == 0:
            face.refresh()
        face.step()
    return face.solution(primary)


class Face(Support):
    """The support with A and W, ``(b, K, K)``; W is 0 outside the active slots."""

    per_item = (*Support.per_item, "gram", "inverse", "newest")
    rounds = 0

    def __init__(self, oracle: Oracle, theta: Tensor, width: int, tol: float, max_iter: int):
        shape = len(theta), self.first_slots, self.first_slots
        self.gram, self.inverse = (theta.new_zeros(shape) for _ in range(2))
        self.newest = torch.full_like(theta[:, 0], -1, dtype=torch.int64)
        super().__init__(oracle, theta, width, tol, max_iter)
        own = self.counts[:, 0, :width]
        self.gram[:, 0, 0] = 1 + (own * own).sum(-1)
        self.inverse[:, 0, 0] = 1 / self.gram[:, 0, 0]

    def grow(self) -> None:
        super().grow()
        pad = (0, self.gram.shape[-1]) * 2
        self.gram, self.inverse = (
            torch.nn.functional.pad(t, pad) for t in (self.gram, self.inverse)
        )

    def step(self) -> None:
        """Walks to the best point of the face, and lets the best structure there join."""
        self.settle()
        z, score, _ = self.ask()
        self.done |= self.same(z).any(-1)
        self.add(z, score, ~self.done)

    def solve(self, right: Tensor) -> Tensor:
        """A⁻¹ on the active slots, with one step of refinement since W has drifted."""
        x = times(self.inverse, right)
        return x + times(self.inverse, right - times(self.gram, x))

    def settle(self) -> None:
        """Walks to the best point of the face; structures whose weight reaches 0 leave it."""
        while True:
            ones = self.active.to(self.p)
            at_scores, at_ones = self.solve(self.scores * ones), self.solve(ones)
            rest = (1 - at_scores.sum(-1, keepdim=True)) / at_ones.sum(-1, keepdim=True)
            best = at_scores + rest * at_ones
            low = self.active & (best <= TINY)
            walking = low.any(-1)
            if not bool(walking.any()):
                self.p = best
                return
            down = (self.p - best).clamp(min=1e-300)
            reach, slot = torch.where(low, self.p / down, torch.inf).min(-1)
            stepped = self.p + reach.clamp(max=1)[:, None] * (best - self.p)
            self.p = torch.where(walking[:, None], stepped, best)
            self.remove(slot, walking)
            # what has just come and goes at once was no improvement beyond rounding
            self.done = self.done | (walking & (slot == self.newest) & (reach == 0))

    def remove(self, slot: Tensor, which: Tensor) -> None:
        """Takes a slot ``(b)`` out of the face for some of the items ``(b)``."""
        column = self.inverse.gather(2, slot[:, None, None].expand(-1, self.slots, 1))
        pivot = column.gather(1, slot[:, None, None])
        column = torch.where(which[:, None, None], column, 0.0)
        update = column @ column.mT / torch.where(which[:, None, None], pivot, 1.0)
        gone = (torch.arange(self.slots, device=slot.device) == slot[:, None]) & which[:, None]
        self.active = self.active & ~gone
        self.p = torch.where(gone, 0.0, self.p).clamp(min=0)
        inside = self.active[:, :, None] & self.active[:, None, :]
        self.inverse = torch.where(inside, self.inverse - update, 0.0)

    def add(self, z: Tensor, score: Tensor, which: Tensor) -> None:
        """Lets better structures ``(b, D)`` join the face, for some of the items ``(b)``."""
        slot, across, size = self._write(z, score)
        u, distance = self._span(across, size)
        dependent = which & (distance <= DEPENDENT * size)
        weight = torch.zeros_like(size)
        if bool(dependent.any()):
            down = torch.where(self.active & (u > TINY), self.p / u, torch.inf)
            reach, leaves = down.min(-1)
            weight = torch.where(dependent, reach, weight)
            self.p = self.p - weight[:, None] * u
            self.remove(leaves, dependent)
            u, distance = self._span(across, size)
        self._join(slot, u, distance, which, weight)
        self.newest = torch.where(which & ~dependent, slot, -1)

    def start(self, counts: Tensor, weights: Tensor) -> None:
        """Takes over what is allowed and affinely independent of a distribution (see ``solve``)."""
        counts, weights = counts[self.items], weights[self.items]
        scores = dot(self.theta[:, None], counts) - self.shift[:, None]
        allowed = scores > -torch.inf
        weights, scores = (torch.where(allowed, t, 0.0) for t in (weights, scores))
        self.p[:, 0] = torch.where(self.same(counts[:, 0])[:, 0], weights[:, 0], 0.0)
        for z, score, weight in zip(*(t.unbind(1) for t in (counts, scores, weights)), strict=True):
            if bool(self.active.all(-1).any()):
                self.grow()
            slot, across, size = self._write(z, score)
            u, distance = self._span(across, size)
            self._join(slot, u, distance, (weight > 0) & (distance > DEPENDENT * size), weight)
        total = self.p.sum(-1, keepdim=True)
        alone = torch.arange(self.slots, device=total.device) == 0
        self.p = torch.where(total > 0, self.p / total.clamp(min=TINY), alone.to(self.p))

    def _write(self, z: Tensor, score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Writes structures into free slots: these slots, their row of A, and its diagonal."""
        slot, own = self.free_slot(), z[:, : self.width]
        self.write(slot, z, score)
        across = 1 + torch.einsum("bkd,bd->bk", self.counts[..., : self.width], own)
        at = slot[:, None, None].expand(-1, 1, self.slots)
        self.gram.scatter_(1, at, across[:, None]).scatter_(2, at.mT, across[..., None])
        return slot, across, across.gather(1, slot[:, None]).squeeze(1)

    def _join(
        self, slot: Tensor, u: Tensor, distance: Tensor, which: Tensor, weight: Tensor
    ) -> None:
        """Makes what was written active, with these weights, for some of the items."""
        new = torch.arange(self.slots, device=slot.device) == slot[:, None]
        gain = torch.where(which[:, None], torch.where(new, -1.0, u), 0.0)
        distance = torch.where(which, distance, 1.0)
        self.inverse = self.inverse + gain[:, :, None] * gain[:, None, :] / distance[:, None, None]
        self.active = self.active | (new & which[:, None])
        self.p = torch.where(new & which[:, None], weight[:, None], self.p)

    def _span(self, across: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        """The combination u of the face that is nearest to a structure, and the squared distance;
        at distance 0, u sums to one."""
        across = torch.where(self.active, across, 0.0)
        u = self.solve(across)
        return u, size - (across * u).sum(-1)

    def _inverse(self, items: Tensor, order: Tensor, used: Tensor) -> Tensor:
        block = self.inverse[items[:, None, None], order[:, :, None], order[:, None]]
        return torch.where(used[:, :, None] & used[:, None], block, 0.0)

    def refresh(self) -> None:
        """W without what the updates have rounded: a step of Newton's method for A⁻¹, W(2I − AW),
        which stays within the active slots and squares the error."""
        self.inverse = 2 * self.inverse - self.inverse @ (self.gram @ self.inverse)


def times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector[..., None]).squeeze(-1)
