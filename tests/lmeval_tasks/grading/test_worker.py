"""The process that compares answers: its limits, and that nothing is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpolicy.lmeval_tasks.grading import worker
from kvpolicy.lmeval_tasks.grading.verdict import Verdict
from kvpolicy.lmeval_tasks.grading.worker import GraderMissing, Worker, check_installed

EASY = (r"2\sqrt{2}", r"\sqrt{8}")
TOWER = "9^{9^{9^{9}}}"


@pytest.fixture(scope="module")
def quick() -> Iterator[Worker]:
    pytest.importorskip("math_verify")
    quick = Worker(seconds=1.0)
    yield quick
    quick.close()


def pid_of(asked: Worker) -> int:
    assert asked._process is not None
    return asked._process.pid


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_gone(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not is_running(pid)


def test_one_process_serves_all_questions(quick: Worker) -> None:
    assert quick.ask(*EASY) is Verdict.CORRECT
    pid = pid_of(quick)
    assert quick.ask("3", r"\sqrt{8}") is Verdict.WRONG
    assert quick.ask("3", r"\foo") is Verdict.UNPARSEABLE
    assert pid_of(quick) == pid


def test_what_takes_too_long_is_ended_and_the_next_question_is_answered(quick: Worker) -> None:
    quick.ask(*EASY)
    pid = pid_of(quick)
    assert quick.ask("5", TOWER) is Verdict.GRADER_TIMEOUT
    assert not is_running(pid)
    assert quick.ask(*EASY) is Verdict.CORRECT
    assert pid_of(quick) != pid


def test_what_takes_too_much_memory_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("math_verify")
    small = Worker(seconds=60.0, megabytes=4)
    try:
        assert small.ask(*EASY) is Verdict.CORRECT
        assert small.ask("5", r"\sum_{k=1}^{2} 10^{10^{7}}") is Verdict.GRADER_TIMEOUT
        assert small.ask(*EASY) is Verdict.CORRECT
    finally:
        small.close()
    assert capfd.readouterr() == ("", "")


def test_a_process_that_was_killed_between_questions_is_replaced(quick: Worker) -> None:
    quick.ask(*EASY)
    pid = pid_of(quick)
    os.kill(pid, signal.SIGKILL)
    assert wait_until_gone(pid, 10)
    assert quick.ask(*EASY) is Verdict.CORRECT


def test_line_breaks_and_other_scripts_pass_through(quick: Worker) -> None:
    assert quick.ask("\\sqrt{8}\n", "2\n√2") is Verdict.CORRECT
    assert quick.ask("5", "\ud800") is Verdict.UNPARSEABLE
    assert quick.ask("5", "\u2028\x00") is Verdict.UNPARSEABLE


def test_an_interrupted_question_leaves_no_verdict_behind(quick: Worker) -> None:
    quick.ask(*EASY)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            quick.ask("5", TOWER)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert quick.ask(*EASY) is Verdict.CORRECT


def test_closing_ends_it(quick: Worker) -> None:
    quick.ask(*EASY)
    pid = pid_of(quick)
    quick.close()
    assert not is_running(pid)
    quick.close()
    assert quick.ask(*EASY) is Verdict.CORRECT


def script(body: str) -> list[str]:
    head = "from kvpolicy.lmeval_tasks.grading.worker import WORKER, Worker\n"
    return [sys.executable, "-c", head + textwrap.dedent(body)]


def test_nothing_is_left_when_the_program_ends() -> None:
    pytest.importorskip("math_verify")
    code = rf"""
        print(WORKER.ask({EASY[0]!r}, {EASY[1]!r}), WORKER._process.pid)
    """
    done = subprocess.run(script(code), capture_output=True, text=True, check=True)
    verdict, pid = done.stdout.split()
    assert (verdict, done.stderr) == ("correct", "")
    assert not is_running(int(pid))


@pytest.mark.parametrize("busy", [False, True])
def test_nothing_is_left_when_the_program_is_killed(busy: bool) -> None:
    pytest.importorskip("math_verify")
    code = f"""
        asked = Worker(seconds=2.0)
        asked.ask('3', r'\\sqrt{{8}}')
        print(asked._process.pid, flush=True)
        asked.ask('5', {TOWER!r}) if {busy} else input()
    """
    with subprocess.Popen(script(code), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        time.sleep(0.3)
        assert is_running(pid)
        program.kill()
    assert wait_until_gone(pid, 60)


def test_a_fork_asks_a_process_of_its_own(quick: Worker) -> None:
    quick.ask(*EASY)
    pid = pid_of(quick)
    child = os.fork()
    if child == 0:
        os._exit(0 if quick.ask(*EASY) is Verdict.CORRECT and pid_of(quick) != pid else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert quick.ask(*EASY) is Verdict.CORRECT
    assert pid_of(quick) == pid


def test_a_module_in_the_working_directory_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify")
    (tmp_path / "json.py").write_text("raise ImportError('not this one')\n")
    monkeypatch.chdir(tmp_path)
    asked = Worker()
    try:
        assert asked.ask(*EASY) is Verdict.CORRECT
    finally:
        asked.close()


def test_without_math_verify_there_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(GraderMissing, match="needs math-verify: pip install"):
        check_installed()
    with pytest.raises(GraderMissing, match="needs math-verify"):
        Worker().ask("3", r"\pi")


def test_a_process_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "check_installed", lambda: None)
    monkeypatch.setattr(worker, "_MODULE", "kvpolicy.there_is_none")
    with pytest.raises(GraderMissing, match="did not start"):
        Worker().ask("3", r"\pi")
