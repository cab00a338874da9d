"""LagKV at a fixed budget: its measure, ranks in partitions, and what is always kept."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

import pytest
import torch

from kvpolicy.policies.base import Candidates, Needs, Noise
from kvpolicy.policies.lag_relative import lag_relative_share
from kvpolicy.policies.lagkv import LagKV
from kvpolicy.policies.options import build
from tests.kernels.attention_by_loops import softmax
from tests.policies.candidates import random_candidates
from tests.policies.lag_shares_by_loops import shares_by_loops

NOISE = Noise(0, 0, (0,))


def of_rows(keys: list[list[float]], values: list[list[float]] | None = None) -> Candidates:
    k, v = (torch.tensor(rows)[None, None] for rows in (keys, values or keys))
    return Candidates((1, 1, len(keys)), k, v)


def keeps(policy: LagKV, candidates: Candidates, n_keep: int) -> list[int]:
    kept: list[int] = policy.select(candidates, n_keep, 16, NOISE).flatten().tolist()
    return kept


def test_a_share_of_a_worked_example() -> None:
    # The reference spans 0 to 2 and 0 to 4: (1, 1) becomes (1/2, 1/4), (3, 0) becomes (3/2, 0).
    x = torch.tensor([[1.0, 1.0], [3.0, 0.0], [0.0, 4.0], [2.0, 0.0]])
    deviations = [0.25 / math.sqrt(2), 1.5 / math.sqrt(2)]
    assert lag_relative_share(x, 2).tolist() == [pytest.approx(softmax(deviations))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("lag", "partitions"), [(8, 2), (5, 4), (16, 3)])
def test_shares_are_those_of_the_formula(lag: int, partitions: int, dtype: torch.dtype) -> None:
    x = random_candidates(1, 2, lag * partitions, 60, dtype=dtype).require("keys")[0]
    shares = lag_relative_share(x, lag)
    assert shares.shape == (2, partitions - 1, lag)
    assert shares.dtype == torch.float32
    for head in range(2):
        for row, expected in zip(shares[head].tolist(), shares_by_loops(x[head], lag), strict=True):
            assert row == pytest.approx(expected, rel=1e-5)


def test_a_channel_that_is_constant_in_the_reference_gives_numbers() -> None:
    x = torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 1.0], [2.0, 1.0]])
    # As the reference has it: a 0 in that channel, whatever its width. Deviations of (1/2, 0) and (0, 0).
    assert lag_relative_share(x, 2).tolist() == [pytest.approx(softmax([0.5 / math.sqrt(2), 0]))]
    x[0, 1] = 7  # outside: the most unusual token there is
    assert lag_relative_share(x, 2).tolist() == [pytest.approx([1, 0])]


# One sink, three partitions of two and one token more; keys and values are the same.
WORKED = [[9.0, 9.0], [1.0, 1.0], [3.0, 0.0], [0.0, 4.0], [2.0, 0.0], [0.0, 0.0], [1.0, 1.0], [5.0, 5.0]]


def test_ranks_of_a_worked_example() -> None:
    scores = LagKV(sinks=1, lag=2).scores(of_rows(WORKED), NOISE).flatten().tolist()
    # Deviations of the second partition: (0, 4) and (2, 0) in ranges of 0 to 1.
    assert scores[1:5] == [0, 0.5, 0.5, 0]
    assert all(score >= 1 for score in scores[5:])
    assert keeps(LagKV(sinks=1, lag=2), of_rows(WORKED), 6) == [0, 2, 3, 5, 6, 7]


def test_keys_and_values_both_count() -> None:
    # By its deviation of sqrt(2) * x a token of the first partition has a share of e^dev; the references span 0 to 1.
    def rows(first: float, second: float) -> list[list[float]]:
        return [[first, 0.0], [second, 0.0], [0.0, 1.0], [1.0, 0.0]]

    def order(keys: list[list[float]], values: list[list[float]]) -> list[float]:
        scores: list[float] = LagKV(sinks=0, lag=2).scores(of_rows(keys, values), NOISE)[0, 0, :2].tolist()
        return scores

    assert order(rows(1, 2), rows(1, 1)) == [0, 0.5]
    assert order(rows(1, 1), rows(2, 1)) == [0.5, 0]
    assert order(rows(1, 2), rows(3, 1)) == [0.5, 0]
    assert order(rows(3, 1), rows(1, 2)) == [0.5, 0]


def test_of_equal_tokens_the_older_ranks_higher() -> None:
    keys = [[1.0, 0.0]] * 4 + [[0.0, 1.0], [1.0, 0.0], [0.5, 0.5], [0.5, 0.5]]
    assert LagKV(sinks=0, lag=4).scores(of_rows(keys), NOISE)[0, 0, :4].tolist() == [0.75, 0.5, 0.25, 0]


@pytest.mark.parametrize(
    ("kept_of_scored", "of_each"), [(9, [3, 3, 3]), (10, [4, 3, 3]), (11, [4, 4, 3]), (0, [0] * 3)]
)
def test_every_partition_loses_the_same_share_and_of_equal_ranks_the_oldest_stay(
    kept_of_scored: int, of_each: list[int]
) -> None:
    tokens = 4 + 4 * 8 + 5
    candidates = random_candidates(2, 3, tokens, 64)
    kept = LagKV(lag=8).select(candidates, 4 + kept_of_scored + 8 + 5, 16, Noise(0, 0, (0, 1)))
    for head in kept.flatten(0, 1).tolist():
        counts = Counter((token - 4) // 8 for token in head if 4 <= token < 4 + 3 * 8)
        assert [counts[partition] for partition in range(3)] == of_each
        assert set(head) >= {*range(4), *range(4 + 3 * 8, tokens)}


def test_a_partition_is_scored_against_the_next_alone() -> None:
    candidates = random_candidates(1, 1, 36, 64)
    before = LagKV(lag=8).scores(candidates, NOISE)[0, 0].clone()
    candidates.require("keys")[0, 0, 28:] *= torch.rand(8, 64, generator=torch.Generator().manual_seed(0))
    after = LagKV(lag=8).scores(candidates, NOISE)[0, 0]
    changed = {(token - 4) // 8 for token in (before != after).nonzero().flatten().tolist()}
    assert changed == {2}


@pytest.mark.parametrize("tokens", [3, 9, 19])
def test_with_fewer_tokens_than_two_partitions_the_newest_stay(tokens: int) -> None:
    candidates = random_candidates(1, 2, tokens, 64)
    kept = LagKV(sinks=2, lag=9).select(candidates, 3, 16, NOISE)
    assert kept[0].tolist() == [[0, 1, tokens - 1]] * 2


def test_more_recent_tokens_are_kept_if_asked_for() -> None:
    candidates = random_candidates(1, 1, 36, 64)
    kept = keeps(LagKV(lag=8, recent=14), candidates, 20)
    assert kept[-14:] == [*range(22, 36)]
    assert keeps(LagKV(lag=8), candidates, 20)[-14:] != kept[-14:]


@pytest.mark.parametrize(
    ("options", "forced"),
    [({}, 4 + 255), ({"lag": 8}, 4 + 15), ({"lag": 8, "recent": 20, "sinks": 1}, 21), ({"lag": 8, "recent": None}, 68)],
)
def test_the_budget_must_exceed_sinks_and_the_longest_tail(options: dict[str, Any], forced: int) -> None:
    policy = LagKV(**options)
    assert policy.needs(64) == Needs(keys=True, values=True)
    assert policy.forced(64) == forced
    policy.check(forced + 1, 64)
    sentence = (
        f"kv_budget={forced} leaves nothing to choose: lagkv keeps up to {forced} tokens whatever their score (sinks, "
        f"and the newest 2 * lag - 1 or recent), so the budget must be at least {forced + 1}; raise kv_budget, or "
        "lower the policy's lag option"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        policy.check(forced, 64)


def test_a_partition_of_one_token_has_no_ranges() -> None:
    with pytest.raises(ValueError, match="option 'lag' must be at least 2"):
        build(LagKV, {"lag": "1"})
