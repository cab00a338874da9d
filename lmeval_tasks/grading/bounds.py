"""Bounds on what the grader reads, checked before anything is parsed."""

from __future__ import annotations

import re

MAX_CHARACTERS = 1000
MAX_DIGITS = 200  # of one number
MAX_NESTING = 20

_LONG_NUMBER = re.compile(rf"[0-9]{{{MAX_DIGITS + 1}}}")
_OPENS, _CLOSES = frozenset("([{"), frozenset(")]}")


class Unreadable(Exception):
    """A text that is no mathematics this grader can read, or is beyond its bounds."""


def check(text: str) -> None:
    """Refuse an answer that is too long, nested too deeply, or holds too long a number.

    Raises
    ------
    Unreadable
        If so.
    """
    if len(text) > MAX_CHARACTERS:
        raise Unreadable(f"{len(text)} characters")
    if _LONG_NUMBER.search(text):
        raise Unreadable(f"a number of more than {MAX_DIGITS} digits")
    depth = 0
    for character in text:
        depth += (character in _OPENS) - (character in _CLOSES)
        if depth > MAX_NESTING:
            raise Unreadable(f"brackets nested more than {MAX_NESTING} deep")
