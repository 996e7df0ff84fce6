"""Attention over structures: segments of a sequence, or its dependency trees."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from structmax.estimators import Estimator, by_name
from structmax.structures.base import Structure
from structmax.structures.dependency_tree import DependencyTree
from structmax.structures.linear_chain import LinearChain

KINDS = ("chain", "projective", "nonprojective")


class StructuredAttention(nn.Module):
    """Attention whose weights are a structure z over the words x, by any estimator.

    - ``"chain"`` selects words, where neighbours matter: a chain of tags 0 and 1, and the context
      Σᵢ z[i, 1] xᵢ, ``(B, d)`` (segmentation attention; Kim, Denton, Hoang & Rush, "Structured
      attention networks", ICLR 2017). A word scores ⟨W q, W′ xᵢ⟩/√d + wᵀxᵢ with a query q.
    - ``"projective"``, ``"nonprojective"``: a dependency tree, and tanh(W″ [x, p, c]) for a word,
      ``(B, n, d)``, with p the word's head Σₕ z[h, i] xₕ, for the root a learned vector, and c the
      sum of its modifiers Σₘ z[i, m] xₘ (Liu & Lapata, "Learning structured text representations",
      TACL 2018, where z are marginals by the Matrix-Tree theorem; Kim et al. for projective trees).
      An arc scores ⟨W xₕ, W′ xₘ⟩/√d, the root's wᵀxₘ.

    Args:
        structure: ``"chain"``, ``"projective"`` or ``"nonprojective"``
        embed_dim: d, the features of a word
        estimator: an estimator of z or its name; ``"marginals"`` are the papers'. With S samples,
            outputs and weights are ``(S, B, ...)``.
        options: of an estimator given by name

    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(2, 4, 8)  # (B, n, d)
    >>> attention = StructuredAttention("nonprojective", 8)
    >>> output, weights = attention(x, lengths=torch.tensor([4, 3]), need_weights=True)
    >>> output.shape, weights.shape  # weights: [head, modifier], index 0 is the root
    (torch.Size([2, 4, 8]), torch.Size([2, 5, 5]))
    >>> weights[1].detach().sum(0).round(decimals=3)  # one head for each word, none in the padding
    tensor([0., 1., 1., 1., 0.])

    Whole trees instead of their mean; a selection of words for a query:

    >>> attention = StructuredAttention("nonprojective", 8, "straight-through")
    >>> attention(x, need_weights=True)[1].unique().tolist()
    [0.0, 1.0]
    >>> attention = StructuredAttention("chain", 8, "spigot", step=0.1)
    >>> attention(x, query=torch.randn(2, 8)).shape
    torch.Size([2, 8])
    """

    def __init__(
        self,
        structure: str,
        embed_dim: int,
        estimator: str | Estimator = "marginals",
        **options: Any,
    ) -> None:
        super().__init__()
        if structure not in KINDS:
            raise ValueError(
                f"StructuredAttention: structure must be one of {KINDS}, got {structure!r}."
            )
        if options and not isinstance(estimator, str):
            raise ValueError(
                f"StructuredAttention: {', '.join(options)} must be given to the estimator itself."
            )
        self.estimator = by_name(estimator, **options) if isinstance(estimator, str) else estimator
        if type(self.estimator).__call__ is Estimator.__call__:
            raise ValueError(
                f"StructuredAttention: {type(self.estimator).__name__} estimates a loss and has no "
                "z to attend with. Use .structure(x), and .loss of the estimator."
            )
        self.kind, self.embed_dim = structure, embed_dim
        self.head = nn.Linear(embed_dim, embed_dim)
        self.modifier = nn.Linear(embed_dim, embed_dim)
        self.root = nn.Linear(embed_dim, 1)
        if structure == "chain":
            self.transition = nn.Parameter(torch.zeros(2, 2))
        else:  # the last feature is the root's share, whose column is W″ times the learned vector
            self.combine = nn.Linear(3 * embed_dim + 1, embed_dim)
        with torch.device("cpu"):  # on the meta device there is nothing to ask a structure about
            zeros = torch.zeros(1, 3, 3)
            chain = structure == "chain"
            example = LinearChain(zeros, zeros[0]) if chain else self._tree(zeros, None)
        if not self.estimator.applies_to(example):
            raise ValueError(
                f"StructuredAttention: {type(self.estimator).__name__} does not apply to a "
                f"structure of kind {structure!r}."
            )

    def extra_repr(self) -> str:
        return f"{self.kind!r}, {self.embed_dim}, estimator={self.estimator!r}"

    def structure(
        self, x: Tensor, lengths: Tensor | None = None, query: Tensor | None = None
    ) -> Structure:
        """The structure over words x ``(B, n, d)``, for queries of one's own."""
        self._check(x, query)
        # NaN in the padding would reach the gradients of the layers
        return self._structure(self._inside(x, lengths)[0], lengths, query)

    def _inside(self, x: Tensor, lengths: Any) -> tuple[Tensor, Tensor | None]:
        """The words with 0 in the padding, and where there is none."""
        if lengths is None:
            return x, None
        lengths = torch.as_tensor(lengths, device=x.device)
        inside = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        return torch.where(inside[..., None], x, 0.0), inside

    def _structure(self, x: Tensor, lengths: Tensor | None, query: Tensor | None) -> Structure:
        modifier, alone = self.modifier(x), self.root(x).squeeze(-1)
        if self.kind == "chain":
            query = x.new_zeros(len(x), self.embed_dim) if query is None else query
            scores = (modifier @ self.head(query)[..., None]).squeeze(-1)
            scores = scores / math.sqrt(self.embed_dim) + alone
            unary = torch.stack([torch.zeros_like(scores), scores], -1)
            return LinearChain(unary, self.transition, lengths=lengths)
        arcs = self.head(x) @ modifier.transpose(-1, -2) / math.sqrt(self.embed_dim)
        scores = nn.functional.pad(torch.cat([alone[:, None], arcs], 1), (1, 0))
        return self._tree(scores, lengths)

    def _tree(self, scores: Tensor, lengths: Tensor | None) -> Structure:
        return DependencyTree(scores, lengths, projective=self.kind == "projective")  # type: ignore[abstract]

    def forward(
        self,
        x: Tensor,
        lengths: Tensor | None = None,
        query: Tensor | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The context ``(B, d)`` of a chain, or words ``(B, n, d)`` of a tree, 0 in the padding.

        Args:
            x: words ``(B, n, d)``; what stands past an item's length, NaN included, has no effect
            lengths: ``(B)``
            query: for chains, ``(B, d)``; a learned one unless given
            need_weights: whether to return the weights too: z[:, 1] of a chain, ``(B, n)``, or
                the tree ``(B, n+1, n+1)``
        """
        self._check(x, query)
        x, inside = self._inside(x, lengths)
        z = self.estimator(self._structure(x, lengths, query))
        if self.kind == "chain":
            weights = z[..., 1]
            output = (weights[..., None, :] @ x).squeeze(-2)
        else:
            weights, arcs = z, z[..., 1:, 1:]
            parts = arcs.transpose(-1, -2) @ x, arcs @ x, z[..., 0, 1:, None]
            words = x.expand(*arcs.shape[:-2], *x.shape[1:])
            output = self.combine(torch.cat([words, *parts], -1)).tanh()
            output = output if inside is None else torch.where(inside[..., None], output, 0.0)
        return (output, weights) if need_weights else output

    def _check(self, x: Tensor, query: Tensor | None) -> None:
        if x.dim() != 3 or x.shape[-1] != self.embed_dim:
            raise ValueError(
                f"StructuredAttention: x must be (B, n, {self.embed_dim}), got {tuple(x.shape)}."
            )
        if x.device.type == "meta":
            raise ValueError(
                "StructuredAttention: x is on the meta device, and a structure needs scores. Use "
                "to_empty(device=...) or load the weights, and an x with values."
            )
        if query is not None and (self.kind != "chain" or query.shape != (len(x), self.embed_dim)):
            raise ValueError(
                f'StructuredAttention: query is for "chain" and must be ({len(x)}, '
                f"{self.embed_dim}), got {tuple(query.shape)}."
            )
