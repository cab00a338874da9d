"""What one request has in the cache: its state between evictions and its statistics.

Two lengths never mix: the true length (tokens whose K/V were ever computed) drives RoPE, the
resident length (slots in the request's row) drives the cache. They differ by `offset`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpolicy.sglang_plugin.token_state import TokenState

_ATTRIBUTE = "_kvpolicy_residency"


@dataclass
class Residency:
    """State of one request, all lengths in tokens per layer and KV head.

    Decode steps need no bookkeeping of their own: between two evictions the resident length grows by
    one a step, so sums over steps are arithmetic series, added up when a stretch of steps ends.
    """

    published: int | None = None  # prompt length that SGLang has put into its radix tree
    start: int | None = None  # resident length at the last prefill or eviction; steps are counted from it
    offset: int = 0  # tokens evicted since the last prefill
    evictions: int = 0
    tokens_evicted: int = 0
    deferred: int = 0  # evictions put off to a later step for want of free slots
    seconds: float = 0.0  # of the scheduler's time spent on evictions
    steps: int = 0
    resident_sum: float = 0.0
    full_sum: float = 0.0
    peak: int = 0
    barred_before: bool | None = None  # SGLang's skip_radix_cache_insert, as it was before the first compaction
    settled: int = 0  # tokens of the row, the oldest, whose precision in a packed cache is decided
    protected_end: float = 0.0  # share of layers, heads and tokens with a protected row, when the request let go
    tokens: TokenState | None = None  # made at first use
    trace: Any = None

    def prefilled(self, length: int) -> None:
        """A prefill, or one chunk of it, of `length` tokens in all has been computed and published."""
        self.published = self.start = length
        self.peak = max(self.peak, length)

    def advance(self, resident: int) -> None:
        """Count the decode steps that took the row from `start` to `resident` tokens."""
        if self.start is None:  # a request that ends with its prefill
            self.start = resident
        if (steps := resident - self.start) > 0:
            total = steps * (self.start + 1 + resident) / 2
            self.steps += steps
            self.resident_sum += total
            self.full_sum += total + steps * self.offset
            self.start = resident
        self.peak = max(self.peak, self.start)

    def evicted(self, resident: int, kept: int) -> None:
        """The row was cut from `resident` to `kept` tokens."""
        self.advance(resident)
        self.evictions += 1
        self.tokens_evicted += resident - kept
        self.offset += resident - kept
        self.start = kept

    def retracted(self) -> None:
        """SGLang gave the request's slots back; it will prefill prompt and output anew."""
        self.published = self.start = self.barred_before = self.tokens = self.trace = None
        self.offset = self.settled = 0

    def statistics(self) -> dict[str, float]:
        """Measured residency; means are over decode steps, each counting the tokens it attended to."""
        end = self.start or 0  # a request that was aborted while it waited to be resumed holds nothing
        resident = self.resident_sum / self.steps if self.steps else float(end)
        full = self.full_sum / self.steps if self.steps else float(end + self.offset)
        return {
            "evictions": self.evictions,
            "tokens_evicted": self.tokens_evicted,
            "evictions_deferred": self.deferred,
            "eviction_seconds": self.seconds,
            "decode_steps": self.steps,
            "resident_mean": resident,
            "resident_peak": self.peak,
            "resident_end": end,
            "full_mean": full,
            "full_end": end + self.offset,
        }


def residency_of(req: Any) -> Residency:
    """The state that travels with SGLang's `Req`, made at first use."""
    state = getattr(req, _ATTRIBUTE, None)
    if state is None:
        state = Residency()
        setattr(req, _ATTRIBUTE, state)
    return state
