"""What goes into a run and comes out of it, without ever waiting for the program, and when to stop it."""

from __future__ import annotations

import os
import selectors
import subprocess
import threading
import time
from typing import IO

from kvpolicy.lmeval_tasks.sandbox import watch
from kvpolicy.lmeval_tasks.sandbox.outcome import Limits, Status

_CHUNK = 1 << 16
_TAIL_BYTES = 4096
# The supervisor holds the wall limit; so much later the caller ends what is left.
_GRACE_SECONDS = 5.0
_LOOK_SECONDS = 0.2
# Beside the program's own processes there are the supervisor and the one that made its name spaces.
_OWN_PROCESSES = 2


class Exchange:
    """The exchange with one process, over when all its pipes are closed.

    stdout : the first bytes of standard output, one more than the limit allows at most.
    stderr : the last 4 KiB of standard error.
    report : what the supervisor said.
    stopped : why the caller ended the run, None if it did not.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        report: IO[bytes],
        control: IO[bytes],
        limits: Limits,
        cancelled: threading.Event | None,
    ) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._pid, self._control, self._limits, self._cancelled = process.pid, control, limits, cancelled
        self._stdin = process.stdin
        self._reading = (
            (process.stdout, self._take_stdout),
            (process.stderr, self._take_stderr),
            (report, self._take_report),
        )
        self._stderr_bytes = 0
        self._deadline = time.monotonic() + limits.wall_seconds + _GRACE_SECONDS
        self.stdout, self.stderr, self.report = bytearray(), bytearray(), bytearray()
        self.stopped: Status | None = None

    def run(self, message: bytes) -> None:
        """Write `message`, then close standard input; read until nobody is left who could write, or give up."""
        os.set_blocking(self._stdin.fileno(), False)
        left = memoryview(message)
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdin, selectors.EVENT_WRITE)
            for pipe, take in self._reading:
                selector.register(pipe, selectors.EVENT_READ, take)
            look = time.monotonic() + _LOOK_SECONDS
            while selector.get_map():
                for key, _ in selector.select(_LOOK_SECONDS):
                    if key.fileobj is self._stdin:
                        left = self._give(left)
                        open_still = bool(left)
                    else:
                        chunk = os.read(key.fd, _CHUNK)
                        key.data(chunk)
                        open_still = bool(chunk)
                    if not open_still:
                        selector.unregister(key.fileobj)
                if (now := time.monotonic()) > self._deadline:
                    self._stop(Status.TIME_LIMIT)
                    return
                if now > look:
                    self._look()
                    look = now + _LOOK_SECONDS

    def _give(self, left: memoryview) -> memoryview:
        """What is still to be written, nothing if nobody reads."""
        try:
            left = left[os.write(self._stdin.fileno(), left[:_CHUNK]) :]
        except BrokenPipeError:
            left = left[:0]
        if not left:
            self._stdin.close()
        return left

    def _take_stdout(self, chunk: bytes) -> None:
        self.stdout += chunk[: self._limits.output_bytes + 1 - len(self.stdout)]
        if len(self.stdout) > self._limits.output_bytes:
            self._stop(Status.OUTPUT_LIMIT)

    def _take_stderr(self, chunk: bytes) -> None:
        self.stderr = (self.stderr + chunk)[-_TAIL_BYTES:]
        self._stderr_bytes += len(chunk)
        if self._stderr_bytes > self._limits.output_bytes:
            self._stop(Status.OUTPUT_LIMIT)

    def _take_report(self, chunk: bytes) -> None:
        self.report = (self.report + chunk)[:_TAIL_BYTES]

    def _look(self) -> None:
        if self._cancelled is not None and self._cancelled.is_set():
            self._stop(Status.CANCELLED)
        count, resident = watch.held(self._pid)
        if resident > self._limits.memory_bytes:
            self._stop(Status.MEMORY)
        if count > self._limits.processes + _OWN_PROCESSES:
            self._stop(Status.RUNTIME_ERROR)

    def _stop(self, why: Status) -> None:
        """Have the supervisor end the program; the first reason counts."""
        if self.stopped is None:
            self.stopped = why
            self._control.close()
            self._deadline = min(self._deadline, time.monotonic() + _GRACE_SECONDS)
