"""Agreement first, then time, then memory.

A case builds *contenders*: closures that do the same work. The first is ours; the others are ours
in another setting, a peer, or a yardstick such as a copy. Before anything is timed, the case checks
that the answers agree.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch


class Disagreement(Exception):
    """Two contenders gave different answers."""


class OutOfTime(BaseException):
    """The time limit of the whole run has passed."""


@dataclass(frozen=True)
class Contender:
    """``run`` is what is timed; None if it cannot be here, and ``why`` says why.

    With ``calls`` above 1 the time is that of one of so many in a row: as in a training loop, a GPU
    is still busy with one while the host prepares the next.
    """

    name: str
    run: Callable[[], Any] | None
    kind: str = "peer"  # or "ours" or "yardstick"
    why: str = "not installed"
    calls: int = 1


def ours(name: str, run: Callable[[], Any]) -> Contender:
    """structmax in some setting."""
    return Contender(f"structmax, {name}" if name else "structmax", run, "ours")


def peer(name: str, module: str, run: Callable[[], Any]) -> Contender:
    """Another library, if it is installed."""
    return Contender(name, run if installed(module) else None)


@dataclass(frozen=True)
class Trial:
    """``agree`` raises ``Disagreement`` unless every contender gives the same answer."""

    contenders: list[Contender]
    agree: Callable[[], None]


@dataclass(frozen=True)
class Case:
    """``size`` is "small", "medium" or "large"; ``mode`` is "forward" or "forward + backward"."""

    name: str
    what: str
    size: str
    mode: str
    devices: tuple[str, ...]
    build: Callable[[torch.device], Trial]


@dataclass
class Row:
    """One contender's result.

    Times are milliseconds: the median, and the quartiles around it. ``ratio`` is the median over
    that of ours, ``peak_mib`` the memory that one call adds at its peak, its answer included.
    """

    case: str
    what: str
    size: str
    mode: str
    contender: str
    kind: str
    median_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    runs: int = 0
    ratio: float | None = None
    peak_mib: float | None = None
    note: str = ""


def cases(
    name: str,
    what: str,
    build: Callable[..., Trial],
    sizes: dict[str, str],
    mode: str = "forward + backward",
) -> dict[str, Case]:
    """A case for each size: ``{"small 8x16x8": "cpu cuda"}`` says its numbers and the devices."""
    found = {}
    for size, devices in sizes.items():
        label, dimensions = size.split()
        numbers = tuple(map(int, dimensions.split("x")))
        title = f"{name}-{dimensions}"
        found[title] = Case(
            title,
            f"{what} at {numbers}",
            label,
            mode,
            tuple(devices.split()),
            lambda device, numbers=numbers: build(device, *numbers),
        )
    return found


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False


def require_close(what: str, ours: torch.Tensor, other: torch.Tensor, tolerance: float) -> None:
    """Raises unless both are finite and differ by at most ``tolerance``, relative above 1."""
    other = other.to(ours.dtype)
    error = ((ours - other).abs() / other.abs().clamp(min=1)).max().item()
    if not error <= tolerance:  # NaN is no agreement
        raise Disagreement(f"{what}: the largest difference is {error:.2g}, over {tolerance:.2g}")


def measure(
    run: Callable[[], Any], device: torch.device, repeat: int, seconds: float
) -> list[float]:
    """Milliseconds of each run, up to ``repeat`` of them, after one or two that are not counted.

    Ends after ``seconds``, but not before three runs, or one if that alone takes so long.
    """
    began = time.perf_counter()
    if time_once(run, device) < 250 * seconds:  # the first may have compiled something
        time_once(run, device)
    times = [time_once(run, device)]
    while len(times) < repeat:
        spent = time.perf_counter() - began
        if spent > seconds * (1 if len(times) >= 3 else 4):
            break
        times.append(time_once(run, device))
    return times


def time_once(run: Callable[[], Any], device: torch.device) -> float:
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


def peak_memory(run: Callable[[], Any], device: torch.device) -> float | None:
    """MiB that one more call needs at its peak: of the process, or of torch's allocator on CUDA.

    The process gives back what it holds unused, and Linux counts its highest number of resident
    pages anew; None elsewhere.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        resident = _resident("VmRSS:")
        run()
        return max(0.0, _resident("VmHWM:") - resident)
    except (OSError, AttributeError):
        return None


def _resident(which: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(which))


def run_case(case: Case, device: torch.device, repeat: int, seconds: float) -> list[Row]:
    """The rows of a case; one row that says FAIL, and no times, if the answers differ or there are
    none: whatever is wrong with one case, the others are run."""
    torch.manual_seed(0)
    try:
        trial = case.build(device)
        trial.agree()
    except Exception as reason:
        row = _empty_row(case, ours("", lambda: None))
        kind = "" if isinstance(reason, Disagreement) else f"{type(reason).__name__}: "
        row.note = f"FAIL: {kind}{reason}"
        return [row]
    rows = [_row(case, contender, device, repeat, seconds) for contender in trial.contenders]
    first = rows[0].median_ms
    for row in rows[1:]:
        if first is not None and row.median_ms is not None:
            row.ratio = row.median_ms / first
    return rows


def _empty_row(case: Case, contender: Contender) -> Row:
    return Row(case.name, case.what, case.size, case.mode, contender.name, contender.kind)


def _row(
    case: Case, contender: Contender, device: torch.device, repeat: int, seconds: float
) -> Row:
    row = _empty_row(case, contender)
    if contender.run is None:
        row.note = f"skipped: {contender.why}"
        return row
    try:
        run, calls = contender.run, contender.calls
        taken = measure(partial(_in_a_row, run, calls), device, repeat, seconds)
        times = [t / calls for t in taken]
        row.runs, row.median_ms = len(times), statistics.median(times)
        row.low_ms, row.high_ms = _quartiles(times)
        row.peak_mib = peak_memory(run, device)
    except (torch.OutOfMemoryError, MemoryError):
        row.note = "out of memory"
    except Exception as reason:  # a peer that fails at what it is asked for
        row.note = f"FAIL: {type(reason).__name__}: {reason}"
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def _in_a_row(run: Callable[[], Any], calls: int) -> None:
    for _ in range(calls):
        run()


def _quartiles(times: list[float]) -> tuple[float, float]:
    if len(times) == 1:
        return times[0], times[0]
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, high


def peers_faster(rows: list[Row]) -> list[Row]:
    """The rows of peers that took less time than ours."""
    return [row for row in rows if row.kind == "peer" and row.ratio is not None and row.ratio < 1]
