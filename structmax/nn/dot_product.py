"""Scaled dot-product attention with any map in the place of softmax."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from structmax.maps.argmax import argmax
from structmax.maps.budgetmax import budgetmax, check_k
from structmax.maps.csoftmax import csoftmax
from structmax.maps.csparsemax import csparsemax
from structmax.maps.entmax import check_alpha, entmax
from structmax.maps.fusedmax import check_strength, fusedmax
from structmax.maps.normmax import check_alpha as check_norm_alpha
from structmax.maps.normmax import normmax
from structmax.maps.oscarmax import oscarmax
from structmax.maps.softmax import softmax
from structmax.maps.sparsemax import sparsemax

# Each map, and its options: whether each of them must be given.
MAPS: dict[str, tuple[Callable[..., Tensor], dict[str, bool]]] = {
    "softmax": (softmax, {}),
    "sparsemax": (sparsemax, {}),
    "entmax": (entmax, {"alpha": False}),
    "normmax": (normmax, {"alpha": True}),
    "budgetmax": (budgetmax, {"k": True}),
    "fusedmax": (fusedmax, {"strength": True}),
    "oscarmax": (oscarmax, {"strength": True}),
    "csoftmax": (csoftmax, {"upper": True, "lower": False}),
    "csparsemax": (csparsemax, {"upper": True, "lower": False}),
    "argmax": (argmax, {}),
}
# What validates a number that does not depend on the scores.
CHECKS: dict[tuple[str, str], Callable[[str, Any], object]] = {
    ("entmax", "alpha"): check_alpha,
    ("normmax", "alpha"): check_norm_alpha,
    ("budgetmax", "k"): check_k,
    ("fusedmax", "strength"): check_strength,
    ("oscarmax", "strength"): check_strength,
}


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    map: str = "softmax",
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention: p = map(scale · q kᵀ + bias), and p v.

    Args:
        query, key, value: ``(*B, n, d)``, ``(*B, m, d)`` and ``(*B, m, c)``; batch dimensions, such
            as heads, broadcast
        map: softmax, sparsemax, entmax, normmax, budgetmax, fusedmax, oscarmax, csoftmax,
            csparsemax or argmax (which gives no gradient to query and key)
        mask: booleans that broadcast to ``(*B, n, m)``, True at the keys to keep. A query without
            any key gets zeros, as weights and as output.
        bias: added to the scores; broadcasts to ``(*B, n, m)``, and −inf forbids a key
        causal: query i sees the keys up to the i-th, as in torch
        scale: 1/√d unless given
        dropout: the probability of dropping a weight on its way to the output
        options: of the map: ``alpha``, ``k``, ``strength``, ``upper``, ``lower``

    Returns:
        the output ``(*B, n, c)`` and the weights ``(*B, n, m)``, these before dropout

    >>> query, key = torch.tensor([[1.0, 0.0]]), torch.tensor([[3.0, 0.0], [2.0, 1.0], [0.0, 9.0]])
    >>> value = torch.tensor([[1.0], [10.0], [100.0]])
    >>> output, weights = attend(query, key, value, "sparsemax")
    >>> weights
    tensor([[0.8536, 0.1464, 0.0000]])
    >>> output
    tensor([[2.3180]])
    >>> attend(query, key, value, "entmax", alpha=1.5, causal=True)[1]
    tensor([[1., 0., 0.]])
    """
    function = find_map("attend", map, options)
    _check(query, key, value)
    n, m = query.shape[-2], key.shape[-2]
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * scale) @ key.transpose(-1, -2)  # scaled first: half precision overflows less
    if bias is not None:
        _check_bias("attend", bias)
        _check_fits("bias", bias, scores.shape)
        scores = scores + bias.to(scores.dtype)
    if mask is not None:
        check_mask("attend", mask)
        _check_fits("mask", mask, scores.shape)
    if causal:
        past = torch.ones(n, m, dtype=torch.bool, device=scores.device).tril()
        mask = past if mask is None else mask & past
    weights = function(scores, mask=mask, **options)
    kept = torch.nn.functional.dropout(weights, dropout) if dropout else weights
    return kept @ value, weights


def find_map(
    owner: str, name: str, options: Iterable[str], later: Iterable[str] = ()
) -> Callable[..., Tensor]:
    """The map of that name, once its options are right; some may be given ``later``."""
    if name not in MAPS:
        near = difflib.get_close_matches(str(name), MAPS, n=1, cutoff=0.5)
        hint = f' Did you mean "{near[0]}"?' if near else ""
        raise ValueError(f"{owner}: there is no map {name!r}.{hint} Maps: {', '.join(MAPS)}.")
    function, known = MAPS[name]
    for option in options:
        if option not in known:
            takes = f"takes {', '.join(known)}" if known else "takes no options"
            raise ValueError(f'{owner}: map="{name}" {takes}, got {option}.')
    for option, needed in known.items():
        if needed and option not in options and option not in later:
            raise ValueError(f'{owner}: map="{name}" needs {option}=…')
    return function


def check_map(owner: str, name: str, options: Mapping[str, Any], later: Iterable[str] = ()) -> None:
    """An error where a map or its numbers cannot be right whatever the scores; see ``find_map``."""
    find_map(owner, name, options, later)
    for option, value in options.items():
        if (name, option) in CHECKS:
            CHECKS[name, option](f'{owner}: map="{name}"', value)


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    shapes = [tuple(t.shape) for t in (query, key, value)]
    fits = min(len(shape) for shape in shapes) >= 2
    if not fits or query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise ValueError(
            "attend: query, key and value must be (*B, n, d), (*B, m, d) and (*B, m, c), got "
            f"{shapes[0]}, {shapes[1]} and {shapes[2]}."
        )
    try:
        torch.broadcast_shapes(*(shape[:-2] for shape in shapes))
    except RuntimeError:
        raise ValueError(
            "attend: the batch dimensions of query, key and value, such as heads, must broadcast, "
            f"got {shapes[0]}, {shapes[1]} and {shapes[2]}.{_grouped(shapes)}"
        ) from None


def _grouped(shapes: list[tuple[int, ...]]) -> str:
    """How to give keys that several heads share."""
    if min(map(len, shapes)) < 3 or shapes[1][-3] != shapes[2][-3]:
        return ""
    (*_, heads, _, _), (*_, groups, _, _), _ = shapes
    if groups < 2 or heads % groups or heads == groups:
        return ""
    return (
        f" Where {heads // groups} heads share keys and values use "
        f"key.repeat_interleave({heads // groups}, -3), and value likewise."
    )


def check_mask(owner: str, mask: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise ValueError(
            f"{owner}: mask must be boolean (True = keep), got {mask.dtype}. What is added to the "
            "scores goes to bias=."
        )


def _check_bias(owner: str, bias: Tensor) -> None:
    if not bias.is_floating_point():
        raise ValueError(
            f"{owner}: bias must be floating point, got {bias.dtype}. Booleans go to mask=."
        )


def _check_fits(name: str, tensor: Tensor, shape: torch.Size) -> None:
    missing = len(shape) - tensor.dim()
    if missing < 0 or any(a not in (1, b) for a, b in zip(tensor.shape, shape[missing:])):
        raise ValueError(
            f"attend: {name} must broadcast to the scores' shape {tuple(shape)}, got "
            f"{tuple(tensor.shape)}."
        )
