"""Structures whose tensors are written into after they were made (see ``overwrites``)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("step", "cases"),
    [(10, 200), pytest.param(1, 2000, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_no_write_into_a_tensor_is_answered_wrongly(step: int, cases: int) -> None:
    """In a process of its own: a wrong kernel would end it, and the last line would say where."""
    script = Path(__file__).with_name("overwrites.py")
    found = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), "0", "2300", str(step)],
        capture_output=True,
        text=True,
    )
    lines = found.stdout.splitlines()
    assert found.returncode in (0, 1), f"ended by {found.returncode} in {lines[-1:]}"
    wrong = [line for line in lines if line.startswith("WRONG")]
    assert not wrong, "\n".join(wrong)
    asked = re.match(r"(\d+) cases, 0 wrong", lines[-1])
    assert asked and int(asked[1]) >= cases, (lines[-1], found.stderr[-2000:])
