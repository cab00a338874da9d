"""When the tokens of a packed cache get a protected row, and when they lose it.

* A token is decoded into a protected row. When `recent` newer ones follow a block of them, the block's widest values,
  per layer and KV head, keep their rows, as many as the share of the cache format allows; the others stay with their
  codes, which were written with them, so that nothing is written then.
* A prompt is decided on as it is prefilled: its sinks, its newest tokens and the widest of the rest get rows.
* At an eviction the rows of kept tokens move with them. Beside sinks and recent tokens the widest keep theirs, as many
  as the share of what is kept allows.

So a row is only ever lost, never won back. Slots that SGLang gives back lose theirs before any slot gets one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvpolicy.kernels.value_range import value_range
from kvpolicy.quant.cache_format import SINKS, CacheFormat
from kvpolicy.quant.protection import widest
from kvpolicy.sglang_plugin.protected_rows import HeldRows, ProtectedRows


class Span(NamedTuple):
    """Tokens ``[first, last)`` of a prefill batch that compete for `allowed` rows."""

    first: int
    last: int
    allowed: int


class Kept(NamedTuple):
    """What an eviction carries over: places int64 ``[L, H, m]`` among the kept tokens, and their rows."""

    places: torch.Tensor
    rows: HeldRows


class Protection:
    """The protected rows of one scheduler process at work.

    Everything here is launched on the stream that the caller is on, and in the order of the calls.
    """

    def __init__(self, rows: ProtectedRows, cache_format: CacheFormat) -> None:
        self.rows = rows
        self._format = cache_format
        self._released: list[torch.Tensor] = []
        self._always: torch.Tensor | None = None  # bool [n] of the prefill under way
        self._spans: list[Span] = []

    def released(self, slots: torch.Tensor) -> None:
        """SGLang gave slots back; their rows are free before the next call gives any away."""
        self._released.append(slots.to(torch.int64, copy=True))

    def cleared(self) -> None:
        """SGLang gave all slots back."""
        self._released.clear()
        self.rows.clear()

    def settle_released(self) -> None:
        """Free the rows of slots that were given back."""
        if self._released:
            self.rows.give_back(torch.cat(self._released))
            self._released.clear()

    def before_decode(self, slots: torch.Tensor) -> None:
        """The next forward pass decodes one token into each of these slots."""
        self.settle_released()
        self.rows.take(slots.to(torch.int64))

    def before_prefill(self, chunks: Sequence[tuple[int, int, int, int]], device: torch.device) -> None:
        """The next forward pass is a prefill.

        Parameters
        ----------
        chunks : for each request ``(start, end, length, recent)``
            Which of its tokens are computed, how many the whole prompt has, how many of its newest are protected.
        """
        self.settle_released()
        always, self._spans, first = [], [], 0
        for start, end, length, recent in chunks:
            low, high = max(start, min(SINKS, end)), max(start, min(end, length - recent))
            position = torch.arange(start, end)
            always.append((position < SINKS) | (position >= length - recent))
            if low < high:
                span = Span(first + low - start, first + high - start, self._allowed(low, high))
                self._spans.append(span)
            first += end - start
        self._always = torch.cat(always).to(device, non_blocking=True)

    def choose(self, layer: int, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Give rows to tokens of the prefill under way before its `values` (``[n, H, D]`` of one layer) are written."""
        if self._always is None:  # SGLang's own dummy prefills, before the first request
            return
        ranges = value_range(values).T
        wanted = self._always.expand(ranges.shape).clone()
        for first, last, allowed in self._spans:
            wanted[:, first:last].scatter_(-1, widest(ranges[:, first:last], allowed), True)
        self.rows.take(slots.to(torch.int64), wanted.unsqueeze(0), slice(layer, layer + 1))

    def settle(self, slots: torch.Tensor, first: int) -> None:
        """Decide on a block of a request: tokens ``first …`` of its row, in `slots`, are recent no longer."""
        self.settle_released()
        if len(slots):
            held, rows = self.rows.read(slots)
            kept = self._widest(held, rows, self._allowed(first, first + len(slots)))
            self.rows.give_back(slots, ~kept)

    def carry(self, row: torch.Tensor, keep: torch.Tensor, recent: int) -> Kept:
        """Read the rows that tokens keep at an eviction, before anything is moved.

        Slots that were given back still have theirs: to make room for the kept tokens, SGLang's radix tree may have
        given back the beginning of this very `row`.

        Parameters
        ----------
        row : int64 ``[N]``, the slots of the request, oldest token first
        keep : int64 ``[L, H, K]``, which of them stay
        recent : how many of the newest are protected whatever their values
        """
        tokens, kept = len(row), keep.shape[-1]
        # Shares of blocks on both sides of an earlier eviction may round to one more than that of all tokens.
        most = min(kept, SINKS + 2 * recent + self._format.allowed(tokens) + 1)
        order = self.rows.holds(row[keep]).byte().sort(dim=-1, descending=True, stable=True).indices
        places = order[..., :most]
        index = keep.gather(-1, places)
        held, rows = self.rows.read(row[index])
        always = (places < SINKS) | (index >= tokens - recent)
        allowed = min(most, self._format.allowed(kept))
        stays = (held & always) | self._widest(held & ~always, rows, allowed)
        return Kept(places, HeldRows(stays, rows))

    def place(self, own: torch.Tensor, kept: Kept, destination: torch.Tensor) -> None:
        """Give the slots that a request owned their rows back, and its kept tokens, now in `destination`, theirs."""
        self.settle_released()
        self.rows.give_back(own)
        self.rows.put(destination[kept.places], kept.rows)

    def _allowed(self, first: int, last: int) -> int:
        """How many of tokens ``[first, last)`` of a text may be protected; over consecutive blocks it adds up."""
        return self._format.allowed(last) - self._format.allowed(first)

    @staticmethod
    def _widest(held: torch.Tensor, rows: torch.Tensor, allowed: int) -> torch.Tensor:
        """bool ``[L, H, n]``: the `allowed` widest of those held."""
        ranges = value_range(rows).masked_fill(~held, -torch.inf)
        mask = torch.zeros_like(held).scatter_(-1, widest(ranges, min(allowed, held.shape[-1])), True)
        return mask & held
