"""Sentence classifiers that differ only in how they find their trees."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from structmax.data.trees import Trees
from structmax.estimators.top_k_expectation import k_best
from structmax.nn.chart_lstm import ChartLSTM
from structmax.nn.easy_first import EasyFirstTreeLSTM
from structmax.nn.latent_tree import LatentTree
from structmax.nn.leaf_lstm import LeafLSTM, SentenceLSTM
from structmax.nn.spinn import SPINN
from structmax.nn.tree_lstm import TreeLSTM
from structmax.structures.base import Structure
from structmax.structures.easy_first import EasyFirst
from structmax.structures.incremental import Incremental
from structmax.structures.shift_reduce import ShiftReduce

FIXED = ("gold", "balanced", "left", "right", "random")
LATENT = ("spinn", "easy-first", "cky")
ENCODERS = ("lstm", *FIXED, *LATENT, "chart")


class TreeClassifier(nn.Module):
    """Embeds tokens, encodes the sentence along a tree, and classifies its root.

    The encoders differ in the tree alone. Without one: ``"lstm"``. Along a given or simple one:
    ``"gold"``, ``"balanced"``, ``"left"``, ``"right"``, ``"random"``. Along a latent one, trained
    by any estimator: ``"spinn"`` (:class:`structmax.ShiftReduce`), ``"easy-first"``
    (:class:`structmax.EasyFirst`), ``"cky"`` (:class:`structmax.BinaryTree`). Along all at once:
    ``"chart"``.

    Leaves are the bare embeddings of their tokens, so a composer cannot make up for a wrong tree by
    what it sees of the context; ``leaf_lstm=True`` lets it.

    Args:
        vocabulary, classes: how many there are
        encoder: one of the above
        hidden_size: d
        cell: ``"gated"`` or ``"tree-lstm"``
        leaf_lstm: whether leaves see their context
        tracking: whether SPINN's parser remembers
        dropout: of the cell and of the classifier

    >>> import structmax as sx
    >>> from structmax.data import listops, collate
    >>> _ = torch.manual_seed(0)
    >>> batch = collate([listops.parse("[MAX 2 9 ]"), listops.parse("[SM [MIN 3 4 ] 8 ]")])
    >>> model = TreeClassifier(len(listops.VOCABULARY), 10, "easy-first", hidden_size=16)
    >>> model(batch.tokens, batch.lengths).shape  # logits along the model's own trees
    torch.Size([2, 10])
    >>> model(batch.tokens, batch.lengths, trees=batch.trees).shape  # along these
    torch.Size([2, 10])

    The loss of each item, its gradient by an estimator:

    >>> from structmax.estimators.top_k_expectation import TopKExpectation
    >>> losses = model(*batch[:3], estimator=TopKExpectation(k=3))
    >>> losses.shape
    torch.Size([2])
    >>> losses.mean().backward()
    >>> model.parse(batch.tokens, batch.lengths).f1(batch.trees).shape
    torch.Size([2])
    """

    def __init__(
        self,
        vocabulary: int,
        classes: int,
        encoder: str = "easy-first",
        hidden_size: int = 128,
        cell: str = "gated",
        leaf_lstm: bool = False,
        tracking: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if encoder not in ENCODERS:
            near = difflib.get_close_matches(encoder, ENCODERS, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"TreeClassifier: encoder must be one of {', '.join(ENCODERS)}, got "
                f"{encoder!r}.{hint}"
            )
        self.kind = encoder
        make: dict[str, Callable[[], Any]] = {
            "lstm": lambda: SentenceLSTM(hidden_size, hidden_size),
            "spinn": lambda: SPINN(hidden_size, cell, tracking, dropout),
            "easy-first": lambda: EasyFirstTreeLSTM(hidden_size, cell, dropout),
            "cky": lambda: LatentTree(hidden_size, cell, dropout),
            "chart": lambda: ChartLSTM(hidden_size, cell, dropout=dropout),
        }
        self.encoder = make.get(encoder, lambda: TreeLSTM(hidden_size, cell, dropout))()
        size = getattr(self.encoder, "state_size", hidden_size)
        self.embedding = nn.Embedding(vocabulary, size)
        self.leaves = LeafLSTM(size, size) if leaf_lstm else None
        self.head = nn.Sequential(
            nn.Linear(hidden_size, hidden_size),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(hidden_size, classes),
        )

    @property
    def is_latent(self) -> bool:
        """Whether the tree is a random variable, to be trained by an estimator."""
        return self.kind in LATENT

    def parser_parameters(self) -> list[nn.Parameter]:
        """Those that only serve to choose a tree; all others compose."""
        names = ("scorer.", "context.", "tracker.", "query")
        named = self.encoder.named_parameters() if self.kind != "lstm" else ()
        return [p for name, p in named if name.startswith(names)]

    def composer_parameters(self) -> list[nn.Parameter]:
        """Those that make and read the vectors."""
        parser = {id(p) for p in self.parser_parameters()}
        return [p for p in self.parameters() if id(p) not in parser]

    # -- what it answers --------------------------------------------------------------------------

    def forward(
        self,
        tokens: Tensor,
        lengths: Tensor,
        labels: Tensor | None = None,
        trees: Trees | str | None = None,
        estimator: Any = None,
        beam: int = 1,
    ) -> Tensor:
        """Logits ``(B, classes)``; given labels ``(B)``, the loss of each item ``(B)``.

        Args:
            tokens: ``(B, n)``
            lengths: ``(B)``
            trees: compose along these, or along ``"balanced"``, ``"left"``, ``"right"`` or
                ``"random"`` ones, whatever the encoder
            estimator: how a latent tree is trained; without it the model's own best tree is used,
                and the parser gets no gradient
            beam: of a latent tree without an estimator: log of the class probabilities averaged
                over so many of the best trees, in proportion to their probabilities. The loss is
                then −log Σ p(z) p(label | z) over them, the marginal likelihood, truncated
        """
        leaves = self._leaves(tokens, lengths)
        if not self.is_latent or trees is not None or (estimator is None and beam == 1):
            logits = self._logits(self._encode(leaves, lengths, trees))
            return logits if labels is None else self._loss(logits, labels)
        structure = self._structure(leaves, lengths)
        relaxed = estimator is not None and estimator.objective == "L(E[z])"

        def classify(z: Tensor, items: Tensor) -> Tensor:
            self._check_items(items)
            if isinstance(structure, Incremental):
                return self._logits(self.encoder.root(structure.rollout(z, items).state))
            return self._logits(self.encoder.compose(leaves[items], lengths[items], z, relaxed))

        if estimator is None:
            logits = self._average(structure, k_best(structure, beam, distinct=True), classify)
            return logits if labels is None else self._loss(logits, labels)
        if labels is None:
            z = estimator(structure)
            if z.dim() > 1 + len(structure.event_shape):
                raise ValueError(
                    f"TreeClassifier: without labels there must be one tree for each of the "
                    f"{len(tokens)} items, got z {tuple(z.shape)}. Use an estimator of one sample."
                )
            return classify(z, torch.arange(len(tokens), device=tokens.device))
        return estimator.loss(
            structure, lambda z, items: self._loss(classify(z, items), labels[items])
        )

    def structure(self, tokens: Tensor, lengths: Tensor) -> Structure:
        """The distribution over latent trees."""
        if not self.is_latent:
            raise ValueError(f"TreeClassifier: the encoder {self.kind!r} has no latent tree.")
        return self._structure(self._leaves(tokens, lengths), lengths)

    @torch.no_grad()
    def parse(self, tokens: Tensor, lengths: Tensor, trees: Trees | str | None = None) -> Trees:
        """The trees along which the model composes."""
        if self.kind == "lstm":
            raise ValueError("TreeClassifier: the encoder 'lstm' has no trees.")
        return self._trees(self._leaves(tokens, lengths), lengths, trees)

    def supervise(self, tokens: Tensor, lengths: Tensor, trees: Trees) -> Tensor:
        """The parser's cross-entropy at given trees, for each item and step, ``(B)``.

        Of an easy-first parser, that of one of the orders that make the tree.
        """
        structure = self.structure(tokens, lengths)
        forms = {"spinn": trees.transitions, "easy-first": trees.merges, "cky": trees.spans}
        z = forms[self.kind]().to(tokens.device)
        return -structure.log_prob(z) / (lengths - 1).clamp(min=1)

    # -- how --------------------------------------------------------------------------------------

    def _leaves(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        leaves = self.embedding(tokens)
        return leaves if self.leaves is None else self.leaves(leaves, lengths)

    def _structure(self, leaves: Tensor, lengths: Tensor) -> Structure:
        if self.kind == "cky":
            return self.encoder.structure(leaves, lengths)
        return (ShiftReduce if self.kind == "spinn" else EasyFirst)(self.encoder, leaves, lengths)

    def _encode(self, leaves: Tensor, lengths: Tensor, trees: Trees | str | None) -> Tensor:
        """States of whole sentences along one tree each, or without any."""
        if self.kind == "lstm" and trees is not None:
            raise ValueError("TreeClassifier: the encoder 'lstm' has no trees.")
        if trees is None and self.kind in ("lstm", "chart"):
            return self.encoder(leaves, lengths)
        cell = self.encoder.encoder.cell if self.kind == "cky" else self.encoder.cell
        return TreeLSTM(cell.hidden_size, cell)(leaves, self._trees(leaves, lengths, trees))

    @torch._disable_dynamo  # trees are built on the host
    @torch.no_grad()
    def _trees(self, leaves: Tensor, lengths: Tensor, trees: Trees | str | None) -> Trees:
        if isinstance(trees, Trees):
            return trees
        kind = self.kind if trees is None else trees
        if kind in ("balanced", "left", "right"):
            return getattr(Trees, kind)(lengths)
        if kind == "random":
            return Trees.random(lengths, int(torch.randint(1 << 31, ())))
        if kind == "gold":
            raise ValueError("TreeClassifier: gold trees must be given, as trees=.")
        if trees is not None:
            raise ValueError(f"TreeClassifier: unknown trees {trees!r}.")
        if kind == "chart":
            return Trees.from_spans(self.encoder.parse(leaves, lengths), lengths)
        structure = self._structure(leaves, lengths)
        if not isinstance(structure, Incremental):
            return Trees.from_spans(structure.argmax(), lengths)
        read = Trees.from_transitions if self.kind == "spinn" else Trees.from_merges
        return read(structure.greedy().z, lengths)

    def _check_items(self, items: Tensor) -> None:
        """Whether the sentences ``(N)`` that trees are given for can be classified together."""

    def _logits(self, states: Tensor) -> Tensor:
        return self.head(states if self.kind == "lstm" else self.encoder.hidden(states))

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, labels, reduction="none")

    def _average(self, structure: Structure, best: Any, classify: Callable[..., Tensor]) -> Tensor:
        (b, k), parts = best.scores.shape, structure.event_shape
        items = torch.arange(b, device=best.scores.device).repeat_interleave(k)
        there = best.exists.reshape(b, k, *[1] * len(parts))
        trees = torch.where(there, best.structures, best.structures[:, :1])  # what has no weight
        each = classify(trees.reshape(b * k, *parts), items).log_softmax(-1)
        weights = torch.where(best.exists, best.scores, -torch.inf).log_softmax(1)
        return (weights[..., None] + each.view(b, k, -1)).logsumexp(1)
