"""Findings in words: shown, not shown, and shown only as long as one looks at nothing else."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kvpolicy.reports.ab import sentences as words
from kvpolicy.reports.ab.failure_modes import Evaporation, IsoCacheContrast
from kvpolicy.reports.ab.memory import IsoCache, MemoryMatch
from kvpolicy.reports.ab.plan import Plan, PlanFile, Run
from kvpolicy.reports.ab.report import Comparison, Contrast, Report
from kvpolicy.reports.ab.statistics import PairedDifference

M = "\u2212"
BELOW = PairedDifference(
    problems=299,
    differing=80,
    difference=-0.0211,
    low=-0.04,
    high=-0.003,
    family_low=-0.045,
    family_high=0.002,
    p=0.0204,
    deviation=0.2,
    detectable=0.0345,
    warnings=(),
)
COMPARISON = Comparison(
    task="kvp_math500",
    baseline="full",
    arm="vase-dkv",
    accuracy=BELOW,
    bonferroni=0.0408,
    holm=0.0408,
    memory=MemoryMatch(0.3104, 0.32),
    iso=IsoCache(1.0, 0.31),
    evaporation=(),
)


def said(cells: int = 2, accuracy: dict[str, object] | None = None, **changed: object) -> str:
    found = dataclasses.replace(BELOW, **(accuracy or {}))  # type: ignore[arg-type]
    return words.sentence(dataclasses.replace(COMPARISON, accuracy=found, **changed), cells)  # type: ignore[arg-type]


def test_a_loss() -> None:
    assert said() == (
        f"vase-dkv is 2.1 points below full on kvp_math500 (95 % {M}4.0 … {M}0.3, p 0.020, Holm 0.041) "
        "at 31 % of its mean KV bytes (unmatched)."
    )


def test_a_gain_at_equal_memory() -> None:
    up = {"difference": 0.021, "low": 0.003, "high": 0.04}
    assert said(accuracy=up, memory=MemoryMatch(1.0134, 1)) == (
        "vase-dkv is 2.1 points above full on kvp_math500 (95 % +0.3 … +4.0, p 0.020, Holm 0.041) "
        "at equal memory (matched within 2 %: 1.01 times its mean KV bytes)."
    )


def test_nothing_shown() -> None:
    assert said(accuracy={"p": 0.612, "difference": 0.004, "low": -0.02, "high": 0.0299}, holm=1.0) == (
        f"vase-dkv is not shown to differ from full on kvp_math500: +0.4 points (95 % {M}2.0 … +3.0, p 0.61, Holm 1.00)"
        " at 31 % of its mean KV bytes (unmatched); a true difference of 3.5 points would be found 4 times in 5, "
        "a smaller one less often."
    )


def test_shown_alone_and_not_among_others() -> None:
    sentence = said(cells=6, holm=0.12)
    assert sentence.startswith(f"vase-dkv is not shown to differ from full on kvp_math500: {M}2.1 points")
    assert "; alone it would count, among 6 comparisons it does not; a true difference of 3.5 points" in sentence
    assert "alone" not in said(accuracy={"p": 0.05}, holm=0.12)


def test_equal_on_every_problem() -> None:
    equal = {"differing": 0, "difference": 0.0, "low": -0.01, "high": 0.01, "p": 1.0, "detectable": None}
    assert said(accuracy=equal, holm=1.0, memory=None) == (
        "vase-dkv and full are equally accurate on each of the 299 problems of kvp_math500 "
        f"(95 % {M}1.0 … +1.0, p 1.00, Holm 1.00) at a cache that is not known."
    )


@pytest.mark.parametrize(
    ("match", "sentence", "label"),
    [
        (MemoryMatch(1.0201, 1), "at 1.02 times its mean KV bytes (unmatched)", "unmatched, 1.020"),
        (MemoryMatch(1.02, 1), "at equal memory (matched within 2 %: 1.02 times its", "matched, 1.020"),
        (MemoryMatch(0.981, 1), "at equal memory (matched within 2 %: 0.98 times its", "matched, 0.981"),
        (MemoryMatch(0.98, 1), "at 98 % of its mean KV bytes (unmatched)", "unmatched, 0.980"),
        (MemoryMatch(0.0123, 1), "at 1.2 % of its mean KV bytes (unmatched)", "unmatched, 0.012"),
        (MemoryMatch(32.1, 1), "at 32 times its mean KV bytes (unmatched)", "unmatched, 32.100"),
        (None, "at a cache that is not known", "unknown"),
    ],
)
def test_memory_is_always_labelled(match: MemoryMatch | None, sentence: str, label: str) -> None:
    assert sentence in said(memory=match)
    assert words.memory_label(match) == label


def test_a_match_after_prefill_alone_is_told() -> None:
    assert words.iso_sentence(COMPARISON) == (
        "kvp_math500: after prefill vase-dkv has 1.000 times the cache of full, and over all decode steps 0.310 times: "
        "by the first they would pass as matched, and they are not."
    )
    for iso in (IsoCache(1.0, 1.01), IsoCache(0.5, 0.31), None):
        assert words.iso_sentence(dataclasses.replace(COMPARISON, iso=iso)) is None


def test_evaporation() -> None:
    study = Evaporation(50, -0.06, -0.02, 0.0204, 0.031, 0.085, 0.0619)
    assert words.evaporation_sentence(COMPARISON, study) == (
        f"kvp_math500: studies of 50 such problems would put vase-dkv between {M}6.0 and +2.0 points from full (9 of "
        f"10 of them; here {M}2.1), and the best of 10 would report +3.1; 8.5 % of them would find p below 0.05, and "
        "report a difference of 6.2 points on average."
    )
    none = dataclasses.replace(study, significant=0.0, significant_gain=None)
    assert words.evaporation_sentence(COMPARISON, none).endswith("0.0 % of them would find p below 0.05.")


def contrast(by_mean: str, gain: float) -> Contrast:
    up, other = dataclasses.replace(BELOW, difference=0.05), dataclasses.replace(BELOW, difference=gain)
    sizes = (IsoCache(1.0, 2.0), IsoCache(0.4, 1.01))
    return Contrast("kvp_math500", "alpha", IsoCacheContrast("h2o-64", sizes[0], up, by_mean, sizes[1], other, ()))


def test_a_contrast() -> None:
    assert words.contrast_sentence(contrast("h2o-128", -0.0004)) == (
        "kvp_math500: alpha is 5.0 points above h2o-64, which has the nearest cache after prefill (1.00 times, on "
        "average 2.00 times), and 0.0 points from h2o-128, which has the nearest mean cache (1.01 times)."
    )
    assert "so there is nothing to contrast" in words.contrast_sentence(contrast("h2o-64", 0.1))


def report(split: str | None, runs: list[str] | None, **of_a: str) -> Report:
    plan = Plan({"a": of_a, "b": {}}, ("t",), "confirm", (("a", "b"),), (0,))
    found = None if runs is None else PlanFile(plan, tuple(Run("2026-01-02T12:00:00+00:00", run) for run in runs))
    return Report(None, split, "a", {}, (), {}, (), (), found, ())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("split", "runs", "sentence"),
    [
        (None, None, "which part of the data they are of was not asked"),
        ("dev", None, "no result of it is a confirmation"),
        ("all", None, "settings that were chosen on them are not confirmed"),
        ("confirm", None, "no plan was written before it was looked at"),
        ("confirm", ["a", "b"], "before the first of 2 runs, one of each arm that was run."),
        ("confirm", ["a", "b", "b", "b"], "before the first of 4 runs; 2 of them ran an arm again."),
    ],
)
def test_what_part_of_the_data_it_is(split: str | None, runs: list[str] | None, sentence: str) -> None:
    assert sentence in words.plan_sentence(report(split, runs))


def test_results_that_were_there_before_the_plan_are_named() -> None:
    assert words.plan_sentence(report("confirm", ["b"], folder="out/a")).endswith(
        "before the first of 1 runs, one of each arm that was run; results of a were there already."
    )


@pytest.mark.parametrize(
    ("share", "signed"), [(0.0004, "0.0"), (-0.0004, "0.0"), (0.0006, "+0.1"), (-0.1234, f"{M}12.3"), (1, "+100.0")]
)
def test_points(share: float, signed: str) -> None:
    assert words.points(share) == signed


@pytest.mark.parametrize(
    ("p", "written"), [(1.0, "1.00"), (0.5, "0.50"), (0.0499, "0.050"), (0.0123, "0.012"), (1 / 10001, "0.0001")]
)
def test_p_values(p: float, written: str) -> None:
    assert words.p_value(p) == written


def test_no_sentence_has_more_than_one_line(tmp_path: Path) -> None:
    assert "\n" not in said() + said(holm=0.2)
