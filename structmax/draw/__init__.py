"""Pictures of structures: SVG that notebooks show."""

from structmax.draw.answer import answer_svg
from structmax.draw.arcs_svg import arcs_svg
from structmax.draw.bars_svg import bars_svg
from structmax.draw.diagnosis_svg import diagnosis_svg
from structmax.draw.graph_svg import graph_svg
from structmax.draw.heat_svg import heat_svg
from structmax.draw.lattice_svg import lattice_svg, segments_svg
from structmax.draw.lines_svg import lines_svg
from structmax.draw.polytope_svg import polytope_svg
from structmax.draw.simplex_svg import simplex_svg
from structmax.draw.svg import Drawing, beside
from structmax.draw.text import tree_text
from structmax.draw.threads_svg import threads_svg
from structmax.draw.tree_svg import chart_svg, page, tree_svg

__all__ = [
    "Drawing",
    "answer_svg",
    "arcs_svg",
    "bars_svg",
    "beside",
    "chart_svg",
    "diagnosis_svg",
    "graph_svg",
    "heat_svg",
    "lattice_svg",
    "lines_svg",
    "page",
    "polytope_svg",
    "segments_svg",
    "simplex_svg",
    "threads_svg",
    "tree_svg",
    "tree_text",
]
