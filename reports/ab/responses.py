"""The responses of one arm of an A/B comparison, one by one, from what lm-eval logged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvpolicy.lmeval_tasks.split import Part, part_of
from kvpolicy.reports.lmeval_output import OutputError, TaskRun, newest_runs

FLAGS = ("truncated", "looped", "garbage", "unfinished_thinking")
_IDENTIFIERS = ("id", "unique_id", "problem_idx")
# Of a task that logs no verdicts: its measure of correctness, 0 or 1.
_SCORES = ("exact_match", "acc")
# What belongs to the arm, or to the sample, and not to the question that both arms are asked.
_OWN_SETTINGS = ("custom_params", "sampling_seed", "seed")


class Key(NamedTuple):
    """What the responses of two arms are paired by."""

    task: str
    doc_hash: str
    repeat: int


@dataclass(frozen=True)
class Response:
    """One response.

    identifier : of the problem, as the split reads it; None if the document has none.
    prompt_hash, target_hash : lm-eval's, of the text that was asked and of the gold answer.
    text_hash : of the response.
    settings : the generation settings, as canonical JSON, without seeds and without the policy.
    verdict : None if the task logs only whether it is correct.
    flags : `FLAGS`; None where it is not known.
    tokens : length of the response; None if it is not known.
    record : ``meta_info["kv_policy"]``: mean, peak and end residency in tokens and bytes, evictions; None without it.
    """

    key: Key
    identifier: str | None
    prompt_hash: str
    target_hash: str
    text_hash: str
    settings: str
    correct: bool
    verdict: str | None
    flags: Mapping[str, bool | None]
    tokens: int | None
    record: Mapping[str, Any] | None


@dataclass(frozen=True)
class Arm:
    """All responses of one arm, in the order of their keys, and what its runs were asked for.

    asked : per task the arguments of the run; empty where it left no results file.
    """

    name: str
    responses: Mapping[Key, Response]
    asked: Mapping[str, Mapping[str, Any]]

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks, sorted."""
        return tuple(sorted({key.task for key in self.responses}))

    def of_task(self, task: str) -> list[Response]:
        """The responses to one task."""
        return [response for key, response in self.responses.items() if key.task == task]


def read_arm(name: str, folder: Path, part: Part | None = None) -> Arm:
    """The newest run of each task under `folder`.

    part : only the problems of this part of the split.

    Raises
    ------
    OutputError
        If there are no samples, or of two models; if a sample says nothing of each response; or if no problem is left.
    """
    runs = newest_runs(folder)
    tasks = [run.task for run in runs]
    if twice := sorted({task for task in tasks if tasks.count(task) > 1}):
        models = sorted({run.model for run in runs})
        raise OutputError(
            f"arm {name}: {folder} holds {', '.join(twice)} of several models ({', '.join(models)}); "
            "name the folder of one of them."
        )
    responses = [response for run in runs for response in responses_of(run)]
    if part is not None:
        responses = [response for response in responses if _part(name, response) == part]
        if not responses:
            raise OutputError(f"arm {name}: none of the problems in {folder} is in the {part} part of the split.")
    responses.sort(key=lambda response: response.key)
    return Arm(name, {response.key: response for response in responses}, {run.task: run.model_args for run in runs})


def responses_of(run: TaskRun) -> list[Response]:
    """Each response of a run. A document that stands twice in the data is one problem with more repeats.

    Raises
    ------
    OutputError
        See :func:`read_arm`.
    """
    responses: list[Response] = []
    repeats: dict[str, int] = {}
    for sample in run.samples:
        texts = _texts(sample)
        rows, records = _rows(run, sample, len(texts)), _records(run, sample, len(texts))
        for text, row, record in zip(texts, rows, records, strict=True):
            repeat = repeats.get(sample["doc_hash"], 0)
            repeats[sample["doc_hash"]] = repeat + 1
            verdict = row.get("verdict")
            responses.append(
                Response(
                    key=Key(run.task, sample["doc_hash"], repeat),
                    identifier=_identifier(sample),
                    prompt_hash=sample["prompt_hash"],
                    target_hash=sample["target_hash"],
                    text_hash=hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(),
                    settings=_settings(sample),
                    correct=row["correct"] if verdict is None else verdict == "correct",
                    verdict=verdict,
                    flags={flag: None if row.get(flag) is None else bool(row[flag]) for flag in FLAGS},
                    tokens=row.get("tokens"),
                    record=record,
                )
            )
    return responses


def _texts(sample: Mapping[str, Any]) -> list[str]:
    """The text of each response; `filtered_resps` has an entry per request, a list where that had several responses."""
    texts: list[str] = []
    for entry in sample["filtered_resps"]:
        texts += [str(text) for text in (entry if isinstance(entry, list) else [entry])]
    return texts


def _rows(run: TaskRun, sample: Mapping[str, Any], count: int) -> Sequence[Mapping[str, Any]]:
    """Verdict, flags and length of each response: ``responses`` of the kvp_ tasks, or the metrics of a single one."""
    rows = sample.get("responses")
    if isinstance(rows, list):
        if len(rows) != count:
            raise OutputError(f"{run.task}: a sample logs {len(rows)} verdicts for {count} responses; {_AGAIN}")
        return rows
    found = next((name for name in _SCORES if name in sample), None)
    if found is None or count != 1:
        what = (
            f"neither responses nor {' or '.join(_SCORES)}" if found is None else f"one {found} for {count} responses"
        )
        raise OutputError(f"{run.task}: a sample logs {what}; run a kvp_ task, which logs each response.")
    if sample[found] not in (0, 1):
        raise OutputError(f"{run.task}: {found} of a response must be 0 or 1 to be compared, got {sample[found]!r}.")
    return [{"correct": bool(sample[found]), **{flag: sample.get(flag) for flag in FLAGS}}]


def _records(run: TaskRun, sample: Mapping[str, Any], count: int) -> Sequence[Mapping[str, Any] | None]:
    """The record of the cache of each response; all None where the sample logs none."""
    found = sample.get("kv_policy")
    if found is None:
        return [None] * count
    records: list[Mapping[str, Any]] = found if isinstance(found, list) else [found]
    if len(records) != count:
        raise OutputError(f"{run.task}: a sample logs {len(records)} kv_policy records for {count} responses; {_AGAIN}")
    return records


_AGAIN = "its file is damaged or of another version of the task, so run it again."


def _identifier(sample: Mapping[str, Any]) -> str | None:
    return next((str(sample["doc"][name]) for name in _IDENTIFIERS if sample["doc"].get(name) is not None), None)


def _settings(sample: Mapping[str, Any]) -> str:
    settings: dict[str, Any] = {}
    for arguments in sample.get("arguments", {}).values():
        settings |= next((value for value in arguments.values() if isinstance(value, dict)), {})
    return json.dumps({name: value for name, value in settings.items() if name not in _OWN_SETTINGS}, sort_keys=True)


def _part(arm: str, response: Response) -> Part:
    if response.identifier is None:
        raise OutputError(
            f"arm {arm}: the documents of {response.key.task} have no {' or '.join(_IDENTIFIERS)}, "
            "so they cannot be divided into dev and confirm; compare all of them."
        )
    return part_of(response.identifier)
