"""Grade a worked solution by the number it ends with, as in GSM8K, for scripts that only ask whether it is right."""

from __future__ import annotations

import re
from decimal import Decimal

from kvpolicy.lmeval_tasks.grading.math import grade_math


def is_correct(text: str, gold: str, *, truncated: bool = False) -> bool:
    """Whether a response's answer equals the gold number; a response without an answer is wrong.

    A number that is marked as the answer (``\\boxed{18}``, ``#### 18``, "the answer is 18") goes before one that
    merely stands last, and of several marked ones the last counts. A `truncated` response (cut off at the token limit)
    must mark its answer.

    Raises
    ------
    decimal.InvalidOperation
        If the gold answer is no number.
    """
    Decimal(re.sub(r"[\\$,\s]", "", gold))
    return grade_math(text, gold, truncated=truncated, numeric=True).correct
