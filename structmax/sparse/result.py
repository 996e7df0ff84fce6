"""What a SparseMAP solver finds, and what the user gets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structmax.primitive import untransformed, unwrapped


class Solution(NamedTuple):
    """What a solver returns for a flat batch, without gradients and in float64.

    Items have different numbers of active structures, at most K; an unused slot has probability 0
    and repeats slot 0. An item that allows no structure has NaN as its probabilities and its gap.

    >>> import torch
    >>> found = Solution(torch.eye(2)[None], torch.zeros(1, 2, 0), torch.tensor([[0.75, 0.25]]),
    ...                  torch.zeros(1), torch.tensor([3]))
    >>> (found.probs[..., None] * found.vertices).sum(1)  # μ of two options
    tensor([[0.7500, 0.2500]])
    """

    vertices: Tensor
    """Counts of the primary parts of each active structure, ``(B, K, d)``."""
    edges: Tensor
    """Those of the additional parts, flattened and concatenated, ``(B, K, e)``; e may be 0."""
    probs: Tensor
    """``(B, K)``: at least 0, sums to one."""
    gap: Tensor
    """The duality gap, absolute, ``(B)``: the objective is at most this below its maximum."""
    iterations: Tensor
    """How many times the oracle was asked, ``(B)``, int64."""
    inverse: Tensor | None = None
    """(MᵀM + 11ᵀ)⁻¹ for the penalised counts M of the active structures, ``(B, K, K)``, 0 in unused
    slots: what derivatives need, if the solver has it."""
    face: Any = None
    """The same of the whole face, as lists of parts and a factor (``linear_cpu.Face``), where the
    solver is compiled; vertices and edges are then in the dtype of the structure, since nothing is
    computed from them."""
    items: Tensor | None = None
    """Items ``(b)`` whose face has more directions than the active structures show."""
    rows: Tensor | None = None
    """What spans all directions of their faces, ``(b, k, d + e)``: orthonormal directions (see
    ``completion``) or, with ``inner``, structures."""
    inner: Tensor | None = None
    """(MᵀM + 11ᵀ)⁻¹ of these structures, ``(b, k, k)``."""
    whole: bool = False
    """Whether the rest of the faces was looked for: ``face``, ``items`` and ``rows`` have it."""


class Constraints(NamedTuple):
    """All of a structure that is no score: it determines which structures there are, up to parts of
    score −inf. Integers are copied, since the caller may write into them.

    >>> import structmax as sx
    >>> three = Constraints.of(sx.KSubset(torch.zeros(2, 4), 2, lengths=torch.tensor([3, 4])))
    >>> three.agree(Constraints.of(sx.KSubset(torch.zeros(2, 4), 2, lengths=torch.tensor([4, 4]))))
    tensor([False,  True])
    """

    kind: type
    options: dict[str, Any]
    shapes: dict[str, torch.Size]
    """The event shape of each tensor by its name, scores included."""
    integers: dict[str, Tensor]
    """Lengths, goals, targets and masks, each ``(*batch, *event)``."""

    @classmethod
    def of(cls, structure: Any) -> Constraints:
        batch = structure.batch_shape
        shapes, integers = {}, {}
        with untransformed():  # a result may outlive the transform that it was found in
            for name, (t, d) in structure._tensors().items():
                shapes[name] = t.shape[t.dim() - d :]
                if not t.is_floating_point():
                    integers[name] = unwrapped(t).expand((*batch, *shapes[name])).clone()
        options = {k: v for k, v in structure._options().items() if not isinstance(v, Tensor)}
        return cls(type(structure), options, shapes, integers)

    def agree(self, other: Constraints) -> Tensor | bool:
        """Which items have the same constraints in both, ``(*batch)``; False if none can."""
        if self[:3] != other[:3] or self.integers.keys() != other.integers.keys():
            return False
        same: Tensor | bool = True
        for name, own in self.integers.items():
            equal = own == other.integers[name].to(own.device)
            dims = len(self.shapes[name])
            same = same & (equal.flatten(equal.dim() - dims).all(-1) if dims else equal)
        return same


@dataclass(frozen=True)
class SparseMAPResult:
    """A sparse distribution over structures, whose mean is the SparseMAP solution μ.

    ``marginals``, ``probs``, ``value`` and ``additional`` are differentiable in every score. μ is
    unique. The distribution need not be: several may have this mean, and ``probs`` is one of them,
    over structures none of which is an affine combination of the others (by ``"active-set"``). Its
    derivatives are those with the active structures held fixed. Those of μ are exact by
    ``"active-set"``; by another method they are within the hull of the structures that it has met.

    >>> import torch, structmax as sx
    >>> result = sx.Choice(torch.tensor([-2.0, 0.0, 0.5])).sparsemap()
    >>> result.marginals, result.num_active
    (tensor([0.0000, 0.2500, 0.7500]), tensor(2))
    """

    marginals: Tensor
    """μ, ``(*batch, *parts)``."""
    structures: Tensor
    """The active structures, ``(*batch, k, *parts)``; an unused slot repeats the first."""
    probs: Tensor
    """Their probabilities, ``(*batch, k)``, 0 in unused slots."""
    num_active: Tensor
    """How many structures have a probability above 0, ``(*batch)``, int64."""
    gap: Tensor
    """The duality gap, ``(*batch)``: the objective is at most this below its maximum."""
    value: Tensor
    """The objective, max over μ of ⟨θ, μ⟩ − ½‖μ‖², ``(*batch)``; its gradient is μ."""
    additional: tuple[Tensor, ...]
    """Expected counts of the additional parts (transitions, …), each ``(*batch, *event)``."""
    edges: Tensor
    """Counts of the additional parts of each active structure, flattened, ``(*batch, k, e)``."""
    iterations: Tensor
    """How many times the oracle was asked for the best structure, ``(*batch)``, int64."""
    _constraints: Constraints | None = field(default=None, repr=False, compare=False)
    """Those of the structure that it is a result of, if they are known."""
