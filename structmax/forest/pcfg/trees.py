"""Trees as indicators of labelled spans: which rules they use.

In a binary tree the left child of a span is the longest shorter span that starts where it does, so
the rules can be read off the labelled spans z ``(..., n, n, S)``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rules(NamedTuple):
    """For every span ``(..., n, n)``: whether a rule is used there, the rule's number
    ``(A·S + B)·S + C``, and whether both children are there."""

    used: Tensor
    number: Tensor
    complete: Tensor


def rules_of(z: Tensor) -> Rules:
    n, S = z.shape[-2:]
    there, label = (z != 0).any(-1), (z != 0).to(torch.uint8).argmax(-1)
    at = torch.arange(n, device=z.device)
    ends = torch.where(there, at, -1).cummax(-1).values
    split = torch.cat([torch.full_like(ends[..., :1], -1), ends[..., :-1]], -1)  # last of the left
    used = there & (at[:, None] < at)
    after = (split + 1).clamp(max=n - 1)
    complete = (split >= at[:, None]) & there.gather(-2, after)
    left, right = label.gather(-1, split.clamp(min=0)), label.gather(-2, after)
    return Rules(used, torch.where(used, (label * S + left) * S + right, 0), complete)


def rule_counts(z: Tensor, N: int) -> Tensor:
    """How often each rule is used, ``(..., N, S, S)``."""
    S = z.shape[-1]
    rules = rules_of(z)
    counts = z.new_zeros(*z.shape[:-3], N * S * S)
    counts = counts.scatter_add(-1, rules.number.flatten(-2), rules.used.to(z.dtype).flatten(-2))
    return counts.unflatten(-1, (N, S, S))
