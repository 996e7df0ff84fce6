"""How time and memory grow when n doubles.

The exponent is log₂ of the ratio between the two largest sizes. Theory: a chain is n in both; a
tree n³ in time, n² in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import structmax as sx
from benchmarks.harness import measure, peak_memory


@dataclass
class Growth:
    """Least times (what disturbs only adds) and peaks of memory of log-partition and marginals at
    each n; −1 where memory is unknown."""

    structure: str
    batch: int
    theory_time: int
    theory_memory: int
    n: list[int] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)
    mib: list[float] = field(default_factory=list)
    time_exponent: float | None = None
    memory_exponent: float | None = None
    note: str = ""


def _chain(device: torch.device, batch: int, n: int) -> sx.Structure:
    return sx.LinearChain(
        torch.randn(batch, n, 32, device=device), torch.randn(32, 32, device=device)
    )


def _binary(device: torch.device, batch: int, n: int) -> sx.Structure:
    return sx.BinaryTree(torch.randn(batch, n, n, device=device) / 10)


def _projective(device: torch.device, batch: int, n: int) -> sx.Structure:
    return sx.DependencyTree(torch.randn(batch, n + 1, n + 1, device=device) / 10, projective=True)


def _nonprojective(device: torch.device, batch: int, n: int) -> sx.Structure:
    return sx.DependencyTree(torch.randn(batch, n + 1, n + 1, device=device))


Make = Callable[[torch.device, int, int], sx.Structure]
# name: how it is made, batch and sizes on each device, exponents in theory. The two largest sizes
# are such that the leading term is most of the work, and lie on one side of what changes the time
# for an edge: edges by rule (lists of them, of smaller trees, outgrow one cache after the other),
# tables within a cache, sums of products and not of logarithms.
STRUCTURES: dict[str, tuple[Make, dict[str, tuple[int, list[int]]], int, int]] = {
    "LinearChain, 32 tags": (
        _chain,
        {"cpu": (32, [1024, 2048]), "cuda": (64, [1024, 2048])},
        1,
        1,
    ),
    "BinaryTree": (_binary, {"cpu": (8, [320, 640]), "cuda": (16, [320, 640])}, 3, 2),
    "DependencyTree, projective": (
        _projective,
        {"cpu": (2, [224, 448]), "cuda": (16, [256, 512])},
        3,
        2,
    ),
    "DependencyTree": (_nonprojective, {"cpu": (2, [384, 768]), "cuda": (16, [256, 512])}, 3, 2),
}


def run_growth(name: str, device: torch.device, repeat: int, seconds: float) -> Growth:
    make, sizes, in_time, in_memory = STRUCTURES[name]
    batch, lengths = sizes[device.type]
    result = Growth(name, batch, in_time, in_memory)
    for n in lengths:
        torch.manual_seed(0)
        structure = make(device, batch, n)

        @torch.no_grad()
        def run(structure: sx.Structure = structure) -> None:
            fresh = structure[:]  # it keeps its answers
            fresh.marginals()
            fresh.log_partition()

        try:
            times = measure(run, device, repeat, seconds)
            peak = peak_memory(run, device)
        except (torch.OutOfMemoryError, MemoryError):
            result.note = f"out of memory at n = {n}"
            break
        result.n.append(n)
        result.ms.append(min(times))
        result.mib.append(-1.0 if peak is None else peak)
    if len(result.n) > 1:
        result.time_exponent = math.log2(result.ms[-1] / result.ms[-2])
        if min(result.mib[-2:]) > 0:
            result.memory_exponent = math.log2(result.mib[-1] / result.mib[-2])
    return result
