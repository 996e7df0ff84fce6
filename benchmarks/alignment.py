"""Soft-DTW against tslearn: the loss and its gradient."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import structmax as sx
from benchmarks.cases import _case
from benchmarks.harness import Contender, Trial, installed, require_close

Loss = Callable[[Tensor, Tensor], Tensor]


def soft_dtw(device: torch.device, batch: int, n: int, d: int) -> Trial:
    """The loss of two batches of series and its gradient in the first."""
    x = torch.randn(batch, n, d, device=device, requires_grad=True)
    y = torch.randn(batch, n, d, device=device)
    ours = sx.losses.SoftDTW()
    peer = _tslearn() if device.type == "cpu" and installed("tslearn") else None

    def step(loss: Loss) -> tuple[Tensor, Tensor]:
        value = loss(x, y)
        return value.detach(), torch.autograd.grad(value.sum(), x)[0]

    def agree() -> None:
        value, slope = step(ours)
        exact = ours(x.detach().double(), y.double())
        require_close("loss in float64", value, exact, 1e-5)
        if peer is not None:
            their_value, their_slope = step(peer)
            require_close("loss of tslearn", value, their_value, 1e-4)
            require_close("gradient of tslearn", slope, their_slope, 1e-3)

    contenders = [Contender("structmax", partial(step, ours))]
    if device.type == "cpu":
        run = None if peer is None else partial(step, peer)
        contenders.append(Contender("tslearn, SoftDTWLossPyTorch", run))
    return Trial(contenders, agree)


def _tslearn() -> Loss:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tslearn.metrics import SoftDTWLossPyTorch
    return SoftDTWLossPyTorch(gamma=1.0)


LOSS = "soft-DTW and its gradient (batch, n, d)"
CASES = dict(
    [
        _case("soft-dtw-16x100", LOSS, "cpu cuda", soft_dtw, 16, 100, 1),
        _case("soft-dtw-64x1024", LOSS, "cuda", soft_dtw, 64, 1024, 16),
    ]
)
