"""The kernel of the entmax loss on the CPU: a row's map, its loss and its gradient at once."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from structmax.jit import array, kernel, run_chunks
from structmax.maps.cpu import kept_mass, solve_row

INF = math.inf


@kernel(inner=True, fast=True)
def gain_of(x, peak, p):
    """Σ p(x − peak), and the largest p."""
    gain, top = 0.0, p[0]
    for i in range(x.shape[0]):
        gain += np.float64(p[i]) * (np.float64(x[i]) - peak) if p[i] > 0 else 0.0
        top = p[i] if p[i] > top else top
    return gain, np.float64(top)


@kernel(inner=True)
def loss_of_bad_row(x, target):
    """+inf if the row holds +inf and not at its target, and no NaN; else NaN."""
    for i in range(x.shape[0]):
        if math.isnan(x[i]):
            return np.nan
    return np.nan if x[target] == INF else INF


@kernel
def entmax_loss_rows(x, bits, target, alpha, ignore, d, rows, place, low, high):
    """Rows low..high of d = p − y and of what ``structmax.losses.entmax_loss.Fused`` describes.

    With z = x − peak, and λ from the largest p, which is that of z = 0, what z − λ is to p tells Ω:
    maxΩ − peak = ⟨p, z⟩ − Σ p(z − λ)/α = λ/α + (1 − 1/α)⟨p, z⟩.
    """
    n = x.shape[1]
    z, index = np.empty((3, n + 1)), np.empty(n + 1, np.int32)
    work, spot = np.empty((3, n + 1), x.dtype), np.empty(1, x.dtype)
    for row in range(low, high):
        y = target[row]
        if y == ignore or not 0 <= y < n:
            answer = 0.0 if y == ignore else np.nan
            d[row], place[row] = answer, -1 if y == ignore else 0
            rows[0, row], rows[1, row], rows[2, row] = answer, answer != 0.0, answer
            continue
        peak = solve_row(x[row], bits[row], alpha, d[row], z, index, work, spot)
        place[row], rows[1, row], rows[2, row] = y, 1.0, d[row, y]
        if not peak < INF:
            rows[0, row] = loss_of_bad_row(x[row], y)
        elif x[row, y] == -INF:
            d[row], place[row], rows[0, row] = 0.0, -1, INF
        else:
            gain, top = gain_of(x[row], peak, d[row])
            level = kept_mass(alpha - 1.0, -math.log(top))
            best = level / alpha + (1.0 - 1.0 / alpha) * gain
            rows[0, row] = max(best - (np.float64(x[row, y]) - peak), 0.0)
            d[row, y] -= x.dtype.type(1)


def entmax_loss(
    x: Tensor, target: Tensor, alpha: float, ignore: int
) -> tuple[Tensor, Tensor, Tensor]:
    """d, rows and place, as in ``structmax.losses.entmax_loss.Fused``."""
    x = torch.from_numpy(array(x if x.dtype.itemsize >= 4 else x.float()))
    d = torch.empty_like(x)
    rows = torch.empty(3, len(x), dtype=x.dtype, device="cpu")
    place = torch.empty(len(x), dtype=torch.long, device="cpu")
    scores = x.numpy()
    bits = scores.view(np.int32 if scores.itemsize == 4 else np.int64)
    rest = array(target), alpha, ignore, d.numpy(), rows.numpy(), place.numpy()

    def task(low: int, high: int) -> None:
        entmax_loss_rows(scores, bits, *rest, low, high)

    run_chunks(task, len(scores), scores.shape[1])
    return d, rows, place
