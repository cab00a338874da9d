"""Process 1 of the sandbox: runs one program under limits and reports how it ended.

Run as a script of the standard library alone, ``python -c SOURCE CONTROL REPORT USER ALONE WALL CPU MEMORY PROCESSES
FILE``, with as few imports as can be, because it starts once per test. It reads the program from standard input,
a line with its length in bytes first; what follows there is the program's own standard input.

The program runs in a child of this process, which has neither of the two pipes: the end of CONTROL is the caller's
order to stop (or its death), and REPORT receives ``ready`` and then wait status, CPU seconds, wall seconds and what
stopped the program. Its standard output goes to the caller directly; nothing else of the caller's is in here.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import sys
import time
from types import ModuleType

_SIGKILL = 9  # the signal module would import enum
_SET_DUMPABLE, _SET_CHILD_SUBREAPER = 4, 36
# Deep recursion through C functions needs stack; the kernel leaves room for 128 MiB of it.
_STACK_BYTES = 120 << 20
_OPEN_FILES = 256


def main(arguments: list[str]) -> None:
    """Run the program; returns only in the program's process."""
    control, report, user, alone = map(int, arguments[:4])
    wall = float(arguments[4])
    limits = [int(argument) for argument in arguments[5:]]
    program = _program()
    if user >= 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    # Else the program, which is the same user, could take this process over with ptrace.
    ctypes.CDLL(None).prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    if not alone:
        # Orphans come to this process, as they do to a process 1.
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.write(report, b"ready\n")
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(control)
        os.close(report)
        os.setsid()  # a signal to its own group must not reach this process
        _limit(*limits)
        _become(program)
        return
    stopped = _wait(child, control, wall)
    if stopped != "-":
        os.kill(child, _SIGKILL)
    _, status, usage = os.wait4(child, 0)
    seconds = time.monotonic() - start
    if not alone:
        _end_children()
    os.write(report, f"{status} {usage.ru_utime + usage.ru_stime} {seconds} {stopped}\n".encode())
    os._exit(0)


def _program() -> str:
    header = b""
    while not header.endswith(b"\n"):
        header += os.read(0, 1) or sys.exit("The sandbox received no program.")
    left = int(header)
    parts = []
    while left:
        parts.append(os.read(0, left) or sys.exit("The sandbox received a part of the program."))
        left -= len(parts[-1])
    return b"".join(parts).decode("utf-8", "surrogatepass")


def _wait(child: int, control: int, wall: float) -> str:
    """What ended the wait: the program ("-"), the "wall" limit or the "caller"."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(ended := os.pidfd_open(child), select.POLLIN)
    ready = [descriptor for descriptor, _ in poll.poll(wall * 1000)]
    if ended in ready:
        return "-"
    return "caller" if control in ready else "wall"


def _limit(cpu: int, memory: int, processes: int, file: int) -> None:
    for kind, soft, hard in (
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_NOFILE, _OPEN_FILES, _OPEN_FILES),
        (resource.RLIMIT_FSIZE, file, file),
        (resource.RLIMIT_STACK, _STACK_BYTES, _STACK_BYTES),
        # Whoever ignores the signal at the first bound is killed at the second.
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_NPROC, processes, processes),
    ):
        _, highest = resource.getrlimit(kind)
        if highest != resource.RLIM_INFINITY:
            soft, hard = min(soft, highest), min(hard, highest)
        resource.setrlimit(kind, (soft, hard))


def _become(program: str) -> None:
    """Run `program` as the main module; the interpreter then ends as after any script."""
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["program.py"]
    try:
        exec(compile(program, "program.py", "exec"), vars(module))
    except MemoryError:
        # There may be no memory left for a traceback.
        os.write(2, b"MemoryError\n")
        os._exit(1)


def _end_children() -> None:
    """Without a namespace: kill all descendants, which on their parent's death become children."""
    while True:
        for pid in _children():
            os.kill(pid, _SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # "pid (name) state parent …", and the name may hold anything.
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == os.getpid() and state != b"Z":
            found.append(int(name))
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
