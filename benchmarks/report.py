"""The table, the JSON, and where the numbers come from."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.growth import Growth
from benchmarks.harness import Row, installed, peers_faster
from benchmarks.latency import Latency

PEERS = [
    "torch-struct",
    "pytorch-crf",
    "entmax",
    "tslearn",
    "ufal.chu_liu_edmonds",
    "scipy",
    "POT",
    "jax",
    "numba",
    "triton",
]


def environment(device: torch.device, command: str) -> dict[str, Any]:
    """Where the numbers come from."""
    cuda = device.type == "cuda"
    return {
        "command": command,
        "commit": _commit(),
        "device": device.type,
        "machine": torch.cuda.get_device_name(device) if cuda else _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "versions": {name: version for name in PEERS if (version := _version(name))},
        "load": os.getloadavg()[0],
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


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


def as_json(
    rows: list[Row], growth: list[Growth], latency: list[Latency], where: dict[str, Any]
) -> dict[str, Any]:
    """All of it: ``rows``, ``growth`` and ``latency`` hold the fields of those classes."""

    def plain(items: Sequence[Any]) -> list[dict[str, Any]]:
        return [{key: _short(value) for key, value in asdict(item).items()} for item in items]

    return {**where, "rows": plain(rows), "growth": plain(growth), "latency": plain(latency)}


def _short(value: Any) -> Any:
    """Floats to four digits."""
    if isinstance(value, list):
        return [_short(x) for x in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def show(
    rows: list[Row], growth: list[Growth], latency: list[Latency], where: dict[str, Any]
) -> None:
    """Prints the tables, by rich if it is there."""
    if rows:
        heads = ["case", "size", "contender", "median ms", "runs", "× ours", "MiB", ""]
        _table(heads, [_cells(row) for row in rows], [row.note for row in rows])
    if growth:
        heads = ["growth", "n", "ms", "MiB", "time ~ n^", "memory ~ n^", "theory"]
        body = [
            [
                g.structure,
                *(" ".join(f"{x:.3g}" for x in series) for series in (g.n, g.ms, g.mib)),
                *("" if x is None else f"{x:.2f}" for x in (g.time_exponent, g.memory_exponent)),
                f"{g.theory_time}, {g.theory_memory}",
            ]
            for g in growth
        ]
        _table(heads, body, [g.note for g in growth])
    if latency:
        heads = ["one sentence of 10 words", "median µs", "least µs", "bar µs"]
        body = [
            [
                x.what,
                f"{x.median_us:.0f}",
                f"{x.least_us:.0f}",
                "" if x.bar_us is None else f"{x.bar_us:.0f}",
            ]
            for x in latency
        ]
        _table(heads, body, [""] * len(body))
    for row in peers_faster(rows):
        print(f"a peer is faster: {row.case}: {row.contender} takes {row.ratio:.3g} times as long")
    print(", ".join(f"{key} {value}" for key, value in where.items()))


def _cells(row: Row) -> list[str]:
    return [
        row.case,
        row.size,
        row.contender,
        "" if row.median_ms is None else f"{row.median_ms:.3f}",
        str(row.runs or ""),
        "" if row.ratio is None else f"{row.ratio:.3g}",
        "" if row.peak_mib is None else f"{row.peak_mib:.1f}",
        row.note,
    ]


def _table(heads: list[str], body: list[list[str]], notes: list[str]) -> None:
    if installed("rich"):
        from rich.console import Console
        from rich.table import Table

        table = Table(*heads, box=None)
        for cells, note in zip(body, notes, strict=True):
            table.add_row(*cells, style="red" if note.startswith("FAIL") else None)
        console = Console()
        if not console.is_terminal:
            console.width = 200
        console.print(table)
        return
    widths = [max(map(len, column)) for column in zip(heads, *body, strict=True)]
    for cells in [heads, *body]:
        print("  ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)).rstrip())
    print()
