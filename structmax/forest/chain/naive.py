"""The linear chain in plain torch: the forward recursion as it is written in textbooks.

    α₁(j) = u₁(j),   αₜ(j) = uₜ(j) + log Σᵢ exp(αₜ₋₁(i) + Tₜ(i, j)),   A = log Σⱼ exp α_len(j)

Letters: B batch, n positions, c tags. ``unary (B, n, c)``; ``transition (B, s, c, c)`` as
``[from, to]``, s = n − 1 steps or s = 1 shared by all steps; ``lengths (B)``, at least 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from structmax.fence import clamped, mark
from structmax.primitive import recordable, recording
from structmax.smoothing import Hard, Shannon, Smoothing


def value(
    unary: Tensor, transition: Tensor, lengths: Tensor, omega: Smoothing | None = None
) -> Tensor:
    """A ``(B)``. Padding is replaced by zeros first, so nothing of it reaches a derivative."""
    omega = omega or Shannon()
    n, steps = unary.shape[1], transition.shape[1]
    position = torch.arange(n, device=unary.device)
    inside = position < lengths[:, None]  # (B, n)
    u = torch.where(inside[..., None], unary, 0.0).double()
    edges = transition.double()
    if steps == n - 1:
        edges = torch.where(inside[:, 1:, None, None], transition, 0.0).double()
    alpha = u[:, 0]
    for t in range(1, n):
        x = alpha[:, :, None] + edges[:, t - 1 if steps != 1 else 0]  # (B, c, c)
        alpha = torch.where(inside[:, t, None], u[:, t] + omega.max(x.mT), alpha)
    return omega.max(alpha).to(unary.dtype)


def fold(
    unary: Tensor, start: Tensor, end: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor | float]:
    """``unary`` with start and end ``(B, c)`` added at the first and the last position, which are
    then given less their largest scores; and what A loses by it, ``(B)`` in float64 or 0.

    The sums are taken in float64, so that a mask in one of them does not cost the others their
    digits. Either may be absent, ``(B, 0)``.
    """
    if not start.shape[-1] and not end.shape[-1]:
        return unary, 0.0
    last = (lengths.long() - 1)[:, None, None].expand(-1, 1, unary.shape[-1])
    places = torch.cat([torch.zeros_like(last), last], 1)
    alone = last == 0  # where both ends are added to one position
    rows = unary.gather(1, places).double()
    for scores, at in ((start, 0), (end, 1)):
        if scores.shape[-1]:
            here = alone | (torch.arange(2, device=unary.device)[:, None] == at)
            rows = rows + torch.where(here, scores.double()[:, None], 0.0)
    peak = rows.detach().amax(-1, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
    lost = peak[:, 0] + torch.where(alone[:, :, 0], 0.0, peak[:, 1])
    rows = (rows - peak).to(unary.dtype)
    unary = unary.scatter(1, last, rows[:, 1:])  # one after the other: they may be at one position
    return unary.scatter(1, torch.zeros_like(last), rows[:, :1]), lost.squeeze(-1)


def score(unary: Tensor, transition: Tensor, lengths: Tensor, tags: Tensor) -> Tensor:
    """The score ``(B)`` of tags ``(B, n)``, in float64; NaN if one is none. The padding may hold
    anything."""
    own, between, wrong = along(unary, transition, lengths, tags)
    total = own.double().sum(-1) + between.double().sum(-1)
    return total if wrong is None else mark(total, wrong.any(-1))


def along(
    unary: Tensor, transition: Tensor, lengths: Tensor, tags: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The scores of tags ``(B, n)`` and of their transitions ``(B, n − 1)``, 0 in the padding; and
    which tags are none, as of ``clamped``."""
    c = unary.shape[-1]
    inside = torch.arange(unary.shape[1], device=unary.device) < lengths[:, None]
    (tags,), wrong = clamped([torch.where(inside, tags, 0)], [(0, c - 1)])
    own = unary.gather(-1, tags[..., None]).squeeze(-1)
    pair = tags[:, :-1] * c + tags[:, 1:]  # (B, n − 1)
    between = transition.flatten(-2).expand(-1, pair.shape[1], -1)
    between = between.gather(-1, pair[..., None]).squeeze(-1)
    return torch.where(inside, own, 0.0), torch.where(inside[:, 1:], between, 0.0), wrong


def argmax(unary: Tensor, transition: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The best score ``(B)`` and its tags ``(B, n)``, −1 in the padding."""
    with recording():
        leaf = recordable(unary).requires_grad_()
        best = value(leaf, recordable(transition), recordable(lengths), Hard())
        (z,) = torch.autograd.grad(torch.where(best == -torch.inf, 0.0, best).sum(), leaf)
    inside = torch.arange(unary.shape[1], device=unary.device) < lengths[:, None]
    return best.detach(), torch.where(inside, z.argmax(-1), -1)
