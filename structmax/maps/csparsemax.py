"""Csparsemax: sparsemax between bounds."""

from __future__ import annotations

from torch import Tensor

from structmax.maps import bounds
from structmax.maps.recipe import Map


def naive(x: Tensor, parameters: list[Tensor], options: list[float]) -> Tensor:
    """p = clip(x − τ, lower, upper)."""
    return bounds.naive(x, parameters, options, soft=False)


def naive_backward(
    p: Tensor, g: Tensor, parameters: list[Tensor], options: list[float]
) -> list[Tensor]:
    """The scores of free entries share what the bounds leave."""
    return bounds.naive_backward(p, g, parameters, soft=False)


_map = Map(
    "csparsemax",
    naive,
    naive_backward,
    {"upper": "element", "lower": "element", "scores": "element"},
    kernels="structmax.maps.{}_structured",
)


def csparsemax(
    x: Tensor,
    upper: Tensor | float,
    lower: Tensor | float | None = None,
    dim: int = -1,
    mask: Tensor | None = None,
) -> Tensor:
    """The nearest distribution to the scores with lower ≤ p ≤ upper; differentiable in all three.

        p = argmin over p in the simplex, lower ≤ p ≤ upper, of ‖p − x‖² = clip(x − τ, lower, upper)

    (Malaviya, Ferreira & Martins, "Sparse and constrained attention for neural machine
    translation", ACL 2018). Bounds broadcast to x; ``lower=None`` is 0, an upper bound of 1 or more
    is none. A bound has a gradient where p sits on it.

    ``mask`` broadcasts to x and is True at the entries to keep. The others, and scores of −inf, get
    exactly 0 and no gradient; bounds do not count there (but a score of −inf with a positive lower
    bound is an error). A row without any entry gets zeros. A row that allows no distribution (upper
    bounds that sum to less than 1, say) is an error; where values cannot be looked at, as in a
    compiled function, it gets NaN.

    >>> import torch
    >>> x = torch.tensor([1.0, 2.0, 3.0])
    >>> csparsemax(x, upper=torch.tensor([0.5, 0.5, 0.4]))
    tensor([0.1000, 0.5000, 0.4000])

    With lower bounds:

    >>> csparsemax(x, upper=0.6, lower=0.1)
    tensor([0.1000, 0.3000, 0.6000])
    """
    return bounds.answer(_map, x, upper, lower, dim, mask)
