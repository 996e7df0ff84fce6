"""Sentiment of sentences along latent dependency trees, from the labels of sentences alone.

Niculae, Martins & Cardie, "Towards dynamic computation graphs via sparse latent structure", EMNLP
2018: a parser scores arcs, a Tree-LSTM composes along each tree that SparseMAP selects. The other
estimators, fixed trees and no tree at all take the same words to the same classifier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from structmax.data import find_data
from structmax.data import sst as treebank
from structmax.data.folder import quoted, read_splits
from structmax.data.words import words_between_spaces
from structmax.estimators import SparseExpectation
from structmax.nn.dependency_classifier import DependencyClassifier
from structmax.train.batches import move
from structmax.train.config import TrainConfig, option
from structmax.train.errors import UserError
from structmax.train.estimator import estimator_of
from structmax.train.metrics import Ratio
from structmax.train.task import Splits, Task, warn_of_one_class
from structmax.train.tasks import heads, semdep
from structmax.train.tasks.vocabulary import UNKNOWN, Vocabulary, fill, pad, read_vectors

LABELS = ("negative", "positive")


@dataclass
class SSTConfig(TrainConfig):
    """The options of ``sst``."""

    steps: int = option(1600, "Train for this many updates; 0: no limit.")
    batch_size: int = option(64, "Examples per update and worker.")
    lr: float = option(1e-3, "Learning rate of all but the parser.")
    clip: float = option(5.0, "Largest norm of the gradient of parser and of composer; 0: any.")
    eval_every: int = option(54, "Updates between evaluations on the validation split.")
    corpus: str = option(
        "",
        "Folder of train, dev and test files, sst; none: a tiny generated set.",
        fixed=True,
        data=True,
    )
    data: str = option("", "Folder of data sets; else $STRUCTMAX_DATA, or beside the checkout.")
    vectors: str = option(
        "", "File of word vectors, such as glove/glove6B100d_subset.txt.", fixed=True, data=True
    )
    trees: Literal["latent", "graph", "flat", "left", "balanced", "random", "file", "none"] = (
        option(
            "latent",
            "Where trees come from; graph: any number of heads, latent too; none: a BiLSTM.",
            fixed=True,
        )
    )
    trees_file: str = option(
        "",
        "Parses of all sentences, for --trees file: CoNLL-U, or .jsonl with words and heads.",
        fixed=True,
        data=True,
    )
    estimator: str = option(
        "",
        "How latent trees are trained: NAME or NAME:OPTION=VALUE,OPTION=VALUE; pipeline: no "
        "further than on --graphs. None: sparse-expectation:max_iter=10, or of graphs, which need "
        "a z, straight-through.",
    )
    graphs: str = option(
        "",
        "Treebank with enhanced graphs, to train the parser of --trees graph on first.",
        fixed=True,
        data=True,
    )
    pretrain: int = option(1000, "Updates on --graphs, before all others.")
    composer: Literal["child-sum", "gcn"] = option("child-sum", "What reads the tree.")
    projective: bool = option(False, "Let no arcs of latent trees cross.")
    context: bool = option(False, "Let the composer see words in context, by a BiLSTM.")
    examples: int = option(400, "Training sentences to generate.", fixed=True)
    word_size: int = option(100, "Size of the words' vectors.")
    hidden_size: int = option(150, "Size of the states.")
    dropout: float = option(0.5, "Probability of dropout of words' vectors and of the sentence.")
    word_dropout: float = option(0.1, "Probability that a training word is taken for unknown.")

    def check(self) -> None:
        super().check()
        if (self.trees == "file") != bool(self.trees_file):
            raise UserError("--trees file and --trees-file FILE go together.")
        if self.graphs and self.trees != "graph":
            raise UserError("--graphs trains the parser of --trees graph alone.")
        if self.estimator == "pipeline" and not self.graphs:
            raise UserError("--estimator pipeline needs --graphs, or its parser learns nothing.")


class Example(NamedTuple):
    """Words, the label, and heads where trees come from a file."""

    words: list[str]
    label: int
    heads: list[int]


class Batch(NamedTuple):
    """Numbers of words ``(B, n)``, lengths and labels ``(B)``, heads ``(B, n)`` of given trees."""

    words: Tensor
    lengths: Tensor
    labels: Tensor
    heads: Tensor | None


class SST(Task):
    """Sentiment of a sentence along a latent dependency tree."""

    name = "sst"
    config = SSTConfig
    metric = "accuracy"

    def data(self, config: SSTConfig) -> Splits:
        splits = read(config) if config.corpus else generate(config)
        if config.trees_file:
            splits = with_trees(splits, config)
        warn_of_one_class(LABELS[example.label] for example in splits.train)
        words = [[word.lower() for word in e.words] for split in splits for e in split]
        self.graphs = read_graphs(config) if config.graphs else []
        words += [[word.lower() for word in g.words] for g in self.graphs]
        # of dev, test and graphs, only words with a given vector are of use
        self.vectors = read_vectors(
            config.vectors, config.data, {w for row in words for w in row}, self.notes
        )
        trained = Vocabulary.of(words[: len(splits.train)], least_count=2)
        self.facts = {"words": sorted({*self.vectors, *trained.words}), "trees": config.trees}
        self.__dict__.pop("vocabulary", None)
        return splits

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.facts["words"])

    def model(self, config: SSTConfig) -> nn.Module:
        kind = config.trees if config.trees in ("latent", "graph", "none") else "given"
        model: Any = DependencyClassifier(
            len(self.vocabulary),
            len(LABELS),
            kind,
            config.composer,
            config.word_size,
            config.hidden_size,
            config.context,
            config.projective,
            config.dropout,
        )
        # none where a checkpoint will give them
        fill(model.embedding, self.vocabulary, getattr(self, "vectors", {}))
        model.estimator, model.word_dropout = None, config.word_dropout
        model.pretrain = config.pretrain if config.graphs else 0
        if model.pretrain:  # resumed with the run
            model.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        if kind in ("latent", "graph") and config.estimator != "pipeline":
            structure = model.structure(torch.ones(1, 2, dtype=torch.int64), torch.tensor([2]))
            usual = "straight-through" if kind == "graph" else "sparse-expectation:max_iter=10"
            chosen = config.estimator or usual
            model.estimator = estimator_of(chosen, structure, one_z=kind == "graph")
            relaxed = model.estimator.objective == "L(E[z])"
            if kind == "latent" and relaxed and config.composer == "child-sum":
                raise UserError(
                    f"estimator {config.estimator} gives means of trees, and a child-sum Tree-LSTM "
                    "needs trees. Add --composer gcn."
                )
        return model

    def size(self, example: Any) -> int:
        return len(example.words)

    def collate(self, examples: Sequence[Any]) -> Batch:
        lengths = torch.tensor([len(example.words) for example in examples])
        rows = [self.vocabulary.numbers(w.lower() for w in e.words) for e in examples]
        return Batch(
            pad(rows),
            lengths,
            torch.tensor([example.label for example in examples]),
            self._heads(examples, lengths),
        )

    def _heads(self, examples: Sequence[Any], lengths: Tensor) -> Tensor | None:
        kind = self.facts["trees"]
        if kind == "file":
            return pad([example.heads for example in examples])
        if kind == "random":  # anew each time
            return heads.random(lengths)
        rule = heads.RULES.get(kind)
        return pad([rule(n) for n in lengths.tolist()]) if rule else None

    def loss(self, model: Any, batch: Batch) -> Tensor:
        if model.pretrain and int(model.updates) < model.pretrain:
            model.updates += 1
            return self._graph_loss(model, int(model.updates), batch)
        dropped = torch.rand(batch.words.shape, device=batch.words.device) < model.word_dropout
        words = batch.words.where(~dropped, UNKNOWN)
        return model(words, *batch[1:], estimator=model.estimator)

    def _graph_loss(self, model: Any, update: int, batch: Batch) -> Tensor:
        """The log loss of the heads of each word, in as many other sentences as the batch has."""
        first = update * len(batch.words) % len(self.graphs)
        some = [*self.graphs, *self.graphs][first : first + len(batch.words)]
        lengths = torch.tensor([len(g.words) for g in some])
        n = int(lengths.max())
        arcs = torch.zeros(len(some), n + 1, n + 1)
        for item, graph in enumerate(some):
            arcs[item, *torch.tensor(graph.arcs).T] = 1.0
        words = pad([self.vocabulary.numbers(w.lower() for w in g.words) for g in some])
        words, lengths, arcs = (t.to(batch.words.device) for t in (words, lengths, arcs))
        at = torch.arange(n, device=words.device)
        inside = at < lengths[:, None]
        used = inside[:, None] & inside[:, :, None] & (at[:, None] != at)
        scores = model.arcs(words, lengths)[:, 1:, 1:]
        each = nn.functional.binary_cross_entropy_with_logits(
            scores, arcs[:, 1:, 1:], reduction="none"
        )
        return torch.where(used, each, 0.0).sum((1, 2)) / lengths

    def evaluate(self, model: Any, batches: Iterable[Batch]) -> dict[str, Ratio | float]:
        right = sentences = trees = 0
        for words, lengths, labels, given in batches:
            found = model(words, lengths, heads=given, estimator=model.estimator).argmax(-1)
            right += int((found == labels).sum())
            sentences += len(labels)
            if isinstance(model.estimator, SparseExpectation):
                structure = model.structure(words, lengths, model.estimator)
                sparse = structure.sparsemap(**model.estimator.options)
                trees += int(sparse.num_active.sum())
        measures: dict[str, Ratio | float] = {"accuracy": Ratio(right, sentences)}
        return {**measures, "trees": Ratio(trees, sentences)} if trees else measures

    def read(self, path: Path, config: SSTConfig) -> list[Example]:
        found = read_file(path)
        return [*map(trees_of(config), found)] if config.trees_file else found

    def line(self, example: Any) -> str:
        return " ".join(example.words)

    def predict(self, model: Any, lines: Sequence[str]) -> Iterator[dict[str, Any]]:
        if self.facts["trees"] == "file":
            raise ValueError("this model was trained along given trees and has none for a line.")
        device = next(model.parameters()).device
        for line in lines:
            words = words_between_spaces(line)
            batch = move(self.collate([Example(words, 0, [])]), device)
            inputs = batch.words, batch.lengths
            (p,) = model(*inputs, heads=batch.heads, estimator=model.estimator).exp().tolist()
            label = LABELS[int(p[1] > p[0])]
            found = {"words": words, "label": label, "positive": round(p[1], 4)}
            if model.kind == "latent":
                (found["heads"],) = model.parse(*inputs).tolist()
            elif batch.heads is not None:
                (found["heads"],) = batch.heads.tolist()
            yield {**found, "text": f"{label} {max(p):.3f}"}


# -- trees ----------------------------------------------------------------------------------------


def with_trees(splits: Splits, config: SSTConfig) -> Splits:
    """The splits with the heads that a file of parses has for their sentences."""
    look_up = trees_of(config)
    return Splits(*([look_up(example) for example in split] for split in splits))


def trees_of(config: SSTConfig) -> Callable[[Example], Example]:
    """What gives an example the heads that a file of parses has for its sentence."""
    path = find_data(config.trees_file, config.data)
    trees = {tuple(words): given for words, given in heads.read(path)}

    def look_up(example: Example) -> Example:
        found = [head for head in trees.get(tuple(example.words), []) if head is not None]
        if len(found) < len(example.words):
            text = " ".join(example.words)
            raise ValueError(
                f"{path} has no tree of a sentence of {config.corpus}: {quoted(text)}."
            )
        return example._replace(heads=found)

    return look_up


# -- data -----------------------------------------------------------------------------------------


def read_graphs(config: SSTConfig) -> list[Any]:
    """The training sentences of a treebank, next to others of about their length."""
    graphs = semdep.read(semdep.SemDepConfig(corpus=config.graphs, data=config.data)).train
    rng = np.random.default_rng(config.seed)
    order = np.argsort([len(g.words) for g in graphs], kind="stable")
    groups = np.array_split(order, max(1, len(order) // config.batch_size))
    return [graphs[i] for group in rng.permutation(len(groups)) for i in groups[group]]


def read(config: SSTConfig) -> Splits:
    """The splits of the treebank: whole sentences, without neutral ones."""
    return Splits(*read_splits(config.corpus, config.data, ".txt", read_file))


def read_file(path: Path) -> list[Example]:
    """The sentences of a file that are not neutral."""
    return [Example(p.words, p.label, []) for p in treebank.read(path, binary=True)]


def generate(config: SSTConfig) -> Splits:
    """Sentences of made-up words, one of them good or bad; "not" before it turns it round."""
    rng = np.random.default_rng(config.seed)
    stems = ["".join(rng.choice(list("bdgklmnprst"), 3)) + "aeiou"[i % 5] for i in range(30)]

    def draw() -> Example:
        words = [stems[i] for i in rng.integers(0, 20, rng.integers(2, 7))]
        good, turned = int(rng.integers(2)), int(rng.random() < 0.3)
        said = ["not"] * turned + [stems[20 + 5 * good + rng.integers(5)]]
        at = int(rng.integers(len(words) + 1))
        return Example([*words[:at], *said, *words[at:]], int(good != turned), [])

    train, valid, test = ([draw() for _ in range(n)] for n in (config.examples, 100, 100))
    return Splits(train, valid, test)
