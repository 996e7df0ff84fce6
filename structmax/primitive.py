"""The op recipe: where differentiation is written, once.

A *primitive* is a convex function A(θ) of some score tensors, given by three computations: its
value A, its gradient μ, and its Hessian-vector product ∇²A·v. This module registers them as custom
ops (with fake and vmap rules) and ties them together with two ``autograd.Function``s:

    (A, μ) = gradient(θ)      backward(gA, gμ) = gA·μ + ∇²A·gμ,
    w      = ∇²A·v            backward(gw)     = (∇³A·v·gw by the naive definition,  ∇²A·gw).

The μ in the first backward is the function's own output, so differentiating it again arrives at the
Hessian-vector product by itself. Everything works under double backward, ``torch.func`` transforms
(jvp included), ``torch.compile(fullgraph=True)`` and autocast.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._functorch.utils import unwrap_dead_wrappers

import structmax.threads  # noqa: F401  it must see every fork
from structmax import magnitude
from structmax.fence import Limits, clamped, mark
from structmax.tracing import is_tracing

Tensors = Sequence[Tensor]
Omega = Sequence[float]

_library = torch.library.Library("structmax", "FRAGMENT")
_forced: list[tuple[int, str, object]] = []  # thread, backend, and what tells equal ones apart


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Forces one backend (``"naive"``, ``"cpu"`` or ``"gpu"``) for the calls inside.

    By default a CPU tensor is answered by ``cpu`` and a CUDA tensor by ``gpu``. Only calls of the
    same thread are forced, and backward passes that autograd runs on threads of its own.

    >>> import structmax as sx
    >>> with sx.backend("naive"):
    ...     value = sx.Choice(torch.tensor([0.0, 0.0])).log_partition()
    """
    if name not in ("naive", "cpu", "gpu"):
        raise ValueError(f'backend must be "naive", "cpu" or "gpu", got {name!r}.')
    entry = threading.get_ident(), name, object()
    _forced.append(entry)
    try:
        yield
    finally:
        _forced.remove(entry)  # which need not be the last, since other threads add theirs


def backend_for(tensor: Tensor) -> str:
    """Which backend answers for this tensor."""
    if _forced and (name := _forced_here()) is not None:
        return name
    if tensor.device.type == "cpu":
        return "cpu"
    return "gpu" if tensor.device.type == "cuda" else "naive"


def _forced_here() -> str | None:
    """The backend that this thread has forced last; on a thread of autograd the last of any."""
    if torch.compiler.is_compiling():
        return _forced[-1][1]
    here, entries = threading.get_ident(), _forced.copy()
    for thread, name, _ in reversed(entries):
        if thread == here:
            return name
    # Python did not start the threads of autograd, and knows of them by a dummy only
    foreign = isinstance(threading.current_thread(), threading._DummyThread)
    return entries[-1][1] if foreign and entries else None


def is_plain(tensors: Tensors) -> bool:
    """Whether an op's body may be called without the dispatcher: nothing records it, stands in for
    it or counts it, and no tensor is of a subclass or without values."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack()
        or any(
            (type(t) is not Tensor and type(t) is not torch.nn.Parameter) or t.is_meta
            for t in tensors
        )
    )


def register(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Defines ``structmax::name`` and returns it."""
    _library.define(name + schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"structmax::{name}", fake, lib=_library)
    return getattr(torch.ops.structmax, name).default


def differentiate(op: Any, function: Callable[..., Any]) -> None:
    """Makes ``op`` differentiable by ``function``, which takes the same arguments and calls the op
    itself where autograd records nothing.

    Eager code calls the function; a trace has the op, which is then differentiated like this.
    """

    def kernel(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(t.requires_grad for t in _tensors_of(args)):
            return function(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    _library.impl(op._schema.name.partition("::")[2], kernel, "Autograd")


def _tensors_of(args: Sequence[Any]) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from (t for t in arg if isinstance(t, Tensor))


def direct(op: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """``op``, which has no derivative, but ``run``, its body, where nothing looks on: the
    dispatcher takes as long as a small kernel."""

    def call(*args: Any) -> Any:
        tensors = [a for a in args if isinstance(a, Tensor)]
        if is_plain(tensors) and not torch._C._are_functorch_transforms_active():
            return run(*args)
        return op(*args)

    return call


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, for which torch takes a microsecond even if there is nothing to do."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def is_transforming(tensors: Tensors) -> bool:
    """Whether autograd or a ``torch.func`` transform watches these tensors."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return True
    if torch._C._are_functorch_transforms_active():
        return True
    return not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0


class Primitive:
    """A convex function of score tensors ``(*batch, *event)``, made differentiable.

    ``score_dims`` and ``constant_dims`` count the event dimensions of each score and of each
    constant (lengths, goal nodes: integers). The four functions see one flat batch dimension:

    - ``value(scores, constants, key, omega) -> A (B)``
    - ``gradient(scores, constants, key, omega) -> [A (B), *μ]``
    - ``hvp(scores, directions, constants, key, omega) -> [*w]``
    - ``naive(scores, constants, key, omega) -> A (B)``, in plain differentiable torch

    ``limits(scores, key)`` are the least and the largest number of each constant; what lies outside
    never reaches them, and makes the results of its item NaN (see ``fence``).

    ``key`` names the static problem and ``omega`` is ``Smoothing.code``. The first three are the
    fast ones; where ``backend(scores[0])`` is ``"naive"``, the derivatives of ``naive`` stand in
    for them. ``hold(key)`` returns what must stay alive until the backward pass.
    ``terms(scores, constants, key) -> (B)`` bounds how many scores a structure adds up; with it,
    huge finite scores are replaced by moderate ones with the same answers (see ``magnitude``), and
    ``restore(a, mu, scores, smaller, constants)`` is A of the scores, given that of these.
    """

    by_name: dict[str, Primitive] = {}

    def __init__(
        self,
        name: str,
        score_dims: tuple[int, ...],
        constant_dims: tuple[int, ...],
        value: Callable[..., Tensor],
        gradient: Callable[..., list[Tensor]],
        hvp: Callable[..., list[Tensor]],
        naive: Callable[..., Tensor],
        limits: Callable[[Tensors, str], Limits],
        backend: Callable[[Tensor], str] = backend_for,
        hold: Callable[[str], object] = lambda key: None,
        terms: Callable[[Tensors, Tensors, str], Tensor] | None = None,
        restore: Callable[..., Tensor] = magnitude.value_of,
    ) -> None:
        self.name, self.score_dims, self.constant_dims = name, score_dims, constant_dims
        self.naive, self.limits, self.hold, self.terms = naive, limits, hold, terms
        Primitive.by_name[name] = self
        tail = "Tensor[] constants, str key, float[] omega) -> Tensor"

        def run_value(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> Tensor:
            batch = self._batch(scores)
            constants, wrong = clamped(constants, limits(scores, key))
            flat = self._flat(scores, score_dims), self._flat(constants, constant_dims)
            if self._moderate(*flat, key, omega) is not None:
                return mark(run_gradient(*flat, key, omega)[0].reshape(batch), wrong)
            run = naive if backend(scores[0]) == "naive" else value
            return mark(run(*flat, key, omega).reshape(batch), wrong)

        def run_gradient(
            scores: Tensors, constants: Tensors, key: str, omega: Omega
        ) -> list[Tensor]:
            batch = self._batch(scores)
            constants, wrong = clamped(constants, limits(scores, key))
            run = self._naive_gradient if backend(scores[0]) == "naive" else gradient
            flat: tuple[Tensors, Tensors] = scores, constants  # of one dimension, as functions know
            if len(batch) != 1:
                flat = self._flat(scores, score_dims), self._flat(constants, constant_dims)
            smaller = self._moderate(*flat, key, omega)
            a, *mu = run(smaller or flat[0], flat[1], key, omega)
            if smaller is not None:
                a = restore(a, mu, flat[0], smaller, flat[1])
            if len(batch) == 1:
                return [mark(t, wrong) for t in (a, *mu)]
            pairs = zip([a, *mu], [batch, *(s.shape for s in scores)], strict=True)
            return [mark(t.reshape(shape), wrong) for t, shape in pairs]

        def run_hvp(
            scores: Tensors, directions: Tensors, constants: Tensors, key: str, omega: Omega
        ) -> list[Tensor]:
            flat = self._flat(scores, score_dims), self._flat(directions, score_dims)
            constants, wrong = clamped(constants, limits(scores, key))
            constants = self._flat(constants, constant_dims)
            smaller = self._moderate(flat[0], constants, key, omega)
            run = self._naive_hvp if backend(scores[0]) == "naive" else hvp
            w = run(smaller or flat[0], flat[1], constants, key, omega)
            return [mark(m.reshape(s.shape), wrong) for m, s in zip(w, scores, strict=True)]

        def fake_value(scores: Tensors, *rest: Any) -> Tensor:
            return scores[0].new_empty(self._batch(scores))

        def fake_like(scores: Tensors, *rest: Any) -> list[Tensor]:
            return [s.new_empty(s.shape) for s in scores]

        self._run_value, self._run_gradient = run_value, run_gradient
        self.value_op = register(
            f"{name}_value", f"(Tensor[] scores, {tail}", run_value, fake_value
        )
        self.gradient_op = register(
            f"{name}_gradient",
            f"(Tensor[] scores, {tail}[]",
            run_gradient,
            lambda scores, *rest: [fake_value(scores), *fake_like(scores)],
        )
        self.hvp_op = register(
            f"{name}_hvp", f"(Tensor[] scores, Tensor[] directions, {tail}[]", run_hvp, fake_like
        )
        differentiate(
            self.gradient_op,
            lambda scores, constants, key, omega: list(
                _gradient(name, key, tuple(omega), *scores, *constants)
            ),
        )
        differentiate(
            self.value_op,
            lambda scores, constants, key, omega: _gradient(
                name, key, tuple(omega), *scores, *constants
            )[0],
        )
        differentiate(
            self.hvp_op,
            lambda scores, directions, constants, key, omega: list(
                _hvp(name, key, tuple(omega), *scores, *directions, *constants)
            ),
        )

    def _batch(self, scores: Tensors) -> torch.Size:
        return scores[0].shape[: scores[0].dim() - self.score_dims[0]]

    @staticmethod
    def _flat(tensors: Tensors, dims: tuple[int, ...]) -> list[Tensor]:
        """Every tensor with its batch dimensions made one."""
        return [flatten_batch(t, d) for t, d in zip(tensors, dims, strict=True)]

    def _moderate(
        self, scores: Tensors, constants: Tensors, key: str, omega: Omega
    ) -> list[Tensor] | None:
        """Moderate scores with the same answers if these have huge ones, else None."""
        terms = self.terms
        if terms is None:
            return None
        return magnitude.moderate(scores, lambda: terms(scores, constants, key), omega)

    def value(self, scores: Tensors, constants: Tensors, key: str, omega: Omega) -> Tensor:
        """A, differentiable."""
        if is_transforming(scores) and not is_tracing():
            return self.value_and_gradient(scores, constants, key, omega)[0]
        run = self._run_value if is_plain(scores) else self.value_op
        return run(list(scores), list(constants), key, list(omega))

    def value_and_gradient(
        self, scores: Tensors, constants: Tensors, key: str, omega: Omega
    ) -> tuple[Tensor, ...]:
        """``(A, *μ)``, differentiable."""
        if is_transforming(scores) and not is_tracing():
            return _gradient(self.name, key, tuple(omega), *scores, *constants)
        run = self._run_gradient if is_plain(scores) else self.gradient_op
        return tuple(run(list(scores), list(constants), key, list(omega)))

    def _naive_gradient(
        self, scores: Tensors, constants: Tensors, key: str, omega: Omega, watch: bool = False
    ) -> list[Tensor]:
        """[A, *μ] by autograd; watched, μ can be differentiated again."""
        with recording():
            leaves = [s if watch else recordable(s).requires_grad_() for s in scores]
            a = self.naive(leaves, [recordable(c) for c in constants], key, omega)
            feasible = torch.where(a == -torch.inf, 0.0, a).sum()
            if not feasible.requires_grad:  # A is constant
                return [a, *[torch.zeros_like(s) for s in scores]]
            mu = torch.autograd.grad(feasible, leaves, create_graph=watch, materialize_grads=True)
        return [a.detach(), *mu]

    def _naive_hvp(
        self, scores: Tensors, directions: Tensors, constants: Tensors, key: str, omega: Omega
    ) -> list[Tensor]:
        with recording():
            leaves = [recordable(s).requires_grad_() for s in scores]
            _, *mu = self._naive_gradient(leaves, constants, key, omega, watch=True)
            slope = _dot(mu, directions)
            if not slope.requires_grad:  # A is linear
                return [torch.zeros_like(s) for s in scores]
            return list(torch.autograd.grad(slope, leaves, materialize_grads=True))

    def naive_third(
        self,
        scores: Tensors,
        directions: Tensors,
        cotangents: Tensors,
        constants: Tensors,
        key: str,
        omega: Omega,
    ) -> tuple[Tensor, ...]:
        """∇ of ⟨cotangents, ∇²A·directions⟩ in the scores, by the naive definition."""
        grad = torch.func.grad
        arguments = tuple(range(len(scores)))
        shapes = [s.shape for s in scores]
        flat = self._flat(scores, self.score_dims)
        along = self._flat(directions, self.score_dims)
        against = self._flat(cotangents, self.score_dims)
        constants, wrong = clamped(constants, self.limits(scores, key))
        fixed = self._flat(constants, self.constant_dims)

        def a(*theta: Tensor) -> Tensor:
            total = self.naive(list(theta), fixed, key, omega)
            return torch.where(total == -torch.inf, 0.0, total).sum()

        def first(*theta: Tensor) -> Tensor:
            return _dot(grad(a, arguments)(*theta), along)

        def second(*theta: Tensor) -> Tensor:
            return _dot(grad(first, arguments)(*theta), against)

        third = grad(second, arguments)(*flat)
        return tuple(mark(t.reshape(shape), wrong) for t, shape in zip(third, shapes, strict=True))


@contextmanager
def recording() -> Iterator[None]:
    """Autograd for a computation of our own, even inside ``torch.inference_mode()``."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def recordable(tensor: Tensor) -> Tensor:
    """The same values detached; of an inference tensor autograd takes nothing but a copy."""
    return tensor.clone() if tensor.is_inference() else tensor.detach()


def on_host(tensor: Tensor, what: str = "a tensor") -> np.ndarray:
    """The values of a tensor, also inside ``torch.func.grad``, whose tensors have no storage."""
    while torch._C._functorch.is_gradtrackingtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    if torch._C._functorch.is_batchedtensor(tensor):
        raise ValueError(
            f"{what} cannot be mapped by torch.func.vmap, since it is read on the host. Give it as "
            "a batch."
        )
    with untransformed():  # else detach would wrap it again
        return tensor.detach().cpu().numpy()


def untransformed() -> AbstractContextManager[Any]:
    """What is computed inside does not belong to any transform of ``torch.func``."""
    if torch.compiler.is_compiling():
        return nullcontext()
    return temporarily_clear_interpreter_stack()


def unwrapped(t: Tensor) -> Any:
    """What a tensor holds beneath the transforms of ``torch.func``: under ``vmap`` all items."""
    while not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t.detach()


def is_mapped() -> bool:
    """Whether ``torch.vmap`` hides a dimension of some tensors now."""
    if torch.compiler.is_compiling():  # which knows no more than that there is a transform
        return torch._C._are_functorch_transforms_active()
    layers = torch._C._functorch.get_interpreter_stack() or []
    return any(layer.key() == torch._C._functorch.TransformType.Vmap for layer in layers)


def flatten_batch(tensor: Tensor, event_dim: int) -> Tensor:
    """One batch dimension; an expanded tensor stays expanded (stride 0) where it can."""
    batch = tensor.dim() - event_dim
    if batch == 1:
        return tensor
    if batch == 0:
        return tensor.unsqueeze(0)
    event = tensor.shape[batch:]
    if tensor.numel() and all(stride == 0 for stride in tensor.stride()[:batch]):
        items = tensor.shape[:batch].numel()
        return tensor[(0,) * batch].expand(items, *event)
    return _reshaped(tensor, (tensor.shape[:batch].numel(), *event))


def _reshaped(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``tensor.reshape(shape)``; numpy makes the copy where nothing records it: torch would wake
    all its threads for it."""
    known = tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)
    if not known or tensor.is_contiguous() or not is_plain((tensor,)) or is_transforming((tensor,)):
        return tensor.reshape(shape)
    if torch._C._functorch.is_legacy_batchedtensor(tensor):  # autograd.grad(is_grads_batched=…)
        return tensor.reshape(shape)
    return torch.from_numpy(tensor.detach().numpy().reshape(shape))  # a view where there is one


def _times(scale: Tensor, tensor: Tensor) -> Tensor:
    """Their product, 0 where ``scale`` is, so that the NaN of an item that no loss depends on do
    not spread; by numpy where nothing records it, since torch would wake all its threads."""
    pair = (scale, tensor)
    if is_transforming(pair) or (
        not torch.compiler.is_compiling()
        and torch._C._functorch.is_legacy_batchedtensor(scale)  # autograd.grad(is_grads_batched=…)
    ):
        return scale * tensor  # whose derivative in a scale of 0 counts too
    if tensor.device.type != "cpu" or not is_plain(pair):
        return (scale * tensor).masked_fill_(scale == 0, 0.0)
    by, product = scale.numpy(), np.multiply(scale.numpy(), tensor.numpy())
    return torch.from_numpy(product if by.all() else np.where(by == 0, 0.0, product))


def _dot(left: Tensors, right: Tensors) -> Tensor:
    products = [(x * y).sum() for x, y in zip(left, right, strict=True)]
    return torch.stack(products).sum()


def _split(name: str, tensors: Tensors) -> tuple[Tensors, Tensors]:
    count = len(Primitive.by_name[name].score_dims)
    return tensors[:count], tensors[count:]


def to_front(tensors: Tensors, in_dims: Sequence[int | None], size: int) -> list[Tensor]:
    """The vmap rule: the mapped dimension becomes one more batch dimension, in front."""
    return [
        t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip(tensors, in_dims, strict=True)
    ]


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)``, without its look at the signature where nothing needs it: that
    takes as long as a small kernel."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    base: Any = super(torch.autograd.Function, function)
    return base.apply(*unwrap_dead_wrappers(args))


class _Gradient(torch.autograd.Function):
    """θ ↦ (A, μ)."""

    @staticmethod
    def forward(name: str, key: str, omega: Omega, *tensors: Tensor) -> tuple[Tensor, ...]:
        scores, constants = _split(name, tensors)
        primitive = Primitive.by_name[name]
        run = primitive._run_gradient if is_plain(tensors) else primitive.gradient_op
        return tuple(run(list(scores), list(constants), key, list(omega)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.name, ctx.key, ctx.omega, *tensors = inputs
        ctx.count = len(tensors)
        ctx.save_for_backward(*tensors, *output[1:])
        ctx.save_for_forward(*tensors, *output[1:])
        ctx.set_materialize_grads(False)
        if not torch.compiler.is_compiling():
            ctx.held = Primitive.by_name[ctx.name].hold(ctx.key)

    @staticmethod
    def backward(ctx: Any, g_value: Tensor | None, *g_mu: Tensor | None) -> tuple[Any, ...]:
        primitive = Primitive.by_name[ctx.name]
        saved = ctx.saved_tensors  # once: a checkpoint gives them out once
        tensors, mu = saved[: ctx.count], saved[ctx.count :]
        scores, constants = _split(ctx.name, tensors)
        out: list[Tensor | None] = [None] * len(scores)
        if g_value is not None:
            out = [
                _times(g_value.reshape(g_value.shape + (1,) * d), m)
                for m, d in zip(mu, primitive.score_dims, strict=True)
            ]
        if any(g is not None for g in g_mu):
            v = [torch.zeros_like(s) if g is None else g for s, g in zip(scores, g_mu, strict=True)]
            # compiled backward passes are not differentiated; that of a trace is by the op's own
            if torch.compiler.is_compiling() or is_tracing():
                w = primitive.hvp_op(list(scores), v, list(constants), ctx.key, list(ctx.omega))
            else:
                w = _hvp(ctx.name, ctx.key, ctx.omega, *scores, *v, *constants)
            out = [b if a is None else a + b for a, b in zip(out, w, strict=True)]
        return (None, None, None, *out, *([None] * len(constants)))

    @staticmethod
    def vmap(info: Any, in_dims: Any, name: str, key: str, omega: Omega, *tensors: Tensor) -> Any:
        front = to_front(tensors, in_dims[3:], info.batch_size)
        out = _gradient(name, key, omega, *front)
        return out, (0,) * len(out)


class _GradientBothModes(_Gradient):
    """The same with forward mode. Separate because Dynamo refuses a Function that has a jvp."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        primitive = Primitive.by_name[ctx.name]
        saved = ctx.saved_tensors  # once: a checkpoint gives them out once
        tensors, mu = saved[: ctx.count], saved[ctx.count :]
        scores, constants = _split(ctx.name, tensors)
        given = tangents[3 : 3 + len(scores)]
        v = [torch.zeros_like(s) if t is None else t for s, t in zip(scores, given, strict=True)]
        terms = [
            (m * t).flatten(m.dim() - d).sum(-1)
            for m, t, d in zip(mu, v, primitive.score_dims, strict=True)
        ]
        w = _Hvp.apply(ctx.name, ctx.key, ctx.omega, *scores, *v, *constants)
        return (torch.stack(terms).sum(0), *w)


def _gradient(name: str, key: str, omega: Omega, *tensors: Tensor) -> tuple[Tensor, ...]:
    if torch.compiler.is_compiling():
        return _Gradient.apply(name, key, omega, *tensors)
    return apply(_GradientBothModes, name, key, omega, *tensors)


def _hvp(name: str, key: str, omega: Omega, *tensors: Tensor) -> tuple[Tensor, ...]:
    return apply(_Hvp, name, key, omega, *tensors)


class _Hvp(torch.autograd.Function):
    """(θ, v) ↦ ∇²A(θ)·v. Symmetric in v; its derivative in θ runs the naive backend."""

    @staticmethod
    def forward(name: str, key: str, omega: Omega, *tensors: Tensor) -> tuple[Tensor, ...]:
        primitive = Primitive.by_name[name]
        scores, rest = _split(name, tensors)
        v, constants = _split(name, rest)
        return tuple(primitive.hvp_op(list(scores), list(v), list(constants), key, list(omega)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.name, ctx.key, ctx.omega, *tensors = inputs
        ctx.save_for_backward(*tensors)
        if not torch.compiler.is_compiling():
            ctx.held = Primitive.by_name[ctx.name].hold(ctx.key)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Any, ...]:
        primitive = Primitive.by_name[ctx.name]
        scores, rest = _split(ctx.name, ctx.saved_tensors)
        v, constants = _split(ctx.name, rest)
        needs = ctx.needs_input_grad[3:]
        g_scores: Sequence[Tensor | None] = [None] * len(scores)
        g_v: Sequence[Tensor | None] = [None] * len(scores)
        if any(needs[: len(scores)]):
            g_scores = primitive.naive_third(scores, v, g, constants, ctx.key, ctx.omega)
        if any(needs[len(scores) : 2 * len(scores)]):
            g_v = _Hvp.apply(ctx.name, ctx.key, ctx.omega, *scores, *g, *constants)
        return (None, None, None, *g_scores, *g_v, *([None] * len(constants)))

    @staticmethod
    def vmap(info: Any, in_dims: Any, name: str, key: str, omega: Omega, *tensors: Tensor) -> Any:
        front = to_front(tensors, in_dims[3:], info.batch_size)
        out = _Hvp.apply(name, key, omega, *front)
        return out, (0,) * len(out)
