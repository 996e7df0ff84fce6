"""The examples run: at a tiny size, and with the result that they promise."""

from __future__ import annotations

import importlib.util
import pathlib
from types import ModuleType

import pytest

import structmax as sx

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_latent_category(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = load("latent_category")
    results = example.main(steps=3, out=str(tmp_path / "picture.png"))
    assert set(results) == {"pre-training", "multi-task", *example.METHODS}
    assert {kind for kind, _ in example.METHODS.values()} == set(sx.estimators.NAMES)
    text = capsys.readouterr().out
    assert "reinforce, leave-one-out" in text and "E[L(z)]" in text
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "picture.png").exists()


@pytest.mark.parametrize(("codes", "wanted"), [((0, 0), 0), ((-9, 0), -9), ((0, 143), 143)])
def test_the_demo_tells_what_became_of_its_workers(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, codes: tuple[int, int], wanted: int
) -> None:
    pytest.importorskip("safetensors")
    demo, left = load("listops_demo"), list(codes)

    class Worker:
        def __init__(self, *_: object, **__: object) -> None:
            self.stderr: list[str] = []

        def wait(self) -> int:
            return left.pop(0)

    monkeypatch.setattr(demo.subprocess, "Popen", Worker)
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
    assert demo.train(tmp_path, fresh=True) == wanted


@pytest.mark.slow
def test_latent_category_is_found() -> None:
    example = load("latent_category")
    for name in ("marginals", "straight-through, marginals", "reinforce, leave-one-out"):
        result = example.train(name, steps=500, seed=0)
        assert result["error"] < 0.1 and result["accuracy"] > 0.95
