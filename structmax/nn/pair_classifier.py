"""Classifiers of two sentences, each encoded by itself along its own tree.

Sentences come as rows of one batch: row 2i and row 2i + 1 are a pair. They are compared by [u, v,
|u − v|, u ⊙ v] (Mou et al., "Natural language inference by tree-based convolution and heuristic
matching", ACL 2016), and what is said of a pair is said of both of its rows, so that an estimator
sees the loss of the pair as the cost of either tree. An estimator must give both rows as many
structures, in the same order: one that draws or chooses z, not one that sums over a support.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from structmax import checks
from structmax.nn.classifier import TreeClassifier
from structmax.nn.dependency_classifier import DependencyClassifier
from structmax.nn.leaf_lstm import LeafLSTM
from structmax.nn.structured_attention import StructuredAttention


def compare(states: Tensor) -> Tensor:
    """``(N/2, 4·d)`` of sentences ``(N, d)``.

    >>> compare(torch.tensor([[1.0], [3.0]]))
    tensor([[1., 3., 2., 3.]])
    """
    if len(states) % 2:
        raise ValueError(
            f"compare: rows 2i and 2i + 1 are a pair, so there must be an even number of rows, got "
            f"{len(states)}. An estimator must give both sentences of a pair as many trees."
        )
    u, v = states.unflatten(0, (-1, 2)).unbind(1)
    return torch.cat([u, v, (u - v).abs(), u * v], -1)


def check_pairs(owner: str, items: Tensor) -> None:
    """Rows 2i and 2i + 1 of what is compared are the two sentences of a pair."""
    if len(items) % 2 or not checks.can_look():  # the former is for ``compare`` to tell
        return
    first, second = items[0::2], items[1::2]
    if not bool(((first % 2 == 0) & (second == first + 1)).all()):
        raise ValueError(
            f"{owner}: both sentences of a pair must have as many trees, in the same order. Use an "
            "estimator that draws or chooses a tree, not one that sums over several, and no beam."
        )


def interleave(first: Tensor, second: Tensor) -> Tensor:
    """Words ``(B, n)`` and ``(B, m)``, or lengths ``(B)`` of both, as rows of one batch.

    >>> interleave(torch.tensor([[3, 4]]), torch.tensor([[5]]))
    tensor([[3, 4],
            [5, 0]])
    """
    if first.dim() == 2:
        width = max(first.shape[1], second.shape[1])
        first, second = (nn.functional.pad(t, (0, width - t.shape[1])) for t in (first, second))
    return torch.stack([first, second], 1).flatten(0, 1)


def _head(size: int, classes: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4 * size, size), nn.ReLU(), nn.Dropout(dropout), nn.Linear(size, classes)
    )


class PairByTree(TreeClassifier):
    """Pairs of sentences along binary trees: a :class:`TreeClassifier` in all else.

    >>> _ = torch.manual_seed(0)
    >>> model = PairByTree(9, 3, "easy-first", input_size=6, hidden_size=8)
    >>> words, lengths = torch.tensor([[3, 4, 5], [6, 7, 0]]), torch.tensor([3, 2])  # one pair
    >>> model(words, lengths).shape  # twice the same
    torch.Size([2, 3])
    """

    def __init__(
        self,
        vocabulary: int,
        classes: int,
        encoder: str = "easy-first",
        input_size: int = 100,
        hidden_size: int = 200,
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(1, classes, encoder, hidden_size, dropout=dropout, **options)
        self.words = nn.Embedding(vocabulary, input_size, padding_idx=0)
        nn.init.normal_(self.words.weight.data[1:], std=0.3)  # as GloVe has
        size = self.embedding.embedding_dim
        self.embedding = nn.Sequential(  # type: ignore[assignment]
            self.words, nn.Dropout(dropout), nn.Linear(input_size, size)
        )
        self.head = _head(hidden_size, classes, dropout)

    def _check_items(self, items: Tensor) -> None:
        check_pairs("PairByTree", items)

    def _logits(self, states: Tensor) -> Tensor:
        states = states if self.kind == "lstm" else self.encoder.hidden(states)
        return self.head(compare(states)).repeat_interleave(2, 0)


class PairByDependency(DependencyClassifier):
    """Pairs of sentences along dependency trees: a :class:`DependencyClassifier` in all else.

    >>> _ = torch.manual_seed(0)
    >>> model = PairByDependency(9, 3, composer="gcn", input_size=6, hidden_size=8)
    >>> words, lengths = torch.tensor([[3, 4, 5], [6, 7, 0]]), torch.tensor([3, 2])  # one pair
    >>> model(words, lengths).shape
    torch.Size([2, 3])
    """

    def __init__(self, vocabulary: int, classes: int, *args: Any, **options: Any) -> None:
        super().__init__(vocabulary, classes, *args, **options)
        self.head = _head(self.head.in_features, classes, self.dropout.p)  # type: ignore[assignment]

    def _check_items(self, items: Tensor) -> None:
        check_pairs("PairByDependency", items)

    def _logits(self, states: Tensor) -> Tensor:
        return self.head(self.dropout(compare(states))).repeat_interleave(2, 0)


class PairByAttention(nn.Module):
    """Pairs of sentences, each read by :class:`StructuredAttention` over a bidirectional LSTM.

    Of a ``"chain"`` the sentence is what it selects; of a tree the largest of each feature over
    the words. Kim, Denton, Hoang & Rush, "Structured attention networks", ICLR 2017, section 4.4;
    with the Matrix-Tree theorem Liu & Lapata, TACL 2018.

    Args:
        vocabulary, classes: how many there are; word 0 is padding
        structure: ``"chain"``, ``"projective"`` or ``"nonprojective"``
        input_size, hidden_size: of word vectors and of states; the latter an even number
        dropout: of word vectors and of the classifier
        estimator: as in :class:`StructuredAttention`

    >>> _ = torch.manual_seed(0)
    >>> model = PairByAttention(9, 3, "projective", input_size=6, hidden_size=8)
    >>> words, lengths = torch.tensor([[3, 4, 5], [6, 7, 0]]), torch.tensor([3, 2])  # one pair
    >>> model(words, lengths).shape
    torch.Size([1, 3])
    """

    def __init__(
        self,
        vocabulary: int,
        classes: int,
        structure: str = "nonprojective",
        input_size: int = 100,
        hidden_size: int = 200,
        dropout: float = 0.0,
        estimator: Any = "marginals",
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, input_size, padding_idx=0)
        nn.init.normal_(self.embedding.weight.data[1:], std=0.3)
        self.context = LeafLSTM(input_size, hidden_size)
        self.attention = StructuredAttention(structure, hidden_size, estimator)
        self.dropout = nn.Dropout(dropout)
        self.head = _head(hidden_size, classes, dropout)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        """Logits ``(N/2, classes)`` of words ``(N, n)``, lengths ``(N)``."""
        x = self.context(self.dropout(self.embedding(words)), lengths)
        states = self.attention(x, lengths)
        if self.attention.kind != "chain":
            inside = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
            states = torch.where(inside[..., None], states, -1.0).amax(1)  # tanh is above −1
        return self.head(self.dropout(compare(states)))
