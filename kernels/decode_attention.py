"""Attention rows of the newest queries over all resident tokens, causal, one layer at a time.

Between two evictions tokens are only appended, so the row of each decode step can be computed later, exactly: over the
tokens up to the query's own. No row outlives its layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch


def decode_attention_reference(queries: torch.Tensor, keys: torch.Tensor, newest: int) -> Iterator[torch.Tensor]:
    """Softmax rows of the `newest` queries, row by row.

    Parameters
    ----------
    queries : ``[L, H_q, w, D]``
        After RoPE, oldest first; the last one belongs to the newest token.
    keys : ``[L, H_kv, N, D]``
        After RoPE, oldest first; query head ``h`` reads KV head ``h // G``, ``G = H_q / H_kv``.
    newest : int
        At most ``w`` and at most ``N``.

    Yields
    ------
    For each layer ``[H_kv, G, newest, N]`` fp32: row ``i`` adds up to 1 over tokens ``0 .. N - newest + i`` and is 0
    for the later ones.
    """
    layers, query_heads, window, head_dim = queries.shape
    heads, tokens = keys.shape[1:3]
    group = query_heads // heads
    for layer in range(layers):
        rows = torch.zeros(heads, group, newest, tokens, device=keys.device)
        for head in range(query_heads):
            for i in range(newest):
                seen = tokens - newest + i + 1
                query = queries[layer, head, window - newest + i].float()
                logits = keys[layer, head // group, :seen].float() @ query / math.sqrt(head_dim)
                rows[head // group, head % group, i, :seen] = logits.softmax(dim=0)
        yield rows


def decode_attention(queries: torch.Tensor, keys: torch.Tensor, newest: int) -> Iterator[torch.Tensor]:
    """The same as :func:`decode_attention_reference`, one matrix product per layer and KV head."""
    layers, query_heads, window, head_dim = queries.shape
    heads, tokens = keys.shape[1:3]
    assert keys.shape == (layers, heads, tokens, head_dim), f"{keys.shape = } does not fit {queries.shape = }"
    assert query_heads % heads == 0, f"{query_heads = } must be a multiple of {heads = }"
    assert 0 <= newest <= min(window, tokens), f"{newest = } must be at most {window = } and at most {tokens = }"
    return (_rows(queries[layer, :, window - newest :], keys[layer]) for layer in range(layers))


def _rows(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """``[H_q, w, D]`` and ``[H_kv, N, D]`` to ``[H_kv, G, w, N]``."""
    query_heads, window, head_dim = queries.shape
    heads, tokens, _ = keys.shape
    group = query_heads // heads
    # The query heads of a group are rows of one product, so that keys are read once per KV head.
    grouped = queries.float().reshape(heads, group * window, head_dim) / math.sqrt(head_dim)
    logits = torch.bmm(grouped, keys.float().transpose(1, 2)).view(heads, group, window, tokens)
    later = torch.ones(window, window, dtype=torch.bool, device=keys.device).triu(1)
    logits[..., tokens - window :].masked_fill_(later, -torch.inf)
    return logits.softmax(dim=-1)
