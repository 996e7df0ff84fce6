"""Draws what a structure answers: marginals, the best structure, or a few with probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structmax.draw.bars_svg import bars_svg
from structmax.draw.painters import PAINTERS, Painter, part_names, parts
from structmax.draw.svg import Drawing, beside
from structmax.structures.base import Structure
from structmax.structures.choice import Choice
from structmax.structures.incremental import Incremental
from structmax.structures.ksubset import KSubset

WHAT = ("marginals", "argmax", "sparsemap", "top")


class Found(NamedTuple):
    """A structure, and its probability or, where that is intractable, its score."""

    z: Tensor
    chance: float | None
    score: float = 0.0

    @property
    def caption(self) -> str:
        return f"score {self.score:.2f}" if self.chance is None else f"p = {self.chance:.3f}"


@torch.no_grad()
def draw(
    structure: Structure,
    tokens: Sequence[Any] | None = None,
    what: str | None = None,
    labels: Sequence[Any] | None = None,
    k: int = 4,
) -> Drawing:
    """``structure.draw(tokens, what, labels, k)``; see there.

    >>> import structmax as sx
    >>> draw(sx.Choice(torch.tensor([0.0, 1.0])), ["no", "yes"]).count("<text")
    4
    """
    owner = structure._name
    if what is not None and what not in WHAT:
        raise ValueError(f"{owner}.draw: what must be one of {', '.join(WHAT)}, got {what!r}.")
    if not isinstance(k, int) or k < 1:
        raise ValueError(f"{owner}.draw: k must be an integer, at least 1, got {k!r}.")
    if structure.batch_shape.numel() != 1:
        raise ValueError(
            f"{owner}.draw: a picture shows one item, and batch_shape is "
            f"{tuple(structure.batch_shape)}. Index one: structure[0].draw(...)."
        )
    while structure.batch_shape:
        structure = structure[0]
    if what is None:
        what = "marginals" if structure.supports("marginals") else "argmax"
    if what == "marginals":
        return paint(structure, structure.marginals(), tokens, labels, soft=True)
    if what == "argmax":
        best = structure.greedy().z if isinstance(structure, Incremental) else structure.argmax()
        return paint(structure, best, tokens, labels)
    found = _sparse(structure, k) if what == "sparsemap" else _likeliest(structure, k)
    if _painter(structure) is None:
        texts = [_describe(structure, f.z, tokens) for f in found]
        chances = [0.0 if f.chance is None else f.chance for f in found]
        return bars_svg(texts, chances, [f.caption for f in found])
    return beside((f.caption, paint(structure, f.z, tokens, labels)) for f in found)


def paint(
    structure: Structure,
    weights: Tensor,
    tokens: Sequence[Any] | None = None,
    labels: Sequence[Any] | None = None,
    soft: bool = False,
) -> Drawing:
    """A picture of any weights of the parts of one item: a sample, or soft ones.

    >>> import structmax as sx
    >>> paint(sx.Choice(torch.zeros(2)), torch.tensor([0.0, 1.0]), ["no", "yes"]).count("<text")
    4
    """
    painter = _painter(structure) or parts
    return painter(structure, weights.detach().double().cpu(), tokens, labels, soft)


def _painter(structure: Structure) -> Painter | None:
    return next((p for kind, p in PAINTERS.items() if isinstance(structure, kind)), None)


def _sparse(structure: Structure, k: int) -> list[Found]:
    """The structures that SparseMAP keeps, the k most likely."""
    result = structure.sparsemap()
    pairs = zip(result.structures, result.probs.tolist())
    kept = sorted((pair for pair in pairs if pair[1] > 0), key=lambda pair: -pair[1])
    return [Found(z, p) for z, p in kept[:k]]


def _likeliest(structure: Structure, k: int) -> list[Found]:
    if structure.supports("ranked_support"):
        ranked = islice(structure.ranked_support(), k)
        return [Found(r.structure, math.exp(float(r.log_prob))) for r in ranked]
    best = structure.topk(k)
    z, scores = best.structures[best.exists], best.scores[best.exists].tolist()
    known = structure.supports("log_prob") and isinstance(structure, Incremental)
    return [Found(a, math.exp(b) if known else None, b) for a, b in zip(z, scores)]


def _describe(structure: Structure, z: Tensor, tokens: Sequence[Any] | None) -> str:
    """A structure as text, by the names of its parts if there are some."""
    if isinstance(structure, Choice | KSubset) or tokens is not None:
        every = part_names(structure, tokens)
        return ", ".join(name for name, p in zip(every, z.reshape(-1).tolist()) if p) or "none"
    return str(structure.decode(z))
