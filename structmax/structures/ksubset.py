"""Subsets of a given size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structmax import checks
from structmax.forest.topology import Forest, ForestBuilder, bucket, family, name_of
from structmax.oracles import subset as dense
from structmax.primitive import as_dtype, backend_for
from structmax.smoothing import Smoothing
from structmax.structures.base import Structure, dot, uniform
from structmax.structures.dynamic import DynamicStructure
from structmax.structures.lengths import OneSided
from structmax.structures.nesting import nest, unnest

FAR = 800.0  # exp(−FAR) is 0


@family
def k_subset(n: int, least: int, most: int) -> Forest:
    """Node i·(most + 1) + j stands for j of the first i positions; then comes a goal for each i.

    Parts: taking each position, leaving each, and one that is always forbidden, since no subset of
    0 positions has more than 0 elements.
    """
    draw = ForestBuilder()
    node, position = np.arange((n + 1) * (most + 1)).reshape(n + 1, -1), np.arange(n)[:, None]
    draw.nodes(node.size)
    draw.edges(node[0, 1:], -1, -1, 2 * n)
    draw.edges(node[1:], node[:-1], -1, n + position)
    draw.edges(node[1:, 1:], node[:-1, :-1], -1, position)
    draw.edges(draw.nodes(n + 1)[:, None], node[:, least:])
    return draw.build(2 * n + 1)


class KSubset(OneSided, DynamicStructure):
    """A subset of n elements: exactly k of them, or between a least and a greatest number.

    Node (i, j) stands for j of the first i elements; it is reached by leaving element i or by
    taking it. The goal is reached from (n, j) for each number j that is allowed::

        (i−1, j) ────leave────► (i, j)          (n, least) ─┐
                                  ▲                  ⋮       ├──► goal
        (i−1, j−1) ──take i───────┘             (n, most) ──┘

    Under Shannon this is the recursion of elementary symmetric polynomials, in O(n·k) time and
    memory on the CPU; other smoothings and CUDA tensors use the graph. ``argmax`` sorts, on any
    device; ``topk`` moves members of a sorted list (Lawler, 1972), on the CPU: a CUDA tensor is
    copied there and back. An element that is included is never left, so the others share a k that
    is smaller by one.

    Human form: the sorted list of indices. Integer form: the same as a tensor ``(*B, m)``, in any
    order, filled up with −1.

    Args:
        scores: ``(*B, n)``
        k: how many elements, or a pair: at least, at most
        lengths: ``(*B)``; an item with fewer than the least number of elements allows no subset
        smoothing: Ω, by default ``sx.Shannon(1.0)``

    >>> import structmax as sx
    >>> subset = sx.KSubset(torch.tensor([1.0, -1.0, 2.0, 0.0]), 2)
    >>> subset.argmax()
    tensor([1., 0., 1., 0.])
    >>> subset.decode(subset.topk(3).structures)
    [[0, 2], [2, 3], [0, 3]]
    >>> subset.marginals().sum()
    tensor(2.)
    >>> round(sx.KSubset(torch.zeros(10), 3).log_partition().exp().item())  # 10 choose 3
    120

    At most two; nothing that scores below 0 is then best:

    >>> few = sx.KSubset(torch.tensor([-1.0, -1.0, 2.0, -1.0]), (0, 2))
    >>> few.decode(few.argmax())
    [2]
    >>> few.condition(include=torch.tensor([True, False, False, False])).argmax()
    tensor([1., 0., 1., 0.])
    """

    _silent = True

    def __init__(
        self,
        scores: Tensor,
        k: int | tuple[int, int],
        lengths: Tensor | None = None,
        smoothing: Smoothing | None = None,
        validate_args: bool | None = None,
        _forced: Tensor | None = None,
    ) -> None:
        checks.scores("KSubset", "scores", scores, 1, "(..., n) with n at least 1")
        self.scores, self.k = scores, k
        self._least, self._most = self._limits(k, scores.shape[-1])
        self.lengths = (
            None if lengths is None else checks.lengths("KSubset", lengths, scores.device)
        )
        self._forced = _forced  # (*B, n): what a condition includes
        checks.same_device("KSubset", scores=scores, lengths=self.lengths)
        batch = checks.batch_shape("KSubset", **self._tensors())
        super().__init__(batch, scores.shape[-1:], smoothing, validate_args)
        self._check_room((scores.shape[-1], self._most))

    def _given_scores(self) -> dict[str, tuple[Tensor, checks.Mask]]:
        return {"scores": (self.scores, None if self.lengths is None else self._inside)}

    @staticmethod
    def _limits(k: Any, n: int) -> tuple[int, int]:
        pair = tuple(k) if isinstance(k, tuple | list) else (k, k)
        if len(pair) != 2 or not all(type(x) is int for x in pair) or not 0 <= pair[0] <= pair[1]:
            raise ValueError(
                "KSubset: k must be an integer of at least 0, or a pair of them (at least, at "
                f"most), got {k!r}."
            )
        if pair[0] > n:
            raise ValueError(f"KSubset: there are only n = {n} elements, got k = {k!r}.")
        return pair[0], min(pair[1], n)

    def _tensors(self) -> dict[str, tuple[Tensor, int]]:
        given = {
            "scores": (self.scores, 1),
            "lengths": (self.lengths, 0),
            "_forced": (self._forced, 1),
        }
        return {name: (t, d) for name, (t, d) in given.items() if t is not None}

    def _options(self) -> dict[str, Any]:
        return {"k": self.k}

    def _inside(self) -> Tensor:
        """Which elements an item has, ``(*B, n)``."""
        at = torch.arange(self.event_shape[0], device=self.scores.device)
        return at < self._lengths()[..., None]

    # -- the graph --------------------------------------------------------------------------------

    def _unvalidated_parts(self) -> tuple[Tensor, ...]:
        n = self.event_shape[0]
        scores = self.scores.float() if self.scores.dtype.itemsize < 4 else self.scores
        scores = self._nan_where_wrong(scores.expand(*self.batch_shape, n))
        leave = scores.new_zeros(()).expand(*self.batch_shape, n)
        if self._forced is not None:
            leave = torch.where(self._forced, -math.inf, leave)
        return scores, leave

    def _pack(self, parts: Sequence[Tensor]) -> Tensor:
        n, inside = self.event_shape[0], self._inside()
        grow = (0, bucket(n) - n)
        flat = [torch.nn.functional.pad(torch.where(inside, p, 0.0), grow) for p in parts]
        return torch.cat([*flat, torch.full_like(flat[0][..., :1], -math.inf)], -1)

    def _relative(self) -> tuple[Tensor, Tensor, Tensor]:
        """Scores of taking and leaving as ``subset_cpu`` compares them, and what A gains by it: for
        the graph, which sums in float64 too, and where all subsets have one size."""
        take, leave = self._parts()
        if self._least < self._most:
            return take, leave, take.new_zeros(self.batch_shape, dtype=torch.float64)
        theta, inside, k = take.detach().double(), self._inside(), self._most
        theta = torch.where(inside, theta, -math.inf)
        forced = inside & (leave == -math.inf)
        free = torch.where(forced, -math.inf, theta)
        order = free.sort(-1, descending=True).values
        count = (k - forced.sum(-1, keepdim=True)).clamp(min=0)
        count = torch.minimum(count, (order > -math.inf).sum(-1, keepdim=True))
        shift = order.gather(-1, (count - 1).clamp(min=0))
        known = (count > 0) & (theta < math.inf).all(-1, keepdim=True)
        shift = torch.where(known, shift, 0.0)
        far = (FAR + self.event_shape[0]) * self.smoothing.code[1]
        high = known & ~forced & (theta - shift > far)
        low = known & ~forced & (theta - shift < -far)
        fixed = high | (known & forced & (theta > -math.inf))
        near = torch.where(fixed, 0.0, take.double() - shift)
        near = torch.where(low, -math.inf, near)
        gain = torch.where(fixed, take.double(), 0.0).sum(-1)
        gain = gain + ((count - high.sum(-1, keepdim=True)) * shift).squeeze(-1)
        return near, torch.where(high, -math.inf, leave.double()), gain

    def _theta(self) -> Tensor:
        return self._pack(self._relative()[:2])

    def _restored(self, value: Tensor) -> Tensor:
        return (value + self._relative()[2]).to(self._parts()[0].dtype)

    def _unpack(self, flat: Tensor) -> tuple[Tensor, ...]:
        n, flat = self.event_shape[0], as_dtype(flat, self._parts()[0].dtype)
        return flat[..., :n], flat[..., bucket(n) : bucket(n) + n]

    def _width(self) -> int:
        return bucket(self.event_shape[0])

    def _to_event(self, flat: Tensor, fill: float = 0.0) -> Tensor:
        return flat[..., : self.event_shape[0]]

    def _forest_key(self) -> str:
        return name_of("k_subset", (bucket(self.event_shape[0]), self._least, self._most))

    def _goal(self) -> Tensor:
        return (self._lengths() + (bucket(self.event_shape[0]) + 1) * (self._most + 1)).int()

    def _derivation_size(self) -> int:
        return self.event_shape[0] + 2

    def _usable_parts(self) -> Tensor:
        return self._inside()

    def _replace_primary(self, scores: Tensor, **others: Tensor) -> KSubset:
        tensors = {name: t for name, (t, _) in self._tensors().items()}
        return self._rebuild(**{**tensors, **others, "scores": scores})

    def _aligned(self, q: Structure) -> tuple[KSubset, KSubset]:
        self._same_kind(q)
        if not isinstance(q, KSubset) or (q._least, q._most) != (self._least, self._most):
            other = f"k = {q.k}" if isinstance(q, KSubset) else type(q).__name__
            raise ValueError(f"KSubset: cannot compare k = {self.k} with {other}.")
        ragged = self.lengths is not None or q.lengths is not None
        if (
            ragged
            and checks.can_look(self._first)
            and bool((self._lengths() != q._lengths()).any())
        ):
            raise ValueError("KSubset: both distributions must have the same lengths.")
        return self, q

    def condition(self, include: Tensor | None = None, exclude: Tensor | None = None) -> KSubset:
        """The same structure with some elements forced in and some out."""
        new = super().condition(include, exclude)
        assert isinstance(new, KSubset)
        if include is None:
            return new
        include = include.expand(*self.batch_shape, *self.event_shape)
        forced = include | self._incompatible(include)
        forced = forced if self._forced is None else forced | self._forced
        return new._replace_primary(new.scores, _forced=forced)

    def _incompatible(self, include: Tensor) -> Tensor:
        """Nothing; but what an item does not have cannot be included, whatever else is."""
        return (include & ~self._inside()).any(-1, keepdim=True).expand(include.shape)

    # -- queries that need no graph ---------------------------------------------------------------

    @property
    def _is_dense(self) -> bool:
        return self._is_gibbs and backend_for(self.scores) == "cpu"

    def _value(self) -> Tensor:
        if not self._is_dense:
            return super()._value()
        args = (self._lengths(),), dense.key_of(self._least, self._most), self.smoothing.code
        return dense.subset.value(self._parts(), *args)

    def _value_and_gradient(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        if not self._is_dense:
            return super()._value_and_gradient()
        args = (self._lengths(),), dense.key_of(self._least, self._most), self.smoothing.code
        value, *mu = dense.subset.value_and_gradient(self._parts(), *args)
        return value, tuple(mu)

    def sample(
        self, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None
    ) -> Tensor:
        if not self._is_dense:
            return super().sample(sample_shape, generator)
        shape, n = checks.sample_shape(self._name, sample_shape), self.event_shape[0]
        if self._validate_args:
            with torch.no_grad():
                self._check_feasible("sample", self.log_partition())
        size = (shape.numel(), *self.batch_shape, n + 1)
        take, leave = (p.detach() for p in self._parts())
        numbers = uniform(size, take.device, generator)
        key = dense.key_of(self._least, self._most)
        z = dense.sample(take, leave, self._lengths(), numbers, key, self.smoothing.gamma)
        return z.reshape(*shape, *self.batch_shape, n).to(self.dtype)

    def _best(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The best value ``(*B)`` and subset ``(*B, n)``; the scores, −inf in the padding, and
        which elements must be in, both in float64 and bool ``(*B, n)``."""
        take, leave = (p.detach() for p in parts)
        inside = self._inside()
        theta = torch.where(inside, take, -math.inf).double()
        forced = inside & (leave == -math.inf)
        order = torch.where(forced, math.inf, theta).sort(-1, descending=True)
        rank = torch.arange(self.event_shape[0], device=theta.device)
        # a NaN, which comes first, is taken, so that the value is NaN
        wanted = (rank < self._least) | ((rank < self._most) & ~(order.values <= 0))
        z = torch.zeros_like(inside).scatter(-1, order.indices, wanted)
        value = torch.where(z, theta, 0.0).sum(-1)
        possible = (forced.sum(-1) <= self._most) & (self._lengths() >= self._least)
        return torch.where(possible | value.isnan(), value, -math.inf), z, theta, forced

    def argmax(self) -> Tensor:
        value, z, _, _ = self._best(self._parts())
        return self._refuse_infeasible("argmax", value, z.to(self.dtype))

    def _why_none(self, item: tuple[int, ...]) -> str:
        inside, wanted = self._inside()[item], f"a subset has {self._size_in_words()}"
        size, least, most = int(inside.sum()), self._least, self._most
        fewer = f"Lower k, allow fewer with k=(0, {most}), or drop the item."
        if size < least:
            return f"it has {size} elements, and {wanted}. {fewer}"
        allowed = inside & (self._parts()[0].detach()[item] > -math.inf)
        if (count := int(allowed.sum())) < least and self._forced is None:
            return f"{count} of its {size} elements are not forbidden (-inf), and {wanted}. {fewer}"
        if self._forced is None:
            return ""
        forced = self._forced.expand(self.batch_shape + self.event_shape)[item]
        if bool((forced & ~inside).any()):
            return f"a condition includes an element that is not one of its {size}. Include others."
        if (count := int(forced.sum())) > most:
            return f"a condition includes {count} elements, and {wanted}. Include fewer."
        return ""

    def _argmax_parts(self, parts: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        value, z, _, _ = self._best(parts)
        return value, (z.to(parts[0].dtype), (self._inside() & ~z).to(parts[0].dtype))

    def max_marginals(self) -> Tensor:
        # an element outside the best subset joins it if there is room, or replaces the least of
        # those that may go
        value, z, theta, forced = self._best(self._parts())
        room = z.sum(-1, keepdim=True) < self._most
        free = z & ~forced
        least = torch.where(free, theta, math.inf).amin(-1, keepdim=True)
        joined = torch.where(room, theta, -math.inf)
        replacing = torch.where(free.any(-1, keepdim=True), theta - least, -math.inf)
        gain = torch.where(z, 0.0, torch.maximum(joined, replacing))
        best = value[..., None] + gain
        return torch.where(value[..., None] == -math.inf, -math.inf, best).to(self._parts()[0])

    def _kbest(self, k: int) -> tuple[Tensor, Tensor]:
        if backend_for(self.scores) == "naive":
            return super()._kbest(k)
        take, leave = (p.detach() for p in self._parts())
        key = dense.key_of(self._least, self._most)
        best, z = dense.kbest(take, leave, self._lengths(), key, k)
        return best, z

    def _score(self, z: Tensor) -> Tensor:
        take, leave = self._parts()
        inside = self._inside()
        taken = torch.where(inside, z, 0).to(take.dtype)
        total = dot(take, taken, 1)
        if self._forced is None:
            return total
        return total + dot(leave, torch.where(inside, 1 - taken, 0.0), 1)

    def _checked(self, z: Tensor) -> Tensor:
        inside = self._inside()
        taken = torch.where(inside, z, 0)
        count = taken.sum(-1)
        wrong = ((taken != 0) & (taken != 1)).any(-1)
        wrong = wrong | (count < self._least) | (count > self._most)
        if bool(wrong.any()):
            item = tuple(wrong.nonzero()[0].tolist())
            raise ValueError(
                f"KSubset: z{list(item)} must hold {self._size_in_words()} ones and else zeros, "
                f"got {taken[item].tolist()}."
            )
        return z

    def _size_in_words(self) -> str:
        if self._least == self._most:
            return f"exactly {self._least}"
        return f"between {self._least} and {self._most}"

    def _edge_use(self, z: Tensor) -> Tensor:
        return super()._edge_use(torch.where(self._inside(), z, 0))

    # -- indices ----------------------------------------------------------------------------------

    def enumerate_support(self, expand: bool = True) -> Tensor:
        n, sizes = self.event_shape[0], self._lengths().unique()
        if len(sizes) > 1:
            raise ValueError(
                "KSubset.enumerate_support: items of different lengths have different supports. "
                "Index one item: structure[i].enumerate_support()."
            )
        length = int(sizes[0]) if len(sizes) else n
        counts = range(self._least, min(self._most, length) + 1)
        if sum(math.comb(length, k) for k in counts) > 1_000_000:
            raise ValueError(
                f"KSubset.enumerate_support: subsets of {self._size_in_words()} of {length} "
                "elements are too many."
            )
        chosen = [c for k in counts for c in itertools.combinations(range(length), k)]
        every = self._z_of(chosen).reshape(-1, *[1] * len(self.batch_shape), n)
        return every.expand(-1, *self.batch_shape, n) if expand else every

    def _z_of(self, items: Sequence[Sequence[int]]) -> Tensor:
        z = torch.zeros(len(items), self.event_shape[0], dtype=self.dtype, device="cpu")
        index = [(row, i) for row, item in enumerate(items) for i in item]
        if index:
            z[tuple(torch.tensor(index, device="cpu").unbind(-1))] = 1
        return z.to(self.scores.device)

    def decode(self, z: Tensor) -> Any:
        """The sorted indices of each subset, nested as the batch of z."""
        batch = z.shape[:-1]
        items: list[list[int]] = [[] for _ in range(batch.numel())]
        for item, i in z.reshape(batch.numel(), z.shape[-1]).nonzero().tolist():
            items[item].append(i)
        return nest(items, batch)

    def encode(self, obj: Any) -> Tensor:
        """z of indices: nested lists of any sizes, or a tensor ``(*B, m)`` filled up with −1."""
        if isinstance(obj, Tensor) and obj.dim():
            items, batch = obj.reshape(-1, obj.shape[-1]).tolist(), obj.shape[:-1]
        else:
            items, batch = unnest("KSubset", obj, 1, len(self.batch_shape))
        items = [[i for i in item if i != -1] for item in items]
        n = self.event_shape[0]
        for item in items:
            if not all(type(i) is int and 0 <= i < n for i in item) or len({*item}) < len(item):
                raise ValueError(
                    f"KSubset: indices must be different integers between 0 and {n - 1}, got "
                    f"{item}."
                )
        return self._z_of(items).reshape(*batch, n)
