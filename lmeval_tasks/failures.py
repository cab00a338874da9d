"""How a response breaks down: it loops, or it ends in garbage.

The two rules and their bounds are those of VaSE's ``analyze_completions.py`` (arXiv 2606.03928, MIT). Two
differences: a loop may run over line breaks, so that a repeated line counts; and one character must fill
more than half of 200 characters rather than of a shorter text, so that the answer "7" is no garbage. The
two are independent of each other here, where the original counts a text with both as garbage alone.

Only the tail of a text is looked at, so a text of any length takes the same, short time.
"""

from __future__ import annotations

import re
from collections import Counter

_LOOP_TAIL, _FOREIGN_TAIL, _CHARACTER_TAIL = 500, 100, 200
_FOREIGN_LIMIT = 30
_LOOP = re.compile(r"(.{10,40})\1{4}", re.DOTALL)


def looped(text: str) -> bool:
    """Whether the last 500 characters hold a span of 10 to 40 characters five times in a row.

    A shorter phrase counts once its multiples fill such spans; a longer one, such as a whole
    paragraph, is not seen.
    """
    return _LOOP.search(text[-_LOOP_TAIL:]) is not None


def garbage(text: str) -> bool:
    """Whether the text ends in a flood.

    Either more than 30 of the last 100 characters are not ASCII, which a response in another script
    than Latin is too; or one character makes up more than 100 of the last 200.
    """
    foreign = sum(not character.isascii() for character in text[-_FOREIGN_TAIL:])
    counts = Counter(text[-_CHARACTER_TAIL:])
    return foreign > _FOREIGN_LIMIT or max(counts.values(), default=0) > _CHARACTER_TAIL // 2
