"""The cache that all caches of forests and lists are: bounded in bytes, cheap to hit."""

from __future__ import annotations

from collections import Counter, OrderedDict

import numpy as np
import torch

from structmax.cache import Cache, cached, size_of


def test_bytes_stay_below_the_bound_and_the_least_recently_used_goes_first() -> None:
    cache: Cache = Cache(most=10_000)
    for i in range(100):
        cache.get("kept", lambda: np.zeros(100))
        cache.get(i, lambda: np.zeros(100))
        assert cache.bytes <= 10_000
    assert "kept" in cache and 99 in cache and 0 not in cache
    assert 8 <= len(cache) <= 12


def test_what_is_larger_than_the_bound_is_answered_and_not_built_twice() -> None:
    cache: Cache = Cache(most=1000)
    large = cache.get("large", lambda: np.zeros(1000))
    assert cache.get("large", lambda: np.ones(1)) is large
    cache.get("small", lambda: np.ones(1))
    assert "large" not in cache and cache.bytes <= 1000


def test_entries_that_grow_are_measured_again() -> None:
    cache: Cache = Cache(most=100_000)
    grown = [cache.get(i, dict) for i in range(70)]
    for held in grown:
        held["list"] = np.zeros(1000)
    for i in range(70):  # hits only
        cache.get(i, dict)
    assert len(cache) < 30


def test_a_failed_build_leaves_nothing_behind() -> None:
    cache: Cache = Cache(most=1000)
    for _ in range(2):
        try:
            cache.get("key", lambda: 1 // 0)
        except ZeroDivisionError:
            continue
        raise AssertionError
    assert cache.get("key", lambda: 3) == 3 and not cache._building


def test_a_hit_costs_the_same_however_many_entries_there_are() -> None:
    """Counted, not timed: how often the entries are touched, and how often one is measured."""
    counts: Counter[str] = Counter()

    class Counted(OrderedDict):
        def __getitem__(self, key):
            counts["get"] += 1
            return super().__getitem__(key)

        def __iter__(self):
            counts["iterate"] += 1
            return super().__iter__()

        def values(self):
            counts["iterate"] += 1
            return super().values()

    cache: Cache = Cache(most=1 << 30)
    cache._values = Counted()
    for size in range(8000):
        cache.get(size, lambda: np.zeros(3))
    assert counts["get"] <= 3 * 8000 and not counts["iterate"]
    counts.clear()
    for _ in range(1000):
        cache.get(17, dict)
    assert counts["get"] <= 1001 and not counts["iterate"]


def test_functions_are_cached_by_their_arguments() -> None:
    calls = []

    @cached(most=1000)
    def square(x: int) -> int:
        calls.append(x)
        return x * x

    assert [square(3), square(3), square(4)] == [9, 9, 16] and calls == [3, 4]
    square.cache.clear()
    assert square(3) == 9 and calls == [3, 4, 3]


def test_sizes_count_arrays_tensors_and_what_holds_them() -> None:
    class Holder:
        pass

    holder = Holder()
    holder.lists = {"a": np.zeros(1000), "b": [torch.zeros(1000), (np.zeros(1000),)]}
    assert 20_000 <= size_of(holder) <= 22_000
    assert size_of((b"x" * 5000, 3)) >= 5000
