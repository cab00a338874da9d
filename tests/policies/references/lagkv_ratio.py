"""LagKV as its authors have it: each partition of `lag` tokens is cut to a share of itself, once."""

from __future__ import annotations

import torch

from tests.policies.oracle import Kept, Snapshot
from tests.policies.references.choosing import highest
from tests.policies.references.lagkv import lag_spread


class LagKVRatio:
    """The budget and the period are not used: an eviction is due when there are two partitions behind the base."""

    def __init__(self, lag: int, ratio: float = 0.5, sinks: int = 16, value_weight: float = 1.0) -> None:
        self.lag, self.kept, self.sinks, self.value_weight = lag, int(ratio * lag), sinks, value_weight
        self._base = sinks  # tokens before it were cut already

    def due(self, resident: int, budget: int, period: int, evicted: int) -> bool:
        """With the base told from the number of evicted tokens alone."""
        partitions = evicted // (self.lag - self.kept)
        return resident >= self.sinks + partitions * self.kept + 2 * self.lag

    def decoded(self, now: Snapshot) -> None:
        """Nothing is accumulated."""

    def keep(self, now: Snapshot) -> Kept:
        layers, heads, tokens, _ = now.keys.shape
        margin = torch.full((layers, heads), torch.inf, dtype=torch.float64)
        kept = [torch.arange(self._base).expand(layers, heads, -1)]
        start = self._base
        while start + 2 * self.lag <= tokens:
            part, reference = slice(start, start + self.lag), slice(start + self.lag, start + 2 * self.lag)
            of_keys, of_values = (lag_spread(x[:, :, part], x[:, :, reference]) for x in (now.keys, now.values))
            of_part = highest(of_keys + self.value_weight * of_values, self.kept)
            kept.append(start + of_part.indices)
            margin = margin.minimum(of_part.margin)
            start += self.lag
            self._base += self.kept
        kept.append(torch.arange(start, tokens).expand(layers, heads, -1))
        return Kept(torch.cat(kept, dim=-1), margin)
