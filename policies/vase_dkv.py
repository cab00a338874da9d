"""`vase-dkv`: key and value energy under a random projection that is redrawn at each eviction."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from kvpolicy.kernels.projected_energy import projected_energy
from kvpolicy.policies.base import Candidates, Needs, Noise
from kvpolicy.policies.selecting import ScoredPolicy


@dataclass(frozen=True)
class VaseDKV(ScoredPolicy):
    """VaSE-DKV (arXiv 2606.03928; mode ``cur_resample_gauss`` of its code, MIT).

    Score of a token: ``sum_r (k G)_r^2 * sum_r (v G)_r^2`` with ``G ~ N(0, 1) / sqrt(rank)``, drawn
    anew for every layer and eviction, the same for keys, values and all KV heads. The redrawing is
    the stochastic part: a token that one projection misses can survive the next.

    The published score is divided by its sum over the candidates, which changes no ranking within
    a head, and is left out here. Kept tokens stay in age order, where the published code keeps
    order of selection; without pooling the two select alike.

    Parameters
    ----------
    sinks : int
        Published: 4 (their score is set to 1, the largest possible).
    recent : int or None
        Published: 64 = the eviction period, which None stands for.
    rank : int
        Columns of the projection; published: 20.
    """

    name: ClassVar[str] = "vase-dkv"
    needs: ClassVar[Needs] = Needs(keys=True, values=True)

    rank: int = field(default=20, metadata={"least": 1})

    def projection(self, head_dim: int, noise: Noise) -> torch.Tensor:
        """``[L, head_dim, rank]`` fp32 of this eviction."""
        return noise.normal(head_dim, self.rank) / math.sqrt(self.rank)

    def scores(self, candidates: Candidates, noise: Noise) -> torch.Tensor:
        keys, values = candidates.require("keys"), candidates.require("values")
        return projected_energy(keys, values, self.projection(keys.shape[-1], noise))
