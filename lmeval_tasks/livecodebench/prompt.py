"""What a model is asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def prompt(doc: Mapping[str, Any]) -> str:
    """The problem, what its program has to look like, and where to put it."""
    if doc["starter_code"].strip():
        form = f"Complete this code, and keep its names:\n\n```python\n{doc['starter_code'].rstrip()}\n```\n\n"
    else:
        form = "The program reads the input from standard input and prints the answer to standard output.\n\n"
    return (
        "Solve this programming problem with a Python program that passes all tests.\n\n"
        f"{doc['problem'].strip()}\n\n"
        f"{form}"
        "Put the whole program into one ```python block at the end of your answer."
    )
