"""The recipe ``parse`` on its tiny generated set, and on files."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("safetensors")
pytest.importorskip("conllu")

from structmax.cli import main
from structmax.data import treebank
from structmax.data.words import Vocabulary, facts
from structmax.structures.dependency_tree import DependencyTree
from structmax.train import Trainer, UserError, tasks
from structmax.train.metrics import read_log
from structmax.train.tasks.parse import LOSSES, Parse, ParseConfig

SMALL = {
    "steps": 40,
    "log_every": 10,
    "eval_every": 40,
    "save_every": 40,
    "batch_size": 32,
    "batch_tokens": 0,
    "lr": 1e-2,
    "warmup": 0,
    "schedule": "constant",
    "word_size": 16,
    "char_size": 8,
    "hidden_size": 24,
    "layers": 1,
    "arc_size": 24,
    "label_size": 12,
    "dropout": 0.0,
}


def fit(folder: Path, **options) -> tuple[dict, list[float]]:
    """The result of a small run, and its losses as they fell."""
    result = Trainer(Parse(), ParseConfig(**{**SMALL, **options}), folder, silent=True).fit()
    return result, [line["loss"] for line in read_log(folder) if line["kind"] == "train"]


FAST = ("crf", "margin-sparsemap")


@pytest.mark.parametrize(
    "loss",
    [loss if loss in FAST else pytest.param(loss, marks=pytest.mark.slow) for loss in LOSSES],
)
def test_parse_learns_by_every_loss(tmp_path: Path, loss: str) -> None:
    result, curve = fit(tmp_path, loss=loss, support=True, steps=60 if loss == "hinge" else 40)
    assert curve[-1] < 0.5 * curve[0]
    found = result["test"]
    assert 0.75 < found["las"] <= found["uas"]  # a random tree has 0.1
    assert found["sentences_per_second"] > 0
    assert 1 <= found["trees"] < 20 and 1 <= found["heads_per_word"] < 2


@pytest.mark.parametrize("trees", ["none", pytest.param("projective", marks=pytest.mark.slow)])
def test_parse_with_other_trees(tmp_path: Path, trees: str) -> None:
    result, curve = fit(tmp_path, trees=trees)
    assert curve[-1] < 0.5 * curve[0] and result["test"]["las"] > 0.75


def test_a_random_tree_learns_labels_only(tmp_path: Path) -> None:
    result, curve = fit(tmp_path, trees="random", steps=20, eval_every=20, log_every=5)
    assert curve[-1] < 0.9 * curve[0] and result["test"]["uas"] < 0.2


def test_independent_heads_are_the_trees_loss_without_trees() -> None:
    """A word's heads: itself, padding and nothing else are left out."""
    task = Parse()
    sentences = task.data(ParseConfig()).train[:4]
    torch.manual_seed(0)
    model = task.model(ParseConfig(**{**SMALL, "trees": "none"})).eval()
    batch = task.collate(sentences)
    _, arcs = model(batch)
    choices = model.choices(arcs, batch.lengths).softmax(-1)
    for i, sentence in enumerate(sentences):
        n = len(sentence.words)
        for word in range(1, n + 1):
            row = choices[i, word - 1]
            assert row[word] == 0 and (row[n + 1 :] == 0).all() and (row[: n + 1] > 0).sum() == n
    heads = model.heads(arcs, batch.lengths)
    assert torch.equal(heads, choices.argmax(-1))


def test_sentences_of_a_batch_do_not_touch() -> None:
    task = Parse()
    sentences = task.data(ParseConfig()).train[:6]
    torch.manual_seed(0)
    model = task.model(ParseConfig(**SMALL)).eval()
    _, together = model(task.collate(sentences))
    for scores, sentence in zip(together, sentences):
        _, alone = model(task.collate([sentence]))
        n = alone.shape[1]
        assert torch.allclose(scores[:n, :n], alone[0], atol=1e-5)


def test_the_loss_is_that_of_a_word() -> None:
    """Of all words together, however sentences are put in batches."""
    task = Parse()
    sentences = task.data(ParseConfig()).train[:6]
    torch.manual_seed(0)
    model = task.model(ParseConfig(**SMALL)).eval()
    together = task.loss(model, task.collate(sentences)).mean()
    words = sum(len(sentence.words) for sentence in sentences)
    one = [task.loss(model, task.collate([s])).sum() * len(s.words) for s in sentences]
    assert torch.allclose(together, torch.stack(one).sum() / words, atol=1e-5)


def write_corpus(folder: Path, splits: list[list[treebank.Parsed]]) -> None:
    folder.mkdir()
    for name, split in zip(["a-train.conllu", "a-dev.conllu", "a-test.conllu"], splits):
        lines = []
        for words, heads, labels in split:
            rows = enumerate(zip(words, heads, labels), 1)
            lines += [f"{i}\t{w}\t_\tX\t_\t_\t{h}\t{d}\t_\t_" for i, (w, h, d) in rows] + [""]
        (folder / name).write_text("\n".join(lines) + "\n")


def test_data_that_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run knows where its data were; they may be elsewhere when it is measured again."""
    (tmp_path / "here").mkdir()
    write_corpus(tmp_path / "here" / "corpus", treebank.generate((20, 5, 5)))
    small = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    run, data = tmp_path / "run", ["--corpus=corpus", f"--data={tmp_path / 'here'}"]
    train = ["train", "parse", "--steps=2", "--eval-every=2", "--device=cpu", f"--out={run}"]
    assert main([*train, *small, *data]) == 0
    (tmp_path / "here").rename(tmp_path / "there")
    capsys.readouterr()
    assert main(["evaluate", str(run), "--device=cpu"]) != 0
    assert "Say where with --data" in capsys.readouterr().err
    assert main(["evaluate", str(run), "--device=cpu", f"--data={tmp_path / 'there'}"]) == 0
    assert json.loads(capsys.readouterr().out)["split"] == "test"


def test_a_treebank_reads_as_it_was_written(tmp_path: Path) -> None:
    splits = treebank.generate((40, 10, 10))
    write_corpus(tmp_path / "corpus", splits)
    assert treebank.read(tmp_path / "corpus") == splits
    cycle = treebank.Parsed(["a", "b", "c"], [0, 3, 2], ["root", "x", "x"])
    write_corpus(tmp_path / "cycle", [[*splits[0], cycle], *splits[1:]])
    with pytest.raises(ValueError, match=r"a-train.conllu: sentence 41: .*no tree with one root"):
        treebank.read(tmp_path / "cycle")
    with pytest.raises(FileNotFoundError, match="named train"):
        treebank.read(tmp_path)
    with pytest.raises(UserError, match="loss has no effect"):
        ParseConfig(trees="none", loss="hinge").check()


@pytest.mark.parametrize("name", ["parse", "semdep", "tag"])
def test_a_treebank_in_several_files_is_read_whole(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "corpus"
    write_corpus(folder, treebank.generate((8, 2, 2)))
    lines = (folder / "a-train.conllu").read_text().replace("\t_\t_\n", "\t0:x\t_\n")
    parts = [part + "\n\n" for part in lines.strip().split("\n\n")]
    (folder / "a-train.conllu").unlink()
    (folder / "a-train-b.conllu").write_text("".join(parts[3:]))
    (folder / "a-train-a.conllu.xz").write_bytes(lzma.compress("".join(parts[:3]).encode()))
    for split in ("dev", "test"):
        (folder / f"a-{split}.conllu").write_text(parts[0])
    task = tasks.by_name(name)
    found = task.data(task.config(corpus=str(folder)))
    words = [[line.split("\t")[1] for line in part.strip().split("\n")] for part in parts]
    assert [one.words for one in found.train] == words and len(found.valid) == 1


def test_projective_trees_leave_crossing_ones_out(tmp_path: Path) -> None:
    splits = treebank.generate((20, 10, 10))
    crossing = treebank.Parsed(list("abcd"), [3, 4, 0, 3], ["x", "x", "root", "x"])
    write_corpus(tmp_path / "corpus", [[*splits[0], crossing], *splits[1:]])
    corpus = str(tmp_path / "corpus")
    assert len(Parse().data(ParseConfig(corpus=corpus)).train) == 21
    assert Parse().data(ParseConfig(corpus=corpus, trees="projective")).train == splits[0]


def test_labels_count_without_their_subtypes() -> None:
    task = Parse()
    task.facts = {"labels": ["nmod", "nmod:poss", "obl:tmod"], **facts([["a"]], 1)}
    assert task.universal.tolist() == [0, 0, 2]
    sentence = treebank.Parsed(["a"] * 4, [0, 1, 1, 1], ["nmod:of", "obl", "obl:x", "dep"])
    assert task.collate([sentence]).labels.tolist() == [[0, 2, 2, -1]]


def test_a_vocabulary_forgets_when_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = Vocabulary(facts([["a", "bc"]], 1))
    first = vocabulary.collate([["a", "Bc"], ["bc"]])
    assert first.words.tolist() == [[2, 3], [3, 0]]
    monkeypatch.setattr("structmax.data.words.MOST_FORMS", 1)
    again = vocabulary.collate([["a", "Bc"], ["bc"]])
    assert all(torch.equal(x, y) for x, y in zip(first[:5], again[:5]))


def test_parse_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus(tmp_path / "corpus", treebank.generate((100, 20, 20)))
    (tmp_path / "vectors.txt").write_text("the 1 2\na 3 4\n")
    out = tmp_path / "run"
    options = {**SMALL, "steps": 20, "eval_every": 20}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    flags += [f"--corpus={tmp_path / 'corpus'}", f"--vectors={tmp_path / 'vectors.txt'}"]
    assert main(["train", "parse", *flags, "--device=cpu", f"--out={out}"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main(["evaluate", str(out), "--device=cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["uas"] == told["test"]["uas"] > 0.4

    (tmp_path / "vectors.txt").unlink()  # a trained model needs none of the data
    (tmp_path / "in.txt").write_text("the unheard thing\n\n")
    flags = ["predict", str(out), str(tmp_path / "in.txt"), "--format=json", "--device=cpu"]
    assert main(flags) == 0
    printed = capsys.readouterr().out
    assert printed.endswith("}\n\n")
    found = json.loads(printed)
    assert found["words"] == ["the", "unheard", "thing"] and treebank.is_tree(found["heads"])
    assert sum(tree["probability"] for tree in found["trees"]) == pytest.approx(1, abs=1e-2)
    assert all(treebank.is_tree(tree["heads"]) for tree in found["trees"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "parse"
    fit(folder, steps=2, log_every=2, eval_every=2, save_every=2)
    return folder


def test_sparsemap_runs_only_where_its_trees_are_shown(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """As text, and in a terminal, there is one tree a line; JSON and pictures have more."""
    calls: list[tuple[int, int]] = []
    real = DependencyTree.sparsemap

    def counted(tree, **options):
        result = real(tree, **options)
        calls.append((result.structures.numel(), options["max_iter"]))
        return result

    monkeypatch.setattr(DependencyTree, "sparsemap", counted)
    (tmp_path / "in.txt").write_text("the bed\nthe cat of the bed\n" + "word " * 120 + "\n")
    one = [str(trained), str(tmp_path / "in.txt"), "--device=cpu"]
    assert main(["predict", *one]) == 0 and main(["show", *one]) == 0
    assert main(["show", str(trained), "--count=2"]) == 0 and not calls
    monkeypatch.setattr("structmax.train.tasks.parse.MOST_CELLS", 1 << 18)  # of the trees together
    assert main(["predict", *one, "--format=json"]) == 0
    assert len(calls) == 3 and all(cells <= 1 << 18 for cells, _ in calls)
    assert [most for _, most in calls] == [1000, 1000, 17]
    assert main(["show", *one, "--svg", str(tmp_path / "svg")]) == 0 and len(calls) == 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(
    "options",
    [{"loss": loss} for loss in LOSSES]
    + [{"trees": kind} for kind in ("projective", "none", "random")],
)
def test_parse_on_cuda(tmp_path: Path, options: dict) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in {**SMALL, **options}.items()]
    flags += ["--steps=6", "--eval-every=3", "--device=cuda", f"--out={tmp_path / 'run'}"]
    assert main(["train", "parse", *flags]) == 0
