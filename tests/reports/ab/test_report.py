"""The numbers of a comparison, against their definitions, computed here from the verdicts that were put in."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpolicy.reports.ab.accuracy import rate
from kvpolicy.reports.ab.arms import AbError
from kvpolicy.reports.ab.document import document
from kvpolicy.reports.ab.effect import NoEffectError
from kvpolicy.reports.ab.failure_modes import evaporation
from kvpolicy.reports.ab.origin import read_all
from kvpolicy.reports.ab.report import Report, make_report
from kvpolicy.reports.ab.statistics import compare
from tests.reports.ab.made import evicting, packed, samples_of, steps_of, whole
from tests.reports.ab.runs import BYTES, TASK, write

REPEATS = 2
Records = Callable[[int, int], dict[str, Any]] | None


def verdicts(problems: int, seed: int, accuracy: float) -> list[list[str]]:
    rng = np.random.default_rng(seed)
    wrong = ("wrong", "no_answer", "unparseable")
    return [
        ["correct" if rng.random() < accuracy else wrong[rng.integers(3)] for _ in range(REPEATS)]
        for _ in range(problems)
    ]


def by_problem(given: list[list[str]], name: str = "correct") -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.array([np.mean([each == name for each in of_problem]) for of_problem in given])


def report_of(
    folder: Path, arms: dict[str, tuple[list[list[str]], Records]], tasks: tuple[str, ...] = (TASK,), **options: Any
) -> Report:
    found = []
    for name, (given, records) in arms.items():
        for task in tasks:
            write(folder / name, samples_of(given, records), task=task)
        found.append(read_all(name, folder / name, None))
    return make_report([arm for arm, _ in found], [origin for _, origin in found], split=None, **options)


FULL, SMALL, TINY, LOW = (verdicts(60, seed, accuracy) for seed, accuracy in enumerate((0.8, 0.7, 0.3, 0.75)))
ARMS: dict[str, tuple[list[list[str]], Records]] = {
    "full": (FULL, whole),
    "small": (SMALL, evicting(128)),
    "tiny": (TINY, evicting(64)),
    "int4": (LOW, packed),
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return report_of(tmp_path_factory.mktemp("arms"), ARMS)


def test_accuracy_verdicts_and_lengths(report: Report) -> None:
    for name, (given, _) in ARMS.items():
        found = report.of(name, TASK)
        assert (found.problems, found.responses) == (60, 120)
        assert found.accuracy == rate(by_problem(given)[np.argsort(hashes(report))], 120)
        for verdict in ("correct", "wrong", "no_answer", "unparseable", "grader_timeout"):
            assert found.verdicts[verdict].value == pytest.approx(by_problem(given, verdict).mean())
        assert sum(each.value for each in found.verdicts.values()) == pytest.approx(1)
        tokens = [steps_of(problem, repeat) + 1 for problem in range(60) for repeat in range(REPEATS)]
        assert found.lengths is not None
        assert found.lengths.mean == pytest.approx(np.mean(tokens))
        assert found.lengths.median == np.median(tokens)
        assert found.lengths.longest == max(tokens)


def hashes(report: Report) -> list[str]:
    """`doc_hash` of each problem, in the order in which they were written."""
    found = {each.identifier: each.key.doc_hash for each in report.pairs.arms[0].of_task(TASK)}
    return [found[f"test/algebra/{number}.json"] for number in range(60)]


def test_differences_are_paired_and_corrected_for_all_comparisons(report: Report) -> None:
    expected = [compare(by_problem(FULL), by_problem(other), cells=3) for other in (SMALL, TINY, LOW)]
    assert [c.accuracy for c in report.comparisons] == expected
    assert [(c.baseline, c.arm) for c in report.comparisons] == [("full", name) for name in ("small", "tiny", "int4")]
    p = [found.p for found in expected]
    assert [c.bonferroni for c in report.comparisons] == [min(1, 3 * each) for each in p]
    smallest, middle, largest = sorted(range(3), key=p.__getitem__)
    holm = {smallest: 3 * p[smallest]}
    holm[middle] = max(holm[smallest], min(1, 2 * p[middle]))
    holm[largest] = max(holm[middle], p[largest])
    assert [c.holm for c in report.comparisons] == [holm[place] for place in range(3)]
    assert report.comparisons[1].holm < 0.05 < report.comparisons[0].holm


def test_studies_of_fewer_problems(report: Report) -> None:
    for comparison, other in zip(report.comparisons, (SMALL, TINY, LOW), strict=True):
        order = np.argsort(hashes(report))
        studies = evaporation((by_problem(other) - by_problem(FULL))[order])
        assert list(comparison.evaporation) == studies
        assert [study.size for study in studies] == [50]


def weighted(records: Callable[[int, int], dict[str, Any]]) -> float:
    made = [records(20, steps_of(problem, repeat)) for problem in range(60) for repeat in range(REPEATS)]
    total = sum(each["decode_steps"] for each in made)
    return float(sum(each["decode_steps"] * each["kv_bytes_mean"] for each in made) / total)


def test_memory_is_weighted_by_decode_steps_and_labelled(report: Report) -> None:
    means = {name: weighted(records) for name, (_, records) in ARMS.items() if records is not None}
    for name, mean in means.items():
        memory = report.of(name, TASK).memory
        assert memory is not None
        assert memory.kv_bytes_mean == pytest.approx(mean)
        assert memory.kv_bytes_full_mean == pytest.approx(means["full"])
    assert len(report.memory) == 6
    for (task, one, other), match in report.memory.items():
        assert task == TASK
        assert match.ratio == pytest.approx(means[other] / means[one])
        assert match.matched == (abs(np.log(means[other] / means[one])) <= np.log(1.02))
    for comparison in report.comparisons:
        assert comparison.memory == report.memory[TASK, "full", comparison.arm]
        assert comparison.iso is not None
        assert comparison.iso.mean == comparison.memory.ratio
    assert report.of("int4", TASK).effect == dataclasses.replace(
        report.of("full", TASK).effect, bits_per_element=6.5, protected_end=pytest.approx(0.06), denied=0
    )


def test_what_the_policy_did(report: Report) -> None:
    effect = report.of("tiny", TASK).effect
    made = [evicting(64)(20, steps_of(problem, repeat)) for problem in range(60) for repeat in range(REPEATS)]
    assert effect is not None
    assert effect.evictions == sum(each["evictions"] for each in made)
    assert effect.tokens_evicted == sum(each["tokens_evicted"] for each in made)
    assert effect.compacted == sum(each["evictions"] > 0 for each in made)
    assert effect.eviction_seconds == 0.25 * effect.compacted
    assert (effect.records, effect.deferred, effect.read_share) == (120, 0, None)
    assert report.of("full", TASK).is_whole
    assert not report.of("int4", TASK).is_whole


def test_only_methods_under_several_budgets_are_contrasted(report: Report) -> None:
    (contrast,) = report.contrasts
    assert (contrast.arm, contrast.task) == ("int4", TASK)
    means = {name: weighted(records) for name, (_, records) in ARMS.items() if records is not None}
    nearest = min(("small", "tiny"), key=lambda name: abs(np.log(means["int4"] / means[name])))
    assert contrast.found.by_mean == nearest
    assert contrast.found.by_mean_gain.difference == pytest.approx(
        (by_problem(LOW) - by_problem(ARMS[nearest][0])).mean()
    )


def test_any_arm_can_be_the_baseline(tmp_path: Path) -> None:
    report = report_of(tmp_path, ARMS, baseline="tiny")
    assert [(c.baseline, c.arm) for c in report.comparisons] == [("tiny", name) for name in ("full", "small", "int4")]
    assert report.comparisons[0].accuracy.difference == pytest.approx((by_problem(FULL) - by_problem(TINY)).mean())
    with pytest.raises(AbError, match=r"--baseline none is not an arm; the arms are full, small, tiny, int4\."):
        report_of(tmp_path / "again", ARMS, baseline="none")


def test_every_task_is_a_cell(tmp_path: Path) -> None:
    arms = {name: ARMS[name] for name in ("full", "tiny", "int4")}
    report = report_of(tmp_path, arms, tasks=("kvp_aime25", TASK))
    assert [(c.task, c.arm) for c in report.comparisons] == [
        (task, arm) for task in ("kvp_aime25", TASK) for arm in ("tiny", "int4")
    ]
    assert report.comparisons[0].accuracy == compare(by_problem(FULL), by_problem(TINY), cells=4)


def test_without_records_memory_is_not_known(tmp_path: Path) -> None:
    report = report_of(tmp_path, {"stock": (FULL, None), "small": (SMALL, evicting(128))})
    found = report.of("stock", TASK)
    assert (found.memory, found.effect, found.method, found.is_whole) == (None, None, None, False)
    assert report.memory == {}
    assert report.comparisons[0].memory is None
    assert report.warnings[0] == f"{TASK}: no response of arm stock carries a record, so its cache is not known."


def test_an_arm_that_did_nothing_is_no_arm(tmp_path: Path) -> None:
    def idle(prompt: int, steps: int) -> dict[str, Any]:
        return evicting(64)(prompt, steps) | {"evictions": 0}

    with pytest.raises(NoEffectError, match=r"arm small .* evicted nothing"):
        report_of(tmp_path, {"full": (FULL, whole), "small": (SMALL, idle)})


def test_one_problem_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AbError, match=f"{TASK}: one problem is no sample"):
        report_of(tmp_path, {"full": (FULL[:1], whole), "small": (SMALL[:1], evicting(64))})


def test_what_spoils_a_comparison_is_warned_of(tmp_path: Path) -> None:
    def troubled(prompt: int, steps: int) -> dict[str, Any]:
        return packed(prompt, steps) | {"evictions_deferred": 2, "protected_rows_denied": 7}

    for name, given, records, model in (("a", FULL, whole, "m"), ("b", SMALL, troubled, "other")):
        write(tmp_path / name, samples_of(given, records), model=model)
    found = [read_all(name, tmp_path / name, None) for name in "ab"]
    origins = [dataclasses.replace(o, versions={"sglang": v}) for (_, o), v in zip(found, ("1", "2"), strict=True)]
    origins[0] = dataclasses.replace(origins[0], chat_template="abc")
    report = make_report([arm for arm, _ in found], origins, split=None)
    assert report.warnings == (
        f"{TASK}: 240 evictions of arm b were put off for want of free slots; a larger pool avoids it.",
        f"{TASK}: the rows for protected tokens ran out under arm b (up to 7 tokens were denied one); "
        "a larger max_running_requests sets more of them aside.",
        "the arms ran different models: m, other.",
        "the arms ran under different versions of sglang: 1, 2.",
        "the arms were run with different chat templates, or not all with one.",
    )


def test_the_document_holds_the_same_numbers(report: Report) -> None:
    numbers = json.loads(json.dumps(document(report), allow_nan=False))
    for written, comparison in zip(numbers["comparisons"], report.comparisons, strict=True):
        assert written["accuracy"]["difference"] == comparison.accuracy.difference
        assert (written["holm"], written["bonferroni"]) == (comparison.holm, comparison.bonferroni)
        assert comparison.memory is not None
        assert written["memory"]["matched"] is comparison.memory.matched
        assert [study["size"] for study in written["evaporation"]] == [50]
    measures = {each["arm"]: each for each in numbers["measures"]}
    small = report.of("small", TASK).memory
    assert small is not None
    assert measures["small"]["memory"]["kv_bytes_mean"] == small.kv_bytes_mean
    assert measures["small"]["memory"]["kv_bytes_mean"] < BYTES * 200
    assert measures["int4"]["effect"]["bits_per_element"] == 6.5
    assert numbers["plan"] is None
    assert [origin["arm"] for origin in numbers["origins"]] == list(ARMS)
