"""The k best structures summed exactly, the others sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from structmax.estimators.base import Estimator, at_least, call_cost
from structmax.estimators.exact_expectation import weighted_sum
from structmax.structures.base import Structure


@dataclass
class SumAndSample(Estimator):
    """E[L(z)] = Σ_{z∈C} p(z) L(z) + (1 − p(C)) E[L(z) | z ∉ C], with C the k best structures.

    The sum and its gradient are exact; the rest is REINFORCE at draws from p given z ∉ C (Liu,
    Regier, Tripuraneni, Jordan & McAuliffe, "Rao-Blackwellized stochastic gradients for discrete
    distributions", ICML 2019). Unbiased, with less variance than :class:`Reinforce` where p(C) is
    large. Needs topk, samples and log_prob; a beam is as good a C as the k best.

    Draws from the rest are exact, by rejection: draws of p until one is outside C. That would not
    end where p(C) = 1, so at most ``tries`` are made. One of them is outside with probability
    1 − p(C)^tries, so the rest weighs (1 − p(C))/(1 − p(C)^tries) where one is, and 0 where none
    is: still unbiased. One try is thinning, infinitely many are the paper's estimator. Costs are
    taken relative to their mean over C, which changes no expectation: a baseline for the draws.

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
            summed = torch.where(_wide(exists, structure), summed, summed[:1])
            drawn, found = self._outside(structure, summed, exists)
        z, kept = torch.cat([summed, drawn]), torch.cat([exists, found])
        log_prob = torch.where(kept, structure.log_prob(z), -torch.inf)
        costs = call_cost(cost, z, structure, where=log_prob > -torch.inf)
        inside, outside = log_prob[: self.k], log_prob[self.k :]
        # in place of p(z), where z is drawn: the weight of the rest, with weight · ∇log p
        ratio = (outside - torch.where(found, outside.detach(), 0.0)).exp()
        weight = _rest(inside.detach().logsumexp(0), self.tries) / self.samples
        share = inside.detach().softmax(0).nan_to_num(0.0)  # NaN where C has no probability
        mean = weighted_sum(share, costs[: self.k].detach())
        p = torch.cat([inside.exp(), weight * ratio])
        return weighted_sum(p, costs - mean) + mean

    def _outside(self, structure: Structure, best: Tensor, exists: Tensor) -> tuple[Tensor, Tensor]:
        """Draws ``(samples, *batch, *parts)``, and which are outside C after all tries."""
        z = structure.sample((self.samples,), self.generator)
        found = _is_none_of(z, best, exists)
        for _ in range(self.tries - 1):
            if bool(found.all()):
                break
            again = structure.sample((self.samples,), self.generator)
            z = torch.where(_wide(found, structure), z, again)
            found = found | _is_none_of(again, best, exists)
        return z, found


def _wide(mask: Tensor, structure: Structure) -> Tensor:
    """``(*sample, *batch)`` made to broadcast against z."""
    return mask[(..., *[None] * len(structure.event_shape))]


def _rest(log_mass: Tensor, tries: int) -> Tensor:
    """(1 − p)/(1 − p^tries) of log p, which tends to 1/tries as p tends to 1."""
    log_mass = log_mass.clamp(max=0.0)
    below = torch.where(log_mass < 0, log_mass, -1.0)
    return torch.where(log_mass < 0, below.expm1() / (tries * below).expm1(), 1 / tries)


def _is_none_of(z: Tensor, best: Tensor, exists: Tensor) -> Tensor:
    """Whether z ``(samples, *batch, *parts)`` is no structure of C, ``(samples, *batch)``."""
    known = torch.zeros(len(z), *exists.shape[1:], dtype=torch.bool, device=z.device)
    for one, there in zip(best, exists, strict=True):
        known |= (z == one).flatten(exists.dim()).all(-1) & there
    return ~known
