"""Every structure × every check of the contract."""

from __future__ import annotations

import pytest
from table import ROWS

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


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("row", ROWS)
def test_contract(row: str, check: str) -> None:
    if check in RECIPE and row not in REPRESENTATIVES:
        pytest.skip("covered by another row of the same primitive")
    CHECKS[check](ROWS[row])
