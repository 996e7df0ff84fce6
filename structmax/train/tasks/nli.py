"""Does a sentence follow from another? By aligned words, or by two sentences' latent trees.

The alignments of Niculae, Martins, Blondel & Cardie, "SparseMAP", ICML 2018, in the model of Chen
et al., "Enhanced LSTM for natural language inference", ACL 2017; and encoders along latent trees:
Choi, Yoo & Lee, "Learning to compose task-specific tree structures", AAAI 2018 (easy-first with
straight-through Gumbel); Yogatama et al., "Learning to compose words into sentences with
reinforcement learning", ICLR 2017 (spinn with reinforce); Havrylov, Kruszewski & Joulin,
"Cooperative learning of disjoint syntax and semantics", NAACL 2019 (ppo); and structured attention
within each sentence: Kim, Denton, Hoang & Rush, "Structured attention networks", ICLR 2017.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from structmax.data import snli
from structmax.data.folder import find_data, quoted
from structmax.data.snli import LABELS
from structmax.nn.esim import ESIM
from structmax.nn.pair_classifier import (
    PairByAttention,
    PairByDependency,
    PairByTree,
    interleave,
)
from structmax.train.batches import move
from structmax.train.config import TrainConfig, option
from structmax.train.errors import UserError
from structmax.train.estimator import estimator_of
from structmax.train.metrics import Ratio
from structmax.train.task import Splits, Task, warn_of_one_class
from structmax.train.tasks.vocabulary import Vocabulary, fill, pad, read_vectors

STRUCTURED = ("chain", "projective", "nonprojective")
_TOKEN = re.compile(r"n't|\w+(?=n't)|'\w+|\w+|[^\w\s]")
ONE_Z = ("gumbel-straight-through", "straight-through", "perturb-and-map", "perturb-and-parse",
         "marginals", "spigot", "reinforce", "ppo", "imle")  # fmt: skip


@dataclass
class NLIConfig(TrainConfig):
    """The options of ``nli``."""

    steps: int = option(4500, "Train for this many updates; 0: no limit.")
    batch_size: int = option(32, "Examples per update and worker.")
    lr: float = option(4e-4, "Learning rate of all but the parser.")
    clip: float = option(5.0, "Largest norm of the gradient of parser and of composer; 0: any.")
    eval_every: int = option(281, "Updates between evaluations on the validation split.")
    corpus: str = option(
        "", "Folder of the pairs, such as snli; none: a tiny generated set.", fixed=True, data=True
    )
    data: str = option("", "Folder of data sets; else $STRUCTMAX_DATA, or beside the checkout.")
    train_file: str = option("train_subset18k.tsv", "Of the corpus, to train with.", fixed=True)
    valid_file: str = option("validation.tsv", "Of the corpus, to choose the step by.", fixed=True)
    test_file: str = option("test.tsv", "Of the corpus, to test.", fixed=True)
    vectors: str = option(
        "", "File of word vectors, such as glove/glove6B100d_subset.txt.", fixed=True, data=True
    )
    encoder: Literal[
        "esim", "lstm", "bilstm", "balanced", "random", "easy-first", "spinn", "dependency",
        "chain", "projective", "nonprojective",
    ] = option(
        "esim",
        "esim compares words; the others compare sentences, along trees or none; the last three: "
        "structured attention within each.",
    )  # fmt: skip
    alignment: Literal["softmax", "sparsemax", "assignment", "sequence", "uniform", "random"] = (
        option("softmax", "Of esim's words; uniform and random ignore their vectors.")
    )
    estimator: str = option(
        "gumbel-straight-through",
        "How latent trees are trained: NAME or NAME:OPTION=VALUE,OPTION=VALUE.",
    )
    layers: int = option(2, "Of the graph network along a dependency tree.")
    max_iter: int = option(20, "Most steps of SparseMAP, for each pair.", least=1)
    examples: int = option(800, "Training pairs to generate.", fixed=True)
    word_size: int = option(100, "Size of the words' vectors.")
    hidden_size: int = option(200, "Size of the states.")
    dropout: float = option(0.3, "Probability of dropout.")

    def check(self) -> None:
        super().check()
        if self.hidden_size % 2:
            raise UserError(f"hidden_size must be even, got {self.hidden_size}.")


class Example(NamedTuple):
    """The words of both sentences, and the number of the label."""

    premise: list[str]
    hypothesis: list[str]
    label: int


class Batch(NamedTuple):
    """Numbers of words ``(B, n)`` and ``(B, m)`` after each other's lengths, and labels ``(B)``."""

    premise: Tensor
    premise_lengths: Tensor
    hypothesis: Tensor
    hypothesis_lengths: Tensor
    labels: Tensor

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Words and lengths of all sentences, pairs next to each other."""
        words = interleave(self.premise, self.hypothesis)
        return words, interleave(self.premise_lengths, self.hypothesis_lengths)


def tokens(text: str) -> list[str]:
    """The words of a text, in lower case.

    >>> tokens("The dog's tail isn't wagging.")
    ['the', 'dog', "'s", 'tail', 'is', "n't", 'wagging', '.']
    """
    return _TOKEN.findall(text.lower())


class NLI(Task):
    """Inference between two sentences, along alignments of their words or latent trees."""

    name = "nli"
    config = NLIConfig
    metric = "accuracy"

    def data(self, config: NLIConfig) -> Splits:
        splits = read(config) if config.corpus else generate(config)
        warn_of_one_class(LABELS[example.label] for example in splits.train)
        words = [[*e.premise, *e.hypothesis] for split in splits for e in split]
        # of the other splits, only words with a given vector are of use
        self.vectors = read_vectors(
            config.vectors, config.data, {w for row in words for w in row}, self.notes
        )
        trained = Vocabulary.of(words[: len(splits.train)], least_count=2)
        self.facts = {"words": sorted({*self.vectors, *trained.words})}
        self.__dict__.pop("vocabulary", None)
        return splits

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.facts["words"])

    def model(self, config: NLIConfig) -> nn.Module:
        kind, model = config.encoder, self._model(config)
        words = model.words if isinstance(model, PairByTree) else model.embedding
        fill(words, self.vocabulary, getattr(self, "vectors", {}))
        model.estimator = None
        if kind in ("easy-first", "spinn", "dependency"):
            two = torch.ones(2, 2, dtype=torch.int64), torch.tensor([2, 2])
            model.estimator = estimator_of(config.estimator, model.structure(*two))
            if config.estimator.partition(":")[0] not in ONE_Z:
                raise UserError(
                    f"estimator {config.estimator} gives several trees to a sentence, and pairs "
                    f"need one. These do: {', '.join(ONE_Z)}."
                )
        return model

    def _model(self, config: NLIConfig) -> Any:
        kind, size = config.encoder, (len(self.vocabulary), len(LABELS))
        sizes = config.word_size, config.hidden_size
        if kind == "esim":
            return ESIM(*size, config.alignment, *sizes, config.dropout, config.max_iter)
        if kind in ("bilstm", "dependency"):
            trees = "none" if kind == "bilstm" else "latent"
            return PairByDependency(
                *size, trees, "gcn", *sizes, dropout=config.dropout, layers=config.layers
            )
        if kind in STRUCTURED:
            return PairByAttention(*size, kind, *sizes, config.dropout)
        return PairByTree(*size, kind, *sizes, config.dropout, cell="tree-lstm", leaf_lstm=True)

    def size(self, example: Any) -> int:
        return len(example.premise) + len(example.hypothesis)

    def collate(self, examples: Sequence[Any]) -> Batch:
        def side(rows: list[list[str]]) -> tuple[Tensor, Tensor]:
            numbers = [self.vocabulary.numbers(row) for row in rows]
            return pad(numbers), torch.tensor([len(row) for row in rows])

        premise, n = side([example.premise for example in examples])
        hypothesis, m = side([example.hypothesis for example in examples])
        labels = torch.tensor([example.label for example in examples])
        return Batch(premise, n, hypothesis, m, labels)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        if isinstance(model, ESIM | PairByAttention):
            logits, _ = self._logits(model, batch)
            return nn.functional.cross_entropy(logits, batch.labels, reduction="none")
        labels = batch.labels.repeat_interleave(2)
        losses = model(*batch.rows, labels, estimator=model.estimator)
        return losses.unflatten(0, (-1, 2)).mean(1)

    def replays(self, model: Any) -> int:
        return getattr(model.estimator, "updates", 1) - 1

    def replay(self, model: Any, batch: Batch) -> Tensor:
        return model.estimator.replay(model.structure(*batch.rows))

    def has_unused(self, model: Any) -> bool:
        return not isinstance(model, ESIM)

    def evaluate(self, model: Any, batches: Iterable[Batch]) -> dict[str, Ratio | float]:
        right = pairs = aligned = words = 0
        for batch in batches:
            logits, weights = self._logits(model, batch)
            right += int((logits.argmax(-1) == batch.labels).sum())
            pairs += len(batch.labels)
            if weights is not None:
                aligned += int(sum((w > 0).sum() for w in weights))
                words += int(batch.premise_lengths.sum() + batch.hypothesis_lengths.sum())
        found: dict[str, Ratio | float] = {"accuracy": Ratio(right, pairs)}
        return {**found, "aligned": Ratio(aligned, words)} if words else found

    def _logits(self, model: Any, batch: Batch) -> tuple[Tensor, Any]:
        """Of each pair, and the weights of an alignment if there are any."""
        if isinstance(model, ESIM):
            return model(*batch[:4])
        if isinstance(model, PairByAttention):
            return model(*batch.rows), None
        relaxed = getattr(model.estimator, "objective", "") == "L(E[z])"
        given = {"estimator": model.estimator} if relaxed else {}
        return model(*batch.rows, **given)[::2], None

    def read(self, path: Path, config: NLIConfig) -> list[Example]:
        return read_file(path)

    def line(self, example: Any) -> str:
        return f"{' '.join(example.premise)}\t{' '.join(example.hypothesis)}"

    def predict(self, model: Any, lines: Sequence[str]) -> Iterator[dict[str, Any]]:
        device = next(model.parameters()).device
        for line in lines:
            sides = [tokens(text) for text in line.split("\t")]
            if len(sides) != 2 or not all(sides):
                raise ValueError(f"expected two sentences with a tab between, got {quoted(line)}.")
            batch = move(self.collate([Example(sides[0], sides[1], 0)]), device)
            logits, weights = self._logits(model, batch)
            p = logits.softmax(-1)[0].tolist()
            label = LABELS[int(np.argmax(p))]
            found: dict[str, Any] = {"premise": sides[0], "hypothesis": sides[1], "label": label}
            found["chances"] = {name: round(x, 4) for name, x in zip(LABELS, p)}
            if weights is not None:
                found["weights"] = [[round(x, 4) for x in row] for row in weights[1][0].tolist()]
            yield {**found, "text": label}


# -- data -----------------------------------------------------------------------------------------


def read(config: NLIConfig) -> Splits:
    """The splits of a corpus in the formats of SNLI."""

    def split(name: str, flag: str) -> list[Example]:
        try:
            path = find_data(f"{config.corpus}/{name}", config.data)
        except FileNotFoundError:
            folder = find_data(config.corpus, config.data)  # whose error says that there is none
            raise FileNotFoundError(
                f"there is no {name} in the folder {str(folder)!r}. Say which file with {flag}."
            ) from None
        return read_file(path)

    return Splits(
        split(config.train_file, "--train-file"),
        split(config.valid_file, "--valid-file"),
        split(config.test_file, "--test-file"),
    )


def read_file(path: Path) -> list[Example]:
    """The pairs of a file whose sentences both have words."""
    pairs = [Example(tokens(p), tokens(h), label) for p, h, label in snli.read(path)]
    return [pair for pair in pairs if pair.premise and pair.hypothesis]


def generate(config: NLIConfig) -> Splits:
    """Things and their colours: a thing of the premise in its colour follows, in another colour it
    contradicts, and of a thing that is not there nothing is known."""
    rng = np.random.default_rng(config.seed)
    stems = ["".join(rng.choice(list("bdgklmnprst"), 3)) + "aeiou"[i % 5] for i in range(16)]
    colours, things = stems[:6], stems[6:]

    def draw() -> Example:
        chosen = rng.permutation(len(things))[: rng.integers(2, 4) + 1]
        shades = rng.integers(0, len(colours), len(chosen))
        premise = [w for t, c in zip(chosen[1:], shades) for w in (colours[c], things[t])]
        label, at = int(rng.integers(3)), int(rng.integers(len(chosen) - 1))
        thing = chosen[0] if label == 1 else chosen[1 + at]
        shade = (shades[at] + (rng.integers(1, len(colours)) if label == 2 else 0)) % len(colours)
        return Example(premise, [colours[shade], things[thing]], label)

    train, valid, test = ([draw() for _ in range(n)] for n in (config.examples, 100, 100))
    return Splits(train, valid, test)
