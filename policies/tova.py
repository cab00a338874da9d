"""`tova`: the tokens that the newest query attends to most, one set per layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvpolicy.policies.base import Candidates, Card, Granularity, Needs, Noise
from kvpolicy.policies.selecting import ScoredPolicy


@dataclass(frozen=True)
class TOVA(ScoredPolicy):
    """TOVA (arXiv 2401.06104; schwartz-lab-NLP/TOVA, Apache-2.0): the newest token's attention decides.

    A token's score is the weight that the newest query gives it in a softmax over all resident tokens, the newest
    itself included, mean over all query heads of the layer. All KV heads of a layer keep the same tokens. Neither
    sinks nor recent tokens are protected; the newest token stays if it attends to itself enough.

    The official code does this at every step, one token out for one in: ``kv_period=1``. With a longer period one
    query decides on as many tokens at once, of which nothing is published. That code leaves positions to the host
    model; here they are the true ones. kvpress' ``TOVAPress``, for prompts, always keeps the newest token, as
    ``recent:1`` does.

    Parameters
    ----------
    sinks : int
        Oldest tokens that are always kept; published: 0.
    recent : int or None
        Newest tokens that are always kept; published: 0. None: as many as the eviction period.
    """

    name: ClassVar[str] = "tova"
    card: ClassVar[Card] = Card(
        score="attention of the newest query, mean over all heads of the layer",
        source="TOVA, arXiv 2401.06104",
        code="schwartz-lab-NLP/TOVA (Apache-2.0)",
        flash_attention=False,
    )
    granularity: ClassVar[Granularity] = Granularity.PER_LAYER

    sinks: int = 0
    recent: int | None = 0

    def needs(self, period: int) -> Needs:
        return Needs(keys=True, queries=1)

    def scores(self, candidates: Candidates, noise: Noise) -> torch.Tensor:
        queries, keys = candidates.require("queries")[:, :, -1], candidates.require("keys")
        layers, heads, tokens, head_dim = keys.shape
        attention = torch.empty(layers, 1, tokens, dtype=torch.float32, device=keys.device)
        for layer in range(layers):
            grouped = queries[layer].float().view(heads, -1, head_dim) / math.sqrt(head_dim)
            logits = grouped @ keys[layer].float().transpose(1, 2)
            attention[layer] = logits.softmax(dim=-1).mean(dim=(0, 1))
        return attention
