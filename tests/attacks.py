"""Attacks on a structure, and the truth that its answers are held against.

An attack makes a hostile structure from a row of the table: extreme scores, −inf, ties, short
items, foreign dtypes, odd memory. The truth is enumeration in float64: how often each structure
uses each score is read off once, at harmless scores, so that nothing of what is attacked computes
what it is compared with. Under Gini and Tsallis, whose distribution depends on the graph, the naive
backend gives the probabilities, item by item.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from table import ROWS
from torch import Tensor

import structmax as sx
from structmax.smoothing import HARD, SHANNON
from structmax.structures.base import Structure
from structmax.structures.lengths import OneSided, TwoSided
from structmax.testing.contract import _make

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
inf, nan = math.inf, math.nan
Tensors = dict[str, Tensor]


def tensors(s: Structure) -> Tensors:
    return {name: t for name, (t, _) in s._tensors().items()}


def scores(s: Structure) -> Tensors:
    return {name: t for name, t in tensors(s).items() if t.is_floating_point()}


def construct(s: Structure, changed: Tensors, **options: Any) -> Any:
    """The structure with other tensors, by its constructor, which looks at them."""
    return s._rebuild(**{**tensors(s), **changed, "validate_args": True, **options})


def for_each(change: Callable[[Tensor], Tensor]) -> Callable[[Case], Any]:
    """An attack that changes all scores in the same way."""
    return lambda case: construct(
        case.base, {name: change(t) for name, t in scores(case.base).items()}
    )


# -- the truth -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """One item at harmless scores: every structure, and how often it uses each score."""

    every: Tensor  # (N, *parts)
    counts: dict[str, Tensor]  # (N, *event) of each score tensor
    linear: bool  # whether scores of structures are these counts times the scores


@dataclass(frozen=True, eq=False)
class Case:
    """A row of the table with harmless scores, and its items."""

    base: Any
    items: tuple[Item, ...]

    def pick(self, s: Structure, i: int) -> Any:
        """The i-th item of a structure with the same batch."""
        return s[i] if s.batch_shape else s


@lru_cache(maxsize=64)
def case_of(row: str, sizes: str = "as-given") -> Case | None:
    base = SIZES[sizes](_make(ROWS[row]))
    if base is None:
        return None
    grid = {name: (t * 64).round() / 64 for name, t in scores(base).items()}
    base = construct(base, grid)  # sums of these, shifts included, are exact in float32
    items = [base[i] for i in range(len(base))] if base.batch_shape else [base]
    if not all(len(item.enumerate_support()) for item in items):
        return None  # as of a grammar and a sentence of one word: there is no structure at all
    return Case(base, tuple(_item(item) for item in items))


def _item(item: Any) -> Item:
    every = item.enumerate_support().double()
    n = len(every)
    wide = {name: t.expand(n, *t.shape[t.dim() - d :]) for name, (t, d) in item._tensors().items()}
    leaves = {k: t.clone().requires_grad_() for k, t in wide.items() if t.is_floating_point()}
    own = item._rebuild(**{**wide, **leaves}).score(every)
    grads = torch.autograd.grad(own.sum(), list(leaves.values()), materialize_grads=True)
    counts = dict(zip(leaves, grads, strict=True))
    total = sum((leaves[k] * counts[k]).flatten(1).sum(1) for k in leaves)
    return Item(every, counts, bool(torch.allclose(total, own, atol=1e-9)))


@dataclass(frozen=True)
class Truth:
    """What the queries of one item must answer."""

    every: Tensor  # (N, *parts)
    scores: Tensor  # (N)
    value: Tensor
    log_prob: Tensor | None  # (N); None where nobody can say: a hard choice among ties
    counts: dict[str, Tensor]

    @property
    def feasible(self) -> bool:
        return bool(self.scores.max() > -inf)

    @property
    def scale(self) -> float:
        finite = self.scores[self.scores > -inf]
        return float(finite.abs().max()) if len(finite) else 0.0

    def index(self, z: Tensor) -> Tensor:
        """Which structures these are, ``(k)``; an error where one is none."""
        same = (z.double()[:, None] == self.every).flatten(2).all(-1)
        assert bool((same.sum(1) == 1).all()), "no structure"
        return same.long().argmax(1)

    def expect(self, x: Tensor) -> Tensor:
        """E x for x ``(N, ...)``, with 0·∞ = 0."""
        assert self.log_prob is not None
        p = self.log_prob.exp()[(..., *[None] * (x.dim() - 1))]
        return torch.where(p > 0, p * x, torch.zeros_like(x)).sum(0)


def truths(case: Case, s: Any) -> list[Truth]:
    """The truth about each item of an attacked structure."""
    return [_truth(item, case.pick(s, i)) for i, item in enumerate(case.items)]


def _truth(item: Item, s: Any) -> Truth:
    clean = {
        name: (t.detach().double() if t.is_floating_point() else t).clone(
            memory_format=torch.contiguous_format
        )
        for name, t in tensors(s).items()
    }
    with sx.backend("naive"), torch.inference_mode(False):
        if item.linear:
            terms = [
                torch.where(c == 0, 0.0, clean[k] * c).flatten(1).sum(1)
                for k, c in item.counts.items()
            ]
            own = torch.stack(terms).sum(0)
        else:
            own = s._rebuild(**clean).score(item.every)
        kind, gamma, _ = s.smoothing.code
        best, log_prob = own.max(), None
        if best == -inf:
            return Truth(item.every, own, best, None, item.counts)
        if kind == SHANNON:
            value = gamma * (own / gamma).logsumexp(0)
            log_prob = (own - value) / gamma
        elif kind == HARD:
            value, alone = best, (own == best).sum() == 1
            if alone:
                log_prob = torch.where(own == best, 0.0, -inf)
        else:
            # at the offset of the shift nothing is lost: A moves by what all structures gain
            value = s._rebuild(**clean).log_partition()
            log_prob = s._rebuild(**clean).log_prob(item.every)
    return Truth(item.every, own, value, log_prob, item.counts)


# -- sizes: which items there are ----------------------------------------------------------------


def _lengths(s: Any, change: Callable[[Tensor], Tensor]) -> Any:
    batch = s.batch_shape
    if not batch or "input_lengths" in tensors(s):
        return None
    if isinstance(s, TwoSided):
        sizes = dict(zip(("rows", "columns"), s._sizes(), strict=True))
    elif isinstance(s, OneSided):
        sizes = {"lengths": s._lengths()}
    else:
        return None
    return construct(s, {name: change(t.clone()) for name, t in sizes.items()})


def _first_is_one(lengths: Tensor) -> Tensor:
    lengths[0] = 1
    return lengths


SIZES: dict[str, Callable[[Any], Any]] = {
    "as-given": lambda s: s,
    "mixed": lambda s: _lengths(s, _first_is_one),
    "length-1": lambda s: _lengths(s, torch.ones_like),
    "no-item-is-longest": lambda s: _lengths(s, lambda n: (n - 1).clamp(min=1)),
    "empty-batch": lambda s: s[:0] if s.batch_shape else s.expand((0,)),
}


# -- attacks -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attack:
    """``strike`` makes the hostile structure, or None where it has nothing to say.

    ``exact``: sums of these scores are exact, so that marginals have the error of small scores.
    ``refused``: the constructor must refuse it.
    """

    strike: Callable[[Case], Any]
    sizes: str = "as-given"
    exact: bool = True
    refused: bool = False
    inference: bool = False


def spread(factor: float, dtype: torch.dtype = f64) -> Attack:
    return Attack(for_each(lambda t: (t * factor).to(dtype)), exact=False)


def shift(c: float, dtype: torch.dtype = f64) -> Attack:
    return Attack(for_each(lambda t: (t + c).to(dtype)))


def shift_primary(c: float) -> Attack:
    def strike(case: Case) -> Any:
        name, *_ = scores(case.base)
        return construct(case.base, {name: tensors(case.base)[name] + c})

    return Attack(strike)


def forbid(which: Callable[[Case, int, Tensor], Tensor]) -> Callable[[Case], Any]:
    """−inf at a mask ``(*event)`` of the first score of each item."""

    def strike(case: Case) -> Any:
        base = case.base
        name, (t, d) = next(iter(base._tensors().items()))
        rows = t.expand(*base.batch_shape, *t.shape[t.dim() - d :]).clone()
        items = rows if base.batch_shape else rows[None]
        for i, item in enumerate(items):
            item[which(case, i, case.items[i].counts[name])] = -inf
        return construct(base, {name: rows})

    return strike


def _all_but_one(case: Case, i: int, counts: Tensor) -> Tensor:
    return counts[len(counts) // 2] == 0


def _isolated(case: Case, i: int, counts: Tensor) -> Tensor:
    """All of the parts at one place that not every structure uses there."""
    mask = torch.zeros(counts.shape[1:], dtype=torch.bool)
    at = counts.shape[1] // 2
    mask[at] = True
    return mask


def _at_random(case: Case, i: int, counts: Tensor) -> Tensor:
    seed = torch.Generator().manual_seed(i)
    return torch.rand(counts.shape[1:], generator=seed) < 0.4


def _additional(share: float) -> Callable[[Case], Any]:
    def strike(case: Case) -> Any:
        _, *rest = scores(case.base).items()
        if not rest:
            return None
        seed = torch.Generator().manual_seed(1)
        cut = {k: t.masked_fill(torch.rand(t.shape, generator=seed) < share, -inf) for k, t in rest}
        return construct(case.base, cut)

    return strike


def poison(case: Case) -> Any:
    """NaN wherever no structure of the item uses the score. The weights of a grammar belong to no
    word, so they are no padding, even where no sentence is long enough to use them."""
    base, changed = case.base, {}
    weights = getattr(base, "_weight_names", ())
    for name, (t, d) in base._tensors().items():
        if not t.is_floating_point() or t.dim() != d + len(base.batch_shape) or name in weights:
            continue
        rows = t.clone()
        for row, item in zip(rows if base.batch_shape else rows[None], case.items, strict=True):
            unused = (item.counts[name] == 0).all(0)
            if not bool(unused.all()):  # as transitions of one position: they are no padding
                row[unused] = nan
        changed[name] = rows
    return construct(base, changed)


def _bad(value: float) -> Callable[[Case], Any]:
    """One value in a score that some structure of the last item uses."""

    def strike(case: Case) -> Any:
        base = case.base
        name, (t, d) = next(iter(base._tensors().items()))
        rows = t.expand(*base.batch_shape, *t.shape[t.dim() - d :]).clone()
        used = (case.items[-1].counts[name] != 0).any(0).nonzero()
        if not len(used):
            return None
        (rows[-1] if base.batch_shape else rows)[tuple(used[0].tolist())] = value
        return construct(base, {name: rows})

    return strike


def _every_other(t: Tensor) -> Tensor:
    """The same values at every other place of a storage of NaN, in all dimensions."""
    room = torch.full([2 * n for n in t.shape], nan, dtype=t.dtype)
    view = room[tuple(slice(None, None, 2) for _ in t.shape)]
    return view.copy_(t)


def _transposed(t: Tensor) -> Tensor:
    order = list(range(t.dim()))[::-1]
    return t.permute(order).contiguous().permute(order)


def _one_storage(case: Case) -> Any:
    given = scores(case.base)
    room = torch.cat([torch.cat([t.flatten(), t.new_full((3,), nan)]) for t in given.values()])
    views, start = {}, 0
    for name, t in given.items():
        views[name] = room[start : start + t.numel()].view(t.shape)
        start += t.numel() + 3
    return construct(case.base, views)


def _expanded(case: Case) -> Any:
    """Every item has the scores of the first: a batch of stride 0."""
    base = case.base
    if not base.batch_shape or not len(base):
        return None
    batched = {
        k: t for k, (t, d) in base._tensors().items() if t.is_floating_point() if t.dim() > d
    }
    return construct(base, {k: t[:1].expand_as(t) for k, t in batched.items()})


def _one_leaf(which: int) -> Callable[[Case], Any]:
    def strike(case: Case) -> Any:
        given = scores(case.base)
        name = [*given][which]
        if which and len(given) < 2:
            return None
        return construct(case.base, {name: given[name].clone().requires_grad_()})

    return strike


def _empty_event(case: Case) -> Any:
    name, (t, d) = next(iter(case.base._tensors().items()))
    return construct(case.base, {name: t.narrow(t.dim() - d, 0, 0)})


def _overlong(case: Case) -> Any:
    given = {k: t for k, t in tensors(case.base).items() if k in ("lengths", "rows", "columns")}
    return construct(case.base, {k: t + 100 for k, t in given.items()}) if given else None


def _in_inference_mode(inside: bool) -> Callable[[Case], Any]:
    def strike(case: Case) -> Any:
        with torch.inference_mode(inside):
            return construct(case.base, {k: t.clone() for k, t in scores(case.base).items()})

    return strike


ATTACKS: dict[str, Attack] = {
    "shift+1e4": shift(1e4),
    "shift-1e4": shift(-1e4),
    "shift+1e4-float32": shift(1e4, f32),
    "shift-1e4-float32": shift(-1e4, f32),
    "shift-primary+1e4": shift_primary(1e4),
    "spread-1e-6": spread(1e-6),
    "spread-1e-3-float32": spread(1e-3, f32),
    "spread-1e3-float32": spread(1e3, f32),
    "spread-1e6": spread(1e6),
    "spread-1e6-float32": spread(1e6, f32),
    "one-structure": Attack(forbid(_all_but_one)),
    "no-structure": Attack(forbid(lambda case, i, counts: counts[0] == counts[0])),
    "no-structure-in-the-last-item": Attack(
        forbid(lambda case, i, counts: (counts[0] == counts[0]) & (i == len(case.items) - 1))
    ),
    "isolated-node": Attack(forbid(_isolated)),
    "forbidden-at-random": Attack(forbid(_at_random)),
    "additional-forbidden": Attack(_additional(0.3)),
    "all-additional-forbidden": Attack(_additional(2.0)),
    "ties-at-0": Attack(for_each(torch.zeros_like)),
    "ties-at-0.1-float32": Attack(
        for_each(lambda t: torch.full_like(t, 0.1, dtype=f32)), exact=False
    ),
    "ties-at-minus-1e4": Attack(for_each(lambda t: torch.full_like(t, -1e4))),
    "mixed-lengths": Attack(poison, "mixed"),
    "length-1": Attack(poison, "length-1"),
    "no-item-is-longest": Attack(poison, "no-item-is-longest"),
    "padding-NaN": Attack(poison),
    "empty-batch": Attack(lambda case: case.base, "empty-batch"),
    "float32": Attack(for_each(lambda t: t.to(f32))),
    "float16": Attack(for_each(lambda t: t.to(f16))),
    "bfloat16": Attack(for_each(lambda t: t.to(bf16))),
    "float16-spread-1e3": spread(1e3, f16),
    "every-other-element": Attack(for_each(_every_other)),
    "transposed": Attack(for_each(_transposed)),
    "views-of-one-storage": Attack(_one_storage),
    "expanded": Attack(_expanded),
    "only-the-first-requires-grad": Attack(_one_leaf(0)),
    "only-the-last-requires-grad": Attack(_one_leaf(-1)),
    "inference-mode": Attack(_in_inference_mode(True), inference=True),
    "made-before-inference-mode": Attack(_in_inference_mode(False), inference=True),
    "inference-tensors-outside": Attack(_in_inference_mode(True)),
    "NaN": Attack(_bad(nan), refused=True),
    "+inf": Attack(_bad(inf), refused=True),
    "integers": Attack(for_each(lambda t: t.long()), refused=True),
    "complex": Attack(for_each(lambda t: t.to(torch.complex128)), refused=True),
    "no-positions": Attack(_empty_event, refused=True),
    "too-long": Attack(_overlong, refused=True),
}

NUMBERS = (  # those that are about the numbers, and what a backend makes of them
    "shift+1e4", "shift-1e4-float32", "spread-1e-6", "spread-1e6", "one-structure", "no-structure",
    "forbidden-at-random", "additional-forbidden", "ties-at-0", "mixed-lengths", "length-1",
    "float16",
)  # fmt: skip
