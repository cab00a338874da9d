"""Slow oracle for methods that read a part of the cache: transformers with a mask over what each head does not read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

READING = "reference_reading_attention"

Chooser = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor | None]
"""``choose(layer, query[H_q, D], keys[H_kv, N, D])``, bool ``[H_q, N]``: what each query head reads; None: all."""


@dataclass(frozen=True)
class ReadingRun:
    """Greedy output ids, the top1 - top2 logit gap of each, tokens read per decode step (mean over heads, layers)."""

    tokens: list[int]
    margins: list[float]
    read: list[float]


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    choose: Chooser,
    read: list[float],
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    tokens, group = query.shape[2], query.shape[1] // key.shape[1]
    causal = torch.ones(tokens, key.shape[2], dtype=torch.bool).tril(key.shape[2] - tokens)
    chosen = choose(int(module.layer_idx), query[0, :, 0], key[0]) if tokens == 1 else None
    visible = causal if chosen is None else chosen[:, None]
    if tokens == 1:
        read.append(key.shape[2] if chosen is None else float(chosen.sum(dim=-1).double().mean()))
    keys, values = (x[0].repeat_interleave(group, dim=0) for x in (key, value))
    logits = (query[0] @ keys.transpose(1, 2) / math.sqrt(query.shape[-1])).masked_fill(~visible, -torch.inf)
    return (logits.softmax(dim=-1) @ values).transpose(0, 1)[None], None


AttentionInterface.register(READING, _attention)


@torch.no_grad()
def run(model: PreTrainedModel, input_ids: list[int], max_new_tokens: int, choose: Chooser) -> ReadingRun:
    """Decode greedily after a dense prefill."""
    result, cache, ids = ReadingRun([], [], []), DynamicCache(), list(input_ids)
    attention = model.config._attn_implementation
    model.set_attn_implementation(READING)
    try:
        for _ in range(max_new_tokens):
            read: list[float] = []
            out = model(torch.tensor([ids]), past_key_values=cache, choose=choose, read=read)
            best = out.logits[0, -1].float().topk(2)
            ids = [int(best.indices[0])]
            result.tokens.append(ids[0])
            result.margins.append(float(best.values[0] - best.values[1]))
            if read:
                result.read.append(sum(read) / len(read))
    finally:
        model.set_attn_implementation(attention)
    return result


def _tokens_of(pages: list[set[int]], page: int, tokens: int) -> torch.Tensor:
    """Bool ``[H, N]`` of the tokens in each head's pages."""
    return torch.tensor([[token // page in of_head for token in range(tokens)] for of_head in pages])


def quest(budget: int, page: int, dense_layers: int) -> Chooser:
    """Per query head the newest page and the best of the others by their channels' bounds (arXiv 2406.10774)."""

    def choose(layer: int, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        heads, tokens, _ = keys.shape
        if layer < dense_layers or tokens <= budget:
            return None
        newest, pages = (tokens - 1) // page, []
        for head, q in enumerate(query):
            of_head = keys[head * heads // len(query)]
            bounds = [of_head[i * page : (i + 1) * page] for i in range(newest)]
            scores = [float(torch.maximum(q * p.amax(dim=0), q * p.amin(dim=0)).sum()) for p in bounds]
            best = sorted(range(newest), key=lambda i, scores=scores: -scores[i])
            pages.append({newest, *best[: budget // page - 1]})
        return _tokens_of(pages, page, tokens)

    return choose


def seer(budget: int, block: int, state: dict[str, torch.Tensor], theta: float) -> Chooser:
    """Per KV head the newest block and the best of the others by a gate of known weights (arXiv 2506.08889)."""

    def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        angle = positions[:, None] * theta ** (-torch.arange(half).double() / half)
        z = torch.complex(x[..., :half].double(), x[..., half:].double())
        turned = z * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([turned.real, turned.imag], dim=-1)

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight.double()

    def choose(layer: int, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        heads, tokens, dim = keys.shape
        if tokens <= budget:
            return None
        name = f"model.layers.{layer}.self_attn.attn_gate.attngate_"
        to_query, to_key, query_norm, key_norm = (
            state[f"{name}{part}.weight"].double() for part in ("linear_q", "linear_k", "qnorm", "knorm")
        )
        before = rotate(query, torch.tensor([1.0 - tokens])).view(heads, -1, dim)  # as it was before RoPE
        plain = rotate(keys, -torch.arange(tokens).double())
        newest, pages = (tokens - 1) // block, []
        for head in range(heads):
            q = normed((before[head, :, None] @ to_query[head]).sum(dim=(0, 1)), query_norm)
            q = rotate(q[None], torch.tensor([tokens - 1.0]))[0]
            scores = []
            for i in range(newest):
                part = plain[head, i * block : (i + 1) * block]
                pooled = torch.cat([part.amax(dim=0), part.amin(dim=0), part.mean(dim=0)])
                k = rotate(normed(pooled @ to_key[head], key_norm)[None], torch.tensor([float(i * block)]))[0]
                scores.append(float(q @ k))
            best = sorted(range(newest), key=lambda i, scores=scores: -scores[i])
            pages.append({newest, *best[: budget // block - 1]})
        return _tokens_of(pages, block, tokens).repeat_interleave(len(query) // heads, dim=0)

    return choose
