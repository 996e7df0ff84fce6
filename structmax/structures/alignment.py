"""Alignments of two sequences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from structmax import checks, magnitude
from structmax.forest.grid import ops as dense
from structmax.forest.topology import Forest, ForestBuilder, bucket, family, name_of
from structmax.primitive import backend_for
from structmax.smoothing import Hard, Smoothing
from structmax.structures.base import Structure
from structmax.structures.dynamic import DynamicStructure
from structmax.structures.lengths import TwoSided
from structmax.structures.nesting import nest, unnest

STEPS = ((1, 1), (1, 0), (0, 1))  # the moves ↘, ↓, → as rows and columns gone
Gap = float | Tensor


@family
def dtw(n: int, m: int, moves: int) -> Forest:
    """A node for each cell, entered by ↘, ↓ and →. Parts: cells; then, if asked, cell·3 + move."""
    draw = ForestBuilder()
    cell = np.arange(n * m).reshape(n, m)
    draw.nodes(n * m, cell.ravel())
    for k, (down, right) in enumerate(STEPS):
        head, tail = cell[down:, right:], cell[: n - down, : m - right]
        draw.edges(head, tail, -1, n * m + 3 * head + k if moves else -1)
    return draw.build(n * m * (4 if moves else 1))


@family
def edit(n: int, m: int) -> Forest:
    """Two nodes for i rows and j columns consumed: 2p and 2p + 1 with p = i(m + 1) + j.

    The first is reached by a match or a deletion, the second from the first or by an insertion: so
    between two matches the deletions come first. Parts: cells, n deletions, m insertions.
    """
    draw = ForestBuilder()
    kept = 2 * np.arange((n + 1) * (m + 1)).reshape(n + 1, m + 1)
    done, cell = kept + 1, np.arange(n * m).reshape(n, m)
    draw.nodes(2 * kept.size)
    draw.edges(kept[1:, 1:], done[:-1, :-1], -1, cell)
    draw.edges(kept[1:, 0], kept[:-1, 0], -1, n * m + np.arange(n))
    draw.edges(kept[2:, 1:], kept[1:-1, 1:], -1, n * m + np.arange(1, n)[:, None])
    draw.edges(done[:, 0], kept[:, 0])
    draw.edges(done[1:, 1:], kept[1:, 1:])  # nothing but insertions leads to j > 0 columns, 0 rows
    draw.edges(done[:, 1:], done[:, :-1], -1, n * m + n + np.arange(m))
    return draw.build(n * m + n + m)


@family
def monotone(n: int, m: int) -> Forest:
    """Node (i, j): rows up to i are aligned, to columns up to j. Parts: cells."""
    draw = ForestBuilder()
    cell = np.arange(n * m).reshape(n, m)
    draw.nodes(n * m)
    draw.edges(cell[0], -1, -1, cell[0])
    draw.edges(cell[1:], cell[:-1], -1, cell[1:])
    draw.edges(cell[:, 1:], cell[:, :-1])
    return draw.build(n * m)


class Alignment(TwoSided, DynamicStructure):
    """An alignment of n rows with m columns, drawn into the cells of a grid. z marks cells.

    ``kind="dtw"``: the cells of a path from the first corner to the last by the moves ↘, ↓ and →
    (dynamic time warping; Sakoe & Chiba, 1978). The graph has a node for each cell, reached from
    up to three others; each move may have a score of its own::

        (0,0) ──► (0,1) ──► (0,2)
          │   ╲     │   ╲     │
          ▼     ▼   ▼     ▼   ▼
        (1,0) ──► (1,1) ──► (1,2)

    ``kind="edit"``: matched pairs, increasing in both row and column; every other row is deleted
    and every other column inserted, at the score of a gap (Needleman & Wunsch, 1970). For i rows
    and j columns consumed there are two nodes, ``kept`` (i, j) after a match or a deletion and
    ``done`` (i, j) after any number of insertions, so that one alignment is one derivation::

        done(i−1,j−1) ──match──► kept(i,j) ──────► done(i,j)
           kept(i−1,j) ──delete──►              ◄──insert── done(i,j−1)

    ``kind="monotone"``: every row in one column, and columns never go back; columns may be skipped
    or shared. Node (i, j) stands for rows up to i in columns up to j, so that there are two edges
    for each cell: row i takes column j, from (i−1, j); or nothing does, from (i, j−1).

    Human form: the list of pairs (row, column) that z marks.

    Args:
        scores: ``(*B, n, m)``, of the cells
        lengths: a pair of ``(*B)``: how many rows and how many columns each item has
        kind: ``"dtw"``, ``"edit"`` or ``"monotone"``
        moves: ``(*B, n, m, 3)``, scores of entering a cell by ↘, ↓, → in this order (dtw)
        gap: the score of a row or a column without a match (edit): a number, or a pair of numbers
            or tensors ``(*B, n)`` for deleting each row, ``(*B, m)`` for inserting each column
        band: forbids cells further than so many steps from the straight line between the corners,
            counted along the shorter side: |i(m−1) − j(n−1)| ≤ band·(max(n, m) − 1) with n and m
            of the item; |i − j| ≤ band if they are equal (Sakoe & Chiba)
        smoothing: Ω, by default ``sx.Shannon(1.0)``

    >>> import structmax as sx
    >>> alignment = sx.Alignment(-torch.tensor([[0.0, 1.0, 4.0], [4.0, 1.0, 0.0]]))
    >>> alignment.argmax()
    tensor([[1., 1., 0.],
            [0., 0., 1.]])
    >>> alignment.decode(alignment.argmax())
    [(0, 0), (0, 1), (1, 2)]
    >>> sx.Alignment(torch.zeros(3, 3)).log_partition().exp().round()  # there are 13 paths
    tensor(13.)

    The longest common subsequence of "abc" and "cab":

    >>> same = torch.tensor([[x == y for y in "cab"] for x in "abc"])
    >>> common = sx.Alignment(torch.where(same, 1.0, -torch.inf), kind="edit", gap=0.0)
    >>> common.decode(common.argmax())
    [(0, 1), (1, 2)]

    Each row in one column:

    >>> sx.Alignment(torch.zeros(2, 3), kind="monotone").marginals()
    tensor([[0.5000, 0.3333, 0.1667],
            [0.1667, 0.3333, 0.5000]])
    """

    def __init__(
        self,
        scores: Tensor,
        lengths: tuple[Tensor, Tensor] | None = None,
        kind: str = "dtw",
        moves: Tensor | None = None,
        gap: Gap | tuple[Gap, Gap] | None = None,
        band: int | None = None,
        smoothing: Smoothing | None = None,
        validate_args: bool | None = None,
    ) -> None:
        checks.scores("Alignment", "scores", scores, 2, "(..., n, m) with n and m at least 1")
        if kind not in ("dtw", "edit", "monotone"):
            raise ValueError(f'Alignment: kind must be "dtw", "edit" or "monotone", got {kind!r}.')
        n, m = scores.shape[-2:]
        self.scores, self.kind, self.moves = scores, kind, moves
        self.rows: Tensor | None = None
        self.columns: Tensor | None = None
        if lengths is not None:
            self.rows, self.columns = self._pair(lengths)
        self.deletion, self.insertion = self._gaps(gap)
        self._set_band(band)
        if moves is not None:
            checks.scores("Alignment", "moves", moves, 3, f"(..., {n}, {m}, 3)")
            if kind != "dtw" or moves.shape[-3:] != (n, m, 3):
                raise ValueError(
                    f'Alignment: moves must be (..., {n}, {m}, 3) and belong to kind="dtw", got '
                    f"{tuple(moves.shape)} with kind={kind!r}."
                )
        checks.same_device("Alignment", **{name: t for name, (t, _) in self._tensors().items()})
        batch = checks.batch_shape("Alignment", **self._tensors())
        super().__init__(batch, (n, m), smoothing, validate_args)

    def _pair(self, lengths: Any) -> list[Tensor]:
        if not isinstance(lengths, tuple | list) or len(lengths) != 2:
            raise ValueError(
                "Alignment: lengths must be a pair, of rows and of columns, got "
                f"{type(lengths).__name__}. Use lengths=(rows, columns)."
            )
        return [checks.lengths("Alignment", given, self.scores.device) for given in lengths]

    def _gaps(self, gap: Any) -> list[Tensor | None]:
        """Scores of deletions ``(*B, n or 1)`` and of insertions ``(*B, m or 1)``."""
        if self.kind != "edit":
            if gap is not None:
                raise ValueError(f'Alignment: gap belongs to kind="edit", got kind={self.kind!r}.')
            return [None, None]
        pair = gap if isinstance(gap, tuple | list) else (gap, gap)
        if len(pair) != 2:
            raise ValueError(
                f"Alignment: gap must be a number or a pair (deletion, insertion), got {len(pair)}."
            )
        out: list[Tensor | None] = []
        for given, size in zip(pair, self.scores.shape[-2:], strict=True):
            given = 0.0 if given is None else given
            score = given if isinstance(given, Tensor) else self.scores.new_tensor(given)
            score = score.reshape(1) if score.dim() == 0 else score
            checks.scores("Alignment", "gap", score, 1, f"a number or (..., {size})")
            if score.shape[-1] not in (1, size):
                raise ValueError(
                    f"Alignment: gap must be a number or a pair of numbers or tensors (..., n), "
                    f"(..., m), here (..., {size}), got {tuple(score.shape)}."
                )
            out.append(score)
        return out

    def _set_band(self, band: int | None) -> None:
        if band is not None and (isinstance(band, bool) or not isinstance(band, int) or band < 0):
            raise ValueError(f"Alignment: band must be an integer of at least 0, got {band!r}.")
        self.band = band

    def _given_scores(self) -> dict[str, tuple[Tensor, checks.Mask]]:
        given: dict[str, tuple[Tensor, checks.Mask]]
        given = {"scores": (self.scores, self._usable_parts)}
        if self.moves is not None:
            given["moves"] = (self.moves, self._passable)
        if self.deletion is not None and self.insertion is not None:
            given["gap of rows"] = (self.deletion, lambda: self._inside()[0])
            given["gap of columns"] = (self.insertion, lambda: self._inside()[1])
        return given

    def _tensors(self) -> dict[str, tuple[Tensor, int]]:
        dims = {"scores": 2, "moves": 3, "deletion": 1, "insertion": 1, "rows": 0, "columns": 0}
        given = {name: (getattr(self, name), d) for name, d in dims.items()}
        return {name: (t, d) for name, (t, d) in given.items() if t is not None}

    def _options(self) -> dict[str, Any]:
        return {"kind": self.kind, "band": self.band}

    def _rebuild(self, **tensors: Tensor | None) -> Self:
        pairs: dict[str, Any] = {}
        for name, sides in (("lengths", ("rows", "columns")), ("gap", ("deletion", "insertion"))):
            pair = [tensors.pop(side, None) for side in sides]
            pairs[name] = None if pair[0] is None else tuple(pair)
        return super()._rebuild(**tensors, **pairs)

    def _with(self, **changed: Tensor) -> Self:
        """The same structure with some tensors replaced."""
        return self._rebuild(**{name: t for name, (t, _) in self._tensors().items()} | changed)

    # -- scores -----------------------------------------------------------------------------------

    def _inside(self) -> list[Tensor]:
        """Which rows ``(*B, n)`` and which columns ``(*B, m)`` an item has."""
        return [
            torch.arange(most, device=self.scores.device) < size[..., None]
            for most, size in zip(self.event_shape, self._sizes(), strict=True)
        ]

    def _allowed(self) -> Tensor | None:
        """Which cells an item has and may use, ``(*B, n, m)``; None if all."""
        if self.rows is None and self.band is None:
            return None
        n, m = self.event_shape
        rows, columns = self._sizes()
        return dense.in_band(n, m, rows, columns, self.band)

    def _passable(self) -> Tensor:
        """Which moves join two such cells, ``(*B, n, m, 3)`` or ``(n, m, 3)``."""
        n, m = self.event_shape
        allowed = self._allowed()
        if allowed is None:
            allowed = torch.ones(n, m, dtype=torch.bool, device=self.scores.device)
        pad = torch.nn.functional.pad
        return torch.stack(
            [allowed & pad(allowed, (right, -right, down, -down)) for down, right in STEPS], -1
        )

    def _unvalidated_parts(self) -> tuple[Tensor, ...]:
        given = {name: t for name, (t, _) in self._tensors().items() if t.is_floating_point()}
        dtype = torch.float32
        for t in given.values():
            dtype = torch.promote_types(dtype, t.dtype)
        n, m = self.event_shape
        events = {"scores": (n, m), "moves": (n, m, 3), "deletion": (n,), "insertion": (m,)}
        parts = [t.to(dtype).expand(*self.batch_shape, *events[name]) for name, t in given.items()]
        parts[0] = self._nan_where_wrong(parts[0])
        return tuple(parts)

    def _allowed_parts(self) -> tuple[Tensor, ...]:
        if self.band is None:
            return self._parts()
        cells, *others = self._parts()
        return torch.where(self._usable_parts(), cells, -math.inf), *others

    def _pack(self, parts: Sequence[Tensor]) -> Tensor:
        cells, *others = parts
        grow = [bucket(size) - size for size in self.event_shape]
        pad, batch = torch.nn.functional.pad, len(self.batch_shape)
        allowed = self._allowed()
        if allowed is not None:
            cells = torch.where(allowed, cells, -math.inf)
        flat = [pad(cells, (0, grow[1], 0, grow[0])).flatten(batch)]
        if self.kind == "dtw" and others:
            moves = torch.where(self._passable(), others[0], 0.0)
            flat.append(pad(moves, (0, 0, 0, grow[1], 0, grow[0])).flatten(batch))
        elif self.kind == "edit":
            for gap, inside, more in zip(others, self._inside(), grow, strict=True):
                flat.append(pad(torch.where(inside, gap, 0.0), (0, more)))
        return torch.cat(flat, -1)

    def _unpack(self, flat: Tensor) -> tuple[Tensor, ...]:
        n, m = self.event_shape
        N, M = bucket(n), bucket(m)
        cells = self._to_event(flat[..., : N * M])
        if self.kind == "edit":
            deletion, insertion = flat[..., N * M :].split([N, M], -1)
            return cells, deletion[..., :n], insertion[..., :m]
        if self.moves is None:
            return (cells,)
        return cells, flat[..., N * M :].unflatten(-1, (N, M, 3))[..., :n, :m, :]

    def _width(self) -> int:
        return bucket(self.event_shape[0]) * bucket(self.event_shape[1])

    def _to_event(self, flat: Tensor, fill: float = 0.0) -> Tensor:
        n, m = self.event_shape
        return flat.unflatten(-1, (bucket(n), bucket(m)))[..., :n, :m]

    def _forest_key(self) -> str:
        sizes = [bucket(size) for size in self.event_shape]
        with_moves = [int(self.moves is not None)] if self.kind == "dtw" else []
        return name_of(self.kind, sizes + with_moves)

    def _goal(self) -> Tensor:
        M = bucket(self.event_shape[1])
        row, column = self._sizes()
        if self.kind == "edit":
            return (2 * (row * (M + 1) + column) + 1).int()
        return ((row - 1) * M + column - 1).int()

    def _derivation_size(self) -> int:
        return 2 * sum(self.event_shape) + 2 if self.kind == "edit" else sum(self.event_shape) - 1

    def _usable_parts(self) -> Tensor:
        allowed = self._allowed()
        if allowed is None:
            return torch.ones((), dtype=torch.bool, device=self.scores.device)
        return allowed

    def _replace_primary(self, scores: Tensor, **others: Tensor) -> Alignment:
        return self._with(**{**others, "scores": scores})

    _additional = ("moves", "deletion", "insertion")

    # -- dense kernels ----------------------------------------------------------------------------

    @property
    def _is_grid(self) -> bool:
        return self.kind == "dtw" and self.moves is None

    @property
    def _is_dense(self) -> bool:
        return self._is_grid and dense.knows(self.smoothing.code)

    def argmax(self) -> Tensor:
        scores = self._parts()[0].detach()
        if not self._is_grid or backend_for(scores) == "naive":
            return super().argmax()
        args = self._sizes(), dense.key_of(self.band), Hard().code
        value, z = dense.grid.value_and_gradient([scores], *args)
        return self._refuse_infeasible("argmax", value, z).to(self.dtype)

    def _peaks(self) -> Tensor:
        """The largest score of each row ``(*B, n, 1)``, 0 where it has none or lies near 0. In kind
        monotone every structure has one cell of each row: without them, sums stay small. A row is
        left as it is where another score would lose digits beside its peak, as beside a force."""
        cells, allowed = self._parts()[0].detach(), self._allowed()
        if allowed is not None:
            cells = torch.where(allowed, cells, -math.inf)
        peaks = cells.amax(-1, keepdim=True)
        size = peaks.abs()
        peaks = torch.where((size > 32) & (size < math.inf), peaks, 0.0)
        few = 4 * torch.finfo(cells.dtype).eps
        kept = torch.isclose((cells - peaks) + peaks, cells, rtol=few, atol=1e-8, equal_nan=True)
        return torch.where(kept.all(-1, keepdim=True), peaks, 0.0)

    def _theta(self) -> Tensor:
        if self.kind != "monotone":
            return super()._theta()
        return self._pack((self._parts()[0] - self._peaks(),))

    def _restored(self, value: Tensor) -> Tensor:
        if self.kind != "monotone":
            return value
        scale = 2.0**32  # sums of so many numbers stay finite
        last = torch.finfo(value.dtype).max * (1 - 2.0**-50)
        total = value.double() / scale + (self._peaks().double() / scale).sum((-2, -1))
        return (magnitude.clamped(total, last / scale) * scale).to(value.dtype)

    def _value(self) -> Tensor:
        if not self._is_dense:
            return super()._value()
        args = self._sizes(), dense.key_of(self.band), self.smoothing.code
        return dense.grid.value(self._parts(), *args)

    def _value_and_gradient(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        if not self._is_dense:
            return super()._value_and_gradient()
        args = self._sizes(), dense.key_of(self.band), self.smoothing.code
        value, *mu = dense.grid.value_and_gradient(self._parts(), *args)
        return value, tuple(mu)

    def _why_none(self, item: tuple[int, ...]) -> str:
        n, m = (int(size[item]) for size in self._sizes())
        if self.band != 0 or self.kind == "edit":  # which leave a path
            return ""
        if self.kind == "dtw":
            shut = n != m and n > 1 and m > 1
        else:
            shut = (m - 1) % max(n - 1, 1) != 0
        if not shut:
            return ""
        return (
            f"band=0 leaves no path through its {n} x {m} cells. Use a band of at least 1, or drop "
            "the item."
        )

    # -- moves ------------------------------------------------------------------------------------

    def _with_moves(self) -> Alignment:
        """The same alignment with a score for every move."""
        if self.moves is not None:
            return self
        return self._with(moves=self.scores.new_zeros(*self.event_shape, 3))

    def edge_marginals(self) -> Tensor:
        """The probability of entering each cell by ↘, ↓, →, ``(*B, n, m, 3)``. Differentiable."""
        if self.kind != "dtw":
            raise ValueError(
                f'Alignment.edge_marginals: moves belong to kind="dtw". With kind={self.kind!r} '
                "everything follows from marginals(): row i has no match with probability "
                "1 - marginals().sum(-1)[..., i]."
            )
        value, mu = self._with_moves()._value_and_gradient()
        return self._refuse_infeasible("edge_marginals", value, mu[1]).to(self.dtype)

    def _aligned(self, q: Structure) -> tuple[DynamicStructure, DynamicStructure]:
        self._same_kind(q)
        if not isinstance(q, Alignment) or q.kind != self.kind:
            other = f"one of kind {q.kind!r}" if isinstance(q, Alignment) else type(q).__name__
            raise ValueError(f"Alignment: cannot compare kind {self.kind!r} with {other}.")
        sizes = zip(self._sizes(), q._sizes(), strict=True)
        if checks.can_look(self._first) and any(bool((a != b).any()) for a, b in sizes):
            raise ValueError("Alignment: both distributions must have the same lengths.")
        if (self.moves is None) == (q.moves is None):
            return self, q
        return self._with_moves(), q._with_moves()

    # -- conditions -------------------------------------------------------------------------------

    def condition(self, include: Tensor | None = None, exclude: Tensor | None = None) -> Alignment:
        """The same alignment with some cells forced in and some out.

        A path that must meet a cell may not jump over it: two diagonal moves are forbidden as
        well. A pair that must be matched is neither deleted nor inserted.
        """
        new = super().condition(include, exclude)
        assert isinstance(new, Alignment)
        if include is None or self.kind == "monotone":
            return new
        include = include.expand(*self.batch_shape, *self.event_shape)
        if self.kind == "edit":
            one, other = new._parts()[1:]
            allowed = self._allowed()
            lost = False if allowed is None else (include & ~allowed).any(-1).any(-1, keepdim=True)
            return new._with(
                deletion=torch.where(include.any(-1) | lost, -math.inf, one),
                insertion=torch.where(include.any(-2), -math.inf, other),
            )
        pad = torch.nn.functional.pad
        jumped = pad(include, (1, -1)) | pad(include, (0, 0, 1, -1))  # entered by ↘
        jumped = torch.stack([jumped, *[torch.zeros_like(jumped)] * 2], -1)
        return new._with(moves=torch.where(jumped, -math.inf, new._with_moves()._parts()[1]))

    def _incompatible(self, include: Tensor) -> Tensor:
        count = include.long()
        below = count.flip(-2).cumsum(-2).flip(-2) - count
        above = count.cumsum(-2) - count
        crossing = below.cumsum(-1) - below + above.flip(-1).cumsum(-1).flip(-1) - above
        if self.kind != "dtw":
            crossing = crossing + count.sum(-1, keepdim=True) - count
        if self.kind == "edit":
            crossing = crossing + count.sum(-2, keepdim=True) - count
        allowed = self._allowed()
        if allowed is not None:  # what an item does not have cannot be included
            crossing = crossing + (include & ~allowed).sum((-2, -1), keepdim=True)
        return crossing > 0

    # -- pairs ------------------------------------------------------------------------------------

    def enumerate_support(self, expand: bool = True) -> Tensor:
        shapes = torch.stack(self._sizes(), -1).reshape(-1, 2).unique(dim=0).tolist()
        if len(shapes) > 1:
            raise ValueError(
                "Alignment.enumerate_support: items of different lengths have different supports. "
                "Index one item: structure[i].enumerate_support()."
            )
        n, m = shapes[0] if shapes else self.event_shape
        if math.comb(n + m, n) > 50_000:
            raise ValueError(f"Alignment.enumerate_support: {n} × {m} cells are too many.")
        paths = list(_EVERY[self.kind](n, m))
        every = torch.zeros(len(paths), *self.event_shape, dtype=self.dtype, device="cpu")
        for z, pairs in zip(every, paths, strict=True):
            z[tuple(np.array(pairs, dtype=np.int64).reshape(-1, 2).T)] = 1
        if self.band is not None:
            shape = self.event_shape[0], self.event_shape[1]
            near = dense.in_band(
                *shape, torch.tensor(n, device="cpu"), torch.tensor(m, device="cpu"), self.band
            )
            every = every[~(every * ~near).flatten(1).any(-1)]
        every = every.to(self.scores.device)
        every = every.reshape(len(every), *[1] * len(self.batch_shape), *self.event_shape)
        return every.expand(-1, *self.batch_shape, -1, -1) if expand else every

    def decode(self, z: Tensor) -> Any:
        """Lists of pairs (row, column), in the order of the path, nested as the batch of z."""
        items = z.reshape(-1, *self.event_shape)
        pairs = [[(i, j) for i, j in item.nonzero().tolist()] for item in items]
        return nest(pairs, z.shape[:-2])

    def encode(self, obj: Any) -> Tensor:
        """z of pairs: a list of pairs (row, column) for each item, nested as the batch."""
        items, shape = unnest("Alignment", obj, 2, len(self.batch_shape))
        z = torch.zeros(len(items), *self.event_shape, dtype=self.dtype, device="cpu")
        for marks, pairs in zip(z, items, strict=True):
            for i, j in pairs:
                if not (0 <= i < z.shape[1] and 0 <= j < z.shape[2]):
                    raise ValueError(
                        f"Alignment: a pair must be below {tuple(self.event_shape)}, got {(i, j)}."
                    )
                marks[i, j] = 1
        return z.reshape(*shape, *self.event_shape).to(self.scores.device)


def _paths(n: int, m: int) -> list[tuple[tuple[int, int], ...]]:
    """Every path from the first cell to (n − 1, m − 1) by ↘, ↓ and →."""
    stack: list[tuple[tuple[int, int], ...]] = [((0, 0),)] if n and m else []
    found = []
    while stack:
        path = stack.pop()
        i, j = path[-1]
        if (i, j) == (n - 1, m - 1):
            found.append(path)
        ends = [(i + down, j + right) for down, right in STEPS]
        stack += [(*path, (i, j)) for i, j in ends if i < n and j < m]
    return found


def _matchings(n: int, m: int) -> list[list[tuple[int, int]]]:
    """Every set of pairs that increases in both."""
    return [
        list(zip(rows, columns, strict=True))
        for k in range(min(n, m) + 1)
        for rows in itertools.combinations(range(n), k)
        for columns in itertools.combinations(range(m), k)
    ]


def _columns(n: int, m: int) -> list[list[tuple[int, int]]]:
    """Every way to give each row a column without going back."""
    every = itertools.combinations_with_replacement(range(m), n)
    return [list(enumerate(columns)) for columns in every]


_EVERY: dict[str, Callable[[int, int], Sequence[Any]]] = {
    "dtw": _paths,
    "edit": _matchings,
    "monotone": _columns,
}
