"""What the references share: attention of the newest token, the highest scores by sorting, and how clear a cut is."""

from __future__ import annotations

import math

import torch

from tests.policies.oracle import Kept, Snapshot


def newest_attention(now: Snapshot) -> torch.Tensor:
    """fp64 ``[L, H_kv, G, N]``: softmax over all resident tokens, for each query head of a KV head's group."""
    layers, heads, _, head_dim = now.keys.shape
    queries = now.queries[:, :, -1].double().view(layers, heads, -1, head_dim)
    logits = torch.einsum("lhgd,lhnd->lhgn", queries, now.keys.double()) / math.sqrt(head_dim)
    return logits.softmax(dim=-1)


def cut_margin(scores: torch.Tensor, indices: torch.Tensor, free: torch.Tensor) -> torch.Tensor:
    """fp64 ``[...]``: how far the worst kept of the `free` tokens is above the best evicted, over their spread.

    Infinite where all of them are kept, or all evicted.

    Parameters
    ----------
    scores : fp64 ``[..., N]``
    indices : int64 ``[..., K]``, the kept tokens
    free : bool ``[N]`` or ``[..., N]``, tokens that are kept for their score alone
    """
    free = free.expand_as(scores)
    kept = torch.zeros_like(free).scatter(-1, indices, True)
    worst = scores.masked_fill(~(kept & free), torch.inf).amin(-1)
    best = scores.masked_fill(kept | ~free, -torch.inf).amax(-1)
    spread = scores.masked_fill(~free, -torch.inf).amax(-1) - scores.masked_fill(~free, torch.inf).amin(-1)
    margin = (worst - best) / spread.clamp_min(torch.finfo(scores.dtype).tiny)
    return margin.masked_fill(worst.isinf() | best.isinf(), torch.inf)


def highest(scores: torch.Tensor, n_keep: int, *, sinks: int = 0, recent: int = 0) -> Kept:
    """The `n_keep` highest of ``[L, H_kv, N]``, the oldest of equals; the `sinks` oldest and `recent` newest always."""
    scores = scores.double()
    tokens = scores.shape[-1]
    free = torch.ones(tokens, dtype=torch.bool)
    free[:sinks] = False
    free[tokens - recent :] = False
    order = scores.masked_fill(~free, torch.inf).argsort(dim=-1, descending=True, stable=True)
    indices = order[..., :n_keep].sort(dim=-1).values
    return Kept(indices, cut_margin(scores, indices, free))
