"""The scores of every structure at noise: probabilities of the best, and their derivatives."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from structmax.estimators import noise
from structmax.structures.base import Structure

CHUNKS, DRAWS, CELLS = 20, 10_000, 20_000_000
SHIFT = 0.5  # the most that a difference moves a score, in widths of the noise


def generator_for(z: Tensor) -> torch.Generator:
    """Always the same draws."""
    return torch.Generator(z.device).manual_seed(20_190_727)


class NoisyTable:
    """p(z) = P(z is best at S + ⟨ε, ·⟩), with S the scores of all structures, at draws of ε.

    Args:
        structure: what the noise is made for
        z: every structure, ``(N, *batch, *parts)``
        scores: S, ``(N, *batch)``, −inf where there is none
        kind, width: of the noise

    >>> import structmax as sx
    >>> choice = sx.Choice(torch.tensor([0.0, 1.0]))
    >>> z = choice.enumerate_support()
    >>> table = NoisyTable(choice, z, choice.score(z), "gumbel", 1.0)
    >>> bool((table.probabilities() - choice.scores.softmax(-1)).abs().max() < 0.004)
    True
    """

    def __init__(
        self, structure: Structure, z: Tensor, scores: Tensor, kind: str, width: float
    ) -> None:
        self.structure, self.kind, self.width = structure, kind, width
        self.shape = scores.shape
        self.scores = scores.detach().reshape(len(z), -1).mT  # (B, N)
        self.z = z.reshape(*self.scores.mT.shape, -1).movedim(1, 0)  # (B, N, parts)
        self.count = max(1, min(DRAWS, CELLS // max(self.scores.numel(), 1)))

    def draws(self) -> Iterator[Tensor]:
        """Chunks of scores at noise, ``(B, count, N)``; the same ones each time."""
        generator = generator_for(self.z)
        for _ in range(CHUNKS):
            epsilon = noise.unit(self.kind, self.structure, self.count, generator)
            epsilon = epsilon.reshape(self.count, len(self.scores), -1).movedim(1, 0)
            yield self.scores[:, None] + self.width * (epsilon @ self.z.mT)

    def probabilities(self) -> Tensor:
        """p ``(N, *batch)``."""
        found = torch.stack([self._frequencies(noisy) for noisy in self.draws()])
        return found.mean(0).mT.reshape(self.shape)

    def slopes(self, costs: Tensor) -> Iterator[Tensor]:
        """d/dh of p at the scores S + h L with costs L ``(N, *batch)``, for each chunk of draws.

        Central differences at the same noise, extrapolated from two widths (Richardson): what is
        left of their own error is of the fourth order.
        """
        costs = costs.detach().reshape(self.shape[0], -1).mT
        known = self.scores > -torch.inf
        most = torch.where(known, costs, -torch.inf).amax(-1, keepdim=True)
        spread = most - torch.where(known, costs, torch.inf).amin(-1, keepdim=True)
        h = SHIFT * self.width / torch.where(spread > 0, spread, 1.0)  # (B, 1)
        for noisy in self.draws():
            slope = torch.zeros_like(self.scores)
            for part, weight in ((1.0, -1 / 3), (0.5, 4 / 3)):
                move = (part * h * costs)[:, None]
                change = self._frequencies(noisy + move) - self._frequencies(noisy - move)
                slope += weight * change / (2 * part * h)
            yield slope.mT.reshape(self.shape)

    def _frequencies(self, noisy: Tensor) -> Tensor:
        """How often each is the best, ``(B, N)``."""
        best = noisy.argmax(-1)
        ones = torch.ones_like(best, dtype=self.scores.dtype)
        return torch.zeros_like(self.scores).scatter_add_(1, best, ones) / self.count
