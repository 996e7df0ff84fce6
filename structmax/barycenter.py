"""The average of series of different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from structmax import checks
from structmax.primitive import recordable, recording

if TYPE_CHECKING:
    from structmax.losses.soft_dtw import SoftDTW


@recording()
def barycenter(
    series: Tensor | Sequence[Tensor],
    weights: Tensor | Sequence[float] | None = None,
    init: Tensor | None = None,
    length: int | None = None,
    loss: SoftDTW | None = None,
    lengths: Tensor | None = None,
    max_iter: int = 100,
    tol: float = 1e-6,
) -> Tensor:
    """The series z that minimises Σᵢ wᵢ·SoftDTW(z, xᵢ), ``(length, d)`` (Cuturi & Blondel, 2017).

    The objective is not convex: L-BFGS finds a local minimum from ``init``. The same input gives
    the same answer. No gradient flows through it.

    Args:
        series: ``(k, n, d)``, or k tensors ``(nᵢ, d)``
        weights: ``(k)``, not negative; by default 1/k each
        init: ``(length, d)``; by default the mean of the series, each stretched to that length
        length: of the result; by default that of ``init``, or of the longest series
        loss: by default ``SoftDTW(gamma=1.0)``
        lengths: ``(k)``, of a padded ``series``
        max_iter: the most iterations of L-BFGS
        tol: when to stop: the relative decrease of the objective, or the gradient, is below it

    >>> import structmax as sx
    >>> early = torch.tensor([[0.0], [1.0], [0.0], [0.0], [0.0]])
    >>> late = torch.tensor([[0.0], [0.0], [0.0], [1.0], [0.0]])
    >>> z = sx.barycenter([early, late], init=early, loss=sx.losses.SoftDTW(gamma=0.01))
    >>> z.flatten().abs().round(decimals=2)  # a peak, where the mean has two of half the height
    tensor([0., 1., 0., 0., 0.])
    """
    from structmax.losses.soft_dtw import SoftDTW  # most who import structmax do without

    loss = SoftDTW() if loss is None else loss
    batch, sizes = map(recordable, _stack(series, lengths))
    k, _, d = batch.shape
    if weights is None:
        weights = torch.full((k,), 1 / k, device="cpu")
    weights = checks.as_tensor("barycenter", "weights", weights, batch.device)
    if weights.shape != (k,) or not bool((weights >= 0).all()):
        raise ValueError(
            f"barycenter: weights must be ({k},) and not negative, got {tuple(weights.shape)} "
            f"with a least of {float(weights.min()) if weights.numel() else None}."
        )
    weights = recordable(weights.to(batch))
    if length is not None and checks.index("barycenter", "length", length) < 1:
        raise ValueError(f"barycenter: length must be at least 1, got {length}.")
    if init is None:
        init = _mean(batch, sizes, int(sizes.max()) if length is None else length)
    if init.dim() != 2 or init.shape[1] != d or not len(init) or length not in (None, len(init)):
        raise ValueError(
            f"barycenter: init must be ({length or 'length'}, {d}), got {tuple(init.shape)}."
        )
    shape = init.shape
    whole = torch.full((k,), shape[0], device=batch.device)
    # of a divergence, the series' own terms stay and that of z is the same for all: not k times
    plain = SoftDTW(omega=loss.omega, band=loss.band)
    own = (weights * plain(batch, batch, (sizes, sizes))).sum() if loss.divergence else 0.0

    def objective(flat: NDArray) -> tuple[float, NDArray]:
        z = torch.from_numpy(flat).reshape(shape).to(batch.device).requires_grad_()
        total = (weights * plain(z.expand(k, *shape), batch, (whole, sizes))).sum()
        if loss.divergence:
            total = total - (weights.sum() * plain(z[None], z[None]).sum() + own) / 2
        (slope,) = torch.autograd.grad(total, z)
        return total.item(), slope.reshape(-1).cpu().numpy()

    from scipy.optimize import minimize  # slow to import

    start = init.detach().double().cpu().numpy().reshape(-1)
    found = minimize(
        objective, start, jac=True, method="L-BFGS-B", tol=tol, options={"maxiter": max_iter}
    )
    if not np.isfinite(found.fun):
        _refuse(found.fun, plain(init.to(batch).expand(k, *shape), batch, (whole, sizes)), loss)
    first = series if isinstance(series, Tensor) else series[0]
    return torch.from_numpy(np.ascontiguousarray(found.x)).reshape(shape).to(first)


def _stack(series: Tensor | Sequence[Tensor], lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """All series ``(k, n, d)`` in float64, and their lengths ``(k)``."""
    if isinstance(series, Sequence):
        got = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in series]
        features = {x[1] if isinstance(x, tuple) and len(x) == 2 else None for x in got}
        if lengths is not None or len(features) != 1 or None in features:
            raise ValueError(
                "barycenter: series must be (k, n, d), with or without lengths, or a list of "
                f"tensors (n, d) with one d, without lengths, got {got}."
            )
        lengths = torch.tensor([len(x) for x in series], device=series[0].device)
        series = torch.nn.utils.rnn.pad_sequence(list(series), batch_first=True)
    checks.scores("barycenter", "series", series, 3, "(k, n, d)")
    if series.dim() != 3:
        raise ValueError(f"barycenter: series must be (k, n, d), got {tuple(series.shape)}.")
    k, n, _ = series.shape
    sizes = (
        torch.full((k,), n, device="cpu")
        if lengths is None
        else checks.lengths("barycenter", lengths, series.device)
    )
    if sizes.shape != (k,):
        raise ValueError(f"barycenter: lengths must be ({k},), got {tuple(sizes.shape)}.")
    checks.values("barycenter", {}, {"lengths": checks.between(sizes, 1, n)})
    return series.double(), sizes.to(series.device)


def _refuse(total: float, losses: Tensor, loss: SoftDTW) -> None:
    """Says why the objective is not finite, given the losses ``(k)`` at the start."""
    blocked = (losses == torch.inf).nonzero()
    if loss.band == 0 and len(blocked):  # any other band leaves a path
        raise ValueError(
            f"barycenter: band=0 leaves no path between the average and series {int(blocked[0])}, "
            "which has another length. Use a band of at least 1."
        )
    raise ValueError(
        f"barycenter: the objective is {total} at the start. Series and init must be finite, and "
        "so must be the squares of their distances."
    )


def _mean(batch: Tensor, sizes: Tensor, length: int) -> Tensor:
    """The mean of the series, each stretched to a length by linear interpolation."""
    stretched = [
        torch.nn.functional.interpolate(
            x[:size].mT[None], length, mode="linear", align_corners=True
        )[0].mT
        for x, size in zip(batch, sizes.tolist(), strict=True)
    ]
    return torch.stack(stretched).mean(0)
