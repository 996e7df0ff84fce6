"""The contract that every structure keeps.

A structure is a set Z of 0/1 vectors z, given by the scores θ of their parts, together with a
distribution over it. ``Structure`` holds the verbs; a subclass says what its parts are and which
engine answers for it. What can be derived from other answers is written here, once.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, Self

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.distributions.kl import register_kl

from structmax import checks
from structmax.primitive import backend_for
from structmax.smoothing import ALPHAS, TSALLIS, Shannon, Smoothing, from_code
from structmax.tracing import (
    fix_sizes,
    has_values,
    is_recorded,
    is_tracing,
    paused,
    refuse_without_values,
)

if TYPE_CHECKING:
    from structmax.draw.svg import Drawing
    from structmax.sparse.result import SparseMAPResult


_USUAL = Shannon()


class TopK(NamedTuple):
    """The k best structures: z ``(*batch, k, *parts)``, scores and existence ``(*batch, k)``.

    >>> import structmax as sx
    >>> sx.Choice(torch.tensor([0.0, 2.0])).topk(3).exists  # there are only two
    tensor([ True,  True, False])
    """

    structures: Tensor
    scores: Tensor
    exists: Tensor


class Ranked(NamedTuple):
    """One rank of ``ranked_support``: z ``(*batch, *parts)`` and log-probability ``(*batch)``.

    >>> import structmax as sx
    >>> sparse = sx.Choice(torch.tensor([-2.0, 0.0, 0.5]), smoothing=sx.Gini())
    >>> [ranked.structure.tolist() for ranked in sparse.ranked_support()]
    [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    """

    structure: Tensor
    log_prob: Tensor


class class_or_self(classmethod):
    """A method of the class that is given the instance where it is asked of one."""

    def __init__(self, method: Callable[..., Any]) -> None:
        super().__init__(method)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return MethodType(self.__func__, owner if instance is None else instance)


def signature_of(init: Callable[..., None]) -> inspect.Signature:
    """What ``help`` shows of a class with this ``__init__``, though its ``__new__`` chooses a
    subclass: all but ``self`` and what is ours."""
    signature = inspect.signature(init)
    _, *given = signature.parameters.values()
    return signature.replace(parameters=[p for p in given if not p.name.startswith("_")])


class IntractableError(NotImplementedError):
    """A query that has no efficient algorithm; the message names what to use instead.

    >>> import structmax as sx
    >>> sx.Assignment(torch.zeros(20, 20)).marginals()
    Traceback (most recent call last):
    structmax.structures.base.IntractableError: ...
    """


class Structure(Distribution):
    """A distribution over discrete structures.

    ``batch_shape`` is any number of leading dimensions, ``event_shape`` the shape of z, the
    indicator of the primary parts. ``smoothing`` is the regularizer Ω of the dynamic program.

    >>> import structmax as sx
    >>> batch = sx.Choice(torch.zeros(4, 3))  # Choice stands for any structure
    >>> batch.batch_shape, batch.event_shape
    (torch.Size([4]), torch.Size([3]))
    >>> batch[0].entropy()  # log 3
    tensor(1.0986)
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    has_enumerate_support = True
    queries: ClassVar[frozenset[str]] = frozenset(
        [
            "argmax",
            "log_partition",
            "marginals",
            "sample",
            "topk",
            "max_marginals",
            "log_prob",
            "score",
            "entropy",
            "cross_entropy",
            "expected_cost",
            "mbr",
            "condition",
            "ranked_support",
            "enumerate_support",
            "sparsemap",
        ]
    )
    instead: ClassVar[dict[str, str]] = {}
    """What to use in place of each query that is not in ``queries``."""
    approximate: ClassVar[frozenset[str]] = frozenset()
    """Those of ``queries`` whose answers are not exact: a beam search, say."""
    reads_values: ClassVar[frozenset[str]] = frozenset(
        ["ranked_support", "enumerate_support", "sparsemap", "decode"]
    )
    """Methods that read values on the host, so that nothing can record them."""

    def __init__(
        self,
        batch_shape: torch.Size,
        event_shape: Sequence[int],
        smoothing: Smoothing | None,
        validate_args: bool | None,
    ) -> None:
        self.smoothing = _USUAL if smoothing is None else smoothing
        if not isinstance(self.smoothing, Smoothing):
            raise ValueError(
                f"{self._name}: smoothing must be one of sx.Hard, sx.Shannon, sx.Gini, sx.Tsallis, "
                f"got {smoothing!r}."
            )
        if torch.compiler.is_compiling():  # numbers of an Ω from outside may be symbolic
            self.smoothing = from_code([float(number) for number in self.smoothing.code])
        kind, _, alpha = self.smoothing.code
        if kind == TSALLIS and not ALPHAS[0] <= alpha <= ALPHAS[1]:
            raise ValueError(
                f"{self._name}: alpha of Tsallis must be 1, or between {ALPHAS[0]} and "
                f"{ALPHAS[1]}, where probabilities have their digits, got {alpha}. Use sx.Shannon "
                "below and sx.Hard above; sx.entmax and sx.smoothed_max take any alpha."
            )
        event_shape = torch.Size(event_shape)
        if is_tracing():
            with paused():  # sizes as plain numbers
                batch_shape, event_shape = (
                    torch.Size([int(size) for size in shape])
                    for shape in (batch_shape, event_shape)
                )
        super().__init__(batch_shape, event_shape, validate_args=False)
        if is_tracing():
            fix_sizes(self._name, {name: t for name, (t, _) in self._tensors().items()})
        self._check_room(self._event_shape)
        # not torch's default: torch.compile, anywhere in the process, turns that one off
        self._validate_args = validate_args is None or bool(validate_args)
        self._validate_args = self._validate_args and has_values(self._first)
        scores, integers = [], []
        for t, _ in self._tensors().values():
            if t.is_floating_point():
                scores.append(t)
            elif t.dtype != torch.bool:
                integers.append(t)
        self._score_tensors, self._integer_tensors = scores, integers
        self._record = checks.Record()

    def _check_room(self, sizes: Sequence[int]) -> None:
        """There is memory for a chart of these sizes an item: scores, values and gradients."""
        if is_recorded() or not has_values(self._first):  # sizes may be symbols
            return
        count = math.prod(self._batch_shape) * math.prod(sizes)
        if count * 24 > checks.SMALL:
            first, sizes = self._first, tuple(self._batch_shape + self._event_shape)
            size = 3 * count * max(first.dtype.itemsize, 4)
            checks.room(self._name, f"a batch and parts of {sizes}", size, first.device)

    # -- what a subclass says ---------------------------------------------------------------------

    @abstractmethod
    def _tensors(self) -> dict[str, tuple[Tensor, int]]:
        """The constructor's tensor arguments by name, each with its number of event dimensions."""

    @abstractmethod
    def _options(self) -> dict[str, Any]:
        """The constructor's other arguments."""

    def _given_integers(self) -> Mapping[str, checks.Integers]:
        """The integer tensors by the name that errors give them, and what is wrong with them."""
        return {}

    def _given_scores(self) -> Mapping[str, tuple[Tensor, checks.Mask]]:
        """The scores by the name that errors give them, each with a mask of those that count."""
        return {}

    _validates_late = False
    """Whether the scores are left to the first query on a GPU, where validating them takes as long
    as a kernel that reads them, and waits for it."""

    # -- validation -------------------------------------------------------------------------------

    def _validate(self, late: bool = False) -> None:
        """Validates what was not validated yet, or was written into since, if it may be read.

        Whatever reads the tensors of the structure calls this before. With ``late``, the scores are
        left to the caller where the structure validates them late.
        """
        if not self._validate_args or torch.compiler.is_compiling():
            return
        scored = self._record.covers(self._score_tensors)
        valid = self._record.covers(self._integer_tensors)
        if (valid and scored) or not checks.can_look(*self._score_tensors, *self._integer_tensors):
            return
        late = late and self._validates_late and backend_for(self._first) == "gpu"
        integers = {} if valid else self._given_integers()
        checks.values(self._name, {} if scored or late else self._given_scores(), integers)
        self._record.add(self._integer_tensors)
        if not late:
            self._record.add(self._score_tensors)

    def _validate_integers(self) -> bool:
        """``_validate`` without the scores, for those who read integers only; whether these are
        valid. It leaves inference tensors, which would be validated at each reading, to
        ``_validate``."""
        if self._is_valid:
            return True
        if not (self._validate_args and checks.can_look(self._first, *self._integer_tensors)):
            return False
        if any(t.is_inference() for t in self._integer_tensors):
            return False
        checks.values(self._name, {}, self._given_integers())
        self._record.add(self._integer_tensors)
        return True

    @property
    def _is_valid(self) -> bool:
        """Whether the integers were validated; where not, the impossible ones must give NaN."""
        if not self._integer_tensors:
            return True
        return not checks.is_repeated() and self._record.covers(self._integer_tensors)

    def _wrong_items(self) -> Tensor | None:
        """Which items have an impossible integer, ``(*batch)``; None if all were validated."""
        if self._is_valid:
            return None
        wrong = torch.zeros(self.batch_shape, dtype=torch.bool, device=self._first.device)
        for given in self._given_integers().values():
            wrong = wrong | (
                given.wrong.flatten(-given.dims).any(-1) if given.dims else given.wrong
            )
        return wrong

    def _nan_where_wrong(self, scores: Tensor) -> Tensor:
        """Scores ``(*batch, ...)``, NaN for the items that have an impossible integer."""
        wrong = self._wrong_items()
        if wrong is None:
            return scores
        nan = torch.where(wrong, math.nan, 0.0).to(scores.dtype)
        return scores + nan[(..., *[None] * (scores.dim() - wrong.dim()))]

    def __setattr__(self, name: str, value: Any) -> None:
        if "_is_made" in self.__dict__ and name != "__class__":
            raise AttributeError(
                f"{self._name}: {name} cannot be set, since a structure stays as it was made. Make "
                "another one: by the constructor, or by perturb, condition, to, expand or indexing."
            )
        object.__setattr__(self, name, value)

    # -- queries ----------------------------------------------------------------------------------

    @abstractmethod
    def argmax(self) -> Tensor:
        """The best structure, 0/1, ``(*batch, *parts)``. Ties go to any of the best."""

    @abstractmethod
    def log_partition(self) -> Tensor:
        """A(θ), the log of the sum of exp-scores ``(*batch)``; with a smoothing Ω, DP_Ω(θ).

        −inf for an item that allows no structure.
        """

    @abstractmethod
    def marginals(self) -> Tensor:
        """∇A, the expected structure ``(*batch, *parts)``. Differentiable."""

    @abstractmethod
    def sample(
        self, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None
    ) -> Tensor:
        """Exact draws, ``(*sample_shape, *batch, *parts)``. No gradient flows through them."""

    @abstractmethod
    def topk(self, k: int) -> TopK:
        """The k structures of highest score, best first, whatever the smoothing."""

    @abstractmethod
    def max_marginals(self) -> Tensor:
        """The score of the best structure that has each part, ``(*batch, *parts)``.

        −inf where no structure has it. Uses hard max whatever the smoothing. Not differentiable.
        """

    @abstractmethod
    def score(self, z: Tensor) -> Tensor:
        """⟨θ, z⟩ over all parts, additional ones included, ``(*batch)``.

        ``z`` is an indicator (floating point or bool) with any number of leading sample
        dimensions, or the integer form of the structure (see ``encode``).
        """

    @abstractmethod
    def log_prob(self, z: Tensor) -> Tensor:
        """The log-probability of a structure, ``(*batch)``; takes what ``score`` takes.

        Shannon: (score − A)/γ. Otherwise the log-probability of the walk through the probabilistic
        backpointers that derives z; −inf outside the support.
        """

    @abstractmethod
    def cross_entropy(self, q: Structure) -> Tensor:
        """−E_p log q with p this structure, ``(*batch)``; +inf where q forbids what p uses."""

    @abstractmethod
    def mbr(self) -> Tensor:
        """The structure of least expected Hamming cost, ``(*batch, *parts)``."""

    @abstractmethod
    def condition(self, include: Tensor | None = None, exclude: Tensor | None = None) -> Structure:
        """The same structure with some parts forced in and some out.

        Both are boolean masks that broadcast to ``(*batch, *parts)``.
        """

    @abstractmethod
    def ranked_support(self) -> Iterator[Ranked]:
        """Structures with non-zero probability, most likely first, found lazily.

        Yields one rank at a time for the whole batch; an item with no more structures has
        log-probability −inf. Ends when no item has more.
        """

    @abstractmethod
    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Every structure ``(N, *batch, *parts)``, by brute force: for small sizes.

        Items of different lengths have different supports: index one item first.
        """

    @abstractmethod
    def decode(self, z: Tensor) -> Any:
        """The human form of z, as nested lists over the batch."""

    @abstractmethod
    def encode(self, obj: Any) -> Tensor:
        """z of a human or integer form: the inverse of ``decode``."""

    # -- scores of parts --------------------------------------------------------------------------

    @property
    def primary(self) -> Tensor:
        """The scores of the primary parts ``(*batch, *parts)``, at least float32. Differentiable.

        0, without a gradient, where no structure has a part: in the padding, say.

        >>> import structmax as sx
        >>> sx.KSubset(torch.tensor([1.0, 2.0, 9.0]), 1, lengths=torch.tensor(2)).primary
        tensor([1., 2., 0.])
        """
        raise self._without_scores("primary")

    def perturb(self, delta: Tensor) -> Structure:
        """The same structure with ``delta`` added to the primary scores. Differentiable.

        ``delta`` broadcasts to ``(*batch, *parts)``; leading dimensions before those of the batch
        become dimensions of the batch. −inf stays −inf, and additional scores stay as they are.

        >>> import structmax as sx
        >>> sx.Choice(torch.zeros(3)).perturb(torch.eye(3)[:2]).argmax()
        tensor([[1., 0., 0.],
                [0., 1., 0.]])
        """
        raise self._without_scores("perturb")

    def local_softmax(self, temperature: float = 1.0) -> Tensor:
        """The softmax of the primary scores in each local group, ``(*batch, *parts)``.

        Groups are the parts among which every structure has exactly one: the tags of a position,
        the heads of a word. What else makes a structure is ignored. Differentiable.

        >>> import structmax as sx
        >>> sx.DependencyTree(torch.zeros(3, 3)).local_softmax()  # [head, modifier]
        tensor([[0.0000, 0.5000, 0.5000],
                [0.0000, 0.0000, 0.5000],
                [0.0000, 0.5000, 0.0000]])
        """
        raise self._without_scores("local_softmax")

    def _without_scores(self, query: str) -> TypeError:
        return TypeError(
            f"{self._name}.{query}: this structure is not given by the scores of its parts."
        )

    @abstractmethod
    def sparsemap(
        self,
        method: str = "active-set",
        max_iter: int = 1000,
        tol: float | None = None,
        init: SparseMAPResult | None = None,
        penalize: str = "primary",
    ) -> SparseMAPResult:
        """The sparse distribution over structures whose mean μ maximises ⟨θ, μ⟩ − ½‖μ‖².

        θ are the scores of all parts, additional ones included; the smoothing plays no role. Only
        an argmax is needed, so this also works where marginals are intractable. μ is unique, but
        several distributions may have this mean: ``probs`` is one of them. Differentiable, but for
        kinks where the set of active structures changes; the second derivative of μ is zero.
        Of ``torch.func``, ``vmap`` over scores is refused; derivatives of all kinds work.

        Args:
            method: ``"active-set"`` is exact, up to rounding, and ends by itself. ``"away"``,
                ``"pairwise"`` and ``"frank-wolfe"`` are conditional-gradient methods: approximate,
                the last one much slower to converge than the others
            max_iter: how many times the best structure may be asked for at most, but at least two.
                What is found by then is returned; ``gap`` says how good it is
            tol: stop once the duality gap is this small, relative to the number of parts of a
                structure and to the spread of the scores of the active ones. By default 1e-10 for
                the active set and 1e-6 for the others
            init: an earlier result for similar scores, to start from; of items that have other
                lengths, targets or the like by now, nothing is used
            penalize: ``"primary"``: ½‖μ‖² is over the primary parts, those of z; ``"all"``: over
                the additional parts (transitions, …) as well

        >>> import structmax as sx
        >>> result = sx.Choice(torch.tensor([-2.0, 0.0, 0.5])).sparsemap()
        >>> result.marginals  # of a choice: sparsemax
        tensor([0.0000, 0.2500, 0.7500])
        >>> result.probs, result.num_active
        (tensor([0.7500, 0.2500]), tensor(2))
        """

    # -- derived ----------------------------------------------------------------------------------

    def entropy(self) -> Tensor:
        """H(p) = −E log p, ``(*batch)``."""
        return self.cross_entropy(self)

    def _kl(self, q: Structure) -> Tensor:
        return self.cross_entropy(q) - self.entropy()

    def expected_cost(self, part_costs: Tensor) -> Tensor:
        """E ⟨costs, z⟩ for costs that broadcast to ``(*batch, *parts)``, ``(*batch)``.
        Differentiable; further dimensions of the costs come first.

        >>> import structmax as sx
        >>> sx.Choice(torch.tensor([0.0, 1.0, 2.0])).expected_cost(torch.eye(3))  # three costs
        tensor([0.0900, 0.2447, 0.6652])
        """
        mu = self.marginals()
        if not isinstance(part_costs, Tensor):
            raise ValueError(
                f"{self._name}.expected_cost: part_costs must be a tensor, got {part_costs!r}."
            )
        try:
            torch.broadcast_shapes(mu.shape, part_costs.shape)
        except RuntimeError:
            raise ValueError(
                f"{self._name}.expected_cost: part_costs must broadcast to {tuple(mu.shape)}, got "
                f"{tuple(part_costs.shape)}."
            ) from None
        # a part that no structure has costs nothing, even in the padding or at an infinite cost
        costs = torch.where(mu != 0, part_costs, torch.zeros_like(part_costs))
        product = mu * costs
        return product.flatten(product.dim() - len(self.event_shape)).sum(-1)

    @property
    def mode(self) -> Tensor:
        return self.argmax()

    @property
    def mean(self) -> Tensor:
        return self.marginals()

    @property
    def variance(self) -> Tensor:
        """μ(1 − μ): each part is a Bernoulli variable, being used once at most."""
        mu = self.marginals()
        return mu * (1 - mu)

    @property
    def support(self) -> Any:
        return None

    @property
    def temperature(self) -> float:
        """γ of the smoothing."""
        return self.smoothing.gamma

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of z and of the marginals: that of the scores as they were given."""
        return self._first.dtype

    @property
    def _first(self) -> Tensor:
        """The first of ``_tensors``."""
        first, _ = next(iter(self._tensors().values()))
        return first

    def _indicator(self, z: Tensor) -> Tensor:
        """z as an indicator whose batch broadcasts with this one's, checked."""
        if not isinstance(z, Tensor) or not (z.is_floating_point() or z.dtype == torch.bool):
            z = self.encode(z)
        self._validate(late=True)
        event = len(self.event_shape)
        if z.shape[z.dim() - event :] != self.event_shape:
            raise ValueError(
                f"{self._name}: z must be (..., {', '.join(map(str, self.event_shape))}), "
                f"got {tuple(z.shape)}."
            )
        try:
            batch = torch.broadcast_shapes(z.shape[: z.dim() - event], self.batch_shape)
        except RuntimeError:
            raise ValueError(
                f"{self._name}: the batch of z {tuple(z.shape[: z.dim() - event])} does not "
                f"broadcast with {tuple(self.batch_shape)}."
            ) from None
        z = z.expand(*batch, *self.event_shape)
        return (
            z
            if self._validate_args is False or not checks.can_look(self._first)
            else self._checked(z)
        )

    def _checked(self, z: Tensor) -> Tensor:
        """z if it is an indicator of structures; the error names the item otherwise."""
        return z

    # -- pictures ---------------------------------------------------------------------------------

    def draw(
        self,
        tokens: Sequence[Any] | None = None,
        what: str | None = None,
        labels: Sequence[Any] | None = None,
        k: int = 4,
    ) -> Drawing:
        """A picture of one item: SVG, shown by notebooks; ``.save("tree.svg")`` writes a file.

        Args:
            tokens: what to write: the words of a sentence, the names of options or nodes; a pair
                where there are rows and columns. By default numbers
            what: ``"marginals"``, each part as opaque as it is likely; ``"argmax"``, the best
                structure (of a structure built by a policy: the greedy one); ``"sparsemap"``, the
                structures that SparseMAP keeps, with their probabilities; ``"top"``, the k most
                likely ones. By default marginals, or the best structure where those are intractable
            labels: the names of tags, labels or symbols
            k: how many structures at most

        >>> import structmax as sx
        >>> tree = sx.DependencyTree(torch.zeros(3, 3))
        >>> tree.draw(["good", "movie"])
        Drawing(103 × 83 pixels)
        """
        refuse_without_values(f"{self._name}.draw", self._first)
        from structmax.draw.structure import draw

        return draw(self, tokens, what, labels, k)

    # -- shape and place --------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _rebuild(self, **tensors: Tensor | None) -> Self:
        options = {**self._options(), "smoothing": self.smoothing, "validate_args": False}
        return self._vouch_for(type(self)(**{**options, **tensors}))

    def _trusted(self) -> Self:
        """The same structure, as valid as it is now, which is not validated any more."""
        new = copy.copy(self)
        object.__setattr__(new, "_validate_args", False)
        return new

    def _vouch_for(self, new: Any) -> Any:
        """A structure of validated tensors of this one, or of what was computed from them: as valid
        as this one, without being read."""
        self._validate()
        object.__setattr__(new, "_validate_args", self._validate_args)
        if checks.is_repeated():
            return new
        known = len(self._integer_tensors) == len(new._integer_tensors)
        if known and self._record.covers(self._integer_tensors):
            new._record.add(new._integer_tensors)
        if self._record.covers(self._score_tensors):
            new._record.add(new._score_tensors)
        return new

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """The same structure on another device or in another floating dtype (as ``Tensor.to``)."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        return self._rebuild(
            **{
                name: t.to(device, dtype if t.is_floating_point() else None)
                for name, (t, _) in self._tensors().items()
            }
        )

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Self:
        """The same structure with its batch expanded, without copying."""
        batch = torch.Size(batch_shape)
        return self._rebuild(
            **{
                name: t.expand(*batch, *t.shape[t.dim() - d :]) if t.dim() > d or i == 0 else t
                for i, (name, (t, d)) in enumerate(self._tensors().items())
            }
        )

    def __getitem__(self, index: Any) -> Self:
        """Some items of the batch: indexing as for a tensor of shape ``batch_shape``."""
        if not self.batch_shape:
            raise IndexError(f"{self._name}: there is no batch to index (batch_shape is ()).")
        torch.empty(self.batch_shape, device="meta")[index]  # whose error names the batch shape
        where = index if isinstance(index, tuple) else (index,)
        return self._picked(lambda t, d: t[(*where, ..., *[slice(None)] * d)])

    def _items(self, index: Tensor) -> Self:
        """Items by their numbers ``(b)`` in the flattened batch, which are not looked at."""
        last = len(self.batch_shape) - 1
        return self._picked(lambda t, _: t.flatten(0, last).index_select(0, index))

    def _picked(self, pick: Callable[[Tensor, int], Tensor]) -> Self:
        """The structure of what is picked of each tensor ``(*batch, *d dimensions)``."""
        batch = self.batch_shape

        def some(t: Tensor, d: int) -> Tensor:
            return t if t.dim() == d else pick(t.expand(*batch, *t.shape[t.dim() - d :]), d)

        return self._rebuild(**{name: some(t, d) for name, (t, d) in self._tensors().items()})

    def __len__(self) -> int:
        if not self.batch_shape:
            raise TypeError(f"{self._name} with batch_shape () has no length.")
        return self.batch_shape[0]

    def __bool__(self) -> bool:
        return True  # as every distribution, whatever its length

    def __iter__(self) -> Iterator[Self]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return (
            f"{self._name}(batch_shape={tuple(self.batch_shape)}, "
            f"event_shape={tuple(self.event_shape)}, smoothing={self.smoothing})"
        )

    # -- refusals ---------------------------------------------------------------------------------

    @class_or_self
    def supports(self, query: str) -> bool:
        """Whether a query has an efficient algorithm here, exact unless it is in ``approximate``.
        A structure may answer for its size, its class for some.

        >>> import structmax as sx
        >>> sx.Assignment.supports("marginals")
        True
        >>> sx.Assignment(torch.zeros(20, 20)).supports("marginals")
        False
        """
        return query in self.queries

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Queries that are not in ``queries`` raise, whatever the class inherits; those that read
        values raise where there are none to read. After its constructor nothing can be set, and
        values are valid."""
        super().__init_subclass__(**kwargs)
        for method in cls.reads_values & vars(cls).keys():
            setattr(cls, method, _reading_values(vars(cls)[method]))
        for query in Structure.queries - cls.queries:
            setattr(cls, query, _refusal(query))
        if "__init__" in cls.__dict__:
            setattr(cls, "__init__", _finished(cls.__dict__["__init__"]))  # noqa: B010

    def _intractable(self, query: str) -> IntractableError:
        advice = self.instead.get(query, "Use another structure.")
        return IntractableError(f"{self._name}.{query} is intractable. {advice}")

    def _same_kind(self, q: Structure) -> None:
        if not isinstance(q, Structure) or q.event_shape != self.event_shape:
            other = tuple(q.event_shape) if isinstance(q, Structure) else type(q).__name__
            raise ValueError(
                f"{self._name}: both distributions must be over the same parts, got "
                f"{tuple(self.event_shape)} and {other}."
            )
        shapes = self.batch_shape, q.batch_shape
        if any(a != b and 1 not in (a, b) for a, b in zip(*map(reversed, shapes))):
            raise ValueError(
                f"{self._name}: the batches of both distributions must broadcast, got "
                f"{tuple(self.batch_shape)} and {tuple(q.batch_shape)}."
            )


def _reading_values(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def read(self: Structure, *args: Any, **kwargs: Any) -> Any:
        refuse_without_values(f"{self._name}.{method.__name__}", self._first)
        return method(self, *args, **kwargs)

    return read


def _refusal(query: str) -> Callable[..., NoReturn]:
    def refuse(self: Structure, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._intractable(query)

    refuse.__name__, refuse.__doc__ = query, "Intractable here; the error says what to use instead."
    return refuse


def _finished(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor that, of the class of the object, validates and closes what it made."""

    @wraps(init)
    def make(self: Structure, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if type(self).__init__ is make:
            self._validate(late=True)
            object.__setattr__(self, "_is_made", True)

    return make


@register_kl(Structure, Structure)
def _kl(p: Structure, q: Structure) -> Tensor:
    """KL(p ‖ q) = cross-entropy − entropy, ``(*batch)``; +inf where q forbids what p uses."""
    return at_least_zero(p._kl(q))


def at_least_zero(x: Tensor) -> Tensor:
    """An entropy or a divergence without what rounding takes below 0; its gradient stays."""
    return x - x.detach().clamp(max=0)


def uniform(size: Sequence[int], device: torch.device, generator: torch.Generator | None) -> Tensor:
    """Numbers from 0 to before 1, in float64."""
    if generator is None:  # naming none, torch takes no size that torch.compile has made symbolic
        return torch.rand(size, dtype=torch.float64, device=device)
    return torch.rand(size, dtype=torch.float64, device=device, generator=generator)


def dot(scores: Tensor, mu: Tensor, event_dims: int) -> Tensor:
    """⟨θ, μ⟩ over the event; −inf if a forbidden part has mass. Parts without mass do not count,
    whatever their scores: 0·(−inf) = 0, and padding may hold NaN."""
    forbidden = scores == -math.inf
    product = torch.where(forbidden | (mu == 0), 0.0, scores) * mu
    used = torch.where(forbidden & (mu > 0), -math.inf, torch.zeros_like(product))
    return (product + used).flatten(product.dim() - event_dims).sum(-1)
