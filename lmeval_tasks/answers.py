"""Grade a worked solution by the number it ends with, as in GSM8K.

A number that is marked as the answer (``\\boxed{18}``, ``#### 18``, "the answer is 18") goes before
one that merely stands last, and of several marked ones the last counts.
"""

from __future__ import annotations

import re
from decimal import Decimal

# Possessive, so that a lookahead behind it cannot be met by giving back digits.
_NUMBER = r"(?:(?<![\w)\]}])-)?(?:\\?\$-?)?(?:[0-9]{1,3}(?:,[0-9]{3})++(?![0-9])|[0-9]++)(?:\.[0-9]++)?"
# "16 - 3 = 13" is not the answer 16, nor is "#### 2. Add them up" the answer 2.
_NOT_A_TERM = r"(?!\s*(?:[-+*/=^\u00d7\u00f7]|\\times|\\div|\\cdot)\s*[\\$(]*[0-9])"
_NOT_A_HEADING = r"(?![.)]\s+\S)"

# Bounds, without which a text that repeats a marker for ever takes quadratic time.
_GAP = "{0,12}"
_LONGEST_BOX = 300

_MARKED_NUMBER = re.compile(
    rf"####[^\w\n\-]{_GAP}(?P<hashes>{_NUMBER}){_NOT_A_TERM}{_NOT_A_HEADING}"
    rf"|\banswer(?:\s+is\b|\s*[:=])[^\w\n\-]{_GAP}(?P<phrase>{_NUMBER}){_NOT_A_TERM}",
    re.IGNORECASE,
)
_LAST_NUMBER = re.compile(rf"(?<![\w.])(?<![0-9],){_NUMBER}(?!(?:st|nd|rd|th)\b)", re.IGNORECASE)
_IN_BOX = re.compile(rf"(?<![\w.]){_NUMBER}")
_FRACTION = re.compile(r"\\[dt]?frac|[0-9]\s*/\s*[0-9]")
_BOX = "\\boxed{"
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|\\,|\\!,|,\\!)(?=[0-9]{3})")


def final_number(text: str, *, truncated: bool = False) -> Decimal | None:
    """The number that a response gives as its answer, or None.

    Thinking up to ``</think>`` is skipped; if it never ends there is no answer. A `truncated`
    response (cut off at the token limit) must mark its answer: the number that it happens to stop
    at is a step of the calculation.
    """
    *_, answer = text.rpartition("</think>")
    if "<think>" in answer:
        return None
    answer = _THOUSANDS.sub(",", answer.replace("\N{MINUS SIGN}", "-"))
    marked: dict[int, Decimal | None] = {
        match.start(): _decimal(match["hashes"] or match["phrase"]) for match in _MARKED_NUMBER.finditer(answer)
    }
    marked |= _boxed(answer)
    if marked:
        return marked[max(marked)]
    numbers = [] if truncated else _LAST_NUMBER.findall(answer)
    return _decimal(numbers[-1]) if numbers else None


def is_correct(text: str, gold: str, *, truncated: bool = False) -> bool:
    """Whether a response's final number equals the gold one; a response without a number is wrong."""
    return final_number(text, truncated=truncated) == _decimal(gold)


def _decimal(number: str) -> Decimal:
    return Decimal(re.sub(r"[\\$,\s]", "", number))


def _boxed(text: str) -> dict[int, Decimal | None]:
    """Position of each closed ``\\boxed{…}`` with its last number, None if that is part of something else.

    Empty boxes do not count: responses quote them from the question.
    """
    boxes: dict[int, Decimal | None] = {}
    start = text.find(_BOX)
    while start >= 0:
        inside = start + len(_BOX)
        content = _balanced(text[inside : inside + _LONGEST_BOX])
        if content.strip():
            numbers = [] if _FRACTION.search(content) else _IN_BOX.findall(content)
            boxes[start] = _decimal(numbers[-1]) if numbers else None
        start = text.find(_BOX, inside)
    return boxes


def _balanced(text: str) -> str:
    """`text` up to the brace that closes it; empty if there is none."""
    depth = 1
    for end, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:end]
    return ""
