"""Whether intervals hold the truth as often as they say, on arms whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from kvpolicy.reports.ab.accuracy import rate
from kvpolicy.reports.ab.bootstrap import intervals
from kvpolicy.reports.ab.statistics import detectable_effect, sign_flip_p
from tests.reports.ab.simulated_arms import FloatArray, Truth, rates

STUDIES = 600
RESAMPLES = 999
LOWEST, HIGHEST = 0.93, 0.97


def coverage(truth: Truth, studies: int, resamples: int, seed: int = 0) -> float:
    """Share of studies whose 95 % interval holds the true gain."""
    held = 0
    for study, (first, second) in enumerate(zip(*rates(truth, studies, seed), strict=True)):
        ((low, high),) = intervals(np.sort(second - first), (0.05,), resamples=resamples, seed=study)
        held += low - 1e-9 <= truth.gain <= high + 1e-9
    return held / studies


def p_values(truth: Truth, studies: int, resamples: int, seed: int = 0) -> FloatArray:
    """One p-value a study."""
    return np.array(
        [
            sign_flip_p(second - first, resamples=resamples, seed=study)
            for study, (first, second) in enumerate(zip(*rates(truth, studies, seed), strict=True))
        ]
    )


@pytest.mark.parametrize(
    "truth",
    [
        Truth(50, 1, 0.5),
        Truth(50, 4, 0.8, -0.05),
        Truth(50, 16, 0.8, -0.05, alike=0.9),
        Truth(100, 1, 0.8, -0.05, alike=0.9),
        Truth(100, 4, 0.95, -0.05, alike=0.3),
        Truth(200, 1, 0.95, -0.03, alike=0.9),
        Truth(200, 16, 0.95, alike=0.9),
    ],
    ids=str,
)
def test_interval_of_a_difference_holds_the_truth(truth: Truth) -> None:
    assert LOWEST <= coverage(truth, STUDIES, RESAMPLES) <= HIGHEST


@pytest.mark.parametrize("samples", [1, 16])
def test_interval_holds_the_truth_where_hardly_any_problem_tells_the_arms_apart(samples: int) -> None:
    """Then there is no interval that is neither too wide nor too narrow; it must not be too narrow."""
    assert coverage(Truth(30, samples, 0.97, alike=0.95), STUDIES, RESAMPLES) >= LOWEST


@pytest.mark.parametrize("alpha", [0.05, 0.0125])
@pytest.mark.parametrize(
    "truth",
    [Truth(30, 1, 0.5), Truth(30, 16, 0.8, alike=0.9), Truth(60, 4, 0.95), Truth(200, 4, 0.8)],
    ids=str,
)
def test_arms_that_are_equally_good_seldom_seem_different(truth: Truth, alpha: float) -> None:
    """At most alpha of the studies, and three standard deviations of so many studies."""
    studies = 1000
    bound = alpha + 3 * math.sqrt(alpha * (1 - alpha) / studies)
    assert np.mean(p_values(truth, studies, RESAMPLES) <= alpha) <= bound


def test_an_effect_of_the_detectable_size_is_found_four_times_in_five() -> None:
    pilot = Truth(200, 4, 0.7, 0.05)
    first, second = rates(pilot, 400, seed=7)
    deviation = float((second - first).std(axis=1, ddof=1).mean())
    effect = detectable_effect(deviation, pilot.problems)
    found = p_values(Truth(200, 4, 0.7, effect), STUDIES, RESAMPLES) <= 0.05
    assert 0.75 <= found.mean() <= 0.85


@pytest.mark.parametrize("truth", [Truth(30, 4, 0.8), Truth(100, 16, 0.95), Truth(200, 16, 0.6)], ids=str)
def test_interval_of_an_accuracy_holds_the_truth(truth: Truth) -> None:
    assert LOWEST <= accuracy_coverage(truth, 2000) <= HIGHEST


@pytest.mark.parametrize("samples", [4, 16])
def test_interval_of_an_accuracy_near_1_is_not_too_narrow(samples: int) -> None:
    assert accuracy_coverage(Truth(30, samples, 0.98), 2000) >= LOWEST


@pytest.mark.parametrize("problems", [20, 50, 200])
def test_interval_of_an_accuracy_of_single_responses_holds_the_truth(problems: int) -> None:
    """No simulation: the probability of each number of correct responses is known."""
    found = [rate(np.repeat([1.0, 0.0], [right, problems - right]), problems) for right in range(problems + 1)]
    low, high = np.array([each.low for each in found]), np.array([each.high for each in found])
    shares = []
    for accuracy in np.linspace(0.05, 0.95, 91):
        holds = (low <= accuracy) & (accuracy <= high)
        shares.append(stats.binom.pmf(np.arange(problems + 1), problems, accuracy)[holds].sum())
    assert min(shares) >= LOWEST
    assert 0.95 <= np.mean(shares) <= HIGHEST


def accuracy_coverage(truth: Truth, studies: int, seed: int = 0) -> float:
    """Share of studies whose interval holds the first arm's true accuracy."""
    held = 0
    for by_problem in rates(truth, studies, seed)[0]:
        found = rate(by_problem, truth.problems * truth.samples)
        held += found.low <= truth.accuracy <= found.high
    return held / studies
