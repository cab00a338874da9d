"""Compare the structures of two answers; expressions within them are put to a judge."""

from __future__ import annotations

import re
from typing import Protocol

from kvpolicy.lmeval_tasks.grading.bounds import Unreadable, check
from kvpolicy.lmeval_tasks.grading.latex import canonical
from kvpolicy.lmeval_tasks.grading.nodes import (
    INFINITY,
    MINUS_INFINITY,
    Equation,
    Inequality,
    Items,
    Leaf,
    Matrix,
    Node,
    Words,
)
from kvpolicy.lmeval_tasks.grading.number import number
from kvpolicy.lmeval_tasks.grading.relations import is_symbol, names_a_value
from kvpolicy.lmeval_tasks.grading.structure import read
from kvpolicy.lmeval_tasks.grading.units import opposed
from kvpolicy.lmeval_tasks.grading.verdict import Verdict
from kvpolicy.lmeval_tasks.grading.words import letter_in, name_in, quote_bare_words

# Without meaning: not between letters or digits, nor after a comma, where it tells a list from a number.
_SPACE = re.compile(r"(?<![0-9A-Za-z,]) +| +(?![0-9A-Za-z])")


class Judge(Protocol):
    """Compares expressions, all in canonical spelling. Each method raises `Unreadable` if it cannot read one."""

    def expressions(self, gold: str, answer: str) -> bool:
        """Whether two expressions are equal."""
        ...

    def relations(self, gold: tuple[str, str], answer: tuple[str, str], *, inequality: bool) -> bool:
        """Whether left and right of two equations, or of two inequalities left < right, say the same."""
        ...


def compare(gold: str, answer: str, judge: Judge) -> Verdict:
    """The verdict on the text of an answer.

    `UNPARSEABLE` if the answer or the gold answer cannot be read, unless they are spelled alike.
    """
    try:
        for text in (gold, answer):
            check(text)
        gold, answer = canonical(gold), canonical(answer)
        if gold and _SPACE.sub("", gold) == _SPACE.sub("", answer):
            return Verdict.CORRECT
        if (letter := letter_in(gold)) and letter in gold and letter_in(answer, with_text=True) == letter:
            return Verdict.CORRECT
        wanted = read(gold)
        if isinstance(wanted, Leaf) and number(wanted.text) is not None:
            answer = quote_bare_words(answer)
        return Verdict.CORRECT if _equal(wanted, read(answer), judge) else Verdict.WRONG
    except Unreadable:
        return Verdict.UNPARSEABLE


def _equal(gold: Node, answer: Node, judge: Judge) -> bool:
    gold, answer = _in_one_form(gold, answer)
    if gold == answer:
        return True
    match gold, answer:
        case (Words(), _) | (_, Words()):
            return _name(gold) is not None and _name(gold) == _name(answer)
        case Leaf(), Leaf():
            return _equal_leaves(gold, answer, judge)
        case Equation(), Equation():
            return _equal_equations(gold, answer, judge)
        case Inequality(), Inequality():
            return _equal_inequalities(gold, answer, judge)
        case Items(), Items():
            return _equal_items(gold, answer, judge)
        case Matrix(), Matrix():
            return len(gold.rows) == len(answer.rows) and all(
                _all_equal(*rows, judge) for rows in zip(gold.rows, answer.rows, strict=True)
            )
        case Matrix(), Items(opens="("):
            return _all_equal(_vector(gold), answer.items, judge)
        case Items(opens="("), Matrix():
            return _all_equal(gold.items, _vector(answer), judge)
        case (Matrix(text=wanted), Leaf(text=given)) | (Leaf(text=wanted), Matrix(text=given)):
            return judge.expressions(wanted, given)
        case Leaf(listed=Items() as listed), Items(opens="{"):
            return _equal(listed, answer, judge)
        case Items(opens="{"), Leaf(listed=Items() as listed):
            return _equal(gold, listed, judge)
        case Leaf(), Items():
            ratio = _as_expression(answer)
            return ratio is not None and _equal(gold, ratio, judge)
        case Items(), Leaf():
            ratio = _as_expression(gold)
            return ratio is not None and _equal(ratio, answer, judge)
    return False


def _in_one_form(gold: Node, answer: Node) -> tuple[Node, Node]:
    """A set of one is its element, and ``x = 5`` is 5 where the other is no equation."""
    gold, answer = _only_element(gold), _only_element(answer)
    if isinstance(answer, Equation) and not isinstance(gold, Equation) and names_a_value(answer):
        return _in_one_form(gold, answer.right)
    if isinstance(gold, Equation) and not isinstance(answer, Equation) and is_symbol(gold.left):
        return _in_one_form(gold.right, answer)
    if isinstance(gold, Items) and isinstance(answer, Items) and gold.ordered != answer.ordered:
        return _ordered(gold), _ordered(answer)
    return gold, answer


def _only_element(node: Node) -> Node:
    return node.items[0] if isinstance(node, Items) and node.opens == "{" and len(node.items) == 1 else node


def _ordered(node: Items) -> Items:
    """A list ``x = 1, y = 2`` of different variables as the tuple (1, 2), and ``x > 1, x < 2`` as an interval."""
    match node:
        case Items(opens="{", items=(Items(items=(low, high)) as above, Items(items=(lower, higher)) as below)):
            if (high, lower) == (INFINITY, MINUS_INFINITY):
                return Items(above.opens, below.closes, (low, higher))
            if (higher, low) == (INFINITY, MINUS_INFINITY):
                return Items(below.opens, above.closes, (lower, high))
    equations = [item for item in node.items if isinstance(item, Equation) and is_symbol(item.left)]
    if node.ordered or len({item.left for item in equations}) < len(node.items):
        return node
    return Items("(", ")", tuple(item.right for item in equations))


def _name(node: Node) -> str | None:
    if isinstance(node, Words):
        return node.text
    return name_in(node.text) if isinstance(node, Leaf) else None


def _vector(matrix: Matrix) -> tuple[Node, ...]:
    """The cells of a matrix that is one row or one column; none of any other."""
    if len(matrix.rows) == 1:
        return matrix.rows[0]
    return tuple(row[0] for row in matrix.rows) if all(len(row) == 1 for row in matrix.rows) else ()


def _as_expression(ratio: Items) -> Leaf | None:
    """A ratio of two numbers as a fraction."""
    match ratio.opens, ratio.items:
        case ":", (Leaf(above), Leaf(below)):
            return Leaf(rf"\frac{{{above}}}{{{below}}}")
    return None


def _all_equal(gold: tuple[Node, ...], answer: tuple[Node, ...], judge: Judge) -> bool:
    return len(gold) == len(answer) and all(_equal(*pair, judge) for pair in zip(gold, answer, strict=True))


def _equal_items(gold: Items, answer: Items, judge: Judge) -> bool:
    if gold.ordered or answer.ordered:
        same_brackets = (gold.opens, gold.closes) == (answer.opens, answer.closes)
        return same_brackets and _all_equal(gold.items, answer.items, judge)
    left = list(answer.items)
    if len(left) != len(gold.items):
        return False
    for wanted in gold.items:
        found = next((place for place, item in enumerate(left) if _equal(wanted, item, judge)), None)
        if found is None:
            return False
        del left[found]
    return True


def _equal_leaves(gold: Leaf, answer: Leaf, judge: Judge) -> bool:
    if opposed(gold.words, answer.words):
        return False
    if gold.base or answer.base:  # without a base, the digits are in the one that the problem asks for
        same_base = gold.base is None or answer.base is None or gold.base == answer.base
        return same_base and gold.text.lstrip("0") == answer.text.lstrip("0")
    if _same_expression(gold.text, answer.text, judge):
        return True
    if gold.percent == answer.percent:
        return False
    wanted, given = (rf"\frac{{{leaf.text}}}{{100}}" if leaf.percent else leaf.text for leaf in (gold, answer))
    return _same_expression(wanted, given, judge)


def _same_expression(gold: str, answer: str, judge: Judge) -> bool:
    if gold == answer:
        return True
    numbers = number(gold), number(answer)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return judge.expressions(gold, answer)


def _equal_equations(gold: Equation, answer: Equation, judge: Judge) -> bool:
    if gold.left == answer.left:
        return _equal(gold.right, answer.right, judge)
    match gold, answer:
        case Equation(Leaf(), Leaf()), Equation(Leaf(), Leaf()):
            return judge.relations(_sides(gold.left, gold.right), _sides(answer.left, answer.right), inequality=False)
    return _equal(gold.left, answer.left, judge) and _equal(gold.right, answer.right, judge)


def _equal_inequalities(gold: Inequality, answer: Inequality, judge: Judge) -> bool:
    if gold.relations != answer.relations:
        return False
    match gold.parts, answer.parts:
        case (Leaf(), Leaf()), (Leaf(), Leaf()):
            return judge.relations(_sides(*gold.parts), _sides(*answer.parts), inequality=True)
    return _all_equal(gold.parts, answer.parts, judge)


def _sides(left: Node, right: Node) -> tuple[str, str]:
    if not isinstance(left, Leaf) or not isinstance(right, Leaf):
        raise Unreadable("a relation between things that are no expressions")
    return left.text, right.text
