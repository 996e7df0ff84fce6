"""Ragged batches: the sizes of the items, validated or not.

A length that was not validated (``validate_args=False``, compiling) may be impossible. Such an item
is computed as if it had the whole length, and its scores become NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from structmax import checks
from structmax.fence import trusted
from structmax.primitive import is_plain
from structmax.structures.base import Structure

MOST = 256  # tensors kept
_kept: dict[tuple[torch.Size, int, torch.device, torch.dtype], Tensor] = {}


def full(
    shape: torch.Size, n: int, device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """``(*shape)`` times n.

    On a GPU it is made once, since a launch takes longer than most of what reads it. It is never
    given up, so that no stream can find its memory used for something else.
    """
    if device.type != "cuda" or not (is_plain(()) and checks.can_look()):
        return torch.full(shape, n, device=device, dtype=dtype)
    key = shape, n, device, dtype
    found = _kept.get(key)
    if found is None:
        with torch.inference_mode(False):
            found = torch.full(shape, n, device=device, dtype=dtype)
        if len(_kept) < MOST:
            torch.cuda.current_stream(device).synchronize()  # other streams need not wait for it
            _kept[key] = found
            trusted.add(id(found))
    return found


class OneSided(Structure):
    """A structure whose items have one length each."""

    lengths: Tensor | None

    @property
    def _longest(self) -> int:
        """n: the most positions of an item."""
        return self.event_shape[0]

    def _given_integers(self) -> dict[str, checks.Integers]:
        if self.lengths is None:
            return {}
        lengths = self.lengths.expand(self.batch_shape)
        return {"lengths": checks.between(lengths, 1, self._longest)}

    def _lengths(self) -> Tensor:
        """The length of each item, ``(*B)``; an impossible one is taken for the longest."""
        if self.lengths is None or not self._validate_integers():
            return self._possible_lengths()
        return self.lengths.long().expand(self.batch_shape)

    def _possible_lengths(self) -> Tensor:
        """``_lengths`` of lengths that may not have been validated."""
        if self.lengths is None:
            return full(self.batch_shape, self._longest, self._first.device)
        return _possible(self.lengths.long().expand(self.batch_shape), self._longest)


class TwoSided(Structure):
    """A structure over rows and columns, whose items have two lengths each."""

    rows: Tensor | None
    columns: Tensor | None

    def _given_integers(self) -> dict[str, checks.Integers]:
        sides = zip(("rows", "columns"), (self.rows, self.columns), self.event_shape, strict=True)
        return {
            f"lengths of {name}": checks.between(given.expand(self.batch_shape), 1, most)
            for name, given, most in sides
            if given is not None
        }

    def _sizes(self) -> list[Tensor]:
        """Rows and columns of each item, ``(*B)`` each; impossible ones are taken for the most."""
        out, valid = [], self._validate_integers()
        for given, most in zip((self.rows, self.columns), self.event_shape, strict=True):
            if given is None:
                size = full(self.batch_shape, most, self._first.device)
            else:
                size = given.long().expand(self.batch_shape)
                size = size if valid else _possible(size, most)
            out.append(size)
        return out


def _possible(lengths: Tensor, most: int) -> Tensor:
    return torch.where((lengths < 1) | (lengths > most), most, lengths)
