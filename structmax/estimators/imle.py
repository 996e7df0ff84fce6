"""Implicit maximum likelihood."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from structmax.estimators import noise
from structmax.estimators.adaptive import Lam
from structmax.estimators.base import ModuleEstimator, one_of, surrogate, wide
from structmax.structures.base import Structure


@dataclass(eq=False)
class IMLE(ModuleEstimator):
    """zᵢ = MAP(θ + εᵢ), with the gradient (1/λS) Σᵢ [MAP(θ + εᵢ) − MAP(θ′ᵢ + εᵢ)] at the same εᵢ,
    where θ′ᵢ = θ − λ ∂L/∂zᵢ is the target distribution, towards less cost.

    Niepert, Minervini & Franceschi 2021, "Implicit MLE". L is the cost of one sample: average it
    over them, as ``loss`` does. Biased by perturb-and-MAP and by the finite difference; without
    noise it is ``BlackBox``. ``oracle="marginals", noise=None`` is (µ(θ) − µ(θ′))/λ of Domke 2010,
    "Implicit differentiation by perturbation"; ``Marginals`` as λ → 0. Needs two oracles a sample.

    Args:
        lam: λ; ``"adaptive"`` tunes it so that the argmaxes differ in about one entry on average
        samples: S; z is ``(S, *batch, *parts)`` if there are several
        noise: ``"gumbel"``, ``"sum-of-gamma"``, ``"normal"`` or None
        scale: False drops 1/λ
        oracle: ``"argmax"`` or ``"marginals"``
        generator: of the noise

    >>> import torch, structmax as sx
    >>> scores = torch.tensor([0.0, 0.0, 1.0], requires_grad=True)
    >>> imle = sx.estimators.IMLE(lam=2.0, noise=None)
    >>> imle.loss(sx.Choice(scores), lambda z: z @ torch.tensor([1.0, 2.0, 3.0])).backward()
    >>> scores.grad  # less of the third, more of the first
    tensor([-0.5000,  0.0000,  0.5000])
    """

    lam: float | str = 10.0
    samples: int = 1
    noise: str | None = "gumbel"
    scale: bool = True
    oracle: str = "argmax"
    generator: torch.Generator | None = field(default=None, repr=False)

    objective = "E[L(z)]"
    distribution = "perturbed"
    needs = frozenset(["argmax", "score"])

    def __post_init__(self) -> None:
        self.look = Lam(self)
        noise.check(self, (*noise.KINDS, None))
        one_of(self, "oracle", ("argmax", "marginals"))
        if self.oracle == "marginals":
            if self.lam == "adaptive":
                raise ValueError('IMLE: lam="adaptive" counts parts, so it needs oracle="argmax".')
            self.objective, self.distribution = "L(E[z])", "noisy" if self.noise else "own"
            self.needs = frozenset(["log_partition", "marginals"])
        elif self.noise is None:
            self.objective = "L(argmax)"

    def __call__(self, structure: Structure) -> Tensor:
        with torch.no_grad():
            epsilon = noise.draw(self.noise, structure, self.samples, self.generator)
            z = getattr(structure.perturb(epsilon), self.oracle)()

        def pullback(live: Structure, z: Tensor, g: Tensor, epsilon: Tensor) -> Tensor:
            lam = self.look(live, self.samples * g)  # the slope of one sample's cost
            weight = self.samples * (lam if self.scale else 1.0)
            moved = live.perturb(epsilon - wide(self.samples * lam, live) * g)
            if self.oracle == "marginals":  # which are the gradient of log_partition
                return (live.perturb(epsilon).log_partition() - moved.log_partition()) / weight
            other = moved.argmax().detach()
            self.look.update((z != other).flatten(lam.dim()).sum(-1))
            return (live.score(z) - live.score(other)) / weight

        return surrogate(structure, z.to(structure.dtype), pullback, epsilon)
