"""Modules built on the structures."""

from structmax.nn.crf import CRF

__all__ = ["CRF"]
