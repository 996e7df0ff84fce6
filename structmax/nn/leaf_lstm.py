"""Leaves in context."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


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

    def forward(self, leaves: Tensor, lengths: Tensor) -> Tensor:
        """``(B, n, output_size)``, zero in the padding, whatever stands there."""
        packed = pack_padded_sequence(
            zero_padding(leaves, lengths), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        out, _ = pad_packed_sequence(
            self.lstm(packed)[0], batch_first=True, total_length=leaves.shape[1]
        )
        return out


class SentenceLSTM(nn.Module):
    """The last state of an LSTM that reads from left to right: the baseline without trees.

    >>> lstm = SentenceLSTM(4, 8)
    >>> lstm(torch.randn(2, 3, 4), torch.tensor([3, 2])).shape
    torch.Size([2, 8])
    """

    def __init__(self, input_size: int, hidden_size: int, layers: int = 1) -> None:
        super().__init__()
        self.lstm = nn.LSTM(input_size, hidden_size, layers, batch_first=True)

    def forward(self, leaves: Tensor, lengths: Tensor) -> Tensor:
        """``(B, hidden_size)``"""
        packed = pack_padded_sequence(
            zero_padding(leaves, lengths), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        return self.lstm(packed)[1][0][-1]


def zero_padding(x: Tensor, lengths: Tensor) -> Tensor:
    """``(B, n, ...)`` with zeros past each item's length, so that no NaN there goes anywhere."""
    inside = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    return torch.where(inside[(...,) + (None,) * (x.dim() - 2)], x, 0.0)
