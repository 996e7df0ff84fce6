"""What a loss learns from: a structure, or a distribution over structures, in any of its forms."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from structmax import checks
from structmax.smoothing import HARD, SHANNON, Smoothing
from structmax.sparse.result import SparseMAPResult
from structmax.structures.base import Structure, dot
from structmax.structures.linear_chain import LinearChain
from structmax.structures.parts import PartStructure
from structmax.structures.semi_markov import SemiMarkov


class Target:
    """A target of a loss, seen by one structure.

    - hard: z, a 0/1 tensor ``(*batch, *parts)`` whose padding may hold anything; the integer form
      (tags, heads), as it is, or the human form.
    - soft: a ``Structure`` over the same parts; a ``SparseMAPResult``; or expected counts: a tensor
      of means ``(*batch, *parts)``, and where additional parts have scores a tuple ``(parts,
      additional, ...)``, since means of the parts alone do not determine the others (the edges of
      two chains with the same tag marginals may differ). ``edge_marginals()`` is such an
      additional: where transitions are shared, steps are summed.
    """

    def __init__(self, owner: str, structure: Structure, given: Any) -> None:
        if not isinstance(structure, PartStructure):
            raise ValueError(
                f"{owner}: structure must be a structure given by the scores of its parts, such as "
                f"sx.LinearChain(...), got {type(structure).__name__}."
            )
        self.owner, self.structure = owner, structure
        self.z: Any = None
        """The structure, for a hard target: an indicator or integers."""
        self.law: PartStructure | None = None
        """The distribution, if the target is one whose Ω is known."""
        self.means: tuple[Tensor, ...] = ()
        """Expected counts of the parts, for a soft target, primary first."""
        self._moments: tuple[Tensor, tuple[Tensor, ...]]
        """Value and gradient of ``law``."""
        self._seen = structure  # with parts like the means
        if isinstance(given, Structure):
            self._from_structure(given)
        elif isinstance(given, SparseMAPResult):
            self._from_means((given.marginals, *given.additional))
        elif isinstance(given, tuple | list) and _all_floating(given):
            self._from_means(tuple(given))
        elif isinstance(given, Tensor) and given.is_floating_point():
            self._from_indicator(given)
        else:
            self.z = given if isinstance(given, Tensor) else structure.encode(given)

    @property
    def is_hard(self) -> bool:
        return len(self.means) == 0  # not `not`, which torch.compile does not know of tuples

    # -- forms ------------------------------------------------------------------------------------

    def _from_structure(self, law: Structure) -> None:
        structure, batch = self.structure, self.structure.batch_shape
        if not isinstance(law, PartStructure):
            raise ValueError(f"{self.owner}: {type(law).__name__} has no marginals to be a target.")
        if not law.supports("marginals"):
            raise law._intractable("marginals")
        if law.batch_shape != batch:
            try:
                law = law.expand(batch)
            except RuntimeError:
                raise self._wrong_batch(law.batch_shape) from None
        self.law, self._seen = law._aligned(structure)
        value, mu = self._moments = self.law._value_and_gradient()
        self.law._refuse_infeasible(f"marginals (as the target of {self.owner})", value, mu[0])
        self.means = mu

    def _from_indicator(self, given: Tensor) -> None:
        structure = self.structure
        given = self._fit("target", given, structure.event_shape)
        inside = torch.where(structure._usable_parts(), given, torch.zeros_like(given))
        looks = checks.can_look()
        scored = len(structure._parts()) > 1 and not structure._silent
        whole = bool((inside == inside.round()).all()) if looks else scored
        if whole:
            self.z = inside
        elif not scored:
            self._from_means((inside,))
        else:
            raise ValueError(
                f"{self.owner}: target is not 0/1, and the means of its parts alone do not say how "
                f"often {structure._name} has its additional parts. Give a tuple (parts, "
                f"{self._shapes()}) of expected counts, an sx.Structure, or the result of "
                "sparsemap()."
            )

    def _from_means(self, given: tuple[Tensor, ...]) -> None:
        structure = self.structure
        primary, *additional = structure._parts()
        if structure._silent and len(given) == 1:
            additional = []
        if len(given) != 1 + len(additional):
            wanted = f"(parts, {self._shapes()})" if additional else "the parts alone"
            raise ValueError(
                f"{self.owner}: a soft target for {structure._name} holds {wanted}, got "
                f"{len(given)} tensors of shapes {', '.join(str(tuple(t.shape)) for t in given)}."
            )
        first = self._fit("target", given[0], structure.event_shape)
        first = torch.where(structure._usable_parts(), first, torch.zeros_like(first))
        means = [first]
        for at, (mean, part) in enumerate(zip(given[1:], additional, strict=True), 1):
            event = part.shape[len(structure.batch_shape) :]
            means.append(self._fit(f"target[{at}]", self._over_steps(mean, event), event))
        self.means = tuple(m.to(primary.dtype) for m in means)
        if structure._validate_args and checks.can_look(structure._first):
            self._check_means()

    def _over_steps(self, mean: Tensor, event: torch.Size) -> Tensor:
        """Counts of transitions at each step, without padding, summed where steps share scores."""
        structure, dims = self.structure, len(self.structure.batch_shape)
        steps = structure.event_shape[0] - 1
        if (
            not isinstance(structure, LinearChain | SemiMarkov)
            or mean.dim() != dims + 3
            or mean.shape[dims] != steps
        ):
            return mean
        step = torch.arange(steps, device=mean.device)
        inside = (step < structure._lengths()[..., None] - 1)[..., None, None]
        mean = torch.where(inside, mean, torch.zeros_like(mean))
        return mean if mean.shape[dims:] == event else mean.sum(-3, keepdim=len(event) == 3)

    def _fit(self, name: str, tensor: Tensor, event: torch.Size) -> Tensor:
        """A tensor of means expanded to the batch."""
        at = tensor.dim() - len(event)
        if at < 0 or tensor.shape[at:] != event:
            short = at < len(self.structure.batch_shape)
            hint = " Tags, heads and the like must be integers: use .long()." if short else ""
            raise ValueError(
                f"{self.owner}: {name} must be (..., {', '.join(map(str, event))}) for "
                f"{self.structure._name}, got {tuple(tensor.shape)} of {tensor.dtype}.{hint}"
            )
        try:
            return tensor.expand(*self.structure.batch_shape, *event)
        except RuntimeError:
            raise self._wrong_batch(tensor.shape[:at]) from None

    def _check_means(self) -> None:
        bad = [~((m > -1e-6) & (m < math.inf)) for m in self.means]
        if not bool(torch.stack([b.any() for b in bad]).any()):
            return
        for number, (mean, wrong) in enumerate(zip(self.means, bad, strict=True)):
            if bool(wrong.any()):
                where = tuple(wrong.nonzero()[0].tolist())
                name = "target" if len(self.means) == 1 else f"target[{number}]"
                raise ValueError(
                    f"{self.owner}: {name}{list(where)} is {mean[where].item()}; an expected count "
                    "is a number of at least 0."
                )

    def _shapes(self) -> str:
        """The shapes of the additional parts, as an error names them."""
        dims = len(self.structure.batch_shape)
        return ", ".join(str(tuple(p.shape[dims:])) for p in self.structure._parts()[1:])

    def _wrong_batch(self, batch: torch.Size) -> ValueError:
        return ValueError(
            f"{self.owner}: the batch of the target {tuple(batch)} does not broadcast to that of "
            f"the structure {tuple(self.structure.batch_shape)}."
        )

    # -- what a loss needs ------------------------------------------------------------------------

    def score(self) -> Tensor:
        """⟨θ, target⟩ over all parts, ``(*batch)``; −inf if the target has a forbidden part."""
        if self.is_hard:
            return self._fitting(self.structure.score(self.z))
        dims = len(self.structure.batch_shape)
        pairs = zip(
            self._seen._allowed_parts(), self.means
        )  # a silent part without a mean scores nothing
        terms = [dot(part, mean.to(part.dtype), part.dim() - dims) for part, mean in pairs]
        return sum(terms[1:], terms[0]).to(self.means[0].dtype)

    def log_prob(self) -> Tensor:
        """That of a hard target, ``(*batch)``."""
        return self._fitting(self.structure.log_prob(self.z))

    def _fitting(self, answer: Tensor) -> Tensor:
        if answer.shape != self.structure.batch_shape:
            raise self._wrong_batch(answer.shape)
        return answer

    def primary(self) -> Tensor:
        """μ̄: the primary parts ``(*batch, *parts)``, 0 in the padding."""
        if not self.is_hard:
            return self.means[0]
        is_z = self.z.is_floating_point() or self.z.dtype == torch.bool  # which score() checks
        z = self.z if is_z else self.structure.encode(self.z)
        z = self._fit("target", z, self.structure.event_shape).to(self.structure._parts()[0].dtype)
        return torch.where(self.structure._usable_parts(), z, torch.zeros_like(z))

    def omega(self, smoothing: Smoothing) -> Tensor | float:
        """Ω(target), ``(*batch)``, of the regularizer of a dynamic program.

        0 for a structure. A distribution p has −γ·H(p) under Shannon, and else ⟨θ_p, μ⟩ − DP_Ω(θ_p)
        since its walk is the best for its own scores. Where only expected counts are known, Ω is
        not: it is left out, a constant free of θ.
        """
        law, (kind, gamma, alpha) = self.law, smoothing.code
        if law is None or law.smoothing.code[0] == HARD:
            return 0.0
        if kind == SHANNON:
            if law._is_gibbs:
                return -gamma * law._gibbs_cross_entropy(law, *self._moments)
            return -gamma * law.entropy()
        own_kind, own_gamma, own_alpha = law.smoothing.code
        if (kind, alpha) != (own_kind, own_alpha):
            raise ValueError(
                f"{self.owner}: the target has smoothing {law.smoothing} and the structure "
                f"{smoothing}; they may differ in gamma only. Its expected counts, such as "
                "target.marginals(), give the same gradient."
            )
        value, dims = self._moments[0], len(self.structure.batch_shape)
        terms = [dot(p, m, p.dim() - dims) for p, m in zip(law._parts(), self.means, strict=True)]
        return (torch.stack(terms).sum(0) - value) * (gamma / own_gamma)


def _all_floating(given: Any) -> bool:
    return len(given) > 1 and all(isinstance(t, Tensor) and t.is_floating_point() for t in given)
