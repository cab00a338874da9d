"""What is compared with what; expressions go to a judge that knows a few."""

from __future__ import annotations

import pytest

from kvpolicy.lmeval_tasks.grading.bounds import MAX_CHARACTERS, MAX_DIGITS, MAX_NESTING, Unreadable
from kvpolicy.lmeval_tasks.grading.compare import compare
from kvpolicy.lmeval_tasks.grading.verdict import Verdict

CORRECT, WRONG, UNPARSEABLE = Verdict.CORRECT, Verdict.WRONG, Verdict.UNPARSEABLE


class Judge:
    """Takes letters for equal that differ in case alone, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def expressions(self, gold: str, answer: str) -> bool:
        self.asked.append((gold, answer))
        if "?" in answer:
            raise Unreadable(answer)
        return gold.lower() == answer.lower()

    def relations(self, gold: tuple[str, str], answer: tuple[str, str], *, inequality: bool) -> bool:
        self.asked.append(
            (" < ".join(gold), " < ".join(answer)) if inequality else (" = ".join(gold), " = ".join(answer))
        )
        return {*gold} == {*answer} and not inequality


CASES = [
    ("xy", "XY", CORRECT, [("xy", "XY")]),
    ("xy", "x?", UNPARSEABLE, [("xy", "x?")]),
    ("1/2", "0.5", CORRECT, []),
    ("(xy,1)", "(XY,1)", CORRECT, [("xy", "XY")]),
    ("(1,xy)", "(2,XY)", WRONG, []),
    ("(xy,1)", "(1,XY)", WRONG, [("xy", "1")]),
    ("xy,1", "1,XY", CORRECT, [("xy", "1"), ("xy", "XY")]),
    ("1,1,2", "1,2,2", WRONG, []),
    ("1,2", "1,2,3", WRONG, []),
    ("(1,2]", "(1,2)", WRONG, []),
    ("a=xy", "XY", CORRECT, [("xy", "XY")]),
    ("xy", "a=XY", CORRECT, [("xy", "XY")]),
    ("a=xy", "a=XY", CORRECT, [("xy", "XY")]),
    ("a=xy", "b=xy", WRONG, [("a = xy", "b = xy")]),
    ("2a=xy", "xy=2a", CORRECT, [("2a = xy", "xy = 2a")]),
    ("2a=xy", "xy", WRONG, []),
    ("0", "3a-2=0", WRONG, []),
    ("a<b", "b>a", CORRECT, []),
    ("a<b", "a>b", WRONG, [("a < b", "b < a")]),
    ("a<b", r"a \le b", WRONG, []),
    ("(1,2)", "a=1,b=2", CORRECT, []),
    ("(1,2)", "a=1,a=2", WRONG, []),
    ("(1,2)", "a>1,a<2", CORRECT, []),
    ("[1,2]", "a>1,a<2", WRONG, []),
    (r"(1,2) \cup (3,4)", "(3,4),(1,2)", CORRECT, []),
    (r"\{5\}", "5", CORRECT, []),
    ("1,000", "1000", CORRECT, []),
    ("1,000", "1, 000", CORRECT, []),
    ("1000", "1, 000", WRONG, []),
    ("1:2", "0.5", CORRECT, []),
    ("0.5", "1:2", CORRECT, []),
    ("1:2:3", "0.5", WRONG, []),
    (r"5\%", "0.05", CORRECT, []),
    ("0.05", r"5\%", CORRECT, []),
    (r"5\%", r"500\%", WRONG, []),
    ("52_8", "052_8", CORRECT, []),
    ("52_8", "52_{10}", WRONG, []),
    (r"5\text{ cents}", r"\$5", WRONG, []),
    ("B", "(b)", CORRECT, []),
    ("b", "c", WRONG, [("b", "c")]),
    ("b", "B", CORRECT, [("b", "B")]),
    (r"\text{Evelyn}", "evelyn", CORRECT, []),
    (r"\text{Evelyn}", "nylevE", WRONG, []),
    (r"\text{none}", "xy", WRONG, []),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "(1,2)", CORRECT, []),
    ("(1,2)", r"\begin{pmatrix} 1 & 2 \end{pmatrix}", CORRECT, []),
    ("(1,2)", r"\begin{pmatrix} 1 & 2 \\ 1 & 2 \end{pmatrix}", WRONG, []),
    ("[1,2]", r"\begin{pmatrix} 1 & 2 \end{pmatrix}", WRONG, []),
    (r"\begin{pmatrix} 1 & 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", WRONG, []),
    ("(1,2", "(1,2", CORRECT, []),
    ("(1,2", "(1,2)", UNPARSEABLE, []),
    ("1", "", UNPARSEABLE, []),
    ("", "", UNPARSEABLE, []),
]


@pytest.mark.parametrize(("gold", "answer", "verdict", "asked"), CASES)
def test_what_is_compared(gold: str, answer: str, verdict: Verdict, asked: list[tuple[str, str]]) -> None:
    judge = Judge()
    assert compare(gold, answer, judge) is verdict
    assert judge.asked == asked


@pytest.mark.parametrize(
    ("largest", "too_large"),
    [
        ("x" * MAX_CHARACTERS, "x" * (MAX_CHARACTERS + 1)),
        ("9" * MAX_DIGITS, "9" * (MAX_DIGITS + 1)),
        ("(" * MAX_NESTING + "5" + ")" * MAX_NESTING, "(" * (MAX_NESTING + 1) + "5" + ")" * (MAX_NESTING + 1)),
        ("[" * MAX_NESTING + "5" + "]" * MAX_NESTING, "[({" * MAX_NESTING + "5" + "})]" * MAX_NESTING),
    ],
    ids=["characters", "digits", "brackets", "all brackets"],
)
def test_the_bounds(largest: str, too_large: str) -> None:
    assert compare("1", largest, Judge()) is WRONG
    assert compare("1", too_large, Judge()) is UNPARSEABLE
    assert compare(too_large, "1", Judge()) is UNPARSEABLE
