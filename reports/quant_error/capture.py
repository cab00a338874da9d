"""Queries, keys and values as a model's attention gets them, and the model run with other keys and values.

One forward pass stands for a whole decode: token ``t`` reads the cached rows of all tokens up to ``t``. What a pass
keeps is one layer at a time; whoever needs more must keep it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

READING = "kvpolicy_other_rows_sdpa"
CHECKED_TOKENS = 64
# Of the length of the logits. The same sums in another order stay far below; another attention is above.
TOLERANCE = 0.01


class QuantErrorError(Exception):
    """Errors cannot be measured; the message is a sentence without its full stop."""


class LayerRows(NamedTuple):
    """What one layer's attention gets, after RoPE.

    layer : counted from 0
    queries : ``[H_q, T, D]``, of the model's dtype
    keys, values : ``[H_kv, T, D]``, of the cache's dtype; query head ``h`` reads KV head ``h // (H_q / H_kv)``
    scaling : factor of ``q · k`` before the softmax
    """

    layer: int
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scaling: float


# The keys and values, `[H_kv, T, D]` of any float dtype, that attention shall read instead of those of the layer.
Reader = Callable[[LayerRows], tuple[torch.Tensor, torch.Tensor]]


@torch.inference_mode()
def run_reading(model: Any, ids: list[int], read: Reader, cache_dtype: torch.dtype) -> torch.Tensor:
    """Logits ``[T, V]`` of a text, where attention reads the keys and values that `read` returns.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model in evaluation mode.
    ids : at least one
    read : is called once for each layer, in order; must not write to what it gets
    cache_dtype : keys and values are rounded to it, as a cache would, before `read` gets them

    Raises
    ------
    QuantErrorError
        If not every layer's attention is a plain causal one whose keys and values are of one size.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    seen: list[int] = []

    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> Any:
        _check_attention(model, query, key, value, mask)
        scaling = kwargs.get("scaling")
        rows = LayerRows(
            module.layer_idx,
            query[0],
            key[0].to(cache_dtype),
            value[0].to(cache_dtype),
            float(scaling if scaling is not None else query.shape[-1] ** -0.5),
        )
        seen.append(rows.layer)
        keys, values = (x.to(query.dtype)[None] for x in read(rows))
        return AttentionInterface()["sdpa"](module, query, keys, values, mask, **kwargs)

    AttentionInterface.register(READING, attend)
    # With sdpa's mask: none at all where attention is causal and nothing else.
    AttentionMaskInterface.register(READING, AttentionMaskInterface()["sdpa"])
    before = model.config._attn_implementation
    model.set_attn_implementation(READING)
    try:
        logits: torch.Tensor = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(before)
    if seen != list(range(layers)):
        raise QuantErrorError(
            f"{type(model).__name__} has {layers} layers, but attention ran in {len(seen)} of them, or in another "
            "order; only decoders with attention in every layer can be measured"
        )
    return logits


@torch.inference_mode()
def check_model(model: Any, ids: list[int]) -> None:
    """Raise QuantErrorError unless the model computes with sdpa over the rows taken what it computes by itself."""
    ids = ids[:CHECKED_TOKENS]
    own = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0].float()
    ours = run_reading(model, ids, lambda rows: (rows.keys, rows.values), model.dtype).float()
    if not own.isfinite().all():
        raise QuantErrorError(f"the model's output is not finite in {str(model.dtype).removeprefix('torch.')}")
    difference = float((ours - own).norm() / own.norm())
    if not difference < TOLERANCE:
        raise QuantErrorError(
            f"the attention of {type(model).__name__} is not softmax(q k) v alone: with that its logits differ by "
            f"{difference:.1%}"
        )


def _check_attention(
    model: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> None:
    name = type(model).__name__
    if mask is not None:
        raise QuantErrorError(
            f"{name} does not let every token see all before it (a sliding window?); lower --tokens to its window"
        )
    if key.shape != value.shape or query.shape[-1] != key.shape[-1] or query.shape[1] % key.shape[1]:
        sizes = ", ".join(f"{x.shape[1]} heads of {x.shape[-1]}" for x in (query, key, value))
        raise QuantErrorError(
            f"{name} has queries, keys and values of {sizes}; all must be of one size, with as many keys as values"
        )
