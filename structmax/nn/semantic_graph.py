"""A graph of words, predicted with the help of a tree."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from structmax import checks
from structmax.nn.biaffine import Biaffine
from structmax.nn.leaf_lstm import LeafLSTM
from structmax.structures.dependency_tree import DependencyTree

SYNTAX = ("latent", "pipeline", "multi-task", "given", "none")


class Predicted(NamedTuple):
    """Scores ``(B, n+1, n+1)`` of the graph's arcs [head, modifier], and the tree if there is one.

    An arc is in the graph if its score is above 0: each word's heads are the best subset.
    """

    scores: Tensor
    tree: DependencyTree | None


class SemanticGraph(nn.Module):
    """Scores the arcs of a graph, in which a word may have any number of heads, from words and
    their heads in a tree.

    Peng, Thomson & Smith, "Backpropagating through structured argmax using a SPIGOT", ACL 2018: a
    parser chooses a tree; each word is joined with its head there, and a biaffine form scores arcs
    of the graph. ``syntax`` says what becomes of the tree:

    - ``"latent"``: an estimator lets gradients of the graph's loss through it to the parser;
    - ``"pipeline"``: the best tree, without a gradient;
    - ``"multi-task"``: the words are joined with the parser's states instead of their heads;
    - ``"given"``: the heads are those given;
    - ``"none"``: nothing is joined.

    Args:
        vocabulary: how many words there are; word 0 is padding
        syntax: one of the above
        input_size, hidden_size: of word vectors and of states; the latter an even number
        dropout: of word vectors and states

    >>> import structmax as sx
    >>> _ = torch.manual_seed(0)
    >>> model = SemanticGraph(9, "latent", 6, 8)
    >>> words, lengths = torch.tensor([[3, 4, 5], [6, 7, 0]]), torch.tensor([3, 2])
    >>> found = model(words, lengths, sx.estimators.StraightThrough())
    >>> found.scores.shape, found.tree.batch_shape
    (torch.Size([2, 4, 4]), torch.Size([2]))
    """

    def __init__(
        self,
        vocabulary: int,
        syntax: str = "latent",
        input_size: int = 100,
        hidden_size: int = 200,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if syntax not in SYNTAX:
            raise ValueError(f"SemanticGraph: syntax must be one of {SYNTAX}, got {syntax!r}.")
        self.syntax, self.has_parser = syntax, syntax not in ("given", "none")
        self.embedding = nn.Embedding(vocabulary, input_size, padding_idx=0)
        self.context = LeafLSTM(input_size, hidden_size)
        if self.has_parser:
            self.parser_words = nn.Embedding(vocabulary, input_size, padding_idx=0)
            self.parser_context = LeafLSTM(input_size, hidden_size)
            self.parser_root = nn.Parameter(torch.zeros(1, 1, hidden_size))
            self.parser_scorer = Biaffine(hidden_size, hidden_size)
        self.root = nn.Parameter(torch.zeros(1, 1, hidden_size))
        joined = hidden_size if syntax == "none" else 2 * hidden_size
        self.join = nn.Sequential(nn.Linear(joined, hidden_size), nn.ReLU())
        self.scorer = Biaffine(hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def parser_parameters(self) -> list[nn.Parameter]:
        """Those that only serve to choose a tree."""
        if self.syntax == "multi-task":
            return []
        return [p for name, p in self.named_parameters() if name.startswith("parser_")]

    def forward(
        self, words: Tensor, lengths: Tensor, estimator: Any = None, heads: Tensor | None = None
    ) -> Predicted:
        """What is predicted of words ``(B, n)``.

        Args:
            estimator: of a latent tree; without it, the best tree
            heads: ``(B, n)``, the tree that is given
        """
        states = self.dropout(self.context(self.dropout(self.embedding(words)), lengths))
        x = self._with_root(self.root, states)
        parsed, tree = self._parse(words, lengths) if self.has_parser else (x, None)
        if self.syntax == "multi-task":
            x = torch.cat([x, parsed], -1)
        elif self.syntax != "none":
            x = torch.cat([x, self._z(x, lengths, tree, estimator, heads).mT @ x], -1)
        return Predicted(self.scorer(self.dropout(self.join(x))), tree)

    def tree(self, words: Tensor, lengths: Tensor) -> DependencyTree:
        """The distribution over trees."""
        return self._parse(words, lengths)[1]

    def _z(
        self,
        x: Tensor,
        lengths: Tensor,
        tree: DependencyTree | None,
        estimator: Any,
        heads: Tensor | None,
    ) -> Tensor:
        if tree is not None and estimator is not None and self.syntax == "latent":
            if "sparsemap" in estimator.needs:  # whose solver is compiled for the CPU
                host = DependencyTree(  # type: ignore[abstract]
                    tree.scores.cpu(), lengths.cpu(), labelled=False, validate_args=False
                )
                return estimator(host).to(x.device)
            return estimator(tree)
        if tree is not None:
            return tree.argmax()
        if heads is None:
            raise ValueError("SemanticGraph: the tree must be given, as heads=.")
        at = torch.arange(x.shape[1], device=x.device)
        inside = at[1:] <= lengths[:, None]
        _refuse_other_heads(heads, lengths, inside)
        z = (heads[:, None] == at[:, None]) & inside[:, None]
        return nn.functional.pad(z, (1, 0)).to(x.dtype)

    def _parse(self, words: Tensor, lengths: Tensor) -> tuple[Tensor, DependencyTree]:
        states = self.parser_context(self.dropout(self.parser_words(words)), lengths)
        states = self._with_root(self.parser_root, self.dropout(states))
        scores = self.parser_scorer(states)
        return states, DependencyTree(scores, lengths, labelled=False, validate_args=False)  # type: ignore[abstract]

    def _with_root(self, root: Tensor, states: Tensor) -> Tensor:
        return torch.cat([root.expand(len(states), 1, -1), states], 1)


def _refuse_other_heads(heads: Tensor, lengths: Tensor, inside: Tensor) -> None:
    """Heads ``(B, n)`` are words of their sentence or its root; the padding may hold anything."""
    if heads.shape != inside.shape:
        raise ValueError(
            f"SemanticGraph: heads must be {tuple(inside.shape)}, got {tuple(heads.shape)}."
        )
    wrong = ((heads < 0) | (heads > lengths[:, None])) & inside
    if checks.can_look() and bool(wrong.any()):
        i, m = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"SemanticGraph: a head must be between 0 and {int(lengths[i])}, got "
            f"{int(heads[i, m])} for word {m + 1} of item {i}. Words count from 1, and 0 is the "
            "root."
        )
