"""REINFORCE: the gradient of an expected cost from draws alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from structmax.estimators.base import Estimator, call_cost
from structmax.estimators.baselines import Baseline, RunningMoments
from structmax.structures.base import Structure


class Draws(NamedTuple):
    """Structures ``(samples, *batch, *parts)``; the rest is ``(samples, *batch)``."""

    z: Tensor
    log_prob: Tensor
    costs: Tensor
    advantage: Tensor


class Reinforce(Estimator, nn.Module):
    """∇E[L(z)] = E[(L(z) − b) ∇log p(z) + ∇L(z)] at draws of z (Williams, 1992).

    Unbiased, since no baseline b depends on the draw; needs samples. The loss is the mean cost; its
    gradient in what the cost itself holds is the ordinary one.

    Args:
        samples: how many structures are drawn for each item; ``cost`` is given all at once
        baseline: None (b = 0); ``"ema"``: the running mean of the costs of earlier calls;
            ``"self-critic"``: the cost of the argmax, in an incremental structure that of the
            greedy derivation (Rennie et al., 2017); ``"leave-one-out"``: the mean cost of the
            item's other draws (Kool et al., 2019); or a module from ``inputs`` to ``(*batch)``,
            which the loss then trains by the squared error, up to the inputs
        normalize: divide L − b by its running standard deviation in earlier calls where that is
            above 1 (Havrylov et al., 2019): biased in scale, not in direction
        entropy_weight: adds −weight · H(p) to the loss; where the structure has no ``entropy``, H
            is estimated at the draws
        generator: of the draws

    Running moments are buffers: ``state_dict`` has them and ``eval()`` freezes them.

    >>> import torch, structmax as sx
    >>> _ = torch.manual_seed(0)
    >>> scores = torch.zeros(3, requires_grad=True)
    >>> estimator = Reinforce(samples=1000, baseline="leave-one-out")
    >>> loss = estimator.loss(sx.Choice(scores), lambda z: z @ torch.tensor([0.0, 1.0, 5.0]))
    >>> loss.backward()
    >>> loss.detach(), scores.grad  # about 2, and −2/3, −1/3, 1
    (tensor(1.9650), tensor([-0.6589, -0.3284,  0.9874]))
    """

    objective = "E[L(z)]"
    needs = frozenset(["sample", "log_prob"])

    def __init__(
        self,
        samples: int = 1,
        baseline: str | nn.Module | None = None,
        normalize: bool = False,
        entropy_weight: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.baseline = Baseline(type(self).__name__, baseline, samples)
        self.samples, self.normalize, self.entropy_weight = samples, normalize, entropy_weight
        self.advantages, self.generator = RunningMoments(), generator

    def extra_repr(self) -> str:
        entropy = f", entropy_weight={self.entropy_weight}" if self.entropy_weight else ""
        return f"samples={self.samples}, normalize={self.normalize}{entropy}"

    def applies_to(self, structure: Structure) -> bool:
        return super().applies_to(structure) and self.baseline.applies_to(structure)

    def loss(self, structure: Structure, cost: Callable[..., Tensor], inputs: Any = None) -> Tensor:
        """The mean cost of the draws ``(*batch)``; ``inputs`` are for a module as the baseline."""
        z = structure.sample((self.samples,), self.generator)
        log_prob = structure.log_prob(z)  # at once: what draws step by step has it at hand
        others = self.baseline.structures(structure)
        costs = call_cost(cost, torch.cat([z, *others]), structure)
        costs, rest = costs[: self.samples], costs[self.samples :].detach()
        if self.entropy_weight and not structure.supports("entropy"):
            costs = costs + self.entropy_weight * log_prob.detach()  # −H = E log p
        b = self.baseline(costs.detach(), rest, inputs)
        draws = Draws(z, log_prob, costs, self._advantage(costs.detach() - b.detach()))
        error = (costs.detach() - b).square() / 2
        return self._total(structure, draws) + (error - error.detach()).mean(0)

    def _advantage(self, difference: Tensor) -> Tensor:
        if not self.normalize:
            return difference
        deviation = self.advantages.variance().sqrt().clamp(min=1.0).to(difference)
        if self.training:  # what these draws teach serves the next
            self.advantages.update(difference)
        return difference / deviation

    def _total(self, structure: Structure, draws: Draws) -> Tensor:
        change = draws.advantage * (draws.log_prob - draws.log_prob.detach())  # 0, with a gradient
        return self._regularized(structure, (draws.costs + change).mean(0))

    def _regularized(self, structure: Structure, loss: Tensor) -> Tensor:
        if not self.entropy_weight or not structure.supports("entropy"):
            return loss
        return loss - self.entropy_weight * structure.entropy()
