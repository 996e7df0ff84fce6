"""Binary constituency trees."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structmax import checks
from structmax.forest.topology import Forest, ForestBuilder, bucket, family, name_of
from structmax.smoothing import Smoothing
from structmax.structures.base import dot
from structmax.structures.nesting import nest, unnest
from structmax.structures.square import PackedSquare, ragged


def span_number(i: Any, j: Any) -> Any:
    """Spans column by column, each upwards: (0,0), (1,1), (0,1), (2,2), (1,2), (0,2), …

    Every span comes after those inside it, and those of a shorter sentence come first.
    """
    return j * (j + 1) // 2 + j - i


Known = dict[tuple[int, int], list[list[tuple[int, int]]]]


@family
def binary_tree(n: int, labels: int) -> Forest:
    """A node for each span in the order of ``span_number``; with labels, a label node after each.

    Parts: the number of the span, or ``number·labels + label``.
    """
    count = n * (n + 1) // 2
    j, up = ragged(np.arange(1, n + 1))
    i, span = j - up, np.arange(count)
    step = 2 if labels else 1  # nodes for each span; the last of them stands for the whole span

    def whole(i: Any, j: Any) -> Any:
        return span_number(i, j) * step + step - 1

    draw = ForestBuilder()
    draw.nodes(count * step, -1 if labels else span)
    draw.runs(span * step, j - i, lambda k: (whole(i, i + k), whole(i + k + 1, j)))
    if labels:
        draw.runs(2 * span + 1, labels, lambda label: (2 * span, -1, span * labels + label))
    return draw.build(count * max(labels, 1))


class BinaryTree(PackedSquare):
    """A binary tree over n leaves, given by its 2n − 1 spans: a constituency tree.

    The score of a tree is the sum of the scores of its spans [i, j], both ends inclusive; the
    leaves [i, i] and the whole sentence count. With labels every span has exactly one. The graph
    has a node for each span, reached by one edge for each place to split it; with labels, a label
    node stands on each, reached by one edge for each label::

        [i,k] ─┐                          [i,k]' ─┐           ┌─a─┐
               ├──► [i,j]   for each k,           ├──► [i,j] ─┤   ├──► [i,j]'
        [k+1,j]┘                          [k+1,j]'┘           └─b─┘

    Time is O(n³) (Cocke-Kasami-Younger), memory for each item O(n²). Below the diagonal and
    outside the length, scores are not looked at.
    On a GPU it is the first query that finds NaN or +inf in the scores.
    Human form: the sorted spans, ``(i, j)`` or ``(i, j, label)``. Integer form: the same as a
    tensor ``(*B, 2n−1, 2)`` or ``(*B, 2n−1, 3)``, rows of −1 in the padding.

    Args:
        scores: ``(*B, n, n)`` or ``(*B, n, n, labels)``
        lengths: ``(*B)``
        labelled: whether the last dimension of ``scores`` is that of labels. By default it is if
            the last two sizes differ; say so yourself if the number of labels may equal n
        smoothing: Ω, by default ``sx.Shannon(1.0)``

    >>> import structmax as sx
    >>> scores = torch.zeros(3, 3)
    >>> scores[1, 2] = 1.0
    >>> tree = sx.BinaryTree(scores)
    >>> tree.decode(tree.argmax())
    [(0, 0), (0, 2), (1, 1), (1, 2), (2, 2)]
    >>> tree.marginals()
    tensor([[1.0000, 0.2689, 1.0000],
            [0.0000, 1.0000, 0.7311],
            [0.0000, 0.0000, 1.0000]])
    >>> round(sx.BinaryTree(torch.zeros(5, 5)).log_partition().exp().item())  # a Catalan number
    14
    >>> labelled = sx.BinaryTree(torch.zeros(2, 2, 3), labelled=True)
    >>> labelled.log_prob([(0, 0, 2), (0, 1, 0), (1, 1, 1)]).exp()  # one of 27
    tensor(0.0370)
    """

    def __init__(
        self,
        scores: Tensor,
        lengths: Tensor | None = None,
        labelled: bool | None = None,
        smoothing: Smoothing | None = None,
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(scores, lengths, labelled, smoothing, validate_args)

    _trees = "BinaryTree"

    # -- the graph --------------------------------------------------------------------------------

    @staticmethod
    def _order(i: Tensor, j: Tensor) -> Tensor:
        return torch.where(i <= j, span_number(i, j), -1)

    @staticmethod
    def _count(n: Any) -> Any:
        return n * (n + 1) // 2

    def _used(self) -> Tensor:
        at = torch.arange(self._longest, device=self.scores.device)
        used = at[:, None] <= at
        return used if self.lengths is None else used & (at < self._lengths()[..., None, None])

    def _forest_key(self) -> str:
        return name_of("binary_tree", (bucket(self._longest), self._labels))

    def _goal_node(self, n: Any) -> Any:
        return self._count(n) * (2 if self.labelled else 1) - 1

    def _derivation_size(self) -> int:
        return (2 * self._longest - 1) * (2 if self.labelled else 1)

    # -- spans ------------------------------------------------------------------------------------

    def _excluded_by(self, include: Tensor) -> Tensor:
        # a binary tree that crosses a span nowhere has it
        if not self.labelled:
            return crossing(include)
        others = include.sum(-1, keepdim=True) - include.long() > 0
        return crossing(include.any(-1))[..., None] | others

    def _score(self, z: Tensor) -> Tensor:
        wide = self.expand(z.shape[: z.dim() - len(self.event_shape)])
        theta = wide._pack(wide._parts())
        return dot(theta, wide._pack((z.to(theta.dtype),)), 1)

    def _checked(self, z: Tensor) -> Tensor:
        parts = self._masked(z)
        event = len(self.event_shape)
        spans = parts.sum(-1) if self.labelled else parts
        wrong = ((parts != 0) & (parts != 1)).flatten(z.dim() - event).any(-1)
        crossed = ((spans > 1) | (crossing(spans > 0) & (spans > 0))).flatten(z.dim() - event)
        wrong = wrong | crossed.any(-1) | (spans.sum((-2, -1)) != 2 * self._lengths() - 1)
        if bool(wrong.any()):
            item = tuple(wrong.nonzero()[0].tolist())
            length = int(self._lengths().expand(wrong.shape)[item])
            once = ", each with one label" if self.labelled else ""
            raise ValueError(
                f"BinaryTree: z{list(item)} is no binary tree over {length} leaves, which has "
                f"{2 * length - 1} spans that do not cross{once}; got {self.decode(parts[item])}."
            )
        return z

    def enumerate_support(self, expand: bool = True) -> Tensor:
        n, length = self._longest, self._one_length()
        labellings = max(self._labels, 1) ** (2 * length - 1)
        if math.comb(2 * length - 2, length - 1) // length * labellings > 1_000_000:
            raise ValueError(
                f"BinaryTree.enumerate_support: trees over {length} leaves are too many."
            )
        trees = _trees(0, length - 1, {})
        every = torch.zeros(len(trees), n, n, device="cpu")
        for z, spans in zip(every, trees, strict=True):
            z[tuple(torch.tensor(spans, device="cpu").T)] = 1.0
        return self._with_labels(every, expand)

    def decode(self, z: Tensor) -> Any:
        """The sorted spans, ``(i, j)`` or ``(i, j, label)``, as lists nested as the batch of z."""
        batch = z.shape[: z.dim() - len(self.event_shape)]
        items: list[list[tuple[int, ...]]] = [[] for _ in range(batch.numel())]
        for item, *span in z.reshape(batch.numel(), *self.event_shape).nonzero().tolist():
            items[item].append(tuple(span))
        return nest(items, batch)

    def encode(self, obj: Any) -> Tensor:
        """z of spans: nested lists as ``decode`` gives, or a tensor ``(*B, 2n−1, 2 or 3)``."""
        fields = len(self.event_shape)
        if not isinstance(obj, Tensor):
            items, batch = unnest("BinaryTree", obj, 2, len(self.batch_shape))
            most = max((len(item) for item in items), default=0)
            none = [[-1] * fields]
            rows = [[*map(list, item), *none * (most - len(item))] for item in items]
            obj = torch.tensor(rows, dtype=torch.long, device=self.scores.device)
            obj = obj.reshape(*batch, most, fields)
        if obj.dim() < 2 or obj.shape[-1] != fields or obj.is_floating_point():
            names = "i, j, label" if self.labelled else "i, j"
            raise ValueError(
                f"BinaryTree: spans must be integers ({names}), (..., 2n-1, {fields}), got "
                f"{obj.dtype} {tuple(obj.shape)}."
            )
        spans = obj.long()
        sizes = torch.tensor(self.event_shape, device=spans.device)
        absent = (spans == -1).all(-1)
        wrong = ((spans < 0) | (spans >= sizes)).any(-1) | (spans[..., 0] > spans[..., 1])
        wrong = wrong & ~absent
        if checks.can_look(self._first) and bool(wrong.any()):
            where = tuple(wrong.nonzero()[0].tolist())
            raise ValueError(
                f"BinaryTree: {tuple(spans[where].tolist())} at {list(where)} is no span of "
                f"{self._longest} leaves{f' with {self._labels} labels' * self.labelled}."
            )
        index = spans[..., 0]
        for k in range(1, fields):
            index = index * self.event_shape[k] + spans[..., k]
        size = self.event_shape.numel()
        index = torch.where(absent | wrong, size, index)
        z = torch.zeros(*index.shape[:-1], size + 1, dtype=self.dtype, device=index.device)
        return z.scatter(-1, index, 1.0)[..., :-1].unflatten(-1, self.event_shape)


def crossing(spans: Tensor) -> Tensor:
    """Which spans cross one of those given, ``(..., n, n)``: they overlap and neither is inside."""

    def after(x: Tensor, dim: int) -> Tensor:
        """Whether x holds anywhere later along a dimension."""
        return x.flip(dim).cumsum(dim).flip(dim) > x

    def before(x: Tensor, dim: int) -> Tensor:
        return x.cumsum(dim) > x

    spans = spans.triu()
    # [a, b] crosses [i, j] if a < i ≤ b < j, or i < a ≤ j < b
    return after(after(spans, -1).triu(), -2) | before(before(spans, -2).triu(), -1)


def _trees(i: int, j: int, known: Known) -> list[list[tuple[int, int]]]:
    """The spans of every tree over the leaves i..j."""
    if (i, j) not in known:
        known[i, j] = [
            [(i, j), *left, *right]
            for k in range(i, j)
            for left in _trees(i, k, known)
            for right in _trees(k + 1, j, known)
        ] or [[(i, i)]]
    return known[i, j]
