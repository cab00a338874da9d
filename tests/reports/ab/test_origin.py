"""Where an arm's numbers come from, by what lm-eval and the runs recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.reports.ab.arms import AbError
from kvpolicy.reports.ab.origin import read_all
from kvpolicy.reports.lmeval_output import OutputError
from tests.reports.ab.made import samples_of, whole
from tests.reports.ab.runs import DATE, TASK, write

OLDER = "2025-01-02T03-04-05.678901"


def results(folder: Path, date: str = DATE, **fields: Any) -> None:
    (path,) = folder.rglob(f"results_{date}.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def run(folder: Path, wall_seconds: float | None, command: list[str]) -> None:
    content = {
        "format": "kvpolicy arm 1",
        "sha256": "",
        "settings": {},
        "command": command,
        "versions": {"sglang": "0.5.23"},
        "started": "2026-01-02T12:00:00+00:00",
        "wall_seconds": wall_seconds,
    }
    (folder / "run.json").write_text(json.dumps(content))


def test_results_of_lm_eval_alone(tmp_path: Path) -> None:
    write(tmp_path, samples_of([["wrong"], ["wrong"]], whole), date=OLDER, kv_policy="h2o")
    results(tmp_path, OLDER, total_evaluation_time_seconds="1000", task_hashes={TASK: "old"})
    write(tmp_path, samples_of([["correct"], ["wrong"]], whole), kv_policy="full")
    results(
        tmp_path,
        total_evaluation_time_seconds="12.5",
        task_hashes={TASK: "new"},
        lm_eval_version="0.4.13",
        pretty_env_info="PyTorch version: 2.14.1\nIs debug build: False",
        chat_template_sha="c0ffee",
    )
    arm, origin = read_all("a", tmp_path, None)
    assert [response.correct for response in arm.responses.values()].count(True) == 1
    assert origin.wall_seconds == 12.5
    assert origin.task_hashes == {TASK: ("new",)}
    assert origin.versions == {"lm-eval": "0.4.13", "torch": "2.14.1"}
    assert origin.model_args["kv_policy"] == "full"
    assert (origin.models, origin.chat_template, origin.commands) == (("org/model",), "c0ffee", ())


def test_runs_in_pieces(tmp_path: Path) -> None:
    for number, verdict in enumerate(("correct", "wrong")):
        piece = tmp_path / f"{TASK}-{number}-{number}"
        write(piece, samples_of([[verdict]], whole, [number]))
        results(piece, total_evaluation_time_seconds="1000", task_hashes={TASK: str(number)})
        run(piece, 10.0 + number, ["lm_eval", "--x", "a b", str(number)])
    arm, origin = read_all("a", tmp_path, None)
    assert len(arm.responses) == 2
    assert list(arm.responses) == sorted(arm.responses)
    assert origin.wall_seconds == 21.0
    assert origin.commands == ("lm_eval --x 'a b' 0", "lm_eval --x 'a b' 1")
    assert origin.task_hashes == {TASK: ("0", "1")}
    assert origin.versions == {"sglang": "0.5.23"}

    run(piece, None, [])
    with pytest.raises(AbError, match=f"arm a: the run in .*{TASK}-1-1 did not complete; run it again"):
        read_all("a", tmp_path, None)
    run(piece, 1.0, [])
    write(piece, samples_of([["correct"]], whole, [0]))
    with pytest.raises(AbError, match="two of its runs answer the same problem"):
        read_all("a", tmp_path, None)


def test_a_part_of_the_split(tmp_path: Path) -> None:
    write(tmp_path, samples_of([["correct"]] * 20, whole))
    counts = [len(read_all("a", tmp_path, part)[0].responses) for part in ("dev", "confirm", None)]
    assert counts[0] + counts[1] == counts[2] == 20
    assert min(counts) > 0
    with pytest.raises(OutputError, match="holds no samples"):
        read_all("a", tmp_path / "nowhere", None)
