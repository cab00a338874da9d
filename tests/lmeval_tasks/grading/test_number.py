from __future__ import annotations

from fractions import Fraction

import pytest

from kvpolicy.lmeval_tasks.grading.number import number, repeating

NUMBERS = {
    "5": Fraction(5),
    "-5": Fraction(-5),
    "- 5": Fraction(-5),
    "+5": Fraction(5),
    "007": Fraction(7),
    "0.50": Fraction(1, 2),
    ".5": Fraction(1, 2),
    "5.": Fraction(5),
    "-.0000672": Fraction(-672, 10**7),
    r"\frac{3}{4}": Fraction(3, 4),
    r"-\frac{3}{4}": Fraction(-3, 4),
    r"\frac{-3}{4}": Fraction(-3, 4),
    r"-\frac{-3}{4}": Fraction(3, 4),
    "3/4": Fraction(3, 4),
    "- 6 / 8": Fraction(-3, 4),
    r"1\frac{4}{5}": Fraction(9, 5),
    r"-1 \frac{4}{5}": Fraction(-9, 5),
    "1 4/5": Fraction(9, 5),
    "9" * 200: Fraction(10**200 - 1),
}
NO_NUMBERS = [
    "",
    "-",
    ".",
    "x",
    "5x",
    r"\frac{1}{0}",
    "1/0",
    r"2\frac{3}{2}",
    r"2\frac{-1}{2}",
    "1,000",
    "1e5",
    "\u0665",
    "5!",
]


@pytest.mark.parametrize(("text", "value"), NUMBERS.items(), ids=NUMBERS)
def test_value(text: str, value: Fraction) -> None:
    assert number(text) == value


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_no_number(text: str) -> None:
    assert number(text) is None


@pytest.mark.parametrize(("text", "value"), [("0.(3)", None), (r"0.\overline{3}", Fraction(1, 3))])
def test_repeating_decimal(text: str, value: Fraction | None) -> None:
    assert number(repeating(text)) == value


@pytest.mark.parametrize("period", ["3", "6", "09", "142857", "0"])
@pytest.mark.parametrize("fixed", ["", "1", "07"])
@pytest.mark.parametrize("whole", ["", "0", "12"])
def test_repeating_decimal_is_the_limit_of_its_digits(whole: str, fixed: str, period: str) -> None:
    value = number(repeating(rf"{whole}.{fixed}\overline{{{period}}}"))
    digits = Fraction(f"{whole or 0}.{fixed}{period * 40}")
    assert value is not None
    assert 0 <= value - digits < Fraction(1, 10 ** (40 * len(period) + len(fixed) - 1))
