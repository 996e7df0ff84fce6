"""A cache of what is costly to build, bounded in bytes.

A hit takes no lock and costs the same however many entries there are. A value is built outside of
the lock that guards the entries: whoever asks for another key never waits for it, while those who
ask for the same key wait for the one thread that builds it. In a forked process all locks are new,
since the threads that held the old ones do not exist there.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

import numpy as np
from torch import Tensor

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MOST_UNMEASURED = 64  # entries used since their sizes were last measured


class Cache(Generic[K, V]):
    """Values under keys. Those used longest ago go first once all take more than ``most`` bytes.

    The newest entry stays even if it is larger than that, so that it is not built for every query.
    Values may grow after they were stored: those in use are measured again at the next miss, or
    after ``MOST_UNMEASURED`` of them were used.

    >>> squares = Cache(most=1000)
    >>> squares.get(3, lambda: 3**2), 3 in squares, len(squares)
    (9, True, 1)
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._values: OrderedDict[K, V] = OrderedDict()  # the one used last comes last
        self._after_fork()
        _caches.add(self)

    def _after_fork(self) -> None:
        """New locks; and nothing is measured, since another thread may have been about to."""
        self._lock = threading.Lock()
        self._building: dict[K, threading.RLock] = {}
        self._sizes: dict[K, int] = {}
        self._total = 0
        self._unmeasured = set(self._values)

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
            self._sizes.clear()
            self._total = 0

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[V]:
        return iter(list(self._values.values()))

    @property
    def bytes(self) -> int:
        """The bytes of all entries, measured now."""
        with self._lock:
            self._unmeasured.update(self._values)
            self._measure()
            return self._total

    def get(self, key: K, build: Callable[[], V]) -> V:
        """The value of a key, built if it is not stored."""
        try:
            value = self._values[key]
        except KeyError:
            return self._built(key, build)
        try:
            self._values.move_to_end(key)
        except KeyError:  # another thread has dropped it since
            return value
        self._unmeasured.add(key)
        if len(self._unmeasured) > MOST_UNMEASURED and self._lock.acquire(blocking=False):
            try:
                self._shrink()
            finally:
                self._lock.release()
        return value

    def _built(self, key: K, build: Callable[[], V]) -> V:
        with self._lock:
            building = self._building.setdefault(key, threading.RLock())
        with building:
            if key in self._values:
                return self.get(key, build)
            try:
                value = build()
                with self._lock:
                    self._values[key] = value
                    self._unmeasured.add(key)
                    self._shrink()
                    self._unmeasured.add(key)  # its lists are made by its first use
            finally:
                self._building.pop(key, None)
        return value

    def _shrink(self) -> None:
        """Drops entries until they fit. The caller holds the lock."""
        self._measure()
        while self._total > self.most and len(self._values) > 1:
            key, _ = self._values.popitem(last=False)
            self._total -= self._sizes.pop(key, 0)

    def _measure(self) -> None:
        while self._unmeasured:
            key = self._unmeasured.pop()
            if key in self._values:
                size = size_of(key) + size_of(self._values[key])
                self._total += size - self._sizes.get(key, 0)
                self._sizes[key] = size


_caches: weakref.WeakSet[Cache[Any, Any]] = weakref.WeakSet()


def _renew_all() -> None:
    for cache in _caches:
        cache._after_fork()


os.register_at_fork(after_in_child=_renew_all)


def cached(most: int) -> Callable[[Callable[..., Any]], Any]:
    """Caches what a function of hashable arguments returns, in ``most`` bytes."""

    def decorate(function: Callable[..., Any]) -> Any:
        cache: Cache[tuple[Any, ...], Any] = Cache(most)

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            return cache.get(args, lambda: function(*args))

        call.cache = cache  # type: ignore[attr-defined]
        return call

    return decorate


def size_of(value: Any) -> int:
    """About how many bytes a value takes: its arrays and tensors, and the containers around them.

    >>> size_of((np.zeros(1000), [np.zeros(1000)])) // 1000
    16
    """
    if isinstance(value, np.ndarray | Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sys.getsizeof(value) + sum(map(size_of, list(value.values())))
    if isinstance(value, tuple | list):
        return sys.getsizeof(value) + sum(map(size_of, value))
    return (
        sys.getsizeof(value) + size_of(vars(value))
        if hasattr(value, "__dict__")
        else sys.getsizeof(value)
    )
