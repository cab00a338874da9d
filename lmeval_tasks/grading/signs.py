"""Mathematical signs of Unicode, as LaTeX."""

from __future__ import annotations

import re
import unicodedata

_SAME = {
    "-": "\u2212\u2010\u2011\u2012\u2013\u2014",
    "$": "\u20ac\u00a3\u00a5\u20b9",
    "'": "\u2018\u2019\u2032",
    '"': "\u201c\u201d\u00ab\u00bb",
    "(": "\u27e8\u2329",
    ")": "\u27e9\u232a",
    r"\cdot": "\u00b7\u22c5\u2219\u2022\u2217",
    r"\times": "\u00d7",
    r"\div": "\u00f7",
    r"\le": "\u2264\u2a7d",
    r"\ge": "\u2265\u2a7e",
    r"\ne": "\u2260",
    r"\approx": "\u2248",
    r"\pm": "\u00b1",
    r"\mp": "\u2213",
    r"\infty": "\u221e",
    r"\cup": "\u222a",
    r"\cap": "\u2229",
    r"\in": "\u2208",
    r"\setminus": "\u2216",
    r"\varnothing": "\u2205",
    r"\mathbb{R}": "\u211d",
    r"\sqrt": "\u221a",
    r"^\circ": "\u00b0\u00ba",
    r"\text{cents}": "\u00a2",
}
_GREEK = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho varsigma sigma tau"
_LATEX = {
    **{sign: f"{latex} " if latex[-1].isalpha() else latex for latex, signs in _SAME.items() for sign in signs},
    **{
        chr(0x3B1 + i): rf"\{name} "
        for i, name in enumerate([*_GREEK.split(), "upsilon", "phi", "chi", "psi", "omega"])
    },
    "\u0394": r"\Delta ",
    "\u03a9": r"\Omega ",
}
_RAISED = dict(
    zip("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b\u207f", "0123456789+-n", strict=True)
)
_LOWERED = dict(
    zip("\u2080\u2081\u2082\u2083\u2084\u2085\u2086\u2087\u2088\u2089\u208a\u208b\u2099", "0123456789+-n", strict=True)
)
_SCRIPTS = re.compile(rf"(?P<raised>[{''.join(_RAISED)}]+)|(?P<lowered>[{''.join(_LOWERED)}]+)")


def latex_signs(text: str) -> str:
    """`text` with mathematical signs as LaTeX commands, other variants of ASCII as ASCII, and nothing invisible."""
    if text.isascii():
        return text
    text = _SCRIPTS.sub(_script, text)
    return "".join(_LATEX.get(character) or _plain(character) for character in text)


def _script(match: re.Match[str]) -> str:
    mark, signs = ("^", _RAISED) if match["raised"] else ("_", _LOWERED)
    inside = "".join(signs[sign] for sign in match[0])
    return f"{mark}{inside}" if len(inside) == 1 else f"{mark}{{{inside}}}"


def _plain(character: str) -> str:
    if unicodedata.category(character) == "Cf":
        return ""
    plain = unicodedata.normalize("NFKC", character)
    above, slash, below = plain.partition("\N{FRACTION SLASH}")
    return rf"\frac{{{above}}}{{{below}}}" if slash and above and below else plain
