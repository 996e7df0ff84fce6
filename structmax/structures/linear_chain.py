"""Tag sequences."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from structmax import checks
from structmax.forest.chain import ops as dense
from structmax.forest.topology import Forest, ForestBuilder, bucket, family, name_of
from structmax.primitive import Primitive, as_dtype
from structmax.smoothing import Smoothing
from structmax.structures.base import Structure
from structmax.structures.dynamic import DynamicStructure
from structmax.structures.lengths import OneSided
from structmax.structures.parts import at_most_zero


@family
def chain(n: int, c: int, steps: int) -> Forest:
    """Nodes ``(t, j)`` for position t and tag j, and a goal after each position.

    Parts: ``t·c + j`` for tags, then ``step, i, j`` for transitions, of which there are n − 1
    steps or one that all share, then ``j`` for starting and ``j`` for ending with a tag.
    """
    draw = ForestBuilder()
    ends = n * c + steps * c * c
    t, j = np.arange(n)[:, None], np.arange(c)
    draw.nodes(n * (c + 1), np.concatenate([t * c + j, np.full((n, 1), -1)], 1).ravel())
    node, goal = t * (c + 1) + j, t * (c + 1) + c  # (n, c), (n, 1)
    part = np.minimum(np.arange(n - 1), steps - 1)[:, None, None] * c * c
    part = n * c + part + j[:, None] * c + j  # (n − 1, from, to)
    draw.edges(node[0], -1, -1, ends + j)
    draw.edges(node[1:, None, :], node[:-1, :, None], -1, part)
    draw.edges(goal, node, -1, ends + c + j)
    return draw.build(ends + 2 * c)


def _over(scores: Tensor, shape: tuple[int, ...]) -> Tensor:
    return scores if scores.shape == shape else scores.expand(shape)


class LinearChain(OneSided, DynamicStructure):
    """A tag for each position: the linear-chain conditional random field.

    The score of tags y is Σₜ unary[t, yₜ] + Σₜ transition[yₜ, yₜ₊₁] + start[y₁] + end[yₙ]. The
    graph has a node (t, j) for every position and tag, reached from the nodes (t − 1, i) by edges
    that carry the transitions, and a goal reached from the nodes of the last position by edges that
    carry end; start is carried by the edges into the first nodes::

        (1,a) ──► (2,a) ──► (3,a)
              ╲ ╱       ╲ ╱       ╲
              ╱ ╲       ╱ ╲        goal
        (1,b) ──► (2,b) ──► (3,b) ╱

    Time is O(n c²); with shared transitions nothing of size n c² is stored per item.
    On a GPU it is the first query that finds NaN or +inf in the scores.
    Integer form: the tags ``(*B, n)``; what stands in the padding is ignored.

    Args:
        unary: ``(*B, n, c)``
        transition: ``[from, to]``, one of ``(c, c)``, ``(*B, c, c)`` (one for each item) and
            ``(*B, n−1, c, c)`` (one for each step), where ``*B`` has as many dimensions as the
            batch of ``unary``
        start, end: ``(*B, c)`` or ``(c)``
        lengths: ``(*B)``
        smoothing: Ω, by default ``sx.Shannon(1.0)``

    >>> import structmax as sx
    >>> unary = torch.tensor([[2.0, 0.0], [0.0, 0.5], [1.0, 0.0]])
    >>> transition = torch.tensor([[0.0, -1.0], [0.0, 0.0]])
    >>> chain = sx.LinearChain(unary, transition)
    >>> chain.decode(chain.argmax())
    [0, 0, 0]
    >>> chain.marginals()
    tensor([[0.8107, 0.1893],
            [0.5318, 0.4682],
            [0.8107, 0.1893]])
    >>> best = chain.topk(2)
    >>> chain.decode(best.structures), best.scores
    ([[0, 0, 0], [0, 1, 0]], tensor([3.0000, 2.5000]))
    >>> round(chain.log_prob(torch.tensor([0, 1, 0])).exp().item(), 4)
    0.2502
    """

    _score_names = ("unary", "start")  # as errors call them
    _additional = ("transition",)
    _validates_late = True

    def __init__(
        self,
        unary: Tensor,
        transition: Tensor,
        start: Tensor | None = None,
        end: Tensor | None = None,
        lengths: Tensor | None = None,
        smoothing: Smoothing | None = None,
        validate_args: bool | None = None,
    ) -> None:
        name = self._name
        checks.scores(name, "unary", unary, 2, "(..., n, c) with n and c at least 1")
        n, c = unary.shape[-2:]
        checks.scores(name, "transition", transition, 0, "")
        if transition.dim() < 2 or transition.shape[-2:] != (c, c):
            raise ValueError(
                f"{name}: transition must be (..., {c}, {c}) to match unary "
                f"{tuple(unary.shape)}, got {tuple(transition.shape)}."
            )
        self._steps_given = transition.dim() > 2 and transition.dim() == unary.dim() + 1
        if self._steps_given and transition.shape[-3] != n - 1:
            raise ValueError(
                f"{name}: transition with a dimension for steps must be (*B, {n - 1}, {c}, {c}) "
                f"for {n} positions, got {tuple(transition.shape)}."
            )
        if not self._steps_given and transition.dim() not in (2, unary.dim()):
            raise ValueError(
                f"{name}: transition must be (c, c), (*B, c, c) or (*B, n-1, c, c) with the batch "
                f"dimensions of unary {tuple(unary.shape)}, got {tuple(transition.shape)}."
            )
        for which, vector in (("start", start), ("end", end)):
            if vector is not None:
                checks.scores(name, which, vector, 1, f"(..., {c})")
                if vector.shape[-1] != c:
                    raise ValueError(
                        f"{name}: {which} must be (..., {c}), got {tuple(vector.shape)}."
                    )
        if lengths is not None:
            lengths = checks.lengths(name, lengths, unary.device)
        checks.same_device(
            name, unary=unary, transition=transition, start=start, end=end, lengths=lengths
        )
        self.unary, self.transition, self.start, self.end = unary, transition, start, end
        self.lengths = lengths
        batch = checks.batch_shape(
            name,
            unary=(unary, 2),
            transition=(transition, 3 if self._steps_given else 2),
            start=(start, 1),
            end=(end, 1),
            lengths=(lengths, 0),
        )
        super().__init__(batch, (n, c), smoothing, validate_args)

    def _given_scores(self) -> dict[str, tuple[Tensor, checks.Mask]]:
        def positions() -> Tensor:
            return self._inside()[..., None]

        def steps() -> Tensor:
            return self._inside()[..., 1:, None, None]

        ragged, (unary, start) = self.lengths is not None, self._score_names
        given: dict[str, tuple[Tensor, checks.Mask]] = {
            unary: (self.unary, positions if ragged else None),
            "transition": (self.transition, steps if ragged and self._steps_given else None),
        }
        for which, vector in ((start, self.start), ("end", self.end)):
            if vector is not None:
                given[which] = (vector, None)
        return given

    def _tensors(self) -> dict[str, tuple[Tensor, int]]:
        found = {
            "unary": (self.unary, 2),
            "transition": (self.transition, 3 if self._steps_given else 2),
        }
        for name, t, d in (("start", self.start, 1), ("end", self.end, 1)):
            if t is not None:
                found[name] = t, d
        if self.lengths is not None:
            found["lengths"] = self.lengths, 0
        return found

    @property
    def _first(self) -> Tensor:
        return self.unary

    def _options(self) -> dict[str, Any]:
        return {}

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Self:
        """The same structure with its batch expanded, without copying."""
        if not self._steps_given:
            return super().expand(batch_shape)
        tensors = {  # all of them, since transitions are told from steps by their dimensions
            name: t.expand((*batch_shape, *t.shape[t.dim() - d :]))
            for name, (t, d) in self._tensors().items()
        }
        return self._rebuild(**tensors)

    # -- scores -----------------------------------------------------------------------------------

    def _inside(self) -> Tensor:
        """Which positions lie within the length, ``(*B, n)``."""
        position = torch.arange(self.event_shape[0], device=self._first.device)
        return position < self._lengths()[..., None]

    def _dtype_inside(self) -> torch.dtype:
        """What is computed in: the widest of the scores' dtypes, at least float32."""
        dtype = torch.float32
        for scores in (self._first, self.transition, self.start, self.end):
            if scores is not None:
                dtype = torch.promote_types(dtype, scores.dtype)
        return dtype

    def _unvalidated_parts(self) -> tuple[Tensor, ...]:
        """With start and end added to the first and the last unary scores."""
        unary, transition = self._exact_parts()
        return as_dtype(unary, self._dtype_inside()), transition

    def _exact_parts(self) -> tuple[Tensor, ...]:
        self._validate()
        unary, transition = self._main_parts()
        if self.start is not None or self.end is not None:
            last = self._lengths() - 1
            ends = [(self.start, torch.zeros_like(last)), (self.end, last)]
            shape = *self.batch_shape, self.event_shape[1]
            given = [(s.double().expand(shape), at) for s, at in ends if s is not None]
            added = torch.stack([scores for scores, _ in given], -2)  # (*B, 1 or 2, c)
            position = torch.stack([at for _, at in given], -1)[..., None].expand_as(added)
            unary = unary.double().scatter_add(-2, position, added)
        return unary, transition

    def _main_parts(self, half: bool = False) -> tuple[Tensor, Tensor]:
        """The unary scores without start and end, and the transitions, with ``half`` as they are
        given."""
        self._validate(late=True)
        n, c = self.event_shape
        dtype = self._dtype_inside()
        unary = _over(as_dtype(self.unary, dtype), (*self.batch_shape, n, c))
        unary = self._nan_where_wrong(unary)
        transition = self.transition if half else as_dtype(self.transition, dtype)
        if not self._steps_given:
            transition = transition.unsqueeze(-3)
        return unary, _over(transition, (*self.batch_shape, *transition.shape[-3:]))

    def _forest_key(self) -> str:
        n, c = self.event_shape
        size = bucket(n)
        return name_of("chain", (size, c, max(size - 1, 1) if self._steps_given else 1))

    def _goal(self) -> Tensor:
        c = self.event_shape[1]
        return ((self._lengths() - 1) * (c + 1) + c).int()

    def _derivation_size(self) -> int:
        return self.event_shape[0] + 1

    def _packed(self) -> Tensor:
        self._validate()
        return self._pack(self._dense_parts())

    def _pack(self, parts: Any) -> Tensor:
        """Of unary and transition scores, or of these with start and end, which may be empty."""
        unary, transition = self._unpadded(parts[:2])
        none = unary.new_zeros(self.event_shape[1]).expand(*self.batch_shape, -1)
        ends = [none if t.shape[-1] == 0 else t for t in (parts[2:] or (none, none))]
        n = self.event_shape[0]
        grow = bucket(n) - n
        unary = torch.nn.functional.pad(unary, (0, 0, 0, grow))
        if self._steps_given:
            missing = max(bucket(n) - 1, 1) - transition.shape[-3]
            transition = torch.nn.functional.pad(transition, (0, 0, 0, 0, 0, missing))
        return torch.cat([unary.flatten(-2), transition.flatten(-3), *ends], -1)

    def _unpack(self, flat: Tensor) -> tuple[Tensor, ...]:
        n, c = self.event_shape
        first = bucket(n) * c
        steps = n - 1 if self._steps_given else 1
        unary = flat[..., : n * c].unflatten(-1, (n, c))
        transition = flat[..., first : first + steps * c * c].unflatten(-1, (steps, c, c))
        return unary, transition

    def _unpadded(self, parts: Any) -> tuple[Tensor, ...]:
        """The parts with zeros in the padding."""
        unary, transition = parts
        if self.lengths is not None:
            inside = self._inside()
            unary = torch.where(inside[..., None], unary, 0.0)
            if self._steps_given:
                transition = torch.where(inside[..., 1:, None, None], transition, 0.0)
        return unary, transition

    def _replace_primary(self, scores: Tensor, **others: Tensor) -> LinearChain:
        transition = others.get("transition", self.transition)
        return self._with(scores, transition, None, None)

    def _with(
        self, unary: Tensor, transition: Tensor, start: Tensor | None, end: Tensor | None
    ) -> LinearChain:
        """A chain of other scores, computed from those of this one."""
        new = LinearChain(unary, transition, start, end, self.lengths, self.smoothing, False)
        return self._vouch_for(new)

    def _without(self, forbidden: Tensor) -> LinearChain:
        self._validate()
        return self._with_unary(torch.where(forbidden, -math.inf, self.unary))

    def _moved(self, delta: Tensor) -> LinearChain:
        self._validate()
        unary = as_dtype(self.unary, self._dtype_inside())
        moved = unary + delta.to(unary.dtype)
        return self._with_unary(torch.where(unary == -math.inf, unary, moved))

    def _with_unary(self, unary: Tensor) -> LinearChain:
        """The same chain with other unary scores, and with start and end as they are: in a sum of
        them a mask would take the digits of the others."""
        return self._with(unary, self.transition, self.start, self.end)

    _local_groups = (-1,)

    def _usable_parts(self) -> Tensor:
        return self._inside()[..., None]

    def _incompatible(self, include: Tensor) -> Tensor:
        never = (include & ~self._inside()[..., None]).flatten(-2).any(-1)  # in the padding
        return (include.sum(-1, keepdim=True) - include.long() > 0) | never[..., None, None]

    # -- dense kernels ----------------------------------------------------------------------------

    def _dense_parts(self) -> tuple[Tensor, ...]:
        """Unary, transition, start and end scores for the dense chain; empty ones are absent."""
        unary, transition = self._main_parts()
        given = [  # a tensor each, since torch.compile takes none twice
            unary.new_empty(*self.batch_shape, 0)
            if s is None
            else s.to(unary.dtype).expand(*self.batch_shape, -1)
            for s in (self.start, self.end)
        ]
        return unary, transition, *given

    def _law(self) -> tuple[Primitive, tuple[Any, ...]]:
        """A and its arguments."""
        args = (self._lengths(),), "", self.smoothing.code
        if self.start is None and self.end is None:
            half = dense.reads_half(self.unary, self.transition, self.smoothing.code)
            return dense.plain_chain, (self._main_parts(half), *args)
        return dense.chain, (self._dense_parts(), *args)

    def _value(self) -> Tensor:
        if not self._is_gibbs:
            return super()._value()
        law, args = self._law()
        return law.value(*args)

    def _value_and_gradient(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        if not self._is_gibbs:
            return super()._value_and_gradient()
        law, args = self._law()
        value, *mu = law.value_and_gradient(*args)
        return value, tuple(mu[:2])

    def _viterbi(self) -> tuple[Tensor, Tensor]:
        best, tags = dense.best_tags(*[p.detach() for p in self._dense_parts()], self._lengths())
        return best, tags

    def argmax(self) -> Tensor:
        best, tags = self._viterbi()
        z = tags.unsqueeze(-1) == torch.arange(self.event_shape[1], device=tags.device)
        return self._refuse_infeasible("argmax", best, z.to(self.dtype))

    def _argmax_parts(self, parts: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        unary, transition = parts[0], as_dtype(parts[1], parts[0].dtype)
        none = [unary.new_empty(0).expand(*self.batch_shape, 0)] * 2
        best, tags = dense.best_tags(unary, transition, *none, self._lengths())
        at = torch.arange(self.event_shape[1], device=tags.device)
        z = ((tags[..., None] == at) & self._inside()[..., None]).to(unary.dtype)
        if self._steps_given:
            return best, (z, z[..., :-1, :, None] * z[..., 1:, None, :])
        pairs = z[..., :-1, :].double().mT @ z[..., 1:, :].double()  # float32 may be autocast
        return best, (z, pairs.to(z.dtype).unsqueeze(-3))

    def argmax_tags(self) -> Tensor:
        """The tags of ``argmax()`` as integers ``(*B, n)``, −1 in the padding, without one-hots.

        An item without a structure is an error, or −1 throughout where one cannot look.

        >>> import structmax as sx
        >>> sx.LinearChain(torch.tensor([[0.0, 1.0], [2.0, 0.0]]), torch.zeros(2, 2)).argmax_tags()
        tensor([1, 0])
        """
        best, tags = self._viterbi()
        if self._validate_args and checks.can_look(self._first):
            if self._proves(best) or math.isfinite(best.sum().item()):
                return tags
            checks.feasible(self._name, "argmax_tags", best)
        return torch.where((best.abs() < math.inf)[..., None], tags, -1)

    # -- transitions ------------------------------------------------------------------------------

    def _per_step(self) -> LinearChain:
        """The same chain with a transition matrix for each step."""
        if self._steps_given:
            return self
        self._validate()
        n, c = self.event_shape
        unary, transition, *ends = self._dense_parts()
        start, end = (t if t.shape[-1] else None for t in ends)
        transition = transition.expand(*self.batch_shape, n - 1, c, c)
        return self._with(unary, transition, start, end)

    def edge_marginals(self) -> Tensor:
        """The probability of each transition at each step, ``(*B, n−1, c, c)``. Differentiable."""
        value, mu = self._per_step()._value_and_gradient()
        return self._refuse_infeasible("edge_marginals", value, mu[1]).to(self.dtype)

    def _aligned(self, q: Structure) -> tuple[DynamicStructure, DynamicStructure]:
        self._same_kind(q)
        if not isinstance(q, LinearChain):
            raise ValueError(f"{self._name}: cannot compare with {type(q).__name__}.")
        ragged = self.lengths is not None or q.lengths is not None
        if (
            ragged
            and checks.can_look(self._first)
            and bool((self._lengths() != q._lengths()).any())
        ):
            raise ValueError(f"{self._name}: both distributions must have the same lengths.")
        if self._steps_given == q._steps_given:
            return self, q
        return self._per_step(), q._per_step()

    # -- tags -------------------------------------------------------------------------------------

    def score(self, z: Tensor) -> Tensor:
        """The score of tags (integers) or of their indicator; see :class:`Structure`."""
        z = self._as_tensor(z)
        if z.is_floating_point() or z.dtype == torch.bool:
            return super().score(z)
        return self._score_tags(self._checked_tags(z))

    def log_prob(self, z: Tensor) -> Tensor:
        """The log-probability of tags (integers) or of their indicator; see :class:`Structure`."""
        z = self._as_tensor(z)
        if not self._is_gibbs or z.is_floating_point() or z.dtype == torch.bool:
            return super().log_prob(z)
        tags = self._checked_tags(z)
        if tags.shape[:-1] != self.batch_shape:
            return super().log_prob(tags)
        constants = self._lengths(), tags.long()
        loss = dense.chain_loss.value(self._dense_parts(), constants, "", self.smoothing.code)
        log_prob = at_most_zero(-loss / self.smoothing.gamma)
        if self._proves(loss) or not (self._validate_args and checks.can_look(self._first)):
            return log_prob
        # of validated scores, NaN stands for an item that allows nothing: ∞ − ∞
        return torch.where(log_prob.isnan(), -math.inf, log_prob)

    def _as_tensor(self, z: Any) -> Tensor:
        """Tags or their indicator, of lists too; those of tags may end at their lengths."""
        if isinstance(z, Tensor):
            return z
        device = self._first.device
        if self.lengths is not None and isinstance(z, list | tuple):
            with contextlib.suppress(TypeError, ValueError, RuntimeError):
                found = torch.as_tensor(_pad(z, self.event_shape[0]), device=device)
                if checks.holds_integers(found):
                    return found
        return checks.as_tensor(self._name, "z", z, device)

    def _score(self, z: Tensor) -> Tensor:
        return self._score_tags(z.to(torch.uint8).argmax(-1))

    def _score_tags(self, tags: Tensor) -> Tensor:
        """For tags ``(*sample, *B, n)``; those in the padding may be anything."""
        self._validate()
        n, c = self.event_shape
        batch = tags.shape[:-1]
        inside = None if self.lengths is None else self._inside().expand(*batch, n)
        tags = tags.long() if inside is None else torch.where(inside, tags, 0).long()
        own = self.unary.expand(*batch, n, c).gather(-1, tags[..., None]).squeeze(-1)
        pair = tags[..., :-1] * c + tags[..., 1:]  # (..., n − 1)
        flat = self.transition.flatten(-2)
        if self._steps_given:
            between = flat.expand(*batch, n - 1, c * c).gather(-1, pair[..., None]).squeeze(-1)
        elif flat.dim() == 1:
            between = flat.take(pair)
        else:
            between = flat.expand(*batch, c * c).gather(-1, pair)
        if inside is not None:
            own = torch.where(inside, own, 0.0)
            between = torch.where(inside[..., 1:], between, 0.0)
        total = own.double().sum(-1) + between.double().sum(-1)
        if self.start is not None:
            first = tags[..., :1]
            total = total + self.start.expand(*batch, c).gather(-1, first).squeeze(-1)
        if self.end is not None:
            last = tags.gather(-1, self._lengths().expand(batch)[..., None] - 1)
            total = total + self.end.expand(*batch, c).gather(-1, last).squeeze(-1)
        wrong = self._wrong_items()
        total = total if wrong is None else torch.where(wrong, math.nan, total)
        return total.to(self._dtype_inside())

    def _checked_tags(self, tags: Tensor) -> Tensor:
        n, c = self.event_shape
        if tags.shape != (*self.batch_shape, n):
            try:
                shape = torch.broadcast_shapes(tags.shape, (*self.batch_shape, n))
            except RuntimeError:
                shape = torch.Size(())
            if tags.dim() == 0 or tags.shape[-1] != n or not shape:
                raise ValueError(
                    f"{self._name}: tags must be (..., {n}) and broadcast with the batch "
                    f"{tuple(self.batch_shape)}, got {tuple(tags.shape)}."
                )
            tags = tags.expand(shape)
        if self._validate_args and checks.can_look(self._first) and tags.numel():
            if tags.device.type == "cpu":  # where two looks cost less than what follows
                least, most = tags.aminmax()
                if least >= 0 and most < c:
                    return tags
            wrong = self._inside() & ((tags < 0) | (tags >= c))
            if bool(wrong.any()):
                where = tuple(wrong.nonzero()[0].tolist())
                raise ValueError(
                    f"{self._name}: a tag must be between 0 and {c - 1}, got {int(tags[where])} at "
                    f"{list(where)}."
                )
        return tags

    def _checked(self, z: Tensor) -> Tensor:
        wrong = ((z != 0) & (z != 1)).any(-1) | (z.sum(-1) != 1)
        wrong = wrong & self._inside()
        if bool(wrong.any()):
            where = tuple(wrong.nonzero()[0].tolist())
            raise ValueError(
                f"{self._name}: z must hold exactly one 1 at each position; it does not at "
                f"{list(where)}."
            )
        return z

    def _edge_use(self, z: Tensor) -> Tensor:
        return super()._edge_use(torch.where(self._inside()[..., None], z, 0))

    def enumerate_support(self, expand: bool = True) -> Tensor:
        n, c = self.event_shape
        sizes = self._lengths().unique()
        if len(sizes) > 1:
            raise ValueError(
                f"{self._name}.enumerate_support: items of different lengths have different "
                "supports. Index one item: structure[i].enumerate_support()."
            )
        length = int(sizes[0]) if len(sizes) else n
        if c**length > 1_000_000:
            raise ValueError(
                f"{self._name}.enumerate_support: {c}^{length} structures are too many."
            )
        tags = torch.tensor(list(itertools.product(range(c), repeat=length)), device="cpu")
        every = torch.nn.functional.one_hot(tags, c)
        every = torch.nn.functional.pad(every, (0, 0, 0, n - length)).to(self.dtype)
        every = every.to(self._first.device).reshape(-1, *[1] * len(self.batch_shape), n, c)
        return every.expand(-1, *self.batch_shape, n, c) if expand else every

    def decode(self, z: Tensor) -> Any:
        """Lists of tags, nested as the batch of z, cut at the length.

        z may have sample dimensions before the batch (``sample``) or after it (``topk``); the
        positions after its last non-zero entry are padding, so what does not exist is ``[]``.
        """
        batch, own = z.shape[:-2], self.batch_shape
        position = torch.arange(1, z.shape[-2] + 1, device=z.device)
        sizes = torch.where((z != 0).any(-1), position, 0).amax(-1)
        before = batch[len(batch) - len(own) :] == own
        after = len(batch) > len(own) and batch[: len(own)] == own
        if self.lengths is not None and before and not after:
            sizes = torch.minimum(sizes, self._lengths().expand(batch))
        return _cut(z.argmax(-1).tolist(), sizes.tolist())

    def encode(self, obj: Any) -> Tensor:
        """z of tags: a tensor ``(*B, n)``, or a list (of lists) of tags, ragged or not."""
        n, c = self.event_shape
        if not isinstance(obj, Tensor):
            if 0 in self.batch_shape:
                return self._first.new_zeros(*self.batch_shape, n, c)
            obj = checks.as_tensor(self._name, "tags", _pad(obj, n), self._first.device)
        tags = self._checked_tags(obj)
        z = tags[..., None] == torch.arange(c, device=tags.device)
        return (z & self._inside()[..., None]).to(self.dtype)


def _cut(rows: Any, sizes: Any) -> Any:
    """Nested lists of rows, each cut at its size."""
    if isinstance(sizes, int):
        return rows[:sizes]
    return [_cut(row, size) for row, size in zip(rows, sizes, strict=True)]


def _pad(rows: Any, n: int) -> list[Any]:
    """Nested lists (or arrays) of rows, each filled up to n with −1."""
    rows = [row.tolist() if hasattr(row, "tolist") else row for row in rows]
    if rows and isinstance(rows[0], list | tuple):
        return [_pad(row, n) for row in rows]
    return rows + [-1] * (n - len(rows))
