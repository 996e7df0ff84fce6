"""The expected structure."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from structmax.estimators.base import Estimator
from structmax.structures.base import Structure


@dataclass
class Marginals(Estimator):
    """Structured attention: z is the expected structure μ = ∇A(θ), and its gradient ∇²A(θ)·∂L/∂μ.

    Kim, Denton, Hoang & Rush 2017, "Structured attention networks". Exact for L(E[z]), biased for
    E[L(z)]; the cost must be defined between structures. Scores of additional parts get their
    gradient. Needs marginals.

    >>> import torch, structmax as sx
    >>> scores = torch.tensor([0.0, 0.0, 1.0], requires_grad=True)
    >>> z = sx.estimators.Marginals()(sx.Choice(scores))
    >>> z
    tensor([0.2119, 0.2119, 0.5761], grad_fn=...)
    >>> z[2].backward()
    >>> scores.grad
    tensor([-0.1221, -0.1221,  0.2442])
    """

    objective = "L(E[z])"
    needs = frozenset(["marginals"])

    def __call__(self, structure: Structure) -> Tensor:
        return structure.marginals()
