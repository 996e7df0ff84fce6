"""The two pictures of the README, kept in ``docs/images``: ``python docs/pictures/readme.py``."""

from __future__ import annotations

import sys
from pathlib import Path

from gallery import TELESCOPE, polytope, telescope

from structmax.draw import Drawing, arcs_svg, beside

IMAGES = Path(__file__).parents[1] / "images"


def tree() -> Drawing:
    """An ambiguous sentence: all arcs, and the trees that SparseMAP keeps, the likeliest first."""
    structure = telescope()
    pictures = [("marginals", structure.draw(TELESCOPE))]
    kept = structure.sparsemap()
    for p, z in sorted(zip(kept.probs.tolist(), kept.structures), key=lambda pair: -pair[0]):
        if p > 0:
            heads = structure.decode(z)
            arcs = [(head, word, 1.0) for word, head in enumerate(heads, 1)]
            pictures.append((f"SparseMAP, p = {p:.2f}", arcs_svg(TELESCOPE, arcs)))
    return beside(pictures, widest=1200)


def draw(folder: Path) -> None:
    """``tree.svg`` and ``polytope.svg``."""
    folder.mkdir(parents=True, exist_ok=True)
    tree().save(folder / "tree.svg")
    polytope().save(folder / "polytope.svg")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if sys.argv[1:] else IMAGES)
