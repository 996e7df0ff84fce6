"""Dependency trees: what projective and non-projective ones share."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from structmax import checks
from structmax.smoothing import Smoothing
from structmax.structures.base import signature_of
from structmax.structures.nesting import nest, unnest
from structmax.structures.square import SquareStructure


class DependencyTree(SquareStructure):
    """A head for each word, such that the arcs form a tree below the root symbol.

    Scores are of arcs ``[head, modifier]``; index 0 is the root symbol and words count from 1. The
    score of a tree is the sum of the scores of its arcs; with labels every arc has exactly one.
    The diagonal, the column of modifier 0 and what lies outside the length are not looked at.

    ``projective=True`` allows no arcs that cross (when all are drawn above the sentence, the root
    symbol on its left). The graph is then that of Eisner (1996, "Three new probabilistic models for
    dependency parsing"). For words i < j: right[i,j] stands for i with modifiers up to j and all
    below them, left[i,j] for the mirror image below j, gap[i,j] for what lies between an arc's
    ends, and each arc has a node with its score (its labels are edges into that node)::

        right[i,k] ─┐             gap[i,j] ──► arc[i→j]    arc[i→k] ─┐
                    ├► gap[i,j]                                      ├► right[i,j]
        left[k+1,j]─┘             gap[i,j] ──► arc[j→i]    right[k,j]┘   (left: mirrored)

    What a word alone would be is left out: right[i,i] and left[i,i] are nothing. With several roots
    the root symbol is word 0 and the goal right[0,n]. With a single one the graph is over words
    1..n, and left[1,r] ──► arc[0→r], then arc[0→r] + right[r,n] ──► goal for every word r. Time is
    O(n³), memory for each item O(n²).

    With ``siblings`` (McDonald and Pereira 2006, "Online learning of approximate dependency parsing
    algorithms"), an arc is reached by an edge for each adjacent sibling, which carries its score,
    and labels, if any, by edges into a second node of the arc; memory for each item is O(n³)::

        left[i+1,j] ─[i,i,j]─► arc[i→j] ◄─[i,k,j]─ arc[i→k] + gap[k,j]      (←: mirrored)

    Other trees are summed by the Matrix-Tree theorem, in O(n³), and maximised by Edmonds' algorithm
    for arborescences; they are no dynamic program.

    Integer form: the head of each word ``(*B, n)``, with labels pairs of head and label
    ``(*B, n, 2)``; what stands in the padding is ignored. ``decode`` gives the same as lists.

    Args:
        scores: ``(*B, n+1, n+1)`` or ``(*B, n+1, n+1, labels)``
        lengths: ``(*B)``, numbers of words
        projective: whether arcs may not cross
        root: ``"single"``: the root symbol has one modifier; ``"multi"``: one or more
        siblings: second-order scores ``(*B, n+1, n+1, n+1)`` of ``[head, sibling, modifier]``, for
            projective trees. The modifiers of a head on one side of it are ordered from the head
            outwards; the sibling of each is the one just before it in that order, and of the first
            on each side the head itself: its score is ``[head, head, modifier]``
        labelled: whether the last dimension of ``scores`` is that of labels. By default it is if
            the last two sizes differ; say so yourself if the number of labels may equal n + 1
        smoothing: Ω, by default ``sx.Shannon(1.0)``; of non-projective trees another temperature
            at most, since they are no dynamic program

    >>> import structmax as sx
    >>> scores = torch.zeros(4, 4)
    >>> scores[0, 2] = scores[2, 1] = scores[2, 3] = 1.0
    >>> round(sx.DependencyTree(torch.zeros(4, 4)).log_partition().exp().item())  # so many trees
    9
    >>> tree = sx.DependencyTree(scores, projective=True)
    >>> tree.decode(tree.argmax())  # the heads of words 1, 2 and 3
    [2, 0, 2]
    >>> tree.marginals()[0]  # which word is the root
    tensor([0.0000, 0.1598, 0.6804, 0.1598])
    >>> tree.log_prob(torch.tensor([0, 1, 2])).exp()  # 1 → 2 → 3 below the root symbol
    tensor(0.0921)
    >>> multi = sx.DependencyTree(torch.zeros(4, 4), projective=True, root="multi")
    >>> round(multi.log_partition().exp().item())  # so many trees
    12
    >>> labelled = sx.DependencyTree(torch.zeros(3, 3, 2), projective=True)
    >>> labelled.score([(0, 1), (1, 0)])  # (head, label) of each word
    tensor(0.)
    """

    _border = 1
    _additional = ("siblings",)
    _sides = "n+1, n+1"
    _hint = " Did you forget the root column?"

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if cls is not DependencyTree:
            return super().__new__(cls)
        projective = args[2] if len(args) > 2 else kwargs.get("projective", False)
        from structmax.structures.nonprojective import NonprojectiveTree
        from structmax.structures.projective import ProjectiveTree

        kind = ProjectiveTree if projective else NonprojectiveTree
        return super().__new__(kind)  # type: ignore[return-value]

    def __init__(
        self,
        scores: Tensor,
        lengths: Tensor | None = None,
        projective: bool = False,
        root: str = "single",
        siblings: Tensor | None = None,
        labelled: bool | None = None,
        smoothing: Smoothing | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if root not in ("single", "multi"):
            raise ValueError(f'DependencyTree: root must be "single" or "multi", got {root!r}.')
        self.projective, self.root, self.siblings = projective, root, siblings
        if siblings is not None:
            if not projective:
                raise ValueError("DependencyTree: siblings= needs projective=True.")
            shape = "(..., n+1, n+1, n+1), [head, sibling, modifier]"
            checks.scores("DependencyTree", "siblings", siblings, 3, shape)
        super().__init__(
            scores, lengths, labelled, smoothing, validate_args, siblings=(siblings, 3)
        )
        s = self.event_shape[0]
        if siblings is not None and siblings.shape[-3:] != (s, s, s):
            raise ValueError(
                f"DependencyTree: siblings must be (..., {s}, {s}, {s}) to match scores "
                f"{tuple(scores.shape)}, got {tuple(siblings.shape)}."
            )

    __signature__ = signature_of(__init__)

    @property
    def _name(self) -> str:
        return "DependencyTree"

    def _tensors(self) -> dict[str, tuple[Tensor, int]]:
        given = super()._tensors()
        return given if self.siblings is None else {**given, "siblings": (self.siblings, 3)}

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "projective": self.projective, "root": self.root}

    def _used(self) -> Tensor:
        at = torch.arange(self.event_shape[0], device=self.scores.device)
        head, modifier = at[:, None], at
        used = (head != modifier) & (modifier > 0)
        if self.lengths is None:
            return used
        last = self._lengths()[..., None, None]
        return used & (head <= last) & (modifier <= last)

    def _given_scores(self) -> dict[str, tuple[Tensor, checks.Mask]]:
        given = super()._given_scores()
        if self.siblings is not None:
            given["siblings"] = self.siblings, self._used_siblings
        return given

    def _used_siblings(self) -> Tensor:
        """Which ``[head, sibling, modifier]`` a tree may have, as ``_used``."""
        at = torch.arange(self.event_shape[0], device=self.scores.device)
        head, sibling, modifier = at[:, None, None], at[:, None], at
        between = (head < sibling) & (sibling < modifier) | (modifier < sibling) & (sibling < head)
        if self.root == "single":
            between = between & (head > 0)
        return (between | (sibling == head)) & self._used()[..., :, None, :]

    @property
    def _local_groups(self) -> tuple[int, ...]:  # type: ignore[override]
        return (-3, -1) if self.labelled else (-2,)  # the heads of a word

    def _excluded_by(self, include: Tensor) -> Tensor:
        # a word without any other head, or label, has this one
        across = (-3, -1) if self.labelled else (-2,)
        return include.sum(across, keepdim=True) - include.long() > 0

    @property
    def _trees(self) -> str:
        return f'DependencyTree(root="{self.root}", projective={self.projective})'

    # -- heads ------------------------------------------------------------------------------------

    def _inside(self) -> Tensor:
        """Which words lie within the length, ``(*B, n)``."""
        word = torch.arange(1, self._longest + 1, device=self.scores.device)
        return word <= self._lengths()[..., None]

    def _are_trees(self, heads: Tensor) -> Tensor:
        """Whether heads ``(..., n)``, between 0 and n, form trees; 0 must stand in the padding."""
        n = self._longest
        word = torch.arange(1, n + 1, device=heads.device)
        above = torch.nn.functional.pad(heads, (1, 0))
        for _ in range(n.bit_length()):  # by then the ancestor 2^k ≥ n steps up
            above = above.gather(-1, above)
        good = (above == 0).all(-1)
        if self.root == "single":
            good = good & (((heads == 0) & self._inside()).sum(-1) == 1)
        if self.projective:
            low, high = torch.minimum(heads, word), torch.maximum(heads, word)
            low = torch.where(self._inside(), low, n + 1)  # the padding crosses nothing
            starts = (low[..., :, None] < low[..., None, :]) & (
                low[..., None, :] < high[..., :, None]
            )
            good = good & ~(starts & (high[..., :, None] < high[..., None, :])).flatten(-2).any(-1)
        return good

    def _checked_heads(self, heads: Tensor) -> tuple[Tensor, Tensor | None]:
        """Heads and labels ``(..., n)`` of an integer form, 0 in the padding, checked."""
        n = self._longest
        event = (n, 2) if self.labelled else (n,)
        try:
            shape = torch.broadcast_shapes(heads.shape, (*self.batch_shape, *event))
        except RuntimeError:
            shape = torch.Size(())
        if heads.dim() < len(event) or heads.shape[-len(event) :] != event or not shape:
            what = "pairs (head, label)" if self.labelled else "heads"
            raise ValueError(
                f"{self._name}: {what} must be (..., {', '.join(map(str, event))}) and broadcast "
                f"with the batch {tuple(self.batch_shape)}, got {tuple(heads.shape)}."
            )
        heads, labels = heads.long().expand(shape), None
        inside = self._inside()
        if self.labelled:
            heads, labels = heads.unbind(-1)
            labels = torch.where(inside, labels, 0)
        heads = torch.where(inside, heads, 0)
        if self._validate_args and checks.can_look(self._first):
            limits = self._lengths()[..., None]
            self._refuse_entries("a head", "the length", heads, limits)
            if labels is not None:
                limits = torch.full_like(limits, self._labels - 1)
                self._refuse_entries("a label", f"{self._labels - 1}", labels, limits)
            self._refuse_others(heads)
        return heads, labels

    def _refuse_entries(self, what: str, largest: str, entries: Tensor, limits: Tensor) -> None:
        wrong = (entries < 0) | (entries > limits)
        if bool(wrong.any()):
            where = tuple(wrong.nonzero()[0].tolist())
            raise ValueError(
                f"{self._name}: {what} must be between 0 and {largest}, got {int(entries[where])} "
                f"at {list(where)}."
            )

    def _refuse_others(self, heads: Tensor) -> None:
        wrong = ~self._are_trees(heads)
        if bool(wrong.any()):
            item = tuple(wrong.nonzero()[0].tolist())
            kind = "projective tree" if self.projective else "tree"
            kind += " with one root" if self.root == "single" else ""
            length = int(self._lengths().expand(wrong.shape)[item])
            raise ValueError(
                f"{self._name}: heads{list(item)} = {heads[item][:length].tolist()} form no {kind}."
            )

    def _checked(self, z: Tensor) -> Tensor:
        used = self._used()
        arcs = z * used[..., None] if self.labelled else z * used
        counts = arcs.flatten(z.dim() - 1).sum(-1) if self.labelled else arcs
        counts = counts.sum(-2)[..., 1:]  # the heads of each word
        wrong = ((arcs != 0) & (arcs != 1)).flatten(z.dim() - len(self.event_shape)).any(-1)
        wrong = wrong | ((counts != 1) & self._inside()).any(-1)
        if bool(wrong.any()):
            item = tuple(wrong.nonzero()[0].tolist())
            raise ValueError(
                f"{self._name}: z{list(item)} must hold exactly one 1 for each word, in the column "
                "of that modifier."
            )
        self._refuse_others(self._heads_of(z)[0])
        return z

    def _heads_of(self, z: Tensor) -> tuple[Tensor, Tensor | None]:
        """Heads and labels ``(..., n)`` of an indicator, 0 in the padding."""
        chosen = (z != 0).to(torch.uint8)
        inside = self._inside()
        labels = None
        if self.labelled:
            head = chosen.amax(-1).argmax(-2)[..., 1:]  # (..., n)
            by_label = chosen[..., 1:, :].amax(-3)  # (..., n, labels)
            labels = torch.where(inside, by_label.argmax(-1), 0)
        else:
            head = chosen.argmax(-2)[..., 1:]
        return torch.where(inside, head, 0), labels

    # -- scores -----------------------------------------------------------------------------------

    def score(self, z: Any) -> Tensor:
        """The score of heads (integers) or of an indicator; see :class:`Structure`."""
        if not isinstance(z, Tensor):
            z = self._as_heads(z)
        if z.is_floating_point() or z.dtype == torch.bool:
            return self._score(self._indicator(z))
        return self._score_heads(*self._checked_heads(z))

    def _score(self, z: Tensor) -> Tensor:
        return self._score_heads(*self._heads_of(z))

    def _score_heads(self, heads: Tensor, labels: Tensor | None) -> Tensor:
        s = self.event_shape[0]
        word = torch.arange(1, s, device=heads.device)
        index = heads * s + word
        if labels is not None:
            index = index * self._labels + labels
        total = self._gather(self._parts()[0], index)
        if self.siblings is not None:
            index = (heads * s + self._siblings_of(heads)) * s + word
            total = total + self._gather(self._in_dtype(self.siblings, 3), index)
        return torch.where(self._inside(), total, 0.0).sum(-1)

    def _gather(self, scores: Tensor, index: Tensor) -> Tensor:
        flat = scores.flatten(len(self.batch_shape))
        return flat.expand(*index.shape[:-1], flat.shape[-1]).gather(-1, index)

    def _siblings_of(self, heads: Tensor) -> Tensor:
        """For each word, the modifier of its head just before it, or the head, ``(..., n)``."""
        n = self._longest
        word = torch.arange(1, n + 1, device=heads.device)
        head, modifier, other = heads[..., :, None], word[:, None], word
        sibling = (heads[..., None, :] == head) & self._inside()[..., None, :]
        right = torch.where(sibling & (head < other) & (other < modifier), other, 0).amax(-1)
        left = torch.where(sibling & (modifier < other) & (other < head), other, n + 1).amin(-1)
        nearest = torch.where(heads < word, right, left)
        return torch.where((nearest == 0) | (nearest == n + 1), heads, nearest)

    # -- human form -------------------------------------------------------------------------------

    def decode(self, z: Tensor) -> Any:
        """The heads of the words, or (head, label) pairs, nested as the batch of z.

        z may have sample dimensions before the batch (``sample``) or after it (``topk``). Words
        after the last one with a head are padding, so what does not exist is ``[]``.
        """
        if self.labelled:
            columns = (z != 0).any(-1)
            head = columns.to(torch.uint8).argmax(-2)[..., 1:]
            label = (z != 0).any(-3).to(torch.uint8).argmax(-1)[..., 1:]
            rows = torch.stack([head, label], -1)
        else:
            columns = z != 0
            rows = columns.to(torch.uint8).argmax(-2)[..., 1:]
        word = torch.arange(z.shape[-2 - self.labelled], device=z.device)
        sizes = torch.where(columns.any(-2), word, 0).amax(-1)
        batch = sizes.shape
        items = rows.flatten(0, len(batch) - 1).tolist() if batch else [rows.tolist()]
        if self.labelled:
            items = [[tuple(pair) for pair in item] for item in items]
        ends = sizes.flatten().tolist()
        return nest([item[:end] for item, end in zip(items, ends, strict=True)], batch)

    def encode(self, obj: Any) -> Tensor:
        """z of heads: a tensor ``(*B, n)``, or a list (of lists) of heads, ragged or not.

        With labels, pairs of head and label take the place of heads.
        """
        if not isinstance(obj, Tensor):
            obj = self._as_heads(obj)
        return self._z_of(*self._checked_heads(obj))

    def _z_of(self, heads: Tensor, labels: Tensor | None) -> Tensor:
        """The indicator of heads and labels ``(..., n)``."""
        s = self.event_shape[0]
        z = heads.new_zeros((*heads.shape[:-1], s, s), dtype=self.dtype)
        index = heads.unsqueeze(-2)
        if self.lengths is None:
            z[..., 1:].scatter_(-2, index, 1.0)
        else:
            inside = self._inside().unsqueeze(-2).to(self.dtype).expand(index.shape)
            z[..., 1:].scatter_(-2, index, inside)
        if labels is None:
            return z
        label = torch.nn.functional.pad(labels, (1, 0))
        return z[..., None] * (
            label[..., None, :, None] == torch.arange(self._labels, device=z.device)
        )

    def _as_heads(self, obj: Any) -> Tensor:
        event = (self._longest, 2) if self.labelled else (self._longest,)
        items, batch = unnest(self._name, obj, len(event), len(self.batch_shape))
        none = [-1, -1] if self.labelled else -1
        most = max((len(item) for item in items), default=event[0])
        rows = [[*item, *[none] * (max(most, event[0]) - len(item))] for item in items]
        heads = torch.tensor(rows, dtype=torch.long, device=self.scores.device)
        return heads.reshape(*batch, *(heads.shape[1:] if rows else event))

    def enumerate_support(self, expand: bool = True) -> Tensor:
        n, length = self._longest, self._one_length()
        if (length * max(self._labels, 1)) ** length > 1_000_000:
            raise ValueError(
                f"{self._name}.enumerate_support: trees of {length} words are too many."
            )
        heads = torch.cartesian_prod(*[torch.arange(length + 1, device="cpu")] * length).reshape(
            -1, length
        )
        heads = torch.nn.functional.pad(heads, (0, n - length))
        heads = heads[self._one_of(length)._are_trees(heads)]
        word = torch.arange(1, length + 1, device="cpu")
        every = torch.zeros(len(heads), n + 1, n + 1, device="cpu")
        every[torch.arange(len(heads), device="cpu")[:, None], heads[:, :length], word] = 1.0
        return self._with_labels(every, expand)

    def _one_of(self, length: int) -> DependencyTree:
        """One unlabelled item of this length, which knows what a tree is."""
        return type(self)(
            torch.zeros(self.event_shape[:2], device="cpu"),
            torch.tensor(length, device="cpu"),
            self.projective,
            self.root,
            labelled=False,
        )
