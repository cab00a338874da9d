"""Find the number that a worked solution ends with, as in GSM8K, where it is not in a box."""

from __future__ import annotations

import re
from collections import deque
from typing import NamedTuple

# Possessive, so that a lookahead behind it cannot be met by giving back digits.
_NUMBER = r"(?:(?<![\w)\]}])-)?(?:\\?\$-?)?(?:[0-9]{1,3}(?:,[0-9]{3})++(?![0-9])|[0-9]++)(?:\.[0-9]++)?"
# "16 - 3 = 13" is not the answer 16, nor is "#### 2. Add them up" the answer 2.
_NOT_A_TERM = r"(?!\s*(?:[-+*/=^\u00d7\u00f7]|\\times|\\div|\\cdot)\s*[\\$(]*[0-9])"
_NOT_A_HEADING = r"(?![.)]\s+\S)"

# A bound, without which a text that repeats a marker for ever takes quadratic time.
_GAP = "{0,12}"

_MARKED = re.compile(
    rf"####[^\w\n\-]{_GAP}(?P<hashes>{_NUMBER}){_NOT_A_TERM}{_NOT_A_HEADING}"
    rf"|\banswer(?:\s+is\b|\s*[:=])[^\w\n\-]{_GAP}(?P<phrase>{_NUMBER}){_NOT_A_TERM}",
    re.IGNORECASE,
)
_LAST = re.compile(rf"(?<![\w.])(?<![0-9],){_NUMBER}(?!(?:st|nd|rd|th)\b)", re.IGNORECASE)
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|\\,|\\!,|,\\!)(?=[0-9]{3})")


class MarkedNumber(NamedTuple):
    """Where the mark stands, and the number as it is written."""

    start: int
    number: str


def plain(text: str) -> str:
    """`text` with the separators and signs in which numbers are written here."""
    return _THOUSANDS.sub(",", text.replace("\N{MINUS SIGN}", "-"))


def last_marked(text: str) -> MarkedNumber | None:
    """The last number behind ``####`` or "answer is" in a :func:`plain` text."""
    found = deque(_MARKED.finditer(text), maxlen=1)
    return MarkedNumber(found[0].start(), found[0]["hashes"] or found[0]["phrase"]) if found else None


def last_number(text: str) -> str | None:
    """The last number of a :func:`plain` text."""
    numbers = _LAST.findall(text)
    return numbers[-1] if numbers else None
