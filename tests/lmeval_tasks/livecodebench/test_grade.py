"""Grades of programs, right and wrong in every way, on problems of our own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvpolicy.lmeval_tasks.grading.verdict import Verdict
from kvpolicy.lmeval_tasks.livecodebench.grade import grade_code
from kvpolicy.lmeval_tasks.livecodebench.verdict import CodeVerdict
from kvpolicy.lmeval_tasks.sandbox.outcome import Limits
from tests.lmeval_tasks.livecodebench.toys import DOUBLES, MEAN, PAIRS, ROWS, SOLUTIONS, block, case, document

LIMITS = Limits(cpu_seconds=5, wall_seconds=20, memory_bytes=300 << 20, processes=8, output_bytes=1_000_000)
CORRECT, WRONG, ERROR = CodeVerdict.CORRECT, CodeVerdict.WRONG_ANSWER, CodeVerdict.RUNTIME_ERROR


def verdict(row: dict[str, Any], program: str, limits: Limits = LIMITS) -> tuple[CodeVerdict, int | None]:
    grade = grade_code(block(program), document(row), limits=limits)
    return grade.verdict, grade.failed_test


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["question_title"])
def test_a_right_program_is_correct(row: dict[str, Any]) -> None:
    grade = grade_code(block(SOLUTIONS[row["question_id"]]), document(row), limits=LIMITS)
    assert (grade.verdict, grade.failed_test, grade.error) == (CORRECT, None, "")
    assert grade.grade.correct
    assert grade.grade.answer == SOLUTIONS[row["question_id"]]


STDIN = {
    "in a function": (
        "def main():\n    print(2 * int(input()))\nif __name__ == '__main__':\n    main()",
        CORRECT,
        None,
    ),
    "names that nobody imported": ("print(reduce(operator.add, repeat(int(stdin.readline()), 2)))", CORRECT, None),
    "its own imports": ("from sys import stdin\nimport math\nprint(math.prod([2, int(stdin.read())]))", CORRECT, None),
    "from the future": ("from __future__ import annotations\nprint(2 * int(input()))", CORRECT, None),
    "deep recursion": ("f = lambda n: f(n - 1) if n else 2\nprint(f(9000) * int(input()))", CORRECT, None),
    "builtin names stay": ("print(pow(2, 1, 7) * int(open(0).read()))", CORRECT, None),
    "exits afterwards": ("print(2 * int(input())); exit()", CORRECT, None),
    "wrong at once": ("print(1)", WRONG, 0),
    "wrong on the second public test": ("print(2 * int(input()) or 1)", WRONG, 1),
    "wrong on a private test alone": ("print(2 * abs(int(input())))", WRONG, 2),
    "wrong on the last": ("print(int(2.0 * int(input())))", WRONG, 3),
    "says more": ("print('The answer is', 2 * int(input()))", WRONG, 0),
    "exits early": ("import sys; sys.exit(0)", WRONG, 0),
    "exits early, at once": ("import os; os._exit(0)", WRONG, 0),
    "closes its output": ("import os; os.close(1); os._exit(0)", WRONG, 0),
    "raises": ("raise ValueError('so there')", ERROR, 0),
    "raises on the last": ("n = input(); assert len(n) < 9; print(2 * int(n))", ERROR, 3),
    "exits with an error": ("import sys; print(2 * int(input())); sys.exit(1)", ERROR, 0),
    "reads the tests": ("print(open('/tests.json').read())", ERROR, 0),
    "does not compile": ("def f(:", CodeVerdict.COMPILE_ERROR, None),
    "is prose": ("The answer is twice N.", CodeVerdict.COMPILE_ERROR, None),
    "holds a null character": ("print(1)\0", CodeVerdict.COMPILE_ERROR, None),
    "nests too deep": ("(" * 5000 + ")" * 5000, CodeVerdict.COMPILE_ERROR, None),
    "memory": ("x = bytearray(1 << 40)", CodeVerdict.MEMORY, 0),
    "output": ("while True: print('x' * 10_000)", CodeVerdict.OUTPUT_LIMIT, 0),
}
CALLS = {
    "prints besides": ("class Solution:\n def pairs(self, nums, k):\n  print('[]')\n  return [[0, 2]]", WRONG, 1),
    "a function, no class": (
        "def pairs(nums, k):\n return [[i, j] for j in range(len(nums)) for i in range(j) if nums[i] + nums[j] == k]",
        CORRECT,
        None,
    ),
    "numbers of numpy": (
        "import numpy as np\nclass Solution:\n def pairs(self, nums, k):\n"
        "  a = np.array(nums)\n  return np.argwhere(np.triu(a[:, None] + a == k, 1))",
        CORRECT,
        None,
    ),
    "main part does not run": (
        f"{SOLUTIONS['9001']}\nif __name__ == '__main__':\n    raise SystemExit(Solution().pairs(input()))",
        CORRECT,
        None,
    ),
    "an annotated dataclass": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass A:\n x: ClassVar[int] = 1\n" + SOLUTIONS["9001"].replace("(i, j)", "[i, j * A.x]"),
        CORRECT,
        None,
    ),
    "returns nothing": ("class Solution:\n def pairs(self, nums, k): pass", WRONG, 0),
    "returns a set": ("class Solution:\n def pairs(self, nums, k): return {(0, 2)}", WRONG, 0),
    "returns what equals everything": (
        "class A:\n def __eq__(self, other): return True\nclass Solution:\n def pairs(self, nums, k): return A()",
        WRONG,
        0,
    ),
    "exits instead": ("class Solution:\n def pairs(self, nums, k):\n  import os; os._exit(0)", WRONG, 0),
    "another name": ("class Solution:\n def pair(self, nums, k): return [[0, 2]]", ERROR, 0),
    "other arguments": ("class Solution:\n def pairs(self, nums): return [[0, 2]]", ERROR, 0),
    "reads standard input": ("class Solution:\n def pairs(self, nums, k): return input()", ERROR, 0),
    "raises": ("class Solution:\n def pairs(self, nums, k): return 1 / 0", ERROR, 0),
    "does not compile": ("class Solution\n def pairs(self): pass", CodeVerdict.COMPILE_ERROR, None),
}
FLOATS = {
    "enough digits": (
        "a = list(map(int, input().split())); print(len(a), f'{sum(a) / len(a):.7f}', sep='\\n')",
        CORRECT,
        None,
    ),
    "too few digits": (
        "a = list(map(int, input().split())); print(len(a), f'{sum(a) / len(a):.3f}', sep='\\n')",
        WRONG,
        1,
    ),
    "another count": (
        "a = list(map(int, input().split())); print(len(a) + 1e-9, sum(a) / len(a), sep='\\n')",
        WRONG,
        0,
    ),
}


@pytest.mark.parametrize(("program", "expected", "failed"), STDIN.values(), ids=STDIN)
def test_programs_that_read_standard_input(program: str, expected: CodeVerdict, failed: int | None) -> None:
    assert verdict(DOUBLES, program) == (expected, failed)


@pytest.mark.parametrize(("program", "expected", "failed"), CALLS.values(), ids=CALLS)
def test_functions_that_are_called(program: str, expected: CodeVerdict, failed: int | None) -> None:
    assert verdict(PAIRS, program) == (expected, failed)


@pytest.mark.parametrize(("program", "expected", "failed"), FLOATS.values(), ids=FLOATS)
def test_numbers_with_an_allowed_error(program: str, expected: CodeVerdict, failed: int | None) -> None:
    assert verdict(MEAN, program) == (expected, failed)


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(99)"])
def test_time_limit(program: str) -> None:
    limits = replace(LIMITS, cpu_seconds=1, wall_seconds=1.5)
    assert verdict(DOUBLES, program, limits) == (CodeVerdict.TIME_LIMIT, 0)


def test_no_code() -> None:
    grade = grade_code("It is twice N.", document(DOUBLES))
    assert (grade.verdict, grade.failed_test) == (CodeVerdict.NO_CODE, None)
    assert grade.grade.verdict is Verdict.NO_ANSWER
    assert grade.grade.answer is None


def test_the_error_is_told() -> None:
    grade = grade_code(block("raise ValueError('so there')"), document(DOUBLES), limits=LIMITS)
    assert grade.error == "ValueError: so there"
    grade = grade_code(block("def f(:"), document(DOUBLES), limits=LIMITS)
    assert grade.error == "SyntaxError: invalid syntax"


def test_flags_stand_beside_the_verdict() -> None:
    right = block(SOLUTIONS["toy_a"])
    looping = f"{right}\n" + "She sells 9 eggs. " * 30
    for text, truncated, thinking, flags in (
        (right, None, None, (None, False, False, False)),
        (right, True, None, (True, False, False, False)),
        (looping, True, None, (True, True, False, False)),
        (f"{right}{'!' * 200}", False, None, (False, True, True, False)),
        (f"Hm.</think>{right}", False, True, (False, False, False, False)),
    ):
        grade = grade_code(text, document(DOUBLES), truncated=truncated, thinking=thinking, limits=LIMITS)
        shared = grade.grade
        assert grade.verdict is CORRECT
        assert (shared.truncated, shared.looped, shared.garbage, shared.unfinished_thinking) == flags


def test_unfinished_thinking_is_no_answer() -> None:
    grade = grade_code(block(SOLUTIONS["toy_a"]), document(DOUBLES), truncated=True, thinking=True)
    assert (grade.verdict, grade.grade.verdict) == (CodeVerdict.NO_CODE, Verdict.NO_ANSWER)
    assert grade.grade.unfinished_thinking


def test_expected_outputs_stay_outside() -> None:
    """A program that gives out all it can find finds its input, and nothing that only the grader knows."""
    program = """
import gc, os, sys
seen = [sys.argv, dict(os.environ), sys.stdin.read()]
seen += [value for value in gc.get_objects() if isinstance(value, (str, bytes, list, dict, tuple))]
for folder, _, names in os.walk("/tmp"):
    seen += [open(os.path.join(folder, name)).read() for name in names]
text = repr(seen)
assert "redarg-eht-yb-detcepxe"[::-1] not in text and "tupni-eht"[::-1] in text
print("clean")
"""
    doc = document(DOUBLES) | {
        "public_test_cases": [case("the-input", "clean"), case("the-input", "expected-by-the-grader")],
        "private_test_cases": None,
    }
    grade = grade_code(block(program), doc, limits=replace(LIMITS, memory_bytes=1 << 30))
    assert (grade.verdict, grade.failed_test, grade.error) == (WRONG, 1, "")


def test_a_problem_without_tests_is_an_error() -> None:
    doc = document(DOUBLES) | {"public_test_cases": [], "private_test_cases": None}
    with pytest.raises(ValueError, match="toy_a has no tests"):
        grade_code(block("print(1)"), doc)
