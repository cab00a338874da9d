"""One run of a program, from the outside: start it, see how it ended, and see that nothing is left of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import threading
from contextlib import ExitStack
from typing import IO

from kvpolicy.lmeval_tasks.sandbox import watch
from kvpolicy.lmeval_tasks.sandbox.exchange import Exchange
from kvpolicy.lmeval_tasks.sandbox.method import Method, python
from kvpolicy.lmeval_tasks.sandbox.outcome import Limits, Outcome, SandboxError, Status
from kvpolicy.lmeval_tasks.sandbox.view import packages

_END_SECONDS = 2.0
_MEMORY_ERROR = re.compile(r"(?:\w+\.)*\w*MemoryError\b")


def execute(
    method: Method, program: str, stdin: str, limits: Limits, cancelled: threading.Event | None = None
) -> Outcome:
    """Run `program` by `method`. When this returns or raises, no process of the run is left.

    cancelled : set from another thread, it stops the run.

    Raises
    ------
    SandboxError
        If the sandbox cannot be set up.
    """
    with ExitStack() as stack:
        # Namespaces bring a folder of their own; this one is for running without.
        folder = "/" if method.alone else stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpolicy-code-"))
        control, control_end = _pipe(stack)
        report_end, report = _pipe(stack)
        processes = limits.processes + (0 if method.alone else watch.of_user())
        bounds = (limits.wall_seconds, limits.cpu_seconds, limits.memory_bytes, processes, limits.file_bytes)
        numbers = (control.fileno(), report.fileno(), method.user, int(method.alone), *bounds)
        try:
            process = subprocess.Popen(
                [*method.front(4 * limits.file_bytes), *python("supervisor.py"), *map(str, numbers)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(control.fileno(), report.fileno()),
                cwd=folder,
                env=_environment("/tmp" if method.alone else folder),
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise SandboxError(f"{method}: {error}") from error
        stack.callback(_end, process, control_end)
        control.close()
        report.close()
        exchange = Exchange(process, report_end, control_end, limits, cancelled)
        exchange.run(_message(program, stdin))
        return _outcome(method, exchange, limits)


def _pipe(stack: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    reading, writing = os.pipe()
    return stack.enter_context(open(reading, "rb", 0)), stack.enter_context(open(writing, "wb", 0))


def _message(program: str, stdin: str) -> bytes:
    encoded = program.encode("utf-8", "surrogatepass")
    return b"%d\n%b%b" % (len(encoded), encoded, stdin.encode("utf-8", "surrogatepass"))


def _environment(home: str) -> dict[str, str]:
    """Nothing of this process's environment, which may hold secrets; the same hashes in every run."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return one_thread | {
        "HOME": home,
        "TMPDIR": home,
        "PATH": os.defpath,
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(packages()),
        "PYTHONUTF8": "1",
    }


def _end(process: subprocess.Popen[bytes], control: IO[bytes]) -> None:
    """See that nothing is left: the supervisor ends by itself once `control` is closed, or is killed."""
    control.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        watch.end(process.pid, _END_SECONDS)
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        assert pipe is not None
        pipe.close()


def _outcome(method: Method, exchange: Exchange, limits: Limits) -> Outcome:
    stderr = exchange.stderr.decode("utf-8", "replace")
    ready, _, report = exchange.report.decode().partition("\n")
    if ready != "ready":
        *_, reason = stderr.strip().rpartition("\n")
        raise SandboxError(f"{method}: {reason or 'it ended without a word'}")
    # Without namespaces a program can kill its supervisor, which then reports nothing.
    status, cpu, seconds, stopped = report.split() or (str(int(signal.SIGKILL)), "0", "0", "-")
    stdout = exchange.stdout[: limits.output_bytes].decode("utf-8", "replace")
    ended = _status(os.waitstatus_to_exitcode(int(status)), float(cpu), stderr, limits)
    how = exchange.stopped or (Status.TIME_LIMIT if stopped == "wall" else ended)
    return Outcome(how, stdout, stderr, float(seconds))


def _status(code: int, cpu: float, stderr: str, limits: Limits) -> Status:
    """`code` is an exit code, or minus the signal that ended the program."""
    if code == 0:
        return Status.FINISHED
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu >= limits.cpu_seconds):
        return Status.TIME_LIMIT
    if _MEMORY_ERROR.match(stderr.rstrip().rpartition("\n")[2]):
        return Status.MEMORY
    return Status.RUNTIME_ERROR
