"""Imported with the JIT off, where kernels run as Python: they count on C's answers at the edges of
``exp``, ``log`` and ``sqrt``, where Python raises errors."""

from __future__ import annotations

import math
import os
from collections.abc import Callable


def like_c(function: Callable[..., float]) -> Callable[..., float]:
    def quiet(x: float, *base: float) -> float:
        try:
            return function(x, *base)
        except OverflowError:
            return math.inf
        except ValueError:
            return -math.inf if x == 0 else math.nan

    return quiet


if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
    for name in ("exp", "expm1", "log", "sqrt"):
        setattr(math, name, like_c(getattr(math, name)))
