"""The Fenchel-Young loss of entmax: cross-entropy at α = 1, the sparsemax loss at α = 2."""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from structmax.checks import can_look, holds_integers, index
from structmax.maps.entmax import _map as entmax
from structmax.maps.entmax import check_alpha
from structmax.maps.recipe import check_scores, keep, spread
from structmax.maps.smoothed_max import tsallis
from structmax.maps.smoothed_max import value as value_of
from structmax.primitive import apply, backend_for, flatten_batch, is_plain, is_transforming


def entmax_loss(
    scores: Tensor,
    target: Tensor,
    alpha: float | Tensor = 1.5,
    ignore_index: int = -100,
    reduction: str = "mean",
    mask: Tensor | None = None,
) -> Tensor:
    """L(θ, y) = maxΩ(θ) + Ω(y) − ⟨θ, y⟩ with Ω of α-entmax; its gradient is entmax(θ) − y.

    It is at least 0, and 0 exactly where entmax(θ) = y (Blondel, Martins & Niculae, "Learning with
    Fenchel-Young losses", JMLR 2020; Peters, Niculae & Martins, ACL 2019). For α > 1 that happens
    at finite scores: once the target leads by a margin of 1/(α−1), the loss is over.

    - ``scores (*B, n)``; −inf forbids an entry, and ``mask`` (True = keep) does.
    - ``target`` is ``(*B)`` integers, or ``(*B, n)`` distributions.
    - ``alpha`` is a number, or a tensor that broadcasts to ``(*B, 1)`` and receives a gradient.
    - Rows whose target is ``ignore_index`` have loss 0, no gradient, and do not count in the mean;
      as in ``torch.nn.functional.cross_entropy``, the mean of no rows is NaN.
    - A target that is forbidden has loss +inf, without a gradient.
    - ``reduction`` is ``"mean"``, ``"sum"`` or ``"none"``. Of half precision scores the loss is
      float32.

    >>> scores = torch.tensor([[-2.0, 0.0, 0.5], [3.0, 0.0, 0.5]], requires_grad=True)
    >>> loss = entmax_loss(scores, torch.tensor([1, 0]), reduction="none")
    >>> loss
    tensor([0.6844, 0.0000], grad_fn=...)
    >>> loss.sum().backward()
    >>> scores.grad  # p − y
    tensor([[ 0.0000, -0.6740,  0.6740],
            [ 0.0000,  0.0000,  0.0000]])

    Cross-entropy, and the sparsemax loss against a distribution:

    >>> entmax_loss(scores.detach(), torch.tensor([1, 0]), alpha=1)
    tensor(0.5739)
    >>> entmax_loss(scores[0].detach(), torch.tensor([0.0, 0.25, 0.75]), alpha=2)
    tensor(0.)
    """
    check_scores("entmax_loss", scores, -1)
    soft = isinstance(target, Tensor) and target.is_floating_point()
    if not soft and not holds_integers(target):
        got = target.dtype if isinstance(target, Tensor) else type(target).__name__
        raise ValueError(
            "entmax_loss: target must be a tensor of classes (integers) or of distributions, got "
            f"{got}."
        )
    ignore_index = index("entmax_loss", "ignore_index", ignore_index)
    _check(scores, target, soft, ignore_index, reduction)
    check_alpha("entmax_loss", alpha)
    if not isinstance(alpha, Tensor) and not soft and _has_kernel(scores, target, alpha):
        kept = scores if mask is None else keep("entmax_loss", scores, mask)
        return apply(Fused, kept, target, float(alpha), ignore_index, reduction)[0]
    work = scores if scores.dtype.itemsize >= 4 else scores.float()
    if mask is not None:
        work = keep("entmax_loss", work, mask)
    ignored = torch.zeros_like(target[..., 0], dtype=torch.bool) if soft else target == ignore_index
    work = torch.where(ignored.unsqueeze(-1), 0.0, work)  # they may hold anything

    peak = work.detach().amax(-1, keepdim=True)  # the loss does not see it; rounding would
    work = work - torch.where(peak.abs() < math.inf, peak, 0.0)
    endless = work == math.inf
    exponent = spread("entmax_loss", "alpha", alpha, work, -1, "row")
    given = isinstance(alpha, Tensor)
    p = entmax.rows(work, [exponent] if given else [], [] if given else [float(alpha)])
    value = value_of(work, p, exponent, 1.0)

    forbidden = work == -math.inf
    allowed = torch.where(forbidden, 0.0, work)
    if soft:
        y = target.to(work.dtype)
        value = value + (tsallis(y, exponent) - y * allowed).sum(-1)
        impossible = (forbidden & (y > 0)).any(-1) | forbidden.all(-1)
        impossible |= endless.any(-1) & ~(endless & (y > 0)).any(-1)
    else:
        known = ignored | ((target >= 0) & (target < work.shape[-1]))  # else NaN
        place = torch.where(known & ~ignored, target, 0).long().unsqueeze(-1)
        value = value - allowed.gather(-1, place).squeeze(-1)
        value = value * torch.where(known, 1.0, math.nan).to(value.dtype)
        impossible = known & forbidden.gather(-1, place).squeeze(-1)
        impossible |= endless.any(-1) & ~endless.gather(-1, place).squeeze(-1)
    value = value + (value.clamp(min=0) - value).detach()  # rounding; its gradient stays
    loss = torch.where(impossible & ~work.isnan().any(-1), math.inf, value)
    loss = torch.where(ignored, 0.0, loss)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / (~ignored).sum()


def _has_kernel(scores: Tensor, target: Tensor, alpha: float) -> bool:
    """Whether one kernel can answer: there is one, and nothing but autograd looks on."""
    if not is_plain((scores, target)) or not scores.numel() or scores.device != target.device:
        return False
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    backend = backend_for(scores)
    return backend == "cpu" or (backend == "gpu" and alpha <= 2)


class Fused(torch.autograd.Function):
    """(θ, classes) ↦ (L, d) with d = p − y, in one kernel; backward is one product, g·d.

    The kernel ``entmax_loss(θ (R, n), target (R), α, ignore_index) -> d, rows, place`` gives

    - ``rows (3, R)``: the losses; 1 where a row counts, 0 where it is ignored; p at the target,
    - ``place (R)``: the target, or −1: the row is ignored or its target forbidden, and d is 0.

    Differentiating again goes through d, as an entmax of θ.
    """

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, target: Tensor, alpha: float, ignore_index: int, reduction: str
    ) -> tuple[Tensor, Tensor]:
        x, classes = flatten_batch(scores, 1), target.reshape(-1).long()
        d, rows, place = _kernels(scores).entmax_loss(x, classes, alpha, ignore_index)
        d, place, count = d.view(scores.shape), place.view(target.shape), None
        if reduction == "none":
            loss = rows[0].view(target.shape).clone()  # a view could not be changed in place
        elif reduction == "sum":
            loss = rows[0].sum()
        else:
            total, count = rows[:2].sum(-1).unbind()
            loss = total / count
        ctx.alpha, ctx.dtype = alpha, scores.dtype
        ctx.save_for_backward(d, rows, place, count)
        ctx.set_materialize_grads(False)
        return loss, d

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_d: Tensor | None) -> tuple[Tensor | None, ...]:
        d, rows, place, count = ctx.saved_tensors
        out = None if g is None else _scale(g, count, d, place, ctx.dtype)
        if g_d is not None:
            at_target = torch.arange(d.shape[-1], device=d.device) == place.unsqueeze(-1)
            known = rows[2].view(place.shape).unsqueeze(-1)  # d + 1 would have lost digits
            exact = known + (d - d.detach())
            p = torch.where(at_target, exact, d)
            more = entmax.rows_backward(p, g_d.to(p.dtype), [], [ctx.alpha])[0].to(ctx.dtype)
            out = more if out is None else out + more
        return out, None, None, None, None


def _kernels(tensor: Tensor) -> Any:
    return importlib.import_module(f"structmax.maps.{backend_for(tensor)}_loss")


def _scale(g: Tensor, count: Tensor | None, d: Tensor, place: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient in the scores, g·d, of a mean over ``count`` rows g·d/count; 0 at place −1."""
    pair = (g, d)
    batched = torch._C._functorch.is_legacy_batchedtensor(g)
    if backend_for(d) == "gpu" and is_plain(pair) and not is_transforming(pair) and not batched:
        return _kernels(d).scale(g, count, d, place, dtype)
    each = torch.where(place < 0, 0.0, g if count is None else g / count)  # whatever g is there
    return (each.unsqueeze(-1) * d).to(dtype)


def _check(scores: Tensor, target: Tensor, soft: bool, ignore_index: int, reduction: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(
            f'entmax_loss: reduction must be "mean", "sum" or "none", got {reduction!r}.'
        )
    n = scores.shape[-1]
    if soft and target.shape != scores.shape:
        raise ValueError(
            "entmax_loss: a floating-point target holds distributions and must have the scores' "
            f"shape {tuple(scores.shape)}, got {tuple(target.shape)}. For classes use "
            "target.long()."
        )
    if not soft and target.shape != scores.shape[:-1]:
        raise ValueError(
            f"entmax_loss: an integer target must be {tuple(scores.shape[:-1])} for scores of "
            f"shape {tuple(scores.shape)}, got {tuple(target.shape)}."
        )
    if target.device.type != "cpu" or not can_look(target) or not target.numel():
        return
    if soft:
        y = target.detach().double()
        bad = (y < 0).any(-1) | ((y.sum(-1) - 1).abs() > 1e-2)  # half precision rounds sums
        if bool(bad.any()):
            where = tuple(bad.nonzero()[0].tolist())
            raise ValueError(
                f"entmax_loss: target{list(where) if where else ''} is no distribution, at least 0 "
                f"everywhere and with sum 1: {target[where].tolist()[:8]}."
            )
    else:
        least, most = target.aminmax()
        if least >= 0 and most < n:  # in one pass, where nothing is ignored
            return
        bad = ((target < 0) | (target >= n)) & (target != ignore_index)
        if bool(bad.any()):
            where = tuple(bad.nonzero()[0].tolist())
            raise ValueError(
                f"entmax_loss: target{list(where)} is {int(target[where])}; it must be between 0 "
                f"and {n - 1}, or ignore_index = {ignore_index}."
            )
