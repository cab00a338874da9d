"""The words of an answer: units and labels, which say nothing new, and names, which are the answer.

They are read at two points: while an answer is spelled (:func:`text_group`, :func:`bare_word`), and when its
parts are told from one another.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from kvpolicy.lmeval_tasks.grading.units import KNOWN

_FUNCTION_NAMES = (
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp gcd lcm max min det floor ceil"
)
FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
_SPELLED = {
    **{name: rf"\{name} " for name in FUNCTIONS},
    **{name: rf"\{name} " for name in ("sqrt", "pi", "theta", "alpha", "beta", "lambda", "infty")},
    **dict.fromkeys(("infinity", "Infinity", "inf"), r"\infty "),
    **dict.fromkeys(("and", "or"), " , "),
    "to": " : ",
    **dict.fromkeys(("percent", "percentage"), "% "),
}
_OF_WORDS = re.compile(r"(?:[^\W\d_]|[\s./'():,;-]|\^[23])+")
_LONE_LETTER = re.compile(r"[\s.,:()]*([A-Za-z])[\s.,:()]*")
_AFTER_QUANTITY = re.compile(r"[0-9})\"]\s*(?:\\[,;: ]|~|/)?\s*$")
_UPRIGHT = ("text", "mbox", "hbox", "mathrm", "textrm", "rm")

_QUOTED = r'"[^"]*"(?:\s*\^\{-?[0-9]\})?'
_TAIL = re.compile(rf"(?:\s*(?:/|\\cdot|\\times)?\s*{_QUOTED}|\^\{{\s*\"?(?:st|nd|rd|th)\"?\s*\}})+\s*$")
_HEAD = re.compile(rf"^\s*(?:{_QUOTED}\s*)++(?![+*/^_=])")
# No part of a sum or product of variables: "18 eggs per day", but not "xyz + 18".
_QUOTED_OR_BARE = re.compile(
    r"(\"[^\"]*\")|(?<![-+*/^=A-Za-z\\{])(?<![-+*/^=]\s)([A-Za-z]{3,}+)(?=[\s:.,]|$)(?!\s*[-+*/^=])"
)
_DEGREES = re.compile(r"\s*\^\\circ\s*(?:[CF]|\"[CF]\")?\s*$")
_ANGLE_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_ARTICLES = re.compile(r"\b(?:the|an?)\b\s*")
_EMPTY_SET = re.compile(
    r"(?:there (?:is|are) )?no (?:real |integer |such )?(?:solutions?|values?|numbers?|integers?)|empty set"
)
_LETTER = re.compile(r"(?:option|choice|answer)?:?\s*\(?([A-Z])\)?[.:]?", re.IGNORECASE)
_LETTER_WITH_TEXT = re.compile(r"(?:option |choice |answer )?\s*(?:\(([A-Z])\)|([A-Z])[).:])\s+\S.*", re.DOTALL)


class Measured(NamedTuple):
    """A quantity and the words around it, in lower case."""

    quantity: str
    words: frozenset[str]


def text_group(match: re.Match[str]) -> str:
    """What ``\\text{…}`` and its like hold: words come out in quotation marks, anything else as it is."""
    command = match["command"] or match["old"]
    content = (match["content"] or match["inside"] or "").replace('"', "")
    word = content.strip()
    if word in _SPELLED:
        return _SPELLED[word]
    if word.startswith(("and ", "or ")):
        return " , " + text_group_of(word.partition(" ")[2])
    if not word or command.startswith(("mathbf", "mathit", "boldsymbol", "bm")):
        return f" {content} "
    if lone := _LONE_LETTER.fullmatch(word):
        unit = lone[1] in "mgslh" and command in _UPRIGHT and _AFTER_QUANTITY.search(match.string, 0, match.start())
        return f'"{lone[1]}"' if unit else f" {word} "
    return text_group_of(content)


def text_group_of(content: str) -> str:
    """Words in quotation marks, anything else as it is."""
    return f' "{content.strip()}"' if _OF_WORDS.fullmatch(content) else f" {content} "


def bare_word(word: str, before: str) -> str:
    """A run of letters outside of any command: a function, a unit, or a product of variables.

    before : the text before it; "km" is a unit behind a number, and k times m otherwise.
    """
    if word in _SPELLED:
        return _SPELLED[word]
    is_unit = word in KNOWN and (len(word) > 3 or _AFTER_QUANTITY.search(before))
    return f' "{word}" ' if is_unit or not word.isascii() else word


def quote_bare_words(text: str) -> str:
    """Mark what can only be words where the answer is known to be a number: ``18 eggs per day``."""
    return _QUOTED_OR_BARE.sub(lambda match: match[1] or f'"{match[2]}"', text)


def measured(text: str) -> Measured:
    """Take the words off a quantity; a text of words alone is left as it is."""
    words: list[str] = []
    rest = text
    for pattern in (_TAIL, _HEAD):
        if found := pattern.search(rest):
            words += re.findall(r"[^\W\d_]+", found[0].replace(".", ""))
            rest = rest[: found.start()] + rest[found.end() :]
    if not _ANGLE_FUNCTION.search(rest) and (found := _DEGREES.search(rest)):
        words.append("degrees")
        rest = rest[: found.start()]
    if not rest.strip():
        return Measured(text, frozenset())
    return Measured(rest.strip(), frozenset(word.lower() for word in words))


def name_in(text: str) -> str | None:
    """The words of a text that holds nothing else, in lower case and without articles; None if it does."""
    plain = re.sub(r"[\s\"'.()-]+", " ", text).strip().lower()
    if not re.fullmatch(r"[^\W\d_]+(?: [^\W\d_]+)*", plain) or max(map(len, plain.split())) < 2:
        return None
    plain = _ARTICLES.sub("", plain).strip()
    if _EMPTY_SET.fullmatch(plain):
        return r"\varnothing"
    return r"\mathbb{R}" if plain in ("all real numbers", "all reals") else plain


def letter_in(text: str, *, with_text: bool = False) -> str | None:
    """The letter of a multiple choice, also with the text of the choice behind it; None if there is none."""
    plain = text.replace('"', " ").strip()
    if match := _LETTER.fullmatch(plain):
        return match[1].upper()
    if with_text and (match := _LETTER_WITH_TEXT.fullmatch(plain)):
        return (match[1] or match[2]).upper()
    return None
