"""Every structure × every attack × every query: the right answer, or a clear error.

``pytest tests/test_adversarial*.py`` ends with a table of counts. All rows, with all smoothings,
are in the slow suite.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attacks import ATTACKS, NUMBERS, case_of, tensors, truths
from queries import NEEDS, QUERIES, REFUSES, WITH_GRAPH, Tolerance
from table import ROWS, STRUCTURES

# of the normal suite; all others are slow
MAIN = {
    "chain-shared/shannon", "binary-tree/shannon", "subset-between/shannon",
    "nonprojective/shannon",
}  # fmt: skip


def pairs() -> list[Any]:
    """All attacks under one temperature of Shannon; those on numbers under the other smoothings,
    where the naive engine, which gives probabilities there, takes most of the time."""
    out = []
    for row in ROWS:
        structure, kind = row.split("/")
        usual = kind == "shannon" or structure not in STRUCTURES
        for attack in ATTACKS if usual else NUMBERS:
            marks = [] if row in MAIN else [pytest.mark.slow]
            out.append(pytest.param(row, attack, marks=marks))
    return out


def is_clear(error: Exception) -> bool:
    """An error of this library: it names who refuses and says what is wrong."""
    known = isinstance(error, ValueError | TypeError | NotImplementedError)
    return known and re.match(r"[A-Za-z_]\w+(\.\w+)?(:| )", str(error)) is not None


@pytest.mark.parametrize(("row", "name"), pairs())
def test_attack(row: str, name: str, record_property: Callable[[str, Any], None]) -> None:
    attack = ATTACKS[name]
    case = case_of(row, attack.sizes)
    if case is None:
        pytest.skip("no lengths to change")
    before = {k: t.clone() for k, t in tensors(case.base).items()}
    s, error = None, None
    try:
        s = attack.strike(case)
    except (ValueError, TypeError, NotImplementedError) as caught:
        error = caught
    if error is not None:
        costs = "grid-all" in row and ("+1e4" in name or "ties-at-0.1" in name)  # are below 0
        assert attack.refused or costs, f"{name} is refused: {error}"
        assert is_clear(error), error
        record_property("refused", 1)
        return
    if s is None:
        pytest.skip("says nothing here")
    assert not attack.refused, "bad scores were taken"
    T = truths(case, s)
    tol = Tolerance(s.dtype, max((t.scale for t in T), default=0.0), attack.exact)
    right, refused, wrong = 0, 0, []
    for query, check in QUERIES.items():
        if not s.supports(NEEDS.get(query, query)) or (attack.inference and query in WITH_GRAPH):
            continue
        nothing = query in REFUSES and not all(t.feasible for t in T)
        try:
            with torch.inference_mode(attack.inference):
                check(s, T, tol, case)
        except AssertionError as error:
            wrong.append(f"{query}: {error}")
        except Exception as error:
            if nothing and "allows no structure" in str(error) and is_clear(error):
                refused += 1
            else:
                wrong.append(f"{query}: {type(error).__name__}: {error}")
        else:
            if nothing:
                wrong.append(f"{query}: it answers for an item without a structure")
            right += 1
    for k, t in tensors(case.base).items():
        assert torch.equal(t, before[k]), f"{k} was written into"
    assert not wrong, f"{s!r}\n" + "\n".join(wrong)
    record_property("right", right)
    record_property("refused", refused)
