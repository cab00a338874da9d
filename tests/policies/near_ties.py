"""Comparing a set of kept tokens with reference scores, where rounding may swap tokens at the cut."""

from __future__ import annotations

from collections.abc import Sequence

# Scores nearer than this, relative to the lowest kept, may be ordered differently by another precision.
MARGIN = 1e-4


def check_top(kept: set[int], scores: Sequence[float], n_keep: int, label: str) -> bool:
    """Assert that `kept` is the `n_keep` highest of `scores`, and say whether the cut is a near tie.

    At a near tie the tokens in question, and no others, may be exchanged.
    """
    order = sorted(range(len(scores)), key=lambda i: scores[i], reverse=True)
    expected = set(order[:n_keep])
    assert len(kept) == n_keep, f"{label}: {len(kept)} tokens kept"
    if n_keep in (0, len(scores)):
        assert kept == expected, label
        return False
    lowest, dropped = scores[order[n_keep - 1]], scores[order[n_keep]]
    if lowest - dropped >= MARGIN * lowest:
        assert kept == expected, f"{label}: {sorted(kept ^ expected)} differ"
        return False
    tied = {i for i, score in enumerate(scores) if abs(score - lowest) <= 2 * MARGIN * lowest}
    assert kept ^ expected <= tied, f"{label}: {sorted((kept ^ expected) - tied)} differ and are no near ties"
    return True
