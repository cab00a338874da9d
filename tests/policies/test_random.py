"""Random eviction is uniform over the tokens that are neither sinks nor recent, in every head by itself."""

from __future__ import annotations

import pytest
import torch

from kvpolicy.policies.base import Candidates, Noise
from kvpolicy.policies.random_eviction import RandomEviction

ROUNDS, LAYERS, HEADS, TOKENS, KEPT = 200, 3, 2, 63, 30


def inclusions(sinks: int, recent: int) -> torch.Tensor:
    """bool ``[rounds * layers * heads, tokens]``: what was kept, over rounds of the same request."""
    policy = RandomEviction(sinks=sinks, recent=recent)
    rounds = []
    for eviction in range(ROUNDS):
        kept = policy.select(Candidates((LAYERS, HEADS, TOKENS)), KEPT, 64, Noise(1, eviction, tuple(range(LAYERS))))
        rounds.append(torch.zeros(LAYERS, HEADS, TOKENS, dtype=torch.bool).scatter(-1, kept, True).flatten(0, 1))
    return torch.cat(rounds)


@pytest.mark.parametrize(("sinks", "recent"), [(4, 8), (0, 0)], ids=["sinks and recent", "nothing forced"])
def test_every_unforced_token_is_kept_equally_often(sinks: int, recent: int) -> None:
    included = inclusions(sinks, recent)
    middle = included[:, sinks : TOKENS - recent].double()
    draws, tokens = middle.shape
    share = (KEPT - sinks - recent) / tokens
    assert included[:, :sinks].all()
    assert included[:, TOKENS - recent :].all()
    # Sampling without replacement: the counts' squared deviations, so scaled, are chi-square with tokens - 1 degrees.
    deviation = middle.sum(0) - draws * share
    statistic = float(deviation.square().sum() / (draws * share * (1 - share))) * (tokens - 1) / tokens
    spread = (2 * (tokens - 1)) ** 0.5
    assert tokens - 1 - 4 * spread < statistic < tokens - 1 + 5 * spread


def test_heads_layers_and_rounds_choose_independently() -> None:
    middle = inclusions(4, 8)[:, 4:-8].double().view(ROUNDS, LAYERS * HEADS, -1)
    share = float(middle.mean())
    for other in (middle.roll(1, dims=1), middle.roll(1, dims=0)):
        # How often two draws that should know nothing of each other keep the same token.
        both = float((middle * other).mean())
        assert both == pytest.approx(share**2, abs=5 * share * (1 - share) / (ROUNDS * LAYERS * HEADS) ** 0.5)
