"""Every structure × every check of the contract."""

from __future__ import annotations

import pytest
from table import ROWS, STRUCTURES

from structmax.testing import CHECKS

# transformations are the op recipe's work: one representative row for each primitive
RECIPE = {"transforms", "compile"}
REPRESENTATIVES = {
    "chain-shared/shannon",
    "chain-step/shannon",
    "chain-shared/gini",
    "hyperpath/shannon",
    "dtw/shannon",
    "dtw/gini",
    "ctc/shannon",
    "pcfg/shannon",
    "pcfg-low-rank/shannon",
    "subset-between/shannon",
    "assignment-padded/shannon",
    "nonprojective/shannon",
    "nonprojective-labelled/shannon-0.5",
    "spanning-tree/shannon",
}


# the other forms of a structure run with some smoothings in the slow suite only
MAIN = {
    "binary-tree", "chain-shared", "choice", "ctc", "dtw", "edit", "grid-8", "hyperpath",
    "monotone", "path", "pcfg", "projective", "semi-markov-transition", "subset-between",
}  # fmt: skip
SECOND = {"shannon-0.5", "tsallis-1.3"}


def _row(name: str) -> object:
    structure, kind = name.split("/")
    second = kind in SECOND and structure in STRUCTURES and structure not in MAIN
    return pytest.param(name, marks=pytest.mark.slow) if second else name


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("row", map(_row, ROWS))
def test_contract(row: str, check: str) -> None:
    if check in RECIPE and row not in REPRESENTATIVES:
        pytest.skip("covered by another row of the same primitive")
    CHECKS[check](ROWS[row])
