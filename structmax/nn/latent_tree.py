"""Encoders whose tree is latent: scores of its parts, a structure, then a network along the tree.

A latent encoder has two verbs. ``structure`` gives the distribution over trees of a batch;
``compose`` runs the recursive network along given trees z, of which there may be several for an
item. Any estimator joins them: ``estimator.loss(structure, cost)`` with a cost that composes.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from structmax.data.trees import Trees
from structmax.nn.biaffine import Biaffine
from structmax.nn.chart_lstm import compose_chart
from structmax.nn.child_sum import ChildSumTreeLSTM
from structmax.nn.leaf_lstm import LeafLSTM
from structmax.nn.tree_lstm import TreeLSTM
from structmax.structures.binary_tree import BinaryTree
from structmax.structures.dependency_tree import DependencyTree


class LatentTree(nn.Module):
    """A binary tree chosen by scores of spans (Cocke-Kasami-Younger), encoded by a Tree-LSTM.

    Spans are scored by their ends in context: a bidirectional LSTM and a biaffine map. The parser
    thus sees the words around, while the composer only sees the leaves as they are.

    Args:
        hidden_size: d
        cell: as in :class:`structmax.nn.TreeLSTM`
        dropout: of the cell, while training

    >>> import structmax as sx
    >>> _ = torch.manual_seed(0)
    >>> encoder = LatentTree(8)
    >>> leaves, lengths = torch.randn(2, 4, encoder.state_size), torch.tensor([4, 3])
    >>> tree = encoder.structure(leaves, lengths)
    >>> encoder.compose(leaves, lengths, tree.argmax()).shape
    torch.Size([2, 16])

    Several trees for an item, and the mean tree:

    >>> best, items = tree.topk(2).structures, torch.tensor([0, 0, 1, 1])
    >>> encoder.compose(leaves[items], lengths[items], best.flatten(0, 1)).shape
    torch.Size([4, 16])
    >>> encoder.compose(leaves, lengths, tree.marginals(), relaxed=True).shape
    torch.Size([2, 16])
    """

    def __init__(
        self, hidden_size: int, cell: str | nn.Module = "tree-lstm", dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.encoder = TreeLSTM(hidden_size, cell, dropout)
        self.hidden_size, self.state_size = hidden_size, self.encoder.state_size
        self.context = LeafLSTM(self.state_size, hidden_size + hidden_size % 2)
        self.scorer = Biaffine(hidden_size + hidden_size % 2, hidden_size)

    def hidden(self, state: Tensor) -> Tensor:
        """The hidden vectors of states, ``(..., d)``."""
        return self.encoder.hidden(state)

    def structure(self, leaves: Tensor, lengths: Tensor) -> BinaryTree:
        """The distribution over trees of leaves ``(B, n, s)``."""
        return BinaryTree(self.scorer(self.context(leaves, lengths)), lengths, labelled=False)

    def compose(self, leaves: Tensor, lengths: Tensor, z: Tensor, relaxed: bool = False) -> Tensor:
        """The states ``(N, s)`` of leaves ``(N, n, s)`` along trees z ``(N, n, n)``.

        A gradient reaches the spans that are in the tree: a node's state is multiplied by its z,
        which is 1. With ``relaxed``, z is any point between trees, and so is the network: the span
        [i, j] mixes its splits k in proportion to z[i, k]·z[k+1, j], at O(n³) compositions; a
        gradient reaches all spans.
        """
        if relaxed:
            return compose_chart(self.encoder.cell, leaves, lengths, _mix(z))
        trees = Trees.from_spans(z, lengths)
        if not z.requires_grad:
            return self.encoder(leaves, trees)
        bounds = torch.from_numpy(trees.bounds).to(z.device)
        item = torch.arange(len(z), device=z.device)[:, None]
        start, end = bounds.clamp(min=0).unbind(-1)
        return self.encoder(leaves, trees, weights=z[item, start, end])


def _mix(z: Tensor) -> Any:
    """Weights of splits in proportion to the product of both sides.

    None where all products are below 1e-12: a span with a probability p has one of p²/n² at least,
    and the gradient of a ratio of less would overflow.
    """

    def weigh(width: int, candidates: Tensor) -> Tensor:
        i = torch.arange(candidates.shape[1], device=z.device)[:, None]
        k = i + torch.arange(width - 1, device=z.device)
        products = z[:, i, k] * z[:, k + 1, i + width - 1]
        total = products.sum(-1, keepdim=True)
        there = total > 1e-12
        return torch.where(there, products, 0.0) / torch.where(there, total, 1.0)

    return weigh


class LatentDependency(nn.Module):
    """A dependency tree chosen by biaffine scores of arcs, encoded along its arcs.

    Args:
        input_size: of the words
        hidden_size: d
        composer: ``"child-sum"``, a Tree-LSTM from the leaves up; or ``"gcn"``, layers in which
            each word hears from its head and its modifiers (Marcheggiani & Titov, EMNLP 2017),
            which also takes relaxed trees
        layers: of the graph network
        projective, root: as in :class:`structmax.DependencyTree`

    >>> import structmax as sx
    >>> _ = torch.manual_seed(0)
    >>> encoder = LatentDependency(4, 8, composer="gcn")
    >>> words, lengths = torch.randn(2, 3, 4), torch.tensor([3, 2])
    >>> tree = encoder.structure(words, lengths)
    >>> encoder.compose(words, lengths, tree.marginals(), relaxed=True).shape
    torch.Size([2, 8])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        composer: str = "child-sum",
        layers: int = 2,
        projective: bool = False,
        root: str = "single",
    ) -> None:
        super().__init__()
        if composer not in ("child-sum", "gcn"):
            raise ValueError(
                f'LatentDependency: composer must be "child-sum" or "gcn", got {composer!r}.'
            )
        self.hidden_size = self.state_size = hidden_size
        self.projective, self.root = projective, root
        self.context = LeafLSTM(input_size, hidden_size + hidden_size % 2)
        self.root_word = nn.Parameter(torch.zeros(hidden_size + hidden_size % 2))
        self.scorer = Biaffine(hidden_size + hidden_size % 2, hidden_size)
        self.encoder: ChildSumTreeLSTM | GraphConvolution
        if composer == "gcn":
            self.encoder = GraphConvolution(input_size, hidden_size, layers)
        else:
            self.encoder = ChildSumTreeLSTM(input_size, hidden_size)

    def hidden(self, state: Tensor) -> Tensor:
        """States are hidden vectors."""
        return state

    def structure(
        self, words: Tensor, lengths: Tensor, validate_args: bool | None = None
    ) -> DependencyTree:
        """The distribution over trees of words ``(B, n, input_size)``."""
        return DependencyTree(  # type: ignore[abstract]
            self.arcs(words, lengths),
            lengths,
            self.projective,
            self.root,
            labelled=False,
            validate_args=validate_args,
        )

    def arcs(self, words: Tensor, lengths: Tensor) -> Tensor:
        """The scores ``(B, n+1, n+1)`` of arcs ``[head, modifier]``."""
        context = self.context(words, lengths)
        return self.scorer(torch.cat([self.root_word.expand(len(words), 1, -1), context], 1))

    def compose(self, words: Tensor, lengths: Tensor, z: Tensor, relaxed: bool = False) -> Tensor:
        """The hidden vectors ``(N, d)`` of words ``(N, n, input_size)`` along z ``(N, n+1, n+1)``.

        Of a child-sum Tree-LSTM, a gradient reaches the arcs that are in the tree.
        """
        if isinstance(self.encoder, GraphConvolution):
            return self.encoder(words, z, lengths)
        if relaxed:
            raise ValueError(
                "LatentDependency: a child-sum Tree-LSTM needs trees, and this estimator gives "
                'means of trees. Use composer="gcn", or another estimator.'
            )
        heads = z[:, :, 1:].argmax(1)
        return self.encoder(words, heads, lengths, z[:, :, 1:].amax(1))


class GraphConvolution(nn.Module):
    """Layers in which each word hears from itself, its head and its modifiers.

    With A the arcs [head, modifier]: H ← relu(H W + Aᵀ H W_head + A H W_mod). The sentence is the
    mean of the words below the root symbol.

    >>> gcn = GraphConvolution(4, 8)
    >>> arcs = torch.zeros(1, 3, 3)
    >>> arcs[0, 0, 1] = arcs[0, 1, 2] = 1.0  # root → 1 → 2
    >>> gcn(torch.randn(1, 2, 4), arcs, torch.tensor([2])).shape
    torch.Size([1, 8])
    """

    def __init__(self, input_size: int, hidden_size: int, layers: int = 2) -> None:
        super().__init__()
        sizes = [input_size, *[hidden_size] * layers]
        self.layers = nn.ModuleList(nn.Linear(3 * a, b) for a, b in pairwise(sizes))

    def forward(self, words: Tensor, z: Tensor, lengths: Tensor) -> Tensor:
        """``(N, d)`` of words ``(N, n, input_size)`` and arcs z ``(N, n+1, n+1)``."""
        x, top = self.states(words, z[:, 1:, 1:], lengths), z[:, 0, 1:, None]
        return (top * x).sum(1) / top.sum(1)

    def states(self, words: Tensor, arcs: Tensor, lengths: Tensor) -> Tensor:
        """All words ``(N, n, d)`` of any graph: ``arcs`` ``(N, n, n)`` without the root symbol."""
        inside = torch.arange(words.shape[1], device=words.device) < lengths[:, None]
        x = torch.where(inside[..., None], words, 0.0)
        for layer in self.layers:
            x = torch.relu(layer(torch.cat([x, arcs.mT @ x, arcs @ x], -1)))
        return x
