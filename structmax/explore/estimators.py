"""The page of estimators: the gradients of each, against the exact one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import structmax as sx
from structmax.diagnosis import Diagnosis, diagnose
from structmax.draw.polytope_svg import polytope_svg
from structmax.estimators import NAMES, by_name
from structmax.explore import html
from structmax.explore.catalogue import seeded

TITLE = "Estimators"
ABOUT = "How far each gradient is from the exact one: on average (bias), and how it scatters."
PROBLEMS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], sx.Structure]]] = {
    "choice of 4": ((4,), sx.Choice),
    "2 of 4": ((4,), lambda x: sx.KSubset(x, 2)),
    "dependency tree of 3 words": ((4, 4), sx.DependencyTree),
    "binary tree of 4 words": ((4, 4), sx.BinaryTree),
    "matching of 3 and 3": ((3, 3), sx.Assignment),
}
COSTS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda total: total,
    "quadratic": lambda total: (total - 1) ** 2,
}
FIRST = ("marginals", "sparsemap", "straight-through", "spigot", "reinforce", "exact-expectation")


def structure(problem: str, sharpness: float) -> sx.Structure:
    """A small structure; its scores are random, times ``sharpness``."""
    shape, make = PROBLEMS[problem]
    return make(sharpness * seeded(*shape, scale=1.0))


def cost(problem: str, kind: str) -> Callable[[Tensor], Tensor]:
    """L(z) of the total price of the parts of z."""
    shape = PROBLEMS[problem][0]
    price = torch.linspace(-1, 1, math.prod(shape), dtype=torch.float64).sin().reshape(shape)
    over = tuple(range(-len(shape), 0))
    return lambda z: COSTS[kind]((z * price).sum(over))


def applicable(problem: str) -> list[str]:
    """The estimators that this structure has the oracles for."""
    one = structure(problem, 1.0)
    return [name for name in NAMES if by_name(name).applies_to(one)]


def compare(problem: str, kind: str, sharpness: float, names: list[str], samples: int) -> Diagnosis:
    """:func:`structmax.diagnose`, with draws that are always the same; what draws nothing is not
    repeated.

    >>> found = compare("choice of 4", "quadratic", 1.0, ["marginals"], samples=2)
    >>> [(r["against"], r["bias"] < 1e-6) for r in found.records]
    [('L(E[z])', True)]
    """
    one, price = structure(problem, sharpness), cost(problem, kind)
    records: list[dict[str, Any]] = []
    for draws in (False, True):
        some = [name for name in names if hasattr(by_name(name), "generator") == draws]
        generator = torch.Generator().manual_seed(0)
        records += diagnose(one, price, some, samples if draws else 1, generator).records
    return Diagnosis(records)


# -- the page -------------------------------------------------------------------------------------


def choose(ui: Any, values: dict[str, Any]) -> dict[str, Any]:
    return {"problem": ui.dropdown(list(PROBLEMS), value="choice of 4", label="structure")}


def score(ui: Any, values: dict[str, Any]) -> dict[str, Any]:
    every = applicable(values["problem"])
    few = [name for name in FIRST if name in every]
    return {
        "cost": ui.dropdown(list(COSTS), value="quadratic", label="cost"),
        "names": ui.multiselect(every, value=few, label="estimators", full_width=True),
        "sharpness": ui.slider(0.1, 5, 0.1, 1.0, label="scores, times", show_value=True),
        "samples": ui.slider(5, 200, 5, 20, True, label="repetitions", show_value=True),
        "step": ui.slider(0.1, 3, 0.1, 0.5, label="step η of the arrows", show_value=True),
    }


STAGES = (choose, score)


def view(values: dict[str, Any]) -> str:
    """Bias and deviation, the targets of straight-through and SPIGOT, and numbers."""
    problem, kind, sharpness = values["problem"], values["cost"], values["sharpness"]
    found = compare(problem, kind, sharpness, values["names"], values["samples"])
    polytope = polytope_svg(structure(problem, sharpness), cost(problem, kind), values["step"])
    columns = ["estimator", "against", "bias", "±", "variance", "cosine", "calls"]
    keys = ["against", "bias", "error", "variance", "cosine", "calls"]
    rows = [
        (r["estimator"], [f"{r[key]:g}" if key == "calls" else r[key] for key in keys])
        for r in found.records
    ]
    return html.page(
        html.section(
            "gradients",
            "gradients",
            [
                html.figure("relative to the exact gradient", found.draw(), fit=True),
                html.figure("targets on the polytope of structures", polytope),
            ],
        ),
        html.table(columns, rows, "estimators"),
        html.message(" ".join(found.notes()[:1])),
    )
