"""`h2o`: half of the budget for the newest tokens, half for those that attention has added up on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvpolicy.kernels.decode_attention import decode_attention
from kvpolicy.policies.base import Candidates, Card, Needs, Noise, Policy
from kvpolicy.policies.selecting import keep_highest


@dataclass(frozen=True)
class H2O(Policy):
    """H2O (arXiv 2306.14048) while decoding, per KV head: recent tokens and heavy hitters.

    Three methods go by this name in comparisons; this is the first:

    * the paper's: attention of every query so far, added up per token;
    * the baseline of the R-KV repository: the attention of the last query alone, nothing added up;
    * the baseline of the EpiKV repository: added up, but one set for all layers and heads, 4 sinks, 128 recent tokens.

    A token's score is the attention that each decode query paid it since it was appended, softmax over the tokens
    resident at that step. An evicted token forgets its score.

    Differences from the paper and its code:

    * Rows of the prompt's queries are not recorded, so no prompt token starts with a lead. There they count, and early
      tokens collect more rows than late ones.
    * The mean over a KV head's query heads is added up, and each KV head keeps its own tokens; there each query head
      does. How to treat grouped queries is not published.
    * The code evicts one token at each step; here `kv_period` of them at a time (``kv_period=1`` is that rhythm).
    * The code sets both halves as shares of the prompt's length, 0.1 each. Here the split is equal, of `kv_budget`.

    As published it needs every row of every attention matrix; here rows of decode queries are recomputed.

    Parameters
    ----------
    recent_share : float
        Share of the budget for the newest tokens, rounded down. Published: half.
    sinks : int
        Oldest tokens that are always kept; none in the paper.
    """

    name: ClassVar[str] = "h2o"
    card: ClassVar[Card] = Card(
        score="attention of all decode queries, added up; half of the budget is for the newest tokens",
        source="H2O, arXiv 2306.14048",
        code="FMInference/H2O (no licence file found)",
        flash_attention=False,
    )
    accumulates: ClassVar[bool] = True

    recent_share: float = 0.5
    sinks: int = 0

    def needs(self, period: int) -> Needs:
        return Needs(keys=True, queries=period)

    def forced(self, period: int) -> int:
        """The sinks; the recent tokens are a share of the budget and beside these."""
        return self.sinks

    def check(self, budget: int, period: int) -> None:
        super().check(budget, period)
        if self.sinks + (recent := self._recent(budget)) >= budget:
            raise ValueError(
                f"kv_budget={budget} leaves h2o no heavy hitters: recent_share:{self.recent_share:g} is {recent} "
                f"recent tokens, beside {self.sinks} sinks, and both together must be less than the budget; "
                "raise kv_budget, or lower recent_share or sinks"
            )

    def observe(self, candidates: Candidates, period: int) -> torch.Tensor:
        mass = candidates.require("statistic").nan_to_num(nan=0.0)
        queries, keys = candidates.require("queries"), candidates.require("keys")
        for layer, rows in enumerate(decode_attention(queries, keys, candidates.unseen)):
            mass[layer] += rows.mean(dim=1).sum(dim=1)
        return mass

    def select(self, candidates: Candidates, n_keep: int, period: int, noise: Noise) -> torch.Tensor:
        recent = self._recent(n_keep)
        return keep_highest(candidates.require("statistic"), n_keep, sinks=self.sinks, recent=recent)

    def _recent(self, budget: int) -> int:
        return int(self.recent_share * budget)
