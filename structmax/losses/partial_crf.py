"""The log-likelihood of a set of structures."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from structmax import checks
from structmax.losses.crf import check_shannon
from structmax.losses.fenchel_young import check_reduction, finish
from structmax.structures.base import Structure


def partial_crf(structure: Structure, allowed: Any, *, reduction: str = "mean") -> Tensor:
    """L(θ, Y) = A(θ) − A_Y(θ) = −γ log P(z ∈ Y), where Y are the structures that are allowed.

    (Tsuboi et al., "Training conditional random fields using incomplete annotations", COLING 2008.)
    Its gradient is the expected structure minus the expected structure among those of Y. It is at
    least 0, and 0 where nothing else is possible. Unlike the Fenchel-Young losses it is not convex,
    unless Y is a single structure, where it is :func:`crf`. Of an empty Y the loss is +inf, without
    a gradient.

    For every structure with a ``log_partition`` and ``condition``, under Shannon.

    Args:
        allowed: a mask of the parts that may be used, bool, which broadcasts to ``(*batch,
            *parts)``; or Y itself: the structure under a ``condition``, at the same scores
        reduction: ``"mean"`` or ``"sum"`` over the batch, or ``"none"``: ``(*batch)``

    A tagger learns from two words of three, and that the third is no verb:

    >>> import structmax as sx
    >>> unary = torch.zeros(3, 3, requires_grad=True)
    >>> chain = sx.LinearChain(unary, torch.zeros(3, 3))
    >>> noun, verb = torch.tensor([True, False, False]), torch.tensor([False, True, False])
    >>> loss = sx.losses.partial_crf(chain, torch.stack([noun, verb, ~verb]))
    >>> loss  # −log(1/3 · 1/3 · 2/3)
    tensor(2.6027, grad_fn=...)
    >>> loss.backward()
    >>> unary.grad[2]
    tensor([-0.1667,  0.3333, -0.1667])

    The trees in which word 2 depends on word 1:

    >>> arc = torch.zeros(4, 4, dtype=torch.bool)
    >>> arc[1, 2] = True
    >>> tree = sx.DependencyTree(torch.zeros(4, 4))
    >>> sx.losses.partial_crf(tree, tree.condition(include=arc))
    tensor(1.0986)
    """
    is_mask = not isinstance(allowed, Structure)
    check_reduction("partial_crf", reduction)
    check_shannon("partial_crf", structure)
    if not is_mask:
        structure._same_kind(allowed)
        if allowed.batch_shape != structure.batch_shape:
            raise ValueError(
                f"partial_crf: the batch of the allowed structures {tuple(allowed.batch_shape)} is "
                f"not that of the structure {tuple(structure.batch_shape)}."
            )
        check_shannon("partial_crf", allowed)
    else:
        if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:
            got = allowed.dtype if isinstance(allowed, Tensor) else type(allowed).__name__
            raise ValueError(
                "partial_crf: allowed must be a boolean mask of parts, or the structure under a "
                f"condition, got {got}."
            )
        allowed = structure.condition(exclude=~allowed)
    outside, inside = structure.log_partition(), allowed.log_partition()
    loss, empty = outside - inside, (inside == -math.inf) & ~outside.isnan()
    if not is_mask:
        other = _other_scores(structure, allowed)
        loss, empty = torch.where(other, math.nan, loss), empty & ~other
    return finish(loss, empty, reduction)


@torch.no_grad()
def _other_scores(structure: Any, allowed: Any) -> Tensor:
    """Items ``(*batch)`` where a part that is allowed has another score than in the structure;
    an error, where values may be read."""
    structure, allowed = structure._aligned(allowed)
    batch = len(structure.batch_shape)
    found = torch.zeros(structure.batch_shape, dtype=torch.bool, device=structure._first.device)
    pairs = zip(structure._allowed_parts(), allowed._allowed_parts(), strict=True)
    for i, (given, own) in enumerate(pairs):
        wrong = (own != given) & (own != -math.inf) & ~(own.isnan() & given.isnan())
        wrong = wrong & structure._usable_parts() if i == 0 else wrong
        if checks.can_look() and structure._validate_args and bool(wrong.any()):
            where = tuple(wrong.nonzero()[0].tolist())
            raise ValueError(
                "partial_crf: the allowed structures must have the scores of the structure, or "
                f"-inf for what is not allowed; {'parts' if i == 0 else 'additional parts'}"
                f"{list(where)} score {own[where].item():g} and {given[where].item():g}. Use "
                "structure.condition(...), or a mask."
            )
        found = found | wrong.flatten(batch).any(-1)
    return found
