"""Runs of small programs whose processes can be told from all others on the machine."""

from __future__ import annotations

import itertools
import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace

import psutil

from kvpolicy.lmeval_tasks.sandbox import choice
from kvpolicy.lmeval_tasks.sandbox.method import Method
from kvpolicy.lmeval_tasks.sandbox.outcome import Limits, Outcome
from kvpolicy.lmeval_tasks.sandbox.run import run

# Room enough on a busy machine for a program that does nothing much.
LIMITS = Limits(
    cpu_seconds=3, wall_seconds=20, memory_bytes=300 << 20, processes=8, output_bytes=100_000, file_bytes=1 << 20
)

METHODS = choice.methods()
BEST = list({method.tool: method for method in reversed(METHODS)}.values())
"""One method of each tool."""

_number = itertools.count(1)


@dataclass(frozen=True)
class Seen:
    """An outcome, and how long the caller waited for it."""

    outcome: Outcome
    waited: float


def marked(limits: Limits) -> Limits:
    """The limits with a wall time that no other run has; it stands in the command line of each of its processes."""
    return replace(limits, wall_seconds=limits.wall_seconds + (os.getpid() + next(_number) * 1e-3) * 1e-8)


def left_of(limits: Limits) -> list[int]:
    """Processes whose command line has the wall time of `limits`."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if str(limits.wall_seconds) in process.cmdline():
                found.append(process.pid)
    return found


def watched(method: Method, program: str, *, stdin: str = "", limits: Limits = LIMITS) -> Seen:
    """Run the program and check that none of its processes is left."""
    limits = marked(limits)
    start = time.monotonic()
    outcome = run(program, stdin=stdin, limits=limits, method=method)
    waited = time.monotonic() - start
    assert left_of(limits) == []
    return Seen(outcome, waited)


def wait_until_gone(limits: Limits, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left_of(limits):
        assert time.monotonic() < deadline, "processes of the sandbox are left"
        time.sleep(0.05)
