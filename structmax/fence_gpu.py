"""Results of wrong items made NaN on a GPU, where few items are wrong, and mostly none.

A program for each piece of an item reads whether the item is wrong, and writes only if it is: no
pass over the results, which would take as long as the kernels that wrote them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from structmax.launch import quick

PIECE = 4096  # numbers


@quick
@triton.jit
def _mark(X, WRONG, size, BLOCK: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    if tl.load(WRONG + b) != 0:
        i = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(X + b * size + i, float("nan"), mask=i < size)


def mark(result: Tensor, wrong: Tensor) -> Tensor:
    """Contiguous results ``(*batch, ...)``, NaN in place for the wrong items."""
    items = wrong.numel()
    if result.numel():
        size = result.numel() // items
        flags = wrong.reshape(-1).view(torch.uint8)
        with torch.cuda.device_of(result):
            _mark[(items, triton.cdiv(size, PIECE))](result, flags, size, BLOCK=PIECE)
    return result
