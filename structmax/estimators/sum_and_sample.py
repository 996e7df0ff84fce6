"""The k best structures summed exactly, the others sampled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from structmax.estimators.base import Estimator, at_least, call_cost, wide
from structmax.estimators.exact_expectation import weighted_sum
from structmax.estimators.rejection import draw_outside, rest_weight
from structmax.structures.base import Structure


@dataclass
class SumAndSample(Estimator):
    """E[L(z)] = Σ_{z∈C} p(z) L(z) + (1 − p(C)) E[L(z) | z ∉ C], with C the k best structures.

    The sum and its gradient are exact; the rest is REINFORCE at draws from p given z ∉ C (Liu,
    Regier, Tripuraneni, Jordan & McAuliffe, "Rao-Blackwellized stochastic gradients for discrete
    distributions", ICML 2019). Unbiased, with less variance than :class:`Reinforce` where p(C) is
    large. Needs topk, samples and log_prob; a beam is as good a C as the k best. Biased for a
    ``Hyperpath`` of which two derivations have the same z: C is a set of derivations there, but a
    draw is known by its z.

    Draws from the rest are exact, by rejection with at most ``tries`` (see ``rejection``): still
    unbiased; infinitely many are the paper's estimator. Costs are taken relative to their mean over
    C, which changes no expectation: a baseline for the draws.

    Args:
        k: how many structures are summed
        samples: how many draws from the rest
        tries: how many draws each of them may take
        generator: of the draws

    >>> import torch, structmax as sx
    >>> _ = torch.manual_seed(0)
    >>> scores = torch.zeros(3, requires_grad=True)
    >>> cost = lambda z: z @ torch.tensor([0.0, 1.0, 5.0])
    >>> SumAndSample(k=2).loss(sx.Choice(scores), cost).backward()
    >>> scores.grad  # exactly −2/3, −1/3, 1
    tensor([-0.6599, -0.3469,  1.0068])
    """

    k: int = 1
    samples: int = 1
    tries: int = 8
    generator: torch.Generator | None = field(default=None, repr=False)

    objective = "E[L(z)]"
    needs = frozenset(["topk", "sample", "log_prob"])

    def __post_init__(self) -> None:
        for name in ("k", "samples", "tries"):
            at_least(self, name, 1)

    def loss(self, structure: Structure, cost: Callable[..., Tensor]) -> Tensor:
        with torch.no_grad():
            best = structure.topk(self.k)
            summed = best.structures.movedim(len(structure.batch_shape), 0)  # (k, *batch, *parts)
            exists = best.exists.movedim(-1, 0)
            summed = torch.where(wide(exists, structure), summed, summed[:1])
            draw = functools.partial(structure.sample, (self.samples,), self.generator)
            drawn, found = draw_outside(draw, summed, exists, self.tries)
        z, kept = torch.cat([summed, drawn]), torch.cat([exists, found])
        log_prob = torch.where(kept, structure.log_prob(z), -torch.inf)
        costs = call_cost(cost, z, structure, where=log_prob > -torch.inf)
        inside, outside = log_prob[: self.k], log_prob[self.k :]
        # in place of p(z), where z is drawn: the weight of the rest, with weight · ∇log p
        ratio = (outside - torch.where(found, outside.detach(), 0.0)).exp()
        weight = rest_weight(inside.detach().logsumexp(0), self.tries) / self.samples
        share = inside.detach().softmax(0).nan_to_num(0.0)  # NaN where C has no probability
        mean = weighted_sum(share, costs[: self.k].detach())
        p = torch.cat([inside.exp(), weight * ratio])
        return weighted_sum(p, costs - mean) + mean
