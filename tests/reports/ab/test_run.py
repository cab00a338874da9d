"""What is run, in which order, and what counts as complete; lm-eval itself is left out."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from kvpolicy.reports.ab import run as ab_run
from kvpolicy.reports.ab.arms import AbError, ArmSpec
from kvpolicy.reports.ab.jobs import Job, begin, finish, is_complete, jobs_of, missing
from kvpolicy.reports.ab.settings import Settings

SETTINGS = Settings("m", ("t", "u"), "dev", 4, None, {}, {}, {}, True, "auto")
ARMS = (ArmSpec("a", {"kv_policy": "full"}), ArmSpec("b", {"kv_policy": "h2o"}))


def save(folder: Path, tasks: Sequence[str] = ("t",), wanted: int = 2, written: int = 2, date: str = "2") -> None:
    """Results as lm-eval saves them, with so many lines of samples."""
    (folder / "m").mkdir(parents=True, exist_ok=True)
    results = {
        "configs": {task: {} for task in tasks},
        "n-samples": {task: {"effective": wanted} for task in tasks},
    }
    (folder / "m" / f"results_{date}.json").write_text(json.dumps(results))
    for task in tasks:
        (folder / "m" / f"samples_{task}_{date}.jsonl").write_text("{}\n" * written)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Folders in which something was run, by their names; it ends well unless a folder's name begins with "b-t"."""
    names: list[str] = []

    def run(command: Sequence[str], log: Path, show: Callable[[str], None]) -> int:
        show("[bold]a line")
        names.append(f"{log.parent.parent.name}/{log.parent.name}")
        save(log.parent)
        log.write_text("ValueError: no")
        return 1 if names[-1].startswith("b/t") else 0

    monkeypatch.setattr(ab_run, "run_logged", run)
    return names


def test_a_failure_ends_its_arm_and_no_other(tmp_path: Path, ran: list[str]) -> None:
    jobs = [job for arm in (*reversed(ARMS), ArmSpec("c", {"kv_policy": "tova"})) for job in pieces(arm, tmp_path)]
    begun: list[str] = []
    shown = io.StringIO()
    with pytest.raises(AbError) as failed:
        ab_run.run_all(jobs, begun.append, Console(file=shown))
    assert ran == ["b/t-0-1", *[f"{name}/{piece}" for name in "ac" for piece in ("t-0-1", "t-2-3", "u-0-1", "u-2-3")]]
    assert begun == ["b", "a", "c"]
    failure = f"arm b failed with status 1, {tmp_path / 'b' / 't-0-1' / 'log.txt'} says: ValueError: no"
    assert str(failed.value) == f"{failure}; what is complete is kept, and the same command runs only the rest."
    assert failure in shown.getvalue()
    ran.clear()
    with pytest.raises(AbError):
        ab_run.run_all(jobs, begun.append, Console(file=shown))
    assert (ran, begun) == (["b/t-0-1"], ["b", "a", "c", "b"])


def pieces(arm: ArmSpec, folder: Path) -> list[Job]:
    return jobs_of(arm, SETTINGS, folder, 2)


def whole(folder: Path, settings: Settings = SETTINGS) -> Job:
    (job,) = jobs_of(ARMS[0], settings, folder, None)
    return job


def test_the_last_piece_may_be_smaller(tmp_path: Path) -> None:
    jobs = jobs_of(ARMS[0], SETTINGS, tmp_path, 3)
    assert [job.folder.name for job in jobs] == ["t-0-2", "t-3-3", "u-0-2", "u-3-3"]
    assert len({json.dumps(job.settings) for job in jobs}) == 4


@pytest.mark.parametrize(
    ("saved", "says"),
    [
        ({}, None),
        ({"written": 3}, None),  # of a task with two filters
        ({"written": 1}, "1 of 2 samples of t were saved"),
        ({"tasks": ("t", "u")}, None),
    ],
)
def test_what_lm_eval_did_not_save(tmp_path: Path, saved: dict[str, int], says: str | None) -> None:
    assert missing(tmp_path) == "no results were saved"
    save(tmp_path, **saved)  # type: ignore[arg-type]
    assert missing(tmp_path) == says


def test_samples_without_an_end_or_of_an_older_run_do_not_count(tmp_path: Path) -> None:
    save(tmp_path, ("t", "u"), date="1")
    save(tmp_path, ("t", "u"), date="2")
    (tmp_path / "m" / "samples_u_2.jsonl").write_text("{}\n{")
    assert missing(tmp_path) == "1 of 2 samples of u were saved"
    (tmp_path / "m" / "samples_u_2.jsonl").unlink()
    assert missing(tmp_path) == "no samples of u were saved"


def test_an_incomplete_run_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    job = whole(tmp_path)
    begin(job)
    save(job.folder, written=1)
    job.log.write_text("old")
    assert not is_complete(job)
    begin(job)
    assert [path.name for path in job.folder.rglob("*") if path.is_file()] == ["run.json"]
    save(job.folder)
    assert not is_complete(job)
    finish(job, 2.5)
    assert is_complete(whole(tmp_path))


def test_other_settings_matter_once_a_run_is_complete(tmp_path: Path) -> None:
    job = whole(tmp_path)
    begin(job)
    save(job.folder)
    other = whole(tmp_path, dataclasses.replace(SETTINGS, gen_kwargs={"temperature": "0"}, repeats=2))
    assert not is_complete(other)
    finish(job, 2.5)
    with pytest.raises(AbError, match=r"a run of other settings \(generation, metadata differ\); move it away"):
        is_complete(other)


def test_pieces_that_did_not_complete_are_no_obstacle(tmp_path: Path) -> None:
    first = pieces(ARMS[0], tmp_path)[0]
    begin(first)
    save(first.folder)
    begin(whole(tmp_path))
    assert list(tmp_path.rglob("samples_*")) == []
    finish(first, 1.0)
    with pytest.raises(AbError, match="divided otherwise"):
        whole(tmp_path)
