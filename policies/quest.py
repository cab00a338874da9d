"""`quest`: each query head reads the pages whose bounds on q·k are highest; everything stays resident."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from kvpolicy.policies.base import Card
from kvpolicy.policies.reading import Reader, ReadingPolicy, ServedModel
from kvpolicy.policies.selecting import keep_highest

# The published simulation never reads fewer.
LEAST_PAGES = 3


@dataclass(frozen=True)
class Quest(ReadingPolicy):
    """Quest (arXiv 2406.10774). It saves no memory: nothing is evicted, and page bounds are kept beside the cache
    (2 numbers per channel and page: 1/16 of the cache at the published page size).

    `kv_budget` counts the tokens that one query head reads in one layer at one decode step; ``kv_period`` has no
    meaning. Of every page of `page` tokens the smallest and the largest value of each key channel (after RoPE) are
    kept; a page's score for a query is ``Σ_d max(q_d·max_d, q_d·min_d)``, an upper bound on q·k of its tokens.
    ``budget // page`` pages are read per query head, in all layers but the first `dense_layers`, and all tokens while
    they fit into the budget. Prefill is dense, as published.

    Two forms are published, and they differ in the newest page. The simulation of the evaluation scripts ranks it like
    any other, incomplete or not; the kernels always read it and rank the others for the rest of the page budget. This
    is the latter: the newest token always attends to itself. Each query head of a group chooses for itself from the
    bounds of the KV head it shares, as the simulation does; the kernels have no shared KV heads.

    Departures. The simulation rounds the length itself down to pages, so that it leaves out a page of almost every text
    that is shorter than the budget, and it reads 3 pages where the budget is smaller. Here everything is read while it
    fits, and a budget below 3 pages is refused, so that beyond the dense layers no head reads more than the budget.

    Parameters
    ----------
    page : int
        Tokens of a page; published: 16.
    dense_layers : int
        Layers, from the first on, that read everything; published: 2.
    """

    name: ClassVar[str] = "quest"
    card: ClassVar[Card] = Card(
        score="upper bound on q·k from the channel-wise min and max of a page's keys; reads a part, saves no memory",
        source="Quest, arXiv 2406.10774",
        code="mit-han-lab/Quest (MIT)",
    )
    per_query_head: ClassVar[bool] = True

    page: int = field(default=16, metadata={"least": 1})
    dense_layers: int = 2

    def check(self, budget: int, period: int) -> None:
        if budget < LEAST_PAGES * self.page:
            raise ValueError(
                f"kv_budget={budget} is less than the {LEAST_PAGES} pages of {self.page} tokens that {self.name} reads "
                f"at least, so it must be at least {LEAST_PAGES * self.page}; raise kv_budget, or lower the page option"
            )

    def reader(self, model: ServedModel) -> Reader:
        return self

    def reads_all(self, layer: int, length: int, budget: int) -> bool:
        return layer < self.dense_layers or length <= budget

    def summarise(self, keys: torch.Tensor, first: int, layer: int) -> torch.Tensor:
        """``[H_kv, n, 2·D]``: smallest and largest value of each channel, in the cache's dtype, so exact."""
        return torch.cat([keys.amin(dim=2), keys.amax(dim=2)], dim=-1)

    def choose(
        self, query: torch.Tensor, summaries: torch.Tensor, length: int, budget: int, layer: int
    ) -> torch.Tensor:
        """Bool ``[H_q, pages]``; of pages with equal scores the oldest are read."""
        older = (length - 1) // self.page  # pages before the newest
        smallest, largest = summaries[:, :older].float().transpose(1, 2).chunk(2, dim=1)
        grouped = query.float().view(len(summaries), -1, query.shape[-1])
        # A positive channel of the query meets the largest value, a negative one the smallest.
        bounds = grouped.clamp(min=0) @ largest + grouped.clamp(max=0) @ smallest
        read = keep_highest(bounds.flatten(0, 1), min(older, budget // self.page - 1))
        pages = torch.zeros(len(query), older + 1, dtype=torch.bool, device=query.device)
        pages[:, older] = True
        return pages.scatter_(1, read, True)
