"""The recipes, one per file. A new file with a ``Task`` in it is added to the list here."""

from __future__ import annotations

import importlib

from structmax.train.errors import UserError, near
from structmax.train.task import Task

_PLACES = {
    "align": ("align", "Align"),
    "explain": ("explain", "Explain"),
    "induce": ("induce", "Induce"),
    "listops": ("listops", "ListOps"),
    "nli": ("nli", "NLI"),
    "parse": ("parse", "Parse"),
    "path": ("path", "Path"),
    "semdep": ("semdep", "SemDep"),
    "seq2seq": ("seq2seq", "Translation"),
    "sst": ("sst", "SST"),
    "tag": ("tag", "Tag"),
    "toy": ("toy", "Toy"),
}


def names() -> list[str]:
    """The names of the tasks.

    >>> "toy" in names()
    True
    """
    return sorted(_PLACES)


def by_name(name: str) -> Task:
    """The task of a name.

    >>> by_name("toy").name
    'toy'
    >>> by_name("tor")
    Traceback (most recent call last):
    structmax.train.errors.UserError: there is no task 'tor'. Did you mean 'toy'?
    """
    if name not in _PLACES:
        raise UserError(f"there is no task {name!r}. {near(name, _PLACES)}")
    module, kind = _PLACES[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), kind)()
