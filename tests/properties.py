"""Properties that hold for random examples."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def for_all(cases: int, check: Callable[..., None], **strategies: st.SearchStrategy) -> None:
    """Runs a property on that many examples; a failure is shrunk and shown."""
    settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=cases < 1000,
        suppress_health_check=list(HealthCheck),
    )(given(**strategies)(check))()
