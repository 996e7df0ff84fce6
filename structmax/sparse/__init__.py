"""SparseMAP: sparse, differentiable distributions over any structure that has an argmax."""

from structmax.sparse.result import Solution, SparseMAPResult
from structmax.sparse.solve import project, projection, sparsemap_oracle

__all__ = ["Solution", "SparseMAPResult", "project", "projection", "sparsemap_oracle"]
