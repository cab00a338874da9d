"""What the tests say of a program, in more detail than the verdicts that all tasks share."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from kvpolicy.lmeval_tasks.grading.verdict import Grade, Verdict
from kvpolicy.lmeval_tasks.sandbox.outcome import Status


class CodeVerdict(StrEnum):
    """Exactly one per response; of the first test that fails."""

    CORRECT = "correct"
    WRONG_ANSWER = "wrong_answer"
    RUNTIME_ERROR = "runtime_error"
    TIME_LIMIT = "time_limit"
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    COMPILE_ERROR = "compile_error"
    NO_CODE = "no_code"

    @property
    def shared(self) -> Verdict:
        """The same in the terms of all tasks: a program that fails a test, in whatever way, is a wrong answer."""
        if self is CodeVerdict.NO_CODE:
            return Verdict.NO_ANSWER
        return Verdict.CORRECT if self is CodeVerdict.CORRECT else Verdict.WRONG


OF_STATUS = {
    Status.RUNTIME_ERROR: CodeVerdict.RUNTIME_ERROR,
    Status.TIME_LIMIT: CodeVerdict.TIME_LIMIT,
    Status.MEMORY: CodeVerdict.MEMORY,
    Status.OUTPUT_LIMIT: CodeVerdict.OUTPUT_LIMIT,
}


class CodeGrade(NamedTuple):
    """The verdict on one response, with its evidence.

    grade : the shared verdict and the flags; its answer is the program.
    verdict : the verdict in detail.
    failed_test : number of the first test that failed, from 0; None if none failed or none was run.
    error : the last line of standard error of that test.
    """

    grade: Grade
    verdict: CodeVerdict
    failed_test: int | None = None
    error: str = ""
