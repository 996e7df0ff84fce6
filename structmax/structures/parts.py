"""Structures given by the scores of their parts: what follows from value, gradient and k best."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from structmax import checks
from structmax.primitive import as_dtype, is_plain, is_transforming
from structmax.smoothing import SHANNON
from structmax.structures.base import Ranked, Structure, TopK, at_least_zero, dot

if TYPE_CHECKING:
    from structmax.sparse.result import SparseMAPResult


class PartStructure(Structure):
    """A structure whose subclass says what its parts score, and how A, ∇A and the k best are found.

    ``log_prob`` and ``cross_entropy`` are those of the Gibbs distribution.
    """

    _silent = False
    """Whether the additional parts are the library's own: they forbid, but nobody scores them."""

    # -- what a subclass says ---------------------------------------------------------------------

    @abstractmethod
    def _unvalidated_parts(self) -> tuple[Tensor, ...]:
        """``_parts()``, which may not have been validated: NaN where an integer is impossible."""

    def _parts(self) -> tuple[Tensor, ...]:
        """Scores of all parts, primary first, each ``(*batch, *event)``, float32 or float64."""
        self._validate()
        return self._unvalidated_parts()

    @abstractmethod
    def _value(self) -> Tensor:
        """A(θ), differentiable."""

    @abstractmethod
    def _value_and_gradient(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """A(θ) and its gradient in each of ``_parts``, differentiable."""

    @abstractmethod
    def _kbest(self, k: int) -> tuple[Tensor, Tensor]:
        """Scores ``(*batch, k)``, −inf past the last, and z ``(*batch, k, *parts)``."""

    @abstractmethod
    def _score(self, z: Tensor) -> Tensor:
        """⟨θ, parts of z⟩ for an indicator ``(*sample, *batch, *parts)``."""

    @abstractmethod
    def _replace_primary(self, scores: Tensor, **others: Tensor) -> Any:
        """The same structure with other primary scores, ``(*batch, *parts)``, and perhaps with
        ``others`` of its tensors."""

    _additional: tuple[str, ...] = ()
    """The names of the tensors that score additional parts."""

    @abstractmethod
    def _argmax_parts(self, parts: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The best structure at other scores, shaped as ``_parts()``: its score ``(*batch)``, −inf
        if there is none, and how often it has each part, shaped as the scores."""

    def _exact_parts(self) -> tuple[Tensor, ...]:
        """``_parts()``; in float64 where they are sums of what was given, which a mask in one of
        the terms would round in a narrower dtype."""
        return self._parts()

    def _allowed_parts(self) -> tuple[Tensor, ...]:
        """``_exact_parts()``, −inf where an option forbids what another structure may have."""
        return self._exact_parts()

    def _usable_parts(self) -> Tensor:
        """Which primary parts some structure may have, whatever the scores: no padding. A mask
        that broadcasts to ``_parts()[0]``."""
        return torch.ones((), dtype=torch.bool, device=self._parts()[0].device)

    _local_groups: tuple[int, ...] | None = None
    """Dimensions of the event along which every structure has exactly one part, if there are."""

    def _incompatible(self, include: Tensor) -> Tensor:
        """The primary parts that cannot stand beside those included, as a mask."""
        raise ValueError(
            f"{self._name}.condition: include= is not defined here, because the parts that exclude "
            "each other are not known. Use exclude=."
        )

    def _aligned(self, q: Structure) -> tuple[Any, Any]:
        """This structure and q, over the same parts."""
        self._same_kind(q)
        return self, q

    # -- scores of parts --------------------------------------------------------------------------

    @property
    def primary(self) -> Tensor:
        return torch.where(self._usable_parts(), self._parts()[0], 0.0)

    def perturb(self, delta: Tensor) -> Any:
        if not isinstance(delta, Tensor):
            raise ValueError(f"{self._name}.perturb: delta must be a tensor, got {delta!r}.")
        shape = (*self.batch_shape, *self.event_shape)
        try:
            shape = torch.broadcast_shapes(delta.shape, shape)
        except RuntimeError:
            shape = torch.Size(())
        batch = shape[: len(shape) - len(self.event_shape)]
        own = len(self.batch_shape)
        if shape[len(batch) :] != self.event_shape or batch[len(batch) - own :] != self.batch_shape:
            raise ValueError(
                f"{self._name}.perturb: delta must broadcast to "
                f"{(*self.batch_shape, *self.event_shape)}, got {tuple(delta.shape)}."
            )
        wide = self if batch == self.batch_shape else self.expand(batch)
        return wide._moved(delta)

    def _moved(self, delta: Tensor) -> Any:
        """The same structure with ``delta (*batch, *parts)`` added to its primary scores."""
        scores = self._parts()[0]
        moved = scores + delta.to(scores.dtype)
        return self._replace_primary(torch.where(scores == -math.inf, scores, moved))

    def local_softmax(self, temperature: float = 1.0) -> Tensor:
        if self._local_groups is None:
            raise ValueError(
                f"{self._name}.local_softmax: there are no groups of parts of which every "
                "structure has exactly one. Use marginals()."
            )
        scores, dims = self._parts()[0], self._local_groups
        scores = torch.where(self._usable_parts(), scores, -math.inf) / temperature
        peak = scores.detach().amax(dims, keepdim=True)
        weights = (scores - torch.where(peak == -math.inf, 0.0, peak)).exp()
        total = weights.sum(dims, keepdim=True)
        return (weights / torch.where(total == 0, 1.0, total)).to(self.dtype)

    # -- value and gradient -----------------------------------------------------------------------

    @property
    def _is_gibbs(self) -> bool:
        """Whether log_prob is (score − A)/γ; otherwise it is that of the walk."""
        return self.smoothing.code[0] == SHANNON

    def log_partition(self) -> Tensor:
        value = self._value()
        self._proves(value)
        return value

    def _proves(self, value: Tensor) -> bool:
        """Whether a value ``(*B)`` that all scores go into shows that scores left to the first
        query are good. Where it does not, they are validated."""
        if (
            not (self._validates_late and self._validate_args)
            or torch.compiler.is_compiling()
            or self._record.covers(self._score_tensors)
            or not checks.can_look(value)
        ):
            return False
        finite = math.isfinite(value.sum().item())  # one kernel; a sum may also overflow
        if finite:
            self._record.add(self._score_tensors)
        else:
            self._validate()
        return finite

    def _check_feasible(self, query: str, value: Tensor) -> None:
        """An item without a structure is an error that says why, and so is an infinite score that
        was written in ways that torch does not count."""
        if (
            value.device.type == "cpu"
            and checks.can_look(value)
            and bool((value == math.inf).any())
        ):
            checks.values(self._name, self._given_scores())
        checks.feasible(self._name, query, value, self._why_none)

    def _why_none(self, item: tuple[int, ...]) -> str:
        """Why an item allows no structure, and what to do; "" if parts of it are forbidden."""
        return ""

    def _refuse_infeasible(self, query: str, value: Tensor, answer: Tensor) -> Tensor:
        """The answer; an item without a structure is an error, or NaN where one cannot look."""
        value = value.detach()
        if self._proves(value):
            return answer
        if self._validate_args and checks.can_look(self._first):
            self._check_feasible(query, value)
            return answer
        on_cpu = value.device.type == "cpu" and checks.can_look(value) and is_plain((value,))
        if on_cpu and np.isfinite(value.numpy()).all():
            return answer
        # 0 · value is NaN for −inf, and for the NaN or +inf of scores not looked at: one launch
        value = value[(..., *[None] * (answer.dim() - value.dim()))]
        return as_dtype(torch.add(answer, value, alpha=0), answer.dtype)

    def marginals(self) -> Tensor:
        value, mu = self._value_and_gradient()
        return as_dtype(self._refuse_infeasible("marginals", value, mu[0]), self.dtype)

    # -- discrete queries -------------------------------------------------------------------------

    def topk(self, k: int) -> TopK:
        if not isinstance(k, Integral) or k < 1:
            raise ValueError(f"{self._name}.topk: k must be at least 1, an integer, got {k!r}.")
        k = int(k)
        self._check_room((k, *self.event_shape))
        scores, z = self._kbest(k)
        z = z.to(self.dtype)
        exists = scores > -math.inf
        if is_transforming(self._parts()):
            scores = self._watched_scores(scores, z, exists)
        return TopK(z, scores, exists)

    def _watched_scores(self, scores: Tensor, z: Tensor, exists: Tensor) -> Tensor:
        """The scores of the k best, the same numbers, with a gradient."""
        at, some = len(self.batch_shape), exists[..., 0]
        if self._validate_args and checks.can_look(self._first) and not bool(some.all()):
            if not bool(some.any()):
                return scores
            known = self[some]._watched_scores(scores[some], z[some], exists[some])
            return scores.masked_scatter(some[..., None], known)
        real = exists[(..., *[None] * len(self.event_shape))]
        safe = torch.where(real, z, z.narrow(at, 0, 1))
        again = self._score(safe.movedim(at, 0)).movedim(0, -1)
        return torch.where(exists, again, -math.inf)

    def mbr(self) -> Tensor:
        """The structure of least expected Hamming cost, argmax of ⟨2μ − 1, z⟩ over what is allowed.

        >>> import structmax as sx
        >>> sx.Choice(torch.tensor([0.0, 1.0])).mbr()
        tensor([0., 1.])
        """
        mu = self.marginals().detach()
        return self._with_gains(2 * mu - 1).argmax()  # E‖z − Z‖₁ = Σμ − ⟨2μ − 1, z⟩

    def _with_gains(self, gains: Tensor) -> Any:
        """A structure with no scores but these; what is forbidden stays forbidden."""
        allowed = self._exact_parts()[0].detach() > -math.inf
        silent = {  # no scores of additional parts either
            name: torch.where(t == -math.inf, -math.inf, 0.0).to(gains.dtype)
            for name, (t, _) in self._tensors().items()
            if name in self._additional
        }
        return self._replace_primary(torch.where(allowed, gains, -math.inf), **silent)

    def sparsemap(
        self,
        method: str = "active-set",
        max_iter: int = 1000,
        tol: float | None = None,
        init: SparseMAPResult | None = None,
        penalize: str = "primary",
    ) -> SparseMAPResult:
        from structmax.sparse.solve import sparsemap  # which itself needs this class

        return sparsemap(self, method, max_iter, tol, init, penalize)

    # -- scores and probabilities -----------------------------------------------------------------

    def score(self, z: Tensor) -> Tensor:
        return self._score(self._indicator(z))

    def log_prob(self, z: Tensor) -> Tensor:
        return self._gibbs_log_prob(self.score(z), self.log_partition())

    def _gibbs_log_prob(self, score: Tensor, value: Tensor) -> Tensor:
        log_prob = at_most_zero((score - value) / self.smoothing.gamma)
        nothing = (score == -math.inf) & (value == -math.inf)  # an item without a structure
        return torch.where(nothing, -math.inf, log_prob)

    def cross_entropy(self, q: Structure) -> Tensor:
        p, q = self._aligned(q)
        return p._gibbs_cross_entropy(q, *p._value_and_gradient())

    def _gibbs_cross_entropy(self, q: Any, own: Tensor, mu: tuple[Tensor, ...]) -> Tensor:
        """The cross-entropy, given the value and gradient of this structure."""
        value = own if q is self else q._value()
        pairs = zip(q._allowed_parts(), mu, strict=True)
        terms = [dot(theta, m, m.dim() - len(self.batch_shape)) for theta, m in pairs]
        total = sum(terms[1:], terms[0])
        forbids = total == -math.inf
        total = as_dtype((value - total) / q.smoothing.gamma, own.dtype)
        return self._cross_entropy(own, value, forbids, total)

    def _cross_entropy(self, own: Tensor, other: Tensor, forbids: Tensor, total: Tensor) -> Tensor:
        """A cross-entropy ``(*batch)``, given the values A of both and where q forbids what p uses:
        +inf there, and where q allows nothing. A p that allows nothing is an error, or NaN."""
        none = (forbids | (other == -math.inf)) & ~other.isnan()
        total = torch.where(none, math.inf, at_least_zero(total))
        return self._refuse_infeasible("cross_entropy", own.expand(total.shape), total)

    def _kl(self, q: Structure) -> Tensor:
        if "cross_entropy" not in self.queries or not isinstance(q, PartStructure):
            return super()._kl(q)
        one, other = self._aligned(q)
        if not (one._is_gibbs and other._is_gibbs):
            return super()._kl(q)
        own, mu = one._value_and_gradient()
        cross = one._gibbs_cross_entropy(other, own, mu)
        return cross - one._gibbs_cross_entropy(one, own, mu)

    def condition(self, include: Tensor | None = None, exclude: Tensor | None = None) -> Any:
        shape = (*self.batch_shape, *self.event_shape)
        forbidden = torch.zeros(shape, dtype=torch.bool, device=self._parts()[0].device)
        for name, mask in (("include", include), ("exclude", exclude)):
            if mask is None:
                continue
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
                got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
                raise ValueError(
                    f"{self._name}.condition: {name} must be a boolean mask, got {got}."
                )
            try:
                mask = mask.expand(shape)
            except RuntimeError:
                raise ValueError(
                    f"{self._name}.condition: {name} must broadcast to {shape}, "
                    f"got {tuple(mask.shape)}."
                ) from None
            forbidden = forbidden | (self._incompatible(mask) if name == "include" else mask)
        return self._without(forbidden)

    def _without(self, forbidden: Tensor) -> Any:
        """The same structure where no part is one of these, ``(*B, *parts)``."""
        primary = self._parts()[0].to(self.dtype)
        return self._replace_primary(torch.where(forbidden, -math.inf, primary))

    @torch.no_grad()
    def ranked_support(self) -> Iterator[Ranked]:
        k, rank = 4, 0
        while True:
            z, log_prob = self._likeliest(k)
            while rank < k:
                if not bool((log_prob[..., rank] > -math.inf).any()):
                    return
                yield Ranked(z.select(len(self.batch_shape), rank), log_prob[..., rank])
                rank += 1
            k *= 2

    def _likeliest(self, k: int) -> tuple[Tensor, Tensor]:
        """The k structures of highest probability and its logarithm, −inf past the last."""
        best = self.topk(k)
        log_prob = self._gibbs_log_prob(best.scores, self.log_partition()[..., None])
        return best.structures, torch.where(best.exists, log_prob, -math.inf)


def at_most_zero(log_prob: Tensor) -> Tensor:
    """Log-probabilities without what rounding puts above 0; their gradients stay."""
    return log_prob - log_prob.detach().clamp(min=0)
