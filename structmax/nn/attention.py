"""Multi-head attention with any map in the place of softmax."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from structmax.nn.dot_product import attend, check_map, check_mask


class Attention(nn.Module):
    """Multi-head attention whose weights come from any map of scores to probabilities.

    With ``map="softmax"`` it computes what ``torch.nn.MultiheadAttention`` does. The others have
    exact zeros (sparsemax, entmax, normmax), equal weights on runs or clusters of keys (fusedmax,
    oscarmax), a budget (budgetmax: the weights sum to k), or bounds on each key (csoftmax,
    csparsemax).

    Args:
        embed_dim: the features of queries and of the output
        num_heads: must divide ``embed_dim``
        map: one of the names of :func:`attend`
        kdim, vdim: the features of keys and of values, ``embed_dim`` unless given
        dropout: the probability of dropping a weight while training
        bias: whether projections have one
        batch_first: tensors are ``(B, n, features)``; otherwise ``(n, B, features)``
        learn_alpha: for entmax, one learned α for each head. α = 1 + sigmoid(a) stays in (1, 2),
            between softmax and sparsemax, and starts at ``alpha`` (Correia, Niculae & Martins,
            "Adaptively sparse transformers", EMNLP 2019).
        map_options: the map's numbers: ``alpha``, ``k``, ``strength``, ``upper``, ``lower``

    >>> _ = torch.manual_seed(0)
    >>> attention = Attention(8, num_heads=2, map="sparsemax")
    >>> x = torch.randn(1, 4, 8)  # (B, n, features)
    >>> attention(x).shape
    torch.Size([1, 4, 8])

    The weights, without the last key:

    >>> output, weights = attention(x, mask=torch.tensor([[1, 1, 1, 0]]).bool(), need_weights=True)
    >>> weights.shape, weights[..., 3].any().item()  # (B, heads, n, m)
    (torch.Size([1, 2, 4, 4]), False)

    How sparse a head is, it may learn:

    >>> attention = Attention(8, 2, map="entmax", learn_alpha=True)
    >>> attention.alpha
    tensor([1.5000, 1.5000], grad_fn=...)

    Keys that may take at most so much from each query:

    >>> attention = Attention(8, 2, map="csparsemax")
    >>> upper = torch.tensor([[0.4, 0.4, 0.4, 0.1]])
    >>> attention(x, upper=upper, need_weights=True)[1].amax((1, 2))
    tensor([[0.4000, 0.4000, 0.4000, 0.1000]], grad_fn=...)
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        map: str = "softmax",
        kdim: int | None = None,
        vdim: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        batch_first: bool = True,
        learn_alpha: bool = False,
        **map_options: float,
    ) -> None:
        super().__init__()
        check_map("Attention", map, map_options, later=("upper",))
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(
                f"Attention: num_heads must divide embed_dim, got {num_heads} heads and "
                f"{embed_dim} features."
            )
        if not 0 <= dropout < 1:
            raise ValueError(f"Attention: dropout must be in [0, 1), got {dropout}.")
        if learn_alpha and (map != "entmax" or not 1 < map_options.get("alpha", 1.5) < 2):
            raise ValueError(
                'Attention: learn_alpha needs map="entmax" and a start with 1 < alpha < 2, got '
                f'map="{map}" and alpha = {map_options.get("alpha")}.'
            )
        self.embed_dim, self.num_heads, self.map = embed_dim, num_heads, map
        self.dropout, self.batch_first, self.map_options = dropout, batch_first, map_options
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias)
        self.k_proj = nn.Linear(self.kdim, embed_dim, bias)
        self.v_proj = nn.Linear(self.vdim, embed_dim, bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias)
        self.alpha_logit = nn.Parameter(torch.empty(num_heads)) if learn_alpha else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws projections by Xavier's rule, sets their biases to 0 and α to where it starts."""
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        if self.alpha_logit is not None:
            start = self.map_options.get("alpha", 1.5)
            nn.init.constant_(self.alpha_logit, math.log((start - 1) / (2 - start)))

    def extra_repr(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.map_options.items())
        learned = ", learn_alpha=True" if self.alpha_logit is not None else ""
        return f"{self.embed_dim}, num_heads={self.num_heads}, map={self.map!r}{options}{learned}"

    @property
    def alpha(self) -> Tensor | None:
        """The learned α of each head, ``(heads)``, if there are any."""
        if self.alpha_logit is None:
            return None
        logit = self.alpha_logit
        return 1 + (logit if logit.dtype.itemsize >= 4 else logit.float()).sigmoid()

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        causal: bool = False,
        need_weights: bool = False,
        upper: Tensor | float | None = None,
        lower: Tensor | float | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The output, shaped as ``query``; with ``need_weights`` also weights ``(B, heads, n, m)``.

        Args:
            query: ``(B, n, embed_dim)``
            key: ``(B, m, kdim)``; the query unless given (self-attention)
            value: ``(B, m, vdim)``; the key unless given
            mask: True at what to keep: ``(B, m)`` for keys, whose content, NaN included, then has
                no effect where it is False, or four dimensions that broadcast to
                ``(B, heads, n, m)``. A query without any key has weights of zero, and its output is
                the bias of ``out_proj``.
            bias: added to the scores, shaped as ``mask``
            causal: query i sees the keys up to the i-th
            need_weights: whether to return the weights, as they are before dropout
            upper, lower: for csoftmax and csparsemax: bounds on the weights, numbers or shaped as
                ``mask``
        """
        alone = key is None or key is query
        key = query if key is None else key
        value = key if value is None else value
        if not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        self._check(query, key, value)
        if mask is not None:
            check_mask("Attention", mask)
            if mask.dim() == 2:  # 0 · NaN is NaN, so a weight of zero is not enough
                kept = _per_key("mask", mask, key)[:, 0, 0, :, None]  # (B, m, 1)
                key, value = torch.where(kept, key, 0.0), torch.where(kept, value, 0.0)
                query = key if alone else query
        options: dict[str, Any] = dict(self.map_options)
        for name, bound in (("upper", upper), ("lower", lower)):
            if bound is not None:
                options[name] = _per_key(name, bound, key) if isinstance(bound, Tensor) else bound
        alpha = self.alpha
        if alpha is not None:
            options["alpha"] = alpha[:, None, None]
        output, weights = attend(
            self._heads(self.q_proj(query)),
            self._heads(self.k_proj(key)),
            self._heads(self.v_proj(value)),
            self.map,
            mask=None if mask is None else _per_key("mask", mask, key),
            bias=None if bias is None else _per_key("bias", bias, key),
            causal=causal,
            dropout=self.dropout if self.training else 0.0,
            **options,
        )
        output = self.out_proj(output.transpose(1, 2).flatten(2))
        output = output if self.batch_first else output.transpose(0, 1)
        return (output, weights) if need_weights else output

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, heads, n, d)

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        layout = "(B, length, {})" if self.batch_first else "(length, B, {})"
        for name, tensor, size in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            if tensor.dim() != 3 or tensor.shape[-1] != size:
                shape = tensor.shape if self.batch_first else tensor.transpose(0, 1).shape
                raise ValueError(
                    f"Attention: {name} must be {layout.format(size)}, got {tuple(shape)}."
                )
        if key.shape[:2] != value.shape[:2] or key.shape[0] != query.shape[0]:
            given = ", ".join(
                f"{name} has B = {t.shape[0]}, length = {t.shape[1]}"
                for name, t in (("query", query), ("key", key), ("value", value))
            )
            raise ValueError(
                "Attention: query, key and value must agree in B, and key and value in length: "
                f"{given}. batch_first is {self.batch_first}."
            )


def _per_key(name: str, tensor: Tensor, key: Tensor) -> Tensor:
    """``(B, m)`` as ``(B, 1, 1, m)``; four dimensions as they are."""
    if tensor.dim() == 4:
        return tensor
    if tensor.shape != key.shape[:2]:
        raise ValueError(
            f"Attention: {name} must be (B, m) = {tuple(key.shape[:2])}, or have four dimensions "
            f"that broadcast to (B, heads, n, m), got {tuple(tensor.shape)}. For the same (n, m) "
            f"in every item and head use {name}[None, None], for (B, n, m) use {name}[:, None]."
        )
    return tensor[:, None, None, :]
