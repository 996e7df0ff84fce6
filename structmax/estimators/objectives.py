"""What an estimator is an estimate of: the gradient of its own objective, by enumeration.

The objective is E[L(z)] or L(E[z]) under ``estimator.distribution``:

- ``"own"``: the structure's distribution, by ``log_prob``;
- ``"sparsemap"``: that of SparseMAP, whose probabilities solve a linear system in the scores of its
  active structures, as long as these stay the same; that they are right is checked on every
  structure;
- ``"top-k"``: softmax over the scores of the k best of all structures;
- ``"perturbed"``: p(z) = P(z is best at noisy scores). With S the scores of all structures and
  F(S) = E[max_z S(z) + ⟨ε, z⟩], p is the gradient of F and has a symmetric derivative, so

      ∇_θ Σ_z p(z) L(z) = d/dh E[∇_θ S(z_h)] at h = 0,   z_h = argmax S(z) + h L(z) + ⟨ε, z⟩,

  a difference at draws of ε (``noisy_table``): Monte Carlo, with a standard error. On
  ``sx.Choice`` with Gumbel noise p is a softmax, and the gradient exact;
- ``"noisy"``: z = μ(θ + ε), so the objective is E[L(μ(θ + ε))], at draws of ε: Monte Carlo too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structmax.estimators import noise
from structmax.estimators.base import Estimator, call_cost, wide
from structmax.estimators.exact_expectation import every_structure, weighted_sum
from structmax.estimators.noisy_table import CHUNKS, NoisyTable, generator_for
from structmax.estimators.top_k_expectation import k_best
from structmax.structures.base import IntractableError, Structure
from structmax.structures.choice import Choice
from structmax.structures.grid_path import FreeGridPath
from structmax.structures.incremental import Incremental

EXPECTED_COST, COST_OF_MEAN, NONE = "E[L(z)]", "L(E[z])", "L(argmax)"
# the options that an objective depends on
OPTIONS: dict[str, tuple[str, ...]] = {
    "own": (),
    "sparsemap": ("options",),
    "top-k": ("k", "distinct"),
    "perturbed": ("noise", "sigma"),
    "noisy": ("noise",),
}


class Reference(NamedTuple):
    """The gradient of an objective in the leaves, flat ``(d)``, and the norm of its error."""

    gradient: Tensor
    error: float | None = None  # None: exact, up to rounding


def gradient(loss: Tensor, leaves: list[Tensor]) -> Tensor:
    """Of the sum of a loss in all leaves, flat ``(d)``; on the CPU, so that a GPU is waited for."""
    if not loss.requires_grad:
        return torch.zeros(sum(leaf.numel() for leaf in leaves), dtype=torch.float64)
    found = torch.autograd.grad(loss.sum(), leaves, materialize_grads=True)
    return torch.cat([g.double().flatten() for g in found]).cpu()


def distribution_of(estimator: Estimator, structure: Structure) -> str:
    """Where actions are drawn step by step, noise gives draws of the structure's own."""
    kind = estimator.distribution
    return "own" if kind == "perturbed" and isinstance(structure, Incremental) else kind


class Objectives:
    """Gradients of objectives of one structure and cost, each computed once.

    Args:
        structure: with the leaves as its scores, small enough for ``enumerate_support``
        leaves: what gradients are taken in
        cost: as for ``Estimator.loss``

    >>> import structmax as sx
    >>> leaf = torch.tensor([0.0, 0.0, 0.4], requires_grad=True)
    >>> own = Objectives(sx.Choice(leaf), [leaf], lambda z: z @ torch.tensor([0.0, 3.0, 3.0]))
    >>> own.of(sx.estimators.SparseExpectation()).gradient  # sparsemax: 0.2, 0.2, 0.6
    tensor([-2.,  1.,  1.], dtype=torch.float64)
    """

    def __init__(
        self, structure: Structure, leaves: list[Tensor], cost: Callable[..., Tensor]
    ) -> None:
        self.structure, self.leaves, self.cost = structure, leaves, cost
        with torch.no_grad():
            self.z, self.exists = every_structure(structure)  # (N, *batch, *parts), (N, *batch)
        self.known: dict[Any, Reference] = {}

    def rounding(self) -> float:
        """The size of a gradient that may be rounding alone: of SparseMAP at a vertex, say."""
        with torch.no_grad():
            costs = call_cost(self.cost, self.z, self.structure, where=self.exists)
        precision = max(torch.finfo(leaf.dtype).eps for leaf in self.leaves)
        return 8 * precision * float(costs.abs().max())

    def of(self, estimator: Estimator, objective: str | None = None) -> Reference:
        """That of an estimator; if given, another objective under the structure's distribution."""
        kind = "own" if objective else distribution_of(estimator, self.structure)
        objective = objective or estimator.objective
        key = kind, objective, *(repr(getattr(estimator, name, None)) for name in OPTIONS[kind])
        if key not in self.known:
            self.known[key] = self._find(kind, objective, estimator)
        return self.known[key]

    def _find(self, kind: str, objective: str, estimator: Any) -> Reference:
        if kind == "noisy":
            return _mean(self._noisy(estimator.noise))
        if kind == "perturbed":
            width = getattr(estimator, "sigma", noise.width(self.structure))
            if not isinstance(self.structure, Choice) or estimator.noise != "gumbel":
                return _mean(self._perturbed(objective, estimator.noise, width))
            z, p = self.z, (self._scores() / width).softmax(0)
        else:
            exact = {"own": self._own, "sparsemap": self._sparsemap, "top-k": self._top_k}
            z, p = exact[kind](estimator)
        if objective == EXPECTED_COST:
            loss = weighted_sum(p, call_cost(self.cost, z, self.structure, where=p > 0))
        else:
            loss = call_cost(self.cost, self._average(p, z), self.structure)
        return Reference(gradient(loss, self.leaves))

    def _scores(self) -> Tensor:
        """S ``(N, *batch)``."""
        return torch.where(self.exists, self.structure.score(self.z), -torch.inf)

    def _average(self, p: Tensor, z: Tensor) -> Tensor:
        return (wide(p.to(z.dtype), self.structure) * z).sum(0)

    # -- structures (N, *batch, *parts) and their probabilities (N, *batch) -----------------------

    def _own(self, estimator: Any) -> tuple[Tensor, Tensor]:
        if not self.structure.supports("log_prob"):
            raise IntractableError(
                f"diagnose: {self.structure._name}.log_prob is intractable here, so there is no "
                "gradient under the structure's own distribution to compare with."
            )
        log_prob = self.structure.log_prob(self.z)
        return self.z, torch.where(self.exists, log_prob, -torch.inf).exp()

    def _top_k(self, estimator: Any) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            best = k_best(self.structure, estimator.k, estimator.distinct)
        at = len(self.structure.batch_shape)
        z, exists = best.structures.movedim(at, 0), best.exists.movedim(-1, 0)
        z = torch.where(wide(exists, self.structure), z, z[:1])  # past the last, one of them
        scores = self.structure.score(z) / self.structure.temperature
        return z, torch.where(exists, scores, -torch.inf).softmax(0)

    def _sparsemap(self, estimator: Any) -> tuple[Tensor, Tensor]:
        options, at = getattr(estimator, "options", {}), len(self.structure.batch_shape)
        with torch.no_grad():
            sparse = self.structure.sparsemap(**options)
        active, z = sparse.probs > 0, sparse.structures.movedim(at, 0)
        everything = options.get("penalize") == "all"
        counts = sparse.structures.flatten(at + 1)
        counts = torch.cat([counts, sparse.edges], -1) if everything else counts
        counts = torch.where(active[..., None], counts, 0.0).double()
        # the conditions of the optimum, [M Mᵀ, 1; 1ᵀ, 0] [p; τ] = [S; 1], in the active slots
        one = active.double()[..., None]
        gram = counts @ counts.mT + torch.diag_embed((~active).double())
        corner = torch.zeros_like(one[..., :1, :])
        system = torch.cat([torch.cat([gram, one], -1), torch.cat([one.mT, corner], -1)], -2)
        scores = torch.where(active, self.structure.score(z).movedim(0, -1), 0.0).double()
        right = torch.cat([scores, torch.ones_like(scores[..., :1])], -1)
        solved = (torch.linalg.pinv(system) @ right[..., None]).squeeze(-1)
        p = torch.where(active, solved[..., :-1], 0.0).movedim(-1, 0)
        if not everything:
            self._certify(self._average(p.detach(), z), solved[..., -1].detach())
        return z, p

    @torch.no_grad()
    def _certify(self, mean: Tensor, tau: Tensor) -> None:
        """No structure would gain: S(z) − ⟨z, μ⟩ ≤ τ for all."""
        scores = self._scores()
        product = (self.z * mean).flatten(1 + mean.dim() - len(self.structure.event_shape)).sum(-1)
        excess = (scores - product - tau).amax(0) / (1 + tau.abs())
        if bool((excess > 1e-3).any()):
            raise RuntimeError(
                f"diagnose: SparseMAP did not converge on item {int(excess.argmax())}: a structure "
                f"would gain {float(excess.max()):.2g}. Raise max_iter, or lower tol."
            )

    # -- by Monte Carlo: a gradient for each chunk of draws ---------------------------------------

    def _perturbed(self, objective: str, kind: str, width: float) -> Iterator[Tensor]:
        if isinstance(self.structure, FreeGridPath):
            raise IntractableError(
                'diagnose: GridPath(moves="all") cuts noise off where scores would be positive: '
                'this objective has no reference. Use moves="monotone".'
            )
        scores = self._scores().detach()
        table = NoisyTable(self.structure, self.z, scores, kind, width)
        if objective == EXPECTED_COST:
            costs = call_cost(self.cost, self.z, self.structure, where=scores > -torch.inf)
        else:  # to first order that of the mean is ⟨∂L/∂z, z⟩
            mean = self._average(table.probabilities(), self.z).requires_grad_()
            loss = call_cost(self.cost, mean, self.structure).sum()
            (slope,) = torch.autograd.grad(loss, mean)
            costs = (self.z * slope).flatten(scores.dim()).sum(-1)
        for slopes in table.slopes(costs):
            weighted = slopes * torch.where(slopes != 0, self._scores(), 0.0)
            yield gradient(weighted.sum(0), self.leaves)

    def _noisy(self, kind: str) -> Iterator[Tensor]:
        generator, count = generator_for(self.z), 100
        many = self.z[:, None].expand(-1, count, *self.z.shape[1:])
        for _ in range(CHUNKS):
            epsilon = noise.draw(kind, self.structure, count, generator)
            log_prob = self.structure.perturb(epsilon).log_prob(many)
            p = torch.where(self.exists[:, None], log_prob, -torch.inf).exp()
            costs = call_cost(self.cost, self._average(p, many), self.structure)
            yield gradient(costs.mean(0), self.leaves)


def _mean(chunks: Iterator[Tensor]) -> Reference:
    """Of the gradients of all chunks, with its standard error."""
    seen = torch.stack(list(chunks))
    return Reference(seen.mean(0), float((seen.var(0).sum() / len(seen)).sqrt()))
