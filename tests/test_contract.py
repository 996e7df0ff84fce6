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


# the other forms of a structure, and checks that take long, run with some smoothings in the slow
# suite only
MAIN = {
    "binary-tree", "chain-shared", "choice", "ctc", "dtw", "edit", "grid-8", "hyperpath",
    "monotone", "path", "pcfg", "projective", "semi-markov-transition", "subset-between",
}  # fmt: skip
SECOND = {"shannon-0.5", "tsallis-1.3"}
LONG = {"gradients", "ranked_support", "entropy", "batches"}
SMOOTHED = {"log_partition", "marginals", "sample", "log_prob"}  # where the kind of Ω matters most
UNSMOOTHED = {"sparsemap"}  # the smoothing has no part in it


def _pairs() -> list[object]:
    pairs: list[object] = []
    for row in ROWS:
        structure, kind = row.split("/")
        main = structure in MAIN or structure not in STRUCTURES
        for check in CHECKS:
            usual = kind == "shannon" or structure not in STRUCTURES
            slow = not usual and check in UNSMOOTHED
            slow |= not usual and check in LONG and not main
            slow |= kind in SECOND and not (main and check in SMOOTHED)
            pairs.append(pytest.param(row, check, marks=[pytest.mark.slow] if slow else []))
    return pairs


@pytest.mark.parametrize(("row", "check"), _pairs())
def test_contract(row: str, check: str) -> None:
    if check in RECIPE and row not in REPRESENTATIVES:
        pytest.skip("covered by another row of the same primitive")
    CHECKS[check](ROWS[row])
