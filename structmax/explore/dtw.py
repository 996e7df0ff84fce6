"""The page of time warping: draw two curves, and watch how they are aligned."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import structmax as sx
from structmax.draw.heat_svg import heat_svg
from structmax.draw.svg import BLUE, FAINT, ORANGE, Canvas, Drawing, opacity
from structmax.explore import html
from structmax.explore.structures import GAMMAS, SMOOTHINGS, smoothing

TITLE = "Time warping"
ABOUT = "Draw two curves by their sliders. Threads and cells are as dark as they are likely."
WIDE, HIGH, APART = 300.0, 70.0, 34.0
POINTS = 12


def _shapes() -> dict[str, tuple[Tensor, Tensor]]:
    t = torch.linspace(0, 6.0, POINTS, dtype=torch.float64)
    step = (t > 2).double()
    later = (t > 4).double()
    bump = torch.exp(-((t - 2) ** 2))
    return {
        "a wave and a later one": (torch.sin(t), torch.sin(t - 1.0)),
        "a step and a later one": (2 * step - 1, 2 * later - 1),
        "a bump, and two": (2 * bump - 1, 2 * bump + 2 * torch.exp(-((t - 5) ** 2)) - 1),
        "flat": (torch.zeros(POINTS).double(), torch.zeros(POINTS).double()),
    }


SHAPES = _shapes()


class Warp(NamedTuple):
    """How two curves are aligned."""

    marginals: Tensor
    """``(n, m)``: the expected alignment, which is the gradient of the smoothed cost."""
    path: list[tuple[int, int]]
    """The cheapest one."""
    numbers: dict[str, float]


def warp(x: Tensor, y: Tensor, omega: sx.Smoothing) -> Warp:
    """The alignment of two curves ``(n,)`` and ``(m,)``.

    >>> found = warp(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0, 1.0]), sx.Hard())
    >>> found.path, found.numbers["DTW"]
    ([(0, 0), (0, 1), (1, 2)], 0.0)
    """
    structure = sx.Alignment(-(x[:, None] - y).square(), smoothing=omega)
    pair = x[:, None], y[:, None]
    hard = sx.losses.SoftDTW(omega=sx.Hard())(*pair)
    numbers = {
        "DTW": hard.item(),
        "smoothed DTW": sx.losses.SoftDTW(omega=omega)(*pair).item(),
        "its divergence": sx.losses.SoftDTW(omega=omega, divergence=True)(*pair).item(),
        "entropy of the alignment": structure.entropy().item(),
        "squared distance": (x - y).square().sum().item() if len(x) == len(y) else float("nan"),
    }
    return Warp(structure.marginals(), structure.decode(structure.argmax()), numbers)


def curves_svg(x: Tensor, y: Tensor, marginals: Tensor) -> Drawing:
    """Two curves one above the other, and a thread for each pair of points that is aligned."""
    canvas = Canvas()
    low = torch.minimum(x.min(), y.min()).item()
    span = max(torch.maximum(x.max(), y.max()).item() - low, 1e-9)

    def at(curve: Tensor, down: float) -> list[tuple[float, float]]:
        step = WIDE / max(len(curve) - 1, 1)
        return [(i * step, down + HIGH * (1 - (v - low) / span)) for i, v in enumerate(curve)]

    above, below = at(x, 0.0), at(y, HIGH + APART)
    for i, j in (marginals >= FAINT).nonzero().tolist():
        weight = float(marginals[i, j])
        shade, title = opacity(0.8 * weight), f"{i}, {j}: {weight:.3f}"
        canvas.path([above[i], below[j]], stroke="currentColor", stroke_opacity=shade, title=title)
    for name, line, colour in (("first", above, BLUE), ("second", below, ORANGE)):
        canvas.path(line, stroke=colour, stroke_width=2.5, stroke_linejoin="round", title=name)
        for px, py in line:
            canvas.circle(px, py, 3.5, fill=colour)
    return canvas.drawing()


# -- the page -------------------------------------------------------------------------------------


def choose(ui: Any, values: dict[str, Any]) -> dict[str, Any]:
    return {"shape": ui.dropdown(list(SHAPES), value=next(iter(SHAPES)), label="begin with")}


def score(ui: Any, values: dict[str, Any]) -> dict[str, Any]:
    def curve(line: Tensor) -> Any:
        heights = [round(20 * v) / 20 for v in line.tolist()]
        return ui.array(
            [ui.slider(-2, 2, 0.05, v, orientation="vertical", debounce=False) for v in heights]
        )

    first, second = SHAPES[values["shape"]]
    return {
        "first curve": curve(first),
        "second curve": curve(second),
        "gamma": ui.slider(steps=GAMMAS, value=0.2, label="γ", show_value=True, debounce=False),
        "omega": ui.dropdown(SMOOTHINGS, value="Shannon", label="smoothing Ω"),
    }


STAGES = (choose, score)


def view(values: dict[str, Any]) -> str:
    """The curves with threads, the matrix with the cheapest path, and numbers."""
    x, y = (
        torch.tensor(values[name], dtype=torch.float64) for name in ("first curve", "second curve")
    )
    found = warp(x, y, smoothing(values["omega"], values["gamma"]))
    heat = heat_svg(found.marginals.tolist(), path=found.path)
    return html.page(
        html.section(
            "warp",
            "alignment",
            [
                html.figure(
                    "first curve above, second below", curves_svg(x, y, found.marginals), fit=True
                ),
                html.figure("rows: first curve; orange: cheapest path", heat, fit=True),
            ],
        ),
        html.numbers(found.numbers),
    )
