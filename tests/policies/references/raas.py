"""RaaS: a decode token lives as long as it is attended to now and then; the prompt lives for good."""

from __future__ import annotations

import torch
from torch.nn import functional

from tests.policies.oracle import Kept, Snapshot
from tests.policies.references.choosing import highest, newest_attention
from tests.policies.references.prompt_kept import recent_beside_prompt


class RaaS:
    """A token's time is the position of the last step that used it.

    Used is, of the resident decode tokens, the half with the most attention (`alpha` None: at least the lower median),
    or each with more attention than `alpha`.
    """

    def __init__(self, alpha: float | None = None) -> None:
        self.alpha = alpha
        self._times: torch.Tensor | None = None  # int64 [L, H_kv, N], of the resident tokens
        self._closest: torch.Tensor | None = None  # fp64 [L, H_kv]: closest call of all steps

    def decoded(self, now: Snapshot) -> None:
        attention = newest_attention(now).mean(dim=2)
        step, decode = now.true_len - 1, now.positions >= now.prompt_len
        if self._times is None:
            self._times = torch.zeros_like(now.positions[:, :, :-1])
            self._closest = torch.full(attention.shape[:2], torch.inf, dtype=torch.float64)
        assert self._closest is not None
        times = functional.pad(self._times, (0, 1), value=step)
        if self.alpha is None:
            count = decode.sum(dim=-1, keepdim=True)
            ordered = attention.masked_fill(~decode, torch.inf).sort(dim=-1).values
            middle = (count - 1) // 2
            median, below = ordered.gather(-1, middle), ordered.gather(-1, (middle - 1).clamp_min(0))
            used = decode & (attention >= median)
            # Below the smallest single-precision number all are equal for a policy.
            gap = torch.where(median > torch.finfo(torch.float32).tiny, (median - below) / median, 0)
            close = torch.where(middle > 0, gap, torch.inf).squeeze(-1)
        else:
            used = decode & (attention > self.alpha)
            close = ((attention - self.alpha).abs() / self.alpha).masked_fill(~decode, torch.inf).amin(dim=-1)
        self._times = times.masked_fill(used, step)
        self._closest = self._closest.minimum(close)

    def keep(self, now: Snapshot) -> Kept:
        assert self._times is not None
        assert self._closest is not None
        # Newer tokens win ties. A prompt that leaves too little room beside itself loses its oldest.
        tokens = now.keys.shape[2]
        score = self._times.double() + torch.arange(tokens) / tokens
        score = torch.where(now.positions < now.prompt_len, 1e9 + now.positions.double(), score)
        indices = highest(score, now.budget, recent=recent_beside_prompt(1, now)).indices
        self._times = self._times.gather(-1, indices)
        # Times are whole numbers: what rounding may change is which tokens a step used.
        return Kept(indices, self._closest)
