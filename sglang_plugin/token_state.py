"""What is carried for each resident token of a request beside its keys and values: its position, its statistic."""

from __future__ import annotations

import torch

from kvpolicy.policies.base import Granularity, Policy


class TokenState:
    """State of one request between its evictions, in the order of its resident tokens.

    Tokens that were appended since need no entry: their positions follow from the lengths, and their statistic is
    not known yet.

    Parameters
    ----------
    policy : whose needs and granularity say what is stored
    observed : tokens of the text whose queries :meth:`Policy.observe` need not be given: those of the prefill
    """

    def __init__(self, policy: Policy, observed: int) -> None:
        self._policy = policy
        self._positions: torch.Tensor | None = None  # int32 [L or 1, H_kv or 1, n] of the tokens kept last
        self._statistic: torch.Tensor | None = None  # fp32 [L, H_kv, n] of the tokens observed last
        self.code_bits: torch.Tensor | None = None  # uint8 [L, H_kv, n] of the tokens kept last, if the policy says any
        self.observed = observed
        self.previous_len = 0  # tokens computed before the last eviction

    @property
    def bytes(self) -> int:
        carried = (self._positions, self._statistic, self.code_bits)
        return sum(tensor.nbytes for tensor in carried if tensor is not None)

    def positions(self, true_len: int, layers: slice, device: torch.device) -> torch.Tensor:
        """int64 ``[L or 1, H_kv or 1, N]``: place of each resident token in the text, of `true_len` ever computed."""
        assert self._policy.needs(1).positions, f"{self._policy.name} does not declare that it needs positions"
        newest = torch.arange(self.previous_len, true_len, device=device)
        if self._positions is None:
            return newest.view(1, 1, -1)
        kept = self._positions if len(self._positions) == 1 else self._positions[layers]
        return torch.cat([kept.long(), newest.expand(*kept.shape[:2], -1)], dim=-1)

    def statistic(self, shape: tuple[int, int, int], layers: slice, device: torch.device) -> torch.Tensor:
        """fp32 ``[L, H_kv, N]`` of that `shape`: what was last observed of each token; NaN for newer ones."""
        statistic = torch.full(shape, torch.nan, device=device)
        if self._statistic is not None:
            known = self._statistic[layers]
            statistic[..., : known.shape[-1]] = known
        return statistic

    def mean_code_bits(self, resident: int) -> float:
        """Bits of which a number of the `resident` tokens makes use, mean over layers, heads and tokens."""
        most = max(self._policy.widths)
        if self.code_bits is None or resident == 0:
            return most
        kept = min(self.code_bits.shape[-1], resident)
        return (kept * float(self.code_bits[..., :kept].float().mean()) + (resident - kept) * most) / resident

    def observe(self, statistic: torch.Tensor, true_len: int) -> None:
        """Store the `statistic` ``[L, H_kv, N]`` of all resident tokens, of `true_len` ever computed."""
        self._statistic, self.observed = statistic, true_len

    def evicted(self, keep: torch.Tensor, true_len: int, code_bits: torch.Tensor | None = None) -> None:
        """Carry on what belongs to the tokens kept: `keep` int64 ``[L, H_kv, n_keep]`` indexes the resident ones.

        `code_bits` (uint8, of the shape of `keep`) are those the policy would have them stored in now. Precision that
        was given up before does not come back.
        """
        if code_bits is not None:
            most = max(self._policy.widths)
            before = torch.full_like(keep, most, dtype=torch.uint8)
            if self.code_bits is not None:
                newer = (*keep.shape[:2], true_len - self.previous_len)
                resident = torch.cat([self.code_bits, self.code_bits.new_full(newer, most)], dim=-1)
                before = resident.gather(-1, keep)
            self.code_bits = torch.minimum(before, code_bits)
        if self._policy.needs(1).positions:
            shares = self._policy.shares
            layers = 1 if shares in (Granularity.PER_KV_HEAD_INDEX, Granularity.GLOBAL) else len(keep)
            heads = 1 if shares in (Granularity.PER_LAYER, Granularity.GLOBAL) else keep.shape[1]
            index = keep[:layers, :heads]
            resident = self.positions(true_len, slice(None), keep.device)
            self._positions = resident.expand(layers, heads, -1).gather(-1, index).int()
        if self._statistic is not None:
            self._statistic = self._statistic.gather(-1, keep)
        self.previous_len = true_len
