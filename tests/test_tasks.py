"""Every recipe in its kinds: a step, what it measures, and what it answers to its own examples."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("safetensors")
pytest.importorskip("conllu")

from structmax.data.folder import DataWarning
from structmax.train import UserError, tasks
from structmax.train.config import from_dict
from structmax.train.tasks.vocabulary import Vocabulary, fill

SMALL = {
    "examples": 20,
    "valid_examples": 5,
    "test_examples": 5,
    "word_size": 8,
    "char_size": 6,
    "hidden_size": 8,
    "arc_size": 6,
    "label_size": 6,
    "layers": 1,
    "side": 3,
    "max_depth": 3,
    "pretrain": 0,
}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("toy", {}),
    ("tag", {}),
    ("tag", {"tags": "ner"}),
    ("parse", {"support": True}),
    ("parse", {"trees": "none"}),
    ("parse", {"trees": "random"}),
    ("seq2seq", {}),
    ("seq2seq", {"kind": "summary"}),
    ("seq2seq", {"output": "entmax"}),
    ("semdep", {}),
    ("semdep", {"syntax": "random"}),
    ("semdep", {"syntax": "none"}),
    ("semdep", {"syntax": "multi-task"}),
    ("semdep", {"estimator": "sparsemap"}),
    ("sst", {}),
    ("sst", {"trees": "balanced"}),
    ("sst", {"trees": "none"}),
    ("sst", {"estimator": "sparse-expectation"}),
    ("nli", {}),
    ("nli", {"alignment": "uniform"}),
    ("nli", {"encoder": "dependency", "estimator": "marginals"}),
    ("nli", {"encoder": "spinn", "estimator": "ppo:updates=2"}),
    ("explain", {"k": 2}),
    ("explain", {"k": 2, "estimator": "l2x"}),
    ("path", {"estimator": "black-box"}),
    ("path", {"method": "perturbed-loss"}),
    ("path", {"method": "no-solver"}),
    ("path", {"method": "random"}),
    ("listops", {}),
    ("listops", {"encoder": "lstm"}),
    ("listops", {"encoder": "spinn", "beam": 2}),
]


@pytest.mark.parametrize(("name", "options"), KINDS, ids=str)
def test_a_step_and_its_answers(name: str, options: dict[str, Any]) -> None:
    task = tasks.by_name(name)
    known = {f.name for f in fields(task.config)}
    small = {key: value for key, value in SMALL.items() if key in known}
    config = from_dict(task.config, {**small, **options}, source="test")
    data = task.data(config)
    torch.manual_seed(0)
    model = task.model(config)
    batch = task.collate(data.train[:6])
    for step in (task.loss, *[task.replay] * task.replays(model)):
        each = step(model, batch)
        assert each.dim() == 1 and bool(each.isfinite().all())
        each.mean().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert grads and all(bool(g.isfinite().all()) for g in grads)
    groups = [p for group in task.groups(model).values() for p in group]
    assert len(groups) == len({id(p) for p in groups}) and {id(g) for g in grads} <= {
        id(p.grad) for p in groups
    }
    used = {id(p) for p in model.parameters() if p.grad is not None or not p.requires_grad}
    if not task.has_unused(model):
        assert [n for n, p in model.named_parameters() if id(p) not in used] == []
        model.zero_grad(set_to_none=True)
        shortest = min(data.train, key=task.size)
        task.loss(model, task.collate([shortest])).sum().backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    model.eval()
    with torch.no_grad():
        assert bool(task.loss(model, batch).isfinite().all())
        assert task.metric in task.evaluate(model, [batch])
        lines = [task.line(example) for example in data.train[:3]]
        answers = list(task.predict(model, lines))
        assert len(answers) == 3 and all(type(answer["text"]) is str for answer in answers)
        assert json.loads(json.dumps(answers[0]))["text"] == answers[0]["text"]
        assert list(task.predict(model, [])) == []
        alone = [next(task.predict(model, [line])) for line in lines]
        if name != "seq2seq" and "random" not in options.values():  # near ties, or drawn
            assert [a["text"] for a in alone] == [a["text"] for a in answers]
        found = task.predict(model, [lines[0], "", lines[1]])  # an error after what is before it
        assert next(found)["text"] == alone[0]["text"] or "random" in options.values()
        with pytest.raises(ValueError, match=r"expected|must be"):
            next(found)
        with pytest.raises(ValueError, match=r"expected|must be"):
            next(task.predict(model, [""]))


FILES = {
    "parse": ("conllu", "1\ta\t_\tX\t_\t_\t0\troot\t_\t_\n"),
    "tag": ("conllu", "1\ta\t_\tX\t_\t_\t0\troot\t_\t_\n"),
    "semdep": ("conllu", "1\ta\t_\tX\t_\t_\t0\troot\t0:root\t_\n"),
    "sst": ("txt", "(3 (2 a) (3 b))\n"),
    "explain": ("txt", "(3 (2 a) (3 b))\n"),
    "nli": ("tsv", "premise\thypothesis\tlabel\na b\ta\t0\n"),
    "seq2seq": ("de", "ein Wort\n"),
    "listops": ("tsv", "9\t( ( ( [MAX 2 ) 9 ) ] )\n"),
    "align": ("ts", f"@classLabel true one two\n@data\n{','.join('1' * 24)}:two\n"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_measured_without_the_data(tmp_path: Path, name: str) -> None:
    """Its examples are of the kind that the data have, and only facts are needed of those."""
    kind, text = FILES[name]
    path = tmp_path / f"file.{kind}"
    path.write_text(text)
    (tmp_path / "file.en").write_text("a word\n")
    task, other = tasks.by_name(name), tasks.by_name(name)
    known = {f.name for f in fields(task.config)}
    config = task.config(**{key: value for key, value in SMALL.items() if key in known})
    task.data(config)
    if name == "align":
        task.facts |= {"method": "dtw", "gamma": 1.0}
    other.facts = task.facts
    model = other.model(config).eval()
    (example,) = other.read(path, config)
    with torch.no_grad():
        found = other.evaluate(model, [other.collate([example])])
    assert task.metric in found


@pytest.mark.parametrize("name", ["sst", "explain", "nli", "tag", "align"])
def test_one_class_is_a_warning(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = tasks.by_name(name)
    module = sys.modules[type(task).__module__]
    real = module.generate

    def one(*given: Any) -> Any:
        made = real(*given)
        if name == "align":
            return made._replace(series=made.series[:4], labels=made.labels[:4], classes=["one"])
        if name == "tag":
            return made._replace(train=[s._replace(tags=["X"] * len(s.tags)) for s in made.train])
        return made._replace(train=[e for e in made.train if e.label == 1])

    monkeypatch.setattr(module, "generate", one)
    with pytest.warns(DataWarning, match=r"all training examples have one class, '\w+': there is"):
        task.data(task.config())


def test_given_vectors_are_counted(tmp_path: Path) -> None:
    (tmp_path / "v.txt").write_text("the 1 2\nword1 3 4\nnowhere 5 6\n")
    for name in ("parse", "explain"):
        task = tasks.by_name(name)
        task.data(task.config(vectors=str(tmp_path / "v.txt"), examples=50))
        (note,) = task.notes
        assert re.fullmatch(r"vectors: .*v\.txt has 1 of the \d+ (training )?words.*", note), note


def test_given_trees_are_not_guessed(tmp_path: Path) -> None:
    """A model that was trained along given trees has none for a line."""
    task = tasks.by_name("semdep")
    config = from_dict(task.config, {"syntax": "gold", "examples": 5}, source="test")
    task.data(config)
    with pytest.raises(ValueError, match="has none for a line"):
        next(task.predict(task.model(config), ["a b"]))
    sst = tasks.by_name("sst")
    sst.facts = {"trees": "file"}
    with pytest.raises(ValueError, match="has none for a line"):
        next(sst.predict(torch.nn.Linear(1, 1), ["a b"]))
    (tmp_path / "train.conllu").touch()
    with pytest.raises(FileNotFoundError, match=r"no \.conllu file named dev"):
        task.data(from_dict(task.config, {"corpus": str(tmp_path)}, source="test"))


def test_options_that_are_refused() -> None:
    explain = tasks.by_name("explain")
    with pytest.raises(UserError, match="k must be at least 1, got 0"):
        from_dict(explain.config, {"k": 0}, source="test")
    config = from_dict(explain.config, {"estimator": "l2x:heat=1"}, source="test")
    explain.data(config)
    with pytest.raises(UserError, match=r"expected l2x:temperature=NUMBER, got 'l2x:heat=1'"):
        explain.model(config)
    with pytest.raises(ValueError, match=r"word vectors have 2 numbers, .* Add --word-size 2"):
        fill(torch.nn.Embedding(3, 5), Vocabulary([]), {"a": np.zeros(2)})


def test_a_file_of_few_expressions(tmp_path: Path) -> None:
    task, path = tasks.by_name("listops"), tmp_path / "train.tsv"
    path.write_text("9\t( ( ( [MAX 2 ) 9 ) ] )\n" * 5)
    options = {"train_file": str(path), "valid_examples": 5, "test_examples": 2, "max_depth": 2}
    with pytest.raises(UserError, match="must have more than 5 lines"):
        task.data(from_dict(task.config, options, source="test"))
    options["valid_examples"] = 2
    data = task.data(from_dict(task.config, options, source="test"))
    assert len(data.train) == 3 and len(data.valid) == 2
