"""Structures whose parts are cells of a square: spans and arcs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from structmax import checks
from structmax.cache import cached
from structmax.forest.topology import bucket
from structmax.primitive import is_transforming
from structmax.smoothing import Smoothing
from structmax.structures.base import Structure
from structmax.structures.dynamic import DynamicStructure
from structmax.structures.lengths import OneSided, full
from structmax.structures.parts import PartStructure
from structmax.tracing import is_recorded

Ints = NDArray[np.int32]


class SquareStructure(OneSided, PartStructure):
    """Scores of the cells of a square, ``(*B, s, s)`` or ``(*B, s, s, labels)``, and lengths.

    Left to itself, ``labelled=None`` is read off the shape: scores whose last two sizes differ are
    labelled. A shape of four or more dimensions whose last three sizes are equal is refused,
    since it would change its meaning with the size; (n, n, n) is a batch without labels.
    """

    _border: ClassVar[int] = 0  # rows and columns that stand for no position
    _sides: ClassVar[str] = "n, n"
    _hint: ClassVar[str] = ""

    def __init__(
        self,
        scores: Tensor,
        lengths: Tensor | None,
        labelled: bool | None,
        smoothing: Smoothing | None,
        validate_args: bool | None,
        **extra: tuple[Tensor | None, int],
    ) -> None:
        name = self._name
        checks.scores(name, "scores", scores, 0, "")
        self.labelled = self._find_labels(scores) if labelled is None else labelled
        dims = 3 if self.labelled else 2
        wanted = f"(..., {self._sides}{', labels' if self.labelled else ''})"
        event = scores.shape[scores.dim() - dims :] if scores.dim() >= dims else None
        if event is None or event[0] != event[1] or event[0] <= self._border or 0 in event:
            raise ValueError(
                f"{name}: scores must be {wanted}, got {tuple(scores.shape)}.{self._hint}"
            )
        if lengths is not None:
            lengths = checks.lengths(name, lengths, scores.device)
        tensors = {name: tensor for name, (tensor, _) in extra.items()}
        checks.same_device(name, scores=scores, **tensors, lengths=lengths)
        self.scores, self.lengths = scores, lengths
        batch = checks.batch_shape(name, scores=(scores, dims), **extra, lengths=(lengths, 0))
        super().__init__(batch, event, smoothing, validate_args)

    def _find_labels(self, scores: Tensor) -> bool:
        if scores.dim() < 3:
            return False
        a, b, c = scores.shape[-3:]
        if scores.dim() > 3 and a == b == c:
            raise ValueError(
                f"{self._name}: scores {tuple(scores.shape)} may be (*B, {self._sides}) or "
                f"(*B, {self._sides}, labels). Say which with labelled=False or labelled=True."
            )
        return a == b != c

    def _given_scores(self) -> dict[str, tuple[Tensor, checks.Mask]]:
        return {"scores": (self.scores, self._usable_parts)}

    def _tensors(self) -> dict[str, tuple[Tensor, int]]:
        given = {"scores": (self.scores, len(self.event_shape))}
        return given if self.lengths is None else {**given, "lengths": (self.lengths, 0)}

    def _options(self) -> dict[str, Any]:
        return {"labelled": self.labelled}

    @property
    def _longest(self) -> int:
        """n: the most positions of an item."""
        return self.event_shape[0] - self._border

    @property
    def _labels(self) -> int:
        """How many labels; 0 stands for unlabelled."""
        return self.event_shape[2] if self.labelled else 0

    def _in_dtype(self, scores: Tensor, dims: int) -> Tensor:
        """Scores of ``dims`` event dimensions for the whole batch, in what is computed in."""
        dtype = torch.float32
        for tensor, _ in self._tensors().values():
            if tensor.is_floating_point():
                dtype = torch.promote_types(dtype, tensor.dtype)
        scores = scores.to(dtype)
        return scores.expand(*self.batch_shape, *scores.shape[scores.dim() - dims :])

    def _primary(self) -> Tensor:
        self._validate(late=True)
        return self._nan_where_wrong(self._in_dtype(self.scores, len(self.event_shape)))

    def _unvalidated_parts(self) -> tuple[Tensor, ...]:
        return (self._primary(),)

    _trees: Any
    """What tells the set of trees from others of this shape."""

    @abstractmethod
    def _used(self) -> Tensor:
        """Which cells a structure may have, ``(s, s)`` or, with lengths, ``(*B, s, s)``."""

    def _usable_parts(self) -> Tensor:
        return self._used()[..., None] if self.labelled else self._used()

    def _replace_primary(self, scores: Tensor, **others: Tensor) -> Any:
        tensors = {name: t for name, (t, _) in self._tensors().items()}
        return self._rebuild(**{**tensors, **others, "scores": scores})

    def _incompatible(self, include: Tensor) -> Tensor:
        used = self._used()[..., None] if self.labelled else self._used()
        never = (include & ~used).flatten(len(self.batch_shape)).any(-1)
        return self._excluded_by(include) | never[(..., *[None] * len(self.event_shape))]

    @abstractmethod
    def _excluded_by(self, include: Tensor) -> Tensor:
        """The parts that exclude one of those included, which are all parts of some structure."""

    def _aligned(self, q: Structure) -> tuple[Any, Any]:
        p, other = super()._aligned(q)
        if not isinstance(other, SquareStructure) or other._trees != self._trees:
            got = other._trees if isinstance(other, SquareStructure) else other._name
            raise ValueError(
                f"{self._name}: both distributions must be over the same trees, got {self._trees} "
                f"and {got}."
            )
        ragged = self.lengths is not None or other.lengths is not None
        if (
            ragged
            and checks.can_look(self._first)
            and bool((self._lengths() != other._lengths()).any())
        ):
            raise ValueError(f"{self._name}: both distributions must have the same lengths.")
        return p, other

    def _masked(self, z: Tensor) -> Tensor:
        """z with zeros where there is no part, the padding included."""
        used = self._used()[..., None] if self.labelled else self._used()
        return torch.where(used, z, torch.zeros_like(z))

    def _one_length(self) -> int:
        """The length of all items, for ``enumerate_support``."""
        sizes = self._lengths().unique()
        if len(sizes) > 1:
            raise ValueError(
                f"{self._name}.enumerate_support: items of different lengths have different "
                "supports. Index one item: structure[i].enumerate_support()."
            )
        return int(sizes[0]) if len(sizes) else self._longest

    def _with_labels(self, every: Tensor, expand: bool) -> Tensor:
        """Each unlabelled structure ``(N, s, s)`` with all its labellings, for the whole batch."""
        every = every.to(self.scores.device, self.dtype)
        if self.labelled:
            c, count = self._labels, int(every[0].sum())
            choice = torch.cartesian_prod(*[torch.arange(c, device="cpu")] * count).reshape(
                -1, count
            )
            labels = torch.nn.functional.one_hot(choice, c).to(every)  # (c^count, count, c)
            whole = every.new_zeros(len(every), len(labels), *self.event_shape)
            for z, filled in zip(every, whole, strict=True):
                at = z.nonzero()
                filled[:, at[:, 0], at[:, 1]] = labels
            every = whole.flatten(0, 1)
        every = every.reshape(len(every), *[1] * len(self.batch_shape), *self.event_shape)
        return every.expand(-1, *self.batch_shape, *self.event_shape) if expand else every


class PackedSquare(SquareStructure, DynamicStructure):
    """A square structure on the forest engine.

    The forest's parts are the cells in an order in which those of a shorter item come first:
    part ``_order(i, j)`` is the cell [i, j], and an item of length n has ``_count(n)`` of them.
    """

    _validates_late = True
    _drawing: ClassVar[int] = 180  # bytes for each cell that drawing the graph takes, measured

    def _check_room(self, sizes: Sequence[int]) -> None:
        super()._check_room(sizes)
        if not is_recorded():
            side = self._event_shape[0]
            checks.room(self._name, f"the graph of {side:,} positions", self._drawing * side**2)

    @staticmethod
    @abstractmethod
    def _order(i: Tensor, j: Tensor) -> Tensor:
        """The numbers of cells [i, j]; negative where there is no part."""

    @staticmethod
    @abstractmethod
    def _count(n: Any) -> Any:
        """How many cells structures of n positions have."""

    @abstractmethod
    def _goal_node(self, n: Any) -> Any:
        """The goal of items of n positions."""

    def _goal(self) -> Tensor:
        if self.lengths is not None:
            return self._goal_node(self._lengths()).int()
        goal = self._goal_node(self._longest)
        return full(self.batch_shape, goal, self.scores.device, torch.int32)

    def _cells(self) -> Tensor:
        """Where each part lies in the flattened square, ``(P)``."""
        numbers = type(self)._order, self.event_shape[0], self._count(self._longest)
        if is_recorded() or torch._C._len_torch_dispatch_stack():
            return _cells_in_order(*numbers, self.scores.device)
        return _kept_cells(*numbers, self.scores.device)

    def _width(self) -> int:
        return self._count(self._longest) * max(self._labels, 1)

    def _theta(self) -> Tensor:
        # a sum of all shows whether they are good; a maximum may pass over a NaN
        return self._pack(self._unvalidated_parts() if self._is_gibbs else self._parts())

    def _pack(self, parts: Any) -> Tensor:
        batch, n = len(self.batch_shape), self._longest
        flat = parts[0].flatten(batch, batch + 1).index_select(batch, self._cells())
        if self.lengths is not None:
            part = torch.arange(self._count(n), device=flat.device)
            inside = part < self._count(self._lengths())[..., None]
            flat = torch.where(inside[..., None] if self.labelled else inside, flat, 0.0)
        flat = flat.flatten(batch)
        grow = (self._count(bucket(n)) - self._count(n)) * max(self._labels, 1)
        return torch.nn.functional.pad(flat, (0, grow)) if grow else flat

    def _unpack(self, flat: Tensor) -> tuple[Tensor, ...]:
        return (self._to_event(flat[..., : self._width()]),)

    def _to_event(self, flat: Tensor, fill: float = 0.0) -> Tensor:
        s, c = self.event_shape[0], self._labels
        if c:
            flat = flat.unflatten(-1, (-1, c))
        at = flat.dim() - 2 if c else flat.dim() - 1
        whole = flat.new_full((*flat.shape[:at], s * s, *flat.shape[at + 1 :]), fill)
        # in place where nothing watches: otherwise whole is copied first
        copy = whole.index_copy if is_transforming((flat,)) else whole.index_copy_
        return copy(at, self._cells(), flat).unflatten(at, (s, s))

    def _edge_use(self, z: Tensor) -> Tensor:
        return super()._edge_use(self._masked(z))


def _cells_in_order(
    order: Callable[[Tensor, Tensor], Tensor], s: int, count: int, device: torch.device
) -> Tensor:
    """The flat positions of the cells of an s × s square that have a number, in its order."""
    side = torch.arange(s, device=device)
    return order(side[:, None], side).flatten().argsort()[s * s - count :]


@cached(most=1 << 26)
def _kept_cells(*args: Any) -> Tensor:
    # what is kept must not belong to a transform, nor be refused by a later backward pass
    with torch._C._DisableFuncTorch(), torch.inference_mode(False):
        return _cells_in_order(*args)


def ragged(counts: NDArray[Any]) -> tuple[Ints, Ints]:
    """For rows of these lengths, the row and the place in the row of every entry."""
    rows = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    starts = np.cumsum(counts) - counts
    return rows, np.arange(len(rows), dtype=np.int32) - starts.astype(np.int32)[rows]
