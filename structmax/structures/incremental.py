"""Structures built action by action, scored by a policy: what shift-reduce and easy-first share."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from structmax import checks
from structmax.structures.base import Structure, TopK
from structmax.structures.binary_tree import BinaryTree
from structmax.structures.captured import replayed
from structmax.structures.nesting import nest
from structmax.structures.rollout import (
    Built,
    Choose,
    Memory,
    Policy,
    Rollout,
    beam,
    follow,
    gumbel,
    known,
    one_hot,
)
from structmax.tracing import refuse_trace


class Incremental(Structure):
    """A sequence of actions a₁ … a_T, each drawn given those before it::

        log p(z) = Σₜ log softmax(scores(stateₜ))[aₜ]   over the legal actions,
        stateₜ₊₁ = advance(stateₜ, aₜ).

    It is normalised step by step, so ``log_partition`` is 0, ``score`` is ``log_prob``, and
    ``sample`` is exact. The best sequence has no efficient algorithm: ``topk`` is a beam search and
    therefore approximate (as ``approximate`` says), ``greedy`` takes the best action at each step,
    and ``argmax``, ``marginals``, ``max_marginals``, ``entropy``, ``cross_entropy``,
    ``expected_cost``, ``mbr``, ``condition``, ``ranked_support`` and ``sparsemap`` raise
    :class:`IntractableError`.

    ``log_prob`` and the state of every rollout are differentiable in the parameters of the policy
    and in the inputs. The last rollout is kept, graph included, until a backward pass goes through
    it or a parameter or buffer changes, but not by ``.data``, of a policy that is a module and has
    no other state: ``log_prob`` and ``rollout`` of structures that ``sample``, ``topk``,
    ``beam`` or ``greedy`` just returned cost nothing, unless those ran under ``torch.no_grad``.
    """

    queries = frozenset(
        ["sample", "topk", "log_prob", "score", "log_partition", "enumerate_support"]
    )
    approximate = frozenset(["topk"])
    instead: ClassVar[dict[str, str]] = {
        "argmax": "Use greedy() for the best action at each step, or topk(k), a beam search.",
        "marginals": "Average sample((k,)), or weigh the structures of topk(k).",
        "max_marginals": "Use the scores of topk(k).",
        "entropy": "Estimate it at draws: -log_prob(sample((k,))).mean(0).",
        "cross_entropy": "Estimate it at draws: -q.log_prob(p.sample((k,))).mean(0).",
        "expected_cost": "Average the costs of sample((k,)), or weigh those of topk(k).",
        "mbr": "Take the best of topk(k) or sample((k,)) on average against the others.",
        "condition": "Score the forbidden actions -inf in the policy.",
        "ranked_support": "Use topk(k), a beam search.",
        "sparsemap": "Use topk(k), or an estimator that needs samples or a beam.",
    }
    if TYPE_CHECKING:  # these raise; a checker would take them for missing

        def _refuse(self, *args: Any, **kwargs: Any) -> Any: ...

        argmax = marginals = max_marginals = cross_entropy = mbr = _refuse
        condition = ranked_support = sparsemap = _refuse

    def __init__(
        self,
        policy: Policy,
        inputs: Tensor,
        lengths: Tensor | None = None,
        validate_args: bool | None = None,
        _batch: torch.Size | None = None,
    ) -> None:
        name = self._name
        refuse_trace(name, "Trace the policy, and search outside.")
        missing = [m for m in ("start", "scores", "advance") if not hasattr(policy, m)]
        if missing:
            raise ValueError(
                f"{name}: policy must have the methods start, scores and advance; "
                f"{type(policy).__name__} lacks {', '.join(missing)}."
            )
        if not isinstance(inputs, Tensor):
            raise ValueError(f"{name}: inputs must be a tensor, got {type(inputs).__name__}.")
        if inputs.dim() < 2 or inputs.shape[1] == 0:
            raise ValueError(
                f"{name}: inputs must be (B, n, ...) with n at least 1, got {tuple(inputs.shape)}."
            )
        self.policy, self.inputs = policy, inputs
        self.lengths = None if lengths is None else checks.lengths(name, lengths, inputs.device)
        if self.lengths is not None and self.lengths.shape != inputs.shape[:1]:
            raise ValueError(
                f"{name}: lengths must be ({inputs.shape[0]},) for inputs {tuple(inputs.shape)}, "
                f"got {tuple(self.lengths.shape)}."
            )
        checks.same_device(name, inputs=inputs, lengths=self.lengths)
        n = inputs.shape[1]
        batch = inputs.shape[:1] if _batch is None else _batch
        super().__init__(batch, self._shape(n), None, validate_args)
        self._range, self._memory = checks.Derived(), Memory()

    # -- what a subclass says ---------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def _shape(n: int) -> tuple[int, int]:
        """The most steps and the most choices over n leaves: the shape of z."""

    @staticmethod
    @abstractmethod
    def _steps(length: Any) -> Any:
        """How many actions build a structure over so many leaves."""

    @staticmethod
    @abstractmethod
    def _least_choices(left: int) -> int:
        """How many choices a policy must at least score, of ``left`` steps to go."""

    @staticmethod
    @abstractmethod
    def _begin(lengths: Tensor) -> Any:
        """What is counted to tell legal actions, before the first: tensors ``(N)``."""

    @staticmethod
    @abstractmethod
    def _legal(counts: Any, choices: int) -> Tensor:
        """Which actions are legal ``(N, choices)``; none where an item is finished."""

    @staticmethod
    @abstractmethod
    def _count(counts: Any, action: Tensor) -> Any:
        """The counts after an action ``(N)``."""

    @staticmethod
    @abstractmethod
    def _wrong(actions: Tensor, lengths: Tensor) -> Tensor:
        """Which rows of ``(N, T)``, −1 past an item's last step, build no structure, ``(N)``."""

    @staticmethod
    @abstractmethod
    def _every(length: int) -> Tensor:
        """Every sequence of actions, ``(count, steps)``."""

    def _made(self) -> Any:
        """What tells prefixes that built the same apart from others, before the first action, a row
        for each item; None where no two sequences build the same."""
        return None

    def _keys(self, made: Any, choices: int) -> Tensor:
        """Of each next action, what its prefix will have built, as a number ``(N, choices)``."""
        raise NotImplementedError

    def _make(self, made: Any, action: Tensor) -> Any:
        """What ``made`` is after an action ``(N)``, −1 for none."""
        raise NotImplementedError

    @abstractmethod
    def _spans(self, actions: Tensor) -> Tensor:
        """Of actions ``(N, T)``, the spans they build as ``first·n + last``, n² for none."""

    # -- queries ----------------------------------------------------------------------------------

    def log_partition(self) -> Tensor:
        """0, ``(*batch)``: every step is normalised."""
        return torch.zeros(self.batch_shape, dtype=self._accurate, device=self.inputs.device)

    def score(self, z: Tensor) -> Tensor:
        """The same as ``log_prob``."""
        return self.log_prob(z)

    def log_prob(self, z: Any) -> Tensor:
        """log p of the sequence of actions ``(*batch)``; differentiable. Takes indicators, integer
        actions ``(..., T)`` (−1 in the padding), or what ``encode`` takes."""
        return self._replay(z, None).log_prob

    def rollout(self, z: Any, items: Tensor | None = None) -> Rollout:
        """Replays given structures: z ``(*sample, *batch, *parts)``, or with the index ``items``
        ``(N)`` of the item of the flattened batch that each belongs to, ``(N, *parts)``.

        Where z carries a gradient, the policy advances by z itself, so that the gradient of the
        final state in z is that of ``advance``.
        """
        return self._replay(z, items)

    def sample(
        self, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None
    ) -> Tensor:
        """Exact draws, ``(*sample_shape, *batch, *parts)``. No gradient flows through them."""

        def choose(t: int, scores: Tensor, logp: Tensor) -> tuple[Tensor, None]:
            return (logp.detach() + gumbel(logp, generator)).argmax(-1), None

        name = "sample" if generator is None else None
        return self._roll(choose, sample_shape, name).z

    def greedy(self) -> Rollout:
        """The most likely action at each step: z ``(*batch, *parts)``. Not the argmax."""
        return self._roll(lambda t, scores, logp: (logp.argmax(-1), None), name="greedy")

    def straight_through(
        self,
        kind: str = "argmax",
        temperature: float = 1.0,
        backward: str = "softmax",
        sample_shape: Sequence[int] = (),
        generator: torch.Generator | None = None,
    ) -> Rollout:
        """A rollout whose actions carry a gradient, at each step and through ``advance``. Biased.

        Forward, an action is the one-hot argmax of x/τ, with x the policy's scores of the legal
        actions, to which ``kind="gumbel"`` adds Gumbel noise: an exact sample (Jang et al., 2017;
        Choi et al., 2018). Backward it is taken for softmax(x/τ), or with ``backward="identity"``
        for x (Bengio et al., 2013). ``log_prob`` is that of the actions taken.
        """
        if kind not in ("argmax", "gumbel") or backward not in ("softmax", "identity"):
            raise ValueError(
                f'{self._name}.straight_through: kind must be "argmax" or "gumbel" and backward '
                f'"softmax" or "identity", got {kind!r} and {backward!r}.'
            )
        if not temperature > 0:
            raise ValueError(
                f"{self._name}.straight_through: temperature must be above 0, got {temperature}."
            )

        def choose(t: int, scores: Tensor, logp: Tensor) -> tuple[Tensor, Tensor]:
            x = logp + gumbel(logp, generator) if kind == "gumbel" else logp
            action = x.detach().argmax(-1)
            if backward == "softmax":
                soft = (x / temperature).softmax(-1)
            else:
                soft = torch.where(logp > -math.inf, scores, 0.0)
            hard = one_hot(action, logp.shape[1], soft.dtype)
            return action, (hard + (soft - soft.detach())).to(self.dtype)  # exactly 0 or 1

        return self._roll(choose, sample_shape, soft=True)

    def beam(self, k: int, distinct: bool = False) -> Rollout:
        """Beam search: z ``(*batch, k, *parts)``, log-probabilities ``(*batch, k)``, best first.

        The k best prefixes are kept at each step. Approximate, unless there are at most k prefixes
        of every length. Slots for which there is no structure hold the best one again, at −inf.

        Args:
            k: the width of the beam
            distinct: keep one sequence of each tree, its best, so that k trees are different
        """
        if not isinstance(k, int) or k < 1:
            raise ValueError(f"{self._name}: k must be an integer, at least 1, got {k!r}.")
        items = torch.arange(len(self.inputs), device=self.inputs.device).repeat_interleave(k)
        built = self._found(("beam", k, distinct), lambda s: beam(s, k, distinct), items, k)
        return self._keep(built, items, (*self.batch_shape, k))

    def topk(self, k: int, distinct: bool = False) -> TopK:
        """Approximate: the k structures that a beam search of width k ends with (see ``beam``).

        Its scores are exact and differentiable, but better structures may have been lost on the
        way. ``exists`` is False where the beam held fewer than k.
        """
        z, log_prob, _ = self.beam(k, distinct)
        return TopK(z, log_prob, log_prob > -math.inf)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        lengths = self._lengths().unique()
        if len(lengths) > 1:
            raise ValueError(
                f"{self._name}.enumerate_support: items of different lengths have different "
                "supports. Index one item: structure[i].enumerate_support()."
            )
        length = int(lengths[0]) if len(lengths) else self.inputs.shape[1]
        every = self._every(length).to(self.inputs.device)
        every = nn.functional.pad(every, (0, self.event_shape[0] - every.shape[1]), value=-1)
        z = self._one_hot(every)
        z = z.reshape(len(every), *[1] * len(self.batch_shape), *self.event_shape)
        return z.expand(-1, *self.batch_shape, *self.event_shape) if expand else z

    # -- trees ------------------------------------------------------------------------------------

    def to_spans(self, z: Any) -> Tensor:
        """The spans of the tree that z builds, ``(..., n, n)``: an indicator of ``BinaryTree``."""
        actions, lead = self._read(z)
        n = self.inputs.shape[1]
        spans = torch.zeros(len(actions), n * n + 1, dtype=self.dtype, device=actions.device)
        spans.scatter_(1, self._spans(actions), 1.0)
        return spans[:, :-1].reshape(*lead, n, n)

    def _reduces(self, spans: Any) -> tuple[Tensor, Tensor]:
        """How many spans of two leaves or more end at each leaf ``(*batch, n)``; the lengths."""
        n, lengths = self.inputs.shape[1], self._lengths().reshape(self.batch_shape)
        scores = torch.zeros((), dtype=self.dtype, device=self.inputs.device)
        trees = BinaryTree(scores.expand(*self.batch_shape, n, n), lengths, labelled=False)
        spans = trees._indicator(spans)
        inside = torch.arange(n, device=spans.device) < lengths[..., None]
        ends = torch.where(inside, spans.nan_to_num().triu(1).sum(-2), 0)
        return ends.long(), lengths.expand(ends.shape[:-1])

    # -- rollouts ---------------------------------------------------------------------------------

    def _roll(
        self,
        choose: Choose,
        sample_shape: Sequence[int] = (),
        name: str | None = None,
        soft: bool = False,
    ) -> Rollout:
        """Every item, ``sample_shape`` times; with ``soft``, rows carry a gradient."""
        times = checks.sample_shape(self._name, sample_shape).numel()

        def items(s: Incremental) -> Tensor:
            return torch.arange(len(s.inputs), device=s.inputs.device).repeat(times)

        def search(s: Incremental) -> Built:
            return follow(s, choose, None if times == 1 else items(s))

        mine = items(self)
        built = search(self) if soft else self._found((name, times), search, mine, -times)
        return self._keep(built, mine, (*sample_shape, *self.batch_shape))

    @property
    def _can_replay(self) -> bool:
        return getattr(self.policy, "can_replay", False) and checks.can_look(self._first)

    def _found(
        self, name: Any, search: Callable[[Incremental], Built], items: Tensor, lead: int
    ) -> Built:
        """What a search finds: with the gradients of its own steps, or replayed to have some."""
        if not self._can_replay:
            return search(self)
        with torch.no_grad():
            found = replayed(self, name, search, lead) if name[0] and lead else None
            found = search(self) if found is None else found
        if not torch.is_grad_enabled() and found.state is not None:
            return found
        built = known(self, found.actions, items)
        empty = found.log_prob == -math.inf  # slots of a beam, filled with another structure
        return built._replace(log_prob=torch.where(empty, -math.inf, built.log_prob))

    def _keep(self, built: Built, items: Tensor, lead: Sequence[int]) -> Rollout:
        """The rollout that a loop has built, remembered."""
        built = built._replace(log_prob=self._sound(built.log_prob, items))
        z = self._one_hot(built.actions) if built.soft is None else built.soft
        z = z.reshape(*lead, *self.event_shape)
        if checks.can_look(self._first) and (tensors := self._read_by_policy()) is not None:
            self._memory.keep(tensors, z, items, built)
        return Rollout(z, built.log_prob.reshape(lead), built.state)

    def _sound(self, log_prob: Tensor, items: Tensor) -> Tensor:
        """Without a gradient at −inf. NaN, which any step may have met, is looked for here."""
        log_prob = torch.where(log_prob == -math.inf, -math.inf, log_prob)
        wrong = self._wrong_items()
        if wrong is not None:
            log_prob = torch.where(wrong[items], math.nan, log_prob)
        if self._validate_args and checks.can_look(self._first) and bool(log_prob.isnan().any()):
            item = int(items[log_prob.isnan().nonzero()[0, 0]])
            raise ValueError(
                f"{self._name}: the policy's scores of item {item} hold NaN or +inf, or forbid "
                "(-inf) every legal action of a step."
            )
        return log_prob

    def _read_by_policy(self) -> list[Tensor] | None:
        """The tensors that a rollout depends on besides its actions; None if they are not known,
        since the policy is no module."""
        if not isinstance(self.policy, nn.Module):
            return None
        given = [t for t, _ in self._tensors().values()]
        return [*given, *self.policy.parameters(), *self.policy.buffers()]

    # -- given structures -------------------------------------------------------------------------

    def _replay(self, z: Any, items: Tensor | None) -> Rollout:
        z = z if isinstance(z, Tensor) else self.encode(z)
        flat, rows, lead = self._placed(z, items)
        readable = checks.can_look()
        read = self._read_by_policy() if readable else None
        if read is not None and (found := self._memory.find(read, z, rows)):
            return Rollout(z, found[0].reshape(lead), found[1])
        lengths = self._lengths()[rows]
        actions, _ = self._read(flat)
        steps = torch.arange(actions.shape[1], device=actions.device)
        actions = actions.masked_fill(steps >= self._steps(lengths)[:, None], -1)
        if self._validate_args and readable:
            self._check(flat, actions, lengths, lead)
        soft = z.requires_grad and torch.is_grad_enabled()
        found = None if read is None or soft else self._memory.look_up(read, actions, rows)
        if found is not None:
            log_prob, state = found
            z = self._one_hot(actions).reshape(*lead, *self.event_shape)
            return Rollout(z, log_prob.reshape(lead), state)
        if self._can_replay and not soft:
            return self._keep(known(self, actions, rows), rows, lead)
        by_step = actions.clamp(min=0).T.contiguous()

        def choose(t: int, scores: Tensor, logp: Tensor) -> tuple[Tensor, Tensor | None]:
            choices = logp.shape[1]
            row = flat[:, t, :choices].to(self.dtype) if soft else None
            return by_step[t].clamp(max=choices - 1), row

        everyone = items is None and lead == self.batch_shape
        return self._keep(follow(self, choose, None if everyone else rows), rows, lead)

    def _placed(self, z: Tensor, items: Tensor | None) -> tuple[Tensor, Tensor, torch.Size]:
        """z flattened to ``(N, …)``, the items its rows belong to, and its shape before that."""
        event = self.event_shape if _is_indicator(z) else self.event_shape[:1]
        lead = z.shape[: z.dim() - len(event)]
        if z.shape[z.dim() - len(event) :] != event:
            raise ValueError(
                f"{self._name}: z must be (..., {', '.join(map(str, event))}), "
                f"got {tuple(z.shape)}."
            )
        if items is not None:
            if lead != items.shape or items.dim() != 1:
                raise ValueError(
                    f"{self._name}: items must hold the index of an item for each structure, "
                    f"({z.shape[0]},), got {tuple(items.shape)}."
                )
            if self._validate_args and checks.can_look(self._first) and items.numel():
                given = checks.between(items, 0, len(self.inputs) - 1)
                checks.values(self._name, {}, {"items": given})
            return z, items, lead
        try:
            lead = torch.broadcast_shapes(lead, self.batch_shape)
        except RuntimeError:
            raise ValueError(
                f"{self._name}: the batch of z {tuple(lead)} does not broadcast with "
                f"{tuple(self.batch_shape)}."
            ) from None
        items = self._index().expand(lead).reshape(-1)
        return z.expand(*lead, *event).reshape(len(items), *event), items, lead

    def _check(self, z: Tensor, actions: Tensor, lengths: Tensor, lead: torch.Size) -> None:
        wrong = self._wrong(actions, lengths)
        if _is_indicator(z):
            rows = torch.where((actions >= 0)[..., None], z, 0)
            wrong = wrong | ((rows != 0) & (rows != 1)).flatten(1).any(-1)
            wrong = wrong | (rows.sum(-1) != (actions >= 0)).any(-1)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0, 0])
            where = list(torch.unravel_index(torch.tensor(row, device="cpu"), lead)) if lead else []
            raise ValueError(
                f"{self._name}: z{[int(i) for i in where]} builds no tree over "
                f"{int(lengths[row])} leaves; its actions are {actions[row].tolist()}."
            )

    # -- forms ------------------------------------------------------------------------------------

    def _read(self, z: Any) -> tuple[Tensor, torch.Size]:
        """Actions ``(N, T)``, −1 for none, of an indicator or of integers; and the shape of N."""
        z = z if isinstance(z, Tensor) else self.encode(z)
        if _is_indicator(z):
            steps, choices = z.shape[-2:]
            flat = z.detach().reshape(z.shape[:-2].numel(), steps, choices)
            if not flat.numel():
                return torch.zeros(flat.shape[:2], dtype=torch.int64, device=z.device), z.shape[:-2]
            best = flat.to(torch.uint8) if flat.dtype == torch.bool else flat
            value, action = best.max(-1)
            return action.masked_fill(~(value > 0), -1), z.shape[:-2]
        return z.long().reshape(-1, z.shape[-1]), z.shape[:-1]

    def _one_hot(self, actions: Tensor) -> Tensor:
        return one_hot(actions, self.event_shape[1], self.dtype)

    def decode(self, z: Tensor) -> Any:
        """The human form of z, as lists nested as its batch."""
        actions, lead = self._read(z)
        items = [self._show([a for a in row if a >= 0]) for row in actions.tolist()]
        return nest(items, lead)

    def encode(self, obj: Any) -> Tensor:
        """z of the human form, or of integer actions ``(..., T)``, −1 in the padding."""
        if not isinstance(obj, Tensor):
            return self._parse(obj)
        steps, choices = self.event_shape
        if _is_indicator(obj) or obj.dim() < 1 or obj.shape[-1] != steps:
            raise ValueError(
                f"{self._name}: actions must be integers (..., {steps}), got {obj.dtype} "
                f"{tuple(obj.shape)}."
            )
        if checks.can_look() and bool(((obj < -1) | (obj >= choices)).any()):
            raise ValueError(
                f"{self._name}: actions must be between 0 and {choices - 1}, or -1 past the last, "
                f"got {sorted(set(obj.reshape(-1).tolist()))}."
            )
        return self._one_hot(obj)

    @abstractmethod
    def _show(self, actions: list[int]) -> Any:
        """The human form of one sequence of actions."""

    @abstractmethod
    def _parse(self, obj: Any) -> Tensor:
        """z of human forms, nested as a batch."""

    # -- shape and place --------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of z: that of the inputs, or of the policy's parameters where inputs are
        integers."""
        if self.inputs.is_floating_point():
            return self.inputs.dtype
        parameters = self.policy.parameters() if isinstance(self.policy, nn.Module) else ()
        floating = (p.dtype for p in parameters if p.is_floating_point())
        return next(floating, torch.get_default_dtype())

    @property
    def _accurate(self) -> torch.dtype:
        """The dtype of log-probabilities: at least float32."""
        return torch.promote_types(self.dtype, torch.float32)

    def _lengths(self) -> Tensor:
        """The length of each item of the flattened batch, ``(B)``; impossible ones are cut."""
        self._validate()
        size, n = self.inputs.shape[:2]
        if self.lengths is None:
            return torch.full((size,), n, device=self.inputs.device)
        lengths = self.lengths.long()
        return lengths if self._is_valid else lengths.clamp(1, n)

    def _given_integers(self) -> dict[str, checks.Integers]:
        if self.lengths is None:
            return {}
        return {"lengths": checks.between(self.lengths, 1, self.inputs.shape[1])}

    def _wrong_items(self) -> Tensor | None:
        """Of the flattened batch."""
        return None if self._is_valid else self._given_integers()["lengths"].wrong

    def _shortest_and_longest(self) -> tuple[int, int]:
        """The least and the largest length; what they may be where they cannot be read. A loop runs
        as long as the longest item, and before the shortest ends, none is finished."""
        n, lengths = self.inputs.shape[1], self.lengths
        if lengths is None or not lengths.numel():
            return n, n
        if not checks.can_look():
            return 1, n
        low, high = self._range.get([lengths], lambda: torch.stack(lengths.aminmax()).tolist())
        return (low, high) if low >= 1 and high <= n else (1, n)

    def _tensors(self) -> dict[str, tuple[Tensor, int]]:
        """Of the flattened batch."""
        given = {"inputs": (self.inputs, self.inputs.dim() - 1)}
        return given if self.lengths is None else {**given, "lengths": (self.lengths, 0)}

    def _options(self) -> dict[str, Any]:
        return {"policy": self.policy}

    def _rebuild(self, **tensors: Tensor | None) -> Self:
        given = {"inputs": self.inputs, "lengths": self.lengths, **tensors}
        new = type(self)(self.policy, **given, validate_args=False, _batch=self.batch_shape)  # type: ignore[arg-type]
        return self._vouch_for(new)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """The inputs on another device or in another dtype. The policy is yours to move."""
        return super().to(*args, **kwargs)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Self:
        """The same structure with its batch expanded."""
        return self._items(self._index().expand(*batch_shape))

    def __getitem__(self, index: Any) -> Self:
        """Some items of the batch: indexing as for a tensor of shape ``batch_shape``."""
        if not self.batch_shape:
            raise IndexError(f"{self._name}: there is no batch to index (batch_shape is ()).")
        return self._items(self._index()[index])

    def _index(self) -> Tensor:
        size = self.batch_shape.numel()
        return torch.arange(size, device=self.inputs.device).reshape(self.batch_shape)

    def _items(self, index: Tensor) -> Self:
        flat = index.reshape(-1)
        lengths = None if self.lengths is None else self.lengths[flat]
        return type(self)(
            self.policy, self.inputs[flat], lengths, self._validate_args, _batch=index.shape
        )

    def __repr__(self) -> str:
        return (
            f"{self._name}(policy={type(self.policy).__name__}, "
            f"batch_shape={tuple(self.batch_shape)}, event_shape={tuple(self.event_shape)})"
        )


def _is_indicator(z: Tensor) -> bool:
    return z.is_floating_point() or z.dtype == torch.bool
