"""Which picture belongs to which structure: the one place that knows.

A painter takes the structure of one item, the weights of its parts (marginals, or a 0/1 structure),
the names that were given, and whether the weights are soft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from structmax.draw.arcs_svg import arcs_svg
from structmax.draw.bars_svg import bars_svg
from structmax.draw.graph_svg import graph_svg
from structmax.draw.heat_svg import heat_svg
from structmax.draw.lattice_svg import lattice_svg, segments_svg
from structmax.draw.svg import Drawing
from structmax.draw.threads_svg import threads_svg
from structmax.draw.tree_svg import chart_svg, tree_svg
from structmax.structures.alignment import Alignment
from structmax.structures.assignment import Assignment
from structmax.structures.base import Structure
from structmax.structures.binary_tree import BinaryTree
from structmax.structures.ctc import CTC
from structmax.structures.dependency_tree import DependencyTree
from structmax.structures.grid_path import GridPath
from structmax.structures.incremental import Incremental
from structmax.structures.linear_chain import LinearChain
from structmax.structures.path import Path
from structmax.structures.pcfg import PCFG
from structmax.structures.semi_markov import SemiMarkov
from structmax.structures.spanning_tree import SpanningTree

Given = Sequence[Any] | None
LIKELY = 0.5  # an arc that is less likely is drawn without its label: two would overlap


def names(owner: str, what: str, given: Given, count: int, first: int = 0) -> list[str]:
    """The names given, as text, or numbers from ``first`` on.

    >>> names("Choice", "tokens", None, 3)
    ['0', '1', '2']
    """
    if given is None:
        return [str(first + i) for i in range(count)]
    if isinstance(given, str) or len(given) != count:
        got = repr(given) if isinstance(given, str) else f"{len(given)}"
        raise ValueError(f"{owner}.draw: {what} must be a sequence of {count} names, got {got}.")
    return [str(name) for name in given]


def _length(s: Any, most: int) -> int:
    return most if s.lengths is None else int(s.lengths)


def _entries(weights: Tensor) -> list[tuple[Any, ...]]:
    """Index and weight of what is not zero."""
    at = weights.nonzero()
    return [(*i, p) for i, p in zip(at.tolist(), weights[tuple(at.T)].tolist())]


def arcs(s: DependencyTree, weights: Tensor, tokens: Given, labels: Given, soft: bool) -> Drawing:
    words = names(s._name, "tokens", tokens, _length(s, s.event_shape[0] - 1), 1)
    if not s.labelled:
        return arcs_svg(words, _entries(weights))
    kinds = names(s._name, "labels", labels, s.event_shape[2])
    best = weights.argmax(-1)
    found = _entries(weights.sum(-1))
    written = {(h, m): kinds[int(best[h, m])] for h, m, p in found if p >= LIKELY}
    return arcs_svg(words, found, written)


def spans(s: Any, weights: Tensor, tokens: Given, labels: Given, soft: bool) -> Drawing:
    n = _length(s, s.event_shape[0])
    words = names(s._name, "tokens", tokens, n)
    best, kinds = None, []
    if weights.dim() == 3:
        kinds = names(s._name, "labels", labels, s.event_shape[2])
        best, weights = weights.argmax(-1), weights.sum(-1)
    found = {(i, j): p for i, j, p in _entries(weights)}
    if soft:
        return chart_svg(words, found)
    written = None if best is None else {span: kinds[int(best[span])] for span in found}
    return tree_svg(words, found, labels=written)


def actions(s: Incremental, weights: Tensor, tokens: Given, labels: Given, soft: bool) -> Drawing:
    n = s.inputs.shape[1] if s.lengths is None else int(s._lengths().reshape(-1)[0])
    tree = s.to_spans(weights.to(s.dtype)).reshape(s.inputs.shape[1], -1)
    return tree_svg(names(s._name, "tokens", tokens, n), tree.nonzero().tolist())


def tags(s: LinearChain, weights: Tensor, tokens: Given, labels: Given, soft: bool) -> Drawing:
    n, c = _length(s, s.event_shape[0]), s.event_shape[1]
    if soft:
        steps = _entries(s.edge_marginals()[: n - 1].cpu())
    else:
        path = weights[:n].argmax(-1).tolist()
        steps = [(t, a, b, 1.0) for t, (a, b) in enumerate(pairwise(path))]
    words, kinds = names(s._name, "tokens", tokens, n), names(s._name, "labels", labels, c)
    return lattice_svg(words, kinds, weights[:n].tolist(), steps)


def segments(s: SemiMarkov, weights: Tensor, tokens: Given, labels: Given, soft: bool) -> Drawing:
    n, _, c = s.event_shape
    words = names(s._name, "tokens", tokens, _length(s, n))
    found = [(i, i + less, label, p) for i, less, label, p in _entries(weights)]
    return segments_svg(words, names(s._name, "labels", labels, c), found)


def frames(s: CTC, weights: Tensor, tokens: Given, labels: Given, soft: bool) -> Drawing:
    n, symbols = s.event_shape
    n = n if s.input_lengths is None else int(s.input_lengths)
    size = s.targets.shape[-1] if s.target_lengths is None else int(s.target_lengths)
    kinds = names(s._name, "labels", labels, symbols)
    if labels is None:
        kinds[s.blank] = "blank"
    rows = list(dict.fromkeys([s.blank, *s.targets.reshape(-1)[:size].tolist()]))
    columns = names(s._name, "tokens", tokens, n)
    return heat_svg(weights[:n, rows].T.tolist(), [kinds[row] for row in rows], columns)


def _pair(s: Structure, tokens: Given, sizes: Sequence[int]) -> tuple[list[str], list[str]]:
    """The names of rows and of columns."""
    if tokens is not None and (isinstance(tokens, str) or len(tokens) != 2):
        raise ValueError(
            f"{s._name}.draw: tokens must be a pair, names of the rows and names of the columns, "
            f"got {len(tokens)} of them."
        )
    rows, columns = (None, None) if tokens is None else tokens
    return (
        names(s._name, "tokens[0]", rows, sizes[0]),
        names(s._name, "tokens[1]", columns, sizes[1]),
    )


def _sides(s: Any, tokens: Given) -> tuple[list[str], list[str]]:
    ends = zip((s.rows, s.columns), s.event_shape)
    return _pair(s, tokens, [most if size is None else int(size) for size, most in ends])


def cells(s: Alignment, weights: Tensor, tokens: Given, labels: Given, soft: bool) -> Drawing:
    rows, columns = _sides(s, tokens)
    path = [] if soft or s.kind != "dtw" else s.decode(weights)
    return heat_svg(weights[: len(rows), : len(columns)].tolist(), rows, columns, path)


def threads(s: Assignment, weights: Tensor, tokens: Given, labels: Given, soft: bool) -> Drawing:
    return threads_svg(*_sides(s, tokens), _entries(weights))


def grid(s: GridPath, weights: Tensor, tokens: Given, labels: Given, soft: bool) -> Drawing:
    rows, columns = (None, None) if tokens is None else _pair(s, tokens, s.event_shape)
    return heat_svg(weights.tolist(), rows, columns, [] if soft else s.decode(weights))


def route(s: Path, weights: Tensor, tokens: Given, labels: Given, soft: bool) -> Drawing:
    every = names(s._name, "tokens", tokens, s._graph.num_nodes)
    useful = s._usable_parts().reshape(-1).tolist()
    edges = [(a, b, p) for (a, b), p, use in zip(s.edges.tolist(), weights.tolist(), useful) if use]
    there = {node for a, b, _ in edges for node in (a, b)} | {s.source}
    return graph_svg(every, edges, [v for v in s._graph.order.tolist() if v in there])


def network(s: SpanningTree, weights: Tensor, tokens: Given, labels: Given, soft: bool) -> Drawing:
    nodes = names(s._name, "tokens", tokens, _length(s, s.event_shape[0]))
    return graph_svg(nodes, [(i, j, p) for i, j, p in _entries(weights) if i < j])


def part_names(s: Structure, tokens: Given) -> list[str]:
    """Of all parts, in order; of a subset, up to its length."""
    n = s.event_shape.numel()
    lengths = getattr(s, "lengths", None)
    if len(s.event_shape) == 1 and lengths is not None:
        n = int(lengths)
    return names(s._name, "tokens", tokens, n)


def parts(s: Structure, weights: Tensor, tokens: Given, labels: Given, soft: bool) -> Drawing:
    """Of any other structure: a bar for each part."""
    every = part_names(s, tokens)
    return bars_svg(every, weights.reshape(-1)[: len(every)].tolist())


Painter = Callable[[Any, Tensor, Given, Given, bool], Drawing]
PAINTERS: dict[Any, Painter] = {  # by class
    DependencyTree: arcs,
    BinaryTree: spans,
    PCFG: spans,
    Incremental: actions,
    LinearChain: tags,  # HMM is one
    SemiMarkov: segments,
    CTC: frames,
    Alignment: cells,
    Assignment: threads,
    GridPath: grid,
    Path: route,
    SpanningTree: network,
}
