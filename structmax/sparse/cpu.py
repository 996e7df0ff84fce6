"""SparseMAP on the CPU with the library's own oracles: the whole solve in compiled code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from structmax import fence
from structmax.forest.topology import lookup
from structmax.jit import array, run_chunks
from structmax.sparse import oracles_cpu as compiled
from structmax.sparse.linear_cpu import Face
from structmax.sparse.result import Solution, SparseMAPResult
from structmax.structures.assignment import Assignment
from structmax.structures.dynamic import DynamicStructure
from structmax.structures.ksubset import KSubset
from structmax.structures.linear_chain import LinearChain
from structmax.structures.nonprojective import ArcStructure
from structmax.structures.parts import PartStructure
from structmax.structures.pcfg import PCFG
from structmax.structures.spanning_tree import SpanningTree

STEPS = 20  # about as many times is an oracle asked for an item
Run = Callable[[int, int, compiled.Problem], tuple]  # of what Found holds


def solve(
    structure: PartStructure,
    penalize: str,
    max_iter: int,
    tol: float,
    init: SparseMAPResult | None,
    complete: bool = False,
) -> Solution | None:
    """The active-set solution, or None where a structure has no compiled oracle.

    ``complete``: whether the solution's ``face`` is the whole one, which derivatives need.
    """
    parts = [p.detach() for p in structure._exact_parts()]
    items, batch = structure.batch_shape.numel(), len(structure.batch_shape)
    sizes = [p.shape[batch:].numel() for p in parts]
    theta = torch.cat(
        [p.reshape(items, size).double() for p, size in zip(parts, sizes, strict=True)], -1
    )
    oracle = _oracle(structure, parts, sizes, theta)
    if oracle is None:
        return None
    run, width, work = oracle
    penalised = sizes[0] if penalize == "primary" else sum(sizes)
    start = _start(init, items, sum(sizes))
    limits = max_iter, tol, complete
    problem = compiled.Problem(theta.numpy(), penalised, width, *start, limits)
    chunks: dict[int, compiled.Found] = {}

    def task(low: int, high: int) -> None:
        try:
            chunks[low] = compiled.Found(*run(low, high, problem))
        except SystemError as error:  # Ctrl-C came meanwhile, and numba gave a result besides
            first: BaseException = error
            while first.__cause__ is not None:
                first = first.__cause__
            raise first from None

    if items:
        run_chunks(task, items, STEPS * work)
    else:
        task(0, 0)
    face = Face(chunks, (sizes[0], sum(sizes[1:])))
    vertices, edges, probs = face.counts(structure.dtype)
    gap, steps = torch.from_numpy(face.found.gap), torch.from_numpy(face.found.steps)
    return Solution(vertices, edges, probs, gap, steps, face=face, whole=complete)


def _start(init: SparseMAPResult | None, items: int, size: int) -> tuple[NDArray, NDArray]:
    """Structures ``(B, K, D)`` to start from, and their weights; none without ``init``."""
    if init is None or not bool((init.probs > 0).any()):
        return np.empty((items, 0, size)), np.empty((items, 0))
    k = init.probs.shape[-1]
    given = [t.detach().cpu().double() for t in (init.structures, init.edges, init.probs)]
    counts = torch.cat([t.reshape(items, k, t.numel() // (items * k)) for t in given[:2]], -1)
    return counts.numpy(), given[2].reshape(items, k).contiguous().numpy()


def _ints(structure: PartStructure, name: str, given: Tensor, low: int, high: int) -> NDArray:
    """Integers ``(*batch)`` between two numbers as kernels read them."""
    sizes = fence.require(f"{structure._name}.sparsemap", name, given.long(), low, high)
    return array(sizes.reshape(-1), np.int64)


def _lengths(structure: Any) -> NDArray:
    return _ints(structure, "lengths", structure._lengths(), 1, structure._longest)


def _oracle(
    structure: PartStructure, parts: Sequence[Tensor], sizes: Sequence[int], theta: Tensor
) -> tuple[Run, int, int] | None:
    """The kernel over a chunk of items, the most parts of a structure, and the oracle's cost."""
    shape = tuple(structure.event_shape)
    if isinstance(structure, LinearChain):
        (n, c), lengths = shape, _lengths(structure)
        sides = (n, c, parts[1].shape[-3])
        return (lambda *a: compiled.chains(*a, lengths, sides)), 2 * n - 1, n * c * c
    if isinstance(structure, ArcStructure):
        if structure._has_choices != structure.labelled:
            return None  # some edges are included, which this kernel does not know
        words = _ints(structure, "lengths", structure._words(), 0, shape[0] - 1)
        single = structure._single
        both, s = isinstance(structure, SpanningTree), shape[0]
        sides = (s, s, shape[2] if structure.labelled else 1)
        kinds = words, sides, single, both
        return (lambda *a: compiled.arborescences(*a, *kinds)), 2 * s, 20 * s * s
    if isinstance(structure, Assignment):
        rows, columns = (
            _ints(structure, "lengths", size, 1, most)
            for size, most in zip(structure._sizes(), shape, strict=True)
        )
        cost = 10 * shape[0] * shape[1]
        return (lambda *a: compiled.assignments(*a, rows, columns, shape)), min(shape), cost
    if isinstance(structure, KSubset):
        lengths, k, (n,) = _lengths(structure), (structure._least, structure._most), shape
        return (lambda *a: compiled.subsets(*a, lengths, n, k)), n, 10 * n
    if isinstance(structure, PCFG):
        (n, _, S), lengths, N = shape, _lengths(structure), structure.N
        cost = n * n // 2 * N * S * S
        return (lambda *a: compiled.grammars(*a, lengths, (n, S, N))), 3 * n - 1, cost
    # a structure with an argmax of its own may have a forest that nobody wants to draw
    if getattr(type(structure), "_argmax_parts", None) is DynamicStructure._argmax_parts:
        assert isinstance(structure, DynamicStructure)
        return _forest(structure, parts, sizes, theta)
    return None


def _forest(
    structure: DynamicStructure, parts: Sequence[Tensor], sizes: Sequence[int], theta: Tensor
) -> tuple[Run, int, int] | None:
    """As ``_oracle``. Which part each part of the forest stands for is found by packing numbers."""
    items, forest = len(theta), lookup(structure._forest_key())
    numbers = torch.arange(1.0, theta.shape[1] + 1, dtype=torch.float64, device="cpu").split(
        list(sizes)
    )
    named = [x.expand(items, -1).reshape(p.shape) for x, p in zip(numbers, parts, strict=True)]
    packed, source = (
        structure._pack(given).reshape(items, forest.num_parts).double() for given in (parts, named)
    )
    source = source.clamp(min=0).long() - 1
    given = theta.gather(1, source.clamp(min=0))
    if not bool(((source < 0) | (packed == given) | given.isnan()).all()):
        return None  # the forest's scores are not those of parts, but made from them
    goals = _ints(structure, "goal", structure._goal(), 0, forest.num_nodes - 1)
    arrays = array(packed), array(source), goals
    longest = int(forest.longest)
    return (
        lambda *a: compiled.forests(*a, *arrays, forest.incoming(), longest),
        2 * longest,
        forest.num_edges,
    )
