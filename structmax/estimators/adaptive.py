"""How far a finite difference looks: λ, fixed or adapted to what it finds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from structmax.estimators.base import at_least
from structmax.estimators.running import Running
from structmax.structures.base import Structure

STEP = 1e-3


class Lam(Running):
    """λ for each item and sample: a number, or ``"adaptive"``, λ = α ‖θ‖/‖∂L/∂z‖.

    There α follows the number of non-zero differences of an item, so that there is one on average
    (Minervini, Franceschi & Niepert 2023, "Adaptive perturbation-based gradient estimation"). α and
    the running mean of that number are buffers, so that training is resumed where it was.

    Args:
        owner: whose option ``lam`` it is

    >>> import structmax as sx
    >>> estimator = sx.estimators.IMLE(lam="adaptive")
    >>> estimator.look(sx.Choice(torch.tensor([3.0, 4.0])), torch.tensor([0.0, 2.0]))
    tensor(2.5000)
    >>> estimator.look.update(torch.tensor([4.0, 2.0]))  # too many: look less far
    >>> estimator.state_dict()["look.alpha"]
    tensor(0.9990, dtype=torch.float64)
    """

    alpha: Tensor
    nonzeros: Tensor

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self.lam = owner.lam
        if self.lam != "adaptive":
            at_least(owner, "lam", 0.0, strict=True)
            return
        for name in ("alpha", "nonzeros"):
            self.register_buffer(name, torch.ones((), dtype=torch.float64))

    def forward(self, structure: Structure, g: Tensor) -> Tensor:
        """λ ``(*sample, *batch)`` for g = ∂L/∂z; adaptive, it may be anything where that is 0."""
        parts = g.dim() - len(structure.event_shape)
        if self.lam != "adaptive":
            return g.new_full(g.shape[:parts], self.lam)
        scores = structure.primary.detach()
        there = scores > torch.finfo(structure.dtype).min / 2  # not masked by −inf or by the lowest
        slope = torch.where(there, g, 0.0).flatten(parts).norm(dim=-1)
        theta = torch.where(there, scores, 0.0).flatten(len(structure.batch_shape)).norm(dim=-1)
        lam = self.alpha.to(slope) * theta / slope
        return torch.where((slope > 0) & (theta > 0), lam, 1.0)

    @torch.no_grad()
    def update(self, nonzeros: Tensor) -> None:
        """One step of α towards one non-zero difference for each item, on a running mean."""
        if self.training and self.lam == "adaptive" and nonzeros.numel():
            self.nonzeros = 0.9 * self.nonzeros + 0.1 * nonzeros.double().mean().to(self.nonzeros)
            towards = torch.where(self.nonzeros > 1, -STEP, STEP)
            self.alpha = (self.alpha + towards).clamp(min=STEP)
