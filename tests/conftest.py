"""Test set-up: uninitialised memory is NaN, and thread counts suit parallel test workers."""

from __future__ import annotations

import os
import re
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


# The rows of tables that take longest, other rows of which stay in the normal suite: it has to pass
# on two cores in a quarter of an hour, with an empty cache of kernels.
LONG = re.compile(
    r"test_concurrency.py::(test_(dataloader|process)\[spawn\]|test_structures_travel)"
    r"|test_forest_gpu.py::(.*(Tsallis|Gini)|test_items\[|test_discrete_lists)"
    r"|test_rules_gpu.py::test_every_query\[Hard|test_chain_gpu.py::test_long_chains\[float32"
    r"|test_ops.py::test_compile(_over_sizes\[Gini|\[inductor-(forest|chain-shared))"
    r"|test_contract.py::(?!.*(chain-step|choice)).*-compile\]"
    r"|test_contract.py::(?!.*(chain|choice|binary)).*/gini-gradients\]"
    r"|test_train.py::test_two_workers_are_one|test_cli.py::test_signals_save_and_exit\[2-130\]"
)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if LONG.search(item.nodeid):
            item.add_marker(pytest.mark.slow)
