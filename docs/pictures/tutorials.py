"""The pages of the tutorials: the notebooks, run, with what their cells print and draw.

``python docs/pictures/tutorials.py FOLDER`` writes a page beside every notebook of the folder, as
does building the documentation. A page that is newer than its notebook and the library is kept.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import structmax

AT_ONCE = 2
OPEN = """```{{tip}}
This page is a notebook: `marimo edit docs/tutorials/{}` opens it, with its sliders.
```
"""


def draw(folder: Path) -> None:
    """Writes ``NAME.md`` beside each ``NAME.py``."""
    library = max(f.stat().st_mtime for f in Path(structmax.__file__).parent.rglob("*.py"))

    def is_old(notebook: Path) -> bool:
        page = notebook.with_suffix(".md")
        made_from = max(library, notebook.stat().st_mtime, Path(__file__).stat().st_mtime)
        return not page.exists() or page.stat().st_mtime < made_from

    old = [notebook for notebook in sorted(folder.glob("[0-9]*.py")) if is_old(notebook)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for notebook, cells in zip(old, pool.map(run, old), strict=True):
            imports, title, *rest = map(page_of, cells)
            pieces = [title, OPEN.format(notebook.name), imports, *rest]
            notebook.with_suffix(".md").write_text("\n".join(pieces), encoding="utf-8")


def run(notebook: Path) -> list[dict[str, Any]]:
    """The cells of a notebook with their outputs, in the form of Jupyter."""
    with tempfile.TemporaryDirectory() as folder:  # with a copy, which leaves no traces beside it
        copy, out = Path(shutil.copy(notebook, folder)), Path(folder) / "run.ipynb"
        command = [sys.executable, "-m", "marimo", "-y", "export", "ipynb", str(copy)]
        command += ["-o", str(out), "--include-outputs", "--sort", "top-down"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or not out.exists():
            raise RuntimeError(f"python {notebook} says why it fails:\n{done.stdout}{done.stderr}")
        return json.loads(out.read_text(encoding="utf-8"))["cells"]


def page_of(cell: dict[str, Any]) -> str:
    """A cell as MyST markdown: prose as it is, code, and what the code shows."""
    source = "".join(cell["source"]).strip()
    if cell["cell_type"] == "markdown":
        return f"{source}\n"
    pieces = [fenced("python", source.replace("  # fmt: skip", ""))]
    for output in cell["outputs"]:
        if output["output_type"] == "stream":
            if output["name"] == "stdout":
                pieces.append(fenced("text", "".join(output["text"])))
            continue
        if output["output_type"] == "error":
            raise RuntimeError(f"{source}\n{output['ename']}: {output['evalue']}")
        data = {kind: "".join(text) for kind, text in output["data"].items()}
        shown = data.get("text/html", html.unescape(data.get("text/markdown", "")))
        slider = re.search(r"<marimo-slider data-initial-value='([^']*)'", shown)
        plain = re.fullmatch(r"<pre[^>]*>(.*)</pre>", shown, re.DOTALL)
        if slider:
            pieces.append(f"*A slider in the notebook; on this page it stands at {slider[1]}.*\n")
        elif plain:
            pieces.append(fenced("text", html.unescape(plain[1])))
        elif shown.strip():
            pieces.append(fenced("{raw} html", shown))
    return "\n".join(pieces)


def fenced(kind: str, text: str) -> str:
    return f"````{kind}\n{text.strip()}\n````\n"


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
