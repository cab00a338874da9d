"""`keydiff`: the tokens whose keys are least like the average key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional

from kvpolicy.policies.base import Candidates, Card, Needs, Noise
from kvpolicy.policies.selecting import ScoredPolicy


@dataclass(frozen=True)
class KeyDiff(ScoredPolicy):
    """KeyDiff (arXiv 2504.15364) as in NVIDIA's kvpress (``KeyDiffPress``, Apache-2.0), for decoding.

    Per layer and KV head, the score is the negative cosine of a token's key and the anchor, the mean of all
    resident keys, each divided by its norm, sinks and recent tokens included.

    kvpress compresses prompts with it, in one go or block by block, and protects neither sinks nor recent tokens;
    ``sinks:0;recent:0`` does the same here. The defaults protect both, so that the score is all that differs from
    `random`. Official code was not found, and the paper was not read beyond its abstract: what it protects while
    decoding is not known here.

    Parameters
    ----------
    sinks : int
        Oldest tokens that are always kept; kvpress: 0.
    recent : int or None
        Newest tokens that are always kept; kvpress: 0. None: as many as the eviction period.
    """

    name: ClassVar[str] = "keydiff"
    card: ClassVar[Card] = Card(
        score="how little the key resembles the average key",
        source="KeyDiff, arXiv 2504.15364",
        code="none found; port in NVIDIA/kvpress (Apache-2.0)",
    )

    def needs(self, period: int) -> Needs:
        return Needs(keys=True)

    def scores(self, candidates: Candidates, noise: Noise) -> torch.Tensor:
        return torch.stack([_distinctness(keys) for keys in candidates.require("keys")])


def _distinctness(keys: torch.Tensor) -> torch.Tensor:
    """``[H, N, D]`` to ``[H, N]`` fp32."""
    unit = functional.normalize(keys.float(), dim=-1)
    anchor = functional.normalize(unit.mean(dim=1), dim=-1)
    return -(unit @ anchor[..., None]).squeeze(-1)
