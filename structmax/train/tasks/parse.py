"""Dependency parsing: a head and a label for each word, as a tree.

Letters and words feed a BiLSTM, whose states score arcs by a biaffine form, as in Dozat & Manning,
"Deep biaffine attention for neural dependency parsing", ICLR 2017. The losses compared are those of
Niculae et al., "SparseMAP", ICML 2018, §5.2; labels are chosen after the tree, given each arc.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from structmax import losses
from structmax.data import Vocabulary, Words, treebank, words
from structmax.data.words import in_batches, words_between_spaces
from structmax.nn.biaffine import Biaffine, LabelledBiaffine
from structmax.nn.word_encoder import WordEncoder
from structmax.structures.dependency_tree import DependencyTree
from structmax.train.batches import move
from structmax.train.config import SCHEDULE, Schedule, TrainConfig, option
from structmax.train.errors import UserError
from structmax.train.metrics import Ratio
from structmax.train.task import Splits, Task
from structmax.train.tasks.vocabulary import all_vectors

LOSSES: dict[str, Callable[..., Tensor]] = {
    "crf": losses.crf,
    "hinge": losses.hinge,
    "sparsemap": losses.sparsemap,
    "margin-sparsemap": losses.margin_sparsemap,
}


MOST_CELLS = 1 << 26  # of all trees that SparseMAP may try for a sentence, n² to each tree


@dataclass
class ParseConfig(TrainConfig):
    """The options of ``parse``."""

    steps: int = option(3000, "Train for this many updates; 0: no limit.", cpu=1000)
    batch_size: int = option(1000, "Most examples per update and worker.")
    batch_tokens: int = option(
        5000, "At most this many words, padding included; 0: no limit.", cpu=1000
    )
    lr: float = option(2e-3, "Learning rate.")
    schedule: Schedule = option("cosine", SCHEDULE)
    warmup: int = option(50, "Updates over which the learning rate rises from 0.")
    clip: float = option(5.0, "Largest norm of the gradient; 0: any.")
    corpus: str = option(
        "", "Folder of CoNLL-U files; none: a tiny generated set.", fixed=True, data=True
    )
    data: str = option("", "Folder of data sets; else $STRUCTMAX_DATA, or beside the checkout.")
    vectors: str = option(
        "", "File of word vectors, such as glove/glove6B100d_subset.txt.", fixed=True, data=True
    )
    trees: Literal["nonprojective", "projective", "none", "random"] = option(
        "nonprojective",
        "What heads form, with one root. none: heads are independent of each other; random: a "
        "random tree, of which only labels are learned.",
        fixed=True,  # a projective parser is trained on projective trees alone
    )
    loss: Literal["crf", "hinge", "sparsemap", "margin-sparsemap"] = option(
        "crf", "What trees are trained by; without trees, a softmax of each word's heads."
    )
    max_iter: int = option(100, "Most steps of SparseMAP for a sentence, in training.", least=1)
    support: bool = option(False, "Also count the trees of SparseMAP for each sentence.")
    examples: int = option(300, "Training sentences to generate.", fixed=True)
    least_count: int = option(2, "Words seen less often have no vector of their own.", fixed=True)
    word_size: int = option(100, "Size of the words' vectors.")
    char_size: int = option(50, "Size of the letters' vectors and states.")
    hidden_size: int = option(400, "Size of the words' states, in each direction.", cpu=200)
    layers: int = option(3, "Layers of the BiLSTM.", least=1, cpu=2)
    arc_size: int = option(400, "Size of what arcs are scored by.", cpu=200)
    label_size: int = option(100, "Size of what labels are scored by.")
    dropout: float = option(0.33, "Probability of dropout.")
    word_dropout: float = option(0.2, "Probability that a training word is taken for unknown.")

    def check(self) -> None:
        super().check()
        if self.trees in ("none", "random") and self.loss != "crf":
            raise UserError(f"loss has no effect with --trees {self.trees}.")


class Batch(NamedTuple):
    """Sentences, with heads and labels ``(B, n)``; an unknown label is −1."""

    words: Words
    heads: Tensor
    labels: Tensor

    @property
    def lengths(self) -> Tensor:
        return self.words.lengths

    def inside(self) -> Tensor:
        """What is no padding, ``(B, n)``."""
        return torch.arange(self.heads.shape[1], device=self.heads.device) < self.lengths[:, None]


class Parser(nn.Module):
    """From a batch to its trees and their labels."""

    def __init__(self, facts: dict[str, Any], config: ParseConfig) -> None:
        super().__init__()
        self.kind, self.support = config.trees, config.support
        options = {"max_iter": config.max_iter} if "sparsemap" in config.loss else {}
        self.loss = partial(LOSSES[config.loss], reduction="none", **options)
        self.on_host = "sparsemap" in config.loss  # whose solver is compiled for the CPU
        self.encoder = WordEncoder(
            facts,
            config.word_size,
            config.char_size,
            config.hidden_size,
            facts["size"],
            config.layers,
            config.dropout,
            config.word_dropout,
        )
        size = self.encoder.output_size
        self.root = nn.Parameter(torch.zeros(size))
        self.arcs = Biaffine(size, config.arc_size, config.dropout)
        self.labels = LabelledBiaffine(
            size, config.label_size, len(facts["labels"]), config.dropout
        )

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """States ``(B, n+1, d)``, the root symbol's first, and scores of arcs ``(B, n+1, n+1)``."""
        states = self.encoder(batch.words)
        states = torch.cat([self.root.expand(len(states), 1, -1), states], 1)
        if self.kind == "random":
            return states, torch.randn(*states.shape[:2], states.shape[1], device=states.device)
        return states, self.arcs(states).float()

    def tree(self, arcs: Tensor, lengths: Tensor, on_host: bool = False) -> DependencyTree:
        """The structure; ``on_host``: copied to the CPU."""
        if on_host:
            arcs, lengths = arcs.cpu(), lengths.cpu()
        projective = self.kind == "projective"
        # data were looked at when they were read
        return DependencyTree(  # type: ignore[abstract]
            arcs, lengths, projective, validate_args=False, labelled=False
        )

    def choices(self, arcs: Tensor, lengths: Tensor) -> Tensor:
        """Scores of each word's heads ``(B, n, n+1)``, −inf for itself and what is not there."""
        at = torch.arange(arcs.shape[-1], device=arcs.device)
        there = (at[1:, None] != at) & (at <= lengths[:, None, None])
        return arcs.mT[:, 1:].masked_fill(~there, -torch.inf)

    def heads(self, arcs: Tensor, lengths: Tensor) -> Tensor:
        """The best tree, or the best heads where there are no trees, ``(B, n)``."""
        if self.kind == "none":
            return self.choices(arcs, lengths).argmax(-1)
        return self.tree(arcs, lengths).argmax().argmax(-2)[:, 1:]

    def label(self, states: Tensor, heads: Tensor) -> Tensor:
        """Scores of the labels of each word's arc ``(B, n, c)``."""
        above = states.gather(1, heads[..., None].expand(-1, -1, states.shape[-1]))
        return self.labels(above, states[:, 1:])


class Parse(Task):
    """Universal Dependencies by a biaffine parser: UAS and LAS over all words, punctuation too."""

    name = "parse"
    config = ParseConfig
    metric = "uas"

    def data(self, config: ParseConfig) -> Splits:
        if config.corpus:
            train, valid, test = treebank.read(config.corpus, config.data)
        else:
            train, valid, test = treebank.generate((config.examples, 100, 100), config.seed)
        if config.trees == "projective":  # others have no score
            train = [sentence for sentence in train if treebank.is_projective(sentence.heads)]
        sentences = [sentence.words for sentence in train]
        given, self.vectors = all_vectors(config.vectors, config.data, sentences, self.notes)
        self.facts = {
            **words.facts(sentences, config.least_count, given),
            "labels": sorted({label for sentence in train for label in sentence.labels}),
            "size": self.vectors.shape[1],
        }
        for name in ("vocabulary", "labels", "universal"):
            self.__dict__.pop(name, None)
        return Splits(train, valid, test)

    def model(self, config: ParseConfig) -> nn.Module:
        model = Parser(self.facts, config)
        vectors = getattr(self, "vectors", ())  # none where a checkpoint will give them
        if len(vectors):
            model.encoder.given.weight.data[1:] = torch.from_numpy(vectors)
        return model

    def size(self, example: Any) -> int:
        return len(example.words)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.facts)

    @cached_property
    def labels(self) -> dict[str, int]:
        """The number of each label; one whose subtype is unknown has that of its main part."""
        known = {label: i for i, label in enumerate(self.facts["labels"])}
        for label, i in [*known.items()]:
            known.setdefault(label.split(":")[0], i)
        return known

    @cached_property
    def universal(self) -> Tensor:
        """For each label a number that is that of its main part, before the colon ``(c)``."""
        return torch.tensor([self.labels[label.split(":")[0]] for label in self.facts["labels"]])

    def collate(self, examples: Sequence[Any]) -> Batch:
        found = self.vocabulary.collate([example.words for example in examples])
        heads = itertools.chain.from_iterable(example.heads for example in examples)
        index = self.labels
        labels = [
            index[label] if label in index else index.get(label.split(":")[0], -1)
            for example in examples
            for label in example.labels
        ]
        return Batch(found, words.pad([*heads], found.counts), words.pad(labels, found.counts))

    def loss(self, model: Any, batch: Batch) -> Tensor:
        states, arcs = model(batch)
        inside = batch.inside()
        label = cross_entropy(
            model.label(states, batch.heads).mT, batch.labels, ignore_index=-1, reduction="none"
        )
        each = (label * inside).sum(1)
        if model.kind == "none":
            choices = model.choices(arcs, batch.lengths)
            each = each + (cross_entropy(choices.mT, batch.heads, reduction="none") * inside).sum(1)
        elif model.kind != "random":
            on_host = model.on_host and arcs.is_cuda
            tree = model.tree(arcs, batch.lengths, on_host)
            each = each + model.loss(tree, batch.heads.to(tree.scores.device)).to(each.device)
        return each * (len(each) / batch.lengths.sum())  # the mean is then that of words

    def has_unused(self, model: Any) -> bool:
        return bool(model.kind == "random")  # whose arcs have no scores

    def evaluate(self, model: Any, batches: Iterable[Batch]) -> dict[str, Ratio | float]:
        device = next(model.parameters()).device
        universal = self.universal.to(device)
        sums = torch.zeros(5, dtype=torch.float64, device=device)
        sentences, seconds = 0, 0.0
        for number, batch in enumerate(batches):
            if number == 0:  # what is compiled at its first use is not timed
                self._found(model, batch)
            start = time.perf_counter()
            arcs, heads, labels = self._found(model, batch)
            float(heads.sum())  # wait for it
            seconds += time.perf_counter() - start
            sentences += len(heads)
            inside = batch.inside()
            right = (heads == batch.heads) & inside
            both = right & (
                universal[labels] == torch.where(batch.labels < 0, -1, universal[batch.labels])
            )
            sums[:3] += torch.stack([right.sum(), both.sum(), inside.sum()])
            if model.support and model.kind not in ("none", "random"):
                result = model.tree(arcs, batch.lengths, on_host=arcs.is_cuda).sparsemap()
                sums[3] += result.num_active.sum()
                sums[4] += (result.marginals > 0).sum()
        right, both, count, trees, heads_kept = sums.tolist()
        found: dict[str, Ratio | float] = {
            "uas": Ratio(right, count),
            "las": Ratio(both, count),
            "sentences_per_second": Ratio(sentences, seconds),
        }
        if model.support and model.kind not in ("none", "random"):
            found |= {"trees": Ratio(trees, sentences), "heads_per_word": Ratio(heads_kept, count)}
        return found

    def _found(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Scores of arcs, heads, and the numbers of their labels."""
        states, arcs = model(batch)
        heads = model.heads(arcs, batch.lengths)
        return arcs, heads, model.label(states, heads).argmax(-1)

    def read(self, path: Path, config: ParseConfig) -> list[treebank.Parsed]:
        return treebank.read_file(path)

    def line(self, example: Any) -> str:
        return " ".join(example.words)

    def predict(self, model: Any, lines: Sequence[str]) -> Iterator[dict[str, Any]]:
        device = next(model.parameters()).device
        names = self.facts["labels"]
        for rows in in_batches(map(words_between_spaces, lines)):
            nothing = [treebank.Parsed(w, [0] * len(w), names[:1] * len(w)) for w in rows]
            batch = move(self.collate(nothing), device)
            _, heads, numbers = self._found(model, batch)
            for sentence, above, labels in zip(rows, heads.tolist(), numbers.tolist()):
                n = len(sentence)
                above, labels = above[:n], [names[i] for i in labels[:n]]
                pairs = zip(sentence, above, labels)
                text = [f"{word}←{['root', *sentence][h]}/{label}" for word, h, label in pairs]
                answer = {"words": sentence, "heads": above, "labels": labels}
                yield {**answer, "text": " ".join(text)}

    def details(self, model: Any, answer: dict[str, Any]) -> dict[str, Any]:
        """The few trees that SparseMAP selects, the most probable first, where there are trees."""
        if model.kind in ("none", "random"):
            return {}
        sentence = treebank.Parsed(answer["words"], answer["heads"], answer["labels"])
        batch = move(self.collate([sentence]), next(model.parameters()).device)
        arcs = model(batch)[1]
        tree = model.tree(arcs, batch.lengths, on_host=arcs.is_cuda)
        result = tree.sparsemap(max_iter=min(1000, max(10, MOST_CELLS // arcs.numel())))
        pairs = zip(result.probs[0].tolist(), tree.decode(result.structures.movedim(1, 0)))
        kept = [(round(p, 4), heads) for p, (heads,) in pairs if p > 5e-5]
        few = [{"heads": heads, "probability": p} for p, heads in sorted(kept, reverse=True)]
        return {"trees": few}
