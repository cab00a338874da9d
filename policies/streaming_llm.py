"""`streaming-llm`: attention sinks and a sliding window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvpolicy.policies.base import Candidates, Card, Granularity, Noise, Policy
from kvpolicy.policies.selecting import keep_highest


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """The first `sinks` tokens and the newest ones (arXiv 2309.17453), at their original positions.

    The official code caches keys before RoPE and rotates them by their place in the cache at each
    step. This is the variant that keeps the original rotation and true positions, as kvpress and
    the R-KV repository run it.

    Parameters
    ----------
    sinks : int
        Published default: 4.
    """

    name: ClassVar[str] = "streaming-llm"
    card: ClassVar[Card] = Card(
        score="age: the first few tokens and the newest stay",
        source="StreamingLLM, arXiv 2309.17453",
        code="mit-han-lab/streaming-llm (MIT)",
    )
    granularity: ClassVar[Granularity] = Granularity.GLOBAL

    sinks: int = 4

    def forced(self, period: int) -> int:
        return self.sinks

    def select(self, candidates: Candidates, n_keep: int, period: int, noise: Noise) -> torch.Tensor:
        layers, heads, tokens = candidates.shape
        age = torch.arange(tokens, device=noise.device)
        kept = keep_highest(age.float(), n_keep, sinks=self.sinks)
        return kept.expand(layers, heads, n_keep)
