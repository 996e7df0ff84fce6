"""Best structures and optimal transport: ufal.chu_liu_edmonds, scipy and POT.

The peers take one item at a time, so a batch is a loop over them, as a user would write it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import structmax as sx
from benchmarks.harness import (
    Case,
    Contender,
    Disagreement,
    Trial,
    cases,
    installed,
    ours,
    peer,
    require_close,
)


def best_tree(device: torch.device, batch: int, n: int) -> Trial:
    """z of the best dependency tree, with one root and with one or more, as the peer has it."""
    scores = torch.randn(batch, n + 1, n + 1, device=device)

    def mine(root: str = "single", validate_args: bool | None = None) -> Tensor:
        return sx.DependencyTree(scores, root=root, validate_args=validate_args).argmax()

    def on_cpu() -> Tensor:
        with sx.backend("cpu"):  # the scores are copied there, and the answer back
            return mine()

    def theirs() -> Tensor:
        from ufal.chu_liu_edmonds import chu_liu_edmonds

        rows = scores.mT.double().cpu().numpy().copy(order="C")  # by modifier
        heads = torch.tensor([chu_liu_edmonds(item)[0] for item in rows])
        return torch.nn.functional.one_hot(heads[:, 1:], n + 1).mT

    contenders = [
        ours("one or more roots", partial(mine, "multi")),
        ours("one root", mine),
        ours("one root, validate_args=False", partial(mine, validate_args=False)),
    ]
    if device.type == "cuda":
        contenders.append(ours("one root, CPU path", on_cpu))
    else:
        name = "ufal.chu_liu_edmonds, one or more roots, item by item"
        contenders.append(peer(name, "ufal.chu_liu_edmonds", theirs))

    def agree() -> None:  # by score: ties are legal
        def score(z: Tensor) -> Tensor:
            return (scores[: len(z), :, 1:] * z.to(scores)).sum((-1, -2))

        with sx.backend("naive"):
            for root in ("single", "multi"):
                exact = sx.DependencyTree(scores[:2], root=root).argmax()
                require_close(root, score(mine(root)[:2, :, 1:]), score(exact[..., 1:]), 1e-5)
        if device.type == "cuda":
            require_close("CPU path", score(mine()[..., 1:]), score(on_cpu()[..., 1:]), 1e-5)
        elif installed("ufal.chu_liu_edmonds"):
            require_close("ufal", score(mine("multi")[..., 1:]), score(theirs()), 1e-5)

    return Trial(contenders, agree)


def spanning_tree(device: torch.device, batch: int, n: int) -> Trial:
    """z of the best spanning tree of a complete graph."""
    scores = torch.randn(batch, n, n, device=device)
    both = scores + scores.mT

    def mine(validate_args: bool | None = None) -> Tensor:
        return sx.SpanningTree(scores, validate_args=validate_args).argmax()

    def theirs() -> list[Any]:
        from scipy.sparse.csgraph import minimum_spanning_tree

        costs = (1 + both.amax() - both).cpu().numpy()  # 0 would mean no edge
        return [minimum_spanning_tree(item) for item in costs]

    def agree() -> None:
        best = (scores * mine()).sum((-1, -2))
        other = [both[b].cpu().numpy()[tree.nonzero()].sum() for b, tree in enumerate(theirs())]
        require_close("score of scipy's tree", best, torch.tensor(other, device=device), 1e-4)

    name = "scipy.sparse.csgraph.minimum_spanning_tree, item by item"
    contenders = [ours("", mine), ours("validate_args=False", partial(mine, False))]
    return Trial([*contenders, Contender(name, theirs)], agree)


def assignment(device: torch.device, batch: int, n: int) -> Trial:
    """z of the best matching of n rows and n columns."""
    scores = torch.randn(batch, n, n, device=device)

    def mine(validate_args: bool | None = None) -> Tensor:
        return sx.Assignment(scores, validate_args=validate_args).argmax()

    def by_scipy() -> Tensor:
        from scipy.optimize import linear_sum_assignment

        items = scores.cpu().numpy()
        columns = [
            torch.from_numpy(linear_sum_assignment(item, maximize=True)[1]) for item in items
        ]
        return torch.nn.functional.one_hot(torch.stack(columns), n)

    def by_pot() -> Tensor:
        import ot

        costs, each = (-scores.double()).cpu().numpy(), np.full(n, 1.0)
        return torch.stack([torch.from_numpy(ot.emd(each, each, item)) for item in costs])

    def agree() -> None:
        z = mine()
        if not bool((z.sum(-1) == 1).all()) or not bool((z.sum(-2) == 1).all()):
            raise Disagreement("the best matching is no matching")
        found = [z, by_scipy(), *([by_pot()] if installed("ot") else [])]
        best, *others = (
            (scores.cpu() * pairs.to("cpu", scores.dtype)).sum((-1, -2)) for pairs in found
        )
        for other in others:
            require_close("score of the best matching", best, other, 1e-4)

    contenders = [
        ours("", mine),
        ours("validate_args=False", partial(mine, False)),
        Contender("scipy.optimize.linear_sum_assignment, item by item", by_scipy),
        peer("POT, ot.emd, item by item", "ot", by_pot),
    ]
    return Trial(contenders, agree)


def sinkhorn(device: torch.device, batch: int, n: int) -> Trial:
    """Entropic optimal transport between n points and n points, until the sums are off by 1e-6."""
    scores = torch.randn(batch, n, n, device=device)
    temperature, tol = 0.5, 1e-6

    def mine() -> Tensor:
        return sx.Assignment(scores, validate_args=False).sinkhorn(temperature, 1000, tol)

    def theirs(method: str = "sinkhorn_log") -> Tensor:
        import ot

        each = torch.ones(n, device=device)
        plans = [
            ot.sinkhorn(each, each, -item, temperature, method, 1000, tol, warn=False)
            for item in scores
        ]
        return torch.stack(plans)

    def agree() -> None:
        if installed("ot"):
            require_close("plan of POT", mine(), theirs(), 1e-3)

    contenders = [ours("", mine)]
    for method in ("sinkhorn_log", "sinkhorn"):
        name = f"POT, ot.sinkhorn(method={method!r}), item by item"
        contenders.append(peer(name, "ot", partial(theirs, method)))
    return Trial(contenders, agree)


def grid_path(device: torch.device, batch: int, n: int) -> Trial:
    """The cells of a shortest path through an n × n grid with steps to all 8 neighbours."""
    costs = torch.rand(batch, n, n, device=device) + 0.1

    def mine(validate_args: bool | None = None) -> Tensor:
        return sx.GridPath(-costs, moves="all", validate_args=validate_args).argmax()

    graph = _grid_graph(n)

    def theirs() -> list[Any]:
        from scipy.sparse import csr_matrix
        from scipy.sparse.csgraph import dijkstra

        start, end = graph
        found = []
        for item in costs.cpu().double().numpy().reshape(batch, -1):
            weights = csr_matrix((item[end], (start, end)), (n * n, n * n))
            distance, before = dijkstra(weights, indices=0, return_predecessors=True)
            path = [n * n - 1]
            while path[-1] != 0:
                path.append(before[path[-1]])
            found.append((distance[-1] + item[0], path))
        return found

    def agree() -> None:
        best = (costs * mine()).sum((-1, -2)).cpu()
        other = torch.tensor([cost for cost, _ in theirs()])
        require_close("cost of scipy's path", best, other, 1e-4)

    name = "scipy.sparse.csgraph.dijkstra, item by item"
    contenders = [ours("", mine), ours("validate_args=False", partial(mine, False))]
    return Trial([*contenders, Contender(name, theirs)], agree)


def _grid_graph(n: int) -> tuple[np.ndarray, np.ndarray]:
    """The moves between neighbours as pairs of cell numbers."""
    cell = np.arange(n * n).reshape(n, n)
    pairs = []
    for down in (-1, 0, 1):
        for right in (-1, 0, 1):
            if down or right:
                here = cell[max(0, -down) : n - max(0, down), max(0, -right) : n - max(0, right)]
                pairs.append((here.ravel(), here.ravel() + down * n + right))
    start, end = (np.concatenate(x) for x in zip(*pairs, strict=True))
    return start, end


TREES = {
    "small 4x10": "cpu cuda",
    "medium 16x40": "cpu",
    "medium 256x60": "cuda",
    "large 8x120": "cpu cuda",
}
SQUARES = {"small 8x8": "cpu cuda", "medium 32x32": "cpu cuda", "large 8x200": "cpu cuda"}
PLANS = {"small 4x10": "cpu cuda", "medium 16x32": "cpu cuda", "large 4x200": "cpu cuda"}
GRIDS = {"small 4x8": "cpu", "medium 16x24": "cpu", "large 4x96": "cpu"}
CASES: dict[str, Case] = {
    **cases("nonprojective-argmax", "the best dependency tree", best_tree, TREES, "forward"),
    **cases(
        "spanning-tree-argmax",
        "the best spanning tree",
        spanning_tree,
        {"small 4x10": "cpu", "medium 16x40": "cpu", "large 4x200": "cpu"},
        "forward",
    ),
    **cases("assignment-argmax", "the best matching", assignment, SQUARES, "forward"),
    **cases("sinkhorn", "entropic transport at γ = 0.5", sinkhorn, PLANS, "forward"),
    **cases("grid-path-argmax", "the shortest path in a grid", grid_path, GRIDS, "forward"),
}
