"""Comparing a set of kept tokens with reference scores, where rounding may swap tokens at the cut."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

# Scores nearer than this, relative to the lowest kept, may be ordered differently by another precision.
MARGIN = 1e-4
MOST_SETS = 1000


def possible_tops(scores: Sequence[float], count: int) -> list[set[int]]:
    """Every set of the `count` highest of `scores` that rounding may make of them, the nominal one first.

    One set, unless there is a near tie at the cut.
    """
    order = sorted(range(len(scores)), key=lambda i: scores[i], reverse=True)
    if count in (0, len(scores)):
        return [set(order[:count])]
    lowest = scores[order[count - 1]]
    tied = [i for i in order if abs(scores[i] - lowest) <= MARGIN * abs(lowest)]
    certain = {i for i in order[:count] if i not in tied}
    sets = math.comb(len(tied), count - len(certain))
    assert sets <= MOST_SETS, f"{sets} sets are possible: {len(tied)} of {len(scores)} scores are nearly equal"
    return [certain | set(chosen) for chosen in itertools.combinations(tied, count - len(certain))]


def check_top(kept: set[int], scores: Sequence[float], n_keep: int, label: str) -> bool:
    """Assert that `kept` is the `n_keep` highest of `scores`, and say whether the cut is a near tie.

    At a near tie the tokens in question, and no others, may be exchanged.
    """
    possible = possible_tops(scores, n_keep)
    assert kept in possible, f"{label}: {sorted(kept ^ possible[0])} differ"
    return len(possible) > 1
