"""What an answer can be."""

from __future__ import annotations

from dataclasses import dataclass

UNION = "\N{UNION}"


@dataclass(frozen=True)
class Leaf:
    """An expression, in canonical spelling.

    words : the units and labels around it, which are not in `text`.
    percent : a percent sign stood behind it.
    base : the base that its digits are written in, if that was given.
    listed : what it is if its commas separate a list rather than thousands.
    """

    text: str
    words: frozenset[str] = frozenset()
    percent: bool = False
    base: str | None = None
    listed: Items | None = None


@dataclass(frozen=True)
class Words:
    """A name, a direction, a property."""

    text: str


@dataclass(frozen=True)
class Items:
    """Several values.

    `opens` and `closes` are the brackets of a tuple or interval. ``{`` and ``}`` also stand for a bare list, `UNION`
    for a union, ``:`` for a ratio or a time of day.
    """

    opens: str
    closes: str
    items: tuple[Node, ...]

    @property
    def ordered(self) -> bool:
        """Whether the order of the values counts."""
        return self.opens not in ("{", UNION)


@dataclass(frozen=True)
class Matrix:
    """Rows of cells, and the LaTeX that they were read from."""

    rows: tuple[tuple[Node, ...], ...]
    text: str


@dataclass(frozen=True)
class Equation:
    """``left = right``; of a chain of equations the first and the last part."""

    left: Node
    right: Node


@dataclass(frozen=True)
class Inequality:
    """Ascending parts with ``<`` or ``\\le`` between them, where that is no interval of one variable."""

    relations: tuple[str, ...]
    parts: tuple[Node, ...]


Node = Leaf | Words | Items | Matrix | Equation | Inequality

EMPTY_SET = Leaf(r"\varnothing")
INFINITY, MINUS_INFINITY = Leaf(r"\infty"), Leaf(r"-\infty")


def interval(opens: str, low: Node, high: Node, closes: str) -> Items:
    """An interval, with the brackets that say which ends belong to it."""
    return Items(opens, closes, (low, high))


REALS = interval("(", MINUS_INFINITY, INFINITY, ")")


def unordered(items: list[Node]) -> Items:
    """A list or set; what a ± stands for in it are values of their own."""
    flat: list[Node] = []
    for item in items:
        flat += item.items if isinstance(item, Items) and item.opens == "{" else [item]
    return Items("{", "}", tuple(flat))
