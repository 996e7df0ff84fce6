"""The recipe ``explain`` on its tiny generated set, and on files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("safetensors")

import structmax as sx
from structmax.cli import main
from structmax.train import Trainer, UserError
from structmax.train.metrics import read_log
from structmax.train.tasks.explain import L2X, Explain, ExplainConfig, estimator, generate

SMALL = {
    "steps": 100,
    "log_every": 20,
    "eval_every": 50,
    "save_every": 100,
    "batch_size": 32,
    "lr": 1e-2,
    "k": 2,
    "word_size": 16,
    "hidden_size": 16,
    "dropout": 0.0,
}
ESTIMATORS = (
    "marginals",
    "l2x",
    "straight-through",
    "spigot:step=10",
    "imle:lam=1000,noise=sum-of-gamma",
    "sparsemap",
    "perturb-and-parse",
)


def fit(folder: Path, **options) -> tuple[dict, list[float]]:
    """The result of a small run, and its losses as they fell."""
    result = Trainer(Explain(), ExplainConfig(**{**SMALL, **options}), folder, silent=True).fit()
    return result, [line["loss"] for line in read_log(folder) if line["kind"] == "train"]


FAST = ("marginals", "l2x")


@pytest.mark.parametrize(
    "name",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in ESTIMATORS],
)
def test_explain_learns_by_every_estimator(tmp_path: Path, name: str) -> None:
    result, curve = fit(tmp_path, estimator=name)
    assert curve[-1] < 0.8 * curve[0]
    found = result["test"]
    assert found["accuracy"] > 0.75  # two words at random: 0.65
    assert 0.1 < found["words_seen"] < 0.4


def test_all_words_and_random_ones(tmp_path: Path) -> None:
    every, _ = fit(tmp_path / "all", words="all")
    random, _ = fit(tmp_path / "random", words="random")
    assert every["test"]["words_seen"] == 1 > random["test"]["words_seen"]
    assert every["test"]["accuracy"] > 0.8 > random["test"]["accuracy"]


def test_the_reader_sees_the_chosen_words_alone() -> None:
    task = Explain()
    sentences = task.data(ExplainConfig(k=3)).train[:5]
    torch.manual_seed(0)
    model = task.model(ExplainConfig(**{**SMALL, "k": 3})).eval()
    batch = task.collate(sentences)
    z, logits = model(batch)
    assert z.sum(1).tolist() == [3] * 5
    others = torch.where(z > 0, batch.words, (batch.words > 0).long())
    assert torch.equal(model.read(z, others), logits)


def test_short_sentences_are_seen_whole() -> None:
    task = Explain()
    task.data(ExplainConfig(k=5))
    torch.manual_seed(0)
    model = task.model(ExplainConfig(**{**SMALL, "k": 5, "estimator": "marginals"})).eval()
    examples = generate((2, 0)).train
    examples[0] = examples[0]._replace(words=["bad1", "word2"])
    alone, batch = task.collate(examples[:1]), task.collate(examples)
    assert alone.words.shape == (1, 5)
    for one in (alone, batch):
        z, logits = model(one)
        assert z[0].tolist()[:2] == [1, 1]
        mean = model.embedding(one.words[0, :2]).mean(0)
        assert torch.allclose(logits[0], model.reader(mean), atol=1e-6)
        assert torch.isfinite(task.loss(model, one)).all()


def test_l2x_is_a_relaxed_subset() -> None:
    torch.manual_seed(0)
    scores = torch.tensor([[3.0, 0.0, 0.0, 9.0], [0.0, 0.0, 0.0, 0.0]], requires_grad=True)
    subset = sx.KSubset(scores, 2, torch.tensor([3, 4]))
    z = L2X(temperature=0.01)(subset)
    assert z.shape == (2, 4) and (z[0, 3] == 0).all()
    assert ((z < 0.01) | (z > 0.99)).all() and (z > 0.5).sum(-1).max() <= 2
    L2X()(subset).square().sum().backward()
    assert scores.grad is not None and scores.grad[0, 3] == 0 and scores.grad[1].abs().sum() > 0
    assert estimator("l2x:temperature=0.1") == L2X(0.1)
    for text in ("l2x:tau=1", "l2x:temperature=x"):
        with pytest.raises(UserError, match="l2x:temperature=NUMBER"):
            estimator(text)


def test_explain_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "sst"
    folder.mkdir()
    for name, split in zip(("train", "dev", "test"), generate((60, 20, 20))):
        lines = []
        for words, label, _ in split:
            text = f"(2 {words[-1]})"
            for word in words[-2::-1]:
                text = f"(2 (2 {word}) {text})"
            lines.append(f"({label * 4}{text[2:]}")
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "vectors.txt").write_text("good1 1 2\nbad1 3 4\n")
    out = tmp_path / "run"
    options = {**SMALL, "steps": 20, "eval_every": 20, "word_size": 2, "estimator": "marginals"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    flags += [f"--corpus={folder}", f"--vectors={tmp_path / 'vectors.txt'}"]
    assert main(["train", "explain", *flags, "--device=cpu", f"--out={out}"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main(["evaluate", str(out), "--device=cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == told["test"]["accuracy"]
    (tmp_path / "vectors.txt").unlink()  # a trained model needs none of the data
    (tmp_path / "in.txt").write_text("word1 good1 word2\n\n")
    flags = ["predict", str(out), str(tmp_path / "in.txt"), "--format=json", "--device=cpu"]
    assert main(flags) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith("}\n\n")  # an empty line for an empty line
    found = json.loads(printed.out)
    assert len(found["chosen"]) == 2 and found["text"].count("[") == 2
    assert found["label"] == ("positive" if found["positive"] > 0.5 else "negative")


def test_explain_refuses() -> None:
    with pytest.raises(UserError, match="k must be"):
        ExplainConfig(k=0).check()
    with pytest.raises(UserError, match="no estimator"):
        estimator("nothing")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(
    "options",
    [{"estimator": name} for name in ESTIMATORS] + [{"words": "all"}, {"words": "random"}],
)
def test_explain_on_cuda(tmp_path: Path, options: dict) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in {**SMALL, **options}.items()]
    flags += ["--steps=6", "--eval-every=3", "--device=cuda", f"--out={tmp_path / 'run'}"]
    assert main(["train", "explain", *flags]) == 0
