"""Paired statistics against their definitions, written out, and against scipy's own tests where there are some."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from kvpolicy.reports.ab import statistics as ab_statistics
from kvpolicy.reports.ab.bootstrap import intervals
from kvpolicy.reports.ab.statistics import adjusted, compare, detectable_effect, sign_flip_p
from tests.reports.ab.simulated_arms import FloatArray, Truth, rates


def responses(outcomes: str) -> FloatArray:
    return np.array([float(outcome) for outcome in outcomes])


def test_a_comparison_says_how_many_problems_and_by_how_much() -> None:
    result = compare(responses("110100"), responses("100111"), cells=3)
    assert (result.problems, result.differing) == (6, 3)
    assert result.difference == pytest.approx(1 / 6)
    # deviations of 0, -1, 0, 0, 1, 1 from 1/6
    assert result.deviation == pytest.approx(math.sqrt((3 * (1 / 6) ** 2 + (7 / 6) ** 2 + 2 * (5 / 6) ** 2) / 5))
    assert result.family_low <= result.low < result.difference < result.high <= result.family_high
    assert result.detectable == pytest.approx(detectable_effect(result.deviation, 6, 0.05 / 3))


def test_the_second_arm_is_measured_against_the_first() -> None:
    better = compare(np.zeros(60), responses("1" * 40 + "0" * 20))
    worse = compare(responses("1" * 40 + "0" * 20), np.zeros(60))
    assert 0 < better.low < better.difference == pytest.approx(2 / 3)
    assert (better.family_low, better.family_high) == (better.low, better.high)
    assert worse.difference == -better.difference
    assert (worse.low, worse.high) == pytest.approx((-better.high, -better.low), abs=0.02)
    assert worse.p == better.p < 0.001


def test_intervals_of_several_cells_hold_together() -> None:
    """Each of 5 cells gets a fifth of the error: 1 % where a single one has 5 %."""
    first, second = (arm[0] for arm in rates(Truth(60, 4, 0.7, 0.1), 1, seed=0))
    result = compare(first, second, cells=5)
    alone, together = intervals(second - first, (0.05, 0.01))
    assert (result.low, result.high) == pytest.approx(alone, abs=0.005)
    assert (result.family_low, result.family_high) == pytest.approx(together, abs=0.01)
    assert result.family_low < result.low - 0.01
    assert result.high + 0.01 < result.family_high


def test_the_same_seed_gives_the_same_numbers_in_any_order_of_the_problems() -> None:
    first, second = (arm[0] for arm in rates(Truth(40, 4, 0.7, 0.1), 1, seed=0))
    order = np.random.default_rng(1).permutation(40)
    assert compare(first, second, seed=5) == compare(first[order], second[order], seed=5)
    assert compare(first, second, seed=5) != compare(first, second, seed=6)


def test_interval_of_resampled_problems_by_hand() -> None:
    """All ``7**7`` resamples of 5 problems and the two imagined ones, instead of some that are drawn."""
    differences = np.array([-0.5, 0.0, 0.25, 0.5, 1.0])
    values = [*differences, 0.5, -0.5]
    means = np.sort([sum(drawn) / 7 for drawn in itertools.product(values, repeat=7)])
    for alpha, (low, high) in zip((0.05, 0.2), intervals(differences, (0.05, 0.2), resamples=200_000), strict=True):
        tail = stats.norm.cdf(math.sqrt(7 / 6) * stats.t.ppf(alpha / 2, 6))
        expected = means[round(tail * len(means))], means[round((1 - tail) * len(means))]
        assert (low, high) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(("value", "problems"), [(0.0, 5), (0.0, 300), (1.0, 20), (-0.25, 20), (1 / 3, 7)])
def test_equal_differences_leave_room_for_what_was_not_seen(value: float, problems: int) -> None:
    """The bounds are the largest and smallest mean under which so many equal ones are still likely enough."""
    ((low, high),) = intervals(np.full(problems, value), (0.05,))
    for bound, extreme in ((low, -1.0), (high, 1.0)):
        if value == extreme:
            assert bound == extreme
        else:
            others = (bound - value) / (extreme - value)
            assert (1 - others) ** problems == pytest.approx(0.025)


def test_rounding_does_not_hide_that_differences_are_equal() -> None:
    nearly = np.array([2 / 3 - 1 / 3, 1 / 3, 1 - 2 / 3, 0.1 + 7 / 30])
    assert np.ptp(nearly) > 0
    assert intervals(nearly, (0.05,))[0] == pytest.approx(intervals(np.full(4, 1 / 3), (0.05,))[0])
    assert compare(np.zeros(4), nearly).detectable is None


@pytest.mark.parametrize("samples", [1, 4])
def test_p_is_that_of_all_ways_to_swap_the_arms(samples: int) -> None:
    first, second = (arm[0] for arm in rates(Truth(11, samples, 0.5, 0.25), 1, seed=3))
    exact = stats.permutation_test(
        (second, first), lambda x, y, axis: np.mean(x - y, axis=axis), permutation_type="samples", n_resamples=np.inf
    )
    error = math.sqrt(exact.pvalue / 10_000)
    assert 0.02 < exact.pvalue < 0.9
    assert sign_flip_p(second - first) == pytest.approx(exact.pvalue, abs=4 * error)


@pytest.mark.parametrize(("better", "worse"), [(14, 4), (3, 3), (9, 0), (30, 18)])
def test_p_of_single_responses_is_that_of_mcnemar(better: int, worse: int) -> None:
    exact = stats.binomtest(better, better + worse).pvalue
    differences = np.repeat([1.0, -1.0, 0.0], [better, worse, 100])
    assert sign_flip_p(differences) == pytest.approx(exact, abs=4 * math.sqrt(exact / 10_000) + 1e-4)


def test_p_counts_the_observed_sample_among_the_resamples() -> None:
    assert sign_flip_p(np.ones(100), resamples=999) == 1 / 1000
    assert sign_flip_p(np.zeros(100), resamples=999) == 1.0
    assert sign_flip_p(np.array([0.5, -0.5, 0.0]), resamples=2500) == 1.0  # 0 is as near as can be
    assert sign_flip_p(np.array([1.0, 1.0]), resamples=2500) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("seed", range(10))
def test_p_does_not_fall_for_rounding(seed: int) -> None:
    """Sums of tenths differ in their last bits with the order and the signs; those of whole numbers do not."""
    whole = np.random.default_rng(seed).integers(-3, 10, 7)
    assert sign_flip_p(whole / 10) == sign_flip_p(whole.astype(np.float64))


def test_bonferroni_and_holm_by_hand() -> None:
    corrected = adjusted([0.01, 0.04, 0.03, 0.005])
    assert [bonferroni for bonferroni, _ in corrected] == pytest.approx([0.04, 0.16, 0.12, 0.02])
    # in order: 4 * 0.005; 3 * 0.01; 2 * 0.03; 1 * 0.04, which may not fall below 0.06
    assert [holm for _, holm in corrected] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert adjusted([0.9, 0.6]) == [(1.0, 1.0), (1.0, 1.0)]
    assert adjusted([0.2]) == [(0.2, 0.2)]
    assert adjusted([]) == []


def test_detectable_effect_by_hand() -> None:
    assert detectable_effect(0.5, 200) == pytest.approx((1.959964 + 0.841621) * 0.5 / math.sqrt(200), rel=1e-6)
    assert detectable_effect(0.5, 200, alpha=0.0125) == pytest.approx((2.497705 + 0.841621) * 0.5 / 200**0.5, rel=1e-6)


def test_warnings_name_their_numbers() -> None:
    few, unlike = compare(np.zeros(199), responses("1" * 9 + "0" * 190)).warnings
    assert few.startswith("199 problems are few: below 200")
    assert "differ on 9 of 199 problems" in unlike
    assert compare(np.zeros(200), responses("1" * 10 + "0" * 190)).warnings == ()
    assert (
        "51 comparisons are too many for 10000 resamples" in compare(np.zeros(200), np.ones(200), cells=51).warnings[0]
    )


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (np.zeros(3), np.zeros(4), "got \\(3,\\), \\(4,\\)"),
        (np.zeros(1), np.zeros(1), "at least two problems"),
        (np.zeros((2, 2)), np.zeros((2, 2)), "one rate for each"),
        (np.zeros(3), np.array([0.0, 1.5, 1.0]), "between 0 and 1"),
        (np.array([0.0, np.nan]), np.zeros(2), "between 0 and 1"),
    ],
)
def test_what_cannot_be_compared_is_refused(first: FloatArray, second: FloatArray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare(first, second)


def test_resamples_are_drawn_in_batches_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (arm[0] for arm in rates(Truth(60, 4, 0.7, 0.1), 1, seed=2))
    at_once = compare(first, second)
    monkeypatch.setattr(ab_statistics, "BATCH", 77)
    assert compare(first, second).p == pytest.approx(at_once.p, abs=0.02)
    assert sign_flip_p(np.ones(50), resamples=78) == 1 / 79
