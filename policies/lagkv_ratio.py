"""`lagkv-ratio`: LagKV as published, which keeps a share of each partition and has no budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from kvpolicy.policies.base import Candidates, Card, Needs, Noise, Policy
from kvpolicy.policies.lag_relative import lag_relative_share
from kvpolicy.policies.selecting import keep_highest


@dataclass(frozen=True)
class LagKVRatio(Policy):
    """LagKV (arXiv 2504.04704; AI-Lab-China-Merchants-Bank/LagKV, MIT) with the defaults of its code.

    **Memory is not bounded**: of every `lag` tokens ``int(ratio * lag)`` stay for good, so the cache grows by about
    `ratio` per token. `kv_budget` and `kv_period` are not used.

    The base is the sinks and what was kept of the partitions compressed so far. As soon as two whole partitions of
    `lag` tokens follow it, all whole ones but the last are compressed, once for all: of each the highest
    ``s_K + score_v_ratio * s_V`` stay, per layer and KV head, with :func:`lag_relative_share` for both. The last
    whole partition and what follows it stay as they are.

    Not in the code, ours: a channel that is constant in the reference counts as `lag_relative.LEAST_RANGE` wide,
    where it divides by 0; fp32; kept tokens stay in age order, of equal scores the older. Its option to leave
    layers uncompressed is not offered: all layers of a request hold equally many tokens here.

    Parameters
    ----------
    ratio : float
        Share of a partition that is kept, below 1; published: 0.5.
    sinks : int
        Oldest tokens that are always kept; published: 16.
    lag : int
        Tokens of a partition; published: 1024.
    score_v_ratio : float
        Weight of the values' score beside the keys'; published: 1.
    """

    name: ClassVar[str] = "lagkv-ratio"
    card: ClassVar[Card] = Card(
        score="spread of key and value channels, in the ranges of the next partition; a share stays, no budget",
        source="LagKV, arXiv 2504.04704",
        code="AI-Lab-China-Merchants-Bank/LagKV (MIT)",
    )

    ratio: float = 0.5
    sinks: int = 16
    lag: int = field(default=1024, metadata={"least": 2})
    score_v_ratio: float = 1.0

    @property
    def kept(self) -> int:
        """Tokens that stay of a partition."""
        return int(self.ratio * self.lag)

    def needs(self, period: int) -> Needs:
        return Needs(keys=True, values=True)

    def check(self, budget: int, period: int) -> None:
        """Any budget and period will do, they are not used; a ratio that evicts nothing will not."""
        if self.kept >= self.lag:
            raise ValueError(
                f"ratio:{self.ratio:g} keeps all {self.lag} tokens of a partition; "
                f"{self.name} keeps a share below 1, or use kv_policy=full"
            )

    def due(self, resident: int, budget: int, period: int, *, evicted: int = 0) -> bool:
        return self._compressible(resident, evicted) > 0

    def n_keep(self, resident: int, budget: int, *, evicted: int = 0) -> int:
        return resident - self._compressible(resident, evicted) * (self.lag - self.kept)

    def select(self, candidates: Candidates, n_keep: int, period: int, noise: Noise) -> torch.Tensor:
        keys, values = candidates.require("keys"), candidates.require("values")
        layers, heads, tokens = candidates.shape
        evicted = candidates.true_len - tokens
        partitions, base = self._compressible(tokens, evicted), self._base(evicted)
        assert n_keep == self.n_keep(tokens, 0, evicted=evicted), f"{n_keep = } of {tokens = } after {evicted = }"
        place = torch.arange(tokens, device=keys.device).expand(layers, heads, -1)
        if not partitions:
            return place
        end = base + partitions * self.lag  # where the reference of the last of them begins
        chosen = []
        for layer in range(layers):
            shares = [lag_relative_share(x[layer, :, base : end + self.lag], self.lag) for x in (keys, values)]
            chosen.append(keep_highest(shares[0] + self.score_v_ratio * shares[1], self.kept))
        first = torch.arange(base, end, self.lag, device=keys.device)[:, None]
        return torch.cat([place[..., :base], (torch.stack(chosen) + first).flatten(-2), place[..., end:]], dim=-1)

    def _base(self, evicted: int) -> int:
        """Tokens that will not be looked at again, once `evicted` are gone."""
        return self.sinks + evicted // (self.lag - self.kept) * self.kept

    def _compressible(self, resident: int, evicted: int) -> int:
        """Whole partitions after the base, less the last."""
        return max(0, (resident - self._base(evicted)) // self.lag - 1)
