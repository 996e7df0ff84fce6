"""Modules built on the structures and maps."""

from structmax.nn.attention import Attention
from structmax.nn.crf import CRF
from structmax.nn.dot_product import attend

__all__ = ["CRF", "Attention", "attend"]
