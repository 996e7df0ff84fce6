"""What one small call costs: one sentence of 10 words, Python included."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import structmax as sx


@dataclass
class Latency:
    """Microseconds of a call that makes the structure and asks it; ``bar_us`` is the most that it
    should take, on two threads of a processor of 2.8 GHz."""

    what: str
    median_us: float
    least_us: float
    bar_us: float | None


def _calls(device: torch.device) -> dict[str, tuple[Callable[[], Any], float | None]]:
    torch.manual_seed(0)
    unary, transition = torch.randn(10, 5, device=device), torch.randn(5, 5, device=device)
    spans, arcs = torch.randn(10, 10, device=device), torch.randn(11, 11, device=device)
    quick = {"validate_args": False}
    tree = sx.DependencyTree
    return {
        "LinearChain.argmax": (
            lambda: sx.LinearChain(unary, transition, **quick).argmax(),
            150.0,
        ),
        "LinearChain.marginals": (
            lambda: sx.LinearChain(unary, transition, **quick).marginals(),
            None,
        ),
        "BinaryTree.marginals": (lambda: sx.BinaryTree(spans, **quick).marginals(), 400.0),
        "DependencyTree.marginals, projective": (
            lambda: tree(arcs, projective=True, **quick).marginals(),
            400.0,
        ),
        "DependencyTree.marginals": (lambda: tree(arcs, **quick).marginals(), 400.0),
        "DependencyTree.argmax": (lambda: tree(arcs, **quick).argmax(), None),
    }


def run_latency(device: torch.device, repeat: int = 500) -> list[Latency]:
    """Without validation, outside of autograd; bars are for the CPU."""
    rows = []
    with torch.no_grad():
        for what, (call, bar) in _calls(device).items():
            for _ in range(20):
                call()
            times = []
            for _ in range(repeat):
                start = time.perf_counter()
                call()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                times.append(1e6 * (time.perf_counter() - start))
            on_cpu = bar if device.type == "cpu" else None
            rows.append(Latency(what, statistics.median(times), min(times), on_cpu))
    return rows
