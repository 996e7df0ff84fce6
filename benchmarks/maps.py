"""Maps on the simplex against the entmax package and torch.softmax."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import structmax as sx
from benchmarks.cases import _graphed
from benchmarks.harness import Case, Contender, Trial, installed, require_close

Function = Callable[[Tensor], Tensor]


def _step(function: Function, x: Tensor, g: Tensor) -> list[Tensor]:
    """p and the gradient of ⟨p, g⟩."""
    p = function(x)
    return [p.detach(), *torch.autograd.grad(p, x, g)]


def simplex(
    device: torch.device, ours: Function, peer: Function | None, rows: int, n: int, backward: bool
) -> Trial:
    """A map of standard normal scores; torch.softmax is the yardstick."""
    x = torch.randn(rows, n, device=device, requires_grad=backward)
    g = torch.randn(rows, n, device=device)

    def run(function: Function) -> Callable[[], object]:
        return partial(_step, function, x, g) if backward else partial(function, x)

    def agree() -> None:
        some = torch.randn(64, n, device=device, requires_grad=True)
        for function in [peer] if peer is not None else []:
            pairs = zip(_step(ours, some, g[:64]), _step(function, some, g[:64]), strict=True)
            for name, (a, b) in zip(["p", "gradient"], pairs, strict=True):
                require_close(name, a, b, 1e-3)

    contenders = [
        Contender("structmax", run(ours)),
        Contender("entmax package", None if peer is None else run(peer)),
        Contender("torch.softmax", run(partial(torch.softmax, dim=-1))),
    ]
    if device.type == "cuda":  # without the time of the host before the launch
        for contender in (contenders[0], contenders[2]):
            assert contender.run is not None
            graphed = _graphed(contender.run)
            contenders.append(Contender(f"{contender.name}, in a CUDA graph", graphed))
    return Trial(contenders, agree)


def _peer(name: str, *arguments: float) -> Function | None:
    if not installed("entmax"):
        return None
    import entmax

    return lambda x: getattr(entmax, name)(x, *arguments)


def _cases() -> dict[str, Case]:
    maps: dict[str, tuple[Function, Callable[[], Function | None]]] = {
        "softmax": (sx.softmax, lambda: partial(torch.softmax, dim=-1)),
        "sparsemax": (sx.sparsemax, lambda: _peer("sparsemax")),
        "entmax15": (sx.entmax, lambda: _peer("entmax15")),
        "entmax-1.25": (partial(sx.entmax, alpha=1.25), lambda: _peer("entmax_bisect", 1.25)),
        "entmax-1.7": (partial(sx.entmax, alpha=1.7), lambda: _peer("entmax_bisect", 1.7)),
        "entmax-3": (partial(sx.entmax, alpha=3.0), lambda: _peer("entmax_bisect", 3.0)),
        "normmax-2": (partial(sx.normmax, alpha=2), lambda: _peer("normmax_bisect", 2)),
        "budgetmax-2": (partial(sx.budgetmax, k=2), lambda: _peer("budget_bisect", 2)),
    }
    found = {}
    for device, rows, n in (("cpu", 512, 1024), ("cuda", 8192, 4096)):
        for name, (ours, peer) in maps.items():
            for backward in (False, True):
                title = f"map-{name}{'-backward' if backward else ''}-{rows}x{n}"
                found[title] = Case(
                    title,
                    f"{name}{' and its gradient' if backward else ''} at {(rows, n)}",
                    (device,),
                    lambda device, f=ours, q=peer, r=rows, n=n, b=backward: simplex(
                        device, f, q(), r, n, b
                    ),
                )
    return found


def tied(device: torch.device, ours: Function) -> Trial:
    """fusedmax or oscarmax; our sparsemax, which both of them end in, is the yardstick."""
    x = torch.randn(512, 256, device=device, requires_grad=True)
    g = torch.randn(512, 256, device=device)

    def agree() -> None:
        with sx.backend("naive"):
            expected = _step(ours, x[:8].detach().requires_grad_(), g[:8])
        for name, a, b in zip(["p", "gradient"], _step(ours, x, g), expected, strict=True):
            require_close(name, a[:8], b, 1e-3)

    contenders = [
        Contender("structmax", partial(ours, x.detach())),
        Contender("structmax, sparsemax", partial(sx.sparsemax, x.detach())),
    ]
    return Trial(contenders, agree)


def _tied_cases() -> dict[str, Case]:
    found = {}
    for name, function in (("fusedmax", sx.fusedmax), ("oscarmax", sx.oscarmax)):
        for strength in (0.1, 1.0):
            title = f"map-{name}-{strength}-512x256"
            found[title] = Case(
                title,
                f"{name} of strength {strength} at (512, 256)",
                ("cpu", "cuda"),
                lambda device, f=function, s=strength: tied(device, partial(f, strength=s)),
            )
    return found


CASES = _cases() | _tied_cases()
