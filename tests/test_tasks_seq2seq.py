"""The recipe ``seq2seq`` on its tiny generated sets, its model and BLEU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("safetensors")

from structmax.cli import main
from structmax.data import summaries
from structmax.nn import Seq2Seq
from structmax.train import Trainer, UserError
from structmax.train.bleu import Bleu
from structmax.train.metrics import read_log
from structmax.train.tasks.seq2seq import Seq2SeqConfig, Translation, generate

SMALL = {
    "steps": 100,
    "log_every": 10,
    "eval_every": 50,
    "save_every": 100,
    "lr": 1e-2,
    "schedule": "constant",
    "hidden_size": 32,
    "dropout": 0.0,
}
MAPS = ("softmax", "sparsemax", "entmax", "fusedmax", "oscarmax", "csparsemax")


def fit(folder: Path, **options) -> tuple[dict, list[float]]:
    config = Seq2SeqConfig(**{**SMALL, **options})
    result = Trainer(Translation(), config, folder, silent=True).fit()
    return result, [line["loss"] for line in read_log(folder) if line["kind"] == "train"]


@pytest.mark.parametrize(
    "attention", [m if m == "sparsemax" else pytest.param(m, marks=pytest.mark.slow) for m in MAPS]
)
def test_translation_learns(tmp_path: Path, attention: str) -> None:
    result, curve = fit(tmp_path, attention=attention)
    assert curve[-1] < 0.5 * curve[0]
    test = result["test"]
    assert test["bleu"] > 20 and test["next_word"] > 0.6  # of 22 words
    assert test["sentences_per_second"] > 0
    assert test["attended"] > 5 if attention == "softmax" else 1 <= test["attended"] < 5


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"kind": "summary"}, {"output": "entmax"}])
def test_summaries_and_sparse_outputs_learn(tmp_path: Path, options) -> None:
    result, curve = fit(tmp_path, **options)
    assert curve[-1] < 0.5 * curve[0] and result["test"]["bleu"] > 20


def model_of(attention: str, **options) -> Seq2Seq:
    torch.manual_seed(0)
    return Seq2Seq(12, 11, 16, attention, **options).eval()


SOURCE, LENGTHS = torch.tensor([[4, 5, 6, 7, 3], [8, 9, 3, 0, 0]]), torch.tensor([5, 3])
OPTIONS = {"fusedmax": {"strength": 0.1}, "oscarmax": {"strength": 0.1}}


@pytest.mark.parametrize("attention", MAPS)
def test_words_are_those_of_the_whole(attention: str) -> None:
    """Greedy search, word by word, agrees with all words at once; so does an item alone."""
    model = model_of(attention, **OPTIONS.get(attention, {}))
    found = model.translate(SOURCE, LENGTHS, 6)
    words = torch.cat([torch.full((2, 1), model.start), found.words], 1)
    scores, weights = model(SOURCE, LENGTHS, words[:, :-1])
    scores[..., :3] = -torch.inf
    for item in range(2):
        size = int((found.words[item] != 0).sum())
        best = scores[item].argmax(-1)
        assert torch.equal(best[:size], found.words[item, :size])
        if size < found.words.shape[1]:
            assert best[size] == model.end
        assert torch.allclose(weights[item, :size], found.weights[item, :size], atol=1e-6)
        n = int(LENGTHS[item])
        alone, _ = model(SOURCE[item : item + 1, :n], LENGTHS[item : item + 1], words[item, None])
        assert torch.allclose(alone[0, :-1, 3:], scores[item, :, 3:], atol=1e-5)
        assert torch.allclose(weights[item].sum(-1), torch.ones(weights.shape[1]))
        assert not weights[item, :, n:].any()


@pytest.mark.parametrize(("start", "end"), [(2, 3), (3, 2), (9, 10), (10, 9), (1, 2)])
def test_every_word_may_be_written(start: int, end: int) -> None:
    """All but padding, unknown words and the start; nothing after the end."""
    model = model_of("softmax", start=start, end=end)
    source, lengths = torch.tensor([[4, 5, 3]]), torch.tensor([3])
    for word in range(1, 11):
        model.output.bias.data = torch.eye(11)[word] * 100
        found = model.translate(source, lengths, most=9).words[0].tolist()
        if word == end:
            assert found == [0] * 8  # looked at every eighth word
        else:
            assert found.count(word) == (0 if word in (1, start) else 9)


@pytest.mark.parametrize("attention", ["uniform", "random"])
def test_attention_that_does_not_look(attention: str) -> None:
    model = model_of(attention)
    target = torch.randint(3, 11, (2, 40))
    scores, weights = model(SOURCE, LENGTHS, target)
    for item, n in enumerate(LENGTHS.tolist()):
        if attention == "uniform":
            assert torch.equal(weights[item, :, :n], torch.full((40, n), 1 / n))
        else:
            assert torch.equal(weights[item].amax(-1), torch.ones(40))
            assert (weights[item, :, :n].sum(0) > 0).all()  # each of the words at some time
        assert torch.allclose(weights[item].sum(-1), torch.ones(40))
        assert not weights[item, :, n:].any()
    scores.sum().backward()
    assert model.key.weight.grad is None and model.source.weight.grad.isfinite().all()
    with pytest.raises(ValueError, match="Seq2Seq"):
        model_of(attention, strength=0.1)


def test_fertilities_are_kept() -> None:
    model = model_of("csparsemax", fertility=0.6)
    target = torch.randint(3, 11, (2, 9))
    scores, weights = model(SOURCE, LENGTHS, target)
    spent = weights.sum(1)
    for item, n in enumerate(LENGTHS.tolist()):
        assert (spent[item, : n - 1] <= 0.6 + 1e-5).all()
        assert spent[item, n - 1] > 5  # the end symbol takes the rest
    scores.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


# -- BLEU -----------------------------------------------------------------------------------------


def test_bleu_of_known_values() -> None:
    def bleu(*pairs: tuple[str, str]) -> float:
        score = Bleu()
        for found, reference in pairs:
            score.add(found.split(), reference.split())
        return score.value

    assert bleu(("a b c d e", "a b c d e")) == pytest.approx(100)
    assert bleu(("", "a b")) == bleu(("x y z w", "a b c d")) == 0
    # precisions 4/4, 3/3, 2/2, 1/1, and half as long as its reference
    assert bleu(("a b c d", "a b c d e f g h")) == pytest.approx(100 * np.exp(1 - 2))
    # 3/4, 1/3, 1/(2·2), 1/(4·1): no trigram and no 4-gram is right
    assert bleu(("a b x c", "a b c d")) == pytest.approx(100 * (0.75 / 3 / 4 / 4) ** 0.25)


def test_bleu_is_that_of_sacrebleu() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    rng = np.random.default_rng(0)
    for vocabulary, count in [(4, 30), (30, 30), (4, 1)]:
        pairs = [
            [[f"w{i}" for i in rng.integers(0, vocabulary, rng.integers(4, 12))] for _ in range(2)]
            for _ in range(count)
        ]
        score = Bleu()
        for found, reference in pairs:
            score.add(found, reference)
        joined = [[" ".join(words) for words in side] for side in zip(*pairs)]
        theirs = sacrebleu.corpus_bleu(joined[0], [joined[1]], tokenize="none", force=True)
        assert score.value == pytest.approx(theirs.score)


# -- files ----------------------------------------------------------------------------------------


def test_seq2seq_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "corpus", tmp_path / "run"
    folder.mkdir()
    splits = generate(Seq2SeqConfig(examples=200))
    for name, split in zip(("train", "val", "test_2016"), splits):
        for side in ("source", "target"):
            lines = [" ".join(getattr(pair, side)) for pair in split]
            (folder / f"{name}.{side[:2]}").write_text("\n".join(lines) + "\n")
    config = Seq2SeqConfig(corpus=str(folder), source="so", target="ta")
    assert Translation().data(config) == splits
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    flags += [f"--corpus={folder}", "--source=so", "--target=ta", "--steps=20"]
    assert main(["train", "seq2seq", *flags, "--device=cpu", f"--out={out}"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main(["evaluate", str(out), "--device=cpu"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["bleu"] == told["test"]["bleu"]

    # predictions, scored as a file, have the BLEU that was measured
    assert main(["predict", str(out), str(folder / "test_2016.so"), "--device=cpu"]) == 0
    bleu = Bleu()
    for line, pair in zip(capsys.readouterr().out.split("\n"), splits.test):
        bleu.add(line.split(), pair.target)
    assert bleu.value == pytest.approx(measured["bleu"])

    (tmp_path / "in.txt").write_text(" ".join(splits.test[0].source) + "\n\n")
    flags = ["predict", str(out), str(tmp_path / "in.txt"), "--format=json", "--device=cpu"]
    assert main(flags) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith("}\n\n")  # an empty line for an empty line
    found = json.loads(printed.out)
    assert len(found["attention"]) == len(found["words"])
    for row in found["attention"]:
        assert sum(row.values()) == pytest.approx(1, abs=1e-2)


def test_summaries_are_read(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    row = json.dumps({"document": "a long text here", "summary": "a text"})
    path.write_text(row + "\n")
    assert summaries.read(path, most=3) == [(["a", "long", "text"], ["a", "text"])]
    for line, words in [
        ("{", "not JSON"),
        ('{"document": "a"}', "document and summary"),
        ('{"document": 3, "summary": "a"}', "no text as document"),
        ('{"document": " ", "summary": "a"}', "an empty document"),
        ('{"document": "a \\ud800 b", "summary": "a"}', "half of a surrogate pair"),
    ]:
        path.write_text(f"{row}\n{line}\n")
        with pytest.raises(ValueError, match=f"train.jsonl:2: .*{words}"):
            summaries.read(path)
    path.write_text('{"document": "\\ud83d\\ude00", "summary": "a"}\n')  # two halves are one
    assert summaries.read(path)[0].source == ["😀"]
    for name in ("train", "val", "test"):
        (tmp_path / f"{name}.jsonl").write_text(row + "\n")
    told = Translation().data(Seq2SeqConfig(corpus=str(tmp_path), kind="summary", most_words=2))
    assert told.train == told.valid == told.test == [(["a", "long"], ["a", "text"])]
    with pytest.raises(FileNotFoundError, match=r"there is no \.\w+ file named train"):
        Translation().data(Seq2SeqConfig(corpus=str(tmp_path)))


def test_parallel_text_in_several_files(tmp_path: Path) -> None:
    for split in ("train-1", "train-2", "val", "test"):
        for end in ("de", "en"):
            (tmp_path / f"{split}.{end}").write_text(f"{split} {end}\n")
    found = Translation().data(Seq2SeqConfig(corpus=str(tmp_path)))
    pairs = [(["train-1", "de"], ["train-1", "en"]), (["train-2", "de"], ["train-2", "en"])]
    assert found.train == pairs
    (tmp_path / "train-1.en").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no .*train-1\.en"):
        Translation().data(Seq2SeqConfig(corpus=str(tmp_path)))


def test_words_of_a_line_are_those_of_a_file() -> None:
    task, config = Translation(), Seq2SeqConfig(**SMALL)
    task.data(config)
    (found,) = task.predict(task.model(config).eval(), ["a\u00a0b \tc "])
    assert found["source"] == ["a\u00a0b", "c"]


def test_a_translation_does_not_depend_on_its_batch() -> None:
    """Untrained, it goes on to the limit, which is that of its own source."""
    task, config = Translation(), Seq2SeqConfig(**SMALL)
    task.data(config)
    model = task.model(config).eval()
    lines = ["a b", "a b c d e f g h i j k l", "c"]
    alone = [next(iter(task.predict(model, [line])))["words"] for line in lines]
    assert [found["words"] for found in task.predict(model, lines)] == alone


def test_seq2seq_refuses() -> None:
    for options, words in [({"hidden_size": 5}, "even"), ({"fertility": 0.0}, "fertility")]:
        with pytest.raises(UserError, match=words):
            Seq2SeqConfig(**options).check()
    with pytest.raises(ValueError, match="needs strength"):
        Seq2Seq(5, 5, 4, "fusedmax")
    for start, end in [(2, 2), (2, 1), (2, 0), (5, 3), (2, 5), (-1, 3)]:
        with pytest.raises(ValueError, match=f"got start={start}, end={end}"):
            Seq2Seq(5, 5, 4, start=start, end=end)
    with pytest.raises(ValueError, match="most must be at least 1, got 0"):
        Seq2Seq(5, 5, 4).translate(torch.tensor([[3]]), torch.tensor([1]), most=0)
