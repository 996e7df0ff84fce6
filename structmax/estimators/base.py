"""What every estimator keeps, how costs are called, and the one place where gradients are made."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from structmax import checks
from structmax.primitive import recordable, recording
from structmax.structures.base import Structure
from structmax.tracing import refuse_trace

Pullback = Callable[..., Tensor]


class Estimator:
    """A way to train through a structure: z with a gradient, or a loss with one.

    ``objective`` says what is estimated: ``"E[L(z)]"``, ``"L(argmax)"`` or ``"L(E[z])"``, and
    ``distribution`` of which z: ``"own"``, the structure's, ``"sparsemap"``, ``"top-k"``,
    ``"perturbed"``, the argmax at noisy scores, or ``"noisy"``, the structure's at noisy scores.
    ``needs`` names the queries that a structure must have; ``applies_to`` compares.

    >>> import structmax as sx
    >>> sx.estimators.Marginals().applies_to(sx.GridPath(torch.zeros(2, 2), moves="all"))
    False
    """

    objective: str
    distribution: str = "own"
    needs: frozenset[str]

    def __call__(self, structure: Structure) -> Tensor:
        """z ``(*batch, *parts)`` with a gradient; ``(samples, *batch, *parts)`` of several."""
        raise TypeError(
            f"{type(self).__name__} estimates a loss and has no z to return. "
            "Use .loss(structure, cost)."
        )

    def loss(self, structure: Structure, cost: Callable[..., Tensor]) -> Tensor:
        """The cost of z ``(*batch)``, averaged over samples; see :func:`call_cost`."""
        costs = call_cost(cost, self(structure), structure)
        return costs.mean(0) if costs.dim() > len(structure.batch_shape) else costs

    def applies_to(self, structure: Structure) -> bool:
        """Whether the structure has every query that is needed."""
        return all(structure.supports(query) for query in self.needs)


class ModuleEstimator(Estimator, torch.nn.Module):
    """One with a state. It is a module before any option is set, which Dynamo asks for."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        module = super().__new__(cls)
        torch.nn.Module.__init__(module)
        return module


def call_cost(
    cost: Callable[..., Tensor], z: Tensor, structure: Structure, where: Tensor | None = None
) -> Tensor:
    """The costs ``(*sample, *batch)`` of structures z ``(*sample, *batch, *parts)``.

    A cost with one required argument is given z as it is. One with two, ``cost(z, items)``, is
    given flattened structures ``(N, *parts)`` and the index of the flattened batch item that each
    belongs to, ``(N)``, and returns ``(N)``: so a recursive network can look its inputs up.

    ``where`` ``(*sample, *batch)`` marks the structures that count: the others cost 0, and are not
    given to a cost with two arguments.

    >>> import structmax as sx
    >>> choice = sx.Choice(torch.zeros(2, 3))
    >>> price = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    >>> z = choice.enumerate_support()  # (3, *batch, *parts)
    >>> call_cost(lambda z: (z * price).sum(-1), z, choice)
    tensor([[1., 4.],
            [2., 5.],
            [3., 6.]])
    >>> call_cost(lambda z, items: (z * price[items]).sum(-1), z, choice).shape
    torch.Size([3, 2])
    """
    shape = z.shape[: z.dim() - len(structure.event_shape)]
    if where is not None:  # nobody defined the cost of what is no structure
        where = where.expand(shape)
        first = z[(slice(1),) * (len(shape) - len(structure.batch_shape))]
        z = torch.where(wide(where, structure), z, first)
    if _required_arguments(cost) < 2:
        costs, wanted = cost(z), shape
        given = f"z of shape {tuple(z.shape)}"
    else:
        items = torch.arange(structure.batch_shape.numel(), device=z.device)
        items = items.reshape(structure.batch_shape).expand(shape).reshape(-1)
        flat = z.reshape(shape.numel(), *structure.event_shape)
        if where is not None:
            flat, items = flat[where.reshape(-1)], items[where.reshape(-1)]
        costs, wanted = cost(flat, items), items.shape
        given = f"z of shape {tuple(flat.shape)} with items {tuple(items.shape)}"
    if not isinstance(costs, Tensor) or costs.shape != wanted:
        got = tuple(costs.shape) if isinstance(costs, Tensor) else type(costs).__name__
        raise ValueError(
            f"cost: must return one number for each structure, {tuple(wanted)} for {given}, got "
            f"{got}. Sum over the parts only."
        )
    if not costs.is_floating_point():  # right or wrong, or a count
        costs = costs.to(z.dtype)
    if where is None:
        return costs.reshape(shape)
    if wanted == shape and _required_arguments(cost) < 2:
        return torch.where(where, costs, 0.0)
    return costs.new_zeros(shape).masked_scatter(where, costs)


def refuse_nothing(estimator: Estimator, structure: Structure, best: Tensor) -> None:
    """An error where an item allows no structure: its best score ``(*batch)`` is −inf."""
    if structure._validate_args:
        checks.feasible(type(estimator).__name__, "loss", best.detach())


def _required_arguments(cost: Callable[..., Any]) -> int:
    """How many positional arguments a cost asks for, also one that torch has wrapped."""
    inner: Any = cost
    wrappers = torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel
    while hasattr(inner, "_orig_mod") or isinstance(inner, wrappers):
        inner = inner._orig_mod if hasattr(inner, "_orig_mod") else inner.module
    function = inner.forward if isinstance(inner, torch.nn.Module) else inner
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of a function that is not written in Python
        return 1
    return sum(p.kind in kinds and p.default is p.empty for p in parameters)


def one_of(owner: Any, option: str, allowed: tuple[Any, ...]) -> None:
    """An option is one of these."""
    value = getattr(owner, option)
    if value not in allowed:
        listed = ", ".join(map(repr, allowed))
        raise ValueError(
            f"{type(owner).__name__}: {option} must be one of {listed}, got {value!r}."
        )


def at_least(owner: Any, option: str, least: float, strict: bool = False) -> None:
    """A number that is at least this, or above it; an integer where ``least`` is one."""
    value = getattr(owner, option)
    kinds = int if isinstance(least, int) else (int, float)
    good = isinstance(value, kinds) and not isinstance(value, bool)
    if not good or not (value > least if strict else value >= least) or value == math.inf:
        number = "an integer" if kinds is int else "a number"
        number = "a finite number" if value == math.inf else number
        limit = f"above {least}" if strict else f"of at least {least}"
        raise ValueError(
            f"{type(owner).__name__}: {option} must be {number} {limit}, got {value!r}."
        )


def wide(t: Tensor, structure: Structure) -> Tensor:
    """``(*sample, *batch)`` made to broadcast against z ``(*sample, *batch, *parts)``."""
    return t[(..., *[None] * len(structure.event_shape))]


def has_groups(structure: Structure) -> bool:
    """Whether ``local_softmax`` is defined."""
    return getattr(structure, "_local_groups", None) is not None


def refuse_without_groups(structure: Structure) -> None:
    """An error where ``local_softmax`` is not defined."""
    if isinstance(structure, Structure) and not has_groups(structure):
        raise ValueError(
            f'StraightThrough("softmax"): {type(structure).__name__} has no groups of parts of '
            'which every structure has exactly one. Use backward="marginals" or "identity".'
        )


def straight(structure: Structure, g: Tensor) -> Tensor:
    """What has the gradient g in the primary scores, and none in the others."""
    scores = structure.primary
    return torch.where(scores == -math.inf, 0.0, scores) * g


def surrogate(structure: Structure, z: Tensor, pullback: Pullback, *more: Tensor) -> Tensor:
    """z as it is, whose gradient in the structure's scores is made up by ``pullback``.

    ``pullback(structure, z, g, *more)`` is given the structure again with its scores as leaves, and
    g = ∂L/∂z, with zeros where no structure has a part. The gradient of the sum of what it returns,
    in every score of the structure, takes the place of the derivative of z, which is zero or not
    defined. It is called once for each backward pass, for each item under ``torch.vmap``; tensors
    made in the same transform must be among ``more``. There is no second derivative.
    """
    if not isinstance(structure, Structure):
        raise ValueError(
            f"an estimator takes a structure, such as sx.LinearChain(...), got "
            f"{type(structure).__name__}."
        )
    given = {name: t for name, (t, _) in structure._tensors().items()}
    watched = any(t.requires_grad for t in given.values())
    watched = watched or torch._C._are_functorch_transforms_active()
    if not (torch.is_grad_enabled() and watched):
        return z
    refuse_trace(
        "the gradient of an estimator", "Trace it under torch.no_grad(), or the model without it."
    )
    how = _How(structure, pullback, tuple(given))
    return _Surrogate.apply(how, z.detach(), *given.values(), *more)


@dataclass
class _How:
    structure: Any  # a structure whose tensors are not looked at
    pullback: Pullback
    names: tuple[str, ...]  # of its tensors
    needed: tuple[bool, ...] = ()  # which of them get a gradient


class _Surrogate(torch.autograd.Function):
    """z, with a gradient in scores on which it does not depend smoothly."""

    @staticmethod
    def forward(how: _How, z: Tensor, *tensors: Tensor) -> Tensor:
        return z.clone()  # what the caller does with it in place is no business of ours

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.how, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        z, *tensors = ctx.saved_tensors
        needed = ctx.needs_input_grad[2 : 2 + len(ctx.how.names)]
        found = iter(_Pulled.apply(replace(ctx.how, needed=needed), g, z, *tensors))
        rest = [None] * (len(tensors) - len(needed))
        return (None, None, *[next(found) if n else None for n in needed], *rest)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        return torch.stack([_Surrogate.apply(*item) for item in _items(info, in_dims, args)]), 0


class _Pulled(torch.autograd.Function):
    """The gradient that a pullback makes up. A function of its own, so that a pullback is given
    plain tensors in any transform."""

    @staticmethod
    def forward(how: _How, g: Tensor, z: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(how.names)
        with recording():
            pairs = zip(tensors, how.needed, strict=False)
            leaves = [recordable(t).requires_grad_(needed) for t, needed in pairs]
            live = how.structure._rebuild(**dict(zip(how.names, leaves, strict=True)))
            live = live._trusted()  # the structures that it is asked about are its own
            usable = live._usable_parts() & (live.primary.detach() > -math.inf)
            g = torch.where(usable, recordable(g), 0.0)
            total = how.pullback(live, z, g, *tensors[count:]).sum()
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            if not total.requires_grad:
                return tuple(torch.zeros_like(leaf) for leaf in wanted)
            return torch.autograd.grad(total, wanted, materialize_grads=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> None:
        raise RuntimeError("an estimator that makes its gradient up has no second derivative.")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        found = [_Pulled.apply(*item) for item in _items(info, in_dims, args)]
        out = tuple(torch.stack(column) for column in zip(*found, strict=True))
        return out, (0,) * len(out)


def _items(info: Any, in_dims: Any, args: tuple[Any, ...]) -> Iterator[list[Any]]:
    """The arguments of each mapped item. One at a time: scores that items share would become a
    batch, which not every structure can tell from its other dimensions."""
    for i in range(info.batch_size):
        yield [a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)]
