"""Metrics of documents, from grades that are given or made of short texts."""

from __future__ import annotations

from typing import Any

import pytest

from kvpolicy.lmeval_tasks.grading.verdict import Grade, Verdict
from kvpolicy.lmeval_tasks.reasoning.scoring import (
    count_responses,
    metrics,
    process_numeric_results,
    process_results,
)
from kvpolicy.sglang_plugin.lmeval_text import TextWithMeta

DOC = {"id": "a", "problem": "?", "answer": "18"}
RECORD = {"kv_bytes_mean": 1.0, "kv_bytes_full_mean": 4.0}


def grade(verdict: Verdict, **flags: Any) -> Grade:
    given = {"truncated": False, "looped": False, "garbage": False, "unfinished_thinking": False, **flags}
    return Grade(verdict=verdict, answer="17", gold="18", **given)


def text(content: str, finish: str = "stop", tokens: int = 7, record: dict[str, Any] | None = None) -> str:
    meta = {"finish_reason": {"type": finish}, "completion_tokens": tokens}
    return TextWithMeta(content, meta if record is None else meta | {"kv_policy": record})


def test_each_verdict_and_flag_is_a_rate_over_the_samples_of_a_document() -> None:
    grades = [
        grade(Verdict.CORRECT),
        grade(Verdict.CORRECT, looped=True, truncated=True),
        grade(Verdict.NO_ANSWER, truncated=True, unfinished_thinking=True),
        grade(Verdict.WRONG, garbage=True, truncated=True),
    ]
    measured = metrics([text("", tokens=tokens) for tokens in (2, 4, 6, 12)], grades)
    rows = measured.pop("responses")
    assert measured == {
        "exact_match": 0.5,
        "wrong": 0.25,
        "no_answer": 0.25,
        "unparseable": 0.0,
        "grader_timeout": 0.0,
        "truncated": 0.75,
        "looped": 0.25,
        "garbage": 0.25,
        "unfinished_thinking": 0.25,
        "response_tokens": 6.0,
    }
    assert [row["verdict"] for row in rows] == ["correct", "correct", "no_answer", "wrong"]
    assert rows[1] == {
        "verdict": "correct",
        "answer": "17",
        "truncated": True,
        "looped": True,
        "garbage": False,
        "unfinished_thinking": False,
        "tokens": 4,
    }


@pytest.mark.parametrize("verdict", list(Verdict))
def test_the_verdicts_add_up_and_accuracy_counts_the_correct_alone(verdict: Verdict) -> None:
    measured = metrics(["?"], [grade(verdict)])
    names = {"correct": "exact_match"}
    assert {other: measured[names.get(other, other)] for other in map(str, Verdict)} == {
        str(other): float(other is verdict) for other in Verdict
    }


def test_the_records_of_the_cache_are_kept_in_the_order_of_the_samples() -> None:
    first, second = RECORD, RECORD | {"kv_bytes_mean": 2.0}
    one = metrics([text("", record=first)], [grade(Verdict.WRONG)])
    assert one["kv_policy"] == first
    assert [type(one[name]) for name in ("exact_match", "wrong", "truncated")] == [int, int, int]
    several = metrics([text("", record=first), text("", record=second)], [grade(Verdict.WRONG)] * 2)
    assert several["kv_policy"] == [first, second]


def test_what_not_every_text_tells_is_left_out() -> None:
    grades = [grade(Verdict.WRONG), grade(Verdict.WRONG, truncated=None)]
    measured = metrics([text("", record=RECORD), "plain"], grades)
    assert measured.keys() & {"truncated", "response_tokens", "kv_policy"} == set()
    assert [row["tokens"] for row in measured["responses"]] == [7, None]
    assert [row["truncated"] for row in measured["responses"]] == [False, None]


THOUGHT = "<think>Perhaps \\boxed{18}? Let me see."


@pytest.mark.parametrize(
    ("response", "thinking", "verdict", "flags"),
    [
        pytest.param(text("So \\boxed{18}."), False, "correct", set(), id="correct"),
        pytest.param(text("So \\boxed{17}."), False, "wrong", set(), id="wrong"),
        pytest.param(text("So 18.", "length"), False, "no_answer", {"truncated"}, id="cut off"),
        pytest.param(text("\\boxed{18} And", "length"), False, "correct", {"truncated"}, id="cut off after the answer"),
        pytest.param(
            text(THOUGHT, "length"), False, "no_answer", {"truncated", "unfinished_thinking"}, id="still thinking"
        ),
        pytest.param(text(THOUGHT), False, "no_answer", {"unfinished_thinking"}, id="ended in thoughts"),
        pytest.param(text(THOUGHT + "</think>\\boxed{18}"), False, "correct", set(), id="thought"),
        pytest.param(text("\\boxed{18} But"), True, "no_answer", {"unfinished_thinking"}, id="the prompt opened it"),
        pytest.param(text("\\boxed{17}</think>\\boxed{18}"), True, "correct", set(), id="and the response closed it"),
        pytest.param(text("She sells 9 eggs. " * 9), False, "no_answer", {"looped"}, id="loop"),
    ],
)
def test_a_response_is_graded_with_what_its_text_remembers(
    response: str, thinking: bool, verdict: str, flags: set[str]
) -> None:
    (row,) = process_results(DOC, [response], thinking=thinking)["responses"]
    assert row["verdict"] == verdict
    assert {name for name, value in row.items() if value is True} == flags


def test_a_numeric_task_takes_a_number_that_is_not_boxed() -> None:
    assert process_results(DOC, ["The answer is 18."])["no_answer"] == 1
    assert process_numeric_results(DOC, ["The answer is 18."])["exact_match"] == 1
    assert process_numeric_results(DOC, [text("The answer is 18. Or", "length")])["exact_match"] == 1
    assert process_numeric_results(DOC, [text("She sells 18", "length")])["no_answer"] == 1
    assert process_numeric_results(DOC, ["The answer is 18"], thinking=True)["unfinished_thinking"] == 1


def test_the_table_says_how_many_responses_there_were() -> None:
    assert count_responses([[{}, {}], [{}], [{}, {}, {}]]) == 6
