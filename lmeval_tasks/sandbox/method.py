"""The ways to isolate a program, as the front of a command line."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvpolicy.lmeval_tasks.sandbox import isolation
from kvpolicy.lmeval_tasks.sandbox.outcome import SandboxError
from kvpolicy.lmeval_tasks.sandbox.view import interpreter, view


@dataclass(frozen=True)
class Method:
    """How programs are run."""

    tool: Literal["bwrap", "namespaces", "rlimits"]
    """Bubblewrap, Linux namespaces entered by ``enter.py``, or resource limits alone."""
    rights: Literal["user", "root", "root in a user namespace"] = "user"
    """Of whoever makes the namespaces. For root, programs run as nobody."""

    def __str__(self) -> str:
        return self.tool if self.rights == "user" else f"{self.tool} as {self.rights}"

    @property
    def alone(self) -> bool:
        """Whether a run has namespaces of its own."""
        return self.tool != "rlimits"

    @property
    def user(self) -> int:
        """The user that the supervisor becomes, -1 for none."""
        return -1 if self.rights == "user" else isolation.NOBODY

    def front(self, tmp_bytes: int) -> list[str]:
        """The command line up to the command that runs inside.

        Raises
        ------
        SandboxError
            If there is no bubblewrap.
        """
        if not self.alone:
            return []
        outer = python("userns.py") if self.rights == "root in a user namespace" else []
        inner = [_bubblewrap()] if self.tool == "bwrap" else python("enter.py")
        return [*outer, *inner, *isolation.arguments(view(), root=self.rights != "user", tmp_bytes=tmp_bytes)]


def _bubblewrap() -> str:
    path = shutil.which("bwrap")
    if path is None:
        raise SandboxError("bwrap: not found")
    return path


def python(script: str) -> list[str]:
    """A Python that runs a script of this folder, handed over as text: in the sandbox there is no such file."""
    source = Path(__file__).with_name(script).read_text(encoding="utf-8")
    return [interpreter(), "-s", "-S", "-P", "-B", "-c", source]
