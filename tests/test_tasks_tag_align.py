"""The recipes ``tag`` and ``align`` on their tiny generated sets, and on files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("safetensors")
pytest.importorskip("conllu")

from safetensors.torch import load_file

from structmax import losses
from structmax.cli import main
from structmax.data import columns
from structmax.train import Trainer, UserError
from structmax.train.distributed import Workers
from structmax.train.metrics import read_log
from structmax.train.tasks import align
from structmax.train.tasks.align import METHODS, Align, AlignConfig, Measure
from structmax.train.tasks.tag import LOSSES, Tag, TagConfig, generate

SMALL = {
    "steps": 40,
    "log_every": 10,
    "eval_every": 40,
    "save_every": 40,
    "lr": 1e-2,
    "schedule": "constant",
    "word_size": 12,
    "char_size": 8,
    "hidden_size": 16,
    "dropout": 0.0,
}


def fit(folder: Path, **options) -> tuple[dict, list[float]]:
    """The result of a small run of ``tag``, and its losses as they fell."""
    result = Trainer(Tag(), TagConfig(**{**SMALL, **options}), folder, silent=True).fit()
    return result, [line["loss"] for line in read_log(folder) if line["kind"] == "train"]


# -- tag ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss",
    [loss if loss == "crf" else pytest.param(loss, marks=pytest.mark.slow) for loss in LOSSES],
)
def test_tag_learns_by_every_loss(tmp_path: Path, loss: str) -> None:
    result, curve = fit(tmp_path, loss=loss)
    assert curve[-1] < 0.5 * curve[0]
    assert result["test"]["accuracy"] > 0.9  # of four tags
    assert result["test"]["sentences_per_second"] > 0
    support = result["test"]["tags_per_word"]
    assert support == 4 if loss == "crf" else 1 <= support < 3, support


def test_tag_resumes_bit_for_bit(tmp_path: Path) -> None:
    """With dropout of words, whose order in a batch must not depend on the batches before."""
    options = {**SMALL, "dropout": 0.3, "eval_every": 3, "save_every": 3}
    for name, steps, resume in (("whole", 6, False), ("parts", 3, False), ("parts", 6, True)):
        config = TagConfig(**{**options, "steps": steps})
        Trainer(Tag(), config, tmp_path / name, resume, silent=True).fit()
    whole, parts = (load_file(tmp_path / name / "last.safetensors") for name in ("whole", "parts"))
    weights = [name for name in whole if name.startswith("model.")]
    assert weights and all(torch.equal(whole[name], parts[name]) for name in weights)


@pytest.mark.slow
def test_tag_finds_entities(tmp_path: Path) -> None:
    result, curve = fit(tmp_path, tags="ner", steps=80)
    assert curve[-1] < 0.2 * curve[0]
    assert result["valid"]["f1"] > 0.9 and result["test"]["f1"] > 0.9


@pytest.mark.parametrize("kind", ["none", "random"])
def test_fixed_transitions_stay(tmp_path: Path, kind: str) -> None:
    task, config = Tag(), TagConfig(**{**SMALL, "steps": 3, "transitions": kind})
    trainer = Trainer(task, config, tmp_path, silent=True)
    model, before = trainer.model, trainer.model.transition.clone()
    trainer.fit()
    assert torch.equal(model.transition, before) and bool(before.any()) == (kind == "random")
    if kind == "none":  # a softmax of each word
        batch = task.collate(trainer.data.train[:5])
        chain = model.eval()(batch)
        inside = torch.arange(batch.tags.shape[1]) < batch.lengths[:, None]
        each = torch.nn.functional.cross_entropy(chain.unary[inside], batch.tags[inside])
        assert torch.allclose(losses.crf(chain, batch.tags, reduction="sum") / inside.sum(), each)


def test_words_of_a_batch_do_not_touch(tmp_path: Path) -> None:
    """Scores are those of the sentence alone: of its spelling, and without its neighbours."""
    task = Tag()
    sentences = task.data(TagConfig()).train[:6]
    torch.manual_seed(0)
    model = task.model(TagConfig(**SMALL)).eval()
    together = model(task.collate(sentences)).unary
    for row, sentence in zip(together, sentences):
        alone = model(task.collate([sentence])).unary[0]
        assert torch.allclose(row[: len(alone)], alone, atol=1e-6)


def write_corpus(folder: Path, tags: str) -> None:
    folder.mkdir()
    splits = generate(TagConfig(tags=tags, examples=40))
    names = {"upos": ["a-train.conllu", "a-dev.conllu", "a-test.conllu"]}
    for name, split in zip(names.get(tags, ["x.train", "x.testa", "x.testb"]), splits):
        lines = []
        for words, given in split:
            if tags == "ner":
                given = columns.convert(given, "iob1")
                lines += [f"{word} X {tag}" for word, tag in zip(words, given)]
            else:
                pairs = enumerate(zip(words, given), 1)
                lines += [f"{i}\t{w}\t_\t{t}\t_\t_\t{i - 1}\t_\t_\t_" for i, (w, t) in pairs]
            lines.append("")
        (folder / name).write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("tags", ["upos", "ner"])
def test_a_corpus_reads_as_it_was_written(tmp_path: Path, tags: str) -> None:
    write_corpus(tmp_path / "corpus", tags)
    options = {"tags": tags, "examples": 40}
    assert Tag().data(TagConfig(**options, corpus=str(tmp_path / "corpus"))) == generate(
        TagConfig(**options)
    )
    other = "ner" if tags == "upos" else "upos"
    with pytest.raises((ValueError, OSError), match=r"there is no|:\d+: "):
        Tag().data(TagConfig(tags=other, corpus=str(tmp_path / "corpus")))


def test_several_tags_of_a_word_are_told_in_one_line(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "corpus"
    write_corpus(folder, "ner")
    (folder / "x.testb").write_text("a X B-PER,B-LOC\nb X O\n")
    options = {**SMALL, "steps": 1, "eval_every": 1, "corpus": folder, "tags": "ner"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    assert main(["train", "tag", *flags, "--device=cpu", f"--out={tmp_path / 'run'}"]) == 0
    (said,) = (s for s in capsys.readouterr().err.splitlines() if s.startswith("structmax: "))
    assert said.endswith("x.testb: words with several tags: 1. The first tag of each counts.")


def test_testa_is_no_test_split(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    write_corpus(folder, "ner")
    (folder / "x.testb").unlink()
    with pytest.raises(FileNotFoundError, match="there is no file named test in"):
        Tag().data(TagConfig(tags="ner", corpus=str(folder)))
    (folder / "x.testa").rename(folder / "testament.valid")
    (folder / "x.train").rename(folder / "testament.train")
    (folder / "testament.test").write_text("a O\n")
    splits = Tag().data(TagConfig(tags="ner", corpus=str(folder)))
    assert [len(split) for split in splits] == [40, 100, 1]


def test_an_unknown_encoding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus(tmp_path / "corpus", "ner")
    flags = ["train", "tag", "--tags=ner", f"--corpus={tmp_path / 'corpus'}", "--encoding=utf-9"]
    assert main([*flags, f"--out={tmp_path / 'run'}", "--device=cpu"]) == 2
    assert "there is no encoding 'utf-9'. Try utf-8 or latin-1." in capsys.readouterr().err


def test_tag_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus(tmp_path / "corpus", "upos")
    (tmp_path / "vectors.txt").write_text("the 1 2\na 3 4\n")
    out = tmp_path / "run"
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    flags += [f"--corpus={tmp_path / 'corpus'}", f"--vectors={tmp_path / 'vectors.txt'}"]
    assert main(["train", "tag", *flags, "--loss=smoothed", "--device=cpu", f"--out={out}"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main(["evaluate", str(out), "--device=cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == told["test"]["accuracy"] > 0.7

    (tmp_path / "vectors.txt").unlink()  # a trained model needs none of the data
    (tmp_path / "in.txt").write_text("the unheard thing\n\n")
    flags = ["predict", str(out), str(tmp_path / "in.txt"), "--format=json", "--device=cpu"]
    assert main(flags) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith("}\n\n")  # an empty line for an empty line
    found = json.loads(printed.out)
    assert found["words"] == ["the", "unheard", "thing"] and found["tags"][0] == "DET"
    for tag, choices in zip(found["tags"], found["choices"], strict=True):
        assert tag in choices and sum(choices.values()) == pytest.approx(1, abs=1e-3)


# -- align ----------------------------------------------------------------------------------------

QUICK = AlignConfig(gammas="0.1,1", iterations=10, device="cpu")


@pytest.fixture(scope="module")
def aligned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "align"
    options = ["--gammas=0.1,1", "--iterations=10", "--device=cpu", f"--out={folder}"]
    assert main(["train", "align", *options]) == 0
    return folder


def test_align_compares_every_method(aligned: Path) -> None:
    result = json.loads((aligned / "result.json").read_text())
    rows = {row["method"]: row for row in result["rows"]}
    assert tuple(rows) == METHODS
    for row in rows.values():
        assert row["neighbour_test"] > 0.5 and row["average_test"] > 0.5  # of three classes
    for name in METHODS[2:]:
        assert rows[name]["average_test"] >= rows["euclidean"]["average_test"]
    best = max(result["rows"], key=lambda row: row["average_cv"])
    assert result["test"] == {"method": best["method"], "accuracy": best["average_test"]}
    assert (aligned / "table.md").read_text().count("\n") == 8


def test_align_keeps_its_averages(aligned: Path, tmp_path: Path, capsys) -> None:
    told = json.loads((aligned / "result.json").read_text())["test"]["accuracy"]
    assert main(["evaluate", str(aligned), "--device=cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == pytest.approx(told, abs=1e-4)
    task = Align()
    test = task.data(QUICK).test
    (tmp_path / "in.txt").write_text("\n".join(task.line(example) for example in test[::10]))
    assert main(["predict", str(aligned), str(tmp_path / "in.txt"), "--device=cpu"]) == 0
    names = capsys.readouterr().out.split()
    right = [name == task.facts["classes"][label] for name, (_, label) in zip(names, test[::10])]
    assert np.mean(right) > 0.6
    (tmp_path / "in.txt").write_text("1,2,3\n")
    assert main(["predict", str(aligned), str(tmp_path / "in.txt"), "--device=cpu"]) == 2
    assert "each of 24 numbers" in capsys.readouterr().err
    for wrong in ("1 2 3", "1,2:3"):
        (tmp_path / "in.txt").write_text(wrong)
        assert main(["predict", str(aligned), str(tmp_path / "in.txt"), "--device=cpu"]) == 2
        assert f"24 numbers between commas, got {wrong!r}" in capsys.readouterr().err


def test_align_on_a_small_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "ucr" / "Steps", tmp_path / "run"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)

    def line(name: str, at: int) -> str:
        heights = (np.arange(7) >= at) * (1.0 if name == "up" else -1.0) + rng.normal(0, 0.1, 7)
        return ",".join(f"{x:.3f}" for x in heights) + f":{name}"

    rows = [line(name, at) for name in ("up", "down") for at in (2, 3, 4)]
    head = "@classLabel true down up\n@data\n"
    for split in ("TRAIN", "TEST"):
        (folder / f"Steps_{split}.ts").write_text(head + "\n".join(rows) + "\n")
    flags = ["--set=Steps", f"--data={tmp_path}", "--gammas=0.1,1", "--iterations=3", "--folds=2"]
    assert main(["train", "align", *flags, "--device=cpu", f"--out={out}"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in told["rows"]] == list(METHODS)
    assert told["test"]["accuracy"] == 1
    for row in told["rows"]:
        assert (row["average_gamma"] in (0.1, 1)) == (row["method"] in align.SMOOTHED)
    assert (out / "table.md").read_text().count("\n") == 2 + len(METHODS)

    assert main(["evaluate", str(out), "--device=cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == 1
    assert main(["evaluate", str(out), "--split=valid", "--device=cpu"]) == 2
    assert "task align has no valid split here" in capsys.readouterr().err
    task = Align()
    test = task.data(AlignConfig(set="Steps", data=str(tmp_path))).test
    (tmp_path / "in.txt").write_text(f"{task.line(test[0])}\n1,2\n")
    assert main(["predict", str(out), str(tmp_path / "in.txt"), "--device=cpu"]) == 2
    said = capsys.readouterr()
    assert said.out == "up\n" and "each of 7 numbers" in said.err
    for number in ("nan", "inf", "1e308", "1e30"):
        (tmp_path / "in.txt").write_text(",".join([number] * 7))
        assert main(["predict", str(out), str(tmp_path / "in.txt"), "--device=cpu"]) == 2
        assert "line 1: the numbers must be finite" in capsys.readouterr().err
    assert list(task.predict(None, [])) == []
    other = Workers(torch.device("cpu"), rank=1, count=2)
    assert Align().fit(QUICK, tmp_path / "none", False, other) == {}


@pytest.fixture
def series() -> tuple[torch.Tensor, torch.Tensor]:
    task = Align()
    return task.collate(task.data(QUICK).train)


@pytest.mark.parametrize("method", METHODS)
def test_averages_are_nearer_than_means(series, method: str) -> None:
    """The loss falls from the mean, where averaging starts, to the average."""
    one = series[0][series[1] == 0].double()
    measure = Measure(method, 0.1, 24, 20)
    mean, average = one.mean(0), measure.average(one)
    far = measure.distances(torch.stack([mean, average]), one).sum(1)
    if method == "euclidean":
        assert torch.allclose(mean, average)
    elif method != "random path":  # whose rows and columns differ
        assert far[1] < far[0]


@pytest.mark.parametrize("method", METHODS)
def test_distances_in_chunks(series, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = series[0][:5].double(), series[0][20:24].double()
    measure = Measure(method, 0.1, 24, 1)
    far = measure.distances(x, y)
    assert far.shape == (5, 4)
    monkeypatch.setattr(align, "CELLS", 1)
    assert torch.allclose(measure.distances(x, y), far)
    if method in ("dtw", "soft-dtw", "divergence", "gini-dtw"):
        for i, j in [(0, 0), (4, 3)]:
            assert torch.allclose(far[i, j], measure.loss(x[i], y[j]))
        assert torch.allclose(measure.distances(y, x), far.mT)
    if method != "random path" and method not in ("soft-dtw", "gini-dtw"):
        assert measure.distances(x, x).diagonal().abs().max() < 1e-9


def test_align_refuses(tmp_path: Path) -> None:
    for options, words in [
        ({"lr": 0.1}, "lr has no effect"),
        ({"folds": 1}, "folds"),
        ({"gammas": "1,x"}, "gammas"),
        ({"gammas": "0"}, "gammas"),
        ({"gammas": "1,nan"}, "finite gammas"),
        ({"gammas": "1,inf"}, "finite gammas"),
    ]:
        with pytest.raises(UserError, match=words):
            AlignConfig(**options).check()
    with pytest.raises(FileNotFoundError, match="ucr/None"):
        Align().data(AlignConfig(set="None", data=str(tmp_path)))
    folder = tmp_path / "ucr" / "Odd"
    folder.mkdir(parents=True)
    head = "@classLabel true a b\n@data\n"
    (folder / "Odd_TRAIN.ts").write_text(head + "1,2:a\n1,2:a\n1,2:b\n1,2:b\n")
    (folder / "Odd_TEST.ts").write_text(head + "1,2,3:a\n")
    with pytest.raises(ValueError, match="one length"):
        Align().data(AlignConfig(set="Odd", data=str(tmp_path)))
    (folder / "Odd_TEST.ts").write_text(head + "1,2:a\n")
    (folder / "Odd_TRAIN.ts").write_text(head + "1,2:a\n1,2:a\n1,2:b\n")
    with pytest.raises(ValueError, match="two series"):
        Align().data(AlignConfig(set="Odd", data=str(tmp_path)))
