"""The recipe ``semdep`` on its tiny generated set, and its model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("safetensors")
pytest.importorskip("conllu")

from structmax.cli import main
from structmax.nn import SemanticGraph
from structmax.train import Trainer, UserError
from structmax.train.metrics import read_log
from structmax.train.tasks.semdep import SemDep, SemDepConfig, generate

SMALL = {
    "steps": 60,
    "pretrain": 20,
    "log_every": 10,
    "eval_every": 60,
    "save_every": 60,
    "lr": 1e-2,
    "word_size": 16,
    "hidden_size": 24,
    "dropout": 0.0,
    "word_dropout": 0.0,
}
CASES = [
    ("latent", "straight-through"),
    ("latent", "spigot"),
    ("latent", "marginals"),
    ("pipeline", ""),
    ("multi-task", ""),
    ("gold", ""),
    ("random", ""),
    ("none", ""),
]


def fit(folder: Path, **options) -> tuple[dict, list[float]]:
    config = SemDepConfig(**{**SMALL, **options})
    result = Trainer(SemDep(), config, folder, silent=True).fit()
    return result, [line["loss"] for line in read_log(folder) if line["kind"] == "train"]


@pytest.mark.parametrize(
    ("syntax", "estimator"),
    [c if c == CASES[0] else pytest.param(*c, marks=pytest.mark.slow) for c in CASES],
)
def test_semdep_learns(tmp_path: Path, syntax: str, estimator: str) -> None:
    result, curve = fit(tmp_path, syntax=syntax, estimator=estimator)
    first = 2 if syntax in ("latent", "pipeline") else 0  # after the parser's own losses
    assert curve[-1] < 0.8 * curve[first]
    assert result["test"]["f1"] > 0.4  # an arc in ten is right by chance
    assert ("uas" in result["test"]) == (syntax in ("latent", "pipeline", "multi-task"))


def batch_of(**options):
    task, config = SemDep(), SemDepConfig(**{**SMALL, "pretrain": 0, **options})
    examples = task.data(config).train[:5]
    torch.manual_seed(0)
    return task.model(config), task.collate(examples), task, examples


@pytest.mark.parametrize(("syntax", "estimator"), CASES)
def test_what_trains_the_parser(syntax: str, estimator: str) -> None:
    model, batch, task, _ = batch_of(syntax=syntax, estimator=estimator)
    task.loss(model, batch).mean().backward()
    names = [n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()]
    trained = any(name.startswith("parser_") for name in names)
    assert trained == (syntax in ("latent", "multi-task"))
    model.pretrain = 10  # then nothing but the parser is trained
    model.zero_grad(set_to_none=True)
    if model.has_parser:
        task.loss(model, batch).mean().backward()
        names = [name for name, p in model.named_parameters() if p.grad is not None]
        assert names and all(name.startswith("parser_") for name in names)


@pytest.mark.parametrize("syntax", ["latent", "multi-task", "gold", "none"])
def test_sentences_of_a_batch_do_not_touch(syntax: str) -> None:
    model, batch, task, examples = batch_of(syntax=syntax)
    model.eval()
    together = model(batch.words, batch.lengths, heads=batch.heads).scores
    for row, example in zip(together, examples):
        one = task.collate([example])
        n = len(example.words) + 1
        alone = model(one.words, one.lengths, heads=one.heads).scores[0]
        assert torch.allclose(alone, row[:n, :n], atol=1e-5)
        assert one.graph.sum() == len(example.arcs) and not (one.graph & ~one.used).any()


def test_semdep_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "corpus", tmp_path / "run"
    folder.mkdir()
    splits = generate(SemDepConfig(examples=40))
    for name, split in zip(("train", "dev", "test"), splits):
        lines = []
        for words, heads, arcs in split:
            for i, (word, head) in enumerate(zip(words, heads), 1):
                deps = "|".join(f"{h}:x" for h, m in arcs if m == i)
                lines.append(f"{i}\t{word}\t_\t_\t_\t_\t{head}\t_\t{deps}\t_")
            lines.append("")
        (folder / f"{name}.conllu").write_text("\n".join(lines) + "\n")
    found = SemDep().data(SemDepConfig(corpus=str(folder)))
    for mine, theirs in zip(found, splits):
        for a, b in zip(mine, theirs, strict=True):
            assert a[:2] == b[:2] and sorted(a.arcs) == sorted(b.arcs)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    flags += [f"--corpus={folder}", "--steps=10", "--pretrain=5", "--estimator=marginals"]
    assert main(["train", "semdep", *flags, "--device=cpu", f"--out={out}"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main(["evaluate", str(out), "--device=cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["f1"] == told["test"]["f1"]
    (tmp_path / "in.txt").write_text("an unheard thing\n\n")
    flags = ["predict", str(out), str(tmp_path / "in.txt"), "--format=json", "--device=cpu"]
    assert main(flags) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith("}\n\n")  # an empty line for an empty line
    answer = json.loads(printed.out)
    assert answer["heads"].count(0) == 1 and all(h != m for h, m in answer["arcs"])


def test_semdep_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="syntax must be"):
        SemanticGraph(5, "tree")
    with pytest.raises(ValueError, match="must be given"):
        SemanticGraph(5, "given", 4, 4)(torch.ones(1, 2).long(), torch.tensor([2]))
    task = SemDep()
    for estimator, words in [
        ("reinforce", "reinforce estimates a loss and gives no z, .* These do: .*spigot"),
        ("top-k-expectation:k=2", "gives no z"),
        ("perturb-and-map:samples=2", "several z"),
    ]:
        config = SemDepConfig(estimator=estimator, examples=20)
        task.data(config)
        with pytest.raises(UserError, match=words):
            task.model(config)
    task.model(SemDepConfig(estimator="perturbed:samples=2"))  # their mean
    for split in ("train", "dev", "test"):
        (tmp_path / f"{split}.conllu").write_text("1\ta\t_\t_\t_\t_\t0\t_\t_\t_\n\n")
    with pytest.raises(ValueError, match="no tree or no graph"):
        SemDep().data(SemDepConfig(corpus=str(tmp_path)))
