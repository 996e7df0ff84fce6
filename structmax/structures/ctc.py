"""Connectionist temporal classification."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structmax import checks
from structmax.forest.ctc import ops as dense
from structmax.forest.ctc.naive import repeats, symbols_of, used, wrong_targets
from structmax.forest.topology import Forest, ForestBuilder, bucket, family, name_of
from structmax.primitive import backend_for
from structmax.smoothing import Shannon, Smoothing
from structmax.structures.base import Structure
from structmax.structures.dynamic import DynamicStructure
from structmax.structures.lengths import full
from structmax.structures.nesting import nest, unnest


@family
def ctc(n: int, s: int) -> Forest:
    """For each of n frames, nodes for the 2s + 1 states and a goal for 0..s symbols done.

    Parts: ``t·(2s + 1) + state``, then that of entering each symbol from the one before it, then
    the impossible one, which keeps the first frame from starting late.
    """
    draw = ForestBuilder()
    states, impossible = 2 * s + 1, n * (2 * s + 1) + s
    t, u = np.arange(n)[:, None], np.arange(states)
    part = np.concatenate([t * states + u, np.full((n, s + 1), -1)], 1)
    draw.nodes(part.size, part)
    node = np.arange(part.size).reshape(part.shape)
    state, goal = node[:, :states], node[:, states:]
    draw.edges(state[0, 2:], -1, -1, impossible)
    draw.edges(state[1:], state[:-1])
    draw.edges(state[1:, 1:], state[:-1, :-1])
    draw.edges(state[1:, 3::2], state[:-1, 1:-2:2], -1, n * states + np.arange(1, s))
    draw.edges(goal, state[:, ::2])
    draw.edges(goal[:, 1:], state[:, 1::2])
    return draw.build(impossible + 1)


def _split(targets: Tensor, lengths: Tensor, validates: bool) -> Tensor:
    """Concatenated targets ``(ΣS)`` as ``(*B, S)``, as ``torch.nn.functional.ctc_loss`` has them.

    Where lengths that do not fit are no error, all targets become −1, which is no symbol.
    """
    total, most = len(targets), len(targets)
    wrong = (lengths < 0).any() | (lengths.sum() != total)
    if checks.can_look():
        if validates and bool(wrong):
            raise ValueError(
                f"CTC: targets ({total}) are those of all items, one after the other, so "
                f"target_lengths must sum to {total} and not be negative, got {lengths.tolist()}. "
                "If all items have this target, or a beginning of it, give "
                "targets.expand(batch, -1)."
            )
        most = min(int(lengths.max()), most) if lengths.numel() else 0
    ends = lengths.flatten().cumsum(0).reshape(lengths.shape)
    position = torch.arange(most, device=targets.device)
    at = (ends - lengths)[..., None] + position
    if not total:
        return targets.new_zeros(at.shape)
    found = targets.long()[at.clamp(0, total - 1)]
    inside = position < lengths[..., None]
    return torch.where(wrong, -1, torch.where(inside, found, 0))


class CTC(DynamicStructure):
    """A symbol for each frame such that, repeats merged and blanks dropped, a target remains.

    The model of Graves et al. (2006): ``log_partition()`` is the log-likelihood of the target, so
    that its negative is ``torch.nn.functional.ctc_loss``, and ``argmax()`` is the forced
    alignment. The states are the symbols of the target with a blank before, between and after
    them; from frame to frame a path stays, goes to the next state, or leaves out a blank between
    two different symbols. Here for the target "ab"::

        frame 1    blank   a   blank   b   blank
                     │   ╲ │ ╲ ╱ │   ╲ │ ╲   │
        frame 2    blank   a   blank   b   blank      (a ──► b as well)

    The goal is reached from the last symbol and from the blank after it. A sequence of symbols
    belongs to one path only, so z marks a symbol of each frame, and ``marginals()`` is the
    gradient with respect to ``log_probs``. Scores need not be normalised.

    Integer form: the symbols ``(*B, T)``; what stands in the padding is ignored.

    Args:
        log_probs: ``(*B, T, V)``
        targets: ``(*B, S)``, integers below V, none of them blank; the padding may hold anything.
            For scores of a batch also ``(ΣS)``, all targets one after the other, if there are
            ``target_lengths (*B)``; without these ``(S)`` is the target of every item
        input_lengths: ``(*B)``, frames of each item
        target_lengths: ``(*B)``, symbols of each target, 0 or more
        blank: the symbol that is dropped
        smoothing: Ω, by default ``sx.Shannon(1.0)``

    >>> import structmax as sx
    >>> log_probs = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.3, 0.2, 0.5]]).log()
    >>> ctc = sx.CTC(log_probs, torch.tensor([1, 2]))
    >>> ctc.decode(ctc.argmax())  # 0 is the blank
    [0, 1, 2]
    >>> ctc.log_partition().exp()
    tensor(0.3270)
    >>> ctc.log_prob(torch.tensor([1, 1, 2])).exp()
    tensor(0.2294)
    """

    def __init__(
        self,
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
        blank: int = 0,
        smoothing: Smoothing | None = None,
        validate_args: bool | None = None,
    ) -> None:
        checks.scores("CTC", "log_probs", log_probs, 2, "(..., T, V) with T and V at least 1")
        frames, symbols = log_probs.shape[-2:]
        if not checks.holds_integers(targets) or targets.dim() < 1:
            got = targets.dtype if isinstance(targets, Tensor) else type(targets).__name__
            raise ValueError(f"CTC: targets must be a tensor of integers (..., S), got {got}.")
        blank = checks.index("CTC", "blank", blank)
        if not 0 <= blank < symbols:
            raise ValueError(f"CTC: blank must be between 0 and {symbols - 1}, got {blank}.")
        self.log_probs, self.targets, self.blank = log_probs, targets, blank
        self.input_lengths, self.target_lengths = (
            None if given is None else checks.lengths("CTC", given, log_probs.device)
            for given in (input_lengths, target_lengths)
        )
        checks.same_device("CTC", **{name: t for name, (t, _) in self._tensors().items()})
        counts, self._split = self.target_lengths, checks.Record()
        if targets.dim() == 1 and log_probs.dim() > 2 and counts is not None and counts.dim():
            self.targets = _split(targets, counts, validate_args is None or bool(validate_args))
            if not torch.compiler.is_compiling():
                self._split.add([targets, counts])
        batch = checks.batch_shape("CTC", **self._tensors())
        super().__init__(batch, (frames, symbols), smoothing, validate_args)
        self._check_room((frames, 2 * self.targets.shape[-1] + 1))

    def _given_integers(self) -> dict[str, checks.Integers]:
        limits = {
            "input_lengths": (self.input_lengths, 1, self.event_shape[0]),
            "target_lengths": (self.target_lengths, 0, self.targets.shape[-1]),
        }
        given = {
            name: checks.between(t.expand(self.batch_shape), low, high)
            for name, (t, low, high) in limits.items()
            if t is not None
        }
        symbols, but = (0, self.event_shape[1] - 1), f" and not blank ({self.blank})"
        wrong = self._wrong_targets()
        return {**given, "targets": checks.Integers(self.targets, wrong, symbols, dims=1, but=but)}

    def _given_scores(self) -> dict[str, tuple[Tensor, checks.Mask]]:
        scores = self.log_probs.expand(*self.batch_shape, *self.event_shape)
        return {"log_probs": (scores, self._usable_parts)}

    def _validate(self, late: bool = False) -> None:
        if not torch.compiler.is_compiling() and self._split.is_stale():
            raise ValueError(
                "CTC: concatenated targets or their target_lengths were written into since the "
                "constructor split them. Make another CTC, or give targets as (*B, S)."
            )
        tensors = [*self._integer_tensors, *self._score_tensors]
        known = self._record.covers(tensors) or not (
            self._validate_args and checks.can_look(self._first)
        )
        on_gpu = not known and backend_for(self.log_probs) == "gpu" and self._is_dense
        if on_gpu and self._all_good():
            self._record.add(tensors)
        super()._validate(late)

    def _all_good(self) -> bool:
        """Whether no number is wrong, padding included: few launches and one synchronisation."""
        if not self.log_probs.numel():
            return True
        scores = self.log_probs.detach().expand(*self.batch_shape, *self.event_shape)
        possible = dense.possible(scores, self._constants(), self.blank)
        return bool(possible.all() & (self.log_probs.detach().amax() < math.inf))

    def _tensors(self) -> dict[str, tuple[Tensor, int]]:
        dims = {"log_probs": 2, "targets": 1, "input_lengths": 0, "target_lengths": 0}
        given = {name: (getattr(self, name), d) for name, d in dims.items()}
        return {name: (t, d) for name, (t, d) in given.items() if t is not None}

    def _options(self) -> dict[str, Any]:
        return {"blank": self.blank}

    # -- states -----------------------------------------------------------------------------------

    def _sizes(self) -> tuple[Tensor, Tensor]:
        """Frames and symbols of each item, ``(*B)`` each; impossible ones are cut."""
        out = []
        most = (self.event_shape[0], self.targets.shape[-1])
        for given, low, high in zip((self.input_lengths, self.target_lengths), (1, 0), most):
            if given is None:
                size = full(self.batch_shape, high, self.log_probs.device)
            else:
                size = given.long().clamp(low, high).expand(self.batch_shape)
            out.append(size)
        return out[0], out[1]

    def _wrong_targets(self) -> Tensor:
        """Symbols of the targets that are none, ``(*B, S)``."""
        targets = self.targets.expand(*self.batch_shape, self.targets.shape[-1])
        return wrong_targets(targets, self._sizes()[1], self.blank, self.event_shape[1])

    def _symbols(self) -> Tensor:
        """The symbol of each state, ``(*B, 2S+1)``; blank beyond the target."""
        targets = self.targets.expand(*self.batch_shape, self.targets.shape[-1])
        return symbols_of(targets, self._sizes()[1], self.blank, self.event_shape[1])

    def _repeats(self) -> Tensor:
        """Whether each symbol is the one before it, ``(*B, S)``."""
        return repeats(self._symbols())

    def _used(self) -> Tensor:
        """Which states of which frames some path meets, ``(*B, T, 2S+1)``."""
        return used(self._repeats(), *self._sizes(), self.event_shape[0])

    def _to_states(self, scores: Tensor) -> Tensor:
        """Scores of symbols ``(*B, T, V)`` as those of states ``(*B, T, 2S+1)``."""
        symbols = self._symbols()[..., None, :]
        return scores.gather(-1, symbols.expand(*scores.shape[:-1], symbols.shape[-1]))

    def _to_event(self, flat: Tensor, fill: float = 0.0) -> Tensor:
        frames, symbols = self.event_shape
        count = self.targets.shape[-1]
        states = flat.unflatten(-1, (bucket(frames), 2 * bucket(count) + 1))
        states = states[..., :frames, : 2 * count + 1]
        index = self._symbols()[..., None, :].expand(states.shape)
        whole = flat.new_full((*states.shape[:-1], symbols), fill)
        if fill == -math.inf:
            return whole.scatter_reduce(-1, index, states, "amax")
        return whole.scatter_add(-1, index, states)

    def _scores(self) -> Tensor:
        """``(*B, T, V)``, float32 or float64."""
        self._validate(late=True)
        dtype = torch.promote_types(self.log_probs.dtype, torch.float32)
        return self.log_probs.to(dtype).expand(*self.batch_shape, *self.event_shape)

    def _unvalidated_parts(self) -> tuple[Tensor, ...]:
        return (self._nan_where_wrong(self._scores()),)

    def _pack(self, parts: Any) -> Tensor:
        (scores,) = parts
        frames, count = self.event_shape[0], self.targets.shape[-1]
        pad = torch.nn.functional.pad
        states = torch.where(self._used(), self._to_states(scores), 0.0)
        more = bucket(count) - count
        states = pad(states, (0, 2 * more, 0, bucket(frames) - frames))
        skip = torch.where(pad(self._repeats(), (0, more)), -math.inf, 0.0).to(scores.dtype)
        impossible = skip.new_full((*self.batch_shape, 1), -math.inf)
        return torch.cat([states.flatten(-2), skip, impossible], -1)

    def _unpack(self, flat: Tensor) -> tuple[Tensor, ...]:
        return (self._to_event(flat[..., : self._width()]),)

    def _width(self) -> int:
        return bucket(self.event_shape[0]) * (2 * bucket(self.targets.shape[-1]) + 1)

    def _forest_key(self) -> str:
        return name_of("ctc", [bucket(self.event_shape[0]), bucket(self.targets.shape[-1])])

    def _goal(self) -> Tensor:
        frames, count = self._sizes()
        s = bucket(self.targets.shape[-1])
        return ((frames - 1) * (3 * s + 2) + 2 * s + 1 + count).int()

    def _derivation_size(self) -> int:
        return self.event_shape[0] + 1

    # -- dense kernels ----------------------------------------------------------------------------

    @property
    def _is_dense(self) -> bool:
        return isinstance(self.smoothing, Shannon) and dense.fits(self.log_probs, self.targets)

    def _constants(self) -> list[Tensor]:
        """Targets, frames and count as they are given: the kernels look for what is wrong."""
        most = (self.event_shape[0], self.targets.shape[-1])
        sizes = [
            full(self.batch_shape, n, self.log_probs.device)
            if given is None
            else given.expand(self.batch_shape)
            for given, n in zip((self.input_lengths, self.target_lengths), most, strict=True)
        ]
        return [self.targets.expand(*self.batch_shape, most[1]), *sizes]

    def _dense_args(self) -> tuple[Any, ...]:
        return (self._scores(),), self._constants(), str(self.blank), self.smoothing.code

    def _value(self) -> Tensor:
        return dense.ctc.value(*self._dense_args()) if self._is_dense else super()._value()

    def _value_and_gradient(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        if not self._is_dense:
            return super()._value_and_gradient()
        value, *mu = dense.ctc.value_and_gradient(*self._dense_args())
        return value, tuple(mu)

    def _why_none(self, item: tuple[int, ...]) -> str:
        frames, count = (int(size[item]) for size in self._sizes())
        needed = count + int(self._repeats()[item][:count].sum())
        if frames >= needed:
            return ""
        return (
            f"its target needs {needed} frames, one for each symbol and for a blank between equal "
            f"ones, and it has {frames}. Shorten the target, or drop the item."
        )

    def _usable_parts(self) -> Tensor:
        used = self._used().to(torch.uint8)
        index = self._symbols()[..., None, :].expand(used.shape)
        whole = used.new_zeros(*self.batch_shape, *self.event_shape)
        return whole.scatter_reduce(-1, index, used, "amax") > 0

    def _replace_primary(self, scores: Tensor, **others: Tensor) -> CTC:
        tensors = {name: t for name, (t, _) in self._tensors().items()}
        return self._rebuild(**{**tensors, "log_probs": scores})

    def _incompatible(self, include: Tensor) -> Tensor:
        never = (include & ~self._usable_parts()).flatten(-2).any(-1)
        return (include.sum(-1, keepdim=True) - include.long() > 0) | never[..., None, None]

    def _aligned(self, q: Structure) -> tuple[DynamicStructure, DynamicStructure]:
        self._same_kind(q)
        if not isinstance(q, CTC):
            raise ValueError(f"CTC: cannot compare with {type(q).__name__}.")
        own, other = (*self._sizes(), self._symbols()), (*q._sizes(), q._symbols())
        same = own[-1].shape[-1] == other[-1].shape[-1] and self.blank == q.blank
        if checks.can_look(self._first) and not (
            same and all(bool((a == b).all()) for a, b in zip(own, other, strict=True))
        ):
            raise ValueError("CTC: both distributions must have the same lengths and targets.")
        return self, q

    # -- symbols ----------------------------------------------------------------------------------

    def enumerate_support(self, expand: bool = True) -> Tensor:
        self._validate_integers()
        sizes = torch.cat([torch.stack(self._sizes(), -1), self._symbols()], -1)
        sizes = sizes.reshape(-1, sizes.shape[-1]).unique(dim=0).tolist()
        if len(sizes) > 1:
            raise ValueError(
                "CTC.enumerate_support: items with other lengths or targets have other supports. "
                "Index one item: structure[i].enumerate_support()."
            )
        # of no items at all: the support of an empty target
        frames, count, *states = sizes[0] if sizes else [self.event_shape[0], 0]
        target = states[1 : 2 * count : 2]
        alphabet = sorted({self.blank, *target})
        if len(alphabet) ** frames > 1_000_000:
            raise ValueError(
                f"CTC.enumerate_support: {len(alphabet)}^{frames} sequences are too many."
            )
        found = [
            path
            for path in itertools.product(alphabet, repeat=frames)
            if [x for x, _ in itertools.groupby(path) if x != self.blank] == target
        ]
        every = torch.zeros(len(found), *self.event_shape, dtype=self.dtype, device="cpu")
        index = torch.tensor(found, dtype=torch.long, device="cpu").reshape(len(found), frames, 1)
        every[:, :frames].scatter_(-1, index, 1.0)
        every = every.to(self.log_probs.device)
        every = every.reshape(len(found), *[1] * len(self.batch_shape), *self.event_shape)
        return every.expand(-1, *self.batch_shape, -1, -1) if expand else every

    def decode(self, z: Tensor) -> Any:
        """Lists of symbols, one for each frame, nested as the batch of z."""
        sizes = ((z != 0).any(-1).long() * torch.arange(1, z.shape[-2] + 1, device=z.device)).amax(
            -1
        )
        rows = z.argmax(-1).reshape(-1, z.shape[-2]).tolist()
        cut = [row[:size] for row, size in zip(rows, sizes.reshape(-1).tolist(), strict=True)]
        return nest(cut, z.shape[:-2])

    def encode(self, obj: Any) -> Tensor:
        """z of symbols: a tensor ``(*B, T)``, or lists of symbols, ragged or not."""
        self._validate_integers()
        frames, symbols = self.event_shape
        if not isinstance(obj, Tensor):
            rows, shape = unnest("CTC", obj, 1, len(self.batch_shape))
            rows = [row + [-1] * (frames - len(row)) for row in map(list, rows)]
            obj = torch.tensor(rows, dtype=torch.long, device=self.log_probs.device)
            obj = obj.reshape(*shape, frames)
        if obj.dim() == 0 or obj.shape[-1] != frames:
            raise ValueError(f"CTC: symbols must be (..., {frames}), got {tuple(obj.shape)}.")
        frame = torch.arange(frames, device=obj.device)
        inside = frame < self._sizes()[0][..., None]
        if self._validate_args and checks.can_look(self._first):
            wrong = inside & ((obj < 0) | (obj >= symbols))
            if bool(wrong.any()):
                where = tuple(wrong.nonzero()[0].tolist())
                raise ValueError(
                    f"CTC: a symbol must be between 0 and {symbols - 1}, got "
                    f"{int(obj.expand(wrong.shape)[where])} at {list(where)}."
                )
        z = obj[..., None] == torch.arange(symbols, device=obj.device)
        return (z & inside[..., None]).to(self.dtype)
