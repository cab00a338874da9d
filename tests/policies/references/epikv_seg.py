"""EpiKV by segments: segments whose keys spread most keep most tokens.

How the formulas are read where they leave something open:

* Residents without the recent part, prompt included, are numbered from 0; segment i is numbers 128 i to 128 i + 127,
  the last one may be shorter. All of its tokens, those of the prompt too, make up its statistic.
* Of n segments in ascending order of the statistic the first n // 3 are low, from number 2 n // 3 on high, the others
  between. Among equal statistics the higher class counts.
* A segment keeps up to 64, 32 or 8 of its *decode* tokens; its prompt tokens stay anyway and do not count.
* The oldest segment fills first, until budget - recent - prompt is used up. Of a quota that does not fit any more, as
  many as fit. What the quotas leave of the budget stays empty.
"""

from __future__ import annotations

import math

from tests.policies.oracle import Kept, Snapshot
from tests.policies.references.epikv import EpiKV
from tests.policies.references.prompt_kept import always_kept, for_all, highest, shared_positions

QUOTAS = {"high": 64, "middle": 32, "low": 8}


class EpiKVSeg(EpiKV):
    """`quotas`: of segments of each class, as published unless they are given."""

    def __init__(self, segment: int = 128, quotas: dict[str, int] | None = None) -> None:
        super().__init__()
        self.segment = segment
        self.quotas = QUOTAS if quotas is None else quotas

    def classes(self, now: Snapshot, numbered: int) -> list[str]:
        """Class of each segment of the `numbered` oldest tokens."""
        spread = now.keys.double().var(dim=-1, unbiased=False)  # [L, H, N]
        statistic = [
            float(spread[:, :, start : min(start + self.segment, numbered)].mean())
            for start in range(0, numbered, self.segment)
        ]
        ascending, count = sorted(statistic), len(statistic)
        if count == 1:
            return ["high"]
        low, high = ascending[count // 3], ascending[2 * count // 3]
        return ["high" if value >= high else "middle" if value >= low else "low" for value in statistic]

    def keep(self, now: Snapshot) -> Kept:
        recent = min(128, now.budget // 4)
        positions, scores = shared_positions(now), self.resident_scores(now)
        numbered = len(positions) - recent
        kept = always_kept(positions, now, recent=recent, sinks=self.sinks)
        stay, room, margin = set(kept), now.budget - len(kept), math.inf
        for number, kind in enumerate(self.classes(now, numbered)):
            segment = range(number * self.segment, min((number + 1) * self.segment, numbered))
            decoded = {token: float(scores[token]) for token in segment if token not in stay}
            chosen, cut = highest(decoded, min(self.quotas[kind], len(decoded), room))
            kept, room, margin = kept + chosen, room - len(chosen), min(margin, cut)
        return for_all(sorted(kept), margin, now)
