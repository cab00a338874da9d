"""Read equations and inequalities."""

from __future__ import annotations

import re
from collections.abc import Callable

from kvpolicy.lmeval_tasks.grading.bounds import Unreadable
from kvpolicy.lmeval_tasks.grading.nodes import (
    INFINITY,
    MINUS_INFINITY,
    UNION,
    Equation,
    Inequality,
    Items,
    Leaf,
    Node,
    Words,
    interval,
)
from kvpolicy.lmeval_tasks.grading.splitting import Split

COMPARED = frozenset(("=", "<", ">", r"\le", r"\ge", r"\ne", r"\in", r"\approx"))
_UPWARD, _DOWNWARD = frozenset(("<", r"\le")), frozenset((">", r"\ge"))
_SYMBOL = re.compile(r"(?:\\[A-Za-z]+|[A-Za-z])\s*(?:_\{[^{}]*\})?'*")
_POLYNOMIAL = re.compile(r"[0-9].*(?<!\A)[+-]|(?<!\A)[+-].*[0-9]")
_CONSTANTS = frozenset((r"\pi", r"\infty", "e", r"\varnothing"))


def is_symbol(node: Node) -> bool:
    """Whether a node is a variable, or a tuple or list of variables."""
    if isinstance(node, Items):
        return all(map(is_symbol, node.items))
    return isinstance(node, Leaf) and node.text not in _CONSTANTS and _SYMBOL.fullmatch(node.text) is not None


def names_a_value(equation: Equation) -> bool:
    """Whether the right side of an equation may be an answer of its own: not the zero of ``5x - 7y + 4 = 0``."""
    left, right = equation.left, equation.right
    is_zero = isinstance(right, Leaf) and right.text == "0"
    return not (is_zero and isinstance(left, Leaf) and _POLYNOMIAL.search(left.text))


def related(sides: Split, read: Callable[[str], Node]) -> Node:
    """The node of parts with relations between them.

    Of ``a = b ≈ c`` the approximation is left out, ``x ≈ c`` is taken for an equation, and what stands to the
    left of an equation in words is a label.

    Raises
    ------
    Unreadable
        If the relations are of kinds that do not go together.
    """
    parts, relations = list(sides.parts), list(sides.separators)
    if r"\approx" in relations:
        exact = relations.index(r"\approx")
        if exact == 0 and (not parts[0] or is_symbol(read(parts[0]))):
            relations[0] = "="
        else:
            parts, relations = parts[: exact + 1], relations[:exact]
    if not relations:
        return read(parts[0])
    kinds = set(relations)
    if kinds == {"="}:
        return _equation(parts, read)
    nodes = [read(part) for part in parts]
    if kinds == {r"\in"} and len(nodes) == 2 and is_symbol(nodes[0]):
        return nodes[1]
    if kinds == {r"\ne"} and len(nodes) == 2 and is_symbol(nodes[0]):
        below = interval("(", MINUS_INFINITY, nodes[1], ")")
        return Items(UNION, UNION, (below, interval("(", nodes[1], INFINITY, ")")))
    if kinds <= _UPWARD:
        return _inequality(relations, nodes)
    if kinds <= _DOWNWARD:
        upward = ["<" if relation == ">" else r"\le" for relation in reversed(relations)]
        return _inequality(upward, nodes[::-1])
    raise Unreadable("relations that do not go together")


def _equation(parts: list[str], read: Callable[[str], Node]) -> Node:
    right = read(parts[-1])
    if not parts[0]:  # "= 5"
        return right
    left = read(parts[0])
    if isinstance(left, Words):
        return right
    return Equation(right, left) if is_symbol(right) and not is_symbol(left) else Equation(left, right)


def _has_variable(node: Node) -> bool:
    return not isinstance(node, Leaf) or re.search("[A-Za-df-z]", re.sub(r"\\[A-Za-z]+", "", node.text)) is not None


def _inequality(relations: list[str], nodes: list[Node]) -> Node:
    symbols = [is_symbol(node) for node in nodes]
    if len(nodes) == 3 and symbols[1]:
        low, _, high = nodes
        return interval("(" if relations[0] == "<" else "[", low, high, ")" if relations[1] == "<" else "]")
    if len(nodes) != 2 or any(_has_variable(node) for node, symbol in zip(nodes, symbols, strict=True) if not symbol):
        return Inequality(tuple(relations), tuple(nodes))
    if symbols == [True, False]:
        return interval("(", MINUS_INFINITY, nodes[1], ")" if relations[0] == "<" else "]")
    if symbols == [False, True]:
        return interval("(" if relations[0] == "<" else "[", nodes[0], INFINITY, ")")
    return Inequality(tuple(relations), tuple(nodes))
