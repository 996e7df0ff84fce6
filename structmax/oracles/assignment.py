"""Linear assignment as torch functions: the best, the k best, and the best with each cell.

``scores (*B, n, m)`` with ``rows`` and ``columns (*B)``, the size of each item: every row gets a
column of its own, or every column a row of its own where rows are more. A matching is given by the
column of each row ``(*B, n)``, −1 for a row without one. Where there is no matching the score is
−inf, where a score is NaN or +inf it is NaN; the columns are then −1. On a GPU the best is found
there; the k best are found on the CPU, and copied there and back.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from torch import Tensor

from structmax.fence import fenced
from structmax.primitive import backend_for, register, to_front


def naive(scores: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """The best assignment of each item, by scipy."""
    from scipy.optimize import linear_sum_assignment

    best, z = (
        scores.new_full((len(scores),), -math.inf),
        torch.full(scores.shape[:2], -1, device="cpu"),
    )
    for b, (n, m) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
        item = scores[b, :n, :m].detach().cpu().double().numpy()
        if not (item < math.inf).all():
            best[b] = math.nan
            continue
        try:
            row, column = linear_sum_assignment(item, maximize=True)
        except ValueError:  # infeasible
            continue
        best[b] = item[row, column].sum()
        z[b, row] = torch.from_numpy(column)
    return best, z


def naive_kbest(scores: Tensor, rows: Tensor, columns: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of all matchings of each item, listed one by one."""
    best = scores.new_full((len(scores), k), -math.inf)
    z = torch.full((len(scores), k, scores.shape[1]), -1, device="cpu")
    for b, (n, m) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
        if not bool((scores[b, :n, :m] < math.inf).all()):
            best[b] = math.nan
            continue
        every = torch.tensor(matchings(n, m), device="cpu")  # (N, n)
        cells = scores[b, torch.arange(n, device="cpu"), every.clamp(min=0)].double()
        total = torch.where(every >= 0, cells, 0.0).sum(-1)
        order = total.sort(descending=True, stable=True).indices[: int((total > -math.inf).sum())]
        best[b, : len(order)] = total[order][:k].to(best)
        z[b, : len(order), :n] = every[order][:k]
    return best, z


def matchings(n: int, m: int) -> list[list[int]]:
    """Every matching of n rows and m columns: the column of each row, or −1."""
    if n <= m:
        return [list(columns) for columns in itertools.permutations(range(m), n)]
    every = np.full((math.perm(n, m), n), -1)
    for z, rows in zip(every, itertools.permutations(range(n), m), strict=True):
        z[list(rows)] = range(m)
    return every.tolist()


LONGEST_ON_GPU = 1024  # of the longer side: more do not fit into the registers of a program


def _flat(*tensors: Tensor) -> list[Tensor]:
    items = tensors[-1].numel()
    return [t.reshape(items, *t.shape[tensors[-1].dim() :]) for t in tensors]


# sides are those of the matrix at most
_sides_are_possible = fenced(
    [1, 2], lambda scores, *others: [(1, side) for side in scores.shape[-2:]]
)


@_sides_are_possible
def _run_argmax(scores: Tensor, rows: Tensor, columns: Tensor) -> list[Tensor]:
    given = _flat(scores, rows, columns)
    backend = backend_for(scores)
    if backend == "gpu" and max(scores.shape[-2:]) <= LONGEST_ON_GPU:
        from structmax.oracles import assignment_gpu

        best, z = assignment_gpu.argmax(*given)
    elif backend == "naive":
        best, z = naive(*(t.cpu() for t in given))
    else:
        from structmax.oracles import assignment_cpu

        best, z = assignment_cpu.argmax(*(t.cpu() for t in given))
    return [best.reshape(rows.shape).to(scores), z.reshape(scores.shape[:-1]).to(scores.device)]


@_sides_are_possible
def _run_kbest(scores: Tensor, rows: Tensor, columns: Tensor, k: int) -> list[Tensor]:
    theta, n_rows, n_columns = (t.cpu() for t in _flat(scores, rows, columns))
    if backend_for(scores) == "naive":
        best, z = naive_kbest(theta, n_rows, n_columns, k)
    else:
        from structmax.oracles import assignment_cpu

        best, z = assignment_cpu.kbest(theta, n_rows, n_columns, k)
    *batch, n, _ = scores.shape
    return [best.reshape(*batch, k).to(scores), z.reshape(*batch, k, n).to(scores.device)]


argmax = register(
    "assignment_argmax",
    "(Tensor scores, Tensor rows, Tensor columns) -> Tensor[]",
    _run_argmax,
    lambda scores, rows, columns: [
        scores.new_empty(scores.shape[:-2]),
        scores.new_empty(scores.shape[:-1], dtype=torch.int64),
    ],
)
kbest = register(
    "assignment_kbest",
    "(Tensor scores, Tensor rows, Tensor columns, int k) -> Tensor[]",
    _run_kbest,
    lambda scores, rows, columns, k: [
        scores.new_empty(*scores.shape[:-2], k),
        scores.new_empty(*scores.shape[:-2], k, scores.shape[-2], dtype=torch.int64),
    ],
)


def _register_vmap() -> None:
    def mapped(op):  # type: ignore[no-untyped-def]
        def rule(info, in_dims, scores, rows, columns, *rest):  # type: ignore[no-untyped-def]
            tensors = to_front([scores, rows, columns], in_dims[:3], info.batch_size)
            return op(*tensors, *rest), [0, 0]

        return rule

    for op in (argmax, kbest):
        torch.library.register_vmap(op, mapped(op))


_register_vmap()


def max_marginals(scores: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """The best score with each cell, ``(*B, n, m)``, and without each row or column.

    The second is ``(*B, q)`` for q the larger of n and m: the best score that leaves a column (or,
    where rows are more, a row) unmatched. −inf where there is none.

    With the item made square by rows (or columns) of zeros, let row i hold column c(i) in the best
    assignment. To give it c(k) loses w(i, k) = θ(i, c(i)) − θ(i, c(k)), and k must then find
    another column, until one takes c(i): the least loss is w(i, k) + the shortest way from k back
    to i under w, which has no negative cycles (Floyd, 1962).
    """
    *batch, n, m = scores.shape
    q = max(n, m)
    theta = torch.nn.functional.pad(scores.double(), (0, q - m, 0, q - n))
    at = torch.arange(q, device=scores.device)
    rows, columns = rows[..., None], columns[..., None]
    row, column = at < rows, at < columns  # (*B, q)
    side = at < torch.maximum(rows, columns)
    real = row[..., :, None] & column[..., None, :]
    square = side[..., :, None] & side[..., None, :]
    own = (at[:, None] == at) & ~side[..., None]  # beyond the item, each row has its own column
    theta = torch.where(real, theta, torch.where(square | own, 0.0, -math.inf))

    best, c = argmax(scores, rows[..., 0], columns[..., 0])
    c = torch.nn.functional.pad(c, (0, q - n), value=-1)
    matched = c >= 0
    taken = torch.zeros(*batch, q + 1, dtype=torch.bool, device=scores.device)
    taken = taken.scatter(-1, torch.where(matched, c, q), 1)[..., :q]
    # rows without a column get those that are left, in order
    c = torch.where(
        matched,
        c,
        torch.zeros_like(c).scatter(
            -1,
            matched.to(torch.uint8).argsort(dim=-1, stable=True),
            taken.to(torch.uint8).argsort(dim=-1, stable=True),
        ),
    )
    held = theta.gather(-1, c[..., None, :].expand_as(theta))  # (i, k): θ(i, c(k))
    loss = held.diagonal(dim1=-2, dim2=-1)[..., None] - held
    loss = torch.where(held == -math.inf, math.inf, loss)
    way = loss
    for k in range(q):
        way = torch.minimum(way, way[..., :, k, None] + way[..., None, k, :])
    value = best.double()[..., None, None] - (loss + way.mT)
    value = torch.where((best > -math.inf)[..., None, None], value, best.double()[..., None, None])
    value = torch.empty_like(value).scatter(-1, c[..., None, :].expand_as(value), value)
    spare = torch.where(square & ~row[..., :, None], value, -math.inf).amax(-2)
    other = torch.where(square & ~column[..., None, :], value, -math.inf).amax(-1)
    with_cell = torch.where(real, value, -math.inf)[..., :n, :m]
    return with_cell.to(scores.dtype), torch.maximum(spare, other)
