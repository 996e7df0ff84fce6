"""Recursive networks over all trees at once: every span mixes its splits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from structmax import checks
from structmax.nn.leaf_lstm import zero_padding
from structmax.nn.tree_lstm import make_cell


def compose_chart(
    cell: Any, leaves: Tensor, lengths: Tensor, weigh: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """The states of whole sentences ``(B, s)`` when each span is a mixture over its splits.

    The span of ``width`` leaves that starts at i has the state Σₖ wₖ cell([i, i+k], [i+k+1, …]).
    All spans of a width are computed together, O(n³) compositions for each item.

    Args:
        leaves: ``(B, n, s)``
        weigh: ``weigh(width, candidates)`` of candidates ``(B, starts, width − 1, s)`` gives the
            weights ``(B, starts, width − 1)``
    """
    n = leaves.shape[1]
    if lengths.device.type == "cpu" and checks.can_look():  # elsewhere a look makes a device wait
        checks.values("compose_chart", {}, {"lengths": checks.between(lengths, 1, n)})
    widths = [zero_padding(leaves, lengths)]  # widths[w]: spans of w + 1 leaves, (B, n − w, s)
    for w in range(1, n):
        starts = n - w
        left = torch.stack([widths[k][:, :starts] for k in range(w)], 2)
        right = torch.stack([widths[w - 1 - k][:, k + 1 : k + 1 + starts] for k in range(w)], 2)
        candidates = cell(left, right)
        widths.append((weigh(w + 1, candidates)[..., None] * candidates).sum(2))
    whole = torch.stack([spans[:, 0] for spans in widths], 1)  # [0, w] of each width
    return whole[torch.arange(len(whole), device=whole.device), lengths - 1]


class ChartLSTM(nn.Module):
    """The soft chart Tree-LSTM (Maillard & Clark, "Latent tree learning with differentiable
    parsers: shift-reduce parsing and chart parsing", 2018).

    Each span mixes its splits by softmax(cos(u, h) / temperature) of the candidates' hidden
    vectors h with a learned u. It is a relaxation: no single tree is chosen.

    Args:
        hidden_size: d
        cell: as in :class:`structmax.nn.TreeLSTM`
        temperature: the lower, the closer each span is to one split

    >>> encoder = ChartLSTM(8)
    >>> leaves = torch.randn(2, 4, encoder.state_size)
    >>> encoder(leaves, torch.tensor([4, 2])).shape
    torch.Size([2, 16])
    """

    def __init__(
        self,
        hidden_size: int,
        cell: str | nn.Module = "tree-lstm",
        temperature: float = 0.1,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        made: Any = make_cell(cell, hidden_size, dropout) if isinstance(cell, str) else cell
        self.cell, self.hidden_size, self.state_size = made, hidden_size, made.state_size
        self.temperature = temperature
        self.query = nn.Parameter(torch.randn(hidden_size))

    def hidden(self, state: Tensor) -> Tensor:
        """The hidden vectors of states, ``(..., d)``."""
        return self.cell.hidden(state)

    def forward(self, leaves: Tensor, lengths: Tensor) -> Tensor:
        """The states of whole sentences, ``(B, s)``."""
        return self.encode(leaves, lengths)[0]

    def encode(self, leaves: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """The states ``(B, s)``, and how good each split is ``(B, n, n, n)``.

        The latter at ``[i, j, k]`` is the energy of [i, k] [k+1, j]; 0 elsewhere.
        """
        b, n = leaves.shape[:2]
        every: list[Tensor] = []

        def weigh(width: int, candidates: Tensor) -> Tensor:
            hidden = self.cell.hidden(candidates)
            energy = torch.cosine_similarity(hidden, self.query, -1)  # (B, starts, width − 1)
            every.append(energy.detach())
            return torch.softmax(energy / self.temperature, -1)

        states = compose_chart(self.cell, leaves, lengths, weigh)
        energies = leaves.new_zeros(b, n, n, n)
        for w, energy in enumerate(every, 1):
            i = torch.arange(n - w, device=leaves.device)[:, None]
            energies[:, i, i + w, i + torch.arange(w, device=leaves.device)] = energy.to(leaves)
        return states, energies

    def parse(self, leaves: Tensor, lengths: Tensor) -> Tensor:
        """The tree of the best splits from the top, spans ``(B, n, n)`` with leaves counted."""
        _, energies = self.encode(leaves, lengths)
        n = leaves.shape[1]
        at = torch.arange(n, device=leaves.device)
        # where a span may split: i ≤ k < j
        allowed = (at[:, None, None] <= at) & (at < at[:, None])
        best = energies.masked_fill(~allowed, -torch.inf).argmax(-1)  # (B, i, j)
        item = torch.arange(len(leaves), device=leaves.device)
        spans = torch.zeros_like(energies[..., 0], dtype=torch.bool)
        spans[item, 0, lengths - 1] = True
        for width in range(n, 1, -1):  # the children of spans, from the widest
            i = at[: n - width + 1]
            found, start = spans[:, i, i + width - 1].nonzero(as_tuple=True)
            split = best[found, start, start + width - 1]
            spans[found, start, split] = True
            spans[found, split + 1, start + width - 1] = True
        return spans
