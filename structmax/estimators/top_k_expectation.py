"""The expected cost over the k best structures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from structmax.estimators.base import Estimator, at_least, call_cost, refuse_nothing
from structmax.estimators.exact_expectation import weighted_sum
from structmax.structures.base import Structure, TopK
from structmax.structures.incremental import Incremental


def k_best(structure: Structure, k: int, distinct: bool) -> TopK:
    """The k best structures; of an incremental one, perhaps k different trees."""
    if isinstance(structure, Incremental):
        return structure.topk(k, distinct)
    return structure.topk(k)  # they are different


@dataclass
class TopKExpectation(Estimator):
    """Σₖ softmax(s/γ)ₖ L(zₖ) over the k best structures zₖ and their scores sₖ.

    Under Shannon smoothing this is E[L(z) | z among the k best]: truncated, so biased for E[L(z)]
    by what the others would add; exact where there are at most k structures. The gradient of the
    sum is exact. Needs topk; in an incremental structure that is a beam, and the scores are
    log-probabilities (minimum risk over a k-best list: Smith & Eisner, 2006).

    Args:
        k: how many structures
        distinct: of an incremental structure, k different trees (see ``EasyFirst.beam``): without
            it most of the k may be orders of one tree, and there is nothing to compare

    >>> import torch, structmax as sx
    >>> scores = torch.tensor([0.0, 0.0, -9.0], requires_grad=True)
    >>> cost = lambda z: z @ torch.tensor([1.0, 5.0, 100.0])
    >>> loss = TopKExpectation(k=2).loss(sx.Choice(scores), cost)
    >>> loss.backward()
    >>> loss.detach(), scores.grad
    (tensor(3.), tensor([-1.,  1.,  0.]))
    """

    k: int = 8
    distinct: bool = False

    objective = "E[L(z)]"
    distribution = "top-k"
    needs = frozenset(["topk"])

    def __post_init__(self) -> None:
        at_least(self, "k", 1)

    def loss(self, structure: Structure, cost: Callable[..., Tensor]) -> Tensor:
        best = k_best(structure, self.k, self.distinct)
        refuse_nothing(self, structure, best.scores[..., 0])
        scores = torch.where(best.exists, best.scores / structure.temperature, -torch.inf)
        p = scores.softmax(-1).movedim(-1, 0)  # (k, *batch)
        z = best.structures.detach().movedim(len(structure.batch_shape), 0)
        return weighted_sum(p, call_cost(cost, z, structure, where=p > 0))
