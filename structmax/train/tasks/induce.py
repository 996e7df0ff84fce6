"""Is it syntax? The latent trees of trained models against parses and against trivial trees.

Williams, Drozdov & Bowman, "Do latent tree learning models identify meaningful structure in
sentences?", TACL 2018.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structmax.data import find_data
from structmax.draw.arcs_svg import arcs_svg
from structmax.draw.tree_svg import page
from structmax.nn.dependency_classifier import DependencyClassifier
from structmax.train import checkpoint, run
from structmax.train.config import TrainConfig, option
from structmax.train.distributed import Workers
from structmax.train.errors import UserError, as_user_error
from structmax.train.progress import Progress
from structmax.train.task import Splits, Task
from structmax.train.tasks import heads, sst
from structmax.train.tasks.vocabulary import pad

TOGETHER = 64  # sentences at a time


@dataclass
class InduceConfig(TrainConfig):
    """The options of ``induce``."""

    runs: str = option(
        "", "Runs with latent dependency trees, by commas; none: two tiny ones.", fixed=True
    )
    parses: str = option(
        "", "CoNLL-U file, or .jsonl with words and heads, to compare with.", fixed=True, data=True
    )
    data: str = option("", "Folder of data sets; else $STRUCTMAX_DATA, or beside the checkout.")
    most_words: int = option(40, "Leave out longer sentences.", fixed=True)
    pictures: int = option(
        10, "So many sentences are drawn, with the trees that SparseMAP selects.", fixed=True
    )

    def check(self) -> None:
        super().check()
        if bool(self.runs) != bool(self.parses):
            raise UserError("--runs RUN,RUN and --parses FILE go together.")


class Reference(NamedTuple):
    """Words, and their heads in the parse to compare with."""

    words: list[str]
    heads: list[int]


class Found(NamedTuple):
    """Of all sentences, one after the other: the heads in a model's trees, the log-probability that
    it gives to the reference, and how many trees SparseMAP keeps."""

    heads: list[list[int]]
    log_probs: list[float]
    trees: list[int]


class Induce(Task):
    """The latent trees of trained models against parses, trivial trees and each other."""

    name = "induce"
    config = InduceConfig
    metric = "uas"

    def data(self, config: InduceConfig) -> Splits:
        if not config.parses:  # those of sst's tiny set, each word below the next
            tiny = sst.generate(sst.SSTConfig()).valid
            return Splits((), (), [Reference(e.words, heads.left(len(e.words))) for e in tiny])
        path = find_data(config.parses, config.data)
        found = []
        for words, given in heads.read(path):
            if None in given:
                raise ValueError(f"{path}: a sentence has words without heads: {words}.")
            if 1 < len(words) <= config.most_words:
                found.append(Reference(words, given))  # type: ignore[arg-type]
        if not found:
            raise ValueError(f"{path} has no sentence of 2 to {config.most_words} words.")
        return Splits((), (), found)

    def fit(
        self, config: InduceConfig, folder: Path, resume: bool, workers: Workers
    ) -> dict[str, Any]:
        """Compare; a table, numbers and pictures are in the folder then."""
        if not workers.first:
            return {}
        with as_user_error():
            references = self.data(config).test
        models = {}
        if config.runs:  # before there is a folder, which a second try would find
            models = load([Path(name) for name in config.runs.split(",")], workers)
        alone = Workers(workers.device)
        with run.hold(self, config, folder, resume, "result.json", alone) as finished:
            if finished:
                return run.read_result(folder)
            return self._compare(config, folder, references, models or load(tiny(folder), workers))

    def _compare(
        self,
        config: InduceConfig,
        folder: Path,
        references: Sequence[Reference],
        models: dict[Path, tuple[Any, DependencyClassifier]],
    ) -> dict[str, Any]:
        progress, found = Progress(self.name), {}
        for path, (task, model) in models.items():
            found[str(path)] = look(task, model, references)
            progress.say(f"{path}: {len(references)} sentences")
            if len(found) == 1:
                drawn = pictures(task, model, references[: config.pictures])
                text = page(str(path), drawn)
                checkpoint.write_atomic(folder / "support.html", text.encode())
        result = {"task": self.name, "sentences": len(references), **compare(references, found)}
        run.write_result(folder, result, table(result["rows"]))
        progress.say(table(result["rows"]))
        return result


def load(paths: Sequence[Path], workers: Workers) -> dict[Path, tuple[Any, DependencyClassifier]]:
    """The tasks and models of some runs."""
    found = {}
    for path in paths:
        trained = run.load(path, workers.device)
        model = trained.model
        if not isinstance(model, DependencyClassifier) or model.kind != "latent":
            raise UserError(f"{path} has no latent dependency trees.")
        found[path] = trained.task, model
    return found


def tiny(folder: Path) -> list[Path]:
    """Two small models of ``sst``, trained on its tiny set."""
    from structmax.train.trainer import Trainer

    paths = [folder / f"model-{seed}" for seed in range(2)]
    for seed, path in enumerate(paths):
        config = sst.SSTConfig(
            seed=seed, steps=10, lr=0.01, word_size=16, hidden_size=16, dropout=0.0
        )
        Trainer(sst.SST(), config, path, silent=True).fit()
    return paths


# -- what a model finds ---------------------------------------------------------------------------


def _inputs(task: Any, model: Any, references: Sequence[Reference]) -> tuple[Tensor, Tensor]:
    rows = [task.vocabulary.numbers(word.lower() for word in r.words) for r in references]
    device = next(model.parameters()).device
    return pad(rows).to(device), torch.tensor([len(row) for row in rows], device=device)


@torch.no_grad()
def look(task: Any, model: Any, references: Sequence[Reference]) -> Found:
    """A model's best trees, and what it thinks of the reference."""
    found = Found([], [], [])
    for start in range(0, len(references), TOGETHER):
        some = references[start : start + TOGETHER]
        words, lengths = _inputs(task, model, some)
        tree = model.structure(words, lengths).to("cpu")
        rows = tree.argmax()[:, :, 1:].argmax(1).tolist()
        found.heads.extend(row[: len(r.words)] for row, r in zip(rows, some))
        found.log_probs.extend(tree.log_prob(pad([r.heads for r in some])).tolist())
        found.trees.extend(tree.sparsemap().num_active.tolist())
    return found


@torch.no_grad()
def pictures(task: Any, model: Any, references: Sequence[Reference]) -> list[tuple[str, str]]:
    """For each sentence, the probabilities of arcs over the trees that SparseMAP keeps."""
    drawn: list[tuple[str, str]] = []
    for reference in references:
        tree = model.structure(*_inputs(task, model, [reference])).to("cpu")
        sparse = tree.sparsemap()
        mean = sparse.marginals[0]
        arcs = [(h, m, float(mean[h, m])) for h, m in mean.nonzero().tolist()]
        chances = sorted((p for p in sparse.probs[0].tolist() if p > 0), reverse=True)
        caption = "trees: " + ", ".join(f"{p:.2f}" for p in chances)
        drawn.append((caption, arcs_svg(reference.words, arcs)))
    return drawn


# -- comparing ------------------------------------------------------------------------------------


def trivial(references: Sequence[Reference]) -> dict[str, list[list[int]]]:
    """Heads by simple rules: the next word, the one before, halves, and any tree."""
    sizes = [len(r.words) for r in references]
    random = []
    for start in range(0, len(sizes), TOGETHER):
        some = sizes[start : start + TOGETHER]
        rows = heads.random(torch.tensor(some), torch.Generator().manual_seed(start)).tolist()
        random += [row[:size] for row, size in zip(rows, some)]
    rules = {name: [heads.RULES[name](n) for n in sizes] for name in ("left", "right", "balanced")}
    return {**rules, "random": random}


def attachment(mine: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """The share of words with the same head.

    >>> attachment([[2, 0], [0]], [[0, 1], [0]])
    0.3333333333333333
    """
    same = [a == b for x, y in zip(mine, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(same) / len(same)


def undirected(mine: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """The share of arcs between words that the others have too, in either direction.

    >>> undirected([[2, 0, 2]], [[0, 1, 1]])
    0.5
    """

    def edges(tree: Sequence[int]) -> set[frozenset[int]]:
        return {frozenset((word, head)) for word, head in enumerate(tree, 1) if head}

    pairs = [(edges(x), edges(y)) for x, y in zip(mine, theirs, strict=True)]
    return sum(len(x & y) for x, y in pairs) / max(sum(len(y) for _, y in pairs), 1)


def compare(references: Sequence[Reference], found: dict[str, Found]) -> dict[str, Any]:
    """A row for each model and for each simple rule, and how much models agree."""
    gold, words = [r.heads for r in references], sum(len(r.words) for r in references)
    simple = trivial(references)
    every = {**{name: f.heads for name, f in found.items()}, **simple}
    rows = []
    for name, trees in every.items():
        row: dict[str, Any] = {"trees": name, "uas": attachment(trees, gold)}
        row["undirected"] = undirected(trees, gold)
        if name in found:
            row |= {f"like_{rule}": attachment(trees, other) for rule, other in simple.items()}
            row["log_prob_per_word"] = sum(found[name].log_probs) / words
            row["kept_trees"] = sum(found[name].trees) / len(gold)
        rows.append({k: v if isinstance(v, str) else round(v, 4) for k, v in row.items()})
    pairs = [attachment(a.heads, b.heads) for a, b in itertools.combinations(found.values(), 2)]
    agreement = round(sum(pairs) / len(pairs), 4) if pairs else None
    return {"rows": rows, "agreement": agreement}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, ["---"] * len(names), *([str(r.get(n, "")) for n in names] for r in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
