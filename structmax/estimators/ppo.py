"""Proximal policy optimization: several updates from the same draws."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from structmax.estimators.base import at_least
from structmax.estimators.baselines import Draws, regularized
from structmax.estimators.reinforce import Reinforce
from structmax.structures.base import Structure


class PPO(Reinforce):
    """∇E[max(r A, clip(r, 1 − ε, 1 + ε) A)] with r = p_new(z)/p_old(z), A = L(z) − b, at old draws.

    Schulman et al. 2017, "Proximal policy optimization algorithms", equation 7; Havrylov et al.
    2019, for latent trees. ``loss`` draws, evaluates the cost and keeps both: that first update is
    :class:`Reinforce`, unbiased. ``replay`` gives the loss of each further one, biased by clipping
    and by costs that have aged: it trains the scores only. Needs samples, once for all updates.

    Args:
        clip: ε
        updates: how many updates the same draws serve, the first included
        samples, baseline, normalize, entropy_weight, generator: as for :class:`Reinforce`

    >>> import torch, structmax as sx
    >>> _ = torch.manual_seed(0)
    >>> scores = torch.zeros(3, requires_grad=True)
    >>> optimizer = torch.optim.SGD([scores], lr=0.5)
    >>> estimator = PPO(updates=3, samples=8, baseline="leave-one-out")
    >>> loss = estimator.loss(sx.Choice(scores), lambda z: z @ torch.tensor([0.0, 1.0, 5.0]))
    >>> for update in range(estimator.updates):
    ...     loss = loss if update == 0 else estimator.replay(sx.Choice(scores))
    ...     optimizer.zero_grad()
    ...     loss.backward()
    ...     optimizer.step()
    >>> scores.argmax()
    tensor(0)
    """

    def __init__(
        self,
        clip: float = 0.2,
        updates: int = 4,
        samples: int = 1,
        baseline: str | nn.Module | None = None,
        normalize: bool = False,
        entropy_weight: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(samples, baseline, normalize, entropy_weight, generator)
        self.clip, self.updates = clip, updates
        at_least(self, "clip", 0.0, strict=True)
        at_least(self, "updates", 1)
        self._draws: Draws | None = None
        self._left = 0

    def _total(self, structure: Structure, draws: Draws) -> Tensor:
        self._draws, self._left = draws.kept(), self.updates - 1
        return super()._total(structure, draws)

    def replay(self, new_structure: Structure) -> Tensor:
        """The loss ``(*batch)`` of a further update, at the stored draws and the new scores."""
        old = self._draws and self._draws.again()
        if old is None or self._left == 0:
            raise RuntimeError(
                f"PPO.replay: there are no draws {'yet' if old is None else 'left'}. Call loss() "
                f"first, not in vmap; its draws serve {self.updates} updates, that of loss() too."
            )
        if new_structure.batch_shape != old.costs.shape[1:]:
            raise ValueError(
                f"PPO.replay: the draws are of a batch {tuple(old.costs.shape[1:])}, got "
                f"{tuple(new_structure.batch_shape)}."
            )
        self._left -= 1
        ratio = (new_structure.log_prob(old.z) - old.log_prob).clamp(max=30.0).exp()  # never ∞
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        worst = torch.maximum(ratio * old.advantage, clipped * old.advantage) - old.advantage
        return regularized((old.costs + worst).mean(0), new_structure, self.entropy_weight)
