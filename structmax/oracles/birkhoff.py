"""Relaxations of linear assignment: Sinkhorn's and Bethe's, in plain torch and in log domain.

Scores are float64 ``(B, n, m)``; ``cells`` marks those that lie on some matching, ``spare (B, q)``
the columns (or rows, where they are more; q is the larger of n and m) that some matching leaves
out; ``rows`` and ``columns (B)`` are the sizes of the items.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from structmax import checks

RIDGE = 1e-12  # keeps a system regular whose entries underflow, far below what it changes
NEVER = -1e30  # stands for −inf where a difference of two must have a derivative


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, -math.inf)


def _log_sum(x: Tensor, dim: int) -> Tensor:
    """logsumexp; 0 where there is nothing to sum."""
    empty = (x == -math.inf).all(dim)
    safe = torch.where(empty.unsqueeze(dim), 0.0, x)
    return torch.where(empty, 0.0, safe.logsumexp(dim))


def _solve(matrix: Tensor, right: Tensor) -> Tensor:
    """``torch.linalg.solve``; of large systems on the CPU one by one, because torch 2.13 with two
    threads never returns from a batch of LU factorizations of 160 rows or more."""
    if matrix.device.type != "cpu" or matrix.shape[-1] <= 128 or not len(matrix):
        return torch.linalg.solve(matrix, right)
    return torch.stack([torch.linalg.solve(*pair) for pair in zip(matrix, right, strict=True)])


def _extended(
    scores: Tensor, cells: Tensor, spare: Tensor, rows: Tensor, columns: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores with a last row and a last column for what stays unmatched, and what each row and
    column sums to: 1, the number of unmatched ones for the last, 0 in the padding."""
    _, n, m = scores.shape
    x = torch.nn.functional.pad(_masked(scores, cells), (0, 1, 0, 1), value=-math.inf)
    mass = []
    for size, other, length in ((n, columns, rows), (m, rows, columns)):
        inside = torch.arange(size, device=scores.device) < length[:, None]
        mass.append(torch.cat([inside, (other - length).clamp(min=0)[:, None]], -1).double())
    wide, tall = (columns > rows)[:, None], (rows > columns)[:, None]
    slack_row = torch.where(wide & spare[:, :m], 0.0, -math.inf)
    slack_column = torch.where(tall & spare[:, :n], 0.0, -math.inf)
    last_row, last_column = torch.zeros(2, n + 1, m + 1, dtype=torch.bool, device=x.device)
    last_row[n, :m], last_column[:n, m] = True, True
    pad = torch.nn.functional.pad
    x = torch.where(last_row, pad(slack_row, (0, 1))[:, None, :], x)
    x = torch.where(last_column, pad(slack_column, (0, 1))[:, :, None], x)
    return x, mass[0], mass[1]


def sinkhorn(
    scores: Tensor,
    cells: Tensor,
    spare: Tensor,
    rows: Tensor,
    columns: Tensor,
    temperature: float,
    iterations: int,
    tol: float,
) -> Tensor:
    """P ``(B, n, m)`` = exp(θ/γ + f + g) with the sums that matchings have; see ``Assignment``.

    Given g, f normalises the rows. g is found without a gradient, by normalising the columns and
    by Newton steps on "columns sum to b", kept by the items which they bring closer: normalising
    makes its way from anywhere, but the last of it slowly. The temperature starts at the spread of
    the scores and is halved after each step, since cold problems are far from every start but the
    solution of one less cold. g then gets the gradient of the equations that define it: two Newton
    steps that move nothing but have the right first two derivatives.
    """
    theta, a, b = _extended(scores, cells, spare, rows, columns)
    log_a, log_b = (torch.where(t > 0, t, 1.0).log() for t in (a, b))

    def scaled(x: Tensor, g: Tensor) -> Tensor:
        f = log_a - _log_sum(x + g[:, None, :], -1)
        return (x + f[:, :, None] + g[:, None, :]).exp()

    def newton(p: Tensor) -> Tensor:
        share = p / torch.where(a > 0, a, 1.0)[:, :, None]
        slope = p.sum(-2).diag_embed() - p.mT @ share
        return _solve(slope + regular, b - p.sum(-2))

    def off(p: Tensor) -> Tensor:
        return (b - p.sum(-2)).abs().amax(-1)

    fixed = theta.detach()  # no_grad lets tangents of forward mode pass
    with torch.no_grad():
        # the slope is singular along the shifts of all columns that hang together, which change
        # nothing and may be fixed at will
        mask = (fixed > -math.inf).double()
        one = torch.eye(b.shape[-1], dtype=b.dtype, device=b.device)
        joined = one + mask.mT @ mask
        for _ in range(b.shape[-1].bit_length()):
            joined = (joined @ joined > 0).double()
        regular = joined + RIDGE * one
        known = torch.where(mask > 0, fixed, 0.0).flatten(1)
        warmth = (known.amax(-1) - known.amin(-1)).clamp(min=temperature)[:, None]
        g = torch.zeros_like(b)
        for _ in range(iterations):
            x = fixed / warmth[:, :, None]
            f = log_a - _log_sum(x + g[:, None, :], -1)
            g = log_b - _log_sum(x + f[:, :, None], -2)
            p = scaled(x, g)
            tried = g + newton(p)
            before, after = off(p), off(scaled(x, tried))
            g = torch.where((after < before)[:, None], tried, g)
            done = (warmth[:, 0] == temperature) & (torch.minimum(after, before) <= tol)
            if checks.can_look() and bool(done.all()):
                break
            colder = (warmth / 2).clamp(min=temperature)
            g, warmth = g * (warmth / colder), colder
    x = theta / temperature
    for _ in range(2):
        move = newton(scaled(x, g))
        g = g + (move - move.detach())
    return scaled(x, g)[:, :-1, :-1]


def _others(x: Tensor, dim: int) -> Tensor:
    """For each entry, logsumexp of the others along a dimension.

    Below the largest entry nothing cancels: its share of the sum is at most one half.
    """
    place = torch.arange(x.shape[dim], device=x.device).unsqueeze(-1 if dim == -2 else 0)
    largest = place == x.argmax(dim, keepdim=True)
    rest = torch.where(largest, NEVER, x).logsumexp(dim, keepdim=True)
    total = x.logsumexp(dim, keepdim=True)
    # the limit concerns the largest, and entries that are all NEVER: there log1p has no derivative
    share = (x - total).exp().clamp(max=0.75)
    return torch.where(largest, rest, total + torch.log1p(-share))


def bethe(
    scores: Tensor, cells: Tensor, rows: Tensor, columns: Tensor, iterations: int
) -> tuple[Tensor, Tensor]:
    """Beliefs ``(B, n, m)`` and Bethe's log-partition ``(B)`` at temperature 1.

    Messages are log-odds: to a cell from its row, −log Σ of the other cells of the row; from its
    column likewise, with a term 0 for "unmatched" on the longer side.
    """
    wide, tall = (columns > rows)[:, None, None], (rows > columns)[:, None, None]
    single_row = (cells.sum(-1, keepdim=True) == 1) & ~tall
    single_column = (cells.sum(-2, keepdim=True) == 1) & ~wide
    sure = cells & (single_row | single_column)
    open_ = cells & ~sure  # every row and column has at least two, or may stay unmatched
    theta = torch.where(open_, scores, 0.0)

    def to_cells(x: Tensor, dim: int, optional: Tensor) -> Tensor:
        total = _others(torch.where(open_, x, NEVER), dim)
        # not logaddexp, whose second derivative is wrong where one of them is NEVER
        or_none = torch.stack([total, torch.zeros_like(total)]).logsumexp(0)
        total = torch.where(optional, or_none, total)
        return torch.where(open_, -total, 0.0)

    from_column = torch.zeros_like(theta)
    from_row = to_cells(theta, -1, tall)
    for _ in range(iterations):
        from_column = to_cells(theta + from_row, -2, wide)
        from_row = to_cells(theta + from_column, -1, tall)
    odds = theta + from_row + from_column
    belief = torch.where(open_, odds.sigmoid(), sure.to(theta))
    yes, no = (torch.where(open_, torch.nn.functional.logsigmoid(s * odds), 0.0) for s in (1, -1))
    entropy = ((1 - belief) * no - belief * yes).sum((-2, -1))
    for x, dim, optional in ((from_row, -2, wide), (from_column, -1, tall)):
        total = torch.where(open_, theta + x, NEVER).logsumexp(dim)
        unmatched = -torch.nn.functional.softplus(total)  # log P(unmatched)
        usable = optional.squeeze(dim) & open_.any(dim)
        unmatched = torch.where(usable, unmatched, 0.0)
        entropy = entropy - (unmatched.exp() * unmatched).sum(-1)
    energy = torch.where(cells, belief * torch.where(cells, scores, 0.0), 0.0).sum((-2, -1))
    return belief, energy + entropy
