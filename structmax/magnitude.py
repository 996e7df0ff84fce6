"""Huge finite scores, replaced by moderate ones that give the same distribution.

Masks such as ``finfo.min`` or −1e30, and forces such as 1e18, leave no digits to the other scores
of a structure: V = −1e30 + x is −1e30. Where every structure has such a score, that would decide
between all of them by rounding. But a distribution depends on differences only. If some scores are
so much larger than others that one of them outweighs all of these together, it need not be any
larger than that. So the magnitudes |θ| of an item are sorted and cut into groups where the next is
more than twice the sum of ``terms`` of those before, and some ``SURE``·γ; each group is then
multiplied by one factor that brings it down to that bound. Structures whose totals differ in a
group stay apart by more than ``SURE``·γ, and those that do not keep their exact differences.

What is guaranteed. A group of one magnitude, which is what a mask is, comes down exactly. A group
of several comes down so far that their least difference stays above the bound, if they differ by
more than 1e-6 of themselves; otherwise it, and all larger ones, are left. Only pairs in a group
are compared: sums of several magnitudes that nearly cancel may come down to other differences.
What is added before an op (both entries of an edge, labels) has lost its digits already.

Scores up to ``LOW``·γ are never changed, and nothing is where all are below ``HUGE``·γ, which
float64 has digits for. Values are read on the host, so tensors on a GPU are left as they are: there
a distribution stays one (see ``forest.gpu``), but differences below 1e-16 of the largest score of a
structure are lost.

The log-partition follows: A(θ) = A(θ') + ⟨θ − θ', μ⟩, since every structure of any weight has the
same sum of θ − θ'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from structmax.smoothing import TSALLIS

HUGE = 1e8  # in units of γ
LOW = 1e3
SURE = 1e3  # e^−SURE is 0
FINEST = 1e6  # the inverse of the least relative difference inside a group


def moderate(
    scores: Sequence[Tensor], terms: Callable[[], Tensor], omega: Sequence[float]
) -> list[Tensor] | None:
    """Equivalent scores ``(B, ...)``; None if they are moderate already, or not on the CPU.

    Args:
        scores: with one batch dimension, of which one may be expanded
        terms: how many scores a structure of each item ``(B)`` adds up at most; called only if it
            matters
        omega: ``Smoothing.code``
    """
    kind, gamma, alpha = omega
    if not any(has_huge(t, HUGE * gamma) for t in scores):
        return None
    from structmax import magnitude_cpu as cpu

    sure = gamma * max(SURE, 4.0 / (alpha - 1.0) if kind == TSALLIS else 0.0)
    out, owned = [t.detach() for t in scores], [False] * len(scores)
    for b, count in enumerate(terms().clamp(min=1).tolist()):
        values = [np.ascontiguousarray(t[b].detach().numpy()).reshape(-1) for t in scores]
        low, top, old = 0.0, 0.0, np.empty(0)
        for v in values:
            old, low, top = cpu.collect(v, LOW * gamma, old, low, top)
        if not top > HUGE * gamma:
            continue
        old = np.unique(old)
        new = cpu.bring_down(old, low, count, sure, FINEST)
        for k, v in enumerate(values):
            if cpu.has_beyond(v, LOW * gamma):
                if not owned[k]:
                    out[k], owned[k] = out[k].clone(memory_format=torch.contiguous_format), True
                cpu.replace(v, LOW * gamma, old, new, out[k].numpy()[b].reshape(-1))
    return out


def has_huge(t: Tensor, limit: float) -> bool:
    """Whether a finite entry of a CPU tensor is beyond ±limit."""
    from structmax.jit import array
    from structmax.magnitude_cpu import has_beyond

    if t.device.type != "cpu" or t.dtype not in (torch.float32, torch.float64):
        return False
    t = t.detach()
    if 0 in t.stride():
        t = t[tuple(slice(0, 1) if s == 0 else slice(None) for s in t.stride())]
    return has_beyond(array(t).reshape(-1), limit)


def clamped(t: Tensor, most: float) -> Tensor:
    """t within ±most, infinities apart; its derivative stays 1."""
    x = t.detach()
    return t + torch.where(x.isfinite(), x.clamp(-most, most) - x, 0.0)


def value_of(
    a: Tensor,
    mu: Sequence[Tensor],
    scores: Sequence[Tensor],
    smaller: Sequence[Tensor],
    constants: object = None,
) -> Tensor:
    """A ``(B)`` of the scores, given that of the smaller ones and its gradient. A finite value is
    never returned as an infinite one: it is the last number of the dtype."""
    total = a.double()
    for m, t, s in zip(mu, scores, smaller, strict=True):
        change = torch.where((t == s) | (m == 0), 0.0, t.double() - s.double())
        total = total + (change * m.double()).flatten(1).sum(-1)
    return finite(total, a)


def finite(total: Tensor, a: Tensor) -> Tensor:
    """``total`` in the dtype of a, where a is finite; else a."""
    last = torch.finfo(a.dtype).max
    return torch.where(a.isfinite(), total.clamp(-last, last), a.double()).to(a.dtype)
