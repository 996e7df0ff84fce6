"""Recursive networks over dependency trees."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from structmax.nn.levels import Levels, on


class ChildSumTreeLSTM(nn.Module):
    """Encodes sentences along dependency trees (Tai, Socher & Manning, ACL 2015, section 3.1).

    Of a word x with children k, summed over any number of them::

        h̃ = Σₖ hₖ;   i, o, u = W x + U h̃ + b;   fₖ = W_f x + U_f hₖ + b_f
        c = σ(i) ⊙ tanh(u) + Σₖ σ(fₖ) ⊙ cₖ;   h = σ(o) ⊙ tanh(c)

    Args:
        input_size: of the words
        hidden_size: d

    >>> encoder = ChildSumTreeLSTM(4, 8)
    >>> heads = torch.tensor([[2, 0, 2], [0, 1, 0]])  # 0 is the root; the second has two words
    >>> encoder(torch.randn(2, 3, 4), heads, torch.tensor([3, 2])).shape
    torch.Size([2, 8])
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.words = nn.Linear(input_size, 4 * hidden_size)
        self.sums = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.forget = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(
        self, words: Tensor, heads: Tensor, lengths: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """The hidden vectors of the roots, summed for each item, ``(B, d)``.

        ``words`` ``(B, n, input_size)``, ``heads`` ``(B, n)`` with 0 for the root symbol and words
        counted from 1. ``weights`` ``(B, n)`` multiplies what each word sends to its head.
        """
        b, n, d = len(words), words.shape[1], self.hidden_size
        number, parent, level = dependency_levels(heads.cpu().numpy(), lengths.cpu().numpy())
        levels = Levels(level, parent)
        place = np.empty(len(level), np.int64)  # among the nodes of its own level
        for nodes in levels.nodes:
            place[nodes] = np.arange(len(nodes))
        depth = len(levels.nodes)
        sources = [number[nodes] for nodes in levels.inputs[1:]]
        targets = [place[parent[nodes]] for nodes in levels.inputs[1:-1]] + [sources[-1] // n]
        words_of = [number[nodes] for nodes in levels.nodes]
        rows = on(words.device, [*words_of, *sources, *targets])
        made, reads, to = rows[:depth], rows[depth : 2 * depth], rows[2 * depth :]
        flat, sent = words.reshape(b * n, -1), None if weights is None else weights.reshape(-1, 1)

        def receive(level: int, inputs: Tensor) -> Tensor:
            return inputs if sent is None else inputs * sent.index_select(0, reads[level - 1])

        def step(level: int, inputs: Tensor | None) -> Tensor:
            gates = self.words(flat.index_select(0, made[level]))
            ious, forget = gates.split([3 * d, d], -1)
            kept = zeros = torch.zeros_like(forget)
            if inputs is not None:
                h, c = receive(level, inputs).chunk(2, -1)
                above = to[level - 1]
                ious = ious + self.sums(zeros.index_add(0, above, h))
                f = torch.sigmoid(forget.index_select(0, above) + self.forget(h))
                kept = zeros.index_add(0, above, f * c)
            i, o, u = ious.chunk(3, -1)
            c = torch.sigmoid(i) * torch.tanh(u) + kept
            return torch.cat([torch.sigmoid(o) * torch.tanh(c), c], -1)

        h = receive(len(levels.nodes), levels.run(step))[:, :d]
        return h.new_zeros(b, d).index_add(0, to[-1], h)


def dependency_levels(
    heads: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each word of a batch: its row in ``(B·n)``, its head among these words, its height."""
    b, n = heads.shape
    real = np.arange(n) < lengths[:, None]
    item, word = np.nonzero(real)
    index = np.cumsum(real).reshape(b, n) - 1
    head = heads[item, word]
    parent = np.where(head > 0, index[item, np.maximum(head, 1) - 1], -1)
    level, below = np.zeros(len(item), np.int64), np.nonzero(parent >= 0)[0]
    for _ in range(n + 1):
        higher = level.copy()
        np.maximum.at(higher, parent[below], level[below] + 1)
        if np.array_equal(higher, level):
            return item * n + word, parent, level
        level = higher
    raise ValueError(f"ChildSumTreeLSTM: the heads of some item form a cycle: {heads.tolist()}.")
