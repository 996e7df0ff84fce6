"""The recipe ``induce``: the trees of two tiny models of ``sst``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("safetensors")
pytest.importorskip("conllu")

from structmax.cli import main
from structmax.train import UserError
from structmax.train.distributed import Workers
from structmax.train.tasks.induce import Found, Induce, InduceConfig, Reference, compare


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "induce"
    assert main(["train", "induce", "--device=cpu", f"--out={folder}", "--pictures=2"]) == 0
    return folder


def test_models_are_compared(compared: Path) -> None:
    result = json.loads((compared / "result.json").read_text())
    rows = {row["trees"]: row for row in result["rows"]}
    models = [str(compared / f"model-{seed}") for seed in range(2)]
    assert list(rows) == [*models, "left", "right", "balanced", "random"]
    assert rows["left"]["uas"] == 1 and rows["right"]["undirected"] == 1  # the reference is left
    for name in models:
        row = rows[name]
        assert row["uas"] == row["like_left"]
        assert row["log_prob_per_word"] < 0 and row["kept_trees"] >= 1
    assert 0 <= result["agreement"] <= 1
    assert (compared / "table.md").read_text().count("\n") == 8
    assert (compared / "support.html").read_text().count("<svg") == 2


@pytest.mark.parametrize("command", ["evaluate", "predict", "show"])
def test_no_weights_of_its_own(compared: Path, command: str, capsys) -> None:
    assert main([command, str(compared), "--device=cpu"]) == 2
    said = capsys.readouterr().err
    assert "task induce has no weights of its own" in said and "result.json" in said


def test_runs_against_a_file(compared: Path, tmp_path: Path, capsys) -> None:
    sentence = {"words": ["a", "b", "c"], "heads": [2, 0, 2]}
    (tmp_path / "parses.jsonl").write_text(json.dumps(sentence) + "\n")
    flags = [f"--parses={tmp_path / 'parses.jsonl'}", "--device=cpu", f"--out={tmp_path / 'run'}"]
    assert main(["train", "induce", f"--runs={compared / 'model-0'}", *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["sentences"] == 1 and result["agreement"] is None
    assert main(["train", "induce", f"--runs={tmp_path}", *flags, "--fresh"]) == 2
    assert "is not a run" in capsys.readouterr().err


def test_numbers_by_hand() -> None:
    references = [Reference(["a", "b", "c"], [2, 0, 2]), Reference(["d", "e"], [0, 1])]
    found = {
        "x": Found([[2, 0, 2], [2, 0]], [-1.0, -2.0], [1, 3]),
        "y": Found([[3, 0, 2], [2, 0]], [-1.0, -4.0], [1, 1]),
    }
    result = compare(references, found)
    x, y, left, right, *_ = result["rows"]
    assert x["uas"] == 0.6 and y["uas"] == 0.4
    assert x["undirected"] == 1 and y["undirected"] == round(2 / 3, 4)
    assert x["log_prob_per_word"] == -0.6 and x["kept_trees"] == 2
    assert left["uas"] == 0.2 and right["uas"] == 0.6  # [2, 3, 0], [2, 0] and [0, 1, 2], [0, 1]
    assert result["agreement"] == 0.8


def test_induce_refuses(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="go together"):
        InduceConfig(runs="x").check()
    (tmp_path / "a.jsonl").write_text('{"words": ["a"], "heads": [0]}\n')
    with pytest.raises(ValueError, match="no sentence of 2"):
        Induce().data(InduceConfig(runs="x", parses=str(tmp_path / "a.jsonl")))
    (tmp_path / "a.jsonl").write_text('{"words": ["a", "b"], "heads": [0, null]}\n')
    with pytest.raises(ValueError, match="words without heads"):
        Induce().data(InduceConfig(runs="x", parses=str(tmp_path / "a.jsonl")))


def test_models_without_latent_trees(tmp_path: Path, capsys) -> None:
    (tmp_path / "a.jsonl").write_text('{"words": ["a", "b"], "heads": [0, 1]}\n')
    toy = tmp_path / "toy"
    assert main(["train", "toy", "--steps=1", "--device=cpu", f"--out={toy}"]) == 0
    flags = [f"--runs={toy}", f"--parses={tmp_path / 'a.jsonl'}", "--device=cpu"]
    assert main(["train", "induce", *flags, f"--out={tmp_path / 'run'}"]) == 2
    assert f"{toy} has no latent dependency trees" in capsys.readouterr().err.replace("\n", "")
    other = Workers(torch.device("cpu"), rank=1, count=2)
    assert Induce().fit(InduceConfig(), tmp_path / "none", False, other) == {}
