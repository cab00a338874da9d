"""H2O by hand, and that its sums do not depend on when they are taken."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from kvpolicy.policies.base import Candidates, Needs
from kvpolicy.policies.h2o import H2O
from tests.policies.candidates import random_candidates
from tests.policies.matrix import noise_of

PERIOD = 8


def worked(powers: list[float], unseen: int, statistic: list[float], *, queries: int = 0) -> Candidates:
    """One head of size 1. A query of 1 pays each token attention in proportion to its power."""
    keys = torch.tensor(powers).log().view(1, 1, -1, 1)
    return Candidates(
        (1, 1, len(powers)),
        keys=keys,
        queries=torch.ones(1, 1, queries or unseen, 1),
        statistic=torch.tensor(statistic).view(1, 1, -1),
        unseen=unseen,
    )


NEW = float("nan")


def test_a_worked_example_of_the_sums() -> None:
    # A prompt of two tokens, then two decode tokens: rows 1/4 2/4 1/4 and 1/8 2/8 1/8 4/8.
    mass = H2O().observe(worked([1, 2, 1, 4], 2, [NEW] * 4), PERIOD)
    assert mass.dtype == torch.float32
    assert mass.flatten().tolist() == pytest.approx([3 / 8, 6 / 8, 3 / 8, 4 / 8], rel=1e-6)
    # Token 1 is evicted, a token of power 2 appended: one more row, 1/8 1/8 4/8 2/8, over what is resident.
    kept = [*mass.flatten()[[0, 2, 3]].tolist(), NEW]
    later = H2O().observe(worked([1, 1, 4, 2], 1, kept), PERIOD)
    assert later.flatten().tolist() == pytest.approx([4 / 8, 4 / 8, 8 / 8, 2 / 8], rel=1e-6)


def test_a_worked_example_of_a_group() -> None:
    # Powers 1 and 3 for one query head, 1 and 1/3 for the other: rows 1/4 3/4 and 3/4 1/4.
    candidates = replace(worked([1, 3], 1, [NEW] * 2), queries=torch.tensor([1.0, -1.0]).view(1, 2, 1, 1))
    assert H2O().observe(candidates, PERIOD).flatten().tolist() == pytest.approx([0.5, 0.5], rel=1e-6)


def test_queries_that_were_seen_or_are_of_the_prompt_add_nothing() -> None:
    whole = worked([1, 2, 1, 4], 1, [0.5, 0.25, 0.25, NEW], queries=3)
    whole.require("queries")[:, :, :2] = torch.nan
    mass = H2O().observe(whole, PERIOD)
    assert mass.flatten().tolist() == pytest.approx([5 / 8, 4 / 8, 3 / 8, 4 / 8], rel=1e-6)
    assert H2O().observe(replace(whole, unseen=0), PERIOD).flatten().tolist() == [0.5, 0.25, 0.25, 0]


def test_the_statistic_that_was_given_is_not_written_to() -> None:
    given = worked([1, 2, 1, 4], 1, [0.5, 0.25, 0.25, 0.0])
    H2O().observe(given, PERIOD)
    assert given.require("statistic").flatten().tolist() == [0.5, 0.25, 0.25, 0.0]


@pytest.mark.parametrize("parts", [[6], [1] * 6, [4, 2], [1, 5]], ids=str)
def test_sums_are_the_same_however_the_queries_are_divided(parts: list[int]) -> None:
    whole = random_candidates(2, 2, 63, 64, group=3, queries=6)
    keys, queries = whole.require("keys"), whole.require("queries")
    mass, seen = torch.full((2, 2, 57), torch.nan), 0
    for part in parts:
        seen += part
        mass = torch.cat([mass, torch.full((2, 2, part), torch.nan)], dim=-1)
        now = Candidates(
            mass.shape, keys=keys[:, :, : 57 + seen], queries=queries[:, :, :seen], statistic=mass, unseen=part
        )
        mass = H2O().observe(now, 6)
    expected = H2O().observe(replace(whole, statistic=torch.full((2, 2, 63), torch.nan), unseen=6), 6)
    torch.testing.assert_close(mass, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(mass.sum(dim=-1), torch.full((2, 2), 6.0))  # each row adds up to 1


@pytest.mark.parametrize(
    ("options", "n_keep", "kept"),
    [
        pytest.param({}, 4, [1, 3, 6, 7], id="halves"),
        pytest.param({}, 5, [1, 3, 5, 6, 7], id="an odd budget has one heavy hitter more"),
        pytest.param({"recent_share": 0.0}, 4, [1, 3, 5, 6], id="no recent tokens"),
        pytest.param({"recent_share": 0.75}, 4, [3, 5, 6, 7], id="three quarters recent"),
        pytest.param({"sinks": 1}, 4, [0, 3, 6, 7], id="a sink"),
        pytest.param({}, 8, list(range(8)), id="all"),
    ],
)
def test_half_of_the_budget_is_recent_and_half_heavy(options: dict[str, float], n_keep: int, kept: list[int]) -> None:
    mass = torch.tensor([0.1, 0.8, 0.2, 0.9, 0.3, 0.7, 0.75, 0.05]).expand(2, 3, 8)
    found = H2O(**options).select(  # type: ignore[arg-type]
        Candidates((2, 3, 8), statistic=mass), n_keep, PERIOD, noise_of(2)
    )
    assert found.tolist() == [[kept] * 3] * 2


def test_each_head_keeps_its_own() -> None:
    mass = torch.tensor([[5.0, 1, 2, 3, 0], [1, 5, 2, 3, 0]]).view(1, 2, 5)
    found = H2O().select(Candidates((1, 2, 5), statistic=mass), 3, PERIOD, noise_of(1))
    assert found.tolist() == [[[0, 3, 4], [1, 3, 4]]]


def test_what_is_read_and_always_kept() -> None:
    assert H2O().needs(64) == Needs(keys=True, queries=64)
    assert [H2O(sinks=sinks).forced(64) for sinks in (0, 4)] == [0, 4]
    assert H2O.accumulates
    assert not H2O().spans_heads
    assert not H2O().spans_layers


@pytest.mark.parametrize(
    ("options", "budget", "recent"),
    [
        pytest.param({"recent_share": 1.0}, 100, 100, id="all recent"),
        pytest.param({"recent_share": 0.5, "sinks": 4}, 8, 4, id="sinks fill the other half"),
        pytest.param({"recent_share": 60.0}, 100, 6000, id="a count for a share"),
    ],
)
def test_a_budget_without_heavy_hitters_is_refused(options: dict[str, float], budget: int, recent: int) -> None:
    policy = H2O(**options)  # type: ignore[arg-type]
    sentence = (
        f"kv_budget={budget} leaves h2o no heavy hitters: recent_share:{policy.recent_share:g} is {recent} recent "
        f"tokens, beside {policy.sinks} sinks, and both together must be less than the budget; "
        "raise kv_budget, or lower recent_share or sinks"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        policy.check(budget, PERIOD)


def test_the_smallest_budgets_that_work() -> None:
    H2O().check(1, 1)
    H2O(sinks=4).check(9, PERIOD)
    H2O(recent_share=0.99).check(100, PERIOD)
