"""What was going to be compared, written down before the part of the data that is reported once is looked at."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

FORMAT = "kvpolicy plan 1"


class PlanError(Exception):
    """A plan file does not hold what it should; the message is one sentence for the user."""


@dataclass(frozen=True)
class Plan:
    """What is compared. Two plans are the same if all of this is.

    arms : per name the arguments of its run, as JSON can hold them.
    split : the part of each task.
    comparisons : pairs of names, the baseline first.
    seeds : of the runs.
    settings : whatever else decides the result: number of repeats, generation settings, versions.
    """

    arms: Mapping[str, Mapping[str, Any]]
    tasks: tuple[str, ...]
    split: Literal["dev", "confirm", "all"]
    comparisons: tuple[tuple[str, str], ...]
    seeds: tuple[int, ...]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if strangers := sorted({name for pair in self.comparisons for name in pair} - set(self.arms)):
            raise PlanError(f"the plan compares {', '.join(strangers)}, and its arms are {', '.join(self.arms)}.")
        if not (self.arms and self.tasks and self.comparisons):
            raise PlanError("a plan needs arms, tasks and comparisons.")

    @property
    def digest(self) -> str:
        """SHA-256 of the whole plan, independent of the order of names in it."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Run:
    """One run on the planned data: when it was started (ISO 8601, UTC), and the folder of its results."""

    time: str
    folder: str


@dataclass(frozen=True)
class PlanFile:
    """A plan, and every run of it so far, oldest first."""

    plan: Plan
    runs: tuple[Run, ...] = ()

    @property
    def run_count(self) -> int:
        """How often the data was looked at under this plan."""
        return len(self.runs)


def write_plan(path: Path, plan: Plan) -> PlanFile:
    """Write a plan before its first run. A file that holds the same plan is left as it is, with its runs.

    Raises
    ------
    PlanError
        If `path` holds another plan, or no plan at all.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        if path.exists():
            return load_plan(path, plan)
        file = PlanFile(plan)
        _write(path, file)
        return file


def load_plan(path: Path, expected: Plan | None = None) -> PlanFile:
    """Read a plan and its runs.

    expected : what is going to be run or reported.

    Raises
    ------
    PlanError
        If there is none; if it was changed since it was written; or if it is not `expected`.
    """
    file = _read(path)
    if expected is not None and expected.digest != file.plan.digest:
        theirs, ours = (json.loads(json.dumps(dataclasses.asdict(plan))) for plan in (file.plan, expected))
        changed = ", ".join(name for name in theirs if theirs[name] != ours[name])
        raise PlanError(
            f"{path} plans something else ({changed} differ) and {_count(file.run_count)} already; "
            "run what was planned, or write another plan to another file."
        )
    return file


def record_run(path: Path, folder: Path, time: datetime | None = None) -> PlanFile:
    """Append a run to its plan, before it is started. Several processes may do so at once.

    time : aware; now by default.

    Raises
    ------
    PlanError
        See :func:`load_plan`.
    """
    load_plan(path)  # no lock is left where there is no plan
    with _locked(path):
        file = load_plan(path)
        started = (time or datetime.now(UTC)).astimezone(UTC).isoformat(timespec="seconds")
        file = PlanFile(file.plan, (*file.runs, Run(started, str(folder))))
        _write(path, file)
        return file


def _count(runs: int) -> str:
    return {0: "was not run", 1: "was run once"}.get(runs, f"was run {runs} times")


def _read(path: Path) -> PlanFile:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanError(f"there is no plan {path}; write it before the run.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PlanError(f"{path} cannot be read as a plan: {error}.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise PlanError(f"{path} is no {FORMAT!r}; name another file.")
    try:
        fields = dict(content["plan"])
        fields |= {name: tuple(fields[name]) for name in ("tasks", "seeds")}
        fields["comparisons"] = tuple((baseline, arm) for baseline, arm in fields["comparisons"])
        plan, runs = Plan(**fields), tuple(Run(**run) for run in content["runs"])
        digest = content["sha256"]
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"{path} is no complete plan ({error!r}); write a new one to another file.") from error
    if plan.digest != digest:
        raise PlanError(
            f"{path} was changed after it was written: its plan has not the SHA-256 that stands in it; "
            "undo the change, or write a new plan to another file."
        )
    return PlanFile(plan, runs)


def _write(path: Path, file: PlanFile) -> None:
    """All or nothing, and on the disk before it takes the place of what was there."""
    content = {
        "format": FORMAT,
        "sha256": file.plan.digest,
        "plan": dataclasses.asdict(file.plan),
        "runs": [dataclasses.asdict(run) for run in file.runs],
    }
    part = path.with_name(f".{path.name}.part")  # one writer at a time: see `_locked`
    with part.open("w", encoding="utf-8") as target:
        json.dump(content, target, indent=2, ensure_ascii=False)
        target.write("\n")
        target.flush()
        os.fsync(target.fileno())
    os.replace(part, path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone with a plan. The lock is a file of its own beside it, since the plan itself is replaced."""
    with path.with_name(f".{path.name}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
