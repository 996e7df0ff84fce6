"""Grammars whose rules have low rank."""

from __future__ import annotations

import torch
from torch import Tensor

from structmax import checks
from structmax.forest.pcfg import ops as dense
from structmax.forest.pcfg.naive import collapse
from structmax.smoothing import SHANNON, Smoothing
from structmax.structures.pcfg import PCFG


class LowRankPCFG(PCFG):
    """A :class:`PCFG` whose rules are given by three factors, made by ``sx.PCFG.low_rank``.

    rules[A, B, C] = log Σ_r exp(parent[A, r] + left[B, r] + right[C, r]): a tensor of rank R in
    canonical polyadic form (Cohen, Satta & Collins, 2013; Yang, Zhao & Tu, 2021). The rank r is
    summed over: z is the indicator of labelled spans as in ``PCFG``, and every query agrees with
    the ``PCFG`` of these rules.

    Under Shannon with γ = 1, ``log_partition``, ``marginals``, ``root_marginals`` and ``sample``
    (which draws ranks too, and drops them) take time O(n³R + n²(N+P)R) and never build the rules.
    Everything else does, since a best tree or an entropy needs the sum over r of single rules:
    O(N(N+P)²) memory, and the time of ``PCFG``.

    Args:
        root: ``(*B, N)`` or ``(N)``
        left, right: ``(*B, N+P, R)`` or ``(N+P, R)``, scores of the left and right child
        parent: ``(*B, N, R)`` or ``(N, R)``
        emission, lengths, smoothing, spans: as in ``PCFG``

    >>> import structmax as sx
    >>> left, right, parent = torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(1, 2)
    >>> tree = sx.PCFG.low_rank(torch.zeros(1), left, right, parent, torch.zeros(3, 2))
    >>> tree.log_partition().exp()  # 2 trees · 2³ labels · 2² for the rules, each of weight 2
    tensor(64.)
    >>> tree.marginals()[0, 1, 0]
    tensor(0.5000)
    """

    left: Tensor
    right: Tensor
    parent: Tensor

    def __init__(
        self,
        root: Tensor,
        left: Tensor,
        right: Tensor,
        parent: Tensor,
        emission: Tensor,
        lengths: Tensor | None = None,
        smoothing: Smoothing | None = None,
        validate_args: bool | None = None,
        *,
        spans: Tensor | None = None,
    ) -> None:
        weights = {"left": left, "right": right, "parent": parent}
        self._set_up(root, emission, lengths, spans, smoothing, validate_args, **weights)

    def _check_weights(self) -> None:
        rank = None
        for name in self._weight_names:
            rows = self.N if name == "parent" else self.N + self.P
            tensor = getattr(self, name)
            checks.scores(self._name, name, tensor, 2, f"(..., {rows}, R) with R at least 1")
            rank = tensor.shape[-1] if rank is None else rank
            if tensor.shape[-2:] != (rows, rank):
                raise ValueError(
                    f"{self._name}: {name} must be (..., {rows}, {rank}) for {self.N} "
                    f"nonterminals, {self.P} preterminals and the rank of left, got "
                    f"{tuple(tensor.shape)}."
                )

    def _rules(self) -> Tensor:
        return collapse(self.left.double(), self.right.double(), self.parent.double())

    def _is_low_rank(self) -> bool:
        kind, gamma, _ = self.smoothing.code
        return kind == SHANNON and gamma == 1.0

    def _factors(self) -> tuple[Tensor, ...]:
        spans, root = self._spans_and_root()
        factors = (self.left, self.right, self.parent)
        return spans, root, *(self._for_batch(f.to(spans.dtype), 2) for f in factors)

    def _value(self) -> Tensor:
        if not self._is_low_rank():
            return super()._value()
        return dense.low_rank.value(self._factors(), (self._lengths(),), "", self.smoothing.code)

    def _by_factors(self, query: str, which: int) -> Tensor:
        args = (self._lengths(),), "", self.smoothing.code
        value, *mu = dense.low_rank.value_and_gradient(self._factors(), *args)
        return self._refuse_infeasible(query, value, mu[which]).to(self.dtype)

    def marginals(self) -> Tensor:
        return self._by_factors("marginals", 0) if self._is_low_rank() else super().marginals()

    def root_marginals(self) -> Tensor:
        if not self._is_low_rank():
            return super().root_marginals()
        return self._by_factors("root_marginals", 1)

    def _draw(self, count: int, generator: torch.Generator | None) -> Tensor:
        if not self._is_low_rank():
            return super()._draw(count, generator)
        numbers = self._uniform(count, 4 * self.event_shape[0], generator)
        factors = [f.detach() for f in self._factors()]
        return dense.sample_low_rank(*factors, self._lengths(), numbers)
