"""What an independent reference of a method is given, and what it answers: nothing of the code under test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Snapshot:
    """One request at one moment, everything in fp32.

    keys, values : ``[L, H_kv, N, D]``, resident tokens in age order, keys after RoPE.
    positions : int64 ``[L, H_kv, N]``, place of each resident token in the text, ascending.
    queries : ``[L, H_q, T, D]``, of every token computed so far, evicted ones too, after RoPE. ``T = true_len``.
    hidden : ``[L, T, E]``, output of each decoder layer for every token computed so far; None where there is no model.
    prompt_len, true_len : tokens of the prompt, and computed so far.
    previous_len : `true_len` at the last eviction, 0 before the first.
    eviction : how many evictions there were before.
    budget, period : as the engine was told.
    """

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    queries: torch.Tensor
    hidden: torch.Tensor | None
    prompt_len: int
    true_len: int
    previous_len: int
    eviction: int
    budget: int
    period: int


@dataclass(frozen=True)
class Kept:
    """A reference's choice.

    indices : int64 ``[L, H_kv, K]``, indices into the resident tokens, ascending, distinct.
    margin : fp ``[L, H_kv]``, by how much the worst kept token beat the best evicted one, as a share of the spread of
        the scores among which it was chosen; a head whose margin is below 1e-5 may choose otherwise for rounding alone.
    """

    indices: torch.Tensor
    margin: torch.Tensor


class Method(Protocol):
    """A reference. One instance lives as long as one request."""

    def decoded(self, now: Snapshot) -> None:
        """Called after each decode step: the newest token has attended to all resident tokens, itself included."""

    def keep(self, now: Snapshot) -> Kept:
        """Called when an eviction is due."""
