"""Straight-through estimators."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from structmax.estimators import base
from structmax.structures.base import Structure
from structmax.structures.incremental import Incremental


@dataclass
class StraightThrough(base.Estimator):
    """z = argmax(θ), with the gradient of something smoother in its place:

    - ``backward="identity"``: that of θ, so ∂L/∂z itself (Hinton 2012; Bengio, Léonard & Courville
      2013, "Estimating or propagating gradients through stochastic neurons"). Primary parts alone.
    - ``"marginals"``: that of the marginals μ(θ), the Hessian-vector product ∇²A(θ)·∂L/∂z, for
      additional parts too. The temperature is that of the structure.
    - ``"softmax"``: that of the softmax in each local group (a position's tags, a word's heads) at
      that temperature, as if without a structure; an error without groups. Additional parts: none.
    - ``"beam"``: that of the mean of the k best structures, p ∝ exp(score/γ), for all parts.

    Biased: argmax has no gradient, and this is that of another function. Structures built by a
    policy take the best action at each step with ``"identity"`` and ``"softmax"``, at temperature
    1; with ``"beam"`` z is the best of a beam. Needs argmax, or topk alone.

    Args:
        backward, k: see above

    >>> import torch, structmax as sx
    >>> scores = torch.tensor([0.0, 0.0, 1.0], requires_grad=True)
    >>> z = sx.estimators.StraightThrough()(sx.Choice(scores))
    >>> (z * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    >>> z.detach(), scores.grad
    (tensor([0., 0., 1.]), tensor([1., 2., 3.]))
    """

    backward: str = "identity"
    k: int = 8

    objective = "L(argmax)"
    needs = frozenset(["argmax"])

    def __post_init__(self) -> None:
        base.one_of(self, "backward", ("identity", "marginals", "softmax", "beam"))
        base.at_least(self, "k", 1)
        more = {"marginals": ["argmax", "marginals"], "beam": ["topk"]}
        self.needs = frozenset(more.get(self.backward, ["argmax"]))

    def applies_to(self, structure: Structure) -> bool:
        if isinstance(structure, Incremental):
            return self.backward != "marginals"
        grouped = self.backward != "softmax" or base.has_groups(structure)
        return super().applies_to(structure) and grouped

    def __call__(self, structure: Structure) -> Tensor:
        if self.backward == "beam":
            return self._over_beam(structure)
        if isinstance(structure, Incremental) and self.backward != "marginals":
            return structure.straight_through("argmax", backward=self.backward).z
        if self.backward == "softmax":
            base.refuse_without_groups(structure)
        return base.surrogate(structure, structure.argmax(), self._pullback)

    def _pullback(self, structure: Structure, z: Tensor, g: Tensor) -> Tensor:
        if self.backward == "identity":
            return base.straight(structure, g)
        if self.backward == "marginals":
            return structure.marginals() * g
        return structure.local_softmax(structure.temperature) * g

    def _over_beam(self, structure: Structure) -> Tensor:
        (every, scores, _), at = structure.topk(self.k), len(structure.batch_shape)
        base.refuse_nothing(self, structure, scores[..., 0])
        p = base.wide((scores / structure.temperature).softmax(-1), structure).to(every.dtype)
        mean = (p * every.detach()).sum(at)
        return every.select(at, 0).detach() + (mean - mean.detach())
