"""Translation by attention, with any map in the place of softmax.

Niculae & Blondel, "A regularized framework for sparse and structured neural attention", NeurIPS
2017; Malaviya, Ferreira & Martins, "Sparse and constrained attention for neural machine
translation", ACL 2018; Peters, Niculae & Martins, "Sparse sequence-to-sequence models", ACL 2019,
for the output layer.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from structmax.data import find_data, parallel, summaries
from structmax.data.folder import read_splits
from structmax.data.parallel import Pair
from structmax.data.words import in_batches, words_between_spaces
from structmax.losses.entmax_loss import entmax_loss
from structmax.nn.seq2seq import Seq2Seq
from structmax.train.batches import move
from structmax.train.bleu import Bleu
from structmax.train.config import SCHEDULE, Schedule, TrainConfig, option
from structmax.train.errors import UserError
from structmax.train.metrics import Ratio
from structmax.train.task import Measures, Splits, Task
from structmax.train.tasks.vocabulary import NONE, Vocabulary, pad

START, END = "<s>", "</s>"
LONGER = 20  # so many words more than its source a translation may have


@dataclass
class Seq2SeqConfig(TrainConfig):
    """The options of ``seq2seq``."""

    steps: int = option(6800, "Train for this many updates; 0: no limit.")
    batch_size: int = option(64, "Examples per update and worker.")
    lr: float = option(1e-3, "Learning rate.")
    schedule: Schedule = option("cosine", SCHEDULE)
    eval_every: int = option(453, "Updates between evaluations on the validation split.")
    corpus: str = option(
        "",
        "Folder of the corpus, such as multi30k; none: a tiny generated set.",
        fixed=True,
        data=True,
    )
    data: str = option("", "Folder of data sets; else $STRUCTMAX_DATA, or beside the checkout.")
    kind: Literal["translation", "summary"] = option(
        "translation", "Of parallel text, or of JSON lines with document and summary.", fixed=True
    )
    source: str = option("de", "What to translate: the end of the names of its files.", fixed=True)
    target: str = option("en", "Into what.", fixed=True)
    attention: Literal[
        "softmax", "sparsemax", "entmax", "fusedmax", "oscarmax", "csparsemax", "uniform", "random"
    ] = option(
        "softmax",
        "From scores to weights; csparsemax: with fertilities; uniform and random: without scores.",
    )
    alpha: float = option(1.5, "Of entmax attention: from 1, softmax, to 2, sparsemax.", least=1)
    strength: float = option(0.1, "Of fusedmax and oscarmax: how much weights are made equal.")
    fertility: float = option(2.0, "Of csparsemax: the most attention for a word of the source.")
    output: Literal["softmax", "entmax"] = option(
        "softmax", "What next words are trained by: cross-entropy, or the loss of 1.5-entmax."
    )
    examples: int = option(600, "Training pairs to generate.", fixed=True)
    least_count: int = option(2, "Words seen less often in training are unknown.", fixed=True)
    most_words: int = option(100, "Take only so many words of a document to summarize.", fixed=True)
    hidden_size: int = option(512, "Size of the vectors and states.")
    dropout: float = option(0.4, "Probability of dropout of words and before the output.")

    def check(self) -> None:
        super().check()
        if self.hidden_size % 2:
            raise UserError(f"hidden_size must be even, got {self.hidden_size}.")
        if self.fertility <= 0:
            raise UserError(f"fertility must be above 0, got {self.fertility}.")


class Batch(NamedTuple):
    """Numbers of words ``(B, n)``, with an end symbol, and lengths ``(B)``; words ``(B, m)`` of the
    target between its symbols, and their names."""

    source: Tensor
    lengths: Tensor
    target: Tensor
    gold: list[list[str]]


class Translation(Task):
    """Translation or summary, by a small encoder-decoder with sparse or structured attention."""

    name = "seq2seq"
    config = Seq2SeqConfig
    metric = "bleu"

    def data(self, config: Seq2SeqConfig) -> Splits:
        splits = read(config) if config.corpus else generate(config)
        least = config.least_count
        for side in ("source", "target"):
            words = Vocabulary.of((getattr(pair, side) for pair in splits.train), least).words
            self.facts[side] = [START, END, *words]
        self.__dict__.pop("vocabulary", None)
        return splits

    @cached_property
    def vocabulary(self) -> dict[str, Vocabulary]:
        return {side: Vocabulary(self.facts[side]) for side in ("source", "target")}

    def model(self, config: Seq2SeqConfig) -> nn.Module:
        names = {"entmax": ["alpha"], "fusedmax": ["strength"], "oscarmax": ["strength"]}
        start, end = self.vocabulary["target"].numbers([START, END])
        model: Any = Seq2Seq(
            len(self.vocabulary["source"]),
            len(self.vocabulary["target"]),
            config.hidden_size,
            config.attention,
            config.fertility,
            start,
            end,
            config.dropout,
            **{name: getattr(config, name) for name in names.get(config.attention, [])},
        )
        model.sparse = config.output == "entmax"
        return model

    def size(self, example: Any) -> int:
        return max(len(example.source), len(example.target))

    def collate(self, examples: Sequence[Any]) -> Batch:
        source, target = self.vocabulary["source"], self.vocabulary["target"]
        return Batch(
            pad([source.numbers([*example.source, END]) for example in examples]),
            torch.tensor([len(example.source) + 1 for example in examples]),
            pad([target.numbers([START, *example.target, END]) for example in examples]),
            [example.target for example in examples],
        )

    def loss(self, model: Any, batch: Batch) -> Tensor:
        words, wanted = batch.target[:, :-1], batch.target[:, 1:]
        scores, _ = model(batch.source, batch.lengths, words)
        scores, wanted = scores[wanted != NONE], wanted[wanted != NONE]
        if model.sparse:
            return entmax_loss(scores, wanted, reduction="none")
        return nn.functional.cross_entropy(scores, wanted, reduction="none")

    def has_unused(self, model: Any) -> bool:
        return model.map in ("uniform", "random")  # whose keys are not used

    def evaluate(self, model: Any, batches: Iterable[Batch]) -> Measures:
        bleu = Bleu()
        right = words = attended = sentences = 0
        seconds = 0.0
        for batch in batches:
            start = time.perf_counter()
            for found, gold in zip(self._translate(model, batch)[0], batch.gold):
                bleu.add(found, gold)
            seconds += time.perf_counter() - start
            sentences += len(batch.gold)
            wanted = batch.target[:, 1:]
            scores, weights = model(batch.source, batch.lengths, batch.target[:, :-1])
            real = wanted != NONE
            right += int(((scores.argmax(-1) == wanted) & real).sum())
            attended += int(((weights > 0) & real[..., None]).sum())
            words += int(real.sum())
        return {
            "bleu": bleu,
            "next_word": Ratio(right, words),
            "attended": Ratio(attended, words),
            "sentences_per_second": Ratio(sentences, seconds),
        }

    def _translate(self, model: Any, batch: Batch) -> tuple[list[list[str]], Tensor]:
        most = batch.source.shape[1] + LONGER
        found, weights = model.translate(batch.source, batch.lengths, most)
        # the first two numbers are those of padding and of unknown words
        names = ["", "", *self.facts["target"]]
        limits = (batch.lengths + LONGER).tolist()  # of each, whatever it shares a batch with
        rows = [
            [names[i] for i in row[:limit] if i != NONE]
            for row, limit in zip(found.tolist(), limits)
        ]
        return rows, weights

    def read(self, path: Path, config: Seq2SeqConfig) -> list[Pair]:
        return read_file(path, config)

    def line(self, example: Any) -> str:
        return " ".join(example.source)

    def predict(self, model: Any, lines: Sequence[str]) -> Iterator[dict[str, Any]]:
        device = next(model.parameters()).device
        for rows in in_batches(map(words_between_spaces, lines)):
            batch = move(self.collate([Pair(words, []) for words in rows]), device)
            found, weights = self._translate(model, batch)
            for source, words, weight in zip(rows, found, weights.tolist()):
                attention = [
                    {str(i): round(p, 4) for i, p in enumerate(row[: len(source) + 1]) if p > 0}
                    for row in weight[: len(words)]
                ]
                text = " ".join(words)
                yield {"source": source, "words": words, "attention": attention, "text": text}


# -- data -----------------------------------------------------------------------------------------


def read(config: Seq2SeqConfig) -> Splits:
    """The splits of a corpus: the files of its folder that are named so."""

    end = ".jsonl" if config.kind == "summary" else f".{config.source}"
    read = partial(read_file, config=config)
    return Splits(*read_splits(config.corpus, config.data, end, read))


def read_file(path: Path, config: Seq2SeqConfig) -> list[Pair]:
    """The pairs of a file; of the sentences to translate, the others are in a file beside it."""
    if config.kind == "summary":
        return summaries.read(path, config.most_words)
    stem, end = path.name.removesuffix(".xz"), f".{config.source}"
    if not stem.endswith(end):
        raise ValueError(f"{path} must be the file to translate, whose name ends in {end}.")
    other = path.with_name(f"{stem.removesuffix(end)}.{config.target}")
    return parallel.read(path, find_data(other.absolute()))


def generate(config: Seq2SeqConfig) -> Splits:
    """Sentences of made-up words.

    Translations go word by word, but a word in -ish comes after the next one. Summaries have those
    words only that stand after "the".
    """
    rng = np.random.default_rng(config.seed)
    stems = ["".join(rng.choice(list("bdgklmnprst"), 3)) + "aeiou"[i % 5] for i in range(20)]

    def translation() -> Pair:
        source: list[str] = []
        target: list[str] = []
        for i in rng.integers(0, 12, rng.integers(2, 5)):
            word = stems[i]
            if rng.random() < 0.4:
                other = stems[rng.integers(12, 20)]
                source += [other + "ish", word]
                target += [word[::-1], other[::-1]]
            else:
                source.append(word)
                target.append(word[::-1])
        return Pair(source, target)

    def summary() -> Pair:
        source: list[str] = []
        target: list[str] = []
        while not target:
            for i in rng.integers(0, 12, rng.integers(4, 9)):
                if rng.random() < 0.3:
                    source.append("the")
                    target.append(stems[i])
                source.append(stems[i])
        return Pair(source, target)

    draw = summary if config.kind == "summary" else translation
    train, valid, test = ([draw() for _ in range(n)] for n in (config.examples, 100, 100))
    return Splits(train, valid, test)
