"""Scores with strides, such as a slice of a larger tensor: as fast as contiguous ones, but for the
copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import structmax as sx
from benchmarks.harness import Case, Contender, Trial, cases, ours, require_close


def _trial(run: Callable[[Tensor], Tensor], sliced: Tensor) -> Trial:
    """The same work with a slice, with a contiguous copy of it, and the copy alone."""
    whole = sliced.contiguous()

    def agree() -> None:
        require_close("answers with and without strides", run(sliced), run(whole), 1e-6)

    room = torch.empty_like(whole)
    contenders = [
        ours("contiguous", partial(run, whole)),
        ours("with strides", partial(run, sliced)),
        Contender("copy of the slice", partial(room.copy_, sliced), "yardstick"),
    ]
    return Trial(contenders, agree)


def chain(device: torch.device, batch: int, n: int, c: int) -> Trial:
    """Marginals of edges, where transitions of the first step are cut off."""
    unary = torch.randn(batch, n, c, device=device)
    transition = torch.randn(batch, n, c, c, device=device)
    return _trial(lambda t: sx.LinearChain(unary, t).edge_marginals(), transition[:, 1:])


def rows(device: torch.device, count: int, n: int) -> Trial:
    """Every other score of each row."""
    return _trial(sx.sparsemax, torch.randn(count, 2 * n, device=device)[:, ::2])


CASES: dict[str, Case] = {
    **cases(
        "chain-strides",
        "edge marginals of a chain, of sliced transitions",
        chain,
        {"medium 32x64x32": "cpu cuda"},
        "forward",
    ),
    **cases(
        "map-strides",
        "sparsemax of every other score",
        rows,
        {"medium 1024x1024": "cpu cuda"},
        "forward",
    ),
}
