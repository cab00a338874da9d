"""What a run of a program may use, and what it came to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class SandboxError(RuntimeError):
    """The sandbox itself could not be set up; it says nothing about the program."""


class Status(StrEnum):
    """How a run ended."""

    FINISHED = "finished"
    """The program ended by itself with exit code 0."""
    RUNTIME_ERROR = "runtime_error"
    """It ended with another exit code or by a signal, or had more processes than it may."""
    TIME_LIMIT = "time_limit"
    """CPU or wall time was used up."""
    MEMORY = "memory"
    """It ended with a `MemoryError`, or its processes together held more than the limit."""
    OUTPUT_LIMIT = "output_limit"
    """It wrote more than the limit to standard output or standard error."""
    CANCELLED = "cancelled"
    """The caller stopped it."""


@dataclass(frozen=True)
class Limits:
    """Limits of one run. Six seconds a test are LiveCodeBench's; the wall allows for a busy machine."""

    cpu_seconds: int = 6
    """Of each process."""
    wall_seconds: float = 15.0
    memory_bytes: int = 4 << 30
    """Address space of each process, and resident memory of all of them together."""
    processes: int = 32
    """Threads count."""
    output_bytes: int = 16 << 20
    """Of standard output, and of standard error."""
    file_bytes: int = 16 << 20
    """Of one file; all files together may hold four times as much."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"{name} of a sandbox is {value}, but must be positive.")


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    status: Status
    stdout: str
    """At most `Limits.output_bytes`, decoded as UTF-8 with replacement characters."""
    stderr: str
    """The last 4 KiB."""
    seconds: float
    """Wall time of the program, without the start of the sandbox."""
