"""The structured perceptron."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from structmax.losses.fenchel_young import best_score, check_reduction, fenchel_young
from structmax.losses.target import Target
from structmax.structures.base import Structure


def perceptron(structure: Structure, target: Any, *, reduction: str = "mean") -> Tensor:
    """L(θ, y) = max_z ⟨θ, z⟩ − ⟨θ, y⟩: by how much the best structure beats the target.

    The Fenchel-Young loss of Ω = 0 (Collins, "Discriminative training methods for hidden Markov
    models", EMNLP 2002). Its gradient is argmax − y, a step of the perceptron; it is 0 as soon as
    the target is best, without a margin. The structure's smoothing plays no part.

    For every structure that has an ``argmax``. Targets: see :func:`crf`.

    >>> import structmax as sx, torch
    >>> unary = torch.tensor([[2.0, 0.0], [0.0, 0.5]], requires_grad=True)
    >>> chain = sx.LinearChain(unary, torch.tensor([[0.0, -1.0], [0.0, 0.0]]))
    >>> chain.decode(chain.argmax())
    [0, 0]
    >>> loss = sx.losses.perceptron(chain, torch.tensor([0, 1]))
    >>> loss
    tensor(0.5000, grad_fn=...)
    >>> loss.backward()
    >>> unary.grad
    tensor([[ 0.,  0.],
            [ 1., -1.]])

    Sentences that may be ambiguous have several best trees; each of them has loss 0:

    >>> tree = sx.DependencyTree(torch.zeros(3, 3))
    >>> sx.losses.perceptron(tree, [0, 1]), sx.losses.perceptron(tree, [2, 0])
    (tensor(0.), tensor(0.))
    """
    check_reduction("perceptron", reduction)
    goal = Target("perceptron", structure, target)
    return fenchel_young(goal, best_score(goal.structure), 0.0, reduction)
