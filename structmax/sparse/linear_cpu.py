"""A compiled solution: lists of parts, the factor of the face, and the linear maps between them.

With C the counts of all parts of the active structures, derivatives of their weights need Cᵀ, from
scores of parts to scores of structures, and the symmetric Q = A⁻¹ − A⁻¹11ᵀA⁻¹/1ᵀA⁻¹1 of
``solve.py``, with A = UᵀU; those of the expected counts need CQCᵀ, over all structures that span
the face. Each costs O(K·parts of a structure) or O(K²); with the transpose C of Cᵀ, they give
derivatives of any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structmax.jit import array, kernel, run_chunks
from structmax.sparse.active_set_cpu import _dot, _subtract
from structmax.sparse.oracles_cpu import Found


@kernel
def _counts(
    low: int, high: int, found: Any, at: Any, vertices: Any, edges: Any, probs: Any, means: Any
) -> None:
    """Counts of parts, weights and expected counts; unused slots repeat the first."""
    d, K = vertices.shape[2], vertices.shape[1]
    for b in range(low, high):
        nothing, first = 0.0 if found.count[b] > 0 else np.nan, at[b, 0]
        vertices[b], edges[b], probs[b], means[b] = 0.0, 0.0, nothing, nothing
        for v in range(first, first + found.active[b]):
            slot, weight = found.place[v], found.probs[v]
            probs[b, slot] = weight
            for i in range(found.sizes[v]):
                part = found.rows[v, i]
                means[b, part] += weight
                if part < d:
                    vertices[b, slot, part] += 1.0
                else:
                    edges[b, slot, part - d] += 1.0
        for slot in range(found.active[b], K):
            vertices[b, slot], edges[b, slot] = vertices[b, 0], edges[b, 0]


@kernel
def _to_structures(low: int, high: int, found: Any, at: Any, x: Any, out: Any) -> None:
    """out (B, K) = Cᵀx for x (B, D)."""
    for b in range(low, high):
        out[b], first = 0.0, at[b, 0]
        for v in range(first, first + found.active[b]):
            out[b, found.place[v]] = _total(found.rows[v, : found.sizes[v]], x[b])


@kernel
def _to_parts(low: int, high: int, found: Any, at: Any, x: Any, out: Any) -> None:
    """out (B, D) = Cx for x (B, K)."""
    for b in range(low, high):
        out[b], first = 0.0 if found.count[b] > 0 else np.nan, at[b, 0]
        for v in range(first, first + found.active[b]):
            _add(x[b, found.place[v]], found.rows[v, : found.sizes[v]], out[b])


@kernel(fast=True, inner=True)
def _total(parts: Any, x: Any) -> float:
    total = 0.0
    for i in range(len(parts)):
        total += x[parts[i]]
    return total


@kernel(inner=True)
def _add(weight: float, parts: Any, to: Any) -> None:
    for i in range(len(parts)):
        to[parts[i]] += weight


@kernel(inner=True)
def _times_q(y: Any, U: Any, ones: Any, k: int) -> None:
    """y becomes Qy. U is that of k structures, row by row, of which y has the first."""
    size, row = len(y), 0
    ones = ones[:size]
    for v in range(size):
        y[v] /= U[row]
        _subtract(y[v], U[row + 1 : row + size - v], y[v + 1 :])
        row += k - v
    _subtract(_dot(y, ones) / _dot(ones, ones), ones, y)
    for v in range(size - 1, -1, -1):
        row -= k - v
        y[v] = (y[v] - _dot(U[row + 1 : row + size - v], y[v + 1 :])) / U[row]


@kernel
def _face(low: int, high: int, found: Any, at: Any, x: Any, out: Any) -> None:
    """out (B, K) = Qx for x (B, K)."""
    for b in range(low, high):
        k, size, (first, entry) = found.count[b], found.active[b], at[b]
        out[b] = 0.0 if k > 0 else np.nan
        y, place = np.empty(size), found.place[first:]
        for v in range(size):
            y[v] = x[b, place[v]]
        _times_q(y, found.factor[entry:], found.ones[first:], k)
        for v in range(size):
            out[b, place[v]] = y[v]


@kernel
def _hull(low: int, high: int, found: Any, at: Any, x: Any, out: Any) -> None:
    """out (B, D) = CQCᵀx for x (B, D), of all structures that span the face."""
    for b in range(low, high):
        k, (first, entry) = found.count[b], at[b]
        out[b], y = 0.0 if k > 0 else np.nan, np.empty(k)
        rows, sizes = found.rows[first:], found.sizes[first:]
        for v in range(k):
            y[v] = _total(rows[v, : sizes[v]], x[b])
        _times_q(y, found.factor[entry:], found.ones[first:], k)
        for v in range(k):
            _add(y[v], rows[v, : sizes[v]], out[b])


class Face:
    """The structures of a batch of items, given in chunks of them."""

    def __init__(self, chunks: dict[int, Found], sizes: tuple[int, int]) -> None:
        """``sizes``: how many primary and additional parts there are."""
        in_order = [chunks[low] for low in sorted(chunks)]
        self.found = Found(*map(np.concatenate, zip(*in_order, strict=True)))
        count = self.found.count
        self.items, self.slots = len(count), int(self.found.active.max(initial=1))
        self.sizes, self.at = sizes, np.zeros((self.items + 1, 2), np.int64)
        np.cumsum(np.stack([count, count * (count + 1) // 2], -1), 0, out=self.at[1:])
        self.probs = np.empty((self.items, self.slots))
        self.means = np.empty((self.items, sum(sizes)))

    def counts(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Counts of primary ``(B, K, d)`` and of additional parts ``(B, K, e)`` in a dtype, and
        the weights ``(B, K)``."""
        kind = np.float32 if dtype == torch.float32 else np.float64
        arrays = [np.empty((*self.probs.shape, size), kind) for size in self.sizes]
        self._run(_counts, *arrays, self.probs, self.means)
        vertices, edges = map(torch.from_numpy, arrays)
        return vertices, edges, torch.from_numpy(self.probs)

    def times(self, name: str, x: Tensor) -> Tensor:
        """A linear map, by name: ``"structures"``, ``"parts"``, ``"face"`` or ``"hull"``."""
        function, like = {
            "structures": (_to_structures, self.probs),
            "parts": (_to_parts, self.means),
            "face": (_face, self.probs),
            "hull": (_hull, self.means),
        }[name]
        out = np.empty_like(like)
        self._run(function, array(x), out)
        return torch.from_numpy(out)

    def _run(self, function: Any, *arrays: Any) -> None:
        def task(low: int, high: int) -> None:
            function(low, high, self.found, self.at, *arrays)

        work = self.slots * (self.slots + self.found.rows.shape[1])
        run_chunks(task, self.items, work, max(2, -(-self.items // torch.get_num_threads())))

    def attach(self, theta: Sequence[Tensor]) -> tuple[Tensor, list[Tensor], Tensor]:
        """Weights ``(B, K)``, expected counts of each kind of part and the value ``(B)``, with
        their derivatives in the scores θ of each kind, ``(B, *)``."""
        whole = torch.cat(list(theta), -1)
        p = _Known.apply(self, self.probs, ("structures", "face"), whole)
        means = _Known.apply(self, self.means, ("hull",), whole)
        value = _Value.apply(self, whole, means)
        return p, list(means.split([t.shape[-1] for t in theta], -1)), value

    def met(self) -> Tensor:
        """Which parts some structure of the face has, ``(B, D)``."""
        found, met = self.found, np.zeros(self.means.shape, np.bool_)
        items = np.repeat(np.arange(self.items), found.count)
        used = np.arange(found.rows.shape[1]) < found.sizes[:, None]
        met[np.broadcast_to(items[:, None], used.shape)[used], found.rows[used]] = True
        return torch.from_numpy(met)

    def more(self) -> tuple[Tensor, Tensor] | None:
        """What ``completion.complete`` returns: rows E with EᵀE = CQCᵀ of the items whose face has
        more structures than those that are active; E = (I − yyᵀ/yᵀy)U⁻ᵀCᵀ with y = U⁻ᵀ1."""
        found = self.found
        items = np.flatnonzero(found.count > found.active)
        if not len(items):
            return None
        out = np.zeros((len(items), found.count[items].max(), self.means.shape[1]))
        for b, E in zip(items, out, strict=True):
            k, (first, entry) = found.count[b], self.at[b]
            counts, U = np.zeros((k, out.shape[2])), np.zeros((k, k))
            for v in range(k):
                np.add.at(counts[v], found.rows[first + v, : found.sizes[first + v]], 1.0)
            U[np.triu_indices(k)] = found.factor[entry : entry + k * (k + 1) // 2]
            y = found.ones[first : first + k]
            rows = np.linalg.solve(U.T, counts)
            E[:k] = rows - np.outer(y, y @ rows) / (y @ y)
        return torch.from_numpy(items), torch.from_numpy(out)


_TRANSPOSED = {"structures": "parts", "parts": "structures", "face": "face", "hull": "hull"}


class _Times(torch.autograd.Function):
    """A linear map of a face; its derivative is the transposed one."""

    @staticmethod
    def forward(ctx: Any, face: Face, name: str, x: Tensor) -> Tensor:
        ctx.face, ctx.name = face, name
        return face.times(name, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, _Times.apply(ctx.face, _TRANSPOSED[ctx.name], grad)

    @staticmethod
    def jvp(ctx: Any, _: None, name: None, tangent: Tensor) -> Tensor:
        return _Times.apply(ctx.face, ctx.name, tangent)


class _Known(torch.autograd.Function):
    """A known function of the scores of parts; its derivative is a product of linear maps."""

    @staticmethod
    def forward(ctx: Any, face: Face, known: Any, maps: tuple[str, ...], theta: Tensor) -> Tensor:
        ctx.face, ctx.maps = face, maps
        return torch.from_numpy(known)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        for name in reversed(ctx.maps):
            grad = _Times.apply(ctx.face, _TRANSPOSED[name], grad)
        return None, None, None, grad

    @staticmethod
    def jvp(ctx: Any, _: None, known: None, maps: None, tangent: Tensor) -> Tensor:
        for name in ctx.maps:
            tangent = _Times.apply(ctx.face, name, tangent)
        return tangent


class _Value(torch.autograd.Function):
    """The objective, of which the expected counts are the gradient."""

    @staticmethod
    def forward(ctx: Any, face: Face, theta: Tensor, means: Tensor) -> Tensor:
        ctx.face = face
        ctx.save_for_backward(means)
        ctx.save_for_forward(means)
        return torch.from_numpy(face.found.value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (means,) = ctx.saved_tensors
        return None, grad[:, None] * means, None

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, means: Any) -> Tensor:
        (mean,) = ctx.saved_tensors
        return (torch.where(ctx.face.met(), tangent, 0.0) * mean).sum(-1)
