"""How many tokens the decode steps of one request attended to, where its policy reads a part of the cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

_ATTRIBUTE = "_kvpolicy_reads"


@dataclass
class Reads:
    """Tokens read by one request's decode steps, per layer and head, and the summaries of its pages.

    The newest step is held apart: under overlap scheduling one more is computed than the request has tokens for.
    """

    steps: int = 0
    total: float = 0.0
    peak: float = 0.0
    newest: tuple[int, float] = (0, 0.0)  # tokens of the text up to that step's own, tokens read
    summaries: dict[int, torch.Tensor] = field(default_factory=dict)  # per layer, of the complete pages so far
    summary_bytes: int = 0

    def step(self, length: int, tokens: float) -> None:
        """A decode step attended to `tokens` of its `length` tokens, mean over layers and heads."""
        self._count_newest()
        self.newest = length, tokens

    def summarised(self, layer: int, summaries: torch.Tensor) -> None:
        """Keep the `summaries` of one layer's complete pages."""
        self.summaries[layer] = summaries
        self.summary_bytes = sum(tensor.nbytes for tensor in self.summaries.values())

    def forget_pages(self) -> None:
        """The row is given back; its pages will be computed anew, if at all."""
        self.summaries.clear()

    def statistics(self, computed: int) -> dict[str, float]:
        """Of a finished request; `computed` is how many tokens it has keys and values of.

        ``tokens_read_mean`` and ``tokens_read_peak`` are over its decode steps, each counted by its mean over the heads
        and over all layers, those that read everything included; 0 without a decode step. ``page_summary_bytes`` is
        what this process held beside the cache.
        """
        if self.newest[0] > computed:
            self.newest = 0, 0.0
        self._count_newest()
        return {
            "tokens_read_mean": self.total / self.steps if self.steps else 0.0,
            "tokens_read_peak": self.peak,
            "page_summary_bytes": self.summary_bytes,
        }

    def _count_newest(self) -> None:
        length, tokens = self.newest
        if length:
            self.steps, self.total, self.peak = self.steps + 1, self.total + tokens, max(self.peak, tokens)
            self.newest = 0, 0.0


def reads_of(req: Any) -> Reads:
    """What travels with SGLang's `Req`, made at first use."""
    reads: Reads | None = getattr(req, _ATTRIBUTE, None)
    if reads is None:
        reads = Reads()
        setattr(req, _ATTRIBUTE, reads)
    return reads
