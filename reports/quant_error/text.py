"""The text that quantization errors are measured on, and its tokens."""

from __future__ import annotations

import importlib.resources
import json
import re
from pathlib import Path
from typing import Any

from kvpolicy.reports.quant_error.capture import QuantErrorError

SAMPLE = "lmeval_tasks/gsm8k_sample/gsm8k_sample.jsonl"
SAMPLE_SOURCE = "24 problems of GSM8K's test split with their solutions (openai/grade-school-math, MIT)"
# Fewer say nothing of the largest 1 % of a head.
LEAST_TOKENS = 128


def read_text(path: Path | None) -> tuple[str, str]:
    """A text and where it is from: that of a file, or of the sample without the marks of GSM8K's calculator.

    Raises
    ------
    QuantErrorError
    """
    if path is None:
        lines = (importlib.resources.files("kvpolicy") / SAMPLE).read_text(encoding="utf-8").splitlines()
        problems = [f"{problem['question']}\n{problem['solution']}" for problem in map(json.loads, lines)]
        return re.sub(r"<<[^>]*>>", "", "\n\n".join(problems)), SAMPLE_SOURCE
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise QuantErrorError(f"--text {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise QuantErrorError(f"--text {path} is not text in UTF-8") from None
    return text, path.name


def token_ids(tokenizer: Any, text: str, source: str, tokens: int) -> list[int]:
    """The first `tokens` tokens of a text, or all that it has, as the tokenizer gives them.

    Raises
    ------
    QuantErrorError
        If they are fewer than LEAST_TOKENS.
    """
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"][:tokens]
    if len(ids) < LEAST_TOKENS:
        raise QuantErrorError(
            f"the text ({source}) has {len(ids)} tokens, too few to say anything of the largest 1%: "
            f"give at least {LEAST_TOKENS}"
        )
    return ids
