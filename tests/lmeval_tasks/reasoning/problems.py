"""Problems of our own in the formats of the benchmark files, and tasks that read them."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path
from typing import Any

COUNT = 6
FILES = {
    "kvp_gsm8k": ("gsm8k.jsonl", "gsm8k-test-{}"),
    "kvp_math500": ("math500.jsonl", "test/algebra/{}.json"),
    "kvp_aime24": ("aime24.jsonl", "aime24-{}"),
    "kvp_aime25": ("aime25.jsonl", "aime25-{}"),
    "kvp_aime26": ("aime26.jsonl", "aime26-{}"),
    "kvp_hmmt_feb25": ("hmmt25.jsonl", "hmmt_feb_2025-{}"),
    "kvp_gpqa_diamond": ("gpqa_diamond.jsonl", "rec{}"),
}
TASKS = tuple(FILES)


def row(task: str, number: int) -> dict[str, Any]:
    """One line of a task's file; the answer is ``number + 100``, but for GPQA's letter."""
    identifier = FILES[task][1].format(number)
    if task == "kvp_gpqa_diamond":
        wrong = {f"Incorrect Answer {i}": f"{number + 100 + i} newtons" for i in (1, 2, 3)}
        right = {"Question": f"What force is {number} + 100 newtons?", "Correct Answer": f"{number + 100} newtons"}
        return {"Record ID": identifier, **right, **wrong, "Subdomain": "Mechanics"}
    question = {"question" if task == "kvp_gsm8k" else "problem": f"What is ${number} + 100$?"}
    return {"id": identifier, **question, "answer": str(number + 100), "solution": f"Add. #### {number + 100}"}


def write(folder: Path, *tasks: str, count: int = COUNT) -> Path:
    """The files of these tasks."""
    folder.mkdir(exist_ok=True)
    for task in tasks or TASKS:
        lines = [json.dumps(row(task, number)) for number in range(count)]
        (folder / FILES[task][0]).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def load(*names: str, **metadata: Any) -> dict[str, Any]:
    """Tasks by name, made by stock lm-eval from the printed include path."""
    return dict(manager(**metadata).load(list(names))["tasks"])


def manager(**metadata: Any) -> Any:
    """lm-eval's task manager for our tasks alone, with the metadata of a run."""
    from lm_eval.tasks import TaskManager

    folder = importlib.resources.files("kvpolicy") / "lmeval_tasks"
    return TaskManager(include_path=str(folder), include_defaults=False, metadata=metadata)
