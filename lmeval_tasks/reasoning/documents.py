"""The documents of a task, from the hub or from a folder of JSONL files, in one form."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpolicy.lmeval_tasks.errors import TaskError
from kvpolicy.lmeval_tasks.grading.extract import final_answer
from kvpolicy.lmeval_tasks.reasoning.options import Options
from kvpolicy.lmeval_tasks.split import part_of

FOLDER = "KVPOLICY_DATA"
LETTERS = "ABCD"

Document = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """Where a task's rows come from, and what their fields are called there.

    hub, config, hub_split : arguments of ``datasets.load_dataset``.
    file : name of the file in the folder that ``KVPOLICY_DATA`` names.
    prefix : put before ids that lack it, so that a problem has one id wherever it was read.
    id, problem, answer : names of a field; the first that a row has is taken. A row without id is numbered. Of an
        answer with a box only what is in the box is kept.
    wrong_answers : fields of the other choices, of a task with choices.
    answer_after : the mark that the answer follows, where the field holds a whole solution.
    """

    hub: str
    config: str | None
    hub_split: str
    file: str
    prefix: str = ""
    id: tuple[str, ...] = ("unique_id", "id", "problem_idx")
    problem: tuple[str, ...] = ("problem", "question")
    answer: tuple[str, ...] = ("answer",)
    wrong_answers: tuple[str, ...] = ()
    answer_after: str = ""


def load(source: Source, options: Options) -> list[Document]:
    """The documents of a run: ``id``, ``problem`` and ``answer``, and ``choices`` where there are any.

    Raises
    ------
    TaskError
        If the rows cannot be read or lack a field, or if fewer documents are left than were asked for.
    """
    folder = os.environ.get(FOLDER)
    rows, where = _from_folder(Path(folder), source) if folder else _from_hub(source)
    documents = [_document(row, number, source, f"{where}, row {number + 1}") for number, row in enumerate(rows)]
    if len({document["id"] for document in documents}) < len(documents):
        raise TaskError(f"{where} holds two rows with the same id; each problem needs an id of its own.")
    return chosen(documents, options, where)


def chosen(documents: Sequence[Document], options: Options, where: str) -> list[Document]:
    """The documents of the split and the subset, in their order.

    A subset is the first few by the hash of their ids: the same whatever the order, and part of any larger one.
    """
    part = [document for document in documents if options.split in ("all", part_of(document["id"]))]
    wanted = 1 if options.subset is None else options.subset
    if len(part) < wanted:
        split = "" if options.split == "all" else f" in split={options.split}"
        raise TaskError(f"{where} has {len(part)} problems{split}; {wanted} or more are needed.")
    ranked = sorted(part, key=lambda document: _digest(document["id"]))
    kept = {document["id"] for document in ranked[: options.subset]}
    return [document for document in part if document["id"] in kept]


def _from_folder(folder: Path, source: Source) -> tuple[list[Any], str]:
    path = folder / source.file
    if not path.is_file():
        raise TaskError(f"{FOLDER}={folder} holds no file {source.file}; put it there, or unset {FOLDER} for the hub.")
    try:
        with path.open(encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines if line.strip()]
    except ValueError as error:  # no JSON, or no UTF-8
        raise TaskError(f"{path} is not JSONL, one object a line: {error}.") from error
    if not rows:
        raise TaskError(f"{path} is empty; it must hold one JSON object a line.")
    return rows, str(path)


def _from_hub(source: Source) -> tuple[Iterable[Any], str]:
    from datasets import load_dataset

    try:
        return load_dataset(source.hub, source.config, split=source.hub_split), source.hub
    except (OSError, ValueError) as error:  # offline, gated, renamed
        reason = str(error).partition("\n")[0].rstrip(".")
        raise TaskError(
            f"{source.hub} could not be loaded ({reason}); "
            f"with {FOLDER}=<folder> its problems are read from <folder>/{source.file} instead."
        ) from error


def _document(row: Any, number: int, source: Source, where: str) -> Document:
    if not isinstance(row, Mapping):
        raise TaskError(f"{where} is no JSON object.")
    identifier = next((str(row[name]) for name in source.id if row.get(name) is not None), str(number))
    if not identifier.startswith(source.prefix):
        identifier = f"{source.prefix}-{identifier}"
    problem, answer = _field(row, source.problem, where), _field(row, source.answer, where)
    if source.wrong_answers:
        wrong = [_field(row, (name,), where) for name in source.wrong_answers]
        choices, letter = shuffled(problem, answer, wrong)
        return {"id": identifier, "problem": problem, "choices": choices, "answer": letter}
    if source.answer_after:
        answer = answer.rpartition(source.answer_after)[2].strip()
        if not answer:
            raise TaskError(f"{where} has nothing after {source.answer_after} in its {source.answer[0]}.")
    return {"id": identifier, "problem": problem, "answer": final_answer(answer).answer or answer}


def _field(row: Mapping[str, Any], names: Sequence[str], where: str) -> str:
    for name in names:
        if row.get(name) is not None and (text := str(row[name]).strip()):
            return text
    raise TaskError(f"{where} has no {' or '.join(names)}; its fields are {', '.join(map(str, row))}.")


def shuffled(problem: str, answer: str, wrong_answers: Sequence[str]) -> tuple[list[str], str]:
    """The choices in an order that the question alone decides, and the letter of the right one."""
    choices = [(answer, True), *((text, False) for text in wrong_answers)]
    choices.sort(key=lambda choice: _digest(f"{problem}\n{choice[0]}"))
    return [text for text, _ in choices], LETTERS[[right for _, right in choices].index(True)]


def _digest(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
