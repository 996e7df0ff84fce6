"""Sphinx configuration."""

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for the package pictures

project = "structmax"
author = "The structmax authors"
copyright = author

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",  # formulas without a network
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build", "_static/*.md"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3

# a reference to what does not exist is a warning, and so an error; types of other libraries, and of
# what is not public, are only named
nitpicky = True
nitpick_ignore_regex = [
    ("py:class", r"(torch|numpy|np|nn|collections)\..*"),
    ("py:class", r"Tensor|Module|Constraints|Gap|Graph|LowRankPCFG|Policy|Workers"),
    ("py:class", r"structmax\.(structures\.parts|forest\.topology)\..*|structmax\.data\.words\.T"),
]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

html_theme = "furo"
html_title = "structmax"


def escape_bars(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]):
    """In docstrings |x| is an absolute value; Sphinx would look for a substitution named x."""
    lines[:] = [re.sub(r"\|(\S[^|]*)\|", r"\|\1\|", line) for line in lines]


def keep_colons(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]):
    """Napoleon takes what stands before a colon in the first line of a property for its type: give
    it an empty comment for a first line."""
    if what in ("attribute", "data", "property") and lines and ":" in lines[0]:
        lines[:0] = ["..", ""]


def setup(app: Sphinx) -> None:
    """Makes the pictures and tables before pages are read."""
    from pictures import benchmarks, gallery, maps, matrix, tutorials

    for part in (maps, gallery, matrix, benchmarks):
        part.draw(HERE / "_static")
    tutorials.draw(HERE / "tutorials")
    app.connect("autodoc-process-docstring", escape_bars)
    app.connect("autodoc-process-docstring", keep_colons, priority=400)  # before napoleon
