"""A plan is written before the run, cannot be changed unnoticed, and counts how often the data was looked at."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.reports.ab import plan as ab_plan
from kvpolicy.reports.ab.plan import Plan, PlanError, PlanFile, Run, load_plan, record_run, write_plan

PLAN = Plan(
    arms={"full": {"kv_policy": "full"}, "small": {"kv_policy": "vase-dkv", "kv_budget": 1024}},
    tasks=("kvp_math500", "kvp_aime25"),
    split="confirm",
    comparisons=(("full", "small"),),
    seeds=(0, 1),
    settings={"repeats": 4, "generation": {"temperature": 0.6, "until": []}},
)
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


def test_a_plan_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "plan.json"
    assert write_plan(path, PLAN) == PlanFile(PLAN)
    assert load_plan(path, PLAN) == PlanFile(PLAN)
    assert load_plan(path).run_count == 0
    assert json.loads(path.read_text(encoding="utf-8"))["sha256"] == PLAN.digest


def test_every_run_is_appended(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, PLAN)
    record_run(path, tmp_path / "first", NOON)
    file = record_run(path, Path("second"), NOON.astimezone(timezone(timedelta(hours=-5))) + timedelta(days=1))
    assert file.runs == (
        Run("2026-01-02T12:00:00+00:00", str(tmp_path / "first")),
        Run("2026-01-03T12:00:00+00:00", "second"),
    )
    assert load_plan(path, PLAN) == file
    assert file.run_count == 2
    before = datetime.now(UTC)
    latest = datetime.fromisoformat(record_run(path, Path("third")).runs[-1].time)
    assert abs(latest - before) < timedelta(minutes=5)


def test_writing_the_same_plan_again_keeps_its_runs(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, PLAN)
    record_run(path, Path("run"), NOON)
    written = path.read_bytes()
    same = dataclasses.replace(PLAN, arms=dict(reversed(PLAN.arms.items())))
    assert write_plan(path, same).run_count == 1
    assert path.read_bytes() == written


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("arms", {**PLAN.arms, "small": {"kv_policy": "vase-dkv", "kv_budget": 2048}}),
        ("tasks", ("kvp_math500",)),
        ("split", "dev"),
        ("comparisons", (("small", "full"),)),
        ("seeds", (0, 2)),
        ("settings", {"repeats": 8}),
    ],
)
def test_another_plan_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    other = dataclasses.replace(PLAN, **{field: value})
    assert other.digest != PLAN.digest
    path = tmp_path / "plan.json"
    write_plan(path, PLAN)
    for runs, told in ((0, "was not run"), (1, "was run once"), (2, "was run 2 times")):
        for refusing in (write_plan, load_plan):
            with pytest.raises(PlanError, match=rf"plans something else \({field} differ\) and {told} already"):
                refusing(path, other)
        assert load_plan(path).run_count == runs
        record_run(path, Path("run"))


@pytest.mark.parametrize("place", [("plan", "seeds", 0), ("plan", "arms", "small", "kv_budget"), ("sha256",)])
def test_a_plan_that_was_edited_is_refused(tmp_path: Path, place: tuple[str | int, ...]) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, PLAN)
    content = json.loads(path.read_text(encoding="utf-8"))
    inner = content
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = 7
    path.write_text(json.dumps(content), encoding="utf-8")
    for attempt in (lambda: load_plan(path), lambda: load_plan(path, PLAN), lambda: record_run(path, Path("run"))):
        with pytest.raises(PlanError, match="was changed after it was written"):
            attempt()
    assert json.loads(path.read_text(encoding="utf-8")) == content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "cannot be read as a plan"),
        ("[1]", "is no 'kvpolicy plan 1'"),
        ('{"format": "kvpolicy plan 0"}', "is no 'kvpolicy plan 1'"),
        ('{"format": "kvpolicy plan 1"}', "is no complete plan"),
        ('{"format": "kvpolicy plan 1", "plan": {"tasks": [], "seeds": []}, "runs": []}', "is no complete plan"),
        ('{"format": "kvpolicy plan 1", "plan": [], "runs": []}', "is no complete plan"),
        (b"\xff\xfe", "cannot be read as a plan"),
    ],
)
def test_what_is_no_plan_is_refused_and_left_alone(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    for attempt in (lambda: load_plan(path), lambda: write_plan(path, PLAN), lambda: record_run(path, Path("run"))):
        with pytest.raises(PlanError, match=message):
            attempt()
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)


def test_a_run_without_a_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"there is no plan .*; write it before the run"):
        record_run(tmp_path / "plan.json", Path("run"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"comparisons": (("full", "large"),)}, "the plan compares large, and its arms are full, small"),
        ({"comparisons": ()}, "needs arms, tasks and comparisons"),
        ({"tasks": ()}, "needs arms, tasks and comparisons"),
    ],
)
def test_a_plan_that_compares_nothing_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        dataclasses.replace(PLAN, **changed)


def test_a_write_that_fails_leaves_the_plan_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, PLAN)
    written = path.read_bytes()

    def full_disk(_descriptor: int) -> None:
        assert path.read_bytes() == written
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ab_plan.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        record_run(path, Path("run"))
    assert path.read_bytes() == written
    monkeypatch.undo()
    assert record_run(path, Path("run")).run_count == 1


def test_who_reads_while_a_run_is_appended_reads_a_whole_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, PLAN)
    written = path.read_text(encoding="utf-8")
    with path.open(encoding="utf-8") as reader:
        record_run(path, Path("run"))
        assert reader.read() == written
    assert sorted(file.name for file in tmp_path.iterdir()) == [".plan.json.lock", "plan.json"]


def _append(path: Path, number: int, times: int) -> None:
    for index in range(times):
        record_run(path, Path(f"run {number}.{index}"))


def test_no_run_is_lost_when_several_processes_append(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, PLAN)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_append, args=(path, number, 10)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    runs = load_plan(path).runs
    assert sorted(run.folder for run in runs) == sorted(f"run {number}.{i}" for number in range(4) for i in range(10))


def test_a_plan_is_readable_by_whom_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_plan(tmp_path / "plan.json", PLAN)
    finally:
        os.umask(before)
    assert (tmp_path / "plan.json").stat().st_mode & 0o777 == 0o644
