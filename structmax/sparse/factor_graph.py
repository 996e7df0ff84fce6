"""Factor graphs: structures and constraints that share variables."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from structmax import checks
from structmax.smoothing import Shannon
from structmax.sparse.consensus import Consensus
from structmax.sparse.factors import Factor, Logic, Pair, knapsack_forest
from structmax.sparse.rounding import APART, SETTLED, assign
from structmax.structures.base import Structure
from structmax.structures.grid_path import FreeGridPath
from structmax.structures.hyperpath import Hyperpath
from structmax.tracing import refuse_without_values

LARGE = 50.0  # what scores are scaled down to: with larger ones LP-SparseMAP takes many steps
CERTAIN = 1e-5  # of the largest score: rounding
BEYOND = 30.0  # so many times as large as the rest, a score is a mask: more of it changes nothing
FAR = 1000.0  # the same where the rest is less than a quarter, of which some may be small by chance

Result = TypeVar("Result", bound="GraphResult")


@dataclass(frozen=True)
class GraphResult:
    """An answer for every variable of a factor graph; index it with the variables' ids."""

    values: Tensor
    """``(*batch, V)``, in the order in which the variables were made."""
    residual: Tensor
    """How far the factors are from agreement, and they or the messages from rest, ``(*batch)``."""
    iterations: int

    def __getitem__(self, ids: Tensor) -> Tensor:
        """The values of some variables, ``(*batch, *ids.shape)``; ``~ids`` are their negations.

        A mask of all variables ``(V,)`` selects those that it marks, ``(*batch, number)``.
        """
        count = self.values.shape[-1]
        if isinstance(ids, Tensor) and ids.dtype == torch.bool and ids.shape == (count,):
            return self.values[..., ids]
        if not checks.holds_integers(ids):
            got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else repr(ids)
            raise ValueError(
                f"{type(self).__name__}: index it with a tensor of the ids that variables() "
                f"returned, or with a mask ({count},) of all variables, got {got}."
            )
        positive = torch.where(ids < 0, ~ids, ids)
        found = self.values[..., positive]
        return torch.where(ids < 0, 1 - found, found)


class FactorGraph:
    """Binary variables, and factors that constrain and score some of them together.

    A factor is any structure of the library over its own variables, or a constraint: ``xor``,
    ``at_most_one``, ``or_``, ``budget``, ``knapsack``, ``implication``, ``pairwise``. ``~ids``
    negates variables in any of them. Ids with leading dimensions make many factors at once.

    - ``sparsemap()``: LP-SparseMAP (Niculae and Martins 2020), max of ⟨θ, μ⟩ − ½‖μ‖² over the
      points μ that every factor allows, each for itself. Where the factors touch in loops this is
      a relaxation: an outer bound of the true polytope. Differentiable, sparse.
    - ``lp_map()``: the same without ½‖μ‖²; ``argmax()`` rounds it.
    - ``marginals()``: belief propagation, exact where the graph is a tree, otherwise the loopy
      approximation, after a number of rounds, through which gradients flow.

    Three workers and four jobs; if worker 0 takes job 1, worker 1 does not take job 2:

    >>> import structmax as sx
    >>> graph = sx.FactorGraph()
    >>> jobs = graph.variables(torch.tensor([[2.0, 1.0, 0.0, 0.0]] * 3))
    >>> graph.xor(jobs)  # each row: exactly one
    >>> graph.at_most_one(jobs.T)
    >>> graph.implication(jobs[0, 1], ~jobs[1, 2])
    >>> graph.argmax()[jobs].sum(-1)
    tensor([1., 1., 1.])

    A chain of tags in which the second tag stands at most once:

    >>> graph = sx.FactorGraph()
    >>> tags = graph.variables(torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 1.0]]))
    >>> graph.factor(sx.LinearChain(torch.zeros(3, 2), torch.eye(2)), tags)
    >>> graph.budget(tags[:, 1], 1)
    >>> graph.argmax()[tags].argmax(-1)
    tensor([0, 1, 0])
    """

    def __init__(self) -> None:
        self._scores: list[Tensor] = []
        self._count = 0
        self._factors: list[Factor] = []

    def __repr__(self) -> str:
        return f"FactorGraph({self._count} variables, {len(self._factors)} kinds of factors)"

    # -- drawing ----------------------------------------------------------------------------------

    def variables(self, scores: Tensor, batch_dims: int = 0) -> Tensor:
        """Adds a variable for each score. Returns their ids, shaped as the scores.

        The first ``batch_dims`` dimensions are the batch: every item has the same graph. A score of
        −inf switches a variable off.
        """
        checks.scores("FactorGraph.variables", "scores", scores, 0, "(*batch, ...)")
        if not 0 <= batch_dims <= scores.dim():
            raise ValueError(
                f"FactorGraph.variables: batch_dims must be between 0 and {scores.dim()} for "
                f"scores {tuple(scores.shape)}, got {batch_dims}."
            )
        batch = scores.shape[:batch_dims]
        if self._scores and batch != self._batch:
            raise ValueError(
                f"FactorGraph.variables: the batch must be {tuple(self._batch)} as of the other "
                f"variables, got scores {tuple(scores.shape)} with batch_dims={batch_dims}."
            )
        if checks.can_look():
            checks.values("FactorGraph.variables", {"scores": (scores, None)})
        event = scores.shape[batch_dims:]
        ids = torch.arange(self._count, self._count + event.numel(), device=scores.device)
        self._count += event.numel()
        self._scores.append(scores.reshape(*batch, event.numel()))
        return ids.reshape(event)

    @property
    def _batch(self) -> torch.Size:
        return self._scores[0].shape[:-1]

    def _check_ids(self, factor: str, ids: Tensor) -> None:
        if not self._scores:
            raise ValueError(f"FactorGraph.{factor}: there are no variables yet, see variables().")
        if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"FactorGraph.{factor}: the ids that variables() returned are needed.")
        if ids.numel() and not bool(((ids < self._count) & (ids >= -self._count)).all()):
            raise ValueError(
                f"FactorGraph.{factor}: there are only {self._count} variables, got ids up to "
                f"{int(torch.where(ids < 0, ~ids, ids).max())}."
            )

    def _together(self, factor: str, *ids: Tensor) -> tuple[Tensor, ...]:
        """Ids of one shape."""
        for given in ids:
            self._check_ids(factor, given)
        try:
            return torch.broadcast_tensors(*ids)
        except RuntimeError:
            raise ValueError(
                f"FactorGraph.{factor}: the ids must be of one shape, got "
                f"{', '.join(str(tuple(given.shape)) for given in ids)}."
            ) from None

    def factor(self, structure: Structure, ids: Tensor) -> None:
        """A structure whose parts are variables: ``ids`` is ``(*factors, *parts)``.

        The structure has batch shape ``(*batch, *factors)``, or ``factors`` if it is the same for
        the whole batch. Its primary scores add to those of the variables. No part may be in it
        more than once, since variables are 0 or 1.
        """
        if not isinstance(structure, Structure):
            raise ValueError(
                "FactorGraph.factor: a structure is needed, such as sx.LinearChain(...), got "
                f"{type(structure).__name__}."
            )
        if isinstance(structure, FreeGridPath):
            raise ValueError(
                'FactorGraph.factor: GridPath(moves="all") takes no scores above 0, and what '
                'factors tell each other has either sign. Use moves="monotone".'
            )
        self._check_ids("factor", ids)
        event = len(structure.event_shape)
        if ids.shape[ids.dim() - event :] != structure.event_shape:
            raise ValueError(
                f"FactorGraph.factor: ids must be (..., "
                f"{', '.join(map(str, structure.event_shape))}), one for each part of the "
                f"structure, got {tuple(ids.shape)}."
            )
        wanted = (*self._batch, *ids.shape[: ids.dim() - event])
        try:
            structure = structure.expand(wanted)
        except RuntimeError:
            raise ValueError(
                f"FactorGraph.factor: the batch of the structure must be {wanted}, got "
                f"{tuple(structure.batch_shape)}."
            ) from None
        self._add(Factor(structure, ids.reshape(-1)))

    def _add(self, factor: Factor) -> None:
        if len(factor.ids):
            self._factors.append(factor)

    def _count_factor(self, name: str, ids: Tensor, least: int, most: int) -> None:
        self._check_ids(name, ids)
        if not ids.dim() or least > ids.shape[-1]:
            raise ValueError(
                f"FactorGraph.{name}: ids must be (..., n) with n at least {max(least, 1)}, got "
                f"{tuple(ids.shape)}."
            )
        zeros = self._scores[0].new_zeros(*self._batch, *ids.shape)
        self._add(Logic(least, most, zeros, ids.reshape(-1)))

    def xor(self, ids: Tensor) -> None:
        """Exactly one of n is on: ``(..., n)``."""
        self._count_factor("xor", ids, 1, 1)

    def at_most_one(self, ids: Tensor) -> None:
        """None or one of n is on: ``(..., n)``."""
        self._count_factor("at_most_one", ids, 0, 1)

    def or_(self, ids: Tensor) -> None:
        """At least one of n is on: ``(..., n)``."""
        self._check_ids("or_", ids)
        self._count_factor("or_", ids, 1, ids.shape[-1] if ids.dim() else 0)

    def budget(self, ids: Tensor, most: int, least: int = 0) -> None:
        """At most (and at least) so many of n are on: ``(..., n)``."""
        try:
            least, most = operator.index(least), operator.index(most)
            fine = 0 <= least <= most
        except TypeError:
            fine = False
        if not fine:
            raise ValueError(
                "FactorGraph.budget: the bounds must be whole numbers, 0 <= least <= most, got at "
                f"least {least} and at most {most}."
            )
        self._count_factor("budget", ids, least, most)

    def implication(self, *ids: Tensor) -> None:
        """If all but the last are on, so is the last; tensors of one shape each."""
        if not ids:
            raise ValueError(
                "FactorGraph.implication: ids are needed, of the causes and last of the effect."
            )
        *causes, effect = self._together("implication", *ids)
        self.or_(torch.stack([*[~cause for cause in causes], effect], -1))

    def pairwise(self, first: Tensor, second: Tensor, scores: Tensor) -> None:
        """A score that counts if both are on: ``(*batch, ...)`` or as the ids."""
        first, second = self._together("pairwise", first, second)
        checks.scores("FactorGraph.pairwise", "scores", scores, 0, "(*batch, ...)")
        ids = torch.stack([first, second], -1)
        zeros = self._scores[0].new_zeros(*self._batch, *ids.shape)
        shape = (*self._batch, *first.shape)
        try:
            both = scores.expand(shape)
        except RuntimeError:
            raise ValueError(
                f"FactorGraph.pairwise: scores must broadcast to {shape}, got "
                f"{tuple(scores.shape)}."
            ) from None
        self._add(Factor(Pair(zeros, both), ids.reshape(-1)))

    def knapsack(self, ids: Tensor, weights: Sequence[int], capacity: int) -> None:
        """The weights (whole numbers) of those that are on sum to at most the capacity."""
        self._check_ids("knapsack", ids)
        count = ids.shape[-1] if ids.dim() else 0
        try:
            whole, most = [_whole(w) for w in weights], _whole(capacity)
            fine = len(whole) == count and min([*whole, most]) >= 0
        except (TypeError, ValueError, OverflowError):
            fine = False
        if not fine:
            raise ValueError(
                f"FactorGraph.knapsack: weights must be {count} whole numbers, one for each "
                f"variable of ids (..., n), and like the capacity not negative, got {weights} and "
                f"{capacity}."
            )
        zeros = self._scores[0].new_zeros(*self._batch, *ids.shape)
        forest = knapsack_forest(whole, most)
        self._add(Factor(Hyperpath(forest, zeros), ids.reshape(-1)))

    # -- queries ----------------------------------------------------------------------------------

    def sparsemap(self, max_iter: int = 2000, tol: float = 1e-7) -> GraphResult:
        """LP-SparseMAP, by consensus between the factors; differentiable in every score.

        Douglas-Rachford splitting, which is ADMM in one variable: every factor moves to its nearest
        point, every variable to the mean of what its factors say, weighted by their number and the
        quadratic term. On the faces where they come to rest μ is linear in the scores: the backward
        pass projects onto the moves that all of these faces allow, and so does the backward pass of
        the backward pass. The second derivative of μ is zero.

        Warns where the factors do not come to an agreement: they need more steps, or contradict
        each other. To forbid something use −inf rather than a very low score: where that cannot be
        avoided, or is one of a structure's additional scores, precision is relative to it.
        """
        _check_steps("sparsemap", max_iter, tol)

        def solve(problem: Consensus) -> GraphResult:
            mu, residual, iterations = problem.sparsemap(max_iter, tol)
            return GraphResult(mu.to(self._scores[0].dtype), residual, iterations)

        answer = self._solved("sparsemap", solve)
        _warn_apart("sparsemap", answer, tol)
        return answer

    def lp_map(self, max_iter: int = 5000, tol: float = 1e-6) -> GraphResult:
        """The maximum of ⟨θ, μ⟩ over what the factors allow: an upper bound of the best score.

        Where μ is 0/1 it is the best assignment. Not differentiable. Warns as ``sparsemap`` does.
        """
        _check_steps("lp_map", max_iter, tol)
        with torch.no_grad():
            answer = self._solved("lp_map", lambda p: self._lp_map(p, max_iter, tol)[0])
        _warn_apart("lp_map", answer, tol)
        return answer

    def _lp_map(self, problem: Consensus, max_iter: int, tol: float) -> tuple[GraphResult, Tensor]:
        y, residual, iterations = problem.solve(max_iter, tol)
        values = problem.consensus(y).to(self._scores[0].dtype)
        return GraphResult(values, residual, iterations), y

    def argmax(self, max_iter: int = 5000, tol: float = 1e-6) -> Assigned:
        """A good 0/1 assignment, by rounding ``lp_map``: the best one where that is 0/1 already.

        Otherwise what the relaxation has settled is decided, with the variable that is nearest to
        a decision, and the rest is solved again, so often that all are decided. Decisions that
        contradict each other are reversed, up to a number of steps that grows with the graph.
        ``exact`` says which items are known to be optimal, since their score is the upper bound,
        ``feasible`` which assignments every factor allows. Warns where one is not.
        """
        _check_steps("argmax", max_iter, tol)
        impossible = torch.zeros((), dtype=torch.bool, device="cpu")

        def solve(problem: Consensus) -> Assigned:
            nonlocal impossible
            answer, impossible = self._rounded(problem, max_iter, tol)
            return answer

        with torch.no_grad():
            answer = self._solved("argmax", solve)
        if not bool(answer.feasible.all()):
            _warn_infeasible(answer, impossible, self._steps())
        return answer

    def _steps(self) -> int:
        """How many steps the search for an assignment makes at most."""
        return 200 + 4 * self._count

    def _rounded(self, problem: Consensus, max_iter: int, tol: float) -> tuple[Assigned, Tensor]:
        """An assignment, and which items have been shown to have none, ``(*batch)``."""
        nothing = torch.zeros_like(problem.forbidden)
        _, _, impossible = problem.implied(nothing, problem.forbidden)
        if impossible.numel() and bool(impossible.all()):  # spares the relaxation
            z = (problem.theta > 0).to(self._scores[0].dtype)
            residual = torch.full_like(problem.theta[..., 0], math.inf)
            return Assigned(z, residual, 0, ~impossible, ~impossible), impossible
        first, y = self._lp_map(problem, max_iter, tol)
        z = (first.values >= 0.5).to(first.values)
        feasible, gap = problem.judge(y, z.double())
        undecided = ((first.values - z).abs() > SETTLED).any(-1)
        items = (undecided | ~feasible).flatten().nonzero().flatten().tolist()
        if items:
            found, none = assign(
                problem.pick(items),
                first.values.reshape(-1, self._count)[items],
                lambda p: self._lp_map(p, max_iter, tol)[0],
                self._steps(),
            )
            z.view(-1, self._count)[items] = found
            impossible.view(-1)[items] = none
            feasible, gap = problem.judge(y, z.double())
        exact = feasible & (gap <= CERTAIN)
        return Assigned(z, first.residual, first.iterations, exact, feasible), impossible

    def marginals(self, rounds: int = 100, damping: float = 0.0, tol: float = 1e-9) -> GraphResult:
        """P(variable is on), by sum-product belief propagation.

        Exact where the graph is a tree and there are enough rounds for news to cross it. In a graph
        with loops, as where a variable occurs twice in a factor, an approximation that need not
        settle; ``damping`` (0 to below 1) keeps that part of the old messages. Gradients flow
        through the rounds that were made. Warns where the messages are not at rest after them, and
        of a variable that occurs twice in a factor.
        """
        _check_steps("marginals", rounds, tol, "rounds")
        if not 0 <= damping < 1:
            raise ValueError(
                "FactorGraph.marginals: damping must be at least 0, and below 1 for the messages "
                f"to move, got {damping}."
            )
        for factor in self._factors:
            if factor.structure.smoothing.code != Shannon().code:
                raise ValueError(
                    "FactorGraph.marginals: belief propagation is over Gibbs distributions, so "
                    f"every factor needs sx.Shannon(1.0), got {factor.structure}."
                )
            _warn_twice(factor)
        problem, _ = self._problem("marginals")
        answer = problem.propagate(rounds, damping, tol, self._scores[0].dtype)
        _warn_apart("marginals", answer, tol)
        return answer

    def _theta(self) -> Tensor:
        """The scores of the variables, ``(*batch, V)``, those of the factors included; 0 where a
        factor leaves a variable no choice, since there it is the same for all."""
        if not self._count:
            raise ValueError("FactorGraph: there are no variables. Use variables(scores).")
        theta = torch.cat([s.double() for s in self._scores], -1)
        decided = torch.zeros_like(theta, dtype=torch.int64)
        for factor in self._factors:
            shape = torch.Size([*self._batch, len(factor.ids)])
            own, ids = factor.scores(shape), factor.ids
            if own is not None:
                positive = torch.where(ids < 0, ~ids, ids)
                signed = torch.where(ids < 0, -own, own).double()
                theta = theta.index_add(-1, positive, signed)
                decided = decided.index_add(-1, positive, factor.never(shape).long())
        return torch.where((decided > 0) & theta.isfinite(), 0.0, theta)

    def _solved(self, query: str, solve: Callable[[Consensus], Result]) -> Result:
        """What ``solve`` makes of the problem with bounded scores.

        Where the answer has a variable off of which the score was raised, and on where it was
        lowered, it is that of the scores as they are too: no other gains from the difference, and
        it loses nothing. Items where that is not so are solved again without bounds.
        """
        problem, bounded = self._problem(query)
        answer = solve(problem)
        wanted = (problem.theta > 0).to(answer.values)
        beyond = (bounded & ((answer.values - wanted).detach().abs() > 1e-4)).any(-1)
        if not bool(beyond.any()):
            return answer
        return solve(self._problem(query, beyond)[0])

    def _problem(self, query: str, as_it_is: Tensor | None = None) -> tuple[Consensus, Tensor]:
        """What the factors have to agree on, with the scores of each item scaled, and of which
        variables ``(*batch, V)`` the score was bounded: not in items ``as_it_is``."""
        refuse_without_values(f"FactorGraph.{query}", *self._scores)
        theta, factors = self._theta(), self._factors
        size = torch.where(theta.isfinite(), theta, 0.0).detach().abs()
        additional = torch.zeros_like(size[..., 0])
        for factor in factors:
            additional = torch.maximum(additional, factor.largest(self._batch))
        bounded = torch.zeros_like(size, dtype=torch.bool)
        if query != "marginals":
            bound = _bound(size, additional.clamp(min=1) if query == "sparsemap" else additional)
            if as_it_is is not None:
                bound = torch.where(as_it_is, torch.inf, bound)
            bounded = size > bound[..., None]
            sign = torch.where(theta.detach() > 0, 1.0, -1.0)
            theta = torch.where(bounded, sign * bound[..., None], theta)
            size = torch.minimum(size, bound[..., None])
        largest = torch.maximum(additional, size.amax(-1))
        scale = torch.ones_like(largest)
        if query == "sparsemap":  # between the size of the scores and that of the quadratic term
            scale = torch.minimum(largest.clamp(min=1).rsqrt(), LARGE / largest)
        elif query != "marginals":
            scale = torch.where(largest > 0, 1 / largest, 1.0)
        if not bool((scale == 1).all()):
            scaled = [f.scaled(scale) for f in factors]
            factors = [f for f in scaled if f is not None]
            if len(factors) < len(scaled):
                factors, scale = self._factors, torch.ones_like(scale)
        curvature = scale if query == "sparsemap" else torch.zeros_like(scale)
        problem = Consensus(theta * scale[..., None], factors, curvature[..., None])
        if checks.can_look():
            self._check_off(problem)
        return problem, bounded

    def _check_off(self, problem: Consensus) -> None:
        wrong = problem.off & problem.negated
        if bool(wrong.any()):
            *where, part = wrong.nonzero()[0].tolist()
            item = f"item {where[0] if len(where) == 1 else tuple(where)}: " if where else ""
            raise ValueError(
                f"FactorGraph: {item}variable {int(problem.which[part])} is switched off (-inf) "
                "and negated in a factor. Leave it out of the factor, or use a low score instead "
                "of -inf."
            )
        pairs = zip(problem.factors, problem._each(problem.off), strict=True)
        for factor, off in pairs:
            if isinstance(factor, Logic):  # other structures say so themselves
                factor.check_off(off)


@dataclass(frozen=True)
class Assigned(GraphResult):
    """A 0/1 assignment of the variables."""

    exact: Tensor
    """Whether it is known to be the best, up to 1e-5 of the largest score, ``(*batch)``."""
    feasible: Tensor
    """Whether every factor allows it, ``(*batch)``."""


def _whole(number: Any) -> int:
    """The integer that a number is, 2.0 and a tensor of one included; ValueError if it is none."""
    if (value := int(number)) != number:
        raise ValueError
    return value


def _bound(size: Tensor, least: Tensor) -> Tensor:
    """Where scores of size ``(*batch, V)`` fall into some of a size and others far beyond it: what
    is enough for those, ``(*batch)``, inf where there are none. ``least`` is a size that counts
    in any case. A bound that is too low costs time: answers are checked (``_solved``)."""
    smallest = torch.where(size > 0, size, torch.inf).amin(-1, keepdim=True)
    floor = torch.maximum(least[..., None], torch.where(smallest.isfinite(), smallest, 0.0))
    size = torch.cat([floor, torch.maximum(size, floor).sort(-1)[0]], -1)
    rank = torch.arange(size.shape[-1] - 1, device=size.device)
    beyond = torch.where(rank < len(rank) // 4, FAR, BEYOND)
    below, above = size[..., :-1], size[..., 1:]
    gap = (below > 0) & (above > beyond * below)
    return torch.where(gap, BEYOND * below, torch.inf).amin(-1)


def _check_steps(query: str, steps: Any, tol: Any, name: str = "max_iter") -> None:
    if not steps >= 1:
        raise ValueError(f"FactorGraph.{query}: {name} must be at least 1, got {steps}.")
    if not tol >= 0:
        raise ValueError(f"FactorGraph.{query}: tol must not be negative, got {tol}.")


def _warn_twice(factor: Factor) -> None:
    """Says so if one of the factors has a variable more than once."""
    if not checks.can_look():
        return
    structure = factor.structure
    usable = structure._usable_parts().expand(*structure.batch_shape, *structure.event_shape)
    parts = structure.event_shape.numel()
    rows = factor.ids.reshape(-1, parts)
    usable = usable.reshape(-1, len(rows), parts).any(0)
    fresh = -1 - torch.arange(parts, device=rows.device)  # of no variable
    rows = torch.where(usable, torch.where(rows < 0, ~rows, rows), fresh).sort(-1).values
    again = rows[:, 1:][rows[:, 1:] == rows[:, :-1]]
    if len(again):
        warnings.warn(
            f"FactorGraph.marginals: variable {int(again[0])} occurs twice in a factor. That is a "
            "loop, so the answer is an approximation.",
            RuntimeWarning,
            stacklevel=3,
        )


def _warn_apart(query: str, answer: GraphResult, tol: float) -> None:
    """Says so if the factors of some item are far from agreement, or its messages from rest."""
    residual = answer.residual.detach()
    if not checks.can_look() or not residual.numel() or float(residual.max()) <= max(tol, APART):
        return
    worst = tuple(int(i) for i in torch.unravel_index(residual.argmax(), residual.shape))
    item = f" of item {worst[0] if len(worst) == 1 else worst}" if worst else ""
    steps, left = answer.iterations, f"{float(residual.max()):.2g}"
    if query == "marginals":
        text = (
            f"after {steps} rounds the messages{item} still move, by {left}. Either there were too "
            "few rounds, or they go round in loops (see damping), "
        )
    else:
        text = (
            f"after {steps} steps the factors{item} are still apart, with a residual of {left}. "
            "Either there were too few steps (max_iter), or one score is so large that the others "
            "hardly count (use -inf to forbid), "
        )
    warnings.warn(
        f"FactorGraph.{query}: {text}or the factors contradict each other, so that no point fits "
        "them all.",
        RuntimeWarning,
        stacklevel=3,
    )


def _warn_infeasible(answer: Assigned, impossible: Tensor, steps: int) -> None:
    """Warns of the first item whose assignment some factor does not allow."""
    if not checks.can_look():
        return
    item = tuple(int(i) for i in (~answer.feasible).nonzero()[0])
    where = f" of item {item[0] if len(item) == 1 else item}" if item else ""
    reason = (
        "there is none: the factors contradict each other"
        if bool(impossible[item])
        else f"none was found in {steps} steps. Perhaps the factors contradict each other, or the "
        "search needs to be made easier by fewer or larger factors"
    )
    warnings.warn(
        f"FactorGraph.argmax: after a search for an assignment{where} that every factor allows, "
        f"{reason}. Its values are rounded only.",
        RuntimeWarning,
        stacklevel=3,
    )
