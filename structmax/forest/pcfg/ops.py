"""Grammars as torch functions: two differentiable primitives and the discrete queries.

Scores: ``spans (*batch, n, n, S)``, ``root (*batch, N)`` and ``rules (*batch, N, S, S)``, or the
factors of low rank, ``left, right (*batch, S, R)`` and ``parent (*batch, N, R)``. Constant:
``lengths (*batch)``. The kernels know γ = 1: γ·A(θ/γ) has gradient μ(θ/γ) and Hessian ∇²A(θ/γ)/γ.

The same code serves a CPU and a GPU. Walks down a chart (``argmax``, ``sample``, ``kbest``) run on
the host, with charts computed on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from structmax.fence import Limits, fenced
from structmax.forest.pcfg import naive
from structmax.forest.pcfg.chart import Dual, Grammar
from structmax.forest.pcfg.low_rank import LowRank
from structmax.forest.pcfg.products import Products, items_with, wrong
from structmax.forest.pcfg.scaled import Scaled
from structmax.forest.pcfg.terms import Best, Terms
from structmax.forest.pcfg.trees import rule_counts
from structmax.primitive import (
    Omega,
    Primitive,
    Tensors,
    backend_for,
    flatten_batch,
    register,
    to_front,
)
from structmax.smoothing import HARD, Shannon, from_code

PIECE = 1 << 28  # bytes that the work on one piece of a batch may take, roughly
ON_GPU = 8  # times as many there, where a piece costs as many launches as a batch


def _in_pieces(run: Callable[..., list[Tensor]], *groups: Tensors) -> list[Tensor]:
    """``run(*groups)`` piece by piece along the batch, so that what kernels hold is bounded."""
    spans, root, *_ = groups[0]
    n, S, N = spans.shape[1], spans.shape[3], root.shape[1]
    item = 8 * (12 * n * n * S + 6 * N * S * S + 6 * n * S * S)
    room = PIECE * (ON_GPU if backend_for(spans) == "gpu" else 1)
    size = max(1, room // item)
    if len(spans) <= size:
        return run(*groups)
    at = [slice(i, i + size) for i in range(0, len(spans), size)]
    pieces = [run(*[[t[piece] for t in group] for group in groups]) for piece in at]
    return [torch.cat(column) for column in zip(*pieces, strict=True)]


def _mend(
    bad: Tensor | None, results: list[Tensor], again: Callable[[Tensor], list[Tensor]]
) -> None:
    """Computes the bad items of the results again; NaN where one cannot look which those are."""
    if bad is None:
        return
    if bad.is_cuda and torch.cuda.is_current_stream_capturing():
        for x in results:
            x.masked_fill_(bad[(..., *[None] * (x.dim() - 1))], math.nan)
    elif bool(bad.any()):
        items = bad.nonzero().squeeze(1)
        for x, mended in zip(results, again(items), strict=True):
            x[items] = mended


def _log_chart(g: Grammar) -> Tensor:
    """β ``(B, n, n, N)`` as ``[first, width − 1]``."""
    fast = Products(g)
    fast.rise()

    def again(items: Tensor) -> list[Tensor]:
        exact = Terms(g.take(items))
        exact.rise()
        return [exact.log.by_start.x]

    chart = fast.log.by_start.x
    _mend(wrong(fast), [chart], again)
    return chart


def _values(g: Grammar) -> Tensor:
    from structmax.forest.pcfg import products_cpu

    bad: Tensor | None
    if products_cpu.fits(g):
        (a,) = products_cpu.solve(g, slopes=False)
        bad = a.isnan()
    else:
        chart = Scaled(g)
        a, bad = chart.rise(), chart.wrong()
    _mend(bad, [a], lambda items: [_values_of_any_range(g.take(items))])
    return a


def _values_of_any_range(g: Grammar) -> Tensor:
    fast = Products(g)
    a = fast.rise()
    _mend(wrong(fast), [a], lambda items: [Terms(g.take(items)).rise()])
    return a


def _solve(g: Grammar, v: Grammar | None = None) -> list[Tensor]:
    """A and its gradient; with a direction, A and the derivative of its gradient."""
    from structmax.forest.pcfg import products_cpu

    if v is not None:
        return _solve_any_range(g, v)
    bad: Tensor | None
    if products_cpu.fits(g):
        results = products_cpu.solve(g, slopes=True)
        bad = results[0].isnan()
    else:
        chart = Scaled(g)
        results, bad = [chart.rise(), *chart.fall()], chart.wrong()
    _mend(bad, results, lambda items: _solve_any_range(g.take(items)))
    return results


def _solve_any_range(g: Grammar, v: Grammar | None = None) -> list[Tensor]:
    def run(kernel: Terms | Products) -> list[Tensor]:
        return [kernel.rise(), *_wanted(kernel.fall())]

    fast = Products(g, v)
    results = run(fast)
    again = lambda items: run(Terms(g.take(items), v and v.take(items)))  # noqa: E731
    _mend(wrong(fast), results, again)
    return results


def _wanted(counts: list[Dual]) -> list[Tensor]:
    return [c.x if c.d is None else c.d for c in counts]


def _best_charts(g: Grammar) -> tuple[Tensor, Tensor, Tensor]:
    """The best score ``(B)``, and the charts of the maximum ``(B, n, n, N)`` as ``[first, width −
    1]`` and, for words, ``(B, n, P)``."""
    from structmax.forest.pcfg import best_cpu

    if backend_for(g.spans) == "cpu":
        return best_cpu.charts(g)
    chart = Best(g)
    return chart.rise(), chart.log.by_start.x, chart.log.leaf.x


def _best(scores: Tensors, lengths: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best score ``(B)``, the k best scores and their trees."""
    from structmax.forest.pcfg import cpu

    g = Grammar(scores, lengths, 1.0)
    best, chart, leaf = _best_charts(g)
    arrays = (chart, leaf, g.spans, g.root, g.rules, g.lengths)
    values, z = (t.to(best.device) for t in cpu.kbest(*arrays, k))
    bad = best.isnan()[:, None]
    values = torch.where(bad, math.nan, values)
    return best, values, torch.where(bad[..., None, None, None], math.nan, z)


# -- the primitive for a tensor of rules ---------------------------------------------------------


def _naive(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> Tensor:
    spans, root, rules = scores
    return naive.value(spans, root, rules, constants[0], from_code(omega))


def _value(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> Tensor:
    def run(scores: Tensors, constants: Tensors) -> list[Tensor]:
        if omega[0] == HARD:
            return [_best_charts(Grammar(scores, constants[0], 1.0))[0]]
        return [omega[1] * _values(Grammar(scores, constants[0], omega[1]))]

    return _in_pieces(run, scores, constants)[0].to(scores[0].dtype)


def _gradient(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> list[Tensor]:
    def run(scores: Tensors, constants: Tensors) -> list[Tensor]:
        if omega[0] == HARD:
            return _hard_gradient(scores, constants[0])
        a, *mu = _solve(Grammar(scores, constants[0], omega[1]))
        return [omega[1] * a, *mu]

    return [t.to(scores[0].dtype) for t in _in_pieces(run, scores, constants)]


def _hard_gradient(scores: Tensors, lengths: Tensor) -> list[Tensor]:
    """The best score and the parts of one best tree."""
    best, _, z = _best(scores, lengths, 1)
    N, items = scores[1].shape[-1], torch.arange(len(best), device=best.device)
    z = z[:, 0]
    return [best, z, z[items, 0, lengths.long() - 1, :N], rule_counts(z, N)]


def _hvp(
    scores: Tensors, directions: Tensors, constants: Tensors, key: str, omega: Omega
) -> list[Tensor]:
    if omega[0] == HARD:
        return [torch.zeros_like(s) for s in scores]

    def run(scores: Tensors, directions: Tensors, constants: Tensors) -> list[Tensor]:
        return _solve(*_with_direction(scores, directions, constants[0], omega[1]))[1:]

    w = _in_pieces(run, scores, directions, constants)
    return [(t / omega[1]).to(scores[0].dtype) for t in w]


def _with_direction(
    scores: Tensors, directions: Tensors, lengths: Tensor, gamma: float
) -> tuple[Grammar, Grammar]:
    pairs = zip(scores, directions, strict=True)
    v = [torch.where(s == -math.inf, 0.0, d) for s, d in pairs]  # no change of what is forbidden
    return Grammar(scores, lengths, gamma), Grammar(v, lengths, 1.0, outside=0.0)


def _terms(scores: Tensors, constants: Tensors, key: str) -> Tensor:
    """A tree of n words has 2n − 1 spans, n − 1 rules and a root symbol."""
    return 3 * constants[0]


def _limits(scores: Tensors, key: str = "") -> Limits:
    """Lengths are those of the chart at most."""
    return [(1, scores[0].shape[-2])]


pcfg = Primitive("pcfg", (3, 1, 3), (0,), _value, _gradient, _hvp, _naive, _limits, terms=_terms)


# -- the primitive of low rank, Shannon with γ = 1 -----------------------------------------------


def _naive_low_rank(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> Tensor:
    spans, root, *factors = scores
    rules = naive.collapse(*(f.double() for f in factors))
    return naive.value(spans, root, rules, constants[0], from_code(omega))


def _value_low_rank(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> Tensor:
    def run(scores: Tensors, constants: Tensors) -> list[Tensor]:
        g = Grammar(scores, constants[0], 1.0)
        fast = LowRank(g)
        a = fast.rise()
        _mend(
            items_with(fast.small(), g.lengths), [a], lambda items: [_values(_dense(g.take(items)))]
        )
        return [a]

    return _in_pieces(run, scores, constants)[0].to(scores[0].dtype)


def _dense(g: Grammar) -> Grammar:
    scores = [g.spans, g.root, naive.collapse(*g.weights).expand(len(g.spans), -1, -1, -1)]
    return Grammar(scores, g.lengths, 1.0, g.outside)


def _gradient_low_rank(scores: Tensors, constants: Tensors, key: str, omega: Omega) -> list[Tensor]:
    def run(scores: Tensors, constants: Tensors) -> list[Tensor]:
        return _solve_low_rank(Grammar(scores, constants[0], 1.0), None)

    return [t.to(scores[0].dtype) for t in _in_pieces(run, scores, constants)]


def _hvp_low_rank(
    scores: Tensors, directions: Tensors, constants: Tensors, key: str, omega: Omega
) -> list[Tensor]:
    def run(scores: Tensors, directions: Tensors, constants: Tensors) -> list[Tensor]:
        return _solve_low_rank(*_with_direction(scores, directions, constants[0], 1.0))[1:]

    return [t.to(scores[0].dtype) for t in _in_pieces(run, scores, directions, constants)]


def _solve_low_rank(g: Grammar, v: Grammar | None) -> list[Tensor]:
    fast = LowRank(g, v)
    results = [fast.rise(), *_wanted(fast.fall())]

    def again(items: Tensor) -> list[Tensor]:
        """By the naive twin: for numbers that no product of float64 holds."""
        h = g.take(items)
        size = len(items)
        leaves = [t.expand(size, *t.shape[1:]).contiguous() for t in (h.spans, h.root, *h.weights)]
        if v is None:
            return low_rank._naive_gradient(leaves, [h.lengths], "", Shannon().code)
        u = v.take(items)
        along = [t.expand(size, *t.shape[1:]) for t in (u.spans, u.root, *u.weights)]
        w = low_rank._naive_hvp(leaves, along, [h.lengths], "", Shannon().code)
        return [results[0][items], *w]

    _mend(items_with(fast.small(), g.lengths), results, again)
    return results


low_rank = Primitive(
    "pcfg_low_rank",
    (3, 1, 2, 2, 2),
    (0,),
    _value_low_rank,
    _gradient_low_rank,
    _hvp_low_rank,
    _naive_low_rank,
    _limits,
    terms=lambda scores, constants, key: 5 * constants[0],  # a rule has three scores
)


# -- discrete queries ----------------------------------------------------------------------------

DIMS = (3, 1, 3, 0)  # event dimensions of spans, root, rules, lengths


def _flat(*tensors: Tensor) -> tuple[list[Tensor], Tensor]:
    flat = [flatten_batch(t, d) for t, d in zip(tensors, DIMS, strict=True)]
    return flat[:3], flat[3]


@fenced([3], lambda *given: _limits(given))
def _run_kbest(spans: Tensor, root: Tensor, rules: Tensor, lengths: Tensor, k: int) -> list[Tensor]:
    batch, event = spans.shape[:-3], spans.shape[-3:]
    scores, sizes = _flat(spans, root, rules, lengths)
    run = lambda s, c: list(_best(s, c[0], k))  # noqa: E731
    best, values, z = (t.to(spans.dtype) for t in _in_pieces(run, scores, [sizes]))
    return [best.reshape(batch), values.reshape(*batch, k), z.reshape(*batch, k, *event)]


def _best_goal(g: Grammar, chart: Tensor) -> Tensor:
    """The largest term of A ``(B)``: finite if a tree can be drawn."""
    items = torch.arange(len(chart), device=chart.device)
    return (g.root + chart[items, 0, g.lengths - 1]).amax(-1)


@fenced([3], lambda *given: _limits(given), lead=1)
def _run_sample(
    spans: Tensor, root: Tensor, rules: Tensor, lengths: Tensor, uniform: Tensor, gamma: float
) -> Tensor:
    from structmax.forest.pcfg import cpu

    batch, event = spans.shape[:-3], spans.shape[-3:]
    scores, sizes = _flat(spans, root, rules, lengths)

    def run(scores: Tensors, constants: Tensors, numbers: Tensors) -> list[Tensor]:
        g = Grammar(scores, constants[0], gamma)
        chart = _log_chart(g)
        a = _best_goal(g, chart)
        inputs = (chart, g.leaf(), g.spans, g.root, g.rules, g.lengths)
        z = cpu.sample(*inputs, numbers[0].movedim(1, 0)).to(spans.device, spans.dtype)
        z.masked_fill_(~(a.abs() < math.inf)[:, None, None, None], math.nan)
        return [z.movedim(0, 1)]

    flat = uniform.reshape(len(uniform), batch.numel(), uniform.shape[-1]).movedim(0, 1)
    (z,) = _in_pieces(run, scores, [sizes], [flat])
    return z.movedim(1, 0).reshape(len(uniform), *batch, *event)


@fenced([5], lambda *given: _limits(given), lead=1)
def _run_sample_low_rank(
    spans: Tensor, root: Tensor, left: Tensor, right: Tensor, parent: Tensor, lengths: Tensor,
    uniform: Tensor,
) -> Tensor:  # fmt: skip
    from structmax.forest.pcfg import cpu

    batch, event = spans.shape[:-3], spans.shape[-3:]
    tensors = (spans, root, left, right, parent, lengths)
    *scores, sizes = (flatten_batch(t, d) for t, d in zip(tensors, (3, 1, 2, 2, 2, 0), strict=True))

    def run(scores: Tensors, constants: Tensors, numbers: Tensors) -> list[Tensor]:
        g = Grammar(scores, constants[0], 1.0)
        state = LowRank(g)
        a = state.rise().cpu()
        drawn = cpu.sample_low_rank(state, numbers[0].movedim(1, 0)).movedim(0, 1)
        bad = items_with(state.small(), g.lengths)

        def again(items: Tensor) -> list[Tensor]:
            h = _dense(g.take(items))
            chart = _log_chart(h)
            inputs = (chart, h.leaf(), h.spans, h.root, h.rules, h.lengths)
            z = cpu.sample(*inputs, numbers[0][items].movedim(1, 0)).movedim(0, 1)
            return [_best_goal(h, chart).cpu(), z]

        _mend(bad.cpu(), [a, drawn], again)  # a too: what underflowed looks like no tree at all
        drawn.masked_fill_(~(a.abs() < math.inf)[:, None, None, None, None], math.nan)
        return [drawn.to(spans.device, spans.dtype)]

    flat = uniform.reshape(len(uniform), batch.numel(), uniform.shape[-1]).movedim(0, 1)
    (z,) = _in_pieces(run, scores, [sizes], [flat])
    return z.movedim(1, 0).reshape(len(uniform), *batch, *event)


@fenced([3], lambda *given: _limits(given))
def _run_max_marginals(spans: Tensor, root: Tensor, rules: Tensor, lengths: Tensor) -> Tensor:
    scores, sizes = _flat(spans, root, rules, lengths)

    def run(scores: Tensors, constants: Tensors) -> list[Tensor]:
        chart = Best(Grammar(scores, constants[0], 1.0))
        chart.rise()
        return [chart.max_marginals()]

    return _in_pieces(run, scores, [sizes])[0].to(spans.dtype).reshape(spans.shape)


_tensors = "(Tensor spans, Tensor root, Tensor rules, Tensor lengths"
kbest = register(
    "pcfg_kbest",
    f"{_tensors}, int k) -> Tensor[]",
    _run_kbest,
    lambda spans, root, rules, lengths, k: [
        spans.new_empty(spans.shape[:-3]),
        spans.new_empty(*spans.shape[:-3], k),
        spans.new_empty(*spans.shape[:-3], k, *spans.shape[-3:]),
    ],
)
sample = register(
    "pcfg_sample",
    f"{_tensors}, Tensor uniform, float gamma) -> Tensor",
    _run_sample,
    lambda spans, root, rules, lengths, uniform, gamma: spans.new_empty(
        uniform.shape[0], *spans.shape
    ),
)
sample_low_rank = register(
    "pcfg_sample_low_rank",
    "(Tensor spans, Tensor root, Tensor left, Tensor right, Tensor parent, Tensor lengths, "
    "Tensor uniform) -> Tensor",
    _run_sample_low_rank,
    lambda spans, root, left, right, parent, lengths, uniform: spans.new_empty(
        uniform.shape[0], *spans.shape
    ),
)
max_marginals = register(
    "pcfg_max_marginals",
    f"{_tensors}) -> Tensor",
    _run_max_marginals,
    lambda spans, root, rules, lengths: spans.new_empty(spans.shape),
)


def _register_vmap() -> None:
    def kbest_rule(info, in_dims, *args):  # type: ignore[no-untyped-def]
        out = kbest(*to_front(args[:4], in_dims[:4], info.batch_size), args[4])
        return out, [0] * len(out)

    def max_rule(info, in_dims, *args):  # type: ignore[no-untyped-def]
        return max_marginals(*to_front(args, in_dims, info.batch_size)), 0

    def sample_rule(op, at):  # type: ignore[no-untyped-def]
        """``at`` is the place of the uniform numbers, whose first dimension stays in front."""

        def rule(info, in_dims, *args):  # type: ignore[no-untyped-def]
            front = to_front(args[:at], in_dims[:at], info.batch_size)
            uniform = args[at]
            if in_dims[at] is None:
                uniform = uniform.unsqueeze(1).expand(-1, info.batch_size, *uniform.shape[1:])
            else:
                uniform = uniform.movedim(in_dims[at], 1)
            return op(*front, uniform, *args[at + 1 :]), 1

        return rule

    rules = {kbest: kbest_rule, max_marginals: max_rule, sample: sample_rule(sample, 4)}
    rules[sample_low_rank] = sample_rule(sample_low_rank, 6)
    for op, rule in rules.items():
        torch.library.register_vmap(op, rule)


_register_vmap()
