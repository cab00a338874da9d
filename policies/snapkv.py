"""`snapkv`: the tokens that recent queries attend to most, decided anew at every eviction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvpolicy.kernels.window_attention import Domain
from kvpolicy.policies.base import Candidates, Card, Noise
from kvpolicy.policies.paged import PagedCandidates, PagedChoice
from kvpolicy.policies.selecting import keep_highest
from kvpolicy.policies.windowed import Window, WindowedPolicy

VARIANTS = {
    "vase": Window(None, "avg", 5, "mean", "candidates"),
    "rkv": Window(8, "max", 7, "max", "candidates"),
    "kvpress": Window(64, "avg", 5, "mean", "all"),
}


@dataclass(frozen=True)
class SnapKV(WindowedPolicy):
    """SnapKV (arXiv 2404.14469) applied while decoding, which the paper does not do: it compresses prompts.

    Three forms are in circulation, and a result should say which it used:

    * ``variant:vase`` (default): the SnapKV of VaSE's tables (mode ``attn``). Window and recent tokens
      are one eviction period (64 there), average pooling over 5, softmax over the scored tokens only,
      mean over the query heads of a group.
    * ``variant:rkv``: the baseline of the R-KV and TriAttention repositories. Window 8, max pooling
      over 7, the group's largest raw logit before the softmax. Published eviction period: 128.
    * ``variant:kvpress``: NVIDIA's ``DecodingPress(SnapKVPress)``. Window 64, average pooling over 5,
      softmax over all tokens, causal in the window. Published: every 512 tokens to a budget of 2048.
      That code rotates all buffered queries by the newest position; here each has its own.

    No form protects sinks. The selection is per KV head, where the official code selects per query
    head of an expanded cache.

    Parameters
    ----------
    window, pooling, kernel, group, domain
        None: as the variant has it. `window` is the number of queries; ``group:max`` takes the
        largest raw logit of a group, ``group:mean`` the mean attention; ``domain:all`` normalises over
        all resident tokens, ``domain:candidates`` over those that may be evicted.
    recent : int or None
        Newest tokens, always kept, at least the window; None: the window.
    sinks : int
        Oldest tokens that are always kept; 0 in all three forms.
    """

    name: ClassVar[str] = "snapkv"
    card: ClassVar[Card] = Card(
        score="attention from the newest queries, pooled over neighbouring tokens",
        source="SnapKV, arXiv 2404.14469",
        code="FasterDecoding/SnapKV (Apache-2.0)",
    )

    variant: Literal["vase", "rkv", "kvpress"] = "vase"
    domain: Domain | None = None

    @property
    def published(self) -> Window:
        window = VARIANTS[self.variant]
        return window if self.domain is None else window._replace(domain=self.domain)

    def select(self, candidates: Candidates, n_keep: int, period: int, noise: Noise) -> torch.Tensor:
        attention = self.attention(candidates, period)
        newest = attention.new_full((*attention.shape[:-1], self.recent_count(period)), torch.inf)
        return keep_highest(torch.cat([attention, newest], dim=-1), n_keep, sinks=self.sinks)

    @property
    def has_kernels(self) -> bool:
        return True

    def select_paged(self, candidates: PagedCandidates) -> PagedChoice:
        from kvpolicy.kernels.keep_highest_paged import keep_highest_paged

        rows, recent = candidates.rows, self.recent_count(candidates.period)
        scores = candidates.attention([tokens - recent for tokens in rows.lengths], **self.how)
        newest = [recent] * len(rows.lengths)
        return PagedChoice(*keep_highest_paged(scores, rows, candidates.n_keep, sinks=self.sinks, recent=newest))
