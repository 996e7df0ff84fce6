"""The plots and tables of the page ``benchmarks``, from files that ``python -m benchmarks --json``
wrote."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILES = Path(__file__).parents[1] / "benchmarks"
AREAS = {"small": 12, "medium": 30, "large": 60}  # of dots, in square points


def tables(files: list[Path]) -> str:
    """A section for each file: where it was measured, and what."""
    if not files:
        return "No numbers are kept here: `python -m benchmarks --json docs/benchmarks/cpu.json`."
    return "\n\n".join(section(json.loads(file.read_text("utf-8")), file.stem) for file in files)


def section(found: dict[str, Any], name: str) -> str:
    """One file as Markdown; what it does not have is left out."""
    parts = [f"## {name}: {found['machine']}", _where(found)]
    if rows := found.get("rows"):
        parts += [_picture(name, theme) for theme in ("light", "dark")]
        head = ["case", "mode", "contender", "ms", "quartiles", "runs", "× ours", "MiB", ""]
        parts += [_table(head, [_times(row) for row in rows], 3)]
    if growth := found.get("growth"):
        head = ["structure", "n", "ms", "MiB", "time ~ nˣ", "memory ~ nˣ", "theory"]
        parts += ["### Growth", _table(head, [_growth(row) for row in growth], 1)]
    if latency := found.get("latency"):
        head = ["one sentence of 10 words", "median µs", "least µs", "bar µs"]
        cells = [[f"`{x['what']}`", *map(_number, (x["median_us"], x["least_us"], x["bar_us"]))]
                 for x in latency]  # fmt: skip
        parts += ["### One short sentence", _table(head, cells, 1)]
    return "\n\n".join(parts)


def _picture(name: str, theme: str) -> str:
    about = f"how many times as long as structmax each peer takes, {name}"
    return (
        f"```{{image}} _static/benchmarks-{name}-{theme}.svg\n:class: only-{theme}\n"
        f":alt: {about}\n```"
    )


def ratios(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, float]]:
    """By case without its size, and peer: for each size, how many times as long the peer takes in
    its quickest way."""
    found: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row["kind"] == "peer" and row["ratio"]:
            case = re.sub(r"-\d+(x\d+)+$", "", row["case"])
            sizes = found[case, row["contender"].split(",")[0]]
            sizes[row["size"]] = min(row["ratio"], sizes.get(row["size"], math.inf))
    return found


def plot(found: dict[str, Any], theme: str) -> Figure:
    """A line for each case and peer, a dot for each size; left of 1 the peer is faster."""
    from matplotlib.figure import Figure
    from pictures.maps import THEMES, style

    colours = style(theme)
    lines = ratios(found["rows"])
    figure = Figure(figsize=(8.4, 0.6 + 0.185 * len(lines)), layout="constrained")
    ax = figure.subplots()
    for y, sizes in enumerate(lines.values()):
        ax.axhline(y, color=THEMES[theme]["faint"], lw=0.3, zorder=0)
        for size, ratio in sizes.items():
            colour = colours[0] if ratio >= 1 else colours[1]
            ax.scatter(ratio, y, AREAS[size], color=colour, alpha=0.8, linewidths=0)
    for size, area in AREAS.items():
        ax.scatter([], [], area, color=colours[0], label=size, linewidths=0)
    ax.axvline(1, color=THEMES[theme]["ink"], lw=1)
    names = [f"{case}  ·  {peer}" for case, peer in lines]
    ax.set_yticks(range(len(names)), names, fontsize=7.5)
    ax.set(xscale="log", ylim=(len(names) - 0.4, -0.6))
    ax.set_xlabel("time of the peer / time of structmax")
    ax.tick_params(axis="y", length=0)
    ax.legend(loc="lower right", fontsize=8)
    return figure


def _where(found: dict[str, Any]) -> str:
    """The machine and the versions, in a line."""
    told = [f"`{found['command']}`", f"commit {found['commit']}"]
    if found["device"] == "cpu":
        told += [f"{found['threads']} threads of {found['cores']} cores" if "cores" in found else
                 f"{found['threads']} threads"]  # fmt: skip
        told += [f"load {found['load']:.1f} at the start"] if "load" in found else []
    told += [f"torch {found['torch']}"]
    told += [f"{name} {version}" for name, version in found.get("versions", {}).items()]
    busy = found["device"] == "cpu" and found.get("load", 0.0) > found.get("cores", math.inf)
    warning = " **The machine was busy: do not quote these numbers.**" if busy else ""
    return ", ".join(told) + (f"; {found['time']}." if "time" in found else ".") + warning


def _times(row: dict[str, Any]) -> list[str]:
    low, high = row.get("low_ms"), row.get("high_ms")
    between = "" if low is None or high is None else f"{_number(low)}–{_number(high)}"
    name = f"**{row['contender']}**" if row["kind"] == "ours" else row["contender"]
    numbers = [_number(row["median_ms"]), between, str(row["runs"] or "")]
    numbers += [_number(row["ratio"]), _number(row["peak_mib"])]
    return [f"`{row['case']}`", row["mode"], name, *numbers, row["note"]]


def _growth(row: dict[str, Any]) -> list[str]:
    series = [" ".join(map(_number, row[key])) for key in ("n", "ms", "mib")]
    exponents = [_number(row["time_exponent"]), _number(row["memory_exponent"])]
    return [row["structure"], *series, *exponents, f"{row['theory_time']}, {row['theory_memory']}"]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _table(head: list[str], rows: list[list[str]], left: int) -> str:
    line = ["---" if i < left else "--:" for i in range(len(head))]
    plain = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, line, *plain])


def draw(folder: Path) -> None:
    """Writes ``benchmarks.md``, which the page includes, and the plots of every file."""
    folder.mkdir(parents=True, exist_ok=True)
    files = sorted(FILES.glob("*.json"))
    for file in files:
        found = json.loads(file.read_text("utf-8"))
        for theme in ("light", "dark") if found.get("rows") else ():
            name = f"benchmarks-{file.stem}-{theme}.svg"
            plot(found, theme).savefig(folder / name, metadata={"Date": None})
    text = tables(files)
    (folder / "benchmarks.md").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    draw(Path(sys.argv[1]))
