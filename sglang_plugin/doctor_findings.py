"""What `kvpolicy doctor` says of one thing that it looked at."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvpolicy.sglang_plugin.errors import KVPolicyError

INSTALLED, PLUGIN, HOOKS, LAUNCH = "installed", "plugin", "hooks", "launch"
SECTIONS = {
    INSTALLED: "Installed",
    PLUGIN: "How SGLang finds kvpolicy",
    HOOKS: "Functions of SGLang that kvpolicy hooks",
    LAUNCH: "This launch",
}


class Status(StrEnum):
    """Whether something stands in the way of a launch."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    name, found : what, and what it is.
    advice : a sentence for whoever has to do something; empty where there is nothing to do.
    more : further fields for ``--json``, of this kind of finding alone.
    """

    section: str
    name: str
    found: str
    status: Status = Status.OK
    advice: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """All fields in one flat object."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "more"} | dict(self.more)


def problem(section: str, name: str, found: str, advice: str, **more: Any) -> Finding:
    """Something that a launch needs is wrong."""
    return Finding(section, name, found, Status.PROBLEM, advice, more)


def note(section: str, name: str, found: str, advice: str, **more: Any) -> Finding:
    """Nothing that stops a launch, but worth a sentence."""
    return Finding(section, name, found, Status.NOTE, advice, more)


def asked(section: str, name: str, passed: str, check: Callable[[], object]) -> Finding:
    """The sentence with which one of the plugin's own checks refuses, or `passed`."""
    try:
        check()
    except KVPolicyError as error:
        return problem(section, name, "refused", str(error))
    return Finding(section, name, passed)


def first_line(error: BaseException) -> str:
    """What an error of someone else's says, in one line."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
