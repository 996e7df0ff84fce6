"""The expected cost by enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from structmax import checks
from structmax.estimators.base import Estimator, call_cost, refuse_nothing
from structmax.smoothing import TSALLIS
from structmax.structures.base import Structure


@dataclass
class ExactExpectation(Estimator):
    """E[L(z)] = Σ p(z) L(z) over every structure, and its gradient: no bias, no variance.

    Needs ``enumerate_support``, so small structures: the reference for the other estimators. The
    cost is called once, on all structures.

    >>> import torch, structmax as sx
    >>> scores = torch.zeros(3, requires_grad=True)
    >>> cost = lambda z: z @ torch.tensor([0.0, 1.0, 5.0])
    >>> loss = ExactExpectation().loss(sx.Choice(scores), cost)
    >>> loss.backward()
    >>> loss.detach(), scores.grad
    (tensor(2.0000), tensor([-0.6667, -0.3333,  1.0000]))
    """

    objective = "E[L(z)]"
    needs = frozenset(["enumerate_support", "log_prob"])

    def loss(self, structure: Structure, cost: Callable[..., Tensor]) -> Tensor:
        z, exists = every_structure(structure)
        refuse_nothing(self, structure, torch.where(exists.any(0), 0.0, -torch.inf))
        log_prob = torch.where(exists, structure.log_prob(z), -torch.inf)
        refuse_nothing(self, structure, log_prob.amax(0))
        p = log_prob.exp()
        walks = structure.smoothing.code[0] == TSALLIS and checks.can_look() and p.numel()
        if walks and (total := float(p.detach().sum(0).max())) > 1.01:
            raise ValueError(
                f"ExactExpectation: probabilities sum to {total:.3f}: derivations with the same z "
                "cannot be told apart without Shannon. Give their parts numbers of their own."
            )
        loss = weighted_sum(p, call_cost(cost, z, structure, where=p > 0))
        return torch.where((p > 0).any(0), loss, torch.nan)  # an item that nobody looked at


def weighted_sum(weights: Tensor, costs: Tensor) -> Tensor:
    """Σ w L over the first dimension, where a weight of 0 ends the matter, gradient included."""
    return (weights * torch.where(weights > 0, costs, 0.0)).sum(0)


def every_structure(structure: Structure) -> tuple[Tensor, Tensor]:
    """Every z ``(N, *batch, *parts)`` and whether it is one, ``(N, *batch)``.

    Items of different sizes are enumerated one by one, and the short ones filled up: by one of
    theirs, or by zeros if they have none. N is at least 1.
    """
    batch, event = structure.batch_shape, structure.event_shape
    try:
        z = structure.enumerate_support()
        known = len(z) > 0
        z = z if known else z.new_zeros(1, *batch, *event)
        return z, torch.full(z.shape[: 1 + len(batch)], known, device=z.device)
    except ValueError:
        if len(batch) == 0 or batch.numel() == 0:
            raise
    items = itertools.product(*map(range, batch))
    supports = [structure[item].enumerate_support() for item in items]  # each (N, *parts)
    most = max(map(len, supports))
    fill = [s[:1] if len(s) else s.new_zeros(1, *event) for s in supports]
    pairs = zip(supports, fill, strict=True)
    z = torch.stack([torch.cat([s, f.expand(most - len(s), *event)]) for s, f in pairs], 1)
    exists = torch.tensor([[i < len(s) for s in supports] for i in range(most)], device=z.device)
    return z.reshape(most, *batch, *event), exists.reshape(most, *batch)
