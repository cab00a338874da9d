"""Golden cases: each with the verdict that is right."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.lmeval_tasks.grading import math
from kvpolicy.lmeval_tasks.grading.math import grade_math
from kvpolicy.lmeval_tasks.grading.verdict import Grade, Verdict

CASES = json.loads(Path(__file__).with_name("math_cases.json").read_text(encoding="utf-8"))
FLAGS = ("truncated", "looped", "garbage", "unfinished_thinking")


def text_of(case: dict[str, Any]) -> str:
    if "repeated" in case:
        before, repeated, times, after = case["repeated"]
        return f"{before}{repeated * times}{after}"
    return case["text"] if "text" in case else rf"\boxed{{{case['answer']}}}"


def marked(case: dict[str, Any]) -> Any:
    reason = case.get("known_failure")
    marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
    return pytest.param(case, id=case["id"], marks=marks)


def graded(case: dict[str, Any]) -> Grade:
    pytest.importorskip("math_verify")
    return grade_math(
        text_of(case),
        case["gold"],
        truncated=case.get("truncated"),
        thinking=case.get("thinking"),
        numeric=case.get("numeric", False),
    )


@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_golden_case(case: dict[str, Any]) -> None:
    grade = graded(case)
    assert grade.verdict == case["verdict"], grade.answer
    assert {flag for flag in FLAGS if getattr(grade, flag)} == set(case.get("flags", []))
    assert grade.correct == (case["verdict"] == "correct")


def test_the_cases_are_many_and_of_every_verdict() -> None:
    assert len(CASES) >= 120
    assert len({case["id"] for case in CASES}) == len(CASES)
    assert {case["verdict"] for case in CASES} == set(Verdict)
    assert sum("known_failure" in case for case in CASES) <= 10


@pytest.mark.parametrize("gold", ["{}", "${}$", r"\boxed{{{}}}", r"$\boxed{{{}}}$"])
def test_a_gold_answer_may_be_wrapped(gold: str) -> None:
    pytest.importorskip("math_verify")
    assert grade_math(r"\boxed{0.5}", gold.format(r"\frac{1}{2}"), truncated=None).correct
    assert not grade_math(r"\boxed{0.6}", gold.format(r"\frac{1}{2}"), truncated=None).correct


def test_the_grade_keeps_its_evidence() -> None:
    grade = grade_math(r"so \boxed{ 17 }", "18", truncated=False)
    assert grade == Grade(Verdict.WRONG, "17", "18", False, False, False, False)
    assert grade_math("no", "18", truncated=None).truncated is None


@pytest.mark.parametrize(
    ("answer", "gold"),
    [("18", "18"), ("1,800", "1800"), ("0.5", r"\frac12"), (r"\text{(B)}", "B"), ("(1, 2]", "(1,2]"), ("none", "18")],
)
def test_plain_answers_need_no_algebra(answer: str, gold: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math, "WORKER", None)
    assert grade_math(rf"\boxed{{{answer}}}", gold, truncated=None).correct == (answer != "none")


def test_a_long_text_is_graded_in_no_time() -> None:
    text = "".join(rf"Let $x_{{{i}}} = \frac{{{i}}}{{7}}$, so \{{a\}} and \boxed{{{i}}}. " for i in range(20_000))
    start = time.process_time()
    assert grade_math(text, "19999", truncated=None).correct
    assert time.process_time() - start < 5
