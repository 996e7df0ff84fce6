"""Shortest paths in a grid, from the first cell to the last, as a torch function.

``grid_path(scores, neighbours)`` takes scores of cells ``(*B, h, w)`` that are −costs, so at most
0, and returns the score of the best path ``(*B)`` and the indicator of its cells ``(*B, h, w)``;
among equals, a path of the fewest cells. Where there is no path the score is −inf, where a score is
positive or NaN it is NaN; the cells are then NaN. It runs on the CPU: other tensors are copied
there and back.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from structmax.primitive import backend_for, register, to_front


def moves(neighbours: int) -> list[tuple[int, int]]:
    """The steps to the 4 or 8 neighbours of a cell."""
    steps = [(r, c) for r in (-1, 0, 1) for c in (-1, 0, 1) if (r, c) != (0, 0)]
    return steps if neighbours == 8 else [(r, c) for r, c in steps if r == 0 or c == 0]


def naive(scores: Tensor, neighbours: int) -> tuple[Tensor, Tensor]:
    """The definition, in plain torch: best[k, v] over walks of k + 1 cells that end in v."""
    _, h, w = scores.shape
    theta = scores.double()
    best = torch.full_like(theta, -math.inf)
    best[:, 0, 0] = theta[:, 0, 0]
    table = [best]
    for _ in range(1, h * w):
        wide = torch.nn.functional.pad(table[-1], (1, 1, 1, 1), value=-math.inf)
        before = [wide[:, 1 - r : 1 - r + h, 1 - c : 1 - c + w] for r, c in moves(neighbours)]
        table.append(theta + torch.stack(before).amax(0))
    best = torch.stack(table, 1)  # (items, h w, h, w)
    z = torch.full_like(scores, math.nan)
    value = best[:, :, -1, -1].amax(-1)
    value = torch.where((scores <= 0).flatten(1).all(-1), value, math.nan)
    for item in (value > -math.inf).nonzero().flatten().tolist():
        k, r, c = int(best[item, :, -1, -1].argmax()), h - 1, w - 1
        z[item] = 0
        z[item, r, c] = 1
        while k:
            k -= 1
            back = [(r - dr, c - dc) for dr, dc in moves(neighbours)]
            inside = [(y, x) for y, x in back if 0 <= y < h and 0 <= x < w]
            r, c = max(inside, key=lambda cell: best[item, k, cell[0], cell[1]].item())
            z[item, r, c] = 1
    return value.to(scores.dtype), z


def _run(scores: Tensor, neighbours: int) -> list[Tensor]:
    *batch, h, w = scores.shape
    flat = scores.reshape(torch.Size(batch).numel(), h, w)
    if backend_for(scores) == "naive":
        value, z = naive(flat, neighbours)
    else:
        from structmax.oracles import graph_cpu

        value, z = graph_cpu.grid_path(flat.cpu(), neighbours == 8)
    return [value.reshape(batch).to(scores.device), z.reshape(scores.shape).to(scores.device)]


grid_path = register(
    "grid_path",
    "(Tensor scores, int neighbours) -> Tensor[]",
    _run,
    lambda scores, neighbours: [scores.new_empty(scores.shape[:-2]), torch.empty_like(scores)],
)


def _mapped(info, in_dims, scores, neighbours):  # type: ignore[no-untyped-def]
    return grid_path(*to_front([scores], in_dims[:1], info.batch_size), neighbours), [0, 0]


torch.library.register_vmap(grid_path, _mapped)
