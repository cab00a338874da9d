"""RaaS by hand: what counts as used, who goes first, and what becomes of the prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvpolicy.policies.base import Candidates, Needs
from kvpolicy.policies.raas import RaaS
from tests.policies.candidates import random_candidates
from tests.policies.matrix import noise_of

PERIOD = 8
NEW = float("nan")


def worked(
    powers: list[float], positions: list[int], unseen: int, *, prompt_len: int, statistic: list[float] | None = None
) -> Candidates:
    """One head of size 1. A query of 1 pays each token attention in proportion to its power."""
    tokens = len(powers)
    return Candidates(
        (1, 1, tokens),
        keys=torch.tensor(powers).log().view(1, 1, -1, 1),
        queries=torch.ones(1, 1, unseen, 1),
        positions=torch.tensor(positions).view(1, 1, -1),
        statistic=torch.tensor(statistic or [NEW] * tokens).view(1, 1, -1),
        unseen=unseen,
        prompt_len=prompt_len,
        true_len=positions[-1] + 1,
    )


def observed(candidates: Candidates, **options: Any) -> list[float]:
    stamps = RaaS(**options).observe(candidates, PERIOD)
    assert stamps.dtype == torch.float32
    return stamps.flatten().tolist()


def test_a_worked_example_of_the_median() -> None:
    # Decode attention of query 12 is in proportion to 5 1 3 2 4: tokens 5, 8 and 12 have at least the median, 3.
    now = worked([9, 9, 5, 1, 3, 2, 4], [0, 1, 5, 7, 8, 11, 12], 1, prompt_len=2, statistic=[0, 1, 6, 9, 10, 11, NEW])
    assert observed(now)[2:] == [12, 9, 12, 11, 12]


def test_the_median_of_an_even_number_is_the_lower_of_the_middle_two() -> None:
    now = worked([9, 5, 1, 4, 3], [0, 5, 7, 8, 9], 1, prompt_len=1, statistic=[0, 6, 8, 8, NEW])
    assert observed(now)[1:] == [9, 8, 9, 9]


def test_each_query_has_its_own_median_and_sees_no_later_token() -> None:
    # Query 5 sees 1 2 3, median 2; query 6 sees 1 2 3 9, median 2; query 7 sees 1 2 3 9 9, median 3.
    now = worked([1, 2, 3, 9, 9], [3, 4, 5, 6, 7], 3, prompt_len=3, statistic=[4, 4, NEW, NEW, NEW])
    assert observed(now) == [4, 6, 7, 7, 7]


def test_a_worked_example_of_the_threshold() -> None:
    # Powers add up to 1000, the prompt's included: shares are 0.9, 0.05, 0.03, 0.02.
    now = worked([900, 50, 30, 20], [0, 4, 6, 7], 1, prompt_len=1, statistic=[0, 5, 6, NEW])
    assert observed(now, rule="threshold", alpha=0.04)[1:] == [7, 6, 7]
    assert observed(now, rule="threshold", alpha=0.025)[1:] == [7, 7, 7]
    assert observed(now, rule="threshold", alpha=0.95)[1:] == [5, 6, 7]
    assert observed(now, rule="threshold")[1:] == [7, 7, 7]


def test_attention_must_be_above_the_threshold() -> None:
    now = worked([1, 1, 1, 1], [3, 4, 5, 6], 1, prompt_len=0, statistic=[3, 4, 5, NEW])
    assert observed(now, rule="threshold", alpha=0.25) == [3, 4, 5, 6]
    assert observed(now, rule="threshold", alpha=0.24) == [6, 6, 6, 6]


def test_tokens_without_a_timestamp_begin_with_their_own_position() -> None:
    # Two tokens after the prompt whose queries are not given, as after a second prefill.
    now = worked([9, 9, 1, 1, 1], [2, 3, 4, 5, 6], 1, prompt_len=2)
    assert observed(now, rule="threshold", alpha=1.0) == [2, 3, 4, 5, 6]


def test_without_new_queries_nothing_changes() -> None:
    now = worked([9, 1, 1], [0, 4, 6], 1, prompt_len=1, statistic=[0, 5, 6])
    assert observed(replace(now, unseen=0)) == [0, 5, 6]
    assert now.require("statistic").flatten().tolist() == [0, 5, 6]


def test_attention_is_the_mean_of_the_group() -> None:
    # One query head attends with .4 .45 .15, the other with .4 .05 .55: means are .4 .25 .35, with a median of .35.
    shares = torch.tensor([[0.4, 0.4], [0.45, 0.05], [0.15, 0.55]])
    now = replace(
        worked([1, 1, 1], [1, 2, 3], 1, prompt_len=0, statistic=[1, 2, NEW]),
        keys=shares.log().view(1, 1, 3, 2),
        queries=torch.eye(2).mul(2**0.5).view(1, 2, 1, 2),
    )
    assert observed(now) == [3, 2, 3]


@pytest.mark.parametrize("rule", ["median", "threshold"])
@pytest.mark.parametrize("parts", [[1] * 6, [4, 2], [1, 5]], ids=str)
def test_timestamps_are_the_same_however_the_queries_are_divided(rule: Any, parts: list[int]) -> None:
    policy = RaaS(rule=rule, alpha=0.02)
    whole = random_candidates(2, 2, 63, 64, group=3, queries=6)
    keys, queries, positions = whole.require("keys"), whole.require("queries"), torch.arange(100, 163).expand(2, 2, 63)
    stamps, seen = torch.full((2, 2, 57), NEW), 0
    for part in parts:
        seen += part
        stamps = torch.cat([stamps, torch.full((2, 2, part), NEW)], dim=-1)
        now = Candidates(
            stamps.shape,
            keys=keys[:, :, : 57 + seen],
            queries=queries[:, :, :seen],
            positions=positions[..., : 57 + seen],
            statistic=stamps,
            unseen=part,
            prompt_len=120,
        )
        stamps = policy.observe(now, 6)
    new = torch.full((2, 2, 63), NEW)
    at_once = policy.observe(replace(whole, positions=positions, statistic=new, unseen=6, prompt_len=120), 6)
    assert torch.equal(stamps, at_once)
    used = at_once[..., 20:57] > positions[..., 20:57]
    assert used.any()
    assert not used.all()


def select(positions: list[int], stamps: list[float], n_keep: int, *, prompt_len: int, **options: Any) -> list[int]:
    tokens = len(positions)
    now = Candidates(
        (1, 1, tokens),
        positions=torch.tensor(positions).view(1, 1, -1),
        statistic=torch.tensor(stamps, dtype=torch.float32).view(1, 1, -1),
        prompt_len=prompt_len,
    )
    kept: list[int] = RaaS(**options).select(now, n_keep, PERIOD, noise_of(1)).flatten().tolist()
    return kept


POSITIONS = [0, 1, 2, 5, 7, 8, 11, 12]


def test_the_oldest_timestamps_go_and_the_prompt_stays() -> None:
    assert select(POSITIONS, [0, 1, 2, 12, 9, 10, 11, 12], 6, prompt_len=3) == [0, 1, 2, 3, 6, 7]
    assert select(POSITIONS, [0, 1, 2, 12, 9, 10, 11, 12], 7, prompt_len=3) == [0, 1, 2, 3, 5, 6, 7]
    assert select(POSITIONS, [0, 1, 2, 12, 9, 10, 11, 12], 4, prompt_len=0) == [3, 5, 6, 7]


def test_of_equal_timestamps_the_newer_token_stays() -> None:
    assert select(POSITIONS, [0, 1, 2, 12, 12, 12, 12, 12], 6, prompt_len=3) == [0, 1, 2, 5, 6, 7]
    assert select(POSITIONS, [0, 1, 2, 12, 9, 9, 9, 12], 6, prompt_len=3) == [0, 1, 2, 3, 6, 7]


def test_timestamps_one_apart_are_told_apart_in_a_very_long_text() -> None:
    end = 2**24
    positions = [0, *range(end - 4000, end)]
    stamps = torch.full((4001,), end - 2.0)
    stamps[[1, 2, -1]] = end - 1.0
    assert select(positions, stamps.tolist(), 3, prompt_len=1) == [0, 2, 4000]
    assert select(positions, stamps.tolist(), 5, prompt_len=1) == [0, 1, 2, 3999, 4000]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        pytest.param({}, [3, 4, 7], id="the newest token stays"),
        pytest.param({"recent": 2}, [4, 6, 7], id="recent tokens"),
        pytest.param({"sinks": 1}, [0, 4, 7], id="a sink"),
    ],
)
def test_of_a_prompt_above_the_budget_the_end_stays(options: dict[str, int], kept: list[int]) -> None:
    assert select([0, 1, 2, 3, 4, 5, 6, 7], [9] * 6 + [9, 9], 3, prompt_len=5, **options) == kept


def test_beside_a_prompt_above_the_budget_a_quarter_is_for_the_newest() -> None:
    assert select(list(range(20)), [30] * 20, 8, prompt_len=14) == [8, 9, 10, 11, 12, 13, 18, 19]
    assert select(list(range(20)), [30] * 20, 8, prompt_len=6) == [*range(6), 18, 19]


def test_recent_tokens_stay_whatever_their_timestamp() -> None:
    assert select(POSITIONS, [0, 1, 2, 20, 20, 20, 11, 12], 5, prompt_len=0, recent=2) == [3, 4, 5, 6, 7]
    assert select(POSITIONS, [0, 1, 2, 20, 20, 20, 11, 12], 4, prompt_len=0, recent=2) == [4, 5, 6, 7]


def test_each_head_keeps_its_own() -> None:
    stamps = torch.tensor([[9.0, 5, 6, 9], [5, 9, 6, 9]]).view(1, 2, 4)
    positions = torch.tensor([[5, 6, 7, 9], [5, 6, 8, 9]]).view(1, 2, 4)
    now = Candidates((1, 2, 4), positions=positions, statistic=stamps, prompt_len=2)
    assert RaaS().select(now, 2, PERIOD, noise_of(1)).tolist() == [[[0, 3], [1, 3]]]


def test_what_is_read_and_what_is_always_kept() -> None:
    assert RaaS().needs(64) == Needs(keys=True, queries=64, positions=True)
    assert [RaaS(recent=recent).forced(64) for recent in (0, 1, 5)] == [1, 1, 5]
    assert RaaS(sinks=4).forced(64) == 5
    with pytest.raises(ValueError, match="at least 6"):
        RaaS(sinks=4).check(5, 64)
    RaaS(sinks=4).check(6, 64)
