"""Agreement first, then time.

A case builds *contenders*: closures that do the same work. The first is ours; the others are ours
in another setting, a peer, or a yardstick such as a copy. Before anything is timed, the case checks
that the answers agree.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

SLOW_S = 10.0
"""A contender that has used this much time stops after its third run."""


class Disagreement(Exception):
    """Two contenders gave different answers."""


@dataclass(frozen=True)
class Contender:
    """``run`` is what is timed; None if its library is not installed."""

    name: str
    run: Callable[[], Any] | None


@dataclass(frozen=True)
class Trial:
    """``agree`` raises ``Disagreement`` unless every contender gives the same answer."""

    contenders: list[Contender]
    agree: Callable[[], None]


@dataclass(frozen=True)
class Case:
    name: str
    what: str
    devices: tuple[str, ...]
    build: Callable[[torch.device], Trial]


@dataclass
class Row:
    """One contender's result; ``ratio`` is its median over that of ours."""

    case: str
    contender: str
    median_ms: float | None = None
    ratio: float | None = None
    note: str = ""
    times_ms: list[float] = field(default_factory=list)


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def require_close(what: str, ours: torch.Tensor, other: torch.Tensor, tolerance: float) -> None:
    """Raises unless both are finite and differ by at most ``tolerance``, relative above 1."""
    other = other.to(ours.dtype)
    error = ((ours - other).abs() / other.abs().clamp(min=1)).max().item()
    if not error <= tolerance:  # NaN is no agreement
        raise Disagreement(f"{what}: the largest difference is {error:.2g}, over {tolerance:.2g}")


def measure(run: Callable[[], Any], device: torch.device, repeat: int) -> list[float]:
    """Milliseconds of each of ``repeat`` runs after two that are not counted."""
    times: list[float] = []
    began = time.perf_counter()
    for i in range(2 + repeat):
        times.append(_time_once(run, device))
        if i >= 4 and time.perf_counter() - began > SLOW_S:
            break
    return times[2:]


def _time_once(run: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":  # from the launch to the end of the last kernel, idle gaps included
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)
    start_s = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start_s)


def run_case(case: Case, device: torch.device, repeat: int) -> list[Row]:
    """The rows of a case; one row that says FAIL, and no times, if the answers differ."""
    torch.manual_seed(0)
    trial = case.build(device)
    try:
        trial.agree()
    except Disagreement as reason:
        return [Row(case.name, trial.contenders[0].name, note=f"FAIL: {reason}")]
    rows = [_row(case, contender, device, repeat) for contender in trial.contenders]
    ours = rows[0].median_ms
    for row in rows[1:]:
        if ours is not None and row.median_ms is not None:
            row.ratio = row.median_ms / ours
    return rows


def _row(case: Case, contender: Contender, device: torch.device, repeat: int) -> Row:
    row = Row(case.name, contender.name)
    if contender.run is None:
        row.note = "peer not installed"
        return row
    try:
        row.times_ms = measure(contender.run, device, repeat)
        row.median_ms = statistics.median(row.times_ms)
    except torch.OutOfMemoryError:
        row.note = "out of memory"
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def environment(device: torch.device, command: str) -> dict[str, Any]:
    """Where the numbers come from."""
    cuda = device.type == "cuda"
    return {
        "command": command,
        "commit": _commit(),
        "machine": torch.cuda.get_device_name(device) if cuda else _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _commit() -> str:
    here = Path(__file__).parent

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", *args], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "-s") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def as_json(rows: list[Row], where: dict[str, Any]) -> dict[str, Any]:
    return {**where, "rows": [asdict(row) for row in rows]}


def show(rows: list[Row], where: dict[str, Any]) -> None:
    """Prints the table, by rich if it is there."""
    heads = ["case", "contender", "median", "runs", "× ours", ""]
    body = [
        [
            row.case,
            row.contender,
            "" if row.median_ms is None else f"{row.median_ms:.3f} ms",
            str(len(row.times_ms) or ""),
            "" if row.ratio is None else f"{row.ratio:.3g}",
            row.note or ("" if row.ratio is None or row.ratio >= 1 else f"1/{1 / row.ratio:.3g}"),
        ]
        for row in rows
    ]
    if installed("rich"):
        from rich.console import Console
        from rich.table import Table

        table = Table(*heads)
        for row, cells in zip(rows, body, strict=True):
            style = "red" if row.note.startswith("FAIL") else None
            table.add_row(*cells, style=style)
        Console().print(table)
    else:
        widths = [max(map(len, column)) for column in zip(heads, *body, strict=True)]
        for cells in [heads, *body]:
            print("  ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)).rstrip())
    print(", ".join(f"{key} {value}" for key, value in where.items()))
