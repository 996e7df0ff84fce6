"""What estimators remember from call to call: buffers that hold their digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from structmax.primitive import untransformed, unwrapped


class Running(nn.Module):
    """A module whose buffers keep their dtype when the model's changes, as by ``half()``: costs
    may be too large for it, and steps too small.

    >>> Running().half()
    Running()
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keeping(t: Tensor) -> Tensor:
            new = fn(t)
            return new if new.dtype == t.dtype else t.to(new.device)

        return super()._apply(keeping, recurse)


class RunningMoments(Running):
    """Exponentially weighted mean and variance of the values of earlier calls, as buffers.

    The variance is that of all values, within calls and between them, so that it is right for one
    value a call too.

    >>> moments = RunningMoments(decay=0.5)
    >>> moments.mean().item()
    0.0
    >>> moments.update(torch.tensor([1.0, 3.0]))
    >>> moments.update(torch.tensor([5.0, 5.0]))
    >>> moments.mean().item()  # (½·2 + 5)/1½
    4.0
    >>> round(moments.variance().item(), 4)  # (½·((1 − 4)² + (3 − 4)²)/2 + (5 − 4)²)/1½
    2.3333
    """

    weight: Tensor
    total: Tensor
    spread: Tensor

    def __init__(self, decay: float = 0.9) -> None:
        super().__init__()
        self.decay = decay
        for name in ("weight", "total", "spread"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    def mean(self) -> Tensor:
        """0 before the first update."""
        return self.total / torch.where(self.weight > 0, self.weight, 1.0)

    def variance(self) -> Tensor:
        """That around ``mean()``; 0 before the first update."""
        return self.spread / torch.where(self.weight > 0, self.weight, 1.0)

    @torch.no_grad()
    def update(self, values: Tensor) -> None:
        """Adds the finite values of one call, which count as one however many they are; none, as
        of an empty batch, count nothing."""
        with untransformed():  # else what is kept would belong to a transform
            values = unwrapped(values).to(self.total.device, torch.float64)
            finite = values.isfinite()
            count = finite.sum()
            mean = torch.where(finite, values, 0.0).sum() / count
            spread = torch.where(finite, values - mean, 0.0).square().sum() / count
            weight = self.decay * self.weight.double()
            # to one mean from two: both spreads, and what lies between their means
            apart = (mean - self.mean().double()).square() * weight / (weight + 1)
            any_finite = count > 0
            for name, value in {"weight": 1.0, "total": mean, "spread": spread + apart}.items():
                old = getattr(self, name).double()
                setattr(self, name, torch.where(any_finite, self.decay * old + value, old))
