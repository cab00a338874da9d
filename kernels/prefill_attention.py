"""Causal attention of a prompt's new tokens on a CPU, in PyTorch, after a prefix that the cache has already."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvpolicy.kernels.batched_decode_attention import computed_in

BLOCK = 256  # queries at a time: no call computes more than a block of what causality hides


def causal_mask(tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """The mask of :func:`prefill_attention` for up to `tokens` keys, which all layers and requests of a step share.

    ``[BLOCK, tokens]`` of 0 and -inf. The last column is seen by the last row alone: a block of queries that ends at
    key ``e`` takes its last rows, and of these the last ``e`` columns.
    """
    rows, columns = torch.arange(BLOCK)[:, None], torch.arange(tokens)
    hidden = columns - (tokens - BLOCK) > rows
    return torch.zeros(BLOCK, tokens, dtype=computed_in(dtype)).masked_fill(hidden, float("-inf"))


def prefill_attention_reference(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> torch.Tensor:
    """fp32 ``[n, H_q, D_v]``: the definition, one query after the other."""
    output = torch.zeros(*queries.shape[:2], values.shape[2])
    group, before = queries.shape[1] // keys.shape[1], len(keys) - len(queries)
    for token in range(len(queries)):
        seen = before + token + 1
        for head, query in enumerate(queries[token].float()):
            weights = (keys[:seen, head // group].float() @ query * scaling).softmax(dim=0)
            output[token, head] = weights @ values[:seen, head // group].float()
    return output


def prefill_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attention of the newest tokens of one request to all its tokens up to their own.

    Parameters
    ----------
    queries : ``[n, H_q, D]``
        After RoPE; query head ``h`` reads KV head ``h // G``, ``G = H_q / H_kv``.
    keys, values : ``[N, H_kv, D]`` and ``[N, H_kv, D_v]``, ``N >= n``, in the dtype of the queries, oldest first
    mask : of :func:`causal_mask` for at least ``N`` tokens
    scaling : factor of q·k

    Returns
    -------
    ``[n, H_q, D_v]`` in the dtype of the queries.
    """
    new, query_heads, head_dim = queries.shape
    tokens, heads, dtype = len(keys), keys.shape[1], computed_in(queries.dtype)
    assert tokens >= new, f"{new} new tokens of {tokens}"
    assert mask.shape[1] >= tokens, f"{mask.shape = } for {tokens} tokens"
    assert mask.dtype == dtype, f"{mask.dtype = } must be {dtype}"
    assert query_heads % heads == 0, f"{query_heads = } must be a multiple of {heads = }"
    group = query_heads // heads
    rows = queries.view(new, heads, group, head_dim).permute(1, 2, 0, 3).to(dtype)
    own_keys, own_values = (each.transpose(0, 1)[None].to(dtype) for each in (keys, values))
    output = rows.new_empty(heads, group, new, values.shape[2])
    for first in range(0, new, BLOCK):
        last = min(first + BLOCK, new)
        seen = tokens - new + last
        # The query heads of a KV head are rows of one product.
        folded = rows[:, :, first:last].reshape(1, heads, -1, head_dim)
        own_mask = mask[first - last :, mask.shape[1] - seen :].repeat(group, 1)
        output[:, :, first:last] = scaled_dot_product_attention(
            folded, own_keys[:, :, :seen], own_values[:, :, :seen], attn_mask=own_mask, scale=scaling
        ).view(heads, group, last - first, -1)
    return output.permute(2, 0, 1, 3).reshape(new, query_heads, -1).to(queries.dtype)
