"""The recipe ``sst`` on its tiny generated set, and its classifier."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("safetensors")
pytest.importorskip("conllu")

import structmax as sx
from structmax.cli import main
from structmax.nn import DependencyClassifier
from structmax.train import Trainer, UserError
from structmax.train.metrics import read_log
from structmax.train.tasks.heads import balanced, left, random, right
from structmax.train.tasks.sst import SST, SSTConfig, generate

SMALL = {
    "steps": 80,
    "log_every": 10,
    "eval_every": 40,
    "save_every": 80,
    "lr": 1e-2,
    "word_size": 16,
    "hidden_size": 16,
    "dropout": 0.0,
    "word_dropout": 0.0,
}
ESTIMATORS = [
    ("sparse-expectation:max_iter=10", "child-sum"),
    ("perturb-and-map", "child-sum"),
    ("perturb-and-parse:hard=true", "child-sum"),
    ("perturb-and-parse", "gcn"),
    ("spigot", "child-sum"),
    ("straight-through", "gcn"),
    ("marginals", "gcn"),
]


def slow_but(first, cases):
    return [
        case if case == first else pytest.param(*case, marks=pytest.mark.slow) for case in cases
    ]


def fit(folder: Path, **options) -> tuple[dict, list[float]]:
    """The result of a small run, and its losses as they fell."""
    result = Trainer(SST(), SSTConfig(**{**SMALL, **options}), folder, silent=True).fit()
    return result, [line["loss"] for line in read_log(folder) if line["kind"] == "train"]


@pytest.mark.parametrize(("estimator", "composer"), slow_but(ESTIMATORS[0], ESTIMATORS))
def test_latent_trees_learn(tmp_path: Path, estimator: str, composer: str) -> None:
    result, curve = fit(tmp_path, estimator=estimator, composer=composer)
    assert curve[-1] < 0.8 * curve[0]
    assert result["test"]["accuracy"] > 0.65  # of two classes
    assert ("trees" in result["test"]) == ("sparse" in estimator)


@pytest.mark.parametrize(
    ("trees", "composer"),
    slow_but(
        ("balanced", "child-sum"),
        [
            ("balanced", "child-sum"),
            ("left", "child-sum"),
            ("flat", "child-sum"),
            ("random", "gcn"),
            ("none", "child-sum"),
            ("graph", "gcn"),
        ],
    ),
)
def test_other_trees_learn(tmp_path: Path, trees: str, composer: str) -> None:
    steps = 160 if trees == "flat" else SMALL["steps"]  # a tree of one level learns more slowly
    result, curve = fit(tmp_path, trees=trees, composer=composer, steps=steps)
    assert curve[-1] < 0.8 * curve[0]
    assert result["test"]["accuracy"] > 0.65


def batch_of(**options):
    """A model, and a batch of some sentences."""
    task, config = SST(), SSTConfig(**{**SMALL, **options})
    examples = task.data(config).train[:6]
    torch.manual_seed(0)
    return task.model(config), task.collate(examples), task, examples


@pytest.mark.parametrize(
    ("estimator", "composer", "trees"),
    [(*row, "latent") for row in ESTIMATORS]
    + [
        ("straight-through", "gcn", "graph"),
        pytest.param("spigot", "gcn", "graph", marks=pytest.mark.slow),
    ],
)
def test_the_parser_gets_a_gradient(estimator: str, composer: str, trees: str) -> None:
    model, batch, task, _ = batch_of(estimator=estimator, composer=composer, trees=trees)
    losses = task.loss(model, batch)
    assert losses.shape == batch.labels.shape
    losses.mean().backward()
    parser = model.parser_parameters()
    assert parser and all(p.grad is not None and p.grad.isfinite().all() for p in parser)
    assert sum(float(p.grad.abs().sum()) for p in parser) > 0


@pytest.mark.parametrize("options", [{}, {"trees": "none"}, {"trees": "random"}, {"context": True}])
def test_sentences_of_a_batch_do_not_touch(options) -> None:
    model, batch, task, examples = batch_of(**options)
    model.eval()
    together = model(*batch[:2], heads=batch.heads, estimator=model.estimator)
    for i, example in enumerate(examples):
        alone = task.collate([example])
        heads = None if batch.heads is None else batch.heads[i : i + 1, : len(example.words)]
        found = model(*alone[:2], heads=heads, estimator=model.estimator)
        assert torch.allclose(found[0], together[i], atol=1e-5)


@pytest.mark.parametrize("estimator", ["pipeline", "straight-through"])
def test_graphs_are_learned_first(tmp_path: Path, estimator: str) -> None:
    """From a treebank; after that a pipeline leaves the parser as it is."""
    rows = ["1\tthe\t_\t_\t_\t_\t2\t_\t2:x\t_", "2\tfox\t_\t_\t_\t_\t0\t_\t0:root\t_"]
    rows += ["3\truns\t_\t_\t_\t_\t2\t_\t1:x|2:x\t_", ""]
    folder = tmp_path / "graphs"
    folder.mkdir()
    for name in ("train", "dev", "test"):
        (folder / f"{name}.conllu").write_text("\n".join(rows * 9) + "\n")
    options = {"trees": "graph", "composer": "gcn", "graphs": str(folder), "pretrain": 40}
    model, batch, task, _ = batch_of(**options, estimator=estimator, word_dropout=0.0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    curve = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = task.loss(model, batch).mean()
        loss.backward()
        optimizer.step()
        curve.append(float(loss.detach()))
    assert curve[-1] < 0.5 * curve[0]
    numbers = torch.tensor([task.vocabulary.numbers(["the", "fox", "runs"])])
    scores = model.eval().arcs(numbers, torch.tensor([3]))[0, 1:, 1:]
    gold = torch.tensor([[0, 0, 1], [1, 0, 1], [0, 0, 0]], dtype=torch.bool)
    off = ~torch.eye(3, dtype=torch.bool)
    assert torch.equal((scores > 0)[off], gold[off])
    model.train().zero_grad()
    task.loss(model, batch).mean().backward()  # of sentences, from now on
    moved = sum(float(p.grad.abs().sum()) for p in model.parser_parameters() if p.grad is not None)
    assert (moved > 0) == (estimator != "pipeline")


def test_predictions_are_mixtures_over_trees() -> None:
    model, batch, _, _ = batch_of()
    estimator = sx.estimators.SparseExpectation()
    found = model(*batch[:2], estimator=estimator).exp()
    sparse = model.structure(*batch[:2]).sparsemap()
    assert int(sparse.num_active.max()) > 1
    for i in range(len(found)):
        mean = torch.zeros(2)
        for p, z in zip(sparse.probs[i], sparse.structures[i]):
            heads = z[:, 1:].argmax(0)[None, : int(batch.lengths[i])]
            inputs = batch.words[i : i + 1, : heads.shape[1]], batch.lengths[i : i + 1]
            mean += p.float() * model(*inputs, heads=heads).exp()[0]
        assert torch.allclose(found[i], mean, atol=1e-5)
    # the loss in training is the expected one, not that of the mixture
    losses = model(*batch[:3], estimator=estimator)
    assert (losses >= -found.gather(1, batch.labels[:, None])[:, 0].log() - 1e-5).all()


def test_fixed_trees() -> None:
    for n in range(1, 9):
        for heads in (left(n), right(n), balanced(n), random(torch.tensor([n]))[0].tolist()):
            tree = sx.DependencyTree(torch.zeros(n + 1, n + 1))
            assert tree.log_prob(torch.tensor(heads)) > -torch.inf
    assert balanced(7) == [2, 4, 2, 0, 6, 4, 6]


def write_trees(path: Path, examples) -> None:
    lines = []
    for example in examples:
        rows = enumerate(zip(example.words, left(len(example.words))), 1)
        lines += [f"{i}\t{word}\t_\t_\t_\t_\t{head}\t_\t_\t_" for i, (word, head) in rows] + [""]
    path.write_text("\n".join(lines) + "\n")


def test_trees_of_a_file(tmp_path: Path) -> None:
    splits = generate(SSTConfig())
    path = tmp_path / "trees.conllu"
    write_trees(path, [example for split in splits for example in split])
    read, fixed = SST(), SST()
    examples = read.data(SSTConfig(trees="file", trees_file=str(path))).train[:9]
    plain = fixed.data(SSTConfig(trees="left")).train[:9]
    assert torch.equal(read.collate(examples).heads, fixed.collate(plain).heads)
    rows = tmp_path / "trees.jsonl"
    lines = [
        json.dumps({"words": example.words, "heads": left(len(example.words))})
        for split in splits
        for example in split
    ]
    rows.write_text("\n".join(lines) + "\n")
    assert read.data(SSTConfig(trees="file", trees_file=str(rows))).train[:9] == examples
    rows.write_text(lines[0] + "\n[]\n")
    with pytest.raises(ValueError, match="jsonl:2: expected an object"):
        read.data(SSTConfig(trees="file", trees_file=str(rows)))
    rows.write_text(lines[0] + '\n{"words": ["a", "b", "c"], "heads": [0, 3, 2]}\n')
    with pytest.raises(ValueError, match=r"jsonl:2: heads must form no cycle, got \[0, 3, 2\]"):
        read.data(SSTConfig(trees="file", trees_file=str(rows)))
    path.write_text("".join(f"{i}\ta\t_\t_\t_\t_\t{3 - i}\t_\t_\t_\n" for i in (1, 2)))
    with pytest.raises(ValueError, match=r"conllu: sentence 1: heads must form no cycle"):
        read.data(SSTConfig(trees="file", trees_file=str(path)))
    write_trees(path, splits.train)
    with pytest.raises(ValueError, match="has no tree of a sentence"):
        read.data(SSTConfig(trees="file", trees_file=str(path)))
    with pytest.raises(UserError, match="go together"):
        SSTConfig(trees="file").check()
    with pytest.raises(UserError, match="of --trees graph alone"):
        SSTConfig(graphs="ud").check()
    with pytest.raises(UserError, match="needs --graphs"):
        SSTConfig(trees="graph", estimator="pipeline").check()


def test_graphs_have_an_estimator(tmp_path: Path) -> None:
    result, _ = fit(tmp_path, trees="graph", composer="gcn", steps=2, eval_every=2, examples=40)
    assert 0 <= result["test"]["accuracy"] <= 1


def test_sst_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "sst", tmp_path / "run"
    folder.mkdir()
    for name, split in zip(("train", "dev", "test"), generate(SSTConfig(examples=60))):
        lines = []
        for words, label, _ in split:
            tree = f"(2 {words[0]})"
            for word in words[1:-1]:
                tree = f"(2 {tree} (2 {word}))"
            lines.append(f"({4 * label} {tree} (2 {words[-1]}))")
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "vectors.txt").write_text(f"not {'1 ' * 15}2\n")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    flags += [f"--corpus={folder}", f"--vectors={tmp_path / 'vectors.txt'}", "--steps=20"]
    assert main(["train", "sst", *flags, "--device=cpu", f"--out={out}"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main(["evaluate", str(out), "--device=cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == told["test"]["accuracy"]
    (tmp_path / "in.txt").write_text("an unheard thing\n\n")
    flags = ["predict", str(out), str(tmp_path / "in.txt"), "--format=json", "--device=cpu"]
    assert main(flags) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith("}\n\n")  # an empty line for an empty line
    found = json.loads(printed.out)
    assert found["label"] in ("negative", "positive") and 0 <= found["positive"] <= 1
    assert sorted(found["heads"]).count(0) == 1
    chance = found["positive"] if found["label"] == "positive" else 1 - found["positive"]
    assert chance >= 0.5 and found["text"] == f"{found['label']} {chance:.3f}"


def test_sst_refuses() -> None:
    task = SST()
    for options, words in [
        ({"estimator": "marginals"}, "Add --composer gcn"),
        ({"estimator": "nothing"}, "there is no estimator"),
        *(
            ({"trees": "graph", "composer": "gcn", "estimator": name}, "no z.* These do: .*spigot")
            for name in ("reinforce", "top-k-expectation", "sparse-expectation:max_iter=10")
        ),
        (
            {"trees": "graph", "composer": "gcn", "estimator": "imle:samples=2"},
            "several z, and one is needed. Leave out samples",
        ),
    ]:
        config = SSTConfig(**options)
        task.data(config)
        with pytest.raises(UserError, match=words):
            task.model(config)
    with pytest.raises(ValueError, match="kind must be"):
        DependencyClassifier(5, 2, "tree")
    with pytest.raises(ValueError, match="no leaves"):
        DependencyClassifier(5, 2, "graph")
    with pytest.raises(ValueError, match="must be given"):
        DependencyClassifier(5, 2, "given")(torch.ones(1, 2).long(), torch.tensor([2]))
