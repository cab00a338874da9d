import json
import time
from decimal import Decimal

import pytest

from kvpolicy.lmeval_tasks.livecodebench.compare import allowed_error, same_output, same_value

ERROR = Decimal("1e-6")

SAME = {
    "equal": ("1 2\n3", "1 2\n3"),
    "space around": ("\n 1 2 \n 3\n\n", "1 2\n3"),
    "space between": ("1   2", "1 2"),
    "Windows lines": ("1\r\n2\r\n", "1\n2"),
    "leading zero": ("007", "7"),
    "plus": ("+7", "7"),
    "integer as a decimal": ("7.00", "7"),
    "exponent": ("1e3", "1000"),
    "decimal": ("0.50", "0.5"),
    "long integers": ("1" + "0" * 5000, "1" + "0" * 5000),
    "words": ("Yes No", "Yes No"),
    "both empty": ("\n", ""),
}
DIFFERENT = {
    "number": ("1", "2"),
    "order": ("1 2", "2 1"),
    "a line more": ("1\n2", "1"),
    "a line less": ("", "1"),
    "a token more": ("1 2", "1"),
    "an empty line between": ("1\n\n2", "1\n2"),
    "case": ("yes", "Yes"),
    "near integers": ("50000000000000000", "50000000000000001"),
    "word for number": ("one", "1"),
    "underscores": ("1_0", "10"),
    "not a number": ("nan", "1"),
    "infinite": ("inf", "1"),
    "signalling": ("sNaN", "1"),
    "without an allowed error": ("0.3333333", "0.333333333333333"),
}
BETWEEN = {
    "digits missing": ("0.3333333", "0.333333333333333", True),
    "digits more": ("0.33333333333333331", "0.333333333333333", True),
    "at the bound": ("0.500001", "0.5", True),
    "beyond the bound": ("0.5000011", "0.5", False),
    "relative": ("1000000.9", "1000000.5", True),
    "beyond the relative bound": ("1000002.5", "1000000.5", False),
    "near one": ("0.99999999", "1.0", True),
    "a count": ("1000000001", "1000000000", False),
    "in a line of words": ("Case 1: 0.3333333", "Case 1: 0.333333333", True),
    "too large for decimals": ("1e999999999", "0.5", False),
    "both large": ("1e999999", "1.0e999999", True),
    "negative": ("-0.5", "0.5", False),
    "no number": ("nan", "0.5", False),
}
VALUES = {
    "integers": ([1, 2], [1, 2], True),
    "another": ([1, 3], [1, 2], False),
    "shorter": ([1], [1, 2], False),
    "longer": ([1, 2], [1], False),
    "nested": ([[1], []], [[1], []], True),
    "a list for a number": ([1], 1, False),
    "text": ("a b", "a b", True),
    "text with space": ("a b ", "a b", False),
    "text for a number": ("1", 1, False),
    "truth": (True, True, True),
    "falsehood": (False, True, False),
    "none": (None, 0, False),
    "float for integer": (2.0, 2, True),
    "integer for float": (2, 2.0, True),
    "near": (1.166666, 1.16667, True),
    "not near": (1.1667, 1.16667, False),
    "near an integer": (2.0000001, 2, False),
    "dictionary": ({"a": [1.0]}, {"a": [1]}, True),
    "other keys": ({"a": 1}, {"b": 1}, False),
    "huge for float": (10**400, 0.5, False),
    "infinite": (float("inf"), 0.5, False),
    "not a number": (float("nan"), 0.5, False),
}


@pytest.mark.parametrize(("given", "expected"), SAME.values(), ids=SAME)
def test_same_output(given: str, expected: str) -> None:
    assert same_output(given, expected)


@pytest.mark.parametrize(("given", "expected"), DIFFERENT.values(), ids=DIFFERENT)
def test_different_output(given: str, expected: str) -> None:
    assert not same_output(given, expected)


@pytest.mark.parametrize(("given", "expected", "same"), BETWEEN.values(), ids=BETWEEN)
def test_output_with_an_allowed_error(given: str, expected: str, same: bool) -> None:
    assert same_output(given, expected, ERROR) is same


@pytest.mark.parametrize(("given", "expected", "same"), VALUES.values(), ids=VALUES)
def test_values(given: object, expected: object, same: bool) -> None:
    assert same_value(json.dumps(given), json.dumps(expected), Decimal("1e-5")) is same


@pytest.mark.parametrize("given", ["", "{", "[1] [2]", "[" * 100_000, "1" * 10_000, "None", "[1,]", "1e" + "9" * 30])
def test_what_is_no_json_equals_nothing(given: str) -> None:
    assert not same_value(given, "[1]")


def test_without_an_allowed_error_floats_are_compared_by_all_digits() -> None:
    assert same_value("0.1", "0.10")
    assert not same_value("0.30000000000000004", "0.3")


@pytest.mark.parametrize(
    ("problem", "error"),
    [
        ("correct if the absolute or relative error from the true value does not exceed 10^{-8}.", "1e-8"),
        ("Answers within 10^-5 of the actual answer will be accepted.", "1e-5"),
        ("an error of at most 10^{ -9 } is fine", "1e-9"),
        ("with a relative error within 10^{\N{MINUS SIGN}6}", "1e-6"),
        ("Print the sum. -10^5 <= a <= 10^9", None),
        ("the error is large. It is 10^-5", None),
        ("10^{-5} <= x", None),
    ],
)
def test_allowed_error(problem: str, error: str | None) -> None:
    assert allowed_error(problem) == (None if error is None else Decimal(error))


def test_a_long_output_takes_no_time() -> None:
    start = time.process_time()
    assert not same_output("9" * 5_000_000, "8" * 5_000_000, ERROR)
    assert not same_output("1e" + "9" * 1_000_000, "1.0", ERROR)
    assert same_output("0.5 " * 200_000, "0.50 " * 200_000, ERROR)
    assert time.process_time() - start < 10
