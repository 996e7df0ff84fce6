"""Hidden Markov models."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from structmax import checks
from structmax.smoothing import Smoothing
from structmax.structures.linear_chain import LinearChain


class HMM(LinearChain):
    """The hidden states of a hidden Markov model, given what was observed.

    A linear chain with start scores ``initial``, transitions ``transition`` and unary scores
    ``emission[:, observations]``. With log-probabilities, ``log_partition()`` is the
    log-likelihood of the observations and the distribution is the posterior of the states.

    Args:
        initial: ``(*B, c)``, log-probabilities of the first state
        transition: ``(*B, c, c)`` or ``(c, c)``, ``[from, to]``, log-probabilities
        emission: ``(*B, c, V)`` or ``(c, V)``, log-probabilities of the symbols
        observations: ``(*B, n)``, integers below V; the padding may hold anything
        lengths: ``(*B)``

    >>> import torch, structmax as sx
    >>> half = torch.tensor([0.5, 0.5]).log()
    >>> stay = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log()
    >>> coin = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()  # a fair and a loaded one
    >>> hmm = sx.HMM(half, stay, coin, torch.tensor([0, 0, 0, 0]))
    >>> hmm.log_partition().exp()
    tensor(0.3233)
    >>> hmm.decode(hmm.argmax())
    [1, 1, 1, 1]
    """

    _score_names = ("emission.mT[observations]", "initial")

    def __init__(
        self,
        initial: Tensor,
        transition: Tensor,
        emission: Tensor,
        observations: Tensor,
        lengths: Tensor | None = None,
        smoothing: Smoothing | None = None,
        validate_args: bool | None = None,
    ) -> None:
        checks.scores("HMM", "initial", initial, 1, "(..., c)")
        checks.scores("HMM", "emission", emission, 2, "(..., c, V)")
        c = emission.shape[-2]
        if initial.shape[-1] != c:
            raise ValueError(
                f"HMM: initial must be (..., {c}) to match emission {tuple(emission.shape)}, "
                f"got {tuple(initial.shape)}."
            )
        checks.scores("HMM", "transition", transition, 2, f"(..., {c}, {c})")
        if transition.shape[-2:] != (c, c):
            raise ValueError(
                f"HMM: transition must be (..., {c}, {c}) to match emission "
                f"{tuple(emission.shape)}, got {tuple(transition.shape)}."
            )
        if not checks.holds_integers(observations) or observations.dim() < 1:
            given = isinstance(observations, Tensor)
            got = f"{tuple(observations.shape)} of {observations.dtype}" if given else observations
            raise ValueError(f"HMM: observations must be integers (..., n), got {got}.")
        checks.same_device(
            "HMM", initial=initial, transition=transition, emission=emission,
            observations=observations,
        )  # fmt: skip
        batch = checks.batch_shape(
            "HMM",
            initial=(initial, 1),
            transition=(transition, 2),
            emission=(emission, 2),
            observations=(observations, 1),
        )
        n = observations.shape[-1]
        self.initial, self.emission, self.observations = initial, emission, observations
        self._whole = (*batch, n, c)
        if transition.dim() > 2:
            transition = transition.expand(*batch, c, c)
        super().__init__(
            self.unary, transition, initial, None, lengths, smoothing, validate_args
        )  # fmt: skip

    def _given_integers(self) -> dict[str, checks.Integers]:
        symbols, n = self.emission.shape[-1], self.observations.shape[-1]
        position = torch.arange(n, device=self.observations.device)
        inside = position < self._possible_lengths()[..., None]
        wrong = self._unknown().expand(*self.batch_shape, n) & inside
        observations = checks.Integers(self.observations, wrong, (0, symbols - 1), dims=1)
        return {**super()._given_integers(), "observations": observations}

    def _unknown(self) -> Tensor:
        """Which observations are no symbols, ``(*B, n)``."""
        return (self.observations < 0) | (self.observations >= self.emission.shape[-1])

    @property
    def unary(self) -> Tensor:
        """``emission[:, observations]`` ``(*B, n, c)``, NaN for what is no symbol, read at each
        query: emissions may change between two, and each has a graph of its own."""
        *batch, n, c = self._whole
        symbols = self.emission.shape[-1]
        symbol = self.observations.long().clamp(0, symbols - 1)
        table = self.emission.mT.expand(*batch, symbols, c)
        scores = table.gather(-2, symbol[..., None].expand(*batch, n, c))
        return torch.where(self._unknown()[..., None], math.nan, scores)

    @unary.setter
    def unary(self, scores: Tensor) -> None:
        """The constructor of a chain keeps what it is given; here it is read at each query."""

    @property
    def _first(self) -> Tensor:
        return self.emission

    def _tensors(self) -> dict[str, tuple[Tensor, int]]:
        given = {
            "initial": (self.initial, 1),
            "transition": (self.transition, 2),
            "emission": (self.emission, 2),
            "observations": (self.observations, 1),
        }
        if self.lengths is not None:
            given["lengths"] = (self.lengths, 0)
        return given

    def _options(self) -> dict[str, Any]:
        return {}
