"""`random`: the control that every score must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvpolicy.policies.base import Candidates, Card, Noise
from kvpolicy.policies.paged import PagedCandidates
from kvpolicy.policies.selecting import ScoredPolicy


@dataclass(frozen=True)
class RandomEviction(ScoredPolicy):
    """Keeps uniformly random tokens beside sinks and recent ones, per layer and KV head.

    The random arm of VaSE's GSM8K pilot (arXiv 2606.03928) does not say whether it protects sinks
    and recent tokens. Here both are protected as in VaSE-DKV, so that the two differ in the score
    alone; ``sinks:0;recent:0`` gives fully random eviction.
    """

    name: ClassVar[str] = "random"
    card: ClassVar[Card] = Card(
        score="a random number, drawn anew at each eviction",
        source="control, after VaSE, arXiv 2606.03928",
        code="terarachang/VaSE (MIT)",
    )

    @property
    def scores_each_alone(self) -> bool:
        return True

    @property
    def has_kernels(self) -> bool:
        return True

    def scores_paged(self, candidates: PagedCandidates) -> torch.Tensor:
        return candidates.uniform()

    def scores(self, candidates: Candidates, noise: Noise) -> torch.Tensor:
        _, heads, tokens = candidates.shape
        return noise.uniform(heads, tokens)
