"""The loss of a smoothed dynamic program."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from structmax.losses.fenchel_young import check_reduction, fenchel_young
from structmax.losses.target import Target
from structmax.structures.base import Structure


def smoothed(structure: Structure, target: Any, *, reduction: str = "mean") -> Tensor:
    """L(θ, y) = DP_Ω(θ) − ⟨θ, y⟩, with the structure's own smoothing Ω.

    (Mensch & Blondel, "Differentiable dynamic programming", ICML 2018.) A Fenchel-Young loss:
    DP_Ω(θ) is the maximum, over walks q through the graph, of the expected score less the sum over
    nodes of P(visit v)·Ω(q_v); a single structure takes one edge at each node, where Ω is 0. The
    gradient is ``marginals()`` minus y. Under Shannon it is :func:`crf`, under Hard
    :func:`perceptron`; for a ``Choice`` it is ``entmax_loss``. Under Gini and Tsallis it reaches 0
    at finite scores.

    The loss of a structure p with the same smoothing, up to γ, is exact too, and 0 where both walk
    alike. Of other soft targets Ω is not known and left out: a constant free of θ. Targets: see
    :func:`crf`.

    For every structure with a ``log_partition``: Ω is any for those that are dynamic programs.

    >>> import structmax as sx, torch
    >>> unary = torch.tensor([[2.0, 0.0], [0.0, 0.5]], requires_grad=True)
    >>> chain = sx.LinearChain(unary, torch.zeros(2, 2), smoothing=sx.Gini())
    >>> loss = sx.losses.smoothed(chain, torch.tensor([0, 1]))
    >>> loss
    tensor(0.0625, grad_fn=...)
    >>> loss.backward()
    >>> unary.grad
    tensor([[ 0.0000,  0.0000],
            [ 0.2500, -0.2500]])
    >>> sure = sx.LinearChain(2 * unary.detach(), torch.zeros(2, 2), smoothing=sx.Gini())
    >>> sx.losses.smoothed(sure, torch.tensor([0, 1]))
    tensor(0.)
    >>> sx.losses.smoothed(chain, chain).item()
    0.0
    """
    check_reduction("smoothed", reduction)
    goal = Target("smoothed", structure, target)
    value = goal.structure.log_partition()
    return fenchel_young(goal, value, goal.omega(structure.smoothing), reduction)
