"""The best non-projective tree against ufal.chu_liu_edmonds, the best assignment against scipy."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import structmax as sx
from benchmarks.cases import _case
from benchmarks.harness import Contender, Disagreement, Trial, installed, require_close


def best_tree(device: torch.device, batch: int, n: int) -> Trial:
    """z of the best tree, with one root and with one or more, as the peer has it."""
    scores = torch.randn(batch, n + 1, n + 1, device=device)

    def ours(root: str = "single", validate_args: bool | None = None) -> Tensor:
        return sx.DependencyTree(scores, root=root, validate_args=validate_args).argmax()

    def on_cpu() -> Tensor:
        with sx.backend("cpu"):  # the scores are copied there, and the answer back
            return ours()

    def peer() -> Tensor:
        from ufal.chu_liu_edmonds import chu_liu_edmonds

        rows = scores.mT.double().cpu().numpy().copy(order="C")  # by modifier
        heads = torch.tensor([chu_liu_edmonds(item)[0] for item in rows])
        return torch.nn.functional.one_hot(heads[:, 1:], n + 1).mT

    contenders = [
        Contender("structmax, one or more roots", partial(ours, "multi")),
        Contender("structmax, one root", ours),
        Contender("structmax, one root, validate_args=False", partial(ours, validate_args=False)),
    ]
    if device.type == "cuda":
        contenders.append(Contender("structmax, one root, CPU path", on_cpu))
    else:
        name = "ufal.chu_liu_edmonds, one or more roots, item by item"
        contenders.append(Contender(name, peer if installed("ufal.chu_liu_edmonds") else None))

    def agree() -> None:  # by score: ties are legal
        def score(z: Tensor) -> Tensor:
            return (scores[: len(z), :, 1:] * z.to(scores)).sum((-1, -2))

        with sx.backend("naive"):
            for root in ("single", "multi"):
                exact = sx.DependencyTree(scores[:4], root=root).argmax()
                require_close(root, score(ours(root)[:4, :, 1:]), score(exact[..., 1:]), 1e-5)
        if device.type == "cuda":
            require_close("CPU path", score(ours()[..., 1:]), score(on_cpu()[..., 1:]), 1e-5)
        elif installed("ufal.chu_liu_edmonds"):
            require_close("ufal", score(ours("multi")[..., 1:]), score(peer()), 1e-5)

    return Trial(contenders, agree)


def assignment(device: torch.device, batch: int, n: int) -> Trial:
    """z of the best matching of n rows and n columns."""
    scores = torch.randn(batch, n, n, device=device)

    def ours(validate_args: bool | None = None) -> Tensor:
        return sx.Assignment(scores, validate_args=validate_args).argmax()

    def peer() -> Tensor:
        from scipy.optimize import linear_sum_assignment

        items = scores.cpu().numpy()
        columns = [
            torch.from_numpy(linear_sum_assignment(item, maximize=True)[1]) for item in items
        ]
        return torch.nn.functional.one_hot(torch.stack(columns), n)

    def agree() -> None:
        z = ours()
        if not bool((z.sum(-1) == 1).all()) or not bool((z.sum(-2) == 1).all()):
            raise Disagreement("the best matching is no matching")
        best, theirs = ((scores * pairs.to(scores)).sum((-1, -2)) for pairs in (z, peer()))
        require_close("score of the best matching", best, theirs, 1e-5)

    contenders = [
        Contender("structmax", ours),
        Contender("structmax, validate_args=False", partial(ours, False)),
        Contender("scipy.optimize.linear_sum_assignment, item by item", peer),
    ]
    return Trial(contenders, agree)


CASES: dict[str, Any] = dict(
    [
        _case("nonprojective-argmax-16x40", "best tree", "cpu", best_tree, 16, 40),
        _case("nonprojective-argmax-256x60", "best tree", "cuda", best_tree, 256, 60),
        _case("assignment-argmax-32x32", "best matching", "cpu", assignment, 32, 32),
    ]
)
