from __future__ import annotations

import itertools

import pytest

from kvpolicy.lmeval_tasks.grading.verdict import Grade, Verdict, grade_of

LOOP, GARBAGE = "Wait, let me check that. " * 6, "!" * 150


@pytest.mark.parametrize("verdict", Verdict)
@pytest.mark.parametrize("truncated", [None, False, True])
@pytest.mark.parametrize("unfinished", [False, True])
def test_flags_are_independent_of_the_verdict_and_of_each_other(
    verdict: Verdict, truncated: bool | None, unfinished: bool
) -> None:
    for looped, garbage in itertools.product((False, True), repeat=2):
        text = "So 5 it is." + LOOP * looped + GARBAGE * garbage
        grade = grade_of(text, verdict, answer="5", gold="6", truncated=truncated, unfinished_thinking=unfinished)
        # A flood of one character repeats itself, and hides what stood before it.
        assert grade == Grade(verdict, "5", "6", truncated, looped or garbage, garbage, unfinished)
        assert grade.correct == (verdict == "correct")
