"""LagKV as kvpress has it: spread of a token's channels on the scale of the next partition, as a rank."""

from __future__ import annotations

import itertools

import torch

from tests.policies.oracle import Kept, Snapshot
from tests.policies.references.choosing import cut_margin, highest


def lag_spread(x: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """``[L, H_kv, lag, D]`` and the partition after it -> fp64 ``[L, H_kv, lag]``, a softmax over the tokens of `x`."""
    x, reference = x.double(), reference.double()
    lowest, top = reference.amin(dim=2, keepdim=True), reference.amax(dim=2, keepdim=True)
    return ((x - lowest) / (top - lowest)).std(dim=-1, unbiased=True).softmax(dim=-1)


class LagKV:
    """Partitions of `lag` after the sinks; the last whole one and what follows it stay."""

    def __init__(self, lag: int, sinks: int = 4) -> None:
        self.lag, self.sinks = lag, sinks

    def decoded(self, now: Snapshot) -> None:
        """Nothing is accumulated."""

    def keep(self, now: Snapshot) -> Kept:
        layers, heads, tokens, _ = now.keys.shape
        lag, scored = self.lag, (tokens - self.sinks) // self.lag - 1
        assert scored > 0, f"{tokens = } are no two partitions of {lag = } after the sinks"
        spread = torch.zeros(layers, heads, tokens, dtype=torch.float64)
        rank = torch.ones_like(spread)
        parts = [slice(self.sinks + p * lag, self.sinks + (p + 1) * lag) for p in range(scored + 1)]
        for part, reference in itertools.pairwise(parts):
            of_keys, of_values = (lag_spread(x[:, :, part], x[:, :, reference]) for x in (now.keys, now.values))
            spread[:, :, part] = (of_keys + of_values) / 2
            rank[:, :, part] = spread[:, :, part].argsort(dim=-1, stable=True).argsort(dim=-1) / lag
        indices = highest(rank, now.budget).indices
        # Ranks are whole numbers; what rounding may exchange is two tokens of one partition, at its cut.
        margins = []
        for part in parts[:-1]:
            of_part = torch.zeros(tokens, dtype=torch.bool)
            of_part[part] = True
            margins.append(cut_margin(spread, indices, of_part))
        return Kept(indices, torch.stack(margins).amin(dim=0))
