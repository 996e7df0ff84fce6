"""The documentation: its code runs, its tables are complete, and its generated pages are fresh."""

from __future__ import annotations

import doctest
import importlib
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from table import ROWS

import structmax as sx
import structmax.draw

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("results/*.md"))]
    if "```python" in page.read_text(encoding="utf-8")
]
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def blocks(text: str) -> list[tuple[int, str]]:
    """The blocks of Python in a page, each with the number of its first line."""
    found = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [(text[: m.start(1)].count("\n") + 1, m[1]) for m in found]


def run(page: Path, names: dict[str, Any]) -> None:
    """Runs the blocks of a page one after another, as a reader would."""
    for line, code in blocks(page.read_text(encoding="utf-8")):
        if ">>>" in code:
            test = doctest.DocTestParser().get_doctest(code, names, page.name, str(page), line - 1)
            told: list[str] = []
            runner = doctest.DocTestRunner(optionflags=FLAGS)
            runner.run(test, out=told.append, clear_globs=False)
            assert not told, "".join(told)
            names.update(test.globs)
        else:
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    run(page, {})
    if page.stem == "README":  # it shows what its code draws
        drawn, shown = tmp_path / "tree.svg", DOCS / "images" / "tree.svg"
        assert drawn.read_text() == shown.read_text(), "run docs/pictures/readme.py"


def test_wrong_examples_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\n>>> x = 1\n```\n\nand then\n\n```python\n>>> x + 1\n3\n```\n")
    with pytest.raises(AssertionError, match="line 8"):
        run(page, {})
    page.write_text("```python\nx = 1\n```\n```\nnot run\n```\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError):
        run(page, {})


NAME = r"[A-Z][\w’'-]+"
CITED = re.compile(
    rf"({NAME}(?:, {NAME})*(?: (?:&|and) {NAME})?)(?: et al\.)?,? "  # authors
    r"(?:\"([^\"]*)\",? )?(?:[A-Z][\w/&.-]*(?: [A-Za-z][\w/&.-]*){0,6},? )?"  # title, venue
    r"\(?((?:18|19|20)\d\d)\b"
)


def test_what_is_cited_is_in_the_bibliography() -> None:
    """Authors, year and, where one is quoted, the title."""
    entries = re.findall(r"^- (.*?) \((\d+)\)\. \*(.*?)\*", _page("bibliography"), re.MULTILINE)
    assert len(entries) > 90 and len({entry[:2] for entry in entries}) == len(entries)
    first = [re.findall(NAME, who)[0] for who, _, _ in entries]
    assert first == sorted(first)
    missing = []
    for file in [*(ROOT / "structmax").rglob("*.py"), *(ROOT / "examples").glob("*.py")]:
        text = re.sub(r"\s*\n\s*(?:#\s*)?", " ", file.read_text(encoding="utf-8"))
        for authors, title, year in CITED.findall(text):
            wanted = re.findall(NAME, authors)
            if not any(
                year == when and who.startswith(wanted[0]) and all(name in who for name in wanted)
                and title.lower() in what.lower() for who, when, what in entries
            ):  # fmt: skip
                missing.append(f"{file.name}: {authors}, {title!r}, {year}")
    assert not missing, "add to docs/bibliography.md:\n" + "\n".join(missing)


def _page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


MODULES = ("", ".nn", ".losses", ".estimators", ".data", ".train", ".draw", ".testing", ".sparse")


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_the_reference(module: str) -> None:
    """By name, or by an ``automodule`` with members, which lists classes and functions."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("api/*.md")))
    whole = set(re.findall(r"automodule:: ([\w.]+)\n +:members:", text))
    named = set(re.findall(r"(?:auto\w+|py:data):: ([\w.]+)", text))
    owner = f"structmax{module}"
    found = importlib.import_module(owner)
    missing = [
        name
        for name in found.__all__
        if f"{owner}.{name}" not in named
        and not (owner in whole and callable(getattr(found, name)))
        and f"structmax.{name}" not in named  # re-exported
    ]
    # packages of the top level have pages of their own, and are covered there
    missing = [name for name in missing if f".{name}" not in MODULES]
    assert not missing, f"docs/api has no {missing} of {owner}"


def test_every_estimator_is_in_the_decision_table() -> None:
    """A row of the table, a section with an example of its own, and the objective that it says."""
    text = _page("choosing")
    rows = re.findall(r"^\|(.*)\| \[\]\(#(\w+)\) \|(.*)\|$", text, re.MULTILINE)
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##)", text, re.MULTILINE | re.DOTALL))
    kinds = {kind.__name__: kind for kind in sx.estimators.NAMES.values()}
    assert sorted(anchor for _, anchor, _ in rows) == sorted(name.lower() for name in kinds)
    assert set(sections) == set(kinds)
    for name, kind in kinds.items():
        (example,) = re.findall(r"```python\n(.*?)```", sections[name], re.DOTALL)
        assert f"sx.estimators.{name}(" in example and len(example.splitlines()) == 2
        (row,) = [row for row in rows if row[1] == name.lower()]
        assert kind.objective in row[2]
        no_bias = {"Marginals", "SparseMAP", "Reinforce", "SumAndSample", "ExactExpectation"}
        assert name not in no_bias or re.search(r"[Nn]o bias", sections[name])


def test_the_gallery_has_every_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    from pictures import gallery

    text = _page("gallery")
    shown = re.findall(r"_static/gallery-(\w+)\.html", text)
    assert sorted(shown) == sorted(picture.__name__ for picture in gallery.PICTURES)
    assert all(f":pyobject: {name}\n" in text for name in shown)  # with the code
    named = {name for name in structmax.draw.__all__ if name.endswith("_svg")}
    assert not {name for name in named if f"`{name}`" not in text}


def test_pictures_of_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files = [ROOT / name for name in re.findall(r"!\[[^\]]*\]\((docs/images/[\w.]+)\)", text)]
    assert len(files) == 2
    for file in files:
        svg = file.read_text(encoding="utf-8")
        assert ElementTree.fromstring(svg).tag.endswith("svg") and len(svg) < 30_000


def test_matrix_is_what_the_table_of_tests_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    from pictures import matrix

    assert {"argmax", "marginals", "topk", "sample", "cross_entropy"} <= matrix.on_cuda()
    text = matrix.tables()
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", line) for line in text.splitlines() if "<td" in line]
    forms = sorted({name.partition("/")[0] for name in ROWS})
    assert sorted(form for row in rows for form in row[-1].split(", ")) == sorted(2 * forms)
    assert {re.sub("</?code>", "", row[0]) for row in rows} <= set(sx.__all__)
    (free, _) = [row for row in rows if row[-1] == "grid-all"]
    marks = dict(zip(matrix.QUERIES, free[1:]))
    assert marks["argmax"] == "◐" and marks["marginals"] == "–"
    chain = next(row for row in rows if "chain-shared" in row[-1].split(", "))
    assert chain[1] == "●"


def test_tables_of_results_are_those_of_their_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    from pictures import results

    pages = sorted((DOCS / "results").glob("*.md"))
    assert pages == [file.with_suffix(".md") for file in sorted((DOCS / "results").glob("*.json"))]
    for path in pages:
        text = path.read_text(encoding="utf-8")
        tables = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        assert results.page(text, tables) == text, f"run docs/pictures/results.py: {path.name}"
    with pytest.raises(ValueError, match="its JSON file"):
        results.page("no table", {"one": {}})
    with pytest.raises(ValueError, match="a row more"):
        results.table("one", {"columns": ["a"], "rows": [["1", "2"]]})


def test_benchmark_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    from pictures import benchmarks

    row = {
        "case": "chain-8x16x8", "what": "", "size": "small", "mode": "forward", "kind": "ours",
        "contender": "structmax", "median_ms": 1.234, "low_ms": 1.1, "high_ms": 1.5, "runs": 20,
        "ratio": None, "peak_mib": 0.5, "note": "",
    }  # fmt: skip
    peer = row | {"contender": "a|peer", "kind": "peer", "median_ms": None, "ratio": 12.3}
    where = {"command": "python -m benchmarks", "commit": "abc", "device": "cpu", "threads": 2,
             "machine": "A processor", "torch": "2.13", "rows": [row, peer]}  # fmt: skip
    file = tmp_path / "cpu.json"
    file.write_text(json.dumps(where))
    text = benchmarks.tables([file])
    assert "## cpu: A processor" in text and "`python -m benchmarks`, commit abc, 2 threads" in text
    assert "| `chain-8x16x8` | forward | **structmax** | 1.23 | 1.1–1.5 | 20 |" in text
    assert "busy" not in text
    assert "busy" in benchmarks.section(where | {"load": 9.0, "cores": 2}, "cpu")
    assert "a\\|peer" in text and "12.3" in text
    for kept in sorted((DOCS / "benchmarks").glob("*.json")):
        found = json.loads(kept.read_text(encoding="utf-8"))
        assert found["machine"] in benchmarks.section(found, kept.stem)
    assert "No numbers" in benchmarks.tables([])
