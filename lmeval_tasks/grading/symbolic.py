"""Compare expressions with math-verify. Only the worker process imports this: it loads sympy.

math-verify alone takes 2⁻⁶⁰ for 2⁻⁶¹ and x² + 1 = 0 for y² + 4 = 0. So values decide where there are any: two
expressions are equal if they are to 30 digits, wherever they are evaluated. What has no value is left to math-verify.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy.polys.polyerrors import BasePolynomialError

from kvpolicy.lmeval_tasks.grading.bounds import Unreadable
from kvpolicy.lmeval_tasks.grading.expression import spelled

# The spelling is ours; math-verify's own drops an "s" or "m" at the end as a unit.
_AS_IT_IS = NormalizationConfig(basic_latex=False, units=False, malformed_operators=False, nits=False, boxed="none")
_LATEX = LatexExtractionConfig(boxed_match_priority=-1, normalization_config=_AS_IT_IS)

_DIGITS, _TOLERANCE = 40, sympy.Rational(1, 10**30)
# What sympy raises at expressions that it can do nothing with.
_NO_VALUE = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, RecursionError),
    *(TypeError, ValueError, BasePolynomialError),
)
# Below this many bits a number is what is left of an exact zero.
_SIGNIFICANT_BITS = 16
_MOST_DIGITS, _MOST_NEGATIVE = 20_000, 6
_TO_EVALUATE = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.UnevaluatedExpr)


class MathVerify:
    """A :class:`~kvpolicy.lmeval_tasks.grading.compare.Judge`."""

    def expressions(self, gold: str, answer: str) -> bool:
        """Whether two expressions are equal.

        Roots and logarithms are real at positive values of the variables alone. So these must agree; where both are
        real at a negative value too, and differ, as x and |x| do, math-verify decides.
        """
        left, right = _parsed(gold), _parsed(answer)
        if not isinstance(left, sympy.Expr) or not isinstance(right, sympy.Expr):
            return bool(verify(left, right, timeout_seconds=None))
        positive, negative = _points(left, right)
        agree = [_same_value(left, right, point) for point in positive]
        if False in agree:
            return False
        agree += [_same_value(left, right, point, real=True) is not False for point in negative]
        return all(agree) or bool(verify(left, right, timeout_seconds=None))

    def relations(self, gold: tuple[str, str], answer: tuple[str, str], *, inequality: bool) -> bool:
        """Whether left minus right of the two is the same up to a factor, which for inequalities is positive."""
        pairs = [(_parsed(left), _parsed(right)) for left, right in (gold, answer)]
        try:
            first, second = (left - right for left, right in pairs)
            if not inequality:
                first, second = (sympy.fraction(sympy.together(difference))[0] for difference in (first, second))
            variables = first.free_symbols, second.free_symbols
        except _NO_VALUE:
            raise Unreadable("a relation between things that are no expressions") from None
        if not all(variables):
            return False
        points = itertools.chain(*_points(first, second))
        values = [(_value(first, point), _value(second, point)) for point in points]
        if not all(all(pair) for pair in values):  # zero, or no value
            return False
        ratios = [above / below for above, below in values]
        return all(_near(ratio, ratios[0]) for ratio in ratios) and not (inequality and not ratios[0].is_positive)


@lru_cache(maxsize=1024)
def _parsed(text: str) -> Any:
    found = parse(
        f"${spelled(text)}$",
        [_LATEX],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    if not found:
        raise Unreadable(text)
    expression = found[0]
    if not isinstance(expression, sympy.Expr) or not expression.has(*_TO_EVALUATE):
        return expression
    try:
        return expression.doit()
    except _NO_VALUE:
        raise Unreadable(text) from None


def _points(*expressions: Any) -> tuple[list[Any], list[Any]]:
    """Two points where all variables are positive, and for each of the first few one where it alone is negative.

    Without variables there is one point in all.
    """
    symbols = sorted(set().union(*(expression.free_symbols for expression in expressions)), key=str)
    if not symbols:
        return [{}], []
    positive = [
        {symbol: sympy.Rational(start + 611 * place, 997) for place, symbol in enumerate(symbols)}
        for start in (1372, 2311)
    ]
    return positive, [positive[0] | {symbol: -positive[1][symbol]} for symbol in symbols[:_MOST_NEGATIVE]]


def _value(expression: Any, point: dict[Any, Any], digits: int = _DIGITS) -> Any:
    """A complex number to so many digits, 0 for what vanishes in them, None if there is no finite value."""
    try:
        at_point = expression.subs(point) if point else expression
        parts = sympy.N(at_point, _DIGITS, maxn=digits).as_real_imag()
    except _NO_VALUE:
        return None
    if not all(part.is_Float or part.is_Rational for part in parts):
        return None
    real, imaginary = (sympy.S.Zero if part.is_Float and part._prec < _SIGNIFICANT_BITS else part for part in parts)
    return real + sympy.I * imaginary


def _same_value(left: Any, right: Any, point: dict[Any, Any], *, real: bool = False) -> bool | None:
    """Whether two expressions are equal at a point; None if neither has a value there, or, with `real`, no real one.

    Large numbers that agree in their first digits may still differ in the last: 2¹⁰⁰ and 2¹⁰⁰ + 1.
    """
    values = _value(left, point), _value(right, point)
    if None in values:
        return None if values == (None, None) else False
    if real and not all(value.is_real for value in values):
        return None
    if not _near(*values):
        return False
    size = max(map(abs, values))
    if size < 1:
        return True
    digits = int(sympy.log(size, 10)) + _DIGITS
    return bool(left == right) if digits > _MOST_DIGITS else _value(left - right, point, digits) == 0


def _near(left: Any, right: Any) -> bool:
    return bool(abs(left - right) <= _TOLERANCE * max(abs(left), abs(right)))
