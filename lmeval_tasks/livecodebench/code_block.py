"""Find the program in a response: the last fenced block of Python after the thinking."""

from __future__ import annotations

import re
import textwrap
from typing import NamedTuple

from kvpolicy.lmeval_tasks.grading.extract import THINK_CLOSES, THINK_OPENS

_FENCE = re.compile(r"[ \t]*(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^`\n]*)")
_PYTHON = frozenset(("python", "python3", "py", "py3"))


class Extraction(NamedTuple):
    """The text of the program, and whether there is none because the response was still thinking."""

    program: str | None
    unfinished_thinking: bool


def last_program(text: str, *, thinking: bool | None = None) -> Extraction:
    """The last closed block that is marked as Python, or, if none is, the last one without a mark.

    A block that is never closed was cut off and does not count, nor does one in another language. Takes time linear
    in the length of the text.

    thinking : True if the prompt opened the thinking, so that a text without ``</think>`` is all thought.
    """
    _, closed, answer = text.rpartition(THINK_CLOSES)
    if THINK_OPENS in answer or (thinking and not closed):
        return Extraction(None, unfinished_thinking=True)
    python = unmarked = None
    opening: re.Match[str] | None = None
    inside: list[str] = []
    for line in answer.replace("\r\n", "\n").split("\n"):
        fence = _FENCE.fullmatch(line)
        if fence is not None and (opening is None or _language(fence) in _PYTHON):
            opening, inside = fence, []  # a mark within a block begins anew what was left unclosed
        elif opening is not None and fence is not None and _closes(fence, opening):
            if _language(opening) in _PYTHON:
                python = inside
            elif not _language(opening):
                unmarked = inside
            opening, inside = None, []
        else:
            inside.append(line)
    lines = unmarked if python is None else python
    return Extraction(None if lines is None else textwrap.dedent("\n".join(lines)), unfinished_thinking=False)


def _language(fence: re.Match[str]) -> str:
    return fence["info"].partition(" ")[0].strip().lower()


def _closes(fence: re.Match[str], opening: re.Match[str]) -> bool:
    return not fence["info"].strip() and fence["fence"].startswith(opening["fence"])
