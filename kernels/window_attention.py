"""Attention that the newest queries pay to each cached token: the score of SnapKV and of VaSE-AttnV.

Attention rows are recomputed from recorded queries; nothing is taken from the attention backend, so
any backend works and no `queries x tokens` matrix outlives one layer.
"""

from __future__ import annotations

import itertools
import math
from typing import Literal

import torch
from torch.nn import functional

Group = Literal["mean", "max"]
Domain = Literal["candidates", "all"]
Pooling = Literal["avg", "max", "none"]

CACHED_BYTES = 4 * 2**20  # of logits at a time on a CPU


def window_attention_reference(
    queries: torch.Tensor,
    keys: torch.Tensor,
    candidates: int,
    *,
    domain: Domain,
    group: Group,
    pooling: Pooling,
    kernel: int,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Mean attention of a window of queries to each of the first `candidates` tokens.

    Parameters
    ----------
    queries : ``[L, H_q, w, D]``
        After RoPE; query ``i`` belongs to token ``N - w + i``, so none precedes a candidate.
    keys : ``[L, H_kv, N, D]``
        After RoPE, oldest first; ``H_q`` is a multiple of ``H_kv``.
    candidates : int
        At most ``N - w``: the tokens that are scored.
    domain : {"candidates", "all"}
        Tokens of the softmax: the candidates alone, or all ``N`` with a causal mask in the window.
    group : {"mean", "max"}
        How the query heads of a KV head become one: mean of their pooled attention, or maximum of
        their raw logits, before the softmax.
    pooling, kernel
        1-D pooling over neighbouring candidates, stride 1, padding ``kernel // 2``; the zeros of the
        padding count in an average.
    temperature : float
        Divides the logits, beside ``sqrt(D)``.

    Returns
    -------
    ``[L, H_kv, candidates]`` fp32.
    """
    layers, query_heads, window, head_dim = queries.shape
    heads, tokens = keys.shape[1:3]
    grouped = queries.float().view(layers, heads, query_heads // heads, window, head_dim)
    visible = keys.float() if domain == "all" else keys[:, :, :candidates].float()
    logits = grouped @ visible[:, :, None].transpose(-1, -2) / (math.sqrt(head_dim) * temperature)
    if group == "max":
        logits = logits.amax(dim=2, keepdim=True)
    if domain == "all":
        later = torch.ones(window, tokens, dtype=torch.bool, device=keys.device).triu(tokens - window + 1)
        logits = logits.masked_fill(later, -torch.inf)
    mass = logits.softmax(dim=-1)[..., :candidates].mean(dim=3)
    return _pool(mass, pooling, kernel).mean(dim=2)


def window_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    candidates: int,
    *,
    domain: Domain,
    group: Group,
    pooling: Pooling,
    kernel: int,
    temperature: float = 1.0,
) -> torch.Tensor:
    """The same as :func:`window_attention_reference`, a layer at a time, or so many of its heads that their logits
    stay in a CPU's caches: only ``H_q * w * N`` of them exist at once."""
    layers, query_heads, window, head_dim = queries.shape
    heads, tokens = keys.shape[1:3]
    assert keys.shape == (layers, heads, tokens, head_dim), f"{keys.shape = } does not fit {queries.shape = }"
    assert query_heads % heads == 0, f"{query_heads = } must be a multiple of {heads = }"
    assert 0 <= candidates <= tokens - window, f"{candidates = } must not reach into the {window = } of {tokens = }"
    assert kernel % 2 == 1, f"{kernel = } must be odd, or pooling would shift the scores"
    mass = torch.empty(layers, heads, candidates, dtype=torch.float32, device=keys.device)
    group_size, scale = query_heads // heads, 1 / (math.sqrt(head_dim) * temperature)
    visible = candidates if domain == "candidates" else tokens
    later = torch.ones(window, window, dtype=torch.bool, device=keys.device).triu(1)
    # The query heads of a group are rows of one product, so that keys are read once per KV head.
    grouped = queries.reshape(layers, heads, group_size * window, head_dim)
    step = heads
    if keys.device.type == "cpu":
        step = max(1, min(heads, CACHED_BYTES // max(1, 4 * group_size * window * visible)))
    for layer, first in itertools.product(range(layers), range(0, heads, step)):
        part = layer, slice(first, first + step)
        logits = torch.bmm(grouped[part].float() * scale, keys[part][:, :visible].float().transpose(1, 2))
        logits = logits.view(len(logits), group_size, window, visible)
        if group == "max":
            logits = logits.amax(dim=1, keepdim=True)
        if domain == "all":
            logits[..., tokens - window :].masked_fill_(later, -torch.inf)
        attention = logits.softmax(dim=-1)[..., :candidates].mean(dim=2)
        mass[part] = _pool(attention, pooling, kernel).mean(dim=1)
    return mass


def _pool(mass: torch.Tensor, pooling: Pooling, kernel: int) -> torch.Tensor:
    """Pool ``[..., N]`` over N."""
    if pooling == "none" or mass.shape[-1] == 0:
        return mass
    flat = mass.flatten(0, -2)
    pool = functional.avg_pool1d if pooling == "avg" else functional.max_pool1d
    return pool(flat, kernel, stride=1, padding=kernel // 2).view_as(mass)
