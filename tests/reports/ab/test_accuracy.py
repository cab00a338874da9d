"""The interval of one rate: Wilson's where responses are independent, wider where those to a problem are alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from kvpolicy.reports.ab.accuracy import rate


def wilson(value: float, effective: float, quantile: float) -> tuple[float, float]:
    """Both solutions of ``(value - p)**2 = quantile**2 p (1 - p) / effective``."""
    square = quantile**2 / effective
    roots = np.roots([1 + square, -(2 * value + square), value**2])
    return float(roots.min()), float(roots.max())


def test_single_responses_have_wilsons_interval() -> None:
    found = rate(np.repeat([1.0, 0.0], [37, 13]), 50)
    assert (found.value, found.effective) == (0.74, 50)
    assert (found.low, found.high) == pytest.approx(wilson(0.74, 50, stats.t.ppf(0.975, 49)))
    normal = stats.binomtest(37, 50).proportion_ci(method="wilson")
    assert found.low < normal.low < normal.high < found.high
    assert (found.low, found.high) == pytest.approx((normal.low, normal.high), abs=0.005)


def test_repeats_that_are_copies_add_nothing() -> None:
    single = np.repeat([1.0, 0.0], [37, 13])
    assert rate(single, 50 * 16) == rate(single, 50)


def test_repeats_of_problems_that_are_all_alike_count_one_by_one() -> None:
    found = rate(np.full(4000, 0.75), 4 * 4000)
    assert found.effective == 4 * 4000
    assert (found.low, found.high) == pytest.approx(wilson(0.75, 16_000, stats.t.ppf(0.975, 3999)))


def test_the_variance_between_problems_says_what_the_responses_are_worth() -> None:
    by_problem = np.tile([0.25, 0.5, 0.75, 1.0], 250)
    found = rate(by_problem, 4 * 1000)
    variance = by_problem.var()
    assert found.effective == pytest.approx(1000 * (0.625 * 0.375) / variance, rel=0.02)
    # with so many problems all intervals agree
    half = 1.96 * math.sqrt(variance / 1000)
    assert (found.low, found.high) == pytest.approx((0.625 - half, 0.625 + half), abs=0.0003)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_all_or_nothing_still_has_a_width_and_stays_within_bounds(value: float) -> None:
    found = rate(np.full(30, value), 30 * 16)
    assert found.value == value
    assert 0 <= found.low <= found.high <= 1
    assert found.high - found.low == pytest.approx(1 / (1 + 30 / stats.t.ppf(0.975, 29) ** 2))


@pytest.mark.parametrize(("problems", "responses"), [(1, 16), (0, 0), (5, 4)])
def test_too_little_is_refused(problems: int, responses: int) -> None:
    with pytest.raises(
        ValueError, match=f"at least two problems and a response to each, got {problems} and {responses}"
    ):
        rate(np.ones(problems), responses)
