"""Nothing outlives a run, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvpolicy.lmeval_tasks.sandbox import exchange, process
from kvpolicy.lmeval_tasks.sandbox.method import Method
from kvpolicy.lmeval_tasks.sandbox.outcome import Outcome, Status
from kvpolicy.lmeval_tasks.sandbox.process import execute
from tests.lmeval_tasks.sandbox.runs import LIMITS, left_of, marked, wait_until_gone

SLEEPS_IN_TWO = "import os, time\nos.fork()\ntime.sleep(60)"


def test_the_caller_is_killed(method: Method) -> None:
    limits = marked(replace(LIMITS, wall_seconds=60))
    call = (
        "from kvpolicy.lmeval_tasks.sandbox import method, run\n"
        "from kvpolicy.lmeval_tasks.sandbox.outcome import Limits\n"
        f"run.run({SLEEPS_IN_TWO!r}, limits={limits!r}, method=method.{method!r})"
    )
    caller = subprocess.Popen([sys.executable, "-c", call])
    try:
        deadline = time.monotonic() + 20
        while len(left_of(limits)) < 3:  # the supervisor and two of the program
            assert time.monotonic() < deadline
            assert caller.poll() is None
            time.sleep(0.05)
    finally:
        caller.kill()
        caller.wait()
    wait_until_gone(limits, 10)


def test_the_run_is_cancelled(method: Method) -> None:
    limits = marked(replace(LIMITS, wall_seconds=60))
    cancelled = threading.Event()
    outcomes: list[Outcome] = []
    run = threading.Thread(target=lambda: outcomes.append(execute(method, SLEEPS_IN_TWO, "", limits, cancelled)))
    run.start()
    time.sleep(0.5)
    assert left_of(limits)
    cancelled.set()
    run.join(10)
    assert [outcome.status for outcome in outcomes] == [Status.CANCELLED]
    assert left_of(limits) == []


def number_inside(pid: int) -> int:
    """The number of a process in its innermost namespace."""
    (numbers,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("NSpid:")]
    return int(numbers.split()[-1])


def test_the_supervisor_hangs(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the caller ends the run by itself, a little after the limit."""
    monkeypatch.setattr(exchange, "_GRACE_SECONDS", 0.5)
    monkeypatch.setattr(process, "_END_SECONDS", 0.5)
    limits = marked(replace(LIMITS, wall_seconds=1.5))
    outcomes: list[Outcome] = []
    run = threading.Thread(target=lambda: outcomes.append(execute(method, SLEEPS_IN_TWO, "", limits)))
    run.start()
    time.sleep(0.8)
    (supervisor,) = [pid for pid in left_of(limits) if number_inside(pid) == 1]
    os.kill(supervisor, signal.SIGSTOP)
    run.join(15)
    assert [outcome.status for outcome in outcomes] == [Status.TIME_LIMIT]
    assert left_of(limits) == []


def test_the_caller_is_interrupted(one_of_each_tool: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_pid: int) -> tuple[int, int]:
        raise KeyboardInterrupt

    monkeypatch.setattr(exchange.watch, "held", interrupt)
    limits = marked(replace(LIMITS, wall_seconds=60))
    with pytest.raises(KeyboardInterrupt):
        execute(one_of_each_tool, SLEEPS_IN_TWO, "", limits)
    assert left_of(limits) == []
