"""Arms are compared only if they were asked the same; what they say is averaged problem by problem."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpolicy.reports.ab import pairs as ab_pairs
from kvpolicy.reports.ab.pairs import pair
from kvpolicy.reports.ab.responses import Arm, read_arm
from kvpolicy.reports.ab.statistics import compare
from kvpolicy.reports.lmeval_output import OutputError
from tests.reports.ab.runs import TASK, record, row, sample, write

VERDICTS = ("correct", "wrong", "no_answer")


def arm(folder: Path, name: str, samples: list[dict[str, Any]], **keywords: Any) -> Arm:
    write(folder / name, samples, **keywords)
    return read_arm(name, folder / name)


def problems(outcomes: list[list[str]], **changed: Any) -> list[dict[str, Any]]:
    return [sample(number, [row(verdict) for verdict in each], **changed) for number, each in enumerate(outcomes)]


def test_rows_of_all_arms_are_the_same_problems(tmp_path: Path) -> None:
    outcomes = [["correct", "correct"], ["correct", "wrong"], ["no_answer", "wrong"]]
    first = arm(tmp_path, "a", problems(outcomes))
    second = arm(tmp_path, "b", problems([each[::-1] for each in outcomes])[::-1])
    pairs = pair([first, second])
    assert pairs.tasks == (TASK,)
    order = [f"test/algebra/{number}.json" for number in range(3)]
    identifiers = {response.key.doc_hash: response.identifier for response in first.responses.values()}
    expected = dict(zip(order, (1.0, 0.5, 0.0), strict=True))
    for name in "ab":
        by_problem = pairs.by_problem(name, TASK, ab_pairs.correct)
        assert by_problem is not None
        found = {identifiers[key]: rate for key, rate in zip(pairs.problems(TASK), by_problem, strict=True)}
        assert found == expected


def test_measures_beside_accuracy(tmp_path: Path) -> None:
    rows = [row(truncated=True, tokens=100), row("no_answer", truncated=True, looped=True, tokens=300)]
    samples = [sample(1, rows), sample(2, [row("wrong"), row()])]
    pairs = pair([arm(tmp_path, name, samples) for name in "ab"])

    def found(measure: ab_pairs.Measure) -> dict[str, float]:
        by_problem = pairs.by_problem("a", TASK, measure)
        assert by_problem is not None
        hashes = [each["doc_hash"] for each in samples]
        return {
            str(1 + hashes.index(key)): float(rate) for key, rate in zip(pairs.problems(TASK), by_problem, strict=True)
        }

    assert found(ab_pairs.flag("truncated")) == {"1": 1.0, "2": 0.0}
    assert found(ab_pairs.flag("looped")) == {"1": 0.5, "2": 0.0}
    assert found(ab_pairs.verdict("no_answer")) == {"1": 0.5, "2": 0.0}
    assert found(ab_pairs.tokens) == {"1": 200.0, "2": 200.0}


def test_a_measure_that_one_response_lacks_is_not_known(tmp_path: Path) -> None:
    samples = [sample(1, [row(), row(truncated=None)])]
    pairs = pair([arm(tmp_path, name, samples) for name in "ab"])
    assert pairs.by_problem("a", TASK, ab_pairs.flag("truncated")) is None
    assert pairs.by_problem("a", TASK, ab_pairs.flag("looped")) is not None


@pytest.mark.parametrize("copies", [2, 16])
def test_copies_of_the_same_responses_do_not_narrow_the_interval(tmp_path: Path, copies: int) -> None:
    rng = np.random.default_rng(0)
    outcomes = {name: [[VERDICTS[draw] for draw in rng.integers(0, 3, 2)] for _ in range(30)] for name in "ab"}
    results = []
    for times in (1, copies):
        arms = [arm(tmp_path / str(times), name, problems([each * times for each in outcomes[name]])) for name in "ab"]
        pairs = pair(arms)
        first, second = (pairs.by_problem(name, TASK, ab_pairs.correct) for name in "ab")
        assert first is not None
        assert second is not None
        results.append(compare(first, second))
    assert results[0].low < results[0].high
    assert results[0] == results[1]


def test_tasks_are_kept_apart(tmp_path: Path) -> None:
    arms = []
    for name in "ab":
        write(tmp_path / name, problems([["correct"]]), task="kvp_aime24")
        arms.append(arm(tmp_path, name, problems([["wrong"], ["wrong"]]), task="kvp_aime25"))
    pairs = pair(arms)
    assert pairs.tasks == ("kvp_aime24", "kvp_aime25")
    for task, expected in (("kvp_aime24", [1.0]), ("kvp_aime25", [0.0, 0.0])):
        by_problem = pairs.by_problem("b", task, ab_pairs.correct)
        assert by_problem is not None
        assert by_problem.tolist() == expected


def refused(folder: Path, first: list[dict[str, Any]], second: list[dict[str, Any]], **second_run: Any) -> str:
    arms = [arm(folder, "full", first), arm(folder, "small", second, **second_run)]
    with pytest.raises(OutputError) as refusal:
        pair(arms)
    message = str(refusal.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


THREE = [["correct"], ["wrong"], ["correct"]]


def test_missing_problems_are_counted(tmp_path: Path) -> None:
    message = refused(tmp_path / "1", problems(THREE), problems(THREE)[:1])
    assert f"{TASK}: of 3 problems, 2 are missing in arm small and 0 in arm full" in message
    message = refused(tmp_path / "2", problems(THREE)[:2], [*problems(THREE)[1:], sample(7, [row()])])
    assert "of 4 problems, 1 are missing in arm small and 2 in arm full" in message


def test_another_number_of_repeats_is_refused(tmp_path: Path) -> None:
    message = refused(tmp_path, problems(THREE), problems([["correct"], ["wrong", "wrong"], ["correct"]]))
    assert "for 1 of 3 problems" in message
    assert "(3 and 4 in all)" in message


def test_other_prompts_are_refused(tmp_path: Path) -> None:
    other = [*problems(THREE)[:1], *problems(THREE, prompt="Think first. 1 + 1?")[1:]]
    assert "the prompts of 2 of 3 problems differ between arms full and small" in refused(
        tmp_path, problems(THREE), other
    )


def test_other_gold_answers_are_refused(tmp_path: Path) -> None:
    other = [problems(THREE)[0] | {"target_hash": "another"}, *problems(THREE)[1:]]
    assert "the gold answers of 1 of 3 problems differ" in refused(tmp_path, problems(THREE), other)


def test_another_task_is_refused(tmp_path: Path) -> None:
    message = refused(tmp_path, problems(THREE), problems(THREE), task="kvp_gsm8k")
    assert message == f"arm small has not run {TASK}, which arm full has."


def test_a_third_arm_is_checked_too(tmp_path: Path) -> None:
    arms = [arm(tmp_path, name, problems(THREE)) for name in "ab"]
    arms.append(arm(tmp_path, "c", problems(THREE)[1:]))
    with pytest.raises(OutputError, match="1 are missing in arm c"):
        pair(arms)


def test_names_of_arms(tmp_path: Path) -> None:
    first = arm(tmp_path, "a", problems(THREE))
    with pytest.raises(OutputError, match="at least two arms of different names, got a, a"):
        pair([first, first])
    with pytest.raises(OutputError, match="got none"):
        pair([])
    with pytest.raises(OutputError, match="there is no arm c; the arms are a, b"):
        pair([first, arm(tmp_path, "b", problems(THREE))]).arm("c")


def test_copies_and_other_settings_are_warned_of(tmp_path: Path) -> None:
    varied = [sample(number, [row(), row()]) for number in range(3)]
    copied = [each | {"filtered_resps": ["the same", "the same"]} for each in varied[:2]] + varied[2:]
    hotter = [
        each | {"arguments": {"gen_args_0": {"arg_0": "What?", "arg_1": {"temperature": 1.0}}}} for each in varied
    ]
    quiet = pair([arm(tmp_path / "1", name, varied) for name in "ab"])
    assert quiet.warnings == ()
    (warning,) = pair([arm(tmp_path / "2", "a", varied), arm(tmp_path / "2", "b", copied)]).warnings
    assert "for 2 of 3 problems all responses of arm b are the same text" in warning
    (warning,) = pair([arm(tmp_path / "3", "a", varied), arm(tmp_path / "3", "b", hotter)]).warnings
    assert '{"temperature": 0.6} and {"temperature": 1.0}' in warning


def test_records_come_with_the_pairs(tmp_path: Path) -> None:
    samples = [sample(1, [row(), row()], [record(steps=90), record(steps=300)])]
    pairs = pair([arm(tmp_path, name, samples) for name in "ab"])
    assert [response.record for response in pairs.arm("b").of_task(TASK)] == samples[0]["kv_policy"]
