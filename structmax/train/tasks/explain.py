"""Learning to explain: choose k words of a sentence, and tell its polarity from them alone.

Chen, Song, Wainwright & Jordan, "Learning to explain: an information-theoretic perspective on model
interpretation", ICML 2018 (L2X); with implicit maximum likelihood in Niepert, Minervini &
Franceschi, "Implicit MLE", NeurIPS 2021. One network scores words, the best k of them
(:class:`structmax.KSubset`) are all that a second one sees. The labels are those of sentences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from structmax.data import sst
from structmax.data.words import words_between_spaces
from structmax.estimators import Estimator
from structmax.estimators.noise import gumbel
from structmax.nn.leaf_lstm import LeafLSTM
from structmax.structures.base import Structure
from structmax.structures.ksubset import KSubset
from structmax.train.batches import move
from structmax.train.config import TrainConfig, option
from structmax.train.errors import UserError
from structmax.train.estimator import estimator_of
from structmax.train.metrics import Ratio
from structmax.train.task import Splits, Task, warn_of_one_class
from structmax.train.tasks.vocabulary import NONE, UNKNOWN, Vocabulary, fill, pad, read_vectors

LABELS = ("negative", "positive")


@dataclass
class ExplainConfig(TrainConfig):
    """The options of ``explain``."""

    steps: int = option(1600, "Train for this many updates; 0: no limit.")
    batch_size: int = option(64, "Examples per update and worker.")
    clip: float = option(5.0, "Largest norm of the gradient of chooser and of reader; 0: any.")
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
    frozen: bool = option(False, "Keep the words' vectors as they were given.")
    k: int = option(
        10, "How many words are chosen; all of a shorter sentence.", fixed=True, least=1
    )
    words: Literal["chosen", "all", "random"] = option("chosen", "What the reader sees.")
    estimator: str = option(
        "imle:lam=1000,noise=sum-of-gamma",
        "How the choice is trained: NAME or NAME:OPTION=VALUE,…; l2x, or l2x:temperature=0.5.",
    )
    examples: int = option(400, "Training sentences to generate.", fixed=True)
    word_size: int = option(100, "Size of the words' vectors.")
    hidden_size: int = option(100, "Size of the states.")
    dropout: float = option(0.5, "Probability of dropout of words' vectors and before the end.")
    word_dropout: float = option(0.1, "Probability that a training word is taken for unknown.")


@dataclass
class L2X(Estimator):
    """The largest of k independent draws of a softmax with Gumbel noise, for each word.

    z = max over k of softmax((θ + ε)/τ): a relaxed subset of at most k, since two draws may fall on
    one word (Chen et al. 2018, eq. 6). Its own relaxation, not that of :class:`KSubset`.
    """

    temperature: float = 0.5

    objective = "L(E[z])"
    needs = frozenset(["argmax"])

    def __call__(self, structure: Structure) -> Tensor:
        assert isinstance(structure, KSubset) and structure.lengths is not None
        at = torch.arange(structure.event_shape[0], device=structure.scores.device)
        inside = at < structure.lengths[..., None]
        scores = structure.scores.masked_fill(~inside, -torch.inf)
        noise = gumbel(scores.detach().expand(structure.k, *scores.shape))
        return ((scores + noise) / self.temperature).softmax(-1).amax(0)


class Batch(NamedTuple):
    """Numbers of words ``(B, n)``, lengths and labels ``(B)``; n is at least k."""

    words: Tensor
    lengths: Tensor
    labels: Tensor


class Explainer(nn.Module):
    """One network that scores words, and one that reads those that were chosen."""

    def __init__(self, vocabulary: int, config: ExplainConfig) -> None:
        super().__init__()
        self.k, self.kind, self.word_dropout = config.k, config.words, config.word_dropout
        size, hidden = config.word_size, config.hidden_size
        self.embedding = nn.Embedding(vocabulary, size, padding_idx=NONE)
        self.embedding.weight.requires_grad_(not config.frozen)
        self.context = LeafLSTM(size, hidden + hidden % 2)
        self.scorer = nn.Linear(hidden + hidden % 2, 1)
        self.dropout = nn.Dropout(config.dropout)
        self.reader = nn.Sequential(
            nn.Linear(size, hidden), nn.ReLU(), nn.Dropout(config.dropout), nn.Linear(hidden, 2)
        )
        self.estimator: Any = None

    def parser_parameters(self) -> list[nn.Parameter]:
        """Those that only serve to choose."""
        chosen = self.kind == "chosen"
        return [*self.context.parameters(), *self.scorer.parameters()] if chosen else []

    def structure(self, batch: Batch) -> KSubset:
        """The subsets of k words; a sentence that is shorter is filled up by what is empty."""
        lengths = batch.lengths.clamp(min=self.k)
        if self.kind == "random":
            scores = torch.rand(batch.words.shape, device=batch.words.device)
        else:
            states = self.context(self.dropout(self.embedding(batch.words)), lengths)
            scores = self.scorer(states).squeeze(-1)
        return KSubset(scores, self.k, lengths, validate_args=False)

    def read(self, z: Tensor, words: Tensor) -> Tensor:
        """Logits ``(..., B, 2)`` from the mean of the chosen words' vectors; z ``(..., B, n)``."""
        z = z * (words != NONE)
        mean = (z[..., None, :] @ self.dropout(self.embedding(words))).squeeze(-2)
        return self.reader(mean / z.sum(-1, keepdim=True).clamp(min=1e-6))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The chosen words ``(B, n)`` and the logits ``(B, 2)`` from them."""
        if self.kind == "all":
            z = (batch.words != NONE).float()
        else:
            z = self.structure(batch).argmax()
        return z, self.read(z, batch.words)


class Explain(Task):
    """Polarity of a sentence from k of its words, which are chosen by a latent subset."""

    name = "explain"
    config = ExplainConfig
    metric = "accuracy"

    def data(self, config: ExplainConfig) -> Splits:
        if config.corpus:
            splits = Splits(*sst.read_splits(config.corpus, config.data, binary=True))
        else:
            splits = generate((config.examples, 200, 200), config.seed)
        warn_of_one_class(LABELS[example.label] for example in splits.train)
        words = [[word.lower() for word in e.words] for split in splits for e in split]
        # of dev and test, only words with a given vector are of use
        self.vectors = read_vectors(
            config.vectors, config.data, {w for row in words for w in row}, self.notes
        )
        trained = Vocabulary.of(words[: len(splits.train)], least_count=2)
        self.facts = {"words": sorted({*self.vectors, *trained.words}), "k": config.k}
        self.__dict__.pop("vocabulary", None)
        return splits

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.facts["words"])

    def model(self, config: ExplainConfig) -> nn.Module:
        model = Explainer(len(self.vocabulary), config)
        # none where a checkpoint will give them
        fill(model.embedding, self.vocabulary, getattr(self, "vectors", {}))
        if config.words == "chosen":
            model.estimator = estimator(config.estimator)
        return model

    def size(self, example: Any) -> int:
        return len(example.words)

    def collate(self, examples: Sequence[Any]) -> Batch:
        rows = [self.vocabulary.numbers(word.lower() for word in e.words) for e in examples]
        words = pad(rows)
        words = nn.functional.pad(words, (0, max(0, self.facts["k"] - words.shape[1])))
        lengths = torch.tensor([len(row) for row in rows])
        return Batch(words, lengths, torch.tensor([example.label for example in examples]))

    def loss(self, model: Any, batch: Batch) -> Tensor:
        dropped = torch.rand(batch.words.shape, device=batch.words.device) < model.word_dropout
        words = batch.words.where(~dropped | (batch.words == NONE), UNKNOWN)
        batch = batch._replace(words=words)

        def cost(z: Tensor) -> Tensor:
            logits = model.read(z, words)  # (..., B, 2)
            labels = batch.labels.expand(logits.shape[:-1])
            each = cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
            return each.view(labels.shape)

        if model.estimator is None:
            return cross_entropy(model(batch)[1], batch.labels, reduction="none")
        return model.estimator.loss(model.structure(batch), cost)

    def evaluate(self, model: Any, batches: Iterable[Batch]) -> dict[str, Ratio | float]:
        right = sentences = seen = words = 0
        for batch in batches:
            z, logits = model(batch)
            right += int((logits.argmax(-1) == batch.labels).sum())
            sentences += len(logits)
            seen += int((z * (batch.words != NONE)).sum())
            words += int(batch.lengths.sum())
        return {"accuracy": Ratio(right, sentences), "words_seen": Ratio(seen, words)}

    def read(self, path: Path, config: ExplainConfig) -> list[sst.Phrase]:
        return sst.read(path, binary=True)

    def line(self, example: Any) -> str:
        return " ".join(example.words)

    def predict(self, model: Any, lines: Sequence[str]) -> Iterator[dict[str, Any]]:
        device = next(model.parameters()).device
        for line in lines:
            words = words_between_spaces(line)
            z, logits = model(move(self.collate([sst.Phrase(words, 0, [])]), device))
            chosen = [t for t, kept in enumerate(z[0, : len(words)].tolist()) if kept]
            p = logits[0].softmax(-1)[1].item()
            marked = [f"[{word}]" if t in chosen else word for t, word in enumerate(words)]
            answer = {"words": words, "chosen": chosen, "label": LABELS[int(p > 0.5)]}
            yield {
                **answer,
                "positive": round(p, 4),
                "text": f"{answer['label']}: {' '.join(marked)}",
            }


def estimator(text: str) -> Estimator:
    """An estimator of the library, or L2X."""
    name, _, rest = text.partition(":")
    if name != "l2x":
        return estimator_of(text, KSubset(torch.zeros(2), 1))
    try:
        return L2X(
            **{
                key: float(value)
                for key, _, value in (p.partition("=") for p in rest.split(",") if p)
            }
        )
    except (TypeError, ValueError):
        raise UserError(f"estimator l2x: expected l2x:temperature=NUMBER, got {text!r}.") from None


# -- data -----------------------------------------------------------------------------------------


def generate(sizes: Sequence[int], seed: int = 0) -> Splits:
    """Sentences of made-up words, of which one or two tell the polarity."""
    rng = np.random.default_rng(seed)
    plain = [f"word{i}" for i in range(40)]
    telling = [[f"{name}{i}" for i in range(8)] for name in ("bad", "good")]

    def sentence() -> sst.Phrase:
        label = int(rng.integers(2))
        words = [str(rng.choice(plain)) for _ in range(rng.integers(4, 12))]
        for _ in range(rng.integers(1, 3)):
            words.insert(int(rng.integers(len(words) + 1)), str(rng.choice(telling[label])))
        return sst.Phrase(words, label, [])

    return Splits(*([sentence() for _ in range(size)] for size in sizes))
