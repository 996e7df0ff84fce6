"""Pictures of structures."""

from structmax.draw.text import tree_text
from structmax.draw.tree_svg import page, tree_svg

__all__ = ["page", "tree_svg", "tree_text"]
