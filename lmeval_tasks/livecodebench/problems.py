"""The problems, from the hub's files or from a folder of JSONL files, in one form."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpolicy.lmeval_tasks.errors import TaskError
from kvpolicy.lmeval_tasks.reasoning.documents import FOLDER, Document

_FIELDS = {
    "id": ("question_id", "id"),
    "title": ("question_title", "title"),
    "problem": ("question_content", "problem"),
    "starter_code": ("starter_code",),
    "platform": ("platform",),
    "difficulty": ("difficulty",),
    "contest_date": ("contest_date",),
}


def load(repository: str, hub_file: str, file: str) -> tuple[list[Document], dict[str, str], str]:
    """The problems, the private tests of those that have any, encoded and by id, and where they were read.

    The private tests are large, so they are kept out of the documents, which lm-eval logs.

    repository, hub_file : on the hub. The loading script there does not work with `datasets` 4, so the file is read.
    file : name in the folder that ``KVPOLICY_DATA`` names, if it names one.

    Raises
    ------
    TaskError
        If the file cannot be read or lacks a field.
    """
    folder = os.environ.get(FOLDER)
    path = Path(folder) / file if folder else _from_hub(repository, hub_file, file)
    if not path.is_file():
        raise TaskError(f"{FOLDER}={folder} holds no file {file}; put it there, or unset {FOLDER} for the hub.")
    documents, private = [], {}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                document, encoded = _problem(line, f"{path}, line {number}")
                documents.append(document)
                if encoded:
                    private[document["id"]] = encoded
    if len({document["id"] for document in documents}) < len(documents):
        raise TaskError(f"{path} holds two problems with the same id; each needs an id of its own.")
    return documents, private, str(path)


def _from_hub(repository: str, hub_file: str, file: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, hub_file, repo_type="dataset"))
    except (OSError, ValueError) as error:  # offline, gated, renamed
        reason = str(error).partition("\n")[0].rstrip(".")
        raise TaskError(
            f"{hub_file} of {repository} could not be loaded ({reason}); "
            f"with {FOLDER}=<folder> the problems are read from <folder>/{file} instead."
        ) from error


def _problem(line: bytes, where: str) -> tuple[Document, str]:
    try:
        row = json.loads(line)
        document: Document = {name: _text(row, names) for name, names in _FIELDS.items()}
        tests = row["public_test_cases"]
        tests = json.loads(tests) if isinstance(tests, str) else tests
        document["public_test_cases"] = [{"input": test["input"], "output": test["output"]} for test in tests]
        document["function"] = json.loads(row["metadata"] or "{}").get("func_name", "")
        encoded = row.get("private_test_cases") or ""
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise TaskError(f"{where} is no LiveCodeBench problem: {type(error).__name__} {error}.") from error
    document["answer"] = f"{len(tests)} public tests" + (" and the private ones" if encoded else "")
    if not tests and not encoded:
        raise TaskError(f"{where} has no tests.")
    return document, encoded


def _text(row: Mapping[str, Any], names: tuple[str, ...]) -> str:
    name = next((name for name in names if name in row), names[-1])
    return str(row[name])
