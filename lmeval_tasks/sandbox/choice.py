"""Which way to isolate programs this machine allows."""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path
from typing import Literal

from kvpolicy.lmeval_tasks.sandbox import isolation
from kvpolicy.lmeval_tasks.sandbox.method import Method
from kvpolicy.lmeval_tasks.sandbox.outcome import Limits, SandboxError, Status
from kvpolicy.lmeval_tasks.sandbox.process import execute

UNSAFE = "KVPOLICY_UNSAFE_CODE"
_SYS_ADMIN = 21  # the capability to mount


def choose() -> Method:
    """Bubblewrap, else namespaces, else resource limits alone if ``KVPOLICY_UNSAFE_CODE=1``.

    Raises
    ------
    SandboxError
        If none of them can be used.
    """
    reasons = []
    for method in methods():
        if (reason := refusal(method)) is None:
            return method
        reasons.append(reason)
    if os.environ.get(UNSAFE) == "1":
        _warn()
        return Method("rlimits")
    raise SandboxError(
        f"Model-written code must be isolated, and nothing here can do that ({'; '.join(reasons)}): install bubblewrap "
        f"0.7 or newer and allow user namespaces, or set {UNSAFE}=1 to run it with resource limits alone."
    )


def methods() -> list[Method]:
    """What may work here, best first."""
    return [Method(tool, rights) for tool in ("bwrap", "namespaces") for rights in _rights()]


def _rights() -> list[Literal["user", "root", "root in a user namespace"]]:
    if os.geteuid() != 0 or not _has_nobody():
        return ["user"]
    return ["root", "root in a user namespace"] if _capable(_SYS_ADMIN) else ["root in a user namespace"]


@functools.cache
def refusal(method: Method) -> str | None:
    """Why `method` does not work here, None if it does: found out by trying."""
    try:
        outcome = execute(method, "print(6 * 7)", "", Limits())
    except SandboxError as error:
        return str(error)
    if (outcome.status, outcome.stdout) != (Status.FINISHED, "42\n"):
        return f"{method}: {outcome.status} {outcome.stderr.strip()}"
    return None


@functools.cache
def _warn() -> None:
    warnings.warn(
        f"{UNSAFE}=1: model-written code runs with resource limits alone; it can read your files, write them and use "
        "the network.",
        stacklevel=3,
    )


def _capable(capability: int) -> bool:
    status = Path("/proc/self/status").read_text()
    (effective,) = (line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> capability & 1)


def _has_nobody() -> bool:
    """Whether this user namespace has the user that a root's programs run as."""
    lines = [
        line.split() for name in ("uid", "gid") for line in Path(f"/proc/self/{name}_map").read_text().splitlines()
    ]
    holding = [first for first, _, count in lines if int(first) <= isolation.NOBODY < int(first) + int(count)]
    return len(holding) == 2
