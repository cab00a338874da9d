"""Where the numbers of an arm come from: its runs, as lm-eval and `kvpolicy ab` recorded them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpolicy.lmeval_tasks.split import Part
from kvpolicy.reports.ab.arms import AbError
from kvpolicy.reports.ab.jobs import RECORD, read_record
from kvpolicy.reports.ab.responses import Arm, read_arm
from kvpolicy.reports.lmeval_output import newest_runs


@dataclass(frozen=True)
class Origin:
    """The runs of one arm. What was not recorded is empty or None.

    commands : of runs that `kvpolicy ab` made.
    model_args, generation : as lm-eval recorded them; `generation` only what the command line gave.
    wall_seconds : of all runs, the start of the engine included.
    task_hashes : lm-eval's, over all documents, prompts and gold answers of a task; of one run in several pieces
        each has its own.
    """

    arm: str
    folders: tuple[str, ...]
    commands: tuple[str, ...]
    started: tuple[str, ...]
    models: tuple[str, ...]
    versions: Mapping[str, str]
    model_args: Mapping[str, Any]
    generation: Mapping[str, Any]
    chat_template: str | None
    task_hashes: Mapping[str, tuple[str, ...]]
    wall_seconds: float | None


def read_all(name: str, folder: Path, part: Part | None) -> tuple[Arm, Origin]:
    """An arm from the folder of its results, which may be divided into several runs, and where it comes from.

    Raises
    ------
    OutputError
        See :func:`ab_responses.read_arm`.
    AbError
        If a run in the folder is not complete, or two of them answer the same problem.
    """
    pieces = sorted({path.parent for path in folder.glob(f"**/{RECORD}")}) or [folder]
    records = [record for piece in pieces if (record := read_record(piece)) is not None]
    for piece, record in zip(pieces, records, strict=False):  # as many, or none
        if record["wall_seconds"] is None:
            raise AbError(f"arm {name}: the run in {piece} did not complete; run it again.")
    arm = _joined([read_arm(name, piece, part) for piece in pieces])
    return arm, _origin(name, pieces, records)


def _joined(pieces: Sequence[Arm]) -> Arm:
    responses = dict(sorted((key, response) for piece in pieces for key, response in piece.responses.items()))
    if len(responses) < sum(len(piece.responses) for piece in pieces):
        raise AbError(f"arm {pieces[0].name}: two of its runs answer the same problem; name the folder of one.")
    asked = {task: arguments for piece in pieces for task, arguments in piece.asked.items()}
    return Arm(pieces[0].name, responses, asked)


def _origin(name: str, folders: Sequence[Path], records: Sequence[Mapping[str, Any]]) -> Origin:
    found = _results(folders)
    versions = {package: version for record in records for package, version in record["versions"].items()}
    hashes: dict[str, tuple[str, ...]] = {}
    for each in found:
        for task, value in each.get("task_hashes", {}).items():
            hashes[task] = (*hashes.get(task, ()), value)
    newest: Mapping[str, Any] = found[-1] if found else {}
    config = newest.get("config", {})
    times = [record["wall_seconds"] for record in records] or [
        float(each["total_evaluation_time_seconds"]) for each in found if "total_evaluation_time_seconds" in each
    ]
    arguments, generation = config.get("model_args"), config.get("gen_kwargs")
    return Origin(
        arm=name,
        folders=tuple(map(str, folders)),
        commands=tuple(shlex.join(record["command"]) for record in records),
        started=tuple(record["started"] for record in records),
        models=tuple(sorted({each["model_name"] for each in found if each.get("model_name")})),
        versions=versions or _versions(newest),
        model_args=arguments if isinstance(arguments, dict) else {},
        generation=generation if isinstance(generation, dict) else {},
        chat_template=newest.get("chat_template_sha"),
        task_hashes=hashes,
        wall_seconds=sum(times) if times else None,
    )


def _results(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """The results files of the runs that are read, oldest first, each once."""
    paths = {
        path
        for folder in folders
        for run in newest_runs(folder)
        for path in run.file.parent.glob(f"results_{run.file.stem.removeprefix(f'samples_{run.task}_')}.json")
    }
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(paths, key=lambda path: (path.name, path))]


def _versions(results: Mapping[str, Any]) -> dict[str, str]:
    """What lm-eval itself tells of them; not that of SGLang."""
    torch = str(results.get("pretty_env_info", "")).partition("\n")[0].removeprefix("PyTorch version: ")
    named = {
        "lm-eval": results.get("lm_eval_version"),
        "transformers": results.get("transformers_version"),
        "torch": torch,
    }
    return {package: version for package, version in named.items() if version}
