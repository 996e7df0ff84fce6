"""The two pictures of the README, kept in ``docs/images``: ``python docs/pictures/readme.py``.

The first one is drawn by the code that stands above it in the README.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from gallery import polytope

from structmax.draw import Drawing

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"


def tree() -> Drawing:
    """What the README's code saves as ``tree.svg``."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "tree.svg" in block]
    names: dict[str, Drawing] = {}
    exec(code.replace("tree.draw(", "drawing = tree.draw(").replace('.save("tree.svg")', ""), names)
    return names["drawing"]


def draw(folder: Path) -> None:
    """``tree.svg`` and ``polytope.svg``."""
    folder.mkdir(parents=True, exist_ok=True)
    tree().save(folder / "tree.svg")
    polytope().save(folder / "polytope.svg")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if sys.argv[1:] else IMAGES)
