"""A program whose output goes to a file, and which leaves nothing running behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

POLL_SECONDS = 0.5
END_SECONDS = 30  # to give the accelerator back, after it was asked to end
_TAIL = 64 * 2**10  # bytes
# What explains a failure: a refusal of ours before any other error, any error before whatever came last.
_EXPLAINS = (re.compile(r"kvpolicy[\w.]*(Error|Missing)\b"), re.compile(r"[\w.]*(Error|Exception|Interrupt)\b"))


def run_logged(command: Sequence[str], log: Path, show: Callable[[str], None]) -> int:
    """Run a command and return its exit status; `show` is called with the newest line of `log` now and then.

    The command is the leader of a process group. When it has ended, or this process is interrupted, what is left of the
    group is ended: a scheduler of SGLang that outlives its parent would keep the memory that the next run needs.
    """
    with log.open("ab") as target, _terminated_as_interrupted():
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=target,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        try:
            while not _ended(process.pid):
                show(last_line(log))
                time.sleep(POLL_SECONDS)
        finally:
            _end(process.pid)
            status = process.wait()
    return status


def last_line(log: Path) -> str:
    """The last line that says anything; a progress bar that was drawn anew is a line."""
    return next(iter(reversed(_lines(log))), "")


def reason(log: Path) -> str:
    """The line that tells best why a program failed: its last error, or else its last line."""
    lines = _lines(log)
    for pattern in _EXPLAINS:
        for line in reversed(lines):
            if pattern.match(line):
                return line
    return last_line(log)


def _lines(log: Path) -> list[str]:
    with log.open("rb") as source:
        source.seek(0, os.SEEK_END)
        source.seek(max(0, source.tell() - _TAIL))
        text = source.read().decode("utf-8", "replace")
    return [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]


def _ended(process_id: int) -> bool:
    """Without taking the exit status: until that is done no other process or group can have this number."""
    return os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(process_id: int) -> None:
    """End what is left of a group, politely if its leader still runs."""
    if not _ended(process_id):
        os.killpg(process_id, signal.SIGTERM)
        until = time.monotonic() + END_SECONDS
        while not _ended(process_id) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
    os.killpg(process_id, signal.SIGKILL)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM, which by default leaves no time to clean up, does what Ctrl-C does."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
