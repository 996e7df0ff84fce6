"""Leaves in context."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from structmax import checks


class LeafLSTM(nn.Module):
    """A bidirectional LSTM over the leaves, for encoders or parsers that should see the context.

    Args:
        input_size: of the leaves
        output_size: of the result, both directions together: an even number

    >>> lstm = LeafLSTM(4, 8)
    >>> lstm(torch.randn(2, 3, 4), torch.tensor([3, 2])).shape
    torch.Size([2, 3, 8])
    """

    def __init__(self, input_size: int, output_size: int) -> None:
        super().__init__()
        if output_size % 2:
            raise ValueError(f"LeafLSTM: output_size must be even, got {output_size}.")
        self.lstm = nn.LSTM(input_size, output_size // 2, batch_first=True, bidirectional=True)

    def forward(self, leaves: Tensor, lengths: Tensor | Sequence[int]) -> Tensor:
        """``(B, n, output_size)``, zero in the padding, whatever stands there."""
        b, n, _ = leaves.shape
        if not b:
            return leaves.new_zeros(0, n, 2 * self.lstm.hidden_size)
        packed = _pack("LeafLSTM", leaves, lengths)
        return pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=n)[0]


class SentenceLSTM(nn.Module):
    """The last state of an LSTM that reads from left to right: the baseline without trees.

    >>> lstm = SentenceLSTM(4, 8)
    >>> lstm(torch.randn(2, 3, 4), torch.tensor([3, 2])).shape
    torch.Size([2, 8])
    """

    def __init__(self, input_size: int, hidden_size: int, layers: int = 1) -> None:
        super().__init__()
        self.lstm = nn.LSTM(input_size, hidden_size, layers, batch_first=True)

    def forward(self, leaves: Tensor, lengths: Tensor | Sequence[int]) -> Tensor:
        """``(B, hidden_size)``"""
        if not len(leaves):
            return leaves.new_zeros(0, self.lstm.hidden_size)
        return self.lstm(_pack("SentenceLSTM", leaves, lengths))[1][0][-1]


def _pack(owner: str, leaves: Tensor, lengths: Tensor | Sequence[int]) -> PackedSequence:
    """Leaves ``(B, n, d)`` of lengths ``(B)``, as recurrent networks take them."""
    lengths = checks.lengths(owner, lengths, leaves.device)
    sizes = lengths.cpu()
    if checks.can_look():
        checks.values(owner, {}, {"lengths": checks.between(sizes, 1, leaves.shape[1])})
    inputs = zero_padding(leaves, lengths)
    return pack_padded_sequence(inputs, sizes, batch_first=True, enforce_sorted=False)


def zero_padding(x: Tensor, lengths: Tensor) -> Tensor:
    """``(B, n, ...)`` with zeros past each item's length, so that no NaN there goes anywhere."""
    inside = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    return torch.where(inside[(...,) + (None,) * (x.dim() - 2)], x, 0.0)
