"""`full`: the uncompressed cache, measured like any policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvpolicy.policies.base import Candidates, Card, Noise, Policy


@dataclass(frozen=True)
class Full(Policy):
    """Evicts nothing; responses still report resident tokens and KV bytes."""

    name: ClassVar[str] = "full"
    card: ClassVar[Card] = Card(score="none: nothing is evicted")

    def check(self, budget: int, period: int) -> None:
        """Any budget will do: it is not used."""

    def due(self, resident: int, budget: int, period: int, *, evicted: int = 0) -> bool:
        return False

    def select(self, candidates: Candidates, n_keep: int, period: int, noise: Noise) -> torch.Tensor:
        raise AssertionError("the full cache is never due for an eviction")
