"""Bookkeeping shared by all score-based policies: sinks, recent tokens, top-k, age order."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch

from kvpolicy.policies.base import Candidates, Noise, Policy


def keep_highest(
    scores: torch.Tensor, n_keep: int, *, sinks: int = 0, recent: int = 0, age_order: bool = True
) -> torch.Tensor:
    """Indices of the `n_keep` highest scores per row, sinks and recent tokens always among them.

    Parameters
    ----------
    scores : ``[..., N]`` float
    sinks, recent : int
        How many of the oldest and of the newest tokens are kept whatever their score.
    age_order : bool
        Sort the kept indices ascending, so that row order stays age order. False leaves them in
        order of selection, as the published VaSE, SnapKV and LagKV code does.

    Returns
    -------
    int64 ``[..., n_keep]``.
    """
    n = scores.shape[-1]
    assert sinks + recent <= n_keep <= n, f"{sinks = } + {recent = } <= {n_keep = } <= {n = } must hold"
    if sinks or recent:
        scores = scores.clone()
        scores[..., :sinks] = torch.inf
        scores[..., n - recent :] = torch.inf
    kept = scores.topk(n_keep, dim=-1, sorted=not age_order).indices
    return kept.sort(dim=-1).values if age_order else kept


@dataclass(frozen=True)
class ScoredPolicy(Policy):
    """A policy that is one score per token; the highest stay.

    Parameters
    ----------
    sinks : int
        Oldest tokens that are always kept.
    recent : int or None
        Newest tokens that are always kept; None means as many as the eviction period.
    """

    sinks: int = 4
    recent: int | None = None

    def recent_count(self, period: int) -> int:
        """Tokens of the recent window for an eviction every `period` tokens."""
        return period if self.recent is None else self.recent

    def forced(self, period: int) -> int:
        return self.sinks + self.recent_count(period)

    @abstractmethod
    def scores(self, candidates: Candidates, noise: Noise) -> torch.Tensor:
        """Score of every resident token, float ``[L, H_kv, N]``; higher is kept."""

    def select(self, candidates: Candidates, n_keep: int, period: int, noise: Noise) -> torch.Tensor:
        scores = self.scores(candidates, noise)
        return keep_highest(scores, n_keep, sinks=self.sinks, recent=self.recent_count(period))
