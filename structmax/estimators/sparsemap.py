"""The sparse expected structure."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from structmax.estimators.base import Estimator
from structmax.structures.base import Structure


@dataclass
class SparseMAP(Estimator):
    """z is the mean of a sparse distribution: argmax of ⟨θ, μ⟩ − ½‖μ‖² over the marginal polytope.

    Niculae, Martins, Blondel & Cardie 2018, "SparseMAP: differentiable sparse structured
    inference". Exact for L(E[z]) under that distribution, which is piecewise linear in θ: its
    gradient is zero where the argmax has the whole mass. Biased for E[L(z)]. Scores of additional
    parts get their gradient. Needs argmax only.

    >>> import torch, structmax as sx
    >>> scores = torch.tensor([0.0, 0.0, 0.4], requires_grad=True)
    >>> z = sx.estimators.SparseMAP()(sx.Choice(scores))
    >>> z.detach()
    tensor([0.2000, 0.2000, 0.6000])
    >>> z[2].backward()
    >>> scores.grad
    tensor([-0.3333, -0.3333,  0.6667])
    """

    objective = "L(E[z])"
    distribution = "sparsemap"
    needs = frozenset(["sparsemap"])

    def __call__(self, structure: Structure) -> Tensor:
        return structure.sparsemap().marginals
