"""The text that a model is measured on: a file, or the problems of the GSM8K sample."""

from __future__ import annotations

import importlib.resources
import json
import re
from pathlib import Path

SAMPLE = "lmeval_tasks/gsm8k_sample/gsm8k_sample.jsonl"


class TextError(Exception):
    """What is wrong with a file, as a sentence without its full stop."""


def sample_problems() -> list[dict[str, str]]:
    """The problems of the sample, each with `question` and `solution`."""
    lines = (importlib.resources.files("kvpolicy") / SAMPLE).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def sample_text() -> str:
    """All problems with their solutions, without the marks of GSM8K's calculator."""
    problems = [f"{problem['question']}\n{problem['solution']}" for problem in sample_problems()]
    return re.sub(r"<<[^>]*>>", "", "\n\n".join(problems))


def file_text(path: Path) -> str:
    """The text of the file that `--text` names.

    Raises
    ------
    TextError
        If it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TextError(f"--text {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise TextError(f"--text {path} is not text in UTF-8") from None
