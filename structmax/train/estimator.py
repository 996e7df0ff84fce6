"""An estimator from one line of text, as a flag or a configuration has it."""

from __future__ import annotations

import inspect
import json
from typing import Any

from structmax import estimators
from structmax.estimators import Estimator
from structmax.structures.base import Structure
from structmax.train.errors import UserError, near


def estimator_of(text: str, structure: Structure | None = None, one_z: bool = False) -> Estimator:
    """The estimator ``name`` or ``name:option=value,option=value``, checked against a structure.

    ``one_z``: it must give a z, and one for each item.

    >>> estimator_of("top-k-expectation:k=5")
    TopKExpectation(k=5, distinct=False)
    >>> estimator_of("sparse-expectation:max_iter=10").options
    {'max_iter': 10}
    >>> estimator_of("top-k-expectation:n=5")
    Traceback (most recent call last):
    structmax.train.errors.UserError: estimator top-k-expectation has no option 'n'. There are: ...
    """
    name, _, rest = text.partition(":")
    if name not in estimators.NAMES:
        raise UserError(f"there is no estimator {name!r}. {near(name, estimators.NAMES)}")
    known = list(inspect.signature(estimators.NAMES[name]).parameters)
    if of_sparsemap := known == ["options"]:
        known = ["method", "max_iter", "tol", "penalize"]
    options: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise UserError(f"estimator {name}: expected option=value, got {pair!r}.")
        if key not in known:
            raise UserError(f"estimator {name} has no option {key!r}. {near(key, known)}")
        options[key] = _value(value)
    try:
        made = estimators.by_name(name, **options)
    except (TypeError, ValueError) as error:
        raise UserError(f"estimator {name}: {' '.join(str(error).split())}") from error
    if not _fits(made, structure, one_z):
        fitting = [n for n, kind in estimators.NAMES.items() if _fits(kind(), structure, one_z)]
        wrong = "estimates a loss and gives no z, which is needed here"
        if structure is not None and not made.applies_to(structure):
            wrong = f"does not work on {structure._name}, which lacks a query that it needs"
        raise UserError(f"estimator {name} {wrong}. These do: {', '.join(fitting)}.")
    if of_sparsemap and structure is not None:
        try:
            structure.sparsemap(**options)  # which is where their values are looked at
        except (TypeError, ValueError) as error:
            raise UserError(f"estimator {name}: {' '.join(str(error).split())}") from error
    if one_z and getattr(made, "samples", 1) > 1 and not isinstance(made, estimators.Perturbed):
        raise UserError(f"estimator {text} gives several z, and one is needed. Leave out samples.")
    return made


def _fits(made: Estimator, structure: Structure | None, one_z: bool) -> bool:
    gives_z = type(made).__call__ is not Estimator.__call__
    return (gives_z or not one_z) and (structure is None or made.applies_to(structure))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
