"""`epikv-seg`: segments whose keys vary most keep most tokens, EpiKV's signal says which."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch.nn import functional

from kvpolicy.policies.base import Candidates, Card, Needs, Noise
from kvpolicy.policies.epikv import EpiKV
from kvpolicy.policies.epikv_rule import channel_deviation
from kvpolicy.policies.selecting import keep_highest


@dataclass(frozen=True)
class EpiKVSeg(EpiKV):
    """EpiKV-Seg (arXiv 2606.26472; ``kv_seg_hs`` of stevenkolawole/epiphany-kv-cache, no licence file).

    The resident tokens without the recent ones, prompt included, are cut into segments of `segment`, the last one
    shorter. A segment's statistic is the variance of a key over its channels (``D - 1``), mean over tokens, heads and
    layers. Of `n` segments in ascending order the statistic of number ``n // 3`` bounds the middle class and that of
    number ``2 * n // 3`` the high one, both included. Beside the prompt and the recent tokens each segment keeps at
    most so many of its decode tokens as its class allows, those with the highest signal (see `epikv`), the oldest
    segment first, until the budget is used up. What the classes leave of the budget stays empty, so that often fewer
    tokens are kept, as published.

    All this is from the code; the paper was not read in full. The same differences as in `epikv`: true positions,
    prompts that are too long for the budget, layers at other depths, a period above 1.

    Parameters
    ----------
    segment : int
        Tokens of a segment; published: 128.
    keep_high, keep_middle, keep_low : int
        Decode tokens that a segment of the class keeps at most; published: 64, 32, 8.
    value_reserve : int
        As many tokens with the widest spread of values (see `epikv`) replace those of the lowest signal among the
        kept; published: 0. Ours: only decode tokens between prompt and recent ones, at most as many as are kept there.
    sinks, recent, signal, window, band_a, band_a_last, band_b, band_b_last, value_measure
        As in `epikv`. Sinks that are decode tokens count as part of the prompt.
    """

    name: ClassVar[str] = "epikv-seg"
    card: ClassVar[Card] = Card(
        score="EpiKV's signal within segments, of which those with the highest key variance keep most",
        source="EpiKV, arXiv 2606.26472",
        code="stevenkolawole/epiphany-kv-cache (no licence file)",
    )

    segment: int = field(default=128, metadata={"least": 1})
    keep_high: int = 64
    keep_middle: int = 32
    keep_low: int = 8

    @property
    def spans_heads(self) -> bool:
        """A segment's statistic is a mean over all heads."""
        return True

    @property
    def spans_layers(self) -> bool:
        """A segment's statistic is a mean over all layers."""
        return True

    def needs(self, period: int) -> Needs:
        return Needs(keys=True, values=self.value_reserve > 0, positions=True, hidden_bands=self.bands)

    def select(self, candidates: Candidates, n_keep: int, period: int, noise: Noise) -> torch.Tensor:
        signals, tokens = self.signals(candidates), candidates.shape[-1]
        older = tokens - self.recent_count(n_keep)
        room = n_keep - self.recent_count(n_keep)
        prompt = int((candidates.require("positions")[0, 0] < candidates.prompt_len).sum())
        standing = max(prompt, self.sinks)
        if standing >= room:
            return self.one_set(signals, candidates, n_keep)
        chosen = self._chosen(signals, self.quotas(candidates.require("keys"), older), standing, older, room - standing)
        if self.value_reserve:
            eligible = torch.zeros(tokens, dtype=torch.bool, device=chosen.device)
            eligible[standing:older] = True
            reserved = self.most_spread(candidates, eligible, min(self.value_reserve, len(chosen)))
            ranked = torch.full_like(signals, -torch.inf)
            ranked[chosen] = signals[chosen].nan_to_num(nan=1e28, posinf=1e29, neginf=-1e29)
            chosen = keep_highest(ranked.masked_fill(reserved, torch.inf), len(chosen))
        rows = torch.arange(tokens, device=chosen.device)
        return torch.cat([rows[:standing], chosen, rows[older:]]).expand(*candidates.shape[:2], -1)

    def quotas(self, keys: torch.Tensor, older: int) -> list[int]:
        """How many decode tokens each segment of the `older` first tokens may keep, from ``keys [L, H_kv, N, D]``."""
        variance = torch.zeros(older, dtype=torch.float64, device=keys.device)
        for layer in keys:
            variance += channel_deviation(layer[:, :older]).double().square().mean(dim=0)
        segments = -(-older // self.segment)
        padded = functional.pad(variance.nan_to_num(nan=torch.inf), (0, segments * self.segment - older))
        lengths = torch.full((segments,), self.segment, device=keys.device)
        lengths[-1] = older - (segments - 1) * self.segment
        statistic = padded.view(segments, self.segment).sum(dim=-1) / lengths
        ascending = statistic.sort().values
        low, high = ascending[segments // 3], ascending[2 * segments // 3]
        least = torch.where(statistic >= low, self.keep_middle, self.keep_low)
        quotas: list[int] = torch.where(statistic >= high, self.keep_high, least).tolist()
        return quotas

    def _chosen(self, signals: torch.Tensor, quotas: list[int], standing: int, older: int, room: int) -> torch.Tensor:
        """int64, ascending: the decode tokens that the segments keep, `room` at most."""
        kept = [torch.arange(0, device=signals.device)]
        for number, quota in enumerate(quotas):
            first, last = max(number * self.segment, standing), min((number + 1) * self.segment, older)
            count = min(quota, last - first, room)
            if count > 0:
                kept.append(first + keep_highest(signals[first:last], count))
                room -= count
        return torch.cat(kept)
