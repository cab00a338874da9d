"""Bring the LaTeX (or plain text) of an answer into one spelling.

Only spelling: sizes, spaces, synonyms, Unicode signs, missing braces. What the answer means is read in
:mod:`kvpolicy.lmeval_tasks.grading.structure`. Words, which are units, names or labels, come out in quotation marks:
``15\\mbox{ cm}^2`` as ``15 "cm"^{2}``.
"""

from __future__ import annotations

import re

from kvpolicy.lmeval_tasks.grading.arguments import with_braces
from kvpolicy.lmeval_tasks.grading.signs import latex_signs
from kvpolicy.lmeval_tasks.grading.words import bare_word, text_group

_MATRIX = re.compile(r"\\begin|&")
_NO_DELIMITER = re.compile(r"\\(?:left|right)\s*\.")
_COLOUR = re.compile(r"\\(?:text)?color\s*\{[a-zA-Z]*\}")
_ROW_HEIGHT = re.compile(r"\\\\\[[0-9.]+(?:pt|em|ex|mm)\]")
_UPRIGHT = r"\s*\\(?:text|mbox|mathrm)\s*\{[A-Za-z ]+\}\s*"
_UNIT_FRACTION = re.compile(rf"\\[dt]?frac\{{{_UPRIGHT}\}}\{{{_UPRIGHT}\}}")
_TEXT_GROUP = re.compile(
    r"\\(?P<command>text(?:[a-z]{2}|normal)?|[mh]box|math(?:rm|bf|it|sf|tt)|boldsymbol|bm|emph|operatorname\*?)"
    r"\s*\{(?P<content>[^{}]*)\}|\{\\(?P<old>rm|bf|it)\s+(?P<inside>[^{}]*)\}"
)
# 1{,}234 and 1\,234 and 1,\!234; a comma or space alone may as well separate a list.
_THOUSANDS = re.compile(r"(?<![0-9.])[0-9]{1,3}(?:(?:\{,\}|\\[,;: ]|~|,?\\!\s*,?)\s*[0-9]{3})+(?![0-9])")
_DECIMAL_COMMA = re.compile(r"(?<=[0-9])\{,\}(?=[0-9])")
_COMMAND = re.compile(r"\\(?:([A-Za-z]+)\s*|(.))", re.DOTALL)
_WORD = re.compile(
    r"(\"[^\"]*\"|\\[A-Za-z]+|\\begin\{[a-z]*\}|\\end\{[a-z]*\}|\{[clr|]+\})|([^\W\d_]{2,}|[^\W\d_A-Za-z])"
)
_SPACE = re.compile(r"\s+")

_SIZES_AND_SPACES = (
    "left right middle big Big bigg Bigg bigl bigr bigm Bigl Bigr Bigm biggl biggr Biggl Biggr displaystyle textstyle "
    "scriptstyle limits nolimits quad qquad enspace thinspace medspace thickspace negthinspace hfill boxed fbox "
    "rm bf it mathrm mathbf mathit boldsymbol bm text textbf textit textrm underline mathstrut strut"
)
_DROPPED = frozenset(_SIZES_AND_SPACES.split())
_RENAMED = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac"), r"\frac"),
    **dict.fromkeys(("dbinom", "tbinom"), r"\binom"),
    **dict.fromkeys(("leq", "leqslant"), r"\le"),
    **dict.fromkeys(("geq", "geqslant"), r"\ge"),
    **dict.fromkeys(("lvert", "rvert", "vert", "mid"), "|"),
    **dict.fromkeys(("land", "lor"), ","),
    **{"neq": r"\ne", "lt": "<", "gt": ">", "lbrace": r"\{", "rbrace": r"\}", "lbrack": "[", "rbrack": "]"},
    **{"langle": "(", "rangle": ")", "lparen": "(", "rparen": ")", "degree": r"^\circ", "infin": r"\infty"},
    **{"emptyset": r"\varnothing", "ast": "*", "colon": ":", "R": r"\mathbb{R}", "cdotp": r"\cdot"},
    **dict.fromkeys(("textdollar", "pounds", "euro"), '"dollars"'),
}
_ESCAPED = {**dict.fromkeys(" ,;:", " "), **dict.fromkeys("!()[]", ""), "$": ' "dollars" ', "%": "%", "\\": r"\\ "}
_RELATIONS = {"<=": r"\le ", ">=": r"\ge ", "!=": r"\ne ", "**": "^", "~": " ", "`": "", "$": ""}
_RELATION = re.compile("|".join(map(re.escape, _RELATIONS)))


def canonical(text: str) -> str:
    """`text` in the one spelling that the rest of the grader reads.

    Raises
    ------
    Unreadable
        If braces do not match.
    """
    text = latex_signs(text).replace('"', "").strip()
    if text.startswith("**") and text.endswith("**"):
        text = text[2:-2]
    if not _MATRIX.search(text):
        text = re.sub(r"\\\\(?=[A-Za-z{}])", r"\\", text)
    text = _ROW_HEIGHT.sub(r"\\\\ ", _NO_DELIMITER.sub(" ", _COLOUR.sub("", text)))
    text = _THOUSANDS.sub(lambda match: re.sub("[^0-9]", "", match[0]), text)
    text = _DECIMAL_COMMA.sub(".", text)
    text = _UNIT_FRACTION.sub(' "per" ', text)
    for _ in range(3):
        text = _TEXT_GROUP.sub(text_group, text)
    text = _COMMAND.sub(_command, text)
    text = _RELATION.sub(lambda match: _RELATIONS[match[0]], text)
    text = _WORD.sub(lambda match: match[1] or bare_word(match[2], match.string[: match.start()]), text)
    text = _SPACE.sub(" ", with_braces(_SPACE.sub(" ", text)))
    return text.strip().rstrip(" .,;")


def _command(match: re.Match[str]) -> str:
    name, escaped = match.groups()
    if escaped is not None:
        return _ESCAPED.get(escaped, match[0])
    spelled = " " if name in _DROPPED else _RENAMED.get(name, rf"\{name}")
    return spelled + " " * match.string[match.end() : match.end() + 1].isalpha()
