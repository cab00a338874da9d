"""`lagkv`: LagKV's score, the same share of every partition, at a fixed budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from kvpolicy.policies.base import Candidates, Card, Needs, Noise
from kvpolicy.policies.lag_relative import lag_relative_share
from kvpolicy.policies.selecting import ScoredPolicy


@dataclass(frozen=True)
class LagKV(ScoredPolicy):
    """LagKV (arXiv 2504.04704) in the form of NVIDIA's kvpress (``LagKVPress``, Apache-2.0), at every eviction.

    The resident tokens after the sinks are cut into partitions of `lag`. A token of any but the last is scored by
    :func:`lag_relative_share` of its key and of its value, their mean, per layer and KV head; its rank in its
    partition (0 the lowest) over `lag` is what is compared, so that all partitions lose the same share, within one
    token. The last partition and the fewer than `lag` tokens after it are always kept.

    The official method is a ratio, not a budget: `lagkv-ratio`. This form is kvpress' for prompts; where it is
    applied again to what it left, as here, partitions are counted anew each time, and so join tokens that were not
    neighbours. With fewer tokens than the sinks and two partitions the newest stay, in kvpress as here.

    Ours: a channel that is constant in the reference counts as `lag_relative.LEAST_RANGE` wide, where kvpress divides
    by 0; fp32, where it ranks in the model's dtype; of tokens with equal scores the older ranks higher, and of equal
    ranks in several partitions the oldest are kept, where `torch.topk` decides in kvpress.

    Parameters
    ----------
    sinks : int
        Oldest tokens that are always kept; kvpress: 4.
    recent : int or None
        Newest tokens that are always kept beyond what the method keeps; kvpress: 0. None: the eviction period.
    lag : int
        Tokens of a partition; kvpress: 128.
    """

    name: ClassVar[str] = "lagkv"
    card: ClassVar[Card] = Card(
        score="spread of key and value channels, in the ranges of the next partition",
        source="LagKV, arXiv 2504.04704",
        code="AI-Lab-China-Merchants-Bank/LagKV (MIT); this form: NVIDIA/kvpress (Apache-2.0)",
    )

    recent: int | None = 0
    lag: int = field(default=128, metadata={"least": 2})

    def needs(self, period: int) -> Needs:
        return Needs(keys=True, values=True)

    def forced(self, period: int) -> int:
        """The most that may be: sinks, the last whole partition, and all but one token of another."""
        return self.sinks + max(2 * self.lag - 1, self.recent_count(period))

    def check(self, budget: int, period: int) -> None:
        if budget <= (forced := self.forced(period)):
            raise ValueError(
                f"kv_budget={budget} leaves nothing to choose: {self.name} keeps up to {forced} tokens whatever their "
                f"score (sinks, and the newest 2 * lag - 1 or recent), so the budget must be at least {forced + 1}; "
                "raise kv_budget, or lower the policy's lag option"
            )

    def scores(self, candidates: Candidates, noise: Noise) -> torch.Tensor:
        keys, values = candidates.require("keys"), candidates.require("values")
        layers, heads, tokens = candidates.shape
        last = max(0, (tokens - self.sinks) // self.lag - 1) * self.lag + self.sinks  # start of the last partition
        # Above all ranks, and ascending: with fewer tokens than two partitions the newest stay.
        scores = 1 + torch.arange(tokens, dtype=torch.float32, device=keys.device) / tokens
        scores = scores.repeat(layers, heads, 1)
        if last > self.sinks:
            partitioned = slice(self.sinks, last + self.lag)
            for layer in range(layers):
                shares = [lag_relative_share(x[layer, :, partitioned], self.lag) for x in (keys, values)]
                ranks = _rank((shares[0] + shares[1]) / 2)
                scores[layer, :, self.sinks : last] = (ranks / self.lag).flatten(-2)
        return scores


def _rank(x: torch.Tensor) -> torch.Tensor:
    """Place in ascending order along the last axis, from 0; of equal numbers the first has the highest."""
    descending = x.argsort(dim=-1, descending=True, stable=True)
    return x.shape[-1] - 1 - descending.argsort(dim=-1)
