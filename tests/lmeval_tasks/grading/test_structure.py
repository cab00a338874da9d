from __future__ import annotations

import pytest

from kvpolicy.lmeval_tasks.grading.bounds import Unreadable
from kvpolicy.lmeval_tasks.grading.latex import canonical
from kvpolicy.lmeval_tasks.grading.nodes import (
    EMPTY_SET,
    INFINITY,
    MINUS_INFINITY,
    REALS,
    UNION,
    Equation,
    Inequality,
    Items,
    Leaf,
    Matrix,
    Node,
    Words,
)
from kvpolicy.lmeval_tasks.grading.structure import read


def leaf(text: str, *words: str) -> Leaf:
    return Leaf(text, frozenset(words))


def items(brackets: str, *nodes: Node | str) -> Items:
    return Items(brackets[0], brackets[1], tuple(leaf(node) if isinstance(node, str) else node for node in nodes))


STRUCTURES: dict[str, Node] = {
    "5": leaf("5"),
    "+5": leaf("5"),
    "(5)": leaf("5"),
    "{5}": leaf("5"),
    "(a+5)(b+2)": leaf("(a+5)(b+2)"),
    r"5\text{ cm}": leaf("5", "cm"),
    r"15\text{ square cm}^2": leaf("15", "square", "cm"),
    r"\$5": leaf("5", "dollars"),
    r"60\text{ km}/\text{h}": leaf("60", "km", "h"),
    r"5\%": Leaf("5", percent=True),
    r"30^\circ": leaf("30", "degrees"),
    r"\sin 30^\circ": leaf(r"\sin30^\circ"),
    "52_8": Leaf("52", base="8"),
    r"(52)_{\text{eight}}": Leaf("52", base="8"),
    "x_8": leaf("x_{8}"),
    "58 500": leaf("58500"),
    "58,500": Leaf("58500", listed=items("{}", "58", "500")),
    "58, 500": items("{}", "58", "500"),
    "1,2": items("{}", "1", "2"),
    "1, 2, and 3": items("{}", "1", "2", "3"),
    r"1 \text{ or } 2": items("{}", "1", "2"),
    "1; 2": items("{}", "1", "2"),
    r"\{1,2\}": items("{}", "1", "2"),
    r"\{1\}": items("{}", "1"),
    r"\{\}": EMPTY_SET,
    r"\emptyset": EMPTY_SET,
    r"\text{no real solutions}": EMPTY_SET,
    r"\text{all real numbers}": REALS,
    r"\mathbb{R}": REALS,
    "(1,2)": items("()", "1", "2"),
    "(1,2]": items("(]", "1", "2"),
    "]1,2[": items("()", "1", "2"),
    "[1,2[": items("[)", "1", "2"),
    "(1,2),(3,4)": items("{}", items("()", "1", "2"), items("()", "3", "4")),
    r"(1,2) \cup [3,\infty)": items(UNION * 2, items("()", "1", "2"), Items("[", ")", (leaf("3"), INFINITY))),
    r"1 \pm \sqrt{2}": items("{}", r"1 +\sqrt{2}", r"1 -\sqrt{2}"),
    r"\pm 1, 3": items("{}", "1", "-1", "3"),
    "1:2": items("::", "1", "2"),
    "3:30 PM": Items(":", ":", (leaf("3"), leaf("30", "pm"))),
    r"\text{Area}: 5": leaf("5"),
    r"\text{Evelyn}": Words("evelyn"),
    r"\text{an ellipse}": Words("ellipse"),
    "x = 5": Equation(leaf("x"), leaf("5")),
    "5 = x": Equation(leaf("x"), leaf("5")),
    "x = 3 + 2 = 5": Equation(leaf("x"), leaf("5")),
    r"x = \frac13 \approx 0.33": Equation(leaf("x"), leaf(r"\frac{1}{3}")),
    r"x \approx 0.33": Equation(leaf("x"), leaf("0.33")),
    r"\approx 0.33": leaf("0.33"),
    r"\text{Area} = 5": leaf("5"),
    "= 5": leaf("5"),
    r"x \in [1,2]": items("[]", "1", "2"),
    r"1 < x \le 2": items("(]", "1", "2"),
    r"2 \ge x > 1": items("(]", "1", "2"),
    "x > 5": Items("(", ")", (leaf("5"), INFINITY)),
    r"5 \ge x": Items("(", "]", (MINUS_INFINITY, leaf("5"))),
    r"\{x \mid x > 5\}": Items("(", ")", (leaf("5"), INFINITY)),
    r"x \ne 3": Items(
        UNION, UNION, (Items("(", ")", (MINUS_INFINITY, leaf("3"))), Items("(", ")", (leaf("3"), INFINITY)))
    ),
    "y > x + 1": Inequality(("<",), (leaf("x + 1"), leaf("y"))),
    r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}": Matrix(
        ((leaf("1"), leaf("2")), (leaf("3"), leaf("4"))), r"\begin{pmatrix}1 & 2 \\ 3 & 4\end{pmatrix}"
    ),
    r"\left[\begin{array}{c|c} 1 & 2 \\ \hline \end{array}\right]": Matrix(
        ((leaf("1"), leaf("2")),), r"\begin{pmatrix}1 & 2\end{pmatrix}"
    ),
}


@pytest.mark.parametrize(("text", "node"), STRUCTURES.items(), ids=STRUCTURES)
def test_what_an_answer_is(text: str, node: Node) -> None:
    assert read(canonical(text)) == node


@pytest.mark.parametrize(
    "text",
    ["", " ", "(1,2", "1,2)", "x <", "= ", "x < 5 > y", "x = 5 < 6", "5 \\text{ of } 6", r"\pm\pm\pm\pm 1"],
)
def test_what_cannot_be_read(text: str) -> None:
    with pytest.raises(Unreadable):
        read(canonical(text))
