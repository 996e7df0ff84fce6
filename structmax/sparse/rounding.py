"""0/1 assignments of a factor graph: depth-first search along the solution of its relaxation.

Each step decides variables in the order in which the relaxation is sure of them. What follows from
the decisions, factor by factor, is derived exactly (``Consensus.implied``). Where that contradicts
itself, the last decision is reversed, and the reverse is a consequence of the earlier ones: no
subproblem is tried twice, and a search that ends without an assignment proves that there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from structmax.sparse.consensus import Consensus

if TYPE_CHECKING:
    from structmax.sparse.factor_graph import GraphResult

SETTLED = 1e-3  # a value of the relaxation this near to 0 or 1 is decided
APART = 1e-3  # a residual that is no matter of digits


class _Branch:
    """Where the search of one item is: literals (variable, value) in the order of their decision,
    and which of them were free decisions."""

    def __init__(self) -> None:
        self.literals: list[tuple[int, bool]] = []
        self.free: list[bool] = []
        self.pending: list[tuple[int, bool]] = []
        """Decisions that are tried, all together."""
        self.impossible = False
        self.relaxes = True
        """Whether the relaxation has come to rest so far. Its next solution may guide the rest."""

    def accept(self) -> None:
        """The pending decisions contradict nothing."""
        self.literals += self.pending
        self.free += [True] * len(self.pending)
        self.pending = []

    def reject(self) -> None:
        """They do: tries fewer, then the reverse of the first, then that of an earlier one."""
        if len(self.pending) > 1:
            self.pending = self.pending[: len(self.pending) // 2]
            return
        self.accept()
        while self.free and not self.free[-1]:
            self.literals.pop()
            self.free.pop()
        self.impossible = not self.free
        if self.free:
            variable, value = self.literals[-1]
            self.literals[-1], self.free[-1] = (variable, not value), False

    def propose(self, values: Tensor, decided: Tensor) -> None:
        """Decides all that the relaxation has settled, and the one that is nearest to it."""
        certainty = torch.where(decided, -1.0, (values - 0.5).abs())
        count = int((certainty >= 0.5 - SETTLED).sum()) + 1
        order = certainty.argsort(descending=True, stable=True)[:count].tolist()
        self.pending = [(i, bool(values[i] >= 0.5)) for i in order if not decided[i]]


def assign(
    problem: Consensus, values: Tensor, solve: Callable[[Consensus], GraphResult], most: int
) -> tuple[Tensor, Tensor]:
    """Assignments that all factors allow, by at most so many steps from the ``values`` of the
    relaxation, both ``(b, V)``; where none was found, these rounded. And which items have none."""
    branches, z = [_Branch() for _ in values], (values >= 0.5).to(values)
    left, values = list(range(len(values))), values.clone()
    for step in range(most):
        if not left:
            break
        on, off, wrong = _consequences(problem, branches, left)
        decided = on | off
        rows = []  # of those that go on with other values
        for row, i in enumerate(left):
            branch = branches[i]
            if wrong[row]:
                branch.reject()
                continue
            branch.accept()
            if bool(decided[row].all()):
                z[i] = on[row].to(z)
            elif branch.relaxes and step:
                rows.append(row)
        if rows:
            at = [left[row] for row in rows]
            answer = solve(problem.pick(at).holding(on[rows], off[rows]))
            values[at] = answer.values
            for i, residual in zip(at, answer.residual.tolist(), strict=True):
                branches[i].relaxes = residual <= APART
        for row, i in enumerate(left):
            if not wrong[row]:
                branches[i].propose(values[i], decided[row])
        done = (~wrong & decided.all(-1)).tolist()
        left = [i for row, i in enumerate(left) if not (done[row] or branches[i].impossible)]
    return z, torch.tensor([branch.impossible for branch in branches], device=z.device)


def _consequences(
    problem: Consensus, branches: list[_Branch], items: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """What follows from the literals of some items, as ``Consensus.implied`` has it."""
    some = problem.pick(items)
    on, off = torch.zeros_like(some.forbidden), some.forbidden.clone()
    for row, i in enumerate(items):
        for variable, value in branches[i].literals + branches[i].pending:
            (on if value else off)[row, variable] = True
    return some.implied(on, off)
