"""`vase-attnv`: a reserve of large value ranges, the rest sampled in proportion to recent attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from kvpolicy.kernels.weighted_sample import gumbel_keys
from kvpolicy.kernels.window_attention import Pooling, window_attention
from kvpolicy.policies.base import Candidates, Card, Needs, Noise, Policy
from kvpolicy.policies.paged import PagedCandidates, PagedChoice
from kvpolicy.policies.selecting import keep_highest, window_of_recent
from kvpolicy.policies.value_spread import value_spread

SAMPLING, RESERVE = 0, 1  # streams of random numbers


@dataclass(frozen=True)
class VaseAttnV(Policy):
    """VaSE-AttnV (arXiv 2606.03928; mode ``range_sink_sample_attn --smooth`` of its code, MIT).

    Per layer and KV head, of the tokens older than the `recent` newest ones: the `n_value_reserve`
    tokens with the largest value range stay for certain, sinks among them; of the others as many as
    the budget has room for are drawn without replacement, in proportion to the attention that the
    newest `window` queries pay them (softmax over these tokens only, mean over the queries, pooled,
    mean over the query heads of the group). The published code draws with ``torch.multinomial``; this
    draws the same distribution by Gumbel top-k from numbers keyed by the request's seed.

    Differences from the published code: attention stays in fp32 where it is cast to the model's dtype;
    kept tokens stay in age order, where it keeps reserve first, then order of the draws, so that from
    the second eviction on its pooling averages tokens that were no neighbours.

    Parameters
    ----------
    sinks : int
        Oldest tokens, part of the reserve; published: 4.
    recent : int or None
        Newest tokens, always kept; published: 64 = the eviction period, which None stands for.
    window : int or None
        Queries that score, at most `recent`; published: 64 = the eviction period, which None stands for.
    n_value_reserve : float
        Share of the budget below 1, else a count. Published scripts: a quarter of the budget.
    reserve : {"range", "variance", "l2", "random", "off"}
        Ablation: what the reserve is chosen by. ``off`` leaves the sinks alone in it.
    sample : bool
        Ablation: false keeps the tokens with the most attention instead of drawing.
    pooling : {"avg", "max", "none"}
        Published: avg.
    kernel : int
        Tokens that are pooled into one, odd; published: 5.
    temperature : float
        Of the attention's softmax; published: 1.
    """

    name: ClassVar[str] = "vase-attnv"
    card: ClassVar[Card] = Card(
        score="value range for a reserve; the others are drawn in proportion to the newest queries' attention",
        source="VaSE, arXiv 2606.03928",
        code="terarachang/VaSE (MIT)",
    )

    sinks: int = 4
    recent: int | None = None
    window: int | None = field(default=None, metadata={"least": 1})
    n_value_reserve: float = 0.25
    reserve: Literal["range", "variance", "l2", "random", "off"] = "range"
    sample: bool = True
    pooling: Pooling = "avg"
    kernel: int = field(default=5, metadata={"least": 1, "odd": True})
    temperature: float = field(default=1.0, metadata={"least": 1e-6})

    def needs(self, period: int) -> Needs:
        reads_values = self.reserve not in ("random", "off")
        return Needs(keys=True, values=reads_values, queries=self._window(period))

    def forced(self, period: int) -> int:
        return self.sinks + self._recent(period)

    def check(self, budget: int, period: int) -> None:
        super().check(budget, period)
        window_of_recent(self.name, self._window(period), self._recent(period))
        reserved, room = self._reserved(budget), budget - self._recent(period)
        if not self.sinks <= reserved <= room:
            raise ValueError(
                f"n_value_reserve:{self.n_value_reserve:g} is {reserved} of kv_budget={budget} tokens for {self.name}; "
                f"it must be at least the {self.sinks} sinks and at most the {room} tokens beside the recent ones; "
                "raise kv_budget, or set n_value_reserve"
            )

    def select(self, candidates: Candidates, n_keep: int, period: int, noise: Noise) -> torch.Tensor:
        _, heads, tokens = candidates.shape
        recent = self._recent(period)
        older = tokens - recent
        attention = window_attention(
            candidates.require("queries"),
            candidates.require("keys"),
            older,
            domain="candidates",
            group="mean",
            pooling=self.pooling,
            kernel=self.kernel,
            temperature=self.temperature,
        )
        scores = attention.double()
        if self.sample:
            scores = gumbel_keys(attention, noise.uniform(heads, older, stream=SAMPLING))
        reserved = min(self._reserved(n_keep), n_keep - recent)
        scores.scatter_(-1, self._most_spread(candidates, older, reserved, noise), torch.inf)
        newest = scores.new_full((*scores.shape[:-1], recent), torch.inf)
        return keep_highest(torch.cat([scores, newest], dim=-1), n_keep)

    def _most_spread(self, candidates: Candidates, older: int, reserved: int, noise: Noise) -> torch.Tensor:
        """int64 ``[L, H_kv, reserved]``: the reserve, sinks included."""
        if self.reserve == "random" or self.reserve == "off":
            spread = noise.uniform(candidates.shape[1], older, stream=RESERVE)
        else:
            spread = value_spread(candidates.require("values")[:, :, :older], self.reserve)
        return keep_highest(spread, reserved, sinks=self.sinks)

    @property
    def has_kernels(self) -> bool:
        return self.reserve in ("range", "random", "off")

    def select_paged(self, candidates: PagedCandidates) -> PagedChoice:
        from kvpolicy.kernels.gumbel_keys_paged import gumbel_keys_paged
        from kvpolicy.kernels.keep_highest_paged import keep_highest_paged
        from kvpolicy.kernels.value_range_paged import value_range_paged

        rows, recent = candidates.rows, self._recent(candidates.period)
        attention = candidates.attention(
            [tokens - recent for tokens in rows.lengths],
            domain="candidates",
            group="mean",
            pooling=self.pooling,
            kernel=self.kernel,
            temperature=self.temperature,
        )
        if self.reserve == "range":
            spread = value_range_paged(candidates.values, rows).double()
        else:
            spread = candidates.uniform(RESERVE)
        newest = attention.isposinf()
        reserved = [min(self._reserved(kept), kept - recent) for kept in candidates.n_keep]
        none = [0] * len(rows.lengths)
        most, starts = keep_highest_paged(
            spread.masked_fill(newest, -torch.inf), rows, reserved, sinks=self.sinks, recent=none
        )
        scores = attention.double()
        if self.sample:
            keys = (candidates.seeds, candidates.evictions, candidates.layers, candidates.first_head, SAMPLING)
            scores = gumbel_keys_paged(attention, rows, *keys)
        first = rows.starts[:-1].repeat_interleave(starts.diff(), output_size=sum(reserved))
        scores = scores.scatter(-1, most + first, torch.inf).masked_fill(newest, torch.inf)
        return PagedChoice(*keep_highest_paged(scores, rows, candidates.n_keep, sinks=0, recent=none))

    def _reserved(self, budget: int) -> int:
        """Tokens of the reserve, sinks included."""
        if self.reserve == "off":
            return self.sinks
        share = self.n_value_reserve
        return int(share * budget) if share < 1 else int(share)

    def _recent(self, period: int) -> int:
        return period if self.recent is None else self.recent

    def _window(self, period: int) -> int:
        return period if self.window is None else self.window
