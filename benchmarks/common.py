"""What several cases need: torch-struct's answers, CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Answer = tuple[Tensor, Tensor | None]


def torch_struct(
    name: str,
    potentials: Any,
    some: slice = slice(None),
    backward: bool = True,
    properties: bool = False,
) -> tuple[Tensor, Any]:
    """Its value and marginals; a new distribution each time, since it keeps its answers.

    ``properties`` asks by ``.partition`` and ``.marginals``, which are two passes; otherwise the
    value is differentiated, which is quicker. Potentials are a tensor or a tuple of them.
    """
    import torch_struct

    warnings.filterwarnings("ignore", ".*does not define `arg_constraints`", UserWarning)
    single = isinstance(potentials, Tensor)
    leaves = [t[some].detach().clone() for t in ([potentials] if single else potentials)]
    watched = backward or name == "DependencyCRF"  # which fails without a gradient
    with torch.set_grad_enabled(watched):
        if watched:
            leaves = [t.requires_grad_() for t in leaves]
        distribution = getattr(torch_struct, name)(leaves[0] if single else tuple(leaves))
        if properties:
            marginals = distribution.marginals
            return distribution.partition.detach(), marginals
        value = distribution.partition
        if not backward:
            return value.detach(), None
        slopes = torch.autograd.grad(value.sum(), leaves)
        return value.detach(), slopes[0] if single else slopes


def graphed(run: Callable[[], Any]) -> Callable[[], None]:
    """``run`` captured once, on first use, and replayed."""
    graph: list[torch.cuda.CUDAGraph] = []

    def replay() -> None:
        if not graph:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                run()
            torch.cuda.current_stream().wait_stream(stream)
            graph.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graph[0]):
                run()
        graph[0].replay()

    return replay
