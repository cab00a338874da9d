"""Find the answer in a response: the last box after the thinking, or a number that is marked otherwise.

Everything here takes time linear in the length of the text, whatever the text is.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from kvpolicy.lmeval_tasks.grading import marked_number

THINK_OPENS, THINK_CLOSES = "<think>", "</think>"

# What `\boxed` takes where there are no braces: up to a space or the end of the formula. A word is prose.
_BARE = r"(?![A-Za-z]{2})(?:\\[A-Za-z]++(?:\{[^{}]{0,80}\}){0,2}|[^\s\\{}$`\"']){1,100}+"
# A box, an escaped character (so that "\{" is no brace), or a brace. Escaped texts double the backslash.
_TOKEN = re.compile(
    rf"\\{{1,2}}(?P<box>boxed|fbox)(?![A-Za-z])\s*+(?:(?P<brace>\{{)|(?P<bare>{_BARE}))|\\.|[{{}}]", re.DOTALL
)
_SOMETHING = re.compile(r"[^\s.,;:]")


class Extraction(NamedTuple):
    """The text of the answer, and whether there is none because the response was still thinking."""

    answer: str | None
    unfinished_thinking: bool


def final_answer(
    text: str, *, thinking: bool | None = None, numeric: bool = False, truncated: bool | None = None
) -> Extraction:
    """What a response gives as its answer.

    That is what the last ``\\boxed{…}`` (or ``\\fbox{…}``) after the last ``</think>`` holds; of nested ones the
    outermost. Boxes that are empty or never closed do not count: the first are quoted from the question, the
    second cut off. A box without braces, ``\\boxed 5``, runs to the next space or to the end of the formula.

    Parameters
    ----------
    thinking
        True if the prompt opened the thinking (as the chat templates of many thinking models do), so that a
        text without ``</think>`` is all thought. Otherwise only a ``<think>`` in the text opens it.
    numeric
        The answer is a number that may also be marked ``#### 18`` or "the answer is 18"; of several marked
        answers the last counts, and the last number of the text if none is marked.
    truncated
        With `numeric`: a response that was cut off must mark its answer. The number that it
        happens to stop at is a step of the calculation.
    """
    _, closed, answer = text.rpartition(THINK_CLOSES)
    if THINK_OPENS in answer or (thinking and not closed):
        return Extraction(None, unfinished_thinking=True)
    if not numeric:
        return Extraction(_last_box(answer).content, unfinished_thinking=False)
    answer = marked_number.plain(answer)
    box, marked = _last_box(answer), marked_number.last_marked(answer)
    if marked is not None and marked.start > box.start:
        found: str | None = marked.number
    elif box.content is not None or truncated:
        found = box.content
    else:
        found = marked_number.last_number(answer)
    return Extraction(found, unfinished_thinking=False)


class _Box(NamedTuple):
    start: int
    content: str | None


def _last_box(text: str) -> _Box:
    start, inside, end = -1, 0, 0
    groups: list[tuple[int, int] | None] = []  # the open braces: of a box where it starts, and its content
    for token in _TOKEN.finditer(text):
        box: tuple[int, int] | None = None
        if bare := token["bare"]:
            box, stop = (token.start(), token.start("bare")), token.start("bare") + len(bare.rstrip(".,;:"))
        elif token["brace"]:
            groups.append((token.start(), token.end()))
        elif token[0] == "{":
            groups.append(None)
        elif token[0] == "}" and groups:
            box, stop = groups.pop(), token.start()
        # Nested boxes share their text: only the last of them is copied out of it.
        if box is not None and _SOMETHING.search(text, box[1], stop):
            start, inside, end = *box, stop
    return _Box(start, text[inside:end].strip() if start >= 0 else None)
