"""The kernels of the entmax loss on the GPU: scores are read once, the gradient is written once.

For 1 ≤ α ≤ 2; the glossary is that of ``structmax.maps.gpu``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from structmax.launch import quick
from structmax.maps.gpu import (
    INF,
    SOFTMAX,
    _kind,
    _shape,
    find_level,
    load,
    peak_of,
    power,
    store,
    tile,
)

BLOCK = 2048  # entries of a program that multiplies


@quick
@triton.jit
def entmax_loss_kernel(
    X, TARGET, D, ROWS, PLACE, R, n, IGNORE,
    ALPHA: tl.constexpr, KIND: tl.constexpr, ON_CHIP: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """d = p − y and what ``structmax.losses.entmax_loss.Fused`` describes.

    On the support p^rate = 1 + rate(z − λ), so that Ω(p) = Σ p(z − λ)/α and
    maxΩ − peak = λ/α + (1 − 1/α)⟨p, z⟩.
    """
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    y = tl.load(TARGET + row, mask=row < R, other=IGNORE)
    ignored = y == IGNORE
    known = (y >= 0) & (y < n)
    taken = tl.where(ignored, R, row)  # what is outside is not read: it may hold anything
    at = X + row.to(tl.int64) * n + y
    x_y = tl.load(at, mask=known & (taken < R), other=-INF)[:, None]
    x = load(X, taken, 0, n, R, BR, BN)
    dtype = x.dtype
    x_y = x_y.to(dtype)
    ignored, known, y = ignored[:, None], known[:, None], y[:, None]

    rate = tl.full((BR, 1), ALPHA - 1.0, dtype)
    one = tl.full((BR, 1), 1.0, dtype)
    peak = peak_of(x, X, taken, n, R, ON_CHIP, BR, BN)
    finite = peak < INF
    center = tl.where(finite & (peak > -INF), peak, 0.0)
    kept = x - center
    level, mass, step = find_level(
        kept, X, taken, n, R, center, one, peak, rate, KIND, ON_CHIP, BR, BN
    )
    total = tl.where(mass > 0.0, mass, 1.0)
    possible = known & (ignored == 0) & (x_y > -INF)

    gain, p_y = tl.zeros((BR, 1), dtype), tl.zeros((BR, 1), dtype)
    for start in range(0, BN if ON_CHIP else n, BN):
        z = tile(kept, X, taken, start, n, R, center, one, ON_CHIP, BR, BN)
        p, s = power(z, level, rate, KIND)
        if KIND == SOFTMAX:
            p = p / total
        else:
            p = tl.maximum(p - step * s, 0.0)
        p = tl.where(finite, p, float("nan"))
        p = tl.where(z == -INF, 0.0, p)
        # of a bad row Σ x, NaN or +inf, whose difference to x_y is ``loss_of_bad_row`` of the CPU
        gain += tl.sum(tl.where(z == -INF, 0.0, tl.where(finite, p, 1.0) * z), 1)[:, None]
        p = tl.where(possible | (finite == 0), p, 0.0)
        hit = possible & (start + tl.arange(0, BN)[None, :] == y)
        p_y += tl.sum(tl.where(hit, p, 0.0), 1)[:, None]
        d = tl.where(hit, p - 1.0, p)
        store(D, tl.where(known | ignored, d, float("nan")), row, start, n, R, BR, BN)

    level = tl.log(total) if KIND == SOFTMAX else level + step
    best = level / ALPHA + (1.0 - 1.0 / ALPHA) * gain
    loss = tl.where(finite, tl.maximum(best - (x_y - center), 0.0), gain - x_y)
    loss = tl.where(ignored, 0.0, tl.where(known, loss, float("nan")))
    inside = (row < R)[:, None]
    tl.store(ROWS + row[:, None], loss, mask=inside)
    tl.store(ROWS + R + row[:, None], tl.where(ignored, 0.0, one), mask=inside)
    tl.store(ROWS + 2 * R + row[:, None], p_y, mask=inside)
    absent = ignored | (known & finite & (possible == 0))
    tl.store(PLACE + row[:, None], tl.where(absent, -1, tl.where(known, y, 0)), mask=inside)


@quick
@triton.jit
def scale_kernel(
    G, COUNT, D, PLACE, OUT, stride, R, n, MEAN: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr
):
    """out = g·d, of a mean g·d/count, 0 at place −1; g is one for each row, ``stride`` apart."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    g = tl.load(G + row.to(tl.int64) * stride, mask=row < R, other=0.0)
    if MEAN:
        g = g / tl.load(COUNT)
    g = tl.where(tl.load(PLACE + row, mask=row < R, other=-1) < 0, 0.0, g)  # whatever g is there
    start = tl.program_id(1) * BN
    store(OUT, g[:, None] * load(D, row, start, n, R, BR, BN), row, start, n, R, BR, BN)


def entmax_loss(
    x: Tensor, target: Tensor, alpha: float, ignore: int
) -> tuple[Tensor, Tensor, Tensor]:
    """d, rows and place, as in ``structmax.losses.entmax_loss.Fused``."""
    x, target = x.contiguous(), target.contiguous()
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    # float16 would lose small p before the gradient, which may be large, comes
    kept = torch.bfloat16 if x.dtype == torch.bfloat16 else work
    d = torch.empty(x.shape, dtype=kept, device=x.device)
    rows = torch.empty(3, len(x), dtype=work, device=x.device)
    place = torch.empty(len(x), dtype=torch.long, device=x.device)
    shape = _shape(x)
    grid = (triton.cdiv(len(x), shape["BR"]),)
    with torch.cuda.device_of(x):
        entmax_loss_kernel[grid](
            x, target, d, rows, place, *x.shape, ignore, ALPHA=alpha, KIND=_kind(alpha), **shape
        )
    return d, rows, place


def scale(g: Tensor, count: Tensor | None, d: Tensor, place: Tensor, dtype: torch.dtype) -> Tensor:
    """g·d ``(*batch, n)`` in ``dtype``; g is ``(*batch)``, or one number, divided by ``count``."""
    out, n = torch.empty_like(d, dtype=dtype), d.shape[-1]
    g, rows = g.reshape(-1), d.numel() // n
    block = min(triton.next_power_of_2(n), BLOCK)
    height = BLOCK // block
    grid = (triton.cdiv(rows, height), triton.cdiv(n, block))
    with torch.cuda.device_of(d):
        scale_kernel[grid](
            g, g if count is None else count, d, place, out, g.stride(0) if len(g) > 1 else 0,
            rows, n, MEAN=count is not None, BR=height, BN=block, num_warps=4,
        )  # fmt: skip
    return out
