"""`vase-dkv`: key and value energy under a random projection that is redrawn at each eviction."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from kvpolicy.kernels.projected_energy import projected_energy
from kvpolicy.kernels.projected_energy_paged import LARGEST_RANK
from kvpolicy.policies.base import Candidates, Card, Needs, Noise
from kvpolicy.policies.paged import PagedCandidates
from kvpolicy.policies.selecting import ScoredPolicy


@dataclass(frozen=True)
class VaseDKV(ScoredPolicy):
    """VaSE-DKV (arXiv 2606.03928; mode ``cur_resample_gauss`` of its code, MIT).

    Score of a token: ``sum_r (k G)_r^2 * sum_r (v G)_r^2`` with ``G ~ N(0, 1) / sqrt(rank)``, drawn
    anew for every layer and eviction, the same for keys, values and all KV heads. The redrawing is
    the stochastic part: a token that one projection misses can survive the next.

    The published score is divided by its sum over the candidates, which changes no ranking within
    a head, and is left out here. Kept tokens stay in their places, or in age order in a cache
    of low bits, not in order of selection as in the published code; without pooling all select alike.

    Parameters
    ----------
    sinks : int
        Published: 4 (their score is set to 1, the largest possible).
    recent : int or None
        Published: 64 = the eviction period, which None stands for.
    rank : int
        Columns of the projection; published: 20.
    projection : {"redrawn", "fixed"}
        Ablation: ``fixed`` draws it once per layer and generation, which is ``curdkv`` of the paper's tables.
    """

    name: ClassVar[str] = "vase-dkv"
    card: ClassVar[Card] = Card(
        score="key energy times value energy under a random projection that is redrawn at each eviction",
        source="VaSE, arXiv 2606.03928",
        code="terarachang/VaSE (MIT)",
    )

    rank: int = field(default=20, metadata={"least": 1})
    projection: Literal["redrawn", "fixed"] = "redrawn"

    def needs(self, period: int) -> Needs:
        return Needs(keys=True, values=True)

    def drawn_projection(self, head_dim: int, noise: Noise) -> torch.Tensor:
        """``[L, head_dim, rank]`` fp32 of this eviction."""
        return noise.normal(head_dim, self.rank, redraw=self.projection == "redrawn") / math.sqrt(self.rank)

    @property
    def scores_each_alone(self) -> bool:
        return True

    @property
    def has_kernels(self) -> bool:
        return self.rank <= LARGEST_RANK

    def scores_paged(self, candidates: PagedCandidates) -> torch.Tensor:
        from kvpolicy.kernels.projected_energy_paged import projected_energy_paged

        head_dim = candidates.keys.shape[-1]
        drawn = candidates.normal(head_dim, self.rank, redraw=self.projection == "redrawn") / math.sqrt(self.rank)
        return projected_energy_paged(candidates.keys, candidates.values, candidates.rows, drawn)

    def scores(self, candidates: Candidates, noise: Noise) -> torch.Tensor:
        keys, values = candidates.layer_by_layer("keys"), candidates.layer_by_layer("values")
        return projected_energy(keys, values, self.drawn_projection(keys.shape[-1], noise))
