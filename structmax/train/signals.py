"""Ending well: SIGTERM and Ctrl-C are noted, and the run ends after the update at hand."""

from __future__ import annotations

import signal
from types import TracebackType
from typing import Any


class Stopped(Exception):
    """A signal ended the run; its checkpoint is written."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"stopped at step {step}")
        self.number, self.step = number, step


class Signals:
    """While entered, ``noted`` is the number of the signal that came; a second one interrupts.

    >>> import os
    >>> with Signals() as signals:
    ...     os.kill(os.getpid(), signal.SIGTERM)
    ...     print(signals.noted == signal.SIGTERM)
    True
    """

    def __init__(self) -> None:
        self.noted = 0
        self._before: dict[int, Any] = {}

    def _note(self, number: int, frame: Any) -> None:
        if self.noted:
            raise KeyboardInterrupt
        self.noted = number

    def __enter__(self) -> Signals:
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        except ValueError:  # not the main thread, which alone may listen
            pass
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
