"""Estimators: train through any structure, one choice of an argument.

``estimator(structure)`` gives z with a gradient, ``estimator.loss(structure, cost)`` the cost
``(*batch)`` with one. Three objectives: E[L(z)], L(argmax) and L(E[z]).
"""

from __future__ import annotations

import difflib
from typing import Any

from structmax.estimators.base import Estimator, call_cost
from structmax.estimators.black_box import BlackBox
from structmax.estimators.exact_expectation import ExactExpectation
from structmax.estimators.gumbel_straight_through import GumbelStraightThrough
from structmax.estimators.imle import IMLE
from structmax.estimators.marginals import Marginals
from structmax.estimators.perturb_and_map import PerturbAndMAP
from structmax.estimators.perturb_and_parse import PerturbAndParse
from structmax.estimators.perturbed import Perturbed
from structmax.estimators.ppo import PPO
from structmax.estimators.reinforce import Reinforce
from structmax.estimators.sparse_expectation import SparseExpectation
from structmax.estimators.sparsemap import SparseMAP
from structmax.estimators.spigot import SPIGOT
from structmax.estimators.straight_through import StraightThrough
from structmax.estimators.sum_and_sample import SumAndSample
from structmax.estimators.top_k_expectation import TopKExpectation

NAMES: dict[str, type[Estimator]] = {
    "marginals": Marginals,
    "sparsemap": SparseMAP,
    "perturbed": Perturbed,
    "perturb-and-parse": PerturbAndParse,
    "straight-through": StraightThrough,
    "spigot": SPIGOT,
    "black-box": BlackBox,
    "gumbel-straight-through": GumbelStraightThrough,
    "perturb-and-map": PerturbAndMAP,
    "imle": IMLE,
    "reinforce": Reinforce,
    "ppo": PPO,
    "sparse-expectation": SparseExpectation,
    "top-k-expectation": TopKExpectation,
    "sum-and-sample": SumAndSample,
    "exact-expectation": ExactExpectation,
}


def by_name(name: str, **options: Any) -> Estimator:
    """An estimator by its name, as a configuration file has it.

    >>> by_name("spigot", step=0.5)
    SPIGOT(step=0.5, pullback_steps=1, variant='euclidean')
    """
    if name not in NAMES:
        near = difflib.get_close_matches(str(name).lower().replace("_", "-"), NAMES, cutoff=0.4)
        listed = " or ".join(map(repr, near)) if near else ", ".join(map(repr, NAMES))
        raise ValueError(f"by_name: there is no estimator {name!r}. Did you mean {listed}?")
    return NAMES[name](**options)


__all__ = [
    "IMLE",
    "PPO",
    "SPIGOT",
    "BlackBox",
    "Estimator",
    "ExactExpectation",
    "GumbelStraightThrough",
    "Marginals",
    "PerturbAndMAP",
    "PerturbAndParse",
    "Perturbed",
    "Reinforce",
    "SparseExpectation",
    "SparseMAP",
    "StraightThrough",
    "SumAndSample",
    "TopKExpectation",
    "by_name",
    "call_cost",
]
