from __future__ import annotations

import contextlib
import time

import pytest

from kvpolicy.lmeval_tasks.grading.bounds import Unreadable
from kvpolicy.lmeval_tasks.grading.latex import canonical

SPELLED = {
    r"\dfrac12": r"\frac{1}{2}",
    r"\frac 34": r"\frac{3}{4}",
    r"\frac9{19}": r"\frac{9}{19}",
    r"\frac{270}7": r"\frac{270}{7}",
    r"\frac\pi2": r"\frac{\pi}{2}",
    r"\frac\sqrt2 3": r"\frac{\sqrt{2}}{3}",
    r"\sqrt13": r"\sqrt{13}",
    r"\sqrt[3]2": r"\sqrt[3]{2}",
    r"\sqrt(x+1)": r"\sqrt{x+1}",
    "2*sqrt(5)": r"2*\sqrt{5}",
    "x^10": "x^{10}",
    "x^-1": "x^{-1}",
    "x^(1/2)": "x^{1/2}",
    "x**2": "x^{2}",
    "x²": "x^{2}",
    "x⁻¹": "x^{-1}",
    "a₁": "a_{1}",
    "2√5": r"2\sqrt{5}",
    "½": r"\frac{1}{2}",
    "1½": r"1\frac{1}{2}",
    "2π": r"2\pi",
    "90°": r"90^\circ",
    r"90^{\circ}": r"90^\circ",
    r"90\degree": r"90^\circ",
    "\N{MINUS SIGN}5": "-5",
    "\N{FULLWIDTH DIGIT FIVE}": "5",
    "\u200b5\u2060": "5",
    "a≤b": r"a\le b",
    "a <= b": r"a \le b",
    r"a \leq b": r"a \le b",
    r"a \leqslant b": r"a \le b",
    "x != 3": r"x \ne 3",
    r"\left( 3, 4 \right]": "( 3, 4 ]",
    r"\left. x \right|": "x |",
    r"\langle 1, 2 \rangle": "(1, 2 )",
    r"10,\!080": "10080",
    r"11,\! 111,\! 111,\! 100": "11111111100",
    r"1\,234": "1234",
    "1{,}234{,}567": "1234567",
    "3{,}5": "3.5",
    "1,234": "1,234",
    r"5\,x": "5 x",
    r"\$36": '"dollars" 36',
    "$36$": "36",
    r"\(36\)": "36",
    r"\[36\]": "36",
    "**36**": "36",
    r"15\mbox{ cm}^2": '15 "cm"^{2}',
    r"5\,\mathrm{m}": '5 "m"',
    r"\text{m}": "m",
    "18cm": '18 "cm"',
    "km": "km",
    r"\text{18 dollars}": '18 "dollars"',
    r"\textbf{(B)}": "(B)",
    r"3 \text{ and } 4": "3 , 4",
    r"19, 46, \text{and } 82": "19, 46, , 82",
    r"\operatorname{lcm}(4,6)": r"\lcm(4,6)",
    r"\\frac{1}{2}": r"\frac{1}{2}",
    r"\begin{pmatrix}1\\[2pt]2\end{pmatrix}": r"\begin{pmatrix}1\\ 2\end{pmatrix}",
    "10 percent": "10 %",
    r"5\%": "5%",
    "5.": "5",
    "infinity": r"\infty",
    ".5": ".5",
}
DEEP = [part * 60 + "5" for part in (r"\frac", r"\sqrt", "^", "^{", "_", r"\sqrt[")]
UNREADABLE = [*DEEP, "{5", "5}", r"\frac{1}", r"\frac", "x^", r"\sqrt[3", r"\sqrt(2"]


@pytest.mark.parametrize(("text", "spelled"), SPELLED.items(), ids=SPELLED)
def test_one_spelling(text: str, spelled: str) -> None:
    assert canonical(text) == spelled


@pytest.mark.parametrize("text", UNREADABLE)
def test_braces_that_do_not_match_are_unreadable(text: str) -> None:
    with pytest.raises(Unreadable):
        canonical(text)


@pytest.mark.parametrize(
    "part", ["{", "}", "\\", "\\text{", "$", '"', "1,", "1\\,", "\\frac", "\\sqrt", "^", "_", "a ", "\\\\["]
)
def test_a_hostile_text_within_the_bounds_takes_no_time(part: str) -> None:
    start = time.process_time()
    with contextlib.suppress(Unreadable):
        canonical((part * 1000)[:1000])
    assert time.process_time() - start < 0.5
