from __future__ import annotations

import pytest

from kvpolicy.lmeval_tasks.grading.bounds import Unreadable
from kvpolicy.lmeval_tasks.grading.expression import spelled
from kvpolicy.lmeval_tasks.grading.latex import canonical

SPELLED = {
    "2(3)": r"2\cdot (3)",
    "(2)(3)": r"(2)\cdot (3)",
    "(2)3": r"(2)\cdot 3",
    r"2\frac{3}{2}": r"2\cdot \frac{3}{2}",
    r"2\frac{1}{2}": r"\frac{5}{2}",
    "2 1/2": r"\frac{5}{2}",
    r"x^2\frac{1}{2}": r"x ^{2}\cdot \frac{1}{2}",
    r"\frac{4}{2}3": r"\frac{4}{2}\cdot 3",
    r"3\sqrt{2}": r"3\cdot \sqrt{2}",
    "x(x+1)": r"x \cdot (x +1)",
    "2x": "2x ",
    r"\pi(3)": r"\pi \cdot (3)",
    r"\sin(x)": r"\sin (x )",
    r"\sin^2(x)": r"\sin ^{2}(x )",
    r"\log_2 8": r"\log _{2}8",
    r"\log_{2}(8)": r"\log _{2}(8)",
    "n!(n)": r"n !\cdot (n )",
    "da": "{d}a ",
    r"d\pi": r"{d}\pi ",
    "ad": "a d ",
    r"\int x dx": r"\int x d x ",
    "R": r"\mathsf{r}",
    r"\Delta": r"\mathsf{delta}",
    "I": r"\mathsf{i}",
    "2i": "2{I}",
    "i^2": "{I}^{2}",
    "x_i": "x _{i}",
    "x_1^2": "x _{1}^{2}",
    "0.5": r"\frac{5}{10}",
    ".05": r"\frac{5}{100}",
    "2.50x": r"\frac{250}{100}x ",
    r"0.\overline{3}": r"\frac{3}{9}",
    r"1.2\overline{34}": r"\frac{1222}{990}",
    "x^0.5": r"x ^{\frac{5}{10}}",
    r"\sin 30^\circ": r"\sin (30\cdot \frac{\pi }{180})",
    "[x]": "(x )",
    r"\sqrt[3]{x}": r"\sqrt[3]{x }",
    r"\overline{AB}": r"\overline{AB} ",
    r"\frac{1}{2}\begin{bmatrix} 1 \\ 2 \end{bmatrix}": r"\frac{1}{2}\begin{pmatrix} 1\\ 2\end{pmatrix} ",
}
UNREADABLE = ["2 3", "x'", "x_2 = 3 ?", "@", "(1", r"\{1\}", '"cm"', "x#y", "&lt;", "\u0430"]


@pytest.mark.parametrize(("text", "latex"), SPELLED.items(), ids=SPELLED)
def test_no_expression_can_be_taken_for_another(text: str, latex: str) -> None:
    assert spelled(canonical(text)) == latex


@pytest.mark.parametrize("text", UNREADABLE)
def test_what_is_no_expression(text: str) -> None:
    with pytest.raises(Unreadable):
        spelled(text)
