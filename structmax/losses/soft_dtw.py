"""The smoothed dynamic time warping of two series."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from structmax import checks
from structmax.forest.grid import ops as dense
from structmax.primitive import backend_for, is_mapped
from structmax.smoothing import Shannon, Smoothing
from structmax.structures.alignment import Alignment
from structmax.structures.lengths import full


class SoftDTW(torch.nn.Module):
    """minΩ over alignments of two series of the sum of squared distances, differentiable.

    With the cost of aligning two elements c(i, j) = ‖xᵢ − yⱼ‖², the loss of each item is

        D(x, y) = −DP_Ω(−c),

    the smoothed value of an :class:`structmax.Alignment` of kind ``"dtw"`` (Cuturi & Blondel,
    2017): under Shannon −γ log Σ exp(−cost/γ) over all paths, under Hard the least cost. Its
    gradient is an expected alignment. D(x, x) is not zero and D may be negative; the divergence

        D(x, y) − ½ D(x, x) − ½ D(y, y)

    is zero for equal series and, under Shannon, never negative (Blondel, Mensch & Vert, 2021).
    First and second derivatives are exact.

    Nothing of size n·m·d is made. With several features, distances are a matrix product,
    ‖x‖² + ‖y‖² − 2⟨x, y⟩, of series that are centred first, in float64 whatever their dtype, so
    that what cancels leaves an error of 1e-16 of the squared spread of the series.

    Args:
        gamma: γ of Shannon's entropy
        omega: another Ω, such as ``sx.Gini(gamma)`` or ``sx.Hard()``
        divergence: subtract half the losses of each series with itself
        band: see :class:`structmax.Alignment`; the loss is +inf, with a gradient of zero, where it
            leaves no path, as 0 does for most series of different lengths; 1 always leaves one

    Shape: ``forward(x, y, lengths=None)`` takes x ``(*B, n, d)`` and y ``(*B, m, d)``, and as
    lengths a pair of ``(*B)``; it returns ``(*B)``. A batch of series of numbers is
    ``x[..., None]``, one series of several features ``x[None]``: two dimensions alone may mean
    either and are an error.

    >>> import structmax as sx
    >>> x = torch.tensor([[0.0], [0.0], [1.0], [2.0]])
    >>> y = torch.tensor([[0.0], [1.0], [1.0], [2.0]])
    >>> sx.losses.SoftDTW(omega=sx.Hard())(x, y)
    tensor(0.)
    >>> sx.losses.SoftDTW()(x, y)
    tensor(-2.0339)
    >>> divergence = sx.losses.SoftDTW(divergence=True)
    >>> divergence(x, y), divergence(x, x)
    (tensor(0.4937), tensor(0.))
    """

    def __init__(
        self,
        gamma: float = 1.0,
        omega: Smoothing | None = None,
        divergence: bool = False,
        band: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(omega, Smoothing | None):
            raise ValueError(
                f"SoftDTW: omega must be one of sx.Hard, sx.Shannon, sx.Gini, sx.Tsallis, got "
                f"{omega!r}. What other libraries call normalize is divergence=True."
            )
        if omega is not None and gamma != 1.0:
            raise ValueError(
                f"SoftDTW: gamma={gamma} and omega={omega} exclude each other. Give gamma to omega."
            )
        if band is not None and (isinstance(band, bool) or not isinstance(band, int) or band < 0):
            raise ValueError(f"SoftDTW: band must be an integer of at least 0, got {band!r}.")
        self.omega = Shannon(gamma) if omega is None else omega
        self.divergence, self.band = divergence, band

    def extra_repr(self) -> str:
        return f"omega={self.omega}, divergence={self.divergence}, band={self.band}"

    def forward(self, x: Tensor, y: Tensor, lengths: tuple[Tensor, Tensor] | None = None) -> Tensor:
        checks.scores("SoftDTW", "x", x, 2, "(..., n, d)")
        checks.scores("SoftDTW", "y", y, 2, "(..., m, d)")
        if x.shape[-1] != y.shape[-1]:
            raise ValueError(
                f"SoftDTW: x and y must have as many features, got {tuple(x.shape)} and "
                f"{tuple(y.shape)}. A series of numbers is (n, 1)."
            )
        checks.same_device("SoftDTW", x=x, y=y)
        self._check_meaning(x, y, lengths)
        dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
        if not torch.compiler.is_compiling():
            batch = checks.batch_shape("SoftDTW", x=(x, 2), y=(y, 2))
            cells = batch.numel() * x.shape[-2] * y.shape[-2]
            what = f"the distances of {tuple(x.shape)} and {tuple(y.shape)}"
            checks.room("SoftDTW", what, 3 * cells * dtype.itemsize, x.device)
        rows, columns = (None, None) if lengths is None else self._lengths(x, y, lengths)
        x, y = _padded(x.to(dtype), rows), _padded(y.to(dtype), columns)
        loss = self._loss(x, y, rows, columns)
        if self.divergence:
            own = self._loss(x, x, rows, rows) + self._loss(y, y, columns, columns)
            loss = loss - own / 2
        if loss.device.type == "cpu" and checks.can_look() and not bool(loss.isfinite().all()):
            _refuse({"x": x, "y": y})
        return loss

    @staticmethod
    def _check_meaning(x: Tensor, y: Tensor, lengths: Any) -> None:
        """Refuses two dimensions that may be a batch of series of numbers or one of vectors."""
        if x.dim() > 2 or y.dim() > 2 or x.shape[-1] == 1 or is_mapped():
            return
        if isinstance(lengths, tuple | list) and all(
            torch.as_tensor(n).dim() == 0 for n in lengths
        ):
            return  # of one series
        raise ValueError(
            f"SoftDTW: x {tuple(x.shape)} and y {tuple(y.shape)} may be a batch of series of "
            f"numbers, or one series of {x.shape[-1]} features. Use x[..., None] and y[..., None] "
            "(a batch), or x[None] and y[None] (one series)."
        )

    def _lengths(self, x: Tensor, y: Tensor, lengths: Any) -> list[Tensor]:
        if not isinstance(lengths, tuple | list) or len(lengths) != 2:
            raise ValueError(
                f"SoftDTW: lengths must be a pair, of x and of y, got {type(lengths).__name__}."
            )
        pair = [checks.lengths("SoftDTW", given, x.device) for given in lengths]
        checks.same_device("SoftDTW", x=x, lengths_of_x=pair[0], lengths_of_y=pair[1])
        checks.batch_shape(
            "SoftDTW", x=(x, 2), y=(y, 2), lengths_of_x=(pair[0], 0), lengths_of_y=(pair[1], 0)
        )
        if checks.can_look():
            sides = {
                "lengths of x": checks.between(pair[0], 1, x.shape[-2]),
                "lengths of y": checks.between(pair[1], 1, y.shape[-2]),
            }
            checks.values("SoftDTW", {}, sides)
        return pair

    def _loss(self, x: Tensor, y: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
        """−DP_Ω(−c) of series whose padding holds numbers."""
        lengths = None if rows is None or columns is None else (rows, columns)
        known = lengths is None or checks.can_look()  # bad lengths were refused
        # of vectors, the op below makes derivatives in both series: on a CPU that takes longer than
        # to keep cells until one is asked for
        fit = x.shape[-1] == 1 or backend_for(x) == "gpu"
        if fit and known and dense.knows(self.omega.code):
            return 0.0 - self._dense(x, y, lengths)  # no −0
        scores = dense.theta_of([x, y]).to(x.dtype)
        alignment = Alignment(
            scores, lengths, band=self.band, smoothing=self.omega, validate_args=False
        )
        return 0.0 - alignment.log_partition()

    def _dense(self, x: Tensor, y: Tensor, lengths: tuple[Tensor, Tensor] | None) -> Tensor:
        """DP_Ω(−c) by kernels that know this Ω."""
        batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        if lengths is None:
            sizes = [full(batch, t.shape[-2], t.device) for t in (x, y)]
        else:
            batch = torch.broadcast_shapes(batch, *(t.shape for t in lengths))
            sizes = [t.long().expand(batch) for t in lengths]
        scores = [t.expand(*batch, *t.shape[-2:]) for t in (x, y)]
        return dense.series.value(scores, sizes, dense.key_of(self.band), self.omega.code)


def _padded(x: Tensor, lengths: Tensor | None) -> Tensor:
    """x with zeros in the padding, which may hold anything."""
    if lengths is None:
        return x
    inside = torch.arange(x.shape[-2], device=x.device) < lengths[..., None]
    return torch.where(inside[..., None], x, 0.0)


def _refuse(series: dict[str, Tensor]) -> None:
    """Says so where a series is not finite. Else +inf is right: a band leaves no path."""
    for name, tensor in series.items():
        bad = ~tensor.isfinite()
        if bool(bad.any()):
            where = tuple(bad.nonzero()[0].tolist())
            raise ValueError(
                f"SoftDTW: {name}{list(where)} is {tensor[where].item()}. Series must be finite; "
                "use lengths for series that end early."
            )
