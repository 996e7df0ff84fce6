"""Every map, ``entmax_loss`` and ``SoftDTW`` × every attack on their scores.

The truth is the naive backend in float64, in clean memory, row by row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attacks import _every_other, _transposed
from queries import close
from test_adversarial import is_clear
from torch import Tensor

import structmax as sx

inf, nan, f32, f64 = math.inf, math.nan, torch.float32, torch.float64
n = 6


def bounds(x: Tensor) -> Tensor:
    return torch.linspace(0.2, 0.9, x.shape[-1]).to(x.dtype) if x.shape[-1] > 1 else x.new_ones(1)


def class_loss(alpha: float) -> Callable[[Tensor], Tensor]:
    def loss(x: Tensor) -> Tensor:
        best = x.detach().argmax(-1) if x.numel() else torch.zeros(x.shape[:-1], dtype=torch.long)
        return sx.losses.entmax_loss(x, best, alpha, reduction="none")

    return loss


def align(omega: sx.Smoothing) -> Callable[[Tensor], Tensor]:
    """A series against itself, later by one; distances, so differences of the scores."""
    return lambda x: sx.losses.SoftDTW(omega=omega)(x[..., None], x.roll(1, -1)[..., None])


MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": sx.softmax,
    "sparsemax": sx.sparsemax,
    "entmax-1": lambda x: sx.entmax(x, 1.0),
    "entmax-1.2": lambda x: sx.entmax(x, 1.2),
    "entmax-1.5": lambda x: sx.entmax(x, 1.5),
    "entmax-3": lambda x: sx.entmax(x, 3.0),
    "normmax-2": lambda x: sx.normmax(x, 2.0),
    "budgetmax-1": lambda x: sx.budgetmax(x, 1),
    "fusedmax": lambda x: sx.fusedmax(x, 0.3),
    "oscarmax": lambda x: sx.oscarmax(x, 0.05),
    "csoftmax": lambda x: sx.csoftmax(x, bounds(x)),
    "csparsemax": lambda x: sx.csparsemax(x, bounds(x)),
    "smoothed_max-shannon": lambda x: sx.smoothed_max(x, sx.Shannon(0.5)),
    "smoothed_max-gini": lambda x: sx.smoothed_max(x, sx.Gini()),
    "smoothed_max-tsallis": lambda x: sx.smoothed_max(x, sx.Tsallis(1.5)),
    "smoothed_max-hard": lambda x: sx.smoothed_max(x, sx.Hard()),
    "entmax_loss-1": class_loss(1.0),
    "entmax_loss-1.5": class_loss(1.5),
    "entmax_loss-2": class_loss(2.0),
    "soft-dtw": align(sx.Shannon()),
    "soft-dtw-gini": align(sx.Gini()),
}
DISTANCES = {"soft-dtw", "soft-dtw-gini"}  # −inf is no value of a series


def base() -> Tensor:
    x = torch.randn(3, n, generator=torch.Generator().manual_seed(0), dtype=f64)
    return (x * 64).round() / 64


def forbidden(keep: int) -> Tensor:
    x = base()
    x[:, keep:] = -inf
    return x


ROWS: dict[str, Callable[[], Tensor]] = {
    "plain": base,
    "shift+1e4": lambda: base() + 1e4,
    "shift-1e4": lambda: base() - 1e4,
    "shift+1e4-float32": lambda: (base() + 1e4).to(f32),
    "spread-1e-6": lambda: base() * 1e-6,
    "spread-1e3-float32": lambda: (base() * 1e3).to(f32),
    "spread-1e6": lambda: base() * 1e6,
    "spread-1e6-float32": lambda: (base() * 1e6).to(f32),
    "ties": lambda: torch.zeros(3, n, dtype=f64),
    "ties-float32": lambda: torch.full((3, n), 0.1, dtype=f32),
    "one-is-allowed": lambda: forbidden(1),
    "some-are-allowed": lambda: forbidden(3),
    "none-is-allowed": lambda: forbidden(0),
    "one-entry": lambda: base()[:, :1],
    "no-rows": lambda: base()[:0],
    "float32": lambda: base().to(f32),
    "float16": lambda: base().half(),
    "bfloat16": lambda: base().bfloat16(),
    "every-other-element": lambda: _every_other(base()),
    "transposed": lambda: _transposed(base()),
    "expanded": lambda: base()[:1].expand(3, n),
    "expanded-entries": lambda: base()[:, :1].expand(3, n),
    "no-entries": lambda: base()[:, :0],
    "integers": lambda: base().long(),
}
REFUSED = {"no-entries", "integers"}


def answer(function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """The answer and, where it has one, a gradient."""
    leaf = x.detach().requires_grad_(x.is_floating_point())
    p = function(leaf)
    out = [p.detach()]
    if p.requires_grad:
        w = torch.linspace(0.5, 1.5, x.shape[-1]).to(p.dtype) if p.shape == x.shape else 1.0
        kept = torch.where(p.detach().isfinite(), p, 0.0)
        out += torch.autograd.grad((kept * w).sum(), leaf)
    return out


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", MAPS)
def test_map(name: str, row: str, record_property: Callable[[str, Any], None]) -> None:
    x, function = ROWS[row](), MAPS[name]
    message = None
    try:
        found = answer(function, x)
    except (ValueError, TypeError, RuntimeError) as error:
        message = error
    refuses = row in REFUSED or (row == "none-is-allowed" and "csoft" not in name)
    if message is not None:
        bounded = "allowed" in row and name in ("csoftmax", "csparsemax", *DISTANCES)
        assert refuses or bounded, f"{type(message).__name__}: {message}"
        assert is_clear(message), f"{type(message).__name__}: {message}"
        record_property("refused", 1)
        return
    assert row not in REFUSED, "it was taken"
    with sx.backend("naive"):
        rows = [answer(function, r.double().clone()) for r in x]
    expected = [torch.stack(column) for column in zip(*rows)] if rows else found
    half = x.dtype.itemsize < 4
    scale = float(torch.where(x.isfinite(), x, 0.0).abs().max()) if x.numel() else 0.0
    eps = torch.finfo(x.dtype).eps
    distance = scale * scale if name in DISTANCES else scale
    value = 1e-9 + 20 * eps * (1 if found[0].shape == x.shape else 1 + distance)
    for a, b, tolerance in zip(found, expected, (value, value * (1 + scale))):
        assert not bool(a.isnan().any()), f"NaN in {a}"
        exact = "spread" not in row or not half
        close(a, b, tolerance * (1 if exact else 10) + (1e-5 if x.dtype == f32 else 0), f"{name}")
    if row == "plain":
        with torch.inference_mode():
            close(function(x.clone()), expected[0], 1e-9, "in inference mode")
        leaf = x.clone().requires_grad_()
        total = function(leaf).square().sum()
        total.backward()
        with pytest.raises(RuntimeError, match="a second time"):
            total.backward()
        close(function(leaf), expected[0], 1e-9, "after a graph was freed")
        record_property("right", 2)
    record_property("right", 1)
