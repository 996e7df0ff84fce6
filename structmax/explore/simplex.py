"""The page of maps: three scores, and where each map sends them on the simplex."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import structmax as sx
from structmax.draw import simplex_svg
from structmax.explore import html
from structmax.explore.structures import SMOOTHINGS, smoothing
from structmax.maps.argmax import argmax

TITLE = "Simplex"
ABOUT = (
    "Three scores x, divided by γ, and where each map sends them. Lines lead there from large γ."
)
HOTTEST, STEPS = 50.0, 40  # a line begins near the middle
NAMES = ("a", "b", "c")

Map = Callable[[Tensor, float, float], Tensor]  # of scores, the strength and the upper bound
MAPS: dict[str, dict[str, Map]] = {  # four in a picture at most, a colour each
    "from dense to hard": {
        "softmax": lambda x, s, u: sx.softmax(x),
        "entmax, α = 1.5": lambda x, s, u: sx.entmax(x, 1.5),
        "sparsemax": lambda x, s, u: sx.sparsemax(x),
        "argmax": lambda x, s, u: argmax(x),
    },
    "by norms": {
        "fusedmax": lambda x, s, u: sx.fusedmax(x, s),
        "oscarmax": lambda x, s, u: sx.oscarmax(x, s),
        "normmax, α = 2": lambda x, s, u: sx.normmax(x, 2.0),
    },
    "with an upper bound": {
        "csoftmax": lambda x, s, u: sx.csoftmax(x, upper=u),
        "csparsemax": lambda x, s, u: sx.csparsemax(x, upper=u),
    },
}


def trails(
    maps: dict[str, Map], scores: list[float], gamma: float, strength: float, upper: float
) -> dict[str, Tensor]:
    """Where each map sends the scores, from a large γ down to this one, ``(40, 3)``.

    >>> found = trails(MAPS["from dense to hard"], [0.0, 0.0, 1.0], 1.0, 0.2, 0.6)
    >>> found["sparsemax"][[0, -1]].round(decimals=2)
    tensor([[0.3300, 0.3300, 0.3500],
            [0.0000, 0.0000, 1.0000]], dtype=torch.float64)
    """
    heat = torch.logspace(math.log10(HOTTEST), math.log10(gamma), STEPS, dtype=torch.float64)
    x = torch.tensor(scores, dtype=torch.float64) / heat[:, None]
    return {name: one(x, strength, upper) for name, one in maps.items()}


# -- the page -------------------------------------------------------------------------------------


def score(ui: Any, values: dict[str, Any]) -> dict[str, Any]:
    def slider(low: float, high: float, at: float, label: str, step: float = 0.05) -> Any:
        return ui.slider(low, high, step, at, label=label, show_value=True, debounce=False)

    return {
        "x_a": slider(-3, 3, 0.4, "score of a"),
        "x_b": slider(-3, 3, 0.0, "score of b"),
        "x_c": slider(-3, 3, 0.9, "score of c"),
        "gamma": slider(0.1, 5, 1.0, "γ"),
        "strength": slider(0, 1, 0.2, "strength of fusedmax and oscarmax"),
        "upper": slider(0.35, 1, 0.6, "upper bound of csoftmax and csparsemax"),
    }


STAGES = (score,)


def view(values: dict[str, Any]) -> str:
    """The triangles, the points as numbers, and the smoothed maxima."""
    scores = [values[f"x_{name}"] for name in NAMES]
    options = values["strength"], values["upper"]
    figures, rows = [], []
    for caption, maps in MAPS.items():
        found = trails(maps, scores, values["gamma"], *options)
        figures.append(html.figure(caption, simplex_svg(found, NAMES, move=False), fit=True))
        rows += [(name, path[-1].tolist()) for name, path in found.items()]
    x = torch.tensor(scores, dtype=torch.float64)
    two = sx.budgetmax(x / values["gamma"], 2.0).tolist()  # a choice of two: on no simplex
    rows.append(("budgetmax, k = 2", two))
    top = {
        f"maxΩ, {name}": float(sx.smoothed_max(x, smoothing(name, values["gamma"])))
        for name in SMOOTHINGS
    }
    return html.page(
        html.section("simplex", "where the scores go", figures),
        f'<div class="sx-row">{html.table(["map", *NAMES], rows, "maps")}{html.numbers(top)}</div>',
    )
