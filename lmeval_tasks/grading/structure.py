"""Read what an answer is: an expression, a list, a tuple or interval, a union, a matrix, an equation, words.

Only expressions are left to math-verify. Of the rest it would take (1, 2) for {1, 2}, 1:2 for 1/2, and
``n = 2, 3, 4`` for ``n = 1, 2, 3``.
"""

from __future__ import annotations

import re

from kvpolicy.lmeval_tasks.grading.bounds import Unreadable
from kvpolicy.lmeval_tasks.grading.nodes import EMPTY_SET, REALS, UNION, Items, Leaf, Matrix, Node, Words, unordered
from kvpolicy.lmeval_tasks.grading.relations import COMPARED, related
from kvpolicy.lmeval_tasks.grading.splitting import bracketed, split
from kvpolicy.lmeval_tasks.grading.words import measured, name_in

_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_SPACED_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?")
_MATRIX = re.compile(
    r"[(\[]?\s*\\begin ?\{(?P<kind>[bpBV]?matrix|smallmatrix|array)\}(?:\{[clr| ]*\})?(?P<cells>.*)"
    r"\\end ?\{(?P=kind)\}\s*[)\]]?",
    re.DOTALL,
)
_BASE = re.compile(r"\(?([0-9A-Z]+)\)?\s*_\{\s*\(?\"?([0-9]+|[a-z]+)\"?\)?\s*\}")
_BASES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_MAX_SIGNS = 3


def read(text: str) -> Node:
    """The structure of a text in canonical spelling.

    Raises
    ------
    Unreadable
        If it is empty, its brackets do not match, or it has too many ± signs.
    """
    text = text.strip()
    if not text:
        raise Unreadable("nothing")
    if text[0] == "]" or text[-1] == "[":  # open ends, as written in France
        text = ("(" if text[0] == "]" else text[0]) + text[1:-1] + (")" if text[-1] == "[" else text[-1])
    parts = [part for part in split(text, {",", ";"}).parts if part]
    if len(parts) > 1:
        listed, plain = unordered([read(part) for part in parts]), measured(text)
        if _THOUSANDS.fullmatch(plain.quantity):
            return Leaf(plain.quantity.replace(",", ""), plain.words, listed=listed)
        return listed
    sides = split(text, COMPARED)
    if sides.separators:
        return related(sides, read)
    parts = split(text, {r"\cup"}).parts
    if len(parts) > 1:
        return Items(UNION, UNION, tuple(map(read, parts)))
    return _brackets(text) or _matrix(text) or _ratio(text) or _signs(text) or _leaf(text)


def _brackets(text: str) -> Node | None:
    found = bracketed(text)
    if found is None:
        return None
    opens, inside, closes = found
    if opens == "{":
        return read(inside)
    if opens == r"\{":
        if not inside:
            return EMPTY_SET
        condition = split(inside, {"|", ":"}).parts
        return read(condition[1]) if len(condition) == 2 else unordered([read(inside)])
    parts = split(inside, {",", ";"}).parts
    if len(parts) == 1 and (opens == "(") == (closes == ")"):
        return read(inside)
    return Items(opens, closes, tuple(map(read, parts)))


def _matrix(text: str) -> Matrix | None:
    match = _MATRIX.fullmatch(text)
    if match is None:
        return None
    lines = [row for row in split(match["cells"], {"\\\\"}).parts if row and row != r"\hline"]
    rows = tuple(tuple(read(cell) for cell in split(row, {"&"}).parts) for row in lines)
    body = r" \\ ".join(lines)
    return Matrix(rows, rf"\begin{{pmatrix}}{body}\end{{pmatrix}}")


def _ratio(text: str) -> Node | None:
    parts = split(text, {":"}).parts
    if len(parts) == 1:
        return None
    nodes = tuple(map(read, parts))
    return nodes[1] if len(nodes) == 2 and isinstance(nodes[0], Words) else Items(":", ":", nodes)


def _signs(text: str) -> Node | None:
    tokens = re.findall(r"\\[pm][mp](?![A-Za-z])", text)
    if not tokens:
        return None
    if len(tokens) > _MAX_SIGNS:
        raise Unreadable(f"more than {_MAX_SIGNS} signs ±")
    if r"\mp" in tokens:  # the signs go together
        upper, lower = text.replace(r"\pm", "+").replace(r"\mp", "-"), text.replace(r"\pm", "-").replace(r"\mp", "+")
        return unordered([read(upper), read(lower)])
    return unordered([read(text.replace(r"\pm", sign, 1)) for sign in "+-"])


def _leaf(text: str) -> Node:
    name = name_in(text)
    if name == EMPTY_SET.text:
        return EMPTY_SET
    if r"\mathbb{R}" in (name, text):
        return REALS
    if name is not None and '"' in text:
        return Words(name)
    quantity, words = measured(text)
    percent = quantity.endswith("%")
    quantity = quantity.rstrip("% ").removeprefix("+").strip()
    if _SPACED_THOUSANDS.fullmatch(quantity):
        quantity = quantity.replace(" ", "")
    if match := _BASE.fullmatch(quantity):
        base = match[2]
        return Leaf(match[1].lstrip("0"), words, base=str(2 + _BASES.index(base)) if base in _BASES else base)
    if '"' in quantity or not quantity:
        raise Unreadable("words within an expression")
    return Leaf(quantity, words, percent)
