"""`full`: the uncompressed cache, measured like any policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvpolicy.policies.base import Candidates, Noise, Policy


@dataclass(frozen=True)
class Full(Policy):
    """Evicts nothing; responses still report resident tokens and KV bytes."""

    name: ClassVar[str] = "full"

    def due(self, resident: int, budget: int, period: int) -> bool:
        return False

    def select(self, candidates: Candidates, n_keep: int, period: int, noise: Noise) -> torch.Tensor:
        raise AssertionError("the full cache is never due for an eviction")
