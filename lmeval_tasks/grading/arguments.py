"""Give the arguments of LaTeX commands the braces that TeX lets one leave out."""

from __future__ import annotations

import re

from kvpolicy.lmeval_tasks.grading.bounds import MAX_NESTING, Unreadable

_ITEM = re.compile(r"\\[A-Za-z]+ ?|\\.|\"[^\"]*\"|.", re.DOTALL)
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?|-?[A-Za-z]")
_ARGUMENTS = {r"\frac": 2, r"\binom": 2, r"\pmod": 1}
_CLOSING = {"{": "}", "(": ")", "[": "]"}


def with_braces(text: str, depth: int = 0) -> str:
    r"""`\\frac12` as `\\frac{1}{2}`, `x^10` as `x^{10}`, `\\sqrt(2)` as `\\sqrt{2}`.

    TeX takes one digit where there are no braces. That is kept for ``\\frac``; after a root or in an exponent all
    digits belong together, because nobody writes ``2^10`` for 2¹·0.

    depth : how many arguments this text is nested in.

    Raises
    ------
    Unreadable
        If braces do not match, an argument is missing, or arguments are nested too deeply.
    """
    parts, position = [], 0
    while position < len(text):
        part, position = _item(text, position, depth)
        parts.append(part)
    return "".join(parts)


def _item(text: str, position: int, depth: int) -> tuple[str, int]:
    if depth > MAX_NESTING:
        raise Unreadable(f"arguments nested more than {MAX_NESTING} deep")
    match = _ITEM.match(text, position)
    if match is None:
        raise Unreadable("an argument is missing")
    item, position = match[0], match.end()
    command = item.strip()
    if command in _ARGUMENTS:
        for _ in range(_ARGUMENTS[command]):
            argument, position = _argument(text, position, depth)
            command += f"{{{argument}}}"
        return command, position
    if command == r"\sqrt":
        index = ""
        if text[position : position + 1] == "[":
            end = closing(text, position)
            index, position = f"[{with_braces(text[position + 1 : end], depth + 1)}]", end + 1
        root, position = _argument(text, position, depth, long=True)
        return f"{command}{index}{{{root}}}", position
    if item in "^_":
        script, position = _argument(text, position, depth, long=True)
        return (r"^\circ" if script.strip() == r"\circ" else f"{item}{{{script}}}"), position
    if item == "{":
        end = closing(text, position - 1)
        return f"{{{with_braces(text[position:end], depth + 1)}}}", end + 1
    if item == "}":
        raise Unreadable("a brace closes nothing")
    return item, position


def _argument(text: str, position: int, depth: int, *, long: bool = False) -> tuple[str, int]:
    while text[position : position + 1] == " ":
        position += 1
    opens = text[position : position + 1]
    if opens == "{" or (long and opens == "("):
        end = closing(text, position)
        return with_braces(text[position + 1 : end], depth + 1), end + 1
    if long and (number := _NUMBER.match(text, position)):
        return number[0], number.end()
    return _item(text, position, depth + 1)


def closing(text: str, position: int) -> int:
    """Where the bracket that opens at `position` is closed.

    Raises
    ------
    Unreadable
        If it is not.
    """
    opens, closes, depth = text[position], _CLOSING[text[position]], 0
    while position < len(text):
        character = text[position]
        depth += (character == opens) - (character == closes)
        if depth == 0:
            return position
        position += 2 if character == "\\" else 1
    raise Unreadable("a bracket is not closed")
