"""How far the run is: a bar with rate and time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any


def clock(seconds: float) -> str:
    """A duration.

    >>> clock(75), clock(3700)
    ('1:15', '1:01:40')
    """
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class Progress:
    """Reports to standard error; every method may be called on a silent one too."""

    def __init__(self, title: str, silent: bool = False, seconds_between: float = 5.0) -> None:
        self.silent, self.title, self.pause = silent, title, seconds_between
        self.rate, self.seen, self.shown = 0.0, (0.0, 0), 0.0
        self.began: tuple[float, float] | None = None
        self.bar: Any = None
        if not silent and sys.stderr.isatty():
            self.bar = _bar()
            self.line = self.bar.add_task(title, total=1.0, text="")
            self.bar.start()

    def update(self, step: int, fraction: float, text: str) -> None:
        """At ``step``, a ``fraction`` of the run done, with some numbers as text."""
        if self.silent:
            return
        now, (then, before) = time.monotonic(), self.seen
        if before and now > then:
            rate = (step - before) / (now - then)
            self.rate = 0.8 * self.rate + 0.2 * rate if self.rate else rate
        self.seen = (now, step)
        start, done = self.began = self.began or (now, fraction)
        text = f"step {step}  {self.rate:.1f}/s  {text}"
        if self.bar is not None:
            self.bar.update(self.line, completed=fraction, text=text)
        elif now - self.shown >= self.pause:
            self.shown = now
            left = (now - start) * (1 - fraction) / (fraction - done) if fraction > done else 0.0
            self.say(f"{self.title}: {text}  {fraction:.0%} done, {clock(left)} left")

    def say(self, text: str) -> None:
        """A line that stays."""
        if self.silent:
            return
        if self.bar is not None:
            self.bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    return Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}", markup=False),
        console=Console(stderr=True),
    )
