"""The loops that build structures action by action: follow a rule, or search with a beam."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils import _pytree as pytree

from structmax.checks import Record

if TYPE_CHECKING:
    from structmax.structures.incremental import Incremental


class Policy(Protocol):
    """What scores the actions: a module with these three methods.

    A state is any nesting of tuples, lists, dicts and named tuples whose tensors have a row for
    each item; leaves that are no tensors are shared by all rows. A search picks, repeats and drops
    rows, so none may depend on another. Actions that are not legal are masked afterwards: a policy
    need not know them, nor the lengths. A finished item is given a row of zeros, and what
    ``advance`` makes of its state is thrown away, so it must only not fail. A state may shrink from
    step to step; a finished item then keeps the leading part of each tensor.

    A policy may also have ``replay(inputs, lengths, items, actions)``, which gives the
    log-probabilities ``(N)`` and the final state of known actions ``(N, T)``, −1 past the last, of
    ``items`` ``(N)``, and ``can_replay``, whether it may be used. Searches then run without a
    graph, and what they find is replayed with one: faster where a network need not go step by step.
    If it has a true ``can_capture`` as well, searches on a GPU are recorded as CUDA graphs, so its
    methods must do the same for all batches of a size.
    """

    def start(self, inputs: Tensor, lengths: Tensor) -> Any:
        """The first state, of inputs ``(B, n, …)``, zero in the padding, and lengths ``(B)``. Both
        are copies, so a policy may write into them."""

    def scores(self, state: Any) -> Tensor:
        """Unnormalised log-probabilities of the actions ``(B, choices)``."""

    def advance(self, state: Any, action: Tensor) -> Any:
        """The next state; ``action`` is one-hot ``(B, choices)``, perhaps with a gradient. Tensors
        of the given state are still needed, so it must not write into them."""


class Rollout(NamedTuple):
    """Structures, their log-probabilities, and the state in which they left the policy.

    The rows of ``state`` are those of ``log_prob.flatten()``. :class:`ShiftReduce` and
    :class:`EasyFirst` return it; log-probabilities and state are differentiable.

    >>> import structmax as sx
    >>> class Even(torch.nn.Module):  # any pair of neighbours is as good; counts its merges
    ...     def start(self, inputs, lengths): return torch.zeros(len(inputs))
    ...     def scores(self, state): return torch.zeros(len(state), 2)
    ...     def advance(self, state, action): return state + 1
    >>> found = sx.EasyFirst(Even(), torch.zeros(1, 3, 1)).greedy()
    >>> found.z.shape, found.log_prob.exp(), found.state
    (torch.Size([1, 2, 2]), tensor([0.5000]), tensor([2.]))
    """

    z: Tensor
    log_prob: Tensor
    state: Any


class Built(NamedTuple):
    """What a loop returns for its N rows: actions, −1 for none, and with ``soft`` their rows."""

    actions: Tensor  # (N, T)
    log_prob: Tensor  # (N)
    state: Any
    soft: Tensor | None = None  # (N, T, choices)


# of a step, the scores and log-probabilities (N, choices), to an action (N) and a row in its place
Choose = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def follow(s: Incremental, choose: Choose, rows: Tensor | None = None) -> Built:
    """Takes the actions that ``choose`` says, for all items of s or for those in ``rows``."""
    now = _start(s, rows)
    size = len(s.inputs) if rows is None else len(rows)
    total = torch.zeros(size, dtype=s._accurate, device=s.inputs.device)
    actions, soft = [], []
    shortest, longest = map(s._steps, s._shortest_and_longest())
    for t in range(longest):
        scores, logp, done = _choices(s, now, t, shortest, longest)
        action, row = choose(t, scores, logp)
        taken = logp.gather(1, action[:, None]).squeeze(1)
        if done is not None:
            taken, action = taken.masked_fill(done, 0.0), action.masked_fill(done, -1)
        if row is None:
            row = one_hot(action, logp.shape[1], s.dtype)
        else:
            row = row if done is None else row.masked_fill(done[:, None], 0.0)
            soft.append(pad(row, (0, s.event_shape[1] - row.shape[1])))
        total = total + taken
        now = _move(s, now, action, row, done)
        actions.append(action)
    built = Built(_stack(s, actions, size), total, now[1])
    if not soft:
        return built
    missing = s.event_shape[0] - len(soft)
    return built._replace(soft=pad(torch.stack(soft, 1), (0, 0, 0, missing)))


def beam(s: Incremental, k: int, distinct: bool = False) -> Built:
    """The k best prefixes at each step; B·k rows, those of an item together and best first."""
    size, device = len(s.inputs), s.inputs.device
    now, item = _start(s, None), torch.arange(size, device=device)[:, None]
    total = torch.zeros(size, 1, dtype=s._accurate, device=device)
    made = s._made() if distinct else None
    history = []  # the beam that each came from and the action taken, read backwards at the end
    shortest, longest = map(s._steps, s._shortest_and_longest())
    for t in range(longest):
        _, logp, done = _choices(s, now, t, shortest, longest)  # (B·width, choices)
        width, choices = total.shape[1], logp.shape[1]
        if done is not None:  # what is finished has one way to go on
            stay = torch.where(torch.arange(choices, device=device) == 0, 0.0, -math.inf)
            logp = torch.where(done[:, None], stay.to(logp), logp)
        reached = (total[..., None] + logp.reshape(size, width, choices)).flatten(1)
        keys = None if made is None else s._keys(made, choices).reshape(size, -1)
        total, at = _best(reached, k, keys)
        at = torch.where(total > -math.inf, at, at[:, :1])  # the policy sees legal actions only
        parent, action = at // choices, (at % choices).reshape(-1)
        rows = (item * width + parent).reshape(-1)
        now = select(now, rows)
        if done is not None:
            done = done[rows]
            action = action.masked_fill(done, -1)
        now = _move(s, now, action, one_hot(action, choices, s.dtype), done)
        if made is not None:
            made = s._make(select(made, rows), action)
        history.append((parent, action.reshape(parent.shape)))
    state, width = now[1], total.shape[1]
    slot = torch.arange(k, device=device)
    slot = torch.where(slot < width, slot, 0).expand(size, k)
    if width < k:
        state = select(state, (item * width + slot).reshape(-1))
        total = pad(total, (0, k - width), value=-math.inf)
    actions = []
    for parent, action in reversed(history):
        actions.append(action.gather(1, slot).reshape(-1))
        slot = parent.gather(1, slot)
    return Built(_stack(s, actions[::-1], size * k), total.reshape(-1), state)


def _best(reached: Tensor, k: int, keys: Tensor | None) -> tuple[Tensor, Tensor]:
    """The k best of what is reached ``(B, m)``, and where they are; of those with the same key only
    the best."""
    count = reached.shape[1]
    if keys is None:
        return reached.topk(min(k, count))
    # each of at most k beams goes on to a key once, so of the k² best k are different
    best, at = reached.topk(min(k * k, count))
    keys = keys.gather(1, at)
    before = torch.ones(at.shape[1], at.shape[1], dtype=torch.bool, device=at.device).tril(-1)
    again = ((keys[:, :, None] == keys[:, None]) & before).any(-1)
    best, order = best.masked_fill(again, -math.inf).topk(min(k, count))
    return best, at.gather(1, order)


def known(s: Incremental, actions: Tensor, items: Tensor) -> Built:
    """What a policy that can replay makes of known actions ``(N, T)`` of ``items`` ``(N)``."""
    given = _inputs(s), s._lengths().clone(), items, actions
    log_prob, state = s.policy.replay(*given)  # type: ignore[attr-defined]
    return Built(actions, log_prob.to(s._accurate), state)


def _inputs(s: Incremental) -> Tensor:
    """A copy, zero in the padding."""
    inputs = s.inputs
    if s._shortest_and_longest()[0] == inputs.shape[1]:
        return inputs.clone()
    used = torch.arange(inputs.shape[1], device=inputs.device) < s._lengths()[:, None]
    used = used[(..., *[None] * (inputs.dim() - 2))]
    return torch.where(used, inputs, inputs.new_zeros(()))


def _start(s: Incremental, rows: Tensor | None) -> Any:
    """Counts and state before the first action, of all items or of those given."""
    inputs, lengths = _inputs(s), s._lengths()
    state = s.policy.start(inputs, lengths.clone())
    for leaf in pytree.tree_leaves(state):
        if isinstance(leaf, Tensor) and leaf.shape[:1] != inputs.shape[:1]:
            raise ValueError(
                f"{s._name}: the tensors of the policy's state must have a row for each of the "
                f"{len(inputs)} items, ({len(inputs)}, ...), got {tuple(leaf.shape)}."
            )
    now = s._begin(lengths), state
    return now if rows is None else select(now, rows)


def _choices(
    s: Incremental, now: Any, t: int, shortest: int, longest: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Scores and log-probabilities ``(N, choices)`` of step t, and who is finished, if any can be:
    items take from ``shortest`` to ``longest`` steps."""
    counts, state = now
    scores = s.policy.scores(state)
    least, most = s._least_choices(longest - t), s.event_shape[1]
    rows = len(pytree.tree_leaves(counts)[0])
    if scores.dim() != 2 or len(scores) != rows or not least <= scores.shape[1] <= most:
        wanted = least if least == most else f"{least} to {most}"
        raise ValueError(
            f"{s._name}: at step {t} the policy's scores must be ({rows}, {wanted}), got "
            f"{tuple(scores.shape)}."
        )
    scores = scores.float() if scores.dtype.itemsize < 4 else scores
    legal = s._legal(counts, scores.shape[1])
    if t < shortest:
        return scores, torch.where(legal, scores, -math.inf).log_softmax(-1), None
    done = ~legal.any(-1)
    rest = torch.where(done, 0.0, -math.inf)[:, None].to(scores.dtype)
    return scores, torch.where(legal, scores, rest).log_softmax(-1), done


def _move(s: Incremental, now: Any, action: Tensor, row: Tensor, done: Tensor | None) -> Any:
    """Counts and state after an action; those of finished items stay."""
    counts, state = now
    new = s._count(counts, action), s.policy.advance(state, row)
    if done is None:
        return new

    def keep(a: Any, b: Any) -> Any:
        if not isinstance(b, Tensor):
            return b
        a = a[tuple(slice(size) for size in b.shape)]
        return torch.where(done[(..., *[None] * (b.dim() - 1))], a, b)

    return pytree.tree_map(keep, now, new)


def _stack(s: Incremental, actions: list[Tensor], size: int) -> Tensor:
    """The actions of each step ``(N)`` as ``(N, T)``, −1 past the last of them."""
    none = torch.full((size, s.event_shape[0]), -1, device=s.inputs.device)
    return torch.cat([*[action[:, None] for action in actions], none[:, len(actions) :]], 1)


def select(tree: Any, rows: Tensor) -> Any:
    """Some rows of every tensor of a state."""
    return pytree.tree_map_only(Tensor, lambda t: t.index_select(0, rows), tree)


def one_hot(index: Tensor, choices: int, dtype: torch.dtype) -> Tensor:
    """``(..., choices)``; a row of zeros at −1."""
    return (index[..., None] == torch.arange(choices, device=index.device)).to(dtype)


def gumbel(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Gumbel noise of the shape of a tensor, never infinite."""
    noise = torch.empty_like(like, requires_grad=False).exponential_(generator=generator)
    return noise.clamp_(min=torch.finfo(like.dtype).tiny).log_().neg_()


class Memory:
    """The last rollout of a structure, found again by its z or by its actions.

    It is dropped when a backward pass goes through it, which frees the graph, and not used if
    somebody wrote into it, or into what the policy reads, since. Copies and pickles are empty: a
    graph can be neither.
    """

    def __init__(self) -> None:
        self._kept: tuple[Tensor, Tensor, Built] | None = None
        self._record = Record()
        self._has_graph = False

    def keep(self, read: list[Tensor], z: Tensor, items: Tensor, built: Built) -> None:
        """Remembers rows of ``items`` ``(N)``, whose structures are z ``(..., *parts)``, built by a
        policy that reads these tensors."""
        self._kept, self._record = (z, items, built), Record()
        self._record.add([*read, *_written(z, built)])
        self._has_graph = torch.is_grad_enabled()
        memory = weakref.ref(self)

        def forget(grad: Tensor) -> None:
            if (owner := memory()) is not None:
                owner._kept = None

        for leaf in [built.log_prob, *pytree.tree_leaves(built.state)]:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(forget)

    def find(self, read: list[Tensor], z: Tensor, items: Tensor) -> tuple[Tensor, Any] | None:
        """Log-probabilities ``(N)`` and state of this very z, perhaps in another shape."""
        if (kept := self._fresh(read)) is None:
            return None
        known = kept[0]
        view = z._base is not None and z._base is (known if known._base is None else known._base)
        whole = z.numel() == known.numel() and z.is_contiguous() and known.is_contiguous()
        same = z is known or (view and whole and z.storage_offset() == known.storage_offset())
        if not same or not torch.equal(items, kept[1]):
            return None
        return kept[2].log_prob.clone(), kept[2].state

    def look_up(self, read: list[Tensor], actions: Tensor, items: Tensor) -> Any:
        """Those of rows with these actions, in any order, if all are remembered."""
        kept = self._fresh(read)
        if kept is None or kept[2].soft is not None or not len(items) or not len(kept[1]):
            return None
        _, known, built = kept
        # rows are sorted by a hash of item and actions; what it finds is then compared in full
        weights = torch.arange(1, actions.shape[1] + 2, device=actions.device) * 0x9E3779B97F4A7C1
        weights = weights ^ (weights >> 29)

        def key(items: Tensor, actions: Tensor) -> Tensor:
            return (torch.cat([items[:, None], actions], 1) + 2).mul(weights).sum(1)

        keys, order = key(known, built.actions).sort(stable=True)  # of equal rows, the first
        rows = order[torch.searchsorted(keys, key(items, actions)).clamp(max=len(keys) - 1)]
        same = (built.actions[rows] == actions).all(-1) & (known[rows] == items)
        if not bool(same.all()):
            return None
        return built.log_prob[rows], select(built.state, rows)

    def _fresh(self, read: list[Tensor]) -> tuple[Tensor, Tensor, Built] | None:
        if self._kept is None or not (self._has_graph or not torch.is_grad_enabled()):
            return None
        z, _, built = self._kept
        return self._kept if self._record.covers([*read, *_written(z, built)]) else None

    def __reduce__(self) -> Any:
        return Memory, ()


def _written(z: Tensor, built: Built) -> list[Tensor]:
    """The tensors of a rollout that others have, and may write into."""
    leaves = pytree.tree_leaves((z, built.log_prob, built.state))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
