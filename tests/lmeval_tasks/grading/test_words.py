from __future__ import annotations

import pytest

from kvpolicy.lmeval_tasks.grading.words import letter_in, measured, name_in, quote_bare_words


@pytest.mark.parametrize(
    ("text", "quantity", "words"),
    [
        ('15 "cm"^{2}', "15", {"cm"}),
        ('60 "km"/"h"', "60", {"km", "h"}),
        ('"Area" 5', "5", {"area"}),
        ('30 "p.m."', "30", {"pm"}),
        (r"30^\circ", "30", {"degrees"}),
        (r"30^\circ C", "30", {"degrees"}),
        (r"\sin 30^\circ", r"\sin 30^\circ", set()),
        ('6^{"th"}', "6", {"th"}),
        ("6^{th}", "6", {"th"}),
        ('"Evelyn"', '"Evelyn"', set()),
        ('"xyz"+5', '"xyz"+5', set()),
        ('5 "ft" 3', '5 "ft" 3', set()),
        ("5x", "5x", set()),
    ],
)
def test_words_around_a_quantity(text: str, quantity: str, words: set[str]) -> None:
    assert measured(text) == (quantity, words)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('"Evelyn"', "evelyn"),
        ('"the ellipse."', "ellipse"),
        ("no solution", r"\varnothing"),
        ("There are no real solutions", r"\varnothing"),
        ("all real numbers", r"\mathbb{R}"),
        ("x", None),
        ("x y", None),
        ("5 eggs", None),
        ("", None),
        (r"\pi", None),
    ],
)
def test_name(text: str, name: str | None) -> None:
    assert name_in(text) == name


@pytest.mark.parametrize(
    ("text", "alone", "with_text"),
    [
        ("B", "B", "B"),
        ("(B)", "B", "B"),
        ("b", "B", "B"),
        ("B.", "B", "B"),
        ('"Option B"', "B", "B"),
        ("answer: B", "B", "B"),
        ("(B) 15", None, "B"),
        ("B) 15 m", None, "B"),
        ("B. x", None, "B"),
        ("(B)(C)", None, None),
        ("BC", None, None),
        ("B 15", None, None),
        ("", None, None),
    ],
)
def test_letter_of_a_choice(text: str, alone: str | None, with_text: str | None) -> None:
    assert letter_in(text) == alone
    assert letter_in(text, with_text=True) == with_text


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("18 eggs per day", '18 "eggs" "per" "day"'),
        ("18eggs", '18"eggs"'),
        ('Janet makes 18 "dollars"', '"Janet" "makes" 18 "dollars"'),
        ('"no one is" 18', '"no one is" 18'),
        ("18 ab", "18 ab"),
        ("xyz + 18", "xyz + 18"),
        ("18 + xyz", "18 + xyz"),
        ("xyz = 18", "xyz = 18"),
        (r"\frac{abc}{2}", r"\frac{abc}{2}"),
        (r"\begin{pmatrix}1\end{pmatrix}", r"\begin{pmatrix}1\end{pmatrix}"),
    ],
)
def test_bare_words_around_a_number(text: str, quoted: str) -> None:
    assert quote_bare_words(text) == quoted
