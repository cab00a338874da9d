"""`curdkv`: key and value energy, with one fixed projection or with local normalisation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch.nn import functional

from kvpolicy.kernels.projected_energy import projected_energy
from kvpolicy.kernels.projected_energy_paged import LARGEST_RANK
from kvpolicy.policies.base import Candidates, Card, Needs, Noise
from kvpolicy.policies.paged import PagedCandidates
from kvpolicy.policies.selecting import ScoredPolicy


@dataclass(frozen=True)
class CurDKV(ScoredPolicy):
    """CurDKV (arXiv 2509.15038), in the two forms that are in circulation.

    ``variant:fixed`` (default) is "CurDKV" of the VaSE tables (mode ``cur_fixed_gauss``): the score
    of VaSE-DKV, with the projection of each layer drawn once per generation.

    ``variant:windowed`` is the default of kvpress' ``CURPress``, which the author contributed: no
    projection; squared norms of keys and of values, each divided by its sum over a window of
    `window` tokens. The last window of a length that is no multiple of `window` is normalised over
    its own tokens only, and so scores higher than a full one. The windows tile all resident tokens,
    the recent ones included.

    No official repository was found; the paper's own rank and projection could not be checked.

    Parameters
    ----------
    sinks : int
        4 in both sources.
    recent : int or None
        None: as many as the eviction period (VaSE's setting). CURPress compresses prompts and has none.
    rank : int
        Columns of the fixed projection; 20 in both sources.
    window : int
        Tokens of a normalisation window; 16 in CURPress.
    """

    name: ClassVar[str] = "curdkv"
    card: ClassVar[Card] = Card(
        score="key energy times value energy under one fixed random projection",
        source="CurDKV, arXiv 2509.15038",
        code="none found; the author's port is in NVIDIA/kvpress (Apache-2.0)",
    )

    variant: Literal["fixed", "windowed"] = "fixed"
    rank: int = field(default=20, metadata={"least": 1})
    window: int = field(default=16, metadata={"least": 1})

    def needs(self, period: int) -> Needs:
        return Needs(keys=True, values=True)

    def drawn_projection(self, head_dim: int, noise: Noise) -> torch.Tensor:
        """``[L, head_dim, rank]`` fp32, the same at every eviction of a request."""
        return noise.normal(head_dim, self.rank, redraw=False) / math.sqrt(self.rank)

    @property
    def scores_each_alone(self) -> bool:
        return self.variant == "fixed"

    @property
    def has_kernels(self) -> bool:
        return self.variant == "fixed" and self.rank <= LARGEST_RANK

    def scores_paged(self, candidates: PagedCandidates) -> torch.Tensor:
        from kvpolicy.kernels.projected_energy_paged import projected_energy_paged

        drawn = candidates.normal(candidates.keys.shape[-1], self.rank, redraw=False) / math.sqrt(self.rank)
        return projected_energy_paged(candidates.keys, candidates.values, candidates.rows, drawn)

    def scores(self, candidates: Candidates, noise: Noise) -> torch.Tensor:
        if self.variant == "fixed":
            keys, values = candidates.layer_by_layer("keys"), candidates.layer_by_layer("values")
            return projected_energy(keys, values, self.drawn_projection(keys.shape[-1], noise))
        return self._share_of_window(candidates.require("keys")) * self._share_of_window(candidates.require("values"))

    def _share_of_window(self, x: torch.Tensor) -> torch.Tensor:
        """``[L, H, N, D]`` -> ``[L, H, N]``: squared norm over the sum of its window."""
        energy = x.float().square().sum(-1)
        tokens = energy.shape[-1]
        padded = functional.pad(energy, (0, -tokens % self.window))
        windows = padded.view(*padded.shape[:-1], -1, self.window)
        smallest = torch.finfo(windows.dtype).tiny  # a window of zeros has no shares to give
        share: torch.Tensor = windows / windows.sum(-1, keepdim=True).clamp_min(smallest)
        return share.flatten(-2)[..., :tokens]
