"""The maps as attention of Hugging Face transformers, 5.0 or newer: ``structmax[hf]``.

``register`` returns the name that a model takes::

    from structmax.nn import hf

    name = hf.register("entmax", alpha=1.3)  # "structmax_entmax_alpha_1.3"
    model = AutoModel.from_pretrained("some/model", attn_implementation=name)
    model.set_attn_implementation(hf.register("sparsemax"))  # or later

A map that is swapped in without training changes what a model computes: sparse maps are for
training or fine-tuning with them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from structmax.nn.dot_product import attend, check_map

# What models may pass that would change the result if it were ignored.
UNSUPPORTED = {
    "softcap": "scores with a soft cap are not supported",
    "s_aux": "attention sinks are not supported",
    "cache": "continuous batching is not supported",
}


def register(map: str, **options: float) -> str:
    """Makes a map known to transformers and returns its name there.

    ``map`` and ``options`` are those of :func:`structmax.nn.attend`. The name says both, so that
    registering twice changes nothing. Grouped keys, relative positions (T5), caches, sliding
    windows and padding work as they do with ``"eager"``, and ``output_attentions=True`` in a call
    gives the weights. Soft caps, sinks and continuous batching are refused.
    A position that sees no key, such as padding on the left, attends to nothing.
    """
    check_map("register", map, options)
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "structmax.nn.hf needs transformers 5.0 or newer. Use pip install structmax[hf]."
        ) from error
    name = "_".join(["structmax", map, *(f"{key}_{value}" for key, value in options.items())])
    AttentionInterface.register(name, partial(_attend, map=map, options=options))
    AttentionMaskInterface.register(name, _mask)  # without it models would pass no mask at all
    return name


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The boolean mask ``(B, 1, n, m)``, also where torch's own kernel could do without it."""
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


def _attend(
    module: torch.nn.Module,
    query: Tensor,  # (B, heads, n, d)
    key: Tensor,  # (B, groups, m, d)
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    map: str,
    options: dict[str, float],
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The function that models call: the output is ``(B, n, heads, d)``."""
    for name, what in UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise NotImplementedError(f'structmax_{map}: {what}. Use attn_implementation="eager".')
    heads, groups = query.shape[1], key.shape[1]
    if heads % groups:
        raise ValueError(
            f"structmax_{map}: {heads} heads of queries cannot share {groups} groups of keys "
            "equally. The number of groups must divide that of heads."
        )
    shared = heads // groups
    key, value = (t.repeat_interleave(shared, 1) if shared > 1 else t for t in (key, value))
    mask, bias = attention_mask, position_bias
    if mask is not None and mask.dtype != torch.bool:  # transformers write −inf as the least number
        bias = mask if bias is None else bias + mask
        mask = mask > torch.finfo(mask.dtype).min
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    output, weights = attend(
        query,
        key,
        value,
        map,
        mask=mask,
        bias=bias,
        causal=bool(is_causal) and mask is None and query.shape[2] > 1,
        scale=scaling,
        dropout=dropout if module.training else 0.0,
        **options,
    )
    return output.transpose(1, 2).contiguous(), weights
