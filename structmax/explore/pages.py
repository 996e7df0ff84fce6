"""The pages, and what each of them says."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol

from structmax.explore import html

NAMES = ("structures", "simplex", "dtw", "estimators", "model")


class Page(Protocol):
    """A page: its controls, in stages, and what it shows for their values.

    Each stage is ``f(ui, values) -> dict``, with marimo's ``ui`` and the values of the stages
    before; ``view`` gets the values of all.
    """

    TITLE: str
    ABOUT: str
    STAGES: Any

    def view(self, values: dict[str, Any]) -> str: ...


def page(name: str) -> Page:
    """A page by its name; what it needs is imported now.

    >>> page("simplex").TITLE
    'Simplex'
    """
    return import_module(f"structmax.explore.{name}")


def controls(name: str, stage: int, ui: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The controls of a stage, none where the page has no such stage."""
    stages = page(name).STAGES
    return stages[stage](ui, dict(values)) if stage < len(stages) else {}


def view(name: str, values: Mapping[str, Any]) -> str:
    """What a page shows, or what is wrong with what was written.

    >>> "1 to 15 words" in view("structures", {"kind": "choice", "text": ""})
    True
    """
    try:
        return page(name).view(dict(values))
    except ValueError as error:
        return html.page(html.message(str(error)))
