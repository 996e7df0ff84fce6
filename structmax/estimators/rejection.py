"""Draws of a distribution outside a set C of structures, by rejection.

Draws of p until one is outside C would not end where p(C) = 1, so at most so many tries are made.
One of them is outside with probability 1 − p(C)^tries, so the rest weighs
(1 − p(C))/(1 − p(C)^tries) where one is, and 0 where none is: unbiased whatever the number. One try
is thinning.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from structmax import checks


def draw_outside(
    draw: Callable[[], Tensor], best: Tensor, exists: Tensor, tries: int
) -> tuple[Tensor, Tensor]:
    """Draws ``(samples, *batch, *parts)``, and which are outside C after all tries.

    C is ``best`` ``(k, *batch, *parts)`` where ``exists`` ``(k, *batch)``.
    """
    z = draw()
    found = _is_none_of(z, best, exists)
    for _ in range(tries - 1):
        if checks.can_look() and bool(found.all()):
            break
        again = draw()
        z = torch.where(found[(..., *[None] * (z.dim() - found.dim()))], z, again)
        found = found | _is_none_of(again, best, exists)
    return z, found


def rest_weight(log_mass: Tensor, tries: int) -> Tensor:
    """(1 − p)/(1 − p^tries) of log p, which tends to 1/tries as p tends to 1.

    >>> rest_weight(torch.tensor([0.5, 1.0]).log(), 2)
    tensor([0.6667, 0.5000])
    """
    log_mass = log_mass.clamp(max=0.0)
    below = torch.where(log_mass < 0, log_mass, -1.0)
    return torch.where(log_mass < 0, below.expm1() / (tries * below).expm1(), 1 / tries)


def _is_none_of(z: Tensor, best: Tensor, exists: Tensor) -> Tensor:
    """Whether z ``(samples, *batch, *parts)`` is no structure of C, ``(samples, *batch)``."""
    known = torch.zeros(len(z), *exists.shape[1:], dtype=torch.bool, device=z.device)
    for one, there in zip(best, exists, strict=True):
        known = known | (z == one).flatten(exists.dim()).all(-1) & there
    return ~known
