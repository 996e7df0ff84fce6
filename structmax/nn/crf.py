"""A conditional random field as a layer."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any, Self, overload

import torch
from torch import Tensor, nn

from structmax import checks
from structmax.structures.linear_chain import LinearChain
from structmax.tracing import refuse_without_values

IGNORED = -100  # the usual label of positions that a loss is to ignore
NAMES = (
    ("transitions", "transitions"),
    ("starts", "start_transitions"),
    ("ends", "end_transitions"),
)
"""The constraints and the parameters that they are about."""
Constraints = tuple[Any, Any, Any]
"""Which transitions ``(c, c)``, first tags and last tags ``(c)`` are allowed; None: all."""


class CRF(nn.Module):
    """The output layer of a tagger: a linear chain with learned transitions.

    Takes the place of ``torchcrf.CRF``: the same arguments, errors and parameter names, so its
    checkpoints load. Beyond it there are marginals, k-best decoding, the structure itself, half
    precision (computed in float32), and any mask: the chain runs over the positions that an item's
    mask leaves on, wherever they are. What stands at the others, NaN included, has no effect.

    Tensors are ``(n, B, ...)``, or ``(B, n, ...)`` with ``batch_first=True``.

    What no tagging may do is said by ``constraints``: a forbidden transition scores −inf whatever
    its parameter is, has probability 0, no gradient, and is never decoded. (−inf in a parameter
    forbids too, but weight decay and averages of weights turn it into NaN.) The masks are not in
    the ``state_dict``.

    Args:
        num_tags: c, the number of tags
        batch_first: whether the batch is the first dimension
        constraints: what is allowed: ``(transitions, starts, ends)``, masks ``(c, c)``, ``[from,
            to]``, ``(c)`` and ``(c)``, bool tensors or lists, or None where everything is

    Attributes:
        transitions: ``(c, c)``, ``[from, to]``
        start_transitions, end_transitions: ``(c)``

    >>> import structmax as sx
    >>> crf = sx.nn.CRF(num_tags=2, batch_first=True)
    >>> _ = crf.load_state_dict({
    ...     "start_transitions": torch.zeros(2),
    ...     "end_transitions": torch.zeros(2),
    ...     "transitions": torch.tensor([[0.0, -1.0], [0.0, 0.0]]),
    ... })
    >>> emissions = torch.tensor([[[2.0, 0.0], [0.0, 0.5], [1.0, 0.0]]])
    >>> mask = torch.tensor([[True, False, True]])
    >>> loss = -crf(emissions, torch.tensor([[0, 1, 0]]), reduction="mean")
    >>> round(loss.item(), 4)
    1.3854
    >>> crf.decode(emissions), crf.decode(emissions, mask)
    ([[0, 0, 0]], [[0, 0]])
    >>> crf.decode(emissions, k=2)
    [[([0, 0, 0], 3.0), ([0, 1, 0], 2.5)]]
    >>> crf.marginals(emissions, mask).detach()
    tensor([[[0.8598, 0.1402],
             [0.0000, 0.0000],
             [0.8598, 0.1402]]])
    >>> crf.structure(emissions).entropy().detach()
    tensor([1.6249])

    In BIO, I may not follow O, nor come first:

    >>> follows = [[True, True, False], [True, True, True], [True, True, True]]  # O, B, I
    >>> crf = sx.nn.CRF(3, batch_first=True, constraints=(follows, [True, True, False], None))
    >>> crf.decode(torch.tensor([[[2.0, 0.0, 9.0], [0.0, 0.0, 9.0]]]))
    [[1, 2]]
    """

    def __init__(
        self, num_tags: int, batch_first: bool = False, constraints: Constraints | None = None
    ) -> None:
        if num_tags <= 0:
            raise ValueError(f"invalid number of tags: {num_tags}")
        super().__init__()
        self.num_tags, self.batch_first = num_tags, batch_first
        self.start_transitions = nn.Parameter(torch.empty(num_tags))
        self.end_transitions = nn.Parameter(torch.empty(num_tags))
        self.transitions = nn.Parameter(torch.empty(num_tags, num_tags))
        self.constraints = _masks(constraints, num_tags)
        for (name, _), mask in zip(NAMES, self.constraints, strict=True):
            # numbers, since averages of buffers are not defined for bool
            allowed = None if mask is None else mask.to(self.transitions)
            self.register_buffer(f"_allowed_{name}", allowed, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws every parameter from U(−0.1, 0.1)."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1)

    def extra_repr(self) -> str:
        given = [
            name for (name, _), m in zip(NAMES, self.constraints, strict=True) if m is not None
        ]
        return f"num_tags={self.num_tags}" + (
            f", constraints on {', '.join(given)}" if given else ""
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        empty = self.transitions.is_meta
        super()._apply(fn, recurse)
        if empty and not self.transitions.is_meta:  # no checkpoint has the masks
            for (name, _), mask in zip(NAMES, self.constraints, strict=True):
                if mask is not None:
                    getattr(self, f"_allowed_{name}").copy_(mask)
        return self

    def forward(
        self, emissions: Tensor, tags: Tensor, mask: Tensor | None = None, reduction: str = "sum"
    ) -> Tensor:
        """The log-likelihood of ``tags``: its negative is the loss.

        ``reduction`` is ``"none"`` for one number per item, ``"sum"``, ``"mean"`` over the items,
        or ``"token_mean"`` over the positions that the mask leaves on.
        """
        if reduction not in ("none", "sum", "mean", "token_mean"):
            raise ValueError(f"invalid reduction: {reduction}")
        self._check(emissions, tags=tags, mask=mask)
        chosen = self._swap(tags)
        try:
            chain, order = self._chain(emissions, mask)
            log_likelihood = chain.log_prob(chosen if order is None else chosen.gather(1, order))
        except ValueError as error:
            raise self._retold("forward", error, emissions, mask, tags) from None
        self._refuse_forbidden(chain, log_likelihood.detach(), tags, mask)
        if reduction == "none":
            return log_likelihood
        if reduction == "mean":
            return log_likelihood.mean()
        total = log_likelihood.sum()
        if reduction == "sum":
            return total
        return total / (tags.numel() if chain.lengths is None else chain.lengths.sum())

    @overload
    def decode(self, emissions: Tensor, mask: Tensor | None = None) -> list[list[int]]: ...

    @overload
    def decode(
        self, emissions: Tensor, mask: Tensor | None = None, *, k: int
    ) -> list[list[tuple[list[int], float]]]: ...

    @torch.no_grad()
    def decode(
        self, emissions: Tensor, mask: Tensor | None = None, k: int | None = None
    ) -> list[list[int]] | list[list[tuple[list[int], float]]]:
        """The best tags of each item, as long as its mask leaves positions on.

        With ``k``, each item's k best as pairs ``(tags, score)``, best first; fewer where an item
        has fewer.
        """
        self._check(emissions, mask=mask)
        refuse_without_values("CRF.decode", emissions)
        try:
            chain = self.structure(emissions, mask)
            return _best(chain) if k is None else _ranked(chain, k)
        except ValueError as error:
            raise self._retold("decode", error, emissions, mask) from None

    def marginals(self, emissions: Tensor, mask: Tensor | None = None) -> Tensor:
        """The probability of each tag at each position, shaped as ``emissions``. Differentiable.

        Zero where the mask is off.
        """
        self._check(emissions, mask=mask)
        try:
            chain, order = self._chain(emissions, mask)
            mu = chain.marginals()
        except ValueError as error:
            raise self._retold("marginals", error, emissions, mask) from None
        if order is not None:
            mu = torch.zeros_like(mu).scatter(1, order[..., None].expand_as(mu), mu)
        return self._swap(mu)

    def structure(self, emissions: Tensor, mask: Tensor | None = None) -> LinearChain:
        """The distribution over tags, ``(B, n, c)`` whatever ``batch_first``, for other queries.

        Each item's unmasked positions come first, in their order; the rest is padding.
        """
        self._check(emissions, mask=mask)
        try:
            return self._chain(emissions, mask)[0]
        except ValueError as error:
            raise self._retold("structure", error, emissions, mask) from None

    def _chain(self, emissions: Tensor, mask: Tensor | None) -> tuple[LinearChain, Tensor | None]:
        """The chain, and the order ``(B, n)`` of its positions where the mask has holes."""
        emissions, lengths, order = self._swap(emissions), None, None
        if mask is not None:
            mask = self._swap(mask).bool()
            lengths = mask.sum(1)
            if not checks.can_look(mask) or not _is_prefix(mask, lengths):
                place = torch.arange(mask.shape[1], device=mask.device)
                order = torch.where(mask, place, place + mask.shape[1]).argsort(dim=1)
                emissions = emissions.gather(1, order[..., None].expand_as(emissions))
        transitions, starts, ends = (self._scores(*names) for names in NAMES)
        return LinearChain(emissions, transitions, starts, ends, lengths=lengths), order

    def _scores(self, name: str, parameter: str) -> Tensor:
        """A parameter, −inf where its constraints forbid."""
        scores, allowed = getattr(self, parameter), getattr(self, f"_allowed_{name}")
        return scores if allowed is None else torch.where(allowed > 0.5, scores, -math.inf)

    def _refuse_forbidden(
        self, chain: LinearChain, log_likelihood: Tensor, tags: Tensor, mask: Tensor | None
    ) -> None:
        """An error where tags break a constraint. Their likelihood is 0, so nothing is searched
        where that of no item is."""
        if all(m is None for m in self.constraints) or not chain._validate_args:
            return
        if not checks.can_look() or not bool((log_likelihood == -math.inf).any()):
            return
        tags, on = self._swap(tags), torch.ones_like(self._swap(tags), dtype=torch.bool)
        on = on if mask is None else self._swap(mask).bool()
        for item in (log_likelihood == -math.inf).nonzero().squeeze(-1).tolist():
            places = on[item].nonzero().squeeze(-1)
            number, wrong = self._broken(tags[item, places].tolist())
            if wrong:
                at = [item, int(places[number])]
                at = at if self.batch_first else at[::-1]
                raise ValueError(
                    f"CRF: tags{at} is {wrong} by the constraints. Correct the tags of item "
                    f"{item}, mask positions out, or allow it."
                )

    def _broken(self, tags: list[int]) -> tuple[int, str]:
        """Which tag of a sentence breaks a constraint, and how; "" if none does."""
        follows, starts, ends = self.constraints
        if starts is not None and not starts[tags[0]]:
            return 0, f"{tags[0]}, which may not come first"
        for number, (before, tag) in enumerate(itertools.pairwise(tags), 1):
            if follows is not None and not follows[before, tag]:
                return number, f"{tag}, which may not follow {before}"
        if ends is not None and not ends[tags[-1]]:
            return len(tags) - 1, f"{tags[-1]}, which may not come last"
        return 0, ""

    def _swap(self, tensor: Tensor) -> Tensor:
        """Between the caller's layout and ``(B, n, ...)``."""
        return tensor if self.batch_first else tensor.transpose(0, 1)

    def _check(self, emissions: Tensor, **others: Tensor | None) -> None:
        if not isinstance(emissions, Tensor):
            raise ValueError(f"emissions must be a tensor, got {type(emissions).__name__}")
        if emissions.dim() != 3:
            raise ValueError(f"emissions must have dimension of 3, got {emissions.dim()}")
        if emissions.shape[2] != self.num_tags:
            raise ValueError(
                f"expected last dimension of emissions is {self.num_tags}, got {emissions.shape[2]}"
            )
        for name, tensor in others.items():
            if tensor is not None and tensor.shape != emissions.shape[:2]:
                raise ValueError(
                    f"the first two dimensions of emissions and {name} must match, "
                    f"got {tuple(emissions.shape[:2])} and {tuple(tensor.shape)}"
                )
        if not emissions.is_floating_point():
            raise ValueError(f"emissions must be floating point, got {emissions.dtype}")
        tags = others.get("tags")
        if tags is not None and not checks.holds_integers(tags):
            raise ValueError(f"tags must be integers, got {tags.dtype}")

    def _retold(
        self,
        query: str,
        error: ValueError,
        emissions: Tensor,
        mask: Tensor | None,
        tags: Tensor | None = None,
    ) -> ValueError:
        """An error of the chain in the caller's names and places, which only now are looked for."""
        parameters = dict(self.named_parameters())
        try:
            checks.same_device("CRF", emissions=emissions, mask=mask, tags=tags, **parameters)
        except ValueError as found:
            return found
        retold = ValueError(re.sub(r"^LinearChain\.\w+:", f"CRF.{query}:", str(error)))
        if not checks.can_look():
            return retold
        everywhere = emissions.new_ones(emissions.shape[:2], dtype=torch.bool)
        on = everywhere if mask is None else mask.bool()
        given: dict[str, tuple[Tensor, checks.Mask]]
        given = {"emissions": (emissions, on[..., None])}
        given |= {name: (scores, None) for name, scores in parameters.items()}
        try:
            checks.values("CRF", given)
        except ValueError as found:
            return found
        if tags is None:
            return retold
        wrong = on & ((tags < 0) | (tags >= self.num_tags))
        if not bool(wrong.any()):
            return retold
        where = tuple(wrong.nonzero()[0].tolist())
        hint = ""
        if int(tags[where]) == IGNORED:
            labels = f"labels != {IGNORED}"
            both = labels if mask is None else f"mask & ({labels})"
            hint = f" What is to be ignored is masked out: mask={both}."
        return ValueError(
            f"CRF: a tag must be between 0 and {self.num_tags - 1}, got {int(tags[where])} at "
            f"tags{list(where)}.{hint}"
        )


def _masks(given: Any, c: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Constraints as bool tensors on the CPU, which the caller's do not change any more."""
    if given is None:
        return None, None, None
    if not isinstance(given, tuple | list) or len(given) != 3:
        raise ValueError(
            "CRF: constraints must be three masks of what is allowed, (transitions, starts, ends), "
            f"or None in their place, got {type(given).__name__}"
            + (f" of {len(given)}." if isinstance(given, tuple | list) else ".")
        )
    found: list[Tensor | None] = []
    for (name, _), mask, shape in zip(NAMES, given, ((c, c), (c,), (c,)), strict=True):
        if mask is None:
            found.append(None)
            continue
        if not isinstance(mask, Tensor):
            mask = checks.as_tensor("CRF", f"constraints on {name}", mask, torch.device("cpu"))
        if mask.dtype != torch.bool or mask.shape != shape or mask.is_meta:
            raise ValueError(
                f"CRF: constraints on {name} must be booleans {shape}, True where it is allowed, "
                f"got {tuple(mask.shape)} of {mask.dtype} on {mask.device}."
            )
        found.append(mask.detach().clone().cpu())
    follows, starts, ends = found
    return follows, starts, ends


def _best(chain: LinearChain) -> list[list[int]]:
    """The best tags of each item."""
    rows = chain.argmax_tags().tolist()
    if chain.lengths is None:
        return rows
    return [row[:n] for row, n in zip(rows, chain.lengths.tolist())]


def _ranked(chain: LinearChain, k: int) -> list[list[tuple[list[int], float]]]:
    """The k best tags of each item, with their scores."""
    best = chain.topk(k)
    tags = zip(*chain.decode(best.structures.movedim(1, 0)))  # (B, k) lists
    items = zip(tags, best.scores.tolist(), best.exists.sum(1).tolist())
    return [list(zip(ranked, scores))[:count] for ranked, scores, count in items]


def _is_prefix(mask: Tensor, lengths: Tensor) -> bool:
    """Whether every item's mask is on and then off; an item without positions is an error."""
    if bool(mask.all()):
        return True
    rises = (mask[:, 1:] & ~mask[:, :-1]).any() | (~mask[:, 0]).any()
    late, empty = torch.stack([rises, (lengths == 0).any()]).tolist()
    if empty:
        item = int((lengths == 0).nonzero()[0])
        raise ValueError(f"CRF: mask is off at every position of item {item}. Drop the item.")
    return not late
