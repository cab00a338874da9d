"""A few lives of benchmarks/stress.py, so that it keeps working between the long runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import harness

LIVES = 60


def test_a_short_run_on_a_server_that_retracts_holds(tiny: Path, tmp_path: Path) -> None:
    """The status says that no slot was lost, no life, and no answer; the file that the run did what it is for."""
    command = [sys.executable, harness.ROOT / "benchmarks" / "stress.py", "--lives", LIVES, "--minutes", 8]
    command += ["--servers", "retracting", "--model", tiny, "--out", tmp_path]
    run = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    result = json.loads((tmp_path / "stress.json").read_text())
    assert (result["lives_led"], result["faults"]) == (LIVES, [])
    assert sum(kind["lives"] for kind in result["kinds"].values()) == LIVES
    assert result["questions_alone"] > LIVES // 2
    assert result["log"]["retracted, forced"] >= 3
    assert result["cache"]["evictions"] > LIVES
    answers = [kind["answers"] for kind in result["kinds"].values()]
    assert sum(answer.get("equal", 0) for answer in answers) > LIVES // 2
