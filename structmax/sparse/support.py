"""The active structures of a batch of items, held in slots."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from structmax.sparse.result import Solution


class Oracle(Protocol):
    """What a solver asks: the best structure at given scores.

    ``few``: on a GPU, so many items take it no longer than one. ``left``: how often it may still be
    called, which whoever calls it sees to.
    """

    few: int

    @property
    def left(self) -> float: ...

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Scores ``(b, D)`` of all parts to the best value ``(b)``, −inf if there is none, and to
        the counts ``(b, D)`` of a best structure."""

    def keep(self, index: Tensor) -> Oracle:
        """The same for some of its items."""


class Support:
    """Slots with the active structures of b items: counts, scores and weights.

    What an inactive slot holds does not matter, but its weight is 0. Every item keeps a free slot,
    so that a new structure can be written for all items and made active for some of them. Scores
    are relative to that of the first structure found, ``shift``: what all share would cost digits.

    Of the D parts the first ``width`` are penalised: the objective is cᵀp − ½‖Mp‖², c the scores of
    the structures and M their counts of these parts.
    """

    per_item: tuple[str, ...] = (
        "items",
        "theta",
        "shift",
        "counts",
        "scores",
        "p",
        "active",
        "gap",
        "calls",
        "done",
    )
    first_slots = 8

    def __init__(self, oracle: Oracle, theta: Tensor, width: int, tol: float, max_iter: int):
        self.oracle, self.theta, self.width = oracle, theta, width
        self.tol, self.max_iter = tol, max_iter
        b, parts = theta.shape
        self.items = torch.arange(b, device=theta.device)
        value, first = oracle(theta)
        shape = b, self.first_slots
        self.counts = theta.new_zeros(*shape, parts)
        self.scores, self.p = theta.new_zeros(shape), theta.new_zeros(shape)
        self.active = torch.zeros(shape, dtype=torch.bool, device=theta.device)
        self.counts[:, 0], self.shift = first, dot(theta, first)
        self.active[:, 0], self.p[:, 0] = True, 1.0
        self.gap = torch.full_like(value, torch.inf, dtype=theta.dtype)
        self.calls = torch.ones_like(self.items)
        self.done = ~(value.abs() < torch.inf)  # nothing is allowed there, or a score is NaN
        self.gap[self.done] = torch.nan
        self.p[self.done] = torch.nan
        self.counts[self.done] = 0.0
        self.finished: list[tuple[Tensor, ...]] = []
        if bool(self.done.any()):
            self.drop_finished()

    @property
    def slots(self) -> int:
        return self.p.shape[1]

    def mean(self) -> Tensor:
        """Expected counts of the penalised parts, ``(b, width)``."""
        return torch.einsum("bk,bkd->bd", self.p, self.counts[..., : self.width])

    def free_slot(self) -> Tensor:
        return self.active.to(torch.uint8).argmin(-1)

    def write(self, slot: Tensor, z: Tensor, score: Tensor) -> None:
        """Puts counts ``(b, D)`` and scores ``(b)`` of structures into slots, not yet active."""
        at = slot[:, None]
        self.counts.scatter_(1, at[..., None].expand(-1, 1, z.shape[-1]), z[:, None])
        self.scores.scatter_(1, at, score[:, None])

    def same(self, z: Tensor) -> Tensor:
        """Which active structures are z, ``(b, K)``."""
        return self.active & (self.counts == z[:, None]).all(-1)

    def ask(self) -> tuple[Tensor, Tensor, Tensor]:
        """The best structure at the gradient θ − Mp, its score, and Mp; notes gap and who is done.

        The gap ⟨θ − Mp, z − μ⟩ bounds how far the objective is below its maximum.
        """
        mu = self.mean()
        gradient = self.theta.clone()
        gradient[:, : self.width] -= mu
        _, z = self.oracle(gradient)
        score = dot(self.theta, z) - self.shift
        own = z[:, : self.width]
        here = (self.p * self.scores).sum(-1) - (mu * mu).sum(-1)
        gap = score - (mu * own).sum(-1) - here
        self.gap = torch.where(self.done, self.gap, gap.clamp(min=0))
        self.calls += ~self.done
        self.done = self.done | (gap <= self._tolerance(score, own)) | (self.calls >= self.max_iter)
        return z, score, mu

    def _tolerance(self, score: Tensor, own: Tensor) -> Tensor:
        """tol times how much structures differ, and what rounding does to their scores."""
        size = (own * own).sum(-1).clamp(min=1)
        spread = torch.where(self.active, score[:, None] - self.scores, 0.0).abs().amax(-1)
        known = torch.where(self.active, self.scores + self.shift[:, None], 0.0)
        magnitude = torch.maximum((score + self.shift).abs(), known.abs().amax(-1))
        return self.tol * (size + spread) + 16 * torch.finfo(score.dtype).eps * magnitude

    def take_over(self, counts: Tensor, weights: Tensor) -> None:
        """Starts from what is allowed of a distribution ``(B, K, D)``, ``(B, K)``."""
        counts, weights = counts[self.items], weights[self.items]
        scores = dot(self.theta[:, None], counts) - self.shift[:, None]
        allowed = scores > -torch.inf
        weights, scores = (torch.where(allowed, t, 0.0) for t in (weights, scores))
        good = weights.sum(-1, keepdim=True) > 0
        while self.slots <= counts.shape[1]:
            self.grow()
        pad = (0, self.slots - counts.shape[1])
        weights = torch.nn.functional.pad(weights / weights.sum(-1, keepdim=True), pad)
        self.p = torch.where(good, weights, self.p)
        self.active = self.p > 0
        self.scores = torch.where(good, torch.nn.functional.pad(scores, pad), self.scores)
        counts = torch.nn.functional.pad(counts, (0, 0, *pad))
        self.counts = torch.where(good[..., None], counts, self.counts)

    # -- size -------------------------------------------------------------------------------------

    def grow(self) -> None:
        """Twice as many slots."""
        for name in ("scores", "p", "active"):
            old = getattr(self, name)
            setattr(self, name, torch.cat([old, torch.zeros_like(old)], 1))
        self.counts = torch.cat([self.counts, torch.zeros_like(self.counts)], 1)

    def tidy(self) -> bool:
        """Makes room and lets go of items that are done; whether any is left."""
        b = len(self.items)
        full, left = torch.stack([self.active.all(-1).any().long(), (~self.done).sum()]).tolist()
        if left == 0 or 2 * left <= b:
            self.drop_finished()
        if full and left:
            self.grow()
        return left > 0

    def drop_finished(self) -> None:
        """Puts items that are done aside: from now on they cost nothing."""
        gone, left = (which.nonzero().squeeze(-1) for which in (self.done, ~self.done))
        p, gap = self.p[gone], self.gap[gone]
        used = self.active[gone] & (p > 0)
        most = max(int(used.sum(-1).amax()), 1) if len(gone) else 1
        order = torch.where(used, p, -1.0).argsort(dim=-1, descending=True, stable=True)[:, :most]
        used, p = used.gather(-1, order), p.gather(-1, order)
        counts = self.counts[gone[:, None], torch.where(used, order, order[:, :1])]
        p = torch.where(gap.isnan()[:, None], torch.nan, torch.where(used, p, 0.0))
        inverse = self._inverse(gone, order, used)
        self.finished.append((self.items[gone], counts, p, inverse, gap, self.calls[gone]))
        for name in self.per_item:
            setattr(self, name, getattr(self, name)[left])
        if len(left):
            self.oracle = self.oracle.keep(left)

    def _inverse(self, items: Tensor, order: Tensor, used: Tensor) -> Tensor:
        """What ``Solution.inverse`` holds of items that are done; nothing here."""
        return used.new_empty(len(used), 0, 0)

    def solution(self, primary: int) -> Solution:
        """The answers of all items, once they are done."""
        order = torch.cat([found[0] for found in self.finished]).argsort()
        slots = max(found[2].shape[1] for found in self.finished)
        pad, padded = torch.nn.functional.pad, []
        for _, counts, p, inverse, *rest in self.finished:
            more = slots - p.shape[1]
            counts = torch.cat([counts, counts[:, :1].expand(-1, more, -1)], 1)
            inverse = pad(inverse, (0, more) * 2) if inverse.numel() else inverse
            padded.append((counts, pad(p, (0, more)), inverse, *rest))
        whole = [torch.cat(column)[order] for column in zip(*padded, strict=True)]
        counts, p, inverse, gap, calls = whole
        known = inverse if inverse.numel() else None
        return Solution(counts[..., :primary], counts[..., primary:], p, gap, calls, known)


def dot(theta: Tensor, counts: Tensor) -> Tensor:
    """⟨θ, z⟩ over the last dimension; what z does not have may be −inf or NaN."""
    return torch.where(counts != 0, theta * counts, 0.0).sum(-1)
