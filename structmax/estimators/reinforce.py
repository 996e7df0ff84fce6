"""REINFORCE: the gradient of an expected cost from draws alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from structmax.checks import number
from structmax.estimators.base import Estimator, call_cost
from structmax.estimators.baselines import Baseline, Draws, Scale, regularized
from structmax.structures.base import Structure


class Reinforce(Estimator, nn.Module):
    """∇E[L(z)] = E[(L(z) − b) ∇log p(z) + ∇L(z)] at draws of z (Williams, 1992).

    Unbiased, since no baseline b depends on the draw; needs samples. The loss is the mean cost,
    ordinary in what the cost itself holds. Running moments are buffers; ``eval()`` freezes them.

    Args:
        samples: structures drawn for each item, by ``generator``; ``cost`` is given all at once
        baseline: None (b = 0); ``"ema"``: the running mean of the costs of earlier calls;
            ``"self-critic"``: the cost of the argmax or greedy derivation (Rennie et al., 2017);
            ``"leave-one-out"``: the mean cost of the item's other draws (Kool et al., 2019); or a
            module from ``inputs`` to ``(*batch)``, which the loss trains by the squared error
        normalize: divide L − b by its running standard deviation in earlier calls where that is
            above 1 (Havrylov et al., 2019): biased in scale, not in direction
        entropy_weight: adds −weight · H(p); estimated at the draws if there is no ``entropy``

    >>> import torch, structmax as sx
    >>> _ = torch.manual_seed(0)
    >>> scores = torch.zeros(3, requires_grad=True)
    >>> estimator = Reinforce(samples=1000, baseline="leave-one-out")
    >>> estimator.loss(sx.Choice(scores), lambda z: z @ torch.tensor([0.0, 1.0, 5.0])).backward()
    >>> scores.grad  # exactly −2/3, −1/3, 1
    tensor([-0.6589, -0.3284,  0.9874])
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
        self.samples, self.generator, self.advantages = samples, generator, Scale(normalize)
        self.baseline = Baseline(type(self).__name__, baseline, samples)
        self.entropy_weight = number(type(self).__name__, "entropy_weight", entropy_weight)

    def extra_repr(self) -> str:
        return f"samples={self.samples}, entropy_weight={self.entropy_weight}"

    def applies_to(self, structure: Structure) -> bool:
        return super().applies_to(structure) and self.baseline.applies_to(structure)

    def loss(self, structure: Structure, cost: Callable[..., Tensor], inputs: Any = None) -> Tensor:
        """The mean cost of the draws ``(*batch)``; ``inputs`` are for a module as the baseline."""
        z = structure.sample((self.samples,), self.generator)
        log_prob = structure.log_prob(z)  # at once: what draws step by step has it at hand
        costs = call_cost(cost, torch.cat([z, *self.baseline.structures(structure)]), structure)
        costs, rest = costs[: self.samples], costs[self.samples :].detach()
        if self.entropy_weight and not structure.supports("entropy"):
            costs = costs + self.entropy_weight * log_prob.detach()  # −H = E log p
        b = self.baseline(costs.detach(), rest, inputs)
        advantage = self.advantages(costs.detach() - b.detach())
        error = (costs.detach() - b).square() / 2  # which trains a module
        costs = costs + (error - error.detach())
        return self._total(structure, Draws(z, log_prob, costs, advantage))

    def _total(self, structure: Structure, draws: Draws) -> Tensor:
        change = draws.advantage * (draws.log_prob - draws.log_prob.detach())  # 0, with a gradient
        return regularized((draws.costs + change).mean(0), structure, self.entropy_weight)
