"""The tutorials run, and what they claim holds: their assertions are part of them."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import resource
import subprocess
import sys
from types import ModuleType

import pytest

DOCS = pathlib.Path(__file__).parent.parent / "docs"
NOTEBOOKS = sorted((DOCS / "tutorials").glob("[0-9]*.py"))


def pages() -> ModuleType:
    """What makes pages of notebooks."""
    spec = importlib.util.spec_from_file_location("tutorials", DOCS / "pictures" / "tutorials.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(notebook: pathlib.Path) -> None:
    pytest.importorskip("marimo")
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(
        [sys.executable, notebook],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # the processor's time, since other tests may run beside this one
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 60


def test_pages_are_listed() -> None:
    listed = re.findall(
        r"^(\d\d_\w+)$", (DOCS / "tutorials" / "index.md").read_text(), re.MULTILINE
    )
    assert listed == [notebook.stem for notebook in NOTEBOOKS]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_begins_with_its_title(notebook: pathlib.Path) -> None:
    first = notebook.read_text(encoding="utf-8").split('mo.md(r"""')[1]
    assert first.split() and first.strip().startswith(f"# {int(notebook.stem[:2])}. ")


def code(*outputs: dict) -> dict:
    return {"cell_type": "code", "source": ["f(x)\n", "y"], "outputs": list(outputs)}


def shows(**data: str) -> dict:
    return {
        "output_type": "display_data",
        "data": {k.replace("_", "/"): v for k, v in data.items()},
    }


def test_page_of_a_cell() -> None:
    page_of = pages().page_of
    assert page_of({"cell_type": "markdown", "source": ["# A\n", "\n", "b"]}) == "# A\n\nb\n"
    assert page_of(code()) == "````python\nf(x)\ny\n````\n"
    printed = {"output_type": "stream", "name": "stdout", "text": ["1 < 2\n"]}
    assert "````text\n1 < 2\n````" in page_of(code(printed))
    assert "````text\nx < y\n````" in page_of(code(shows(text_html="<pre>x &lt; y</pre>")))
    assert "````{raw} html\n<svg/>\n````" in page_of(code(shows(text_html="<svg/>")))
    slider = "&lt;marimo-slider data-initial-value=&#x27;4&#x27; data-label=&#x27;&#x27;&gt;"
    assert "stands at 4" in page_of(code(shows(text_markdown=slider)))
    failed = {"output_type": "error", "ename": "AssertionError", "evalue": "no"}
    with pytest.raises(RuntimeError, match="AssertionError: no"):
        page_of(code(failed))
