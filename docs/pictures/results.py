"""Writes the tables of the results pages, each from the JSON file beside its page.

``docs/results/NAME.json`` holds tables by name: their columns, and rows of as many values or fewer.
In ``NAME.md`` a table stands between ``<!-- table: THIS -->`` and ``<!-- end -->``, so that a page
can be read as it is::

    python docs/pictures/results.py      # after a change of a JSON file
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "results"
PLACE = re.compile(r"<!-- table: (.+?) -->\n.*?<!-- end -->", re.DOTALL)


def table(name: str, content: dict[str, Any]) -> str:
    """One table in Markdown, between its marks."""
    columns, rows = content["columns"], content["rows"]
    for row in rows:
        if len(row) > len(columns):
            raise ValueError(f"table {name} has {len(columns)} columns, a row more: {row}.")
    lines = [line(columns), "|" + "---|" * len(columns)]
    lines += [line([*row, *[""] * (len(columns) - len(row))]) for row in rows]
    return "\n".join([f"<!-- table: {name} -->", *lines, "<!-- end -->"])


def line(cells: list[str]) -> str:
    """A line of a table."""
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


def page(text: str, tables: dict[str, Any]) -> str:
    """A page with its tables as the JSON has them."""
    found = PLACE.findall(text)
    if sorted(found) != sorted(tables):
        raise ValueError(f"the page has tables {sorted(found)}, its JSON file {sorted(tables)}.")
    return PLACE.sub(lambda match: table(match[1], tables[match[1]]), text)


def write(folder: Path = FOLDER) -> list[Path]:
    """Rewrites every page that has a JSON file; those that changed."""
    changed = []
    for source in sorted(folder.glob("*.json")):
        path = source.with_suffix(".md")
        old = path.read_text()
        new = page(old, json.loads(source.read_text()))
        if new != old:
            path.write_text(new)
            changed.append(path)
    return changed


if __name__ == "__main__":
    print(*[path.name for path in write()], sep="\n")
