"""Test set-up: uninitialised memory is NaN, and thread counts suit parallel test workers."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import jit_off  # noqa: F401  kernels may be run as Python
import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    # workers already share the processors: threads on top of them took three times as long. Tests
    # of threads ask for their own number
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _poisoned_allocation():
    """``torch.empty`` holds NaN, so a kernel that forgets to write shows."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What the adversarial suites counted: the properties ``right`` and ``refused`` of a test."""
    counts: Counter[tuple[str, str]] = Counter()
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name in ("right", "refused"):
                counts[report.nodeid.partition("[")[0], name] += value
    tests = sorted({test for test, _ in counts})
    if tests:
        terminalreporter.section("attacks")
    for test in tests:
        right, refused = counts[test, "right"], counts[test, "refused"]
        total = f"{right + refused:7,} cases: {right:7,} right, {refused:5,} clear errors"
        terminalreporter.write_line(f"{total}  {test}")
