"""The text that quantization errors are measured on, and its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpolicy.reports.quant_error.capture import QuantErrorError
from kvpolicy.reports.text_input import TextError, file_text, sample_text

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
        return sample_text(), SAMPLE_SOURCE
    try:
        return file_text(path), path.name
    except TextError as error:
        raise QuantErrorError(str(error)) from None


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
