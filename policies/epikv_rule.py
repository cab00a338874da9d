"""What EpiKV's methods keep beside the tokens that they choose: sinks, the prompt, the newest tokens."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvpolicy.policies.base import Candidates, Granularity, Policy
from kvpolicy.policies.selecting import keep_highest, with_prompt

MOST_RECENT, RECENT_SHARE = 128, 4  # published: min(128, budget // 4)


@dataclass(frozen=True)
class EpiKVRule(Policy):
    """One set of tokens for all layers and KV heads, the whole prompt in it.

    Parameters
    ----------
    sinks : int
        Oldest tokens that are always kept.
    recent : int or None
        Newest tokens that are always kept; None: 128, or a quarter of the budget if that is less.
    """

    granularity: ClassVar[Granularity] = Granularity.GLOBAL

    sinks: int = 4
    recent: int | None = None

    def recent_count(self, n_keep: int) -> int:
        """Newest tokens that are among `n_keep` whatever their score."""
        if self.recent is not None:
            return self.recent
        return min(MOST_RECENT, n_keep // RECENT_SHARE, max(0, n_keep - self.sinks))

    def forced(self, period: int) -> int:
        """Sinks, and recent tokens where their number does not depend on the budget."""
        return self.sinks + (self.recent or 0)

    def check(self, budget: int, period: int) -> None:
        if budget <= (forced := self.sinks + self.recent_count(budget)):
            least = next(b for b in itertools.count(budget + 1) if b > self.sinks + self.recent_count(b))
            raise ValueError(
                f"kv_budget={budget} leaves nothing to choose: {self.name} always keeps {forced} tokens "
                f"(sinks + recent), so the budget must be at least {least}; "
                "raise kv_budget, or lower the policy's sinks or recent option"
            )

    def one_set(self, scores: torch.Tensor, candidates: Candidates, n_keep: int) -> torch.Tensor:
        """int64 ``[L, H_kv, n_keep]``: sinks, recent tokens, the prompt, and the highest of ``scores [N]``.

        NaN counts as higher than any number but infinity; the prompt stands above both.
        """
        recent = self.recent_count(n_keep)
        finite = scores.double().nan_to_num(nan=1e28, posinf=1e29, neginf=-1e29)
        lifted = with_prompt(finite[None, None], candidates, n_keep - recent)
        kept = keep_highest(lifted, n_keep, sinks=self.sinks, recent=recent)
        return kept.expand(*candidates.shape[:2], n_keep)


def channel_deviation(x: torch.Tensor) -> torch.Tensor:
    """Standard deviation over the channels of ``[..., D]``, with ``D - 1``, in fp32 at least.

    The same as ``x.std(dim=-1)``, which is several times slower on a CPU.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    deviation: torch.Tensor = torch.linalg.vector_norm(x - x.mean(dim=-1, keepdim=True), dim=-1)
    return deviation / math.sqrt(x.shape[-1] - 1)
