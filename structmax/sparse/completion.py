"""The rest of a face: directions that derivatives need and weights do not show.

The Jacobian of SparseMAP projects onto the directions within the *optimal face*, the hull of all
structures that are best at the gradient θ − μ. The weights of the structures that a solver collects
tend to fall off geometrically: of a face of many dimensions it meets those above its tolerance, and
the hull of these is smaller. μ does not notice, but derivatives within the smaller hull would be
too short, by half for flat scores of trees of 20 words.

Nor do scores with ties need many structures: of four equal ones, a pair and the other two make the
mean of all pairs.

So the missing structures are looked for: best ones at θ − μ + εr, for random directions r at right
angles to the hull so far. Those that are as good as the active ones at θ − μ itself, up to
rounding, and lie outside the hull belong to the face. (One that is better shows that the solver was
stopped before it was done.) It is complete when no r and −r of a round find one: were it not,
almost every r would. Where all weights are well above 0, one r is tried first.

With rows e of D parts that are orthonormal in the penalised ones and span the directions of the
face, the Jacobian in all scores is EᵀE: along a move Eᵀa of the counts, ⟨θ, Eᵀa⟩ − ½‖μ + a‖² is
largest where a has moved by E dθ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from structmax.sparse.result import Solution
from structmax.sparse.support import Oracle, dot

SMALL = 3e-7  # an item with a weight below this has most likely not met its whole face
STEP, SLACK = 1e-6, 1e-7  # ε, and how much worse a structure of the face may seem
OUTSIDE = 1e-8  # a squared distance to the hull, relative to the size, that is more than rounding
FIRST, MOST = 2, 8  # directions of the first round and of later ones; each with both signs
ROOM = 1 << 28  # bytes of counts that are worked on at once


def complete(
    oracle: Oracle, theta: Tensor, solution: Solution, width: int, at_once: bool
) -> tuple[Tensor, Tensor] | None:
    """Items ``(b)`` whose face has more directions than the active structures show, and the rows E
    of all of these, ``(b, d, D)``, zeros where an item has fewer. None if there is no such item.

    θ is ``(B, D)``, of which ``width`` parts are penalised. In the solution the slots that are not
    used come last. ``at_once``: whether the oracle takes an item several times in one batch. Where
    no call of it is left, a face stays as far as it is known.
    """
    vertices, edges, probs = solution.vertices, solution.edges, solution.probs
    least = torch.where(probs > 0, probs, torch.inf).amin(-1)
    size = max(1, ROOM // (8 * probs.shape[1] * theta.shape[1]))
    items, rows = [], []
    for some in (~probs.isnan().any(-1)).nonzero().squeeze(-1).split(size):
        if oracle.left < 2:
            break
        counts = torch.cat([vertices[some].double(), edges[some].double()], -1)
        inverse = None if solution.inverse is None else solution.inverse[some]
        more = _shows_more(oracle.keep(some), theta[some], counts, probs[some], inverse, width)
        suspects = (more | (least[some] < SMALL)).nonzero().squeeze(-1)
        at = some[suspects]
        if len(at):
            face = _Face(oracle.keep(at), theta[at], counts[suspects], probs[at], width, at_once)
            known = face.rows.shape[1]
            face.complete()
            found = face.rows[:, known:].any(-1).any(-1)
            items.append(at[found])
            rows.append(face.rows[found])
    if not any(map(len, items)):
        return None
    most = max(r.shape[1] for r in rows)
    padded = [torch.nn.functional.pad(r, (0, 0, 0, most - r.shape[1])) for r in rows]
    return torch.cat(items), torch.cat(padded)


def _shows_more(
    oracle: Oracle, theta: Tensor, counts: Tensor, probs: Tensor, W: Tensor | None, width: int
) -> Tensor:
    """Whether one direction shows a structure of an item's face outside the hull, ``(b)``.

    By the inverse W of A = MᵀM + 11ᵀ, which most solvers have: x − MQMᵀx is at right angles to the
    hull, and the squared distance of z from it is that of (z, 1) from the span of (M; 1ᵀ).
    """
    active, own = (probs > 0).to(theta.dtype), counts[..., :width]
    if W is None:
        inside = (active[:, :, None] * active[:, None]) > 0
        one = torch.eye(probs.shape[1], dtype=theta.dtype, device=theta.device)
        factor, _ = torch.linalg.cholesky_ex(torch.where(inside, own @ own.mT + 1, one))
        W = torch.where(inside, torch.cholesky_inverse(factor), 0.0)
    mu = (probs[:, None] @ counts).squeeze(1)
    gradient = theta.clone()
    gradient[:, :width] -= mu[:, :width]
    known = gradient.abs() < torch.inf
    size = torch.where(mu != 0, gradient, 0.0).abs().amax(-1)  # elsewhere may be anything
    random = torch.Generator(theta.device).manual_seed(1)
    x = torch.zeros_like(theta[:, :width]).normal_(generator=random).mul_(known[:, :width])
    w = W @ active[..., None]
    y = W @ (own @ x[..., None])
    y = y - w * (y.sum(1, keepdim=True) / w.sum(1, keepdim=True))
    r = (x - (y.mT @ own).squeeze(1)) * known[:, :width]
    found = torch.zeros_like(size, dtype=torch.bool)
    for sign in (1.0, -1.0):
        scores = gradient.clone()
        scores[:, :width] += sign * (STEP + 1e-9 * size)[:, None] * r
        z = oracle(scores)[1]
        worse = dot(gradient, mu) - dot(gradient, z)
        length = z[:, :width].square().sum(-1) + 1
        b = (own @ z[:, :width, None] + 1) * active[..., None]
        apart = length - (b.mT @ (W @ b)).squeeze((1, 2))
        found |= (worse.abs() <= SLACK + 1e-10 * size) & (apart > OUTSIDE * length)
    return found


class _Face:
    """b items: what is known of their faces."""

    def __init__(
        self,
        oracle: Oracle,
        theta: Tensor,
        counts: Tensor,
        probs: Tensor,
        width: int,
        at_once: bool,
    ) -> None:
        self.oracle, self.width, self.at_once = oracle, width, at_once
        self.first = counts[:, 0]
        mu = (probs[:, None] @ counts).squeeze(1)
        self.gradient = theta.clone()
        self.gradient[:, :width] -= mu[:, :width]
        self.best = dot(self.gradient, mu)
        known = self.gradient.abs() < torch.inf
        self.free = known[:, None, :width]
        size = torch.where(mu != 0, self.gradient, 0.0).abs().amax(-1)
        self.step, self.slack = STEP + 1e-9 * size, SLACK + 1e-10 * size
        self.rows = counts[:, 1:] - counts[:, :1]  # zeros for slots that are not used
        one = (probs[:, 1:] == 0).double().diag_embed()
        for _ in range(2):  # the second time for what the first has rounded
            own = self.rows[..., :width]
            factor, _ = torch.linalg.cholesky_ex(own @ own.mT + one)
            self.rows = torch.linalg.solve_triangular(factor, self.rows, upper=False)
        self.random = torch.Generator(theta.device).manual_seed(0)

    def complete(self) -> None:
        """Looks for more directions, round after round, where the last round has found some."""
        items, count = torch.arange(len(self.first), device=self.first.device), FIRST
        while len(items) and (self.at_once or self.oracle.left >= 2):
            count = count if self.at_once else int(min(count, self.oracle.left // 2))
            found = self.look(items, count)
            more = torch.zeros_like(self.first[:, None]).repeat(1, found.shape[1], 1)
            more[items] = found
            self.rows = torch.cat([self.rows, more], 1)
            items, count = items[found.any(-1).any(-1)], MOST

    def look(self, items: Tensor, count: int) -> Tensor:
        """New rows of some items, at most ``2 * count``, zeros where nothing was found."""
        width, rows, free = self.width, self.rows[items], self.free[items]

        def outside(x: Tensor) -> Tensor:
            """What of ``(b, R, D)`` is at right angles to the rows, in the penalised parts."""
            return x - (x[..., :width] @ rows[..., :width].mT) @ rows

        x = torch.zeros_like(self.first[items, None]).repeat(1, count, 1)
        x[..., :width].normal_(generator=self.random).mul_(free)
        r = outside(x)[..., :width] * free
        scores = self.gradient[items, None].repeat(1, 2 * count, 1)
        scores[..., :width] += self.step[items, None, None] * torch.cat([r, -r], 1)
        z = self.ask(items, scores)
        worse = self.best[items, None] - dot(self.gradient[items, None], z)
        fits = worse.abs() <= self.slack[items, None]
        least = OUTSIDE * (1 + z[..., :width].square().sum(-1))
        new = outside(outside(z - self.first[items, None]))
        own = new[..., :width] * fits[..., None]
        # squared lengths along the axes of what is new
        size, basis = torch.linalg.eigh(own @ own.mT)
        joins = size > least.amax(-1, keepdim=True)
        scale = torch.where(joins, size, torch.inf).rsqrt()
        found = (basis * scale[:, None] * fits[..., None]).mT @ new
        return found.flip(1)[:, : int(joins.sum(-1).amax())]

    def ask(self, items: Tensor, scores: Tensor) -> Tensor:
        """Best structures at scores ``(b, R, D)``."""
        b, count, parts = scores.shape
        if self.at_once:
            oracle = self.oracle.keep(items.repeat_interleave(count))
            return oracle(scores.reshape(b * count, parts))[1].reshape(scores.shape)
        oracle = self.oracle.keep(items)
        return torch.stack([oracle(x)[1] for x in scores.unbind(1)], 1)
