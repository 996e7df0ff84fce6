"""A tagger on generated sequences: the smallest recipe, and the one to copy.

Words are numbers, drawn at random; the tag of a word is its sum with the word before it, modulo c.
A bigram model solves it, a word alone says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from structmax.data.folder import quoted
from structmax.nn.crf import CRF
from structmax.train.config import TrainConfig, option
from structmax.train.errors import UserError
from structmax.train.metrics import Ratio
from structmax.train.task import Splits, Task


@dataclass
class ToyConfig(TrainConfig):
    """The options of ``toy``."""

    steps: int = option(200, "Train for this many updates; 0: no limit.")
    lr: float = option(1e-2, "Learning rate.")
    examples: int = option(512, "Training examples to generate.", fixed=True)
    words: int = option(4, "Words in the vocabulary, and tags.", fixed=True)
    dim: int = option(16, "Size of the hidden states.")
    dropout: float = option(0.1, "Probability to drop an embedding's entry.")

    def check(self) -> None:
        super().check()
        if self.examples < 1 or self.words < 2:
            raise UserError("toy: there must be an example and two words at least.")


class Tagger(nn.Module):
    """Embeddings, a convolution over pairs of words, a chain of tags."""

    def __init__(self, words: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Embedding(words + 1, dim, padding_idx=0), nn.Dropout(dropout))
        self.pair = nn.Sequential(nn.Linear(2 * dim, dim), nn.Tanh(), nn.Linear(dim, words))
        self.chain = CRF(words, batch_first=True)

    def parser_parameters(self) -> Iterator[nn.Parameter]:
        return self.chain.parameters()

    def forward(self, words: Tensor) -> Tensor:
        """Scores of the tags ``(B, n, c)`` of words ``(B, n)``, 0 in the padding."""
        here = self.embed(words)
        before = torch.cat([torch.zeros_like(here[:, :1]), here[:, :-1]], 1)
        return self.pair(torch.cat([before, here], -1))


class Toy(Task):
    """Tags of generated sequences by a linear chain: a quick trial of the trainer."""

    name = "toy"
    config = ToyConfig
    metric = "accuracy"

    def data(self, config: ToyConfig) -> Splits:
        rng = np.random.default_rng(config.seed)
        self.facts = {"words": config.words}

        def draw(count: int) -> list[Any]:
            found = []
            for _ in range(count):
                words = rng.integers(0, config.words, rng.integers(2, 9))
                tags = (words + np.concatenate([[0], words[:-1]])) % config.words
                found.append((words + 1, tags))
            return found

        return Splits(draw(config.examples), draw(100), draw(100))

    def model(self, config: ToyConfig) -> nn.Module:
        return Tagger(config.words, config.dim, config.dropout)

    def size(self, example: Any) -> int:
        return len(example[0])

    def collate(self, examples: Sequence[Any]) -> Any:
        pad = nn.utils.rnn.pad_sequence
        words, tags = ([torch.from_numpy(e[i]) for e in examples] for i in (0, 1))
        return {"words": pad(words, batch_first=True), "tags": pad(tags, batch_first=True)}

    def loss(self, model: Any, batch: Any) -> Tensor:
        words = batch["words"]
        return -model.chain(model(words), batch["tags"], mask=words > 0, reduction="none")

    def has_unused(self, model: Any) -> bool:
        return False

    def evaluate(self, model: Any, batches: Iterable[Any]) -> dict[str, Ratio | float]:
        right = count = 0.0
        for batch in batches:
            mask = batch["words"] > 0
            for tags, gold, keep in zip(
                model.chain.decode(model(batch["words"]), mask), batch["tags"], mask
            ):
                right += sum(a == b for a, b in zip(tags, gold[keep].tolist()))
                count += len(tags)
        return {"accuracy": Ratio(right, count)}

    def line(self, example: Any) -> str:
        return " ".join(str(word - 1) for word in example[0])

    def predict(self, model: Any, lines: Sequence[str]) -> Iterator[dict[str, Any]]:
        most = self.facts["words"]
        device = next(model.parameters()).device
        for line in lines:
            wanted = f"expected numbers from 0 to {most - 1}, got {quoted(line)}."
            try:
                words = [int(word) for word in line.split()]
            except ValueError:
                raise ValueError(wanted) from None
            if not words or not all(0 <= word < most for word in words):
                raise ValueError(wanted)
            (tags,) = model.chain.decode(model(torch.tensor([words], device=device) + 1))
            yield {"words": words, "tags": tags, "text": " ".join(map(str, tags))}
