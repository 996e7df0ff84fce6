"""Paths through a grid, from the top left to the bottom right."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from structmax import checks
from structmax.forest.topology import Forest, ForestBuilder, family, name_of
from structmax.oracles import shortest_path
from structmax.smoothing import Smoothing
from structmax.structures.base import Structure, dot, signature_of
from structmax.structures.dynamic import DynamicStructure
from structmax.structures.lengths import full
from structmax.structures.nesting import nest, unnest

Cell = tuple[int, int]


@family
def grid(h: int, w: int, neighbours: int) -> Forest:
    """A node for each cell, reached from the left, from above and, of 8 neighbours, by a diagonal.

    Parts: cells ``r·w + c``, then the diagonal moves by the cell they leave.
    """
    draw = ForestBuilder()
    cell = np.arange(h * w).reshape(h, w)
    draw.nodes(h * w, cell)
    draw.edges(cell[:, 1:], cell[:, :-1])
    draw.edges(cell[1:], cell[:-1])
    diagonals = (h - 1) * (w - 1) if neighbours == 8 else 0
    if diagonals:
        draw.edges(
            cell[1:, 1:], cell[:-1, :-1], -1, h * w + np.arange(diagonals).reshape(h - 1, -1)
        )
    return draw.build(h * w + diagonals)


class GridPath(DynamicStructure):
    """A path through a grid from its first cell to its last; z marks the cells, ends included.

    With ``moves="monotone"`` a step goes right, down or, with 8 neighbours, diagonally right and
    down. The graph has a node for each cell, reached from those before it::

        (r−1, c−1)   (r−1, c)
                  ╲     │
        (r, c−1) ──► (r, c)

    With ``moves="all"`` a step goes to any of the 4 or 8 neighbours. The scores are then −costs, at
    most 0, and ``argmax`` finds a shortest path by Dijkstra's algorithm, on the CPU: a CUDA tensor
    is copied there and back. Sums over all such paths have no efficient algorithm, so the other
    queries raise :class:`IntractableError`; ``sparsemap`` needs none.

    Integer form: the cells ``(row, column)`` along the path.

    Args:
        scores: of the cells, ``(*B, h, w)``; −inf is a wall
        moves: ``"monotone"`` or ``"all"``
        neighbours: 8 or 4
        smoothing: Ω, by default ``sx.Shannon(1.0)``

    >>> import structmax as sx
    >>> costs = torch.tensor([[1.0, 5.0, 1.0], [1.0, 5.0, 1.0], [1.0, 1.0, 1.0]])
    >>> grid = sx.GridPath(-costs, neighbours=4)
    >>> grid.decode(grid.argmax())
    [(0, 0), (1, 0), (2, 0), (2, 1), (2, 2)]
    >>> sx.GridPath(torch.zeros(3, 3)).log_partition().exp()  # a Delannoy number
    tensor(13.0000)
    >>> wall = -math.inf
    >>> maze = torch.tensor([[-1, wall, -1, -1, -1], [-1, -1, -1, wall, -1]])
    >>> free = sx.GridPath(maze, moves="all", neighbours=4)
    >>> free.decode(free.argmax())
    [(0, 0), (1, 0), (1, 1), (1, 2), (0, 2), (0, 3), (0, 4), (1, 4)]
    """

    _silent = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        moves = args[1] if len(args) > 1 else kwargs.get("moves", "monotone")
        if cls is GridPath and moves == "all":
            return super().__new__(FreeGridPath)  # type: ignore[return-value]
        return super().__new__(cls)

    def __init__(
        self,
        scores: Tensor,
        moves: str = "monotone",
        neighbours: int = 8,
        smoothing: Smoothing | None = None,
        validate_args: bool | None = None,
        _blocked: Tensor | None = None,
    ) -> None:
        checks.scores("GridPath", "scores", scores, 2, "(..., h, w) with h and w at least 1")
        if moves not in ("monotone", "all"):
            raise ValueError(f'GridPath: moves must be "monotone" or "all", got {moves!r}.')
        if neighbours not in (4, 8):
            raise ValueError(f"GridPath: neighbours must be 4 or 8, got {neighbours!r}.")
        self.scores, self.moves, self.neighbours = scores, moves, neighbours
        self._blocked = _blocked  # (*B, h−1, w−1): diagonal moves that a condition forbids
        super().__init__(scores.shape[:-2], scores.shape[-2:], smoothing, validate_args)

    __signature__ = signature_of(__init__)

    def _given_scores(self) -> dict[str, tuple[Tensor, checks.Mask]]:
        return {"scores": (self.scores, None)}

    @property
    def _name(self) -> str:
        return "GridPath"

    def _tensors(self) -> dict[str, tuple[Tensor, int]]:
        given = {"scores": (self.scores, 2)}
        return given if self._blocked is None else {**given, "_blocked": (self._blocked, 2)}

    def _options(self) -> dict[str, Any]:
        return {"moves": self.moves, "neighbours": self.neighbours}

    def _unvalidated_parts(self) -> tuple[Tensor, ...]:
        scores = self.scores.float() if self.scores.dtype.itemsize < 4 else self.scores
        h, w = self.event_shape
        if self.neighbours == 4:
            return (scores,)
        diagonal = scores.new_zeros(()).expand(*self.batch_shape, h - 1, w - 1)
        if self._blocked is not None:
            diagonal = torch.where(self._blocked, -math.inf, diagonal)
        return scores, diagonal

    def _forest_key(self) -> str:
        return name_of("grid", (*self.event_shape, self.neighbours))

    def _goal(self) -> Tensor:
        last, device = self.event_shape.numel() - 1, self.scores.device
        return full(self.batch_shape, last, device, torch.int32)

    def _derivation_size(self) -> int:
        return sum(self.event_shape) - 1

    def _replace_primary(self, scores: Tensor, **others: Tensor) -> Self:
        return self._rebuild(**{"_blocked": self._blocked, **others, "scores": scores})

    def condition(self, include: Tensor | None = None, exclude: Tensor | None = None) -> Self:
        """The same grid with some cells forced in and some out.

        A path that must meet a cell may not jump over it: the two diagonal moves that pass it by
        are forbidden as well.
        """
        new = super().condition(include, exclude)
        assert isinstance(new, type(self))
        if include is None or self.neighbours == 4:
            return new
        include = include.expand(*self.batch_shape, *self.event_shape)
        jumped = include[..., 1:, :-1] | include[..., :-1, 1:]
        jumped = jumped if self._blocked is None else jumped | self._blocked
        return new._replace_primary(new.scores, _blocked=jumped)

    def _incompatible(self, include: Tensor) -> Tensor:
        """Cells that lie both below and to the left of an included one, or above and right."""
        count = include.long()
        below = count.flip(-2).cumsum(-2).flip(-2) - count  # included cells further down
        above = count.cumsum(-2) - count
        left, right = below.cumsum(-1) - below, above.flip(-1).cumsum(-1).flip(-1) - above
        return left + right > 0

    def _aligned(self, q: Structure) -> Any:
        if isinstance(q, GridPath) and q.moves != self.moves:
            raise ValueError(
                "GridPath: both distributions must be over the same paths, got "
                f'moves="{self.moves}" and moves="{q.moves}".'
            )
        return super()._aligned(q)

    # -- cells ------------------------------------------------------------------------------------

    def _steps(self, z: Tensor) -> Tensor:
        """Which move leaves each cell of a path: right, down, diagonal ``(3, ..., h, w)``."""
        ahead = torch.nn.functional.pad(z != 0, (0, 1, 0, 1))
        here = ahead[..., :-1, :-1]
        right, down = here & ahead[..., :-1, 1:], here & ahead[..., 1:, :-1]
        diagonal = here & ahead[..., 1:, 1:] & ~right & ~down
        return torch.stack([right, down, diagonal & (self.neighbours == 8)])

    def _checked(self, z: Tensor) -> Tensor:
        """One way out of each cell but the last and one way into each but the first."""
        right, down, diagonal = steps = self._steps(z)
        pad, long = torch.nn.functional.pad, steps.long().sum(0)
        into = pad(right, (1, -1)).long() + pad(down, (0, 0, 1, -1)) + pad(diagonal, (1, -1, 1, -1))
        cells = (z != 0).long()
        leaves, enters = cells.clone(), cells
        leaves[..., -1, -1] -= 1
        enters[..., 0, 0] -= 1
        wrong = ((z != 0) & (z != 1)) | (long != leaves) | (into != enters)
        self._refuse(wrong.flatten(-2).any(-1))
        return z

    def _refuse(self, wrong: Tensor) -> None:
        if bool(wrong.any()):
            item = wrong.nonzero()[0].tolist()
            raise ValueError(
                "GridPath: z must mark the cells of a path from the first cell to the last; it "
                f"does not for item {item}."
            )

    def _score(self, z: Tensor) -> Tensor:
        scores, *diagonal = self._parts()
        total = dot(scores, z.to(scores.dtype), 2)
        if self._blocked is None:
            return total
        return total + dot(diagonal[0], self._steps(z)[2, ..., :-1, :-1].to(total.dtype), 2)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        h, w = self.event_shape
        paths = itertools.islice(self._paths(np.ones((h, w), bool)), 1_000_001)
        cells = {frozenset(path) for path in paths}  # free paths may go round the same cells
        if len(cells) > 1_000_000:
            raise ValueError("GridPath.enumerate_support: more than 1000000 paths are too many.")
        every = self._z_of([sorted(path) for path in sorted(cells, key=sorted)])
        every = every.reshape(-1, *[1] * len(self.batch_shape), h, w)
        return every.expand(-1, *self.batch_shape, h, w) if expand else every

    def _paths(self, allowed: NDArray[np.bool_]) -> Iterator[tuple[Cell, ...]]:
        """Every path that meets no cell twice, through the cells that are allowed."""
        h, w = self.event_shape
        steps = shortest_path.moves(self.neighbours)
        if self.moves == "monotone":
            steps = [(r, c) for r, c in steps if r >= 0 and c >= 0]
        stack: list[tuple[Cell, ...]] = [((0, 0),)]
        while stack:
            path = stack.pop()
            r, c = path[-1]
            if (r, c) == (h - 1, w - 1):
                yield path
                continue
            for y, x in ((r + dr, c + dc) for dr, dc in steps):
                if 0 <= y < h and 0 <= x < w and allowed[y, x] and (y, x) not in path:
                    stack.append((*path, (y, x)))

    def _z_of(self, paths: list[Any]) -> Tensor:
        z = torch.zeros(len(paths), *self.event_shape, dtype=self.dtype, device="cpu")
        index = [(i, r, c) for i, path in enumerate(paths) for r, c in path]
        if index:
            z[tuple(torch.tensor(index, device="cpu").unbind(-1))] = 1
        return z.to(self.scores.device)

    def decode(self, z: Tensor) -> Any:
        """The cells ``(row, column)`` along each path, nested as the batch of z."""
        batch = z.shape[:-2]
        flat = z.reshape(batch.numel(), *self.event_shape).cpu()
        return nest([self._in_order(item) for item in flat], batch)

    def _in_order(self, z: Tensor) -> list[Cell]:
        return [(r, c) for r, c in z.nonzero().tolist()]

    def encode(self, obj: Any) -> Tensor:
        """z of a list of cells ``(row, column)``, or of nested lists of them."""
        h, w = self.event_shape
        items, batch = unnest("GridPath", obj, 2, len(self.batch_shape))
        for cell in itertools.chain.from_iterable(items):
            if len(cell) != 2 or not (0 <= cell[0] < h and 0 <= cell[1] < w):
                raise ValueError(
                    f"GridPath: a cell is (row, column) with a row below {h} and a column below "
                    f"{w}, got {tuple(cell)}."
                )
        return self._z_of(items).reshape(*batch, h, w)


class FreeGridPath(GridPath):
    """``GridPath(moves="all")``: shortest paths."""

    queries = frozenset(["argmax", "score", "condition", "enumerate_support", "sparsemap"])
    instead = dict.fromkeys(
        GridPath.queries - queries,
        'Use moves="monotone", or an estimator that asks for argmax only.',
    )

    def _validate(self, late: bool = False) -> None:
        if not self._record.covers(self._score_tensors):
            self._refuse_positive()
        super()._validate(late)

    def _refuse_positive(self) -> None:
        if not (self._validate_args and checks.can_look(self._first)):
            return
        positive = self.scores > 0
        if bool(positive.any()):
            where = tuple(positive.nonzero()[0].tolist())
            raise ValueError(
                f'GridPath: scores{list(where)} is {self.scores[where].item()}. With moves="all" '
                "scores are -costs and may not be positive: a path could go round for ever. Use "
                "for example -torch.nn.functional.softplus(x)."
            )

    def argmax(self) -> Tensor:
        (scores, *_) = self._parts()
        value, z = shortest_path.grid_path(scores.detach(), self.neighbours)
        return self._refuse_infeasible("argmax", value, z).to(self.dtype)

    def _argmax_parts(self, parts: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        value, z = shortest_path.grid_path(parts[0], self.neighbours)
        return value, (z.to(parts[0].dtype), *(torch.zeros_like(p) for p in parts[1:]))

    def _with_gains(self, gains: Tensor) -> Self:
        new: Self = super()._with_gains(gains)
        new._refuse_positive()
        return new

    def _incompatible(self, include: Tensor) -> Tensor:
        raise ValueError(
            'GridPath.condition: include= is not possible with moves="all": the best path through '
            "given cells is a hard problem. Use exclude=."
        )

    def _checked(self, z: Tensor) -> Tensor:
        """Whether some path meets just these cells is a hard question; the ends are looked at."""
        wrong = ((z != 0) & (z != 1)).flatten(-2).any(-1)
        self._refuse(wrong | (z[..., 0, 0] != 1) | (z[..., -1, -1] != 1))
        return z

    def perturb(self, delta: Tensor) -> Self:
        """As of every structure, but what becomes positive is cut to 0, since scores are −costs.

        Noise is cut off with it, so estimators that perturb the scores have a bias here.
        """
        new: Self = super().perturb(delta)
        return new._replace_primary(new.scores.clamp(max=0.0))

    def _in_order(self, z: Tensor) -> list[Cell]:
        cells = int(z.sum())
        return next(
            (list(p) for p in self._paths(np.array((z > 0).tolist())) if len(p) == cells), []
        )
