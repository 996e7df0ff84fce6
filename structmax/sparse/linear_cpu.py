"""A compiled solution: lists of parts, the factor of the face, and the linear maps between them.

With C the counts of all parts of the active structures, derivatives need three maps: Cᵀ from
scores of parts to scores of structures, C from weights to expected counts, and the symmetric
Q = A⁻¹ − A⁻¹11ᵀA⁻¹/1ᵀA⁻¹1 of ``solve.py``, with A = UᵀU. Each costs O(K·parts of a structure)
or O(K²); the transposes of each other, they give derivatives of any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structmax.jit import kernel, run_chunks
from structmax.sparse.active_set_cpu import _dot, _subtract
from structmax.sparse.oracles_cpu import Found


@kernel
def _counts(
    low: int, high: int, found: Any, at: Any, vertices: Any, edges: Any, probs: Any
) -> None:
    """Counts of parts; unused slots repeat the first."""
    d, K = vertices.shape[2], vertices.shape[1]
    for b in range(low, high):
        vertices[b], edges[b] = 0.0, 0.0
        probs[b] = 0.0 if found.count[b] > 0 else np.nan
        for v in range(at[b, 0], at[b + 1, 0]):
            slot = found.place[v]
            probs[b, slot] = found.probs[v]
            for i in range(found.sizes[v]):
                part = found.rows[v, i]
                if part < d:
                    vertices[b, slot, part] += 1.0
                else:
                    edges[b, slot, part - d] += 1.0
        for slot in range(found.count[b], K):
            vertices[b, slot], edges[b, slot] = vertices[b, 0], edges[b, 0]


@kernel
def _to_structures(low: int, high: int, found: Any, at: Any, x: Any, out: Any) -> None:
    """out (B, K) = Cᵀx for x (B, D)."""
    for b in range(low, high):
        out[b] = 0.0
        for v in range(at[b, 0], at[b + 1, 0]):
            total = 0.0
            for i in range(found.sizes[v]):
                total += x[b, found.rows[v, i]]
            out[b, found.place[v]] = total


@kernel
def _to_parts(low: int, high: int, found: Any, at: Any, x: Any, out: Any) -> None:
    """out (B, D) = Cx for x (B, K)."""
    for b in range(low, high):
        out[b] = 0.0 if found.count[b] > 0 else np.nan
        for v in range(at[b, 0], at[b + 1, 0]):
            weight = x[b, found.place[v]]
            for i in range(found.sizes[v]):
                out[b, found.rows[v, i]] += weight


@kernel
def _face(low: int, high: int, found: Any, at: Any, x: Any, out: Any) -> None:
    """out (B, K) = Qx for x (B, K)."""
    for b in range(low, high):
        k, (first, entry) = found.count[b], at[b]
        out[b] = 0.0 if k > 0 else np.nan
        place, ones = found.place[first : first + k], found.ones[first : first + k]
        y, U = np.empty(k), found.factor[entry : entry + k * (k + 1) // 2]
        for v in range(k):
            y[v] = x[b, place[v]]
        row = 0
        for v in range(k):
            y[v] /= U[row]
            _subtract(y[v], U[row + 1 : row + k - v], y[v + 1 :])
            row += k - v
        _subtract(_dot(y, ones) / _dot(ones, ones), ones, y)
        for v in range(k - 1, -1, -1):
            row -= k - v
            y[v] = (y[v] - _dot(U[row + 1 : row + k - v], y[v + 1 :])) / U[row]
        for v in range(k):
            out[b, place[v]] = y[v]


class Face:
    """The active structures of a batch of items, given in chunks of them."""

    def __init__(self, chunks: dict[int, Found], sizes: tuple[int, int]) -> None:
        """``sizes``: how many primary and additional parts there are."""
        in_order = [chunks[low] for low in sorted(chunks)]
        self.found = Found(*map(np.concatenate, zip(*in_order, strict=True)))
        count = self.found.count
        self.items, self.slots = len(count), int(count.max(initial=1))
        self.sizes, self.at = sizes, np.zeros((self.items + 1, 2), np.int64)
        np.cumsum(np.stack([count, count * (count + 1) // 2], -1), 0, out=self.at[1:])

    def counts(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Counts of primary ``(B, K, d)`` and of additional parts ``(B, K, e)`` in a dtype, and
        the weights ``(B, K)``."""
        kind = np.float32 if dtype == torch.float32 else np.float64
        shape = self.items, self.slots
        arrays = [np.empty((*shape, size), kind) for size in self.sizes]
        probs = np.empty(shape)
        self._run(_counts, *arrays, probs)
        vertices, edges = map(torch.from_numpy, arrays)
        return vertices, edges, torch.from_numpy(probs)

    def times(self, name: str, x: Tensor) -> Tensor:
        """A linear map, by name: ``"structures"``, ``"parts"`` or ``"face"``."""
        function, width = {
            "structures": (_to_structures, self.slots),
            "parts": (_to_parts, sum(self.sizes)),
            "face": (_face, self.slots),
        }[name]
        out = np.empty((self.items, width))
        self._run(function, x.detach().contiguous().numpy(), out)
        return torch.from_numpy(out)

    def _run(self, function: Any, *arrays: Any) -> None:
        def task(low: int, high: int) -> None:
            function(low, high, self.found, self.at, *arrays)

        work = self.slots * (self.slots + self.found.rows.shape[1])
        run_chunks(task, self.items, work, max(2, -(-self.items // torch.get_num_threads())))

    def attach(
        self, probs: Tensor, theta: Sequence[Tensor], penalize_all: bool
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """Weights ``(B, K)``, expected counts of each kind of part and the value ``(B)``, with
        their derivatives in the scores θ of each kind, ``(B, *)``."""
        c = _Times.apply(self, "structures", torch.cat(list(theta), -1))
        p = _Weights.apply(self, c, probs)
        means = _Times.apply(self, "parts", p)
        penalised = means if penalize_all else means[:, : self.sizes[0]]
        value = (c * p).sum(-1) - penalised.square().sum(-1) / 2
        return p, list(means.split([t.shape[-1] for t in theta], -1)), value


_TRANSPOSED = {"structures": "parts", "parts": "structures", "face": "face"}


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


class _Weights(torch.autograd.Function):
    """The weights of the maximum as a function of the scores of the active structures."""

    @staticmethod
    def forward(ctx: Any, face: Face, c: Tensor, probs: Tensor) -> Tensor:
        ctx.face = face
        return probs.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, _Times.apply(ctx.face, "face", grad), None

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, probs: None) -> Tensor:
        return _Times.apply(ctx.face, "face", tangent)
