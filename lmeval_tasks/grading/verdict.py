"""What grading says of one response: a verdict, and beside it how the response broke down."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from kvpolicy.lmeval_tasks import failures


class Verdict(StrEnum):
    """Exactly one per response. Accuracy counts `CORRECT` alone; each of the others is a rate of its own."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"  # nothing is marked as the answer, or the thinking never ended
    UNPARSEABLE = "unparseable"  # what is marked cannot be read as mathematics, or is beyond the bounds on it
    GRADER_TIMEOUT = "grader_timeout"  # comparing it took more time or memory than the grader has, or broke it


class Grade(NamedTuple):
    """The verdict on one response, with its evidence.

    verdict : the flags below say nothing about it, nor about one another.
    answer : the text that was taken as the answer; None if there is none.
    gold : what it was compared with.
    truncated : the response ended at the token limit; None if that is not known.
    looped, garbage : see :mod:`kvpolicy.lmeval_tasks.failures`; thinking counts too.
    unfinished_thinking : the response never closed its thinking, so that all of it is thought.
    """

    verdict: Verdict
    answer: str | None
    gold: str
    truncated: bool | None
    looped: bool
    garbage: bool
    unfinished_thinking: bool

    @property
    def correct(self) -> bool:
        """Whether it counts for accuracy."""
        return self.verdict is Verdict.CORRECT


def grade_of(
    text: str,
    verdict: Verdict,
    *,
    answer: str | None,
    gold: str,
    truncated: bool | None,
    unfinished_thinking: bool = False,
) -> Grade:
    """A grade whose flags are read off the whole response."""
    return Grade(verdict, answer, gold, truncated, failures.looped(text), failures.garbage(text), unfinished_thinking)
