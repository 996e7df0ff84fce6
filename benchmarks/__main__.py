"""The command line: ``python -m benchmarks [case ...]``."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

import torch

from benchmarks import alignment, cases, combinatorial, maps, sparsemap, trees
from benchmarks.harness import as_json, environment, run_case, show

CASES = {**cases.CASES, **alignment.CASES, **trees.CASES, **maps.CASES, **sparsemap.CASES}
CASES |= combinatorial.CASES


def main(argv: list[str] | None = None) -> int:
    """0, or 1 if a contender disagrees with another."""
    given = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Times structmax against its peers, once their answers agree.",
        epilog="cases: "
        + "; ".join(f"{c.name} ({', '.join(c.devices)}): {c.what}" for c in CASES.values()),
    )
    parser.add_argument("case", nargs="*", help="names, or how names begin (default: all)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="of the CPU (default: 2)")
    parser.add_argument("--repeat", type=int, default=20, help="runs of each (default: 20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    args = parser.parse_args(given)

    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    here = [case for case in CASES.values() if args.device in case.devices]
    chosen = [case for case in here if not args.case or case.name.startswith(tuple(args.case))]
    for prefix in args.case:
        if not any(case.name.startswith(prefix) for case in here):
            names = ", ".join(case.name for case in here)
            parser.error(f"no case {prefix!r} on {args.device}; there are {names}")

    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    where = environment(device, shlex.join(["python", "-m", "benchmarks", *given]))
    rows = [row for case in chosen for row in run_case(case, device, args.repeat)]
    show(rows, where)
    if args.json:
        args.json.write_text(json.dumps(as_json(rows, where), indent=1) + "\n")
    return int(any(row.note.startswith("FAIL") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
