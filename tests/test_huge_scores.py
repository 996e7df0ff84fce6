"""Scores of any finite size: masks such as finfo.min and −1e30, and forces up to 1e18.

The answer is known exactly: every structure is listed, its score is summed in whole numbers, and
what all of the best have in common is taken out before an exponential is taken.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
import torch
from table import ROWS
from torch import Tensor

import structmax as sx
from structmax.testing.contract import _make, _score_names, _scores, _with_scores

MASKS = (-math.inf, -1e4, -1e9, -1e30, None)  # None: the least number of the dtype
FORCES = (1e4, 1e9, 1e18)
BITS = 1400  # of a score behind the point, as a whole number
# scores of these do not add up along a structure, or must not be positive
NOT_LINEAR = ("pcfg-low-rank", "grid-all")
PICKED = [row for row in ROWS if not row.startswith(NOT_LINEAR)]
FORESTS = [row for row in PICKED if not row.startswith(("chain", "hmm", "ctc"))]


class Listed(NamedTuple):
    """All structures of a row: z ``(K, *batch, *parts)`` and, for each item, how often a structure
    uses each entry of the score tensors ``(K, P)``."""

    every: Tensor
    counts: list[Tensor]


def items_of(s: sx.Structure) -> list[tuple[int, ...]]:
    assert len(s.batch_shape) <= 1
    return [(b,) for b in range(len(s))] if s.batch_shape else [()]


@functools.cache
def listed(row: str) -> Listed:
    s = _make(ROWS[row])
    every = s.enumerate_support()
    leaves = [t.contiguous().requires_grad_() for t in _scores(s)]
    scores = _with_scores(s, leaves).score(every)
    counts = []
    for item in items_of(s):
        total = scores[(slice(None), *item)]
        rows = [torch.autograd.grad(x, leaves, retain_graph=True) for x in total]
        own = [[of_item(t, s, n, item) for t, n in zip(g, _score_names(s))] for g in rows]
        counts.append(torch.stack([torch.cat([t.flatten() for t in g]) for g in own]))
    return Listed(every, counts)


def of_item(t: Tensor, s: sx.Structure, name: str, item: tuple[int, ...]) -> Tensor:
    """The part of a score tensor that belongs to an item: all of it, if the batch shares it."""
    dims = t.dim() - s._tensors()[name][1]
    return t[item] if dims and len(t) > 1 else (t[0] if dims else t)


def exact(x: Tensor) -> np.ndarray:
    """Scores as whole numbers of 2^−BITS, in an array of Python's."""
    return np.array([int(Fraction(v) * (1 << BITS)) for v in x.double().tolist()], dtype=object)


def reference(scores: Tensor, counts: Tensor, gamma: float, least: float) -> Tensor | None:
    """The probability of each structure of one item; None if there is none above ``least``."""
    allowed = ~((counts > 0) & (scores == -math.inf)).any(1)
    if not bool(allowed.any()):
        return None
    finite = torch.where(scores == -math.inf, 0.0, scores)
    totals = counts.long().numpy().astype(object) @ exact(finite)
    best = max(t for t, there in zip(totals, allowed.tolist(), strict=True) if there)
    unit = Fraction(1, 1 << BITS)
    if best * unit < least:
        return None
    gaps = [float(max((t - best) * unit, Fraction(-(10**6)))) for t in totals]
    x = torch.tensor(gaps, dtype=torch.float64) / gamma
    return torch.where(allowed, x, -math.inf).softmax(0)


def attacked(s: sx.Structure, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """The scores of a structure, some of which are made huge in one of several ways."""
    seeded = np.random.default_rng(seed)
    leaves = [t.to(dtype).contiguous() for t in _scores(s)]
    places = [(i, j) for i, t in enumerate(leaves) for j in range(t.numel())]
    masks = [torch.finfo(dtype).min if m is None else m for m in MASKS]
    kind = seed % 4
    values = list(seeded.choice(masks[1:] if kind == 3 else masks, 1 if kind < 2 else 3))
    values += list(seeded.choice(FORCES, int(kind == 2)))
    share = seeded.choice([0.1, 0.3, 0.6, 1.0])
    for i, j in places:
        if seeded.random() < share:
            leaves[i].view(-1)[j] = float(seeded.choice(values))
    return leaves


def scores_of(s: sx.Structure, leaves: list[Tensor], item: tuple[int, ...]) -> Tensor:
    own = [of_item(t.detach(), s, n, item).flatten() for t, n in zip(leaves, _score_names(s))]
    return torch.cat(own).double()


def spread(s: sx.Structure, of_items: list[Tensor]) -> list[Tensor]:
    """Vectors ``(P)`` of the items as tensors like the scores; shared ones get the sum."""
    out = []
    at = 0
    for name in _score_names(s):
        t = s._tensors()[name][0]
        size = of_item(t, s, name, items_of(s)[0]).numel()
        pieces = torch.stack([x[at : at + size] for x in of_items])
        at += size
        out.append((pieces if t.numel() > size else pieces.sum(0)).reshape(t.shape))
    return out


def assert_close(found: Tensor, expected: Tensor, what: str, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(
        found.double(), expected.double(), atol=tolerance, rtol=tolerance,
        msg=lambda text: f"{what}: {text}",
    )  # fmt: skip


def check(row: str, dtype: torch.dtype, seed: int) -> None:
    plain = _make(ROWS[row])
    leaves = [t.requires_grad_() for t in attacked(plain, dtype, seed)]
    every, counts = listed(row)
    s = _with_scores(plain, leaves)
    items, gamma = items_of(s), s.temperature if s.smoothing.code[0] == 1 else None
    least = Fraction(torch.finfo(dtype).min)
    p = [reference(scores_of(s, leaves, b), c, gamma or 1.0, least) for b, c in zip(items, counts)]
    if any(q is None for q in p):
        return  # refused: there is no structure, or A is no number of this dtype
    mu = s.marginals()
    assert bool((mu >= 0).all()) and bool((mu <= 1 + 1e-6).all()), mu
    a = s.log_partition()
    first = torch.autograd.grad(a.sum(), leaves, create_graph=True)
    generator = torch.Generator().manual_seed(seed)
    along = [torch.randn(t.shape, generator=generator).to(t) for t in leaves]
    second = torch.autograd.grad(
        sum((g * v).sum() for g, v in zip(first, along)), leaves, allow_unused=True
    )
    expected_mu, expected_first, expected_second = [], [], []
    for b, c, q in zip(items, counts, p):
        z = every[(slice(None), *b)].double()
        v = scores_of(s, along, b)
        mean, gains = q @ c, c @ v
        expected_mu.append(torch.einsum("k,k...->...", q, z))
        expected_first.append(mean)
        expected_second.append(((q * (gains - q @ gains))[:, None] * (c - mean)).sum(0))
    if gamma is None:  # which of them are weighed how depends on the graph
        return
    assert_close(mu, torch.stack(expected_mu).reshape(mu.shape), "marginals")
    for name, g, w, e, f in zip(
        _score_names(s), first, second, spread(s, expected_first), spread(s, expected_second)
    ):
        assert_close(g, e, f"gradient in {name}")
        w = torch.zeros_like(f) if w is None else w
        assert_close(w, f / gamma, f"Hessian product in {name}")


def check_polytope(row: str, dtype: torch.dtype, seed: int) -> None:
    """Marginals in [0, 1] that sum to what they must: they are in the hull of all structures."""
    plain = _make(ROWS[row])
    s = _with_scores(plain, attacked(plain, dtype, seed))
    if not bool(s.log_partition().isfinite().all()):
        return  # refused: there is no structure, or A is no number of this dtype
    every, mu = listed(row).every, s.marginals()
    assert bool((mu >= 0).all()) and bool((mu <= 1 + 1e-6).all()), mu
    for b in items_of(s):
        assert_close(mu[b], in_hull(every[(slice(None), *b)], mu[b]), "sums of marginals")


def in_hull(every: Tensor, mu: Tensor) -> Tensor:
    """The point nearest to μ in the affine hull of all structures."""
    z = every.flatten(1).double()
    centre = z.mean(0)
    basis = torch.linalg.svd(z - centre, full_matrices=False)
    v = basis.Vh[basis.S > 1e-9]
    x = mu.detach().double().flatten() - centre
    return (centre + v.T @ (v @ x)).reshape(mu.shape)


@pytest.mark.parametrize("row", FORESTS)
def test_marginals_lie_in_the_polytope_under_huge_scores(row: str) -> None:
    for seed in range(8):
        for dtype in (torch.float32, torch.float64):
            check_polytope(row, dtype, seed)
