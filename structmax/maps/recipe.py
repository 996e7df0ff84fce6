"""The recipe of a map: where maps become differentiable torch functions, once.

A map answers each row of scores by a row p. Everything its backward pass needs can be read off p
and the parameters (α, bounds), so a map is given by two formulas and their two kernels. To add one:

1. In ``structmax/maps/<name>.py``, write ``naive(x, parameters, options) -> p``, the definition in
   plain torch; it need not be differentiable.
2. Write ``naive_backward(p, g, parameters, options) -> [g_x, *g_parameters]`` in plain
   *differentiable* torch: g is the gradient in p. Double backward goes through this formula and
   through p by itself, so p > 0 must be a constant there, and log and pow must be kept off zeros.
3. In the kernel modules (``structmax.maps.cpu`` and ``structmax.maps.gpu``, or others that
   ``kernels`` names), write ``<name>`` and ``<name>_backward`` with the same signatures.
4. ``_map = Map("<name>", naive, naive_backward, {"alpha": "row"})`` makes the torch function;
   the public function with its docstring calls it: ``_map(x, alpha, dim=dim, mask=mask)``.
5. Add one row to ``tests/maps_table.py``; the whole suite of maps then runs over it. Export the
   name in ``structmax/__init__.py``.

All four functions see rows: x, p and g are ``(R, n)``, float32 or float64, with R, n ≥ 1;
``parameters`` is a list of tensors, ``(R, 1)`` for a parameter declared ``"row"`` and ``(R, n)``
for an ``"element"`` one, possibly expanded (stride 0); ``options`` is a list of floats, without
gradient. ``naive_backward`` may meet further batch dimensions in front. Trailing parameters may be
left out of a call; the four functions then see a shorter list.

What every map promises, and its four functions must keep: an entry that is −inf gets p = 0 and no
gradient (masked entries arrive as −inf, whatever they held); a row of −inf gets zeros, and so does
its gradient; a row with NaN or +inf gets NaN (0 where −inf), and so does its gradient.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from structmax.checks import can_look
from structmax.primitive import (
    Tensors,
    apply,
    backend_for,
    differentiate,
    flatten_batch,
    is_plain,
    is_transforming,
    register,
    to_front,
)
from structmax.tracing import is_tracing

FAR = 1e3  # from τ, a score is at a bound: e^−FAR is 0

Options = Sequence[float]
Forward = Callable[[Tensor, list[Tensor], list[float]], Tensor]
Backward = Callable[[Tensor, Tensor, list[Tensor], list[float]], list[Tensor]]


class Map:
    """A map of rows, made differentiable. The module docstring says what it is made of.

    ``parameters`` names the parameters and says whether each is one number per ``"row"`` or per
    ``"element"``. ``kernels`` is the module of the kernels, with ``{}`` for the backend.
    """

    by_name: dict[str, Map] = {}

    def __init__(
        self,
        name: str,
        naive: Forward,
        naive_backward: Backward,
        parameters: Mapping[str, str] | None = None,
        kernels: str = "structmax.maps.{}",
    ) -> None:
        self.name, self.naive, self.naive_backward = name, naive, naive_backward
        self.parameters, self.kernels = dict(parameters or {}), kernels
        Map.by_name[name] = self

        def run(x: Tensor, parameters: Tensors, options: Options) -> Tensor:
            if not x.numel():
                return torch.empty_like(x, memory_format=torch.contiguous_format)
            flat = [flatten_batch(t, 1) for t in parameters]
            p = self._engine("", x)(flatten_batch(x, 1), flat, list(options))
            return p.contiguous().view(x.shape)

        def run_backward(
            p: Tensor, g: Tensor, parameters: Tensors, options: Options
        ) -> list[Tensor]:
            if not p.numel():
                return [
                    torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in [p, *parameters]
                ]
            flat = [flatten_batch(t, 1) for t in parameters]
            run = self._engine("_backward", p)
            out = run(flatten_batch(p, 1), flatten_batch(g, 1), flat, list(options))
            shapes = [p.shape, *(t.shape for t in parameters)]
            return [t.contiguous().view(shape) for t, shape in zip(out, shapes, strict=True)]

        self._run, self._run_backward = run, run_backward
        self.op = register(
            name,
            "(Tensor x, Tensor[] parameters, float[] options) -> Tensor",
            run,
            lambda x, parameters, options: x.new_empty(x.shape),
        )
        self.backward_op = register(
            f"{name}_backward",
            "(Tensor p, Tensor g, Tensor[] parameters, float[] options) -> Tensor[]",
            run_backward,
            lambda p, g, parameters, options: [t.new_empty(t.shape) for t in [p, *parameters]],
        )

        differentiate(
            self.op,
            lambda x, parameters, options: _ApplyBothModes.apply(
                name, tuple(options), x, *parameters
            ),
        )

    def _engine(self, suffix: str, tensor: Tensor) -> Callable[..., Any]:
        backend = backend_for(tensor)
        if backend == "naive":
            return self.naive_backward if suffix else self.naive
        return getattr(importlib.import_module(self.kernels.format(backend)), self.name + suffix)

    def __call__(
        self,
        x: Tensor,
        *parameters: Tensor | float,
        options: Options = (),
        dim: int = -1,
        mask: Tensor | None = None,
    ) -> Tensor:
        """p along ``dim``, differentiable, in the dtype of x.

        A parameter broadcasts to x, one per row to x with ``dim`` reduced to size 1.
        """
        check_scores(self.name, x, dim)
        work = x if x.dtype.itemsize >= 4 else x.float()
        if mask is not None:
            work = keep(self.name, work, mask)
        tensors = [work] + [
            spread(self.name, name, value, work, dim, per)
            for value, (name, per) in zip(parameters, self.parameters.items(), strict=False)
        ]
        last = dim in (-1, x.dim() - 1)
        if not last:
            tensors = [t.movedim(dim, -1) for t in tensors]
        p = self.rows(tensors[0], tensors[1:], options)
        p = p if last else p.movedim(-1, dim)
        return p if p.dtype == x.dtype else p.to(x.dtype)

    def rows(self, x: Tensor, parameters: Tensors, options: Options = ()) -> Tensor:
        """p ``(*batch, n)``, differentiable; parameters ``(*batch, 1)`` or ``(*batch, n)``."""
        tensors = (x, *parameters)
        if is_transforming(tensors) and not is_tracing():
            if torch.compiler.is_compiling():
                return _Apply.apply(self.name, tuple(options), *tensors)
            return apply(_ApplyBothModes, self.name, tuple(options), *tensors)
        run = self._run if is_plain(tensors) else self.op
        return run(x, list(parameters), list(options))

    def rows_backward(
        self, p: Tensor, g: Tensor, parameters: list[Tensor], options: Options
    ) -> list[Tensor]:
        """``[g_x, *g_parameters]``, differentiable, of the rows p and the gradient g in them."""
        tensors = (p, g, *parameters)
        if torch.compiler.is_compiling():  # compiled backward passes are not differentiated
            return self.backward_op(p, g, parameters, list(options))
        if is_transforming(tensors) or torch._C._functorch.is_legacy_batchedtensor(g):
            return self.naive_backward(p, g, parameters, list(options))
        run = self._run_backward if is_plain(tensors) else self.backward_op
        return run(p, g, parameters, list(options))


class _Apply(torch.autograd.Function):
    """(x, *parameters) ↦ p."""

    @staticmethod
    def forward(name: str, options: Options, x: Tensor, *parameters: Tensor) -> Tensor:
        m = Map.by_name[name]
        run = m._run if is_plain((x, *parameters)) else m.op
        return run(x, list(parameters), list(options))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.name, ctx.options, _, *parameters = inputs
        ctx.save_for_backward(output, *parameters)
        ctx.save_for_forward(output, *parameters)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        p, *parameters = ctx.saved_tensors
        out = Map.by_name[ctx.name].rows_backward(p, g, parameters, ctx.options)
        return (None, None, *out)

    @staticmethod
    def vmap(info: Any, in_dims: Any, name: str, options: Options, *tensors: Tensor) -> Any:
        front = to_front(tensors, in_dims[2:], info.batch_size)
        return Map.by_name[name].rows(front[0], front[1:], options), 0


class _ApplyBothModes(_Apply):
    """The same with forward mode. Separate because Dynamo refuses a Function that has a jvp."""

    @staticmethod
    def jvp(ctx: Any, _name: None, _options: None, *tangents: Tensor | None) -> Tensor:
        """The backward formula is linear in g; what is sought is its transpose."""
        p, *parameters = ctx.saved_tensors
        m = Map.by_name[ctx.name]
        given = [
            torch.zeros_like(t) if v is None else v
            for t, v in zip((p, *parameters), tangents, strict=True)
        ]
        transpose = torch.func.vjp(
            lambda g: tuple(m.naive_backward(p, g, parameters, list(ctx.options))),
            torch.zeros_like(p),
        )[1]
        # torch takes no tangent whose strides are not those of p
        return transpose(tuple(given))[0].contiguous()


def check_scores(owner: str, x: Tensor, dim: int) -> None:
    """A floating-point tensor with something along ``dim``."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{owner}: scores must be a tensor, got {type(x).__name__}.")
    if not x.is_floating_point():
        raise ValueError(f"{owner}: scores must be floating point, got {x.dtype}. Use x.float().")
    if x.dim() == 0:
        raise ValueError(
            f"{owner}: scores must have at least one dimension, got a 0-d tensor. Use x.view(1)."
        )
    if not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"{owner}: dim must be between {-x.dim()} and {x.dim() - 1} for scores of shape "
            f"{tuple(x.shape)}, got {dim}."
        )
    if x.shape[dim] == 0:
        raise ValueError(
            f"{owner}: scores have nothing to choose from along dim {dim}, got shape "
            f"{tuple(x.shape)}."
        )


def keep(owner: str, x: Tensor, mask: Tensor) -> Tensor:
    """x with −inf where the mask is False; no gradient goes there, whatever x holds."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"{owner}: mask must be a boolean tensor (True = keep), got {got}.")
    if mask.shape != x.shape and not _broadcasts(mask.shape, x.shape):
        raise ValueError(
            f"{owner}: mask must broadcast to the scores' shape {tuple(x.shape)}, got "
            f"{tuple(mask.shape)}."
        )
    return torch.where(mask, x, -torch.inf)


def spread(owner: str, name: str, value: Tensor | float, x: Tensor, dim: int, per: str) -> Tensor:
    """A parameter expanded to x's shape, with size 1 along ``dim`` if there is one per row."""
    if not isinstance(value, Tensor):
        try:
            value = torch.as_tensor(value, dtype=x.dtype, device=x.device)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(
                f"{owner}: {name} must be a number or a tensor, got {value!r}."
            ) from None
    if value.device != x.device and value.dim():
        raise ValueError(
            f"{owner}: {name} is on {value.device} but the scores are on {x.device}. "
            f"Use {name}.to(x.device)."
        )
    shape = list(x.shape)
    if per == "row":
        shape[dim] = 1
    if not _broadcasts(value.shape, shape):
        one = f" with dim {dim} reduced to size 1, that is" if per == "row" else ":"
        raise ValueError(
            f"{owner}: {name} must broadcast to the scores' shape{one} {tuple(shape)}, got "
            f"{tuple(value.shape)}."
        )
    return value.to(x.device, x.dtype).expand(shape)


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether a shape expands to another."""
    extra = len(to) - len(shape)
    return extra >= 0 and all(a in (1, b) for a, b in zip(shape, list(to)[extra:], strict=True))


def sums_to(p: Tensor, total: float, dim: int, slack: float = 0.0) -> Tensor:
    """Whether each row does, up to rounding, that of bounds included; ``dim`` is kept."""
    rounding = max(1e-3 if p.dtype.itemsize >= 4 else 3e-2, 2 * slack)
    sums = p.detach().sum(dim, keepdim=True)
    return (sums - total).abs() <= rounding * max(total, 1.0)


def solve_again(
    solve: Callable[[Tensor], Tensor],
    p: Tensor,
    x: Tensor,
    lower: Tensor,
    upper: Tensor,
    total: float,
    dim: int,
    slack: float = 0.0,
) -> Tensor:
    """p, with other answers for rows that do not sum to the total: their τ is 10¹⁶ or so from the
    largest score, relative to which it has lost its digits.

    They are solved relative to a score that is at most 1 from τ (log n in csoftmax): where the sum
    of upper bounds, in the order of the scores, and of lower bounds of the rest reaches the total.
    """
    scores, there = x.detach(), x.detach() > -torch.inf
    fine = sums_to(p, total, dim, slack) | ~there.any(dim, keepdim=True) | p.detach().isnan()
    if bool(fine.all()):
        return p
    lower, width = torch.where(there, lower, 0.0), torch.where(there, upper - lower, 0.0)
    order = scores.argsort(dim, descending=True)
    reached = lower.sum(dim, keepdim=True) + width.gather(dim, order).cumsum(dim)
    most = (there.sum(dim, keepdim=True) - 1).clamp(min=0)  # of entries that are there
    last = torch.minimum((reached < total).sum(dim, keepdim=True), most)
    near = x - scores.gather(dim, order.gather(dim, last))
    return torch.where(fine, p, solve(torch.where(there, near.clamp(-FAR, FAR), -torch.inf)))


def mask_of_lengths(lengths: Tensor, x: Tensor, dim: int = -1) -> Tensor:
    """True at the first ``lengths`` places along ``dim``; lengths has x's shape without ``dim``.

    >>> mask_of_lengths(torch.tensor([1, 3]), torch.zeros(2, 3))
    tensor([[ True, False, False],
            [ True,  True,  True]])
    """
    place = torch.arange(x.shape[dim], device=x.device)
    place = place.view([-1 if d == dim % x.dim() else 1 for d in range(x.dim())])
    return place < lengths.unsqueeze(dim)


def refuse(owner: str, bad: Tensor, why: Callable[[tuple[int, ...]], str]) -> None:
    """Raises if a row is bad (``(*batch)`` booleans), where values may be looked at.

    ``why(row)`` ends the message. Where nobody may look (compiling, capturing a CUDA graph, under a
    transform), kernels give such a row NaN.
    """
    if can_look(bad) and bad.numel() and bool(bad.any()):
        row = tuple(bad.nonzero()[0].tolist())
        where = f"row {row[0] if len(row) == 1 else row}" if row else "the only row"
        raise ValueError(f"{owner}: {where} {why(row)}")
