"""How the factors of a graph come to an agreement: by splitting, or by passing messages."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from structmax.sparse.factors import Factor

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

    def __init__(self, theta: Tensor, factors: list[Factor], curvature: float) -> None:
        self.theta, self.factors, self.curvature = theta, factors, curvature
        device = theta.device
        none = torch.zeros(0, dtype=torch.int64, device=device)
        ids = torch.cat([none, *[f.ids.to(device) for f in factors]])
        self.negated = ids < 0
        self.which = torch.where(self.negated, ~ids, ids)
        self.degree = torch.bincount(self.which, minlength=theta.shape[-1]).to(theta.dtype)
        self.forbidden = theta.detach() == -math.inf
        self.off = self.forbidden[..., self.which]

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
        free = mu.clamp(0, 1) if self.curvature > 0 else (theta > 0).to(mu)
        mu = torch.where(self.degree > 0, mu, free)
        return torch.where(self.forbidden, 0.0, mu)

    def step(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The next y, what the factors say and what the variables say, each ``(*batch, T)``."""
        v = self._turned(self.consensus(y)[..., self.which])
        points = torch.where(self.off, -math.inf, 2 * v - y)
        pairs = zip(self.factors, self._each(points), strict=True)
        u = torch.cat([y[..., :0], *[factor.nearest(x).to(y) for factor, x in pairs]], -1)
        return y + u - v, u, v

    def solve(self, max_iter: int, tol: float) -> tuple[Tensor, Tensor, int]:
        """y at rest, the residual ``(*batch)`` and the number of steps."""
        y = self.theta.new_zeros(*self.theta.shape[:-1], len(self.which))
        residual = self.theta.new_zeros(self.theta.shape[:-1])
        if not self.factors:
            return y, residual, 0
        before, count = torch.full_like(y, math.inf), 0
        while count < max_iter:
            y, u, v = self.step(y)
            count += 1
            residual = torch.maximum((u - v).abs().amax(-1), (v - before).abs().amax(-1))
            before = v
            if bool((residual <= tol).all()):
                break
        return y, residual, count

    def attach(self, y: Tensor, max_iter: int, tol: float) -> Tensor:
        """The same y, with the gradient of the fixed point in every score.

        With J the Jacobian of a step in y, g becomes (I − Jᵀ)⁻¹ g, by repeating w ← g + Jᵀ w.
        """
        following, _, _ = self.step(y.detach())
        if not following.requires_grad:
            return y
        here = y.detach().requires_grad_()
        again, _, _ = self.step(here)
        return _FixedPoint.apply(following, again, here, max_iter, tol)

    def propagate(self, rounds: int, damping: float, tol: float, dtype: torch.dtype) -> GraphResult:
        """Beliefs after so many rounds of messages, as log-odds in both directions."""
        from structmax.sparse.factor_graph import GraphResult

        sign = torch.where(self.negated, -1.0, 1.0).to(self.theta)
        theta = torch.where(self.forbidden, 0.0, self.theta)
        messages = theta.new_zeros(*theta.shape[:-1], len(self.which))
        moved, count = theta.new_zeros(theta.shape[:-1]), 0
        while self.factors and count < rounds:
            count += 1
            total = theta.index_add(-1, self.which, sign * messages)
            incoming = sign * total[..., self.which] - messages
            scores = torch.where(self.off, -math.inf, incoming)
            pairs = zip(self.factors, self._each(scores), strict=True)
            p = torch.cat([factor.marginals(x) for factor, x in pairs], -1).double()
            new = _log_odds(p) - incoming
            new = torch.where(self.off, 0.0, new)
            new = damping * messages + (1 - damping) * new
            moved = (new - messages).detach().abs().amax(-1)
            messages = new
            if bool((moved <= tol).all()):
                break
        total = theta.index_add(-1, self.which, sign * messages)
        beliefs = torch.where(self.forbidden, 0.0, total.sigmoid())
        return GraphResult(beliefs.to(dtype), moved, count)


class _FixedPoint(torch.autograd.Function):
    """y as it is; what flows back is solved for through a second graph, ``here`` to ``again``."""

    @staticmethod
    def forward(
        ctx: Any, following: Tensor, again: Tensor, here: Tensor, max_iter: int, tol: float
    ) -> Tensor:
        ctx.again, ctx.here, ctx.limits = again, here, (max_iter, tol)
        return following.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        max_iter, tol = ctx.limits
        w = g
        for _ in range(max_iter):
            (back,) = torch.autograd.grad(ctx.again, ctx.here, w, retain_graph=True)
            before, w = w, g + back
            if bool((w - before).abs().amax() <= tol * g.abs().amax()):
                break
        return w, None, None, None, None


def _log_odds(p: Tensor) -> Tensor:
    """log p/(1 − p), finite where p is 0 or 1."""
    least = 1e-300
    return p.clamp(min=least).log() - (1 - p).clamp(min=1e-17).log()
