"""The errors that ``python -m structmax.testing.precision`` prints stay within bounds."""

from __future__ import annotations

import warnings

import pytest

from structmax.testing import precision


@pytest.mark.parametrize("name", precision.OPS)
def test_errors(name: str) -> None:
    """A few units of float32; an entropy near 0 is a difference of large scores."""
    op = precision.OPS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert precision.against_float64(op) < 2e-6
        assert precision.against_float64(op, 100.0) < (1e-2 if "entropy" in name else 2e-6)
        exact = precision.against_mpmath(name, op)
    assert exact is None or exact < 2e-15


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["softmax", "KSubset: marginals"]
    assert precision.main([*names, "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| op | sizes | float32 |") and len(lines) == 4
    assert lines[2].startswith("| KSubset: marginals | 4×200 |") and lines[3].endswith(" – |")
    assert precision.main(names) == 0
    assert "float64 by mpmath" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        precision.main(["hardmax"])
    assert "no such ops" in capsys.readouterr().err
