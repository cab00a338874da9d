"""EpiKV's adaptation of LagKV: how unequal a token's channels are, each seen within the range of the chunk before.

How the formulas are read where they leave something open: keys and values themselves are averaged over the layers, the
standard deviations over the heads, and the scores of keys and values are added. Chunks of 128 are numbered over all
resident tokens, from the oldest; the first has no reference and is taken raw.
"""

from __future__ import annotations

import itertools

import torch

from tests.policies.oracle import Kept, Snapshot
from tests.policies.references.prompt_kept import for_all, keep_by_score, shared_positions


class EpiKVLag:
    def __init__(self, sinks: int = 4, chunk: int = 128) -> None:
        self.sinks = sinks
        self.chunk = chunk

    def decoded(self, now: Snapshot) -> None:
        pass

    def unevenness(self, x: torch.Tensor) -> torch.Tensor:
        """fp64 ``[N]`` of keys or values ``[H_kv, N, D]``."""
        chunks = list(x.split(self.chunk, dim=1))
        found = [chunks[0].std(dim=-1)]
        for before, chunk in itertools.pairwise(chunks):
            least, most = before.amin(dim=1, keepdim=True), before.amax(dim=1, keepdim=True)
            found.append(((chunk - least) / (most - least + 1e-9)).std(dim=-1))
        return torch.cat(found, dim=1).mean(dim=0)

    def keep(self, now: Snapshot) -> Kept:
        scores = sum(self.unevenness(x.double().mean(dim=0)) for x in (now.keys, now.values))
        recent = min(128, now.budget // 4)
        assert isinstance(scores, torch.Tensor)
        return for_all(*keep_by_score(scores, shared_positions(now), now, recent=recent, sinks=self.sinks), now)
