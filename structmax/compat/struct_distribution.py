"""What the distributions of ``compat.torch_struct`` have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, kl_divergence

from structmax import checks
from structmax.structures.base import Structure, dot


class StructDistribution(Distribution):
    """What all have in common: a distribution over structures, given by its log-potentials.

    Args:
        log_potentials: ``(B, *event)``
        lengths: ``(B)``
        args: not used

    >>> from structmax.compat.torch_struct import TreeCRF
    >>> isinstance(TreeCRF(torch.zeros(1, 2, 2, 1)), StructDistribution)
    True
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    struct: ClassVar[Any]
    """The class itself: ``LinearChainCRF.struct.to_parts`` is where torch-struct has it."""
    _event: tuple[str, ...]  # names of sizes; equal names are equal sizes

    def __init_subclass__(cls) -> None:
        cls.struct = cls

    def __init__(self, log_potentials: Any, lengths: Any = None, args: Any = None) -> None:
        self.log_potentials = log_potentials
        first = log_potentials if isinstance(log_potentials, Tensor) else log_potentials[0]
        event, known = first.shape[1:], {"3": 3}
        if len(event) != len(self._event) or any(
            known.setdefault(name, size) != size
            for name, size in zip(self._event, event, strict=True)
        ):
            raise ValueError(
                f"{type(self).__name__}: log_potentials must be (B, {', '.join(self._event)}), "
                f"got {tuple(first.shape)}."
            )
        super().__init__(first.shape[:1], event, validate_args=False)
        self._set_lengths(lengths, first.device)
        self._structure(log_potentials)  # which validates them

    def _set_lengths(self, lengths: Any, device: torch.device) -> None:
        given = None if lengths is None else checks.lengths(type(self).__name__, lengths, device)
        self.lengths = None if given is None else given.to(device)

    @property
    def structure(self) -> Any:
        """The structure that answers: another one at each query, so that each has a graph of its
        own, through which one can go backward."""
        return self._structure(self.log_potentials)

    @abstractmethod
    def _structure(self, potentials: Any) -> Structure:
        """The structure with these potentials."""

    def _parts(self, z: Tensor) -> Any:
        """z ``(..., *z)`` as events ``(..., *event)``; linear, so it takes marginals too."""
        return z

    def _score(self, value: Any) -> Tensor:
        return dot(self.log_potentials, value.to(self.log_potentials), len(self.event_shape))

    @property
    def partition(self) -> Tensor:
        """The log-partition function, ``(B)``."""
        return self.structure.log_partition()

    @property
    def marginals(self) -> Any:
        """The probability of each part, ``(B, *event)``. Differentiable."""
        return self._parts(self.structure.marginals())

    @property
    def argmax(self) -> Any:
        """The best structure, ``(B, *event)``."""
        return self._parts(self.structure.argmax())

    @property
    def mode(self) -> Any:
        """The best structure, as ``argmax``."""
        return self.argmax

    @property
    def max(self) -> Tensor:
        """The score of the best structure, ``(B)``. Its gradient is ``argmax``."""
        return self._score(self.argmax)

    @property
    def entropy(self) -> Tensor:  # type: ignore[override]
        """H(p), ``(B)``."""
        return self.structure.entropy()

    @property
    def count(self) -> Tensor:
        """How many structures there are, ``(B)``."""
        count = self._structure(self._silent()).log_partition().exp().round()
        return count.to(self.structure.dtype)

    def _silent(self) -> Any:
        """Potentials of 0, or −inf where the own ones are."""
        return silent(self.log_potentials)

    def log_prob(self, value: Any) -> Tensor:
        """⟨potentials, value⟩ − partition, ``(*sample, B)``. Whether value is a structure is not
        looked at."""
        return self._score(value) - self.partition

    def sample(self, sample_shape: Sequence[int] = torch.Size()) -> Any:
        """Exact draws, ``(*sample, B, *event)``."""
        return self._parts(self.structure.sample(sample_shape))

    def gumbel_crf(self, temperature: float = 1.0) -> Any:
        """Not here: the error says what to use."""
        raise NotImplementedError(
            f"{type(self).__name__}.gumbel_crf is not here. Give a structure with "
            f"smoothing=sx.Shannon({temperature}) to sx.estimators.PerturbAndParse(hard=True)."
        )

    def topk(self, k: int) -> Any:
        """The k best structures, ``(k, B, *event)``."""
        return self._parts(self.structure.topk(k).structures.movedim(1, 0))

    def kmax(self, k: int) -> Tensor:
        """The scores of the k best structures, ``(k, B)``."""
        return self.structure.topk(k).scores.movedim(1, 0)

    def cross_entropy(self, other: StructDistribution) -> Tensor:
        """−E_p log q with p this distribution and q the other, ``(B)``."""
        return self.structure.cross_entropy(other.structure)

    def kl(self, other: StructDistribution) -> Tensor:
        """KL(p ‖ q) with p this distribution and q the other, ``(B)``."""
        return kl_divergence(self.structure, other.structure)

    def to_event(self, sequence: Tensor, extra: Any, lengths: Any = None) -> Any:
        """The event of a compact form, see ``to_parts``."""
        return self.to_parts(sequence, extra, lengths)

    def from_event(self, event: Any) -> Any:
        """The compact form of an event and ``extra``, see ``from_parts``."""
        return self.from_parts(event)

    @staticmethod
    def to_parts(sequence: Tensor, extra: Any, lengths: Any = None) -> Any:
        """The event of a compact form, as integers; by default they are the same."""
        return sequence

    @staticmethod
    def from_parts(parts: Any) -> Any:
        """The compact form of events, and what ``to_parts`` takes as ``extra``."""
        return parts, None


def silent(potentials: Tensor) -> Tensor:
    """Zeros, but −inf where the potentials are, in float64: exact for counts below 2⁴⁵ or so."""
    return torch.where(potentials == -torch.inf, -torch.inf, 0.0).double()
