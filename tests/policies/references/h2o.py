"""H2O while decoding: attention accumulated per token; half of the budget recent, half heavy."""

from __future__ import annotations

import torch
from torch.nn import functional

from tests.policies.oracle import Kept, Snapshot
from tests.policies.references.choosing import highest, newest_attention


class H2O:
    """Rows of decode steps alone are counted, each as the mean over the query heads of a group."""

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None  # fp64 [L, H_kv, N], of the resident tokens

    def decoded(self, now: Snapshot) -> None:
        row = newest_attention(now).mean(dim=2)
        if self._sums is None:
            self._sums = torch.zeros_like(row)
        before = self._sums.shape[-1]
        self._sums = functional.pad(self._sums, (0, row.shape[-1] - before)) + row

    def keep(self, now: Snapshot) -> Kept:
        assert self._sums is not None
        kept = highest(self._sums, now.budget, recent=now.budget // 2)
        self._sums = self._sums.gather(-1, kept.indices)
        return kept
