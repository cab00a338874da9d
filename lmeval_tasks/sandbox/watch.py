"""The processes of a run, as seen from outside."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import psutil


def held(pid: int) -> tuple[int, int]:
    """Number and resident bytes of the descendants of `pid`; what several of them share counts for each."""
    count = resident = 0
    for process in _descendants(pid):
        with suppress(psutil.NoSuchProcess):
            resident += process.memory_info().rss
            count += 1
    return count, resident


def end(pid: int, seconds: float) -> None:
    """Kill the descendants of `pid`, oldest first: process 1 of a namespace takes all others there with it.

    Repeated until none is left, for at most `seconds`.
    """
    deadline = time.monotonic() + seconds
    while (found := _descendants(pid)) and time.monotonic() < deadline:
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.05)


def of_user() -> int:
    """Processes and threads of this user, which a limit on processes counts where there is no user namespace."""
    user = os.getuid()
    count = 0
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.uids().real == user:
                count += process.num_threads()
    return count


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return found
