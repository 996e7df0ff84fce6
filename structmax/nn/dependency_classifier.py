"""A sentence classifier along dependency trees: latent, given, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from structmax import checks
from structmax.estimators import SparseExpectation
from structmax.nn.child_sum import ChildSumTreeLSTM, dependency_levels
from structmax.nn.latent_tree import GraphConvolution, LatentDependency
from structmax.nn.leaf_lstm import LeafLSTM, zero_padding
from structmax.sparse.result import SparseMAPResult
from structmax.structures.base import Structure
from structmax.structures.dependency_tree import DependencyTree
from structmax.structures.ksubset import KSubset

KINDS = ("latent", "graph", "given", "none")


class DependencyClassifier(nn.Module):
    """Embeds words, encodes the sentence along a dependency tree, and classifies it.

    - ``"latent"``: the tree is chosen by scores of arcs, trained by any estimator, and a
      :class:`LatentDependency` encodes along it (Niculae, Martins & Cardie, "Towards dynamic
      computation graphs via sparse latent structure", EMNLP 2018).
    - ``"graph"``: any number of heads for each word, so a graph that need not be a tree; each
      word's heads are a ``KSubset(k=(0, n))``, and the sentence is the mean of the words of a graph
      network (a latent semantic graph, as in Peng, Thomson & Smith, ACL 2018). Estimators must give
      a z.
    - ``"given"``: along the heads given, with the same networks.
    - ``"none"``: the maximum over the states of a bidirectional LSTM.

    Args:
        vocabulary, classes: how many there are; word 0 is padding
        kind: one of the above
        composer: ``"child-sum"`` or ``"gcn"``, as in :class:`LatentDependency`; graphs need
            ``"gcn"``. The sentence is the state of the root, or the mean of a graph network's words
        input_size: of the word vectors
        hidden_size: d
        context: whether the composer sees words in their context, by a bidirectional LSTM
        projective: whether latent trees are
        dropout: of word vectors and of the sentence
        layers: of the graph network

    >>> import structmax as sx
    >>> _ = torch.manual_seed(0)
    >>> model = DependencyClassifier(10, 2, input_size=6, hidden_size=8)
    >>> words, lengths = torch.tensor([[3, 4, 5], [6, 7, 0]]), torch.tensor([3, 2])
    >>> model(words, lengths).shape  # logarithms of probabilities, along the best trees
    torch.Size([2, 2])
    >>> model(words, lengths, estimator=sx.estimators.SparseExpectation()).exp().shape
    torch.Size([2, 2])

    The loss of each sentence, its gradient by an estimator:

    >>> labels = torch.tensor([0, 1])
    >>> model(words, lengths, labels, estimator=sx.estimators.PerturbAndMAP()).mean().backward()

    Along given heads, 0 for the root symbol:

    >>> model(words, lengths, heads=torch.tensor([[2, 0, 2], [0, 1, 0]])).shape
    torch.Size([2, 2])
    """

    def __init__(
        self,
        vocabulary: int,
        classes: int,
        kind: str = "latent",
        composer: str = "child-sum",
        input_size: int = 100,
        hidden_size: int = 150,
        context: bool = False,
        projective: bool = False,
        dropout: float = 0.0,
        layers: int = 2,
    ) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"DependencyClassifier: kind must be one of {KINDS}, got {kind!r}.")
        if kind == "graph" and composer != "gcn":
            raise ValueError(
                'DependencyClassifier: a graph has no leaves to start from. Use composer="gcn".'
            )
        self.kind, even = kind, hidden_size + hidden_size % 2
        self.embedding = nn.Embedding(vocabulary, input_size, padding_idx=0)
        nn.init.uniform_(self.embedding.weight.data[1:], -0.1, 0.1)
        self.context = LeafLSTM(input_size, even) if context or kind == "none" else None
        size = even if self.context is not None else input_size
        if kind != "none":
            self.encoder = LatentDependency(size, even, composer, layers, projective)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(even, classes)

    def parser_parameters(self) -> list[nn.Parameter]:
        """Those that only serve to choose a tree."""
        if self.kind not in ("latent", "graph"):
            return []
        names = ("scorer.", "context.", "root_word")
        return [p for name, p in self.encoder.named_parameters() if name.startswith(names)]

    def forward(
        self,
        words: Tensor,
        lengths: Tensor,
        labels: Tensor | None = None,
        heads: Tensor | None = None,
        estimator: Any = None,
    ) -> Tensor:
        """Logarithms of probabilities ``(B, classes)``; given labels, the loss of each item.

        Args:
            words: ``(B, n)``
            lengths, labels: ``(B)``
            heads: ``(B, n)``, compose along these, whatever the kind
            estimator: how a latent tree is trained; without labels, how its model predicts: by the
                mean tree if it was trained so, by SparseMAP's few trees, or else by the best tree
        """
        inputs = self._inputs(words, lengths)
        if self.kind == "none":
            inside = torch.arange(words.shape[1], device=words.device) < lengths[:, None]
            least = torch.finfo(inputs.dtype).min  # dropout makes states less than −1
            return self._answer(torch.where(inside[..., None], inputs, least).amax(1), labels)
        if heads is not None:
            return self._answer(self._along_heads(inputs, lengths, heads), labels)
        structure = self._structure(inputs, lengths, estimator)
        relaxed = estimator is not None and estimator.objective == "L(E[z])"

        def classify(z: Tensor, items: Tensor) -> Tensor:
            self._check_items(items)
            i, home = items.to(inputs.device), z.device
            states = self._along(inputs[i], lengths[i], z.to(inputs.device), relaxed)
            return self._answer(states, labels if labels is None else labels[i]).to(home)

        if labels is not None and estimator is not None and self.kind != "graph":
            return estimator.loss(structure, classify).to(words.device)
        if isinstance(estimator, SparseExpectation) and self.kind != "graph":
            return self._mixture(structure.sparsemap(**estimator.options), classify).to(
                words.device
            )
        if labels is not None and estimator is not None:
            z = estimator(structure)
        else:
            z = structure.marginals() if relaxed else structure.argmax()
        return classify(z, torch.arange(len(words))).to(words.device)

    def structure(self, words: Tensor, lengths: Tensor, estimator: Any = None) -> Structure:
        """The distribution over latent trees, or over the heads of each word of a graph.

        It is on the device where the estimator's queries are fast.
        """
        return self._structure(self._inputs(words, lengths), lengths, estimator)

    def arcs(self, words: Tensor, lengths: Tensor) -> Tensor:
        """The scores ``(B, n+1, n+1)`` of arcs [head, modifier], 0 the root symbol."""
        return self.encoder.arcs(self._inputs(words, lengths), lengths)

    @torch.no_grad()
    def parse(self, words: Tensor, lengths: Tensor) -> Tensor:
        """The heads ``(B, n)`` of the best latent trees."""
        return self.structure(words, lengths).argmax()[:, :, 1:].argmax(1)

    # -- how --------------------------------------------------------------------------------------

    def _inputs(self, words: Tensor, lengths: Tensor) -> Tensor:
        inputs = self.dropout(self.embedding(words))
        return inputs if self.context is None else self.dropout(self.context(inputs, lengths))

    def _structure(self, inputs: Tensor, lengths: Tensor, estimator: Any = None) -> Structure:
        if self.kind == "given":
            raise ValueError("DependencyClassifier: trees must be given, as heads=.")
        scores = self.encoder.arcs(inputs, lengths)
        if estimator is not None and "sparsemap" in estimator.needs:
            scores, lengths = scores.cpu(), lengths.cpu()  # where its solver is compiled
        if self.kind == "latent":
            return DependencyTree(  # type: ignore[abstract]
                scores, lengths, self.encoder.projective, labelled=False, validate_args=False
            )
        n = scores.shape[-1] - 1
        inside = torch.arange(n, device=scores.device) < lengths[:, None]
        used = (
            inside[:, None]
            & inside[:, :, None]
            & ~torch.eye(n, dtype=torch.bool, device=scores.device)
        )
        heads = torch.where(used, scores[:, 1:, 1:].mT, -torch.inf)  # [modifier, head]
        return KSubset(heads, (0, n), validate_args=False)

    def _along(self, inputs: Tensor, lengths: Tensor, z: Tensor, relaxed: bool = False) -> Tensor:
        """The sentences ``(N, d)`` of words ``(N, n, ·)`` along z."""
        network = self.encoder.encoder
        if isinstance(network, GraphConvolution):
            arcs = z.mT if z.shape[-1] == inputs.shape[1] else z[:, 1:, 1:]  # without the root
            states = zero_padding(network.states(inputs, arcs, lengths), lengths)
            return states.sum(1) / lengths[:, None]
        roots = z[:, 0].sum(-1, keepdim=True)  # more than one only where heads are given
        return self.encoder.compose(inputs, lengths, z, relaxed) / roots

    def _check_items(self, items: Tensor) -> None:
        """Whether the sentences ``(N)`` that trees are given for can be classified together."""

    def _mixture(self, found: SparseMAPResult, classify: Callable[..., Tensor]) -> Tensor:
        """What the classifier says along each tree, by the trees' probabilities."""
        item, slot = (found.probs > 0).nonzero(as_tuple=True)
        each = classify(found.structures[item, slot], item).exp()
        weighted = each * found.probs[item, slot, None].to(each.dtype)
        return each.new_zeros(len(found.probs), each.shape[-1]).index_add(0, item, weighted).log()

    def _along_heads(self, inputs: Tensor, lengths: Tensor, heads: Tensor) -> Tensor:
        """The sentences ``(B, d)`` along heads ``(B, n)``."""
        network = self.encoder.encoder
        at = torch.arange(heads.shape[1] + 1, device=heads.device)
        inside = at[1:] <= lengths[:, None]
        if isinstance(network, ChildSumTreeLSTM):  # which looks at the heads
            roots = ((heads == 0) & inside).sum(1, keepdim=True)
            return network(inputs, heads, lengths) / roots
        if heads.device.type == "cpu" and checks.can_look():  # elsewhere it makes a device wait
            dependency_levels("DependencyClassifier", heads, lengths)
        z = (heads[:, None, :] == at[:, None]) & inside[:, None]
        return self._along(inputs, lengths, nn.functional.pad(z, (1, 0)).to(inputs.dtype))

    def _logits(self, states: Tensor) -> Tensor:
        return self.head(self.dropout(states))

    def _answer(self, states: Tensor, labels: Tensor | None) -> Tensor:
        logits = self._logits(states)
        if labels is None:
            return logits.log_softmax(-1)
        return nn.functional.cross_entropy(logits, labels, reduction="none")
