"""Labelled segmentations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structmax import checks
from structmax.forest import ops
from structmax.forest.topology import Forest, ForestBuilder, bucket, family, name_of
from structmax.smoothing import Smoothing
from structmax.structures.base import Structure, dot
from structmax.structures.dynamic import DynamicStructure
from structmax.structures.lengths import OneSided
from structmax.structures.nesting import nest, unnest


@family
def semi_markov(n: int, k: int, c: int, steps: int) -> Forest:
    """Segments of at most k of n positions, with c labels; see :class:`SemiMarkov`.

    Parts: ``start, length−1, label``, then ``step, from, to`` for transitions, of which there are
    n − 1 steps, or one that all share, or none.
    """
    draw = ForestBuilder()
    label = np.arange(c)
    start, less = np.nonzero(np.arange(n)[:, None] + np.arange(k) < n)
    part = ((start * k + less) * c)[:, None] + label
    start, stop = start[:, None], (start + less + 1)[:, None]
    if not steps:
        draw.nodes(n + 1)
        draw.edges(stop, start, -1, part)
        return draw.build(n * k * c)
    draw.nodes(n * (2 * c + 1))

    def after(t: Any) -> Any:  # a segment with this label starts after t positions
        return t * (2 * c + 1) + label

    def upto(t: Any) -> Any:  # t positions are done and the last segment has this label
        return t * (2 * c + 1) - c - 1 + label

    draw.edges(upto(stop), after(start), -1, part)
    t = np.arange(1, n)[:, None]
    step = np.minimum(t - 1, steps - 1)[..., None] * c * c
    between = n * k * c + step + label[:, None] * c + label  # (n − 1, from, to)
    draw.edges(after(t)[:, None, :], upto(t)[:, :, None], -1, between)
    t = np.arange(1, n + 1)[:, None]
    draw.edges(t * (2 * c + 1) - 1, upto(t))
    return draw.build(n * k * c + steps * c * c)


class SemiMarkov(OneSided, DynamicStructure):
    """A segmentation with a label for each segment: the semi-Markov conditional random field.

    The score is the sum of segments[start, length − 1, label] over the segments, which cover the
    positions from left to right, and of transition[from, to] over the labels of neighbours
    (Sarawagi & Cohen, 2004). Without transitions the graph has a node for each boundary t, reached
    from t − 1, …, t − K by edges that carry the segments; the goal is the last boundary. With
    transitions a boundary has two nodes for each label and a goal, so that there are n K c + n c²
    edges and not n K c²::

        after(t−l, j) ──segment──► upto(t, j) ──transition──► after(t, i)
                                        ╲──► goal(t)

    upto(t, j): the first t positions are done and j is the last label; it chooses the length of
    the last segment. after(t, i): the next label is i; it chooses the label before. Integer form: a
    list of ``(first, last, label)`` for each item, both ends inclusive as for spans elsewhere.

    Args:
        segments: ``(*B, n, K, c)``, ``[start, length−1, label]``; a segment that runs past the end
            may hold anything
        transition: ``[from, to]``, ``(c, c)`` or ``(*B, c, c)``; None is zero and cheaper
        lengths: ``(*B)``
        smoothing: Ω, by default ``sx.Shannon(1.0)``

    >>> import structmax as sx
    >>> segments = torch.zeros(4, 2, 2)  # four positions, segments of one or two, two labels
    >>> segments[1, 1, 0] = 3.0  # positions 1 and 2 together, with label 0
    >>> split = sx.SemiMarkov(segments, transition=torch.tensor([[0.0, 1.0], [0.5, 0.0]]))
    >>> split.decode(split.argmax())
    [(0, 0, 1), (1, 2, 0), (3, 3, 1)]
    >>> split.score([(0, 0, 1), (1, 2, 0), (3, 3, 1)])
    tensor(4.5000)
    >>> sx.SemiMarkov(segments * 0).log_partition().exp()  # how many there are
    tensor(44.0000)
    """

    def __init__(
        self,
        segments: Tensor,
        transition: Tensor | None = None,
        lengths: Tensor | None = None,
        smoothing: Smoothing | None = None,
        validate_args: bool | None = None,
    ) -> None:
        name = self._name
        checks.scores(name, "segments", segments, 3, "(..., n, K, c) with n, K, c at least 1")
        n, k, c = segments.shape[-3:]
        if transition is not None:
            checks.scores(name, "transition", transition, 0, "")
            if transition.dim() < 2 or transition.shape[-2:] != (c, c):
                raise ValueError(
                    f"{name}: transition must be (..., {c}, {c}) to match segments "
                    f"{tuple(segments.shape)}, got {tuple(transition.shape)}."
                )
        if lengths is not None:
            lengths = checks.lengths(name, lengths, segments.device)
        checks.same_device(name, segments=segments, transition=transition, lengths=lengths)
        self.segments, self.transition, self.lengths = segments, transition, lengths
        batch = checks.batch_shape(
            name, segments=(segments, 3), transition=(transition, 2), lengths=(lengths, 0)
        )
        super().__init__(batch, (n, k, c), smoothing, validate_args)

    _additional = ("transition",)

    def _given_scores(self) -> dict[str, tuple[Tensor, checks.Mask]]:
        segments: tuple[Tensor, checks.Mask] = self.segments, self._usable_parts
        if self.transition is None:
            return {"segments": segments}
        return {"segments": segments, "transition": (self.transition, None)}

    @classmethod
    def from_positions(
        cls,
        unary: Tensor,
        max_length: int,
        transition: Tensor | None = None,
        duration: Tensor | None = None,
        lengths: Tensor | None = None,
        smoothing: Smoothing | None = None,
        validate_args: bool | None = None,
    ) -> SemiMarkov:
        """Segments scored by their positions: Σ unary[t, label] + duration[length − 1, label].

        The sums run along each start, so −inf stays exact and nothing cancels; time and memory are
        O(n K c). Half-precision scores are summed in float32, and z is then float32.

        Args:
            unary: ``(*B, n, c)``
            max_length: K
            transition: ``(c, c)`` or ``(*B, c, c)``
            duration: ``(K, c)`` or ``(*B, K, c)``

        >>> import structmax as sx
        >>> unary = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> split = sx.SemiMarkov.from_positions(unary, 3, transition=torch.full((2, 2), -0.5))
        >>> split.decode(split.argmax())
        [(0, 1, 0), (2, 2, 1)]
        """
        name = f"{cls.__name__}.from_positions"
        checks.scores(name, "unary", unary, 2, "(..., n, c) with n and c at least 1")
        n, c = unary.shape[-2:]
        if not isinstance(max_length, int) or max_length < 1:
            raise ValueError(
                f"{name}: max_length must be at least 1, an integer, got {max_length!r}."
            )
        scores: dict[str, tuple[Tensor, checks.Mask]] = {"unary": (unary, None)}
        sizes: dict[str, checks.Integers] = {}
        if duration is not None:
            checks.scores(name, "duration", duration, 2, f"(..., {max_length}, {c})")
            if duration.shape[-2:] != (max_length, c):
                raise ValueError(
                    f"{name}: duration must be (..., {max_length}, {c}), one for each length and "
                    f"label, got {tuple(duration.shape)}."
                )
            checks.same_device(name, unary=unary, duration=duration)
            checks.batch_shape(name, unary=(unary, 2), duration=(duration, 2))
            scores["duration"] = (duration, None)
        if lengths is not None:
            lengths = checks.lengths(name, lengths, unary.device)
            checks.batch_shape(name, unary=(unary, 2), lengths=(lengths, 0))
            inside = torch.arange(n, device=unary.device) < lengths[..., None].to(unary.device)
            scores["unary"] = (unary, inside[..., None])
            sizes["lengths"] = checks.between(lengths, 1, n)
        if validate_args is not False and checks.can_look():
            checks.values(name, scores, sizes)
        if unary.dtype.itemsize < 4:
            unary = unary.float()
        ahead = torch.nn.functional.pad(unary, (0, 0, 0, max_length - 1))
        segments = ahead.unfold(-2, max_length, 1).cumsum(-1).transpose(-1, -2)  # (*B, n, K, c)
        if duration is not None:
            segments = segments + duration.unsqueeze(-3)
        return cls(segments, transition, lengths, smoothing, validate_args)

    def _tensors(self) -> dict[str, tuple[Tensor, int]]:
        given = {"segments": (self.segments, 3), "transition": (self.transition, 2)}
        given["lengths"] = (self.lengths, 0)
        return {name: (t, d) for name, (t, d) in given.items() if t is not None}

    def _options(self) -> dict[str, Any]:
        return {}

    # -- scores -----------------------------------------------------------------------------------

    def _inside(self) -> Tensor:
        """Which segments end within the length, ``(*B, n, K)``."""
        return self._last() < self._lengths()[..., None, None]

    def _last(self) -> Tensor:
        """The last position of each segment, ``(n, K)``."""
        n, k, _ = self.event_shape
        start = torch.arange(n, device=self.segments.device)
        return start[:, None] + torch.arange(k, device=self.segments.device)

    def _unvalidated_parts(self) -> tuple[Tensor, ...]:
        dtype = torch.promote_types(torch.float32, self.segments.dtype)
        if self.transition is not None:
            dtype = torch.promote_types(dtype, self.transition.dtype)
        segments = self.segments.to(dtype).expand(*self.batch_shape, *self.event_shape)
        segments = self._nan_where_wrong(segments)
        if self.transition is None:
            return (segments,)
        c = self.event_shape[-1]
        return segments, self.transition.to(dtype).expand(*self.batch_shape, c, c)

    def _forest_key(self) -> str:
        n, k, c = self.event_shape
        return name_of("semi_markov", (bucket(n), k, c, 0 if self.transition is None else 1))

    def _goal(self) -> Tensor:
        if self.transition is None:
            return self._lengths().int()
        return (self._lengths() * (2 * self.event_shape[-1] + 1) - 1).int()

    def _derivation_size(self) -> int:
        n = self.event_shape[0]
        return n + 1 if self.transition is None else 2 * n + 1

    def _pack(self, parts: Any) -> Tensor:
        segments, *transition = parts
        n = self.event_shape[0]
        segments = torch.where(self._inside()[..., None], segments, 0.0)
        segments = torch.nn.functional.pad(segments, (0, 0, 0, 0, 0, bucket(n) - n))
        batch = len(self.batch_shape)
        return torch.cat([segments.flatten(-3), *[t.flatten(batch) for t in transition]], -1)

    def _unpack(self, flat: Tensor) -> tuple[Tensor, ...]:
        n, k, c = self.event_shape
        segments = flat[..., : n * k * c].unflatten(-1, (n, k, c))
        if self.transition is None:
            return (segments,)
        return segments, flat[..., bucket(n) * k * c :].unflatten(-1, (c, c))

    def _usable_parts(self) -> Tensor:
        return self._inside()[..., None]

    def _replace_primary(self, scores: Tensor, **others: Tensor) -> SemiMarkov:
        tensors = {name: t for name, (t, _) in self._tensors().items()}
        return self._rebuild(**{**tensors, **others, "segments": scores})

    def _incompatible(self, include: Tensor) -> Tensor:
        """Segments that share a position with an included one."""
        inside = self._inside()[..., None]
        starts, ends = self._boundaries((include & inside).long())
        starts, ends = starts.sum(-1).cumsum(-1), ends.sum(-1).cumsum(-1)  # (*B, n)
        last = self._last().clamp(max=self.event_shape[0] - 1)
        begun = starts[..., last]  # included segments that start by the end of this one
        over = torch.nn.functional.pad(ends, (1, 0))[..., :-1, None]  # that end before its start
        overlaps = (begun - over)[..., None] - include.long() > 0
        # what runs past the length cannot be included: then nothing is left
        return overlaps | (include & ~inside).flatten(-3).any(-1)[..., None, None, None]

    def _aligned(self, q: Structure) -> tuple[DynamicStructure, DynamicStructure]:
        p, q = super()._aligned(q)
        if self.lengths is not None or getattr(q, "lengths", None) is not None:
            p._same_goals(q, "lengths")
        return p, q

    def edge_marginals(self) -> Tensor:
        """The probability of each transition at each boundary, ``(*B, n−1, c, c)``. Differentiable.

        ``[t, i, j]``: a segment with label i ends at position t and one with label j follows.

        >>> import structmax as sx
        >>> split = sx.SemiMarkov(torch.zeros(2, 2, 1), transition=torch.zeros(1, 1))
        >>> split.edge_marginals()  # one segment or two
        tensor([[[0.5000]]])
        """
        if self.transition is None:
            raise ValueError(
                f"{self._name}.edge_marginals: there are no transitions. Use "
                "transition=torch.zeros(c, c)."
            )
        n, k, c = self.event_shape
        size = bucket(n)
        steps = max(size - 1, 1)
        segments, transition = self._parts()
        each = transition[..., None, :, :].expand(*self.batch_shape, steps, c, c)
        key, code = name_of("semi_markov", (size, k, c, steps)), self.smoothing.code
        theta = self._pack((segments, each))
        value, mu = ops.forest.value_and_gradient((theta,), (self._goal(),), key, code)
        mu = mu[..., size * k * c :].unflatten(-1, (steps, c, c))[..., : n - 1, :, :]
        return self._refuse_infeasible("edge_marginals", value, mu).to(self.dtype)

    # -- segments ---------------------------------------------------------------------------------

    def _boundaries(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """How many segments of each label start and end at each position, ``(..., n, c)`` each."""
        n, k, c = self.event_shape
        ends = z.new_zeros(*z.shape[:-3], n + k - 1, c)
        ends = ends.index_add(-2, self._last().flatten(), z.flatten(-3, -2))
        return z.sum(-2), ends[..., :n, :]

    def _checked(self, z: Tensor) -> Tensor:
        inside = torch.where(self._inside()[..., None], z, 0)
        starts, ends = (x.sum(-1) for x in self._boundaries(inside.double()))
        covered = starts.cumsum(-1) - ends.cumsum(-1) + ends
        position = torch.arange(self.event_shape[0], device=z.device)
        wrong = (covered != 1) & (position < self._lengths()[..., None])
        bits = ((inside != 0) & (inside != 1)).flatten(-3).any(-1)
        wrong = wrong | bits[..., None]
        if bool(wrong.any()):
            where = tuple(wrong.nonzero()[0].tolist())
            raise ValueError(
                f"{self._name}: z must hold 1 for segments that cover each position exactly once, "
                f"and 0 elsewhere; it does not at position {where[-1]} of item {list(where[:-1])}."
            )
        return z

    def _edge_use(self, z: Tensor) -> Tensor:
        return super()._edge_use(torch.where(self._inside()[..., None], z, 0))

    def _score(self, z: Tensor) -> Tensor:
        segments, *transitions = self._parts()
        z = torch.where(self._inside()[..., None], z, 0)
        total = dot(segments, z.to(segments.dtype), 3)
        if transitions:
            starts, ends = self._boundaries(z)
            left, right = ends[..., :-1, :], starts[..., 1:, :]
            pair = left.argmax(-1) * left.shape[-1] + right.argmax(-1)  # (..., n − 1)
            flat = transitions[0].flatten(-2)
            between = flat.expand(*pair.shape[:-1], flat.shape[-1]).gather(-1, pair)
            met = (left.sum(-1) > 0) & (right.sum(-1) > 0)
            total = total + torch.where(met, between, 0.0).sum(-1)
        return total

    def enumerate_support(self, expand: bool = True) -> Tensor:
        n, k, c = self.event_shape
        sizes = self._lengths().unique().tolist()
        if len(sizes) > 1:
            raise ValueError(
                f"{self._name}.enumerate_support: items of different lengths have different "
                "supports. Index one item: structure[i].enumerate_support()."
            )
        length = sizes[0] if sizes else n
        counts = [1]
        for _ in range(length):
            counts.append(c * sum(counts[-k:]))
        if counts[-1] > 1_000_000:
            raise ValueError(
                f"{self._name}.enumerate_support: {counts[-1]} structures are too many."
            )
        checks.room(self._name, f"a list of {counts[-1]:,} structures", 4 * counts[-1] * n * k * c)
        every = self._z_of(list(_segmentations(length, k, c)))
        every = every.reshape(-1, *[1] * len(self.batch_shape), n, k, c)
        return every.expand(-1, *self.batch_shape, n, k, c) if expand else every

    def _z_of(self, items: Sequence[Sequence[tuple[int, int, int]]]) -> Tensor:
        z = torch.zeros(len(items), *self.event_shape, dtype=self.dtype, device="cpu")
        index = [(i, s, e - s, j) for i, item in enumerate(items) for s, e, j in item]
        if index:
            z[tuple(torch.tensor(index, device="cpu").unbind(-1))] = 1
        return z.to(self.segments.device)

    def decode(self, z: Tensor) -> Any:
        """Lists of ``(first, last, label)``, both ends inclusive, nested as the batch of z."""
        batch = z.shape[:-3]
        items = [
            [(s, s + less, j) for s, less, j in item.nonzero().tolist()]
            for item in z.reshape(batch.numel(), *self.event_shape)
        ]
        return nest(items, batch)

    def encode(self, obj: Any) -> Tensor:
        """z of a list of ``(first, last, label)``, or of nested lists of them."""
        n, k, c = self.event_shape
        items, batch = unnest(self._name, obj, 2, len(self.batch_shape))
        for item in items:
            for segment in item:
                first, last, label = segment if len(segment) == 3 else (-1, -1, -1)
                if not (0 <= first <= last < n and last - first < k and 0 <= label < c):
                    raise ValueError(
                        f"{self._name}: a segment is (first, last, label) with 0 ≤ first ≤ last < "
                        f"{n}, at most {k} positions and a label below {c}, got {tuple(segment)}."
                    )
        return self._z_of(items).reshape(*batch, n, k, c)


def _segmentations(length: int, k: int, c: int) -> Iterator[tuple[tuple[int, int, int], ...]]:
    stack: list[tuple[tuple[int, int, int], ...]] = [()]
    while stack:
        segments = stack.pop()
        start = segments[-1][1] + 1 if segments else 0
        if start == length:
            yield segments
        for last in range(start, min(start + k, length)):
            stack += [(*segments, (start, last, label)) for label in range(c)]
