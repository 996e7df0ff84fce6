"""Syntax, then semantics: a latent tree that helps to predict a graph.

Peng, Thomson & Smith, "Backpropagating through structured argmax using a SPIGOT", ACL 2018: a
parser is trained on trees first; then the graph's loss reaches it through an estimator, or not. The
graphs here are the enhanced ones of Universal Dependencies, without their labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from structmax import losses
from structmax.data import conllu, treebank
from structmax.data.folder import read_splits
from structmax.data.words import words_between_spaces
from structmax.nn.semantic_graph import SemanticGraph
from structmax.train.batches import move
from structmax.train.config import TrainConfig, option
from structmax.train.estimator import estimator_of
from structmax.train.metrics import Ratio
from structmax.train.task import Splits, Task
from structmax.train.tasks import heads
from structmax.train.tasks.vocabulary import UNKNOWN, Vocabulary, fill, pad, read_vectors


@dataclass
class SemDepConfig(TrainConfig):
    """The options of ``semdep``."""

    steps: int = option(3000, "Train for this many updates; 0: no limit.")
    pretrain: int = option(1000, "The first updates, of a latent tree or a pipeline: parser alone.")
    batch_size: int = option(64, "Examples per update and worker.")
    batch_tokens: int = option(4000, "At most this many words, padding included; 0: no limit.")
    lr: float = option(1e-3, "Learning rate of all but the parser.")
    clip: float = option(5.0, "Largest norm of the gradient of parser and of the rest; 0: any.")
    corpus: str = option(
        "",
        "Folder of CoNLL-U files with graphs; none: a tiny generated set.",
        fixed=True,
        data=True,
    )
    data: str = option("", "Folder of data sets; else $STRUCTMAX_DATA, or beside the checkout.")
    vectors: str = option(
        "", "File of word vectors, such as glove/glove6B100d_subset.txt.", fixed=True, data=True
    )
    syntax: Literal["latent", "pipeline", "multi-task", "gold", "random", "none"] = option(
        "latent",
        "What the tree is for; see structmax.nn.SemanticGraph. gold, random: given ones.",
        fixed=True,
    )
    estimator: str = option(
        "spigot", "How a latent tree is trained: NAME or NAME:OPTION=VALUE,…; it must give a z."
    )
    examples: int = option(300, "Training sentences to generate.", fixed=True)
    word_size: int = option(100, "Size of the words' vectors.")
    hidden_size: int = option(400, "Size of the states.")
    dropout: float = option(0.33, "Probability of dropout.")
    word_dropout: float = option(0.1, "Probability that a training word is taken for unknown.")


class Example(NamedTuple):
    """Words, heads in the tree, and the graph's arcs (head, word)."""

    words: list[str]
    heads: list[int]
    arcs: list[tuple[int, int]]


class Batch(NamedTuple):
    """Numbers of words ``(B, n)``, lengths ``(B)``, heads ``(B, n)`` of the tree, those to join
    words with, and which arcs ``(B, n+1, n+1)`` [head, modifier] the graph has."""

    words: Tensor
    lengths: Tensor
    tree: Tensor
    heads: Tensor
    graph: Tensor

    @property
    def used(self) -> Tensor:
        """Which arcs there may be."""
        at = torch.arange(self.graph.shape[1], device=self.graph.device)
        inside = at <= self.lengths[:, None]
        return inside[:, :, None] & (inside & (at > 0))[:, None] & (at[:, None] != at)


class SemDep(Task):
    """Graphs of words, with the help of a latent dependency tree."""

    name = "semdep"
    config = SemDepConfig
    metric = "f1"

    def data(self, config: SemDepConfig) -> Splits:
        splits = read(config) if config.corpus else generate(config)
        words = [[word.lower() for word in e.words] for split in splits for e in split]
        self.vectors = read_vectors(
            config.vectors, config.data, {w for row in words for w in row}, self.notes
        )
        trained = Vocabulary.of(words[: len(splits.train)], least_count=2)
        self.facts = {"words": sorted({*self.vectors, *trained.words}), "syntax": config.syntax}
        self.__dict__.pop("vocabulary", None)
        return splits

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.facts["words"])

    def model(self, config: SemDepConfig) -> nn.Module:
        syntax = "given" if config.syntax in ("gold", "random") else config.syntax
        sizes = config.word_size, config.hidden_size
        model: Any = SemanticGraph(len(self.vocabulary), syntax, *sizes, config.dropout)
        vectors = getattr(self, "vectors", {})  # none where a checkpoint will give them
        fill(model.embedding, self.vocabulary, vectors)
        if model.has_parser:
            fill(model.parser_words, self.vocabulary, vectors)
        model.estimator, model.word_dropout = None, config.word_dropout
        model.register_buffer("updates", torch.zeros((), dtype=torch.int64))  # resumed with the run
        model.pretrain = config.pretrain if syntax in ("latent", "pipeline") else 0
        if syntax == "latent":
            tree = model.tree(torch.ones(1, 2, dtype=torch.int64), torch.tensor([2]))
            model.estimator = estimator_of(config.estimator, tree, one_z=True)
        return model

    def size(self, example: Any) -> int:
        return len(example.words)

    def collate(self, examples: Sequence[Any]) -> Batch:
        lengths = torch.tensor([len(example.words) for example in examples])
        n = int(lengths.max()) + 1
        graph = torch.zeros(len(examples), n, n, dtype=torch.bool)
        for item, example in enumerate(examples):
            if example.arcs:
                graph[item, *torch.tensor(example.arcs).T] = True
        tree = joined = pad([example.heads for example in examples])
        if self.facts["syntax"] == "random":
            joined = heads.random(lengths)
        rows = [self.vocabulary.numbers(w.lower() for w in e.words) for e in examples]
        return Batch(pad(rows), lengths, tree, joined, graph)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        if model.training:
            dropped = torch.rand(batch.words.shape, device=batch.words.device) < model.word_dropout
            batch = batch._replace(words=batch.words.where(~dropped, UNKNOWN))
            model.updates += 1
        if model.pretrain and int(model.updates) <= model.pretrain:
            tree = model.tree(batch.words, batch.lengths)
            return losses.crf(tree, batch.tree, reduction="none") / batch.lengths
        found = model(batch.words, batch.lengths, model.estimator, batch.heads)
        each = nn.functional.binary_cross_entropy_with_logits(
            found.scores, batch.graph.to(found.scores.dtype), reduction="none"
        )
        total = torch.where(batch.used, each, 0.0).sum((1, 2)) / batch.lengths
        if model.syntax == "multi-task":
            total = total + losses.crf(found.tree, batch.tree, reduction="none") / batch.lengths
        return total

    def evaluate(self, model: Any, batches: Iterable[Batch]) -> dict[str, Ratio | float]:
        shared = arcs = right = words = 0
        for batch in batches:
            found = model(batch.words, batch.lengths, self._relaxed(model), batch.heads)
            mine = (found.scores > 0) & batch.used
            shared += int((mine & batch.graph).sum())
            arcs += int(mine.sum() + batch.graph.sum())
            if found.tree is not None:
                best = found.tree.argmax()[:, :, 1:].argmax(1)
                inside = batch.used[:, 0, 1:]
                right += int(((best == batch.tree) & inside).sum())
                words += int(batch.lengths.sum())
        f1: dict[str, Ratio | float] = {"f1": Ratio(2 * shared, arcs)}
        return {**f1, "uas": Ratio(right, words)} if words else f1

    def _relaxed(self, model: Any) -> Any:
        """The estimator, if the model was trained with means of trees."""
        return model.estimator if getattr(model.estimator, "objective", "") == "L(E[z])" else None

    def read(self, path: Path, config: SemDepConfig) -> list[Example]:
        return read_file(path)

    def line(self, example: Any) -> str:
        return " ".join(example.words)

    def predict(self, model: Any, lines: Sequence[str]) -> Iterator[dict[str, Any]]:
        if self.facts["syntax"] == "gold":
            raise ValueError("this model was trained along given trees and has none for a line.")
        device = next(model.parameters()).device
        for line in lines:
            words = words_between_spaces(line)
            batch = move(self.collate([Example(words, [0] * len(words), [])]), device)
            scores, tree = model(batch.words, batch.lengths, self._relaxed(model), batch.heads)
            arcs = [(h, m) for h, m in ((scores > 0) & batch.used)[0].nonzero().tolist()]
            found: dict[str, Any] = {"words": words, "arcs": arcs}
            if tree is not None:
                (found["heads"],) = tree.argmax()[:, :, 1:].argmax(1).tolist()
            names = ["root", *words]
            yield {**found, "text": " ".join(f"{names[h]}→{names[m]}" for h, m in arcs)}


# -- data -----------------------------------------------------------------------------------------


def read(config: SemDepConfig) -> Splits:
    """The splits of a treebank with enhanced graphs."""
    return Splits(*read_splits(config.corpus, config.data, ".conllu", read_file))


def read_file(path: Path) -> list[Example]:
    """The sentences of a CoNLL-U file with enhanced graphs."""

    def example(found: conllu.Sentence) -> Example:
        tree = [head for head in found.heads if head is not None]
        arcs = [(head, word) for head, word, _ in found.enhanced if head != word]
        if len(tree) < len(found.words) or not treebank.is_tree(tree) or not arcs:
            raise ValueError(f"{path}: no tree or no graph of the sentence {found.words}.")
        return Example(found.words, tree, arcs)

    return [example(found) for found in conllu.read(path)]


def generate(config: SemDepConfig) -> Splits:
    """Trees of made-up sentences; in the graph a word also has the head of its head, if a word."""

    def graph(tree: list[int]) -> list[tuple[int, int]]:
        above = [0, *tree]
        further = [(above[head], word) for word, head in enumerate(tree, 1) if above[head]]
        return [*((head, word) for word, head in enumerate(tree, 1)), *further]

    sizes = config.examples, 100, 100
    splits = treebank.generate(sizes, config.seed)
    return Splits(*([Example(w, h, graph(h)) for w, h, _ in split] for split in splits))
