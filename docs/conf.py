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
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build", "matrix.md"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

html_theme = "furo"
html_title = "structmax"


def escape_bars(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]):
    """In docstrings |x| is an absolute value; Sphinx would look for a substitution named x."""
    lines[:] = [re.sub(r"\|(\S[^|]*)\|", r"\|\1\|", line) for line in lines]


def setup(app: Sphinx) -> None:
    """Draws the pictures before pages are read."""
    from pictures import gallery, maps

    maps.draw(HERE / "_static")
    gallery.draw(HERE / "_static")
    app.connect("autodoc-process-docstring", escape_bars)
