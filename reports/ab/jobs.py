"""Runs of lm-eval that a comparison consists of, and the record beside the results of each."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvpolicy.reports.ab.arms import AbError, ArmSpec
from kvpolicy.reports.ab.settings import Settings, digest, versions

FORMAT = "kvpolicy arm 1"
RECORD, LOG = "run.json", "log.txt"


@dataclass(frozen=True)
class Job:
    """One run of lm-eval: a whole arm, or some problems of one task of it.

    settings : what decides its results, as JSON can hold it.
    """

    arm: str
    folder: Path
    command: tuple[str, ...]
    settings: Mapping[str, Any]

    @property
    def log(self) -> Path:
        """All that the run prints."""
        return self.folder / LOG


def jobs_of(arm: ArmSpec, settings: Settings, out: Path, chunk: int | None) -> list[Job]:
    """The runs of an arm, in order.

    chunk : problems of one run; None for all in one. Each is an engine of its own, and is not run again if it is
        complete. Responses are the same: their seeds are of the problem and the repeat.

    Raises
    ------
    AbError
        If the arm's folder holds anything else, or runs that are divided otherwise.
    """
    assert arm.arguments is not None, "an arm of existing results is not run"
    folder, described = out / arm.name, {**settings.shared, "arm": dict(arm.arguments)}
    if chunk is None:
        jobs = [Job(arm.name, folder, tuple(settings.command(arm.arguments, folder)), described)]
    else:
        assert settings.subset is not None, "without a subset the number of problems is not known"
        jobs = []
        for task in settings.tasks:
            for first in range(0, settings.subset, chunk):
                numbers = range(first, min(first + chunk, settings.subset))
                piece = folder / f"{task}-{numbers[0]}-{numbers[-1]}"
                command = settings.command(arm.arguments, piece, {task: numbers})
                problems = {"task": task, "first": numbers[0], "last": numbers[-1]}
                jobs.append(Job(arm.name, piece, tuple(command), {**described, "problems": problems}))
    _check_folder(folder, jobs)
    return jobs


def _check_folder(folder: Path, jobs: Sequence[Job]) -> None:
    found = {path.parent: read_record(path.parent) for path in folder.glob(f"**/{RECORD}")}
    complete = {path for path, record in found.items() if record is not None and record["wall_seconds"] is not None}
    if others := sorted(complete - {job.folder for job in jobs}):
        raise AbError(
            f"{others[0]} holds a run that is divided otherwise; use the --chunk, --tasks and --subset that it was "
            "made with, or another folder for -o."
        )
    if folder.is_dir() and any(folder.iterdir()) and not found:
        raise AbError(
            f"{folder} holds what no run of this arm left; name it as results, --arm {folder.name}={folder}, "
            "or take another folder for -o."
        )


def is_complete(job: Job) -> bool:
    """Whether its results are there, all of them, and of the same settings.

    Raises
    ------
    AbError
        If they are complete and of other settings.
    """
    record = read_record(job.folder)
    if record is None or record["wall_seconds"] is None:
        return False
    if record["sha256"] != digest(job.settings):
        theirs = record["settings"]
        names = sorted(name for name in {*theirs, *job.settings} if theirs.get(name) != job.settings.get(name))
        raise AbError(
            f"{job.folder} holds a run of other settings ({', '.join(names)} differ); move it away, or take another "
            "folder for -o."
        )
    return missing(job.folder) is None


def begin(job: Job) -> None:
    """Make the folder ready: what an earlier run left, which was not complete, is removed."""
    for pattern in ("results_*.json", "samples_*.jsonl"):
        for path in job.folder.rglob(pattern):
            path.unlink()
    job.log.unlink(missing_ok=True)
    _write(job, datetime.now(UTC).isoformat(timespec="seconds"), None)


def finish(job: Job, wall_seconds: float) -> None:
    """Say that all is there."""
    record = read_record(job.folder)
    assert record is not None, "a run is finished that was not begun"
    _write(job, record["started"], wall_seconds)


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record of the run in a folder; None if there is none.

    Raises
    ------
    AbError
        If it cannot be read.
    """
    path = folder / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise AbError(f"{path} cannot be read ({error}); move it away.") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise AbError(f"{path} is no {FORMAT!r}; move it away, or take another folder for -o.")
    return record


def missing(folder: Path) -> str | None:
    """What lm-eval has not saved of the newest run in a folder, after it said that it ended well; None if all is there.

    It only warns when it cannot write, and writes the samples after the results, task by task.
    """
    found = sorted(folder.rglob("results_*.json"), key=lambda path: path.name)
    if not found:
        return "no results were saved"
    results = json.loads(found[-1].read_text(encoding="utf-8"))
    date = found[-1].stem.removeprefix("results_")
    for task in results["configs"]:
        samples = found[-1].with_name(f"samples_{task}_{date}.jsonl")
        wanted = results["n-samples"][task]["effective"]
        if not samples.is_file():
            return f"no samples of {task} were saved"
        with samples.open(encoding="utf-8") as lines:
            written = sum(line.endswith("\n") for line in lines)
        if written < wanted:
            return f"{written} of {wanted} samples of {task} were saved"
    return None


def _write(job: Job, started: str, wall_seconds: float | None) -> None:
    content = {
        "format": FORMAT,
        "sha256": digest(job.settings),
        "settings": job.settings,
        "command": job.command,
        "versions": versions(),
        "started": started,
        "wall_seconds": wall_seconds,
    }
    job.folder.mkdir(parents=True, exist_ok=True)
    part = job.folder / f".{RECORD}.part"
    part.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(part, job.folder / RECORD)
