"""Eviction by value range, either way round, against the spreads of single tokens in fp64."""

from __future__ import annotations

import random

import pytest
import torch

from kvpolicy.policies.base import Candidates, Needs, Noise
from kvpolicy.policies.value_range_eviction import EvictLargeRange, EvictSmallRange
from kvpolicy.policies.value_spread import Measure
from tests.policies.candidates import random_candidates
from tests.policies.near_ties import check_top
from tests.policies.test_value_spread import spread_by_loops

CASES_PER_SIZE = 25
TOKENS = (1, 2, 17, 33, 63, 65, 111)
both = pytest.mark.parametrize("policy", [EvictLargeRange, EvictSmallRange], ids=lambda policy: policy.name)


@both
@pytest.mark.parametrize("measure", ["range", "variance", "l2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_the_tokens_that_spread_most_go_first_or_stay_longest(
    policy: type[EvictLargeRange], measure: Measure, head_dim: int, dtype: torch.dtype
) -> None:
    rng = random.Random(head_dim)
    near_ties = heads_seen = 0
    sign = -1 if policy is EvictLargeRange else 1
    for case in range(CASES_PER_SIZE):
        layers, heads, tokens = rng.randint(1, 2), rng.randint(1, 3), rng.choice(TOKENS)
        recent = rng.randint(0, min(16, tokens))
        sinks = rng.randint(0, min(4, tokens - recent))
        n_keep = rng.randint(max(1, sinks + recent), tokens)
        candidates = random_candidates(layers, heads, tokens, head_dim, dtype=dtype, seed=case)
        chosen = policy(sinks=sinks, recent=recent, measure=measure)
        kept = chosen.select(candidates, n_keep, 64, Noise(case, 0, tuple(range(layers)))).flatten(0, 1).tolist()
        for head, values in zip(kept, candidates.require("values").flatten(0, 1), strict=True):
            forced = {*range(sinks), *range(tokens - recent, tokens)}
            assert set(head) >= forced
            middle = [sign * spread for spread in spread_by_loops(values[sinks : tokens - recent], measure)]
            others = {token - sinks for token in set(head) - forced}
            near_ties += check_top(others, middle, n_keep - len(forced), f"{case = }")
            heads_seen += 1
    # Ranges of bf16 values are multiples of 2^-8 or more: about one cut in ten falls between equal ones.
    allowed = 0.2 if (measure, dtype) == ("range", torch.bfloat16) else 0.05
    assert near_ties <= allowed * heads_seen, f"{near_ties} near ties of {heads_seen}: the comparison checks too little"


@both
def test_with_one_token_above_the_budget_the_extreme_one_goes(policy: type[EvictLargeRange]) -> None:
    values = torch.zeros(1, 1, 33, 64)
    values[..., 0] = torch.arange(33)  # the range of token n is n
    values[0, 0, 20, 1] = -100.0
    values[0, 0, 11] = 1.0
    kept = policy(recent=8).select(Candidates((1, 1, 33), values=values), 32, 64, Noise(0, 0, (0,)))
    (evicted,) = set(range(33)) - set(kept.flatten().tolist())
    assert evicted == (20 if policy is EvictLargeRange else 11)


@both
@pytest.mark.parametrize("measure", ["range", "variance", "l2"])
def test_of_equal_values_the_oldest_stay(policy: type[EvictLargeRange], measure: Measure) -> None:
    values = torch.randn(1, 1, 1, 64, generator=torch.Generator().manual_seed(0)).expand(1, 2, 63, 64)
    candidates = Candidates((1, 2, 63), values=values)
    kept = policy(recent=16, measure=measure).select(candidates, 40, 64, Noise(0, 0, (0,)))
    assert kept[0].tolist() == [[*range(24), *range(47, 63)]] * 2


def test_the_two_keep_disjoint_halves_beside_the_forced() -> None:
    candidates, noise = random_candidates(2, 2, 61, 64), Noise(0, 0, (0, 1))
    large, small = (
        policy(sinks=0, recent=1).select(candidates, 31, 64, noise).flatten(0, 1).tolist()
        for policy in (EvictLargeRange, EvictSmallRange)
    )
    for one, other in zip(large, small, strict=True):
        assert set(one) & set(other) == {60}
        assert set(one) | set(other) == set(range(61))


@both
def test_only_values_are_read(policy: type[EvictLargeRange]) -> None:
    assert policy().needs(64) == Needs(values=True)


@both
def test_defaults(policy: type[EvictLargeRange]) -> None:
    assert policy() == policy(sinks=4, recent=None, measure="range")
    assert policy().forced(64) == 68
