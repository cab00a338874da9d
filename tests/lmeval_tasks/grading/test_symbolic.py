from __future__ import annotations

from typing import Any

import pytest

from kvpolicy.lmeval_tasks.grading.bounds import Unreadable
from kvpolicy.lmeval_tasks.grading.latex import canonical

EQUAL = [
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"\sqrt{3+2\sqrt{2}}", r"1+\sqrt{2}"),
    (r"\cos 20^\circ \cos 40^\circ \cos 80^\circ", r"\frac{1}{8}"),
    (r"\frac{1}{2004!}", r"\frac{2005}{2005!}"),
    ("2^{2024}-1", r"2\cdot 2^{2023}-1"),
    ("x^{2024}-1", "(x^{1012}-1)(x^{1012}+1)"),
    ("(x+y)^2", "x^2+2xy+y^2"),
    (r"\sqrt{xy}", r"\sqrt{x}\sqrt{y}"),
    (r"\ln(xy)", r"\ln x+\ln y"),
    (r"|x|", r"\sqrt{x^2}"),
    (r"\sqrt[3]{x^2}", "x^{2/3}"),
    ("(-8)^{1/3}", r"1+i\sqrt{3}"),
    (r"\frac{x^2-1}{x-1}", "x+1"),
    (r"\sum_{k=1}^{n} k^2", "n(n+1)(2n+1)/6"),
    (r"\infty", r"\infty"),
    (r"2\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 2 \\ 4 \end{pmatrix}"),
]
DIFFERENT = [
    (r"e^{\pi\sqrt{163}}", "262537412640768744"),
    ("2^{-60}", "2^{-61}"),
    (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
    ("10^{-20}", "0"),
    ("2^{100}", "2^{100}+1"),
    ("2^{2024}-1", "2^{2024}+1"),
    ("10^{10^{10}}", "10^{10^{10}}+1"),
    ("x^{2024}-1", "x^{2024}+1"),
    ("x", "|x|"),
    ("x", "y"),
    ("R", "r"),
    ("x", "1.000001x"),
    (r"\sqrt{2}", "1.41421356237309504880"),
    ("1", r"\frac{1}{0}"),
    (r"\infty", r"-\infty"),
    (r"2\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 2 \\ 5 \end{pmatrix}"),
]
SAME_EQUATION = [
    (("x", "5"), ("5", "x")),
    (("2x+4y-3", "0"), ("y", r"-\frac{1}{2}x+\frac{3}{4}")),
    (("y", r"\frac{1}{x}"), ("xy", "1")),
    (("x^2+y^2", "25"), ("25-y^2", "x^2")),
]
OTHER_EQUATION = [
    (("x", "5"), ("y", "5")),
    (("x^2+1", "0"), ("x^2+4", "0")),
    (("x", "x+1"), ("y", "y+1")),
    (("2x+4y-3", "0"), ("2x+4y+3", "0")),
    (("x+y", "0"), ("x-y", "0")),
    (("1", "1"), ("2", "2")),
]


@pytest.fixture(scope="module")
def judge() -> Any:
    pytest.importorskip("math_verify")
    from kvpolicy.lmeval_tasks.grading.symbolic import MathVerify

    return MathVerify()


@pytest.mark.parametrize(("left", "right"), EQUAL)
def test_equal_expressions(judge: Any, left: str, right: str) -> None:
    assert judge.expressions(canonical(left), canonical(right)) is True
    assert judge.expressions(canonical(right), canonical(left)) is True


@pytest.mark.parametrize(("left", "right"), DIFFERENT)
def test_different_expressions(judge: Any, left: str, right: str) -> None:
    assert judge.expressions(canonical(left), canonical(right)) is False
    assert judge.expressions(canonical(right), canonical(left)) is False


@pytest.mark.parametrize(("left", "right"), SAME_EQUATION)
def test_equations_that_say_the_same(judge: Any, left: tuple[str, str], right: tuple[str, str]) -> None:
    sides = [tuple(map(canonical, side)) for side in (left, right)]
    assert judge.relations(*sides, inequality=False) is True
    assert judge.relations(*reversed(sides), inequality=False) is True


@pytest.mark.parametrize(("left", "right"), OTHER_EQUATION)
def test_equations_that_do_not(judge: Any, left: tuple[str, str], right: tuple[str, str]) -> None:
    sides = [tuple(map(canonical, side)) for side in (left, right)]
    assert judge.relations(*sides, inequality=False) is False


def test_the_sign_of_the_factor_counts_for_inequalities(judge: Any) -> None:
    assert judge.relations(("y", "x+1"), ("2y", "2x+2"), inequality=True) is True
    assert judge.relations(("y", "x+1"), ("x+1", "y"), inequality=True) is False
    assert judge.relations(("y", "x+1"), ("x+1", "y"), inequality=False) is True


@pytest.mark.parametrize("text", [r"\foo", "2 3", "x+", "", r"\frac{1}{2"])
def test_what_math_verify_cannot_read(judge: Any, text: str) -> None:
    for pair in ((text, "x"), ("x", text)):
        with pytest.raises(Unreadable):
            judge.expressions(*pair)
