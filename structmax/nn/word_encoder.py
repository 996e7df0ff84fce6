"""Vectors of words in their sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from structmax.data.words import NONE, UNKNOWN, Words


class WordEncoder(nn.Module):
    """A BiLSTM over words, each given by a learned vector, a given one, and the last states of a
    BiLSTM over its letters, side by side (Lample et al., "Neural architectures for named entity
    recognition", NAACL 2016).

    Args:
        facts: the words, letters and given words of a ``structmax.data.Vocabulary``
        word_size: of the learned vectors
        char_size: of the vectors of letters, and of their states in each direction
        given_size: of the given vectors, which are not trained; fill ``given.weight[1:]``
        hidden_size: of the words' states in each direction; ``output_size`` is twice as much
        layers: of the BiLSTM over words
        dropout: of everything that enters or leaves a layer
        word_dropout: how often a learned vector is that of an unknown word, in training

    >>> from structmax.data.words import Vocabulary, facts
    >>> names = facts([["a", "cat"]], least_count=1)
    >>> encoder = WordEncoder(names, word_size=4, char_size=3, hidden_size=5)
    >>> encoder(Vocabulary(names).collate([["a", "cat"], ["dogs"]])).shape  # (B, n, output_size)
    torch.Size([2, 2, 10])
    """

    def __init__(
        self,
        facts: dict[str, Any],
        word_size: int,
        char_size: int,
        hidden_size: int,
        given_size: int = 0,
        layers: int = 1,
        dropout: float = 0.0,
        word_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(len(facts["words"]) + 2, word_size, padding_idx=NONE)
        self.chars = nn.Embedding(len(facts["chars"]) + 2, char_size, padding_idx=NONE)
        self.given = nn.Embedding(len(facts["given"]) + 1, given_size, padding_idx=NONE)
        self.given.weight.requires_grad_(False)
        self.spell = nn.LSTM(char_size, char_size, batch_first=True, bidirectional=True)
        self.context = nn.LSTM(
            word_size + given_size + 2 * char_size,
            hidden_size,
            layers,
            batch_first=True,
            bidirectional=True,
            dropout=dropout if layers > 1 else 0.0,
        )
        self.dropout, self.word_dropout = nn.Dropout(dropout), word_dropout
        self.output_size = 2 * hidden_size

    def forward(self, batch: Words) -> Tensor:
        """The words' states ``(B, n, output_size)``."""
        _refuse_empty(batch)
        if not batch.words.numel():
            return self.words.weight.new_zeros(*batch.words.shape, self.output_size)
        _, (last, _) = self.spell(pack(self.dropout(self.chars(batch.chars)), batch.letters))
        spelt = last.transpose(0, 1).flatten(1)[batch.spelt]  # (B, n, 2·char_size)
        words = batch.words
        if self.training and self.word_dropout:
            kept = torch.rand(words.shape, device=words.device) >= self.word_dropout
            words = words.where(kept, UNKNOWN)
        inputs = torch.cat([self.words(words), self.given(batch.given), spelt], -1)
        states, _ = self.context(pack(self.dropout(inputs), batch.counts))
        return self.dropout(pad_packed_sequence(states, batch_first=True)[0])


def _refuse_empty(batch: Words) -> None:
    if not batch.counts.all():
        item = int(np.argmin(batch.counts))
        raise ValueError(f"WordEncoder: item {item} has no words. Leave it out of the batch.")
    if not batch.letters.all():
        spelt = batch.spelt.cpu().numpy() == np.argmin(batch.letters)
        item, word = np.argwhere(spelt & (np.arange(spelt.shape[1]) < batch.counts[:, None]))[0]
        raise ValueError(f"WordEncoder: word {word} of item {item} has no letters. Leave it out.")


def pack(inputs: Tensor, counts: Any) -> Any:
    """Sequences ``(B, n, d)`` of these lengths, an array on the host, as recurrent networks take
    them."""
    sizes = torch.from_numpy(counts)
    return pack_padded_sequence(inputs, sizes, batch_first=True, enforce_sorted=False)
