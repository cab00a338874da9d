"""Grade a response by running its program on all tests of the problem."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpolicy.lmeval_tasks.grading.verdict import grade_of
from kvpolicy.lmeval_tasks.livecodebench import compare, private_tests, programs
from kvpolicy.lmeval_tasks.livecodebench.code_block import last_program
from kvpolicy.lmeval_tasks.livecodebench.verdict import OF_STATUS, CodeGrade, CodeVerdict
from kvpolicy.lmeval_tasks.sandbox.outcome import Limits, Outcome, Status
from kvpolicy.lmeval_tasks.sandbox.run import run, run_all

_DEFAULT = Limits()
_MOST_CHARACTERS = 200


def grade_code(
    text: str,
    doc: Mapping[str, Any],
    *,
    truncated: bool | None = None,
    thinking: bool | None = None,
    limits: Limits = _DEFAULT,
) -> CodeGrade:
    """Grade a response to the problem `doc`, of whose tests the first failing one decides.

    doc : ``problem``, its text; ``public_test_cases``, a list of dictionaries with ``input`` and ``output``;
        ``function``, the name of the function to call, empty if the program reads standard input; and possibly
        ``private_test_cases``, encoded as on the hub.
    truncated : whether the response ended at the token limit; a flag of the grade, nothing more.
    thinking : see :func:`~kvpolicy.lmeval_tasks.livecodebench.code_block.last_program`.

    Raises
    ------
    SandboxError
        If programs cannot be isolated here.
    ValueError
        If the private tests cannot be decoded, or the problem has no tests.
    """
    tests = [*doc["public_test_cases"], *private_tests.decode(doc.get("private_test_cases") or "[]")]
    if not tests:
        raise ValueError(f"problem {doc['id']} has no tests")
    program, unfinished = last_program(text, thinking=thinking)
    if program is None:
        verdict, failed, error = CodeVerdict.NO_CODE, None, ""
    else:
        verdict, failed, error = _judge(program, doc, tests, limits)
    grade = grade_of(
        text,
        verdict.shared,
        answer=program,
        gold=f"{len(tests)} tests",
        truncated=truncated,
        unfinished_thinking=unfinished,
    )
    return CodeGrade(grade, verdict, failed, error)


def _judge(
    source: str, doc: Mapping[str, Any], tests: list[Mapping[str, str]], limits: Limits
) -> tuple[CodeVerdict, int | None, str]:
    compiled = run(programs.compiling(source), limits=limits)
    if compiled.status is not Status.FINISHED:
        return CodeVerdict.COMPILE_ERROR, None, _last_line(compiled.stderr)
    function = doc["function"]
    program = programs.calling(source, function) if function else programs.reading_stdin(source)
    same = compare.same_value if function else compare.same_output
    error = compare.allowed_error(doc["problem"])

    def passes(number: int, outcome: Outcome) -> bool:
        return outcome.status is Status.FINISHED and same(outcome.stdout, tests[number]["output"], error)

    outcomes, failed = run_all(program, [test["input"] for test in tests], passes, limits=limits)
    if failed is None:
        return CodeVerdict.CORRECT, None, ""
    verdict = OF_STATUS.get(outcomes[failed].status, CodeVerdict.WRONG_ANSWER)
    return verdict, failed, _last_line(outcomes[failed].stderr)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2][:_MOST_CHARACTERS]
