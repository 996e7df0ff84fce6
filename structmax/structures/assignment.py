"""Matchings of rows and columns."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from structmax import checks
from structmax.forest.topology import Forest, ForestBuilder, bucket, family, name_of
from structmax.oracles import assignment as oracle
from structmax.oracles import birkhoff
from structmax.smoothing import SHANNON, Smoothing
from structmax.structures.base import IntractableError, Structure, class_or_self, dot
from structmax.structures.dynamic import DynamicStructure
from structmax.structures.lengths import TwoSided
from structmax.structures.nesting import nest, unnest
from structmax.tracing import refuse_trace

LARGEST = 12  # of the shorter side, for exact sums: they take 2^LARGEST states
SUMS = {"log_partition", "marginals", "log_prob", "sample", "entropy", "cross_entropy"}
SUMS |= {"expected_cost", "mbr", "ranked_support"}


class Bethe(NamedTuple):
    """Approximate marginals ``(*batch, n, m)`` and log-partition ``(*batch)``.

    >>> import structmax as sx
    >>> sx.Assignment(torch.zeros(2, 2)).bethe().marginals
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    """

    marginals: Tensor
    log_partition: Tensor


def _states(s: int, m: int, slack: int) -> int:
    """How many nodes (t, S) there are: S of s elements, t − slack ≤ |S| ≤ t ≤ m."""
    return sum(math.comb(s, k) for t in range(m + 1) for k in range(max(0, t - slack), t + 1))


def _rounds(query: str, iterations: object) -> int:
    """A number of iterations, of which there is at least one."""
    count = checks.index(f"Assignment.{query}", "iterations", iterations)
    if count < 1:
        raise ValueError(f"Assignment.{query}: iterations must be at least 1, got {count}.")
    return count


@family
def matching(s: int, m: int, slack: int) -> Forest:
    """Node (t, S): the first t of the m elements of the long side are matched with the set S of
    the s of the short side, and at most ``slack`` of them stay unmatched.

    Then a goal (r, c) for each size of items. Parts: t·s + i.
    """
    draw = ForestBuilder()
    every = np.arange(1 << s)
    size = ((every[:, None] >> np.arange(s)) & 1).sum(-1)
    t = np.arange(m + 1)[:, None]
    exists = (size <= t) & (size >= t - slack)
    node = np.where(exists, np.cumsum(exists).reshape(exists.shape) - 1, -1)
    draw.nodes(int(exists.sum()))
    both = exists[1:] & exists[:-1]
    draw.edges(node[1:][both], node[:-1][both])
    for i in range(s):
        having = every[(every >> i) & 1 == 1]
        head, tail = node[1:, having], node[:-1, having ^ (1 << i)]
        part = np.broadcast_to(t[:-1] * s + i, head.shape)
        there = head >= 0
        draw.edges(head[there], tail[there], -1, part[there])
    goal = draw.nodes(s * m).reshape(s, m)
    for r in range(1, s + 1):
        full = node[r:, (1 << r) - 1]
        draw.edges(goal[r - 1, r - 1 :][full >= 0], full[full >= 0])
        # with more elements here than there, all of those are matched, with any of these
        some = every[1 : 1 << r]
        some = some[size[some] < min(r, m + 1)]
        tail = node[size[some], some]
        draw.edges(goal[r - 1, size[some] - 1][tail >= 0], tail[tail >= 0])
    return draw.build(m * s)


class Assignment(TwoSided, DynamicStructure):
    """A matching of n rows with m columns: every row has a column of its own, or every column a row
    of its own in an item with more rows. z marks the pairs.

    ``argmax`` (shortest augmenting paths), ``topk`` (Murty, 1968) and ``max_marginals`` are exact
    and take polynomial time. On a GPU the argmax runs there, up to 1,024 elements on the longer
    side; for the k best a CUDA tensor is copied to the CPU and back.

    Sums over all matchings, and so ``log_partition``, ``marginals``, ``log_prob``, ``entropy`` and
    ``sample``, are #P-hard (Valiant, 1979). They are exact while the shorter side has at most 12
    elements, by a dynamic program over its subsets, and raise :class:`IntractableError` above that.
    A node (t, S) says which elements S of the shorter side the first t elements of the longer side
    are matched with; element t + 1 is matched with i, or with nothing::

        (t, S) ──score of (i, t+1)──► (t+1, S ∪ {i})
        (t, S) ─────────────────────► (t+1, S)

    For any size there are two relaxations: :meth:`sinkhorn` and :meth:`bethe`.

    Human form: the list of pairs (row, column). Integer form: the column of each row as a tensor
    ``(*B, n)``, −1 for a row without one.

    Args:
        scores: ``(*B, n, m)``
        lengths: a pair of ``(*B)``: how many rows and how many columns each item has
        smoothing: ``sx.Shannon(temperature)``, by default ``sx.Shannon(1.0)``; no other

    >>> import structmax as sx
    >>> pairs = sx.Assignment(torch.tensor([[3.0, 2.0, 0.0], [3.0, 0.0, 1.0]]))
    >>> pairs.argmax()
    tensor([[0., 1., 0.],
            [1., 0., 0.]])
    >>> pairs.decode(pairs.argmax())
    [(0, 1), (1, 0)]
    >>> pairs.topk(3).scores
    tensor([5., 4., 3.])
    >>> pairs.marginals().sum(-1)
    tensor([1., 1.])
    >>> round(sx.Assignment(torch.zeros(5, 5)).log_partition().exp().item())  # 5!
    120
    >>> sx.Assignment(torch.zeros(20, 20)).marginals()
    Traceback (most recent call last):
        ...
    structmax.structures.base.IntractableError: Assignment: ... Use sinkhorn(temperature), ...
    """

    def __init__(
        self,
        scores: Tensor,
        lengths: tuple[Tensor, Tensor] | None = None,
        smoothing: Smoothing | None = None,
        validate_args: bool | None = None,
    ) -> None:
        checks.scores("Assignment", "scores", scores, 2, "(..., n, m) with n and m at least 1")
        self.scores = scores
        self.rows: Tensor | None = None
        self.columns: Tensor | None = None
        if lengths is not None:
            self.rows, self.columns = self._pair(lengths)
        checks.same_device("Assignment", **{name: t for name, (t, _) in self._tensors().items()})
        batch = checks.batch_shape("Assignment", **self._tensors())
        super().__init__(batch, scores.shape[-2:], smoothing, validate_args)
        if self.smoothing.code[0] != SHANNON:
            raise ValueError(
                f"Assignment: smoothing must be sx.Shannon(temperature), got {self.smoothing}."
            )

    def _pair(self, lengths: Any) -> list[Tensor]:
        if not isinstance(lengths, tuple | list) or len(lengths) != 2:
            raise ValueError(
                "Assignment: lengths must be a pair, of rows and of columns, got "
                f"{type(lengths).__name__}. Use lengths=(rows, columns)."
            )
        return [checks.lengths("Assignment", given, self.scores.device) for given in lengths]

    def _given_scores(self) -> dict[str, tuple[Tensor, checks.Mask]]:
        return {"scores": (self.scores, None if self.rows is None else self._inside)}

    def _tensors(self) -> dict[str, tuple[Tensor, int]]:
        given = {"scores": (self.scores, 2), "rows": (self.rows, 0), "columns": (self.columns, 0)}
        return {name: (t, d) for name, (t, d) in given.items() if t is not None}

    def _options(self) -> dict[str, Any]:
        return {}

    def _rebuild(self, **tensors: Tensor | None) -> Self:
        pair: Any = tensors.pop("rows", None), tensors.pop("columns", None)
        return super()._rebuild(**tensors, lengths=None if pair[0] is None else pair)

    def _inside(self) -> Tensor:
        """Which cells an item has, ``(*B, n, m)``."""
        row, column = (
            torch.arange(most, device=self.scores.device) < size[..., None]
            for most, size in zip(self.event_shape, self._sizes(), strict=True)
        )
        return row[..., :, None] & column[..., None, :]

    def _unvalidated_parts(self) -> tuple[Tensor, ...]:
        n, m = self.event_shape
        scores = self.scores.float() if self.scores.dtype.itemsize < 4 else self.scores
        return (self._nan_where_wrong(scores.expand(*self.batch_shape, n, m)),)

    # -- exact sums, for small sizes --------------------------------------------------------------

    def _extent(self) -> tuple[int, int]:
        """Rows and columns that are drawn: those of the largest items where that decides."""
        n, m = self.event_shape
        small = min(n, m) <= LARGEST or self.rows is None or not self.batch_shape.numel()
        if small or not checks.can_look(self._first):
            return n, m
        rows, columns = self._sizes()
        return int(rows.amax()), int(columns.amax())

    @class_or_self
    def supports(self, query: str) -> bool:
        large = isinstance(self, Assignment) and query in SUMS and min(self._extent()) > LARGEST
        return query in self.queries and not large

    def _intractable(self, query: str) -> IntractableError:
        return IntractableError(
            "Assignment: log_partition, marginals, log_prob, entropy and samples sum over all "
            f"matchings, which is intractable beyond {LARGEST} elements on the shorter side; here "
            f"are {min(self._extent())}. Use sinkhorn(temperature), bethe(), argmax() or topk(k) "
            "instead."
        )

    def _drawn(self) -> tuple[int, int, int]:
        """The short side, the bucket of the long side, and how many of it may stay unmatched."""
        # index: a size that torch.compile has made symbolic becomes a number again
        n, m = map(operator.index, self._extent())
        s, m = min(n, m), max(n, m)
        if s > LARGEST:
            raise self._intractable("log_partition")
        return s, bucket(m), m - s if self.rows is None else bucket(m)

    def _forest_key(self) -> str:
        return name_of("matching", self._drawn())

    def _goal(self) -> Tensor:
        s, m, slack = self._drawn()
        short, long = self._sizes()
        n, width = self._extent()
        if n > width:
            short, long = long, short
        return (_states(s, m, slack) + (short - 1) * m + long - 1).int()

    def _derivation_size(self) -> int:
        return max(self._extent()) + 2

    def _pack(self, parts: Sequence[Tensor]) -> Tensor:
        _, m, _ = self._drawn()
        n, width = self._extent()
        cells = torch.where(self._inside(), parts[0], 0.0)[..., :n, :width]
        long_first = cells if n > width else cells.mT
        return torch.nn.functional.pad(long_first, (0, 0, 0, m - max(n, width))).flatten(-2)

    def _unpack(self, flat: Tensor) -> tuple[Tensor, ...]:
        return (self._to_event(flat),)

    def _width(self) -> int:
        s, m, _ = self._drawn()
        return s * m

    def _to_event(self, flat: Tensor, fill: float = 0.0) -> Tensor:
        s, m, _ = self._drawn()
        n, width = self._extent()
        cells = flat.unflatten(-1, (m, s))[..., : max(n, width), :]
        cells = cells if n > width else cells.mT
        grow = (0, self.event_shape[1] - width, 0, self.event_shape[0] - n)
        return torch.nn.functional.pad(cells, grow, value=fill)

    def _usable_parts(self) -> Tensor:
        return self._inside()

    def _replace_primary(self, scores: Tensor, **others: Tensor) -> Assignment:
        tensors = {name: t for name, (t, _) in self._tensors().items()}
        return self._rebuild(**{**tensors, "scores": scores})

    def _aligned(self, q: Structure) -> tuple[Assignment, Assignment]:
        self._same_kind(q)
        if not isinstance(q, Assignment):
            raise ValueError(f"Assignment: cannot compare with {type(q).__name__}.")
        sizes = zip(self._sizes(), q._sizes(), strict=True)
        if checks.can_look(self._first) and any(bool((a != b).any()) for a, b in sizes):
            raise ValueError("Assignment: both distributions must have the same lengths.")
        return self, q

    def _incompatible(self, include: Tensor) -> Tensor:
        count = include.long()
        others = count.sum(-1, keepdim=True) + count.sum(-2, keepdim=True) - 2 * count
        missing = include & ~self._inside()  # what an item does not have cannot be included
        return (others > 0) | missing.flatten(-2).any(-1)[..., None, None]

    # -- the best ---------------------------------------------------------------------------------

    def _z_of(self, columns: Tensor) -> Tensor:
        """The indicator of the columns of rows."""
        at = torch.arange(self.event_shape[1], device=columns.device)
        return (columns[..., None] == at).to(self.dtype)

    def argmax(self) -> Tensor:
        best, columns = oracle.argmax(self._parts()[0].detach(), *self._sizes())
        return self._refuse_infeasible("argmax", best, self._z_of(columns))

    def _argmax_parts(self, parts: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        best, columns = oracle.argmax(parts[0], *self._sizes())
        return best, (self._z_of(columns).to(parts[0].dtype),)

    def _kbest(self, k: int) -> tuple[Tensor, Tensor]:
        best, columns = oracle.kbest(self._parts()[0].detach(), *self._sizes(), k)
        return best, self._z_of(columns)

    def max_marginals(self) -> Tensor:
        scores = torch.where(self._inside(), self._parts()[0].detach(), 0.0)
        best = oracle.max_marginals(scores, *self._sizes())[0]
        bad = scores.isnan().flatten(-2).any(-1)  # of values that were not validated
        return torch.where(bad[..., None, None], math.nan, best)

    # -- relaxations ------------------------------------------------------------------------------

    def _relaxed(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Scores, what lies on some matching and what may stay unmatched, and the sizes, with one
        batch dimension. Without the former, iterations would converge very slowly."""
        (scores,) = self._parts()
        inside, sizes = self._inside(), self._sizes()
        safe = torch.where(inside, scores, 0.0)
        with torch.no_grad():
            if checks.can_look(self._first) and bool((safe > -math.inf).all()):
                cells, longer = inside, torch.maximum(*sizes)[..., None]
                spare = torch.arange(max(self.event_shape), device=longer.device) < longer
            else:
                best, without = oracle.max_marginals(scores.detach(), *sizes)
                cells, spare = best > -math.inf, without > -math.inf
        items = self.batch_shape.numel()
        flat = [t.reshape(items, *t.shape[len(self.batch_shape) :]) for t in (safe, cells, spare)]
        theta = torch.where(flat[1], flat[0].double(), 0.0)
        return theta, flat[1], [flat[2], *(size.reshape(items) for size in sizes)]

    def _relaxation(self, query: str, answer: Tensor, cells: Tensor) -> Tensor:
        """In the shape and dtype of z; an item without a matching is an error."""
        possible = cells.flatten(1).any(-1).reshape(self.batch_shape)
        value = torch.where(possible, 0.0, -math.inf)
        answer = answer.reshape(*self.batch_shape, *self.event_shape)
        return self._refuse_infeasible(query, value, answer).to(self.dtype)

    def sinkhorn(
        self, temperature: float = 1.0, iterations: int = 200, tol: float = 1e-9
    ) -> Tensor:
        """A relaxation, not the marginals: the P that maximises ⟨θ, P⟩ + γ·H(P), ``(*B, n, m)``.

        P is over the matrices whose rows and columns sum to one, or to at most one on the longer
        side; H(P) = −Σ P log P, where what stays unmatched counts as a row (or column) more. At
        γ = 0 the maximum is that of ``argmax`` (Birkhoff, 1946), towards which P tends. Found by
        normalising rows and columns in turn (Sinkhorn & Knopp, 1967; Cuturi, 2013), in log domain,
        and by Newton steps at falling temperatures, until no sum is off by more than ``tol``, or
        ``iterations`` times. Differentiable twice by the implicit function theorem, and so only as
        exact as the iteration has converged. Time O(m³) an iteration.

        Args:
            temperature: γ, whatever the ``smoothing``
            iterations: the most of them
            tol: how far the sums may be off

        >>> import structmax as sx
        >>> pairs = sx.Assignment(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        >>> pairs.sinkhorn(), pairs.sinkhorn(0.1)
        (tensor([[0.7311, 0.2689],
                [0.2689, 0.7311]]), tensor([[9.9995e-01, 4.5398e-05],
                [4.5398e-05, 9.9995e-01]]))
        """
        temperature = checks.number("Assignment.sinkhorn", "temperature", temperature)
        if not 0 < temperature < math.inf:
            raise ValueError(
                f"Assignment.sinkhorn: temperature must be a positive number, got {temperature}. "
                "At temperature 0 use argmax()."
            )
        iterations = _rounds("sinkhorn", iterations)
        tol = checks.number("Assignment.sinkhorn", "tol", tol)
        refuse_trace("Assignment.sinkhorn")  # whose number of steps depends on the scores
        theta, cells, (spare, rows, columns) = self._relaxed()
        sizes = rows, columns
        p = birkhoff.sinkhorn(theta, cells, spare, *sizes, temperature, iterations, tol)
        return self._relaxation("sinkhorn", p, cells)

    def bethe(self, iterations: int = 50) -> Bethe:
        """An approximation of ``marginals`` and ``log_partition``, by belief propagation.

        The log-partition is that of Bethe's free energy, for square items and non-negative weights
        a lower bound of the exact one (Vontobel, 2013; Gurvits, 2011), once the messages have
        converged. The marginals tend to be too sure. Gradients are those of the iterations. Time
        O(nm) an iteration.

        >>> import structmax as sx
        >>> pairs = sx.Assignment(torch.zeros(3, 3))
        >>> pairs.bethe().log_partition.exp(), pairs.log_partition().exp()
        (tensor(2.3704), tensor(6.))
        """
        gamma, iterations = self.smoothing.gamma, _rounds("bethe", iterations)
        theta, cells, (_, rows, columns) = self._relaxed()
        belief, value = birkhoff.bethe(theta / gamma, cells, rows, columns, iterations)
        belief = self._relaxation("bethe", belief, cells)
        return Bethe(belief, (gamma * value).reshape(self.batch_shape).to(self._parts()[0]))

    # -- pairs ------------------------------------------------------------------------------------

    def _score(self, z: Tensor) -> Tensor:
        (scores,) = self._parts()
        return dot(scores, torch.where(self._inside(), z, 0).to(scores.dtype), 2)

    def _checked(self, z: Tensor) -> Tensor:
        cells = torch.where(self._inside(), z, 0)
        wrong = ((cells != 0) & (cells != 1)).flatten(-2).any(-1)
        wrong = wrong | (cells.sum(-1) > 1).any(-1) | (cells.sum(-2) > 1).any(-1)
        count = torch.minimum(*self._sizes())
        wrong = wrong | (cells.sum((-2, -1)) != count)
        if bool(wrong.any()):
            item = tuple(wrong.nonzero()[0].tolist())
            raise ValueError(
                f"Assignment: z{list(item)} must mark {int(count.expand(wrong.shape)[item])} "
                f"cells, no two of them in a row or column; got {self.decode(cells[item])}."
            )
        return z

    def enumerate_support(self, expand: bool = True) -> Tensor:
        shapes = torch.stack(self._sizes(), -1).reshape(-1, 2).unique(dim=0).tolist()
        if len(shapes) > 1:
            raise ValueError(
                "Assignment.enumerate_support: items of different lengths have different supports. "
                "Index one item: structure[i].enumerate_support()."
            )
        n, m = shapes[0] if shapes else self.event_shape
        if math.perm(max(n, m), min(n, m)) > 1_000_000:
            raise ValueError(f"Assignment.enumerate_support: {n} × {m} cells are too many.")
        columns = torch.tensor(oracle.matchings(n, m), device=self.scores.device)
        more = self.event_shape[0] - n
        every = self._z_of(torch.nn.functional.pad(columns, (0, more), value=-1))
        every = every.reshape(-1, *[1] * len(self.batch_shape), *self.event_shape)
        return every.expand(-1, *self.batch_shape, -1, -1) if expand else every

    def decode(self, z: Tensor) -> Any:
        """The pairs (row, column), in order of the rows, as lists nested as the batch of z."""
        batch = z.shape[:-2]
        items: list[list[tuple[int, int]]] = [[] for _ in range(batch.numel())]
        for item, i, j in z.reshape(batch.numel(), *z.shape[-2:]).nonzero().tolist():
            items[item].append((i, j))
        return nest(items, batch)

    def encode(self, obj: Any) -> Tensor:
        """z of pairs, nested lists as ``decode`` gives, or of a tensor ``(*B, n)`` of columns."""
        n, m = self.event_shape
        if isinstance(obj, Tensor):
            wrong = (obj < -1) | (obj >= m)
            if (
                obj.dim() < 1
                or obj.shape[-1] != n
                or (checks.can_look(self._first) and bool(wrong.any()))
            ):
                raise ValueError(
                    f"Assignment: columns must be (..., {n}), each below {m} or -1 for none, got "
                    f"{tuple(obj.shape)}: {obj.tolist()}."
                )
            return self._z_of(obj)
        items, batch = unnest("Assignment", obj, 2, len(self.batch_shape))
        z = torch.zeros(len(items), n, m, dtype=self.dtype, device="cpu")
        for marks, pairs in zip(z, items, strict=True):
            for pair in pairs:
                if len(pair) != 2 or not (0 <= pair[0] < n and 0 <= pair[1] < m):
                    raise ValueError(
                        f"Assignment: a pair (row, column) must be below ({n}, {m}), got "
                        f"{tuple(pair)}."
                    )
                marks[tuple(pair)] = 1
        return z.reshape(*batch, n, m).to(self.scores.device)
