"""Sums over the trees of a directed graph: the Matrix-Tree theorem, as torch functions.

Scores ``(*B, s, s)`` are of arcs ``[head, modifier]``; node 0 is the root, and an item has words
1..length. Z sums exp-scores over the trees that give every word one head (Tutte, 1948; for
dependency trees Koo et al. 2007, Smith and Smith 2007, McDonald and Satta 2007); ``key`` says
whether the root has a ``"single"`` modifier or ``"multi"``.

Z is a determinant, but log det loses all digits once scores spread over some forty nats, since
chances are then differences of nearly equal numbers. So everything here removes words one at a time
without a subtraction (see ``matrix_tree_cpu`` for the recurrence and for the single root). Only on
the GPU, for second derivatives and for more than 255 words, where n small steps are slow, and only
if scores spread over less than ``LU_SPREAD`` nats and no arc is forbidden, the inverse of the
Laplacian answers, in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from structmax import checks
from structmax.fence import fenced
from structmax.primitive import Omega, Primitive, Tensors, backend_for, register, to_front
from structmax.smoothing import Shannon

LU_SPREAD = 12.0  # nats: e^12 costs five digits of sixteen
MAX_SIDE_ON_GPU = 256  # rows of an item beyond which one program for it is slower than torch


def arcs_in_use(s: int, lengths: Tensor) -> Tensor:
    """Which arcs ``[head, modifier]`` lie within the length, ``(B, s, s)``."""
    at = torch.arange(s, device=lengths.device)
    inside = at <= lengths[:, None]
    used = (at[:, None] != at) & (at > 0)
    return used & inside[:, :, None] & inside[:, None, :]


def naive(theta: Tensor, lengths: Tensor, single: bool, gamma: float) -> Tensor:
    """A ``(B)`` in plain torch, in float64: words removed from the last to the first."""
    s = theta.shape[-1]
    plus = Shannon().max
    used = arcs_in_use(s, lengths)
    at = torch.arange(s, device=theta.device)
    padding = at > lengths[:, None]  # (B, s); what hangs from the root alone adds nothing
    w = torch.where(used, theta, 0.0).double() / gamma
    w = torch.where(used, w, -math.inf)
    w = torch.where(padding[:, None, :] & (at == 0)[:, None], 0.0, w)
    w = w.transpose(-1, -2)  # (B, modifier, head)
    late = ~padding & single  # root arcs that count, which are of order 1 in ε
    total = torch.where(padding[:, 0], w[:, 0, 0], 0.0)  # 0, and a function of the scores
    roots = torch.zeros_like(total)
    for k in range(s - 1, 0, -1):
        root, waits = w[:, k, 0], late[:, k]
        words = plus(w[:, k, 1:k]) if k > 1 else torch.full_like(root, -math.inf)
        forced = waits & (words == -math.inf)
        both = plus(torch.stack([words, root], -1))
        pivot = torch.where(waits & ~forced, words, both)
        total, roots = total + pivot, roots + forced
        share = w[:, k, :k] - torch.where(pivot == -math.inf, 0.0, pivot)[:, None]
        new = w[:, 1:k, k, None] + share[:, None]  # (B, k − 1, k)
        old = w[:, 1:k, :k]
        there, comes = late[:, 1:k], (waits & ~forced)[:, None]
        later = torch.where(old[..., 0] == -math.inf, comes, there & comes)
        later = torch.where(new[..., 0] == -math.inf, there, later)
        drop_old = torch.nn.functional.pad((there != later)[..., None], (0, k - 1))
        drop_new = torch.nn.functional.pad((comes != later)[..., None], (0, k - 1))
        pair = torch.where(drop_old, -math.inf, old), torch.where(drop_new, -math.inf, new)
        loop = at[1:k, None] == at[:k]
        rows = torch.where(loop, -math.inf, plus(torch.stack(pair, -1)))
        w = torch.nn.functional.pad(rows, (0, 0, 1, 0))  # row 0 is not looked at
        late = torch.nn.functional.pad(later, (1, 0))
    total = torch.where(roots > 1, -math.inf, total) if single else total
    return (gamma * total).to(theta.dtype)


class _Laplacian:
    """L with det L = Z·e^−shift, and its inverse; for scores of a small spread."""

    def __init__(self, theta: Tensor, lengths: Tensor, single: bool, gamma: float) -> None:
        s = theta.shape[-1]
        self.single, self.gamma = single, gamma
        used = arcs_in_use(s, lengths)
        w = torch.where(used, theta, -math.inf).double() / gamma
        top = w[:, 1:].amax(1) if single and s > 2 else w.amax(1)  # (B, s), of each modifier
        top = torch.where(top == -math.inf, w[:, 0], top)
        top = torch.where(top == -math.inf, 0.0, top)
        w = w - top[:, None]
        self.shift = top.sum(-1)
        if single:
            best = w[:, 0].amax(-1)
            w = torch.cat([w[:, :1] - best[:, None, None], w[:, 1:]], 1)
            self.shift = self.shift + best
        self.w = w.exp()
        self.padding = torch.arange(s, device=w.device) > lengths[:, None]
        self.matrix = self.of(self.w)
        self.matrix.diagonal(dim1=-2, dim2=-1)[self.padding[:, 1:]] = 1.0
        self.inverse = torch.linalg.inv(self.matrix)

    def of(self, w: Tensor) -> Tensor:
        """The matrix as a linear function of weights: (Koo et al., 2007), words only."""
        inner = w[:, 1:, 1:]
        if not self.single:
            return torch.diag_embed(w[:, :, 1:].sum(1)) - inner
        laplacian = torch.diag_embed(inner.sum(1)) - inner
        return torch.cat([w[:, :1, 1:], laplacian[:, 1:]], 1)

    def pull(self, b: Tensor) -> Tensor:
        """The transpose of ``of``: Σ b[m, h]·of(w)[h, m] as a function of w ``(B, s, s)``."""
        diagonal = b.diagonal(dim1=-2, dim2=-1)[:, None]
        root, inner = diagonal, diagonal - b.transpose(-1, -2)
        if self.single:
            root = b[:, None, :, 0]
            first = torch.arange(b.shape[-1], device=b.device) == 0
            to_first = torch.where(first, 0.0, diagonal)
            inner = to_first - torch.where(first[:, None], 0.0, b.transpose(-1, -2))
        return torch.nn.functional.pad(torch.cat([root, inner], 1), (1, 0))

    def value(self) -> Tensor:
        return self.gamma * (torch.linalg.slogdet(self.matrix)[1] + self.shift)

    def gradient(self) -> Tensor:
        return self.w * self.pull(self.inverse)

    def hvp(self, direction: Tensor) -> Tensor:
        dw = self.w * torch.where(self.w != 0, direction, 0.0).double() / self.gamma
        moved = -self.inverse @ self.of(dw) @ self.inverse
        return dw * self.pull(self.inverse) + self.w * self.pull(moved)


def _suits_lu(theta: Tensor, lengths: Tensor, gamma: float) -> bool:
    """Whether the scores spread so little, all arcs being there, that LU keeps enough digits."""
    if not theta.numel() or not checks.can_look():
        return False
    used = arcs_in_use(theta.shape[-1], lengths)
    top = torch.where(used, theta, -math.inf).amax((-1, -2))
    low = torch.where(used, theta, math.inf).amin((-1, -2))
    return bool(((top - low < LU_SPREAD * gamma) | (lengths == 0)).all())


def _arguments(scores: Tensors, constants: Tensors, key: str, omega: Omega):  # type: ignore[no-untyped-def]
    return scores[0], constants[0], key == "single", omega[1]


def _naive(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> Tensor:
    return naive(*_arguments(scores, constants, key, omega))


def _value(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> Tensor:
    given = theta, lengths, _, gamma = _arguments(scores, constants, key, omega)
    if backend_for(theta) == "gpu":
        if theta.shape[-1] <= MAX_SIDE_ON_GPU:
            from structmax.oracles import matrix_tree_gpu

            return matrix_tree_gpu.run(False, *given)[0]
        return (
            _Laplacian(*given).value() if _suits_lu(theta, lengths, gamma) else naive(*given)
        ).to(theta.dtype)
    from structmax.oracles import matrix_tree_cpu

    return matrix_tree_cpu.value(*given).to(theta.dtype)


def _gradient(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> list[Tensor]:
    given = theta, lengths, _, gamma = _arguments(scores, constants, key, omega)
    if backend_for(theta) == "gpu":
        if theta.shape[-1] <= MAX_SIDE_ON_GPU:
            from structmax.oracles import matrix_tree_gpu

            return matrix_tree_gpu.run(True, *given)
        if not _suits_lu(theta, lengths, gamma):
            return matrix_tree._naive_gradient(scores, constants, key, omega)
        laplacian = _Laplacian(*given)
        return [laplacian.value().to(theta.dtype), laplacian.gradient().to(theta.dtype)]
    from structmax.oracles import matrix_tree_cpu

    return [t.to(theta.dtype) for t in matrix_tree_cpu.gradient(*given)]


def _hvp(
    scores: Tensors, directions: Tensors, constants: Tensors, key: str, omega: Omega
) -> list[Tensor]:
    given = theta, lengths, single, gamma = _arguments(scores, constants, key, omega)
    if backend_for(theta) == "gpu":
        if not _suits_lu(theta, lengths, gamma):
            return matrix_tree._naive_hvp(scores, directions, constants, key, omega)
        return [_Laplacian(*given).hvp(directions[0]).to(theta.dtype)]
    from structmax.oracles import matrix_tree_cpu

    w = matrix_tree_cpu.hvp(theta, directions[0], lengths, single, gamma)
    return [w.to(theta.dtype)]


def _terms(scores: Tensors, constants: Tensors, key: str) -> Tensor:
    """An arc for each word."""
    return constants[0]


matrix_tree = Primitive(
    "matrix_tree",
    (2,),
    (0,),
    _value,
    _gradient,
    _hvp,
    _naive,
    lambda scores, key: [(0, scores[0].shape[-1] - 1)],
    terms=_terms,
)


def naive_sample(
    theta: Tensor, lengths: Tensor, uniform: Tensor, single: bool, gamma: float
) -> Tensor:
    """Heads ``(N, B, s−1)``: word by word, from its marginals given the heads before it."""
    code = Shannon(gamma).code
    draws = []
    for numbers in uniform:
        scores = theta.double()
        heads = []
        for m in range(1, theta.shape[-1]):
            key = "single" if single else "multi"
            _, mu = matrix_tree._naive_gradient([scores], [lengths], key, code)
            reached = mu[:, :, m].cumsum(-1)
            beyond = (reached > numbers[:, m - 1, None]) & (mu[:, :, m] > 0)
            last = torch.where(
                mu[:, :, m] > 0, torch.arange(theta.shape[-1], device="cpu"), 0
            ).amax(-1)
            head = torch.where(beyond.any(-1), beyond.to(torch.uint8).argmax(-1), last)
            heads.append(torch.where(m <= lengths, head, 0))
            other = torch.arange(theta.shape[-1], device="cpu") != head[:, None]
            column = torch.arange(theta.shape[-1], device="cpu") == m
            scores = torch.where(other[:, :, None] & column, -math.inf, scores)
        draws.append(torch.stack(heads, -1) if heads else lengths.new_zeros(len(theta), 0))
    return torch.stack(draws) if draws else lengths.new_zeros(uniform.shape, dtype=torch.int64)


@fenced([1], lambda scores, *others: [(0, scores.shape[-1] - 1)], lead=1, fill=0)
def _run_sample(
    scores: Tensor, lengths: Tensor, uniform: Tensor, single: bool, gamma: float
) -> Tensor:
    batch, s = scores.shape[:-2], scores.shape[-1]
    flat = scores.reshape(batch.numel(), s, s).cpu()
    numbers = uniform.reshape(len(uniform), batch.numel(), s - 1).cpu()
    if backend_for(scores) == "naive":
        run = naive_sample
    else:
        from structmax.oracles import matrix_tree_cpu

        run = matrix_tree_cpu.sample
    heads = run(flat, lengths.reshape(-1).cpu(), numbers, single, gamma)
    return heads.reshape(uniform.shape).to(scores.device)


sample = register(
    "tree_sample",
    "(Tensor scores, Tensor lengths, Tensor uniform, bool single, float gamma) -> Tensor",
    _run_sample,
    lambda scores, lengths, uniform, single, gamma: uniform.new_empty(
        uniform.shape, dtype=torch.int64
    ),
)
"""Heads ``(N, *B, s−1)`` drawn with ``uniform`` numbers of that shape.

It runs on the CPU: other tensors are copied there and back.
"""


def _mapped(info, in_dims, scores, lengths, uniform, *rest):  # type: ignore[no-untyped-def]
    scores, lengths = to_front([scores, lengths], in_dims[:2], info.batch_size)
    if in_dims[2] is None:
        uniform = uniform.unsqueeze(1).expand(-1, info.batch_size, *uniform.shape[1:])
    else:
        uniform = uniform.movedim(in_dims[2], 1)
    return sample(scores, lengths, uniform, *rest), 1


torch.library.register_vmap(sample, _mapped)
