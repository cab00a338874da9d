"""Split LaTeX in canonical spelling where no bracket is open."""

from __future__ import annotations

import re
from collections.abc import Set
from typing import NamedTuple

from kvpolicy.lmeval_tasks.grading.bounds import Unreadable

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\"[^\"]*\"|.", re.DOTALL)
_OPENS, _CLOSES = frozenset(("(", "[", "{", r"\{", r"\begin")), frozenset((")", "]", "}", r"\}", r"\end"))
_BRACKETS = {"(": ")]", "[": ")]", r"\{": (r"\}",), "{": "}"}


class Split(NamedTuple):
    """The parts of a text, and the separators between them."""

    parts: list[str]
    separators: list[str]


class Bracketed(NamedTuple):
    """A text that is all in one pair of brackets."""

    opens: str
    inside: str
    closes: str


def split(text: str, separators: Set[str]) -> Split:
    """The parts of `text` between `separators` outside of all brackets. Half-open intervals are brackets too.

    Raises
    ------
    Unreadable
        If a bracket closes that was not opened, or stays open.
    """
    parts, found, depth, start = [], [], 0, 0
    for token in _TOKEN.finditer(text):
        kind = token[0]
        depth += (kind in _OPENS) - (kind in _CLOSES)
        if depth < 0:
            break
        if depth == 0 and kind in separators:
            parts.append(text[start : token.start()].strip())
            found.append(kind)
            start = token.end()
    if depth:
        raise Unreadable("brackets do not match")
    return Split([*parts, text[start:].strip()], found)


def bracketed(text: str) -> Bracketed | None:
    """The brackets around all of `text`, None if there are none."""
    tokens = _TOKEN.findall(text)
    if len(tokens) < 2 or tokens[0] not in _BRACKETS or tokens[-1] not in _BRACKETS[tokens[0]]:
        return None
    depth = 0
    for place, kind in enumerate(tokens, start=1):
        depth += (kind in _OPENS) - (kind in _CLOSES)
        if depth == 0:
            whole = place == len(tokens)
            return Bracketed(tokens[0], "".join(tokens[1:-1]).strip(), tokens[-1]) if whole else None
    return None
