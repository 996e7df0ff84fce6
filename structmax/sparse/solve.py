"""SparseMAP for any structure: which solver runs, and where its answer is made differentiable.

SparseMAP (Niculae, Martins, Blondel & Cardie, 2018) is the point μ of the polytope of structures
that maximises ⟨θ, μ⟩ − ½‖μ‖². As a distribution p over structures, with c their scores over all
parts and M their counts of the penalised ones,

    max over p of cᵀp − ½‖Mp‖²,    μ = Mp.

On the face of the active structures p is linear in c: dp = Q dc, with

    Q = A⁻¹ − A⁻¹11ᵀA⁻¹ / 1ᵀA⁻¹1,    A = MᵀM + 11ᵀ,

the inverse of the bordered Gram matrix (MᵀM alone may be singular). With N the counts of the other
parts, the Jacobian in all scores is [M;N] Q [M;N]ᵀ; it is never formed: products with it take
O(KD + K²) for K active structures and D parts. It is constant as long as the face does not change.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structmax import checks
from structmax.primitive import backend_for, is_plain, is_transforming
from structmax.sparse import active_set, completion, conditional_gradient
from structmax.sparse.result import Constraints, Solution, SparseMAPResult
from structmax.sparse.support import Oracle
from structmax.structures.base import Structure
from structmax.structures.parts import PartStructure
from structmax.tracing import refuse_without_values

ROUNDING = 1e-6  # what rounding may do to a value is a gap if it is more
METHODS = ("active-set", "away", "pairwise", "frank-wolfe")


def sparsemap(
    structure: PartStructure,
    method: str,
    max_iter: int,
    tol: float | None,
    init: SparseMAPResult | None,
    penalize: str,
) -> SparseMAPResult:
    """What ``structure.sparsemap`` returns; see there."""
    owner = f"{structure._name}.sparsemap"
    tol = _checked_options(owner, method, max_iter, tol)
    if penalize not in ("primary", "all"):
        raise ValueError(f'{owner}: penalize must be "primary" or "all", got {penalize!r}.')
    if structure._silent:
        penalize = "primary"
    _check_init(owner, init, structure.batch_shape, structure.event_shape)
    parts, batch = structure._parts(), structure.batch_shape
    shapes = [p.shape[len(batch) :] for p in parts]
    if init is not None and init.edges.shape[-1] != sum(shape.numel() for shape in shapes[1:]):
        raise ValueError(f"{owner}: init has other additional parts than this structure.")
    tensors = structure._tensors()
    watched = is_transforming(parts)

    def run(*plain: Tensor) -> Solution:
        same = structure._rebuild(**dict(zip(tensors, plain, strict=True))) if plain else structure
        start = None if init is None else _admitted(init, same)
        solution = _solve(same, method, max_iter, tol, start, penalize, watched)
        if not watched or method != "active-set" or solution.whole:
            return solution
        theta = torch.cat(_flat(same._exact_parts(), batch), -1)
        width = theta.shape[-1] if penalize == "all" else structure.event_shape.numel()
        return _completed(solution, _StructureOracle(same), theta, width, True)

    solution = _untracked(run, [t for t, _ in tensors.values()])
    value = torch.where(solution.gap.isnan(), -torch.inf, 0.0).reshape(batch)
    structure._refuse_infeasible("sparsemap", value, value)
    theta = _flat(structure._exact_parts(), batch)
    answer = _attach(solution, theta, penalize == "all", method == "active-set")
    found = _result(solution, answer, batch, shapes, structure.dtype, parts[0].dtype)
    if torch.compiler.is_compiling():  # which returns tensors, but no types
        return found
    return dataclasses.replace(found, _constraints=Constraints.of(structure))


def _admitted(init: SparseMAPResult, structure: PartStructure) -> SparseMAPResult:
    """``init`` without the items that have other constraints now (lengths, say): what it holds of
    them need not be structures any more, and the solvers trust what they start from."""
    known = init._constraints
    same = known is not None and known.agree(Constraints.of(structure))
    if same is True:
        return init
    kept = torch.as_tensor(same, device=init.probs.device).unsqueeze(-1)
    return dataclasses.replace(init, probs=torch.where(kept, init.probs.detach(), 0.0))


def sparsemap_value(structure: Any, **options: Any) -> Tensor:
    """``structure.sparsemap(**options).value``, for losses.

    Its gradient is μ, so the rest of a face is looked for only if a second derivative is asked for.
    """
    others = not isinstance(structure, PartStructure)  # which say themselves that they have none
    others = others or torch._C._are_functorch_transforms_active() or not is_plain(())
    if others or torch.autograd.forward_ad._current_level >= 0 or not torch.is_grad_enabled():
        return structure.sparsemap(**options).value
    parts = structure._parts()
    with torch.no_grad():
        known = structure.sparsemap(**options)
    means = known.marginals, *known.additional
    again = lambda: structure.sparsemap(**options)  # noqa: E731
    value: Tensor = _Objective.apply(again, known.value, len(means), *means, *parts)
    return value


class _Objective(torch.autograd.Function):
    """A known value of parts, whose gradient is known too, and its derivative can be found."""

    @staticmethod
    def forward(ctx: Any, again: Any, value: Tensor, count: int, *tensors: Tensor) -> Tensor:
        ctx.again, ctx.count = again, count
        ctx.save_for_backward(*tensors)  # the parts too, since again() reads them
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        means = ctx.saved_tensors[: ctx.count]
        if torch.is_grad_enabled():
            found = ctx.again()
            means = found.marginals, *found.additional
        flow = [grad[(..., *[None] * (m.dim() - grad.dim()))] * m for m in means]
        return (None,) * (3 + ctx.count) + tuple(flow)


def sparsemap_oracle(
    argmax_fn: Callable[..., Tensor],
    scores: Tensor,
    batch_dims: int = 1,
    method: str = "active-set",
    max_iter: int = 1000,
    tol: float | None = None,
    init: SparseMAPResult | None = None,
) -> SparseMAPResult:
    """SparseMAP over the structures that a function finds.

    Args:
        argmax_fn: from scores ``(b, *parts)``, float64, to best structures z of the same shape, as
            0/1 or as counts. b is at most the size of the batch: items that are done are asked for
            no more. A function of two arguments also gets their numbers in the flattened batch,
            ``(b)``. Both are copies, so it may write into them
        scores: ``(*batch, *parts)``; a part of score −inf is forbidden
        batch_dims: how many dimensions the batch has
        method, tol: as for ``Structure.sparsemap``
        max_iter: how often ``argmax_fn`` is called at most, but twice at least: the second call
            finds the gap. ``iterations`` counts the calls that the method makes. What is left of
            them serves derivatives of the active set, to find the rest of the optimal face
        init: an earlier result for similar scores, to start from. Its structures need not be
            structures any more, so one more call for each, at scores of 1 for its parts and −1 for
            the others, confirms it; one that is not returned then is dropped

    >>> def best_pair(scores):  # any two of n
    ...     return torch.zeros_like(scores).scatter(-1, scores.topk(2).indices, 1.0)
    >>> result = sparsemap_oracle(best_pair, torch.tensor([[1.0, 0.8, 0.5, -1.0]]))
    >>> result.marginals
    tensor([[0.9000, 0.7000, 0.4000, 0.0000]])
    >>> result.structures[0], result.probs[0]
    (tensor([[1., 1., 0., 0.],
            [1., 0., 1., 0.],
            [0., 1., 1., 0.]]), tensor([0.6000, 0.3000, 0.1000]))
    """
    owner = "sparsemap_oracle"
    tol = _checked_options(owner, method, max_iter, tol)
    parts = scores.dim() - batch_dims if isinstance(scores, Tensor) else 1
    checks.scores(
        owner, "scores", scores, parts if parts > 0 else batch_dims + 1, "(*batch, *parts)"
    )
    if checks.can_look():
        checks.values(owner, {"scores": (scores, None)})
    batch, event = scores.shape[:batch_dims], scores.shape[batch_dims:]
    _check_init(owner, init, batch, event)
    wide = scores if scores.dtype.itemsize >= 4 else scores.float()
    given = wide.reshape(batch.numel(), event.numel()).double()
    watched, size = is_transforming([given]), event.numel()

    def run(*plain: Tensor) -> Solution:
        (theta,) = plain or (given.detach(),)
        items = torch.arange(len(theta), device=theta.device)
        oracle = _UserOracle(argmax_fn, event, items, [max(max_iter, 2)])
        start = None if init is None else _confirmed(init, oracle.again(), theta)
        solution = _by_torch(method, oracle, theta, size, size, int(oracle.left), tol, start)
        if not watched or method != "active-set":
            return solution
        return _completed(solution, oracle, theta, size, False)

    solution = _untracked(run, [given])
    checks.feasible("sx", owner, torch.where(solution.gap.isnan(), -torch.inf, 0.0).reshape(batch))
    answer = _attach(solution, [given], False, method == "active-set")
    return _result(solution, answer, batch, [event], scores.dtype, wide.dtype)


def _confirmed(init: SparseMAPResult, oracle: _UserOracle, theta: Tensor) -> SparseMAPResult:
    """``init`` without what an oracle does not return at scores that only this structure
    maximises."""
    if not len(theta):
        return init
    counts = init.structures.detach().reshape(len(theta), -1, theta.shape[1]).to(theta)
    weights = init.probs.detach().reshape(len(theta), -1).to(theta)
    found = torch.zeros_like(weights)
    for k in (weights > 0).any(0).nonzero().squeeze(-1).tolist():
        z = counts[:, k]
        _, best = oracle(torch.where(theta == -torch.inf, theta, 2 * z - 1))
        same = (best == z).all(-1) & (weights[:, k] > 0)
        found[:, k] = torch.where(same, weights[:, k], 0.0)
    return dataclasses.replace(init, probs=found.reshape(init.probs.shape))


def projection(structure: PartStructure, point: Tensor, **options: Any) -> SparseMAPResult:
    """The Euclidean projection of a point onto the polytope, as a distribution over structures.

    ``point`` is ``(..., *batch, *parts)``, over the primary parts; ``options`` are those of
    ``Structure.sparsemap``. Additional parts (transitions, …) do not count, but what is forbidden
    (−inf) stays forbidden. Differentiable in the point.

    >>> import structmax as sx
    >>> result = projection(sx.KSubset(torch.zeros(3), 2), torch.tensor([1.0, 0.5, 0.5]))
    >>> result.structures, result.probs
    (tensor([[1., 1., 0.],
            [1., 0., 1.]]), tensor([0.5000, 0.5000]))
    """
    event = len(structure.event_shape)
    if not isinstance(point, Tensor) or not point.is_floating_point():
        got = point.dtype if isinstance(point, Tensor) else type(point).__name__
        raise ValueError(f"project: point must be a floating-point tensor, got {got}.")
    try:
        batch = torch.broadcast_shapes(point.shape[: point.dim() - event], structure.batch_shape)
        point = point.expand(*batch, *structure.event_shape)
    except RuntimeError:
        shape = (*structure.batch_shape, *structure.event_shape)
        raise ValueError(
            f"project: point must be {shape} for {structure._name}, with any number of dimensions "
            f"in front, got {tuple(point.shape)}."
        ) from None
    if checks.can_look():
        bad = structure._usable_parts() & ~(point.detach() < torch.inf)
        if bool(bad.any()):
            where = bad.nonzero()[0].tolist()
            raise ValueError(f"project: point{where} is NaN or +inf; it must be a number, or -inf.")
    if batch != structure.batch_shape:
        structure = structure.expand(batch)
    result: SparseMAPResult = structure._with_gains(point).sparsemap(**options)
    return result


def project(structure: PartStructure, point: Tensor) -> Tensor:
    """The Euclidean projection of a point onto the polytope of structures, ``(*batch, *parts)``.

    Args:
        structure: its scores do not matter, except that forbidden (−inf) parts stay out
        point: ``(..., *batch, *parts)``, over the primary parts

    Differentiable in the point.

    >>> import structmax as sx
    >>> pairs = sx.Assignment(torch.zeros(2, 2))
    >>> project(pairs, torch.tensor([[0.9, 0.0], [0.4, 0.5]]))  # rows and columns sum to one
    tensor([[0.7500, 0.2500],
            [0.2500, 0.7500]])
    """
    if not isinstance(structure, Structure):
        kind = type(structure).__name__
        raise ValueError(f"project: the first argument must be a structure, got {kind}.")
    return projection(structure, point).marginals


# -- which solver --------------------------------------------------------------------------------


def _solve(
    structure: PartStructure,
    method: str,
    max_iter: int,
    tol: float,
    init: SparseMAPResult | None,
    penalize: str,
    complete: bool = False,
) -> Solution:
    """``complete``: whether a compiled solver is to find the whole face."""
    parts, batch = structure._parts(), structure.batch_shape
    backend, found = backend_for(parts[0]), None
    if method == "active-set" and batch.numel():
        if backend == "cpu" and parts[0].device.type == "cpu":
            from structmax.sparse import cpu

            found = cpu.solve(structure, penalize, max_iter, tol, init, complete)
        elif backend == "gpu":
            from structmax.sparse import fused_gpu

            found = fused_gpu.solve(structure, penalize, max_iter, tol, init, complete)
    if found is not None:
        return found
    theta = torch.cat(_flat(structure._exact_parts(), batch), -1)
    primary = structure.event_shape.numel()
    width = theta.shape[-1] if penalize == "all" else primary
    oracle = _StructureOracle(structure)
    return _by_torch(method, oracle, theta, primary, width, max_iter, tol, init)


def _flat(parts: Sequence[Tensor], batch: torch.Size) -> list[Tensor]:
    """Parts ``(*batch, *event)`` as ``(B, *)``, in float64."""
    return [p.reshape(batch.numel(), p.shape[len(batch) :].numel()).double() for p in parts]


def _by_torch(
    method: str,
    oracle: Oracle,
    theta: Tensor,
    primary: int,
    width: int,
    max_iter: int,
    tol: float,
    init: SparseMAPResult | None,
) -> Solution:
    if not len(theta):
        empty = theta.new_zeros(0, 1)
        counts = theta.new_zeros(0, 1, theta.shape[1])
        none = theta.new_zeros(0)
        return Solution(counts[..., :primary], counts[..., primary:], empty, none, none.long())
    start = None
    if init is not None:
        counts = init.structures.detach().reshape(len(theta), -1, primary)
        edges = init.edges.detach().reshape(len(theta), counts.shape[1], -1)
        weights = init.probs.detach().reshape(len(theta), -1)
        start = torch.cat([counts, edges], -1).to(theta), weights.to(theta)
    args = oracle, theta, primary, width, max_iter, tol, start
    if method == "active-set":
        return active_set.solve(*args)
    return conditional_gradient.solve(method, *args)


def _completed(
    solution: Solution, oracle: Oracle, theta: Tensor, width: int, at_once: bool
) -> Solution:
    """The solution with the rest of its faces, which its derivatives need."""
    if not len(theta):
        return solution
    found = completion.complete(oracle, theta, solution, width, at_once)
    items, rows = (None, None) if found is None else found
    return solution._replace(items=items, rows=rows, whole=True)


class _StructureOracle:
    """The argmax of a structure at other scores."""

    few = 128  # programs that run at once
    left = math.inf

    def __init__(self, structure: PartStructure) -> None:
        self.structure = structure._trusted()  # the scores are valid and need not be read
        batch = len(structure.batch_shape)
        self.events = [p.shape[batch:] for p in structure._parts()]

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        flat = scores.split([event.numel() for event in self.events], -1)
        batch = self.structure.batch_shape
        parts = [s.reshape(*batch, *event) for s, event in zip(flat, self.events, strict=True)]
        value, counts = self.structure._argmax_parts(parts)
        return value.reshape(len(scores)).double(), torch.cat(_flat(counts, batch), -1)

    def keep(self, index: Tensor) -> _StructureOracle:
        if not self.structure.batch_shape:
            return _StructureOracle(self.structure.expand(index.shape)) if len(index) > 1 else self
        return _StructureOracle(self.structure._items(index))


class _UserOracle:
    """A user's function, and how many calls of it are left, which ``keep`` shares."""

    few = 1

    def __init__(
        self, function: Callable[..., Tensor], event: torch.Size, items: Tensor, calls: list[int]
    ) -> None:
        self.function, self.event, self.items, self.calls = function, event, items, calls

    @property
    def left(self) -> float:
        return self.calls[0]

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        self.calls[0] -= 1
        shape = len(scores), *self.event
        items = (self.items.clone(),) if _wants_items(self.function) else ()
        z = self.function(scores.reshape(shape).clone(), *items)  # which may write into them
        if not isinstance(z, Tensor) or z.shape != shape:
            got = tuple(z.shape) if isinstance(z, Tensor) else type(z).__name__
            raise ValueError(
                "sparsemap_oracle: argmax_fn must return structures of the shape of its scores, "
                f"{shape}, got {got}."
            )
        z = z.detach().reshape(scores.shape).to(scores, copy=True)  # it may return one buffer
        wrong = ~z.isfinite().all(-1)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise ValueError(
                f"sparsemap_oracle: argmax_fn returned {z[row].tolist()} for item "
                f"{int(self.items[row])} of the flattened batch. It must return a structure, as "
                "0/1 or as counts, also where scores are -inf."
            )
        return torch.where(z != 0, scores * z, 0.0).sum(-1), z

    def again(self) -> _UserOracle:
        """The same, whose calls do not count here."""
        return _UserOracle(self.function, self.event, self.items, self.calls.copy())

    def keep(self, index: Tensor) -> _UserOracle:
        return _UserOracle(self.function, self.event, self.items[index], self.calls)


def _wants_items(function: Callable[..., Tensor]) -> bool:
    """Whether a function has two required positional parameters."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built-in functions need not have one
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is p.empty for p in positional) == 2


# -- derivatives ---------------------------------------------------------------------------------


class Untracked(torch.autograd.Function):
    """A computation on plain tensors inside a ``torch.func`` transform, without derivatives."""

    @staticmethod
    def forward(run: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
        return run(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output)
        ctx.count = len(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> tuple[None, ...]:
        return (None,) * ctx.count

    @staticmethod
    def vmap(*_: Any) -> Any:
        raise RuntimeError(
            "SparseMAP has no rule for torch.vmap: how many structures are active depends on the "
            "scores. Make the mapped dimension one of the batch."
        )


def _untracked(run: Callable[..., Solution], tensors: Sequence[Tensor]) -> Solution:
    """What a solver finds, without derivatives; inside a transform it is given plain tensors."""
    refuse_without_values("sparsemap", *tensors)
    if torch.compiler.is_compiling():
        return _uncompiled(run, tensors)
    if torch._C._are_functorch_transforms_active():
        names: list[str] = []

        def known(*plain: Tensor) -> tuple[Tensor, ...]:
            solution = _as_tensors(run(*plain))
            found = {k: t for k, t in solution._asdict().items() if isinstance(t, Tensor)}
            names[:] = found
            return tuple(found.values())

        tensors_found = Untracked.apply(known, *tensors)
        return Solution(**dict(zip(names, tensors_found, strict=True)))
    with torch.no_grad():  # which lets forward derivatives pass
        forward = torch.autograd.forward_ad._current_level >= 0
        return run(*[t.detach() for t in tensors]) if forward else run()


def _as_tensors(solution: Solution) -> Solution:
    """The same without the object that a compiled solver gives."""
    more = None if solution.face is None else solution.face.more()
    items, rows = (solution.items, solution.rows) if more is None else more
    return solution._replace(face=None, items=items, rows=rows)


# how often an oracle is asked depends on the data; torch.compiler.disable would do the same, but
# also load the compiler where nobody compiles
_uncompiled = torch._disable_dynamo(lambda run, tensors: _as_tensors(_untracked(run, tensors)))


class _Answer(NamedTuple):
    probs: Tensor  # (B, K)
    means: list[Tensor]  # expected counts of each kind of part, (B, *)
    value: Tensor  # (B)


def _attach(
    solution: Solution, theta: Sequence[Tensor], penalize_all: bool, independent: bool
) -> _Answer:
    """The solution with its derivatives in the scores θ, each ``(B, *)``, primary ones first."""
    answer = _on_active(solution, theta, penalize_all, independent)
    if solution.items is None or solution.rows is None or not is_transforming(theta):
        return answer
    return _on_face(solution, theta, penalize_all, answer)


def _on_active(
    solution: Solution, theta: Sequence[Tensor], penalize_all: bool, independent: bool
) -> _Answer:
    """With the active structures held fixed.

    p is written as a linear function of the scores whose value is that of the solver: everything
    else, and every derivative, follows from it.
    """
    p = solution.probs
    if solution.face is not None:
        return _Answer(*solution.face.attach(theta))
    vertices, edges = solution.vertices.to(p.dtype), solution.edges.to(p.dtype)
    counts = [vertices, *edges.split([t.shape[-1] for t in theta[1:]], -1)]
    penalised = counts if penalize_all else counts[:1]
    means = [_mean(p, m) for m in counts]
    # a part that no active structure has may hold anything
    theta = [torch.where(m != 0, t, 0.0) for m, t in zip(means, theta, strict=True)]
    if is_transforming(theta):
        pairs = zip(counts, theta, strict=True)
        c = torch.stack([(m @ t[..., None]).squeeze(-1) for m, t in pairs]).sum(0)
        w = solution.inverse
        q = _jacobian(penalised, p > 0, independent) if w is None else _bordered(w)
        p = p + (q @ (c - c.detach())[..., None]).squeeze(-1)
        means = [_mean(p, m) for m in counts]
    squares = [m.square().sum(-1) for m in means[: len(penalised)]]
    products = [(t * m).sum(-1) for t, m in zip(theta, means, strict=True)]
    return _Answer(p, means, torch.stack(products).sum(0) - torch.stack(squares).sum(0) / 2)


def _mean(p: Tensor, counts: Tensor) -> Tensor:
    return (p[:, None] @ counts).squeeze(1)


def _jacobian(penalised: Sequence[Tensor], active: Tensor, independent: bool) -> Tensor:
    """Q ``(B, K, K)``, 0 outside the active slots.

    Conditional gradients also meet affinely dependent structures: there Q is the pseudo-inverse of
    the Gram matrix of centred columns, which is the same where both exist.
    """
    gram = torch.stack([m @ m.mT for m in penalised]).sum(0)
    inside = active[:, :, None] & active[:, None, :]
    eye = torch.eye(active.shape[-1], dtype=gram.dtype, device=gram.device)
    if not independent:
        count = active.sum(-1)[:, None, None]
        centre = torch.where(inside, eye - 1 / count, 0.0)
        return torch.linalg.pinv(centre @ gram @ centre, rtol=1e-10, hermitian=True)
    factor, _ = torch.linalg.cholesky_ex(torch.where(inside, gram + 1, eye))
    return _bordered(torch.where(inside, torch.cholesky_inverse(factor), 0.0))


def _bordered(inverse: Tensor) -> Tensor:
    """Q from A⁻¹."""
    w = inverse.sum(-1, keepdim=True)
    return inverse - w @ w.mT / w.sum(1, keepdim=True)


def _on_face(
    solution: Solution, theta: Sequence[Tensor], penalize_all: bool, answer: _Answer
) -> _Answer:
    """Means and values of some items with the derivatives of their whole faces."""
    items, rows = solution.items, solution.rows
    assert items is not None and rows is not None
    scores = torch.cat([t[items] for t in theta], -1)
    mean = torch.cat([m.detach()[items] for m in answer.means], -1)
    met = (mean != 0) | (rows != 0).any(1)
    scores = torch.where(met, scores, 0.0)  # what no structure of the face has may be anything
    move = rows @ (scores - scores.detach())[..., None]
    if solution.inner is not None:
        move = _bordered(solution.inner) @ move
    mean = mean + _mean(move.squeeze(-1), rows)
    penalised = mean if penalize_all else mean[:, : theta[0].shape[-1]]
    value = (scores * mean).sum(-1) - penalised.square().sum(-1) / 2
    pieces = mean.split([m.shape[-1] for m in answer.means], -1)
    means = [m.index_copy(0, items, new) for m, new in zip(answer.means, pieces, strict=True)]
    return _Answer(answer.probs, means, answer.value.index_copy(0, items, value))


def _result(
    solution: Solution,
    answer: _Answer,
    batch: torch.Size,
    events: Sequence[torch.Size],
    dtype: torch.dtype,
    wide: torch.dtype,
) -> SparseMAPResult:
    first, *others = (
        m.reshape(*batch, *event) for m, event in zip(answer.means, events, strict=True)
    )
    slots = solution.probs.shape[-1]
    # scores of a huge number that all structures share leave no digits for the others
    doubt = torch.finfo(torch.float64).eps * answer.value.detach().abs()
    gap = torch.where(doubt > ROUNDING, torch.maximum(solution.gap, doubt), solution.gap)
    return SparseMAPResult(
        marginals=first.to(dtype),
        structures=solution.vertices.reshape(*batch, slots, *events[0]).to(dtype),
        probs=answer.probs.reshape(*batch, slots).to(wide),
        num_active=(solution.probs > 0).sum(-1).reshape(batch),
        gap=gap.reshape(batch).to(wide),
        value=answer.value.reshape(batch).to(wide),
        additional=tuple(m.to(wide) for m in others),
        edges=solution.edges.reshape(*batch, slots, solution.edges.shape[-1]).to(wide),
        iterations=solution.iterations.reshape(batch),
    )


# -- checks --------------------------------------------------------------------------------------


def _checked_options(owner: str, method: str, max_iter: int, tol: float | None) -> float:
    if method not in METHODS:
        raise ValueError(f"{owner}: method must be one of {', '.join(METHODS)}, got {method!r}.")
    if not isinstance(max_iter, int) or max_iter < 1:
        raise ValueError(f"{owner}: max_iter must be at least 1, an integer, got {max_iter!r}.")
    if tol is not None and not tol > 0:
        raise ValueError(f"{owner}: tol must be a positive number, got {tol!r}.")
    default = 1e-10 if method == "active-set" else 1e-6
    return default if tol is None else float(tol)


def _check_init(owner: str, init: Any, batch: torch.Size, event: torch.Size) -> None:
    if init is None:
        return
    if not isinstance(init, SparseMAPResult):
        raise ValueError(
            f"{owner}: init must be the result of an earlier sparsemap, got {type(init).__name__}."
        )
    if init.marginals.shape != batch + event:
        raise ValueError(
            f"{owner}: init must be for the shape {(*batch, *event)}, got "
            f"{tuple(init.marginals.shape)}."
        )
