"""Argmax as a one-hot vector."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from structmax.maps.recipe import check_scores, keep
from structmax.smoothing import Hard


def argmax(x: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """One at the first largest score, zero elsewhere, without a gradient: Ω = 0.

    ``mask`` broadcasts to x and is True at the entries to keep; a row without any gets zeros.

    >>> argmax(torch.tensor([1.0, 3.0, 3.0]))
    tensor([0., 1., 0.])
    """
    check_scores("argmax", x, dim)
    x = x.detach()
    if mask is not None:
        x = keep("argmax", x, mask)
    x = x.movedim(dim, -1)
    absent = x == -math.inf
    bad = ~absent & ~(x < math.inf).all(-1, keepdim=True)
    p = Hard().argmax(torch.where(x.isnan(), 0.0, x))
    return torch.where(bad, math.nan, p).movedim(-1, dim)
