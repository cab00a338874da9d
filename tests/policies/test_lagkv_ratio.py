"""LagKV as published: against the algorithm in loops over a whole generation, its lengths, and what it refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from kvpolicy.policies.base import Candidates, Needs, Noise
from kvpolicy.policies.lagkv_ratio import LagKVRatio
from kvpolicy.policies.options import build
from tests.policies.candidates import random_candidates
from tests.policies.lag_shares_by_loops import shares_by_loops

NOISE = Noise(0, 0, (0,))
SMALL: dict[str, Any] = {"sinks": 3, "lag": 6}


class Published:
    """The cache of one head as the published code keeps it: one list of positions, and the length of its base."""

    def __init__(self, policy: LagKVRatio, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.policy, self.keys, self.values = policy, keys, values
        self.positions: list[int] = []
        self.base = policy.sinks

    def append(self, positions: range) -> None:
        self.positions += positions
        lag, base = self.policy.lag, self.base
        if len(self.positions) < base + 2 * lag:
            return
        whole = (len(self.positions) - base) // lag
        partitions = [self.positions[base + i * lag : base + (i + 1) * lag] for i in range(whole)]
        flat = [position for partition in partitions for position in partition]
        of_keys, of_values = (shares_by_loops(x[flat], lag) for x in (self.keys, self.values))
        kept: list[int] = []
        for partition, k, v in zip(partitions, of_keys, of_values, strict=False):
            scores = [a + self.policy.score_v_ratio * b for a, b in zip(k, v, strict=True)]
            best = sorted(range(lag), key=lambda i: scores[i], reverse=True)[: int(self.policy.ratio * lag)]
            kept += sorted(partition[i] for i in best)
        rest = self.positions[base + (whole - 1) * lag :]
        self.positions = self.positions[:base] + kept + rest
        self.base = base + len(kept)


@pytest.mark.parametrize("prompt", [1, 15, 16, 40])
@pytest.mark.parametrize(
    "options",
    [{}, {"ratio": 0.35}, {"ratio": 0.9, "lag": 5}, {"ratio": 0.1}, {"score_v_ratio": 0.0}, {"score_v_ratio": 3.0}],
    ids=["half", "a third", "nearly all", "none", "keys alone", "values more"],
)
def test_a_generation_keeps_what_the_published_code_keeps(options: dict[str, Any], prompt: int) -> None:
    policy, length = LagKVRatio(**{**SMALL, **options}), 90
    text = random_candidates(2, 2, length, 60, seed=prompt)
    keys, values = text.require("keys"), text.require("values")
    heads = [[Published(policy, keys[layer, head], values[layer, head]) for head in range(2)] for layer in range(2)]
    positions = torch.empty(2, 2, 0, dtype=torch.int64)
    evictions = 0
    for true_len in range(prompt, length + 1):
        new = range(int(positions.max()) + 1 if positions.numel() else 0, true_len)
        positions = torch.cat([positions, torch.tensor([*new]).expand(2, 2, -1)], dim=-1)
        for head in (head for layer in heads for head in layer):
            head.append(new)
        resident = positions.shape[-1]
        evicted = true_len - resident
        if policy.due(resident, 1, 1, evicted=evicted):
            index = positions[..., None].expand(-1, -1, -1, 60)
            shape = (2, 2, resident)
            candidates = Candidates(shape, keys.gather(2, index), values.gather(2, index), true_len=true_len)
            n_keep = policy.n_keep(resident, 1, evicted=evicted)
            kept = policy.select(candidates, n_keep, 1, Noise(0, evictions, (0, 1)))
            assert kept.shape == (2, 2, n_keep)
            positions, evictions = positions.gather(2, kept), evictions + 1
        assert positions.tolist() == [[head.positions for head in layer] for layer in heads]
    assert evictions >= 8


def test_lengths_with_the_published_defaults() -> None:
    policy = LagKVRatio()
    assert policy == LagKVRatio(ratio=0.5, sinks=16, lag=1024, score_v_ratio=1.0)
    first, then = 16 + 2048, 16 + 512 + 2048
    assert [policy.due(resident, 1, 1) for resident in (first - 1, first)] == [False, True]
    assert policy.n_keep(first, 1) == first - 512
    assert [policy.due(resident, 1, 1, evicted=512) for resident in (then - 1, then)] == [False, True]
    assert policy.n_keep(then, 1, evicted=512) == then - 512
    assert policy.n_keep(first - 1, 1) == first - 1  # nothing to compress
    # A prompt of nine whole partitions and a rest: eight are compressed.
    assert policy.n_keep(16 + 9 * 1024 + 7, 1) == 16 + 8 * 512 + 1024 + 7


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_memory_grows_by_the_ratio_whatever_the_budget(ratio: float) -> None:
    policy = LagKVRatio(ratio=ratio, sinks=4, lag=8)
    resident = evicted = peak = 0
    for _ in range(4000):
        resident += 1
        if policy.due(resident, 20, 8, evicted=evicted):
            n_keep = policy.n_keep(resident, 20, evicted=evicted)
            evicted, resident = evicted + resident - n_keep, n_keep
        peak = max(peak, resident)
    assert resident + evicted == 4000
    assert peak == pytest.approx(ratio * 4000, abs=4 + 2 * 8)


def test_what_was_compressed_once_is_not_looked_at_again() -> None:
    policy = LagKVRatio(**SMALL)
    candidates = random_candidates(1, 2, 3 + 9 + 12, 60)  # three partitions were compressed to three tokens each
    before = Candidates(candidates.shape, candidates.keys, candidates.values, true_len=24 + 9)
    kept = policy.select(before, 21, 1, NOISE)
    assert kept[..., :12].tolist() == [[[*range(12)]] * 2]
    assert kept[..., -6:].tolist() == [[[*range(18, 24)]] * 2]
    candidates.require("keys")[:, :, :12] = torch.nan
    assert torch.equal(policy.select(before, 21, 1, NOISE), kept)


def test_another_number_than_the_methods_own_is_a_programming_error() -> None:
    policy, candidates = LagKVRatio(**SMALL), random_candidates(1, 1, 15, 60)
    fresh = Candidates(candidates.shape, candidates.keys, candidates.values, true_len=15)
    assert policy.select(fresh, 12, 1, NOISE).shape == (1, 1, 12)
    with pytest.raises(AssertionError, match="n_keep = 11 of tokens = 15 after evicted = 0"):
        policy.select(fresh, 11, 1, NOISE)


def test_with_nothing_to_compress_all_stay() -> None:
    candidates = random_candidates(1, 2, 14, 60)
    fresh = Candidates(candidates.shape, candidates.keys, candidates.values, true_len=14)
    assert LagKVRatio(**SMALL).select(fresh, 14, 1, NOISE).tolist() == [[[*range(14)]] * 2]


def test_any_budget_and_period_will_do() -> None:
    for budget, period in ((1, 1), (4096, 64)):
        LagKVRatio().check(budget, period)
    assert LagKVRatio().needs(64) == Needs(keys=True, values=True)


@pytest.mark.parametrize("ratio", [1.0, 1.5])
def test_a_ratio_that_evicts_nothing_is_refused(ratio: float) -> None:
    sentence = (
        f"ratio:{ratio:g} keeps all 1024 tokens of a partition; "
        "lagkv-ratio keeps a share below 1, or use kv_policy=full"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        LagKVRatio(ratio=ratio).check(100, 1)


def test_a_partition_of_one_token_has_no_ranges() -> None:
    with pytest.raises(ValueError, match="option 'lag' must be at least 2"):
        build(LagKVRatio, {"lag": "1"})
