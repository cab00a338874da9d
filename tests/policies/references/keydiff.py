"""KeyDiff: keys that are unlike the mean direction of all keys stay."""

from __future__ import annotations

import torch

from tests.policies.oracle import Kept, Snapshot
from tests.policies.references.choosing import highest


class KeyDiff:
    """Four sinks, one period of recent tokens."""

    def decoded(self, now: Snapshot) -> None:
        """Nothing is accumulated."""

    def keep(self, now: Snapshot) -> Kept:
        layers, heads, tokens, _ = now.keys.shape
        scores = torch.zeros(layers, heads, tokens, dtype=torch.float64)
        for layer in range(layers):
            for head in range(heads):
                keys = now.keys[layer, head].double()
                unit = keys / keys.norm(dim=-1, keepdim=True)
                anchor = unit.mean(dim=0)
                scores[layer, head] = -(unit @ anchor) / anchor.norm()
        return highest(scores, now.budget, sinks=4, recent=now.period)
