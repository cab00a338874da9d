"""Read what lm-eval wrote: the newest `samples_*.jsonl` of each model and task, and the run's arguments."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SAMPLES = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT[\d.-]+)\.jsonl")


class OutputError(Exception):
    """An output folder does not hold what a report needs; the message is one sentence for the user."""


@dataclass(frozen=True)
class TaskRun:
    """One run of one task.

    model_args : what `lm_eval --model_args` was given; empty if the run left no readable results file.
    samples : one entry per response, as lm-eval logged it.
    """

    task: str
    model: str
    file: Path
    model_args: dict[str, Any]
    samples: list[dict[str, Any]]


def newest_runs(folder: Path) -> list[TaskRun]:
    """The newest run of each model (a folder of lm-eval) and task under `folder`.

    Raises
    ------
    OutputError
        If there are no logged samples.
    """
    newest: dict[tuple[Path, str], tuple[str, Path]] = {}
    for file in sorted(folder.rglob("samples_*.jsonl")):
        if match := _SAMPLES.fullmatch(file.name):
            key = file.parent, match["task"]
            newest[key] = max(newest.get(key, ("", file)), (match["date"], file))
    runs = [_read(task, date, file) for (_, task), (date, file) in sorted(newest.items())]
    if not any(run.samples for run in runs):
        raise OutputError(
            f"{folder} holds no samples of lm-eval; run lm_eval with --log_samples and --output_path {folder}."
        )
    return [run for run in runs if run.samples]


def _read(task: str, date: str, file: Path) -> TaskRun:
    results: dict[str, Any] = {}
    for path in sorted(file.parent.glob(f"*_{date}.json")):
        results = json.loads(path.read_text(encoding="utf-8"))
    arguments = results.get("config", {}).get("model_args")
    with file.open(encoding="utf-8") as lines:
        samples = [json.loads(line) for line in lines if line.strip()]
    return TaskRun(
        task=task,
        model=results.get("model_name") or file.parent.name,
        file=file,
        model_args=arguments if isinstance(arguments, dict) else {},
        # A task with several filters logs each response once per filter.
        samples=[sample for sample in samples if sample.get("filter") == samples[0].get("filter")],
    )
