"""Alignments: soft-DTW and DTW against tslearn, CTC against torch's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import structmax as sx
from benchmarks.chains import _by_torch_struct
from benchmarks.common import torch_struct
from benchmarks.harness import Case, Contender, Trial, cases, installed, ours, peer, require_close
from structmax.compat.torch_struct import AlignmentCRF

Loss = Callable[[Tensor, Tensor], Tensor]


def soft_dtw(device: torch.device, batch: int, n: int, d: int, backward: bool = True) -> Trial:
    """The loss of two batches of series, and its gradient in the first."""
    x = torch.randn(batch, n, d, device=device, requires_grad=backward)
    y = torch.randn(batch, n, d, device=device)
    mine = sx.losses.SoftDTW()
    theirs = _tslearn() if device.type == "cpu" and installed("tslearn") else mine

    def step(loss: Loss) -> tuple[Tensor, ...]:
        value = loss(x, y)
        if not backward:
            return (value,)
        return value.detach(), torch.autograd.grad(value.sum(), x)[0]

    def agree() -> None:
        answer = step(mine)
        x64, y64 = x.detach().double().requires_grad_(), y.double()
        exact = mine(x64, y64)
        require_close("loss in float64", answer[0], exact, 1e-5)
        require_close("loss of tslearn", answer[0], step(theirs)[0], 1e-3)
        if backward:
            (gradient,) = torch.autograd.grad(exact.sum(), x64)
            require_close("gradient in float64", answer[1], gradient, 1e-4)
            # tslearn's has an error of 0.003 of its own at 400 steps, in float64 too
            require_close("gradient of tslearn", answer[1], step(theirs)[1], 2e-2)

    contenders = [ours("", partial(step, mine))]
    if device.type == "cpu":
        contenders.append(peer("tslearn, SoftDTWLossPyTorch", "tslearn", partial(step, theirs)))
    return Trial(contenders, agree)


def _tslearn() -> Loss:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tslearn.metrics import SoftDTWLossPyTorch
    return SoftDTWLossPyTorch(gamma=1.0)


def dtw(device: torch.device, batch: int, n: int, d: int) -> Trial:
    """The best path of two batches of series."""
    x, y = torch.randn(2, batch, n, d, device=device)

    def costs() -> Tensor:
        return torch.cdist(x, y).square()

    def mine(validate_args: bool | None = None) -> Tensor:
        return sx.Alignment(-costs(), validate_args=validate_args).argmax()

    def theirs() -> list[Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from tslearn.metrics import dtw_path
        pairs = zip(x.cpu().numpy(), y.cpu().numpy(), strict=True)
        return [dtw_path(one, other) for one, other in pairs]

    def agree() -> None:
        if installed("tslearn"):
            best = (costs() * mine()).sum((-1, -2))
            squares = torch.tensor([distance**2 for _, distance in theirs()], device=device)
            require_close("cost of the best path", best, squares, 1e-4)

    contenders = [ours("", mine), ours("validate_args=False", partial(mine, False))]
    return Trial([*contenders, peer("tslearn.dtw_path, item by item", "tslearn", theirs)], agree)


def ctc(device: torch.device, batch: int, t: int, v: int, s: int, backward: bool = True) -> Trial:
    """The loss of targets of s symbols among v, over t frames, and its gradient."""
    given = torch.randn(batch, t, v, device=device).log_softmax(-1)
    targets = torch.randint(1, v, (batch, s), device=device)
    frames, symbols = torch.full((batch,), t), torch.full((batch,), s)
    sizes = frames.to(device), symbols.to(device)

    def mine(scores: Tensor, validate_args: bool | None = None) -> Tensor:
        structure = sx.CTC(scores, targets, *sizes, validate_args=validate_args)
        return -structure.log_partition()

    def theirs(scores: Tensor) -> Tensor:
        return torch.nn.functional.ctc_loss(
            scores.transpose(0, 1), targets, frames, symbols, reduction="none"
        )

    def step(loss: Callable[[Tensor], Tensor], given: Tensor = given) -> tuple[Tensor, ...]:
        scores = given.detach().requires_grad_(backward)
        value = loss(scores)
        if not backward:
            return (value,)
        return value.detach(), torch.autograd.grad(value.sum(), scores)[0]

    def agree() -> None:
        answers = step(mine), step(theirs, given.double())  # in float32 it is off by 1e-3
        require_close("loss of torch", answers[0][0], answers[1][0], 1e-4)
        if backward:
            # torch's gradient is for scores that a softmax follows: it adds softmax(scores)
            slope = answers[1][1] - given.exp()
            require_close("gradient of torch", answers[0][1], slope, 1e-3)

    return Trial(
        [
            ours("", partial(step, mine)),
            ours("validate_args=False", partial(step, partial(mine, validate_args=False))),
            Contender("torch.nn.functional.ctc_loss", partial(step, theirs)),
        ],
        agree,
    )


def moves(device: torch.device, batch: int, n: int) -> Trial:
    """A and μ of paths by three kinds of moves; torch-struct needs the package genbmm for it."""
    potentials = torch.randn(batch, n, n, 3, device=device)

    @torch.no_grad()
    def mine(some: slice = slice(None)) -> tuple[Tensor, Tensor]:
        path = AlignmentCRF(potentials[some])
        mu = path.marginals
        return path.partition, mu

    def agree() -> None:
        if installed("genbmm") and installed("torch_struct"):
            value, mu = torch_struct("AlignmentCRF", potentials, slice(0, 4))
            for name, a, b in zip(["value", "marginals"], mine(slice(0, 4)), (value, mu)):
                require_close(f"{name} of torch-struct", a, b, 1e-3)

    theirs = _by_torch_struct(partial(torch_struct, "AlignmentCRF", potentials), True)
    if not installed("genbmm"):
        why = "needs genbmm, whose build needs a CUDA compiler"
        theirs = [Contender(c.name, None, c.kind, why) for c in theirs[:1]]
    return Trial([ours("compat.torch_struct", mine), *theirs], agree)


SERIES = {
    "small 4x20x1": "cpu cuda",
    "medium 16x100x1": "cpu cuda",
    "large 8x400x8": "cpu",
    "large 64x1024x16": "cuda",
}
FRAMES = {
    "small 4x30x20x8": "cpu cuda",
    "medium 16x100x50x20": "cpu cuda",
    "large 16x400x100x60": "cpu cuda",
}
CASES: dict[str, Case] = {
    **cases("soft-dtw", "soft-DTW and its gradient (batch, n, d)", soft_dtw, SERIES),
    **cases(
        "soft-dtw-value",
        "soft-DTW (batch, n, d)",
        partial(soft_dtw, backward=False),
        SERIES,
        "forward",
    ),
    **cases("dtw", "the best path of DTW (batch, n, d)", dtw, SERIES, "forward"),
    **cases("ctc", "CTC's loss and gradient (batch, frames, V, S)", ctc, FRAMES),
    **cases(
        "ctc-value",
        "CTC's loss (batch, frames, V, S)",
        partial(ctc, backward=False),
        FRAMES,
        "forward",
    ),
    **cases(
        "alignment", "log-partition and marginals of moves", moves, {"medium 16x40": "cpu cuda"}
    ),
}
