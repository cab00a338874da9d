"""`evict-large-range` and `evict-small-range`: the value range alone decides, either way round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvpolicy.policies.base import Candidates, Card, Needs, Noise
from kvpolicy.policies.paged import PagedCandidates
from kvpolicy.policies.selecting import ScoredPolicy
from kvpolicy.policies.value_spread import Measure, value_spread


@dataclass(frozen=True)
class EvictLargeRange(ScoredPolicy):
    """Evicts the tokens whose values spread most: VaSE's harmful control (``evict_large_range`` of its code).

    Its GSM8K pilot (arXiv 2606.03928) lost most this way: 14.3 % accuracy, against 53.2 % at random
    and 88.0 % with the full cache. Whether it spares sinks and recent tokens is not known; here both
    are protected as in VaSE, so that the order of eviction is all that differs from `random`.

    Parameters
    ----------
    measure : {"range", "variance", "l2"}
        Of a token's value vector, per KV head.
    """

    name: ClassVar[str] = "evict-large-range"
    card: ClassVar[Card] = Card(
        score="value range: the smallest stay, a control meant to do harm",
        source="VaSE, arXiv 2606.03928",
        code="terarachang/VaSE (MIT)",
    )
    keeps: ClassVar[int] = -1  # sign of the measure in the score

    measure: Measure = "range"

    def needs(self, period: int) -> Needs:
        return Needs(values=True)

    @property
    def scores_each_alone(self) -> bool:
        return True

    @property
    def has_kernels(self) -> bool:
        return self.measure == "range"

    def scores_paged(self, candidates: PagedCandidates) -> torch.Tensor:
        from kvpolicy.kernels.value_range_paged import value_range_paged

        return self.keeps * value_range_paged(candidates.values, candidates.rows)

    def scores(self, candidates: Candidates, noise: Noise) -> torch.Tensor:
        return self.keeps * value_spread(candidates.require("values"), self.measure)


@dataclass(frozen=True)
class EvictSmallRange(EvictLargeRange):
    """Keeps the tokens whose values spread most, and nothing else but sinks and recent ones.

    VaSE's reserve without attention and without sampling; not a method of the paper, but the
    counterpart that shows what `evict-large-range` costs.

    Parameters
    ----------
    measure : {"range", "variance", "l2"}
        Of a token's value vector, per KV head.
    """

    name: ClassVar[str] = "evict-small-range"
    card: ClassVar[Card] = Card(
        score="value range: the largest stay",
        source="control, after VaSE, arXiv 2606.03928",
        code="terarachang/VaSE (MIT)",
    )
    keeps: ClassVar[int] = 1
