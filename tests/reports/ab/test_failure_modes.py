"""Gains that evaporate and gains that come from memory, on data where both are known."""

from __future__ import annotations

import numpy as np
import pytest

from kvpolicy.reports.ab.failure_modes import evaporation, iso_cache_contrast
from kvpolicy.reports.ab.memory import ArmMemory
from kvpolicy.reports.ab.statistics import compare
from tests.reports.ab.simulated_arms import Truth, rates


def test_small_studies_scatter_further_and_their_best_promises_most() -> None:
    """No gain at all, 500 problems, 30 % of which an arm wins or loses."""
    differences = np.repeat([1.0, -1.0, 0.0], [75, 75, 350])
    small, large = evaporation(differences)
    assert (small.size, large.size) == (50, 200)
    for found in (small, large):
        deviation = np.sqrt(0.3 / found.size)
        assert found.median == pytest.approx(0, abs=0.25 * deviation)
        assert (found.low, found.high) == pytest.approx((-1.645 * deviation, 1.645 * deviation), rel=0.1)
        assert found.best_of_looks == pytest.approx(1.539 * deviation, rel=0.1)  # largest of 10 normal numbers
        assert found.significant <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 200)
        assert found.significant_gain is not None
        assert found.significant_gain > 1.8 * deviation
    assert small.best_of_looks == pytest.approx(2 * large.best_of_looks, rel=0.1)


def test_a_large_gain_does_not_evaporate() -> None:
    first, second = (arm[0] for arm in rates(Truth(299, 4, 0.4, 0.3), 1, seed=0))
    gain = float((second - first).mean())
    for found in evaporation(second - first):
        assert found.low > 0
        assert found.median == pytest.approx(gain, abs=0.02)
        assert found.significant == 1.0
        assert found.significant_gain == pytest.approx(gain, abs=0.02)


def test_a_gain_too_small_for_fifty_problems_looks_larger_where_it_is_found() -> None:
    differences = np.repeat([1.0, -1.0, 0.0], [60, 40, 300])
    small, large = evaporation(differences)
    assert small.significant < large.significant < 1
    assert small.significant_gain is not None
    assert small.significant_gain > 3 * differences.mean()


def test_equal_arms_find_nothing() -> None:
    for found in evaporation(np.zeros(250)):
        assert (found.low, found.median, found.high, found.best_of_looks) == (0, 0, 0, 0)
        assert (found.significant, found.significant_gain) == (0, None)


@pytest.mark.parametrize(("problems", "sizes"), [(49, []), (50, [50]), (199, [50]), (200, [50, 200])])
def test_studies_larger_than_the_data_are_left_out(problems: int, sizes: list[int]) -> None:
    assert [found.size for found in evaporation(np.resize([1.0, 0.0], problems))] == sizes


def test_the_same_seed_draws_the_same_studies() -> None:
    differences = np.resize([1.0, 0.0, -1.0, 0.0, 1.0], 100)
    assert evaporation(differences, (50,), seed=1) == evaporation(differences, (50,), seed=1)
    assert evaporation(differences, (50,), seed=1) != evaporation(differences, (50,), seed=2)


def memory(after_prefill: float, mean: float) -> ArmMemory:
    return ArmMemory(
        responses=1,
        without_record=0,
        decode_steps=1,
        kv_bytes_mean=mean,
        kv_bytes_full_mean=mean,
        kv_bytes_peak=mean,
        kv_bytes_end=mean,
        resident_mean=mean,
        beside_bytes=0,
        after_prefill_bytes=after_prefill,
    )


def test_a_gain_from_memory_vanishes_at_equal_mean_cache() -> None:
    """The arm keeps what it decodes. A baseline that starts as small stays small and loses; one as large does not."""
    right = np.resize([1.0, 1.0, 0.0], 300)
    small, equal = np.resize([1.0, 0.0, 0.0], 300), np.roll(right, 1)
    baselines = {
        "budget 64": (small, memory(64, 70)),
        "budget 512": (equal, memory(400, 505)),
        "budget 1024": (right, memory(500, 1000)),
    }
    found = iso_cache_contrast(right, memory(64.5, 500), baselines)
    assert (found.by_prefill, found.by_mean) == ("budget 64", "budget 512")
    assert found.by_prefill_sizes.misleading
    assert found.by_prefill_sizes.mean == pytest.approx(500 / 70)
    assert found.by_mean_sizes.mean == pytest.approx(500 / 505)
    assert found.by_prefill_gain == compare(small, right, cells=2)
    assert found.by_prefill_gain.low > 0
    assert found.by_mean_gain.low < 0 < found.by_mean_gain.high
    assert found.warnings == ()


def test_a_baseline_that_is_only_the_nearest_is_named() -> None:
    arm = np.resize([1.0, 0.0], 20)
    baselines = {"low": (arm, memory(20, 40)), "high": (arm, memory(1000, 150))}
    found = iso_cache_contrast(arm, memory(100, 80), baselines)
    # 100 is nearer to 20 (a factor 5) than to 1000, 80 nearer to 150 (1.875) than to 40 (2)
    assert (found.by_prefill, found.by_mean) == ("low", "high")
    prefill, mean = found.warnings
    assert (
        prefill
        == "no baseline has the arm's cache after prefill: that of the nearest, low, is off by a factor of 5.000."
    )
    assert "mean cache: that of the nearest, high, is off by a factor of 0.533" in mean


def test_a_contrast_needs_baselines() -> None:
    with pytest.raises(ValueError, match="at least one baseline"):
        iso_cache_contrast(np.zeros(3), memory(1, 1), {})
