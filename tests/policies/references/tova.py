"""TOVA: what the last query attends to, over all heads of a layer."""

from __future__ import annotations

from tests.policies.oracle import Kept, Snapshot
from tests.policies.references.choosing import highest, newest_attention


class TOVA:
    """One set per layer; no token is forced to stay."""

    def decoded(self, now: Snapshot) -> None:
        """Nothing is accumulated."""

    def keep(self, now: Snapshot) -> Kept:
        assert (now.positions == now.positions[:, :1]).all(), "the heads of a layer hold different tokens"
        heads = now.keys.shape[1]
        of_layer = newest_attention(now).flatten(1, 2).mean(dim=1, keepdim=True)
        return highest(of_layer.repeat(1, heads, 1), now.budget)
