"""The tables of the page ``matrix``: structure × query × device, and structure × check.

They are made from what the test suite runs: the table of small structures, the queries and checks
of the contract that apply to each, and the queries that the CUDA tests compare with the CPU.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from pathlib import Path

import structmax as sx
from structmax.structures.base import Structure
from structmax.testing.contract import CHECKS, applies
from structmax.testing.examples import ROWS

CUDA_TESTS = Path(__file__).parents[2] / "tests" / "test_cuda.py"
QUERIES = {  # by the query, the check of the contract that compares it with enumeration
    "argmax": "argmax",
    "log_partition": "log_partition",
    "marginals": "marginals",
    "sample": "sample",
    "topk": "topk",
    "max_marginals": "max_marginals",
    "log_prob": "log_prob",
    "entropy": "entropy",
    "cross_entropy": "entropy",
    "mbr": "mbr",
    "sparsemap": "sparsemap",
    "condition": "condition",
    "ranked_support": "ranked_support",
}
ONCE = ("transforms", "compile")  # run on one structure of each primitive


def on_cuda() -> set[str]:
    """The queries that ``test_queries_agree_with_the_cpu`` asks of a structure on the GPU."""
    tree = ast.parse(CUDA_TESTS.read_text(encoding="utf-8"))
    (test,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "test_queries_agree_with_the_cpu"
    ]
    called = [node.func for node in ast.walk(test) if isinstance(node, ast.Call)]
    asked = {f.attr for f in called if isinstance(f, ast.Attribute) and _name(f.value) == "cp"}
    divergence = any(_name(f) == "kl_divergence" for f in called)  # made of a cross-entropy
    return asked | ({"cross_entropy"} if divergence else set())


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def public_name(structure: Structure) -> str:
    """The class that a user writes."""
    return next(kind.__name__ for kind in type(structure).__mro__ if kind.__name__ in sx.__all__)


def mark(structure: Structure, query: str, cuda: set[str]) -> str:
    if not structure.supports(query):
        return "–"
    if not applies(QUERIES[query], structure):
        return "○"
    return "●" if query in cuda and structure.supports("marginals") else "◐"


def tables() -> str:
    """Both, as Markdown."""
    cuda = on_cuda()
    grouped: dict[str, list[str]] = {}
    for row in ROWS:
        grouped.setdefault(row.partition("/")[0], []).append(row)
    checks = [name for name in CHECKS if name not in (*QUERIES.values(), *ONCE)]
    queries: dict[tuple[str, ...], list[str]] = {}  # forms with the same marks share a row
    checked: dict[tuple[str, ...], list[str]] = {}
    for name, rows in grouped.items():
        structure = ROWS[rows[0]]()
        kinds = ", ".join(row.partition("/")[2] for row in rows)
        owner = f"<code>{public_name(structure)}</code>"
        marks = [mark(structure, query, cuda) for query in QUERIES]
        queries.setdefault((owner, *marks), []).append(name)
        marks = ["✓" if applies(check, structure) else "–" for check in checks]
        checked.setdefault((owner, *marks, kinds), []).append(name)
    return "\n\n".join(
        [
            "## Queries and devices",
            "● compared with enumeration on the CPU, and on a CUDA device with the CPU; ◐ with "
            "enumeration on the CPU, not repeated for every structure on CUDA; ○ answered, but "
            "what it would be compared by is intractable; – intractable: an error that names what "
            "to use instead.",
            _table([*QUERIES], queries),
            "## Checks",
            "✓ the suite runs it, over each of the smoothings; – it needs a query that is "
            f"intractable here. {' and '.join(f'`{name}`' for name in ONCE)} run on one structure "
            "for each primitive.",
            _table([*checks, "smoothings"], checked, last=1),
            *_meanings(checks),
        ]
    )


def _meanings(checks: Iterable[str]) -> list[str]:
    """What each check is, from its docstring."""
    told = {name: (CHECKS[name].__doc__ or "").split("\n\n")[0] for name in checks}
    return ["\n".join(f"- `{name}`: {' '.join(text.split())}" for name, text in told.items())]


def _table(head: list[str], rows: dict[tuple[str, ...], list[str]], last: int = 0) -> str:
    """HTML, for headings that stand upright: there are many columns. The ``last`` are of text, and
    the forms come after them."""
    upright = "writing-mode:vertical-rl;transform:rotate(180deg);padding:0.4em 0.1em"
    heads = "".join(f'<th class="head"><span style="{upright}">{word}</span></th>' for word in head)
    body = "".join(_row(owner, marks, forms, last) for (owner, *marks), forms in rows.items())
    return (
        "```{raw} html\n"
        '<div class="table-wrapper docutils container"><table class="docutils align-default">\n'
        f'<thead><tr><th class="head">structure</th>{heads}<th class="head">forms</th></tr>'
        "</thead>\n"
        f"<tbody>\n{body}</tbody></table></div>\n```"
    )


def _row(owner: str, marks: list[str], forms: list[str], last: int) -> str:
    cells = [owner, *marks, ", ".join(forms)]
    small = ' style="font-size:smaller"'
    written = [
        f"<td{small if i >= len(cells) - 1 - last else ''}>{cell}</td>"
        for i, cell in enumerate(cells)
    ]
    return f"<tr>{''.join(written)}</tr>\n"


def draw(folder: Path) -> None:
    """Writes ``matrix.md``, which the page includes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "matrix.md").write_text(tables() + "\n", encoding="utf-8")


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
