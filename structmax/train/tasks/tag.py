"""Tags of words by a linear chain: parts of speech, named entities.

Characters and words feed a BiLSTM, whose states score the tags of a chain, as in Lample et al.,
"Neural architectures for named entity recognition", NAACL 2016. The losses of the chain compared
are those of Mensch & Blondel, "Differentiable dynamic programming", ICML 2018, and of Niculae et
al., "SparseMAP", ICML 2018, next to the classical ones.
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

from structmax import losses
from structmax.data import Vocabulary, Words, columns, conllu, words
from structmax.data.columns import Tagged
from structmax.data.folder import read_splits
from structmax.data.words import in_batches, words_between_spaces
from structmax.nn.word_encoder import WordEncoder
from structmax.smoothing import Gini, Hard, Shannon
from structmax.structures.linear_chain import LinearChain
from structmax.train.batches import move
from structmax.train.config import SCHEDULE, Schedule, TrainConfig, option
from structmax.train.metrics import Ratio
from structmax.train.task import Splits, Task, warn_of_one_class
from structmax.train.tasks.vocabulary import all_vectors

LOSSES = {
    "crf": (losses.crf, Shannon()),
    "smoothed": (losses.smoothed, Gini()),
    "perceptron": (losses.perceptron, Hard()),
    "hinge": (losses.hinge, Hard()),
    "sparsemap": (losses.sparsemap, Hard()),
}


@dataclass
class TagConfig(TrainConfig):
    """The options of ``tag``."""

    steps: int = option(4000, "Train for this many updates; 0: no limit.")
    batch_size: int = option(32, "Examples per update and worker.")
    lr: float = option(2e-3, "Learning rate.")
    schedule: Schedule = option("cosine", SCHEDULE)
    clip: float = option(5.0, "Largest norm of the gradient; 0: any.")
    tags: Literal["upos", "ner"] = option(
        "upos", "What to tag: upos of CoNLL-U files, or the spans of CoNLL columns.", fixed=True
    )
    corpus: str = option(
        "",
        "Folder of train, dev and test files; none: a tiny generated set.",
        fixed=True,
        data=True,
    )
    data: str = option("", "Folder of data sets; else $STRUCTMAX_DATA, or beside the checkout.")
    encoding: str = option("utf-8", "Of columns; CoNLL-2002 has latin-1.", fixed=True)
    vectors: str = option(
        "", "File of word vectors, such as glove/glove6B100d_subset.txt.", fixed=True, data=True
    )
    loss: Literal["crf", "smoothed", "perceptron", "hinge", "sparsemap"] = option(
        "crf", "What the chain is trained by; smoothed: by Gini."
    )
    transitions: Literal["learned", "none", "random"] = option(
        "learned", "Of the chain. none: tags are independent of each other; random: kept as drawn."
    )
    examples: int = option(300, "Training sentences to generate.", fixed=True)
    least_count: int = option(2, "Words seen less often have no vector of their own.", fixed=True)
    word_size: int = option(100, "Size of the words' vectors.")
    char_size: int = option(50, "Size of the characters' vectors and states.")
    hidden_size: int = option(200, "Size of the words' states, in each direction.")
    dropout: float = option(0.4, "Probability of dropout before and after the BiLSTM.")
    word_dropout: float = option(0.1, "Probability that a training word is taken for unknown.")


class Batch(NamedTuple):
    """Sentences, their tags ``(B, n)`` and the names of these."""

    words: Words
    tags: Tensor
    gold: list[list[str]]

    @property
    def lengths(self) -> Tensor:
        return self.words.lengths


class Tagger(nn.Module):
    """From a batch to its chain of tags."""

    def __init__(self, facts: dict[str, Any], config: TagConfig) -> None:
        super().__init__()
        c = len(facts["tags"])
        self.loss, self.smoothing = LOSSES[config.loss]
        self.encoder = WordEncoder(
            facts,
            config.word_size,
            config.char_size,
            config.hidden_size,
            facts["size"],
            dropout=config.dropout,
            word_dropout=config.word_dropout,
        )
        self.tags = nn.Linear(self.encoder.output_size, c)
        learned, spread = config.transitions == "learned", float(config.transitions == "random")
        self.transition = nn.Parameter(spread * torch.randn(c, c), learned)
        self.start = nn.Parameter(torch.zeros(c), learned)
        self.end = nn.Parameter(torch.zeros(c), learned)

    def forward(self, batch: Batch) -> LinearChain:
        unary = self.tags(self.encoder(batch.words))
        return LinearChain(
            unary, self.transition, self.start, self.end, batch.lengths, self.smoothing
        )

    def soft(self, chain: LinearChain) -> Tensor:
        """The expected tags ``(B, n, c)`` that the loss compares with the gold ones."""
        return chain.sparsemap().marginals if self.loss is losses.sparsemap else chain.marginals()


class Tag(Task):
    """Parts of speech or named entities, by a linear chain over a BiLSTM."""

    name = "tag"
    config = TagConfig
    metric = "accuracy"

    def data(self, config: TagConfig) -> Splits:
        if config.tags == "ner":
            self.metric = "f1"
        splits = read(config) if config.corpus else generate(config)
        sentences = [sentence.words for sentence in splits.train]
        given, self.vectors = all_vectors(config.vectors, config.data, sentences, self.notes)
        self.facts = {
            **words.facts(sentences, config.least_count, given),
            "tags": sorted({tag for sentence in splits.train for tag in sentence.tags}),
            "size": self.vectors.shape[1],
            "spans": config.tags == "ner",
        }
        warn_of_one_class(tag for sentence in splits.train for tag in sentence.tags)
        self.__dict__.pop("vocabulary", None)
        return splits

    def model(self, config: TagConfig) -> nn.Module:
        model = Tagger(self.facts, config)
        vectors = getattr(self, "vectors", ())  # none where a checkpoint will give them
        if len(vectors):
            model.encoder.given.weight.data[1:] = torch.from_numpy(vectors)
        return model

    def size(self, example: Any) -> int:
        return len(example.words)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.facts)

    def collate(self, examples: Sequence[Any]) -> Batch:
        index = {tag: i for i, tag in enumerate(self.facts["tags"])}
        found = self.vocabulary.collate([example.words for example in examples])
        # unknown tags are not in training data; evaluation goes by name
        tags = [index.get(tag, 0) for example in examples for tag in example.tags]
        return Batch(found, words.pad(tags, found.counts), [example.tags for example in examples])

    def loss(self, model: Any, batch: Batch) -> Tensor:
        return model.loss(model(batch), batch.tags, reduction="none")

    def has_unused(self, model: Any) -> bool:
        return False

    def evaluate(self, model: Any, batches: Iterable[Batch]) -> dict[str, Ratio | float]:
        right = words = sentences = choices = 0
        spans = np.zeros(3, np.int64)
        seconds = 0.0
        for batch in batches:
            start = time.perf_counter()
            chain = model(batch)
            found = self._names(chain.argmax_tags(), batch.lengths)
            seconds += time.perf_counter() - start
            sentences += len(found)
            words += int(batch.lengths.sum())
            choices += int((model.soft(chain) > 0).sum())
            right += sum(a == b for x, y in zip(found, batch.gold) for a, b in zip(x, y))
            if self.facts["spans"]:
                spans += columns.span_counts(found, batch.gold)
        shared, mine, gold = spans.tolist()
        f1 = {"f1": Ratio(2 * shared, mine + gold)} if self.facts["spans"] else {}
        return {
            **f1,
            "accuracy": Ratio(right, words),
            "tags_per_word": Ratio(choices, words),
            "sentences_per_second": Ratio(sentences, seconds),
        }

    def _names(self, tags: Tensor, lengths: Tensor) -> list[list[str]]:
        names = self.facts["tags"]
        rows = zip(tags.tolist(), lengths.tolist())
        return [[names[tag] for tag in row[:length]] for row, length in rows]

    def read(self, path: Path, config: TagConfig) -> list[Tagged]:
        return read_file(path, config)

    def line(self, example: Any) -> str:
        return " ".join(example.words)

    def predict(self, model: Any, lines: Sequence[str]) -> Iterator[dict[str, Any]]:
        device = next(model.parameters()).device
        names = self.facts["tags"]
        for rows in in_batches(map(words_between_spaces, lines)):
            nothing = [Tagged(words, names[:1] * len(words)) for words in rows]
            batch = move(self.collate(nothing), device)
            chain = model(batch)
            best, soft = self._names(chain.argmax_tags(), batch.lengths), model.soft(chain)
            for sentence, tags, chances in zip(rows, best, soft.tolist()):
                yield {
                    "words": sentence,
                    "tags": tags,
                    "choices": [  # to four places
                        {name: round(p, 4) for name, p in zip(names, row) if p > 5e-5}
                        for row in chances[: len(sentence)]
                    ],
                    "text": " ".join(f"{word}/{tag}" for word, tag in zip(sentence, tags)),
                }


# -- data -----------------------------------------------------------------------------------------


def read(config: TagConfig) -> Splits:
    """The splits of a corpus: the files of its folder that are named so."""
    end = "" if config.tags == "ner" else ".conllu"
    read = partial(read_file, config=config)
    return Splits(*read_splits(config.corpus, config.data, end, read))


def read_file(path: Path, config: TagConfig) -> list[Tagged]:
    """The sentences of a file, spans in the scheme IOBES."""
    if config.tags != "ner":
        return [Tagged(found.words, found.upos) for found in conllu.read(path)]
    found = columns.read(path, config.encoding)
    return [Tagged(words, columns.convert(tags, "iobes")) for words, tags in found]


def generate(config: TagConfig) -> Splits:
    """Sentences of a few made-up words.

    Of parts of speech, some words are noun and verb, and only the word before tells; of entities,
    a name is one or two words after "of", and the first of two is also a common word.
    """
    rng = np.random.default_rng(config.seed)
    stems = ["".join(rng.choice(list("bdgklmnprst"), 3)) + "aeiou"[i % 5] for i in range(30)]

    def pos() -> Tagged:
        pairs: list[tuple[str, str]] = []
        for _ in range(rng.integers(1, 4)):
            if pairs:
                pairs.append((stems[rng.integers(0, 15)], "VERB"))
            pairs.append((str(rng.choice(["the", "a"])), "DET"))
            if rng.random() < 0.4:
                pairs.append((stems[rng.integers(20, 30)] + "ish", "ADJ"))
            pairs.append((stems[rng.integers(8, 20)], "NOUN"))
        return Tagged(*map(list, zip(*pairs)))

    def ner() -> Tagged:
        pairs: list[tuple[str, str]] = []
        for _ in range(rng.integers(1, 4)):
            pairs += [(stems[i], "O") for i in rng.integers(0, 20, rng.integers(1, 4))]
            pairs.append(("of", "O"))
            label, end = [("PER", "son"), ("LOC", "ville")][rng.integers(2)]
            if rng.random() < 0.5:
                pairs.append((stems[rng.integers(0, 20)], f"B-{label}"))
                pairs.append((stems[rng.integers(20, 30)] + end, f"E-{label}"))
            else:
                pairs.append((stems[rng.integers(20, 30)] + end, f"S-{label}"))
        return Tagged(*map(list, zip(*pairs)))

    draw = ner if config.tags == "ner" else pos
    train, valid, test = ([draw() for _ in range(n)] for n in (config.examples, 100, 100))
    return Splits(train, valid, test)
