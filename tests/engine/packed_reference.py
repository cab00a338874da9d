"""What `reference.run` reads of a cache in low bits: codes by definition, and protected tokens one by one."""

from __future__ import annotations

from fractions import Fraction
from math import floor
from typing import Any

import reference
import torch

SINKS = 4


def coded(rows: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """``[…, D]`` after a trip through asymmetric codes: of each group the nearest of 2^bits steps from its minimum."""
    shape = rows.shape
    rows = rows.double().reshape(-1, group)
    low, high = rows.min(dim=1, keepdim=True).values, rows.max(dim=1, keepdim=True).values
    step = (high - low) / (2**bits - 1)
    steps = torch.where(step > 0, ((rows - low) / step.clamp(min=1e-300)).round(), 0)
    return (low + steps * step).float().view(shape)


class PackedResidentCache(reference._ResidentCache):
    """Of each token the values as they were computed, as codes hold them, and whether the token is protected.

    Parameters
    ----------
    share : of tokens protected for their range; None protects nothing, sinks and recent tokens neither.
    key_bits : None leaves keys alone.
    """

    def __init__(
        self, bits: int, group: int, recent: int, share: str | None = None, key_bits: int | None = None
    ) -> None:
        super().__init__()
        self._bits, self._group, self._key_bits, self._recent = bits, group, key_bits, recent
        self._share = None if share is None else Fraction(share)
        self._raw: list[torch.Tensor] = []  # [H, N, D]
        self._codes: list[torch.Tensor] = []
        self._held: list[torch.Tensor] = []  # bool [H, N]
        self._settled: list[int] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A prefill attends to its own rows as they are; a decode step to what is stored."""
        prefill, new = layer_idx == len(self.seen), value_states[0]
        if not prefill:
            self._settle(layer_idx)
        stored_keys = key_states if self._key_bits is None else coded(key_states, self._key_bits, self._group)
        super().update(stored_keys, value_states, layer_idx)
        codes = coded(new, self._bits, self._group)
        if prefill:
            tokens = new.shape[1]
            held = torch.zeros(new.shape[:2], dtype=torch.bool)
            self._raw.append(new)
            self._codes.append(codes)
            self._held.append(held)
            self._settled.append(max(0, tokens - self._recent))
            if self._share is not None:
                held[:, :SINKS] = held[:, max(0, tokens - self._recent) :] = True
                self._protect(layer_idx, SINKS, tokens - self._recent, torch.ones_like(held))
        else:
            self._raw[layer_idx] = torch.cat([self._raw[layer_idx], new], dim=1)
            self._codes[layer_idx] = torch.cat([self._codes[layer_idx], codes], dim=1)
            born = torch.full(new.shape[:2], self._share is not None)
            self._held[layer_idx] = torch.cat([self._held[layer_idx], born], dim=1)
        self._refresh(layer_idx)
        if prefill:
            return key_states, value_states
        return self.keys[layer_idx], self.values[layer_idx]

    def keep(self, layer_idx: int, index: torch.Tensor) -> None:
        """Evict, and let as many of the widest keep their precision as the share of what is kept allows."""
        tokens, (heads, kept) = self._raw[layer_idx].shape[1], index.shape
        super().keep(layer_idx, index)
        for head in range(heads):
            for name in ("_raw", "_codes", "_held"):
                part = getattr(self, name)[layer_idx]
                part[head, :kept] = part[head, index[head]].clone()
        for name in ("_raw", "_codes", "_held"):
            getattr(self, name)[layer_idx] = getattr(self, name)[layer_idx][:, :kept]
        if self._share is not None:
            before = self._held[layer_idx].clone()
            always = (torch.arange(kept) < SINKS) | (index >= tokens - self._recent)
            self._held[layer_idx] = before & always
            self._widest(layer_idx, before & ~always, floor(self._share * kept))
        self._settled[layer_idx] = max(0, kept - self._recent)
        self._refresh(layer_idx)

    def _settle(self, layer: int) -> None:
        """A block that newer tokens have left behind is decided on when it is as long as what is recent."""
        tokens, first = self._raw[layer].shape[1], max(SINKS, self._settled[layer])
        if self._share is None or tokens - self._settled[layer] < 2 * self._recent:
            return
        before, last = self._held[layer].clone(), tokens - self._recent
        self._held[layer][:, first:last] = False
        self._protect(layer, first, last, before)
        self._settled[layer] = last
        self._refresh(layer)

    def _protect(self, layer: int, first: int, last: int, among: torch.Tensor) -> None:
        if first < last:
            block = torch.zeros_like(among)
            block[:, first:last] = among[:, first:last]
            self._widest(layer, block, floor(self._share * last) - floor(self._share * first))

    def _widest(self, layer: int, among: torch.Tensor, count: int) -> None:
        """Protect the `count` tokens of each head whose values spread most; of equals the older."""
        spread = self._raw[layer].max(dim=-1).values - self._raw[layer].min(dim=-1).values
        for head, row in enumerate(among):
            tokens = sorted(row.nonzero().flatten().tolist(), key=lambda t: (-float(spread[head, t]), t))
            self._held[layer][head, tokens[:count]] = True

    def _refresh(self, layer: int) -> None:
        mixed = torch.where(self._held[layer].unsqueeze(-1), self._raw[layer], self._codes[layer])
        self.values[layer] = mixed[None]

    def protected(self) -> float:
        """Share of layers, heads and tokens that are protected now."""
        return float(torch.stack(self._held).float().mean())
