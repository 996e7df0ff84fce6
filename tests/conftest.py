"""Test set-up: uninitialised memory is NaN, and thread counts suit parallel test workers."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _poisoned_allocation():
    """``torch.empty`` holds NaN, so a kernel that forgets to write shows."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
