"""StreamingLLM keeps the first `sinks` tokens and the newest of the rest."""

from __future__ import annotations

import pytest
import torch

from kvpolicy.policies.base import Candidates, Noise
from kvpolicy.policies.streaming_llm import StreamingLLM


@pytest.mark.parametrize(
    ("tokens", "n_keep", "sinks"),
    [
        pytest.param(1, 1, 0, id="one token"),
        pytest.param(63, 40, 4, id="63 tokens"),
        pytest.param(111, 5, 4, id="one more than the sinks"),
        pytest.param(33, 32, 4, id="budget + 1"),
        pytest.param(63, 20, 0, id="no sinks"),
        pytest.param(63, 63, 4, id="all"),
        pytest.param(5001, 300, 4, id="more tokens than fp16 or bf16 can count"),
    ],
)
def test_the_oldest_sinks_and_the_newest_tokens_stay(tokens: int, n_keep: int, sinks: int) -> None:
    candidates = Candidates(shape=(2, 3, tokens))
    kept = StreamingLLM(sinks=sinks).select(candidates, n_keep, 64, Noise(0, 0, (0, 1)))
    expected = [i for i in range(tokens) if i < sinks or i >= tokens - (n_keep - sinks)]
    assert kept.shape == (2, 3, n_keep)
    for head in kept.flatten(0, 1):
        assert torch.equal(head, torch.tensor(expected))


def test_over_many_evictions_it_is_a_sliding_window_behind_the_sinks() -> None:
    positions = torch.arange(20)
    for eviction in range(30):
        kept = StreamingLLM().select(Candidates((1, 1, 20)), 12, 8, Noise(0, eviction, (0,)))[0, 0]
        assert positions[kept].tolist() == [0, 1, 2, 3, *range(8 * eviction + 12, 8 * eviction + 20)]
        positions = torch.cat([positions[kept], torch.arange(8) + 8 * eviction + 20])


def test_only_the_sinks_are_forced() -> None:
    assert StreamingLLM().forced(64) == 4
    assert StreamingLLM(sinks=0).forced(64) == 0
