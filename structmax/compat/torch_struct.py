"""The face of torch-struct (0.5): ``from structmax.compat.torch_struct import LinearChainCRF, …``.

Distributions have torch-struct's potentials, shapes and conventions: one batch dimension, events
shaped as the potentials, and properties instead of methods for ``partition``, ``marginals``,
``argmax``, ``entropy``, ``max``, ``mode`` and ``count``. ``structure`` is the structmax structure
that answers, with all its other queries. Different on purpose, everywhere:

- Potentials are never written to, nor made to require a gradient. −inf is exact where torch-struct
  has −1e5 or −1e9: a structure that does not exist has ``kmax`` −inf and ``topk`` zeros.
- No item need have the full length, and the padding may hold anything, NaN included.
- NaN or +inf in potentials, or an item that allows no structure, is an error.
- ``argmax``, ``sample`` and ``topk`` carry no gradient. ``sample`` takes any shape.
- ``to_event`` heeds its lengths, which torch-struct drops.

Semirings and ``gumbel_crf`` are not here; for the latter there is
``structmax.estimators.PerturbAndParse(hard=True)``, given ``structure``.

>>> import torch
>>> potentials = torch.zeros(1, 2, 2, 2)  # 3 positions, 2 tags, [step, to, from]
>>> potentials[0, :, 1] = torch.tensor([1.0, 0.5])
>>> chain = LinearChainCRF(potentials)
>>> chain.marginals[0, 0]
tensor([[0.1957, 0.1957],
        [0.3789, 0.2298]])
>>> chain.from_event(chain.argmax)[0]
tensor([[0, 1, 1]])
>>> chain.log_prob(chain.argmax).exp(), chain.entropy, chain.count
(tensor([0.2358]), tensor([1.9753]), tensor([8.]))
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.functional import one_hot, pad

from structmax import checks
from structmax.compat.struct_distribution import StructDistribution, silent
from structmax.forest.pcfg.trees import rule_counts
from structmax.forest.topology import Forest, ForestBuilder, bucket, family, lookup, name_of
from structmax.structures import (
    alignment,
    binary_tree,
    dependency_tree,
    hmm,
    hyperpath,
    linear_chain,
    pcfg,
)
from structmax.structures.base import Structure, dot


class LinearChainCRF(StructDistribution):
    """``sx.LinearChain`` with potentials ``(B, N−1, C, C)``, ``[step, to, from]``.

    ``lengths`` counts positions. Compact form: tags ``(B, N)``; ``extra`` is C.

    >>> chain = LinearChainCRF(torch.randn(2, 4, 3, 3), lengths=torch.tensor([5, 3]))
    >>> chain.marginals.sum((-1, -2))[1].round()
    tensor([1., 1., 0., 0.])
    >>> chain.topk(4).shape, chain.kmax(4).shape, chain.sample((7,)).shape
    (torch.Size([4, 2, 4, 3, 3]), torch.Size([4, 2]), torch.Size([7, 2, 4, 3, 3]))
    >>> gold = LinearChainCRF.struct.to_parts(torch.tensor([[0, 1, 2, 2, 0], [2, 1, 0, 0, 0]]), 3,
    ...                                       lengths=torch.tensor([5, 3]))
    >>> chain.log_prob(gold).shape
    torch.Size([2])
    """

    _event = ("N-1", "C", "C")

    def _structure(self, potentials: Tensor) -> linear_chain.LinearChain:
        size, steps, c, _ = potentials.shape
        unary = potentials.new_zeros(size, steps + 1, c)
        return linear_chain.LinearChain(unary, potentials.mT, lengths=self.lengths)

    def _parts(self, z: Tensor) -> Tensor:
        return z[..., 1:, :, None] * z[..., :-1, None, :]

    @property
    def marginals(self) -> Tensor:
        """The probability of each pair of tags, ``(B, N−1, C, C)``. Differentiable."""
        return self.structure.edge_marginals().mT

    @staticmethod
    def to_parts(sequence: Tensor, extra: int, lengths: Any = None) -> Tensor:
        """Events of tags ``(B, N)`` below C = ``extra``; what stands in the padding is ignored."""
        inside = _inside(sequence, lengths)
        z = one_hot(torch.where(inside, sequence, 0), extra) * inside[..., None]
        return z[:, 1:, :, None] * z[:, :-1, None, :]

    @staticmethod
    def from_parts(parts: Tensor) -> tuple[Tensor, int]:
        """Tags ``(B, N)``, 0 in the padding, and C."""
        first = parts[:, :1].sum(-2).argmax(-1)
        return torch.cat([first, parts.sum(-1).argmax(-1)], 1), parts.shape[-1]


class HMM(LinearChainCRF):
    """``sx.HMM`` with torch-struct's order of arguments and axes; events as of a linear chain.

    The likelihood of an item of one position counts its state and observation, which torch-struct
    leaves out.

    Args:
        transition: ``(C, C)``, log-probabilities ``[to, from]``
        emission: ``(V, C)``, log-probabilities
        init: ``(C)``, log-probabilities
        observations: ``(B, N)``, integers below V
        lengths: ``(B)``

    >>> stay = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log()
    >>> coin = torch.tensor([[0.5, 0.9], [0.5, 0.1]]).log()  # a fair and a loaded one
    >>> states = HMM(stay, coin, torch.tensor([0.5, 0.5]).log(), torch.tensor([[0, 0, 0, 0]]))
    >>> states.partition.exp()
    tensor([0.3233])
    >>> states.from_event(states.argmax)[0]
    tensor([[1, 1, 1, 1]])
    """

    def __init__(
        self,
        transition: Tensor,
        emission: Tensor,
        init: Tensor,
        observations: Tensor,
        lengths: Any = None,
    ) -> None:
        (size, n), c = observations.shape, init.shape[-1]
        shapes = torch.Size([size]), torch.Size([n - 1, c, c])
        Distribution.__init__(self, *shapes, validate_args=False)
        self.transition, self.emission, self.init = transition, emission, init
        self.observations = observations
        self._set_lengths(lengths, observations.device)
        self._model()  # which validates them

    def _model(self) -> hmm.HMM:
        given = self.init, self.transition.mT, self.emission.mT, self.observations
        return hmm.HMM(*given, self.lengths)

    @property
    def structure(self) -> Any:
        """The structure that answers."""
        return self._model()

    @property
    def log_potentials(self) -> Tensor:
        """``(B, N−1, C, C)``: what a linear chain with the same distribution has."""
        unary = self._model().unary  # (B, N, C)
        step = self.transition + unary[:, 1:, :, None]
        start = (self.init + unary[:, 0])[:, None, None, :].expand_as(step[:, :1])
        return torch.cat([step[:, :1] + start, step[:, 1:]], 1)


@family
def semi_markov_crf(n: int, k: int, c: int) -> Forest:
    """Nodes (t, label) and a goal after each position t. Parts: start, width, to, from."""
    draw = ForestBuilder()
    draw.nodes(n * (c + 1))
    label = np.arange(c)
    start, width = np.nonzero(np.arange(n)[:, None] + np.arange(k) < n)
    start, width = (x[width > 0][:, None, None] for x in (start, width))
    part = ((start * k + width) * c + label[:, None]) * c + label  # (segments, to, from)
    tail = start * (c + 1) + label
    draw.edges((start + width) * (c + 1) + label[:, None], tail, -1, part)
    position = np.arange(n)[:, None] * (c + 1)
    draw.edges(position + c, position + label)
    return draw.build(max(n - 1, 1) * k * c * c)


class SemiMarkovCRF(StructDistribution):
    """Segments with potentials ``(B, N−1, K, C, C)``, ``[start, width, to, from]``.

    Labels stand at the boundaries, N of them, as ``lengths`` counts; a segment of some width takes
    the label at its start to the one at its end. Width 0 is not used, so K − 1 is the longest.
    Where potentials are a sum of segments and transitions ``sx.SemiMarkov`` is faster. Compact
    form: ``(B, N)``, a label at each boundary and −1 elsewhere; ``extra`` is (C, K).

    With lengths, torch-struct misses segments that end after the shortest item does; here an item
    has the same distribution in a batch as alone.

    >>> segments = SemiMarkovCRF(torch.zeros(1, 3, 3, 2, 2))
    >>> segments.count  # 1 + 1 + 1, 1 + 2 and 2 + 1
    tensor([32.])
    >>> segments.from_event(SemiMarkovCRF.struct.to_parts(torch.tensor([[0, -1, 1, 0]]), (2, 3)))
    (tensor([[ 0, -1,  1,  0]]), (2, 3))
    """

    _event = ("N-1", "K", "C", "C")

    def _structure(self, potentials: Tensor) -> Structure:
        size, steps, k, c, _ = potentials.shape
        device, n, lengths = potentials.device, bucket(steps + 1), self.lengths
        if lengths is None:
            lengths = torch.full((size,), steps + 1, device=device)
        width = torch.arange(k, device=device)
        end = torch.arange(steps, device=device)[:, None] + width  # of each segment
        inside = ((end < lengths[:, None, None]) & (width > 0))[..., None, None]
        if checks.can_look():
            looked_at: dict[str, tuple[Tensor, Tensor | None]] = {
                "log_potentials": (potentials, inside)
            }
            sizes = {"lengths": checks.between(lengths, 1, steps + 1)}
            checks.values("SemiMarkovCRF", looked_at, sizes)
        scores = torch.where(inside, potentials, 0.0)
        scores = pad(scores, (0, 0, 0, 0, 0, 0, 0, max(n - 1, 1) - steps)).flatten(1)
        forest = lookup(name_of("semi_markov_crf", (n, k, c)))
        return hyperpath.Hyperpath(forest, scores, lengths * (c + 1) - 1)

    def _parts(self, z: Tensor) -> Tensor:
        return z[..., : self.event_shape.numel()].unflatten(-1, self.event_shape)

    @staticmethod
    def to_parts(sequence: Tensor, extra: tuple[int, int], lengths: Any = None) -> Tensor:
        """Events of labels ``(B, N)``, −1 between the boundaries; ``extra`` is (C, K)."""
        (size, n), (c, k) = sequence.shape, extra
        if bool((sequence[:, 0] < 0).any()):
            bad = int((sequence[:, 0] < 0).nonzero()[0])
            raise ValueError(
                "SemiMarkovCRF: a label must stand at the first boundary of each item, got "
                f"{int(sequence[bad, 0])} for item {bad}."
            )
        at = torch.arange(n, device=sequence.device)
        there = (sequence >= 0) & _inside(sequence, lengths)
        item, end = (there & (at > 0)).nonzero().unbind(-1)
        start = torch.where(there, at, 0).cummax(-1).values[item, end - 1]
        parts = sequence.new_zeros(size, n - 1, k, c, c)
        parts[item, start, end - start, sequence[item, end], sequence[item, start]] = 1
        return parts

    @staticmethod
    def from_parts(parts: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Labels ``(B, N)``, −1 between the boundaries and in the padding, and (C, K)."""
        item, start, width, end, begin = parts.nonzero().unbind(-1)
        labels = parts.new_full((parts.shape[0], parts.shape[1] + 1), -1, dtype=torch.long)
        labels[item, start] = begin
        labels[item, start + width] = end
        return labels, (parts.shape[-1], parts.shape[2])


class DependencyCRF(StructDistribution):
    """``sx.DependencyTree(projective=True)`` with potentials ``(B, N, N)`` or ``(B, N, N, L)``.

    ``[head, child]``, and the root's arcs on the diagonal. ``lengths`` counts words. Compact form:
    heads ``(B, N)``, 0 the root and words from 1. ``multiroot`` belongs to this distribution; in
    torch-struct the last one made decides for all of them.

    >>> tree = DependencyCRF(torch.zeros(1, 3, 3))
    >>> tree.count, DependencyCRF(torch.zeros(1, 3, 3), multiroot=False).count
    (tensor([12.]), tensor([7.]))
    >>> tree.marginals[0].diagonal()  # whether each word is below the root
    tensor([0.5833, 0.3333, 0.5833])
    >>> tree.struct.to_parts(torch.tensor([[2, 0, 2]]))
    tensor([[[0, 0, 0],
             [1, 1, 1],
             [0, 0, 0]]])
    """

    _event: tuple[str, ...] = ("N", "N")
    _projective = True

    def __init__(
        self,
        log_potentials: Tensor,
        lengths: Any = None,
        args: Any = None,
        multiroot: bool = True,
    ) -> None:
        self.multiroot, self._labelled = multiroot, log_potentials.dim() == 4
        if self._labelled:
            self._event = ("N", "N", "L")
        super().__init__(log_potentials, lengths)

    def _structure(self, potentials: Tensor) -> Structure:
        root = potentials.diagonal(dim1=1, dim2=2).movedim(-1, 1)  # (B, N) or (B, N, L)
        scores = torch.cat([root[:, None], potentials], 1)
        scores = torch.cat([torch.zeros_like(scores[:, :, :1]), scores], 2)
        return dependency_tree.DependencyTree(  # type: ignore[abstract]
            scores,
            self.lengths,
            self._projective,
            "multi" if self.multiroot else "single",
            labelled=self._labelled,
        )

    def _parts(self, z: Tensor) -> Tensor:
        if self._labelled:
            root = torch.diag_embed(z[..., 0, 1:, :].mT, dim1=-3, dim2=-2)
            return z[..., 1:, 1:, :] + root
        return z[..., 1:, 1:] + torch.diag_embed(z[..., 0, 1:])

    @staticmethod
    def to_parts(sequence: Tensor, extra: Any = None, lengths: Any = None) -> Tensor:
        """Events of heads ``(B, N)``; what stands in the padding is ignored."""
        child = torch.arange(sequence.shape[1], device=sequence.device)
        head = torch.where(sequence == 0, child, sequence - 1)
        inside = _inside(sequence, lengths)
        head = torch.where(inside, head, 0)
        return (one_hot(head, sequence.shape[1]) * inside[..., None]).mT

    @staticmethod
    def from_parts(parts: Tensor) -> tuple[Tensor, None]:
        """Heads ``(B, N)``, 0 in the padding, and None; labels are summed over."""
        parts = parts.sum(-1) if parts.dim() == 4 else parts
        head = parts.argmax(-2)
        child = torch.arange(parts.shape[-1], device=parts.device)
        below = (head == child) | ~(parts != 0).any(-2)
        return torch.where(below, 0, head + 1), None


class NonProjectiveDependencyCRF(DependencyCRF):
    """``sx.DependencyTree`` with potentials as of :class:`DependencyCRF`; arcs may cross.

    Exact, where torch-struct adds 1e-5 to every weight. Labels, ``argmax``, ``entropy``, ``topk``
    and ``sample``, which torch-struct does not have, work too.

    >>> tree = NonProjectiveDependencyCRF(torch.zeros(1, 3, 3))
    >>> tree.count, NonProjectiveDependencyCRF(torch.zeros(1, 3, 3), multiroot=True).count
    (tensor([9.]), tensor([16.]))
    >>> tree.marginals[0].diagonal()
    tensor([0.3333, 0.3333, 0.3333])
    """

    _projective = False

    def __init__(
        self,
        log_potentials: Tensor,
        lengths: Any = None,
        args: Any = None,
        multiroot: bool = False,
    ) -> None:
        super().__init__(log_potentials, lengths, args, multiroot)


class TreeCRF(StructDistribution):
    """``sx.BinaryTree`` with potentials ``(B, N, N, NT)``: ``[i, j, label]``, both ends inclusive.

    >>> tree = TreeCRF(torch.zeros(1, 4, 4, 1))
    >>> tree.count
    tensor([5.])
    >>> tree.marginals[0, 0, :, 0]
    tensor([1.0000, 0.4000, 0.4000, 1.0000])
    """

    _event = ("N", "N", "NT")

    def _structure(self, potentials: Tensor) -> Structure:
        return binary_tree.BinaryTree(potentials, self.lengths, labelled=True)


class SentCFG(StructDistribution):
    """``sx.PCFG`` with a tuple of potentials: terms, rules, roots.

    terms ``(B, N, T)``, rules ``(B, NT, NT+T, NT+T)`` as ``[parent, left, right]``, roots
    ``(B, NT)``. Events are tuples of counts of the same three, and of spans ``(B, N, N, NT)``:
    ``[w, i]`` is the one of w + 2 words from i on. ``log_prob`` takes such a tuple, with or without
    spans. torch-struct has no ``log_prob``, ``sample`` and ``count`` here, and its ``topk`` adds up
    all but the spans.
    Compact form: labelled spans ``(B, N, N, NT+T)``, both ends inclusive; ``extra`` is (NT, T).

    >>> terms, rules, roots = torch.zeros(1, 4, 2), torch.zeros(1, 1, 3, 3), torch.zeros(1, 1)
    >>> grammar = SentCFG((terms, rules, roots))
    >>> grammar.count  # 5 trees · 2⁴
    tensor([80.])
    >>> [tuple(part.shape) for part in grammar.marginals]
    [(1, 4, 2), (1, 1, 3, 3), (1, 1), (1, 4, 4, 1)]
    >>> grammar.log_prob(grammar.argmax).exp()
    tensor([0.0125])
    >>> spans, extra = grammar.from_event(grammar.argmax)
    >>> spans.shape, grammar.log_prob(grammar.to_event(spans, extra)).exp()
    (torch.Size([1, 4, 4, 3]), tensor([0.0125]))
    """

    _event = ("N", "T")

    def __init__(self, log_potentials: tuple[Tensor, Tensor, Tensor], lengths: Any = None) -> None:
        super().__init__(log_potentials, lengths)

    def _structure(self, potentials: tuple[Tensor, Tensor, Tensor]) -> pcfg.PCFG:
        terms, rules, roots = potentials
        return pcfg.PCFG(roots, rules, terms, self.lengths)

    def _parts(self, z: Tensor) -> tuple[Tensor, ...]:
        nt = self.structure.N
        terms, rules, roots = SentCFG.to_parts(z, (nt, self.structure.P), self.lengths)
        return terms, rules, roots, _by_width(z[..., :nt])

    @property
    def marginals(self) -> tuple[Tensor, ...]:
        """The expected counts of terms, rules, roots and spans. Differentiable."""
        s = self.structure
        value, found = s._value_and_gradient()  # all of them from one pass
        z, roots, rules = (s._refuse_infeasible("marginals", value, mu).to(s.dtype) for mu in found)
        terms = z[..., s.N :].diagonal(dim1=1, dim2=2).mT
        return terms, rules, roots, _by_width(z[..., : s.N])

    def _score(self, value: tuple[Tensor, ...]) -> Tensor:
        pairs = zip(self.log_potentials, value[:3], (2, 3, 1), strict=True)
        terms, rules, roots = (dot(p, v.to(p), d) for p, v, d in pairs)
        return terms + rules + roots

    def _silent(self) -> Any:
        return tuple(map(silent, self.log_potentials))

    @staticmethod
    def to_parts(
        sequence: Tensor, extra: tuple[int, int], lengths: Any = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Terms, rules and roots of labelled spans ``(B, N, N, NT+T)``; ``extra`` is (NT, T)."""
        nt, n = extra[0], sequence.shape[-2]
        last = torch.as_tensor(n if lengths is None else lengths, device=sequence.device) - 1
        top = one_hot(last.expand(sequence.shape[:-3]), n)[..., None].to(sequence)
        roots = (sequence[..., 0, :, :nt] * top).sum(-2)
        terms = sequence[..., nt:].diagonal(dim1=-3, dim2=-2).mT
        return terms, rule_counts(sequence, nt), roots

    def to_event(self, sequence: Tensor, extra: Any, lengths: Any = None) -> Any:
        """Terms, rules and roots of labelled spans; ``lengths`` are the grammar's unless given."""
        return self.to_parts(sequence, extra, self.lengths if lengths is None else lengths)

    @staticmethod
    def from_parts(parts: tuple[Tensor, ...]) -> tuple[Tensor, tuple[int, int]]:
        """Labelled spans ``(..., N, N, NT+T)`` of an event with spans, and (NT, T)."""
        if len(parts) < 4:
            raise ValueError("SentCFG: an event without spans, its fourth part, has no such form.")
        terms, spans = parts[0], parts[3]
        nt, at = spans.shape[-1], torch.arange(terms.shape[-2], device=terms.device)
        width = at - at[:, None] - 1  # [i, j]
        labels = spans[..., width.clamp(min=0), at[:, None], :] * (width >= 0)[..., None]
        words = torch.diag_embed(terms.mT).movedim(-3, -1)
        return torch.cat([labels, words.to(labels)], -1), (nt, terms.shape[-1])


class AlignmentCRF(StructDistribution):
    """``sx.Alignment`` with potentials ``(B, N, M, 3)``: of entering cell (i, j) from (i, j−1),
    (i−1, j−1) and (i−1, j).

    The first cell counts as entered by the second. ``lengths`` counts rows, and every item has all
    columns; either side may be the longer one. torch-struct ignores ``local=True``, and its
    ``max_gap`` is approximate: both are errors here.

    >>> path = AlignmentCRF(torch.zeros(1, 2, 3, 3))
    >>> path.count
    tensor([5.])
    >>> path.marginals[0, 1]
    tensor([[0.0000, 0.0000, 0.2000],
            [0.2000, 0.2000, 0.2000],
            [0.6000, 0.2000, 0.2000]])
    """

    _event = ("N", "M", "3")

    def __init__(
        self,
        log_potentials: Tensor,
        local: bool = False,
        lengths: Any = None,
        max_gap: int | None = None,
    ) -> None:
        if local:
            raise ValueError("AlignmentCRF: local=True is not supported; torch-struct ignores it.")
        if max_gap is not None:
            raise ValueError(
                f"AlignmentCRF: max_gap={max_gap} is not supported. sx.Alignment(..., band=...) "
                "keeps paths near the diagonal, exactly."
            )
        super().__init__(log_potentials, lengths)

    def _structure(self, potentials: Tensor) -> alignment.Alignment:
        n, m = potentials.shape[1:3]
        rows = self.lengths
        lengths = None if rows is None else (rows, torch.full_like(rows, m))
        cells = pad(potentials[:, :1, :1, 1], (0, m - 1, 0, n - 1))
        return alignment.Alignment(cells, lengths, moves=potentials[..., [1, 2, 0]])

    def _parts(self, z: Tensor) -> Tensor:
        across, down = z * pad(z, (1, -1)), z * pad(z, (0, 0, 1, -1))
        return torch.stack([across, z - across - down, down], -1)

    @property
    def marginals(self) -> Tensor:
        """The probability of each move, ``(B, N, M, 3)``. Differentiable."""
        moves = self.structure.edge_marginals()[..., [2, 0, 1]]
        n, m = moves.shape[1:3]
        return moves + pad(torch.ones_like(moves[:, :1, :1, :1]), (1, 1, 0, m - 1, 0, n - 1))


def _inside(sequence: Tensor, lengths: Any) -> Tensor:
    """Which positions lie within the length, ``(B, N)``."""
    if lengths is None:
        return torch.ones_like(sequence, dtype=torch.bool)
    position = torch.arange(sequence.shape[1], device=sequence.device)
    return position < torch.as_tensor(lengths, device=sequence.device)[:, None]


def _by_width(spans: Tensor) -> Tensor:
    """Spans [i, j] of two words and more at [j − i − 1, i], ``(..., N, N, labels)``."""
    n = spans.shape[-2]
    at = torch.arange(n, device=spans.device)
    end = at[:, None] + at + 1  # [width, start]
    return spans[..., at, end.clamp(max=n - 1), :] * (end < n)[..., None]


_INSTEAD = {
    "LinearChain": "LinearChainCRF",
    "SemiMarkov": "SemiMarkovCRF",
    "DepTree": "DependencyCRF",
    "deptree_part": "NonProjectiveDependencyCRF",
    "deptree_nonproj": "NonProjectiveDependencyCRF",
    "CKY": "SentCFG",
    "CKY_CRF": "TreeCRF",
    "Alignment": "AlignmentCRF",
    "Autoregressive": "structmax.ShiftReduce or structmax.EasyFirst, which are built step by step",
    "SelfCritical": 'structmax.estimators.Reinforce(baseline="self-critic"), given .structure',
    "Semiring": "the distributions' partition, max, argmax, entropy, topk and sample, or a "
    "structmax structure with smoothing=",
}


def __getattr__(name: str) -> NoReturn:
    """Says what stands in for a name of torch-struct that is not here."""
    instead = _INSTEAD.get("Semiring" if name.endswith("Semiring") else name)
    if instead is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # of an AttributeError, "from … import …" would show nothing but the name
    raise ImportError(f"torch-struct's {name} is not in {__name__}. Use {instead}.")
