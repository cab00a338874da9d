"""Bookkeeping shared by all score-based policies: sinks, recent tokens, top-k, age order."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch

from kvpolicy.policies.base import Candidates, Noise, Policy
from kvpolicy.policies.paged import PagedCandidates, PagedChoice

LIFTED = 1e30  # a score of at least this is kept before all others


def keep_highest(
    scores: torch.Tensor, n_keep: int, *, sinks: int = 0, recent: int = 0, age_order: bool = True
) -> torch.Tensor:
    """Indices of the `n_keep` highest scores per row, sinks and recent tokens always among them.

    Of tokens with equal scores the first are kept, on any device. A score that is NaN counts as the highest of all
    but the sinks' and the recent tokens': what such a token does to the output is for the model to show.

    Parameters
    ----------
    scores : ``[..., N]`` float
    sinks, recent : int
        How many of the oldest and of the newest tokens are kept whatever their score.
    age_order : bool
        Sort the kept indices ascending, so that row order stays age order. False leaves them in
        order of selection, as the published VaSE, SnapKV and LagKV code does; equal scores then
        fall as `torch.topk` lets them.

    Returns
    -------
    int64 ``[..., n_keep]``.
    """
    n = scores.shape[-1]
    assert sinks + recent <= n_keep <= n, f"{sinks = } + {recent = } <= {n_keep = } <= {n = } must hold"
    highest = torch.finfo(scores.dtype).max
    scores = scores.nan_to_num(nan=highest, posinf=torch.inf, neginf=-torch.inf)
    if sinks or recent:
        scores[..., :sinks] = torch.inf
        scores[..., n - recent :] = torch.inf
    if not age_order or n_keep == 0:
        return scores.topk(n_keep, dim=-1).indices
    lowest = scores.topk(n_keep, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    shape = (*scores.shape[:-1], n_keep)
    if scores.device.type == "cpu":
        found = (scores >= lowest).flatten().nonzero()
        if len(found) == math.prod(shape):  # no other token has the lowest score that is kept
            return (found.view(-1, n_keep) - torch.arange(0, scores.numel(), n)[:, None]).view(shape)
    above, equal = scores > lowest, scores == lowest
    room = n_keep - above.sum(dim=-1, keepdim=True)
    kept = above | (equal & (equal.cumsum(dim=-1) <= room))
    if kept.device.type == "cpu":
        return kept.nonzero()[:, -1].view(shape)
    return kept.nonzero_static(size=math.prod(shape))[:, -1].view(shape)  # the size is known: no wait for the device


def with_prompt(scores: torch.Tensor, candidates: Candidates, room: int) -> torch.Tensor:
    """Lift the prompt's tokens above all others, for methods that never evict the prompt.

    The methods that do so published no rule for a prompt that is longer than their budget. Here, where `room` tokens
    can be kept beside the recent ones and the prompt has more than that many left, its newest are lifted above its
    older ones, so that the end of a long prompt stays (and sinks, where the policy keeps them).

    Parameters
    ----------
    scores : float ``[L, H_kv, N]``, a size of 1 for L or H_kv as in :meth:`ScoredPolicy.scores`; finite, below 1e30
    room : int
        Tokens that may be kept beside the recent ones.
    """
    positions = candidates.require("positions")[: scores.shape[0], : scores.shape[1]]
    prompt = positions < candidates.prompt_len
    overfull = prompt.sum(dim=-1, keepdim=True) > room
    lifted = torch.where(overfull, LIFTED * (1 + positions / max(1, candidates.prompt_len)), LIFTED).to(scores.dtype)
    return torch.where(prompt, lifted, scores)


def newest_beside_prompt(recent: int, prompt_len: int, n_keep: int) -> int:
    """How many of the newest tokens stay, under a method that never evicts the prompt and protects `recent` ones.

    Beside a prompt that would leave decode tokens less than a quarter of `n_keep` (or 128, if that is less), that many;
    else `recent`. The published code of such methods evicts every decode token then; this rule is ours.
    """
    least = min(128, n_keep // 4)
    return max(recent, least) if prompt_len > n_keep - least else recent


def window_of_recent(name: str, window: int, recent: int) -> None:
    """Raise ValueError unless all queries of the window belong to recent tokens.

    A query older than a token that it scores would need a causal mask over tokens that no longer
    lie in a row.
    """
    if window > recent:
        raise ValueError(
            f"{name} scores with the queries of the newest {window} tokens but protects only {recent}; "
            f"its recent option must be at least {window}, or its window option at most {recent}"
        )


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

    @property
    def scores_each_alone(self) -> bool:
        """Whether a token's score depends on nothing but its own key and value and on random numbers."""
        return False

    def reads_order(self, period: int) -> bool:
        return not self.scores_each_alone or self.recent_count(period) > period

    def recent_count(self, period: int) -> int:
        """Tokens of the recent window for an eviction every `period` tokens."""
        return period if self.recent is None else self.recent

    def forced(self, period: int) -> int:
        return self.sinks + self.recent_count(period)

    @abstractmethod
    def scores(self, candidates: Candidates, noise: Noise) -> torch.Tensor:
        """Score of every resident token, float ``[L, H_kv, N]``; higher is kept.

        A dimension of size 1 in place of L or H_kv means that all layers or heads share it.
        """

    def newest(self, candidates: Candidates, n_keep: int, period: int) -> int:
        """Newest tokens that are kept at this eviction."""
        return self.recent_count(period)

    def protected(self, scores: torch.Tensor, candidates: Candidates, n_keep: int, period: int) -> torch.Tensor:
        """`scores` with those of tokens lifted to `LIFTED` or more that are kept beside sinks and recent ones."""
        return scores

    @property
    def has_kernels(self) -> bool:
        """Whether :meth:`scores_paged` is there, under this policy's options."""
        return False

    def scores_paged(self, candidates: PagedCandidates) -> torch.Tensor:
        """The same scores for all requests of a launch: float ``[L, H_kv, T]``."""
        raise NotImplementedError

    def select_paged(self, candidates: PagedCandidates) -> PagedChoice:
        """What :meth:`select` keeps, for all requests of a launch."""
        from kvpolicy.kernels.keep_highest_paged import keep_highest_paged

        rows = candidates.rows
        recent = [self.recent_count(candidates.period)] * len(rows.lengths)
        scores = self.scores_paged(candidates)
        return PagedChoice(*keep_highest_paged(scores, rows, candidates.n_keep, sinks=self.sinks, recent=recent))

    def select(self, candidates: Candidates, n_keep: int, period: int, noise: Noise) -> torch.Tensor:
        scores = self.protected(self.scores(candidates, noise), candidates, n_keep, period)
        kept = keep_highest(scores, n_keep, sinks=self.sinks, recent=self.newest(candidates, n_keep, period))
        return kept.expand(*candidates.shape[:2], n_keep)
