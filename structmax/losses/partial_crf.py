"""The log-likelihood of a set of structures."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

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
            *parts)``; or Y itself: the structure under a ``condition``
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
    check_reduction("partial_crf", reduction)
    check_shannon("partial_crf", structure)
    if isinstance(allowed, Structure):
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
    inside = allowed.log_partition()
    return finish(structure.log_partition() - inside, inside == -math.inf, reduction)
