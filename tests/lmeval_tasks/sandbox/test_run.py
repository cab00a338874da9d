"""Programs that behave, and many inputs in a row."""

from __future__ import annotations

import time

import pytest

from kvpolicy.lmeval_tasks.sandbox.method import Method
from kvpolicy.lmeval_tasks.sandbox.outcome import Limits, Outcome, Status
from kvpolicy.lmeval_tasks.sandbox.run import run_all
from tests.lmeval_tasks.sandbox.runs import LIMITS, left_of, marked, watched


@pytest.mark.parametrize(
    ("program", "stdin", "stdout"),
    [
        ("print(sum(map(int, input().split())))", "1 2 3\n", "6\n"),
        ("import sys; print(len(sys.stdin.read()))", "x" * 3_000_000, "3000000\n"),
        ("import sys; print(sys.stdin.read())", "", "\n"),
        ("print('not read')", "x" * 3_000_000, "not read\n"),
        ("print(input())", "naïve \N{GREEK SMALL LETTER PI}", "naïve \N{GREEK SMALL LETTER PI}\n"),
        ("import sys; sys.stdout.buffer.write(b'\\xff!')", "", "\N{REPLACEMENT CHARACTER}!"),
        ("if __name__ == '__main__': print(__name__)", "", "__main__\n"),
        ("import threading\nthreading.Thread(target=lambda: print('joined')).start()", "", "joined\n"),
        ("import atexit; atexit.register(print, 'at exit'); print('end', end=' ')", "", "end at exit\n"),
        ("from dataclasses import dataclass\n@dataclass\nclass A: x: 'int'\nprint(A(1).x)", "", "1\n"),
        ("import sys; print(sys.argv)", "", "['program.py']\n"),
        ("open('f', 'w').write('x'); print(open('/tmp/f').read())", "", "x\n"),
        ("print(hash('a') == hash('a'), {'b', 'a', 'c'})", "", None),
    ],
    ids=lambda value: None if value is None else value[:40],
)
def test_output(one_of_each_tool: Method, program: str, stdin: str, stdout: str | None) -> None:
    outcome = watched(one_of_each_tool, program, stdin=stdin).outcome
    assert outcome.status is Status.FINISHED, outcome
    assert outcome.stdout == (watched(one_of_each_tool, program).outcome.stdout if stdout is None else stdout)


def test_standard_error_is_kept_from_its_end(method: Method) -> None:
    outcome = watched(method, "import sys; sys.stderr.write('x' * 9_000); 1 / 0").outcome
    assert len(outcome.stderr) == 4096
    assert outcome.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_deep_recursion_through_c(method: Method) -> None:
    program = (
        "import functools, sys\nsys.setrecursionlimit(50_000)\n"
        "@functools.cache\ndef f(n): return f(n - 1) + 1 if n else 0\nprint(f(20_000))"
    )
    assert watched(method, program).outcome.stdout == "20000\n"


def test_seconds_are_those_of_the_program(one_of_each_tool: Method) -> None:
    assert 0.4 <= watched(one_of_each_tool, "import time; time.sleep(0.4)").outcome.seconds < 5


@pytest.mark.parametrize("parallel", [1, 3])
def test_all_inputs_in_order(one_of_each_tool: Method, parallel: int) -> None:
    seen: list[int] = []

    def accept(number: int, outcome: Outcome) -> bool:
        seen.append(number)
        return outcome.stdout == f"{number}!\n"

    stdins = [str(number) for number in range(5)]
    outcomes, refused = run_all(
        "import time; n = input(); time.sleep(0.3 * (n == '0')); print(n + '!')",
        stdins,
        accept,
        limits=LIMITS,
        parallel=parallel,
        method=one_of_each_tool,
    )
    assert refused is None
    assert [outcome.stdout for outcome in outcomes] == [f"{number}!\n" for number in range(5)]
    assert seen == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("parallel", [1, 3])
def test_the_first_refused_input_ends_it(one_of_each_tool: Method, parallel: int) -> None:
    """Input 1 fails late, 2 early, 3 would sleep: the answer is 1 whatever ran at the same time."""
    program = "import time; n = int(input()); time.sleep((0, 0.5, 0, 60, 60)[n]); print(n); assert n == 0"
    limits = marked(Limits(wall_seconds=70))
    start = time.monotonic()
    outcomes, refused = run_all(
        program,
        list("01234"),
        lambda _, outcome: outcome.status is Status.FINISHED,
        limits=limits,
        parallel=parallel,
        method=one_of_each_tool,
    )
    assert refused == 1
    assert [outcome.stdout for outcome in outcomes] == ["0\n", "1\n"]
    assert time.monotonic() - start < 30
    assert left_of(limits) == []


def test_no_inputs(one_of_each_tool: Method) -> None:
    assert run_all("", [], lambda *_: False, method=one_of_each_tool) == ([], None)
