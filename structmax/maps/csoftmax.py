"""Csoftmax: softmax between bounds."""

from __future__ import annotations

from torch import Tensor

from structmax.maps import bounds
from structmax.maps.recipe import Map


def naive(x: Tensor, parameters: list[Tensor], options: list[float]) -> Tensor:
    """p = clip(exp(x − τ), lower, upper)."""
    return bounds.naive(x, parameters, options, soft=True)


def naive_backward(
    p: Tensor, g: Tensor, parameters: list[Tensor], options: list[float]
) -> list[Tensor]:
    """The scores of free entries share what the bounds leave."""
    return bounds.naive_backward(p, g, parameters, soft=True)


_map = Map(
    "csoftmax",
    naive,
    naive_backward,
    {"upper": "element", "lower": "element", "scores": "element"},
    kernels="structmax.maps.{}_structured",
)


def csoftmax(
    x: Tensor,
    upper: Tensor | float,
    lower: Tensor | float | None = None,
    dim: int = -1,
    mask: Tensor | None = None,
) -> Tensor:
    """Softmax with lower ≤ p ≤ upper; differentiable in the scores and in both bounds.

        p = argmax over p in the simplex, lower ≤ p ≤ upper, of ⟨p, x⟩ − Σ p log p
          = clip(exp(x − τ), lower, upper), with the τ that makes Σ p = 1

    This is the distribution between the bounds that is nearest to softmax(x) in Kullback–Leibler
    divergence (Martins & Kreutzer, "Learning what's easy: fully differentiable neural easy-first
    taggers", EMNLP 2017). Bounds broadcast to x; ``lower=None`` is 0, an upper bound of 1 or more
    is none. A bound has a gradient where p sits on it.

    ``mask`` broadcasts to x and is True at the entries to keep. The others, and scores of −inf, get
    exactly 0 and no gradient; bounds do not count there (but a score of −inf with a positive lower
    bound is an error). A row without any entry gets zeros. A row that allows no distribution (upper
    bounds that sum to less than 1, say) is an error; where values cannot be looked at, as in a
    compiled function, it gets NaN.

    >>> import torch
    >>> x = torch.tensor([1.0, 2.0, 3.0])
    >>> csoftmax(x, upper=torch.tensor([0.5, 0.5, 0.4]))
    tensor([0.1614, 0.4386, 0.4000])

    With lower bounds:

    >>> csoftmax(x, upper=0.6, lower=0.15)
    tensor([0.1500, 0.2500, 0.6000])
    """
    return bounds.answer(_map, x, upper, lower, dim, mask)
