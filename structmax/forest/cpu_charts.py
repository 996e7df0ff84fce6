"""Which forests are charts that the CPU computes without lists: Shannon's value and gradient.

These are binary trees without labels (``cpu_cky``) and projective dependency trees without labels
and siblings (``cpu_eisner``). A goal that is no whole sentence is left to the kernels of ``cpu``.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from structmax.forest import cpu_cky, cpu_eisner
from structmax.forest.products import ProductBlock
from structmax.forest.topology import Forest, Ints

CHART_SPEED = 8  # edges in the time of a step: below, a second thread did not pay


class ChartBlock:
    """What a ``ProductBlock`` answers, of a chart. Only with ``down`` is there a gradient."""

    def __init__(self, chart: Chart, scores: NDArray, goal: Ints, gamma: float, down: bool) -> None:
        theta = np.ascontiguousarray(scores, np.float64)
        length = np.searchsorted(chart.goals, goal)
        length[chart.goals[length % len(chart.goals)] != goal] = 0
        self._values, self.left = np.empty(len(theta)), np.empty(len(theta), np.bool_)
        self._gradient = np.empty_like(theta if down else theta[:0])
        out = self._values, self._gradient, self.left
        if chart.single is None:
            cpu_cky.trees(theta, length, gamma, down, *out)
        else:
            cpu_eisner.trees(theta, length, chart.single, gamma, down, *out)

    def values(self) -> NDArray:
        return self._values

    def gradient(self) -> NDArray:
        return self._gradient


class Chart:
    """``goals[n]`` is the node of a sentence of length n; ``single`` is that of dependencies."""

    def __init__(self, goals: NDArray, single: int | None) -> None:
        self.goals, self.single = goals, single


@lru_cache(maxsize=256)
def chart_of(name: str) -> Chart | None:
    """The chart that a forest of this name is, if it is one."""
    kind, _, sizes = name.partition(":")
    if kind not in ("binary_tree", "projective_tree"):
        return None
    longest, labels, *options = map(int, sizes.split(","))
    if labels or (options and options[1]):
        return None
    n = np.arange(longest + 1)
    if kind == "binary_tree":
        return Chart(n * (n + 1) // 2 - 1, None)
    return Chart(5 * (n * (n - 1) // 2) + (3 - options[0]) * n - 1, options[0])


def work_of(forest: Forest) -> int:
    """The cost of an item by products, in the steps of ``run_chunks``."""
    return forest.num_edges // (1 if chart_of(forest.name) is None else CHART_SPEED)


def block_of(
    forest: Forest, scores: NDArray, goal: Ints, gamma: float, down: bool
) -> ChartBlock | ProductBlock:
    """Items computed by products, as a chart if the forest is one."""
    chart = chart_of(forest.name)
    if chart is None:
        return ProductBlock(forest, scores, goal, gamma)
    return ChartBlock(chart, scores, goal, gamma, down)
