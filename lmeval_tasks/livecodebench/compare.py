"""Whether what a program gave is what was expected.

As LiveCodeBench compares: surrounding white space does not count, and numbers are equal by value, as decimals. One
difference: where the problem itself allows an error, so does this; LiveCodeBench compares all digits there too.
"""

from __future__ import annotations

import json
import re
from decimal import Context, Decimal
from typing import Any

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,9})?")
_ALLOWED_ERROR = re.compile(r"(?:\berror\b|\bwithin\b)[^.]{0,80}?10\s*\^\s*\{?\s*[-\u2212]\s*(?P<digits>[0-9]{1,2})")
_INTEGER = re.compile(r"[+-]?[0-9]+")
# Beyond its range numbers become infinite instead of an exception.
_DECIMALS = Context(prec=40, traps=[])


def allowed_error(problem: str) -> Decimal | None:
    """The error that a problem's text allows, absolute and, for numbers beyond 1, relative; None if it allows none."""
    found = _ALLOWED_ERROR.search(problem)
    return None if found is None else Decimal(f"1e-{found['digits']}")


def same_output(given: str, expected: str, error: Decimal | None = None) -> bool:
    """Whether two texts agree line by line, and in each line token by token."""
    given_lines, expected_lines = given.strip().split("\n"), expected.strip().split("\n")
    return len(given_lines) == len(expected_lines) and all(
        _same_line(line, right, error) for line, right in zip(given_lines, expected_lines, strict=True)
    )


def same_value(given: str, expected: str, error: Decimal | None = None) -> bool:
    """Whether two JSON texts mean equal values. A text that is no JSON equals nothing."""
    try:
        value = json.loads(given, parse_float=Decimal)
    except (ValueError, ArithmeticError, RecursionError):  # the second for an exponent beyond all bounds
        return False
    return _same(value, json.loads(expected, parse_float=Decimal), error)


def _same_line(given: str, expected: str, error: Decimal | None) -> bool:
    given_tokens, expected_tokens = given.split(), expected.split()
    return len(given_tokens) == len(expected_tokens) and all(
        _same_token(token, right, error) for token, right in zip(given_tokens, expected_tokens, strict=True)
    )


def _same_token(given: str, expected: str, error: Decimal | None) -> bool:
    if given == expected:
        return True
    if not (_NUMBER.fullmatch(given) and _NUMBER.fullmatch(expected)):
        return False
    # A count is exact, whatever error the problem allows in its other numbers.
    return _close(Decimal(given), Decimal(expected), None if _INTEGER.fullmatch(expected) else error)


def _same(given: Any, expected: Any, error: Decimal | None) -> bool:
    if isinstance(given, list) and isinstance(expected, list):
        return len(given) == len(expected) and all(
            _same(value, right, error) for value, right in zip(given, expected, strict=True)
        )
    if isinstance(given, dict) and isinstance(expected, dict):
        return given.keys() == expected.keys() and all(_same(given[key], expected[key], error) for key in expected)
    if isinstance(expected, Decimal) and isinstance(given, Decimal | int):
        return _close(Decimal(given), expected, error)
    return bool(given == expected)


def _close(number: Decimal, right: Decimal, error: Decimal | None) -> bool:
    if error is None:
        return number == right
    return _DECIMALS.abs(_DECIMALS.subtract(number, right)) <= _DECIMALS.multiply(
        error, _DECIMALS.max(Decimal(1), _DECIMALS.abs(right))
    )
