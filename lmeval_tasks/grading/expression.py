"""Write an expression so that math-verify reads what is meant.

In the parser under math-verify ``2(3)`` is the mixed number 5, ``x(x+1)`` a function x, ``da`` a differential, R the
same as r, the i of ``2i`` a real variable, and a decimal is rounded to six places. Here each is spelled such that it
cannot be taken for that.
"""

from __future__ import annotations

import re

from kvpolicy.lmeval_tasks.grading.bounds import Unreadable
from kvpolicy.lmeval_tasks.grading.number import number, repeating
from kvpolicy.lmeval_tasks.grading.words import FUNCTIONS

_TOKEN = re.compile(
    r"\\(?:begin|end) ?\{[a-z]+\}"
    r"|\\(?:overline|bar|vec|hat|tilde|overrightarrow|dot|ddot|mathcal|mathbb) ?\{[^{}]*\}"
    r"|_ ?\{[^{}]*\}|\\[A-Za-z]+|\\\\|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|\S"
)
_MIXED = re.compile(
    r"(?<![0-9A-Za-z}^_.)])[0-9]+(?:\s*\\frac\{\s*[0-9]+\s*\}\{\s*[0-9]+\s*\}|\s+[0-9]+/[0-9]+(?![0-9.]))(?![0-9])"
)
_DEGREES = re.compile(r"([0-9]+(?:\.[0-9]+)?|[A-Za-z]|\\[a-z]+)\s*\^\\circ")
_BRACKETED_MATRIX = re.compile(r"(\\(?:begin|end) ?\{)[bBV](?=matrix\})")
_ARGUMENTS = {r"\frac": 2, r"\binom": 2, r"\sqrt": 1}
_FUNCTIONS = frozenset(rf"\{name}" for name in FUNCTIONS | {"sum", "prod", "int", "lim"})
_OPERATOR_TOKENS = r"+ - * / | , = & \\ \cdot \times \div \mod \to \choose \cup \cap \setminus \lfloor \lceil"
_OPERATORS = frozenset(_OPERATOR_TOKENS.split())
_CLOSES = {"(": ")", "[": "]", "{": "}"}


def spelled(text: str) -> str:
    r"""An expression in canonical spelling, as math-verify reads it.

    Raises
    ------
    Unreadable
        If there is something in it that is no part of an expression, or two numbers side by side.
    """
    text = _MIXED.sub(_improper, repeating(text))
    text = _DEGREES.sub(r"(\1\\cdot\\frac{\\pi}{180})", _BRACKETED_MATRIX.sub(r"\1p", text))
    return _Speller(_TOKEN.findall(text)).sequence("")


def _improper(match: re.Match[str]) -> str:
    value = number(match[0])
    return match[0] if value is None else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


class _Speller:
    """Walks over tokens once; each method returns the spelling of what it consumed."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = [*tokens, ""]
        self.place = 0
        self.integrates = r"\int" in tokens

    def sequence(self, closes: str) -> str:
        """Everything up to the bracket that closes the sequence."""
        spelled, value = "", ""  # of the value that ends the spelling so far: its kind
        while (token := self._next()) != closes:
            if not token:
                raise Unreadable("a bracket is not closed")
            kind = _kind(token)
            if kind == value == "number":
                raise Unreadable("two numbers side by side")
            if value in ("number", "value") and kind in ("number", "group", "command"):
                spelled += r"\cdot "
            spelled += self._spelling(token, kind)
            if kind not in ("script", "postfix"):
                value = {"group": "value", "command": "value", "letter": "value"}.get(kind, kind)
        return spelled

    def _next(self) -> str:
        token = self.tokens[self.place]
        self.place += 1
        return token

    def _spelling(self, token: str, kind: str) -> str:
        if kind == "number":
            return _exact(token)
        if kind == "group":
            opens, closes = ("(", ")") if token == "[" else (token, _CLOSES[token])
            return f"{opens}{self.sequence(_CLOSES[token])}{closes}"
        if kind == "command":
            index = f"[{self._group('[')}]" if token == r"\sqrt" and self.tokens[self.place] == "[" else ""
            return token + index + "".join(f"{{{self._group('{')}}}" for _ in range(_ARGUMENTS[token]))
        if token == "^":
            return f"^{{{self._group('{')}}}"
        if kind == "letter":
            return self._letter(token)
        return f"{token} " if token[0] == "\\" else token

    def _group(self, opens: str) -> str:
        if self._next() != opens:
            raise Unreadable("an argument is missing")
        return self.sequence(_CLOSES[opens])

    def _letter(self, letter: str) -> str:
        following = self.tokens[self.place]
        if letter == "i":
            return "{I}"  # "I^2" would be read as I
        if letter == "d" and not self.integrates and (following.isalpha() or following[:1] == "\\"):
            return "{d}"
        name = letter.removeprefix("\\")
        return rf"\mathsf{{{name.lower()}}}" if name[0].isupper() else f"{letter} "


def _kind(token: str) -> str:
    if token[0].isdigit() or (token[0] == "." and len(token) > 1):
        return "number"
    if token in _CLOSES:
        return "group"
    if token in _ARGUMENTS:
        return "command"
    if token in _FUNCTIONS:
        return "function"
    if token in _OPERATORS or token.startswith((r"\begin", r"\end")):
        return "operator"
    if token[0] in "^_":
        return "script"
    if token in ("!", r"\rfloor", r"\rceil"):
        return "postfix"
    if re.fullmatch(r"[A-Za-z]|\\[A-Za-z]+", token):
        return "letter"
    if token[0] == "\\" and token.endswith("}"):
        return "value"
    raise Unreadable(f"{token!r} is no part of an expression")


def _exact(decimal: str) -> str:
    whole, point, places = decimal.partition(".")
    return rf"\frac{{{int(whole + places)}}}{{{10 ** len(places)}}}" if point else whole
