"""R-KV: attention of a window against redundancy among the keys."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from tests.policies.oracle import Kept, Snapshot
from tests.policies.references.choosing import highest

# Weight of the attention; the rest is the redundancy's.
MIX = {"official": 0.07, "paper": 0.1, "vase": 0.5}
WINDOW, THRESHOLD = 8, 0.5


class RKV:
    """``official`` and ``paper``: a group's largest logit, max pooling, the last similar token is not redundant.

    ``vase``: window of one period, mean over the group, average pooling, every similar token is redundant, and only the
    tokens that may be evicted are compared with each other.
    """

    def __init__(self, variant: str) -> None:
        self.variant = variant

    def decoded(self, now: Snapshot) -> None:
        """Nothing is accumulated."""

    def keep(self, now: Snapshot) -> Kept:
        layers, heads, tokens, _ = now.keys.shape
        window = now.period if self.variant == "vase" else WINDOW
        group, older, mix = now.queries.shape[1] // heads, tokens - window, MIX[self.variant]
        scores = torch.zeros(layers, heads, tokens, dtype=torch.float64)
        nearest = torch.full((layers, heads), torch.inf, dtype=torch.float64)
        for layer in range(layers):
            for head in range(heads):
                keys = now.keys[layer, head].double()
                queries = now.queries[layer, head * group : (head + 1) * group, -window:].double()
                compared = keys[:older] if self.variant == "vase" else keys
                redundancy, nearest[layer, head] = self._redundancy(compared)
                attention = self._attention(queries, keys[:older])
                scores[layer, head, :older] = mix * attention - (1 - mix) * redundancy[:older]
        kept = highest(scores, now.budget, recent=window)
        return Kept(kept.indices, kept.margin.minimum(nearest))

    def _attention(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """``[G, w, D]`` and ``[n, D]`` -> ``[n]``."""
        logits = queries @ keys.T / math.sqrt(keys.shape[1])
        if self.variant == "vase":
            mass = logits.softmax(dim=-1).mean(dim=1)
            return functional.pad(mass, (2, 2)).unfold(-1, 5, 1).mean(dim=-1).mean(dim=0)
        mass = logits.amax(dim=0).softmax(dim=-1).mean(dim=0)
        return functional.pad(mass, (3, 3), value=-torch.inf).unfold(-1, 7, 1).amax(dim=-1)

    def _redundancy(self, keys: torch.Tensor) -> tuple[torch.Tensor, float]:
        """``[N, D]`` -> ``[N]``, and how near a cosine comes to the threshold."""
        unit = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
        similarity = (unit @ unit.T).fill_diagonal_(0)
        if self.variant == "vase":
            return similarity.mean(dim=0).softmax(dim=0), math.inf
        nearest = float((similarity - THRESHOLD).abs().min())
        row = torch.arange(len(keys))
        last_similar = torch.where(similarity > THRESHOLD, row, 0).amax(dim=1)  # column 0 if there is none
        similarity[row, last_similar] = 0
        return similarity.mean(dim=0).softmax(dim=0), nearest
