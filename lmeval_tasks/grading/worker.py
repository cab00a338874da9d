"""The worker process as seen by who asks: started at the first question, and again after each that was too much."""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import subprocess
import sys
import threading

from kvpolicy.lmeval_tasks.grading.verdict import Verdict

_MODULE = "kvpolicy.lmeval_tasks.grading.worker_process"
_READY = "ready"


class GraderMissing(Exception):
    """math-verify is not installed, or the worker does not start; the message is one sentence for the user."""


class Worker:
    """One process that compares answers, one after the other.

    seconds : of the processor for one comparison, so that a busy machine changes no verdict.
    megabytes : of memory for one comparison, beyond what the process holds when it has loaded everything.
    """

    def __init__(self, seconds: float = 5.0, megabytes: int = 1024) -> None:
        self._limits = [str(seconds), str(megabytes)]
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0
        self._lock = threading.Lock()

    def ask(self, gold: str, answer: str) -> Verdict:
        """The verdict on an answer; `GRADER_TIMEOUT` if it took more time or memory than the worker has.

        Raises
        ------
        GraderMissing
            If there is no math-verify, or the worker does not start.
        """
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            verdict = ""
            try:
                print(json.dumps({"gold": gold, "answer": answer}), file=process.stdin, flush=True)
                verdict = process.stdout.readline().strip()
            finally:
                if not verdict:  # it died; or this was interrupted, and its verdict would be taken for the next one
                    self._stop()
            return Verdict(verdict) if verdict else Verdict.GRADER_TIMEOUT

    def close(self) -> None:
        """End the process. The next question starts another."""
        with self._lock:
            self._stop()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        self._stop()
        check_installed()
        # Hash seeds change the order in which sympy tries things; -P keeps modules of the working directory out.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE, *self._limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env=os.environ | {"PYTHONHASHSEED": "0"},
        )
        self._process, self._owner = process, os.getpid()
        assert process.stdout is not None
        if process.stdout.readline().strip() != _READY:
            self._stop()
            raise GraderMissing("The process that grades answers did not start; its error is printed above.")
        return process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():  # in a fork: the process is the parent's
            return
        process.kill()
        process.communicate()


def check_installed() -> None:
    """Say so before anything is run if answers cannot be graded.

    Raises
    ------
    GraderMissing
        If math-verify is not installed.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise GraderMissing("Grading needs math-verify: pip install 'sglang-kvpolicy[eval]'.")


WORKER = Worker()
atexit.register(WORKER.close)
