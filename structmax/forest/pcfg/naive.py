"""Grammars in plain torch: the inside recursion as it is written in textbooks.

    V[i, i, p] = spans[i, i, p],
    V[i, j, A] = spans[i, j, A] + maxΩ over k, B, C of (rules[A, B, C] + V[i, k, B] + V[k+1, j, C]),
    A(θ) = maxΩ over A of (root[A] + V[0, len − 1, A]),

with preterminals B or C over single words and nonterminals over longer spans (Baker, 1979). Under
Shannon that is the log of the sum of the exp-scores of all trees.

``spans (B, n, n, S)``, ``root (B, N)``, ``rules (B, N, S, S)`` as ``[parent, left, right]``,
``lengths (B)``; symbols are N nonterminals, then P preterminals.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from structmax.smoothing import Shannon, Smoothing


def value(spans: Tensor, root: Tensor, rules: Tensor, lengths: Tensor, omega: Smoothing) -> Tensor:
    """A ``(B)``; −inf for a single word, which no nonterminal derives."""
    n, N = spans.shape[1], root.shape[1]
    word = torch.arange(n, device=spans.device)
    inside = (word[:, None] < lengths[:, None, None]) & (word < lengths[:, None, None])
    theta = torch.where(inside[..., None], spans, 0.0).double()
    rules, nonterminals, preterminals = rules.double(), slice(0, N), slice(N, None)
    chart = {(i, i): theta[:, i, i, preterminals] for i in range(n)}
    nothing = torch.full_like(root, -math.inf, dtype=torch.float64)
    ends = [nothing]
    for w in range(2, n + 1):
        for i in range(n - w + 1):
            j, options = i + w - 1, []
            for k in range(i, j):
                b = preterminals if k == i else nonterminals
                c = preterminals if k + 1 == j else nonterminals
                left, right = chart[i, k][:, None, :, None], chart[k + 1, j][:, None, None, :]
                options.append((rules[:, :, b, c] + left + right).flatten(2))
            chart[i, j] = theta[:, i, j, nonterminals] + omega.max(torch.cat(options, -1))
        ends.append(root.double() + chart[0, w - 1])
    goals = omega.max(torch.stack(ends, 1))  # (B, n)
    return goals.gather(1, lengths.long()[:, None] - 1).squeeze(1).to(spans.dtype)


def collapse(left: Tensor, right: Tensor, parent: Tensor) -> Tensor:
    """rules[A, B, C] = log Σ_r exp(parent[A, r] + left[B, r] + right[C, r]), ``(..., N, S, S)``."""
    pairs = left[..., :, None, :] + right[..., None, :, :]  # (..., S, S, R)
    rows = parent.unbind(-2)  # one parent at a time, which holds less at once
    return torch.stack([Shannon().max(pairs + row[..., None, None, :]) for row in rows], -3)
