"""The recipe ``nli`` on its tiny generated set, and its models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("safetensors")

import structmax as sx
from structmax.cli import main
from structmax.data.snli import LABELS
from structmax.nn import ESIM, PairByTree
from structmax.nn.pair_classifier import interleave
from structmax.train import Trainer, UserError
from structmax.train.metrics import read_log
from structmax.train.tasks.nli import NLI, STRUCTURED, NLIConfig, generate

SMALL = {
    "steps": 160,
    "log_every": 10,
    "eval_every": 80,
    "save_every": 160,
    "lr": 1e-2,
    "word_size": 16,
    "hidden_size": 24,
    "dropout": 0.0,
}
ALIGNMENTS = ("softmax", "sparsemax", "assignment", "sequence")
ENCODERS = [
    ("easy-first", "gumbel-straight-through"),
    ("easy-first", "ppo"),
    ("spinn", "reinforce:baseline=self-critic"),
    ("dependency", "marginals"),
]


def fit(folder: Path, **options) -> tuple[dict, list[float]]:
    result = Trainer(NLI(), NLIConfig(**{**SMALL, **options}), folder, silent=True).fit()
    return result, [line["loss"] for line in read_log(folder) if line["kind"] == "train"]


@pytest.mark.parametrize(
    "alignment",
    [a if a == "softmax" else pytest.param(a, marks=pytest.mark.slow) for a in ALIGNMENTS],
)
def test_alignments_learn(tmp_path: Path, alignment: str) -> None:
    result, curve = fit(tmp_path, alignment=alignment)
    assert curve[-1] < 0.8 * curve[0]
    assert result["test"]["accuracy"] > 0.5  # of three classes
    assert 0 < result["test"]["aligned"] < 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoder", "estimator"),
    [*ENCODERS, *((kind, "marginals") for kind in ("bilstm", "balanced", *STRUCTURED))],
)
def test_sentence_encoders_learn(tmp_path: Path, encoder: str, estimator: str) -> None:
    result, curve = fit(tmp_path, encoder=encoder, estimator=estimator)
    assert curve[-1] < 0.9 * curve[0]
    assert result["valid"]["accuracy"] > 0.42


def batch_of(**options):
    task, config = NLI(), NLIConfig(**{**SMALL, **options})
    examples = task.data(config).train[:5]
    torch.manual_seed(0)
    return task.model(config).eval(), task.collate(examples), task, examples


@pytest.mark.parametrize(
    "options",
    [{"alignment": a} for a in (*ALIGNMENTS, "uniform")]
    + [{"encoder": a, "estimator": b} for a, b in ENCODERS]
    + [{"encoder": a} for a in ("lstm", "bilstm", "balanced", *STRUCTURED)],
)
def test_pairs_of_a_batch_do_not_touch(options) -> None:
    model, batch, task, examples = batch_of(**options)
    together, _ = task._logits(model, batch)
    for row, example in zip(together, examples):
        alone, _ = task._logits(model, task.collate([example]))
        assert torch.allclose(alone[0], row, atol=1e-5)
    losses = task.loss(model.train(), batch)
    assert losses.shape == batch.labels.shape
    losses.mean().backward()
    parser = getattr(model, "parser_parameters", list)()
    assert bool(parser) == ("estimator" in options)
    assert not parser or sum(float(p.grad.abs().sum()) for p in parser if p.grad is not None) > 0


@pytest.mark.parametrize("alignment", [*ALIGNMENTS, "uniform", "random"])
def test_weights_of_alignments(alignment: str) -> None:
    model, batch, _, _ = batch_of(alignment=alignment)
    _, (there, back) = model(*batch[:4])
    lengths = batch.premise_lengths.tolist(), batch.hypothesis_lengths.tolist()
    for w, v, n, m in zip(there, back, *lengths):
        assert not w[n:].any() and not w[:, m:].any()
        assert (w >= 0).all() and (v >= 0).all()
        if alignment == "assignment":  # the shorter side is matched, the longer at most once
            assert torch.equal(w.mT, v)
            sums = w.sum(0)[:m], w.sum(1)[:n]
            short, long = sums if m <= n else sums[::-1]
            assert torch.allclose(short, torch.ones_like(short)) and (long <= 1 + 1e-5).all()
        else:
            assert torch.allclose(w[:n].sum(-1), torch.ones(n))
            assert torch.allclose(v[:m].sum(-1), torch.ones(m))


def test_sequences_are_sparsemap_of_chains() -> None:
    """Without moves each word is aligned by itself, as by sparsemax."""
    model, batch, _, _ = batch_of(alignment="sequence", max_iter=1000)
    _, chain = model(*batch[:4])
    model.alignment = "sparsemax"
    _, alone = model(*batch[:4])
    for a, b in zip(chain, alone):
        assert torch.allclose(a, b, atol=1e-5)


def test_rows_are_pairs() -> None:
    words = interleave(torch.tensor([[3, 4], [5, 6]]), torch.tensor([[7], [8]]))
    assert words.tolist() == [[3, 4], [7, 0], [5, 6], [8, 0]]
    torch.manual_seed(0)
    model = PairByTree(9, 3, "spinn", input_size=6, hidden_size=8).eval()
    lengths = torch.tensor([2, 1, 2, 1])
    logits = model(words, lengths)
    assert torch.equal(logits[::2], logits[1::2])
    # the cost of several draws: those of the same turn are a pair
    labels = torch.tensor([0, 0, 2, 2])
    estimator = sx.estimators.Reinforce(samples=3, baseline="leave-one-out")
    losses = model(words, lengths, labels, estimator=estimator)
    assert torch.allclose(losses[::2], losses[1::2])


def test_nli_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "snli", tmp_path / "run"
    folder.mkdir()
    splits = generate(NLIConfig(examples=60))
    for name, split in zip(("train", "validation", "test"), splits):
        rows = [(" ".join(p), " ".join(h), str(label)) for p, h, label in split]
        lines = ["\t".join(row) for row in [("premise", "hypothesis", "label"), *rows]]
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    config = NLIConfig(corpus=str(folder), train_file="train.tsv")
    assert NLI().data(config) == splits
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    flags += [f"--corpus={folder}", "--train-file=train.tsv", "--steps=10"]
    assert main(["train", "nli", *flags, "--device=cpu", f"--out={out}"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main(["evaluate", str(out), "--device=cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == told["test"]["accuracy"]
    (tmp_path / "in.txt").write_text("An unheard thing.\tA thing.\nonly one\n")
    flags = ["predict", str(out), str(tmp_path / "in.txt"), "--format=json", "--device=cpu"]
    assert main(flags) == 2
    printed = capsys.readouterr()
    assert "line 2: expected two sentences" in printed.err
    found = json.loads(printed.out)
    assert found["label"] in LABELS and sum(found["chances"].values()) == pytest.approx(1, abs=1e-3)
    assert [len(row) for row in found["weights"]] == [4] * 3


def test_nli_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = NLI()
    with pytest.raises(ValueError, match=r"tab between, got 'word (word )*word…'\.$"):
        next(task.predict(torch.nn.Linear(1, 1), ["word " * 4000]))
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no train\.tsv in .*'here'\. .*--train-file"):
        task.data(NLIConfig(corpus="here", train_file="train.tsv"))
    config = NLIConfig(encoder="easy-first", estimator="top-k-expectation")
    task.data(config)
    with pytest.raises(UserError, match="pairs need one"):
        task.model(config)
    with pytest.raises(UserError, match="even"):
        NLIConfig(hidden_size=5).check()
    with pytest.raises(ValueError, match="alignment must be"):
        ESIM(5, 3, "hard")
