"""Learn to parse from answers alone: latent trees on nested ListOps, next to an LSTM.

An expression such as [MAX 2 [SM 9 4 ] ] has a value, which is all that a model is told. One model
finds trees by itself and computes along them; an LSTM of the same width has none. Both are trained
at the same time, on one core each, for a fixed number of updates, so that every machine finds the
same result: about five minutes on a quiet machine with two cores, longer on a busy one. Then:
accuracy, how much the trees are like the true ones, and three of them drawn.

Run it with ``make demo``, or ``python examples/listops_demo.py``. A run that was interrupted goes
on where it stopped; ``make demo FRESH=1`` (``--fresh``) starts again.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from structmax.draw import page, tree_svg, tree_text
from structmax.train import run
from structmax.train.checkpoint import write_atomic

OPTIONS = """
--examples 20000 --max-depth 6 --max-args 2 --min-length 9 --max-length 25
--hidden-size 64 --batch-size 64 --lr 3e-3 --warmup 100 --schedule late --device cpu
--log-every 20 --eval-every 200 --save-every 100 --seed 0
"""
MODELS = {
    "latent trees": "--encoder easy-first --estimator top-k-expectation:k=5",
    "LSTM": "--encoder lstm",
}
UPDATES = {"latent trees": 2400, "LSTM": 36000}  # each takes four or five minutes of a core
TRIVIAL = ("left", "right", "balanced", "random")


def folder_of(out: Path, name: str) -> Path:
    return out / name.replace(" ", "-").lower()


def train(out: Path, fresh: bool) -> int:
    """Train both models, each in a process of its own; the exit code."""
    start = "--fresh" if fresh else "--resume"
    workers = {}
    for name, own in MODELS.items():
        flags = [*OPTIONS.split(), *own.split(), "--steps", str(UPDATES[name]), start]
        command = [sys.executable, "-m", "structmax", "train", "listops", *flags]
        workers[name] = subprocess.Popen(
            [*command, "--out", str(folder_of(out, name))],
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def forward(number: int, frame: Any) -> None:
        for worker in workers.values():
            if worker.poll() is None:
                worker.send_signal(signal.SIGTERM)

    # they save and end, and then so do we; Ctrl-C reaches them by itself
    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, lambda number, frame: None)
    lines: dict[str, list[str]] = {name: [] for name in workers}
    readers = [
        threading.Thread(target=lambda n=name, w=worker: lines[n].extend(w.stderr))
        for name, worker in workers.items()
    ]
    for reader in readers:
        reader.start()
    watch(out, readers)
    codes = {name: worker.wait() for name, worker in workers.items()}  # negative: by a signal
    for name, code in codes.items():
        if code:
            print(f"{name} ended with code {code}:", *lines[name][-5:], file=sys.stderr)
    return next(filter(None, codes.values()), 0)


def updates_of(folder: Path) -> int:
    """How many updates a run has made, by the last line of its metrics."""
    try:
        return int(json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"])
    except (OSError, IndexError, ValueError, KeyError):  # not begun, or in the middle of a line
        return 0


def watch(out: Path, readers: list[threading.Thread]) -> None:
    """One bar for both models until they end: the share of updates made by the slower one."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    began, shown, first = time.monotonic(), 0.0, None
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("Training", total=1.0)
        while any(reader.is_alive() for reader in readers):
            made = {name: updates_of(folder_of(out, name)) for name in MODELS}
            done = min(made[name] / UPDATES[name] for name in MODELS)
            first = done if first is None else first
            bar.update(task, completed=done)
            now = time.monotonic()
            if not console.is_terminal and now - shown >= 15:
                shown = now
                left = (now - began) * (1 - done) / (done - first) if done > first else None
                rest = "" if left is None else f", about {left / 60:.0f} minutes left"
                each = ", ".join(f"{name} {made[name]:,} of {UPDATES[name]:,}" for name in MODELS)
                print(f"updates: {each}{rest}", file=sys.stderr, flush=True)
            readers[0].join(0.5)
            if not readers[0].is_alive():
                readers[-1].join(0.5)


def table(results: dict[str, dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Rows: who, accuracy, tree F1, minutes."""
    rows = []
    for name, result in results.items():
        f1 = result["test"].get("f1")
        cells = f"{result['test']['accuracy']:.1%}", "" if f1 is None else f"{f1:.1%}"
        rows.append((name, *cells, f"{result['minutes']:.1f}"))
    gold = results["latent trees"]["test"]
    return rows + [(f"{k} trees", "", f"{gold[f'gold_{k}']:.1%}", "") for k in TRIVIAL]


def draw(folder: Path, count: int) -> list[dict[str, Any]]:
    """What the best weights make of a few test expressions of middling length."""
    task, config, model, _ = run.load(folder, torch.device("cpu"))
    middling = [e for e in task.data(config).test if 12 <= len(e.tokens) <= 18]
    with torch.no_grad():
        return list(task.predict(model, [task.line(e) for e in middling[:count]]))


def report(out: Path) -> None:
    """Print and write what was learned."""
    results = {
        name: json.loads((folder_of(out, name) / "result.json").read_text()) for name in MODELS
    }
    head, rows = ("model", "accuracy", "tree F1", "minutes"), table(results)
    print()
    for row in [head, *rows]:
        print(f"{row[0]:16}{row[1]:>10}{row[2]:>10}{row[3]:>10}")
    pictures = []
    for found in draw(folder_of(out, "latent trees"), 3):
        verdict = "right" if found["right"] else "wrong"
        caption = f"{' '.join(found['words'])} = {found['value']} ({verdict})"
        print(f"\n{caption}\n{tree_text(found['words'], found['spans'])}")
        pictures.append((caption, tree_svg(found["words"], found["spans"], found["gold"])))
    lines = ["# Latent trees on nested ListOps", "", f"| {' | '.join(head)} |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", "Drawings: trees.html (dashed: not in the true tree). Numbers: results.json."]
    write_atomic(out / "report.md", ("\n".join(lines) + "\n").encode())
    write_atomic(out / "trees.html", page("Learned trees", pictures).encode())
    write_atomic(out / "results.json", (json.dumps(results, indent=1) + "\n").encode())
    print(f"\nThe report is in {out}: report.md, trees.html, results.json")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="the report folder")
    parser.add_argument("--fresh", action="store_true", help="start again")
    given = parser.parse_args()
    each = " and ".join(f"{name} for {UPDATES[name]:,} updates" for name in MODELS)
    print(f"Training {each}, a core each: about five minutes on a quiet machine", flush=True)
    code = train(given.out, given.fresh)
    if code == 0:
        report(given.out)
    elif code in (130, 143):
        print("Stopped; the same command goes on from here.", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
