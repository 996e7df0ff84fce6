"""How far the run is: a bar with rate and time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
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
    """Reports to standard error; every method may be called on a silent one too.

    Rate and time left are those since the first update, which also compiles kernels. Plain lines
    come ``seconds_between`` apart, more of a long run; the first that knows the time left at once.
    """

    def __init__(self, title: str, silent: bool = False, seconds_between: float = 5.0) -> None:
        self.silent, self.title, self.pause = silent, title, seconds_between
        self.text, self.shown, self.told = "", -math.inf, False
        self.first: tuple[float, int, float] | None = None  # when, and what was done then
        self.bar: Any = None  # on a terminal, from the first update on

    def update(self, step: int, fraction: float, text: str = "") -> None:
        """Report ``step``, with a ``fraction`` of the run done; ``text``: numbers to show."""
        if self.silent:
            return
        if self.bar is None and sys.stderr.isatty():
            self.bar = _bar()
            self.line = self.bar.add_task(self.title, total=1.0, left="", text="")
            self.bar.start()
        now = time.monotonic()
        self.text = text or self.text
        began, before, done = self.first = self.first or (now, step, fraction)
        rate = left = ""
        if step > before and now > began:
            each = (now - began) / (step - before)
            rate = f"  {1 / each:.1f}/s" if each < 1 else f"  {each:.1f} s each"
        if fraction > done:
            left = f"{clock((now - began) * (1 - fraction) / (fraction - done))} left"
        if self.bar is not None:
            shown = "  ".join(filter(None, [self.text, f"step {step}{rate}"]))
            self.bar.update(self.line, completed=fraction, left=left, text=shown)
        elif now - self.shown >= max(self.pause, (now - began) / 50) or (
            left and not self.told and step >= before + 3
        ):
            self.shown, self.told = now, bool(left and step >= before + 3)
            parts = [f"step {step}{rate}", self.text, f"{fraction:.0%} done"]
            self.say(f"{self.title}: {'  '.join(filter(None, parts))}{left and f', {left}'}")

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
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    # what does not fit is cut at the end of the text; the time left is always whole
    return Bar(
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[left]}"),
        TextColumn(
            "{task.fields[text]}",
            markup=False,
            table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
        ),
        console=Console(stderr=True),
        expand=True,
    )
