"""One of n."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from structmax import checks
from structmax.forest.topology import Forest, ForestBuilder, family, name_of
from structmax.smoothing import Smoothing
from structmax.structures.dynamic import DynamicStructure


@family
def choice(n: int) -> Forest:
    """A single node, the goal, with n edges; edge i carries part i."""
    draw = ForestBuilder()
    draw.edges(draw.node(), -1, -1, range(n))
    return draw.build(n)


class Choice(DynamicStructure):
    """One of n options: the categorical distribution, as a structure without structure.

    The graph is one node with n incoming edges, so argmaxΩ of the scores are the marginals:
    softmax under Shannon, sparsemax under Gini. Integer form: the index of the option.

    Args:
        scores: ``(*B, n)``
        smoothing: Ω, by default ``sx.Shannon(1.0)``

    >>> import structmax as sx
    >>> choice = sx.Choice(torch.tensor([-2.0, 0.0, 0.5]), smoothing=sx.Gini())
    >>> choice.marginals()
    tensor([0.0000, 0.2500, 0.7500])
    >>> choice.argmax()
    tensor([0., 0., 1.])
    >>> choice.log_prob(torch.tensor(1)).exp()
    tensor(0.2500)
    """

    def __init__(
        self,
        scores: Tensor,
        smoothing: Smoothing | None = None,
        validate_args: bool | None = None,
    ) -> None:
        checks.scores("Choice", "scores", scores, 1, "(..., n) with n at least 1")
        self.scores = scores
        super().__init__(scores.shape[:-1], scores.shape[-1:], smoothing, validate_args)

    def _given_scores(self) -> dict[str, tuple[Tensor, checks.Mask]]:
        return {"scores": (self.scores, None)}

    def _tensors(self) -> dict[str, tuple[Tensor, int]]:
        return {"scores": (self.scores, 1)}

    def _options(self) -> dict[str, Any]:
        return {}

    def _unvalidated_parts(self) -> tuple[Tensor, ...]:
        scores = self.scores
        return (scores.float() if scores.dtype.itemsize < 4 else scores,)

    def _forest_key(self) -> str:
        return name_of("choice", self.event_shape)

    def _goal(self) -> Tensor:
        return torch.zeros(self.batch_shape, dtype=torch.int32, device=self.scores.device)

    def _derivation_size(self) -> int:
        return 1

    def _replace_primary(self, scores: Tensor, **others: Tensor) -> Choice:
        return self._rebuild(scores=scores)

    _local_groups = (-1,)

    def _incompatible(self, include: Tensor) -> Tensor:
        return include.sum(-1, keepdim=True) - include.long() > 0

    def _checked(self, z: Tensor) -> Tensor:
        wrong = ((z != 0) & (z != 1)).any(-1) | (z.sum(-1) != 1)
        if bool(wrong.any()):
            item = tuple(wrong.nonzero()[0].tolist())
            raise ValueError(f"Choice: z{list(item)} must hold exactly one 1.")
        return z

    def _score(self, z: Tensor) -> Tensor:
        (scores,) = self._parts()
        batch = z.shape[:-1]
        index = z.to(torch.uint8).argmax(-1, keepdim=True)
        return scores.expand(*batch, scores.shape[-1]).gather(-1, index).squeeze(-1)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        n = self.event_shape[0]
        every = torch.eye(n, dtype=self.dtype, device=self.scores.device)
        every = every.reshape(n, *[1] * len(self.batch_shape), n)
        return every.expand(n, *self.batch_shape, n) if expand else every

    def decode(self, z: Tensor) -> Any:
        """The index of the option, nested as the batch."""
        return z.argmax(-1).tolist()

    def encode(self, obj: Any) -> Tensor:
        index = checks.as_tensor("Choice", "an index", obj, self.scores.device)
        n = self.event_shape[0]
        if (
            checks.can_look(index)
            and index.numel()
            and not bool(((index >= 0) & (index < n)).all())
        ):
            raise ValueError(f"Choice: an index must be between 0 and {n - 1}, got {obj}.")
        return torch.nn.functional.one_hot(index.long(), n).to(self.dtype)
