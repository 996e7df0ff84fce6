"""The table of structures: a row there is checked by every test of the contract."""

from structmax.testing.examples import (
    ROWS,
    SMOOTHINGS,
    STRUCTURES,
    dag,
    diamond,
    f64,
    nonprojective,
    projective,
    randn,
)

__all__ = [
    "ROWS",
    "SMOOTHINGS",
    "STRUCTURES",
    "dag",
    "diamond",
    "f64",
    "nonprojective",
    "projective",
    "randn",
]
