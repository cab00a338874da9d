"""Programs that misbehave: each gets its verdict in bounded time, and nothing outlives the run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpolicy.lmeval_tasks.sandbox.method import Method
from kvpolicy.lmeval_tasks.sandbox.outcome import Status
from tests.lmeval_tasks.sandbox.runs import LIMITS, watched

QUICK = {
    "nothing": ("", Status.FINISHED),
    "exits early with 0": ("import sys; sys.exit(0); print(1)", Status.FINISHED),
    "exits early with 0, at once": ("import os; os._exit(0)", Status.FINISHED),
    "exits with 3": ("import sys; sys.exit(3)", Status.RUNTIME_ERROR),
    "raises": ("1 / 0", Status.RUNTIME_ERROR),
    "does not compile": ("def f(:", Status.RUNTIME_ERROR),
    "holds a null character": ("print(1)\0", Status.RUNTIME_ERROR),
    "is not Unicode": ("print('\ud800')", Status.RUNTIME_ERROR),
    "crashes": ("import ctypes; ctypes.string_at(0)", Status.RUNTIME_ERROR),
    "kills itself": ("import os; os.kill(os.getpid(), 9)", Status.RUNTIME_ERROR),
    "kills its group": ("import os; os.killpg(0, 9)", Status.RUNTIME_ERROR),
    "ends its group but not itself": (
        "import os, signal, time\nsignal.signal(15, signal.SIG_IGN)\nos.killpg(0, 15)\ntime.sleep(0.2)",
        Status.FINISHED,
    ),
    "recurses without end": ("f = lambda: f()\nf()", Status.RUNTIME_ERROR),
    "allocates too much at once": ("x = bytearray(1 << 40)", Status.MEMORY),
    "fills memory bit by bit": ("x = []\nwhile True: x.append('x' * 1_000_000)", Status.MEMORY),
    "fills memory in a function": ("def f():\n x = []\n while True: x.append(bytearray(1 << 20))\nf()", Status.MEMORY),
    "says it is out of memory": ("raise MemoryError('all gone')", Status.MEMORY),
    "prints without end": ("while True: print('x' * 10_000)", Status.OUTPUT_LIMIT),
    "complains without end": ("import sys\nwhile True: sys.stderr.write('x' * 10_000)", Status.OUTPUT_LIMIT),
    "starts threads without end": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        Status.RUNTIME_ERROR,
    ),
    "writes a large file": ("open('f', 'w').write('x' * 2_000_000)", Status.RUNTIME_ERROR),
    "writes many files": (
        "for i in range(99): open(str(i), 'w').write('x' * 900_000)",
        Status.RUNTIME_ERROR,
    ),
    "opens files without end": ("x = [open('/dev/null') for _ in range(9999)]", Status.RUNTIME_ERROR),
    "closes everything": ("import os; os.closerange(0, 256); os._exit(0)", Status.FINISHED),
    "leaves a background process": (
        "import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0: time.sleep(99)\n os._exit(0)",
        Status.FINISHED,
    ),
    "leaves a shell's child": (
        "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])",
        Status.FINISHED,
    ),
}
SLOW = {
    "sleeps": "import time; time.sleep(99)",
    "stops itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "closes its output and loops": "import os\nos.close(1)\nos.close(2)\nwhile True: pass",
    "ignores all signals": (
        "import signal, time\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\ntime.sleep(99)"
    ),
    "forks on and on": "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
    "waits for a child that never ends": "import os, time\nif os.fork(): os.wait()\ntime.sleep(99)",
    "does not end its thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()",
}


@pytest.mark.parametrize(("program", "status"), QUICK.values(), ids=QUICK)
def test_verdict(one_of_each_tool: Method, program: str, status: Status) -> None:
    seen = watched(one_of_each_tool, program)
    assert seen.outcome.status is status, seen.outcome
    assert seen.waited < LIMITS.wall_seconds
    assert len(seen.outcome.stdout) <= LIMITS.output_bytes
    assert len(seen.outcome.stderr) <= 4096


@pytest.mark.parametrize("program", SLOW.values(), ids=SLOW)
def test_wall_time(one_of_each_tool: Method, program: str) -> None:
    limits = replace(LIMITS, wall_seconds=0.8)
    seen = watched(one_of_each_tool, program, limits=limits)
    assert seen.outcome.status is Status.TIME_LIMIT, seen.outcome
    assert limits.wall_seconds <= seen.outcome.seconds < 5
    assert seen.waited < 15


@pytest.mark.parametrize("first", ["pass", "signal.signal(signal.SIGXCPU, signal.SIG_IGN)"], ids=["loops", "ignores"])
def test_cpu_time(one_of_each_tool: Method, first: str) -> None:
    """Whoever ignores the signal that the time is up is killed a second later."""
    seen = watched(one_of_each_tool, f"import signal\n{first}\nwhile True: pass", limits=replace(LIMITS, cpu_seconds=1))
    assert seen.outcome.status is Status.TIME_LIMIT, seen.outcome
    assert 0.9 < seen.outcome.seconds < LIMITS.wall_seconds


def test_number_of_processes(method: Method) -> None:
    assert watched(method, "import os\nwhile True: os.fork()").outcome.status is Status.RUNTIME_ERROR
    program = "import os, time\nprint(len([os.fork() or time.sleep(9) for _ in range(99)]))"
    outcome = watched(method, program).outcome
    assert outcome.status is Status.RUNTIME_ERROR
    assert "Resource temporarily unavailable" in outcome.stderr


def test_memory_of_all_processes_together(method: Method) -> None:
    """Four processes, each of which holds less than the limit."""
    program = "import os, time\nos.fork()\nos.fork()\nx = bytearray(b'x') * 120_000_000\ntime.sleep(15)"
    seen = watched(method, program)
    assert seen.outcome.status is Status.MEMORY
    assert seen.waited < 15


def test_first_bytes_of_an_endless_output_are_kept(method: Method) -> None:
    seen = watched(method, "i = 0\nwhile True: print(i); i += 1")
    assert seen.outcome.status is Status.OUTPUT_LIMIT
    assert seen.outcome.stdout.startswith("0\n1\n2\n")
    assert len(seen.outcome.stdout) == LIMITS.output_bytes


def test_output_up_to_the_limit_is_fine(method: Method) -> None:
    outcome = watched(method, f"print('x' * {LIMITS.output_bytes}, end='')").outcome
    assert (outcome.status, outcome.stdout) == (Status.FINISHED, "x" * LIMITS.output_bytes)
    assert watched(method, f"print('x' * {LIMITS.output_bytes})").outcome.status is Status.OUTPUT_LIMIT


def test_limits_cannot_be_raised(method: Method) -> None:
    program = """
import resource
for name in ("AS", "CPU", "NPROC", "FSIZE", "NOFILE"):
    kind = getattr(resource, f"RLIMIT_{name}")
    try:
        resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except (ValueError, PermissionError):
        print(name, "stays")
"""
    outcome = watched(method, program).outcome
    assert outcome.stdout.split() == [
        "AS",
        "stays",
        "CPU",
        "stays",
        "NPROC",
        "stays",
        "FSIZE",
        "stays",
        "NOFILE",
        "stays",
    ]
