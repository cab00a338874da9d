"""EpiKV, flat: kept is what changed the hidden state unusually, early in the depth more than late."""

from __future__ import annotations

import math

import torch

from tests.policies.oracle import Kept, Snapshot
from tests.policies.references.prompt_kept import for_all, keep_by_score, shared_positions

# First and last layer of the two bands in the published model of 32 layers.
BANDS = {"adaptive": ((7, 13), (18, 25))}
ONE_LAYER = ((10, 10), (21, 21))
PUBLISHED_DEPTH = 32


def scaled(layer: int, depth: int) -> int:
    """The layer at the same share of the depth, halves rounded up."""
    return int(layer / PUBLISHED_DEPTH * depth + 0.5)


def changes(hidden: torch.Tensor, first: int, last: int, prompt_len: int) -> list[float]:
    """Of each decode token: distance to the hidden state one token before, mean over layers `first` to `last`."""
    outputs = hidden[first : last + 1, prompt_len - 1 :].double()
    distance = (outputs[:, 1:] - outputs[:, :-1]).square().sum(dim=-1).sqrt()
    return [float(mean) for mean in distance.mean(dim=0)]


def z_score(window: list[float]) -> float:
    """Of the last value among all; 0 for a single one."""
    if len(window) < 2:
        return 0.0
    mean = sum(window) / len(window)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in window) / len(window))
    return (window[-1] - mean) / (deviation + 1e-6)


class EpiKV:
    """`signal`: zscore (z of each band, then their difference), raw, rolling (mean of a window), adaptive."""

    def __init__(self, signal: str = "zscore", window: int = 64, sinks: int = 4) -> None:
        self.signal = signal
        self.window = window
        self.sinks = sinks
        self.bands = BANDS.get(signal, ONE_LAYER)

    def decoded(self, now: Snapshot) -> None:
        pass

    def resident_scores(self, now: Snapshot) -> torch.Tensor:
        """fp64 ``[N]``; of prompt tokens, which have none, NaN."""
        assert now.hidden is not None
        depth = now.hidden.shape[0]
        a, b = (
            changes(now.hidden, scaled(first, depth), scaled(last, depth), now.prompt_len) for first, last in self.bands
        )
        scores = torch.full((now.positions.shape[2],), math.nan, dtype=torch.float64)
        for token, position in enumerate(shared_positions(now).tolist()):
            if position >= now.prompt_len:
                count = position - now.prompt_len + 1
                scores[token] = self.score(a[:count], b[:count])
        return scores

    def score(self, a: list[float], b: list[float]) -> float:
        """Of the last token, from the changes of it and of all decode tokens before."""
        if self.signal == "raw":
            return a[-1] - b[-1]
        a, b = a[-self.window :], b[-self.window :]
        if self.signal == "rolling":
            return (sum(a) - sum(b)) / len(a)
        return (1.29 if self.signal == "adaptive" else 1.0) * z_score(a) - z_score(b)

    def keep(self, now: Snapshot) -> Kept:
        recent = min(128, now.budget // 4)
        indices, margin = keep_by_score(
            self.resident_scores(now), shared_positions(now), now, recent=recent, sinks=self.sinks
        )
        return for_all(indices, margin, now)
