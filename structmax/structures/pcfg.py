"""Weighted context-free grammars in Chomsky normal form."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structmax import checks
from structmax.forest.pcfg import ops as dense
from structmax.forest.pcfg.trees import rule_counts, rules_of
from structmax.forest.topology import Forest, ForestBuilder, bucket, family, name_of
from structmax.primitive import backend_for, is_transforming
from structmax.smoothing import HARD, TSALLIS, Smoothing
from structmax.structures.base import Structure, TopK, dot, uniform
from structmax.structures.binary_tree import crossing
from structmax.structures.dynamic import DynamicStructure
from structmax.structures.lengths import OneSided
from structmax.structures.nesting import nest, unnest

MAX_EDGES = 20_000_000  # of a forest that is written out


def count_edges(n: int, N: int, P: int) -> int:
    """Hyperedges of the forest below."""
    wide = sum((n - w + 1) * (2 * N * P + (w - 3) * N * N) for w in range(3, n + 1))
    return N * ((n - 1) * P * P + wide + n - 1) + n * P


@family
def pcfg(n: int, N: int, P: int) -> Forest:
    """Nodes ``(i, j, A)`` by width, then a goal for each length.

    Parts: ``(i·n + j)·S + A`` for labelled spans, then root symbols, then rules
    ``(A·S + B)·S + C``, then one that is always forbidden: a single word's goal has no other.
    """
    S = N + P
    draw = ForestBuilder()
    first, i = {}, np.arange(n)
    first[1] = draw.nodes(n * P, ((i * n + i)[:, None] * S + N + np.arange(P)).ravel())[0]
    for w in range(2, n + 1):
        i = np.arange(n - w + 1)
        part = (i * n + i + w - 1)[:, None] * S + np.arange(N)
        first[w] = draw.nodes(part.size, part.ravel())[0]
        for v in range(1, w):  # the width of the left child
            shape = (len(i), N, P if v == 1 else N, P if v == w - 1 else N)
            start, a, b, c = np.meshgrid(*map(np.arange, shape), indexing="ij", sparse=True)
            left = first[v] + start * shape[2] + b
            right = first[w - v] + (start + v) * shape[3] + c
            symbols = (a * S + b + N * (v == 1)) * S + c + N * (v == w - 1)
            draw.edges(first[w] + start * N + a, left, right, n * n * S + N + symbols)
    goals, symbol = draw.nodes(n), np.arange(N)
    draw.edges(goals[0], -1, -1, n * n * S + N + N * S * S)
    for w in range(2, n + 1):
        draw.edges(goals[w - 1], first[w] + symbol, -1, n * n * S + symbol)
    return draw.build(n * n * S + N + N * S * S + 1)


class PCFG(OneSided, DynamicStructure):
    """A binary tree with labels: a derivation of a weighted grammar in Chomsky normal form.

    The N nonterminals have rules A → B C, the P preterminals stand over single words. Symbols are
    numbered 0..N−1 and N..N+P−1. z is the indicator of labelled spans, z[i, j, A] = 1 if A derives
    the words i..j (preterminals on the diagonal, nonterminals above it); they determine the rules.
    The score of a tree is root[A] for its top symbol, plus rules[A, B, C] for each rule used, plus
    emission[i, p] for the preterminal over each word. Scores are log-weights and need not be
    normalised; under Shannon with γ = 1 and log-probabilities, ``log_partition`` is the
    log-likelihood of the sentence.

    The graph has a node for each labelled span, reached by one edge for each split and pair of
    labels, and a goal reached from the nodes of the whole sentence::

        (i, k, B) ─┐ rules[A, B, C]
                   ├──────────────► (i, j, A)        (0, n−1, A) ──root[A]──► goal
        (k+1, j, C)┘

    Under Shannon and Hard it is never written out: charts are computed by matrix products in time
    O(n³N² + n²N(N+P)²) and memory O(n²(N+P)) for each item (Baker, 1979; Lari & Young, 1990). Other
    smoothings need it and are for small grammars and short sentences.
    A sentence of one word has no derivation, as no rule takes the root to a preterminal: its
    ``log_partition`` is −inf.
    Human form: the sorted labelled spans ``(i, j, symbol)``, both ends inclusive.

    Args:
        root: ``(*B, N)`` or ``(N)``
        rules: ``(*B, N, N+P, N+P)`` or ``(N, N+P, N+P)``, as ``[parent, left, right]``. Like root,
            shared by the batch if it has no batch dimensions, and no padding: NaN is refused even
            in a rule that all sentences are too short for
        emission: ``(*B, n, P)``
        lengths: ``(*B)``
        smoothing: Ω, by default ``sx.Shannon(1.0)``
        spans: ``(*B, n, n, N+P)``, further scores of labelled spans; −inf forbids one

    >>> import structmax as sx
    >>> root, rules = torch.tensor([0.0]), torch.zeros(1, 3, 3)  # S → any pair of S, a, b
    >>> emission = torch.tensor([[0.0, 1.0], [0.0, 0.0], [2.0, 0.0]])
    >>> tree = sx.PCFG(root, rules, emission)
    >>> sx.PCFG(root, rules, torch.zeros(4, 2)).log_partition().exp()  # 5 trees · 2⁴ labels
    tensor(80.)
    >>> tree.decode(tree.condition(exclude=tree.encode([(0, 1, 0)]).bool()).argmax())
    [(0, 0, 2), (0, 2, 0), (1, 1, 1), (1, 2, 0), (2, 2, 1)]
    >>> tree.marginals()[0, 0, 1:]  # the preterminals of the first word
    tensor([0.2689, 0.7311])
    >>> tree.rule_marginals().sum()  # n − 1 rules
    tensor(2.)
    >>> tree.topk(2).scores
    tensor([3., 3.])
    """

    rules: Tensor

    def __init__(
        self,
        root: Tensor,
        rules: Tensor,
        emission: Tensor,
        lengths: Tensor | None = None,
        smoothing: Smoothing | None = None,
        validate_args: bool | None = None,
        *,
        spans: Tensor | None = None,
    ) -> None:
        self._set_up(root, emission, lengths, spans, smoothing, validate_args, rules=rules)

    def _set_up(
        self,
        root: Tensor,
        emission: Tensor,
        lengths: Tensor | None,
        spans: Tensor | None,
        smoothing: Smoothing | None,
        validate_args: bool | None,
        **weights: Tensor,
    ) -> None:
        name = self._name
        checks.scores(name, "root", root, 1, "(..., N) with N at least 1")
        checks.scores(name, "emission", emission, 2, "(..., n, P) with n and P at least 1")
        self.root, self.emission, self.spans = root, emission, spans
        self._weight_names = tuple(weights)
        for key, tensor in weights.items():
            setattr(self, key, tensor)
        (n, P), self.N = emission.shape[-2:], root.shape[-1]
        self.P = P
        S = self.N + P
        self._check_weights()
        if spans is not None:
            checks.scores(name, "spans", spans, 3, f"(..., {n}, {n}, {S})")
            if spans.shape[-3:] != (n, n, S):
                raise ValueError(
                    f"{name}: spans must be (..., {n}, {n}, {S}) for {n} words and {self.N} + {P} "
                    f"symbols, got {tuple(spans.shape)}."
                )
        if lengths is not None:
            lengths = checks.lengths(name, lengths, emission.device)
        self.lengths = lengths
        tensors = self._tensors()
        checks.same_device(name, **{key: t for key, (t, _) in tensors.items()})
        batch = checks.batch_shape(name, **tensors)
        Structure.__init__(self, batch, (n, n, S), smoothing, validate_args)

    def _check_weights(self) -> None:
        N, S = self.N, self.N + self.P
        checks.scores(self._name, "rules", self.rules, 0, "")
        if self.rules.shape[-3:] != (N, S, S):
            raise ValueError(
                f"{self._name}: rules must be (..., {N}, {S}, {S}) for {N} nonterminals (root) and "
                f"{self.P} preterminals (emission), got {tuple(self.rules.shape)}."
            )

    def _given_scores(self) -> dict[str, tuple[Tensor, checks.Mask]]:
        def inside() -> Tensor:
            word = torch.arange(self.event_shape[0], device=self.emission.device)
            return (word < self._lengths()[..., None])[..., None]

        given: dict[str, tuple[Tensor, checks.Mask]] = {
            key: (getattr(self, key), None) for key in ("root", *self._weight_names)
        }
        given["emission"] = (self.emission, None if self.lengths is None else inside)
        if self.spans is not None:
            given["spans"] = (self.spans, self._usable_parts)
        return given

    def _tensors(self) -> dict[str, tuple[Tensor, int]]:
        dims = {"rules": 3, "left": 2, "right": 2, "parent": 2}
        weights = {name: dims[name] for name in self._weight_names}
        all_dims = {"emission": 2, "root": 1, **weights, "spans": 3, "lengths": 0}
        given = {name: (getattr(self, name), d) for name, d in all_dims.items()}
        return {name: (t, d) for name, (t, d) in given.items() if t is not None}

    def _options(self) -> dict[str, Any]:
        return {}

    # -- scores -----------------------------------------------------------------------------------

    def _usable(self, lengths: Tensor | None) -> Tensor:
        """Which labelled spans a tree may have, ``(n, n, S)`` or ``(*B, n, n, S)``."""
        n, _, S = self.event_shape
        word = torch.arange(n, device=self.emission.device)
        nonterminal = torch.arange(S, device=word.device) < self.N
        i, j = word[:, None, None], word[:, None]
        usable = torch.where(nonterminal, i < j, i == j)
        return usable if lengths is None else usable & (j < lengths[..., None, None, None])

    def _spans_and_root(self) -> tuple[Tensor, Tensor]:
        """Scores of labelled spans, zeros where there is no such part, and of root symbols."""
        self._validate()
        dtype = torch.float32  # what is computed in: the widest of all, at least this
        for name, (t, _) in self._tensors().items():
            dtype = dtype if name == "lengths" else torch.promote_types(dtype, t.dtype)
        spans = torch.diag_embed(self.emission.to(dtype).mT).movedim(-3, -1)  # (..., n, n, P)
        spans = torch.nn.functional.pad(spans, (self.N, 0))
        if self.spans is not None:
            spans = spans + self.spans.to(dtype)
        spans = spans.expand(*self.batch_shape, *self.event_shape)
        lengths = None if self.lengths is None else self._lengths()
        spans = torch.where(self._usable(lengths), spans, 0.0)
        return self._nan_where_wrong(spans), self._for_batch(self.root.to(dtype), 1)

    def _for_batch(self, tensor: Tensor, dims: int) -> Tensor:
        return tensor.expand(*self.batch_shape, *tensor.shape[tensor.dim() - dims :])

    def _unvalidated_parts(self) -> tuple[Tensor, ...]:
        spans, root = self._spans_and_root()
        return spans, root, self._for_batch(self._rules().to(spans.dtype), 3)

    def _rules(self) -> Tensor:
        return self.rules

    def _usable_parts(self) -> Tensor:
        return self._usable(self._lengths())

    def _replace_primary(self, scores: Tensor, **others: Tensor) -> PCFG:
        """Emission is what lies on the diagonal, spans the rest."""
        emission = scores.diagonal(0, -3, -2).mT[..., self.N :]
        diagonal = torch.eye(scores.shape[-2], dtype=torch.bool, device=scores.device)
        spans = torch.where(diagonal[..., None], 0.0, scores)
        tensors = {name: t for name, (t, _) in self._tensors().items()}
        return self._rebuild(**{**tensors, **others, "emission": emission, "spans": spans})

    def _with_gains(self, gains: Tensor) -> PCFG:
        given = (self.root.detach(), self._rules().detach())
        root, rules = (torch.where(t == -math.inf, -math.inf, 0.0).to(gains.dtype) for t in given)
        blank = PCFG(root, rules, self.emission, self.lengths, self.smoothing, False)
        allowed = self._spans_and_root()[0].detach() > -math.inf
        return self._vouch_for(blank)._replace_primary(torch.where(allowed, gains, -math.inf))

    def _incompatible(self, include: Tensor) -> Tensor:
        """Other labels of the same span and all spans that cross it; everything, if no tree has an
        included part."""
        other = include.sum(-1, keepdim=True) - include.long() > 0
        never = (include & ~self._usable(self._lengths())).flatten(-3).any(-1)
        return crossing(include.any(-1))[..., None] | other | never[..., None, None, None]

    # -- the forest -------------------------------------------------------------------------------

    def _forest_key(self) -> str:
        size = bucket(self.event_shape[0])
        edges = count_edges(size, self.N, self.P)
        if edges > MAX_EDGES:
            raise ValueError(
                f"{self._name}: this query with {self.smoothing} writes out a forest of {edges:,} "
                f"hyperedges for {self.N} nonterminals, {self.P} preterminals and {size} words, "
                f"more than {MAX_EDGES:,}. Use sx.Shannon or sx.Hard, or a smaller grammar."
            )
        return name_of("pcfg", (size, self.N, self.P))

    def _goal(self) -> Tensor:
        size, N = bucket(self.event_shape[0]), self.N
        first = size * self.P + N * (size * (size - 1) // 2)
        return (first + self._lengths() - 1).int()

    def _derivation_size(self) -> int:
        return 2 * self.event_shape[0]

    def _pack(self, parts: Sequence[Tensor]) -> Tensor:
        spans, root, rules = parts
        grow = bucket(self.event_shape[0]) - self.event_shape[0]
        spans = torch.nn.functional.pad(spans, (0, 0, 0, grow, 0, grow))
        never = torch.full_like(root[..., :1], -math.inf)
        return torch.cat([spans.flatten(-3), root, rules.flatten(-3), never], -1)

    def _width(self) -> int:
        return bucket(self.event_shape[0]) ** 2 * self.event_shape[2]

    def _to_event(self, flat: Tensor, fill: float = 0.0) -> Tensor:
        n, _, S = self.event_shape
        return flat.unflatten(-1, (bucket(n), bucket(n), S))[..., :n, :n, :]

    def _unpack(self, flat: Tensor) -> tuple[Tensor, ...]:
        first, N, S = self._width(), self.N, self.event_shape[2]
        rules = flat[..., first + N : first + N + N * S * S].unflatten(-1, (N, S, S))
        return self._to_event(flat[..., :first]), flat[..., first : first + N], rules

    # -- dense kernels ----------------------------------------------------------------------------

    @property
    def _is_hard(self) -> bool:
        return self.smoothing.code[0] == HARD

    @property
    def _is_dense(self) -> bool:
        """Whether charts by matrix products answer, and not the forest."""
        return self.smoothing.code[0] != TSALLIS

    def _value(self) -> Tensor:
        if not self._is_dense:
            return super()._value()
        return dense.pcfg.value(self._parts(), (self._lengths(),), "", self.smoothing.code)

    def _value_and_gradient(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        if not self._is_dense:
            return super()._value_and_gradient()
        args = (self._lengths(),), "", self.smoothing.code
        value, *mu = dense.pcfg.value_and_gradient(self._parts(), *args)
        return value, tuple(mu)

    def _walks(self) -> bool:
        """Whether walks go down dense charts; the naive backend answers by the forest."""
        return backend_for(self.emission) != "naive"

    def argmax(self) -> Tensor:
        best, z = self._best_tree(self._parts())
        return self._refuse_infeasible("argmax", best, z).to(self.dtype)

    def _best_tree(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Its score and z; where the score is not finite, there is no such tree."""
        parts = [p.detach() for p in parts]
        if not self._walks():
            best, (z, *_) = super()._argmax_parts(parts)
            return best, z
        best, _, z = dense.kbest(*parts, self._lengths(), 1)
        return best, z.squeeze(len(self.batch_shape))

    def _argmax_parts(self, parts: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        if not self._walks():
            return super()._argmax_parts(parts)
        best, z = self._best_tree(parts)
        return best, (z, self._top(z), rule_counts(z, self.N))

    def _top(self, z: Tensor) -> Tensor:
        """The symbol at the root of each tree, ``(*sample, *B, N)``."""
        batch = z.shape[:-3]
        last = self._lengths().expand(batch)[..., None, None] - 1
        return z[..., 0, :, : self.N].gather(-2, last.expand(*batch, 1, self.N)).squeeze(-2)

    def sample(
        self, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None
    ) -> Tensor:
        if not (self._walks() and self._is_dense):
            return super().sample(sample_shape, generator)
        shape = checks.sample_shape(self._name, sample_shape)
        if self._is_hard:
            return self.argmax().expand(*shape, *self.batch_shape, *self.event_shape).clone()
        if self._validate_args:
            with torch.no_grad():
                self._check_feasible("sample", self.log_partition())
        z = self._draw(shape.numel(), generator)
        if self._validate_args:
            self._refuse_overflow(z)
        return z.reshape(*shape, *self.batch_shape, *self.event_shape).to(self.dtype)

    def _draw(self, count: int, generator: torch.Generator | None) -> Tensor:
        numbers = self._uniform(count, self.event_shape[0], generator)
        parts = [p.detach() for p in self._parts()]
        return dense.sample(*parts, self._lengths(), numbers, self.smoothing.gamma)

    def _uniform(self, count: int, size: int, generator: torch.Generator | None) -> Tensor:
        """Random numbers ``(count, *B, size)``."""
        return uniform((count, *self.batch_shape, size), self.emission.device, generator)

    def topk(self, k: int) -> TopK:
        if not self._walks() or not isinstance(k, int) or k < 1:
            return super().topk(k)
        parts = self._parts()
        _, scores, z = dense.kbest(*[p.detach() for p in parts], self._lengths(), k)
        z, exists = z.to(self.dtype), scores > -math.inf
        if is_transforming(parts):  # the same numbers, with a gradient
            at = len(self.batch_shape)
            safe = torch.where(exists[..., None, None, None], z, z.narrow(at, 0, 1))
            again = self._score(safe.movedim(at, 0)).movedim(0, -1)
            scores = torch.where(exists, again, -math.inf)
        return TopK(z, scores, exists)

    def max_marginals(self) -> Tensor:
        if not self._walks():
            return super().max_marginals()
        return dense.max_marginals(*[p.detach() for p in self._parts()], self._lengths())

    # -- rules ------------------------------------------------------------------------------------

    def rule_marginals(self) -> Tensor:
        """The expected number of uses of each rule, ``(*B, N, N+P, N+P)``. Differentiable."""
        value, mu = self._value_and_gradient()
        return self._refuse_infeasible("rule_marginals", value, mu[2]).to(self.dtype)

    def root_marginals(self) -> Tensor:
        """The probability of each symbol at the top of the tree, ``(*B, N)``. Differentiable."""
        value, mu = self._value_and_gradient()
        return self._refuse_infeasible("root_marginals", value, mu[1]).to(self.dtype)

    def _why_none(self, item: tuple[int, ...]) -> str:
        if int(self._lengths()[item]) > 1:
            return ""
        return (
            "the sentence has one word, and a grammar in Chomsky normal form derives two or more. "
            "Drop it."
        )

    def _refuse_overflow(self, z: Tensor) -> None:
        """Draws ``(count, *B, n, n, S)`` must be trees, and not NaN."""
        if not (checks.can_look(self._first) and z.numel()):
            return
        bad = z[..., 0, 0, 0].isnan().any(0)
        if bool(bad.any()):
            raise ValueError(
                f"{self._name}.sample: {_first(bad)} has scores so large that their sums overflow "
                "float64. Make them smaller: a constant that is taken from all emissions changes "
                "no probability."
            )

    def _aligned(self, q: Structure) -> tuple[DynamicStructure, DynamicStructure]:
        self._same_kind(q)
        if not isinstance(q, PCFG) or q.N != self.N:
            raise ValueError(
                f"{self._name}: both distributions must be over trees of the same symbols, got "
                f"{q!r}."
            )
        ragged = self.lengths is not None or q.lengths is not None
        if (
            ragged
            and checks.can_look(self._first)
            and bool((self._lengths() != q._lengths()).any())
        ):
            raise ValueError(f"{self._name}: both distributions must have the same lengths.")
        return self, q

    # -- the hard case: one tree has probability 1 ------------------------------------------------

    def log_prob(self, z: Tensor) -> Tensor:
        if not self._is_hard:
            return super().log_prob(z)
        best, tree = self._best_tree(self._parts())
        same = (self._indicator(z) == tree).flatten(-3).all(-1) & (best.abs() < math.inf)
        log_prob = torch.where(same, 0.0, -math.inf).to(self._parts()[0].dtype)
        return torch.where(best.isnan(), math.nan, log_prob)

    def cross_entropy(self, q: Structure) -> Tensor:
        if not isinstance(q, PCFG) or not q._is_hard:
            return super().cross_entropy(q)
        self._aligned(q)
        best, tree = q._best_tree(q._parts())
        mu = self.marginals()
        same = (mu == tree).flatten(-3).all(-1) & (best.abs() < math.inf)
        total = torch.where(same, 0.0, math.inf).to(self._parts()[0].dtype)
        return torch.where(best.isnan() | mu.isnan().flatten(-3).any(-1), math.nan, total)

    def _best_by_probability(self, k: int) -> tuple[Tensor, Tensor]:
        if not self._is_hard:
            return super()._best_by_probability(k)
        at, (best, z) = len(self.batch_shape), self._best_tree(self._parts())
        first = (torch.arange(k, device=z.device) == 0) & (best.abs() < math.inf)[..., None]
        log_prob = torch.where(first, 0.0, -math.inf)
        wide = z.to(self.dtype).unsqueeze(at).expand(*self.batch_shape, k, *self.event_shape)
        return wide, log_prob.to(self._parts()[0].dtype)

    # -- trees ------------------------------------------------------------------------------------

    def _indicator(self, z: Tensor) -> Tensor:
        z = super()._indicator(z)
        return torch.where(self._usable(self._lengths()), z, torch.zeros_like(z))

    def _checked(self, z: Tensor) -> Tensor:
        lengths = self._lengths()
        usable, word = self._usable(lengths), torch.arange(z.shape[-2], device=z.device)
        inside = word < lengths[..., None]  # (*B, n); padding may hold anything
        inside = inside[..., :, None, None] & inside[..., None, :, None]
        z = torch.where(inside, z, torch.zeros_like(z))
        rules, count = rules_of(z), z.flatten(-3).sum(-1)
        last = torch.nn.functional.one_hot(lengths - 1, z.shape[-2]).bool()
        top = ((z[..., 0, :, :] != 0).any(-1) & last).any(-1)
        wrong = ((z != 0) & (z != 1)).flatten(-3).any(-1) | ((z != 0) & ~usable).flatten(-3).any(-1)
        wrong = wrong | (count != 2 * lengths - 1) | (z.sum(-1) > 1).flatten(-2).any(-1) | ~top
        wrong = wrong | (rules.used & ~rules.complete).flatten(-2).any(-1)
        if bool(wrong.any()):
            item = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"{self._name}: z{item or ''} is not a binary tree with one nonterminal on each "
                "span and one preterminal on each word."
            )
        return z

    def _score(self, z: Tensor) -> Tensor:
        batch = z.shape[:-3]
        spans, root, rules = self.expand(batch)._parts()
        used, top = rules_of(z), self._top(z).to(spans.dtype)
        each = rules.flatten(-3).gather(-1, used.number.flatten(-2))
        each = torch.where(used.used.flatten(-2), each, 0.0)
        return dot(spans, z.to(spans.dtype), 3) + dot(root, top, 1) + each.sum(-1)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        n, _, S = self.event_shape
        sizes = self._lengths().unique()
        if len(sizes) > 1:
            raise ValueError(
                f"{self._name}.enumerate_support: items of different lengths have different "
                "supports. Index one item: structure[i].enumerate_support()."
            )
        length, N, P = int(sizes[0]) if len(sizes) else n, self.N, self.P
        trees = math.comb(2 * length - 2, length - 1) // length
        count = trees * N ** (length - 1) * P**length if length > 1 else 0
        if count > 1_000_000:
            raise ValueError(f"{self._name}.enumerate_support: {count} structures are too many.")
        every = torch.zeros(count, n, n, S, dtype=self.dtype, device="cpu")
        for z, tree in zip(every, _trees(0, length - 1, N, P), strict=False):
            for i, j, symbol in tree:
                z[i, j, symbol] = 1
        every = every.to(self.emission.device).reshape(
            count, *[1] * len(self.batch_shape), *self.event_shape
        )
        return every.expand(-1, *self.batch_shape, *self.event_shape) if expand else every

    def decode(self, z: Tensor) -> Any:
        """Sorted lists of ``(i, j, symbol)``, nested as the batch of z."""
        batch = z.shape[:-3]
        items: list[list[tuple[int, ...]]] = [[] for _ in range(batch.numel())]
        for item, *part in (z != 0).reshape(batch.numel(), *self.event_shape).nonzero().tolist():
            items[item].append(tuple(part))
        return nest(items, batch)

    def encode(self, obj: Any) -> Tensor:
        """z of a list of ``(i, j, symbol)``, nested lists of those, or a tensor ``(*B, m, 3)`` with
        rows of −1 in the padding."""
        items, batch = unnest(self._name, obj, 2, len(self.batch_shape))
        z = torch.zeros(len(items), *self.event_shape, dtype=self.dtype, device="cpu")
        for number, item in enumerate(items):
            for part in item:
                if all(x == -1 for x in part):  # padding of a tensor
                    continue
                if len(part) != 3 or not all(
                    0 <= x < size for x, size in zip(part, self.event_shape, strict=True)
                ):
                    raise ValueError(
                        f"{self._name}.encode: a labelled span is (i, j, symbol) below "
                        f"{tuple(self.event_shape)}, got {tuple(part)}."
                    )
                z[(number, *part)] = 1
        return z.reshape(*batch, *self.event_shape).to(self.emission.device)

    @classmethod
    def low_rank(
        cls,
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
    ) -> PCFG:
        """The grammar with rules[A, B, C] = log Σ_r exp(parent[A, r] + left[B, r] + right[C, r]).

        See :class:`LowRankPCFG`.
        """
        from structmax.structures.low_rank_pcfg import LowRankPCFG

        args = (lengths, smoothing, validate_args)
        return LowRankPCFG(root, left, right, parent, emission, *args, spans=spans)


def _first(items: Tensor) -> str:
    """The first item of a mask ``(*B)``, in words."""
    item = items.nonzero()[0].tolist()
    return f"item {item[0] if len(item) == 1 else tuple(item)}" if item else "the sentence"


def _trees(i: int, j: int, N: int, P: int) -> Iterator[list[tuple[int, int, int]]]:
    """All labelled trees over the words i..j."""
    if i == j:
        yield from ([(i, i, N + p)] for p in range(P))
        return
    for k in range(i, j):
        for left in _trees(i, k, N, P):
            for right in _trees(k + 1, j, N, P):
                yield from ([(i, j, a), *left, *right] for a in range(N))
