"""Test set-up: uninitialised memory is NaN, and thread counts suit parallel test workers."""

from __future__ import annotations

import os

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
