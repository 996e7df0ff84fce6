"""The package as a user meets it: the import, the public names, the README and the tour."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import structmax as sx

ROOT = Path(__file__).parent.parent


def run(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_light() -> None:
    """No compiler is loaded before a kernel is needed, nor is anything optional."""
    code = (
        "import torch, sys; before = set(sys.modules); import structmax;"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    loaded = run("-c", code).split()
    assert "structmax" in loaded
    assert not {"numba", "llvmlite", "triton", "scipy", "rich", "pytest"} & set(loaded)


def test_kernels_are_imported_on_first_use() -> None:
    code = (
        "import sys, torch, structmax as sx;"
        "s = sx.LinearChain(torch.randn(3, 2), torch.randn(2, 2));"
        "assert 'numba' not in sys.modules; s.marginals(); assert 'numba' in sys.modules;"
        "assert 'structmax.forest.gpu' not in sys.modules"
    )
    run("-c", code)


def test_public_names() -> None:
    assert len(set(sx.__all__)) == len(sx.__all__)
    for name in sx.__all__:
        value = getattr(sx, name)
        assert value.__doc__ and value.__doc__.strip(), f"sx.{name} has no docstring"
        for verb, method in vars(value).items() if isinstance(value, type) else ():
            if callable(method) and not verb.startswith("_"):
                text = inspect.getdoc(getattr(value, verb))  # a base class may have it
                assert text, f"sx.{name}.{verb} has no docstring"
    names = {}
    exec("from structmax import *", names)
    assert set(sx.__all__) <= set(names)


def test_version() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{sx.__version__}"' in project
    try:
        installed = importlib.metadata.version("structmax")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("structmax is not installed, only importable")
    assert installed == sx.__version__


def test_typed() -> None:
    assert (ROOT / "structmax" / "py.typed").exists()


def test_readme() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(blocks[0], names)
    assert names["best"].shape == names["mean"].shape == (8, 20, 5)
    assert names["draws"].shape == (3, 8, 20, 5)
    assert bool(names["unary"].grad.isfinite().all()) and bool(names["unary"].grad.any())


def test_tour() -> None:
    out = run("examples/tour.py", PYTHONPATH=str(ROOT), PYTHONIOENCODING="utf-8")
    assert "duck" in out and "NOUN" in out
