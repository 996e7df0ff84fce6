"""Maps on the simplex and their losses, against the entmax package and torch.softmax."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import structmax as sx
from benchmarks.common import graphed
from benchmarks.harness import Case, Contender, Trial, cases, ours, peer, require_close

Function = Callable[[Tensor], Tensor]


def _step(function: Function, x: Tensor, g: Tensor) -> list[Tensor]:
    """p and the gradient of ⟨p, g⟩."""
    p = function(x)
    return [p.detach(), *torch.autograd.grad(p, x, g)]


def simplex(
    device: torch.device, rows: int, n: int, mine: Function, theirs: Function, backward: bool
) -> Trial:
    """A map of standard normal scores; torch.softmax is the yardstick."""
    x = torch.randn(rows, n, device=device, requires_grad=backward)
    g = torch.randn(rows, n, device=device)

    def run(function: Function) -> Callable[[], object]:
        return partial(_step, function, x, g) if backward else partial(function, x)

    softmax = Contender("torch.softmax", run(partial(torch.softmax, dim=-1)), "yardstick")
    contenders = [ours("", run(mine)), softmax]
    if mine is not sx.softmax:
        contenders.insert(1, peer("entmax package", "entmax", run(theirs)))

    def agree() -> None:
        if contenders[1].run is None:
            return
        # in float64: where p is nearly 0, a gradient in float32 may have few digits
        some = torch.randn(64, n, device=device, dtype=torch.float64, requires_grad=True)
        weights = torch.randn(64, n, device=device, dtype=torch.float64)
        pairs = zip(_step(mine, some, weights), _step(theirs, some, weights), strict=True)
        for name, (a, b) in zip(["p", "gradient"], pairs, strict=True):
            require_close(name, a, b, 1e-6)
        require_close("p in float32", mine(some.float()), mine(some), 1e-5)

    if device.type == "cuda":  # without the time of the host before the launch
        for name, function, kind in (
            ("structmax", mine, "ours"),
            ("torch.softmax", partial(torch.softmax, dim=-1), "yardstick"),
        ):
            again = graphed(run(function))
            contenders.append(Contender(f"{name}, in a CUDA graph", again, kind))
    return Trial(contenders, agree)


def loss(device: torch.device, rows: int, n: int, alpha: float, theirs: Function) -> Trial:
    """The Fenchel-Young loss of a map, its mean over the rows, and the gradient."""
    x = torch.randn(rows, n, device=device, requires_grad=True)
    target = torch.randint(n, (rows,), device=device)

    def step(function: Callable[..., Tensor]) -> list[Tensor]:
        value = function(x, target).mean()
        return [value.detach(), *torch.autograd.grad(value, x)]

    mine = partial(step, partial(sx.losses.entmax_loss, alpha=alpha, reduction="none"))
    contenders = [
        ours("", mine),
        peer("entmax package", "entmax", partial(step, theirs)),
        Contender(
            "torch.nn.functional.cross_entropy",
            partial(step, torch.nn.functional.cross_entropy),
            "yardstick",
        ),
    ]

    def agree() -> None:
        if contenders[1].run is not None:
            for name, a, b in zip(["loss", "gradient"], mine(), step(theirs), strict=True):
                require_close(name, a, b, 1e-4)

    return Trial(contenders, agree)


def _peer(name: str, *arguments: float) -> Callable[..., Tensor]:
    def call(*tensors: Tensor) -> Tensor:
        import entmax

        return getattr(entmax, name)(*tensors, *arguments)

    return call


MAPS: dict[str, tuple[Function, Function]] = {
    "softmax": (sx.softmax, partial(torch.softmax, dim=-1)),
    "sparsemax": (sx.sparsemax, _peer("sparsemax")),
    "sparsemax-bisect": (sx.sparsemax, _peer("sparsemax_bisect")),
    "entmax15": (sx.entmax, _peer("entmax15")),
    "entmax-1.25": (partial(sx.entmax, alpha=1.25), _peer("entmax_bisect", 1.25)),
    "entmax-1.7": (partial(sx.entmax, alpha=1.7), _peer("entmax_bisect", 1.7)),
    "entmax-3": (partial(sx.entmax, alpha=3.0), _peer("entmax_bisect", 3.0)),
    "normmax-2": (partial(sx.normmax, alpha=2), _peer("normmax_bisect", 2)),
    "budgetmax-2": (partial(sx.budgetmax, k=2), _peer("budget_bisect", 2)),
}
LOSSES = {
    "sparsemax": (2.0, _peer("sparsemax_loss")),
    "entmax15": (1.5, _peer("entmax15_loss")),
    "entmax-1.25": (1.25, _peer("entmax_bisect_loss", 1.25)),
}
ALL = {"medium 512x1024": "cpu", "medium 8192x4096": "cuda"}
SIZES = {"small 32x64": "cpu cuda", **ALL, "large 128x32000": "cpu cuda"}  # a vocabulary
CASES: dict[str, Case] = {}
for _name, (_mine, _theirs) in MAPS.items():
    _sizes = SIZES if _name in ("sparsemax", "entmax15", "entmax-1.25") else ALL
    for _backward in (False, True):
        _build = partial(simplex, mine=_mine, theirs=_theirs, backward=_backward)
        CASES |= cases(
            f"map-{_name}{'-backward' if _backward else ''}",
            f"{_name}{' and its gradient' if _backward else ''}",
            _build,
            _sizes,
            "forward + backward" if _backward else "forward",
        )
for _name, (_alpha, _theirs) in LOSSES.items():
    _build = partial(loss, alpha=_alpha, theirs=_theirs)
    CASES |= cases(f"loss-{_name}", f"the loss of {_name} and its gradient", _build, SIZES)


def tied(device: torch.device, rows: int, n: int, mine: Function) -> Trial:
    """fusedmax or oscarmax; our sparsemax, which both of them end in, is the yardstick."""
    x = torch.randn(rows, n, device=device, requires_grad=True)
    g = torch.randn(rows, n, device=device)

    def agree() -> None:
        with sx.backend("naive"):
            expected = _step(mine, x[:8].detach().requires_grad_(), g[:8])
        for name, a, b in zip(["p", "gradient"], _step(mine, x, g), expected, strict=True):
            require_close(name, a[:8], b, 1e-3)

    yardstick = partial(sx.sparsemax, x.detach())
    contenders = [
        ours("", partial(mine, x.detach())),
        Contender("structmax, sparsemax", yardstick, "yardstick"),
    ]
    return Trial(contenders, agree)


for _name, _function in (("fusedmax", sx.fusedmax), ("oscarmax", sx.oscarmax)):
    for _strength in (0.1, 1.0):
        CASES |= cases(
            f"map-{_name}-{_strength}",
            f"{_name} of strength {_strength}",
            partial(tied, mine=partial(_function, strength=_strength)),
            {"medium 512x256": "cpu cuda"},
            "forward",
        )
