"""The process in which answers are compared: ``python -m …grading.worker_process SECONDS MEGABYTES``.

Reads one JSON object with `gold` and `answer` a line and writes one verdict a line, after a line that says that it is
ready. It ends with its input. The limits are its own, so that they hold even if whoever started it is gone: a
comparison that takes too much time or memory ends the process.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from pathlib import Path

from kvpolicy.lmeval_tasks.grading.compare import compare
from kvpolicy.lmeval_tasks.grading.symbolic import MathVerify

READY = "ready"


def main(seconds: float, megabytes: int) -> None:
    """Serve until the input ends."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that there is no time limit
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + (megabytes << 20),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers, sys.stdout = sys.stdout, sys.stderr  # nothing that a library prints is taken for a verdict
    judge = MathVerify()
    print(READY, file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            verdict = compare(question["gold"], question["answer"], judge)
        except MemoryError:
            os._exit(1)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(verdict, file=answers, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
