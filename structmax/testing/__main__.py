"""The library's own structures against the contract: ``python -m structmax.testing``.

Prints a matrix of structures and checks: ✓ where every smoothing passes, ✗ where one fails, – where
the structure declares what the check needs intractable (that it then refuses is a check of its
own). Names of structures as arguments run only those; ``--markdown`` prints a Markdown table. The
exit code is 1 if anything fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from structmax.testing.contract import CHECKS, Factory, applies
from structmax.testing.examples import ROWS

# transformations are the work of the op recipe: one smoothing shows it
ONCE = ("transforms", "compile")


def run(rows: dict[str, Factory]) -> list[str]:
    """The marks of one structure, in the order of ``CHECKS``; failures are told on stderr."""
    marks = []
    for check, function in CHECKS.items():
        picked = list(rows.items())[: 1 if check in ONCE else None]
        if not applies(check, picked[0][1]()):
            marks.append("–")
            continue
        mark = "✓"
        for row, factory in picked:
            try:
                function(factory)
            except Exception as error:
                told = f"{type(error).__name__}: {str(error).strip()}"
                print(f"{row} fails {check}: {told}", file=sys.stderr)
                mark = "✗"
        marks.append(mark)
    return marks


def markdown(rows: dict[str, list[str]]) -> str:
    lines = [["structure", *CHECKS], ["---", *[":-:"] * len(CHECKS)]]
    lines += [[name, *marks] for name, marks in rows.items()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plain(rows: dict[str, list[str]]) -> str:
    """A table with the names of the checks below, by letters, since they are long."""
    letters = [chr(ord("a") + i) for i in range(len(CHECKS))]
    width = max(len(name) for name in ["structure", *rows])
    lines = [f"{'structure':{width}}  {' '.join(letters)}"]
    lines += [f"{name:{width}}  {' '.join(marks)}" for name, marks in rows.items()]
    return "\n".join([*lines, "", *[f"{a}  {check}" for a, check in zip(letters, CHECKS)]])


def show(rows: dict[str, list[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(plain(rows))
        return
    table = Table("structure")
    for check in CHECKS:
        table.add_column("\n".join(check), justify="center", no_wrap=True)
    color = {"✓": "[green]✓[/]", "✗": "[bold red]✗[/]", "–": "[dim]–[/]"}
    for name, marks in rows.items():
        table.add_row(name, *[color[mark] for mark in marks])
    Console(width=3 * len(CHECKS) + 60).print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m structmax.testing", description=about)
    parser.add_argument("names", nargs="*", metavar="name", help="run only these structures")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    options = parser.parse_args(arguments)
    structures: dict[str, dict[str, Factory]] = {}
    for row, factory in ROWS.items():
        structures.setdefault(row.partition("/")[0], {})[row] = factory
    unknown = set(options.names) - set(structures)
    if unknown:
        parser.error(f"no such structures: {sorted(unknown)}; there are {[*structures]}")
    rows = {}
    for name in options.names or structures:
        print(f"{name} …", file=sys.stderr, flush=True)
        rows[name] = run(structures[name])
    if options.markdown:
        print(markdown(rows))
    else:
        show(rows)
    return int(any("✗" in marks for marks in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
