"""Recursive networks over dependency trees."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from structmax.nn.levels import Levels, on
from structmax.primitive import on_host


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
        if not b:
            return words.new_zeros(0, d)
        levels, made, reads, to = _plan(heads, lengths, words.device)
        flat, sent = words.reshape(b * n, -1), None if weights is None else weights.reshape(-1, 1)

        def receive(level: int, inputs: Tensor) -> Tensor:
            return inputs if sent is None else inputs * sent.index_select(0, reads[level - 1])

        def step(level: int, inputs: Tensor | None) -> Tensor:
            gates = self.words(flat.index_select(0, made[level]))
            ious, forget = gates.split([3 * d, d], -1)
            kept = torch.zeros_like(forget)
            if inputs is not None:
                h, c = receive(level, inputs).chunk(2, -1)
                above = to[level - 1]
                ious = ious + self.sums(_sum(h, above, len(forget)))
                f = torch.sigmoid(forget.index_select(0, above) + self.forget(h))
                kept = _sum(f * c, above, len(forget))
            i, o, u = ious.chunk(3, -1)
            c = torch.sigmoid(i) * torch.tanh(u) + kept
            return torch.cat([torch.sigmoid(o) * torch.tanh(c), c], -1)

        return _sum(receive(len(made), levels.run(step))[:, :d], to[-1], b)


def _sum(values: Tensor, to: Tensor, count: int) -> Tensor:
    """Rows ``(count, d)``, each the sum of the values ``(m, d)`` sent to it."""
    return values.new_zeros(count, values.shape[1]).index_add(0, to, values)


@torch._disable_dynamo  # a plan depends on the heads themselves
def _plan(
    heads: Tensor, lengths: Tensor, device: torch.device
) -> tuple[Levels, list[Tensor], list[Tensor], list[Tensor]]:
    """The levels; of each, the rows ``(B·n)`` of its words. Of each level above the leaves and of
    the end, the rows it reads, and where among its own words, or the items, their sum belongs."""
    number, parent, level = dependency_levels("ChildSumTreeLSTM", heads, lengths)
    levels, n = Levels(level, parent), heads.shape[1]
    place = np.empty(len(level), np.int64)  # among the nodes of its own level
    for nodes in levels.nodes:
        place[nodes] = np.arange(len(nodes))
    depth = len(levels.nodes)
    sources = [number[nodes] for nodes in levels.inputs[1:]]
    targets = [place[parent[nodes]] for nodes in levels.inputs[1:-1]] + [sources[-1] // n]
    words_of = [number[nodes] for nodes in levels.nodes]
    rows = on(device, [*words_of, *sources, *targets])
    return levels, rows[:depth], rows[depth : 2 * depth], rows[2 * depth :]


def dependency_levels(
    owner: str, heads: Tensor, lengths: Tensor
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each word of a batch: its row in ``(B·n)``, its head among these words, its height.

    Heads that are no tree are an error.
    """
    (b, n), given = heads.shape, on_host(heads, f"{owner}: heads")
    sizes = on_host(lengths, f"{owner}: lengths")
    bad = (sizes < 1) | (sizes > n)
    if bad.any():
        i = bad.argmax()
        raise ValueError(
            f"{owner}: lengths must be between 1 and {n}, got {sizes[i]} for item {i}."
        )
    real = np.arange(n) < sizes[:, None]
    item, word = np.nonzero(real)
    head = given[item, word]
    bad = (head < 0) | (head > sizes[item])
    if bad.any():
        i, m = item[bad][0], word[bad][0]
        raise ValueError(
            f"{owner}: a head must be between 0 and {sizes[i]}, got {given[i, m]} for word {m + 1} "
            f"of item {i}. Words count from 1, and 0 is the root."
        )
    index = np.cumsum(real).reshape(b, n) - 1
    parent = np.where(head > 0, index[item, np.maximum(head, 1) - 1], -1)
    level, below = np.zeros(len(item), np.int64), np.nonzero(parent >= 0)[0]
    for _ in range(n + 1):
        higher, lower = level.copy(), level
        np.maximum.at(higher, parent[below], level[below] + 1)
        if np.array_equal(higher, level):
            return item * n + word, parent, level
        level = higher
    i = item[level != lower][0]
    raise ValueError(
        f"{owner}: the heads of item {i} form a cycle: {given[i, : sizes[i]].tolist()}."
    )
