"""Differences of two argmaxes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from structmax.estimators.base import Estimator, at_least, surrogate
from structmax.structures.base import Structure


@dataclass
class BlackBox(Estimator):
    """z = argmax(θ), with the gradient (z − z′)/λ, where z′ = argmax(θ − λ ∂L/∂z).

    Vlastelica, Paulus, Musil, Martius & Rolínek 2020, "Differentiation of blackbox combinatorial
    solvers": the exact gradient of a piecewise linear interpolation of the cost, linearised at z; λ
    is how far it looks. Biased: the true gradient is zero almost everywhere. Zero where λ is too
    small to change the argmax. Additional parts get the difference of their indicators. Needs
    argmax, once forward and once backward.

    >>> import torch, structmax as sx
    >>> scores = torch.tensor([0.0, 0.0, 1.0], requires_grad=True)
    >>> z = sx.estimators.BlackBox(lam=2.0)(sx.Choice(scores))
    >>> (z * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    >>> scores.grad  # less of the third, more of the first
    tensor([-0.5000,  0.0000,  0.5000])
    """

    lam: float = 10.0

    objective = "L(argmax)"
    needs = frozenset(["argmax", "score"])

    def __post_init__(self) -> None:
        at_least(self, "lam", 0.0, strict=True)

    def __call__(self, structure: Structure) -> Tensor:
        return surrogate(structure, structure.argmax(), self._pullback)

    def _pullback(self, structure: Structure, z: Tensor, g: Tensor) -> Tensor:
        with torch.no_grad():
            other = structure.perturb(-self.lam * g).argmax()
        return (structure.score(z) - structure.score(other)) / self.lam
