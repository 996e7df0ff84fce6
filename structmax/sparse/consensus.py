"""How the factors of a graph come to an agreement: by splitting, or by passing messages."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from structmax import checks
from structmax.primitive import is_transforming
from structmax.sparse.factors import Factor
from structmax.sparse.solve import Untracked

if TYPE_CHECKING:
    from structmax.sparse.factor_graph import GraphResult


class Consensus:
    """max over μ of ⟨θ, μ⟩ − κ/2 ‖μ‖² such that the part of μ at each factor is in its polytope.

    With y one number for each part of each factor, P the nearest points of the factors and v the
    variables as the factors see them (the value, or 1 − it where negated),

        μ = (θ + Σ y) / (κ + degree),     y ← y + P(2v − y) − v,

    a step that brings any two points y no further apart (Douglas and Rachford; ADMM in other
    variables). At a fixed point P(2v − y) = v: all agree.
    """

    def __init__(self, theta: Tensor, factors: list[Factor], curvature: Tensor) -> None:
        self.theta, self.factors = theta, factors  # θ (*batch, V)
        self.curvature = curvature  # κ (*batch, 1)
        device = theta.device
        none = torch.zeros(0, dtype=torch.int64, device=device)
        ids = torch.cat([none, *[f.ids.to(device) for f in factors]])
        self.negated = ids < 0
        self.which = torch.where(self.negated, ~ids, ids)
        self.degree = torch.bincount(self.which, minlength=theta.shape[-1]).to(theta.dtype)
        self.sign = torch.where(self.negated, -1.0, 1.0).to(theta)
        self.forbidden = theta.detach() == -math.inf
        self.held: tuple[Tensor, Tensor] | None = None
        self.off = self.forbidden[..., self.which]

    def pick(self, items: list[int]) -> Consensus:
        """The problem of some items, given by their numbers in the flattened batch, ``(b)``."""
        batch = self.theta.shape[:-1]
        where = torch.unravel_index(torch.tensor(items, device=self.theta.device), batch or (1,))
        theta, curvature = (t if batch else t[None] for t in (self.theta, self.curvature))
        factors = [f.pick(where, len(batch)) for f in self.factors]
        return Consensus(theta[where], factors, curvature[where])

    def holding(self, on: Tensor, off: Tensor) -> Consensus:
        """The same problem with some variables held on and some off, ``(*batch, V)`` each."""
        new = copy.copy(self)
        new.held, new.off = (on, off), self.off | self._parts_of(on, off)[1]
        return new

    def _turned(self, parts: Tensor) -> Tensor:
        return torch.where(self.negated, 1 - parts, parts)

    def _each(self, parts: Tensor) -> list[Tensor]:
        return list(parts.split([len(f.ids) for f in self.factors], -1)) if self.factors else []

    def consensus(self, y: Tensor) -> Tensor:
        """μ ``(*batch, V)``."""
        theta = torch.where(self.forbidden, 0.0, self.theta)
        total = theta.index_add(-1, self.which, self._turned(y))
        weight = self.curvature + self.degree
        mu = total / torch.where(weight > 0, weight, 1.0)
        free = torch.where(self.curvature > 0, mu.clamp(0, 1), (theta > 0).to(mu))
        mu = torch.where(self.degree > 0, mu, free)
        if self.held is not None:
            on, off = self.held
            mu = torch.where(off, 0.0, torch.where(on, 1.0, mu))
        return torch.where(self.forbidden, 0.0, mu)

    def agreed(self, mu: Tensor, u: Tensor) -> Tensor:
        """μ as the factors say it, whose u ``(*batch, T)`` has zeros and ones that are exact. Where
        some of them leave a variable no choice, these alone are asked."""
        shapes = [torch.Size([*u.shape[:-1], len(f.ids)]) for f in self.factors]
        never = [f.never(shape) for f, shape in zip(self.factors, shapes, strict=True)]
        fixed = torch.cat([u[..., :0], *never], -1)
        weight = torch.where(self._total(fixed)[..., self.which] > 0, fixed, 1.0)
        said = self._total(weight * self._turned(u)) / self._total(weight).clamp(min=1)
        return torch.where((self.degree > 0) & ~self.forbidden, said.clamp(0, 1), mu)

    def _total(self, parts: Tensor) -> Tensor:
        """The sum over the factors of each variable, ``(*batch, V)``."""
        return torch.zeros_like(self.theta).index_add(-1, self.which, parts)

    def nearest(self, points: Tensor) -> Tensor:
        """What the factors say to points ``(*batch, T)``: the nearest that each allows."""
        points = torch.where(self.off, -math.inf, points)
        pairs = zip(self.factors, self._each(points), strict=True)
        return torch.cat([points[..., :0], *[f.nearest(x).to(points) for f, x in pairs]], -1)

    def step(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The next y, what the factors say and what the variables say, each ``(*batch, T)``."""
        v = self._turned(self.consensus(y)[..., self.which])
        u = self.nearest(2 * v - y)
        return y + u - v, u, v

    def solve(self, max_iter: int, tol: float) -> tuple[Tensor, Tensor, int]:
        """y at rest, the residual ``(*batch)`` and the number of steps.

        The less κ is, the less a step moves: the residual is in units of it, as μ is.
        """
        y = self.theta.new_zeros(*self.theta.shape[:-1], len(self.which))
        residual = self.theta.new_zeros(self.theta.shape[:-1])
        if not self.factors:
            return y, residual, 0
        unit = torch.where(self.curvature > 0, self.curvature, 1.0).clamp(max=1).squeeze(-1)
        before, count = torch.full_like(y, math.inf), 0
        while count < max_iter:
            y, u, v = self.step(y)
            count += 1
            residual = torch.maximum((u - v).abs(), (v - before).abs()).amax(-1) / unit
            before = v
            if bool((residual <= tol).all()):
                break
        return y, residual, count

    @torch._disable_dynamo  # how many steps there are depends on the data
    def sparsemap(self, max_iter: int, tol: float) -> tuple[Tensor, Tensor, int]:
        """μ ``(*batch, V)``, differentiable in every score, the residual and the number of steps.

        On the faces of the factors everything is linear. With L the moves of μ that stay on all of
        them, Π the projection onto L and a how the factors move with their additional scores,
        κ dμ = Π(dθ + Σ a). Π is constant as long as the faces do not change.
        """
        tensors = self._tensors()
        watched = is_transforming(tensors)
        noted: dict[str, Any] = {}

        @torch.no_grad()
        def run(*plain: Tensor) -> tuple[Tensor, ...]:
            problem = self._rebuild(*plain)
            y, residual, noted["count"] = problem.solve(max_iter, tol)
            mu = problem.consensus(y)
            points = 2 * problem._turned(mu[..., problem.which]) - y
            mu = problem.agreed(mu, problem.nearest(points))
            if watched:
                noted["face"] = _Face(problem, points)
            return mu, points, residual

        if torch._C._are_functorch_transforms_active():
            mu, points, residual = Untracked.apply(run, *tensors)
        else:
            mu, points, residual = run(*[t.detach() for t in tensors])
        if not watched:
            return mu, residual, noted["count"]
        theta = torch.where(self.forbidden, 0.0, self.theta)
        moved, u = theta - theta.detach(), self.nearest(points)
        if is_transforming([u]):
            moved = moved.index_add(-1, self.which, self.sign * (u - u.detach()))
        mu = mu + _Project.apply(moved / self.curvature, noted["face"])
        return mu, residual, noted["count"]

    def _tensors(self) -> list[Tensor]:
        return [
            self.theta,
            self.curvature,
            *[t for f in self.factors for t in f.tensors().values()],
        ]

    def _rebuild(self, theta: Tensor, curvature: Tensor, *tensors: Tensor) -> Consensus:
        left = iter(tensors)
        factors = [f.rebuild({k: next(left) for k in f.tensors()}) for f in self.factors]
        return Consensus(theta, factors, curvature)

    def judge(self, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Whether all factors allow 0/1 values ``(*batch, V)``, and how far at most the score of
        these is below the maximum, without the quadratic term.

        v − y distributes θ over the factors, whatever y is: what each of them could gain alone is
        at least what all can gain together.
        """
        theta = torch.where(self.forbidden, 0.0, self.theta)
        alone = torch.where(self.degree > 0, 0.0, theta.clamp(min=0) - theta * z)
        allowed, gap = torch.ones_like(z[..., 0], dtype=torch.bool), alone.sum(-1)
        share = self._turned(self.consensus(y)[..., self.which]) - y
        share = torch.where(self.off, -math.inf, share)
        parts = self._each(self._turned(z[..., self.which]))
        for factor, scores, own in zip(self.factors, self._each(share), parts, strict=True):
            fits, lost = factor.judge(scores, own)
            allowed, gap = allowed & fits, gap + lost
        return allowed, gap

    @torch.no_grad()
    def implied(self, on: Tensor, off: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Which variables must be on and off where some are, ``(*batch, V)`` each, as far as every
        factor for itself can tell, and which items ``(*batch)`` are thereby impossible.

        In a tree that is all there is to tell: any value that is left belongs to an assignment.
        """
        asked: list[Any] = [None] * len(self.factors)
        must: list[Any] = [None] * len(self.factors)
        while self.factors:
            each = (self._each(x) for x in self._parts_of(on, off))
            for i, (factor, *fixed) in enumerate(zip(self.factors, *each, strict=True)):
                if asked[i] is None or not all(map(torch.equal, asked[i], fixed)):
                    can_on, can_off = factor.possible(*fixed)
                    asked[i], must[i] = fixed, (~can_off, ~can_on)
            told = self._turned_pair(*(torch.cat(x, -1) for x in zip(*must, strict=True)))
            more_on, more_off = (self._total(x.to(self.theta)) > 0 for x in told)
            more = ((more_on & ~on) | (more_off & ~off)) & ~(on & off).any(-1, keepdim=True)
            if not bool(more.any()):
                break
            on, off = on | (more & more_on), off | (more & more_off)
        return on, off, (on & off).any(-1)

    def _parts_of(self, on: Tensor, off: Tensor) -> tuple[Tensor, Tensor]:
        """Which parts are on and off, ``(*batch, T)``, where these variables are."""
        return self._turned_pair(on[..., self.which], off[..., self.which])

    def _turned_pair(self, on: Tensor, off: Tensor) -> tuple[Tensor, Tensor]:
        """On and off exchanged where a part is negated."""
        return torch.where(self.negated, off, on), torch.where(self.negated, on, off)

    def propagate(self, rounds: int, damping: float, tol: float, dtype: torch.dtype) -> GraphResult:
        """Beliefs after so many rounds of messages, as log-odds in both directions.

        What is forced or impossible is found out first, exactly. So messages are about undecided
        variables alone, and all of them are finite. An item without an assignment is an error, or
        NaN where a structure among the factors validates nothing.
        """
        from structmax.sparse.factor_graph import GraphResult

        on, off, impossible = self.implied(torch.zeros_like(self.forbidden), self.forbidden)
        validates = all(f.structure._validate_args for f in self.factors) and checks.can_look()
        if validates and bool(impossible.any()):
            raise ValueError(_contradiction("marginals", impossible, on & off))
        fixed, (parts_on, parts_off) = on | off, self._parts_of(on, off)
        theta, decided = torch.where(fixed, 0.0, self.theta), parts_on | parts_off
        messages = theta.new_zeros(*theta.shape[:-1], len(self.which))
        moved, count = theta.new_zeros(theta.shape[:-1]), 0
        while self.factors and count < rounds:
            count += 1
            total = theta.index_add(-1, self.which, self.sign * messages)
            incoming = self.sign * total[..., self.which] - messages
            each = (self._each(x) for x in (incoming, parts_on, parts_off))
            odds = [f.log_odds(*x) for f, *x in zip(self.factors, *each, strict=True)]
            new = torch.where(decided, 0.0, torch.cat([incoming[..., :0], *odds], -1) - incoming)
            new = damping * messages + (1 - damping) * new
            moved = (new - messages).detach().abs().amax(-1)
            messages = new
            if bool((moved <= tol).all()):
                break
        total = theta.index_add(-1, self.which, self.sign * messages)
        beliefs = torch.where(fixed, on.to(total), total.sigmoid())
        beliefs = torch.where(impossible[..., None], math.nan, beliefs)
        return GraphResult(beliefs.to(dtype), moved, count)


def _contradiction(query: str, impossible: Tensor, both: Tensor) -> str:
    """What is wrong with the first item that is impossible, of which variables must be both."""
    item = tuple(impossible.nonzero()[0].tolist()) if impossible.dim() else ()
    name = f"item {item[0] if len(item) == 1 else item}" if item else "the graph"
    return (
        f"FactorGraph.{query}: {name} allows no assignment: the factors and switched-off (-inf) "
        f"variables contradict each other, at variable {int(both[item].nonzero()[0])} for example. "
        "Remove a factor, or forbid less."
    )


class _Face:
    """The moves L of μ that stay on the face of every factor.

    With S the moves of parts that belong to a move of μ, and P the Jacobian of the nearest points,
    which projects onto the directions of the faces, L is where A = Sᵀ(I − P)S is zero.
    """

    def __init__(self, problem: Consensus, points: Tensor) -> None:
        self.which, self.sign = problem.which, problem.sign
        between = (problem.theta > 0) & (problem.theta < problem.curvature)
        self.free = ~problem.forbidden & (between | (problem.degree > 0))
        with torch.enable_grad():
            self.here = points.detach().requires_grad_()
            self.u = problem.nearest(self.here)

    def _leaves(self, d: Tensor) -> Tensor:
        """A d, ``(*batch, V)``."""
        parts = self.sign * d[..., self.which]
        (kept,) = torch.autograd.grad(self.u, self.here, parts, retain_graph=True)
        total = torch.zeros_like(d).index_add(-1, self.which, self.sign * (parts - kept))
        return torch.where(self.free, total, 0.0)

    @torch.no_grad()
    def project(self, g: Tensor) -> Tensor:
        """Π g = g − x, with A x = A g, by conjugate gradients: exact after at most V steps but for
        rounding."""
        g = torch.where(self.free, g, 0.0)
        x, r = torch.zeros_like(g), self._leaves(g)
        p, size = r, _dot(r, r)
        going = size > 0
        for _ in range(4 * g.shape[-1]):
            q = self._leaves(p)
            bent = _dot(p, q)
            # along p with less, A is zero but for rounding
            going = going & (size > 1e-26 * _dot(g, g)) & (bent > 1e-9 * _dot(p, p))
            if not bool(going.any()):
                break
            step = torch.where(going, size / bent, 0.0)
            x, r = x + step * p, r - step * q
            before, size = size, _dot(r, r)
            p = r + torch.where(going, size / before, 0.0) * p
        return g - x


class _Project(torch.autograd.Function):
    """Π of a face: linear and symmetric, hence the same in both directions and at every order."""

    @staticmethod
    def forward(moved: Tensor, face: _Face) -> Tensor:
        return face.project(moved)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, _Face], output: Tensor) -> None:
        ctx.face = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _Project.apply(g, ctx.face), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return _Project.apply(tangent, ctx.face)

    @staticmethod
    def vmap(info: Any, dims: tuple[int, None], moved: Tensor, face: _Face) -> tuple[Tensor, int]:
        return torch.stack([_Project.apply(m, face) for m in moved.unbind(dims[0])]), 0


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)
