"""The contract suite itself, and the matrix that ``python -m structmax.testing`` prints."""

from __future__ import annotations

import sys

import pytest
import torch

import structmax as sx
from structmax.testing import __main__ as matrix
from structmax.testing import check_structure
from structmax.testing.contract import CHECKS, applies

FAST = {name: CHECKS[name] for name in ("log_partition", "marginals", "argmax", "refusals")}


class Wrong(sx.Choice):
    """Its marginals are off, and it claims that topk is intractable without advice."""

    queries = sx.Choice.queries - {"topk"}

    def marginals(self) -> torch.Tensor:
        return super().marginals() * 0.9


def wrong() -> Wrong:
    return Wrong(torch.zeros(3, dtype=torch.float64))


def free() -> sx.GridPath:
    return sx.GridPath(-torch.rand(2, 3, dtype=torch.float64), moves="all")


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    right = lambda: sx.Choice(torch.randn(3, dtype=torch.float64))  # noqa: E731
    rows = {"right/shannon": right, "wrong/shannon": wrong, "wrong/gini": wrong, "free/hard": free}
    monkeypatch.setattr(matrix, "ROWS", rows)
    monkeypatch.setattr(matrix, "CHECKS", FAST)


@pytest.mark.usefixtures("_small")
def test_matrix(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert matrix.main(["--markdown"]) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "| structure | log_partition | marginals | argmax | refusals |"
    assert lines[2:] == [
        "| right | ✓ | ✓ | ✓ | ✓ |",
        "| wrong | ✓ | ✗ | ✓ | ✗ |",
        "| free | – | – | ✓ | ✓ |",
    ]
    assert "wrong/gini fails marginals: AssertionError" in err
    assert matrix.main(["right", "free"]) == 0
    out, _ = capsys.readouterr()
    assert "right" in out and "wrong" not in out and "–" in out
    monkeypatch.setitem(sys.modules, "rich.console", None)  # as where it is not installed
    assert matrix.main(["right", "free"]) == 0
    assert "right" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        matrix.main(["neither"])
    assert "no such structures" in capsys.readouterr().err


def test_what_fails_is_named() -> None:
    others = tuple(set(CHECKS) - {"marginals"})
    with pytest.raises(AssertionError, match="contract check 'marginals' failed"):
        check_structure(wrong, skip=others)
    with pytest.raises(ValueError, match=r"unknown checks \['margins'\]; there are"):
        check_structure(wrong, skip=("margins",))


def test_plain_table() -> None:
    text = matrix.plain({"a-structure": ["✓", "–"]})
    assert text.splitlines()[1] == "a-structure  ✓ –" and f"a  {next(iter(CHECKS))}" in text


def test_intractable_queries_are_checked() -> None:
    assert not applies("marginals", free()) and applies("argmax", free())
    check_structure(free)
    with pytest.raises(AssertionError, match="topk is not among the queries"):
        CHECKS["refusals"](wrong)

    class Answers(sx.Choice):
        """It says that topk is intractable, and answers all the same."""

        queries = sx.Choice.queries - {"topk"}
        instead = {"topk": "Use argmax."}

    Answers.topk = sx.Choice.topk
    with pytest.raises(AssertionError, match="it answers"):
        CHECKS["refusals"](lambda: Answers(torch.zeros(3, dtype=torch.float64)))
