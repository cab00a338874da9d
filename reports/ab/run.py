"""The runs of a comparison, one after the other; what is complete is not run again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvpolicy.reports.ab.arms import AbError
from kvpolicy.reports.ab.jobs import Job, begin, finish, is_complete, missing
from kvpolicy.reports.ab.process import reason, run_logged

_SHOWN = 60  # characters of a log's newest line


def run_all(jobs: Sequence[Job], before: Callable[[str], object], console: Console) -> None:
    """Run all jobs that are not complete.

    After a failure those of other arms are still run, and the rest of the same arm waits for the next call.

    before : called with the name of an arm ahead of its first run.

    Raises
    ------
    AbError
        Before anything is run, if results of other settings are in the way; at the end, if a run failed.
    """
    waiting = [job for job in jobs if not is_complete(job)]
    console.print(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are complete", highlight=False)
    failures: dict[str, str] = {}
    begun: set[str] = set()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[line]}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        shown = progress.add_task("", total=len(jobs), completed=len(jobs) - len(waiting), line="")
        for job in waiting:
            if job.arm in failures:
                continue
            if job.arm not in begun:
                before(job.arm)
                begun.add(job.arm)
            progress.update(shown, description=escape(str(job.folder)))
            if failure := _run(job, lambda line: progress.update(shown, line=line[-_SHOWN:])):
                failures[job.arm] = failure
                progress.console.print(failure, markup=False, soft_wrap=True)
            else:
                progress.console.print(f"{job.folder} is complete", markup=False, soft_wrap=True)
                progress.advance(shown)
    if failures:
        raise AbError(
            f"{'; '.join(failures.values())}; what is complete is kept, and the same command runs only the rest."
        )


def _run(job: Job, show: Callable[[str], None]) -> str | None:
    """Run one job; one sentence if it failed."""
    begin(job)
    start = time.monotonic()
    status = run_logged(job.command, job.log, show)
    if status:
        return f"arm {job.arm} failed with status {status}, {job.log} says: {reason(job.log)}"
    if (lacking := missing(job.folder)) is not None:
        return f"arm {job.arm} failed: {lacking}, {job.log} says: {reason(job.log)}"
    finish(job, time.monotonic() - start)
    return None
