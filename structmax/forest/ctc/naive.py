"""The recursion over frames in plain torch.

    V(0, s) = θ(0, s) for the first blank and the first symbol, else −∞
    V(t, s) = θ(t, s) + γ log Σ exp of V(t−1, s), V(t−1, s−1) and, into another symbol, V(t−1, s−2)
    A = γ log Σ exp of the last two states, after the last frame

Letters: B batch, T frames, V symbols, S symbols of a target, 2S + 1 states. ``theta (B, T, V)``;
``targets (B, S)``; ``frames, count (B)``: how many frames and symbols of a target an item has.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad


def symbols_of(targets: Tensor, count: Tensor, blank: int, most: int) -> Tensor:
    """The symbol of each state, ``(*B, 2S+1)``; blank beyond the target and for what is no symbol,
    from 0 to before ``most``."""
    position = torch.arange(targets.shape[-1], device=targets.device)
    known = (targets >= 0) & (targets < most) & (position < count[..., None])
    labels = torch.where(known, targets.long(), blank)
    blanks = labels.new_full((*labels.shape[:-1], labels.shape[-1] + 1), blank)
    return interleave(blanks, labels)


def interleave(blanks: Tensor, labels: Tensor) -> Tensor:
    """What belongs to S + 1 blanks and to S symbols, in the order of the states."""
    pairs = torch.stack([blanks[..., :-1], labels], -1).flatten(-2)
    return torch.cat([pairs, blanks[..., -1:]], -1)


def repeats(symbols: Tensor) -> Tensor:
    """Whether each symbol of a target is the one before it, ``(*B, S)``; ``symbols`` of states."""
    labels = symbols[..., 1::2]
    repeat = labels[..., 1:] == labels[..., :-1]
    return pad(repeat, (labels.shape[-1] - repeat.shape[-1], 0))


def used(repeat: Tensor, frames: Tensor, count: Tensor, most: int) -> Tensor:
    """Which states of which of ``most`` frames some path meets, ``(*B, T, 2S+1)``.

    A symbol takes a frame, and a repeated one a blank before it.
    """
    position = torch.arange(repeat.shape[-1], device=repeat.device)
    first = position + repeat.cumsum(-1)  # the earliest frame of each symbol
    spare = frames - 1 - torch.where(position == count[..., None] - 1, first, 0).sum(-1)
    last = first + spare[..., None]
    low = interleave(pad(first + 1, (1, 0)), first)
    high = interleave(pad(last - 1, (0, 1)), last)
    state, ends = torch.arange(low.shape[-1], device=repeat.device), 2 * count[..., None]
    high = torch.where(state == ends, frames[..., None] - 1, high)
    high = torch.where(state > ends, -1, high)
    frame = torch.arange(most, device=repeat.device)[:, None]
    return (frame >= low[..., None, :]) & (frame <= high[..., None, :])


def wrong_targets(targets: Tensor, count: Tensor, blank: int, most: int) -> Tensor:
    """Symbols of the targets that are none, ``(*B, S)``."""
    wrong = (targets < 0) | (targets >= most) | (targets == blank)
    position = torch.arange(targets.shape[-1], device=targets.device)
    return wrong & (position < count[..., None])


def value(
    theta: Tensor, targets: Tensor, frames: Tensor, count: Tensor, blank: int, gamma: float
) -> Tensor:
    """A ``(B)``, NaN for an item that has an impossible length or a symbol that is none.

    What no path meets is replaced by −inf first, so nothing of it reaches A.
    """
    most = theta.shape[1], targets.shape[1]
    bad = (frames < 1) | (frames > most[0]) | (count < 0) | (count > most[1])
    frames, count = frames.long().clamp(1, most[0]), count.long().clamp(0, most[1])
    bad = bad | wrong_targets(targets, count, blank, theta.shape[2]).any(-1)
    nan = torch.where(bad, math.nan, 0.0).to(theta.dtype)
    theta = theta + nan[:, None, None]
    symbols = symbols_of(targets, count, blank, theta.shape[2])
    states = symbols.shape[-1]
    state = torch.arange(states, device=theta.device)
    index = symbols[:, None].expand(-1, theta.shape[1], -1)
    met = used(repeats(symbols), frames, count, theta.shape[1])
    cells = torch.where(met, theta.double().gather(2, index), -math.inf) / gamma
    skips = (state % 2 == 1) & (symbols != symbols.roll(2, 1)) & (state > 1)
    nothing = cells.new_full((len(cells), 2), -math.inf)

    def before(v: Tensor, by: int) -> Tensor:
        return torch.cat([nothing[:, :by], v], -1)[:, :states]

    last = torch.where(state < 2, cells[:, 0], -math.inf)
    rows = [last]
    for row in cells.unbind(1)[1:]:
        over = torch.where(skips, before(last, 2), -math.inf)
        last = row + _log_sum(torch.stack([last, before(last, 1), over]))
        rows.append(last)
    time = (frames - 1)[:, None, None].expand(-1, 1, states)
    end = torch.stack(rows, 1).gather(1, time).squeeze(1)
    ends = (state == 2 * count[:, None]) | (state == 2 * count[:, None] - 1)
    a = gamma * _log_sum(torch.where(ends, end, -math.inf).mT)
    return a.to(theta.dtype) + nan


def _log_sum(x: Tensor) -> Tensor:
    """log Σ exp over the first dimension, −inf with a derivative of 0 where all are −inf."""
    none = (x == -math.inf).all(0)
    total = torch.where(none, 0.0, x).logsumexp(0)
    return torch.where(none, -math.inf, total)
