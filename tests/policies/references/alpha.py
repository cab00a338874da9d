"""Alpha: a base score against similarity to what is already selected, one token at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from tests.policies.oracle import Kept, Snapshot
from tests.policies.references.prompt_kept import always_kept, for_all, recent_beside_prompt, shared_positions

# Score of every resident token, ``[L, H, N]``, higher is better; H is up to the score.
Base = Callable[[Snapshot], torch.Tensor]
NEAR = 1e-4


def keydiff(now: Snapshot) -> torch.Tensor:
    """Minus the cosine of each key to the mean direction of its head's keys."""
    keys = now.keys.double()
    direction = (keys / keys.norm(dim=-1, keepdim=True)).mean(dim=2, keepdim=True)
    return -torch.cosine_similarity(keys, direction, dim=-1)


class Alpha:
    """`redundancy`: max, mean or sum of the cosines to the selected tokens, to which always-kept ones belong.

    recent : newest tokens that are always kept; None: as many as an eviction period.
    prompt : the prompt is always kept too.
    """

    def __init__(
        self,
        base: Base = keydiff,
        *,
        strength: float = 0.5,
        redundancy: str = "max",
        recent: int | None = None,
        sinks: int = 4,
        prompt: bool = False,
    ) -> None:
        self.base = base
        self.strength = strength
        self.redundancy = redundancy
        self.recent = recent
        self.sinks = sinks
        self.prompt = prompt

    def decoded(self, now: Snapshot) -> None:
        pass

    def standardised(self, now: Snapshot, candidates: list[int]) -> torch.Tensor:
        """fp64 ``[N]``: base score in standard deviations of the candidates, mean over layers and heads; else -inf."""
        scores = self.base(now).double()
        among = scores[:, :, candidates]
        deviation = among.std(dim=-1, unbiased=False, keepdim=True).clamp(min=1e-6)
        relative = ((among - among.mean(dim=-1, keepdim=True)) / deviation).mean(dim=(0, 1))
        found = torch.full(scores.shape[2:], -math.inf, dtype=torch.float64)
        found[candidates] = relative
        return found

    def best(self, scores: torch.Tensor, cosine: torch.Tensor, selected: list[int]) -> tuple[int, int, float]:
        """The token to select next, the one it beats, and the margin."""
        worth = scores.clone()
        if selected:
            among = cosine[:, selected]
            how = {"max": among.amax(dim=-1), "mean": among.mean(dim=-1), "sum": among.sum(dim=-1)}
            worth -= self.strength * how[self.redundancy]
        worth[selected] = -math.inf
        first = int(worth.argmax())  # the oldest of equals
        left = worth[worth > -math.inf]
        if len(left) == 1:
            return first, -1, math.inf
        spread = float(left.amax() - left.amin())
        without = worth.clone()
        without[first] = -math.inf
        second = int(without.argmax())
        return first, second, float(worth[first] - worth[second]) / spread if spread > 0 else 0.0

    def keep(self, now: Snapshot) -> Kept:
        positions = shared_positions(now)
        recent = now.period if self.recent is None else self.recent
        prompt_len = now.prompt_len if self.prompt else 0
        recent = recent_beside_prompt(recent, now) if self.prompt else recent
        selected = always_kept(positions, replace(now, prompt_len=prompt_len), recent=recent, sinks=self.sinks)
        candidates = [token for token in range(len(positions)) if token not in set(selected)]
        signature = now.values.double().mean(dim=(0, 1))
        signature = signature / signature.norm(dim=-1, keepdim=True)
        cosine = signature @ signature.T
        scores = self.standardised(now, candidates)
        margin = math.inf
        while len(selected) < now.budget:
            first, second, gap = self.best(scores, cosine, selected)
            if gap < NEAR and len(selected) + 2 <= now.budget:
                # Where both come next, whichever is first, their order is of no consequence.
                after_first = self.best(scores, cosine, [*selected, first])
                after_second = self.best(scores, cosine, [*selected, second])
                if (after_first[0], after_second[0]) == (second, first):
                    gap = min(after_first[2], after_second[2])
            margin = min(margin, gap)
            selected = [*selected, first]
        return for_all(sorted(selected), margin, now)
