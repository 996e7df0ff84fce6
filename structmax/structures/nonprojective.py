"""Trees below a root in a directed graph, by the Matrix-Tree theorem and maximum arborescences."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from structmax import checks, magnitude
from structmax.oracles import arborescence, matrix_tree
from structmax.smoothing import SHANNON, Shannon
from structmax.structures.base import uniform
from structmax.structures.dependency_tree import DependencyTree
from structmax.structures.square import SquareStructure


class ArcStructure(SquareStructure):
    """A square structure whose z are trees below node 0: each other node has one head."""

    _single = False

    @abstractmethod
    def _arcs(self) -> Tensor:
        """Scores of arcs, labels summed out, ``(*B, s, s)``: float64 unless they are as given."""

    @abstractmethod
    def _choices(self) -> Tensor:
        """Scores of arcs with each label, ``(*B, s, s, c)``; one label if there are none."""

    @abstractmethod
    def _words(self) -> Tensor:
        """How many nodes have a head, ``(*B)``."""

    @abstractmethod
    def _from_arcs(self, mu: Tensor) -> Tensor:
        """Marginals of the primary parts from those of arcs."""

    @abstractmethod
    def _z_of(self, heads: Tensor, labels: Tensor | None) -> Tensor:
        """The indicator of heads and labels ``(..., s−1)``."""

    @property
    def _has_choices(self) -> bool:
        """Whether ``_choices`` holds more than one label."""
        return self.labelled

    def _refuse_smoothing(self) -> None:
        if self.smoothing.code[0] != SHANNON:
            raise ValueError(
                f"{self._name}: smoothing must be sx.Shannon(gamma), got {self.smoothing}: the "
                "others smooth a dynamic program, and none sums over these trees. "
                "Dependency trees with projective=True take any."
            )

    # -- value and gradient -----------------------------------------------------------------------

    def _sum(self) -> tuple[Any, ...]:
        return (self._arcs(),), (self._words(),), self._key(), self.smoothing.code

    def _key(self) -> str:
        return "single" if self._single else "multi"

    def _value(self) -> Tensor:
        return self._as_finite(matrix_tree.matrix_tree.value(*self._sum()))

    def _value_and_gradient(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        value, mu = matrix_tree.matrix_tree.value_and_gradient(*self._sum())
        dtype = self._parts()[0].dtype
        return self._as_finite(value), (self._from_arcs(mu).to(dtype),)

    def _as_finite(self, value: Tensor) -> Tensor:
        """A in the dtype of the scores; what is finite stays finite."""
        dtype = self._parts()[0].dtype
        if value.dtype == dtype:
            return value
        return magnitude.clamped(value, torch.finfo(dtype).max).to(dtype)

    # -- discrete queries -------------------------------------------------------------------------

    def _best(self) -> tuple[Tensor, Tensor]:
        """The score of the best structure, and its z."""
        if self._has_choices:
            best, labels = self._choices().detach().max(-1)
        else:
            best, labels = self._arcs(), None
        value, heads = arborescence.best_tree(best.detach(), self._words(), self._single)
        return value, self._z_of(heads, None if labels is None else self._at(labels, heads))

    def argmax(self) -> Tensor:
        value, z = self._best()
        return self._refuse_infeasible("argmax", value, z).to(self.dtype)

    def _argmax_parts(self, parts: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        value, z = self._replace_primary(parts[0])._best()
        return value, (z.to(parts[0].dtype),)

    def _at(self, square: Tensor, heads: Tensor) -> Tensor:
        """Entries ``[head, modifier]`` of ``(*B, s, s, ...)`` at heads ``(..., *B, s−1)``."""
        s, at = self.event_shape[0], len(self.batch_shape)
        flat = square.flatten(at, at + 1)
        index = heads * s + torch.arange(1, s, device=heads.device)
        flat = flat.expand(*index.shape[:-1], *flat.shape[at:])
        more = flat.dim() - index.dim()
        index = index[(..., *[None] * more)].expand(*index.shape, *flat.shape[flat.dim() - more :])
        return flat.gather(flat.dim() - more - 1, index)

    def sample(
        self, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None
    ) -> Tensor:
        """Exact draws: heads word by word, each from its distribution given those before it."""
        shape = checks.sample_shape(self._name, sample_shape)
        s, gamma = self.event_shape[0], self.smoothing.gamma
        with torch.no_grad():
            value, arcs = self.log_partition(), self._arcs()
        size = shape.numel(), *self.batch_shape, s - 1, 1 + self._has_choices
        numbers = uniform(size, arcs.device, generator)
        heads = matrix_tree.sample(
            arcs.detach(), self._words(), numbers[..., 0], self._single, gamma
        )
        labels = None
        if self._has_choices:
            reached = self._at(self._label_chances().detach(), heads).cumsum(-1)
            labels = (reached <= numbers[..., 1:] * reached[..., -1:]).sum(-1)
            labels = labels.clamp(max=reached.shape[-1] - 1)
        at = len(self.batch_shape)
        z = self._z_of(heads, labels).movedim(0, at)
        z = self._refuse_infeasible("sample", value, z).movedim(at, 0)
        return z.reshape(*shape, *self.batch_shape, *self.event_shape).to(self.dtype)

    def _label_chances(self) -> Tensor:
        """P(label | arc), ``(*B, s, s, labels)``, in float64."""
        return Shannon(self.smoothing.gamma).argmax(self._choices().double())

    def _kbest(self, k: int) -> tuple[Tensor, Tensor]:
        choices, at = self._choices().detach(), len(self.batch_shape)
        scores, choice = arborescence.best_trees(choices, self._words(), self._single, k)
        heads, label = choice // choices.shape[-1], choice % choices.shape[-1]
        z = self._z_of(heads.movedim(at, 0), label.movedim(at, 0) if self._has_choices else None)
        exists = (scores > -math.inf)[(..., *[None] * len(self.event_shape))]
        return scores, torch.where(exists, z.movedim(0, at), 0.0)


class NonprojectiveTree(DependencyTree, ArcStructure):
    """Dependency trees whose arcs may cross; made by ``DependencyTree(..., projective=False)``.

    No dynamic program sums over these trees, so ``smoothing`` is ``sx.Shannon``: the temperature.

    - ``log_partition`` and ``marginals``: the Matrix-Tree theorem (Koo et al. 2007, "Structured
      prediction models via the Matrix-Tree theorem"), without a subtraction, so that scores may
      spread over thousands of nats (see ``oracles/matrix_tree_cpu.py``), in O(n³).
    - ``argmax``: Chu and Liu's and Edmonds' algorithm in O(n²); a single root by comparing the
      numbers of root arcs before the scores.
    - ``topk``: exact, O(k n³). ``max_marginals``: one constrained argmax for each arc, O(n⁴).
    - ``sample``: exact, O(n³) a draw, whatever the scores.

    ``topk``, ``max_marginals``, ``sample`` and, beyond 127 words, ``argmax`` run on the CPU:
    tensors of a GPU are copied there and back. On a GPU it is the first query that finds NaN or
    +inf in the scores.
    """

    _validates_late = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._single = self.root == "single"
        self._refuse_smoothing()

    def _sum(self) -> tuple[Any, ...]:
        self._validate()
        return super()._sum()

    def _kbest(self, k: int) -> tuple[Tensor, Tensor]:
        self._validate()
        return super()._kbest(k)

    def _words(self) -> Tensor:
        return self._lengths()

    def _choices(self) -> Tensor:
        scores = self._primary() if self.labelled else self._primary()[..., None]
        return torch.where(self._used()[..., None], scores, 0.0)

    def _arcs(self) -> Tensor:
        if not self.labelled:
            return self._primary()
        return Shannon(self.smoothing.gamma).max(self._choices().double())

    def _from_arcs(self, mu: Tensor) -> Tensor:
        return mu[..., None] * self._label_chances() if self.labelled else mu

    def max_marginals(self) -> Tensor:
        self._validate()
        choices = self._choices().detach()
        rest = arborescence.best_rest(choices.amax(-1), self._words(), self._single)
        best = torch.where(self._used()[..., None], rest[..., None] + choices, -math.inf)
        return best if self.labelled else best[..., 0]
