"""Scores that are looked at by the first query, not by the constructor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Self

from torch import Tensor

from structmax import checks
from structmax.primitive import backend_for
from structmax.structures.lengths import OneSided
from structmax.structures.parts import PartStructure


class LateLook(OneSided, PartStructure):
    """A structure that does not keep a GPU waiting.

    There a look at the scores takes as long as a kernel that reads them, and waits for it. A bad
    score makes the value of its item NaN, so the first query looks at its value, and at the scores
    only if that is not finite. What reads scores in any other way calls ``_look`` before.
    """

    _unseen = False

    if TYPE_CHECKING:

        def _check_values(self) -> None:
            """Looks at scores and lengths."""

    def _first_look(self) -> None:
        """Looks at the lengths, and at the scores unless they wait for the first query."""
        if backend_for(self._first) == "gpu":
            checks.values(self._name, {}, self.lengths, self._longest)
            self._unseen = True
        else:
            self._check_values()
        self._lengths_are_good = True

    def _look(self) -> None:
        """Looks at the scores if nobody has."""
        if self._unseen and checks.can_look():
            self._check_values()
            self._unseen = False

    def _finite(self, value: Tensor) -> bool:
        """Whether a value ``(*B)`` that all scores go into shows that they are good; else looks."""
        if not self._unseen or not checks.can_look():
            return False
        finite = math.isfinite(value.sum().item())  # one kernel; a sum may also overflow
        if finite:
            self._unseen = False
        else:
            self._look()
        return finite

    def log_partition(self) -> Tensor:
        value = super().log_partition()
        self._finite(value)
        return value

    def _refuse_infeasible(self, query: str, value: Tensor, answer: Tensor) -> Tensor:
        return answer if self._finite(value) else super()._refuse_infeasible(query, value, answer)

    def _rebuild(self, **tensors: Tensor | None) -> Self:
        self._look()
        return super()._rebuild(**tensors)
