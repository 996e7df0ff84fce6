"""The command line: ``python -m benchmarks [case ...]``."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import alignment, chains, combinatorial, maps, sparsemap, strides, trees
from benchmarks.growth import STRUCTURES, Growth, run_growth
from benchmarks.harness import Case, OutOfTime, Row, run_case
from benchmarks.latency import Latency, run_latency
from benchmarks.report import as_json, environment, show

CASES: dict[str, Case] = {**chains.CASES, **trees.CASES, **alignment.CASES}
CASES |= {**combinatorial.CASES, **maps.CASES, **sparsemap.CASES, **strides.CASES}


def main(argv: list[str] | None = None) -> int:
    """0, or 1 if a contender disagrees with another."""
    given = sys.argv[1:] if argv is None else argv
    args, chosen = _arguments(given)
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    where = environment(device, shlex.join(["python", "-m", "benchmarks", *given]))
    rows: list[Row] = []
    growth: list[Growth] = []
    latency: list[Latency] = []
    began = time.perf_counter()
    if args.limit:
        signal.signal(signal.SIGALRM, _out_of_time)
        signal.alarm(args.limit)
    try:
        if not args.case and not args.size:
            latency += run_latency(device)
        if "growth" in args.case or not (args.case or args.size):
            for name in STRUCTURES:
                print(f"growth of {name}", file=sys.stderr, flush=True)
                growth.append(run_growth(name, device, args.repeat, 2 * args.seconds))
        for number, case in enumerate(chosen, 1):
            print(f"{number}/{len(chosen)} {case.name}", file=sys.stderr, flush=True)
            rows += run_case(case, device, args.repeat, args.seconds)
    except OutOfTime:
        signal.alarm(0)
        done = {row.case for row in rows}
        for case in chosen:
            if case.name not in done:
                note = f"not run: {args.limit} s had passed"
                rows.append(Row(case.name, case.what, case.size, case.mode, "", "ours", note=note))
    signal.alarm(0)
    where["seconds"] = round(time.perf_counter() - began)
    show(rows, growth, latency, where)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(as_json(rows, growth, latency, where), indent=1, ensure_ascii=False)
        args.json.write_text(text + "\n", encoding="utf-8")
    return int(any(row.note.startswith("FAIL") for row in rows))


def _out_of_time(*_: Any) -> None:
    signal.alarm(2)  # again, should it be swallowed: by a callback that a C library called, say
    raise OutOfTime


def _arguments(given: list[str]) -> tuple[argparse.Namespace, list[Case]]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Times structmax against its peers, once their answers agree.",
        epilog="cases: growth (how time and memory grow with n); "
        + "; ".join(f"{c.name} ({', '.join(c.devices)}): {c.what}" for c in CASES.values()),
    )
    parser.add_argument("case", nargs="*", help="names, or how names begin (default: all)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--size", choices=["small", "medium", "large"], help="only these")
    parser.add_argument("--threads", type=int, default=2, help="of the CPU (default: 2)")
    parser.add_argument("--repeat", type=int, default=20, help="runs of each at most (default: 20)")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="that a contender may take (default: 1)"
    )
    parser.add_argument("--limit", type=int, metavar="SECONDS", help="for all of it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    args = parser.parse_args(given)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    here = [case for case in CASES.values() if args.device in case.devices]
    for prefix in args.case:
        if prefix != "growth" and not any(case.name.startswith(prefix) for case in here):
            names = ", ".join(case.name for case in here)
            parser.error(f"no case {prefix!r} on {args.device}; there are growth, {names}")
    chosen = [case for case in here if not args.case or case.name.startswith(tuple(args.case))]
    if args.size:
        chosen = [case for case in chosen if case.size == args.size]
    return args, chosen


if __name__ == "__main__":
    sys.exit(main())
